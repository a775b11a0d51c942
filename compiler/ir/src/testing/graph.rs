//! Random modules for property tests: well-formed graph functions of every op, determined by a seed.
//!
//! The entry `main` takes `i32[n]` ids below [`ROWS`] and floats. Values stay moderate (functions with poles
//! are only applied to results of `sigmoid`), so that any two ways to evaluate a module may be compared with
//! a tolerance.

use super::TestRng;
use crate::compute::RedOp;
use crate::dim::{Dim, SizeSymbol, SymValues};
use crate::graph::{Function, FunctionKind, ValueId};
use crate::kernel::{BinOp, UnOp};
use crate::module::{
    ColumnRange, FuncId, ModelParam, ModelState, Module, ParamId, ParamRole, ParamSource, RowBlocks,
};
use crate::ops::Op;
use crate::types::{DType, QuantFormat, TensorType};

/// Rows of every table that is gathered from.
pub const ROWS: i64 = 8;

/// The constructs that random modules may contain.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct GraphOptions {
    /// Nodes to try; some do not fit what is there and are skipped.
    pub nodes: usize,
    /// Ops whose results jump (casts, rounding, quantization): a tiny difference before them is a large one
    /// after.
    pub jumps: bool,
    /// Parameters made of several checkpoint tensors, and odd names.
    pub sources: bool,
}

impl GraphOptions {
    /// All constructs, for the text format.
    pub const ALL: GraphOptions = GraphOptions { nodes: 40, jumps: true, sources: true };
    /// The constructs for comparing results.
    pub const SMOOTH: GraphOptions = GraphOptions { nodes: 25, jumps: false, sources: false };
}

/// The random module of a seed; passes the verifier. Its function `main` may be run with any `n >= 1`.
pub fn random_module(seed: u64, options: &GraphOptions) -> Module {
    let mut g = GraphGenerator {
        rng: TestRng(seed),
        module: Module::new(format!("random_{seed}")),
        f: Function::new("main", FunctionKind::Entry),
        options: *options,
        pool: Vec::new(),
    };
    g.inputs();
    for _ in 0..options.nodes {
        g.node();
    }
    g.finish()
}

struct GraphGenerator {
    rng: TestRng,
    module: Module,
    f: Function,
    options: GraphOptions,
    /// f32 values to build on.
    pool: Vec<ValueId>,
}

fn n() -> Dim {
    Dim::sym(SizeSymbol::N)
}

fn f32s(dims: impl IntoIterator<Item = impl Into<Dim>>) -> TensorType {
    TensorType::new(DType::F32, dims)
}

impl GraphGenerator {
    fn inputs(&mut self) {
        let ids = self.f.add_input(TensorType::new(DType::I32, [n()]));
        let width = self.width();
        let x = self.f.add_input(f32s([n(), width]));
        let dtype = if self.options.jumps { self.rng.pick(&[DType::F32, DType::F16]) } else { DType::F32 };
        let table = self.param(TensorType::new(dtype, [Dim::from(ROWS), Dim::from(6)]));
        self.pool.push(x);
        let rows = self.append_kept(Op::Gather, &[table, ids]);
        if let (Some(rows), true) = (rows, dtype != DType::F32) {
            self.append_kept(Op::Cast(DType::F32), &[rows]);
        }
    }
    fn width(&mut self) -> Dim {
        Dim::from(self.rng.pick(&[1, 3, 4, 6, 8]))
    }

    /// Appends an op and keeps its first result for use; `None` if it does not fit or grows too large.
    fn append_kept(&mut self, op: Op, inputs: &[ValueId]) -> Option<ValueId> {
        let types: Vec<&TensorType> = inputs.iter().map(|&v| self.f.ty(v)).collect();
        let outputs = op.infer(&self.module, &types).ok()?;
        let size = |ty: &TensorType| {
            ty.dims.iter().map(|d| d.eval(&SymValues::for_tokens(4)).max(1)).product::<i64>()
        };
        if outputs.iter().any(|ty| size(ty) > 2000 || ty.rank() > 4) {
            return None;
        }
        let outputs = self.f.append_typed(op, inputs, outputs);
        let floats = outputs.iter().copied().filter(|&v| self.f.ty(v).dtype == DType::F32);
        self.pool.extend(floats);
        outputs.first().copied()
    }
    fn pick(&mut self) -> ValueId {
        let recent = self.pool.len().saturating_sub(6);
        let from = if self.rng.chance(3) { 0 } else { recent };
        let at = from + self.rng.below(self.pool.len() - from);
        self.pool[at]
    }
    fn pick_where(&mut self, fits: impl Fn(&TensorType) -> bool) -> Option<ValueId> {
        let found: Vec<ValueId> = self.pool.iter().copied().filter(|&v| fits(self.f.ty(v))).collect();
        (!found.is_empty()).then(|| self.rng.pick(&found))
    }

