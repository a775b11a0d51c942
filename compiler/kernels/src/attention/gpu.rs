//! Attention on a GPU: a thread block takes some query rows of a key head (positions times heads of its group) against
//! tiles of keys and values in shared memory. With one query the cache is cut into slices for more blocks, and a second
//! kernel joins their unfinished sums, as in [`super::decode`].

use super::decode::partial_row;
use super::merge::{cell, largest};
use super::schedule::Params as Partial;
use super::{HIDDEN, Place, Problem, at_least_zero, ceil_div, most_slices, slices};
use mlcc_ir::builder::KernelBuilder;
use mlcc_ir::kernel::{BinOp, BufId, ExprId, ForKind, Space, UnOp};
use mlcc_ir::types::DType;

const THREADS: i64 = 128;
/// Rows of queries that a block takes at most.
const ROWS: i64 = 16;
/// Static shared memory of a block, on every GPU.
const SHARED_BYTES: i64 = 48 << 10;
/// Items of work that one query should give.
const ITEMS: i64 = 256;

/// Sizes of the schedule.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Params {
    /// Positions and heads of a group that a block takes.
    pub positions: i64,
    pub heads: i64,
    /// Keys of a tile.
    pub keys: i64,
    /// Most slices of the cache; more than one only with one query.
    pub slices: i64,
}

impl Params {
    pub fn choose(a: &Problem) -> Params {
        let longest = a.size.max(a.value_size);
        let (mut rows, mut keys) = (ROWS, if longest > 128 { 16 } else { 32 });
        while shared_floats(a, rows, keys).iter().sum::<i64>() * 4 > SHARED_BYTES && (rows, keys) != (1, 1) {
            if keys >= rows { keys /= 2 } else { rows /= 2 }
        }
        let heads = (1..=a.group.min(rows)).rev().find(|h| a.group % h == 0).unwrap_or(1);
        let single = a.n.as_const() == Some(1);
        let positions = if single { 1 } else { rows / heads };
        let slices = if single { most_slices(a.kv * a.group / heads, ITEMS) } else { 1 };
        Params { positions, heads, keys, slices }
    }
    fn rows(&self) -> i64 {
        self.positions * self.heads
    }
}

/// Sizes of the shared buffers of a block: queries, a tile of keys or values, scores, and three numbers per row.
fn shared_floats(a: &Problem, rows: i64, keys: i64) -> [i64; 6] {
    [rows * a.size, keys * (a.size.max(a.value_size) + 1), rows * keys, rows, rows, rows]
}

/// The place of one block.
#[derive(Clone, Copy)]
struct Block<'a> {
    a: &'a Problem<'a>,
    params: Params,
    /// Shared: `[rows, size]`, `[keys, longer size + 1]`, `[rows, keys]`, and three of `[rows]` ([`shared_floats`]).
    q: BufId,
    tile: BufId,
    s: BufId,
    max: BufId,
    total: BufId,
    factor: BufId,
    /// Per thread: its share of `[rows, value_size]`.
    sums: BufId,
    head: ExprId,
    /// First query head.
    first_head: ExprId,
    /// First position among the queries.
    first: ExprId,
    n: ExprId,
    past: ExprId,
    last: ExprId,
    prefix: Option<ExprId>,
}

/// Writes results to `out: f32[n, heads, value_size]`, or with several slices unfinished sums as the CPU kernel does.
pub fn emit(kb: &mut KernelBuilder, a: &Problem, params: Params, out: BufId) {
    let tiles = match a.n.as_const() {
        Some(1) => kb.int(params.slices),
        _ => kb.dim(&a.n.ceil_div(params.positions)),
    };
    let head_blocks = kb.int(a.heads() / params.heads);
    kb.for_("tile", tiles, ForKind::Block(0), |kb, tile| {
        kb.for_("heads", head_blocks, ForKind::Block(1), |kb, heads| {
            one_block(kb, a, params, (tile, heads), out);
        });
    });
}

