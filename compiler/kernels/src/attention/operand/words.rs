//! Decode attention over caches of 8-bit codes where no instruction adds products of four bytes, but one
//! multiplies pairs of 16-bit codes ([`PairDot`]): queries, and weights times the scales of their rows, are
//! 16-bit block floating point, as precise as in [`super::bytes`]. Codes of the cache are widened, two
//! columns of a key to a word for scores, two keys of a column for sums of values. So a row takes half the
//! operations of converting it to f32, and a product half of those of floats.
//!
//! Sums of scores stay below `2^31` for rows of up to 512 columns, those of values for any block; they are
//! exact and become floats with the unit of their head.

use super::key_products::{KeyProducts, join_scores, unpack_keys};
use super::{QuantizedCache, codes, keep_query, query_row};
use crate::attention::codes::{MAGIC, MOST_SIGNED, add_pairs, encode_magic, pair_codes, unit_of};
use crate::attention::key_block::{KeyBlock, over_keys};
use crate::attention::key_head::KeyHead;
use crate::attention::plan::{DecodePlan, PAIR, lanes_of};
use crate::attention::problem::AttentionProblem;
use crate::params::PairDot;
use mlcc_ir::types::DType;
use mlcc_kernel_lang::{BufferView, Recorder, Val};
use std::ops::Range;

/// Sums of values in registers together; two more hold values, one a weight and one a product.
const SUMS: i64 = 8;
/// Most heads among them: each takes a load for its weights.
const HEADS: i64 = 4;

/// Buffers of the words on the stack, in addition to those of a [`KeyHead`].
#[derive(Clone, Copy)]
pub(in super::super) struct WordOperands<'k> {
    dot: PairDot,
    keys: QuantizedCache<'k>,
    values: QuantizedCache<'k>,
    /// Queries in the layout of float queries, a word for every two columns.
    queries: BufferView<'k, 3>,
    /// Keys that are summed together, `[keys, padded size]`.
    rows: BufferView<'k, 2>,
    /// Units of the queries, for every key of a vector: `[kv, sets, lanes]`.
    units: BufferView<'k, 3>,
    /// The weights of a block and a set: a pair of keys in the lane of the first, `[vectors, lanes]`; and
    /// their units, `[lanes]`.
    weights: BufferView<'k, 2>,
    weight_units: BufferView<'k, 1>,
    /// The values of a block: `[pairs of keys, value_size]`.
    mixed: BufferView<'k, 2>,
    /// A query before it is codes.
    query: BufferView<'k, 1>,
}

