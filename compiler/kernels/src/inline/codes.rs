//! Codes of activations by themselves, which are those that the kernel of a `quantize_rows` makes.

use super::{Inliner, LaneIndex};
use mlcc_ir::graph::GraphNode;
use mlcc_ir::kernel::BinOp;
use mlcc_ir::ops::{CODE_OFFSET, Op};
use mlcc_ir::types::DType;
use mlcc_kernel_lang::math::nearest_i32;
use mlcc_kernel_lang::{Recorder, Val};

impl<'k> Inliner<'_, 'k> {
    /// A code of a `group_quantize` for products: with the reciprocal of its scale and one rounding, step by
    /// step as in `quantize`. A code that is sent to another rank has to be the one that this rank would have
    /// made there. Codes of caches, one group to a row, are by their compute definition.
    pub(super) fn code(&self, k: &'k Recorder, node: &GraphNode, index: &[LaneIndex<'k>]) -> Option<Val<'k>> {
        let &Op::GroupQuantize { group, bits: 8, part } = &node.op else { return None };
        let columns = self.f.ty(node.inputs[0]).dims.last()?.as_const()?;
        if part == group || columns % group as i64 != 0 {
            return None;
        }
        let (&column, rows) = index.split_last()?;
        let number = self.axis().combine(BinOp::Div, column, LaneIndex::scalar(k.int(group as i64)));
        let scale = self.value(k, node.inputs[1], &[rows, &[number]].concat());
        // All codes of a group of zeros are zero.
        let zero = scale.like(0.0);
        let inverse = zero.lt(scale).select(1.0 / scale, zero);
        let x = self.value(k, node.inputs[0], index).to_lanes(self.lanes);
        Some(nearest_i32(x.fma(inverse, CODE_OFFSET)).cast(DType::I8))
    }
}
