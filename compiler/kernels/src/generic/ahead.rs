//! Asks for rows ahead of their use: what lies in the third-level cache or in memory takes longer to come than a
//! processor looks ahead, and its own prefetcher stops at the end of a page, which is hardly longer than a run of a row.

use super::inline::{Index, Inliner};
use mlcc_ir::builder::KernelBuilder;
use mlcc_ir::graph::ValueId;
use mlcc_ir::instr::InstrId;
use mlcc_ir::kernel::{BufId, Expr, ExprId, Stmt};
use mlcc_ir::types::DType;
use std::collections::BTreeSet;

/// Elements of a cache line.
pub const LINE: usize = 16;

/// Asks for the elements that `values` are computed from at column `column` of row `later`, but not for those that row `row`
/// shares with it.
pub fn ask(
    kb: &mut KernelBuilder,
    inliner: &Inliner,
    prefetch: InstrId,
    values: &[ValueId],
    [row, later, column]: [ExprId; 3],
) {
    let one = Inliner { lanes: 1, mask: None, aligned: false, ..inliner.clone() };
    let loads = |kb: &mut KernelBuilder, row| {
        let mut found = BTreeSet::new();
        for &v in values {
            let value = one.value(kb, v, &[Index::scalar(row), Index::scalar(column)]);
            collect(kb, value, &mut found);
        }
        found
    };
    let shared = loads(kb, row);
    for load in loads(kb, later).difference(&shared) {
        kb.push(Stmt::Instr { instr: prefetch, args: vec![*load] });
    }
}

/// The loads of f32 arguments below an expression that are made in any case; none of those that tell where others are.
fn collect(kb: &KernelBuilder, value: ExprId, found: &mut BTreeSet<ExprId>) {
    let mut left = vec![value];
    let mut seen = BTreeSet::new();
    while let Some(e) = left.pop() {
        if !seen.insert(e) {
            continue;
        }
        match *kb.expr(e) {
            Expr::Load { buf, index, mask: None } => {
                if is_argument(kb, buf) && !reads(kb, index) {
                    found.insert(e);
                }
            }
            Expr::Load { .. } => {}
            ref other => other.for_each_child(|child| left.push(child)),
        }
    }
}

fn is_argument(kb: &KernelBuilder, buf: BufId) -> bool {
    kb.kernel().bufs[buf].dtype == DType::F32 && kb.kernel().params.contains(&buf)
}

/// True if memory has to be read for the value of an expression.
fn reads(kb: &KernelBuilder, e: ExprId) -> bool {
    let expr = kb.expr(e).clone();
    let mut found = matches!(expr, Expr::Load { .. });
    expr.for_each_child(|child| found |= reads(kb, child));
    found
}
