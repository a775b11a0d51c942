//! Products of integer codes, exact within each group of 32 columns: one module per family of instructions.
//!
//! Stored weight codes are unsigned with a zero point z, so `sum (c - z) x = sum c x - z sum x`: the dot
//! instructions take the codes as they are, and `-z sum x`, known per group of activations, is the start of
//! the sums. With two planes of activation bytes, `sum c x = 256 sum c high + sum c low`; the largest total,
//! 255 * 32512 * 32, fits i32.

mod columns;
mod dot4;
pub(super) mod mmla;
mod pairs;
mod wide_pairs;
mod widening;

use super::plan::CodeDot;
use super::problem::DOT_COLUMNS;
use mlcc_ir::instr::InstrId;
use mlcc_ir::kernel::ExprType;
use mlcc_ir::types::{DType, QuantFormat};
use mlcc_kernel_lang::Val;
use mlcc_quant::tile::{quad_codes, quad_signed};

/// Quads of a group: four columns each.
pub(super) const QUADS: usize = DOT_COLUMNS / 4;

/// Vectors of sums beyond which the planes of the activations follow each other instead of having sums of
/// their own.
const SEPARATE_PLANES: u32 = 8;

/// A group of 32 columns of a register tile, as a family of instructions sees it.
pub(super) trait DotOperands<'k> {
    /// Rows of activations, vectors of weights, and lanes of a vector of sums.
    fn shape(&self) -> (u32, u32, u32);
    /// Steps in which the weights are read.
    fn steps(&self) -> usize;
    /// The weights of one step for every part: the quads that are read together and their operands, pinned.
    fn weights(&self, step: usize) -> Vec<(usize, Vec<WeightQuad<'k>>)>;
    /// The operand of a quad for one part, of weights that are unpacked.
    fn unpacked(&self, quad: usize, part: u32) -> WeightQuad<'k>;
    /// Four consecutive activation codes of a plane in every 32-bit lane, i8, pinned.
    fn x(&self, row: u32, plane: usize, quad: usize) -> Val<'k>;
    /// Eight codes each of rows `row` and `row + 1`, from a quad on, pinned.
    fn x_square(&self, row: u32, plane: usize, quad: usize) -> Val<'k>;
    /// Pins a sum if the plan asks for it, also against the code generator.
    fn pin(&self, name: &str, sum: Val<'k>) -> Val<'k>;

    /// The number of sums, and which are those of a row and part.
    fn accumulator_count(&self) -> usize {
        let (rows, parts, _) = self.shape();
        (rows * parts) as usize
    }
    fn accumulator_index(&self, row: u32, part: u32) -> usize {
        let (_, parts, _) = self.shape();
        (row * parts + part) as usize
    }
}

/// Weights of one quad and part, which all rows of a register tile meet.
#[derive(Clone, Copy)]
pub(super) struct WeightQuad<'k> {
    pub codes: Val<'k>,
    /// The codes without their signs, u8; the codes themselves where the product has no use for them.
    pub absolutes: Val<'k>,
}

impl<'k> WeightQuad<'k> {
    pub fn new(dot: CodeDot, codes: Val<'k>) -> WeightQuad<'k> {
        match dot {
            CodeDot::SignedPairs { sign, .. } => {
                let magnitudes = pairs::with_sign(sign, codes, codes);
                let bytes = ExprType::vector(DType::U8, codes.lanes());
                WeightQuad { codes, absolutes: magnitudes.bits_as(bytes).named("magnitudes") }
            }
            CodeDot::Dot4 { .. }
            | CodeDot::PairSums { .. }
            | CodeDot::WidePairs { .. }
            | CodeDot::Long { .. }
            | CodeDot::Mmla { .. }
            | CodeDot::Columns => WeightQuad { codes, absolutes: codes },
        }
    }
}

/// The numbers of one quad of a word as `dot` takes them.
pub(super) fn dot_operand<'k>(
    dot: CodeDot,
    format: QuantFormat,
    (word, quad): (Val<'k>, usize),
    lookup: Option<InstrId>,
) -> Val<'k> {
    let codes = if dot.is_centred() {
        quad_signed(format, word, quad, lookup)
    } else {
        quad_codes(format, word, quad, lookup)
    };
    codes.bits_as(ExprType::vector(dot.codes_type(), codes.lanes()))
}

