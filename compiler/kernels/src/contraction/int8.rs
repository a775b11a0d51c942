//! Contractions in integers: packed weights against int8 activations (or 16-bit ones in two int8 planes), exact within
//! each group of 32.
//!
//! Stored weight codes are unsigned with a zero point z, so `sum (c - z) x = sum c x - z sum x`: the total of a group
//! starts at `-z sum x`, known per group of activations, and the dot instructions take the codes as they are. With two
//! planes, `sum c x = 256 sum c high + sum c low`; the largest total, 255 * 32512 * 32, fits i32.

use super::{Activation, Block, GROUP};
use crate::params::IntDot;
use mlcc_ir::builder::KernelBuilder;
use mlcc_ir::instr::InstrId;
use mlcc_ir::kernel::{BinOp, BufId, ExprId, Ty};
use mlcc_ir::types::{DType, Format};
use mlcc_quant::tile::{quad_codes, quad_signed, quads, words, zero_point};

impl Block<'_> {
    pub(super) fn int8(&self, kb: &mut KernelBuilder, format: Format, scales: BufId, sums: BufId) {
        self.for_groups(kb, true, |kb, g, _| {
            let totals = self.int_group(kb, format, g, sums);
            let mut acc = self.load_acc(kb, 0);
            for part in 0..self.parts() {
                let reader = self.group(kb, format, g, part);
                let weight_scales = reader.scales(kb);
                let weight_scales = kb.let_("scales", weight_scales);
                for r in 0..self.rows {
                    let i = self.index(r, part);
                    let at = self.x_group_at(kb, r, g);
                    let x_scale = kb.load(scales, at);
                    let scale = kb.mul(weight_scales, x_scale);
                    let total = kb.cast(totals[i], DType::F32);
                    acc[i] = kb.fma(total, scale, acc[i]);
                }
            }
            self.store_acc(kb, 0, &acc);
        });
    }

    /// Planes of the activations, the most significant first.
    fn planes(&self) -> usize {
        match self.spec.activation {
            Activation::I16 { .. } => 2,
            Activation::I8 { .. } | Activation::F32 | Activation::BF16 => 1,
        }
    }

    /// The exact sums of one group, i32, for every accumulator.
    fn int_group(&self, kb: &mut KernelBuilder, format: Format, g: ExprId, sums: BufId) -> Vec<ExprId> {
        let starts = self.starts(kb, format, g, sums);
        let planes = match (self.params.dot, format) {
            (IntDot::Pairs { bytes, words }, Format::Q4G32) => self.byte_pairs(kb, format, g, (bytes, words)),
            (IntDot::Unsigned(_) | IntDot::Signed(_) | IntDot::Pairs { .. } | IntDot::Widen, _) => {
                let zero = kb.constant(0.0, Ty::vector(DType::I32, self.params.lanes));
                let mut totals = vec![vec![zero; starts.len()]; self.planes()];
                // The start belongs to the least significant plane.
                if let Some(last) = totals.last_mut() {
                    last.clone_from(&starts);
                }
                self.quads(kb, format, g, &mut totals);
                return fold_planes(kb, totals);
            }
        };
        let totals = fold_planes(kb, planes);
        totals.into_iter().zip(starts).map(|(total, start)| kb.add(total, start)).collect()
    }

    /// For every accumulator, `-zero point * sum of the activations`, or zero where the weights are centred.
    fn starts(&self, kb: &mut KernelBuilder, format: Format, g: ExprId, sums: BufId) -> Vec<ExprId> {
        let mut starts = Vec::new();
        for r in 0..self.rows {
            let start = match self.params.dot {
                IntDot::Signed(_) => kb.int_of(0, DType::I32),
                IntDot::Unsigned(_) | IntDot::Pairs { .. } | IntDot::Widen => {
                    let at = self.x_group_at(kb, r, g);
                    let sum = kb.load(sums, at);
                    match self.spec.activation {
                        // The generator's own sums hold the factor already.
                        Activation::I16 { .. } => sum,
                        Activation::I8 { .. } | Activation::F32 | Activation::BF16 => {
                            let factor = kb.int_of(-zero_point(format), DType::I32);
                            kb.mul(sum, factor)
                        }
                    }
                }
            };
            let start = kb.splat(start, self.params.lanes);
            let start = kb.let_("start", start);
            starts.extend((0..self.parts()).map(|_| start));
        }
        starts
    }

    /// The weight codes of every part for one quad, pinned.
    fn quad_operands(
        &self,
        kb: &mut KernelBuilder,
        format: Format,
        bits: &[ExprId],
        quad: usize,
    ) -> Vec<ExprId> {
        let operand = |&word: &ExprId| {
            let codes = match self.params.dot {
                IntDot::Signed(_) => quad_signed(kb, format, word, quad),
                IntDot::Unsigned(_) | IntDot::Pairs { .. } | IntDot::Widen => {
                    quad_codes(kb, format, word, quad)
                }
            };
            kb.let_("q", codes)
        };
        bits.iter().map(operand).collect()
    }

    /// Four consecutive activation codes of a plane in every 32-bit lane, i8.
    fn x_quad(&self, kb: &mut KernelBuilder, (r, plane): (u32, usize), g: ExprId, quad: usize) -> ExprId {
        let col = kb.mul_int(g, GROUP as i64);
        let offset = plane * self.spec.k.next_multiple_of(GROUP) + 4 * quad;
        let col = kb.add_int(col, offset as i64);
        let at = self.x_at(kb, r, col);
        let four = kb.load_vec(self.spec.x, at, 4);
        let word = kb.bitcast(four, Ty::scalar(DType::I32));
        let words = kb.splat(word, self.params.lanes);
        let bytes = kb.bitcast(words, Ty::vector(DType::I8, 4 * self.params.lanes));
        kb.let_("x", bytes)
    }

    /// Calls `f` for every quad of a group, activation row, plane and part: number of the plane, of the accumulator,
    /// weight codes and activation codes.
    fn each_quad(
        &self,
        kb: &mut KernelBuilder,
        format: Format,
        g: ExprId,
        mut f: impl FnMut(&mut KernelBuilder, (usize, usize), ExprId, ExprId),
    ) {
        for word in 0..words(format) {
            let bits = self.words(kb, format, g, word);
            for quad in quads(format, word) {
                let weights = self.quad_operands(kb, format, &bits, quad);
                for r in 0..self.rows {
                    for plane in 0..self.planes() {
                        let x = self.x_quad(kb, (r, plane), g, quad);
                        for (part, &w) in (0..).zip(&weights) {
                            f(kb, (plane, self.index(r, part)), w, x);
                        }
                    }
                }
            }
        }
    }

    /// Adds all quads of a group to `totals` (per plane and accumulator).
    fn quads(&self, kb: &mut KernelBuilder, format: Format, g: ExprId, totals: &mut [Vec<ExprId>]) {
        self.each_quad(kb, format, g, |kb, (plane, i), w, x| {
            let next = self.add_quad(kb, totals[plane][i], w, x);
            totals[plane][i] = kb.let_("t", next);
        });
    }

    fn add_quad(&self, kb: &mut KernelBuilder, total: ExprId, weights: ExprId, x: ExprId) -> ExprId {
        match self.params.dot {
            IntDot::Unsigned(instr) | IntDot::Signed(instr) => kb.instr(instr, vec![total, weights, x]),
            IntDot::Pairs { words, .. } => self.add_word_pairs(kb, words, total, weights, x),
            IntDot::Widen => {
                let mut sum = total;
                let lanes = self.params.lanes;
                for column in 0..4 {
                    let pick: Vec<u32> = (0..lanes).map(|lane| 4 * lane + column).collect();
                    let w = kb.shuffle(weights, None, pick.clone());
                    let x = kb.shuffle(x, None, pick);
                    let (w, x) = (kb.cast(w, DType::I32), kb.cast(x, DType::I32));
                    let product = kb.mul(w, x);
                    sum = kb.add(sum, product);
                }
                sum
            }
        }
    }

    /// Even and odd bytes as 16-bit numbers: codes zero-extended, activations sign-extended.
    fn add_word_pairs(
        &self,
        kb: &mut KernelBuilder,
        words: InstrId,
        total: ExprId,
        weights: ExprId,
        x: ExprId,
    ) -> ExprId {
        let lanes = 2 * self.params.lanes;
        let w = kb.bitcast(weights, Ty::vector(DType::U16, lanes));
        let x = kb.bitcast(x, Ty::vector(DType::I16, lanes));
        let (low, by) = (kb.int_of(0xff, DType::U16), kb.int_of(8, DType::U16));
        let even_w = kb.binary(BinOp::And, w, low);
        let odd_w = kb.binary(BinOp::Shr, w, by);
        let by = kb.int_of(8, DType::I16);
        let up = kb.binary(BinOp::Shl, x, by);
        let even_x = kb.binary(BinOp::Shr, up, by);
        let odd_x = kb.binary(BinOp::Shr, x, by);
        let mut sum = total;
        for (w, x) in [(even_w, even_x), (odd_w, odd_x)] {
            let w = kb.bitcast(w, Ty::vector(DType::I16, lanes));
            let products = kb.instr(words, vec![w, x]);
            sum = kb.add(sum, products);
        }
        sum
    }

    /// The sums of a group of 4-bit codes through i16 pairs, one instruction and one addition per quad. 16 products of at
    /// most 15 * 128 meet in each i16: 30720, below its limit.
    fn byte_pairs(
        &self,
        kb: &mut KernelBuilder,
        format: Format,
        g: ExprId,
        (bytes, words): (InstrId, InstrId),
    ) -> Vec<Vec<ExprId>> {
        let accumulators = (self.rows * self.parts()) as usize;
        let zero = kb.constant(0.0, Ty::vector(DType::I16, 2 * self.params.lanes));
        let ones = kb.constant(1.0, Ty::vector(DType::I16, 2 * self.params.lanes));
        let mut sums = vec![vec![zero; accumulators]; self.planes()];
        self.each_quad(kb, format, g, |kb, (plane, i), w, x| {
            let products = kb.instr(bytes, vec![w, x]);
            let next = kb.add(sums[plane][i], products);
            sums[plane][i] = kb.let_("p", next);
        });
        for sum in sums.iter_mut().flatten() {
            *sum = kb.instr(words, vec![*sum, ones]);
        }
        sums
    }
}

/// One total per accumulator from its planes: each plane is worth 256 times the next.
fn fold_planes(kb: &mut KernelBuilder, planes: Vec<Vec<ExprId>>) -> Vec<ExprId> {
    let fold = planes.into_iter().reduce(|high, low| {
        let by = kb.int_of(8, DType::I32);
        let add = |(h, l): (ExprId, ExprId)| {
            let h = kb.binary(BinOp::Shl, h, by);
            kb.add(h, l)
        };
        high.into_iter().zip(low).map(add).collect()
    });
    fold.unwrap_or_default()
}
