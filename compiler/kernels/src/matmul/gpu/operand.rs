//! Factors of the tensor cores: values as one or two bf16, and the elements of a fragment among a lane's
//! values.

use super::codes::upper_halves;
use mlcc_ir::fragment::Fragment;
use mlcc_ir::kernel::ExprType;
use mlcc_ir::types::DType;
use mlcc_kernel_lang::Val;

/// Columns of a slice of 32 that a lane multiplies.
pub(super) const OF_LANE: i64 = 8;
/// The columns of a lane in the order of memory.
pub(super) const IN_ORDER: [u32; OF_LANE as usize] = [0, 1, 2, 3, 4, 5, 6, 7];

/// The elements of a fragment among those that a lane has of half a slice (for `a` of two rows, in order),
/// whose columns come in this order; `rows`: of the rows of `a`, else of the columns of `b`.
pub(super) fn fragment_order(
    of: &Fragment,
    half: u32,
    rows: bool,
    columns: &[u32; OF_LANE as usize],
) -> Vec<u32> {
    let element = |e| {
        let (row, column) = of.coordinates(0, e);
        // Along the depth of the product a lane has 0, 1, 8 and 9 more than its first.
        let (depth, other) = if rows { (column, row) } else { (row, column) };
        let neighbour = depth % 2 + depth / 8 * 2 + 4 * half;
        columns[neighbour as usize] + if other > 0 { OF_LANE as u32 } else { 0 }
    };
    (0..of.elements_per_lane()).map(element).collect()
}

/// Values as sums of one or two bf16, or as f16.
#[derive(Clone, Copy)]
pub(super) struct SplitOperand<'k> {
    high: Val<'k>,
    /// The remainder of `high`; small compared with it.
    low: Option<Val<'k>>,
}

impl<'k> SplitOperand<'k> {
    pub fn exact(high: Val<'k>) -> SplitOperand<'k> {
        SplitOperand { high, low: None }
    }

    /// Splits f32, f16 (exactly) or bf16.
    pub fn from_values(values: Val<'k>) -> SplitOperand<'k> {
        match values.ty().dtype {
            DType::BF16 => SplitOperand::exact(values),
            dtype => {
                let floats = values.cast(DType::F32).named("floats");
                let ty = ExprType::vector(DType::U32, floats.lanes());
                let kept = (floats.bits_as(ty) & 0xffff_0000).bits_as(floats.ty());
                let rest = floats - kept;
                // 3 bits of an f16 are left, else up to 16: half a unit of the last one that stays is added
                // before the others are cut off.
                let rest = match dtype {
                    DType::F16 => rest,
                    _ => (rest.bits_as(ty) + 0x8000).bits_as(floats.ty()),
                };
                SplitOperand { high: upper_halves(floats), low: Some(upper_halves(rest)) }
            }
        }
    }

    pub fn map(self, f: impl Fn(Val<'k>) -> Val<'k>) -> SplitOperand<'k> {
        SplitOperand { high: f(self.high).named("high"), low: self.low.map(|low| f(low).named("low")) }
    }

    pub fn with(self, other: SplitOperand<'k>, f: impl Fn(Val<'k>, Val<'k>) -> Val<'k>) -> SplitOperand<'k> {
        let low = self.low.zip(other.low).map(|(a, b)| f(a, b).named("low"));
        SplitOperand { high: f(self.high, other.high).named("high"), low }
    }

    /// Products whose sum is that of both, small ones first; that of what both leave is beyond the last bit.
    pub fn terms(&self, other: &SplitOperand<'k>) -> Vec<(Val<'k>, Val<'k>)> {
        let low = other.low.map(|low| (self.high, low));
        let terms = low.into_iter().chain(self.low.map(|low| (low, other.high)));
        terms.chain([(self.high, other.high)]).collect()
    }
}
