//! Constants, unary and binary arithmetic and selection with broadcasting, casts.

use super::{Op, OpError, invalid_input};
use crate::compute::ScalarExpr;
use crate::dim::Dim;
use crate::kernel::BinOp;
use crate::types::TensorType;

pub(super) fn infer(op: &Op, inputs: &[&TensorType]) -> Result<Vec<TensorType>, OpError> {
    match (op, inputs) {
        (Op::Constant { dtype, .. }, []) => Ok(vec![TensorType { dtype: *dtype, dims: vec![] }]),
        (Op::Unary(_), [a]) if a.dtype.is_float() => Ok(vec![(*a).clone()]),
        (Op::Unary(_), [a]) => invalid_input(op, format!("takes floats, not {a}")),
        (Op::Cast(_), [a]) if a.dtype.is_packed() => {
            invalid_input(op, "packed weights are dequantized, not cast")
        }
        (Op::Cast(dtype), [a]) => Ok(vec![TensorType { dtype: *dtype, dims: a.dims.clone() }]),
        (Op::Binary(bin), [a, b]) => {
            if !matches!(bin, BinOp::Add | BinOp::Sub | BinOp::Mul | BinOp::Div | BinOp::Min | BinOp::Max) {
                return invalid_input(op, "is not an arithmetic op on tensors");
            }
            if a.dtype != b.dtype || a.dtype.is_packed() {
                return invalid_input(op, format!("operands are {a} and {b}"));
            }
            match broadcast(&a.dims, &b.dims) {
                Some(dims) => Ok(vec![TensorType { dtype: a.dtype, dims }]),
                None => invalid_input(op, format!("shapes of {a} and {b} do not broadcast")),
            }
        }
        (Op::SelectGe, [a, b, x, y]) => {
            let packed = inputs.iter().any(|t| t.dtype.is_packed());
            if a.dtype != b.dtype || x.dtype != y.dtype || packed {
                return invalid_input(op, format!("operands are {a}, {b}, {x} and {y}"));
            }
            let mut shapes = inputs.iter().skip(1).map(|t| &t.dims);
            match shapes.try_fold(a.dims.clone(), |all, dims| broadcast(&all, dims)) {
                Some(dims) => Ok(vec![TensorType { dtype: x.dtype, dims }]),
                None => invalid_input(op, format!("shapes of {a}, {b}, {x} and {y} do not broadcast")),
            }
        }
        _ => invalid_input(op, format!("takes other than {} inputs", inputs.len())),
    }
}

/// NumPy's rule: aligned at the last axis, sizes equal or one of them 1.
pub(super) fn broadcast(a: &[Dim], b: &[Dim]) -> Option<Vec<Dim>> {
    let rank = a.len().max(b.len());
    let one = Dim::from(1);
    let at = |dims: &[Dim], i: usize| match (i + dims.len()).checked_sub(rank) {
        Some(j) => dims[j].clone(),
        None => one.clone(),
    };
    (0..rank)
        .map(|i| match (at(a, i), at(b, i)) {
            (x, y) if x == y || y == one => Some(x),
            (x, y) if x == one => Some(y),
            _ => None,
        })
        .collect()
}

/// Index of a broadcast operand at the output's axes.
pub(super) fn broadcast_index(operand: &TensorType, rank: usize) -> Vec<ScalarExpr> {
    let skip = rank - operand.rank();
    let one = Dim::from(1);
    let axis =
        |(i, d): (usize, &Dim)| if *d == one { ScalarExpr::Int(0) } else { ScalarExpr::Axis(i + skip) };
    operand.dims.iter().enumerate().map(axis).collect()
}

pub(super) fn compute(op: &Op, inputs: &[&TensorType]) -> ScalarExpr {
    let rank = inputs.iter().map(|t| t.rank()).max().unwrap_or(0);
    let load = |i: usize| ScalarExpr::load(i, broadcast_index(inputs[i], rank));
    match op {
        Op::Constant { value, dtype } if dtype.is_int() => {
            ScalarExpr::Cast(*dtype, Box::new(ScalarExpr::Float(*value)))
        }
        Op::Constant { value, .. } => ScalarExpr::Float(*value),
        Op::Unary(un) => ScalarExpr::unary(*un, load(0)),
        Op::Binary(bin) => ScalarExpr::binary(*bin, load(0), load(1)),
        Op::SelectGe => {
            let below = ScalarExpr::binary(BinOp::Lt, load(0), load(1));
            ScalarExpr::Select(Box::new(below), Box::new(load(3)), Box::new(load(2)))
        }
        Op::Cast(dtype) => ScalarExpr::Cast(*dtype, Box::new(load(0))),
        _ => unreachable!("not elementwise: {}", op.name()),
    }
}
