//! A block of keys of decode attention, for all query heads of a key head: from products to weights.
//!
//! Weights: vectors with equal heads in equal lanes need no reduction. Values: sums of several heads and
//! columns stay in registers over all keys of the block, so that every row is converted once. Scales of rows
//! are factors of scores and weights, not of elements.

use super::codes::size_bits;
use super::key_head::{KeyHead, RowsAhead};
use super::plan::{AttentionDot, DecodePlan, RowPrefetch, lanes_of};
use super::problem::{MASKED, ScoreIndex, larger_score};
use crate::inline::CachePage;
use mlcc_ir::graph::ValueId;
use mlcc_ir::kernel::{BinOp, ExprType};
use mlcc_ir::types::DType;
use mlcc_kernel_lang::math::exp2_below_zero;
use mlcc_kernel_lang::{BufferView, Val};

/// Lines of scales that a step prefetches at most.
const MOST_SCALE_LINES: i64 = 2;
/// Floats of a cache line.
const LINE_FLOATS: i64 = 16;

/// The point at which a step prefetches keys: memory is to be busy all the time.
#[derive(Clone, Copy)]
pub(super) enum PrefetchTiming<'k> {
    /// The step prefetches before rows are unpacked.
    Before,
    /// The step prefetches with the products: the number of this one, and how many there are.
    Within(Val<'k>, i64),
    /// The step prefetches before products become scores.
    After,
}

/// Keys `first .. first + count` (positive, at most a block).
#[derive(Clone, Copy)]
pub(super) struct KeyBlock<'k, 'a> {
    pub at: KeyHead<'k, 'a>,
    pub first: Val<'k>,
    pub count: Val<'k>,
    /// Its last key.
    pub last: Val<'k>,
    /// The page that it lies in.
    pub page: Option<CachePage<'k>>,
    /// The rows that are prefetched meanwhile.
    pub next: RowsAhead<'k>,
}

