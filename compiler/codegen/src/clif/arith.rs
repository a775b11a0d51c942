//! Elementwise arithmetic, comparisons and selection, on vectors where the machine has the operation and lane
//! by lane elsewhere.

use super::emit::ClifKernelEmitter;
use super::value::{ClifValue, LaneForm, mask_of, vector_of};
use crate::error::CodegenError;
use cranelift_codegen::ir::condcodes::{FloatCC, IntCC};
use cranelift_codegen::ir::{BlockArg, InstBuilder, Type, Value, types};
use mlcc_ir::kernel::{BinOp, ExprType, UnOp};
use mlcc_ir::types::DType;

impl ClifKernelEmitter<'_, '_> {
    // ---- one operand

    pub fn unary(&mut self, op: UnOp, a: &ClifValue, ty: ExprType) -> Result<ClifValue, CodegenError> {
        if matches!(ty.dtype, DType::F16 | DType::BF16) {
            return self.unsupported(format!("{} of {ty} (16-bit floats must be lowered first)", op.name()));
        }
        let float = ty.dtype == DType::F32;
        let fits = match op {
            UnOp::Neg | UnOp::Abs => ty.dtype != DType::Bool,
            UnOp::Not => !float,
            UnOp::Sqrt | UnOp::Floor | UnOp::Round => float,
            UnOp::Exp
            | UnOp::Log
            | UnOp::Tanh
            | UnOp::Sigmoid
            | UnOp::Rsqrt
            | UnOp::Recip
            | UnOp::Erf
            | UnOp::Sin
            | UnOp::Cos => false,
        };
        if !fits {
            let name = op.name();
            return self.unsupported(format!("{name} of {ty} is not primitive and must be expanded first"));
        }
        let scalar_bool = ty.dtype == DType::Bool && a.form == LaneForm::Scalars;
        let parts = a.parts.iter().map(|&p| match op {
            UnOp::Neg if float => self.fb.ins().fneg(p),
            UnOp::Neg => self.fb.ins().ineg(p),
            UnOp::Abs if float => self.fb.ins().fabs(p),
            UnOp::Abs if ty.dtype.is_signed() => self.fb.ins().iabs(p),
            UnOp::Abs => p,
            UnOp::Not if scalar_bool => self.fb.ins().bxor_imm_s(p, 1),
            UnOp::Not => self.fb.ins().bnot(p),
            UnOp::Sqrt => self.fb.ins().sqrt(p),
            UnOp::Floor => self.floor(p),
            _ => self.round(p),
        });
        Ok(ClifValue::new(a.form, parts.collect()))
    }

    fn floor(&mut self, x: Value) -> Value {
        if self.machine.rounding {
            return self.fb.ins().floor(x);
        }
        // Without the instruction there are no vectors either: x is a scalar.
        let toward_zero = self.fb.ins().fcvt_to_sint_sat(types::I32, x);
        let t = self.fb.ins().fcvt_from_sint(types::F32, toward_zero);
        let one = self.fb.ins().f32const(1.0);
        let below = self.fb.ins().fsub(t, one);
        let above = self.fb.ins().fcmp(FloatCC::GreaterThan, t, x);
        let floor = self.fb.ins().select(above, below, t);
        self.unless_integral(x, floor)
    }

    fn round(&mut self, x: Value) -> Value {
        if self.machine.rounding {
            return self.fb.ins().nearest(x);
        }
        // Adding 2^23 leaves no fraction bits and rounds half to even on the way.
        let magnitude = self.fb.ins().fabs(x);
        let magic = self.fb.ins().f32const(8_388_608.0);
        let up = self.fb.ins().fadd(magnitude, magic);
        let rounded = self.fb.ins().fsub(up, magic);
        self.unless_integral(x, rounded)
    }

    /// `rounded` with the sign of `x`, or `x` itself where it is so large that it has no fraction (or is
    /// NaN).
    fn unless_integral(&mut self, x: Value, rounded: Value) -> Value {
        let signed = self.fb.ins().fcopysign(rounded, x);
        let magnitude = self.fb.ins().fabs(x);
        let limit = self.fb.ins().f32const(8_388_608.0);
        let small = self.fb.ins().fcmp(FloatCC::LessThan, magnitude, limit);
        self.fb.ins().select(small, signed, x)
    }

    // ---- three operands

    pub fn fma(
        &mut self,
        a: &ClifValue,
        b: &ClifValue,
        c: &ClifValue,
        ty: ExprType,
    ) -> Result<ClifValue, CodegenError> {
        if ty.dtype != DType::F32 {
            return self.unsupported(format!("fma of {ty} (16-bit floats must be lowered first)"));
        }
        let mut parts = Vec::with_capacity(a.parts.len());
        for ((&a, &b), &c) in a.parts.iter().zip(&b.parts).zip(&c.parts) {
            parts.push(if self.machine.fma {
                self.fb.ins().fma(a, b, c)
            } else {
                let product = self.fb.ins().fmul(a, b);
                self.fb.ins().fadd(product, c)
            });
        }
        Ok(ClifValue::new(a.form, parts))
    }

