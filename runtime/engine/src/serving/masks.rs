//! Masks of grammars, computed beside the steps. A text whose mask takes long waits for it alone: steps go on with the others.

use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use crate::grammar::{Grammar, MaskLimits};
use crate::serving::scheduler::Scheduler;
use crate::serving::step::ModelRunner;
use crate::serving::writer::{RunningSequence, SequencePhase};
use crate::tokenizer::TokenId;

/// Most threads. They are started when they are needed, and texts with slow grammars have one of them together.
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
    usual: VecDeque<MaskJob>,
    slow: VecDeque<MaskJob>,
    running: Vec<RunningMask>,
    /// Grammars that know their masks, or why they have none.
    done: Vec<(u64, Grammar)>,
    /// Threads that wait for something to do.
    idle: usize,
    closed: bool,
}

impl MaskQueue {
    fn next(&mut self) -> Option<(MaskJob, bool)> {
        if let Some(task) = self.usual.pop_front() {
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

    fn run(&self) {
        let mut state = self.lock();
        while !state.closed {
            let Some((MaskJob { id, mut grammar, ends }, is_slow)) = state.next() else {
                state.idle += 1;
                state = self.work.wait(state).unwrap_or_else(PoisonError::into_inner);
                state.idle -= 1;
                continue;
            };
            state.running.push(RunningMask { id, is_slow, limits: grammar.limits() });
            drop(state);
            // An error comes again where the token is chosen, as a grammar does that a panic has left without a mask.
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

/// The engine's side. Without lent grammars nothing of it is locked.
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
    pub fn lend(&mut self, id: u64, grammar: Grammar, ends: &[TokenId]) -> Option<Grammar> {
        let state = self.shared.lock();
        let waiting = state.usual.len() + state.slow.len() + 1;
        let wanted = state.idle < waiting && self.threads.len() < MOST_THREADS;
        drop(state);
        if wanted {
            let shared = Arc::clone(&self.shared);
            let thread = std::thread::Builder::new().name("mlcc-masks".into()).spawn(move || shared.run());
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
            false => state.usual.push_back(task),
        }
        drop(state);
        self.shared.work.notify_one();
        None
    }

    /// Waits for all lent grammars, but no longer than `patience`, and gives back those that are there to `back`. Those that take longer
    /// than they may are ended.
    pub fn collect(&mut self, patience: Duration, back: &mut Vec<(u64, Grammar)>) {
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
    pub fn wait(&self, patience: Duration) {
        let state = self.shared.lock();
        if state.done.is_empty() && self.lent > 0 {
            drop(self.shared.done.wait_timeout(state, patience));
        }
    }

    /// Nobody wants the mask of a text any more.
    pub fn forget(&mut self, id: u64) {
        let mut state = self.shared.lock();
        state.running.iter().filter(|running| running.id == id).for_each(|running| running.limits.cancel());
        let waiting = state.usual.len() + state.slow.len();
        state.usual.retain(|task| task.id != id);
        state.slow.retain(|task| task.id != id);
        self.lent -= waiting - state.usual.len() - state.slow.len();
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
    pub fn lend_grammars(&mut self) {
        let (rows, masks) = (&self.round.rows, &mut self.masks);
        let chooses = |writer: &RunningSequence| match writer.phase {
            SequencePhase::Waiting { twin } => rows.iter().any(|row| row.id == twin && row.first),
            SequencePhase::Reading => rows.iter().any(|row| row.id == writer.id && row.first),
            SequencePhase::Writing => rows.iter().any(|row| row.id == writer.id),
            SequencePhase::Masking => false,
        };
        for writer in &mut self.writers {
            let is_open = |grammar: &Grammar| !grammar.is_prepared();
            if writer.text.grammar.as_ref().is_some_and(is_open)
                && chooses(writer)
                && let Some(grammar) = writer.text.grammar.take()
            {
                writer.text.grammar = masks.lend(writer.id, grammar, writer.text.eos());
                writer.masking = writer.text.grammar.is_none();
            }
        }
    }

    /// Gives grammars back to their texts, after waiting for all of them for a while.
    pub fn take_grammars(&mut self, patience: Duration) {
        self.masks.collect(patience, &mut self.round.grammars);
        for (id, grammar) in self.round.grammars.drain(..) {
            let mut texts = self.writers.iter_mut().chain(&mut self.parked);
            // A text that has ended needs none.
            if let Some(writer) = texts.find(|w| w.id == id) {
                writer.text.grammar = Some(grammar);
                writer.masking = false;
            }
        }
    }

    /// Texts choose that have waited for the masks of their grammars.
    pub fn choose_masked(&mut self) {
        if !self.writers.iter().any(|w| w.phase == SequencePhase::Masking) {
            return;
        }
        self.take_grammars(Duration::ZERO);
        let mut all: Vec<f32> = Vec::new();
        for writer in self.writers.iter_mut().filter(|w| w.phase == SequencePhase::Masking && !w.masking) {
            if let Some((logits, past)) = writer.held.take() {
                writer.chooses = Some((all.len()..all.len() + logits.len(), past));
                all.extend(logits);
            }
        }
        if !all.is_empty() {
            self.choose(Some(&all));
            self.end_all();
        }
    }
}
