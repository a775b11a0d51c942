//! Turns compute definitions into kernel expressions: the value of an SSA value at given indices, with
//! everything that is not bound to a buffer or an expression inlined from its definition.
//!
//! One axis may be a vector: its index is `base + stride * lane`. Addresses that stay of this form become
//! contiguous (stride 1) or broadcast (stride 0) accesses; everything else becomes a gather.

mod codes;
mod index;
pub(crate) mod known;
mod paged;
mod reduce;
mod store;

use index::VectorAxis;
use known::known_condition;
use mlcc_ir::compute::ScalarExpr;
use mlcc_ir::dim::{Dim, SizeSymbol};
use mlcc_ir::graph::{Function, GraphNode, ValueDef, ValueId};
use mlcc_ir::kernel::{BinOp, BufId, Expr, UnOp};
use mlcc_ir::ops::OpSemantics;
use mlcc_ir::types::{DType, TensorType};
use mlcc_kernel_lang::{Recorder, Val};
use mlcc_quant::TensorLayout;
use std::collections::HashMap;

pub use index::LaneIndex;
pub use paged::{CachePage, PagedBuffer};
pub use reduce::reduce_loop;
pub(crate) use store::{RowAt, store_all};

/// The location of a value of the function while its kernel runs.
#[allow(clippy::large_enum_variant, reason = "most bindings are buffers")]
#[derive(Clone)]
pub enum Binding<'k> {
    /// A buffer in memory, row-major with the dims of its type (or in the layout of a packed or re-packed
    /// parameter; or in pages).
    Buffer { buf: BufId, layout: Option<TensorLayout>, pages: Option<PagedBuffer> },
    /// Known at the current position, whatever the indices (an accumulator, a row's reduction).
    Value(Val<'k>),
}

/// The state of inlining at one place of a kernel.
#[derive(Clone)]
pub struct Inliner<'f, 'k> {
    pub f: &'f Function,
    pub bindings: HashMap<ValueId, Binding<'k>>,
    /// Lanes of the vector axis; 1 if there is none.
    pub lanes: u32,
    /// Lanes that may touch memory; `None` is all.
    pub mask: Option<Val<'k>>,
    /// True if the base of the vector axis is a multiple of `lanes`.
    pub aligned: bool,
    /// Widest vector for reductions that are opened while `lanes` is 1.
    pub reduce_lanes: u32,
    /// The page of all rows of caches that are read, where it is known.
    pub page: Option<CachePage<'k>>,
}

/// The meaning of the indices of a scalar expression.
struct ScalarIndices<'p, 'k> {
    inputs: &'p [ValueId],
    axes: &'p [LaneIndex<'k>],
    reds: Vec<(u32, LaneIndex<'k>)>,
}

impl<'f, 'k> Inliner<'f, 'k> {
    /// An inliner without a vector axis; only `bindings` are bound.
    pub fn new(f: &'f Function, bindings: HashMap<ValueId, Binding<'k>>) -> Inliner<'f, 'k> {
        Inliner { f, bindings, lanes: 1, mask: None, aligned: false, reduce_lanes: 1, page: None }
    }

    /// The same with a vector axis of `lanes` lanes, whose base is a multiple of that.
    pub fn with_lanes(&self, lanes: u32) -> Inliner<'f, 'k> {
        Inliner { lanes, aligned: true, ..self.clone() }
    }

    /// The same for one element, wherever it is.
    pub fn of_one(&self) -> Inliner<'f, 'k> {
        Inliner { lanes: 1, mask: None, aligned: false, ..self.clone() }
    }

    /// The pages of a value that is a cache in pages.
    pub fn pages_of(&self, v: ValueId) -> Option<PagedBuffer> {
        match self.bindings.get(&v)? {
            Binding::Buffer { pages, .. } => *pages,
            Binding::Value(_) => None,
        }
    }

