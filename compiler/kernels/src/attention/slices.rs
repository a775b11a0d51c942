//! Shares of decode attention ([`super::decode`]) among workers: by slices of the keys, and by key heads.

use super::plan::SLICES;
use super::problem::AttentionProblem;
use mlcc_ir::kernel::MemorySpace;
use mlcc_ir::types::DType;
use mlcc_kernel_lang::Val;

/// A slice has at least [`SLICE_KEYS`] keys while there are few of them, and at least [`LONG_SLICE`] where
/// there are more than [`FEW_SLICES`]: each leaves sums that are joined, which takes as long as 5 to 10 keys.
pub(super) const SLICE_KEYS: i64 = 64;
const FEW_SLICES: i64 = 8;
const LONG_SLICE: i64 = 256;

/// The shares of the keys `first .. end`: by length alone, so that any number of workers gives the same sums.
pub(super) struct KeySlices<'k> {
    pub slices: Val<'k>,
    /// Keys of a slice.
    pub keys: Val<'k>,
}

impl<'k> KeySlices<'k> {
    pub fn new(first: Val<'k>, end: Val<'k>) -> KeySlices<'k> {
        let count = (end - first).named("keys");
        let slices = |least: i64, most: i64| count.div_ceil(least).min(most);
        let slices = slices(SLICE_KEYS, FEW_SLICES).max(slices(LONG_SLICE, SLICES)).named("slices");
        KeySlices { slices, keys: (count.div_ceil(slices).div_ceil(16) * 16).named("slice_keys") }
    }
}

/// Most slices of which workers share the key heads too: a short cache has fewer slices than there are
/// workers, or numbers of them that workers cannot share evenly.
const SHARED_SLICES: i64 = 8;

/// A worker's part of all slices and key heads: a run of both. Heads are independent of each other, so this
/// changes no result, and key heads of a slice that one worker has go over its rows together.
pub(super) struct WorkerSlices<'k> {
    /// The first slice that it has something of, and how many.
    pub first: Val<'k>,
    pub slices: Val<'k>,
    /// Units of work, by slice: key heads, or all of them.
    from: Val<'k>,
    to: Val<'k>,
    units: Val<'k>,
    /// Key heads of a unit.
    heads: Val<'k>,
}

impl<'k> WorkerSlices<'k> {
    /// The part of the worker that runs this.
    pub fn new(a: &AttentionProblem, shares: &KeySlices<'k>) -> WorkerSlices<'k> {
        let k = shares.slices.recorder();
        let few = shares.slices.le(SHARED_SLICES);
        let units = few.select(k.int(a.kv), 1).named("units");
        let heads = few.select(1, k.int(a.kv)).named("heads");
        // The first item of this worker's share, and the end of the share.
        let bounds = k.alloc("bounds", DType::I32, [2], MemorySpace::Local);
        bounds.set([0], k.int32(0));
        bounds.set([1], k.int32(0));
        k.par("item", shares.slices * units, |item| {
            let (next, item) = ((item + 1).cast(DType::I32), item.cast(DType::I32));
            let begun = k.int32(0).lt(bounds.at([1]));
            bounds.set([0], begun.select(bounds.at([0]), item));
            bounds.set([1], next);
        });
        let [from, to] =
            [(0, "from"), (1, "to")].map(|(i, name)| bounds.at([i]).cast(DType::I64).named(name));
        let first = (from / units).named("first_slice");
        WorkerSlices { first, slices: (to.div_ceil(units) - first).max(0), from, to, units, heads }
    }

    /// The first key head that the worker has of a slice, and how many.
    pub fn key_heads_of(&self, slice: Val<'k>) -> (Val<'k>, Val<'k>) {
        let before = slice * self.units;
        let (from, to) = ((self.from - before).max(0), (self.to - before).min(self.units));
        ((from * self.heads).named("first_head"), ((to - from) * self.heads).named("key_heads"))
    }
}
