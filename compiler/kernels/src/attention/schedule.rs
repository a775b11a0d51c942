//! Sizes of the schedule of decode attention on a CPU (see [`super::decode`]).

use super::Problem;
use super::code_values::QUAD;
use super::codes::{Dots, PLANES};
use super::pairs::PAIR;
use super::words;
use crate::params::{KernelTarget, PairDot};
use mlcc_ir::builder::KernelBuilder;
use mlcc_ir::instr::InstrId;
use mlcc_ir::kernel::{BufId, ExprId, Stmt};
use mlcc_ir::types::DType;

/// Most slices, and most items of work while every key head of a slice is one.
pub(crate) const SLICES: i64 = 32;
/// Most keys of a block, and most elements of its rows of keys with all heads: rows of keys and values of two blocks stay
/// in the second-level cache, of which CPUs with AVX-512 have 1 MiB and more.
const BLOCK_KEYS: i64 = 64;
const BLOCK_ELEMENTS: i64 = 64 << 10;
/// The same where vectors are shorter: second-level caches begin at 256 KiB, and nothing overlaps with reading the first block. In
/// bytes of keys and values. Zen 3, f16, 12 heads of 64 at 128 and 2048 keys, 8 pairs of heads of 128 at 2048, ns per key and key
/// head: blocks of 64 keys 22, 16 and 35; of 32 18, 13.9 and 31; of 16 16.5, 13.6 and 28.
const SHORT_BLOCK_KEYS: i64 = 32;
const SHORT_BLOCK_BYTES: i64 = 64 << 10;

/// Query heads of a key head that give the core too little to do while requests are on their way, where it drops some of them. Zen 4
/// server core, ns per key and key head at 2048 with requests spread over the work and with blocks read in order: f16 1 head of
/// 64 24.7 and 16.4-18.6, 2 of 128 40.5 and 31, 3 of 64 19.5 and 20.9, 4 of 128 46.0 and 46.5, 8 of 64 29 and 37; i8 2 of 128 30 and 20.
const FEW_HEADS: i64 = 2;

/// See the [module](self).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Params {
    /// Lanes of a vector, and how many of them are in registers.
    pub lanes: u32,
    pub registers: i64,
    /// Query heads that are worked on together, and how many such sets the group has (the last may have fewer).
    pub heads: i64,
    pub sets: i64,
    /// Lanes of a vector of scores that belong to one key: `heads` rounded up to a power of two. [`Params::lane_of`] tells
    /// which.
    pub slots: i64,
    /// Heads that share a vector of products of queries and keys.
    pub across: i64,
    /// Keys of a block, a multiple of 16.
    pub block: i64,
    /// Sums of values kept in registers, in vectors.
    pub sums: i64,
    /// How rows of keys and of values are asked for ahead of their use.
    pub ahead: [Option<Ahead>; 2],
    /// The same of their scales, `[t, kv]`.
    pub scales_ahead: [Option<Ahead>; 2],
    /// How a worker goes through its first block in the order of memory before the heads' turns on it: nobody asked for that,
    /// and of hundreds of requests at once a core drops some.
    pub first: [Option<Ahead>; 2],
    /// It goes through every block like that, and asks for none.
    pub in_order: bool,
    pub products: Products,
}

/// What is multiplied: queries with keys, and weights with values.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Products {
    /// Floats, and what codes of a cache stand for.
    Floats,
    /// Bytes, four at a time; those of queries and weights are planes of 16-bit codes.
    Bytes(Dots),
    /// 16-bit codes, two at a time.
    Words(PairDot),
}

impl Products {
    fn choose(a: &Problem, target: &KernelTarget, slots: i64) -> Products {
        let lanes = target.f32_lanes();
        if let Some(dots) = Dots::choose(a, target, i64::from(lanes) / slots) {
            return Products::Bytes(dots);
        }
        let part = i64::from(lanes) / words::across(slots, lanes);
        target.pair_dot().filter(|_| words::fits(a, (lanes, part))).map_or(Products::Floats, Products::Words)
    }
    /// Columns of a row's elements.
    pub(super) fn columns(self) -> i64 {
        match self {
            Products::Floats | Products::Bytes(_) => 1,
            Products::Words(_) => PAIR,
        }
    }
    /// Keys that are added at once.
    pub(super) fn keys(self) -> i64 {
        match self {
            Products::Floats => 1,
            Products::Bytes(_) => QUAD,
            Products::Words(_) => PAIR,
        }
    }
}

/// The rows of one operand in memory: `[t, kv, size]` elements of `bytes`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Ahead {
    pub buf: BufId,
    pub instr: InstrId,
    pub size: i64,
    pub bytes: i64,
}

impl Ahead {
    /// Those of keys and of values, with the instruction for each type.
    pub(super) fn of_rows(a: &Problem, instr: impl Fn(DType) -> Option<InstrId>) -> [Option<Ahead>; 2] {
        [a.key_rows(), a.value_rows()].map(|rows| {
            let (buf, dtype, size) = rows?;
            Some(Ahead { buf, instr: instr(dtype)?, size, bytes: dtype.bytes()? as i64 })
        })
    }
    /// Asks for the line of an element.
    pub(super) fn ask(&self, kb: &mut KernelBuilder, place: ExprId) {
        let element = kb.load(self.buf, place);
        kb.push(Stmt::Instr { instr: self.instr, args: vec![element] });
    }
}

