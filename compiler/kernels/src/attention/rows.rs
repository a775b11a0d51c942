//! Some rows of a tile of attention against a block of keys: from scores to sums of values. Scores have rows in their lanes, so
//! maxima and sums of weights go along vectors, keys are read as they lie in memory, and weights are where the product with
//! the values broadcasts them from.

use super::pairs::{PAIR, Pairs, words};
use super::prefill::{Params, Tile};
use super::product::{Operand, Product};
use super::{HIDDEN, Keys, Place, at_least_zero, ceil_div, lanes_of, larger};
use crate::math::exp2_below_zero;
use mlcc_ir::builder::KernelBuilder;
use mlcc_ir::kernel::{BinOp, BufId, ExprId, Space, Ty};
use mlcc_ir::types::DType;

/// A set of rows of a tile against a block of keys.
pub(super) struct Rows<'a> {
    tile: &'a Tile<'a>,
    /// How many sets of the tile have met the block.
    turn: ExprId,
    /// The first row, and how many are in use from there on.
    row: ExprId,
    left: ExprId,
    /// The first key, and how many the block has.
    j: ExprId,
    count: ExprId,
    /// Keys up to the last that one of the rows sees.
    keys: ExprId,
    /// True if all rows are in use and see all keys of a whole block.
    shown: ExprId,
}

