//! The worker pool: SPMD, persistent threads. `pool.run(f)` calls `f(worker)` once on every worker and returns when
//! all are done; the caller's thread is worker 0.
//!
//! Between runs workers spin for a while (a decode loop calls every few hundred microseconds), then park. Inside a
//! run they meet at [`Barrier`]s. Waiting spins first and then sleeps: another program has the core of the one waited for.
//! Where that happens often, [`Pool::step`] takes fewer workers, as [`crew`] chooses. A panic on a worker is caught and
//! returned as an error; it also opens the barrier, so nobody waits for ever.
//!
//! Invariants: at most one run at a time (the gate; one uncontended atomic when sessions do not share the pool at the
//! same moment); the job pointer is valid from the epoch's change until `remaining` is zero.

mod barrier;
mod crew;
mod futex;
mod pieces;

use std::any::Any;
use std::cell::UnsafeCell;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::{JoinHandle, Thread};
use std::time::{Duration, Instant};

pub use barrier::Barrier;
pub use crew::Kind;
pub use pieces::Pieces;

use crew::{Crew, Taken};

use crate::{Error, Result};

/// Keeps one atomic per pair of cache lines (the adjacent-line prefetcher fetches pairs).
#[repr(align(128))]
#[derive(Default)]
pub(crate) struct Padded<T>(pub T);

/// Pauses before a waiter sleeps. About 40 to 150 microseconds on current machines.
const SPINS: u32 = 1 << 12;
/// The same with more workers than cores, where spinning takes the time of those waited for.
const SPINS_CROWDED: u32 = 1 << 4;
/// A caller that waits for the end of a run looks up after this time.
const NAP: Duration = Duration::from_millis(100);

type Job = *const (dyn Fn(usize) + Sync);

struct Shared {
    /// Which run, and how many workers take part ([`Epoch`]); workers wait for a change.
    epoch: Padded<AtomicU64>,
    /// Workers (other than 0) that have not finished the current run.
    remaining: Padded<AtomicU32>,
    /// Worker 0 sleeps until the others have finished.
    caller_sleeps: AtomicBool,
    /// Set by a worker just before it parks.
    sleeping: Vec<Padded<AtomicBool>>,
    job: UnsafeCell<Option<Job>>,
    barrier: Barrier,
    pieces: Pieces,
    panic: Mutex<Option<String>>,
    shutdown: AtomicBool,
    spins: u32,
}

/// The number of a run in the upper half, how many workers it has in the lower.
#[derive(Clone, Copy, PartialEq, Eq)]
struct Epoch(u64);

impl Epoch {
    fn next(self, workers: usize) -> Epoch {
        Epoch((self.0 >> 32).wrapping_add(1) << 32 | workers as u64)
    }

    fn workers(self) -> usize {
        self.0 as u32 as usize
    }
}

// SAFETY: `job` is written by the gate's holder while no worker runs, and read by workers only between the epoch's
// change (Release/Acquire) and their decrement of `remaining`; the pointee is Sync. Everything else is Sync.
unsafe impl Sync for Shared {}
// SAFETY: as above.
unsafe impl Send for Shared {}

/// See the [module](self).
pub struct Pool {
    shared: Arc<Shared>,
    threads: Vec<JoinHandle<()>>,
    handles: Vec<Thread>,
    gate: Mutex<Gate>,
    /// Where its clock begins.
    begin: Instant,
    /// The number of workers that steps are to have; 0 if the pool chooses.
    wanted: AtomicUsize,
}

