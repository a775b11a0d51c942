//! The product on a GPU, over row-major weights and those in fragments: for one activation row, rows of
//! weights for each warp ([`row`]); for more, tensor cores ([`matrix`]), or square tiles through shared
//! memory.

mod codes;
mod fragments;
mod gemv;
mod matrix;
mod operand;
mod tensor_core_gemv;

pub use gemv::{ActivationPrologue, GemvEpilogue, GemvPlan, emit_gpu_gemv};
pub use tensor_core_gemv::{TensorCoreGemvPlan, emit_tensor_core_gemv};

use super::problem::{FinishedSums, MatmulActivation, MatmulEpilogue, MatmulProblem, MatmulWeight};
use crate::params::KernelTarget;
use mlcc_ir::builder::KernelBuilder;
use mlcc_ir::kernel::ExprType;
use mlcc_ir::types::DType;
use mlcc_kernel_lang::{BufferView, Recorder, ThreadTeam, Val};
use mlcc_quant::{QuantError, TensorLayout, unpack_scalar};
use mlcc_target::MatrixTile;
use std::fmt;

/// Edge of a shared-memory tile in all three directions.
const EDGE: i64 = 32;
/// Threads along one side of a block of the tiled matmul; each computes 2 x 2 results.
const SIDE: i64 = 16;
/// Elements from one row of a shared tile to the next: odd, so that a column touches every bank.
const PITCH: i64 = EDGE + 1;

/// The plan of a product on a GPU.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum GpuMatmulPlan {
    /// A product of one row.
    Row(GemvPlan),
    /// A product of any number of rows: square tiles through shared memory.
    Tiles,
    /// The same on tensor cores.
    Matrix(MatrixTile),
}

impl fmt::Display for GpuMatmulPlan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            GpuMatmulPlan::Row(plan) => write!(f, "{plan}"),
            GpuMatmulPlan::Tiles => write!(f, "tiles of {EDGE} x {EDGE} in shared memory"),
            GpuMatmulPlan::Matrix(MatrixTile { rows, columns, warps: [down, across], stages }) => write!(
                f,
                "tensor cores, {rows} x {columns} results of {down} x {across} warps, {stages} stages"
            ),
        }
    }
}

/// The tile of a product of many rows on tensor cores, where the machine has them.
pub fn matrix_tile(target: &KernelTarget, problem: &MatmulProblem) -> Option<MatrixTile> {
    let codes =
        problem.activation == MatmulActivation::F16 && matches!(problem.weight, MatmulWeight::Packed(_));
    target.code_matrix.filter(|_| codes).or(target.matrix)
}

/// The plan for a machine that may have tensor cores. `single_row`: of one row (decode).
pub fn choose_gpu(
    tile: Option<MatrixTile>,
    problem: &MatmulProblem,
    single_row: bool,
) -> Result<GpuMatmulPlan, QuantError> {
    if single_row {
        return Ok(GpuMatmulPlan::Row(GemvPlan::new(problem.n, 1, false).for_problem(problem)));
    }
    let layout = layout(problem)?;
    let tile = tile.filter(|tile| matrix::fits_tensor_cores(problem, &layout, tile));
    Ok(tile.map_or(GpuMatmulPlan::Tiles, GpuMatmulPlan::Matrix))
}

fn layout(problem: &MatmulProblem) -> Result<TensorLayout, QuantError> {
    let MatmulProblem { weight, packing, n, k, w_offset, .. } = *problem;
    Ok(TensorLayout::new(weight.dtype(), packing, n, k)?.at_offset(w_offset))
}

/// Emits the product as one nest of block and thread loops: the whole body of a kernel. The epilogue receives
/// single sums, each in the one thread that holds it. Activations are floats.
pub fn emit_gpu_matmul(
    kb: &mut KernelBuilder,
    problem: &MatmulProblem,
    plan: &GpuMatmulPlan,
    epilogue: &mut MatmulEpilogue,
) -> Result<(), QuantError> {
    let layout = layout(problem)?;
    match *plan {
        GpuMatmulPlan::Row(plan) => {
            let epilogue: &mut GemvEpilogue = &mut |k, col, sums| {
                epilogue(k, FinishedSums { row: k.int(0), col, lanes: 1, acc: sums[0], mask: None });
            };
            return emit_gpu_gemv(kb, problem, plan, None, epilogue);
        }
        GpuMatmulPlan::Tiles => {
            Recorder::within(kb, |k| GpuMatmul { k, problem, layout: &layout }.matmul(epilogue));
        }
        GpuMatmulPlan::Matrix(tile) => {
            Recorder::within(kb, |k| {
                GpuMatmul { k, problem, layout: &layout }.tensor_core_matmul(&tile, epilogue)
            });
        }
    }
    Ok(())
}

