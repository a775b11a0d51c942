//! Attention of one query on a CPU. All query heads of a key head go together over its keys. The cache is cut into slices
//! that workers share; each leaves unfinished sums, and a second kernel ([`super::merge`]) joins them ("flash-decoding"). Of few slices
//! they share the key heads as well ([`super::shares`]).
//!
//! A worker goes block by block through all its key heads of a slice, so that it reads whole rows one after the other, and asks
//! for the next block while it works on this one. It loads its first block at once.
//!
//! A vector of scores holds some keys times all heads of the group, so that maxima, exponentials and sums of weights need
//! no reduction over lanes (see [`super::block`] and [`super::scores`]).

use super::block::Block;
use super::queries::{Operands, Queries};
use super::schedule::{Ahead, Params};
use super::shares::{Run, Shares};
use super::{HIDDEN, Problem, at_least_zero, ceil_div, lanes_of};
use crate::inline::{Index, Inliner, RowAt};
use crate::rows::emit_at;
use mlcc_ir::builder::KernelBuilder;
use mlcc_ir::graph::ValueId;
use mlcc_ir::kernel::{BinOp, BufId, ExprId, Space, Ty};
use mlcc_ir::types::DType;
use mlcc_kernel_lang::{CACHE_LINE, Recorder};

/// Buffers of one item on the stack (for every key head a row of what is described), and one of its key heads.
#[derive(Clone, Copy)]
pub(super) struct Item {
    pub params: Params,
    /// `[sets, vectors, parts of a row, heads of a vector, columns of a part]`; what stands for no head or column is zero.
    pub q: BufId,
    /// `[sets, heads, value_size]`.
    pub sums: BufId,
    /// Running maxima, `[sets, lanes]`: those of the slots, repeated for every key of a vector.
    pub max: BufId,
    /// Sums of weights, `[sets, lanes]`: as many for each head as a vector has keys.
    pub total: BufId,
    /// ALiBi slopes, `[sets, lanes]`.
    pub slopes: Option<BufId>,
    /// Scores, then weights of a block and a set, `[vectors, lanes]`; of one key head only.
    pub weights: BufId,
    /// Some keys as f32, `[keys that are summed together, padded size]`; of one key head only.
    pub rows: BufId,
    /// What the change of the maxima makes of older sums: `[lanes]`; of one key head only.
    pub factor: BufId,
    pub operands: Operands,
    pub head: ExprId,
    /// Key heads of this item: the first, and how many.
    heads: (ExprId, ExprId),
    /// Keys of this item.
    start: ExprId,
    pub end: ExprId,
    pub last: ExprId,
    pub prefix: Option<ExprId>,
}

/// Rows of this step that a cache gets: values `[1, kv, _]` of a group, and the caches that they go to, behind the rows of
/// earlier tokens.
pub struct NewRows<'a> {
    /// Binds the operands of the group; one lane.
    pub inliner: Inliner<'a, 'static>,
    pub stores: Vec<(ValueId, BufId)>,
}

