//! Rows that are quantized on a CPU: workers share them out in blocks, as their codes are ordered.

use super::{RowExecutor, RowKernel, columns, columns_of, is_over_columns, with_reductions};
use crate::inline::{Binding, Inliner, LaneIndex, RowAt};
use crate::quantize::{self, CodeBlock, RowBlock, RowCodes};
use mlcc_ir::dim::Dim;
use mlcc_ir::graph::{GraphNode, ValueId};
use mlcc_ir::instr::InstrId;
use mlcc_ir::kernel::{BufId, MemorySpace};
use mlcc_ir::ops::Op;
use mlcc_ir::types::DType;
use mlcc_kernel_lang::{BufferView, Recorder, Val};
use mlcc_target::QuantizeTuning;

impl<'k> RowKernel<'_, '_, 'k> {
    /// Emits for each row first the values that are stored as they are, then the codes of all rows.
    pub(super) fn emit_quantized(
        self,
        count: &Dim,
        (lanes, prefetch): (u32, Option<InstrId>),
        sizes: QuantizeTuning,
    ) {
        let (k, inliner, worker) = (self.k, self.inliner, RowExecutor::Worker { lanes });
        // A single row is in no block.
        let CodeBlock { rows: size, columns } =
            if count.as_const() == Some(1) { CodeBlock::SINGLE } else { self.block };
        let n = k.dim(count);
        k.par("rows", n.div_ceil(i64::from(size)), |block| {
            let first = (block * i64::from(size)).named("first");
            let rows = (n - first).min(i64::from(size));
            let known = kept_reductions(k, inliner, size);
            let (on_the_way, before) = stored_with(inliner, self.outputs, &self.codes[0], lanes);
            let prepare = |r: Val<'k>| {
                let row = (first + r).named("row");
                let leading = [LaneIndex::scalar(row)];
                let inliner = with_reductions(k, inliner, &leading, worker);
                columns::store(k, &inliner, RowAt::own(&leading), &before, worker);
                for (v, kept) in &known {
                    if let Some(Binding::Value(value)) = inliner.bindings.get(v) {
                        kept.set([r], *value);
                    }
                }
            };
            match size {
                1 => prepare(k.int(0)),
                _ if known.is_empty() && before.is_empty() => {}
                _ => k.serial("r", rows, prepare),
            }
            let prefetch = prefetch.map(|instr| (instr, n));
            let block = RowBlock {
                inliner,
                leading: None,
                first,
                rows,
                size,
                columns,
                known: &known,
                lanes,
                prefetch,
                sizes,
            };
            quantize::emit(k, &block, self.codes, &on_the_way);
        });
    }
}

/// Values and the buffers that they go to.
type ValueStores = Vec<(ValueId, BufId)>;

/// The outputs that can be stored while rows are quantized, in whole vectors of the same columns, and the
/// others.
fn stored_with(
    inliner: &Inliner,
    outputs: &[(ValueId, BufId)],
    codes: &RowCodes,
    lanes: u32,
) -> (ValueStores, ValueStores) {
    let whole = codes.k.is_multiple_of(lanes as usize) && lanes > 1;
    let same = |v: ValueId| columns_of(inliner, v) == Dim::from(codes.k);
    outputs.iter().partition(|(v, _)| whole && same(*v) && inliner.vectorizable(*v))
}

/// Room for the reductions of the rows of a block.
fn kept_reductions<'k>(k: &'k Recorder, inliner: &Inliner, size: u32) -> Vec<(ValueId, BufferView<'k, 1>)> {
    let space = if size == 1 { MemorySpace::Local } else { MemorySpace::Stack };
    let reductions = inliner.f.live_nodes().map(|(_, node)| node).filter(|node| match node.op {
        Op::Reduce { axis, .. } => is_over_columns(inliner, axis, node.inputs[0], 1),
        _ => false,
    });
    let room = |node: &GraphNode| {
        let v = node.outputs[0];
        let dtype = if inliner.f.ty(v).dtype.is_int() { DType::I32 } else { DType::F32 };
        (v, k.alloc("kept", dtype, [i64::from(size)], space))
    };
    reductions.map(room).collect()
}
