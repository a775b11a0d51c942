//! What an engine's thread and those who ask it share.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use crate::sampler::Sampler;
use crate::serving::request::{LaunchError, Sink, TextRequest};
use crate::stop::StopMatcher;

/// A request on its way.
pub(super) struct Job {
    pub id: u64,
    /// An earlier one of the same prompt, launched together with this one: its state is taken when it has read the prompt.
    pub twin: Option<u64>,
    pub request: TextRequest,
    pub sampler: Sampler,
    pub stops: StopMatcher,
    pub sink: Sink,
    pub cancel: Arc<AtomicBool>,
    pub launched: Instant,
}

impl Job {
    pub fn cancelled(&self) -> bool {
        self.cancel.load(Ordering::Relaxed)
    }

    pub fn too_late(&self) -> bool {
        self.request.deadline.is_some_and(|deadline| Instant::now() >= deadline)
    }
}

/// What a place for a running text holds.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct SlotInfo {
    /// The text that runs in it.
    pub running: Option<u64>,
    /// Tokens of its state, also of a text that has ended and may be gone on with.
    pub tokens: usize,
}

/// What an engine does and has done.
#[derive(Debug, Clone, Default)]
pub struct Stats {
    pub waiting: usize,
    pub running: usize,
    pub slots: Vec<SlotInfo>,
    /// Since the start.
    pub prompt_tokens: u64,
    pub cached_tokens: u64,
    pub written_tokens: u64,
    pub finished: u64,
    pub failed: u64,
    pub cancelled: u64,
    pub steps: u64,
    /// Of steps, in all.
    pub busy: Duration,
}

#[derive(Default)]
struct State {
    jobs: VecDeque<Job>,
    next_id: u64,
    /// Launched and not ended.
    in_flight: usize,
    /// No more requests are taken.
    closed: bool,
    /// All texts are to end.
    abandoned: bool,
    stats: Stats,
}

/// Requests in the order of their launch, of a bounded number.
pub(super) struct Queue {
    state: Mutex<State>,
    changed: Condvar,
    /// Texts that run together.
    slots: usize,
    /// Texts that may wait.
    most: usize,
}

impl Queue {
    pub fn new(slots: usize, most: usize) -> Self {
        Queue { state: Mutex::default(), changed: Condvar::new(), slots, most }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        // Nothing that runs under the lock can panic half way.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes all jobs or none. Their ids and twins count from 0; they are made unique here.
    pub fn push(&self, jobs: Vec<Job>) -> Result<(), LaunchError> {
        let mut state = self.lock();
        if state.closed {
            return Err(LaunchError::Closed);
        }
        if state.in_flight + jobs.len() > self.slots + self.most {
            let waiting = state.in_flight.saturating_sub(self.slots);
            return Err(LaunchError::QueueFull { waiting, most: self.most });
        }
        let first = state.next_id;
        state.next_id += jobs.len() as u64;
        state.in_flight += jobs.len();
        state.jobs.extend(jobs.into_iter().map(|job| Job {
            id: first + job.id,
            twin: job.twin.map(|twin| first + twin),
            ..job
        }));
        drop(state);
        self.changed.notify_all();
        Ok(())
    }

    /// The oldest job. With `wait` it waits for one; `None` then means that none will come.
    pub fn pop(&self, wait: bool) -> Option<Job> {
        let mut state = self.lock();
        while wait && state.jobs.is_empty() && !state.closed {
            state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
        state.jobs.pop_front()
    }

    /// Jobs in the queue that are to be ended without having begun.
    pub fn take_ended(&self) -> Vec<Job> {
        let mut state = self.lock();
        let all = state.abandoned;
        let ended = |job: &Job| all || job.cancelled() || job.too_late();
        if !state.jobs.iter().any(ended) {
            return Vec::new();
        }
        let (out, left): (Vec<Job>, Vec<Job>) = std::mem::take(&mut state.jobs).into_iter().partition(ended);
        state.jobs = left.into();
        out
    }

    /// A text has ended.
    pub fn ended(&self) {
        let mut state = self.lock();
        state.in_flight = state.in_flight.saturating_sub(1);
        drop(state);
        self.changed.notify_all();
    }

    /// All texts that ran have ended, whatever happened to them.
    pub fn all_ended(&self) {
        let mut state = self.lock();
        state.in_flight = state.jobs.len();
        drop(state);
        self.changed.notify_all();
    }

    pub fn close(&self) {
        self.lock().closed = true;
        self.changed.notify_all();
    }

    pub fn abandon(&self) {
        self.lock().abandoned = true;
    }

    pub fn abandoned(&self) -> bool {
        self.lock().abandoned
    }

    /// Waits until no text runs or waits; false if that takes longer.
    pub fn wait_idle(&self, timeout: Duration) -> bool {
        let end = Instant::now() + timeout;
        let mut state = self.lock();
        while state.in_flight > 0 {
            let left = end.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return false;
            }
            let waited = self.changed.wait_timeout(state, left);
            state = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
        true
    }

    pub fn update(&self, change: impl FnOnce(&mut Stats)) {
        change(&mut self.lock().stats);
    }

    pub fn stats(&self) -> Stats {
        let state = self.lock();
        Stats { waiting: state.jobs.len(), ..state.stats.clone() }
    }

    /// The thread is gone: whatever waits will not be done.
    pub fn thread_ended(&self) {
        let mut state = self.lock();
        state.closed = true;
        state.in_flight = 0;
        let jobs = std::mem::take(&mut state.jobs);
        drop(state);
        // Dropped sinks tell their receivers.
        drop(jobs);
        self.changed.notify_all();
    }
}
