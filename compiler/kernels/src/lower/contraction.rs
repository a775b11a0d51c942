//! Groups around one matrix product: the generator of `crate::product` with the rest of the group as its
//! epilogue or, on a GPU, as the computation of its activations.

use super::error::LowerError;
use super::kernel::{ArgContract, TemplateResult};
use super::plan::Partition;
use crate::inline::{Binding, Inliner, LaneIndex};
use crate::matmul::{
    ActivationPrologue, EPILOGUE_OPERANDS, FinishedSums, GemvEpilogue, GemvPlan, MatmulActivation,
    MatmulEpilogue, MatmulProblem, MatmulWeight, QuantizedActivations, TensorCoreGemvPlan, choose,
    choose_gpu, code_block, emit_gpu_gemv, emit_gpu_matmul, emit_matmul, emit_tensor_core_gemv, matrix_tile,
};
use crate::params::KernelTarget;
use crate::rows::{RowHeads, for_each_column};
use mlcc_ir::builder::KernelBuilder;
use mlcc_ir::dim::Dim;
use mlcc_ir::graph::{Function, GraphNode, NodeId, ValueId};
use mlcc_ir::kernel::{BufId, MemorySpace, ParamAccess};
use mlcc_ir::ops::Op;
use mlcc_ir::types::{DType, Packing};
use mlcc_kernel_lang::{Recorder, Val};
use mlcc_quant::FragmentSizes;
use mlcc_target::Arch;

/// The product inside a group, with its operands as inputs of the group.
#[derive(Clone, Debug)]
pub struct Contraction {
    node: NodeId,
    x: ActivationSource,
    /// Slices of the result, equally long, that are all that the epilogue reads of it; none where it reads
    /// the result.
    parts: Vec<ValueId>,
    /// Positions among the group's inputs.
    scales: Option<usize>,
    group_sums: Option<usize>,
    w: usize,
    packing: Packing,
    /// Columns per scale of integer activations.
    group: usize,
}

/// The source of the activations.
#[derive(Clone, Debug)]
enum ActivationSource {
    /// An input of the group.
    Input(usize),
    /// Nodes of the group, which read inputs of these positions.
    Computed { nodes: Vec<NodeId>, reads: Vec<usize> },
}

impl Contraction {
    /// True if the product itself, or the nodes that compute its activations, read an input.
    fn reads(&self, i: usize) -> bool {
        let activations = match &self.x {
            ActivationSource::Input(x) => *x == i,
            ActivationSource::Computed { reads, .. } => reads.contains(&i),
        };
        activations || [self.scales, self.group_sums, Some(self.w)].contains(&Some(i))
    }
}

/// Columns from which on weights come in fragments: eight warps have 64 each. With fewer a product of one row
/// leaves warps without work.
const FRAGMENT_COLUMNS: usize = 512;

/// The packing that the generators read best of the weights of a product: fragments where tensor cores
/// multiply them as they are.
pub fn weight_packing(f: &Function, inputs: &[ValueId], target: &KernelTarget) -> Packing {
    match target.arch {
        Arch::X86_64 | Arch::Aarch64 => Packing::Tile16,
        Arch::Nvptx => {
            let (Some(&x), Some(&w), Some(_)) = (inputs.first(), inputs.last(), target.matrix) else {
                return Packing::RowMajor;
            };
            let halves = matches!(f.ty(x).dtype, DType::F16 | DType::BF16);
            let size = |axis: usize| f.ty(w).dims.get(axis).and_then(Dim::as_const).unwrap_or(0) as usize;
            match FragmentSizes::new(f.ty(w).dtype, size(0), size(1)) {
                Ok(_) if halves && size(1) >= FRAGMENT_COLUMNS => Packing::Fragments,
                _ => Packing::RowMajor,
            }
        }
    }
}

