//! A step by several workers that run apart from each other as far as its barriers allow: between two
//! barriers one worker does all its work before the next one begins. Where a barrier is missing, a worker
//! reads what another one has not written yet, or no longer, and the results differ from those of
//! [`super::run_step`].

use super::ranks::{RankCall, RankRef, all_gather};
use super::{
    BatchSequence, LaunchRun, StepMemory, StepRunError, find_kernel, is_for_one, on_buffers, with_state,
};
use crate::kernel::{ExecutionOrder, KernelProgram};
use mlcc_ir::dim::SymValues;
use mlcc_ir::kernel::Kernel;
use mlcc_ir::step::{LaunchItem, RepeatMode, StepItem, StepProgram, WorkShare};
use std::collections::BTreeMap;

/// The workers that get the pieces of launches with dynamic shares.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum ChunkOwnership {
    /// Everybody those of its own share.
    Owners,
    /// This one all of them.
    One(usize),
    /// Piece `i` goes to worker `i` modulo their number.
    RoundRobin,
}

/// The schedule of all workers.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct WorkerSchedule {
    pub workers: usize,
    /// Order of the workers between two barriers.
    pub order: ExecutionOrder,
    pub ownership: ChunkOwnership,
}

impl WorkerSchedule {
    /// Schedules that differ as much as they can, for `workers` workers.
    pub fn all_variants(workers: usize) -> Vec<WorkerSchedule> {
        let takers = [
            ChunkOwnership::Owners,
            ChunkOwnership::One(0),
            ChunkOwnership::One(workers.saturating_sub(1)),
            ChunkOwnership::RoundRobin,
        ];
        let with = |order| takers.map(|takers| WorkerSchedule { workers, order, ownership: takers });
        [ExecutionOrder::Forward, ExecutionOrder::Reverse].into_iter().flat_map(with).collect()
    }

    /// The shares of `worker` in a launch, or in one for each sequence, in a turn of it.
    fn worker_shares(&self, launch: &LaunchItem, turn: &LaunchRun, worker: usize) -> Vec<WorkShare> {
        let shares = self.shares_of_all(launch, turn, worker);
        let [at, work, total] = turn.line;
        match launch.repeat {
            RepeatMode::EachWorker => vec![WorkShare::WHOLE],
            RepeatMode::Once | RepeatMode::Outputs => shares,
            RepeatMode::EachSequence { .. } => {
                shares.into_iter().filter_map(|share| share.of_sequence(at, work, total)).collect()
            }
        }
    }

    /// The shares of `worker` in a launch as a whole.
    fn shares_of_all(&self, launch: &LaunchItem, turn: &LaunchRun, worker: usize) -> Vec<WorkShare> {
        let Some(pieces) = launch.schedule.chunks(self.workers, &turn.sizes) else {
            return vec![WorkShare::equal_part(worker, self.workers)];
        };
        let mine = |piece: &usize| match self.ownership {
            ChunkOwnership::Owners => piece / pieces.chunk_count() == worker,
            ChunkOwnership::One(taker) => taker == worker,
            ChunkOwnership::RoundRobin => piece % self.workers == worker,
        };
        let all = 0..self.workers * pieces.chunk_count();
        let part = |piece| pieces.chunk_part(piece, self.workers);
        all.filter(mine).map(part).map(|(part, of)| WorkShare::equal_part(part, of)).collect()
    }
}

/// Runs a step like [`super::run_step`], with the workers in sequence between barriers. Every worker has its
/// own copy of values that all compute for themselves.
pub fn run_interleaved(
    step: &StepProgram,
    kernels: &[Kernel],
    memory: &mut StepMemory,
    sizes: &SymValues,
    schedule: &WorkerSchedule,
) -> Result<(), StepRunError> {
    let rank = &mut [RankRef { memory, sequences: &mut [] }];
    run_phases(step, kernels, rank, RankCall::One(*sizes), schedule)
}

/// Runs a batch like [`super::run_batch`], with the workers in sequence between barriers.
pub fn run_batch_interleaved(
    step: &StepProgram,
    kernels: &[Kernel],
    memory: &mut StepMemory,
    sequences: &mut [BatchSequence],
    wanted: usize,
    schedule: &WorkerSchedule,
) -> Result<(), StepRunError> {
    run_phases(step, kernels, &mut [RankRef { memory, sequences }], RankCall::Batch { wanted }, schedule)
}

/// The ranks are in lockstep from item to item: between two all-gathers none sees the work of another.
pub(super) fn run_phases(
    step: &StepProgram,
    kernels: &[Kernel],
    ranks: &mut [RankRef<'_>],
    call: RankCall,
    schedule: &WorkerSchedule,
) -> Result<(), StepRunError> {
    let mut programs: BTreeMap<&str, KernelProgram> = BTreeMap::new();
    let mut workers: Vec<usize> = (0..schedule.workers).collect();
    schedule.order.apply(&mut workers);
    for launch in step.items.iter().filter_map(StepItem::launch) {
        if matches!(call, RankCall::One(_)) && !is_for_one(launch) {
            return Err(StepRunError::NoBatch(launch.kernel.clone()));
        }
        let kernel = find_kernel(kernels, launch)?;
        if !programs.contains_key(launch.kernel.as_str()) {
            programs.insert(&launch.kernel, KernelProgram::new(kernel)?);
        }
    }
    for phase in step.items.split(|item| matches!(item, StepItem::Barrier)) {
        for (&worker, item) in workers.iter().flat_map(|w| phase.iter().map(move |item| (w, item))) {
            match item {
                StepItem::Barrier => {}
                StepItem::AllGather(exchange) if worker == 0 => all_gather(exchange, ranks, call)?,
                StepItem::AllGather(_) => {}
                StepItem::Launch(launch) => {
                    let kernel = find_kernel(kernels, launch)?;
                    let Some(program) = programs.get(launch.kernel.as_str()) else { continue };
                    for rank in ranks.iter_mut() {
                        run_shares(launch, (kernel, program), rank, call, schedule, worker)?;
                    }
                }
            }
        }
    }
    ranks.iter_mut().for_each(RankRef::advance);
    Ok(())
}

/// Runs a worker's shares of a launch.
fn run_shares(
    launch: &LaunchItem,
    (kernel, program): (&Kernel, &KernelProgram),
    rank: &mut RankRef<'_>,
    call: RankCall,
    schedule: &WorkerSchedule,
    worker: usize,
) -> Result<(), StepRunError> {
    for turn in call.launch_runs(launch, rank.sequences) {
        let (sizes, at) = (&turn.sizes, turn.position(worker));
        for share in schedule.worker_shares(launch, &turn, worker) {
            with_state(rank.memory, rank.sequences, &turn, |memory| {
                on_buffers(launch, kernel, memory, sizes, at, |buffers, sizes| {
                    program.run_share(buffers, sizes, share)
                })
            })?;
        }
    }
    Ok(())
}
