//! Decode attention over caches of 8-bit codes in integers: scores. Values: see [`super::code_values`].
//!
//! Rows of codes have one scale each, so the product of a query with such a row is a sum of products of integers times two
//! factors, once the query is 16-bit block floating point: `q = unit * (256 high + low)` with bytes `high` and `low` and a
//! unit per query. A dot instruction adds four products for every lane; a lane stands for a quad of columns of one head. Two
//! bytes keep the error of a score at `2^-17` of the largest element of a query times the sum of the codes' sizes, which is
//! far below what rounding the keys to 8 bits has cost.
//!
//! Some dot instructions want one operand unsigned. There codes are taken as `code + 128` (their highest bit turned), and
//! `128 * sum of the query` is taken off again, which is known with the query. All of it is arithmetic modulo 2^32, and the
//! final sum is below 2^31 for rows of up to [`LONGEST`] columns.

use super::block::Block;
use super::decode::{Item, columns};
use super::product::join_each;
use super::schedule::Params;
use super::scores::Turn;
use super::{Problem, lanes_of};
use crate::inline::Binding;
use crate::params::{IntDot, KernelTarget};
use mlcc_ir::builder::KernelBuilder;
use mlcc_ir::graph::ValueId;
use mlcc_ir::instr::InstrId;
use mlcc_ir::kernel::{BinOp, BufId, ExprId, Space, Ty};
use mlcc_ir::ops::Op;
use mlcc_ir::types::DType;

/// Most columns of a row: `512 * 128 * 32512 < 2^31`.
pub(super) const LONGEST: i64 = 512;
/// The largest size of a 16-bit code whose high byte fits i8.
pub(super) const MOST_SIGNED: f64 = 32512.0;
/// Sizes below count as this one, so that no quotient overflows.
const LEAST: f64 = 1e-30;
/// `1.5 * 2^23`: the low bits of a sum with it are those of the other summand, rounded to an integer.
pub(super) const MAGIC: f64 = 12_582_912.0;
/// The bits of `MAGIC + 128`.
const MAGIC_BITS: i64 = 0x4b40_0080;
/// Bytes of a 16-bit code.
pub(super) const PLANES: i64 = 2;

/// The dot instruction: `i32 += dot4(first, second)`, the latter signed.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Dots {
    instr: InstrId,
    /// True if the first operand is signed too.
    pub(super) signed: bool,
}

impl Dots {
    /// The instruction, if this machine has one and keys and values are codes in rows that it can take: `part` quads of
    /// columns at a time from keys, and vectors of bytes from values.
    pub fn choose(a: &Problem, target: &KernelTarget, part: i64) -> Option<Dots> {
        let dots = match target.int_dot() {
            IntDot::Unsigned(instr) => Dots { instr, signed: false },
            IntDot::Signed(instr) => Dots { instr, signed: true },
            IntDot::Pairs { .. } | IntDot::Long(_) | IntDot::Widen => return None,
        };
        let bytes = 4 * i64::from(target.f32_lanes());
        let fits = a.size % (4 * part) == 0 && a.value_size % bytes == 0 && a.size <= LONGEST;
        (fits && a.has_codes()).then_some(dots)
    }
    /// Of the first operand.
    pub(super) fn dtype(&self) -> DType {
        if self.signed { DType::I8 } else { DType::U8 }
    }
    /// Signed codes as the first operand.
    fn first(&self, kb: &mut KernelBuilder, codes: ExprId) -> ExprId {
        if self.signed {
            return codes;
        }
        let lanes = kb.ty(codes).lanes;
        let (bytes, highest) = (kb.bitcast(codes, Ty::vector(DType::U8, lanes)), kb.int_of(128, DType::U8));
        kb.binary(BinOp::Xor, bytes, highest)
    }
    pub(super) fn add(&self, kb: &mut KernelBuilder, sum: ExprId, first: ExprId, second: ExprId) -> ExprId {
        kb.instr(self.instr, vec![sum, first, second])
    }
    /// What takes the 128 of every code of the first operand off again, given the sum of `count` results of
    /// [`signed_codes`]: `i32`.
    fn start(&self, kb: &mut KernelBuilder, bits: ExprId, count: ExprId) -> ExprId {
        if self.signed {
            return kb.int_of(0, DType::I32);
        }
        let magic = kb.mul_int(count, MAGIC_BITS);
        let magic = kb.cast(magic, DType::I32);
        let negative = kb.sub(magic, bits);
        let by = kb.int_of(7, DType::I32);
        kb.binary(BinOp::Shl, negative, by)
    }
}

