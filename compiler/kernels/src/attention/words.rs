//! Decode attention over caches of 8-bit codes where no instruction adds products of four bytes, but one multiplies pairs of 16-bit
//! codes ([`PairDot`]): queries, and weights times the scales of their rows, are 16-bit block floating point, as precise as in
//! [`super::codes`]. Codes of the cache are widened, two columns of a key to a word for scores, two keys of a column for sums of
//! values. So a row takes half the operations of converting it to f32, and a product half of those of floats.
//!
//! Sums of scores stay below `2^31` for rows of up to [`LONGEST`] columns, those of values for any block; they are exact and
//! become floats with the unit of their head.

use super::block::{Block, largest_of_keys};
use super::codes::{LONGEST, MAGIC, MOST_SIGNED, code_row, coded, unit_of};
use super::decode::{Item, columns};
use super::pairs::{PAIR, joined};
use super::schedule::Params;
use super::{Problem, ceil_div, lanes_of};
use crate::params::PairDot;
use mlcc_ir::builder::KernelBuilder;
use mlcc_ir::kernel::{BufId, ExprId, Space, Ty};
use mlcc_ir::types::DType;
use std::ops::Range;

/// Sums of values in registers together; two more hold values, one a weight and one a product.
const SUMS: i64 = 8;
/// Most heads among them: each takes a load for its weights.
const HEADS: i64 = 4;

/// True if rows of codes make words, and vectors of them.
pub(super) fn fits(a: &Problem, (lanes, part): (u32, i64)) -> bool {
    let vector = PAIR * i64::from(lanes);
    a.size % (PAIR * part) == 0 && a.value_size % vector == 0 && a.size <= LONGEST && a.has_codes()
}

/// Heads that share a vector of products: every part of a key is loaded for two vectors, and a product more is cheaper than
/// adding up lanes.
pub(super) fn across(slots: i64, lanes: u32) -> i64 {
    (slots / 2).clamp(1, i64::from(lanes) / 2)
}

/// What the words need on the stack, besides an [`Item`]'s buffers.
#[derive(Clone, Copy)]
pub(super) struct Words {
    pub dot: PairDot,
    keys: BufId,
    values: BufId,
    /// As the floats of an [`Item`] lie, a word for every two columns.
    pub queries: BufId,
    pub rows: BufId,
    /// Units of the queries, for every key of a vector: `[kv, sets, lanes]`.
    pub units: BufId,
    /// The weights of a block and a set: a pair of keys in the lane of the first, `[vectors, lanes]`; and their units, `[lanes]`.
    weights: BufId,
    weight_units: BufId,
    /// The values of a block: `[pairs of keys, value_size]`.
    mixed: BufId,
}

impl Words {
    pub fn new(kb: &mut KernelBuilder, a: &Problem, params: Params, dot: PairDot) -> Option<Words> {
        let (keys, values) = (a.codes(a.key)?, a.codes(a.value)?);
        let mut stack =
            |name: &str, dtype: DType, len: i64| kb.alloc(name, dtype, len as usize, Space::Stack);
        let lanes = i64::from(params.lanes);
        Some(Words {
            dot,
            keys,
            values,
            queries: stack("query_words", DType::I32, a.kv * params.queries(a)),
            rows: stack("key_words", DType::I32, params.together() * params.padded(a.size)),
            units: stack("units", DType::F32, a.kv * params.sets * lanes),
            weights: stack("weight_words", DType::I32, params.block * params.slots),
            weight_units: stack("weight_units", DType::F32, lanes),
            mixed: stack("mixed", DType::I32, params.block / PAIR * a.value_size),
        })
    }

    /// `lanes` words of the key in a row, from number `word` on.
    pub fn key(
        &self,
        kb: &mut KernelBuilder,
        (a, row, head): (&Problem, ExprId, ExprId),
        word: ExprId,
        lanes: u32,
    ) -> ExprId {
        let c = kb.mul_int(word, PAIR);
        let codes = code_row(kb, (self.keys, a.size), (a, row, head), c, PAIR as u32 * lanes);
        widened(kb, codes)
    }
}

/// Codes to words of two neighbours.
fn widened(kb: &mut KernelBuilder, codes: ExprId) -> ExprId {
    let lanes = kb.ty(codes).lanes / PAIR as u32;
    let wide = kb.cast(codes, DType::I16);
    let words = kb.bitcast(wide, Ty::vector(DType::I32, lanes));
    kb.let_("words", words)
}

impl Item {
    /// Zeros in the place of keys.
    pub(super) fn clear_key_words(&self, kb: &mut KernelBuilder, a: &Problem, words: &Words) {
        let size = self.params.together() * self.params.padded(a.size);
        let lanes = lanes_of(size, self.params.lanes);
        let nothing = kb.constant(0.0, Ty::vector(DType::I32, lanes));
        columns(kb, size, lanes, |kb, c| kb.store_vec(words.rows, c, nothing));
    }

