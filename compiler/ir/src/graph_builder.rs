//! Builds modules from model definitions, reading like the reference code.
//!
//! A definition is straight-line code over values; the first ill-typed op is remembered and reported by
//! [`GraphBuilder::finish`], so that definitions need no `?` on every line.

use crate::compute::RedOp;
use crate::dim::Dim;
use crate::graph::{Function, FunctionKind, ValueId};
use crate::kernel::{BinOp, UnOp};
use crate::module::*;
use crate::ops::{Op, OpError};
use crate::sequences::RowBatching;
use crate::types::{DType, TensorType};

/// A module under construction, with the functions that are open (innermost last).
pub struct GraphBuilder {
    module: Module,
    open: Vec<Function>,
    error: Option<OpError>,
    /// Taps of the open entry function; `None` where they are not requested.
    taps: Option<Vec<(String, ValueId)>>,
    /// The rows of the open entry function.
    batching: RowBatching,
    /// Splits of its sequences that are open.
    depth: usize,
}

impl GraphBuilder {
    pub fn new(name: impl Into<String>) -> Self {
        GraphBuilder {
            module: Module::new(name),
            open: Vec::new(),
            error: None,
            taps: None,
            batching: RowBatching::Single,
            depth: 0,
        }
    }
    /// A builder whose entry functions also return what they [`GraphBuilder::tap`].
    pub fn with_taps(name: impl Into<String>) -> Self {
        GraphBuilder { taps: Some(Vec::new()), ..GraphBuilder::new(name) }
    }
    /// The module, or the first op that did not fit its inputs.
    pub fn finish(self) -> Result<Module, OpError> {
        match self.error {
            None => Ok(self.module),
            Some(error) => Err(error),
        }
    }
    pub fn module(&self) -> &Module {
        &self.module
    }

    // ---- declarations

    /// Defines a function; `body` returns its outputs. A function of that name that exists already is kept
    /// and returned.
    pub fn function(
        &mut self,
        name: &str,
        kind: FunctionKind,
        inputs: &[TensorType],
        body: impl FnOnce(&mut Self, &[ValueId]) -> Vec<ValueId>,
    ) -> FuncId {
        if let Some((id, _)) = self.module.function(name) {
            return id;
        }
        let mut function = Function::new(name, kind);
        let args: Vec<ValueId> = inputs.iter().map(|ty| function.add_input(ty.clone())).collect();
        self.open.push(function);
        let outputs = body(self, &args);
        let mut function = self.open.pop().expect("opened above");
        function.outputs = outputs;
        if kind == FunctionKind::Entry
            && let Some(taps) = &mut self.taps
            && !taps.is_empty()
        {
            let (names, values): (Vec<String>, Vec<ValueId>) = taps.drain(..).unzip();
            function.outputs.extend(values);
            self.module.taps.push(FunctionTaps { function: name.into(), names });
        }
        self.module.functions.push(function)
    }
    /// Names a value `[rows, width]` of the open entry function for debugging: it becomes an output of the
    /// function if the builder was made [`GraphBuilder::with_taps`], and nothing happens otherwise. Models
    /// name the value after the embedding `embedding`, after each layer `layer.0`, its parts
    /// `layer.0.attention` and `layer.0.mlp` (before the residual is added), and after the last norm
    /// `final_norm`.
    pub fn tap(&mut self, name: impl Into<String>, value: ValueId) {
        let entry = self.open.len() == 1 && self.open[0].kind == FunctionKind::Entry;
        let matrix = self.error.is_some() || self.ty(value).rank() == 2;
        let Some(taps) = &mut self.taps else { return };
        let name = name.into();
        if !entry || !matrix || taps.iter().any(|(n, _)| *n == name) {
            let message = format!("{name} is no new matrix of an entry function");
            self.error.get_or_insert(OpError { op: "tap", message });
            return;
        }
        taps.push((name, value));
    }
    /// Says what rows the entry functions take that come next.
    pub fn set_batching(&mut self, batching: RowBatching) {
        self.batching = batching;
    }
    /// True where a batched function is between [`GraphBuilder::split_sequences`] and
    /// [`GraphBuilder::join_sequences`].
    pub fn in_sequence(&self) -> bool {
        self.batching.is_batched() && self.depth > 0
    }
    /// Begins what looks at one sequence (its states, caches, positions): gives the values to use for
    /// `rows: [n, ..]`. Outside of batched functions all rows are of one sequence, and the values are the
    /// same. May be nested: only the outermost pair does something.
    pub fn split_sequences(&mut self, rows: &[ValueId]) -> Vec<ValueId> {
        self.depth += 1;
        let split = Op::SequenceSplit { ragged: self.batching == RowBatching::Ragged };
        match self.batching.is_batched() && self.depth == 1 {
            true => rows.iter().map(|&v| self.op(split.clone(), &[v])).collect(),
            false => rows.to_vec(),
        }
    }
    /// Ends it: the rows of each sequence as those of all.
    pub fn join_sequences(&mut self, values: &[ValueId]) -> Vec<ValueId> {
        self.depth -= 1;
        match self.batching.is_batched() && self.depth == 0 {
            true => values.iter().map(|&v| self.op(Op::SequenceJoin, &[v])).collect(),
            false => values.to_vec(),
        }
    }
    /// The rows of `x: [n, ..]` with the numbers `wanted: i32[n]`, whose logits are requested.
    pub fn output_rows(&mut self, x: ValueId, wanted: ValueId) -> ValueId {
        let first = self.gather(x, wanted);
        self.op(Op::OutputRows, &[first])
    }
    /// [`GraphBuilder::split_sequences`] around `body`.
    pub fn per_sequence(
        &mut self,
        rows: &[ValueId],
        body: impl FnOnce(&mut Self, &[ValueId]) -> Vec<ValueId>,
    ) -> Vec<ValueId> {
        let rows = self.split_sequences(rows);
        let values = body(self, &rows);
        self.join_sequences(&values)
    }
    fn current(&mut self) -> &mut Function {
        self.open.last_mut().expect("an op outside of a function")
    }
    pub fn ty(&self, v: ValueId) -> &TensorType {
        self.open.last().expect("a function is open").ty(v)
    }

