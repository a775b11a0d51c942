//! Groups around an attention: the generator for the machine and the number of queries, in one kernel or two.

use super::error::LowerError;
use super::kernel::{ArgContract, GroupKernel, MergeKernel, TemplateResult, finish_kernel};
use super::operands::{bind_inputs, result_name};
use crate::attention::decode::NewRows;
use crate::attention::plan::{DecodePlan, SLICES};
use crate::attention::{AttentionPlan, AttentionProblem, decode, find_attention, gpu, merge, prefill};
use crate::inline::Inliner;
use crate::params::KernelTarget;
use mlcc_ir::builder::KernelBuilder;
use mlcc_ir::dim::Dim;
use mlcc_ir::graph::{Function, GraphNode, ValueId};
use mlcc_ir::kernel::{BufId, ParamAccess};
use mlcc_ir::ops::{AttentionOp, KeySpan, Op};
use mlcc_ir::types::DType;
use mlcc_target::Arch;

/// The first kernel: results, or unfinished sums of slices.
fn emit(kb: &mut KernelBuilder, a: &AttentionProblem, plan: AttentionPlan, rows: &[NewRows], out: BufId) {
    match plan {
        AttentionPlan::Decode(plan) => decode::emit(kb, a, plan, rows, out),
        AttentionPlan::Prefill(plan) => prefill::emit(kb, a, plan, out),
        AttentionPlan::Gpu(plan) => gpu::emit(kb, a, plan, rows, out),
    }
}

/// The second kernel, which joins them.
fn emit_merge(kb: &mut KernelBuilder, a: &AttentionProblem, plan: AttentionPlan, partial: BufId, out: BufId) {
    match plan {
        AttentionPlan::Decode(plan) => merge::emit(kb, a, plan, partial, out),
        AttentionPlan::Gpu(plan) => gpu::emit_merge(kb, a, plan, partial, out),
        AttentionPlan::Prefill(_) => {}
    }
}

/// Most slices of the cache that an attention of one query is cut into; `None` for other groups.
pub(super) fn max_slices(f: &Function) -> Option<i64> {
    let node = find_attention(f)?;
    (f.ty(node.inputs[0]).dims[0].as_const() == Some(1)).then_some(SLICES)
}

/// The most keys that a query of an attention looks at, up to those of other queries of its call; `None` for
/// other groups.
pub(super) fn keys_of_row(f: &Function) -> Option<Dim> {
    let node = find_attention(f)?;
    let Op::Attention(op) = &node.op else { return None };
    let rows = |i: usize| f.ty(node.inputs[i]).dims[0].clone();
    let (queries, keys) = (rows(0), rows(1));
    Some(match op.window {
        0 => keys,
        _ if op.ahead == AttentionOp::ALL => keys,
        window => keys.minimum(&queries.add(&Dim::from(window + op.sinks + op.ahead))),
    })
}

/// True for an attention that can append rows to the caches it reads: it has one query that sees the last
/// row, and on a GPU a block has all query heads of a key head, so that no other block reads the row.
pub(super) fn appends_rows(f: &Function, target: &KernelTarget) -> bool {
    let Some(node) = find_attention(f).filter(|node| f.ty(node.inputs[0]).dims[0].as_const() == Some(1))
    else {
        return false;
    };
    if matches!(&node.op, Op::Attention(op) if op.span == KeySpan::First) {
        return false;
    }
    let has_whole_groups = || {
        let packings = vec![None; f.inputs.len()];
        let (_, inliner) =
            bind_inputs(&mut KernelBuilder::new("plan"), f, &packings, None, target, |_| false).ok()?;
        let a = AttentionProblem::new(node, inliner)?;
        match AttentionPlan::choose(&a, target) {
            AttentionPlan::Gpu(plan) => Some(plan.heads == a.group),
            AttentionPlan::Decode(_) | AttentionPlan::Prefill(_) => None,
        }
    };
    match target.arch {
        Arch::X86_64 | Arch::Aarch64 => !target.batch_invariant,
        Arch::Nvptx => has_whole_groups() == Some(true),
    }
}

