//! How the codes of a piece of several rows come to their places: interleaved quad by quad, or row by row.

use super::{RowCodes, Rows, Work};
use mlcc_ir::builder::KernelBuilder;
use mlcc_ir::kernel::{ExprId, Ty};
use mlcc_ir::types::DType;

impl Rows<'_, '_> {
    /// Brings the codes of a piece from the strip of a block of rows to their places.
    pub(super) fn arrange(
        &self,
        kb: &mut KernelBuilder,
        (codes, work): (&RowCodes, &Work),
        first: ExprId,
        groups: i64,
        columns: usize,
    ) {
        if work.strip.is_none() {
            return;
        }
        let size = kb.int(self.block.size.into());
        let alone = kb.lt(self.block.rows, size);
        let quads = codes.quads(columns);
        let each_group = |kb: &mut KernelBuilder, body: &dyn Fn(&mut KernelBuilder, ExprId, ExprId)| {
            let groups = kb.int(groups);
            kb.serial("g", groups, |kb, i| {
                let g = kb.add(first, i);
                body(kb, i, g);
            });
        };
        kb.if_else(
            alone,
            |kb| each_group(kb, &|kb, i, g| self.copy(kb, (codes, work), (i, g), quads)),
            |kb| each_group(kb, &|kb, i, g| self.interleave(kb, (codes, work), (i, g), quads)),
        );
    }

    /// Vectors of quads that cover `quads`.
    fn width(&self, quads: usize) -> u32 {
        let most = self.block.lanes.min(1 << quads.trailing_zeros());
        most.max(self.block.size.min(quads as u32))
    }

    /// Copies the codes of a group (its number in the piece, its number) to where rows lie one by one.
    fn copy(
        &self,
        kb: &mut KernelBuilder,
        (codes, work): (&RowCodes, &Work),
        (i, g): (ExprId, ExprId),
        quads: usize,
    ) {
        let Some(strip) = work.strip else { return };
        let lanes = self.width(quads) * codes.quad() as u32;
        self.each(kb, |kb, r, row| {
            let from = self.in_strip(kb, codes, r, i);
            let of_row = kb.mul_int(row, (codes.row_quads() * codes.quad()) as i64);
            let to = kb.mul_int(g, codes.group_elements());
            let to = kb.add(to, of_row);
            for at in (0..(quads * codes.quad()) as i64).step_by(lanes as usize) {
                let (from, to) = (kb.add_int(from, at), kb.add_int(to, at));
                let some = kb.load_vec(strip, from, lanes);
                kb.store_vec(codes.codes, to, some);
            }
        });
    }

    /// Interleaves the quads of a group of all rows.
    fn interleave(
        &self,
        kb: &mut KernelBuilder,
        (codes, work): (&RowCodes, &Work),
        (i, g): (ExprId, ExprId),
        quads: usize,
    ) {
        let Some(strip) = work.strip else { return };
        let size = i64::from(self.block.size);
        let width = self.width(quads);
        let lanes = width * codes.quad() as u32;
        let of_block = kb.mul_int(self.block.first, (codes.row_quads() * codes.quad()) as i64);
        let to = kb.mul_int(g, codes.group_elements() * size);
        let to = kb.add(to, of_block);
        for begin in (0..(quads * codes.quad()) as i64).step_by(lanes as usize) {
            let rows: Vec<ExprId> = (0..size)
                .map(|r| {
                    let r = kb.int(r);
                    let from = self.in_strip(kb, codes, r, i);
                    let from = kb.add_int(from, begin);
                    let some = kb.load_vec(strip, from, lanes);
                    let quads = kb.bitcast(some, Ty::vector(DType::I32, width));
                    kb.let_("quads", quads)
                })
                .collect();
            for (v, quads) in interleaved(kb, rows).into_iter().enumerate() {
                let bits = codes.as_elements(kb, quads, lanes);
                let at = kb.add_int(to, begin * size + v as i64 * i64::from(lanes));
                kb.store_vec(codes.codes, at, bits);
            }
        }
    }
}

/// The lanes of several vectors (a power of two) by turns: first lane 0 of all of them.
fn interleaved(kb: &mut KernelBuilder, vectors: Vec<ExprId>) -> Vec<ExprId> {
    let lanes = kb.ty(vectors[0]).lanes;
    let mut sets: Vec<Vec<ExprId>> = vectors.into_iter().map(|v| vec![v]).collect();
    // Lanes that stay together: so many vectors are in a set.
    let mut unit = 1;
    while sets.len() > 1 {
        let joined = sets.chunks(2).map(|pair| {
            let mut all = Vec::new();
            for (&a, &b) in pair[0].iter().zip(&pair[1]) {
                for half in [0, lanes / 2] {
                    let lane = |l: u32| {
                        let (turn, within) = (l / unit, l % unit);
                        half + turn / 2 * unit + within + if turn % 2 == 0 { 0 } else { lanes }
                    };
                    let mixed = kb.shuffle(a, Some(b), (0..lanes).map(lane).collect());
                    all.push(kb.let_("mixed", mixed));
                }
            }
            all
        });
        sets = joined.collect();
        unit *= 2;
    }
    sets.swap_remove(0)
}
