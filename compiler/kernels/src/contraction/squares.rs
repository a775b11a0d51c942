//! Integer products two rows by two: an instruction multiplies two rows of 8 weight codes with two rows of 8 activation codes,
//! every one with every other (`smmla` of AArch64), twice the products of a dot instruction.
//!
//! A strip has the codes of two weight rows in one vector, 8 columns of each, and so has a block of activations
//! ([`CodeBlock`](super::CodeBlock)). Four rows of weights and two of activations have two vectors of sums,
//! `[w0 x0, w0 x1, w1 x0, w1 x1]` and `[w2 x0, w2 x1, w3 x0, w3 x1]`. They stand where the sums of the first and of the second of
//! both rows of activations stand otherwise, until the last columns have been added ([`Block::part_rows`]).

use super::Codes;
use super::block::Block;
use super::integers::QUADS;
use super::strip::Strip;
use crate::params::CodeProduct;
use mlcc_ir::builder::KernelBuilder;
use mlcc_ir::instr::InstrId;
use mlcc_ir::kernel::{ExprId, Ty};
use mlcc_ir::types::DType;
use mlcc_quant::tile::{GroupReader, quad_signed, quads, words};

/// Lanes of the first and of the second of both vectors of sums: the first and last two rows of a part, each for two rows of
/// activations.
const ROWS: [[u32; 4]; 2] = [[0, 0, 1, 1], [2, 2, 3, 3]];

/// Quads of two vectors, that of the first before that of the second: of the first two rows, of the last two.
const NEIGHBOURS: [[u32; 4]; 2] = [[0, 4, 1, 5], [2, 6, 3, 7]];

impl Strip {
    /// Unpacks one part of group `u`, whose scales go to `at`.
    pub(super) fn fill_squares(
        &self,
        kb: &mut KernelBuilder,
        reader: &GroupReader,
        (parts, u, part): (u32, ExprId, u32),
        (scales, at): (ExprId, ExprId),
    ) {
        for (i, rows) in (0..).zip(ROWS) {
            let scales = kb.shuffle(scales, None, rows.into());
            let at = kb.add_int(at, i * i64::from(self.lanes));
            kb.store_vec(self.scales, at, scales);
        }
        let mut codes = [None; QUADS];
        for word in 0..words(reader.format) {
            let bits = reader.word(kb, word);
            let bits = kb.let_("word", bits);
            for quad in quads(reader.format, word) {
                let signed = quad_signed(kb, reader.format, bits, quad);
                let signed = kb.bitcast(signed, Ty::vector(DType::I32, self.lanes));
                codes[quad] = Some(kb.let_("quad", signed));
            }
        }
        let codes = codes.map(|quad| quad.expect("words have all quads"));
        for (first, pair) in (0..).step_by(2).zip(codes.chunks(2)) {
            for (i, rows) in NEIGHBOURS.into_iter().enumerate() {
                let square = kb.shuffle(pair[0], Some(pair[1]), rows.into());
                let square = kb.bitcast(square, Ty::vector(DType::I8, 4 * self.lanes));
                let at = Self::vector(kb, parts, u, first + i, part, QUADS);
                let at = kb.mul_int(at, i64::from(4 * self.lanes));
                kb.store_vec(self.codes, at, square);
            }
        }
    }
}

impl Block<'_> {
    /// Whether its sums are those of two rows by two.
    pub(super) fn squares(&self) -> bool {
        self.strip.is_some_and(|strip| matches!(strip.product, CodeProduct::Squares { .. }))
    }

    /// Adds a group to `totals`, one set of sums per plane from plane `plane` on.
    pub(super) fn add_squares(
        &self,
        kb: &mut KernelBuilder,
        instr: InstrId,
        codes: Codes,
        g: ExprId,
        plane: usize,
        mut totals: Vec<Vec<ExprId>>,
    ) -> Vec<Vec<ExprId>> {
        let strip = self.strip.expect("squares are made of a strip");
        for quad in (0..QUADS).step_by(2) {
            let weights: Vec<[ExprId; 2]> = (0..self.parts())
                .map(|part| [0, 1].map(|i| strip.operand(kb, self.parts(), g, quad + i, part).codes))
                .collect();
            for r in (0..self.rows).step_by(2) {
                for (set, totals) in totals.iter_mut().enumerate() {
                    let x = self.x_square(kb, codes, (r, plane + set), g, quad);
                    for (part, both) in (0..).zip(&weights) {
                        for (i, &w) in (0..).zip(both) {
                            let total = &mut totals[self.index(r + i, part)];
                            let sum = kb.instr(instr, vec![*total, w, x]);
                            *total = kb.let_("t", sum);
                        }
                    }
                }
            }
        }
        totals
    }

    /// Eight codes of rows `r` and `r + 1`, from quad `quad` on.
    fn x_square(
        &self,
        kb: &mut KernelBuilder,
        codes: Codes,
        (r, plane): (u32, usize),
        g: ExprId,
        quad: usize,
    ) -> ExprId {
        let [(start, first), (other, second)] =
            [r, r + 1].map(|r| self.x_quad_at(kb, codes, (r, plane), g, quad));
        let words = if self.interleaved {
            self.x_words(kb, codes, start, (first, 4))
        } else {
            let a = self.x_words(kb, codes, start, (first, 2));
            let b = self.x_words(kb, codes, other, (second, 2));
            kb.shuffle(a, Some(b), vec![0, 1, 2, 3])
        };
        let bytes = kb.bitcast(words, Ty::vector(DType::I8, 16));
        kb.let_("x", bytes)
    }

    /// What `value` is for the row of activations that each lane of a vector of sums of row `r` belongs to.
    pub(super) fn of_both_rows(
        &self,
        kb: &mut KernelBuilder,
        r: u32,
        mut value: impl FnMut(&mut KernelBuilder, u32) -> ExprId,
    ) -> ExprId {
        let even = r / 2 * 2;
        let [a, b] = [even, even + 1].map(|r| {
            let value = value(kb, r);
            kb.splat(value, self.lanes())
        });
        kb.shuffle(a, Some(b), vec![0, 4, 0, 4])
    }

    /// Puts the sums of two rows of activations into vectors of their own.
    pub(super) fn part_rows(&self, kb: &mut KernelBuilder) {
        for r in (0..self.rows).step_by(2) {
            for part in 0..self.parts() {
                let at = [r, r + 1].map(|r| self.slot(kb, 0, r, part));
                let sums = at.map(|at| {
                    let sums = kb.load_vec(self.acc, at, self.lanes());
                    kb.let_("sums", sums)
                });
                for (at, lanes) in at.into_iter().zip([[0, 2, 4, 6], [1, 3, 5, 7]]) {
                    let row = kb.shuffle(sums[0], Some(sums[1]), lanes.into());
                    kb.store_vec(self.acc, at, row);
                }
            }
        }
    }
}
