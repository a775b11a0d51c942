//! Routing to experts and their matrix products.

use super::{Op, OpError, invalid_input, quant};
use crate::compute::{RedOp, ScalarExpr};
use crate::dim::Dim;
use crate::kernel::BinOp;
use crate::types::{DType, TensorType};

pub(super) fn infer(op: &Op, inputs: &[&TensorType]) -> Result<Vec<TensorType>, OpError> {
    match (op, inputs) {
        (Op::TopK { k }, [x]) => {
            let columns = x.dims.get(1).and_then(Dim::as_const).unwrap_or(0);
            if x.rank() != 2 || x.dtype != DType::F32 || columns < *k as i64 {
                return invalid_input(op, format!("takes f32[n, at least {k}], not {x}"));
            }
            let dims = vec![x.dims[0].clone(), Dim::from(*k)];
            Ok(vec![
                TensorType { dtype: DType::F32, dims: dims.clone() },
                TensorType { dtype: DType::I32, dims },
            ])
        }
        (Op::MatMulExperts { experts }, [x, weight, ids]) => {
            if x.rank() != 3 || !matches!(x.dtype, DType::F32 | DType::BF16) {
                return invalid_input(op, format!("takes f32 or bf16 [n, slots, in], not {x}"));
            }
            if weight.rank() != 2 || weight.dims[1] != x.dims[2] {
                return invalid_input(op, format!("{weight} has no matrices for {x}"));
            }
            products(op, *experts, x, weight, ids)
        }
        (Op::MatMulExpertsI8 { experts, group }, [q, s, z, weight, ids]) => {
            quant::codes_fit(op, *group, [q, s, z, weight])?;
            if q.rank() != 3 {
                return invalid_input(op, format!("takes codes of rank 3, not {q}"));
            }
            products(op, *experts, q, weight, ids)
        }
        _ => invalid_input(op, format!("takes other than {} inputs", inputs.len())),
    }
}

/// The type of the results for rows `x: [n, slots or 1, ..]`.
fn products(
    op: &Op,
    experts: usize,
    x: &TensorType,
    weight: &TensorType,
    ids: &TensorType,
) -> Result<Vec<TensorType>, OpError> {
    let rows = weight.dims.first().and_then(Dim::as_const).unwrap_or(0);
    let experts = experts as i64;
    if experts == 0 || rows % experts != 0 {
        return invalid_input(op, format!("{weight} are no {experts} matrices for {x}"));
    }
    if ids.rank() != 2 || ids.dtype != DType::I32 {
        return invalid_input(op, format!("takes a choice i32[n, slots], not {ids}"));
    }
    if x.dims[0] != ids.dims[0] || x.dims[1] != ids.dims[1] && x.dims[1].as_const() != Some(1) {
        return invalid_input(op, format!("{x} does not go with the choice {ids}"));
    }
    let dims = vec![ids.dims[0].clone(), ids.dims[1].clone(), Dim::from(rows / experts)];
    Ok(vec![TensorType { dtype: DType::F32, dims }])
}

pub(super) fn compute(op: &Op, inputs: &[&TensorType]) -> Vec<ScalarExpr> {
    match op {
        Op::TopK { .. } => vec![chosen(inputs[0], false), chosen(inputs[0], true)],
        Op::MatMulExperts { experts } => {
            let activation = ScalarExpr::load(0, in_slot(inputs[0], ScalarExpr::Red(0)));
            let weight = weight_of(*experts, inputs[1], 1, 2);
            let product = ScalarExpr::product(activation, weight);
            vec![ScalarExpr::reduce(RedOp::Sum, 0, inputs[1].dims[1].clone(), product)]
        }
        Op::MatMulExpertsI8 { experts, group } => {
            let group_index =
                ScalarExpr::binary(BinOp::Div, ScalarExpr::Red(0), ScalarExpr::Int(*group as i64));
            let code = ScalarExpr::load(0, in_slot(inputs[0], ScalarExpr::Red(0)));
            let scale = ScalarExpr::load(1, in_slot(inputs[1], group_index));
            let weight = weight_of(*experts, inputs[3], 3, 4);
            let product = ScalarExpr::product(ScalarExpr::product(code, scale), weight);
            vec![ScalarExpr::reduce(RedOp::Sum, 0, inputs[3].dims[1].clone(), product)]
        }
        _ => unreachable!("not an op of experts: {}", op.name()),
    }
}

/// A column of the row of `x: [n, slots or 1, ..]` that belongs to a result.
fn in_slot(x: &TensorType, column: ScalarExpr) -> Vec<ScalarExpr> {
    let slot = if x.dims[1].as_const() == Some(1) { ScalarExpr::Int(0) } else { ScalarExpr::Axis(1) };
    vec![ScalarExpr::Axis(0), slot, column]
}

/// Element `Red(0)` of the row of the chosen matrix; `weight` and `ids` are numbers of inputs.
fn weight_of(experts: usize, ty: &TensorType, weight: usize, ids: usize) -> ScalarExpr {
    let out = ty.dims[0].as_const().unwrap_or(0) / experts as i64;
    let expert = ScalarExpr::load(ids, vec![ScalarExpr::Axis(0), ScalarExpr::Axis(1)]);
    let row = ScalarExpr::sum(ScalarExpr::product(expert, ScalarExpr::Int(out)), ScalarExpr::Axis(2));
    ScalarExpr::load(weight, vec![row, ScalarExpr::Red(0)])
}

/// The element (or its index) whose rank is the output's column. The rank of an element is the number of
/// larger ones, and of equal ones before it.
fn chosen(x: &TensorType, index: bool) -> ScalarExpr {
    let load = |column: ScalarExpr| ScalarExpr::load(0, vec![ScalarExpr::Axis(0), column]);
    let (this, other) = (load(ScalarExpr::Red(0)), load(ScalarExpr::Red(1)));
    let choose = |c: ScalarExpr, a: ScalarExpr, b: ScalarExpr| {
        ScalarExpr::Select(Box::new(c), Box::new(a), Box::new(b))
    };
    let less = |a: ScalarExpr, b: ScalarExpr| ScalarExpr::binary(BinOp::Lt, a, b);
    let before = choose(less(ScalarExpr::Red(1), ScalarExpr::Red(0)), ScalarExpr::Int(1), ScalarExpr::Int(0));
    let tie = choose(less(other.clone(), this.clone()), ScalarExpr::Int(0), before);
    let ahead = choose(less(this.clone(), other), ScalarExpr::Int(1), tie);
    let rank = ScalarExpr::reduce(RedOp::Sum, 1, x.dims[1].clone(), ahead);
    let here = ScalarExpr::binary(BinOp::Eq, rank, ScalarExpr::Axis(1));
    let (value, zero) = match index {
        true => (ScalarExpr::Red(0), ScalarExpr::Int(0)),
        false => (this, ScalarExpr::Float(0.0)),
    };
    ScalarExpr::reduce(RedOp::Sum, 0, x.dims[1].clone(), choose(here, value, zero))
}