/// What the integers need on the stack, besides an [`Item`]'s buffers.
#[derive(Clone, Copy)]
pub(super) struct Codes {
    pub dots: Dots,
    keys: BufId,
    values: BufId,
    /// `i8[kv, sets, parts of a row, planes, slots, columns of a part]`.
    queries: BufId,
    /// Units of the queries, and where their sums begin: `[kv, sets, lanes]`, for every key of a vector.
    units: BufId,
    starts: BufId,
    /// Keys that are summed together, `[keys, size]`.
    rows: BufId,
    /// The weights of a block and a set, `[quads of keys, slots, planes, 4]`, with their units, `[lanes]`.
    pub weights: BufId,
    pub weight_units: BufId,
    /// The values of a block, a quad of keys in every lane: `i8[vectors of bytes, quads of keys, 4, lanes, 4]`.
    pub mixed: BufId,
}

impl Codes {
    pub fn new(kb: &mut KernelBuilder, a: &Problem, params: Params, dots: Dots) -> Option<Codes> {
        let (keys, values) = (a.codes(a.key)?, a.codes(a.value)?);
        let lanes = i64::from(params.lanes);
        let bytes = |kb: &mut KernelBuilder, name: &str, len: i64| {
            kb.alloc(name, DType::I8, len as usize, Space::Stack)
        };
        let words = |kb: &mut KernelBuilder, name: &str, dtype: DType, len: i64| {
            kb.alloc(name, dtype, len as usize, Space::Stack)
        };
        let vectors = a.kv * params.sets * lanes;
        Some(Codes {
            dots,
            keys,
            values,
            queries: bytes(kb, "query_codes", a.kv * params.sets * PLANES * params.slots * a.size),
            units: words(kb, "units", DType::F32, vectors),
            starts: words(kb, "starts", DType::I32, vectors),
            rows: words(kb, "rows", dots.dtype(), params.together() * a.size),
            weights: words(kb, "weight_codes", dots.dtype(), PLANES * params.slots * params.block),
            weight_units: words(kb, "weight_units", DType::F32, lanes),
            mixed: bytes(kb, "mixed", params.block * a.value_size),
        })
    }

    pub fn value(
        &self,
        kb: &mut KernelBuilder,
        place: (&Problem, ExprId, ExprId),
        c: ExprId,
        lanes: u32,
    ) -> ExprId {
        code_row(kb, (self.values, place.0.value_size), place, c, lanes)
    }
}

/// A row of a cache of codes and a key head, `lanes` columns from `c` on.
pub(super) fn code_row(
    kb: &mut KernelBuilder,
    (buf, size): (BufId, i64),
    (a, row, head): (&Problem, ExprId, ExprId),
    c: ExprId,
    lanes: u32,
) -> ExprId {
    let before = kb.mul_int(row, a.kv);
    let before = kb.add(before, head);
    let before = kb.mul_int(before, size);
    let at = kb.add(before, c);
    kb.load_vec(buf, at, lanes)
}

impl Problem<'_> {
    /// True if keys and values are such caches.
    pub(super) fn has_codes(&self) -> bool {
        self.codes(self.key).is_some() && self.codes(self.value).is_some()
    }
    /// The buffer of a cache of codes `[t, kv, size]` whose rows have a scale each.
    pub(super) fn codes(&self, (codes, scale): (ValueId, Option<ValueId>)) -> Option<BufId> {
        let (_, node) = (scale?, self.inliner.f.def(codes)?);
        let (Op::Cast(DType::F32), [source]) = (&node.op, &node.inputs[..]) else { return None };
        match self.inliner.bindings.get(source)? {
            Binding::Buffer { buf, layout: None } if self.inliner.f.ty(*source).dtype == DType::I8 => {
                Some(*buf)
            }
            Binding::Buffer { .. } | Binding::Value(_) => None,
        }
    }
}

