//! Ranks gather activations for products on 8-bit activations as codes and scales, a quarter of the bytes
//! ([`TpMode::Codes`]). Each rank quantizes its part, which is whole groups. The values that readers make of
//! codes and magnitudes have the same codes again, so N ranks give the bits of one.
//!
//! Kernels lay codes of several rows out in blocks and tie scales of neighbouring groups together, so codes
//! of parts cannot be joined in that layout. Therefore codes are sent row by row, with the largest magnitude
//! of each group. A reader makes values of them and quantizes these as usual: the largest value of a group is
//! the magnitude that was sent, so its scale is the same, and all others are within a thousandth of a code of
//! theirs.
//!
//! That takes one more all-gather, so single rows stay floats.

use crate::outline::entry_functions;
use crate::shard::TpMode;
use crate::{LoweredProgram, PassContext, PassError};
use mlcc_ir::compute::RedOp;
use mlcc_ir::dim::Dim;
use mlcc_ir::entity::EntityId;
use mlcc_ir::graph::{Function, GraphNode, NodeId, ValueId};
use mlcc_ir::kernel::{BinOp, UnOp};
use mlcc_ir::module::Module;
use mlcc_ir::ops::{Op, OpError, max_code};
use mlcc_ir::types::{DType, TensorType};
use std::collections::BTreeMap;

const PASS: &str = "exchange_codes";

const BITS: usize = 8;
/// Relative amount by which values of codes are larger than code times scale. Without it, values of the
/// largest code could be below the magnitude of their group; with it they are above, and are clamped to it.
/// It is far less than the distance from a code to where the next one begins.
const ABOVE: f64 = 1.0 / (1 << 20) as f64;

pub fn run(program: &mut LoweredProgram, ctx: &mut PassContext) -> Result<usize, PassError> {
    if ctx.options.tp_mode != TpMode::Codes || program.module.rank_count() < 2 {
        return Ok(0);
    }
    let mut total = 0;
    for id in entry_functions(&program.module) {
        let module = &program.module;
        let f = &module.functions[id];
        let found = quantized_gathers(f);
        let gathered = f.live_nodes().filter(|(_, n)| matches!(n.op, Op::AllGather { .. })).count();
        let (count, name) = (found.len(), &f.name);
        if found.is_empty() {
            ctx.note(format!("@{name}: none of {gathered} exchanges as codes"));
            continue;
        }
        let rebuilt = f.rebuild(|out, node, op, inputs| match (op, found.get(&node)) {
            (Op::AllGather { ranks }, Some(&gather)) => {
                of_codes(module, out, inputs[0], *ranks, gather).map(|all| Some(vec![all]))
            }
            _ => Ok::<_, OpError>(None),
        });
        let rebuilt = rebuilt.map_err(PassError::op_error(PASS))?;
        let [bytes, before] = [&rebuilt, f].map(row_bytes);
        ctx.note(format!(
            "@{name}: {count} of {gathered} exchanges as codes: a rank sends {bytes} bytes of a row instead of {before}"
        ));
        program.module.functions[id] = rebuilt;
        total += count;
    }
    Ok(total)
}

/// The bytes of a row that a rank sends in all all-gathers.
fn row_bytes(f: &Function) -> i64 {
    let exchanges = f.live_nodes().filter(|(_, node)| matches!(node.op, Op::AllGather { .. }));
    let of_part = exchanges.map(|(_, node)| {
        let ty = f.ty(node.inputs[0]);
        let elements = ty.dims.iter().filter_map(Dim::as_const).product::<i64>();
        elements * ty.dtype.bytes().unwrap_or(0) as i64
    });
    of_part.sum()
}

/// The way in which the readers of a gather quantize it.
#[derive(Clone, Copy, PartialEq, Eq)]
struct QuantizedGather {
    /// Columns of a scale.
    group: usize,
    /// Columns of a sum; those of a group are a multiple.
    part: usize,
}

