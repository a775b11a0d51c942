//! Attention on tensor cores: a block has rows of queries (positions times heads of a group) in shared memory
//! and meets tiles of keys, then of values there. Scores and weights stay in the registers of a warp, whose
//! sums of scores are the first factor of the product with values (Dao, FlashAttention-2, 2023). While one of
//! both tiles is multiplied the other is on its way. With one query the rows are the heads of a group, and
//! the warps of a block share the keys of a tile.
//!
//! Numbers are those of f32: queries and weights are the sums of two 16-bit floats of the type of the cache;
//! of f32 all are three bf16 ([`crate::halves`]). Rows of queries that meet f16 are scaled by a power of two,
//! so that they have its range. Codes of 8 bits are a bf16 each and meet three; the scales of keys are
//! multiplied with scores, those of values with weights.

use super::halves::{MmaOperandRole, SharedMatrix};
use super::{append, keys_seen, store_slice_count};
use crate::attention::decode::NewRows;
use crate::attention::merge::partial_results;
use crate::attention::plan::{GpuAttentionPlan, SIDE, WarpLayout};
use crate::attention::problem::{AttentionProblem, CacheRows, MASKED, ScoreIndex};
use crate::halves::{SplitFragment, side_by_side};
use crate::inline::CachePage;
use mlcc_ir::fragment::M16N8K16;
use mlcc_ir::kernel::{BinOp, BufId, ExprType};
use mlcc_ir::types::DType;
use mlcc_kernel_lang::matrix::fragment_position;
use mlcc_kernel_lang::{BufferView, Recorder, ThreadTeam, Val, WARP, fold_lanes};

/// Bytes of a copy.
const CHUNK: i64 = 16;
/// Columns of a fragment of sums, and elements of it that a lane has: two neighbours of two rows, so far
/// apart.
const COLUMNS: i64 = 8;
const OF_LANE: i64 = 4;
const APART: i64 = 8;
/// Most pieces of a row of queries that a lane keeps in registers.
const KEPT: i64 = 2;

/// A tile of keys or of values, and where its rows lie if they are stored as they are needed.
#[derive(Clone, Copy)]
struct CacheTile<'k> {
    to: SharedMatrix<'k>,
    rows: Option<CacheRows>,
    size: i64,
    values: bool,
    /// Scales of the rows of codes.
    scales: Option<BufferView<'k, 1>>,
}

impl<'k> CacheTile<'k> {
    /// Elements of a fragment of sums times the scales of their rows of the tile, `first` and the next one.
    fn scaled(self, sums: Val<'k>, first: Val<'k>) -> Val<'k> {
        self.scales.map_or(sums, |scales| sums * scales.load([first], 2).shuffle([0, 1, 0, 1]))
    }
}

/// Attention of one thread block.
#[derive(Clone, Copy)]
pub(super) struct MatrixBlock<'k, 'a> {
    k: &'k Recorder,
    a: &'k AttentionProblem<'a>,
    plan: GpuAttentionPlan,
    warps: WarpLayout,
    team: ThreadTeam<'k>,
    q: SharedMatrix<'k>,
    /// Factors of the products of each row, where queries are scaled.
    scales: Option<BufferView<'k, 1>>,
    keys: CacheTile<'k>,
    values: CacheTile<'k>,
    /// The registers of a warp: scores, then weights `[keys / 8, 4]`; sums `[columns / 8, 4]`; for each of
    /// two rows the running maximum and the lane's share of the sum of weights.
    s: BufferView<'k, 2>,
    accumulators: BufferView<'k, 2>,
    max: BufferView<'k, 1>,
    row_sum: BufferView<'k, 1>,
    /// Key head, first query head, first position among the queries.
    head: Val<'k>,
    first_head: Val<'k>,
    first: Val<'k>,
    n: Val<'k>,
    past: Val<'k>,
    last: Val<'k>,
    prefix: Option<Val<'k>>,
    /// See [`AttentionProblem::span_end`].
    border: Option<Val<'k>>,
}