/// True if the generators read weights in this packing.
fn reads_packing(packing: Packing, target: &KernelTarget) -> bool {
    match target.arch {
        Arch::X86_64 | Arch::Aarch64 => packing == Packing::Tile16,
        Arch::Nvptx => matches!(packing, Packing::RowMajor | Packing::Fragments),
    }
}

/// The type in which activations that are no codes enter products with a weight; `None` where there is no
/// kernel.
pub(super) fn float_activation(x: DType, weight: DType) -> Option<MatmulActivation> {
    match (x, weight) {
        (DType::F32, _) => Some(MatmulActivation::F32),
        (DType::BF16, DType::BF16 | DType::F16 | DType::Packed(_)) => Some(MatmulActivation::BF16),
        (DType::F16, DType::F16 | DType::Packed(_)) => Some(MatmulActivation::F16),
        _ => None,
    }
}

/// True if a node is a product that the generators take: `[m, k]` times `[n, k]` transposed.
pub fn is_contraction(f: &Function, op: &Op, inputs: &[ValueId]) -> bool {
    let constant = |v: ValueId| f.ty(v).dims.iter().all(|d| d.as_const().is_some());
    match op {
        Op::MatMul { transpose_b: true } => {
            inputs.iter().all(|&v| f.ty(v).rank() == 2)
                && constant(inputs[1])
                && float_activation(f.ty(inputs[0]).dtype, f.ty(inputs[1]).dtype).is_some()
        }
        Op::MatMulI8 { .. } => constant(inputs[3]),
        _ => false,
    }
}

/// Finds the product of a group whose other nodes are an elementwise epilogue of its shape or of a part of
/// its columns, or compute its activations.
pub fn find_contraction(
    f: &Function,
    packings: &[Option<Packing>],
    target: &KernelTarget,
) -> Option<Contraction> {
    let mut products = f.live_nodes().filter(|(_, n)| is_contraction(f, &n.op, &n.inputs));
    let (id, node) = products.next()?;
    if products.next().is_some() {
        return None;
    }
    let position = |v: ValueId| f.inputs.iter().position(|&i| i == v);
    let product = node.outputs[0];
    let parts = result_parts(f, product);
    let w = position(*node.inputs.last()?)?;
    let packing = packings[w].filter(|&packing| reads_packing(packing, target))?;
    let found = match node.op {
        Op::MatMul { .. } => Contraction {
            node: id,
            x: activations_of(f, node.inputs[0], target)?,
            parts,
            scales: None,
            group_sums: None,
            w,
            packing,
            group: 0,
        },
        Op::MatMulI8 { group } => Contraction {
            node: id,
            x: ActivationSource::Input(position(node.inputs[0])?),
            parts,
            scales: Some(position(node.inputs[1])?),
            group_sums: Some(position(node.inputs[2])?),
            w,
            packing,
            group,
        },
        _ => return None,
    };
    if !found.parts.is_empty() && !target.joins_single_rows(&f.ty(product).dims) {
        return None;
    }
    let shape = &f.ty(found.parts.first().copied().unwrap_or(product)).dims;
    let before = |n: NodeId| match &found.x {
        ActivationSource::Input(_) => false,
        ActivationSource::Computed { nodes, .. } => nodes.contains(&n),
    };
    // Constants may be on both sides.
    let apart = |v: &ValueId| f.def_id(*v).is_none_or(|d| !before(d) || f.nodes[d].inputs.is_empty());
    let epilogue = f.live_nodes().filter(|(n, _)| *n != id && !before(*n)).all(|(_, node)| {
        found.parts.contains(&node.outputs[0])
            || node.op.is_elementwise()
                && (node.inputs.is_empty() || broadcasts_to(f, node.outputs[0], shape))
                && node.inputs.iter().all(apart)
    });
    let stores = f.outputs.iter().all(|v| f.ty(*v).dims == *shape && apart(v));
    (epilogue && stores).then_some(found)
}

