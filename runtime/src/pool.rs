//! The worker pool: SPMD, persistent threads. `pool.run(f)` calls `f(worker)` once on every worker and returns when
//! all are done; the caller's thread is worker 0.
//!
//! Between runs workers spin for a while (a decode loop calls every few hundred microseconds), then park. Inside a
//! run they meet at [`Barrier`]s. Waiting spins first and then yields, so a machine with more workers than cores goes
//! on. A panic on a worker is caught and returned as an error; it also opens the barrier, so nobody waits for ever.
//!
//! Invariants: at most one run at a time (the gate; one uncontended atomic when sessions do not share the pool at the
//! same moment); the job pointer is valid from the epoch's increment until `remaining` is zero.

mod barrier;
mod pieces;

use std::any::Any;
use std::cell::UnsafeCell;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::{JoinHandle, Thread};

pub use barrier::Barrier;
pub use pieces::Pieces;

use crate::{Error, Result};

/// Keeps one atomic per pair of cache lines (the adjacent-line prefetcher fetches pairs).
#[repr(align(128))]
#[derive(Default)]
pub(crate) struct Padded<T>(pub T);

/// Pauses before a waiter yields or parks. About 100 microseconds on current machines.
const SPINS: u32 = 1 << 12;
/// The same with more workers than cores, where spinning takes the time of those waited for.
const SPINS_CROWDED: u32 = 1 << 4;
/// Yields between spinning and parking.
const YIELDS: u32 = 64;

type Job = *const (dyn Fn(usize) + Sync);

struct Shared {
    /// Incremented once per run; workers wait for a change.
    epoch: Padded<AtomicU32>,
    /// Workers (other than 0) that have not finished the current run.
    remaining: Padded<AtomicUsize>,
    /// Set by a worker just before it parks.
    sleeping: Vec<Padded<AtomicBool>>,
    job: UnsafeCell<Option<Job>>,
    barrier: Barrier,
    pieces: Pieces,
    panic: Mutex<Option<String>>,
    shutdown: AtomicBool,
    spins: u32,
}

// SAFETY: `job` is written by the gate's holder while no worker runs, and read by workers only between the epoch's
// increment (Release/Acquire) and their decrement of `remaining`; the pointee is Sync. Everything else is Sync.
unsafe impl Sync for Shared {}
// SAFETY: as above.
unsafe impl Send for Shared {}

/// See the [module](self).
pub struct Pool {
    shared: Arc<Shared>,
    threads: Vec<JoinHandle<()>>,
    handles: Vec<Thread>,
    gate: Mutex<()>,
}

impl Pool {
    /// A pool of `workers` (at least 1), of which the caller is one.
    pub fn new(workers: usize) -> Result<Self> {
        let workers = workers.max(1);
        let cores = std::thread::available_parallelism().map_or(1, |n| n.get());
        let spins = if workers <= cores { SPINS } else { SPINS_CROWDED };
        let shared = Arc::new(Shared {
            epoch: Padded::default(),
            remaining: Padded::default(),
            sleeping: (1..workers).map(|_| Padded::default()).collect(),
            job: UnsafeCell::new(None),
            barrier: Barrier::new(workers, spins),
            pieces: Pieces::new(workers),
            panic: Mutex::new(None),
            shutdown: AtomicBool::new(false),
            spins,
        });
        let mut pool = Self { shared, threads: Vec::new(), handles: Vec::new(), gate: Mutex::new(()) };
        for index in 1..workers {
            let shared = Arc::clone(&pool.shared);
            let spawned = std::thread::Builder::new()
                .name(format!("mlcc-worker-{index}"))
                .spawn(move || worker(&shared, index))
                .map_err(|source| Error::Thread { index, source })?;
            pool.handles.push(spawned.thread().clone());
            pool.threads.push(spawned);
        }
        Ok(pool)
    }

    pub fn workers(&self) -> usize {
        self.threads.len() + 1
    }

    /// The barrier that all workers of a run share.
    pub fn barrier(&self) -> &Barrier {
        &self.shared.barrier
    }

    /// What deals out the pieces of work that all workers of a run share.
    pub fn pieces(&self) -> &Pieces {
        &self.shared.pieces
    }

    /// Calls `f(worker)` on every worker. Not to be called from inside a run.
    pub fn run(&self, f: &(dyn Fn(usize) + Sync)) -> Result<()> {
        if self.threads.is_empty() {
            return catch_unwind(AssertUnwindSafe(|| f(0)))
                .map_err(|p| Error::WorkerPanic { message: panic_text(&*p) });
        }
        let _gate = self.gate.lock().unwrap_or_else(PoisonError::into_inner);
        let shared = &*self.shared;
        // SAFETY: the gate is held and the last run is over, so nobody reads the cell. The lifetime is erased, but the
        // pointer is used only until `remaining` is zero, which this function waits for before it returns.
        unsafe {
            *shared.job.get() = Some(std::mem::transmute::<&(dyn Fn(usize) + Sync), Job>(f));
        }
        shared.remaining.0.store(self.threads.len(), Ordering::Relaxed);
        // SeqCst with the worker's `sleeping` store: either it sees the new epoch or we see it asleep.
        shared.epoch.0.fetch_add(1, Ordering::SeqCst);
        for (sleeping, thread) in shared.sleeping.iter().zip(&self.handles) {
            if sleeping.0.load(Ordering::SeqCst) {
                thread.unpark();
            }
        }
        if let Err(panic) = catch_unwind(AssertUnwindSafe(|| f(0))) {
            shared.panicked(&*panic);
        }
        let mut spins = 0;
        while shared.remaining.0.load(Ordering::Acquire) != 0 {
            spins = pause(spins, shared.spins);
        }
        let panic = shared.panic.lock().unwrap_or_else(PoisonError::into_inner).take();
        match panic {
            None => Ok(()),
            Some(message) => {
                shared.barrier.reset();
                shared.pieces.reset();
                Err(Error::WorkerPanic { message })
            }
        }
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        self.shared.shutdown.store(true, Ordering::Relaxed);
        self.shared.epoch.0.fetch_add(1, Ordering::SeqCst);
        self.handles.iter().for_each(Thread::unpark);
        for thread in self.threads.drain(..) {
            let _ = thread.join();
        }
    }
}

