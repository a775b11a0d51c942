//! Loops and conditions.

use crate::{Recorder, Val};
use mlcc_ir::dim::Dim;
use mlcc_ir::kernel::{ForKind, Stmt};

/// A number of iterations, or an index.
pub trait IntoIndex<'k>: Clone {
    #[doc(hidden)]
    fn index(self, k: &'k Recorder) -> Val<'k>;
}

impl<'k> IntoIndex<'k> for i64 {
    fn index(self, k: &'k Recorder) -> Val<'k> {
        k.int(self)
    }
}

impl<'k> IntoIndex<'k> for Val<'k> {
    fn index(self, _: &'k Recorder) -> Val<'k> {
        self
    }
}

impl<'k> IntoIndex<'k> for &Dim {
    fn index(self, k: &'k Recorder) -> Val<'k> {
        k.dim(self)
    }
}

impl Recorder {
    fn each<'k>(&'k self, name: &str, extent: impl IntoIndex<'k>, kind: ForKind, body: impl FnOnce(Val<'k>)) {
        let extent = self.extent(extent);
        let Some((open, index)) = self.builder(|kb| kb.begin_for(name, extent.id(), kind)) else { return };
        body(self.val(index));
        self.builder(|kb| kb.end_for(open));
    }

    /// One iteration after the other.
    pub fn serial<'k>(&'k self, name: &str, extent: impl IntoIndex<'k>, body: impl FnOnce(Val<'k>)) {
        self.each(name, extent, ForKind::Serial, body);
    }

    /// The same, repeated in the code; `extent` is constant.
    pub fn unrolled<'k>(&'k self, name: &str, extent: i64, body: impl FnOnce(Val<'k>)) {
        self.each(name, extent, ForKind::Unroll, body);
    }

    /// CPU workers take contiguous parts of the iterations.
    pub fn par<'k>(&'k self, name: &str, extent: impl IntoIndex<'k>, body: impl FnOnce(Val<'k>)) {
        self.each(name, extent, ForKind::Par, body);
    }

    /// Thread blocks of a GPU along one axis of the grid.
    pub fn blocks<'k>(
        &'k self,
        name: &str,
        axis: u8,
        extent: impl IntoIndex<'k>,
        body: impl FnOnce(Val<'k>),
    ) {
        self.each(name, extent, ForKind::Block(axis), body);
    }

    /// Threads of a block.
    pub fn threads<'k>(&'k self, name: &str, extent: i64, body: impl FnOnce(Val<'k>)) {
        self.each(name, extent, ForKind::Thread(0), body);
    }

    /// One iteration after the other, `count` of them, with the places 0, `step`, `2 * step` and so on.
    pub fn steps<'k>(&'k self, name: &str, count: impl IntoIndex<'k>, step: i64, body: impl FnOnce(Val<'k>)) {
        self.serial(name, count, |i| body(i * step));
    }

    /// The first element of each vector of `lanes` of `size` elements, which are whole vectors.
    pub fn vectors<'k>(&'k self, name: &str, size: i64, lanes: u32, body: impl FnOnce(Val<'k>)) {
        self.steps(name, size / i64::from(lanes), lanes.into(), body);
    }

    /// `acc = body(i, acc)` for each `i` below `extent`, beginning with `first`.
    pub fn fold<'k>(
        &'k self,
        name: &str,
        extent: impl IntoIndex<'k>,
        first: impl FoldInit<'k>,
        body: impl FnOnce(Val<'k>, Val<'k>) -> Val<'k>,
    ) -> Val<'k> {
        let acc = self.reg("acc", first.value(self));
        self.serial(name, extent, |i| acc.set(body(i, acc.get())));
        acc.get().named("folded")
    }

    /// The statements that `body` records, instead of recording them here.
    pub(crate) fn record_block(&self, body: impl FnOnce()) -> Vec<Stmt> {
        self.builder(|kb| kb.open_block());
        body();
        self.builder(|kb| kb.close_block())
    }

    /// `then` where the condition holds.
    pub fn when(&self, cond: Val, then: impl FnOnce()) {
        self.when_else(cond, then, || {});
    }

    /// `then` where the condition holds, `otherwise` where not.
    pub fn when_else(&self, cond: Val, then: impl FnOnce(), otherwise: impl FnOnce()) {
        let (then, otherwise) = (self.record_block(then), self.record_block(otherwise));
        self.builder(|kb| kb.push(Stmt::If { cond: cond.id(), then, otherwise }));
    }

    /// `body(true)` where the condition holds, `body(false)` where not: for branches that share the values
    /// they change.
    pub fn branch(&self, cond: Val, mut body: impl FnMut(bool)) {
        let (then, otherwise) = (self.record_block(|| body(true)), self.record_block(|| body(false)));
        self.builder(|kb| kb.push(Stmt::If { cond: cond.id(), then, otherwise }));
    }

    /// All threads of a block have come here before one goes on.
    pub fn barrier(&self) {
        self.builder(|kb| kb.barrier());
    }
}

/// The start of a fold: a value, or an f32 literal.
pub trait FoldInit<'k> {
    #[doc(hidden)]
    fn value(self, k: &'k Recorder) -> Val<'k>;
}

impl<'k> FoldInit<'k> for f64 {
    fn value(self, k: &'k Recorder) -> Val<'k> {
        k.float(self)
    }
}

impl<'k> FoldInit<'k> for Val<'k> {
    fn value(self, _: &'k Recorder) -> Val<'k> {
        self
    }
}
