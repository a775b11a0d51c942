//! Turns compute definitions into kernel expressions: the value of an SSA value at given indices, with everything that
//! is not bound to a buffer or an expression inlined from its definition.
//!
//! One axis may be a vector: its index is `base + stride * lane`. Addresses that stay of this form become contiguous
//! (stride 1) or broadcast (stride 0) accesses; everything else becomes a gather.

use super::known::known;
use mlcc_ir::builder::KernelBuilder;
use mlcc_ir::compute::{RedOp, Scalar};
use mlcc_ir::dim::{Dim, Sym};
use mlcc_ir::graph::{Def, Function, Node, ValueId};
use mlcc_ir::kernel::{BinOp, BufId, Expr, ExprId, Space, Ty, UnOp};
use mlcc_ir::ops::Meaning;
use mlcc_ir::types::{DType, TensorType};
use mlcc_quant::Layout;
use std::collections::HashMap;

/// An integer position: one number, or one per lane.
#[derive(Clone, Copy, PartialEq, Debug)]
pub enum Index {
    /// `base + stride * lane`; stride 0 is the same number in all lanes.
    Affine { base: ExprId, stride: i64 },
    /// i64 with as many lanes as the context.
    Vector(ExprId),
}

impl Index {
    pub fn scalar(base: ExprId) -> Index {
        Index::Affine { base, stride: 0 }
    }
    /// Consecutive positions, one per lane.
    pub fn lanes(base: ExprId) -> Index {
        Index::Affine { base, stride: 1 }
    }
}

/// What a value of the function is while its kernel runs.
#[derive(Clone)]
pub enum Binding {
    /// In memory, row-major with the dims of its type (or in the layout of a packed or re-packed parameter).
    Buffer { buf: BufId, layout: Option<Layout> },
    /// Known at the current position, whatever the indices (an accumulator, a row's reduction).
    Value(ExprId),
}

/// The state of inlining at one place of a kernel.
#[derive(Clone)]
pub struct Inliner<'a> {
    pub f: &'a Function,
    pub bindings: HashMap<ValueId, Binding>,
    /// Lanes of the vector axis; 1 if there is none.
    pub lanes: u32,
    /// Lanes that may touch memory; `None` is all.
    pub mask: Option<ExprId>,
    /// True if the base of the vector axis is a multiple of `lanes`.
    pub aligned: bool,
    /// Widest vector for reductions that are opened while `lanes` is 1.
    pub reduce_lanes: u32,
}

/// Where a scalar expression is evaluated.
struct Place<'p> {
    inputs: &'p [ValueId],
    axes: &'p [Index],
    reds: Vec<(u32, Index)>,
}

