//! Some rows of a tile of attention against a block of keys: from scores to sums of values. Scores have rows
//! in their lanes, so maxima and sums of weights go along vectors, keys are read in the order of memory, and
//! weights are where the product with the values broadcasts them from.

use super::matmul_tile::{BroadcastMatrix, MatmulTile};
use super::operand::pairs::{PairOperands, load_words};
use super::plan::{PAIR, PrefillPlan, lanes_of};
use super::problem::{KeySubset, MASKED, ScoreIndex, larger_score};
use super::query_tile::QueryTile;
use mlcc_ir::kernel::ExprType;
use mlcc_ir::ops::KeySpan;
use mlcc_ir::types::DType;
use mlcc_kernel_lang::math::exp2_below_zero;
use mlcc_kernel_lang::{Recorder, RegisterVar, Val};

/// A set of rows of a tile against a block of keys.
pub(super) struct RowSet<'k, 'a> {
    k: &'k Recorder,
    tile: QueryTile<'k, 'a>,
    plan: PrefillPlan,
    pairs: Option<PairOperands<'k>>,
    /// The number of sets of the tile that have met the block.
    set_number: Val<'k>,
    /// The first row, and how many are in use from there on.
    row: Val<'k>,
    left: Val<'k>,
    /// The first key, and how many the block has.
    j: Val<'k>,
    count: Val<'k>,
    /// Keys up to the last that one of the rows sees.
    keys: Val<'k>,
    /// True if all rows are in use and see all keys of a whole block.
    visible: Val<'k>,
}

impl<'k, 'a> RowSet<'k, 'a> {
    /// Set `set` of a tile, number `set_number` of those that see them, against `count` keys from `j` on.
    pub fn new(
        tile: &QueryTile<'k, 'a>,
        pairs: Option<PairOperands<'k>>,
        set: Val<'k>,
        set_number: Val<'k>,
        (j, count): (Val<'k>, Val<'k>),
    ) -> RowSet<'k, 'a> {
        let (k, plan) = (tile.rec, tile.plan);
        let row = (set * plan.set).named("row");
        let left = (tile.count * tile.a.group - row).named("left");
        let [first, last] = [row, row + (plan.set - 1)].map(|row| tile.position(row));
        let visible = (k.int(plan.set).le(left) & all_visible(tile, j, (first, last))).named("shown");
        let keys = count_seen_keys(tile, (j, count), last).named("seen");
        RowSet { k, tile: *tile, plan, pairs, set_number, row, left, j, count, keys, visible }
    }

    /// Rows of a register tile of scores.
    fn width(&self) -> i64 {
        self.plan.scores.1 * i64::from(self.plan.lanes)
    }

    /// Stores the scores `[keys, rows]`, and the largest of every row.
    pub fn store_scores(&self) {
        let masked = self.masked();
        self.each_vector(|at| self.tile.block_max.set([at], masked));
        let (across, vectors) = self.plan.scores;
        let blocks = self.keys.div_ceil(across).named("blocks");
        let each_tile = |body: &dyn Fn(Val<'k>, Val<'k>)| {
            self.k.serial("rows", self.plan.set / self.width(), |group| {
                let from = (group * self.width()).named("from");
                self.k.serial("keys", blocks, |block| {
                    let key = (block * across).named("key");
                    self.prefetch(group, block);
                    body(from, key);
                });
            });
        };
        self.k.when_else(
            self.visible,
            || each_tile(&|from, key| self.score_tile((from, vectors), key, true)),
            || each_tile(&|from, key| self.mask_unseen(from, key)),
        );
    }

