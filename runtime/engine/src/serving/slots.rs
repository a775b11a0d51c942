//! States of earlier texts, from which a new prompt can go on.
//!
//! A slot keeps the state of its last text until another needs the slot; then that goes to the others that
//! are [kept](super::kept). A model with caches takes the longest common prefix: it drops rows, or copies a
//! state first where another text would lose more than it shares. A model that cannot roll back, since it is
//! recurrent or its window has dropped rows, goes on where a state is a begin of the new prompt. So it keeps
//! copies of states: behind each prompt, where a turn begins, where prompts were seen to part, and inside of
//! long ones.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::Instant;

use mlcc_text::TokenId;

use crate::generate::{LanguageModel, RewindModel};
use crate::serving::adapter::TextAdapter;
use crate::serving::disk_cache::{DiskCache, WORTH_A_FILE};
use crate::serving::model_runner::{ModelRunner, RunnerError};
use crate::serving::prefix_cache::PrefixCache;
use crate::serving::radix_tree::common_prefix_len;

/// Tokens for which it is worth to copy a state.
pub(super) const WORTH_A_COPY: usize = 32;

/// A place for one running text.
pub(super) struct SequenceSlot<S> {
    /// Made when it is needed, and again after an error.
    pub sequence: Option<S>,
    /// The tokens of its state, and the adapter with which they were read.
    pub computed_tokens: Vec<TokenId>,
    pub adapter: Option<TextAdapter>,
    /// The text that runs in it.
    pub running: Option<u64>,
    /// The admission at which it was used last.
    pub(super) last_used: u64,
    /// The time since which a state is unused, until it was checked whether it needs a file.
    pub(super) idle_since: Option<Instant>,
}

impl<S> SequenceSlot<S> {
    pub(super) fn empty() -> Self {
        SequenceSlot {
            sequence: None,
            computed_tokens: Vec::new(),
            adapter: None,
            running: None,
            last_used: 0,
            idle_since: None,
        }
    }
}

pub(super) struct SlotTable<M: ModelRunner> {
    pub slots: Vec<SequenceSlot<M::Sequence>>,
    pub(super) prefix_cache: PrefixCache<M::Sequence>,
    /// True if a state can go back to any number of its tokens.
    pub(super) truncates: bool,
    pub(super) admissions: u64,
    /// States that outlive the process.
    pub(super) disk_cache: Option<DiskCache>,
    /// The number of states that could not be kept or restored, and the reason of the last one.
    pub prefixes_lost: u64,
    pub loss_reason: Option<String>,
}

/// The point from which a prompt is read.
pub(super) struct PrefillStart {
    pub slot: usize,
    /// Tokens of the prompt that are there.
    pub cached: usize,
    /// The logits behind them, if they are all of the prompt.
    pub logits: Option<Vec<f32>>,
    /// Most tokens that the prompt has in common with any text: others may part from them there too.
    pub divergence: usize,
}

/// The source of a state.
enum PrefixSource {
    Nothing,
    /// The slot's own state, with this many tokens.
    Own(usize),
    /// A copy of another slot's state, with `tokens` tokens.
    Copy {
        from: usize,
        tokens: usize,
    },
    /// An entry of the prefix cache, with `tokens` tokens.
    Cached {
        id: u64,
        tokens: usize,
    },
    /// A file, by its number.
    File(u64),
}

impl PrefixSource {
    fn tokens(&self) -> usize {
        match *self {
            PrefixSource::Own(tokens)
            | PrefixSource::Copy { tokens, .. }
            | PrefixSource::Cached { tokens, .. } => tokens,
            PrefixSource::Nothing | PrefixSource::File(_) => 0,
        }
    }
}

/// A lookup of a state: at most `max_tokens` tokens of a prompt, or all of them with the logits behind them.
#[derive(Clone, Copy)]
pub(super) struct PrefixQuery<'p> {
    /// It is of a text with this adapter.
    pub adapter: Option<&'p TextAdapter>,
    pub prompt: &'p [TokenId],
    pub max_tokens: usize,
}

