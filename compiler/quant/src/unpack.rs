//! Reading weights back: on the host (graph interpreter, tests) and one element at a time in kernel IR
//! (gather, generic kernels).

use crate::QuantError;
use crate::group::QuantGrid;
use crate::layout::{AddressExpr, LayoutRegion, TensorLayout};
use mlcc_ir::builder::KernelBuilder;
use mlcc_ir::format::{CodeValues, QuantFormat, ZeroPoint};
use mlcc_ir::kernel::{BinOp, BufId, ExprId, ExprType};
use mlcc_ir::types::{DType, Packing};

fn checked(
    dtype: DType,
    packing: Packing,
    n: usize,
    k: usize,
    found: usize,
) -> Result<TensorLayout, QuantError> {
    let layout = TensorLayout::new(dtype, packing, n, k)?;
    let expected = layout.bytes();
    match found == expected {
        true => Ok(layout),
        false => Err(QuantError::ByteCount { dtype, packing, n, k, expected, found }),
    }
}

fn read(layout: &TensorLayout, bytes: &[u8], row: usize, col: usize) -> f32 {
    match &layout.region {
        LayoutRegion::Plain { plain, place } => plain.read(bytes, place.evaluate(row, col)),
        LayoutRegion::Group { spec, .. } => {
            let (code, grid) = code_and_grid(layout, bytes, row, col);
            spec.decode(code, grid)
        }
    }
}

/// The code of an element of a group format, and what its group makes of codes; those of the number 0 where
/// the format is plain.
fn code_and_grid(layout: &TensorLayout, bytes: &[u8], row: usize, col: usize) -> (u8, QuantGrid) {
    let LayoutRegion::Group { spec, codes, shift, scales, zeros } = &layout.region else {
        return (0, QuantGrid { scale: 0.0, zero: 0.0 });
    };
    let at = codes.evaluate(row, col);
    let unit = if spec.format.fills_bytes() { 1 } else { 4 };
    let unit = bytes[at..at + unit].iter().rev().fold(0_u32, |word, &byte| word << 8 | u32::from(byte));
    let shift = shift.as_ref().map_or(0, |s| s.evaluate(row, col));
    let code = (unit >> shift) as usize & spec.format.max_code();
    let number = |place: &AddressExpr| spec.number_type().read(&bytes[place.evaluate(row, col)..], 0);
    let zero = zeros.as_ref().map_or(spec.zero_grid().zero, number);
    (code as u8, QuantGrid { scale: number(scales), zero })
}

/// All elements, `[N, K]` row-major.
pub fn dequantize(
    dtype: DType,
    packing: Packing,
    n: usize,
    k: usize,
    bytes: &[u8],
) -> Result<Vec<f32>, QuantError> {
    let layout = checked(dtype, packing, n, k, bytes.len())?;
    let elements = (0..n).flat_map(|row| (0..k).map(move |col| (row, col)));
    Ok(elements.map(|(row, col)| read(&layout, bytes, row, col)).collect())
}

/// The distance from each element within which the weight was that was rounded to it, `[N, K]` row-major:
/// half the way to the next value of its group.
pub fn half_steps(
    dtype: DType,
    packing: Packing,
    n: usize,
    k: usize,
    bytes: &[u8],
) -> Result<Vec<f32>, QuantError> {
    let layout = checked(dtype, packing, n, k, bytes.len())?;
    let half_step = |(row, col)| match &layout.region {
        LayoutRegion::Plain { plain, .. } => plain.max_rounding_error(read(&layout, bytes, row, col)),
        LayoutRegion::Group { spec, .. } => {
            let (code, grid) = code_and_grid(&layout, bytes, row, col);
            half_step(spec.format, code) * grid.scale.abs()
        }
    };
    Ok((0..n).flat_map(|row| (0..k).map(move |col| (row, col))).map(half_step).collect())
}

/// Half the way from the number of a code to the next one, the further of the two.
fn half_step(format: QuantFormat, code: u8) -> f32 {
    // How far apart the codes of neighbours are.
    let apart = match format.values {
        CodeValues::Whole => return 0.5,
        CodeValues::E2M1 => 1,
        // The sign is in the lowest place.
        CodeValues::E4M3 => 2,
    };
    let (code, count) = (usize::from(code), format.code_count());
    let between = |a: usize, b: usize| (format.decode(a as u8) - format.decode(b as u8)).abs();
    let above = if code + apart < count { between(code + apart, code) } else { 0.0 };
    let below = if code >= apart { between(code, code - apart) } else { 0.0 };
    0.5 * above.max(below)
}