/// The slices that a product `[m, n]` is read through, in the order of its columns; none if they are not
/// equally long or something else reads it.
pub fn result_parts(f: &Function, product: ValueId) -> Vec<ValueId> {
    let mut slices = Vec::new();
    for (_, node) in f.live_nodes().filter(|(_, n)| n.inputs.contains(&product)) {
        let Op::Slice { axis: 1, start, len } = &node.op else { return Vec::new() };
        let (Some(start), Some(len)) = (start.as_const(), len.as_const()) else { return Vec::new() };
        slices.push((start, len, node.outputs[0]));
    }
    slices.sort_unstable();
    let width = slices.first().map_or(0, |s| s.1);
    let columns = f.ty(product).dims.last().and_then(Dim::as_const);
    let whole = columns == Some(width * slices.len() as i64);
    let equal = slices.iter().enumerate().all(|(i, s)| (s.0, s.1) == (i as i64 * width, width));
    if !whole || !equal || f.outputs.contains(&product) {
        return Vec::new();
    }
    slices.into_iter().map(|s| s.2).collect()
}

/// True if the kernel of a product computes its activations of these dims, where they are made of more than
/// inputs of the group.
pub fn computes_activations(target: &KernelTarget, dims: &[Dim]) -> bool {
    let columns = dims.last().and_then(Dim::as_const);
    target.joins_single_rows(dims) && columns.is_some_and(|k| GemvPlan::can_compute(k as usize))
}

/// The source of activations; `None` where the target does not compute them around a product.
fn activations_of(f: &Function, x: ValueId, target: &KernelTarget) -> Option<ActivationSource> {
    if let Some(input) = f.inputs.iter().position(|&i| i == x) {
        return Some(ActivationSource::Input(input));
    }
    if !computes_activations(target, &f.ty(x).dims) {
        return None;
    }
    let (mut nodes, mut reads, mut next) = (Vec::new(), Vec::new(), vec![x]);
    while let Some(v) = next.pop() {
        match f.def_id(v) {
            None => reads.extend(f.inputs.iter().position(|&i| i == v)),
            Some(def) if nodes.contains(&def) => {}
            Some(def) => {
                nodes.push(def);
                next.extend(&f.nodes[def].inputs);
            }
        }
    }
    let fits = |&n: &NodeId| match RowHeads::of_value(f, x) {
        Some(heads) => f.def_id(x) == Some(n) || is_of_heads(f, &f.nodes[n], heads),
        None => is_of_row(f, &f.nodes[n]),
    };
    nodes.iter().all(fits).then_some(ActivationSource::Computed { nodes, reads })
}

/// True for ops that a block can compute an activation of a row of heads with.
pub fn is_of_heads(f: &Function, node: &GraphNode, heads: RowHeads) -> bool {
    match node.op {
        Op::Reduce { axis, .. } => {
            heads.reduces(f, axis, node.inputs[0]) && f.ty(node.outputs[0]).dtype == DType::F32
        }
        _ => node.op.is_elementwise(),
    }
}

/// True for ops that a block can compute an activation with.
fn is_of_row(f: &Function, node: &GraphNode) -> bool {
    match node.op {
        Op::Slice { .. } | Op::Concat { .. } | Op::Permute { .. } | Op::Iota { .. } => true,
        Op::Reduce { axis, .. } => axis + 1 == f.ty(node.inputs[0]).rank(),
        _ => node.op.is_elementwise(),
    }
}

fn broadcasts_to(f: &Function, v: ValueId, shape: &[Dim]) -> bool {
    let dims = &f.ty(v).dims;
    dims.len() <= shape.len()
        && dims.iter().rev().zip(shape.iter().rev()).all(|(d, s)| d == s || d.as_const() == Some(1))
}

