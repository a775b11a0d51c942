//! The worker pool: SPMD, persistent threads. `pool.run(f)` calls `f(worker)` once on every worker and
//! returns when all are done; the caller's thread is worker 0.
//!
//! Between runs workers spin for a while (a decode loop calls every few hundred microseconds), then park.
//! Inside a run they meet at [`Barrier`]s. Waiting spins first and then sleeps: another program has the core
//! of the worker that is waited for. Where that happens often, [`WorkerPool::run_step`] takes fewer workers,
//! as `worker_tuner` chooses. A panic on a worker is caught and returned as an error; it also opens the
//! barrier, so no worker waits for ever.
//!
//! Callers from several threads take turns in the order in which they come, whichever model their steps are
//! of.
//!
//! Invariants: at most one run at a time (the gate; few uncontended atomics when sessions do not share the
//! pool at the same moment); the job pointer is valid from the epoch's change until all workers of the run
//! have ended.

mod affinity;
mod barrier;
mod event_count;
mod futex;
mod ticket_mutex;
mod tree;
mod work_chunks;
mod worker_tuner;

use std::any::Any;
use std::cell::UnsafeCell;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::thread::{JoinHandle, Thread};
use std::time::Instant;

pub use affinity::CpuSet;
pub use barrier::Barrier;
pub use work_chunks::ChunkScheduler;
pub use worker_tuner::StepKind;

use event_count::{EventCount, EventWaiter};
use ticket_mutex::{TicketGuard, TicketMutex};
use worker_tuner::{StepTiming, WorkerCountTuner};

use crate::{Error, Result};

/// Keeps one atomic per pair of cache lines (the adjacent-line prefetcher fetches pairs).
#[repr(align(128))]
#[derive(Default)]
pub(crate) struct CachePadded<T>(pub T);

/// Pauses before a waiter sleeps. About 40 to 150 microseconds on current machines.
const SPINS: u32 = 1 << 12;
/// The same with more workers than cores, where spinning takes the time of those waited for.
const SPINS_CROWDED: u32 = 1 << 4;
type WorkerJob = *const (dyn Fn(usize) + Sync);

struct PoolShared {
    /// Fields that change from run to run, in the one line that workers wait for.
    current_run: CachePadded<CurrentRun>,
    /// The run that each worker, and all whom it leads, have ended last.
    finished: Vec<CachePadded<EventCount>>,
    parkers: Vec<CachePadded<WorkerParker>>,
    barrier: Barrier,
    chunks: ChunkScheduler,
    panic: Mutex<Option<String>>,
    shutdown: AtomicBool,
    spins: u32,
}

#[derive(Default)]
struct CurrentRun {
    /// The number of the run, and of the workers that take part ([`RunEpoch`]).
    epoch: AtomicU64,
    job: UnsafeCell<Option<WorkerJob>>,
}

/// The place where a worker sleeps between runs.
#[derive(Default)]
struct WorkerParker {
    /// Set by the worker before it sleeps for the first time.
    thread: OnceLock<Thread>,
    /// Set by the worker just before it parks.
    asleep: AtomicBool,
}

/// The number of a run in the upper half, how many workers it has in the lower.
#[derive(Clone, Copy, PartialEq, Eq)]
struct RunEpoch(u64);

impl RunEpoch {
    fn next(self, workers: usize) -> RunEpoch {
        RunEpoch((self.0 >> 32).wrapping_add(1) << 32 | workers as u64)
    }

    fn workers(self) -> usize {
        self.0 as u32 as usize
    }

    fn run_number(self) -> u32 {
        (self.0 >> 32) as u32
    }
}

// SAFETY: `job` is written by the gate's holder while no worker runs, and read by workers only between the
// epoch's change (Release/Acquire) and the raise of their `ended`; the pointee is Sync. Everything else is
// Sync.
unsafe impl Sync for PoolShared {}
// SAFETY: as above.
unsafe impl Send for PoolShared {}

/// The CPUs on which a worker runs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct WorkerAffinity {
    pub cpus: CpuSet,
    /// Number of the NUMA node of these CPUs.
    pub node: usize,
}

