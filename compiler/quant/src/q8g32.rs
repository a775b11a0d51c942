//! `q8g32`: int8, codes stored 1..=255 with zero point 128, groups of 32, f16 scale (MLC's q8f16; ggml's Q8_0 plus 128).
//! Code 0 occurs in groups that were quantized elsewhere with all 256 codes ([`crate::group`]).
//!
//! Bytes (G groups per row, the last one padded to 32 codes with the zero point):
//! * `RowMajor`: codes `[N][32 G]`, then scales `[N][G]` f16.
//! * `ColMajor`: codes as words of 4 consecutive columns, `[8 G][N]` words; then scales `[G][N]`.
//! * `Tile16`: per tile of 16 rows and per group 544 bytes: 16 scales, then codes `[8][16 rows][4 columns]`: each 64-byte
//!   load is one operand of a u8 x i8 dot instruction.

use crate::group::{Group, GroupSpec};
use crate::layout::{Axis, Layout, Place, Region, TILE, Term};
use mlcc_ir::types::Format;
use mlcc_ir::types::Packing;

pub const SPEC: GroupSpec = GroupSpec { group: 32, max_int: 127, zero_point: 128, bits: 8 };
/// Bytes of one group of a tile.
pub const TILE_GROUP: usize = 2 * TILE + TILE * 32;

pub(crate) fn layout(packing: Packing, n: usize, k: usize) -> Layout {
    let groups = k.div_ceil(SPEC.group);
    let term = Term::new;
    let (row, col) = (Axis::Row, Axis::Col);
    let (codes, scales, len) = match packing {
        Packing::RowMajor => (
            Place { offset: 0, terms: vec![term(row, 1, 0, 32 * groups), term(col, 1, 0, 1)] },
            Place { offset: n * groups * 32, terms: vec![term(row, 1, 0, 2 * groups), term(col, 32, 0, 2)] },
            n * groups * 34,
        ),
        Packing::ColMajor => (
            Place { offset: 0, terms: vec![term(col, 4, 0, 4 * n), term(row, 1, 0, 4), term(col, 1, 4, 1)] },
            Place { offset: n * groups * 32, terms: vec![term(col, 32, 0, 2 * n), term(row, 1, 0, 2)] },
            n * groups * 34,
        ),
        Packing::Tile16 => {
            let group = [term(row, TILE, 0, groups * TILE_GROUP), term(col, 32, 0, TILE_GROUP)];
            let code = [term(col, 4, 8, 4 * TILE), term(row, 1, TILE, 4), term(col, 1, 4, 1)];
            (
                Place { offset: 2 * TILE, terms: group.iter().chain(&code).copied().collect() },
                Place { offset: 0, terms: group.into_iter().chain([term(row, 1, TILE, 2)]).collect() },
                n.div_ceil(TILE) * groups * TILE_GROUP,
            )
        }
    };
    Layout { len, region: Region::Group { format: Format::Q8G32, spec: SPEC, codes, shift: None, scales } }
}

/// The 32 bytes of one group in row-major order.
pub(crate) fn row_bytes(group: &Group, out: &mut Vec<u8>) {
    out.extend(group.codes);
}

/// One group of a tile from its 16 rows.
pub(crate) fn tile_bytes(rows: &[Group; TILE], out: &mut Vec<u8>) {
    for group in rows {
        out.extend(group.scale.to_le_bytes());
    }
    for block in 0..8 {
        for group in rows {
            out.extend(&group.codes[4 * block..4 * block + 4]);
        }
    }
}
