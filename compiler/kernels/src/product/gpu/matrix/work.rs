//! How blocks compute products on tensor cores: tiles of many rows, and of up to 64, as steps of several sequences have them. What takes
//! time there is to read the weights, so each is read from memory once and taken apart once or twice: a block has few columns, so that
//! there are blocks for all multiprocessors, and its warps lie along the depth of the product, each with another slice.

use mlcc_kernel_lang::WARP;
use mlcc_target::MatrixTile;

/// Columns of a block. With 64 an H200 was 3 to 9 % slower with 4-bit weights and 10 to 38 % with f16 ones, for 8 to 64 rows; with 16,
/// 64 rows were 17 to 18 % slower.
pub(super) const COLUMNS: i64 = 32;
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
    /// Each warp copies what it multiplies for itself.
    pub direct: bool,
    /// Rows that it is for, of a product of few.
    pub most: i64,
}

impl Work {
    /// `slice`: columns of a slice. Stages of a tile are of 32: wider ones have fewer, of as many bytes together.
    pub fn of(tile: &MatrixTile, slice: i64) -> Work {
        let (rows, columns) = (i64::from(tile.rows), i64::from(tile.columns));
        let warps = tile.warps.map(i64::from);
        let stages = ((i64::from(tile.stages) * 32 + slice - 1) / slice).max(2);
        Work { rows, columns, warps, depth: 1, stages, direct: false, most: i64::MAX }
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
    /// Columns that a warp takes together.
    pub tile: i64,
    /// Bytes that a warp copies for itself of [`COLUMNS`] columns of weights in fragments.
    pub direct: Option<i64>,
}

/// How products of up to 16 and of up to 64 rows are computed, in that order. None where blocks of the large tile are no multiple of the small
/// ones. With row-major weights both are there, or none: where the depth is a multiple of the slices of all warps.
pub(super) fn few(many: &Work, bytes: SliceBytes) -> Vec<Work> {
    let rings = [(16, 16), (32, 64)].map(|of| work(many, bytes, of));
    let few: Option<Vec<Work>> = match (bytes.direct, rings) {
        (Some(w), [_, wide]) => Some(direct(many, bytes, w).into_iter().chain(wide).collect()),
        (None, rings) => rings.into_iter().collect(),
    };
    few.filter(|_| many.columns % COLUMNS == 0).unwrap_or_default()
}

/// Up to 16 rows with weights in fragments: all warps along the depth.
fn direct(many: &Work, bytes: SliceBytes, w: i64) -> Option<Work> {
    let depth = many.warps[0] * many.warps[1];
    // Their weights take more than those of a tile, whose activations take more than theirs: both together fit as those of a tile do.
    let room = (many.places() * many.columns * bytes.w).max(RING / 2);
    let stages = (ring(many, bytes) / (depth * (16 * bytes.x + w))).min(room / (depth * w)).min(4);
    let work = Work { rows: 16, columns: COLUMNS, warps: [1, 1], depth, stages, direct: true, most: 16 };
    (stages >= 2).then_some(work)
}

/// In so many blocks are those of the large tile divided: a small one has half of its columns, or less, and two tiles of rows.
pub(super) fn split(many: &Work) -> i64 {
    many.columns / COLUMNS * 2
}

/// Bytes for slices: prompts may take more, which a kernel has anyway then.
fn ring(many: &Work, bytes: SliceBytes) -> i64 {
    RING.max(many.places() * (many.rows * bytes.x + many.columns * bytes.w))
}

fn work(many: &Work, bytes: SliceBytes, (rows, most): (i64, i64)) -> Option<Work> {
    let warps = many.warps[0] * many.warps[1];
    let ring = ring(many, bytes);
    let with = |across: i64| {
        let depth = warps / across;
        let stage = depth * (rows * bytes.x + COLUMNS * bytes.w);
        let fits = bytes.slices % depth == 0 && COLUMNS % (bytes.tile * across) == 0;
        let stages = (ring / stage).min(STAGES);
        let work = Work { rows, columns: COLUMNS, warps: [1, across], depth, stages, direct: false, most };
        (fits && stages >= 2).then_some(work)
    };
    // Most warps along the depth for which there is room.
    [1, 2, 4].into_iter().filter(|across| warps % across == 0).find_map(with)
}

#[cfg(test)]
mod tests {
    use super::*;

    const MANY: Work =
        Work { rows: 64, columns: 128, warps: [2, 2], depth: 1, stages: 3, direct: false, most: i64::MAX };

    const BYTES: SliceBytes = SliceBytes { x: 128, w: 20, slices: 128, tile: 8, direct: None };

    #[test]
    fn rings_fit_and_warps_lie_along_the_depth() {
        // f32 activations with 4-bit and 8-bit codes, f16 weights; bf16 activations and weights.
        let cases = [(128, 20), (128, 36), (128, 64), (64, 64)];
        let found = cases.map(|(x, w)| {
            let works = few(&MANY, SliceBytes { x, w, ..BYTES });
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
        assert!(few(&MANY, SliceBytes { slices: 5, ..BYTES }).iter().all(|w| w.depth == 1));
        assert_eq!(few(&Work { columns: 16, ..MANY }, BYTES), []);
    }

    /// With weights in fragments up to 16 rows need no ring, so any depth will do; up to 64 do.
    #[test]
    fn warps_copy_fragments_for_themselves() {
        let bytes = SliceBytes { x: 128, w: 36, tile: 16, direct: Some(2048), ..BYTES };
        let of =
            |many: &Work, bytes| few(many, bytes).iter().map(|w| (w.direct, w.depth, w.stages)).collect();
        let found: Vec<_> = of(&MANY, bytes);
        assert_eq!(found, [(true, 4, 3), (false, 4, 2)]);
        assert_eq!(of(&Work { rows: 128, columns: 64, stages: 4, ..MANY }, bytes)[0], (true, 4, 3));
        let odd: Vec<_> = of(&MANY, SliceBytes { slices: 5, ..bytes });
        assert_eq!(odd, [(true, 4, 3)]);
    }
}
