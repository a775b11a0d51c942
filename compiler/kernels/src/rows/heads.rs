//! A row of heads, `[1, heads, size]`, that is read as `[1, heads * size]`: what is reduced is reduced within
//! a head. Neighbouring threads of a block of a GPU have the columns of a head, so they meet in shuffles
//! alone.

use super::gpu::LANES;
use crate::inline::{Binding, Inliner, LaneIndex};
use mlcc_ir::dim::Dim;
use mlcc_ir::graph::{Function, ValueId};
use mlcc_ir::ops::Op;
use mlcc_ir::types::DType;
use mlcc_kernel_lang::{Recorder, ThreadTeam, Val, WARP, fold_lanes};

/// The heads of a row.
#[derive(Clone, Copy)]
pub struct RowHeads {
    /// `[1, heads, size]`.
    pub rows: ValueId,
    heads: i64,
    size: i64,
}

impl RowHeads {
    /// The heads of a value `[1, heads * size]` if neighbouring lanes of a warp can share them.
    pub fn of_value(f: &Function, v: ValueId) -> Option<RowHeads> {
        let node = f.defining_node(v).filter(|node| matches!(node.op, Op::Reshape { .. }))?;
        let rows = node.inputs[0];
        let sizes = |v| f.ty(v).dims.iter().map(Dim::as_const).collect::<Option<Vec<i64>>>();
        let (&[1, heads, size], &[1, columns]) = (&sizes(rows)?[..], &sizes(v)?[..]) else { return None };
        let (whole, threads) = (size % i64::from(LANES) == 0, size / i64::from(LANES));
        let shared = whole && threads.count_ones() == 1 && threads <= WARP;
        (shared && heads * size == columns).then_some(RowHeads { rows, heads, size })
    }

    /// True for a reduction within each head.
    pub fn reduces(self, f: &Function, axis: usize, input: ValueId) -> bool {
        axis == 2 && f.ty(input).dims == f.ty(self.rows).dims
    }

    /// Keeps every column, see [`for_each_column`](super::for_each_column).
    pub(super) fn for_each_column<'k>(
        self,
        k: &'k Recorder,
        inliner: &Inliner<'_, 'k>,
        threads: i64,
        keep: &dyn Fn(Val<'k>, Val<'k>),
    ) {
        let (lanes, sharers) = (i64::from(LANES), self.size / i64::from(LANES));
        let vectors = self.heads * sharers;
        ThreadTeam::new(k, threads).run(|t| {
            k.serial("j", (vectors + threads - 1) / threads, |j| {
                let vector = (j * threads + t).named("vector");
                // Threads beyond the last head compute on it, too: lanes meet in shuffles, which no branch
                // may part.
                let whole = vectors % threads == 0;
                let own = if whole { vector } else { vector.min(vectors - 1) };
                let (head, column) = ((own / sharers).named("head"), (own % sharers * lanes).named("column"));
                let index =
                    [LaneIndex::scalar(k.int(0)), LaneIndex::scalar(head), LaneIndex::from(column, LANES)];
                let inliner = self.reduced(k, inliner, &index, sharers);
                let value = inliner.value(k, self.rows, &index).to_lanes(LANES);
                let value = value.cast(inliner.f.ty(self.rows).dtype).named("value");
                match whole {
                    true => keep(vector * lanes, value),
                    false => k.when(vector.lt(vectors), || keep(vector * lanes, value)),
                }
            });
        });
    }

    /// The inliner with the reductions of a head computed and bound, in vectors.
    fn reduced<'f, 'k>(
        self,
        k: &'k Recorder,
        inliner: &Inliner<'f, 'k>,
        index: &[LaneIndex<'k>],
        sharers: i64,
    ) -> Inliner<'f, 'k> {
        let mut inliner = inliner.with_lanes(LANES);
        for (_, node) in inliner.f.live_nodes() {
            let Op::Reduce { op, axis } = node.op else { continue };
            let (input, output) = (node.inputs[0], node.outputs[0]);
            if self.reduces(inliner.f, axis, input) {
                let value = inliner.value(k, input, index).to_lanes(LANES).cast(DType::F32);
                let sum = fold_lanes(value.reduce_lanes(op.bin()), op.bin(), sharers);
                inliner.bindings.insert(output, Binding::Value(sum));
            }
        }
        inliner
    }
}
