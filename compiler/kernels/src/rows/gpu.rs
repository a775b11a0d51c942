//! Rows on a GPU: threads share out the columns of a row in vectors of 16 bytes. A row that something is
//! reduced of has a block, others have as many as their columns fill.

use super::{MOST_BLOCKS, RowKernel, columns_of, is_over_columns};
use crate::inline::{Inliner, LaneIndex, RowAt, store_all};
use mlcc_ir::compute::RedOp;
use mlcc_ir::dim::Dim;
use mlcc_ir::graph::{GraphNode, ValueId};
use mlcc_ir::kernel::{BufId, ExprType, MemorySpace};
use mlcc_ir::ops::Op;
use mlcc_ir::types::DType;
use mlcc_kernel_lang::{Recorder, ThreadTeam, Val, WARP, fold_lanes};

/// Lanes of f32 that a thread reads at once.
pub(super) const LANES: u32 = 4;
/// Most threads of a block: of rows without reductions, of many rows with them, and of a single row alone.
const THREADS: i64 = 128;
const REDUCING: i64 = 256;
const ALONE: i64 = 1024;

/// The way in which blocks and threads share the columns of a row.
#[derive(Clone, Copy)]
pub(super) struct ColumnSplit {
    pub threads: i64,
    /// Blocks of a row.
    pub blocks: i64,
    lanes: u32,
}

impl ColumnSplit {
    pub fn for_rows(rows: &RowKernel) -> ColumnSplit {
        let (f, lanes) = (rows.inliner.f, max_lanes(rows.inliner));
        let of_row = |axis, v| is_over_columns(rows.inliner, axis, v, rows.leading.len());
        let reduced = |n: &GraphNode| match n.op {
            Op::Reduce { axis, .. } if of_row(axis, n.inputs[0]) => Some(n.inputs[0]),
            _ => None,
        };
        let reduced: Vec<ValueId> = f.live_nodes().filter_map(|(_, n)| reduced(n)).collect();
        let all = rows.outputs.iter().map(|(v, _)| *v).chain(reduced.iter().copied());
        let vectors = |v: ValueId| {
            let columns = columns_of(rows.inliner, v);
            let lanes = i64::from(lanes_of(rows.inliner, v, &columns, lanes));
            columns.as_const().map_or(ALONE, |columns| columns / lanes)
        };
        let vectors = all.map(vectors).max().unwrap_or(1);
        let single = rows.leading.iter().all(|d| d.as_const() == Some(1));
        let most = match (reduced.is_empty(), single) {
            (true, _) => THREADS,
            (false, false) => REDUCING,
            (false, true) => ALONE,
        };
        let threads = (vectors.max(1) as u64).next_power_of_two() as i64;
        let threads = threads.clamp(WARP, most);
        let several = reduced.is_empty() && rows.leading.len() < 2;
        let blocks = if several { ((vectors + threads - 1) / threads).clamp(1, MOST_BLOCKS) } else { 1 };
        ColumnSplit { threads, blocks, lanes }
    }

    /// The split for a block with `threads` threads, which has whole rows.
    pub fn of_one_block(inliner: &Inliner, threads: i64) -> ColumnSplit {
        ColumnSplit { threads, blocks: 1, lanes: max_lanes(inliner) }
    }
}

/// Most lanes for the values of a function: the parts of a row that is put together would be read with masks.
fn max_lanes(inliner: &Inliner) -> u32 {
    let joins = inliner.f.live_nodes().any(|(_, n)| matches!(n.op, Op::Concat { .. }));
    if joins { 1 } else { LANES }
}

/// Lanes of a thread for the columns of a value.
fn lanes_of(inliner: &Inliner, v: ValueId, columns: &Dim, most: u32) -> u32 {
    let whole = columns.as_const().is_some_and(|c| c % i64::from(most) == 0);
    if whole && inliner.vectorizable(v) { most } else { 1 }
}

/// A block with its part of the columns of a row.
#[derive(Clone, Copy)]
pub(super) struct ColumnBlock<'k> {
    pub k: &'k Recorder,
    pub columns: ColumnSplit,
    /// Number of the block among those of the row.
    pub part: Val<'k>,
}

