//! Which way a scan over matrices is run: by the structure of its body, the sizes of the state, and the machine.

use super::{MatrixScan, ROWS, Shape, Split};
use crate::machine::Machine;
use mlcc_ir::graph::ValueId;
use std::fmt;

/// How rows of the states are shared out and run.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Plan {
    /// Lanes are rows, states are transposed on the stack; `vectors` vectors of rows run together, and sequences are prefetched
    /// `steps_ahead` steps ahead.
    Transposed { lanes: u32, vectors: i64, steps_ahead: i64 },
    /// Lanes are columns, states stay in registers; a worker takes `block_rows` at a time, of which `together` run together.
    Rows { lanes: u32, block_rows: i64, together: i64 },
    /// Threads that share a row, on a GPU; sequences are copied asynchronously.
    Threads { split: Split, asynchronous: bool, block_rows: i64 },
}

impl Plan {
    pub fn choose(scan: &MatrixScan, machine: Machine) -> Plan {
        let Shape { rows, columns, .. } = scan.shape;
        let block_rows = if rows % ROWS == 0 { ROWS } else { rows };
        let (lanes, sizes) = match machine {
            Machine::Cpu { lanes, sizes, .. } => (lanes, sizes),
            Machine::Gpu { asynchronous } => {
                return Plan::Threads { split: Split::of(scan.shape), asynchronous, block_rows };
            }
        };
        // Sums over the columns are in another order, so all lengths have the same.
        let gains = scan.length.as_const() != Some(1) || sizes.batch_invariant;
        let sizes = sizes.scan;
        if let Some(vectors) = transposed_vectors(scan, lanes, sizes.stack_bytes.into()).filter(|_| gains) {
            return Plan::Transposed { lanes, vectors, steps_ahead: sizes.steps_ahead.into() };
        }
        let vectors = (columns / i64::from(lanes)).max(1);
        let fits = |r: &i64| block_rows % r == 0 && r * vectors <= i64::from(sizes.state_vectors);
        Plan::Rows { lanes, block_rows, together: [4, 2, 1].into_iter().find(fits).unwrap_or(1) }
    }

    /// Rows of one iteration of the parallel loop.
    pub fn block_rows(self) -> i64 {
        match self {
            Plan::Transposed { lanes, vectors, .. } => vectors * i64::from(lanes),
            Plan::Rows { block_rows, .. } | Plan::Threads { block_rows, .. } => block_rows,
        }
    }
}

/// Vectors of rows that run together; `None` if the scan has no transposed form: states have rows and columns, sequences and
/// results one of them; whole vectors of rows. A single step has nothing to gain from it.
fn transposed_vectors(scan: &MatrixScan, lanes: u32, most_bytes: i64) -> Option<i64> {
    let Shape { rows, columns, .. } = scan.shape;
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

impl fmt::Display for Plan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Plan::Transposed { lanes, vectors, .. } => {
                write!(
                    f,
                    "lanes are rows, {vectors} vectors of {lanes}: sums over the columns need no sum over lanes"
                )
            }
            Plan::Rows { lanes, block_rows, together } => {
                write!(f, "lanes are columns, {lanes}; blocks of {block_rows} rows, {together} together: ")?;
                write!(f, "states stay in registers")
            }
            Plan::Threads { split: Split { sharers, rows }, .. } => {
                write!(f, "{sharers} threads share a row, {rows} rows in a block")
            }
        }
    }
}
