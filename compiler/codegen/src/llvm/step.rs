//! Functions of steps (see [`crate::step`]) in LLVM IR. Barriers, pieces of shares and reports to the caller
//! are functions of the module ([`super::callbacks`]), so that a step is little more than calls.

use super::callbacks::{StepCallbacks, share_type};
use super::emit::{EmitResult, LlvmBuilder, LlvmValue};
use crate::error::{CodegenError, EmitError};
use crate::model::EntryLimits;
use crate::step::{self, ClaimedWork, IntCompare, IntOp, StepCode};
use inkwell::basic_block::BasicBlock;
use inkwell::context::Context;
use inkwell::module::{Linkage, Module};
use inkwell::types::BasicTypeEnum;
use inkwell::values::{
    BasicMetadataValueEnum, FunctionValue, InstructionOpcode as Op, PhiValue, PointerValue,
};
use inkwell::{AddressSpace, GlobalVisibility, IntPredicate};
use mlcc_abi::Ctx;
use mlcc_ir::step::StepProgram;
use std::collections::BTreeMap;
use std::mem::offset_of;

/// Functions of the kernels by kernel name.
pub type KernelFunctions<'c> = BTreeMap<String, FunctionValue<'c>>;

/// Emits `step` as a hidden function called `symbol`.
pub fn emit_step<'c>(
    ctx: &'c Context,
    module: &Module<'c>,
    step: &StepProgram,
    symbol: &str,
    kernels: &KernelFunctions<'c>,
    limits: EntryLimits,
) -> std::result::Result<(), CodegenError> {
    let function = LlvmStepEmitter::declare(ctx, module, symbol, kernels);
    let emitted = function.and_then(|mut function| step::emit(&mut function, step, limits));
    emitted.map_err(|f| CodegenError::Step { step: step.name.clone(), what: f.0 })
}

struct LlvmStepEmitter<'a, 'c> {
    e: LlvmBuilder<'c, 'a>,
    kernels: &'a KernelFunctions<'c>,
    function: FunctionValue<'c>,
    ctx: PointerValue<'c>,
    /// The worker and the number of workers as given (i32), and in 64 bits.
    worker: LlvmValue<'c>,
    workers: LlvmValue<'c>,
    wide: [LlvmValue<'c>; 2],
    callbacks: StepCallbacks<'c>,
    /// Memory for the result of [`StepCallbacks::claim`].
    share: PointerValue<'c>,
}

impl<'a, 'c> LlvmStepEmitter<'a, 'c> {
    fn declare(
        ctx: &'c Context,
        module: &'a Module<'c>,
        symbol: &str,
        kernels: &'a KernelFunctions<'c>,
    ) -> EmitResult<LlvmStepEmitter<'a, 'c>> {
        let e = LlvmBuilder::new(ctx, module);
        let callbacks = StepCallbacks::define(ctx, module)?;
        let i32 = ctx.i32_type();
        let pointer = ctx.ptr_type(AddressSpace::default());
        let ty = i32.fn_type(&[pointer.into(), i32.into(), i32.into()], false);
        let function = module.add_function(symbol, ty, Some(Linkage::External));
        function.as_global_value().set_visibility(GlobalVisibility::Hidden);
        e.mark_cpu_function(function);
        e.b.position_at_end(ctx.append_basic_block(function, "entry"));
        let [this, worker, workers] = function.get_params()[..] else {
            return Err(EmitError::new("three parameters expected"));
        };
        let long: BasicTypeEnum<'c> = ctx.i64_type().into();
        let wide = [e.cast(Op::ZExt, worker, long)?, e.cast(Op::ZExt, workers, long)?];
        let share = e.b.build_alloca(share_type(ctx), "share")?;
        let ctx = this.into_pointer_value();
        Ok(LlvmStepEmitter { e, kernels, function, ctx, worker, workers, wide, callbacks, share })
    }

    /// The block that instructions go to.
    fn current_block(&self) -> EmitResult<BasicBlock<'c>> {
        self.e.b.get_insert_block().ok_or_else(|| EmitError::new("no block"))
    }
}

/// The numbers that a loop is entered with from a block.
fn enter_with<'c>(phis: [PhiValue<'c>; 2], numbers: [LlvmValue<'c>; 2], from: BasicBlock<'c>) {
    phis.into_iter().zip(numbers).for_each(|(phi, number)| phi.add_incoming(&[(&number, from)]));
}

