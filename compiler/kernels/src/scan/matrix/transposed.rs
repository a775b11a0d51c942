//! The scan with lanes over rows, for CPUs and several steps: the state of a block of rows is copied to the
//! stack transposed, so that sums over the columns need no sum over lanes, and every number along the columns
//! is broadcast once for several vectors of rows.
//!
//! A step takes one pass over the columns for each level of reductions: values that need no reduction, then
//! those that need the results of the first pass, and so on; the last pass writes the new state. The first
//! pass of the next step is made together with it, so that each state is loaded and stored once per step and
//! level.

mod copy;
mod pass;

use super::arithmetic::BodyArithmetic;
use super::step::HeadRows;
use super::{MatrixScan, StateShape};
use copy::CopyDirection;
use mlcc_ir::graph::{GraphNode, ValueId};
use mlcc_ir::instr::InstrId;
use mlcc_ir::kernel::MemorySpace;
use mlcc_ir::ops::Op;
use mlcc_ir::types::DType;
use mlcc_kernel_lang::{BufferView, Recorder, Val};
use std::collections::HashMap;
use std::ops::Range;

pub(super) struct TransposedScan<'a, 'k> {
    k: &'k Recorder,
    scan: &'a MatrixScan<'a, 'k>,
    arithmetic: BodyArithmetic<'a, 'k>,
    /// Reductions over the columns that come before a value, by value.
    depth: Vec<usize>,
    /// The pass that writes the states.
    last: usize,
    lanes: u32,
    /// Vectors of rows that run together.
    vectors: i64,
    prefetch: Option<InstrId>,
    /// Prefetch distance in steps.
    steps_ahead: i64,
}

/// Vectors of rows, or one number for all rows.
type LaneVectors<'k> = Vec<Val<'k>>;
type LaneValues<'k> = HashMap<ValueId, LaneVectors<'k>>;

/// Rows that run together, and their states: `[columns, rows]`.
struct StateBlock<'k> {
    at: HeadRows<'k>,
    states: Vec<BufferView<'k, 2>>,
}

/// A step and its values that have no columns.
struct ScanStep<'k> {
    time: Val<'k>,
    values: LaneValues<'k>,
}

/// The sums of a pass for each reduction.
type ReductionSums<'a, 'k> = Vec<(&'a GraphNode, BufferView<'k, 1>)>;

impl<'a, 'k> TransposedScan<'a, 'k> {
    pub fn new(
        scan: &'a MatrixScan<'a, 'k>,
        lanes: u32,
        vectors: i64,
        (prefetch, steps_ahead): (Option<InstrId>, i64),
    ) -> TransposedScan<'a, 'k> {
        let (k, arithmetic) = (scan.k, BodyArithmetic::new(scan.k, scan.body));
        let mut all = TransposedScan {
            k,
            scan,
            arithmetic,
            depth: vec![],
            last: 0,
            lanes,
            vectors,
            prefetch,
            steps_ahead,
        };
        all.count_reductions();
        all
    }

    /// The rows of a block.
    fn block_rows(&self) -> i64 {
        self.vectors * i64::from(self.lanes)
    }

    fn count_reductions(&mut self) {
        let body = self.scan.body;
        self.depth = vec![0; body.values.len()];
        for (_, node) in body.live_nodes() {
            let before = node.inputs.iter().map(|v| self.depth[v.0 as usize]).max().unwrap_or(0);
            let own = usize::from(self.sums_columns(node));
            self.depth[node.outputs[0].0 as usize] = before + own;
        }
        let new = body.outputs[..self.scan.carries].iter().map(|v| self.depth_of(*v));
        let sums = body.live_nodes().map(|(_, n)| n).filter(|n| self.sums_columns(n));
        self.last = new.chain(sums.map(|n| self.depth_of(n.outputs[0]) - 1)).max().unwrap_or(0);
    }

    fn depth_of(&self, v: ValueId) -> usize {
        self.depth[v.0 as usize]
    }

    fn has_columns(&self, v: ValueId) -> bool {
        self.scan.extent(v).columns
    }

    /// True for a reduction over more than one element.
    fn sums_columns(&self, node: &GraphNode) -> bool {
        matches!(node.op, Op::Reduce { .. }) && self.has_columns(node.inputs[0])
    }

    // ---- pieces of rows

    /// First row and lanes of each piece of a value: over rows, or a single number.
    fn lane_vectors(&self, v: ValueId) -> impl Iterator<Item = (i64, u32)> + use<> {
        let (count, lanes) = if self.scan.extent(v).rows { (self.vectors, self.lanes) } else { (1, 1) };
        (0..count).map(move |p| (p * i64::from(lanes), lanes))
    }

