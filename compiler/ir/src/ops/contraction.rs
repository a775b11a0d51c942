//! Matrix products and reductions.

use super::elementwise::broadcast;
use super::{Op, OpError, invalid_input};
use crate::compute::ScalarExpr;
use crate::dim::Dim;
use crate::types::{DType, TensorType};

pub(super) fn infer(op: &Op, inputs: &[&TensorType]) -> Result<Vec<TensorType>, OpError> {
    match (op, inputs) {
        (Op::MatMul { transpose_b }, [a, b]) => {
            if a.rank() < 2 || b.rank() < 2 || !a.dtype.is_float() {
                return invalid_input(op, format!("takes matrices, not {a} and {b}"));
            }
            let (la, ma) = a.dims.split_at(a.rank() - 2);
            let (lb, mb) = b.dims.split_at(b.rank() - 2);
            let (k, n) = if *transpose_b { (&mb[1], &mb[0]) } else { (&mb[0], &mb[1]) };
            if *k != ma[1] {
                return invalid_input(op, format!("inner sizes of {a} and {b} differ"));
            }
            let Some(mut dims) = broadcast(la, lb) else {
                return invalid_input(op, format!("leading axes of {a} and {b} do not broadcast"));
            };
            dims.extend([ma[0].clone(), n.clone()]);
            // Sums of products of halves are f32.
            let dtype = if matches!(a.dtype, DType::F16 | DType::BF16) { DType::F32 } else { a.dtype };
            Ok(vec![TensorType { dtype, dims }])
        }
        (Op::Reduce { axis, .. }, [a]) => {
            if *axis >= a.rank() || a.dtype.is_packed() {
                return invalid_input(op, format!("{a} has no axis {axis} to reduce"));
            }
            let mut out = (*a).clone();
            out.dims[*axis] = Dim::from(1);
            Ok(vec![out])
        }
        _ => invalid_input(op, format!("takes other than {} inputs", inputs.len())),
    }
}

pub(super) fn compute(op: &Op, inputs: &[&TensorType]) -> ScalarExpr {
    match op {
        Op::MatMul { transpose_b } => {
            let (a, b) = (inputs[0], inputs[1]);
            let rank = a.rank().max(b.rank());
            let k = a.dims[a.rank() - 1].clone();
            let lead = |t: &TensorType| -> Vec<ScalarExpr> {
                let lead = TensorType { dtype: t.dtype, dims: t.dims[..t.rank() - 2].to_vec() };
                super::elementwise::broadcast_index(&lead, rank - 2)
            };
            let mut ia = lead(a);
            ia.extend([ScalarExpr::Axis(rank - 2), ScalarExpr::Red(0)]);
            let mut ib = lead(b);
            let (row, col) = (ScalarExpr::Red(0), ScalarExpr::Axis(rank - 1));
            ib.extend(if *transpose_b { [col, row] } else { [row, col] });
            let product = ScalarExpr::product(ScalarExpr::load(0, ia), ScalarExpr::load(1, ib));
            ScalarExpr::reduce(crate::compute::RedOp::Sum, 0, k, product)
        }
        Op::Reduce { op: red, axis } => {
            let a = inputs[0];
            let index = (0..a.rank())
                .map(|i| if i == *axis { ScalarExpr::Red(0) } else { ScalarExpr::Axis(i) })
                .collect();
            ScalarExpr::reduce(*red, 0, a.dims[*axis].clone(), ScalarExpr::load(0, index))
        }
        _ => unreachable!("not a contraction: {}", op.name()),
    }
}
