//! Contractions in integers: packed weights against integer activations (see [`Codes`]), exact within each group of 32.
//!
//! Stored weight codes are unsigned with a zero point z, so `sum (c - z) x = sum c x - z sum x`: the dot instructions take
//! the codes as they are, and `-z sum x`, known per group of activations, is added. With two planes of activation bytes,
//! `sum c x = 256 sum c high + sum c low`; the largest total, 255 * 32512 * 32, fits i32. Without a dot instruction there are
//! other ways to one product, see [`CodeProduct`].
//!
//! Per 32 columns a result takes 8 dot instructions (16 with two planes), a conversion and a fused multiply-add with the
//! weight scales; per group of activation scales a multiplication. Where all of these share the vector units (Intel), the
//! share of the dot peak is at most 8 / (8 + 2 + 32 / group): 78 % with groups of 128, 73 % with groups of 32.

use super::block::Block;
use super::few_rows::Ahead;
use super::next::Hints;
use super::{Codes, GROUP};
use crate::params::CodeProduct;
use mlcc_ir::builder::KernelBuilder;
use mlcc_ir::instr::InstrId;
use mlcc_ir::kernel::{BinOp, ExprId, Ty};
use mlcc_ir::types::{DType, Format};
use mlcc_quant::tile::{quad_codes, quad_signed, quads, words};

/// Dot instructions per group of 32 columns: four columns each.
pub(super) const QUADS: usize = GROUP / 4;

/// Accumulators beyond which the planes of the activations follow each other instead of having sums of their own.
const SEPARATE_PLANES: u32 = 8;

