//! Decode attention over caches of 8-bit codes in integers: sums of values (see [`super::codes`]).
//!
//! A weight times the scale of its row is 16-bit block floating point within a block of keys and a head: unsigned where the dot
//! instruction takes unsigned bytes (were a scale negative, all codes of the block have 32768 added, which is taken off with
//! the plain sums of the values). A lane of a dot is a
//! column, its four products are those of four keys, so rows are first turned into quads of keys, once for all heads. The
//! sums of a block are exact; they are added to the f32 sums with the unit of the block.

use super::block::{Block, largest_of_keys};
use super::codes::{
    Codes, MAGIC, MOST_SIGNED, PLANES, coded, joined_planes, repeated, signed_codes, unit_of,
};
use super::decode::Item;
use super::schedule::Params;
use super::{Problem, ceil_div};
use mlcc_ir::builder::KernelBuilder;
use mlcc_ir::kernel::{BinOp, BufId, ExprId, Space, Ty, UnOp};
use mlcc_ir::types::DType;

/// The largest unsigned code, and the largest size of a code where [`OFFSET`] is added to all.
const MOST_UNSIGNED: f64 = 65535.0;
const MOST_HALF: f64 = 32767.0;
const OFFSET: f64 = 32768.0;
/// Keys of a quad.
pub(super) const QUAD: i64 = 4;
/// Bytes that interleaving exchanges without crossing: vectors of any width do it in pieces of this size.
const PIECE: u32 = 16;

impl Params {
    /// Bytes of a vector.
    fn bytes(&self) -> u32 {
        4 * self.lanes
    }
    /// Heads whose sums are in registers together, with all columns of a vector of bytes and both planes: machines with eight
    /// lanes may have 16 registers only.
    fn mixed_heads(&self) -> i64 {
        if self.lanes == 8 { 1 } else { 2 }
    }
}

/// Bytes of weights of a quad of keys: `[slots, planes, 4]`.
fn quad_bytes(params: &Params) -> i64 {
    params.slots * PLANES * QUAD
}

