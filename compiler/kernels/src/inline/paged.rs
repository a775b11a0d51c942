//! Rows of a cache in pages: [`PAGE_ROWS`] rows of it are together in a page, between those of other caches,
//! and a table of the sequence has the numbers of its pages.

use super::{Inliner, LaneIndex};
use mlcc_ir::kernel::{BinOp, BufId};
use mlcc_ir::step::PAGE_ROWS;
use mlcc_ir::types::{DType, TensorType};
use mlcc_kernel_lang::{Recorder, Val};

/// The exponent of [`PAGE_ROWS`].
const SHIFT: i64 = PAGE_ROWS.trailing_zeros() as i64;

/// The place of the rows of a cache, whose buffer is page 0 and all that follow.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct PagedBuffer {
    /// Numbers of pages, `i32`.
    pub table: BufId,
    /// Bytes of a page.
    pub bytes: i64,
    /// Elements of a row.
    pub row: i64,
}

/// A page of a sequence.
#[derive(Clone, Copy)]
pub struct CachePage<'k> {
    number: Val<'k>,
    /// The first row of the sequence in it.
    first: Val<'k>,
}

impl<'k> CachePage<'k> {
    /// The page of a row.
    pub fn of_row(k: &'k Recorder, table: BufId, row: Val<'k>) -> CachePage<'k> {
        CachePage::of_some(k, table, row, None)
    }

    /// The pages of a row for each lane; where `mask` does not hold, nothing is read.
    fn of_some(k: &'k Recorder, table: BufId, row: Val<'k>, mask: Option<Val<'k>>) -> CachePage<'k> {
        let index = row >> SHIFT;
        let number = match mask {
            None => k.flat(table).at([index]),
            Some(mask) => k.flat(table).at_where(mask, [index]),
        };
        CachePage { number: number.cast(DType::I64), first: index << SHIFT }
    }

    /// Computes here what there is to compute.
    pub fn named(self) -> CachePage<'k> {
        CachePage { number: self.number.named("page"), first: self.first.named("page_row") }
    }
}

impl PagedBuffer {
    /// Elements that rows of a page lie further than where they would if all rows of the sequence were dense.
    pub fn page_shift<'k>(&self, page: CachePage<'k>, dtype: DType) -> Val<'k> {
        page.number * self.elements(dtype) - page.first * self.row
    }

    /// Elements of a page.
    fn elements(&self, dtype: DType) -> i64 {
        self.bytes / dtype.bytes().unwrap_or(1) as i64
    }
}

impl<'k> Inliner<'_, 'k> {
    /// The place of the element that has index `index` in a value of type `ty` and number `flat` of all: the
    /// value is the cache or a view of it.
    pub(super) fn in_page(
        &self,
        k: &'k Recorder,
        (paged, ty): (PagedBuffer, &TensorType),
        index: &[LaneIndex<'k>],
        flat: LaneIndex<'k>,
    ) -> LaneIndex<'k> {
        let inner = ty.dims.iter().skip(1).try_fold(1, |product, d| Some(product * d.as_const()?));
        let by_rows = inner == Some(paged.row);
        if let (true, Some(LaneIndex::Affine { base: row, stride: 0 }), LaneIndex::Affine { base, stride }) =
            (by_rows, index.first(), flat)
        {
            let page = self.page.unwrap_or_else(|| {
                let any =
                    |mask: Val<'k>| super::uniform(mask).unwrap_or_else(|| mask.reduce_lanes(BinOp::Or));
                CachePage::of_some(k, paged.table, *row, self.mask.map(any))
            });
            return LaneIndex::Affine { base: base + paged.page_shift(page, ty.dtype), stride };
        }
        let place = flat.val(self.lanes);
        let mask = self.mask.map(|mask| mask.to_lanes(place.lanes()));
        let page = CachePage::of_some(k, paged.table, place / paged.row, mask);
        let place = place + paged.page_shift(page, ty.dtype);
        if place.lanes() == 1 { LaneIndex::scalar(place) } else { LaneIndex::Vector(place) }
    }
}
