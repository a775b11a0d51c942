//! States that no slot has: those of texts whose slots others have taken, and of models that cannot go back copies of earlier states, at
//! the borders of turns and inside of long prompts. They are copies that share the pages of caches. There is a bounded number of them;
//! what was used longest ago goes first.

use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::time::Instant;

use crate::serving::adapter::{AdapterId, TextAdapter, id_of};
use crate::serving::prefixes::{SequenceSlot, SlotTable, WORTH_A_COPY};
use crate::serving::radix::RadixTree;
use crate::serving::saving::PrefixLocation;
use crate::serving::step::{CacheBlocks, ModelRunner};
use crate::tokenizer::TokenId;

pub(super) struct CachedPrefix<S> {
    /// With which the state was made.
    pub adapter: Option<TextAdapter>,
    pub tokens: Vec<TokenId>,
    pub sequence: S,
    /// Behind the tokens, if they are a whole prompt; else none.
    pub logits: Vec<f32>,
    /// When it was used last, in admissions.
    pub used: u64,
    /// Taken somewhere inside of a prompt, with nothing that speaks for this place.
    pub inner: bool,
    /// As of a slot.
    pub rests: Option<Instant>,
}

pub(super) struct PrefixCache<S> {
    all: BTreeMap<u64, CachedPrefix<S>>,
    /// Of the texts of each adapter, and of those without.
    trees: BTreeMap<AdapterId, RadixTree>,
    /// Of those that have none.
    empty: RadixTree,
    /// Most of them.
    most: usize,
    next: u64,
}

impl<S> PrefixCache<S> {
    pub fn new(most: usize) -> Self {
        PrefixCache {
            all: BTreeMap::new(),
            trees: BTreeMap::new(),
            empty: RadixTree::default(),
            most,
            next: 0,
        }
    }

    pub fn takes_any(&self) -> bool {
        self.most > 0
    }

    /// States that may be used with an adapter.
    pub fn tree(&self, adapter: Option<&TextAdapter>) -> &RadixTree {
        self.trees.get(&id_of(adapter)).unwrap_or(&self.empty)
    }

    pub fn get(&self, id: u64) -> Option<&CachedPrefix<S>> {
        self.all.get(&id)
    }

    pub fn get_mut(&mut self, id: u64) -> Option<&mut CachedPrefix<S>> {
        self.all.get_mut(&id)
    }

    pub fn iter(&self) -> impl Iterator<Item = (u64, &CachedPrefix<S>)> {
        self.all.iter().map(|(&id, kept)| (id, kept))
    }

    pub fn len(&self) -> usize {
        self.all.len()
    }

    /// The state of exactly these tokens.
    pub fn of(&mut self, adapter: Option<&TextAdapter>, tokens: &[TokenId]) -> Option<&mut CachedPrefix<S>> {
        let id = *self.tree(adapter).exactly(tokens).first()?;
        self.all.get_mut(&id)
    }

    /// Which one goes first, and when it was used. Inner ones take no more than half of the room, and go first of equally old ones.
    pub fn oldest(&self) -> Option<(u64, u64)> {
        let too_many = 2 * self.all.values().filter(|kept| kept.inner).count() > self.most;
        let all = self.all.iter().filter(|(_, kept)| kept.inner || !too_many);
        all.map(|(&id, kept)| (kept.used, !kept.inner, id)).min().map(|(used, _, id)| (used, id))
    }

    pub fn is_full(&self) -> bool {
        self.all.len() >= self.most
    }

    pub fn insert(&mut self, kept: CachedPrefix<S>) {
        let tree = self.trees.entry(id_of(kept.adapter.as_ref())).or_default();
        tree.insert(&kept.tokens, self.next);
        self.all.insert(self.next, kept);
        self.next += 1;
    }

    pub fn remove(&mut self, id: u64) -> Option<CachedPrefix<S>> {
        let kept = self.all.remove(&id)?;
        if let Entry::Occupied(mut tree) = self.trees.entry(id_of(kept.adapter.as_ref())) {
            tree.get_mut().remove(&kept.tokens, id);
            if tree.get().is_empty() {
                tree.remove();
            }
        }
        Some(kept)
    }
}

impl<M: ModelRunner> SlotTable<M> {
    /// Drops the state that was used longest ago of those that no text runs in. False if there is none.
    pub fn drop_idle(&mut self, model: &M) -> bool {
        let idle = self.slots.iter().enumerate().filter(|(_, s)| s.running.is_none() && !s.fed.is_empty());
        let slot = idle.map(|(index, slot)| (slot.used, index)).min();
        match (slot, self.kept.oldest()) {
            (Some((used, _)), Some((kept, id))) if kept <= used => self.evict(model, id),
            (Some((_, index)), _) => self.lose(index),
            (None, Some((_, id))) => self.evict(model, id),
            (None, None) => return false,
        }
        true
    }

