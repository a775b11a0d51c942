//! A register tile of a matrix product, for both products of prefill attention.

use super::codes::add_pairs;
use crate::params::PairDot;
use mlcc_ir::types::DType;
use mlcc_kernel_lang::{BufferView, Val};

/// A matrix whose elements are broadcast: row `r`, column `k` is at `r * row + k * k` of the view.
pub(super) struct BroadcastMatrix<'k> {
    pub view: BufferView<'k, 1>,
    pub row: i64,
    pub k: i64,
}

/// A tile of a matrix product with its sums in registers: rows of `a` times columns of `b` from `column` on.
/// With `pairs` elements are words of two codes, and sums are integers.
pub(super) struct MatmulTile<'k> {
    pub a: BroadcastMatrix<'k>,
    pub b: BufferView<'k, 2>,
    pub column: Val<'k>,
    pub lanes: u32,
    pub rows: i64,
    pub vectors: i64,
    /// Elements of `a` are lanes of a vector, where they lie side by side.
    pub by_lane: bool,
    pub pairs: Option<PairDot>,
}

impl<'k> MatmulTile<'k> {
    /// Place of a vector of the tile in a matrix with the columns of `b`, whose row `first` is the tile's
    /// first.
    pub fn place(&self, first: Val<'k>, (r, v): (i64, i64)) -> [Val<'k>; 2] {
        [first + r, self.column + v * i64::from(self.lanes)]
    }

    /// The sums by row and vector, over `0..extent`; on top of those in `start` (buffer, first row) times the
    /// factors of the rows.
    pub fn sum_products(
        &self,
        extent: Val<'k>,
        start: Option<(BufferView<'k, 2>, Val<'k>, &[Val<'k>])>,
    ) -> Vec<Vec<Val<'k>>> {
        let (k, lanes) = (extent.recorder(), self.lanes);
        let dtype = if self.pairs.is_some() { DType::I32 } else { DType::F32 };
        let sums = k.regs("sum", [self.rows, self.vectors], |r, v| match start {
            None => k.zeros(dtype, lanes),
            Some((old, first, factors)) => old.load(self.place(first, (r, v)), lanes) * factors[r as usize],
        });
        let step = self.step(extent);
        let steps = k.as_int(extent).map_or(extent, |extent| k.int(extent / step));
        k.steps("k", steps, step, |first| {
            for (j, of_rows) in (0..).zip(self.elements(first, step)) {
                let row = self.b.starting_at([first + j, self.column]);
                let load = |v: i64| row.load([v * i64::from(lanes)], lanes).named("b");
                let b: Vec<Val> = (0..self.vectors).map(load).collect();
                let a = of_rows.into_iter().map(|a| a.splat(lanes).named("a"));
                sums.add_outer(a, &b, |sum, a, b| match self.pairs {
                    None => a.fma(b, sum),
                    Some(dot) => add_pairs(dot, sum, a, b),
                });
            }
        });
        sums.rows().map(|row| row.iter().map(|sum| sum.get().named("product")).collect()).collect()
    }

    /// Columns of `a` per iteration: as many as a vector has where it has some of a row.
    fn step(&self, extent: Val<'k>) -> i64 {
        let lanes = i64::from(self.lanes);
        let whole = extent.recorder().as_int(extent).is_some_and(|extent| extent % lanes == 0);
        if self.by_lane && self.a.k == 1 && whole { lanes } else { 1 }
    }

    /// Elements of `a` by column, from `first` on, and row.
    fn elements(&self, first: Val<'k>, step: i64) -> Vec<Vec<Val<'k>>> {
        let (lanes, rows) = (self.lanes, self.rows as usize);
        let from = self.a.view.starting_at([first * self.a.k]);
        let load = |r: usize, lanes: u32| from.load([r as i64 * self.a.row], lanes).named("row");
        if step > 1 {
            let rows: Vec<Val> = (0..rows).map(|r| load(r, lanes)).collect();
            return (0..lanes).map(|column| rows.iter().map(|row| row.shuffle([column])).collect()).collect();
        }
        if self.by_lane && self.a.row == 1 && rows.is_multiple_of(lanes as usize) {
            let vectors: Vec<Val> = (0..rows).step_by(lanes as usize).map(|r| load(r, lanes)).collect();
            let row = |r: usize| vectors[r / lanes as usize].shuffle([r as u32 % lanes]);
            return vec![(0..rows).map(row).collect()];
        }
        vec![(0..rows).map(|r| load(r, 1)).collect()]
    }
}
