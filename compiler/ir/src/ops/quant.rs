//! Weight dequantization and activations quantized per group.

use super::{Op, OpError, invalid_input};
use crate::compute::{RedOp, ScalarExpr};
use crate::dim::Dim;
use crate::graph::{Function, ValueId};
use crate::kernel::{BinOp, UnOp};
use crate::module::Module;
use crate::types::{DType, TensorType};

/// Largest code of activations of `bits` bits. The high byte of 16 bits is at most 127 after rounding.
pub fn max_code(bits: usize) -> f64 {
    if bits == 16 { 32512.0 } else { 127.0 }
}

/// The number that is added to a quotient before it is rounded to a code: the borders between codes are at
/// `n + 0.5 - CODE_OFFSET`.
///
/// Embeddings of a packed scheme times norm weights of 8 significant bits are products of small integers, so
/// quotients of exactly `n + 0.5` are frequent (5 of 2112 in a test case), and there the rounding errors of
/// the executor would choose the code. No multiple of a power of two lies at the moved borders. A code is
/// wrong by at most 0.5003 instead of 0.5.
pub const CODE_OFFSET: f64 = 1.0 / 3000.0;

fn code_type(bits: usize) -> DType {
    if bits == 16 { DType::I16 } else { DType::I8 }
}

fn is_codes(q: &TensorType) -> bool {
    q.rank() >= 2 && matches!(q.dtype, DType::I8 | DType::I16)
}

fn is_rows(x: &TensorType) -> bool {
    x.rank() >= 2 && x.dtype == DType::F32
}

/// The rows of `x` with `columns` columns.
fn rows(dtype: DType, x: &TensorType, columns: Dim) -> TensorType {
    let mut dims = x.dims.clone();
    if let Some(last) = dims.last_mut() {
        *last = columns;
    }
    TensorType { dtype, dims }
}

fn columns(x: &TensorType) -> &Dim {
    &x.dims[x.rank() - 1]
}

fn groups(k: &Dim, group: usize) -> Dim {
    k.ceil_div(group as i64)
}

/// Checks that codes, scales per `group` columns and sums go with each other and with a packed weight.
pub(super) fn codes_fit(op: &Op, group: usize, [q, s, z, w]: [&TensorType; 4]) -> Result<(), OpError> {
    let DType::Packed(format) = w.dtype else {
        return invalid_input(op, format!("takes integer codes and a packed weight, not {q} and {w}"));
    };
    if !is_codes(q) || w.rank() != 2 || !format.has_integer_products() {
        return invalid_input(op, format!("takes integer codes and a packed weight, not {q} and {w}"));
    }
    let (k, part) = (&w.dims[1], format.block_columns());
    let scales_fit = *s == rows(DType::F32, q, groups(k, group));
    let sums_fit = *z == rows(DType::I32, q, groups(k, part));
    if *columns(q) != groups(k, part).scale(part as i64) || !scales_fit || !sums_fit {
        return invalid_input(op, format!("codes {q}, scales {s} and sums {z} do not fit weight {w}"));
    }
    Ok(())
}

pub(super) fn infer(op: &Op, inputs: &[&TensorType]) -> Result<Vec<TensorType>, OpError> {
    let scales = |x: &TensorType, group| rows(DType::F32, x, groups(columns(x), group));
    let codes = |x: &TensorType, bits, part: usize| {
        rows(code_type(bits), x, groups(columns(x), part).scale(part as i64))
    };
    match (op, inputs) {
        (Op::Dequantize, [w]) => Ok(vec![TensorType { dtype: DType::F32, dims: w.dims.clone() }]),
        (Op::GroupScale { group, .. }, [x]) if is_rows(x) => Ok(vec![scales(x, *group)]),
        (Op::GroupQuantize { group, bits, part }, [x, s]) if is_rows(x) && s.dtype == DType::F32 => {
            if **s != scales(x, *group) {
                return invalid_input(op, format!("scales are {s} for {x}"));
            }
            Ok(vec![codes(x, *bits, *part)])
        }
        (Op::GroupSum { part, .. }, [q]) if is_codes(q) => {
            Ok(vec![rows(DType::I32, q, groups(columns(q), *part))])
        }
        (Op::QuantizeRows { group, bits, part, .. }, [x]) if is_rows(x) => {
            if !group.is_multiple_of(*part) {
                return invalid_input(op, format!("a group of {group} is no multiple of {part}"));
            }
            let sums = rows(DType::I32, x, groups(columns(x), *part));
            Ok(vec![codes(x, *bits, *part), scales(x, *group), sums])
        }
        (Op::MatMulI8 { group }, [q, s, z, w]) => {
            codes_fit(op, *group, [q, s, z, w])?;
            if q.rank() != 2 {
                return invalid_input(op, format!("takes codes of rank 2, not {q}"));
            }
            Ok(vec![TensorType { dtype: DType::F32, dims: vec![q.dims[0].clone(), w.dims[0].clone()] }])
        }
        _ => invalid_input(op, "inputs do not fit"),
    }
}

