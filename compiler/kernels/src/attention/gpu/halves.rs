//! Operands of attention on tensor cores: matrices of 16-bit floats in shared memory, one or two of which are
//! the numbers.

use crate::attention::plan::PAD;
use crate::halves::{HalfSplit, SplitFragment, split_floats};
use mlcc_ir::kernel::MemorySpace;
use mlcc_kernel_lang::{BufferView, Recorder, Val};

/// A matrix in shared memory.
#[derive(Clone, Copy)]
pub(super) struct SharedMatrix<'k> {
    pub halves: HalfSplit,
    parts: [Option<BufferView<'k, 2>>; 3],
}

impl<'k> SharedMatrix<'k> {
    pub fn new(k: &'k Recorder, name: &str, halves: HalfSplit, rows: i64, size: i64) -> SharedMatrix<'k> {
        let names = [name.to_string(), format!("{name}_low"), format!("{name}_lowest")];
        let part = |i: usize| k.alloc(&names[i], halves.dtype, [rows, size + PAD], MemorySpace::Shared);
        SharedMatrix { halves, parts: [0, 1, 2].map(|i| (i < halves.parts as usize).then(|| part(i))) }
    }

    /// The numbers as they are stored.
    pub fn stored(self) -> Option<BufferView<'k, 2>> {
        self.parts[0]
    }

    /// Stores f32.
    pub fn store_floats(self, at: [Val<'k>; 2], floats: Val<'k>) {
        let halves = split_floats(floats, self.halves.dtype, self.halves.parts);
        for (to, half) in self.parts.iter().zip(halves) {
            if let (Some(to), Some(half)) = (to, half) {
                to.set(at, half);
            }
        }
    }

    /// Fragments of 16 x 16 numbers from a row and a column on: as first factor, or two as second factor side
    /// by side. The matrix is that factor or, of a second one that is not `transposed`, that with rows and
    /// columns exchanged.
    pub fn load(
        self,
        [row, column]: [Val<'k>; 2],
        lane: Val<'k>,
        as_factor: MmaOperandRole,
    ) -> SplitFragment<'k> {
        // Four matrices of 8 x 8, by the lanes that say where their rows begin.
        let (matrix, in_matrix) = (lane / 8, lane % 8);
        let [down, right] = match as_factor {
            MmaOperandRole::First | MmaOperandRole::SecondTransposed => [matrix % 2, matrix / 2],
            MmaOperandRole::Second => [matrix / 2, matrix % 2],
        };
        let at = [row + down * 8 + in_matrix, column + right * 8];
        let transposed = as_factor == MmaOperandRole::SecondTransposed;
        let part = |view: BufferView<'k, 2>| view.load_matrices(at, 4, transposed).named("fragment");
        SplitFragment { parts: self.parts.map(|view| view.map(part)) }
    }
}

/// The role of a matrix in shared memory in a product.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum MmaOperandRole {
    /// Its rows are those of the product.
    First,
    /// Its rows are columns of the product.
    Second,
    /// Its columns are those of the product.
    SecondTransposed,
}
