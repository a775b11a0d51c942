//! The product on a GPU over row-major weights: for one activation row, a warp per weight row whose threads read
//! consecutive pieces and fold their sums by shuffles; for more, tensor cores ([`matrix`]), or square tiles through shared memory.

mod matrix;

use super::problem::{Activation, Epilogue, Product, Sums, Weight};
use mlcc_ir::builder::KernelBuilder;
use mlcc_ir::format::{CodeValues, Format, Zero};
use mlcc_ir::kernel::Ty;
use mlcc_ir::types::{DType, Packing};
use mlcc_kernel_lang::{Recorder, Reg, Team, Val, View, WARP, warp_sum};
use mlcc_quant::layout::{Place, Region};
use mlcc_quant::plain::Plain;
use mlcc_quant::tile;
use mlcc_quant::{Layout, QuantError, unpack_scalar};
use mlcc_target::MatrixTile;
use std::fmt;

/// Edge of a shared-memory tile in all three directions.
const EDGE: i64 = 32;
/// Threads along one side of a block of the tiled matmul; each computes 2 x 2 results.
const SIDE: i64 = 16;
/// Elements from one row of a shared tile to the next: odd, so that a column touches every bank.
const PITCH: i64 = EDGE + 1;

/// How a product is computed on a GPU.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum GpuPlan {
    /// Of one row: a warp per row of weights.
    Matvec {
        /// Warps (weight rows) per block.
        warps: u32,
        /// Pieces of a weight row that a thread loads before it uses them.
        unroll: u32,
    },
    /// Of any number of rows: square tiles through shared memory.
    Tiles,
    /// The same on tensor cores.
    Matrix(MatrixTile),
}

impl fmt::Display for GpuPlan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            GpuPlan::Matvec { warps, unroll } => {
                write!(f, "a warp per row of weights, {warps} in a block, {unroll} pieces loaded before use")
            }
            GpuPlan::Tiles => write!(f, "tiles of {EDGE} x {EDGE} in shared memory"),
            GpuPlan::Matrix(MatrixTile { rows, columns, warps: [down, across], stages }) => write!(
                f,
                "tensor cores, {rows} x {columns} results of {down} x {across} warps, {stages} stages"
            ),
        }
    }
}

/// The plan for a machine that may have tensor cores. `single_row`: the product is a matvec (decode).
pub fn choose_gpu(
    tile: Option<MatrixTile>,
    problem: &Product,
    single_row: bool,
) -> Result<GpuPlan, QuantError> {
    if single_row {
        return Ok(GpuPlan::Matvec { warps: 4, unroll: 4 });
    }
    let layout = layout(problem)?;
    let tile = tile.filter(|_| matrix::fits(problem, &layout));
    Ok(tile.map_or(GpuPlan::Tiles, GpuPlan::Matrix))
}

fn layout(problem: &Product) -> Result<Layout, QuantError> {
    let dtype = match problem.weight {
        Weight::Plain(plain) => plain.dtype(),
        Weight::Packed(format) => DType::Packed(format),
    };
    Ok(Layout::new(dtype, Packing::RowMajor, problem.n, problem.k)?.at_offset(problem.w_offset))
}

/// Emits the product as one nest of block and thread loops: the whole body of a kernel. The epilogue receives single
/// sums, each in the one thread that holds it. Activations are floats.
pub fn emit_gpu_product(
    kb: &mut KernelBuilder,
    problem: &Product,
    plan: &GpuPlan,
    epilogue: &mut Epilogue,
) -> Result<(), QuantError> {
    let layout = layout(problem)?;
    Recorder::within(kb, |k| {
        let gpu = Gpu { k, problem, layout: &layout };
        match *plan {
            GpuPlan::Matvec { warps, unroll } => gpu.matvec(i64::from(warps), i64::from(unroll), epilogue),
            GpuPlan::Tiles => gpu.matmul(epilogue),
            GpuPlan::Matrix(tile) => gpu.matrix(&tile, epilogue),
        }
    });
    Ok(())
}

#[derive(Clone, Copy)]
struct Gpu<'k, 'a> {
    k: &'k Recorder,
    problem: &'a Product,
    layout: &'a Layout,
}

