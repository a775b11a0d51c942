//! The contraction on a GPU over row-major weights: for one activation row, a warp per weight row whose threads read
//! consecutive pieces and fold their sums by shuffles; for more, square tiles through shared memory.

use super::{Activation, Epilogue, MatMul, Tile, Weight};
use mlcc_ir::builder::KernelBuilder;
use mlcc_ir::instr::InstrId;
use mlcc_ir::kernel::{BinOp, BufId, ExprId, ForKind, Space, Ty};
use mlcc_ir::types::{DType, Format, Packing};
use mlcc_quant::layout::Region;
use mlcc_quant::plain::Plain;
use mlcc_quant::{Layout, QuantError, unpack_scalar};

/// Threads of a warp.
const WARP: i64 = 32;
/// Edge of a shared-memory tile in all three directions.
const EDGE: i64 = 32;
/// Threads along one side of a block of the tiled matmul; each computes 2 x 2 results.
const SIDE: i64 = 16;
/// Elements from one row of a shared tile to the next: odd, so that a column touches every bank.
const PITCH: i64 = EDGE + 1;

/// Parameters of the GPU contraction.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct GpuMatMulParams {
    /// Warps (weight rows) per block of the matvec.
    pub warps: u32,
    /// Pieces of a weight row that a thread loads before it uses them.
    pub unroll: u32,
}

/// Parameters that suit all supported GPUs.
pub fn choose_gpu() -> GpuMatMulParams {
    GpuMatMulParams { warps: 4, unroll: 4 }
}

/// Emits the contraction as one nest of block and thread loops: the whole body of a kernel. The epilogue receives single
/// sums, each in the one thread that holds it. Activations are floats.
pub fn emit_gpu_matmul(
    kb: &mut KernelBuilder,
    spec: &MatMul,
    params: &GpuMatMulParams,
    epilogue: &mut Epilogue,
) -> Result<(), QuantError> {
    let dtype = match spec.weight {
        Weight::Plain(plain) => plain.dtype(),
        Weight::Packed(format) => DType::Packed(format),
    };
    let layout = Layout::new(dtype, Packing::RowMajor, spec.n, spec.k)?.at_offset(spec.w_offset);
    let gpu = Gpu { spec, params, layout };
    match kb.kernel().exprs.as_int(spec.m) {
        Some(1) => gpu.matvec(kb, epilogue),
        _ => gpu.matmul(kb, epilogue),
    }
    Ok(())
}

struct Gpu<'a> {
    spec: &'a MatMul,
    params: &'a GpuMatMulParams,
    layout: Layout,
}

