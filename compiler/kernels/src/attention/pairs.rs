//! Products of many queries in integers, where the machine adds products of pairs of 16-bit codes twice as fast as those of
//! floats, and the op permits it ([`mlcc_ir::ops::Attention::codes`]).
//!
//! Scores: a query or key becomes codes as long (as a vector) as [`LENGTH`], so that no product of two rows leaves 32 bits,
//! whatever the number of columns. A word has a column of the first half of a row and one of the second.
//!
//! Sums: a row of values becomes codes by its largest element. Weights times the units of these rows become codes by their sum
//! over the block, so that no sum of products leaves 32 bits, or by the largest: where few keys have most of the weight, codes
//! are the finer. Rows of small values, as the first token of a text often has, take nothing from the precision of the
//! others. A word has two keys. Sums of a block are exact and join the f32 sums with one factor per query; sums of weights
//! are those of floats.

use super::codes::{MAGIC, coded, size_bits, unit_of};
use super::decode::columns;
use super::prefill::{KEYS, Params, Tile};
use super::queries::query_columns;
use super::{Problem, ceil_div, lanes_of};
use crate::params::PairDot;
use mlcc_ir::builder::KernelBuilder;
use mlcc_ir::kernel::{BinOp, BufId, ExprId, Space, Ty, UnOp};
use mlcc_ir::types::DType;

/// Codes of a word.
pub(super) const PAIR: i64 = 2;
/// How long a row of codes is as a vector: products stay below its square, and half a code of rounding per column below 16 bits.
const LENGTH: f64 = 32_700.0;
/// Squared lengths below count as this one.
const LEAST_SQUARE: f64 = 1e-30;
/// The largest codes of values and of weights, and the sum of those of weights before they are rounded, which adds half a
/// code per key at most.
const MOST_VALUE: f64 = 8191.0;
const MOST_WEIGHT: f64 = 32_766.0;
const ALL_WEIGHTS: f64 = 262_000.0;
const _: () = assert!((262_000 + KEYS) * 8192 < 1 << 31);
/// Sums of scaled weights below count as this one.
const LEAST_SUM: f64 = 1e-30;

/// The dot instruction, and what a tile needs on the stack beside its other buffers.
#[derive(Clone, Copy)]
pub(super) struct Pairs {
    pub dot: PairDot,
    /// Rows before they are codes.
    floats: BufId,
    /// Words of the queries of a set, before they are transposed: `[rows, size / 2]`.
    pub queries: BufId,
    /// What codes count: of every query of the tile, and of the keys and values of a block.
    query_units: BufId,
    key_units: BufId,
    value_units: BufId,
    /// Weights of a set of rows: `[keys / 2, rows]`.
    pub weights: BufId,
    /// What they count, for every row of a set.
    units: BufId,
}

/// True if rows make words, and values vectors of them.
pub(super) fn fits(a: &Problem, lanes: u32) -> bool {
    a.size % PAIR == 0 && a.value_size % i64::from(lanes) == 0
}

impl Pairs {
    pub fn new(kb: &mut KernelBuilder, a: &Problem, params: &Params, rows: i64) -> Option<Pairs> {
        let dot = params.pairs?;
        let mut stack =
            |name: &str, dtype: DType, len: i64| kb.alloc(name, dtype, len as usize, Space::Stack);
        Some(Pairs {
            dot,
            floats: stack("floats", DType::F32, PAIR * a.size.max(a.value_size)),
            queries: stack("query_words", DType::I32, params.set * a.size / PAIR),
            query_units: stack("query_units", DType::F32, rows),
            key_units: stack("key_units", DType::F32, params.keys),
            value_units: stack("value_units", DType::F32, params.keys),
            weights: stack("weight_words", DType::I32, params.keys / PAIR * params.set),
            units: stack("units", DType::F32, params.set),
        })
    }

