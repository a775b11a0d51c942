//! Decode attention over caches of 8-bit codes in integers: sums of values (see [`super::bytes`]).
//!
//! A weight times the scale of its row is 16-bit block floating point within a block of keys and a head:
//! unsigned where the dot instruction takes unsigned bytes (were a scale negative, all codes of the block
//! have 32768 added, which is taken off with the plain sums of the values). A lane of a dot is a column, its
//! four products are those of four keys, so rows are first rearranged into quads of keys, once for all heads.
//! The sums of a block are exact; they are added to the f32 sums with the unit of the block.

use super::bytes::{ByteOperands, joined_planes, repeat_bytes};
use crate::attention::codes::{MAGIC, MOST_SIGNED, encode_magic, signed_codes, unit_of};
use crate::attention::key_block::{KeyBlock, over_keys};
use crate::attention::key_head::KeyHead;
use crate::attention::plan::{DecodePlan, PLANES, QUAD};
use mlcc_ir::kernel::{BinOp, ExprType};
use mlcc_ir::types::DType;
use mlcc_kernel_lang::{BufferView, Val};

/// The largest unsigned code, and the largest size of a code where [`OFFSET`] is added to all.
const MOST_UNSIGNED: f64 = 65535.0;
const MOST_HALF: f64 = 32767.0;
const OFFSET: f64 = 32768.0;
/// Bytes that interleaving exchanges without crossing: vectors of any width do it in pieces of this size.
const PIECE: u32 = 16;

impl DecodePlan {
    /// Heads whose sums are in registers together, with all columns of a vector of bytes and both planes:
    /// machines with eight lanes may have 16 registers only.
    fn mixed_heads(&self) -> i64 {
        if self.lanes == 8 { 1 } else { 2 }
    }
    /// Passes over the heads for a vector of bytes of every row.
    fn head_passes(&self) -> i64 {
        (self.heads + self.mixed_heads() - 1) / self.mixed_heads()
    }
}

/// Quads of keys that hold any.
fn quads<'k>(block: &KeyBlock<'k, '_>) -> Val<'k> {
    block.count.div_ceil(QUAD)
}