impl Gpu<'_> {
    /// Activations of one row as f32, `lanes` consecutive columns (within one group of 32); masked ones are zero.
    fn x_values(
        &self,
        kb: &mut KernelBuilder,
        row: ExprId,
        col: ExprId,
        lanes: u32,
        mask: Option<ExprId>,
    ) -> ExprId {
        let start = kb.mul_int(row, self.spec.activation.row_stride(self.spec.k) as i64);
        let at = kb.add(start, col);
        let index = kb.ramp1(at, lanes);
        let value = kb.load_masked(self.spec.x, index, mask);
        let value = kb.let_("x", value);
        let value = kb.cast(value, DType::F32);
        match self.spec.activation {
            Activation::F32 | Activation::BF16 => value,
            Activation::Codes(_) => panic!("integer activations are for CPU kernels"),
        }
    }

    // ---- matvec

    fn matvec(&self, kb: &mut KernelBuilder, epilogue: &mut Epilogue) {
        let warps = i64::from(self.params.warps);
        let blocks = kb.int((self.spec.n as i64 + warps - 1) / warps);
        let threads = kb.int(warps * WARP);
        kb.for_("block", blocks, ForKind::Block(0), |kb, block| {
            kb.for_("thread", threads, ForKind::Thread(0), |kb, thread| {
                let warp_size = kb.int(WARP);
                let warp = kb.div(thread, warp_size);
                let lane = kb.rem(thread, warp_size);
                let lane = kb.let_("lane", lane);
                let first = kb.mul_int(block, warps);
                let row = kb.add(first, warp);
                let row = kb.let_("row", row);
                let n = kb.int(self.spec.n as i64);
                let exists = kb.lt(row, n);
                kb.if_(exists, |kb| {
                    let sum = self.warp_sum(kb, row, lane);
                    let zero = kb.int(0);
                    let is_first = kb.binary(BinOp::Eq, lane, zero);
                    kb.if_(is_first, |kb| {
                        epilogue(kb, Tile { row: zero, col: row, lanes: 1, acc: sum, mask: None });
                    });
                });
            });
        });
    }

    /// The sum of one weight row, in every lane of the warp.
    fn warp_sum(&self, kb: &mut KernelBuilder, row: ExprId, lane: ExprId) -> ExprId {
        let piece = piece(self.spec.weight);
        let pieces = self.spec.k as i64 / piece;
        let unroll = i64::from(self.params.unroll);
        let acc = kb.alloc("acc", DType::F32, piece as usize, Space::Local);
        let zero = kb.int(0);
        let none = kb.constant(0.0, Ty::vector(DType::F32, piece as u32));
        kb.store_vec(acc, zero, none);
        // Whole rounds of `unroll` pieces per lane, then single ones, the last of them for some lanes only.
        let rounds = pieces / (WARP * unroll);
        let count = kb.int(rounds);
        kb.serial("round", count, |kb, round| {
            let start = kb.mul_int(round, WARP * unroll);
            let start = kb.add(start, lane);
            let numbers: Vec<ExprId> = (0..unroll).map(|u| kb.add_int(start, u * WARP)).collect();
            self.add_pieces(kb, acc, row, &numbers);
        });
        let mut done = rounds * WARP * unroll;
        while done < pieces {
            let number = kb.add_int(lane, done);
            let end = kb.int(pieces);
            if done + WARP <= pieces {
                self.add_pieces(kb, acc, row, &[number]);
            } else {
                let exists = kb.lt(number, end);
                kb.if_(exists, |kb| self.add_pieces(kb, acc, row, &[number]));
            }
            done += WARP;
        }
        let total = kb.load_vec(acc, zero, piece as u32);
        let total = kb.reduce_lanes(BinOp::Add, total);
        let total = self.rest(kb, row, lane, pieces * piece, total);
        fold_warp(kb, total)
    }

    /// Adds the columns behind the last whole piece, one per lane.
    fn rest(&self, kb: &mut KernelBuilder, row: ExprId, lane: ExprId, first: i64, total: ExprId) -> ExprId {
        let left = self.spec.k as i64 - first;
        if left == 0 {
            return kb.let_("sum", total);
        }
        let sum = kb.alloc("sum", DType::F32, 1, Space::Local);
        let zero = kb.int(0);
        kb.store(sum, zero, total);
        let left = kb.int(left);
        let exists = kb.lt(lane, left);
        kb.if_(exists, |kb| {
            let col = kb.add_int(lane, first);
            let w = unpack_scalar(kb, &self.layout, self.spec.w, row, col);
            let x = self.x_values(kb, zero, col, 1, None);
            let before = kb.load(sum, zero);
            let after = kb.fma(w, x, before);
            kb.store(sum, zero, after);
        });
        let total = kb.load(sum, zero);
        kb.let_("sum", total)
    }

    /// `acc += weights * activations` for the numbered pieces of a weight row; all loads come first.
    fn add_pieces(&self, kb: &mut KernelBuilder, acc: BufId, row: ExprId, numbers: &[ExprId]) {
        let piece = piece(self.spec.weight);
        let zero = kb.int(0);
        let loads: Vec<(ExprId, ExprId)> = numbers
            .iter()
            .map(|&number| {
                let col = kb.mul_int(number, piece);
                let weights = self.piece_weights(kb, row, col, piece as u32);
                (weights, self.x_values(kb, zero, col, piece as u32, None))
            })
            .collect();
        let mut sum = kb.load_vec(acc, zero, piece as u32);
        for (weights, x) in loads {
            sum = kb.fma(weights, x, sum);
        }
        kb.store_vec(acc, zero, sum);
    }

    /// The weights of one piece, f32; what is read from memory is pinned.
    fn piece_weights(&self, kb: &mut KernelBuilder, row: ExprId, col: ExprId, lanes: u32) -> ExprId {
        match &self.layout.region {
            Region::Plain { place, .. } => {
                let at = place.emit(kb, row, col);
                let weights = kb.load_vec(self.spec.w, at, lanes);
                let weights = kb.let_("w", weights);
                kb.cast(weights, DType::F32)
            }
            Region::Group { spec, codes, scales, .. } => {
                let at = codes.emit(kb, row, col);
                let bytes = lanes * spec.bits as u32 / 8;
                let codes = kb.load_vec(self.spec.w, at, bytes);
                let codes = kb.let_("q", codes);
                let at = scales.emit(kb, row, col);
                let scale = kb.load_vec(self.spec.w, at, 2);
                let scale = kb.bitcast(scale, Ty::scalar(DType::F16));
                let scale = kb.let_("scale", scale);
                let codes = match spec.bits {
                    4 => nibbles(kb, codes),
                    _ => kb.cast(codes, DType::U32),
                };
                let weights = small_floats(kb, codes, spec.zero_point);
                let scale = kb.cast(scale, DType::F32);
                kb.mul(weights, scale)
            }
        }
    }

    // ---- matmul

    fn matmul(&self, kb: &mut KernelBuilder, epilogue: &mut Epilogue) {
        let n_tiles = kb.int((self.spec.n as i64 + EDGE - 1) / EDGE);
        let rounded = kb.add_int(self.spec.m, EDGE - 1);
        let edge = kb.int(EDGE);
        let m_tiles = kb.div(rounded, edge);
        let threads = kb.int(SIDE * SIDE);
        kb.for_("bn", n_tiles, ForKind::Block(0), |kb, bn| {
            kb.for_("bm", m_tiles, ForKind::Block(1), |kb, bm| {
                let xs = kb.alloc("xs", DType::F32, (EDGE * PITCH) as usize, Space::Shared);
                let ws = kb.alloc("ws", DType::F32, (EDGE * PITCH) as usize, Space::Shared);
                let acc = kb.alloc("acc", DType::F32, 4, Space::Local);
                let (row0, col0) = (kb.mul_int(bm, EDGE), kb.mul_int(bn, EDGE));
                kb.for_("thread", threads, ForKind::Thread(0), |kb, _| {
                    let (zero, none) = (kb.int(0), kb.constant(0.0, Ty::vector(DType::F32, 4)));
                    kb.store_vec(acc, zero, none);
                });
                let steps = kb.int((self.spec.k as i64 + EDGE - 1) / EDGE);
                kb.serial("step", steps, |kb, step| {
                    let k0 = kb.mul_int(step, EDGE);
                    kb.for_("thread", threads, ForKind::Thread(0), |kb, thread| {
                        self.stage(kb, (xs, ws), (row0, col0, k0), thread);
                    });
                    kb.barrier();
                    kb.for_("thread", threads, ForKind::Thread(0), |kb, thread| {
                        multiply(kb, (xs, ws), acc, thread);
                    });
                    kb.barrier();
                });
                kb.for_("thread", threads, ForKind::Thread(0), |kb, thread| {
                    self.hand_over(kb, acc, (row0, col0), thread, epilogue);
                });
            });
        });
    }

    /// Fills both shared tiles; places outside of the matrices become zero (x) or repeat the edge (w).
    fn stage(
        &self,
        kb: &mut KernelBuilder,
        (xs, ws): (BufId, BufId),
        (row0, col0, k0): (ExprId, ExprId, ExprId),
        thread: ExprId,
    ) {
        let edge = kb.int(EDGE);
        let (n_last, k_last) = (kb.int(self.spec.n as i64 - 1), kb.int(self.spec.k as i64 - 1));
        let k_end = kb.int(self.spec.k as i64);
        for i in 0..EDGE * EDGE / (SIDE * SIDE) {
            let element = kb.add_int(thread, i * SIDE * SIDE);
            let (r, c) = (kb.div(element, edge), kb.rem(element, edge));
            let start = kb.mul_int(r, PITCH);
            let to = kb.add(start, c);
            let (row, col, k) = (kb.add(row0, r), kb.add(col0, r), kb.add(k0, c));
            let (in_m, in_k) = (kb.lt(row, self.spec.m), kb.lt(k, k_end));
            let inside = kb.binary(BinOp::And, in_m, in_k);
            let x = self.x_values(kb, row, k, 1, Some(inside));
            kb.store(xs, to, x);
            let (col, k) = (kb.min(col, n_last), kb.min(k, k_last));
            let w = unpack_scalar(kb, &self.layout, self.spec.w, col, k);
            kb.store(ws, to, w);
        }
    }

    fn hand_over(
        &self,
        kb: &mut KernelBuilder,
        acc: BufId,
        (row0, col0): (ExprId, ExprId),
        thread: ExprId,
        epilogue: &mut Epilogue,
    ) {
        let n = kb.int(self.spec.n as i64);
        for (i, (r, c)) in corners(kb, thread).into_iter().enumerate() {
            let (row, col) = (kb.add(row0, r), kb.add(col0, c));
            let (in_m, in_n) = (kb.lt(row, self.spec.m), kb.lt(col, n));
            let inside = kb.binary(BinOp::And, in_m, in_n);
            kb.if_(inside, |kb| {
                let at = kb.int(i as i64);
                let sum = kb.load(acc, at);
                let sum = kb.let_("sum", sum);
                epilogue(kb, Tile { row, col, lanes: 1, acc: sum, mask: None });
            });
        }
    }
}

