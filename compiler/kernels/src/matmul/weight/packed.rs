//! Weights of group formats in memory, in tiles of 16 rows.

use super::MatrixOrigin;
use mlcc_kernel_lang::{BufferView, Val};
use mlcc_quant::packed::TileSizes;
use mlcc_quant::tile::TileBlock;

/// A matrix as `[tiles][groups]`, each group with its scales and its blocks of codes.
#[derive(Clone, Copy)]
pub(in crate::matmul) struct PackedTiles<'k> {
    pub bytes: BufferView<'k, 1>,
    pub sizes: TileSizes,
    pub origin: MatrixOrigin<'k>,
}

impl<'k> PackedTiles<'k> {
    /// Block `b` of a row of a tile.
    pub fn block(self, tile: Val<'k>, b: Val<'k>) -> TileBlock<'k> {
        let PackedTiles { sizes, bytes, .. } = self;
        let (tile, group) = (tile * sizes.tile() as i64, sizes.group() as i64);
        let (blocks, words) = (sizes.blocks as i64, sizes.block() as i64);
        let (group, words) = match (sizes.groups, blocks) {
            (_, 1) => {
                let start = self.origin.element_offset(tile + b * group);
                (start, start)
            }
            (1, _) => {
                let start = self.origin.element_offset(tile);
                (start, start + b * words)
            }
            _ => {
                let start = self.origin.element_offset(tile + b / blocks * group);
                (start, start + b % blocks * words)
            }
        };
        TileBlock { sizes, bytes, group, words }
    }
}
