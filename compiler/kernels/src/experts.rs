//! Kernels for mixtures of experts: the choice of the `k` largest scores of a row, and products of rows with the matrices
//! that were chosen for them.

use crate::attention::ceil_div;
use crate::generic::inline::{Index, Inliner, reduce_loop};
use mlcc_ir::builder::KernelBuilder;
use mlcc_ir::compute::RedOp;
use mlcc_ir::dim::Dim;
use mlcc_ir::graph::ValueId;
use mlcc_ir::kernel::{BinOp, BufId, ExprId, ForKind, Space, Ty};
use mlcc_ir::types::{DType, Format};
use mlcc_quant::TILE;
use mlcc_quant::plain::Plain;
use mlcc_quant::tile::{self, GroupReader, quad_floats, quads, words};

/// Rows of a GPU block of the choice, and threads that work on one row of a product.
const ROWS: i64 = 32;
/// Columns of a group of the packed formats.
const GROUP: usize = 32;

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

/// `y[i, s] = w[ids[i, s]] x[i, s]`.
pub struct Product<'a> {
    /// Binds the operands; one lane.
    pub inliner: Inliner<'a>,
    /// `f32[rows, slots or 1, k]`, with its buffer.
    pub x: (ValueId, BufId),
    /// `[experts * n, k]`; on a CPU in `tile16` order.
    pub w: (ValueId, BufId),
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