impl Block<'_> {
    /// Quads of keys that hold any.
    pub(super) fn quads(&self, kb: &mut KernelBuilder) -> ExprId {
        let quad = kb.int(QUAD);
        ceil_div(kb, self.count, quad)
    }

    /// Scaled weights to codes; gives what was added to them, as f32. `largest`: the largest sizes of the lanes as bits;
    /// `signs`: negative where a weight of the lane is.
    pub(super) fn weight_codes(
        &self,
        kb: &mut KernelBuilder,
        codes: &Codes,
        (largest, signs): (ExprId, ExprId),
    ) -> ExprId {
        let params = self.item.params;
        let (lanes, zero, none) = (params.lanes, kb.int(0), kb.float(0.0));
        let largest = largest_of_keys(kb, &params, largest, |kb, a, b| kb.max(a, b));
        let (most, added) = if codes.dots.signed {
            (kb.float(MOST_SIGNED), none)
        } else {
            let (signs, no_sign) = (kb.reduce_lanes(BinOp::Or, signs), kb.int_of(0, DType::I32));
            let negative = kb.lt(signs, no_sign);
            let (half, whole) = (kb.float(MOST_HALF), kb.float(MOST_UNSIGNED));
            let (most, offset) = (kb.select(negative, half, whole), kb.float(OFFSET));
            (most, kb.select(negative, offset, none))
        };
        let added = kb.let_("added", added);
        let (unit, inverse) = unit_of(kb, largest, most);
        kb.store_vec(codes.weight_units, zero, unit);
        let magic = kb.float(MAGIC);
        let magic = kb.add(magic, added);
        let magic = kb.let_("magic", magic);
        // Vectors that make whole quads, and the quads of them.
        let vectors = (QUAD / params.keys()).max(1);
        let quads = (params.keys() / QUAD).max(1);
        let (all, by) = (self.quads(kb), kb.int(quads));
        let steps = ceil_div(kb, all, by);
        kb.serial("quad", steps, |kb, i| {
            let first = kb.mul_int(i, vectors * i64::from(lanes));
            let bytes: Vec<ExprId> = (0..vectors)
                .map(|v| {
                    let at = kb.add_int(first, v * i64::from(lanes));
                    let weight = kb.load_vec(self.item.weights, at, lanes);
                    let words = if codes.dots.signed {
                        signed_codes(kb, weight, inverse).1
                    } else {
                        coded(kb, weight, inverse, magic)
                    };
                    kb.bitcast(words, Ty::vector(codes.dots.dtype(), params.bytes()))
                })
                .collect();
            let at = kb.mul_int(i, quads * quad_bytes(&params));
            for (n, quad) in (0..).zip(quads_of(kb, &params, bytes)) {
                let at = kb.add_int(at, n * i64::from(kb.ty(quad).lanes));
                kb.store_vec(codes.weights, at, quad);
            }
        });
        added
    }

    /// Turns the values of the block into quads of keys. Rows behind the last one stand in for none: they weigh nothing.
    fn interleave(&self, kb: &mut KernelBuilder, codes: &Codes) {
        let (a, params) = (self.a, self.item.params);
        let bytes = params.bytes();
        let quads = self.quads(kb);
        let groups = a.value_size / i64::from(bytes);
        let of_group = params.block * i64::from(bytes);
        kb.serial("quad", quads, |kb, i| {
            let first = kb.mul_int(i, QUAD);
            let rows: Vec<ExprId> = (0..QUAD)
                .map(|key| {
                    let number = kb.add_int(first, key);
                    self.row(kb, number)
                })
                .collect();
            for group in 0..groups {
                let c = kb.int(group * i64::from(bytes));
                let load = |&row: &ExprId| {
                    let value = codes.value(kb, (a, row, self.item.head), c, bytes);
                    kb.let_("v", value)
                };
                let rows: Vec<ExprId> = rows.iter().map(load).collect();
                let at = kb.mul_int(i, QUAD * i64::from(bytes));
                let at = kb.add_int(at, group * of_group);
                for (r, quad) in (0..).zip(interleaved(kb, [rows[0], rows[1], rows[2], rows[3]])) {
                    let at = kb.add_int(at, r * i64::from(bytes));
                    kb.store_vec(codes.mixed, at, quad);
                }
            }
        });
    }

    /// Adds the weighted values to the sums; `added` is what the codes of weights have too much.
    pub(super) fn mix_codes(&self, kb: &mut KernelBuilder, codes: &Codes, set: ExprId, added: ExprId) {
        self.interleave(kb, codes);
        let (heads, bytes) = (self.item.params.heads, i64::from(self.item.params.bytes()));
        let most = self.item.params.mixed_heads();
        let passes = (heads + most - 1) / most;
        let groups = kb.int(self.a.value_size / bytes);
        kb.serial("columns", groups, |kb, group| {
            let first = kb.mul_int(group, passes);
            let whole = kb.int(heads / most);
            kb.serial("heads", whole, |kb, i| {
                let (head, pass) = (kb.mul_int(i, most), kb.add(first, i));
                self.mix_heads(kb, codes, (set, group, pass), head, most);
            });
            if heads % most != 0 {
                let (head, pass) = (kb.int(heads / most * most), kb.add_int(first, passes - 1));
                self.mix_heads(kb, codes, (set, group, pass), head, heads % most);
            }
        });
        if !codes.dots.signed {
            let none = kb.float(0.0);
            let some = kb.lt(none, added);
            kb.if_(some, |kb| self.take_off(kb, codes, set, added));
        }
    }

    /// Takes what was added to the codes of weights off the sums.
    fn take_off(&self, kb: &mut KernelBuilder, codes: &Codes, set: ExprId, added: ExprId) {
        let (a, params, zero) = (self.a, self.item.params, kb.int(0));
        let (lanes, bytes) = (params.lanes, params.bytes());
        let ones = kb.constant(1.0, Ty::vector(codes.dots.dtype(), bytes));
        let vectors = kb.int(a.value_size / i64::from(lanes));
        kb.serial("vector", vectors, |kb, i| {
            let sum = kb.alloc("sum", DType::I32, lanes as usize, Space::Local);
            let nothing = kb.constant(0.0, Ty::vector(DType::I32, lanes));
            kb.store_vec(sum, zero, nothing);
            let quad = kb.int(QUAD);
            let (group, r) = (kb.div(i, quad), kb.rem(i, quad));
            let (of_group, of_r) =
                (kb.mul_int(group, params.block * i64::from(bytes)), kb.mul_int(r, bytes.into()));
            let first = kb.add(of_group, of_r);
            let quads = self.quads(kb);
            kb.serial("quad", quads, |kb, q| {
                let at = kb.mul_int(q, QUAD * i64::from(bytes));
                let at = kb.add(first, at);
                let (v, old) = (kb.load_vec(codes.mixed, at, bytes), kb.load_vec(sum, zero, lanes));
                let new = codes.dots.add(kb, old, ones, v);
                kb.store_vec(sum, zero, new);
            });
            let sum = kb.load_vec(sum, zero, lanes);
            let sum = kb.cast(sum, DType::F32);
            let (minus, column) = (kb.unary(UnOp::Neg, added), kb.mul_int(i, lanes.into()));
            let sum = kb.mul(sum, minus);
            let sum = kb.let_("sum", sum);
            let heads = kb.int(params.heads);
            kb.serial("head", heads, |kb, head| {
                let lane = params.lane_of(kb, head);
                let unit = kb.load(codes.weight_units, lane);
                let at = self.head_row(kb, set, head);
                let at = kb.add(at, column);
                let old = kb.load_vec(self.item.sums, at, lanes);
                let new = kb.fma(sum, unit, old);
                kb.store_vec(self.item.sums, at, new);
            });
        });
    }

    /// Where the sums of head `head` of a set begin.
    fn head_row(&self, kb: &mut KernelBuilder, set: ExprId, head: ExprId) -> ExprId {
        let before = kb.mul_int(set, self.item.params.heads);
        let number = kb.add(before, head);
        self.item.row_of(kb, number, self.a.value_size)
    }

    /// `count` heads from `head` on with a vector of bytes of every row. `pass`: how many such passes were before.
    fn mix_heads(
        &self,
        kb: &mut KernelBuilder,
        codes: &Codes,
        (set, group, pass): (ExprId, ExprId, ExprId),
        head: ExprId,
        count: i64,
    ) {
        let (a, params) = (self.a, self.item.params);
        let (lanes, bytes, zero) = (params.lanes, params.bytes(), kb.int(0));
        let head = kb.let_("head", head);
        let mut sums: Vec<Vec<[BufId; 2]>> = Vec::new();
        let nothing = kb.constant(0.0, Ty::vector(DType::I32, lanes));
        for _ in 0..count {
            let mut sum = || {
                let sum = kb.alloc("sum", DType::I32, lanes as usize, Space::Local);
                kb.store_vec(sum, zero, nothing);
                sum
            };
            sums.push((0..QUAD).map(|_| [sum(), sum()]).collect());
        }
        let quads = self.quads(kb);
        let most = params.mixed_heads();
        let passes = (a.value_size / i64::from(bytes)) * ((params.heads + most - 1) / most);
        let values = kb.mul_int(group, params.block * i64::from(bytes));
        let before = kb.mul_int(head, PLANES * QUAD);
        kb.serial("quad", quads, |kb, i| {
            let turn = kb.mul_int(pass, params.block / QUAD);
            let turn = kb.add(turn, i);
            self.values_ahead(kb, turn, passes * params.block / QUAD);
            let from = kb.mul_int(i, QUAD * i64::from(bytes));
            let from = kb.add(values, from);
            let v: Vec<ExprId> = (0..QUAD)
                .map(|r| {
                    let at = kb.add_int(from, r * i64::from(bytes));
                    let v = kb.load_vec(codes.mixed, at, bytes);
                    kb.let_("v", v)
                })
                .collect();
            let words = kb.mul_int(i, quad_bytes(&params));
            let words = kb.add(words, before);
            for (h, of_head) in (0..).zip(&sums) {
                for plane in 0..PLANES {
                    let at = kb.add_int(words, (h * PLANES + plane) * QUAD);
                    let weight = repeated(kb, codes.weights, at, QUAD as u32, bytes);
                    for (&v, sums) in v.iter().zip(of_head) {
                        let sum = sums[plane as usize];
                        let old = kb.load_vec(sum, zero, lanes);
                        let new = codes.dots.add(kb, old, weight, v);
                        kb.store_vec(sum, zero, new);
                    }
                }
            }
        });
        for (h, of_head) in (0..).zip(&sums) {
            let number = kb.add_int(head, h);
            let lane = params.lane_of(kb, number);
            let unit = kb.load(codes.weight_units, lane);
            let unit = kb.let_("unit", unit);
            let row = self.head_row(kb, set, number);
            let column = kb.mul_int(group, bytes.into());
            let row = kb.add(row, column);
            for (r, planes) in (0..).zip(of_head) {
                let at = kb.add_int(row, r * i64::from(lanes));
                let value = joined_planes(kb, planes);
                let value = kb.cast(value, DType::F32);
                let old = kb.load_vec(self.item.sums, at, lanes);
                let new = kb.fma(value, unit, old);
                kb.store_vec(self.item.sums, at, new);
            }
        }
    }
}