/// A thread's part of a tile.
#[derive(Clone, Copy)]
struct ThreadTile<'k> {
    lane: Val<'k>,
    /// First row of the warp, and of the lane's two.
    row: Val<'k>,
    group: Val<'k>,
    /// First key of the warp in the tile, and first of the lane's columns of a fragment.
    key: Val<'k>,
    column: Val<'k>,
    /// Number of the warp along the keys.
    along: Val<'k>,
}

impl<'k, 'a> MatrixBlock<'k, 'a> {
    pub fn new(
        k: &'k Recorder,
        a: &'k AttentionProblem<'a>,
        (plan, warps): (GpuAttentionPlan, WarpLayout),
        first: Val<'k>,
        heads: Val<'k>,
    ) -> MatrixBlock<'k, 'a> {
        let (n, t) = (k.dim(&a.n), k.dim(&a.t));
        let rows = SIDE * warps.rows;
        let [key_rows, value_rows] = a.halves();
        let tile = |name, halves, rows, size, values| CacheTile {
            to: SharedMatrix::new(k, name, halves, plan.keys, size),
            rows,
            size,
            values,
            scales: warps.codes.then(|| k.shared(&format!("{name}_scales"), [plan.keys])),
        };
        let first_head = heads * plan.heads;
        MatrixBlock {
            k,
            a,
            plan,
            warps,
            team: ThreadTeam::new(k, WARP * warps.rows * warps.keys),
            q: SharedMatrix::new(k, "q", warps.key.other_operand(), rows, a.size),
            scales: (warps.key.dtype == DType::F16).then(|| k.shared("scales", [rows])),
            keys: tile("key_tile", warps.key, key_rows, a.size, false),
            values: tile("value_tile", warps.value, value_rows, a.value_size, true),
            s: k.registers("s", [plan.keys / warps.keys / COLUMNS, OF_LANE]),
            accumulators: k.registers("sums", [a.value_size / COLUMNS, OF_LANE]),
            max: k.registers("max", [2]),
            row_sum: k.registers("total", [2]),
            head: first_head / a.group,
            first_head,
            first,
            n,
            past: t - n,
            last: t + -1,
            prefix: a.prefix(k),
            border: a.span_end(k),
        }
    }

    pub fn run(self, tile: Val<'k>, new_rows: &[NewRows], out: BufId) {
        let (k, a, single) = (self.k, self.a, self.plan.single);
        let (start, end) = keys_seen(a, self.plan, [tile, self.first, self.n, self.past], self.prefix);
        let (start, end) = (start.named("start"), end.named("end"));
        append(a, new_rows, (self.head, self.last), [start, end], WARP * self.warps.rows * self.warps.keys);
        let first_slice = single.then(|| tile.equals(0));
        self.clear(first_slice);
        if let Some(sinks) = a.over_sinks() {
            let all = a.sinks_left(if single { self.last } else { end + -1 });
            let count = first_slice.map_or(all, |first| first.select(all, k.int(0)));
            MatrixBlock { a: &sinks, ..self }.add_keys(k.int(0), count.named("sinks"));
        }
        self.add_keys(start, end);
        self.store(tile, out);
    }

