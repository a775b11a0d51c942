//! Groups around one matrix product: the generator of `crate::product` with the rest of the group as its epilogue.

use super::error::LowerError;
use super::kernel::{ArgContract, Emitted};
use super::plan::Partition;
use crate::inline::{Binding, Index, Inliner};
use crate::params::KernelTarget;
use crate::product::{
    Activation, Codes, EPILOGUE_OPERANDS, Epilogue, Product, Sums, Weight, choose, choose_gpu, code_block,
    emit_gpu_product, emit_product,
};
use mlcc_ir::builder::KernelBuilder;
use mlcc_ir::graph::{Function, NodeId, ValueId};
use mlcc_ir::kernel::{Access, BufId};
use mlcc_ir::ops::Op;
use mlcc_ir::types::{DType, Packing};
use mlcc_kernel_lang::{Recorder, Val};
use mlcc_target::Arch;

/// The product inside a group, with its operands as inputs of the group.
#[derive(Clone, Debug)]
pub struct Contraction {
    node: NodeId,
    /// Positions among the group's inputs.
    x: usize,
    scales: Option<usize>,
    sums: Option<usize>,
    w: usize,
    /// Columns per scale of integer activations.
    group: usize,
}

/// The packing that the generators read.
pub fn weight_packing(target: &KernelTarget) -> Packing {
    match target.arch {
        Arch::Nvptx => Packing::RowMajor,
        Arch::X86_64 | Arch::Aarch64 => Packing::Tile16,
    }
}

/// How activations that are no codes enter products with a weight; `None` where there is no kernel.
pub(super) fn activation(x: DType, weight: DType) -> Option<Activation> {
    match (x, weight) {
        (DType::F32, _) => Some(Activation::F32),
        (DType::BF16, DType::BF16) => Some(Activation::BF16),
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
                && activation(f.ty(inputs[0]).dtype, f.ty(inputs[1]).dtype).is_some()
        }
        Op::MatMulI8 { .. } => constant(inputs[3]),
        _ => false,
    }
}

/// Finds the product of a group whose other nodes are an elementwise epilogue of its shape.
pub fn find(f: &Function, packings: &[Option<Packing>], target: &KernelTarget) -> Option<Contraction> {
    let mut products = f.live().filter(|(_, n)| is_contraction(f, &n.op, &n.inputs));
    let (id, node) = products.next()?;
    if products.next().is_some() {
        return None;
    }
    let position = |v: ValueId| f.inputs.iter().position(|&i| i == v);
    let found = match node.op {
        Op::MatMul { .. } => Contraction {
            node: id,
            x: position(node.inputs[0])?,
            scales: None,
            sums: None,
            w: position(node.inputs[1])?,
            group: 0,
        },
        Op::MatMulI8 { group } => Contraction {
            node: id,
            x: position(node.inputs[0])?,
            scales: Some(position(node.inputs[1])?),
            sums: Some(position(node.inputs[2])?),
            w: position(node.inputs[3])?,
            group,
        },
        _ => return None,
    };
    let shape = &f.ty(node.outputs[0]).dims;
    let epilogue = f.live().all(|(n, node)| {
        n == id
            || node.op.is_elementwise()
                && (node.inputs.is_empty() || broadcasts_to(f, node.outputs[0], shape))
    });
    let stores = f.outputs.iter().all(|&v| f.ty(v).dims == *shape);
    (packings[found.w] == Some(weight_packing(target)) && epilogue && stores).then_some(found)
}

