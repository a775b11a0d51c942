//! A softmax with one more term in its sum, for a key without a value.

use mlcc_ir::compute::RedOp;
use mlcc_ir::graph::{Function, ValueId};
use mlcc_ir::kernel::{BinOp, UnOp};
use mlcc_ir::ops::Op;

/// The scores and the logits of `exp(scores - top) / (sum of exp(scores - top) + exp(logits -
/// top))`, with the top of both, over the last axis.
pub fn read(f: &Function, weights: ValueId) -> Option<(ValueId, ValueId)> {
    let last = f.ty(weights).rank().checked_sub(1)?;
    let (exp, sum) = ordered(f, weights, BinOp::Div)?;
    let (scores, top) = ordered(f, unary(f, exp, UnOp::Exp)?, BinOp::Sub)?;
    let is_total =
        |v| op_inputs(f, v, &Op::Reduce { op: RedOp::Sum, axis: last }).is_some_and(|x| x[0] == exp);
    let null = other_operand(f, sum, BinOp::Add, is_total)?;
    let (logits, under) = ordered(f, unary(f, null, UnOp::Exp)?, BinOp::Sub)?;
    let is_top =
        |v| op_inputs(f, v, &Op::Reduce { op: RedOp::Max, axis: last }).is_some_and(|x| x[0] == scores);
    let other = other_operand(f, top, BinOp::Max, is_top)?;
    (under == top && other == logits).then_some((scores, logits))
}

fn op_inputs<'f>(f: &'f Function, v: ValueId, op: &Op) -> Option<&'f [ValueId]> {
    f.defining_node(v).filter(|node| node.op == *op).map(|node| node.inputs.as_slice())
}

fn unary(f: &Function, v: ValueId, op: UnOp) -> Option<ValueId> {
    op_inputs(f, v, &Op::Unary(op)).map(|x| x[0])
}

fn ordered(f: &Function, v: ValueId, op: BinOp) -> Option<(ValueId, ValueId)> {
    op_inputs(f, v, &Op::Binary(op)).map(|x| (x[0], x[1]))
}

/// The operand beside the one that `known` accepts, of an op that commutes.
fn other_operand(f: &Function, v: ValueId, op: BinOp, known: impl Fn(ValueId) -> bool) -> Option<ValueId> {
    match ordered(f, v, op)? {
        (a, b) if known(a) => Some(b),
        (a, b) if known(b) => Some(a),
        _ => None,
    }
}
