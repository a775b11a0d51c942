//! Weight dequantization and activations quantized per group.

use super::{Op, OpError, bad};
use crate::compute::{RedOp, Scalar};
use crate::dim::Dim;
use crate::kernel::{BinOp, UnOp};
use crate::types::{DType, TensorType};

/// Largest code of an int8 activation.
const MAX_CODE: f64 = 127.0;

pub(super) fn infer(op: &Op, inputs: &[&TensorType]) -> Result<Vec<TensorType>, OpError> {
    let groups = |k: &Dim, group: usize| k.ceil_div(group as i64);
    match (op, inputs) {
        (Op::Dequantize, [w]) => Ok(vec![TensorType { dtype: DType::F32, dims: w.dims.clone() }]),
        (Op::GroupScale { group }, [x]) if x.rank() == 2 && x.dtype == DType::F32 => Ok(vec![TensorType {
            dtype: DType::F32,
            dims: vec![x.dims[0].clone(), groups(&x.dims[1], *group)],
        }]),
        (Op::GroupQuantize { group }, [x, s])
            if x.rank() == 2 && x.dtype == DType::F32 && s.dtype == DType::F32 =>
        {
            let g = groups(&x.dims[1], *group);
            if s.dims != [x.dims[0].clone(), g.clone()] {
                return bad(op, format!("scales are {s} for {x}"));
            }
            Ok(vec![TensorType { dtype: DType::I8, dims: vec![x.dims[0].clone(), g.scale(*group as i64)] }])
        }
        (Op::GroupSum { group }, [q]) if q.rank() == 2 && q.dtype == DType::I8 => Ok(vec![TensorType {
            dtype: DType::I32,
            dims: vec![q.dims[0].clone(), groups(&q.dims[1], *group)],
        }]),
        (Op::MatMulI8 { group }, [q, s, z, w]) => {
            let fits = q.rank() == 2 && w.rank() == 2 && w.dtype.is_packed() && q.dtype == DType::I8;
            if !fits {
                return bad(op, format!("takes i8 codes and a packed weight, not {q} and {w}"));
            }
            let g = groups(&w.dims[1], *group);
            let per_group = [q.dims[0].clone(), g.clone()];
            let scales = s.dtype == DType::F32 && s.dims == per_group;
            let sums = z.dtype == DType::I32 && z.dims == per_group;
            if q.dims[1] != g.scale(*group as i64) || !scales || !sums {
                return bad(op, format!("codes {q}, scales {s} and sums {z} do not fit weight {w}"));
            }
            Ok(vec![TensorType { dtype: DType::F32, dims: vec![q.dims[0].clone(), w.dims[0].clone()] }])
        }
        _ => bad(op, "inputs do not fit"),
    }
}

pub(super) fn compute(op: &Op, inputs: &[&TensorType]) -> Scalar {
    match op {
        Op::Dequantize => Scalar::load(0, (0..inputs[0].rank()).map(Scalar::Axis).collect()),
        Op::GroupScale { group } => {
            let column = in_group(Scalar::Axis(1), *group);
            let value = Scalar::load(0, vec![Scalar::Axis(0), column.clone()]);
            let magnitude = guard(Scalar::unary(UnOp::Abs, value), column, &inputs[0].dims[1], *group);
            let max = Scalar::reduce(RedOp::Max, 0, Dim::from(*group), magnitude);
            Scalar::product(max, Scalar::Float(1.0 / MAX_CODE))
        }
        Op::GroupQuantize { group } => {
            let group_index = Scalar::binary(BinOp::Div, Scalar::Axis(1), Scalar::Int(*group as i64));
            let scale = Scalar::load(1, vec![Scalar::Axis(0), group_index]);
            let x = Scalar::load(0, vec![Scalar::Axis(0), Scalar::Axis(1)]);
            let ratio = Scalar::binary(BinOp::Div, x, scale.clone());
            let low = Scalar::binary(BinOp::Max, Scalar::unary(UnOp::Round, ratio), Scalar::Float(-MAX_CODE));
            let code = Scalar::binary(BinOp::Min, low, Scalar::Float(MAX_CODE));
            let positive = Scalar::binary(BinOp::Lt, Scalar::Float(0.0), scale);
            let safe = Scalar::Select(Box::new(positive), Box::new(code), Box::new(Scalar::Float(0.0)));
            let value = guard(safe, Scalar::Axis(1), &inputs[0].dims[1], *group);
            Scalar::Cast(DType::I8, Box::new(value))
        }
        Op::GroupSum { group } => {
            let code = Scalar::load(0, vec![Scalar::Axis(0), in_group(Scalar::Axis(1), *group)]);
            Scalar::reduce(RedOp::Sum, 0, Dim::from(*group), code)
        }
        Op::MatMulI8 { group } => {
            let group_index = Scalar::binary(BinOp::Div, Scalar::Red(0), Scalar::Int(*group as i64));
            let code = Scalar::load(0, vec![Scalar::Axis(0), Scalar::Red(0)]);
            let scale = Scalar::load(1, vec![Scalar::Axis(0), group_index]);
            let weight = Scalar::load(3, vec![Scalar::Axis(1), Scalar::Red(0)]);
            let product = Scalar::product(Scalar::product(code, scale), weight);
            Scalar::reduce(RedOp::Sum, 0, inputs[3].dims[1].clone(), product)
        }
        _ => unreachable!("not a quantization op: {}", op.name()),
    }
}

/// Element `Red(0)` of a group.
fn in_group(group_index: Scalar, group: usize) -> Scalar {
    Scalar::sum(Scalar::product(group_index, Scalar::Int(group as i64)), Scalar::Red(0))
}

/// 0 for columns in the padding of a short last group.
fn guard(value: Scalar, column: Scalar, k: &Dim, group: usize) -> Scalar {
    if k.as_const().is_some_and(|k| k % group as i64 == 0) {
        return value;
    }
    let inside = Scalar::binary(BinOp::Lt, column, Scalar::Dim(k.clone()));
    Scalar::Select(Box::new(inside), Box::new(value), Box::new(Scalar::Float(0.0)))
}
