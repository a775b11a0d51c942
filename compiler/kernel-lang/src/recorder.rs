//! The recorder of a kernel: declarations, literals, and the way to and from the builder below.

use crate::{BufferView, IntoIndex, RegisterGrid, RegisterVar, Val};
use mlcc_ir::builder::KernelBuilder;
use mlcc_ir::dim::Dim;
use mlcc_ir::kernel::{BufId, ExprId, ExprType, Kernel, MemorySpace, ParamAccess};
use mlcc_ir::types::DType;
use std::cell::{RefCell, RefMut};

/// Records one kernel. Everything recorded is shared by reference, so [`Val`]s can be copied freely.
pub struct Recorder {
    builder: RefCell<KernelBuilder>,
}

impl Recorder {
    pub fn new(name: &str) -> Recorder {
        Recorder { builder: RefCell::new(KernelBuilder::new(name)) }
    }

    /// The recorded kernel.
    pub fn finish(self) -> Kernel {
        self.builder.into_inner().finish()
    }

    /// Records into a kernel that a builder has started.
    pub fn within<T>(builder: &mut KernelBuilder, body: impl FnOnce(&Recorder) -> T) -> T {
        let begun = std::mem::replace(builder, KernelBuilder::new(""));
        let recorder = Recorder { builder: RefCell::new(begun) };
        let result = body(&recorder);
        *builder = recorder.builder.into_inner();
        result
    }

    /// Runs what is written against the builder; `body` must not record through this recorder.
    #[track_caller]
    pub fn builder<T>(&self, body: impl FnOnce(&mut KernelBuilder) -> T) -> T {
        body(&mut self.builder.borrow_mut())
    }

    /// An expression of the builder as a value.
    pub fn val(&self, id: ExprId) -> Val<'_> {
        Val::new(self, id)
    }

    // ---- buffers

    /// A buffer that the kernel reads, with its shape; only the outermost extent may depend on the call.
    #[track_caller]
    pub fn input<const N: usize>(
        &self,
        name: &str,
        dtype: DType,
        dims: [impl Into<Dim>; N],
    ) -> BufferView<'_, N> {
        self.param(name, dtype, dims.map(Into::into), ParamAccess::In)
    }

    /// A buffer that the kernel writes, likewise.
    #[track_caller]
    pub fn output<const N: usize>(
        &self,
        name: &str,
        dtype: DType,
        dims: [impl Into<Dim>; N],
    ) -> BufferView<'_, N> {
        self.param(name, dtype, dims.map(Into::into), ParamAccess::Out)
    }

    #[track_caller]
    fn param<const N: usize>(
        &self,
        name: &str,
        dtype: DType,
        dims: [Dim; N],
        access: ParamAccess,
    ) -> BufferView<'_, N> {
        let inner = |axis: usize| match dims[axis].as_const() {
            Some(extent) => extent,
            None if axis == 0 => 1,
            None => panic!("axis {axis} of {name} has to be constant"),
        };
        let extents = std::array::from_fn(inner);
        let len = dims[0].scale(extents[1..].iter().product());
        let buf = self.builder(|kb| kb.param(name, dtype, len, access, 64));
        self.view(buf, extents)
    }

    /// A buffer with a shape, row-major. The outermost extent takes no part in the arithmetic.
    pub fn view<const N: usize>(&self, buf: BufId, dims: [i64; N]) -> BufferView<'_, N> {
        BufferView::dense(self, buf, dims)
    }

    /// The elements of a buffer by one index.
    pub fn flat(&self, buf: BufId) -> BufferView<'_, 1> {
        self.view(buf, [1])
    }

    /// Allocates a row-major buffer in `space`, with undefined contents.
    pub fn alloc<const N: usize>(
        &self,
        name: &str,
        dtype: DType,
        dims: [i64; N],
        space: MemorySpace,
    ) -> BufferView<'_, N> {
        let len = dims.iter().product::<i64>() as usize;
        self.view(self.builder(|kb| kb.alloc(name, dtype, len, space)), dims)
    }

    /// A buffer on the stack of a CPU worker.
    pub fn stack<const N: usize>(&self, name: &str, dtype: DType, dims: [i64; N]) -> BufferView<'_, N> {
        self.alloc(name, dtype, dims, MemorySpace::Stack)
    }

    /// f32 in GPU shared memory.
    pub fn shared<const N: usize>(&self, name: &str, dims: [i64; N]) -> BufferView<'_, N> {
        self.alloc(name, DType::F32, dims, MemorySpace::Shared)
    }

    /// f32 in registers: every index must become a constant after unrolling.
    pub fn registers<const N: usize>(&self, name: &str, dims: [i64; N]) -> BufferView<'_, N> {
        self.alloc(name, DType::F32, dims, MemorySpace::Local)
    }

    /// A variable that begins with `first` and has its type.
    pub fn reg<'k>(&'k self, name: &str, first: Val<'k>) -> RegisterVar<'k> {
        RegisterVar::new(self, name, first)
    }

    /// A tile of variables; `first(row, column)` is the first value of each.
    pub fn regs<'k>(
        &'k self,
        name: &str,
        [rows, columns]: [i64; 2],
        mut first: impl FnMut(i64, i64) -> Val<'k>,
    ) -> RegisterGrid<'k> {
        let mut row = |r: i64| (0..columns).map(|c| self.reg(name, first(r, c))).collect();
        RegisterGrid::new((0..rows).map(&mut row).collect())
    }

    // ---- literals

    /// An index.
    pub fn int(&self, value: i64) -> Val<'_> {
        self.val(self.builder(|kb| kb.int(value)))
    }

    /// An i32.
    pub fn int32(&self, value: i64) -> Val<'_> {
        self.val(self.builder(|kb| kb.int_of(value, DType::I32)))
    }

    /// An f32.
    pub fn float(&self, value: f64) -> Val<'_> {
        self.val(self.builder(|kb| kb.float(value)))
    }

    /// A literal of any type, the same in all lanes.
    #[track_caller]
    pub fn literal(&self, value: f64, ty: ExprType) -> Val<'_> {
        self.val(self.builder.borrow_mut().constant(value, ty))
    }

    /// Zero in all lanes.
    pub fn zeros(&self, dtype: DType, lanes: u32) -> Val<'_> {
        self.literal(0.0, ExprType::vector(dtype, lanes))
    }

    /// A size as an index.
    pub fn dim(&self, dim: &Dim) -> Val<'_> {
        self.val(self.builder(|kb| kb.dim(dim)))
    }

    /// The value of an index where it is constant.
    pub fn as_int(&self, index: Val) -> Option<i64> {
        self.builder(|kb| kb.kernel().exprs.as_int(index.id()))
    }

    /// The builder, for one call.
    #[track_caller]
    pub(crate) fn recording(&self) -> RefMut<'_, KernelBuilder> {
        self.builder.borrow_mut()
    }

    pub(crate) fn extent<'k>(&'k self, extent: impl IntoIndex<'k>) -> Val<'k> {
        extent.index(self)
    }
}