/// `x * inverse + magic` with the integer in the low bits.
pub(super) fn coded(kb: &mut KernelBuilder, x: ExprId, inverse: ExprId, magic: ExprId) -> ExprId {
    let lanes = kb.ty(x).lanes;
    let shifted = kb.fma(x, inverse, magic);
    let bits = kb.bitcast(shifted, Ty::vector(DType::I32, lanes));
    kb.let_("bits", bits)
}

/// 16-bit codes of `x`: the bits of [`coded`] with 128 added, and words whose two lowest bytes are the signed ones of the
/// code, the less significant one below the other.
pub(super) fn signed_codes(kb: &mut KernelBuilder, x: ExprId, inverse: ExprId) -> (ExprId, ExprId) {
    let magic = kb.float(MAGIC + 128.0);
    let bits = coded(kb, x, inverse, magic);
    let highest = kb.int_of(128, DType::I32);
    let bytes = kb.binary(BinOp::Xor, bits, highest);
    (bits, kb.let_("bytes", bytes))
}

/// The sizes of numbers as integers in the same order; NaN is the largest.
pub(super) fn size_bits(kb: &mut KernelBuilder, x: ExprId) -> ExprId {
    let lanes = kb.ty(x).lanes;
    let bits = kb.bitcast(x, Ty::vector(DType::I32, lanes));
    let mask = kb.int_of(0x7fff_ffff, DType::I32);
    kb.binary(BinOp::And, bits, mask)
}

/// The unit of codes of up to `codes` for numbers of these [`size_bits`] at most, and its inverse.
pub(super) fn unit_of(kb: &mut KernelBuilder, bits: ExprId, codes: ExprId) -> (ExprId, ExprId) {
    let lanes = kb.ty(bits).lanes;
    let most = kb.bitcast(bits, Ty::vector(DType::F32, lanes));
    let least = kb.float(LEAST);
    let most = kb.max(most, least);
    let most = kb.let_("most", most);
    let (unit, inverse) = (kb.div(most, codes), kb.div(codes, most));
    (kb.let_("unit", unit), kb.let_("inverse", inverse))
}

impl Item {
    /// Where the codes of the queries of a set begin.
    fn codes_of(&self, kb: &mut KernelBuilder, a: &Problem, set: ExprId) -> ExprId {
        let first = kb.mul_int(self.head, self.params.sets);
        let number = kb.add(first, set);
        kb.mul_int(number, PLANES * self.params.slots * a.size)
    }

    /// Zeros in the place of keys.
    pub(super) fn clear_key_codes(&self, kb: &mut KernelBuilder, a: &Problem, codes: &Codes) {
        let size = self.params.together() * a.size;
        let bytes = lanes_of(size, 4 * self.params.lanes);
        let nothing = kb.constant(0.0, Ty::vector(codes.dots.dtype(), bytes));
        columns(kb, size, bytes, |kb, c| kb.store_vec(codes.rows, c, nothing));
    }

    /// Zeros for the queries of all heads.
    pub(super) fn clear_codes(&self, kb: &mut KernelBuilder, a: &Problem, codes: &Codes) {
        let (params, zero) = (self.params, kb.int(0));
        if params.sets * params.slots == a.group {
            return;
        }
        let (first, place) = (self.codes_of(kb, a, zero), self.vector_of(kb, zero));
        let bytes = 4 * params.lanes;
        let nothing = kb.constant(0.0, Ty::vector(DType::I8, bytes));
        columns(kb, params.sets * PLANES * params.slots * a.size, bytes, |kb, c| {
            let at = kb.add(first, c);
            kb.store_vec(codes.queries, at, nothing);
        });
        for (buf, dtype) in [(codes.units, DType::F32), (codes.starts, DType::I32)] {
            let nothing = kb.constant(0.0, Ty::vector(dtype, params.lanes));
            columns(kb, params.sets * i64::from(params.lanes), params.lanes, |kb, c| {
                let at = kb.add(place, c);
                kb.store_vec(buf, at, nothing);
            });
        }
    }

