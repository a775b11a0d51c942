//! Kernels for mixtures of experts: the choice of the `k` largest scores of a row, and on GPUs products of rows with the
//! matrices that were chosen for them (on CPUs see `contraction::emit_experts`).

use crate::attention::ceil_div;
use crate::generic::inline::{Index, Inliner, reduce_loop};
use mlcc_ir::builder::KernelBuilder;
use mlcc_ir::compute::RedOp;
use mlcc_ir::dim::Dim;
use mlcc_ir::graph::ValueId;
use mlcc_ir::kernel::{BinOp, BufId, ExprId, ForKind, Space};
use mlcc_ir::types::DType;

/// Rows of a GPU block of the choice, and threads that work on one row of a product.
const ROWS: i64 = 32;
/// What executes a kernel.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Machine {
    Cpu { lanes: u32 },
    Gpu,
}

/// The choice of a row: `k` rounds, each over the elements behind the last one chosen in the order of falling values,
/// then rising indices.
pub struct TopK<'a> {
    /// Binds `x`; one lane.
    pub inliner: Inliner<'a>,
    pub x: ValueId,
    pub k: usize,
    /// Where values and indices go, `[rows, k]` each.
    pub values: Option<BufId>,
    pub ids: Option<BufId>,
}

impl TopK<'_> {
    pub fn emit(&self, kb: &mut KernelBuilder, machine: Machine) {
        let rows = self.inliner.f.ty(self.x).dims[0].clone();
        match machine {
            Machine::Cpu { lanes } => {
                let extent = kb.dim(&rows);
                kb.par("row", extent, |kb, row| self.row(kb, row, lanes));
            }
            Machine::Gpu => {
                let (blocks, threads) = (kb.dim(&rows.ceil_div(ROWS)), kb.int(ROWS));
                let count = kb.dim(&rows);
                kb.for_("block", blocks, ForKind::Block(0), |kb, block| {
                    kb.for_("t", threads, ForKind::Thread(0), |kb, t| {
                        let first = kb.mul_int(block, ROWS);
                        let row = kb.add(first, t);
                        let inside = kb.lt(row, count);
                        kb.if_(inside, |kb| self.row(kb, row, 1));
                    });
                });
            }
        }
    }

    fn row(&self, kb: &mut KernelBuilder, row: ExprId, lanes: u32) {
        let zero = kb.int(0);
        let last_value = kb.alloc("last_value", DType::F32, 1, Space::Local);
        let last_id = kb.alloc("last_id", DType::I32, 1, Space::Local);
        let (most, none) = (kb.float(f64::INFINITY), kb.int_of(-1, DType::I32));
        kb.store(last_value, zero, most);
        kb.store(last_id, zero, none);
        let rounds = kb.int(self.k as i64);
        kb.serial("slot", rounds, |kb, slot| {
            let (value, id) = (kb.load(last_value, zero), kb.load(last_id, zero));
            let after = (kb.let_("last", value), kb.let_("last_id", id));
            let (value, id) = self.next(kb, row, after, lanes);
            kb.store(last_value, zero, value);
            kb.store(last_id, zero, id);
            let base = kb.mul_int(row, self.k as i64);
            let at = kb.add(base, slot);
            for (buf, result) in [(self.values, value), (self.ids, id)] {
                if let Some(buf) = buf {
                    kb.store(buf, at, result);
                }
            }
        });
    }

    /// The largest element behind `after`, the first among equals.
    fn next(
        &self,
        kb: &mut KernelBuilder,
        row: ExprId,
        after: (ExprId, ExprId),
        lanes: u32,
    ) -> (ExprId, ExprId) {
        let columns = self.inliner.f.ty(self.x).dims[1].clone();
        let count = columns.as_const().unwrap_or(1);
        let element = |kb: &mut KernelBuilder, i: ExprId, lanes: u32| {
            let ctx = Inliner { lanes, ..self.inliner.clone() };
            let column = if lanes > 1 { Index::lanes(i) } else { Index::scalar(i) };
            let x = ctx.value(kb, self.x, &[Index::scalar(row), column]);
            let x = kb.let_("x", x);
            let (i, one) = (kb.cast(i, DType::I32), kb.int_of(1, DType::I32));
            let index = kb.ramp(i, one, lanes);
            let smaller = kb.lt(x, after.0);
            let equal = kb.binary(BinOp::Eq, x, after.0);
            let later = kb.lt(after.1, index);
            let later = kb.binary(BinOp::And, equal, later);
            (x, index, kb.binary(BinOp::Or, smaller, later))
        };
        let best = reduce_loop(kb, RedOp::Max, DType::F32, &columns, lanes, |kb, i, lanes| {
            let (x, _, open) = element(kb, i, lanes);
            let least = kb.float(f64::NEG_INFINITY);
            kb.select(open, x, least)
        });
        // The first index as the largest distance from the end.
        let distance = reduce_loop(kb, RedOp::Max, DType::I32, &columns, lanes, |kb, i, lanes| {
            let (x, index, open) = element(kb, i, lanes);
            let here = kb.binary(BinOp::Eq, x, best);
            let here = kb.binary(BinOp::And, here, open);
            let (end, nothing) = (kb.int_of(count, DType::I32), kb.int_of(0, DType::I32));
            let left = kb.sub(end, index);
            kb.select(here, left, nothing)
        });
        // NaN is found nowhere: any index that exists will do.
        let (end, most) = (kb.int_of(count, DType::I32), kb.int_of(count - 1, DType::I32));
        let id = kb.sub(end, distance);
        let id = kb.min(id, most);
        (best, kb.let_("id", id))
    }
}

