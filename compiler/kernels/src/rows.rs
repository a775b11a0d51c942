//! The kernel for groups of elementwise ops and last-axis reductions: one pass per row. Reductions become
//! scalars of the row, then every output is stored in one loop over the columns, all loads of an iteration
//! before its stores (so an output may take the place of an input read at the same index).
//!
//! CPU: rows are shared out among workers along their first axis, columns are vectors with a scalar tail.
//! GPU: blocks for each row of the first two axes ([`gpu`]).

mod columns;
mod gpu;
mod heads;
mod quantized;

use crate::inline::{Binding, Inliner, LaneIndex, RowAt};
use crate::machine::MachineKind;
use crate::quantize::{self, CodeBlock, RowBlock, RowCodes};
use mlcc_ir::dim::Dim;
use mlcc_ir::graph::ValueId;
use mlcc_ir::kernel::BufId;
use mlcc_ir::ops::Op;
use mlcc_kernel_lang::{Recorder, Val};

pub use heads::RowHeads;

/// A group of ops on rows.
#[derive(Clone, Copy)]
pub struct RowKernel<'a, 'f, 'k> {
    pub k: &'k Recorder,
    /// Binds the inputs of the group.
    pub inliner: &'a Inliner<'f, 'k>,
    /// The axes before the last one, the same for all outputs.
    pub leading: &'a [Dim],
    /// The values that are stored, with their buffers.
    pub outputs: &'a [(ValueId, BufId)],
    /// The codes to make (CPU). With one leading axis rows are shared in blocks of `block`, as their codes
    /// are ordered; where there are further leading axes, the codes follow row by row.
    pub codes: &'a [RowCodes],
    pub block: CodeBlock,
    pub machine: MachineKind,
}

/// The executor of a row.
#[derive(Clone, Copy)]
enum RowExecutor<'k> {
    /// A CPU worker, with vectors of `lanes` lanes.
    Worker { lanes: u32 },
    /// A block of a GPU.
    Block(gpu::ColumnBlock<'k>),
}

/// Blocks of a GPU along the second axis of a launch.
const MOST_BLOCKS: i64 = 65_535;

impl<'k> RowKernel<'_, '_, 'k> {
    /// Records the kernel body.
    pub fn emit(self) {
        if let (MachineKind::Cpu { lanes, prefetch, sizes }, [_, ..], [count]) =
            (self.machine, self.codes, self.leading)
        {
            return self.emit_quantized(count, (lanes, prefetch), sizes.quantize);
        }
        let one = Dim::from(1);
        let first = self.leading.first().unwrap_or(&one);
        let body = |row, executor| match self.leading {
            [] => self.inner(vec![], executor),
            [..] => self.inner(vec![LaneIndex::scalar(row)], executor),
        };
        let k = self.k;
        match self.machine {
            MachineKind::Cpu { lanes, .. } => {
                k.par("row", first, |row| body(row, RowExecutor::Worker { lanes }))
            }
            MachineKind::Gpu { .. } => {
                let columns = gpu::ColumnSplit::for_rows(&self);
                let block = |part| RowExecutor::Block(gpu::ColumnBlock { k, columns, part });
                k.blocks("row", 0, first, |row| match columns.blocks {
                    1 => body(row, block(k.int(0))),
                    blocks => k.blocks("part", 1, blocks, |part| body(row, block(part))),
                });
            }
        }
    }

    /// Loops over further leading axes (on a GPU, blocks for the second one where its size is known), then
    /// the row itself.
    fn inner(self, leading: Vec<LaneIndex<'k>>, executor: RowExecutor<'k>) {
        let Some(size) = self.leading.get(leading.len()) else { return self.row(&leading, executor) };
        let gpu = matches!(self.machine, MachineKind::Gpu { .. });
        let few = size.as_const().is_some_and(|size| size <= MOST_BLOCKS);
        let in_blocks = gpu && leading.len() == 1 && few;
        let reduces = self.inliner.f.live_nodes().any(|(_, n)| matches!(n.op, Op::Reduce { .. }));
        let body = |i| {
            self.inner([leading.as_slice(), &[LaneIndex::scalar(i)]].concat(), executor);
            // The next row's reductions write the shared memory that this row's were read from.
            if gpu && !in_blocks && reduces {
                self.k.barrier();
            }
        };
        match in_blocks {
            true => self.k.blocks("inner", 1, size, body),
            false => self.k.serial("inner", size, body),
        }
    }