    /// Drops all states of an adapter that no text runs in.
    pub fn forget(&mut self, adapter: &TextAdapter) {
        let of_adapter = |slot: &SequenceSlot<M::Sequence>| slot.adapter.as_ref() == Some(adapter);
        let idle = |(at, slot): (usize, &SequenceSlot<M::Sequence>)| {
            (slot.running.is_none() && of_adapter(slot)).then_some(at)
        };
        let idle: Vec<usize> = self.slots.iter().enumerate().filter_map(idle).collect();
        idle.into_iter().for_each(|slot| self.lose(slot));
        let kept = self.kept.iter().filter(|(_, kept)| kept.adapter.as_ref() == Some(adapter));
        let kept: Vec<u64> = kept.map(|(id, _)| id).collect();
        kept.into_iter().for_each(|id| drop(self.kept.remove(id)));
    }

    /// States that no text runs in go where all states together have used up the pages that full contexts of the slots have: more memory
    /// was not asked for.
    pub fn trim(&mut self, model: &M) {
        while self.kept.len() > 0
            && let Some(CacheBlocks { all, free, sequence, .. }) = model.cache_blocks()
            && all - free + self.slots.len() > all.min(sequence.saturating_mul(self.slots.len()))
            && let Some((_, id)) = self.kept.oldest()
        {
            self.evict(model, id);
        }
    }

    /// Keeps a copy of the state of a slot, of a model that could not come back to it, with the logits if it is that of a whole prompt.
    /// Without it the next prompt is read again.
    pub fn keep(&mut self, model: &M, slot: usize, logits: &[f32], inner: bool) {
        let SequenceSlot { sequence: Some(sequence), fed, adapter, .. } = &self.slots[slot] else { return };
        let forgotten = adapter.as_ref().is_some_and(TextAdapter::is_forgotten);
        if self.truncates || !self.kept.takes_any() || forgotten {
            return;
        }
        let used = self.admissions;
        if let Some(same) = self.kept.of(adapter.as_ref(), fed) {
            same.used = used;
            if same.logits.is_empty() {
                same.logits = logits.to_vec();
            }
            return;
        }
        let rests = (!inner).then(Instant::now);
        match model.fork(sequence) {
            Ok(sequence) => {
                let (adapter, tokens, logits) = (adapter.clone(), fed.clone(), logits.to_vec());
                self.put(model, CachedPrefix { adapter, tokens, sequence, logits, used, inner, rests });
            }
            Err(error) => self.lost(&error),
        }
    }

    /// The state of a slot that another text needs joins those that no slot has, if that is worth it.
    pub fn retire(&mut self, model: &M, slot: usize) {
        let SequenceSlot { sequence, fed, used, adapter, .. } = &mut self.slots[slot];
        let used = *used;
        if fed.len() >= WORTH_A_COPY
            && self.kept.takes_any()
            && let Some(sequence) = sequence.take()
        {
            let (tokens, adapter) = (std::mem::take(fed), adapter.take());
            let rests = self.slots[slot].rests;
            self.lose(slot);
            let logits = Vec::new();
            self.put(model, CachedPrefix { adapter, tokens, sequence, logits, used, inner: false, rests });
        } else {
            self.save_before_loss(model, PrefixLocation::Slot(slot));
        }
    }

    /// Adds a state to those that no slot has.
    fn put(&mut self, model: &M, kept: CachedPrefix<M::Sequence>) {
        let adapter = kept.adapter.as_ref();
        if adapter.is_some_and(TextAdapter::is_forgotten) {
            return;
        }
        if self.truncates {
            let tree = self.kept.tree(adapter);
            if tree.has_beyond(&kept.tokens) {
                return;
            }
            let begins: Vec<u64> = tree.begins(&kept.tokens).map(|(_, id)| id).collect();
            begins.into_iter().for_each(|id| drop(self.kept.remove(id)));
        } else if let Some(same) = self.kept.of(adapter, &kept.tokens) {
            same.used = same.used.max(kept.used);
            return;
        }
        while self.kept.is_full()
            && let Some((oldest, id)) = self.kept.oldest()
        {
            if oldest > kept.used {
                return;
            }
            self.evict(model, id);
        }
        self.kept.insert(kept);
    }

    fn evict(&mut self, model: &M, id: u64) {
        self.save_before_loss(model, PrefixLocation::Kept(id));
        self.kept.remove(id);
    }

    /// A state is used now, so something speaks for it.
    pub fn touch(&mut self, id: u64) {
        if let Some(kept) = self.kept.get_mut(id) {
            (kept.used, kept.inner, kept.rests) = (self.admissions + 1, false, Some(Instant::now()));
        }
    }
}