    fn load_vectors(
        &self,
        v: ValueId,
        (buf, first): (BufferView<'k, 1>, Val<'k>),
        name: &str,
    ) -> LaneVectors<'k> {
        self.lane_vectors(v).map(|(row, lanes)| buf.load([first + row], lanes).named(name)).collect()
    }

    // ---- the steps

    /// Kernel body.
    pub fn emit(&self) {
        let StateShape { heads, rows, columns } = self.scan.shape;
        let (k, block_rows) = (self.k, self.block_rows());
        let per_head = rows / block_rows;
        k.par("block", heads * per_head, |block| {
            let (head, part) = (block / per_head, block % per_head);
            let row = (part * block_rows).named("row");
            let at = HeadRows { head, row, rows: block_rows as usize };
            let state = |_| k.alloc("state", DType::F32, [columns, block_rows], MemorySpace::Stack);
            let block = StateBlock { at, states: (0..self.scan.carries).map(state).collect() };
            self.copy_states(&block, CopyDirection::In);
            self.steps(&block);
            self.copy_states(&block, CopyDirection::Out);
        });
    }

    fn steps(&self, block: &StateBlock<'k>) {
        let (k, steps, zero) = (self.k, self.k.dim(&self.scan.length), self.k.int(0));
        let mut constants = LaneValues::new();
        self.load_rows(block, zero, self.scan.constants(), &mut constants);
        // The first pass of a step: made before the first one, then by the last pass of the step before.
        let early = self.last > 0;
        let [first, next] = [(); 2].map(|()| if early { self.alloc_sums(0) } else { ReductionSums::new() });
        if early {
            let token = self.token(block, zero, &constants);
            self.clear(&first);
            self.run_pass(block, (&token, &first), 0, None);
        }
        k.serial("step", steps, |time| {
            let mut token = self.token(block, time, &constants);
            if early {
                self.add_results(&first, &mut token.values);
                self.add_rows(1, &mut token.values);
            }
            for number in usize::from(early)..=self.last {
                let sums = self.alloc_sums(number);
                self.clear(&sums);
                let following = (early && number == self.last).then(|| {
                    self.clear(&next);
                    let time = (time + 1).min(steps + -1).named("next");
                    self.token(block, time, &constants)
                });
                let following = following.as_ref().map(|token| (token, &next));
                self.run_pass(block, (&token, &sums), number, following);
                self.add_results(&sums, &mut token.values);
                self.add_rows(number + 1, &mut token.values);
            }
            self.store_results(block, &token);
            for ((node, from), (_, to)) in next.iter().zip(&first) {
                for (row, lanes) in self.lane_vectors(node.inputs[0]) {
                    to.set([row], from.load([row], lanes));
                }
            }
        });
    }

    /// The values of a step that are known before its first pass.
    fn token(&self, block: &StateBlock<'k>, time: Val<'k>, constants: &LaneValues<'k>) -> ScanStep<'k> {
        let mut values = constants.clone();
        self.load_rows(block, time, self.scan.sequences(), &mut values);
        self.add_rows(0, &mut values);
        ScanStep { time, values }
    }

    /// Adds the inputs that have no columns.
    fn load_rows(
        &self,
        block: &StateBlock<'k>,
        time: Val<'k>,
        inputs: Range<usize>,
        values: &mut LaneValues<'k>,
    ) {
        for i in inputs {
            let v = self.scan.body.inputs[i];
            if !self.has_columns(v) {
                values.insert(v, self.load_vectors(v, self.scan.input(i, block.at, 0, time), "x"));
            }
        }
    }

    /// Adds what has no columns and becomes known after `passes` passes.
    fn add_rows(&self, passes: usize, values: &mut LaneValues<'k>) {
        for (_, node) in self.scan.body.live_nodes() {
            let out = node.outputs[0];
            if self.depth_of(out) != passes || self.has_columns(out) || self.sums_columns(node) {
                continue;
            }
            if !self.arithmetic.is_fused(out) {
                let pieces = self.compute(node, values);
                values.insert(out, pieces);
            }
        }
    }

    /// A node from what is known; a reduction of one element is that element.
    fn compute(&self, node: &GraphNode, values: &LaneValues<'k>) -> LaneVectors<'k> {
        let piece = |(p, (_, lanes)): (usize, (i64, u32))| {
            let at = |v| piece_of(values, v, p);
            let value = match node.op {
                Op::Reduce { op, .. } => self.arithmetic.reduce((op, node.inputs[0]), lanes, None, &at),
                _ => self.arithmetic.elementwise(node, lanes, &at),
            };
            value.named("y")
        };
        self.lane_vectors(node.outputs[0]).enumerate().map(piece).collect()
    }

    /// Stores the results of a step besides its states.
    fn store_results(&self, block: &StateBlock<'k>, token: &ScanStep<'k>) {
        for (i, v) in self.scan.body.outputs.iter().enumerate().skip(self.scan.carries) {
            let extent = self.scan.extent(*v);
            let offset = self.scan.offset(extent, block.at, 0);
            let first = self.scan.at_step(extent, offset, token.time);
            for (p, &value) in token.values[v].iter().enumerate() {
                let row = p as i64 * i64::from(self.lanes);
                self.k.flat(self.scan.outputs[i]).set([first + row], value);
            }
        }
    }
}

/// Piece `p` of a value, which may be one number for all.
fn piece_of<'k>(values: &LaneValues<'k>, v: ValueId, p: usize) -> Val<'k> {
    let pieces = &values[&v];
    pieces[if pieces.len() > 1 { p } else { 0 }]
}
