//! Arithmetic of the group formats: integers with a scale per group of consecutive weights of a row (MLC's
//! group quantization; ggml's Q8_0 for 8 bits). Besides its codes a group stores its [`QuantGrid`].
//!
//! Symmetric formats: `scale = round(max|w| / max_int)` in the type of scales,
//! `code = clamp(round_half_even(w / scale), -max_int, max_int)`, stored as `code + zero point`; the value
//! read back is `(stored - zero point) * scale`, exact in f32 for scales of 16 bits.
//!
//! With a zero point for each group: for the least and the largest weight, or 0 if that is beyond them,
//! `scale = round((largest - least) / max_code)`, `zero = round(max_code * -least / (largest - least))`, as
//! AWQ and GPTQ do; the codes are `clamp(round(w / scale + zero), 0, max_code)`. With a minimum for each
//! group: `minimum = round(least)`, `scale = round((largest - minimum) / max_code)`, the value is
//! `code * scale + minimum` (ggml's Q4_1).
//!
//! Codes of floats get `scale = round(max|w| / 12)` (E2M1, whose values count in halves) or `/ 448` (E4M3),
//! and the nearest of their values.
//!
//! Corners: an all-zero group has scale 0 and codes 0, nothing is divided; a scale above the largest of its
//! type becomes that one and codes clamp; a scale so small that its type cannot hold it well (0 or deep
//! subnormal) is rounded up to the next number, so that `|w - w'| <= scale / 2` (plus the rounding of the
//! scale) holds for every group that does not overflow.
//!
//! Weights that were quantized before in the same groups are not changed: formats such as ggml's Q4_0 and
//! Q8_0 also use the one code beyond `-max_int..=max_int` that the bits have room for. A group whose weights
//! all are whole multiples of `max|w| / steps`, for some number of steps up to `max_int + 1`, is stored with
//! that scale: with that code, and a negative scale where the sign of the code asks for one, so kernels must
//! take every code. Groups with a zero point or a minimum of their own are searched for a grid that holds
//! them.

use crate::floats::{ZERO, nearest_code};
use crate::plain::{PlainType, is_near_whole, round_small};
use mlcc_ir::format::{CodeValues, QuantFormat, ZeroPoint};

/// A format in rows of some length.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct GroupSpec {
    pub format: QuantFormat,
    /// Weights per group.
    pub group: usize,
}

/// The choice of the scale of a group.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Default)]
pub enum ScaleSearch {
    /// The largest weight of the group is met exactly.
    #[default]
    None,
    /// The one of [`CANDIDATES`] scales between 0.8 and 1.0 of that one with the least sum of squared errors.
    Mse,
}

/// Scales tried by [`ScaleSearch::Mse`].
pub const CANDIDATES: usize = 15;

/// The distance, in steps between codes, of weights from a grid that they were on before its numbers were
/// rounded. Two roundings to f16 move the last of 16 codes by less.
const NEAR: f32 = 0.03;

/// The values of the codes of a group: `(code - zero) * scale`.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct QuantGrid {
    pub scale: f32,
    /// The zero point, a whole number; the value of code 0 in formats with minima.
    pub zero: f32,
}

impl GroupSpec {
    /// The groups of rows of `k` weights.
    pub fn new(format: QuantFormat, k: usize) -> GroupSpec {
        GroupSpec { format, group: format.group_size(k) }
    }

    /// Type of the numbers that a group stores.
    pub fn number_type(&self) -> PlainType {
        PlainType::of_scale(self.format.scale)
    }

    /// Largest magnitude of a code without its zero point, of those that weights from floats get.
    pub(crate) fn max_int(&self) -> f32 {
        match self.format.values {
            CodeValues::Whole => (self.format.max_code() / 2) as f32,
            CodeValues::E2M1 => 12.0,
            CodeValues::E4M3 => 448.0,
        }
    }

