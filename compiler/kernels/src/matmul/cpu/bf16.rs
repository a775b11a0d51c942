//! Products of bf16 weights and activations by an instruction that takes both columns of a pair.

use super::microtile::Microtile;
use mlcc_ir::instr::InstrId;
use mlcc_ir::kernel::ExprType;
use mlcc_ir::types::DType;
use mlcc_kernel_lang::Val;
use mlcc_quant::plain::PlainType;

impl<'k> Microtile<'k, '_> {
    /// Adds `count` columns from `first` on to `acc`, in turn to each chain. After an odd k is a zero.
    pub(super) fn bf16_dots(&self, instr: InstrId, first: Val<'k>, count: usize, acc: &mut [Vec<Val<'k>>]) {
        let lanes = self.lanes();
        for (number, c) in (0..count).step_by(2).enumerate() {
            let col = first + c as i64;
            let weights = |part| {
                let rows = self.part(part);
                self.cpu.plain(PlainType::BF16).pair(rows.tile, col, rows.row, lanes).named("w")
            };
            let weights: Vec<Val> = (0..self.parts()).map(weights).collect();
            for row in 0..self.rows {
                let x = if c / 8 * 8 + 8 <= count && self.cpu.plan.by_lane {
                    self.x_pair_of_four(row, first, c)
                } else if c + 1 < count {
                    self.x_pair(row, col)
                } else {
                    self.x_last(row, col)
                };
                let x = x.bits_as(ExprType::vector(DType::BF16, 2 * lanes)).named("x");
                for (part, &w) in (0..).zip(&weights) {
                    let sum = &mut acc[number % self.chains as usize][self.accumulator_index(row, part)];
                    *sum = sum.instr(instr, &[w, x]).named("a");
                }
            }
        }
    }
}
