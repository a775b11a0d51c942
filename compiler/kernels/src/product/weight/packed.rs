//! Weights of group formats in memory, in tiles of 16 rows.

use super::Origin;
use mlcc_ir::types::Format;
use mlcc_kernel_lang::{Val, View};
use mlcc_quant::tile::{TileGroup, group_bytes};

/// A matrix as `[tiles][groups]`, each group with its scales and codes.
#[derive(Clone, Copy)]
pub(in crate::product) struct PackedTiles<'k> {
    pub bytes: View<'k, 1>,
    pub format: Format,
    /// Groups of a row.
    pub groups: i64,
    pub origin: Origin<'k>,
}

impl<'k> PackedTiles<'k> {
    /// Group `g` of a tile.
    pub fn group(self, tile: Val<'k>, g: Val<'k>) -> TileGroup<'k> {
        let bytes = group_bytes(self.format) as i64;
        let start = self.origin.place(tile * (self.groups * bytes) + g * bytes);
        TileGroup { format: self.format, bytes: self.bytes, start }
    }
}
