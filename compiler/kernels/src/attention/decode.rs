//! Attention of one query on a CPU. All query heads of a key head go together over its keys. The cache is cut into slices
//! that workers share; each leaves unfinished sums, and a second kernel ([`super::merge`]) joins them ("flash-decoding").
//!
//! A worker goes block by block through all key heads of a slice, so that it reads whole rows one after the other, and asks
//! for the next block while it works on this one.
//!
//! A vector of scores holds some keys times all heads of the group, so that maxima, exponentials and sums of weights need
//! no reduction over lanes (see [`super::block`] and [`super::scores`]).

use super::block::Block;
use super::codes::Codes;
use super::schedule::{Ahead, Params, SLICES};
use super::{HIDDEN, Problem, SLICE_KEYS, at_least_zero, ceil_div, lanes_of};
use crate::contraction::CACHE_LINE;
use mlcc_ir::builder::KernelBuilder;
use mlcc_ir::kernel::{BinOp, BufId, ExprId, Space, Stmt, Ty};
use mlcc_ir::types::DType;

/// A slice has at least this many keys while there are few of them, and at least [`LONG_SLICE`] where there are more than
/// [`FEW_SLICES`]: each leaves sums that are joined, which takes as long as 5 to 10 keys.
const FEW_SLICES: i64 = 8;
const LONG_SLICE: i64 = 256;
/// How the keys `first .. t` are shared: by length alone, so that any number of workers gives the same sums.
pub(super) struct Shares {
    pub slices: ExprId,
    /// Keys of a slice.
    pub keys: ExprId,
}

impl Shares {
    pub fn new(kb: &mut KernelBuilder, first: ExprId, t: ExprId) -> Shares {
        let count = kb.sub(t, first);
        let count = kb.let_("keys", count);
        let slices = |kb: &mut KernelBuilder, least: i64, most: i64| {
            let (least, most) = (kb.int(least), kb.int(most));
            let used = ceil_div(kb, count, least);
            kb.min(used, most)
        };
        let (few, more) = (slices(kb, SLICE_KEYS, FEW_SLICES), slices(kb, LONG_SLICE, SLICES));
        let used = kb.max(few, more);
        let used = kb.let_("slices", used);
        let (part, step) = (ceil_div(kb, count, used), kb.int(16));
        let steps = ceil_div(kb, part, step);
        let keys = kb.mul(steps, step);
        Shares { slices: used, keys: kb.let_("slice_keys", keys) }
    }
}

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
    /// In place of `q` (then one row) and `rows`, where integers meet.
    pub codes: Option<Codes>,
    pub head: ExprId,
    /// Keys of this item.
    start: ExprId,
    pub end: ExprId,
    pub last: ExprId,
    pub prefix: Option<ExprId>,
}

/// Queries on the stack, which all items of a worker share: see [`Item`].
struct Queries {
    q: BufId,
    slopes: Option<BufId>,
    codes: Option<Codes>,
    /// 1 once they are there.
    loaded: BufId,
}

impl Queries {
    fn new(kb: &mut KernelBuilder, a: &Problem, params: Params) -> Queries {
        let codes = Codes::new(kb, a, params);
        let floats = |kb: &mut KernelBuilder, name: &str, len: i64| {
            kb.alloc(name, DType::F32, len as usize, Space::Stack)
        };
        let vectors = a.kv * params.sets * i64::from(params.lanes);
        let q = floats(kb, "q", if codes.is_some() { a.size } else { a.kv * params.queries(a) });
        let slopes = a.slopes.map(|_| floats(kb, "slopes", vectors));
        let loaded = kb.alloc("loaded", DType::I32, 1, Space::Stack);
        let (zero, none) = (kb.int(0), kb.int_of(0, DType::I32));
        kb.store(loaded, zero, none);
        Queries { q, slopes, codes, loaded }
    }
}