#[derive(Clone, Copy)]
struct GpuMatmul<'k, 'a> {
    k: &'k Recorder,
    problem: &'a MatmulProblem,
    layout: &'a TensorLayout,
}

impl<'k> GpuMatmul<'k, '_> {
    /// Activations, `[m, k]`; rows may be padded.
    fn x(self) -> BufferView<'k, 2> {
        let stride = self.problem.activation.row_stride(self.problem.k) as i64;
        self.k.view(self.problem.x, [1, stride])
    }

    /// Activations as they were loaded, as f32.
    fn x_floats(self, loaded: Val<'k>) -> Val<'k> {
        match self.problem.activation {
            MatmulActivation::F32 | MatmulActivation::F16 | MatmulActivation::BF16 => {
                loaded.named("x").cast(DType::F32)
            }
            MatmulActivation::Codes(_) => panic!("integer activations are for CPU kernels"),
        }
    }

    /// One weight, f32.
    fn weight(self, row: Val<'k>, col: Val<'k>) -> Val<'k> {
        self.k.val(self.k.builder(|kb| unpack_scalar(kb, self.layout, self.problem.w, row.id(), col.id())))
    }

    /// Hands one sum to the epilogue.
    fn finish(self, epilogue: &mut MatmulEpilogue, row: Val<'k>, col: Val<'k>, sum: Val<'k>) {
        epilogue(self.k, FinishedSums { row, col, lanes: 1, acc: sum, mask: None });
    }

    // ---- matmul: square tiles through shared memory

    fn matmul(self, epilogue: &mut MatmulEpilogue) {
        let (k, m) = (self.k, self.k.val(self.problem.m));
        let tiles = |size: usize| (size as i64 + EDGE - 1) / EDGE;
        let team = ThreadTeam::new(k, SIDE * SIDE);
        k.blocks("bn", 0, tiles(self.problem.n), |bn| {
            k.blocks("bm", 1, (m + (EDGE - 1)) / EDGE, |bm| {
                let xs = k.shared("xs", [EDGE * PITCH]).rows(PITCH);
                let ws = k.shared("ws", [EDGE * PITCH]).rows(PITCH);
                let acc = k.registers("acc", [4]);
                let (row0, col0) = (bm * EDGE, bn * EDGE);
                team.run(|_| acc.set([0], k.literal(0.0, ExprType::vector(DType::F32, 4))));
                k.serial("step", tiles(self.problem.k), |step| {
                    team.run(|thread| self.stage((xs, ws), (row0, col0, step * EDGE), thread));
                    k.barrier();
                    team.run(|thread| self.multiply((xs, ws), acc, thread));
                    k.barrier();
                });
                team.run(|thread| {
                    for (i, (r, c)) in corners(thread).into_iter().enumerate() {
                        let (row, col) = (row0 + r, col0 + c);
                        k.when(row.lt(m) & col.lt(self.problem.n as i64), || {
                            self.finish(epilogue, row, col, acc.at([i as i64]).named("sum"));
                        });
                    }
                });
            });
        });
    }

    /// Fills both shared tiles; places outside of the matrices become zero (x) or repeat the edge (w).
    fn stage(
        self,
        (xs, ws): (BufferView<'k, 2>, BufferView<'k, 2>),
        (row0, col0, k0): (Val<'k>, Val<'k>, Val<'k>),
        thread: Val<'k>,
    ) {
        let (m, n_last, k_end) =
            (self.k.val(self.problem.m), self.problem.n as i64 - 1, self.problem.k as i64);
        for i in 0..EDGE * EDGE / (SIDE * SIDE) {
            let element = thread + i * SIDE * SIDE;
            let (r, c) = (element / EDGE, element % EDGE);
            let (row, col, k) = (row0 + r, col0 + r, k0 + c);
            let x = self.x().load_where(row.lt(m) & k.lt(k_end), [row, k], 1);
            xs.set([r, c], self.x_floats(x));
            ws.set([r, c], self.weight(col.min(n_last), k.min(k_end - 1)));
        }
    }

    /// `acc += x tile * w tile` for the four results of a thread.
    fn multiply(
        self,
        (xs, ws): (BufferView<'k, 2>, BufferView<'k, 2>),
        acc: BufferView<'k, 1>,
        thread: Val<'k>,
    ) {
        self.k.serial("k", EDGE, |k| {
            for (i, (r, c)) in corners(thread).into_iter().enumerate() {
                let i = [i as i64];
                acc.set(i, xs.at([r, k]).fma(ws.at([c, k]), acc.at(i)));
            }
        });
    }
}

/// The four results of a thread within its tile: (row, column).
fn corners(thread: Val) -> [(Val, Val); 4] {
    let (r, c) = (thread / SIDE, thread % SIDE);
    let (r1, c1) = (r + SIDE, c + SIDE);
    [(r, c), (r, c1), (r1, c), (r1, c1)]
}
