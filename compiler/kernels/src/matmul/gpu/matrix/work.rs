//! Blocks of products on tensor cores: tiles of many rows, and of up to 64, as steps of several sequences
//! have them. Such products take the time that reading the weights takes, so each is read from memory once
//! and taken apart once or twice. Each block reads all activations, so it has as many columns as leave blocks
//! for all multiprocessors; where these are few, its warps are along the depth of the product, each with
//! another slice.

use mlcc_kernel_lang::WARP;
use mlcc_target::MatrixTile;

/// Fewest columns of a block. With 16, an H200 was 17 to 18 % slower for 64 rows.
pub(super) const COLUMNS: i64 = 32;
/// Tiles for products of up to `max_rows` rows, as rows and columns, the best first: wide ones read
/// activations less often, and there are fewer of them. With 64 columns for all matrices an H200 was 3 to 9 %
/// slower with 4-bit weights and 10 to 38 % with f16 ones, for 8 to 64 rows.
static TILES: [TileCandidates; 3] = [
    TileCandidates { max_rows: 16, blocks: 128, shapes: &[[16, 128], [16, 64]] },
    TileCandidates { max_rows: 32, blocks: 88, shapes: &[[32, 128], [32, 64], [32, COLUMNS]] },
    TileCandidates { max_rows: 64, blocks: 88, shapes: &[[64, 128], [32, 128], [32, 64], [32, COLUMNS]] },
];

struct TileCandidates {
    max_rows: i64,
    /// The least number of blocks of wide tiles: two thirds of the multiprocessors of the largest devices, or
    /// one for each.
    blocks: i64,
    shapes: &'static [[i64; 2]],
}

impl TileCandidates {
    fn blocks(&self, n: i64, [rows, columns]: [i64; 2]) -> i64 {
        n / columns * ((self.max_rows + rows - 1) / rows)
    }
}

/// More blocks a launch has only where all have something to do.
const MOST_BLOCKS: i64 = 1024;
/// Sums that a lane may hold.
const SUMS: i64 = 64;
/// Bytes of the ring: two blocks of it fit into a multiprocessor of 100 KiB.
const RING: i64 = 49 << 10;
/// Most stages: more copies under way bring nothing.
const STAGES: i64 = 6;

/// The way in which a block of warps computes a tile of results.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct BlockTiling {
    pub rows: i64,
    pub columns: i64,
    /// Warps along rows and along columns.
    pub warps: [i64; 2],
    /// Warps along the depth of the product: each has another slice, and their sums are added.
    pub depth: i64,
    pub stages: i64,
    /// Each warp copies its own operands.
    pub direct: bool,
    /// Rows that it is for, of a product of few.
    pub max_rows: i64,
}

impl BlockTiling {
    /// `slice`: columns of a slice. Stages of a tile are of 32: wider ones have fewer, of as many bytes
    /// together.
    pub fn from_tile(tile: &MatrixTile, slice: i64) -> BlockTiling {
        let (rows, columns) = (i64::from(tile.rows), i64::from(tile.columns));
        let warps = tile.warps.map(i64::from);
        let stages = ((i64::from(tile.stages) * 32 + slice - 1) / slice).max(2);
        BlockTiling { rows, columns, warps, depth: 1, stages, direct: false, max_rows: i64::MAX }
    }

    /// Tiles of rows, of a product of few.
    pub fn tiles(&self) -> i64 {
        (self.max_rows + self.rows - 1) / self.rows
    }

    pub fn threads(&self) -> i64 {
        WARP * self.warps[0] * self.warps[1] * self.depth
    }

    /// Slices in shared memory.
    pub fn places(&self) -> i64 {
        self.stages * self.depth
    }

    /// Rows and columns of a warp.
    pub fn warp_tile(&self) -> [i64; 2] {
        [self.rows / self.warps[0], self.columns / self.warps[1]]
    }

    /// The same in fragments of 16 rows and of 8 columns.
    pub fn fragments(&self) -> [i64; 2] {
        let [rows, columns] = self.warp_tile();
        [rows / 16, columns / 8]
    }

    /// Sums that a lane holds.
    pub fn lane_accumulators(&self) -> i64 {
        self.fragments().iter().product::<i64>() * 4
    }
}

/// Bytes of a row of a slice, and how many slices and rows of them there are.
#[derive(Clone, Copy)]
pub(super) struct SliceBytes {
    pub x: i64,
    pub w: i64,
    pub slices: i64,
    /// Rows of weights.
    pub n: i64,
    /// Columns that a warp takes together.
    pub tile: i64,
    /// Bytes that a warp copies separately of [`COLUMNS`] columns of weights in fragments.
    pub direct: Option<i64>,
}

