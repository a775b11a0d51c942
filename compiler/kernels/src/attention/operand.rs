//! Operands of decode attention on the stack: queries, some keys, weights and values as floats ([`floats`]),
//! as bytes ([`bytes`]) or as words of two codes ([`words`]). [`pairs`]: operands of prefill.

mod byte_values;
mod bytes;
mod floats;
mod key_products;
pub(super) mod pairs;
mod words;

use super::codes::size_bits;
use super::key_block::KeyBlock;
use super::key_head::KeyHead;
use super::plan::{AttentionDot, DecodePlan, lanes_of};
use super::problem::{AttentionProblem, CacheRows};
use crate::inline::known::part_borders;
use mlcc_ir::kernel::BinOp;
use mlcc_ir::types::DType;
use mlcc_kernel_lang::{BufferView, Recorder, Val};

/// The operands of a worker.
#[derive(Clone, Copy)]
pub(super) enum DecodeOperands<'k> {
    Floats(floats::FloatOperands<'k>),
    Bytes(bytes::ByteOperands<'k>),
    Words(words::WordOperands<'k>),
}

impl<'k> DecodeOperands<'k> {
    pub fn new(k: &'k Recorder, a: &AttentionProblem, plan: DecodePlan) -> DecodeOperands<'k> {
        let integers = match plan.products {
            AttentionDot::Floats => None,
            AttentionDot::Bytes(dot) => bytes::ByteOperands::new(k, a, plan, dot).map(DecodeOperands::Bytes),
            AttentionDot::Words(dot) => words::WordOperands::new(k, a, plan, dot).map(DecodeOperands::Words),
        };
        integers.unwrap_or_else(|| DecodeOperands::Floats(floats::FloatOperands::new(k, a, plan)))
    }

    /// Floats of keys that are summed together, `[keys, padded size]`.
    pub fn float_rows(&self, a: &AttentionProblem, plan: DecodePlan) -> [i64; 2] {
        match self {
            DecodeOperands::Floats(_) => [plan.keys_together(), plan.padded_elements(a.size)],
            DecodeOperands::Bytes(_) | DecodeOperands::Words(_) => [1, 1],
        }
    }

    /// Zeros in the place of keys.
    pub fn clear_keys(&self, at: &KeyHead<'k, '_>) {
        match self {
            DecodeOperands::Floats(floats) => floats.clear_keys(at),
            DecodeOperands::Bytes(bytes) => bytes.clear_keys(at),
            DecodeOperands::Words(words) => words.clear_keys(at),
        }
    }

    /// Scaled queries, and slopes.
    pub fn load_queries(&self, at: &KeyHead<'k, '_>) {
        match self {
            DecodeOperands::Floats(floats) => {
                floats.clear_queries(at);
                at.each_query_head(|g, head| floats.load_query(at, g, head));
            }
            DecodeOperands::Bytes(bytes) => {
                bytes.clear_queries(at);
                at.each_query_head(|g, head| bytes.load_query(at, g, head));
            }
            DecodeOperands::Words(words) => {
                words.clear_queries(at);
                at.each_query_head(|g, head| words.load_query(at, g, head));
            }
        }
        let (k, plan) = (at.k, at.plan);
        let Some(slopes) = at.slopes else { return };
        let all = plan.sets * i64::from(plan.lanes);
        slopes.starting_at((at.head, 0, 0)).fill(all, k.zeros(DType::F32, plan.lanes));
        at.each_query_head(|g, head| {
            let slot = slopes.starting_at(at.slot(g));
            if let Some(slope) = at.a.slope(head) {
                (0..plan.keys()).for_each(|key| slot.set([key * plan.vectors()], slope));
            }
        });
    }

    /// Adds a block of keys to the sums of a set of heads.
    pub fn add_block(&self, block: &KeyBlock<'k, '_>, set: Val<'k>) {
        let best = block.store_scores(set, |offset| match self {
            DecodeOperands::Floats(floats) => floats.products(block, set, offset),
            DecodeOperands::Bytes(bytes) => bytes.products(block, set, offset),
            DecodeOperands::Words(words) => words.products(block, set, offset),
        });
        let max = block.raise_max(set, best);
        let (largest, signs) = block.softmax(set, max);
        match self {
            DecodeOperands::Floats(floats) => floats.add_values(block, set),
            DecodeOperands::Bytes(bytes) => {
                let added = bytes.encode_weights(block, largest, signs);
                bytes.add_values(block, set, added);
            }
            DecodeOperands::Words(words) => {
                words.encode_weights(block, largest);
                words.add_values(block, set);
            }
        }
    }

    /// Stores the sums of query head `g` of the group in `to`.
    pub fn store(&self, at: &KeyHead<'k, '_>, g: Val<'k>, to: BufferView<'k, 1>) {
        let sums = at.accumulators.starting_at([at.head, g, at.k.int(0)]);
        match self {
            DecodeOperands::Bytes(_) => byte_values::store_interleaved(at, sums, to),
            DecodeOperands::Floats(_) | DecodeOperands::Words(_) => {
                let (size, lanes) = (at.a.value_size, lanes_of(at.a.value_size, at.plan.lanes));
                at.k.vectors("c", size, lanes, |c| to.set([c], sums.load([c], lanes)));
            }
        }
    }
}

/// A serial loop over vectors of columns of a query: parts of it that are computed in different ways have
/// loops of their own (see [`part_borders`]).
pub(super) fn query_columns<'k>(
    k: &'k Recorder,
    a: &AttentionProblem,
    lanes: u32,
    mut body: impl FnMut(Val<'k>),
) {
    let borders = part_borders(&a.inliner, lanes.into(), a.size);
    for (&from, &to) in borders.iter().zip(&borders[1..]) {
        k.vectors("c", to - from, lanes, |c| body(c + from));
    }
}

/// Stores the scaled query of `head` in the one row that integers are made from; gives its largest size, as
/// [`size_bits`].
fn keep_query<'k>(at: &KeyHead<'k, '_>, to: BufferView<'k, 1>, head: Val<'k>) -> Val<'k> {
    let (k, lanes) = (at.k, lanes_of(at.a.size, at.plan.lanes));
    let largest = k.reg("largest", k.zeros(DType::I32, lanes));
    query_columns(k, at.a, lanes, |c| {
        let value = at.a.query([k.int(0), head, c], lanes).named("q");
        to.set([c], value);
        largest.update(|largest| largest.max(size_bits(value)));
    });
    largest.get().reduce_lanes(BinOp::Max)
}

/// Place of query head `g` of the group in queries `[kv, sets, ..]`, of which a set has a part of each head
/// of a vector side by side, with all elements of such a row: its first part.
fn query_row<'k>(at: &KeyHead<'k, '_>, queries: BufferView<'k, 3>, g: Val<'k>) -> BufferView<'k, 1> {
    let plan = at.plan;
    let (set, slot) = (g / plan.heads, g % plan.heads);
    let (vector, place) = (slot / plan.across, slot % plan.across);
    let set = queries.row(at.head).row(set);
    set.starting_at([vector * (plan.across * plan.padded_elements(at.a.size))])
        .starting_at([place * plan.part()])
        .named("row")
}

/// A cache of codes, `[t, kv, size]`.
#[derive(Clone, Copy)]
struct QuantizedCache<'k> {
    rows: CacheRows,
    view: BufferView<'k, 3>,
}

/// The codes of keys and of values.
fn codes<'k>(k: &'k Recorder, a: &AttentionProblem) -> Option<[QuantizedCache<'k>; 2]> {
    let of = |rows: CacheRows| QuantizedCache { rows, view: k.view(rows.buf, [1, a.kv, rows.size]) };
    Some([of(a.codes_of(a.key)?), of(a.codes_of(a.value)?)])
}

impl<'k> QuantizedCache<'k> {
    /// Row `row` of the key head of a block, `lanes` columns from `c` on.
    fn row(&self, block: &KeyBlock<'k, '_>, row: Val<'k>, c: Val<'k>, lanes: u32) -> Val<'k> {
        self.rows.in_page(self.view, block.page).load([row, block.at.head, c], lanes)
    }
}
