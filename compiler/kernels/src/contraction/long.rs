//! Integer products without a dot instruction where bytes are multiplied to words of their own (`smull` of AArch64): 8 products per
//! instruction, which are added in words for as many columns as fit, then in pairs.

use super::Codes;
use super::block::Block;
use crate::params::{CodeProduct, Long};
use mlcc_ir::builder::KernelBuilder;
use mlcc_ir::kernel::ExprId;
use mlcc_ir::types::Format;

/// Sums in words, of the first and of the last two rows of a part, four columns each.
type Words = Option<[ExprId; 2]>;

impl Block<'_> {
    /// Adds the quads of a group to `totals`, one set of sums per plane from plane `plane` on.
    pub(super) fn add_long(
        &self,
        kb: &mut KernelBuilder,
        (format, product): (Format, CodeProduct),
        (long, quads): (Long, usize),
        (codes, plane): (Codes, usize),
        g: ExprId,
        mut totals: Vec<Vec<ExprId>>,
    ) -> Vec<Vec<ExprId>> {
        let mut words: Vec<Vec<Words>> = vec![vec![None; self.accumulators()]; totals.len()];
        let mut met = 0;
        for step in 0..self.steps(format) {
            for (quad, weights) in self.word_operands(kb, format, product, g, step) {
                let weights: Vec<[ExprId; 2]> = weights.iter().map(|w| halves(kb, w.codes)).collect();
                for r in 0..self.rows {
                    for (set, words) in words.iter_mut().enumerate() {
                        let x = self.x_quad(kb, codes, (r, plane + set), g, quad);
                        let x = halves(kb, x);
                        for (part, w) in (0..).zip(&weights) {
                            let sums = &mut words[self.index(r, part)];
                            *sums = Some([0, 1].map(|half| {
                                let products = kb.instr(long.multiply, vec![w[half], x[half]]);
                                let sum = sums.map_or(products, |sums| kb.add(sums[half], products));
                                kb.let_("words", sum)
                            }));
                        }
                    }
                }
                met += 1;
                if met % quads == 0 {
                    flush(kb, long, &mut words, &mut totals);
                }
            }
        }
        flush(kb, long, &mut words, &mut totals);
        totals
    }
}

/// Both halves of 16 bytes.
fn halves(kb: &mut KernelBuilder, bytes: ExprId) -> [ExprId; 2] {
    [0, 8].map(|first| kb.shuffle(bytes, None, (first..first + 8).collect()))
}

/// Adds the sums in words to the totals and forgets them.
fn flush(kb: &mut KernelBuilder, long: Long, words: &mut [Vec<Words>], totals: &mut [Vec<ExprId>]) {
    for (words, total) in words.iter_mut().flatten().zip(totals.iter_mut().flatten()) {
        let Some(sums) = words.take() else { continue };
        let pairs = sums.map(|sums| kb.instr(long.pairs, vec![sums]));
        let rows = kb.instr(long.join, pairs.into());
        let sum = kb.add(*total, rows);
        *total = kb.let_("t", sum);
    }
}
