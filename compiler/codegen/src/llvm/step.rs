//! Steps as functions of direct calls: `int32_t name(mlcc_ctx *, uint32_t worker, uint32_t workers)`.
//!
//! A step reads the buffers' addresses from the context, checks its arguments (every worker alike, so that all of them leave
//! before the first barrier) and calls the kernels in order. A barrier is a call through the context, skipped when there is
//! one worker. After each item the caller is told, if the context says whom (`mlcc_abi::Ctx::trace`). Both are functions of
//! the module ([`super::callbacks`]), so that a step is little more than calls.

use super::callbacks::{Callbacks, Taken};
use super::emit::{Emit, Result, Value};
use crate::error::{CodegenError, Fault};
use crate::model::{Checks, Limits};
use inkwell::attributes::AttributeLoc;
use inkwell::context::Context;
use inkwell::module::{Linkage, Module};
use inkwell::types::BasicTypeEnum;
use inkwell::values::{BasicValue, FunctionValue, InstructionOpcode as Op, PointerValue};
use inkwell::{AddressSpace, GlobalVisibility, IntPredicate};
use mlcc_abi::{Ctx, Sequence, status};
use mlcc_ir::dim::{Atom, Dim, Sym};
use mlcc_ir::step::{Base, BufferRef, Launch, Repeat, Shares, Step, StepItem};
use std::collections::BTreeMap;
use std::mem::offset_of;

/// Functions of the kernels by kernel name.
pub type Kernels<'c> = BTreeMap<String, FunctionValue<'c>>;

/// Emits `step` as a hidden function called `symbol`.
pub fn emit_step<'c>(
    ctx: &'c Context,
    module: &Module<'c>,
    step: &Step,
    symbol: &str,
    kernels: &Kernels<'c>,
    limits: Limits,
) -> std::result::Result<(), CodegenError> {
    let error = |f: Fault| CodegenError::Step { step: step.name.clone(), what: f.0 };
    StepEmitter::declare(ctx, module, symbol, kernels).and_then(|mut e| e.run(step, limits)).map_err(error)
}

struct StepEmitter<'a, 'c> {
    e: Emit<'c, 'a>,
    kernels: &'a Kernels<'c>,
    function: FunctionValue<'c>,
    ctx: PointerValue<'c>,
    /// As given (i32) and as kernels want them (i64).
    worker: Value<'c>,
    workers: Value<'c>,
    wide: [Value<'c>; 2],
    fields: Fields<'c>,
    callbacks: Callbacks<'c>,
    /// Where [`Callbacks::take`] puts a share.
    share: PointerValue<'c>,
    /// The sequence that a launch is for.
    row: Option<Row<'c>>,
}

/// What the context says, read once: it stays the same while a step runs.
#[derive(Clone, Copy)]
struct Fields<'c> {
    n: Value<'c>,
    past: Value<'c>,
    weights: PointerValue<'c>,
    state: PointerValue<'c>,
    arena: PointerValue<'c>,
    tokens: PointerValue<'c>,
    logits: PointerValue<'c>,
    probs: PointerValue<'c>,
}

impl<'c> Fields<'c> {
    fn read(e: &Emit<'c, '_>, this: PointerValue<'c>) -> Result<Fields<'c>> {
        let number = |offset| e.field(this, offset, e.ctx.i64_type().into());
        let pointer = |offset| e.pointer_field(this, offset);
        Ok(Fields {
            n: number(offset_of!(Ctx, n))?,
            past: number(offset_of!(Ctx, past))?,
            weights: pointer(offset_of!(Ctx, weights))?,
            state: pointer(offset_of!(Ctx, state))?,
            arena: pointer(offset_of!(Ctx, arena))?,
            tokens: pointer(offset_of!(Ctx, tokens))?,
            logits: pointer(offset_of!(Ctx, logits))?,
            probs: pointer(offset_of!(Ctx, probs))?,
        })
    }
}

#[derive(Clone, Copy)]
struct Row<'c> {
    index: Value<'c>,
    state: PointerValue<'c>,
    past: Value<'c>,
}