impl<'a> Rows<'a> {
    /// Set `set` of a tile, number `turn` of those that see them, against `count` keys from `j` on.
    pub fn new(
        kb: &mut KernelBuilder,
        tile: &'a Tile<'a>,
        set: ExprId,
        turn: ExprId,
        (j, count): (ExprId, ExprId),
    ) -> Rows<'a> {
        let params = tile.params;
        let row = kb.mul_int(set, params.set);
        let row = kb.let_("row", row);
        let rows = kb.mul_int(tile.count, tile.a.group);
        let left = kb.sub(rows, row);
        let left = kb.let_("left", left);
        let last = kb.add_int(row, params.set - 1);
        let [first, last] = [row, last].map(|row| tile.position(kb, row));
        let (all, seen_by_all) = (kb.int(params.set), shown(kb, tile, j, (first, last)));
        let full = kb.binary(BinOp::Le, all, left);
        let shown = kb.binary(BinOp::And, full, seen_by_all);
        let shown = kb.let_("shown", shown);
        let keys = seen(kb, tile, (j, count), last);
        Rows { tile, turn, row, left, j, count, keys: kb.let_("seen", keys), shown }
    }

    fn pairs(&self) -> Option<&Pairs> {
        self.tile.pairs.as_ref()
    }
    fn params(&self) -> Params {
        self.tile.params
    }
    fn lanes(&self) -> u32 {
        self.tile.params.lanes
    }

    /// Stores the scores `[keys, rows]`, and the largest of every row.
    pub fn scores(&self, kb: &mut KernelBuilder) {
        let (params, lanes) = (self.params(), self.lanes());
        let hidden = kb.constant(HIDDEN, Ty::vector(DType::F32, lanes));
        self.each_vector(kb, |kb, at| kb.store_vec(self.tile.best, at, hidden));
        let (across, vectors) = params.scores;
        let width = vectors * i64::from(lanes);
        let (groups, by) = (kb.int(params.set / width), kb.int(across));
        let blocks = ceil_div(kb, self.keys, by);
        let blocks = kb.let_("blocks", blocks);
        let each_block = |kb: &mut KernelBuilder, body: &dyn Fn(&mut KernelBuilder, ExprId, ExprId)| {
            kb.serial("rows", groups, |kb, group| {
                let from = kb.mul_int(group, width);
                let from = kb.let_("from", from);
                kb.serial("keys", blocks, |kb, block| {
                    let key = kb.mul_int(block, across);
                    let key = kb.let_("key", key);
                    self.ask(kb, group, block);
                    body(kb, from, key);
                });
            });
        };
        kb.if_else(
            self.shown,
            |kb| each_block(kb, &|kb, from, key| self.score_block(kb, (from, vectors), key, true)),
            |kb| each_block(kb, &|kb, from, key| self.partly_seen(kb, from, key)),
        );
    }

    /// Asks for the next block, with the first vectors of rows; `block`: the register block of keys.
    fn ask(&self, kb: &mut KernelBuilder, group: ExprId, block: ExprId) {
        let params = self.params();
        let zero = kb.int(0);
        let first = kb.binary(BinOp::Eq, group, zero);
        kb.if_(first, |kb| {
            let turn = kb.mul_int(self.turn, params.keys / params.scores.0);
            let turn = kb.add(turn, block);
            self.tile.ask(kb, self.j, turn);
        });
    }

    /// Runs `body` for the place of every vector of rows in the set.
    fn each_vector(&self, kb: &mut KernelBuilder, body: impl FnOnce(&mut KernelBuilder, ExprId)) {
        let lanes = i64::from(self.lanes());
        let vectors = kb.int(self.params().set / lanes);
        kb.serial("vector", vectors, |kb, v| {
            let at = kb.mul_int(v, lanes);
            body(kb, at);
        });
    }

    /// Scores of the vectors of rows that are in use and see some of the keys; those of the others are hidden.
    fn partly_seen(&self, kb: &mut KernelBuilder, from: ExprId, key: ExprId) {
        let lanes = i64::from(self.lanes());
        let (across, vectors) = self.params().scores;
        let (zero, most) = (kb.int(0), kb.int(vectors));
        let j = kb.add(self.j, key);
        let begin = self.tile.first_row(kb, j);
        let begin = kb.sub(begin, self.row);
        let begin = kb.sub(begin, from);
        let begin = at_least_zero(kb, begin);
        let by = kb.int(lanes);
        let begin = kb.div(begin, by);
        let begin = kb.min(begin, most);
        let begin = kb.let_("begin", begin);
        let used = kb.sub(self.left, from);
        let used = at_least_zero(kb, used);
        let end = ceil_div(kb, used, by);
        let end = kb.min(end, most);
        let end = kb.let_("end", end);
        let hidden = kb.constant(HIDDEN, Ty::vector(DType::F32, self.lanes()));
        kb.serial("vector", most, |kb, v| {
            let (before, behind) = (kb.lt(v, begin), kb.binary(BinOp::Le, end, v));
            let out = kb.binary(BinOp::Or, before, behind);
            kb.if_(out, |kb| {
                let offset = kb.mul_int(v, lanes);
                let row = kb.add(from, offset);
                for r in 0..across {
                    let at = self.place_of(kb, key, r, row);
                    kb.store_vec(self.tile.s, at, hidden);
                }
            });
        });
        let count = kb.sub(end, begin);
        let count = kb.max(count, zero);
        let offset = kb.mul_int(begin, lanes);
        let from = kb.add(from, offset);
        let from = kb.let_("from", from);
        for vectors in 1..=vectors {
            let this = kb.int(vectors);
            let this = kb.binary(BinOp::Eq, count, this);
            kb.if_(this, |kb| self.score_block(kb, (from, vectors), key, false));
        }
    }

    /// Where the score of key `key + r` of the block and row `row` of the set is.
    fn place_of(&self, kb: &mut KernelBuilder, key: ExprId, r: i64, row: ExprId) -> ExprId {
        let key = kb.add_int(key, r);
        let at = kb.mul_int(key, self.params().set);
        kb.add(at, row)
    }

    /// Scores of so many vectors of rows from row `from` of the set on, against the keys of a register block from `key` on.
    fn score_block(&self, kb: &mut KernelBuilder, (from, vectors): (ExprId, i64), key: ExprId, shown: bool) {
        let (tile, params, lanes) = (self.tile, self.params(), self.lanes());
        let size = if tile.pairs.is_some() { tile.a.size / PAIR } else { tile.a.size };
        let queries = kb.mul_int(self.row, size);
        let queries = kb.add(queries, from);
        let start = kb.mul_int(key, size);
        let product = Product {
            a: Operand { buf: tile.k, start, row: size, k: 1 },
            b: (tile.q, queries, params.set),
            lanes,
            rows: params.scores.0,
            vectors,
            by_lane: params.by_lane,
            pairs: self.pairs(),
        };
        let extent = kb.int(size);
        let sums = product.emit(kb, extent, None);
        for v in 0..vectors {
            let row = kb.add_int(from, v * i64::from(lanes));
            let of_tile = kb.add(self.row, row);
            let p = kb.load_vec(tile.positions, of_tile, lanes);
            let slope = tile.slopes.map(|slopes| kb.load_vec(slopes, of_tile, lanes));
            let mut best = kb.load_vec(tile.best, row, lanes);
            for (r, sums) in (0..).zip(&sums) {
                let (number, mut product) = (kb.add_int(key, r), sums[v as usize]);
                if let Some(pairs) = self.pairs() {
                    product = pairs.product(kb, product, of_tile, number);
                }
                let j = kb.add(self.j, key);
                let j = kb.add_int(j, r);
                let place = Place { p, j, slope, prefix: tile.prefix, end: None, shown };
                let s = tile.a.score(kb, product, &place);
                let s = kb.let_("s", s);
                let at = self.place_of(kb, key, r, row);
                kb.store_vec(tile.s, at, s);
                best = larger(kb, best, s);
                best = kb.let_("best", best);
            }
            kb.store_vec(tile.best, row, best);
        }
    }

    /// The new running maxima of the rows, and what their change makes of older sums.
    pub fn raise_max(&self, kb: &mut KernelBuilder) {
        let (tile, lanes) = (self.tile, self.lanes());
        self.each_vector(kb, |kb, at| {
            let of_tile = kb.add(self.row, at);
            let (old, best) = (kb.load_vec(tile.max, of_tile, lanes), kb.load_vec(tile.best, at, lanes));
            let old = kb.let_("old", old);
            let max = larger(kb, old, best);
            let max = kb.let_("max", max);
            let fallen = kb.sub(old, max);
            let factor = exp2_below_zero(kb, fallen);
            let factor = kb.let_("factor", factor);
            kb.store_vec(tile.max, of_tile, max);
            kb.store_vec(tile.factors, at, factor);
            let total = kb.load_vec(tile.total, of_tile, lanes);
            let total = kb.mul(total, factor);
            kb.store_vec(tile.total, of_tile, total);
        });
    }

    /// Scores to weights, and their sums.
    pub fn weigh(&self, kb: &mut KernelBuilder) {
        let (tile, lanes, zero) = (self.tile, self.lanes(), kb.int(0));
        let vectors = self.params().scores.1;
        let width = vectors * i64::from(lanes);
        let groups = kb.int(self.params().set / width);
        kb.serial("rows", groups, |kb, group| {
            let from = kb.mul_int(group, width);
            let from = kb.let_("from", from);
            let mut of_vectors = Vec::new();
            for v in 0..vectors {
                let row = kb.add_int(from, v * i64::from(lanes));
                let at = kb.add(self.row, row);
                let (max, total) = (kb.load_vec(tile.max, at, lanes), kb.load_vec(tile.total, at, lanes));
                let sum = kb.alloc("total", DType::F32, lanes as usize, Space::Local);
                kb.store_vec(sum, zero, total);
                of_vectors.push(Weighed { row, max: kb.let_("max", max), sum });
            }
            match self.pairs() {
                None => kb.serial("key", self.keys, |kb, key| {
                    for vector in &of_vectors {
                        let (at, weight) = self.weight(kb, key, vector);
                        kb.store_vec(tile.s, at, weight);
                    }
                }),
                Some(pairs) => self.weigh_pairs(kb, pairs, &of_vectors),
            }
            for vector in &of_vectors {
                let total = kb.load_vec(vector.sum, zero, lanes);
                let at = kb.add(self.row, vector.row);
                kb.store_vec(tile.total, at, total);
            }
        });
    }

    /// The place of the scores of key `key` and their weights, which are added to the sums of weights.
    fn weight(&self, kb: &mut KernelBuilder, key: ExprId, vector: &Weighed) -> (ExprId, ExprId) {
        let (lanes, zero) = (self.lanes(), kb.int(0));
        let at = self.place_of(kb, key, 0, vector.row);
        let s = kb.load_vec(self.tile.s, at, lanes);
        let below = kb.sub(s, vector.max);
        let weight = exp2_below_zero(kb, below);
        let weight = kb.let_("weight", weight);
        let old = kb.load_vec(vector.sum, zero, lanes);
        let new = kb.add(old, weight);
        kb.store_vec(vector.sum, zero, new);
        (at, weight)
    }

    /// Scores to codes of weights. A key behind the last one is hidden from all rows.
    fn weigh_pairs(&self, kb: &mut KernelBuilder, pairs: &Pairs, of_vectors: &[Weighed]) {
        let (lanes, zero) = (self.lanes(), kb.int(0));
        let nothing = kb.constant(0.0, Ty::vector(DType::F32, lanes));
        let cell = |kb: &mut KernelBuilder, name: &str| {
            let cell = kb.alloc(name, DType::F32, lanes as usize, Space::Local);
            kb.store_vec(cell, zero, nothing);
            cell
        };
        let cells: Vec<[BufId; 2]> =
            of_vectors.iter().map(|_| [cell(kb, "scaled_sum"), cell(kb, "largest")]).collect();
        let count = self.words(kb, self.keys);
        let keys = kb.mul_int(count, PAIR);
        kb.serial("key", keys, |kb, key| {
            for (vector, [sum, largest]) in of_vectors.iter().zip(&cells) {
                let (at, weight) = self.weight(kb, key, vector);
                let scaled = pairs.scaled(kb, weight, key);
                kb.store_vec(self.tile.s, at, scaled);
                let (old, most) = (kb.load_vec(*sum, zero, lanes), kb.load_vec(*largest, zero, lanes));
                let (new, most) = (kb.add(old, scaled), larger(kb, most, scaled));
                kb.store_vec(*sum, zero, new);
                kb.store_vec(*largest, zero, most);
            }
        });
        let inverses = of_vectors.iter().zip(&cells).map(|(vector, [sum, largest])| {
            let (sum, largest) = (kb.load_vec(*sum, zero, lanes), kb.load_vec(*largest, zero, lanes));
            pairs.set_units(kb, vector.row, sum, largest)
        });
        let inverses: Vec<ExprId> = inverses.collect();
        kb.serial("pair", count, |kb, pair| {
            let key = kb.mul_int(pair, PAIR);
            for (vector, &inverse) in of_vectors.iter().zip(&inverses) {
                let places = [0, 1].map(|r| self.place_of(kb, key, r, vector.row));
                let words = words(kb, (self.tile.s, places), [inverse, inverse], lanes);
                let at = self.place_of(kb, pair, 0, vector.row);
                kb.store_vec(pairs.weights, at, words);
            }
        });
    }

    /// Words of so many keys.
    fn words(&self, kb: &mut KernelBuilder, keys: ExprId) -> ExprId {
        let pair = kb.int(PAIR);
        ceil_div(kb, keys, pair)
    }

    /// Adds the weighted values of the block to the sums, as many columns at a time as registers have room for.
    pub fn mix(&self, kb: &mut KernelBuilder) {
        let size = self.tile.a.value_size;
        let (lanes, most) = (lanes_of(size, self.lanes()), self.params().sums.1);
        let width = i64::from(lanes);
        let all = size / width;
        let passes = (all + most - 1) / most;
        let vectors = (all + passes - 1) / passes;
        let (full, rest) = (all / vectors, all % vectors);
        let groups = kb.int(full);
        kb.serial("columns", groups, |kb, group| {
            let from = kb.mul_int(group, vectors * width);
            let from = kb.let_("from", from);
            self.mix_columns(kb, (from, vectors), lanes);
        });
        if rest > 0 {
            let from = kb.int(full * vectors * width);
            self.mix_columns(kb, (from, rest), lanes);
        }
    }

    /// `vectors` vectors of columns from `from` on, of the keys that some of the rows of a register block see.
    fn mix_columns(&self, kb: &mut KernelBuilder, (from, vectors): (ExprId, i64), lanes: u32) {
        let (tile, params) = (self.tile, self.params());
        let rows = params.sums.0;
        let (by, all) = (kb.int(rows), kb.int(params.set));
        let used = kb.min(self.left, all);
        let blocks = ceil_div(kb, used, by);
        kb.serial("rows", blocks, |kb, block| {
            let offset = kb.mul_int(block, rows);
            let offset = kb.let_("offset", offset);
            let row = kb.add(self.row, offset);
            let last = kb.add_int(row, rows - 1);
            let last = tile.position(kb, last);
            let keys = seen(kb, tile, (self.j, self.count), last);
            let keys = kb.let_("seen", keys);
            let zero = kb.int(0);
            let some = kb.lt(zero, keys);
            kb.if_(some, |kb| {
                let weights = self.pairs().map_or(tile.s, |pairs| pairs.weights);
                let product = Product {
                    a: Operand { buf: weights, start: offset, row: 1, k: params.set },
                    b: (tile.v, from, tile.a.value_size),
                    lanes,
                    rows,
                    vectors,
                    by_lane: params.by_lane,
                    pairs: self.pairs(),
                };
                let factors: Vec<ExprId> = (0..rows)
                    .map(|r| {
                        let at = kb.add_int(offset, r);
                        let factor = kb.load(tile.factors, at);
                        let factor = kb.splat(factor, lanes);
                        kb.let_("factor", factor)
                    })
                    .collect();
                let sums = match self.pairs() {
                    None => product.emit(kb, keys, Some((tile.sums, row, &factors))),
                    Some(_) => {
                        let words = self.words(kb, keys);
                        product.emit(kb, words, None)
                    }
                };
                for (r, sums) in (0..).zip(sums) {
                    let unit = self.pairs().map(|pairs| {
                        let at = kb.add_int(offset, r as i64);
                        let unit = pairs.unit(kb, at);
                        kb.let_("unit", unit)
                    });
                    for (v, mut sum) in (0..).zip(sums) {
                        let at = product.place(kb, row, (r as i64, v));
                        if let Some(unit) = unit {
                            let old = kb.load_vec(tile.sums, at, lanes);
                            let (old, new) = (kb.mul(old, factors[r]), kb.cast(sum, DType::F32));
                            sum = kb.fma(new, unit, old);
                        }
                        kb.store_vec(tile.sums, at, sum);
                    }
                }
            });
        });
    }
}