    fn param(&mut self, ty: TensorType) -> ValueId {
        let number = self.module.params.len();
        let mut name = format!("blocks.{number}.weight");
        let mut source = ParamSource::Tensor(name.clone());
        if self.options.sources {
            let part = |suffix: &str| ParamSource::Tensor(format!("{name}.{suffix}"));
            source = match self.rng.below(13) {
                0 => ParamSource::Scale(0.5, Box::new(part("a"))),
                1 => ParamSource::NegExp(Box::new(ParamSource::Scale(-1.25e-3, Box::new(part("a"))))),
                2 => ParamSource::Concat(vec![part("a"), part("b")]),
                3 => ParamSource::Transpose(Box::new(part("odd \"name\""))),
                4 => ParamSource::Offset(1.0, Box::new(part("a"))),
                5 => {
                    let rows = ty.dims.first().and_then(Dim::as_const).unwrap_or(1).max(1) as usize;
                    let blocks = RowBlocks { start: 1, len: 1, stride: 3, count: rows, of: 3 * rows };
                    ParamSource::Rows(blocks, Box::new(part("a")))
                }
                6 => ParamSource::UnitRows(Box::new(part("a"))),
                7 => ParamSource::Exp(Box::new(part("a"))),
                8 => {
                    let columns = ty.dims.last().and_then(Dim::as_const).unwrap_or(1).max(1) as usize;
                    ParamSource::Columns((0..columns).rev().collect(), Box::new(part("a")))
                }
                9 => ParamSource::Adapter,
                10 => {
                    let len = ty.dims.last().and_then(Dim::as_const).unwrap_or(1).max(1) as usize;
                    let range = ColumnRange { start: 2, len, of: len + 3 };
                    ParamSource::ColumnRange(range, Box::new(part("a")))
                }
                _ => source,
            };
            if self.rng.chance(4) {
                name = format!("odd name {number}.");
            }
        }
        let role = self.rng.pick(&ParamRole::ALL);
        let id = self.module.params.push(ModelParam { name, ty: ty.clone(), role, source, packing: None });
        self.read_param(id, ty)
    }
    fn read_param(&mut self, id: ParamId, ty: TensorType) -> ValueId {
        self.f.append_typed(Op::Param(id), &[], vec![ty])[0]
    }

    /// Tries one node, or a few that belong together.
    fn node(&mut self) {
        let a = self.pick();
        let kinds = if self.options.jumps { 18 } else { 15 };
        match self.rng.below(kinds) {
            0 => {
                let value = self.rng.below(100) as f64 / 25.0 - 2.0;
                self.append_kept(Op::Constant { value, dtype: DType::F32 }, &[]);
            }
            1 => {
                let op = self.rng.pick(&[UnOp::Neg, UnOp::Abs, UnOp::Tanh, UnOp::Sigmoid, UnOp::Erf]);
                self.append_kept(Op::Unary(op), &[a]);
            }
            2 => self.on_sigmoid(a),
            3..=5 => {
                let b = self.pick();
                let op = self.rng.pick(&[BinOp::Add, BinOp::Sub, BinOp::Mul, BinOp::Min, BinOp::Max]);
                self.append_kept(Op::Binary(op), &[a, b]);
            }
            6 => self.reshape(a),
            7 => self.permute(a),
            8 => self.slice(a),
            9 => {
                let b = self.pick();
                let axis = self.rng.below(self.f.ty(a).rank());
                self.append_kept(Op::Concat { axis }, &[a, b]);
            }
            10 => self.matmul(a),
            11 => {
                let op = self.rng.pick(&[RedOp::Sum, RedOp::Max]);
                let axis = self.rng.below(self.f.ty(a).rank());
                self.append_kept(Op::Reduce { op, axis }, &[a]);
            }
            12 => self.norm(a),
            13 => self.scan(),
            14 => self.state_or_call(),
            15 => {
                let dtype = self.rng.pick(&[DType::F16, DType::BF16, DType::I8, DType::I32]);
                if let Some(v) = self.append_kept(Op::Cast(dtype), &[a]) {
                    self.append_kept(Op::Cast(DType::F32), &[v]);
                }
            }
            16 => {
                let [b, x, y] = [0; 3].map(|_| self.pick());
                self.append_kept(Op::SelectGe, &[a, b, x, y]);
            }
            _ => self.quantized(),
        }
    }

