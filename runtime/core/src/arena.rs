//! Scratch memory of a model's steps, which no sequence owns.

use std::cell::UnsafeCell;
use std::sync::{Mutex, MutexGuard, PoisonError};

use crate::Result;
use crate::buffer::AlignedBuffer;

const WHAT: &str = "the arena";

/// Runs of a pool of several workers follow each other and share one arena. Where a pool has one worker, that
/// is the thread of the caller, and several of those may run at once, each with an arena of its own.
pub(crate) struct ArenaPool {
    bytes: u64,
    align: u64,
    shared: UnsafeCell<AlignedBuffer>,
    /// Free arenas of callers' threads; the one that was used last is the last.
    free: Mutex<Vec<AlignedBuffer>>,
}

// SAFETY: `shared` is touched within runs of a pool of several workers only, of which there is one at a time.
unsafe impl Sync for ArenaPool {}

/// The arena of a step.
pub(crate) enum StepArena {
    Shared(*mut u8),
    Own(AlignedBuffer),
}

impl StepArena {
    pub fn as_mut_ptr(&mut self) -> *mut u8 {
        match self {
            Self::Shared(pointer) => *pointer,
            Self::Own(buffer) => buffer.as_mut_ptr(),
        }
    }
}

impl ArenaPool {
    /// Arenas of `bytes` bytes.
    pub fn new(bytes: u64, align: u64) -> Result<Self> {
        let shared = UnsafeCell::new(AlignedBuffer::zeroed(WHAT, bytes, align)?);
        Ok(Self { bytes, align, shared, free: Mutex::new(Vec::new()) })
    }

    fn free(&self) -> MutexGuard<'_, Vec<AlignedBuffer>> {
        self.free.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The arena of a step, to be given back after it. The shared one may be touched within the run only.
    pub fn acquire(&self, workers: usize) -> Result<StepArena> {
        if workers > 1 {
            // SAFETY: the buffer itself is never replaced; this does not touch what it holds.
            return Ok(StepArena::Shared(unsafe { (*self.shared.get()).as_ptr() }));
        }
        let free = self.free().pop();
        Ok(StepArena::Own(free.map_or_else(|| AlignedBuffer::zeroed(WHAT, self.bytes, self.align), Ok)?))
    }

    pub fn release(&self, arena: StepArena) {
        if let StepArena::Own(buffer) = arena {
            self.free().push(buffer);
        }
    }

    /// The contents after the last step that was given back.
    pub fn last_contents(&self) -> Vec<u8> {
        self.free().last().map_or(vec![0; self.bytes as usize], |buffer| buffer.bytes().to_vec())
    }

    /// The contents after the last step of several workers.
    ///
    /// # Safety
    /// It is called within a run of the pool, by one worker, and the others do nothing.
    pub unsafe fn shared_contents(&self) -> Vec<u8> {
        // SAFETY: by contract there is no writer meanwhile.
        unsafe { (*self.shared.get()).bytes().to_vec() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn callers_threads_have_arenas_of_their_own() {
        let arenas = ArenaPool::new(256, 64).unwrap();
        let (mut a, mut b) = (arenas.acquire(1).unwrap(), arenas.acquire(1).unwrap());
        let [first, second] = [a.as_mut_ptr(), b.as_mut_ptr()];
        assert!(first != second && first.addr().is_multiple_of(64));
        arenas.release(a);
        arenas.release(b);
        assert_eq!(arenas.acquire(1).unwrap().as_mut_ptr(), second, "the one that was used last");
        let [mut a, mut b] = [2, 3].map(|workers| arenas.acquire(workers).unwrap());
        assert_eq!(a.as_mut_ptr(), b.as_mut_ptr(), "one after the other");
    }
}
