//! Attention of several queries on a CPU, by tiles: some positions with all query heads of a key head against blocks of
//! keys. Both products of a tile are small matrix products with their sums in registers: queries times transposed keys,
//! lanes over keys; weights times values, lanes over columns.
//!
//! Keys are transposed and values unpacked once per tile and block, so a tile has many rows; one row of a block of keys
//! has several vectors of scores, so that its maximum is found once for all of them.

use super::decode::columns;
use super::product::{Product, transpose};
use super::{HIDDEN, Place, Problem, at_least_zero, ceil_div, lanes_of};
use crate::math::exp_below_zero;
use mlcc_ir::builder::KernelBuilder;
use mlcc_ir::kernel::{BinOp, BufId, ExprId, Space, Ty};
use mlcc_ir::types::DType;

/// Sizes of the schedule.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Params {
    pub lanes: u32,
    /// Positions of a tile.
    pub positions: i64,
    /// Keys of a block; a multiple of `lanes * vectors`.
    pub keys: i64,
    /// Rows and vectors whose sums are in registers together.
    pub rows: i64,
    pub vectors: i64,
}

/// Rows of a tile that are aimed at: of many, so that transposing keys costs little beside the products, and of few where
/// there would be too few tiles for the workers, or queries and sums too large for the second-level cache.
const MANY_ROWS: i64 = 96;
const FEW_ROWS: i64 = 48;

impl Params {
    /// The register blocks are those of the contractions (see `params::block`).
    pub fn choose(a: &Problem, lanes: u32) -> Params {
        let (rows, vectors) = if lanes == 16 { (6, 4) } else { (4, 2) };
        let keys = (i64::from(lanes) * vectors).max(32);
        let few = a.kv == 1 || a.size.max(a.value_size) > 128;
        let wanted = if few { FEW_ROWS } else { MANY_ROWS };
        // Whole register blocks, where the group allows that.
        let step = (1..=rows).find(|p| p * a.group % rows == 0).unwrap_or(1);
        let positions = (wanted / (a.group * step)).max(1) * step;
        let positions = if positions * a.group > 2 * wanted { 1 } else { positions };
        Params { lanes, positions, keys, rows, vectors }
    }
    /// Rows of a tile: positions times heads, rounded up to whole register blocks.
    fn tile_rows(&self, a: &Problem) -> i64 {
        (self.positions * a.group + self.rows - 1) / self.rows * self.rows
    }
    /// The same, rounded up to whole vectors.
    fn padded_rows(&self, a: &Problem) -> i64 {
        let lanes = i64::from(self.lanes);
        (self.tile_rows(a) + lanes - 1) / lanes * lanes
    }
}

/// A tile's buffers on the stack, and its place.
#[derive(Clone, Copy)]
struct Tile<'a> {
    a: &'a Problem<'a>,
    params: Params,
    /// `[rows, size]`.
    q: BufId,
    /// Keys of a block, transposed: `[size, keys]`.
    k: BufId,
    /// `[keys, value_size]`.
    v: BufId,
    /// Scores, then weights: `[rows, keys]`.
    s: BufId,
    /// `[rows, value_size]`.
    sums: BufId,
    /// Running maxima, the largest score of a block, what the change of maxima makes of older sums: `[padded rows]`.
    max: BufId,
    most: BufId,
    factor: BufId,
    /// Sums of weights, `[rows, lanes]`.
    total: BufId,
    head: ExprId,
    /// First position of the tile among the queries, how many it has, position of the first query in the sequence.
    first: ExprId,
    count: ExprId,
    past: ExprId,
    /// The last key.
    last: ExprId,
    prefix: Option<ExprId>,
}

