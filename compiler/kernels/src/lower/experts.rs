//! Groups of one op of a mixture of experts.

use super::contraction::float_activation;
use super::error::LowerError;
use super::kernel::{ArgContract, GroupKernel, MergeKernel, TemplateResult, finish_kernel};
use super::operands::result_name;
use super::plan::Partition;
use crate::experts::{GpuExpertMatmul, TopK};
use crate::inline::Inliner;
use crate::machine::MachineKind;
use crate::matmul::{
    EPILOGUE_OPERANDS, ExpertChoice, MatmulActivation, MatmulProblem, MatmulWeight, QuantizedActivations,
    choose, emit_experts,
};
use crate::params::KernelTarget;
use crate::quantize::CodeBlock;
use crate::top_k::{TopKOutput, TopKPlan as LongChoice};
use mlcc_ir::builder::KernelBuilder;
use mlcc_ir::graph::{Function, GraphNode, ValueId};
use mlcc_ir::kernel::{BufId, ParamAccess};
use mlcc_ir::ops::Op;
use mlcc_ir::types::{DType, Packing};
use mlcc_kernel_lang::Recorder;
use mlcc_quant::TILE;
use mlcc_target::Arch;

/// The operand of a product with chosen experts that holds their matrices.
pub fn expert_weight(node: &GraphNode) -> Option<ValueId> {
    match node.op {
        Op::MatMulExperts { .. } => node.inputs.get(1).copied(),
        Op::MatMulExpertsI8 { .. } => node.inputs.get(3).copied(),
        _ => None,
    }
}

/// True if CPU kernels read the experts' matrices in tiles: each has whole ones.
pub fn is_tiled(f: &Function, node: &GraphNode) -> bool {
    let (Op::MatMulExperts { experts } | Op::MatMulExpertsI8 { experts, .. }) = node.op else { return false };
    let rows = expert_weight(node).and_then(|w| f.ty(w).dims[0].as_const()).unwrap_or(0) as usize;
    (rows / experts).is_multiple_of(TILE)
}

/// The packing that kernels read of the experts' matrices.
pub fn weight_packing(target: &KernelTarget) -> Packing {
    match target.arch {
        Arch::Nvptx => Packing::RowMajor,
        Arch::X86_64 | Arch::Aarch64 => Packing::Tile16,
    }
}

/// The type in which the activations of a product that takes no codes enter it.
fn activation_of(f: &Function, node: &GraphNode) -> Option<MatmulActivation> {
    float_activation(f.ty(node.inputs[0]).dtype, f.ty(node.inputs[1]).dtype)
}

/// A lone op that has a kernel here, for weights in these packings.
pub fn find_experts<'f>(
    f: &'f Function,
    packings: &[Option<Packing>],
    target: &KernelTarget,
) -> Option<&'f GraphNode> {
    let (_, node) = f.live_nodes().next().filter(|_| f.body.len() == 1)?;
    let tiled = |v: ValueId| {
        let position = f.inputs.iter().position(|&i| i == v);
        position.is_some_and(|i| packings[i] == Some(Packing::Tile16)) && is_tiled(f, node)
    };
    let fits = match node.op {
        Op::TopK { .. } => true,
        Op::MatMulExperts { .. } if target.arch == Arch::Nvptx => true,
        Op::MatMulExperts { .. } if activation_of(f, node).is_none() => false,
        _ => expert_weight(node).is_some_and(tiled),
    };
    fits.then_some(node)
}

/// The choice of a group when it is made on a GPU by whole blocks; `None` for other groups.
pub(super) fn long_choice(f: &Function, node: &GraphNode, target: &KernelTarget) -> Option<LongChoice> {
    let Op::TopK { k } = node.op else { return None };
    let columns = f.ty(node.inputs[0]).dims[1].as_const()?;
    LongChoice::new(k as i64, columns).filter(|_| target.arch == Arch::Nvptx)
}