    /// A weight under its checkpoint name.
    pub fn param(&mut self, name: &str, role: ParamRole, ty: TensorType) -> ValueId {
        self.param_from(name, role, ty, ParamSource::Tensor(name.into()))
    }
    /// A weight made of checkpoint tensors by `source`; `name` is declared on first use.
    pub fn param_from(
        &mut self,
        name: &str,
        role: ParamRole,
        ty: TensorType,
        source: ParamSource,
    ) -> ValueId {
        let id = match self.module.param(name) {
            Some(id) => id,
            None => {
                self.module.params.push(ModelParam { name: name.into(), ty, role, source, packing: None })
            }
        };
        self.op(Op::Param(id), &[])
    }
    /// A state tensor, declared on first use; `init` fills it at the start of a sequence.
    pub fn state(&mut self, name: &str, ty: TensorType, init: f64) -> StateId {
        match self.module.state(name) {
            Some(id) => id,
            None => self.module.states.push(ModelState { name: name.into(), ty, init }),
        }
    }
    pub fn read(&mut self, state: StateId) -> ValueId {
        self.op(Op::StateRead(state), &[])
    }
    pub fn write(&mut self, state: StateId, value: ValueId) {
        self.ops(Op::StateWrite(state), &[value]);
    }

    /// Writes `rows: [n, ..]` after what the cache `state: [context, ..]` holds; gives all rows,
    /// `[past + n, ..]`.
    pub fn append(&mut self, state: StateId, rows: ValueId) -> ValueId {
        self.op(Op::CacheAppend(state), &[rows])
    }

    // ---- ops