/// Writes results to `out: f32[n, heads, value_size]`.
pub fn emit(kb: &mut KernelBuilder, a: &Problem, params: Params, out: BufId) {
    let (n, t) = (kb.dim(&a.n), kb.dim(&a.t));
    let past = kb.sub(t, n);
    let past = kb.let_("first_position", past);
    let last = kb.add_int(t, -1);
    let prefix = a.prefix(kb);
    let positions = kb.int(params.positions);
    let tiles = ceil_div(kb, n, positions);
    let tiles = kb.let_("tiles", tiles);
    let items = kb.mul_int(tiles, a.kv);
    kb.par("item", items, |kb, item| {
        let (head, tile) = (kb.div(item, tiles), kb.rem(item, tiles));
        let first = kb.mul(tile, positions);
        let rest = kb.sub(n, first);
        let count = kb.min(rest, positions);
        let (rows, padded) = (params.tile_rows(a), params.padded_rows(a));
        let floats = |kb: &mut KernelBuilder, name: &str, len: i64| {
            kb.alloc(name, DType::F32, len as usize, Space::Stack)
        };
        let tile = Tile {
            a,
            params,
            q: floats(kb, "q", rows * a.size),
            k: floats(kb, "k", params.keys * a.size),
            v: floats(kb, "v", params.keys * a.value_size),
            s: floats(kb, "s", rows * params.keys),
            sums: floats(kb, "sums", rows * a.value_size),
            max: floats(kb, "max", padded),
            most: floats(kb, "most", padded),
            factor: floats(kb, "factor", padded),
            total: floats(kb, "total", rows * i64::from(params.lanes)),
            head: kb.let_("head", head),
            first: kb.let_("first", first),
            count: kb.let_("count", count),
            past,
            last,
            prefix,
        };
        tile.run(kb, out);
    });
}