/// A vector of rows whose scores become weights.
struct Weighed {
    /// The first row in the set.
    row: ExprId,
    max: ExprId,
    /// Sums of weights.
    sum: BufId,
}

/// True if the queries at positions `first ..= last` see all keys of the block from `j` on.
fn shown(kb: &mut KernelBuilder, tile: &Tile, j: ExprId, (first, last): (ExprId, ExprId)) -> ExprId {
    let end = kb.add_int(j, tile.params.keys - 1);
    let behind = kb.binary(BinOp::Le, end, first);
    match (tile.a.keys, tile.a.op.window as i64) {
        (Keys::Sinks, _) => kb.lt(first, first),
        (Keys::Seen, 0) => behind,
        (Keys::Seen, window) => {
            let near = kb.add_int(j, window);
            let near = kb.lt(last, near);
            kb.binary(BinOp::And, behind, near)
        }
    }
}

/// How many of the `count` keys from `j` on are not behind the query at position `last`, or in the prefix.
fn seen(kb: &mut KernelBuilder, tile: &Tile, (j, count): (ExprId, ExprId), last: ExprId) -> ExprId {
    match tile.a.keys {
        Keys::Sinks => count,
        Keys::Seen => {
            let next = kb.add_int(last, 1);
            let end = tile.prefix.map_or(next, |prefix| kb.max(next, prefix));
            let seen = kb.sub(end, j);
            kb.min(seen, count)
        }
    }
}
