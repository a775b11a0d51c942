//! Attention on a GPU: a thread block takes some query rows of a key head (positions times heads of its
//! group) against tiles of keys and values in shared memory. With one query the cache is cut into slices for
//! more blocks, and a second kernel joins their unfinished sums, as in [`super::decode`]. Where there are
//! tensor cores, [`matrix`] computes the products.

mod halves;
mod matrix;

use super::decode::NewRows;
use super::merge::{load_slice_count, partial_results, slice_count_bits};
use super::plan::{GpuAttentionPlan, shared_floats};
use super::problem::{AttentionProblem, MASKED, ScoreIndex};
use super::slices::SLICE_KEYS;
use crate::inline::{CachePage, LaneIndex, PagedBuffer, RowAt};
use crate::rows::emit_in_block;
use matrix::MatrixBlock;
use mlcc_ir::builder::KernelBuilder;
use mlcc_ir::kernel::BufId;
use mlcc_kernel_lang::{BufferView, Recorder, ThreadTeam, Val};

const THREADS: i64 = 128;

/// Attention of one thread block: some positions and query heads of a key head.
#[derive(Clone, Copy)]
struct ThreadBlock<'k, 'a> {
    k: &'k Recorder,
    a: &'k AttentionProblem<'a>,
    plan: GpuAttentionPlan,
    team: ThreadTeam<'k>,
    /// Scaled queries, `[rows, size]`, in shared memory as all of these ([`shared_floats`]).
    q: BufferView<'k, 2>,
    /// Keys, then values of a tile, `[keys, size]`. Rows have one element more than the longer of both needs,
    /// so that the threads of a warp read one column of all rows from different banks.
    tile: BufferView<'k, 1>,
    /// Scores, then weights, `[rows, keys]`.
    s: BufferView<'k, 2>,
    /// For each row: running maximum, sum of weights, and the factor by which the last tile rescaled older
    /// sums.
    max: BufferView<'k, 1>,
    row_sum: BufferView<'k, 1>,
    rescale: BufferView<'k, 1>,
    /// The registers of a thread: its share of `[rows, value_size]`.
    accumulators: BufferView<'k, 1>,
    /// Key head, first query head, first position among the queries.
    head: Val<'k>,
    first_head: Val<'k>,
    first: Val<'k>,
    n: Val<'k>,
    past: Val<'k>,
    /// The last key.
    last: Val<'k>,
    prefix: Option<Val<'k>>,
    /// See [`AttentionProblem::span_end`].
    border: Option<Val<'k>>,
}

/// Writes results to `out: [n, heads, value_size]`, or with several slices unfinished sums as the CPU kernel
/// does. The block that has the last key of a key head appends its row first (`new_rows`), where each block
/// has all query heads of it.
pub fn emit(
    kb: &mut KernelBuilder,
    a: &AttentionProblem,
    plan: GpuAttentionPlan,
    new_rows: &[NewRows],
    out: BufId,
) {
    Recorder::within(kb, |k| {
        let tiles = match plan.single {
            true => k.int(plan.slices),
            false => k.dim(&a.n.ceil_div(plan.positions)),
        };
        k.blocks("tile", 0, tiles, |tile| {
            k.blocks("heads", 1, a.heads() / plan.heads, |heads| {
                let block = || match plan.matrix {
                    None => ThreadBlock::new(k, a, plan, tile, heads).run(tile, new_rows, out),
                    Some(warps) => {
                        let first = if plan.single { k.int(0) } else { (tiles - tile + -1) * plan.positions };
                        let block = MatrixBlock::new(k, a, (plan, warps), first.named("first"), heads);
                        block.run(tile, new_rows, out);
                    }
                };
                if !plan.single || plan.slices == 1 {
                    return block();
                }
                // Short sequences have no use for most slices, which many sequences together have many of.
                k.when(tile.lt(slices_used(k, a, plan)), block);
            });
        });
    });
}