impl<'k> WordOperands<'k> {
    pub fn new(
        k: &'k Recorder,
        a: &AttentionProblem,
        plan: DecodePlan,
        dot: PairDot,
    ) -> Option<WordOperands<'k>> {
        let [keys, values] = codes(k, a)?;
        let (lanes, padded) = (i64::from(plan.lanes), plan.padded_elements(a.size));
        Some(WordOperands {
            dot,
            keys,
            values,
            queries: k.stack("query_words", DType::I32, [a.kv, plan.sets, plan.slots * padded]),
            rows: k.stack("key_words", DType::I32, [plan.keys_together(), padded]),
            units: k.stack("units", DType::F32, [a.kv, plan.sets, lanes]),
            weights: k.stack("weight_words", DType::I32, [plan.block / plan.keys(), lanes]),
            weight_units: k.stack("weight_units", DType::F32, [lanes]),
            mixed: k.stack("mixed", DType::I32, [plan.block / PAIR, a.value_size]),
            query: k.stack("q", DType::F32, [a.size]),
        })
    }

    pub fn clear_keys(&self, at: &KeyHead<'k, '_>) {
        let size = at.plan.keys_together() * at.plan.padded_elements(at.a.size);
        self.rows.flat().fill(size, at.k.zeros(DType::I32, lanes_of(size, at.plan.lanes)));
    }

    pub fn clear_queries(&self, at: &KeyHead<'k, '_>) {
        let (k, plan) = (at.k, at.plan);
        let words = plan.sets * plan.slots * plan.padded_elements(at.a.size);
        self.queries.row(at.head).row(0).fill(words, k.zeros(DType::I32, lanes_of(words, plan.lanes)));
        let units = plan.sets * i64::from(plan.lanes);
        self.units.starting_at((at.head, 0, 0)).fill(units, k.zeros(DType::F32, lanes_of(units, plan.lanes)));
    }

    /// Words of the scaled query of `head`, number `g` of the group.
    pub fn load_query(&self, at: &KeyHead<'k, '_>, g: Val<'k>, head: Val<'k>) {
        let (k, plan) = (at.k, at.plan);
        let largest = keep_query(at, self.query, head);
        let (unit, inverse) = unit_of(largest, k.float(MOST_SIGNED));
        let row = query_row(at, self.queries, g);
        let size = plan.padded_elements(at.a.size);
        let (lanes, part) = (lanes_of(size, plan.lanes), plan.part() as u32);
        k.vectors("c", size, lanes, |word| {
            let [first, second] = [0, lanes].map(|more| {
                encode_magic(self.query.load([word * PAIR + i64::from(more)], lanes), inverse, k.float(MAGIC))
            });
            let [even, odd] = [0, 1].map(|odd| first.shuffle_with(second, (0..lanes).map(|l| 2 * l + odd)));
            let words = pair_codes(even, odd);
            for from in (0..lanes).step_by(part as usize) {
                let number = word / i64::from(part) + i64::from(from / part);
                row.set([number * i64::from(plan.lanes)], words.shuffle(from..from + part));
            }
        });
        let slot = self.units.starting_at(at.slot(g)).named("slot");
        (0..plan.keys()).for_each(|key| slot.set([key * plan.vectors()], unit));
    }

    /// `lanes` words of a row of keys, from number `word` on.
    fn key(&self, block: &KeyBlock<'k, '_>, row: Val<'k>, word: Val<'k>, lanes: u32) -> Val<'k> {
        widened(self.keys.row(block, row, word * PAIR, PAIR as u32 * lanes))
    }

    /// Products of the keys of a step (from number `offset` of the block on) with all heads, in vectors of
    /// scores.
    pub fn products(&self, block: &KeyBlock<'k, '_>, set: Val<'k>, offset: Val<'k>) -> Vec<Val<'k>> {
        let (at, plan) = (block.at, block.at.plan);
        let (padded, lanes) = (plan.padded_elements(at.a.size), plan.lanes);
        let in_place = plan.reads_rows_in_place(at.a.size);
        if !in_place {
            unpack_keys(block, self.rows, offset, (at.a.size / PAIR, lanes), |row, word, lanes| {
                self.key(block, row, word, lanes)
            });
        }
        let used = (plan.heads + plan.across - 1) / plan.across;
        let products = KeyProducts {
            dtype: DType::I32,
            parts: block.as_if_unknown(padded / plan.part()),
            count: padded / plan.part(),
            part: plan.part(),
            queries: self.queries.row(at.head).row(set),
            pitch: lanes.into(),
            vectors: (0..used).map(|v| v * plan.across * padded).collect(),
            lanes,
        };
        let key = |i: i64, word: Val<'k>| {
            let part = match in_place {
                // Rows after the last one are masked.
                true => self.key(block, block.row(offset + i), word, lanes),
                false => plan.repeated_part(self.rows.flat(), word + i * padded),
            };
            part.named("k")
        };
        let sums = products.sum_products(block, offset, key, |sum, q, key| add_pairs(self.dot, sum, q, key));
        let named = |row: Vec<Val<'k>>| row.into_iter().map(|sum| sum.named("product")).collect();
        let sums = sums.into_iter().map(named).collect();
        let unit = self.units.load((at.head, set, 0), lanes).named("unit");
        join_scores(block, sums).into_iter().map(|all| all.cast(DType::F32) * unit).collect()
    }

    /// Scaled weights to words. `largest`: the largest sizes of the lanes as bits.
    pub fn encode_weights(&self, block: &KeyBlock<'k, '_>, largest: Val<'k>) {
        let (k, plan, lanes) = (block.at.k, block.at.plan, block.at.plan.lanes);
        let largest = over_keys(&plan, largest, |a, b| a.max(b));
        let (unit, inverse) = unit_of(largest, k.float(MOST_SIGNED));
        self.weight_units.set([0], unit);
        let alone = plan.keys() == 1;
        // Vectors whose keys make pairs.
        let vectors = if alone { PAIR } else { 1 };
        k.serial("step", block.vectors().div_ceil(vectors), |i| {
            let weights = block.at.weights.flat().starting_at([i * (vectors * i64::from(lanes))]);
            let code = |at: i64| encode_magic(weights.load([at], lanes), inverse, k.float(MAGIC));
            let first = code(0);
            let next = plan.vectors() as u32;
            let second = if alone { code(lanes.into()) } else { first.shuffle((0..lanes).map(|l| l ^ next)) };
            self.weights.set((i, 0), pair_codes(first, second));
        });
    }

    /// Rearranges the values of the block into pairs of keys. Rows after the last one repeat it; their
    /// weights are zero.
    fn pair_values(&self, block: &KeyBlock<'k, '_>) {
        let (at, k, lanes) = (block.at, block.at.k, block.at.plan.lanes);
        let wide = PAIR as u32 * lanes;
        k.serial("pair", block.count.div_ceil(PAIR), |pair| {
            block.prefetch_values(pair, at.plan.block / PAIR);
            let rows = [0, 1].map(|key| block.row(pair * PAIR + key));
            let to = self.mixed.row(pair);
            k.vectors("c", at.a.value_size, wide, |c| {
                let [even, odd] = rows.map(|row| self.values.row(block, row, c, wide).named("v"));
                for half in [0, lanes] {
                    let by_turns = |l: u32| half + l / 2 + if l.is_multiple_of(2) { 0 } else { wide };
                    let words = widened(even.shuffle_with(odd, (0..wide).map(by_turns)));
                    to.starting_at([c]).set([i64::from(half)], words);
                }
            });
        });
    }

    /// Adds the weighted values to the sums.
    pub fn add_values(&self, block: &KeyBlock<'k, '_>, set: Val<'k>) {
        self.pair_values(block);
        let plan = block.at.plan;
        let vectors = block.at.a.value_size / i64::from(plan.lanes);
        let turns = (plan.heads + HEADS - 1) / HEADS;
        let heads = (plan.heads + turns - 1) / turns;
        let most = (SUMS / heads).min(vectors);
        let together = (1..=most).rev().find(|u| vectors % u == 0).unwrap_or(1);
        block.at.k.serial("columns", vectors / together, |pass| {
            for first in (0..plan.heads).step_by(heads as usize) {
                let heads = first..(first + heads).min(plan.heads);
                self.add_pairs(block, set, heads, (pass, together));
            }
        });
    }

    /// The same for some heads of a set and `together` vectors of columns, the pass `pass` of such.
    fn add_pairs(
        &self,
        block: &KeyBlock<'k, '_>,
        set: Val<'k>,
        heads: Range<i64>,
        (pass, together): (Val<'k>, i64),
    ) {
        let (at, plan, k) = (block.at, block.at.plan, block.at.k);
        let (width, lanes) = (i64::from(plan.lanes), plan.lanes);
        let column = (pass * (together * width)).named("column");
        let zeros = k.zeros(DType::I32, lanes);
        let sums = k.regs("sum", [heads.end - heads.start, together], |_, _| zeros);
        k.serial("pair", block.count.div_ceil(PAIR), |pair| {
            let row = self.mixed.row(pair).starting_at([column]);
            let values: Vec<Val> = (0..together).map(|v| row.load([v * width], lanes).named("v")).collect();
            // Where the pair is in its vector of words.
            let of_vector = (plan.keys() / PAIR).max(1);
            let within = pair % of_vector * (PAIR * plan.vectors());
            let words = self.weights.row(pair / of_vector).starting_at([within]);
            let weight = |head| words.at([plan.lane(head)]).splat(lanes).named("weight");
            sums.add_outer(heads.clone().map(weight), &values, |sum, weight, value| {
                add_pairs(self.dot, sum, weight, value)
            });
        });
        for (head, sums) in heads.zip(sums.rows()) {
            let row = at.set_accumulators(set).starting_at([head * at.a.value_size]).starting_at([column]);
            let unit = self.weight_units.at([plan.lane(head)]).splat(lanes).named("unit");
            for (v, sum) in (0..).zip(sums) {
                let old = row.load([v * width], lanes);
                row.set([v * width], sum.get().cast(DType::F32).fma(unit, old));
            }
        }
    }
}

/// Codes to words of two neighbours.
fn widened(codes: Val) -> Val {
    codes.cast(DType::I16).bits(DType::I32).named("words")
}