/// What belongs to whom runs.
struct Gate {
    crew: Crew,
    epoch: Epoch,
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
            caller_sleeps: AtomicBool::new(false),
            sleeping: (1..workers).map(|_| Padded::default()).collect(),
            job: UnsafeCell::new(None),
            barrier: Barrier::new(workers, spins),
            pieces: Pieces::new(workers),
            panic: Mutex::new(None),
            shutdown: AtomicBool::new(false),
            spins,
        });
        let mut pool = Self {
            shared,
            threads: Vec::new(),
            handles: Vec::new(),
            gate: Mutex::new(Gate { crew: Crew::new(workers), epoch: Epoch(0).next(workers) }),
            begin: Instant::now(),
            wanted: AtomicUsize::new(0),
        };
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

    /// From the next step on so many workers run it (at least 1, at most all); with `None` as many as suit.
    pub fn fix_workers(&self, workers: Option<usize>) {
        self.wanted.store(workers.map_or(0, |n| n.clamp(1, self.workers())), Ordering::Relaxed);
    }

    /// Calls `f(worker)` on every worker. Not to be called from inside a run.
    pub fn run(&self, f: &(dyn Fn(usize) + Sync)) -> Result<()> {
        if self.threads.is_empty() {
            return alone(f);
        }
        self.run_by(&mut self.gate(), self.workers(), f)
    }

    /// Calls `f(worker, workers)` on as many workers as suit.
    pub fn help(&self, f: &(dyn Fn(usize, usize) + Sync)) -> Result<()> {
        if self.threads.is_empty() {
            return alone(&|worker| f(worker, 1));
        }
        let mut gate = self.gate();
        let workers = self.wanted().unwrap_or(gate.crew.suited());
        self.run_by(&mut gate, workers, &|worker| f(worker, workers))
    }

    /// Calls `f(worker, workers)` on as many workers as suit, and learns from how long it takes. Steps of one kind take
    /// about the same time by the same workers.
    pub fn step(&self, kind: Kind, f: &(dyn Fn(usize, usize) + Sync)) -> Result<()> {
        if self.threads.is_empty() {
            return alone(&|worker| f(worker, 1));
        }
        let mut gate = self.gate();
        if let Some(workers) = self.wanted() {
            return self.run_by(&mut gate, workers, &|worker| f(worker, workers));
        }
        let workers = gate.crew.workers();
        let (begin, slept) = (self.now(), self.shared.barrier.slept());
        self.run_by(&mut gate, workers, &|worker| f(worker, workers))?;
        let (end, slept) = (self.now(), self.shared.barrier.slept() - slept);
        gate.crew.note(Taken { kind, end, time: end - begin, slept });
        Ok(())
    }

    fn wanted(&self) -> Option<usize> {
        Some(self.wanted.load(Ordering::Relaxed)).filter(|&n| n > 0)
    }

    fn gate(&self) -> MutexGuard<'_, Gate> {
        self.gate.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn now(&self) -> u64 {
        self.begin.elapsed().as_nanos() as u64
    }

    /// Calls `f` on the first `workers`.
    fn run_by(&self, gate: &mut Gate, workers: usize, f: &(dyn Fn(usize) + Sync)) -> Result<()> {
        let shared = &*self.shared;
        let epoch = gate.epoch.next(workers);
        if workers != gate.epoch.workers() {
            shared.barrier.reset(workers);
            shared.pieces.reset(workers);
        }
        gate.epoch = epoch;
        if workers > 1 {
            shared.start(epoch, f, &self.handles);
        }
        if let Err(panic) = catch_unwind(AssertUnwindSafe(|| f(0))) {
            shared.panicked(&*panic);
        }
        if workers > 1 {
            shared.finish();
        }
        let panic = shared.panic.lock().unwrap_or_else(PoisonError::into_inner).take();
        match panic {
            None => Ok(()),
            Some(message) => {
                shared.barrier.reset(workers);
                shared.pieces.reset(workers);
                Err(Error::WorkerPanic { message })
            }
        }
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        self.shared.shutdown.store(true, Ordering::Relaxed);
        // One more than the last run, by nobody.
        let epoch = self.gate.get_mut().unwrap_or_else(PoisonError::into_inner).epoch.next(0);
        self.shared.epoch.0.store(epoch.0, Ordering::SeqCst);
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

    /// Makes the other workers of `epoch` call `f`. The gate is held and the last run is over.
    fn start(&self, epoch: Epoch, f: &(dyn Fn(usize) + Sync), handles: &[Thread]) {
        // SAFETY: nobody reads the cell, since no run is going on. The lifetime is erased, but the pointer is used only until
        // `remaining` is zero, which the caller waits for (`finish`) before it returns.
        unsafe {
            *self.job.get() = Some(std::mem::transmute::<&(dyn Fn(usize) + Sync), Job>(f));
        }
        let others = epoch.workers() - 1;
        self.remaining.0.store(others as u32, Ordering::Relaxed);
        // SeqCst with the worker's `sleeping` store: either it sees the new epoch or we see it asleep.
        self.epoch.0.store(epoch.0, Ordering::SeqCst);
        for (sleeping, thread) in self.sleeping.iter().zip(handles).take(others) {
            if sleeping.0.load(Ordering::SeqCst) {
                thread.unpark();
            }
        }
    }

    /// Waits until the other workers have finished.
    fn finish(&self) {
        let mut waited = 0;
        loop {
            let remaining = self.remaining.0.load(Ordering::Acquire);
            if remaining == 0 {
                return;
            }
            if waited < self.spins {
                waited += 1;
                std::hint::spin_loop();
                continue;
            }
            let begin = Instant::now();
            self.caller_sleeps.store(true, Ordering::SeqCst);
            // The system compares: who finishes after this sees that the caller sleeps.
            futex::wait(&self.remaining.0, remaining, NAP);
            self.caller_sleeps.store(false, Ordering::Relaxed);
            self.barrier.note_sleep(begin);
        }
    }

    /// Waits until the epoch differs from `seen`. Who had no part in that one parks at once.
    fn next_epoch(&self, seen: Epoch, index: usize) -> Epoch {
        let spins = if index < seen.workers() { self.spins } else { 0 };
        let mut waited = 0;
        loop {
            let epoch = Epoch(self.epoch.0.load(Ordering::Acquire));
            if epoch != seen {
                return epoch;
            }
            if waited < spins {
                waited += 1;
                std::hint::spin_loop();
                continue;
            }
            let sleeping = &self.sleeping[index - 1].0;
            sleeping.store(true, Ordering::SeqCst);
            if self.epoch.0.load(Ordering::SeqCst) == seen.0 {
                std::thread::park();
            }
            sleeping.store(false, Ordering::Relaxed);
        }
    }
}