    /// Functions with a pole at zero, at a value in (0, 1).
    fn on_sigmoid(&mut self, a: ValueId) {
        let Some(s) = self.append_kept(Op::Unary(UnOp::Sigmoid), &[a]) else { return };
        let op = self.rng.pick(&[
            UnOp::Sqrt,
            UnOp::Exp,
            UnOp::Log,
            UnOp::Rsqrt,
            UnOp::Recip,
            UnOp::Sin,
            UnOp::Cos,
        ]);
        if self.rng.chance(2) {
            self.append_kept(Op::Unary(op), &[s]);
        } else {
            let b = self.pick();
            self.append_kept(Op::Binary(BinOp::Div), &[b, s]);
        }
    }
    fn reshape(&mut self, a: ValueId) {
        let mut dims = self.f.ty(a).dims.clone();
        match (self.rng.below(3), dims.as_slice()) {
            (0, _) => {
                let at = self.rng.below(dims.len() + 1);
                dims.insert(at, Dim::from(1));
            }
            (1, [.., rows, columns]) => {
                let Some(joined) = rows.mul(columns) else { return };
                dims.truncate(dims.len() - 2);
                dims.push(joined);
            }
            (_, [.., last]) if last.as_const().is_some_and(|d| d % 2 == 0) => {
                let half = last.floor_div(2);
                dims.pop();
                dims.extend([Dim::from(2), half]);
            }
            _ => return,
        }
        self.append_kept(Op::Reshape { dims }, &[a]);
    }
    fn permute(&mut self, a: ValueId) {
        let rank = self.f.ty(a).rank();
        let mut perm: Vec<usize> = (0..rank).collect();
        for i in (1..rank).rev() {
            perm.swap(i, self.rng.below(i + 1));
        }
        self.append_kept(Op::Permute { perm }, &[a]);
    }
    fn slice(&mut self, a: ValueId) {
        let rank = self.f.ty(a).rank();
        if rank == 0 {
            return;
        }
        let axis = self.rng.below(rank);
        let size = self.f.ty(a).dims[axis].clone();
        let (start, len) = match size.as_const() {
            Some(size) => {
                let start = self.rng.below(size as usize) as i64;
                (Dim::from(start), Dim::from(1 + self.rng.below((size - start) as usize) as i64))
            }
            None if self.rng.chance(2) => (size.sub(&Dim::from(1)), Dim::from(1)),
            None => (Dim::from(0), Dim::from(1)),
        };
        self.append_kept(Op::Slice { axis, start, len }, &[a]);
    }
    fn matmul(&mut self, a: ValueId) {
        let Some(k) = self.f.ty(a).dims.last().cloned() else { return };
        if self.f.ty(a).rank() < 2 || k.as_const().is_none() {
            return;
        }
        let (m, transpose_b) = (self.width(), self.rng.chance(2));
        let dims = if transpose_b { [m, k] } else { [k, m] };
        let dtype = if self.options.jumps { self.rng.pick(&[DType::F32, DType::F16]) } else { DType::F32 };
        let w = self.param(TensorType::new(dtype, dims));
        self.append_kept(Op::MatMul { transpose_b }, &[a, w]);
    }
    fn norm(&mut self, a: ValueId) {
        let Some(last) = self.f.ty(a).dims.last().cloned() else { return };
        if last.as_const().is_none() || self.rng.chance(3) {
            self.append_kept(Op::Softmax, &[a]);
            return;
        }
        let w = self.param(f32s([last.clone()]));
        if self.rng.chance(2) {
            self.append_kept(Op::RmsNorm { eps: 1e-2 }, &[a, w]);
        } else {
            let b = self.param(f32s([last]));
            self.append_kept(Op::LayerNorm { eps: 1e-2 }, &[a, w, b]);
        }
    }