impl Product<'_> {
    /// Workers share the tiles of 16 rows that each expert has; a worker goes through all rows with one tile after the
    /// other, so that an expert's tile is read once for all rows that chose it. Only chosen experts are read.
    pub fn emit_cpu(&self, kb: &mut KernelBuilder, lanes: u32) {
        let tiles = kb.int(self.n / TILE as i64);
        let rows = kb.dim(&self.rows);
        let pairs = kb.mul_int(rows, self.slots);
        kb.par("tile", tiles, |kb, tile| {
            kb.serial("pair", pairs, |kb, pair| {
                let (expert, x_row) = self.pair(kb, pair);
                let before = kb.mul_int(expert, self.n / TILE as i64);
                let tile_of = kb.add(before, tile);
                let tile_of = kb.let_("tile_of", tile_of);
                let x = kb.mul_int(x_row, self.k as i64);
                let x = kb.let_("x_first", x);
                let sums = match self.inliner.f.ty(self.w.0).dtype {
                    DType::Packed(format) => self.packed(kb, format, tile_of, x, lanes),
                    DType::F16 => self.plain(kb, Plain::F16, tile_of, x, lanes),
                    DType::BF16 => self.plain(kb, Plain::BF16, tile_of, x, lanes),
                    _ => self.plain(kb, Plain::F32, tile_of, x, lanes),
                };
                let row = kb.mul_int(pair, self.n);
                let column = kb.mul_int(tile, TILE as i64);
                let at = kb.add(row, column);
                for (part, sum) in sums.into_iter().enumerate() {
                    let at = kb.add_int(at, part as i64 * i64::from(lanes));
                    kb.store_vec(self.out, at, sum);
                }
            });
        });
    }

    /// Expert and row of x of a pair of row and slot.
    fn pair(&self, kb: &mut KernelBuilder, pair: ExprId) -> (ExprId, ExprId) {
        let slots = kb.int(self.slots);
        let (row, slot) = (kb.div(pair, slots), kb.rem(pair, slots));
        let id = self.inliner.value(kb, self.ids, &[Index::scalar(row), Index::scalar(slot)]);
        let id = kb.cast(id, DType::I64);
        let x_row = if self.shared { row } else { pair };
        (kb.let_("expert", id), x_row)
    }

    /// Sums of one tile in registers: four per part, so that none waits for the one before.
    fn sums(&self, kb: &mut KernelBuilder, lanes: u32) -> Vec<[BufId; 4]> {
        let zero = kb.int(0);
        (0..TILE as u32 / lanes)
            .map(|_| {
                [(); 4].map(|()| {
                    let sum = kb.alloc("sum", DType::F32, lanes as usize, Space::Local);
                    let nothing = kb.constant(0.0, Ty::vector(DType::F32, lanes));
                    kb.store_vec(sum, zero, nothing);
                    sum
                })
            })
            .collect()
    }

    fn totals(&self, kb: &mut KernelBuilder, sums: &[[BufId; 4]], lanes: u32) -> Vec<ExprId> {
        let zero = kb.int(0);
        let total = |kb: &mut KernelBuilder, sums: &[BufId; 4]| {
            let [a, b, c, d] = sums.map(|sum| kb.load_vec(sum, zero, lanes));
            let (low, high) = (kb.add(a, b), kb.add(c, d));
            let total = kb.add(low, high);
            kb.let_("total", total)
        };
        sums.iter().map(|s| total(kb, s)).collect()
    }

    fn x_at(&self, kb: &mut KernelBuilder, x: ExprId, column: ExprId, lanes: u32) -> ExprId {
        let at = kb.add(x, column);
        let value = kb.load(self.x.1, at);
        let value = kb.splat(value, lanes);
        kb.let_("x", value)
    }

    fn plain(
        &self,
        kb: &mut KernelBuilder,
        plain: Plain,
        tile: ExprId,
        x: ExprId,
        lanes: u32,
    ) -> Vec<ExprId> {
        let sums = self.sums(kb, lanes);
        let pair = plain.pair();
        let start = kb.mul_int(tile, (self.k.next_multiple_of(pair) * TILE) as i64);
        let zero = kb.int(0);
        let columns = |kb: &mut KernelBuilder, first: ExprId, count: usize| {
            for c in 0..count {
                let column = kb.add_int(first, c as i64);
                let value = self.x_at(kb, x, column, lanes);
                for (part, sums) in sums.iter().enumerate() {
                    // bf16 columns lie in pairs: two columns of a row side by side.
                    let even = kb.add_int(first, (c / pair * pair) as i64);
                    let at = kb.mul_int(even, TILE as i64);
                    let at = kb.add(start, at);
                    let at = kb.add_int(at, part as i64 * i64::from(lanes) * pair as i64);
                    let weights = kb.load_vec(self.w.1, at, lanes * pair as u32);
                    let weights = match pair {
                        1 => weights,
                        _ => {
                            let odd = (c % 2) as u32;
                            kb.shuffle(weights, None, (0..lanes).map(|l| 2 * l + odd).collect())
                        }
                    };
                    let weights = kb.cast(weights, DType::F32);
                    let old = kb.load_vec(sums[c % 4], zero, lanes);
                    let new = kb.fma(weights, value, old);
                    kb.store_vec(sums[c % 4], zero, new);
                }
            }
        };
        let full = kb.int((self.k / 4) as i64);
        kb.serial("k", full, |kb, i| {
            let first = kb.mul_int(i, 4);
            columns(kb, first, 4);
        });
        let first = kb.int((self.k / 4 * 4) as i64);
        columns(kb, first, self.k % 4);
        self.totals(kb, &sums, lanes)
    }

    fn packed(
        &self,
        kb: &mut KernelBuilder,
        format: Format,
        tile: ExprId,
        x: ExprId,
        lanes: u32,
    ) -> Vec<ExprId> {
        let (groups, bytes) = (self.k.div_ceil(GROUP), tile::group_bytes(format));
        let start = kb.mul_int(tile, (groups * bytes) as i64);
        let (zero, parts) = (kb.int(0), TILE as u32 / lanes);
        let totals = self.sums(kb, lanes);
        let group = |kb: &mut KernelBuilder, g: ExprId, columns: usize| {
            let here = kb.mul_int(g, bytes as i64);
            let base = kb.add(start, here);
            let base = kb.let_("base", base);
            let first = kb.mul_int(g, GROUP as i64);
            for part in 0..parts {
                let reader = GroupReader { format, buf: self.w.1, base, lanes, part };
                let mut sums: [Option<ExprId>; 4] = [None; 4];
                for word in 0..words(format) {
                    let bits = reader.word(kb, word);
                    let bits = kb.let_("word", bits);
                    for quad in quads(format, word) {
                        let present = columns.saturating_sub(4 * quad).min(4);
                        if present == 0 {
                            continue;
                        }
                        let weights = quad_floats(kb, format, bits, quad, None);
                        for (j, &w) in weights.iter().enumerate().take(present) {
                            let column = kb.add_int(first, (4 * quad + j) as i64);
                            let value = self.x_at(kb, x, column, lanes);
                            let next = match sums[j] {
                                Some(sum) => kb.fma(w, value, sum),
                                None => kb.mul(w, value),
                            };
                            sums[j] = Some(kb.let_("s", next));
                        }
                    }
                }
                let scales = reader.scales(kb);
                let scales = kb.let_("scales", scales);
                for (slot, sum) in sums.into_iter().enumerate() {
                    let Some(sum) = sum else { continue };
                    let total = totals[part as usize][slot];
                    let old = kb.load_vec(total, zero, lanes);
                    let new = kb.fma(sum, scales, old);
                    kb.store_vec(total, zero, new);
                }
            }
        };
        let full = kb.int((self.k / GROUP) as i64);
        kb.serial("g", full, |kb, g| group(kb, g, GROUP));
        if !self.k.is_multiple_of(GROUP) {
            group(kb, full, self.k % GROUP);
        }
        self.totals(kb, &totals, lanes)
    }

    /// A block takes four rows of one expert's matrix, 32 threads each, for one pair of row and slot.
    pub fn emit_gpu(&self, kb: &mut KernelBuilder) {
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
                        let x = kb.load(self.x.1, at);
                        let w = self.inliner.value(kb, self.w.0, &[Index::scalar(w_row), Index::scalar(c)]);
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
