//! The form of a kernel value: a list of 128-bit vectors where its lanes fill them, else a list of scalars.
//!
//! Invariants:
//! * Every type but `bool` has one form, given by [`ClifKernelEmitter::form`]; i64 (indices) is always a list
//!   of scalars.
//! * `bool` is either a list of scalar i8, 0 or 1, or a list of lane masks (all ones or zero) of any width:
//!   what a comparison gave. [`ClifKernelEmitter::mask_to`] converts when it meets a value of another width.
//! * f16 and bf16 are held as their 16 bits.

use super::emit::ClifKernelEmitter;
use cranelift_codegen::ir::condcodes::IntCC;
use cranelift_codegen::ir::{ConstantData, InstBuilder, MemFlagsData, Type, Value, types};
use mlcc_ir::kernel::ExprType;
use mlcc_ir::types::DType;

/// The form of the parts of a value.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum LaneForm {
    /// One part per lane.
    Scalars,
    /// Parts of this 128-bit type.
    Vectors(Type),
}

#[derive(Clone, Debug)]
pub(super) struct ClifValue {
    pub form: LaneForm,
    pub parts: Vec<Value>,
    /// The value of a one-lane integer known while emitting.
    pub known: Option<i64>,
}

impl ClifValue {
    pub fn new(form: LaneForm, parts: Vec<Value>) -> ClifValue {
        ClifValue { form, parts, known: None }
    }
    pub fn scalar(part: Value) -> ClifValue {
        ClifValue::new(LaneForm::Scalars, vec![part])
    }
    /// The only part of a one-lane value.
    pub fn single(&self) -> Value {
        debug_assert_eq!(self.parts.len(), 1);
        self.parts[0]
    }
}

/// The Cranelift type of one element; `None` for packed formats.
pub(super) fn scalar_type(dtype: DType) -> Option<Type> {
    match dtype {
        DType::Bool | DType::I8 | DType::U8 => Some(types::I8),
        DType::I16 | DType::U16 | DType::F16 | DType::BF16 => Some(types::I16),
        DType::I32 | DType::U32 => Some(types::I32),
        DType::I64 => Some(types::I64),
        DType::F32 => Some(types::F32),
        DType::Packed(_) => None,
    }
}

/// The 128-bit vector of a lane type.
pub(super) fn vector_of(lane: Type) -> Type {
    lane.by(16 / lane.bytes()).unwrap_or(types::INVALID)
}

/// The mask type beside a vector type.
pub(super) fn mask_of(vector: Type) -> Type {
    vector.as_truthy()
}

impl ClifKernelEmitter<'_, '_> {
    /// The form of a type other than `bool` (which has this one only in memory, as bytes).
    pub fn form(&self, ty: ExprType) -> LaneForm {
        let lane = match scalar_type(ty.dtype) {
            Some(lane) if self.machine.simd && lane != types::I64 && ty.dtype != DType::Bool => lane,
            _ => return LaneForm::Scalars,
        };
        if ty.lanes.is_multiple_of(16 / lane.bytes()) {
            LaneForm::Vectors(vector_of(lane))
        } else {
            LaneForm::Scalars
        }
    }

    /// The lanes one by one; masks become 0 or 1.
    pub fn scalars(&mut self, val: &ClifValue, is_bool: bool) -> Vec<Value> {
        let LaneForm::Vectors(ty) = val.form else { return val.parts.clone() };
        let mut out = Vec::with_capacity(val.parts.len() * ty.lane_count() as usize);
        for &part in &val.parts {
            for lane in 0..ty.lane_count() as u8 {
                let lane = self.fb.ins().extractlane(part, lane);
                out.push(if is_bool { self.fb.ins().icmp_imm_s(IntCC::NotEqual, lane, 0) } else { lane });
            }
        }
        out
    }

    /// Puts scalars of the lane type into `form`.
    pub fn assemble(&mut self, form: LaneForm, scalars: Vec<Value>) -> ClifValue {
        let LaneForm::Vectors(ty) = form else { return ClifValue::new(form, scalars) };
        let parts =
            scalars.chunks(ty.lane_count() as usize).map(|lanes| self.build_vector(ty, lanes)).collect();
        ClifValue::new(form, parts)
    }

    fn build_vector(&mut self, ty: Type, lanes: &[Value]) -> Value {
        if lanes.iter().all(|&l| l == lanes[0]) {
            return self.fb.ins().splat(ty, lanes[0]);
        }
        let mut vector = match ty {
            // Cranelift has no `scalar_to_vector` of bytes on x86.
            types::I8X16 => self.fb.ins().splat(ty, lanes[0]),
            _ => self.fb.ins().scalar_to_vector(ty, lanes[0]),
        };
        for (i, &lane) in lanes.iter().enumerate().skip(1) {
            vector = self.fb.ins().insertlane(vector, lane, i as u8);
        }
        vector
    }

    /// One lane in every place of `form`, `lanes` in all.
    pub fn broadcast(&mut self, form: LaneForm, lanes: u32, scalar: Value) -> ClifValue {
        match form {
            LaneForm::Scalars => ClifValue::new(form, vec![scalar; lanes as usize]),
            LaneForm::Vectors(ty) => {
                let part = self.fb.ins().splat(ty, scalar);
                ClifValue::new(form, vec![part; (lanes / ty.lane_count()) as usize])
            }
        }
    }

