//! f16 and bf16 without half-precision hardware: rewrites a kernel so that values of these types are only
//! moved, never computed with.
//!
//! After [`lower_halfs`] a value of type `F16` or `BF16` is its 16 bits: it is loaded, stored, shuffled,
//! selected, splatted and bitcast, or an argument of a target instruction. Arithmetic and comparisons happen
//! in f32 and are rounded back (for one operation `f32 -> half` rounding of the f32 result equals direct
//! rounding). Casts between half types and f32 become integer operations, except f16 ones where the target
//! has them ([`HalfSupport::f16_casts`]).
//!
//! The conversions are the branch-free ones of F. Giesen ("half to float done quick") with round to nearest
//! even, subnormals, infinities and NaN (kept as quiet NaN).

use mlcc_ir::builder::KernelBuilder;
use mlcc_ir::kernel::{BinOp, Expr, ExprId, ExprType, Kernel, Literal};
use mlcc_ir::rewrite::rewrite_exprs;
use mlcc_ir::types::DType;

/// The conversions that the back end has itself.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct HalfSupport {
    /// `Cast` between f16 and f32 stays in the kernel.
    pub f16_casts: bool,
}

fn is_half(dtype: DType) -> bool {
    matches!(dtype, DType::F16 | DType::BF16)
}

/// Rewrites the whole kernel; see the module documentation.
pub fn lower_halfs(kernel: &Kernel, support: HalfSupport) -> Kernel {
    rewrite_exprs(kernel, |kb, expr, ty| lower(kb, support, expr, ty))
}

fn lower(kb: &mut KernelBuilder, support: HalfSupport, expr: &Expr, ty: ExprType) -> Option<ExprId> {
    match expr {
        Expr::Const(Literal::Float(bits)) if is_half(ty.dtype) => {
            let value = f64::from_bits(*bits);
            let bits = match ty.dtype {
                DType::F16 => half::f16::from_f64(value).to_bits(),
                _ => half::bf16::from_f64(value).to_bits(),
            };
            let bits = kb.int_of(i64::from(bits), DType::U16);
            Some(kb.bitcast(bits, ty))
        }
        Expr::Cast(a) => {
            let from = kb.ty(*a).dtype;
            if !is_half(from) && !is_half(ty.dtype) {
                return None;
            }
            let wide = widen(kb, support, *a);
            Some(convert_from_f32(kb, support, wide, ty.dtype))
        }
        Expr::Unary(op, a) if is_half(ty.dtype) => {
            let wide = widen(kb, support, *a);
            let result = kb.unary(*op, wide);
            Some(convert_from_f32(kb, support, result, ty.dtype))
        }
        Expr::Binary(op, a, b) if is_half(kb.ty(*a).dtype) => {
            let (x, y) = (widen(kb, support, *a), widen(kb, support, *b));
            let result = kb.binary(*op, x, y);
            Some(if op.is_comparison() { result } else { convert_from_f32(kb, support, result, ty.dtype) })
        }
        Expr::Fma(a, b, c) if is_half(ty.dtype) => {
            let [x, y, z] = [*a, *b, *c].map(|e| widen(kb, support, e));
            let result = kb.fma(x, y, z);
            Some(convert_from_f32(kb, support, result, ty.dtype))
        }
        _ => None,
    }
}

/// A half value as f32; every other type unchanged.
fn widen(kb: &mut KernelBuilder, support: HalfSupport, a: ExprId) -> ExprId {
    match kb.ty(a).dtype {
        DType::F16 if support.f16_casts => kb.cast(a, DType::F32),
        DType::F16 => f16_to_f32(kb, a),
        DType::BF16 => bf16_to_f32(kb, a),
        _ => a,
    }
}

/// Converts to any type; half types go through f32.
fn convert_from_f32(kb: &mut KernelBuilder, support: HalfSupport, a: ExprId, to: DType) -> ExprId {
    if !is_half(to) {
        return kb.cast(a, to);
    }
    let wide = kb.cast(a, DType::F32);
    match to {
        DType::F16 if support.f16_casts => kb.cast(wide, DType::F16),
        DType::F16 => f32_to_f16(kb, wide),
        _ => f32_to_bf16(kb, wide),
    }
}

/// Constants and operators on `lanes` u32 values.
struct WordBuilder<'a> {
    kb: &'a mut KernelBuilder,
    lanes: u32,
}

impl WordBuilder<'_> {
    fn int(&mut self, value: u32) -> ExprId {
        let scalar = self.kb.int_of(i64::from(value), DType::U32);
        self.kb.splat(scalar, self.lanes)
    }
    fn op(&mut self, op: BinOp, a: ExprId, b: u32) -> ExprId {
        let b = self.int(b);
        self.kb.binary(op, a, b)
    }
    fn or(&mut self, a: ExprId, b: ExprId) -> ExprId {
        self.kb.binary(BinOp::Or, a, b)
    }
    /// `a < b`.
    fn less_than(&mut self, a: ExprId, b: u32) -> ExprId {
        self.op(BinOp::Lt, a, b)
    }
    fn as_f32(&mut self, a: ExprId) -> ExprId {
        self.kb.bitcast(a, ExprType::vector(DType::F32, self.lanes))
    }
    fn as_u32(&mut self, a: ExprId) -> ExprId {
        self.kb.bitcast(a, ExprType::vector(DType::U32, self.lanes))
    }
    fn half_bits(&mut self, a: ExprId) -> ExprId {
        let bits = self.kb.bitcast(a, ExprType::vector(DType::U16, self.lanes));
        self.kb.cast(bits, DType::U32)
    }
    fn half_value(&mut self, a: ExprId, dtype: DType) -> ExprId {
        let bits = self.kb.cast(a, DType::U16);
        self.kb.bitcast(bits, ExprType::vector(dtype, self.lanes))
    }
}

