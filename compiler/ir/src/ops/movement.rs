//! Ops that make or move indices: iota, reshape, permute, slice, concat, gather.

use super::{Op, OpError, invalid_input};
use crate::compute::ScalarExpr;
use crate::dim::Dim;
use crate::kernel::BinOp;
use crate::types::{DType, TensorType};

pub(super) fn infer(op: &Op, inputs: &[&TensorType]) -> Result<Vec<TensorType>, OpError> {
    if inputs.iter().any(|t| t.dtype.is_packed()) && !matches!(op, Op::Gather) {
        return invalid_input(op, "does not take packed weights");
    }
    match (op, inputs) {
        (Op::Iota { len, .. }, []) => Ok(vec![TensorType { dtype: DType::I32, dims: vec![len.clone()] }]),
        (Op::Reshape { dims }, [a]) => {
            let out = TensorType { dtype: a.dtype, dims: dims.clone() };
            match a.same_elements(&out) {
                true => Ok(vec![out]),
                false => invalid_input(op, format!("{a} does not have as many elements as {out}")),
            }
        }
        (Op::Permute { perm }, [a]) => {
            let mut sorted = perm.clone();
            sorted.sort_unstable();
            if sorted != (0..a.rank()).collect::<Vec<_>>() {
                return invalid_input(op, format!("{perm:?} is no permutation of the axes of {a}"));
            }
            Ok(vec![TensorType { dtype: a.dtype, dims: perm.iter().map(|&p| a.dims[p].clone()).collect() }])
        }
        (Op::Slice { axis, start, len }, [a]) => {
            let Some(size) = a.dims.get(*axis) else {
                return invalid_input(op, format!("{a} has no axis {axis}"));
            };
            if let Some(room) = size.sub(start).sub(len).as_const()
                && room < 0
            {
                return invalid_input(op, format!("{len} from {start} runs over the {size} of axis {axis}"));
            }
            let mut dims = a.dims.clone();
            dims[*axis] = len.clone();
            Ok(vec![TensorType { dtype: a.dtype, dims }])
        }
        (Op::Concat { axis }, [first, rest @ ..]) => {
            let mut out = (*first).clone();
            if *axis >= out.rank() {
                return invalid_input(op, format!("{first} has no axis {axis}"));
            }
            for ty in rest {
                let same = ty.dtype == out.dtype
                    && ty.rank() == out.rank()
                    && (0..out.rank()).all(|i| i == *axis || ty.dims[i] == out.dims[i]);
                if !same {
                    return invalid_input(op, format!("{ty} does not continue {first}"));
                }
                out.dims[*axis] = out.dims[*axis].add(&ty.dims[*axis]);
            }
            Ok(vec![out])
        }
        (Op::Gather, [table, ids]) => {
            if table.rank() != 2 || ids.rank() == 0 || ids.dtype != DType::I32 {
                return invalid_input(
                    op,
                    format!("takes a table [rows, k] and ids i32[n, ..], not {table} and {ids}"),
                );
            }
            let dtype = if table.dtype.is_packed() { DType::F32 } else { table.dtype };
            Ok(vec![TensorType { dtype, dims: ids.dims.iter().chain(&table.dims[1..]).cloned().collect() }])
        }
        _ => invalid_input(op, format!("takes other than {} inputs", inputs.len())),
    }
}

pub(super) fn compute(op: &Op, inputs: &[&TensorType]) -> ScalarExpr {
    if let Op::Iota { start, .. } = op {
        return ScalarExpr::sum(ScalarExpr::Axis(0), ScalarExpr::Dim(start.clone()));
    }
    let a = inputs[0];
    let axes = || (0..a.rank()).map(ScalarExpr::Axis).collect::<Vec<_>>();
    match op {
        Op::Reshape { dims } => reshape(a, dims),
        Op::Permute { perm } => {
            let mut index = axes();
            for (out, &input) in perm.iter().enumerate() {
                index[input] = ScalarExpr::Axis(out);
            }
            ScalarExpr::load(0, index)
        }
        Op::Slice { axis, start, .. } => {
            let mut index = axes();
            if start.as_const() != Some(0) {
                index[*axis] = ScalarExpr::sum(ScalarExpr::Axis(*axis), ScalarExpr::Dim(start.clone()));
            }
            ScalarExpr::load(0, index)
        }
        Op::Concat { axis } => concat(inputs, *axis, 0, Dim::from(0)),
        Op::Gather => {
            let rank = inputs[1].rank();
            let row = ScalarExpr::load(1, (0..rank).map(ScalarExpr::Axis).collect());
            ScalarExpr::load(0, vec![row, ScalarExpr::Axis(rank)])
        }
        _ => unreachable!("not a movement op: {}", op.name()),
    }
}

/// `index of axis < end of part ? part : the rest`.
fn concat(inputs: &[&TensorType], axis: usize, part: usize, start: Dim) -> ScalarExpr {
    let mut index: Vec<ScalarExpr> = (0..inputs[part].rank()).map(ScalarExpr::Axis).collect();
    if start != Dim::from(0) {
        index[axis] = ScalarExpr::binary(BinOp::Sub, ScalarExpr::Axis(axis), ScalarExpr::Dim(start.clone()));
    }
    let here = ScalarExpr::load(part, index);
    if part + 1 == inputs.len() {
        return here;
    }
    let end = start.add(&inputs[part].dims[axis]);
    let inside = ScalarExpr::binary(BinOp::Lt, ScalarExpr::Axis(axis), ScalarExpr::Dim(end.clone()));
    ScalarExpr::Select(Box::new(inside), Box::new(here), Box::new(concat(inputs, axis, part + 1, end)))
}

/// Through the flat index, except where axes of size 1 are merely added or removed.
fn reshape(a: &TensorType, dims: &[Dim]) -> ScalarExpr {
    let one = Dim::from(1);
    let significant = |dims: &[Dim]| -> Vec<usize> { (0..dims.len()).filter(|&i| dims[i] != one).collect() };
    let (from, to) = (significant(&a.dims), significant(dims));
    if from.len() == to.len() && from.iter().zip(&to).all(|(&i, &o)| a.dims[i] == dims[o]) {
        let mut index = vec![ScalarExpr::Int(0); a.rank()];
        for (&i, &o) in from.iter().zip(&to) {
            index[i] = ScalarExpr::Axis(o);
        }
        return ScalarExpr::load(0, index);
    }
    let mut flat = ScalarExpr::Int(0);
    for (axis, dim) in dims.iter().enumerate() {
        flat =
            ScalarExpr::sum(ScalarExpr::product(flat, ScalarExpr::Dim(dim.clone())), ScalarExpr::Axis(axis));
    }
    let mut index = Vec::with_capacity(a.rank());
    for axis in (0..a.rank()).rev() {
        let size = ScalarExpr::Dim(a.dims[axis].clone());
        if axis == 0 {
            index.push(flat.clone());
        } else {
            index.push(ScalarExpr::binary(BinOp::Rem, flat.clone(), size.clone()));
            flat = ScalarExpr::binary(BinOp::Div, flat, size);
        }
    }
    index.reverse();
    ScalarExpr::load(0, index)
}
