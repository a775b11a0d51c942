//! Floats: the elements of a cache, or the values of its codes.

use super::key_products::{KeyProducts, join_scores, unpack_keys};
use super::{query_columns, query_row};
use crate::attention::key_block::KeyBlock;
use crate::attention::key_head::KeyHead;
use crate::attention::plan::{DecodePlan, lanes_of};
use crate::attention::problem::AttentionProblem;
use mlcc_ir::types::DType;
use mlcc_kernel_lang::{BufferView, Recorder, RegisterGrid, Val};
use std::ops::Range;

#[derive(Clone, Copy)]
pub(in super::super) struct FloatOperands<'k> {
    /// `[kv, sets, (vectors, parts of a row, heads of a vector, columns of a
    /// part)]`; places without a head or column are zero.
    queries: BufferView<'k, 3>,
}

impl<'k> FloatOperands<'k> {
    pub fn new(k: &'k Recorder, a: &AttentionProblem, plan: DecodePlan) -> FloatOperands<'k> {
        FloatOperands {
            queries: k.stack("q", DType::F32, [a.kv, plan.sets, plan.slots * plan.padded_elements(a.size)]),
        }
    }

    pub fn clear_keys(&self, at: &KeyHead<'k, '_>) {
        let (plan, padded) = (at.plan, at.plan.padded_elements(at.a.size));
        let zeros = at.k.zeros(DType::F32, lanes_of(padded, plan.lanes));
        at.rows.flat().fill(plan.keys_together() * padded, zeros);
    }

    pub fn clear_queries(&self, at: &KeyHead<'k, '_>) {
        let (plan, padded) = (at.plan, at.plan.padded_elements(at.a.size));
        let zeros = at.k.zeros(DType::F32, lanes_of(padded, plan.lanes));
        self.queries.row(at.head).row(0).fill(plan.sets * plan.slots * padded, zeros);
    }

    /// The scaled query of `head`, number `g` of the group.
    pub fn load_query(&self, at: &KeyHead<'k, '_>, g: Val<'k>, head: Val<'k>) {
        let (k, plan) = (at.k, at.plan);
        let (lanes, part) = (lanes_of(at.a.size, plan.lanes), plan.part());
        let row = query_row(at, self.queries, g);
        query_columns(k, at.a, lanes, |c| {
            let value = at.a.query([k.int(0), head, c], lanes).named("q");
            let to = row.starting_at([c / part * i64::from(plan.lanes)]).starting_at([c % part]);
            let width = lanes.min(part as u32);
            for piece in 0..lanes / width {
                let from = piece * width;
                let value = if width == lanes { value } else { value.shuffle(from..from + width) };
                to.set([i64::from(piece * plan.lanes)], value);
            }
        });
    }

    /// Products of the keys of a step (from number `offset` of the block on) with all heads, in vectors of
    /// scores.
    pub fn products(&self, block: &KeyBlock<'k, '_>, set: Val<'k>, offset: Val<'k>) -> Vec<Val<'k>> {
        let (at, a, plan, k) = (block.at, block.at.a, block.at.plan, block.at.k);
        let (padded, lanes) = (plan.padded_elements(a.size), plan.lanes);
        let in_place = plan.reads_rows_in_place(a.size);
        if !in_place {
            unpack_keys(block, at.rows, offset, (a.size, lanes), |row, c, lanes| {
                block.elements(a.key.0, row, c, lanes)
            });
        }
        let used = (plan.heads + plan.across - 1) / plan.across;
        let products = KeyProducts {
            dtype: DType::F32,
            parts: k.int(padded / plan.part()),
            count: padded / plan.part(),
            part: plan.part(),
            queries: self.queries.row(at.head).row(set),
            pitch: lanes.into(),
            vectors: (0..used).map(|v| v * plan.across * padded).collect(),
            lanes,
        };
        let key = |i: i64, c: Val<'k>| {
            let part = match in_place {
                // Rows after the last one are masked.
                true => block.elements(a.key.0, block.row(offset + i), c, lanes),
                false => plan.repeated_part(at.rows.flat(), c + i * padded),
            };
            part.named("k")
        };
        let sums = products.sum_products(block, offset, key, |sum, q, key| q.fma(key, sum));
        join_scores(
            block,
            sums.into_iter().map(|row| row.into_iter().map(|sum| sum.named("product")).collect()).collect(),
        )
    }

    /// Adds the weighted values to the sums.
    pub fn add_values(&self, block: &KeyBlock<'k, '_>, set: Val<'k>) {
        let (a, plan, k) = (block.at.a, block.at.plan, block.at.k);
        let lanes = lanes_of(a.value_size, plan.lanes);
        let vectors = a.value_size / i64::from(lanes);
        let at_once = plan.heads_at_once(vectors);
        let most = (plan.accumulators / at_once).max(1);
        let together = (1..=most.min(vectors)).rev().find(|u| vectors % u == 0).unwrap_or(1);
        let tile = ColumnTile { lanes, vectors: together };
        k.steps("columns", vectors / together, tile.width(), |c| {
            let c = c.named("c");
            for first in (0..plan.heads).step_by(at_once as usize) {
                self.add_columns(block, set, first..(first + at_once).min(plan.heads), c, tile);
            }
        });
    }

    /// The same for some heads of a set and the columns of a tile from `c` on.
    fn add_columns(
        &self,
        block: &KeyBlock<'k, '_>,
        set: Val<'k>,
        heads: Range<i64>,
        c: Val<'k>,
        tile: ColumnTile,
    ) {
        let (at, plan, k) = (block.at, block.at.plan, block.at.k);
        let (size, lanes) = (at.a.value_size, tile.lanes);
        let rows: Vec<BufferView<'k, 1>> = heads
            .clone()
            .map(|head| at.set_accumulators(set).starting_at([head * size]).starting_at([c]))
            .collect();
        let count = heads.end - heads.start;
        let sums = k.regs("sum", [count, tile.vectors], |head, v| {
            rows[head as usize].load([v * i64::from(lanes)], lanes)
        });
        let add = |vector: Val<'k>, whole: bool| {
            for key in 0..plan.keys() {
                add_key(block, (vector, key, whole), (c, tile), (heads.clone(), &sums));
            }
        };
        let full = block.count / plan.keys();
        k.serial("vector", full, |i| add(i, true));
        if plan.keys() > 1 {
            let rest = block.count % plan.keys();
            k.when(k.int(0).lt(rest), || add(full, false));
        }
        for (row, sums) in rows.iter().zip(sums.rows()) {
            for (v, sum) in (0..).zip(sums) {
                row.set([v * i64::from(lanes)], sum.get());
            }
        }
    }
}

