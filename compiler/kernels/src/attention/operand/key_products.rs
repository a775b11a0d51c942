//! Products of some keys with all query heads of a key head, for decode attention.
//!
//! A vector of products holds a few columns (a part of a row) of several heads: the same part of a row of
//! keys, broadcast from memory, meets the queries of all of them. So only the few columns of a part are left
//! to be added up over lanes, by a short tree of exchanges that gives one vector with the scores of some keys
//! with all heads.

use crate::attention::key_block::{KeyBlock, PrefetchTiming};
use crate::attention::plan::lanes_of;
use mlcc_ir::types::DType;
use mlcc_kernel_lang::{BufferView, Val, reduce_each};

/// A register tile of keys times vectors of queries, summed over the parts of their rows.
pub(super) struct KeyProducts<'k> {
    /// The type of sums.
    pub dtype: DType,
    /// Parts of a row, and elements of one in each head.
    pub parts: Val<'k>,
    pub count: i64,
    pub part: i64,
    /// Queries of the set: elements from one part to the next, and the vectors of each, by place in it.
    pub queries: BufferView<'k, 1>,
    pub pitch: i64,
    pub vectors: Vec<i64>,
    pub lanes: u32,
}

impl<'k> KeyProducts<'k> {
    /// The sums by key and vector. `key(i, c)`: of key `i` of the step the part from element `c` on, for all
    /// heads; `add(sum, q, key)`.
    pub fn sum_products(
        &self,
        block: &KeyBlock<'k, '_>,
        offset: Val<'k>,
        key: impl Fn(i64, Val<'k>) -> Val<'k>,
        add: impl Fn(Val<'k>, Val<'k>, Val<'k>) -> Val<'k>,
    ) -> Vec<Vec<Val<'k>>> {
        let (k, plan) = (block.at.k, block.at.plan);
        let zeros = k.zeros(self.dtype, plan.lanes);
        let sums = k.regs("sum", [plan.keys_together(), self.vectors.len() as i64], |_, _| zeros);
        k.serial("part", self.parts, |part| {
            block.prefetch_keys(offset, PrefetchTiming::Within(part, self.count));
            let queries = self.queries.starting_at([part * self.pitch]);
            let q: Vec<Val> =
                self.vectors.iter().map(|&v| queries.load([v], self.lanes).named("q")).collect();
            let c = part * self.part;
            sums.add_outer((0..plan.keys_together()).map(|i| key(i, c)), &q, |sum, key, q| add(sum, q, key));
        });
        sums.rows().map(|row| row.iter().map(|sum| sum.get()).collect()).collect()
    }
}

/// Sums of products by key and vector to vectors of scores, each of `keys` keys; places without a head are
/// not set.
pub(super) fn join_scores<'k>(block: &KeyBlock<'k, '_>, sums: Vec<Vec<Val<'k>>>) -> Vec<Val<'k>> {
    let plan = block.at.plan;
    let nothing = block.at.k.zeros(sums[0][0].ty().dtype, plan.lanes);
    let vectors = plan.vectors() as usize;
    let filled = |row: &Vec<Val<'k>>| (0..vectors).map(|v| row.get(v).copied().unwrap_or(nothing)).collect();
    let rows: Vec<Vec<Val>> = sums.iter().map(filled).collect();
    rows.chunks(plan.keys() as usize).map(|keys| reduce_each(keys.concat(), |a, b| a + b)).collect()
}

/// Rows of the keys of a step to `to`, from number `offset` of the block on: `value(row, element, lanes)` of
/// each, of `size` elements. Remains of older rows after the last key are masked.
pub(super) fn unpack_keys<'k>(
    block: &KeyBlock<'k, '_>,
    to: BufferView<'k, 2>,
    offset: Val<'k>,
    (size, most_lanes): (i64, u32),
    value: impl Fn(Val<'k>, Val<'k>, u32) -> Val<'k>,
) {
    let k = block.at.k;
    let lanes = lanes_of(size, most_lanes);
    let count = k.int(block.at.plan.keys_together()).min(block.count - offset);
    k.serial("i", count, |i| {
        let row = block.first + (offset + i);
        k.vectors("c", size, lanes, |c| to.set([i, c], value(row, c, lanes)));
    });
}
