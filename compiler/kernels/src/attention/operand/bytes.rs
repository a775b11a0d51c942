//! Decode attention over caches of 8-bit codes in integers: scores. Values: see [`super::byte_values`].
//!
//! Rows of codes have one scale each, so the product of a query with such a row is a sum of products of
//! integers times two factors, once the query is 16-bit block floating point: `q = unit * (256 high + low)`
//! with bytes `high` and `low` and a unit per query. A dot instruction adds four products for every lane; a
//! lane is a quad of columns of one head. Two bytes keep the error of a score at `2^-17` of the largest
//! element of a query times the sum of the codes' sizes, which is far below what rounding the keys to 8 bits
//! has cost.
//!
//! Some dot instructions need one unsigned operand. There codes are taken as `code + 128` (their highest bit
//! flipped), and `128 * sum of the query` is subtracted again, which is known with the query. All of it is
//! arithmetic modulo 2^32, and the final sum is below 2^31 for rows of up to 512 columns.

use super::key_products::{KeyProducts, join_scores};
use super::{QuantizedCache, codes, keep_query};
use crate::attention::codes::{MOST_SIGNED, signed_codes, unit_of};
use crate::attention::key_block::KeyBlock;
use crate::attention::key_head::KeyHead;
use crate::attention::plan::{ByteDot, DecodePlan, PLANES, QUAD, lanes_of};
use crate::attention::problem::AttentionProblem;
use mlcc_ir::kernel::ExprType;
use mlcc_ir::types::DType;
use mlcc_kernel_lang::{BufferView, Recorder, Val};

/// The bits of `MAGIC + 128`.
const MAGIC_BITS: i64 = 0x4b40_0080;

impl ByteDot {
    /// Signed codes as the first operand.
    fn first<'k>(&self, codes: Val<'k>) -> Val<'k> {
        if self.signed { codes } else { codes.bits(DType::U8) ^ 128 }
    }
    pub(super) fn add<'k>(&self, sum: Val<'k>, first: Val<'k>, second: Val<'k>) -> Val<'k> {
        sum.instr(self.instr, &[first, second])
    }
    /// The start of a sum that subtracts the 128 of every code of the first operand, given the sum of `count`
    /// results of [`signed_codes`]: `i32`.
    fn start<'k>(&self, bits: Val<'k>, count: i64) -> Val<'k> {
        let k = bits.recorder();
        if self.signed { k.int32(0) } else { (k.int(count * MAGIC_BITS).cast(DType::I32) - bits) << 7 }
    }
}

/// Buffers of the integers on the stack, in addition to those of a [`KeyHead`].
#[derive(Clone, Copy)]
pub(in super::super) struct ByteOperands<'k> {
    pub(super) dot: ByteDot,
    keys: QuantizedCache<'k>,
    pub(super) values: QuantizedCache<'k>,
    /// `i8[kv, sets, (parts of a row, planes, slots, columns of a part)]`.
    queries: BufferView<'k, 3>,
    /// Units of the queries, and where their sums begin: `[kv, sets, lanes]`, for every key of a vector.
    units: BufferView<'k, 3>,
    starts: BufferView<'k, 3>,
    /// Keys that are summed together, `[keys, size]`.
    rows: BufferView<'k, 2>,
    /// The weights of a block and a set, `[quads of keys, (slots, planes, 4)]`, with their units, `[lanes]`.
    pub(super) weights: BufferView<'k, 2>,
    pub(super) weight_units: BufferView<'k, 1>,
    /// The values of a block, a quad of keys in every lane:
    /// `i8[vectors of bytes, quads of keys, (4, lanes, 4)]`.
    pub(super) mixed: BufferView<'k, 3>,
    /// A query before it is codes.
    query: BufferView<'k, 1>,
}

