//! Builds kernels: typed expression constructors with local simplification, and statements in nested blocks.
//!
//! Constructors panic on type errors, and name the line of their caller: those are bugs in a generator, not
//! in user input.

use crate::dim::{Dim, DimAtom, SizeSymbol};
use crate::instr::InstrId;
use crate::kernel::*;
use crate::types::DType;
use std::collections::BTreeMap;

/// A kernel under construction; statements go to the innermost open block.
pub struct KernelBuilder {
    kernel: Kernel,
    blocks: Vec<Vec<Stmt>>,
    /// Iterations of the loops so far, where they are constant.
    loop_extents: BTreeMap<VarId, i64>,
}

/// A loop whose body is being written; none where one iteration needs no loop.
#[must_use]
pub struct OpenFor(Option<(VarId, ExprId, ForKind)>);

impl KernelBuilder {
    pub fn new(name: impl Into<String>) -> Self {
        KernelBuilder { kernel: Kernel::new(name), blocks: vec![Vec::new()], loop_extents: BTreeMap::new() }
    }
    /// Continues a kernel whose declarations exist and whose body is to be written anew.
    pub fn reopen(kernel: Kernel) -> Self {
        KernelBuilder { kernel, blocks: vec![Vec::new()], loop_extents: BTreeMap::new() }
    }
    pub fn open_block(&mut self) {
        self.blocks.push(Vec::new());
    }
    /// Ends the innermost block and returns its statements instead of adding them to the one around it.
    pub fn close_block(&mut self) -> Vec<Stmt> {
        self.blocks.pop().unwrap_or_default()
    }
    /// Ends the kernel; all blocks must be closed.
    pub fn finish(mut self) -> Kernel {
        assert_eq!(self.blocks.len(), 1, "kernel {} has open blocks", self.kernel.name);
        self.kernel.body = self.blocks.pop().unwrap_or_default();
        self.kernel
    }
    pub fn kernel(&self) -> &Kernel {
        &self.kernel
    }
    pub fn ty(&self, e: ExprId) -> ExprType {
        self.kernel.exprs.ty(e)
    }
    pub fn expr(&self, e: ExprId) -> &Expr {
        self.kernel.exprs.expr(e)
    }

    // ---- declarations

    /// A buffer argument; `len` in elements.
    pub fn param(
        &mut self,
        name: &str,
        dtype: DType,
        len: impl Into<Dim>,
        access: ParamAccess,
        align: u32,
    ) -> BufId {
        let decl =
            BufDecl { name: name.into(), dtype, space: MemorySpace::Global, len: len.into(), access, align };
        self.declare_param(decl)
    }
    /// The same, as another kernel declares it.
    pub fn declare_param(&mut self, decl: BufDecl) -> BufId {
        let buf = self.declare(decl);
        self.kernel.params.push(buf);
        buf
    }
    /// A buffer that the caller allocates itself.
    pub fn declare(&mut self, decl: BufDecl) -> BufId {
        self.kernel.bufs.push(decl)
    }
    /// The run-time value of a symbol, declared as an argument on first use.
    pub fn sym(&mut self, sym: SizeSymbol) -> ExprId {
        let var = match self.kernel.dims.iter().find(|(s, _)| *s == sym) {
            Some((_, var)) => *var,
            None => {
                let var = self.kernel.vars.push(VarDecl { name: sym.name().into(), ty: ExprType::I64 });
                self.kernel.dims.push((sym, var));
                var
            }
        };
        self.var(var)
    }
    /// A size as an i64 expression.
    pub fn dim(&mut self, dim: &Dim) -> ExprId {
        let mut sum = self.int(dim.constant());
        for (atom, coefficient) in dim.terms().to_vec() {
            let value = match atom {
                DimAtom::Sym(s) => self.sym(s),
                DimAtom::FloorDiv(d, by) => {
                    let d = self.dim(&d);
                    let by = self.int(by);
                    self.div(d, by)
                }
                DimAtom::Min(a, b) => {
                    let (a, b) = (self.dim(&a), self.dim(&b));
                    self.min(a, b)
                }
                DimAtom::Max(a, b) => {
                    let (a, b) = (self.dim(&a), self.dim(&b));
                    self.max(a, b)
                }
                DimAtom::Product(factors) => {
                    let mut product = self.int(1);
                    for factor in &factors {
                        let factor = self.dim(factor);
                        product = self.mul(product, factor);
                    }
                    product
                }
            };
            let c = self.int(coefficient);
            let term = self.mul(value, c);
            sum = self.add(sum, term);
        }
        sum
    }
    /// Allocates a buffer of constant length in the current block.
    pub fn alloc(&mut self, name: &str, dtype: DType, len: usize, space: MemorySpace) -> BufId {
        let decl = BufDecl {
            name: name.into(),
            dtype,
            space,
            len: Dim::from(len),
            access: ParamAccess::InOut,
            align: 64,
        };
        let buf = self.kernel.bufs.push(decl);
        self.push(Stmt::Alloc { buf });
        buf
    }
    /// A variable that the caller assigns with `For` or `Let` itself.
    pub fn new_var(&mut self, name: &str, ty: ExprType) -> VarId {
        self.kernel.vars.push(VarDecl { name: name.into(), ty })
    }

