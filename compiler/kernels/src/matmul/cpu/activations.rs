//! The activations of a register tile: where they lie, and as operands.

use super::microtile::Microtile;
use crate::matmul::problem::{DOT_COLUMNS, QuantizedActivations};
use crate::quantize::CodeBlock;
use mlcc_ir::kernel::ExprType;
use mlcc_ir::types::DType;
use mlcc_kernel_lang::Val;

impl<'k> Microtile<'k, '_> {
    /// Place of entry `entry` of row `row`, where each row of x has `entries` entries.
    fn row_entry(&self, row: u32, entry: Val<'k>, entries: usize) -> Val<'k> {
        let entries = entries as i64;
        match &self.listed {
            Some(rows) => {
                let start = rows[row as usize][0] * entries;
                let start = match self.cpu.expert.and_then(|chosen| chosen.zero) {
                    Some(zero) => start + zero,
                    None => start,
                };
                start + entry
            }
            None => self.row * entries + entry + i64::from(row) * entries,
        }
    }

    // ---- floats

    /// `count` float activations of a row from column `col` on.
    fn x_floats(&self, row: u32, col: Val<'k>, count: u32) -> Val<'k> {
        let problem = self.cpu.problem;
        let at = self.row_entry(row, col, problem.activation.row_stride(problem.k));
        self.cpu.view(problem.x).load([at], count)
    }

    /// An activation in all lanes, f32, pinned.
    pub fn x_float(&self, row: u32, col: Val<'k>) -> Val<'k> {
        self.x_floats(row, col, 1).cast(DType::F32).splat(self.lanes()).named("x")
    }

    /// Two bf16 activations in all lanes, u32.
    pub fn x_pair(&self, row: u32, col: Val<'k>) -> Val<'k> {
        self.x_floats(row, col, 2).bits_as(ExprType::scalar(DType::U32)).splat(self.lanes())
    }

    /// The columns `first + c` and the next, as bits of f32, as a lane of a vector with those of the eight
    /// columns around them, in all lanes.
    pub fn x_pair_of_four(&self, row: u32, first: Val<'k>, c: usize) -> Val<'k> {
        let pairs = self.x_floats(row, first + (c / 8 * 8) as i64, 8);
        // Floats, because LLVM looks for a lane of those.
        let pairs = pairs.bits_as(ExprType::vector(DType::F32, 4));
        pairs.shuffle(vec![(c % 8 / 2) as u32; self.lanes() as usize])
    }

    /// A bf16 activation and a zero after it in all lanes, u32.
    pub fn x_last(&self, row: u32, col: Val<'k>) -> Val<'k> {
        let x = self.x_floats(row, col, 1).bits_as(ExprType::scalar(DType::U16));
        x.cast(DType::U32).splat(self.lanes())
    }

    // ---- codes

    /// The place of the four codes of a quad in x: an offset in elements, a multiple of those of four quads,
    /// and the number of quads after it.
    fn quad_at(
        &self,
        codes: QuantizedActivations,
        (row, plane): (u32, usize),
        g: Val<'k>,
        quad: usize,
    ) -> (Val<'k>, i64) {
        let (elements, quads) = (codes.quad_elements() as i64, DOT_COLUMNS / 4);
        let row_quads = codes.row_quads(self.cpu.problem.k) as i64;
        let (group, quad) = ((codes.planes * quads) as i64, (plane * quads + quad) as i64);
        if self.listed.is_some() {
            return (self.row_entry(row, g * (group * elements), (row_quads * elements) as usize), quad);
        }
        let block = if self.interleaved { codes.block } else { CodeBlock::SINGLE };
        let (rows, columns) = (i64::from(block.rows), i64::from(block.columns) / 4);
        let start = self.row * (row_quads * elements) + g * (group * rows * elements);
        // Rows of earlier blocks, then the runs of `columns` quads of every row of this one.
        let (before, row) = (i64::from(row) / rows * rows, i64::from(row) % rows);
        let (run, within) = (quad / columns * columns, quad % columns);
        (start, before * row_quads + run * rows + row * columns + within)
    }

    /// `count` quads of activations from quad `first` after `start` on, i32.
    fn x_words(&self, codes: QuantizedActivations, start: Val<'k>, first: i64, count: u32) -> Val<'k> {
        let elements = codes.quad_elements();
        let x = self.cpu.view(self.cpu.problem.x);
        let quads = x.load([start + first * elements as i64], count * elements as u32);
        quads.bits_as(ExprType::vector(DType::I32, count))
    }

    /// Four consecutive activation codes of a plane in every 32-bit lane, i8, pinned.
    pub fn x_quad(&self, codes: QuantizedActivations, of: (u32, usize), g: Val<'k>, quad: usize) -> Val<'k> {
        let (start, quad) = self.quad_at(codes, of, g, quad);
        let words = if self.cpu.plan.by_lane {
            let four = self.x_words(codes, start, quad / 4 * 4, 4);
            four.shuffle(vec![(quad % 4) as u32; self.lanes() as usize])
        } else {
            self.x_words(codes, start, quad, 1).splat(self.lanes())
        };
        words.bits_as(ExprType::vector(DType::I8, 4 * self.lanes())).named("x")
    }

    /// Eight codes of rows `row` and `row + 1`, from quad `quad` on, pinned.
    pub fn x_square(
        &self,
        codes: QuantizedActivations,
        (row, plane): (u32, usize),
        g: Val<'k>,
        quad: usize,
    ) -> Val<'k> {
        let [(start, first), (other, second)] =
            [row, row + 1].map(|row| self.quad_at(codes, (row, plane), g, quad));
        let words = if self.interleaved {
            self.x_words(codes, start, first, 4)
        } else {
            let (a, b) = (self.x_words(codes, start, first, 2), self.x_words(codes, other, second, 2));
            a.shuffle_with(b, 0..4)
        };
        words.bits_as(ExprType::vector(DType::I8, 16)).named("x")
    }

    /// The start of the sums of a row in group `g`.
    pub fn x_start(&self, codes: QuantizedActivations, row: u32, g: Val<'k>) -> Val<'k> {
        self.cpu.view(codes.starts).at([self.row_entry(row, g, self.cpu.problem.groups())])
    }

    /// Scale `scale` of a row.
    pub fn x_scale(&self, codes: QuantizedActivations, row: u32, scale: Val<'k>) -> Val<'k> {
        let entries = codes.row_scales(self.cpu.problem.k);
        self.cpu.view(codes.scales).at([self.row_entry(row, scale, entries)])
    }
}