    /// Codes of the scaled query of `head`, number `g` of the group.
    pub(super) fn load_query_codes(
        &self,
        kb: &mut KernelBuilder,
        a: &Problem,
        codes: &Codes,
        (g, head): (ExprId, ExprId),
    ) {
        let (params, zero) = (self.params, kb.int(0));
        let lanes = lanes_of(a.size, params.lanes);
        let largest = self.keep_query(kb, a, head);
        let codes_of_size = kb.float(MOST_SIGNED);
        let (unit, inverse) = unit_of(kb, largest, codes_of_size);
        let sum = kb.alloc("sum", DType::I32, lanes as usize, Space::Local);
        let nothing = kb.constant(0.0, Ty::vector(DType::I32, lanes));
        kb.store_vec(sum, zero, nothing);
        let heads = kb.int(params.heads);
        let (set, slot) = (kb.div(g, heads), kb.rem(g, heads));
        let width = 4 * params.part();
        let (first, before) = (self.codes_of(kb, a, set), kb.mul_int(slot, width));
        let first = kb.add(first, before);
        let first = kb.let_("row", first);
        columns(kb, a.size, lanes, |kb, c| {
            let value = kb.load_vec(self.q, c, lanes);
            let (bits, low) = signed_codes(kb, value, inverse);
            let old = kb.load_vec(sum, zero, lanes);
            let new = kb.add(old, bits);
            kb.store_vec(sum, zero, new);
            let by = kb.int_of(8, DType::I32);
            let high = kb.binary(BinOp::Shr, low, by);
            for (plane, bytes) in (0..).zip([low, high]) {
                let bytes = kb.cast(bytes, DType::I8);
                let bytes = kb.let_("bytes", bytes);
                let piece = lanes.min(width as u32);
                for from in (0..lanes).step_by(piece as usize) {
                    let c = kb.add_int(c, from.into());
                    let columns_of = kb.int(width);
                    let (part, within) = (kb.div(c, columns_of), kb.rem(c, columns_of));
                    let at = kb.mul_int(part, PLANES * params.slots * width);
                    let at = kb.add(at, within);
                    let at = kb.add(first, at);
                    let at = kb.add_int(at, plane * params.slots * width);
                    let bytes = kb.shuffle(bytes, None, (from..from + piece).collect());
                    kb.store_vec(codes.queries, at, bytes);
                }
            }
        });
        let sum = kb.load_vec(sum, zero, lanes);
        let (sum, size) = (kb.reduce_lanes(BinOp::Add, sum), kb.int(a.size));
        let start = codes.dots.start(kb, sum, size);
        let (vector, lane) = (self.vector_of(kb, set), params.lane_of(kb, slot));
        let at = kb.add(vector, lane);
        for (buf, value) in [(codes.units, unit), (codes.starts, start)] {
            let value = kb.splat(value, params.part() as u32);
            kb.store_vec(buf, at, value);
        }
    }
}