    /// Codes of row `row` of the tile, row `r` of its set.
    pub fn code_query(
        &self,
        kb: &mut KernelBuilder,
        tile: &Tile,
        (row, r): (ExprId, ExprId),
        value: impl Fn(&mut KernelBuilder, ExprId, u32) -> ExprId,
    ) {
        let at = kb.mul_int(r, tile.a.size / PAIR);
        let unit = self.code_row(kb, tile, (self.queries, at), |kb, lanes, keep| {
            query_columns(kb, tile.a, lanes, |kb, c| {
                let value = value(kb, c, lanes);
                keep(kb, c, value);
            });
        });
        kb.store(self.query_units, row, unit);
    }

    /// Codes of `count` keys from row `j` of the cache on.
    pub fn code_keys(&self, kb: &mut KernelBuilder, tile: &Tile, j: ExprId, count: ExprId) {
        kb.serial("i", count, |kb, i| {
            let row = tile.row_of(kb, j, i);
            let at = kb.mul_int(i, tile.a.size / PAIR);
            let unit = self.code_row(kb, tile, (tile.k, at), |kb, lanes, keep| {
                columns(kb, tile.a.size, lanes, |kb, c| {
                    let value = tile.a.key(kb, row, tile.head, c, lanes);
                    keep(kb, c, value);
                });
            });
            kb.store(self.key_units, i, unit);
        });
    }

    /// Stores the words of a row of a query or key from a place on; gives their unit. `values(kb, lanes, keep)` hands every vector of the
    /// row to `keep`, with its first column.
    fn code_row(
        &self,
        kb: &mut KernelBuilder,
        tile: &Tile,
        (to, at): (BufId, ExprId),
        values: impl FnOnce(&mut KernelBuilder, u32, &dyn Fn(&mut KernelBuilder, ExprId, ExprId)),
    ) -> ExprId {
        let (size, half, zero) = (tile.a.size, tile.a.size / PAIR, kb.int(0));
        let at = kb.let_("at", at);
        let lanes = lanes_of(size, tile.params.lanes);
        let squares = kb.alloc("squares", DType::F32, lanes as usize, Space::Local);
        let nothing = kb.constant(0.0, Ty::vector(DType::F32, lanes));
        kb.store_vec(squares, zero, nothing);
        values(kb, lanes, &|kb, c, value| {
            let value = kb.let_("x", value);
            kb.store_vec(self.floats, c, value);
            let old = kb.load_vec(squares, zero, lanes);
            let new = kb.fma(value, value, old);
            kb.store_vec(squares, zero, new);
        });
        let squares = kb.load_vec(squares, zero, lanes);
        let square = kb.reduce_lanes(BinOp::Add, squares);
        let least = kb.float(LEAST_SQUARE);
        let square = kb.max(square, least);
        let length = kb.unary(UnOp::Sqrt, square);
        let length = kb.let_("length", length);
        let (whole, part) = (kb.float(LENGTH), kb.float(1.0 / LENGTH));
        let inverse = kb.div(whole, length);
        let inverse = kb.let_("inverse", inverse);
        let lanes = lanes_of(half, tile.params.lanes);
        columns(kb, half, lanes, |kb, c| {
            let other = kb.add_int(c, half);
            let words = words(kb, (self.floats, [c, other]), [inverse, inverse], lanes);
            let at = kb.add(at, c);
            kb.store_vec(to, at, words);
        });
        kb.mul(length, part)
    }