/// Writes unfinished sums, `out: f32[slices, heads, partial]`.
pub fn emit(kb: &mut KernelBuilder, a: &Problem, params: Params, out: BufId) {
    let t = kb.dim(&a.t);
    let last = kb.add_int(t, -1);
    let prefix = a.prefix(kb);
    let first = a.first_key(kb, last);
    let shares = Shares::new(kb, first, t);
    let queries = Queries::new(kb, a, params);
    kb.par("slice", shares.slices, |kb, slice| {
        let from = kb.mul(slice, shares.keys);
        let start = kb.add(first, from);
        let end = kb.add(start, shares.keys);
        let end = kb.min(end, t);
        let floats = |kb: &mut KernelBuilder, name: &str, len: i64| {
            kb.alloc(name, DType::F32, len as usize, Space::Stack)
        };
        let (rows, vectors) = (a.kv * params.rows(), a.kv * params.sets * i64::from(params.lanes));
        let zero = kb.int(0);
        let codes = queries.codes;
        // Floats of keys that are summed together.
        let keys = if codes.is_some() { 0 } else { params.together() * params.padded(a.size) };
        let item = Item {
            params,
            q: queries.q,
            sums: floats(kb, "sums", rows * a.value_size),
            max: floats(kb, "max", vectors),
            total: floats(kb, "total", vectors),
            slopes: queries.slopes,
            weights: floats(kb, "weights", params.block * params.slots),
            rows: floats(kb, "rows", keys.max(1)),
            factor: floats(kb, "factor", i64::from(params.lanes)),
            codes,
            head: zero,
            start: kb.let_("start", start),
            end: kb.let_("end", end),
            last,
            prefix,
        };
        match &codes {
            Some(codes) => item.clear_key_codes(kb, a, codes),
            None => item.clear_rows(kb, item.rows, zero, params.together(), params.padded(a.size)),
        }
        item.each_key_head(kb, a, |kb, item| item.clear(kb, a));
        if let Some(sinks) = a.sinks() {
            // With the first slice.
            let (zero, all) = (kb.int(0), a.sinks_behind(kb, last));
            let later = kb.lt(zero, slice);
            let count = kb.select(later, zero, all);
            let end = kb.let_("sinks", count);
            let sinks_of_item = Item { start: zero, end, ..item };
            sinks_of_item.each_key_head(kb, a, |kb, item| item.load_queries(kb, &sinks));
            sinks_of_item.run(kb, &sinks);
            item.each_key_head(kb, a, |kb, item| item.load_queries(kb, a));
        } else {
            item.load_queries_once(kb, a, queries.loaded);
        }
        item.run(kb, a);
        item.each_key_head(kb, a, |kb, item| item.store(kb, a, slice, out));
    });
}

impl Item {
    /// Runs `body` with each of the key heads.
    fn each_key_head(
        &self,
        kb: &mut KernelBuilder,
        a: &Problem,
        body: impl FnOnce(&mut KernelBuilder, Item),
    ) {
        let count = kb.int(a.kv);
        kb.serial("key_head", count, |kb, head| body(kb, Item { head, ..*self }));
    }

