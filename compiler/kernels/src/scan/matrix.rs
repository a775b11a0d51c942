//! The kernel for a scan whose state is a matrix per head, and whose body treats every row of the matrices on
//! its own: elementwise along the row, with reductions over it, as in the linear attention of RWKV-5 to -7.
//! The columns are the axis that is summed over; vectors along the columns are shared by the rows of a head.
//!
//! CPU, several steps: lanes are rows, see `transposed`. CPU otherwise: lanes are columns; blocks of rows are
//! shared out among workers, a few rows of one head run together (they share the loads of the vectors along
//! the columns), their states stay in registers. GPU: see `gpu`.

mod arithmetic;
mod chunks;
mod gpu;
mod linear;
mod plan;
mod step;
mod transposed;

pub use chunks::ChunkScan;
pub use gpu::ThreadSplit;
use mlcc_ir::dim::Dim;
use mlcc_ir::graph::{Function, ValueId};
use mlcc_ir::instr::InstrId;
use mlcc_ir::kernel::BufId;
use mlcc_ir::ops::Op;
use mlcc_ir::types::{DType, TensorType};
use mlcc_kernel_lang::{BufferView, Recorder, Val};
pub use plan::MatrixScanPlan;
use std::ops::Range;
use step::{HeadRows, RowScan};
use transposed::TransposedScan;

/// Rows that one worker takes at a time where they divide a head: a tile of the contraction kernels, so that
/// both are sliced alike.
pub const ROWS: i64 = 16;

/// Sizes of the state: `heads` is the product of all axes but the last two.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct StateShape {
    pub heads: i64,
    pub rows: i64,
    pub columns: i64,
}

/// Along which axes of the state a value extends; along the others it is broadcast.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct StateExtent {
    /// The number of heads that it has a part for; as many neighbours share one as makes those of the state.
    pub heads: i64,
    pub rows: bool,
    pub columns: bool,
}

impl StateExtent {
    /// True for a value per row, as the state has them.
    pub fn is_per_row(self, shape: StateShape) -> bool {
        self.heads == shape.heads && self.rows
    }
    fn is_matrix(self) -> bool {
        self.rows && self.columns
    }
    fn elements(self, shape: StateShape) -> i64 {
        let size = |on: bool, size: i64| if on { size } else { 1 };
        self.heads * size(self.rows, shape.rows) * size(self.columns, shape.columns)
    }
}

/// Extent of a value of this type; `None` if it has none.
fn extent_of(ty: &TensorType, state: &TensorType, shape: StateShape) -> Option<StateExtent> {
    if ty.dtype != DType::F32 {
        return None;
    }
    if ty.rank() == 0 {
        let same = |size: i64| size == 1;
        return Some(StateExtent { heads: 1, rows: same(shape.rows), columns: same(shape.columns) });
    }
    if ty.rank() != state.rank() {
        return None;
    }
    let one = Dim::from(1);
    let full: Vec<bool> = ty.dims.iter().zip(&state.dims).map(|(d, s)| d == s).collect();
    let fits = ty.dims.iter().zip(&full).all(|(d, &full)| full || *d == one);
    let (heads, last) = full.split_at(full.len() - 2);
    // Axes of heads are one, outermost first: neighbours share a part where the last of these axes are
    // broadcast.
    let long = |axis: &usize| state.dims[*axis] != one;
    let several = (0..heads.len()).filter(long).map(|axis| heads[axis]);
    let outermost_first = several.skip_while(|&full| full).all(|full| !full);
    let sizes = ty.dims[..heads.len()].iter().map(Dim::as_const).collect::<Option<Vec<i64>>>()?;
    let heads = sizes.iter().product();
    (fits && outermost_first).then_some(StateExtent { heads, rows: last[0], columns: last[1] })
}

