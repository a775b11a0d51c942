//! Buffers of a worker of decode attention on the stack, for a slice of the cache and one of its key heads.

use super::plan::{DecodePlan, RowPrefetch, lanes_of};
use super::problem::{AttentionProblem, MASKED};
use crate::inline::CachePage;
use mlcc_ir::kernel::ExprType;
use mlcc_ir::types::DType;
use mlcc_kernel_lang::{BufferView, Recorder, Val};

/// Rows that are prefetched: the first and the last, and the page that they are in.
#[derive(Clone, Copy)]
pub(super) struct RowsAhead<'k> {
    first: Val<'k>,
    last: Val<'k>,
    page: Option<CachePage<'k>>,
}

/// A key head of a slice, with the buffers that all key heads of a worker have together.
#[derive(Clone, Copy)]
pub(super) struct KeyHead<'k, 'a> {
    pub k: &'k Recorder,
    pub a: &'k AttentionProblem<'a>,
    pub plan: DecodePlan,
    /// `[kv, sets * heads, value_size]`.
    pub accumulators: BufferView<'k, 3>,
    /// Running maxima, `[kv, sets, lanes]`: those of the slots, repeated for every key of a vector.
    pub max: BufferView<'k, 3>,
    /// Sums of weights, `[kv, sets, lanes]`: as many for each head as a vector has keys.
    pub row_sum: BufferView<'k, 3>,
    /// ALiBi slopes, `[kv, sets, lanes]`.
    pub slopes: Option<BufferView<'k, 3>>,
    /// Terms by distance of the scores of a block and a set, `[vectors, lanes]`.
    pub terms: Option<BufferView<'k, 2>>,
    /// Scores, then weights of a block and a set, `[vectors, lanes]`.
    pub weights: BufferView<'k, 2>,
    /// Some keys as f32, `[keys that are summed together, padded size]`, where products are those of floats.
    pub rows: BufferView<'k, 2>,
    /// The factor of older sums for the new maxima: `[lanes]`.
    pub rescale: BufferView<'k, 1>,
    pub head: Val<'k>,
    /// Key heads of the worker in this slice: the first, and how many.
    pub heads: (Val<'k>, Val<'k>),
    /// Keys of this slice.
    pub start: Val<'k>,
    pub end: Val<'k>,
    pub last: Val<'k>,
    pub prefix: Option<Val<'k>>,
}

impl<'k, 'a> KeyHead<'k, 'a> {
    /// Runs `body` with each of the key heads of the worker.
    pub fn each_key_head(&self, body: impl FnOnce(KeyHead<'k, 'a>)) {
        let (first, count) = self.heads;
        self.k.serial("key_head", count, |i| {
            body(KeyHead { head: (first + i).named("head"), ..*self });
        });
    }

    /// Runs `body(number in the group, query head)` for every query head of the key head.
    pub fn each_query_head(&self, body: impl FnOnce(Val<'k>, Val<'k>)) {
        self.k.serial("g", self.a.group, |g| body(g, self.head * self.a.group + g));
    }

    /// Place of query head `g` of the group in a buffer `[kv, sets, lanes]`.
    pub fn slot(&self, g: Val<'k>) -> [Val<'k>; 3] {
        let heads = self.plan.heads;
        [self.head, g / heads, self.plan.lane_of(g % heads)]
    }

