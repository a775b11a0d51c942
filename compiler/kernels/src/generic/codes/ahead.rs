//! Asks for rows ahead of their use: what lies in the third-level cache or in memory takes longer to come than a
//! processor looks ahead, and its own prefetcher stops at the end of a page, which is hardly longer than a run of a row.

use super::{Group, Row, Rows};
use crate::generic::inline::{Index, Inliner};
use mlcc_ir::builder::KernelBuilder;
use mlcc_ir::graph::ValueId;
use mlcc_ir::instr::InstrId;
use mlcc_ir::kernel::{BufId, Expr, ExprId, Stmt};
use mlcc_ir::types::DType;
use std::collections::BTreeSet;

/// Elements of a cache line.
const LINE: usize = 16;

impl Rows<'_, '_> {
    /// What is worked on after a row's piece of so many groups from `first` on: the same piece of the next row of the block,
    /// or the next piece of its first row, or the first piece of the next block. Gives that row, and how many columns further
    /// right the piece is there.
    pub(super) fn next(
        &self,
        kb: &mut KernelBuilder,
        (r, row): (ExprId, ExprId),
        first: ExprId,
        groups: i64,
    ) -> Option<(ExprId, ExprId)> {
        let (block, group) = (self.block, self.codes[0].group as i64);
        // What is stored on the way is more than what is read: there asking only adds to the work.
        let (_, count) = block.ahead.filter(|_| block.leading.is_none() && self.stores.is_empty())?;
        let all = kb.int(self.codes[0].k as i64);
        let begin = kb.mul_int(first, group);
        let end = kb.add_int(begin, groups * group);
        let more = kb.lt(end, all);
        let (zero, size) = (kb.int(0), kb.int(block.size.into()));
        let (right, back) = (kb.int(groups * group), kb.sub(zero, begin));
        let shift = kb.select(more, right, back);
        let after = kb.add(block.first, size);
        let after = kb.select(more, block.first, after);
        let (number, below) = (kb.add_int(r, 1), kb.add_int(row, 1));
        let within = kb.lt(number, block.rows);
        let (row, shift) = (kb.select(within, below, after), kb.select(within, zero, shift));
        let last = kb.add_int(count, -1);
        let row = kb.min(row, last);
        Some((kb.let_("next", row), kb.let_("shift", shift)))
    }

    /// Asks for the operands of what stands in the place of `lanes` columns of a group when its row's successor is worked on.
    pub(super) fn ask(&self, kb: &mut KernelBuilder, row: &Row, (group, begin): (Group, usize), lanes: u32) {
        let (Some((later, shift)), Some((prefetch, _))) = (row.next, self.block.ahead) else { return };
        let values: Vec<ValueId> = self.codes.iter().map(|codes| codes.x).collect();
        let last = kb.int(self.codes[0].k as i64 - 1);
        for at in (begin..begin + lanes as usize).filter(|at| at.is_multiple_of(LINE)) {
            let column = self.column(kb, (group, at));
            let column = kb.add(column, shift);
            let column = kb.min(column, last);
            ask(kb, &row.inliner, prefetch, &values, [row.row, later, column]);
        }
    }
}

/// Asks for the elements that `values` are computed from at column `column` of row `later`, but not for those that row `row`
/// shares with it.
fn ask(
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
