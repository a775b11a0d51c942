//! A barrier for the workers of one run.
//!
//! Up to [`FAN`] workers: each counts its arrivals in a cache line of its own and waits until no other count
//! is behind, a butterfly of one round, as it were (Brooks, 1986). No worker writes to a line of another one,
//! so there is no locked instruction, and the last one to come goes on after reading lines whose owners have
//! long written them; the others see its line one transfer later.
//!
//! With more workers everyone would read too many lines. So the first of every eight gathers the arrivals of
//! the others, then counts its own, and those first ones wait for each other, in as many levels as it takes
//! until they are at most eight; then each lets its group go by one more line. That is the tree of
//! Mellor-Crummey and Scott (1991), with the flat barrier in the place of its root. Three transfers of a line
//! in a row for 64 workers and five for 512, and a worker reads at most seven lines of others per level.

use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};

use super::CachePadded;
use super::event_count::{EventCount, EventWaiter};
use super::tree::{self, FAN};

pub struct Barrier {
    /// Pauses before a waiter sleeps.
    spins: u32,
    /// Workers of this run: the first ones.
    workers: AtomicUsize,
    /// [`tree::top`] of them.
    top: AtomicUsize,
    signals: Vec<BarrierSignals>,
    /// Nanoseconds for which workers slept, all together: what the pool chooses their number by.
    slept: CachePadded<AtomicU64>,
    /// Set when a worker will never come.
    broken: AtomicBool,
}

/// The signals of one worker.
#[derive(Default)]
struct BarrierSignals {
    /// The number of times that it has arrived, with all workers that it leads.
    arrivals: CachePadded<EventCount>,
    /// The number of times that it has released the workers that it leads.
    releases: CachePadded<EventCount>,
}

impl Barrier {
    pub(crate) fn new(workers: usize, spins: u32) -> Self {
        Self {
            spins,
            workers: AtomicUsize::new(workers),
            top: AtomicUsize::new(tree::top(workers)),
            signals: (0..workers).map(|_| BarrierSignals::default()).collect(),
            slept: CachePadded::default(),
            broken: AtomicBool::new(false),
        }
    }

    /// Returns when all workers have called it with their numbers (or one has panicked).
    pub fn wait(&self, worker: usize) {
        let lines = &self.signals[..self.workers.load(Ordering::Relaxed).min(self.signals.len())];
        let Some(own) = lines.get(worker) else { return };
        // Others are at most one barrier ahead or behind.
        let count = own.arrivals.0.count().wrapping_add(1);
        let mut waiter = EventWaiter { spins: self.spins, open: Some(&self.broken), slept: &self.slept.0 };
        if lines.len() <= FAN {
            own.arrivals.0.raise_to(count);
            // Where a worker will never come, no worker waits for another.
            let _opened = lines.iter().all(|other| waiter.wait(&other.arrivals.0, count));
        } else {
            let _opened =
                self.wait_in_tree(worker, lines, |signal| waiter.wait(&signal.0, count).then_some(()), count);
        }
    }

    /// The way up the tree and down. `None` if a worker will never come.
    #[inline(never)]
    fn wait_in_tree(
        &self,
        worker: usize,
        lines: &[BarrierSignals],
        mut comes: impl FnMut(&CachePadded<EventCount>) -> Option<()>,
        count: u32,
    ) -> Option<()> {
        let (own, top) = (&lines[worker], self.top.load(Ordering::Relaxed));
        let mut stride = 1;
        while stride < top && tree::leader(worker, stride) == worker {
            for member in tree::group(worker, stride, lines.len()).skip(1) {
                comes(&lines[member].arrivals)?;
            }
            stride *= FAN;
        }
        own.arrivals.0.raise_to(count);
        if stride == top {
            for other in (0..lines.len()).step_by(top) {
                comes(&lines[other].arrivals)?;
            }
        } else {
            comes(&lines[tree::leader(worker, stride)].releases)?;
        }
        if stride > 1 {
            own.releases.0.raise_to(count);
        }
        Some(())
    }

    /// The counter of nanoseconds of sleep.
    pub(super) fn sleep_counter(&self) -> &AtomicU64 {
        &self.slept.0
    }

    /// Nanoseconds for which workers slept so far, all together.
    pub(super) fn slept_time(&self) -> u64 {
        self.slept.0.load(Ordering::Relaxed)
    }

    /// Lets everybody through until `reset`.
    pub(super) fn break_open(&self) {
        self.broken.store(true, Ordering::SeqCst);
        self.signals().for_each(EventCount::wake_sleepers);
    }

    /// True if a worker will never come. Those of the run have ended.
    pub(super) fn is_broken(&self) -> bool {
        self.broken.load(Ordering::Relaxed)
    }

    /// Makes it whole, for the first `workers`. No worker may be inside.
    pub(super) fn reset(&self, workers: usize) {
        self.workers.store(workers, Ordering::Relaxed);
        self.top.store(tree::top(workers), Ordering::Relaxed);
        self.signals().for_each(|signal| signal.set_count(0));
        self.broken.store(false, Ordering::Relaxed);
    }

    fn signals(&self) -> impl Iterator<Item = &EventCount> {
        self.signals.iter().flat_map(|lines| [&lines.arrivals.0, &lines.releases.0])
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    /// Many threads on few cores, which sleep at once, one of them late: none is let through early or left
    /// asleep.
    #[test]
    fn sleepers_wake_when_the_last_one_comes() {
        // With one, two and three levels.
        for (workers, spins, rounds) in
            [(3, 0, 2000), (16, 64, 1000), (9, 0, 1000), (128, 0, 60), (2, 0, 2000)]
        {
            let (barrier, arrived) = (Barrier::new(workers, spins), AtomicUsize::new(0));
            // Counts pass the point where they go round.
            let first = u32::MAX - rounds as u32 / 2;
            barrier.signals().for_each(|signal| signal.set_count(first));
            std::thread::scope(|scope| {
                for worker in 0..workers {
                    let (barrier, arrived) = (&barrier, &arrived);
                    scope.spawn(move || {
                        for round in 1..=rounds {
                            if round % 20 == 0 && round / 20 % workers == worker {
                                std::thread::sleep(Duration::from_millis(1));
                            }
                            arrived.fetch_add(1, Ordering::Relaxed);
                            barrier.wait(worker);
                            let seen = arrived.load(Ordering::Relaxed);
                            assert!((round * workers..(round + 1) * workers).contains(&seen));
                        }
                    });
                }
            });
            assert_eq!(arrived.into_inner(), rounds * workers);
            assert!(barrier.slept_time() > 0, "the late ones were slept for");
            assert!(barrier.signals().all(|signal| signal.sleepers() == 0));
        }
    }

    #[test]
    fn an_opened_barrier_wakes_sleepers() {
        let barrier = Barrier::new(3, 0);
        std::thread::scope(|scope| {
            (0..2).for_each(|worker| {
                drop(scope.spawn({
                    let barrier = &barrier;
                    move || barrier.wait(worker)
                }))
            });
            while barrier.slept_time() == 0 {
                std::thread::yield_now();
            }
            barrier.break_open();
        });
        barrier.reset(1);
        barrier.wait(0);
        barrier.wait(2);
    }
}
