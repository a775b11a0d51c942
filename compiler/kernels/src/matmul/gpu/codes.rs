//! Codes of packed weights as floats.

use crate::matmul::problem::MatmulWeight;
use mlcc_ir::format::{CodeValues, QuantFormat, ZeroPoint};
use mlcc_ir::kernel::ExprType;
use mlcc_ir::types::DType;
use mlcc_kernel_lang::{Recorder, Val, join_vectors};
use mlcc_quant::tile;

/// The format of 4-bit whole numbers whose groups all have the same zero point; `None` for other weights.
pub(super) fn nibble_format(weight: MatmulWeight) -> Option<QuantFormat> {
    match weight {
        MatmulWeight::Packed(format) if format.bits == 4 && format.values == CodeValues::Whole => {
            matches!(format.zero, ZeroPoint::Constant(_)).then_some(format)
        }
        MatmulWeight::Packed(_) | MatmulWeight::Plain(_) => None,
    }
}

/// Eight codes of less than 8 bits, the lowest bits first, as u32.
pub(super) fn small_codes<'k>(k: &'k Recorder, bytes: Val<'k>, bits: i64) -> Val<'k> {
    let word = ExprType::scalar(DType::U32);
    let packed = match bytes.lanes() {
        4 => bytes.bits_as(word),
        _ => bytes.bits_as(ExprType::scalar(DType::U16)).cast(DType::U32),
    };
    (packed.splat(8) >> k.literal(0.0, word).ramp(bits, 8)) & ((1 << bits) - 1)
}

/// The values of codes of 32 bits where all groups have the same zero point.
pub(super) fn code_floats<'k>(format: QuantFormat, codes: Val<'k>) -> Val<'k> {
    match format.values {
        CodeValues::E4M3 => tile::small_floats(codes),
        CodeValues::Whole | CodeValues::E2M1 => {
            small_floats(tile::code_numbers(format, codes, None), tile::code_centre(format))
        }
    }
}

/// Columns of a lane's eight codes, in the order in which [`half_codes`] has them.
pub(super) fn half_order(format: QuantFormat, dtype: DType) -> [u32; 8] {
    match (in_pairs(format, dtype), format.bits) {
        (true, 4) => [0, 4, 1, 5, 2, 6, 3, 7],
        (true, _) => [0, 2, 1, 3, 4, 6, 5, 7],
        (false, _) => [0, 1, 2, 3, 4, 5, 6, 7],
    }
}

/// True if codes become f16 or bf16 two at a time, at their places in a word: those that the mantissa has
/// room for.
fn in_pairs(format: QuantFormat, dtype: DType) -> bool {
    let fits = if dtype == DType::BF16 { format.bits == 4 } else { matches!(format.bits, 4 | 8) };
    format.values == CodeValues::Whole && fits
}

/// The values of eight codes, given in bytes in the order of memory, as f16 or bf16: exactly, since none has
/// more than 8 bits.
pub(super) fn half_codes<'k>(k: &'k Recorder, format: QuantFormat, bytes: Val<'k>, dtype: DType) -> Val<'k> {
    if !in_pairs(format, dtype) {
        let codes = match format.bits {
            8 => bytes.cast(DType::U32),
            bits => small_codes(k, bytes, bits as i64),
        };
        let floats = code_floats(format, codes).named("codes");
        return if dtype == DType::BF16 { upper_halves(floats) } else { floats.cast(DType::F16) };
    }
    // The lowest bits of an f16 of 1024 to 2047, and of a bf16 of 128 to 255, are a whole number; the other
    // one of a pair lies 16 bits above.
    let base = if dtype == DType::BF16 { 0x4300 } else { 0x6400 };
    let both = |half: i64| half << 16 | half;
    let pair_of = |half: i64, name| {
        let word = k.literal(both(half) as f64, ExprType::scalar(DType::U32));
        word.bits_as(ExprType::vector(dtype, 2)).named(name)
    };
    let bits = format.bits as i64;
    let mask = both((1 << bits) - 1);
    let centre = tile::code_centre(format);
    let less = pair_of(0x8000 | base | centre, "less");
    let words = bytes.bits_as(ExprType::vector(DType::U32, bytes.lanes() / 4));
    let pairs: Vec<Val> = (0..words.lanes())
        .flat_map(|w| {
            let word = words.shuffle([w]);
            (0..16 / bits).map(move |i| {
                // The mantissa of an f16 has room for a code 4 bits up, which counts 16 times: that saves a
                // shift.
                let up = dtype == DType::F16 && bits == 4 && i % 2 == 1;
                let (shift, mask) = if up { (i - 1, mask << 4) } else { (i, mask) };
                let pair = if shift == 0 { word } else { word >> (shift * bits) };
                let pair = ((pair & mask) | both(base)).bits_as(ExprType::vector(dtype, 2));
                match dtype {
                    DType::BF16 => pair.instr("fma_bf16x2", &[pair_of(0x3f80, "one"), less]),
                    // A sixteenth of it, less 64 and the centre.
                    _ if up => {
                        let less = pair_of(0xd400 | centre << 4, "less");
                        pair.instr("fma_f16x2", &[pair_of(0x2c00, "sixteenth"), less])
                    }
                    _ => pair.instr("add_f16x2", &[less]),
                }
            })
        })
        .collect();
    join_vectors(&pairs)
}

/// The upper halves of floats: bf16, cut off.
pub(super) fn upper_halves(floats: Val) -> Val {
    let lanes = floats.lanes();
    let halves = floats.bits_as(ExprType::vector(DType::BF16, 2 * lanes));
    halves.shuffle((0..lanes).map(|i| 2 * i + 1))
}

/// `codes - zero_point` as f32 for codes below 2^23, through the bits of a float: integer conversions are
/// slow on GPUs.
pub(super) fn small_floats(codes: Val, zero_point: i64) -> Val {
    const BASE: f32 = 8_388_608.0;
    let bits = codes | i64::from(BASE.to_bits());
    bits.bits_as(ExprType::vector(DType::F32, codes.lanes())) - (f64::from(BASE) + zero_point as f64)
}
