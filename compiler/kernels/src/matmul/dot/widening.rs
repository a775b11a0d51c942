//! Widening multiplies (`smull` of AArch64): 8 products of bytes as words of their own, added in words for as
//! many columns as fit, then in pairs.

use super::DotOperands;
use crate::params::WideningDot;
use mlcc_kernel_lang::Val;

/// Sums in words, of the first and of the last two rows of a part, four columns each.
type WideSums<'k> = Option<[Val<'k>; 2]>;

pub(super) fn add<'k>(
    group: &impl DotOperands<'k>,
    long: WideningDot,
    quads: usize,
    first: usize,
    totals: &mut [Vec<Val<'k>>],
) {
    let (rows, ..) = group.shape();
    let mut words: Vec<Vec<WideSums>> = vec![vec![None; group.accumulator_count()]; totals.len()];
    let mut met = 0;
    for step in 0..group.steps() {
        for (quad, weights) in group.weights(step) {
            let weights: Vec<[Val; 2]> = weights.iter().map(|w| halves(w.codes)).collect();
            for row in 0..rows {
                for (set, words) in words.iter_mut().enumerate() {
                    let x = halves(group.x(row, first + set, quad));
                    for (part, w) in (0..).zip(&weights) {
                        let sums = &mut words[group.accumulator_index(row, part)];
                        *sums = Some([0, 1].map(|half| {
                            let products = w[half].instr(long.multiply, &[x[half]]);
                            sums.map_or(products, |sums| sums[half] + products).named("words")
                        }));
                    }
                }
            }
            met += 1;
            if met % quads == 0 {
                flush(long, &mut words, totals);
            }
        }
    }
    flush(long, &mut words, totals);
}

/// Both halves of 16 bytes.
fn halves(bytes: Val<'_>) -> [Val<'_>; 2] {
    [0, 8].map(|first| bytes.shuffle(first..first + 8))
}

/// Adds the sums in words to the totals and forgets them.
fn flush<'k>(long: WideningDot, words: &mut [Vec<WideSums<'k>>], totals: &mut [Vec<Val<'k>>]) {
    for (words, total) in words.iter_mut().flatten().zip(totals.iter_mut().flatten()) {
        let Some(sums) = words.take() else { continue };
        let [first, last] = sums.map(|sums| sums.instr(long.pairs, &[]));
        *total = (*total + first.instr(long.join, &[last])).named("t");
    }
}