/// Writes unfinished sums, `out: f32[slices, heads, partial]`. Whoever has the last key appends its row first (`new_rows`), for the key
/// heads that it has: nobody else reads that.
pub fn emit(kb: &mut KernelBuilder, a: &Problem, params: Params, new_rows: &[NewRows], out: BufId) {
    let t = kb.dim(&a.t);
    let last = kb.add_int(t, -1);
    let prefix = a.prefix(kb);
    let first = a.first_key(kb, last);
    let shares = Shares::new(kb, first, t);
    let queries = Queries::new(kb, a, params);
    let run = Run::new(kb, a, &shares);
    kb.serial("slice", run.slices, |kb, number| {
        let slice = kb.add(run.first, number);
        let slice = kb.let_("slice", slice);
        let heads = run.of(kb, slice);
        let from = kb.mul(slice, shares.keys);
        let start = kb.add(first, from);
        let end = kb.add(start, shares.keys);
        let end = kb.min(end, t);
        let floats = |kb: &mut KernelBuilder, name: &str, len: i64| {
            kb.alloc(name, DType::F32, len as usize, Space::Stack)
        };
        let (rows, vectors) = (a.kv * params.rows(), a.kv * params.sets * i64::from(params.lanes));
        let zero = kb.int(0);
        let operands = queries.operands;
        // Floats of keys that are summed together.
        let keys = match operands {
            Operands::Floats => params.together() * params.padded(a.size),
            Operands::Bytes(_) | Operands::Words(_) => 1,
        };
        let item = Item {
            params,
            q: queries.q,
            sums: floats(kb, "sums", rows * a.value_size),
            max: floats(kb, "max", vectors),
            total: floats(kb, "total", vectors),
            slopes: queries.slopes,
            weights: floats(kb, "weights", params.block * params.slots),
            rows: floats(kb, "rows", keys),
            factor: floats(kb, "factor", i64::from(params.lanes)),
            operands,
            head: zero,
            heads,
            start: kb.let_("start", start),
            end: kb.let_("end", end),
            last,
            prefix,
        };
        item.append(kb, new_rows, t);
        match &operands {
            Operands::Floats => {
                item.clear_rows(kb, item.rows, zero, params.together(), params.padded(a.size))
            }
            Operands::Bytes(codes) => item.clear_key_codes(kb, a, codes),
            Operands::Words(words) => item.clear_key_words(kb, a, words),
        }
        item.each_key_head(kb, |kb, item| item.clear(kb, a, slice));
        if let Some(sinks) = a.sinks() {
            // With the first slice.
            let (zero, all) = (kb.int(0), a.sinks_behind(kb, last));
            let later = kb.lt(zero, slice);
            let count = kb.select(later, zero, all);
            let end = kb.let_("sinks", count);
            let sinks_of_item = Item { start: zero, end, ..item };
            sinks_of_item.each_key_head(kb, |kb, item| item.load_queries(kb, &sinks));
            sinks_of_item.run(kb, &sinks);
            item.each_key_head(kb, |kb, item| item.load_queries(kb, a));
        } else {
            let begins = kb.binary(BinOp::Le, number, zero);
            if !params.in_order {
                kb.if_(begins, |kb| item.touch(kb, a, item.start));
            }
            item.load_queries_once(kb, a, queries.loaded);
        }
        item.run(kb, a);
        item.each_key_head(kb, |kb, item| item.store(kb, a, slice, out));
    });
}

impl Item {
    /// Runs `body` with each of the key heads of this item.
    pub(super) fn each_key_head(&self, kb: &mut KernelBuilder, body: impl FnOnce(&mut KernelBuilder, Item)) {
        let (first, count) = self.heads;
        kb.serial("key_head", count, |kb, i| {
            let head = kb.add(first, i);
            let head = kb.let_("head", head);
            body(kb, Item { head, ..*self });
        });
    }

    /// Appends the rows of the last key, where this item has it.
    fn append(&self, kb: &mut KernelBuilder, rows: &[NewRows], t: ExprId) {
        if rows.is_empty() {
            return;
        }
        // Slices behind the last one have no keys.
        let (some, last) = (kb.lt(self.start, t), kb.binary(BinOp::Le, t, self.end));
        let here = kb.binary(BinOp::And, some, last);
        kb.if_(here, |kb| {
            self.each_key_head(kb, |kb, item| {
                let zero = kb.int(0);
                let (row, place) = ([zero, item.head], [item.last, item.head]);
                Recorder::within(kb, |k| {
                    let [row, stored] = [row, place].map(|at| at.map(|index| Index::scalar(k.val(index))));
                    for NewRows { inliner, stores } in rows {
                        emit_at(k, inliner, RowAt { row: &row, stored: &stored }, stores, self.params.lanes);
                    }
                });
            });
        });
    }

    /// Adds the keys `start..end`.
    fn run(&self, kb: &mut KernelBuilder, a: &Problem) {
        let keys = kb.sub(self.end, self.start);
        let keys = at_least_zero(kb, keys);
        let most = kb.int(self.params.block);
        let blocks = ceil_div(kb, keys, most);
        kb.serial("block", blocks, |kb, i| {
            let at = kb.mul(i, most);
            let first = kb.add(self.start, at);
            let first = kb.let_("first", first);
            let rest = kb.sub(self.end, first);
            let count = kb.min(rest, most);
            let count = kb.let_("count", count);
            if self.params.in_order {
                self.touch(kb, a, first);
            }
            self.each_key_head(kb, |kb, item| Block { a, item, first, count }.emit(kb));
        });
    }