    pub fn select(&mut self, cond: &ClifValue, a: &ClifValue, b: &ClifValue, ty: ExprType) -> ClifValue {
        if ty.dtype == DType::Bool {
            let (form, vals) = self.same_masks(&[cond, a, b]);
            let parts = (0..vals[0].parts.len())
                .map(|i| self.select_part(form, vals[0].parts[i], vals[1].parts[i], vals[2].parts[i]));
            return ClifValue::new(form, parts.collect());
        }
        let mask_form = match a.form {
            LaneForm::Scalars => LaneForm::Scalars,
            LaneForm::Vectors(vector) => LaneForm::Vectors(mask_of(vector)),
        };
        let cond = self.mask_to(cond, mask_form);
        let lanes = cond.parts.iter().zip(&a.parts).zip(&b.parts);
        let parts = lanes.map(|((&c, &x), &y)| self.select_part(a.form, c, x, y)).collect();
        ClifValue::new(a.form, parts)
    }

    fn select_part(&mut self, form: LaneForm, cond: Value, a: Value, b: Value) -> Value {
        match form {
            LaneForm::Scalars => self.fb.ins().select(cond, a, b),
            LaneForm::Vectors(vector) => {
                let cond = self.as_type(cond, vector);
                self.fb.ins().bitselect(cond, a, b)
            }
        }
    }

    // ---- two operands

    /// `ty` is the type of the operands.
    pub fn binary(
        &mut self,
        op: BinOp,
        a: &ClifValue,
        b: &ClifValue,
        ty: ExprType,
    ) -> Result<ClifValue, CodegenError> {
        let fits = match ty.dtype {
            DType::Bool => return self.binary_bool(op, a, b),
            DType::F32 => !matches!(op, BinOp::And | BinOp::Or | BinOp::Xor | BinOp::Shl | BinOp::Shr),
            dtype => dtype.is_int(),
        };
        if !fits {
            return self.unsupported(format!("{} of {ty}", op.name()));
        }
        let vector = match a.form {
            LaneForm::Vectors(vector) => vector,
            LaneForm::Scalars => {
                let lanes = a.parts.iter().zip(&b.parts);
                return Ok(ClifValue::new(
                    LaneForm::Scalars,
                    lanes.map(|(&x, &y)| self.scalar_op(op, x, y, ty.dtype)).collect(),
                ));
            }
        };
        let lane_by_lane = match op {
            BinOp::Shl | BinOp::Shr => true,
            BinOp::Div => ty.dtype != DType::F32,
            BinOp::Rem => true,
            _ => false,
        };
        if lane_by_lane {
            let (x, y) = (self.scalars(a, false), self.scalars(b, false));
            let lanes = x.into_iter().zip(y).map(|(x, y)| self.scalar_op(op, x, y, ty.dtype)).collect();
            return Ok(self.assemble(a.form, lanes));
        }
        let parts = a.parts.iter().zip(&b.parts).map(|(&x, &y)| self.vector_op(op, vector, x, y, ty.dtype));
        let parts = parts.collect();
        let form = if op.is_comparison() { LaneForm::Vectors(mask_of(vector)) } else { a.form };
        Ok(ClifValue::new(form, parts))
    }

    fn scalar_op(&mut self, op: BinOp, a: Value, b: Value, dtype: DType) -> Value {
        match op {
            BinOp::Shl | BinOp::Shr => self.shift(op, a, b, dtype),
            BinOp::Rem if dtype == DType::F32 => self.float_rem(a, b),
            BinOp::Div | BinOp::Rem if dtype != DType::F32 => self.divide(op, a, b, dtype.is_signed()),
            BinOp::Min | BinOp::Max if dtype == DType::F32 => {
                let (better, nan) = self.prefers_first(op, a, b);
                let first = self.fb.ins().bor(better, nan);
                self.fb.ins().select(first, a, b)
            }
            _ => self.plain_op(op, a, b, dtype),
        }
    }

    fn vector_op(&mut self, op: BinOp, vector: Type, a: Value, b: Value, dtype: DType) -> Value {
        match op {
            BinOp::Mul if vector == types::I8X16 => self.multiply_bytes(a, b),
            BinOp::Min | BinOp::Max if dtype == DType::F32 => {
                let (better, nan) = self.prefers_first(op, a, b);
                let first = self.fb.ins().bor(better, nan);
                self.select_part(LaneForm::Vectors(vector), first, a, b)
            }
            _ => self.plain_op(op, a, b, dtype),
        }
    }

