//! Integer products of many activation rows: the weights of a slice are unpacked once per [`DEPTH`] columns
//! into a panel that stays in cache while all register tiles pass by, and the sums of the rows wait in a
//! buffer between the pieces of k.

use super::integers::ScaleRange;
use super::microtile::{Microtile, TileRows, TileWeights};
use super::prefetch::{DepthBlock, EpiloguePrefetch, NextWeights, TilePrefetch, VisitPrefetch};
use super::slice::{CpuMatmul, IntegerMatmul, WeightSlice};
use crate::matmul::dot::{WeightQuad, dot_operand, mmla};
use crate::matmul::plan::CodeDot;
use crate::matmul::problem::{DOT_COLUMNS, MatmulEpilogue};
use crate::matmul::weight::panel::WeightPanel;
use mlcc_ir::kernel::{ExprType, MemorySpace};
use mlcc_ir::types::DType;
use mlcc_kernel_lang::Val;
use mlcc_quant::packed::TileSizes;
use mlcc_quant::tile::{TileBlock, quad_signed, quads_of_word, words_per_block};

/// Columns per piece: whole groups of activation scales.
fn depth(cpu: CpuMatmul, integers: IntegerMatmul) -> usize {
    let group = integers.codes.group;
    (cpu.plan.sizes.panel_columns as usize / group).max(1) * group
}

/// True if a panel takes all columns, so that no sums have to be stored.
pub(super) fn is_whole(cpu: CpuMatmul, integers: IntegerMatmul) -> bool {
    cpu.problem.k <= depth(cpu, integers)
}

/// The register tiles of one slice.
pub(super) struct SliceTiles<'k, 'a> {
    pub cpu: CpuMatmul<'k, 'a>,
    pub slice: WeightSlice<'k>,
    pub integers: IntegerMatmul,
    /// First row.
    pub first: Val<'k>,
    /// Number of register tiles of `plan.rows[0]` rows, at most `plan.chunk` rows in all.
    pub count: Val<'k>,
}

