//! States of earlier texts, from which a new prompt can go on.
//!
//! A slot keeps the state of its last text until another needs the slot. A model with caches takes the longest common prefix:
//! it drops rows, or copies a state first where another text would lose more than it shares. A recurrent model cannot go back, so
//! it goes on where a state is a begin of the new prompt: that of a slot, or a snapshot that was taken when a prompt had been
//! read.

use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::Instant;

use crate::generate::{LanguageModel, RewindModel};
use crate::serving::files::{Shelf, WORTH_A_FILE};
use crate::serving::step::{Step, StepError};
use crate::tokenizer::TokenId;

/// Tokens for which it is worth to copy a state.
const WORTH_A_COPY: usize = 32;

/// A place for one running text.
pub(super) struct Slot<S> {
    /// Made when it is needed, and again after an error.
    pub sequence: Option<S>,
    /// The tokens of its state.
    pub fed: Vec<TokenId>,
    /// The text that runs in it.
    pub running: Option<u64>,
    /// When it was used last, in admissions.
    pub(super) used: u64,
    /// Since when nobody uses a state of which nobody has asked whether it needs a file.
    pub(super) rests: Option<Instant>,
}

impl<S> Slot<S> {
    pub(super) fn empty() -> Self {
        Slot { sequence: None, fed: Vec::new(), running: None, used: 0, rests: None }
    }
}

/// A recurrent state behind a prompt.
pub(super) struct Kept<S: RewindModel> {
    pub tokens: Vec<TokenId>,
    pub snapshot: S::Snapshot,
    pub logits: Vec<f32>,
    /// As of a slot.
    pub rests: Option<Instant>,
}

pub(super) struct Slots<M: Step> {
    pub slots: Vec<Slot<M::Sequence>>,
    /// Used longest ago first.
    pub(super) kept: VecDeque<Kept<M::Sequence>>,
    /// Most of them.
    most_kept: usize,
    admissions: u64,
    /// States that outlive the process.
    pub(super) files: Option<Shelf>,
    /// How often a state could not be kept or restored, and why it could not the last time.
    pub lost: u64,
    pub lost_because: Option<String>,
}

/// Where a prompt begins to be read.
pub(super) struct Start {
    pub slot: usize,
    /// Tokens of the prompt that are there.
    pub cached: usize,
    /// If that is all of them: the logits behind them.
    pub logits: Option<Vec<f32>>,
}

/// Where a state comes from.
enum Source {
    Nothing,
    /// The slot's own, with so many tokens.
    Own(usize),
    /// A copy of another slot's, with so many tokens.
    Copy {
        from: usize,
        tokens: usize,
    },
    Kept(usize),
    /// A file, by its number.
    File(usize),
}

fn common(a: &[TokenId], b: &[TokenId]) -> usize {
    a.iter().zip(b).take_while(|(a, b)| a == b).count()
}

impl<M: Step> Slots<M> {
    pub fn new(count: usize, most_kept: usize, files: Option<Shelf>) -> Self {
        let slots = (0..count).map(|_| Slot::empty()).collect();
        Slots { slots, kept: VecDeque::new(), most_kept, admissions: 0, files, lost: 0, lost_because: None }
    }

    pub fn has_free(&self) -> bool {
        self.slots.iter().any(|slot| slot.running.is_none())
    }

    /// Gives a free slot to a text, with as much of the prompt as can be had; `most` tokens of it may be there before. `None` if
    /// none is free.
    pub fn admit(
        &mut self,
        model: &M,
        id: u64,
        prompt: &[TokenId],
        most: usize,
    ) -> Result<Option<Start>, StepError<M>> {
        if let Some(files) = &mut self.files {
            files.settle(false);
        }
        let (slot, logits) = loop {
            let Some((slot, source)) = self.choose(prompt, most) else { return Ok(None) };
            if !matches!(source, Source::Own(_)) {
                self.save_before_loss(model, slot);
            }
            if let Source::File(index) = source {
                match self.take_file(model, slot, index, prompt, most) {
                    Some(logits) => break (slot, logits),
                    // There is one file less to choose.
                    None => continue,
                }
            }
            match self.prepare(model, slot, source) {
                Ok(logits) => break (slot, logits),
                Err(error) => {
                    self.lose(slot);
                    if !(model.lacks_memory(&error) && self.drop_idle()) {
                        return Err(error);
                    }
                }
            }
        };
        self.take(slot, id);
        let cached = self.slots[slot].fed.len();
        Ok(Some(Start { slot, cached, logits: logits.filter(|_| cached == prompt.len()) }))
    }

    /// A free slot for the copy of another text's state.
    pub fn admit_twin(&mut self, model: &M, id: u64) -> Option<usize> {
        let slot = self.oldest_free(None)?;
        self.save_before_loss(model, slot);
        // Its state will be replaced, and until then takes memory.
        self.lose(slot);
        self.take(slot, id);
        Some(slot)
    }

