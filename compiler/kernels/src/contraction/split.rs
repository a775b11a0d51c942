//! Activations as 16-bit block floating point, so that float activations can use the int8 dot instructions.
//!
//! Each group of 32 activations becomes integers `q = round(x / scale)` with `scale = max|x| / 32512`, stored as two int8
//! planes: `q = 256 high + low`. A weight meets both planes with the same instruction as int8 activations would use, at
//! twice their number. The error of an activation is at most `max|x| / 65024` of its group: finer than f16 for the large
//! values of a group, and far below the error of the weights.
//!
//! The integers live on the stack of each worker, which makes them itself for a chunk of rows: cheaper than a barrier.

use super::{Activation, GROUP, MatMul, Weight};
use crate::params::MatMulParams;
use mlcc_ir::builder::KernelBuilder;
use mlcc_ir::kernel::{BinOp, BufId, ExprId, Space, Ty, UnOp};
use mlcc_ir::types::DType;
use mlcc_quant::tile;

/// Largest integer of an activation: its high byte is at most 127 after rounding.
const MAX_CODE: f64 = 32512.0;
/// Bytes of stack that the planes may take.
const STACK_BYTES: usize = 128 << 10;
/// Magnitudes below this are taken as zero: their scale would not be a normal number.
const TINY: f64 = 1e-30;

/// The planes of one chunk of rows.
pub(super) struct Planes {
    codes: BufId,
    scales: BufId,
    /// `-zero point * sum of the integers` of each group.
    starts: BufId,
}

/// Rows that fit the stack, a multiple of `block` where possible.
pub(super) fn chunk_rows(k: usize, block: u32) -> u32 {
    let fit = (STACK_BYTES / (2 * k.next_multiple_of(GROUP)).max(1)).max(1) as u32;
    if fit > block { fit / block * block } else { fit }
}

impl Planes {
    pub(super) fn alloc(kb: &mut KernelBuilder, rows: u32, k: usize) -> Planes {
        let (rows, groups) = (rows as usize, k.div_ceil(GROUP));
        Planes {
            codes: kb.alloc("planes", DType::I8, rows * groups * GROUP * 2, Space::Stack),
            scales: kb.alloc("x_scales", DType::F32, rows * groups, Space::Stack),
            starts: kb.alloc("x_starts", DType::I32, rows * groups, Space::Stack),
        }
    }

    /// The contraction with these planes as its activations; row `first` of the result is row 0 of the planes.
    pub(super) fn spec(&self, kb: &mut KernelBuilder, spec: &MatMul, first: ExprId) -> MatMul {
        let zero = kb.int(0);
        let x_first = kb.sub(zero, first);
        let activation = Activation::I16 { scales: self.scales, sums: self.starts };
        MatMul { x: self.codes, activation, x_first, ..*spec }
    }

    /// Fills the planes from `count` rows of x, from row `first` of the result.
    pub(super) fn fill(
        &self,
        kb: &mut KernelBuilder,
        spec: &MatMul,
        params: &MatMulParams,
        (first, count): (ExprId, ExprId),
    ) {
        let stride = spec.activation.row_stride(spec.k) as i64;
        let groups = spec.k.div_ceil(GROUP) as i64;
        let full = kb.int((spec.k / GROUP) as i64);
        kb.serial("r", count, |kb, r| {
            let row = kb.add(spec.x_first, first);
            let row = kb.add(row, r);
            let start = kb.mul_int(row, stride);
            let to = kb.mul_int(r, groups);
            kb.serial("g", full, |kb, g| self.group(kb, spec, params, (start, to, g), GROUP));
            if !spec.k.is_multiple_of(GROUP) {
                self.group(kb, spec, params, (start, to, full), spec.k % GROUP);
            }
        });
    }