impl<'k> KeyBlock<'k, '_> {
    /// Vectors of scores that hold keys.
    pub fn vectors(&self) -> Val<'k> {
        let plan = self.at.plan;
        // Codes of weights are made by some keys at a time; what comes after the last key weighs nothing.
        let step = plan.products.keys();
        let count = if plan.keys() < step { self.count.div_ceil(step) * step } else { self.count };
        count.div_ceil(plan.keys())
    }

    /// The row of key `i` of the block; keys after the last one repeat its row.
    pub fn row(&self, i: Val<'k>) -> Val<'k> {
        (self.first + i).min(self.last).named("row")
    }

    /// Elements of row `row` of keys or values from column `c` on, as f32.
    pub fn elements(&self, v: ValueId, row: Val<'k>, c: Val<'k>, lanes: u32) -> Val<'k> {
        self.at.a.row(v, self.page, [row, self.at.head, c], lanes)
    }

    /// The scales of the rows of a vector of scores, key `first` of the block being its first.
    fn scales(&self, scale: Option<ValueId>, first: Val<'k>) -> Option<Val<'k>> {
        let (scale, at, plan) = (scale?, self.at, self.at.plan);
        let zero = at.k.int(0);
        let of_key = |key: i64| self.elements(scale, self.row(first + key), zero, 1).splat(plan.lanes);
        let each: Vec<Val> = (0..plan.keys()).map(of_key).collect();
        let key_of = |l: u32| i64::from(l) % plan.part() / plan.vectors();
        let chosen = (0..).zip(each).reduce(|(_, all), (key, value)| {
            let lanes = (0..plan.lanes).map(|l| if key_of(l) == key { plan.lanes + l } else { l });
            (key, all.shuffle_with(value, lanes))
        });
        chosen.map(|(_, scales)| scales.named("scales"))
    }

    // ---- prefetching the next block

    /// Prefetches `width` elements of the next block, from number `at` of the share of this head on
    /// (`[block, size]`).
    fn prefetch_next(&self, rows: Option<RowPrefetch>, at: Val<'k>, width: i64) {
        let Some(rows) = rows.filter(|_| !self.at.plan.in_order) else { return };
        self.at.prefetch(rows, self.next, (at, width));
    }

    /// Elements of the values of the next block that are prefetched while scores become weights, a line for
    /// every vector of them; at most half of this head's share. Memory would have nothing to do in this part
    /// of the time.
    fn prefetched_by_weights(&self) -> i64 {
        let plan = self.at.plan;
        if matches!(plan.products, AttentionDot::Words(_)) {
            // Pairing values has time for all of them.
            return 0;
        }
        let line = plan.prefetch[1].map_or(0, |rows| rows.line_elements());
        (plan.block / plan.keys() * line).min(plan.block * self.at.a.value_size / 2)
    }

    /// Prefetches more values of the next block: share `turn` of `turns` equal ones of what the loop over
    /// weights does not prefetch.
    pub fn prefetch_values(&self, turn: Val<'k>, turns: i64) {
        let fetched = self.prefetched_by_weights();
        let left = self.at.plan.block * self.at.a.value_size - fetched;
        let share = (left + turns - 1) / turns;
        self.prefetch_next(self.at.plan.prefetch[1], turn * share + fetched, share);
    }

    /// Prefetches the keys of the next block in the place of those of the step from `offset` on.
    pub fn prefetch_keys(&self, offset: Val<'k>, when: PrefetchTiming<'k>) {
        let (plan, size) = (self.at.plan, self.at.a.size);
        let all = plan.keys_together() * size;
        let in_place = plan.reads_rows_in_place(size);
        // Integers take little time but for products.
        let (before, after) = match plan.products {
            AttentionDot::Floats if !in_place => (all / 8, all / 8),
            // Parts of rows of words are less than a line.
            AttentionDot::Words(_) if !in_place => (all / 2, all - all / 2),
            AttentionDot::Floats | AttentionDot::Bytes(_) | AttentionDot::Words(_) => (0, 0),
        };
        let within = all - before - after;
        let first = offset * size;
        let (at, width) = match when {
            PrefetchTiming::Before => (first, before),
            PrefetchTiming::Within(number, turns) => {
                let width = (within + turns - 1) / turns;
                (first + (number * width + before), width)
            }
            PrefetchTiming::After => (first + (before + within), after),
        };
        self.prefetch_next(plan.prefetch[0], at, width);
    }

    /// Prefetches the scales of the next block, for the keys of a step. The number of heads that share their
    /// lines is the number that fit.
    fn prefetch_scales(&self, offset: Val<'k>) {
        let plan = self.at.plan;
        for rows in plan.scale_prefetch {
            let width = (plan.keys_together() * self.at.a.kv).min(MOST_SCALE_LINES * LINE_FLOATS);
            self.prefetch_next(rows, offset, width);
        }
    }

    // ---- scores and weights

    /// Terms by distance of all keys, in the places of their scores.
    fn load_terms(&self, set: Val<'k>) {
        let (at, plan, k) = (self.at, self.at.plan, self.at.k);
        let Some(terms) = at.terms else { return };
        k.serial("key", self.count, |i| {
            let column = at.a.column_of_terms(self.first + i - at.last);
            let to = terms.row(i / plan.keys()).starting_at([i % plan.keys() * plan.vectors()]);
            k.serial("head", plan.heads, |slot| {
                let g = (set * plan.heads + slot).min(at.a.group - 1);
                if let Some(term) = at.a.term(column, at.head * at.a.group + g) {
                    to.set([plan.lane_of(slot)], term);
                }
            });
        });
    }

    /// Stores the scores of all keys; gives the largest of each lane. `products(offset)`: those of the keys
    /// of a step with all heads, in vectors of scores.
    pub fn store_scores(&self, set: Val<'k>, products: impl FnOnce(Val<'k>) -> Vec<Val<'k>>) -> Val<'k> {
        let (at, plan, k) = (self.at, self.at.plan, self.at.k);
        let lanes = plan.lanes;
        let best = k.reg("best", k.literal(MASKED, ExprType::vector(DType::F32, lanes)));
        let slope = at.slopes.map(|slopes| slopes.load((at.head, set, 0), lanes).named("slope"));
        self.load_terms(set);
        let vectors = plan.keys_together() / plan.keys();
        let by_step = |of: BufferView<'k, 2>| of.flat().rows(vectors * i64::from(lanes));
        let (scores, terms) = (by_step(at.weights), at.terms.map(by_step));
        k.serial("step", self.count.div_ceil(plan.keys_together()), |i| {
            let offset = (i * plan.keys_together()).named("offset");
            self.prefetch_scales(offset);
            self.prefetch_keys(offset, PrefetchTiming::Before);
            let products = products(offset);
            self.prefetch_keys(offset, PrefetchTiming::After);
            for (v, product) in (0..vectors).zip(products) {
                let first = offset + v * plan.keys();
                let scales = self.scales(at.a.key.1, first);
                let index = ScoreIndex {
                    p: at.last,
                    j: self.key_of_lane(first),
                    slope,
                    term: terms.map(|terms| terms.load((i, v * i64::from(lanes)), lanes)),
                    prefix: at.prefix,
                    border: None,
                    end: Some(self.last + 1),
                    // The keys begin with the first that the last query sees.
                    visible: at.prefix.is_none(),
                };
                let s = at.a.score(scales.map_or(product, |scales| product * scales), &index).named("s");
                scores.set((i, v * i64::from(lanes)), s);
                best.update(|best| larger_score(best, s));
            }
        });
        best.get().named("best")
    }

    /// The key of each lane of a vector of scores, the first being `offset` of the block: `i32`.
    fn key_of_lane(&self, offset: Val<'k>) -> Val<'k> {
        let plan = self.at.plan;
        let lane = self.at.k.int32(0).ramp(1, plan.lanes) & (plan.part() - 1);
        (lane >> i64::from(plan.vectors().trailing_zeros())) + (self.first + offset).cast(DType::I32)
    }

    /// The new running maxima; older sums count less by what they rose.
    pub fn raise_max(&self, set: Val<'k>, best: Val<'k>) -> Val<'k> {
        let (at, plan, k) = (self.at, self.at.plan, self.at.k);
        let (place, size) = ([at.head, set, k.int(0)], at.a.value_size);
        let best = over_keys(&plan, best, larger_score);
        let old = at.max.load(place, plan.lanes).named("old");
        let max = larger_score(old, best).named("max");
        k.when(old.lt(max).reduce_lanes(BinOp::Or), || {
            let factor = exp2_below_zero(old - max).named("factor");
            at.rescale.set([0], factor);
            at.max.set(place, max);
            at.row_sum.set(place, at.row_sum.load(place, plan.lanes) * factor);
            let (sums, lanes) = (at.set_accumulators(set), lanes_of(size, plan.lanes));
            k.serial("head", plan.heads, |head| {
                let factor = at.rescale.at([plan.lane_of(head)]).named("factor");
                let row = sums.starting_at([head * size]);
                k.vectors("c", size, lanes, |c| row.set([c], row.load([c], lanes) * factor));
            });
        });
        max
    }

    /// Scores to weights, and their sums. Where weights are to become codes, gives the largest sizes of
    /// scaled weights of each lane as bits, and their signs.
    pub fn softmax(&self, set: Val<'k>, max: Val<'k>) -> (Val<'k>, Val<'k>) {
        let (at, plan, k) = (self.at, self.at.plan, self.at.k);
        let lanes = plan.lanes;
        let [largest, signs] = ["largest", "signs"].map(|name| k.reg(name, k.zeros(DType::I32, lanes)));
        let place = [at.head, set, k.int(0)];
        let sum = k.reg("total", at.row_sum.load(place, lanes));
        k.serial("vector", self.vectors(), |i| {
            let share = self.prefetched_by_weights() * plan.keys() / plan.block;
            self.prefetch_next(plan.prefetch[1], i * share, share);
            let weight = exp2_below_zero(at.weights.load((i, 0), lanes) - max).named("weight");
            sum.update(|sum| sum + weight);
            let scales = self.scales(at.a.value.1, i * plan.keys());
            let scaled = scales.map_or(weight, |scales| weight * scales).named("scaled");
            at.weights.set((i, 0), scaled);
            if !matches!(plan.products, AttentionDot::Floats) {
                largest.update(|largest| largest.max(size_bits(scaled)));
                signs.update(|signs| signs | scaled.bits(DType::I32));
            }
        });
        at.row_sum.set(place, sum.get());
        (largest.get().named("largest"), signs.get().named("signs"))
    }

    /// Number `at` of at least 1 that only looks as if it depended on the block: unrolled, a loop over it
    /// would have its loads and prefetches moved together, and sums in memory.
    pub fn as_if_unknown(&self, number: i64) -> Val<'k> {
        let number = self.at.k.int(number);
        number.min(self.count * number)
    }

    /// The weight of a head and key of a vector of weights, by `[vectors, lanes]`.
    pub fn weight_at(&self, weights: BufferView<'k, 2>, (vector, key): (Val<'k>, i64), head: i64) -> Val<'k> {
        let plan = self.at.plan;
        weights.at((vector, plan.lane(head) + key * plan.vectors()))
    }
}

/// The largest over the keys of vectors of scores, by `larger`, in the lanes of all of them.
pub(super) fn over_keys<'k>(
    plan: &DecodePlan,
    mut largest: Val<'k>,
    larger: impl Fn(Val<'k>, Val<'k>) -> Val<'k>,
) -> Val<'k> {
    let mut distance = plan.vectors() as u32;
    while distance < plan.part() as u32 {
        let other = largest.shuffle((0..plan.lanes).map(|l| l ^ distance));
        largest = larger(largest, other).named("largest");
        distance *= 2;
    }
    largest
}
