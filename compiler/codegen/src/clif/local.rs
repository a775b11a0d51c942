//! Finds the `Local` buffers that can live in registers, and the pieces that they are split into.
//!
//! A buffer qualifies if every index into it is a constant once the unrolled loops around are unrolled. Its
//! pieces are 128-bit vectors if every access is a contiguous, aligned run of whole vectors, else single
//! elements. The test is structural and errs towards the stack, which is always right.

use super::isa::CraneliftIsa;
use super::value::{scalar_type, vector_of};
use cranelift_codegen::ir::{Type, types};
use mlcc_ir::kernel::{BinOp, BufId, Expr, ExprId, ForKind, Kernel, Stmt, VarId};
use mlcc_ir::types::DType;
use rustc_hash::FxHashSet;

/// More elements than this stay on the stack: registers would be spilled anyway.
const MAX_BYTES: usize = 4096;

/// The pieces a buffer is cut into.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct RegisterPromotion {
    /// Type of one piece.
    pub part: Type,
    /// Elements in one piece.
    pub lanes: u32,
}

/// Pieces for `buf`, or `None` if it needs memory.
pub(super) fn plan_promotion(
    kernel: &Kernel,
    buf: BufId,
    machine: &CraneliftIsa,
) -> Option<RegisterPromotion> {
    let decl = &kernel.bufs[buf];
    let lane = scalar_type(decl.dtype)?;
    let len = usize::try_from(decl.len.as_const()?).ok()?;
    if len * lane.bytes() as usize > MAX_BYTES {
        return None;
    }
    let mut scan = AccessScan {
        kernel,
        buf,
        constants: FxHashSet::default(),
        seen: FxHashSet::default(),
        accesses: Vec::new(),
    };
    scan.stmts(&kernel.body);
    if !scan.accesses.iter().all(|&index| scan.constant(index)) {
        return None;
    }
    let wide = (16 / lane.bytes()) as i64;
    let vectors = machine.simd && lane != types::I64 && decl.dtype != DType::Bool;
    let whole = |&index: &ExprId| {
        let lanes = i64::from(kernel.ty(index).lanes);
        lanes % wide == 0 && scan.run(index).is_some_and(|base| scan.is_multiple(base, wide))
    };
    if vectors && len as i64 % wide == 0 && scan.accesses.iter().all(whole) {
        Some(RegisterPromotion { part: vector_of(lane), lanes: wide as u32 })
    } else {
        Some(RegisterPromotion { part: lane, lanes: 1 })
    }
}

struct AccessScan<'k> {
    kernel: &'k Kernel,
    buf: BufId,
    /// Variables of unrolled loops.
    constants: FxHashSet<VarId>,
    seen: FxHashSet<ExprId>,
    /// Every index into the buffer.
    accesses: Vec<ExprId>,
}

impl AccessScan<'_> {
    fn stmts(&mut self, body: &[Stmt]) {
        for stmt in body {
            match stmt {
                Stmt::For { var, extent, kind, body } => {
                    if *kind == ForKind::Unroll {
                        self.constants.insert(*var);
                    }
                    self.expr(*extent);
                    self.stmts(body);
                }
                Stmt::If { cond, then, otherwise } => {
                    self.expr(*cond);
                    self.stmts(then);
                    self.stmts(otherwise);
                }
                Stmt::Let { value, .. } => self.expr(*value),
                Stmt::Store { buf, index, value, mask } => {
                    if *buf == self.buf {
                        self.accesses.push(*index);
                    }
                    self.expr(*index);
                    self.expr(*value);
                    mask.iter().for_each(|m| self.expr(*m));
                }
                Stmt::Instr { args, .. } => args.iter().for_each(|a| self.expr(*a)),
                Stmt::Alloc { .. } | Stmt::Barrier | Stmt::Commit | Stmt::Wait { .. } => {}
            }
        }
    }

    fn expr(&mut self, id: ExprId) {
        if !self.seen.insert(id) {
            return;
        }
        let expr = self.kernel.exprs.expr(id);
        if let Expr::Load { buf, index, .. } = expr
            && *buf == self.buf
        {
            self.accesses.push(*index);
        }
        expr.for_each_child(|child| self.expr(child));
    }

    /// True if the emitter will know the value (each lane of it, for a ramp).
    fn constant(&self, id: ExprId) -> bool {
        match self.kernel.exprs.expr(id) {
            Expr::Const(_) => true,
            Expr::Var(var) => self.constants.contains(var),
            Expr::Binary(op, a, b) => is_foldable(*op) && self.constant(*a) && self.constant(*b),
            Expr::Ramp { base, stride } => self.constant(*base) && self.constant(*stride),
            _ => false,
        }
    }

    /// The start of a run of consecutive elements.
    fn run(&self, id: ExprId) -> Option<ExprId> {
        match self.kernel.exprs.expr(id) {
            Expr::Ramp { base, stride } if self.kernel.exprs.as_int(*stride) == Some(1) => Some(*base),
            _ => None,
        }
    }

    /// True if the value is surely a multiple of `of`.
    fn is_multiple(&self, id: ExprId, of: i64) -> bool {
        match self.kernel.exprs.expr(id) {
            Expr::Binary(BinOp::Add | BinOp::Sub, a, b) => {
                self.is_multiple(*a, of) && self.is_multiple(*b, of)
            }
            Expr::Binary(BinOp::Mul, a, b) => self.is_multiple(*a, of) || self.is_multiple(*b, of),
            _ => self.kernel.exprs.as_int(id).is_some_and(|c| c % of == 0),
        }
    }
}

/// The index arithmetic that [`fold`] does.
fn is_foldable(op: BinOp) -> bool {
    matches!(op, BinOp::Add | BinOp::Sub | BinOp::Mul | BinOp::Div | BinOp::Rem | BinOp::Min | BinOp::Max)
}

/// `a op b` on known one-lane i64 values.
pub(super) fn fold(op: BinOp, a: i64, b: i64) -> Option<i64> {
    match op {
        BinOp::Add => Some(a.wrapping_add(b)),
        BinOp::Sub => Some(a.wrapping_sub(b)),
        BinOp::Mul => Some(a.wrapping_mul(b)),
        BinOp::Div => a.checked_div(b),
        BinOp::Rem => a.checked_rem(b),
        BinOp::Min => Some(a.min(b)),
        BinOp::Max => Some(a.max(b)),
        _ => None,
    }
}