    fn thread_tile(self, thread: Val<'k>) -> ThreadTile<'k> {
        let (warp, lane) = (thread / WARP, (thread % WARP).named("lane"));
        let [group, column] = fragment_position(&M16N8K16.accumulator, lane, 0);
        let (along, warp) = match self.warps.keys {
            1 => (self.k.int(0), warp),
            count => (warp % count, warp / count),
        };
        let key = along * (self.plan.keys / self.warps.keys);
        let row = if self.warps.rows == 1 { self.k.int(0) } else { warp * SIDE };
        ThreadTile { lane, row, group, key, column, along }
    }

    /// Position among the queries and query head of a row; positions after the last query count as the last
    /// one.
    fn query_of(self, row: Val<'k>) -> (Val<'k>, Val<'k>) {
        let heads = self.plan.heads;
        // More rows than queries and heads repeat the first ones.
        let row = if self.plan.single { row % heads } else { row };
        ((self.first + row / heads).min(self.n + -1), self.first_head + row % heads)
    }

    /// The queries of the two rows of a lane.
    fn rows_of(self, part: &ThreadTile<'k>) -> [(Val<'k>, Val<'k>); 2] {
        [0, APART].map(|apart| self.query_of(part.row + part.group + apart))
    }

    /// No keys seen yet but that without a value, which `first` sees: one of several slices, and of several
    /// warps.
    fn clear(self, first: Option<Val<'k>>) {
        let k = self.k;
        self.team.run(|thread| {
            let part = self.thread_tile(thread);
            let among_warps = (self.warps.keys > 1).then(|| part.along.equals(0));
            let sees = first.into_iter().chain(among_warps).reduce(|a, b| a & b);
            for (i, (_, head)) in self.rows_of(&part).into_iter().enumerate() {
                let (mut max, mut total) = (k.float(MASKED), k.float(0.0));
                if let Some(logit) = self.a.null_logit(head) {
                    max = sees.map_or(logit, |sees| sees.select(logit, MASKED));
                    let counts = part.column.equals(0);
                    total =
                        sees.map_or(counts, |sees| sees & counts).select(k.float(self.weight_unit()), 0.0);
                }
                self.max.set([i as i64], max);
                self.row_sum.set([i as i64], total);
            }
            let zero = k.zeros(DType::F32, OF_LANE as u32);
            k.unrolled("i", self.a.value_size / COLUMNS, |i| self.accumulators.set((i, 0), zero));
        });
    }

    /// The weight of the largest score: of f16 the small ones then have as many bits.
    fn weight_unit(self) -> f64 {
        if self.warps.value.dtype == DType::F16 { 32768.0 } else { 1.0 }
    }

    // ---- what comes into shared memory

    /// Some neighbouring lanes have a row of queries, as many as there are threads for.
    fn load_queries(self) {
        let (k, rows) = (self.k, SIDE * self.warps.rows);
        let threads = WARP * self.warps.rows * self.warps.keys;
        let fits = |lanes: &i64| lanes * rows <= threads && self.a.size / COLUMNS % lanes == 0;
        let lanes = [8, 4].into_iter().find(fits).unwrap_or(2);
        self.team.run(|thread| {
            let its = (thread / lanes).named("row");
            if lanes * rows == threads {
                return self.load_query(its, thread % lanes, lanes);
            }
            k.when(its.lt(rows), || self.load_query(its, thread % lanes, lanes));
        });
        k.barrier();
    }

    /// The part of a row that a lane has. A short one stays in registers while the largest element of the row
    /// is found.
    fn load_query(self, row: Val<'k>, part: Val<'k>, lanes: i64) {
        let (k, length) = (self.k, self.a.size / lanes);
        let (position, head) = self.query_of(row);
        let pieces = length / COLUMNS;
        let column = |piece: Val<'k>| part * length + piece * COLUMNS;
        let load =
            |piece: Val<'k>| self.a.query([position, head, column(piece)], COLUMNS as u32).named("query");
        let largest = |query: Val<'k>| query.abs().reduce_lanes(BinOp::Max);
        let kept: Option<Vec<Val>> =
            (pieces <= KEPT).then(|| (0..pieces).map(|piece| load(k.int(piece))).collect());
        let factor = self.scales.map(|scales| {
            let most = match &kept {
                Some(kept) => kept.iter().fold(k.float(0.0), |most, &query| most.max(largest(query))),
                None => k.fold("piece", pieces, 0.0, |piece, most| most.max(largest(load(piece)))),
            };
            let most = fold_lanes(most, BinOp::Max, lanes);
            let [factor, back] = scale_powers(most);
            k.when(part.equals(0), || scales.set([row], back));
            factor
        });
        let store = |piece: Val<'k>, query: Val<'k>| {
            let query = factor.map_or(query, |factor| query * factor.splat(COLUMNS as u32));
            self.q.store_floats([row, column(piece)], query);
        };
        match kept {
            Some(kept) => kept.into_iter().zip(0..).for_each(|(query, piece)| store(k.int(piece), query)),
            None => k.serial("piece", pieces, |piece| store(piece, load(piece))),
        }
    }

    /// Begins to fill a tile with the rows from `j` on; rows after the last one repeat it.
    fn start_tile_copy(self, tile: &CacheTile<'k>, j: Val<'k>) {
        let (k, a) = (self.k, self.a);
        let page = a.page(j).map(CachePage::named);
        let row_at = |i: Val<'k>| (j + i).min(self.last);
        let (_, scale) = if tile.values { a.value } else { a.key };
        if let (Some(scales), Some(scale)) = (tile.scales, scale) {
            let zero = k.int(0);
            self.team.each(self.plan.keys, |i| {
                scales.set([i], a.row(scale, page, [row_at(i), self.head, zero], 1));
            });
        }
        let (Some(rows), Some(to)) = (tile.rows, tile.to.stored()) else {
            let lanes = OF_LANE;
            return self.team.each(self.plan.keys * (tile.size / lanes), |i| {
                let (row, c) = (i / (tile.size / lanes), i % (tile.size / lanes) * lanes);
                let at = [row_at(row), self.head, c];
                let (v, (codes, _)) = if tile.values { (a.v, a.value) } else { (a.k, a.key) };
                let v = if tile.scales.is_some() { codes } else { v };
                tile.to.store_floats([row, c], a.row(v, page, at, lanes as u32));
            });
        };
        let view = rows.in_page(k.view(rows.buf, [1, a.kv, tile.size]), page);
        let elements = CHUNK / rows.dtype.bytes().unwrap_or(1) as i64;
        let parts = tile.size / elements;
        self.team.each(self.plan.keys * parts, |i| {
            let (row, c) = (i / parts, i % parts * elements);
            to.start_copy((row, c), CHUNK as u32, view, (row_at(row), self.head, c));
        });
    }

    // ---- the products

    /// Adds the keys `start..end`; `start` begins a tile.
    fn add_keys(self, start: Val<'k>, end: Val<'k>) {
        let (k, step) = (self.k, self.plan.keys);
        let tiles = (end - start).max(0).div_ceil(step).named("tiles");
        k.when(k.int(0).lt(tiles), || self.start_tile_copy(&self.keys, start));
        k.commit_copies();
        self.load_queries();
        k.serial("tile", tiles, |i| {
            let j = (start + i * step).named("j");
            self.start_tile_copy(&self.values, j);
            k.commit_copies();
            // The keys have landed.
            k.wait_copies(1);
            k.barrier();
            self.team.run(|thread| self.compute_scores(thread));
            k.barrier();
            k.when((i + 1).lt(tiles), || self.start_tile_copy(&self.keys, j + step));
            k.commit_copies();
            self.team.run(|thread| self.compute_weights(thread, j, end));
            // So have the values.
            k.wait_copies(1);
            k.barrier();
            self.team.run(|thread| self.accumulate_values(thread));
            k.barrier();
        });
        k.wait_copies(0);
    }

    /// Keys of a warp in a tile.
    fn keys_of_warp(self) -> i64 {
        self.plan.keys / self.warps.keys
    }

    /// Products of queries and keys.
    fn compute_scores(self, thread: Val<'k>) {
        let (k, part) = (self.k, self.thread_tile(thread));
        let zero = k.zeros(DType::F32, OF_LANE as u32);
        k.unrolled("i", self.keys_of_warp() / COLUMNS, |i| self.s.set((i, 0), zero));
        k.serial("c", self.a.size / SIDE, |c| {
            let c = c * SIDE;
            let queries = self.q.load([part.row, c], part.lane, MmaOperandRole::First);
            k.unrolled("i", self.keys_of_warp() / SIDE, |i| {
                let keys = self.keys.to.load([part.key + i * SIDE, c], part.lane, MmaOperandRole::Second);
                for second in [false, true] {
                    let at = (i * 2 + i64::from(second), 0);
                    let sums = self.s.load(at, OF_LANE as u32);
                    self.s.set(at, queries.add_to(sums, keys.half(second)));
                }
            });
        });
        if self.keys.scales.is_some() {
            k.unrolled("i", self.keys_of_warp() / COLUMNS, |i| {
                let s = self.s.load((i, 0), OF_LANE as u32);
                self.s.set((i, 0), self.keys.scaled(s, part.key + i * COLUMNS + part.column));
            });
        }
    }

    /// Products to scores, and these to weights with the new maxima; older sums change by what that makes of
    /// them.
    fn compute_weights(self, thread: Val<'k>, j: Val<'k>, end: Val<'k>) {
        let (k, part) = (self.k, self.thread_tile(thread));
        if let Some(scales) = self.scales {
            let scale = pair([0, APART].map(|apart| scales.at([part.row + part.group + apart])));
            k.unrolled("i", self.keys_of_warp() / COLUMNS, |i| {
                self.s.set((i, 0), self.s.load((i, 0), OF_LANE as u32) * scale);
            });
        }
        // Most tiles lie before all queries, and none of their keys is masked.
        let to = (self.first + (self.plan.positions - 1)).min(self.n + -1);
        let seen = [self.past + self.first, self.past + to];
        k.branch(self.a.all_seen(seen, j, (j + self.plan.keys, end)), |all| {
            self.mask(&part, j, (!all).then_some(end));
        });
        let rows = [0, 1].map(|i| self.max_of_row(i));
        let (max, factor) = (pair(rows.map(|row| row.0)), pair(rows.map(|row| row.1)));
        let sum = k.reg("sum", k.zeros(DType::F32, OF_LANE as u32));
        k.unrolled("i", self.keys_of_warp() / COLUMNS, |i| {
            let weight = self.plan.weight(self.s.load((i, 0), OF_LANE as u32) - max);
            let weight =
                if self.weight_unit() == 1.0 { weight } else { weight * self.weight_unit() }.named("weight");
            self.s.set((i, 0), weight);
            sum.set(sum.get() + weight);
        });
        let sum = sum.get().named("sum");
        for i in 0..2 {
            let its = sum.shuffle([2 * i]) + sum.shuffle([2 * i + 1]);
            let i = i64::from(i);
            self.row_sum.set([i], self.row_sum.at([i]).fma(rows[i as usize].1, its));
        }
        k.unrolled("i", self.a.value_size / COLUMNS, |i| {
            self.accumulators.set((i, 0), self.accumulators.load((i, 0), OF_LANE as u32) * factor);
        });
    }

    /// Soft cap, bias and mask; all keys are seen without `end`.
    fn mask(self, part: &ThreadTile<'k>, j: Val<'k>, end: Option<Val<'k>>) {
        let (k, a) = (self.k, self.a);
        let queries = self.rows_of(part);
        let slopes = queries.map(|(_, head)| a.slope(head));
        let slope = slopes[0].zip(slopes[1]).map(|(upper, lower)| pair([upper, lower]).named("slopes"));
        let p = pair(queries.map(|(position, _)| (self.past + position).cast(DType::I32))).named("p");
        let first = (j + part.key + part.column).cast(DType::I32);
        let neighbours = first.ramp(1, 2).shuffle([0, 1, 0, 1]).named("j");
        k.unrolled("i", self.keys_of_warp() / COLUMNS, |i| {
            let index = ScoreIndex {
                p,
                j: neighbours + (i * COLUMNS).cast(DType::I32).splat(OF_LANE as u32),
                slope,
                term: a.terms.and_then(|_| self.terms(&queries, j + part.key + part.column + i * COLUMNS)),
                prefix: self.prefix,
                border: self.border,
                end: end.filter(|_| self.plan.slices > 1),
                visible: end.is_none(),
            };
            self.s.set((i, 0), a.score(self.s.load((i, 0), OF_LANE as u32), &index));
        });
    }

    /// Terms by distance of a lane's two rows with key `j` and the next one.
    fn terms(self, queries: &[(Val<'k>, Val<'k>); 2], j: Val<'k>) -> Option<Val<'k>> {
        let of = |(position, head): (Val<'k>, Val<'k>), j: Val<'k>| {
            self.a.term(self.a.column_of_terms(j - self.past - position), head)
        };
        let [upper, lower] = queries;
        let [first, second] = [j, j + 1].map(|j| Some(pair([of(*upper, j)?, of(*lower, j)?])));
        Some(first?.shuffle_with(second?, [0, OF_LANE as u32 + 1, 2, OF_LANE as u32 + 3]).named("terms"))
    }

    /// The new maximum of one of a lane's rows, and what it makes of older sums.
    fn max_of_row(self, i: u32) -> (Val<'k>, Val<'k>) {
        let (k, at) = (self.k, [i64::from(i)]);
        let old = self.max.at(at).named("old");
        let most = k.reg("most", old);
        k.unrolled("i", self.keys_of_warp() / COLUMNS, |block| {
            let s = self.s.load((block, 0), OF_LANE as u32).shuffle([2 * i, 2 * i + 1]);
            most.set(most.get().max(s.reduce_lanes(BinOp::Max)));
        });
        // Four lanes have a row.
        let max = most.get().named("most");
        let max = max.max(lane_value(max, 1)).named("most");
        let max = max.max(lane_value(max, 2)).named("max");
        self.max.set(at, max);
        (max, self.plan.weight(old - max).named("factor"))
    }

    /// `sums += weights . values`.
    fn accumulate_values(self, thread: Val<'k>) {
        let (k, part) = (self.k, self.thread_tile(thread));
        k.unrolled("i", self.keys_of_warp() / SIDE, |i| {
            let weights = [0, 1].map(|half| {
                let weight = self.s.load((i * 2 + half, 0), OF_LANE as u32);
                self.values.scaled(weight, part.key + i * SIDE + half * COLUMNS + part.column)
            });
            let weights = SplitFragment::from_floats(side_by_side(weights), self.warps.value.other_operand());
            k.unrolled("c", self.a.value_size / SIDE, |c| {
                let at = [part.key + i * SIDE, c * SIDE];
                let values = self.values.to.load(at, part.lane, MmaOperandRole::SecondTransposed);
                for second in [false, true] {
                    let at = (c * 2 + i64::from(second), 0);
                    let sums = self.accumulators.load(at, OF_LANE as u32);
                    self.accumulators.set(at, weights.add_to(sums, values.half(second)));
                }
            });
        });
    }

    // ---- the results

    /// `slice`: of unfinished sums, where there are several.
    fn store(self, slice: Val<'k>, out: BufId) {
        let (k, a) = (self.k, self.a);
        self.team.run(|thread| {
            let part = self.thread_tile(thread);
            for i in 0..2 {
                let at = [i64::from(i)];
                let total = self.row_sum.at(at);
                let total = total + lane_value(total, 1);
                self.row_sum.set(at, total + lane_value(total.named("total"), 2));
            }
            if self.warps.keys > 1 {
                return;
            }
            if self.plan.slices > 1 {
                return self.store_slice(&part, slice, partial_results(k, a, out));
            }
            let out = k.view(out, [1, a.heads(), a.value_size]);
            self.each_row(&part, |i, row| {
                let (position, head) =
                    (self.first + row / self.plan.heads, self.first_head + row % self.plan.heads);
                let total = self.row_sum.at([i64::from(i)]).named("total");
                k.when(position.lt(self.n), || {
                    self.each_pair(&part, i, |c, pair| {
                        out.set([position, head, c], (pair / total.splat(2)).cast(out.dtype()));
                    });
                });
            });
        });
        if self.warps.keys > 1 {
            self.merge_warps(slice, out);
        }
    }

    /// Unfinished sums of a block that has one warp.
    fn store_slice(self, part: &ThreadTile<'k>, slice: Val<'k>, out: BufferView<'k, 3>) {
        let (k, a) = (self.k, self.a);
        self.each_row(part, |i, row| {
            let head = (self.first_head + row).named("head");
            self.each_pair(part, i, |c, pair| out.set([slice, head, c], pair));
            k.when(part.column.equals(0), || {
                let at = [i64::from(i)];
                out.set((slice, head, a.value_size), self.max.at(at));
                out.set((slice, head, a.value_size + 1), self.row_sum.at(at));
                store_slice_count(k, (a, self.plan), out, (slice, head));
            });
        });
    }

    /// `body(which, row)` for the valid ones of a lane's two rows.
    fn each_row(self, part: &ThreadTile<'k>, body: impl Fn(u32, Val<'k>)) {
        for i in 0..2 {
            let row = (part.row + part.group + i64::from(i) * APART).named("row");
            if self.plan.rows() == SIDE * self.warps.rows {
                body(i, row);
            } else {
                self.k.when(row.lt(self.plan.rows()), || body(i, row));
            }
        }
    }

