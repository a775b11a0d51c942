//! A step by several workers that run apart from each other as far as its barriers allow: between two barriers one worker does
//! all its work before the next one begins. Where a barrier is missing, a worker reads what another one has not written
//! yet, or no longer, and the results differ from those of [`super::run_step`].

use super::{At, Memory, StepError, find, on_buffers};
use crate::kernel::{Order, Program};
use mlcc_ir::dim::SymValues;
use mlcc_ir::kernel::Kernel;
use mlcc_ir::step::{Launch, Repeat, Step, StepItem};
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

    /// The shares, each as its number and how many there are, that `worker` computes of a launch.
    fn shares(&self, launch: &Launch, sizes: &SymValues, worker: usize) -> Vec<(usize, usize)> {
        if launch.repeat == Repeat::EachWorker {
            return vec![(0, 1)];
        }
        let Some(pieces) = launch.shares.pieces(self.workers, sizes) else {
            return vec![(worker, self.workers)];
        };
        let mine = |piece: &usize| match self.takers {
            Takers::Owners => piece / pieces.count() == worker,
            Takers::One(taker) => taker == worker,
            Takers::InTurns => piece % self.workers == worker,
        };
        let all = 0..self.workers * pieces.count();
        all.filter(mine).map(|piece| pieces.part(piece, self.workers)).collect()
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
    let mut programs: BTreeMap<&str, Program> = BTreeMap::new();
    let mut workers: Vec<usize> = (0..schedule.workers).collect();
    schedule.order.apply(&mut workers);
    for phase in step.items.split(|item| matches!(item, StepItem::Barrier)) {
        for &worker in &workers {
            let at = At { past: sizes.past.max(0) as usize, row: 0, worker };
            for item in phase {
                let StepItem::Launch(launch) = item else { continue };
                if launch.repeat.is_for_sequences() {
                    return Err(StepError::NoBatch(launch.kernel.clone()));
                }
                let kernel = find(kernels, launch)?;
                if !programs.contains_key(launch.kernel.as_str()) {
                    programs.insert(&launch.kernel, Program::new(kernel)?);
                }
                let Some(program) = programs.get(launch.kernel.as_str()) else { continue };
                for share in schedule.shares(launch, sizes, worker) {
                    on_buffers(launch, kernel, memory, sizes, at, |buffers| {
                        program.run_share(buffers, sizes, share)
                    })?;
                }
            }
        }
    }
    Ok(())
}