impl<'k> ColumnBlock<'k> {
    fn team(self) -> ThreadTeam<'k> {
        ThreadTeam::new(self.k, self.columns.threads)
    }

    /// Stores outputs of these columns.
    pub fn store(
        self,
        inliner: &Inliner<'_, 'k>,
        at: RowAt<'_, 'k>,
        columns: &Dim,
        stores: &[(ValueId, BufId)],
    ) {
        let each = stores.iter().map(|(v, _)| lanes_of(inliner, *v, columns, self.columns.lanes));
        let lanes = each.min().unwrap_or(1);
        let inliner = if lanes > 1 { inliner.with_lanes(lanes) } else { inliner.of_one() };
        self.team().run(|t| {
            self.strided(columns, lanes, t, |column| store_all(self.k, &inliner, at, column, stores));
        });
    }

    /// `body(column, lanes)` for the vectors of a value's columns.
    pub fn each_vector(self, inliner: &Inliner<'_, 'k>, v: ValueId, body: impl FnOnce(Val<'k>, u32)) {
        let columns = columns_of(inliner, v);
        let lanes = lanes_of(inliner, v, &columns, self.columns.lanes);
        self.team().run(|t| self.strided(&columns, lanes, t, |column| body(column, lanes)));
    }

    /// `body(column)` for the first column of every vector of a thread.
    fn strided(self, columns: &Dim, lanes: u32, t: Val<'k>, body: impl FnOnce(Val<'k>)) {
        let (k, ColumnSplit { threads, blocks, .. }) = (self.k, self.columns);
        let (lanes, step) = (i64::from(lanes), threads * blocks);
        let vectors = columns.floor_div(lanes);
        let own = if blocks > 1 { self.part * threads + t } else { t };
        k.serial("j", &vectors.ceil_div(step), |j| {
            let vector = j * step + own;
            let column = if lanes > 1 { vector * lanes } else { vector };
            match vectors.as_const().is_some_and(|v| v % step == 0) {
                true => body(column),
                false => k.when(vector.lt(k.dim(&vectors)), || body(column)),
            }
        });
    }

    /// Each thread reduces its columns, then lanes of a warp meet, then warps in shared memory. Gives the
    /// result, in a register of every thread.
    pub fn reduce(
        self,
        inliner: &Inliner<'_, 'k>,
        op: RedOp,
        input: ValueId,
        leading: &[LaneIndex<'k>],
    ) -> Val<'k> {
        let k = self.k;
        let columns = columns_of(inliner, input);
        let lanes = lanes_of(inliner, input, &columns, self.columns.lanes);
        let dtype = if inliner.f.ty(input).dtype.is_int() { DType::I32 } else { DType::F32 };
        let identity = if dtype.is_float() { op.identity() } else { 0.0 };
        let inliner = if lanes > 1 { inliner.with_lanes(lanes) } else { inliner.of_one() };
        let (bin, warps) = (op.bin(), self.columns.threads / WARP);
        let result = k.alloc("reduced", dtype, [1], MemorySpace::Local);
        let partial = (warps > 1).then(|| k.alloc("partial", dtype, [warps], MemorySpace::Shared));
        self.team().run(|t| {
            let acc = k.reg("acc", k.literal(identity, ExprType::vector(dtype, lanes)));
            self.strided(&columns, lanes, t, |column| {
                let index = [leading, &[LaneIndex::from(column, lanes)]].concat();
                let value = inliner.value(k, input, &index).to_lanes(lanes).cast(dtype);
                acc.set(acc.get().binary(bin, value));
            });
            let own = if lanes > 1 { acc.get().reduce_lanes(bin) } else { acc.get() };
            let sum = fold_lanes(own, bin, WARP);
            match partial {
                None => result.set([0], sum),
                Some(partial) => k.when((t % WARP).equals(0), || partial.set([t / WARP], sum)),
            }
        });
        if let Some(partial) = partial {
            k.barrier();
            self.team().run(|t| result.set([0], fold_lanes(partial.at([t % warps]), bin, warps)));
        }
        result.at([0])
    }
}