impl PrefixQuery<'_> {
    /// The number of tokens of a state of `tokens` tokens that can be used, of which the prompt shares
    /// `shared`.
    fn usable_tokens<S: RewindModel>(
        &self,
        sequence: &S,
        tokens: usize,
        shared: usize,
        logits: bool,
    ) -> usize {
        let is_whole = shared == tokens && tokens == self.prompt.len() && self.max_tokens > 0;
        if logits && is_whole {
            return tokens;
        }
        let wanted = shared.min(self.max_tokens);
        if wanted > 0 && sequence.can_truncate_to(wanted) { wanted } else { 0 }
    }
}

impl<M: ModelRunner> SlotTable<M> {
    /// A table with `kept` states in addition to those of the slots; `truncates`: as of
    /// [`ModelLimits`](super::model_runner::ModelLimits).
    pub fn new(count: usize, kept: usize, truncates: bool, disk_cache: Option<DiskCache>) -> Self {
        let slots = (0..count).map(|_| SequenceSlot::empty()).collect();
        let prefix_cache = PrefixCache::new(kept);
        SlotTable {
            slots,
            prefix_cache,
            truncates,
            admissions: 0,
            disk_cache,
            prefixes_lost: 0,
            loss_reason: None,
        }
    }

    pub fn has_free(&self) -> bool {
        self.slots.iter().any(|slot| slot.running.is_none())
    }

    /// Gives a free slot to a text, with as much of the prompt as can be had. `None` if none is free.
    pub fn admit_request(
        &mut self,
        model: &M,
        id: u64,
        wanted: &PrefixQuery<'_>,
    ) -> Result<Option<PrefillStart>, RunnerError<M>> {
        let PrefixQuery { prompt, max_tokens: most, .. } = *wanted;
        if let Some(files) = &mut self.disk_cache {
            files.collect_report(false);
        }
        let parting = if self.truncates || most == 0 { 0 } else { self.divergence_point(wanted) };
        let (slot, logits) = loop {
            let Some((slot, source)) = self.choose_source(wanted) else { return Ok(None) };
            if let PrefixSource::Cached { id, .. } = source {
                self.touch_prefix(id);
            }
            if !matches!(source, PrefixSource::Own(_)) {
                self.cache_slot(model, slot);
            }
            if let PrefixSource::File(index) = source {
                match self.load_from_disk(model, slot, index, wanted) {
                    Some(logits) => break (slot, logits),
                    // There is one file less to choose.
                    None => continue,
                }
            }
            match self.prepare_slot(model, slot, source, wanted.adapter) {
                Ok(logits) => break (slot, logits),
                Err(error) => {
                    self.discard_slot(slot);
                    if !(model.is_out_of_memory(&error) && self.evict_least_recent(model)) {
                        return Err(error);
                    }
                }
            }
        };
        self.occupy_slot(slot, id);
        let cached = self.slots[slot].computed_tokens.len();
        let logits = logits.filter(|_| cached == prompt.len());
        Ok(Some(PrefillStart { slot, cached, logits, divergence: parting }))
    }

    /// A free slot for the copy of another text's state.
    pub fn admit_fork(&mut self, model: &M, id: u64) -> Option<usize> {
        let slot = self.oldest_free(None)?;
        self.cache_slot(model, slot);
        // Its state will be replaced, and until then takes memory.
        self.discard_slot(slot);
        self.occupy_slot(slot, id);
        Some(slot)
    }

    /// Most tokens that a prompt has in common with any text of its adapter.
    fn divergence_point(&self, wanted: &PrefixQuery<'_>) -> usize {
        let PrefixQuery { adapter, prompt, .. } = *wanted;
        let of_adapter = self.slots.iter().filter(|slot| slot.adapter.as_ref() == adapter);
        let in_slots = of_adapter.map(|slot| common_prefix_len(&slot.computed_tokens, prompt));
        let kept =
            self.prefix_cache.tree_of_adapter(adapter).nearest(prompt).next().map(|(tokens, _)| tokens);
        in_slots.chain(kept).max().unwrap_or(0)
    }

