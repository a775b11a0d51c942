//! The product of one row with weights in fragments on tensor cores: weights are the first factor, 16 rows of
//! them in a tile. Lanes read what they multiply from memory, 16 bytes at a time; warps of a block share the
//! columns out.
//!
//! All columns of the factor of activations are the same row, so that every lane has the sums of its rows.
//! Packed weights have a scale for each group, which multiplies sums of the group alone: those of a slice of
//! 32 columns begin with zeros.
//!
//! Activations are f16 or bf16, codes without their zero point are exact in both. `row` takes such codes
//! apart and multiplies them one by one, which was slower on hardware (docs/design/0044-tensor-cores.md).

use super::gemv::{ActivationPrologue, GemvEpilogue};
use super::operand::{IN_ORDER, OF_LANE, SplitOperand, fragment_order};
use super::{GpuMatmul, layout};
use crate::matmul::problem::{MatmulActivation, MatmulProblem};
use mlcc_ir::builder::KernelBuilder;
use mlcc_ir::fragment::M16N8K16;
use mlcc_ir::kernel::{ExprType, MemorySpace};
use mlcc_ir::types::{DType, Packing};
use mlcc_kernel_lang::{BufferView, Recorder, RegisterVar, ThreadTeam, Val, WARP};
use mlcc_quant::QuantError;
use mlcc_quant::fragments::{self, FragmentSizes};
use std::fmt;

/// Rows of a tile, and how far apart the two of a lane are.
const ROWS: i64 = M16N8K16.a.rows as i64;
const APART: i64 = 8;
/// Lanes that have a row.
const LANES: i64 = 4;
/// Columns whose weights lie together, in two slices.
const SLICE: i64 = fragments::SLICE as i64;
const COLUMNS: i64 = 2 * SLICE;
/// The number of these that a warp loads together.
const TOGETHER: i64 = 4;
/// Warps of a block.
const WARPS: i64 = 8;
/// Bytes that a lane loads before it multiplies them.
const AHEAD: i64 = 256;
/// Blocks that are enough to keep all multiprocessors busy: with at least that many, warps of a block have
/// different rows.
const BLOCKS: i64 = 256;
/// Most bytes of activations, which lie in the shared memory that every block has.
const ACTIVATION_BYTES: i64 = 40 << 10;

/// The plan of a product of one row on tensor cores.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct TensorCoreGemvPlan {
    /// Tiles of rows of each part of a block.
    across: u32,
    /// Warps that share the columns of a tile out.
    depth: u32,
    /// Parts of the columns of the result, equally long, whose sums reach the epilogue together.
    parts: u32,
    /// Every block computes the activations.
    computed: bool,
}

impl TensorCoreGemvPlan {
    /// The plan for a problem, where it fits.
    pub fn for_problem(problem: &MatmulProblem, parts: u32, computed: bool) -> Option<TensorCoreGemvPlan> {
        let (n, k, parts_of) = (problem.n as i64, problem.k as i64, i64::from(parts));
        let even = WARPS % parts_of == 0 && n % (ROWS * parts_of) == 0;
        let halves = matches!(problem.activation, MatmulActivation::F16 | MatmulActivation::BF16);
        let aligned = (problem.w_offset * problem.weight.buffer_bytes()).is_multiple_of(fragments::VECTOR);
        if !(even && halves && aligned && k * 2 <= ACTIVATION_BYTES) || problem.packing != Packing::Fragments
        {
            return None;
        }
        let tiles = n / ROWS;
        let across = [8, 4, 2].into_iter().find(|all| tiles / all >= BLOCKS).unwrap_or(1);
        let across = (across / parts_of).max(1);
        let depth = WARPS / (across * parts_of);
        Some(TensorCoreGemvPlan { across: across as u32, depth: depth as u32, parts, computed })
    }
}

impl fmt::Display for TensorCoreGemvPlan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let TensorCoreGemvPlan { across, depth, parts, computed } = self;
        let tiles = across * parts;
        write!(
            f,
            "tensor cores, {tiles} x {ROWS} rows of weights in a block, {depth} warps for each {ROWS}"
        )?;
        if *parts > 1 {
            write!(f, ", {parts} parts joined")?;
        }
        if *computed {
            write!(f, ", activations computed by each block")?;
        }
        Ok(())
    }
}