/// Columns whose sums are in registers together: `vectors` vectors of `lanes` lanes.
#[derive(Clone, Copy)]
struct ColumnTile {
    lanes: u32,
    vectors: i64,
}

impl ColumnTile {
    fn width(self) -> i64 {
        self.vectors * i64::from(self.lanes)
    }
}

/// Adds key `key` of a vector of weights, in the columns of the tile from `c` on. Where the vector is not
/// `whole`, rows after the last one repeat it; their weights are zero.
fn add_key<'k>(
    block: &KeyBlock<'k, '_>,
    (vector, key, whole): (Val<'k>, i64, bool),
    (c, tile): (Val<'k>, ColumnTile),
    (heads, sums): (Range<i64>, &RegisterGrid<'k>),
) {
    let (at, a, plan) = (block.at, block.at.a, block.at.plan);
    let i = vector * plan.keys() + key;
    let row = if whole { block.first + i } else { block.row(i) };
    if whole && heads.start == 0 {
        let passes = a.value_size / tile.width();
        block.prefetch_values(c * plan.block / tile.width() + i, passes * plan.block);
    }
    let value = |v: i64| block.elements(a.value.0, row, c + v * i64::from(tile.lanes), tile.lanes).named("v");
    let values: Vec<Val> = (0..tile.vectors).map(value).collect();
    let weight = |head| block.weight_at(at.weights, (vector, key), head).splat(tile.lanes).named("weight");
    sums.add_outer(heads.map(weight), &values, |sum, weight, value| weight.fma(value, sum));
}