/// The sizes of the state if a body has the structure that this kernel needs: every value is f32 and extends
/// along axes of the first carry or is broadcast along them; ops are elementwise or reduce the last axis;
/// carries and results have a value per row.
pub fn shape_of(body: &Function, carries: usize) -> Option<StateShape> {
    let state = body.ty(*body.inputs.first()?);
    if carries == 0 || state.rank() < 2 {
        return None;
    }
    let sizes: Vec<i64> = state.dims.iter().map(Dim::as_const).collect::<Option<_>>()?;
    let (&[rows, columns], heads) = sizes.split_last_chunk::<2>().map(|(heads, last)| (last, heads))?;
    let shape = StateShape { heads: heads.iter().product(), rows, columns };
    let extent = |v: ValueId| extent_of(body.ty(v), state, shape);
    let local = body.live_nodes().all(|(_, node)| match node.op {
        Op::Reduce { axis, .. } => axis + 1 == state.rank() && body.ty(node.inputs[0]).rank() == state.rank(),
        _ => node.op.is_elementwise(),
    });
    let values = body.live_nodes().flat_map(|(_, n)| &n.outputs).chain(&body.inputs);
    let per_row = body.inputs[..carries].iter().chain(&body.outputs);
    let fits = sizes.iter().all(|&size| size > 0)
        && local
        && values.copied().all(|v| extent(v).is_some())
        && per_row.copied().all(|v| extent(v).is_some_and(|e| e.is_per_row(shape)));
    fits.then_some(shape)
}

/// The scan and the buffers of its inputs (carries, sequences, constants) and outputs (carries, stacked
/// values), all f32.
pub struct MatrixScan<'a, 'k> {
    pub k: &'k Recorder,
    pub body: &'a Function,
    pub carries: usize,
    pub seqs: usize,
    pub inputs: Vec<BufId>,
    pub outputs: Vec<BufId>,
    /// Steps.
    pub length: Dim,
    pub shape: StateShape,
}

impl<'k> MatrixScan<'_, 'k> {
    /// The extent of a value of the body.
    pub fn extent(&self, v: ValueId) -> StateExtent {
        let state = self.body.ty(self.body.inputs[0]);
        extent_of(self.body.ty(v), state, self.shape).expect("the structure has been checked")
    }

    /// The extent of input `i`.
    fn input_extent(&self, i: usize) -> StateExtent {
        self.extent(self.body.inputs[i])
    }

    fn sequences(&self) -> Range<usize> {
        self.carries..self.carries + self.seqs
    }

    fn constants(&self) -> Range<usize> {
        self.carries + self.seqs..self.body.inputs.len()
    }

    /// Records the kernel body; `prefetch` is for f32 elements.
    pub fn emit(&self, plan: MatrixScanPlan, prefetch: Option<InstrId>) {
        match plan {
            MatrixScanPlan::Transposed { lanes, vectors, steps_ahead } => {
                TransposedScan::new(self, lanes, vectors, (prefetch, steps_ahead)).emit()
            }
            MatrixScanPlan::Rows { lanes, block_rows, together } => {
                self.emit_rows(lanes, block_rows, together)
            }
            MatrixScanPlan::Threads { split, asynchronous, .. } => self.emit_threads(split, asynchronous),
        }
    }

    /// CPU kernel body with lanes over columns.
    fn emit_rows(&self, lanes: u32, block_rows: i64, together: i64) {
        let StateShape { heads, rows, .. } = self.shape;
        let per_head = rows / block_rows;
        let k = self.k;
        k.par("block", heads * per_head, |block| {
            let (head, part) = (block / per_head, block % per_head);
            let first = part * block_rows;
            k.serial("tile", block_rows / together, |tile| {
                let row = (first + tile * together).named("row");
                RowScan::new(self, lanes, HeadRows { head, row, rows: together as usize }).run();
            });
        });
    }

    /// Elements of one step before row `r` of some rows of a head.
    fn offset(&self, extent: StateExtent, at: HeadRows<'k>, r: i64) -> Val<'k> {
        let StateShape { rows, columns, .. } = self.shape;
        let head = match self.shape.heads / extent.heads {
            1 => at.head,
            sharing if extent.heads > 1 => at.head / sharing,
            _ => self.k.int(0),
        };
        let row = if extent.rows { head * rows + at.row + r } else { head };
        if extent.columns { row * columns } else { row }
    }

    fn at_step(&self, extent: StateExtent, offset: Val<'k>, time: Val<'k>) -> Val<'k> {
        time * extent.elements(self.shape) + offset
    }

    /// Input `i`, and its first element for row `r` of some rows of a head at a step.
    fn input(&self, i: usize, at: HeadRows<'k>, r: i64, time: Val<'k>) -> (BufferView<'k, 1>, Val<'k>) {
        let extent = self.input_extent(i);
        let offset = self.offset(extent, at, r);
        let first = if self.sequences().contains(&i) { self.at_step(extent, offset, time) } else { offset };
        (self.k.flat(self.inputs[i]), first)
    }
}
