//! Plain weights in memory, in tiles of 16 rows.

use super::MatrixOrigin;
use mlcc_ir::kernel::ExprType;
use mlcc_ir::types::DType;
use mlcc_kernel_lang::{BufferView, Val};
use mlcc_quant::TILE;
use mlcc_quant::plain::PlainType;

/// A matrix as `[tiles][columns][16 rows]`, of bf16 `[tiles][pairs of columns][16 rows][2]`.
#[derive(Clone, Copy)]
pub(in crate::matmul) struct PlainTiles<'k> {
    pub elements: BufferView<'k, 1>,
    pub plain: PlainType,
    /// Elements of a tile.
    pub tile: i64,
    pub origin: MatrixOrigin<'k>,
}

impl<'k> PlainTiles<'k> {
    /// The place at which column `col` (an even one of bf16) of the rows from `row` of a tile on begins.
    pub fn place(self, tile: Val<'k>, col: Val<'k>, row: u32) -> Val<'k> {
        self.origin.element_offset(
            tile * self.tile + col * TILE as i64 + i64::from(row) * self.plain.pair_columns() as i64,
        )
    }

    /// Both columns of a pair from `col` on, of `lanes` rows: bf16, the columns of a row side by side.
    pub fn pair(self, tile: Val<'k>, col: Val<'k>, row: u32, lanes: u32) -> Val<'k> {
        self.elements.load([self.place(tile, col, row)], 2 * lanes)
    }

    /// The weights of `plain.pair()` columns from `col` on (the second is the first where that is one) for
    /// `lanes` rows, f32, pinned.
    pub fn columns(self, tile: Val<'k>, col: Val<'k>, row: u32, lanes: u32) -> [Val<'k>; 2] {
        match self.plain {
            PlainType::F32 | PlainType::F16 => {
                let weights = self.elements.load([self.place(tile, col, row)], lanes);
                [weights.cast(DType::F32).named("w"); 2]
            }
            PlainType::BF16 => {
                // Two columns per 32-bit lane; the upper half of an f32 is a bf16.
                let both =
                    self.pair(tile, col, row, lanes).bits_as(ExprType::vector(DType::U32, lanes)).named("w2");
                [both << 16, both & 0xffff_0000]
                    .map(|w| w.bits_as(ExprType::vector(DType::F32, lanes)).named("w"))
            }
        }
    }
}
