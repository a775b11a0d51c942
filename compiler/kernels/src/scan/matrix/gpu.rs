//! The scan on a GPU: neighbouring lanes of a warp share the columns of a row, a block has some rows of a
//! head. The other inputs of a step are the same for all rows of a head, or a number for each of them; they
//! come through a ring in shared memory.

use super::step::{HeadRows, RowScan, RowSharers, StagedSequences};
use super::{MatrixScan, StateExtent, StateShape};
use crate::scan::ring::{SequenceRead, SequenceRing};
use mlcc_kernel_lang::{ThreadTeam, Val, WARP};

/// Lanes of the vectors of a thread: 16 bytes.
const LANES: u32 = 4;
/// Threads of a block: few, since every head has several blocks then, and many heads are rare.
const THREADS: i64 = 64;
/// Columns of a thread, where a warp has lanes enough: state and vectors of a step stay in registers, and
/// there is something to do between two exchanges of sums.
const COLUMNS: i64 = 16;

/// The number of threads that share a row, and of the rows of a block.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct ThreadSplit {
    pub sharers: i64,
    pub rows: i64,
}

impl ThreadSplit {
    pub(super) fn for_shape(shape: StateShape) -> ThreadSplit {
        let whole = |sharers: &i64| shape.columns % (sharers * i64::from(LANES)) == 0;
        let wanted = |sharers: &i64| sharers * COLUMNS <= shape.columns;
        let powers = (1..=WARP.ilog2()).rev().map(|bits| 1 << bits);
        let sharers = powers.filter(wanted).find(whole).unwrap_or(1);
        ThreadSplit { sharers, rows: THREADS / sharers }
    }

    fn threads(self) -> i64 {
        self.sharers * self.rows
    }
}

impl<'k> MatrixScan<'_, 'k> {
    /// GPU kernel body.
    pub(super) fn emit_threads(&self, split: ThreadSplit, asynchronous: bool) {
        let (k, StateShape { heads, rows, .. }) = (self.k, self.shape);
        let per_head = (rows + split.rows - 1) / split.rows;
        k.blocks("block", 0, heads * per_head, |block| {
            let (head, part) = (block / per_head, block % per_head);
            let first = (part * split.rows).named("first");
            let block = StateRows { scan: self, split, head, first };
            match self.length.as_const() {
                Some(1) => ThreadTeam::new(k, split.threads()).run(|t| block.step(t).run()),
                _ => block.run(asynchronous),
            }
        });
    }
}

/// Rows of a head.
#[derive(Clone, Copy)]
struct StateRows<'a, 'k> {
    scan: &'a MatrixScan<'a, 'k>,
    split: ThreadSplit,
    head: Val<'k>,
    /// The first.
    first: Val<'k>,
}

impl<'a, 'k> StateRows<'a, 'k> {
    /// The row of a thread.
    fn step(self, t: Val<'k>) -> RowScan<'a, 'k> {
        let ThreadSplit { sharers: count, rows } = self.split;
        let (all, row) = (self.scan.shape.rows, (self.first + t / count).named("row"));
        let inside = (all % rows != 0).then(|| row.lt(all).named("inside"));
        let row = if inside.is_some() { row.min(all - 1) } else { row };
        self.of_row(row, RowSharers { count, lane: (t % count).named("lane"), inside })
    }

    fn of_row(self, row: Val<'k>, sharers: RowSharers<'k>) -> RowScan<'a, 'k> {
        RowScan::new(self.scan, LANES, HeadRows { head: self.head, row, rows: 1 }).with_sharers(sharers)
    }

    /// The rows through all steps.
    fn run(self, asynchronous: bool) {
        let (scan, team) = (self.scan, ThreadTeam::new(self.scan.k, self.split.threads()));
        let staged: Vec<usize> = scan.sequences().filter(|&i| !scan.input_extent(i).is_matrix()).collect();
        let sequences = staged.iter().map(|&i| self.sequence(i)).collect();
        let ring = SequenceRing::new(scan.k, team, asynchronous, sequences);
        let sharers = RowSharers { count: self.split.sharers, lane: scan.k.int(0), inside: None };
        let any = self.of_row(self.first, sharers);
        let (states, constants) = (any.alloc_states(), any.alloc_constants());
        team.run(|t| {
            let step = self.step(t);
            step.fill_states(&states);
            step.fill_constants(&constants);
        });
        ring.run(&scan.length, |t, steps| {
            let step = self.step(t);
            steps.each(|_, time, place| {
                let view = |(n, &i): (usize, &usize)| {
                    let part = ring.at(n, place);
                    let per_row = scan.input_extent(i).rows;
                    (i, if per_row { part.offset_by(step.row() - self.first) } else { part })
                };
                let staged: StagedSequences = staged.iter().enumerate().map(view).collect();
                step.run_step(time, &states, step.constants(&constants), &staged);
            });
        });
        team.run(|t| self.step(t).close_states(&states));
    }

    /// The part of a sequence that the rows read.
    fn sequence(self, i: usize) -> SequenceRead<'k> {
        let (scan, extent) = (self.scan, self.scan.input_extent(i));
        let StateShape { rows, columns, .. } = scan.shape;
        let (elements, multiple) = match extent {
            StateExtent { columns: true, .. } => (columns, columns),
            // The first row is that of a head and a multiple of a block's, which is a power of two.
            StateExtent { rows: true, .. } => {
                (self.split.rows.min(rows), 1 << (rows | self.split.rows).trailing_zeros())
            }
            _ => (1, 1),
        };
        let at = HeadRows { head: self.head, row: self.first, rows: 1 };
        let (from, first) = (scan.k.flat(scan.inputs[i]), scan.offset(extent, at, 0));
        SequenceRead { from, of_step: extent.elements(scan.shape), first, elements, multiple }
    }
}
