//! Arithmetic shared by the group formats: symmetric integers with one f16 scale per group of consecutive weights of a
//! row (MLC's group quantization; ggml's Q8_0 for 8 bits).
//!
//! `scale = f16(max|w| / max_int)`, `code = clamp(round_half_even(w / scale), -max_int, max_int)`, stored as
//! `code + zero_point`; the value read back is `(stored - zero_point) * scale`, exact in f32 (8 bits times 11 bits).
//!
//! Corners: an all-zero group has scale 0 and codes 0, nothing is divided; a scale above the largest f16 becomes that
//! f16 and codes clamp; a scale so small that f16 cannot hold it well (0 or deep subnormal) is rounded up to the next
//! f16, so that `|w - w'| <= scale / 2` (plus the rounding of the scale) holds for every group that does not overflow.
//!
//! Weights that were quantized before in the same groups are not changed: formats such as ggml's Q4_0 and Q8_0 also use the
//! one code beyond `-max_int..=max_int` that the bits have room for. A group whose weights all are whole multiples of
//! `max|w| / (max_int + 1)` is stored with that code, and with a negative scale where its sign asks for one, so kernels
//! must take every code.

use half::f16;

/// Constants of one group format.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct GroupSpec {
    /// Weights per group.
    pub group: usize,
    /// Largest code; the smallest is `-max_int`.
    pub max_int: i32,
    /// Added to a code when it is stored.
    pub zero_point: i32,
    /// Bits of a stored code.
    pub bits: usize,
}

/// How the scale of a group is chosen.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Default)]
pub enum ScaleSearch {
    /// The largest weight of the group is met exactly.
    #[default]
    None,
    /// Of [`CANDIDATES`] scales between 0.8 and 1.0 of that one, the one with the least sum of squared errors.
    Mse,
}

/// Scales tried by [`ScaleSearch::Mse`].
pub const CANDIDATES: usize = 15;
/// Largest group of any format.
pub const MAX_GROUP: usize = 32;

/// One quantized group: stored codes (those beyond the weights are the zero point) and the scale.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Group {
    pub scale: f16,
    pub codes: [u8; MAX_GROUP],
}

impl GroupSpec {
    /// A group of zeros: what fills the places of a packing that have no weight.
    pub fn zero(&self) -> Group {
        Group { scale: f16::ZERO, codes: [self.zero_point as u8; MAX_GROUP] }
    }

    /// Quantizes up to `group` finite weights.
    pub fn quantize(&self, weights: &[f32], search: ScaleSearch) -> Group {
        let max_abs = weights.iter().fold(0.0_f32, |m, w| m.max(w.abs()));
        if max_abs == 0.0 {
            return self.zero();
        }
        if let Some(group) = self.quantized_before(weights, max_abs) {
            return group;
        }
        let full = self.scale_for(max_abs);
        match search {
            ScaleSearch::None => self.encode(weights, full),
            ScaleSearch::Mse => self.search(weights, max_abs, full),
        }
    }

    /// Stored code to its weight.
    pub fn decode(&self, code: u8, scale: f16) -> f32 {
        (i32::from(code) - self.zero_point) as f32 * scale.to_f32()
    }

    /// Whether the group reads back as these weights.
    pub fn holds(&self, group: &Group, weights: &[f32]) -> bool {
        weights.iter().zip(&group.codes).all(|(&w, &code)| self.decode(code, group.scale) == w)
    }

    /// The group exactly, if its weights are multiples of a scale whose largest code is one beyond `max_int`.
    fn quantized_before(&self, weights: &[f32], max_abs: f32) -> Option<Group> {
        let steps = self.max_int + 1;
        let unit = f16::from_f32(max_abs / steps as f32);
        if unit.to_f32() * steps as f32 != max_abs {
            return None;
        }
        // The bits have room for one more code on one side: 15 of 4 bits (+8), 0 of 8 bits (-128).
        let above = steps + self.zero_point < 1 << self.bits;
        let extreme = weights.iter().copied().find(|w| w.abs() == max_abs)?;
        let scale = if (extreme > 0.0) == above { unit } else { -unit };
        let range = -self.zero_point..(1 << self.bits) - self.zero_point;
        let mut group = Group { scale, codes: [self.zero_point as u8; MAX_GROUP] };
        for (stored, &w) in group.codes.iter_mut().zip(weights) {
            let code = w / scale.to_f32();
            if code != code.round() || !range.contains(&(code as i32)) || code * scale.to_f32() != w {
                return None;
            }
            *stored = (code as i32 + self.zero_point) as u8;
        }
        Some(group)
    }