    /// A decaying sum over a sequence: `c' = c * decay + x`, giving `tanh(c')`.
    fn scan(&mut self) {
        let is_sequence = |ty: &TensorType| ty.rank() == 2 && ty.dims[1].as_const().is_some();
        let Some(x) = self.pick_where(is_sequence) else { return };
        let width = self.f.ty(x).dims[1].clone();
        let ty = f32s([width]);
        let body = self.body(&ty);
        let state =
            ModelState { name: format!("state.{}", self.module.states.len()), ty: ty.clone(), init: 0.25 };
        let state = self.module.states.push(state);
        let c = self.f.append_typed(Op::StateRead(state), &[], vec![ty.clone()])[0];
        let decay = self.param(ty);
        let Some(next) = self.append_kept(Op::Scan { body, carries: 1, seqs: 1 }, &[c, x, decay]) else {
            return;
        };
        self.f.append_typed(Op::StateWrite(state), &[next], vec![]);
    }
    fn body(&mut self, ty: &TensorType) -> FuncId {
        let name = format!("body.{}", self.module.functions.len());
        let mut f = Function::new(name, FunctionKind::Body);
        let [c, x, decay] = [0; 3].map(|_| f.add_input(ty.clone()));
        let one = |f: &mut Function, op, inputs: &[ValueId]| f.append_typed(op, inputs, vec![ty.clone()])[0];
        let bounded = one(&mut f, Op::Unary(UnOp::Sigmoid), &[decay]);
        let kept = one(&mut f, Op::Binary(BinOp::Mul), &[c, bounded]);
        let next = one(&mut f, Op::Binary(BinOp::Add), &[kept, x]);
        let out = one(&mut f, Op::Unary(UnOp::Tanh), &[next]);
        f.outputs = vec![next, out];
        self.module.functions.push(f)
    }
    fn state_or_call(&mut self) {
        let a = self.pick();
        let ty = self.f.ty(a).clone();
        let constant = ty.dims.iter().all(|d| d.as_const().is_some());
        let number = self.module.states.len();
        if constant && self.rng.chance(2) {
            let state = ModelState { name: format!("state.{number}"), ty: ty.clone(), init: -0.5 };
            let state = self.module.states.push(state);
            self.append_kept(Op::StateRead(state), &[]);
            self.f.append_typed(Op::StateWrite(state), &[a], vec![]);
            return;
        }
        let mut group = Function::new(format!("group.{}", self.module.functions.len()), FunctionKind::Group);
        let x = group.add_input(ty.clone());
        let y = group.append_typed(Op::Unary(UnOp::Tanh), &[x], vec![ty.clone()])[0];
        let z = group.append_typed(Op::Binary(BinOp::Add), &[x, y], vec![ty])[0];
        group.outputs = vec![z, y];
        let group = self.module.functions.push(group);
        self.append_kept(Op::Call(group), &[a]);
    }
    /// The whole path of a quantized contraction.
    fn quantized(&mut self) {
        let Some(x) = self.pick_where(|ty| ty.rank() == 2 && ty.dims[1].as_const().is_some()) else { return };
        let Some(k) = self.f.ty(x).dims[1].as_const() else { return };
        let (format, rows, group) = (self.rng.pick(QuantFormat::ALL), self.width(), 32);
        let w = self.param(TensorType::new(DType::Packed(format), [rows, Dim::from(k)]));
        if self.rng.chance(3) || !format.has_integer_products() {
            self.append_kept(Op::Dequantize, &[w]);
            return;
        }
        let (bits, part, zero) = (self.rng.pick(&[8, 16]), 32, 7);
        let path = |g: &mut Self| {
            if bits == 8 {
                let scales = g.append_kept(Op::GroupScale { group, bits }, &[x])?;
                let codes = g.append_kept(Op::GroupQuantize { group, bits, part }, &[x, scales])?;
                let sums = g.append_kept(Op::GroupSum { part, zero }, &[codes])?;
                return g.append_kept(Op::MatMulI8 { group }, &[codes, scales, sums, w]);
            }
            let op = Op::QuantizeRows { group, bits, part, zero };
            let parts = g.f.append(&g.module, op, &[x]).ok()?;
            g.append_kept(Op::MatMulI8 { group }, &[parts[0], parts[1], parts[2], w])
        };
        path(self);
    }

    /// Returns the last values; unused ones stay, as in a module before dead code is removed.
    fn finish(mut self) -> Module {
        let count = 1 + self.rng.below(3).min(self.pool.len() - 1);
        self.f.outputs = self.pool[self.pool.len() - count..].to_vec();
        self.module.functions.push(self.f);
        self.module
    }
}
