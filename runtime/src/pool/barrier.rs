//! A barrier for the workers of one run. Each worker counts its arrivals in a cache line of its own and waits until no
//! other count is behind: a butterfly of one round, as it were (Brooks, 1986). Nobody writes to a line of another worker,
//! so there is no locked instruction, and the last one to come goes on after reading lines whose owners have long written
//! them; the others see its line one transfer later. Every worker reads a line of each other one, which suits few
//! workers; measured with two.
//!
//! A worker that has waited for long sleeps: the one it waits for has most likely lost its core to another program, and
//! gets one the sooner the fewer threads want any. How long workers slept is what the pool chooses their number by.

use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use super::{Padded, futex};

/// A sleeper looks up after this time. Who arrives looks for sleepers without waiting until its own arrival is visible
/// (a fence at every barrier would cost a transfer of the line), so it may miss one that is about to sleep.
const NAP: Duration = Duration::from_micros(500);

pub struct Barrier {
    /// Pauses before a waiter sleeps.
    spins: u32,
    /// Workers of this run: the first ones.
    workers: AtomicUsize,
    arrivals: Vec<Padded<Arrivals>>,
    /// Nanoseconds for which workers slept, all together.
    slept: Padded<AtomicU64>,
    /// Set when a worker will never come.
    open: AtomicBool,
}

/// Of one worker.
#[derive(Default)]
struct Arrivals {
    /// How often it has come.
    count: AtomicU32,
    /// How many others sleep until it comes.
    sleepers: AtomicU32,
}

impl Barrier {
    pub(super) fn new(workers: usize, spins: u32) -> Self {
        let arrivals = (0..workers).map(|_| Padded::default()).collect();
        let (open, slept) = (AtomicBool::new(false), Padded::default());
        Self { spins, workers: AtomicUsize::new(workers), arrivals, slept, open }
    }

    /// Returns when all workers have called it with their numbers (or one has panicked).
    pub fn wait(&self, worker: usize) {
        let arrivals = &self.arrivals[..self.workers.load(Ordering::Relaxed).min(self.arrivals.len())];
        let Some(Padded(own)) = arrivals.get(worker) else { return };
        let count = own.count.load(Ordering::Relaxed).wrapping_add(1);
        own.count.store(count, Ordering::Release);
        if own.sleepers.load(Ordering::Relaxed) != 0 {
            futex::wake(&own.count);
        }
        let mut waited = 0;
        for Padded(other) in arrivals {
            // Others are at most one barrier ahead or behind.
            while is_behind(other.count.load(Ordering::Acquire), count) {
                if self.open.load(Ordering::Relaxed) {
                    return;
                }
                if waited < self.spins {
                    waited += 1;
                    std::hint::spin_loop();
                } else {
                    self.sleep(other, count);
                }
            }
        }
    }

    #[cold]
    fn sleep(&self, other: &Arrivals, count: u32) {
        let begin = Instant::now();
        other.sleepers.fetch_add(1, Ordering::SeqCst);
        let seen = other.count.load(Ordering::SeqCst);
        if is_behind(seen, count) && !self.open.load(Ordering::SeqCst) {
            futex::wait(&other.count, seen, NAP);
        }
        other.sleepers.fetch_sub(1, Ordering::Relaxed);
        self.note_sleep(begin);
    }

    /// A worker has slept since `begin`.
    pub(super) fn note_sleep(&self, begin: Instant) {
        self.slept.0.fetch_add(begin.elapsed().as_nanos() as u64, Ordering::Relaxed);
    }

    /// Nanoseconds for which workers slept so far, all together.
    pub(super) fn slept(&self) -> u64 {
        self.slept.0.load(Ordering::Relaxed)
    }

    /// Lets everybody through until `reset`.
    pub(super) fn open(&self) {
        self.open.store(true, Ordering::SeqCst);
        self.arrivals.iter().for_each(|Padded(worker)| futex::wake(&worker.count));
    }

    /// Makes it whole, for the first `workers`. No worker may be inside.
    pub(super) fn reset(&self, workers: usize) {
        self.workers.store(workers, Ordering::Relaxed);
        self.arrivals.iter().for_each(|Padded(worker)| worker.count.store(0, Ordering::Relaxed));
        self.open.store(false, Ordering::Relaxed);
    }
}

/// Counts go round.
fn is_behind(other: u32, count: u32) -> bool {
    (other.wrapping_sub(count) as i32) < 0
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::AtomicUsize;

    /// Many threads on few cores, which sleep at once, one of them late: nobody is let through early or left asleep.
    #[test]
    fn sleepers_wake_when_the_last_one_comes() {
        const ROUNDS: usize = 2000;
        for (workers, spins) in [(16, 0), (3, 0), (16, 64), (2, 0)] {
            let (barrier, arrived) = (Barrier::new(workers, spins), AtomicUsize::new(0));
            // Counts pass the point where they go round.
            let first = u32::MAX - ROUNDS as u32 / 2;
            barrier.arrivals.iter().for_each(|a| a.0.count.store(first, Ordering::Relaxed));
            std::thread::scope(|scope| {
                for worker in 0..workers {
                    let (barrier, arrived) = (&barrier, &arrived);
                    scope.spawn(move || {
                        for round in 1..=ROUNDS {
                            if round % 100 == 0 && round / 100 % workers == worker {
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
            assert_eq!(arrived.into_inner(), ROUNDS * workers);
            assert!(barrier.slept.0.into_inner() > 0, "the late ones were slept for");
            assert!(barrier.arrivals.iter().all(|a| a.0.sleepers.load(Ordering::Relaxed) == 0));
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
            while barrier.slept() == 0 {
                std::thread::yield_now();
            }
            barrier.open();
        });
        barrier.reset(1);
        barrier.wait(0);
        barrier.wait(2);
    }
}
