//! Attention on a GPU: a thread block takes some query rows of a key head (positions times heads of its group) against
//! tiles of keys and values in shared memory. With one query the cache is cut into slices for more blocks, and a second
//! kernel joins their unfinished sums, as in [`super::decode`].

use super::schedule::Params as Partial;
use super::{HIDDEN, Place, Problem, most_slices, slices};
use mlcc_ir::builder::KernelBuilder;
use mlcc_ir::kernel::{BufId, ExprId};
use mlcc_kernel_lang::{Recorder, Team, Val, View};

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
        let single = Params::single(a);
        let positions = if single { 1 } else { rows / heads };
        let slices = if single { most_slices(a.kv * a.group / heads, ITEMS) } else { 1 };
        Params { positions, heads, keys, slices }
    }
    fn rows(&self) -> i64 {
        self.positions * self.heads
    }
    /// Whether every block has one position and a slice of the cache.
    fn single(a: &Problem) -> bool {
        a.n.as_const() == Some(1)
    }
}

/// Sizes of the shared buffers of a block: queries, a tile of keys or values, scores, and three numbers per row.
fn shared_floats(a: &Problem, rows: i64, keys: i64) -> [i64; 6] {
    [rows * a.size, keys * (a.size.max(a.value_size) + 1), rows * keys, rows, rows, rows]
}

/// Attention of one thread block: some positions and query heads of a key head.
#[derive(Clone, Copy)]
struct Block<'k, 'a> {
    k: &'k Recorder,
    a: &'k Problem<'a>,
    params: Params,
    team: Team<'k>,
    /// Scaled queries, `[rows, size]`, in shared memory as all of these ([`shared_floats`]).
    q: View<'k, 2>,
    /// Keys, then values of a tile, `[keys, size]`. Rows have one element more than the longer of both needs, so that the threads of a
    /// warp read one column of all rows from different banks.
    tile: View<'k, 1>,
    /// Scores, then weights, `[rows, keys]`.
    s: View<'k, 2>,
    /// Of each row: running maximum, sum of weights, and what the last tile made of older sums.
    max: View<'k, 1>,
    total: View<'k, 1>,
    factor: View<'k, 1>,
    /// In the registers of a thread: its share of `[rows, value_size]`.
    sums: View<'k, 1>,
    /// Key head, first query head, first position among the queries.
    head: Val<'k>,
    first_head: Val<'k>,
    first: Val<'k>,
    n: Val<'k>,
    past: Val<'k>,
    /// The last key.
    last: Val<'k>,
    prefix: Option<Val<'k>>,
}

/// Writes results to `out: f32[n, heads, value_size]`, or with several slices unfinished sums as the CPU kernel does.
pub fn emit(kb: &mut KernelBuilder, a: &Problem, params: Params, out: BufId) {
    Recorder::within(kb, |k| {
        let tiles = match Params::single(a) {
            true => k.int(params.slices),
            false => k.dim(&a.n.ceil_div(params.positions)),
        };
        k.blocks("tile", 0, tiles, |tile| {
            k.blocks("heads", 1, a.heads() / params.heads, |heads| {
                Block::new(k, a, params, tile, heads).run(tile, out);
            });
        });
    });
}

impl<'k, 'a> Block<'k, 'a> {
    fn new(
        k: &'k Recorder,
        a: &'k Problem<'a>,
        params: Params,
        tile: Val<'k>,
        heads: Val<'k>,
    ) -> Block<'k, 'a> {
        let (n, t) = (k.dim(&a.n), k.dim(&a.t));
        let rows = params.rows();
        let [q, tile_rows, s, max, total, factor] = shared_floats(a, rows, params.keys);
        let team = Team::new(k, THREADS);
        let first_head = heads * params.heads;
        Block {
            k,
            a,
            params,
            team,
            prefix: k.builder(|kb| a.prefix(kb)).map(|prefix| k.val(prefix)),
            q: k.shared("q", [q]).rows(a.size),
            tile: k.shared("tile", [tile_rows]),
            s: k.shared("s", [s]).rows(params.keys),
            max: k.shared("max", [max]),
            total: k.shared("total", [total]),
            factor: k.shared("factor", [factor]),
            sums: k.registers("sums", [team.share(rows * a.value_size)]),
            head: first_head / a.group,
            first_head,
            first: if Params::single(a) { k.int(0) } else { tile * params.positions },
            n,
            past: t - n,
            last: t + -1,
        }
    }

    fn run(self, tile: Val<'k>, out: BufId) {
        let (k, a) = (self.k, self.a);
        let (start, end) = self.keys_seen(tile);
        self.clear(tile);
        if let Some(sinks) = a.sinks() {
            let single = Params::single(a);
            let last = if single { self.last } else { end + -1 };
            let all = k.val(k.builder(|kb| a.sinks_behind(kb, last.id())));
            // With the first slice.
            let count = if single { k.int(0).lt(tile).select(k.int(0), all) } else { all };
            Block { a: &sinks, ..self }.keys(k.int(0), count);
        }
        self.keys(start, end);
        self.store(tile, out);
    }