    /// Operations that scalars and vectors spell alike.
    fn plain_op(&mut self, op: BinOp, a: Value, b: Value, dtype: DType) -> Value {
        let (float, signed) = (dtype == DType::F32, dtype.is_signed());
        let ins = self.fb.ins();
        match op {
            BinOp::Add if float => ins.fadd(a, b),
            BinOp::Sub if float => ins.fsub(a, b),
            BinOp::Mul if float => ins.fmul(a, b),
            BinOp::Div | BinOp::Rem => ins.fdiv(a, b),
            BinOp::Lt if float => ins.fcmp(FloatCC::LessThan, a, b),
            BinOp::Le if float => ins.fcmp(FloatCC::LessThanOrEqual, a, b),
            BinOp::Eq if float => ins.fcmp(FloatCC::Equal, a, b),
            BinOp::Ne if float => ins.fcmp(FloatCC::NotEqual, a, b),
            BinOp::Add => ins.iadd(a, b),
            BinOp::Sub => ins.isub(a, b),
            BinOp::Mul => ins.imul(a, b),
            BinOp::Min if signed => ins.smin(a, b),
            BinOp::Min => ins.umin(a, b),
            BinOp::Max if signed => ins.smax(a, b),
            BinOp::Max => ins.umax(a, b),
            BinOp::And => ins.band(a, b),
            BinOp::Or => ins.bor(a, b),
            BinOp::Xor => ins.bxor(a, b),
            BinOp::Shl => ins.ishl(a, b),
            BinOp::Shr if signed => ins.sshr(a, b),
            BinOp::Shr => ins.ushr(a, b),
            BinOp::Lt if signed => ins.icmp(IntCC::SignedLessThan, a, b),
            BinOp::Lt => ins.icmp(IntCC::UnsignedLessThan, a, b),
            BinOp::Le if signed => ins.icmp(IntCC::SignedLessThanOrEqual, a, b),
            BinOp::Le => ins.icmp(IntCC::UnsignedLessThanOrEqual, a, b),
            BinOp::Eq => ins.icmp(IntCC::Equal, a, b),
            BinOp::Ne => ins.icmp(IntCC::NotEqual, a, b),
        }
    }

    pub fn shift(&mut self, op: BinOp, value: Value, amount: Value, dtype: DType) -> Value {
        match op {
            BinOp::Shl => self.fb.ins().ishl(value, amount),
            _ if dtype.is_signed() => self.fb.ins().sshr(value, amount),
            _ => self.fb.ins().ushr(value, amount),
        }
    }

    /// True if `a` is the smaller (larger) one, and true if `b` is NaN; either way `a` is the result.
    fn prefers_first(&mut self, op: BinOp, a: Value, b: Value) -> (Value, Value) {
        let order = if op == BinOp::Min { FloatCC::LessThan } else { FloatCC::GreaterThan };
        (self.fb.ins().fcmp(order, a, b), self.fb.ins().fcmp(FloatCC::Unordered, b, b))
    }

    /// Byte products modulo 256 by way of 16-bit lanes.
    fn multiply_bytes(&mut self, a: Value, b: Value) -> Value {
        let (a, b) = (self.widen(&[a], false), self.widen(&[b], false));
        let low_byte = self.vector_splat_const(vector_of(types::I16), 0xff);
        let mut products = Vec::with_capacity(2);
        for (&x, &y) in a.iter().zip(&b) {
            let product = self.fb.ins().imul(x, y);
            products.push(self.fb.ins().band(product, low_byte));
        }
        self.fb.ins().unarrow(products[0], products[1])
    }

    /// Truncating division that never traps: `MIN / -1` wraps, and a zero divisor (possible in a lane that is
    /// masked off later) counts as 1.
    fn divide(&mut self, op: BinOp, a: Value, b: Value, signed: bool) -> Value {
        let ty = self.fb.func.dfg.value_type(a);
        if ty.bits() < 32 {
            let (a, b) = match signed {
                true => (self.fb.ins().sextend(types::I32, a), self.fb.ins().sextend(types::I32, b)),
                false => (self.fb.ins().uextend(types::I32, a), self.fb.ins().uextend(types::I32, b)),
            };
            let wide = self.divide(op, a, b, signed);
            return self.fb.ins().ireduce(ty, wide);
        }
        let one = self.fb.ins().iconst(ty, 1);
        let zero = self.fb.ins().iconst(ty, 0);
        let is_zero = self.fb.ins().icmp(IntCC::Equal, b, zero);
        if !signed {
            let divisor = self.fb.ins().select(is_zero, one, b);
            return match op {
                BinOp::Div => self.fb.ins().udiv(a, divisor),
                _ => self.fb.ins().urem(a, divisor),
            };
        }
        let minus_one = self.fb.ins().icmp_imm_s(IntCC::Equal, b, -1);
        let special = self.fb.ins().bor(is_zero, minus_one);
        let divisor = self.fb.ins().select(special, one, b);
        match op {
            BinOp::Div => {
                let quotient = self.fb.ins().sdiv(a, divisor);
                let negated = self.fb.ins().ineg(a);
                self.fb.ins().select(minus_one, negated, quotient)
            }
            _ => self.fb.ins().srem(a, divisor),
        }
    }