fn worker(shared: &Shared, index: usize) {
    let mut epoch = Epoch(0);
    loop {
        epoch = shared.next_epoch(epoch, index);
        if shared.shutdown.load(Ordering::Relaxed) {
            return;
        }
        if index >= epoch.workers() {
            continue;
        }
        // SAFETY: this worker has a part in the epoch, so the cell holds this run's job, which stays valid until we
        // decrement `remaining`.
        let job = unsafe { (*shared.job.get()).map(|job| &*job) };
        if let Some(job) = job
            && let Err(panic) = catch_unwind(AssertUnwindSafe(|| job(index)))
        {
            shared.panicked(&*panic);
        }
        // SeqCst with the caller's `caller_sleeps` store and its comparison: it sees the change or we see it asleep.
        if shared.remaining.0.fetch_sub(1, Ordering::SeqCst) == 1
            && shared.caller_sleeps.load(Ordering::SeqCst)
        {
            futex::wake(&shared.remaining.0);
        }
    }
}

/// The run of a pool without other workers: such callers need not take turns.
fn alone(f: &(dyn Fn(usize) + Sync)) -> Result<()> {
    catch_unwind(AssertUnwindSafe(|| f(0))).map_err(|p| Error::WorkerPanic { message: panic_text(&*p) })
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

    /// Runs of ever other numbers of workers, with pieces and barriers, some of them after workers went to sleep.
    #[test]
    fn the_number_of_workers_changes_from_run_to_run() {
        let most = 6;
        let pool = Pool::new(most).unwrap();
        let kind = Kind { step: "test", tokens: 1 };
        for round in 0..600 {
            let wanted = 1 + round * 7 % most;
            pool.fix_workers(Some(wanted));
            if round % 100 == 0 {
                std::thread::sleep(Duration::from_millis(5));
            }
            let each = 1 + round as u32 % 4;
            let counts: Vec<AtomicUsize> = (0..wanted * each as usize).map(|_| AtomicUsize::new(0)).collect();
            let phases = AtomicUsize::new(0);
            pool.step(kind, &|worker, workers| {
                assert_eq!(workers, wanted);
                for phase in 1..=3 {
                    while let Some(piece) = pool.pieces().take(worker, each) {
                        counts[piece as usize].fetch_add(1, Ordering::Relaxed);
                    }
                    phases.fetch_add(1, Ordering::Relaxed);
                    pool.barrier().wait(worker);
                    assert!(phases.load(Ordering::Relaxed) >= phase * workers);
                }
            })
            .unwrap();
            assert!(counts.iter().all(|c| c.load(Ordering::Relaxed) == 3), "{wanted} workers");
        }
        pool.fix_workers(None);
        pool.step(kind, &|_, workers| assert_eq!(workers, most)).unwrap();
    }

    /// A worker that comes when the others sleep wakes them.
    #[test]
    fn late_workers_are_slept_for() {
        let pool = Pool::new(4).unwrap();
        let nap = || std::thread::sleep(Duration::from_millis(1));
        for late in [0, 1, 3] {
            let before = pool.barrier().slept();
            pool.run(&|worker| {
                while worker == late && pool.barrier().slept() == before {
                    nap();
                }
                pool.barrier().wait(worker);
            })
            .unwrap();
        }
        for late in [1, 3] {
            // At the end of a run there is no barrier.
            pool.run(&|worker| {
                while worker == late && !pool.shared.caller_sleeps.load(Ordering::SeqCst) {
                    nap();
                }
            })
            .unwrap();
        }
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
