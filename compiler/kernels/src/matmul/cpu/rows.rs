//! Products of all activation rows of a range with one slice of the weights: the choice of the method for
//! each of them.

use super::float_panels::{FloatPanels, depth_blocked_type, few_tiles};
use super::integers::ScaleRange;
use super::microtile::{Microtile, TileWeights};
use super::panels::{SliceTiles, is_whole};
use super::prefetch::{SharedPrefetch, TilePrefetch};
use super::skinny_gemm::{SkinnyGemm, TileRun, count_tiles, split_rows};
use super::slice::{CpuMatmul, RowRange, WeightSlice};
use crate::matmul::plan::TallTile;
use crate::matmul::problem::{DOT_COLUMNS, MatmulActivation, MatmulEpilogue, MatmulWeight};
use mlcc_kernel_lang::Val;

impl<'k> CpuMatmul<'k, '_> {
    /// All tiles of weights against some activation rows, some rows after the other: each chunk of x stays in
    /// cache while the weights stream by.
    pub fn all_rows(self, range: RowRange<'k>, epilogue: &mut MatmulEpilogue) {
        let whole = self.integers().is_some_and(|integers| is_whole(self, integers));
        let chunk = self.plan.chunk.filter(|_| !whole).map(i64::from);
        let fewer = |&size: &i64| self.k.as_int(range.count).is_none_or(|count| count > size);
        let Some(size) = chunk.filter(fewer) else { return self.chunk_of_rows(range, epilogue) };
        self.k.serial("chunk", range.count.div_ceil(size), |chunk| {
            let done = chunk * size;
            let count = (range.count - done).min(size);
            self.chunk_of_rows(RowRange { first: range.first + done, count }, epilogue);
        });
    }

    /// The tall register tiles that a few rows are cut into where their number allows it, and all of them
    /// come in order.
    pub fn tall_tile(self) -> Option<TallTile> {
        self.integers().filter(|_| self.expert.is_none()).and(self.plan.tall)
    }

    /// All tiles of weights against some activation rows.
    pub fn chunk_of_rows(self, range: RowRange<'k>, epilogue: &mut MatmulEpilogue) {
        let (k, plan) = (self.k, self.plan);
        let Some(tall) = self.tall_tile() else {
            return k.par("slice", self.slice_count(plan.tiles), |number| {
                self.each_slice(plan.tiles, number, |slice| self.rows_of_slice(slice, range, epilogue));
            });
        };
        let end = i64::from(plan.few) + 1;
        let whole = (range.count % i64::from(tall.rows)).lt(1);
        let fits = whole.select(range.count, end).lt(end).named("tall");
        let slices = fits.select(self.slice_count(tall.tiles), k.int(self.slice_count(plan.tiles)));
        k.par("slice", slices, |number| {
            k.branch(fits, |fits| match fits {
                true => self.each_slice(tall.tiles, number, |slice| {
                    let runs = split_rows(k, &[tall.rows], range, None);
                    self.skinny_gemm(slice, &runs, epilogue);
                }),
                false => {
                    self.each_slice(plan.tiles, number, |slice| self.rows_of_slice(slice, range, epilogue))
                }
            });
        });
    }

    /// Integer products of rows that pass by the weights together.
    fn skinny_gemm(self, slice: WeightSlice<'k>, runs: &[TileRun<'k>], epilogue: &mut MatmulEpilogue) {
        if let Some(integers) = self.integers() {
            SkinnyGemm { cpu: self, slice, integers, runs }.emit(epilogue);
        }
    }

    /// Some activation rows, for one slice of the weights.
    pub fn rows_of_slice(self, slice: WeightSlice<'k>, range: RowRange<'k>, epilogue: &mut MatmulEpilogue) {
        let (k, plan) = (self.k, self.plan);
        let integers = self.integers().filter(|_| plan.rows.len() > 1);
        let many = integers.map(|_| k.int(plan.few.into()).lt(range.count).named("many"));
        let runs = split_rows(k, &plan.rows, range, self.extra_rows(many));
        let mut one_by_one: Vec<Val> = runs.iter().map(|run| run.tiles).collect();
        if let (Some(integers), Some(many)) = (integers, many) {
            let fits = self.expert.is_some() || integers.codes.block == plan.code_block();
            assert!(fits, "codes come in blocks of other sizes than the product takes");
            let passes = count_tiles(k, &runs);
            let panels = SliceTiles { cpu: self, slice, integers, first: range.first, count: runs[0].tiles };
            k.when(many, || panels.emit(epilogue));
            let few = k.int(1).lt(many.select(0, passes)).named("few");
            k.when(few, || self.skinny_gemm(slice, &runs, epilogue));
            one_by_one[0] = many.select(0, one_by_one[0]);
            for tiles in &mut one_by_one {
                *tiles = few.select(0, *tiles);
            }
        }
        if let Some(plain) = depth_blocked_type(self) {
            let count = one_by_one[0];
            let many = k.int(few_tiles(plan)).lt(count);
            let panels = FloatPanels { cpu: self, slice, plain, first: range.first, count };
            k.when(many, || panels.emit(epilogue));
            one_by_one[0] = many.select(0, count);
        }
        self.remainder_tiles(slice, &runs, &one_by_one, epilogue);
    }

    /// Rows that register tiles of the first size may have too many, where a list tells the rows: a few left
    /// over cost as much one by one, and `many` rows never take the weights as they are.
    fn extra_rows(self, many: Option<Val<'k>>) -> Option<Val<'k>> {
        self.expert?.list?;
        let [most, next, ..] = self.plan.rows.as_slice() else { return None };
        let few = self.k.int(i64::from(most - next) - 1);
        Some(many.map_or(few, |many| many.select(i64::from(*most) - 1, few)))
    }

    /// Register tiles that pass by all columns by themselves, `tiles` of each run.
    fn remainder_tiles(
        self,
        slice: WeightSlice<'k>,
        runs: &[TileRun<'k>],
        tiles: &[Val<'k>],
        epilogue: &mut MatmulEpilogue,
    ) {
        let prefetch = self.own_prefetch();
        for (i, (run, &tiles)) in runs.iter().zip(tiles).enumerate() {
            self.k.serial("tile", tiles, |number| {
                let rows = run.tile_rows(number, self.integers().is_some() && i == 0);
                let tile = Microtile::new(self, slice, rows, TileWeights::Memory);
                self.add_all(&tile, prefetch);
                tile.finish(epilogue);
            });
        }
    }

    /// The prefetches of a register tile for itself.
    fn own_prefetch(self) -> TilePrefetch<'k> {
        let (Some(integers), Some(spread)) = (self.integers(), self.plan.spread) else {
            return TilePrefetch::None;
        };
        let scales = (spread.groups as usize * DOT_COLUMNS).div_ceil(integers.codes.group);
        let passes = SharedPrefetch::new(self, integers, (1, scales), self.k.int(1));
        passes.map_or(TilePrefetch::None, TilePrefetch::Passes)
    }

    /// Adds all columns to the sums of a register tile.
    fn add_all(self, tile: &Microtile<'k, '_>, prefetch: TilePrefetch<'k>) {
        let k = self.k;
        match (self.problem.weight, self.problem.activation) {
            (
                MatmulWeight::Plain(plain),
                MatmulActivation::F32 | MatmulActivation::F16 | MatmulActivation::BF16,
            ) => tile.add_plain(plain),
            (
                MatmulWeight::Packed(format),
                MatmulActivation::F32 | MatmulActivation::F16 | MatmulActivation::BF16,
            ) => tile.add_grouped(format),
            (MatmulWeight::Packed(_), MatmulActivation::Codes(codes)) => {
                let Some(integers) = self.integers() else { return };
                if self.plan.rows.len() == 1 {
                    tile.add_streamed(integers);
                } else {
                    let count = k.int(codes.row_scales(self.problem.k) as i64);
                    tile.add_scales(integers, ScaleRange { first: k.int(0), count }, prefetch);
                }
                tile.scale_accumulators(integers);
            }
            (MatmulWeight::Plain(plain), MatmulActivation::Codes(_)) => {
                panic!("integer activations need packed weights, found {}", plain.dtype())
            }
        }
    }
}
