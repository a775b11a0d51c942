//! Kernels for mixtures of experts: the choice of the largest scores of a row, and on GPUs products of rows
//! with the matrices that were chosen for them (on CPUs see `weight_matmul::emit_experts`).

use crate::inline::{Inliner, LaneIndex, reduce_loop};
use crate::machine::MachineKind;
use mlcc_ir::compute::RedOp;
use mlcc_ir::dim::Dim;
use mlcc_ir::graph::ValueId;
use mlcc_ir::kernel::{BufId, MemorySpace};
use mlcc_ir::types::DType;
use mlcc_kernel_lang::{BufferView, Recorder, Val};

/// Rows of a GPU block of the choice, and threads that work on one row of a product.
const ROWS: i64 = 32;

/// The choice of a row: some rounds, each over the elements after the last one chosen in the order of falling
/// values, then rising indices.
pub struct TopK<'a, 'k> {
    pub k: &'k Recorder,
    /// Binds `x`; one lane.
    pub inliner: Inliner<'a, 'k>,
    pub x: ValueId,
    /// Elements that are chosen.
    pub count: i64,
    /// Outputs for values and indices, `[rows, count]` each.
    pub values: Option<BufId>,
    pub ids: Option<BufId>,
}

impl<'k> TopK<'_, 'k> {
    pub fn emit(&self, machine: MachineKind) {
        let (k, rows) = (self.k, &self.inliner.f.ty(self.x).dims[0]);
        match machine {
            MachineKind::Cpu { lanes, .. } => k.par("row", rows, |row| self.row(row, lanes)),
            MachineKind::Gpu { .. } => k.blocks("block", 0, &rows.ceil_div(ROWS), |block| {
                k.threads("t", ROWS, |t| {
                    let row = block * ROWS + t;
                    k.when(row.lt(k.dim(rows)), || self.row(row, 1));
                });
            }),
        }
    }

    fn row(&self, row: Val<'k>, lanes: u32) {
        let k = self.k;
        let last_value = k.registers("last_value", [1]);
        let last_id = k.alloc("last_id", DType::I32, [1], MemorySpace::Local);
        last_value.set([0], k.float(f64::INFINITY));
        last_id.set([0], k.int32(-1));
        k.serial("slot", self.count, |slot| {
            let last = (last_value.at([0]).named("last"), last_id.at([0]).named("last_id"));
            let (value, id) = self.next(row, last, lanes);
            last_value.set([0], value);
            last_id.set([0], id);
            for (buf, result) in [(self.values, value), (self.ids, id)] {
                if let Some(buf) = buf {
                    k.view(buf, [1, self.count]).set([row, slot], result);
                }
            }
        });
    }

    /// The largest element after the last one (value and index), the first among equals.
    fn next(&self, row: Val<'k>, (last, last_id): (Val<'k>, Val<'k>), lanes: u32) -> (Val<'k>, Val<'k>) {
        let (k, columns) = (self.k, &self.inliner.f.ty(self.x).dims[1]);
        let end = columns.as_const().unwrap_or(1);
        let element = |i: Val<'k>, lanes: u32| {
            let ctx = Inliner { lanes, ..self.inliner.clone() };
            let x = ctx.value(k, self.x, &[LaneIndex::scalar(row), LaneIndex::from(i, lanes)]).named("x");
            let index = i.cast(DType::I32).ramp(1, lanes);
            let left = x.lt(last) | (x.equals(last) & last_id.lt(index));
            (x, index, left)
        };
        let best = reduce_loop(k, RedOp::Max, DType::F32, columns, lanes, |i, lanes| {
            let (x, _, left) = element(i, lanes);
            left.select(x, f64::NEG_INFINITY)
        });
        // The first index as the largest distance from the end.
        let distance = reduce_loop(k, RedOp::Max, DType::I32, columns, lanes, |i, lanes| {
            let (x, index, left) = element(i, lanes);
            (x.equals(best) & left).select(end - index, 0)
        });
        // NaN is found nowhere: any index that exists will do.
        (best, (end - distance).min(end - 1).named("id"))
    }
}

/// `y[i, s] = w[ids[i, s]] x[i, s]` on a GPU.
pub struct GpuExpertMatmul<'a, 'k> {
    pub k: &'k Recorder,
    /// Binds the operands; one lane.
    pub inliner: Inliner<'a, 'k>,
    /// `f32[rows, slots or 1, columns]`.
    pub x: BufId,
    /// `[experts * n, columns]`.
    pub w: ValueId,
    pub ids: ValueId,
    /// `f32[rows, slots, n]`.
    pub out: BufId,
    pub rows: Dim,
    pub slots: i64,
    /// True if all slots of a row share one x.
    pub shared: bool,
    pub n: i64,
    pub columns: i64,
}

/// Rows of an expert's matrix that a GPU block takes, [`ROWS`] threads each.
const PER_BLOCK: i64 = 4;

impl<'k> GpuExpertMatmul<'_, 'k> {
    /// A block takes some rows of one expert's matrix for one pair of row and slot.
    pub fn emit(&self) {
        let k = self.k;
        let out = k.view(self.out, [1, self.n]);
        k.blocks("pair", 0, &self.rows.scale(self.slots), |pair| {
            k.blocks("rows", 1, (self.n + PER_BLOCK - 1) / PER_BLOCK, |block| {
                let partial = k.shared("partial", [PER_BLOCK * ROWS]);
                let first = block * PER_BLOCK;
                self.partial_dots(pair, first, partial);
                k.barrier();
                k.threads("t", PER_BLOCK, |t| {
                    let column = first + t;
                    k.when(column.lt(self.n), || {
                        let sum = k.reg("sum", k.float(0.0));
                        k.serial("i", ROWS, |i| sum.set(sum.get() + partial.rows(ROWS).at([t, i])));
                        out.set([pair, column], sum.get());
                    });
                });
            });
        });
    }

    /// Expert and row of x of a pair of row and slot.
    fn pair(&self, pair: Val<'k>) -> (Val<'k>, Val<'k>) {
        let (row, slot) = (pair / self.slots, pair % self.slots);
        let id = self.inliner.value(self.k, self.ids, &[LaneIndex::scalar(row), LaneIndex::scalar(slot)]);
        (id.cast(DType::I64).named("expert"), if self.shared { row } else { pair })
    }

    /// The sum of each thread.
    fn partial_dots(&self, pair: Val<'k>, first: Val<'k>, partial: BufferView<'k, 1>) {
        let k = self.k;
        let x = k.view(self.x, [1, self.columns]);
        k.threads("t", PER_BLOCK * ROWS, |t| {
            let sum = k.reg("sum", k.float(0.0));
            let (row, lane) = (t / ROWS, t % ROWS);
            let column = first + row;
            k.when(column.lt(self.n), || {
                let (expert, x_row) = self.pair(pair);
                let w_row = expert * self.n + column;
                k.serial("j", (self.columns + ROWS - 1) / ROWS, |j| {
                    let c = j * ROWS + lane;
                    k.when(c.lt(self.columns), || {
                        let x = x.at([x_row, c]);
                        let w =
                            self.inliner.value(k, self.w, &[LaneIndex::scalar(w_row), LaneIndex::scalar(c)]);
                        sum.set(w.cast(DType::F32).fma(x, sum.get()));
                    });
                });
            });
            partial.set([t], sum.get());
        });
    }
}