impl Inliner<'_> {
    /// The value at `index` (one entry per axis of its type), with 1 or `lanes` lanes.
    /// Integers come as i32 (i64 stays), floats as f32.
    pub fn value(&self, kb: &mut KernelBuilder, v: ValueId, index: &[Index]) -> ExprId {
        match self.bindings.get(&v) {
            Some(Binding::Value(e)) => *e,
            Some(Binding::Buffer { buf, layout }) => {
                self.load(kb, *buf, layout.as_ref(), self.f.ty(v), index)
            }
            None => {
                let node = self.f.def(v).expect("inputs of a group are bound");
                let Some(scalar) = self.definition(v, node) else {
                    panic!("{} reached lowering; `decompose` has to run before", node.op.name());
                };
                let place = Place { inputs: &node.inputs, axes: index, reds: Vec::new() };
                self.scalar(kb, &scalar, &place)
            }
        }
    }

    /// The compute definition of a value, if its node has one.
    fn definition(&self, v: ValueId, node: &Node) -> Option<Scalar> {
        let Def::Node(_, output) = self.f.values[v].def else { return None };
        let types: Vec<&TensorType> = node.inputs.iter().map(|&i| self.f.ty(i)).collect();
        match node.op.meaning(&types) {
            Meaning::Compute(mut scalars) => Some(scalars.swap_remove(output as usize)),
            Meaning::Decompose | Meaning::Structural => None,
        }
    }

    fn scalar(&self, kb: &mut KernelBuilder, s: &Scalar, at: &Place) -> ExprId {
        match s {
            Scalar::Axis(_) | Scalar::Red(_) | Scalar::Dim(_) | Scalar::Int(_) => {
                let index = self.index(kb, s, at);
                self.materialise(kb, index)
            }
            Scalar::Float(value) => kb.float(*value),
            Scalar::Load { arg, index } => {
                let index: Vec<Index> = index.iter().map(|i| self.index(kb, i, at)).collect();
                self.value(kb, at.inputs[*arg], &index)
            }
            Scalar::Unary(op, a) => {
                let a = self.scalar(kb, a, at);
                kb.unary(*op, a)
            }
            Scalar::Binary(op, a, b) => {
                let (a, b) = (self.scalar(kb, a, at), self.scalar(kb, b, at));
                let (a, b) = self.same_type(kb, a, b);
                kb.binary(*op, a, b)
            }
            Scalar::Select(c, a, b) => self.select(kb, c, a, b, at),
            Scalar::Cast(dtype, a) => match **a {
                // Arithmetic of integers stays in integers.
                Scalar::Float(value) if dtype.is_int() => {
                    kb.int_of(value as i64, if *dtype == DType::I64 { DType::I64 } else { DType::I32 })
                }
                _ => {
                    let a = self.scalar(kb, a, at);
                    kb.cast(a, *dtype)
                }
            },
            Scalar::Reduce { op, var, extent, body } => self.reduce(kb, *op, *var, extent, body, at),
        }
    }

    /// Integers and floats in one arithmetic op meet in f32, different integers in i32.
    fn same_type(&self, kb: &mut KernelBuilder, a: ExprId, b: ExprId) -> (ExprId, ExprId) {
        let (ta, tb) = (kb.ty(a).dtype, kb.ty(b).dtype);
        if ta == tb {
            return (a, b);
        }
        let common = if ta.is_float() || tb.is_float() { DType::F32 } else { DType::I32 };
        (kb.cast(a, common), kb.cast(b, common))
    }

    /// Both arms are evaluated, so loads in an arm must stay inside their buffers where the arm is not chosen.
    fn select(&self, kb: &mut KernelBuilder, c: &Scalar, a: &Scalar, b: &Scalar, at: &Place) -> ExprId {
        let cond = self.scalar(kb, c, at);
        if let Some(known) = known(kb, cond) {
            return self.scalar(kb, if known { a } else { b }, at);
        }
        let not = kb.unary(UnOp::Not, cond);
        let then = self.guarded(kb, cond).scalar(kb, a, at);
        let otherwise = self.guarded(kb, not).scalar(kb, b, at);
        let (then, otherwise) = self.same_type(kb, then, otherwise);
        kb.select(cond, then, otherwise)
    }

    /// The same context with `cond` added to the mask.
    fn guarded(&self, kb: &mut KernelBuilder, cond: ExprId) -> Self {
        let cond = if kb.ty(cond).lanes < self.lanes { kb.splat(cond, self.lanes) } else { cond };
        let mask = match self.mask {
            Some(mask) => kb.binary(BinOp::And, mask, cond),
            None => cond,
        };
        Inliner { mask: Some(mask), ..self.clone() }
    }

    fn materialise(&self, kb: &mut KernelBuilder, index: Index) -> ExprId {
        match index {
            Index::Affine { base, stride: 0 } => base,
            Index::Affine { base, stride } => {
                let stride = kb.int(stride);
                kb.ramp(base, stride, self.lanes)
            }
            Index::Vector(e) => e,
        }
    }

    fn index(&self, kb: &mut KernelBuilder, s: &Scalar, at: &Place) -> Index {
        match s {
            Scalar::Axis(i) => at.axes[*i],
            Scalar::Red(var) => {
                let found = at.reds.iter().rev().find(|(v, _)| v == var);
                found.expect("reduction variable in scope").1
            }
            Scalar::Int(i) => Index::scalar(kb.int(*i)),
            Scalar::Dim(d) => Index::scalar(kb.dim(d)),
            Scalar::Binary(op, a, b) => {
                let (a, b) = (self.index(kb, a, at), self.index(kb, b, at));
                self.index_binary(kb, *op, a, b)
            }
            Scalar::Load { .. } => {
                let e = self.scalar(kb, s, at);
                let e = kb.cast(e, DType::I64);
                if kb.ty(e).lanes == 1 { Index::scalar(e) } else { Index::Vector(e) }
            }
            other => panic!("{other:?} is no index"),
        }
    }

    fn index_binary(&self, kb: &mut KernelBuilder, op: BinOp, a: Index, b: Index) -> Index {
        use Index::Affine;
        let lanes = i64::from(self.lanes);
        match (op, a, b) {
            (_, Affine { base: x, stride: 0 }, Affine { base: y, stride: 0 }) => {
                Index::scalar(kb.binary(op, x, y))
            }
            (BinOp::Add, Affine { base: x, stride: s }, Affine { base: y, stride: t }) => {
                Affine { base: kb.add(x, y), stride: s + t }
            }
            (BinOp::Sub, Affine { base: x, stride: s }, Affine { base: y, stride: t }) => {
                Affine { base: kb.sub(x, y), stride: s - t }
            }
            (BinOp::Mul, Affine { base: x, stride: s }, Affine { base: y, stride: 0 })
            | (BinOp::Mul, Affine { base: y, stride: 0 }, Affine { base: x, stride: s })
                if const_of(kb, y).is_some() =>
            {
                let factor = const_of(kb, y).unwrap_or(1);
                Affine { base: kb.mul(x, y), stride: s * factor }
            }
            // All lanes of an aligned vector fall into one block of a multiple of `lanes`.
            (BinOp::Div, Affine { base: x, stride: 1 }, Affine { base: y, stride: 0 })
                if self.aligned && const_of(kb, y).is_some_and(|d| d % lanes == 0) =>
            {
                Index::scalar(kb.div(x, y))
            }
            (BinOp::Rem, Affine { base: x, stride: 1 }, Affine { base: y, stride: 0 })
                if self.aligned && const_of(kb, y).is_some_and(|d| d % lanes == 0) =>
            {
                Index::lanes(kb.rem(x, y))
            }
            (op, a, b) => {
                let (a, b) = (self.materialise(kb, a), self.materialise(kb, b));
                Index::Vector(kb.binary(op, a, b))
            }
        }
    }

    /// One element, or `lanes` of them.
    fn load(
        &self,
        kb: &mut KernelBuilder,
        buf: BufId,
        layout: Option<&Layout>,
        ty: &TensorType,
        index: &[Index],
    ) -> ExprId {
        let value = match layout {
            Some(layout) => self.load_layout(kb, layout, buf, index),
            None => match self.in_bounds(kb, ty, index) {
                Some(index) => {
                    let this = Inliner { mask: None, ..self.clone() };
                    let flat = this.flat(kb, ty, &index);
                    this.load_flat(kb, buf, flat)
                }
                None => {
                    let flat = self.flat(kb, ty, index);
                    self.load_flat(kb, buf, flat)
                }
            },
        };
        match kb.ty(value).dtype {
            DType::F16 | DType::BF16 => kb.cast(value, DType::F32),
            DType::I8 | DType::U8 | DType::I16 | DType::U16 | DType::U32 => kb.cast(value, DType::I32),
            _ => value,
        }
    }

    /// Where a whole vector is read in any case, if all of its lanes are wanted or none: from the first rows where it is not
    /// wanted. A masked load takes as long, and much longer where its address is not mapped.
    fn in_bounds(&self, kb: &mut KernelBuilder, ty: &TensorType, index: &[Index]) -> Option<Vec<Index>> {
        let wanted = uniform(kb, self.mask?)?;
        let (Index::Affine { stride: 1, .. }, leading) = index.split_last()? else { return None };
        let (columns, rows) = ty.dims.split_last()?;
        let whole = columns.as_const().is_some_and(|c| c >= i64::from(self.lanes));
        let some = |d: &Dim| d.as_const().map_or(*d == Dim::sym(Sym::N), |size| size > 0);
        if self.lanes == 1 || !whole || !rows.iter().all(some) {
            return None;
        }
        let zero = kb.int(0);
        let clamped = leading.iter().map(|i| match *i {
            Index::Affine { base, stride: 0 } => Some(Index::scalar(kb.select(wanted, base, zero))),
            _ => None,
        });
        let mut all: Vec<Index> = clamped.collect::<Option<_>>()?;
        all.extend(index.last());
        Some(all)
    }

    fn load_flat(&self, kb: &mut KernelBuilder, buf: BufId, flat: Index) -> ExprId {
        match (flat, self.mask) {
            (Index::Affine { base, stride: 0 }, None) => kb.load(buf, base),
            // One element for all lanes: wanted if any of them wants it.
            (Index::Affine { base, stride: 0 }, Some(mask)) => {
                let cond = match uniform(kb, mask) {
                    Some(cond) => cond,
                    None => kb.reduce_lanes(BinOp::Or, mask),
                };
                kb.load_masked(buf, base, Some(cond))
            }
            (index, mask) => {
                let at = self.materialise(kb, index);
                let mask =
                    mask.map(|m| if kb.ty(m).lanes < self.lanes { kb.splat(m, self.lanes) } else { m });
                kb.load_masked(buf, at, mask)
            }
        }
    }

    fn load_layout(&self, kb: &mut KernelBuilder, layout: &Layout, buf: BufId, index: &[Index]) -> ExprId {
        let (row, col) = match *index {
            [k] => {
                let zero = kb.int(0);
                (Index::scalar(zero), k)
            }
            [row, col] => (row, col),
            _ => panic!("packed parameters have one or two axes"),
        };
        match (row, col) {
            (Index::Affine { base: r, stride: 0 }, Index::Affine { base: c, stride: 0 }) => {
                mlcc_quant::unpack_scalar(kb, layout, buf, r, c)
            }
            _ => panic!("packed parameters are read one element at a time outside of contractions"),
        }
    }

    /// Row-major offset.
    fn flat(&self, kb: &mut KernelBuilder, ty: &TensorType, index: &[Index]) -> Index {
        let zero = kb.int(0);
        let mut flat = Index::scalar(zero);
        for (dim, &i) in ty.dims.iter().zip(index) {
            let size = Index::scalar(kb.dim(dim));
            flat = self.index_binary(kb, BinOp::Mul, flat, size);
            flat = self.index_binary(kb, BinOp::Add, flat, i);
        }
        flat
    }

    /// Opens loops at the current statement; the accumulator is pinned afterwards.
    fn reduce(
        &self,
        kb: &mut KernelBuilder,
        op: RedOp,
        var: u32,
        extent: &Dim,
        body: &Scalar,
        at: &Place,
    ) -> ExprId {
        assert_eq!(self.lanes, 1, "a reduction inside a vector axis");
        let ctx = self;
        let at_index = |kb: &mut KernelBuilder, this: &Inliner, i: Index| {
            let mut reds = at.reds.clone();
            reds.push((var, i));
            this.scalar(kb, body, &Place { inputs: at.inputs, axes: at.axes, reds })
        };
        let lanes = match self.vectorizes(at, body) {
            true => self.reduce_lanes,
            false => 1,
        };
        let dtype = self.scalar_dtype(body, at);
        reduce_loop(kb, op, dtype, extent, lanes, |kb, i, lanes| {
            let this = Inliner { lanes, aligned: true, ..ctx.clone() };
            let this = match (lanes, this.mask) {
                (l, Some(mask)) if l > 1 => Inliner { mask: Some(kb.splat(mask, l)), ..this },
                _ => this,
            };
            let index = if lanes > 1 { Index::lanes(i) } else { Index::scalar(i) };
            at_index(kb, &this, index)
        })
    }

    /// True if the body may be evaluated for several values of the reduction variable at once: no nested reductions,
    /// nothing that is read element by element.
    fn vectorizes(&self, at: &Place, body: &Scalar) -> bool {
        match body {
            Scalar::Reduce { .. } => false,
            Scalar::Axis(_) | Scalar::Red(_) | Scalar::Int(_) | Scalar::Dim(_) | Scalar::Float(_) => true,
            Scalar::Load { arg, index } => {
                index.iter().all(|i| self.vectorizes(at, i)) && self.vectorizable(at.inputs[*arg])
            }
            Scalar::Unary(_, a) | Scalar::Cast(_, a) => self.vectorizes(at, a),
            Scalar::Binary(_, a, b) => self.vectorizes(at, a) && self.vectorizes(at, b),
            Scalar::Select(c, a, b) => [c, a, b].iter().all(|s| self.vectorizes(at, s)),
        }
    }

    /// True if a value may be inlined with a vector axis.
    pub fn vectorizable(&self, v: ValueId) -> bool {
        match self.bindings.get(&v) {
            Some(Binding::Value(_)) => true,
            Some(Binding::Buffer { layout, .. }) => layout.is_none(),
            None => match self.f.def(v) {
                None => false,
                Some(node) => match self.definition(v, node) {
                    Some(scalar) => {
                        !scalar.has_reduction() && node.inputs.iter().all(|&i| self.vectorizable(i))
                    }
                    None => false,
                },
            },
        }
    }

    /// f32 or i32: what an expression evaluates to.
    fn scalar_dtype(&self, s: &Scalar, at: &Place) -> DType {
        match s {
            Scalar::Load { arg, .. } => match self.f.ty(at.inputs[*arg]).dtype {
                d if d.is_int() => DType::I32,
                _ => DType::F32,
            },
            Scalar::Float(_) => DType::F32,
            Scalar::Axis(_) | Scalar::Red(_) | Scalar::Int(_) | Scalar::Dim(_) => DType::I64,
            Scalar::Unary(_, a) => self.scalar_dtype(a, at),
            Scalar::Cast(dtype, _) => *dtype,
            Scalar::Binary(_, a, b) | Scalar::Select(_, a, b) => {
                match (self.scalar_dtype(a, at), self.scalar_dtype(b, at)) {
                    (x, y) if x == y => x,
                    (x, y) if x.is_float() || y.is_float() => DType::F32,
                    _ => DType::I32,
                }
            }
            Scalar::Reduce { body, .. } => self.scalar_dtype(body, at),
        }
    }
}

