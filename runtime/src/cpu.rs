//! Execution of steps by the worker pool.

use std::ffi::c_void;
use std::marker::PhantomData;
use std::ops::Range;
use std::sync::atomic::{AtomicI32, Ordering};

use mlcc_abi::{Ctx, Sequence, StepFn, status};

use crate::buffer::Buffer;
use crate::model::Backend;
use crate::pool::{Barrier, Kind, Pieces, Pool};
use crate::session::Step;
use crate::state_block::StateBlock;
use crate::table::{State, Table};
use crate::trace::{StepTimes, Trace};
use crate::{Error, Model, Result};

/// Memory of one sequence on the CPU.
pub(crate) struct CpuSession {
    arena: Buffer,
    state: StateBlock,
    /// The tokens of a call, at most `chunk`: callers' slices are not aligned as entry points want them.
    tokens: Buffer,
    /// `vocab` floats.
    logits: Buffer,
    /// `chunk * vocab` floats, allocated by the first `prefill_logits`.
    chunk_logits: Option<Buffer>,
    /// `vocab` floats, allocated by the first `softmax`.
    probs: Option<Buffer>,
    /// Times of the items of steps, if they are taken.
    trace: Option<Box<Trace>>,
}

/// What a batch needs of a session. The pointers are good while the session is borrowed.
pub(crate) struct BatchMember<'a> {
    pub sequence: Sequence,
    /// Scratch memory of the plan's size, for one member of the batch to lend.
    pub arena: *mut u8,
    session: PhantomData<&'a mut CpuSession>,
}

/// What differs from call to call.
struct Call<'a> {
    step: Step,
    tokens: &'a [i32],
    n: usize,
    past: u64,
    temperature: f32,
}

impl CpuSession {
    pub fn new(model: &Model) -> Result<Self> {
        let plan = model.plan();
        let align = plan.alignment.max(mlcc_abi::BUFFER_ALIGN as u64);
        Ok(Self {
            arena: Buffer::zeroed("the arena", plan.arena_bytes, align)?,
            state: StateBlock::new(plan.state_bytes, &model.table().states)?,
            tokens: Buffer::integers("the tokens of a chunk", plan.chunk.max(1))?,
            logits: Buffer::floats("the logits", plan.vocab)?,
            chunk_logits: None,
            probs: None,
            trace: None,
        })
    }

    pub fn entry(model: &Model, step: Step) -> Option<StepFn> {
        let entries = model.backend().cpu_entries(model.table())?;
        match step {
            Step::Prefill => entries.prefill,
            Step::Decode => entries.decode,
            Step::PrefillLogits => entries.prefill_logits,
            Step::DecodeBatch => entries.decode_batch,
            Step::Create => entries.create_kv_cache,
            Step::Reset => entries.reset_kv_cache,
            Step::Softmax => entries.softmax_with_temperature,
        }
    }

    /// Gives memory to the first `rows` rows of every cache.
    pub fn reserve(&mut self, model: &Model, rows: u64) -> Result<()> {
        self.state.grow(rows, pool(model, Step::Create)?, model.joins_pages())
    }

    /// Runs a step that eats tokens; they are checked by the caller.
    pub fn feed(&mut self, model: &Model, step: Step, tokens: &[i32], past: u64) -> Result<()> {
        if step == Step::PrefillLogits && self.chunk_logits.is_none() {
            let floats = model.plan().chunk.saturating_mul(model.plan().vocab);
            self.chunk_logits = Some(Buffer::floats("the logits of a chunk", floats)?);
        }
        let pool = pool(model, step)?;
        self.state.grow(past + tokens.len() as u64, pool, model.joins_pages())?;
        self.call(model, &Call { step, tokens, n: tokens.len(), past, temperature: 1.0 })?;
        if model.joins_pages() {
            // A little after a token, whatever there is after a chunk.
            self.state.join_pages(if step == Step::Decode { 1 } else { usize::MAX }, pool)?;
        }
        if step == Step::PrefillLogits {
            let vocab = self.logits.len();
            let from = (tokens.len() - 1) * vocab;
            if let Some(all) = &self.chunk_logits {
                self.logits.bytes_mut().copy_from_slice(&all.bytes()[from..from + vocab]);
            }
        }
        Ok(())
    }