/// A choice by whole blocks, in one kernel or two. `kb` has the inputs of the group, bound in `inliner`.
pub(super) fn choose_long(
    mut kb: KernelBuilder,
    f: &Function,
    node: &GraphNode,
    choice: LongChoice,
    inliner: &Inliner<'_, 'static>,
    target: &KernelTarget,
) -> Result<GroupKernel, LowerError> {
    let x = node.inputs[0];
    let rows = f.ty(x).dims[0].clone();
    let arg = |access| ArgContract { access, partition: None, in_place: vec![] };
    let inputs = || f.inputs.iter().map(|_| arg(ParamAccess::In));
    let results = |kb: &mut KernelBuilder| {
        let mut of_op = [None; 2];
        for &v in &f.outputs {
            let ty = f.ty(v);
            let buf = kb.param(result_name(f, v), ty.dtype, ty.elements(), ParamAccess::Out, 64);
            let at = node.outputs.iter().position(|&o| o == v);
            if let Some(slot) = at.and_then(|at| of_op.get_mut(at)) {
                *slot = Some(buf);
            }
        }
        of_op
    };
    let outputs = || f.outputs.iter().map(|_| arg(ParamAccess::Out));
    let plan = format!("the largest {} by blocks, {} tiles of a row", choice.count, choice.tile_count());
    let emitted = |args, plan| TemplateResult { args, generator: "top_k", plan };
    if choice.tile_count() == 1 {
        let [values, ids] = results(&mut kb);
        Recorder::within(&mut kb, |k| choice.emit(inliner, k, x, TopKOutput::Results { values, ids }));
        return finish_kernel(kb, f, emitted(inputs().chain(outputs()).collect(), plan), target);
    }
    let between = rows.scale(choice.partial_keys());
    let keys = kb.param("keys", DType::I64, between.clone(), ParamAccess::Out, 64);
    Recorder::within(&mut kb, |k| choice.emit(inliner, k, x, TopKOutput::Partial(keys)));
    let mut merge = KernelBuilder::new(format!("{}_merge", kb.kernel().name));
    let from = merge.param("keys", DType::I64, between.clone(), ParamAccess::In, 64);
    let of_merge = results(&mut merge);
    Recorder::within(&mut merge, |k| choice.emit_merge(k, &rows, from, of_merge));
    let args = std::iter::once(arg(ParamAccess::In)).chain(outputs()).collect();
    let joins = format!("joins {} tiles", choice.tile_count());
    let kernel = Box::new(finish_kernel(merge, f, emitted(args, joins), target)?);
    let args = inputs().chain([arg(ParamAccess::Out)]).collect();
    let first = finish_kernel(kb, f, emitted(args, plan), target)?;
    Ok(GroupKernel { merge: Some(MergeKernel { kernel, bytes: between.scale(8), reads: vec![] }), ..first })
}

pub(super) fn emit(
    kb: &mut KernelBuilder,
    f: &Function,
    node: &GraphNode,
    inliner: Inliner<'_, 'static>,
    inputs: &[BufId],
    outputs: &[BufId],
    target: &KernelTarget,
) -> Result<TemplateResult, LowerError> {
    let missing = || LowerError::internal(format!("operands of group {}", f.name));
    let buffer = |v: ValueId| f.inputs.iter().position(|&i| i == v).map(|i| inputs[i]).ok_or_else(missing);
    let arg = |access, partition| ArgContract { access, partition, in_place: vec![] };
    let emitted = |partition: Option<Partition>, generator, plan: String| {
        let ins = f.inputs.iter().map(|_| arg(ParamAccess::In, None));
        let args = ins.chain(f.outputs.iter().map(|_| arg(ParamAccess::Out, partition.clone()))).collect();
        TemplateResult { args, generator, plan }
    };
    match node.op {
        Op::TopK { k } => {
            let out = |i: usize| f.outputs.iter().position(|&v| v == node.outputs[i]).map(|i| outputs[i]);
            let x = node.inputs[0];
            let (values, ids) = (out(0), out(1));
            Recorder::within(kb, |rec| {
                TopK { k: rec, inliner, x, count: k as i64, values, ids }
                    .emit(MachineKind::for_target(target));
            });
            let rows = Partition::Rows(f.ty(x).dims[0].clone());
            let plan = format!("top k, a round for each of {k}, {}", MachineKind::for_target(target));
            Ok(emitted(Some(rows), "experts", plan))
        }
        Op::MatMulExperts { .. } if target.arch == Arch::Nvptx => {
            let [x, w, ids] = node.inputs[..] else { return Err(missing()) };
            let size = |v: ValueId, axis: usize| f.ty(v).dims[axis].as_const().unwrap_or(0);
            let out = node.outputs[0];
            let x_buffer = buffer(x)?;
            Recorder::within(kb, |k| {
                let product = GpuExpertMatmul {
                    k,
                    inliner,
                    x: x_buffer,
                    w,
                    ids,
                    out: outputs[0],
                    rows: f.ty(ids).dims[0].clone(),
                    slots: size(ids, 1),
                    shared: size(x, 1) == 1,
                    n: size(out, 2),
                    columns: size(w, 1),
                };
                product.emit();
            });
            Ok(emitted(None, "experts", "a block for four rows of an expert's matrix".into()))
        }
        Op::MatMulExperts { experts } | Op::MatMulExpertsI8 { experts, .. } => {
            let (slices, plan) = product(kb, f, node, experts, (inputs, outputs[0]), target)?;
            Ok(emitted(Some(Partition::Tiles(slices)), "product::experts", plan))
        }
        _ => Err(missing()),
    }
}

