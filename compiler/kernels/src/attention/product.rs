//! Parts of tiles of attention: a register block of a matrix product, and the transposition of a square.

use super::pairs::Pairs;
use mlcc_ir::builder::KernelBuilder;
use mlcc_ir::kernel::{BufId, ExprId, Space, Ty};
use mlcc_ir::types::DType;

/// A matrix whose elements are broadcast: row `r`, column `k` is at `start + r * row + k * k`.
pub(super) struct Operand {
    pub buf: BufId,
    pub start: ExprId,
    pub row: i64,
    pub k: i64,
}

/// A block of a matrix product with its sums in registers: rows of `a` times columns of `b` (buffer, first column, length
/// of a row). With `pairs` elements are words of two codes, and sums are integers.
pub(super) struct Product<'a> {
    pub a: Operand,
    pub b: (BufId, ExprId, i64),
    pub lanes: u32,
    pub rows: i64,
    pub vectors: i64,
    /// Elements of `a` are lanes of a vector, where they lie side by side.
    pub by_lane: bool,
    pub pairs: Option<&'a Pairs>,
}

impl Product<'_> {
    /// Place of a vector of the block in a matrix with the columns of `b`, whose row `first` is the block's first.
    pub fn place(&self, kb: &mut KernelBuilder, first: ExprId, (r, v): (i64, i64)) -> ExprId {
        let row = kb.add_int(first, r);
        let at = kb.mul_int(row, self.b.2);
        let column = kb.add_int(self.b.1, v * i64::from(self.lanes));
        kb.add(at, column)
    }

    /// The sums by row and vector, over `0..extent`; on top of those in `start` (buffer, first row) times the factors of
    /// the rows.
    pub fn emit(
        &self,
        kb: &mut KernelBuilder,
        extent: ExprId,
        start: Option<(BufId, ExprId, &[ExprId])>,
    ) -> Vec<Vec<ExprId>> {
        let (lanes, zero) = (self.lanes, kb.int(0));
        let dtype = if self.pairs.is_some() { DType::I32 } else { DType::F32 };
        let mut sums: Vec<Vec<BufId>> = Vec::new();
        for r in 0..self.rows {
            let mut of_row = Vec::new();
            for v in 0..self.vectors {
                let sum = kb.alloc("sum", dtype, lanes as usize, Space::Local);
                let value = match start {
                    None => kb.constant(0.0, Ty::vector(dtype, lanes)),
                    Some((old, first, factors)) => {
                        let at = self.place(kb, first, (r, v));
                        let old = kb.load_vec(old, at, lanes);
                        kb.mul(old, factors[r as usize])
                    }
                };
                kb.store_vec(sum, zero, value);
                of_row.push(sum);
            }
            sums.push(of_row);
        }
        let step = self.step(kb, extent);
        let steps = kb.kernel().exprs.as_int(extent).map(|extent| kb.int(extent / step));
        kb.serial("k", steps.unwrap_or(extent), |kb, i| {
            let first = kb.mul_int(i, step);
            let a = self.elements(kb, first, step);
            for (j, of_rows) in (0..).zip(a) {
                let k = kb.add_int(first, j);
                let base = kb.mul_int(k, self.b.2);
                let base = kb.add(base, self.b.1);
                let b: Vec<ExprId> = (0..self.vectors)
                    .map(|v| {
                        let at = kb.add_int(base, v * i64::from(lanes));
                        let value = kb.load_vec(self.b.0, at, lanes);
                        kb.let_("b", value)
                    })
                    .collect();
                for (of_row, value) in sums.iter().zip(of_rows) {
                    let value = kb.splat(value, lanes);
                    let value = kb.let_("a", value);
                    for (&sum, &b) in of_row.iter().zip(&b) {
                        let old = kb.load_vec(sum, zero, lanes);
                        let new = match self.pairs {
                            None => kb.fma(value, b, old),
                            Some(pairs) => pairs.dot.add(kb, old, value, b),
                        };
                        kb.store_vec(sum, zero, new);
                    }
                }
            }
        });
        let load = |kb: &mut KernelBuilder, &sum: &BufId| {
            let value = kb.load_vec(sum, zero, lanes);
            kb.let_("product", value)
        };
        sums.iter().map(|row| row.iter().map(|sum| load(kb, sum)).collect()).collect()
    }
}

