//! Steps of a model that is split: equal groups of the workers of one pool run it, each as one rank with
//! memory of its own.
//!
//! A session has the states of all ranks in order, and pages have the rows of all. Tokens and tables of pages
//! are the same for all. Rank 0 writes the results; the others have the same ones and keep them in scratch.

use std::sync::atomic::{AtomicI32, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use mlcc_abi::{Ctx, EntryPoint, Sequence, StepFn, status};

use super::{CpuDevice, SharedContext, record_item, take_chunk, wait_at_barrier};
use crate::pool::{Barrier, ChunkScheduler};
use crate::ranks::{Communicator, MOST_RANKS, RankLink, ThreadCommunicator, all_gather_callback};
use crate::table::ModelPlan;
use crate::trace::StepTrace;
use crate::{Error, Model, Result, WorkerThreads};

/// Workers by rank, and how far what belongs to a rank lies from that of the one before.
pub(super) struct CpuRanks {
    groups: Vec<RankGroup>,
    /// Workers of each.
    workers: usize,
    arena: usize,
    state: usize,
    page: usize,
    /// Results of the other ranks, behind all arenas.
    results: usize,
    /// Room for the sequences of the other ranks.
    scratch: Mutex<SequenceScratch>,
}

/// Is empty between steps.
#[derive(Default)]
struct SequenceScratch(Vec<Sequence>);

// SAFETY: it is empty wherever it is shared, so no pointer of a sequence goes to another thread with it.
unsafe impl Send for SequenceScratch {}

struct RankGroup {
    barrier: Barrier,
    chunks: ChunkScheduler,
    link: RankLink,
}

impl CpuRanks {
    /// `None` for a model that is whole.
    pub fn new(plan: &ModelPlan, workers: &WorkerThreads, most: usize) -> Result<Option<CpuRanks>> {
        let count = plan.ranks as usize;
        if count < 2 {
            return Ok(None);
        }
        let each = (workers.threads() / count).clamp(1, most);
        let spins = workers.0.spins();
        let communicator: Arc<dyn Communicator> = Arc::new(ThreadCommunicator::new(count, spins)?);
        let group = |rank| RankGroup {
            barrier: Barrier::new(each, spins),
            chunks: ChunkScheduler::new(each),
            link: RankLink { communicator: Arc::clone(&communicator), rank },
        };
        Ok(Some(CpuRanks {
            groups: (0..count).map(group).collect(),
            workers: each,
            arena: plan.rank_arena_bytes() as usize,
            state: plan.state_bytes as usize,
            page: (plan.page_bytes / plan.ranks) as usize,
            results: plan.result_bytes() as usize,
            scratch: Mutex::default(),
        }))
    }

    pub fn workers(&self) -> usize {
        self.workers * self.groups.len()
    }

    /// The sequences of a step as the ranks after the first have them, one rank behind the other.
    fn rank_sequences(&self, ctx: &Ctx) -> Vec<Sequence> {
        let mut all = std::mem::take(&mut self.scratch.lock().unwrap_or_else(PoisonError::into_inner).0);
        if ctx.sequences.is_null() {
            return all;
        }
        // SAFETY: by the contract of a step, `b` sequences.
        let own = unsafe { std::slice::from_raw_parts(ctx.sequences, ctx.b as usize) };
        for rank in 1..self.groups.len() {
            let of_rank = |s: &Sequence| Sequence { state: self.rank_state(s.state, rank), ..*s };
            all.extend(own.iter().map(of_rank));
        }
        all
    }

    fn rank_state(&self, state: *mut u8, rank: usize) -> *mut u8 {
        if state.is_null() { state } else { state.wrapping_add(rank * self.state) }
    }

    /// The context of a rank, given that of the first without what belongs to workers.
    fn rank_context(&self, ctx: &Ctx, rank: usize, model: &Model, sequences: &[Sequence]) -> Ctx {
        let group = &self.groups[rank];
        let mut own = Ctx {
            weights: model.rank_weights(rank).as_ptr(),
            arena: ctx.arena.wrapping_add(rank * self.arena),
            state: self.rank_state(ctx.state, rank),
            barrier: Some(wait_at_barrier),
            barrier_self: std::ptr::from_ref(&group.barrier).cast_mut().cast(),
            next_chunk: Some(take_chunk),
            next_chunk_self: std::ptr::from_ref(&group.chunks).cast_mut().cast(),
            all_gather: Some(all_gather_callback),
            all_gather_self: std::ptr::from_ref(&group.link).cast_mut().cast(),
            ..*ctx
        };
        if !own.pages.is_null() {
            own.pages = own.pages.wrapping_add(rank * self.page);
        }
        if rank > 0 {
            let results = self.groups.len() * self.arena + (rank - 1) * self.results;
            own.logits = ctx.arena.wrapping_add(results).cast();
            if !ctx.sequences.is_null() {
                own.sequences = sequences.as_ptr().wrapping_add((rank - 1) * ctx.b as usize);
            }
        }
        own
    }
}

impl CpuDevice {
    /// Runs a step like [`CpuDevice::run`], by all ranks. Softmax is of one: all have the same logits.
    ///
    /// # Safety
    /// As there; `ctx` has arena and pages.
    pub(super) unsafe fn run_ranks(
        &self,
        ranks: &CpuRanks,
        model: &Model,
        step: EntryPoint,
        function: StepFn,
        ctx: &mut Ctx,
        trace: Option<&StepTrace>,
    ) -> Result<()> {
        let count = if step == EntryPoint::Softmax { 1 } else { ranks.groups.len() };
        let mut sequences = ranks.rank_sequences(ctx);
        let mut contexts = [*ctx; MOST_RANKS];
        for (rank, own) in contexts.iter_mut().enumerate().take(count) {
            *own = ranks.rank_context(ctx, rank, model, &sequences);
        }
        // Profiles are of the first.
        contexts[0].trace = trace.map(|_| record_item as mlcc_abi::TraceFn);
        contexts[0].trace_self =
            trace.map_or(std::ptr::null_mut(), |t| std::ptr::from_ref(t).cast_mut().cast());
        let shared = contexts.each_mut().map(|own| SharedContext(own));
        let failed = AtomicI32::new(status::OK);
        let call = |worker: usize, _: usize| {
            let (rank, own) = (worker / ranks.workers, worker % ranks.workers);
            if let (0, Some(trace)) = (rank, trace) {
                trace.start_worker(own);
            }
            // SAFETY: by contract; the workers of a rank make the same call, each rank has a context and
            // memory of its own, and the contexts outlive the run.
            let result = unsafe { function(shared[rank].get(), own as u32, ranks.workers as u32) };
            if result != status::OK {
                failed.store(result, Ordering::Relaxed);
            }
        };
        let done = self.pool().run_first(count * ranks.workers, &call);
        sequences.clear();
        ranks.scratch.lock().unwrap_or_else(PoisonError::into_inner).0 = sequences;
        done?;
        match failed.into_inner() {
            status::OK => Ok(()),
            status => Err(Error::Step { entry: step.name(), status }),
        }
    }
}
