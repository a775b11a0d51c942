//! Attention of several queries on a CPU, by tiles: some positions with all query heads of a key head against blocks of
//! keys. Both products of a tile are small matrix products with their sums in registers: queries times transposed keys,
//! lanes over keys; weights times values, lanes over columns.
//!
//! Keys are transposed and values unpacked once per tile and block, so a tile has many rows. Then a few rows at a time, a
//! register block or two, go all the way from scores to sums, so that what they need stays in the first-level cache: keys
//! and values of a block, and the scores of these rows. Rows before a block are left out, and those on the diagonal take as
//! many of its keys as the last of them sees.

use super::decode::columns;
use super::product::transpose;
use super::rows::Rows;
use super::{HIDDEN, Keys, Problem, at_least_zero, ceil_div, lanes_of};
use mlcc_ir::builder::KernelBuilder;
use mlcc_ir::kernel::{BinOp, BufId, ExprId, Space, Ty};
use mlcc_ir::types::DType;

/// Sizes of the schedule.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Params {
    pub lanes: u32,
    /// Most positions of a tile.
    pub positions: i64,
    /// Tiles have a multiple of so many positions, but for the last.
    pub step: i64,
    /// Keys of a block; a multiple of `lanes * vectors`.
    pub keys: i64,
    /// Rows and vectors whose sums are in registers together.
    pub rows: i64,
    pub vectors: i64,
    /// Register blocks of rows that go together from scores to sums: at most a row for each lane.
    pub together: i64,
}

/// Rows of a tile that are aimed at: of many, so that transposing keys costs little beside the products, and of few where
/// there would be too few tiles for the workers, or queries and sums too large for the second-level cache.
const MANY_ROWS: i64 = 192;
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
        let together = (i64::from(lanes) / rows).clamp(1, 2);
        Params {
            lanes,
            positions,
            step: if positions == 1 { 1 } else { step },
            keys,
            rows,
            vectors,
            together,
        }
    }
    /// Rows that go together from scores to sums.
    pub(super) fn set(&self) -> i64 {
        self.together * self.rows
    }
    /// Vectors of a register block of few keys.
    pub(super) fn half(&self) -> i64 {
        (self.vectors / 2).max(1)
    }
    /// Sets of rows of a tile.
    fn sets(&self, a: &Problem) -> i64 {
        (self.positions * a.group + self.set() - 1) / self.set()
    }
}

/// A tile's buffers on the stack, and its place.
#[derive(Clone, Copy)]
pub(super) struct Tile<'a> {
    pub(super) a: &'a Problem<'a>,
    pub(super) params: Params,
    /// `[rows, size]`.
    pub(super) q: BufId,
    /// Keys of a block, transposed: `[size, keys]`.
    pub(super) k: BufId,
    /// `[keys, value_size]`.
    pub(super) v: BufId,
    /// Scores, then weights, of a set of rows: `[rows, keys]`.
    pub(super) s: BufId,
    /// Largest scores of the rows of a set, `[rows, lanes]`.
    pub(super) best: BufId,
    /// What a change of maxima makes of older sums of a set, row `r` in lane `r`.
    pub(super) factors: BufId,
    /// `[rows, value_size]`.
    pub(super) sums: BufId,
    /// Running maxima: a vector for each set of rows, whose row `r` has lane `r`.
    pub(super) max: BufId,
    /// Sums of weights, `[rows, lanes]`.
    pub(super) total: BufId,
    pub(super) head: ExprId,
    /// First position of the tile among the queries, how many it has, position of the first query in the sequence.
    pub(super) first: ExprId,
    pub(super) count: ExprId,
    pub(super) past: ExprId,
    /// The last key.
    pub(super) last: ExprId,
    pub(super) prefix: Option<ExprId>,
}