    /// The first key of the block, and where its keys end.
    fn keys_seen(self, tile: Val<'k>) -> (Val<'k>, Val<'k>) {
        let (k, a) = (self.k, self.a);
        let p = self.past + self.first;
        let start = k.val(k.builder(|kb| a.first_key(kb, p.id())));
        if !Params::single(a) {
            let end = p + (self.n - self.first).min(self.params.positions);
            return (start, self.prefix.map_or(end, |prefix| end.max(prefix)));
        }
        let t = k.dim(&a.t);
        let (_, part) = k.builder(|kb| slices(kb, start.id(), t.id(), self.params.slices, self.params.keys));
        let start = start + tile * k.val(part);
        (start, (start + k.val(part)).min(t))
    }

    /// Adds the keys `start..end`.
    fn keys(self, start: Val<'k>, end: Val<'k>) {
        let (k, a) = (self.k, self.a);
        self.load_queries();
        let step = self.params.keys;
        let tiles = (end - start).max(0).div_ceil(step);
        k.serial("keys", tiles, |i| {
            let j = start + i * step;
            self.load(j, a.size, |row, c| k.builder(|kb| a.key(kb, row.id(), self.head.id(), c.id(), 1)));
            k.barrier();
            self.scores(j, end);
            k.barrier();
            self.weights();
            self.load(j, a.value_size, |row, c| {
                k.builder(|kb| a.value(kb, row.id(), self.head.id(), c.id(), 1))
            });
            k.barrier();
            self.totals();
            self.mix();
            k.barrier();
        });
    }

    /// Position among the queries and query head of a row; positions behind the last query stand for it.
    fn query_of(self, row: Val<'k>) -> (Val<'k>, Val<'k>) {
        let heads = self.params.heads;
        ((self.first + row / heads).min(self.n + -1), self.first_head + row % heads)
    }

    /// No keys seen yet but that without a value, which is seen with the first slice.
    fn clear(self, tile: Val<'k>) {
        let k = self.k;
        self.team.each(self.params.rows(), |row| {
            let (_, head) = self.query_of(row);
            let (hidden, zero) = (k.float(HIDDEN), k.float(0.0));
            let (max, total) =
                match k.builder(|kb| self.a.null_logit(kb, head.id())).map(|logit| k.val(logit)) {
                    None => (hidden, zero),
                    Some(logit) if !Params::single(self.a) => (logit, k.float(1.0)),
                    Some(logit) => {
                        let later = k.int(0).lt(tile);
                        (later.select(hidden, logit), later.select(zero, k.float(1.0)))
                    }
                };
            self.max.set([row], max);
            self.total.set([row], total);
        });
        self.each_sum(|_, _, slot| self.sums.set([slot], self.k.float(0.0)));
    }

    fn load_queries(self) {
        let size = self.a.size;
        self.team.each(self.params.rows() * size, |at| {
            let (row, c) = (at / size, at % size);
            let (position, head) = self.query_of(row);
            let value = self.k.builder(|kb| self.a.query(kb, position.id(), head.id(), c.id(), 1));
            self.q.flat().set([at], self.k.val(value));
        });
        self.k.barrier();
    }

    /// Fills the tile; rows behind the last one stand in for none.
    fn load(self, j: Val<'k>, size: i64, load: impl Fn(Val<'k>, Val<'k>) -> ExprId) {
        let tile = self.tile.rows(size).pitch(size + 1);
        self.team.each(self.params.keys * size, |at| {
            let (i, c) = (at / size, at % size);
            let value = load((j + i).min(self.last), c);
            tile.set([i, c], self.k.val(value));
        });
    }

    /// `s[row, key] = score(q[row] . tile[key])`.
    fn scores(self, j: Val<'k>, end: Val<'k>) {
        let (k, keys, size) = (self.k, self.params.keys, self.a.size);
        let tile = self.tile.rows(size).pitch(size + 1);
        self.team.each(self.params.rows() * keys, |at| {
            let (row, key) = (at / keys, at % keys);
            let s = k.fold("c", size, 0.0, |c, sum| self.q.at([row, c]).fma(tile.at([key, c]), sum));
            let (position, head) = self.query_of(row);
            let (p, j) = (self.past + position, j + key);
            let s = k.builder(|kb| {
                let place = Place {
                    p: p.id(),
                    j: j.id(),
                    slope: self.a.slope(kb, head.id()),
                    prefix: self.prefix.map(Val::id),
                    end: (self.params.slices > 1).then_some(end.id()),
                    shown: false,
                };
                self.a.score(kb, s.id(), &place)
            });
            self.s.flat().set([at], k.val(s));
        });
    }

