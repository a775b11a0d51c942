//! A barrier for the workers of one run: a counter and a generation, in the manner of the sense-reversing central
//! barrier (Mellor-Crummey and Scott, 1991); the generation is the sense, so workers keep no state of their own.

use std::sync::atomic::{AtomicBool, AtomicU32, AtomicUsize, Ordering};

use super::{Padded, pause};

pub struct Barrier {
    workers: usize,
    spins: u32,
    /// Workers still to come.
    missing: Padded<AtomicUsize>,
    /// Changes when the last one has come.
    generation: Padded<AtomicU32>,
    /// Set when a worker will never come.
    open: AtomicBool,
}

impl Barrier {
    pub(super) fn new(workers: usize, spins: u32) -> Self {
        Self {
            workers,
            spins,
            missing: Padded(AtomicUsize::new(workers)),
            generation: Padded::default(),
            open: AtomicBool::new(false),
        }
    }

    /// Returns when all workers have called it (or one has panicked).
    pub fn wait(&self) {
        // Cannot change before this worker has arrived.
        let generation = self.generation.0.load(Ordering::Relaxed);
        if self.missing.0.fetch_sub(1, Ordering::AcqRel) == 1 {
            self.missing.0.store(self.workers, Ordering::Relaxed);
            self.generation.0.store(generation.wrapping_add(1), Ordering::Release);
            return;
        }
        let mut count = 0;
        while self.generation.0.load(Ordering::Acquire) == generation && !self.open.load(Ordering::Relaxed) {
            count = pause(count, self.spins);
        }
    }

    /// Lets everybody through until `reset`.
    pub(super) fn open(&self) {
        self.open.store(true, Ordering::Relaxed);
    }

    /// Makes an opened barrier whole. No worker may be inside.
    pub(super) fn reset(&self) {
        self.missing.0.store(self.workers, Ordering::Relaxed);
        self.open.store(false, Ordering::Relaxed);
    }
}
