//! A number that one worker raises and others wait for, in a cache line of its own.
//!
//! A waiting worker spins first and then sleeps: the other one has most probably lost its core to another
//! program, and gets one the sooner the fewer threads need any.

use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering, fence};
use std::time::{Duration, Instant};

use super::futex;

/// A sleeper looks up after this time: [`EventCount::raise_to`] may miss one that is about to sleep.
const NAP: Duration = Duration::from_micros(500);

#[derive(Default)]
pub struct EventCount {
    /// Goes round.
    count: AtomicU32,
    /// The number of workers that sleep until it is raised.
    sleepers: AtomicU32,
}

/// A waiting worker, perhaps for several signals in turn.
pub struct EventWaiter<'a> {
    /// Pauses before it sleeps.
    pub spins: u32,
    /// Set when a signal will never come; `None`: all will.
    pub open: Option<&'a AtomicBool>,
    /// Nanoseconds of sleep are added here.
    pub slept: &'a AtomicU64,
}

impl EventCount {
    pub fn count(&self) -> u32 {
        self.count.load(Ordering::Relaxed)
    }

    /// There may be no waiting worker.
    pub fn set_count(&self, count: u32) {
        self.count.store(count, Ordering::Relaxed);
    }

    /// Lets go all who wait for `count` or less. Looks for sleepers without waiting until the new count is
    /// visible (a fence at every barrier would cost a transfer of the line).
    pub fn raise_to(&self, count: u32) {
        self.count.store(count, Ordering::Release);
        if self.sleepers.load(Ordering::Relaxed) != 0 {
            futex::wake(&self.count);
        }
    }

    /// Raises like [`EventCount::raise_to`], and misses no sleeper.
    pub fn raise_and_wake(&self, count: u32) {
        self.count.store(count, Ordering::Release);
        // With the increment of `sleepers`: either it is seen here, or the sleeper sees the new count.
        fence(Ordering::SeqCst);
        if self.sleepers.load(Ordering::Relaxed) != 0 {
            futex::wake(&self.count);
        }
    }

    pub fn wake_sleepers(&self) {
        futex::wake(&self.count);
    }

    #[cfg(test)]
    pub fn sleepers(&self) -> u32 {
        self.sleepers.load(Ordering::SeqCst)
    }

    fn has_not_reached(&self, count: u32, order: Ordering) -> bool {
        (self.count.load(order).wrapping_sub(count) as i32) < 0
    }
}

impl EventWaiter<'_> {
    /// Waits until `signal` has reached `count`; false if it never will.
    pub fn wait(&mut self, signal: &EventCount, count: u32) -> bool {
        while signal.has_not_reached(count, Ordering::Acquire) {
            if self.open.is_some_and(|open| open.load(Ordering::Relaxed)) {
                return false;
            }
            if self.spins > 0 {
                self.spins -= 1;
                std::hint::spin_loop();
            } else {
                self.sleep(signal, count);
            }
        }
        true
    }

    #[cold]
    fn sleep(&self, signal: &EventCount, count: u32) {
        let begin = Instant::now();
        signal.sleepers.fetch_add(1, Ordering::SeqCst);
        let seen = signal.count.load(Ordering::SeqCst);
        let open = self.open.is_some_and(|open| open.load(Ordering::SeqCst));
        if (seen.wrapping_sub(count) as i32) < 0 && !open {
            futex::wait(&signal.count, seen, NAP);
        }
        signal.sleepers.fetch_sub(1, Ordering::Relaxed);
        self.slept.fetch_add(begin.elapsed().as_nanos() as u64, Ordering::Relaxed);
    }
}