/// Columns that one thread of the matvec reads at a time: 4 to 16 bytes of weights.
fn piece(weight: Weight) -> i64 {
    match weight {
        Weight::Plain(Plain::F32) => 4,
        Weight::Plain(Plain::F16 | Plain::BF16) | Weight::Packed(Format::Q4G32 | Format::Q8G32) => 8,
    }
}

/// Eight 4-bit codes from four bytes, low nibble first, as u32.
fn nibbles(kb: &mut KernelBuilder, bytes: ExprId) -> ExprId {
    let word = kb.bitcast(bytes, Ty::scalar(DType::U32));
    let word = kb.splat(word, 8);
    let (zero, four) = (kb.int_of(0, DType::U32), kb.int_of(4, DType::U32));
    let shifts = kb.ramp(zero, four, 8);
    let shifted = kb.binary(BinOp::Shr, word, shifts);
    let mask = kb.int_of(15, DType::U32);
    kb.binary(BinOp::And, shifted, mask)
}

/// `codes - zero_point` as f32 for codes below 2^23, through the bits of a float: integer conversions are slow on GPUs.
fn small_floats(kb: &mut KernelBuilder, codes: ExprId, zero_point: i32) -> ExprId {
    const BASE: f32 = 8_388_608.0;
    let lanes = kb.ty(codes).lanes;
    let exponent = kb.int_of(BASE.to_bits().into(), DType::U32);
    let bits = kb.binary(BinOp::Or, codes, exponent);
    let value = kb.bitcast(bits, Ty::vector(DType::F32, lanes));
    let zero = kb.float(f64::from(BASE) + f64::from(zero_point));
    kb.sub(value, zero)
}

