//! Values that take many steps, interleaved: the first step of each, then the second step of each, and so on.
//!
//! The steps of an activation wait for one another, about 25 of them. Where such values are computed in
//! sequence, the part that a core looks ahead has three of them or so, too few to keep its vector units busy.

use crate::Recorder;
use crate::math::is_long;
use mlcc_ir::builder::KernelBuilder;
use mlcc_ir::kernel::{Expr, ExprId, Kernel, Stmt};
use rustc_hash::{FxHashMap, FxHashSet};

/// Values interleaved: more would take registers that they do not have.
const TOGETHER: usize = 4;
/// Fewer steps are found anyway.
const LEAST_STEPS: usize = 20;

impl Recorder {
    /// `body(item)` for each item, values and their stores. Where values take many steps, the statements
    /// alternate, so that equal `let`s are neighbours: the first of each of a few items, then the second of
    /// each. No item may read what another one writes.
    pub fn interleaved<T>(&self, items: impl IntoIterator<Item = T>, mut body: impl FnMut(T)) {
        let lists = items.into_iter().map(|item| self.record_block(|| body(item))).collect();
        self.builder(|kb| interleave_lists(kb, lists).into_iter().for_each(|stmt| kb.push(stmt)));
    }
}

/// The statements of all lists, see [`Recorder::interleaved`].
pub fn interleave_lists(kb: &KernelBuilder, lists: Vec<Vec<Stmt>>) -> Vec<Stmt> {
    let plain = |stmt: &Stmt| matches!(stmt, Stmt::Let { .. } | Stmt::Store { .. });
    let len = lists.first().map_or(0, Vec::len);
    let equal = lists.iter().all(|list| list.len() == len && list.iter().all(plain));
    if !equal || !lists.iter().take(1).flatten().any(|stmt| is_long_let(kb, stmt)) {
        return lists.into_iter().flatten().collect();
    }
    let alternating = |lists: &[Vec<Stmt>]| -> Vec<Stmt> {
        (0..len).flat_map(|i| lists.iter().map(move |list| list[i].clone())).collect()
    };
    lists.chunks(TOGETHER).flat_map(alternating).collect()
}

/// True for a `let` with a function that is going to be many steps.
fn is_long_let(kb: &KernelBuilder, stmt: &Stmt) -> bool {
    fn long(kb: &KernelBuilder, e: ExprId, seen: &mut FxHashSet<ExprId>) -> bool {
        let mut found = matches!(kb.expr(e), Expr::Unary(op, _) if is_long(*op));
        kb.expr(e).for_each_child(|child| found = found || seen.insert(child) && long(kb, child, seen));
        found
    }
    matches!(stmt, Stmt::Let { value, .. } if long(kb, *value, &mut FxHashSet::default()))
}

/// Interleaves the steps of neighbouring `let`s of long values of the same form.
pub fn interleave_steps(mut kernel: Kernel) -> Kernel {
    let body = std::mem::take(&mut kernel.body);
    let mut kb = KernelBuilder::reopen(kernel);
    block(&mut kb, body);
    kb.finish()
}

fn block(kb: &mut KernelBuilder, body: Vec<Stmt>) {
    let nested = |kb: &mut KernelBuilder, body: Vec<Stmt>| {
        kb.open_block();
        block(kb, body);
        kb.close_block()
    };
    let mut waiting: Vec<DependencyChain> = Vec::new();
    for stmt in body {
        if let Stmt::Let { value, .. } = stmt {
            let chain = DependencyChain { steps: steps(kb, value), stmt: stmt.clone(), value };
            let joins = waiting.first().is_none_or(|first| alike(kb, first, &chain));
            if chain.steps.len() >= LEAST_STEPS && !reads_any(kb, &chain, &waiting) {
                if !joins || waiting.len() == TOGETHER {
                    emit(kb, &mut waiting);
                }
                waiting.push(chain);
                continue;
            }
        }
        emit(kb, &mut waiting);
        let stmt = match stmt {
            Stmt::For { var, extent, kind, body } => Stmt::For { var, extent, kind, body: nested(kb, body) },
            Stmt::If { cond, then, otherwise } => {
                Stmt::If { cond, then: nested(kb, then), otherwise: nested(kb, otherwise) }
            }
            other => other,
        };
        kb.push(stmt);
    }
    emit(kb, &mut waiting);
}

