//! Buffers with a shape, and variables.

use crate::{IntoIndex, Recorder, Val};
use mlcc_ir::instr::InstrId;
use mlcc_ir::kernel::{BufId, MemorySpace};
use mlcc_ir::types::DType;

/// A buffer whose elements have `N` indices.
#[derive(Clone, Copy)]
pub struct BufferView<'k, const N: usize> {
    k: &'k Recorder,
    buf: BufId,
    /// The start of the view; `None` is the start of the buffer.
    origin: Option<Val<'k>>,
    /// Elements from one index to the next, outermost first; each a multiple of the next one.
    strides: [i64; N],
}

/// `N` indices: values, numbers, or both in a tuple.
pub trait IndexTuple<'k, const N: usize> {
    #[doc(hidden)]
    fn values(self, k: &'k Recorder) -> [Val<'k>; N];
}

impl<'k, T: IntoIndex<'k>, const N: usize> IndexTuple<'k, N> for [T; N] {
    fn values(self, k: &'k Recorder) -> [Val<'k>; N] {
        self.map(|index| index.index(k))
    }
}

impl<'k, A: IntoIndex<'k>, B: IntoIndex<'k>> IndexTuple<'k, 2> for (A, B) {
    fn values(self, k: &'k Recorder) -> [Val<'k>; 2] {
        [self.0.index(k), self.1.index(k)]
    }
}

impl<'k, A: IntoIndex<'k>, B: IntoIndex<'k>, C: IntoIndex<'k>> IndexTuple<'k, 3> for (A, B, C) {
    fn values(self, k: &'k Recorder) -> [Val<'k>; 3] {
        [self.0.index(k), self.1.index(k), self.2.index(k)]
    }
}

impl<'k> BufferView<'k, 1> {
    /// The same buffer as rows of `width` elements.
    pub fn rows(self, width: i64) -> BufferView<'k, 2> {
        BufferView { k: self.k, buf: self.buf, origin: self.origin, strides: [width, 1] }
    }

    /// Stores all lanes of a value over the first `len` elements, again and again.
    pub fn fill(self, len: i64, value: Val<'k>) {
        self.k.vectors("c", len, value.lanes(), |c| self.set([c], value));
    }
}

