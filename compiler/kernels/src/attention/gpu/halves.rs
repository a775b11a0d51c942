//! Operands of attention on tensor cores: matrices of 16-bit floats in shared memory, one or two of which are the numbers.

use crate::attention::plan::{Halves, PAD};
use mlcc_ir::fragment::{Fragment, M16N8K16};
use mlcc_ir::kernel::{Space, Ty};
use mlcc_ir::types::DType;
use mlcc_kernel_lang::{Recorder, Val, View};

/// f32 as `parts` 16-bit floats: each is what those before it leave.
fn split<'k>(floats: Val<'k>, dtype: DType, parts: u32) -> Parts<'k> {
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
    let ty = Ty::vector(DType::U32, floats.lanes());
    let float = ((floats.bits_as(ty) + 0x8000) & 0xffff_0000).bits_as(floats.ty()).named("float");
    (upper_halves(float), float)
}

/// The upper halves of floats: bf16, cut off.
fn upper_halves(floats: Val) -> Val {
    let lanes = floats.lanes();
    let halves = floats.bits_as(Ty::vector(DType::BF16, 2 * lanes));
    halves.shuffle((0..lanes).map(|i| 2 * i + 1))
}

/// As many as a number has.
type Parts<'k> = [Option<Val<'k>>; 3];

/// A matrix in shared memory.
#[derive(Clone, Copy)]
pub(super) struct Matrix<'k> {
    pub halves: Halves,
    parts: [Option<View<'k, 2>>; 3],
}

impl<'k> Matrix<'k> {
    pub fn new(k: &'k Recorder, name: &str, halves: Halves, rows: i64, size: i64) -> Matrix<'k> {
        let names = [name.to_string(), format!("{name}_low"), format!("{name}_lowest")];
        let part = |i: usize| k.alloc(&names[i], halves.dtype, [rows, size + PAD], Space::Shared);
        Matrix { halves, parts: [0, 1, 2].map(|i| (i < halves.parts as usize).then(|| part(i))) }
    }

    /// The numbers as they are stored.
    pub fn stored(self) -> Option<View<'k, 2>> {
        self.parts[0]
    }

    /// Stores f32.
    pub fn set(self, at: [Val<'k>; 2], floats: Val<'k>) {
        let halves = split(floats, self.halves.dtype, self.halves.parts);
        for (to, half) in self.parts.iter().zip(halves) {
            if let (Some(to), Some(half)) = (to, half) {
                to.set(at, half);
            }
        }
    }

    /// Fragments of 16 x 16 numbers from a row and a column on: as first factor, or two as second factor side by side. The matrix is that
    /// factor or, of a second one that is not `transposed`, that with rows and columns exchanged.
    pub fn load(self, [row, column]: [Val<'k>; 2], lane: Val<'k>, as_factor: Factor) -> Factors<'k> {
        // Of four matrices of 8 x 8, by the lanes that say where their rows begin.
        let (matrix, in_matrix) = (lane / 8, lane % 8);
        let [down, right] = match as_factor {
            Factor::First | Factor::SecondTransposed => [matrix % 2, matrix / 2],
            Factor::Second => [matrix / 2, matrix % 2],
        };
        let at = [row + down * 8 + in_matrix, column + right * 8];
        let transposed = as_factor == Factor::SecondTransposed;
        let part = |view: View<'k, 2>| view.load_matrices(at, 4, transposed).named("fragment");
        Factors { parts: self.parts.map(|view| view.map(part)) }
    }
}

/// What a matrix in shared memory is in a product.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Factor {
    /// Its rows are those of the product.
    First,
    /// Its rows are columns of the product.
    Second,
    /// Its columns are those of the product.
    SecondTransposed,
}

/// Fragments of numbers.
#[derive(Clone, Copy)]
pub(super) struct Factors<'k> {
    parts: Parts<'k>,
}

impl<'k> Factors<'k> {
    /// Of 8 f32 of a lane.
    pub fn of(floats: Val<'k>, halves: Halves) -> Factors<'k> {
        Factors { parts: split(floats, halves.dtype, halves.parts) }
    }

    /// The first or second of two fragments.
    pub fn half(self, second: bool) -> Factors<'k> {
        let elements = M16N8K16.b.elements();
        let first = if second { elements } else { 0 };
        Factors { parts: self.parts.map(|all| all.map(|all| all.shuffle(first..first + elements))) }
    }

    /// `sums + self * other`, small products first; those beyond the last part of `self` are beyond the last bit.
    pub fn add_to(self, sums: Val<'k>, other: Factors<'k>) -> Val<'k> {
        let parts = |of: &Parts<'k>| of.iter().flatten().count();
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
pub(super) fn side_by_side<'k>([left, right]: [Val<'k>; 2]) -> Val<'k> {
    left.shuffle_with(right, order(&M16N8K16.a, &M16N8K16.sums))
}

/// Where each element of a first factor is among those of two fragments of sums: every lane has its own.
fn order(to: &Fragment, from: &Fragment) -> Vec<u32> {
    let place = |e: u32| {
        let (row, column) = from.place(0, e % from.elements());
        (row, column + e / from.elements() * from.columns)
    };
    let find = |e: u32| (0..2 * from.elements()).find(|&of| place(of) == to.place(0, e));
    (0..to.elements()).filter_map(find).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A lane has the same elements of a first factor and of the sums beside each other, so none goes to another lane.
    #[test]
    fn sums_are_factors() {
        let (a, sums) = (&M16N8K16.a, &M16N8K16.sums);
        let order = order(a, sums);
        assert_eq!(order.len(), 8);
        for lane in 0..32 {
            for (e, &of) in order.iter().enumerate() {
                let (row, column) = sums.place(lane, of % 4);
                assert_eq!(a.place(lane, e as u32), (row, column + of / 4 * 8));
            }
        }
    }
}