    fn scale_for(&self, max_abs: f32) -> f16 {
        let scale = f16::from_f32(max_abs / self.max_int as f32);
        if scale.is_infinite() {
            return f16::MAX;
        }
        // The largest weight must lie within half a step of the largest code: fails only for deep subnormals.
        if max_abs > (self.max_int as f32 + 0.5) * scale.to_f32() && scale < f16::MIN_POSITIVE {
            return f16::from_bits(scale.to_bits() + 1);
        }
        scale
    }

    /// The code nearest to `w / scale`, without the zero point. Clamping first keeps the rounding within the range where
    /// adding and subtracting 1.5 * 2^23 rounds half to even, which vectorizes where `round_ties_even` does not.
    #[inline]
    fn code(&self, w: f32, scale: f32) -> f32 {
        const MAGIC: f32 = 12_582_912.0;
        let max = self.max_int as f32;
        ((w / scale).clamp(-max, max) + MAGIC) - MAGIC
    }

    fn encode(&self, weights: &[f32], scale: f16) -> Group {
        let s = scale.to_f32();
        let mut group = Group { scale, codes: [self.zero_point as u8; MAX_GROUP] };
        for (code, &w) in group.codes.iter_mut().zip(weights) {
            *code = (self.code(w, s) as i32 + self.zero_point) as u8;
        }
        group
    }

    fn search(&self, weights: &[f32], max_abs: f32, full: f16) -> Group {
        let mut best = full;
        let mut least = self.squared_error(weights, full);
        for i in 1..CANDIDATES {
            let factor = 1.0 - 0.2 * i as f32 / (CANDIDATES - 1) as f32;
            let scale = f16::from_f32(max_abs * factor / self.max_int as f32);
            if scale.is_infinite() || scale == f16::ZERO {
                continue;
            }
            let error = self.squared_error(weights, scale);
            if error < least {
                (best, least) = (scale, error);
            }
        }
        self.encode(weights, best)
    }