impl Shared {
    fn panicked(&self, panic: &(dyn Any + Send)) {
        self.panic.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert_with(|| panic_text(panic));
        self.barrier.open();
    }

    /// Waits until the epoch differs from `seen`.
    fn next_epoch(&self, seen: u32, index: usize) -> u32 {
        let mut waited = 0;
        loop {
            let epoch = self.epoch.0.load(Ordering::Acquire);
            if epoch != seen {
                return epoch;
            }
            if waited < self.spins + YIELDS {
                waited = pause(waited, self.spins);
                continue;
            }
            let sleeping = &self.sleeping[index - 1].0;
            sleeping.store(true, Ordering::SeqCst);
            if self.epoch.0.load(Ordering::SeqCst) == seen {
                std::thread::park();
            }
            sleeping.store(false, Ordering::Relaxed);
        }
    }
}

/// One step of waiting: pause while `count < spins`, yield afterwards.
fn pause(count: u32, spins: u32) -> u32 {
    if count < spins {
        std::hint::spin_loop();
    } else {
        std::thread::yield_now();
    }
    count.saturating_add(1)
}

fn worker(shared: &Shared, index: usize) {
    let mut epoch = 0;
    loop {
        epoch = shared.next_epoch(epoch, index);
        if shared.shutdown.load(Ordering::Relaxed) {
            return;
        }
        // SAFETY: the epoch has changed, so the cell holds this run's job, which stays valid until we decrement
        // `remaining`.
        let job = unsafe { (*shared.job.get()).map(|job| &*job) };
        if let Some(job) = job
            && let Err(panic) = catch_unwind(AssertUnwindSafe(|| job(index)))
        {
            shared.panicked(&*panic);
        }
        shared.remaining.0.fetch_sub(1, Ordering::Release);
    }
}

fn panic_text(panic: &(dyn Any + Send)) -> String {
    let text = panic.downcast_ref::<&str>().map(|s| s.to_string());
    text.or_else(|| panic.downcast_ref::<String>().cloned()).unwrap_or_else(|| "unknown cause".into())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    #[test]
    fn every_worker_runs_once() {
        for workers in [1, 2, 3, 8] {
            let pool = Pool::new(workers).unwrap();
            let counts: Vec<AtomicUsize> = (0..workers).map(|_| AtomicUsize::new(0)).collect();
            for _ in 0..200 {
                pool.run(&|w| {
                    counts[w].fetch_add(1, Ordering::Relaxed);
                })
                .unwrap();
            }
            assert!(counts.iter().all(|c| c.load(Ordering::Relaxed) == 200));
        }
    }

    #[test]
    fn parked_workers_wake() {
        let pool = Pool::new(3).unwrap();
        let count = AtomicUsize::new(0);
        for _ in 0..3 {
            std::thread::sleep(Duration::from_millis(20));
            pool.run(&|_| {
                count.fetch_add(1, Ordering::Relaxed);
            })
            .unwrap();
        }
        assert_eq!(count.into_inner(), 9);
    }

    #[test]
    fn barriers_order_phases() {
        let workers = 6;
        let pool = Pool::new(workers).unwrap();
        let phases = AtomicUsize::new(0);
        pool.run(&|w| {
            for phase in 0..100 {
                phases.fetch_add(1, Ordering::Relaxed);
                pool.barrier().wait(w);
                assert!(phases.load(Ordering::Relaxed) >= (phase + 1) * workers);
                pool.barrier().wait(w);
            }
        })
        .unwrap();
        assert_eq!(phases.into_inner(), 100 * workers);
    }

    #[test]
    fn panics_are_contained() {
        for bad in [0, 1] {
            let pool = Pool::new(3).unwrap();
            let result = pool.run(&|w| {
                assert!(w != bad, "worker {w} is bad");
                pool.barrier().wait(w);
            });
            assert!(
                matches!(&result, Err(Error::WorkerPanic { message }) if message.contains("is bad")),
                "{result:?}"
            );
            let count = AtomicUsize::new(0);
            pool.run(&|w| {
                pool.barrier().wait(w);
                count.fetch_add(1, Ordering::Relaxed);
            })
            .unwrap();
            assert_eq!(count.into_inner(), 3, "the pool works again");
        }
        let one = Pool::new(1).unwrap();
        assert!(matches!(one.run(&|_| panic!("alone")), Err(Error::WorkerPanic { .. })));
    }

    #[test]
    fn callers_take_turns() {
        let pool = Pool::new(2).unwrap();
        let busy = AtomicUsize::new(0);
        std::thread::scope(|s| {
            for _ in 0..3 {
                s.spawn(|| {
                    for _ in 0..100 {
                        pool.run(&|w| {
                            assert!(busy.fetch_add(1, Ordering::SeqCst) < 2);
                            pool.barrier().wait(w);
                            busy.fetch_sub(1, Ordering::SeqCst);
                        })
                        .unwrap();
                    }
                });
            }
        });
    }
}