fn broadcasts_to(f: &Function, v: ValueId, shape: &[mlcc_ir::dim::Dim]) -> bool {
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
) -> Result<Emitted, LowerError> {
    let product = f.nodes[c.node].outputs[0];
    let weight = f.ty(f.inputs[c.w]).clone();
    let size = |i: usize| weight.dims[i].as_const().unwrap_or(0) as usize;
    let (n, k) = (size(0), size(1));
    let rows = f.ty(product).dims[0].clone();
    let m = kb.dim(&rows);
    let activation = match (c.scales, c.sums) {
        (Some(scales), Some(sums)) => {
            let planes = if f.ty(f.inputs[c.x]).dtype == DType::I16 { 2 } else { 1 };
            let block = code_block(target);
            Activation::Codes(Codes {
                planes,
                group: c.group,
                block,
                scales: inputs[scales],
                starts: inputs[sums],
            })
        }
        _ => activation(f.ty(f.inputs[c.x]).dtype, weight.dtype)
            .ok_or_else(|| LowerError::internal(format!("a product of {weight}")))?,
    };
    let kind = Weight::of(weight.dtype);
    let kind =
        kind.ok_or_else(|| LowerError::internal(format!("a product with weights of type {weight}")))?;
    let x = inputs[c.x];
    let epilogue_operands = epilogue_operands(f, c, inputs, outputs);
    let (w, w_offset) = (inputs[c.w], 0);
    let problem = Product { x, activation, w, w_offset, weight: kind, m, n, k, epilogue_operands };
    let epilogue: &mut Epilogue = &mut |k, sums| store_sums(k, &inliner, product, outputs, n as i64, sums);
    let (slices, generator, plan) = match target.arch {
        Arch::Nvptx => {
            let plan = choose_gpu(target.matrix, &problem, rows.as_const() == Some(1))?;
            emit_gpu_product(kb, &problem, &plan, epilogue)?;
            (None, "product::gpu", plan.to_string())
        }
        Arch::X86_64 | Arch::Aarch64 => {
            let plan = choose(target, weight.dtype, activation, rows.as_const() == Some(1));
            let plan = plan.for_dense(weight.dtype, n, k);
            (emit_product(kb, &problem, &plan, epilogue), "product::cpu", plan.to_string())
        }
    };
    let tiles = slices.map(Partition::Tiles);
    let operands = [Some(c.x), c.scales, c.sums, Some(c.w)];
    let mut args = Vec::new();
    for (i, &v) in f.inputs.iter().enumerate() {
        let streamed = !operands.contains(&Some(i)) && f.ty(v).dims == f.ty(product).dims;
        let partition = if streamed { tiles.clone() } else { None };
        args.push(ArgContract { access: Access::In, partition, in_place: vec![] });
    }
    for &v in &f.outputs {
        let same = |&i: &usize| {
            let other = f.inputs[i];
            !operands.contains(&Some(i)) && f.ty(other) == f.ty(v)
        };
        let in_place = (0..f.inputs.len()).filter(same).collect();
        args.push(ArgContract { access: Access::Out, partition: tiles.clone(), in_place });
    }
    Ok(Emitted { args, generator, plan })
}

/// The results, and the operands of their shape, that the epilogue reads and writes at the places of the sums.
fn epilogue_operands(
    f: &Function,
    c: &Contraction,
    inputs: &[BufId],
    outputs: &[BufId],
) -> [Option<BufId>; EPILOGUE_OPERANDS] {
    let product = f.ty(f.nodes[c.node].outputs[0]);
    let operands = [Some(c.x), c.scales, c.sums, Some(c.w)];
    let others = f.inputs.iter().zip(inputs).enumerate().filter(|(i, _)| !operands.contains(&Some(*i)));
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
    sums: Sums<'k>,
) {
    let (f, lanes) = (inliner.f, sums.lanes);
    let mut ctx = Inliner { mask: sums.mask, ..inliner.with_lanes(lanes) };
    ctx.bindings.insert(product, Binding::Value(sums.acc));
    let index = [Index::scalar(sums.row), Index::from(sums.col, lanes)];
    let value = |&v| ctx.value(k, v, &index).to_lanes(lanes).cast(f.ty(v).dtype).named("value");
    let values: Vec<Val> = f.outputs.iter().map(value).collect();
    for (&buf, value) in outputs.iter().zip(values) {
        sums.store_values(k.view(buf, [1, n]), value);
    }
}