fn one_block(
    kb: &mut KernelBuilder,
    a: &Problem,
    params: Params,
    (tile, heads): (ExprId, ExprId),
    out: BufId,
) {
    let (n, t) = (kb.dim(&a.n), kb.dim(&a.t));
    let past = kb.sub(t, n);
    let last = kb.add_int(t, -1);
    let prefix = a.prefix(kb);
    let rows = params.rows();
    let names = ["q", "tile", "s", "max", "total", "factor"];
    let lengths = shared_floats(a, rows, params.keys);
    let [q, tile_rows, s, max, total, factor] =
        std::array::from_fn(|i| kb.alloc(names[i], DType::F32, lengths[i] as usize, Space::Shared));
    let first_head = kb.mul_int(heads, params.heads);
    let group = kb.int(a.group);
    let single = a.n.as_const() == Some(1);
    let first = if single { kb.int(0) } else { kb.mul_int(tile, params.positions) };
    let share = (rows * a.value_size + THREADS - 1) / THREADS;
    let block = Block {
        a,
        params,
        q,
        tile: tile_rows,
        s,
        max,
        total,
        factor,
        sums: kb.alloc("sums", DType::F32, share as usize, Space::Local),
        head: kb.div(first_head, group),
        first_head,
        first,
        n,
        past,
        last,
        prefix,
    };
    let p = kb.add(past, first);
    let start = a.first_key(kb, p);
    let (start, end) = if single {
        let (_, part) = slices(kb, start, t, params.slices, params.keys);
        let from = kb.mul(tile, part);
        let start = kb.add(start, from);
        let end = kb.add(start, part);
        (start, kb.min(end, t))
    } else {
        let rest = kb.sub(n, first);
        let positions = kb.int(params.positions);
        let count = kb.min(rest, positions);
        let end = kb.add(p, count);
        (start, prefix.map_or(end, |prefix| kb.max(end, prefix)))
    };
    block.clear(kb);
    if let Some(sinks) = a.sinks() {
        let last = if single { last } else { kb.add_int(end, -1) };
        let (zero, all) = (kb.int(0), a.sinks_behind(kb, last));
        let count = if single {
            // With the first slice.
            let later = kb.lt(zero, tile);
            kb.select(later, zero, all)
        } else {
            all
        };
        Block { a: &sinks, ..block }.keys(kb, zero, count);
    }
    block.keys(kb, start, end);
    block.store(kb, tile, out);
}