    /// Asks for `width` elements of the block from row `first` on, ahead of its turn: from number `at` of the share of this
    /// head on. The heads share the block in the order of memory. Requests are spread over the work, because a core keeps
    /// track of few lines at a time and waits when there are more.
    pub fn ask(
        &self,
        kb: &mut KernelBuilder,
        a: &Problem,
        ahead: Ahead,
        first: ExprId,
        (at, width): (ExprId, i64),
    ) {
        let Ahead { size, bytes, .. } = ahead;
        let (before, of_head) =
            (kb.mul_int(first, a.kv * size), kb.mul_int(self.head, self.params.block * size));
        let base = kb.add(before, of_head);
        let base = kb.let_("base", base);
        let (last, line) = (self.last_element(kb, a, ahead), CACHE_LINE as i64 / bytes);
        for from in (0..width).step_by(line as usize) {
            let at = kb.add_int(at, from);
            let place = kb.add(base, at);
            let place = kb.min(place, last);
            ahead.ask(kb, place);
        }
    }

    /// The last element of all rows.
    fn last_element(&self, kb: &mut KernelBuilder, a: &Problem, ahead: Ahead) -> ExprId {
        let end = kb.add_int(self.last, 1);
        let end = kb.mul_int(end, a.kv * ahead.size);
        let last = kb.add_int(end, -1);
        kb.let_("last_element", last)
    }

    /// Reads a byte of each line of the key heads of the block from row `first` on.
    fn touch(&self, kb: &mut KernelBuilder, a: &Problem, first: ExprId) {
        let (first_head, heads) = self.heads;
        for ahead in self.params.first.into_iter().flatten() {
            let (last, line) = (self.last_element(kb, a, ahead), CACHE_LINE as i64 / ahead.bytes);
            let (rest, most) = (kb.sub(self.end, first), kb.int(self.params.block));
            let keys = kb.min(rest, most);
            let (before, elements, by) =
                (kb.mul_int(first_head, ahead.size), kb.mul_int(heads, ahead.size), kb.int(line));
            let lines = ceil_div(kb, elements, by);
            kb.serial("key", keys, |kb, key| {
                let row = kb.add(first, key);
                let row = kb.mul_int(row, a.kv * ahead.size);
                let from = kb.add(row, before);
                kb.serial("line", lines, |kb, i| {
                    let at = kb.mul_int(i, line);
                    let place = kb.add(from, at);
                    let place = kb.min(place, last);
                    ahead.ask(kb, place);
                });
            });
        }
    }

    /// Place of a set of this key head in a buffer `[sets, lanes]`.
    pub fn vector_of(&self, kb: &mut KernelBuilder, set: ExprId) -> ExprId {
        let first = kb.mul_int(self.head, self.params.sets);
        let row = kb.add(first, set);
        kb.mul_int(row, i64::from(self.params.lanes))
    }

    /// Place of a row of a query head in a buffer `[sets, heads, size]`: of number `g` in the group.
    pub fn row_of(&self, kb: &mut KernelBuilder, g: ExprId, size: i64) -> ExprId {
        let first = kb.mul_int(self.head, self.params.rows());
        let row = kb.add(first, g);
        kb.mul_int(row, size)
    }

    /// Runs `body(number in the group, query head)` for every query head of the key head.
    pub(super) fn each_head(
        &self,
        kb: &mut KernelBuilder,
        a: &Problem,
        body: impl FnOnce(&mut KernelBuilder, ExprId, ExprId),
    ) {
        let group = kb.int(a.group);
        kb.serial("g", group, |kb, g| {
            let base = kb.mul_int(self.head, a.group);
            let head = kb.add(base, g);
            body(kb, g, head);
        });
    }

    /// Place of a query head in a buffer `[sets, lanes]`.
    pub(super) fn slot(&self, kb: &mut KernelBuilder, g: ExprId) -> ExprId {
        let heads = kb.int(self.params.heads);
        let (set, slot) = (kb.div(g, heads), kb.rem(g, heads));
        let (at, lane) = (self.vector_of(kb, set), self.params.lane_of(kb, slot));
        kb.add(at, lane)
    }

