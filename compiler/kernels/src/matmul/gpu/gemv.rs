//! The product of one row on a GPU: a warp takes some rows of weights at once, so that it reads activations
//! once for all of them. Its lanes read consecutive pieces of both and fold their sums by shuffles.
//!
//! Activations lie in memory, or the block computes them first, into shared memory: for a row that is cheaper
//! than to launch a kernel for it.

use super::codes::{code_floats, nibble_format, small_codes, small_floats};
use super::{GpuMatmul, layout};
use crate::matmul::problem::{MatmulActivation, MatmulProblem, MatmulWeight};
use mlcc_ir::builder::KernelBuilder;
use mlcc_ir::format::ZeroPoint;
use mlcc_ir::kernel::ExprType;
use mlcc_ir::types::{DType, Packing};
use mlcc_kernel_lang::{BufferView, Recorder, RegisterVar, Val, WARP, warp_sum};
use mlcc_quant::layout::{AddressExpr, LayoutRegion};
use mlcc_quant::plain::PlainType;
use mlcc_quant::{GroupSpec, QuantError, tile};
use std::fmt;

/// Most bytes of computed activations: they and what computes them fit into the shared memory that every
/// block has.
const COMPUTED_BYTES: usize = 40 << 10;
/// Elements of 16 bytes of activations.
const HALF: i64 = 4;
/// The distance of rows of weights whose pieces are adjacent in fragments.
const BESIDE: i64 = 8;
/// Most blocks that compute activations: others would take turns with them on all multiprocessors.
const COMPUTING: u64 = 1024;

/// The plan of a product of one row on a GPU.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct GemvPlan {
    /// Warps per block.
    pub warps: u32,
    /// Rows of weights that a warp takes at once.
    pub rows: u32,
    /// The number of times that it does.
    pub repeats: u32,
    /// Pieces of a row of weights that a thread loads before it uses them.
    pub unroll: u32,
    /// Parts of the columns of the result, equally long, whose sums reach the epilogue together.
    pub parts: u32,
    /// Every block computes the activations.
    pub computed: bool,
}

impl GemvPlan {
    pub fn new(n: usize, parts: u32, computed: bool) -> GemvPlan {
        let rows = match parts {
            1 if n.is_multiple_of(2) => 2,
            parts => parts,
        };
        let warps = if computed { 8 } else { 4 };
        let plan = GemvPlan { warps, rows, repeats: 1, unroll: 4, parts, computed };
        let turns = if computed { plan.blocks(n as u64).div_ceil(COMPUTING) } else { 1 };
        GemvPlan { repeats: turns as u32, ..plan }
    }

    /// The plan for a problem: assemblers load 16-bit activations ahead with the weights, and had too few
    /// registers for four plain pieces.
    pub fn for_problem(self, problem: &MatmulProblem) -> GemvPlan {
        let halves = matches!(problem.activation, MatmulActivation::F16 | MatmulActivation::BF16);
        let plain = matches!(problem.weight, MatmulWeight::Plain(_));
        GemvPlan { unroll: if halves && plain { 3 } else { self.unroll }, ..self }
    }

    /// True if activations of a row that is this long can be computed by each block.
    pub fn can_compute(k: usize) -> bool {
        k * size_of::<f32>() <= COMPUTED_BYTES
    }

    fn threads(self) -> i64 {
        i64::from(self.warps) * WARP
    }

    /// Blocks for `n` rows of weights.
    fn blocks(self, n: u64) -> u64 {
        let of_block = u64::from(self.warps) * u64::from(self.repeats);
        (n / u64::from(self.rows)).div_ceil(of_block)
    }
}

impl fmt::Display for GemvPlan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let GemvPlan { warps, rows, repeats: turns, unroll, parts, computed } = self;
        match rows {
            1 => write!(f, "a warp per row of weights")?,
            rows => write!(f, "a warp per {rows} rows of weights")?,
        }
        write!(f, ", {warps} in a block, {unroll} pieces loaded before use")?;
        if *turns > 1 {
            write!(f, ", {turns} times")?;
        }
        if *parts > 1 {
            write!(f, ", {parts} parts joined")?;
        }
        if *computed {
            write!(f, ", activations computed by each block")?;
        }
        Ok(())
    }
}

