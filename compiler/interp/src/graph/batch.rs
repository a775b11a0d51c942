//! One run of a batched function (see [`mlcc_ir::sequences`]): values of one sequence exist once per
//! sequence, and the ops that make them run once per sequence, each with its states, its `past` and its rows.

use super::place::concrete_dims;
use super::plan::{FunctionPlan, malformed};
use super::step::{StepEvaluator, TensorList, check};
use super::{GraphError, Interpreter, StateValues, Tensor};
use mlcc_ir::dim::SymValues;
use mlcc_ir::entity::EntityId;
use mlcc_ir::graph::{Function, GraphNode, NodeId, ValueId};
use mlcc_ir::module::FuncId;
use mlcc_ir::ops::Op;
use mlcc_ir::sequences::{RowBatching, RowScope, row_batching, row_scopes, scope_of};
use std::rc::Rc;
use std::sync::Arc;

/// The rows of a sequence of a batch.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct SequenceRows {
    /// Tokens that it has seen.
    pub past: i64,
    /// Its rows in this call.
    pub rows: i64,
}

/// A value of all sequences, or one of each.
#[derive(Clone)]
enum BatchValue {
    All(Arc<Tensor>),
    Each(TensorList),
}

impl BatchValue {
    fn of_sequence(&self, sequence: usize) -> Arc<Tensor> {
        match self {
            BatchValue::All(tensor) => tensor.clone(),
            BatchValue::Each(tensors) => tensors[sequence].clone(),
        }
    }
}

/// A step in a scope, with its plan of the function.
struct ScopedEvaluator<'i, 'm> {
    step: StepEvaluator<'i, 'm>,
    plan: Rc<FunctionPlan<'m>>,
}

impl<'i, 'm> ScopedEvaluator<'i, 'm> {
    fn new(
        interpreter: &'i Interpreter<'m>,
        id: FuncId,
        states: &StateValues,
        syms: SymValues,
    ) -> Result<ScopedEvaluator<'i, 'm>, GraphError> {
        let mut step = StepEvaluator::new(interpreter, states, syms);
        let plan = step.plan(id)?;
        Ok(ScopedEvaluator { step, plan })
    }
}

struct BatchEvaluator<'i, 'm> {
    f: &'m Function,
    sequences: &'i [SequenceRows],
    /// Sizes of the call, and the number of output rows.
    sizes: SymValues,
    outputs: usize,
    all: ScopedEvaluator<'i, 'm>,
    output_rows: ScopedEvaluator<'i, 'm>,
    each: Vec<ScopedEvaluator<'i, 'm>>,
}

pub(super) fn run(
    interpreter: &Interpreter<'_>,
    id: FuncId,
    inputs: &[Tensor],
    states: &mut [StateValues],
    pieces: &[SequenceRows],
    wanted: usize,
) -> Result<Vec<Tensor>, GraphError> {
    let module = interpreter.module;
    let f = module.functions.get(id).ok_or_else(|| GraphError::NoFunction(id.to_string()))?;
    let wrong = |expected: &str, found: String| GraphError::Shape {
        place: format!("function @{}", f.name),
        expected: expected.into(),
        found,
    };
    let Some(scopes) = row_scopes(module, f) else {
        return Err(wrong("a batched function", "another".into()));
    };
    if states.is_empty() || states.len() != pieces.len() || pieces.iter().any(|p| p.rows < 1) {
        return Err(wrong(
            "a past and rows of each sequence",
            format!("{} of {}", pieces.len(), states.len()),
        ));
    }
    if inputs.len() != f.inputs.len() {
        let (expected, found) = (f.inputs.len(), inputs.len());
        return Err(GraphError::Arity { function: f.name.clone(), expected, found });
    }
    let rows: i64 = pieces.iter().map(|p| p.rows).sum();
    let ragged = row_batching(f) == RowBatching::Ragged;
    if (ragged && !(1..=rows as usize).contains(&wanted)) || (!ragged && rows != pieces.len() as i64) {
        return Err(wrong("as many rows as the function takes", format!("{rows}, {wanted} of them wanted")));
    }
    let sizes = SymValues { n: rows, b: pieces.len() as i64, past: 0 };
    let of_piece =
        |p: &SequenceRows| SymValues { n: if ragged { p.rows } else { rows }, past: p.past, ..sizes };
    let each = states.iter().zip(pieces).map(|(s, p)| ScopedEvaluator::new(interpreter, id, s, of_piece(p)));
    let mut batch = BatchEvaluator {
        f,
        sequences: pieces,
        sizes,
        outputs: wanted,
        all: ScopedEvaluator::new(interpreter, id, &states[0], sizes)?,
        output_rows: ScopedEvaluator::new(
            interpreter,
            id,
            &states[0],
            SymValues { n: wanted as i64, ..sizes },
        )?,
        each: each.collect::<Result<_, _>>()?,
    };
    let mut values: Vec<Option<BatchValue>> = vec![None; f.values.len()];
    for (i, (&v, tensor)) in f.inputs.iter().zip(inputs).enumerate() {
        check(|| format!("input {i} of @{}", f.name), f.ty(v), tensor, &sizes)?;
        values[v.index()] = Some(BatchValue::All(Arc::new(tensor.clone())));
    }
    let get = |values: &[Option<BatchValue>], v: ValueId| {
        let value = values[v.index()].clone();
        value.ok_or_else(|| wrong("a value defined before its use", "none".into()))
    };
    for (at, (id, node)) in f.live_nodes().enumerate() {
        let args = node.inputs.iter().map(|&v| get(&values, v)).collect::<Result<Vec<_>, _>>()?;
        let outputs = batch.node(at, id, node, scope_of(module, node, &scopes), &args)?;
        for (&v, value) in node.outputs.iter().zip(outputs) {
            values[v.index()] = Some(value);
        }
    }
    let outputs = f.outputs.iter().map(|&v| Ok(get(&values, v)?.of_sequence(0)));
    let outputs = outputs.collect::<Result<TensorList, GraphError>>()?;
    for (state, run) in states.iter_mut().zip(batch.each) {
        *state = run.step.finish();
    }
    Ok(outputs.into_iter().map(Arc::unwrap_or_clone).collect())
}

