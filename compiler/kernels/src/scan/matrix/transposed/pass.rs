//! A pass over the columns of a step.

use super::{LaneValues, ReductionSums, ScanStep, StateBlock, TransposedScan, piece_of};
use mlcc_ir::graph::ValueId;
use mlcc_ir::kernel::ExprType;
use mlcc_ir::ops::Op;
use mlcc_ir::types::DType;
use mlcc_kernel_lang::{BufferView, Val};
use std::collections::{HashMap, HashSet};

/// Elements of a cache line.
const LINE: i64 = 16;

/// Inputs that have columns, and their first elements.
type ColumnBases<'k> = HashMap<ValueId, (BufferView<'k, 1>, Val<'k>)>;

impl<'a, 'k> TransposedScan<'a, 'k> {
    // ---- sums over the columns

    /// Room for what pass `number` sums up.
    pub(super) fn alloc_sums(&self, number: usize) -> ReductionSums<'a, 'k> {
        let nodes = self.scan.body.live_nodes().map(|(_, node)| node);
        let found = nodes.filter(|n| self.sums_columns(n) && self.depth_of(n.inputs[0]) == number);
        let len = |v| self.lane_vectors(v).map(|(_, lanes)| i64::from(lanes)).sum();
        found.map(|node| (node, self.k.registers("sum", [len(node.inputs[0])]))).collect()
    }

    pub(super) fn clear(&self, sums: &ReductionSums<'a, 'k>) {
        for (node, sum) in sums {
            let Op::Reduce { op, .. } = node.op else { continue };
            for (row, lanes) in self.lane_vectors(node.inputs[0]) {
                sum.set([row], self.k.literal(op.identity(), ExprType::vector(DType::F32, lanes)));
            }
        }
    }

    fn add_to(&self, sums: &ReductionSums<'a, 'k>, values: &LaneValues<'k>) {
        for (node, sum) in sums {
            let Op::Reduce { op, .. } = node.op else { continue };
            for (p, (row, lanes)) in self.lane_vectors(node.inputs[0]).enumerate() {
                let (old, at) = (sum.load([row], lanes), |v| piece_of(values, v, p));
                sum.set([row], self.arithmetic.reduce((op, node.inputs[0]), lanes, Some(old), &at));
            }
        }
    }

    pub(super) fn add_results(&self, sums: &ReductionSums<'a, 'k>, values: &mut LaneValues<'k>) {
        for &(node, sum) in sums {
            let pieces = self.load_vectors(node.inputs[0], (sum, self.k.int(0)), "sum");
            values.insert(node.outputs[0], pieces);
        }
    }

    // ---- the pass

    /// A pass over the columns for the reductions in `sums`; the last one writes the states and goes on with
    /// the first pass of the following step.
    pub(super) fn run_pass(
        &self,
        block: &StateBlock<'k>,
        (token, sums): (&ScanStep<'k>, &ReductionSums<'a, 'k>),
        number: usize,
        following: Option<(&ScanStep<'k>, &ReductionSums<'a, 'k>)>,
    ) {
        let body = self.scan.body;
        let (carries, writes) = (&body.inputs[..self.scan.carries], number == self.last);
        let new = &body.outputs[..if writes { self.scan.carries } else { 0 }];
        let bases = self.bases(block, token);
        let following = following.map(|(token, sums)| (token, sums, self.bases(block, token)));
        self.each_column(block, token.time, writes, |c| {
            let mut values = token.values.clone();
            for (v, &state) in carries.iter().zip(&block.states) {
                let piece = |row| state.load((c, row), self.lanes).named("s");
                values.insert(*v, self.rows().map(piece).collect());
            }
            let wanted = sums.iter().map(|(n, _)| n.inputs[0]).chain(new.iter().copied());
            self.add_columns((&bases, c), &wanted.collect::<Vec<_>>(), &mut values);
            for (v, &state) in new.iter().zip(&block.states) {
                self.rows().zip(&values[v]).for_each(|(row, &value)| state.set((c, row), value));
            }
            self.add_to(sums, &values);
            let Some((token, sums, bases)) = &following else { return };
            let mut after = token.values.clone();
            after.extend(carries.iter().zip(new).map(|(carry, new)| (*carry, values[new].clone())));
            let wanted: Vec<ValueId> = sums.iter().map(|(n, _)| n.inputs[0]).collect();
            self.add_columns((bases, c), &wanted, &mut after);
            self.add_to(sums, &after);
        });
    }

    /// First row of each vector of a column of a state.
    fn rows(&self) -> impl Iterator<Item = i64> + use<> {
        (0..self.block_rows()).step_by(self.lanes as usize)
    }

    fn bases(&self, block: &StateBlock<'k>, token: &ScanStep<'k>) -> ColumnBases<'k> {
        let inputs = self.scan.body.inputs.iter().enumerate().skip(self.scan.carries);
        let base = |(i, v): (usize, &ValueId)| {
            let (buf, first) = self.scan.input(i, block.at, 0, token.time);
            (*v, (buf, first.named("base")))
        };
        inputs.filter(|(_, v)| self.has_columns(**v)).map(base).collect()
    }

    /// Adds the requested values of column `c`, and those that they need.
    fn add_columns(
        &self,
        (bases, c): (&ColumnBases<'k>, Val<'k>),
        wanted: &[ValueId],
        values: &mut LaneValues<'k>,
    ) {
        let body = self.scan.body;
        let mut needed = HashSet::new();
        let mut open = wanted.to_vec();
        while let Some(v) = open.pop() {
            // A fused product without columns is not among the values; its factors are.
            if values.contains_key(&v) || !needed.insert(v) {
                continue;
            }
            open.extend(body.defining_node(v).into_iter().flat_map(|node| &node.inputs));
        }
        for v in body.inputs.iter().filter(|v| needed.contains(v)) {
            let (buf, first) = bases[v];
            values.insert(*v, vec![buf.at([first + c]).named("x")]);
        }
        for (_, node) in body.live_nodes() {
            let out = node.outputs[0];
            if needed.contains(&out) && !self.arithmetic.is_fused(out) {
                let pieces = self.compute(node, values);
                values.insert(out, pieces);
            }
        }
    }

    /// Runs `body` for every column, by cache lines of the sequences, which the last pass prefetches for a
    /// later step.
    fn each_column(&self, block: &StateBlock<'k>, time: Val<'k>, prefetches: bool, body: impl Fn(Val<'k>)) {
        let (k, columns) = (self.k, self.scan.shape.columns);
        k.serial("line", columns / LINE, |line| {
            let first = (line * LINE).named("first");
            if prefetches {
                self.prefetch(block, time, first);
            }
            k.serial("c", LINE, |i| body(first + i));
        });
        k.serial("c", columns % LINE, |i| body(i + columns / LINE * LINE));
    }

    /// Prefetches the line of each sequence that begins at column (or row of the block) `first`, of a later
    /// step.
    fn prefetch(&self, block: &StateBlock<'k>, time: Val<'k>, first: Val<'k>) {
        let Some(prefetch) = self.prefetch else { return };
        let last_step = self.k.dim(&self.scan.length) + -1;
        let time = (time + self.steps_ahead).min(last_step).named("ahead");
        for i in self.scan.sequences() {
            let extent = self.scan.input_extent(i);
            let at = match (extent.columns, extent.rows) {
                (true, _) => first,
                (false, true) => first.min(self.block_rows() - 1),
                (false, false) => continue,
            };
            let (buf, start) = self.scan.input(i, block.at, 0, time);
            buf.prefetch(prefetch, [start + at]);
        }
    }
}
