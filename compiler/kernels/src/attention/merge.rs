//! Joins what the slices of a cache left: the second kernel of decode attention.

use super::plan::{DecodePlan, SLICES, lanes_of};
use super::problem::{AttentionProblem, MASKED};
use super::slices::KeySlices;
use mlcc_ir::builder::KernelBuilder;
use mlcc_ir::kernel::{BufId, ExprType};
use mlcc_ir::types::DType;
use mlcc_kernel_lang::math::exp2_below_zero;
use mlcc_kernel_lang::{BufferView, Recorder, Val};

/// `f32[slices, heads, partial]`: of each head the unfinished sums, their maximum and the sum of their
/// weights.
pub(super) fn partial_results<'k>(k: &'k Recorder, a: &AttentionProblem, buf: BufId) -> BufferView<'k, 3> {
    k.view(buf, [1, a.heads(), DecodePlan::partial_floats(a)])
}

/// The number of slices, which is stored after the sums of each head of each slice: it depends on a count of
/// keys in memory that the kernel that joins them does not get.
pub(super) fn load_slice_count<'k>(
    a: &AttentionProblem,
    partial: BufferView<'k, 3>,
    head: Val<'k>,
) -> Val<'k> {
    let said = partial.at((0, head, a.value_size + 2)).bits_as(ExprType::scalar(DType::I32));
    said.cast(DType::I64).named("slices")
}

/// The bits that [`load_slice_count`] reads.
pub(super) fn slice_count_bits(slices: Val<'_>) -> Val<'_> {
    slices.cast(DType::I32).bits_as(ExprType::F32)
}

/// Joins the unfinished sums of all slices: `partial: f32[slices, heads, partial]` to
/// `out: f32[heads, value_size]`.
pub fn emit(kb: &mut KernelBuilder, a: &AttentionProblem, plan: DecodePlan, partial: BufId, out: BufId) {
    Recorder::within(kb, |k| {
        let (partial, out) = (partial_results(k, a, partial), k.view(out, [a.heads(), a.value_size]));
        let t = k.dim(&a.t);
        let of_all = (!a.stores_slice_count()).then(|| KeySlices::new(a.first_key(t + -1), t).slices);
        k.par("head", a.heads(), |head| {
            let used = of_all.unwrap_or_else(|| load_slice_count(a, partial, head));
            let weights = k.stack("weights", DType::F32, [SLICES]);
            let total = slice_weights(a, partial, weights, used, head);
            let lanes = lanes_of(a.value_size, plan.lanes);
            k.vectors("c", a.value_size, lanes, |c| {
                let sum = k.fold("slice", used, k.zeros(DType::F32, lanes), |slice, sum| {
                    weights.at([slice]).fma(partial.load([slice, head, c], lanes), sum)
                });
                out.set([head, c], sum / total);
            });
        });
    });
}

/// Stores the weight of each slice of a head, and gives the sum of all weights.
fn slice_weights<'k>(
    a: &AttentionProblem,
    partial: BufferView<'k, 3>,
    weights: BufferView<'k, 1>,
    used: Val<'k>,
    head: Val<'k>,
) -> Val<'k> {
    let k = head.recorder();
    let (max_at, total_at) = (a.value_size, a.value_size + 1);
    let total = k.reg("total", k.float(0.0));
    let max = k.fold("slice", used, MASKED, |slice, max| partial.at((slice, head, max_at)).max(max));
    k.serial("slice", used, |slice| {
        let weight = exp2_below_zero(partial.at((slice, head, max_at)) - max).named("weight");
        weights.set([slice], weight);
        total.update(|total| weight.fma(partial.at((slice, head, total_at)), total));
    });
    total.get().named("total")
}
