//! One step of the body for a few rows of a state: values in registers, columns in vectors. On a GPU
//! neighbouring lanes of a warp share the columns of a row.

use super::arithmetic::BodyArithmetic;
use super::{MatrixScan, StateExtent};
use mlcc_ir::compute::RedOp;
use mlcc_ir::graph::ValueId;
use mlcc_ir::ops::Op;
use mlcc_kernel_lang::{BufferView, Recorder, Val, fold_lanes};
use std::collections::{BTreeMap, HashMap};
use std::ops::Range;

/// Rows of one head that run together.
#[derive(Clone, Copy)]
pub(super) struct HeadRows<'k> {
    pub head: Val<'k>,
    /// The first.
    pub row: Val<'k>,
    pub rows: usize,
}

/// The columns of one row, piece by piece; one entry for a value without columns.
type RowVectors<'k> = Vec<Val<'k>>;

/// Values of the body: for each row that runs, or one for all.
pub(super) type RowValues<'k> = HashMap<ValueId, Vec<RowVectors<'k>>>;

/// The parts of sequences in shared memory, by number among all inputs: from the first column or the row that
/// runs.
pub(super) type StagedSequences<'k> = BTreeMap<usize, BufferView<'k, 1>>;

/// Lanes of a warp that share a row: each has every `count`-th vector of the columns.
#[derive(Clone, Copy)]
pub(super) struct RowSharers<'k> {
    pub count: i64,
    /// Number of the lane among them.
    pub lane: Val<'k>,
    /// True if there are such rows; `None` if there always are. If not, the lanes compute others.
    pub inside: Option<Val<'k>>,
}

/// A vector of a row, or a single column.
#[derive(Clone, Copy)]
struct ColumnVector {
    /// Its place in a row in memory, from the first column of the lane.
    column: i64,
    /// Its place in registers.
    place: i64,
    lanes: u32,
}

pub(super) struct RowScan<'a, 'k> {
    scan: &'a MatrixScan<'a, 'k>,
    lanes: u32,
    at: HeadRows<'k>,
    /// Whole vectors, then single columns.
    pieces: Vec<ColumnVector>,
    arithmetic: BodyArithmetic<'a, 'k>,
    sharers: Option<RowSharers<'k>>,
}

impl<'a, 'k> RowScan<'a, 'k> {
    pub fn new(scan: &'a MatrixScan<'a, 'k>, lanes: u32, at: HeadRows<'k>) -> RowScan<'a, 'k> {
        let (columns, width) = (scan.shape.columns, i64::from(lanes));
        let end = columns / width * width;
        let vectors = (0..end).step_by(lanes as usize).map(|c| (c, lanes));
        let piece = |(column, lanes)| ColumnVector { column, place: column, lanes };
        let pieces = vectors.chain((end..columns).map(|c| (c, 1))).map(piece).collect();
        let arithmetic = BodyArithmetic::new(scan.k, scan.body);
        RowScan { scan, lanes, at, pieces, arithmetic, sharers: None }
    }

    /// The same where lanes share the columns, which are whole vectors for each.
    pub fn with_sharers(self, sharers: RowSharers<'k>) -> RowScan<'a, 'k> {
        let step = RowScan { sharers: Some(sharers), ..self };
        if sharers.count == 1 {
            return step;
        }
        let width = i64::from(step.lanes);
        let of_lane = step.scan.shape.columns / (width * sharers.count);
        let piece =
            |i| ColumnVector { column: i * width * sharers.count, place: i * width, lanes: step.lanes };
        RowScan { pieces: (0..of_lane).map(piece).collect(), ..step }
    }