impl<'a, 'c> StepEmitter<'a, 'c> {
    fn declare(
        ctx: &'c Context,
        module: &'a Module<'c>,
        symbol: &str,
        kernels: &'a Kernels<'c>,
    ) -> Result<StepEmitter<'a, 'c>> {
        let e = Emit::new(ctx, module);
        let callbacks = Callbacks::define(ctx, module)?;
        let i32 = ctx.i32_type();
        let pointer = ctx.ptr_type(AddressSpace::default());
        let ty = i32.fn_type(&[pointer.into(), i32.into(), i32.into()], false);
        let function = module.add_function(symbol, ty, Some(Linkage::External));
        function.as_global_value().set_visibility(GlobalVisibility::Hidden);
        function.add_attribute(AttributeLoc::Function, e.flag("nounwind"));
        function.add_attribute(AttributeLoc::Function, ctx.create_string_attribute("no-builtins", ""));
        e.b.position_at_end(ctx.append_basic_block(function, "entry"));
        let [this, worker, workers] = function.get_params()[..] else {
            return Err(Fault::new("three parameters expected"));
        };
        let long: BasicTypeEnum<'c> = ctx.i64_type().into();
        let wide = [e.cast(Op::ZExt, worker, long)?, e.cast(Op::ZExt, workers, long)?];
        let share = e.b.build_alloca(Taken::ty(ctx), "share")?;
        let this = this.into_pointer_value();
        let fields = Fields::read(&e, this)?;
        Ok(StepEmitter {
            e,
            kernels,
            function,
            ctx: this,
            worker,
            workers,
            wide,
            fields,
            callbacks,
            share,
            row: None,
        })
    }

    fn run(&mut self, step: &Step, limits: Limits) -> Result<()> {
        self.check(Checks::of_step(&step.name), step, limits)?;
        for (number, item) in step.items.iter().enumerate() {
            match item {
                StepItem::Launch(launch) => {
                    self.repeated(launch).map_err(|f| Fault(format!("kernel {}: {f}", launch.kernel)))?;
                }
                StepItem::Barrier => {
                    self.e.call(self.callbacks.wait, &[self.ctx.into(), self.worker, self.workers])?;
                }
            }
            let number = self.e.i32(number as u32);
            self.e.call(self.callbacks.tell, &[self.ctx.into(), self.worker, number])?;
        }
        self.leave(status::OK)
    }

    // ---- the context

