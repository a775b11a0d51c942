//! Panels of float weights.

use mlcc_kernel_lang::{BufferView, Val};

/// The weights of a piece of a slice on the worker's stack, f32.
#[derive(Clone, Copy)]
pub(in crate::matmul) struct FloatPanel<'k> {
    /// `[columns][rows of the slice]`.
    pub weights: BufferView<'k, 2>,
    /// First column of the piece.
    pub first: Val<'k>,
    pub lanes: u32,
}

impl<'k> FloatPanel<'k> {
    /// The weights of column `col` for one part, pinned.
    pub fn column(self, col: Val<'k>, part: u32) -> Val<'k> {
        self.weights.load((col - self.first, i64::from(part * self.lanes)), self.lanes).named("w")
    }

    /// Stores the weights of column `here` of the piece for one part.
    pub fn set_column(self, here: Val<'k>, part: u32, weights: Val<'k>) {
        self.weights.set((here, i64::from(part * self.lanes)), weights);
    }
}