    /// Appends an op with any number of outputs.
    pub fn ops(&mut self, op: Op, inputs: &[ValueId]) -> Vec<ValueId> {
        let function = self.open.last_mut().expect("an op outside of a function");
        match function.append(&self.module, op, inputs) {
            Ok(outputs) => outputs,
            Err(error) => {
                self.error.get_or_insert(error);
                Vec::new()
            }
        }
    }
    /// Appends an op with one output.
    pub fn op(&mut self, op: Op, inputs: &[ValueId]) -> ValueId {
        match self.ops(op, inputs).first() {
            Some(&value) => value,
            // Only after an error: any value keeps the definition going until `finish` reports it.
            None => {
                let zero = Op::Constant { value: 0.0, dtype: DType::F32 };
                let ty = TensorType { dtype: DType::F32, dims: vec![] };
                self.current().append_typed(zero, &[], vec![ty])[0]
            }
        }
    }
    pub fn constant(&mut self, value: f64) -> ValueId {
        self.op(Op::Constant { value, dtype: DType::F32 }, &[])
    }
    pub fn unary(&mut self, op: UnOp, a: ValueId) -> ValueId {
        self.op(Op::Unary(op), &[a])
    }
    pub fn exp(&mut self, a: ValueId) -> ValueId {
        self.unary(UnOp::Exp, a)
    }
    pub fn sigmoid(&mut self, a: ValueId) -> ValueId {
        self.unary(UnOp::Sigmoid, a)
    }
    pub fn tanh(&mut self, a: ValueId) -> ValueId {
        self.unary(UnOp::Tanh, a)
    }
    pub fn relu(&mut self, a: ValueId) -> ValueId {
        let zero = self.constant(0.0);
        self.max(a, zero)
    }
    pub fn square(&mut self, a: ValueId) -> ValueId {
        self.mul(a, a)
    }
    pub fn add(&mut self, a: ValueId, b: ValueId) -> ValueId {
        self.op(Op::Binary(BinOp::Add), &[a, b])
    }
    pub fn sub(&mut self, a: ValueId, b: ValueId) -> ValueId {
        self.op(Op::Binary(BinOp::Sub), &[a, b])
    }
    pub fn mul(&mut self, a: ValueId, b: ValueId) -> ValueId {
        self.op(Op::Binary(BinOp::Mul), &[a, b])
    }
    pub fn div(&mut self, a: ValueId, b: ValueId) -> ValueId {
        self.op(Op::Binary(BinOp::Div), &[a, b])
    }
    pub fn max(&mut self, a: ValueId, b: ValueId) -> ValueId {
        self.op(Op::Binary(BinOp::Max), &[a, b])
    }
    pub fn min(&mut self, a: ValueId, b: ValueId) -> ValueId {
        self.op(Op::Binary(BinOp::Min), &[a, b])
    }
    /// `a >= b ? x : y`.
    pub fn select_ge(&mut self, a: ValueId, b: ValueId, x: ValueId, y: ValueId) -> ValueId {
        self.op(Op::SelectGe, &[a, b, x, y])
    }
    /// `i32[len]`: `start, start + 1, ...`.
    pub fn iota(&mut self, start: Dim, len: Dim) -> ValueId {
        self.op(Op::Iota { start, len }, &[])
    }
    pub fn scale(&mut self, a: ValueId, factor: f64) -> ValueId {
        let factor = self.constant(factor);
        self.mul(a, factor)
    }
    pub fn cast(&mut self, a: ValueId, dtype: DType) -> ValueId {
        if self.ty(a).dtype == dtype { a } else { self.op(Op::Cast(dtype), &[a]) }
    }
    pub fn reshape(&mut self, a: ValueId, dims: impl IntoIterator<Item = impl Into<Dim>>) -> ValueId {
        self.op(Op::Reshape { dims: dims.into_iter().map(Into::into).collect() }, &[a])
    }
    pub fn permute(&mut self, a: ValueId, perm: &[usize]) -> ValueId {
        self.op(Op::Permute { perm: perm.to_vec() }, &[a])
    }
    pub fn slice(&mut self, a: ValueId, axis: usize, start: Dim, len: Dim) -> ValueId {
        self.op(Op::Slice { axis, start, len }, &[a])
    }
    pub fn concat(&mut self, parts: &[ValueId], axis: usize) -> ValueId {
        self.op(Op::Concat { axis }, parts)
    }
    pub fn gather(&mut self, table: ValueId, ids: ValueId) -> ValueId {
        self.op(Op::Gather, &[table, ids])
    }
    pub fn matmul(&mut self, a: ValueId, b: ValueId) -> ValueId {
        self.op(Op::MatMul { transpose_b: false }, &[a, b])
    }
    pub fn reduce(&mut self, op: RedOp, a: ValueId, axis: usize) -> ValueId {
        self.op(Op::Reduce { op, axis }, &[a])
    }
    pub fn layer_norm(&mut self, x: ValueId, weight: ValueId, bias: ValueId, eps: f64) -> ValueId {
        self.op(Op::LayerNorm { eps }, &[x, weight, bias])
    }
    pub fn rms_norm(&mut self, x: ValueId, weight: ValueId, eps: f64) -> ValueId {
        self.op(Op::RmsNorm { eps }, &[x, weight])
    }
    /// Values and indices of the `k` largest per row.
    pub fn top_k(&mut self, x: ValueId, k: usize) -> (ValueId, ValueId) {
        match self.ops(Op::TopK { k }, &[x])[..] {
            [values, ids] => (values, ids),
            _ => (x, x),
        }
    }
    /// Rows of `x: [n, slots or 1, in]` times the matrices that `ids: i32[n, slots]` picks of
    /// `weight: [experts * out, in]`.
    pub fn matmul_experts(&mut self, x: ValueId, weight: ValueId, ids: ValueId, experts: usize) -> ValueId {
        self.op(Op::MatMulExperts { experts }, &[x, weight, ids])
    }
    pub fn softmax(&mut self, x: ValueId) -> ValueId {
        self.op(Op::Softmax, &[x])
    }
    pub fn scan(
        &mut self,
        body: FuncId,
        carries: &[ValueId],
        seqs: &[ValueId],
        consts: &[ValueId],
    ) -> Vec<ValueId> {
        let inputs: Vec<ValueId> = [carries, seqs, consts].concat();
        let outputs = self.ops(Op::Scan { body, carries: carries.len(), seqs: seqs.len() }, &inputs);
        if outputs.is_empty() { vec![self.constant(0.0); carries.len() + 1] } else { outputs }
    }
}
