//! A thin layer over the LLVM builder: the types of kernel IR and operations that take scalars and vectors
//! alike.
//!
//! Values of one lane are LLVM scalars, others `<lanes x T>`. `bool` is `i1` in registers and a byte in
//! memory; f16 and bf16 are their 16 bits (`i16`).

use crate::error::EmitError;
use inkwell::attributes::{Attribute, AttributeLoc};
use inkwell::builder::Builder;
use inkwell::context::Context;
use inkwell::intrinsics::Intrinsic;
use inkwell::module::Module;
use inkwell::types::{BasicMetadataTypeEnum, BasicType, BasicTypeEnum, VectorType};
use inkwell::values::{
    BasicMetadataValueEnum, BasicValue, BasicValueEnum, FunctionValue, InstructionOpcode as Op, IntValue,
    PointerValue, VectorValue,
};
use inkwell::{AddressSpace, FloatPredicate, IntPredicate};
use mlcc_ir::kernel::ExprType;
use mlcc_ir::types::DType;

pub type LlvmValue<'c> = BasicValueEnum<'c>;
pub type EmitResult<T> = std::result::Result<T, EmitError>;

/// The builder of instructions, with its context and module.
pub struct LlvmBuilder<'c, 'm> {
    pub ctx: &'c Context,
    pub module: &'m Module<'c>,
    pub b: Builder<'c>,
}

impl<'c, 'm> LlvmBuilder<'c, 'm> {
    pub fn new(ctx: &'c Context, module: &'m Module<'c>) -> Self {
        LlvmBuilder { ctx, module, b: ctx.create_builder() }
    }

    // ---- types