impl Product<'_> {
    /// Columns of `a` per iteration: as many as a vector has where it has some of a row.
    fn step(&self, kb: &KernelBuilder, extent: ExprId) -> i64 {
        let lanes = i64::from(self.lanes);
        let whole = kb.kernel().exprs.as_int(extent).is_some_and(|extent| extent % lanes == 0);
        if self.by_lane && self.a.k == 1 && whole { lanes } else { 1 }
    }

    /// Elements of `a` by column, from `first` on, and row.
    fn elements(&self, kb: &mut KernelBuilder, first: ExprId, step: i64) -> Vec<Vec<ExprId>> {
        let (lanes, rows) = (self.lanes, self.rows as usize);
        let at = kb.mul_int(first, self.a.k);
        let start = kb.add(self.a.start, at);
        let load = |kb: &mut KernelBuilder, r: usize, lanes: u32| {
            let at = kb.add_int(start, r as i64 * self.a.row);
            let value = kb.load_vec(self.a.buf, at, lanes);
            kb.let_("row", value)
        };
        let lane = |kb: &mut KernelBuilder, value: ExprId, lane: u32| kb.shuffle(value, None, vec![lane]);
        if step > 1 {
            let rows: Vec<ExprId> = (0..rows).map(|r| load(kb, r, lanes)).collect();
            let column = |j: u32| rows.iter().map(|&row| lane(kb, row, j)).collect();
            return (0..lanes).map(column).collect();
        }
        if self.by_lane && self.a.row == 1 && rows.is_multiple_of(lanes as usize) {
            let starts = (0..rows).step_by(lanes as usize);
            let vectors: Vec<ExprId> = starts.map(|r| load(kb, r, lanes)).collect();
            let row = |r: usize| lane(kb, vectors[r / lanes as usize], r as u32 % lanes);
            return vec![(0..rows).map(row).collect()];
        }
        vec![(0..rows).map(|r| load(kb, r, 1)).collect()]
    }
}

/// Rows of a square to its columns, by exchanging ever smaller quarters (Eklundh 1972).
pub(crate) fn transpose(kb: &mut KernelBuilder, mut rows: Vec<ExprId>) -> Vec<ExprId> {
    let lanes = rows.len() as u32;
    let mut half = lanes / 2;
    while half > 0 {
        for i in (0..lanes).filter(|i| i & half == 0) {
            let (a, b) = (rows[i as usize], rows[(i + half) as usize]);
            // Lane l of the results, in terms of a followed by b.
            let low = (0..lanes).map(|l| if l & half == 0 { l } else { lanes + l - half }).collect();
            let high = (0..lanes).map(|l| if l & half == 0 { l + half } else { lanes + l }).collect();
            let (low, high) = (kb.shuffle(a, Some(b), low), kb.shuffle(a, Some(b), high));
            rows[i as usize] = kb.let_("t", low);
            rows[(i + half) as usize] = kb.let_("t", high);
        }
        half /= 2;
    }
    rows
}

/// Joins the lanes of each part of as many lanes as there are vectors by `op`: lane `i` of a part of the result is what that
/// part of vector `i` gives. Vectors that are `None` give anything that `nothing` gives.
pub(crate) fn join_each(
    kb: &mut KernelBuilder,
    vectors: Vec<Option<ExprId>>,
    nothing: ExprId,
    op: impl Fn(&mut KernelBuilder, ExprId, ExprId) -> ExprId,
) -> ExprId {
    let lanes = kb.ty(nothing).lanes;
    let mut vectors: Vec<ExprId> = vectors.into_iter().map(|v| v.unwrap_or(nothing)).collect();
    // Lanes that stay neighbours.
    let mut unit = 1;
    if vectors.len().is_multiple_of(4) {
        // Both operands pick lanes within four: such exchanges are cheap everywhere, and neither needs a mask.
        for _ in 0..2 {
            let join = |kb: &mut KernelBuilder, a: ExprId, b: ExprId| {
                let pick = |odd: u32| {
                    let lane = |l: u32| l / 4 * 4 + l % 2 * 2 + odd + if l % 4 < 2 { 0 } else { lanes };
                    (0..lanes).map(lane).collect()
                };
                let (x, y) = (kb.shuffle(a, Some(b), pick(0)), kb.shuffle(a, Some(b), pick(1)));
                let joined = op(kb, x, y);
                kb.let_("joined", joined)
            };
            vectors = vectors.chunks(2).map(|pair| join(kb, pair[0], pair[1])).collect();
        }
        unit = 4;
    }
    // Each round joins pairs of vectors and halves the lanes that belong to one result. The one operand is a choice of lanes
    // in place (a blend, which every vector unit executes), only the other an exchange.
    while vectors.len() > 1 {
        let upper = vectors.split_off(vectors.len() / 2);
        let half = upper.len() as u32 * unit;
        let low = |l: u32| l & half == 0;
        let stay: Vec<u32> = (0..lanes).map(|l| if low(l) { l } else { lanes + l }).collect();
        let cross: Vec<u32> = (0..lanes).map(|l| if low(l) { l + half } else { lanes + l - half }).collect();
        for (a, b) in vectors.iter_mut().zip(upper) {
            let x = kb.shuffle(*a, Some(b), stay.clone());
            let y = kb.shuffle(*a, Some(b), cross.clone());
            let joined = op(kb, x, y);
            *a = kb.let_("joined", joined);
        }
    }
    vectors[0]
}