/// Emits the product with the rest of the group as its epilogue.
pub(super) fn emit(
    kb: &mut KernelBuilder,
    f: &Function,
    c: &Contraction,
    inliner: Inliner<'_, 'static>,
    inputs: &[BufId],
    outputs: &[BufId],
    target: &KernelTarget,
) -> Result<TemplateResult, LowerError> {
    let (product, x) = (f.nodes[c.node].outputs[0], f.nodes[c.node].inputs[0]);
    let weight = f.ty(f.inputs[c.w]).clone();
    let size = |i: usize| weight.dims[i].as_const().unwrap_or(0) as usize;
    let (n, k) = (size(0), size(1));
    let rows = f.ty(product).dims[0].clone();
    let m = kb.dim(&rows);
    let activation = match (c.scales, c.group_sums) {
        (Some(scales), Some(sums)) => {
            let planes = if f.ty(x).dtype == DType::I16 { 2 } else { 1 };
            let block = code_block(target);
            MatmulActivation::Codes(QuantizedActivations {
                planes,
                group: c.group,
                block,
                scales: inputs[scales],
                starts: inputs[sums],
            })
        }
        _ => float_activation(f.ty(x).dtype, weight.dtype)
            .ok_or_else(|| LowerError::internal(format!("a product of {weight}")))?,
    };
    let kind = MatmulWeight::from_dtype(weight.dtype);
    let kind =
        kind.ok_or_else(|| LowerError::internal(format!("a product with weights of type {weight}")))?;
    let x_value = x;
    let x = match c.x {
        ActivationSource::Input(i) => inputs[i],
        // A block that computes activations has a buffer for them; here another buffer of the group takes
        // their place.
        ActivationSource::Computed { .. } => inputs[c.w],
    };
    let epilogue_operands = epilogue_operands(f, c, inputs, outputs);
    let (w, w_offset) = (inputs[c.w], 0);
    let packing = c.packing;
    let problem =
        MatmulProblem { x, activation, w, w_offset, weight: kind, packing, m, n, k, epilogue_operands };
    let epilogue: &mut MatmulEpilogue =
        &mut |k, sums| store_sums(k, &inliner, product, outputs, n as i64, sums);
    let (slices, generator, plan) = match target.arch {
        Arch::Nvptx if rows.as_const() == Some(1) => {
            let computed = matches!(c.x, ActivationSource::Computed { .. });
            let prologue: &ActivationPrologue = &|k, threads, keep| {
                let inliner = inliner.clone();
                for_each_column(k, &inliner, x_value, threads, &|column, value| {
                    keep(column, value.cast(DType::F32));
                });
            };
            let of_parts = if c.parts.is_empty() { vec![product] } else { c.parts.clone() };
            let epilogue: &mut GemvEpilogue = &mut |k, col, sums| {
                let sums: Vec<_> = of_parts.iter().copied().zip(sums.iter().copied()).collect();
                store_columns(k, &inliner, &sums, outputs, col);
            };
            let (prologue, parts) = (computed.then_some(prologue), c.parts.len().max(1) as u32);
            // Rounded activations may be what tensor cores multiply.
            let halves = MatmulProblem { activation, ..problem };
            let tiles = target.matrix.and_then(|_| TensorCoreGemvPlan::for_problem(&halves, parts, computed));
            let plan = if let Some(plan) = tiles {
                emit_tensor_core_gemv(kb, &halves, plan, prologue, epilogue)?;
                plan.to_string()
            } else {
                let mut problem = problem;
                if computed {
                    // A block has few activations: they are stored as f32 there, so that they are widened
                    // once.
                    let x = kb.alloc("activations", DType::F32, k, MemorySpace::Shared);
                    problem = MatmulProblem { x, activation: MatmulActivation::F32, ..problem };
                }
                let plan = GemvPlan::new(n, parts, computed).for_problem(&problem);
                emit_gpu_gemv(kb, &problem, plan, prologue, epilogue)?;
                plan.to_string()
            };
            (None, "product::gpu", plan)
        }
        Arch::Nvptx => {
            let plan = choose_gpu(matrix_tile(target, &problem), &problem, false)?;
            emit_gpu_matmul(kb, &problem, &plan, epilogue)?;
            (None, "product::gpu", plan.to_string())
        }
        Arch::X86_64 | Arch::Aarch64 => {
            let plan = choose(target, weight.dtype, activation, rows.as_const() == Some(1));
            let plan = plan.for_dense(weight.dtype, n, k);
            (emit_matmul(kb, &problem, &plan, epilogue), "product::cpu", plan.to_string())
        }
    };
    let tiles = slices.map(Partition::Tiles);
    let mut args = Vec::new();
    for (i, &v) in f.inputs.iter().enumerate() {
        let streamed = !c.reads(i) && f.ty(v).dims == f.ty(product).dims;
        let partition = if streamed { tiles.clone() } else { None };
        args.push(ArgContract { access: ParamAccess::In, partition, in_place: vec![] });
    }
    for &v in &f.outputs {
        let same = |&i: &usize| {
            let other = f.inputs[i];
            !c.reads(i) && f.ty(other) == f.ty(v)
        };
        let in_place = (0..f.inputs.len()).filter(same).collect();
        args.push(ArgContract { access: ParamAccess::Out, partition: tiles.clone(), in_place });
    }
    Ok(TemplateResult { args, generator, plan })
}

