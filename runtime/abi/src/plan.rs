//! The memory plan: the sizes that the compiler fixed, written once for the table, the compiler and the
//! runtime.

use crate::{BUFFER_ALIGN, PAGE_ROWS};

/// The numbers of [`crate::ModelTable`] that callers allocate by. Bytes, unless a field says otherwise.
#[repr(C)]
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ModelPlan {
    pub weights_bytes: u64,
    pub arena_bytes: u64,
    pub state_bytes: u64,
    /// Alignment that arena, state and weights need; a power of two, at most 4096.
    pub alignment: u64,
    /// Most tokens in one prefill call.
    pub chunk: u64,
    /// Most tokens in the state; 0 = unbounded.
    pub context: u64,
    /// Most sequences in one call of `decode_batch` and `step`; 1 if there is none.
    pub batch: u64,
    pub vocab: u64,
    /// Most workers that an entry point may be called with; 0 = any number.
    pub max_workers: u64,
    /// Bytes of a page, which has [`PAGE_ROWS`] rows of every cache. 0: there are no caches.
    pub page_bytes: u64,
    /// Floats of the embedding of a text. Where it is not 0 the model reads whole texts and keeps nothing of
    /// them: it has `step` alone among the entry points that take tokens, whose sequences have neither state
    /// nor pages, and `past` 0. An output row has this many floats in place of `vocab`; the last row of a
    /// text is its embedding. 0: the model makes logits.
    pub text_width: u64,
    /// Ranks that the model is split among, at least 1. Each runs the same code, with memory of its own and
    /// the weights of its own section ([`crate::section::WEIGHTS`] of rank 0, with `.1`, `.2`, ... behind it
    /// of the others), which are of `weights_bytes` each. Arena and states are those of one rank, pages those
    /// of all.
    pub ranks: u64,
    /// Most adapters at a time, in slots from 1 on; 0: there are no slots.
    pub adapter_slots: u64,
    /// The rank that each slot has room for.
    pub adapter_rank: u64,
    /// Bytes of the matrices of all slots.
    pub adapter_bytes: u64,
    /// The start token of an encoder-decoder model's decoder, plus 1. A sequence is the tokens of the source
    /// text, which [`crate::EntryPoint::Encode`] takes, this token, and what follows, which the other entry
    /// points take. 0: there is no encoder.
    pub decoder_start: u64,
}

impl Default for ModelPlan {
    /// Nothing, of one rank, aligned to [`BUFFER_ALIGN`].
    fn default() -> Self {
        ModelPlan {
            weights_bytes: 0,
            arena_bytes: 0,
            state_bytes: 0,
            alignment: BUFFER_ALIGN as u64,
            chunk: 0,
            context: 0,
            batch: 0,
            vocab: 0,
            max_workers: 0,
            page_bytes: 0,
            text_width: 0,
            ranks: 1,
            adapter_slots: 0,
            adapter_rank: 0,
            adapter_bytes: 0,
            decoder_start: 0,
        }
    }
}

impl ModelPlan {
    /// The numbers with their names, in the order of the fields: what the table holds, and what metadata
    /// repeat.
    pub const fn named_fields(&self) -> [(&'static str, u64); 16] {
        [
            ("weights_bytes", self.weights_bytes),
            ("arena_bytes", self.arena_bytes),
            ("state_bytes", self.state_bytes),
            ("alignment", self.alignment),
            ("chunk", self.chunk),
            ("context", self.context),
            ("batch", self.batch),
            ("vocab", self.vocab),
            ("max_workers", self.max_workers),
            ("page_bytes", self.page_bytes),
            ("text_width", self.text_width),
            ("ranks", self.ranks),
            ("adapter_slots", self.adapter_slots),
            ("adapter_rank", self.adapter_rank),
            ("adapter_bytes", self.adapter_bytes),
            ("decoder_start", self.decoder_start),
        ]
    }

    /// Pages of a sequence that fills the context.
    pub fn pages(&self) -> u64 {
        if self.page_bytes == 0 { 0 } else { self.context.div_ceil(PAGE_ROWS) }
    }

    /// The state of such a sequence, on all ranks.
    pub fn sequence_bytes(&self) -> u64 {
        let states = self.state_bytes.saturating_mul(self.ranks.max(1));
        self.pages().saturating_mul(self.page_bytes).saturating_add(states)
    }

    /// The plan of this many of the ranks.
    pub fn for_ranks(&self, ranks: u64) -> ModelPlan {
        let page_bytes = self.page_bytes / self.ranks.max(1) * ranks;
        ModelPlan { ranks, page_bytes, ..self.clone() }
    }

    /// The token that the decoder of an encoder-decoder model starts with: the tokens before it are the
    /// source text.
    pub fn decoder_start(&self) -> Option<i32> {
        self.decoder_start.checked_sub(1).and_then(|token| i32::try_from(token).ok())
    }

    /// Scratch memory of a model on CPUs: the arenas of all ranks, and the results of those after the first.
    pub fn scratch_bytes(&self) -> u64 {
        if self.ranks < 2 {
            return self.arena_bytes;
        }
        let results = (self.ranks - 1).saturating_mul(self.result_bytes());
        self.ranks.saturating_mul(self.rank_arena_bytes()).saturating_add(results)
    }

    /// The arena of a rank, a whole number of cache lines.
    pub fn rank_arena_bytes(&self) -> u64 {
        let align = self.alignment.max(BUFFER_ALIGN as u64);
        self.arena_bytes.checked_next_multiple_of(align).unwrap_or(u64::MAX)
    }

    /// Logits of the largest call, or embeddings.
    pub fn result_bytes(&self) -> u64 {
        let rows = self.chunk.max(self.batch).saturating_mul(4);
        let bytes = self.vocab.max(self.text_width).saturating_mul(rows);
        bytes.checked_next_multiple_of(BUFFER_ALIGN as u64).unwrap_or(u64::MAX)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn scratch_is_that_of_all_ranks_and_their_results() {
        assert_eq!(plan(1).scratch_bytes(), 1000, "results belong to sessions");
        assert_eq!(plan(2).scratch_bytes(), 2 * 1024 + 128);
        assert_eq!(plan(4).scratch_bytes(), 4 * 1024 + 3 * 128);
        let absurd = ModelPlan { arena_bytes: u64::MAX, ..plan(2) };
        assert_eq!(absurd.scratch_bytes(), u64::MAX);
    }

    #[test]
    fn some_of_the_ranks_have_their_part() {
        let plan = plan(4);
        let two = ModelPlan { page_bytes: 512, ..plan.clone() }.for_ranks(2);
        assert_eq!((two.ranks, two.page_bytes, two.weights_bytes), (2, 256, plan.weights_bytes));
        assert_eq!(two.scratch_bytes(), 2 * 1024 + 128);
    }

    fn plan(ranks: u64) -> ModelPlan {
        ModelPlan { arena_bytes: 1000, chunk: 3, batch: 2, vocab: 10, ranks, ..ModelPlan::default() }
    }
}