    fn masked(&self) -> Val<'k> {
        self.k.literal(MASKED, ExprType::vector(DType::F32, self.plan.lanes))
    }

    /// Prefetches the next block, with the first vectors of rows; `block`: the register tile of keys.
    fn prefetch(&self, group: Val<'k>, block: Val<'k>) {
        self.k.when(group.equals(0), || {
            self.tile.prefetch(self.j, self.set_number * (self.plan.keys / self.plan.scores.0) + block);
        });
    }

    /// Runs `body` for the place of every vector of rows in the set.
    fn each_vector(&self, body: impl FnOnce(Val<'k>)) {
        self.k.vectors("vector", self.plan.set, self.plan.lanes, body);
    }

    /// Scores of the vectors of rows that are in use and see some of the keys; those of the others are
    /// masked.
    fn mask_unseen(&self, from: Val<'k>, key: Val<'k>) {
        let (k, tile, lanes) = (self.k, self.tile, i64::from(self.plan.lanes));
        let (across, vectors) = self.plan.scores;
        let begin = (tile.first_row(self.j + key) - self.row - from).max(0);
        let begin = (begin / lanes).min(vectors).named("begin");
        let end = (self.left - from).max(0).div_ceil(lanes).min(vectors).named("end");
        let masked = self.masked();
        k.serial("vector", vectors, |v| {
            k.when(v.lt(begin) | end.le(v), || {
                let row = from + v * lanes;
                (0..across).for_each(|r| tile.s.set([key + r, row], masked));
            });
        });
        let count = (end - begin).max(0);
        let from = (from + begin * lanes).named("from");
        for vectors in 1..=vectors {
            k.when(count.equals(vectors), || self.score_tile((from, vectors), key, false));
        }
    }

    /// Scores of `vectors` vectors of rows from row `from` of the set on, against the keys of a register tile
    /// from `key` on.
    fn score_tile(&self, (from, vectors): (Val<'k>, i64), key: Val<'k>, visible: bool) {
        let (tile, plan, lanes) = (self.tile, self.plan, self.plan.lanes);
        let size = if self.pairs.is_some() { tile.a.size / PAIR } else { tile.a.size };
        let product = MatmulTile {
            a: BroadcastMatrix { view: tile.k.row(key), row: size, k: 1 },
            b: tile.q,
            column: self.row * size + from,
            lanes,
            rows: plan.scores.0,
            vectors,
            by_lane: plan.by_lane,
            pairs: self.pairs.map(|pairs| pairs.dot),
        };
        let sums = product.sum_products(self.k.int(size), None);
        for v in 0..vectors {
            let row = from + v * i64::from(lanes);
            let of_tile = self.row + row;
            let p = tile.positions.load([of_tile], lanes);
            let slope = tile.slopes.map(|slopes| slopes.load([of_tile], lanes));
            let mut best = tile.block_max.load([row], lanes);
            for (r, sums) in (0..).zip(&sums) {
                let sum = sums[v as usize];
                let product = self.pairs.map_or(sum, |pairs| pairs.product(sum, of_tile, key + r));
                let j = self.j + key + r;
                let term = tile.terms.map(|terms| {
                    let before = (self.k.int(plan.keys - 1) - (key + r)) * tile.a.group;
                    terms.load([before + of_tile], lanes)
                });
                let (prefix, border) = (tile.prefix, tile.border);
                let index = ScoreIndex { p, j, slope, term, prefix, border, end: None, visible };
                let s = tile.a.score(product, &index).named("s");
                tile.s.set([key + r, row], s);
                best = larger_score(best, s).named("best");
            }
            tile.block_max.set([row], best);
        }
    }

    /// The new running maxima of the rows, and what their change makes of older sums.
    pub fn raise_max(&self) {
        let (tile, lanes) = (self.tile, self.plan.lanes);
        self.each_vector(|at| {
            let row = self.row + at;
            let old = tile.max.load([row], lanes).named("old");
            let max = larger_score(old, tile.block_max.load([at], lanes)).named("max");
            let factor = exp2_below_zero(old - max).named("factor");
            tile.max.set([row], max);
            tile.rescale.set([at], factor);
            tile.row_sum.set([row], tile.row_sum.load([row], lanes) * factor);
        });
    }

    /// Scores to weights, and their sums.
    pub fn softmax(&self) {
        let (tile, k, lanes) = (self.tile, self.k, self.plan.lanes);
        k.steps("rows", self.plan.set / self.width(), self.width(), |from| {
            let from = from.named("from");
            let vector = |v: i64| {
                let row = from + v * i64::from(lanes);
                let (max, total) =
                    (tile.max.load([self.row + row], lanes), tile.row_sum.load([self.row + row], lanes));
                let sum = k.reg("total", total);
                SoftmaxRows { row, max: max.named("max"), sum }
            };
            let vectors: Vec<SoftmaxRows> = (0..self.plan.scores.1).map(vector).collect();
            match &self.pairs {
                None => k.serial("key", self.keys, |key| {
                    for vector in &vectors {
                        tile.s.set([key, vector.row], self.weight(key, vector));
                    }
                }),
                Some(pairs) => self.encode_weights(pairs, &vectors),
            }
            for vector in &vectors {
                tile.row_sum.set([self.row + vector.row], vector.sum.get());
            }
        });
    }

    /// Weights of key `key`, which are added to the sums of weights.
    fn weight(&self, key: Val<'k>, vector: &SoftmaxRows<'k>) -> Val<'k> {
        let s = self.tile.s.load([key, vector.row], self.plan.lanes);
        let weight = exp2_below_zero(s - vector.max).named("weight");
        vector.sum.update(|sum| sum + weight);
        weight
    }

    /// Scores to codes of weights. A key after the last one is masked for all rows.
    fn encode_weights(&self, pairs: &PairOperands<'k>, vectors: &[SoftmaxRows<'k>]) {
        let (tile, k, lanes) = (self.tile, self.k, self.plan.lanes);
        let reg = |name: &str| k.reg(name, k.zeros(DType::F32, lanes));
        let scaled: Vec<[RegisterVar; 2]> =
            vectors.iter().map(|_| [reg("scaled_sum"), reg("largest")]).collect();
        let count = self.keys.div_ceil(PAIR);
        k.serial("key", count * PAIR, |key| {
            for (vector, [sum, largest]) in vectors.iter().zip(&scaled) {
                let scaled = pairs.scaled(self.weight(key, vector), key);
                tile.s.set([key, vector.row], scaled);
                sum.update(|sum| sum + scaled);
                largest.update(|largest| larger_score(largest, scaled));
            }
        });
        let inverse = |(vector, [sum, largest]): (&SoftmaxRows<'k>, &[RegisterVar<'k>; 2])| {
            pairs.set_units(vector.row, sum.get(), largest.get())
        };
        let inverses: Vec<Val> = vectors.iter().zip(&scaled).map(inverse).collect();
        k.serial("pair", count, |pair| {
            for (vector, &inverse) in vectors.iter().zip(&inverses) {
                let places = [0, 1].map(|r| tile.s.offset([pair * PAIR + r, vector.row]));
                let words = load_words(tile.s.flat(), places, [inverse, inverse], lanes);
                pairs.weights.set([pair, vector.row], words);
            }
        });
    }

    /// Adds the weighted values of the block to the sums, as many columns at a time as registers have room
    /// for.
    pub fn add_values(&self) {
        let size = self.tile.a.value_size;
        let (lanes, most) = (lanes_of(size, self.plan.lanes), self.plan.accumulators.1);
        let width = i64::from(lanes);
        let all = size / width;
        let passes = (all + most - 1) / most;
        let vectors = (all + passes - 1) / passes;
        let (full, rest) = (all / vectors, all % vectors);
        self.k.steps("columns", full, vectors * width, |from| {
            self.add_columns((from.named("from"), vectors), lanes);
        });
        if rest > 0 {
            self.add_columns((self.k.int(full * vectors * width), rest), lanes);
        }
    }

    /// `vectors` vectors of columns from `from` on, of the keys that some of the rows of a register tile see.
    fn add_columns(&self, (from, vectors): (Val<'k>, i64), lanes: u32) {
        let (tile, k, rows) = (self.tile, self.k, self.plan.accumulators.0);
        let used = self.left.min(self.plan.set);
        k.steps("rows", used.div_ceil(rows), rows, |offset| {
            let offset = offset.named("offset");
            let row = self.row + offset;
            let last = tile.position(row + (rows - 1));
            let keys = count_seen_keys(&tile, (self.j, self.count), last).named("seen");
            k.when(k.int(0).lt(keys), || {
                let weights = self.pairs.map_or(tile.s, |pairs| pairs.weights);
                let product = MatmulTile {
                    a: BroadcastMatrix {
                        view: weights.flat().starting_at([offset]),
                        row: 1,
                        k: self.plan.set,
                    },
                    b: tile.v,
                    column: from,
                    lanes,
                    rows,
                    vectors,
                    by_lane: self.plan.by_lane,
                    pairs: self.pairs.map(|pairs| pairs.dot),
                };
                self.add_product(&product, (row, offset), keys);
            });
        });
    }

    /// Adds a product of weights and values over `keys` keys to the sums of the rows from `row` of the tile
    /// and `offset` of the set on, after what the new maxima make of these.
    fn add_product(&self, product: &MatmulTile<'k>, (row, offset): (Val<'k>, Val<'k>), keys: Val<'k>) {
        let (tile, lanes) = (self.tile, product.lanes);
        let factor = |r: i64| tile.rescale.at([offset + r]).splat(lanes).named("factor");
        let factors: Vec<Val> = (0..product.rows).map(factor).collect();
        let sums = match self.pairs {
            None => product.sum_products(keys, Some((tile.accumulators, row, &factors))),
            Some(_) => product.sum_products(keys.div_ceil(PAIR), None),
        };
        for (r, sums) in (0..).zip(sums) {
            let unit = self.pairs.map(|pairs| pairs.unit(offset + r).named("unit"));
            for (v, sum) in (0..).zip(sums) {
                let at = product.place(row, (r, v));
                let sum = match unit {
                    None => sum,
                    Some(unit) => {
                        let old = tile.accumulators.load(at, lanes) * factors[r as usize];
                        sum.cast(DType::F32).fma(unit, old)
                    }
                };
                tile.accumulators.set(at, sum);
            }
        }
    }
}