impl Params {
    pub fn choose(a: &Problem, target: &KernelTarget) -> Params {
        let lanes = target.f32_lanes();
        let sets = (a.group + i64::from(lanes) - 1) / i64::from(lanes);
        let heads = (a.group + sets - 1) / sets;
        let slots = (heads as u64).next_power_of_two() as i64;
        let registers = target.registers();
        let sums = if registers == 32 { 24 } else { 8 };
        let block = block(a, lanes);
        let in_order = target.drops_requests() && a.group <= FEW_HEADS;
        let ahead = Ahead::of_rows(a, |dtype| target.prefetch(dtype));
        let first = Ahead::of_rows(a, |dtype| target.touch(dtype));
        let scales_ahead = [a.key.1, a.value.1].map(|scale| {
            let buf = a.scales(scale?).filter(|_| !in_order)?;
            Some(Ahead { buf, instr: target.prefetch(DType::F32)?, size: 1, bytes: 4 })
        });
        let products = Products::choose(a, target, slots);
        let across = match products {
            // Bytes have quads of columns.
            Products::Bytes(_) => slots,
            Products::Words(_) => words::across(slots, lanes),
            Products::Floats => across(target, slots),
        };
        Params {
            lanes,
            registers,
            heads,
            sets,
            slots,
            across,
            block,
            sums,
            ahead,
            scales_ahead,
            first,
            in_order,
            products,
        }
    }
    /// Slices that the buffer between the kernels has room for.
    pub fn slices(&self) -> i64 {
        SLICES
    }
    /// Keys of a vector of scores.
    pub fn keys(&self) -> i64 {
        i64::from(self.lanes) / self.slots
    }
    /// Columns of each of the heads that share a vector of products, and the vectors that all heads take.
    pub fn part(&self) -> i64 {
        i64::from(self.lanes) / self.across
    }
    pub fn vectors(&self) -> i64 {
        self.slots / self.across
    }
    /// Keys whose products are summed together: as many as registers have room for.
    pub fn together(&self) -> i64 {
        let sums = self.registers / 2;
        let planes = if matches!(self.products, Products::Bytes(_)) { PLANES } else { 1 };
        (sums / (planes * self.vectors())).max(self.keys()).max(self.products.keys())
    }
    /// Heads whose values are summed together, where a row has so many vectors.
    pub(super) fn heads_at_once(&self, vectors: i64) -> i64 {
        if self.registers < 32 && self.heads > 4 && vectors % 2 == 0 {
            (self.heads + 1) / 2
        } else {
            self.heads
        }
    }
    /// Elements of a row of queries or keys with so many columns, in whole parts; words have two columns each.
    pub fn padded(&self, size: i64) -> i64 {
        let elements = size / self.products.columns();
        (elements + self.part() - 1) / self.part() * self.part()
    }
    /// The lane of a slot and the first key in a vector of scores; those of further keys follow `vectors` lanes apart.
    pub(super) fn lane(&self, slot: i64) -> i64 {
        slot % self.across * self.part() + slot / self.across
    }
    /// The same of a slot that the kernel computes.
    pub(super) fn lane_of(&self, kb: &mut KernelBuilder, slot: ExprId) -> ExprId {
        let across = kb.int(self.across);
        let (low, high) = (kb.rem(slot, across), kb.div(slot, across));
        let low = kb.mul_int(low, self.part());
        kb.add(low, high)
    }
    /// A part from place `at` on, repeated in the lanes of all heads of a vector.
    pub(super) fn spread(&self, kb: &mut KernelBuilder, buf: BufId, at: ExprId) -> ExprId {
        let part = self.part() as u32;
        let value = kb.load_vec(buf, at, part);
        match part == self.lanes {
            true => value,
            false => kb.shuffle(value, None, (0..self.lanes).map(|l| l % part).collect()),
        }
    }
    /// Query heads of a key head, with those that fill up the last set.
    pub(super) fn rows(&self) -> i64 {
        self.sets * self.heads
    }
    /// Elements of the queries of a key head.
    pub(super) fn queries(&self, a: &Problem) -> i64 {
        self.sets * self.slots * self.padded(a.size)
    }
    /// Floats of one head's unfinished sums: values, then maximum and sum of weights.
    pub fn partial(a: &Problem) -> i64 {
        (a.value_size + 2 + 15) / 16 * 16
    }
}

/// Keys of a block.
fn block(a: &Problem, lanes: u32) -> i64 {
    let bytes = |rows: Option<(BufId, DType, i64)>| {
        rows.map_or(0, |(_, dtype, size)| a.kv * size * dtype.bytes().unwrap_or(4) as i64)
    };
    let (most, rows) = if lanes == 16 {
        (BLOCK_KEYS, BLOCK_ELEMENTS / (a.kv * a.size.max(a.value_size)))
    } else {
        (SHORT_BLOCK_KEYS, SHORT_BLOCK_BYTES / (bytes(a.key_rows()) + bytes(a.value_rows())).max(1))
    };
    (rows / 16 * 16).clamp(16, most)
}

/// Heads that share a vector of products of floats: the others of its lanes are columns of a head, which have to be added up.
///
/// Two vectors for all heads where that leaves at least four columns, so that each part of a key that is loaded is used
/// twice: cores of the kind of Ice Lake load 1.2 vectors per cycle. Cores with dot products of bf16 load two, but the Zen ones
/// among them repeat no part of more than two lanes while they load, without a unit that also multiplies: there a vector has
/// two columns of eight heads, or, for fewer heads, a whole part of a row that is not repeated at all.
fn across(target: &KernelTarget, slots: i64) -> i64 {
    let dots = InstrId::by_name("vdpbf16ps_512").is_some_and(|dots| target.has(dots));
    match (dots && target.f32_lanes() == 16, slots) {
        (true, 8..) => 8,
        (true, _) => 1,
        (false, _) => (slots / 2).clamp(1, i64::from(target.f32_lanes()) / 4),
    }
}
