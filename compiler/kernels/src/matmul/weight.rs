//! Weights as the product on a CPU reads them: views of the tiles in memory ([`packed`], [`plain`]), and
//! panels of unpacked weights on the worker's stack ([`panel`], [`float_panel`]).

pub(super) mod float_panel;
mod packed;
pub(super) mod panel;
mod plain;

pub(super) use packed::PackedTiles;
pub(super) use plain::PlainTiles;

use mlcc_kernel_lang::Val;

/// The start of a matrix of weights in its buffer.
#[derive(Clone, Copy)]
pub(super) struct MatrixOrigin<'k> {
    /// Elements of the tensor before the matrix, of several in it.
    pub matrix: Option<Val<'k>>,
    /// Elements before the tensor.
    pub offset: i64,
}

impl<'k> MatrixOrigin<'k> {
    /// The place of element `at` of the matrix.
    pub fn element_offset(self, at: Val<'k>) -> Val<'k> {
        self.matrix.map_or(at, |matrix| matrix + at) + self.offset
    }
}