    /// Gives memory to the row behind `past` tokens.
    pub fn join_batch(&mut self, model: &Model, past: u64) -> Result<BatchMember<'_>> {
        self.state.grow(past + 1, pool(model, Step::DecodeBatch)?, model.joins_pages())?;
        let sequence = Sequence { state: self.state.as_mut_ptr(), past: past as i64 };
        Ok(BatchMember { sequence, arena: self.arena.as_mut_ptr(), session: PhantomData })
    }

    /// Takes over its row of the logits of a batch.
    pub fn leave_batch(&mut self, model: &Model, logits: &[f32]) -> Result<()> {
        self.logits.floats_mut().copy_from_slice(logits);
        if model.joins_pages() {
            self.state.join_pages(1, pool(model, Step::DecodeBatch)?)?;
        }
        Ok(())
    }

    pub fn softmax(&mut self, model: &Model, temperature: f32) -> Result<&[f32]> {
        if self.probs.is_none() {
            self.probs = Some(Buffer::floats("the probabilities", model.plan().vocab)?);
        }
        self.call(model, &Call { step: Step::Softmax, tokens: &[], n: 1, past: 0, temperature })?;
        Ok(self.probs.as_ref().map_or(&[], Buffer::as_floats))
    }

    pub fn initialise(&mut self, model: &Model, step: Step) -> Result<()> {
        if Self::entry(model, step).is_some() {
            return self.call(model, &Call { step, tokens: &[], n: 0, past: 0, temperature: 1.0 });
        }
        for piece in model.table().states.iter().filter(|p| p.cache.is_none()) {
            let bytes = self.state.bytes_mut(piece.live(0));
            match piece.fill {
                None => bytes.fill(0),
                Some(fill) => bytes.as_chunks_mut::<4>().0.fill(fill.to_le_bytes()),
            }
        }
        Ok(())
    }

    pub fn logits(&self) -> &[f32] {
        self.logits.as_floats()
    }

    /// Logits of the `n` positions of the last `prefill_logits` chunk.
    pub fn chunk_logits(&self, n: usize) -> &[f32] {
        self.chunk_logits.as_ref().map_or(&[], |all| &all.as_floats()[..n * self.logits.len() / 4])
    }

    pub fn arena(&self) -> &[u8] {
        self.arena.bytes()
    }

    pub fn state(&self, range: Range<u64>) -> &[u8] {
        self.state.bytes(range)
    }

    /// Writes a piece of state; `rows` of every cache get memory before.
    pub fn set_state(&mut self, model: &Model, rows: u64, pieces: &[(Range<u64>, &[u8])]) -> Result<()> {
        self.reserve(model, rows)?;
        for (range, bytes) in pieces {
            self.state.bytes_mut(range.clone()).copy_from_slice(bytes);
        }
        Ok(())
    }

    /// Moves rows of every cache to the places `moved`, from `count` rows behind them; `counter` gets the number of rows
    /// that were dropped so far.
    pub fn drop_rows(&mut self, table: &Table, count: u64, moved: Range<u64>, counter: &State, dropped: i32) {
        for (state, cache) in table.states.iter().filter_map(|s| Some((s, s.cache?))) {
            let rows = self.state.bytes_mut(state.live(count + moved.end));
            let byte = |row: u64| (row * cache.row_bytes) as usize;
            rows.copy_within(byte(moved.start + count).., byte(moved.start));
        }
        self.write_word(counter, dropped);
    }

    /// `state` has four bytes.
    pub fn write_word(&mut self, state: &State, value: i32) {
        self.state.bytes_mut(state.live(0)).copy_from_slice(&value.to_le_bytes());
    }

    /// Gives back what more than `rows` rows take.
    pub fn shrink(&mut self, rows: u64) {
        self.state.shrink(rows);
    }

    /// A second session of this model with the first `rows` rows, the rest of the state and the logits of this one.
    pub fn twin(&self, model: &Model, rows: u64) -> Result<Self> {
        let mut twin = Self::new(model)?;
        twin.reserve(model, rows)?;
        for range in model.table().states.iter().map(|s| s.live(rows)) {
            twin.state.bytes_mut(range.clone()).copy_from_slice(self.state.bytes(range));
        }
        twin.logits.bytes_mut().copy_from_slice(self.logits.bytes());
        Ok(twin)
    }

    /// Bytes of state that have memory, and those of scratch and results.
    pub fn allocated(&self) -> (u64, u64) {
        let results = [Some(&self.logits), self.chunk_logits.as_ref(), self.probs.as_ref()];
        let results: usize = results.into_iter().flatten().map(Buffer::len).sum();
        (self.state.allocated(), (self.arena.len() + results) as u64)
    }

    /// Takes times from now on, or no longer; gives what was taken so far.
    pub fn trace(&mut self, workers: usize, on: bool) -> Vec<StepTimes> {
        let taken = self.trace.take().map_or(Vec::new(), |trace| trace.times());
        self.trace = on.then(|| Box::new(Trace::new(workers)));
        taken
    }

    fn call(&mut self, model: &Model, call: &Call<'_>) -> Result<()> {
        let entry = call.step.name();
        let missing = || Error::MissingEntry { path: model.artifact().path().to_path_buf(), entry };
        let step = Self::entry(model, call.step).ok_or_else(missing)?;
        let logits = match (&mut self.chunk_logits, call.step) {
            (Some(all), Step::PrefillLogits) => all.as_mut_ptr(),
            _ => self.logits.as_mut_ptr(),
        };
        let mut ctx = Ctx {
            weights: model.weights().as_ptr(),
            arena: self.arena.as_mut_ptr(),
            state: self.state.as_mut_ptr(),
            tokens: self.tokens.hold(call.tokens).as_ptr(),
            n: call.n as i64,
            past: call.past as i64,
            logits: logits.cast(),
            probs: self.probs.as_mut().map_or(std::ptr::null_mut(), Buffer::as_mut_ptr).cast(),
            barrier: None,
            barrier_self: std::ptr::null_mut(),
            temperature: call.temperature,
            reserved0: 0,
            trace: None,
            trace_self: std::ptr::null_mut(),
            sequences: std::ptr::null(),
            take: None,
            take_self: std::ptr::null_mut(),
        };
        // SAFETY: the buffers have the sizes and alignment of the plan, the tokens are in range.
        unsafe { run(model, call.step, step, &mut ctx, self.trace.as_deref_mut()) }
    }
}