    /// The code of groups that have no weight.
    pub fn padding_code(&self) -> u8 {
        match (self.format.zero, self.format.values) {
            (ZeroPoint::Constant(zero), CodeValues::Whole | CodeValues::E4M3) => zero,
            (ZeroPoint::Constant(_), CodeValues::E2M1) => ZERO,
            (ZeroPoint::PerGroup | ZeroPoint::Minimum, _) => 0,
        }
    }

    /// A group of zeros, of which all codes are [`GroupSpec::padding_code`].
    pub fn zero_grid(&self) -> QuantGrid {
        let zero = if let ZeroPoint::Constant(zero) = self.format.zero { zero.into() } else { 0.0 };
        QuantGrid { scale: 0.0, zero }
    }

    /// Quantizes up to `group` finite weights into as many codes; those beyond the weights mean 0, or the
    /// minimum.
    pub fn quantize(&self, weights: &[f32], search: ScaleSearch, codes: &mut [u8]) -> QuantGrid {
        let (used, beyond) = codes.split_at_mut(weights.len());
        let grid = match self.format.zero {
            ZeroPoint::Constant(zero) => self.symmetric(weights, zero, search, used),
            ZeroPoint::PerGroup | ZeroPoint::Minimum => self.asymmetric(weights, search, used),
        };
        beyond.fill(match self.format.zero {
            ZeroPoint::Constant(_) => self.padding_code(),
            ZeroPoint::PerGroup => grid.zero as u8,
            ZeroPoint::Minimum => 0,
        });
        grid
    }

    /// Stored code to its weight.
    pub fn decode(&self, code: u8, grid: QuantGrid) -> f32 {
        let number = self.format.decode(code);
        match self.format.zero {
            ZeroPoint::Constant(_) | ZeroPoint::PerGroup => (number - grid.zero) * grid.scale,
            ZeroPoint::Minimum => number * grid.scale + grid.zero,
        }
    }

    /// The code that is furthest from the zero point, of which there is one.
    #[cfg(test)]
    fn extreme(&self) -> u8 {
        match self.format.zero {
            ZeroPoint::Constant(zero) if usize::from(zero) > self.format.max_code() / 2 => 0,
            ZeroPoint::Constant(_) | ZeroPoint::PerGroup | ZeroPoint::Minimum => {
                (self.format.code_count() - 1) as u8
            }
        }
    }

    /// True if the group reads back as these weights.
    pub fn is_exact(&self, grid: QuantGrid, codes: &[u8], weights: &[f32]) -> bool {
        weights.iter().zip(codes).all(|(&w, &code)| self.decode(code, grid) == w)
    }

    /// The largest distance of a weight from what it reads back as, for groups that do not overflow.
    pub fn max_error(&self, grid: QuantGrid) -> f32 {
        let (number, half) = (self.number_type(), 0.5 * grid.scale.abs() * (1.0 + 1e-5));
        let codes = self.format.max_code() as f32;
        match self.format.zero {
            // The largest two values are that many steps apart.
            ZeroPoint::Constant(_) => match self.format.values {
                CodeValues::Whole => half,
                CodeValues::E2M1 => 4.0 * half,
                CodeValues::E4M3 => 32.0 * half,
            },
            // The zero point is rounded to half a step, and all steps together by as much as the scale.
            ZeroPoint::PerGroup => half + codes * number.roundoff() * grid.scale,
            // And the value itself to f32.
            ZeroPoint::Minimum => {
                half + number.max_rounding_error(grid.zero) + 1e-6 * (codes * grid.scale + grid.zero.abs())
            }
        }
    }

    /// `range / steps` as a scale, of which all steps fall short of the range by at most `slack` of a step.
    pub(crate) fn scale_for(&self, range: f32, steps: f32, slack: f32) -> f32 {
        let number = self.number_type();
        let scale = number.round(range / steps);
        if scale > number.largest_scale() {
            return number.largest_scale();
        }
        // The largest weight must lie within half a step of the largest code: fails only for deep subnormals.
        if range > (steps + slack) * scale && scale < number.min_normal() {
            return number.next_up(scale);
        }
        scale
    }

