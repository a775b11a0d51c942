//! Stores values of a row.

use super::{Inliner, LaneIndex};
use mlcc_ir::dim::Dim;
use mlcc_ir::graph::ValueId;
use mlcc_ir::kernel::BufId;
use mlcc_kernel_lang::{Recorder, Val};

/// The axes before the last one: of a row, and of where it is stored.
#[derive(Clone, Copy)]
pub(crate) struct RowAt<'a, 'k> {
    pub row: &'a [LaneIndex<'k>],
    pub stored: &'a [LaneIndex<'k>],
    /// Offsets of buffers in pages, in elements.
    pub shifts: &'a [(BufId, Val<'k>)],
}

impl<'a, 'k> RowAt<'a, 'k> {
    /// A row that is stored where the type of its value says.
    pub fn own(row: &'a [LaneIndex<'k>]) -> RowAt<'a, 'k> {
        RowAt { row, stored: row, shifts: &[] }
    }
}

/// All values of a column, or of the lanes from it on, then all stores.
pub(crate) fn store_all<'k>(
    k: &'k Recorder,
    inliner: &Inliner<'_, 'k>,
    at: RowAt<'_, 'k>,
    column: Val<'k>,
    stores: &[(ValueId, BufId)],
) {
    let index = [at.row, &[LaneIndex::from(column, inliner.lanes)]].concat();
    let value = |&(v, buf): &(ValueId, BufId)| {
        let index = if inliner.f.ty(v).rank() == 0 { &[] } else { index.as_slice() };
        let value = inliner.value(k, v, index).to_lanes(inliner.lanes);
        value.cast(k.flat(buf).dtype()).named("value")
    };
    let values: Vec<Val> = stores.iter().map(value).collect();
    for (&(v, buf), value) in stores.iter().zip(values) {
        let first = row_start(k, &inliner.f.ty(v).dims, at.stored);
        let shift = at.shifts.iter().find(|(of, _)| *of == buf).map(|(_, shift)| *shift);
        let first = shift.map_or(first, |shift| first + shift);
        k.flat(buf).set([first + column], value);
    }
}

/// Offset of the first element of a row.
fn row_start<'k>(k: &'k Recorder, dims: &[Dim], leading: &[LaneIndex<'k>]) -> Val<'k> {
    dims.iter().enumerate().fold(k.int(0), |flat, (axis, dim)| {
        let before = flat * k.dim(dim);
        match leading.get(axis) {
            Some(LaneIndex::Affine { base, .. }) if axis + 1 < dims.len() => before + *base,
            _ => before,
        }
    })
}
