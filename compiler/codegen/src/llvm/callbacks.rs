//! The calls of steps to their caller, through the context: waiting at barriers, taking pieces of shares, and
//! reporting finished items.
//!
//! Each is a function that the steps of a module call. Spelled out in the midst of hundreds of launches,
//! their branches were most of a step's code, and a third of the time to compile a model.

use super::emit::{EmitResult, LlvmBuilder, LlvmValue};
use crate::error::EmitError;
use crate::step::ClaimedWork;
use inkwell::attributes::AttributeLoc;
use inkwell::context::Context;
use inkwell::module::{Linkage, Module};
use inkwell::types::{ArrayType, BasicMetadataTypeEnum, BasicTypeEnum, FunctionType};
use inkwell::values::{FunctionValue, InstructionOpcode as Op, PointerValue};
use inkwell::{AddressSpace, IntPredicate};
use mlcc_abi::{Ctx, NO_CHUNK};
use mlcc_ir::step::GuidedChunks;
use std::mem::offset_of;

#[derive(Clone, Copy)]
pub struct StepCallbacks<'c> {
    /// `void (ctx, worker, workers)`: a barrier, if there are several workers.
    pub wait: FunctionValue<'c>,
    /// `void (ctx, worker, item)`: the item of that number is over, for a caller that traces.
    pub report_done: FunctionValue<'c>,
    /// `i32 (ctx, worker, workers, pieces, share)`: one of [`ClaimedWork`]; the share as worker and workers.
    pub claim: FunctionValue<'c>,
}

/// A share in memory: number, and of how many.
pub fn share_type(ctx: &Context) -> ArrayType<'_> {
    ctx.i64_type().array_type(2)
}

impl<'c> StepCallbacks<'c> {
    /// Defines them in a module.
    pub fn define(ctx: &'c Context, module: &Module<'c>) -> EmitResult<StepCallbacks<'c>> {
        let i32: BasicMetadataTypeEnum<'c> = ctx.i32_type().into();
        let pointer: BasicMetadataTypeEnum<'c> = ctx.ptr_type(AddressSpace::default()).into();
        let nothing = ctx.void_type().fn_type(&[pointer, i32, i32], false);
        let taken = ctx.i32_type().fn_type(&[pointer, i32, i32, i32, pointer], false);
        Ok(StepCallbacks {
            wait: CallbackBody::define(ctx, module, "mlcc.wait", nothing, |body| body.wait())?,
            report_done: CallbackBody::define(ctx, module, "mlcc.tell", nothing, |body| body.report_done())?,
            claim: CallbackBody::define(ctx, module, "mlcc.take", taken, |body| body.claim())?,
        })
    }
}

struct CallbackBody<'c, 'm> {
    e: LlvmBuilder<'c, 'm>,
    function: FunctionValue<'c>,
    ctx: PointerValue<'c>,
    /// The arguments after the context.
    numbers: Vec<LlvmValue<'c>>,
}