    // ---- symmetric

    fn symmetric(&self, weights: &[f32], zero: u8, search: ScaleSearch, codes: &mut [u8]) -> QuantGrid {
        let max_abs = weights.iter().fold(0.0_f32, |m, w| m.max(w.abs()));
        let grid = |scale| QuantGrid { scale, zero: zero.into() };
        if max_abs == 0.0 {
            codes.fill(self.padding_code());
            return self.zero_grid();
        }
        if self.format.values != CodeValues::Whole {
            let grid = grid(self.float_scale(weights, max_abs, search));
            codes
                .iter_mut()
                .zip(weights)
                .for_each(|(stored, &w)| *stored = nearest_code(self.format.values, w, grid.scale));
            return grid;
        }
        if let Some(scale) = self.quantized_before(weights, i32::from(zero), max_abs, codes) {
            return grid(scale);
        }
        let mut scale = self.scale_for(max_abs, self.max_int(), 0.5);
        if search == ScaleSearch::Mse {
            scale = self.search(weights, max_abs, scale);
        }
        for (stored, &w) in codes.iter_mut().zip(weights) {
            *stored = (self.code(w, scale) as i32 + i32::from(zero)) as u8;
        }
        grid(scale)
    }

    /// The scale with which the group is exact, if there is one: the weights are whole multiples of it, of
    /// which the largest is any code, up to the one beyond `max_int` that the bits have room for.
    fn quantized_before(&self, weights: &[f32], zero: i32, max_abs: f32, codes: &mut [u8]) -> Option<f32> {
        let nonzero = weights.iter().map(|w| w.abs()).filter(|&w| w > 0.0);
        let least = nonzero.fold(max_abs, f32::min) / max_abs;
        let largest = self.max_int() as i32 + 1;
        // Nearly all numbers of steps are ruled out by the least weight alone.
        let may_be = |steps: &i32| is_near_whole(least * *steps as f32);
        let mut steps = (1..=largest).rev().filter(may_be);
        steps.find_map(|steps| self.multiples(weights, zero, (max_abs, steps), codes))
    }

    /// The scale that is the largest weight divided by `steps`, if it holds the group.
    fn multiples(
        &self,
        weights: &[f32],
        zero: i32,
        (max_abs, steps): (f32, i32),
        codes: &mut [u8],
    ) -> Option<f32> {
        let unit = self.number_type().round(max_abs / steps as f32);
        if unit * steps as f32 != max_abs {
            return None;
        }
        // The bits have room for one more code on one side: 15 of 4 bits (+8), 0 of 8 bits (-128).
        let last = self.format.max_code() as i32;
        let above = steps + zero <= last;
        let extreme = weights.iter().copied().find(|w| w.abs() == max_abs)?;
        let beyond = steps > self.max_int() as i32;
        let scale = if beyond && (extreme > 0.0) != above { -unit } else { unit };
        let range = -zero..last + 1 - zero;
        for (stored, &w) in codes.iter_mut().zip(weights) {
            let code = w / scale;
            if code != code.round() || !range.contains(&(code as i32)) || code * scale != w {
                return None;
            }
            *stored = (code as i32 + zero) as u8;
        }
        Some(scale)
    }

    /// The code nearest to `w / scale`, without the zero point.
    #[inline]
    fn code(&self, w: f32, scale: f32) -> f32 {
        let max = self.max_int();
        round_small((w / scale).clamp(-max, max))
    }

    fn search(&self, weights: &[f32], max_abs: f32, full: f32) -> f32 {
        let mut best = full;
        let mut least = self.squared_error(weights, full);
        for i in 1..CANDIDATES {
            let factor = 1.0 - 0.2 * i as f32 / (CANDIDATES - 1) as f32;
            let scale = self.number_type().round(max_abs * factor / self.max_int());
            if scale > self.number_type().largest_scale() || scale == 0.0 {
                continue;
            }
            let error = self.squared_error(weights, scale);
            if error < least {
                (best, least) = (scale, error);
            }
        }
        best
    }