    pub fn scalar_type(&self, dtype: DType) -> EmitResult<BasicTypeEnum<'c>> {
        Ok(match dtype {
            DType::Bool => self.ctx.bool_type().into(),
            DType::I8 | DType::U8 => self.ctx.i8_type().into(),
            DType::I16 | DType::U16 | DType::F16 | DType::BF16 => self.ctx.i16_type().into(),
            DType::I32 | DType::U32 => self.ctx.i32_type().into(),
            DType::I64 => self.ctx.i64_type().into(),
            DType::F32 => self.ctx.f32_type().into(),
            DType::Packed(f) => {
                return Err(EmitError(format!("packed type {} below the graph level", f.name())));
            }
        })
    }
    /// The type in registers.
    pub fn ty(&self, ty: ExprType) -> EmitResult<BasicTypeEnum<'c>> {
        with_lanes(self.scalar_type(ty.dtype)?, ty.lanes)
    }
    /// The type in memory of one element.
    pub fn cell_type(&self, dtype: DType) -> EmitResult<BasicTypeEnum<'c>> {
        match dtype {
            DType::Bool => Ok(self.ctx.i8_type().into()),
            _ => self.scalar_type(dtype),
        }
    }

    // ---- constants

    pub fn i64(&self, value: i64) -> LlvmValue<'c> {
        self.ctx.i64_type().const_int(value as u64, true).into()
    }
    pub fn i32(&self, value: u32) -> LlvmValue<'c> {
        self.ctx.i32_type().const_int(u64::from(value), false).into()
    }
    pub fn bool(&self, value: bool) -> LlvmValue<'c> {
        self.ctx.bool_type().const_int(u64::from(value), false).into()
    }

    // ---- operations on scalars and vectors

    pub fn op(&self, op: Op, a: LlvmValue<'c>, b: LlvmValue<'c>) -> EmitResult<LlvmValue<'c>> {
        Ok(self.b.build_binop(op, a, b, "")?)
    }
    pub fn cast(&self, op: Op, a: LlvmValue<'c>, to: BasicTypeEnum<'c>) -> EmitResult<LlvmValue<'c>> {
        if a.get_type() == to {
            return Ok(a);
        }
        Ok(self.b.build_cast(op, a, to, "")?)
    }
    pub fn bitcast(&self, a: LlvmValue<'c>, to: BasicTypeEnum<'c>) -> EmitResult<LlvmValue<'c>> {
        self.cast(Op::BitCast, a, to)
    }
    pub fn icmp(&self, p: IntPredicate, a: LlvmValue<'c>, b: LlvmValue<'c>) -> EmitResult<LlvmValue<'c>> {
        Ok(match (a, b) {
            (LlvmValue::IntValue(a), LlvmValue::IntValue(b)) => self.b.build_int_compare(p, a, b, "")?.into(),
            (LlvmValue::VectorValue(a), LlvmValue::VectorValue(b)) => {
                self.b.build_int_compare(p, a, b, "")?.into()
            }
            _ => return Err(EmitError::new("integer comparison of something else")),
        })
    }
    pub fn fcmp(&self, p: FloatPredicate, a: LlvmValue<'c>, b: LlvmValue<'c>) -> EmitResult<LlvmValue<'c>> {
        Ok(match (a, b) {
            (LlvmValue::FloatValue(a), LlvmValue::FloatValue(b)) => {
                self.b.build_float_compare(p, a, b, "")?.into()
            }
            (LlvmValue::VectorValue(a), LlvmValue::VectorValue(b)) => {
                self.b.build_float_compare(p, a, b, "")?.into()
            }
            _ => return Err(EmitError::new("float comparison of something else")),
        })
    }
    pub fn fneg(&self, a: LlvmValue<'c>) -> EmitResult<LlvmValue<'c>> {
        Ok(match a {
            LlvmValue::FloatValue(a) => self.b.build_float_neg(a, "")?.into(),
            LlvmValue::VectorValue(a) => self.b.build_float_neg(a, "")?.into(),
            _ => return Err(EmitError::new("float negation of something else")),
        })
    }
    pub fn select(
        &self,
        cond: LlvmValue<'c>,
        a: LlvmValue<'c>,
        b: LlvmValue<'c>,
    ) -> EmitResult<LlvmValue<'c>> {
        Ok(match cond {
            LlvmValue::IntValue(c) => self.b.build_select(c, a, b, "")?,
            LlvmValue::VectorValue(c) => self.b.build_select(c, a, b, "")?,
            _ => return Err(EmitError::new("select by something that is not bool")),
        })
    }
    pub fn add(&self, a: LlvmValue<'c>, b: LlvmValue<'c>) -> EmitResult<LlvmValue<'c>> {
        self.op(Op::Add, a, b)
    }
    pub fn mul(&self, a: LlvmValue<'c>, b: LlvmValue<'c>) -> EmitResult<LlvmValue<'c>> {
        self.op(Op::Mul, a, b)
    }

    // ---- lanes

    pub fn splat(&self, a: LlvmValue<'c>, lanes: u32) -> EmitResult<LlvmValue<'c>> {
        if lanes == 1 {
            return Ok(a);
        }
        let one = self.insert(vector_type(a.get_type(), lanes)?.get_poison(), a, 0)?;
        self.shuffle(one, one, &vec![0; lanes as usize])
    }
    pub fn insert(&self, into: VectorValue<'c>, a: LlvmValue<'c>, lane: u32) -> EmitResult<VectorValue<'c>> {
        let lane = self.ctx.i32_type().const_int(u64::from(lane), false);
        Ok(self.b.build_insert_element(into, a, lane, "")?)
    }
    /// One lane as a scalar.
    pub fn extract(&self, a: LlvmValue<'c>, lane: u32) -> EmitResult<LlvmValue<'c>> {
        match a {
            LlvmValue::VectorValue(v) => {
                let lane = self.ctx.i32_type().const_int(u64::from(lane), false);
                Ok(self.b.build_extract_element(v, lane, "")?)
            }
            scalar => Ok(scalar),
        }
    }
    /// A scalar as a vector of one lane; vectors unchanged.
    pub fn as_vector(&self, a: LlvmValue<'c>) -> EmitResult<VectorValue<'c>> {
        match a {
            LlvmValue::VectorValue(v) => Ok(v),
            scalar => self.insert(vector_type(scalar.get_type(), 1)?.get_poison(), scalar, 0),
        }
    }
    /// A vector of one lane as a scalar; others unchanged.
    pub fn unwrap_one(&self, a: VectorValue<'c>) -> EmitResult<LlvmValue<'c>> {
        if a.get_type().get_size() == 1 { self.extract(a.into(), 0) } else { Ok(a.into()) }
    }
    /// Lanes of `a` followed by `b`; always a vector.
    pub fn shuffle(
        &self,
        a: VectorValue<'c>,
        b: VectorValue<'c>,
        lanes: &[u32],
    ) -> EmitResult<LlvmValue<'c>> {
        let i32 = self.ctx.i32_type();
        let mask: Vec<IntValue<'c>> = lanes.iter().map(|&l| i32.const_int(u64::from(l), false)).collect();
        let mask = VectorType::const_vector(&mask);
        Ok(self.b.build_shuffle_vector(a, b, mask, "")?.into())
    }

    // ---- memory

    /// Address of element `index`. With `inside`, the caller knows that it lies in the object.
    pub fn element(
        &self,
        base: PointerValue<'c>,
        cell: BasicTypeEnum<'c>,
        index: LlvmValue<'c>,
        inside: bool,
    ) -> EmitResult<PointerValue<'c>> {
        let index = index.into_int_value();
        // SAFETY: the element type is sized and the index is an integer; whether the address is good is a
        // property of the generated program, not of this call.
        let address = unsafe {
            match inside {
                true => self.b.build_in_bounds_gep(cell, base, &[index], "")?,
                false => self.b.build_gep(cell, base, &[index], "")?,
            }
        };
        Ok(address)
    }
    /// Address `bytes` after `base`, in the same object.
    pub fn offset(&self, base: PointerValue<'c>, bytes: u64) -> EmitResult<PointerValue<'c>> {
        self.element(base, self.ctx.i8_type().into(), self.i64(bytes as i64), true)
    }
    /// An aligned integer or pointer that lies at an offset in bytes.
    pub fn field(
        &self,
        base: PointerValue<'c>,
        offset: usize,
        ty: BasicTypeEnum<'c>,
    ) -> EmitResult<LlvmValue<'c>> {
        let at = self.offset(base, offset as u64)?;
        let bytes = match ty {
            BasicTypeEnum::IntType(t) => t.get_bit_width() / 8,
            _ => 8,
        };
        self.load(ty, at, bytes)
    }
    pub fn pointer_field(&self, base: PointerValue<'c>, offset: usize) -> EmitResult<PointerValue<'c>> {
        let pointer = self.ctx.ptr_type(AddressSpace::default());
        Ok(self.field(base, offset, pointer.into())?.into_pointer_value())
    }
    /// A load that stays although nothing uses it.
    pub fn read_byte(&self, at: PointerValue<'c>) -> EmitResult<()> {
        let value = self.b.build_load(self.ctx.i8_type(), at, "")?;
        let instruction =
            value.as_instruction_value().ok_or_else(|| EmitError::new("a load is an instruction"))?;
        instruction.set_volatile(true).map_err(|_| EmitError::new("a load can be volatile"))
    }

    pub fn load(&self, ty: BasicTypeEnum<'c>, at: PointerValue<'c>, align: u32) -> EmitResult<LlvmValue<'c>> {
        let value = self.b.build_load(ty, at, "")?;
        if let Some(load) = value.as_instruction_value() {
            load.set_alignment(align).map_err(|e| EmitError(e.to_string()))?;
        }
        Ok(value)
    }
    pub fn store(&self, value: LlvmValue<'c>, at: PointerValue<'c>, align: u32) -> EmitResult<()> {
        self.b.build_store(at, value)?.set_alignment(align).map_err(|e| EmitError(e.to_string()))
    }

    // ---- calls

    /// Calls an intrinsic; arguments are bitcast to the parameter types of its declaration, which differ
    /// between versions of LLVM. `overload` holds the types that an overloaded one is declared for.
    pub fn intrinsic(
        &self,
        name: &str,
        overload: &[BasicTypeEnum<'c>],
        args: &[LlvmValue<'c>],
    ) -> EmitResult<Option<LlvmValue<'c>>> {
        let unknown = || EmitError(format!("this LLVM has no intrinsic {name}"));
        let found = Intrinsic::find(name).ok_or_else(unknown)?;
        let function = found.get_declaration(self.module, overload).ok_or_else(unknown)?;
        self.call(function, args)
    }
    /// Calls a function, bitcasting arguments to its parameter types.
    pub fn call(
        &self,
        function: FunctionValue<'c>,
        args: &[LlvmValue<'c>],
    ) -> EmitResult<Option<LlvmValue<'c>>> {
        let params = function.get_type().get_param_types();
        if params.len() != args.len() {
            let name = function.get_name().to_string_lossy().into_owned();
            return Err(EmitError(format!("{name} takes {} arguments, got {}", params.len(), args.len())));
        }
        let mut passed: Vec<BasicMetadataValueEnum<'c>> = Vec::with_capacity(args.len());
        for (&arg, &param) in args.iter().zip(&params) {
            let arg = match BasicTypeEnum::try_from(param) {
                Ok(param) => self.bitcast(arg, param)?,
                Err(()) => arg,
            };
            passed.push(arg.into());
        }
        Ok(self.b.build_call(function, &passed, "")?.try_as_basic_value().basic())
    }
    /// Calls an intrinsic like [`LlvmBuilder::intrinsic`], for those that have a result.
    pub fn intrinsic_value(
        &self,
        name: &str,
        overload: &[BasicTypeEnum<'c>],
        args: &[LlvmValue<'c>],
    ) -> EmitResult<LlvmValue<'c>> {
        self.intrinsic(name, overload, args)?.ok_or_else(|| EmitError(format!("{name} has no result")))
    }
    /// Inline assembly; `convergent` keeps it from being moved across control flow.
    pub fn inline_asm(
        &self,
        asm: &str,
        constraints: &str,
        args: &[LlvmValue<'c>],
        ret: Option<BasicTypeEnum<'c>>,
        convergent: bool,
    ) -> EmitResult<Option<LlvmValue<'c>>> {
        let params: Vec<BasicMetadataTypeEnum<'c>> = args.iter().map(|a| a.get_type().into()).collect();
        let ty = match ret {
            Some(ret) => ret.fn_type(&params, false),
            None => self.ctx.void_type().fn_type(&params, false),
        };
        let effects = ret.is_none() || convergent || constraints.contains("~{memory}");
        let code =
            self.ctx.create_inline_asm(ty, asm.into(), constraints.into(), effects, false, None, false);
        let passed: Vec<BasicMetadataValueEnum<'c>> = args.iter().map(|&a| a.into()).collect();
        let call = self.b.build_indirect_call(ty, code, &passed, "")?;
        if convergent {
            call.add_attribute(AttributeLoc::Function, self.flag("convergent"));
        }
        Ok(call.try_as_basic_value().basic())
    }

    // ---- attributes

    /// Says of a function that it does not unwind, and that no call of memset, memcpy or libm may be
    /// invented: the artifact imports nothing.
    pub fn mark_function(&self, function: FunctionValue<'c>) {
        function.add_attribute(AttributeLoc::Function, self.flag("nounwind"));
        let no_builtins = self.ctx.create_string_attribute("no-builtins", "");
        function.add_attribute(AttributeLoc::Function, no_builtins);
    }

    /// [`LlvmBuilder::mark_function`] for a CPU, whatever its operating system: nothing below the stack
    /// pointer is used (Windows may write there at any time), and frames of more than a page are touched page
    /// by page, without a call (Windows and macOS grow stacks by guard pages).
    pub fn mark_cpu_function(&self, function: FunctionValue<'c>) {
        self.mark_function(function);
        function.add_attribute(AttributeLoc::Function, self.flag("noredzone"));
        for (name, value) in [("probe-stack", "inline-asm"), ("stack-probe-size", "4096")] {
            let probe = self.ctx.create_string_attribute(name, value);
            function.add_attribute(AttributeLoc::Function, probe);
        }
    }

    /// An attribute without a value, such as `nounwind`.
    pub fn flag(&self, name: &str) -> Attribute {
        self.ctx.create_enum_attribute(Attribute::get_named_enum_kind_id(name), 0)
    }
}

/// `scalar` itself for one lane, else a vector of it.
pub fn with_lanes(scalar: BasicTypeEnum<'_>, lanes: u32) -> EmitResult<BasicTypeEnum<'_>> {
    if lanes == 1 { Ok(scalar) } else { Ok(vector_type(scalar, lanes)?.into()) }
}

/// A vector type, also of one lane.
pub fn vector_type(scalar: BasicTypeEnum<'_>, lanes: u32) -> EmitResult<VectorType<'_>> {
    match scalar {
        BasicTypeEnum::IntType(t) => Ok(t.vec_type(lanes)),
        BasicTypeEnum::FloatType(t) => Ok(t.vec_type(lanes)),
        BasicTypeEnum::PointerType(t) => Ok(t.vec_type(lanes)),
        other => Err(EmitError(format!("no vectors of {other}"))),
    }
}