    /// The rows of sums of a set.
    pub fn set_accumulators(&self, set: Val<'k>) -> BufferView<'k, 1> {
        let before = set * (self.plan.heads * self.a.value_size);
        self.accumulators.starting_at((self.head, 0, 0)).starting_at([before])
    }

    /// No keys of slice `slice` seen yet but that without a value, which is seen with the first.
    pub fn clear(&self, slice: Val<'k>) {
        let (k, plan) = (self.k, self.plan);
        let (size, lanes) = (self.a.value_size, i64::from(plan.lanes));
        self.accumulators
            .starting_at((self.head, 0, 0))
            .fill(plan.rows() * size, k.zeros(DType::F32, lanes_of(size, plan.lanes)));
        self.row_sum.starting_at((self.head, 0, 0)).fill(plan.sets * lanes, k.zeros(DType::F32, plan.lanes));
        let masked = k.literal(MASKED, ExprType::vector(DType::F32, plan.lanes));
        self.max.starting_at((self.head, 0, 0)).fill(plan.sets * lanes, masked);
        if self.a.null.is_some() {
            k.when(slice.le(0), || self.add_null_key());
        }
    }

    /// No distances: lanes may have no head, and no key.
    pub fn clear_terms(&self) {
        let (plan, lanes) = (self.plan, self.plan.lanes);
        if let Some(terms) = self.terms {
            let zeros = self.k.zeros(DType::F32, lanes);
            terms.flat().fill(plan.block / plan.keys() * i64::from(lanes), zeros);
        }
    }

    /// The key without a value is seen.
    fn add_null_key(&self) {
        self.each_query_head(|g, head| {
            let Some(logit) = self.a.null_logit(head) else { return };
            let logit = logit.named("logit");
            let slot = self.max.offset(self.slot(g)).named("slot");
            let max = self.max.flat().starting_at([slot]);
            (0..self.plan.keys()).for_each(|key| max.set([key * self.plan.vectors()], logit));
            self.row_sum.flat().set([slot], self.k.float(1.0));
        });
    }

    /// The rows from row `first` of a block on, to be prefetched; of the last block, where there are no keys.
    pub fn rows_ahead(&self, first: Val<'k>) -> RowsAhead<'k> {
        if self.a.table.is_none() {
            return RowsAhead { first, last: self.last, page: None };
        }
        // In pages memory goes on behind the last row.
        let first = first.min((self.last / self.plan.block) * self.plan.block).named("next");
        let page = self.a.page(first).map(CachePage::named);
        RowsAhead { first, last: first + (self.plan.block - 1), page }
    }

    /// Prefetches `width` elements of a block ahead of its turn: from number `at` of the share of this head
    /// on. The heads share the block in the order of memory. Prefetches are spread over the work, because a
    /// core keeps track of few lines at a time and waits when there are more.
    pub fn prefetch(
        &self,
        RowPrefetch { rows, instr }: RowPrefetch,
        next: RowsAhead<'k>,
        (at, width): (Val<'k>, i64),
    ) {
        let of_row = self.a.kv * rows.size;
        let (mut from, mut last) = (next.first * of_row, (next.last + 1) * of_row + -1);
        if let Some(shift) = rows.shift(next.page) {
            (from, last) = (from + shift, last + shift);
        }
        let base = (from + self.head * (self.plan.block * rows.size)).named("base");
        let last = last.named("last_element");
        let line = RowPrefetch { rows, instr }.line_elements();
        for from in (0..width).step_by(line as usize) {
            self.k.flat(rows.buf).prefetch(instr, [(base + (at + from)).min(last)]);
        }
    }

    /// Reads a byte of each line of the key heads of the block from row `first` on.
    pub fn touch_rows(&self, first: Val<'k>) {
        let (k, (first_head, heads)) = (self.k, self.heads);
        for touch in self.plan.touch.into_iter().flatten() {
            let (rows, line) = (touch.rows, touch.line_elements());
            let of_row = self.a.kv * rows.size;
            let keys = (self.end - first).min(self.plan.block);
            let before = first_head * rows.size;
            let lines = (heads * rows.size).div_ceil(line);
            k.serial("key", keys, |key| {
                let row = (first + key) * of_row;
                let row = rows.shift(self.a.page(first + key)).map_or(row, |shift| row + shift).named("row");
                let last = (row + (of_row - 1)).named("last_element");
                k.steps("line", lines, line, |at| {
                    k.flat(rows.buf).prefetch(touch.instr, [(row + before + at).min(last)]);
                });
            });
        }
    }

    /// The sum of all weights of a head of the group.
    pub fn sum_of_weights(&self, slot: BufferView<'k, 1>) -> Val<'k> {
        let parts = (0..self.plan.keys()).map(|key| slot.at([key * self.plan.vectors()]));
        parts.reduce(|a, b| a + b).expect("a vector has keys").named("total")
    }
}