impl Item {
    /// Stores sums of values in `out` at `from`: those at `row`, which are in the order of [`interleaved`] bytes.
    pub(super) fn store_mixed(
        &self,
        kb: &mut KernelBuilder,
        a: &Problem,
        (from, row): (ExprId, ExprId),
        out: BufId,
    ) {
        let lanes = self.params.lanes;
        let (from, row) = (kb.let_("from", from), kb.let_("row", row));
        let vectors = kb.int(a.value_size / i64::from(lanes));
        kb.serial("vector", vectors, |kb, i| {
            let at = kb.mul_int(i, lanes.into());
            let at = kb.add(row, at);
            let sums = kb.load_vec(self.sums, at, lanes);
            let sums = kb.let_("sums", sums);
            let quad = kb.int(QUAD);
            let (group, r) = (kb.div(i, quad), kb.rem(i, quad));
            let column = kb.mul_int(group, self.params.bytes().into());
            let place = kb.mul_int(r, QUAD);
            let column = kb.add(column, place);
            let column = kb.add(from, column);
            for block in 0..lanes / QUAD as u32 {
                let first = block * QUAD as u32;
                let part = kb.shuffle(sums, None, (first..first + QUAD as u32).collect());
                let at = kb.add_int(column, (block * PIECE).into());
                kb.store_vec(out, at, part);
            }
        });
    }
}