/// Writes results to `out: f32[n, heads, value_size]`.
pub fn emit(kb: &mut KernelBuilder, a: &Problem, params: Params, out: BufId) {
    let (n, t) = (kb.dim(&a.n), kb.dim(&a.t));
    let past = kb.sub(t, n);
    let past = kb.let_("first_position", past);
    let last = kb.add_int(t, -1);
    let prefix = a.prefix(kb);
    let most = kb.int(params.positions);
    let tiles = ceil_div(kb, n, most);
    let tiles = kb.let_("tiles", tiles);
    // Equal tiles: none is so short that transposing its keys counts.
    let (share, step) = (ceil_div(kb, n, tiles), kb.int(params.step));
    let steps = ceil_div(kb, share, step);
    let positions = kb.mul(steps, step);
    let positions = kb.let_("positions", positions);
    let items = kb.mul_int(tiles, a.kv);
    kb.par("item", items, |kb, item| {
        let (head, tile) = (kb.div(item, tiles), kb.rem(item, tiles));
        let first = kb.mul(tile, positions);
        let rest = kb.sub(n, first);
        let count = kb.min(rest, positions);
        let sets = params.sets(a);
        let rows = sets * params.set();
        let floats = |kb: &mut KernelBuilder, name: &str, len: i64| {
            kb.alloc(name, DType::F32, len as usize, Space::Stack)
        };
        let tile = Tile {
            a,
            params,
            q: floats(kb, "q", rows * a.size),
            k: floats(kb, "k", params.keys * a.size),
            v: floats(kb, "v", params.keys * a.value_size),
            s: floats(kb, "s", params.set() * params.keys),
            best: floats(kb, "best", params.set() * i64::from(params.lanes)),
            factors: floats(kb, "factors", params.lanes.into()),
            sums: floats(kb, "sums", rows * a.value_size),
            max: floats(kb, "max", sets * i64::from(params.lanes)),
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
            let left = kb.sub(end, j);
            let here = kb.min(left, block);
            let here = kb.let_("keys", here);
            self.transpose_keys(kb, j, here);
            self.unpack_values(kb, j, here);
            let (first, sets) = self.sets(kb, j);
            let count = kb.sub(sets, first);
            kb.serial("set", count, |kb, set| {
                let set = kb.add(first, set);
                let set = kb.let_("set", set);
                let rows = Rows::new(kb, self, set, (j, here));
                rows.scores(kb);
                rows.raise_max(kb);
                rows.weigh(kb);
                rows.mix(kb);
            });
        });
    }

    /// The first set of rows that sees some of the keys from `j` on, and the number of sets in use.
    fn sets(&self, kb: &mut KernelBuilder, j: ExprId) -> (ExprId, ExprId) {
        let (rows, size) = (kb.mul_int(self.count, self.a.group), kb.int(self.params.set()));
        let sets = ceil_div(kb, rows, size);
        let first = kb.add(self.past, self.first);
        let before = kb.sub(j, first);
        let before = at_least_zero(kb, before);
        let before = kb.mul_int(before, self.a.group);
        let begin = kb.div(before, size);
        let zero = kb.int(0);
        let begin = match (self.a.keys, self.prefix) {
            (Keys::Sinks, _) => zero,
            (Keys::Seen, None) => begin,
            (Keys::Seen, Some(prefix)) => {
                let inside = kb.lt(j, prefix);
                kb.select(inside, zero, begin)
            }
        };
        (kb.let_("first_set", begin), kb.let_("sets", sets))
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

    /// Register blocks of rows in use.
    pub(super) fn row_blocks(&self, kb: &mut KernelBuilder) -> ExprId {
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
        let maxima = self.params.sets(self.a) * i64::from(self.params.lanes);
        columns(kb, maxima, self.params.lanes, |kb, c| {
            let hidden = kb.constant(HIDDEN, Ty::vector(DType::F32, self.params.lanes));
            kb.store_vec(self.max, c, hidden);
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

    /// At least `count` keys, in whole vectors of half a register block (see [`Rows::scores`]).
    fn transpose_keys(&self, kb: &mut KernelBuilder, j: ExprId, count: ExprId) {
        let (size, keys) = (self.a.size, self.params.keys);
        let lanes = lanes_of(size, self.params.lanes);
        let half = self.params.half() * i64::from(self.params.lanes);
        let by = kb.int(half);
        let squares = ceil_div(kb, count, by);
        let squares = kb.mul_int(squares, half / i64::from(lanes));
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

    fn unpack_values(&self, kb: &mut KernelBuilder, j: ExprId, count: ExprId) {
        let size = self.a.value_size;
        let lanes = lanes_of(size, self.params.lanes);
        kb.serial("i", count, |kb, i| {
            let row = self.row_of(kb, j, i);
            columns(kb, size, lanes, |kb, c| {
                let value = self.a.value(kb, row, self.head, c, lanes);
                let at = kb.mul_int(i, size);
                let at = kb.add(at, c);
                kb.store_vec(self.v, at, value);
            });
        });
    }

    /// Position in the sequence and slope of a row's query; rows that stand for nothing have those of the last query.
    pub(super) fn query_of(&self, kb: &mut KernelBuilder, row: ExprId) -> (ExprId, Option<ExprId>) {
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
