//! Masks of grammars, computed beside the steps. A text whose mask takes long waits for it alone: steps go on
//! with the others.

use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use mlcc_text::grammar::MaskLimits;
use mlcc_text::{Grammar, TokenId};

use crate::serving::model_runner::ModelRunner;
use crate::serving::running_sequence::{RunningSequence, SequencePhase};
use crate::serving::scheduler::Scheduler;

/// Most threads. They are started when they are needed, and texts with slow grammars have one of them
/// together.
const MOST_THREADS: usize = 4;

/// A grammar on its way to its next mask.
struct MaskJob {
    id: u64,
    grammar: Grammar,
    ends: Vec<TokenId>,
}

/// A mask that is being computed.
struct RunningMask {
    id: u64,
    is_slow: bool,
    limits: MaskLimits,
}

#[derive(Default)]
struct MaskQueue {
    fast: VecDeque<MaskJob>,
    slow: VecDeque<MaskJob>,
    running: Vec<RunningMask>,
    /// Grammars that know their masks, or why they have none.
    done: Vec<(u64, Grammar)>,
    /// Threads that wait for something to do.
    idle: usize,
    closed: bool,
}

impl MaskQueue {
    fn next_job(&mut self) -> Option<(MaskJob, bool)> {
        if let Some(task) = self.fast.pop_front() {
            return Some((task, false));
        }
        if self.running.iter().any(|running| running.is_slow) {
            return None;
        }
        self.slow.pop_front().map(|task| (task, true))
    }
}

#[derive(Default)]
struct SharedMaskQueue {
    state: Mutex<MaskQueue>,
    /// There is something to do.
    work: Condvar,
    /// A mask is there.
    done: Condvar,
}

impl SharedMaskQueue {
    fn lock(&self) -> MutexGuard<'_, MaskQueue> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn run_worker(&self) {
        let mut state = self.lock();
        while !state.closed {
            let Some((MaskJob { id, mut grammar, ends }, is_slow)) = state.next_job() else {
                state.idle += 1;
                state = self.work.wait(state).unwrap_or_else(PoisonError::into_inner);
                state.idle -= 1;
                continue;
            };
            state.running.push(RunningMask { id, is_slow, limits: grammar.limits() });
            drop(state);
            // An error comes again where the token is chosen, as a grammar does that a panic has left without
            // a mask.
            let _ = catch_unwind(AssertUnwindSafe(|| grammar.prepare(&ends)));
            state = self.lock();
            state.running.retain(|running| running.id != id);
            state.done.push((id, grammar));
            self.done.notify_all();
            if is_slow {
                self.work.notify_one();
            }
        }
    }
}

/// The engine's side. Nothing of it is locked while no grammar is lent.
#[derive(Default)]
pub(super) struct MaskWorkers {
    shared: Arc<SharedMaskQueue>,
    threads: Vec<JoinHandle<()>>,
    lent: usize,
}

impl MaskWorkers {
    /// Tells if no grammar is on its way.
    pub fn is_idle(&self) -> bool {
        self.lent == 0
    }

    /// Takes the grammar of a text, to compute its mask; gives it back if there is no thread for that.
    pub fn start_mask(&mut self, id: u64, grammar: Grammar, ends: &[TokenId]) -> Option<Grammar> {
        let state = self.shared.lock();
        let waiting = state.fast.len() + state.slow.len() + 1;
        let wanted = state.idle < waiting && self.threads.len() < MOST_THREADS;
        drop(state);
        if wanted {
            let shared = Arc::clone(&self.shared);
            let thread =
                std::thread::Builder::new().name("mlcc-masks".into()).spawn(move || shared.run_worker());
            self.threads.extend(thread);
        }
        if self.threads.is_empty() {
            return Some(grammar);
        }
        self.lent += 1;
        let mut state = self.shared.lock();
        let task = MaskJob { id, ends: ends.to_vec(), grammar };
        match task.grammar.is_slow() {
            true => state.slow.push_back(task),
            false => state.fast.push_back(task),
        }
        drop(state);
        self.shared.work.notify_one();
        None
    }