impl<'k, 'a> ThreadBlock<'k, 'a> {
    fn new(
        k: &'k Recorder,
        a: &'k AttentionProblem<'a>,
        plan: GpuAttentionPlan,
        tile: Val<'k>,
        heads: Val<'k>,
    ) -> ThreadBlock<'k, 'a> {
        let (n, t) = (k.dim(&a.n), k.dim(&a.t));
        let rows = plan.rows();
        let [q, tile_rows, s, max, total, factor] = shared_floats(a, rows, plan.keys);
        let team = ThreadTeam::new(k, THREADS);
        let first_head = heads * plan.heads;
        ThreadBlock {
            k,
            a,
            plan,
            team,
            prefix: a.prefix(k),
            border: a.span_end(k),
            q: k.shared("q", [q]).rows(a.size),
            tile: k.shared("tile", [tile_rows]),
            s: k.shared("s", [s]).rows(plan.keys),
            max: k.shared("max", [max]),
            row_sum: k.shared("total", [total]),
            rescale: k.shared("factor", [factor]),
            accumulators: k.registers("sums", [team.items_per_thread(rows * a.value_size)]),
            head: first_head / a.group,
            first_head,
            first: if plan.single { k.int(0) } else { tile * plan.positions },
            n,
            past: t - n,
            last: t + -1,
        }
    }

    fn run(self, tile: Val<'k>, new_rows: &[NewRows], out: BufId) {
        let (k, a) = (self.k, self.a);
        let (start, end) = keys_seen(a, self.plan, [tile, self.first, self.n, self.past], self.prefix);
        append(a, new_rows, (self.head, self.last), [start, end], THREADS);
        self.clear(tile);
        if let Some(sinks) = a.over_sinks() {
            let single = self.plan.single;
            let all = a.sinks_left(if single { self.last } else { end + -1 });
            // With the first slice.
            let count = if single { k.int(0).lt(tile).select(k.int(0), all) } else { all };
            ThreadBlock { a: &sinks, ..self }.add_keys(k.int(0), count);
        }
        self.add_keys(start, end);
        self.store(tile, out);
    }

    /// Adds the keys `start..end`; `start` begins a tile.
    fn add_keys(self, start: Val<'k>, end: Val<'k>) {
        let (k, a) = (self.k, self.a);
        self.load_queries();
        let step = self.plan.keys;
        let tiles = (end - start).max(0).div_ceil(step);
        k.serial("keys", tiles, |i| {
            let j = start + i * step;
            let page = a.page(j).map(CachePage::named);
            self.load_tile(j, a.size, |row, c| a.key(page, [row, self.head, c], 1));
            k.barrier();
            self.compute_scores(j, end);
            k.barrier();
            self.compute_weights();
            self.load_tile(j, a.value_size, |row, c| a.value(page, [row, self.head, c], 1));
            k.barrier();
            self.update_row_sums();
            self.accumulate_values();
            k.barrier();
        });
    }

    /// Position among the queries and query head of a row; positions after the last query count as the last
    /// one.
    fn query_of(self, row: Val<'k>) -> (Val<'k>, Val<'k>) {
        let heads = self.plan.heads;
        ((self.first + row / heads).min(self.n + -1), self.first_head + row % heads)
    }

    /// No keys seen yet but that without a value, which is seen with the first slice.
    fn clear(self, tile: Val<'k>) {
        let k = self.k;
        self.team.each(self.plan.rows(), |row| {
            let (_, head) = self.query_of(row);
            let (masked, zero, one) = (k.float(MASKED), k.float(0.0), k.float(1.0));
            let (max, total) = match self.a.null_logit(head) {
                None => (masked, zero),
                Some(logit) if !self.plan.single => (logit, one),
                Some(logit) => {
                    let later = k.int(0).lt(tile);
                    (later.select(masked, logit), later.select(zero, one))
                }
            };
            self.max.set([row], max);
            self.row_sum.set([row], total);
        });
        self.each_accumulator(|_, _, slot| self.accumulators.set([slot], self.k.float(0.0)));
    }

    fn load_queries(self) {
        let size = self.a.size;
        self.team.each(self.plan.rows() * size, |at| {
            let (row, c) = (at / size, at % size);
            let (position, head) = self.query_of(row);
            self.q.flat().set([at], self.a.query([position, head, c], 1));
        });
        self.k.barrier();
    }

    /// Fills the tile; rows after the last one repeat it.
    fn load_tile(self, j: Val<'k>, size: i64, load: impl Fn(Val<'k>, Val<'k>) -> Val<'k>) {
        let tile = self.tile.rows(size).pitch(size + 1);
        self.team.each(self.plan.keys * size, |at| {
            let (i, c) = (at / size, at % size);
            tile.set([i, c], load((j + i).min(self.last), c));
        });
    }

