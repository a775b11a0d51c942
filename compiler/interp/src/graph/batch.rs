//! One run of a batched function (see [`mlcc_ir::sequences`]): values of one sequence exist once per sequence, and the
//! ops that make them run once per sequence, each with its states and its `past`.

use super::place::concrete_dims;
use super::plan::malformed;
use super::step::{Step, Values, check};
use super::{GraphError, Interpreter, States, Tensor};
use mlcc_ir::dim::SymValues;
use mlcc_ir::entity::EntityId;
use mlcc_ir::graph::ValueId;
use mlcc_ir::module::FuncId;
use mlcc_ir::ops::Op;
use mlcc_ir::sequences::{per_sequence, runs_for_each};
use std::sync::Arc;

/// A value of all sequences, or one of each.
#[derive(Clone)]
enum Value {
    All(Arc<Tensor>),
    Each(Values),
}

impl Value {
    fn of(&self, sequence: usize) -> Arc<Tensor> {
        match self {
            Value::All(tensor) => tensor.clone(),
            Value::Each(tensors) => tensors[sequence].clone(),
        }
    }
}

pub(super) fn run(
    interpreter: &Interpreter<'_>,
    id: FuncId,
    inputs: &[Tensor],
    states: &mut [States],
    pasts: &[i64],
) -> Result<Vec<Tensor>, GraphError> {
    let module = interpreter.module;
    let f = module.functions.get(id).ok_or_else(|| GraphError::NoFunction(id.to_string()))?;
    let wrong = |expected: &str, found: String| GraphError::Shape {
        place: format!("function @{}", f.name),
        expected: expected.into(),
        found,
    };
    let Some(single) = per_sequence(module, f) else {
        return Err(wrong("a batched function", "another".into()));
    };
    if states.is_empty() || states.len() != pasts.len() {
        return Err(wrong("a past of each sequence", format!("{} of {}", pasts.len(), states.len())));
    }
    if inputs.len() != f.inputs.len() {
        let (expected, found) = (f.inputs.len(), inputs.len());
        return Err(GraphError::Arity { function: f.name.clone(), expected, found });
    }
    let n = states.len() as i64;
    let syms = |past: i64| SymValues { n, b: n, past };
    let mut steps: Vec<Step> =
        states.iter().zip(pasts).map(|(s, &past)| Step::new(interpreter, s, syms(past))).collect();
    let plans = steps.iter_mut().map(|s| s.plan(id)).collect::<Result<Vec<_>, _>>()?;
    let mut values: Vec<Option<Value>> = vec![None; f.values.len()];
    for (i, (&v, tensor)) in f.inputs.iter().zip(inputs).enumerate() {
        check(|| format!("input {i} of @{}", f.name), f.ty(v), tensor, &syms(0))?;
        values[v.index()] = Some(Value::All(Arc::new(tensor.clone())));
    }
    let get = |values: &[Option<Value>], v: ValueId| {
        let value = values[v.index()].clone();
        value.ok_or_else(|| wrong("a value defined before its use", "none".into()))
    };
    for (at, (id, node)) in f.live().enumerate() {
        let args = node.inputs.iter().map(|&v| get(&values, v)).collect::<Result<Vec<_>, _>>()?;
        let outputs: Vec<Value> = match &node.op {
            Op::SequenceSplit => {
                let rows = args[0].of(0);
                let row = |i: usize| {
                    let dims = std::iter::once(1).chain(rows.dims[1..].iter().copied()).collect();
                    Arc::new(Tensor { dtype: rows.dtype, dims, data: rows.row(i).to_vec() })
                };
                vec![Value::Each((0..states.len()).map(row).collect())]
            }
            Op::SequenceJoin => {
                let rows: Values = (0..states.len()).map(|i| args[0].of(i)).collect();
                let dims = concrete_dims(f.ty(node.outputs[0]), &syms(0));
                let dims = dims.ok_or_else(|| malformed(f, id, "joins rows without a size".into()))?;
                let data = rows.iter().flat_map(|row| row.data.iter().copied()).collect();
                vec![Value::All(Arc::new(Tensor { dtype: rows[0].dtype, dims, data }))]
            }
            _ if !runs_for_each(module, node, &single) => {
                let args = args.iter().map(|a| a.of(0)).collect();
                let outputs = steps[0].node(f, id, node, &plans[0].nodes[at], args)?;
                outputs.into_iter().map(Value::All).collect()
            }
            _ => {
                let mut each: Vec<Values> = vec![Vec::new(); node.outputs.len()];
                for (i, (step, plan)) in steps.iter_mut().zip(&plans).enumerate() {
                    let args = args.iter().map(|a| a.of(i)).collect();
                    let outputs = step.node(f, id, node, &plan.nodes[at], args)?;
                    each.iter_mut().zip(outputs).for_each(|(all, one)| all.push(one));
                }
                each.into_iter().map(Value::Each).collect()
            }
        };
        for (&v, value) in node.outputs.iter().zip(outputs) {
            values[v.index()] = Some(value);
        }
    }
    let outputs = f.outputs.iter().map(|&v| Ok(get(&values, v)?.of(0)));
    let outputs = outputs.collect::<Result<Values, GraphError>>()?;
    for (state, step) in states.iter_mut().zip(steps) {
        *state = step.finish();
    }
    Ok(outputs.into_iter().map(Arc::unwrap_or_clone).collect())
}
