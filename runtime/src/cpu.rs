//! Execution of steps by the worker pool.

use std::borrow::Cow;
use std::ffi::c_void;
use std::marker::PhantomData;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicI32, Ordering};

use mlcc_abi::{Ctx, Entries, Sequence, StepFn, status};

use crate::buffer::Buffer;
use crate::device::{BatchMember, Device, DeviceSession, missing};
use crate::pool::{Barrier, Kind, Pieces, Pool};
use crate::session::Step;
use crate::state_block::StateBlock;
use crate::table::{State, Variant};
use crate::trace::{StepTimes, Trace};
use crate::{Error, Model, Result, Workers};

/// The code for this CPU and the workers that run it.
pub(crate) struct CpuDevice {
    name: String,
    entries: Entries,
    workers: Workers,
    /// Workers that the memory plan knows of.
    most_workers: usize,
}

impl CpuDevice {
    /// `variant` is of a loaded library, which outlives the device.
    pub fn new(variant: &Variant, workers: Workers, most_workers: usize) -> Self {
        Self { name: variant.name.clone(), entries: variant.entries, workers, most_workers }
    }

    pub fn workers(&self) -> &Workers {
        &self.workers
    }

    pub fn pool(&self) -> &Pool {
        &self.workers.0
    }

    pub fn entry(&self, step: Step) -> Option<StepFn> {
        match step {
            Step::Prefill => self.entries.prefill,
            Step::Decode => self.entries.decode,
            Step::PrefillLogits => self.entries.prefill_logits,
            Step::DecodeBatch => self.entries.decode_batch,
            Step::Rows => self.entries.step,
            Step::Create => self.entries.create_kv_cache,
            Step::Reset => self.entries.reset_kv_cache,
            Step::Softmax => self.entries.softmax_with_temperature,
        }
    }

    /// Runs a step by all workers; sets the barrier, the pieces and the trace of `ctx`.
    ///
    /// # Safety
    /// `function` is the entry point of `step` in the variant of `model` that fits this CPU, and `ctx` fulfils its contract.
    pub unsafe fn run(
        &self,
        model: &Model,
        step: Step,
        function: StepFn,
        ctx: &mut Ctx,
        trace: Option<&mut Trace>,
    ) -> Result<()> {
        let entry = step.name();
        let pool = self.pool();
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
        let (most, kind) = (self.most_workers, Kind { model: model.number(), step: entry, tokens });
        match trace {
            None if step.feeds() => pool.step(kind, most, &call)?,
            None => pool.help_first(most, &call)?,
            // Profiles are of all workers.
            Some(_) => pool.run_first(most, &call)?,
        }
        match failed.into_inner() {
            status::OK => {
                if matches!(step, Step::Decode | Step::DecodeBatch | Step::Rows)
                    && let Some(mover) = model.mover()
                    && mover.is_due()
                {
                    pool.help(&|worker, _| {
                        mover.advance(model.homes().map_or(0, |homes| homes.of_worker(worker)));
                    })?;
                }
                Ok(())
            }
            status => Err(Error::Step { entry, status }),
        }
    }
}

impl Device for CpuDevice {
    fn name(&self) -> &str {
        &self.name
    }

    fn session(self: Arc<Self>, model: &Model) -> Result<Box<dyn DeviceSession>> {
        Ok(Box::new(CpuSession::new(self, model)?))
    }

    fn cpu(&self) -> Option<&CpuDevice> {
        Some(self)
    }

    fn threads(&self) -> usize {
        self.pool().workers().min(self.most_workers)
    }

    fn fix_workers(&self, workers: Option<usize>) {
        self.pool().fix_workers(workers);
    }
}

/// Memory of one sequence on the CPU.
struct CpuSession {
    device: Arc<CpuDevice>,
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

/// What differs from call to call.
struct Call<'a> {
    step: Step,
    tokens: &'a [i32],
    n: usize,
    past: u64,
    temperature: f32,
}

impl CpuSession {
    fn new(device: Arc<CpuDevice>, model: &Model) -> Result<Self> {
        let plan = model.plan();
        let align = plan.alignment.max(mlcc_abi::BUFFER_ALIGN as u64);
        Ok(Self {
            device,
            arena: Buffer::zeroed("the arena", plan.arena_bytes, align)?,
            state: StateBlock::new(plan.state_bytes, &model.table().states)?,
            tokens: Buffer::integers("the tokens of a chunk", plan.chunk.max(1))?,
            logits: Buffer::floats("the logits", plan.vocab)?,
            chunk_logits: None,
            probs: None,
            trace: None,
        })
    }

    fn call(&mut self, model: &Model, call: &Call<'_>) -> Result<()> {
        let step = self.device.entry(call.step).ok_or_else(|| missing(model, call.step))?;
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
            b: 1,
            wanted: std::ptr::null(),
            n_wanted: 0,
        };
        // SAFETY: the buffers have the sizes and alignment of the plan, the tokens are in range.
        unsafe { self.device.run(model, call.step, step, &mut ctx, self.trace.as_deref_mut()) }
    }
}

impl DeviceSession for CpuSession {
    fn has(&self, step: Step) -> bool {
        self.device.entry(step).is_some()
    }