impl<'k> ByteOperands<'k> {
    /// Scaled weights to codes; gives what was added to them, as f32. `largest`: the largest sizes of the
    /// lanes as bits; `signs`: negative where a weight of the lane is.
    pub fn encode_weights(&self, block: &KeyBlock<'k, '_>, largest: Val<'k>, signs: Val<'k>) -> Val<'k> {
        let (k, plan, lanes) = (block.at.k, block.at.plan, i64::from(block.at.plan.lanes));
        let largest = over_keys(&plan, largest, |a, b| a.max(b));
        let (most, added) = if self.dot.signed {
            (k.float(MOST_SIGNED), k.float(0.0))
        } else {
            let negative = signs.reduce_lanes(BinOp::Or).lt(0);
            (negative.select(k.float(MOST_HALF), MOST_UNSIGNED), negative.select(k.float(OFFSET), 0.0))
        };
        let added = added.named("added");
        let (unit, inverse) = unit_of(largest, most);
        self.weight_units.set([0], unit);
        let magic = (k.float(MAGIC) + added).named("magic");
        // Vectors that make whole quads, and the quads of them.
        let vectors = (QUAD / plan.keys()).max(1);
        let of_step = (plan.keys() / QUAD).max(1);
        k.serial("quad", quads(block).div_ceil(of_step), |i| {
            let codes = |v: i64| {
                let weight = block.at.weights.flat().load([i * (vectors * lanes) + v * lanes], plan.lanes);
                let words = if self.dot.signed {
                    signed_codes(weight, inverse).1
                } else {
                    encode_magic(weight, inverse, magic)
                };
                words.bits(self.dot.dtype())
            };
            let codes = (0..vectors).map(codes).collect();
            let to = self.weights.flat().starting_at([i * (of_step * plan.slots * PLANES * QUAD)]);
            for (n, quad) in (0..).zip(quads_of(&plan, codes)) {
                to.set([n * i64::from(quad.lanes())], quad);
            }
        });
        added
    }

    /// Rearranges the values of the block into quads of keys. Rows after the last one repeat it; their
    /// weights are zero.
    fn interleave(&self, block: &KeyBlock<'k, '_>) {
        let (at, k, plan) = (block.at, block.at.k, block.at.plan);
        let bytes = i64::from(plan.byte_lanes());
        k.serial("quad", quads(block), |i| {
            let rows = [0, 1, 2, 3].map(|key| block.row(i * QUAD + key));
            for group in 0..at.a.value_size / bytes {
                let c = k.int(group * bytes);
                let rows = rows.map(|row| self.values.row(block, row, c, bytes as u32).named("v"));
                let to = self.mixed.flat().starting_at([i * (QUAD * bytes) + group * (plan.block * bytes)]);
                for (r, quad) in (0..).zip(interleaved(rows)) {
                    to.set([r * bytes], quad);
                }
            }
        });
    }

    /// Adds the weighted values to the sums; `added` is the surplus of the codes of weights.
    pub fn add_values(&self, block: &KeyBlock<'k, '_>, set: Val<'k>, added: Val<'k>) {
        self.interleave(block);
        let (k, plan) = (block.at.k, block.at.plan);
        let (heads, most) = (plan.heads, plan.mixed_heads());
        k.serial("columns", block.at.a.value_size / i64::from(plan.byte_lanes()), |group| {
            let first = group * plan.head_passes();
            k.serial("heads", heads / most, |i| {
                self.add_heads(block, (set, group, first + i), i * most, most);
            });
            if heads % most != 0 {
                let place = (set, group, first + (plan.head_passes() - 1));
                self.add_heads(block, place, k.int(heads / most * most), heads % most);
            }
        });
        if !self.dot.signed {
            k.when(k.float(0.0).lt(added), || self.subtract_offsets(block, set, added));
        }
    }

    /// Subtracts the surplus of the codes of weights from the sums.
    fn subtract_offsets(&self, block: &KeyBlock<'k, '_>, set: Val<'k>, added: Val<'k>) {
        let (at, k, plan) = (block.at, block.at.k, block.at.plan);
        let (lanes, bytes) = (i64::from(plan.lanes), i64::from(plan.byte_lanes()));
        let ones = k.literal(1.0, ExprType::vector(self.dot.dtype(), plan.byte_lanes()));
        k.serial("vector", at.a.value_size / lanes, |i| {
            let sum = k.reg("sum", k.zeros(DType::I32, plan.lanes));
            let (group, r) = (i / QUAD, i % QUAD);
            let values = self.mixed.flat().starting_at([group * (plan.block * bytes) + r * bytes]);
            k.steps("quad", quads(block), QUAD * bytes, |at| {
                let values = values.load([at], plan.byte_lanes());
                sum.update(|sum| self.dot.add(sum, ones, values));
            });
            let column = i * lanes;
            let sum = (sum.get().cast(DType::F32) * -added).named("sum");
            k.serial("head", plan.heads, |head| {
                let unit = self.weight_units.at([plan.lane_of(head)]);
                let sums = at
                    .accumulators
                    .starting_at([at.head, set * plan.heads + head, k.int(0)])
                    .starting_at([column]);
                sums.set([0], sum.fma(unit, sums.load([0], plan.lanes)));
            });
        });
    }

    /// `count` heads from `head` on with a vector of bytes of every row. `pass`: how many such passes were
    /// before.
    fn add_heads(
        &self,
        block: &KeyBlock<'k, '_>,
        (set, group, pass): (Val<'k>, Val<'k>, Val<'k>),
        head: Val<'k>,
        count: i64,
    ) {
        let (at, k, plan) = (block.at, block.at.k, block.at.plan);
        let (lanes, bytes) = (i64::from(plan.lanes), i64::from(plan.byte_lanes()));
        let head = head.named("head");
        // Both planes of each quarter of the columns, by head.
        let sums = k.regs("sum", [count * QUAD, PLANES], |_, _| k.zeros(DType::I32, plan.lanes));
        let sums: Vec<_> = sums.rows().collect();
        let quads_of_block = plan.block / QUAD;
        let turns = at.a.value_size / bytes * plan.head_passes() * quads_of_block;
        let values = self.mixed.flat().starting_at([group * (plan.block * bytes)]);
        let weights = head * (PLANES * QUAD);
        k.serial("quad", quads(block), |i| {
            block.prefetch_values(pass * quads_of_block + i, turns);
            let quad = values.starting_at([i * (QUAD * bytes)]);
            let v: Vec<Val> =
                (0..QUAD).map(|r| quad.load([r * bytes], plan.byte_lanes()).named("v")).collect();
            let words = self.weights.row(i).starting_at([weights]);
            for h in 0..count {
                for plane in 0..PLANES {
                    let weight = words.load([(h * PLANES + plane) * QUAD], QUAD as u32);
                    let weight = repeat_bytes(weight, plan.byte_lanes());
                    for (&v, sums) in v.iter().zip(&sums[(h * QUAD) as usize..]) {
                        sums[plane as usize].update(|sum| self.dot.add(sum, weight, v));
                    }
                }
            }
        });
        for (h, of_head) in (0..).zip(sums.chunks(QUAD as usize)) {
            let number = head + h;
            let unit = self.weight_units.at([plan.lane_of(number)]).named("unit");
            let row = at
                .accumulators
                .starting_at([at.head, set * plan.heads + number, k.int(0)])
                .starting_at([group * bytes]);
            for (r, planes) in (0..).zip(of_head) {
                let value = joined_planes(planes[0].get(), planes[1].get()).cast(DType::F32);
                row.set([r * lanes], value.fma(unit, row.load([r * lanes], plan.lanes)));
            }
        }
    }
}