    /// Zeros for the queries of all heads.
    pub(super) fn clear_words(&self, kb: &mut KernelBuilder, a: &Problem, words: &Words) {
        let (params, zero) = (self.params, kb.int(0));
        let (queries, vectors) = (self.queries_of(kb, a, zero), self.vector_of(kb, zero));
        for (buf, dtype, first, len) in [
            (words.queries, DType::I32, queries, params.queries(a)),
            (words.units, DType::F32, vectors, params.sets * i64::from(params.lanes)),
        ] {
            let lanes = lanes_of(len, params.lanes);
            let nothing = kb.constant(0.0, Ty::vector(dtype, lanes));
            columns(kb, len, lanes, |kb, c| {
                let at = kb.add(first, c);
                kb.store_vec(buf, at, nothing);
            });
        }
    }

    /// Words of the scaled query of `head`, number `g` of the group.
    pub(super) fn load_query_words(
        &self,
        kb: &mut KernelBuilder,
        a: &Problem,
        words: &Words,
        (g, head): (ExprId, ExprId),
    ) {
        let params = self.params;
        let largest = self.keep_query(kb, a, head);
        let most = kb.float(MOST_SIGNED);
        let (unit, inverse) = unit_of(kb, largest, most);
        let row = self.query_row(kb, a, g);
        let size = params.padded(a.size);
        let (lanes, part) = (lanes_of(size, params.lanes), params.part() as u32);
        columns(kb, size, lanes, |kb, word| {
            let c = kb.mul_int(word, PAIR);
            let magic = kb.float(MAGIC);
            let [first, second] = [0, lanes].map(|more| {
                let at = kb.add_int(c, more.into());
                let value = kb.load_vec(self.q, at, lanes);
                coded(kb, value, inverse, magic)
            });
            let [even, odd] = [0, 1].map(|odd| {
                let lanes = (0..lanes).map(|l| 2 * l + odd).collect();
                kb.shuffle(first, Some(second), lanes)
            });
            let value = joined(kb, even, odd);
            for from in (0..lanes).step_by(part as usize) {
                let of_part = kb.int(part.into());
                let number = kb.div(word, of_part);
                let at = kb.add_int(number, i64::from(from / part));
                let at = kb.mul_int(at, params.lanes.into());
                let at = kb.add(row, at);
                let value = kb.shuffle(value, None, (from..from + part).collect());
                kb.store_vec(words.queries, at, value);
            }
        });
        let slot = self.slot(kb, g);
        let slot = kb.let_("slot", slot);
        for key in 0..params.keys() {
            let at = kb.add_int(slot, key * params.vectors());
            kb.store(words.units, at, unit);
        }
    }
}

