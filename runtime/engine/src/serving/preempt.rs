//! Preemption, when sequences have used up their memory: states without a running sequence are dropped first,
//! then the newest sequence is preempted. It goes on when another has ended: its computed tokens are
//! prefilled again, and its sampler and its text are as they were.

use crate::serving::model_runner::ModelRunner;
use crate::serving::request::RequestFailure;
use crate::serving::running_sequence::{RunningSequence, SequencePhase};
use crate::serving::scheduler::{Scheduler, model_failure};
use crate::serving::slots::PrefixQuery;

impl<M: ModelRunner + 'static> Scheduler<'_, M> {
    /// Plans the next step, and makes sure that there is memory for the rows that it has, and for no others.
    pub fn schedule_within_memory(&mut self) {
        let before = self.iteration.last_isolated();
        self.slots.trim_to_budget(&self.model);
        loop {
            self.schedule_rows();
            if self.reserve_memory() {
                break;
            }
            self.iteration.restore_isolated(before);
        }
        if self.draft_tokens() {
            // Pieces of prompts are no longer beside rows of drafts, which have their memory.
            self.iteration.restore_isolated(before);
            self.schedule_rows();
        }
    }

    /// True if there is memory for the rows of the plan. If not, something has given way, and there is
    /// another plan to make.
    fn reserve_memory(&mut self) -> bool {
        for row in &self.iteration.rows {
            let Some(sequence) = self.slots.slots[row.slot].sequence.as_mut() else { continue };
            match (self.model.reserve(sequence, row.token_count), row.id) {
                (Ok(true), _) => continue,
                (Ok(false), id) => {
                    if !self.slots.evict_least_recent(&self.model) {
                        self.preempt_newest(id);
                    }
                }
                (Err(error), id) => self.end_sequence(id, Err(model_failure(error))),
            }
            return false;
        }
        true
    }

    /// Puts the newest text back, or ends `id` if there is no other.
    fn preempt_newest(&mut self, id: u64) {
        let mut active =
            self.running.iter().enumerate().filter(|(_, w)| needs_memory(w)).map(|(index, _)| index);
        match (active.next(), active.next_back()) {
            (Some(_), Some(newest)) => self.preempt(newest),
            _ => {
                let reason = "no memory is left for this sequence, and no other sequence can be preempted";
                self.end_sequence(id, Err(RequestFailure::Model(reason.into())));
            }
        }
    }

    /// True if another sequence than `id` has memory that it will give back.
    pub fn can_preempt_another(&self, id: u64) -> bool {
        self.running.iter().any(|w| w.id != id && needs_memory(w))
    }

    /// The text that was admitted last waits for memory, behind all others that do.
    pub fn preempt_last_admitted(&mut self) {
        let Some(mut writer) = self.running.pop() else { return };
        writer.restart_prefill();
        self.preempted.insert(0, writer);
        self.has_freed_memory = false;
        self.queue.update_stats(|stats| stats.preempted += 1);
    }

    /// Puts texts back that memory was refused to.
    pub fn preempt_all(&mut self, ids: &[u64]) {
        for id in ids {
            if let Some(index) = self.running.iter().position(|w| w.id == *id) {
                self.preempt(index);
            }
        }
    }

    fn preempt(&mut self, index: usize) {
        let mut writer = self.running.remove(index);
        self.slots.discard_slot(writer.slot);
        writer.restart_prefill();
        self.preempted.push(writer);
        self.has_freed_memory = false;
        self.queue.update_stats(|stats| stats.preempted += 1);
    }

    /// Goes on with texts that were put back, the oldest first, if others have ended or none can go on.
    pub fn resume_preempted(&mut self) {
        while self.slots.has_free() && (self.has_freed_memory || !self.running.iter().any(needs_memory)) {
            let Some(mut writer) = self.preempted.pop() else { break };
            let read = writer.prefill_len();
            let most = self.max_cached_tokens(&writer.request, read);
            let (id, is_new) = (writer.id, writer.awaits_first_token());
            let adapter = writer.request.adapter.as_ref();
            let wanted =
                PrefixQuery { adapter, prompt: &writer.generation.tokens()[..read], max_tokens: most };
            match self.slots.admit_request(&self.model, id, &wanted) {
                Ok(Some(start)) => {
                    writer.slot = start.slot;
                    if start.cached == read && !is_new {
                        writer.phase = SequencePhase::Decode;
                    }
                    self.running.push(writer);
                    let logits = start.logits.filter(|_| is_new);
                    self.iteration.cached_prompts.extend(logits.map(|logits| (id, logits)));
                }
                Ok(None) => {
                    self.preempted.push(writer);
                    break;
                }
                Err(error) => {
                    self.preempted.push(writer);
                    if self.model.is_out_of_memory(&error) && self.can_preempt_another(id) {
                        break;
                    }
                    self.remove_sequence(id, Err(model_failure(error)));
                }
            }
        }
        self.has_freed_memory = false;
    }
}

/// True if a sequence needs memory for the next step.
fn needs_memory(writer: &RunningSequence<'_>) -> bool {
    !matches!(writer.phase, SequencePhase::WaitingForPrefix { .. })
}