    /// Scores to weights: `s = exp(s - max)`, with the new maxima, and the factors of sums with the older ones.
    fn weights(self) {
        let (k, keys) = (self.k, self.params.keys);
        self.team.each(self.params.rows(), |row| {
            let old = self.max.at([row]).named("old");
            let max = k.fold("key", keys, old, |key, max| max.max(self.s.at([row, key])));
            self.factor.set([row], (old - max).exp());
            self.max.set([row], max);
        });
        k.barrier();
        self.team.each(self.params.rows() * keys, |at| {
            let s = self.s.flat();
            s.set([at], (s.at([at]) - self.max.at([at / keys])).exp());
        });
    }

    /// `total = total * factor + sum of the weights`.
    fn totals(self) {
        self.team.each(self.params.rows(), |row| {
            let older = (self.total.at([row]) * self.factor.at([row])).named("older");
            let total = self.k.fold("key", self.params.keys, older, |key, sum| sum + self.s.at([row, key]));
            self.total.set([row], total);
        });
    }

    /// `body(row, column, slot)` for each sum that a thread keeps.
    fn each_sum(self, body: impl FnOnce(Val<'k>, Val<'k>, Val<'k>)) {
        let size = self.a.value_size;
        self.team.each_slot(self.params.rows() * size, |at, slot| body(at / size, at % size, slot));
    }

    /// `sums = sums * factor + weights . values`.
    fn mix(self) {
        let size = self.a.value_size;
        let tile = self.tile.rows(size).pitch(size + 1);
        self.each_sum(|row, c, slot| {
            self.sums.set([slot], self.sums.at([slot]) * self.factor.at([row]));
            self.k.serial("key", self.params.keys, |key| {
                let sum = self.s.at([row, key]).fma(tile.at([key, c]), self.sums.at([slot]));
                self.sums.set([slot], sum);
            });
        });
    }

    fn store(self, slice: Val<'k>, out: BufId) {
        let (k, a) = (self.k, self.a);
        if self.params.slices > 1 {
            return self.store_slice(slice, unfinished(k, a, out));
        }
        let out = k.view(out, [1, a.heads(), a.value_size]);
        self.each_sum(|row, c, slot| {
            let value = self.sums.at([slot]);
            let (position, head) =
                (self.first + row / self.params.heads, self.first_head + row % self.params.heads);
            k.when(position.lt(self.n), || out.set([position, head, c], value / self.total.at([row])));
        });
    }

    fn store_slice(self, slice: Val<'k>, out: View<'k, 3>) {
        let value_size = self.a.value_size;
        self.each_sum(|row, c, slot| {
            out.set([slice, self.first_head + row % self.params.heads, c], self.sums.at([slot]))
        });
        self.team.each(self.params.rows(), |row| {
            let head = self.first_head + row;
            out.set((slice, head, value_size), self.max.at([row]));
            out.set((slice, head, value_size + 1), self.total.at([row]));
        });
    }
}

/// `f32[slices, heads, partial]`: of each head the unfinished sums, their maximum and the sum of their weights.
fn unfinished<'k>(k: &'k Recorder, a: &Problem, buf: BufId) -> View<'k, 3> {
    k.view(buf, [1, a.heads(), Partial::partial(a)])
}

/// Joins the unfinished sums of all slices: a thread per value.
pub fn emit_merge(kb: &mut KernelBuilder, a: &Problem, params: Params, partial: BufId, out: BufId) {
    Recorder::within(kb, |k| {
        let (partial, out) = (unfinished(k, a, partial), k.view(out, [a.heads() * a.value_size]));
        let t = k.dim(&a.t);
        let last = t + -1;
        let (used, _) = k.builder(|kb| {
            let first = a.first_key(kb, last.id());
            slices(kb, first, t.id(), params.slices, params.keys)
        });
        let (team, count) = (Team::new(k, THREADS), a.heads() * a.value_size);
        k.blocks("block", 0, team.share(count), |block| {
            team.run(|thread| {
                team.guarded(block * THREADS + thread, count, |at| {
                    let (head, c) = (at / a.value_size, at % a.value_size);
                    out.set([at], joined(k, a, partial, k.val(used), head, c));
                });
            });
        });
    });
}

/// One value of the result, from its column in all slices.
fn joined<'k>(
    k: &'k Recorder,
    a: &Problem,
    partial: View<'k, 3>,
    used: Val<'k>,
    head: Val<'k>,
    c: Val<'k>,
) -> Val<'k> {
    let (max_at, total_at) = (a.value_size, a.value_size + 1);
    let max = k.fold("slice", used, HIDDEN, |slice, max| partial.at((slice, head, max_at)).max(max));
    let (total, sum) = (k.reg("total", k.float(0.0)), k.reg("sum", k.float(0.0)));
    k.serial("slice", used, |slice| {
        let weight = (partial.at((slice, head, max_at)) - max).exp().named("weight");
        total.set(weight.fma(partial.at((slice, head, total_at)), total.get()));
        sum.set(weight.fma(partial.at((slice, head, c)), sum.get()));
    });
    sum.get() / total.get()
}
