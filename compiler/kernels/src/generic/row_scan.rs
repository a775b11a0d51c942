//! The kernel for a scan whose state is a matrix per head, and whose body treats every row of the matrices on its own:
//! elementwise along the row, with reductions over it, as in the linear attention of RWKV-5 to -7. The columns are the
//! axis that is summed over; vectors along the columns are shared by the rows of a head.
//!
//! CPU, several steps: lanes are rows, see `transposed`. CPU otherwise: lanes are columns; blocks of rows are shared out
//! among workers, a few rows of one head run together (they share the loads of the vectors along the columns), their
//! states stay in registers. GPU: a thread per row, a block per head or part of one; vectors along the columns meet in
//! shared memory.

mod arithmetic;
mod step;
mod transposed;

use mlcc_ir::builder::KernelBuilder;
use mlcc_ir::dim::Dim;
use mlcc_ir::graph::{Function, ValueId};
use mlcc_ir::instr::InstrId;
use mlcc_ir::kernel::{BufId, ExprId, ForKind, Space};
use mlcc_ir::ops::Op;
use mlcc_ir::types::{DType, TensorType};
use std::collections::HashMap;
use step::{Step, Tile, Values};
use transposed::Transposed;

/// Rows that one worker takes at a time where they divide a head: a tile of the contraction kernels, so that both are
/// sliced alike.
pub const ROWS: i64 = 16;
/// Most threads of a GPU block.
const THREADS: i64 = 128;
/// Lanes of a GPU thread: what one load of a vector along the columns brings.
const GPU_LANES: u32 = 4;
/// Vector registers that the states of the rows which run together may take.
const STATE_VECTORS: i64 = 16;

/// Sizes of the state: `heads` is the product of all axes but the last two.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Shape {
    pub heads: i64,
    pub rows: i64,
    pub columns: i64,
}

/// Along which axes of the state a value extends; along the others it is broadcast.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Extent {
    pub heads: bool,
    pub rows: bool,
    pub columns: bool,
}

impl Extent {
    /// True for a value per row, as the state has them.
    fn is_per_row(self) -> bool {
        self.heads && self.rows
    }
    fn elements(self, shape: Shape) -> i64 {
        let size = |on: bool, size: i64| if on { size } else { 1 };
        size(self.heads, shape.heads) * size(self.rows, shape.rows) * size(self.columns, shape.columns)
    }
}

/// Extent of a value of this type; `None` if it has none.
fn extent_of(ty: &TensorType, state: &TensorType, shape: Shape) -> Option<Extent> {
    if ty.dtype != DType::F32 {
        return None;
    }
    if ty.rank() == 0 {
        let same = |size: i64| size == 1;
        return Some(Extent {
            heads: same(shape.heads),
            rows: same(shape.rows),
            columns: same(shape.columns),
        });
    }
    if ty.rank() != state.rank() {
        return None;
    }
    let one = Dim::from(1);
    let full: Vec<bool> = ty.dims.iter().zip(&state.dims).map(|(d, s)| d == s).collect();
    let fits = ty.dims.iter().zip(&full).all(|(d, &full)| full || *d == one);
    let (heads, last) = full.split_at(full.len() - 2);
    let long = |axis: &usize| state.dims[*axis] != one;
    // Several axes of heads are one if a value has all of them or none.
    let several: Vec<bool> = (0..heads.len()).filter(long).map(|axis| heads[axis]).collect();
    let alike = several.windows(2).all(|w| w[0] == w[1]);
    let heads = several.first().copied().unwrap_or(true);
    (fits && alike).then_some(Extent { heads, rows: last[0], columns: last[1] })
}

/// The sizes of the state if a body has the structure that this kernel needs: every value is f32 and extends along axes of
/// the first carry or is broadcast along them; ops are elementwise or reduce the last axis; carries and results have a
/// value per row.
pub fn shape_of(body: &Function, carries: usize) -> Option<Shape> {
    let state = body.ty(*body.inputs.first()?);
    if carries == 0 || state.rank() < 2 {
        return None;
    }
    let sizes: Vec<i64> = state.dims.iter().map(Dim::as_const).collect::<Option<_>>()?;
    let (&[rows, columns], heads) = sizes.split_last_chunk::<2>().map(|(heads, last)| (last, heads))?;
    let shape = Shape { heads: heads.iter().product(), rows, columns };
    let extent = |v: ValueId| extent_of(body.ty(v), state, shape);
    let local = body.live().all(|(_, node)| match node.op {
        Op::Reduce { axis, .. } => axis + 1 == state.rank() && body.ty(node.inputs[0]).rank() == state.rank(),
        _ => node.op.is_elementwise(),
    });
    let values = body.live().flat_map(|(_, n)| &n.outputs).chain(&body.inputs);
    let per_row = body.inputs[..carries].iter().chain(&body.outputs);
    let fits = sizes.iter().all(|&size| size > 0)
        && local
        && values.copied().all(|v| extent(v).is_some())
        && per_row.copied().all(|v| extent(v).is_some_and(Extent::is_per_row));
    fits.then_some(shape)
}

