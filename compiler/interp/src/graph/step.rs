//! One run of a function: values, states before and after, calls and scans.

use super::place::concrete_dims;
use super::plan::{FunctionPlan, FunctionPlanner, NodePlan, malformed};
use super::{AllGatherFault, GraphError, Interpreter, StateValues, Tensor};
use mlcc_ir::dim::SymValues;
use mlcc_ir::entity::EntityId;
use mlcc_ir::graph::{Function, GraphNode, NodeId};
use mlcc_ir::module::{FuncId, StateId};
use mlcc_ir::ops::Op;
use mlcc_ir::text::node_label;
use mlcc_ir::types::TensorType;
use std::borrow::Cow;
use std::rc::Rc;
use std::sync::Arc;

pub(super) type TensorList = Vec<Arc<Tensor>>;

/// Calls nested deeper than this are taken for a recursion (which the verifier refuses).
const MAX_DEPTH: usize = 64;

pub(super) struct StepEvaluator<'i, 'm> {
    interpreter: &'i Interpreter<'m>,
    planner: FunctionPlanner<'m>,
    plans: Vec<Option<Rc<FunctionPlan<'m>>>>,
    before: StateValues,
    after: StateValues,
    depth: usize,
}

/// A tensor must have the type that the module says, for the sizes of this call.
pub(super) fn check(
    place: impl Fn() -> String,
    ty: &TensorType,
    tensor: &Tensor,
    syms: &SymValues,
) -> Result<(), GraphError> {
    let dims = concrete_dims(ty, syms).ok_or_else(|| GraphError::Size { place: place(), ty: ty.clone() })?;
    let elements = dims.iter().product::<usize>();
    if tensor.dims == dims && tensor.dtype == ty.dtype && tensor.data.len() == elements {
        return Ok(());
    }
    let expected = format!("{}{dims:?}", ty.dtype);
    Err(GraphError::Shape { place: place(), expected, found: tensor.describe() })
}

impl<'i, 'm> StepEvaluator<'i, 'm> {
    pub fn new(interpreter: &'i Interpreter<'m>, states: &StateValues, syms: SymValues) -> Self {
        let planner = FunctionPlanner { module: interpreter.module, syms, mode: interpreter.mode };
        StepEvaluator {
            interpreter,
            planner,
            plans: vec![None; interpreter.module.functions.len()],
            before: states.clone(),
            after: states.clone(),
            depth: 0,
        }
    }
    /// The states after the step.
    pub fn finish(self) -> StateValues {
        self.after
    }

    pub fn call(&mut self, id: FuncId, inputs: TensorList) -> Result<TensorList, GraphError> {
        let plan = self.plan(id)?;
        self.depth += 1;
        if self.depth > MAX_DEPTH {
            let place = format!("function @{}", plan.function.name);
            let (expected, found) = ("no recursion".into(), format!("{MAX_DEPTH} nested calls"));
            return Err(GraphError::Shape { place, expected, found });
        }
        let outputs = self.run(&plan, inputs);
        self.depth -= 1;
        outputs
    }

