//! Worker threads, which models may share.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use crate::pool::WorkerPool;
use crate::topology::{AffinityScope, CpuTopology};
use crate::{LoadOptions, NumaPolicy, Result, physical_cores};

/// More workers than that no machine has cores for.
const MOST: usize = 1024;

/// Worker threads. Cloning is cheap and gives the same ones. Models that were loaded with the same ones
/// ([`LoadOptions::workers`]) take turns step by step, in the order in which the steps were asked for,
/// whatever thread they come from; without that each model has its own, which want the same cores.
#[derive(Clone)]
pub struct WorkerThreads(pub(crate) Arc<WorkerPool>);

impl WorkerThreads {
    /// The workers of `options`: their number, and where they run.
    pub fn new(options: &LoadOptions) -> Result<WorkerThreads> {
        Self::with_max(MOST, 1, options)
    }

    /// Workers like those of [`WorkerThreads::new`], but as many for each of `ranks` ranks, at least one and
    /// at most `most`.
    pub(crate) fn with_max(most: usize, ranks: usize, options: &LoadOptions) -> Result<WorkerThreads> {
        let wanted = options.threads.unwrap_or_else(physical_cores);
        let wanted = ranks * (wanted / ranks).clamp(1, most.clamp(1, MOST / ranks));
        let topology = || CpuTopology::detect_host();
        let pool = match (options.pin, options.numa) {
            (false, NumaPolicy::Off) => WorkerPool::new(wanted)?,
            (true, _) => WorkerPool::pinned(topology().worker_affinities(wanted, AffinityScope::Core))?,
            (false, NumaPolicy::Local | NumaPolicy::Interleave) => {
                WorkerPool::pinned(topology().worker_affinities(wanted, AffinityScope::Node))?
            }
        };
        Ok(WorkerThreads(Arc::new(pool)))
    }

    /// Calls `work` once with each number below `count`, in parts on as many workers as suit, and comes back
    /// when all are done. If a call panics, others may be missing. Not to be called from inside a step.
    pub fn parallel_for(&self, count: usize, work: &(dyn Fn(usize) + Sync)) -> Result<()> {
        let next = AtomicUsize::new(0);
        self.0.run_suited_first(count, &|_, _| {
            loop {
                let item = next.fetch_add(1, Ordering::Relaxed);
                if item >= count {
                    return;
                }
                work(item);
            }
        })
    }

    /// The number of workers.
    pub fn threads(&self) -> usize {
        self.0.workers()
    }
}

/// True if they are the same ones.
impl PartialEq for WorkerThreads {
    fn eq(&self, other: &WorkerThreads) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }
}

impl Eq for WorkerThreads {}

impl fmt::Debug for WorkerThreads {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Workers({})", self.threads())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_item_is_dealt_once() {
        for threads in [1, 3] {
            let options = LoadOptions { threads: Some(threads), ..LoadOptions::default() };
            let workers = WorkerThreads::new(&options).unwrap();
            for count in [0, 1, 2, 50] {
                let seen: Vec<AtomicUsize> = (0..count).map(|_| AtomicUsize::new(0)).collect();
                let note = |item: usize| {
                    seen[item].fetch_add(1, Ordering::Relaxed);
                };
                workers.parallel_for(count, &note).unwrap();
                assert!(seen.iter().all(|seen| seen.load(Ordering::Relaxed) == 1), "{threads} {count}");
            }
            let failed = workers.parallel_for(4, &|item| assert_ne!(item, 2, "told to panic"));
            assert!(failed.is_err_and(|error| error.to_string().contains("told to panic")));
            workers.parallel_for(4, &|_| {}).unwrap();
        }
    }
}
