//! Groups of elementwise ops, reductions over the last axis, and quantizers.

use super::error::LowerError;
use super::kernel::{ArgContract, TemplateResult};
use super::plan::Partition;
use crate::inline::Inliner;
use crate::machine::MachineKind;
use crate::matmul::{DOT_COLUMNS, code_block};
use crate::params::KernelTarget;
use crate::quantize::RowCodes;
use crate::rows::RowKernel;
use mlcc_ir::builder::KernelBuilder;
use mlcc_ir::dim::Dim;
use mlcc_ir::graph::{Function, GraphNode, ValueId};
use mlcc_ir::kernel::{BufId, ParamAccess};
use mlcc_ir::ops::Op;
use mlcc_kernel_lang::Recorder;

pub(super) fn emit(
    kb: &mut KernelBuilder,
    f: &Function,
    inliner: Inliner<'_, 'static>,
    outputs: &[BufId],
    target: &KernelTarget,
) -> Result<TemplateResult, LowerError> {
    let leading = |v: &ValueId| {
        let dims = &f.ty(*v).dims;
        dims[..dims.len().saturating_sub(1)].to_vec()
    };
    let rows = f.outputs.first().map(leading).unwrap_or_default();
    if f.outputs.iter().any(|v| leading(v) != rows) {
        return Err(LowerError::internal(format!("group {} stores rows of different shapes", f.name)));
    }
    let codes = row_codes(f, outputs)?;
    let stored = |v: &ValueId| f.defining_node(*v).is_none_or(|n| !matches!(n.op, Op::QuantizeRows { .. }));
    let pairs = f.outputs.iter().copied().zip(outputs.iter().copied());
    let stores: Vec<(ValueId, BufId)> = pairs.filter(|(v, _)| stored(v)).collect();
    let (machine, block) = (MachineKind::for_target(target), code_block(target));
    Recorder::within(kb, |k| {
        let (inliner, leading, outputs, codes) = (&inliner, rows.as_slice(), stores.as_slice(), &codes);
        RowKernel { k, inliner, leading, outputs, codes, block, machine }.emit();
    });

    let first = rows.first().cloned().unwrap_or(Dim::from(1));
    let single = first.as_const() == Some(1);
    let moves = f.live_nodes().any(|(_, n)| !is_row_local(f, n));
    // Ops on groups of columns read columns whose places an output may have taken already.
    let columnwise = f.live_nodes().all(|(_, n)| n.op.is_elementwise() || matches!(n.op, Op::Reduce { .. }));
    let partition = |v: ValueId, output: bool| {
        let same_rows = codes.is_empty() && f.ty(v).rank() > 1 && f.ty(v).dims.first() == Some(&first);
        (single || same_rows && (output || !moves)).then(|| Partition::Rows(first.clone()))
    };
    let mut args: Vec<ArgContract> = f
        .inputs
        .iter()
        .map(|&v| ArgContract { access: ParamAccess::In, partition: partition(v, false), in_place: vec![] })
        .collect();
    for &v in &f.outputs {
        // A row that is reduced is read again after the first store of a later loop would have overwritten
        // it.
        let one_loop = f.outputs.iter().all(|&o| f.ty(o).dims.last() == f.ty(v).dims.last())
            && f.outputs.iter().all(|&o| is_reduction(f, o) == is_reduction(f, v));
        let same = |&i: &usize| {
            let input = f.ty(f.inputs[i]);
            one_loop && !moves && columnwise && input.dims == f.ty(v).dims && input.dtype == f.ty(v).dtype
        };
        let in_place = (0..f.inputs.len()).filter(same).collect();
        args.push(ArgContract { access: ParamAccess::Out, partition: partition(v, true), in_place });
    }
    let plan = match codes.first() {
        None => format!("{machine}"),
        Some(codes) => format!(
            "{machine}, {}-bit codes, blocks of {} rows by {} columns",
            codes.bits, block.rows, block.columns
        ),
    };
    Ok(TemplateResult { args, generator: "rows", plan })
}

/// The rows that a group quantizes, with the buffers of the results.
fn row_codes(f: &Function, outputs: &[BufId]) -> Result<Vec<RowCodes>, LowerError> {
    let mut all = Vec::new();
    for (_, node) in f.live_nodes() {
        let Op::QuantizeRows { group, bits, part, zero } = node.op else { continue };
        let buffer = |v: &ValueId| f.outputs.iter().position(|o| o == v).map(|at| outputs[at]);
        let buffers: Option<Vec<BufId>> = node.outputs.iter().map(buffer).collect();
        let k = f.ty(node.inputs[0]).dims.last().and_then(Dim::as_const);
        let (Some([codes, scales, starts]), Some(k), DOT_COLUMNS) = (buffers.as_deref(), k, part) else {
            return Err(LowerError::internal(format!(
                "group {} quantizes rows that nobody reads whole",
                f.name
            )));
        };
        let (codes, scales, starts) = (*codes, *scales, *starts);
        all.push(RowCodes {
            x: node.inputs[0],
            codes,
            scales,
            starts,
            group,
            bits,
            part,
            zero,
            k: k as usize,
        });
    }
    Ok(all)
}

/// True if a row of the results depends on no other row of the operands.
pub fn is_row_local(f: &Function, n: &GraphNode) -> bool {
    match n.op {
        Op::Reduce { axis, .. } => axis + 1 == f.ty(n.inputs[0]).rank(),
        Op::Slice { axis, .. } | Op::Concat { axis } => axis > 0,
        Op::Reshape { .. } => f.ty(n.inputs[0]).dims.first() == f.ty(n.outputs[0]).dims.first(),
        Op::GroupScale { .. } | Op::GroupQuantize { .. } | Op::GroupSum { .. } | Op::QuantizeRows { .. } => {
            true
        }
        _ => n.op.is_elementwise(),
    }
}

fn is_reduction(f: &Function, v: ValueId) -> bool {
    f.defining_node(v).is_some_and(|n| matches!(n.op, Op::Reduce { .. }))
}