impl<'k> Gpu<'k, '_> {
    /// Activations, `[m, k]`; rows may be padded.
    fn x(self) -> View<'k, 2> {
        let stride = self.problem.activation.row_stride(self.problem.k) as i64;
        self.k.view(self.problem.x, [1, stride])
    }

    /// Activations as they were loaded, as f32.
    fn x_floats(self, loaded: Val<'k>) -> Val<'k> {
        match self.problem.activation {
            Activation::F32 | Activation::BF16 => loaded.named("x").cast(DType::F32),
            Activation::Codes(_) => panic!("integer activations are for CPU kernels"),
        }
    }

    /// One weight, f32.
    fn weight(self, row: Val<'k>, col: Val<'k>) -> Val<'k> {
        self.k.val(self.k.builder(|kb| unpack_scalar(kb, self.layout, self.problem.w, row.id(), col.id())))
    }

    /// Hands one sum to the epilogue.
    fn finish(self, epilogue: &mut Epilogue, row: Val<'k>, col: Val<'k>, sum: Val<'k>) {
        epilogue(self.k, Sums { row, col, lanes: 1, acc: sum, mask: None });
    }

    // ---- matvec: a warp per weight row

    fn matvec(self, warps: i64, unroll: i64, epilogue: &mut Epilogue) {
        let (k, n) = (self.k, self.problem.n as i64);
        k.blocks("block", 0, (n + warps - 1) / warps, |block| {
            k.threads("thread", warps * WARP, |thread| {
                let lane = (thread % WARP).named("lane");
                let row = (block * warps + thread / WARP).named("row");
                k.when(row.lt(n), || {
                    let sum = self.warp_sum(row, lane, unroll);
                    k.when(lane.equals(0), || self.finish(epilogue, k.int(0), row, sum));
                });
            });
        });
    }

    /// The sum of one weight row, in every lane of the warp.
    fn warp_sum(self, row: Val<'k>, lane: Val<'k>, unroll: i64) -> Val<'k> {
        let k = self.k;
        let piece = piece(self.problem.weight);
        let pieces = self.problem.k as i64 / piece;
        let acc = k.reg("acc", k.literal(0.0, Ty::vector(DType::F32, piece as u32)));
        // Whole rounds of `unroll` pieces per lane, then single ones, the last of them for some lanes only.
        let rounds = pieces / (WARP * unroll);
        k.serial("round", rounds, |round| {
            let first = round * (WARP * unroll) + lane;
            let numbers: Vec<Val> = (0..unroll).map(|u| first + u * WARP).collect();
            self.add_pieces(acc, row, &numbers);
        });
        let mut done = rounds * WARP * unroll;
        while done < pieces {
            let number = lane + done;
            if done + WARP <= pieces {
                self.add_pieces(acc, row, &[number]);
            } else {
                k.when(number.lt(pieces), || self.add_pieces(acc, row, &[number]));
            }
            done += WARP;
        }
        let total = acc.get().sum_lanes();
        warp_sum(self.rest(row, lane, pieces * piece, total))
    }

    /// Adds the columns after the last whole piece, one per lane.
    fn rest(self, row: Val<'k>, lane: Val<'k>, first: i64, total: Val<'k>) -> Val<'k> {
        let left = self.problem.k as i64 - first;
        if left == 0 {
            return total.named("sum");
        }
        let sum = self.k.reg("sum", total);
        self.k.when(lane.lt(left), || {
            let col = lane + first;
            let w = self.weight(row, col);
            let x = self.x_floats(self.x().at((0, col)));
            sum.set(w.fma(x, sum.get()));
        });
        sum.get().named("sum")
    }

    /// `acc += weights * activations` for the numbered pieces of a weight row; all loads come first.
    fn add_pieces(self, acc: Reg<'k>, row: Val<'k>, numbers: &[Val<'k>]) {
        let piece = piece(self.problem.weight);
        let operands: Vec<(Val, Val)> = numbers
            .iter()
            .map(|&number| {
                let col = number * piece;
                let weights = self.piece_weights(row, col, piece as u32);
                (weights, self.x_floats(self.x().load((0, col), piece as u32)))
            })
            .collect();
        acc.set(operands.into_iter().fold(acc.get(), |sum, (weights, x)| weights.fma(x, sum)));
    }

    /// The weights of one piece, f32; what is read from memory is pinned.
    fn piece_weights(self, row: Val<'k>, col: Val<'k>, lanes: u32) -> Val<'k> {
        let w = self.k.view(self.problem.w, [self.layout.len as i64]);
        let place = |place: &Place| self.k.val(self.k.builder(|kb| place.emit(kb, row.id(), col.id())));
        match &self.layout.region {
            Region::Plain { place: elements, .. } => {
                w.load([place(elements)], lanes).named("w").cast(DType::F32)
            }
            Region::Group { .. } if lanes == 1 => self.weight(row, col),
            Region::Group { spec, codes, scales, zeros, .. } => {
                let codes = w.load([place(codes)], lanes * spec.format.bits as u32 / 8).named("q");
                let number = spec.number();
                let number = |at: &Place, name| {
                    let bytes = w.load([place(at)], number.bytes() as u32);
                    bytes.bits_as(Ty::scalar(number.dtype())).named(name).cast(DType::F32)
                };
                let scale = number(scales, "scale");
                let codes = match spec.format.bits {
                    8 => codes.cast(DType::U32),
                    bits => small_codes(self.k, codes, bits as i64),
                };
                let zero = zeros.as_ref().map(|zeros| number(zeros, "zero"));
                match (spec.format.zero, zero) {
                    (Zero::Minimum, Some(minimum)) => small_floats(codes, 0).fma(scale, minimum),
                    (Zero::PerGroup, Some(zero)) => (small_floats(codes, 0) - zero) * scale,
                    _ => code_floats(spec.format, codes) * scale,
                }
            }
        }
    }

    // ---- matmul: square tiles through shared memory

    fn matmul(self, epilogue: &mut Epilogue) {
        let (k, m) = (self.k, self.k.val(self.problem.m));
        let tiles = |size: usize| (size as i64 + EDGE - 1) / EDGE;
        let team = Team::new(k, SIDE * SIDE);
        k.blocks("bn", 0, tiles(self.problem.n), |bn| {
            k.blocks("bm", 1, (m + (EDGE - 1)) / EDGE, |bm| {
                let xs = k.shared("xs", [EDGE * PITCH]).rows(PITCH);
                let ws = k.shared("ws", [EDGE * PITCH]).rows(PITCH);
                let acc = k.registers("acc", [4]);
                let (row0, col0) = (bm * EDGE, bn * EDGE);
                team.run(|_| acc.set([0], k.literal(0.0, Ty::vector(DType::F32, 4))));
                k.serial("step", tiles(self.problem.k), |step| {
                    team.run(|thread| self.stage((xs, ws), (row0, col0, step * EDGE), thread));
                    k.barrier();
                    team.run(|thread| self.multiply((xs, ws), acc, thread));
                    k.barrier();
                });
                team.run(|thread| {
                    for (i, (r, c)) in corners(thread).into_iter().enumerate() {
                        let (row, col) = (row0 + r, col0 + c);
                        k.when(row.lt(m) & col.lt(self.problem.n as i64), || {
                            self.finish(epilogue, row, col, acc.at([i as i64]).named("sum"));
                        });
                    }
                });
            });
        });
    }

    /// Fills both shared tiles; places outside of the matrices become zero (x) or repeat the edge (w).
    fn stage(
        self,
        (xs, ws): (View<'k, 2>, View<'k, 2>),
        (row0, col0, k0): (Val<'k>, Val<'k>, Val<'k>),
        thread: Val<'k>,
    ) {
        let (m, n_last, k_end) =
            (self.k.val(self.problem.m), self.problem.n as i64 - 1, self.problem.k as i64);
        for i in 0..EDGE * EDGE / (SIDE * SIDE) {
            let element = thread + i * SIDE * SIDE;
            let (r, c) = (element / EDGE, element % EDGE);
            let (row, col, k) = (row0 + r, col0 + r, k0 + c);
            let x = self.x().load_where(row.lt(m) & k.lt(k_end), [row, k], 1);
            xs.set([r, c], self.x_floats(x));
            ws.set([r, c], self.weight(col.min(n_last), k.min(k_end - 1)));
        }
    }

    /// `acc += x tile * w tile` for the four results of a thread.
    fn multiply(self, (xs, ws): (View<'k, 2>, View<'k, 2>), acc: View<'k, 1>, thread: Val<'k>) {
        self.k.serial("k", EDGE, |k| {
            for (i, (r, c)) in corners(thread).into_iter().enumerate() {
                let i = [i as i64];
                acc.set(i, xs.at([r, k]).fma(ws.at([c, k]), acc.at(i)));
            }
        });
    }
}

/// Columns that one thread of the matvec reads at a time: 4 to 16 bytes of weights.
fn piece(weight: Weight) -> i64 {
    match weight {
        Weight::Plain(Plain::F32) => 4,
        Weight::Plain(Plain::F16 | Plain::BF16) => 8,
        Weight::Packed(format) if format.fills_bytes() => 8,
        // One code after the other.
        Weight::Packed(_) => 1,
    }
}

/// Eight codes of less than 8 bits, the lowest bits first, as u32.
fn small_codes<'k>(k: &'k Recorder, bytes: Val<'k>, bits: i64) -> Val<'k> {
    let word = Ty::scalar(DType::U32);
    let packed = match bytes.lanes() {
        4 => bytes.bits_as(word),
        _ => bytes.bits_as(Ty::scalar(DType::U16)).cast(DType::U32),
    };
    (packed.splat(8) >> k.literal(0.0, word).ramp(bits, 8)) & ((1 << bits) - 1)
}

/// What codes of 32 bits stand for where all groups have the same zero point.
fn code_floats<'k>(format: Format, codes: Val<'k>) -> Val<'k> {
    match format.values {
        CodeValues::E4M3 => tile::small_floats(codes),
        CodeValues::Whole | CodeValues::E2M1 => {
            small_floats(tile::code_numbers(format, codes, None), tile::centre(format))
        }
    }
}

/// `codes - zero_point` as f32 for codes below 2^23, through the bits of a float: integer conversions are slow on GPUs.
fn small_floats(codes: Val, zero_point: i64) -> Val {
    const BASE: f32 = 8_388_608.0;
    let bits = codes | i64::from(BASE.to_bits());
    bits.bits_as(Ty::vector(DType::F32, codes.lanes())) - (f64::from(BASE) + zero_point as f64)
}

/// The four results of a thread within its tile: (row, column).
fn corners(thread: Val) -> [(Val, Val); 4] {
    let (r, c) = (thread / SIDE, thread % SIDE);
    let (r1, c1) = (r + SIDE, c + SIDE);
    [(r, c), (r, c1), (r1, c), (r1, c1)]
}
