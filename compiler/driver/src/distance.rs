//! Distances of logits and vectors from those that are expected, relative to the largest expected magnitude.

/// The largest distance. NaN counts as infinitely wrong.
pub(crate) fn relative_error(found: &[f32], expected: &[f32], scale: f64) -> f64 {
    if found.len() != expected.len() {
        return f64::INFINITY;
    }
    let distance = found.iter().zip(expected).map(|(a, b)| (f64::from(*a) - f64::from(*b)).abs());
    let worst = distance.fold(0.0, |m: f64, d| if d.is_nan() { f64::INFINITY } else { m.max(d) });
    if scale > 0.0 { worst / scale } else { worst }
}

/// The root of the mean square distance. NaN counts as infinitely wrong.
pub(crate) fn rms_error(found: &[f32], expected: &[f32], scale: f64) -> f64 {
    if found.len() != expected.len() {
        return f64::INFINITY;
    }
    let squares = found.iter().zip(expected).map(|(a, b)| (f64::from(*a) - f64::from(*b)).powi(2));
    let rms = (squares.sum::<f64>() / found.len().max(1) as f64).sqrt();
    let rms = if scale > 0.0 { rms / scale } else { rms };
    if rms.is_nan() { f64::INFINITY } else { rms }
}

/// Mean and deviation of a row of logits.
pub(crate) fn moments(row: &[f32]) -> (f64, f64) {
    let n = row.len() as f64;
    let mean = row.iter().map(|&x| f64::from(x)).sum::<f64>() / n;
    let variance = row.iter().map(|&x| (f64::from(x) - mean).powi(2)).sum::<f64>() / n;
    (mean, variance.sqrt())
}

/// The largest distance of means and deviations of rows of logits. NaN counts as infinitely wrong.
pub(crate) fn moments_error(found: &[f32], expected: &[f32], vocab: usize, scale: f64) -> f64 {
    let rows = found.chunks(vocab.max(1)).zip(expected.chunks(vocab.max(1)));
    relative_moments(rows.map(|(a, b)| (moments(a), moments(b))), scale)
}

/// The largest distance of pairs, relative to `scale`.
pub(crate) fn relative_moments(pairs: impl Iterator<Item = ((f64, f64), (f64, f64))>, scale: f64) -> f64 {
    let off = |(a, b): ((f64, f64), (f64, f64))| {
        let (mean, deviation) = ((a.0 - b.0).abs(), (a.1 - b.1).abs());
        if mean.is_nan() || deviation.is_nan() { f64::INFINITY } else { mean.max(deviation) }
    };
    let worst = pairs.map(off).fold(0.0, f64::max);
    if scale > 0.0 { worst / scale } else { worst }
}

/// The largest magnitude.
pub(crate) fn max_abs(numbers: &[f32]) -> f64 {
    numbers.iter().fold(0f64, |most, x| most.max(f64::from(x.abs())))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn errors_are_relative_and_nan_is_wrong() {
        assert_eq!(relative_error(&[1.0, 2.5], &[1.0, 2.0], 2.0), 0.25);
        assert_eq!(relative_error(&[f32::NAN, 2.0], &[1.0, 2.0], 2.0), f64::INFINITY);
        assert_eq!(relative_error(&[1.0], &[1.0, 2.0], 2.0), f64::INFINITY);
        assert_eq!(rms_error(&[1.0, 4.0, 2.0, 2.0], &[1.0, 2.0, 2.0, 2.0], 2.0), 0.5);
        assert_eq!(rms_error(&[f32::NAN], &[1.0], 2.0), f64::INFINITY);
        assert_eq!(rms_error(&[1.0], &[1.0, 2.0], 2.0), f64::INFINITY);
        // The second row has mean 2 in place of 3, deviation 1 in place of 0.
        assert_eq!(moments_error(&[1.0, 1.0, 1.0, 3.0], &[1.0, 1.0, 3.0, 3.0], 2, 4.0), 0.25);
        assert_eq!(moments_error(&[f32::NAN, 1.0], &[1.0, 1.0], 2, 1.0), f64::INFINITY);
        assert_eq!(max_abs(&[1.0, -3.0]), 3.0);
    }
}