    /// The exact remainder, by subtracting the largest `|b| * 2^k` from what is left of `|a|`. In f64 no f32
    /// is subnormal, each of these multiples is exact, and so is each difference.
    fn float_rem(&mut self, a: Value, b: Value) -> Value {
        let (x, y) = (self.fb.ins().fpromote(types::F64, a), self.fb.ins().fpromote(types::F64, b));
        let (x, y) = (self.fb.ins().fabs(x), self.fb.ins().fabs(y));
        let (zero, infinity) = (self.fb.ins().f64const(0.0), self.fb.ins().f64const(f64::INFINITY));
        let finite = self.fb.ins().fcmp(FloatCC::LessThan, x, infinity);
        let positive = self.fb.ins().fcmp(FloatCC::GreaterThan, y, zero);
        let valid = self.fb.ins().band(finite, positive);
        let x = self.fb.ins().select(valid, x, zero);

        let (header, subtract, done) =
            (self.fb.create_block(), self.fb.create_block(), self.fb.create_block());
        let left = self.fb.append_block_param(header, types::F64);
        self.fb.ins().jump(header, &[BlockArg::from(x)]);
        self.fb.switch_to_block(header);
        let more = self.fb.ins().fcmp(FloatCC::GreaterThanOrEqual, left, y);
        let more = self.fb.ins().band(more, valid);
        self.fb.ins().brif(more, subtract, &[], done, &[]);
        self.enter(subtract);
        // The exponent of what is left with the fraction of |b|, halved if that is too much.
        let (left_bits, y_bits) = (self.as_type(left, types::I64), self.as_type(y, types::I64));
        let exponent = self.fb.ins().band_imm_u(left_bits, 0x7ff0_0000_0000_0000);
        let fraction = self.fb.ins().band_imm_u(y_bits, 0x000f_ffff_ffff_ffff);
        let multiple = self.fb.ins().bor(exponent, fraction);
        let multiple = self.as_type(multiple, types::F64);
        let half = self.fb.ins().f64const(0.5);
        let halved = self.fb.ins().fmul(multiple, half);
        let too_much = self.fb.ins().fcmp(FloatCC::GreaterThan, multiple, left);
        let multiple = self.fb.ins().select(too_much, halved, multiple);
        let less = self.fb.ins().fsub(left, multiple);
        self.fb.ins().jump(header, &[BlockArg::from(less)]);
        self.fb.seal_block(header);
        self.enter(done);
        let rest = self.fb.ins().fdemote(types::F32, left);
        let rest = self.fb.ins().fcopysign(rest, a);
        let nan = self.fb.ins().f32const(f32::NAN);
        self.fb.ins().select(valid, rest, nan)
    }

    fn binary_bool(&mut self, op: BinOp, a: &ClifValue, b: &ClifValue) -> Result<ClifValue, CodegenError> {
        let (form, vals) = self.same_masks(&[a, b]);
        let pairs = vals[0].parts.iter().zip(&vals[1].parts);
        let mut parts = Vec::with_capacity(vals[0].parts.len());
        for (&x, &y) in pairs {
            parts.push(match op {
                BinOp::And => self.fb.ins().band(x, y),
                BinOp::Or => self.fb.ins().bor(x, y),
                BinOp::Xor | BinOp::Ne => self.fb.ins().bxor(x, y),
                BinOp::Eq => {
                    let differ = self.fb.ins().bxor(x, y);
                    self.complement(form, differ)
                }
                BinOp::Lt
                | BinOp::Le
                | BinOp::Add
                | BinOp::Sub
                | BinOp::Mul
                | BinOp::Div
                | BinOp::Rem
                | BinOp::Min
                | BinOp::Max
                | BinOp::Shl
                | BinOp::Shr => {
                    return self.unsupported(format!("{} of bool", op.name()));
                }
            });
        }
        Ok(ClifValue::new(form, parts))
    }

    fn complement(&mut self, form: LaneForm, mask: Value) -> Value {
        match form {
            LaneForm::Scalars => self.fb.ins().bxor_imm_s(mask, 1),
            LaneForm::Vectors(_) => self.fb.ins().bnot(mask),
        }
    }
}