    /// A 128-bit constant from its bytes in memory order.
    pub fn vector_const(&mut self, ty: Type, bytes: [u8; 16]) -> Value {
        let constant = self.fb.func.dfg.constants.insert(ConstantData::from(&bytes[..]));
        self.fb.ins().vconst(ty, constant)
    }

    /// A vector with the same integer bits (the low bytes of `bits`) in every lane.
    pub fn vector_splat_const(&mut self, ty: Type, bits: i64) -> Value {
        let width = ty.lane_type().bytes() as usize;
        let mut bytes = [0; 16];
        for lane in bytes.chunks_mut(width) {
            lane.copy_from_slice(&bits.to_le_bytes()[..width]);
        }
        self.vector_const(ty, bytes)
    }

    /// Zero of a scalar or vector type.
    pub fn zero(&mut self, ty: Type) -> Value {
        match ty {
            _ if ty.is_vector() => self.vector_const(ty, [0; 16]),
            types::F32 => self.fb.ins().f32const(0.0),
            _ => self.fb.ins().iconst(ty, 0),
        }
    }

    /// The same bits as another type of the same size.
    pub fn as_type(&mut self, value: Value, ty: Type) -> Value {
        if self.fb.func.dfg.value_type(value) == ty {
            return value;
        }
        // Lane order in a 128-bit bitcast is defined only with an explicit byte order.
        let flags = MemFlagsData::new().with_endianness(cranelift_codegen::ir::Endianness::Little);
        self.fb.ins().bitcast(ty, flags, value)
    }

    /// Vectors that hold all lanes of `parts`, widened to double width.
    pub fn widen(&mut self, parts: &[Value], signed: bool) -> Vec<Value> {
        let mut out = Vec::with_capacity(2 * parts.len());
        for &p in parts {
            if signed {
                out.push(self.fb.ins().swiden_low(p));
                out.push(self.fb.ins().swiden_high(p));
            } else {
                out.push(self.fb.ins().uwiden_low(p));
                out.push(self.fb.ins().uwiden_high(p));
            }
        }
        out
    }

    /// Vectors narrowed to half width with saturation; `unsigned` saturates to the unsigned range.
    pub fn narrow_saturating(&mut self, parts: &[Value], unsigned: bool) -> Vec<Value> {
        let pairs = parts.chunks_exact(2);
        pairs
            .map(|pair| match unsigned {
                true => self.fb.ins().unarrow(pair[0], pair[1]),
                false => self.fb.ins().snarrow(pair[0], pair[1]),
            })
            .collect()
    }

    /// A bool value as masks of the integer vector type `ty`, or as scalars.
    pub fn mask_to(&mut self, mask: &ClifValue, form: LaneForm) -> ClifValue {
        match (mask.form, form) {
            (from, to) if from == to => mask.clone(),
            (_, LaneForm::Scalars) => {
                let scalars = self.scalars(mask, true);
                ClifValue::new(LaneForm::Scalars, scalars)
            }
            (LaneForm::Scalars, LaneForm::Vectors(ty)) => {
                let lanes = self.lane_masks(&mask.parts, ty.lane_type());
                self.assemble(form, lanes)
            }
            (LaneForm::Vectors(mut from), LaneForm::Vectors(to)) => {
                let mut parts = mask.parts.clone();
                while from.lane_bits() < to.lane_bits() {
                    parts = self.widen(&parts, true);
                    from = vector_of(from.lane_type().double_width().unwrap_or(to.lane_type()));
                }
                while from.lane_bits() > to.lane_bits() {
                    parts = self.narrow_saturating(&parts, false);
                    from = vector_of(from.lane_type().half_width().unwrap_or(to.lane_type()));
                }
                ClifValue::new(form, parts)
            }
        }
    }

    /// 0 or 1 bytes to 0 or all ones of `lane`; equal bytes stay equal values so that a splat is recognised.
    fn lane_masks(&mut self, bytes: &[Value], lane: Type) -> Vec<Value> {
        let mut last: Option<(Value, Value)> = None;
        let mut out = Vec::with_capacity(bytes.len());
        for &byte in bytes {
            let wide = match last {
                Some((b, wide)) if b == byte => wide,
                _ => {
                    let wide = if lane == types::I8 { byte } else { self.fb.ins().uextend(lane, byte) };
                    self.fb.ins().ineg(wide)
                }
            };
            last = Some((byte, wide));
            out.push(wide);
        }
        out
    }

    /// Brings bool values into one form: that of the first which holds masks.
    pub fn same_masks(&mut self, vals: &[&ClifValue]) -> (LaneForm, Vec<ClifValue>) {
        let form = vals.iter().map(|v| v.form).find(|f| *f != LaneForm::Scalars).unwrap_or(LaneForm::Scalars);
        let vals = vals.iter().map(|v| self.mask_to(v, form)).collect();
        (form, vals)
    }
}