    /// A text runs in a slot from now on.
    fn take(&mut self, slot: usize, id: u64) {
        self.admissions += 1;
        let slot = &mut self.slots[slot];
        (slot.running, slot.used, slot.rests) = (Some(id), self.admissions, None);
    }

    /// Makes the state of a slot that of no tokens.
    pub fn clear(&mut self, model: &M, slot: usize) -> Result<(), StepError<M>> {
        self.slots[slot].fed.clear();
        self.fresh(model, slot)?.reset()
    }

    /// A new state of no tokens for a running text; the old one is unknown.
    pub fn renew(&mut self, model: &M, slot: usize) -> Result<(), StepError<M>> {
        self.slots[slot].fed.clear();
        self.slots[slot].sequence = None;
        self.fresh(model, slot).map(|_| ())
    }

    /// Drops all but the first tokens of a state.
    pub fn truncate(&mut self, slot: usize, tokens: usize) -> Result<(), StepError<M>> {
        let slot = &mut self.slots[slot];
        if let Some(sequence) = slot.sequence.as_mut().filter(|_| tokens < slot.fed.len()) {
            sequence.truncate(tokens)?;
            slot.fed.truncate(tokens);
        }
        Ok(())
    }

    /// Drops the state that was used longest ago of those that no text runs in. False if there is none.
    pub fn drop_idle(&mut self) -> bool {
        let idle = self.slots.iter().enumerate().filter(|(_, s)| s.running.is_none() && !s.fed.is_empty());
        match idle.min_by_key(|(_, slot)| slot.used).map(|(index, _)| index) {
            Some(index) => self.lose(index),
            None => return false,
        }
        true
    }

    /// Copies a state, also of a running text.
    pub fn copy(&mut self, model: &M, from: usize, to: usize) -> Result<(), StepError<M>> {
        // What was there goes first, so that both need no memory at the same time.
        self.slots[to].sequence = None;
        self.slots[to].fed.clear();
        let Some(sequence) = &self.slots[from].sequence else { return Ok(()) };
        let twin = model.fork(sequence)?;
        self.slots[to].fed = self.slots[from].fed.clone();
        self.slots[to].sequence = Some(twin);
        Ok(())
    }

    /// Frees a slot; its state stays.
    pub fn free(&mut self, slot: usize) {
        self.slots[slot].running = None;
        self.slots[slot].rests = Some(Instant::now());
    }

    /// Frees a slot, the state of which is unknown.
    pub fn lose(&mut self, slot: usize) {
        let used = self.slots[slot].used;
        self.slots[slot] = Slot { used, ..Slot::empty() };
    }

    /// Keeps the state behind a prompt, of a model that could not come back to it. Without it the next prompt is read again.
    pub fn keep(&mut self, slot: usize, logits: &[f32]) {
        let Slot { sequence: Some(sequence), fed, .. } = &self.slots[slot] else { return };
        if sequence.can_truncate() || self.most_kept == 0 {
            return;
        }
        let snapshot = match sequence.snapshot() {
            Ok(snapshot) => snapshot,
            Err(error) => return self.lost(&error),
        };
        self.kept.retain(|kept| kept.tokens != *fed);
        if self.kept.len() >= self.most_kept {
            self.kept.pop_front();
        }
        let (tokens, logits) = (fed.clone(), logits.to_vec());
        self.kept.push_back(Kept { tokens, snapshot, logits, rests: Some(Instant::now()) });
    }

    fn lost(&mut self, error: &StepError<M>) {
        self.lost += 1;
        self.lost_because = Some(error.to_string());
    }

    /// The free slot that was used longest ago; one without a state first.
    fn oldest_free(&self, except: Option<usize>) -> Option<usize> {
        let free = self.slots.iter().enumerate().filter(|(i, s)| s.running.is_none() && Some(*i) != except);
        free.min_by_key(|(_, slot)| (!slot.fed.is_empty(), slot.used)).map(|(i, _)| i)
    }

    fn choose(&self, prompt: &[TokenId], most: usize) -> Option<(usize, Source)> {
        let fresh = self.oldest_free(None)?;
        let rewinds = self.slots.iter().flat_map(|s| &s.sequence).next().is_some_and(|s| s.can_truncate());
        let found =
            if rewinds { self.longest_prefix(prompt, most) } else { self.longest_begin(prompt, most) };
        let (slot, source) = found.unwrap_or((fresh, Source::Nothing));
        let known = match source {
            Source::Own(tokens) | Source::Copy { tokens, .. } => tokens,
            Source::Kept(index) => self.kept.get(index).map_or(0, |kept| kept.tokens.len()),
            Source::Nothing | Source::File(_) => 0,
        };
        let file = self.files.as_ref().and_then(|files| files.best(prompt, most));
        match file.filter(|&(_, tokens)| tokens >= known + WORTH_A_FILE) {
            Some((index, _)) => Some((fresh, Source::File(index))),
            None => Some((slot, source)),
        }
    }

