//! The schedule of an attention: plain data, chosen from the target without tuning.

mod display;
mod gpu;

use super::problem::{AttentionProblem, CacheRows};
use crate::params::{IntDot, KernelTarget, PairDot};
use mlcc_ir::instr::InstrId;
use mlcc_ir::step::PAGE_ROWS;
use mlcc_ir::types::DType;
use mlcc_kernel_lang::{BufferView, Val};
use mlcc_target::{Arch, KeyBlockLimit};

pub use gpu::{GpuAttentionPlan, WarpLayout};
pub(super) use gpu::{PAD, SIDE, shared_floats};

/// The schedule for a machine and a shape.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum AttentionPlan {
    Decode(DecodePlan),
    Prefill(PrefillPlan),
    Gpu(GpuAttentionPlan),
}

impl AttentionPlan {
    pub fn choose(a: &AttentionProblem, target: &KernelTarget) -> AttentionPlan {
        match target.arch {
            Arch::Nvptx => AttentionPlan::Gpu(GpuAttentionPlan::choose(a, target.attention)),
            Arch::X86_64 | Arch::Aarch64 if a.n.as_const() == Some(1) && !target.batch_invariant => {
                AttentionPlan::Decode(DecodePlan::choose(a, target))
            }
            Arch::X86_64 | Arch::Aarch64 => AttentionPlan::Prefill(PrefillPlan::choose(a, target)),
        }
    }

    /// Slices of the cache that leave unfinished sums at most; 1 needs no merge.
    pub fn slices(&self) -> i64 {
        match self {
            AttentionPlan::Decode(_) => SLICES,
            AttentionPlan::Prefill(_) => 1,
            AttentionPlan::Gpu(plan) => plan.slices,
        }
    }

    /// Weights are powers of two ([`AttentionProblem::in_powers_of_two`]).
    pub fn in_powers_of_two(&self) -> bool {
        match self {
            AttentionPlan::Decode(_) | AttentionPlan::Prefill(_) => true,
            AttentionPlan::Gpu(plan) => plan.in_powers_of_two(),
        }
    }

    /// The module that follows it.
    pub fn generator(&self) -> &'static str {
        match self {
            AttentionPlan::Decode(_) => "attention::decode",
            AttentionPlan::Prefill(_) => "attention::prefill",
            AttentionPlan::Gpu(_) => "attention::gpu",
        }
    }
}

/// Rows of one operand in a cache, `[t, kv, size]` elements of `bytes`, and the instruction that fetches a
/// line of them ahead of its use.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct RowPrefetch {
    pub rows: CacheRows,
    pub instr: InstrId,
}

impl RowPrefetch {
    /// Prefetches of rows of keys and of values, with the instruction for each type.
    fn of_rows(a: &AttentionProblem, instr: impl Fn(DType) -> Option<InstrId>) -> [Option<RowPrefetch>; 2] {
        let [keys, values] = a.cache_rows();
        // Rows that are keys and values (latent attention) are fetched once.
        let values = values.filter(|_| values != keys);
        [keys, values].map(|rows| {
            let rows = rows?;
            Some(RowPrefetch { rows, instr: instr(rows.dtype)? })
        })
    }
    /// Elements of a cache line.
    pub fn line_elements(&self) -> i64 {
        CACHE_LINE / self.rows.dtype.bytes().unwrap_or(1) as i64
    }
}

/// Bytes of a cache line.
const CACHE_LINE: i64 = mlcc_kernel_lang::CACHE_LINE as i64;

/// Most slices, and most items of work while every key head of a slice is one.
pub const SLICES: i64 = 32;

/// Bytes of a code of a query or a weight.
pub const PLANES: i64 = 2;
/// Keys, or columns, whose products one dot of bytes adds.
pub const QUAD: i64 = 4;
/// The same for words: a word holds two 16-bit codes.
pub const PAIR: i64 = 2;
/// Most columns of a row of codes: `512 * 128 * 32512 < 2^31`.
const LONGEST: i64 = 512;

/// Decode on a CPU: one query, see [`super::decode`].
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct DecodePlan {
    /// Lanes of a vector, and how many of them are in registers.
    pub lanes: u32,
    pub registers: i64,
    /// Query heads that are worked on together, and how many such sets the group has (the last may have
    /// fewer).
    pub heads: i64,
    pub sets: i64,
    /// Lanes of a vector of scores that belong to one key: `heads` rounded up to a power of two.
    /// [`DecodePlan::lane_of`] tells which.
    pub slots: i64,
    /// Heads that share a vector of products of queries and keys.
    pub across: i64,
    /// Keys of a block, a multiple of 16.
    pub block: i64,
    /// Sums of values kept in registers, in vectors.
    pub accumulators: i64,
    /// Prefetches of rows of keys and of values, a block ahead.
    pub prefetch: [Option<RowPrefetch>; 2],
    /// Prefetches of their scales, `[t, kv]`.
    pub scale_prefetch: [Option<RowPrefetch>; 2],
    /// Loads of a worker's first block in the order of memory before the heads' turns on it: it was not
    /// prefetched, and of hundreds of prefetches at once a core drops some.
    pub touch: [Option<RowPrefetch>; 2],
    /// The worker goes through every block like that, and prefetches none.
    pub in_order: bool,
    pub products: AttentionDot,
}

