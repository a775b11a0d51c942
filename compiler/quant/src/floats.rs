//! Codes of floats of 4 bits (OCP E2M1) and 8 (E4M3).

use crate::group::{CANDIDATES, GroupSpec, QuantGrid, ScaleSearch};
use mlcc_ir::format::CodeValues;

/// The code of 0 in E2M1.
pub const ZERO: u8 = 7;

/// The weights half-way between two values of E2M1, in halves and without their sign.
const BORDERS: [f32; 7] = [0.5, 1.5, 2.5, 3.5, 5.0, 7.0, 10.0];

/// The code whose value is nearest to a weight.
pub fn nearest_code(values: CodeValues, w: f32, scale: f32) -> u8 {
    let size = (w / scale).abs();
    let negative = (w < 0.0) != (scale < 0.0);
    if values == CodeValues::E4M3 {
        return nearest_e4m3(size) << 1 | u8::from(negative);
    }
    let above = BORDERS.iter().filter(|&&border| size > border).count() as u8;
    if negative { ZERO - above } else { ZERO + above }
}

/// The bits of a size in E4M3, without a sign.
fn nearest_e4m3(size: f32) -> u8 {
    const LARGEST: u32 = 0x7e;
    if size < 2f32.powi(-6) {
        return (size * 512.0).round_ties_even() as u8;
    }
    // To three bits of mantissa; an exponent of 8 bits has a bias that is larger by 120.
    let bits = size.to_bits();
    let rounded = bits.saturating_add(0x7_ffff + (bits >> 20 & 1)) >> 20;
    rounded.saturating_sub(120 << 3).min(LARGEST) as u8
}

impl GroupSpec {
    /// The scale of a group of floats whose largest weight is `max_abs`, not 0.
    pub(crate) fn float_scale(&self, weights: &[f32], max_abs: f32, search: ScaleSearch) -> f32 {
        let (number, zero, values) = (self.number_type(), self.zero_grid().zero, self.format.values);
        let value =
            |w: f32, scale: f32| self.decode(nearest_code(values, w, scale), QuantGrid { scale, zero });
        let exact = |scale: &f32| {
            *scale > 0.0 && number.round(*scale) == *scale && weights.iter().all(|&w| value(w, *scale) == w)
        };
        if let Some(scale) = self.scales_before(max_abs).into_iter().find(exact) {
            return scale;
        }
        let slack = if values == CodeValues::E4M3 { 16.0 } else { 2.0 };
        let full = self.scale_for(max_abs, self.max_int(), slack);
        if search == ScaleSearch::None {
            return full;
        }
        // In steps of the full scale, so that nothing underflows.
        let error =
            |scale: f32| -> f32 { weights.iter().map(|&w| ((w - value(w, scale)) / full).powi(2)).sum() };
        let (mut best, mut least) = (full, error(full));
        for i in 1..CANDIDATES {
            let factor = 1.0 - 0.2 * i as f32 / (CANDIDATES - 1) as f32;
            let scale = number.round(max_abs * factor / self.max_int());
            if scale > number.largest_scale() || scale == 0.0 {
                continue;
            }
            let found = error(scale);
            if found < least {
                (best, least) = (scale, found);
            }
        }
        best
    }

    /// Scales that a group may have had that was quantized before. Twice a value is a value, up to the
    /// largest ones. So its largest weight may be taken for one with the largest exponent, and there is one
    /// scale for each mantissa; of E4M3, whose scales have as many bits as the weights, also its neighbours,
    /// which may be rounded to the same product.
    fn scales_before(&self, max_abs: f32) -> Vec<f32> {
        if self.format.values != CodeValues::E4M3 {
            return [12.0, 8.0].map(|most| self.number_type().round(max_abs / most)).to_vec();
        }
        // 480 is no number.
        let largest =
            (0..8).map(|mantissa| if mantissa < 7 { 256.0 + 32.0 * mantissa as f32 } else { 240.0 });
        let around = |most: f32| {
            let scale = max_abs / most;
            [scale, scale.next_down(), scale.next_up()]
        };
        largest.flat_map(around).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use mlcc_ir::format::QuantFormat;

    /// Every value is nearest to itself, and what lies between two goes to the nearer one.
    #[test]
    fn nearest_values() {
        for name in ["e2m1g32_bf16", "e4m3g128_f32"] {
            let format = QuantFormat::by_name(name);
            let spec = GroupSpec::new(format, 128);
            let value = |code: u8| spec.decode(code, QuantGrid { scale: 0.5, zero: spec.zero_grid().zero });
            let mut values: Vec<f32> = (0..format.code_count() as u8).map(value).collect();
            values.sort_by(f32::total_cmp);
            for pair in values.windows(2) {
                let [low, high] = pair else { continue };
                for part in [0.0, 0.4, 0.6, 1.0] {
                    let expected = if part < 0.5 { low } else { high };
                    let found = value(nearest_code(format.values, low + part * (high - low), 0.5));
                    assert_eq!(found, *expected, "{name}: {part} between {low} and {high}");
                }
            }
        }
    }
}