impl<'k> ByteOperands<'k> {
    pub fn new(
        k: &'k Recorder,
        a: &AttentionProblem,
        plan: DecodePlan,
        dot: ByteDot,
    ) -> Option<ByteOperands<'k>> {
        let [keys, values] = codes(k, a)?;
        let per_lane = [a.kv, plan.sets, plan.lanes.into()];
        let of_quad = plan.slots * PLANES * QUAD;
        let bytes = i64::from(plan.byte_lanes());
        Some(ByteOperands {
            dot,
            keys,
            values,
            queries: k.stack("query_codes", DType::I8, [a.kv, plan.sets, PLANES * plan.slots * a.size]),
            units: k.stack("units", DType::F32, per_lane),
            starts: k.stack("starts", DType::I32, per_lane),
            rows: k.stack("rows", dot.dtype(), [plan.keys_together(), a.size]),
            weights: k.stack("weight_codes", dot.dtype(), [plan.block / QUAD, of_quad]),
            weight_units: k.stack("weight_units", DType::F32, [plan.lanes.into()]),
            mixed: k.stack("mixed", DType::I8, [a.value_size / bytes, plan.block / QUAD, QUAD * bytes]),
            query: k.stack("q", DType::F32, [a.size]),
        })
    }

    pub fn clear_keys(&self, at: &KeyHead<'k, '_>) {
        let size = at.plan.keys_together() * at.a.size;
        self.rows.flat().fill(size, at.k.zeros(self.dot.dtype(), lanes_of(size, at.plan.byte_lanes())));
    }

    pub fn clear_queries(&self, at: &KeyHead<'k, '_>) {
        let (k, plan) = (at.k, at.plan);
        if plan.sets * plan.slots == at.a.group {
            return;
        }
        let codes = plan.sets * PLANES * plan.slots * at.a.size;
        self.queries.starting_at((at.head, 0, 0)).fill(codes, k.zeros(DType::I8, plan.byte_lanes()));
        for buf in [self.units, self.starts] {
            let zeros = k.zeros(buf.dtype(), plan.lanes);
            buf.starting_at((at.head, 0, 0)).fill(plan.sets * i64::from(plan.lanes), zeros);
        }
    }

    /// Codes of the scaled query of `head`, number `g` of the group.
    pub fn load_query(&self, at: &KeyHead<'k, '_>, g: Val<'k>, head: Val<'k>) {
        let (k, plan, size) = (at.k, at.plan, at.a.size);
        let lanes = lanes_of(size, plan.lanes);
        let largest = keep_query(at, self.query, head);
        let (unit, inverse) = unit_of(largest, k.float(MOST_SIGNED));
        let sum = k.reg("sum", k.zeros(DType::I32, lanes));
        let (set, slot) = (g / plan.heads, g % plan.heads);
        let width = QUAD * plan.part();
        let of_plane = plan.slots * width;
        let row = self.queries.starting_at([at.head, set, k.int(0)]).starting_at([slot * width]).named("row");
        k.vectors("c", size, lanes, |c| {
            let (bits, low) = signed_codes(self.query.load([c], lanes), inverse);
            sum.update(|sum| sum + bits);
            for (plane, bytes) in (0..).zip([low, low >> 8]) {
                let bytes = bytes.cast(DType::I8).named("bytes");
                let piece = lanes.min(width as u32);
                for from in (0..lanes).step_by(piece as usize) {
                    let c = c + i64::from(from);
                    let place = c / width * (PLANES * of_plane) + c % width;
                    row.starting_at([place]).set([plane * of_plane], bytes.shuffle(from..from + piece));
                }
            }
        });
        let start = self.dot.start(sum.get().sum_lanes(), size);
        let place = [at.head, set, plan.lane_of(slot)];
        for (buf, value) in [(self.units, unit), (self.starts, start)] {
            buf.set(place, value.splat(plan.part() as u32));
        }
    }

    /// The keys of a step, from number `offset` of the block on. Remains of older rows after the last key are
    /// masked.
    fn copy_keys(&self, block: &KeyBlock<'k, '_>, offset: Val<'k>) {
        let (at, k, size) = (block.at, block.at.k, block.at.a.size);
        let lanes = lanes_of(size, at.plan.byte_lanes());
        k.serial("i", k.int(at.plan.keys_together()).min(block.count - offset), |i| {
            let row = block.first + (offset + i);
            k.vectors("c", size, lanes, |c| {
                self.rows.set([i, c], self.dot.first(self.keys.row(block, row, c, lanes)));
            });
        });
    }

    /// Products of the keys of a step (from number `offset` of the block on) with all heads, in vectors of
    /// scores.
    pub fn products(&self, block: &KeyBlock<'k, '_>, set: Val<'k>, offset: Val<'k>) -> Vec<Val<'k>> {
        self.copy_keys(block, offset);
        let (at, plan, size) = (block.at, block.at.plan, block.at.a.size);
        let (width, bytes) = (QUAD * plan.part(), plan.byte_lanes());
        let products = KeyProducts {
            dtype: DType::I32,
            parts: block.as_if_unknown(size / width),
            count: size / width,
            part: width,
            queries: self.queries.starting_at([at.head, set, at.k.int(0)]),
            pitch: PLANES * i64::from(bytes),
            vectors: (0..PLANES).map(|plane| plane * i64::from(bytes)).collect(),
            lanes: bytes,
        };
        let key =
            |i: i64, c: Val<'k>| repeat_bytes(self.rows.flat().load([c + i * size], width as u32), bytes);
        let sums = products.sum_products(block, offset, key, |sum, q, key| self.dot.add(sum, key, q));
        let place = [at.head, set, at.k.int(0)];
        let unit = self.units.load(place, plan.lanes).named("unit");
        let start = self.starts.load(place, plan.lanes).named("start");
        let whole = sums.into_iter().map(|planes| vec![joined_planes(planes[0], planes[1]).named("whole")]);
        let scores = join_scores(block, whole.collect());
        scores.into_iter().map(|all| (all + start).cast(DType::F32) * unit).collect()
    }
}

impl DecodePlan {
    /// Bytes of a vector.
    pub(super) fn byte_lanes(&self) -> u32 {
        4 * self.lanes
    }
}

/// `256 high + low`.
pub(super) fn joined_planes<'k>(low: Val<'k>, high: Val<'k>) -> Val<'k> {
    (high << 8) + low
}

/// Some bytes, repeated up to `bytes`.
pub(super) fn repeat_bytes(part: Val, bytes: u32) -> Val {
    let (width, dtype) = (part.lanes(), part.ty().dtype);
    let word = match width {
        4 => DType::I32,
        8 => DType::I64,
        _ if width == bytes => return part,
        _ => return part.shuffle((0..bytes).map(|b| b % width)).named("k"),
    };
    part.bits_as(ExprType::scalar(word)).splat(bytes / width).bits(dtype).named("k")
}