    /// Waits for all lent grammars, but no longer than `patience`, and gives back those that are there to
    /// `back`. Grammars that take longer than they may are ended.
    pub fn collect_masks(&mut self, patience: Duration, back: &mut Vec<(u64, Grammar)>) {
        if self.is_idle() {
            return;
        }
        let end = Instant::now() + patience;
        let mut state = self.shared.lock();
        loop {
            let now = Instant::now();
            state.running.iter().for_each(|running| running.limits.enforce(now));
            self.lent -= state.done.len();
            back.append(&mut state.done);
            let left = end.saturating_duration_since(now);
            if self.lent == 0 || left.is_zero() {
                return;
            }
            state = self.shared.done.wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    /// Waits for one of the lent grammars, but no longer than `patience`.
    pub fn wait_for_mask(&self, patience: Duration) {
        let state = self.shared.lock();
        if state.done.is_empty() && self.lent > 0 {
            drop(self.shared.done.wait_timeout(state, patience));
        }
    }

    /// The mask of a text is no longer needed.
    pub fn cancel_mask(&mut self, id: u64) {
        let mut state = self.shared.lock();
        state.running.iter().filter(|running| running.id == id).for_each(|running| running.limits.cancel());
        let waiting = state.fast.len() + state.slow.len();
        state.fast.retain(|task| task.id != id);
        state.slow.retain(|task| task.id != id);
        self.lent -= waiting - state.fast.len() - state.slow.len();
    }
}

impl Drop for MaskWorkers {
    fn drop(&mut self) {
        let mut state = self.shared.lock();
        state.closed = true;
        state.running.iter().for_each(|running| running.limits.cancel());
        drop(state);
        self.shared.work.notify_all();
        for thread in self.threads.drain(..) {
            // Its panics were caught.
            let _ = thread.join();
        }
    }
}

impl<M: ModelRunner + 'static> Scheduler<'_, M> {
    /// Takes the grammars of texts that will choose a token, so that their masks can be computed meanwhile.
    pub fn start_masks(&mut self) {
        let (rows, masks) = (&self.iteration.rows, &mut self.masks);
        let chooses = |writer: &RunningSequence| match writer.phase {
            SequencePhase::WaitingForPrefix { fork_of: twin } => {
                rows.iter().any(|row| row.id == twin && row.samples_first)
            }
            SequencePhase::Prefill => rows.iter().any(|row| row.id == writer.id && row.samples_first),
            SequencePhase::Decode => rows.iter().any(|row| row.id == writer.id),
            SequencePhase::WaitingForMask => false,
        };
        for writer in &mut self.running {
            let is_open = |grammar: &Grammar| !grammar.is_prepared();
            if writer.generation.grammar.as_ref().is_some_and(is_open)
                && chooses(writer)
                && let Some(grammar) = writer.generation.grammar.take()
            {
                writer.generation.grammar = masks.start_mask(writer.id, grammar, writer.generation.eos());
                writer.mask_pending = writer.generation.grammar.is_none();
            }
        }
    }

    /// Gives grammars back to their texts, after waiting for all of them for a while.
    pub fn collect_masks(&mut self, patience: Duration) {
        self.masks.collect_masks(patience, &mut self.iteration.grammars);
        for (id, grammar) in self.iteration.grammars.drain(..) {
            let mut texts = self.running.iter_mut().chain(&mut self.preempted);
            // A text that has ended needs none.
            if let Some(writer) = texts.find(|w| w.id == id) {
                writer.generation.grammar = Some(grammar);
                writer.mask_pending = false;
            }
        }
    }

    /// Texts choose that have waited for the masks of their grammars.
    pub fn sample_masked(&mut self) {
        if !self.running.iter().any(|w| w.phase == SequencePhase::WaitingForMask) {
            return;
        }
        self.collect_masks(Duration::ZERO);
        let mut all: Vec<f32> = Vec::new();
        for writer in
            self.running.iter_mut().filter(|w| w.phase == SequencePhase::WaitingForMask && !w.mask_pending)
        {
            if let Some((logits, past)) = writer.held_logits.take() {
                writer.sampling_rows = Some((all.len()..all.len() + logits.len(), past));
                all.extend(logits);
            }
        }
        if !all.is_empty() {
            self.sample_tokens(Some(&all));
            self.end_finished();
        }
    }
}
