//! `i32 += dot4` (`vpdpbusd`, `usdot`, `sdot`).

use super::{DotOperands, each_product};
use mlcc_ir::instr::InstrId;
use mlcc_kernel_lang::Val;

pub(super) fn add<'k>(
    group: &impl DotOperands<'k>,
    instr: InstrId,
    first: usize,
    totals: &mut [Vec<Val<'k>>],
) {
    each_product(group, first, totals.len(), |set, i, w, x| {
        let total = &mut totals[set][i];
        *total = group.pin("t", total.instr(instr, &[w.codes, x]));
    });
}
