//! Execution of steps by the worker pool.

mod ranks;

use std::borrow::Cow;
use std::ffi::c_void;
use std::marker::PhantomData;
use std::ops::Range;
use std::sync::atomic::{AtomicI32, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use mlcc_abi::{Ctx, Entries, Sequence, StepFn, status};

use crate::arena::Arenas;
use crate::buffer::Buffer;
use crate::device::{BatchCall, BatchMember, Device, DeviceSession, missing};
use crate::host_pages::HostPages;
use crate::page_pool::{PageCounts, PagePool};
use crate::page_table::PageTable;
use crate::pool::{Barrier, Kind, Pieces, Pool};
use crate::session::Step;
use crate::table::{State, Table, Variant};
use crate::trace::{StepTimes, Trace};
use ranks::Ranks;

use crate::{CachePages, Error, HugePages, LoadOptions, Model, Result, Workers};

/// The code for this CPU and the workers that run it.
pub(crate) struct CpuDevice {
    name: String,
    entries: Entries,
    workers: Workers,
    /// Workers that the memory plan knows of.
    most_workers: usize,
    arenas: Arenas,
    /// Of the caches of all sequences, if the model has any.
    pages: Option<Arc<PagePool<HostPages>>>,
    /// Of a model that is split.
    ranks: Option<Ranks>,
}

impl CpuDevice {
    /// `variant` is one of `table`, of a loaded library, which outlives the device.
    pub fn new(
        table: &Table,
        variant: &Variant,
        workers: Workers,
        most_workers: usize,
        options: &LoadOptions,
    ) -> Result<Self> {
        let plan = &table.plan;
        let align = plan.alignment.max(mlcc_abi::BUFFER_ALIGN as u64);
        let arenas = Arenas::new(plan.scratch_bytes(), align)?;
        let huge = options.huge_pages != HugePages::Off;
        let pages = PageCounts::of(plan, options.cache_pages)
            .map(|counts| HostPages::pool(plan.page_bytes, counts, huge).map(Arc::new))
            .transpose()?;
        let (name, entries) = (variant.name.clone(), variant.entries);
        let ranks = Ranks::new(plan, &workers, most_workers)?;
        Ok(Self { name, entries, workers, most_workers, arenas, pages, ranks })
    }

    /// The scratch memory as the last step has left it.
    fn scratch(&self) -> Result<Vec<u8>> {
        if self.pool().workers() == 1 {
            return Ok(self.arenas.last());
        }
        let copy = Mutex::new(Vec::new());
        self.pool().run(&|worker| {
            if worker == 0 {
                // SAFETY: nothing else runs on the pool meanwhile, and the other workers of this run do nothing.
                let bytes = unsafe { self.arenas.shared() };
                *copy.lock().unwrap_or_else(PoisonError::into_inner) = bytes;
            }
        })?;
        Ok(copy.into_inner().unwrap_or_else(PoisonError::into_inner))
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

    /// Runs a step of several sequences.
    ///
    /// # Safety
    ///
    /// As [`CpuDevice::run`]; what the sequences point to is alive and used by nobody else, tokens and wanted rows lie in a
    /// [`Buffer`] (code relies on its alignment), and the logits have room for the wanted rows.
    pub unsafe fn run_batch(
        &self,
        model: &Model,
        step: Step,
        call: &BatchCall<'_>,
        logits: &mut Buffer,
        trace: Option<&mut Trace>,
    ) -> Result<()> {
        let entry = self.entry(step).ok_or_else(|| missing(model, step))?;
        let mut ctx = Ctx {
            weights: model.weights().as_ptr(),
            arena: std::ptr::null_mut(),
            state: std::ptr::null_mut(),
            tokens: call.tokens.as_ptr(),
            n: call.tokens.len() as i64,
            past: 0,
            logits: logits.as_mut_ptr().cast(),
            probs: std::ptr::null_mut(),
            barrier: None,
            barrier_self: std::ptr::null_mut(),
            temperature: 1.0,
            reserved0: 0,
            trace: None,
            trace_self: std::ptr::null_mut(),
            sequences: call.sequences.as_ptr(),
            take: None,
            take_self: std::ptr::null_mut(),
            b: call.sequences.len() as i64,
            wanted: call.wanted.as_ptr(),
            n_wanted: call.n_wanted as i64,
            pages: std::ptr::null_mut(),
            page_table: std::ptr::null(),
            exchange: None,
            exchange_self: std::ptr::null_mut(),
        };
        // SAFETY: by contract.
        unsafe { self.run(model, step, entry, &mut ctx, trace) }?;
        self.give_ahead(model, call);
        Ok(())
    }

    /// Sequences that go on together begin pages together: those get their memory little by little, at the ends of the steps before.
    fn give_ahead(&self, model: &Model, call: &BatchCall<'_>) {
        let Some(pages) = &self.pages else { return };
        let most = model.plan().pages();
        let used = |s: &Sequence| ((s.past + s.rows) as u64).div_ceil(mlcc_abi::PAGE_ROWS);
        let growing = call.sequences.iter().filter(|s| used(s) < most).count();
        pages.give_ahead(call.tokens.len() as u64, growing);
    }

    /// After a step: once there were enough of them, each worker moves a piece of the weights into huge pages.
    fn move_weights(&self, model: &Model, step: Step) -> Result<()> {
        if matches!(step, Step::Decode | Step::DecodeBatch | Step::Rows)
            && let Some(mover) = model.mover()
            && mover.is_due()
        {
            self.pool().help(&|worker, _| {
                mover.advance(model.homes().map_or(0, |homes| homes.of_worker(worker)));
            })?;
        }
        Ok(())
    }

    /// Runs a step by all workers; sets the arena, the pages, the barrier, the pieces and the trace of `ctx`.
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
        let mut arena = self.arenas.take(pool.workers())?;
        ctx.arena = arena.as_mut_ptr();
        ctx.pages = self.pages.as_ref().map_or(std::ptr::null_mut(), |pages| pages.memory().base());
        if let Some(ranks) = &self.ranks {
            let trace: Option<&Trace> = trace.map(|t| t.begin(entry));
            // SAFETY: by contract.
            let result = unsafe { self.run_ranks(ranks, model, step, function, ctx, trace) };
            self.arenas.give_back(arena);
            return result.and_then(|()| self.move_weights(model, step));
        }
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
        let done = match trace {
            None if step.feeds() => pool.step(kind, most, &call),
            None => pool.help_first(most, &call),
            // Profiles are of all workers.
            Some(_) => pool.run_first(most, &call),
        };
        self.arenas.give_back(arena);
        done?;
        match failed.into_inner() {
            status::OK => self.move_weights(model, step),
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

    fn has_batch(&self, step: Step) -> bool {
        self.entry(step).is_some()
    }

    fn cache_pages(&self) -> CachePages {
        self.pages.as_ref().map_or(CachePages::default(), |pages| pages.pages())
    }

    fn threads(&self) -> usize {
        let all = self.pool().workers().min(self.most_workers);
        self.ranks.as_ref().map_or(all, Ranks::workers)
    }

    fn fix_workers(&self, workers: Option<usize>) {
        self.pool().fix_workers(workers);
    }
}

/// Memory of one sequence on the CPU.
struct CpuSession {
    device: Arc<CpuDevice>,
    /// All states that are no caches, of all ranks.
    state: Buffer,
    ranks: usize,
    /// Bytes of those of one rank.
    rank_state: usize,
    /// Of the rows of its caches.
    pages: Option<PageTable<HostPages>>,
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
            state: Buffer::zeroed("the state", plan.state_bytes.saturating_mul(plan.ranks), align)?,
            ranks: plan.ranks as usize,
            rank_state: plan.state_bytes as usize,
            pages: device.pages.as_ref().map(PageTable::new),
            tokens: Buffer::integers("the tokens of a chunk", plan.chunk.max(1))?,
            logits: Buffer::floats("the logits", plan.vocab)?,
            chunk_logits: None,
            probs: None,
            trace: None,
            device,
        })
    }

    /// The bytes of a state that is no cache.
    fn word(&mut self, state: &State) -> &mut [u8] {
        &mut self.state.bytes_mut()[bytes_of(state)]
    }

    fn page_table(&self) -> *const i32 {
        self.pages.as_ref().map_or(std::ptr::null(), |table| table.pages().as_ptr())
    }

    /// Gives memory to `n` rows after `past`, which nobody else has.
    fn own(&mut self, model: &Model, past: u64, n: u64) -> Result<()> {
        match &mut self.pages {
            Some(pages) => pages.own(&model.table().states, past..past + n, past),
            None => Ok(()),
        }
    }

    fn call(&mut self, model: &Model, call: &Call<'_>) -> Result<()> {
        let step = self.device.entry(call.step).ok_or_else(|| missing(model, call.step))?;
        let logits = match (&mut self.chunk_logits, call.step) {
            (Some(all), Step::PrefillLogits) => all.as_mut_ptr(),
            _ => self.logits.as_mut_ptr(),
        };
        let mut ctx = Ctx {
            weights: model.weights().as_ptr(),
            arena: std::ptr::null_mut(),
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
            pages: std::ptr::null_mut(),
            page_table: self.page_table(),
            exchange: None,
            exchange_self: std::ptr::null_mut(),
        };
        // SAFETY: the buffers have the sizes and alignment of the plan, the tokens are in range.
        unsafe { self.device.run(model, call.step, step, &mut ctx, self.trace.as_deref_mut()) }
    }
}

