//! The product of one row with 4-bit weights on tensor cores. A warp takes tiles of 16 rows of weights and 128 columns, which its lanes
//! read from memory as they lie, 16 bytes each; warps of a block share the columns out.
//!
//! The 16 bytes of a lane are a group of 32 columns, and the four lanes that have a row have four groups of it, each with a scale of its
//! own. So the factor of activations has four columns, one for each of these groups: in a column only the lanes with its group have
//! activations, the others zeros, and the four sums of a row come apart. They are f32 and are multiplied by the scales of their groups.
//! The other four columns of the factor are zeros.
//!
//! Activations are f16 or bf16, codes without their zero point are exact in both. `row` takes such codes apart and multiplies them one by one, which
//! was slower on hardware (docs/design/0044-tensor-cores.md).

use super::codes::{half_codes, half_order, nibbles};
use super::matrix::{IN_ORDER, order};
use super::row::{Prologue, RowEpilogue};
use super::{Gpu, layout};
use crate::product::problem::{Activation, Product};
use mlcc_ir::builder::KernelBuilder;
use mlcc_ir::format::{Format, ScaleType};
use mlcc_ir::fragment::M16N8K16;
use mlcc_ir::kernel::{BinOp, Space, Ty};
use mlcc_ir::types::DType;
use mlcc_kernel_lang::{Recorder, Reg, Team, Val, View, WARP, fold_lanes};
use mlcc_quant::QuantError;
use mlcc_quant::layout::Region;
use std::fmt;

/// Rows of a tile, and how far apart the two of a lane are.
const ROWS: i64 = M16N8K16.a.rows as i64;
const APART: i64 = 8;
/// Columns of a group, of a tile, and those that a lane multiplies at once.
const GROUP: i64 = 32;
const COLUMNS: i64 = 128;
const PIECE: i64 = 8;
/// Pieces of a group; in shared memory those of the four groups lie together.
const PIECES: i64 = GROUP / PIECE;
const GROUPS: i64 = COLUMNS / GROUP;
/// Warps of a block.
const WARPS: i64 = 8;
/// Tiles of columns that a warp loads before it multiplies them.
const UNROLL: i64 = 8;
/// Blocks that are enough to keep all multiprocessors busy: with more rows than that, warps have different ones.
const BLOCKS: i64 = 256;
/// Most bytes of activations, which lie in the shared memory that every block has.
const ACTIVATION_BYTES: i64 = 40 << 10;

/// How a product of one row is computed on tensor cores.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct RowTiles {
    /// Tiles of rows of a block.
    across: u32,
    /// Warps that share the columns of a tile out.
    depth: u32,
    /// Parts of the columns of the result, equally long, whose sums come to the epilogue together.
    parts: u32,
    /// Every block computes the activations.
    computed: bool,
}

impl RowTiles {
    /// The plan for a problem, where it fits.
    pub fn of(problem: &Product, parts: u32, computed: bool) -> Result<Option<RowTiles>, QuantError> {
        let (n, k, of_tile) = (problem.n as i64, problem.k as i64, i64::from(parts));
        let even = ROWS % of_tile == 0 && n % ROWS == 0 && k % COLUMNS == 0;
        let halves = matches!(problem.activation, Activation::F16 | Activation::BF16);
        if !(even && halves && k * 2 <= ACTIVATION_BYTES) || nibbles(problem.weight).is_none() {
            return Ok(None);
        }
        let Region::Group { spec, codes, scales, .. } = &layout(problem)?.region else { return Ok(None) };
        let aligned = codes.offset % 16 == 0 && scales.offset % 4 == 0;
        if spec.group as i64 != GROUP || spec.format.scale != ScaleType::F16 || !aligned {
            return Ok(None);
        }
        let tiles = n / ROWS;
        let across = [8, 4, 2].into_iter().find(|across| tiles / across >= BLOCKS).unwrap_or(1);
        Ok(Some(RowTiles { across: across as u32, depth: (WARPS / across) as u32, parts, computed }))
    }
}