    /// Zeros in `rows` rows of `size` floats from `first` on.
    pub(super) fn clear_rows(&self, kb: &mut KernelBuilder, buf: BufId, first: ExprId, rows: i64, size: i64) {
        let lanes = lanes_of(size, self.params.lanes);
        let nothing = kb.constant(0.0, Ty::vector(DType::F32, lanes));
        columns(kb, rows * size, lanes, |kb, c| {
            let at = kb.add(first, c);
            kb.store_vec(buf, at, nothing);
        });
    }

    /// No keys seen yet.
    fn clear(&self, kb: &mut KernelBuilder, a: &Problem, slice: ExprId) {
        let (lanes, sets, zero) = (self.params.lanes, self.params.sets, kb.int(0));
        let row = self.row_of(kb, zero, a.value_size);
        self.clear_rows(kb, self.sums, row, self.params.rows(), a.value_size);
        let first = self.vector_of(kb, zero);
        self.clear_rows(kb, self.total, first, sets, i64::from(lanes));
        let hidden = kb.constant(HIDDEN, Ty::vector(DType::F32, lanes));
        columns(kb, sets * i64::from(lanes), lanes, |kb, c| {
            let at = kb.add(first, c);
            kb.store_vec(self.max, at, hidden);
        });
        if a.null.is_some() {
            // With the first slice.
            let is_first = kb.binary(BinOp::Le, slice, zero);
            kb.if_(is_first, |kb| self.see_null(kb, a));
        }
    }

    /// The key without a value is seen.
    fn see_null(&self, kb: &mut KernelBuilder, a: &Problem) {
        self.each_head(kb, a, |kb, g, head| {
            let Some(logit) = a.null_logit(kb, head) else { return };
            let (logit, slot, one) = (kb.let_("logit", logit), self.slot(kb, g), kb.float(1.0));
            let slot = kb.let_("slot", slot);
            for key in 0..self.params.keys() {
                let at = kb.add_int(slot, key * self.params.vectors());
                kb.store(self.max, at, logit);
            }
            kb.store(self.total, slot, one);
        });
    }

    /// The sum of all weights of a head of the group.
    fn sum_of_weights(&self, kb: &mut KernelBuilder, slot: ExprId) -> ExprId {
        let parts = (0..self.params.keys()).map(|key| {
            let at = kb.add_int(slot, key * self.params.vectors());
            kb.load(self.total, at)
        });
        let parts: Vec<ExprId> = parts.collect();
        let total = parts.into_iter().reduce(|a, b| kb.add(a, b)).expect("a vector has keys");
        kb.let_("total", total)
    }

    fn store(&self, kb: &mut KernelBuilder, a: &Problem, slice: ExprId, out: BufId) {
        let lanes = lanes_of(a.value_size, self.params.lanes);
        self.each_head(kb, a, |kb, g, head| {
            let slot = self.slot(kb, g);
            let slot = kb.let_("slot", slot);
            let (from, row) = (partial_row(kb, a, slice, head), self.row_of(kb, g, a.value_size));
            match self.operands {
                Operands::Bytes(_) => self.store_mixed(kb, a, (from, row), out),
                Operands::Floats | Operands::Words(_) => columns(kb, a.value_size, lanes, |kb, c| {
                    let at = kb.add(row, c);
                    let value = kb.load_vec(self.sums, at, lanes);
                    let at = kb.add(from, c);
                    kb.store_vec(out, at, value);
                }),
            }
            let (max, total) = (kb.load(self.max, slot), self.sum_of_weights(kb, slot));
            for (i, value) in [max, total].into_iter().enumerate() {
                let at = kb.add_int(from, a.value_size + i as i64);
                kb.store(out, at, value);
            }
        });
    }
}

/// Start of a head's unfinished sums in a slice.
pub(super) fn partial_row(kb: &mut KernelBuilder, a: &Problem, slice: ExprId, row: ExprId) -> ExprId {
    let before = kb.mul_int(slice, a.heads());
    let row = kb.add(before, row);
    kb.mul_int(row, Params::partial(a))
}

/// A serial loop over vectors of columns.
pub(super) fn columns(
    kb: &mut KernelBuilder,
    size: i64,
    lanes: u32,
    body: impl FnOnce(&mut KernelBuilder, ExprId),
) {
    let count = kb.int(size / i64::from(lanes));
    kb.serial("c", count, |kb, i| {
        let c = kb.mul_int(i, i64::from(lanes));
        body(kb, c);
    });
}