/// Hands the activations, vector by vector with its first column, to the function that stores them; for
/// blocks of as many threads as the number says.
pub type ActivationPrologue<'a> = dyn for<'k> Fn(&'k Recorder, i64, &dyn Fn(Val<'k>, Val<'k>)) + 'a;

/// Takes a column and its sum in each of the parts, in the one thread that has them.
pub type GemvEpilogue<'a> = dyn for<'k> FnMut(&'k Recorder, Val<'k>, &[Val<'k>]) + 'a;

/// Emits the product as one nest of block and thread loops. With `prologue` the activations of the problem
/// are an array in shared memory.
pub fn emit_gpu_gemv(
    kb: &mut KernelBuilder,
    problem: &MatmulProblem,
    plan: GemvPlan,
    prologue: Option<&ActivationPrologue>,
    epilogue: &mut GemvEpilogue,
) -> Result<(), QuantError> {
    let layout = layout(problem)?;
    Recorder::within(kb, |k| {
        let row = GpuGemv { gpu: GpuMatmul { k, problem, layout: &layout }, plan };
        k.blocks("block", 0, plan.blocks(problem.n as u64) as i64, |block| {
            if let Some(prologue) = prologue {
                prologue(k, plan.threads(), &|column, value| row.keep(column, value));
                k.barrier();
            }
            k.threads("thread", plan.threads(), |thread| row.run(block, thread, epilogue));
        });
    });
    Ok(())
}

#[derive(Clone, Copy)]
struct GpuGemv<'k, 'a> {
    gpu: GpuMatmul<'k, 'a>,
    plan: GemvPlan,
}

/// A piece of a row: its number is 32 times `round` and that of the lane.
#[derive(Clone, Copy)]
struct RowPiece<'k> {
    round: Val<'k>,
    lane: Val<'k>,
}

impl<'k> GpuGemv<'k, '_> {
    fn run(self, block: Val<'k>, thread: Val<'k>, epilogue: &mut GemvEpilogue) {
        let (k, GemvPlan { warps, rows, repeats: turns, parts, .. }) = (self.gpu.k, self.plan);
        let [warps, rows, turns, parts] = [warps, rows, turns, parts].map(i64::from);
        let (n, lane) = (self.gpu.problem.n as i64, (thread % WARP).named("lane"));
        // In fragments a row lies between the pieces of the one eight further on.
        let beside = rows == 2 && parts == 1 && self.gpu.problem.packing == Packing::Fragments;
        let apart = match parts {
            1 if beside => BESIDE,
            1 => 1,
            parts => n / parts,
        };
        let (all, in_block) = (n / rows, warps * turns);
        k.serial("turn", turns, |turn| {
            let place = (block * in_block + turn * warps + thread / WARP).named("place");
            // Warps without rows take the last ones as well: lanes meet in shuffles, which no branch may
            // part.
            let is_one = (all % in_block != 0).then(|| place.lt(all));
            let own = if is_one.is_some() { place.min(all - 1) } else { place };
            let first = match parts {
                1 if beside => own / BESIDE * (2 * BESIDE) + own % BESIDE,
                1 => own * rows,
                _ => own,
            };
            let first = first.named("row");
            let each: Vec<Val> = (0..rows).map(|i| first + i * apart).collect();
            let sums = self.dot_rows(&each, lane);
            let keeps = |lanes: Val<'k>| is_one.map_or(lanes, |is_one| is_one & lanes);
            if parts > 1 || rows == 1 {
                return k.when(keeps(lane.equals(0)), || epilogue(k, first, &sums));
            }
            // A lane per row.
            k.when(keeps(lane.lt(rows)), || {
                let last = sums[rows as usize - 1];
                let own =
                    (0..rows - 1).rev().fold(last, |other, i| lane.equals(i).select(sums[i as usize], other));
                epilogue(k, first + lane * apart, &[own.named("sum")]);
            });
        });
    }

    /// The sums of some rows of weights, in every lane of the warp.
    fn dot_rows(self, rows: &[Val<'k>], lane: Val<'k>) -> Vec<Val<'k>> {
        let (k, problem) = (self.gpu.k, self.gpu.problem);
        let (piece, unroll) = (piece(problem.weight), i64::from(self.plan.unroll));
        let pieces = problem.k as i64 / piece;
        let lanes = if self.zero_of_nibbles().is_some() { 1 } else { piece as u32 };
        let zero = k.literal(0.0, ExprType::vector(DType::F32, lanes));
        let accs: Vec<RegisterVar> = rows.iter().map(|_| k.reg("acc", zero)).collect();
        let add = |first: Val<'k>, count: i64| {
            let pieces: Vec<RowPiece> = (0..count).map(|u| RowPiece { round: first + u, lane }).collect();
            self.add_pieces(&accs, rows, &pieces);
        };
        // Rounds of `unroll` pieces per lane, then what is left of whole ones, then pieces for some lanes
        // only.
        let whole = pieces / WARP;
        k.serial("round", whole / unroll, |round| add(round * unroll, unroll));
        if whole % unroll > 0 {
            add(k.int(whole / unroll * unroll), whole % unroll);
        }
        if pieces % WARP > 0 {
            k.when(lane.lt(pieces % WARP), || add(k.int(whole), 1));
        }
        let total = |(acc, &row): (&RegisterVar<'k>, &Val<'k>)| {
            let sum = if lanes > 1 { acc.get().sum_lanes() } else { acc.get() };
            warp_sum(self.add_remainder(row, lane, pieces * piece, sum))
        };
        accs.iter().zip(rows).map(total).collect()
    }

    /// Adds the columns after the last whole piece, one per lane.
    fn add_remainder(self, row: Val<'k>, lane: Val<'k>, first: i64, total: Val<'k>) -> Val<'k> {
        let (k, gpu) = (self.gpu.k, self.gpu);
        let left = gpu.problem.k as i64 - first;
        if left == 0 {
            return total.named("sum");
        }
        let sum = k.reg("sum", total);
        k.when(lane.lt(left), || {
            let col = lane + first;
            let w = gpu.weight(row, col);
            let x = gpu.x_floats(gpu.x().at((0, col)));
            sum.set(w.fma(x, sum.get()));
        });
        sum.get().named("sum")
    }

    /// `acc += weights * activations` for pieces of each row of weights; all weights are loaded first.
    fn add_pieces(self, accs: &[RegisterVar<'k>], rows: &[Val<'k>], pieces: &[RowPiece<'k>]) {
        let lanes = piece(self.gpu.problem.weight) as u32;
        let column = |piece: &RowPiece<'k>| (piece.round * WARP + piece.lane) * i64::from(lanes);
        if let Some(zero) = self.zero_of_nibbles() {
            let of_rows = |piece| rows.iter().filter_map(|&row| self.nibbles(row, column(piece))).collect();
            let weights: Vec<Vec<NibbleWords>> = pieces.iter().map(of_rows).collect();
            for (piece, weights) in pieces.iter().zip(weights) {
                let x = NibbleWords::activations(self.piece_activations(piece, lanes).named("x"));
                for (acc, weights) in accs.iter().zip(weights) {
                    acc.set(weights.times(&x, zero).fma(weights.scale, acc.get()));
                }
            }
            return;
        }
        let of_rows = |piece| rows.iter().map(|&row| self.piece_weights(row, column(piece), lanes)).collect();
        let weights: Vec<Vec<Val>> = pieces.iter().map(of_rows).collect();
        for (piece, weights) in pieces.iter().zip(weights) {
            let x = self.piece_activations(piece, lanes).named("x");
            for (acc, weights) in accs.iter().zip(weights) {
                acc.set(weights.fma(x, acc.get()));
            }
        }
    }

    // ---- activations

    /// True if pieces of computed activations are in two halves, each with those of all lanes: so lanes read
    /// 16 bytes side by side.
    fn in_halves(self) -> bool {
        let MatmulProblem { activation, weight, k, .. } = *self.gpu.problem;
        let whole = (k as i64) % (WARP * 2 * HALF) == 0;
        self.plan.computed && activation == MatmulActivation::F32 && piece(weight) == 2 * HALF && whole
    }

    /// Stores computed activations from a column on; as many as a divisor of [`HALF`].
    fn keep(self, column: Val<'k>, value: Val<'k>) {
        let to = self.gpu.k.flat(self.gpu.problem.x);
        if !self.in_halves() {
            return to.set([column], value);
        }
        let (round, within) = (column / (WARP * 2 * HALF), column % (WARP * 2 * HALF));
        let (lane, half) = (within / (2 * HALF), within / HALF % 2);
        to.set([round * (WARP * 2 * HALF) + half * (WARP * HALF) + lane * HALF + within % HALF], value);
    }

    fn piece_activations(self, piece: &RowPiece<'k>, lanes: u32) -> Val<'k> {
        let gpu = self.gpu;
        let number = piece.round * WARP + piece.lane;
        if !self.in_halves() {
            return gpu.x_floats(gpu.x().load((0, number * i64::from(lanes)), lanes));
        }
        let at = (piece.round * (WARP * 2 * HALF) + piece.lane * HALF).named("at");
        let half =
            |h: i64| gpu.k.flat(gpu.problem.x).load([at + h * (WARP * HALF)], HALF as u32).named("half");
        half(0).shuffle_with(half(1), 0..lanes)
    }

    // ---- weights

    /// The weights of one piece, f32; what is read from memory is pinned.
    fn piece_weights(self, row: Val<'k>, col: Val<'k>, lanes: u32) -> Val<'k> {
        let w = self.weights();
        let place = |at: &AddressExpr| self.place(at, row, col);
        match &self.gpu.layout.region {
            LayoutRegion::Plain { place: elements, .. } => {
                w.load([place(elements)], lanes).named("w").cast(DType::F32)
            }
            LayoutRegion::Group { .. } if lanes == 1 => self.gpu.weight(row, col),
            LayoutRegion::Group { spec, codes, scales, zeros, .. } => {
                let codes = w.load([place(codes)], lanes * spec.format.bits as u32 / 8).named("q");
                let number = |at: &AddressExpr, name| self.number(spec, place(at), name);
                let scale = number(scales, "scale");
                let codes = match spec.format.bits {
                    8 => codes.cast(DType::U32),
                    bits => small_codes(self.gpu.k, codes, bits as i64),
                };
                let zero = zeros.as_ref().map(|zeros| number(zeros, "zero"));
                match (spec.format.zero, zero) {
                    (ZeroPoint::Minimum, Some(minimum)) => small_floats(codes, 0).fma(scale, minimum),
                    (ZeroPoint::PerGroup, Some(zero)) => (small_floats(codes, 0) - zero) * scale,
                    _ => code_floats(spec.format, codes) * scale,
                }
            }
        }
    }

    fn weights(self) -> BufferView<'k, 1> {
        self.gpu.k.view(self.gpu.problem.w, [self.gpu.layout.len as i64])
    }

    /// The address of something that belongs to a weight.
    fn place(self, at: &AddressExpr, row: Val<'k>, col: Val<'k>) -> Val<'k> {
        self.gpu.k.val(self.gpu.k.builder(|kb| at.emit(kb, row.id(), col.id())))
    }

    /// The scale or the zero point of a group, f32.
    fn number(self, spec: &GroupSpec, at: Val<'k>, name: &str) -> Val<'k> {
        let number = spec.number_type();
        let bytes = self.weights().load([at], number.bytes() as u32);
        bytes.bits_as(ExprType::scalar(number.dtype())).named(name).cast(DType::F32)
    }

    /// The zero point of 4-bit codes that all groups share; `None` for other weights.
    fn zero_of_nibbles(self) -> Option<i64> {
        nibble_format(self.gpu.problem.weight).map(tile::code_centre)
    }

    /// A piece of such weights.
    fn nibbles(self, row: Val<'k>, col: Val<'k>) -> Option<NibbleWords<'k>> {
        let LayoutRegion::Group { spec, codes, scales, .. } = &self.gpu.layout.region else { return None };
        let codes = self.weights().load([self.place(codes, row, col)], 4).named("q");
        let word = codes.bits_as(ExprType::scalar(DType::U32));
        let scale = self.number(spec, self.place(scales, row, col), "scale");
        Some(NibbleWords { words: [word, word >> 16], scale })
    }
}

