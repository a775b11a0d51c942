//! State that an engine's thread shares with its callers.

use std::collections::{BTreeMap, VecDeque};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use mlcc_text::stop::StopMatcher;

use crate::sampler::Sampler;
use crate::serving::adapter::TextAdapter;
use crate::serving::request::{EngineRequest, EventSink, LaunchError, RequestFailure};

/// A request that has waited so long is as urgent as one of the next lower priority.
const AGEING: Duration = Duration::from_secs(10);
/// Clients whose turns are remembered, in addition to those that wait.
const MOST_CLIENTS: usize = 1024;

/// A request on its way.
pub(super) struct QueuedRequest {
    pub id: u64,
    /// An earlier one of the same prompt, launched together with this one: its state is taken when it has
    /// read the prompt.
    pub fork_of: Option<u64>,
    pub request: EngineRequest,
    pub sampler: Sampler,
    pub stops: StopMatcher,
    pub sink: EventSink,
    pub cancel: Arc<AtomicBool>,
    pub queued_at: Instant,
}

impl QueuedRequest {
    pub fn is_cancelled(&self) -> bool {
        self.cancel.load(Ordering::Relaxed)
    }

    pub fn is_past_deadline(&self) -> bool {
        self.request.deadline.is_some_and(|deadline| Instant::now() >= deadline)
    }
}

/// The contents of a slot.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct SlotInfo {
    /// The text that runs in it.
    pub running: Option<u64>,
    /// Tokens of its state, also of a sequence that has ended and may be continued.
    pub tokens: usize,
}

/// Commands to the thread between two steps.
pub(super) enum EngineCommand {
    /// A small step without a request.
    WarmUp(Sender<Result<(), RequestFailure>>),
    /// Drops the states of an adapter that no sequence runs with.
    ForgetAdapter(TextAdapter, Sender<()>),
}

/// The memory of caches, in blocks.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct CacheUsage {
    /// Tokens of a block.
    pub block_tokens: usize,
    /// The number of blocks that the slots may have together.
    pub blocks: usize,
    /// Blocks of running sequences. Blocks of other states are given up when they are needed.
    pub used: usize,
}

/// The present work of an engine, and counts of its work so far.
#[derive(Debug, Clone, Default)]
pub struct EngineStats {
    pub waiting: usize,
    pub running: usize,
    pub slots: Vec<SlotInfo>,
    /// The caches, if the model has any.
    pub cache: Option<CacheUsage>,
    /// Since the start.
    pub prompt_tokens: u64,
    pub cached_tokens: u64,
    pub written_tokens: u64,
    /// Tokens of drafts, and how many of them were right.
    pub drafted_tokens: u64,
    pub accepted_tokens: u64,
    pub finished: u64,
    pub failed: u64,
    pub cancelled: u64,
    pub steps: u64,
    /// Texts that were put back since there was no memory to go on with them.
    pub preempted: u64,
    /// Kept states that could not be copied or restored, so that a prompt is read again, and why the last of
    /// them could not.
    pub prefixes_lost: u64,
    pub prefix_loss_reason: Option<String>,
    /// Time of all steps.
    pub busy_time: Duration,
}

#[derive(Default)]
struct QueueState {
    /// Requests in the order of their launch.
    requests: VecDeque<QueuedRequest>,
    /// The last turn of each client, counted in turns.
    last_turns: BTreeMap<u64, u64>,
    turn_count: u64,
    next_id: u64,
    /// Launched and not ended.
    in_flight: usize,
    /// No more requests are taken.
    closed: bool,
    /// All texts are to end.
    abandoned: bool,
    /// Commands in their order.
    commands: Vec<EngineCommand>,
    stats: EngineStats,
}

impl QueueState {
    /// The next request: the most urgent, of equally urgent ones that of the client whose last turn was
    /// longest ago, and of these the oldest.
    fn next_index(&self, now: Instant) -> Option<usize> {
        let key = |(index, job): (usize, &QueuedRequest)| {
            let aged = now.saturating_duration_since(job.queued_at).as_secs() / AGEING.as_secs();
            let level = job.request.priority.saturating_sub(i64::try_from(aged).unwrap_or(i64::MAX));
            (level, self.last_turns.get(&job.request.client).copied().unwrap_or(0), index)
        };
        self.requests.iter().enumerate().map(key).min().map(|(_, _, index)| index)
    }

