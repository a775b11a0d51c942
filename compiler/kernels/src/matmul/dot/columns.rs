//! Multiplications in i32, for machines without an instruction for bytes.

use super::{DotOperands, each_product};
use mlcc_ir::types::DType;
use mlcc_kernel_lang::Val;

pub(super) fn add<'k>(group: &impl DotOperands<'k>, first: usize, totals: &mut [Vec<Val<'k>>]) {
    let (_, _, lanes) = group.shape();
    each_product(group, first, totals.len(), |set, i, w, x| {
        let total = &mut totals[set][i];
        let column =
            |codes: Val<'k>, column| codes.shuffle((0..lanes).map(|lane| 4 * lane + column)).cast(DType::I32);
        let sum = (0..4).fold(*total, |sum, c| sum + column(w.codes, c) * column(x, c));
        *total = group.pin("t", sum);
    });
}