/// Stores sums of values, which are in the order of [`interleaved`] bytes.
pub(super) fn store_interleaved<'k>(at: &KeyHead<'k, '_>, sums: BufferView<'k, 1>, to: BufferView<'k, 1>) {
    let (k, lanes) = (at.k, at.plan.lanes);
    let (to, sums) = (to.named("from"), sums.named("row"));
    k.serial("vector", at.a.value_size / i64::from(lanes), |i| {
        let sums = sums.load([i * i64::from(lanes)], lanes).named("sums");
        let (group, r) = (i / QUAD, i % QUAD);
        let to = to.starting_at([group * i64::from(at.plan.byte_lanes()) + r * QUAD]);
        for part in 0..lanes / QUAD as u32 {
            let first = part * QUAD as u32;
            to.set([i64::from(part * PIECE)], sums.shuffle(first..first + QUAD as u32));
        }
    });
}

/// Bytes of four vectors by quads, byte `i` of each in word `i` of the result. Every piece of 16 bytes is
/// interleaved by itself: word `4 b + i` of result `r` is byte `16 b + 4 r + i`.
fn interleaved(rows: [Val<'_>; 4]) -> Vec<Val<'_>> {
    let lanes = rows[0].lanes();
    // Units of the lower and upper half of every piece, by turns from both vectors.
    let halves = |a, b, unit| [0, 1].map(|half| interleave_pieces(a, b, unit, half, lanes));
    let (first, second) = (halves(rows[0], rows[1], 1), halves(rows[2], rows[3], 1));
    let [lower, upper] = [0, 1].map(|half| halves(first[half], second[half], 2));
    lower.into_iter().chain(upper).collect()
}

fn interleave_pieces<'k>(a: Val<'k>, b: Val<'k>, unit: u32, half: u32, lanes: u32) -> Val<'k> {
    let pick = |l: u32| {
        let (piece, place) = (l / PIECE * PIECE, l % PIECE);
        let (number, within) = (place / unit, place % unit);
        let byte = piece + half * (PIECE / 2) + number / 2 * unit + within;
        if number % 2 == 0 { byte } else { lanes + byte }
    };
    a.shuffle_with(b, (0..lanes).map(pick)).named("mixed")
}

/// Words whose two lowest bytes are codes, lanes as those of scores, to quads of keys:
/// `[quads, slots, planes, 4]`.
fn quads_of<'k>(plan: &DecodePlan, words: Vec<Val<'k>>) -> Vec<Val<'k>> {
    let (lanes, slots, keys) = (plan.lanes, plan.slots as u32, plan.keys() as u32);
    // The byte of a key, plane and slot: its vector and place.
    let byte = move |key: u32, plane: u32, slot: u32| (key / keys, 4 * (slot * keys + key % keys) + plane);
    let order = move |quad: u32| (0..8 * slots).map(move |l| byte(4 * quad + l % 4, l / 4 % 2, l / 8));
    match *words {
        [words] => {
            (0..(keys / 4).max(1)).map(|quad| words.shuffle(order(quad).map(|(_, place)| place))).collect()
        }
        [a, b] => vec![a.shuffle_with(b, order(0).map(|(vector, place)| 4 * lanes * vector + place))],
        // A key in each vector: pairs of keys first, `[slots, planes, 2]` where the words were.
        [a, b, c, d] if keys == 1 => {
            let pair = |l: u32| l / 4 * 4 + l % 4 / 2 + if l.is_multiple_of(2) { 0 } else { 4 * lanes };
            let pairs =
                [(a, b), (c, d)].map(|(a, b)| a.shuffle_with(b, (0..4 * lanes).map(pair)).named("pair"));
            let half = |first: u32| {
                (0..4 * lanes).map(move |l| {
                    let (word, byte) = (first + l / 8, l % 8);
                    4 * word + byte / 4 * 2 + byte % 2 + if byte % 4 < 2 { 0 } else { 4 * lanes }
                })
            };
            [0, slots / 2].map(|first| pairs[0].shuffle_with(pairs[1], half(first))).to_vec()
        }
        _ => panic!("a vector has 1, 2 or more than 3 keys"),
    }
}
