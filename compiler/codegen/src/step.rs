//! Steps as functions of direct calls: `int32_t name(mlcc_ctx *, uint32_t worker, uint32_t workers)`.
//!
//! A step reads the buffers' addresses from the context, checks its arguments (every worker alike, so that
//! all of them leave before the first barrier) and calls the kernels in order. A barrier is a call through
//! the context, skipped when there is one worker. An all-gather with other ranks is a call of the first
//! worker. After each item a function of the caller is called, if the context has one
//! (`mlcc_abi::Ctx::trace`).
//!
//! Back ends implement [`StepCode`], their instructions; the parts of a step are here.

use crate::error::EmitError;
use crate::logits_only::logits_only_items;
use crate::model::{ArgumentChecks, EntryLimits};
pub(crate) use crate::step_code::{ClaimedWork, IntCompare, IntOp, StepCode};
use mlcc_abi::{Ctx, Sequence, status};
use mlcc_ir::dim::{Dim, DimAtom, SizeSymbol};
use mlcc_ir::step::{
    AllGather, BufferRef, LaunchItem, MemoryBase, PAGE_ROWS, RepeatMode, SequenceFilter, StepItem,
    StepProgram, WorkSchedule,
};
use std::mem::offset_of;

type EmitResult<T> = std::result::Result<T, EmitError>;

/// Adds the code of `step` to its function.
pub(crate) fn emit<C: StepCode>(code: &mut C, step: &StepProgram, limits: EntryLimits) -> EmitResult<()> {
    let fields = ContextFields::read(code)?;
    StepEmitter { code, fields, row: None, output_rows: false, totals: Vec::new() }.run(step, limits)
}

struct StepEmitter<'a, C: StepCode> {
    code: &'a mut C,
    fields: ContextFields<C::Value>,
    /// The sequence that a launch is for.
    row: Option<SequenceFields<C::Value>>,
    /// It is for the output rows.
    output_rows: bool,
    /// The work of all sequences, by that of one.
    totals: Vec<(RepeatMode, C::Value)>,
}

/// The fields of the context, read once: they stay the same while a step runs.
#[derive(Clone, Copy)]
struct ContextFields<V> {
    n: V,
    b: V,
    n_outputs: V,
    past: V,
    weights: V,
    adapters: V,
    state: V,
    pages: V,
    page_table: V,
    arena: V,
    tokens: V,
    logit_indices: V,
    logits: V,
    probs: V,
}

impl<V: Copy> ContextFields<V> {
    fn read(code: &mut impl StepCode<Value = V>) -> EmitResult<ContextFields<V>> {
        let this = code.context();
        Ok(ContextFields {
            n: code.load_int(this, offset_of!(Ctx, n))?,
            b: code.load_int(this, offset_of!(Ctx, b))?,
            n_outputs: code.load_int(this, offset_of!(Ctx, n_outputs))?,
            past: code.load_int(this, offset_of!(Ctx, past))?,
            weights: code.load_address(this, offset_of!(Ctx, weights))?,
            adapters: code.load_address(this, offset_of!(Ctx, adapters))?,
            state: code.load_address(this, offset_of!(Ctx, state))?,
            pages: code.load_address(this, offset_of!(Ctx, pages))?,
            page_table: code.load_address(this, offset_of!(Ctx, page_table))?,
            arena: code.load_address(this, offset_of!(Ctx, arena))?,
            tokens: code.load_address(this, offset_of!(Ctx, tokens))?,
            logit_indices: code.load_address(this, offset_of!(Ctx, output_rows))?,
            logits: code.load_address(this, offset_of!(Ctx, logits))?,
            probs: code.load_address(this, offset_of!(Ctx, probs))?,
        })
    }
}

#[derive(Clone, Copy)]
struct SequenceFields<V> {
    index: V,
    state: V,
    page_table: V,
    past: V,
    /// Its first row of all, and how many it has.
    first: V,
    rows: V,
}