/// The exact sums of a group, i32, one for each row and part. `starts` are their initial values; `None` means
/// zero.
pub(super) fn group_dots<'k>(
    dot: CodeDot,
    group: &impl DotOperands<'k>,
    planes: usize,
    starts: Option<Vec<Val<'k>>>,
    zero: Val<'k>,
) -> Vec<Val<'k>> {
    let zeros = vec![zero; group.accumulator_count()];
    if let CodeDot::WidePairs { words } = dot {
        return wide_pairs::add(group, words, starts.unwrap_or(zeros));
    }
    let (rows, parts, _) = group.shape();
    let vectors = if let CodeDot::Long { .. } = dot { 2 } else { 1 };
    if planes > 1 && vectors * rows * parts <= SEPARATE_PLANES {
        let mut totals = vec![zeros; planes];
        // The start belongs to the least significant plane.
        if let (Some(last), Some(starts)) = (totals.last_mut(), starts) {
            *last = starts;
        }
        add(dot, group, 0, &mut totals);
        return totals.into_iter().reduce(shifted_sum).unwrap_or_default();
    }
    let mut totals = match (&starts, planes) {
        (Some(starts), 1) => starts.clone(),
        _ => zeros.clone(),
    };
    for plane in 0..planes {
        if plane > 0 {
            let next = starts.clone().unwrap_or_else(|| zeros.clone());
            totals = shifted_sum(totals, next).into_iter().map(|t| t.named("t")).collect();
        }
        let mut one = [totals];
        add(dot, group, plane, &mut one);
        [totals] = one;
    }
    totals
}

/// Adds the products of a group: `totals` holds one set of sums per plane, from plane `first` on.
fn add<'k>(dot: CodeDot, group: &impl DotOperands<'k>, first: usize, totals: &mut [Vec<Val<'k>>]) {
    match dot {
        CodeDot::Dot4 { instr, .. } => dot4::add(group, instr, first, totals),
        CodeDot::PairSums { bytes, words, quads } => {
            pairs::add_pair_sums(group, (bytes, words, quads), first, totals)
        }
        CodeDot::SignedPairs { bytes, words, sign } => {
            pairs::add_signed(group, (bytes, words, sign), first, totals)
        }
        CodeDot::WidePairs { .. } => panic!("both planes at once"),
        CodeDot::Long { long, quads, .. } => widening::add(group, long, quads, first, totals),
        CodeDot::Mmla { instr } => mmla::add(group, instr, first, totals),
        CodeDot::Columns => columns::add(group, first, totals),
    }
}

/// `body(set, sum, weights, x)` for every product of a quad, in the order in which the operands are read: of
/// which set and sum it is, and its operands.
fn each_product<'k>(
    group: &impl DotOperands<'k>,
    first: usize,
    sets: usize,
    mut body: impl FnMut(usize, usize, WeightQuad<'k>, Val<'k>),
) {
    let (rows, ..) = group.shape();
    for step in 0..group.steps() {
        for (quad, weights) in group.weights(step) {
            for row in 0..rows {
                for set in 0..sets {
                    let x = group.x(row, first + set, quad);
                    for (part, &w) in (0..).zip(&weights) {
                        body(set, group.accumulator_index(row, part), w, x);
                    }
                }
            }
        }
    }
}

/// `256 high + low`, one by one.
fn shifted_sum<'k>(high: Vec<Val<'k>>, low: Vec<Val<'k>>) -> Vec<Val<'k>> {
    high.into_iter().zip(low).map(|(high, low)| (high << 8) + low).collect()
}

/// Adds neighbouring sums of 16 bits to `total`.
fn add_pairs<'k>(words: InstrId, total: Val<'k>, pairs: Val<'k>) -> Val<'k> {
    total + pairs.instr(words, &[pairs.like(1)])
}
