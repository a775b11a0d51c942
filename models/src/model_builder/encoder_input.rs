//! The source text of an encoder-decoder model, whose keys and values are the first rows of the caches.

use super::ModelBuilder;
use mlcc_ir::dim::Dim;
use mlcc_ir::graph::ValueId;
use mlcc_ir::types::{DType, TensorType};

/// The state of an encoder-decoder model with the number of its source's tokens (`i32[1]`): so many first rows of the caches are
/// of them. The entry function of the source text writes it.
pub const SOURCE_LENGTH: &str = "source.length";

impl ModelBuilder<'_> {
    /// How many first rows of the caches are of the source text, `i32[1]`. Of one sequence.
    pub fn encoder_length(&mut self) -> ValueId {
        let state = self.b.state(SOURCE_LENGTH, TensorType::new(DType::I32, [1]), 0.0);
        self.b.read(state)
    }
    /// Keeps the length of the source text, which is that of the call.
    pub fn store_encoder_length(&mut self) {
        let length = self.b.iota(self.n(), Dim::from(1));
        let state = self.b.state(SOURCE_LENGTH, TensorType::new(DType::I32, [1]), 0.0);
        self.b.write(state, length);
    }
}
