//! Joins what the slices of a cache left: the second kernel of decode attention.

use super::decode::{columns, partial_row};
use super::schedule::Params;
use super::shares::Shares;
use super::{HIDDEN, Problem, lanes_of};
use crate::math::exp2_below_zero;
use mlcc_ir::builder::KernelBuilder;
use mlcc_ir::kernel::{BufId, ExprId, Space, Ty};
use mlcc_ir::types::DType;

/// Joins the unfinished sums of all slices: `partial: f32[slices, heads, partial]` to `out: f32[heads, value_size]`.
pub fn emit(kb: &mut KernelBuilder, a: &Problem, params: Params, partial: BufId, out: BufId) {
    let t = kb.dim(&a.t);
    let last = kb.add_int(t, -1);
    let first = a.first_key(kb, last);
    let used = Shares::new(kb, first, t).slices;
    let heads = kb.int(a.heads());
    kb.par("head", heads, |kb, head| {
        let weights = kb.alloc("weights", DType::F32, params.slices() as usize, Space::Stack);
        let total = join(kb, a, partial, weights, used, head);
        let lanes = lanes_of(a.value_size, params.lanes);
        columns(kb, a.value_size, lanes, |kb, c| {
            let sum = weighted(kb, a, partial, weights, used, (head, c, lanes));
            let value = kb.div(sum, total);
            let row = kb.mul_int(head, a.value_size);
            let at = kb.add(row, c);
            kb.store_vec(out, at, value);
        });
    });
}

/// The largest of the maxima that the slices left for a head.
pub(super) fn largest(
    kb: &mut KernelBuilder,
    a: &Problem,
    partial: BufId,
    used: ExprId,
    head: ExprId,
) -> ExprId {
    let zero = kb.int(0);
    let max = cell(kb, "max", HIDDEN);
    kb.serial("slice", used, |kb, slice| {
        let row = partial_row(kb, a, slice, head);
        let at = kb.add_int(row, a.value_size);
        let (here, old) = (kb.load(partial, at), kb.load(max, zero));
        let new = kb.max(here, old);
        kb.store(max, zero, new);
    });
    let most = kb.load(max, zero);
    kb.let_("most", most)
}

/// A variable that begins with `value`.
pub(super) fn cell(kb: &mut KernelBuilder, name: &str, value: f64) -> BufId {
    let (buf, zero, value) = (kb.alloc(name, DType::F32, 1, Space::Local), kb.int(0), kb.float(value));
    kb.store(buf, zero, value);
    buf
}

/// Stores the weight of each slice and gives the sum of all weights.
fn join(
    kb: &mut KernelBuilder,
    a: &Problem,
    partial: BufId,
    weights: BufId,
    used: ExprId,
    head: ExprId,
) -> ExprId {
    let zero = kb.int(0);
    let total = cell(kb, "total", 0.0);
    let most = largest(kb, a, partial, used, head);
    kb.serial("slice", used, |kb, slice| {
        let row = partial_row(kb, a, slice, head);
        let at = kb.add_int(row, a.value_size);
        let here = kb.load(partial, at);
        let below = kb.sub(here, most);
        let weight = exp2_below_zero(kb, below);
        let weight = kb.let_("weight", weight);
        kb.store(weights, slice, weight);
        let at = kb.add_int(row, a.value_size + 1);
        let (sum, old) = (kb.load(partial, at), kb.load(total, zero));
        let new = kb.fma(weight, sum, old);
        kb.store(total, zero, new);
    });
    let total = kb.load(total, zero);
    kb.let_("total", total)
}

/// The weighted sum over slices of `lanes` values from column `c` of a head.
fn weighted(
    kb: &mut KernelBuilder,
    a: &Problem,
    partial: BufId,
    weights: BufId,
    used: ExprId,
    (head, c, lanes): (ExprId, ExprId, u32),
) -> ExprId {
    let zero = kb.int(0);
    let sum = kb.alloc("sum", DType::F32, lanes as usize, Space::Local);
    let nothing = kb.constant(0.0, Ty::vector(DType::F32, lanes));
    kb.store_vec(sum, zero, nothing);
    kb.serial("slice", used, |kb, slice| {
        let row = partial_row(kb, a, slice, head);
        let at = kb.add(row, c);
        let value = kb.load_vec(partial, at, lanes);
        let weight = kb.load(weights, slice);
        let old = kb.load_vec(sum, zero, lanes);
        let new = kb.fma(weight, value, old);
        kb.store_vec(sum, zero, new);
    });
    let sum = kb.load_vec(sum, zero, lanes);
    kb.let_("sum", sum)
}
