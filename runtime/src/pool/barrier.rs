//! A barrier for the workers of one run. Each worker counts its arrivals in a cache line of its own and waits until no
//! other count is behind: a butterfly of one round, as it were (Brooks, 1986). Nobody writes to a line of another worker,
//! so there is no locked instruction, and the last one to come goes on after reading lines whose owners have long written
//! them; the others see its line one transfer later. Every worker reads a line of each other one, which suits few
//! workers; measured with two.

use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};

use super::{Padded, pause};

pub struct Barrier {
    spins: u32,
    /// By worker: how often it has come.
    arrivals: Vec<Padded<AtomicU32>>,
    /// Set when a worker will never come.
    open: AtomicBool,
}

impl Barrier {
    pub(super) fn new(workers: usize, spins: u32) -> Self {
        let arrivals = (0..workers).map(|_| Padded::default()).collect();
        Self { spins, arrivals, open: AtomicBool::new(false) }
    }

    /// Returns when all workers have called it with their numbers (or one has panicked).
    pub fn wait(&self, worker: usize) {
        let Some(own) = self.arrivals.get(worker) else { return };
        let count = own.0.load(Ordering::Relaxed).wrapping_add(1);
        own.0.store(count, Ordering::Release);
        let mut waited = 0;
        for other in &self.arrivals {
            // Others are at most one barrier ahead or behind.
            while (other.0.load(Ordering::Acquire).wrapping_sub(count) as i32) < 0 {
                if self.open.load(Ordering::Relaxed) {
                    return;
                }
                waited = pause(waited, self.spins);
            }
        }
    }

    /// Lets everybody through until `reset`.
    pub(super) fn open(&self) {
        self.open.store(true, Ordering::Relaxed);
    }

    /// Makes an opened barrier whole. No worker may be inside.
    pub(super) fn reset(&self) {
        self.arrivals.iter().for_each(|count| count.0.store(0, Ordering::Relaxed));
        self.open.store(false, Ordering::Relaxed);
    }
}
