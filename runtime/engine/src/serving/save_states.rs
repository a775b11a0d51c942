//! The times at which states are written to files: after they have not been used for a while, where a long
//! one would be lost, and when the engine ends.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::{Duration, Instant};

use crate::serving::disk_cache::{DiskCache, WORTH_A_FILE};
use crate::serving::model_runner::ModelRunner;
use crate::serving::slots::{SequenceSlot, SlotTable};

/// Tokens of a state that is written before another text takes its slot, though it has not rested. Shorter
/// ones are read again soon.
const LONG: usize = 512;
/// Time between two looks whether a state has been written.
const LOOK: Duration = Duration::from_millis(20);

/// The place of a state.
#[derive(Clone, Copy)]
pub(super) enum PrefixLocation {
    Slot(usize),
    /// One that no slot has, by its number.
    Cache(u64),
}

impl<M: ModelRunner> SlotTable<M> {
    /// Gives the state that has rested longest to its files, if it is time and none is being written. When to
    /// come again; `None` if nothing rests.
    pub fn save_idle(&mut self, model: &M, now: Instant) -> Option<Instant> {
        let files = self.disk_cache.as_mut()?;
        files.collect_report(false);
        let slots = self
            .slots
            .iter()
            .enumerate()
            .filter_map(|(at, s)| Some((s.idle_since?, PrefixLocation::Slot(at))));
        let kept =
            self.prefix_cache.iter().filter_map(|(id, k)| Some((k.idle_since?, PrefixLocation::Cache(id))));
        let (since, place) = slots.chain(kept).min_by_key(|&(since, _)| since)?;
        let due = since + files.idle_time();
        if due > now {
            return Some(due);
        }
        if !files.is_free() {
            return Some(now + LOOK);
        }
        self.save_prefix(model, place);
        Some(now)
    }

    /// A state is about to go.
    pub fn save_before_eviction(&mut self, model: &M, place: PrefixLocation) {
        let (rests, tokens) = match place {
            PrefixLocation::Slot(at) => (self.slots[at].idle_since, self.slots[at].computed_tokens.len()),
            PrefixLocation::Cache(id) => {
                self.prefix_cache.get(id).map_or((None, 0), |kept| (kept.idle_since, kept.tokens.len()))
            }
        };
        let free = self.disk_cache.as_ref().is_some_and(DiskCache::is_free);
        if free && rests.is_some() && tokens >= LONG {
            self.save_prefix(model, place);
        }
    }

    /// Gives all states to their files, so that the next engine has them: the one that was used last is the
    /// newest.
    pub fn save_all(&mut self, model: &M) {
        if self.disk_cache.is_none() {
            return;
        }
        let mut slots: Vec<usize> = (0..self.slots.len()).collect();
        slots.sort_by_key(|&at| self.slots[at].last_used);
        let slots = slots.into_iter().map(PrefixLocation::Slot);
        // Periodic ones inside of prompts, which have not been used, are not worth it.
        let mut kept: Vec<(u64, u64)> = self
            .prefix_cache
            .iter()
            .filter(|(_, k)| !k.is_periodic)
            .map(|(id, k)| (k.last_used, id))
            .collect();
        kept.sort_unstable();
        for place in slots.chain(kept.into_iter().map(|(_, id)| PrefixLocation::Cache(id))) {
            self.save_prefix(model, place);
            if let Some(files) = &mut self.disk_cache {
                files.collect_report(true);
            }
            if let PrefixLocation::Slot(at) = place {
                // Its memory may be needed.
                self.slots[at] = SequenceSlot::empty();
            }
        }
    }

    /// Copies a state for its files, if it is worth them and has none. Nothing else is being written.
    fn save_prefix(&mut self, model: &M, place: PrefixLocation) {
        let SlotTable { slots, prefix_cache: kept, disk_cache: Some(files), .. } = self else { return };
        let (tokens, logits, sequence, adapter) = match place {
            PrefixLocation::Slot(at) => {
                let SequenceSlot { computed_tokens: fed, idle_since: rests, sequence, adapter, .. } =
                    &mut slots[at];
                *rests = None;
                (&*fed, &[][..], sequence.as_ref(), &*adapter)
            }
            PrefixLocation::Cache(id) => {
                let Some(kept) = kept.get_mut(id) else { return };
                kept.idle_since = None;
                (&kept.tokens, &kept.logits[..], Some(&kept.sequence), &kept.adapter)
            }
        };
        // Files are found by the model and the tokens alone.
        if tokens.len() < WORTH_A_FILE || adapter.is_some() {
            return;
        }
        if !files.needs_write(tokens) {
            return files.touch_prefix(tokens);
        }
        let copy = || sequence.map(|sequence| model.save_state(sequence)).transpose();
        // A model that panics here has not lost a text.
        match catch_unwind(AssertUnwindSafe(copy)) {
            Ok(Ok(Some(state))) => files.write_prefix(tokens, logits, state),
            Ok(Ok(None)) => {}
            Ok(Err(error)) => files.warn_not_saved(&error.to_string()),
            Err(_) => files.warn_not_saved("the model failed with it"),
        }
    }
}