impl<C: StepCode> StepEmitter<'_, C> {
    fn run(&mut self, step: &StepProgram, limits: EntryLimits) -> EmitResult<()> {
        self.check_arguments(ArgumentChecks::of_step(&step.name), step, limits)?;
        self.add_up_work(step)?;
        let logits_only = logits_only_items(step).unwrap_or_default();
        let mut without_logits = None;
        for (number, item) in step.items.iter().enumerate() {
            if number == logits_only.start && !logits_only.is_empty() {
                without_logits = Some(self.pass_over_logits()?);
            }
            if number == logits_only.end
                && let Some(block) = without_logits.take()
            {
                self.code.jump(block)?;
                self.code.enter(block);
            }
            match item {
                StepItem::Launch(launch) => {
                    self.emit_repeated(launch)
                        .map_err(|f| EmitError(format!("kernel {}: {f}", launch.kernel)))?;
                }
                StepItem::AllGather(exchange) => self.emit_all_gather(number as u32, exchange)?,
                StepItem::Barrier => self.code.wait()?,
            }
            self.code.report_done(number as u32)?;
        }
        if let Some(block) = without_logits {
            self.code.jump(block)?;
            self.code.enter(block);
        }
        self.code.leave(status::OK)
    }

    /// Goes on only if the caller needs logits; else waits for the other workers, whose results may be read
    /// next, and goes to the block that this gives.
    fn pass_over_logits(&mut self) -> EmitResult<C::Block> {
        let this = self.code.context();
        let address = self.code.load_int(this, offset_of!(Ctx, logits))?;
        let one = self.code.int(1);
        let unwanted = self.code.compare(IntCompare::UnsignedLess, address, one)?;
        let [wait, wanted, after] = ["wait", "logits", "after_logits"].map(|name| self.code.block(name));
        self.code.branch(unwanted, wait, wanted)?;
        self.code.enter(wait);
        self.code.wait()?;
        self.code.jump(after)?;
        self.code.enter(wanted);
        Ok(after)
    }

    // ---- the context

    fn sym(&self, sym: SizeSymbol) -> C::Value {
        match sym {
            SizeSymbol::N if self.output_rows => self.fields.n_outputs,
            SizeSymbol::N => self.row.map_or(self.fields.n, |row| row.rows),
            SizeSymbol::B => self.fields.b,
            SizeSymbol::Past => self.row.map_or(self.fields.past, |row| row.past),
        }
    }

    fn base(&mut self, base: MemoryBase) -> EmitResult<C::Value> {
        Ok(match base {
            MemoryBase::Weights => self.fields.weights,
            MemoryBase::Adapters => self.fields.adapters,
            MemoryBase::State => self.row.map_or(self.fields.state, |row| row.state),
            MemoryBase::Pages => self.fields.pages,
            MemoryBase::PageTable => self.row.map_or(self.fields.page_table, |row| row.page_table),
            MemoryBase::Arena => self.fields.arena,
            MemoryBase::Tokens => self.fields.tokens,
            MemoryBase::LogitIndices => self.fields.logit_indices,
            MemoryBase::Logits => self.fields.logits,
            MemoryBase::Probs => self.fields.probs,
            MemoryBase::Temperature => {
                let this = self.code.context();
                self.code.offset(this, offset_of!(Ctx, temperature) as u64)?
            }
        })
    }

    // ---- launches

    fn emit_repeated(&mut self, launch: &LaunchItem) -> EmitResult<()> {
        match launch.repeat {
            RepeatMode::Once | RepeatMode::EachSequence { .. } => self.emit_shared(launch),
            RepeatMode::Outputs => {
                self.output_rows = true;
                let result = self.emit_shared(launch);
                self.output_rows = false;
                result
            }
            RepeatMode::EachWorker => {
                let whole = [0, 1, 1].map(|part| self.code.int(part));
                self.call_kernel(launch, whole)
            }
        }
    }

    /// A launch that all workers share.
    fn emit_shared(&mut self, launch: &LaunchItem) -> EmitResult<()> {
        match &launch.schedule {
            WorkSchedule::Static => {
                let share = self.code.share();
                self.launch(launch, share)
            }
            WorkSchedule::Dynamic { chunks: pieces } => self.emit_chunks(launch, pieces),
        }
    }

    /// A launch in pieces, as the caller deals them out; the worker's share, if it does not.
    fn emit_chunks(&mut self, launch: &LaunchItem, pieces: &Dim) -> EmitResult<()> {
        let [take, run, done] = ["take", "run", "done"].map(|name| self.code.block(name));
        let pieces = self.eval_dim(pieces)?;
        let pieces = self.code.narrow(pieces)?;
        self.code.jump(take)?;

        self.code.enter(take);
        let taken = self.code.claim_chunk(pieces)?;
        let none = self.code.is_claimed(taken, ClaimedWork::None)?;
        self.code.branch(none, done, run)?;

        self.code.enter(run);
        let share = self.code.claimed_share()?;
        self.launch(launch, share)?;
        let further = self.code.is_claimed(taken, ClaimedWork::Chunk)?;
        self.code.branch(further, take, done)?;
        self.code.enter(done);
        Ok(())
    }

    /// Part `.0` of `.1` of a launch.
    fn launch(&mut self, launch: &LaunchItem, [part, of]: [C::Value; 2]) -> EmitResult<()> {
        let one = self.code.int(1);
        let end = self.code.op(IntOp::Add, part, one)?;
        match &launch.repeat {
            RepeatMode::EachSequence { work, of: which } => {
                self.emit_sequences(launch, work, *which, [part, end, of])
            }
            RepeatMode::Once | RepeatMode::Outputs | RepeatMode::EachWorker => {
                self.call_kernel(launch, [part, end, of])
            }
        }
    }

    /// Runs the part of each sequence that a share of all work has
    /// ([`mlcc_ir::step::WorkShare::of_sequence`]).
    fn emit_sequences(
        &mut self,
        launch: &LaunchItem,
        work: &Dim,
        which: SequenceFilter,
        [first, end, of]: [C::Value; 3],
    ) -> EmitResult<()> {
        let total = self.totals.iter().find(|(of, _)| *of == launch.repeat).map(|(_, total)| *total);
        let total = total.ok_or_else(|| EmitError::new("work that was not added up"))?;
        let start = self.part_boundary(first, of, total)?;
        let stop = self.part_boundary(end, of, total)?;
        self.for_sequences(|s, at| {
            let [run, next] = ["run", "next"].map(|name| s.code.block(name));
            let (length, zero) = (s.sequence_work(work, which)?, s.code.int(0));
            let first = s.code.op(IntOp::Sub, start, at)?;
            let first = s.code.op(IntOp::SignedMax, first, zero)?;
            let end = s.code.op(IntOp::Sub, stop, at)?;
            let end = s.code.op(IntOp::SignedMin, end, length)?;
            let some = s.code.compare(IntCompare::SignedLess, first, end)?;
            s.code.branch(some, run, next)?;
            s.code.enter(run);
            s.call_kernel(launch, [first, end, length])?;
            s.code.jump(next)?;
            s.code.enter(next);
            s.code.op(IntOp::Add, at, length)
        })?;
        Ok(())
    }

    /// The start of part `part` of `of` parts of a line.
    fn part_boundary(&mut self, part: C::Value, of: C::Value, total: C::Value) -> EmitResult<C::Value> {
        let product = self.code.op(IntOp::Mul, part, total)?;
        self.code.op(IntOp::UnsignedDiv, product, of)
    }

    /// The work of all sequences, once for all launches.
    fn add_up_work(&mut self, step: &StepProgram) -> EmitResult<()> {
        for item in &step.items {
            let StepItem::Launch(LaunchItem { repeat, .. }) = item else { continue };
            let RepeatMode::EachSequence { work, of } = repeat else { continue };
            if self.totals.iter().any(|(of, _)| of == repeat) {
                continue;
            }
            let total = match work.as_const() {
                Some(1) if *of == SequenceFilter::All => self.fields.b,
                _ if *of == SequenceFilter::All && *work == Dim::sym(SizeSymbol::N) => self.fields.n,
                _ => self.for_sequences(|s, before| {
                    let work = s.sequence_work(work, *of)?;
                    s.code.op(IntOp::Add, before, work)
                })?,
            };
            self.totals.push((repeat.clone(), total));
        }
        Ok(())
    }

    /// The work of the sequence, 0 if it is not among `which`.
    fn sequence_work(&mut self, work: &Dim, which: SequenceFilter) -> EmitResult<C::Value> {
        let (all, rows, one) = (self.eval_dim(work)?, self.sym(SizeSymbol::N), self.code.int(1));
        let taken = match which {
            SequenceFilter::All => return Ok(all),
            SequenceFilter::OneRow => {
                let two = self.code.int(2);
                self.code.compare(IntCompare::SignedLess, rows, two)?
            }
            SequenceFilter::SeveralRows => self.code.compare(IntCompare::SignedGreater, rows, one)?,
        };
        let taken = self.code.number(taken)?;
        self.code.op(IntOp::Mul, all, taken)
    }

    /// `body` for each sequence, with the number that it gave for the one before, 0 at first; gives the last
    /// one.
    fn for_sequences(
        &mut self,
        body: impl FnOnce(&mut Self, C::Value) -> EmitResult<C::Value>,
    ) -> EmitResult<C::Value> {
        let zero = self.code.int(0);
        let (head, [index, before]) = self.code.begin_loop("sequences", [zero, zero])?;
        let [inside, done] = ["sequence", "done"].map(|name| self.code.block(name));
        let more = self.code.compare(IntCompare::UnsignedLess, index, self.fields.b)?;
        self.code.branch(more, inside, done)?;
        self.code.enter(inside);
        self.row = Some(self.load_sequence(index)?);
        let result = body(self, before);
        self.row = None;
        let one = self.code.int(1);
        let next = self.code.op(IntOp::Add, index, one)?;
        self.code.repeat(head, [next, result?])?;
        self.code.enter(done);
        Ok(before)
    }

    fn load_sequence(&mut self, index: C::Value) -> EmitResult<SequenceFields<C::Value>> {
        let this = self.code.context();
        let all = self.code.load_address(this, offset_of!(Ctx, sequences))?;
        let at = self.advance(all, index, size_of::<Sequence>() as u64)?;
        let state = self.code.load_address(at, offset_of!(Sequence, state))?;
        let page_table = self.code.load_address(at, offset_of!(Sequence, page_table))?;
        let past = self.code.load_int(at, offset_of!(Sequence, past))?;
        let first = self.code.load_int(at, offset_of!(Sequence, first))?;
        let rows = self.code.load_int(at, offset_of!(Sequence, rows))?;
        Ok(SequenceFields { index, state, page_table, past, first, rows })
    }

    /// The address after `count` items of `bytes` bytes.
    fn advance(&mut self, address: C::Value, count: C::Value, bytes: u64) -> EmitResult<C::Value> {
        let bytes = self.code.int(bytes as i64);
        let all = self.code.op(IntOp::Mul, count, bytes)?;
        self.code.advance(address, all)
    }

    /// Calls the kernel for a share: first part, end and number of parts.
    fn call_kernel(&mut self, launch: &LaunchItem, share: [C::Value; 3]) -> EmitResult<()> {
        let mut args = Vec::with_capacity(launch.buffers.len() + launch.dims.len() + share.len());
        for buffer in &launch.buffers {
            args.push(self.address(buffer)?);
        }
        for dim in &launch.dims {
            args.push(self.eval_dim(dim)?);
        }
        args.extend(share);
        self.code.call(&launch.kernel, &args)
    }

    /// The first worker speaks for its rank.
    fn emit_all_gather(&mut self, item: u32, exchange: &AllGather) -> EmitResult<()> {
        let [speak, go_on] = ["exchange", "exchanged"].map(|name| self.code.block(name));
        let ([worker, _], one) = (self.code.share(), self.code.int(1));
        let first = self.code.compare(IntCompare::UnsignedLess, worker, one)?;
        self.code.branch(first, speak, go_on)?;
        self.code.enter(speak);
        let (part, all) = (self.address(&exchange.part)?, self.address(&exchange.all)?);
        self.output_rows = exchange.output_rows;
        let rows = self.eval_dim(&exchange.shape.rows);
        self.output_rows = false;
        let bytes = self.code.int(exchange.shape.row_bytes as i64);
        self.code.all_gather(item, [part, all, rows?, bytes])?;
        self.code.jump(go_on)?;
        self.code.enter(go_on);
        Ok(())
    }

    fn address(&mut self, buffer: &BufferRef) -> EmitResult<C::Value> {
        let &BufferRef { base, offset, per_past, per_page, per_row, per_sequence, per_worker, bytes: _ } =
            buffer;
        let base = self.base(base)?;
        let mut address = self.code.offset(base, offset)?;
        if per_past > 0 && per_page > 0 {
            address = self.row_in_page(address, per_past, per_page)?;
        } else if per_past > 0 {
            address = self.advance(address, self.sym(SizeSymbol::Past), per_past)?;
        }
        if let Some(row) = self.row {
            for (number, bytes) in [(row.first, per_row), (row.index, per_sequence)] {
                if bytes > 0 {
                    address = self.advance(address, number, bytes)?;
                }
            }
        }
        if per_worker > 0 {
            let [worker, _] = self.code.share();
            address = self.advance(address, worker, per_worker)?;
        }
        Ok(address)
    }

    /// The place of the row after `past` others, given the start of the rows of page 0.
    fn row_in_page(&mut self, address: C::Value, row: u64, page: u64) -> EmitResult<C::Value> {
        let past = self.sym(SizeSymbol::Past);
        let rows = self.code.int(PAGE_ROWS as i64);
        let index = self.code.op(IntOp::UnsignedDiv, past, rows)?;
        let table = self.base(MemoryBase::PageTable)?;
        let number = self.code.load_entry(table, index)?;
        let address = self.advance(address, number, page)?;
        let within = self.code.op(IntOp::SignedRem, past, rows)?;
        self.advance(address, within, row)
    }

    // ---- sizes

    fn eval_dim(&mut self, dim: &Dim) -> EmitResult<C::Value> {
        let mut sum = self.code.int(dim.constant());
        for (atom, coefficient) in dim.terms() {
            let value = self.atom(atom)?;
            let coefficient = self.code.int(*coefficient);
            let term = self.code.op(IntOp::Mul, value, coefficient)?;
            sum = self.code.op(IntOp::Add, sum, term)?;
        }
        Ok(sum)
    }

    fn atom(&mut self, atom: &DimAtom) -> EmitResult<C::Value> {
        match atom {
            DimAtom::Sym(s) => Ok(self.sym(*s)),
            DimAtom::FloorDiv(dim, by) => self.floor_div(dim, *by),
            DimAtom::Min(a, b) => self.of_dims(IntOp::SignedMin, a, b),
            DimAtom::Max(a, b) => self.of_dims(IntOp::SignedMax, a, b),
            DimAtom::Product(factors) => {
                let mut product = self.code.int(1);
                for factor in factors {
                    let factor = self.eval_dim(factor)?;
                    product = self.code.op(IntOp::Mul, product, factor)?;
                }
                Ok(product)
            }
        }
    }

    fn of_dims(&mut self, op: IntOp, a: &Dim, b: &Dim) -> EmitResult<C::Value> {
        let (a, b) = (self.eval_dim(a)?, self.eval_dim(b)?);
        self.code.op(op, a, b)
    }

    /// Rounds towards minus infinity; the divisor is positive.
    fn floor_div(&mut self, dim: &Dim, by: i64) -> EmitResult<C::Value> {
        let value = self.eval_dim(dim)?;
        let [by, zero] = [by, 0].map(|value| self.code.int(value));
        let quotient = self.code.op(IntOp::SignedDiv, value, by)?;
        let rest = self.code.op(IntOp::SignedRem, value, by)?;
        let negative = self.code.compare(IntCompare::SignedLess, rest, zero)?;
        let one = self.code.number(negative)?;
        self.code.op(IntOp::Sub, quotient, one)
    }

    // ---- checks

    fn check_arguments(
        &mut self,
        checks: ArgumentChecks,
        step: &StepProgram,
        limits: EntryLimits,
    ) -> EmitResult<()> {
        if checks == ArgumentChecks::None {
            return Ok(());
        }
        let n = self.sym(SizeSymbol::N);
        self.refuse_if(IntCompare::SignedLess, n, 1, status::BAD_LENGTH)?;
        let most = limits.max_rows(&step.name);
        if most > 0 {
            self.refuse_if(IntCompare::SignedGreater, n, most as i64, status::BAD_LENGTH)?;
        }
        if checks == ArgumentChecks::Rows {
            return Ok(());
        }
        // Unsigned, so that a negative `past`, which would reach before the state, is refused as well.
        let context = match limits.context {
            0 => i64::MAX,
            some => some as i64,
        };
        if matches!(checks, ArgumentChecks::Sequences | ArgumentChecks::Ragged) {
            self.check_sequences(checks, limits.batch, context)?;
        } else {
            let past = self.sym(SizeSymbol::Past);
            self.refuse_if(IntCompare::UnsignedAtLeast, past, context, status::CONTEXT_FULL)?;
            let total = self.code.op(IntOp::Add, past, n)?;
            self.refuse_if(IntCompare::UnsignedGreater, total, context, status::CONTEXT_FULL)?;
        }
        if checks == ArgumentChecks::Ragged {
            self.refuse_unless_counted(self.fields.n_outputs, n)?;
            self.check_entries(MemoryBase::LogitIndices, n, status::BAD_LENGTH)?;
        }
        if limits.vocab == 0 {
            return Ok(());
        }
        let vocab = self.code.int(limits.vocab as i64);
        self.check_entries(MemoryBase::Tokens, vocab, status::BAD_TOKEN)
    }

    /// The sequences of a call: their number, their rows, what they have seen.
    fn check_sequences(&mut self, checks: ArgumentChecks, batch: u64, context: i64) -> EmitResult<()> {
        let (n, b) = (self.fields.n, self.fields.b);
        let one_each = checks == ArgumentChecks::Sequences;
        if one_each {
            self.refuse_unless_equal(b, n)?;
        } else {
            let most = if batch == 0 { i64::MAX } else { batch as i64 };
            let most = self.code.int(most);
            self.refuse_unless_counted(b, most)?;
        }
        self.for_sequences(|s, before| {
            let row = s.row.ok_or_else(|| EmitError::new("no sequence"))?;
            if one_each {
                let one = s.code.int(1);
                s.refuse_unless_equal(row.first, row.index)?;
                s.refuse_unless_equal(row.rows, one)?;
            }
            // All rows are of this call: first < n, 1 <= rows <= n - first.
            s.refuse_unless_below(row.first, n)?;
            let left = s.code.op(IntOp::Sub, n, row.first)?;
            s.refuse_unless_counted(row.rows, left)?;
            s.refuse_if(IntCompare::UnsignedAtLeast, row.past, context, status::CONTEXT_FULL)?;
            let total = s.code.op(IntOp::Add, row.past, row.rows)?;
            s.refuse_if(IntCompare::UnsignedGreater, total, context, status::CONTEXT_FULL)?;
            Ok(before)
        })?;
        Ok(())
    }

    /// `n` numbers, at least one, which index a table of `end` rows.
    fn check_entries(&mut self, base: MemoryBase, end: C::Value, status: i32) -> EmitResult<()> {
        let (n, entries) = (self.fields.n, self.base(base)?);
        let [zero, one] = [0, 1].map(|value| self.code.int(value));
        let (head, [index, _]) = self.code.begin_loop("entry", [zero; 2])?;
        let good = self.code.block("good");
        let entry = self.code.load_entry(entries, index)?;
        let bad = self.code.compare(IntCompare::UnsignedAtLeast, entry, end)?;
        self.leave_if(bad, status)?;
        let next = self.code.op(IntOp::Add, index, one)?;
        let more = self.code.compare(IntCompare::SignedLess, next, n)?;
        self.code.repeat_if(more, head, [next, zero], good)?;
        self.code.enter(good);
        Ok(())
    }

    /// A number of sequences or rows is below another one, neither of them negative.
    fn refuse_unless_below(&mut self, number: C::Value, end: C::Value) -> EmitResult<()> {
        let holds = self.code.compare(IntCompare::UnsignedAtLeast, number, end)?;
        self.leave_if(holds, status::BAD_LENGTH)
    }

    /// It is in `1..=most`.
    fn refuse_unless_counted(&mut self, number: C::Value, most: C::Value) -> EmitResult<()> {
        let one = self.code.int(1);
        let less = self.code.op(IntOp::Sub, number, one)?;
        self.refuse_unless_below(less, most)
    }

    fn refuse_unless_equal(&mut self, a: C::Value, b: C::Value) -> EmitResult<()> {
        let difference = self.code.op(IntOp::Sub, a, b)?;
        let one = self.code.int(1);
        self.refuse_unless_below(difference, one)
    }

    fn refuse_if(&mut self, compare: IntCompare, value: C::Value, bound: i64, status: i32) -> EmitResult<()> {
        let bound = self.code.int(bound);
        let holds = self.code.compare(compare, value, bound)?;
        self.leave_if(holds, status)
    }

    fn leave_if(&mut self, condition: C::Value, status: i32) -> EmitResult<()> {
        let [out, next] = ["refuse", "accept"].map(|name| self.code.block(name));
        self.code.branch(condition, out, next)?;
        self.code.enter(out);
        self.code.leave(status)?;
        self.code.enter(next);
        Ok(())
    }
}