    pub(super) fn plan(&mut self, id: FuncId) -> Result<Rc<FunctionPlan<'m>>, GraphError> {
        let missing = || GraphError::NoFunction(id.to_string());
        if let Some(plan) = self.plans.get(id.index()).ok_or_else(missing)? {
            return Ok(plan.clone());
        }
        let function = self.planner.module.functions.get(id).ok_or_else(missing)?;
        let plan = Rc::new(self.planner.function(Cow::Borrowed(function))?);
        self.plans[id.index()] = Some(plan.clone());
        Ok(plan)
    }

    fn run(&mut self, plan: &FunctionPlan, inputs: TensorList) -> Result<TensorList, GraphError> {
        let f = &*plan.function;
        if inputs.len() != f.inputs.len() {
            let (expected, found) = (f.inputs.len(), inputs.len());
            return Err(GraphError::Arity { function: f.name.clone(), expected, found });
        }
        let mut values: Vec<Option<Arc<Tensor>>> = vec![None; f.values.len()];
        for (i, (&v, tensor)) in f.inputs.iter().zip(inputs).enumerate() {
            check(|| format!("input {i} of @{}", f.name), f.ty(v), &tensor, &self.planner.syms)?;
            values[v.index()] = Some(tensor);
        }
        for ((id, node), how) in f.live_nodes().zip(&plan.nodes) {
            let undefined = || malformed(f, id, "uses a value before its definition".into());
            let args = node
                .inputs
                .iter()
                .map(|v| values[v.index()].clone().ok_or_else(undefined))
                .collect::<Result<TensorList, _>>()?;
            let outputs = self.node(f, id, node, how, args)?;
            for (&v, tensor) in node.outputs.iter().zip(outputs) {
                values[v.index()] = Some(tensor);
            }
        }
        let undefined = || GraphError::Shape {
            place: format!("outputs of @{}", f.name),
            expected: "defined values".into(),
            found: "an undefined one".into(),
        };
        f.outputs.iter().map(|v| values[v.index()].clone().ok_or_else(undefined)).collect()
    }

    pub(super) fn node(
        &mut self,
        f: &Function,
        id: NodeId,
        node: &GraphNode,
        how: &NodePlan,
        args: TensorList,
    ) -> Result<TensorList, GraphError> {
        match how {
            NodePlan::Decomposed(plan) => self.run(plan, args),
            NodePlan::Structural => self.structural(f, id, node, args),
            NodePlan::Compute(outputs) => {
                let (function, label) = (|| f.name.clone(), || node_label(f, id));
                let fault = |fault| GraphError::Fault { function: function(), node: label(), fault };
                outputs.iter().map(|o| o.evaluate(&args).map(Arc::new).map_err(fault)).collect()
            }
        }
    }

    fn structural(
        &mut self,
        f: &Function,
        id: NodeId,
        node: &GraphNode,
        mut args: TensorList,
    ) -> Result<TensorList, GraphError> {
        let bad = |message: &str| malformed(f, id, message.into());
        match &node.op {
            Op::Param(param) => Ok(vec![self.interpreter.param(*param)?]),
            Op::StateRead(state) => {
                let value = self.before.shared(*state).ok_or_else(|| bad("no value for the state"))?;
                let ty = f.ty(node.outputs[0]);
                check(|| format!("value of state {state}"), ty, value, &self.planner.syms)?;
                Ok(vec![value.clone()])
            }
            Op::StateWrite(state) => match args.pop() {
                Some(value) if self.after.set_shared(*state, value.clone()) => Ok(vec![]),
                _ => Err(bad("no such state")),
            },
            Op::CacheAppend(state) => match args.pop() {
                Some(rows) => self.append(f, id, *state, &rows),
                None => Err(bad("appends nothing")),
            },
            Op::AllGather { ranks } => match args.pop() {
                Some(part) => self.all_gather(f, id, *ranks, &part),
                None => Err(bad("exchanges nothing")),
            },
            Op::Call(callee) => self.call(*callee, args),
            Op::Scan { body, carries, seqs } => self.scan(f, node, *body, *carries, *seqs, args),
            _ => Err(bad("has no meaning")),
        }
    }

    /// The parts of all ranks, joined along the last axis.
    fn all_gather(
        &mut self,
        f: &Function,
        id: NodeId,
        ranks: usize,
        part: &Arc<Tensor>,
    ) -> Result<TensorList, GraphError> {
        let fault = |fault: AllGatherFault| GraphError::Exchange {
            function: f.name.clone(),
            node: node_label(f, id),
            fault: Box::new(fault),
        };
        let parts = match &self.interpreter.link {
            Some(link) => link.all_gather(ranks, part).map_err(fault)?,
            None => return Err(fault(AllGatherFault::Alone { ranks })),
        };
        let Some((&width, leading)) = part.dims.split_last() else {
            return Err(malformed(f, id, "joins parts without an axis".into()));
        };
        let rows: usize = leading.iter().product();
        let row = |row: usize| {
            parts.iter().flat_map(move |part| part.data[row * width..(row + 1) * width].iter().copied())
        };
        let dims = leading.iter().copied().chain([ranks * width]).collect();
        let data = (0..rows).flat_map(row).collect();
        Ok(vec![Arc::new(Tensor { dtype: part.dtype, dims, data })])
    }

    /// Writes rows after those that the state holds, and gives all so far.
    fn append(
        &mut self,
        f: &Function,
        id: NodeId,
        state: StateId,
        rows: &Tensor,
    ) -> Result<TensorList, GraphError> {
        let bad = |message: String| malformed(f, id, message);
        let kept = self.before.shared(state).ok_or_else(|| bad("no value for the state".into()))?;
        let past = usize::try_from(self.planner.syms.past).map_err(|_| bad("a negative past".into()))?;
        let (context, row) = (kept.dims[0], kept.dims[1..].iter().product::<usize>());
        let total = past + rows.dims[0];
        if total > context {
            return Err(bad(format!("{total} rows in a cache of {context}")));
        }
        let mut all = Tensor::clone(kept);
        all.data[past * row..total * row].copy_from_slice(&rows.data);
        let dims = std::iter::once(total).chain(kept.dims[1..].iter().copied()).collect();
        let view = Tensor { dtype: kept.dtype, dims, data: all.data[..total * row].to_vec() };
        self.after.set_shared(state, Arc::new(all));
        Ok(vec![Arc::new(view)])
    }

    fn scan(
        &mut self,
        f: &Function,
        node: &GraphNode,
        body: FuncId,
        carries: usize,
        seqs: usize,
        args: TensorList,
    ) -> Result<TensorList, GraphError> {
        let length = args[carries].dims[0];
        let mut carried: TensorList = args[..carries].to_vec();
        // Stacked outputs have the type of the node; filled slice by slice.
        let mut stacked = Vec::with_capacity(node.outputs.len() - carries);
        for &v in &node.outputs[carries..] {
            let ty = f.ty(v);
            let dims = concrete_dims(ty, &self.planner.syms)
                .ok_or_else(|| GraphError::Size { place: format!("scan in @{}", f.name), ty: ty.clone() })?;
            let data = Vec::with_capacity(dims.iter().product());
            stacked.push(Tensor { dtype: ty.dtype, dims, data });
        }
        for i in 0..length {
            let mut inputs = std::mem::take(&mut carried);
            inputs.extend(args[carries..carries + seqs].iter().map(|seq| {
                let (dtype, dims) = (seq.dtype, seq.dims[1..].to_vec());
                Arc::new(Tensor { dtype, dims, data: seq.row(i).to_vec() })
            }));
            inputs.extend_from_slice(&args[carries + seqs..]);
            let outputs = self.call(body, inputs)?;
            for (all, slice) in stacked.iter_mut().zip(&outputs[carries..]) {
                all.data.extend_from_slice(&slice.data);
            }
            carried = outputs;
            carried.truncate(carries);
        }
        carried.extend(stacked.into_iter().map(Arc::new));
        Ok(carried)
    }
}
