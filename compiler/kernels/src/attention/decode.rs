//! Attention of one query on a CPU. All query heads of a key head work on its keys together. The cache is cut
//! into slices that workers share; each leaves unfinished sums, and a second kernel ([`super::merge`]) joins
//! them ("flash-decoding"). If there are few slices, workers share the key heads as well ([`super::shares`]).
//!
//! A worker goes block by block through all its key heads of a slice, so that it reads whole rows in order,
//! and prefetches the next block while it works on this one. It loads its first block at once.
//!
//! A vector of scores holds some keys times all heads of the group, so that maxima, exponentials and sums of
//! weights need no reduction over lanes (see [`super::key_block`]).

use super::key_block::KeyBlock;
use super::key_head::KeyHead;
use super::merge::{partial_results, slice_count_bits};
use super::operand::DecodeOperands;
use super::plan::DecodePlan;
use super::problem::AttentionProblem;
use super::slices::{KeySlices, WorkerSlices};
use crate::inline::{CachePage, Inliner, LaneIndex, PagedBuffer, RowAt};
use crate::rows::emit_at;
use mlcc_ir::builder::KernelBuilder;
use mlcc_ir::graph::ValueId;
use mlcc_ir::kernel::BufId;
use mlcc_ir::types::DType;
use mlcc_kernel_lang::{BufferView, Recorder, Val};

/// Rows of this step that a cache gets: values `[1, kv, _]` of a group, and the caches that they go to, after
/// the rows of earlier tokens.
pub struct NewRows<'a> {
    /// Binds the operands of the group; one lane.
    pub inliner: Inliner<'a, 'static>,
    pub stores: Vec<(ValueId, BufId)>,
    /// The pages of caches whose rows are in pages.
    pub pages: Vec<(BufId, PagedBuffer)>,
}

/// Writes unfinished sums, `out: f32[slices, heads, partial]`. The worker with the last key appends its row
/// first (`new_rows`), for the key heads that it has: no other worker reads that row.
pub fn emit(
    kb: &mut KernelBuilder,
    a: &AttentionProblem,
    plan: DecodePlan,
    new_rows: &[NewRows],
    out: BufId,
) {
    Recorder::within(kb, |k| {
        let out = partial_results(k, a, out);
        let t = k.dim(&a.t);
        let (last, prefix) = (t + -1, a.prefix(k));
        let (first, all) = (a.first_key(last), a.end_of_span(t));
        let shares = KeySlices::new(first, all);
        let per_lane = [a.kv, plan.sets, plan.lanes.into()];
        let operands = DecodeOperands::new(k, a, plan);
        let slopes = a.slopes.map(|_| k.stack("slopes", DType::F32, per_lane));
        // For each key head: 1 once its queries are loaded.
        let loaded = k.stack("loaded", DType::I32, [a.kv]);
        k.serial("key_head", a.kv, |head| loaded.set([head], k.int32(0)));
        let run = WorkerSlices::new(a, &shares);
        k.serial("slice", run.slices, |number| {
            let slice = (run.first + number).named("slice");
            let heads = run.key_heads_of(slice);
            let start = first + slice * shares.keys;
            let end = (start + shares.keys).min(all);
            let at = KeyHead {
                k,
                a,
                plan,
                accumulators: k.stack("sums", DType::F32, [a.kv, plan.rows(), a.value_size]),
                max: k.stack("max", DType::F32, per_lane),
                row_sum: k.stack("total", DType::F32, per_lane),
                slopes,
                terms: a
                    .terms
                    .map(|_| k.stack("terms", DType::F32, [plan.block / plan.keys(), plan.lanes.into()])),
                weights: k.stack("weights", DType::F32, [plan.block / plan.keys(), plan.lanes.into()]),
                rows: k.stack("rows", DType::F32, operands.float_rows(a, plan)),
                rescale: k.stack("factor", DType::F32, [plan.lanes.into()]),
                head: k.int(0),
                heads,
                start: start.named("start"),
                end: end.named("end"),
                last,
                prefix,
            };
            let slice = WorkerSlice { at, operands, number, slice, slices: shares.slices };
            slice.append(new_rows, t);
            slice.run(loaded, out);
        });
    });
}

/// A worker's part of a slice of the cache.
#[derive(Clone, Copy)]
struct WorkerSlice<'k, 'a> {
    at: KeyHead<'k, 'a>,
    operands: DecodeOperands<'k>,
    /// The number of slices that the worker had before, and the number of this one.
    number: Val<'k>,
    slice: Val<'k>,
    /// The number of all slices.
    slices: Val<'k>,
}