/// The operands of the products: queries with keys, and weights with values.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum AttentionDot {
    /// Floats, or the values of the codes of a cache.
    Floats,
    /// Bytes, four at a time; those of queries and weights are planes of 16-bit codes.
    Bytes(ByteDot),
    /// 16-bit codes, two at a time.
    Words(PairDot),
}

/// A dot instruction of bytes: `i32 += dot4(first, second)`, the latter signed.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct ByteDot {
    pub instr: InstrId,
    /// True if the first operand is signed too.
    pub signed: bool,
}

impl ByteDot {
    /// The instruction, if this machine has one and keys and values are codes in rows that it can take:
    /// `part` quads of columns at a time from keys, and vectors of bytes from values.
    fn choose(a: &AttentionProblem, target: &KernelTarget, part: i64) -> Option<ByteDot> {
        let dot = match target.int_dot() {
            IntDot::Unsigned(instr) => ByteDot { instr, signed: false },
            IntDot::Signed(instr) => ByteDot { instr, signed: true },
            IntDot::Pairs { .. } | IntDot::Long(_) | IntDot::Widen => return None,
        };
        let bytes = 4 * i64::from(target.f32_lanes());
        let fits = a.size % (QUAD * part) == 0 && a.value_size % bytes == 0 && a.size <= LONGEST;
        (fits && a.has_codes()).then_some(dot)
    }
    /// Type of the first operand.
    pub fn dtype(&self) -> DType {
        if self.signed { DType::I8 } else { DType::U8 }
    }
}

impl AttentionDot {
    fn choose(a: &AttentionProblem, target: &KernelTarget, slots: i64) -> AttentionDot {
        let lanes = i64::from(target.f32_lanes());
        if let Some(dot) = ByteDot::choose(a, target, lanes / slots) {
            return AttentionDot::Bytes(dot);
        }
        let part = lanes / words_across(slots, lanes);
        // Rows of codes make words, and vectors of them.
        let fits = a.size % (PAIR * part) == 0 && a.value_size % (PAIR * lanes) == 0 && a.size <= LONGEST;
        let dot = target.pair_dot().filter(|_| fits && a.has_codes());
        dot.map_or(AttentionDot::Floats, AttentionDot::Words)
    }
    /// Columns of a row's elements.
    pub fn columns(self) -> i64 {
        match self {
            AttentionDot::Floats | AttentionDot::Bytes(_) => 1,
            AttentionDot::Words(_) => PAIR,
        }
    }
    /// Keys that are added at once.
    pub fn keys(self) -> i64 {
        match self {
            AttentionDot::Floats => 1,
            AttentionDot::Bytes(_) => QUAD,
            AttentionDot::Words(_) => PAIR,
        }
    }
}