impl Block<'_> {
    /// Adds `scale_groups` (first and number, one per activation scale) to the accumulators.
    pub(super) fn integers(
        &self,
        kb: &mut KernelBuilder,
        format: Format,
        codes: Codes,
        (first_scale, scale_groups): (ExprId, ExprId),
        hints: Option<Hints>,
    ) {
        let groups = self.spec.k.div_ceil(GROUP);
        let per_scale = codes.group / GROUP;
        kb.serial("s", scale_groups, |kb, s| {
            let outer = kb.add(first_scale, s);
            let first = kb.mul_int(outer, per_scale as i64);
            let first = kb.let_("first", first);
            if let Some(hints) = hints {
                hints.emit(kb, self, s);
            }
            self.rescale(kb, codes, outer);
            let mut count = kb.int(per_scale as i64);
            if !groups.is_multiple_of(per_scale) {
                let all = kb.int(groups as i64);
                let left = kb.sub(all, first);
                count = kb.min(count, left);
            }
            let ahead = Ahead::new(kb, self, format, per_scale, outer);
            kb.serial("g", count, |kb, g| {
                if let Some(ahead) = ahead {
                    ahead.prefetch(kb, self.spec, g);
                }
                let g = kb.add(first, g);
                self.add_group(kb, format, codes, g);
            });
        });
    }

    /// All groups of weights that come from memory, in one loop. With a loop over the groups of a scale inside, the compiler
    /// makes four copies of its body, and a processor that tells streams by the places of their loads finds fewer of them
    /// (one Zen 5 core, 8-bit weights: 39 GB/s with four copies, 42 with one; one Zen 4 core, 4864 columns: 93 and 100 % of a
    /// reading loop).
    pub(super) fn streamed(&self, kb: &mut KernelBuilder, format: Format, codes: Codes) {
        let per_scale = codes.group / GROUP;
        let groups = kb.int(self.spec.k.div_ceil(GROUP) as i64);
        kb.serial("g", groups, |kb, g| {
            let (by, one) = (kb.int(per_scale as i64), kb.int(1));
            let within = kb.rem(g, by);
            let is_first = kb.lt(within, one);
            kb.if_(is_first, |kb| {
                let scale = kb.div(g, by);
                self.rescale(kb, codes, scale);
            });
            self.add_group(kb, format, codes, g);
        });
    }

    /// Puts the sums so far in units of activation scale `scale`; before the first one they are zero.
    fn rescale(&self, kb: &mut KernelBuilder, codes: Codes, scale: ExprId) {
        let squares = self.squares();
        for r in 0..self.rows {
            let ratio = |kb: &mut KernelBuilder, r| {
                let at = self.x_scale_at(kb, codes, r, scale);
                kb.load(codes.scales, at)
            };
            let ratio = if squares { self.of_both_rows(kb, r, ratio) } else { ratio(kb, r) };
            let ratio = kb.let_("ratio", ratio);
            for part in 0..self.parts() {
                let at = self.slot(kb, 0, r, part);
                let acc = kb.load_vec(self.acc, at, self.lanes());
                let acc = kb.mul(acc, ratio);
                kb.store_vec(self.acc, at, acc);
            }
        }
    }

    /// Turns the sums into f32: they are in units of the last scale of their row, which has the place of the first ratio.
    pub(super) fn scale_sums(&self, kb: &mut KernelBuilder, codes: Codes) {
        let first = kb.int(0);
        self.rescale(kb, codes, first);
        if self.squares() {
            self.part_rows(kb);
        }
    }

    /// Adds one group, with its weight scales, to the accumulators.
    fn add_group(&self, kb: &mut KernelBuilder, format: Format, codes: Codes, g: ExprId) {
        let g = kb.let_("group", g);
        self.prefetch_group(kb, format, g);
        let totals = self.group_totals(kb, format, codes, g);
        let scales: Vec<Vec<ExprId>> =
            (0..self.parts()).map(|p| self.weight_scales(kb, format, g, p)).collect();
        self.each(|r, part| {
            let at = self.slot(kb, 0, r, part);
            let total = kb.cast(totals[self.index(r, part)], DType::F32);
            let acc = kb.load_vec(self.acc, at, self.lanes());
            let of_part = &scales[part as usize];
            let acc = kb.fma(total, of_part[r as usize % of_part.len()], acc);
            kb.store_vec(self.acc, at, acc);
        });
    }

    /// How codes are multiplied: a strip may have them in an order of its own.
    fn product(&self, format: Format, codes: Codes) -> CodeProduct {
        self.strip.map_or_else(|| self.params.dot.product(format, codes.planes), |strip| strip.product)
    }

    pub(super) fn accumulators(&self) -> usize {
        (self.rows * self.parts()) as usize
    }

    /// The exact sums of one group, i32, for every accumulator.
    fn group_totals(&self, kb: &mut KernelBuilder, format: Format, codes: Codes, g: ExprId) -> Vec<ExprId> {
        let starts = self.starts(kb, format, codes, g);
        let zero = kb.constant(0.0, Ty::vector(DType::I32, self.lanes()));
        let zeros = vec![zero; self.accumulators()];
        let product = self.product(format, codes);
        if let CodeProduct::Words { words } = product {
            return self.add_words(kb, (format, product, words), codes, g, starts.unwrap_or(zeros));
        }
        let vectors = if let CodeProduct::Long { .. } = product { 2 } else { 1 };
        if codes.planes > 1 && vectors * self.rows * self.parts() <= SEPARATE_PLANES {
            let mut totals = vec![zeros; codes.planes];
            // The start belongs to the least significant plane.
            if let (Some(last), Some(starts)) = (totals.last_mut(), starts) {
                *last = starts;
            }
            let totals = self.add_quads(kb, format, codes, g, 0, totals);
            let fold = totals.into_iter().reduce(|high, low| shifted_sum(kb, high, low));
            return fold.unwrap_or_default();
        }
        let mut totals = match (&starts, codes.planes) {
            (Some(starts), 1) => starts.clone(),
            _ => zeros,
        };
        for plane in 0..codes.planes {
            if plane > 0 {
                let next = starts.clone().unwrap_or_else(|| vec![zero; self.accumulators()]);
                totals = shifted_sum(kb, totals, next);
                totals.iter_mut().for_each(|t| *t = kb.let_("t", *t));
            }
            totals = self.add_quads(kb, format, codes, g, plane, vec![totals]).swap_remove(0);
        }
        totals
    }

    /// For every accumulator, `-zero point * sum of the activations`; none where the weights are centred.
    fn starts(&self, kb: &mut KernelBuilder, format: Format, codes: Codes, g: ExprId) -> Option<Vec<ExprId>> {
        if self.product(format, codes).is_centred() {
            return None;
        }
        let mut starts = Vec::new();
        for r in 0..self.rows {
            let at = self.x_group_at(kb, r, g);
            let start = kb.load(codes.starts, at);
            let start = kb.splat(start, self.lanes());
            let start = kb.let_("start", start);
            starts.extend((0..self.parts()).map(|_| start));
        }
        Some(starts)
    }

    /// Steps of [`Self::word_operands`]: words of packed weights, or single quads of unpacked ones. Two quads at a time
    /// would need more than 32 vector registers, and the loads of a strip wait for stores to the stack.
    pub(super) fn steps(&self, format: Format) -> usize {
        if self.strip.is_some() { QUADS } else { words(format) }
    }

    /// The weight codes of every part for the quads of one step, pinned: per quad its number and its operands.
    pub(super) fn word_operands(
        &self,
        kb: &mut KernelBuilder,
        format: Format,
        product: CodeProduct,
        g: ExprId,
        word: usize,
    ) -> Vec<(usize, Vec<Operand>)> {
        if let Some(strip) = &self.strip {
            let operand = |part| strip.operand(kb, self.parts(), g, word, part);
            return vec![(word, (0..self.parts()).map(operand).collect())];
        }
        let bits = self.words(kb, format, g, word);
        let operands = |kb: &mut KernelBuilder, quad| {
            let one = |&word: &ExprId| {
                let value = dot_operand(kb, product, format, word, quad);
                let value = kb.let_("q", value);
                Operand::new(kb, product, value)
            };
            (quad, bits.iter().map(one).collect())
        };
        quads(format, word).into_iter().map(|quad| operands(kb, quad)).collect()
    }

    /// Four consecutive activation codes of a plane in every 32-bit lane, i8.
    pub(super) fn x_quad(
        &self,
        kb: &mut KernelBuilder,
        codes: Codes,
        (r, plane): (u32, usize),
        g: ExprId,
        quad: usize,
    ) -> ExprId {
        let (start, quad) = self.x_quad_at(kb, codes, (r, plane), g, quad);
        let words = if self.params.by_lane {
            let four = self.x_words(kb, codes, start, (quad / 4 * 4, 4));
            kb.shuffle(four, None, vec![(quad % 4) as u32; self.lanes() as usize])
        } else {
            let word = self.x_words(kb, codes, start, (quad, 1));
            kb.splat(word, self.lanes())
        };
        let bytes = kb.bitcast(words, Ty::vector(DType::I8, 4 * self.lanes()));
        kb.let_("x", bytes)
    }

    /// `count` quads of activations from quad `first` behind `start` on, i32.
    pub(super) fn x_words(
        &self,
        kb: &mut KernelBuilder,
        codes: Codes,
        start: ExprId,
        (first, count): (i64, u32),
    ) -> ExprId {
        let elements = codes.quad_elements() as i64;
        let at = kb.add_int(start, first * elements);
        let quads = kb.load_vec(self.spec.x, at, count * elements as u32);
        kb.bitcast(quads, Ty::vector(DType::I32, count))
    }

    /// Adds the quads of a group: `totals` holds one set of accumulators per plane, from plane `first` on.
    fn add_quads(
        &self,
        kb: &mut KernelBuilder,
        format: Format,
        codes: Codes,
        g: ExprId,
        first: usize,
        mut totals: Vec<Vec<ExprId>>,
    ) -> Vec<Vec<ExprId>> {
        let product = self.product(format, codes);
        if let CodeProduct::Squares { instr } = product {
            return self.add_squares(kb, instr, codes, g, first, totals);
        }
        if let CodeProduct::Long { long, quads, .. } = product {
            return self.add_long(kb, (format, product), (long, quads), (codes, first), g, totals);
        }
        // 16-bit sums of pairs: 16 products of at most 15 * 128 meet in each, 30720, below the limit.
        let mut halves: Vec<Vec<Option<ExprId>>> = vec![vec![None; self.accumulators()]; totals.len()];
        for word in 0..self.steps(format) {
            for (quad, weights) in self.word_operands(kb, format, product, g, word) {
                for r in 0..self.rows {
                    for set in 0..totals.len() {
                        let x = self.x_quad(kb, codes, (r, first + set), g, quad);
                        for (part, &w) in (0..).zip(&weights) {
                            let i = self.index(r, part);
                            if let CodeProduct::SumsOfPairs { bytes, .. } = product {
                                let products = kb.instr(bytes, vec![w.codes, x]);
                                let sum = match halves[set][i] {
                                    Some(sum) => kb.add(sum, products),
                                    None => products,
                                };
                                halves[set][i] = Some(self.here(kb, "p", sum));
                                continue;
                            }
                            let next = self.add_quad(kb, product, totals[set][i], w, x);
                            totals[set][i] = self.here(kb, "t", next);
                        }
                    }
                }
            }
        }
        if let CodeProduct::SumsOfPairs { words, .. } = product {
            for (total, half) in totals.iter_mut().flatten().zip(halves.into_iter().flatten()) {
                if let Some(half) = half {
                    *total = self.add_pairs(kb, words, *total, half);
                }
            }
        }
        totals
    }

    /// Pins a sum, where that is asked for also against the code generator.
    fn here(&self, kb: &mut KernelBuilder, name: &str, sum: ExprId) -> ExprId {
        let sum = match self.params.in_order {
            Some([words, _]) if kb.ty(sum).dtype == DType::I16 => kb.instr(words, vec![sum]),
            Some([_, sums]) => kb.instr(sums, vec![sum]),
            None => sum,
        };
        kb.let_(name, sum)
    }

    /// Adds neighbouring sums of 16 bits to `total`.
    fn add_pairs(&self, kb: &mut KernelBuilder, words: InstrId, total: ExprId, pairs: ExprId) -> ExprId {
        let ones = kb.constant(1.0, Ty::vector(DType::I16, 2 * self.lanes()));
        let sum = kb.instr(words, vec![pairs, ones]);
        kb.add(total, sum)
    }

    fn add_quad(
        &self,
        kb: &mut KernelBuilder,
        product: CodeProduct,
        total: ExprId,
        weights: Operand,
        x: ExprId,
    ) -> ExprId {
        match product {
            CodeProduct::Dot { instr, .. } => kb.instr(instr, vec![total, weights.codes, x]),
            CodeProduct::Magnitudes { bytes, words, sign } => {
                let signed = with_sign(kb, sign, x, weights.codes);
                let pairs = kb.instr(bytes, vec![weights.magnitudes, signed]);
                self.add_pairs(kb, words, total, pairs)
            }
            CodeProduct::SumsOfPairs { .. }
            | CodeProduct::Words { .. }
            | CodeProduct::Long { .. }
            | CodeProduct::Squares { .. } => {
                panic!("{product:?} has no sum in i32 for every quad")
            }
            CodeProduct::Widen => {
                let mut sum = total;
                let lanes = self.lanes();
                for column in 0..4 {
                    let pick: Vec<u32> = (0..lanes).map(|lane| 4 * lane + column).collect();
                    let w = kb.shuffle(weights.codes, None, pick.clone());
                    let x = kb.shuffle(x, None, pick);
                    let (w, x) = (kb.cast(w, DType::I32), kb.cast(x, DType::I32));
                    let product = kb.mul(w, x);
                    sum = kb.add(sum, product);
                }
                sum
            }
        }
    }

    /// Adds the quads of a group to `totals`, both planes at once: `sum c x` with 16-bit numbers, of even and of odd columns.
    fn add_words(
        &self,
        kb: &mut KernelBuilder,
        (format, product, words): (Format, CodeProduct, InstrId),
        codes: Codes,
        g: ExprId,
        mut totals: Vec<ExprId>,
    ) -> Vec<ExprId> {
        for word in 0..self.steps(format) {
            for (quad, weights) in self.word_operands(kb, format, product, g, word) {
                let weights: Vec<[ExprId; 2]> =
                    weights.iter().map(|w| self.code_words(kb, w.codes)).collect();
                for r in 0..self.rows {
                    let [high, low] = [0, 1].map(|plane| self.x_quad(kb, codes, (r, plane), g, quad));
                    let x = self.activation_words(kb, high, low);
                    for (part, w) in (0..).zip(&weights) {
                        let i = self.index(r, part);
                        for (&w, x) in w.iter().zip(x) {
                            let products = kb.instr(words, vec![w, x]);
                            let total = kb.add(totals[i], products);
                            totals[i] = self.here(kb, "t", total);
                        }
                    }
                }
            }
        }
        totals
    }

    /// Even and odd bytes of unsigned codes.
    fn code_words(&self, kb: &mut KernelBuilder, codes: ExprId) -> [ExprId; 2] {
        let lanes = 2 * self.lanes();
        let codes = kb.bitcast(codes, Ty::vector(DType::U16, lanes));
        let (low, by) = (kb.int_of(0xff, DType::U16), kb.int_of(8, DType::U16));
        let (even, odd) = (kb.binary(BinOp::And, codes, low), kb.binary(BinOp::Shr, codes, by));
        [even, odd].map(|words| {
            let words = kb.bitcast(words, Ty::vector(DType::I16, lanes));
            kb.let_("w", words)
        })
    }

    /// `256 high + low` of even and of odd bytes.
    fn activation_words(&self, kb: &mut KernelBuilder, high: ExprId, low: ExprId) -> [ExprId; 2] {
        let ty = Ty::vector(DType::I16, 2 * self.lanes());
        let (high, low) = (kb.bitcast(high, ty), kb.bitcast(low, ty));
        let (by, upper) = (kb.int_of(8, DType::I16), kb.int_of(-256, DType::I16));
        let (even_high, odd_high) = (kb.binary(BinOp::Shl, high, by), kb.binary(BinOp::And, high, upper));
        let up = kb.binary(BinOp::Shl, low, by);
        let (even_low, odd_low) = (kb.binary(BinOp::Shr, up, by), kb.binary(BinOp::Shr, low, by));
        [(even_high, even_low), (odd_high, odd_low)].map(|(high, low)| {
            let words = kb.add(high, low);
            kb.let_("x", words)
        })
    }

    /// The scales of the rows of one part, f32, pinned: of one vector of sums, or of both that two rows of activations have.
    fn weight_scales(&self, kb: &mut KernelBuilder, format: Format, g: ExprId, part: u32) -> Vec<ExprId> {
        let scales = match &self.strip {
            Some(strip) => strip.scales(kb, self.parts(), g, part),
            None => {
                let reader = self.group(kb, format, g, part);
                vec![reader.scales(kb)]
            }
        };
        scales.into_iter().map(|scales| kb.let_("scales", scales)).collect()
    }
}