/// Sum over the lanes of a warp, in every lane.
fn fold_warp(kb: &mut KernelBuilder, value: ExprId) -> ExprId {
    let shuffle = InstrId::by_name("shfl_xor_f32").expect("the instruction table has warp shuffles");
    let mut sum = kb.let_("sum", value);
    for distance in [16, 8, 4, 2, 1] {
        let distance = kb.int_of(distance, DType::I32);
        let other = kb.instr(shuffle, vec![sum, distance]);
        let next = kb.add(sum, other);
        sum = kb.let_("sum", next);
    }
    sum
}

/// The four results of a thread within its tile: (row, column).
fn corners(kb: &mut KernelBuilder, thread: ExprId) -> [(ExprId, ExprId); 4] {
    let side = kb.int(SIDE);
    let (r, c) = (kb.div(thread, side), kb.rem(thread, side));
    let (r1, c1) = (kb.add_int(r, SIDE), kb.add_int(c, SIDE));
    [(r, c), (r, c1), (r1, c), (r1, c1)]
}

/// `acc += x tile * w tile` for the four results of a thread.
fn multiply(kb: &mut KernelBuilder, (xs, ws): (BufId, BufId), acc: BufId, thread: ExprId) {
    let corners = corners(kb, thread);
    let edge = kb.int(EDGE);
    kb.serial("k", edge, |kb, k| {
        for (i, (r, c)) in corners.into_iter().enumerate() {
            let operand = |kb: &mut KernelBuilder, buf, index| {
                let start = kb.mul_int(index, PITCH);
                let at = kb.add(start, k);
                kb.load(buf, at)
            };
            let (x, w) = (operand(kb, xs, r), operand(kb, ws, c));
            let at = kb.int(i as i64);
            let before = kb.load(acc, at);
            let after = kb.fma(x, w, before);
            kb.store(acc, at, after);
        }
    });
}
