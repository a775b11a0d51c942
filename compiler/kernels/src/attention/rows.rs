//! Some rows of a tile of attention, as many as a register block of a product has: from scores against a block of keys to
//! sums of values.

use super::prefill::Tile;
use super::product::{Product, join_each};
use super::{HIDDEN, Place, lanes_of, larger};
use crate::math::exp_below_zero;
use mlcc_ir::builder::KernelBuilder;
use mlcc_ir::kernel::{BufId, ExprId, Space, Ty};
use mlcc_ir::types::DType;

/// A register block of rows of a tile.
pub(super) struct Rows<'a> {
    pub tile: Tile<'a>,
    /// Its number, and its first row.
    pub block: ExprId,
    pub row: ExprId,
}

impl Rows<'_> {
    /// Vectors of keys.
    fn vectors(&self) -> i64 {
        self.tile.params.keys / i64::from(self.tile.params.lanes)
    }

    /// Stores the scores of the keys from `j` on; gives the largest of every row, row `r` in lane `r`.
    pub fn scores(&self, kb: &mut KernelBuilder, j: ExprId, shown: ExprId) -> ExprId {
        let (tile, params) = (&self.tile, self.tile.params);
        let (lanes, zero) = (params.lanes, kb.int(0));
        let best: Vec<BufId> =
            (0..params.rows).map(|_| kb.alloc("best", DType::F32, lanes as usize, Space::Local)).collect();
        let hidden = kb.constant(HIDDEN, Ty::vector(DType::F32, lanes));
        best.iter().for_each(|&best| kb.store_vec(best, zero, hidden));
        let vectors = params.vectors.min(self.vectors());
        let width = vectors * i64::from(lanes);
        let groups = kb.int(params.keys / width);
        kb.serial("keys", groups, |kb, group| {
            let from = kb.mul_int(group, width);
            let from = kb.let_("from", from);
            let extent = kb.int(tile.a.size);
            let product = Product {
                a: (tile.q, self.row, tile.a.size),
                b: (tile.k, from, params.keys),
                lanes,
                rows: params.rows,
                vectors,
            };
            let sums = product.emit(kb, extent, None);
            let store = |kb: &mut KernelBuilder, shown: bool| {
                for (r, sums) in (0..).zip(&sums) {
                    let row = kb.add_int(self.row, r);
                    let (p, slope) = tile.query_of(kb, row);
                    for (v, &s) in (0..).zip(sums) {
                        let offset = kb.add_int(from, v * i64::from(lanes));
                        let key = kb.add(j, offset);
                        let place = Place { p, j: key, slope, prefix: tile.prefix, end: None, shown };
                        let s = tile.a.score(kb, s, &place);
                        let s = kb.let_("s", s);
                        let at = kb.add_int(offset, r * params.keys);
                        kb.store_vec(tile.s, at, s);
                        let old = kb.load_vec(best[r as usize], zero, lanes);
                        let new = larger(kb, old, s);
                        kb.store_vec(best[r as usize], zero, new);
                    }
                }
            };
            kb.if_else(shown, |kb| store(kb, true), |kb| store(kb, false));
        });
        let slots = (params.rows as u64).next_power_of_two() as u32;
        let best = (0..slots as usize).map(|r| {
            best.get(r).map(|&best| {
                let best = kb.load_vec(best, zero, lanes);
                kb.let_("best", best)
            })
        });
        let best = best.collect();
        let mut most = join_each(kb, best, hidden, larger);
        let mut distance = slots;
        while distance < lanes {
            let other = kb.shuffle(most, None, (0..lanes).map(|l| l ^ distance).collect());
            let both = larger(kb, most, other);
            most = kb.let_("most", both);
            distance *= 2;
        }
        most
    }

    /// The new running maxima of the rows, and what their change makes of older sums, each in all lanes.
    pub fn raise_max(&self, kb: &mut KernelBuilder, most: ExprId) -> (Vec<ExprId>, Vec<ExprId>) {
        let params = self.tile.params;
        let lanes = params.lanes;
        let at = kb.mul_int(self.block, lanes.into());
        let old = kb.load_vec(self.tile.max, at, lanes);
        let old = kb.let_("old", old);
        let max = larger(kb, old, most);
        let max = kb.let_("max", max);
        let fallen = kb.sub(old, max);
        let factor = exp_below_zero(kb, fallen);
        let factor = kb.let_("factor", factor);
        kb.store_vec(self.tile.max, at, max);
        let mut each = |name: &str, of: ExprId| -> Vec<ExprId> {
            let of_row = |r: i64| {
                let of_row = kb.shuffle(of, None, vec![r as u32; lanes as usize]);
                kb.let_(name, of_row)
            };
            (0..params.rows).map(of_row).collect()
        };
        (each("max", max), each("factor", factor))
    }

    /// Scores to weights, and their sums.
    pub fn weigh(&self, kb: &mut KernelBuilder, max: &[ExprId], factors: &[ExprId]) {
        let (tile, params) = (&self.tile, self.tile.params);
        let lanes = params.lanes;
        for (r, (&max, &factor)) in (0..).zip(max.iter().zip(factors)) {
            let row = kb.add_int(self.row, r);
            let of_row = kb.mul_int(row, lanes.into());
            let total = kb.load_vec(tile.total, of_row, lanes);
            let mut total = kb.mul(total, factor);
            for v in 0..self.vectors() {
                let at = kb.int(r * params.keys + v * i64::from(lanes));
                let s = kb.load_vec(tile.s, at, lanes);
                let below = kb.sub(s, max);
                let weight = exp_below_zero(kb, below);
                let weight = kb.let_("weight", weight);
                kb.store_vec(tile.s, at, weight);
                total = kb.add(total, weight);
            }
            kb.store_vec(tile.total, of_row, total);
        }
    }

    /// Adds the weighted values of a block to the sums, as many columns at a time as registers have room for.
    pub fn mix(&self, kb: &mut KernelBuilder, factors: &[ExprId]) {
        let size = self.tile.a.value_size;
        let (lanes, most) = (lanes_of(size, self.tile.params.lanes), self.tile.params.vectors);
        let width = i64::from(lanes);
        let all = size / width;
        let passes = (all + most - 1) / most;
        let vectors = (all + passes - 1) / passes;
        let (full, rest) = (all / vectors, all % vectors);
        // Sums may have fewer lanes than factors.
        let of_lanes = |&f: &ExprId| {
            if lanes == self.tile.params.lanes { f } else { kb.shuffle(f, None, (0..lanes).collect()) }
        };
        let factors: Vec<ExprId> = factors.iter().map(of_lanes).collect();
        let groups = kb.int(full);
        kb.serial("columns", groups, |kb, group| {
            let from = kb.mul_int(group, vectors * width);
            let from = kb.let_("from", from);
            self.mix_columns(kb, (from, vectors), lanes, &factors);
        });
        if rest > 0 {
            let from = kb.int(full * vectors * width);
            self.mix_columns(kb, (from, rest), lanes, &factors);
        }
    }

    /// `vectors` vectors of columns from `from` on.
    fn mix_columns(
        &self,
        kb: &mut KernelBuilder,
        (from, vectors): (ExprId, i64),
        lanes: u32,
        factors: &[ExprId],
    ) {
        let (tile, params, zero) = (&self.tile, self.tile.params, kb.int(0));
        let extent = kb.int(params.keys);
        let product = Product {
            a: (tile.s, zero, params.keys),
            b: (tile.v, from, tile.a.value_size),
            lanes,
            rows: params.rows,
            vectors,
        };
        let sums = product.emit(kb, extent, Some((tile.sums, self.row, factors)));
        for (r, sums) in (0..).zip(sums) {
            for (v, sum) in (0..).zip(sums) {
                let at = product.place(kb, self.row, (r, v));
                kb.store_vec(tile.sums, at, sum);
            }
        }
    }
}