impl<'c, 'm> CallbackBody<'c, 'm> {
    fn define(
        ctx: &'c Context,
        module: &'m Module<'c>,
        name: &str,
        ty: FunctionType<'c>,
        body: impl FnOnce(&Self) -> EmitResult<()>,
    ) -> EmitResult<FunctionValue<'c>> {
        let e = LlvmBuilder::new(ctx, module);
        let function = module.add_function(name, ty, Some(Linkage::Internal));
        function.add_attribute(AttributeLoc::Function, e.flag("noinline"));
        e.mark_cpu_function(function);
        e.b.position_at_end(ctx.append_basic_block(function, "entry"));
        let mut params = function.get_params().into_iter();
        let this = params.next().ok_or_else(|| EmitError::new("no context"))?.into_pointer_value();
        body(&CallbackBody { e, function, ctx: this, numbers: params.collect() })?;
        Ok(function)
    }

    fn wait(&self) -> EmitResult<()> {
        let [worker, workers] = self.numbers[..] else { return Err(EmitError::new("two numbers expected")) };
        let several = self.e.icmp(IntPredicate::UGT, workers, self.e.i32(1))?;
        let [call, out] = ["wait", "out"].map(|name| self.e.ctx.append_basic_block(self.function, name));
        self.e.b.build_conditional_branch(several.into_int_value(), call, out)?;
        self.e.b.position_at_end(call);
        let barrier = self.e.pointer_field(self.ctx, offset_of!(Ctx, barrier))?;
        let this = self.e.pointer_field(self.ctx, offset_of!(Ctx, barrier_self))?;
        self.e.b.build_indirect_call(self.callback(1), barrier, &[this.into(), worker.into()], "")?;
        self.e.b.build_return(None)?;
        self.e.b.position_at_end(out);
        self.e.b.build_return(None)?;
        Ok(())
    }

    fn report_done(&self) -> EmitResult<()> {
        let [worker, item] = self.numbers[..] else { return Err(EmitError::new("two numbers expected")) };
        let trace = self.e.pointer_field(self.ctx, offset_of!(Ctx, trace))?;
        let silent = self.e.b.build_is_null(trace, "")?;
        let [call, out] = ["tell", "out"].map(|name| self.e.ctx.append_basic_block(self.function, name));
        self.e.b.build_conditional_branch(silent, out, call)?;
        self.e.b.position_at_end(call);
        let this = self.e.pointer_field(self.ctx, offset_of!(Ctx, trace_self))?;
        let args = [this.into(), worker.into(), item.into()];
        let told = self.e.b.build_indirect_call(self.callback(2), trace, &args, "")?;
        told.add_attribute(AttributeLoc::Function, self.e.flag("cold"));
        self.e.b.build_return(None)?;
        self.e.b.position_at_end(out);
        self.e.b.build_return(None)?;
        Ok(())
    }

    /// `void (void *self, uint32_t ...)` with `numbers` numbers.
    fn callback(&self, numbers: usize) -> FunctionType<'c> {
        let mut params: Vec<BasicMetadataTypeEnum<'c>> =
            vec![self.e.ctx.ptr_type(AddressSpace::default()).into()];
        params.resize(1 + numbers, self.e.ctx.i32_type().into());
        self.e.ctx.void_type().fn_type(&params, false)
    }

    fn claim(&self) -> EmitResult<()> {
        let [worker, workers, pieces, share] = self.numbers[..] else {
            return Err(EmitError::new("three numbers and a place expected"));
        };
        let (ctx, share) = (self.e.ctx, share.into_pointer_value());
        let [take, whole, piece, none] =
            ["take", "whole", "piece", "none"].map(|name| ctx.append_basic_block(self.function, name));
        let function = self.e.pointer_field(self.ctx, offset_of!(Ctx, next_chunk))?;
        let smallest = self.e.op(Op::UDiv, pieces, workers)?;
        let by_eight = self.e.op(Op::UDiv, smallest, self.e.i32(GuidedChunks::SMALLEST as u32))?;
        let one: LlvmValue<'c> = self.e.i32(1);
        let equal = self.e.intrinsic_value("llvm.umax", &[one.get_type()], &[by_eight, one])?;
        let each = self.e.add(equal, self.e.i32(GuidedChunks::FURTHER as u32))?;
        let given = self.e.b.build_is_not_null(function, "")?;
        let least = [(workers, 2), (smallest, GuidedChunks::LEAST as u32)];
        let several = least.map(|(count, least)| self.e.icmp(IntPredicate::UGE, count, self.e.i32(least)));
        let dynamic = several.into_iter().try_fold(given, |so_far, next| -> EmitResult<_> {
            Ok(self.e.b.build_and(so_far, next?.into_int_value(), "")?)
        })?;
        self.e.b.build_conditional_branch(dynamic, take, whole)?;

        self.e.b.position_at_end(whole);
        self.return_claim(share, worker, workers, ClaimedWork::Share)?;

        self.e.b.position_at_end(take);
        let this = self.e.pointer_field(self.ctx, offset_of!(Ctx, next_chunk_self))?;
        let (pointer, i32) = (ctx.ptr_type(AddressSpace::default()), ctx.i32_type());
        let ty = i32.fn_type(&[pointer.into(), i32.into(), i32.into()], false);
        let args = [this.into(), worker.into(), each.into()];
        let taken = self.e.b.build_indirect_call(ty, function, &args, "")?;
        let number =
            taken.try_as_basic_value().basic().ok_or_else(|| EmitError::new("no number of a piece"))?;
        let nothing = self.e.icmp(IntPredicate::EQ, number, self.e.i32(NO_CHUNK))?;
        self.e.b.build_conditional_branch(nothing.into_int_value(), none, piece)?;

        self.e.b.position_at_end(piece);
        let (part, parts) = self.chunk_part(number, workers, each, equal)?;
        self.return_claim(share, part, parts, ClaimedWork::Chunk)?;

        self.e.b.position_at_end(none);
        self.e.b.build_return(Some(&self.e.i32(ClaimedWork::None as u32)))?;
        Ok(())
    }

    fn return_claim(
        &self,
        share: PointerValue<'c>,
        part: LlvmValue<'c>,
        parts: LlvmValue<'c>,
        taken: ClaimedWork,
    ) -> EmitResult<()> {
        let long: BasicTypeEnum<'c> = self.e.ctx.i64_type().into();
        for (at, value) in [(0, part), (8, parts)] {
            self.e.store(self.e.cast(Op::ZExt, value, long)?, self.e.offset(share, at)?, 8)?;
        }
        self.e.b.build_return(Some(&self.e.i32(taken as u32)))?;
        Ok(())
    }

    /// [`GuidedChunks::equal_part`] of a number, with `each` pieces in a share, `equal` of them equal.
    fn chunk_part(
        &self,
        number: LlvmValue<'c>,
        workers: LlvmValue<'c>,
        each: LlvmValue<'c>,
        equal: LlvmValue<'c>,
    ) -> EmitResult<(LlvmValue<'c>, LlvmValue<'c>)> {
        let (zero, one) = (self.e.i32(0), self.e.i32(1));
        let owner = self.e.op(Op::UDiv, number, each)?;
        let piece = self.e.op(Op::URem, number, each)?;
        let behind = self.e.op(Op::Sub, self.e.add(piece, one)?, equal)?;
        let whole = self.e.icmp(IntPredicate::SLT, behind, zero)?;
        let smallest = self.e.i32(GuidedChunks::FURTHER as u32);
        let halvings =
            self.e.intrinsic_value("llvm.umin", &[one.get_type()], &[self.e.add(behind, one)?, smallest])?;
        let halvings = self.e.select(whole, zero, halvings)?;
        let each = self.e.op(Op::Shl, equal, halvings)?;
        let last = self.e.cast(Op::ZExt, self.e.icmp(IntPredicate::EQ, behind, smallest)?, one.get_type())?;
        let further = self.e.add(self.e.op(Op::Sub, each, self.e.i32(2))?, last)?;
        let within = self.e.select(whole, piece, further)?;
        Ok((self.e.add(self.e.mul(owner, each)?, within)?, self.e.mul(workers, each)?))
    }
}