/// True for a group of rows `[1, kv, _]` that the attention `f` can append to its caches, which it computes
/// head by head.
pub(super) fn appended_by(f: &Function, rows: &Function) -> bool {
    let heads = find_attention(f).map(|node| &f.ty(node.inputs[1]).dims[1]);
    let by_head = |v: &ValueId| {
        let dims = &rows.ty(*v).dims;
        dims.len() == 3 && dims[0].as_const() == Some(1) && Some(&dims[1]) == heads
    };
    let quantized = rows.live_nodes().any(|(_, node)| matches!(node.op, Op::QuantizeRows { .. }));
    rows.outputs.iter().all(by_head) && !quantized
}

/// True if a group stores the results of its attention rounded by a cast.
fn is_rounded(f: &Function, node: &GraphNode) -> bool {
    let cast = |v: &ValueId| {
        f.defining_node(*v).is_some_and(|cast| matches!(cast.op, Op::Cast(_)) && cast.inputs == node.outputs)
    };
    f.outputs.len() == 1 && f.outputs.iter().all(cast)
}

/// `kb` has the inputs of the group as parameters, bound in `inliner`, then those of the groups of `rows`.
pub(super) fn attention_group(
    mut kb: KernelBuilder,
    f: &Function,
    node: &GraphNode,
    inliner: Inliner<'_, 'static>,
    rows: &[NewRows],
    target: &KernelTarget,
) -> Result<GroupKernel, LowerError> {
    let unfit = || LowerError::internal(format!("group {} is not an attention alone", f.name));
    if node.outputs != f.outputs && !(target.arch == Arch::Nvptx && is_rounded(f, node)) {
        return Err(unfit());
    }
    let a = AttentionProblem::new(node, inliner).ok_or_else(unfit)?;
    let arg = |access| ArgContract { access, partition: None, in_place: vec![] };
    let params = kb.kernel().params.clone();
    let inputs = params.iter().map(|&p| arg(kb.kernel().bufs[p].access));
    let args: Vec<ArgContract> = inputs.chain([arg(ParamAccess::Out)]).collect();
    let plan = AttentionPlan::choose(&a, target);
    let a = if plan.in_powers_of_two() { a.in_powers_of_two() } else { a };
    let emitted = |args| TemplateResult { args, generator: plan.generator(), plan: plan.to_string() };
    let (dtype, elements) = (f.ty(f.outputs[0]).dtype, f.ty(f.outputs[0]).elements());
    let out_name = result_name(f, f.outputs[0]);
    if plan.slices() == 1 {
        let out = kb.param(out_name, dtype, elements, ParamAccess::Out, 64);
        emit(&mut kb, &a, plan, rows, out);
        return finish_kernel(kb, f, emitted(args), target);
    }
    let partial = Dim::from(plan.slices() * a.heads() * DecodePlan::partial_floats(&a));
    let between = kb.param("partial", DType::F32, partial.clone(), ParamAccess::Out, 64);
    emit(&mut kb, &a, plan, rows, between);

    let mut merge = KernelBuilder::new(format!("{}_merge", kb.kernel().name));
    let from = merge.param("partial", DType::F32, partial.clone(), ParamAccess::In, 64);
    let out = merge.param(out_name, dtype, elements, ParamAccess::Out, 64);
    emit_merge(&mut merge, &a, plan, from, out);
    let args_of_merge = vec![arg(ParamAccess::In), arg(ParamAccess::Out)];
    let joins = format!("joins {} slices", plan.slices());
    let merged = TemplateResult { args: args_of_merge, generator: "attention::merge", plan: joins };
    let kernel = Box::new(finish_kernel(merge, f, merged, target)?);
    let first = finish_kernel(kb, f, emitted(args), target)?;
    Ok(GroupKernel { merge: Some(MergeKernel { kernel, bytes: partial.scale(4), reads: vec![] }), ..first })
}