/// The product on a CPU; gives the number of slices that workers share out, and the plan for people.
fn product(
    kb: &mut KernelBuilder,
    f: &Function,
    node: &GraphNode,
    experts: usize,
    (inputs, out): (&[BufId], BufId),
    target: &KernelTarget,
) -> Result<(i64, String), LowerError> {
    let missing = || LowerError::internal(format!("operands of group {}", f.name));
    let size = |v: ValueId, axis: usize| f.ty(v).dims[axis].as_const().unwrap_or(0);
    let position = |v: &ValueId| f.inputs.iter().position(|i| i == v).map(|i| inputs[i]);
    let operands: Option<Vec<BufId>> = node.inputs.iter().map(position).collect();
    let (x, activation, w, ids) = match (&node.op, operands.as_deref()) {
        (Op::MatMulExpertsI8 { group, .. }, Some(&[codes, scales, starts, w, ids])) => {
            let planes = if f.ty(node.inputs[0]).dtype == DType::I16 { 2 } else { 1 };
            (
                codes,
                MatmulActivation::Codes(QuantizedActivations {
                    planes,
                    group: *group,
                    block: CodeBlock::SINGLE,
                    scales,
                    starts,
                }),
                w,
                ids,
            )
        }
        (_, Some(&[x, w, ids])) => (x, activation_of(f, node).ok_or_else(missing)?, w, ids),
        _ => return Err(missing()),
    };
    let weight_ty = expert_weight(node).map(|w| f.ty(w)).ok_or_else(missing)?;
    let Some(kind) = MatmulWeight::from_dtype(weight_ty.dtype) else {
        return Err(LowerError::internal(format!("a product with weights of type {weight_ty}")));
    };
    let ids_ty = f.ty(node.inputs[node.inputs.len() - 1]);
    let k = weight_ty.dims[1].as_const().unwrap_or(0) as usize;
    let n = size(node.outputs[0], 2) as usize;
    let single = ids_ty.dims[0].as_const() == Some(1);
    let m = kb.dim(&ids_ty.dims[0]);
    let mut epilogue_operands = [None; EPILOGUE_OPERANDS];
    epilogue_operands[0] = (f.ty(node.outputs[0]).dtype == DType::F32).then_some(out);
    let (w_offset, packing) = (0, Packing::Tile16);
    let problem =
        MatmulProblem { x, activation, w, w_offset, weight: kind, packing, m, n, k, epilogue_operands };
    let slots = ids_ty.dims[1].as_const().unwrap_or(0);
    let choice = ExpertChoice { ids, experts, slots, shared: size(node.inputs[0], 1) == 1 };
    let plan = choose(target, weight_ty.dtype, activation, single).for_shape(weight_ty.dtype, n, k);
    let slices = emit_experts(kb, &problem, &plan, &choice, &mut |k, sums| {
        sums.store(k.view(out, [1, n as i64]));
    });
    Ok((slices, plan.to_string()))
}
