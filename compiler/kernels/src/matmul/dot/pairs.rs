//! Pairs of byte products in 16 bits (`vpmaddubsw`), and pairs of those in 32 (`vpmaddwd`). The first
//! multiply unsigned bytes with signed ones and saturate.

use super::{DotOperands, add_pairs, each_product};
use mlcc_ir::instr::InstrId;
use mlcc_kernel_lang::Val;

/// Adds products of small numbers: 16-bit sums of the pairs of `quads` quads, which are below the limit.
pub(super) fn add_pair_sums<'k>(
    group: &impl DotOperands<'k>,
    (bytes, words, quads): (InstrId, InstrId, usize),
    first: usize,
    totals: &mut [Vec<Val<'k>>],
) {
    let mut halves: Vec<Vec<(usize, Option<Val>)>> =
        vec![vec![(0, None); group.accumulator_count()]; totals.len()];
    each_product(group, first, totals.len(), |set, i, w, x| {
        let products = w.codes.instr(bytes, &[x]);
        let (met, half) = &mut halves[set][i];
        let sum = group.pin("p", half.map_or(products, |sum| sum + products));
        *met += 1;
        if (*met).is_multiple_of(quads) {
            let total = &mut totals[set][i];
            *total = add_pairs(words, *total, sum);
            *half = None;
        } else {
            *half = Some(sum);
        }
    });
}

/// Adds products of 8-bit codes: magnitudes of centred weights times activations with their signs.
pub(super) fn add_signed<'k>(
    group: &impl DotOperands<'k>,
    (bytes, words, sign): (InstrId, InstrId, Option<InstrId>),
    first: usize,
    totals: &mut [Vec<Val<'k>>],
) {
    each_product(group, first, totals.len(), |set, i, w, x| {
        let pairs = w.absolutes.instr(bytes, &[with_sign(sign, x, w.codes)]);
        let total = &mut totals[set][i];
        *total = group.pin("t", add_pairs(words, *total, pairs));
    });
}

/// `x`, negated where `by` is negative; where `by` is zero any number.
pub(super) fn with_sign<'k>(sign: Option<InstrId>, x: Val<'k>, by: Val<'k>) -> Val<'k> {
    match sign {
        Some(sign) => x.instr(sign, &[by]),
        None => by.lt(0).select(0 - x, x),
    }
}
