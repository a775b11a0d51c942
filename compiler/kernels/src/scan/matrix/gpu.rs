//! The scan on a GPU: a thread per row, a block per head or part of one. Vectors along the columns, the same for all rows of a
//! head, are brought to shared memory by all threads of the block.

use super::step::{HeadRows, Staged, Step, Values};
use super::{MatrixScan, Shape};
use mlcc_kernel_lang::{Recorder, Val};
use std::ops::Range;

/// Lanes of a thread: what one load of a vector along the columns brings.
const LANES: u32 = 4;

/// One row of a block, in the thread that runs it.
struct RowThread<'a, 'k> {
    scan: &'a MatrixScan<'a, 'k>,
    at: HeadRows<'k>,
    t: Val<'k>,
    threads: i64,
    /// Whether there is such a row; `None` if there always is.
    inside: Option<Val<'k>>,
    staged: &'a Staged<'k>,
}

impl<'k> MatrixScan<'_, 'k> {
    /// GPU kernel body.
    pub(super) fn emit_threads(&self, threads: i64) {
        let (k, Shape { heads, rows, .. }) = (self.k, self.shape);
        let per_head = (rows + threads - 1) / threads;
        k.blocks("block", 0, heads * per_head, |block| {
            let (head, part) = (block / per_head, block % per_head);
            let staged = &self.alloc_staged();
            k.threads("t", threads, |t| {
                let row = part * threads + t;
                let inside = (rows % threads != 0).then(|| row.lt(rows));
                let at = HeadRows { head, row, rows: 1 };
                RowThread { scan: self, at, t, threads, inside, staged }.run();
            });
        });
    }

    fn alloc_staged(&self) -> Staged<'k> {
        let shared_by_rows = |&i: &usize| {
            let extent = self.input_extent(i);
            i >= self.carries && extent.columns && !extent.rows
        };
        let inputs = (0..self.body.inputs.len()).filter(shared_by_rows);
        inputs.map(|i| (i, self.k.shared("vector", [self.shape.columns]))).collect()
    }
}

impl<'k> RowThread<'_, 'k> {
    fn k(&self) -> &'k Recorder {
        self.scan.k
    }

    fn guarded(&self, body: impl FnOnce()) {
        match self.inside {
            Some(inside) => self.k().when(inside, body),
            None => body(),
        }
    }

    /// The row through all steps.
    fn run(&self) {
        let (k, scan) = (self.k(), self.scan);
        let step = Step::new(scan, LANES, self.at).with_staged(self.staged);
        let states = step.alloc_states();
        self.guarded(|| step.fill_states(&states));
        self.stage(k.int(0), scan.constants());
        k.serial("step", &scan.length, |time| {
            self.stage(time, scan.sequences());
            k.barrier();
            self.guarded(|| {
                let mut constants = Values::new();
                step.load_constants(&mut constants);
                step.one(time, &states, constants);
            });
            // The next step overwrites what slower threads still read.
            k.barrier();
        });
        self.guarded(|| step.close_states(&states));
    }

    /// Copies vectors along the columns to shared memory, thread by thread.
    fn stage(&self, time: Val<'k>, inputs: Range<usize>) {
        let (columns, threads) = (self.scan.shape.columns, self.threads);
        for i in inputs {
            let Some(to) = self.staged.get(&i) else { continue };
            let (from, start) = self.scan.input(i, self.at, 0, time);
            for first in (0..columns).step_by(threads as usize) {
                let c = self.t + first;
                let copy = || to.set([c], from.at([start + c]));
                match first + threads <= columns {
                    true => copy(),
                    false => self.k().when(c.lt(columns), copy),
                }
            }
        }
    }
}