    /// The squared error in f32 and in eight partial sums, so that it vectorizes: it only ranks candidates.
    fn squared_error(&self, weights: &[f32], s: f32) -> f32 {
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

    // ---- a zero point or a minimum for each group

    fn asymmetric(&self, weights: &[f32], search: ScaleSearch, codes: &mut [u8]) -> QuantGrid {
        let least = weights.iter().fold(f32::INFINITY, |m, &w| m.min(w));
        let largest = weights.iter().fold(f32::NEG_INFINITY, |m, &w| m.max(w));
        if least == 0.0 && largest == 0.0 || weights.is_empty() {
            codes.fill(self.padding_code());
            return self.zero_grid();
        }
        let grid = self.grid_before(weights, least, largest).unwrap_or_else(|| match search {
            ScaleSearch::None => self.grid(least, largest),
            ScaleSearch::Mse => self.search_grid(weights, least, largest),
        });
        for (stored, &w) in codes.iter_mut().zip(weights) {
            *stored = self.nearest(w, grid);
        }
        grid
    }

    /// The grid from the least to the largest weight.
    fn grid(&self, least: f32, largest: f32) -> QuantGrid {
        let (number, codes) = (self.number_type(), self.format.max_code() as f32);
        if self.format.zero == ZeroPoint::Minimum {
            let zero = number.round(least.max(-number.largest_scale()));
            let scale = self.scale_for((largest - zero).max(0.0), codes, 0.5);
            return QuantGrid { scale, zero };
        }
        // 0 has to be among the values.
        let (least, largest) = (least.min(0.0), largest.max(0.0));
        let scale = self.scale_for(largest - least, codes, codes * number.roundoff());
        let (low, range) = (f64::from(-least), f64::from(largest) - f64::from(least));
        QuantGrid { scale, zero: (f64::from(codes) * low / range).round() as f32 }
    }

    /// The code whose value is nearest to a weight.
    #[inline]
    fn nearest(&self, w: f32, grid: QuantGrid) -> u8 {
        let steps = match self.format.zero {
            _ if grid.scale == 0.0 => 0.0,
            ZeroPoint::Constant(_) | ZeroPoint::PerGroup => w / grid.scale + grid.zero,
            ZeroPoint::Minimum => (w - grid.zero) / grid.scale,
        };
        round_small(steps.clamp(0.0, self.format.max_code() as f32)) as u8
    }

    /// The grid that weights lie on which were quantized before, if their codes reach from one end of its
    /// range to about the other, as codes that follow from the least and the largest weight do. With minima
    /// also a grid that is not as exact because our numbers are rounded (those of ggml's Q4_K are products).
    fn grid_before(&self, weights: &[f32], least: f32, largest: f32) -> Option<QuantGrid> {
        let (number, codes) = (self.number_type(), self.format.max_code());
        let within = |grid: &QuantGrid, steps: f32| {
            let rounding = if steps > 0.0 { number.max_rounding_error(grid.zero) } else { 0.0 };
            let most = steps * grid.scale + rounding;
            let near = |&w: &f32| (self.decode(self.nearest(w, *grid), *grid) - w).abs() <= most;
            grid.scale > 0.0 && weights.iter().all(near)
        };
        if self.format.zero == ZeroPoint::Minimum {
            let grid = |(step, low, high): (usize, usize, usize)| {
                let scale = number.round((largest - least) / (high - low) as f32);
                (step, QuantGrid { scale, zero: number.round(least - low as f32 * scale) })
            };
            let found = |near: f32| {
                let mut grids = self.ends().map(grid);
                grids.find(|(step, grid)| within(grid, near * *step as f32)).map(|(_, grid)| grid)
            };
            return found(0.0).or_else(|| found(NEAR));
        }
        let (least, largest) = (least.min(0.0), largest.max(0.0));
        let grid = |steps: usize| {
            // Most numbers of steps are ruled out without rounding.
            if !is_near_whole(-least / (largest - least) * steps as f32) {
                return None;
            }
            let scale = number.round((largest - least) / steps as f32);
            let zero = -least / scale;
            let whole = zero == zero.round() && zero <= codes as f32;
            (scale * steps as f32 == largest - least && whole).then_some(QuantGrid { scale, zero })
        };
        (1..=codes).rev().filter_map(grid).find(|grid| within(grid, 0.0))
    }

    /// Codes that the least and the largest weight may have had, and of which number all codes are multiples:
    /// of 8 bits also those of codes of 5 bits.
    fn ends(&self) -> impl Iterator<Item = (usize, usize, usize)> {
        let (codes, coarse) = (self.format.max_code(), 1 << self.format.bits.saturating_sub(5));
        let steps = if coarse > 1 { vec![coarse, 1] } else { vec![1] };
        steps.into_iter().flat_map(move |step| {
            let last = codes / step;
            let reach = (last / 4 + 1).min(8);
            let pairs = (0..reach).flat_map(move |low| (0..reach).map(move |high| (low, high)));
            pairs
                .filter(move |(low, high)| low + high < last)
                .map(move |(low, high)| (step, step * low, step * (last - high)))
        })
    }

    /// The best grid of those that are smaller by the same factors as scales are in symmetric formats.
    fn search_grid(&self, weights: &[f32], least: f32, largest: f32) -> QuantGrid {
        let error = |grid: QuantGrid| -> f32 {
            let square = |&w: &f32| (w - self.decode(self.nearest(w, grid), grid)).powi(2);
            weights.iter().map(square).sum()
        };
        let mut best = self.grid(least, largest);
        let mut fewest = error(best);
        for i in 1..CANDIDATES {
            let factor = 1.0 - 0.2 * i as f32 / (CANDIDATES - 1) as f32;
            let grid = self.grid(least * factor, largest * factor);
            let found = error(grid);
            if found < fewest {
                (best, fewest) = (grid, found);
            }
        }
        best
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const Q4: QuantFormat = QuantFormat::Q4G32;
    const Q8: QuantFormat = QuantFormat::Q8G32;

    /// Every format in rows of 40 weights.
    fn specs() -> impl Iterator<Item = GroupSpec> {
        QuantFormat::ALL.iter().map(|&format| GroupSpec::new(format, 40))
    }

    /// The grid and the codes of weights that are one group.
    fn quantized(spec: GroupSpec, weights: &[f32], search: ScaleSearch) -> (QuantGrid, Vec<u8>) {
        let mut codes = vec![0xff; spec.group];
        let grid = spec.quantize(weights, search, &mut codes);
        assert!(codes.iter().all(|&code| usize::from(code) < spec.format.code_count()));
        if spec.format.zero != ZeroPoint::Minimum {
            assert!(codes[weights.len()..].iter().all(|&code| spec.decode(code, grid) == 0.0));
        }
        codes.truncate(weights.len());
        (grid, codes)
    }

    fn values(spec: GroupSpec, weights: &[f32], search: ScaleSearch) -> Vec<f32> {
        let (grid, codes) = quantized(spec, weights, search);
        codes.iter().map(|&code| spec.decode(code, grid)).collect()
    }

    /// Deterministic numbers below `below`.
    fn random(mut seed: u32) -> impl FnMut(u32) -> u32 {
        move |below| {
            seed = seed.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            (seed >> 8) % below
        }
    }

    #[test]
    fn known_codes() {
        // max 7 -> scale 1; halves round to even; stored code = code + 7.
        let spec = |format| GroupSpec::new(format, 32);
        let (grid, codes) = quantized(spec(Q4), &[7.0, -7.0, 0.5, 1.5, -2.5, 3.49, 0.0], ScaleSearch::None);
        assert_eq!(grid, QuantGrid { scale: 1.0, zero: 7.0 });
        assert_eq!(codes, [14, 0, 7, 9, 5, 10, 7]);
        let (grid, codes) = quantized(spec(Q8), &[127.0, -127.0, 63.5, -0.5], ScaleSearch::None);
        assert_eq!((grid.scale, &codes[..]), (1.0, &[255, 1, 192, 128][..]));
    }

    #[test]
    fn zeros_have_scale_zero() {
        for spec in specs() {
            for search in [ScaleSearch::None, ScaleSearch::Mse] {
                let (grid, _) = quantized(spec, &[0.0, -0.0, 0.0], search);
                assert_eq!(grid, spec.zero_grid(), "{}", spec.format.name());
                assert_eq!(values(spec, &[0.0; 5], search), [0.0; 5]);
            }
        }
    }

    /// Scales beyond those of their type become the largest one, and what is read back is finite.
    #[test]
    fn huge_weights_clamp_to_the_largest_scale() {
        for spec in specs() {
            for search in [ScaleSearch::None, ScaleSearch::Mse] {
                let got = values(spec, &[f32::MAX, -f32::MAX, 1.0], search);
                assert!(got.iter().all(|w| w.is_finite()), "{}: {got:?}", spec.format.name());
                assert!(got[0] > 1e4 && got[1] < -1e4, "{}: {got:?}", spec.format.name());
                if matches!(spec.format.zero, ZeroPoint::Constant(_)) {
                    let largest = spec.number_type().largest_scale() * spec.max_int();
                    assert_eq!(got, [largest, -largest, 0.0]);
                }
            }
        }
    }

    #[test]
    fn tiny_weights_keep_the_error_bound() {
        for spec in specs() {
            for exponent in 10..60 {
                for mantissa in [1.0_f32, 1.1, 1.49, 1.51, 1.9] {
                    let w = mantissa * 2.0_f32.powi(-exponent);
                    let weights = [w, -w, w * 0.3, w * 0.77];
                    let (grid, codes) = quantized(spec, &weights, ScaleSearch::None);
                    assert!(grid.scale > 0.0);
                    for (a, &code) in weights.iter().zip(&codes) {
                        let b = spec.decode(code, grid);
                        let name = spec.format.name();
                        assert!((a - b).abs() <= spec.max_error(grid), "{name}: {a} is {b}, {grid:?}");
                    }
                }
            }
        }
    }

    /// Weights that a group can hold come back unchanged: every code, with both signs of the scale where that
    /// is allowed.
    #[test]
    fn weights_that_were_quantized_before_do_not_change() {
        for spec in specs() {
            let name = spec.format.name();
            let mut next = random(7);
            let codes = spec.format.code_count() as u32;
            for round in 0..400 {
                let scale = spec.number_type().round((next(2000) as f32 + 1.0) / 4096.0);
                let grid = match spec.format.zero {
                    ZeroPoint::Constant(zero) => {
                        let scale = if next(2) == 0 { scale } else { -scale };
                        QuantGrid { scale, zero: zero.into() }
                    }
                    ZeroPoint::PerGroup => QuantGrid { scale, zero: next(codes) as f32 },
                    ZeroPoint::Minimum => {
                        QuantGrid { scale, zero: spec.number_type().round(-scale * next(40) as f32 / 3.0) }
                    }
                };
                let mut stored: Vec<u8> = (0..spec.group.min(40)).map(|_| next(codes) as u8).collect();
                // The extreme codes tell the scale: -8 of Q4_0, -128 of 8 bits, both ends of others. Without
                // them, it is found from what is there, but for minima.
                if round % 2 == 0 || spec.format.zero == ZeroPoint::Minimum {
                    stored[next(16) as usize] = spec.extreme();
                    stored[16 + next(16) as usize] =
                        if spec.format.is_symmetric() { spec.extreme() } else { 0 };
                } else {
                    let most = next(codes) as u8;
                    stored.iter_mut().for_each(|code| *code = (*code).min(most));
                }
                let weights: Vec<f32> = stored.iter().map(|&code| spec.decode(code, grid)).collect();
                for search in [ScaleSearch::None, ScaleSearch::Mse] {
                    assert_eq!(values(spec, &weights, search), weights, "{name}, {grid:?}");
                }
            }
        }
    }

    /// ggml scales by the extreme weight, so it is always there: -8 of Q4_0, 127 of Q8_0.
    #[test]
    fn values_of_ggml_do_not_change() {
        let mut next = random(9);
        for (format, lowest, highest, extreme) in [(Q4, -8, 7, -8), (Q8, -127, 127, 127)] {
            for round in 0..200 {
                let scale = PlainType::F16.round((next(2000) as f32 - 1000.0) / 4096.0);
                let code =
                    |next: &mut dyn FnMut(u32) -> u32| next((highest - lowest + 1) as u32) as i32 + lowest;
                let mut weights: Vec<f32> = (0..32).map(|_| code(&mut next) as f32 * scale).collect();
                weights[round % 32] = extreme as f32 * scale;
                let spec = GroupSpec::new(format, 32);
                assert_eq!(values(spec, &weights, ScaleSearch::None), weights, "scale {scale}");
            }
        }
        // Both extremes at once do not fit.
        let spec = GroupSpec::new(Q4, 32);
        let both = [8.0, -8.0, 1.0];
        assert_ne!(values(spec, &both, ScaleSearch::None), both);
        assert_eq!(values(spec, &[8.0, -7.0, 1.0], ScaleSearch::None), [8.0, -7.0, 1.0]);
    }

    /// Groups like those of ggml's Q4_K and Q5_K: scales and minima are products that f16 does not hold.
    #[test]
    fn rounded_grids_keep_their_codes() {
        let mut next = random(3);
        for (name, codes) in [("q4g32_min", 16), ("q8g32_min", 32)] {
            let Some(format) = QuantFormat::parse(name) else { continue };
            let spec = GroupSpec::new(format, 32);
            let (mut squares, mut errors) = (0.0, 0.0);
            for _ in 0..500 {
                let [d, dmin] =
                    [3e-4, 2e-3].map(|x| PlainType::F16.round(x * (0.75 + next(1000) as f32 / 2000.0)));
                let (scale, minimum) = (d * (1 + next(63)) as f32, dmin * next(64) as f32);
                let mut stored: Vec<u32> = (0..32).map(|_| next(codes)).collect();
                (stored[next(16) as usize], stored[16 + next(16) as usize]) = (next(2), codes - 1);
                let weights: Vec<f32> = stored.iter().map(|&code| scale * code as f32 - minimum).collect();
                for (w, v) in weights.iter().zip(values(spec, &weights, ScaleSearch::None)) {
                    let error = (w - v).abs();
                    let most = 0.05 * scale + minimum / 2048.0;
                    assert!(error <= most, "{name}: {w} is {v}, scale {scale}, minimum {minimum}");
                    squares += f64::from(*w).powi(2);
                    errors += f64::from(error).powi(2);
                }
            }
            let relative = (errors / squares).sqrt();
            println!("{name}: {relative:.1e}");
            assert!(relative < 5e-4, "{name}: {relative}");
        }
    }

    #[test]
    fn search_never_does_worse() {
        let mut next = random(1);
        for spec in specs() {
            for _ in 0..50 {
                let weights: Vec<f32> =
                    (0..spec.group).map(|_| (next(1 << 24) as f32 / 8_388_608.0 - 1.0).powi(3)).collect();
                let error = |search| -> f64 {
                    let squares = |(w, v): (&f32, f32)| f64::from(w - v).powi(2);
                    weights.iter().zip(values(spec, &weights, search)).map(squares).sum()
                };
                let (plain, found) = (error(ScaleSearch::None), error(ScaleSearch::Mse));
                assert!(found <= plain * (1.0 + 1e-5), "{}: {found} and {plain}", spec.format.name());
            }
        }
    }
}