/// See the [module](self).
pub struct WorkerPool {
    shared: Arc<PoolShared>,
    threads: Vec<JoinHandle<()>>,
    /// Affinities of the workers, while they run; of all or of none.
    affinities: Vec<WorkerAffinity>,
    run_state: TicketMutex<RunState>,
    /// The start of its clock.
    started: Instant,
    /// The number of workers that steps are to have; 0 if the pool chooses.
    fixed_workers: AtomicUsize,
}

/// State that belongs to the running caller.
struct RunState {
    tuner: WorkerCountTuner,
    epoch: RunEpoch,
}

impl WorkerPool {
    /// A pool of `workers` (at least 1), of which the caller is one. The system chooses their CPUs.
    pub fn new(workers: usize) -> Result<Self> {
        Self::start(workers.max(1), Vec::new())
    }

    /// A pool with a worker on each of `places`, of which there is at least one. The caller of a run is the
    /// first worker; its thread goes back to its own CPUs at the end of each run.
    pub fn pinned(places: Vec<WorkerAffinity>) -> Result<Self> {
        Self::start(places.len().max(1), places)
    }

    fn start(workers: usize, places: Vec<WorkerAffinity>) -> Result<Self> {
        let cores = std::thread::available_parallelism().map_or(1, |n| n.get());
        let spins = if workers <= cores { SPINS } else { SPINS_CROWDED };
        let shared = Arc::new(PoolShared {
            current_run: CachePadded::default(),
            finished: (0..workers).map(|_| CachePadded::default()).collect(),
            parkers: (0..workers).map(|_| CachePadded::default()).collect(),
            barrier: Barrier::new(workers, spins),
            chunks: ChunkScheduler::new(workers),
            panic: Mutex::new(None),
            shutdown: AtomicBool::new(false),
            spins,
        });
        let mut pool = Self {
            shared,
            threads: Vec::new(),
            affinities: places,
            run_state: TicketMutex::new(RunState {
                tuner: WorkerCountTuner::new(workers),
                epoch: RunEpoch(0).next(workers),
            }),
            started: Instant::now(),
            fixed_workers: AtomicUsize::new(0),
        };
        for index in 0..workers {
            let place = |source| Error::Pinning { index, source };
            // A thread begins where the one is that starts it. The caller as well tries its place, to which
            // it will come.
            let _there =
                pool.affinities.get(index).map(|p| p.cpus.bind_thread()).transpose().map_err(place)?;
            if index == 0 {
                continue;
            }
            let shared = Arc::clone(&pool.shared);
            let spawned = std::thread::Builder::new()
                .name(format!("mlcc-worker-{index}"))
                .spawn(move || worker_loop(&shared, index))
                .map_err(|source| Error::Thread { index, source })?;
            pool.threads.push(spawned);
        }
        Ok(pool)
    }

    pub fn workers(&self) -> usize {
        self.threads.len() + 1
    }

    /// The CPUs of each worker; empty if the system chooses.
    pub fn affinities(&self) -> &[WorkerAffinity] {
        &self.affinities
    }

    /// The number of looks of a waiting worker before it sleeps.
    pub(crate) fn spins(&self) -> u32 {
        self.shared.spins
    }

    /// The barrier that all workers of a run share.
    pub fn barrier(&self) -> &Barrier {
        &self.shared.barrier
    }

    /// The scheduler of the work chunks that all workers of a run share.
    pub fn chunks(&self) -> &ChunkScheduler {
        &self.shared.chunks
    }

    /// Sets the number of workers from the next step on (at least 1, at most all); with `None` as many as
    /// suit.
    pub fn fix_workers(&self, workers: Option<usize>) {
        self.fixed_workers.store(workers.map_or(0, |n| n.clamp(1, self.workers())), Ordering::Relaxed);
    }

    /// Calls `f(worker)` on every worker. Not to be called from inside a run.
    pub fn run(&self, f: &(dyn Fn(usize) + Sync)) -> Result<()> {
        if self.threads.is_empty() {
            return self.run_alone(f);
        }
        self.run_workers(&mut self.run_state.lock(), self.workers(), f)
    }

    /// Calls `f(worker, workers)` on the first `most`, or on all if they are fewer.
    pub fn run_first(&self, most: usize, f: &(dyn Fn(usize, usize) + Sync)) -> Result<()> {
        if self.threads.is_empty() {
            return self.run_alone(&|worker| f(worker, 1));
        }
        let workers = self.workers().min(most.max(1));
        self.run_workers(&mut self.run_state.lock(), workers, &|worker| f(worker, workers))
    }