/// A vector of rows whose scores become weights.
struct SoftmaxRows<'k> {
    /// The first row in the set.
    row: Val<'k>,
    max: Val<'k>,
    /// Sums of weights.
    sum: RegisterVar<'k>,
}

/// True if the queries at positions `first ..= last` see all keys of the block from `j` on.
fn all_visible<'k>(tile: &QueryTile<'k, '_>, j: Val<'k>, (first, last): (Val<'k>, Val<'k>)) -> Val<'k> {
    let last_key = j + (tile.plan.keys - 1);
    let mut before = match (tile.a.op.ahead, tile.a.op.span) {
        (0, KeySpan::All | KeySpan::Rest) => last_key.le(first),
        _ => last_key.lt(tile.a.end_key(first)),
    };
    if let Some(border) = tile.border.filter(|_| tile.a.op.span == KeySpan::Rest) {
        before = before & border.le(j);
    }
    match (tile.a.keys, tile.a.op.window as i64) {
        (KeySubset::Sinks, _) => first.lt(first),
        (KeySubset::Visible, 0) => before,
        (KeySubset::Visible, window) => before & last.lt(j + window),
    }
}

/// The number of keys among the `count` keys from `j` on that the query at position `last` sees or that are
/// in the prefix.
fn count_seen_keys<'k>(tile: &QueryTile<'k, '_>, (j, count): (Val<'k>, Val<'k>), last: Val<'k>) -> Val<'k> {
    match tile.a.keys {
        KeySubset::Sinks => count,
        KeySubset::Visible => {
            let next = tile.a.end_key(last);
            let end = tile.prefix.map_or(next, |prefix| next.max(prefix));
            (end - j).min(count)
        }
    }
}