impl DecodePlan {
    fn choose(a: &AttentionProblem, target: &KernelTarget) -> DecodePlan {
        let lanes = target.f32_lanes();
        let sets = (a.group + i64::from(lanes) - 1) / i64::from(lanes);
        let heads = (a.group + sets - 1) / sets;
        let slots = (heads as u64).next_power_of_two() as i64;
        let registers = target.registers();
        let in_order = in_order(a, target);
        let scale_prefetch = [a.key.1, a.value.1].map(|scale| {
            let rows = a.scales(scale?).filter(|_| !in_order)?;
            Some(RowPrefetch { rows, instr: target.prefetch_instr(rows.dtype)? })
        });
        let products = AttentionDot::choose(a, target, slots);
        DecodePlan {
            lanes,
            registers,
            heads,
            sets,
            slots,
            across: match products {
                // Bytes have quads of columns.
                AttentionDot::Bytes(_) => slots,
                AttentionDot::Words(_) => words_across(slots, lanes.into()),
                AttentionDot::Floats => floats_across(target, slots),
            },
            block: block_keys(a, target.tune.attention.block),
            accumulators: if registers == 32 { 24 } else { 8 },
            prefetch: RowPrefetch::of_rows(a, |dtype| target.prefetch_instr(dtype)),
            scale_prefetch,
            touch: RowPrefetch::of_rows(a, |dtype| target.touch_instr(dtype)),
            in_order,
            products,
        }
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
    pub fn keys_together(&self) -> i64 {
        let sums = self.registers / 2;
        let planes = if matches!(self.products, AttentionDot::Bytes(_)) { PLANES } else { 1 };
        (sums / (planes * self.vectors())).max(self.keys()).max(self.products.keys())
    }
    /// Heads whose values are summed together, where a row has `vectors` vectors.
    pub fn heads_at_once(&self, vectors: i64) -> i64 {
        if self.registers < 32 && self.heads > 4 && vectors % 2 == 0 {
            (self.heads + 1) / 2
        } else {
            self.heads
        }
    }
    /// Elements of a row of queries or keys with `size` columns, in whole parts; words have two columns each.
    pub fn padded_elements(&self, size: i64) -> i64 {
        let elements = size / self.products.columns();
        (elements + self.part() - 1) / self.part() * self.part()
    }
    /// The lane of a slot and the first key in a vector of scores; those of further keys follow `vectors`
    /// lanes apart.
    pub fn lane(&self, slot: i64) -> i64 {
        slot % self.across * self.part() + slot / self.across
    }
    /// The lane of a slot that the kernel computes.
    pub(super) fn lane_of<'k>(&self, slot: Val<'k>) -> Val<'k> {
        slot % self.across * self.part() + slot / self.across
    }
    /// A part from the start of `row` on, repeated in the lanes of all heads of a vector.
    pub(super) fn repeated_part<'k>(&self, row: BufferView<'k, 1>, at: Val<'k>) -> Val<'k> {
        let part = self.part() as u32;
        let value = row.load([at], part);
        if part == self.lanes { value } else { value.shuffle((0..self.lanes).map(|l| l % part)) }
    }
    /// True if vectors of products have whole vectors of columns, so that rows are read where they lie.
    pub fn reads_rows_in_place(&self, size: i64) -> bool {
        let lanes = i64::from(self.lanes);
        self.part() == lanes && size % (lanes * self.products.columns()) == 0
    }
    /// Query heads of a key head, with those that fill up the last set.
    pub fn rows(&self) -> i64 {
        self.sets * self.heads
    }
    /// Floats of one head's unfinished sums: values, then maximum and sum of weights, then the number of
    /// slices where it is said.
    pub fn partial_floats(a: &AttentionProblem) -> i64 {
        let numbers = if a.stores_slice_count() { 3 } else { 2 };
        (a.value_size + numbers + 15) / 16 * 16
    }
}

/// True if blocks of keys are read once in the order of memory, before the heads' turns on them.
fn in_order(a: &AttentionProblem, target: &KernelTarget) -> bool {
    target.drops_requests() && a.group <= target.tune.attention.in_order_heads.into()
}

/// Keys of a block, a multiple of 16.
fn block_keys(a: &AttentionProblem, block: KeyBlockLimit) -> i64 {
    let bytes = |rows: Option<CacheRows>| {
        rows.map_or(0, |rows| a.kv * rows.size * rows.dtype.bytes().unwrap_or(4) as i64)
    };
    let (most, of_key, keys) = match block {
        KeyBlockLimit::Elements { most, keys } => (most, a.kv * a.size.max(a.value_size), keys),
        KeyBlockLimit::Bytes { most, keys } => {
            (most, a.cache_rows().map(bytes).iter().sum::<i64>().max(1), keys)
        }
    };
    let keys = (i64::from(most) / of_key / 16 * 16).clamp(16, keys.into());
    if a.table.is_none() {
        return keys;
    }
    // A page holds whole blocks.
    let blocks = PAGE_ROWS.div_ceil(keys as u64).next_power_of_two();
    (PAGE_ROWS / blocks) as i64
}

/// Heads that share a vector of products of floats: the others of its lanes are columns of a head, which have
/// to be added up.
///
/// Two vectors for all heads where that leaves at least four columns, so that each part of a key that is
/// loaded is used twice. Where a load that repeats a part takes a unit that also multiplies, a vector has two
/// columns of eight heads, or, for fewer heads, a whole part of a row that is not repeated at all.
fn floats_across(target: &KernelTarget, slots: i64) -> i64 {
    match (!target.tune.attention.repeats && target.f32_lanes() == 16, slots) {
        (true, 8..) => 8,
        (true, _) => 1,
        (false, _) => (slots / 2).clamp(1, i64::from(target.f32_lanes()) / 4),
    }
}

/// Heads that share a vector of products of words: every part of a key is loaded for two vectors, and a
/// product more is cheaper than adding up lanes.
fn words_across(slots: i64, lanes: i64) -> i64 {
    (slots / 2).clamp(1, lanes / 2)
}