/// Accumulators of a loop over so many vectors: with one each addition would wait for the one before.
fn chains(kb: &KernelBuilder, vectors: ExprId) -> i64 {
    const_of(kb, vectors).and_then(|v| [4, 2].into_iter().find(|c| v % c == 0)).unwrap_or(1)
}

/// Folds `body(i)` over `0..extent`: a vector loop with a vector accumulator, a scalar loop for the rest, and the lanes
/// of the accumulator at the end. `body` gets the first index and the number of lanes wanted.
pub fn reduce_loop(
    kb: &mut KernelBuilder,
    op: RedOp,
    dtype: DType,
    extent: &Dim,
    lanes: u32,
    mut body: impl FnMut(&mut KernelBuilder, ExprId, u32) -> ExprId,
) -> ExprId {
    let identity = if dtype.is_float() { op.identity() } else { 0.0 };
    let total = kb.dim(extent);
    let zero = kb.int(0);
    let mut part = |kb: &mut KernelBuilder, start: ExprId, count: ExprId, lanes: u32| -> ExprId {
        let chains = if lanes > 1 { chains(kb, count) } else { 1 };
        let ty = Ty::vector(dtype, lanes);
        let initial = kb.constant(identity, ty);
        let mut accs = Vec::new();
        for _ in 0..chains {
            let acc = kb.alloc("acc", dtype, lanes as usize, Space::Local);
            kb.store_vec(acc, zero, initial);
            accs.push(acc);
        }
        let by = kb.int(chains);
        let rounds = kb.div(count, by);
        kb.serial("j", rounds, |kb, j| {
            let step = kb.mul_int(j, chains * i64::from(lanes));
            let first = kb.add(start, step);
            for (c, &acc) in accs.iter().enumerate() {
                let at = kb.add_int(first, c as i64 * i64::from(lanes));
                let value = body(kb, at, lanes);
                let value = if kb.ty(value).lanes < lanes { kb.splat(value, lanes) } else { value };
                let value = kb.cast(value, dtype);
                let old = kb.load_vec(acc, zero, lanes);
                let new = kb.binary(op.bin(), old, value);
                kb.store_vec(acc, zero, new);
            }
        });
        let mut sums: Vec<ExprId> = accs.iter().map(|&acc| kb.load_vec(acc, zero, lanes)).collect();
        while let [a, b, ..] = sums[..] {
            sums.drain(..2);
            sums.push(kb.binary(op.bin(), a, b));
        }
        kb.let_("sum", sums[0])
    };
    if lanes <= 1 {
        return part(kb, zero, total, 1);
    }
    let width = kb.int(i64::from(lanes));
    let blocks = kb.div(total, width);
    let body_end = kb.mul(blocks, width);
    let rest = kb.sub(total, body_end);
    let wide = (const_of(kb, blocks) != Some(0)).then(|| part(kb, zero, blocks, lanes));
    let tail = (const_of(kb, rest) != Some(0)).then(|| part(kb, body_end, rest, 1));
    let wide = wide.map(|w| kb.reduce_lanes(op.bin(), w));
    let result = match (wide, tail) {
        (Some(w), Some(t)) => kb.binary(op.bin(), w, t),
        (Some(r), None) | (None, Some(r)) => r,
        (None, None) => kb.constant(identity, Ty::scalar(dtype)),
    };
    kb.let_("reduced", result)
}

pub(crate) fn const_of(kb: &KernelBuilder, e: ExprId) -> Option<i64> {
    kb.kernel().exprs.as_int(e)
}

/// The one-lane condition behind a mask that is the same in all lanes.
fn uniform(kb: &KernelBuilder, mask: ExprId) -> Option<ExprId> {
    match *kb.expr(mask) {
        Expr::Splat(cond) => Some(cond),
        _ if kb.ty(mask).lanes == 1 => Some(mask),
        _ => None,
    }
}