/// The all-gathers of several rows that only 8-bit quantizers read, where the part of a rank is whole groups.
fn quantized_gathers(f: &Function) -> BTreeMap<NodeId, QuantizedGather> {
    let mut readers: Vec<Vec<&GraphNode>> = vec![Vec::new(); f.values.len()];
    for (_, node) in f.live_nodes() {
        node.inputs.iter().for_each(|v| readers[v.index()].push(node));
    }
    let quantized = |node: &GraphNode| {
        let all = node.outputs[0];
        if f.outputs.contains(&all) {
            return None;
        }
        let mut ways = readers[all.index()].iter().map(|reader| match reader.op {
            Op::QuantizeRows { group, bits: BITS, part, .. } => Some(QuantizedGather { group, part }),
            _ => None,
        });
        let first = ways.next()??;
        ways.all(|way| way.is_some_and(|way| way.group == first.group)).then_some(first)
    };
    let fits = |ty: &TensorType, gather: QuantizedGather| {
        let Some((columns, rows)) = ty.dims.split_last() else { return false };
        let whole = columns.as_const().is_some_and(|columns| columns % gather.group as i64 == 0);
        ty.dtype == DType::F32 && whole && rows.iter().any(|rows| rows.as_const().is_none())
    };
    let exchanges = f.live_nodes().filter(|(_, node)| matches!(node.op, Op::AllGather { .. }));
    let of_codes = exchanges.filter_map(|(id, node)| {
        let gather = quantized(node)?;
        fits(f.ty(node.inputs[0]), gather).then_some((id, gather))
    });
    of_codes.collect()
}

/// Builds a function.
struct NodeEmitter<'a> {
    module: &'a Module,
    out: &'a mut Function,
}

impl NodeEmitter<'_> {
    fn op(&mut self, op: Op, inputs: &[ValueId]) -> Result<ValueId, OpError> {
        Ok(self.out.append(self.module, op, inputs)?[0])
    }
    fn number(&mut self, value: f64) -> Result<ValueId, OpError> {
        self.op(Op::Constant { value, dtype: DType::F32 }, &[])
    }
    /// The same elements in rows of the given sizes.
    fn rows(&mut self, v: ValueId, rows: &[Dim], sizes: &[i64]) -> Result<ValueId, OpError> {
        let dims = rows.iter().cloned().chain(sizes.iter().map(|&size| Dim::from(size))).collect();
        self.op(Op::Reshape { dims }, &[v])
    }
    /// The largest magnitude of each group of `x: [.., groups, columns]`, NaN where one of its values is no
    /// finite number: codes cannot tell.
    fn group_absmax(&mut self, x: ValueId, axis: usize) -> Result<ValueId, OpError> {
        let sizes = self.op(Op::Unary(UnOp::Abs), &[x])?;
        let largest = self.op(Op::Reduce { op: RedOp::Max, axis }, &[sizes])?;
        let zero = self.number(0.0)?;
        let nothing = self.op(Op::Binary(BinOp::Mul), &[x, zero])?;
        let nothing = self.op(Op::Reduce { op: RedOp::Sum, axis }, &[nothing])?;
        self.op(Op::Binary(BinOp::Add), &[largest, nothing])
    }
}

/// The values that readers quantize in place of the gathered part: they have its codes and scales.
fn of_codes(
    module: &Module,
    out: &mut Function,
    x: ValueId,
    ranks: usize,
    QuantizedGather { group, part }: QuantizedGather,
) -> Result<ValueId, OpError> {
    let dims = out.ty(x).dims.clone();
    let mut emit = NodeEmitter { module, out };
    let (rows, own) = match dims.split_last() {
        Some((own, rows)) => (rows, own.as_const().unwrap_or(0)),
        None => return emit.op(Op::AllGather { ranks }, &[x]),
    };
    let (columns, groups) = (group as i64, own / group as i64);
    let all = groups * ranks as i64;
    let grouped = emit.rows(x, rows, &[groups, columns])?;
    let largest = emit.group_absmax(grouped, rows.len() + 1)?;
    let largest = emit.rows(largest, rows, &[groups])?;
    let scales = emit.op(Op::GroupScale { group, bits: BITS }, &[x])?;
    let codes = emit.op(Op::GroupQuantize { group, bits: BITS, part }, &[x, scales])?;

    let codes = emit.op(Op::AllGather { ranks }, &[codes])?;
    let largest = emit.op(Op::AllGather { ranks }, &[largest])?;

    let codes = emit.rows(codes, rows, &[all, columns])?;
    let codes = emit.op(Op::Cast(DType::F32), &[codes])?;
    let largest = emit.rows(largest, rows, &[all, 1])?;
    let unit = emit.number((1.0 + ABOVE) / max_code(BITS))?;
    let unit = emit.op(Op::Binary(BinOp::Mul), &[largest, unit])?;
    let values = emit.op(Op::Binary(BinOp::Mul), &[codes, unit])?;
    let values = emit.op(Op::Binary(BinOp::Min), &[values, largest])?;
    let least = emit.op(Op::Unary(UnOp::Neg), &[largest])?;
    let values = emit.op(Op::Binary(BinOp::Max), &[values, least])?;
    emit.rows(values, rows, &[all * columns])
}
