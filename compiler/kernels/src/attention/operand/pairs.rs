//! Products of many queries in integers, where the machine adds products of pairs of 16-bit codes twice as
//! fast as those of floats, and the op permits it ([`mlcc_ir::ops::AttentionOp::codes`]).
//!
//! Scores: a query or key becomes codes as long (as a vector) as [`LENGTH`], so that no product of two rows
//! leaves 32 bits, whatever the number of columns. A word has a column of the first half of a row and one of
//! the second.
//!
//! Sums: a row of values becomes codes by its largest element. Weights times the units of these rows become
//! codes by their sum over the block, so that no sum of products leaves 32 bits, or by the largest: where few
//! keys have most of the weight, codes are the finer. Rows of small values, as the first token of a text
//! often has, take nothing from the precision of the others. A word has two keys. Sums of a block are exact
//! and join the f32 sums with one factor per query; sums of weights are those of floats.

use super::query_columns;
use crate::attention::codes::{MAGIC, encode_magic, pair_codes, size_bits, unit_of};
use crate::attention::plan::{PAIR, PREFILL_KEYS, PrefillPlan, lanes_of};
use crate::attention::problem::AttentionProblem;
use crate::attention::query_tile::QueryTile;
use crate::params::PairDot;
use mlcc_ir::kernel::BinOp;
use mlcc_ir::types::DType;
use mlcc_kernel_lang::{BufferView, Recorder, Val};

/// The length of a row of codes as a vector: products stay below its square, and half a code of rounding per
/// column below 16 bits.
const LENGTH: f64 = 32_700.0;
/// Squared lengths below count as this one.
const LEAST_SQUARE: f64 = 1e-30;
/// The largest codes of values and of weights, and the sum of those of weights before they are rounded, which
/// adds half a code per key at most.
const MOST_VALUE: f64 = 8191.0;
const MOST_WEIGHT: f64 = 32_766.0;
const ALL_WEIGHTS: f64 = 262_000.0;
const _: () = assert!((262_000 + PREFILL_KEYS) * 8192 < 1 << 31);
/// Sums of scaled weights below count as this one.
const LEAST_SUM: f64 = 1e-30;

/// The dot instruction, and the buffers of a tile on the stack in addition to its others.
#[derive(Clone, Copy)]
pub(in super::super) struct PairOperands<'k> {
    pub dot: PairDot,
    /// Rows before they are codes, one or two.
    floats: BufferView<'k, 1>,
    /// Words of the queries of a set, before they are transposed: `[rows, size / 2]`.
    pub queries: BufferView<'k, 2>,
    /// Units of codes: of every query of the tile, and of the keys and values of a block.
    query_units: BufferView<'k, 1>,
    key_units: BufferView<'k, 1>,
    value_units: BufferView<'k, 1>,
    /// Weights of a set of rows: `[keys / 2, rows]`.
    pub weights: BufferView<'k, 2>,
    /// Units of the weights, for every row of a set.
    units: BufferView<'k, 1>,
}