/// One element; `row < n` and `col < k`.
pub fn dequantize_element(
    dtype: DType,
    packing: Packing,
    (n, k): (usize, usize),
    bytes: &[u8],
    (row, col): (usize, usize),
) -> Result<f32, QuantError> {
    Ok(read(&checked(dtype, packing, n, k, bytes.len())?, bytes, row, col))
}

/// Element (row, col) as an f32 expression; `row` and `col` are i64 of one lane, `buf` holds the tensor (u8
/// for packed formats, the plain type otherwise).
pub fn unpack_scalar(
    kb: &mut KernelBuilder,
    layout: &TensorLayout,
    buf: BufId,
    row: ExprId,
    col: ExprId,
) -> ExprId {
    match &layout.region {
        LayoutRegion::Plain { place, .. } => {
            let at = place.emit(kb, row, col);
            let value = kb.load(buf, at);
            kb.cast(value, DType::F32)
        }
        LayoutRegion::Group { spec, codes, shift, scales, zeros } => {
            let i32 = ExprType::scalar(DType::I32);
            let at = codes.emit(kb, row, col);
            let mut code = if spec.format.fills_bytes() {
                let byte = kb.load(buf, at);
                kb.cast(byte, DType::I32)
            } else {
                let word = kb.load_vec(buf, at, 4);
                kb.bitcast(word, i32)
            };
            if let Some(shift) = shift {
                let by = shift.emit(kb, row, col);
                let by = kb.cast(by, DType::I32);
                code = kb.binary(BinOp::Shr, code, by);
                let mask = kb.constant(spec.format.max_code() as f64, i32);
                code = kb.binary(BinOp::And, code, mask);
            }
            let number = |kb: &mut KernelBuilder, place: &AddressExpr| {
                let at = place.emit(kb, row, col);
                let bytes = kb.load_vec(buf, at, spec.number_type().bytes() as u32);
                let number = kb.bitcast(bytes, ExprType::scalar(spec.number_type().dtype()));
                kb.cast(number, DType::F32)
            };
            if spec.format.values == CodeValues::E4M3 {
                let value = small_float(kb, code);
                let scale = number(kb, scales);
                return kb.mul(value, scale);
            }
            code = code_number(kb, spec.format, code);
            if let ZeroPoint::Constant(zero) = spec.format.zero {
                let zero = kb.constant(zero.into(), i32);
                code = kb.sub(code, zero);
            }
            code = kb.cast(code, DType::F32);
            let scale = number(kb, scales);
            let Some(zeros) = zeros else { return kb.mul(code, scale) };
            let zero = number(kb, zeros);
            if spec.format.zero == ZeroPoint::Minimum {
                let product = kb.mul(code, scale);
                return kb.add(product, zero);
            }
            let code = kb.sub(code, zero);
            kb.mul(code, scale)
        }
    }
}

/// The number that a code means, i32.
fn code_number(kb: &mut KernelBuilder, format: QuantFormat, code: ExprId) -> ExprId {
    if format.values != CodeValues::E2M1 {
        return code;
    }
    let mut with = |op, a, b: f64| {
        let b = kb.constant(b, ExprType::scalar(DType::I32));
        kb.binary(op, a, b)
    };
    let mut within = |a, low, high| {
        let a = with(BinOp::Max, a, low);
        with(BinOp::Min, a, high)
    };
    let a = within(code, 1.0, 13.0);
    let b = within(a, 3.0, 11.0);
    let code = with(BinOp::Mul, code, 4.0);
    let code = with(BinOp::Add, code, 5.0);
    let a = with(BinOp::Mul, a, 2.0);
    let taken = kb.add(a, b);
    kb.sub(code, taken)
}

/// The value of a code of E4M3, i32, as f32: its bits in those of an f32, whose exponent is less by 120 then.
fn small_float(kb: &mut KernelBuilder, code: ExprId) -> ExprId {
    let i32 = ExprType::scalar(DType::I32);
    let mut with = |op, a, b: f64| {
        let b = kb.constant(b, i32);
        kb.binary(op, a, b)
    };
    let size = with(BinOp::And, code, 254.0);
    let size = with(BinOp::Shl, size, 19.0);
    let sign = with(BinOp::Shl, code, 31.0);
    let bits = kb.binary(BinOp::Or, size, sign);
    let float = kb.bitcast(bits, ExprType::scalar(DType::F32));
    let factor = kb.constant(2f64.powi(120), ExprType::scalar(DType::F32));
    kb.mul(float, factor)
}
