//! A step by several workers that run apart from each other as far as its barriers allow: between two barriers one worker does
//! all its work before the next one begins. Where a barrier is missing, a worker reads what another one has not written
//! yet, or no longer, and the results differ from those of [`super::run_step`].

use super::ranks::{Call, RankRef, join};
use super::{Memory, Sequence, StepError, Turn, find, is_for_one, on_buffers, with_state};
use crate::kernel::{Order, Program};
use mlcc_ir::dim::SymValues;
use mlcc_ir::kernel::Kernel;
use mlcc_ir::step::{Launch, Repeat, Share, Step, StepItem};
use std::collections::BTreeMap;

/// Which worker gets the pieces of launches with dynamic shares.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Takers {
    /// Everybody those of its own share.
    Owners,
    /// This one all of them.
    One(usize),
    /// Piece `i` goes to worker `i` modulo their number.
    InTurns,
}

/// Who does what, and when.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Schedule {
    pub workers: usize,
    /// Of the workers, between two barriers.
    pub order: Order,
    pub takers: Takers,
}

impl Schedule {
    /// Schedules that differ as much as they can, for so many workers.
    pub fn all(workers: usize) -> Vec<Schedule> {
        let takers =
            [Takers::Owners, Takers::One(0), Takers::One(workers.saturating_sub(1)), Takers::InTurns];
        let with = |order| takers.map(|takers| Schedule { workers, order, takers });
        [Order::Forward, Order::Reverse].into_iter().flat_map(with).collect()
    }

    /// What `worker` computes of a launch, or of one for each sequence, in a turn of it.
    fn shares(&self, launch: &Launch, turn: &Turn, worker: usize) -> Vec<Share> {
        let shares = self.shares_of_all(launch, turn, worker);
        let [at, work, total] = turn.line;
        match launch.repeat {
            Repeat::EachWorker => vec![Share::WHOLE],
            Repeat::Once | Repeat::Wanted => shares,
            Repeat::EachSequence { .. } => {
                shares.into_iter().filter_map(|share| share.of_sequence(at, work, total)).collect()
            }
        }
    }

    /// The same of a launch as a whole.
    fn shares_of_all(&self, launch: &Launch, turn: &Turn, worker: usize) -> Vec<Share> {
        let Some(pieces) = launch.shares.pieces(self.workers, &turn.sizes) else {
            return vec![Share::part(worker, self.workers)];
        };
        let mine = |piece: &usize| match self.takers {
            Takers::Owners => piece / pieces.count() == worker,
            Takers::One(taker) => taker == worker,
            Takers::InTurns => piece % self.workers == worker,
        };
        let all = 0..self.workers * pieces.count();
        let part = |piece| pieces.part(piece, self.workers);
        all.filter(mine).map(part).map(|(part, of)| Share::part(part, of)).collect()
    }
}

/// As [`super::run_step`], with the workers one after the other between barriers. Every worker has its own copy of what
/// all compute for themselves.
pub fn run_interleaved(
    step: &Step,
    kernels: &[Kernel],
    memory: &mut Memory,
    sizes: &SymValues,
    schedule: &Schedule,
) -> Result<(), StepError> {
    let rank = &mut [RankRef { memory, sequences: &mut [] }];
    phases(step, kernels, rank, Call::One(*sizes), schedule)
}

/// As [`super::run_batch`], with the workers one after the other between barriers.
pub fn run_batch_interleaved(
    step: &Step,
    kernels: &[Kernel],
    memory: &mut Memory,
    sequences: &mut [Sequence],
    wanted: usize,
    schedule: &Schedule,
) -> Result<(), StepError> {
    phases(step, kernels, &mut [RankRef { memory, sequences }], Call::Batch { wanted }, schedule)
}

/// The ranks are in lockstep from item to item: between two exchanges none sees what another one does.
pub(super) fn phases(
    step: &Step,
    kernels: &[Kernel],
    ranks: &mut [RankRef<'_>],
    call: Call,
    schedule: &Schedule,
) -> Result<(), StepError> {
    let mut programs: BTreeMap<&str, Program> = BTreeMap::new();
    let mut workers: Vec<usize> = (0..schedule.workers).collect();
    schedule.order.apply(&mut workers);
    for launch in step.items.iter().filter_map(StepItem::launch) {
        if matches!(call, Call::One(_)) && !is_for_one(launch) {
            return Err(StepError::NoBatch(launch.kernel.clone()));
        }
        let kernel = find(kernels, launch)?;
        if !programs.contains_key(launch.kernel.as_str()) {
            programs.insert(&launch.kernel, Program::new(kernel)?);
        }
    }
    for phase in step.items.split(|item| matches!(item, StepItem::Barrier)) {
        for (&worker, item) in workers.iter().flat_map(|w| phase.iter().map(move |item| (w, item))) {
            match item {
                StepItem::Barrier => {}
                StepItem::Exchange(exchange) if worker == 0 => join(exchange, ranks, call)?,
                StepItem::Exchange(_) => {}
                StepItem::Launch(launch) => {
                    let kernel = find(kernels, launch)?;
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

/// What a worker computes of a launch.
fn run_shares(
    launch: &Launch,
    (kernel, program): (&Kernel, &Program),
    rank: &mut RankRef<'_>,
    call: Call,
    schedule: &Schedule,
    worker: usize,
) -> Result<(), StepError> {
    for turn in call.turns(launch, rank.sequences) {
        let (sizes, at) = (&turn.sizes, turn.at(worker));
        for share in schedule.shares(launch, &turn, worker) {
            with_state(rank.memory, rank.sequences, &turn, |memory| {
                on_buffers(launch, kernel, memory, sizes, at, |buffers, sizes| {
                    program.run_share(buffers, sizes, share)
                })
            })?;
        }
    }
    Ok(())
}