    /// A text runs in a slot from now on.
    fn occupy_slot(&mut self, slot: usize, id: u64) {
        self.admissions += 1;
        let slot = &mut self.slots[slot];
        (slot.running, slot.last_used, slot.idle_since) = (Some(id), self.admissions, None);
    }

    /// Makes the state of a slot that of no tokens, with an adapter or none.
    pub fn clear_slot(
        &mut self,
        model: &M,
        slot: usize,
        adapter: Option<&TextAdapter>,
    ) -> Result<(), RunnerError<M>> {
        self.slots[slot].computed_tokens.clear();
        self.slots[slot].adapter = adapter.cloned();
        let sequence = self.sequence_of_slot(model, slot)?;
        sequence.reset()?;
        model.set_adapter(sequence, adapter)
    }

    /// A new state of no tokens for a running text, with its adapter; the old one is unknown.
    pub fn replace_sequence(&mut self, model: &M, slot: usize) -> Result<(), RunnerError<M>> {
        self.slots[slot].computed_tokens.clear();
        self.slots[slot].sequence = None;
        let adapter = self.slots[slot].adapter.clone();
        model.set_adapter(self.sequence_of_slot(model, slot)?, adapter.as_ref())
    }

    /// Drops all but the first tokens of a state.
    pub fn truncate_slot(&mut self, slot: usize, tokens: usize) -> Result<(), RunnerError<M>> {
        let slot = &mut self.slots[slot];
        if let Some(sequence) = slot.sequence.as_mut().filter(|_| tokens < slot.computed_tokens.len()) {
            sequence.truncate(tokens)?;
            slot.computed_tokens.truncate(tokens);
        }
        Ok(())
    }

    /// Copies a state, also of a running text.
    pub fn fork_slot(&mut self, model: &M, from: usize, to: usize) -> Result<(), RunnerError<M>> {
        // The old one is dropped first, so that both need no memory at the same time.
        self.slots[to].sequence = None;
        self.slots[to].computed_tokens.clear();
        let Some(sequence) = &self.slots[from].sequence else { return Ok(()) };
        let twin = model.fork(sequence)?;
        self.slots[to].computed_tokens = self.slots[from].computed_tokens.clone();
        self.slots[to].adapter = self.slots[from].adapter.clone();
        self.slots[to].sequence = Some(twin);
        Ok(())
    }

    /// Frees a slot; its state stays, unless it will not be used again.
    pub fn free_slot(&mut self, slot: usize) {
        if self.slots[slot].adapter.as_ref().is_some_and(TextAdapter::is_forgotten) {
            return self.discard_slot(slot);
        }
        self.slots[slot].running = None;
        self.slots[slot].idle_since = Some(Instant::now());
    }

    /// Frees a slot, the state of which is unknown.
    pub fn discard_slot(&mut self, slot: usize) {
        let used = self.slots[slot].last_used;
        self.slots[slot] = SequenceSlot { last_used: used, ..SequenceSlot::empty() };
    }

    pub(super) fn record_loss(&mut self, error: &RunnerError<M>) {
        self.prefixes_lost += 1;
        self.loss_reason = Some(error.to_string());
    }

    /// The free slot that was used longest ago; one without a state first.
    fn oldest_free(&self, except: Option<usize>) -> Option<usize> {
        let free = self.slots.iter().enumerate().filter(|(i, s)| s.running.is_none() && Some(*i) != except);
        free.min_by_key(|(_, slot)| (!slot.computed_tokens.is_empty(), slot.last_used)).map(|(i, _)| i)
    }