impl Block<'_> {
    /// Pairs of keys that hold any.
    fn pairs(&self, kb: &mut KernelBuilder) -> ExprId {
        let pair = kb.int(PAIR);
        ceil_div(kb, self.count, pair)
    }

    /// Scaled weights to words. `largest`: the largest sizes of the lanes as bits.
    pub(super) fn weight_words(&self, kb: &mut KernelBuilder, words: &Words, largest: ExprId) {
        let (params, zero) = (self.item.params, kb.int(0));
        let lanes = params.lanes;
        let largest = largest_of_keys(kb, &params, largest, |kb, a, b| kb.max(a, b));
        let most = kb.float(MOST_SIGNED);
        let (unit, inverse) = unit_of(kb, largest, most);
        kb.store_vec(words.weight_units, zero, unit);
        let alone = params.keys() == 1;
        // Vectors whose keys make pairs.
        let vectors = if alone { PAIR } else { 1 };
        let (all, by) = (self.vectors(kb), kb.int(vectors));
        let steps = ceil_div(kb, all, by);
        kb.serial("step", steps, |kb, i| {
            let at = kb.mul_int(i, vectors * i64::from(lanes));
            let magic = kb.float(MAGIC);
            let code = |kb: &mut KernelBuilder, more: i64| {
                let at = kb.add_int(at, more);
                let weight = kb.load_vec(self.item.weights, at, lanes);
                coded(kb, weight, inverse, magic)
            };
            let first = code(kb, 0);
            let second = match alone {
                true => code(kb, lanes.into()),
                false => {
                    let next = params.vectors() as u32;
                    kb.shuffle(first, None, (0..lanes).map(|l| l ^ next).collect())
                }
            };
            let value = joined(kb, first, second);
            let at = kb.mul_int(i, lanes.into());
            kb.store_vec(words.weights, at, value);
        });
    }

    /// Turns the values of the block into pairs of keys. Rows behind the last one stand in for none: they weigh nothing.
    fn pair_values(&self, kb: &mut KernelBuilder, words: &Words) {
        let (a, lanes) = (self.a, self.lanes());
        let pairs = self.pairs(kb);
        kb.serial("pair", pairs, |kb, pair| {
            self.values_ahead(kb, pair, self.item.params.block / PAIR);
            let first = kb.mul_int(pair, PAIR);
            let rows = [0, 1].map(|key| {
                let number = kb.add_int(first, key);
                self.row(kb, number)
            });
            let start = kb.mul_int(pair, a.value_size);
            columns(kb, a.value_size, PAIR as u32 * lanes, |kb, c| {
                let [even, odd] = rows.map(|row| {
                    let place = (a, row, self.item.head);
                    let value = code_row(kb, (words.values, a.value_size), place, c, PAIR as u32 * lanes);
                    kb.let_("v", value)
                });
                let at = kb.add(start, c);
                for half in [0, lanes] {
                    let by_turns = |l: u32| half + l / 2 + if l.is_multiple_of(2) { 0 } else { 2 * lanes };
                    let codes = kb.shuffle(even, Some(odd), (0..2 * lanes).map(by_turns).collect());
                    let value = widened(kb, codes);
                    let at = kb.add_int(at, half.into());
                    kb.store_vec(words.mixed, at, value);
                }
            });
        });
    }

    /// Adds the weighted values to the sums.
    pub(super) fn mix_words(&self, kb: &mut KernelBuilder, words: &Words, set: ExprId) {
        self.pair_values(kb, words);
        let (params, lanes) = (self.item.params, i64::from(self.lanes()));
        let vectors = self.a.value_size / lanes;
        let turns = (params.heads + HEADS - 1) / HEADS;
        let heads = (params.heads + turns - 1) / turns;
        let most = (SUMS / heads).min(vectors);
        let together = (1..=most).rev().find(|u| vectors % u == 0).unwrap_or(1);
        let passes = kb.int(vectors / together);
        kb.serial("columns", passes, |kb, pass| {
            for first in (0..params.heads).step_by(heads as usize) {
                let heads = first..(first + heads).min(params.heads);
                self.mix_pairs(kb, words, (set, heads), (pass, together));
            }
        });
    }

    /// The same for some heads of a set and `together` vectors of columns, the pass `pass` of such.
    fn mix_pairs(
        &self,
        kb: &mut KernelBuilder,
        words: &Words,
        (set, heads): (ExprId, Range<i64>),
        (pass, together): (ExprId, i64),
    ) {
        let (params, lanes, zero) = (self.item.params, self.lanes(), kb.int(0));
        let width = together * i64::from(lanes);
        let column = kb.mul_int(pass, width);
        let column = kb.let_("column", column);
        let nothing = kb.constant(0.0, Ty::vector(DType::I32, lanes));
        let sum = |kb: &mut KernelBuilder| {
            let sum = kb.alloc("sum", DType::I32, lanes as usize, Space::Local);
            kb.store_vec(sum, zero, nothing);
            sum
        };
        let sums: Vec<Vec<BufId>> = heads.clone().map(|_| (0..together).map(|_| sum(kb)).collect()).collect();
        let pairs = self.pairs(kb);
        kb.serial("pair", pairs, |kb, pair| {
            let from = kb.mul_int(pair, self.a.value_size);
            let from = kb.add(from, column);
            let values: Vec<ExprId> = (0..together)
                .map(|v| {
                    let at = kb.add_int(from, v * i64::from(lanes));
                    let value = kb.load_vec(words.mixed, at, lanes);
                    kb.let_("v", value)
                })
                .collect();
            // Where the pair is in its vector of words.
            let of_vector = kb.int((params.keys() / PAIR).max(1));
            let (vector, within) = (kb.div(pair, of_vector), kb.rem(pair, of_vector));
            let vector = kb.mul_int(vector, lanes.into());
            let within = kb.mul_int(within, PAIR * params.vectors());
            let base = kb.add(vector, within);
            for (head, of_head) in heads.clone().zip(&sums) {
                let at = kb.add_int(base, params.lane(head));
                let weight = kb.load(words.weights, at);
                let weight = kb.splat(weight, lanes);
                let weight = kb.let_("weight", weight);
                for (&sum, &value) in of_head.iter().zip(&values) {
                    let old = kb.load_vec(sum, zero, lanes);
                    let new = words.dot.add(kb, old, weight, value);
                    kb.store_vec(sum, zero, new);
                }
            }
        });
        for (head, of_head) in heads.zip(&sums) {
            let row = self.row_of(kb, set, head, self.a.value_size);
            let row = kb.add(row, column);
            let lane = kb.int(params.lane(head));
            let unit = kb.load(words.weight_units, lane);
            let unit = kb.splat(unit, lanes);
            let unit = kb.let_("unit", unit);
            for (v, &sum) in (0..).zip(of_head) {
                let at = kb.add_int(row, v * i64::from(lanes));
                let value = kb.load_vec(sum, zero, lanes);
                let value = kb.cast(value, DType::F32);
                let old = kb.load_vec(self.item.sums, at, lanes);
                let new = kb.fma(value, unit, old);
                kb.store_vec(self.item.sums, at, new);
            }
        }
    }
}