    /// `s[row, key] = score(q[row] . tile[key])`.
    fn compute_scores(self, j: Val<'k>, end: Val<'k>) {
        let (k, keys, size) = (self.k, self.plan.keys, self.a.size);
        let tile = self.tile.rows(size).pitch(size + 1);
        self.team.each(self.plan.rows() * keys, |at| {
            let (row, key) = (at / keys, at % keys);
            let s = k.fold("c", size, 0.0, |c, sum| self.q.at([row, c]).fma(tile.at([key, c]), sum));
            let (position, head) = self.query_of(row);
            let index = ScoreIndex {
                p: self.past + position,
                j: j + key,
                slope: self.a.slope(head),
                term: self
                    .a
                    .terms
                    .and_then(|_| self.a.term(self.a.column_of_terms(j + key - self.past - position), head)),
                prefix: self.prefix,
                border: self.border,
                end: (self.plan.slices > 1).then_some(end),
                visible: false,
            };
            self.s.flat().set([at], self.a.score(s, &index));
        });
    }

    /// Scores to weights: `s = exp(s - max)`, with the new maxima, and the factors of sums with the older
    /// ones.
    fn compute_weights(self) {
        let (k, keys) = (self.k, self.plan.keys);
        self.team.each(self.plan.rows(), |row| {
            let old = self.max.at([row]).named("old");
            let max = k.fold("key", keys, old, |key, max| max.max(self.s.at([row, key])));
            self.rescale.set([row], (old - max).exp());
            self.max.set([row], max);
        });
        k.barrier();
        self.team.each(self.plan.rows() * keys, |at| {
            let s = self.s.flat();
            s.set([at], (s.at([at]) - self.max.at([at / keys])).exp());
        });
    }

    /// `total = total * factor + sum of the weights`.
    fn update_row_sums(self) {
        self.team.each(self.plan.rows(), |row| {
            let older = (self.row_sum.at([row]) * self.rescale.at([row])).named("older");
            let total = self.k.fold("key", self.plan.keys, older, |key, sum| sum + self.s.at([row, key]));
            self.row_sum.set([row], total);
        });
    }

    /// `body(row, column, slot)` for each sum that a thread keeps.
    fn each_accumulator(self, body: impl FnOnce(Val<'k>, Val<'k>, Val<'k>)) {
        let size = self.a.value_size;
        self.team.each_slot(self.plan.rows() * size, |at, slot| body(at / size, at % size, slot));
    }

    /// `sums = sums * factor + weights . values`.
    fn accumulate_values(self) {
        let size = self.a.value_size;
        let tile = self.tile.rows(size).pitch(size + 1);
        self.each_accumulator(|row, c, slot| {
            self.accumulators.set([slot], self.accumulators.at([slot]) * self.rescale.at([row]));
            self.k.serial("key", self.plan.keys, |key| {
                let sum = self.s.at([row, key]).fma(tile.at([key, c]), self.accumulators.at([slot]));
                self.accumulators.set([slot], sum);
            });
        });
    }

    fn store(self, slice: Val<'k>, out: BufId) {
        let (k, a) = (self.k, self.a);
        if self.plan.slices > 1 {
            return self.store_slice(slice, partial_results(k, a, out));
        }
        let out = k.view(out, [1, a.heads(), a.value_size]);
        self.each_accumulator(|row, c, slot| {
            let value = self.accumulators.at([slot]);
            let (position, head) =
                (self.first + row / self.plan.heads, self.first_head + row % self.plan.heads);
            k.when(position.lt(self.n), || {
                out.set([position, head, c], (value / self.row_sum.at([row])).cast(out.dtype()));
            });
        });
    }

    fn store_slice(self, slice: Val<'k>, out: BufferView<'k, 3>) {
        let value_size = self.a.value_size;
        self.each_accumulator(|row, c, slot| {
            out.set([slice, self.first_head + row % self.plan.heads, c], self.accumulators.at([slot]))
        });
        self.team.each(self.plan.rows(), |row| {
            let head = self.first_head + row;
            out.set((slice, head, value_size), self.max.at([row]));
            out.set((slice, head, value_size + 1), self.row_sum.at([row]));
            store_slice_count(self.k, (self.a, self.plan), out, (slice, head));
        });
    }
}

/// Appends the rows of the last key to the caches of a key head, in the block of `threads` threads whose keys
/// `start..end` end with it.
fn append<'k>(
    a: &AttentionProblem,
    new_rows: &[NewRows],
    (head, last): (Val<'k>, Val<'k>),
    [start, end]: [Val<'k>; 2],
    threads: i64,
) {
    if new_rows.is_empty() {
        return;
    }
    let k = last.recorder();
    // Slices after the last one have no keys.
    k.when(start.le(last) & last.lt(end), || {
        let [row, stored] = [[k.int(0), head], [last, head]].map(|at| at.map(LaneIndex::scalar));
        let page = a.page(last).map(CachePage::named);
        for NewRows { inliner, stores, pages } in new_rows {
            let shift = |&(buf, pages): &(BufId, PagedBuffer)| {
                Some((buf, pages.page_shift(page?, k.flat(buf).dtype()).named("shift")))
            };
            let shifts: Vec<_> = pages.iter().filter_map(shift).collect();
            let to = RowAt { row: &row, stored: &stored, shifts: &shifts };
            emit_in_block(k, inliner, to, stores, threads);
        }
        k.barrier();
    });
}

/// The first key of a block, and where its keys end.
fn keys_seen<'k>(
    a: &AttentionProblem,
    plan: GpuAttentionPlan,
    [tile, first, n, past]: [Val<'k>; 4],
    prefix: Option<Val<'k>>,
) -> (Val<'k>, Val<'k>) {
    let p = past + first;
    let start = plan.tile_of(a.first_key(p));
    if !plan.single {
        let end = a.end_key(p + (n - first).min(plan.positions) + -1);
        return (start, prefix.map_or(end, |prefix| end.max(prefix)));
    }
    let t = a.end_of_span(tile.recorder().dim(&a.t));
    let [_, part] = split_keys(plan, start, t);
    let start = start + tile * part;
    (start, (start + part).min(t))
}

/// Stores how many slices there are, where [`load_slice_count`] reads that.
fn store_slice_count<'k>(
    k: &'k Recorder,
    (a, plan): (&AttentionProblem, GpuAttentionPlan),
    out: BufferView<'k, 3>,
    (slice, head): (Val<'k>, Val<'k>),
) {
    if a.stores_slice_count() {
        out.set((slice, head, a.value_size + 2), slice_count_bits(slices_used(k, a, plan)));
    }
}

