//! The product on a CPU, over weights in tiles of 16 rows.
//!
//! Workers take contiguous runs of slices of the weights; for each slice, register tiles of activation rows;
//! for each of those, k with the sums of all its rows in registers. So a tile is read from memory once, in
//! order, and from cache for all further rows. Lanes are rows of w: activations are broadcast and no sum
//! crosses lanes.

mod activations;
mod bf16;
mod float_panels;
mod floats;
mod integers;
mod microtile;
mod panels;
mod prefetch;
mod rows;
mod skinny_gemm;
pub(super) mod slice;

use super::plan::{CpuPlan, MatmulShares};
use super::problem::{MatmulEpilogue, MatmulProblem};
use mlcc_ir::builder::KernelBuilder;
use mlcc_kernel_lang::Recorder;
use slice::{CpuMatmul, RowRange};

/// Emits a product for a CPU. Panics where x or w contradict their declared types (a bug in lowering), as the
/// builder does. int8 activations need packed weights.
///
/// Gives the number of slices of columns that workers share out: equal numbers mean equal columns per worker.
/// None where it depends on the number of rows, or workers share rows too.
pub fn emit_matmul(
    kb: &mut KernelBuilder,
    problem: &MatmulProblem,
    plan: &CpuPlan,
    epilogue: &mut MatmulEpilogue,
) -> Option<i64> {
    Recorder::within(kb, |k| {
        let cpu = CpuMatmul::new(k, problem, plan);
        match (plan.shares, plan.chunk) {
            (MatmulShares::SlicesAndChunks, Some(chunk)) => {
                slices_and_chunks(cpu, chunk.into(), epilogue);
                None
            }
            _ => {
                cpu.all_rows(RowRange { first: k.int(0), count: cpu.row_count() }, epilogue);
                cpu.tall_tile().is_none().then(|| cpu.slice_count(plan.tiles))
            }
        }
    })
}

/// Every slice of the weights against every chunk of `chunk` rows: what workers share out.
fn slices_and_chunks(cpu: CpuMatmul, chunk: i64, epilogue: &mut MatmulEpilogue) {
    let (m, tiles) = (cpu.row_count(), cpu.plan.tiles);
    let slices = cpu.slice_count(tiles);
    cpu.k.par("item", m.div_ceil(chunk) * slices, |item| {
        let slice = (item % slices).named("slice");
        let first = (item / slices * chunk).named("first");
        let count = (m - first).min(chunk).named("count");
        cpu.each_slice(tiles, slice, |slice| {
            cpu.rows_of_slice(slice, RowRange { first, count }, epilogue);
        });
    });
}
