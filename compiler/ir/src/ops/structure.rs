//! Parameters, states, calls and scans: ops whose meaning the module gives.

use super::{Op, OpError, invalid_input};
use crate::dim::{Dim, SizeSymbol};
use crate::module::{ModelState, Module};
use crate::types::TensorType;

pub(super) fn infer(op: &Op, module: &Module, inputs: &[&TensorType]) -> Result<Vec<TensorType>, OpError> {
    match op {
        Op::Param(id) => match module.params.get(*id) {
            Some(param) if inputs.is_empty() => Ok(vec![param.ty.clone()]),
            Some(_) => invalid_input(op, "takes no inputs"),
            None => invalid_input(op, format!("no parameter {id}")),
        },
        Op::StateRead(id) => match module.states.get(*id) {
            Some(state) if inputs.is_empty() => Ok(vec![state.ty.clone()]),
            Some(_) => invalid_input(op, "takes no inputs"),
            None => invalid_input(op, format!("no state {id}")),
        },
        Op::StateWrite(id) => match (module.states.get(*id), inputs) {
            (Some(state), [ty]) if state.ty == **ty => Ok(vec![]),
            (Some(state), [ty]) => {
                invalid_input(op, format!("state {} is {}, value is {ty}", state.name, state.ty))
            }
            (Some(_), _) => invalid_input(op, "takes one input"),
            (None, _) => invalid_input(op, format!("no state {id}")),
        },
        Op::CacheAppend(id) => match (module.states.get(*id), inputs) {
            (Some(state), [x]) => infer_append(op, state, x),
            (Some(_), _) => invalid_input(op, "takes one input"),
            (None, _) => invalid_input(op, format!("no state {id}")),
        },
        Op::SequenceSplit { .. } | Op::SequenceJoin | Op::OutputRows => infer_rows(op, inputs),
        Op::AllGather { ranks } => infer_all_gather(op, *ranks, inputs),
        Op::Call(id) => {
            let Some(callee) = module.functions.get(*id) else {
                return invalid_input(op, format!("no function {id}"));
            };
            let expected: Vec<&TensorType> = callee.inputs.iter().map(|&v| callee.ty(v)).collect();
            if expected != inputs {
                return invalid_input(op, format!("arguments do not fit function {}", callee.name));
            }
            Ok(callee.outputs.iter().map(|&v| callee.ty(v).clone()).collect())
        }
        Op::Scan { body, carries, seqs } => infer_scan(op, module, inputs, *body, *carries, *seqs),
        _ => invalid_input(op, "is not a structural op"),
    }
}

/// Rows of all sequences, of one, or the output rows.
fn infer_rows(op: &Op, inputs: &[&TensorType]) -> Result<Vec<TensorType>, OpError> {
    let [x] = inputs else { return invalid_input(op, "takes one input") };
    let (one, n) = (Dim::from(1), Dim::sym(SizeSymbol::N));
    let joins_one = *op == Op::SequenceJoin && x.dims.first() == Some(&one);
    let to = if *op == (Op::SequenceSplit { ragged: false }) { &one } else { &n };
    match x.dims.split_first() {
        Some((rows, rest)) if joins_one || *rows == n => {
            Ok(vec![TensorType::new(x.dtype, std::iter::once(to).chain(rest))])
        }
        _ if *op == Op::SequenceJoin => {
            invalid_input(op, format!("the first axis of {x} is neither 1 nor n"))
        }
        _ => invalid_input(op, format!("the first axis of {x} is not n")),
    }
}

/// The last axis becomes that of all ranks.
fn infer_all_gather(op: &Op, ranks: usize, inputs: &[&TensorType]) -> Result<Vec<TensorType>, OpError> {
    let [x] = inputs else { return invalid_input(op, "takes one input") };
    if ranks == 0 || i64::try_from(ranks).is_err() {
        return invalid_input(op, format!("{ranks} ranks have nothing to exchange"));
    }
    let mut all = (*x).clone();
    match all.dims.last_mut() {
        Some(last) if !x.dtype.is_packed() => *last = last.scale(ranks as i64),
        Some(_) => return invalid_input(op, "does not take packed weights"),
        None => return invalid_input(op, format!("{x} has no axis to join along")),
    }
    Ok(vec![all])
}

/// Rows of the state's type in, all rows so far out.
fn infer_append(op: &Op, state: &ModelState, x: &TensorType) -> Result<Vec<TensorType>, OpError> {
    match (x.dims.split_first(), state.ty.dims.split_first()) {
        (Some((n, row)), Some((_, kept))) if row == kept && x.dtype == state.ty.dtype => {
            let rows = Dim::sym(SizeSymbol::Past).add(n);
            Ok(vec![TensorType::new(x.dtype, std::iter::once(&rows).chain(row))])
        }
        _ => invalid_input(op, format!("{x} are no rows of state {}, which is {}", state.name, state.ty)),
    }
}

fn infer_scan(
    op: &Op,
    module: &Module,
    inputs: &[&TensorType],
    body: crate::module::FuncId,
    carries: usize,
    seqs: usize,
) -> Result<Vec<TensorType>, OpError> {
    let Some(body) = module.functions.get(body) else {
        return invalid_input(op, format!("no function {body}"));
    };
    if seqs == 0 || inputs.len() < carries + seqs || inputs.len() != body.inputs.len() {
        return invalid_input(
            op,
            format!("{} inputs for {carries} carries and {seqs} sequences", inputs.len()),
        );
    }
    let length: &Dim = match inputs[carries].dims.first() {
        Some(length) => length,
        None => return invalid_input(op, "a sequence needs an axis 0"),
    };
    for (i, ty) in inputs.iter().enumerate() {
        let expected = body.ty(body.inputs[i]);
        let is_seq = (carries..carries + seqs).contains(&i);
        let slice = match (is_seq, ty.dims.split_first()) {
            (false, _) => (*ty).clone(),
            (true, Some((n, rest))) if n == length => TensorType::new(ty.dtype, rest),
            (true, _) => return invalid_input(op, format!("sequence {i} has another length")),
        };
        if slice != *expected {
            return invalid_input(op, format!("input {i} is {slice}, the body takes {expected}"));
        }
    }
    if body.outputs.len() < carries {
        return invalid_input(op, "the body returns fewer values than carries");
    }
    let mut outputs = Vec::with_capacity(body.outputs.len());
    for (i, &v) in body.outputs.iter().enumerate() {
        let ty = body.ty(v);
        if i < carries {
            if ty != inputs[i] {
                return invalid_input(op, format!("carry {i} is {} but comes back as {ty}", inputs[i]));
            }
            outputs.push(ty.clone());
        } else {
            outputs.push(TensorType::new(ty.dtype, std::iter::once(length).chain(&ty.dims)));
        }
    }
    Ok(outputs)
}
