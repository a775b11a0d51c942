//! Segmented products: rows meet the matrices that were chosen for them (experts). All rows of a matrix go
//! together through the product of many rows, so that its weights are read and unpacked once for them,
//! whatever the order of the choices.
//!
//! These rows come from a list of all choices in the order of their matrices (a counting sort), which every
//! worker makes separately: a few thousand numbers, against thousands of multiplications for each of them.
//! The workers then share the columns of each matrix, so that a matrix with many rows keeps all of them busy.

use super::cpu::slice::{CpuMatmul, ExpertMatrix, RowRange};
use super::plan::CpuPlan;
use super::problem::{MatmulEpilogue, MatmulProblem};
use mlcc_ir::builder::KernelBuilder;
use mlcc_ir::kernel::{BufId, MemorySpace};
use mlcc_ir::types::DType;
use mlcc_kernel_lang::{BufferView, Recorder, Val};
use mlcc_quant::TILE;

/// The matrices that rows of x chose.
#[derive(Clone, Copy, Debug)]
pub struct ExpertChoice {
    /// i32 `[rows, slots]`: a matrix below `experts` for each row of the result.
    pub ids: BufId,
    pub experts: usize,
    pub slots: i64,
    /// True if all slots of a row share one row of x, else each has its own.
    pub shared: bool,
}

/// Most rows of the result whose choices are sorted at a time: 16 KiB on the stack.
const LIST: i64 = 4096;

/// Emits, for a CPU, the product of each of `problem.m` rows with the matrices that it chose; `problem.n` is
/// the number of rows of one matrix (whole tiles), the epilogue sees row `row * slots + slot`. Codes of
/// integer activations come one row after the other.
///
/// Gives the number of slices of columns that workers share out, as [`super::emit_matmul`] does.
pub fn emit_experts(
    kb: &mut KernelBuilder,
    problem: &MatmulProblem,
    plan: &CpuPlan,
    choice: &ExpertChoice,
    epilogue: &mut MatmulEpilogue,
) -> i64 {
    assert!(problem.n.is_multiple_of(TILE), "a matrix has whole tiles");
    Recorder::within(kb, |k| {
        let experts = ExpertMatmul { cpu: CpuMatmul::new(k, problem, plan), choice, ids: k.flat(choice.ids) };
        match k.as_int(experts.cpu.row_count()) {
            Some(1) => experts.gemv(epilogue),
            _ => experts.many_rows(epilogue),
        }
        experts.cpu.slice_count(plan.tiles)
    })
}

#[derive(Clone, Copy)]
struct ExpertMatmul<'k, 'a> {
    cpu: CpuMatmul<'k, 'a>,
    choice: &'a ExpertChoice,
    ids: BufferView<'k, 1>,
}

impl<'k, 'a> ExpertMatmul<'k, 'a> {
    /// One matrix after the other.
    fn gemv(self, epilogue: &mut MatmulEpilogue) {
        let k = self.cpu.k;
        k.serial("slot", self.choice.slots, |slot| {
            let chosen = ExpertMatrix { last: slot, ..self.matrix(self.expert(slot)) };
            self.of(chosen).chunk_of_rows(RowRange { first: slot, count: k.int(1) }, epilogue);
        });
    }

    /// Computes many rows, as many as can be sorted at a time, matrix by matrix.
    fn many_rows(self, epilogue: &mut MatmulEpilogue) {
        let (k, m, slots) = (self.cpu.k, self.cpu.row_count(), self.choice.slots);
        let experts = self.choice.experts as i64;
        let together = (LIST / slots).max(1);
        let list = k.alloc("rows", DType::I32, [together * slots], MemorySpace::Stack);
        // First the end of each matrix's rows, shifted by one: what is before the rows of matrix `e` lies at
        // `e`.
        let bounds = k.alloc("bounds", DType::I32, [experts + 2], MemorySpace::Stack);
        k.serial("pass", m.div_ceil(together), |pass| {
            let before = pass * together;
            let count = (m - before).min(together);
            self.sort(RowRange { first: before * slots, count: count * slots }, list, bounds);
            let bound = |at: Val<'k>, name| bounds.at([at]).cast(DType::I64).named(name);
            let zero = Some(bound(k.int(0), "zero"));
            k.serial("expert", experts, |expert| {
                let (first, end) = (bound(expert, "begin"), bound(expert + 1, "end"));
                k.when(first.lt(end), || {
                    let last = end + -1;
                    let chosen = ExpertMatrix { list: Some(list), last, zero, ..self.matrix(expert) };
                    self.of(chosen).all_rows(RowRange { first, count: end - first }, epilogue);
                });
            });
        });
    }

    /// The product with one matrix.
    fn of(self, chosen: ExpertMatrix<'k>) -> CpuMatmul<'k, 'a> {
        CpuMatmul { expert: Some(chosen), ..self.cpu }
    }

    /// The place of a matrix among the weights.
    fn matrix(self, expert: Val<'k>) -> ExpertMatrix<'k> {
        let problem = self.cpu.problem;
        let first = (expert * (problem.n / TILE * problem.tile_len()) as i64).named("matrix");
        let share = if self.choice.shared { self.choice.slots } else { 1 };
        ExpertMatrix { first, list: None, last: expert, share, zero: None }
    }

    /// The matrix of a row of the result.
    fn expert(self, row: Val<'k>) -> Val<'k> {
        self.ids.at([row]).cast(DType::I64).named("expert")
    }

    /// Lists some rows of the result in the order of their matrices; those of matrix `e` lie from `bounds[e]`
    /// to `bounds[e + 1]`.
    fn sort(self, rows: RowRange<'k>, list: BufferView<'k, 1>, bounds: BufferView<'k, 1>) {
        let (k, experts) = (self.cpu.k, self.choice.experts as i64);
        k.serial("e", experts + 2, |e| bounds.set([e], k.int32(0)));
        // How many rows matrix `e` has, at `e + 2`.
        k.serial("i", rows.count, |i| {
            let at = [self.expert(rows.first + i) + 2];
            bounds.set(at, bounds.at(at) + 1);
        });
        // Where its rows begin, at `e + 1`.
        k.serial("e", experts, |e| bounds.set([e + 2], bounds.at([e + 1]) + bounds.at([e + 2])));
        // Each row that is placed moves the start of the next one, up to the end of them all.
        k.serial("i", rows.count, |i| {
            let row = rows.first + i;
            let at = [self.expert(row) + 1];
            let place = bounds.at(at).named("place");
            bounds.set(at, place + 1);
            list.set([place.cast(DType::I64)], row.cast(DType::I32));
        });
    }
}
