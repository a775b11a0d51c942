//! Contractions in integers: packed weights against int8 activations, exact within each group of 32.
//!
//! Stored weight codes are unsigned with a zero point z, so `sum (c - z) x = sum c x - z sum x`: the accumulator of a group
//! starts at `-z sum x`, known per group of activations, and the dot instructions take the codes as they are.

use super::{Block, GROUP};
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

    /// The exact sums of one group, i32, for every accumulator.
    fn int_group(&self, kb: &mut KernelBuilder, format: Format, g: ExprId, sums: BufId) -> Vec<ExprId> {
        match (self.params.dot, format) {
            (IntDot::Pairs { bytes, words }, Format::Q4G32) => {
                let pairs = self.byte_pairs(kb, format, g, bytes);
                self.from_start(kb, format, g, sums, |kb, i, start| {
                    let ones = kb.constant(1.0, Ty::vector(DType::I16, 2 * self.params.lanes));
                    let total = kb.instr(words, vec![pairs[i], ones]);
                    kb.add(total, start)
                })
            }
            (IntDot::Signed(_), _) => {
                let zero = kb.constant(0.0, Ty::vector(DType::I32, self.params.lanes));
                let mut totals = vec![zero; (self.rows * self.parts()) as usize];
                self.quads(kb, format, g, &mut totals);
                totals
            }
            (IntDot::Unsigned(_) | IntDot::Pairs { .. } | IntDot::Widen, _) => {
                let mut totals = self.from_start(kb, format, g, sums, |_, _, start| start);
                self.quads(kb, format, g, &mut totals);
                totals
            }
        }
    }

    /// For every accumulator, `f` of its index and of `-zero point * sum of the activations`.
    fn from_start(
        &self,
        kb: &mut KernelBuilder,
        format: Format,
        g: ExprId,
        sums: BufId,
        f: impl Fn(&mut KernelBuilder, usize, ExprId) -> ExprId,
    ) -> Vec<ExprId> {
        let mut totals = Vec::new();
        for r in 0..self.rows {
            let at = self.x_group_at(kb, r, g);
            let sum = kb.load(sums, at);
            let factor = kb.int_of(-zero_point(format), DType::I32);
            let start = kb.mul(sum, factor);
            let start = kb.splat(start, self.params.lanes);
            let start = kb.let_("start", start);
            for part in 0..self.parts() {
                totals.push(f(kb, self.index(r, part), start));
            }
        }
        totals
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

    /// Four consecutive activation codes in every 32-bit lane, i8.
    fn x_quad(&self, kb: &mut KernelBuilder, r: u32, g: ExprId, quad: usize) -> ExprId {
        let col = kb.mul_int(g, GROUP as i64);
        let col = kb.add_int(col, 4 * quad as i64);
        let at = self.x_at(kb, r, col);
        let four = kb.load_vec(self.spec.x, at, 4);
        let word = kb.bitcast(four, Ty::scalar(DType::I32));
        let words = kb.splat(word, self.params.lanes);
        let bytes = kb.bitcast(words, Ty::vector(DType::I8, 4 * self.params.lanes));
        kb.let_("x", bytes)
    }

    /// Adds all quads of a group to `totals`.
    fn quads(&self, kb: &mut KernelBuilder, format: Format, g: ExprId, totals: &mut [ExprId]) {
        for word in 0..words(format) {
            let bits = self.words(kb, format, g, word);
            for quad in quads(format, word) {
                let weights = self.quad_operands(kb, format, &bits, quad);
                for r in 0..self.rows {
                    let x = self.x_quad(kb, r, g, quad);
                    for part in 0..self.parts() {
                        let total = &mut totals[self.index(r, part)];
                        let next = self.add_quad(kb, *total, weights[part as usize], x);
                        *total = kb.let_("t", next);
                    }
                }
            }
        }
    }

    fn add_quad(&self, kb: &mut KernelBuilder, total: ExprId, weights: ExprId, x: ExprId) -> ExprId {
        match self.params.dot {
            IntDot::Unsigned(instr) | IntDot::Signed(instr) => kb.instr(instr, vec![total, weights, x]),
            IntDot::Pairs { words, .. } => {
                // Even and odd bytes as 16-bit numbers: codes zero-extended, activations sign-extended.
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

    /// The sums of a group of 4-bit codes as i16 pairs, one instruction and one addition per quad. 16 products of at most
    /// 14 * 127 meet in each i16: 28448, below its limit.
    fn byte_pairs(&self, kb: &mut KernelBuilder, format: Format, g: ExprId, bytes: InstrId) -> Vec<ExprId> {
        let mut sums: Vec<Option<ExprId>> = vec![None; (self.rows * self.parts()) as usize];
        for word in 0..words(format) {
            let bits = self.words(kb, format, g, word);
            for quad in quads(format, word) {
                let weights = self.quad_operands(kb, format, &bits, quad);
                for r in 0..self.rows {
                    let x = self.x_quad(kb, r, g, quad);
                    for part in 0..self.parts() {
                        let products = kb.instr(bytes, vec![weights[part as usize], x]);
                        let sum = &mut sums[self.index(r, part)];
                        let next = match *sum {
                            Some(sum) => kb.add(sum, products),
                            None => products,
                        };
                        *sum = Some(kb.let_("p", next));
                    }
                }
            }
        }
        sums.into_iter().flatten().collect()
    }
}
