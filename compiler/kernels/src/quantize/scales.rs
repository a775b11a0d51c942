//! The scales of the groups of a row, from their largest magnitudes.

use super::{BlockRow, QuantizeBuffers, RowCodes, RowQuantizer};
use mlcc_ir::kernel::ExprType;
use mlcc_ir::ops::max_code;
use mlcc_ir::types::DType;
use mlcc_kernel_lang::{RegisterVar, Val};

/// Magnitudes below this are taken as zero: their scale would not be a normal number.
const TINY: f64 = 1e-30;
/// Least scale, relative to the largest one before it.
const LEAST: f64 = 1.0 / (1_u128 << 64) as f64;

/// Values that are carried from group to group: the last scale, the largest one, and the bits of the largest
/// magnitude.
#[derive(Clone, Copy)]
pub(super) struct ScaleCarry<T> {
    pub scale: T,
    pub largest: T,
    pub absmax: T,
}

impl<T> ScaleCarry<T> {
    fn map<U>(self, mut to: impl FnMut(T) -> U) -> ScaleCarry<U> {
        ScaleCarry { scale: to(self.scale), largest: to(self.largest), absmax: to(self.absmax) }
    }
    fn into_array(self) -> [T; 3] {
        [self.scale, self.largest, self.absmax]
    }
}

impl<'k> RowQuantizer<'_, '_, 'k> {
    /// Finds the scales of the groups of a piece from their magnitudes, stores their ratios, and keeps their
    /// reciprocals.
    pub(super) fn compute_scales(&self, row: &BlockRow<'_, 'k>, first: Val<'k>, groups: i64) {
        // The carried values stay in registers meanwhile.
        let load =
            |work: &QuantizeBuffers<'k>| work.carry.map(|kept| self.k.reg("carried", kept.at([row.r])));
        let own: Vec<ScaleCarry<RegisterVar>> = self.work.iter().map(load).collect();
        self.k.serial("g", groups, |i| {
            for ((codes, work), carried) in self.codes.iter().zip(&self.work).zip(&own) {
                let scale = scale_of_group(carried, work.absmax.at([i]), codes.bits);
                let ratio = scale.before / scale.own;
                codes.scales(self.k).set([row.row, first + i], ratio);
                work.inverse_scales.set([row.r, i], 1.0 / scale.own);
            }
        });
        for (work, own) in self.work.iter().zip(own) {
            for (kept, reg) in work.carry.into_array().into_iter().zip(own.into_array()) {
                kept.set([row.r], reg.get());
            }
        }
    }

    /// Stores the scale of the last group of a row in the first place. Integers cannot hold NaN and infinity:
    /// it carries them on.
    pub(super) fn store_unit(&self, codes: &RowCodes, work: &QuantizeBuffers<'k>, r: Val<'k>, row: Val<'k>) {
        let (scale, size) = (work.carry.scale.at([r]), work.carry.absmax.at([r]));
        let poison = size.bits_as(ExprType::scalar(DType::F32)) * 0.0;
        codes.scales(self.k).set((row, 0), scale + poison);
    }
}

/// The scale of a group, and that of the group before it.
struct ScalePair<'k> {
    own: Val<'k>,
    before: Val<'k>,
}

/// The scale of a group whose largest magnitude has these bits.
fn scale_of_group<'k>(carried: &ScaleCarry<RegisterVar<'k>>, size: Val<'k>, bits: usize) -> ScalePair<'k> {
    let size = size.named("size");
    carried.absmax.set(carried.absmax.get().max(size));
    let size = size.bits_as(ExprType::scalar(DType::F32));

    let before = carried.scale.get().named("before");
    let largest = carried.largest.get().named("largest");
    let own = (size * (1.0 / max_code(bits))).named("own");
    // The floor below is no larger than `largest`, so this need not wait for it.
    carried.largest.set(larger(largest, own));
    let own = larger(own, largest * LEAST);
    let own = size.like(TINY).lt(size).select(own, before).named("scale");
    carried.scale.set(own);
    ScalePair { own, before }
}

/// The larger of two numbers; `a` if `b` is NaN.
fn larger<'k>(a: Val<'k>, b: Val<'k>) -> Val<'k> {
    a.lt(b).select(b, a)
}