/// The scan and the buffers of its inputs (carries, sequences, constants) and outputs (carries, stacked values), all f32.
pub struct RowScan<'a> {
    pub body: &'a Function,
    pub carries: usize,
    pub seqs: usize,
    pub inputs: Vec<BufId>,
    pub outputs: Vec<BufId>,
    /// Steps.
    pub length: Dim,
    pub shape: Shape,
}

/// Where the vectors along the columns of input `i` have been brought, on a GPU.
type Staged = HashMap<usize, BufId>;

impl RowScan<'_> {
    /// The extent of a value of the body.
    pub fn extent(&self, v: ValueId) -> Extent {
        let state = self.body.ty(self.body.inputs[0]);
        extent_of(self.body.ty(v), state, self.shape).expect("the structure has been checked")
    }

    /// Rows of one iteration of the parallel loop where lanes are columns.
    pub fn block_rows(&self) -> i64 {
        if self.shape.rows % ROWS == 0 { ROWS } else { self.shape.rows }
    }

    /// CPU kernel body with vectors of `lanes`; `prefetch` asks for f32 elements ahead of their use. Gives the rows of an
    /// iteration of the parallel loop.
    pub fn emit_cpu(&self, kb: &mut KernelBuilder, lanes: u32, prefetch: Option<InstrId>) -> i64 {
        match Transposed::new(self, lanes, prefetch) {
            Some(transposed) => {
                transposed.emit(kb);
                transposed.block_rows()
            }
            None => {
                self.emit_rows(kb, lanes);
                self.block_rows()
            }
        }
    }

    /// CPU kernel body with lanes over columns.
    fn emit_rows(&self, kb: &mut KernelBuilder, lanes: u32) {
        let Shape { heads, rows, columns } = self.shape;
        let block_rows = self.block_rows();
        let vectors = (columns / i64::from(lanes)).max(1);
        let together = [4, 2, 1].into_iter().find(|&r| block_rows % r == 0 && r * vectors <= STATE_VECTORS);
        let together = together.unwrap_or(1);
        let per_head = rows / block_rows;
        let blocks = kb.int(heads * per_head);
        kb.par("block", blocks, |kb, block| {
            let by = kb.int(per_head);
            let (head, part) = (kb.div(block, by), kb.rem(block, by));
            let first = kb.mul_int(part, block_rows);
            let tiles = kb.int(block_rows / together);
            kb.serial("tile", tiles, |kb, tile| {
                let offset = kb.mul_int(tile, together);
                let row = kb.add(first, offset);
                let row = kb.let_("row", row);
                let step = Step::new(self, lanes);
                let tile = Tile { head, row, rows: together as usize };
                self.tile(kb, &step, tile);
            });
        });
    }

    /// The rows of a tile through all steps.
    fn tile(&self, kb: &mut KernelBuilder, step: &Step, tile: Tile) {
        let none = Staged::new();
        let states = self.open_states(kb, step, tile);
        let mut constants = Values::new();
        self.load_constants(kb, step, tile, &none, &mut constants);
        let steps = kb.dim(&self.length);
        kb.serial("step", steps, |kb, time| {
            self.one_step(kb, step, tile, (time, &none), &states, constants.clone());
        });
        self.close_states(kb, step, tile, &states);
    }

    /// GPU kernel body.
    pub fn emit_gpu(&self, kb: &mut KernelBuilder) {
        let Shape { heads, rows, .. } = self.shape;
        let threads = rows.min(THREADS);
        let per_head = (rows + threads - 1) / threads;
        let (blocks, count) = (kb.int(heads * per_head), kb.int(threads));
        kb.for_("block", blocks, ForKind::Block(0), |kb, block| {
            let by = kb.int(per_head);
            let (head, part) = (kb.div(block, by), kb.rem(block, by));
            let shared = self.alloc_staged(kb);
            kb.for_("t", count, ForKind::Thread(0), |kb, t| {
                let first = kb.mul_int(part, threads);
                let row = kb.add(first, t);
                let end = kb.int(rows);
                let inside = (rows % threads != 0).then(|| kb.lt(row, end));
                self.thread(kb, Tile { head, row, rows: 1 }, (t, threads), inside, &shared);
            });
        });
    }

    /// One row through all steps; all threads of the block bring the vectors along the columns of each step.
    fn thread(
        &self,
        kb: &mut KernelBuilder,
        tile: Tile,
        who: (ExprId, i64),
        inside: Option<ExprId>,
        shared: &Staged,
    ) {
        let step = Step::new(self, GPU_LANES);
        let guarded = |kb: &mut KernelBuilder, body: &mut dyn FnMut(&mut KernelBuilder)| match inside {
            Some(inside) => kb.if_(inside, body),
            None => body(kb),
        };
        let states = self.alloc_states(kb, &step, tile);
        guarded(kb, &mut |kb| self.fill_states(kb, &step, tile, &states));
        let zero = kb.int(0);
        self.stage(kb, tile, who, zero, self.carries + self.seqs..self.body.inputs.len(), shared);
        let steps = kb.dim(&self.length);
        kb.serial("step", steps, |kb, time| {
            self.stage(kb, tile, who, time, self.carries..self.carries + self.seqs, shared);
            kb.barrier();
            guarded(kb, &mut |kb| {
                let mut constants = Values::new();
                self.load_constants(kb, &step, tile, shared, &mut constants);
                self.one_step(kb, &step, tile, (time, shared), &states, constants);
            });
            // The next step overwrites what slower threads still read.
            kb.barrier();
        });
        guarded(kb, &mut |kb| self.close_states(kb, &step, tile, &states));
    }

    /// Shared memory for the inputs that are vectors along the columns, the same for all rows of a head.
    fn alloc_staged(&self, kb: &mut KernelBuilder) -> Staged {
        let shared_by_rows = |&i: &usize| {
            let extent = self.extent(self.body.inputs[i]);
            i >= self.carries && extent.columns && !extent.rows
        };
        let inputs: Vec<usize> = (0..self.body.inputs.len()).filter(shared_by_rows).collect();
        let columns = self.shape.columns as usize;
        inputs.into_iter().map(|i| (i, kb.alloc("vector", DType::F32, columns, Space::Shared))).collect()
    }

    /// Copies vectors along the columns to shared memory, thread by thread.
    fn stage(
        &self,
        kb: &mut KernelBuilder,
        tile: Tile,
        (t, threads): (ExprId, i64),
        time: ExprId,
        inputs: std::ops::Range<usize>,
        shared: &Staged,
    ) {
        let columns = self.shape.columns;
        for i in inputs {
            let Some(&to) = shared.get(&i) else { continue };
            let from = self.base(kb, i, tile, 0, time);
            for first in (0..columns).step_by(threads as usize) {
                let c = kb.add_int(t, first);
                let copy = |kb: &mut KernelBuilder| {
                    let at = kb.add(from, c);
                    let value = kb.load(self.inputs[i], at);
                    kb.store(to, c, value);
                };
                if first + threads <= columns {
                    copy(kb);
                    continue;
                }
                let end = kb.int(columns);
                let there = kb.lt(c, end);
                kb.if_(there, copy);
            }
        }
    }

    /// First element of input `i` for row `r` of a tile at a step.
    fn base(&self, kb: &mut KernelBuilder, i: usize, tile: Tile, r: usize, time: ExprId) -> ExprId {
        let extent = self.extent(self.body.inputs[i]);
        let at = self.offset(kb, extent, tile, r);
        match (self.carries..self.carries + self.seqs).contains(&i) {
            true => self.at_step(kb, extent, at, time),
            false => at,
        }
    }

    fn at_step(&self, kb: &mut KernelBuilder, extent: Extent, at: ExprId, time: ExprId) -> ExprId {
        let start = kb.mul_int(time, extent.elements(self.shape));
        kb.add(start, at)
    }

    /// Elements of one step before row `r` of a tile.
    fn offset(&self, kb: &mut KernelBuilder, extent: Extent, tile: Tile, r: usize) -> ExprId {
        let Shape { rows, columns, .. } = self.shape;
        let mut at = if extent.heads { tile.head } else { kb.int(0) };
        if extent.rows {
            at = kb.mul_int(at, rows);
            at = kb.add(at, tile.row);
            at = kb.add_int(at, r as i64);
        }
        if extent.columns { kb.mul_int(at, columns) } else { at }
    }

    /// Local memory of the carries, filled.
    fn open_states(&self, kb: &mut KernelBuilder, step: &Step, tile: Tile) -> Vec<BufId> {
        let states = self.alloc_states(kb, step, tile);
        self.fill_states(kb, step, tile, &states);
        states
    }

    fn alloc_states(&self, kb: &mut KernelBuilder, step: &Step, tile: Tile) -> Vec<BufId> {
        let lengths =
            self.body.inputs[..self.carries].iter().map(|&v| step.stride(self.extent(v)) * tile.rows);
        lengths.map(|len| kb.alloc("state", DType::F32, len, Space::Local)).collect()
    }

    fn fill_states(&self, kb: &mut KernelBuilder, step: &Step, tile: Tile, states: &[BufId]) {
        let zero = kb.int(0);
        for (i, &state) in states.iter().enumerate() {
            let extent = self.extent(self.body.inputs[i]);
            for r in 0..tile.rows {
                let from = self.base(kb, i, tile, r, zero);
                let values = step.load(kb, self.inputs[i], from, extent);
                step.store_state(kb, state, extent, r, &values);
            }
        }
    }

    fn close_states(&self, kb: &mut KernelBuilder, step: &Step, tile: Tile, states: &[BufId]) {
        for (i, &state) in states.iter().enumerate() {
            let extent = self.extent(self.body.inputs[i]);
            for r in 0..tile.rows {
                let to = self.offset(kb, extent, tile, r);
                let values = step.load_state(kb, state, extent, r);
                step.store(kb, self.outputs[i], to, &values, extent);
            }
        }
    }

    fn load_constants(
        &self,
        kb: &mut KernelBuilder,
        step: &Step,
        tile: Tile,
        staged: &Staged,
        values: &mut Values,
    ) {
        let zero = kb.int(0);
        for i in self.carries + self.seqs..self.body.inputs.len() {
            self.load_input(kb, step, tile, i, (zero, staged), values);
        }
    }

    fn load_input(
        &self,
        kb: &mut KernelBuilder,
        step: &Step,
        tile: Tile,
        i: usize,
        (time, staged): (ExprId, &Staged),
        values: &mut Values,
    ) {
        let v = self.body.inputs[i];
        let extent = self.extent(v);
        let loaded = (0..if extent.rows { tile.rows } else { 1 })
            .map(|r| match staged.get(&i) {
                Some(&shared) => {
                    let zero = kb.int(0);
                    step.load(kb, shared, zero, extent)
                }
                None => {
                    let from = self.base(kb, i, tile, r, time);
                    step.load(kb, self.inputs[i], from, extent)
                }
            })
            .collect();
        values.insert(v, loaded);
    }

    /// Evaluates the body for the rows of a tile; `values` holds the constants.
    fn one_step(
        &self,
        kb: &mut KernelBuilder,
        step: &Step,
        tile: Tile,
        (time, staged): (ExprId, &Staged),
        states: &[BufId],
        mut values: Values,
    ) {
        for (i, &state) in states.iter().enumerate() {
            let v = self.body.inputs[i];
            let extent = self.extent(v);
            let rows = (0..tile.rows).map(|r| step.load_state(kb, state, extent, r)).collect();
            values.insert(v, rows);
        }
        for i in self.carries..self.carries + self.seqs {
            self.load_input(kb, step, tile, i, (time, staged), &mut values);
        }
        step.evaluate(kb, tile.rows, &mut values);
        for (i, v) in self.body.outputs.iter().enumerate() {
            let extent = self.extent(*v);
            for (r, row) in values[v].iter().enumerate().take(tile.rows) {
                match states.get(i) {
                    Some(&state) => step.store_state(kb, state, extent, r, row),
                    None => {
                        let at = self.offset(kb, extent, tile, r);
                        let at = self.at_step(kb, extent, at, time);
                        step.store(kb, self.outputs[i], at, row, extent);
                    }
                }
            }
        }
    }
}