impl Block<'_> {
    /// Adds the keys `start..end`.
    fn keys(&self, kb: &mut KernelBuilder, start: ExprId, end: ExprId) {
        self.load_queries(kb);
        let keys = kb.sub(end, start);
        let keys = at_least_zero(kb, keys);
        let step = kb.int(self.params.keys);
        let tiles = ceil_div(kb, keys, step);
        kb.serial("keys", tiles, |kb, i| {
            let at = kb.mul(i, step);
            let j = kb.add(start, at);
            self.load(kb, j, self.a.size, |kb, row, c| self.a.key(kb, row, self.head, c, 1));
            kb.barrier();
            self.scores(kb, j, end);
            kb.barrier();
            self.softmax(kb, j, self.a.value_size);
            self.mix(kb);
            kb.barrier();
        });
    }

    /// `body(thread)` in all threads.
    fn threads(kb: &mut KernelBuilder, body: impl FnOnce(&mut KernelBuilder, ExprId)) {
        let threads = kb.int(THREADS);
        kb.for_("t", threads, ForKind::Thread(0), body);
    }

    /// `body(i)` for `0..count` shared out among the threads.
    fn strided(kb: &mut KernelBuilder, count: i64, body: impl FnOnce(&mut KernelBuilder, ExprId)) {
        Self::threads(kb, |kb, t| {
            let rounds = kb.int((count + THREADS - 1) / THREADS);
            kb.serial("round", rounds, |kb, round| {
                let at = kb.mul_int(round, THREADS);
                let at = kb.add(at, t);
                guarded(kb, at, count, |kb| body(kb, at));
            });
        });
    }

    /// Position among the queries and query head of a row; positions behind the last query stand for it.
    fn query_of(&self, kb: &mut KernelBuilder, row: ExprId) -> (ExprId, ExprId) {
        let heads = kb.int(self.params.heads);
        let (i, h) = (kb.div(row, heads), kb.rem(row, heads));
        let position = kb.add(self.first, i);
        let most = kb.add_int(self.n, -1);
        (kb.min(position, most), kb.add(self.first_head, h))
    }

    /// No keys seen yet.
    fn clear(&self, kb: &mut KernelBuilder) {
        Self::strided(kb, self.params.rows(), |kb, row| {
            let (hidden, nothing) = (kb.float(HIDDEN), kb.float(0.0));
            kb.store(self.max, row, hidden);
            kb.store(self.total, row, nothing);
        });
        self.each_sum(kb, |kb, _, slot, _| {
            let nothing = kb.float(0.0);
            kb.store(self.sums, slot, nothing);
        });
    }

    /// Scaled queries.
    fn load_queries(&self, kb: &mut KernelBuilder) {
        let (rows, size) = (self.params.rows(), self.a.size);
        Self::strided(kb, rows * size, |kb, at| {
            let width = kb.int(size);
            let (row, c) = (kb.div(at, width), kb.rem(at, width));
            let (position, head) = self.query_of(kb, row);
            let value = self.a.query(kb, position, head, c, 1);
            kb.store(self.q, at, value);
        });
        kb.barrier();
    }

    /// A tile of keys or values to shared memory; rows behind the last one stand in for none.
    fn load(
        &self,
        kb: &mut KernelBuilder,
        j: ExprId,
        size: i64,
        load: impl Fn(&mut KernelBuilder, ExprId, ExprId) -> ExprId,
    ) {
        Self::strided(kb, self.params.keys * size, |kb, at| {
            let width = kb.int(size);
            let (i, c) = (kb.div(at, width), kb.rem(at, width));
            let row = kb.add(j, i);
            let row = kb.min(row, self.last);
            let value = load(kb, row, c);
            // One more column than needed: threads of a warp read one column of all rows from different banks.
            let to = kb.mul_int(i, size + 1);
            let to = kb.add(to, c);
            kb.store(self.tile, to, value);
        });
    }

    fn scores(&self, kb: &mut KernelBuilder, j: ExprId, end: ExprId) {
        let (keys, size) = (self.params.keys, self.a.size);
        Self::strided(kb, self.params.rows() * keys, |kb, at| {
            let width = kb.int(keys);
            let (row, i) = (kb.div(at, width), kb.rem(at, width));
            let (q, k) = (kb.mul_int(row, size), kb.mul_int(i, size + 1));
            let (sum, zero) = (kb.alloc("sum", DType::F32, 1, Space::Local), kb.int(0));
            let nothing = kb.float(0.0);
            kb.store(sum, zero, nothing);
            let extent = kb.int(size);
            kb.serial("c", extent, |kb, c| {
                let (q, k) = (kb.add(q, c), kb.add(k, c));
                let (q, k, old) = (kb.load(self.q, q), kb.load(self.tile, k), kb.load(sum, zero));
                let new = kb.fma(q, k, old);
                kb.store(sum, zero, new);
            });
            let s = kb.load(sum, zero);
            let (position, head) = self.query_of(kb, row);
            let (p, key) = (kb.add(self.past, position), kb.add(j, i));
            let slope = self.a.slope(kb, head);
            let end = (self.params.slices > 1).then_some(end);
            let s = self.a.score(kb, s, &Place { p, j: key, slope, prefix: self.prefix, end, shown: false });
            kb.store(self.s, at, s);
        });
    }

    /// Scores to weights; meanwhile the values come to where the keys were.
    fn softmax(&self, kb: &mut KernelBuilder, j: ExprId, value_size: i64) {
        let (rows, keys) = (self.params.rows(), self.params.keys);
        let row_loop = |kb: &mut KernelBuilder, op: BinOp, row: ExprId, start: ExprId| {
            let (acc, zero) = (kb.alloc("acc", DType::F32, 1, Space::Local), kb.int(0));
            kb.store(acc, zero, start);
            let (base, extent) = (kb.mul_int(row, keys), kb.int(keys));
            kb.serial("i", extent, |kb, i| {
                let at = kb.add(base, i);
                let (s, old) = (kb.load(self.s, at), kb.load(acc, zero));
                let new = kb.binary(op, old, s);
                kb.store(acc, zero, new);
            });
            let value = kb.load(acc, zero);
            kb.let_("value", value)
        };
        Self::strided(kb, rows, |kb, row| {
            let old = kb.load(self.max, row);
            let old = kb.let_("old", old);
            let max = row_loop(kb, BinOp::Max, row, old);
            let fallen = kb.sub(old, max);
            let factor = kb.unary(UnOp::Exp, fallen);
            kb.store(self.factor, row, factor);
            kb.store(self.max, row, max);
        });
        kb.barrier();
        Self::strided(kb, rows * keys, |kb, at| {
            let width = kb.int(keys);
            let row = kb.div(at, width);
            let (s, max) = (kb.load(self.s, at), kb.load(self.max, row));
            let below = kb.sub(s, max);
            let weight = kb.unary(UnOp::Exp, below);
            kb.store(self.s, at, weight);
        });
        self.load(kb, j, value_size, |kb, row, c| self.a.value(kb, row, self.head, c, 1));
        kb.barrier();
        Self::strided(kb, rows, |kb, row| {
            let (total, factor) = (kb.load(self.total, row), kb.load(self.factor, row));
            let scaled = kb.mul(total, factor);
            let scaled = kb.let_("scaled", scaled);
            let total = row_loop(kb, BinOp::Add, row, scaled);
            kb.store(self.total, row, total);
        });
    }

    /// `body(index in the matrix of sums, slot of the thread, row)` for each element that a thread keeps.
    fn each_sum(
        &self,
        kb: &mut KernelBuilder,
        body: impl FnOnce(&mut KernelBuilder, ExprId, ExprId, ExprId),
    ) {
        let count = self.params.rows() * self.a.value_size;
        let share = (count + THREADS - 1) / THREADS;
        Self::threads(kb, |kb, t| {
            let extent = kb.int(share);
            kb.for_("slot", extent, ForKind::Unroll, |kb, slot| {
                let at = kb.mul_int(slot, THREADS);
                let at = kb.add(at, t);
                guarded(kb, at, count, |kb| {
                    let width = kb.int(self.a.value_size);
                    let row = kb.div(at, width);
                    body(kb, at, slot, row);
                });
            });
        });
    }

    fn mix(&self, kb: &mut KernelBuilder) {
        let (keys, size) = (self.params.keys, self.a.value_size);
        self.each_sum(kb, |kb, at, slot, row| {
            let width = kb.int(size);
            let c = kb.rem(at, width);
            let (old, factor) = (kb.load(self.sums, slot), kb.load(self.factor, row));
            let start = kb.mul(old, factor);
            kb.store(self.sums, slot, start);
            let (weights, extent) = (kb.mul_int(row, keys), kb.int(keys));
            kb.serial("i", extent, |kb, i| {
                let (w, v) = (kb.add(weights, i), kb.mul_int(i, size + 1));
                let v = kb.add(v, c);
                let (w, v, old) = (kb.load(self.s, w), kb.load(self.tile, v), kb.load(self.sums, slot));
                let new = kb.fma(w, v, old);
                kb.store(self.sums, slot, new);
            });
        });
    }

    fn store(&self, kb: &mut KernelBuilder, slice: ExprId, out: BufId) {
        let a = self.a;
        self.each_sum(kb, |kb, at, slot, row| {
            let width = kb.int(a.value_size);
            let c = kb.rem(at, width);
            let value = kb.load(self.sums, slot);
            let heads = kb.int(self.params.heads);
            let (i, h) = (kb.div(row, heads), kb.rem(row, heads));
            let (position, head) = (kb.add(self.first, i), kb.add(self.first_head, h));
            if self.params.slices > 1 {
                let to = partial_row(kb, a, slice, head);
                let to = kb.add(to, c);
                return kb.store(out, to, value);
            }
            let inside = kb.lt(position, self.n);
            kb.if_(inside, |kb| {
                let total = kb.load(self.total, row);
                let value = kb.div(value, total);
                let to = kb.mul_int(position, a.heads());
                let to = kb.add(to, head);
                let to = kb.mul_int(to, a.value_size);
                let to = kb.add(to, c);
                kb.store(out, to, value);
            });
        });
        if self.params.slices == 1 {
            return;
        }
        Self::strided(kb, self.params.rows(), |kb, row| {
            let head = kb.add(self.first_head, row);
            let to = partial_row(kb, a, slice, head);
            for (i, buf) in [self.max, self.total].into_iter().enumerate() {
                let value = kb.load(buf, row);
                let to = kb.add_int(to, a.value_size + i as i64);
                kb.store(out, to, value);
            }
        });
    }
}

