//! States that no slot has: those of texts whose slots others have taken, and of models that cannot roll back
//! copies of earlier states, at the borders of turns and inside of long prompts. They are copies that share
//! the pages of caches. There is a bounded number of them; what was used longest ago goes first.

use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::time::Instant;

use mlcc_text::TokenId;

use crate::serving::adapter::{AdapterId, TextAdapter, adapter_id};
use crate::serving::model_runner::{CacheBlocks, ModelRunner};
use crate::serving::radix_tree::RadixTree;
use crate::serving::save_states::PrefixLocation;
use crate::serving::slots::{SequenceSlot, SlotTable, WORTH_A_COPY};

pub(super) struct CachedPrefix<S> {
    /// The adapter with which the state was made.
    pub adapter: Option<TextAdapter>,
    pub tokens: Vec<TokenId>,
    pub sequence: S,
    /// Logits behind the tokens, if they are a whole prompt; else none.
    pub logits: Vec<f32>,
    /// The admission at which it was used last.
    pub last_used: u64,
    /// Taken somewhere inside of a prompt, with nothing that speaks for this place.
    pub is_periodic: bool,
    /// The same as of a slot.
    pub idle_since: Option<Instant>,
}

pub(super) struct PrefixCache<S> {
    entries: BTreeMap<u64, CachedPrefix<S>>,
    /// The trees of each adapter's sequences, and of those without.
    trees: BTreeMap<AdapterId, RadixTree>,
    /// The tree of adapters without sequences.
    empty: RadixTree,
    /// Most of them.
    capacity: usize,
    next_id: u64,
}

impl<S> PrefixCache<S> {
    pub fn new(capacity: usize) -> Self {
        PrefixCache {
            entries: BTreeMap::new(),
            trees: BTreeMap::new(),
            empty: RadixTree::default(),
            capacity,
            next_id: 0,
        }
    }

    pub fn is_enabled(&self) -> bool {
        self.capacity > 0
    }

    /// States that may be used with an adapter.
    pub fn tree_of_adapter(&self, adapter: Option<&TextAdapter>) -> &RadixTree {
        self.trees.get(&adapter_id(adapter)).unwrap_or(&self.empty)
    }

    pub fn get(&self, id: u64) -> Option<&CachedPrefix<S>> {
        self.entries.get(&id)
    }

    pub fn get_mut(&mut self, id: u64) -> Option<&mut CachedPrefix<S>> {
        self.entries.get_mut(&id)
    }

    pub fn iter(&self) -> impl Iterator<Item = (u64, &CachedPrefix<S>)> {
        self.entries.iter().map(|(&id, kept)| (id, kept))
    }

    pub fn len(&self) -> usize {
        self.entries.len()
    }

    /// The state of exactly these tokens.
    pub fn find_exact(
        &mut self,
        adapter: Option<&TextAdapter>,
        tokens: &[TokenId],
    ) -> Option<&mut CachedPrefix<S>> {
        let id = *self.tree_of_adapter(adapter).find_exact(tokens).first()?;
        self.entries.get_mut(&id)
    }

    /// The entry to evict first, and when it was used. Periodic ones take no more than half of the room, and
    /// are evicted first of equally old ones.
    pub fn next_victim(&self) -> Option<(u64, u64)> {
        let too_many = 2 * self.entries.values().filter(|kept| kept.is_periodic).count() > self.capacity;
        let all = self.entries.iter().filter(|(_, kept)| kept.is_periodic || !too_many);
        all.map(|(&id, kept)| (kept.last_used, !kept.is_periodic, id)).min().map(|(used, _, id)| (used, id))
    }

    pub fn is_full(&self) -> bool {
        self.entries.len() >= self.capacity
    }

    pub fn insert(&mut self, kept: CachedPrefix<S>) {
        let tree = self.trees.entry(adapter_id(kept.adapter.as_ref())).or_default();
        tree.insert(&kept.tokens, self.next_id);
        self.entries.insert(self.next_id, kept);
        self.next_id += 1;
    }

