//! Float products of many activation rows: k is cut into pieces whose weights stay in cache while all
//! register tiles pass by, and the sums of the rows wait in a buffer between the pieces. The weights of a
//! piece are copied once, as f32, into a panel in the order in which a register tile reads them; dots of bf16
//! take them as they are. Each register tile prefetches an equal part of the next piece, a few lines every
//! [`VISIT`] columns.

use super::floats::{ColumnSpan, VISIT};
use super::microtile::{Microtile, TileRows, TileWeights};
use super::prefetch::{DepthBlock, EpiloguePrefetch, NextWeights, VisitPrefetch};
use super::slice::{CpuMatmul, WeightSlice};
use crate::matmul::plan::CpuPlan;
use crate::matmul::problem::{MatmulActivation, MatmulEpilogue, MatmulWeight};
use crate::matmul::weight::float_panel::FloatPanel;
use mlcc_ir::kernel::MemorySpace;
use mlcc_ir::types::DType;
use mlcc_kernel_lang::Val;
use mlcc_quant::TILE;
use mlcc_quant::plain::PlainType;

/// Most register tiles that read the weights as they are: for them a copy would not pay. Without a copy, a
/// single one uses the weights as fast as they come, and prefetches would only add to that.
pub(super) fn few_tiles(plan: &CpuPlan) -> i64 {
    if plan.bf16_dot.is_some() { 1 } else { 3 }
}

/// The type of the weights, if register tiles of many rows take them in pieces.
pub(super) fn depth_blocked_type(cpu: CpuMatmul) -> Option<PlainType> {
    let (MatmulWeight::Plain(plain), plan) = (cpu.problem.weight, cpu.plan) else { return None };
    plan.chunk?;
    // Sums that wait are those of one chain, also in a last slice of one tile.
    let one_chain = plan.in_flight / (plan.rows[0] * cpu.parts_of_tile()) <= 1;
    let floats = !matches!(cpu.problem.activation, MatmulActivation::Codes(_));
    (floats && one_chain && plan.rows[0] > 1).then_some(plain)
}

/// The register tiles of one slice.
pub(super) struct FloatPanels<'k, 'a> {
    pub cpu: CpuMatmul<'k, 'a>,
    pub slice: WeightSlice<'k>,
    pub plain: PlainType,
    /// First row.
    pub first: Val<'k>,
    /// Number of register tiles of `plan.rows[0]` rows, at most `plan.chunk` rows in all.
    pub count: Val<'k>,
}

impl<'k> FloatPanels<'k, '_> {
    /// Emits all register tiles, piece by piece of k.
    pub fn emit(&self, epilogue: &mut MatmulEpilogue) {
        let (k, plan, all) = (self.cpu.k, self.cpu.plan, self.cpu.problem.k);
        let depth = self.depth();
        let row = i64::from(self.slice.parts(plan.lanes) * plan.lanes);
        let columns = depth.min(all).next_multiple_of(self.plain.pair_columns()) as i64;
        let stack = |name, rows| k.alloc(name, DType::F32, [rows, row], MemorySpace::Stack);
        let panel = plan.bf16_dot.is_none().then(|| stack("panel", columns));
        let pieces = all.div_ceil(depth) as i64;
        let rows = plan.chunk.unwrap_or(plan.rows[0]);
        let waiting = (pieces > 1).then(|| stack("sums", rows.into()).flat());
        k.serial("piece", pieces, |piece| {
            let first = (piece * depth as i64).named("first");
            let count = (all as i64 - first).min(depth as i64);
            let panel = panel.map(|weights| FloatPanel { weights, first, lanes: plan.lanes });
            if let Some(panel) = panel {
                self.fill(panel, count);
            }
            let hints = self.hints((piece, pieces), count);
            let (later, early) = (k.int(0).lt(piece), piece.lt(pieces - 1));
            k.serial("tile", self.count, |number| {
                let first_row = (self.first + number * i64::from(plan.rows[0])).named("row");
                let rows = TileRows { first: first_row, count: plan.rows[0], interleaved: false };
                let source = panel.map_or(TileWeights::Memory, TileWeights::Floats);
                let tile = Microtile::new(self.cpu, self.slice, rows, source);
                if let Some(waiting) = waiting {
                    k.when(later, || tile.restore_accumulators(waiting, number));
                }
                let columns = ColumnSpan { first, count, rest: all % depth };
                tile.add_piece(self.plain, columns, VisitPrefetch { number, ..hints });
                match waiting {
                    None => tile.finish(epilogue),
                    Some(waiting) => k.when_else(
                        early,
                        || tile.save_accumulators(waiting, number),
                        || tile.finish(epilogue),
                    ),
                }
            });
        });
    }

    /// Columns of a piece.
    fn depth(&self) -> usize {
        self.cpu.plan.sizes.float_panel_columns as usize
    }

    /// The prefetches of register tiles while they pass by piece `number` of `pieces`.
    fn hints(&self, (number, pieces): (Val<'k>, i64), columns: Val<'k>) -> VisitPrefetch<'k> {
        let here = (columns / VISIT as i64).named("visits");
        let visits = (self.count * here).max(1);
        let next = NextWeights::new(
            self.cpu,
            self.slice,
            DepthBlock { number, count: pieces, run: self.depth() * TILE },
            visits,
        );
        let last = (pieces > 1).then(|| number.equals(pieces - 1));
        let at_last = self.cpu.problem.k - (pieces as usize - 1) * self.depth();
        let epilogue = EpiloguePrefetch::new(last, (at_last / VISIT).max(1), self.cpu.plan.rows[0]);
        VisitPrefetch { next, number, visits: here, epilogue }
    }

    /// Copies `columns` columns of the slice.
    fn fill(&self, panel: FloatPanel<'k>, columns: Val<'k>) {
        let (k, lanes, pair) = (self.cpu.k, self.cpu.plan.lanes, self.plain.pair_columns());
        let plain = self.cpu.plain(self.plain);
        // Nothing uses this register tile. Without it LLVM orders the code for listed rows differently, which
        // has not been measured.
        let unused = TileRows { first: k.int(0), count: 1, interleaved: false };
        Microtile::new(self.cpu, self.slice, unused, TileWeights::Memory);
        k.serial("u", columns.div_ceil(pair as i64), |u| {
            let here = u * pair as i64;
            for part in 0..self.slice.parts(lanes) {
                let rows = self.slice.part(lanes, part);
                let weights = plain.columns(rows.tile, panel.first + here, rows.row, lanes);
                for (j, weights) in (0..).zip(weights).take(pair) {
                    panel.set_column(here + j, part, weights);
                }
            }
        });
    }
}
