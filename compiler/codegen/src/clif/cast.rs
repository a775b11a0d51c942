//! Value conversions. Vectors go through the widths between source and target; everything else lane by lane.
//! Float to integer truncates and saturates (NaN gives 0), integers wrap, and 16-bit floats are not seen
//! here.

use super::emit::ClifKernelEmitter;
use super::value::{ClifValue, LaneForm, mask_of, scalar_type, vector_of};
use crate::error::CodegenError;
use cranelift_codegen::ir::condcodes::{FloatCC, IntCC};
use cranelift_codegen::ir::{InstBuilder, Type, Value, types};
use mlcc_ir::kernel::ExprType;
use mlcc_ir::types::DType;

impl ClifKernelEmitter<'_, '_> {
    pub fn cast(
        &mut self,
        value: &ClifValue,
        from: ExprType,
        to: ExprType,
    ) -> Result<ClifValue, CodegenError> {
        if from.dtype == to.dtype {
            return Ok(value.clone());
        }
        if [from.dtype, to.dtype].iter().any(|d| matches!(d, DType::F16 | DType::BF16)) {
            return self.unsupported(format!("cast of {from} to {to} (16-bit floats must be lowered first)"));
        }
        let form = self.form(to);
        let mut val = match (value.form, form) {
            _ if to.dtype == DType::Bool => self.is_nonzero(value, from),
            (_, LaneForm::Vectors(vector)) if from.dtype == DType::Bool => self.mask_to_number(value, vector),
            (LaneForm::Vectors(source), LaneForm::Vectors(target)) => {
                let parts = self.cast_vectors(&value.parts, source, target, from.dtype, to.dtype);
                ClifValue::new(form, parts)
            }
            _ => {
                let lanes = self.scalars(value, from.dtype == DType::Bool);
                let lanes = lanes.into_iter().map(|l| self.cast_scalar(l, from.dtype, to.dtype)).collect();
                self.assemble(form, lanes)
            }
        };
        let extends = matches!(from.dtype, DType::I64) && to.dtype == DType::I64;
        val.known = value.known.filter(|_| extends);
        Ok(val)
    }

    fn is_nonzero(&mut self, value: &ClifValue, from: ExprType) -> ClifValue {
        let float = from.dtype == DType::F32;
        let form = match value.form {
            LaneForm::Scalars => LaneForm::Scalars,
            LaneForm::Vectors(vector) => LaneForm::Vectors(mask_of(vector)),
        };
        let parts = value.parts.iter().map(|&p| {
            let ty = self.fb.func.dfg.value_type(p);
            let zero = self.zero(ty);
            match float {
                true => self.fb.ins().fcmp(FloatCC::NotEqual, p, zero),
                false => self.fb.ins().icmp(IntCC::NotEqual, p, zero),
            }
        });
        ClifValue::new(form, parts.collect())
    }

    /// Masks to 1 or 0 of a numeric vector type.
    fn mask_to_number(&mut self, mask: &ClifValue, vector: Type) -> ClifValue {
        let mask = self.mask_to(mask, LaneForm::Vectors(mask_of(vector)));
        let one = if vector == types::F32X4 { i64::from(1f32.to_bits()) } else { 1 };
        let one = self.vector_splat_const(mask_of(vector), one);
        let parts = mask.parts.iter().map(|&p| {
            let bits = self.fb.ins().band(p, one);
            self.as_type(bits, vector)
        });
        ClifValue::new(LaneForm::Vectors(vector), parts.collect())
    }

    fn cast_vectors(
        &mut self,
        parts: &[Value],
        source: Type,
        target: Type,
        from: DType,
        to: DType,
    ) -> Vec<Value> {
        match (from, to) {
            (DType::F32, _) => self.float_vectors_to_int(parts, to),
            (_, DType::F32) => {
                let wide = self.resize(parts.to_vec(), source, types::I32X4, from.is_signed());
                let unsigned = from == DType::U32;
                wide.into_iter()
                    .map(|p| match unsigned {
                        true => self.fb.ins().fcvt_from_uint(types::F32X4, p),
                        false => self.fb.ins().fcvt_from_sint(types::F32X4, p),
                    })
                    .collect()
            }
            _ => self.resize(parts.to_vec(), source, target, from.is_signed()),
        }
    }