/// `y[i, s] = w[ids[i, s]] x[i, s]` on a GPU.
pub struct GpuProduct<'a> {
    /// Binds the operands; one lane.
    pub inliner: Inliner<'a>,
    /// `f32[rows, slots or 1, k]`.
    pub x: BufId,
    /// `[experts * n, k]`.
    pub w: ValueId,
    pub ids: ValueId,
    /// `f32[rows, slots, n]`.
    pub out: BufId,
    pub rows: Dim,
    pub slots: i64,
    /// True if all slots of a row share one x.
    pub shared: bool,
    pub n: i64,
    pub k: usize,
}

impl GpuProduct<'_> {
    /// Expert and row of x of a pair of row and slot.
    fn pair(&self, kb: &mut KernelBuilder, pair: ExprId) -> (ExprId, ExprId) {
        let slots = kb.int(self.slots);
        let (row, slot) = (kb.div(pair, slots), kb.rem(pair, slots));
        let id = self.inliner.value(kb, self.ids, &[Index::scalar(row), Index::scalar(slot)]);
        let id = kb.cast(id, DType::I64);
        let x_row = if self.shared { row } else { pair };
        (kb.let_("expert", id), x_row)
    }

    /// A block takes four rows of one expert's matrix, 32 threads each, for one pair of row and slot.
    pub fn emit(&self, kb: &mut KernelBuilder) {
        const PER_BLOCK: i64 = 4;
        let pairs = kb.dim(&self.rows.scale(self.slots));
        let (n, by) = (kb.int(self.n), kb.int(PER_BLOCK));
        let blocks = ceil_div(kb, n, by);
        kb.for_("pair", pairs, ForKind::Block(0), |kb, pair| {
            kb.for_("rows", blocks, ForKind::Block(1), |kb, block| {
                let partial = kb.alloc("partial", DType::F32, (PER_BLOCK * ROWS) as usize, Space::Shared);
                let first = kb.mul_int(block, PER_BLOCK);
                self.gpu_partial(kb, pair, first, partial, PER_BLOCK * ROWS);
                kb.barrier();
                let threads = kb.int(PER_BLOCK);
                kb.for_("t", threads, ForKind::Thread(0), |kb, t| {
                    let column = kb.add(first, t);
                    let inside = kb.lt(column, n);
                    kb.if_(inside, |kb| {
                        let (sum, zero) = (kb.alloc("sum", DType::F32, 1, Space::Local), kb.int(0));
                        let nothing = kb.float(0.0);
                        kb.store(sum, zero, nothing);
                        let extent = kb.int(ROWS);
                        kb.serial("i", extent, |kb, i| {
                            let at = kb.mul_int(t, ROWS);
                            let at = kb.add(at, i);
                            let (value, old) = (kb.load(partial, at), kb.load(sum, zero));
                            let new = kb.add(old, value);
                            kb.store(sum, zero, new);
                        });
                        let row = kb.mul_int(pair, self.n);
                        let at = kb.add(row, column);
                        let value = kb.load(sum, zero);
                        kb.store(self.out, at, value);
                    });
                });
            });
        });
    }

    fn gpu_partial(&self, kb: &mut KernelBuilder, pair: ExprId, first: ExprId, partial: BufId, threads: i64) {
        let (extent, n) = (kb.int(threads), kb.int(self.n));
        kb.for_("t", extent, ForKind::Thread(0), |kb, t| {
            let (sum, zero, width) = (kb.alloc("sum", DType::F32, 1, Space::Local), kb.int(0), kb.int(ROWS));
            let nothing = kb.float(0.0);
            kb.store(sum, zero, nothing);
            let (row, lane) = (kb.div(t, width), kb.rem(t, width));
            let column = kb.add(first, row);
            let inside = kb.lt(column, n);
            kb.if_(inside, |kb| {
                let (expert, x_row) = self.pair(kb, pair);
                let before = kb.mul(expert, n);
                let w_row = kb.add(before, column);
                let rounds = kb.int(self.k.div_ceil(ROWS as usize) as i64);
                kb.serial("j", rounds, |kb, j| {
                    let at = kb.mul(j, width);
                    let c = kb.add(at, lane);
                    let (end, k) = (kb.int(self.k as i64), self.k as i64);
                    let inside = kb.lt(c, end);
                    kb.if_(inside, |kb| {
                        let at = kb.mul_int(x_row, k);
                        let at = kb.add(at, c);
                        let x = kb.load(self.x, at);
                        let w = self.inliner.value(kb, self.w, &[Index::scalar(w_row), Index::scalar(c)]);
                        let w = kb.cast(w, DType::F32);
                        let old = kb.load(sum, zero);
                        let new = kb.fma(w, x, old);
                        kb.store(sum, zero, new);
                    });
                });
            });
            let value = kb.load(sum, zero);
            kb.store(partial, t, value);
        });
    }
}
