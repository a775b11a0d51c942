//! Rebuilds a kernel with some expressions replaced: the mechanism behind instruction expansion and the
//! expansion of transcendental functions.

use crate::builder::KernelBuilder;
use crate::entity::EntityId;
use crate::instr::{InstrId, InstrSemantics};
use crate::kernel::*;

/// Rebuilds `kernel` (same buffers, variables and statements) calling `f` for every expression, children
/// first: `f` gets the node with its children already rebuilt and returns its replacement, or `None` to keep
/// it.
pub fn rewrite_exprs(
    kernel: &Kernel,
    mut f: impl FnMut(&mut KernelBuilder, &Expr, ExprType) -> Option<ExprId>,
) -> Kernel {
    let mut shell = Kernel::new(kernel.name.clone());
    shell.params.clone_from(&kernel.params);
    shell.dims.clone_from(&kernel.dims);
    shell.bufs = kernel.bufs.clone();
    shell.vars = kernel.vars.clone();
    let mut rw = ExprRewriter {
        old: kernel,
        kb: KernelBuilder::reopen(shell),
        map: vec![None; kernel.exprs.len()],
        f: &mut f,
    };
    rw.stmts(&kernel.body);
    rw.kb.finish()
}

/// Replaces instructions for which `available` is false by their meaning.
/// Warp-level instructions have none and stay.
pub fn expand_instrs(kernel: &Kernel, available: impl Fn(InstrId) -> bool) -> Kernel {
    rewrite_exprs(kernel, |kb, expr, _| match expr {
        Expr::Instr(id, args) if !available(*id) => match id.def().meaning {
            InstrSemantics::Expr(meaning) => Some(meaning(kb, args)),
            InstrSemantics::ShuffleXor
            | InstrSemantics::Hint
            | InstrSemantics::Mma(_)
            | InstrSemantics::LoadMatrix { .. }
            | InstrSemantics::Copy { .. } => None,
        },
        _ => None,
    })
}

type ExprReplacement<'a> = &'a mut dyn FnMut(&mut KernelBuilder, &Expr, ExprType) -> Option<ExprId>;

struct ExprRewriter<'a> {
    old: &'a Kernel,
    kb: KernelBuilder,
    /// The new expression of each old one.
    map: Vec<Option<ExprId>>,
    f: ExprReplacement<'a>,
}

impl ExprRewriter<'_> {
    fn stmts(&mut self, body: &[Stmt]) {
        for stmt in body {
            self.stmt(stmt);
        }
    }

    fn stmt(&mut self, stmt: &Stmt) {
        match stmt {
            Stmt::For { var, extent, kind, body } => {
                let extent = self.expr(*extent);
                let body = self.block(body);
                self.kb.push(Stmt::For { var: *var, extent, kind: *kind, body });
            }
            Stmt::If { cond, then, otherwise } => {
                let cond = self.expr(*cond);
                let (then, otherwise) = (self.block(then), self.block(otherwise));
                self.kb.push(Stmt::If { cond, then, otherwise });
            }
            Stmt::Let { var, value } => {
                let value = self.expr(*value);
                self.kb.push(Stmt::Let { var: *var, value });
            }
            Stmt::Store { buf, index, value, mask } => {
                let (index, value) = (self.expr(*index), self.expr(*value));
                let mask = mask.map(|m| self.expr(m));
                self.kb.push(Stmt::Store { buf: *buf, index, value, mask });
            }
            Stmt::Instr { instr, args } => {
                let args = args.iter().map(|&a| self.expr(a)).collect();
                self.kb.push(Stmt::Instr { instr: *instr, args });
            }
            Stmt::Alloc { .. } | Stmt::Barrier | Stmt::Commit | Stmt::Wait { .. } => {
                self.kb.push(stmt.clone());
            }
        }
    }

    fn block(&mut self, body: &[Stmt]) -> Vec<Stmt> {
        self.kb.open_block();
        self.stmts(body);
        self.kb.close_block()
    }

    fn expr(&mut self, id: ExprId) -> ExprId {
        if let Some(new) = self.map[id.index()] {
            return new;
        }
        let ty = self.old.exprs.ty(id);
        let mut node = self.old.exprs.expr(id).clone();
        node.for_each_child_mut(|child| *child = self.expr(*child));
        let new = match (self.f)(&mut self.kb, &node, ty) {
            Some(replacement) => replacement,
            None => self.kb.intern(node, ty),
        };
        assert_eq!(self.kb.ty(new), ty, "rewriting changed the type of an expression");
        self.map[id.index()] = Some(new);
        new
    }
}

impl Expr {
    /// Visits the operands in order.
    pub fn for_each_child(&self, mut f: impl FnMut(ExprId)) {
        let mut copy = self.clone();
        copy.for_each_child_mut(|c| f(*c));
    }

    /// Visits the operands in order, mutably.
    pub fn for_each_child_mut(&mut self, mut f: impl FnMut(&mut ExprId)) {
        match self {
            Expr::Const(_) | Expr::Var(_) => {}
            Expr::Load { index, mask, .. } => {
                f(index);
                if let Some(mask) = mask {
                    f(mask);
                }
            }
            Expr::Unary(_, a) | Expr::Cast(a) | Expr::Bitcast(a) | Expr::Splat(a) => f(a),
            Expr::Binary(_, a, b) | Expr::Ramp { base: a, stride: b } => {
                f(a);
                f(b);
            }
            Expr::Fma(a, b, c) | Expr::Select(a, b, c) => {
                f(a);
                f(b);
                f(c);
            }
            Expr::Shuffle { a, b, .. } => {
                f(a);
                if let Some(b) = b {
                    f(b);
                }
            }
            Expr::Instr(_, args) => args.iter_mut().for_each(f),
        }
    }
}