/// Tilings for products of few rows, for the fewest first. None where blocks of the large tile are no
/// multiple of the small ones. With row-major weights there are all or none: all where the depth is a
/// multiple of the slices of all warps.
pub(super) fn few_row_tilings(many: &BlockTiling, bytes: SliceBytes) -> Vec<BlockTiling> {
    if many.columns % COLUMNS != 0 {
        return Vec::new();
    }
    let [least, some, most] = TILES.each_ref().map(|tiles| {
        let enough = |&&of: &&[i64; 2]| of[1] == COLUMNS || tiles.blocks(bytes.n, of) >= tiles.blocks;
        tiles.shapes.iter().filter(enough).find_map(|&of| work(many, bytes, of, tiles.max_rows))
    });
    let least = least.or_else(|| narrow(many, bytes));
    let whole = bytes.direct.is_some() || [least, some, most].iter().all(Option::is_some);
    let same = |some: &BlockTiling| {
        most.is_some_and(|most| most == BlockTiling { max_rows: most.max_rows, ..*some })
    };
    [least, some.filter(|some| !same(some)), most].into_iter().flatten().filter(|_| whole).collect()
}

/// All that products of the same format may have, whatever their sizes. They have the same shared memory
/// then, so that they may be one launch.
pub(super) fn all_tilings(many: &BlockTiling, bytes: SliceBytes) -> Vec<BlockTiling> {
    let works = |tiles: &'static TileCandidates| {
        tiles.shapes.iter().filter_map(|&of| work(many, bytes, of, tiles.max_rows))
    };
    TILES.iter().flat_map(works).chain(narrow(many, bytes)).collect()
}

/// Up to 16 rows where there are few columns.
fn narrow(many: &BlockTiling, bytes: SliceBytes) -> Option<BlockTiling> {
    match bytes.direct {
        Some(w) => direct(many, bytes, w),
        None => work(many, bytes, [16, COLUMNS], 16),
    }
}

/// The tiling with weights in fragments: all warps along the depth.
fn direct(many: &BlockTiling, bytes: SliceBytes, w: i64) -> Option<BlockTiling> {
    let depth = many.warps[0] * many.warps[1];
    let stages =
        (ring(many, bytes) / (depth * (16 * bytes.x + w))).min(room(many, bytes) / (depth * w)).min(4);
    let work =
        BlockTiling { rows: 16, columns: COLUMNS, warps: [1, 1], depth, stages, direct: true, max_rows: 16 };
    (stages >= 2).then_some(work)
}

/// The number of blocks into which those of the large tile are divided, so that there are enough for few
/// rows. Products whose blocks are divided alike may be one launch, so all are divided as those of the
/// smallest tiles, except where most blocks would have nothing to do.
pub(super) fn blocks_per_tile(many: &BlockTiling, few: &[BlockTiling], n: i64) -> i64 {
    let of = |work: &BlockTiling| (many.columns * work.tiles() + work.columns - 1) / work.columns;
    let alike = many.columns / COLUMNS * 2;
    let blocks = (n + many.columns - 1) / many.columns * alike;
    if blocks <= MOST_BLOCKS { alike } else { few.iter().map(of).max().unwrap_or(1) }
}

/// Bytes for slices: those of prompts if they are more, which the kernel has anyway then.
fn ring(many: &BlockTiling, bytes: SliceBytes) -> i64 {
    RING.max(many.places() * (many.rows * bytes.x + many.columns * bytes.w))
}

/// The same for weights. Weights of few rows take more than those of a tile, whose activations take more than
/// theirs: both together fit as those of a tile do.
fn room(many: &BlockTiling, bytes: SliceBytes) -> i64 {
    (many.places() * many.columns * bytes.w).max(RING / 2)
}

fn work(many: &BlockTiling, bytes: SliceBytes, [rows, columns]: [i64; 2], most: i64) -> Option<BlockTiling> {
    let warps = many.warps[0] * many.warps[1];
    let ring = ring(many, bytes);
    let with = |across: i64| {
        let depth = warps / across;
        let stage = depth * (rows * bytes.x + columns * bytes.w);
        let fits = bytes.slices % depth == 0 && columns % (bytes.tile * across) == 0;
        let stages = (ring / stage).min(room(many, bytes) / (depth * columns * bytes.w)).min(STAGES);
        let work =
            BlockTiling { rows, columns, warps: [1, across], depth, stages, direct: false, max_rows: most };
        (fits && stages >= 2 && work.lane_accumulators() <= SUMS).then_some(work)
    };
    // Most warps along the depth for which there is room.
    [1, 2, 4].into_iter().filter(|across| warps % across == 0).find_map(with)
}

