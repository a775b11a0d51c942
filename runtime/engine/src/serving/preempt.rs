//! What happens when sequences have used up their memory: states that nobody runs in go first, then the newest text is put back. It goes
//! on when another has ended: what it was fed is read again, and its sampler and its text are as they were.

use crate::serving::prefixes::PrefixQuery;
use crate::serving::request::RequestFailure;
use crate::serving::scheduler::{Scheduler, model_failure};
use crate::serving::step::ModelRunner;
use crate::serving::writer::{RunningSequence, SequencePhase};

impl<M: ModelRunner + 'static> Scheduler<'_, M> {
    /// Plans the next step, and makes sure that there is memory for the rows that it has, and for no others.
    pub fn plan_with_room(&mut self) {
        let before = self.round.turn();
        self.slots.trim(&self.model);
        loop {
            self.plan();
            if self.make_room() {
                break;
            }
            self.round.take_turn_back(before);
        }
        if self.draft() {
            // Pieces of prompts are no longer beside rows of drafts, which have their memory.
            self.round.take_turn_back(before);
            self.plan();
        }
    }

    /// Whether there is memory for the rows of the plan. If not, something has given way, and there is another plan to make.
    fn make_room(&mut self) -> bool {
        for row in &self.round.rows {
            let Some(sequence) = self.slots.slots[row.slot].sequence.as_mut() else { continue };
            match (self.model.reserve(sequence, row.count), row.id) {
                (Ok(true), _) => continue,
                (Ok(false), id) => {
                    if !self.slots.drop_idle(&self.model) {
                        self.put_newest_back(id);
                    }
                }
                (Err(error), id) => self.end(id, Err(model_failure(error))),
            }
            return false;
        }
        true
    }

    /// Puts the newest text back, or ends `id` if there is no other.
    fn put_newest_back(&mut self, id: u64) {
        let mut active =
            self.writers.iter().enumerate().filter(|(_, w)| is_active(w)).map(|(index, _)| index);
        match (active.next(), active.next_back()) {
            (Some(_), Some(newest)) => self.park(newest),
            _ => {
                let reason = "there is no memory left for this text, and no other text could give way";
                self.end(id, Err(RequestFailure::Model(reason.into())));
            }
        }
    }

    /// Whether another text than `id` has memory that it will give back.
    pub fn is_another_active(&self, id: u64) -> bool {
        self.writers.iter().any(|w| w.id != id && is_active(w))
    }

    /// The text that was admitted last waits for memory, behind all others that do.
    pub fn put_off(&mut self) {
        let Some(mut writer) = self.writers.pop() else { return };
        writer.read_again();
        self.parked.insert(0, writer);
        self.has_left = false;
        self.queue.update(|stats| stats.preempted += 1);
    }

    /// Puts texts back that memory was refused to.
    pub fn park_all(&mut self, ids: &[u64]) {
        for id in ids {
            if let Some(index) = self.writers.iter().position(|w| w.id == *id) {
                self.park(index);
            }
        }
    }

    fn park(&mut self, index: usize) {
        let mut writer = self.writers.remove(index);
        self.slots.lose(writer.slot);
        writer.read_again();
        self.parked.push(writer);
        self.has_left = false;
        self.queue.update(|stats| stats.preempted += 1);
    }

    /// Goes on with texts that were put back, the oldest first, if others have ended or none can go on.
    pub fn resume(&mut self) {
        while self.slots.has_free() && (self.has_left || !self.writers.iter().any(is_active)) {
            let Some(mut writer) = self.parked.pop() else { break };
            let read = writer.to_read();
            let most = self.most_cached(&writer.request, read);
            let (id, is_new) = (writer.id, writer.is_new());
            let adapter = writer.request.adapter.as_ref();
            let wanted = PrefixQuery { adapter, prompt: &writer.text.tokens()[..read], most };
            match self.slots.admit(&self.model, id, &wanted) {
                Ok(Some(start)) => {
                    writer.slot = start.slot;
                    if start.cached == read && !is_new {
                        writer.phase = SequencePhase::Writing;
                    }
                    self.writers.push(writer);
                    let logits = start.logits.filter(|_| is_new);
                    self.round.known.extend(logits.map(|logits| (id, logits)));
                }
                Ok(None) => {
                    self.parked.push(writer);
                    break;
                }
                Err(error) => {
                    self.parked.push(writer);
                    if self.model.lacks_memory(&error) && self.is_another_active(id) {
                        break;
                    }
                    self.drop_writer(id, Err(model_failure(error)));
                }
            }
        }
        self.has_left = false;
    }
}

/// Whether a text needs memory for the next step.
fn is_active(writer: &RunningSequence<'_>) -> bool {
    !matches!(writer.phase, SequencePhase::Waiting { .. })
}