    /// What the first item of a worker does: it asks for its first block, and prepares the queries.
    fn load_queries_once(&self, kb: &mut KernelBuilder, a: &Problem, loaded: BufId) {
        let (zero, none) = (kb.int(0), kb.int_of(0, DType::I32));
        let old = kb.load(loaded, zero);
        let missing = kb.binary(BinOp::Le, old, none);
        kb.if_(missing, |kb| {
            if !self.params.in_order {
                self.ask_for(kb, a, self.start, self.end);
            }
            self.each_key_head(kb, a, |kb, item| item.load_queries(kb, a));
            let there = kb.int_of(1, DType::I32);
            kb.store(loaded, zero, there);
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
                self.ask_for(kb, a, first, self.end);
            }
            self.each_key_head(kb, a, |kb, item| Block { a, item, first, count }.emit(kb));
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
        let Ahead { buf, instr, size, bytes } = ahead;
        let row = a.kv * size;
        let (before, of_head) = (kb.mul_int(first, row), kb.mul_int(self.head, self.params.block * size));
        let base = kb.add(before, of_head);
        let base = kb.let_("base", base);
        let end = kb.add_int(self.last, 1);
        let end = kb.mul_int(end, row);
        let last = kb.add_int(end, -1);
        let last = kb.let_("last_element", last);
        let line = CACHE_LINE as i64 / bytes;
        for from in (0..width).step_by(line as usize) {
            let at = kb.add_int(at, from);
            let place = kb.add(base, at);
            let place = kb.min(place, last);
            let element = kb.load(buf, place);
            kb.push(Stmt::Instr { instr, args: vec![element] });
        }
    }

    /// Asks for the block of keys `first..end`: the first one, which nobody asked for where a worker begins, or each.
    fn ask_for(&self, kb: &mut KernelBuilder, a: &Problem, first: ExprId, end: ExprId) {
        for ahead in self.params.ahead.into_iter().flatten() {
            let line = CACHE_LINE as i64 / ahead.bytes;
            let (rest, most) = (kb.sub(end, first), kb.int(self.params.block));
            let keys = kb.min(rest, most);
            let elements = kb.mul_int(keys, a.kv * ahead.size);
            let by = kb.int(line);
            let lines = ceil_div(kb, elements, by);
            kb.serial("line", lines, |kb, i| {
                let at = kb.mul_int(i, line);
                self.ask(kb, a, ahead, first, (at, 1));
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
    fn each_head(
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
    fn slot(&self, kb: &mut KernelBuilder, g: ExprId) -> ExprId {
        let heads = kb.int(self.params.heads);
        let (set, slot) = (kb.div(g, heads), kb.rem(g, heads));
        let (at, lane) = (self.vector_of(kb, set), self.params.lane_of(kb, slot));
        kb.add(at, lane)
    }

    /// Place of the queries of a set.
    pub fn queries_of(&self, kb: &mut KernelBuilder, a: &Problem, set: ExprId) -> ExprId {
        let first = kb.mul_int(self.head, self.params.queries(a));
        let before = kb.mul_int(set, self.params.slots * self.params.padded(a.size));
        kb.add(first, before)
    }

    /// Scaled queries of head `g`.
    fn load_query(&self, kb: &mut KernelBuilder, a: &Problem, g: ExprId, head: ExprId) {
        let (params, zero) = (self.params, kb.int(0));
        let (lanes, part) = (lanes_of(a.size, params.lanes), params.part());
        let (heads, across, columns_of) = (kb.int(params.heads), kb.int(params.across), kb.int(part));
        let (set, slot) = (kb.div(g, heads), kb.rem(g, heads));
        let (vector, place) = (kb.div(slot, across), kb.rem(slot, across));
        let row = self.queries_of(kb, a, set);
        let before = kb.mul_int(vector, params.across * params.padded(a.size));
        let place = kb.mul_int(place, part);
        let row = kb.add(row, before);
        let row = kb.add(row, place);
        let row = kb.let_("row", row);
        columns(kb, a.size, lanes, |kb, c| {
            let value = a.query(kb, zero, head, c, lanes);
            let value = kb.let_("q", value);
            let (number, within) = (kb.div(c, columns_of), kb.rem(c, columns_of));
            let at = kb.mul_int(number, params.lanes.into());
            let at = kb.add(row, at);
            let at = kb.add(at, within);
            let width = lanes.min(part as u32);
            for piece in 0..lanes / width {
                let from = piece * width;
                let value = match width == lanes {
                    true => value,
                    false => kb.shuffle(value, None, (from..from + width).collect()),
                };
                let at = kb.add_int(at, i64::from(piece * params.lanes));
                kb.store_vec(self.q, at, value);
            }
        });
    }

    /// Scaled queries, and slopes.
    fn load_queries(&self, kb: &mut KernelBuilder, a: &Problem) {
        if let Some(codes) = &self.codes {
            self.clear_codes(kb, a, codes);
            self.each_head(kb, a, |kb, g, head| self.load_query_codes(kb, a, codes, (g, head)));
        } else {
            let (zero, rows) = (kb.int(0), self.params.sets * self.params.slots);
            let first = self.queries_of(kb, a, zero);
            self.clear_rows(kb, self.q, first, rows, self.params.padded(a.size));
            self.each_head(kb, a, |kb, g, head| self.load_query(kb, a, g, head));
        }
        let Some(slopes) = self.slopes else { return };
        let zero = kb.int(0);
        let first = self.vector_of(kb, zero);
        self.clear_rows(kb, slopes, first, self.params.sets, i64::from(self.params.lanes));
        self.each_head(kb, a, |kb, g, head| {
            let at = self.slot(kb, g);
            if let Some(slope) = a.slope(kb, head) {
                for key in 0..self.params.keys() {
                    let at = kb.add_int(at, key * self.params.vectors());
                    kb.store(slopes, at, slope);
                }
            }
        });
    }

    /// Zeros in `rows` rows of `size` floats from `first` on.
    fn clear_rows(&self, kb: &mut KernelBuilder, buf: BufId, first: ExprId, rows: i64, size: i64) {
        let lanes = lanes_of(size, self.params.lanes);
        let nothing = kb.constant(0.0, Ty::vector(DType::F32, lanes));
        columns(kb, rows * size, lanes, |kb, c| {
            let at = kb.add(first, c);
            kb.store_vec(buf, at, nothing);
        });
    }

    /// No keys seen yet.
    fn clear(&self, kb: &mut KernelBuilder, a: &Problem) {
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
            match self.codes {
                Some(_) => self.store_mixed(kb, a, (from, row), out),
                None => columns(kb, a.value_size, lanes, |kb, c| {
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