    /// Codes of `count` rows of values from row `j` of the cache on, and of one more where that is odd: `[keys / 2, size]`.
    pub fn code_values(&self, kb: &mut KernelBuilder, tile: &Tile, j: ExprId, count: ExprId) {
        let (a, zero) = (tile.a, kb.int(0));
        let lanes = lanes_of(a.value_size, tile.params.lanes);
        let pair = kb.int(PAIR);
        let pairs = ceil_div(kb, count, pair);
        kb.serial("pair", pairs, |kb, pair| {
            let inverses = [0, 1].map(|r| {
                let i = kb.mul_int(pair, PAIR);
                let i = kb.add_int(i, r);
                let row = tile.row_of(kb, j, i);
                let largest = kb.alloc("largest", DType::I32, lanes as usize, Space::Local);
                let nothing = kb.constant(0.0, Ty::vector(DType::I32, lanes));
                kb.store_vec(largest, zero, nothing);
                columns(kb, a.value_size, lanes, |kb, c| {
                    let value = a.value(kb, row, tile.head, c, lanes);
                    let value = kb.let_("x", value);
                    let at = kb.add_int(c, r * a.value_size);
                    kb.store_vec(self.floats, at, value);
                    let (size, old) = (size_bits(kb, value), kb.load_vec(largest, zero, lanes));
                    let new = kb.max(old, size);
                    kb.store_vec(largest, zero, new);
                });
                let largest = kb.load_vec(largest, zero, lanes);
                let largest = kb.reduce_lanes(BinOp::Max, largest);
                let most = kb.float(MOST_VALUE);
                let (unit, inverse) = unit_of(kb, largest, most);
                kb.store(self.value_units, i, unit);
                inverse
            });
            let first = kb.mul_int(pair, a.value_size);
            columns(kb, a.value_size, lanes, |kb, c| {
                let other = kb.add_int(c, a.value_size);
                let words = words(kb, (self.floats, [c, other]), inverses, lanes);
                let at = kb.add(first, c);
                kb.store_vec(tile.v, at, words);
            });
        });
    }

    /// Products of key `key` of the block with the vector of rows of the tile from `row` on, as floats.
    pub fn product(&self, kb: &mut KernelBuilder, sums: ExprId, row: ExprId, key: ExprId) -> ExprId {
        let sums = kb.cast(sums, DType::F32);
        let (units, unit) =
            (kb.load_vec(self.query_units, row, kb.ty(sums).lanes), kb.load(self.key_units, key));
        let product = kb.mul(sums, units);
        let product = kb.mul(product, unit);
        kb.let_("product", product)
    }

    /// A weight of key `key` in units of its values.
    pub fn scaled(&self, kb: &mut KernelBuilder, weight: ExprId, key: ExprId) -> ExprId {
        let unit = kb.load(self.value_units, key);
        let scaled = kb.mul(weight, unit);
        kb.let_("scaled", scaled)
    }

    /// The codes of one for the scaled weights of a vector of rows of the set from `row` on, given their sums and the largest.
    pub fn set_units(&self, kb: &mut KernelBuilder, row: ExprId, sums: ExprId, largest: ExprId) -> ExprId {
        let (least, all, most) = (kb.float(LEAST_SUM), kb.float(ALL_WEIGHTS), kb.float(MOST_WEIGHT));
        let largest = kb.max(largest, least);
        let sums = kb.max(sums, least);
        let (of_sum, of_largest) = (kb.div(all, sums), kb.div(most, largest));
        let inverse = kb.min(of_sum, of_largest);
        let inverse = kb.let_("inverse", inverse);
        let one = kb.float(1.0);
        let unit = kb.div(one, inverse);
        kb.store_vec(self.units, row, unit);
        inverse
    }
    pub fn unit(&self, kb: &mut KernelBuilder, row: ExprId) -> ExprId {
        kb.load(self.units, row)
    }
}

/// Words of the codes of vectors at two places of a buffer.
pub(super) fn words(
    kb: &mut KernelBuilder,
    (buf, places): (BufId, [ExprId; 2]),
    inverses: [ExprId; 2],
    lanes: u32,
) -> ExprId {
    let magic = kb.float(MAGIC);
    let [low, high] = [0, 1].map(|i| {
        let value = kb.load_vec(buf, places[i], lanes);
        coded(kb, value, inverses[i], magic)
    });
    joined(kb, low, high)
}

/// Words of two codes, of which only the low 16 bits count.
pub(super) fn joined(kb: &mut KernelBuilder, low: ExprId, high: ExprId) -> ExprId {
    let (mask, by) = (kb.int_of(0xffff, DType::I32), kb.int_of(16, DType::I32));
    let (low, high) = (kb.binary(BinOp::And, low, mask), kb.binary(BinOp::Shl, high, by));
    let words = kb.binary(BinOp::Or, low, high);
    kb.let_("words", words)
}
