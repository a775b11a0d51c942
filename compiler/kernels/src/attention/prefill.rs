//! Attention of several queries on a CPU, by tiles: some positions with all query heads of a key head against blocks of
//! keys. Both products of a tile are small matrix products with their sums in registers: keys times transposed queries,
//! lanes over rows; weights times values, lanes over columns.
//!
//! Keys and values are unpacked once per tile and block, so a tile has many rows, and queries are transposed once per tile.
//! Then a set of rows goes all the way from scores to sums (see [`super::rows`]), so that what it needs stays in the
//! first-level cache: its queries and scores, a few keys, and some columns of the values. Rows before a block are left out,
//! and those on the diagonal take as many of its keys as they see.

use super::decode::columns;
use super::pairs::{self, PAIR, Pairs};
use super::product::transpose;
use super::queries::query_columns;
use super::rows::Rows;
use super::schedule::Ahead;
use super::{HIDDEN, Keys, Problem, at_least_zero, ceil_div, lanes_of};
use crate::params::{KernelTarget, PairDot};
use mlcc_ir::builder::KernelBuilder;
use mlcc_ir::kernel::{BufId, ExprId, Space, Stmt, Ty};
use mlcc_ir::types::DType;
use mlcc_kernel_lang::CACHE_LINE;

/// Sizes of the schedule.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Params {
    pub lanes: u32,
    /// Most positions of a tile.
    pub positions: i64,
    /// Keys of a block; a multiple of those of a register block.
    pub keys: i64,
    /// Rows that go together from scores to sums; whole register blocks of both products.
    pub set: i64,
    /// Keys and vectors of rows whose scores are in registers together.
    pub scores: (i64, i64),
    /// Rows and vectors of columns whose sums are in registers together.
    pub sums: (i64, i64),
    /// Rows are lanes of a vector ([`KernelTarget::by_lane`]).
    pub by_lane: bool,
    /// Adds products of pairs of codes, where both products are in integers.
    pub pairs: Option<PairDot>,
    /// How rows of keys and of values are asked for ahead of their use, and how many of each with a register block of scores.
    pub ahead: [Option<Ahead>; 2],
    pub rows_ahead: i64,
}

/// Rows of a tile that are aimed at: of many, so that unpacking keys costs little beside the products, and of few where
/// there would be too few tiles for the workers, or queries and sums too large for the second-level cache.
const MANY_ROWS: i64 = 256;
const FEW_ROWS: i64 = 48;
/// With heads of 128, queries and scores of these rows take 36 KiB.
const SET: i64 = 48;
pub(super) const KEYS: i64 = 64;

impl Params {
    /// Sums and operands fit the registers; operands by lane take as many of them as rows have.
    pub fn choose(a: &Problem, target: &KernelTarget) -> Params {
        let lanes = target.f32_lanes();
        let (scores, sums) = match (target.by_lane(), target.registers()) {
            (true, _) => ((8, 2), (8, 2)),
            (false, 32) => ((8, 3), (6, 4)),
            (false, _) => ((4, 2), (4, 2)),
        };
        let few = a.kv == 1 || a.size.max(a.value_size) > 128;
        let wanted = if few { FEW_ROWS } else { MANY_ROWS };
        let positions = (wanted / a.group).max(1);
        let pairs = target.pair_dot().filter(|_| a.op.codes && pairs::fits(a, lanes));
        let ahead = Ahead::of_rows(a, |dtype| target.prefetch(dtype));
        let params = Params {
            lanes,
            positions,
            keys: KEYS,
            set: SET,
            scores,
            sums,
            by_lane: target.by_lane(),
            pairs,
            ahead,
            rows_ahead: 0,
        };
        Params { rows_ahead: (scores.0 + params.sets(a) - 1) / params.sets(a), ..params }
    }
    /// Sets of rows of a tile.
    fn sets(&self, a: &Problem) -> i64 {
        (self.positions * a.group + self.set - 1) / self.set
    }
}

