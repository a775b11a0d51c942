//! Groups of one op of a mixture of experts.

use super::LowerError;
use super::group::ArgContract;
use super::plan::Partition;
use crate::experts::{Machine, Product, TopK};
use crate::generic::inline::Inliner;
use crate::params::KernelTarget;
use mlcc_ir::builder::KernelBuilder;
use mlcc_ir::graph::{Function, Node, ValueId};
use mlcc_ir::kernel::{Access, BufId};
use mlcc_ir::ops::Op;
use mlcc_ir::types::Packing;
use mlcc_quant::TILE;
use mlcc_target::Arch;

fn machine(target: &KernelTarget) -> Machine {
    match target.arch {
        Arch::Nvptx => Machine::Gpu,
        Arch::X86_64 | Arch::Aarch64 => Machine::Cpu { lanes: target.f32_lanes() },
    }
}

/// True if the kernel reads the experts' matrices in tiles: each has whole ones.
pub fn is_tiled(f: &Function, node: &Node) -> bool {
    let Op::MatMulExperts { experts } = node.op else { return false };
    let rows = f.ty(node.inputs[1]).dims[0].as_const().unwrap_or(0) as usize;
    (rows / experts).is_multiple_of(TILE)
}

/// A lone op that has a kernel here, for weights in these packings.
pub fn find<'f>(f: &'f Function, packings: &[Option<Packing>], target: &KernelTarget) -> Option<&'f Node> {
    let (_, node) = f.live().next().filter(|_| f.body.len() == 1)?;
    let tiled = |v: ValueId| {
        let position = f.inputs.iter().position(|&i| i == v);
        position.is_some_and(|i| packings[i] == Some(Packing::Tile16)) && is_tiled(f, node)
    };
    let fits = match node.op {
        Op::TopK { .. } => true,
        Op::MatMulExperts { .. } => target.arch == Arch::Nvptx || tiled(node.inputs[1]),
        _ => false,
    };
    fits.then_some(node)
}

pub(super) fn emit(
    kb: &mut KernelBuilder,
    f: &Function,
    node: &Node,
    inliner: Inliner,
    inputs: &[BufId],
    outputs: &[BufId],
    target: &KernelTarget,
) -> Result<Vec<ArgContract>, LowerError> {
    let missing = || LowerError::internal(format!("operands of group {}", f.name));
    let buffer = |v: ValueId| f.inputs.iter().position(|&i| i == v).map(|i| inputs[i]).ok_or_else(missing);
    let arg = |access, partition| ArgContract { access, partition, in_place: vec![] };
    let shared = |partition: Option<Partition>| {
        let ins = f.inputs.iter().map(|_| arg(Access::In, None));
        ins.chain(f.outputs.iter().map(|_| arg(Access::Out, partition.clone()))).collect()
    };
    match node.op {
        Op::TopK { k } => {
            let out = |i: usize| f.outputs.iter().position(|&v| v == node.outputs[i]).map(|i| outputs[i]);
            let x = node.inputs[0];
            TopK { inliner, x, k, values: out(0), ids: out(1) }.emit(kb, machine(target));
            Ok(shared(Some(Partition::Rows(f.ty(x).dims[0].clone()))))
        }
        Op::MatMulExperts { experts } => {
            let [x, w, ids] = node.inputs[..] else { return Err(missing()) };
            let size = |v: ValueId, axis: usize| f.ty(v).dims[axis].as_const().unwrap_or(0);
            let product = Product {
                inliner,
                x: (x, buffer(x)?),
                w: (w, buffer(w)?),
                ids,
                out: outputs[0],
                rows: f.ty(ids).dims[0].clone(),
                slots: size(ids, 1),
                shared: size(x, 1) == 1,
                n: size(w, 0) / experts as i64,
                k: size(w, 1) as usize,
            };
            match machine(target) {
                Machine::Cpu { lanes } => product.emit_cpu(kb, lanes),
                Machine::Gpu => product.emit_gpu(kb),
            }
            Ok(shared(None))
        }
        _ => Err(missing()),
    }
}
