//! Reading weights back: on the host (graph interpreter, tests) and one element at a time in kernel IR (gather, generic
//! kernels).

use crate::QuantError;
use crate::layout::{Layout, Region};
use half::f16;
use mlcc_ir::builder::KernelBuilder;
use mlcc_ir::kernel::{BinOp, BufId, ExprId, Ty};
use mlcc_ir::types::{DType, Packing};

fn checked(dtype: DType, packing: Packing, n: usize, k: usize, found: usize) -> Result<Layout, QuantError> {
    let layout = Layout::new(dtype, packing, n, k)?;
    let expected = layout.bytes();
    match found == expected {
        true => Ok(layout),
        false => Err(QuantError::ByteCount { dtype, packing, n, k, expected, found }),
    }
}

fn read(layout: &Layout, bytes: &[u8], row: usize, col: usize) -> f32 {
    match &layout.region {
        Region::Plain { plain, place } => plain.read(bytes, place.at(row, col)),
        Region::Group { spec, codes, shift, scales, .. } => {
            let byte = bytes[codes.at(row, col)];
            let shift = shift.as_ref().map_or(0, |s| s.at(row, col));
            let code = byte >> shift & ((1_u32 << spec.bits) - 1) as u8;
            let at = scales.at(row, col);
            spec.decode(code, f16::from_le_bytes([bytes[at], bytes[at + 1]]))
        }
    }
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

/// One element; `row < n` and `col < k`.
pub fn element(
    dtype: DType,
    packing: Packing,
    (n, k): (usize, usize),
    bytes: &[u8],
    (row, col): (usize, usize),
) -> Result<f32, QuantError> {
    Ok(read(&checked(dtype, packing, n, k, bytes.len())?, bytes, row, col))
}

/// Element (row, col) as an f32 expression; `row` and `col` are i64 of one lane, `buf` holds the tensor (u8 for packed
/// formats, the plain type otherwise).
pub fn unpack_scalar(
    kb: &mut KernelBuilder,
    layout: &Layout,
    buf: BufId,
    row: ExprId,
    col: ExprId,
) -> ExprId {
    match &layout.region {
        Region::Plain { place, .. } => {
            let at = place.emit(kb, row, col);
            let value = kb.load(buf, at);
            kb.cast(value, DType::F32)
        }
        Region::Group { spec, codes, shift, scales, .. } => {
            let at = codes.emit(kb, row, col);
            let byte = kb.load(buf, at);
            let mut code = kb.cast(byte, DType::I32);
            if let Some(shift) = shift {
                let by = shift.emit(kb, row, col);
                let by = kb.cast(by, DType::I32);
                code = kb.binary(BinOp::Shr, code, by);
                let mask = kb.constant(((1_u32 << spec.bits) - 1).into(), Ty::scalar(DType::I32));
                code = kb.binary(BinOp::And, code, mask);
            }
            let zero = kb.constant(spec.zero_point.into(), Ty::scalar(DType::I32));
            let code = kb.sub(code, zero);
            let code = kb.cast(code, DType::F32);
            let at = scales.emit(kb, row, col);
            let bytes = kb.load_vec(buf, at, 2);
            let scale = kb.bitcast(bytes, Ty::scalar(DType::F16));
            let scale = kb.cast(scale, DType::F32);
            kb.mul(code, scale)
        }
    }
}
