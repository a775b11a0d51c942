//! Times of the items of a step (launches and barriers) on each worker, for profiles.
//!
//! A worker notes the time after each item; the difference to its last note is the item's. Each worker has
//! counters of its own, so taking times costs one reading of the clock per item and nothing else.

use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

use crate::pool::CachePadded;

/// Times of the items of one entry point, summed over its calls.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StepTimes {
    /// Name of the entry point.
    pub entry: &'static str,
    pub calls: u64,
    /// Nanoseconds by worker, then by item in the order of the step.
    pub nanoseconds: Vec<Vec<u64>>,
}

/// Times that are being taken.
pub(crate) struct StepTrace {
    started: Instant,
    workers: Vec<CachePadded<WorkerTrace>>,
    done: Vec<StepTimes>,
    entry: Option<&'static str>,
}

#[derive(Default)]
struct WorkerTrace {
    /// Nanoseconds from the start of the trace to this worker's last note.
    last: AtomicU64,
    /// Times of the running entry point. Only this worker locks it while a step runs.
    items: Mutex<Vec<u64>>,
}

impl StepTrace {
    pub fn new(workers: usize) -> StepTrace {
        let workers = (0..workers).map(|_| CachePadded::default()).collect();
        StepTrace { started: Instant::now(), workers, done: Vec::new(), entry: None }
    }

    /// A call of that entry point follows.
    pub fn start_entry(&mut self, entry: &'static str) -> &StepTrace {
        if self.entry != Some(entry) {
            self.finish_entry();
            self.entry = Some(entry);
            let known = self.done.iter().position(|s| s.entry == entry);
            let at = known.unwrap_or_else(|| {
                let nanoseconds = vec![Vec::new(); self.workers.len()];
                self.done.push(StepTimes { entry, calls: 0, nanoseconds });
                self.done.len() - 1
            });
            for (worker, items) in self.workers.iter_mut().zip(&mut self.done[at].nanoseconds) {
                *worker.0.items() = std::mem::take(items);
            }
        }
        if let Some(step) = self.done.iter_mut().find(|s| s.entry == entry) {
            step.calls += 1;
        }
        self
    }

    /// The worker begins with its first item.
    pub fn start_worker(&self, worker: usize) {
        self.workers[worker].0.last.store(self.now(), Ordering::Relaxed);
    }

    /// The worker is through with an item.
    pub fn record_item(&self, worker: usize, item: usize) {
        let Some(CachePadded(worker)) = self.workers.get(worker) else { return };
        let now = self.now();
        let took = now - worker.last.swap(now, Ordering::Relaxed);
        let mut items = worker.items.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        if items.len() <= item {
            items.resize(item + 1, 0);
        }
        items[item] += took;
    }

    pub fn into_times(mut self) -> Vec<StepTimes> {
        self.finish_entry();
        self.done
    }

    fn now(&self) -> u64 {
        self.started.elapsed().as_nanos() as u64
    }

    /// Moves the counters of the entry point that ran last to the others.
    fn finish_entry(&mut self) {
        let Some(entry) = self.entry.take() else { return };
        let Some(step) = self.done.iter_mut().find(|s| s.entry == entry) else { return };
        for (worker, items) in self.workers.iter_mut().zip(&mut step.nanoseconds) {
            *items = std::mem::take(worker.0.items());
        }
    }
}

impl WorkerTrace {
    fn items(&mut self) -> &mut Vec<u64> {
        self.items.get_mut().unwrap_or_else(|poisoned| poisoned.into_inner())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_go_to_their_entry_worker_and_item() {
        let mut trace = StepTrace::new(2);
        for entry in ["prefill", "decode", "decode"] {
            let trace = trace.start_entry(entry);
            for worker in 0..2 {
                trace.start_worker(worker);
                for item in 0..=worker {
                    while trace.now() == trace.workers[worker].0.last.load(Ordering::Relaxed) {}
                    trace.record_item(worker, item);
                }
            }
        }
        trace.record_item(7, 0);
        let times = trace.into_times();
        let seen: Vec<_> = times.iter().map(|t| (t.entry, t.calls)).collect();
        assert_eq!(seen, [("prefill", 1), ("decode", 2)]);
        for step in &times {
            let items: Vec<usize> = step.nanoseconds.iter().map(Vec::len).collect();
            assert_eq!(items, [1, 2]);
            assert!(step.nanoseconds.iter().flatten().all(|&t| t > 0));
        }
    }
}
