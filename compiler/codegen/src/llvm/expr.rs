//! Expressions of kernel IR as LLVM values.

use super::emit::{EmitResult, LlvmValue, vector_type, with_lanes};
use super::kernel::KernelEmitter;
use crate::error::EmitError;
use inkwell::types::BasicTypeEnum;
use inkwell::values::InstructionOpcode as Op;
use inkwell::{FloatPredicate, IntPredicate};
use mlcc_ir::instr::{ExecutionScope, InstrId, InstrSpelling};
use mlcc_ir::kernel::*;
use mlcc_ir::types::DType;
use mlcc_target::Arch;

impl<'c> KernelEmitter<'_, 'c> {
    pub fn expr(&mut self, id: ExprId) -> EmitResult<LlvmValue<'c>> {
        if let Some(&known) = self.memo.get(&id) {
            return Ok(known);
        }
        let value = self.fresh(id)?;
        self.memo.insert(id, value);
        Ok(value)
    }

    fn fresh(&mut self, id: ExprId) -> EmitResult<LlvmValue<'c>> {
        let kernel = self.kernel;
        let ty = kernel.ty(id);
        match kernel.exprs.expr(id) {
            Expr::Const(literal) => self.literal(*literal, ty),
            Expr::Var(var) => self.var(*var),
            Expr::Load { buf, index, mask } => self.load_expr(*buf, *index, *mask),
            Expr::Unary(op, a) => {
                let a = self.expr(*a)?;
                self.unary(*op, a, ty)
            }
            Expr::Binary(op, a, b) => {
                let operand = kernel.ty(*a);
                let (a, b) = (self.expr(*a)?, self.expr(*b)?);
                self.binary(*op, a, b, operand)
            }
            Expr::Fma(a, b, c) => {
                let (a, b, c) = (self.expr(*a)?, self.expr(*b)?, self.expr(*c)?);
                if self.caps.fma {
                    return self.e.intrinsic_value("llvm.fma", &[a.get_type()], &[a, b, c]);
                }
                let product = self.e.op(Op::FMul, a, b)?;
                self.e.op(Op::FAdd, product, c)
            }
            Expr::Cast(a) => {
                let from = kernel.ty(*a);
                let a = self.expr(*a)?;
                self.convert(a, from, ty)
            }
            Expr::Bitcast(a) => {
                // Never from or to bool, whose registers and memory differ.
                let a = self.expr(*a)?;
                self.e.bitcast(a, self.e.ty(ty)?)
            }
            Expr::Select(cond, a, b) => {
                let (cond, a, b) = (self.expr(*cond)?, self.expr(*a)?, self.expr(*b)?);
                self.e.select(cond, a, b)
            }
            Expr::Ramp { base, stride } => self.ramp(*base, *stride, ty),
            Expr::Splat(a) => {
                let a = self.expr(*a)?;
                self.e.splat(a, ty.lanes)
            }
            Expr::Shuffle { a, b, lanes } => {
                let a = self.expr(*a)?;
                let b = b.map(|b| self.expr(b)).transpose()?;
                let first = self.e.as_vector(a)?;
                let second = b.map(|b| self.e.as_vector(b)).transpose()?;
                let picked = self.e.shuffle(first, second.unwrap_or(first), lanes)?;
                self.e.unwrap_one(picked.into_vector_value())
            }
            Expr::Instr(instr, args) => {
                let value = self.instr(*instr, args)?;
                value.ok_or_else(|| EmitError(format!("{} used as a value", instr.def().name)))
            }
        }
    }

    fn literal(&self, literal: Literal, ty: ExprType) -> EmitResult<LlvmValue<'c>> {
        let scalar: LlvmValue<'c> = match (self.e.scalar_type(ty.dtype)?, literal) {
            (BasicTypeEnum::FloatType(t), l) => t.const_float(l.as_f64()).into(),
            (BasicTypeEnum::IntType(t), Literal::Int(i)) => t.const_int(i as u64, true).into(),
            (_, l) => return Err(EmitError(format!("literal {l:?} of type {ty}"))),
        };
        self.e.splat(scalar, ty.lanes)
    }

    fn ramp(&mut self, base: ExprId, stride: ExprId, ty: ExprType) -> EmitResult<LlvmValue<'c>> {
        let (base, stride) = (self.expr(base)?, self.expr(stride)?);
        let BasicTypeEnum::IntType(int) = self.e.scalar_type(ty.dtype)? else {
            return Err(EmitError(format!("ramp of {ty}")));
        };
        let steps: Vec<_> = (0..ty.lanes).map(|l| int.const_int(u64::from(l), false)).collect();
        let steps = inkwell::types::VectorType::const_vector(&steps);
        let stride = self.e.splat(stride, ty.lanes)?;
        let offsets = self.e.mul(stride, steps.into())?;
        let base = self.e.splat(base, ty.lanes)?;
        self.e.add(base, offsets)
    }

    fn unary(&self, op: UnOp, a: LlvmValue<'c>, ty: ExprType) -> EmitResult<LlvmValue<'c>> {
        let float = ty.dtype == DType::F32;
        let math = |name: &str| self.e.intrinsic_value(name, &[a.get_type()], &[a]);
        match op {
            UnOp::Neg if float => self.e.fneg(a),
            UnOp::Neg if ty.dtype.is_int() => self.e.op(Op::Sub, a.get_type().const_zero(), a),
            UnOp::Abs if float => math("llvm.fabs"),
            UnOp::Abs if ty.dtype.is_signed() => {
                self.e.intrinsic_value("llvm.abs", &[a.get_type()], &[a, self.e.bool(false)])
            }
            UnOp::Abs if ty.dtype.is_int() => Ok(a),
            UnOp::Not if !float => {
                let BasicTypeEnum::IntType(int) = self.e.scalar_type(ty.dtype)? else {
                    return Err(EmitError(format!("not of {ty}")));
                };
                let ones = self.e.splat(int.const_all_ones().into(), ty.lanes)?;
                self.e.op(Op::Xor, a, ones)
            }
            UnOp::Sqrt if float => math("llvm.sqrt"),
            UnOp::Floor if float => math("llvm.floor"),
            UnOp::Round if float => math("llvm.roundeven"),
            _ => Err(EmitError(format!("{} of {ty} should have been expanded before", op.name()))),
        }
    }

    fn binary(
        &self,
        op: BinOp,
        a: LlvmValue<'c>,
        b: LlvmValue<'c>,
        ty: ExprType,
    ) -> EmitResult<LlvmValue<'c>> {
        if ty.dtype == DType::F32 {
            return self.float_binary(op, a, b);
        }
        if !ty.dtype.is_int() && ty.dtype != DType::Bool {
            return Err(EmitError(format!("{} of {ty} should have been expanded before", op.name())));
        }
        let signed = ty.dtype.is_signed();
        let pick = |s: Op, u: Op| if signed { s } else { u };
        let compare = |s, u| self.e.icmp(if signed { s } else { u }, a, b);
        let call =
            |s: &str, u: &str| self.e.intrinsic_value(if signed { s } else { u }, &[a.get_type()], &[a, b]);
        match op {
            BinOp::Add => self.e.op(Op::Add, a, b),
            BinOp::Sub => self.e.op(Op::Sub, a, b),
            BinOp::Mul => self.e.op(Op::Mul, a, b),
            BinOp::Div => self.e.op(pick(Op::SDiv, Op::UDiv), a, b),
            BinOp::Rem => self.e.op(pick(Op::SRem, Op::URem), a, b),
            BinOp::Min => call("llvm.smin", "llvm.umin"),
            BinOp::Max => call("llvm.smax", "llvm.umax"),
            BinOp::And => self.e.op(Op::And, a, b),
            BinOp::Or => self.e.op(Op::Or, a, b),
            BinOp::Xor => self.e.op(Op::Xor, a, b),
            BinOp::Shl => self.e.op(Op::Shl, a, b),
            BinOp::Shr => self.e.op(pick(Op::AShr, Op::LShr), a, b),
            BinOp::Lt => compare(IntPredicate::SLT, IntPredicate::ULT),
            BinOp::Le => compare(IntPredicate::SLE, IntPredicate::ULE),
            BinOp::Eq => self.e.icmp(IntPredicate::EQ, a, b),
            BinOp::Ne => self.e.icmp(IntPredicate::NE, a, b),
        }
    }

    fn float_binary(&self, op: BinOp, a: LlvmValue<'c>, b: LlvmValue<'c>) -> EmitResult<LlvmValue<'c>> {
        match op {
            BinOp::Add => self.e.op(Op::FAdd, a, b),
            BinOp::Sub => self.e.op(Op::FSub, a, b),
            BinOp::Mul => self.e.op(Op::FMul, a, b),
            BinOp::Div => self.e.op(Op::FDiv, a, b),
            BinOp::Min => self.extremum("llvm.minnum", FloatPredicate::OLT, a, b),
            BinOp::Max => self.extremum("llvm.maxnum", FloatPredicate::OGT, a, b),
            BinOp::Lt => self.e.fcmp(FloatPredicate::OLT, a, b),
            BinOp::Le => self.e.fcmp(FloatPredicate::OLE, a, b),
            BinOp::Eq => self.e.fcmp(FloatPredicate::OEQ, a, b),
            BinOp::Ne => self.e.fcmp(FloatPredicate::UNE, a, b),
            BinOp::Rem => self.e.float_remainder(a, b),
            BinOp::And | BinOp::Or | BinOp::Xor | BinOp::Shl | BinOp::Shr => {
                Err(EmitError(format!("{} of f32", op.name())))
            }
        }
    }

    /// The better one of two floats by `predicate`; the other operand where one is NaN.
    fn extremum(
        &self,
        name: &str,
        predicate: FloatPredicate,
        a: LlvmValue<'c>,
        b: LlvmValue<'c>,
    ) -> EmitResult<LlvmValue<'c>> {
        if self.caps.arch != Arch::X86_64 {
            return self.e.intrinsic_value(name, &[a.get_type()], &[a, b]);
        }
        // On x86 LLVM calls fminf for lanes that it cannot fit into registers; spelled out it is minps and a
        // blend.
        let better = self.e.fcmp(predicate, a, b)?;
        let picked = self.e.select(better, a, b)?;
        let is_nan = self.e.fcmp(FloatPredicate::UNO, b, b)?;
        self.e.select(is_nan, a, picked)
    }

    fn convert(&self, a: LlvmValue<'c>, from: ExprType, to: ExprType) -> EmitResult<LlvmValue<'c>> {
        let target = self.e.ty(to)?;
        let zero = a.get_type().const_zero();
        match (from.dtype, to.dtype) {
            (DType::F32, DType::Bool) => self.e.fcmp(FloatPredicate::UNE, a, zero),
            (_, DType::Bool) => self.e.icmp(IntPredicate::NE, a, zero),
            (DType::F16, DType::F32) => {
                let half = with_lanes(self.e.ctx.f16_type().into(), from.lanes)?;
                let half = self.e.bitcast(a, half)?;
                self.e.cast(Op::FPExt, half, target)
            }
            (DType::F32, DType::F16) => {
                let half = with_lanes(self.e.ctx.f16_type().into(), from.lanes)?;
                let half = self.e.cast(Op::FPTrunc, a, half)?;
                self.e.bitcast(half, target)
            }
            (DType::F16 | DType::BF16, _) | (_, DType::F16 | DType::BF16) => {
                Err(EmitError(format!("cast from {from} to {to} should have been expanded before")))
            }
            (DType::F32, d) => {
                let name = if d.is_signed() { "llvm.fptosi.sat" } else { "llvm.fptoui.sat" };
                self.e.intrinsic_value(name, &[target, a.get_type()], &[a])
            }
            (d, DType::F32) => self.e.cast(if d.is_signed() { Op::SIToFP } else { Op::UIToFP }, a, target),
            (from, to) => {
                let bits = |d: DType| if d == DType::Bool { 1 } else { d.bytes().unwrap_or(0) * 8 };
                let op = match bits(to).cmp(&bits(from)) {
                    std::cmp::Ordering::Less => Op::Trunc,
                    _ if from.is_signed() => Op::SExt,
                    _ => Op::ZExt,
                };
                self.e.cast(op, a, target)
            }
        }
    }

    // ---- target instructions

    pub(super) fn instr(&mut self, instr: InstrId, args: &[ExprId]) -> EmitResult<Option<LlvmValue<'c>>> {
        let def = instr.def();
        if !self.caps.has_instr(instr) {
            return Err(EmitError(format!("instruction {} is not available here", def.name)));
        }
        if let InstrSpelling::Ptx { asm, constraints } = def.spelling {
            return self.ptx(def, (asm, constraints), args);
        }
        let values = args.iter().map(|&a| self.expr(a)).collect::<EmitResult<Vec<_>>>()?;
        let ret = def.ret.map(|t| self.e.ty(t)).transpose()?;
        let raw = match def.spelling {
            InstrSpelling::Llvm { intrinsic, args } => {
                let pick = |&i: &u8| Some((*values.get(usize::from(i))?, *def.args.get(usize::from(i))?));
                let picked: Option<Vec<(LlvmValue<'c>, ExprType)>> = args.iter().map(pick).collect();
                let picked =
                    picked.ok_or_else(|| EmitError(format!("{} has too few arguments", def.name)))?;
                let (picked, types): (Vec<_>, Vec<_>) = picked.into_iter().unzip();
                self.intrinsic_instr(intrinsic, (&picked, &types), ret)?
            }
            InstrSpelling::Read | InstrSpelling::Ptx { .. } => {
                return Err(EmitError(format!("{} is no expression", def.name)));
            }
            InstrSpelling::Asm { asm, constraints } => {
                // Packed lanes travel in one register.
                let packed = values.iter().map(|&v| self.as_register(v)).collect::<EmitResult<Vec<_>>>()?;
                let ty = ret.map(|t| self.register_type(t)).transpose()?;
                self.e.inline_asm(asm, constraints, &packed, ty, def.scope == ExecutionScope::Warp)?
            }
        };
        match (raw, ret) {
            (Some(raw), Some(ret)) => Ok(Some(self.e.bitcast(raw, ret)?)),
            _ => Ok(None),
        }
    }

    fn intrinsic_instr(
        &self,
        name: &str,
        (args, types): (&[LlvmValue<'c>], &[ExprType]),
        ret: Option<BasicTypeEnum<'c>>,
    ) -> EmitResult<Option<LlvmValue<'c>>> {
        let overloaded = inkwell::intrinsics::Intrinsic::find(name).is_some_and(|i| i.is_overloaded());
        if !overloaded {
            return self.e.intrinsic(name, &[], args);
        }
        // The table spells overloaded names out in full, so the types of the arguments are those of the
        // declaration; bf16, for us their bits, are floats there.
        let known = self.e.module.get_function(name);
        let function = match known {
            Some(function) => function,
            None => {
                let param = |(arg, ty): (&LlvmValue<'c>, &ExprType)| match (ty.dtype, arg.get_type()) {
                    (DType::BF16, BasicTypeEnum::VectorType(v)) => {
                        vector_type(self.e.ctx.bf16_type().into(), v.get_size()).map(|v| v.into())
                    }
                    (_, known) => Ok(known.into()),
                };
                let params: Vec<_> = args.iter().zip(types).map(param).collect::<EmitResult<_>>()?;
                let ty = match ret {
                    Some(ret) => inkwell::types::BasicType::fn_type(&ret, &params, false),
                    None => self.e.ctx.void_type().fn_type(&params, false),
                };
                self.e.module.add_function(name, ty, None)
            }
        };
        self.e.call(function, args)
    }

    fn register_type(&self, ty: BasicTypeEnum<'c>) -> EmitResult<BasicTypeEnum<'c>> {
        let BasicTypeEnum::VectorType(v) = ty else { return Ok(ty) };
        let cell = match v.get_element_type() {
            BasicTypeEnum::IntType(t) => t.get_bit_width(),
            _ => 32,
        };
        match cell * v.get_size() {
            32 => Ok(self.e.ctx.i32_type().into()),
            64 => Ok(self.e.ctx.i64_type().into()),
            // Vector registers of a CPU.
            _ => Ok(vector_type(v.get_element_type(), v.get_size())?.into()),
        }
    }

    fn as_register(&self, value: LlvmValue<'c>) -> EmitResult<LlvmValue<'c>> {
        self.e.bitcast(value, self.register_type(value.get_type())?)
    }
}
