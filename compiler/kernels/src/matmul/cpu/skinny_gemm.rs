//! Integer products of few activation rows, such as those of sequences that decode together.
//!
//! Weights come from memory about as fast as these rows use them, so both have to happen at the same time:
//! all rows pass by a piece of the columns before the next ones are touched, while the sums of all rows wait
//! in the first-level cache. Each register tile unpacks the weights in registers again; a panel (see
//! [`super::panels`]) costs as much to fill as three register tiles save. The next piece is prefetched a few
//! lines at a time, in the order in which it will be read.

use super::integers::ScaleRange;
use super::microtile::{Microtile, TileRows, TileWeights};
use super::prefetch::{SharedPrefetch, TilePrefetch};
use super::slice::{CpuMatmul, IntegerMatmul, RowRange, WeightSlice};
use crate::matmul::problem::MatmulEpilogue;
use mlcc_ir::kernel::MemorySpace;
use mlcc_ir::types::DType;
use mlcc_kernel_lang::{BufferView, Recorder, Val};

/// A run of register tiles that have equally many rows.
#[derive(Clone, Copy)]
pub(super) struct TileRun<'k> {
    /// Rows of a register tile.
    pub rows: u32,
    /// Row of the result of the first one.
    pub first: Val<'k>,
    /// Number of register tiles.
    pub tiles: Val<'k>,
}

impl<'k> TileRun<'k> {
    /// The rows of register tile `number`.
    pub fn tile_rows(self, number: Val<'k>, interleaved: bool) -> TileRows<'k> {
        let first = (self.first + number * i64::from(self.rows)).named("row");
        TileRows { first, count: self.rows, interleaved: interleaved && self.rows > 1 }
    }
}

/// A range of rows, cut into register tiles of `sizes` rows; those of the first size may have up to `extra`
/// rows too many.
pub(super) fn split_rows<'k>(
    k: &'k Recorder,
    sizes: &[u32],
    range: RowRange<'k>,
    mut extra: Option<Val<'k>>,
) -> Vec<TileRun<'k>> {
    let mut done = k.int(0);
    let cut = |&rows: &u32| {
        let left = range.count - done;
        let extra = extra.take();
        let tiles = (extra.map_or(left, |extra| left + extra) / i64::from(rows)).named("tiles");
        let run = TileRun { rows, first: (range.first + done).named("run"), tiles };
        done = done + tiles * i64::from(rows);
        if extra.is_some() {
            done = done.min(range.count);
        }
        run
    };
    sizes.iter().map(cut).collect()
}

/// Register tiles of all runs.
pub(super) fn count_tiles<'k>(k: &'k Recorder, runs: &[TileRun<'k>]) -> Val<'k> {
    runs.iter().fold(k.int(0), |sum, run| sum + run.tiles).named("passes")
}

/// One slice of the weights against at most `plan.few` activation rows.
pub(super) struct SkinnyGemm<'k, 'a> {
    pub cpu: CpuMatmul<'k, 'a>,
    pub slice: WeightSlice<'k>,
    pub integers: IntegerMatmul,
    pub runs: &'a [TileRun<'k>],
}

impl<'k> SkinnyGemm<'k, '_> {
    pub fn emit(&self, epilogue: &mut MatmulEpilogue) {
        let (k, integers) = (self.cpu.k, self.integers);
        let sums = self.waiting();
        let scales = integers.codes.row_scales(self.cpu.problem.k);
        let per_piece = self.scales_per_piece(scales);
        let passes =
            SharedPrefetch::new(self.cpu, integers, (per_piece, per_piece), count_tiles(k, self.runs));
        self.each(|tile, (run, number), _| tile.save_accumulators(sums[run], number));
        k.serial("piece", (scales / per_piece) as i64, |piece| {
            let first = (piece * per_piece as i64).named("first_scale");
            let scales = ScaleRange { first, count: k.int(per_piece as i64) };
            self.each(|tile, (run, number), before| {
                tile.restore_accumulators(sums[run], number);
                let passes = passes.map(|passes| passes.of_tile(before + number));
                tile.add_scales(integers, scales, passes.map_or(TilePrefetch::None, TilePrefetch::Passes));
                tile.save_accumulators(sums[run], number);
            });
        });
        self.each(|tile, (run, number), _| {
            tile.restore_accumulators(sums[run], number);
            tile.scale_accumulators(integers);
            tile.finish(epilogue);
        });
    }

    /// Buffers for the sums of each run.
    fn waiting(&self) -> Vec<BufferView<'k, 1>> {
        let plan = self.cpu.plan;
        let row = i64::from(self.slice.parts(plan.lanes) * plan.lanes);
        // Listed rows fill up a last register tile; after whole ones of one size fewer rows are left than
        // such a one has.
        let first = plan.few.next_multiple_of(plan.rows[0]);
        let most = std::iter::once(first).chain(self.runs.iter().map(|run| run.rows - 1));
        let alloc =
            |(most, _)| self.cpu.k.alloc("sums", DType::F32, [i64::from(most) * row], MemorySpace::Stack);
        most.zip(self.runs).map(alloc).collect()
    }

    /// The activation scales of a piece: equal pieces of at most `piece_columns`.
    fn scales_per_piece(&self, scales: usize) -> usize {
        let columns = self.cpu.plan.sizes.piece_columns as usize;
        let most = (columns / self.integers.codes.group).clamp(1, scales);
        (1..=most).rev().find(|&n| scales.is_multiple_of(n)).unwrap_or(1)
    }

    /// Every register tile, with its run, its number there, and how many are in the runs before.
    fn each(&self, mut body: impl FnMut(&Microtile<'k, '_>, (usize, Val<'k>), Val<'k>)) {
        let mut before = self.cpu.k.int(0);
        for (i, run) in self.runs.iter().enumerate() {
            self.cpu.k.serial("tile", run.tiles, |number| {
                let rows = run.tile_rows(number, i == 0);
                let tile = Microtile::new(self.cpu, self.slice, rows, TileWeights::Memory);
                body(&tile, (i, number), before);
            });
            before = before + run.tiles;
        }
    }
}
