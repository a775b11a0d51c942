//! Prefetches of register tiles while they work on something else: the weights that come next, and the memory
//! that the epilogue is going to touch. A few lines at a time, because many at once would delay the loads.

use super::microtile::Microtile;
use super::slice::{CpuMatmul, IntegerMatmul, PartialTile, WeightSlice};
use mlcc_ir::instr::InstrId;
use mlcc_kernel_lang::{BufferView, CACHE_LINE, Recorder, Val};
use mlcc_quant::TILE;
use mlcc_quant::packed::TileSizes;

/// The prefetches of a register tile while it passes by some columns.
#[derive(Clone, Copy)]
pub(super) enum TilePrefetch<'k> {
    None,
    Passes(SharedPrefetch<'k>),
    Hints(VisitPrefetch<'k>),
}

impl<'k> TilePrefetch<'k> {
    /// Prefetches at the start of activation scale number `s` of those at hand.
    pub fn at_scale(self, tile: &Microtile<'k, '_>, s: Val<'k>) {
        if let TilePrefetch::Hints(hints) = self {
            hints.prefetch_visit(tile, s);
        }
    }

    /// The weights to prefetch for the groups of activation scale `scale`.
    pub fn of_scale(
        self,
        tile: &Microtile<'k, '_>,
        integers: IntegerMatmul,
        scale: Val<'k>,
    ) -> Option<FollowingWeights<'k>> {
        match self {
            TilePrefetch::Passes(passes) => Some(passes.following(tile, integers, scale)),
            TilePrefetch::None | TilePrefetch::Hints(_) => None,
        }
    }
}

/// Runs of whole cache lines in the weights, one in every tile of a slice.
#[derive(Clone, Copy)]
struct CacheLineRuns<'k> {
    prefetch: InstrId,
    w: BufferView<'k, 1>,
    /// The start of the run of the first tile.
    start: Val<'k>,
    /// Elements from tile to tile, and of a cache line.
    tile: i64,
    line: i64,
    tiles: u32,
}

impl<'k> CacheLineRuns<'k> {
    /// Prefetches `count` lines of each run from line `first` on, in the order in which they will be read.
    fn lines(self, k: &'k Recorder, first: Val<'k>, count: Val<'k>) {
        let from = (self.start + first * self.line).named("ahead");
        k.serial("line", count, |line| {
            let at = from + line * self.line;
            for tile in 0..i64::from(self.tiles) {
                self.w.prefetch(self.prefetch, [at + tile * self.tile]);
            }
        });
    }
}

// ---- few rows: the weights that all register tiles pass by next

/// The place of a register tile among those that pass by the same columns; each prefetches its part of what
/// comes next.
#[derive(Clone, Copy)]
pub(super) struct SharedPrefetch<'k> {
    prefetch: InstrId,
    /// Number of this register tile.
    number: Val<'k>,
    /// Activation scales of a piece, and lines of each tile in it.
    scales: i64,
    lines: i64,
    /// Lines of each tile that a register tile prefetches with one group.
    share: Val<'k>,
    /// The number of groups until prefetched weights are used.
    distance: i64,
}

