//! Facts about the indices of a kernel that are known at compile time: comparisons that have one answer, and
//! where parts of a row meet that are made in different ways (the halves of a rotary embedding). In one loop
//! over all columns every vector would compute all parts, by masked loads, and terms that depend on the row
//! alone (the scale of a norm) each time.

use super::Inliner;
use mlcc_ir::builder::KernelBuilder;
use mlcc_ir::kernel::{BinOp, Expr, ExprId};
use mlcc_ir::ops::Op;
use mlcc_kernel_lang::Val;
use std::collections::BTreeSet;

/// A comparison that comes out the same in all lanes and turns of the loops around it.
pub(super) fn known_condition(cond: Val) -> Option<bool> {
    cond.recorder().builder(|kb| answer(kb, cond.id()))
}

fn answer(kb: &KernelBuilder, cond: ExprId) -> Option<bool> {
    let (op, a, b) = match *kb.expr(cond) {
        Expr::Splat(one) => return answer(kb, one),
        Expr::Binary(op, a, b) => (op, a, b),
        _ => return None,
    };
    let ((low_a, high_a), (low_b, high_b)) = (bounds(kb, a)?, bounds(kb, b)?);
    match op {
        BinOp::Lt if high_a < low_b => Some(true),
        BinOp::Lt if low_a >= high_b => Some(false),
        BinOp::Le if high_a <= low_b => Some(true),
        BinOp::Le if low_a > high_b => Some(false),
        BinOp::Eq | BinOp::Ne if high_a < low_b || high_b < low_a => Some(op == BinOp::Ne),
        BinOp::Eq | BinOp::Ne if low_a == high_a && low_b == high_b && low_a == low_b => {
            Some(op == BinOp::Eq)
        }
        _ => None,
    }
}

/// Smallest and largest value of an index over all lanes and turns.
fn bounds(kb: &KernelBuilder, e: ExprId) -> Option<(i64, i64)> {
    match *kb.expr(e) {
        Expr::Var(var) => kb.loop_extent(var).filter(|&turns| turns > 0).map(|turns| (0, turns - 1)),
        Expr::Splat(one) => bounds(kb, one),
        Expr::Ramp { base, stride } => {
            let ((low, high), by) = (bounds(kb, base)?, kb.kernel().exprs.as_int(stride)?);
            let last = by.checked_mul(i64::from(kb.ty(e).lanes - 1))?;
            Some((low.checked_add(last.min(0))?, high.checked_add(last.max(0))?))
        }
        Expr::Binary(op, a, b) => {
            let ((low, high), by) = (bounds(kb, a)?, kb.kernel().exprs.as_int(b)?);
            let ends = match op {
                BinOp::Add => [low.checked_add(by)?, high.checked_add(by)?],
                BinOp::Sub => [low.checked_sub(by)?, high.checked_sub(by)?],
                BinOp::Mul => [low.checked_mul(by)?, high.checked_mul(by)?],
                _ => return None,
            };
            Some((ends[0].min(ends[1]), ends[0].max(ends[1])))
        }
        _ => kb.kernel().exprs.as_int(e).map(|value| (value, value)),
    }
}

/// Most parts of a row that have a loop of their own.
const MOST_PARTS: usize = 4;

/// The borders between the parts of a row of `end` columns, in whole vectors, with the row's begin and end.
pub(crate) fn part_borders(inliner: &Inliner, lanes: i64, end: i64) -> Vec<i64> {
    let mut inside = BTreeSet::new();
    for (_, node) in inliner.f.live_nodes() {
        let Some(output) = node.outputs.first() else { continue };
        let joined = inliner.f.ty(*output);
        let inlined = !inliner.bindings.contains_key(output);
        if !matches!(node.op, Op::Concat { axis } if axis + 1 == joined.rank() && inlined) {
            continue;
        }
        let sizes = node.inputs.iter().map_while(|&v| inliner.f.ty(v).dims.last()?.as_const());
        let ends = sizes.scan(0, |sum, size| {
            *sum += size;
            Some(*sum)
        });
        inside.extend(ends.filter(|at| at % lanes == 0 && *at < end));
    }
    if inside.len() >= MOST_PARTS {
        inside.clear();
    }
    [0].into_iter().chain(inside).chain([end]).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use mlcc_ir::dim::{Dim, SizeSymbol};
    use mlcc_kernel_lang::Recorder;

    #[test]
    fn comparisons_with_one_answer() {
        let k = &Recorder::new("k");
        k.serial("unknown", &Dim::sym(SizeSymbol::N), |u| {
            k.serial("c", 8, |c| {
                // Vectors of 8 lanes from 64 on: 64 to 127.
                let first = c * 8 + 64;
                let lanes = first.ramp(1, 8);
                let answers =
                    |limits: [i64; 3], op| limits.map(|limit| known_condition(lanes.binary(op, limit)));
                assert_eq!(answers([64, 127, 128], BinOp::Lt), [Some(false), None, Some(true)]);
                assert_eq!(answers([63, 64, 127], BinOp::Le), [Some(false), None, Some(true)]);
                assert_eq!(answers([63, 64, 128], BinOp::Eq), [Some(false), None, Some(false)]);
                assert_eq!([63, 64].map(|l| known_condition(first.differs(l))), [Some(true), None]);
                assert_eq!(known_condition(u.lt(5)), None, "a loop of unknown length");
            });
        });
    }
}