    /// `body(column, sums of two neighbours)` of one of a lane's rows.
    fn each_pair(self, part: &ThreadTile<'k>, i: u32, body: impl Fn(Val<'k>, Val<'k>)) {
        self.k.unrolled("c", self.a.value_size / COLUMNS, |c| {
            let sums = self.accumulators.load((c, 0), OF_LANE as u32);
            body(c * COLUMNS + part.column, sums.shuffle([2 * i, 2 * i + 1]));
        });
    }

    /// Joins the sums of warps that had other keys.
    fn merge_warps(self, slice: Val<'k>, out: BufId) {
        let (k, a, rows) = (self.k, self.a, self.plan.rows());
        let size = a.value_size;
        let [max_at, total_at] = [size, size + 1];
        let of_warps = k.shared("of_warps", [self.warps.keys, rows, size + 2]);
        self.team.run(|thread| {
            let part = self.thread_tile(thread);
            self.each_row(&part, |i, row| {
                self.each_pair(&part, i, |c, pair| of_warps.set([part.along, row, c], pair));
                k.when(part.column.equals(0), || {
                    of_warps.set((part.along, row, max_at), self.max.at([i64::from(i)]));
                    of_warps.set((part.along, row, total_at), self.row_sum.at([i64::from(i)]));
                });
            });
        });
        k.barrier();
        let (out, unfinished) = (k.view(out, [1, a.heads(), size]), partial_results(k, a, out));
        self.team.each(rows * size, |at| {
            let (row, c) = (at / size, at % size);
            let of = |warp: i64, c: Val<'k>| of_warps.at((warp, row, c));
            let all = 0..self.warps.keys;
            let max =
                all.clone().fold(k.float(MASKED), |max, warp| max.max(of(warp, k.int(max_at)))).named("max");
            let (mut sum, mut total) = (k.float(0.0), k.float(0.0));
            for warp in all {
                let weight = self.plan.weight(of(warp, k.int(max_at)) - max).named("weight");
                sum = weight.fma(of(warp, c), sum).named("sum");
                total = weight.fma(of(warp, k.int(total_at)), total).named("total");
            }
            let head = self.first_head + row;
            if self.plan.slices == 1 {
                return out.set((0, head, c), (sum / total).cast(out.dtype()));
            }
            unfinished.set([slice, head, c], sum);
            k.when(c.equals(0), || {
                unfinished.set((slice, head, max_at), max);
                unfinished.set((slice, head, total_at), total);
                store_slice_count(k, (a, self.plan), unfinished, (slice, head));
            });
        });
    }
}

/// A number of each of two rows, as elements of a fragment of sums are.
fn pair<'k>([upper, lower]: [Val<'k>; 2]) -> Val<'k> {
    upper.splat(2).shuffle_with(lower.splat(2), 0..OF_LANE as u32)
}

/// The value of another lane of the warp.
fn lane_value<'k>(value: Val<'k>, distance: i64) -> Val<'k> {
    let distance = value.recorder().int32(distance);
    value.instr("shfl_xor_f32", &[distance]).named("other")
}

/// The power of two that brings a number that is not negative between 2^14 and 2^15, and its inverse.
fn scale_powers<'k>(number: Val<'k>) -> [Val<'k>; 2] {
    let exponent = (number.bits_as(ExprType::scalar(DType::I32)) >> 23).max(15).min(254).named("exponent");
    let float = |exponent: Val<'k>| (exponent << 23).bits_as(ExprType::F32).named("power");
    // Exponents are stored with 127 more.
    [float(-(exponent + -(2 * 127 + 14))), float(exponent + -14)]
}
