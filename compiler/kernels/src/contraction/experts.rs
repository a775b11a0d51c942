//! Products of rows with the matrices that were chosen for them. All rows of a matrix go together through the product of
//! many rows, so that its weights are read and unpacked once for them, whatever the order of the choices.
//!
//! Which rows those are is told by a list of all choices in the order of their matrices (a counting sort), which every
//! worker makes for itself: a few thousand numbers, against thousands of multiplications for each of them. The workers then
//! share the columns of each matrix, so that a matrix with many rows keeps all of them busy.

use super::{Chosen, Epilogue, MatMul, all_rows, chunk_of_rows, slices, table};
use crate::params::MatMulParams;
use mlcc_ir::builder::KernelBuilder;
use mlcc_ir::kernel::{BufId, ExprId, Space};
use mlcc_ir::types::DType;
use mlcc_quant::TILE;

/// The matrices that rows of x chose.
#[derive(Clone, Copy, Debug)]
pub struct Choice {
    /// i32 `[rows, slots]`: a matrix below `experts` for each row of the result.
    pub ids: BufId,
    pub experts: usize,
    pub slots: i64,
    /// True if all slots of a row share one row of x, else each has its own.
    pub shared: bool,
}

impl Choice {
    /// Rows of the result that share a row of x.
    fn share(&self) -> i64 {
        if self.shared { self.slots } else { 1 }
    }

    /// The matrix of a row of the result.
    fn expert(&self, kb: &mut KernelBuilder, row: ExprId) -> ExprId {
        let id = kb.load(self.ids, row);
        let id = kb.cast(id, DType::I64);
        kb.let_("expert", id)
    }
}

/// Most rows of the result whose choices are sorted at a time: 16 KiB on the stack.
const LIST: i64 = 4096;

/// Emits, for a CPU, the product of each of `spec.m` rows with the matrices that it chose; `spec.n` is the number of
/// rows of one matrix (whole tiles), the epilogue sees row `row * slots + slot`. Codes of integer activations come one row
/// after the other.
///
/// Gives the number of slices of columns that workers share out, as [`super::emit_matmul`] does.
pub fn emit_experts(
    kb: &mut KernelBuilder,
    spec: &MatMul,
    params: &MatMulParams,
    choice: &Choice,
    epilogue: &mut Epilogue,
) -> i64 {
    assert!(spec.n.is_multiple_of(TILE), "a matrix has whole tiles");
    let lookup = table(kb, params);
    if kb.kernel().exprs.as_int(spec.m) == Some(1) {
        let slots = kb.int(choice.slots);
        kb.serial("slot", slots, |kb, slot| {
            let expert = choice.expert(kb, slot);
            let chosen = Chosen { last: slot, ..matrix(kb, spec, choice, expert) };
            let one = kb.int(1);
            chunk_of_rows(
                kb,
                &MatMul { chosen: Some(chosen), ..*spec },
                params,
                lookup,
                (slot, one),
                epilogue,
            );
        });
        return slices(spec, params.tiles);
    }
    let together = (LIST / choice.slots).max(1);
    let list = kb.alloc("rows", DType::I32, (together * choice.slots) as usize, Space::Stack);
    // First the end of each matrix's rows, shifted by one: what is before the rows of matrix `e` lies at `e`.
    let bounds = kb.alloc("bounds", DType::I32, choice.experts + 2, Space::Stack);
    let by = kb.int(together);
    let up = kb.add_int(spec.m, together - 1);
    let passes = kb.div(up, by);
    kb.serial("pass", passes, |kb, pass| {
        let before = kb.mul_int(pass, together);
        let left = kb.sub(spec.m, before);
        let count = kb.min(left, by);
        let (first, count) = (kb.mul_int(before, choice.slots), kb.mul_int(count, choice.slots));
        sort(kb, choice, (first, count), list, bounds);
        let start = kb.int(0);
        let zero = kb.load(bounds, start);
        let zero = kb.cast(zero, DType::I64);
        let zero = Some(kb.let_("zero", zero));
        let experts = kb.int(choice.experts as i64);
        kb.serial("expert", experts, |kb, expert| {
            let next = kb.add_int(expert, 1);
            let (begin, end) = (kb.load(bounds, expert), kb.load(bounds, next));
            let (begin, end) = (kb.cast(begin, DType::I64), kb.cast(end, DType::I64));
            let (begin, end) = (kb.let_("begin", begin), kb.let_("end", end));
            let some = kb.lt(begin, end);
            kb.if_(some, |kb| {
                let last = kb.add_int(end, -1);
                let chosen = Chosen { list: Some(list), last, zero, ..matrix(kb, spec, choice, expert) };
                let rows = (begin, kb.sub(end, begin));
                all_rows(kb, &MatMul { chosen: Some(chosen), ..*spec }, params, lookup, rows, epilogue);
            });
        });
    });
    slices(spec, params.tiles)
}

/// The place of a matrix among the weights.
fn matrix(kb: &mut KernelBuilder, spec: &MatMul, choice: &Choice, expert: ExprId) -> Chosen {
    let first = kb.mul_int(expert, (spec.n / TILE * spec.tile_len()) as i64);
    let first = kb.let_("matrix", first);
    Chosen { first, list: None, last: expert, share: choice.share(), zero: None }
}

/// Lists `count` rows of the result from `first` in the order of their matrices; those of matrix `e` lie from `bounds[e]` to
/// `bounds[e + 1]`.
fn sort(
    kb: &mut KernelBuilder,
    choice: &Choice,
    (first, count): (ExprId, ExprId),
    list: BufId,
    bounds: BufId,
) {
    let (none, one) = (kb.int_of(0, DType::I32), kb.int_of(1, DType::I32));
    let cells = kb.int(choice.experts as i64 + 2);
    kb.serial("e", cells, |kb, e| kb.store(bounds, e, none));
    // How many rows matrix `e` has, at `e + 2`.
    kb.serial("i", count, |kb, i| {
        let row = kb.add(first, i);
        let expert = choice.expert(kb, row);
        let at = kb.add_int(expert, 2);
        let old = kb.load(bounds, at);
        let new = kb.add(old, one);
        kb.store(bounds, at, new);
    });
    // Where its rows begin, at `e + 1`.
    let steps = kb.int(choice.experts as i64);
    kb.serial("e", steps, |kb, e| {
        let (at, next) = (kb.add_int(e, 1), kb.add_int(e, 2));
        let (before, here) = (kb.load(bounds, at), kb.load(bounds, next));
        let sum = kb.add(before, here);
        kb.store(bounds, next, sum);
    });
    // Each row that is placed moves the begin of the next one, up to the end of them all.
    kb.serial("i", count, |kb, i| {
        let row = kb.add(first, i);
        let expert = choice.expert(kb, row);
        let at = kb.add_int(expert, 1);
        let place = kb.load(bounds, at);
        let place = kb.let_("place", place);
        let next = kb.add(place, one);
        kb.store(bounds, at, next);
        let place = kb.cast(place, DType::I64);
        let row = kb.cast(row, DType::I32);
        kb.store(list, place, row);
    });
}
