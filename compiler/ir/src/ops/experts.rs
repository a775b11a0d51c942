//! Routing to experts and their matrix products.

use super::{Op, OpError, bad};
use crate::compute::{RedOp, Scalar};
use crate::dim::Dim;
use crate::kernel::BinOp;
use crate::types::{DType, TensorType};

pub(super) fn infer(op: &Op, inputs: &[&TensorType]) -> Result<Vec<TensorType>, OpError> {
    match (op, inputs) {
        (Op::TopK { k }, [x]) => {
            let columns = x.dims.get(1).and_then(Dim::as_const).unwrap_or(0);
            if x.rank() != 2 || x.dtype != DType::F32 || columns < *k as i64 {
                return bad(op, format!("takes f32[n, at least {k}], not {x}"));
            }
            let dims = vec![x.dims[0].clone(), Dim::from(*k)];
            Ok(vec![
                TensorType { dtype: DType::F32, dims: dims.clone() },
                TensorType { dtype: DType::I32, dims },
            ])
        }
        (Op::MatMulExperts { experts }, [x, weight, ids]) => {
            if x.rank() != 3 || x.dtype != DType::F32 || ids.rank() != 2 || ids.dtype != DType::I32 {
                return bad(op, format!("takes f32[n, slots, in] and i32[n, slots], not {x} and {ids}"));
            }
            let rows = weight.dims.first().and_then(Dim::as_const).unwrap_or(0);
            let experts = *experts as i64;
            if weight.rank() != 2 || weight.dims[1] != x.dims[2] || experts == 0 || rows % experts != 0 {
                return bad(op, format!("{weight} are no {experts} matrices for {x}"));
            }
            if x.dims[0] != ids.dims[0] || x.dims[1] != ids.dims[1] && x.dims[1].as_const() != Some(1) {
                return bad(op, format!("{x} does not go with the choice {ids}"));
            }
            let dims = vec![ids.dims[0].clone(), ids.dims[1].clone(), Dim::from(rows / experts)];
            Ok(vec![TensorType { dtype: DType::F32, dims }])
        }
        _ => bad(op, format!("takes other than {} inputs", inputs.len())),
    }
}

pub(super) fn compute(op: &Op, inputs: &[&TensorType]) -> Vec<Scalar> {
    match op {
        Op::TopK { .. } => vec![chosen(inputs[0], false), chosen(inputs[0], true)],
        Op::MatMulExperts { experts } => {
            let (x, weight) = (inputs[0], inputs[1]);
            let slot = if x.dims[1].as_const() == Some(1) { Scalar::Int(0) } else { Scalar::Axis(1) };
            let out = weight.dims[0].as_const().unwrap_or(0) / *experts as i64;
            let expert = Scalar::load(2, vec![Scalar::Axis(0), Scalar::Axis(1)]);
            let row = Scalar::sum(Scalar::product(expert, Scalar::Int(out)), Scalar::Axis(2));
            let activation = Scalar::load(0, vec![Scalar::Axis(0), slot, Scalar::Red(0)]);
            let product = Scalar::product(activation, Scalar::load(1, vec![row, Scalar::Red(0)]));
            vec![Scalar::reduce(RedOp::Sum, 0, x.dims[2].clone(), product)]
        }
        _ => unreachable!("not an op of experts: {}", op.name()),
    }
}

/// The element (or its index) whose rank is the output's column. The rank of an element is the number of larger ones,
/// and of equal ones before it.
fn chosen(x: &TensorType, index: bool) -> Scalar {
    let load = |column: Scalar| Scalar::load(0, vec![Scalar::Axis(0), column]);
    let (this, other) = (load(Scalar::Red(0)), load(Scalar::Red(1)));
    let choose = |c: Scalar, a: Scalar, b: Scalar| Scalar::Select(Box::new(c), Box::new(a), Box::new(b));
    let less = |a: Scalar, b: Scalar| Scalar::binary(BinOp::Lt, a, b);
    let before = choose(less(Scalar::Red(1), Scalar::Red(0)), Scalar::Int(1), Scalar::Int(0));
    let tie = choose(less(other.clone(), this.clone()), Scalar::Int(0), before);
    let ahead = choose(less(this.clone(), other), Scalar::Int(1), tie);
    let rank = Scalar::reduce(RedOp::Sum, 1, x.dims[1].clone(), ahead);
    let here = Scalar::binary(BinOp::Eq, rank, Scalar::Axis(1));
    let (value, zero) = match index {
        true => (Scalar::Red(0), Scalar::Int(0)),
        false => (this, Scalar::Float(0.0)),
    };
    Scalar::reduce(RedOp::Sum, 0, x.dims[1].clone(), choose(here, value, zero))
}
