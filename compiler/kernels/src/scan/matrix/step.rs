//! One step of the body for a few rows of a state: values in registers, columns in vectors.

use super::arithmetic::Arithmetic;
use super::{Extent, MatrixScan};
use mlcc_ir::compute::RedOp;
use mlcc_ir::graph::ValueId;
use mlcc_ir::ops::Op;
use mlcc_kernel_lang::{Recorder, Val, View};
use std::collections::{BTreeMap, HashMap};

/// Rows of one head that run together.
#[derive(Clone, Copy)]
pub(super) struct HeadRows<'k> {
    pub head: Val<'k>,
    /// The first.
    pub row: Val<'k>,
    pub rows: usize,
}

/// The columns of one row, piece by piece; one entry for a value without columns.
type Row<'k> = Vec<Val<'k>>;

/// Values of the body: for each row that runs, or one for all.
pub(super) type Values<'k> = HashMap<ValueId, Vec<Row<'k>>>;

/// By input: where its vectors along the columns have been brought, on a GPU.
pub(super) type Staged<'k> = BTreeMap<usize, View<'k, 1>>;

pub(super) struct Step<'a, 'k> {
    scan: &'a MatrixScan<'a, 'k>,
    lanes: u32,
    at: HeadRows<'k>,
    /// First column and lanes of each piece of a row: whole vectors, then single columns.
    pieces: Vec<(i64, u32)>,
    arithmetic: Arithmetic<'a, 'k>,
    staged: Option<&'a Staged<'k>>,
}

impl<'a, 'k> Step<'a, 'k> {
    pub fn new(scan: &'a MatrixScan<'a, 'k>, lanes: u32, at: HeadRows<'k>) -> Step<'a, 'k> {
        let (columns, width) = (scan.shape.columns, i64::from(lanes));
        let end = columns / width * width;
        let vectors = (0..end).step_by(lanes as usize).map(|c| (c, lanes));
        let pieces = vectors.chain((end..columns).map(|c| (c, 1))).collect();
        let arithmetic = Arithmetic::new(scan.k, scan.body);
        Step { scan, lanes, at, pieces, arithmetic, staged: None }
    }

    /// The same where vectors along the columns have been brought to shared memory.
    pub fn with_staged(self, staged: &'a Staged<'k>) -> Step<'a, 'k> {
        Step { staged: Some(staged), ..self }
    }