impl<'k> BufferView<'k, 2> {
    /// One row.
    #[track_caller]
    pub fn row(self, index: impl IntoIndex<'k>) -> BufferView<'k, 1> {
        BufferView {
            k: self.k,
            buf: self.buf,
            origin: Some(self.start_of(index)),
            strides: [self.strides[1]],
        }
    }
}

impl<'k> BufferView<'k, 3> {
    /// The rows of one index of the outermost axis.
    #[track_caller]
    pub fn row(self, index: impl IntoIndex<'k>) -> BufferView<'k, 2> {
        let [_, row, column] = self.strides;
        BufferView { k: self.k, buf: self.buf, origin: Some(self.start_of(index)), strides: [row, column] }
    }
}

impl<'k, const N: usize> BufferView<'k, N> {
    pub(crate) fn dense(k: &'k Recorder, buf: BufId, dims: [i64; N]) -> BufferView<'k, N> {
        let mut strides = [1; N];
        for axis in (1..N).rev() {
            strides[axis - 1] = strides[axis] * dims[axis];
        }
        BufferView { k, buf, origin: None, strides }
    }

    /// The start of the part of an index of the outermost axis.
    #[track_caller]
    fn start_of(self, index: impl IntoIndex<'k>) -> Val<'k> {
        let start = index.index(self.k) * self.strides[0];
        self.origin.map_or(start, |origin| origin + start)
    }

    /// The same `elements` elements further.
    #[track_caller]
    pub fn offset_by(self, elements: Val<'k>) -> BufferView<'k, N> {
        BufferView { origin: Some(self.origin.map_or(elements, |origin| origin + elements)), ..self }
    }

    /// The elements from this place on, by one index.
    #[track_caller]
    pub fn starting_at(self, at: impl IndexTuple<'k, N>) -> BufferView<'k, 1> {
        BufferView { k: self.k, buf: self.buf, origin: Some(self.offset(at)), strides: [1] }
    }

    /// Computes here where the view begins, and keeps it in a variable of this name.
    pub fn named(self, name: &str) -> BufferView<'k, N> {
        BufferView { origin: self.origin.map(|origin| origin.named(name)), ..self }
    }

    /// The same buffer with `pitch` elements from one index of the last but one axis to the next, where rows
    /// are padded.
    #[track_caller]
    pub fn pitch(mut self, pitch: i64) -> BufferView<'k, N> {
        assert!(N >= 2 && pitch >= self.strides[N - 2], "a pitch of {pitch} for {:?}", self.strides);
        let (rows, dense) = (N - 1, self.strides[N - 2]);
        for stride in &mut self.strides[..rows] {
            *stride = *stride / dense * pitch;
        }
        self
    }

    /// The same elements by one index, in their order in memory.
    pub fn flat(self) -> BufferView<'k, 1> {
        BufferView { k: self.k, buf: self.buf, origin: self.origin, strides: [1] }
    }

    pub fn buf(self) -> BufId {
        self.buf
    }

    /// Elements from the start of the buffer to this place.
    #[track_caller]
    pub fn offset(self, at: impl IndexTuple<'k, N>) -> Val<'k> {
        let indices = at.values(self.k);
        let mut sum = indices[0];
        for (axis, index) in indices.into_iter().enumerate().skip(1) {
            sum = sum * (self.strides[axis - 1] / self.strides[axis]) + index;
        }
        self.origin.map_or(sum, |origin| origin + sum)
    }

    /// The element at this place; one per lane where indices have several.
    #[track_caller]
    pub fn at(self, at: impl IndexTuple<'k, N>) -> Val<'k> {
        let index = self.offset(at);
        self.k.val(self.k.recording().load(self.buf, index.id()))
    }

    /// The same where `mask` holds, else zero; nothing is read there.
    #[track_caller]
    pub fn at_where(self, mask: Val<'k>, at: impl IndexTuple<'k, N>) -> Val<'k> {
        let index = self.offset(at);
        self.k.val(self.k.recording().load_masked(self.buf, index.id(), Some(mask.id())))
    }

    /// `lanes` elements from this place on, along the last axis.
    #[track_caller]
    pub fn load(self, at: impl IndexTuple<'k, N>, lanes: u32) -> Val<'k> {
        let index = self.offset(at);
        self.k.val(self.k.recording().load_vec(self.buf, index.id(), lanes))
    }

    /// The same where `mask` holds, else zero; nothing is read there.
    #[track_caller]
    pub fn load_where(self, mask: Val<'k>, at: impl IndexTuple<'k, N>, lanes: u32) -> Val<'k> {
        let index = self.offset(at).ramp(1, lanes);
        self.k.val(self.k.recording().load_masked(self.buf, index.id(), Some(mask.id())))
    }

    /// Prefetches the cache line of the element at this place.
    #[track_caller]
    pub fn prefetch(self, instr: InstrId, at: impl IndexTuple<'k, N>) {
        let element = self.at(at);
        element.prefetch_load(instr);
    }

    /// Stores all lanes of a value from this place on.
    #[track_caller]
    pub fn set(self, at: impl IndexTuple<'k, N>, value: Val<'k>) {
        let index = self.offset(at);
        self.k.recording().store_vec(self.buf, index.id(), value.id());
    }

    /// The same for the lanes where `mask` holds.
    #[track_caller]
    pub fn set_where(self, mask: Val<'k>, at: impl IndexTuple<'k, N>, value: Val<'k>) {
        let index = self.offset(at).ramp(1, value.lanes());
        self.k.recording().store_masked(self.buf, index.id(), value.id(), Some(mask.id()));
    }

    /// Type of the elements.
    pub fn dtype(self) -> DType {
        self.k.builder(|kb| kb.kernel().bufs[self.buf].dtype)
    }
}

/// A variable in registers, for what a loop carries from one iteration to the next.
#[derive(Clone, Copy)]
pub struct RegisterVar<'k> {
    k: &'k Recorder,
    buf: BufId,
    lanes: u32,
}

impl<'k> RegisterVar<'k> {
    pub(crate) fn new(k: &'k Recorder, name: &str, first: Val<'k>) -> RegisterVar<'k> {
        let ty = first.ty();
        let buf = k.builder(|kb| kb.alloc(name, ty.dtype, ty.lanes as usize, MemorySpace::Local));
        let reg = RegisterVar { k, buf, lanes: ty.lanes };
        reg.set(first);
        reg
    }

    /// The value of the variable where this is evaluated; [`Val::named`] keeps it.
    pub fn get(self) -> Val<'k> {
        let zero = self.k.int(0);
        self.k.val(self.k.recording().load_vec(self.buf, zero.id(), self.lanes))
    }

    #[track_caller]
    pub fn set(self, value: Val<'k>) {
        assert_eq!(value.lanes(), self.lanes, "lanes of a variable");
        let zero = self.k.int(0);
        self.k.recording().store_vec(self.buf, zero.id(), value.id());
    }

    /// Replaces the value by what `new` makes of it.
    #[track_caller]
    pub fn update(self, new: impl FnOnce(Val<'k>) -> Val<'k>) {
        self.set(new(self.get()));
    }
}

/// A tile of variables in registers, by row and column.
#[derive(Clone)]
pub struct RegisterGrid<'k> {
    rows: Vec<Vec<RegisterVar<'k>>>,
}

impl<'k> RegisterGrid<'k> {
    pub(crate) fn new(rows: Vec<Vec<RegisterVar<'k>>>) -> RegisterGrid<'k> {
        RegisterGrid { rows }
    }

    /// The variables of each row.
    pub fn rows(&self) -> impl Iterator<Item = &[RegisterVar<'k>]> {
        self.rows.iter().map(Vec::as_slice)
    }

    /// `reg = add(reg, a, b)` for each row `a` and column `b`: a product of a column and a row where `add` is
    /// a multiplication and an addition. A row is taken when its turn comes.
    #[track_caller]
    pub fn add_outer(
        &self,
        a: impl IntoIterator<Item = Val<'k>>,
        b: &[Val<'k>],
        add: impl Fn(Val<'k>, Val<'k>, Val<'k>) -> Val<'k>,
    ) {
        for (row, a) in self.rows().zip(a) {
            for (reg, &b) in row.iter().zip(b) {
                reg.update(|old| add(old, a, b));
            }
        }
    }
}