pub(super) fn decompose(
    op: &Op,
    module: &Module,
    f: &mut Function,
    inputs: &[ValueId],
) -> Result<Vec<ValueId>, OpError> {
    let &Op::QuantizeRows { group, bits, part, zero } = op else {
        return invalid_input(op, "quantizes no rows");
    };
    let x = inputs[0];
    let scales = f.append(module, Op::GroupScale { group, bits }, &[x])?[0];
    let codes = f.append(module, Op::GroupQuantize { group, bits, part }, &[x, scales])?[0];
    let sums = f.append(module, Op::GroupSum { part, zero }, &[codes])?[0];
    Ok(vec![codes, scales, sums])
}

pub(super) fn compute(op: &Op, inputs: &[&TensorType]) -> ScalarExpr {
    match op {
        Op::Dequantize => ScalarExpr::load(0, (0..inputs[0].rank()).map(ScalarExpr::Axis).collect()),
        Op::GroupScale { group, bits } => {
            let column = in_group(last(inputs[0]), *group);
            let value = ScalarExpr::load(0, in_row(inputs[0], column.clone()));
            let magnitude = guard(ScalarExpr::unary(UnOp::Abs, value), column, columns(inputs[0]), *group);
            let max = ScalarExpr::reduce(RedOp::Max, 0, Dim::from(*group), magnitude);
            ScalarExpr::product(max, ScalarExpr::Float(1.0 / max_code(*bits)))
        }
        Op::GroupQuantize { group, bits, part } => {
            let most = max_code(*bits);
            let column = last(inputs[0]);
            let group_index = ScalarExpr::binary(BinOp::Div, column.clone(), ScalarExpr::Int(*group as i64));
            let scale = ScalarExpr::load(1, in_row(inputs[0], group_index));
            let x = ScalarExpr::load(0, in_row(inputs[0], column.clone()));
            let ratio = ScalarExpr::binary(BinOp::Div, x, scale.clone());
            let ratio = ScalarExpr::sum(ratio, ScalarExpr::Float(CODE_OFFSET));
            let low = ScalarExpr::binary(
                BinOp::Max,
                ScalarExpr::unary(UnOp::Round, ratio),
                ScalarExpr::Float(-most),
            );
            let code = ScalarExpr::binary(BinOp::Min, low, ScalarExpr::Float(most));
            let positive = ScalarExpr::binary(BinOp::Lt, ScalarExpr::Float(0.0), scale);
            let safe =
                ScalarExpr::Select(Box::new(positive), Box::new(code), Box::new(ScalarExpr::Float(0.0)));
            let value = guard(safe, column, columns(inputs[0]), *part);
            ScalarExpr::Cast(code_type(*bits), Box::new(value))
        }
        Op::GroupSum { part, zero } => {
            let code = ScalarExpr::load(0, in_row(inputs[0], in_group(last(inputs[0]), *part)));
            let sum = ScalarExpr::reduce(RedOp::Sum, 0, Dim::from(*part), code);
            ScalarExpr::product(sum, ScalarExpr::Int(-(*zero as i64)))
        }
        Op::MatMulI8 { group } => {
            let group_index =
                ScalarExpr::binary(BinOp::Div, ScalarExpr::Red(0), ScalarExpr::Int(*group as i64));
            let code = ScalarExpr::load(0, vec![ScalarExpr::Axis(0), ScalarExpr::Red(0)]);
            let scale = ScalarExpr::load(1, vec![ScalarExpr::Axis(0), group_index]);
            let weight = ScalarExpr::load(3, vec![ScalarExpr::Axis(1), ScalarExpr::Red(0)]);
            let product = ScalarExpr::product(ScalarExpr::product(code, scale), weight);
            ScalarExpr::reduce(RedOp::Sum, 0, inputs[3].dims[1].clone(), product)
        }
        _ => unreachable!("not a quantization op: {}", op.name()),
    }
}

/// The last axis of a result with the axes of `x`.
fn last(x: &TensorType) -> ScalarExpr {
    ScalarExpr::Axis(x.rank() - 1)
}

/// A column of the row that the leading axes tell.
fn in_row(x: &TensorType, column: ScalarExpr) -> Vec<ScalarExpr> {
    (0..x.rank() - 1).map(ScalarExpr::Axis).chain([column]).collect()
}

/// Element `Red(0)` of a group.
fn in_group(group_index: ScalarExpr, group: usize) -> ScalarExpr {
    ScalarExpr::sum(ScalarExpr::product(group_index, ScalarExpr::Int(group as i64)), ScalarExpr::Red(0))
}

/// 0 for columns in the padding of a short last group.
fn guard(value: ScalarExpr, column: ScalarExpr, k: &Dim, group: usize) -> ScalarExpr {
    if k.as_const().is_some_and(|k| k % group as i64 == 0) {
        return value;
    }
    let inside = ScalarExpr::binary(BinOp::Lt, column, ScalarExpr::Dim(k.clone()));
    ScalarExpr::Select(Box::new(inside), Box::new(value), Box::new(ScalarExpr::Float(0.0)))
}
