//! Products two rows by two (`smmla` of AArch64): an instruction multiplies two rows of 8 weight codes with
//! two rows of 8 activation codes, every one with every other, twice the products of a dot instruction.
//!
//! A panel has the codes of two weight rows in one vector, 8 columns of each, and so has a block of
//! activations ([`CodeBlock`](crate::quantize::CodeBlock)). Four rows of weights and two of activations have
//! two vectors of sums, `[w0 x0, w0 x1, w1 x0, w1 x1]` and `[w2 x0, w2 x1, w3 x0, w3 x1]`. They are where the
//! sums of the first and of the second of both rows of activations are otherwise, until the last columns have
//! been added ([`part_rows`]).

use super::{DotOperands, QUADS};
use mlcc_ir::instr::InstrId;
use mlcc_ir::kernel::ExprType;
use mlcc_ir::types::DType;
use mlcc_kernel_lang::Val;

/// Lanes of the first and of the second of both vectors of sums: the first and last two rows of a part, each
/// for two rows of activations.
const ROWS: [[u32; 4]; 2] = [[0, 0, 1, 1], [2, 2, 3, 3]];

/// Quads of two vectors, that of the first before that of the second: of the first two rows, of the last two.
const NEIGHBOURS: [[u32; 4]; 2] = [[0, 4, 1, 5], [2, 6, 3, 7]];

pub(super) fn add<'k>(
    group: &impl DotOperands<'k>,
    instr: InstrId,
    first: usize,
    totals: &mut [Vec<Val<'k>>],
) {
    let (rows, parts, _) = group.shape();
    for quad in (0..QUADS).step_by(2) {
        let square = |part| [0, 1].map(|i| group.unpacked(quad + i, part).codes);
        let weights: Vec<[Val; 2]> = (0..parts).map(square).collect();
        for row in (0..rows).step_by(2) {
            for (set, totals) in totals.iter_mut().enumerate() {
                let x = group.x_square(row, first + set, quad);
                for (part, both) in (0..).zip(&weights) {
                    for (i, &w) in (0..).zip(both) {
                        let total = &mut totals[group.accumulator_index(row + i, part)];
                        *total = total.instr(instr, &[w, x]).named("t");
                    }
                }
            }
        }
    }
}

/// The weight codes of a part as the instruction takes them, from its quads of signed codes in order (i32
/// lanes).
pub(in crate::matmul) fn mmla_operands<'k>(quads: &[Val<'k>]) -> Vec<Val<'k>> {
    let square = |pair: &[Val<'k>], rows| {
        let codes = pair[0].shuffle_with(pair[1], rows);
        codes.bits_as(ExprType::vector(DType::I8, 4 * codes.lanes()))
    };
    quads.chunks(2).flat_map(|pair| NEIGHBOURS.map(|rows| square(pair, rows))).collect()
}

/// The scales (or offsets) of both vectors of sums of a part, from those of its rows.
pub(in crate::matmul) fn square_numbers(numbers: Val<'_>) -> [Val<'_>; 2] {
    ROWS.map(|rows| numbers.shuffle(rows))
}

/// The values of two rows of activations, in the lanes of their sums.
pub(in crate::matmul) fn of_both_rows<'k>([a, b]: [Val<'k>; 2], lanes: u32) -> Val<'k> {
    a.splat(lanes).shuffle_with(b.splat(lanes), [0, 4, 0, 4])
}

/// Both vectors of sums of two rows of activations as one vector for each row.
pub(in crate::matmul) fn part_rows<'k>([first, last]: [Val<'k>; 2]) -> [Val<'k>; 2] {
    [[0, 2, 4, 6], [1, 3, 5, 7]].map(|lanes| first.shuffle_with(last, lanes))
}