    /// Calls `f(worker, workers)` on as many workers as suit.
    pub fn run_suited(&self, f: &(dyn Fn(usize, usize) + Sync)) -> Result<()> {
        self.run_suited_first(usize::MAX, f)
    }

    /// Runs like [`WorkerPool::run_suited`], by at most `most` workers.
    pub fn run_suited_first(&self, most: usize, f: &(dyn Fn(usize, usize) + Sync)) -> Result<()> {
        if self.threads.is_empty() {
            return self.run_alone(&|worker| f(worker, 1));
        }
        let mut gate = self.run_state.lock();
        let workers = self.fixed_workers().unwrap_or(gate.tuner.best_workers()).min(most.max(1));
        self.run_workers(&mut gate, workers, &|worker| f(worker, workers))
    }

    /// Calls `f(worker, workers)` on as many workers as suit, at most `most`, and learns from how long it
    /// takes. Steps of one kind take about the same time by the same workers.
    pub fn run_step(&self, kind: StepKind, most: usize, f: &(dyn Fn(usize, usize) + Sync)) -> Result<()> {
        if self.threads.is_empty() {
            return self.run_alone(&|worker| f(worker, 1));
        }
        let mut gate = self.run_state.lock();
        let (wanted, suited) = (self.fixed_workers(), gate.tuner.workers());
        let workers = wanted.unwrap_or(suited).min(most.max(1));
        if wanted.is_some() || workers != suited {
            return self.run_workers(&mut gate, workers, &|worker| f(worker, workers));
        }
        let (begin, slept) = (self.now(), self.shared.barrier.slept_time());
        self.run_workers(&mut gate, workers, &|worker| f(worker, workers))?;
        let (end, slept) = (self.now(), self.shared.barrier.slept_time() - slept);
        gate.tuner.record_step(StepTiming { kind, end, time: end - begin, slept });
        Ok(())
    }

    fn fixed_workers(&self) -> Option<usize> {
        Some(self.fixed_workers.load(Ordering::Relaxed)).filter(|&n| n > 0)
    }

    /// Puts the caller's thread where worker 0 runs, until what is returned is dropped.
    fn pin_caller(&self) -> Option<affinity::AffinityGuard> {
        // It was there when the pool began; where the system refuses now, the run is as right elsewhere.
        self.affinities.first().and_then(|place| place.cpus.bind_thread().ok())
    }

    /// The run of a pool without other workers: such callers need not take turns.
    fn run_alone(&self, f: &(dyn Fn(usize) + Sync)) -> Result<()> {
        let _there = self.pin_caller();
        catch_unwind(AssertUnwindSafe(|| f(0))).map_err(|p| Error::WorkerPanic { message: panic_text(&*p) })
    }

    fn now(&self) -> u64 {
        self.started.elapsed().as_nanos() as u64
    }

    /// Calls `f` on the first `workers`.
    fn run_workers(
        &self,
        gate: &mut TicketGuard<'_, RunState>,
        workers: usize,
        f: &(dyn Fn(usize) + Sync),
    ) -> Result<()> {
        let shared = &*self.shared;
        let epoch = gate.epoch.next(workers);
        if workers != gate.epoch.workers() {
            shared.barrier.reset(workers);
            shared.chunks.reset(workers);
            // Who had no part in the last runs is as if it had.
            shared.finished.iter().for_each(|CachePadded(ended)| ended.set_count(gate.epoch.run_number()));
        }
        gate.epoch = epoch;
        let _there = self.pin_caller();
        if workers > 1 {
            shared.start_run(epoch, f);
        }
        if let Err(panic) = catch_unwind(AssertUnwindSafe(|| f(0))) {
            shared.record_panic(&*panic);
        }
        shared.finish_run(0, epoch);
        if !shared.barrier.is_broken() {
            return Ok(());
        }
        let panic = shared.panic.lock().unwrap_or_else(PoisonError::into_inner).take();
        match panic {
            None => Ok(()),
            Some(message) => {
                shared.barrier.reset(workers);
                shared.chunks.reset(workers);
                Err(Error::WorkerPanic { message })
            }
        }
    }
}