/// The number of slices in use for one query.
fn slices_used<'k>(k: &'k Recorder, a: &AttentionProblem, plan: GpuAttentionPlan) -> Val<'k> {
    let t = k.dim(&a.t);
    split_keys(plan, plan.tile_of(a.first_key(t + -1)), a.end_of_span(t))[0]
}

/// The number of slices in use, and the keys of each (a multiple of those of a tile), for keys `first .. t`.
fn split_keys<'k>(plan: GpuAttentionPlan, first: Val<'k>, t: Val<'k>) -> [Val<'k>; 2] {
    let count = t - first;
    let used = count.div_ceil(SLICE_KEYS).min(plan.slices).named("slices");
    [used, (count.div_ceil(used).div_ceil(plan.keys) * plan.keys).named("slice_keys")]
}

/// Joins the unfinished sums of all slices: a thread per value.
pub fn emit_merge(
    kb: &mut KernelBuilder,
    a: &AttentionProblem,
    plan: GpuAttentionPlan,
    partial: BufId,
    out: BufId,
) {
    Recorder::within(kb, |k| {
        let (partial, out) = (partial_results(k, a, partial), k.view(out, [a.heads() * a.value_size]));
        let of_all = (!a.stores_slice_count()).then(|| slices_used(k, a, plan));
        let (team, count) = (ThreadTeam::new(k, THREADS), a.heads() * a.value_size);
        k.blocks("block", 0, team.items_per_thread(count), |block| {
            team.run(|thread| {
                team.when_below(block * THREADS + thread, count, |at| {
                    let (head, c) = (at / a.value_size, at % a.value_size);
                    let used = of_all.unwrap_or_else(|| load_slice_count(a, partial, head));
                    out.set([at], merge_slices((k, a, plan), partial, used, head, c).cast(out.dtype()));
                });
            });
        });
    });
}

/// One value of the result, from its column in all slices.
fn merge_slices<'k>(
    (k, a, plan): (&'k Recorder, &AttentionProblem, GpuAttentionPlan),
    partial: BufferView<'k, 3>,
    used: Val<'k>,
    head: Val<'k>,
    c: Val<'k>,
) -> Val<'k> {
    let (max_at, total_at) = (a.value_size, a.value_size + 1);
    let max = k.fold("slice", used, MASKED, |slice, max| partial.at((slice, head, max_at)).max(max));
    let (total, sum) = (k.reg("total", k.float(0.0)), k.reg("sum", k.float(0.0)));
    k.serial("slice", used, |slice| {
        let weight = plan.weight(partial.at((slice, head, max_at)) - max).named("weight");
        total.set(weight.fma(partial.at((slice, head, total_at)), total.get()));
        sum.set(weight.fma(partial.at((slice, head, c)), sum.get()));
    });
    sum.get() / total.get()
}