impl BatchEvaluator<'_, '_> {
    fn node(
        &mut self,
        at: usize,
        id: NodeId,
        node: &GraphNode,
        scope: RowScope,
        args: &[BatchValue],
    ) -> Result<Vec<BatchValue>, GraphError> {
        match (&node.op, scope) {
            (Op::SequenceSplit { .. }, _) => Ok(vec![BatchValue::Each(self.split(&args[0].of_sequence(0)))]),
            (Op::SequenceJoin, _) => {
                let rows: TensorList = (0..self.each.len()).map(|i| args[0].of_sequence(i)).collect();
                let dims = concrete_dims(self.f.ty(node.outputs[0]), &self.sizes);
                let dims = dims.ok_or_else(|| malformed(self.f, id, "joins rows without a size".into()))?;
                let data = rows.iter().flat_map(|row| row.data.iter().copied()).collect();
                Ok(vec![BatchValue::All(Arc::new(Tensor { dtype: rows[0].dtype, dims, data }))])
            }
            (Op::OutputRows, _) => {
                Ok(vec![BatchValue::All(Arc::new(rows_of(&args[0].of_sequence(0), 0, self.outputs)))])
            }
            (_, RowScope::All) => self.all.node(self.f, at, (id, node), args),
            (_, RowScope::Outputs) => self.output_rows.node(self.f, at, (id, node), args),
            (_, RowScope::Sequence) => {
                let mut each: Vec<TensorList> = vec![Vec::new(); node.outputs.len()];
                for (i, run) in self.each.iter_mut().enumerate() {
                    let args: Vec<BatchValue> =
                        args.iter().map(|a| BatchValue::All(a.of_sequence(i))).collect();
                    let outputs = run.node(self.f, at, (id, node), &args)?;
                    each.iter_mut().zip(outputs).for_each(|(all, one)| all.push(one.of_sequence(0)));
                }
                Ok(each.into_iter().map(BatchValue::Each).collect())
            }
        }
    }

    fn split(&self, all: &Tensor) -> TensorList {
        let mut first = 0;
        let mut next = |piece: &SequenceRows| {
            let rows = rows_of(all, first, piece.rows as usize);
            first += piece.rows as usize;
            Arc::new(rows)
        };
        self.sequences.iter().map(&mut next).collect()
    }
}

impl ScopedEvaluator<'_, '_> {
    fn node(
        &mut self,
        f: &Function,
        at: usize,
        (id, node): (NodeId, &GraphNode),
        args: &[BatchValue],
    ) -> Result<Vec<BatchValue>, GraphError> {
        let args = args.iter().map(|a| a.of_sequence(0)).collect();
        let outputs = self.step.node(f, id, node, &self.plan.nodes[at], args)?;
        Ok(outputs.into_iter().map(BatchValue::All).collect())
    }
}

/// Some rows of a tensor.
fn rows_of(all: &Tensor, first: usize, count: usize) -> Tensor {
    let dims = std::iter::once(count).chain(all.dims[1..].iter().copied()).collect();
    let row: usize = all.dims[1..].iter().product();
    Tensor { dtype: all.dtype, dims, data: all.data[first * row..(first + count) * row].to_vec() }
}
