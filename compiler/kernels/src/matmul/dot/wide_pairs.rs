//! Products of 16-bit numbers in pairs (`pmaddwd`): 8-bit codes widened, times activations of both planes.

use super::DotOperands;
use mlcc_ir::instr::InstrId;
use mlcc_ir::kernel::ExprType;
use mlcc_ir::types::DType;
use mlcc_kernel_lang::Val;

pub(super) fn add<'k>(
    group: &impl DotOperands<'k>,
    words: InstrId,
    mut totals: Vec<Val<'k>>,
) -> Vec<Val<'k>> {
    let (rows, ..) = group.shape();
    for step in 0..group.steps() {
        for (quad, weights) in group.weights(step) {
            let weights: Vec<[Val; 2]> = weights.iter().map(|w| code_words(w.codes)).collect();
            for row in 0..rows {
                let [high, low] = [0, 1].map(|plane| group.x(row, plane, quad));
                let x = activation_words(high, low);
                for (part, w) in (0..).zip(&weights) {
                    let total = &mut totals[group.accumulator_index(row, part)];
                    for (w, x) in w.iter().zip(x) {
                        *total = group.pin("t", *total + w.instr(words, &[x]));
                    }
                }
            }
        }
    }
    totals
}

/// Even and odd bytes of unsigned codes.
fn code_words(codes: Val<'_>) -> [Val<'_>; 2] {
    let lanes = codes.lanes() / 2;
    let codes = codes.bits_as(ExprType::vector(DType::U16, lanes));
    [codes & 0xff, codes >> 8].map(|words| words.bits_as(ExprType::vector(DType::I16, lanes)).named("w"))
}

/// `256 high + low` of even and of odd bytes.
fn activation_words<'k>(high: Val<'k>, low: Val<'k>) -> [Val<'k>; 2] {
    let words = ExprType::vector(DType::I16, high.lanes() / 2);
    let (high, low) = (high.bits_as(words), low.bits_as(words));
    [(high << 8) + ((low << 8) >> 8), (high & -256) + (low >> 8)].map(|words| words.named("x"))
}
