//! `q4g32`: int4, codes stored 0..=14 with zero point 7, groups of 32, f16 scale (MLC's q4f16 arithmetic). Code 15 and
//! negative scales occur in groups that were quantized before ([`crate::group`]; ggml's Q4_0).
//!
//! Bytes (G groups per row, the last one padded to 32 codes with the zero point):
//! * `RowMajor`: codes `[N][16 G]`, two per byte, the even column in the low nibble; then scales `[N][G]` f16.
//! * `ColMajor`: codes as words of 8 consecutive columns, low nibble first, `[4 G][N]` words; then scales `[G][N]`.
//! * `Tile16`: per tile of 16 rows and per group 288 bytes: 16 scales, then `[4][16 rows][4]` bytes: byte i of row r in
//!   block j holds column `4 j + i` in its low and column `4 (j + 4) + i` in its high nibble. So one 64-byte load, masked
//!   and shifted, gives two operands of a u8 x i8 dot instruction (blocks j and j + 4 of four columns), and one i32 lane
//!   holds eight columns of one row for a table lookup by its low four bits.

use crate::group::{Group, GroupSpec};
use crate::layout::{Axis, Layout, Place, Region, TILE, Term};
use mlcc_ir::types::Format;
use mlcc_ir::types::Packing;

pub const SPEC: GroupSpec = GroupSpec { group: 32, max_int: 7, zero_point: 7, bits: 4 };
/// Bytes of one group of a tile.
pub const TILE_GROUP: usize = 2 * TILE + TILE * 16;

pub(crate) fn layout(packing: Packing, n: usize, k: usize) -> Layout {
    let groups = k.div_ceil(SPEC.group);
    let term = Term::new;
    let (row, col) = (Axis::Row, Axis::Col);
    let parity = Place { offset: 0, terms: vec![term(col, 1, 2, 4)] };
    let (codes, shift, scales, len) = match packing {
        Packing::RowMajor => (
            Place { offset: 0, terms: vec![term(row, 1, 0, 16 * groups), term(col, 2, 0, 1)] },
            parity,
            Place { offset: n * groups * 16, terms: vec![term(row, 1, 0, 2 * groups), term(col, 32, 0, 2)] },
            n * groups * 18,
        ),
        Packing::ColMajor => (
            Place { offset: 0, terms: vec![term(col, 8, 0, 4 * n), term(row, 1, 0, 4), term(col, 2, 4, 1)] },
            parity,
            Place { offset: n * groups * 16, terms: vec![term(col, 32, 0, 2 * n), term(row, 1, 0, 2)] },
            n * groups * 18,
        ),
        Packing::Tile16 => {
            let group = [term(row, TILE, 0, groups * TILE_GROUP), term(col, 32, 0, TILE_GROUP)];
            let code = [term(col, 4, 4, 4 * TILE), term(row, 1, TILE, 4), term(col, 1, 4, 1)];
            (
                Place { offset: 2 * TILE, terms: group.iter().chain(&code).copied().collect() },
                Place { offset: 0, terms: vec![term(col, 16, 2, 4)] },
                Place { offset: 0, terms: group.into_iter().chain([term(row, 1, TILE, 2)]).collect() },
                n.div_ceil(TILE) * groups * TILE_GROUP,
            )
        }
    };
    Layout {
        len,
        region: Region::Group { format: Format::Q4G32, spec: SPEC, codes, shift: Some(shift), scales },
    }
}

/// The 16 bytes of one group in row-major order.
pub(crate) fn row_bytes(group: &Group, out: &mut Vec<u8>) {
    out.extend(group.codes.chunks_exact(2).map(|c| c[0] | c[1] << 4));
}

/// One group of a tile from its 16 rows.
pub(crate) fn tile_bytes(rows: &[Group; TILE], out: &mut Vec<u8>) {
    for group in rows {
        out.extend(group.scale.to_le_bytes());
    }
    for block in 0..4 {
        for group in rows {
            let (low, high) = (&group.codes[4 * block..4 * block + 4], &group.codes[4 * block + 16..]);
            out.extend(low.iter().zip(high).map(|(l, h)| l | h << 4));
        }
    }
}