impl<'k> SliceTiles<'k, '_> {
    /// Emits all register tiles, piece by piece of k.
    pub fn emit(&self, epilogue: &mut MatmulEpilogue) {
        match is_whole(self.cpu, self.integers) {
            true => self.whole(epilogue),
            false => self.in_depth_blocks(epilogue),
        }
    }

    /// All columns at once.
    fn whole(&self, epilogue: &mut MatmulEpilogue) {
        let (k, problem, integers) = (self.cpu.k, self.cpu.problem, self.integers);
        let panel = self.panel();
        self.fill(panel, k.int(problem.groups() as i64));
        let scales = integers.codes.row_scales(problem.k);
        let all = ScaleRange { first: k.int(0), count: k.int(scales as i64) };
        let next = self.next((k.int(0), 1), all.count);
        let touched = EpiloguePrefetch::new(None, scales, self.cpu.plan.rows[0]);
        self.each(panel, |tile, number| {
            let hints = VisitPrefetch { next, number, visits: all.count, epilogue: touched };
            tile.add_scales(integers, all, TilePrefetch::Hints(hints));
            tile.scale_accumulators(integers);
            tile.finish(epilogue);
        });
    }

    /// Computes the product in pieces of [`depth`] columns, between which the sums are stored.
    fn in_depth_blocks(&self, epilogue: &mut MatmulEpilogue) {
        let (k, plan, problem, integers) = (self.cpu.k, self.cpu.plan, self.cpu.problem, self.integers);
        let panel = self.panel();
        let vectors = plan.chunk.unwrap_or(plan.rows[0]) * self.slice.parts(plan.lanes);
        let waiting = k.alloc("sums", DType::F32, [i64::from(vectors * plan.lanes)], MemorySpace::Stack);
        let (groups, scales) = (problem.groups() as i64, integers.codes.row_scales(problem.k));
        let depth = depth(self.cpu, integers);
        let (group_depth, scale_depth) =
            ((depth / DOT_COLUMNS) as i64, (depth / integers.codes.group) as i64);
        let pieces = problem.k.div_ceil(depth) as i64;
        k.serial("piece", pieces, |piece| {
            let first = (piece * group_depth).named("first");
            let panel = panel.depth_block(first);
            self.fill(panel, (groups - first).min(group_depth));
            let first = (piece * scale_depth).named("first_scale");
            let here = ScaleRange { first, count: (scales as i64 - first).min(scale_depth) };
            let next = self.next((piece, pieces), here.count);
            let (later, early) = (k.int(0).lt(piece), piece.lt(pieces - 1));
            let at_last = scales - (pieces - 1) as usize * depth / integers.codes.group;
            let touched = EpiloguePrefetch::new(Some(piece.equals(pieces - 1)), at_last, plan.rows[0]);
            self.each(panel, |tile, number| {
                k.when(later, || tile.restore_accumulators(waiting, number));
                let hints = VisitPrefetch { next, number, visits: here.count, epilogue: touched };
                tile.add_scales(integers, here, TilePrefetch::Hints(hints));
                let finish = || {
                    tile.scale_accumulators(integers);
                    tile.finish(epilogue);
                };
                k.when_else(early, || tile.save_accumulators(waiting, number), finish);
            });
        });
    }

    /// An empty panel.
    fn panel(&self) -> WeightPanel<'k> {
        let CpuMatmul { k, plan, problem, .. } = self.cpu;
        let groups =
            depth(self.cpu, self.integers).min(problem.k.next_multiple_of(DOT_COLUMNS)) / DOT_COLUMNS;
        let dot = plan.mmla.map_or(self.integers.dot, |instr| CodeDot::Mmla { instr });
        let offsets = !self.integers.format.is_symmetric();
        WeightPanel::new(k, (dot, offsets), (groups, plan.tiles), (self.slice.parts(plan.lanes), plan.lanes))
    }

    /// Unpacks `count` groups of the slice.
    fn fill(&self, panel: WeightPanel<'k>, count: Val<'k>) {
        let (lanes, packed) = (self.cpu.plan.lanes, self.cpu.packed(self.integers.format));
        self.cpu.k.serial("u", count, |u| {
            for part in 0..self.slice.parts(lanes) {
                let rows = self.slice.part(lanes, part);
                let block = packed.block(rows.tile, panel.group(u));
                match panel.dot {
                    CodeDot::Mmla { .. } => self.fill_mmla(panel, (u, part), block, rows.row),
                    _ => self.fill_part(panel, (u, part), block, rows.row),
                }
            }
        });
    }

    /// Unpacks one part of a group, the rows of a tile from `row` on: group `u` of the piece.
    fn fill_part(&self, panel: WeightPanel<'k>, (u, part): (Val<'k>, u32), block: TileBlock<'k>, row: u32) {
        let lanes = self.cpu.plan.lanes;
        let format = block.sizes.format;
        panel.set_scales(u, part, 0, block.scales(row, lanes));
        if let Some(offsets) = block.offsets(row, lanes, panel.dot.is_centred()) {
            panel.set_offsets(u, part, 0, offsets);
        }
        for word in 0..words_per_block(format) {
            let bits = block.word(word, row, lanes).named("word");
            for quad in quads_of_word(format, word) {
                let codes = dot_operand(panel.dot, format, (bits, quad), self.cpu.plan.byte_lookup);
                panel.set_operand(u, quad, part, WeightQuad::new(panel.dot, codes));
            }
        }
    }

    /// The same as squares of two rows.
    fn fill_mmla(&self, panel: WeightPanel<'k>, (u, part): (Val<'k>, u32), block: TileBlock<'k>, row: u32) {
        let lanes = self.cpu.plan.lanes;
        let format = block.sizes.format;
        for (i, scales) in mmla::square_numbers(block.scales(row, lanes)).into_iter().enumerate() {
            panel.set_scales(u, part, i, scales);
        }
        if let Some(offsets) = block.offsets(row, lanes, true) {
            for (i, offsets) in mmla::square_numbers(offsets.named("offsets")).into_iter().enumerate() {
                panel.set_offsets(u, part, i, offsets);
            }
        }
        let mut codes = Vec::new();
        for word in 0..words_per_block(format) {
            let bits = block.word(word, row, lanes).named("word");
            for quad in quads_of_word(format, word) {
                let signed = quad_signed(format, bits, quad, self.cpu.plan.byte_lookup);
                codes.push((quad, signed.bits_as(ExprType::vector(DType::I32, lanes)).named("quad")));
            }
        }
        codes.sort_by_key(|&(quad, _)| quad);
        let codes: Vec<Val> = codes.into_iter().map(|(_, codes)| codes).collect();
        for (quad, codes) in mmla::mmla_operands(&codes).into_iter().enumerate() {
            panel.set_operand(u, quad, part, WeightQuad { codes, absolutes: codes });
        }
    }

    /// The weights that register tiles prefetch while they pass by piece `number` of `pieces`.
    fn next(&self, (number, pieces): (Val<'k>, i64), scales: Val<'k>) -> Option<NextWeights<'k>> {
        let sizes = TileSizes::new(self.integers.format, self.cpu.problem.k);
        let run = sizes.blocks_bytes(depth(self.cpu, self.integers) / DOT_COLUMNS);
        NextWeights::new(self.cpu, self.slice, DepthBlock { number, count: pieces, run }, self.count * scales)
    }

    fn each(&self, panel: WeightPanel<'k>, mut body: impl FnMut(&Microtile<'k, '_>, Val<'k>)) {
        let rows = self.cpu.plan.rows[0];
        self.cpu.k.serial("tile", self.count, |number| {
            let first = (self.first + number * i64::from(rows)).named("row");
            let rows = TileRows { first, count: rows, interleaved: rows > 1 };
            body(&Microtile::new(self.cpu, self.slice, rows, TileWeights::Panel(panel)), number);
        });
    }
}