impl Drop for WorkerPool {
    fn drop(&mut self) {
        self.shared.shutdown.store(true, Ordering::Relaxed);
        // One more than the last run, without workers.
        let epoch = self.run_state.get_mut().epoch.next(0);
        self.shared.current_run.0.epoch.store(epoch.0, Ordering::SeqCst);
        self.threads.iter().for_each(|thread| thread.thread().unpark());
        for thread in self.threads.drain(..) {
            let _ = thread.join();
        }
    }
}

impl PoolShared {
    fn record_panic(&self, panic: &(dyn Any + Send)) {
        self.panic.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert_with(|| panic_text(panic));
        self.barrier.break_open();
    }

    /// Makes the other workers of `epoch` call `f`. The gate is held and the last run is over.
    fn start_run(&self, epoch: RunEpoch, f: &(dyn Fn(usize) + Sync)) {
        // SAFETY: the cell has no reader, since no run is going on. The lifetime is erased, but the pointer
        // is used only until all workers have ended, which the caller waits for (`end`) before it returns.
        unsafe {
            *self.current_run.0.job.get() =
                Some(std::mem::transmute::<&(dyn Fn(usize) + Sync), WorkerJob>(f));
        }
        self.current_run.0.epoch.store(epoch.0, Ordering::SeqCst);
        self.wake_children(0, epoch);
    }

    /// Wakes those whom a worker leads, who wake those whom they lead.
    fn wake_children(&self, index: usize, epoch: RunEpoch) {
        for child in tree::children(index, epoch.workers()) {
            let Some(CachePadded(bed)) = self.parkers.get(child) else { continue };
            // SeqCst with the worker's store, and with all looks at the epoch: either it sees the new one or
            // we see it asleep.
            if bed.asleep.load(Ordering::SeqCst)
                && let Some(thread) = bed.thread.get()
            {
                thread.unpark();
            }
        }
    }

    /// Waits until all whom a worker leads have ended the run, then says so, for itself too.
    fn finish_run(&self, index: usize, epoch: RunEpoch) {
        let mut waiter = EventWaiter { spins: self.spins, open: None, slept: self.barrier.sleep_counter() };
        for child in tree::children(index, epoch.workers()) {
            waiter.wait(&self.finished[child].0, epoch.run_number());
        }
        self.finished[index].0.raise_to(epoch.run_number());
    }

    /// Waits until the epoch differs from `seen`. Who had no part in that one parks at once.
    fn wait_for_epoch(&self, seen: RunEpoch, index: usize) -> RunEpoch {
        let CachePadded(bed) = &self.parkers[index];
        let mut spins = if index < seen.workers() { self.spins } else { 0 };
        loop {
            let epoch = RunEpoch(self.current_run.0.epoch.load(Ordering::SeqCst));
            if epoch != seen {
                return epoch;
            }
            if spins > 0 {
                spins -= 1;
                std::hint::spin_loop();
                continue;
            }
            bed.asleep.store(true, Ordering::SeqCst);
            if self.current_run.0.epoch.load(Ordering::SeqCst) == seen.0 {
                std::thread::park();
            }
            bed.asleep.store(false, Ordering::Relaxed);
        }
    }
}

fn worker_loop(shared: &PoolShared, index: usize) {
    shared.parkers[index].0.thread.get_or_init(std::thread::current);
    let mut epoch = RunEpoch(0);
    loop {
        epoch = shared.wait_for_epoch(epoch, index);
        if shared.shutdown.load(Ordering::Relaxed) {
            return;
        }
        if index >= epoch.workers() {
            continue;
        }
        shared.wake_children(index, epoch);
        // SAFETY: this worker has a part in the epoch, so the cell holds this run's job, which stays valid
        // until we have raised our `ended`.
        let job = unsafe { (*shared.current_run.0.job.get()).map(|job| &*job) };
        if let Some(job) = job
            && let Err(panic) = catch_unwind(AssertUnwindSafe(|| job(index)))
        {
            shared.record_panic(&*panic);
        }
        shared.finish_run(index, epoch);
    }
}

fn panic_text(panic: &(dyn Any + Send)) -> String {
    let text = panic.downcast_ref::<&str>().map(|s| s.to_string());
    text.or_else(|| panic.downcast_ref::<String>().cloned()).unwrap_or_else(|| "unknown cause".into())
}

#[cfg(test)]
mod tests;
