//! Prefetches rows: what is in the third-level cache or in memory takes longer to come than a processor looks
//! ahead, and its own prefetcher stops at the end of a page, which is hardly longer than a run of a row.

use super::{BlockRow, CodeGroup, RowQuantizer};
use crate::inline::{Inliner, LaneIndex};
use mlcc_ir::builder::KernelBuilder;
use mlcc_ir::graph::ValueId;
use mlcc_ir::instr::InstrId;
use mlcc_ir::kernel::{BufId, Expr, ExprId};
use mlcc_ir::types::DType;
use mlcc_kernel_lang::{Recorder, Val};
use std::collections::BTreeSet;

/// Elements of a cache line.
const LINE: usize = 16;

impl<'k> RowQuantizer<'_, '_, 'k> {
    /// The work after a row's piece, which has `groups` groups from `first` on: the same piece of the next
    /// row of the block, or the next piece of its first row, or the first piece of the next block. Returns
    /// that row, and how many columns further right the piece is there.
    pub(super) fn next_row(
        &self,
        (r, row): (Val<'k>, Val<'k>),
        first: Val<'k>,
        groups: i64,
    ) -> Option<(Val<'k>, Val<'k>)> {
        let (block, group) = (self.block, self.codes[0].group as i64);
        // More is stored on the way than is read: there a prefetch only adds to the work.
        let (_, count) = block.prefetch.filter(|_| block.leading.is_none() && self.stores.is_empty())?;
        let begin = first * group;
        let more = (begin + groups * group).lt(self.codes[0].k as i64);
        let right = more.select(groups * group, 0 - begin);
        let after = more.select(block.first, block.first + i64::from(block.size));
        let within = (r + 1).lt(block.rows);
        let next = within.select(row + 1, after).min(count + -1);
        Some((next.named("next"), within.select(0, right).named("shift")))
    }

    /// Prefetches the operands of what is in the place of `lanes` columns of a group when its row's successor
    /// is worked on.
    pub(super) fn prefetch(
        &self,
        row: &BlockRow<'_, 'k>,
        (group, begin): (CodeGroup<'k>, usize),
        lanes: u32,
    ) {
        let (Some((next, shift)), Some((instr, _))) = (row.next, self.block.prefetch) else { return };
        let values: Vec<ValueId> = self.codes.iter().map(|codes| codes.x).collect();
        let last = self.codes[0].k as i64 - 1;
        for at in (begin..begin + lanes as usize).filter(|at| at.is_multiple_of(LINE)) {
            let column = (self.column((group, at)) + shift).min(last);
            prefetch_operands(self.k, &row.inliner, instr, &values, [row.row, next, column]);
        }
    }
}

/// Prefetches the elements that `values` are computed from at column `column` of row `next`, but not those
/// that row `row` shares with it.
fn prefetch_operands<'k>(
    k: &'k Recorder,
    inliner: &Inliner<'_, 'k>,
    instr: InstrId,
    values: &[ValueId],
    [row, next, column]: [Val<'k>; 3],
) {
    let one = inliner.of_one();
    let loads = |row| {
        let mut found = BTreeSet::new();
        for &v in values {
            let value = one.value(k, v, &[LaneIndex::scalar(row), LaneIndex::scalar(column)]);
            k.builder(|kb| collect(kb, value.id(), &mut found));
        }
        found
    };
    let shared = loads(row);
    for &load in loads(next).difference(&shared) {
        k.val(load).prefetch_load(instr);
    }
}

/// The loads of f32 arguments below an expression that are made in any case; none of those that tell where
/// others are.
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