    fn row(self, leading: &[LaneIndex<'k>], executor: RowExecutor<'k>) {
        let inliner = with_reductions(self.k, self.inliner, leading, executor);
        columns::store(self.k, &inliner, RowAt::own(leading), self.outputs, executor);
        if let (MachineKind::Cpu { lanes, sizes, .. }, [_, ..]) = (self.machine, self.codes) {
            let row = RowBlock {
                inliner: &inliner,
                leading: Some(leading),
                first: flat_row(self.k, self.leading, leading),
                rows: self.k.int(1),
                size: 1,
                columns: 4,
                known: &[],
                lanes,
                prefetch: None,
                sizes: sizes.quantize,
            };
            quantize::emit(self.k, &row, self.codes, &[]);
        }
    }
}

/// Stores one row of `outputs` where `at` says (CPU). Only the first axis of the buffers may be longer than
/// the values'.
pub(crate) fn emit_at<'k>(
    k: &'k Recorder,
    inliner: &Inliner<'_, 'k>,
    at: RowAt<'_, 'k>,
    outputs: &[(ValueId, BufId)],
    lanes: u32,
) {
    let worker = RowExecutor::Worker { lanes };
    let inliner = with_reductions(k, inliner, at.row, worker);
    columns::store(k, &inliner, at, outputs, worker);
}

/// The same computation in a block of a GPU with `threads` threads.
pub(crate) fn emit_in_block<'k>(
    k: &'k Recorder,
    inliner: &Inliner<'_, 'k>,
    at: RowAt<'_, 'k>,
    outputs: &[(ValueId, BufId)],
    threads: i64,
) {
    let columns = gpu::ColumnSplit::of_one_block(inliner, threads);
    let block = RowExecutor::Block(gpu::ColumnBlock { k, columns, part: k.int(0) });
    let inliner = with_reductions(k, inliner, at.row, block);
    columns::store(k, &inliner, at, outputs, block);
}

/// Hands a value `[1, columns]` to `keep`, vector by vector with the first column, in the threads of a block
/// of a GPU.
pub(crate) fn for_each_column<'k>(
    k: &'k Recorder,
    inliner: &Inliner<'_, 'k>,
    v: ValueId,
    threads: i64,
    keep: &dyn Fn(Val<'k>, Val<'k>),
) {
    if let Some(heads) = RowHeads::of_value(inliner.f, v) {
        return heads.for_each_column(k, inliner, threads, keep);
    }
    let columns = gpu::ColumnSplit::of_one_block(inliner, threads);
    let block = gpu::ColumnBlock { k, columns, part: k.int(0) };
    let leading = [LaneIndex::scalar(k.int(0))];
    let inliner = with_reductions(k, inliner, &leading, RowExecutor::Block(block));
    block.each_vector(&inliner, v, |column, lanes| {
        let index = [leading[0], LaneIndex::from(column, lanes)];
        let inliner = if lanes > 1 { inliner.with_lanes(lanes) } else { inliner.of_one() };
        let value = inliner.value(k, v, &index).to_lanes(lanes);
        keep(column, value.cast(inliner.f.ty(v).dtype).named("value"));
    });
}

/// Number of a row among all.
fn flat_row<'k>(k: &'k Recorder, dims: &[Dim], leading: &[LaneIndex<'k>]) -> Val<'k> {
    let flat = dims.iter().zip(leading).fold(k.int(0), |flat, (dim, &index)| {
        let before = flat * k.dim(dim);
        if let LaneIndex::Affine { base, .. } = index { before + base } else { before }
    });
    flat.named("row")
}

/// The inliner with the reductions over a row computed and bound.
fn with_reductions<'f, 'k>(
    k: &'k Recorder,
    inliner: &Inliner<'f, 'k>,
    leading: &[LaneIndex<'k>],
    executor: RowExecutor<'k>,
) -> Inliner<'f, 'k> {
    let mut inliner = inliner.clone();
    for (_, node) in inliner.f.live_nodes() {
        let Op::Reduce { op, axis } = node.op else { continue };
        let (input, output) = (node.inputs[0], node.outputs[0]);
        if !is_over_columns(&inliner, axis, input, leading.len()) {
            continue;
        }
        let value = match executor {
            RowExecutor::Worker { .. } => {
                let index = [leading, &[LaneIndex::scalar(k.int(0))]].concat();
                inliner.value(k, output, &index)
            }
            RowExecutor::Block(block) => block.reduce(&inliner, op, input, leading),
        };
        inliner.bindings.insert(output, Binding::Value(value));
    }
    inliner
}

/// True for a reduction over the last axis of a value with `leading` axes before it.
fn is_over_columns(inliner: &Inliner, axis: usize, input: ValueId, leading: usize) -> bool {
    axis + 1 == inliner.f.ty(input).rank() && axis == leading
}

/// Size of the last axis; 1 for a rank-0 value.
fn columns_of(inliner: &Inliner, v: ValueId) -> Dim {
    inliner.f.ty(v).dims.last().cloned().unwrap_or(Dim::from(1))
}
