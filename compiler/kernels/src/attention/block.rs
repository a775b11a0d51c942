//! A block of keys of decode attention, for all query heads of a key head.
//!
//! Scores: the products of some keys with all heads are summed in registers along the rows, one vector per pair, and these
//! vectors are then added up together: a tree of exchanges gives one vector with the score of every pair, head by head
//! for each key. Weights: vectors with equal heads in equal lanes need no reduction. Values: sums of several heads and
//! columns stay in registers over all keys of the block, so that every row is converted once.

use super::decode::{Ahead, Item, columns};
use super::{HIDDEN, Place, Problem, ceil_div, lanes_of};
use crate::contraction::CACHE_LINE;
use crate::math::exp_below_zero;
use mlcc_ir::builder::KernelBuilder;
use mlcc_ir::kernel::{BinOp, BufId, ExprId, Space, Stmt, Ty};
use mlcc_ir::types::DType;

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
            self.weigh(kb, set, max);
            self.mix(kb, set);
        });
    }

    fn lanes(&self) -> u32 {
        self.item.params.lanes
    }
    /// Vectors of scores.
    fn steps(&self, kb: &mut KernelBuilder) -> ExprId {
        let keys = kb.int(self.item.params.keys());
        ceil_div(kb, self.count, keys)
    }
    /// Place of a row in a buffer with a row per query head.
    fn row_of(&self, kb: &mut KernelBuilder, set: ExprId, head: i64, size: i64) -> ExprId {
        let zero = kb.int(0);
        let first = self.item.row_of(kb, zero, size);
        let before = kb.mul_int(set, self.item.params.heads * size);
        let row = kb.add(first, before);
        kb.add_int(row, head * size)
    }

    /// Asks for a row's worth of the next block (an item with all key heads goes on with it): the heads' parts of it, one
    /// for each key of this block, lie one after the other, so that memory is read in order. An item with one key head
    /// asks for the same head.
    fn ahead(&self, kb: &mut KernelBuilder, ahead: Option<Ahead>, i: ExprId, (c, width): (ExprId, i64)) {
        let Some(Ahead { buf, prefetch, size, bytes }) = ahead else { return };
        let (block, row) = (self.item.params.block, self.a.kv * size);
        let next = kb.add_int(self.first, block);
        let start = kb.mul_int(next, row);
        let in_order = {
            let before = kb.mul_int(self.item.head, block);
            let row = kb.add(before, i);
            kb.mul_int(row, size)
        };
        let same_head = {
            let (of_key, of_head) = (kb.mul_int(i, row), kb.mul_int(self.item.head, size));
            kb.add(of_key, of_head)
        };
        let offset = kb.select(self.item.whole, in_order, same_head);
        let at = kb.add(start, offset);
        let at = kb.add(at, c);
        let (end, line) = (kb.mul_int(self.item.last, row), CACHE_LINE as i64 / bytes);
        let mut from = 0;
        while from < width {
            let place = kb.add_int(at, from);
            let place = kb.min(place, end);
            let element = kb.load(buf, place);
            kb.push(Stmt::Instr { instr: prefetch, args: vec![element] });
            from += line;
        }
    }

    /// Stores the scores of all keys; gives the largest of each lane.
    fn scores(&self, kb: &mut KernelBuilder, set: ExprId) -> ExprId {
        let (keys, lanes, zero) = (self.item.params.keys(), self.lanes(), kb.int(0));
        let best = kb.alloc("best", DType::F32, lanes as usize, Space::Local);
        let hidden = kb.constant(HIDDEN, Ty::vector(DType::F32, lanes));
        kb.store_vec(best, zero, hidden);
        let slope = self.item.slopes.map(|slopes| {
            let at = self.item.vector_of(kb, set);
            let slope = kb.load_vec(slopes, at, lanes);
            kb.let_("slope", slope)
        });
        let steps = self.steps(kb);
        kb.serial("step", steps, |kb, step| {
            let offset = kb.mul_int(step, keys);
            let key = kb.add(self.first, offset);
            let key = kb.let_("key", key);
            for i in 0..keys {
                let (i, zero) = (kb.add_int(offset, i), kb.int(0));
                self.ahead(kb, self.item.params.ahead[0], i, (zero, self.a.size));
            }
            let products = self.products(kb, set, key);
            let products = sum_each(kb, products, lanes);
            let j = self.key_of_lane(kb, key);
            let place =
                Place { p: self.item.last, j, slope, prefix: self.item.prefix, end: Some(self.item.end) };
            let s = self.a.score(kb, products, &place);
            let s = kb.let_("s", s);
            let at = kb.mul_int(step, i64::from(lanes));
            kb.store_vec(self.item.weights, at, s);
            let old = kb.load_vec(best, zero, lanes);
            let new = kb.max(old, s);
            kb.store_vec(best, zero, new);
        });
        let best = kb.load_vec(best, zero, lanes);
        kb.let_("best", best)
    }

    /// The key that a lane of a vector of scores stands for, the first being `key`: `i32`.
    fn key_of_lane(&self, kb: &mut KernelBuilder, key: ExprId) -> ExprId {
        let key = kb.cast(key, DType::I32);
        let (zero, one) = (kb.int_of(0, DType::I32), kb.int_of(1, DType::I32));
        let lane = kb.ramp(zero, one, self.lanes());
        let shift = kb.int_of(self.item.params.slots.trailing_zeros().into(), DType::I32);
        let offset = kb.binary(BinOp::Shr, lane, shift);
        kb.add(offset, key)
    }

    /// A vector of partial sums for every pair of one of the keys from `key` on and a slot; `None` where no head is.
    fn products(&self, kb: &mut KernelBuilder, set: ExprId, key: ExprId) -> Vec<Option<ExprId>> {
        let (a, params) = (self.a, self.item.params);
        let (lanes, zero) = (lanes_of(a.size, params.lanes), kb.int(0));
        // Rows behind the last one stand in for none.
        let rows: Vec<ExprId> = (0..params.keys())
            .map(|i| {
                let row = kb.add_int(key, i);
                let row = kb.min(row, self.item.last);
                kb.let_("row", row)
            })
            .collect();
        let sums: Vec<BufId> = (0..params.keys() * params.heads)
            .map(|_| {
                let sum = kb.alloc("sum", DType::F32, lanes as usize, Space::Local);
                let nothing = kb.constant(0.0, Ty::vector(DType::F32, lanes));
                kb.store_vec(sum, zero, nothing);
                sum
            })
            .collect();
        columns(kb, a.size, lanes, |kb, c| {
            let keys: Vec<ExprId> = rows
                .iter()
                .map(|&row| {
                    let k = a.key(kb, row, self.item.head, c, lanes);
                    kb.let_("k", k)
                })
                .collect();
            for head in 0..params.heads {
                let row = self.row_of(kb, set, head, a.size);
                let at = kb.add(row, c);
                let q = kb.load_vec(self.item.q, at, lanes);
                let q = kb.let_("q", q);
                for (i, &k) in keys.iter().enumerate() {
                    let sum = sums[i * params.heads as usize + head as usize];
                    let old = kb.load_vec(sum, zero, lanes);
                    let new = kb.fma(q, k, old);
                    kb.store_vec(sum, zero, new);
                }
            }
        });
        let mut products = Vec::new();
        for of_key in sums.chunks(params.heads as usize) {
            for slot in 0..params.slots as usize {
                products.push(of_key.get(slot).map(|&sum| {
                    let sum = kb.load_vec(sum, zero, lanes);
                    kb.let_("product", sum)
                }));
            }
        }
        products
    }

    /// The new running maxima; older sums count less by what they rose.
    fn raise_max(&self, kb: &mut KernelBuilder, set: ExprId, best: ExprId) -> ExprId {
        let (params, lanes) = (self.item.params, self.lanes());
        // The largest over the keys of a vector, in the lanes of all of them.
        let mut best = best;
        let mut distance = params.slots as u32;
        while distance < lanes {
            let other = kb.shuffle(best, None, (0..lanes).map(|l| l ^ distance).collect());
            let both = kb.max(best, other);
            best = kb.let_("best", both);
            distance *= 2;
        }
        let at = self.item.vector_of(kb, set);
        let old = kb.load_vec(self.item.max, at, lanes);
        let old = kb.let_("old", old);
        let max = kb.max(old, best);
        let max = kb.let_("max", max);
        let rose = kb.lt(old, max);
        let rose = kb.reduce_lanes(BinOp::Or, rose);
        kb.if_(rose, |kb| {
            let fallen = kb.sub(old, max);
            let factor = exp_below_zero(kb, fallen);
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
                let factor = kb.load(self.item.factor, head);
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

    /// Scores to weights, and their sums.
    fn weigh(&self, kb: &mut KernelBuilder, set: ExprId, max: ExprId) {
        let (lanes, zero) = (self.lanes(), kb.int(0));
        let at = self.item.vector_of(kb, set);
        let sum = kb.alloc("total", DType::F32, lanes as usize, Space::Local);
        let old = kb.load_vec(self.item.total, at, lanes);
        kb.store_vec(sum, zero, old);
        let steps = self.steps(kb);
        kb.serial("step", steps, |kb, step| {
            let at = kb.mul_int(step, i64::from(lanes));
            let s = kb.load_vec(self.item.weights, at, lanes);
            let below = kb.sub(s, max);
            let weight = exp_below_zero(kb, below);
            let weight = kb.let_("weight", weight);
            kb.store_vec(self.item.weights, at, weight);
            let old = kb.load_vec(sum, zero, lanes);
            let new = kb.add(old, weight);
            kb.store_vec(sum, zero, new);
        });
        let sum = kb.load_vec(sum, zero, lanes);
        kb.store_vec(self.item.total, at, sum);
    }

    /// Adds the weighted values to the sums.
    fn mix(&self, kb: &mut KernelBuilder, set: ExprId) {
        let (a, params) = (self.a, self.item.params);
        let lanes = lanes_of(a.value_size, params.lanes);
        let vectors = a.value_size / i64::from(lanes);
        let most = (params.sums / params.heads).max(1);
        let together = (1..=most.min(vectors)).rev().find(|u| vectors % u == 0).unwrap_or(1);
        let width = together * i64::from(lanes);
        let passes = kb.int(vectors / together);
        kb.serial("columns", passes, |kb, pass| {
            let c = kb.mul_int(pass, width);
            let c = kb.let_("c", c);
            let places: Vec<Vec<ExprId>> = (0..params.heads)
                .map(|head| {
                    let row = self.row_of(kb, set, head, a.value_size);
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
            kb.serial("i", self.count, |kb, i| {
                self.ahead(kb, params.ahead[1], i, (c, width));
                self.mix_key(kb, (i, c), &sums, lanes);
            });
            for (&at, &sum) in places.iter().flatten().zip(sums.iter().flatten()) {
                let value = kb.load_vec(sum, zero, lanes);
                kb.store_vec(self.item.sums, at, value);
            }
        });
    }

    /// Key `i` of the block, columns from `c` on: sums by head and vector.
    fn mix_key(&self, kb: &mut KernelBuilder, (i, c): (ExprId, ExprId), sums: &[Vec<BufId>], lanes: u32) {
        let (params, zero) = (self.item.params, kb.int(0));
        let row = kb.add(self.first, i);
        let values: Vec<ExprId> = (0..sums[0].len() as i64)
            .map(|v| {
                let c = kb.add_int(c, v * i64::from(lanes));
                let value = self.a.value(kb, row, self.item.head, c, lanes);
                kb.let_("v", value)
            })
            .collect();
        let base = kb.mul_int(i, params.slots);
        for (head, of_head) in (0..).zip(sums) {
            let at = kb.add_int(base, head);
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

/// Sums of the lanes of each of `lanes` vectors, one per lane of the result.
fn sum_each(kb: &mut KernelBuilder, vectors: Vec<Option<ExprId>>, lanes: u32) -> ExprId {
    let width = vectors.iter().flatten().map(|&v| kb.ty(v).lanes).next().unwrap_or(lanes);
    let nothing = kb.constant(0.0, Ty::vector(DType::F32, width));
    let mut vectors: Vec<ExprId> = vectors.into_iter().map(|v| v.unwrap_or(nothing)).collect();
    if width != lanes {
        // Rows that are no multiple of a vector: one by one.
        let buf = kb.alloc("products", DType::F32, lanes as usize, Space::Stack);
        for (i, v) in vectors.into_iter().enumerate() {
            let sum = kb.reduce_lanes(BinOp::Add, v);
            let at = kb.int(i as i64);
            kb.store(buf, at, sum);
        }
        let zero = kb.int(0);
        let all = kb.load_vec(buf, zero, lanes);
        return kb.let_("products", all);
    }
    // Each round joins pairs of vectors and halves the lanes that belong to one sum. The one operand is a choice of lanes
    // in place (a blend, which every vector unit executes), only the other an exchange.
    let mut width = lanes;
    while width > 1 {
        let half = width / 2;
        let upper = vectors.split_off(vectors.len() / 2);
        let low = |l: u32| l & half == 0;
        let stay: Vec<u32> = (0..lanes).map(|l| if low(l) { l } else { lanes + l }).collect();
        let cross: Vec<u32> = (0..lanes).map(|l| if low(l) { l + half } else { lanes + l - half }).collect();
        for (a, b) in vectors.iter_mut().zip(upper) {
            let x = kb.shuffle(*a, Some(b), stay.clone());
            let y = kb.shuffle(*a, Some(b), cross.clone());
            let sum = kb.add(x, y);
            *a = kb.let_("sums", sum);
        }
        width = half;
    }
    vectors[0]
}