impl fmt::Display for RowTiles {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let RowTiles { across, depth, parts, computed } = self;
        write!(
            f,
            "tensor cores, {across} x {ROWS} rows of weights in a block, {depth} warps for each {ROWS}"
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

/// Emits the product as one nest of block and thread loops. With `prologue` the activations are what it hands over.
pub fn emit_row_tiles(
    kb: &mut KernelBuilder,
    problem: &Product,
    plan: RowTiles,
    prologue: Option<&Prologue>,
    epilogue: &mut RowEpilogue,
) -> Result<(), QuantError> {
    let layout = layout(problem)?;
    let Some(format) = nibbles(problem.weight) else {
        panic!("a plan for 4-bit codes, with other weights");
    };
    let Region::Group { codes, scales, .. } = &layout.region else { panic!("packed weights without groups") };
    Recorder::within(kb, |k| {
        let across = i64::from(plan.across);
        let team = Team::new(k, WARPS * WARP);
        k.blocks("block", 0, (problem.n as i64 / ROWS + across - 1) / across, |block| {
            let dtype = if problem.activation == Activation::BF16 { DType::BF16 } else { DType::F16 };
            let x = k.alloc("terms", dtype, [problem.k as i64 + PIECE], Space::Shared);
            let at = Tiles {
                gpu: Gpu { k, problem, layout: &layout },
                plan,
                format,
                weights: k.view(problem.w, [layout.len as i64]),
                places: [codes, scales],
                x,
                partial: k.shared("partial", [WARPS * ROWS]).rows(ROWS),
                block,
            };
            match prologue {
                Some(prologue) => prologue(k, WARPS * WARP, &|column, value| at.keep(column, value)),
                None => team.each(problem.k as i64 / PIECE, |i| at.stage(i)),
            }
            let zeros = k.zeros(dtype, PIECE as u32);
            team.run(|thread| k.when(thread.equals(0), || x.set([problem.k as i64], zeros)));
            k.barrier();
            team.run(|thread| at.multiply(thread));
            k.barrier();
            team.run(|thread| at.finish(thread, epilogue));
        });
    });
    Ok(())
}

#[derive(Clone, Copy)]
struct Tiles<'k, 'a> {
    gpu: Gpu<'k, 'a>,
    plan: RowTiles,
    format: Format,
    weights: View<'k, 1>,
    /// Of codes and of scales.
    places: [&'a mlcc_quant::layout::Place; 2],
    /// Activations, `[tiles of columns, pieces, groups, 8]`, and eight zeros.
    x: View<'k, 1>,
    /// Sums, `[warps, rows of a tile]`.
    partial: View<'k, 2>,
    block: Val<'k>,
}

/// What a lane multiplies of a tile: 16 bytes of codes and two scales for each of two rows.
struct Loaded<'k> {
    tile: Val<'k>,
    codes: [Val<'k>; 2],
    scales: [Val<'k>; 2],
}

/// A lane of a warp.
#[derive(Clone, Copy)]
struct Lane<'k> {
    /// Its rows of weights.
    rows: [Val<'k>; 2],
    /// Its group of a tile of columns, as the weights' factor has it.
    group: Val<'k>,
    /// Where its activations begin, and from one piece to the next.
    x: [Val<'k>; 2],
}

impl<'k> Tiles<'k, '_> {
    // ---- activations

    /// Where an activation lies: pieces in the order of the codes that it meets.
    fn place_of(self, column: Val<'k>) -> Val<'k> {
        let (tile, group) = (column / COLUMNS, column / GROUP % GROUPS);
        let (piece, within) = (column / PIECE % PIECES, column % PIECE);
        let order = half_order(self.format, self.x.dtype());
        let half = PIECE / 2;
        debug_assert!(order.iter().enumerate().all(|(i, &c)| i as u32 == 2 * (c % 4) + c / 4));
        ((tile * PIECES + piece) * GROUPS + group) * PIECE + within % half * 2 + within / half
    }

    /// Stores computed activations from a column on.
    fn keep(self, column: Val<'k>, value: Val<'k>) {
        let value = value.cast(self.x.dtype());
        for lane in 0..value.lanes() {
            let one = if value.lanes() == 1 { value } else { value.shuffle([lane]) };
            self.x.set([self.place_of(column + i64::from(lane))], one);
        }
    }

    /// Copies piece `i`.
    fn stage(self, i: Val<'k>) {
        let piece = self.gpu.x().load((0, i * PIECE), PIECE as u32).named("x");
        self.x.set([self.place_of(i * PIECE)], piece.shuffle(half_order(self.format, self.x.dtype())));
    }

    // ---- products

    fn lane(self, warp: Val<'k>, lane: Val<'k>) -> Lane<'k> {
        let (n, parts) = (self.gpu.problem.n as i64, i64::from(self.plan.parts));
        let tile = self.tile_of(warp / i64::from(self.plan.depth));
        let tile = if self.is_even() { tile } else { tile.min(n / ROWS - 1) };
        let (row, group) = (lane / GROUPS, (lane % GROUPS).named("group"));
        let of_part = ROWS / parts;
        let weight_row = |r: Val<'k>| (r / of_part) * (n / parts) + tile * of_part + r % of_part;
        let own = row.equals(group);
        Lane {
            rows: [weight_row(row).named("row"), weight_row(row + APART).named("row")],
            group,
            x: [
                own.select(group * PIECE, self.gpu.problem.k as i64).named("x_first"),
                own.select(self.gpu.k.int(GROUPS * PIECE), 0).named("x_step"),
            ],
        }
    }

    fn tile_of(self, of_block: Val<'k>) -> Val<'k> {
        self.block * i64::from(self.plan.across) + of_block
    }

    /// Whether all blocks have as many tiles of rows.
    fn is_even(self) -> bool {
        (self.gpu.problem.n as i64 / ROWS) % i64::from(self.plan.across) == 0
    }

    /// The sums of a warp for its share of the columns.
    fn multiply(self, thread: Val<'k>) {
        let (k, depth) = (self.gpu.k, i64::from(self.plan.depth));
        let (warp, number) = ((thread / WARP).named("warp"), (thread % WARP).named("lane"));
        let lane = self.lane(warp, number);
        let along = warp % depth;
        let accs = [0, 1].map(|_| k.reg("acc", k.float(0.0)));
        let add = |first: Val<'k>, count: i64| {
            let loaded: Vec<Loaded> =
                (0..count).map(|u| self.load(&lane, (first + u) * depth + along)).collect();
            for tile in &loaded {
                self.add_tile(&lane, tile, &accs);
            }
        };
        // Rounds of several tiles for each warp, then what is left for all, then for some.
        let tiles = self.gpu.problem.k as i64 / COLUMNS;
        let each = tiles / depth;
        k.serial("round", each / UNROLL, |round| add(round * UNROLL, UNROLL));
        if each % UNROLL > 0 {
            add(k.int(each / UNROLL * UNROLL), each % UNROLL);
        }
        if tiles % depth > 0 {
            k.when(along.lt(tiles % depth), || add(k.int(each), 1));
        }
        for (i, acc) in accs.iter().enumerate() {
            let sum = fold_lanes(acc.get(), BinOp::Add, GROUPS / 2);
            k.when(lane.group.equals(0), || {
                self.partial.set([warp, number / GROUPS + i as i64 * APART], sum);
            });
        }
    }

    fn load(self, lane: &Lane<'k>, tile: Val<'k>) -> Loaded<'k> {
        let k = self.gpu.k;
        let tile = tile.named("tile");
        let bytes = |place: usize, row: Val<'k>, column: Val<'k>, count: u32| {
            let at = k.val(k.builder(|kb| self.places[place].emit(kb, row.id(), column.id())));
            self.weights.load([at], count)
        };
        let scales = |row| {
            let pair = bytes(1, row, tile * COLUMNS + lane.group % 2 * (2 * GROUP), 4);
            pair.bits_as(Ty::vector(DType::F16, 2)).named("scales")
        };
        Loaded {
            tile,
            codes: lane.rows.map(|row| bytes(0, row, tile * COLUMNS + lane.group * GROUP, 16).named("q")),
            scales: lane.rows.map(scales),
        }
    }

    fn add_tile(self, lane: &Lane<'k>, tile: &Loaded<'k>, accs: &[Reg<'k>; 2]) {
        let k = self.gpu.k;
        let mut sums = k.zeros(DType::F32, 4);
        for piece in 0..PIECES {
            let bytes = (PIECE / 2) as u32;
            let first = piece as u32 * bytes;
            let [upper, lower] = tile
                .codes
                .map(|codes| half_codes(k, self.format, codes.shuffle(first..first + bytes), self.x.dtype()));
            let x = self.x.load([lane.x[0] + (tile.tile * PIECES + piece) * lane.x[1]], PIECE as u32);
            let x = x.named("x");
            for half in 0..2 {
                let a = upper.shuffle_with(lower, order(&M16N8K16.a, half, true, &IN_ORDER));
                let b = x.shuffle(order(&M16N8K16.b, half, false, &IN_ORDER));
                sums = sums.mma(a.named("a"), b.named("b")).named("sums");
            }
        }
        for (row, (acc, scales)) in accs.iter().zip(&tile.scales).enumerate() {
            let scales = scales.cast(DType::F32);
            let of = |column: u32| (sums.shuffle([2 * row as u32 + column]), scales.shuffle([column]));
            let ((first, by_first), (second, by_second)) = (of(0), of(1));
            acc.set(second.fma(by_second, first.fma(by_first, acc.get())));
        }
    }

    // ---- results

    /// A thread per column of the block: adds what the warps have, in their order.
    fn finish(self, thread: Val<'k>, epilogue: &mut RowEpilogue) {
        let (k, depth) = (self.gpu.k, i64::from(self.plan.depth));
        let of_part = ROWS / i64::from(self.plan.parts);
        let (of_block, column) = (thread / of_part, thread % of_part);
        let tile = self.tile_of(of_block);
        let mut has = thread.lt(i64::from(self.plan.across) * of_part);
        if !self.is_even() {
            has = has & tile.lt(self.gpu.problem.n as i64 / ROWS);
        }
        k.when(has, || {
            let sum = |part: i64| {
                let of_warp = |warp: i64| self.partial.at([of_block * depth + warp, column + part * of_part]);
                (1..depth).fold(of_warp(0), |sum, warp| sum + of_warp(warp)).named("sum")
            };
            let sums: Vec<Val> = (0..i64::from(self.plan.parts)).map(sum).collect();
            epilogue(k, (tile * of_part + column).named("column"), &sums);
        });
    }
}
