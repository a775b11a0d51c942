//! How blocks compute products on tensor cores: tiles of many rows, and of up to 64, as steps of several sequences have them. What takes
//! time there is to read the weights, so each is read from memory once and taken apart once or twice: a block has few columns, so that
//! there are blocks for all multiprocessors, and its warps lie along the depth of the product, each with another slice.

use mlcc_kernel_lang::WARP;
use mlcc_target::MatrixTile;

/// Columns of a block. With 64 an H200 was 3 to 9 % slower with 4-bit weights and 10 to 38 % with f16 ones, for 8 to 64 rows; with 16,
/// 64 rows were 17 to 18 % slower.
const COLUMNS: i64 = 32;
/// Bytes of the ring: two blocks of it fit into a multiprocessor of 100 KiB.
const RING: i64 = 49 << 10;
/// Most stages: more copies under way bring nothing.
const STAGES: i64 = 6;

/// How a block of warps computes a tile of results.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Work {
    pub rows: i64,
    pub columns: i64,
    /// Warps along rows and along columns.
    pub warps: [i64; 2],
    /// Warps along the depth of the product: each has another slice, and their sums are added.
    pub depth: i64,
    pub stages: i64,
    /// Rows that it is for, of a product of few.
    pub most: i64,
}

impl Work {
    pub fn of(tile: &MatrixTile) -> Work {
        let (rows, columns) = (i64::from(tile.rows), i64::from(tile.columns));
        let (warps, stages) = (tile.warps.map(i64::from), i64::from(tile.stages));
        Work { rows, columns, warps, depth: 1, stages, most: i64::MAX }
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
    pub fn sums_of_lane(&self) -> i64 {
        self.fragments().iter().product::<i64>() * 4
    }
}

/// Bytes of a row of a slice, and how many slices there are.
#[derive(Clone, Copy)]
pub(super) struct SliceBytes {
    pub x: i64,
    pub w: i64,
    pub slices: i64,
}

/// How products of up to 16 and of up to 64 rows are computed, in that order; none where the depth is no multiple of the slices of all
/// warps, or blocks of the large tile are no multiple of the small ones.
pub(super) fn few(many: &Work, bytes: SliceBytes) -> Vec<Work> {
    let few: Option<Vec<Work>> = [(16, 16), (32, 64)].map(|of| work(many, bytes, of)).into_iter().collect();
    few.filter(|_| many.columns % COLUMNS == 0).unwrap_or_default()
}

/// In so many blocks are those of the large tile divided: a small one has half of its columns, or less, and two tiles of rows.
pub(super) fn split(many: &Work) -> i64 {
    many.columns / COLUMNS * 2
}

fn work(many: &Work, bytes: SliceBytes, (rows, most): (i64, i64)) -> Option<Work> {
    let warps = many.warps[0] * many.warps[1];
    let with = |across: i64| {
        let depth = warps / across;
        let stage = depth * (rows * bytes.x + COLUMNS * bytes.w);
        let fits = bytes.slices % depth == 0 && COLUMNS % (8 * across) == 0;
        let stages = (RING / stage).min(STAGES);
        let work = Work { rows, columns: COLUMNS, warps: [1, across], depth, stages, most };
        (fits && stages >= 2).then_some(work)
    };
    // Most warps along the depth for which there is room.
    [1, 2, 4].into_iter().filter(|across| warps % across == 0).find_map(with)
}

#[cfg(test)]
mod tests {
    use super::*;

    const MANY: Work = Work { rows: 64, columns: 128, warps: [2, 2], depth: 1, stages: 3, most: i64::MAX };

    #[test]
    fn rings_fit_and_warps_lie_along_the_depth() {
        // f32 activations with 4-bit and 8-bit codes, f16 weights; bf16 activations and weights.
        let cases = [(128, 20), (128, 36), (128, 64), (64, 64)];
        let found = cases.map(|(x, w)| {
            let works = few(&MANY, SliceBytes { x, w, slices: 128 });
            for work in &works {
                assert_eq!(work.threads(), MANY.threads());
                assert!(work.places() * (work.rows * x + work.columns * w) <= RING);
            }
            works.iter().map(|w| (w.depth, w.stages)).collect::<Vec<_>>()
        });
        assert_eq!(found[0], [(4, 4), (4, 2)]);
        assert_eq!(found[1], [(4, 3), (4, 2)]);
        assert_eq!(found[2], [(4, 3), (4, 2)]);
        assert_eq!(found[3], [(4, 4), (4, 3)]);
        assert!(few(&MANY, SliceBytes { x: 128, w: 20, slices: 5 }).iter().all(|w| w.depth == 1));
        assert_eq!(few(&Work { columns: 16, ..MANY }, SliceBytes { x: 128, w: 20, slices: 8 }), []);
    }
}