    fn reserve(&mut self, model: &Model, rows: u64) -> Result<()> {
        self.state.grow(rows, self.device.pool(), model.joins_pages())
    }

    fn feed(&mut self, model: &Model, step: Step, tokens: &[i32], past: u64) -> Result<()> {
        if step == Step::PrefillLogits && self.chunk_logits.is_none() {
            let floats = model.plan().chunk.saturating_mul(model.plan().vocab);
            self.chunk_logits = Some(Buffer::floats("the logits of a chunk", floats)?);
        }
        self.state.grow(past + tokens.len() as u64, self.device.pool(), model.joins_pages())?;
        self.call(model, &Call { step, tokens, n: tokens.len(), past, temperature: 1.0 })?;
        if model.joins_pages() {
            // A little after a token, whatever there is after a chunk.
            self.state.join_pages(if step == Step::Decode { 1 } else { usize::MAX }, self.device.pool())?;
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

    fn join_batch(&mut self, model: &Model, past: u64, tokens: u64) -> Result<BatchMember<'_>> {
        self.state.grow(past + tokens, self.device.pool(), model.joins_pages())?;
        // The batch knows what comes before.
        let (state, past, first, rows) = (self.state.as_mut_ptr(), past as i64, 0, tokens as i64);
        let sequence = Sequence { state, past, first, rows };
        Ok(BatchMember { sequence, arena: self.arena.as_mut_ptr(), session: PhantomData })
    }

    fn leave_batch(&mut self, model: &Model, tokens: usize, logits: Option<&[f32]>) -> Result<()> {
        if let Some(logits) = logits {
            self.logits.floats_mut().copy_from_slice(logits);
        }
        if model.joins_pages() {
            self.state.join_pages(if tokens == 1 { 1 } else { usize::MAX }, self.device.pool())?;
        }
        Ok(())
    }

    fn softmax(&mut self, model: &Model, temperature: f32) -> Result<&[f32]> {
        if self.probs.is_none() {
            self.probs = Some(Buffer::floats("the probabilities", model.plan().vocab)?);
        }
        self.call(model, &Call { step: Step::Softmax, tokens: &[], n: 1, past: 0, temperature })?;
        Ok(self.probs.as_ref().map_or(&[], Buffer::as_floats))
    }

    fn initialise(&mut self, model: &Model, step: Step) -> Result<()> {
        if self.has(step) {
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

    fn logits(&self) -> &[f32] {
        self.logits.as_floats()
    }

    fn chunk_logits(&self, n: usize) -> &[f32] {
        self.chunk_logits.as_ref().map_or(&[], |all| &all.as_floats()[..n * self.logits.len() / 4])
    }

    fn arena(&self) -> Result<Cow<'_, [u8]>> {
        Ok(self.arena.bytes().into())
    }

    fn state(&self, range: Range<u64>) -> Result<Cow<'_, [u8]>> {
        Ok(self.state.bytes(range).into())
    }

    fn set_state(&mut self, model: &Model, rows: u64, pieces: &[(Range<u64>, &[u8])]) -> Result<()> {
        self.reserve(model, rows)?;
        for (range, bytes) in pieces {
            self.state.bytes_mut(range.clone()).copy_from_slice(bytes);
        }
        Ok(())
    }

    fn drop_rows(
        &mut self,
        model: &Model,
        count: u64,
        moved: Range<u64>,
        counter: &State,
        dropped: i32,
    ) -> Result<()> {
        for (state, cache) in model.table().states.iter().filter_map(|s| Some((s, s.cache?))) {
            let rows = self.state.bytes_mut(state.live(count + moved.end));
            let byte = |row: u64| (row * cache.row_bytes) as usize;
            rows.copy_within(byte(moved.start + count).., byte(moved.start));
        }
        self.write_word(counter, dropped)
    }

    fn write_word(&mut self, state: &State, value: i32) -> Result<()> {
        self.state.bytes_mut(state.live(0)).copy_from_slice(&value.to_le_bytes());
        Ok(())
    }

    fn shrink(&mut self, rows: u64) {
        self.state.shrink(rows);
    }

    fn twin(&self, model: &Model, rows: u64) -> Result<Box<dyn DeviceSession>> {
        let mut twin = Self::new(Arc::clone(&self.device), model)?;
        twin.reserve(model, rows)?;
        for range in model.table().states.iter().map(|s| s.live(rows)) {
            twin.state.bytes_mut(range.clone()).copy_from_slice(self.state.bytes(range));
        }
        twin.logits.bytes_mut().copy_from_slice(self.logits.bytes());
        Ok(Box::new(twin))
    }

    fn allocated(&self) -> (u64, u64) {
        let results = [Some(&self.logits), self.chunk_logits.as_ref(), self.probs.as_ref()];
        let results: usize = results.into_iter().flatten().map(Buffer::len).sum();
        (self.state.allocated(), (self.arena.len() + results) as u64)
    }

    fn trace(&mut self, on: bool) -> Vec<StepTimes> {
        let taken = self.trace.take().map_or(Vec::new(), |trace| trace.times());
        self.trace = on.then(|| Box::new(Trace::new(self.device.pool().workers())));
        taken
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