    /// Takes a state from a file into a free slot, with logits behind it if there are. `None` if that fails: it will not be chosen
    /// again.
    fn take_file(
        &mut self,
        model: &M,
        slot: usize,
        index: usize,
        prompt: &[TokenId],
        most: usize,
    ) -> Option<Option<Vec<f32>>> {
        let wanted = self.files.as_mut()?.take(index)?;
        self.slots[slot].fed.clear();
        let tokens = common(&wanted.tokens, prompt);
        let load = || -> Result<(M::Sequence, usize), String> {
            let told = |error: StepError<M>| error.to_string();
            let mut sequence = model.sequence().map_err(told)?;
            model.load(&mut sequence, &wanted.state).map_err(told)?;
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
        // What was there goes first, so that both need no memory at the same time.
        self.slots[slot].sequence = None;
        // A model that panics here has not lost a text.
        match catch_unwind(AssertUnwindSafe(load)).unwrap_or_else(|_| Err("the model failed with it".into()))
        {
            Ok((sequence, tokens)) => {
                self.slots[slot].sequence = Some(sequence);
                self.slots[slot].fed = wanted.tokens[..tokens].to_vec();
                Some(Some(wanted.logits).filter(|logits| !logits.is_empty()))
            }
            Err(why) => self.files.as_mut()?.refuse(index, &why),
        }
    }

    /// For models that drop tokens.
    fn longest_prefix(&self, prompt: &[TokenId], most: usize) -> Option<(usize, Source)> {
        let shared = |slot: &Slot<M::Sequence>| {
            let tokens = common(&slot.fed, prompt).min(most);
            let sequence = slot.sequence.as_ref()?;
            (tokens > 0 && sequence.can_truncate_to(tokens)).then_some(tokens)
        };
        let found = self.slots.iter().enumerate().filter_map(|(i, slot)| Some((i, shared(slot)?)));
        let (from, tokens) = found.max_by_key(|&(i, tokens)| (tokens, self.slots[i].running.is_none()))?;
        let idle = self.slots[from].running.is_none();
        let lost = self.slots[from].fed.len() - tokens;
        if idle && lost <= tokens {
            return Some((from, Source::Own(tokens)));
        }
        match self.oldest_free(Some(from)) {
            Some(to) if tokens >= WORTH_A_COPY => Some((to, Source::Copy { from, tokens })),
            _ if idle => Some((from, Source::Own(tokens))),
            _ => None,
        }
    }

    /// For models that go on only. A state that is the whole prompt has logits if it was kept.
    fn longest_begin(&self, prompt: &[TokenId], most: usize) -> Option<(usize, Source)> {
        let begins = |tokens: &[TokenId]| !tokens.is_empty() && prompt.starts_with(tokens);
        let free = self.slots.iter().enumerate().filter(|(_, s)| s.running.is_none() && s.sequence.is_some());
        let own =
            free.filter(|(_, s)| begins(&s.fed) && s.fed.len() <= most).max_by_key(|(_, s)| s.fed.len());
        let usable = |tokens: usize| tokens <= most || tokens == prompt.len() && most > 0;
        let kept = self.kept.iter().enumerate();
        let kept = kept.filter(|(_, k)| begins(&k.tokens) && usable(k.tokens.len()));
        let kept = kept.max_by_key(|(_, k)| k.tokens.len());
        match (own, kept) {
            (Some((slot, s)), Some((_, k))) if s.fed.len() >= k.tokens.len() => {
                Some((slot, Source::Own(s.fed.len())))
            }
            (_, Some((index, _))) => Some((self.oldest_free(None)?, Source::Kept(index))),
            (Some((slot, s)), None) => Some((slot, Source::Own(s.fed.len()))),
            (None, None) => None,
        }
    }

    fn prepare(&mut self, model: &M, slot: usize, source: Source) -> Result<Option<Vec<f32>>, StepError<M>> {
        match source {
            Source::Own(tokens) => self.truncate(slot, tokens)?,
            Source::Copy { from, tokens } => {
                self.copy(model, from, slot)?;
                self.truncate(slot, tokens)?;
            }
            Source::Nothing | Source::File(_) => self.clear(model, slot)?,
            Source::Kept(index) => {
                let Some(kept) = self.kept.remove(index) else { return Ok(None) };
                let restored = self.fresh(model, slot)?.restore(&kept.snapshot);
                let (tokens, logits) = (kept.tokens.clone(), kept.logits.clone());
                self.kept.push_back(kept);
                if let Err(error) = restored {
                    // There may be no memory for its rows. What makes room for new ones does so when they are read.
                    self.lost(&error);
                    self.renew(model, slot)?;
                    return Ok(None);
                }
                self.slots[slot].fed = tokens;
                return Ok(Some(logits));
            }
        }
        Ok(None)
    }

    fn fresh(&mut self, model: &M, slot: usize) -> Result<&mut M::Sequence, StepError<M>> {
        let place = &mut self.slots[slot].sequence;
        match place {
            Some(sequence) => Ok(sequence),
            None => Ok(place.insert(model.sequence()?)),
        }
    }
}
