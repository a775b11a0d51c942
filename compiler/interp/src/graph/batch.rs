//! One run of a batched function (see [`mlcc_ir::sequences`]): values of one sequence exist once per sequence, and the
//! ops that make them run once per sequence, each with its states, its `past` and its rows.

use super::place::concrete_dims;
use super::plan::{FunctionPlan, malformed};
use super::step::{Step, Values, check};
use super::{GraphError, Interpreter, States, Tensor};
use mlcc_ir::dim::SymValues;
use mlcc_ir::entity::EntityId;
use mlcc_ir::graph::{Function, Node, NodeId, ValueId};
use mlcc_ir::module::FuncId;
use mlcc_ir::ops::Op;
use mlcc_ir::sequences::{Batching, Scope, batching, scope_of, scopes};
use std::rc::Rc;
use std::sync::Arc;

/// What a sequence of a batch brings.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Piece {
    /// Tokens that it has seen.
    pub past: i64,
    /// Its rows in this call.
    pub rows: i64,
}

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

/// A step in a scope, with its plan of the function.
struct Run<'i, 'm> {
    step: Step<'i, 'm>,
    plan: Rc<FunctionPlan<'m>>,
}

impl<'i, 'm> Run<'i, 'm> {
    fn new(
        interpreter: &'i Interpreter<'m>,
        id: FuncId,
        states: &States,
        syms: SymValues,
    ) -> Result<Run<'i, 'm>, GraphError> {
        let mut step = Step::new(interpreter, states, syms);
        let plan = step.plan(id)?;
        Ok(Run { step, plan })
    }
}

struct Batch<'i, 'm> {
    f: &'m Function,
    pieces: &'i [Piece],
    /// Sizes of the call, and how many rows are wanted.
    sizes: SymValues,
    wanted: usize,
    all: Run<'i, 'm>,
    behind: Run<'i, 'm>,
    each: Vec<Run<'i, 'm>>,
}

pub(super) fn run(
    interpreter: &Interpreter<'_>,
    id: FuncId,
    inputs: &[Tensor],
    states: &mut [States],
    pieces: &[Piece],
    wanted: usize,
) -> Result<Vec<Tensor>, GraphError> {
    let module = interpreter.module;
    let f = module.functions.get(id).ok_or_else(|| GraphError::NoFunction(id.to_string()))?;
    let wrong = |expected: &str, found: String| GraphError::Shape {
        place: format!("function @{}", f.name),
        expected: expected.into(),
        found,
    };
    let Some(scopes) = scopes(module, f) else {
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
    let ragged = batching(f) == Batching::Ragged;
    if (ragged && !(1..=rows as usize).contains(&wanted)) || (!ragged && rows != pieces.len() as i64) {
        return Err(wrong("as many rows as the function takes", format!("{rows}, {wanted} of them wanted")));
    }
    let sizes = SymValues { n: rows, b: pieces.len() as i64, past: 0 };
    let of_piece = |p: &Piece| SymValues { n: if ragged { p.rows } else { rows }, past: p.past, ..sizes };
    let each = states.iter().zip(pieces).map(|(s, p)| Run::new(interpreter, id, s, of_piece(p)));
    let mut batch = Batch {
        f,
        pieces,
        sizes,
        wanted,
        all: Run::new(interpreter, id, &states[0], sizes)?,
        behind: Run::new(interpreter, id, &states[0], SymValues { n: wanted as i64, ..sizes })?,
        each: each.collect::<Result<_, _>>()?,
    };
    let mut values: Vec<Option<Value>> = vec![None; f.values.len()];
    for (i, (&v, tensor)) in f.inputs.iter().zip(inputs).enumerate() {
        check(|| format!("input {i} of @{}", f.name), f.ty(v), tensor, &sizes)?;
        values[v.index()] = Some(Value::All(Arc::new(tensor.clone())));
    }
    let get = |values: &[Option<Value>], v: ValueId| {
        let value = values[v.index()].clone();
        value.ok_or_else(|| wrong("a value defined before its use", "none".into()))
    };
    for (at, (id, node)) in f.live().enumerate() {
        let args = node.inputs.iter().map(|&v| get(&values, v)).collect::<Result<Vec<_>, _>>()?;
        let outputs = batch.node(at, id, node, scope_of(module, node, &scopes), &args)?;
        for (&v, value) in node.outputs.iter().zip(outputs) {
            values[v.index()] = Some(value);
        }
    }
    let outputs = f.outputs.iter().map(|&v| Ok(get(&values, v)?.of(0)));
    let outputs = outputs.collect::<Result<Values, GraphError>>()?;
    for (state, run) in states.iter_mut().zip(batch.each) {
        *state = run.step.finish();
    }
    Ok(outputs.into_iter().map(Arc::unwrap_or_clone).collect())
}

impl Batch<'_, '_> {
    fn node(
        &mut self,
        at: usize,
        id: NodeId,
        node: &Node,
        scope: Scope,
        args: &[Value],
    ) -> Result<Vec<Value>, GraphError> {
        match (&node.op, scope) {
            (Op::SequenceSplit { .. }, _) => Ok(vec![Value::Each(self.split(&args[0].of(0)))]),
            (Op::SequenceJoin, _) => {
                let rows: Values = (0..self.each.len()).map(|i| args[0].of(i)).collect();
                let dims = concrete_dims(self.f.ty(node.outputs[0]), &self.sizes);
                let dims = dims.ok_or_else(|| malformed(self.f, id, "joins rows without a size".into()))?;
                let data = rows.iter().flat_map(|row| row.data.iter().copied()).collect();
                Ok(vec![Value::All(Arc::new(Tensor { dtype: rows[0].dtype, dims, data }))])
            }
            (Op::WantedRows, _) => Ok(vec![Value::All(Arc::new(rows_of(&args[0].of(0), 0, self.wanted)))]),
            (_, Scope::All) => self.all.node(self.f, at, (id, node), args),
            (_, Scope::Wanted) => self.behind.node(self.f, at, (id, node), args),
            (_, Scope::Sequence) => {
                let mut each: Vec<Values> = vec![Vec::new(); node.outputs.len()];
                for (i, run) in self.each.iter_mut().enumerate() {
                    let args: Vec<Value> = args.iter().map(|a| Value::All(a.of(i))).collect();
                    let outputs = run.node(self.f, at, (id, node), &args)?;
                    each.iter_mut().zip(outputs).for_each(|(all, one)| all.push(one.of(0)));
                }
                Ok(each.into_iter().map(Value::Each).collect())
            }
        }
    }

    fn split(&self, all: &Tensor) -> Values {
        let mut first = 0;
        let mut next = |piece: &Piece| {
            let rows = rows_of(all, first, piece.rows as usize);
            first += piece.rows as usize;
            Arc::new(rows)
        };
        self.pieces.iter().map(&mut next).collect()
    }
}

impl Run<'_, '_> {
    fn node(
        &mut self,
        f: &Function,
        at: usize,
        (id, node): (NodeId, &Node),
        args: &[Value],
    ) -> Result<Vec<Value>, GraphError> {
        let args = args.iter().map(|a| a.of(0)).collect();
        let outputs = self.step.node(f, id, node, &self.plan.nodes[at], args)?;
        Ok(outputs.into_iter().map(Value::All).collect())
    }
}

/// Some rows of a tensor.
fn rows_of(all: &Tensor, first: usize, count: usize) -> Tensor {
    let dims = std::iter::once(count).chain(all.dims[1..].iter().copied()).collect();
    let row: usize = all.dims[1..].iter().product();
    Tensor { dtype: all.dtype, dims, data: all.data[first * row..(first + count) * row].to_vec() }
}