impl Block<'_> {
    /// The keys of a step, from number `offset` of the block on. What older rows leave behind the last key is hidden.
    pub(super) fn copy_codes(&self, kb: &mut KernelBuilder, codes: &Codes, offset: ExprId) {
        let (a, params) = (self.a, self.item.params);
        let lanes = lanes_of(a.size, 4 * params.lanes);
        let (together, rest) = (kb.int(params.together()), kb.sub(self.count, offset));
        let count = kb.min(together, rest);
        kb.serial("i", count, |kb, i| {
            let number = kb.add(offset, i);
            let row = kb.add(self.first, number);
            let start = kb.mul_int(i, a.size);
            columns(kb, a.size, lanes, |kb, c| {
                let value = code_row(kb, (codes.keys, a.size), (a, row, self.item.head), c, lanes);
                let value = codes.dots.first(kb, value);
                let at = kb.add(start, c);
                kb.store_vec(codes.rows, at, value);
            });
        });
    }

    /// Products of the keys of a step (from number `offset` of the block on) with all heads, in vectors of scores.
    pub(super) fn code_products(
        &self,
        kb: &mut KernelBuilder,
        codes: &Codes,
        set: ExprId,
        offset: ExprId,
    ) -> Vec<ExprId> {
        let (a, params) = (self.a, self.item.params);
        let (lanes, width, zero) = (params.lanes, 4 * params.part(), kb.int(0));
        let nothing = kb.constant(0.0, Ty::vector(DType::I32, lanes));
        let sum = |kb: &mut KernelBuilder| {
            let sum = kb.alloc("sum", DType::I32, lanes as usize, Space::Local);
            kb.store_vec(sum, zero, nothing);
            sum
        };
        let sums: Vec<[BufId; 2]> = (0..params.together()).map(|_| [sum(kb), sum(kb)]).collect();
        let queries = self.item.codes_of(kb, a, set);
        let parts = kb.int(a.size / width);
        let parts = self.as_if_unknown(kb, parts);
        kb.serial("part", parts, |kb, c| {
            self.keys_ahead(kb, offset, Turn::Within(c, a.size / width));
            let bytes = 4 * lanes;
            let from = kb.mul_int(c, PLANES * i64::from(bytes));
            let from = kb.add(queries, from);
            let planes: Vec<ExprId> = (0..PLANES)
                .map(|plane| {
                    let at = kb.add_int(from, plane * i64::from(bytes));
                    let q = kb.load_vec(codes.queries, at, bytes);
                    kb.let_("q", q)
                })
                .collect();
            let c = kb.mul_int(c, width);
            for (i, of_key) in (0..).zip(&sums) {
                let at = kb.add_int(c, i * a.size);
                let k = repeated(kb, codes.rows, at, width as u32, bytes);
                for (&q, &sum) in planes.iter().zip(of_key) {
                    let old = kb.load_vec(sum, zero, lanes);
                    let new = codes.dots.add(kb, old, k, q);
                    kb.store_vec(sum, zero, new);
                }
            }
        });
        let place = self.item.vector_of(kb, set);
        let unit = kb.load_vec(codes.units, place, lanes);
        let start = kb.load_vec(codes.starts, place, lanes);
        let (unit, start) = (kb.let_("unit", unit), kb.let_("start", start));
        let whole: Vec<Option<ExprId>> = sums
            .iter()
            .map(|planes| {
                let whole = joined_planes(kb, planes);
                Some(kb.let_("whole", whole))
            })
            .collect();
        let score = |of_keys: &[Option<ExprId>]| {
            let all = join_each(kb, of_keys.to_vec(), nothing, |kb, a, b| kb.add(a, b));
            let all = kb.add(all, start);
            let all = kb.cast(all, DType::F32);
            kb.mul(all, unit)
        };
        whole.chunks(params.keys() as usize).map(score).collect()
    }
}

/// `256 high + low` of sums `[low, high]`.
pub(super) fn joined_planes(kb: &mut KernelBuilder, &[low, high]: &[BufId; 2]) -> ExprId {
    let (zero, by) = (kb.int(0), kb.int_of(8, DType::I32));
    let lanes = kb.kernel().bufs[low].len.as_const().unwrap_or(1) as u32;
    let (low, high) = (kb.load_vec(low, zero, lanes), kb.load_vec(high, zero, lanes));
    let high = kb.binary(BinOp::Shl, high, by);
    kb.add(high, low)
}

/// `width` bytes from place `at` on, repeated up to `bytes`.
pub(super) fn repeated(kb: &mut KernelBuilder, buf: BufId, at: ExprId, width: u32, bytes: u32) -> ExprId {
    let part = kb.load_vec(buf, at, width);
    let all = Ty::vector(kb.ty(part).dtype, bytes);
    let word = match width {
        4 => DType::I32,
        8 => DType::I64,
        _ if width == bytes => return part,
        _ => {
            let all = kb.shuffle(part, None, (0..bytes).map(|b| b % width).collect());
            return kb.let_("k", all);
        }
    };
    let word = kb.bitcast(part, Ty::scalar(word));
    let words = kb.splat(word, bytes / width);
    let repeated = kb.bitcast(words, all);
    kb.let_("k", repeated)
}
