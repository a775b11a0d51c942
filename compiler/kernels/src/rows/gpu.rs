//! Rows on a GPU: a block per row.

use super::columns_of;
use crate::inline::{Index, Inliner, RowAt, store_all};
use mlcc_ir::compute::RedOp;
use mlcc_ir::dim::Dim;
use mlcc_ir::graph::ValueId;
use mlcc_ir::kernel::{BufId, Space, Ty};
use mlcc_ir::types::DType;
use mlcc_kernel_lang::{Recorder, Team, Val};

/// Threads of a block that works on a row.
const THREADS: i64 = 256;

/// Stores outputs of these columns.
pub(super) fn store<'k>(
    k: &'k Recorder,
    inliner: &Inliner<'_, 'k>,
    at: RowAt<'_, 'k>,
    columns: &Dim,
    stores: &[(ValueId, BufId)],
) {
    Team::new(k, THREADS).run(|t| strided(k, columns, t, |column| store_all(k, inliner, at, column, stores)));
}

/// `body(column)` for every column of a thread.
fn strided<'k>(k: &'k Recorder, columns: &Dim, t: Val<'k>, body: impl FnOnce(Val<'k>)) {
    k.serial("j", &columns.ceil_div(THREADS), |j| {
        let column = j * THREADS + t;
        match columns.as_const().is_some_and(|c| c % THREADS == 0) {
            true => body(column),
            false => k.when(column.lt(k.dim(columns)), || body(column)),
        }
    });
}

/// Partial results per thread, then a tree in shared memory. Gives a load of the result, valid in all threads.
pub(super) fn reduce<'k>(
    k: &'k Recorder,
    inliner: &Inliner<'_, 'k>,
    op: RedOp,
    input: ValueId,
    leading: &[Index<'k>],
) -> Val<'k> {
    let dtype = if inliner.f.ty(input).dtype.is_int() { DType::I32 } else { DType::F32 };
    let identity = if dtype.is_float() { op.identity() } else { 0.0 };
    let partial = k.alloc("partial", dtype, [THREADS], Space::Shared);
    let team = Team::new(k, THREADS);
    team.run(|t| {
        let acc = k.reg("acc", k.literal(identity, Ty::scalar(dtype)));
        strided(k, &columns_of(inliner, input), t, |column| {
            let index = [leading, &[Index::scalar(column)]].concat();
            let value = inliner.value(k, input, &index).cast(dtype);
            acc.set(acc.get().with(op.bin(), value));
        });
        partial.set([t], acc.get());
    });
    k.barrier();
    let mut half = THREADS / 2;
    while half > 0 {
        team.run(|t| {
            k.when(t.lt(half), || {
                partial.set([t], partial.at([t]).with(op.bin(), partial.at([t + half])));
            });
        });
        k.barrier();
        half /= 2;
    }
    partial.at([0])
}
