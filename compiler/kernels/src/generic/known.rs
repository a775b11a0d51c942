//! What is known at compile time of the indices of a kernel: comparisons that have one answer, and where parts of a row meet
//! that are made in different ways (the halves of a rotary embedding). In one loop over all columns every vector would compute
//! all parts, by masked loads, and what depends on the row alone (the scale of a norm) each time.

use super::inline::{Inliner, const_of};
use mlcc_ir::builder::KernelBuilder;
use mlcc_ir::kernel::{BinOp, Expr, ExprId};
use mlcc_ir::ops::Op;
use std::collections::BTreeSet;

/// A comparison that comes out the same in all lanes and turns of the loops around it.
pub(super) fn known(kb: &KernelBuilder, cond: ExprId) -> Option<bool> {
    let (op, a, b) = match *kb.expr(cond) {
        Expr::Splat(one) => return known(kb, one),
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
        Expr::Var(var) => kb.turns(var).filter(|&turns| turns > 0).map(|turns| (0, turns - 1)),
        Expr::Splat(one) => bounds(kb, one),
        Expr::Ramp { base, stride } => {
            let ((low, high), by) = (bounds(kb, base)?, const_of(kb, stride)?);
            let last = by.checked_mul(i64::from(kb.ty(e).lanes - 1))?;
            Some((low.checked_add(last.min(0))?, high.checked_add(last.max(0))?))
        }
        Expr::Binary(op, a, b) => {
            let ((low, high), by) = (bounds(kb, a)?, const_of(kb, b)?);
            let ends = match op {
                BinOp::Add => [low.checked_add(by)?, high.checked_add(by)?],
                BinOp::Sub => [low.checked_sub(by)?, high.checked_sub(by)?],
                BinOp::Mul => [low.checked_mul(by)?, high.checked_mul(by)?],
                _ => return None,
            };
            Some((ends[0].min(ends[1]), ends[0].max(ends[1])))
        }
        _ => const_of(kb, e).map(|value| (value, value)),
    }
}

/// Most parts of a row that have a loop of their own.
const MOST_PARTS: usize = 4;

/// Where the parts of a row of `end` columns meet, in whole vectors, with the row's begin and end.
pub(crate) fn borders(inliner: &Inliner, lanes: i64, end: i64) -> Vec<i64> {
    let mut inside = BTreeSet::new();
    for (_, node) in inliner.f.live() {
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
    use mlcc_ir::types::DType;

    #[test]
    fn comparisons_with_one_answer() {
        let mut kb = KernelBuilder::new("k");
        let some = kb.dim(&mlcc_ir::dim::Dim::sym(mlcc_ir::dim::Sym::N));
        let eight = kb.int(8);
        kb.serial("unknown", some, |kb, u| {
            kb.serial("c", eight, |kb, c| {
                // Vectors of 8 lanes from 64 on: 64 to 127.
                let by = kb.mul_int(c, 8);
                let (first, one) = (kb.add_int(by, 64), kb.int(1));
                let lanes = kb.ramp(first, one, 8);
                let mut answer = |op, a, limit| {
                    let limit = kb.int(limit);
                    let limit = if kb.ty(a).lanes > 1 { kb.splat(limit, 8) } else { limit };
                    let cond = kb.binary(op, a, limit);
                    assert_eq!(kb.ty(cond).dtype, DType::Bool);
                    known(kb, cond)
                };
                assert_eq!(
                    [64, 127, 128].map(|l| answer(BinOp::Lt, lanes, l)),
                    [Some(false), None, Some(true)]
                );
                assert_eq!(
                    [63, 64, 127].map(|l| answer(BinOp::Le, lanes, l)),
                    [Some(false), None, Some(true)]
                );
                assert_eq!(
                    [63, 64, 128].map(|l| answer(BinOp::Eq, lanes, l)),
                    [Some(false), None, Some(false)]
                );
                assert_eq!([63, 64].map(|l| answer(BinOp::Ne, first, l)), [Some(true), None]);
                assert_eq!(answer(BinOp::Lt, u, 5), None, "a loop of unknown length");
            });
        });
    }
}