/// A tile's buffers on the stack, and its place.
#[derive(Clone, Copy)]
pub(super) struct Tile<'a> {
    pub(super) a: &'a Problem<'a>,
    pub(super) params: Params,
    /// Where operands are words of two codes.
    pub(super) pairs: Option<Pairs>,
    /// Queries, transposed by sets of rows: `[sets, size, rows]`. As words `[sets, size / 2, rows]`.
    pub(super) q: BufId,
    /// The rows of a set before that.
    query: BufId,
    /// Keys and values of a block: `[keys, size]`, `[keys, value_size]`. As words `[keys, size / 2]`,
    /// `[keys / 2, value_size]`.
    pub(super) k: BufId,
    pub(super) v: BufId,
    /// Scores, then weights, of a set of rows: `[keys, rows]`.
    pub(super) s: BufId,
    /// Largest scores of a set of rows in a block, and what a change of maxima makes of older sums.
    pub(super) best: BufId,
    pub(super) factors: BufId,
    /// `[rows, value_size]`.
    pub(super) sums: BufId,
    /// By row: running maxima and sums of weights, positions in the sequence (`i32`) and slopes.
    pub(super) max: BufId,
    pub(super) total: BufId,
    pub(super) positions: BufId,
    pub(super) slopes: Option<BufId>,
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
    // Equal tiles: none is so short that unpacking its keys counts.
    let positions = ceil_div(kb, n, tiles);
    let positions = kb.let_("positions", positions);
    let items = kb.mul_int(tiles, a.kv);
    kb.par("item", items, |kb, item| {
        let (head, tile) = (kb.div(item, tiles), kb.rem(item, tiles));
        let first = kb.mul(tile, positions);
        let rest = kb.sub(n, first);
        let count = kb.min(rest, positions);
        let rows = params.sets(a) * params.set;
        let floats = |kb: &mut KernelBuilder, name: &str, len: i64| {
            kb.alloc(name, DType::F32, len as usize, Space::Stack)
        };
        let elements = |kb: &mut KernelBuilder, name: &str, len: i64| match params.pairs {
            None => floats(kb, name, len),
            Some(_) => kb.alloc(name, DType::I32, (len / PAIR) as usize, Space::Stack),
        };
        let pairs = Pairs::new(kb, a, &params, rows);
        let tile = Tile {
            a,
            params,
            pairs,
            q: elements(kb, "q", rows * a.size),
            query: pairs.map_or_else(|| floats(kb, "query", params.set * a.size), |pairs| pairs.queries),
            k: elements(kb, "k", params.keys * a.size),
            v: elements(kb, "v", params.keys * a.value_size),
            s: floats(kb, "s", params.keys * params.set),
            best: floats(kb, "best", params.set),
            factors: floats(kb, "factors", params.set),
            sums: floats(kb, "sums", rows * a.value_size),
            max: floats(kb, "max", rows),
            total: floats(kb, "total", rows),
            positions: kb.alloc("positions", DType::I32, rows as usize, Space::Stack),
            slopes: a.slopes.map(|_| floats(kb, "slopes", rows)),
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
            self.unpack_keys(kb, j, here);
            self.unpack_values(kb, j, here);
            let (first, by) = (self.first_row(kb, j), kb.int(self.params.set));
            let first = kb.div(first, by);
            let first = kb.let_("first_set", first);
            let sets = self.sets(kb);
            let count = kb.sub(sets, first);
            kb.serial("set", count, |kb, set| {
                let set = kb.add(first, set);
                let set = kb.let_("set", set);
                let turn = kb.sub(set, first);
                let rows = Rows::new(kb, self, set, turn, (j, here));
                rows.scores(kb);
                rows.raise_max(kb);
                rows.weigh(kb);
                rows.mix(kb);
            });
        });
    }

    /// The first row that sees key `j` or one behind it.
    pub(super) fn first_row(&self, kb: &mut KernelBuilder, j: ExprId) -> ExprId {
        let zero = kb.int(0);
        if self.a.keys == Keys::Sinks {
            return zero;
        }
        let first = kb.add(self.past, self.first);
        let before = kb.sub(j, first);
        let before = at_least_zero(kb, before);
        let row = kb.mul_int(before, self.a.group);
        match self.prefix {
            None => row,
            Some(prefix) => {
                let inside = kb.lt(j, prefix);
                kb.select(inside, zero, row)
            }
        }
    }

    /// Sets of rows in use.
    fn sets(&self, kb: &mut KernelBuilder) -> ExprId {
        let (rows, set) = (kb.mul_int(self.count, self.a.group), kb.int(self.params.set));
        let sets = ceil_div(kb, rows, set);
        kb.let_("sets", sets)
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

    /// No keys seen yet. Rows behind the last one in use have the queries and positions of the last position.
    fn clear(&self, kb: &mut KernelBuilder) {
        let (wide, lanes) = (self.a.value_size, self.params.lanes);
        let value_lanes = lanes_of(wide, lanes);
        let sets = self.sets(kb);
        let rows = kb.mul_int(sets, self.params.set);
        kb.serial("row", rows, |kb, row| {
            columns(kb, wide, value_lanes, |kb, c| {
                let nothing = kb.constant(0.0, Ty::vector(DType::F32, value_lanes));
                let at = kb.mul_int(row, wide);
                let at = kb.add(at, c);
                kb.store_vec(self.sums, at, nothing);
            });
            let (p, none, hidden) = (self.position(kb, row), kb.float(0.0), kb.float(HIDDEN));
            let p = kb.cast(p, DType::I32);
            kb.store(self.positions, row, p);
            kb.store(self.total, row, none);
            kb.store(self.max, row, hidden);
            if self.a.null.is_some() {
                let (head, one) = (self.head_of(kb, row), kb.float(1.0));
                if let Some(logit) = self.a.null_logit(kb, head) {
                    kb.store(self.max, row, logit);
                    kb.store(self.total, row, one);
                }
            }
            if let Some(slopes) = self.slopes {
                let head = self.head_of(kb, row);
                if let Some(slope) = self.a.slope(kb, head) {
                    kb.store(slopes, row, slope);
                }
            }
        });
    }

    /// Scaled queries, transposed set by set.
    fn load_queries(&self, kb: &mut KernelBuilder) {
        let (size, set) = (self.a.size, self.params.set);
        let lanes = lanes_of(size, self.params.lanes);
        let sets = self.sets(kb);
        kb.serial("set", sets, |kb, number| {
            let first = kb.mul_int(number, set);
            let first = kb.let_("first", first);
            let rows = kb.int(set);
            kb.serial("r", rows, |kb, r| {
                let row = kb.add(first, r);
                let (position, head) = (self.query_of(kb, row), self.head_of(kb, row));
                let query = |kb: &mut KernelBuilder, c: ExprId, lanes: u32| {
                    self.a.query(kb, position, head, c, lanes)
                };
                if let Some(pairs) = &self.pairs {
                    return pairs.code_query(kb, self, (row, r), query);
                }
                query_columns(kb, self.a, lanes, |kb, c| {
                    let value = query(kb, c, lanes);
                    let at = kb.mul_int(r, size);
                    let at = kb.add(at, c);
                    kb.store_vec(self.query, at, value);
                });
            });
            // What lies in rows, words or floats.
            let size = if self.pairs.is_some() { size / PAIR } else { size };
            let lanes = lanes_of(size, self.params.lanes);
            let squares = kb.int(set / i64::from(lanes));
            kb.serial("square", squares, |kb, square| {
                let from = kb.mul_int(square, i64::from(lanes));
                columns(kb, size, lanes, |kb, c| {
                    let mut vectors = Vec::new();
                    for r in 0..i64::from(lanes) {
                        let row = kb.add_int(from, r);
                        let at = kb.mul_int(row, size);
                        let at = kb.add(at, c);
                        let value = kb.load_vec(self.query, at, lanes);
                        vectors.push(kb.let_("q", value));
                    }
                    let start = kb.mul_int(first, size);
                    for (i, column) in transpose(kb, vectors).into_iter().enumerate() {
                        let at = kb.add_int(c, i as i64);
                        let at = kb.mul_int(at, set);
                        let at = kb.add(at, from);
                        let at = kb.add(start, at);
                        kb.store_vec(self.q, at, column);
                    }
                });
            });
        });
    }

    /// The row of key `j + i`; rows behind the last one stand in for none.
    pub(super) fn row_of(&self, kb: &mut KernelBuilder, j: ExprId, i: ExprId) -> ExprId {
        let row = kb.add(j, i);
        let row = kb.min(row, self.last);
        kb.let_("row", row)
    }

    /// At least `count` keys, in whole register blocks.
    fn unpack_keys(&self, kb: &mut KernelBuilder, j: ExprId, count: ExprId) {
        let by = kb.int(self.params.scores.0);
        let blocks = ceil_div(kb, count, by);
        let count = kb.mul(blocks, by);
        if let Some(pairs) = &self.pairs {
            return pairs.code_keys(kb, self, j, count);
        }
        self.unpack(kb, (self.k, self.a.size), (j, count), |kb, row, c, lanes| {
            self.a.key(kb, row, self.head, c, lanes)
        });
    }

    /// Asks for some rows of the keys and values of the block behind that from row `j` on: turn `turn` of those that share them.
    pub(super) fn ask(&self, kb: &mut KernelBuilder, j: ExprId, turn: ExprId) {
        let first = kb.mul_int(turn, self.params.rows_ahead);
        let first = kb.add_int(first, self.params.keys);
        for i in 0..self.params.rows_ahead {
            let number = kb.add_int(first, i);
            let row = self.row_of(kb, j, number);
            for Ahead { buf, instr, size, bytes } in self.params.ahead.into_iter().flatten() {
                let before = kb.mul_int(row, self.a.kv);
                let before = kb.add(before, self.head);
                let before = kb.mul_int(before, size);
                for column in (0..size).step_by(CACHE_LINE / bytes as usize) {
                    let place = kb.add_int(before, column);
                    let element = kb.load(buf, place);
                    kb.push(Stmt::Instr { instr, args: vec![element] });
                }
            }
        }
    }

    fn unpack_values(&self, kb: &mut KernelBuilder, j: ExprId, count: ExprId) {
        if let Some(pairs) = &self.pairs {
            return pairs.code_values(kb, self, j, count);
        }
        self.unpack(kb, (self.v, self.a.value_size), (j, count), |kb, row, c, lanes| {
            self.a.value(kb, row, self.head, c, lanes)
        });
    }

    /// `count` rows of `size` elements, from row `j` of the cache on.
    fn unpack(
        &self,
        kb: &mut KernelBuilder,
        (to, size): (BufId, i64),
        (j, count): (ExprId, ExprId),
        value: impl Fn(&mut KernelBuilder, ExprId, ExprId, u32) -> ExprId,
    ) {
        let lanes = lanes_of(size, self.params.lanes);
        kb.serial("i", count, |kb, i| {
            let row = self.row_of(kb, j, i);
            columns(kb, size, lanes, |kb, c| {
                let value = value(kb, row, c, lanes);
                let at = kb.mul_int(i, size);
                let at = kb.add(at, c);
                kb.store_vec(to, at, value);
            });
        });
    }

    /// Position of a row's query among the queries.
    fn query_of(&self, kb: &mut KernelBuilder, row: ExprId) -> ExprId {
        let (group, most) = (kb.int(self.a.group), kb.add_int(self.count, -1));
        let i = kb.div(row, group);
        let i = kb.min(i, most);
        let position = kb.add(self.first, i);
        kb.let_("position", position)
    }

    /// Position of a row's query in the sequence.
    pub(super) fn position(&self, kb: &mut KernelBuilder, row: ExprId) -> ExprId {
        let position = self.query_of(kb, row);
        let p = kb.add(self.past, position);
        kb.let_("p", p)
    }

    /// Query head of a row.
    fn head_of(&self, kb: &mut KernelBuilder, row: ExprId) -> ExprId {
        let group = kb.int(self.a.group);
        let (g, head) = (kb.rem(row, group), kb.mul(self.head, group));
        kb.add(head, g)
    }

    fn store(&self, kb: &mut KernelBuilder, out: BufId) {
        let size = self.a.value_size;
        let lanes = lanes_of(size, self.params.lanes);
        self.each_row(kb, |kb, row, position, head| {
            let (one, total) = (kb.float(1.0), kb.load(self.total, row));
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