    fn choose_source(&self, wanted: &PrefixQuery<'_>) -> Option<(usize, PrefixSource)> {
        let fresh = self.oldest_free(None)?;
        let (slot, source) = self.best_slot(wanted).unwrap_or((fresh, PrefixSource::Nothing));
        let kept = self.best_cached(wanted).filter(|kept| kept.tokens() > source.tokens());
        let (slot, source) = kept.map_or((slot, source), |kept| (fresh, kept));
        // There are none of adapters.
        let files = self.disk_cache.as_ref().filter(|_| wanted.adapter.is_none());
        let file = files.and_then(|files| files.find_longest(wanted.prompt, wanted.max_tokens));
        match file.filter(|&(_, tokens)| tokens >= source.tokens() + WORTH_A_FILE) {
            Some((index, _)) => Some((fresh, PrefixSource::File(index))),
            None => Some((slot, source)),
        }
    }

    /// Takes a state from a file into a free slot, with logits behind it if there are. `None` if that fails:
    /// it will not be chosen again.
    fn load_from_disk(
        &mut self,
        model: &M,
        slot: usize,
        index: u64,
        wanted: &PrefixQuery<'_>,
    ) -> Option<Option<Vec<f32>>> {
        let PrefixQuery { prompt, max_tokens: most, .. } = *wanted;
        let wanted = self.disk_cache.as_mut()?.take_prefix(index)?;
        self.slots[slot].computed_tokens.clear();
        self.slots[slot].adapter = None;
        let tokens = common_prefix_len(&wanted.tokens, prompt);
        let load = || -> Result<(M::Sequence, usize), String> {
            let told = |error: RunnerError<M>| error.to_string();
            let mut sequence = model.new_sequence().map_err(told)?;
            model.load_state(&mut sequence, &wanted.state).map_err(told)?;
            if sequence.past() != wanted.tokens.len() {
                return Err("it has another number of tokens than its prefix".into());
            }
            let whole = tokens == wanted.tokens.len() && (tokens <= most || !wanted.logits.is_empty());
            let tokens = if whole { tokens } else { tokens.min(most) };
            if tokens < wanted.tokens.len() {
                sequence.truncate(tokens).map_err(told)?;
            }
            Ok((sequence, tokens))
        };
        // The old one is dropped first, so that both need no memory at the same time.
        self.slots[slot].sequence = None;
        // A model that panics here has not lost a text.
        match catch_unwind(AssertUnwindSafe(load)).unwrap_or_else(|_| Err("the model failed with it".into()))
        {
            Ok((sequence, tokens)) => {
                self.slots[slot].sequence = Some(sequence);
                self.slots[slot].computed_tokens = wanted.tokens[..tokens].to_vec();
                Some(Some(wanted.logits).filter(|logits| !logits.is_empty()))
            }
            Err(why) => self.disk_cache.as_mut()?.reject_entry(index, &why),
        }
    }

    /// The state of a slot that has most of a prompt.
    fn best_slot(&self, wanted: &PrefixQuery<'_>) -> Option<(usize, PrefixSource)> {
        let usable = |slot: &SequenceSlot<M::Sequence>| {
            let shared = common_prefix_len(&slot.computed_tokens, wanted.prompt);
            let tokens =
                wanted.usable_tokens(slot.sequence.as_ref()?, slot.computed_tokens.len(), shared, false);
            (tokens > 0).then_some(tokens)
        };
        let of_adapter =
            self.slots.iter().enumerate().filter(|(_, slot)| slot.adapter.as_ref() == wanted.adapter);
        let found = of_adapter.filter_map(|(i, slot)| Some((i, usable(slot)?)));
        let (from, tokens) = found.max_by_key(|&(i, tokens)| (tokens, self.slots[i].running.is_none()))?;
        let idle = self.slots[from].running.is_none();
        let lost = self.slots[from].computed_tokens.len() - tokens;
        if idle && lost <= tokens {
            return Some((from, PrefixSource::Own(tokens)));
        }
        match self.oldest_free(Some(from)) {
            Some(to) if tokens >= WORTH_A_COPY => Some((to, PrefixSource::Copy { from, tokens })),
            _ if idle => Some((from, PrefixSource::Own(tokens))),
            _ => None,
        }
    }

