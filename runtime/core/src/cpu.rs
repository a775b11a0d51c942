//! Execution of steps by the worker pool.

mod rank_worker;
mod ranks;
mod session;
mod states;

use std::ffi::c_void;
use std::ops::Range;
use std::sync::atomic::{AtomicI32, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use mlcc_abi::{Ctx, EntryPoint, Sequence, StepFn, status};

use crate::arena::ArenaPool;
use crate::buffer::AlignedBuffer;
use crate::device::{BatchCall, Device, DeviceSession, missing_entry_error};
use crate::host_pages::{HostPageParts, HostPages};
use crate::page_pool::{PageCounts, PagePool};
use crate::pool::{Barrier, ChunkScheduler, StepKind, WorkerPool};
use crate::processes::{ProcessGroup, RankLeader, RankMessageKind as MessageKind, StepGuard};
use crate::ranks::{RankLink, all_gather_callback};
use crate::table::{ArtifactTable, CpuEntries, CpuVariant, ModelPlan};
use crate::trace::StepTrace;
use ranks::CpuRanks;
use session::CpuSession;

use crate::{CachePages, Error, HugePages, LoadOptions, Model, Result, WorkerThreads};

/// The code for this CPU and the workers that run it.
pub(crate) struct CpuDevice {
    name: String,
    entries: CpuEntries,
    workers: WorkerThreads,
    /// Workers that the memory plan knows of.
    max_workers: usize,
    arenas: ArenaPool,
    /// Pages of the caches of all sequences, if the model has any.
    pages: Option<Arc<PagePool<HostPages>>>,
    /// Ranks of a model that is split among groups of workers.
    ranks: Option<CpuRanks>,
    /// The rank of a model that is split among processes.
    process: Option<ProcessRank>,
}

/// One of the processes that a model is split among: its workers are one rank.
struct ProcessRank {
    processes: ProcessGroup,
    link: RankLink,
    /// The leader, on rank 0.
    leader: Option<Arc<RankLeader>>,
    /// The start of its part of a page.
    page_offset: usize,
}

impl ProcessRank {
    fn new(plan: &ModelPlan, processes: &ProcessGroup) -> ProcessRank {
        let rank = processes.rank();
        ProcessRank {
            link: RankLink { communicator: Arc::new(processes.clone()), rank },
            leader: (rank == 0).then(|| Arc::new(RankLeader::new(processes))),
            page_offset: rank * (plan.page_bytes / plan.ranks) as usize,
            processes: processes.clone(),
        }
    }
}

impl CpuDevice {
    /// `variant` is one of `table`, of a loaded library, which outlives the device.
    pub fn new(
        table: &ArtifactTable,
        variant: &CpuVariant,
        workers: WorkerThreads,
        most_workers: usize,
        options: &LoadOptions,
    ) -> Result<Self> {
        let plan = &table.plan;
        let align = plan.alignment.max(mlcc_abi::BUFFER_ALIGN as u64);
        let process = options.processes.as_ref().map(|processes| ProcessRank::new(plan, processes));
        let scratch = if process.is_some() { plan.arena_bytes } else { plan.scratch_bytes() };
        let arenas = ArenaPool::new(scratch, align)?;
        let huge = options.huge_pages != HugePages::Off;
        let parts = process.as_ref().map(|process| HostPageParts {
            page: plan.page_bytes,
            part: plan.page_bytes / plan.ranks,
            leader: process.leader.clone(),
        });
        let pages = PageCounts::from_plan(plan, options.cache_pages)
            .map(|counts| HostPages::pool(plan.page_bytes, counts, huge, parts).map(Arc::new))
            .transpose()?;
        let (name, entries) = (variant.name.clone(), variant.entries.clone());
        let ranks = match process {
            Some(_) => None,
            None => CpuRanks::new(plan, &workers, most_workers)?,
        };
        Ok(Self { name, entries, workers, max_workers: most_workers, arenas, pages, ranks, process })
    }

    /// The leader of the other processes, on the first of several.
    fn leader(&self) -> Option<&Arc<RankLeader>> {
        self.process.as_ref()?.leader.as_ref()
    }

    /// The scratch memory as the last step has left it.
    fn scratch(&self) -> Result<Vec<u8>> {
        if self.pool().workers() == 1 {
            return Ok(self.arenas.last_contents());
        }
        let copy = Mutex::new(Vec::new());
        self.pool().run(&|worker| {
            if worker == 0 {
                // SAFETY: nothing else runs on the pool meanwhile, and the other workers of this run do
                // nothing.
                let bytes = unsafe { self.arenas.shared_contents() };
                *copy.lock().unwrap_or_else(PoisonError::into_inner) = bytes;
            }
        })?;
        Ok(copy.into_inner().unwrap_or_else(PoisonError::into_inner))
    }

    pub fn workers(&self) -> &WorkerThreads {
        &self.workers
    }

    pub fn pool(&self) -> &WorkerPool {
        &self.workers.0
    }

    /// The code of a step; that for sequences with adapters, where some have one.
    pub fn entry_function(&self, step: EntryPoint, adapted: bool) -> Option<StepFn> {
        self.entries.function(step, adapted)
    }

    /// Runs a step of several sequences.
    ///
    /// # Safety
    ///
    /// As [`CpuDevice::run`]; the sequences' memory is alive and has no other user, tokens and output rows
    /// lie in an [`AlignedBuffer`] (code relies on its alignment), and the logits have room for the wanted
    /// rows.
    pub unsafe fn run_batch(
        &self,
        model: &Model,
        step: EntryPoint,
        call: &BatchCall<'_>,
        logits: &mut AlignedBuffer,
        trace: Option<&mut StepTrace>,
    ) -> Result<()> {
        let entry =
            self.entry_function(step, call.adapted).ok_or_else(|| missing_entry_error(model, step))?;
        let mut ctx = Ctx {
            weights: model.weights().as_ptr(),
            tokens: call.tokens.as_ptr(),
            n: call.tokens.len() as i64,
            logits: logits.as_mut_ptr().cast(),
            sequences: call.sequences.as_ptr(),
            b: call.sequences.len() as i64,
            output_rows: call.output_rows.as_ptr(),
            n_outputs: call.n_outputs as i64,
            adapters: model.slots().map_or(std::ptr::null(), |slots| slots.as_ptr()),
            ..Ctx::EMPTY
        };
        // SAFETY: by contract.
        unsafe { self.run(model, step, entry, &mut ctx, trace) }?;
        self.commit_pages_ahead(model, call);
        Ok(())
    }

    /// Sequences that go on together begin pages together: those get their memory little by little, at the
    /// ends of the steps before.
    fn commit_pages_ahead(&self, model: &Model, call: &BatchCall<'_>) {
        let Some(pages) = &self.pages else { return };
        let most = model.plan().pages();
        let used = |s: &Sequence| ((s.past + s.rows) as u64).div_ceil(mlcc_abi::PAGE_ROWS);
        let growing = call.sequences.iter().filter(|s| used(s) < most).count();
        pages.commit_ahead(call.tokens.len() as u64, growing);
    }

    /// True if the model is divided among ranks, whose logits are always made.
    pub fn has_ranks(&self) -> bool {
        self.ranks.is_some() || self.process.is_some()
    }

    /// Announces the step to the others, where ranks are processes, and sets the differing fields of `ctx`.
    ///
    /// # Safety
    /// As [`CpuDevice::run`].
    unsafe fn announce_step(&self, model: &Model, step: EntryPoint, ctx: &mut Ctx) -> Option<StepGuard<'_>> {
        let process = self.process.as_ref()?;
        // SAFETY: by contract.
        let stepping = process.leader.as_ref().and_then(|lead| unsafe { lead.send_step(step, ctx) });
        ctx.weights = model.rank_weights(process.link.rank).as_ptr();
        if !ctx.pages.is_null() {
            ctx.pages = ctx.pages.wrapping_add(process.page_offset);
        }
        ctx.all_gather = Some(all_gather_callback);
        ctx.all_gather_self = std::ptr::from_ref(&process.link).cast_mut().cast();
        stepping
    }

    /// After a step: once there were enough of them, each worker moves a piece of the weights into huge
    /// pages.
    fn move_weights(&self, model: &Model, step: EntryPoint) -> Result<()> {
        if matches!(step, EntryPoint::Decode | EntryPoint::DecodeBatch | EntryPoint::Step)
            && let Some(mover) = model.migrator()
            && mover.count_step()
        {
            self.pool().run_suited(&|worker, _| {
                mover.move_next_piece(model.numa_placer().map_or(0, |homes| homes.worker_node(worker)));
            })?;
        }
        Ok(())
    }

    /// Runs a step by all workers; sets the arena, the pages, the barrier, the pieces and the trace of `ctx`.
    ///
    /// # Safety
    /// `function` is the entry point of `step` in the variant of `model` that fits this CPU, and
    /// `ctx` fulfils its contract.
    pub unsafe fn run(
        &self,
        model: &Model,
        step: EntryPoint,
        function: StepFn,
        ctx: &mut Ctx,
        trace: Option<&mut StepTrace>,
    ) -> Result<()> {
        let entry = step.name();
        let pool = self.pool();
        let mut arena = self.arenas.acquire(pool.workers())?;
        ctx.arena = arena.as_mut_ptr();
        ctx.pages = self.pages.as_ref().map_or(std::ptr::null_mut(), |pages| pages.memory().base());
        // SAFETY: by contract.
        let _together = unsafe { self.announce_step(model, step, ctx) };
        if let Some(ranks) = &self.ranks {
            let trace: Option<&StepTrace> = trace.map(|t| t.start_entry(entry));
            // SAFETY: by contract.
            let result = unsafe { self.run_ranks(ranks, model, step, function, ctx, trace) };
            self.arenas.release(arena);
            return result.and_then(|()| self.move_weights(model, step));
        }
        ctx.barrier = Some(wait_at_barrier);
        ctx.barrier_self = std::ptr::from_ref(pool.barrier()).cast_mut().cast();
        ctx.next_chunk = Some(take_chunk);
        ctx.next_chunk_self = std::ptr::from_ref(pool.chunks()).cast_mut().cast();
        let trace: Option<&StepTrace> = trace.map(|t| t.start_entry(entry));
        ctx.trace = trace.map(|_| record_item as mlcc_abi::TraceFn);
        ctx.trace_self = trace.map_or(std::ptr::null_mut(), |t| std::ptr::from_ref(t).cast_mut().cast());
        let tokens = ctx.n as usize;
        let shared = SharedContext(ctx);
        let failed = AtomicI32::new(status::OK);
        let call = |worker: usize, workers: usize| {
            if let Some(trace) = trace {
                trace.start_worker(worker);
            }
            // SAFETY: by contract; all workers make the same call, and `ctx` outlives the run.
            let result = unsafe { function(shared.get(), worker as u32, workers as u32) };
            if result != status::OK {
                failed.store(result, Ordering::Relaxed);
            }
        };
        let (most, kind) = (self.max_workers, StepKind { model: model.id(), step: entry, tokens });
        let done = match trace {
            None if step.kind().takes_tokens() => pool.run_step(kind, most, &call),
            None => pool.run_suited_first(most, &call),
            // Profiles are of all workers.
            Some(_) => pool.run_first(most, &call),
        };
        self.arenas.release(arena);
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

    fn ready(&self) -> Result<()> {
        let Some(process) = &self.process else { return Ok(()) };
        let own = self.pages.as_ref().map_or(0, |pages| pages.pages().all as u64);
        let what = "pages of the KV cache, of which rank 0 has more";
        process.processes.finish_loading(own, what, process.leader.as_deref())
    }

    fn follow_leader(self: Arc<Self>, model: &Model) -> Result<()> {
        self.receive_steps(model)
    }

    fn session(self: Arc<Self>, model: &Model) -> Result<Box<dyn DeviceSession>> {
        Ok(Box::new(CpuSession::new(self, model)?))
    }

    fn cpu(&self) -> Option<&CpuDevice> {
        Some(self)
    }

    fn has_batch(&self, step: EntryPoint) -> bool {
        self.entry_function(step, false).is_some()
    }

    /// Other processes have slots of their own. They get a piece at a time: what steps have to say may come
    /// between.
    fn write_adapters(&self, bytes: &[u8], changed: &[Range<usize>]) -> Result<()> {
        const PIECE: usize = 1 << 20;
        let Some(lead) = self.leader() else { return Ok(()) };
        for range in changed {
            let all = bytes.get(range.clone()).unwrap_or_default();
            for (at, piece) in (range.start..).step_by(PIECE).zip(all.chunks(PIECE)) {
                lead.send_message(|message| {
                    message.start_message(MessageKind::WriteSlots).push_number(at as u64).push_bytes(piece)
                });
            }
        }
        Ok(())
    }

    fn cache_pages(&self) -> CachePages {
        self.pages.as_ref().map_or(CachePages::default(), |pages| pages.pages())
    }

    fn threads(&self) -> usize {
        let all = self.pool().workers().min(self.max_workers);
        self.ranks.as_ref().map_or(all, CpuRanks::workers)
    }

    fn fix_workers(&self, workers: Option<usize>) {
        self.pool().fix_workers(workers);
    }
}

/// The one pointer that all workers get.
struct SharedContext(*mut Ctx);

impl SharedContext {
    fn get(&self) -> *mut Ctx {
        self.0
    }
}

// SAFETY: the contract of a step: workers only read `ctx`, and write disjoint parts of the buffers between
// barriers.
unsafe impl Sync for SharedContext {}

/// `ctx.barrier`.
unsafe extern "C" fn wait_at_barrier(barrier: *mut c_void, worker: u32) {
    // SAFETY: `barrier_self` is the pool's barrier, which outlives the run.
    let barrier = unsafe { &*barrier.cast::<Barrier>() };
    barrier.wait(worker as usize);
}

/// `ctx.next_chunk`.
unsafe extern "C" fn take_chunk(pieces: *mut c_void, worker: u32, each: u32) -> u32 {
    // SAFETY: `next_chunk_self` is the pool's dealer of pieces, which outlives the run.
    let pieces = unsafe { &*pieces.cast::<ChunkScheduler>() };
    pieces.take_chunk(worker as usize, each).unwrap_or(mlcc_abi::NO_CHUNK)
}

/// `ctx.trace`.
unsafe extern "C" fn record_item(trace: *mut c_void, worker: u32, item: u32) {
    // SAFETY: `trace_self` is the session's trace, which outlives the run.
    let trace = unsafe { &*trace.cast::<StepTrace>() };
    trace.record_item(worker as usize, item as usize);
}
