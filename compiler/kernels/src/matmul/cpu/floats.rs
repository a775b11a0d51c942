//! Float products of a register tile: plain and packed weights against f32 or bf16 activations.

use super::microtile::{Microtile, TileWeights};
use super::prefetch::VisitPrefetch;
use crate::matmul::problem::MatmulActivation;
use mlcc_ir::kernel::ExprType;
use mlcc_ir::types::{DType, QuantFormat};
use mlcc_kernel_lang::Val;
use mlcc_quant::TILE;
use mlcc_quant::plain::PlainType;
use mlcc_quant::tile::{column_runs, piece_floats, words_per_block};

/// Columns that register tiles pass by before they prefetch more of what comes next.
pub(super) const VISIT: usize = 32;

/// A range of columns. The last one of its kind ends with `rest` columns after whole pieces, or is whole
/// where that is zero.
#[derive(Clone, Copy)]
pub(super) struct ColumnSpan<'k> {
    pub first: Val<'k>,
    pub count: Val<'k>,
    pub rest: usize,
}

impl<'k> Microtile<'k, '_> {
    // ---- plain weights

    /// Columns per iteration.
    fn step(&self) -> usize {
        self.cpu.plan.unroll.next_multiple_of(2) as usize
    }

    /// Adds all columns.
    pub(super) fn add_plain(&self, plain: PlainType) {
        let (k, problem, step) = (self.cpu.k, self.cpu.problem, self.step());
        k.serial("k", (problem.k / step) as i64, |i| {
            let first = i * step as i64;
            let tiles = self.cpu.plain(plain);
            let here = tiles.place(self.part(0).tile, first, 0);
            self.prefetch(here, step * TILE, problem.tiles() * problem.tile_len());
            self.add_columns(plain, first, step);
        });
        if !problem.k.is_multiple_of(step) {
            self.add_columns(plain, k.int((problem.k / step * step) as i64), problem.k % step);
        }
        // Partial sums, in pairs.
        let mut chains: Vec<Vec<Val>> = (0..self.chains).map(|chain| self.load_acc(chain)).collect();
        while chains.len() > 1 {
            let high = chains.split_off(chains.len().div_ceil(2));
            for (low, high) in chains.iter_mut().zip(&high) {
                low.iter_mut().zip(high).for_each(|(low, &high)| *low = *low + high);
            }
        }
        self.store_acc(0, &chains[0]);
    }

    /// Adds the columns of a piece to the accumulators, which have one chain.
    pub(super) fn add_piece(&self, plain: PlainType, piece: ColumnSpan<'k>, hints: VisitPrefetch<'k>) {
        let (k, by) = (self.cpu.k, VISIT as i64);
        k.serial("visit", hints.visits, |visit| {
            hints.prefetch_visit(self, visit);
            let first = piece.first + visit * by;
            self.add_run(plain, ColumnSpan { first, count: k.int(by), rest: 0 });
        });
        if !piece.rest.is_multiple_of(VISIT) {
            let done = hints.visits * by;
            let (first, count) = (piece.first + done, piece.count - done);
            self.add_run(plain, ColumnSpan { first, count, rest: piece.rest % VISIT });
        }
    }

    /// The same without prefetches.
    fn add_run(&self, plain: PlainType, run: ColumnSpan<'k>) {
        let (k, step) = (self.cpu.k, self.step());
        let full = run.count / step as i64;
        k.serial("k", full, |i| self.add_columns(plain, run.first + i * step as i64, step));
        if !run.rest.is_multiple_of(step) {
            let done = full * step as i64;
            k.when(done.lt(run.count), || self.add_columns(plain, run.first + done, run.rest % step));
        }
    }

    /// Adds `count` columns from `first`, which is even.
    fn add_columns(&self, plain: PlainType, first: Val<'k>, count: usize) {
        let mut acc: Vec<Vec<Val>> = (0..self.chains).map(|chain| self.load_acc(chain)).collect();
        match self.cpu.plan.bf16_dot {
            Some(instr) => self.bf16_dots(instr, first, count, &mut acc),
            None => self.products(plain, first, count, &mut acc),
        }
        for (chain, values) in (0..).zip(&acc) {
            self.store_acc(chain, values);
        }
    }

    /// `acc += w * x` for each column, in turn to each chain.
    fn products(&self, plain: PlainType, first: Val<'k>, count: usize, acc: &mut [Vec<Val<'k>>]) {
        for c in (0..count).step_by(plain.pair_columns()) {
            let pair = first + c as i64;
            let both = self.plain_pairs(plain, pair);
            for j in 0..plain.pair_columns().min(count - c) {
                let weights: Vec<Val> = match self.source {
                    TileWeights::Floats(panel) => {
                        (0..self.parts()).map(|part| panel.column(pair + j as i64, part)).collect()
                    }
                    TileWeights::Memory | TileWeights::Panel(_) => both.iter().map(|w| w[j]).collect(),
                };
                for row in 0..self.rows {
                    let x = self.x_of_pair(row, pair, j, c + 1 < count);
                    for (part, &w) in (0..).zip(&weights) {
                        let sum = &mut acc[(c + j) % self.chains as usize][self.accumulator_index(row, part)];
                        *sum = w.fma(x, *sum).named("a");
                    }
                }
            }
        }
    }

    /// The weights of a pair of columns for every part, where they are read as they are stored.
    fn plain_pairs(&self, plain: PlainType, col: Val<'k>) -> Vec<[Val<'k>; 2]> {
        let columns = |part| {
            let rows = self.part(part);
            self.cpu.plain(plain).columns(rows.tile, col, rows.row, self.lanes())
        };
        match self.source {
            TileWeights::Floats(_) => vec![],
            TileWeights::Memory | TileWeights::Panel(_) => (0..self.parts()).map(columns).collect(),
        }
    }

    /// The activation of column `pair + j` in all lanes, f32, pinned, where a pair of columns begins at
    /// `pair`; the row has the second column too if `whole`.
    fn x_of_pair(&self, row: u32, pair: Val<'k>, j: usize, whole: bool) -> Val<'k> {
        if self.cpu.problem.activation != MatmulActivation::BF16 || !whole {
            return self.x_float(row, pair + j as i64);
        }
        // The upper half of an f32 is a bf16: both columns at once into all lanes, and the other one away.
        let both = self.x_pair(row, pair);
        let bits = if j == 0 { both << 16 } else { both & 0xffff_0000 };
        bits.bits_as(ExprType::vector(DType::F32, self.lanes())).named("x")
    }

    // ---- packed weights

    /// Sums integer weights times activations within a block, then scales: one multiplication per block and
    /// row. Where groups have offsets the weights themselves are scaled.
    pub(super) fn add_grouped(&self, format: QuantFormat) {
        let (k, problem, block) = (self.cpu.k, self.cpu.problem, format.block_columns());
        let full = (problem.k / block) as i64;
        k.serial("g", full, |g| {
            self.prefetch_block(format, g);
            self.add_float_block(format, g, block);
        });
        // The last block, if short.
        if !problem.k.is_multiple_of(block) {
            self.add_float_block(format, k.int(full), problem.k % block);
        }
    }

    /// The first `columns` columns of block `g`.
    fn add_float_block(&self, format: QuantFormat, g: Val<'k>, columns: usize) {
        let first = g * format.block_columns() as i64;
        let grids: Vec<_> = (0..self.parts()).map(|part| self.float_grid(format, g, part)).collect();
        let mut sums: Vec<Vec<Option<Val>>> =
            vec![vec![None; self.accumulator_count()]; self.chains as usize];
        for word in 0..words_per_block(format) {
            let bits = self.words(format, g, word);
            for (at, count) in column_runs(format, word) {
                let present = columns.saturating_sub(at).min(count);
                if present == 0 {
                    continue;
                }
                let weights = self.piece_weights(format, &bits, at, &grids);
                self.piece_products(&weights, (first, at), present, &mut sums);
            }
        }
        let mut acc = self.load_acc(0);
        for part in 0..self.parts() {
            let scaled = grids[part as usize].is_some();
            let scales = (!scaled).then(|| self.group_scales(format, g, part).named("scales"));
            for row in 0..self.rows {
                let i = self.accumulator_index(row, part);
                let total = sums.iter().filter_map(|chain| chain[i]).reduce(|a, b| a + b);
                if let Some(total) = total {
                    acc[i] = scales.map_or_else(|| total + acc[i], |scales| total.fma(scales, acc[i]));
                }
            }
        }
        self.store_acc(0, &acc);
    }

    /// Scales and what is added to the scaled codes of the rows of a part, where groups have offsets.
    fn float_grid(&self, format: QuantFormat, g: Val<'k>, part: u32) -> Option<[Val<'k>; 2]> {
        let offsets = self.block(format, g, part).offsets(self.part(part).row, self.lanes(), true)?;
        Some([self.group_scales(format, g, part).named("scales"), (-offsets).named("added")])
    }

    /// The weights of the piece of a block from column `at` on, for every part: integers where there is no
    /// grid.
    fn piece_weights(
        &self,
        format: QuantFormat,
        bits: &[Val<'k>],
        at: usize,
        grids: &[Option<[Val<'k>; 2]>],
    ) -> Vec<Vec<Val<'k>>> {
        let weights = |(&word, grid): (&Val<'k>, &Option<[Val<'k>; 2]>)| {
            let codes = piece_floats(format, word, at, self.cpu.lookup).into_iter();
            let weight = |w: Val<'k>| grid.map_or(w, |[scales, added]| w.fma(scales, added)).named("w");
            codes.map(weight).collect()
        };
        bits.iter().zip(grids).map(weights).collect()
    }

    /// The products of the first `present` columns of the piece of a block from column `at` on.
    fn piece_products(
        &self,
        weights: &[Vec<Val<'k>>],
        (first, at): (Val<'k>, usize),
        present: usize,
        sums: &mut [Vec<Option<Val<'k>>>],
    ) {
        for j in 0..present {
            for row in 0..self.rows {
                let x = self.x_float(row, first + (at + j) as i64);
                for (part, w) in (0..).zip(weights) {
                    let sum = &mut sums[j % self.chains as usize][self.accumulator_index(row, part)];
                    let next = sum.map_or_else(|| w[j] * x, |sum| w[j].fma(x, sum));
                    *sum = Some(next.named("s"));
                }
            }
        }
    }
}