/// Emits the product as one nest of block and thread loops. With `prologue` the activations come from it.
pub fn emit_tensor_core_gemv(
    kb: &mut KernelBuilder,
    problem: &MatmulProblem,
    plan: TensorCoreGemvPlan,
    prologue: Option<&ActivationPrologue>,
    epilogue: &mut GemvEpilogue,
) -> Result<(), QuantError> {
    let layout = layout(problem)?;
    let sizes = FragmentSizes::new(problem.weight.dtype(), problem.n, problem.k)?;
    Recorder::within(kb, |k| {
        let (across, parts) = (i64::from(plan.across), i64::from(plan.parts));
        let team = ThreadTeam::new(k, WARPS * WARP);
        let tiles = problem.n as i64 / ROWS / parts;
        k.blocks("block", 0, (tiles + across - 1) / across, |block| {
            let gpu = GpuMatmul { k, problem, layout: &layout };
            let x = k.alloc("terms", gpu.factor(), [problem.k as i64], MemorySpace::Shared);
            let at = TensorCoreGemv {
                gpu,
                plan,
                sizes,
                weights: k.view(problem.w, [layout.len as i64]),
                x,
                partial: k.shared("partial", [WARPS * ROWS]).rows(ROWS),
                block,
            };
            match prologue {
                Some(prologue) => prologue(k, WARPS * WARP, &|column, value| at.keep(column, value)),
                None => team.each(problem.k as i64 / OF_LANE, |i| at.stage(i)),
            }
            k.barrier();
            team.run(|thread| at.multiply(thread));
            k.barrier();
            team.run(|thread| at.finish(thread, epilogue));
        });
    });
    Ok(())
}

#[derive(Clone, Copy)]
struct TensorCoreGemv<'k, 'a> {
    gpu: GpuMatmul<'k, 'a>,
    plan: TensorCoreGemvPlan,
    sizes: FragmentSizes,
    weights: BufferView<'k, 1>,
    /// Activations, those of eight columns in the order of the codes that they meet.
    x: BufferView<'k, 1>,
    /// Sums, `[warps, rows of a tile]`.
    partial: BufferView<'k, 2>,
    block: Val<'k>,
}

/// The weights of some times 64 columns that a lane has loaded: vectors, and scales `[groups][rows]`.
struct LoadedWeights<'k> {
    vectors: Vec<Vec<Val<'k>>>,
    scales: Vec<Val<'k>>,
}

/// A lane of a warp: its number, the first row that it has of a tile, and its place among the lanes of that
/// row.
#[derive(Clone, Copy)]
struct TileLane<'k> {
    number: Val<'k>,
    row: Val<'k>,
    quarter: Val<'k>,
    /// The start of its tile.
    tile: Val<'k>,
}