    fn k(&self) -> &'k Recorder {
        self.scan.k
    }

    /// The rows through all steps.
    pub fn run(&self) {
        let states = self.alloc_states();
        self.fill_states(&states);
        let mut constants = Values::new();
        self.load_constants(&mut constants);
        self.k().serial("step", &self.scan.length, |time| self.one(time, &states, constants.clone()));
        self.close_states(&states);
    }

    // ---- rows in memory and in registers

    /// Elements of local memory that a row of a state takes: whole vectors, so that they can be kept in registers.
    fn stride(&self, extent: Extent) -> i64 {
        match extent.columns {
            true => (self.scan.shape.columns as usize).next_multiple_of(self.lanes as usize) as i64,
            false => 1,
        }
    }

    fn pieces(&self, extent: Extent) -> &[(i64, u32)] {
        if extent.columns { &self.pieces } else { &[(0, 1)] }
    }

    /// A row of consecutive elements from `first`.
    fn load(&self, (buf, first): (View<'k, 1>, Val<'k>), extent: Extent) -> Row<'k> {
        let load = |&(column, lanes): &(i64, u32)| buf.load([first + column], lanes).named("x");
        self.pieces(extent).iter().map(load).collect()
    }

    fn store(&self, (buf, first): (View<'k, 1>, Val<'k>), row: &Row<'k>, extent: Extent) {
        for (&(column, _), &value) in self.pieces(extent).iter().zip(row) {
            buf.set([first + column], value);
        }
    }

    /// Local memory of the carries.
    pub fn alloc_states(&self) -> Vec<View<'k, 1>> {
        let carries = 0..self.scan.carries;
        let len = |i| self.stride(self.scan.input_extent(i)) * self.at.rows as i64;
        carries.map(|i| self.k().registers("state", [len(i)])).collect()
    }

    /// Row `r` of a state.
    fn of_state(&self, state: View<'k, 1>, extent: Extent, r: usize) -> (View<'k, 1>, Val<'k>) {
        (state, self.k().int(r as i64 * self.stride(extent)))
    }

    pub fn fill_states(&self, states: &[View<'k, 1>]) {
        for (i, &state) in states.iter().enumerate() {
            let extent = self.scan.input_extent(i);
            for r in 0..self.at.rows {
                let row = self.load(self.scan.input(i, self.at, r as i64, self.k().int(0)), extent);
                self.store(self.of_state(state, extent, r), &row, extent);
            }
        }
    }

    pub fn close_states(&self, states: &[View<'k, 1>]) {
        for (i, &state) in states.iter().enumerate() {
            let extent = self.scan.input_extent(i);
            let out = self.k().flat(self.scan.outputs[i]);
            for r in 0..self.at.rows {
                let row = self.load(self.of_state(state, extent, r), extent);
                self.store((out, self.scan.offset(extent, self.at, r as i64)), &row, extent);
            }
        }
    }

    pub fn load_constants(&self, values: &mut Values<'k>) {
        for i in self.scan.constants() {
            self.load_input(i, self.k().int(0), values);
        }
    }

    fn load_input(&self, i: usize, time: Val<'k>, values: &mut Values<'k>) {
        let extent = self.scan.input_extent(i);
        let row = |r: usize| match self.staged.and_then(|staged| staged.get(&i)) {
            Some(&shared) => self.load((shared, self.k().int(0)), extent),
            None => self.load(self.scan.input(i, self.at, r as i64, time), extent),
        };
        let rows = (0..if extent.rows { self.at.rows } else { 1 }).map(row).collect();
        values.insert(self.scan.body.inputs[i], rows);
    }

    // ---- the body

    /// Evaluates the body; `values` holds the constants.
    pub fn one(&self, time: Val<'k>, states: &[View<'k, 1>], mut values: Values<'k>) {
        let scan = self.scan;
        for (i, &state) in states.iter().enumerate() {
            let extent = scan.input_extent(i);
            let rows = (0..self.at.rows).map(|r| self.load(self.of_state(state, extent, r), extent));
            values.insert(scan.body.inputs[i], rows.collect());
        }
        for i in scan.sequences() {
            self.load_input(i, time, &mut values);
        }
        self.evaluate(&mut values);
        for (i, v) in scan.body.outputs.iter().enumerate() {
            let extent = scan.extent(*v);
            for (r, row) in values[v].iter().enumerate().take(self.at.rows) {
                let to = match states.get(i) {
                    Some(&state) => self.of_state(state, extent, r),
                    None => {
                        let offset = scan.offset(extent, self.at, r as i64);
                        (self.k().flat(scan.outputs[i]), scan.at_step(extent, offset, time))
                    }
                };
                self.store(to, row, extent);
            }
        }
    }

    /// Adds the values of all nodes to those of the inputs.
    fn evaluate(&self, values: &mut Values<'k>) {
        for (_, node) in self.scan.body.live() {
            let out = node.outputs[0];
            if self.arithmetic.is_fused(out) {
                continue;
            }
            let extent = self.scan.extent(out);
            let mut all = Vec::new();
            for r in 0..if extent.rows { self.at.rows } else { 1 } {
                let piece = |(p, &(_, lanes)): (usize, &(i64, u32))| {
                    self.arithmetic.elementwise(node, lanes, &|v| at(values, v, r, p))
                };
                let row: Row = match node.op {
                    Op::Reduce { op, .. } => vec![self.reduce(op, node.inputs[0], r, values)],
                    _ => self.pieces(extent).iter().enumerate().map(piece).collect(),
                };
                all.push(row.into_iter().map(|value| value.named("y")).collect());
            }
            values.insert(out, all);
        }
    }

    /// Over the columns of row `r`: vectors first, then their lanes, then single columns.
    fn reduce(&self, op: RedOp, input: ValueId, r: usize, values: &Values<'k>) -> Val<'k> {
        let pieces = self.pieces(self.scan.extent(input));
        let mut wide: Option<Val> = None;
        let mut single: Option<Val> = None;
        for (p, &(_, lanes)) in pieces.iter().enumerate() {
            let so_far = if lanes > 1 { &mut wide } else { &mut single };
            let sum = self.arithmetic.reduce((op, input), lanes, *so_far, &|v| at(values, v, r, p));
            *so_far = Some(sum.named("sum"));
        }
        match (wide.map(|w| w.reduce_lanes(op.bin())), single) {
            (Some(w), Some(s)) => w.with(op.bin(), s),
            (Some(all), None) | (None, Some(all)) => all,
            (None, None) => unreachable!("a row has columns"),
        }
    }
}

/// Piece `p` of row `r` of a value, which may be broadcast there.
fn at<'k>(values: &Values<'k>, v: ValueId, r: usize, p: usize) -> Val<'k> {
    let rows = &values[&v];
    let row = &rows[if rows.len() > 1 { r } else { 0 }];
    row[if row.len() > 1 { p } else { 0 }]
}