/// A `let` and its steps.
struct DependencyChain {
    stmt: Stmt,
    value: ExprId,
    /// The steps, operands first, the value last.
    steps: Vec<ExprId>,
}

/// The vector operations of an expression.
fn steps(kb: &KernelBuilder, value: ExprId) -> Vec<ExprId> {
    fn visit(kb: &KernelBuilder, e: ExprId, seen: &mut FxHashSet<ExprId>, steps: &mut Vec<ExprId>) {
        if kb.ty(e).lanes == 1 || !seen.insert(e) {
            return;
        }
        kb.expr(e).for_each_child(|child| visit(kb, child, seen, steps));
        if !matches!(kb.expr(e), Expr::Const(_) | Expr::Var(_) | Expr::Splat(_) | Expr::Ramp { .. }) {
            steps.push(e);
        }
    }
    let mut steps = Vec::new();
    visit(kb, value, &mut FxHashSet::default(), &mut steps);
    steps
}

/// True if two values are made by the same operations in the same order.
fn alike(kb: &KernelBuilder, a: &DependencyChain, b: &DependencyChain) -> bool {
    let kind = |e: ExprId| (std::mem::discriminant(kb.expr(e)), kb.ty(e));
    let pairs = a.steps.iter().zip(&b.steps);
    a.steps.len() == b.steps.len() && pairs.into_iter().all(|(&a, &b)| kind(a) == kind(b))
}

/// True if a chain needs the value of one of the others.
fn reads_any(kb: &KernelBuilder, chain: &DependencyChain, others: &[DependencyChain]) -> bool {
    fn reads(
        kb: &KernelBuilder,
        e: ExprId,
        others: &[DependencyChain],
        seen: &mut FxHashMap<ExprId, bool>,
    ) -> bool {
        if let Some(&known) = seen.get(&e) {
            return known;
        }
        let mut found = match kb.expr(e) {
            Expr::Var(v) => others.iter().any(|c| matches!(&c.stmt, Stmt::Let { var, .. } if var == v)),
            _ => false,
        };
        kb.expr(e).for_each_child(|child| found |= reads(kb, child, others, seen));
        seen.insert(e, found);
        found
    }
    reads(kb, chain.value, others, &mut FxHashMap::default())
}

/// Emits the chains, their steps interleaved.
fn emit(kb: &mut KernelBuilder, chains: &mut Vec<DependencyChain>) {
    if chains.len() < 2 {
        return chains.drain(..).for_each(|chain| kb.push(chain.stmt));
    }
    let mut done: FxHashMap<ExprId, ExprId> = FxHashMap::default();
    for i in 0..chains[0].steps.len() {
        for chain in chains.iter() {
            let step = chain.steps[i];
            let value = rebuilt(kb, step, &mut done);
            if step != chain.value {
                let value = kb.let_("step", value);
                done.insert(step, value);
            } else if let Stmt::Let { var, .. } = chain.stmt {
                kb.push(Stmt::Let { var, value });
            }
        }
    }
    chains.clear();
}

/// A step with the steps before it as variables.
fn rebuilt(kb: &mut KernelBuilder, e: ExprId, done: &mut FxHashMap<ExprId, ExprId>) -> ExprId {
    if let Some(&value) = done.get(&e) {
        return value;
    }
    let mut expr = kb.expr(e).clone();
    expr.for_each_child_mut(|child| *child = rebuilt(kb, *child, done));
    let ty = kb.ty(e);
    let value = kb.intern(expr, ty);
    done.insert(e, value);
    value
}
