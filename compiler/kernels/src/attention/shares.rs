//! How decode attention ([`super::decode`]) is shared among workers: by slices of the keys, and by key heads.

use super::schedule::SLICES;
use super::{Problem, SLICE_KEYS, at_least_zero, ceil_div};
use mlcc_ir::builder::KernelBuilder;
use mlcc_ir::kernel::{BinOp, ExprId, Space};
use mlcc_ir::types::DType;

/// A slice has at least this many keys while there are few of them, and at least [`LONG_SLICE`] where there are more than
/// [`FEW_SLICES`]: each leaves sums that are joined, which takes as long as 5 to 10 keys.
const FEW_SLICES: i64 = 8;
const LONG_SLICE: i64 = 256;

/// How the keys `first .. t` are shared: by length alone, so that any number of workers gives the same sums.
pub(super) struct Shares {
    pub slices: ExprId,
    /// Keys of a slice.
    pub keys: ExprId,
}

impl Shares {
    pub fn new(kb: &mut KernelBuilder, first: ExprId, t: ExprId) -> Shares {
        let count = kb.sub(t, first);
        let count = kb.let_("keys", count);
        let slices = |kb: &mut KernelBuilder, least: i64, most: i64| {
            let (least, most) = (kb.int(least), kb.int(most));
            let used = ceil_div(kb, count, least);
            kb.min(used, most)
        };
        let (few, more) = (slices(kb, SLICE_KEYS, FEW_SLICES), slices(kb, LONG_SLICE, SLICES));
        let used = kb.max(few, more);
        let used = kb.let_("slices", used);
        let (part, step) = (ceil_div(kb, count, used), kb.int(16));
        let steps = ceil_div(kb, part, step);
        let keys = kb.mul(steps, step);
        Shares { slices: used, keys: kb.let_("slice_keys", keys) }
    }
}

/// Most slices of which workers share the key heads too: a short cache has fewer slices than there are workers, or numbers of them
/// that workers cannot share evenly.
const SHARED_SLICES: i64 = 8;

/// What one worker has of all slices and key heads: a run of both. Heads know nothing of each other, so this changes no result, and
/// key heads of a slice that one worker has go together over its rows.
pub(super) struct Run {
    /// The first slice that it has something of, and how many.
    pub first: ExprId,
    pub slices: ExprId,
    /// Units of work, by slice: key heads, or all of them.
    from: ExprId,
    to: ExprId,
    units: ExprId,
    /// Key heads of a unit.
    heads: ExprId,
}

impl Run {
    /// Of the worker that runs this.
    pub fn new(kb: &mut KernelBuilder, a: &Problem, shares: &Shares) -> Run {
        let most = kb.int(SHARED_SLICES);
        let few = kb.binary(BinOp::Le, shares.slices, most);
        let (zero, one, all) = (kb.int(0), kb.int(1), kb.int(a.kv));
        let (units, heads) = (kb.select(few, all, one), kb.select(few, one, all));
        let (units, heads) = (kb.let_("units", units), kb.let_("heads", heads));
        let items = kb.mul(shares.slices, units);
        // The first and the one behind the last of this worker's share.
        let bounds = kb.alloc("bounds", DType::I32, 2, Space::Local);
        let none = kb.int_of(0, DType::I32);
        kb.store(bounds, zero, none);
        kb.store(bounds, one, none);
        kb.par("item", items, |kb, item| {
            let next = kb.add_int(item, 1);
            let (item, next) = (kb.cast(item, DType::I32), kb.cast(next, DType::I32));
            let (from, to) = (kb.load(bounds, zero), kb.load(bounds, one));
            let begun = kb.lt(none, to);
            let from = kb.select(begun, from, item);
            kb.store(bounds, zero, from);
            kb.store(bounds, one, next);
        });
        let [from, to] = [(zero, "from"), (one, "to")].map(|(at, name)| {
            let bound = kb.load(bounds, at);
            let bound = kb.cast(bound, DType::I64);
            kb.let_(name, bound)
        });
        let first = kb.div(from, units);
        let first = kb.let_("first_slice", first);
        let behind = ceil_div(kb, to, units);
        let slices = kb.sub(behind, first);
        let slices = at_least_zero(kb, slices);
        Run { first, slices, from, to, units, heads }
    }

    /// The first key head that the worker has of a slice, and how many.
    pub fn of(&self, kb: &mut KernelBuilder, slice: ExprId) -> (ExprId, ExprId) {
        let before = kb.mul(slice, self.units);
        let (from, to) = (kb.sub(self.from, before), kb.sub(self.to, before));
        let (from, to) = (at_least_zero(kb, from), kb.min(to, self.units));
        let count = kb.sub(to, from);
        let (first, count) = (kb.mul(from, self.heads), kb.mul(count, self.heads));
        (kb.let_("first_head", first), kb.let_("key_heads", count))
    }
}