    /// One group with its first `columns` columns.
    fn group(
        &self,
        kb: &mut KernelBuilder,
        spec: &MatMul,
        params: &MatMulParams,
        (start, to, g): (ExprId, ExprId, ExprId),
        columns: usize,
    ) {
        let lanes = params.lanes;
        let float = Ty::vector(DType::F32, lanes);
        let here = kb.mul_int(g, GROUP as i64);
        let from = kb.add(start, here);
        let values = load_group(kb, spec.x, from, columns, lanes);
        let sizes: Vec<ExprId> = values.iter().map(|&v| kb.unary(UnOp::Abs, v)).collect();
        let largest =
            sizes.into_iter().reduce(|a, b| kb.max(a, b)).unwrap_or_else(|| kb.constant(0.0, float));
        let largest = kb.reduce_lanes(BinOp::Max, largest);
        let largest = kb.let_("largest", largest);
        let (tiny, max, step, none) =
            (kb.float(TINY), kb.float(MAX_CODE), kb.float(1.0 / MAX_CODE), kb.float(0.0));
        let normal = kb.lt(tiny, largest);
        let inverse = kb.div(max, largest);
        let inverse = kb.select(normal, inverse, none);
        let inverse = kb.let_("inverse", inverse);
        let scale = kb.mul(largest, step);
        let scale = kb.select(normal, scale, none);
        // Integers cannot hold NaN and infinity: the scale carries them on as NaN.
        let zeros: Vec<ExprId> = values.iter().map(|&v| kb.mul(v, none)).collect();
        let poison = zeros.into_iter().reduce(|a, b| kb.add(a, b)).unwrap_or_else(|| kb.constant(0.0, float));
        let poison = kb.reduce_lanes(BinOp::Add, poison);
        let scale = kb.add(scale, poison);

        let index = kb.add(to, g);
        kb.store(self.scales, index, scale);
        // Planes of a row: all high bytes, then all low ones.
        let groups = spec.k.div_ceil(GROUP) as i64;
        let row_start = kb.mul_int(to, 2 * GROUP as i64);
        let high_at = kb.add(row_start, here);
        let mut sum = None;
        for (part, &value) in values.iter().enumerate() {
            let code = nearest(kb, value, inverse);
            let code = kb.let_("q", code);
            sum = Some(match sum {
                Some(sum) => kb.add(sum, code),
                None => code,
            });
            let (half, by) = (kb.int_of(128, DType::I32), kb.int_of(8, DType::I32));
            let high = kb.add(code, half);
            let high = kb.binary(BinOp::Shr, high, by);
            let back = kb.binary(BinOp::Shl, high, by);
            let low = kb.sub(code, back);
            let at = kb.add_int(high_at, i64::from(part as u32 * lanes));
            for (plane, bytes) in [(0, high), (groups * GROUP as i64, low)] {
                let bytes = kb.cast(bytes, DType::I8);
                let at = kb.add_int(at, plane);
                kb.store_vec(self.codes, at, bytes);
            }
        }
        if let Some(sum) = sum {
            let sum = kb.reduce_lanes(BinOp::Add, sum);
            let zero_point = match spec.weight {
                Weight::Packed(format) => tile::zero_point(format),
                Weight::Plain(_) => 0,
            };
            let factor = kb.int_of(-zero_point, DType::I32);
            let start = kb.mul(sum, factor);
            kb.store(self.starts, index, start);
        }
    }
}

/// The vectors of one group, zero behind its columns.
fn load_group(kb: &mut KernelBuilder, x: BufId, from: ExprId, columns: usize, lanes: u32) -> Vec<ExprId> {
    let load = |part: usize| {
        let begin = part * lanes as usize;
        let at = kb.add_int(from, begin as i64);
        let index = kb.ramp1(at, lanes);
        let value = if begin >= columns {
            kb.constant(0.0, Ty::vector(DType::F32, lanes))
        } else if begin + lanes as usize <= columns {
            let value = kb.load(x, index);
            kb.cast(value, DType::F32)
        } else {
            let first = kb.int(begin as i64);
            let numbers = kb.ramp1(first, lanes);
            let end = kb.int(columns as i64);
            let mask = kb.lt(numbers, end);
            let value = kb.load_masked(x, index, Some(mask));
            kb.cast(value, DType::F32)
        };
        kb.let_("v", value)
    };
    (0..GROUP / lanes as usize).map(load).collect()
}

/// `round(value * factor)` as i32 for results below 2^22, through the low bits of a float.
fn nearest(kb: &mut KernelBuilder, value: ExprId, factor: ExprId) -> ExprId {
    const MAGIC: f32 = 12_582_912.0;
    let lanes = kb.ty(value).lanes;
    let scaled = kb.mul(value, factor);
    let magic = kb.float(MAGIC.into());
    let shifted = kb.add(scaled, magic);
    let bits = kb.bitcast(shifted, Ty::vector(DType::I32, lanes));
    let base = kb.int_of(MAGIC.to_bits().into(), DType::I32);
    kb.sub(bits, base)
}