impl<'k> SharedPrefetch<'k> {
    /// Prefetches for `tiles` register tiles that pass by a piece of `scales` activation scales, of the
    /// weights that they will use `distance` scales later; `None` where nothing is prefetched.
    pub fn new(
        cpu: CpuMatmul<'k, '_>,
        integers: IntegerMatmul,
        (scales, distance): (usize, usize),
        tiles: Val<'k>,
    ) -> Option<SharedPrefetch<'k>> {
        let prefetch = cpu.plan.spread?.prefetch;
        let per_scale = integers.codes.groups_per_scale();
        let groups = (scales * per_scale).min(cpu.problem.groups());
        let sizes = TileSizes::new(integers.format, cpu.problem.k);
        let lines = (sizes.blocks_bytes(groups) / CACHE_LINE) as i64;
        let visits = (tiles * groups as i64).max(1);
        let share = ((visits + (lines - 1)) / visits).named("share");
        let distance = (distance * per_scale) as i64;
        Some(SharedPrefetch { prefetch, number: cpu.k.int(0), share, scales: scales as i64, lines, distance })
    }

    /// The prefetches of register tile number `number`.
    pub fn of_tile(self, number: Val<'k>) -> Self {
        SharedPrefetch { number, ..self }
    }

    /// The weights that follow for the groups of scale `s`: after the end of a tile those of the tile that
    /// takes its place in the next slice.
    fn following(
        self,
        tile: &Microtile<'k, '_>,
        integers: IntegerMatmul,
        s: Val<'k>,
    ) -> FollowingWeights<'k> {
        let Microtile { cpu, slice, .. } = *tile;
        let per_scale = integers.codes.groups_per_scale() as i64;
        let (tile, tiles) = (cpu.problem.tile_len() as i64, i64::from(slice.tiles));
        // First scale of the piece, and the number of this one in it.
        let begin = s / self.scales * self.scales;
        let within = s - begin;
        let next = begin * per_scale + self.distance;
        let inside = next.lt(cpu.problem.groups() as i64);
        let skip = inside.select(0, cpu.k.int((tiles - 1) * tile));
        let start = cpu.packed(integers.format).block(slice.first, next).words + skip;
        let last = (cpu.problem.tiles() as i64 - tiles + 1) * tile - self.lines * CACHE_LINE as i64;
        let start = start.min(cpu.in_w(cpu.k.int(last))).named("ahead");
        let visit = ((self.number * self.scales + within) * per_scale).named("visit");
        let w = cpu.view(cpu.problem.w);
        let runs = CacheLineRuns {
            prefetch: self.prefetch,
            w,
            start,
            tile,
            line: CACHE_LINE as i64,
            tiles: slice.tiles,
        };
        FollowingWeights { k: cpu.k, runs, lines: self.lines, share: self.share, visit }
    }
}

/// The weights that follow a piece of the columns: some lines of every tile with each group.
#[derive(Clone, Copy)]
pub(super) struct FollowingWeights<'k> {
    k: &'k Recorder,
    runs: CacheLineRuns<'k>,
    /// Lines of each tile, those to prefetch with one group, and the number of the first group.
    lines: i64,
    share: Val<'k>,
    visit: Val<'k>,
}

impl<'k> FollowingWeights<'k> {
    /// Prefetches the part that belongs to group number `g` of the scale.
    pub fn at_group(self, g: Val<'k>) {
        let before = (self.visit + g) * self.share;
        self.runs.lines(self.k, before, self.share.min(self.lines - before));
    }
}

// ---- many rows: the weights that the next panel will be made of, and what the epilogue touches

/// A piece of k: elements of each tile that a panel is made of.
#[derive(Clone, Copy)]
pub(super) struct DepthBlock<'k> {
    /// Its number, and how many there are.
    pub number: Val<'k>,
    pub count: i64,
    /// Elements of a tile in a piece.
    pub run: usize,
}

/// The weights of the next piece of k, or of the first piece of the next slice; each register tile prefetches
/// an equal part.
#[derive(Clone, Copy)]
pub(super) struct NextWeights<'k> {
    runs: CacheLineRuns<'k>,
    /// Cache lines of a run, and those that every visit prefetches.
    lines: i64,
    share: Val<'k>,
}

impl<'k> NextWeights<'k> {
    /// Weights to prefetch in `visits` visits while register tiles pass by `piece`; `None` where there are
    /// none.
    pub fn new(
        cpu: CpuMatmul<'k, '_>,
        slice: WeightSlice<'k>,
        piece: DepthBlock<'k>,
        visits: Val<'k>,
    ) -> Option<NextWeights<'k>> {
        let prefetch = cpu.plan.spread?.prefetch;
        let (tile, tiles) = (cpu.problem.tile_len() as i64, i64::from(slice.tiles));
        let run = (piece.run as i64).min(tile);
        let after = (slice.first + tiles) * tile;
        let following = piece.number + 1;
        let here = slice.first * tile + following * run;
        let start = following.lt(piece.count).select(here, after);
        // After the last slice nothing is left to prefetch.
        let last = (cpu.problem.tiles() as i64 - tiles + 1) * tile - run;
        let start = cpu.in_w(start.min(last.max(0)));
        let w = cpu.view(cpu.problem.w);
        let line = CACHE_LINE as i64 / w.dtype().bytes().unwrap_or(1) as i64;
        let lines = run / line;
        let start = start.named("next");
        let share = ((visits + (lines - 1)) / visits).named("share");
        let runs = CacheLineRuns { prefetch, w, start, tile, line, tiles: slice.tiles };
        Some(NextWeights { runs, lines, share })
    }

    /// Prefetches the part of visit number `visit`.
    fn at(self, cpu: CpuMatmul<'k, '_>, visit: Val<'k>) {
        let first = visit * self.share;
        let useful = (first + self.share).lt(self.lines + 1);
        cpu.k.when(useful, || self.runs.lines(cpu.k, first, self.share));
    }
}

