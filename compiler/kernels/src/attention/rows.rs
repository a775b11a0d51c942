//! Some rows of a tile of attention, a register block of a product or two: from scores against a block of keys to sums of
//! values. Several register blocks share the keys in the first-level cache, and one search for the maxima.

use super::prefill::Tile;
use super::product::{Product, join_each};
use super::{HIDDEN, Keys, Place, ceil_div, lanes_of, larger};
use crate::math::exp_below_zero;
use mlcc_ir::builder::KernelBuilder;
use mlcc_ir::kernel::{BinOp, BufId, ExprId, Space, Ty};
use mlcc_ir::types::DType;

/// A set of rows of a tile against a block of keys.
pub(super) struct Rows<'a> {
    tile: &'a Tile<'a>,
    /// Its number, its first row, and its register blocks in use.
    set: ExprId,
    row: ExprId,
    blocks: ExprId,
    /// The first key.
    j: ExprId,
    /// True if every row sees all keys of the block.
    shown: ExprId,
    /// Keys up to the last that one of the rows sees.
    keys: ExprId,
}

impl<'a> Rows<'a> {
    /// Set `set` of a tile against `count` keys from `j` on.
    pub fn new(
        kb: &mut KernelBuilder,
        tile: &'a Tile<'a>,
        set: ExprId,
        (j, count): (ExprId, ExprId),
    ) -> Rows<'a> {
        let params = tile.params;
        let row = kb.mul_int(set, params.set());
        let row = kb.let_("row", row);
        let (all, most) = (tile.row_blocks(kb), kb.int(params.together));
        let left = kb.mul_int(set, params.together);
        let left = kb.sub(all, left);
        let blocks = kb.min(left, most);
        let last = kb.add_int(row, params.set() - 1);
        let (first, _) = tile.query_of(kb, row);
        let (last, _) = tile.query_of(kb, last);
        let shown = shown(kb, tile, j, (first, last));
        // Keys behind the last query, but for a prefix.
        let seen = match tile.a.keys {
            Keys::Sinks => count,
            Keys::Seen => {
                let next = kb.add_int(last, 1);
                let end = tile.prefix.map_or(next, |prefix| kb.max(next, prefix));
                let seen = kb.sub(end, j);
                kb.min(seen, count)
            }
        };
        Rows {
            tile,
            set,
            row,
            blocks: kb.let_("blocks", blocks),
            j,
            shown: kb.let_("shown", shown),
            keys: kb.let_("seen", seen),
        }
    }

    fn lanes(&self) -> u32 {
        self.tile.params.lanes
    }

    /// Stores the scores, and the largest of every row in each lane.
    pub fn scores(&self, kb: &mut KernelBuilder) {
        let (tile, params) = (self.tile, self.tile.params);
        let (lanes, zero) = (self.lanes(), kb.int(0));
        let hidden = kb.constant(HIDDEN, Ty::vector(DType::F32, lanes));
        for r in 0..params.set() {
            let at = kb.int(r * i64::from(lanes));
            kb.store_vec(tile.best, at, hidden);
        }
        kb.serial("part", self.blocks, |kb, part| {
            let offset = kb.mul_int(part, params.rows);
            let offset = kb.let_("offset", offset);
            let best: Vec<BufId> = (0..params.rows)
                .map(|_| {
                    let best = kb.alloc("best", DType::F32, lanes as usize, Space::Local);
                    kb.store_vec(best, zero, hidden);
                    best
                })
                .collect();
            kb.if_else(
                self.shown,
                |kb| {
                    let width = params.vectors * i64::from(lanes);
                    let groups = kb.int(params.keys / width);
                    kb.serial("keys", groups, |kb, group| {
                        let from = kb.mul_int(group, width);
                        self.score_block(kb, offset, (from, params.vectors), true, &best);
                    });
                },
                |kb| self.partly_seen(kb, offset, &best),
            );
            for (r, &best) in (0..).zip(&best) {
                let at = kb.add_int(offset, r);
                let at = kb.mul_int(at, lanes.into());
                let value = kb.load_vec(best, zero, lanes);
                kb.store_vec(tile.best, at, value);
            }
        });
    }

    /// Scores of the keys that are seen, by half a register block where that is enough.
    fn partly_seen(&self, kb: &mut KernelBuilder, offset: ExprId, best: &[BufId]) {
        let params = self.tile.params;
        let lanes = i64::from(params.lanes);
        let (width, half) = (params.vectors * lanes, params.half() * lanes);
        let by = kb.int(width);
        let groups = ceil_div(kb, self.keys, by);
        kb.serial("keys", groups, |kb, group| {
            let from = kb.mul_int(group, width);
            let (left, enough) = (kb.sub(self.keys, from), kb.int(half));
            let few = kb.binary(BinOp::Le, left, enough);
            kb.if_else(
                few,
                |kb| self.score_block(kb, offset, (from, params.half()), false, best),
                |kb| self.score_block(kb, offset, (from, params.vectors), false, best),
            );
        });
    }

    /// Scores of the register block that begins with row `offset` of the set, against so many vectors of keys.
    fn score_block(
        &self,
        kb: &mut KernelBuilder,
        offset: ExprId,
        (from, vectors): (ExprId, i64),
        shown: bool,
        best: &[BufId],
    ) {
        let (tile, params, zero) = (self.tile, self.tile.params, kb.int(0));
        let lanes = self.lanes();
        let from = kb.let_("from", from);
        let first = kb.add(self.row, offset);
        let product = Product {
            a: (tile.q, first, tile.a.size),
            b: (tile.k, from, params.keys),
            lanes,
            rows: params.rows,
            vectors,
        };
        let extent = kb.int(tile.a.size);
        let sums = product.emit(kb, extent, None);
        for (r, sums) in (0..).zip(&sums) {
            let row = kb.add_int(first, r);
            let (p, slope) = tile.query_of(kb, row);
            let row = kb.add_int(offset, r);
            let row = kb.mul_int(row, params.keys);
            for (v, &s) in (0..).zip(sums) {
                let column = kb.add_int(from, v * i64::from(lanes));
                let key = kb.add(self.j, column);
                let place = Place { p, j: key, slope, prefix: tile.prefix, end: None, shown };
                let s = tile.a.score(kb, s, &place);
                let s = kb.let_("s", s);
                let at = kb.add(row, column);
                kb.store_vec(tile.s, at, s);
                let old = kb.load_vec(best[r as usize], zero, lanes);
                let new = larger(kb, old, s);
                kb.store_vec(best[r as usize], zero, new);
            }
        }
    }

    /// The new running maxima of the rows, and what their change makes of older sums.
    pub fn raise_max(&self, kb: &mut KernelBuilder) {
        let (tile, params) = (self.tile, self.tile.params);
        let (lanes, zero) = (self.lanes(), kb.int(0));
        let hidden = kb.constant(HIDDEN, Ty::vector(DType::F32, lanes));
        let slots = (params.set() as u64).next_power_of_two() as u32;
        let mut best = Vec::new();
        for r in 0..i64::from(slots) {
            best.push((r < params.set()).then(|| {
                let at = kb.int(r * i64::from(lanes));
                let best = kb.load_vec(tile.best, at, lanes);
                kb.let_("best", best)
            }));
        }
        let mut most = join_each(kb, best, hidden, larger);
        let mut distance = slots;
        while distance < lanes {
            let other = kb.shuffle(most, None, (0..lanes).map(|l| l ^ distance).collect());
            let both = larger(kb, most, other);
            most = kb.let_("most", both);
            distance *= 2;
        }
        let at = kb.mul_int(self.set, lanes.into());
        let old = kb.load_vec(tile.max, at, lanes);
        let old = kb.let_("old", old);
        let max = larger(kb, old, most);
        let max = kb.let_("max", max);
        kb.store_vec(tile.max, at, max);
        let fallen = kb.sub(old, max);
        let factors = exp_below_zero(kb, fallen);
        kb.store_vec(tile.factors, zero, factors);
    }

    /// Scores to weights, and their sums.
    pub fn weigh(&self, kb: &mut KernelBuilder) {
        let (tile, params, zero) = (self.tile, self.tile.params, kb.int(0));
        let lanes = self.lanes();
        let by = kb.int(lanes.into());
        let vectors = ceil_div(kb, self.keys, by);
        let vectors = kb.let_("vectors", vectors);
        let rows = kb.mul_int(self.blocks, params.rows);
        kb.serial("r", rows, |kb, r| {
            let max = kb.mul_int(self.set, lanes.into());
            let max = kb.add(max, r);
            let max = self.in_all_lanes(kb, tile.max, max, lanes);
            let factor = self.in_all_lanes(kb, tile.factors, r, lanes);
            let row = kb.add(self.row, r);
            let of_row = kb.mul_int(row, lanes.into());
            let total = kb.load_vec(tile.total, of_row, lanes);
            let total = kb.mul(total, factor);
            let sum = kb.alloc("total", DType::F32, lanes as usize, Space::Local);
            kb.store_vec(sum, zero, total);
            kb.serial("vector", vectors, |kb, v| {
                let at = kb.mul_int(r, params.keys);
                let column = kb.mul_int(v, lanes.into());
                let at = kb.add(at, column);
                let s = kb.load_vec(tile.s, at, lanes);
                let below = kb.sub(s, max);
                let weight = exp_below_zero(kb, below);
                let weight = kb.let_("weight", weight);
                kb.store_vec(tile.s, at, weight);
                let old = kb.load_vec(sum, zero, lanes);
                let new = kb.add(old, weight);
                kb.store_vec(sum, zero, new);
            });
            let total = kb.load_vec(sum, zero, lanes);
            kb.store_vec(tile.total, of_row, total);
        });
    }

    /// An element of a buffer, pinned.
    fn in_all_lanes(&self, kb: &mut KernelBuilder, buf: BufId, at: ExprId, lanes: u32) -> ExprId {
        let value = kb.load(buf, at);
        let value = kb.splat(value, lanes);
        kb.let_("of_row", value)
    }

    /// Adds the weighted values of the block to the sums, as many columns at a time as registers have room for.
    pub fn mix(&self, kb: &mut KernelBuilder) {
        let size = self.tile.a.value_size;
        let (lanes, most) = (lanes_of(size, self.lanes()), self.tile.params.vectors);
        let width = i64::from(lanes);
        let all = size / width;
        let passes = (all + most - 1) / most;
        let vectors = (all + passes - 1) / passes;
        let (full, rest) = (all / vectors, all % vectors);
        let groups = kb.int(full);
        kb.serial("columns", groups, |kb, group| {
            let from = kb.mul_int(group, vectors * width);
            let from = kb.let_("from", from);
            self.mix_columns(kb, (from, vectors), lanes);
        });
        if rest > 0 {
            let from = kb.int(full * vectors * width);
            self.mix_columns(kb, (from, rest), lanes);
        }
    }

    /// `vectors` vectors of columns from `from` on.
    fn mix_columns(&self, kb: &mut KernelBuilder, (from, vectors): (ExprId, i64), lanes: u32) {
        let (tile, params) = (self.tile, self.tile.params);
        kb.serial("part", self.blocks, |kb, part| {
            let offset = kb.mul_int(part, params.rows);
            let offset = kb.let_("offset", offset);
            let product = Product {
                a: (tile.s, offset, params.keys),
                b: (tile.v, from, tile.a.value_size),
                lanes,
                rows: params.rows,
                vectors,
            };
            let mut factors = Vec::new();
            for r in 0..params.rows {
                let at = kb.add_int(offset, r);
                factors.push(self.in_all_lanes(kb, tile.factors, at, lanes));
            }
            let row = kb.add(self.row, offset);
            let sums = product.emit(kb, self.keys, Some((tile.sums, row, &factors)));
            for (r, sums) in (0..).zip(sums) {
                for (v, sum) in (0..).zip(sums) {
                    let at = product.place(kb, row, (r, v));
                    kb.store_vec(tile.sums, at, sum);
                }
            }
        });
    }
}

/// True if the queries at positions `first ..= last` see all keys of the block from `j` on.
fn shown(kb: &mut KernelBuilder, tile: &Tile, j: ExprId, (first, last): (ExprId, ExprId)) -> ExprId {
    let end = kb.add_int(j, tile.params.keys - 1);
    let behind = kb.binary(BinOp::Le, end, first);
    match (tile.a.keys, tile.a.op.window as i64) {
        (Keys::Sinks, _) => kb.lt(first, first),
        (Keys::Seen, 0) => behind,
        (Keys::Seen, window) => {
            let near = kb.add_int(j, window);
            let near = kb.lt(last, near);
            kb.binary(BinOp::And, behind, near)
        }
    }
}