impl<'c> StepCode for LlvmStepEmitter<'_, 'c> {
    type Value = LlvmValue<'c>;
    type Block = BasicBlock<'c>;
    type Head = (BasicBlock<'c>, [PhiValue<'c>; 2]);

    fn context(&self) -> LlvmValue<'c> {
        self.ctx.into()
    }
    fn share(&self) -> [LlvmValue<'c>; 2] {
        self.wide
    }

    fn int(&mut self, value: i64) -> LlvmValue<'c> {
        self.e.i64(value)
    }
    fn op(&mut self, op: IntOp, a: LlvmValue<'c>, b: LlvmValue<'c>) -> EmitResult<LlvmValue<'c>> {
        let extremum = |name| self.e.intrinsic_value(name, &[a.get_type()], &[a, b]);
        let op = match op {
            IntOp::Add => Op::Add,
            IntOp::Sub => Op::Sub,
            IntOp::Mul => Op::Mul,
            IntOp::UnsignedDiv => Op::UDiv,
            IntOp::SignedDiv => Op::SDiv,
            IntOp::SignedRem => Op::SRem,
            IntOp::SignedMin => return extremum("llvm.smin"),
            IntOp::SignedMax => return extremum("llvm.smax"),
        };
        self.e.op(op, a, b)
    }
    fn compare(
        &mut self,
        compare: IntCompare,
        a: LlvmValue<'c>,
        b: LlvmValue<'c>,
    ) -> EmitResult<LlvmValue<'c>> {
        let predicate = match compare {
            IntCompare::SignedLess => IntPredicate::SLT,
            IntCompare::SignedGreater => IntPredicate::SGT,
            IntCompare::UnsignedLess => IntPredicate::ULT,
            IntCompare::UnsignedGreater => IntPredicate::UGT,
            IntCompare::UnsignedAtLeast => IntPredicate::UGE,
        };
        self.e.icmp(predicate, a, b)
    }
    fn number(&mut self, condition: LlvmValue<'c>) -> EmitResult<LlvmValue<'c>> {
        self.e.cast(Op::ZExt, condition, self.e.ctx.i64_type().into())
    }

    fn offset(&mut self, address: LlvmValue<'c>, bytes: u64) -> EmitResult<LlvmValue<'c>> {
        Ok(self.e.offset(address.into_pointer_value(), bytes)?.into())
    }
    fn advance(&mut self, address: LlvmValue<'c>, bytes: LlvmValue<'c>) -> EmitResult<LlvmValue<'c>> {
        let byte = self.e.ctx.i8_type().into();
        Ok(self.e.element(address.into_pointer_value(), byte, bytes, true)?.into())
    }
    fn load_int(&mut self, address: LlvmValue<'c>, offset: usize) -> EmitResult<LlvmValue<'c>> {
        self.e.field(address.into_pointer_value(), offset, self.e.ctx.i64_type().into())
    }
    fn load_address(&mut self, address: LlvmValue<'c>, offset: usize) -> EmitResult<LlvmValue<'c>> {
        Ok(self.e.pointer_field(address.into_pointer_value(), offset)?.into())
    }
    fn load_entry(&mut self, table: LlvmValue<'c>, index: LlvmValue<'c>) -> EmitResult<LlvmValue<'c>> {
        let i32: BasicTypeEnum<'c> = self.e.ctx.i32_type().into();
        let at = self.e.element(table.into_pointer_value(), i32, index, true)?;
        let entry = self.e.load(i32, at, 4)?;
        self.e.cast(Op::ZExt, entry, self.e.ctx.i64_type().into())
    }

    fn block(&mut self, name: &'static str) -> BasicBlock<'c> {
        self.e.ctx.append_basic_block(self.function, name)
    }
    fn enter(&mut self, block: BasicBlock<'c>) {
        self.e.b.position_at_end(block);
    }
    fn jump(&mut self, to: BasicBlock<'c>) -> EmitResult<()> {
        self.e.b.build_unconditional_branch(to)?;
        Ok(())
    }
    fn branch(
        &mut self,
        condition: LlvmValue<'c>,
        then: BasicBlock<'c>,
        otherwise: BasicBlock<'c>,
    ) -> EmitResult<()> {
        self.e.b.build_conditional_branch(condition.into_int_value(), then, otherwise)?;
        Ok(())
    }
    fn begin_loop(
        &mut self,
        name: &'static str,
        first: [LlvmValue<'c>; 2],
    ) -> EmitResult<(Self::Head, [LlvmValue<'c>; 2])> {
        let before = self.current_block()?;
        let head = self.block(name);
        self.jump(head)?;
        self.enter(head);
        let phi = || self.e.b.build_phi(self.e.ctx.i64_type(), "i");
        let phis = [phi()?, phi()?];
        enter_with(phis, first, before);
        Ok(((head, phis), phis.map(|phi| phi.as_basic_value())))
    }
    fn repeat(&mut self, (head, phis): Self::Head, next: [LlvmValue<'c>; 2]) -> EmitResult<()> {
        enter_with(phis, next, self.current_block()?);
        self.jump(head)
    }
    fn repeat_if(
        &mut self,
        condition: LlvmValue<'c>,
        (head, phis): Self::Head,
        next: [LlvmValue<'c>; 2],
        done: BasicBlock<'c>,
    ) -> EmitResult<()> {
        enter_with(phis, next, self.current_block()?);
        self.branch(condition, head, done)
    }
    fn leave(&mut self, status: i32) -> EmitResult<()> {
        let status = self.e.i32(status as u32);
        self.e.b.build_return(Some(&status))?;
        Ok(())
    }

    fn call(&mut self, kernel: &str, args: &[LlvmValue<'c>]) -> EmitResult<()> {
        let function = self.kernels.get(kernel);
        let function = *function.ok_or_else(|| EmitError::new("is launched but not among the kernels"))?;
        self.e.call(function, args).map(|_| ())
    }
    fn wait(&mut self) -> EmitResult<()> {
        self.e.call(self.callbacks.wait, &[self.ctx.into(), self.worker, self.workers]).map(|_| ())
    }
    fn all_gather(&mut self, item: u32, args: [LlvmValue<'c>; 4]) -> EmitResult<()> {
        let (pointer, long) = (self.e.ctx.ptr_type(AddressSpace::default()), self.e.ctx.i64_type());
        let item_type = self.e.ctx.i32_type();
        let types =
            [pointer.into(), item_type.into(), pointer.into(), pointer.into(), long.into(), long.into()];
        let function = self.e.pointer_field(self.ctx, offset_of!(Ctx, all_gather))?;
        let this: LlvmValue<'c> = self.e.pointer_field(self.ctx, offset_of!(Ctx, all_gather_self))?.into();
        let [part, all, rows, bytes] = args;
        let passed = [this, self.e.i32(item), part, all, rows, bytes].map(BasicMetadataValueEnum::from);
        let ty = self.e.ctx.void_type().fn_type(&types, false);
        self.e.b.build_indirect_call(ty, function, &passed, "")?;
        Ok(())
    }
    fn report_done(&mut self, item: u32) -> EmitResult<()> {
        let item = self.e.i32(item);
        self.e.call(self.callbacks.report_done, &[self.ctx.into(), self.worker, item]).map(|_| ())
    }
    fn narrow(&mut self, value: LlvmValue<'c>) -> EmitResult<LlvmValue<'c>> {
        self.e.cast(Op::Trunc, value, self.e.ctx.i32_type().into())
    }
    fn claim_chunk(&mut self, pieces: LlvmValue<'c>) -> EmitResult<LlvmValue<'c>> {
        let args = [self.ctx.into(), self.worker, self.workers, pieces, self.share.into()];
        let taken = self.e.call(self.callbacks.claim, &args)?;
        taken.ok_or_else(|| EmitError::new("nothing is said about a share"))
    }
    fn is_claimed(&mut self, taken: LlvmValue<'c>, what: ClaimedWork) -> EmitResult<LlvmValue<'c>> {
        self.e.icmp(IntPredicate::EQ, taken, self.e.i32(what as u32))
    }
    fn claimed_share(&mut self) -> EmitResult<[LlvmValue<'c>; 2]> {
        let long: BasicTypeEnum<'c> = self.e.ctx.i64_type().into();
        Ok([self.e.field(self.share, 0, long)?, self.e.field(self.share, 8, long)?])
    }
}