impl<'k> TensorCoreGemv<'k, '_> {
    // ---- activations

    /// Stores computed activations from a column on.
    fn keep(self, column: Val<'k>, value: Val<'k>) {
        let value = value.cast(self.x.dtype());
        for lane in 0..value.lanes() {
            let one = if value.lanes() == 1 { value } else { value.shuffle([lane]) };
            self.x.set([self.place_of(column + i64::from(lane))], one);
        }
    }

    /// The place of the activation of a column: codes in pairs are of columns that are 4 or 2 apart.
    fn place_of(self, column: Val<'k>) -> Val<'k> {
        let apart = i64::from(self.gpu.columns()[1]);
        let within = column % (2 * apart);
        column / (2 * apart) * (2 * apart) + within % apart * 2 + within / apart
    }

    /// Copies eight columns.
    fn stage(self, i: Val<'k>) {
        let piece = self.gpu.x().load((0, i * OF_LANE), OF_LANE as u32).named("x");
        self.x.set([i * OF_LANE], piece.shuffle(self.gpu.columns()));
    }

    // ---- products

    /// Bytes as elements of the weights' buffer.
    fn elements(self, bytes: usize) -> i64 {
        (bytes / self.gpu.problem.weight.buffer_bytes()) as i64
    }

    fn lane(self, warp: Val<'k>, number: Val<'k>) -> TileLane<'k> {
        let parts = i64::from(self.plan.parts);
        let of_block = warp / i64::from(self.plan.depth);
        let (across, part) = (of_block / parts, of_block % parts);
        let tile = self.tile_of(across);
        let tile = if self.is_even() { tile } else { tile.min(self.tiles() - 1) };
        let start = (part * self.tiles() + tile) * self.elements(self.sizes.tile());
        let start = start + self.gpu.problem.w_offset as i64;
        TileLane {
            number,
            row: (number / LANES).named("row"),
            quarter: (number % LANES).named("quarter"),
            tile: start.named("start"),
        }
    }

    /// Tiles of each part.
    fn tiles(self) -> i64 {
        self.gpu.problem.n as i64 / ROWS / i64::from(self.plan.parts)
    }

    fn tile_of(self, of_block: Val<'k>) -> Val<'k> {
        self.block * i64::from(self.plan.across) + of_block
    }

    /// True if all blocks have as many tiles of rows.
    fn is_even(self) -> bool {
        self.tiles() % i64::from(self.plan.across) == 0
    }

    /// The sums of a warp for its share of the columns.
    fn multiply(self, thread: Val<'k>) {
        let (k, depth) = (self.gpu.k, i64::from(self.plan.depth));
        let (warp, number) = ((thread / WARP).named("warp"), (thread % WARP).named("lane"));
        let lane = self.lane(warp, number);
        let along = warp % depth;
        let acc = k.reg("acc", k.zeros(DType::F32, self.lane_accumulators()));
        let pieces = self.gpu.problem.k as i64 / COLUMNS;
        // Each warp has `each` adjacent runs of 64 columns, and some have one more.
        let (each, more) = (pieces / depth, pieces % depth);
        let add = |first: Val<'k>, counts: &[i64]| {
            let firsts: Vec<Val> = (0..counts.len() as i64).map(|i| first + i * TOGETHER).collect();
            let loaded: Vec<LoadedWeights> =
                firsts.iter().zip(counts).map(|(&first, &count)| self.load(&lane, first, count)).collect();
            for (first, loaded) in firsts.into_iter().zip(&loaded) {
                self.add_pieces(&lane, loaded, first, &acc);
            }
        };
        let own = (along * each).named("own");
        let (rounds, of_round, rest) = self.rounds(each);
        let round = vec![TOGETHER; of_round as usize];
        k.serial("round", rounds, |at| add(own + at * (of_round * TOGETHER), &round));
        if !rest.is_empty() {
            add(own + rounds * of_round * TOGETHER, &rest);
        }
        if more > 0 {
            k.when(along.lt(more), || add(along + each * depth, &[1]));
        }
        for half in 0..2 {
            let sum = acc.get().shuffle([half * self.lane_accumulators() / 2]);
            k.when(lane.quarter.equals(0), || {
                self.partial.set([warp, lane.row + i64::from(half) * APART], sum)
            });
        }
    }

    /// The way in which a warp takes `pieces` times 64 columns: in some rounds of equally many times
    /// [`TOGETHER`] that are loaded before they are used, and then the rest.
    fn rounds(self, pieces: i64) -> (i64, i64, Vec<i64>) {
        let ahead = (AHEAD / (TOGETHER * (self.sizes.vectors() * fragments::VECTOR) as i64)).max(1);
        let times = pieces / TOGETHER;
        let rounds = times.div_euclid(ahead) + i64::from(times % ahead > 0);
        let of_round = if rounds > 0 { times / rounds } else { 0 };
        // The last times of columns that are no whole rounds, and columns that are no whole time.
        let left = (times - rounds * of_round) * TOGETHER + pieces % TOGETHER;
        let whole = vec![TOGETHER; (left / TOGETHER) as usize];
        let part = (left % TOGETHER > 0).then_some(left % TOGETHER);
        (rounds, of_round, whole.into_iter().chain(part).collect())
    }

    /// Sums of a lane: of each of its rows, or a whole fragment where no scales come between.
    fn lane_accumulators(self) -> u32 {
        if self.gpu.scale_type().is_some() { 2 } else { M16N8K16.accumulator.elements_per_lane() }
    }

    /// Loads `count` times 64 columns.
    fn load(self, lane: &TileLane<'k>, first: Val<'k>, count: i64) -> LoadedWeights<'k> {
        let sizes = self.sizes;
        let (vector, warp) = (self.elements(fragments::VECTOR), self.elements(fragments::WARP_VECTOR));
        let each = sizes.columns() as i64 / COLUMNS;
        // Where the block of 64 columns begins.
        let block = |at: Val<'k>| lane.tile + at / each * self.elements(sizes.block_bytes());
        let of = |i: i64| {
            let at = first + i;
            let within = at % each * self.elements(sizes.columns_bytes(COLUMNS as usize));
            let start = block(at) + within + lane.number * vector + self.elements(sizes.scale_bytes());
            (0..sizes.vectors() as i64)
                .map(|v| self.weights.load([start + v * warp], vector as u32).named("q"))
                .collect()
        };
        let scales = |i: i64| {
            let number = self.gpu.scale_type()?;
            let count = 2 * sizes.groups() as u32;
            let bytes = count * number.bytes().unwrap_or(1) as u32;
            let loaded = self.weights.load([block(first + i) + lane.row * i64::from(bytes)], bytes);
            Some(loaded.bits_as(ExprType::vector(number, count)).named("scales"))
        };
        LoadedWeights {
            scales: (0..count).filter_map(scales).collect(),
            vectors: (0..count).map(of).collect(),
        }
    }

    fn add_pieces(
        self,
        lane: &TileLane<'k>,
        loaded: &LoadedWeights<'k>,
        first: Val<'k>,
        acc: &RegisterVar<'k>,
    ) {
        let column = first * COLUMNS + lane.quarter * OF_LANE;
        let zeros = self.gpu.k.zeros(DType::F32, M16N8K16.accumulator.elements_per_lane());
        let slices = 2 * loaded.vectors.len() as i64;
        let sums = (0..slices).fold(acc.get(), |acc, slice| {
            let x = self.x.load([column + slice * SLICE], OF_LANE as u32).named("x");
            let Some(scales) = loaded.scales.get(slice as usize / 2) else {
                return self.multiply_slice(loaded, slice, x, acc);
            };
            let sums = self.multiply_slice(loaded, slice, x, zeros).shuffle([0, 2]);
            let of_group = if scales.lanes() == 2 { 0 } else { slice as u32 % 2 * 2 };
            sums.fma(scales.shuffle([of_group, of_group + 1]).cast(DType::F32), acc).named("acc")
        });
        acc.set(sums);
    }

    /// Adds a slice of weights times activations.
    fn multiply_slice(self, loaded: &LoadedWeights<'k>, slice: i64, x: Val<'k>, sums: Val<'k>) -> Val<'k> {
        let vectors = &loaded.vectors[slice as usize / 2];
        let piece = |half: i64| self.gpu.piece(self.sizes, vectors, (slice % 2 * 2 + half) as usize);
        let (upper, lower) = (piece(0), piece(1));
        (0..2).fold(sums, |sums, half| {
            let a = upper
                .with(lower, |u, l| u.shuffle_with(l, fragment_order(&M16N8K16.a, half, true, &IN_ORDER)));
            let b = SplitOperand::exact(
                x.shuffle(fragment_order(&M16N8K16.b, half, false, &IN_ORDER)).named("b"),
            );
            a.terms(&b).into_iter().fold(sums, |sums, (a, b)| sums.mma(a, b).named("sums"))
        })
    }

    // ---- results

    /// A thread per column of the block: adds what the warps have, in their order.
    fn finish(self, thread: Val<'k>, epilogue: &mut GemvEpilogue) {
        let (k, depth, parts) = (self.gpu.k, i64::from(self.plan.depth), i64::from(self.plan.parts));
        let (of_block, column) = (thread / ROWS, thread % ROWS);
        let tile = self.tile_of(of_block);
        let mut has = thread.lt(i64::from(self.plan.across) * ROWS);
        if !self.is_even() {
            has = has & tile.lt(self.tiles());
        }
        k.when(has, || {
            let sum = |part: i64| {
                let of_warp = |warp: i64| self.partial.at([(of_block * parts + part) * depth + warp, column]);
                (1..depth).fold(of_warp(0), |sum, warp| sum + of_warp(warp)).named("sum")
            };
            let sums: Vec<Val> = (0..parts).map(sum).collect();
            epilogue(k, (tile * ROWS + column).named("column"), &sums);
        });
    }
}