/// The prefetches of a register tile while it passes by a piece, a little with every visit (for integers with
/// each activation scale).
#[derive(Clone, Copy)]
pub(super) struct VisitPrefetch<'k> {
    pub next: Option<NextWeights<'k>>,
    /// Number of the register tile.
    pub number: Val<'k>,
    /// Visits of a register tile to the piece.
    pub visits: Val<'k>,
    pub epilogue: EpiloguePrefetch<'k>,
}

impl<'k> VisitPrefetch<'k> {
    /// Prefetches the part of visit `visit` of a register tile.
    pub fn prefetch_visit(self, tile: &Microtile<'k, '_>, visit: Val<'k>) {
        if let Some(next) = self.next {
            next.at(tile.cpu, self.number * self.visits + visit);
        }
        self.epilogue.at(tile, visit);
    }
}

/// Prefetches of the memory that a register tile's epilogue touches: while it passes by the last piece, some
/// rows per visit.
#[derive(Clone, Copy)]
pub(super) struct EpiloguePrefetch<'k> {
    /// True if this piece is the last one.
    last: Option<Val<'k>>,
    /// Rows per visit, and those of the register tile.
    rows: u32,
    all: u32,
}

impl<'k> EpiloguePrefetch<'k> {
    /// Prefetches for register tiles of `rows` rows with `visits` visits to the last piece.
    pub fn new(last: Option<Val<'k>>, visits: usize, rows: u32) -> Self {
        EpiloguePrefetch { last, rows: rows.div_ceil(visits as u32), all: rows }
    }

    fn at(self, tile: &Microtile<'k, '_>, visit: Val<'k>) {
        let first = visit * i64::from(self.rows);
        let left = first.lt(i64::from(self.all));
        let now = self.last.map_or(left, |last| last & left);
        tile.cpu.k.when(now, || tile.prefetch_epilogue(first, self.rows));
    }
}

impl<'k> Microtile<'k, '_> {
    /// Prefetches what the epilogue touches of `count` rows from row `first` of the register tile on.
    fn prefetch_epilogue(&self, first: Val<'k>, count: u32) {
        let Some(prefetch) = self.cpu.plan.epilogue_prefetch else { return };
        let n = self.cpu.problem.n as i64;
        for buf in self.cpu.problem.epilogue_operands.into_iter().flatten() {
            for row in 0..count {
                let start = self.some_result_row(first + i64::from(row)) * n;
                for tile in 0..i64::from(self.slice.tiles) {
                    let column = (self.slice.first + tile) * TILE as i64;
                    let column =
                        if self.slice.edge == PartialTile::Never { column } else { column.min(n - 1) };
                    self.cpu.view(buf).prefetch(prefetch, [start + column]);
                }
            }
        }
    }

    /// The row of the result that row `row` of the register tile is; the last one for those after it.
    fn some_result_row(&self, row: Val<'k>) -> Val<'k> {
        let Some(rows) = &self.listed else { return self.row + row.min(i64::from(self.rows) - 1) };
        let mut found = rows[rows.len() - 1][1];
        for (i, [_, here]) in rows.iter().enumerate().rev().skip(1) {
            found = row.lt(i as i64 + 1).select(*here, found);
        }
        found.named("touched")
    }
}
