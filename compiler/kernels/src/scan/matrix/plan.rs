//! Choice of the way in which a scan over matrices runs: by the structure of its body, the sizes of the
//! state, and the machine.

use super::{MatrixScan, ROWS, StateShape, ThreadSplit};
use crate::machine::MachineKind;
use mlcc_ir::graph::ValueId;
use std::fmt;

/// The way in which rows of the states are shared and run.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum MatrixScanPlan {
    /// Lanes are rows, states are transposed on the stack; `vectors` vectors of rows run together, and
    /// sequences are prefetched `steps_ahead` steps ahead.
    Transposed { lanes: u32, vectors: i64, steps_ahead: i64 },
    /// Lanes are columns, states stay in registers; a worker takes `block_rows` at a time, of which
    /// `together` run together.
    Rows { lanes: u32, block_rows: i64, together: i64 },
    /// Threads that share a row, on a GPU; sequences are copied asynchronously.
    Threads { split: ThreadSplit, asynchronous: bool, block_rows: i64 },
}

impl MatrixScanPlan {
    pub fn choose(scan: &MatrixScan, machine: MachineKind) -> MatrixScanPlan {
        let StateShape { rows, columns, .. } = scan.shape;
        let block_rows = if rows % ROWS == 0 { ROWS } else { rows };
        let (lanes, sizes) = match machine {
            MachineKind::Cpu { lanes, sizes, .. } => (lanes, sizes),
            MachineKind::Gpu { asynchronous } => {
                return MatrixScanPlan::Threads {
                    split: ThreadSplit::for_shape(scan.shape),
                    asynchronous,
                    block_rows,
                };
            }
        };
        // Sums over the columns are in another order, so all lengths have the same.
        let gains = scan.length.as_const() != Some(1) || sizes.batch_invariant;
        let sizes = sizes.scan;
        if let Some(vectors) = transposed_vectors(scan, lanes, sizes.stack_bytes.into()).filter(|_| gains) {
            return MatrixScanPlan::Transposed { lanes, vectors, steps_ahead: sizes.steps_ahead.into() };
        }
        let vectors = (columns / i64::from(lanes)).max(1);
        let fits = |r: &i64| block_rows % r == 0 && r * vectors <= i64::from(sizes.state_vectors);
        MatrixScanPlan::Rows { lanes, block_rows, together: [4, 2, 1].into_iter().find(fits).unwrap_or(1) }
    }

    /// Rows of one iteration of the parallel loop.
    pub fn block_rows(self) -> i64 {
        match self {
            MatrixScanPlan::Transposed { lanes, vectors, .. } => vectors * i64::from(lanes),
            MatrixScanPlan::Rows { block_rows, .. } | MatrixScanPlan::Threads { block_rows, .. } => {
                block_rows
            }
        }
    }
}

/// Vectors of rows that run together; `None` if the scan has no transposed form: states have rows and
/// columns, sequences and results one of them; whole vectors of rows. A single step has nothing to gain from
/// it.
fn transposed_vectors(scan: &MatrixScan, lanes: u32, most_bytes: i64) -> Option<i64> {
    let StateShape { rows, columns, .. } = scan.shape;
    let most = if lanes == 16 { 4 } else { 2 };
    let fits = |v: &i64| {
        let block = v * i64::from(lanes);
        rows % block == 0 && 4 * block * columns * scan.carries as i64 <= most_bytes
    };
    let vectors = [4, 2, 1].into_iter().filter(|&v| v <= most).find(fits)?;
    let (carries, others) = scan.body.inputs.split_at(scan.carries);
    let matrix = |v: &ValueId| scan.extent(*v).is_matrix();
    let plain = carries.iter().all(matrix)
        && !others.iter().any(matrix)
        && !scan.body.outputs[scan.carries..].iter().any(|v| scan.extent(*v).columns);
    (plain && columns >= 2 && lanes >= 2).then_some(vectors)
}

impl fmt::Display for MatrixScanPlan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            MatrixScanPlan::Transposed { lanes, vectors, .. } => {
                write!(
                    f,
                    "lanes are rows, {vectors} vectors of {lanes}: sums over the columns need no sum over lanes"
                )
            }
            MatrixScanPlan::Rows { lanes, block_rows, together } => {
                write!(f, "lanes are columns, {lanes}; blocks of {block_rows} rows, {together} together: ")?;
                write!(f, "states stay in registers")
            }
            MatrixScanPlan::Threads { split: ThreadSplit { sharers, rows }, .. } => {
                write!(f, "{sharers} threads share a row, {rows} rows in a block")
            }
        }
    }
}