    fn k(&self) -> &'k Recorder {
        self.scan.k
    }

    /// The first row.
    pub fn row(&self) -> Val<'k> {
        self.at.row
    }

    /// The rows through all steps.
    pub fn run(&self) {
        let states = self.alloc_states();
        self.fill_states(&states);
        let mut constants = RowValues::new();
        self.load_constants(&mut constants);
        let nothing = StagedSequences::new();
        self.k().serial("step", &self.scan.length, |time| {
            self.run_step(time, &states, constants.clone(), &nothing)
        });
        self.close_states(&states);
    }

    // ---- rows in memory and in registers

    /// Elements of local memory that a row of a state takes: whole vectors, so that they can be kept in
    /// registers.
    fn stride(&self, extent: StateExtent) -> i64 {
        let of_lane = self.scan.shape.columns / self.sharers.map_or(1, |sharers| sharers.count);
        match extent.columns {
            true => (of_lane as usize).next_multiple_of(self.lanes as usize) as i64,
            false => 1,
        }
    }

    fn column_vectors(&self, extent: StateExtent) -> &[ColumnVector] {
        const NUMBER: [ColumnVector; 1] = [ColumnVector { column: 0, place: 0, lanes: 1 }];
        if extent.columns { &self.pieces } else { &NUMBER }
    }

    /// The first column of the lane, for a value with columns.
    fn of_lane(&self, first: Val<'k>, extent: StateExtent) -> Val<'k> {
        match self.sharers {
            Some(sharers) if extent.columns && sharers.count > 1 => {
                first + sharers.lane * i64::from(self.lanes)
            }
            _ => first,
        }
    }

    /// A row of consecutive elements from `first`.
    fn load(&self, (buf, first): (BufferView<'k, 1>, Val<'k>), extent: StateExtent) -> RowVectors<'k> {
        let first = self.of_lane(first, extent);
        let load = |piece: &ColumnVector| buf.load([first + piece.column], piece.lanes).named("x");
        self.column_vectors(extent).iter().map(load).collect()
    }

    /// Lanes that share a row store a number of it once.
    fn store(&self, (buf, first): (BufferView<'k, 1>, Val<'k>), row: &RowVectors<'k>, extent: StateExtent) {
        let at = self.of_lane(first, extent);
        let store = || {
            for (piece, &value) in self.column_vectors(extent).iter().zip(row) {
                buf.set([at + piece.column], value);
            }
        };
        let one_lane = |s: RowSharers<'k>| (s.count > 1 && !extent.columns).then(|| s.lane.equals(0));
        let condition = self.sharers.and_then(|s| match (s.inside, one_lane(s)) {
            (Some(inside), Some(one)) => Some(inside & one),
            (inside, one) => inside.or(one),
        });
        match condition {
            Some(condition) => self.k().when(condition, store),
            None => store(),
        }
    }

    /// Registers of the carries.
    pub fn alloc_states(&self) -> Vec<BufferView<'k, 1>> {
        self.alloc("state", 0..self.scan.carries)
    }

    /// Registers of the constants.
    pub fn alloc_constants(&self) -> Vec<BufferView<'k, 1>> {
        self.alloc("constant", self.scan.constants())
    }

    fn alloc(&self, name: &str, inputs: Range<usize>) -> Vec<BufferView<'k, 1>> {
        let len = |i| self.stride(self.scan.input_extent(i)) * self.at.rows as i64;
        inputs.map(|i| self.k().registers(name, [len(i)])).collect()
    }

    /// Row `r` of a state.
    fn state(&self, state: BufferView<'k, 1>, extent: StateExtent, r: usize) -> RowVectors<'k> {
        let first = r as i64 * self.stride(extent);
        let load = |piece: &ColumnVector| state.load([first + piece.place], piece.lanes).named("x");
        self.column_vectors(extent).iter().map(load).collect()
    }

    fn set_state(&self, state: BufferView<'k, 1>, extent: StateExtent, r: usize, row: &RowVectors<'k>) {
        let first = r as i64 * self.stride(extent);
        for (piece, &value) in self.column_vectors(extent).iter().zip(row) {
            state.set([first + piece.place], value);
        }
    }

    pub fn fill_states(&self, states: &[BufferView<'k, 1>]) {
        self.fill(0..self.scan.carries, states);
    }

    pub fn fill_constants(&self, constants: &[BufferView<'k, 1>]) {
        self.fill(self.scan.constants(), constants);
    }

    fn fill(&self, inputs: Range<usize>, registers: &[BufferView<'k, 1>]) {
        for (i, &to) in inputs.zip(registers) {
            let extent = self.scan.input_extent(i);
            for r in 0..self.at.rows {
                let row = self.load(self.scan.input(i, self.at, r as i64, self.k().int(0)), extent);
                self.set_state(to, extent, r, &row);
            }
        }
    }

    pub fn close_states(&self, states: &[BufferView<'k, 1>]) {
        for (i, &state) in states.iter().enumerate() {
            let extent = self.scan.input_extent(i);
            let out = self.k().flat(self.scan.outputs[i]);
            for r in 0..self.at.rows {
                let row = self.state(state, extent, r);
                self.store((out, self.scan.offset(extent, self.at, r as i64)), &row, extent);
            }
        }
    }

    pub fn load_constants(&self, values: &mut RowValues<'k>) {
        for i in self.scan.constants() {
            self.load_input(i, self.k().int(0), values, &StagedSequences::new());
        }
    }

    /// The constants from registers.
    pub fn constants(&self, registers: &[BufferView<'k, 1>]) -> RowValues<'k> {
        let value = |(i, &constant): (usize, &BufferView<'k, 1>)| {
            let extent = self.scan.input_extent(i);
            let rows = (0..self.at.rows).map(|r| self.state(constant, extent, r)).collect();
            (self.scan.body.inputs[i], rows)
        };
        self.scan.constants().zip(registers).map(value).collect()
    }

    fn load_input(&self, i: usize, time: Val<'k>, values: &mut RowValues<'k>, staged: &StagedSequences<'k>) {
        let extent = self.scan.input_extent(i);
        let row = |r: usize| match staged.get(&i) {
            Some(&shared) => {
                self.load((shared, self.k().int(if extent.rows { r as i64 } else { 0 })), extent)
            }
            None => self.load(self.scan.input(i, self.at, r as i64, time), extent),
        };
        let rows = (0..if extent.rows { self.at.rows } else { 1 }).map(row).collect();
        values.insert(self.scan.body.inputs[i], rows);
    }

    // ---- the body

    /// Evaluates the body; `values` holds the constants.
    pub fn run_step(
        &self,
        time: Val<'k>,
        states: &[BufferView<'k, 1>],
        mut values: RowValues<'k>,
        staged: &StagedSequences<'k>,
    ) {
        let scan = self.scan;
        for (i, &state) in states.iter().enumerate() {
            let extent = scan.input_extent(i);
            let rows = (0..self.at.rows).map(|r| self.state(state, extent, r));
            values.insert(scan.body.inputs[i], rows.collect());
        }
        for i in scan.sequences() {
            self.load_input(i, time, &mut values, staged);
        }
        self.evaluate(&mut values);
        for (i, v) in scan.body.outputs.iter().enumerate() {
            let extent = scan.extent(*v);
            for (r, row) in values[v].iter().enumerate().take(self.at.rows) {
                if let Some(&state) = states.get(i) {
                    self.set_state(state, extent, r, row);
                    continue;
                }
                let offset = scan.offset(extent, self.at, r as i64);
                let to = (self.k().flat(scan.outputs[i]), scan.at_step(extent, offset, time));
                self.store(to, row, extent);
            }
        }
    }

    /// Adds the values of all nodes to those of the inputs.
    fn evaluate(&self, values: &mut RowValues<'k>) {
        for (_, node) in self.scan.body.live_nodes() {
            let out = node.outputs[0];
            if self.arithmetic.is_fused(out) {
                continue;
            }
            let extent = self.scan.extent(out);
            let mut all = Vec::new();
            for r in 0..if extent.rows { self.at.rows } else { 1 } {
                let piece = |(p, piece): (usize, &ColumnVector)| {
                    self.arithmetic.elementwise(node, piece.lanes, &|v| at(values, v, r, p))
                };
                let row: RowVectors = match node.op {
                    Op::Reduce { op, .. } => vec![self.reduce(op, node.inputs[0], r, values)],
                    _ => self.column_vectors(extent).iter().enumerate().map(piece).collect(),
                };
                all.push(row.into_iter().map(|value| value.named("y")).collect());
            }
            values.insert(out, all);
        }
    }

    /// Over the columns of row `r`: vectors first, then their lanes, then single columns, then the lanes of a
    /// warp.
    fn reduce(&self, op: RedOp, input: ValueId, r: usize, values: &RowValues<'k>) -> Val<'k> {
        let extent = self.scan.extent(input);
        let own = self.reduce_own(op, input, r, values);
        match self.sharers {
            Some(sharers) if extent.columns => fold_lanes(own, op.bin(), sharers.count),
            _ => own,
        }
    }

    fn reduce_own(&self, op: RedOp, input: ValueId, r: usize, values: &RowValues<'k>) -> Val<'k> {
        let pieces = self.column_vectors(self.scan.extent(input));
        let mut wide: Option<Val> = None;
        let mut single: Option<Val> = None;
        for (p, &ColumnVector { lanes, .. }) in pieces.iter().enumerate() {
            let so_far = if lanes > 1 { &mut wide } else { &mut single };
            let sum = self.arithmetic.reduce((op, input), lanes, *so_far, &|v| at(values, v, r, p));
            *so_far = Some(sum.named("sum"));
        }
        match (wide.map(|w| w.reduce_lanes(op.bin())), single) {
            (Some(w), Some(s)) => w.binary(op.bin(), s),
            (Some(all), None) | (None, Some(all)) => all,
            (None, None) => unreachable!("a row has columns"),
        }
    }
}

/// Piece `p` of row `r` of a value, which may be broadcast there.
fn at<'k>(values: &RowValues<'k>, v: ValueId, r: usize, p: usize) -> Val<'k> {
    let rows = &values[&v];
    let row = &rows[if rows.len() > 1 { r } else { 0 }];
    row[if row.len() > 1 { p } else { 0 }]
}
