//! Pairs of byte products in 16 bits (`vpmaddubsw`), and pairs of those in 32 (`vpmaddwd`). The first multiply unsigned
//! bytes with signed ones and saturate.

use super::{DotOperands, add_pairs, each_product};
use mlcc_ir::instr::InstrId;
use mlcc_kernel_lang::Val;

/// Of 4-bit codes: 16-bit sums of pairs, 16 products of at most 15 * 128 each: 30720, below the limit.
pub(super) fn add_sums<'k>(
    group: &impl DotOperands<'k>,
    (bytes, words): (InstrId, InstrId),
    first: usize,
    totals: &mut [Vec<Val<'k>>],
) {
    let mut halves: Vec<Vec<Option<Val>>> = vec![vec![None; group.sums()]; totals.len()];
    each_product(group, first, totals.len(), |set, i, w, x| {
        let products = w.codes.instr(bytes, &[x]);
        let half = &mut halves[set][i];
        *half = Some(group.pin("p", half.map_or(products, |sum| sum + products)));
    });
    for (total, half) in totals.iter_mut().flatten().zip(halves.into_iter().flatten()) {
        if let Some(half) = half {
            *total = add_pairs(words, *total, half);
        }
    }
}

/// Of 8-bit codes: magnitudes of centred weights times activations with their signs.
pub(super) fn add_signed<'k>(
    group: &impl DotOperands<'k>,
    (bytes, words, sign): (InstrId, InstrId, Option<InstrId>),
    first: usize,
    totals: &mut [Vec<Val<'k>>],
) {
    each_product(group, first, totals.len(), |set, i, w, x| {
        let pairs = w.magnitudes.instr(bytes, &[with_sign(sign, x, w.codes)]);
        let total = &mut totals[set][i];
        *total = group.pin("t", add_pairs(words, *total, pairs));
    });
}

/// `x` with its sign turned where `by` is negative; where `by` is zero any number.
pub(super) fn with_sign<'k>(sign: Option<InstrId>, x: Val<'k>, by: Val<'k>) -> Val<'k> {
    match sign {
        Some(sign) => x.instr(sign, &[by]),
        None => by.lt(0).select(0 - x, x),
    }
}