/// The codes of one quad as the product wants them.
pub(super) fn dot_operand(
    kb: &mut KernelBuilder,
    product: CodeProduct,
    format: Format,
    word: ExprId,
    quad: usize,
) -> ExprId {
    let codes = if product.is_centred() {
        quad_signed(kb, format, word, quad)
    } else {
        quad_codes(kb, format, word, quad)
    };
    let ty = Ty::vector(product.codes_type(), kb.ty(codes).lanes);
    if kb.ty(codes) == ty { codes } else { kb.bitcast(codes, ty) }
}

/// Weights of one quad and part, which all rows of a block meet.
#[derive(Clone, Copy)]
pub(super) struct Operand {
    pub codes: ExprId,
    /// Without their signs, u8; the codes themselves where the product has no use for them.
    pub magnitudes: ExprId,
}

impl Operand {
    pub fn new(kb: &mut KernelBuilder, product: CodeProduct, codes: ExprId) -> Operand {
        let CodeProduct::Magnitudes { sign, .. } = product else {
            return Operand { codes, magnitudes: codes };
        };
        let magnitudes = with_sign(kb, sign, codes, codes);
        let ty = Ty::vector(DType::U8, kb.ty(codes).lanes);
        let magnitudes = kb.bitcast(magnitudes, ty);
        Operand { codes, magnitudes: kb.let_("magnitudes", magnitudes) }
    }
}

/// `x` with its sign turned where `by` is negative; where `by` is zero any number.
fn with_sign(kb: &mut KernelBuilder, sign: Option<InstrId>, x: ExprId, by: ExprId) -> ExprId {
    if let Some(sign) = sign {
        return kb.instr(sign, vec![x, by]);
    }
    let zero = kb.constant(0.0, kb.ty(x));
    let negated = kb.sub(zero, x);
    let below = kb.lt(by, zero);
    kb.select(below, negated, x)
}

/// `256 high + low`, one by one.
fn shifted_sum(kb: &mut KernelBuilder, high: Vec<ExprId>, low: Vec<ExprId>) -> Vec<ExprId> {
    let by = kb.int_of(8, DType::I32);
    let add = |(h, l): (ExprId, ExprId)| {
        let h = kb.binary(BinOp::Shl, h, by);
        kb.add(h, l)
    };
    high.into_iter().zip(low).map(add).collect()
}