/// Eight 4-bit codes of one group, the first four in the lower half of the first word.
struct NibbleWords<'k> {
    words: [Val<'k>; 2],
    scale: Val<'k>,
}

impl<'k> NibbleWords<'k> {
    /// Activations for [`Self::times`], divided by the factor that a code has because of its place in a word.
    fn activations(x: Val<'k>) -> Vec<Val<'k>> {
        let part = |i: u32| match i % 4 {
            0 => x.shuffle([i]).named("part"),
            place => (x.shuffle([i]) * (-4.0 * f64::from(place)).exp2()).named("part"),
        };
        (0..8).map(part).collect()
    }

    /// The sum of codes without the zero point times activations. Codes become floats as the lowest bits of
    /// one, without a shift.
    fn times(&self, x: &[Val<'k>], zero: i64) -> Val<'k> {
        const BASE: f32 = 8_388_608.0;
        let code = |i: usize| {
            let place = 4 * (i % 4);
            let bits = (self.words[i / 4] & (0xf << place)) | i64::from(BASE.to_bits());
            bits.bits_as(ExprType::F32) - (f64::from(BASE) + (zero << place) as f64)
        };
        (1..x.len()).fold(code(0) * x[0], |sum, i| code(i).fma(x[i], sum))
    }
}

/// Columns that a lane reads at a time: 4 to 16 bytes of weights.
fn piece(weight: MatmulWeight) -> i64 {
    match weight {
        MatmulWeight::Plain(PlainType::F32) => 4,
        MatmulWeight::Plain(PlainType::F16 | PlainType::BF16) => 8,
        MatmulWeight::Packed(format) if format.fills_bytes() => 8,
        // One code after the other.
        MatmulWeight::Packed(_) => 1,
    }
}