    fn take_next(&mut self, now: Instant) -> Option<QueuedRequest> {
        let job = self.next_index(now).and_then(|index| self.requests.remove(index))?;
        self.turn_count += 1;
        self.last_turns.insert(job.request.client, self.turn_count);
        if self.last_turns.len() > MOST_CLIENTS {
            let jobs = &self.requests;
            self.last_turns.retain(|client, _| jobs.iter().any(|job| job.request.client == *client));
        }
        Some(job)
    }
}

/// Waiting requests, of a bounded number.
pub(super) struct RequestQueue {
    state: Mutex<QueueState>,
    changed: Condvar,
    /// Texts that run together.
    slots: usize,
    /// Texts that may wait.
    max_waiting: usize,
}

impl RequestQueue {
    pub fn new(slots: usize, max_waiting: usize) -> Self {
        RequestQueue { state: Mutex::default(), changed: Condvar::new(), slots, max_waiting }
    }

    fn lock(&self) -> MutexGuard<'_, QueueState> {
        // Nothing that runs under the lock can panic half way.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes all requests or none. Their ids and forks count from 0; they are made unique here.
    pub fn push(&self, jobs: Vec<QueuedRequest>) -> Result<(), LaunchError> {
        let mut state = self.lock();
        if state.closed {
            return Err(LaunchError::Closed);
        }
        if state.in_flight + jobs.len() > self.slots + self.max_waiting {
            let waiting = state.in_flight.saturating_sub(self.slots);
            return Err(LaunchError::QueueFull { waiting, max: self.max_waiting });
        }
        let first = state.next_id;
        state.next_id += jobs.len() as u64;
        state.in_flight += jobs.len();
        state.requests.extend(jobs.into_iter().map(|job| QueuedRequest {
            id: first + job.id,
            fork_of: job.fork_of.map(|twin| first + twin),
            ..job
        }));
        drop(state);
        self.changed.notify_all();
        Ok(())
    }

    /// Sends a command; `None` if the thread has ended.
    pub fn send_command<T>(&self, ask: impl FnOnce(Sender<T>) -> EngineCommand) -> Option<Receiver<T>> {
        let (sender, receiver) = channel();
        let mut state = self.lock();
        if state.closed {
            return None;
        }
        state.commands.push(ask(sender));
        drop(state);
        self.changed.notify_all();
        Some(receiver)
    }

    pub fn take_commands(&self) -> Vec<EngineCommand> {
        std::mem::take(&mut self.lock().commands)
    }

    /// True if nothing will come any more.
    pub fn is_drained(&self) -> bool {
        let state = self.lock();
        state.closed && state.requests.is_empty() && state.commands.is_empty()
    }