    // ---- statements

    pub fn push(&mut self, stmt: Stmt) {
        self.blocks.last_mut().expect("a block is open").push(stmt);
    }
    /// `for name in 0..extent { body }`; an `extent` of constant 0 emits nothing, of constant 1 no loop
    /// (except GPU axes and `Par`).
    pub fn for_(&mut self, name: &str, extent: ExprId, kind: ForKind, body: impl FnOnce(&mut Self, ExprId)) {
        let Some((open, value)) = self.begin_for(name, extent, kind) else { return };
        body(self, value);
        self.end_for(open);
    }
    /// Begins what [`KernelBuilder::for_`] does; gives the number of the iteration, or `None` where there is
    /// nothing to emit.
    pub fn begin_for(&mut self, name: &str, extent: ExprId, kind: ForKind) -> Option<(OpenFor, ExprId)> {
        let plain = matches!(kind, ForKind::Serial | ForKind::Unroll);
        match self.kernel.exprs.as_int(extent) {
            Some(0) if plain => return None,
            Some(1) if plain => return Some((OpenFor(None), self.int(0))),
            _ => {}
        }
        let var = self.new_var(name, ExprType::I64);
        self.loop_extents.extend(self.kernel.exprs.as_int(extent).map(|turns| (var, turns)));
        let value = self.var(var);
        self.open_block();
        Some((OpenFor(Some((var, extent, kind))), value))
    }
    pub fn end_for(&mut self, open: OpenFor) {
        if let OpenFor(Some((var, extent, kind))) = open {
            let body = self.close_block();
            self.push(Stmt::For { var, extent, kind, body });
        }
    }
    /// Iterations of the loop that counts with `var`, where they are constant.
    pub fn loop_extent(&self, var: VarId) -> Option<i64> {
        self.loop_extents.get(&var).copied()
    }
    pub fn serial(&mut self, name: &str, extent: ExprId, body: impl FnOnce(&mut Self, ExprId)) {
        self.for_(name, extent, ForKind::Serial, body);
    }
    pub fn par(&mut self, name: &str, extent: ExprId, body: impl FnOnce(&mut Self, ExprId)) {
        self.for_(name, extent, ForKind::Par, body);
    }
    pub fn if_(&mut self, cond: ExprId, then: impl FnOnce(&mut Self)) {
        self.if_else(cond, then, |_| {});
    }
    pub fn if_else(&mut self, cond: ExprId, then: impl FnOnce(&mut Self), otherwise: impl FnOnce(&mut Self)) {
        self.open_block();
        then(self);
        let then = self.close_block();
        self.open_block();
        otherwise(self);
        let otherwise = self.close_block();
        self.push(Stmt::If { cond, then, otherwise });
    }
    /// Pins the value of an expression here.
    pub fn let_(&mut self, name: &str, value: ExprId) -> ExprId {
        if matches!(self.expr(value), Expr::Const(_) | Expr::Var(_)) {
            return value;
        }
        let var = self.new_var(name, self.ty(value));
        self.push(Stmt::Let { var, value });
        self.var(var)
    }
    #[track_caller]
    pub fn store(&mut self, buf: BufId, index: ExprId, value: ExprId) {
        self.store_masked(buf, index, value, None);
    }
    #[track_caller]
    pub fn store_masked(&mut self, buf: BufId, index: ExprId, value: ExprId, mask: Option<ExprId>) {
        let (ti, tv, elem) = (self.ty(index), self.ty(value), self.kernel.bufs[buf].dtype);
        assert!(ti.dtype == DType::I64 && ti.lanes == tv.lanes, "store index {ti} for value {tv}");
        assert_eq!(tv.dtype, elem, "store into {}", self.kernel.bufs[buf].name);
        self.push(Stmt::Store { buf, index, value, mask });
    }
    pub fn barrier(&mut self) {
        self.push(Stmt::Barrier);
    }
    /// A statement that copies from `from` on in global memory to `to` on in shared memory; see
    /// [`crate::instr::InstrSemantics::Copy`].
    #[track_caller]
    pub fn async_copy(&mut self, instr: InstrId, (to, at): (BufId, ExprId), (from, source): (BufId, ExprId)) {
        let args = vec![self.load(to, at), self.load(from, source)];
        let types: Vec<ExprType> = args.iter().map(|&a| self.ty(a)).collect();
        assert_eq!(types, instr.def().args, "arguments of {}", instr.def().name);
        self.push(Stmt::Instr { instr, args });
    }