impl DeviceSession for CpuSession {
    fn has(&self, step: Step) -> bool {
        self.device.entry(step).is_some()
    }

    fn reserve(&mut self, model: &Model, past: u64, n: u64) -> Result<()> {
        self.own(model, past, n)
    }

    fn missing_pages(&self, past: u64, n: u64) -> usize {
        self.pages.as_ref().map_or(0, |pages| pages.missing(past..past + n, past))
    }

    fn feed(&mut self, model: &Model, step: Step, tokens: &[i32], past: u64) -> Result<()> {
        if step == Step::PrefillLogits && self.chunk_logits.is_none() {
            let floats = model.plan().chunk.saturating_mul(model.plan().vocab);
            self.chunk_logits = Some(Buffer::floats("the logits of a chunk", floats)?);
        }
        self.own(model, past, tokens.len() as u64)?;
        self.call(model, &Call { step, tokens, n: tokens.len(), past, temperature: 1.0 })?;
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
        self.own(model, past, tokens)?;
        let page_table = self.page_table();
        // The batch knows what comes before.
        let (state, past, first, rows) = (self.state.as_mut_ptr(), past as i64, 0, tokens as i64);
        let sequence = Sequence { state, page_table, past, first, rows };
        Ok(BatchMember { sequence, session: PhantomData })
    }