    pub fn remove(&mut self, id: u64) -> Option<CachedPrefix<S>> {
        let kept = self.entries.remove(&id)?;
        if let Entry::Occupied(mut tree) = self.trees.entry(adapter_id(kept.adapter.as_ref())) {
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
    pub fn evict_least_recent(&mut self, model: &M) -> bool {
        let idle = self
            .slots
            .iter()
            .enumerate()
            .filter(|(_, s)| s.running.is_none() && !s.computed_tokens.is_empty());
        let slot = idle.map(|(index, slot)| (slot.last_used, index)).min();
        match (slot, self.prefix_cache.next_victim()) {
            (Some((used, _)), Some((kept, id))) if kept <= used => self.evict_prefix(model, id),
            (Some((_, index)), _) => self.discard_slot(index),
            (None, Some((_, id))) => self.evict_prefix(model, id),
            (None, None) => return false,
        }
        true
    }

    /// Drops all states of an adapter that no text runs in.
    pub fn forget_adapter(&mut self, adapter: &TextAdapter) {
        let of_adapter = |slot: &SequenceSlot<M::Sequence>| slot.adapter.as_ref() == Some(adapter);
        let idle = |(at, slot): (usize, &SequenceSlot<M::Sequence>)| {
            (slot.running.is_none() && of_adapter(slot)).then_some(at)
        };
        let idle: Vec<usize> = self.slots.iter().enumerate().filter_map(idle).collect();
        idle.into_iter().for_each(|slot| self.discard_slot(slot));
        let kept = self.prefix_cache.iter().filter(|(_, kept)| kept.adapter.as_ref() == Some(adapter));
        let kept: Vec<u64> = kept.map(|(id, _)| id).collect();
        kept.into_iter().for_each(|id| drop(self.prefix_cache.remove(id)));
    }

    /// States that no text runs in go where all states together have used up the pages that full contexts of
    /// the slots have: more memory was not asked for.
    pub fn trim_to_budget(&mut self, model: &M) {
        while self.prefix_cache.len() > 0
            && let Some(CacheBlocks { total: all, free, per_sequence: sequence, .. }) = model.cache_blocks()
            && all - free + self.slots.len() > all.min(sequence.saturating_mul(self.slots.len()))
            && let Some((_, id)) = self.prefix_cache.next_victim()
        {
            self.evict_prefix(model, id);
        }
    }

    /// Keeps a copy of the state of a slot, of a model that could not come back to it, with the logits if it
    /// is that of a whole prompt. Without it the next prompt is read again.
    pub fn cache_checkpoint(&mut self, model: &M, slot: usize, logits: &[f32], inner: bool) {
        let SequenceSlot { sequence: Some(sequence), computed_tokens: fed, adapter, .. } = &self.slots[slot]
        else {
            return;
        };
        let forgotten = adapter.as_ref().is_some_and(TextAdapter::is_forgotten);
        if self.truncates || !self.prefix_cache.is_enabled() || forgotten {
            return;
        }
        let used = self.admissions;
        if let Some(same) = self.prefix_cache.find_exact(adapter.as_ref(), fed) {
            same.last_used = used;
            if same.logits.is_empty() {
                same.logits = logits.to_vec();
            }
            return;
        }
        let rests = (!inner).then(Instant::now);
        match model.fork(sequence) {
            Ok(sequence) => {
                let (adapter, tokens, logits) = (adapter.clone(), fed.clone(), logits.to_vec());
                self.insert_prefix(
                    model,
                    CachedPrefix {
                        adapter,
                        tokens,
                        sequence,
                        logits,
                        last_used: used,
                        is_periodic: inner,
                        idle_since: rests,
                    },
                );
            }
            Err(error) => self.record_loss(&error),
        }
    }

    /// The state of a slot that another text needs joins those that no slot has, if that is worth it.
    pub fn cache_slot(&mut self, model: &M, slot: usize) {
        let SequenceSlot { sequence, computed_tokens: fed, last_used: used, adapter, .. } =
            &mut self.slots[slot];
        let used = *used;
        if fed.len() >= WORTH_A_COPY
            && self.prefix_cache.is_enabled()
            && let Some(sequence) = sequence.take()
        {
            let (tokens, adapter) = (std::mem::take(fed), adapter.take());
            let rests = self.slots[slot].idle_since;
            self.discard_slot(slot);
            let logits = Vec::new();
            self.insert_prefix(
                model,
                CachedPrefix {
                    adapter,
                    tokens,
                    sequence,
                    logits,
                    last_used: used,
                    is_periodic: false,
                    idle_since: rests,
                },
            );
        } else {
            self.save_before_eviction(model, PrefixLocation::Slot(slot));
        }
    }

    /// Adds a state to those that no slot has.
    fn insert_prefix(&mut self, model: &M, kept: CachedPrefix<M::Sequence>) {
        let adapter = kept.adapter.as_ref();
        if adapter.is_some_and(TextAdapter::is_forgotten) {
            return;
        }
        if self.truncates {
            let tree = self.prefix_cache.tree_of_adapter(adapter);
            if tree.has_extension(&kept.tokens) {
                return;
            }
            let begins: Vec<u64> = tree.prefixes_of(&kept.tokens).map(|(_, id)| id).collect();
            begins.into_iter().for_each(|id| drop(self.prefix_cache.remove(id)));
        } else if let Some(same) = self.prefix_cache.find_exact(adapter, &kept.tokens) {
            same.last_used = same.last_used.max(kept.last_used);
            return;
        }
        while self.prefix_cache.is_full()
            && let Some((oldest, id)) = self.prefix_cache.next_victim()
        {
            if oldest > kept.last_used {
                return;
            }
            self.evict_prefix(model, id);
        }
        self.prefix_cache.insert(kept);
    }

    fn evict_prefix(&mut self, model: &M, id: u64) {
        self.save_before_eviction(model, PrefixLocation::Cache(id));
        self.prefix_cache.remove(id);
    }

    /// A state is used now, so something speaks for it.
    pub fn touch_prefix(&mut self, id: u64) {
        if let Some(kept) = self.prefix_cache.get_mut(id) {
            (kept.last_used, kept.is_periodic, kept.idle_since) =
                (self.admissions + 1, false, Some(Instant::now()));
        }
    }
}