/// The workers that run `step`.
fn pool(model: &Model, step: Step) -> Result<&Pool> {
    match model.backend() {
        Backend::Cpu { pool, .. } => Ok(pool),
        #[cfg(feature = "cuda")]
        Backend::Cuda(_) => {
            Err(Error::MissingEntry { path: model.artifact().path().to_path_buf(), entry: step.name() })
        }
    }
}

/// Runs a step by all workers; sets the barrier, the pieces and the trace of `ctx`.
///
/// # Safety
/// `function` is the entry point of `step` in the variant of `model` that fits this CPU, and `ctx` fulfils its contract.
pub(crate) unsafe fn run(
    model: &Model,
    step: Step,
    function: StepFn,
    ctx: &mut Ctx,
    trace: Option<&mut Trace>,
) -> Result<()> {
    let entry = step.name();
    let pool = pool(model, step)?;
    ctx.barrier = Some(wait);
    ctx.barrier_self = std::ptr::from_ref(pool.barrier()).cast_mut().cast();
    ctx.take = Some(take);
    ctx.take_self = std::ptr::from_ref(pool.pieces()).cast_mut().cast();
    let trace: Option<&Trace> = trace.map(|t| t.begin(entry));
    ctx.trace = trace.map(|_| note as mlcc_abi::TraceFn);
    ctx.trace_self = trace.map_or(std::ptr::null_mut(), |t| std::ptr::from_ref(t).cast_mut().cast());
    let tokens = ctx.n as usize;
    let shared = SharedCtx(ctx);
    let failed = AtomicI32::new(status::OK);
    let call = |worker: usize, workers: usize| {
        if let Some(trace) = trace {
            trace.start(worker);
        }
        // SAFETY: by contract; all workers make the same call, and `ctx` outlives the run.
        let result = unsafe { function(shared.get(), worker as u32, workers as u32) };
        if result != status::OK {
            failed.store(result, Ordering::Relaxed);
        }
    };
    match trace {
        None if step.feeds() => pool.step(Kind { step: entry, tokens }, &call)?,
        None => pool.help(&call)?,
        // Profiles are of all workers.
        Some(_) => pool.run(&|worker| call(worker, pool.workers()))?,
    }
    match failed.into_inner() {
        status::OK => {
            if matches!(step, Step::Decode | Step::DecodeBatch)
                && let Some(mover) = model.mover()
                && mover.is_due()
            {
                pool.help(&|_, _| {
                    mover.advance();
                })?;
            }
            Ok(())
        }
        status => Err(Error::Step { entry, status }),
    }
}

/// The one pointer that all workers get.
struct SharedCtx(*mut Ctx);

impl SharedCtx {
    fn get(&self) -> *mut Ctx {
        self.0
    }
}

// SAFETY: the contract of a step: workers only read `ctx`, and write disjoint parts of the buffers between barriers.
unsafe impl Sync for SharedCtx {}

/// `ctx.barrier`.
unsafe extern "C" fn wait(barrier: *mut c_void, worker: u32) {
    // SAFETY: `barrier_self` is the pool's barrier, which outlives the run.
    let barrier = unsafe { &*barrier.cast::<Barrier>() };
    barrier.wait(worker as usize);
}

/// `ctx.take`.
unsafe extern "C" fn take(pieces: *mut c_void, worker: u32, each: u32) -> u32 {
    // SAFETY: `take_self` is the pool's dealer of pieces, which outlives the run.
    let pieces = unsafe { &*pieces.cast::<Pieces>() };
    pieces.take(worker as usize, each).unwrap_or(mlcc_abi::NO_PIECE)
}

/// `ctx.trace`.
unsafe extern "C" fn note(trace: *mut c_void, worker: u32, item: u32) {
    // SAFETY: `trace_self` is the session's trace, which outlives the run.
    let trace = unsafe { &*trace.cast::<Trace>() };
    trace.note(worker as usize, item as usize);
}
