//! A block of keys of decode attention, for all query heads of a key head.
//!
//! Scores: see [`super::scores`]. Weights: vectors with equal heads in equal lanes need no reduction. Values: sums of
//! several heads and columns stay in registers over all keys of the block, so that every row is converted once. Scales of
//! rows are factors of scores and weights, not of elements.

use super::codes::size_bits;
use super::decode::{Item, columns};
use super::queries::Operands;
use super::schedule::{Ahead, Params, Products};
use super::{Problem, ceil_div, lanes_of, larger};
use crate::math::exp2_below_zero;
use mlcc_ir::builder::KernelBuilder;
use mlcc_ir::graph::ValueId;
use mlcc_ir::kernel::{BinOp, BufId, ExprId, Space, Ty};
use mlcc_ir::types::DType;
use mlcc_kernel_lang::CACHE_LINE;
use std::ops::Range;

/// Keys `first .. first + count` (positive, at most a block).
pub(super) struct Block<'a> {
    pub a: &'a Problem<'a>,
    pub item: Item,
    pub first: ExprId,
    pub count: ExprId,
}

impl Block<'_> {
    pub fn emit(&self, kb: &mut KernelBuilder) {
        let sets = kb.int(self.item.params.sets);
        kb.serial("set", sets, |kb, set| {
            let best = self.scores(kb, set);
            let max = self.raise_max(kb, set, best);
            let largest = self.weigh(kb, set, max);
            match &self.item.operands {
                Operands::Floats => self.mix(kb, set),
                Operands::Bytes(codes) => {
                    let added = self.weight_codes(kb, codes, largest);
                    self.mix_codes(kb, codes, set, added);
                }
                Operands::Words(words) => {
                    self.weight_words(kb, words, largest.0);
                    self.mix_words(kb, words, set);
                }
            }
        });
    }

    pub(super) fn lanes(&self) -> u32 {
        self.item.params.lanes
    }
    /// Vectors of scores that hold keys.
    pub(super) fn vectors(&self, kb: &mut KernelBuilder) -> ExprId {
        let (params, mut count) = (self.item.params, self.count);
        // Codes of weights are made by some keys at a time; what is behind the last key weighs nothing.
        let step = params.products.keys();
        if params.keys() < step {
            let by = kb.int(step);
            let steps = ceil_div(kb, count, by);
            count = kb.mul(steps, by);
        }
        let keys = kb.int(params.keys());
        ceil_div(kb, count, keys)
    }
    /// The row of key `i` of the block; rows behind the last one stand in for none.
    pub(super) fn row(&self, kb: &mut KernelBuilder, i: ExprId) -> ExprId {
        let row = kb.add(self.first, i);
        let row = kb.min(row, self.item.last);
        kb.let_("row", row)
    }
    /// The scales of the rows of a vector of scores, key `first` of the block being its first.
    pub(super) fn scales(
        &self,
        kb: &mut KernelBuilder,
        scale: Option<ValueId>,
        first: ExprId,
    ) -> Option<ExprId> {
        let (scale, params, zero) = (scale?, self.item.params, kb.int(0));
        let each = (0..params.keys()).map(|key| {
            let i = kb.add_int(first, key);
            let row = self.row(kb, i);
            let value = self.a.row(kb, scale, row, self.item.head, zero, 1);
            kb.splat(value, params.lanes)
        });
        let each: Vec<ExprId> = each.collect();
        let of_key = |l: u32| i64::from(l) % params.part() / params.vectors();
        let chosen = (0..).zip(each).reduce(|(_, all), (key, value)| {
            let lanes = (0..params.lanes).map(|l| if of_key(l) == key { params.lanes + l } else { l });
            (key, kb.shuffle(all, Some(value), lanes.collect()))
        });
        chosen.map(|(_, scales)| kb.let_("scales", scales))
    }
    /// Place of a row in a buffer with a row per query head.
    pub(super) fn row_of(&self, kb: &mut KernelBuilder, set: ExprId, head: i64, size: i64) -> ExprId {
        let zero = kb.int(0);
        let first = self.item.row_of(kb, zero, size);
        let before = kb.mul_int(set, self.item.params.heads * size);
        let row = kb.add(first, before);
        kb.add_int(row, head * size)
    }

    /// Asks for `width` elements of the next block, from number `at` of the share of this head on (`[block, size]`).
    pub(super) fn ahead(&self, kb: &mut KernelBuilder, ahead: Option<Ahead>, at: ExprId, width: i64) {
        let Some(ahead) = ahead.filter(|_| !self.item.params.in_order) else { return };
        let next = kb.add_int(self.first, self.item.params.block);
        self.item.ask(kb, self.a, ahead, next, (at, width));
    }
    /// Elements of the values of the next block that are asked for while scores become weights, a line for every vector of
    /// them; at most half of this head's share. Memory would have nothing to do in this part of the time.
    fn asked_by_weights(&self) -> i64 {
        let params = self.item.params;
        if matches!(params.products, Products::Words(_)) {
            // Pairing values has time for all of them.
            return 0;
        }
        let line = params.ahead[1].map_or(0, |ahead| CACHE_LINE as i64 / ahead.bytes);
        (params.block / params.keys() * line).min(params.block * self.a.value_size / 2)
    }
    /// Asks for more values of the next block: turn `turn` of `turns` that share what weights have left.
    pub(super) fn values_ahead(&self, kb: &mut KernelBuilder, turn: ExprId, turns: i64) {
        let asked = self.asked_by_weights();
        let left = self.item.params.block * self.a.value_size - asked;
        let share = (left + turns - 1) / turns;
        let at = kb.mul_int(turn, share);
        let at = kb.add_int(at, asked);
        self.ahead(kb, self.item.params.ahead[1], at, share);
    }

    /// The new running maxima; older sums count less by what they rose.
    fn raise_max(&self, kb: &mut KernelBuilder, set: ExprId, best: ExprId) -> ExprId {
        let (params, lanes) = (self.item.params, self.lanes());
        let best = largest_of_keys(kb, &params, best, larger);
        let at = self.item.vector_of(kb, set);
        let old = kb.load_vec(self.item.max, at, lanes);
        let old = kb.let_("old", old);
        let max = larger(kb, old, best);
        let max = kb.let_("max", max);
        let rose = kb.lt(old, max);
        let rose = kb.reduce_lanes(BinOp::Or, rose);
        kb.if_(rose, |kb| {
            let fallen = kb.sub(old, max);
            let factor = exp2_below_zero(kb, fallen);
            let factor = kb.let_("factor", factor);
            let zero = kb.int(0);
            kb.store_vec(self.item.factor, zero, factor);
            kb.store_vec(self.item.max, at, max);
            let total = kb.load_vec(self.item.total, at, lanes);
            let total = kb.mul(total, factor);
            kb.store_vec(self.item.total, at, total);
            let heads = kb.int(params.heads);
            let first = self.row_of(kb, set, 0, self.a.value_size);
            kb.serial("head", heads, |kb, head| {
                let lane = params.lane_of(kb, head);
                let factor = kb.load(self.item.factor, lane);
                let factor = kb.let_("factor", factor);
                let row = kb.mul_int(head, self.a.value_size);
                let row = kb.add(first, row);
                let lanes = lanes_of(self.a.value_size, lanes);
                columns(kb, self.a.value_size, lanes, |kb, c| {
                    let at = kb.add(row, c);
                    let old = kb.load_vec(self.item.sums, at, lanes);
                    let new = kb.mul(old, factor);
                    kb.store_vec(self.item.sums, at, new);
                });
            });
        });
        max
    }

    /// Scores to weights, and their sums; gives the largest sizes of scaled weights of each lane as bits, and their signs,
    /// where they are to become codes.
    fn weigh(&self, kb: &mut KernelBuilder, set: ExprId, max: ExprId) -> (ExprId, ExprId) {
        let (lanes, zero) = (self.lanes(), kb.int(0));
        let nothing = kb.constant(0.0, Ty::vector(DType::I32, lanes));
        let [largest, signs] = ["largest", "signs"].map(|name| {
            let cell = kb.alloc(name, DType::I32, lanes as usize, Space::Local);
            kb.store_vec(cell, zero, nothing);
            cell
        });
        let at = self.item.vector_of(kb, set);
        let sum = kb.alloc("total", DType::F32, lanes as usize, Space::Local);
        let old = kb.load_vec(self.item.total, at, lanes);
        kb.store_vec(sum, zero, old);
        let params = self.item.params;
        let vectors = self.vectors(kb);
        kb.serial("vector", vectors, |kb, i| {
            let share = self.asked_by_weights() * params.keys() / params.block;
            let asked = kb.mul_int(i, share);
            self.ahead(kb, params.ahead[1], asked, share);
            let at = kb.mul_int(i, i64::from(lanes));
            let s = kb.load_vec(self.item.weights, at, lanes);
            let below = kb.sub(s, max);
            let weight = exp2_below_zero(kb, below);
            let weight = kb.let_("weight", weight);
            let old = kb.load_vec(sum, zero, lanes);
            let new = kb.add(old, weight);
            kb.store_vec(sum, zero, new);
            let first = kb.mul_int(i, params.keys());
            let scaled = self.scales(kb, self.a.value.1, first).map(|scales| kb.mul(weight, scales));
            let scaled = kb.let_("scaled", scaled.unwrap_or(weight));
            kb.store_vec(self.item.weights, at, scaled);
            if !matches!(self.item.operands, Operands::Floats) {
                let (size, old) = (size_bits(kb, scaled), kb.load_vec(largest, zero, lanes));
                let new = kb.max(old, size);
                kb.store_vec(largest, zero, new);
                let bits = kb.bitcast(scaled, Ty::vector(DType::I32, lanes));
                let old = kb.load_vec(signs, zero, lanes);
                let new = kb.binary(BinOp::Or, old, bits);
                kb.store_vec(signs, zero, new);
            }
        });
        let sum = kb.load_vec(sum, zero, lanes);
        kb.store_vec(self.item.total, at, sum);
        let (largest, signs) = (kb.load_vec(largest, zero, lanes), kb.load_vec(signs, zero, lanes));
        (kb.let_("largest", largest), kb.let_("signs", signs))
    }

    /// Adds the weighted values to the sums.
    fn mix(&self, kb: &mut KernelBuilder, set: ExprId) {
        let (a, params) = (self.a, self.item.params);
        let lanes = lanes_of(a.value_size, params.lanes);
        let vectors = a.value_size / i64::from(lanes);
        let at_once = params.heads_at_once(vectors);
        let most = (params.sums / at_once).max(1);
        let together = (1..=most.min(vectors)).rev().find(|u| vectors % u == 0).unwrap_or(1);
        let width = together * i64::from(lanes);
        let passes = kb.int(vectors / together);
        kb.serial("columns", passes, |kb, pass| {
            let c = kb.mul_int(pass, width);
            let c = kb.let_("c", c);
            for first in (0..params.heads).step_by(at_once as usize) {
                let heads = first..(first + at_once).min(params.heads);
                self.mix_floats(kb, (set, heads), (c, together), lanes);
            }
        });
    }

    /// The same for some heads of a set and so many vectors of columns from `c` on.
    fn mix_floats(
        &self,
        kb: &mut KernelBuilder,
        (set, heads): (ExprId, Range<i64>),
        (c, together): (ExprId, i64),
        lanes: u32,
    ) {
        let (params, width) = (self.item.params, together * i64::from(lanes));
        let places: Vec<Vec<ExprId>> = heads
            .clone()
            .map(|head| {
                let row = self.row_of(kb, set, head, self.a.value_size);
                let at = kb.add(row, c);
                (0..together).map(|v| kb.add_int(at, v * i64::from(lanes))).collect()
            })
            .collect();
        let zero = kb.int(0);
        let load = |kb: &mut KernelBuilder, at: ExprId| {
            let sum = kb.alloc("sum", DType::F32, lanes as usize, Space::Local);
            let old = kb.load_vec(self.item.sums, at, lanes);
            kb.store_vec(sum, zero, old);
            sum
        };
        let sums: Vec<Vec<BufId>> =
            places.iter().map(|of_head| of_head.iter().map(|&at| load(kb, at)).collect()).collect();
        let keys = kb.int(params.keys());
        let full = kb.div(self.count, keys);
        let vector = |kb: &mut KernelBuilder, vector: ExprId, whole: bool| {
            for key in 0..params.keys() {
                self.mix_key(kb, (vector, key, whole), (c, width), (heads.start, &sums));
            }
        };
        kb.serial("vector", full, |kb, i| vector(kb, i, true));
        if params.keys() > 1 {
            let rest = kb.rem(self.count, keys);
            let some = kb.lt(zero, rest);
            kb.if_(some, |kb| vector(kb, full, false));
        }
        for (&at, &sum) in places.iter().flatten().zip(sums.iter().flatten()) {
            let value = kb.load_vec(sum, zero, lanes);
            kb.store_vec(self.item.sums, at, value);
        }
    }

    /// Key `key` of a vector of weights, `width` columns from `c` on: sums by head and vector. Where the vector is not
    /// `whole`, the last row stands in for those behind it, which weigh nothing.
    fn mix_key(
        &self,
        kb: &mut KernelBuilder,
        (vector, key, whole): (ExprId, i64, bool),
        (c, width): (ExprId, i64),
        (first_head, sums): (i64, &[Vec<BufId>]),
    ) {
        let (params, zero) = (self.item.params, kb.int(0));
        let lanes = (width / sums[0].len() as i64) as u32;
        let i = kb.mul_int(vector, params.keys());
        let i = kb.add_int(i, key);
        let row = if whole { kb.add(self.first, i) } else { self.row(kb, i) };
        if whole && first_head == 0 {
            let passes = self.a.value_size / width;
            let (of_pass, by) = (kb.mul_int(c, params.block), kb.int(width));
            let of_pass = kb.div(of_pass, by);
            let turn = kb.add(of_pass, i);
            self.values_ahead(kb, turn, passes * params.block);
        }
        let values: Vec<ExprId> = (0..sums[0].len() as i64)
            .map(|v| {
                let c = kb.add_int(c, v * i64::from(lanes));
                let value = self.a.row(kb, self.a.value.0, row, self.item.head, c, lanes);
                kb.let_("v", value)
            })
            .collect();
        let base = kb.mul_int(vector, i64::from(params.lanes));
        for (head, of_head) in (first_head..).zip(sums) {
            let at = kb.add_int(base, params.lane(head) + key * params.vectors());
            let weight = kb.load(self.item.weights, at);
            let weight = kb.splat(weight, lanes);
            let weight = kb.let_("weight", weight);
            for (&sum, &value) in of_head.iter().zip(&values) {
                let old = kb.load_vec(sum, zero, lanes);
                let new = kb.fma(weight, value, old);
                kb.store_vec(sum, zero, new);
            }
        }
    }
}

/// The largest over the keys of vectors of scores, by `larger`, in the lanes of all of them.
pub(super) fn largest_of_keys(
    kb: &mut KernelBuilder,
    params: &Params,
    mut largest: ExprId,
    larger: impl Fn(&mut KernelBuilder, ExprId, ExprId) -> ExprId,
) -> ExprId {
    let mut distance = params.vectors() as u32;
    while distance < params.part() as u32 {
        let other = kb.shuffle(largest, None, (0..params.lanes).map(|l| l ^ distance).collect());
        let both = larger(kb, largest, other);
        largest = kb.let_("largest", both);
        distance *= 2;
    }
    largest
}