impl Tile<'_> {
    fn run(&self, kb: &mut KernelBuilder, out: BufId) {
        self.clear(kb);
        let first = kb.add(self.past, self.first);
        let end = kb.add(first, self.count);
        if let Some(sinks) = self.a.sinks() {
            let last = kb.add_int(end, -1);
            let (zero, count) = (kb.int(0), self.a.sinks_behind(kb, last));
            Tile { a: &sinks, ..*self }.keys(kb, zero, count);
        }
        let start = self.a.first_key(kb, first);
        let end = self.prefix.map_or(end, |prefix| kb.max(end, prefix));
        self.keys(kb, start, end);
        self.store(kb, out);
    }

    /// Adds the keys `start..end`.
    fn keys(&self, kb: &mut KernelBuilder, start: ExprId, end: ExprId) {
        self.load_queries(kb);
        let keys = kb.sub(end, start);
        let keys = at_least_zero(kb, keys);
        let block = kb.int(self.params.keys);
        let blocks = ceil_div(kb, keys, block);
        kb.serial("block", blocks, |kb, i| {
            let at = kb.mul(i, block);
            let j = kb.add(start, at);
            let j = kb.let_("j", j);
            self.transpose_keys(kb, j);
            self.products(kb, j);
            self.raise_max(kb);
            self.weigh(kb);
            self.unpack_values(kb, j);
            self.mix(kb);
        });
    }

    /// Runs `body(row, position among the queries, query head)` for every row that stands for one.
    fn each_row(
        &self,
        kb: &mut KernelBuilder,
        body: impl FnOnce(&mut KernelBuilder, ExprId, ExprId, ExprId),
    ) {
        let group = kb.int(self.a.group);
        kb.serial("i", self.count, |kb, i| {
            kb.serial("g", group, |kb, g| {
                let row = kb.mul(i, group);
                let row = kb.add(row, g);
                let position = kb.add(self.first, i);
                let head = kb.mul(self.head, group);
                let head = kb.add(head, g);
                body(kb, row, position, head);
            });
        });
    }

    /// Rows in use, in whole register blocks.
    fn row_blocks(&self, kb: &mut KernelBuilder) -> ExprId {
        let rows = kb.mul_int(self.count, self.a.group);
        let block = kb.int(self.params.rows);
        ceil_div(kb, rows, block)
    }

    /// No keys seen yet; queries that stand for nothing are zero.
    fn clear(&self, kb: &mut KernelBuilder) {
        let (size, wide) = (self.a.size, self.a.value_size);
        let (lanes, value_lanes) = (lanes_of(size, self.params.lanes), lanes_of(wide, self.params.lanes));
        let blocks = self.row_blocks(kb);
        let rows = kb.mul_int(blocks, self.params.rows);
        kb.serial("row", rows, |kb, row| {
            let clear = |kb: &mut KernelBuilder, buf: BufId, size: i64, lanes: u32| {
                columns(kb, size, lanes, |kb, c| {
                    let nothing = kb.constant(0.0, Ty::vector(DType::F32, lanes));
                    let at = kb.mul_int(row, size);
                    let at = kb.add(at, c);
                    kb.store_vec(buf, at, nothing);
                });
            };
            clear(kb, self.q, size, lanes);
            clear(kb, self.sums, wide, value_lanes);
            clear(kb, self.total, self.params.lanes.into(), self.params.lanes);
        });
        columns(kb, self.params.padded_rows(self.a), self.params.lanes, |kb, c| {
            let hidden = kb.constant(HIDDEN, Ty::vector(DType::F32, self.params.lanes));
            kb.store_vec(self.max, c, hidden);
            kb.store_vec(self.most, c, hidden);
        });
    }

    /// Scaled queries.
    fn load_queries(&self, kb: &mut KernelBuilder) {
        let lanes = lanes_of(self.a.size, self.params.lanes);
        self.each_row(kb, |kb, row, position, head| {
            columns(kb, self.a.size, lanes, |kb, c| {
                let value = self.a.query(kb, position, head, c, lanes);
                let at = kb.mul_int(row, self.a.size);
                let at = kb.add(at, c);
                kb.store_vec(self.q, at, value);
            });
        });
    }

    /// The row of key `j + i`; rows behind the last one stand in for none.
    fn row_of(&self, kb: &mut KernelBuilder, j: ExprId, i: ExprId) -> ExprId {
        let row = kb.add(j, i);
        let row = kb.min(row, self.last);
        kb.let_("row", row)
    }

    fn transpose_keys(&self, kb: &mut KernelBuilder, j: ExprId) {
        let (size, keys) = (self.a.size, self.params.keys);
        let lanes = lanes_of(size, self.params.lanes);
        let squares = kb.int(keys / i64::from(lanes));
        kb.serial("square", squares, |kb, square| {
            let from = kb.mul_int(square, i64::from(lanes));
            let rows: Vec<ExprId> = (0..i64::from(lanes))
                .map(|i| {
                    let i = kb.add_int(from, i);
                    self.row_of(kb, j, i)
                })
                .collect();
            columns(kb, size, lanes, |kb, c| {
                let vectors = rows
                    .iter()
                    .map(|&row| {
                        let value = self.a.key(kb, row, self.head, c, lanes);
                        kb.let_("k", value)
                    })
                    .collect();
                for (i, column) in transpose(kb, vectors).into_iter().enumerate() {
                    let at = kb.add_int(c, i as i64);
                    let at = kb.mul_int(at, keys);
                    let at = kb.add(at, from);
                    kb.store_vec(self.k, at, column);
                }
            });
        });
    }

    fn unpack_values(&self, kb: &mut KernelBuilder, j: ExprId) {
        let size = self.a.value_size;
        let lanes = lanes_of(size, self.params.lanes);
        let keys = kb.int(self.params.keys);
        kb.serial("i", keys, |kb, i| {
            let row = self.row_of(kb, j, i);
            columns(kb, size, lanes, |kb, c| {
                let value = self.a.value(kb, row, self.head, c, lanes);
                let at = kb.mul_int(i, size);
                let at = kb.add(at, c);
                kb.store_vec(self.v, at, value);
            });
        });
    }

    /// Scores of a block.
    fn products(&self, kb: &mut KernelBuilder, j: ExprId) {
        let (keys, size, lanes) = (self.params.keys, self.a.size, self.params.lanes);
        let blocks = self.row_blocks(kb);
        let vectors = self.params.vectors.min(keys / i64::from(lanes));
        let width = vectors * i64::from(lanes);
        kb.serial("rows", blocks, |kb, block| {
            let row = kb.mul_int(block, self.params.rows);
            let row = kb.let_("row", row);
            let groups = kb.int(keys / width);
            kb.serial("keys", groups, |kb, group| {
                let from = kb.mul_int(group, width);
                let from = kb.let_("from", from);
                let extent = kb.int(size);
                let tile = Product {
                    a: (self.q, row, size),
                    b: (self.k, from, keys),
                    lanes,
                    rows: self.params.rows,
                    vectors,
                };
                let sums = tile.emit(kb, extent, None);
                for (r, sums) in sums.into_iter().enumerate() {
                    let row = kb.add_int(row, r as i64);
                    let (p, slope) = self.query_of(kb, row);
                    for (v, s) in sums.into_iter().enumerate() {
                        let offset = kb.add_int(from, v as i64 * i64::from(lanes));
                        let key = kb.add(j, offset);
                        let place = Place { p, j: key, slope, prefix: self.prefix, end: None };
                        let s = self.a.score(kb, s, &place);
                        let at = kb.mul_int(row, keys);
                        let at = kb.add(at, offset);
                        kb.store_vec(self.s, at, s);
                    }
                }
            });
        });
    }

    /// Position in the sequence and slope of a row's query; rows that stand for nothing have those of the last query.
    fn query_of(&self, kb: &mut KernelBuilder, row: ExprId) -> (ExprId, Option<ExprId>) {
        let group = kb.int(self.a.group);
        let most = kb.add_int(self.count, -1);
        let i = kb.div(row, group);
        let i = kb.min(i, most);
        let p = kb.add(self.past, self.first);
        let p = kb.add(p, i);
        let p = kb.let_("p", p);
        let (g, head) = (kb.rem(row, group), kb.mul(self.head, group));
        let head = kb.add(head, g);
        (p, self.a.slope(kb, head))
    }

    /// The vectors of scores of a row.
    fn scores_of(&self, kb: &mut KernelBuilder, row: ExprId) -> Vec<(ExprId, ExprId)> {
        let lanes = self.params.lanes;
        let base = kb.mul_int(row, self.params.keys);
        (0..self.params.keys / i64::from(lanes))
            .map(|v| {
                let at = kb.add_int(base, v * i64::from(lanes));
                let s = kb.load_vec(self.s, at, lanes);
                (at, kb.let_("s", s))
            })
            .collect()
    }

    /// New running maxima, and what their change makes of older sums.
    fn raise_max(&self, kb: &mut KernelBuilder) {
        let lanes = self.params.lanes;
        let blocks = self.row_blocks(kb);
        let rows = kb.mul_int(blocks, self.params.rows);
        kb.serial("row", rows, |kb, row| {
            let scores = self.scores_of(kb, row);
            let most =
                scores.into_iter().map(|(_, s)| s).reduce(|x, y| kb.max(x, y)).expect("a block has keys");
            let most = kb.reduce_lanes(BinOp::Max, most);
            kb.store(self.most, row, most);
        });
        columns(kb, self.params.padded_rows(self.a), lanes, |kb, c| {
            let (old, most) = (kb.load_vec(self.max, c, lanes), kb.load_vec(self.most, c, lanes));
            let old = kb.let_("old", old);
            let max = kb.max(old, most);
            let max = kb.let_("max", max);
            let fallen = kb.sub(old, max);
            let factor = exp_below_zero(kb, fallen);
            kb.store_vec(self.factor, c, factor);
            kb.store_vec(self.max, c, max);
        });
    }

    /// Scores to weights, and their sums.
    fn weigh(&self, kb: &mut KernelBuilder) {
        let lanes = self.params.lanes;
        let blocks = self.row_blocks(kb);
        let rows = kb.mul_int(blocks, self.params.rows);
        kb.serial("row", rows, |kb, row| {
            let (max, factor) = (kb.load(self.max, row), kb.load(self.factor, row));
            let (max, factor) = (kb.let_("max", max), kb.let_("factor", factor));
            let at = kb.mul_int(row, lanes.into());
            let total = kb.load_vec(self.total, at, lanes);
            let mut total = kb.mul(total, factor);
            for (at, s) in self.scores_of(kb, row) {
                let below = kb.sub(s, max);
                let weight = exp_below_zero(kb, below);
                let weight = kb.let_("weight", weight);
                kb.store_vec(self.s, at, weight);
                total = kb.add(total, weight);
            }
            kb.store_vec(self.total, at, total);
        });
    }

    /// Adds the weighted values of a block to the sums, as many columns at a time as registers have room for.
    fn mix(&self, kb: &mut KernelBuilder) {
        let size = self.a.value_size;
        let lanes = i64::from(lanes_of(size, self.params.lanes));
        let all = size / lanes;
        let passes = (all + self.params.vectors - 1) / self.params.vectors;
        let vectors = (all + passes - 1) / passes;
        let (full, rest) = (all / vectors, all % vectors);
        let blocks = self.row_blocks(kb);
        kb.serial("rows", blocks, |kb, block| {
            let row = kb.mul_int(block, self.params.rows);
            let row = kb.let_("row", row);
            let groups = kb.int(full);
            kb.serial("columns", groups, |kb, group| {
                let from = kb.mul_int(group, vectors * lanes);
                let from = kb.let_("from", from);
                self.mix_columns(kb, row, from, vectors);
            });
            if rest > 0 {
                let from = kb.int(full * vectors * lanes);
                self.mix_columns(kb, row, from, rest);
            }
        });
    }

    /// `vectors` vectors of columns from `from` on, for a register block of rows.
    fn mix_columns(&self, kb: &mut KernelBuilder, row: ExprId, from: ExprId, vectors: i64) {
        let (size, keys) = (self.a.value_size, self.params.keys);
        let lanes = lanes_of(size, self.params.lanes);
        let extent = kb.int(keys);
        let tile = Product {
            a: (self.s, row, keys),
            b: (self.v, from, size),
            lanes,
            rows: self.params.rows,
            vectors,
        };
        let sums = tile.emit(kb, extent, Some((self.sums, self.factor)));
        for (r, sums) in sums.into_iter().enumerate() {
            for (v, sum) in sums.into_iter().enumerate() {
                let at = tile.place(kb, (r as i64, v as i64), size);
                kb.store_vec(self.sums, at, sum);
            }
        }
    }

    fn store(&self, kb: &mut KernelBuilder, out: BufId) {
        let size = self.a.value_size;
        let lanes = lanes_of(size, self.params.lanes);
        self.each_row(kb, |kb, row, position, head| {
            let at = kb.mul_int(row, self.params.lanes.into());
            let total = kb.load_vec(self.total, at, self.params.lanes);
            let (one, total) = (kb.float(1.0), kb.reduce_lanes(BinOp::Add, total));
            let factor = kb.div(one, total);
            let factor = kb.let_("factor", factor);
            let to = kb.mul_int(position, self.a.heads());
            let to = kb.add(to, head);
            let to = kb.mul_int(to, size);
            columns(kb, size, lanes, |kb, c| {
                let at = kb.mul_int(row, size);
                let at = kb.add(at, c);
                let value = kb.load_vec(self.sums, at, lanes);
                let value = kb.mul(value, factor);
                let at = kb.add(to, c);
                kb.store_vec(out, at, value);
            });
        });
    }
}