fn words(kb: &mut KernelBuilder, a: ExprId) -> WordBuilder<'_> {
    let lanes = kb.ty(a).lanes;
    WordBuilder { kb, lanes }
}

fn bf16_to_f32(kb: &mut KernelBuilder, a: ExprId) -> ExprId {
    let mut w = words(kb, a);
    let bits = w.half_bits(a);
    let high = w.op(BinOp::Shl, bits, 16);
    w.as_f32(high)
}

fn f32_to_bf16(kb: &mut KernelBuilder, a: ExprId) -> ExprId {
    let mut w = words(kb, a);
    let bits = w.as_u32(a);
    // Round to nearest even by adding 0x7fff, plus one more if the kept part is odd.
    let shifted = w.op(BinOp::Shr, bits, 16);
    let odd = w.op(BinOp::And, shifted, 1);
    let up = w.op(BinOp::Add, odd, 0x7fff);
    let rounded = w.kb.binary(BinOp::Add, bits, up);
    let rounded = w.op(BinOp::Shr, rounded, 16);
    let quiet = w.op(BinOp::Or, shifted, 0x40);
    let magnitude = w.op(BinOp::And, bits, 0x7fff_ffff);
    let number = w.less_than(magnitude, 0x7f80_0001);
    let out = w.kb.select(number, rounded, quiet);
    w.half_value(out, DType::BF16)
}

fn f16_to_f32(kb: &mut KernelBuilder, a: ExprId) -> ExprId {
    let mut w = words(kb, a);
    let bits = w.half_bits(a);
    let sign = w.op(BinOp::And, bits, 0x8000);
    let sign = w.op(BinOp::Shl, sign, 16);
    let magnitude = w.op(BinOp::And, bits, 0x7fff);
    let aligned = w.op(BinOp::Shl, magnitude, 13);
    // Another exponent bias: 127 - 15 = 112.
    let normal = w.op(BinOp::Add, aligned, 112 << 23);
    let special = w.op(BinOp::Or, aligned, 0x7f80_0000);
    // A subnormal is its mantissa times 2^-24, exactly.
    let signed = w.kb.bitcast(magnitude, ExprType::vector(DType::I32, w.lanes));
    let mantissa = w.kb.cast(signed, DType::F32);
    let scale = w.kb.constant(f64::from(2.0f32.powi(-24)), ExprType::F32);
    let tiny = w.kb.mul(mantissa, scale);
    let tiny = w.as_u32(tiny);
    let finite = w.less_than(magnitude, 0x7c00);
    let subnormal = w.less_than(magnitude, 0x0400);
    let out = w.kb.select(finite, normal, special);
    let out = w.kb.select(subnormal, tiny, out);
    let out = w.or(out, sign);
    w.as_f32(out)
}

fn f32_to_f16(kb: &mut KernelBuilder, a: ExprId) -> ExprId {
    let mut w = words(kb, a);
    let bits = w.as_u32(a);
    let sign = w.op(BinOp::And, bits, 0x8000_0000);
    let sign = w.op(BinOp::Shr, sign, 16);
    let magnitude = w.op(BinOp::And, bits, 0x7fff_ffff);
    // Normal numbers: new bias, and round to nearest even; a carry may make it infinite, rightly.
    let cut = w.op(BinOp::Shr, magnitude, 13);
    let odd = w.op(BinOp::And, cut, 1);
    let biased = w.op(BinOp::Add, magnitude, (15u32.wrapping_sub(127) << 23).wrapping_add(0xfff));
    let rounded = w.kb.binary(BinOp::Add, biased, odd);
    let normal = w.op(BinOp::Shr, rounded, 13);
    // Subnormal results: adding 0.5 leaves the mantissa, rounded by the addition, in the low bits.
    let value = w.as_f32(magnitude);
    let magic = w.kb.constant(0.5, ExprType::F32);
    let sum = w.kb.add(value, magic);
    let sum = w.as_u32(sum);
    let subnormal = w.op(BinOp::Sub, sum, 126 << 23);
    // Quiet NaN with the top of the payload; infinity.
    let payload = w.op(BinOp::And, cut, 0x3ff);
    let nan = w.op(BinOp::Or, payload, 0x7e00);
    let infinity = w.int(0x7c00);
    let is_small = w.less_than(magnitude, 113 << 23);
    let is_finite = w.less_than(magnitude, 143 << 23);
    let is_number = w.less_than(magnitude, 0x7f80_0001);
    let out = w.kb.select(is_small, subnormal, normal);
    let special = w.kb.select(is_number, infinity, nan);
    let out = w.kb.select(is_finite, out, special);
    let out = w.or(out, sign);
    w.half_value(out, DType::F16)
}
