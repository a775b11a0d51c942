//! Codes of packed weights as floats.

use mlcc_ir::format::{CodeValues, Format};
use mlcc_ir::kernel::Ty;
use mlcc_ir::types::DType;
use mlcc_kernel_lang::{Recorder, Val};
use mlcc_quant::tile;

/// Eight codes of less than 8 bits, the lowest bits first, as u32.
pub(super) fn small_codes<'k>(k: &'k Recorder, bytes: Val<'k>, bits: i64) -> Val<'k> {
    let word = Ty::scalar(DType::U32);
    let packed = match bytes.lanes() {
        4 => bytes.bits_as(word),
        _ => bytes.bits_as(Ty::scalar(DType::U16)).cast(DType::U32),
    };
    (packed.splat(8) >> k.literal(0.0, word).ramp(bits, 8)) & ((1 << bits) - 1)
}

/// What codes of 32 bits stand for where all groups have the same zero point.
pub(super) fn code_floats<'k>(format: Format, codes: Val<'k>) -> Val<'k> {
    match format.values {
        CodeValues::E4M3 => tile::small_floats(codes),
        CodeValues::Whole | CodeValues::E2M1 => {
            small_floats(tile::code_numbers(format, codes, None), tile::centre(format))
        }
    }
}

/// `codes - zero_point` as f32 for codes below 2^23, through the bits of a float: integer conversions are slow on GPUs.
pub(super) fn small_floats(codes: Val, zero_point: i64) -> Val {
    const BASE: f32 = 8_388_608.0;
    let bits = codes | i64::from(BASE.to_bits());
    bits.bits_as(Ty::vector(DType::F32, codes.lanes())) - (f64::from(BASE) + zero_point as f64)
}