    /// The next job. With `wait` it waits for one, or for something else to do.
    pub fn pop(&self, wait: bool) -> Option<QueuedRequest> {
        let mut state = self.lock();
        while wait && state.requests.is_empty() && state.commands.is_empty() && !state.closed {
            state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
        state.take_next(Instant::now())
    }

    /// Waits until `until` for a job, or for the end of the queue; whether there is one of them.
    pub fn wait_for_work(&self, until: Instant) -> bool {
        let mut state = self.lock();
        loop {
            if !state.requests.is_empty() || !state.commands.is_empty() || state.closed {
                return true;
            }
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return false;
            }
            state = self.changed.wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    /// Requests in the queue that are to be ended before they start.
    pub fn take_ended(&self) -> Vec<QueuedRequest> {
        let mut state = self.lock();
        let all = state.abandoned;
        let ended = |job: &QueuedRequest| all || job.is_cancelled() || job.is_past_deadline();
        if !state.requests.iter().any(ended) {
            return Vec::new();
        }
        let (out, left): (Vec<QueuedRequest>, Vec<QueuedRequest>) =
            std::mem::take(&mut state.requests).into_iter().partition(ended);
        state.requests = left.into();
        out
    }

    /// A text has ended.
    pub fn count_ended(&self) {
        let mut state = self.lock();
        state.in_flight = state.in_flight.saturating_sub(1);
        drop(state);
        self.changed.notify_all();
    }

    /// All texts that ran have ended, whatever happened to them.
    pub fn count_all_ended(&self) {
        let mut state = self.lock();
        state.in_flight = state.requests.len();
        drop(state);
        self.changed.notify_all();
    }

    pub fn close(&self) {
        self.lock().closed = true;
        self.changed.notify_all();
    }

    pub fn abandon_all(&self) {
        self.lock().abandoned = true;
    }

    pub fn is_abandoned(&self) -> bool {
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

    pub fn update_stats(&self, change: impl FnOnce(&mut EngineStats)) {
        change(&mut self.lock().stats);
    }

    pub fn stats(&self) -> EngineStats {
        let state = self.lock();
        EngineStats { waiting: state.requests.len(), ..state.stats.clone() }
    }

    /// The thread has ended: waiting requests will not be done.
    pub fn close_after_thread(&self) {
        let mut state = self.lock();
        state.closed = true;
        state.in_flight = 0;
        state.commands.clear();
        let jobs = std::mem::take(&mut state.requests);
        drop(state);
        // Dropped sinks tell their receivers.
        drop(jobs);
        self.changed.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sampler::SamplingParams;
    use std::ops::ControlFlow;

    /// A request of a client, launched some seconds ago.
    fn job(id: u64, client: u64, priority: i64, ago: u64, now: Instant) -> QueuedRequest {
        let request =
            EngineRequest { client, priority, ..EngineRequest::new(vec![1], SamplingParams::greedy()) };
        QueuedRequest {
            id,
            fork_of: None,
            request,
            sampler: Sampler::new(SamplingParams::greedy(), 2).unwrap(),
            stops: StopMatcher::new(&[]).unwrap(),
            sink: Box::new(|_| ControlFlow::Continue(())),
            cancel: Arc::default(),
            queued_at: now - Duration::from_secs(ago),
        }
    }

    /// Ids in the order in which they begin.
    fn order(jobs: &[(u64, i64, u64)]) -> Vec<u64> {
        let now = Instant::now() + Duration::from_secs(1000);
        let mut state = QueueState::default();
        let of = |(id, &(client, priority, ago))| job(id as u64, client, priority, ago, now);
        state.requests.extend(jobs.iter().enumerate().map(of));
        std::iter::from_fn(|| state.take_next(now)).map(|job| job.id).collect()
    }

    #[test]
    fn the_order_of_waiting_requests() {
        assert_eq!(order(&[(0, 0, 3), (0, 0, 2), (0, 0, 1)]), [0, 1, 2], "first come, first served");
        assert_eq!(
            order(&[(1, 0, 3), (1, 0, 3), (1, 0, 3), (2, 0, 2), (3, 0, 1), (2, 0, 0)]),
            [0, 3, 4, 1, 5, 2]
        );
        assert_eq!(order(&[(0, 5, 2), (0, -1, 1), (0, 0, 0)]), [1, 2, 0], "lower numbers begin first");
        assert_eq!(order(&[(0, 2, 31), (0, 0, 0), (0, 1, 5)]), [0, 1, 2], "who waits long becomes urgent");
        assert_eq!(order(&[(0, i64::MAX, 0), (0, i64::MIN, 900)]), [1, 0]);
    }

    #[test]
    fn turns_are_remembered_of_a_bounded_number_of_clients() {
        let now = Instant::now() + Duration::from_secs(1000);
        let mut state = QueueState::default();
        for client in 0..3000 {
            state.requests.push_back(job(client, client, 0, 0, now));
            assert_eq!(state.take_next(now).map(|job| job.id), Some(client));
            assert!(state.last_turns.len() <= MOST_CLIENTS);
        }
    }
}
