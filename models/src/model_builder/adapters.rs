//! Products with adapters (LoRA) that are chosen when the model runs: to `x W^T` comes `(x A^T) B^T`, with the factors of the
//! slot that the sequence of the row has. The factors of all slots are one matrix each, those of experts as it were.

use super::ModelBuilder;
use crate::definition::AdapterSlots;
use mlcc_ir::dim::Dim;
use mlcc_ir::graph::ValueId;
use mlcc_ir::module::{ParamRole, ParamSource};
use mlcc_ir::types::{DType, TensorType};

/// The state that has the slot of a sequence (`i32[1]`, 0: none). The program that runs the model writes it.
pub const ADAPTER_SLOT: &str = "adapter.slot";

/// What the names of the factors of a tensor end with: `[slots + 1, rank, in]`, and `[slots + 1, out, rank]` with the factor of
/// the adapter in it, both as matrices of rank 2.
pub const FACTOR_A: &str = ".lora_A";
pub const FACTOR_B: &str = ".lora_B";

/// The slot of each row, `i32[rows, 1]`.
pub(super) struct AdapterSlotIds {
    slots: AdapterSlots,
    all_rows: ValueId,
    /// The same for the rows of one sequence.
    sequence_rows: ValueId,
}

impl AdapterSlotIds {
    /// Slots of the rows of a call.
    pub fn for_rows(net: &mut ModelBuilder, slots: AdapterSlots) -> AdapterSlotIds {
        let mut sequence_rows = net.rows;
        let of_all = net.per_sequence(&[], |net, _| {
            let state = net.state(ADAPTER_SLOT, TensorType::new(DType::I32, [1]), 0.0);
            let slot = net.read(state);
            // As many times as the sequence has rows.
            let n = net.n();
            let first = net.iota(Dim::from(0), n.clone());
            let none = net.sub(first, first);
            let slot = net.add(none, slot);
            sequence_rows = net.reshape(slot, [n, Dim::from(1)]);
            vec![sequence_rows]
        });
        AdapterSlotIds { slots, all_rows: of_all[0], sequence_rows }
    }
}

impl ModelBuilder<'_> {
    /// `y: [n, out]`, the product of `x: [n, in]` with the tensor `name`, with what the adapters of the rows add. Without slots, and where
    /// not every row of the call is computed, `y` as it is.
    pub fn add_adapters(&mut self, name: &str, x: ValueId, y: ValueId) -> ValueId {
        let Some(adapters) = &self.adapters else { return y };
        let AdapterSlots { rank, .. } = adapters.slots;
        let matrices = adapters.slots.matrix_count();
        let ids = if self.in_sequence() { adapters.sequence_rows } else { adapters.all_rows };
        let (rows, (input, out)) = (self.ty(ids).dims[0].clone(), (self.width(x), self.width(y)));
        if self.ty(x).rank() != 2 || self.ty(x).dims[0] != rows {
            return y;
        }
        let mut factor = |end: &str, dims: [usize; 2]| {
            let ty = TensorType::new(DType::F32, dims);
            self.param_from(&format!("{name}{end}"), ParamRole::LowRank, ty, ParamSource::Adapter)
        };
        let a = factor(FACTOR_A, [matrices * rank, input]);
        let b = factor(FACTOR_B, [matrices * out, rank]);
        let x = self.reshape(x, [rows.clone(), Dim::from(1), Dim::from(input)]);
        let low = self.matmul_experts(x, a, ids, matrices);
        let added = self.matmul_experts(low, b, ids, matrices);
        let added = self.reshape(added, [rows, Dim::from(out)]);
        self.add(y, added)
    }
}