#[cfg(test)]
mod tests {
    use super::*;

    const MANY: BlockTiling = BlockTiling {
        rows: 64,
        columns: 128,
        warps: [2, 2],
        depth: 1,
        stages: 3,
        direct: false,
        max_rows: i64::MAX,
    };
    /// The tiling of packed weights with f16 activations.
    const CODES: BlockTiling = BlockTiling { rows: 128, columns: 64, stages: 2, ..MANY };

    const BYTES: SliceBytes = SliceBytes { x: 128, w: 20, slices: 128, n: 2048, tile: 8, direct: None };
    const FRAGMENTS: SliceBytes = SliceBytes { w: 36, tile: 16, slices: 64, direct: Some(2048), ..BYTES };

    #[test]
    fn rings_fit_and_warps_lie_along_the_depth() {
        // f32 activations with 4-bit and 8-bit codes, f16 weights; bf16 activations and weights.
        let cases = [(128, 20), (128, 36), (128, 64), (64, 64)];
        let found = cases.map(|(x, w)| {
            let works = few_row_tilings(&MANY, SliceBytes { x, w, ..BYTES });
            for work in &works {
                assert_eq!(work.threads(), MANY.threads());
                assert!(work.places() * (work.rows * x + work.columns * w) <= RING);
            }
            works.iter().map(|w| (w.depth, w.stages)).collect::<Vec<_>>()
        });
        assert_eq!(found[0], [(4, 4), (4, 2)]);
        assert_eq!(found[1], [(4, 3), (4, 2)]);
        assert_eq!(found[2], [(4, 3), (4, 2)]);
        assert_eq!(found[3], [(4, 3), (4, 3)]);
        assert!(few_row_tilings(&MANY, SliceBytes { slices: 5, ..BYTES }).iter().all(|w| w.depth == 1));
        assert_eq!(few_row_tilings(&BlockTiling { columns: 16, ..MANY }, BYTES), []);
    }

    /// Weights in fragments need no ring for up to 16 rows, so any depth will do; for up to 64 they do.
    #[test]
    fn warps_copy_fragments_for_themselves() {
        let of = |many: &BlockTiling, bytes| {
            few_row_tilings(many, bytes).iter().map(|w| (w.direct, w.depth, w.stages)).collect()
        };
        let found: Vec<_> = of(&MANY, FRAGMENTS);
        assert_eq!(found, [(true, 4, 3), (false, 4, 2)]);
        assert_eq!(of(&CODES, FRAGMENTS)[0], (true, 4, 3));
        let odd: Vec<_> = of(&MANY, SliceBytes { slices: 5, ..FRAGMENTS });
        assert_eq!(odd[0], (true, 4, 3));
    }

    #[test]
    fn many_columns_have_wide_tiles() {
        let of = |n| -> Vec<_> {
            few_row_tilings(&CODES, SliceBytes { n, ..FRAGMENTS })
                .iter()
                .map(|w| (w.max_rows, w.rows, w.columns))
                .collect()
        };
        assert_eq!(of(2048), [(16, 16, 32), (64, 32, 32)]);
        assert_eq!(of(4096), [(16, 16, 32), (32, 32, 32), (64, 32, 64)]);
        assert_eq!(of(6144), [(16, 16, 32), (32, 32, 64), (64, 32, 128)]);
        assert_eq!(of(28672), [(16, 16, 128), (32, 32, 128), (64, 64, 128)]);
    }

    /// Whatever their numbers of columns, products of a format take the same shared memory, and each tile has
    /// its blocks.
    #[test]
    fn products_of_any_size_stand_side_by_side() {
        let all = all_tilings(&CODES, FRAGMENTS);
        for n in [64, 2048, 4096, 6144, 10240, 16384, 28672, 128256] {
            let few = few_row_tilings(&CODES, SliceBytes { n, ..FRAGMENTS });
            assert!(few.iter().all(|work| all.contains(work)), "{n}");
            let blocks = (n + CODES.columns - 1) / CODES.columns * blocks_per_tile(&CODES, &few, n);
            let of = |work: &BlockTiling| (n + work.columns - 1) / work.columns * work.tiles();
            assert!(few.iter().all(|work| of(work) <= blocks), "{n}");
            assert!(blocks <= MOST_BLOCKS || few.iter().any(|work| of(work) * 2 >= blocks), "{n}");
        }
    }
}