/// The results, and the operands of their shape, that the epilogue reads and writes at the places of the
/// sums.
fn epilogue_operands(
    f: &Function,
    c: &Contraction,
    inputs: &[BufId],
    outputs: &[BufId],
) -> [Option<BufId>; EPILOGUE_OPERANDS] {
    let product = f.ty(f.nodes[c.node].outputs[0]);
    let others = f.inputs.iter().zip(inputs).enumerate().filter(|(i, _)| !c.reads(*i));
    let read = others.map(|(_, pair)| pair);
    let mut found = read.chain(f.outputs.iter().zip(outputs)).filter(|(v, _)| f.ty(**v) == product);
    std::array::from_fn(|_| found.next().map(|(_, buf)| *buf))
}

/// Evaluates the group's outputs for some sums of the product and stores them.
fn store_sums<'k>(
    k: &'k Recorder,
    inliner: &Inliner<'_, 'k>,
    product: ValueId,
    outputs: &[BufId],
    n: i64,
    sums: FinishedSums<'k>,
) {
    let (f, lanes) = (inliner.f, sums.lanes);
    let mut ctx = Inliner { mask: sums.mask, ..inliner.with_lanes(lanes) };
    ctx.bindings.insert(product, Binding::Value(sums.acc));
    let index = [LaneIndex::scalar(sums.row), LaneIndex::from(sums.col, lanes)];
    let value = |&v| ctx.value(k, v, &index).to_lanes(lanes).cast(f.ty(v).dtype).named("value");
    let values: Vec<Val> = f.outputs.iter().map(value).collect();
    for (&buf, value) in outputs.iter().zip(values) {
        sums.store_values(k.view(buf, [1, n]), value);
    }
}

/// Stores the results of a row from the sums of its product, or of parts of it, in a column.
fn store_columns<'k>(
    k: &'k Recorder,
    inliner: &Inliner<'_, 'k>,
    sums: &[(ValueId, Val<'k>)],
    outputs: &[BufId],
    col: Val<'k>,
) {
    let mut ctx = inliner.of_one();
    ctx.bindings.extend(sums.iter().map(|&(v, sum)| (v, Binding::Value(sum))));
    let index = [LaneIndex::scalar(k.int(0)), LaneIndex::scalar(col)];
    let value = |&v| ctx.value(k, v, &index).cast(ctx.f.ty(v).dtype).named("value");
    let values: Vec<Val> = ctx.f.outputs.iter().map(value).collect();
    for (&buf, value) in outputs.iter().zip(values) {
        k.flat(buf).set([col], value);
    }
}