/// Bytes of four vectors by quads, byte `i` of each in word `i` of the result. Every piece of 16 bytes is interleaved by itself:
/// word `4 b + i` of result `r` is byte `16 b + 4 r + i`.
fn interleaved(kb: &mut KernelBuilder, rows: [ExprId; 4]) -> Vec<ExprId> {
    let lanes = kb.ty(rows[0]).lanes;
    let mut halves = |a: ExprId, b: ExprId, unit: u32| {
        [0, 1].map(|half| {
            // Units of the lower or upper half of every piece, by turns from both vectors.
            let pick = |l: u32| {
                let (piece, place) = (l / PIECE * PIECE, l % PIECE);
                let (number, within) = (place / unit, place % unit);
                let byte = piece + half * (PIECE / 2) + number / 2 * unit + within;
                if number % 2 == 0 { byte } else { lanes + byte }
            };
            let mixed = kb.shuffle(a, Some(b), (0..lanes).map(pick).collect());
            kb.let_("mixed", mixed)
        })
    };
    let (first, second) = (halves(rows[0], rows[1], 1), halves(rows[2], rows[3], 1));
    let [lower, upper] = [0, 1].map(|half| halves(first[half], second[half], 2));
    lower.into_iter().chain(upper).collect()
}

/// Words whose two lowest bytes are codes, lanes as those of scores, to quads of keys: `[quads, slots, planes, 4]`.
fn quads_of(kb: &mut KernelBuilder, params: &Params, words: Vec<ExprId>) -> Vec<ExprId> {
    let (lanes, slots) = (params.lanes, params.slots as u32);
    let keys = params.keys() as u32;
    let vectors = words.len() as u32;
    // The byte of a key, plane and slot: its vector and place.
    let byte = |key: u32, plane: u32, slot: u32| (key / keys, 4 * (slot * keys + key % keys) + plane);
    let quads = (keys / 4).max(1);
    let order = |quad: u32| (0..8 * slots).map(move |l| byte(4 * quad + l % 4, l / 4 % 2, l / 8));
    match *words {
        [words] => (0..quads)
            .map(|quad| kb.shuffle(words, None, order(quad).map(|(_, place)| place).collect()))
            .collect(),
        [a, b] => {
            let lanes = order(0).map(|(vector, place)| 4 * lanes * vector + place).collect();
            vec![kb.shuffle(a, Some(b), lanes)]
        }
        // A key in each vector: pairs of keys first, `[slots, planes, 2]` where the words were.
        _ => {
            assert!(vectors == 4 && keys == 1, "a vector has 1, 2 or more than 3 keys");
            let pair = |l: u32| l / 4 * 4 + l % 4 / 2 + if l.is_multiple_of(2) { 0 } else { 4 * lanes };
            let pairs = [0, 2].map(|i| {
                let pair = kb.shuffle(words[i], Some(words[i + 1]), (0..4 * lanes).map(pair).collect());
                kb.let_("pair", pair)
            });
            let half = |first: u32| {
                let place = |l: u32| {
                    let (word, byte) = (first + l / 8, l % 8);
                    4 * word + byte / 4 * 2 + byte % 2 + if byte % 4 < 2 { 0 } else { 4 * lanes }
                };
                (0..4 * lanes).map(place).collect()
            };
            [0, slots / 2].map(|first| kb.shuffle(pairs[0], Some(pairs[1]), half(first))).to_vec()
        }
    }
}