/// Prefill on a CPU: several queries, see [`super::prefill`].
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct PrefillPlan {
    pub lanes: u32,
    /// Most positions of a tile.
    pub positions: i64,
    /// Keys of a block; a multiple of those of a register tile.
    pub keys: i64,
    /// Rows that go together from scores to sums; whole register tiles of both products.
    pub set: i64,
    /// Keys and vectors of rows whose scores are in registers together.
    pub scores: (i64, i64),
    /// Rows and vectors of columns whose sums are in registers together.
    pub accumulators: (i64, i64),
    /// Rows are lanes of a vector ([`KernelTarget::by_lane`]).
    pub by_lane: bool,
    /// Adds products of pairs of codes, where both products are in integers.
    pub pairs: Option<PairDot>,
    /// Prefetches of rows of keys and of values, and how many of each with a register tile of scores.
    pub prefetch: [Option<RowPrefetch>; 2],
    pub rows_ahead: i64,
    /// Loads of a block in the order of memory before its key heads' turns on it, in place of prefetches: for
    /// a single query, where the worker has all its key heads work together.
    pub touch: [Option<RowPrefetch>; 2],
    /// The reason for the number of positions of a tile.
    pub why: &'static str,
}

/// Keys of a block of prefill: those of a page.
pub const PREFILL_KEYS: i64 = PAGE_ROWS as i64;

impl PrefillPlan {
    /// Sums and operands fit the registers; operands by lane take as many of them as rows have.
    fn choose(a: &AttentionProblem, target: &KernelTarget) -> PrefillPlan {
        let lanes = target.f32_lanes();
        let (scores, sums) = match (target.by_lane(), target.registers()) {
            (true, _) => ((8, 2), (8, 2)),
            (false, 32) => ((8, 3), (6, 4)),
            (false, _) => ((4, 2), (4, 2)),
        };
        let sizes = target.tune.attention;
        let (wanted, why) = match (a.kv, a.size.max(a.value_size)) {
            (1, _) => (sizes.few_rows, "few rows, because one key head gives too few tiles for the workers"),
            (_, 129..) => {
                (sizes.few_rows, "few rows, because queries and sums have to stay in the second-level cache")
            }
            _ => (sizes.many_rows, "many rows, because they share the unpacking of keys and values"),
        };
        // Rows make words, and values vectors of them.
        let pairs = a.op.codes && a.size % PAIR == 0 && a.value_size % i64::from(lanes) == 0;
        let plan = PrefillPlan {
            lanes,
            positions: (i64::from(wanted) / a.group).max(1),
            keys: PREFILL_KEYS,
            set: sizes.set_rows.into(),
            scores,
            accumulators: sums,
            by_lane: target.by_lane(),
            pairs: target.pair_dot().filter(|_| pairs),
            prefetch: RowPrefetch::of_rows(a, |dtype| target.prefetch_instr(dtype)),
            rows_ahead: 0,
            touch: [None; 2],
            why,
        };
        let plan = if a.n.as_const() == Some(1) { plan.of_one_query(a, target) } else { plan };
        PrefillPlan { rows_ahead: (scores.0 + plan.sets(a) - 1) / plan.sets(a), ..plan }
    }

    /// The same arithmetic for a single query: no larger than its heads, and as many columns at a time as
    /// that leaves registers for.
    fn of_one_query(self, a: &AttentionProblem, target: &KernelTarget) -> PrefillPlan {
        let lanes = i64::from(self.lanes);
        let rows = (a.group as u64).next_power_of_two() as i64;
        let rows = if self.by_lane { lanes } else { rows.min(lanes).min(8) };
        let sums = self.accumulators.0 * self.accumulators.1;
        let in_order = in_order(a, target);
        let touch = RowPrefetch::of_rows(a, |dtype| target.touch_instr(dtype).filter(|_| in_order));
        PrefillPlan {
            positions: 1,
            set: (a.group + lanes - 1) / lanes * lanes,
            scores: (self.scores.0, 1),
            accumulators: (rows, (sums / rows).max(1)),
            prefetch: if in_order { [None; 2] } else { self.prefetch },
            touch,
            why: "one query like several, because its bits are to be the same",
            ..self
        }
    }

    /// Sets of rows of a tile.
    pub fn sets(&self, a: &AttentionProblem) -> i64 {
        (self.positions * a.group + self.set - 1) / self.set
    }
}

/// The widest power of two up to `most` that divides a size.
pub(crate) fn lanes_of(size: i64, most: u32) -> u32 {
    let mut lanes = most;
    while size % i64::from(lanes) != 0 {
        lanes /= 2;
    }
    lanes
}
