//! Integer products of a register tile: packed weights against integer activations (see
//! [`crate::product::QuantizedActivations`]), exact within each group of 32.
//!
//! Per 32 columns a result takes 8 dot instructions (16 with two planes), a conversion and a fused
//! multiply-add with the weight scales; per group of activation scales a multiplication. Where all of these
//! share the vector units (Intel), the share of the dot peak is at most 8 / (8 + 2 + 32 / group): 78 % with
//! groups of 128, 73 % with groups of 32.

use super::microtile::{Microtile, TileWeights};
use super::prefetch::TilePrefetch;
use super::slice::IntegerMatmul;
use crate::matmul::dot::{DotOperands, QUADS, WeightQuad, dot_operand, group_dots, mmla};
use crate::matmul::plan::CodeDot;
use mlcc_ir::types::DType;
use mlcc_kernel_lang::Val;
use mlcc_quant::tile::{quads_of_word, words_per_block};

/// Activation scales from `first` on.
#[derive(Clone, Copy)]
pub(super) struct ScaleRange<'k> {
    pub first: Val<'k>,
    pub count: Val<'k>,
}

impl<'k> Microtile<'k, '_> {
    /// Adds the groups of some activation scales to the accumulators.
    pub(super) fn add_scales(
        &self,
        integers: IntegerMatmul,
        scales: ScaleRange<'k>,
        prefetch: TilePrefetch<'k>,
    ) {
        let (k, groups) = (self.cpu.k, self.cpu.problem.groups());
        let per_scale = integers.codes.groups_per_scale();
        k.serial("s", scales.count, |s| {
            let scale = scales.first + s;
            let first = (scale * per_scale as i64).named("first");
            prefetch.at_scale(self, s);
            self.rescale(integers, scale);
            let mut count = k.int(per_scale as i64);
            if !groups.is_multiple_of(per_scale) {
                count = count.min(groups as i64 - first);
            }
            let ahead = prefetch.of_scale(self, integers, scale);
            k.serial("g", count, |g| {
                if let Some(ahead) = ahead {
                    ahead.at_group(g);
                }
                self.add_group(integers, first + g);
            });
        });
    }

    /// All groups of weights that come from memory, in one loop. With a loop over the groups of a scale
    /// inside, the compiler makes four copies of its body, and a processor that tells streams by the places
    /// of their loads finds fewer of them (one Zen 5 core, 8-bit weights: 39 GB/s with four copies, 42 with
    /// one; one Zen 4 core, 4864 columns: 93 and 100 % of a reading loop).
    pub(super) fn add_streamed(&self, integers: IntegerMatmul) {
        let (k, per_scale) = (self.cpu.k, integers.codes.groups_per_scale() as i64);
        k.serial("g", self.cpu.problem.groups() as i64, |g| {
            k.when((g % per_scale).lt(1), || self.rescale(integers, g / per_scale));
            self.add_group(integers, g);
        });
    }

    /// Puts the sums so far in units of activation scale `scale`; before the first one they are zero.
    fn rescale(&self, integers: IntegerMatmul, scale: Val<'k>) {
        for row in 0..self.rows {
            let ratio = self.of_row(row, |row| self.x_scale(integers.codes, row, scale)).named("ratio");
            for part in 0..self.parts() {
                self.set_acc(row, part, self.acc(row, part) * ratio);
            }
        }
    }

    /// Turns the sums into f32: they are in units of the last scale of their row, which has the place of the
    /// first ratio.
    pub(super) fn scale_accumulators(&self, integers: IntegerMatmul) {
        self.rescale(integers, self.cpu.k.int(0));
        if !self.is_mmla() {
            return;
        }
        for row in (0..self.rows).step_by(2) {
            for part in 0..self.parts() {
                let both = [row, row + 1].map(|row| self.acc(row, part).named("sums"));
                for (row, sums) in (row..).zip(mmla::part_rows(both)) {
                    self.set_acc(row, part, sums);
                }
            }
        }
    }

    /// The value of a row of activations, for its vectors of sums: these may be those of two rows.
    fn of_row(&self, row: u32, value: impl Fn(u32) -> Val<'k>) -> Val<'k> {
        match self.is_mmla() {
            true => mmla::of_both_rows([row / 2 * 2, row / 2 * 2 + 1].map(value), self.lanes()),
            false => value(row),
        }
    }

    /// True if its sums are those of two rows by two.
    fn is_mmla(&self) -> bool {
        matches!(self.source, TileWeights::Panel(panel) if matches!(panel.dot, CodeDot::Mmla { .. }))
    }

    /// Adds one group, with its weight scales and offsets, to the accumulators.
    fn add_group(&self, integers: IntegerMatmul, g: Val<'k>) {
        let g = g.named("group");
        self.prefetch_block(integers.format, g);
        let dot = self.dot(integers);
        let shared_zero = integers.format.is_symmetric() && !dot.is_centred();
        let starts = shared_zero.then(|| self.starts(integers, g));
        let group = GroupOperands { tile: self, integers, g };
        let totals = group_dots(dot, &group, integers.codes.planes, starts, self.zeros(DType::I32));
        let scales: Vec<_> = (0..self.parts()).map(|part| self.weight_scales(integers, g, part)).collect();
        for (row, part) in self.each_accumulator() {
            let scales = &scales[part as usize];
            let total = totals[self.accumulator_index(row, part)].cast(DType::F32);
            let acc = total.fma(scales[row as usize % scales.len()], self.acc(row, part));
            self.set_acc(row, part, acc);
        }
        self.add_offsets(integers, g);
    }

    /// Subtracts the offsets of a group times the sums of the activations, where it has offsets.
    fn add_offsets(&self, integers: IntegerMatmul, g: Val<'k>) {
        let offsets: Option<Vec<Vec<Val>>> =
            (0..self.parts()).map(|part| self.weight_offsets(integers, g, part)).collect();
        let Some(offsets) = offsets else { return };
        for row in 0..self.rows {
            // The negated sum.
            let sum = self.of_row(row, |row| self.x_start(integers.codes, row, g).cast(DType::F32));
            let sum = if self.is_mmla() { sum } else { sum.splat(self.lanes()) }.named("sum");
            for (part, offsets) in (0..).zip(&offsets) {
                let acc = sum.fma(offsets[row as usize % offsets.len()], self.acc(row, part));
                self.set_acc(row, part, acc);
            }
        }
    }

    /// Starts of all accumulators: `-zero point * sum of the activations`.
    fn starts(&self, integers: IntegerMatmul, g: Val<'k>) -> Vec<Val<'k>> {
        let start = |row| self.x_start(integers.codes, row, g).splat(self.lanes()).named("start");
        (0..self.rows).flat_map(|row| vec![start(row); self.parts() as usize]).collect()
    }

    /// The scales of the rows of one part, f32, pinned: of one vector of sums, or of both that two rows of
    /// activations have.
    fn weight_scales(&self, integers: IntegerMatmul, g: Val<'k>, part: u32) -> Vec<Val<'k>> {
        let scales = match self.source {
            TileWeights::Panel(panel) => panel.scales(g, part),
            TileWeights::Memory | TileWeights::Floats(_) => vec![self.group_scales(integers.format, g, part)],
        };
        scales.into_iter().map(|scales| scales.named("scales")).collect()
    }

    /// The weight offsets of a part, one vector for each of its vectors of sums.
    fn weight_offsets(&self, integers: IntegerMatmul, g: Val<'k>, part: u32) -> Option<Vec<Val<'k>>> {
        let offsets = match self.source {
            TileWeights::Panel(panel) => panel.offsets(g, part)?,
            TileWeights::Memory | TileWeights::Floats(_) => {
                let (block, row) = (self.block(integers.format, g, part), self.part(part).row);
                vec![block.offsets(row, self.lanes(), integers.dot.is_centred())?]
            }
        };
        Some(offsets.into_iter().map(|offsets| offsets.named("offsets")).collect())
    }
}

/// The operands of a group for all rows and parts.
struct GroupOperands<'k, 't> {
    tile: &'t Microtile<'k, 't>,
    integers: IntegerMatmul,
    g: Val<'k>,
}

impl<'k> DotOperands<'k> for GroupOperands<'k, '_> {
    fn shape(&self) -> (u32, u32, u32) {
        (self.tile.rows, self.tile.parts(), self.tile.lanes())
    }

    /// Words of packed weights, or single quads of unpacked ones. Two quads at a time would need more than 32
    /// vector registers, and the loads of a panel wait for stores to the stack.
    fn steps(&self) -> usize {
        if let TileWeights::Panel(_) = self.tile.source {
            QUADS
        } else {
            words_per_block(self.integers.format)
        }
    }

    fn weights(&self, step: usize) -> Vec<(usize, Vec<WeightQuad<'k>>)> {
        let (tile, format) = (self.tile, self.integers.format);
        if let TileWeights::Panel(panel) = tile.source {
            return vec![(step, (0..tile.parts()).map(|part| panel.operand(self.g, step, part)).collect())];
        }
        let (dot, lookup) = (self.integers.dot, tile.cpu.plan.byte_lookup);
        let words = tile.words(format, self.g, step);
        let operand = |word: Val<'k>, quad| {
            WeightQuad::new(dot, dot_operand(dot, format, (word, quad), lookup).named("q"))
        };
        let quad = |quad| (quad, words.iter().map(|&word| operand(word, quad)).collect());
        quads_of_word(format, step).into_iter().map(quad).collect()
    }

    fn unpacked(&self, quad: usize, part: u32) -> WeightQuad<'k> {
        match self.tile.source {
            TileWeights::Panel(panel) => panel.operand(self.g, quad, part),
            TileWeights::Memory | TileWeights::Floats(_) => panic!("squares are made of a panel"),
        }
    }

    fn x(&self, row: u32, plane: usize, quad: usize) -> Val<'k> {
        self.tile.x_quad(self.integers.codes, (row, plane), self.g, quad)
    }

    fn x_square(&self, row: u32, plane: usize, quad: usize) -> Val<'k> {
        self.tile.x_square(self.integers.codes, (row, plane), self.g, quad)
    }

    fn pin(&self, name: &str, sum: Val<'k>) -> Val<'k> {
        let sum = match self.tile.cpu.plan.in_order {
            Some([words, _]) if sum.ty().dtype == DType::I16 => sum.instr(words, &[]),
            Some([_, sums]) => sum.instr(sums, &[]),
            None => sum,
        };
        sum.named(name)
    }
}