/// `body` where `at < count`; nothing to ask where the threads come out even.
fn guarded(kb: &mut KernelBuilder, at: ExprId, count: i64, body: impl FnOnce(&mut KernelBuilder)) {
    if count % THREADS == 0 {
        return body(kb);
    }
    let end = kb.int(count);
    let inside = kb.lt(at, end);
    kb.if_(inside, body);
}

/// Joins the unfinished sums of all slices: a thread per value.
pub fn emit_merge(kb: &mut KernelBuilder, a: &Problem, params: Params, partial: BufId, out: BufId) {
    let t = kb.dim(&a.t);
    let last = kb.add_int(t, -1);
    let first = a.first_key(kb, last);
    let (used, _) = slices(kb, first, t, params.slices, params.keys);
    let count = a.heads() * a.value_size;
    let blocks = kb.int((count + THREADS - 1) / THREADS);
    kb.for_("block", blocks, ForKind::Block(0), |kb, block| {
        Block::threads(kb, |kb, t| {
            let at = kb.mul_int(block, THREADS);
            let at = kb.add(at, t);
            guarded(kb, at, count, |kb| {
                let width = kb.int(a.value_size);
                let (head, c) = (kb.div(at, width), kb.rem(at, width));
                let value = joined(kb, a, partial, used, head, c);
                kb.store(out, at, value);
            });
        });
    });
    debug_assert!(Partial::partial(a) >= a.value_size + 2);
}

/// One value of the result, from its column in all slices.
fn joined(
    kb: &mut KernelBuilder,
    a: &Problem,
    partial: BufId,
    used: ExprId,
    head: ExprId,
    c: ExprId,
) -> ExprId {
    let zero = kb.int(0);
    let (total, sum) = (cell(kb, "total", 0.0), cell(kb, "sum", 0.0));
    let most = largest(kb, a, partial, used, head);
    kb.serial("slice", used, |kb, slice| {
        let row = partial_row(kb, a, slice, head);
        let at = kb.add_int(row, a.value_size);
        let here = kb.load(partial, at);
        let below = kb.sub(here, most);
        let weight = kb.unary(UnOp::Exp, below);
        let weight = kb.let_("weight", weight);
        for (buf, place) in [(total, kb.add_int(row, a.value_size + 1)), (sum, kb.add(row, c))] {
            let (value, old) = (kb.load(partial, place), kb.load(buf, zero));
            let new = kb.fma(weight, value, old);
            kb.store(buf, zero, new);
        }
    });
    let (sum, total) = (kb.load(sum, zero), kb.load(total, zero));
    kb.div(sum, total)
}
