//! Operands of lanes on tensor cores, and weights in fragments as a lane has them.

use super::GpuMatmul;
use super::codes::{half_codes, half_order};
use super::operand::{IN_ORDER, OF_LANE, SplitOperand};
use crate::matmul::problem::{MatmulActivation, MatmulWeight};
use mlcc_ir::types::{DType, Packing};
use mlcc_kernel_lang::Val;
use mlcc_quant::FragmentSizes;
use mlcc_quant::layout::LayoutRegion;

impl<'k> GpuMatmul<'k, '_> {
    /// Sizes of the weights where they come in fragments.
    pub(super) fn fragments(self) -> Option<FragmentSizes> {
        let problem = self.problem;
        match problem.packing {
            Packing::Fragments => FragmentSizes::new(problem.weight.dtype(), problem.n, problem.k).ok(),
            Packing::RowMajor | Packing::ColMajor | Packing::Tile16 => None,
        }
    }

    /// Piece `p` of the vectors that a lane loaded, as a factor of the tensor cores.
    pub(super) fn piece(self, sizes: FragmentSizes, vectors: &[Val<'k>], p: usize) -> SplitOperand<'k> {
        let pieces = sizes.pieces();
        let (vector, within) = (vectors[p / pieces], p % pieces);
        match self.problem.weight {
            MatmulWeight::Plain(_) if self.problem.activation == MatmulActivation::F16 => {
                SplitOperand::exact(vector)
            }
            MatmulWeight::Plain(_) => SplitOperand::from_values(vector),
            MatmulWeight::Packed(format) => {
                let bytes = (OF_LANE as usize * format.bits / 8) as u32;
                let first = within as u32 * bytes;
                let codes = vector.shuffle(first..first + bytes);
                SplitOperand::exact(half_codes(self.k, format, codes, self.factor()).named("codes"))
            }
        }
    }

    /// The columns of a lane in the order in which it has weights.
    pub(super) fn columns(self) -> [u32; OF_LANE as usize] {
        match self.problem.weight {
            MatmulWeight::Packed(format) => half_order(format, self.factor()),
            MatmulWeight::Plain(_) => IN_ORDER,
        }
    }

    /// The type of both factors of the tensor cores.
    pub(super) fn factor(self) -> DType {
        if self.problem.activation == MatmulActivation::F16 { DType::F16 } else { DType::BF16 }
    }

    /// The type of scales; `None` for plain weights.
    pub(super) fn scale_type(self) -> Option<DType> {
        match &self.layout.region {
            LayoutRegion::Plain { .. } => None,
            LayoutRegion::Group { spec, .. } => Some(spec.number_type().dtype()),
        }
    }
}
