//! f32 on tensor cores that multiply 16-bit floats: a number is the sum of one to three of them.

use mlcc_ir::fragment::{Fragment, M16N8K16};
use mlcc_ir::kernel::ExprType;
use mlcc_ir::types::DType;
use mlcc_kernel_lang::Val;
use std::fmt;

/// The way in which numbers are made of 16-bit floats.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct HalfSplit {
    /// f16 or bf16.
    pub dtype: DType,
    /// The number of floats whose sum is the number: f32 as two f16 keep 22 bits, as two bf16 17, as three
    /// all of them.
    pub parts: u32,
    /// The parts of the other operand, which is f32.
    pub others: u32,
}

impl HalfSplit {
    /// The split of the other operand.
    pub fn other_operand(self) -> HalfSplit {
        HalfSplit { parts: self.others, ..self }
    }

    /// Bytes of a number.
    pub fn bytes(self) -> i64 {
        2 * i64::from(self.parts)
    }
}

impl fmt::Display for HalfSplit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {}", ["one", "two", "three"][self.parts as usize - 1], self.dtype)
    }
}

/// f32 as `parts` 16-bit floats: each is the remainder of those before it.
pub(crate) fn split_floats<'k>(floats: Val<'k>, dtype: DType, parts: u32) -> SplitParts<'k> {
    let mut rest = floats.named("floats");
    [0, 1, 2].map(|part| {
        if part >= parts {
            return None;
        }
        let (half, float) = nearest(rest, dtype);
        if part + 1 < parts {
            rest = (rest - float).named("rest");
        }
        Some(half.named("half"))
    })
}

/// The 16-bit float that comes nearest, and the same as f32.
fn nearest<'k>(floats: Val<'k>, dtype: DType) -> (Val<'k>, Val<'k>) {
    if dtype == DType::F16 {
        let half = floats.cast(DType::F16).named("half");
        return (half, half.cast(DType::F32));
    }
    // Half a unit of the last bit that stays, then the others are cut off.
    let ty = ExprType::vector(DType::U32, floats.lanes());
    let float = ((floats.bits_as(ty) + 0x8000) & 0xffff_0000).bits_as(floats.ty()).named("float");
    (upper_halves(float), float)
}

/// The upper halves of floats: bf16, cut off.
fn upper_halves(floats: Val) -> Val {
    let lanes = floats.lanes();
    let halves = floats.bits_as(ExprType::vector(DType::BF16, 2 * lanes));
    halves.shuffle((0..lanes).map(|i| 2 * i + 1))
}

/// The parts of a number, as many as it has.
pub(crate) type SplitParts<'k> = [Option<Val<'k>>; 3];

/// Fragments of numbers.
#[derive(Clone, Copy)]
pub(crate) struct SplitFragment<'k> {
    pub parts: SplitParts<'k>,
}

impl<'k> SplitFragment<'k> {
    /// Splits 8 f32 of a lane.
    pub fn from_floats(floats: Val<'k>, halves: HalfSplit) -> SplitFragment<'k> {
        SplitFragment { parts: split_floats(floats, halves.dtype, halves.parts) }
    }

    /// The first or second of two fragments.
    pub fn half(self, second: bool) -> SplitFragment<'k> {
        let elements = M16N8K16.b.elements_per_lane();
        let first = if second { elements } else { 0 };
        SplitFragment { parts: self.parts.map(|all| all.map(|all| all.shuffle(first..first + elements))) }
    }

    /// `sums + self * other`, small products first; those beyond the last part of `self` are beyond the last
    /// bit.
    pub fn add_to(self, sums: Val<'k>, other: SplitFragment<'k>) -> Val<'k> {
        let parts = |of: &SplitParts<'k>| of.iter().flatten().count();
        let last = parts(&self.parts).max(parts(&other.parts)) - 1;
        let mut sums = sums;
        for order in (0..=last).rev() {
            for i in (0..=order).rev() {
                if let (Some(a), Some(b)) = (self.parts[i], other.parts[order - i]) {
                    sums = sums.mma(a, b).named("sums");
                }
            }
        }
        sums
    }
}

/// Elements of two fragments of sums, as those of a first factor of 16 x 16.
pub(crate) fn side_by_side<'k>([left, right]: [Val<'k>; 2]) -> Val<'k> {
    left.shuffle_with(right, order(&M16N8K16.a, &M16N8K16.accumulator))
}

/// The place of each element of a first factor among those of two fragments of sums; both are in the same
/// lane.
fn order(to: &Fragment, from: &Fragment) -> Vec<u32> {
    let place = |e: u32| {
        let (row, column) = from.coordinates(0, e % from.elements_per_lane());
        (row, column + e / from.elements_per_lane() * from.columns)
    };
    let find = |e: u32| (0..2 * from.elements_per_lane()).find(|&of| place(of) == to.coordinates(0, e));
    (0..to.elements_per_lane()).filter_map(find).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A lane has the same elements of a first factor and of the two fragments of sums, so none goes to
    /// another lane.
    #[test]
    fn sums_are_factors() {
        let (a, sums) = (&M16N8K16.a, &M16N8K16.accumulator);
        let order = order(a, sums);
        assert_eq!(order.len(), 8);
        for lane in 0..32 {
            for (e, &of) in order.iter().enumerate() {
                let (row, column) = sums.coordinates(lane, of % 4);
                assert_eq!(a.coordinates(lane, e as u32), (row, column + of / 4 * 8));
            }
        }
    }
}