    /// The usable entries of the prefix cache.
    fn best_cached(&self, wanted: &PrefixQuery<'_>) -> Option<PrefixSource> {
        let usable = |(shared, id): (usize, u64)| {
            let kept = self.prefix_cache.get(id)?;
            let has_logits = !kept.logits.is_empty();
            let tokens = wanted.usable_tokens(&kept.sequence, kept.tokens.len(), shared, has_logits);
            (tokens > 0).then_some(PrefixSource::Cached { id, tokens })
        };
        let goes_back = self.prefix_cache.iter().next().is_some_and(|(_, kept)| kept.sequence.can_truncate());
        let tree = self.prefix_cache.tree_of_adapter(wanted.adapter);
        let found = match goes_back {
            true => tree.nearest(wanted.prompt).find_map(usable),
            false => tree.prefixes_of(wanted.prompt).find_map(usable),
        };
        found.filter(|source| match *source {
            PrefixSource::Cached { id, tokens } => {
                !self.truncates || tokens >= WORTH_A_COPY || self.can_move(id, tokens)
            }
            _ => true,
        })
    }

    /// True if a state becomes that of a slot, instead of a copy of it: it loses no more than what it shares.
    fn can_move(&self, id: u64, tokens: usize) -> bool {
        self.truncates && self.prefix_cache.get(id).is_some_and(|kept| kept.tokens.len() - tokens <= tokens)
    }

    fn prepare_slot(
        &mut self,
        model: &M,
        slot: usize,
        source: PrefixSource,
        adapter: Option<&TextAdapter>,
    ) -> Result<Option<Vec<f32>>, RunnerError<M>> {
        self.slots[slot].adapter = adapter.cloned();
        match source {
            PrefixSource::Own(tokens) => {
                if tokens >= WORTH_A_COPY {
                    // A turn begins here.
                    self.cache_checkpoint(model, slot, &[], false);
                }
                self.truncate_slot(slot, tokens)?;
            }
            PrefixSource::Copy { from, tokens } => {
                self.fork_slot(model, from, slot)?;
                self.truncate_slot(slot, tokens)?;
            }
            PrefixSource::Cached { id, tokens } => return self.take_cached(model, slot, id, tokens),
            PrefixSource::Nothing | PrefixSource::File(_) => self.clear_slot(model, slot, adapter)?,
        }
        Ok(None)
    }

    /// Takes a state that no slot has, or a copy of it, into a slot; the logits behind it if there are.
    fn take_cached(
        &mut self,
        model: &M,
        slot: usize,
        id: u64,
        tokens: usize,
    ) -> Result<Option<Vec<f32>>, RunnerError<M>> {
        if self.can_move(id, tokens)
            && let Some(kept) = self.prefix_cache.remove(id)
        {
            (self.slots[slot].sequence, self.slots[slot].computed_tokens) =
                (Some(kept.sequence), kept.tokens);
            self.truncate_slot(slot, tokens)?;
            return Ok(None);
        }
        let copy = self.prefix_cache.get(id).map(|kept| model.fork(&kept.sequence));
        match (copy, self.prefix_cache.get(id)) {
            (Some(Ok(sequence)), Some(kept)) => {
                let logits = kept.logits.clone();
                (self.slots[slot].sequence, self.slots[slot].computed_tokens) =
                    (Some(sequence), kept.tokens.clone());
                self.truncate_slot(slot, tokens)?;
                Ok(Some(logits).filter(|logits| !logits.is_empty()))
            }
            (copy, _) => {
                if let Some(Err(error)) = copy {
                    self.record_loss(&error);
                }
                self.replace_sequence(model, slot)?;
                Ok(None)
            }
        }
    }

    fn sequence_of_slot(&mut self, model: &M, slot: usize) -> Result<&mut M::Sequence, RunnerError<M>> {
        let place = &mut self.slots[slot].sequence;
        match place {
            Some(sequence) => Ok(sequence),
            None => Ok(place.insert(model.new_sequence()?)),
        }
    }
}
