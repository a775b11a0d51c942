//! Comparison of results with a reference, for tests and for `mlcc verify`.

use std::fmt;

/// The distance that a result may have from its reference:
/// `|got - want| <= absolute + relative * max |want|`.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Tolerance {
    pub absolute: f64,
    /// Relative to the largest magnitude in the reference, not to each element.
    pub relative: f64,
}

impl Tolerance {
    pub const EXACT: Tolerance = Tolerance { absolute: 0.0, relative: 0.0 };
    pub const fn relative(relative: f64) -> Tolerance {
        Tolerance { absolute: 0.0, relative }
    }
    pub const fn absolute(absolute: f64) -> Tolerance {
        Tolerance { absolute, relative: 0.0 }
    }
}

/// The distance between two arrays.
#[derive(Clone, PartialEq, Debug)]
pub struct ArrayDifference {
    /// Largest `|got - want|`; infinite where one side is NaN or infinite and the other differs.
    pub max_abs: f64,
    pub max_abs_at: usize,
    /// Largest finite `|want|`.
    pub scale: f64,
    /// First element outside of the tolerance: index, got, want.
    pub first: Option<(usize, f64, f64)>,
    /// Elements outside of the tolerance.
    pub count: usize,
    pub len: usize,
}

impl ArrayDifference {
    /// `max_abs / scale`, or `max_abs` if the reference is all zero.
    pub fn max_rel(&self) -> f64 {
        if self.scale > 0.0 { self.max_abs / self.scale } else { self.max_abs }
    }
}

impl fmt::Display for ArrayDifference {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "max |difference| {:.3e} at {} ({:.3e} of the largest reference value {:.3e})",
            self.max_abs,
            self.max_abs_at,
            self.max_rel(),
            self.scale
        )?;
        match self.first {
            Some((i, got, want)) => {
                write!(f, "; {} of {} outside, first at {i}: got {got}, want {want}", self.count, self.len)
            }
            None => Ok(()),
        }
    }
}

#[derive(Clone, PartialEq, Debug, thiserror::Error)]
pub enum ComparisonError {
    #[error("lengths differ: got {got} elements, want {want}")]
    Length { got: usize, want: usize },
    #[error("{0}")]
    Values(Box<ArrayDifference>),
}

/// Compares with a tolerance. NaN equals NaN, an infinity only itself. `Ok` carries the distance.
pub fn compare(
    got: impl IntoIterator<Item = impl Into<f64>>,
    want: impl IntoIterator<Item = impl Into<f64>>,
    tolerance: Tolerance,
) -> Result<ArrayDifference, ComparisonError> {
    let got: Vec<f64> = got.into_iter().map(Into::into).collect();
    let want: Vec<f64> = want.into_iter().map(Into::into).collect();
    if got.len() != want.len() {
        return Err(ComparisonError::Length { got: got.len(), want: want.len() });
    }
    let scale = want.iter().filter(|w| w.is_finite()).fold(0.0f64, |m, w| m.max(w.abs()));
    let limit = tolerance.absolute + tolerance.relative * scale;
    let mut d =
        ArrayDifference { max_abs: 0.0, max_abs_at: 0, scale, first: None, count: 0, len: want.len() };
    for (i, (&g, &w)) in got.iter().zip(&want).enumerate() {
        let equal = g == w || (g.is_nan() && w.is_nan());
        let distance = match (equal, g.is_finite() && w.is_finite()) {
            (true, _) => 0.0,
            (false, true) => (g - w).abs(),
            (false, false) => f64::INFINITY,
        };
        if distance > d.max_abs {
            (d.max_abs, d.max_abs_at) = (distance, i);
        }
        if distance > limit {
            d.count += 1;
            d.first.get_or_insert((i, g, w));
        }
    }
    if d.count == 0 { Ok(d) } else { Err(ComparisonError::Values(Box::new(d))) }
}

/// Compares two f32 arrays and panics with the difference: for tests.
#[track_caller]
pub fn assert_close(what: &str, got: &[f32], want: &[f32], tolerance: Tolerance) {
    if let Err(mismatch) = compare(got.iter().copied(), want.iter().copied(), tolerance) {
        panic!("{what}: {mismatch}");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reports_the_first_element_outside() {
        let want = [1.0f32, -4.0, 2.0];
        let close = compare([1.0f32, -4.001, 2.0], want, Tolerance::relative(1e-3)).unwrap();
        assert_eq!((close.max_abs_at, close.scale), (1, 4.0));
        let far = compare([1.0f32, -4.001, 2.1], want, Tolerance::absolute(1e-4)).unwrap_err();
        let ComparisonError::Values(d) = far else { panic!("{far}") };
        assert_eq!((d.count, d.first.map(|f| f.0), d.max_abs_at), (2, Some(1), 2));
    }

    #[test]
    fn nan_and_infinity_equal_only_themselves() {
        let odd = [f32::NAN, f32::INFINITY, f32::NEG_INFINITY];
        assert!(compare(odd, odd, Tolerance::EXACT).is_ok());
        assert!(compare([f32::NAN], [1.0f32], Tolerance::absolute(1e30)).is_err());
        assert!(compare([1.0f32], [f32::INFINITY], Tolerance::absolute(1e30)).is_err());
        assert!(compare([1.0f32], [1.0f32, 2.0], Tolerance::EXACT).is_err());
    }
}