impl<'k> PairOperands<'k> {
    pub fn new(
        k: &'k Recorder,
        a: &AttentionProblem,
        plan: &PrefillPlan,
        rows: i64,
    ) -> Option<PairOperands<'k>> {
        let floats = |name: &str, len: i64| k.stack(name, DType::F32, [len]);
        Some(PairOperands {
            dot: plan.pairs?,
            floats: floats("floats", PAIR * a.size.max(a.value_size)),
            queries: k.stack("query_words", DType::I32, [plan.set, a.size / PAIR]),
            query_units: floats("query_units", rows),
            key_units: floats("key_units", plan.keys),
            value_units: floats("value_units", plan.keys),
            weights: k.stack("weight_words", DType::I32, [plan.keys / PAIR, plan.set]),
            units: floats("units", plan.set),
        })
    }

    /// The same with the queries from row `row` on.
    pub fn of_rows_after(self, row: Val<'k>) -> PairOperands<'k> {
        PairOperands { query_units: self.query_units.starting_at([row]), ..self }
    }

    /// Codes of row `row` of the tile, row `r` of its set. `value(column, lanes)`: of the query.
    pub fn encode_query(
        &self,
        tile: &QueryTile<'k, '_>,
        (row, r): (Val<'k>, Val<'k>),
        value: impl Fn(Val<'k>, u32) -> Val<'k>,
    ) {
        let unit = self.encode_row(tile, self.queries.row(r), |lanes, keep| {
            query_columns(tile.rec, tile.a, lanes, |c| keep(c, value(c, lanes)));
        });
        self.query_units.set([row], unit);
    }

    /// Codes of `count` keys from row `j` of the cache on.
    pub fn encode_keys(&self, tile: &QueryTile<'k, '_>, j: Val<'k>, count: Val<'k>) {
        tile.rec.serial("i", count, |i| {
            let row = tile.key_row(j, i);
            let unit = self.encode_row(tile, tile.k.row(i), |lanes, keep| {
                tile.rec.vectors("c", tile.a.size, lanes, |c| {
                    keep(c, tile.a.key(tile.page, [row, tile.head, c], lanes));
                });
            });
            self.key_units.set([i], unit);
        });
    }

    /// Stores the words of a row of a query or key in `to`; gives their unit. `values(lanes, keep)` hands
    /// every vector of the row to `keep`, with its first column.
    fn encode_row(
        &self,
        tile: &QueryTile<'k, '_>,
        to: BufferView<'k, 1>,
        values: impl FnOnce(u32, &dyn Fn(Val<'k>, Val<'k>)),
    ) -> Val<'k> {
        let (k, size, half) = (tile.rec, tile.a.size, tile.a.size / PAIR);
        let to = to.named("at");
        let lanes = lanes_of(size, tile.plan.lanes);
        let squares = k.reg("squares", k.zeros(DType::F32, lanes));
        values(lanes, &|c, value| {
            let value = value.named("x");
            self.floats.set([c], value);
            squares.update(|squares| value.fma(value, squares));
        });
        let length = squares.get().sum_lanes().max(LEAST_SQUARE).sqrt().named("length");
        let inverse = (k.float(LENGTH) / length).named("inverse");
        let lanes = lanes_of(half, tile.plan.lanes);
        k.vectors("c", half, lanes, |c| {
            to.set([c], load_words(self.floats, [c, c + half], [inverse, inverse], lanes));
        });
        length * (1.0 / LENGTH)
    }

    /// Codes of `count` rows of values from row `j` of the cache on, and of one more where that is odd:
    /// `[keys / 2, size]`.
    pub fn encode_values(&self, tile: &QueryTile<'k, '_>, j: Val<'k>, count: Val<'k>) {
        let (k, size) = (tile.rec, tile.a.value_size);
        let lanes = lanes_of(size, tile.plan.lanes);
        k.serial("pair", count.div_ceil(PAIR), |pair| {
            let inverses = [0, 1].map(|r| {
                let i = pair * PAIR + r;
                let row = tile.key_row(j, i);
                let largest = k.reg("largest", k.zeros(DType::I32, lanes));
                k.vectors("c", size, lanes, |c| {
                    let value = tile.a.value(tile.page, [row, tile.head, c], lanes).named("x");
                    self.floats.set([c + r * size], value);
                    largest.update(|largest| largest.max(size_bits(value)));
                });
                let (unit, inverse) = unit_of(largest.get().reduce_lanes(BinOp::Max), k.float(MOST_VALUE));
                self.value_units.set([i], unit);
                inverse
            });
            k.vectors("c", size, lanes, |c| {
                tile.v.set([pair, c], load_words(self.floats, [c, c + size], inverses, lanes));
            });
        });
    }

    /// Products of key `key` of the block with the vector of rows of the tile from `row` on, as floats.
    pub fn product(&self, sums: Val<'k>, row: Val<'k>, key: Val<'k>) -> Val<'k> {
        let units = self.query_units.load([row], sums.lanes());
        (sums.cast(DType::F32) * units * self.key_units.at([key])).named("product")
    }

    /// A weight of key `key` in units of its values.
    pub fn scaled(&self, weight: Val<'k>, key: Val<'k>) -> Val<'k> {
        (weight * self.value_units.at([key])).named("scaled")
    }

    /// The codes of one for the scaled weights of a vector of rows of the set from `row` on, given their sums
    /// and the largest.
    pub fn set_units(&self, row: Val<'k>, sums: Val<'k>, largest: Val<'k>) -> Val<'k> {
        let k = row.recorder();
        let (largest, sums) = (largest.max(LEAST_SUM), sums.max(LEAST_SUM));
        let inverse = (k.float(ALL_WEIGHTS) / sums).min(k.float(MOST_WEIGHT) / largest).named("inverse");
        self.units.set([row], k.float(1.0) / inverse);
        inverse
    }

    /// The unit of the weights of a row of the set.
    pub fn unit(&self, row: Val<'k>) -> Val<'k> {
        self.units.at([row])
    }
}

/// Words of the codes of vectors at two places of a buffer.
pub(in super::super) fn load_words<'k>(
    from: BufferView<'k, 1>,
    places: [Val<'k>; 2],
    inverses: [Val<'k>; 2],
    lanes: u32,
) -> Val<'k> {
    let magic = inverses[0].recorder().float(MAGIC);
    let [low, high] = [0, 1].map(|i| encode_magic(from.load([places[i]], lanes), inverses[i], magic));
    pair_codes(low, high)
}