    fn sym(&self, sym: Sym) -> Value<'c> {
        match sym {
            // Nothing is sized by `B`: rows of a batch are `n`.
            Sym::N | Sym::B => self.fields.n,
            Sym::Past => self.row.map_or(self.fields.past, |row| row.past),
        }
    }
    fn base(&self, base: Base) -> Result<PointerValue<'c>> {
        Ok(match base {
            Base::Weights => self.fields.weights,
            Base::State => self.row.map_or(self.fields.state, |row| row.state),
            Base::Arena => self.fields.arena,
            Base::Tokens => self.fields.tokens,
            Base::Logits => self.fields.logits,
            Base::Probs => self.fields.probs,
            Base::Temperature => self.e.offset(self.ctx, offset_of!(Ctx, temperature) as u64)?,
        })
    }

    // ---- launches and barriers

    /// A launch, or a loop of launches for each sequence.
    fn repeated(&mut self, launch: &Launch) -> Result<()> {
        let n = self.fields.n;
        let ([worker, workers], zero, one) = (self.wide, self.e.i64(0), self.e.i64(1));
        match launch.repeat {
            Repeat::Once => match &launch.shares {
                Shares::Static => self.launch(launch, self.wide),
                Shares::Dynamic { pieces } => self.pieces(launch, pieces),
            },
            Repeat::EachWorker => self.launch(launch, [zero, one]),
            Repeat::EachSequence => self.for_rows(zero, n, |s| s.launch(launch, s.wide)),
            Repeat::EachSequenceAlone => {
                let share = |worker| {
                    let product = self.e.mul(worker, n)?;
                    self.e.op(Op::UDiv, product, workers)
                };
                let (from, to) = (share(worker)?, share(self.e.add(worker, one)?)?);
                self.for_rows(from, to, |s| s.launch(launch, [zero, one]))
            }
        }
    }

    /// A launch in pieces, as the caller deals them out; the worker's share, if it does not.
    fn pieces(&self, launch: &Launch, pieces: &Dim) -> Result<()> {
        let ctx = self.e.ctx;
        let [take, run, done] =
            ["take", "run", "done"].map(|name| ctx.append_basic_block(self.function, name));
        let pieces = self.e.cast(Op::Trunc, self.dim(pieces)?, ctx.i32_type().into())?;
        self.e.b.build_unconditional_branch(take)?;

        self.e.b.position_at_end(take);
        let args = [self.ctx.into(), self.worker, self.workers, pieces, self.share.into()];
        let taken = self.e.call(self.callbacks.take, &args)?;
        let taken = taken.ok_or_else(|| Fault::new("nothing is said about a share"))?;
        let none = self.e.icmp(IntPredicate::EQ, taken, self.e.i32(Taken::None as u32))?;
        self.e.b.build_conditional_branch(none.into_int_value(), done, run)?;

        self.e.b.position_at_end(run);
        let part = |offset| self.e.field(self.share, offset, ctx.i64_type().into());
        self.launch(launch, [part(0)?, part(8)?])?;
        let further = self.e.icmp(IntPredicate::EQ, taken, self.e.i32(Taken::Piece as u32))?;
        self.e.b.build_conditional_branch(further.into_int_value(), take, done)?;
        self.e.b.position_at_end(done);
        Ok(())
    }

    /// `body` for each sequence from number `from` until `to`.
    fn for_rows(
        &mut self,
        from: Value<'c>,
        to: Value<'c>,
        body: impl FnOnce(&Self) -> Result<()>,
    ) -> Result<()> {
        let ctx = self.e.ctx;
        let here = || self.e.b.get_insert_block().ok_or_else(|| Fault::new("no block"));
        let before = here()?;
        let [head, inside, done] =
            ["sequences", "sequence", "done"].map(|name| ctx.append_basic_block(self.function, name));
        self.e.b.build_unconditional_branch(head)?;
        self.e.b.position_at_end(head);
        let i = self.e.b.build_phi(ctx.i64_type(), "row")?;
        let index = i.as_basic_value();
        let more = self.e.icmp(IntPredicate::ULT, index, to)?;
        self.e.b.build_conditional_branch(more.into_int_value(), inside, done)?;
        self.e.b.position_at_end(inside);
        self.row = Some(self.sequence(index)?);
        let result = body(self);
        self.row = None;
        result?;
        let next = self.e.add(index, self.e.i64(1))?;
        let last = self.e.b.get_insert_block().ok_or_else(|| Fault::new("no block"))?;
        self.e.b.build_unconditional_branch(head)?;
        i.add_incoming(&[(&from, before), (&next, last)]);
        self.e.b.position_at_end(done);
        Ok(())
    }

    fn sequence(&self, index: Value<'c>) -> Result<Row<'c>> {
        let ctx = self.e.ctx;
        let all = self.e.pointer_field(self.ctx, offset_of!(Ctx, sequences))?;
        let at = self.e.mul(index, self.e.i64(size_of::<Sequence>() as i64))?;
        let at = self.e.element(all, ctx.i8_type().into(), at, true)?;
        let state = self.e.pointer_field(at, offset_of!(Sequence, state))?;
        let past = self.e.field(at, offset_of!(Sequence, past), ctx.i64_type().into())?;
        Ok(Row { index, state, past })
    }

    fn launch(&self, launch: &Launch, workers: [Value<'c>; 2]) -> Result<()> {
        let function = self.kernels.get(&launch.kernel);
        let function = *function.ok_or_else(|| Fault::new("is launched but not among the kernels"))?;
        let mut args: Vec<Value<'c>> = Vec::new();
        for BufferRef { base, offset, per_past, per_row, per_worker, .. } in &launch.buffers {
            let mut address = self.e.offset(self.base(*base)?, *offset)?;
            if *per_past > 0 {
                let rows = self.e.mul(self.sym(Sym::Past), self.e.i64(*per_past as i64))?;
                address = self.e.element(address, self.e.ctx.i8_type().into(), rows, true)?;
            }
            if let Some(row) = self.row.filter(|_| *per_row > 0) {
                let rows = self.e.mul(row.index, self.e.i64(*per_row as i64))?;
                address = self.e.element(address, self.e.ctx.i8_type().into(), rows, true)?;
            }
            if *per_worker > 0 {
                let copies = self.e.mul(self.wide[0], self.e.i64(*per_worker as i64))?;
                address = self.e.element(address, self.e.ctx.i8_type().into(), copies, true)?;
            }
            args.push(address.as_basic_value_enum());
        }
        for dim in &launch.dims {
            args.push(self.dim(dim)?);
        }
        args.extend(workers);
        self.e.call(function, &args).map(|_| ())
    }

    fn dim(&self, dim: &Dim) -> Result<Value<'c>> {
        let mut sum = self.e.i64(dim.constant());
        for (atom, coefficient) in dim.terms() {
            let value = match atom {
                Atom::Sym(s) => self.sym(*s),
                Atom::FloorDiv(d, by) => self.floor_div(d, *by)?,
                Atom::Min(a, b) => self.extremum("llvm.smin", a, b)?,
                Atom::Max(a, b) => self.extremum("llvm.smax", a, b)?,
                Atom::Product(factors) => {
                    let one = self.e.i64(1);
                    factors.iter().try_fold(one, |product, factor| self.e.mul(product, self.dim(factor)?))?
                }
            };
            let term = self.e.mul(value, self.e.i64(*coefficient))?;
            sum = self.e.add(sum, term)?;
        }
        Ok(sum)
    }

    fn extremum(&self, name: &str, a: &Dim, b: &Dim) -> Result<Value<'c>> {
        let (a, b) = (self.dim(a)?, self.dim(b)?);
        self.e.intrinsic_value(name, &[a.get_type()], &[a, b])
    }

    /// Rounds towards minus infinity; the divisor is positive.
    fn floor_div(&self, dim: &Dim, by: i64) -> Result<Value<'c>> {
        let (value, by) = (self.dim(dim)?, self.e.i64(by));
        let quotient = self.e.op(Op::SDiv, value, by)?;
        let rest = self.e.op(Op::SRem, value, by)?;
        let negative = self.e.icmp(IntPredicate::SLT, rest, self.e.i64(0))?;
        let one = self.e.cast(Op::ZExt, negative, self.e.ctx.i64_type().into())?;
        self.e.op(Op::Sub, quotient, one)
    }

    // ---- checks

    fn check(&mut self, checks: Checks, step: &Step, limits: Limits) -> Result<()> {
        if checks == Checks::None {
            return Ok(());
        }
        let n = self.sym(Sym::N);
        let too_few = self.e.icmp(IntPredicate::SLT, n, self.e.i64(1))?;
        self.leave_if(too_few, status::BAD_LENGTH)?;
        let most = limits.most(&step.name);
        if most > 0 {
            let too_many = self.e.icmp(IntPredicate::SGT, n, self.e.i64(most as i64))?;
            self.leave_if(too_many, status::BAD_LENGTH)?;
        }
        if checks == Checks::Rows {
            return Ok(());
        }
        // Unsigned, so that a negative `past`, which would reach before the state, is refused as well.
        let context = match limits.context {
            0 => i64::MAX,
            some => some as i64,
        };
        let context = self.e.i64(context);
        if checks == Checks::Sequences {
            self.for_rows(self.e.i64(0), n, |s| {
                let full = s.e.icmp(IntPredicate::UGE, s.sym(Sym::Past), context)?;
                s.leave_if(full, status::CONTEXT_FULL)
            })?;
        } else {
            let past = self.sym(Sym::Past);
            let full = self.e.icmp(IntPredicate::UGE, past, context)?;
            self.leave_if(full, status::CONTEXT_FULL)?;
            let total = self.e.add(past, n)?;
            let full = self.e.icmp(IntPredicate::UGT, total, context)?;
            self.leave_if(full, status::CONTEXT_FULL)?;
        }
        if limits.vocab > 0 { self.check_tokens(n, limits.vocab) } else { Ok(()) }
    }

    fn check_tokens(&mut self, n: Value<'c>, vocab: u64) -> Result<()> {
        let ctx = self.e.ctx;
        let i32: BasicTypeEnum<'c> = ctx.i32_type().into();
        let vocab = u32::try_from(vocab).map_err(|_| Fault(format!("a vocabulary of {vocab} tokens")))?;
        let tokens = self.base(Base::Tokens)?;
        let before = self.e.b.get_insert_block().ok_or_else(|| Fault::new("no block"))?;
        let each = ctx.append_basic_block(self.function, "token");
        let good = ctx.append_basic_block(self.function, "good");
        self.e.b.build_unconditional_branch(each)?;
        self.e.b.position_at_end(each);
        let i = self.e.b.build_phi(ctx.i64_type(), "i")?;
        let at = self.e.element(tokens, i32, i.as_basic_value(), true)?;
        let token = self.e.load(i32, at, 4)?;
        let bad = self.e.icmp(IntPredicate::UGE, token, self.e.i32(vocab))?;
        self.leave_if(bad, status::BAD_TOKEN)?;
        let next = self.e.add(i.as_basic_value(), self.e.i64(1))?;
        let last = self.e.b.get_insert_block().ok_or_else(|| Fault::new("no block"))?;
        let more = self.e.icmp(IntPredicate::SLT, next, n)?;
        self.e.b.build_conditional_branch(more.into_int_value(), each, good)?;
        i.add_incoming(&[(&self.e.i64(0), before), (&next, last)]);
        self.e.b.position_at_end(good);
        Ok(())
    }

    fn leave(&self, status: i32) -> Result<()> {
        let status = self.e.i32(status as u32);
        self.e.b.build_return(Some(&status))?;
        Ok(())
    }

    fn leave_if(&self, cond: Value<'c>, status: i32) -> Result<()> {
        let out = self.e.ctx.append_basic_block(self.function, "refuse");
        let next = self.e.ctx.append_basic_block(self.function, "accept");
        self.e.b.build_conditional_branch(cond.into_int_value(), out, next)?;
        self.e.b.position_at_end(out);
        self.leave(status)?;
        self.e.b.position_at_end(next);
        Ok(())
    }
}
