//! Loops over the columns of a row.

use super::{RowExecutor, columns_of};
use crate::inline::known::part_borders;
use crate::inline::{Inliner, RowAt, store_all};
use mlcc_ir::dim::Dim;
use mlcc_ir::graph::ValueId;
use mlcc_ir::kernel::BufId;
use mlcc_kernel_lang::{Recorder, Val};

/// Stores the outputs of a row, those of the same columns in one loop.
pub(super) fn store<'k>(
    k: &'k Recorder,
    inliner: &Inliner<'_, 'k>,
    at: RowAt<'_, 'k>,
    outputs: &[(ValueId, BufId)],
    executor: RowExecutor<'k>,
) {
    let like = |v: ValueId| (columns_of(inliner, v), inliner.vectorizable(v));
    let mut left = outputs.to_vec();
    while let [(first, _), ..] = left[..] {
        let (columns, wide) = like(first);
        let (together, others) = left.into_iter().partition(|(v, _)| like(*v) == (columns.clone(), wide));
        left = others;
        match executor {
            RowExecutor::Worker { lanes } => {
                vectors(k, inliner, at, &columns, if wide { lanes } else { 1 }, &together);
            }
            RowExecutor::Block(block) => block.store(inliner, at, &columns, &together),
        }
    }
}

/// Whole vectors of columns, then single ones.
fn vectors<'k>(
    k: &'k Recorder,
    inliner: &Inliner<'_, 'k>,
    at: RowAt<'_, 'k>,
    columns: &Dim,
    lanes: u32,
    stores: &[(ValueId, BufId)],
) {
    let (total, width) = (k.dim(columns), i64::from(lanes));
    let whole = total / width;
    let end = whole * width;
    let rest = total - end;
    let wide = inliner.with_lanes(lanes);
    let part = |first: i64, vectors: Val<'k>| {
        k.serial("c", vectors, |j| store_all(k, &wide, at, j * width + first, stores));
    };
    match k.as_int(end) {
        _ if lanes == 1 => {}
        Some(end) => {
            for part_of_row in part_borders(inliner, width, end).windows(2) {
                part(part_of_row[0], k.int((part_of_row[1] - part_of_row[0]) / width));
            }
        }
        None => part(0, whole),
    }
    let (first, count) = if lanes > 1 { (end, rest) } else { (k.int(0), total) };
    let one = inliner.of_one();
    k.serial("c", count, |j| store_all(k, &one, at, first + j, stores));
}