    /// The value at `index` (one entry per axis of its type), with 1 or `lanes` lanes.
    /// Integers come as i32 (i64 stays), floats as f32.
    pub fn value(&self, k: &'k Recorder, v: ValueId, index: &[LaneIndex<'k>]) -> Val<'k> {
        match self.bindings.get(&v) {
            Some(Binding::Value(value)) => *value,
            Some(Binding::Buffer { buf, layout, pages }) => {
                widened(self.load(k, *buf, (layout.as_ref(), *pages), self.f.ty(v), index))
            }
            None => {
                let node = self.f.defining_node(v).expect("inputs of a group are bound");
                if let Some(code) = self.code(k, node, index) {
                    return code;
                }
                let Some(scalar) = self.definition(v, node) else {
                    panic!("{} reached lowering; `decompose` has to run before", node.op.name());
                };
                self.scalar(
                    k,
                    &scalar,
                    &ScalarIndices { inputs: &node.inputs, axes: index, reds: Vec::new() },
                )
            }
        }
    }

    /// The compute definition of a value, if its node has one.
    fn definition(&self, v: ValueId, node: &GraphNode) -> Option<ScalarExpr> {
        let ValueDef::Node(_, output) = self.f.values[v].def else { return None };
        let types: Vec<&TensorType> = node.inputs.iter().map(|&i| self.f.ty(i)).collect();
        match node.op.semantics(&types) {
            OpSemantics::Compute(mut scalars) => Some(scalars.swap_remove(output as usize)),
            OpSemantics::Decompose | OpSemantics::Structural => None,
        }
    }

    // ---- expressions

    fn scalar(&self, k: &'k Recorder, s: &ScalarExpr, at: &ScalarIndices<'_, 'k>) -> Val<'k> {
        match s {
            ScalarExpr::Axis(_) | ScalarExpr::Red(_) | ScalarExpr::Dim(_) | ScalarExpr::Int(_) => {
                self.index(k, s, at).val(self.lanes)
            }
            ScalarExpr::Float(value) => k.float(*value),
            ScalarExpr::Load { arg, index } => {
                let index: Vec<LaneIndex> = index.iter().map(|i| self.index(k, i, at)).collect();
                self.value(k, at.inputs[*arg], &index)
            }
            ScalarExpr::Unary(op, a) => self.scalar(k, a, at).unary(*op),
            ScalarExpr::Binary(op, a, b) => {
                let (a, b) = same_type(self.scalar(k, a, at), self.scalar(k, b, at));
                a.binary(*op, b)
            }
            ScalarExpr::Select(c, a, b) => self.select(k, c, a, b, at),
            ScalarExpr::Cast(dtype, a) => match **a {
                // Arithmetic of integers stays in integers.
                ScalarExpr::Float(value) if *dtype == DType::I64 => k.int(value as i64),
                ScalarExpr::Float(value) if dtype.is_int() => k.int32(value as i64),
                _ => self.scalar(k, a, at).cast(*dtype),
            },
            ScalarExpr::Reduce { op, var, extent, body } => self.reduce(k, (*op, *var), extent, body, at),
        }
    }

    /// Both arms are evaluated, so loads in an arm must stay inside their buffers where the arm is not
    /// chosen.
    fn select(
        &self,
        k: &'k Recorder,
        c: &ScalarExpr,
        a: &ScalarExpr,
        b: &ScalarExpr,
        at: &ScalarIndices<'_, 'k>,
    ) -> Val<'k> {
        let cond = self.scalar(k, c, at);
        if let Some(known) = known_condition(cond) {
            return self.scalar(k, if known { a } else { b }, at);
        }
        let not = cond.unary(UnOp::Not);
        let then = self.guarded(cond).scalar(k, a, at);
        let otherwise = self.guarded(not).scalar(k, b, at);
        let (then, otherwise) = same_type(then, otherwise);
        cond.select(then, otherwise)
    }

    /// The same context with `cond` added to the mask.
    fn guarded(&self, cond: Val<'k>) -> Self {
        let cond = cond.to_lanes(self.lanes);
        let mask = self.mask.map_or(cond, |mask| mask & cond);
        Inliner { mask: Some(mask), ..self.clone() }
    }

    fn index(&self, k: &'k Recorder, s: &ScalarExpr, at: &ScalarIndices<'_, 'k>) -> LaneIndex<'k> {
        match s {
            ScalarExpr::Axis(i) => at.axes[*i],
            ScalarExpr::Red(var) => {
                let found = at.reds.iter().rev().find(|(v, _)| v == var);
                found.expect("reduction variable in scope").1
            }
            ScalarExpr::Int(i) => LaneIndex::scalar(k.int(*i)),
            ScalarExpr::Dim(d) => LaneIndex::scalar(k.dim(d)),
            ScalarExpr::Binary(op, a, b) => {
                self.axis().combine(*op, self.index(k, a, at), self.index(k, b, at))
            }
            ScalarExpr::Load { .. } => {
                let loaded = self.scalar(k, s, at).cast(DType::I64);
                if loaded.lanes() == 1 { LaneIndex::scalar(loaded) } else { LaneIndex::Vector(loaded) }
            }
            other => panic!("{other:?} is no index"),
        }
    }

    fn axis(&self) -> VectorAxis {
        VectorAxis { lanes: self.lanes, aligned: self.aligned }
    }

    // ---- loads

    /// One element, or `lanes` of them.
    fn load(
        &self,
        k: &'k Recorder,
        buf: BufId,
        (layout, pages): (Option<&TensorLayout>, Option<PagedBuffer>),
        ty: &TensorType,
        index: &[LaneIndex<'k>],
    ) -> Val<'k> {
        if let Some(layout) = layout {
            return load_packed(k, layout, buf, index);
        }
        match self.in_bounds(k, ty, index) {
            Some(index) => {
                let unmasked = Inliner { mask: None, ..self.clone() };
                unmasked.load_flat(k, buf, unmasked.place(k, pages, ty, &index))
            }
            None => self.load_flat(k, buf, self.place(k, pages, ty, index)),
        }
    }

    /// The indices of a whole vector that is read in any case, if all of its lanes are needed or none: the
    /// first rows where it is not needed. A masked load takes as long, and much longer where its address is
    /// not mapped.
    fn in_bounds(
        &self,
        k: &'k Recorder,
        ty: &TensorType,
        index: &[LaneIndex<'k>],
    ) -> Option<Vec<LaneIndex<'k>>> {
        let wanted = uniform(self.mask?)?;
        let (LaneIndex::Affine { stride: 1, .. }, leading) = index.split_last()? else { return None };
        let (columns, rows) = ty.dims.split_last()?;
        let whole = columns.as_const().is_some_and(|c| c >= i64::from(self.lanes));
        let some = |d: &Dim| d.as_const().map_or(*d == Dim::sym(SizeSymbol::N), |size| size > 0);
        if self.lanes == 1 || !whole || !rows.iter().all(some) {
            return None;
        }
        let zero = k.int(0);
        let clamped = leading.iter().map(|i| match *i {
            LaneIndex::Affine { base, stride: 0 } => Some(LaneIndex::scalar(wanted.select(base, zero))),
            _ => None,
        });
        let mut all: Vec<LaneIndex> = clamped.collect::<Option<_>>()?;
        all.extend(index.last());
        Some(all)
    }

    fn load_flat(&self, k: &'k Recorder, buf: BufId, flat: LaneIndex<'k>) -> Val<'k> {
        let buf = k.flat(buf);
        match (flat, self.mask) {
            // One element for all lanes: needed if any of them needs it.
            (LaneIndex::Affine { base, stride: 0 }, Some(mask)) => {
                let any = uniform(mask).unwrap_or_else(|| mask.reduce_lanes(BinOp::Or));
                buf.at_where(any, [base])
            }
            (index, Some(mask)) => {
                let at = index.val(self.lanes);
                buf.at_where(mask.to_lanes(self.lanes), [at])
            }
            (index, None) => buf.at([index.val(self.lanes)]),
        }
    }

    /// Elements before the one at `index`.
    fn place(
        &self,
        k: &'k Recorder,
        pages: Option<PagedBuffer>,
        ty: &TensorType,
        index: &[LaneIndex<'k>],
    ) -> LaneIndex<'k> {
        let flat = self.flat(k, ty, index);
        pages.map_or(flat, |pages| self.in_page(k, (pages, ty), index, flat))
    }

    /// Row-major offset.
    fn flat(&self, k: &'k Recorder, ty: &TensorType, index: &[LaneIndex<'k>]) -> LaneIndex<'k> {
        self.axis().flat(k, ty.dims.iter().map(|dim| k.dim(dim)), index)
    }

    /// True if a value may be inlined with a vector axis.
    pub fn vectorizable(&self, v: ValueId) -> bool {
        match self.bindings.get(&v) {
            Some(Binding::Value(_)) => true,
            Some(Binding::Buffer { layout, .. }) => layout.is_none(),
            None => match self.f.defining_node(v) {
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
}

/// Small types in the one that arithmetic has for them.
fn widened(value: Val) -> Val {
    match value.ty().dtype {
        DType::F16 | DType::BF16 => value.cast(DType::F32),
        DType::I8 | DType::U8 | DType::I16 | DType::U16 | DType::U32 => value.cast(DType::I32),
        _ => value,
    }
}

/// Integers and floats in one arithmetic op meet in f32, different integers in i32.
fn same_type<'k>(a: Val<'k>, b: Val<'k>) -> (Val<'k>, Val<'k>) {
    let (ta, tb) = (a.ty().dtype, b.ty().dtype);
    if ta == tb {
        return (a, b);
    }
    let common = if ta.is_float() || tb.is_float() { DType::F32 } else { DType::I32 };
    (a.cast(common), b.cast(common))
}

fn load_packed<'k>(k: &'k Recorder, layout: &TensorLayout, buf: BufId, index: &[LaneIndex<'k>]) -> Val<'k> {
    let (row, col) = match *index {
        [col] => (LaneIndex::scalar(k.int(0)), col),
        [row, col] => (row, col),
        _ => panic!("packed parameters have one or two axes"),
    };
    match (row, col) {
        (LaneIndex::Affine { base: row, stride: 0 }, LaneIndex::Affine { base: col, stride: 0 }) => {
            k.val(k.builder(|kb| mlcc_quant::unpack_scalar(kb, layout, buf, row.id(), col.id())))
        }
        _ => panic!("packed parameters are read one element at a time outside of contractions"),
    }
}

/// The one-lane condition of a mask that is the same in all lanes.
fn uniform(mask: Val) -> Option<Val> {
    let k = mask.recorder();
    match k.builder(|kb| kb.expr(mask.id()).clone()) {
        Expr::Splat(cond) => Some(k.val(cond)),
        _ if mask.lanes() == 1 => Some(mask),
        _ => None,
    }
}