impl<'k> WorkerSlice<'k, '_> {
    fn run(self, loaded: BufferView<'k, 1>, out: BufferView<'k, 3>) {
        let (at, k) = (self.at, self.at.k);
        self.operands.clear_keys(&at);
        at.clear_terms();
        at.each_key_head(|at| at.clear(self.slice));
        if let Some(sinks) = at.a.over_sinks() {
            // With the first slice.
            let count = k.int(0).lt(self.slice).select(k.int(0), at.a.sinks_left(at.last));
            let of_sinks = KeyHead { a: &sinks, start: k.int(0), end: count.named("sinks"), ..at };
            of_sinks.each_key_head(|at| self.operands.load_queries(&at));
            WorkerSlice { at: of_sinks, ..self }.add_keys();
            at.each_key_head(|at| self.operands.load_queries(&at));
        } else {
            if !at.plan.in_order {
                k.when(self.number.le(0), || at.touch_rows(at.start));
            }
            self.load_queries_once(loaded);
        }
        self.add_keys();
        at.each_key_head(|at| self.store(&at, out));
    }

    /// Appends the rows of the last key, where this slice has it.
    fn append(self, rows: &[NewRows], t: Val<'k>) {
        if rows.is_empty() {
            return;
        }
        let (at, k) = (self.at, self.at.k);
        // Slices after the last one have no keys.
        k.when(at.start.lt(t) & t.le(at.end), || {
            at.each_key_head(|at| {
                let [row, stored] =
                    [[k.int(0), at.head], [at.last, at.head]].map(|at| at.map(LaneIndex::scalar));
                for NewRows { inliner, stores, pages } in rows {
                    let page = at.a.page(at.last);
                    let shift = |&(buf, pages): &(BufId, PagedBuffer)| {
                        Some((buf, pages.page_shift(page?, k.flat(buf).dtype()).named("shift")))
                    };
                    let shifts: Vec<_> = pages.iter().filter_map(shift).collect();
                    let to = RowAt { row: &row, stored: &stored, shifts: &shifts };
                    emit_at(k, inliner, to, stores, at.plan.lanes);
                }
            });
        });
    }

    /// Prepares the queries that no slice of this worker before has prepared.
    fn load_queries_once(self, loaded: BufferView<'k, 1>) {
        let k = self.at.k;
        self.at.each_key_head(|at| {
            k.when(loaded.at([at.head]).le(0), || {
                self.operands.load_queries(&at);
                loaded.set([at.head], k.int32(1));
            });
        });
    }

    /// Adds the keys `start..end`, block by block.
    fn add_keys(self) {
        let (at, k, block) = (self.at, self.at.k, self.at.plan.block);
        // In pages, blocks begin at multiples of their size, so that each lies in one page.
        let paged = at.a.table.is_some();
        let begin = if paged { (at.start / block * block).named("begin") } else { at.start };
        let blocks = at.start.lt(at.end).select((at.end - begin).div_ceil(block), 0);
        k.steps("block", blocks, block, |offset| {
            let begin = begin + offset;
            let first = if paged { begin.max(at.start) } else { begin }.named("first");
            let next = begin + block;
            let count = (at.end.min(next) - first).named("count");
            if at.plan.in_order {
                at.touch_rows(first);
            }
            let last = (first + count + -1).named("last");
            let page = at.a.page(first).map(CachePage::named);
            let next = at.rows_ahead(next);
            at.each_key_head(|at| {
                let block = KeyBlock { at, first, count, last, page, next };
                k.serial("set", at.plan.sets, |set| self.operands.add_block(&block, set));
            });
        });
    }

    /// Stores the unfinished sums of a key head.
    fn store(self, at: &KeyHead<'k, '_>, out: BufferView<'k, 3>) {
        at.each_query_head(|g, head| {
            let slot = at.max.offset(at.slot(g)).named("slot");
            let to = out.starting_at([self.slice, head, at.k.int(0)]);
            self.operands.store(at, g, to);
            let (max, total) =
                (at.max.flat().at([slot]), at.sum_of_weights(at.row_sum.flat().starting_at([slot])));
            to.set([at.a.value_size], max);
            to.set([at.a.value_size + 1], total);
            if at.a.stores_slice_count() {
                to.set([at.a.value_size + 2], slice_count_bits(self.slices));
            }
        });
    }
}