    /// In f32 and in eight partial sums, so that it vectorizes: it only ranks candidates.
    fn squared_error(&self, weights: &[f32], scale: f16) -> f32 {
        let s = scale.to_f32();
        let mut sums = [0.0_f32; 8];
        for chunk in weights.chunks(8) {
            for (sum, &w) in sums.iter_mut().zip(chunk) {
                // In steps of the scale, so that nothing underflows.
                let error = w / s - self.code(w, s);
                *sum += error * error;
            }
        }
        sums.iter().sum::<f32>() * s * s
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{q4g32, q8g32};

    const SPECS: [GroupSpec; 2] = [q4g32::SPEC, q8g32::SPEC];

    fn values(spec: GroupSpec, weights: &[f32], search: ScaleSearch) -> Vec<f32> {
        let group = spec.quantize(weights, search);
        group.codes[..weights.len()].iter().map(|&c| spec.decode(c, group.scale)).collect()
    }

    #[test]
    fn known_codes() {
        // max 7 -> scale 1; halves round to even; stored code = code + 7.
        let group = q4g32::SPEC.quantize(&[7.0, -7.0, 0.5, 1.5, -2.5, 3.49, 0.0], ScaleSearch::None);
        assert_eq!(group.scale, f16::ONE);
        assert_eq!(group.codes[..7], [14, 0, 7, 9, 5, 10, 7]);
        let group = q8g32::SPEC.quantize(&[127.0, -127.0, 63.5, -0.5], ScaleSearch::None);
        assert_eq!((group.scale, &group.codes[..4]), (f16::ONE, &[255, 1, 192, 128][..]));
    }

    #[test]
    fn zeros_have_scale_zero() {
        for spec in SPECS {
            for search in [ScaleSearch::None, ScaleSearch::Mse] {
                let group = spec.quantize(&[0.0, -0.0, 0.0], search);
                assert_eq!(group, spec.zero());
                assert_eq!(values(spec, &[0.0; 5], search), [0.0; 5]);
            }
        }
    }

    #[test]
    fn huge_weights_clamp_to_the_largest_scale() {
        for spec in SPECS {
            for search in [ScaleSearch::None, ScaleSearch::Mse] {
                let got = values(spec, &[f32::MAX, -f32::MAX, 1.0], search);
                assert_eq!(got, [65504.0 * spec.max_int as f32, -65504.0 * spec.max_int as f32, 0.0]);
            }
        }
    }

    #[test]
    fn tiny_weights_keep_the_error_bound() {
        for spec in SPECS {
            for exponent in 10..60 {
                for mantissa in [1.0_f32, 1.1, 1.49, 1.51, 1.9] {
                    let w = mantissa * 2.0_f32.powi(-exponent);
                    let weights = [w, -w, w * 0.3, w * 0.77];
                    let scale = spec.quantize(&weights, ScaleSearch::None).scale.to_f32();
                    assert!(scale > 0.0);
                    for (a, b) in weights.iter().zip(values(spec, &weights, ScaleSearch::None)) {
                        assert!((a - b).abs() <= scale * 0.5 * 1.001, "{a} read back as {b}, scale {scale}");
                    }
                }
            }
        }
    }

    /// Values of ggml's blocks, Q4_0 and Q8_0, come back as they are.
    #[test]
    fn weights_that_were_quantized_before_do_not_change() {
        let mut seed = 7_u32;
        let mut next = |below: u32| {
            seed = seed.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            (seed >> 8) % below
        };
        for (spec, codes, offset) in [(q4g32::SPEC, 16, 8), (q8g32::SPEC, 256, 128)] {
            for round in 0..200 {
                let scale = f16::from_f32((next(2000) as f32 - 1000.0) / 4096.0).to_f32();
                let mut weights: Vec<f32> =
                    (0..32).map(|_| (next(codes) as i32 - offset) as f32 * scale).collect();
                // ggml scales by the extreme weight, so it is always there: -8 of Q4_0, 127 (or -128 elsewhere) of Q8_0.
                weights[round % 32] =
                    if codes == 16 || round % 2 == 0 { -offset as f32 } else { 127.0 } * scale;
                if codes == 256 && round % 2 == 1 {
                    weights.iter_mut().for_each(|w| *w = w.clamp(-127.0 * scale.abs(), 127.0 * scale.abs()));
                }
                for search in [ScaleSearch::None, ScaleSearch::Mse] {
                    assert_eq!(values(spec, &weights, search), weights, "scale {scale}");
                }
            }
        }
        // Both extremes at once do not fit.
        let both = [8.0, -8.0, 1.0];
        assert_ne!(values(q4g32::SPEC, &both, ScaleSearch::None), both);
        assert_eq!(values(q4g32::SPEC, &[8.0, -7.0, 1.0], ScaleSearch::None), [8.0, -7.0, 1.0]);
    }

    #[test]
    fn search_never_does_worse() {
        let mut seed = 1_u32;
        for spec in SPECS {
            for _ in 0..50 {
                let weights: Vec<f32> = (0..32)
                    .map(|_| {
                        seed = seed.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
                        ((seed >> 8) as f32 / 8_388_608.0 - 1.0).powi(3)
                    })
                    .collect();
                let plain = spec.quantize(&weights, ScaleSearch::None);
                let found = spec.quantize(&weights, ScaleSearch::Mse);
                let error = |group: &Group| -> f64 {
                    let one = |(&w, &c): (&f32, &u8)| f64::from(w - spec.decode(c, group.scale)).powi(2);
                    weights.iter().zip(&group.codes).map(one).sum()
                };
                assert!(error(&found) <= error(&plain) * (1.0 + 1e-5));
            }
        }
    }
}