    /// Integer lanes to another width: extended, or cut (wrapping).
    fn resize(&mut self, mut parts: Vec<Value>, mut from: Type, to: Type, signed: bool) -> Vec<Value> {
        while from.lane_bits() < to.lane_bits() {
            parts = self.widen(&parts, signed);
            from = vector_of(from.lane_type().double_width().unwrap_or(to.lane_type()));
        }
        while from.lane_bits() > to.lane_bits() {
            // Narrowing saturates; with the upper half cleared it does not.
            let half = from.lane_type().half_width().unwrap_or(to.lane_type());
            let mask = self.vector_splat_const(from, (1 << half.bits()) - 1);
            let cut: Vec<Value> = parts.iter().map(|&p| self.fb.ins().band(p, mask)).collect();
            parts = self.narrow_saturating(&cut, true);
            from = vector_of(half);
        }
        parts
    }

    fn float_vectors_to_int(&mut self, parts: &[Value], to: DType) -> Vec<Value> {
        let unsigned = to == DType::U32;
        let mut ints = Vec::with_capacity(parts.len());
        for &p in parts {
            ints.push(match unsigned {
                true => self.fb.ins().fcvt_to_uint_sat(types::I32X4, p),
                false => self.fb.ins().fcvt_to_sint_sat(types::I32X4, p),
            });
        }
        match to {
            DType::I16 => self.narrow_saturating(&ints, false),
            DType::U16 => self.narrow_saturating(&ints, true),
            DType::I8 | DType::U8 => {
                let shorts = self.narrow_saturating(&ints, false);
                self.narrow_saturating(&shorts, to == DType::U8)
            }
            _ => ints,
        }
    }

    fn cast_scalar(&mut self, value: Value, from: DType, to: DType) -> Value {
        let target = scalar_type(to).unwrap_or(types::I8);
        let source = self.fb.func.dfg.value_type(value);
        match (from, to) {
            (DType::F32, DType::I32 | DType::I64) => self.fb.ins().fcvt_to_sint_sat(target, value),
            (DType::F32, DType::U32) => self.fb.ins().fcvt_to_uint_sat(target, value),
            (DType::F32, _) => {
                let wide = self.fb.ins().fcvt_to_sint_sat(types::I32, value);
                let (low, high) = match to {
                    DType::I8 => (i64::from(i8::MIN), i64::from(i8::MAX)),
                    DType::I16 => (i64::from(i16::MIN), i64::from(i16::MAX)),
                    DType::U8 => (0, i64::from(u8::MAX)),
                    _ => (0, i64::from(u16::MAX)),
                };
                let low = self.fb.ins().iconst(types::I32, low & 0xffff_ffff);
                let high = self.fb.ins().iconst(types::I32, high);
                let clamped = self.fb.ins().smax(wide, low);
                let clamped = self.fb.ins().smin(clamped, high);
                self.fb.ins().ireduce(target, clamped)
            }
            (_, DType::F32) => {
                let wide = match (source.bits() < 32, from.is_signed()) {
                    (true, true) => self.fb.ins().sextend(types::I32, value),
                    (true, false) => self.fb.ins().uextend(types::I32, value),
                    (false, _) => value,
                };
                match from {
                    DType::U32 => self.fb.ins().fcvt_from_uint(types::F32, wide),
                    _ => self.fb.ins().fcvt_from_sint(types::F32, wide),
                }
            }
            _ if target.bits() < source.bits() => self.fb.ins().ireduce(target, value),
            _ if target.bits() > source.bits() && from.is_signed() => self.fb.ins().sextend(target, value),
            _ if target.bits() > source.bits() => self.fb.ins().uextend(target, value),
            _ => value,
        }
    }
}