    fn leave_batch(&mut self, _: &Model, logits: Option<&[f32]>) -> Result<()> {
        if let Some(logits) = logits {
            self.logits.floats_mut().copy_from_slice(logits);
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
            let bytes = self.word(piece);
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

    fn swap_logits(&mut self, fresh: Buffer) -> Buffer {
        std::mem::replace(&mut self.logits, fresh)
    }

    fn chunk_logits(&self, n: usize) -> &[f32] {
        self.chunk_logits.as_ref().map_or(&[], |all| &all.as_floats()[..n * self.logits.len() / 4])
    }

    fn arena(&self) -> Result<Cow<'_, [u8]>> {
        Ok(self.device.scratch()?.into())
    }

    fn state(&self, state: &State, rows: u64) -> Result<Cow<'_, [u8]>> {
        Ok(match (state.cache, &self.pages) {
            (Some(cache), Some(pages)) => pages.read(state, cache, rows.min(cache.rows))?.into(),
            _ => self.state.bytes()[bytes_of(state)].into(),
        })
    }

    fn set_state(&mut self, model: &Model, rows: u64, states: &[(&State, &[u8])]) -> Result<()> {
        let mut pages = self.device.pages.as_ref().map(PageTable::new);
        if let Some(pages) = &mut pages {
            pages.own(&model.table().states, 0..rows, 0)?;
        }
        for (state, bytes) in states {
            match (state.cache, &pages) {
                (Some(cache), Some(pages)) => pages.write(state, cache, bytes)?,
                _ => self.word(state).copy_from_slice(bytes),
            }
        }
        self.pages = pages;
        Ok(())
    }

    fn page_rows(&self) -> Option<u64> {
        self.pages.as_ref().map(|_| mlcc_abi::PAGE_ROWS)
    }

    fn drop_pages(&mut self, pages: Range<u64>, counter: &State, dropped: i32) -> Result<()> {
        if let Some(table) = &mut self.pages {
            table.drop_pages(pages);
        }
        self.write_word(counter, dropped)
    }

    fn drop_rows(
        &mut self,
        model: &Model,
        count: u64,
        moved: Range<u64>,
        counter: &State,
        dropped: i32,
    ) -> Result<()> {
        if let Some(pages) = &mut self.pages {
            pages.drop_rows(&model.table().states, count, moved)?;
        }
        self.write_word(counter, dropped)
    }

    fn write_word(&mut self, state: &State, value: i32) -> Result<()> {
        let place = bytes_of(state);
        for rank in 0..self.ranks {
            let at = rank * self.rank_state;
            self.state.bytes_mut()[at + place.start..at + place.end].copy_from_slice(&value.to_le_bytes());
        }
        Ok(())
    }

    fn shrink(&mut self, rows: u64) {
        if let Some(pages) = &mut self.pages {
            pages.truncate(rows);
        }
    }

    fn twin(&self, model: &Model, rows: u64) -> Result<Box<dyn DeviceSession>> {
        let mut twin = Self::new(Arc::clone(&self.device), model)?;
        twin.pages = self.pages.as_ref().map(|pages| pages.fork(rows));
        twin.state.bytes_mut().copy_from_slice(self.state.bytes());
        twin.logits.bytes_mut().copy_from_slice(self.logits.bytes());
        Ok(Box::new(twin))
    }

    fn allocated(&self) -> (u64, u64) {
        let results = [Some(&self.logits), self.chunk_logits.as_ref(), self.probs.as_ref()];
        let results: usize = results.into_iter().flatten().map(Buffer::len).sum();
        let pages = self.pages.as_ref().map_or(0, PageTable::bytes);
        (self.state.len() as u64 + pages, results as u64)
    }

    fn trace(&mut self, on: bool) -> Vec<StepTimes> {
        let taken = self.trace.take().map_or(Vec::new(), |trace| trace.times());
        self.trace = on.then(|| Box::new(Trace::new(self.device.pool().workers())));
        taken
    }
}

/// Where a state lies that is no cache.
fn bytes_of(state: &State) -> Range<usize> {
    state.offset as usize..(state.offset + state.bytes) as usize
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
