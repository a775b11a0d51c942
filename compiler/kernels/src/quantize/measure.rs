//! The values of a row, and the largest magnitude of each group.

use super::{BlockRow, CodeGroup, RowCodes, RowQuantizer};
use crate::inline::{Inliner, LaneIndex, RowAt, store_all};
use mlcc_ir::kernel::{BinOp, ExprType};
use mlcc_ir::ops::Op;
use mlcc_ir::types::DType;
use mlcc_kernel_lang::Val;
use mlcc_kernel_lang::math::is_long;

/// Bits of a float without its sign; those of magnitudes are ordered as the magnitudes are, NaN after
/// infinity.
const MAGNITUDE: i64 = 0x7fff_ffff;

impl<'k> RowQuantizer<'_, '_, 'k> {
    /// Computes the values of a group, all codes together, and their largest magnitudes. Magnitudes are
    /// compared by their bits: an instruction, where the larger of two floats that may be NaN takes four.
    pub(super) fn measure_absmax(&self, row: &BlockRow<'_, 'k>, group: CodeGroup<'k>) {
        let mut sizes: Vec<Option<Val>> = vec![None; self.codes.len()];
        let lanes = self.lanes_at_once(group.columns);
        for begin in self.vectors(group.columns).step_by((lanes / self.block.lanes) as usize) {
            self.prefetch(row, (group, begin), lanes);
            let value = |codes| self.value(codes, row, (group, begin), lanes);
            let values: Vec<Val> = self.codes.iter().map(value).collect();
            if begin < group.columns && !self.stores.is_empty() {
                let own = [LaneIndex::scalar(row.row)];
                let at = RowAt::own(self.block.leading.unwrap_or(&own));
                let column = self.column((group, begin));
                store_all(self.k, &row.inliner.with_lanes(lanes), at, column, self.stores);
            }
            for ((work, &value), size) in self.work.iter().zip(&values).zip(&mut sizes) {
                if let Some(values) = work.values {
                    values.set((row.r, group.i, begin as i64), value);
                }
                let magnitude = value.bits_as(ExprType::vector(DType::I32, lanes)) & MAGNITUDE;
                let largest = size.map_or(magnitude, |so_far| so_far.max(magnitude));
                *size = Some(largest.named("sizes"));
            }
        }
        for (work, size) in self.work.iter().zip(sizes) {
            let size = size.expect("a group has columns");
            work.absmax.set([group.i], size.reduce_lanes(BinOp::Max));
        }
    }

    /// Columns whose values are computed together: several vectors where that takes many steps (an
    /// activation), so that their steps alternate. In sequence they fill the scheduler of a core before it
    /// has found enough to do.
    fn lanes_at_once(&self, columns: usize) -> u32 {
        let block = self.block;
        let wide = block.sizes.vectors * block.lanes;
        let fits = |size: usize| size.is_multiple_of(wide as usize);
        let long =
            block.inliner.f.live_nodes().any(|(_, node)| matches!(node.op, Op::Unary(op) if is_long(op)));
        let registers = block.lanes == 16;
        if long && registers && fits(columns) && fits(self.codes[0].group) { wide } else { block.lanes }
    }

    /// The `lanes` values from column `begin` of a group, zero after the columns of the group.
    pub(super) fn value(
        &self,
        codes: &RowCodes,
        row: &BlockRow<'_, 'k>,
        (group, begin): (CodeGroup<'k>, usize),
        lanes: u32,
    ) -> Val<'k> {
        let k = self.k;
        let none = k.literal(0.0, ExprType::vector(DType::F32, lanes));
        if begin >= group.columns {
            return none;
        }
        let at = self.column((group, begin));
        let inside = || k.int(begin as i64).ramp(1, lanes).lt(group.columns as i64);
        let mask = (begin + lanes as usize > group.columns).then(inside);
        let ctx = Inliner { mask, ..row.inliner.with_lanes(lanes) };
        let own = [LaneIndex::scalar(row.row)];
        let index = [self.block.leading.unwrap_or(&own), &[LaneIndex::lanes(at)]].concat();
        let value = ctx.value(k, codes.x, &index).to_lanes(lanes).cast(DType::F32);
        mask.map_or(value, |mask| mask.select(value, none)).named("v")
    }
}