    // ---- expressions

    pub fn intern(&mut self, expr: Expr, ty: ExprType) -> ExprId {
        self.kernel.exprs.intern(expr, ty)
    }
    pub fn int(&mut self, value: i64) -> ExprId {
        self.intern(Expr::Const(Literal::Int(value)), ExprType::I64)
    }
    #[track_caller]
    pub fn int_of(&mut self, value: i64, dtype: DType) -> ExprId {
        assert!(dtype.is_int() || dtype == DType::Bool, "integer literal of {dtype}");
        self.intern(Expr::Const(Literal::Int(value)), ExprType::scalar(dtype))
    }
    pub fn float(&mut self, value: f64) -> ExprId {
        self.float_of(value, DType::F32)
    }
    #[track_caller]
    pub fn float_of(&mut self, value: f64, dtype: DType) -> ExprId {
        assert!(dtype.is_float(), "float literal of {dtype}");
        self.intern(Expr::Const(Literal::Float(value.to_bits())), ExprType::scalar(dtype))
    }
    /// A literal of any type, splatted to `ty.lanes`.
    #[track_caller]
    pub fn constant(&mut self, value: f64, ty: ExprType) -> ExprId {
        let scalar = if ty.dtype.is_float() {
            self.float_of(value, ty.dtype)
        } else {
            self.int_of(value as i64, ty.dtype)
        };
        self.splat(scalar, ty.lanes)
    }
    pub fn var(&mut self, var: VarId) -> ExprId {
        let ty = self.kernel.vars[var].ty;
        self.intern(Expr::Var(var), ty)
    }
    #[track_caller]
    pub fn load(&mut self, buf: BufId, index: ExprId) -> ExprId {
        self.load_masked(buf, index, None)
    }
    #[track_caller]
    pub fn load_masked(&mut self, buf: BufId, index: ExprId, mask: Option<ExprId>) -> ExprId {
        let ti = self.ty(index);
        assert_eq!(ti.dtype, DType::I64, "load index of {}", self.kernel.bufs[buf].name);
        let ty = ExprType::vector(self.kernel.bufs[buf].dtype, ti.lanes);
        self.intern(Expr::Load { buf, index, mask }, ty)
    }
    /// `lanes` consecutive elements from `base`.
    #[track_caller]
    pub fn load_vec(&mut self, buf: BufId, base: ExprId, lanes: u32) -> ExprId {
        let index = self.ramp1(base, lanes);
        self.load(buf, index)
    }
    /// Stores consecutive elements from `base`.
    #[track_caller]
    pub fn store_vec(&mut self, buf: BufId, base: ExprId, value: ExprId) {
        let index = self.ramp1(base, self.ty(value).lanes);
        self.store(buf, index, value);
    }
    /// `ramp(base, 1, lanes)`, or `base` itself for one lane.
    #[track_caller]
    pub fn ramp1(&mut self, base: ExprId, lanes: u32) -> ExprId {
        let one = self.int(1);
        self.ramp(base, one, lanes)
    }
    #[track_caller]
    pub fn ramp(&mut self, base: ExprId, stride: ExprId, lanes: u32) -> ExprId {
        let ty = self.ty(base);
        assert!(ty.lanes == 1 && ty.dtype.is_int() && self.ty(stride) == ty, "ramp of {ty}");
        match lanes {
            1 => base,
            _ => self.intern(Expr::Ramp { base, stride }, ExprType::vector(ty.dtype, lanes)),
        }
    }
    #[track_caller]
    pub fn splat(&mut self, value: ExprId, lanes: u32) -> ExprId {
        let ty = self.ty(value);
        assert_eq!(ty.lanes, 1, "splat of a vector");
        match lanes {
            1 => value,
            _ => self.intern(Expr::Splat(value), ExprType::vector(ty.dtype, lanes)),
        }
    }
    pub fn unary(&mut self, op: UnOp, a: ExprId) -> ExprId {
        let ty = self.ty(a);
        self.intern(Expr::Unary(op, a), ty)
    }
    /// Both operands of one type, or one of them with one lane, which is splatted.
    #[track_caller]
    pub fn binary(&mut self, op: BinOp, a: ExprId, b: ExprId) -> ExprId {
        let (a, b) = self.same_lanes(a, b);
        let (ta, tb) = (self.ty(a), self.ty(b));
        assert_eq!(ta, tb, "operands of {}", op.name());
        if let Some(simple) = self.simplify(op, a, b) {
            return simple;
        }
        let ty = if op.is_comparison() { ExprType::vector(DType::Bool, ta.lanes) } else { ta };
        self.intern(Expr::Binary(op, a, b), ty)
    }
    #[track_caller]
    fn same_lanes(&mut self, a: ExprId, b: ExprId) -> (ExprId, ExprId) {
        match (self.ty(a).lanes, self.ty(b).lanes) {
            (x, y) if x == y => (a, b),
            (1, y) => (self.splat(a, y), b),
            (x, 1) => (a, self.splat(b, x)),
            (x, y) => panic!("operands with {x} and {y} lanes"),
        }
    }
    /// Folds integer index arithmetic: constants, `x+0`, `x*1`, `x*0`, `(x+c)+d`.
    fn simplify(&mut self, op: BinOp, a: ExprId, b: ExprId) -> Option<ExprId> {
        let ty = self.ty(a);
        if ty.lanes != 1 || ty.dtype != DType::I64 {
            return None;
        }
        let (ca, cb) = (self.kernel.exprs.as_int(a), self.kernel.exprs.as_int(b));
        match (op, ca, cb) {
            (BinOp::Add, Some(x), Some(y)) => Some(self.int(x.wrapping_add(y))),
            (BinOp::Sub, Some(x), Some(y)) => Some(self.int(x.wrapping_sub(y))),
            (BinOp::Mul, Some(x), Some(y)) => Some(self.int(x.wrapping_mul(y))),
            (BinOp::Div, Some(x), Some(y)) if y > 0 => Some(self.int(x / y)),
            (BinOp::Rem, Some(x), Some(y)) if y > 0 => Some(self.int(x % y)),
            (BinOp::Min, Some(x), Some(y)) => Some(self.int(x.min(y))),
            (BinOp::Max, Some(x), Some(y)) => Some(self.int(x.max(y))),
            (BinOp::Add, Some(0), _) | (BinOp::Mul, Some(1), _) => Some(b),
            (BinOp::Add | BinOp::Sub, _, Some(0)) | (BinOp::Mul | BinOp::Div, _, Some(1)) => Some(a),
            (BinOp::Mul, Some(0), _) | (BinOp::Mul, _, Some(0)) | (BinOp::Rem, _, Some(1)) => {
                Some(self.int(0))
            }
            (BinOp::Add, _, Some(y)) => match *self.expr(a) {
                Expr::Binary(BinOp::Add, x, c) => {
                    let c = self.kernel.exprs.as_int(c)?;
                    let sum = self.int(c.wrapping_add(y));
                    Some(self.binary(BinOp::Add, x, sum))
                }
                _ => None,
            },
            (BinOp::Add, Some(_), None) => Some(self.binary(BinOp::Add, b, a)),
            _ => None,
        }
    }
    #[track_caller]
    pub fn add(&mut self, a: ExprId, b: ExprId) -> ExprId {
        self.binary(BinOp::Add, a, b)
    }
    #[track_caller]
    pub fn sub(&mut self, a: ExprId, b: ExprId) -> ExprId {
        self.binary(BinOp::Sub, a, b)
    }
    #[track_caller]
    pub fn mul(&mut self, a: ExprId, b: ExprId) -> ExprId {
        self.binary(BinOp::Mul, a, b)
    }
    #[track_caller]
    pub fn div(&mut self, a: ExprId, b: ExprId) -> ExprId {
        self.binary(BinOp::Div, a, b)
    }
    #[track_caller]
    pub fn rem(&mut self, a: ExprId, b: ExprId) -> ExprId {
        self.binary(BinOp::Rem, a, b)
    }
    #[track_caller]
    pub fn min(&mut self, a: ExprId, b: ExprId) -> ExprId {
        self.binary(BinOp::Min, a, b)
    }
    #[track_caller]
    pub fn max(&mut self, a: ExprId, b: ExprId) -> ExprId {
        self.binary(BinOp::Max, a, b)
    }
    #[track_caller]
    pub fn lt(&mut self, a: ExprId, b: ExprId) -> ExprId {
        self.binary(BinOp::Lt, a, b)
    }
    /// `a + c` for an i64 index.
    pub fn add_int(&mut self, a: ExprId, c: i64) -> ExprId {
        let c = self.int(c);
        self.add(a, c)
    }
    /// `a * c` for an i64 index.
    pub fn mul_int(&mut self, a: ExprId, c: i64) -> ExprId {
        let c = self.int(c);
        self.mul(a, c)
    }
    #[track_caller]
    pub fn fma(&mut self, a: ExprId, b: ExprId, c: ExprId) -> ExprId {
        let (a, b) = self.same_lanes(a, b);
        let (a, c) = self.same_lanes(a, c);
        let (b, c) = self.same_lanes(b, c);
        let ty = self.ty(c);
        assert!(self.ty(a) == ty && self.ty(b) == ty && ty.dtype.is_float(), "operands of fma");
        self.intern(Expr::Fma(a, b, c), ty)
    }
    pub fn cast(&mut self, a: ExprId, dtype: DType) -> ExprId {
        let ty = self.ty(a);
        if ty.dtype == dtype {
            return a;
        }
        self.intern(Expr::Cast(a), ExprType::vector(dtype, ty.lanes))
    }
    #[track_caller]
    pub fn bitcast(&mut self, a: ExprId, to: ExprType) -> ExprId {
        let from = self.ty(a);
        let bits = |t: ExprType| t.dtype.bytes().map(|b| b * t.lanes as usize);
        assert_eq!(bits(from), bits(to), "bitcast of {from} to {to}");
        if from == to { a } else { self.intern(Expr::Bitcast(a), to) }
    }
    #[track_caller]
    pub fn select(&mut self, cond: ExprId, a: ExprId, b: ExprId) -> ExprId {
        let (a, b) = self.same_lanes(a, b);
        let cond = if self.ty(cond).lanes == 1 { self.splat(cond, self.ty(a).lanes) } else { cond };
        let (a, _) = self.same_lanes(a, cond);
        let (b, _) = self.same_lanes(b, cond);
        let ty = self.ty(a);
        assert!(self.ty(b) == ty && self.ty(cond).dtype == DType::Bool, "operands of select");
        self.intern(Expr::Select(cond, a, b), ty)
    }
    #[track_caller]
    pub fn shuffle(&mut self, a: ExprId, b: Option<ExprId>, lanes: Vec<u32>) -> ExprId {
        let ty = self.ty(a);
        let available = ty.lanes * if b.is_some() { 2 } else { 1 };
        assert!(lanes.iter().all(|&l| l < available) && b.is_none_or(|b| self.ty(b) == ty), "shuffle lanes");
        let out = ExprType::vector(ty.dtype, lanes.len() as u32);
        self.intern(Expr::Shuffle { a, b, lanes }, out)
    }
    #[track_caller]
    pub fn instr(&mut self, instr: InstrId, args: Vec<ExprId>) -> ExprId {
        let def = instr.def();
        let types: Vec<ExprType> = args.iter().map(|&a| self.ty(a)).collect();
        assert_eq!(types, def.args, "arguments of {}", def.name);
        let ret = def.ret.expect("instr with a result");
        self.intern(Expr::Instr(instr, args), ret)
    }
    /// Folds the lanes of a vector with `op`: upper half onto lower half until one lane is left (this order
    /// is the definition, so every executor rounds alike). Lanes must be a power of two.
    #[track_caller]
    pub fn reduce_lanes(&mut self, op: BinOp, a: ExprId) -> ExprId {
        let mut value = a;
        let mut lanes = self.ty(a).lanes;
        assert!(lanes.is_power_of_two(), "reduce over {lanes} lanes");
        while lanes > 1 {
            lanes /= 2;
            let low = self.shuffle(value, None, (0..lanes).collect());
            let high = self.shuffle(value, None, (lanes..2 * lanes).collect());
            value = self.binary(op, low, high);
        }
        value
    }
}
