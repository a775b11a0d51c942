//! Products of many rows on tensor cores: a block of warps computes a tile of results. Slices of 32 columns
//! of activations and weights come through a ring of stages in shared memory by asynchronous copies, while
//! the slice before them is multiplied.
//!
//! Numbers are those of f32 activations: an f32 is the sum of two bf16 (16 of its 24 bits, rounded), an f16
//! weight is one exactly, a code without its zero point and a bf16 weight are one bf16. bf16 has the range of
//! f32, so nothing overflows. Sums are f32; those of a slice of packed weights are multiplied by the scale of
//! its group before they are added. Where activations come as f16, both factors are f16, as which f16 weights
//! and codes without their zero point are exact, too.
//!
//! One kernel has the code for few rows and for many ([`work`]), since launches are the same in every call.
//!
//! The order in which the 32 columns of a slice become columns of fragments does not matter, as long as both
//! operands agree: a lane takes neighbours, which it loads at once.

mod direct;
mod fragments;
mod row_major;
mod work;

use super::GpuMatmul;
use super::operand::{OF_LANE, SplitOperand, fragment_order};
use crate::matmul::problem::{MatmulActivation, MatmulEpilogue, MatmulProblem, MatmulWeight};
use mlcc_ir::format::ZeroPoint;
use mlcc_ir::fragment::M16N8K16;
use mlcc_ir::kernel::{BufId, MemorySpace};
use mlcc_ir::types::{DType, Packing};
use mlcc_kernel_lang::matrix::fragment_position;
use mlcc_kernel_lang::{BufferView, ThreadTeam, Val, WARP, join_vectors};
use mlcc_quant::layout::LayoutRegion;
use mlcc_quant::plain::PlainType;
use mlcc_quant::{TILE, TensorLayout};
use mlcc_target::MatrixTile;
use work::BlockTiling;

/// Columns of a slice of row-major weights.
const SLICE: i64 = 32;
/// Bytes of a copy.
const CHUNK: i64 = 16;
/// Bytes of scales that are copied for a row of a slice: the scale of its group, and of two bytes its
/// neighbour.
const SCALE_BYTES: i64 = 4;
/// Floats between rows of finished sums in shared memory, beyond those of a row: rows of a store begin in
/// different banks.
const PAD: i64 = 8;

/// True if the rows of weights and activations can be copied in pieces of 16 bytes, and weights are one or
/// two bf16 each.
pub(super) fn fits_tensor_cores(problem: &MatmulProblem, layout: &TensorLayout, tile: &MatrixTile) -> bool {
    let MatmulProblem { k, n, activation, packing, .. } = *problem;
    let whole = |bytes: usize, by: i64| (bytes as i64) % by == 0;
    // Two fragments of results meet the pieces that a lane loads together.
    let pairs = packing != Packing::Fragments || (tile.columns / tile.warps[1]).is_multiple_of(TILE as u32);
    if !pairs || !whole(k, SLICE) || matches!(activation, MatmulActivation::Codes(_)) {
        return false;
    }
    match &layout.region {
        LayoutRegion::Plain { plain: PlainType::F32, .. } => false,
        // Their products are exact in f32 loops, and held to that: two bf16 are too few bits of an
        // activation.
        LayoutRegion::Plain { plain: PlainType::BF16, .. } if activation != MatmulActivation::BF16 => false,
        LayoutRegion::Plain { place, plain } => whole(place.offset * plain.bytes(), CHUNK),
        LayoutRegion::Group { spec, codes, scales, .. } => {
            let format = spec.format;
            let stored = n * k.div_ceil(spec.group) * format.scale.bytes();
            matches!(format.bits, 4 | 8)
                && matches!(format.zero, ZeroPoint::Constant(_))
                && whole(spec.group, SLICE)
                && whole(codes.offset, CHUNK)
                && whole(scales.offset, SCALE_BYTES)
                && whole(stored, SCALE_BYTES)
        }
    }
}

/// The place of chunk `part` of row `row` of activations: rows of 128 bytes begin in the same bank, so every
/// other row has its chunks exchanged, those that a lane reads at once in pairs, and the lanes of a load
/// touch all banks.
fn swizzled<'k>(dtype: DType, slice: i64, row: Val<'k>, part: Val<'k>) -> Val<'k> {
    match (dtype, slice) {
        (DType::F32, _) => part ^ (row & 1),
        // Two rows of 64 bytes fill the banks.
        (_, SLICE) => part,
        _ => part ^ ((row & 1) * 4),
    }
}

/// Shared memory of slices that are multiplied or on their way.
struct StageBuffers {
    xs: BufId,
    ws: BufId,
    scales: Option<BufId>,
    /// Finished sums, where activations have no room for them.
    results: Option<BufId>,
}

/// The tile in shared memory and registers. A place of the ring is a slice: of a stage there are as many as
/// warps along the depth.
struct BlockTile<'k> {
    team: ThreadTeam<'k>,
    /// Activations, `[places, rows, columns of a slice]`.
    xs: BufferView<'k, 3>,
    /// Weights likewise, `[places, rows, elements]`, packed ones in bytes; in fragments
    /// `[places, tiles of 16 rows, elements]`.
    ws: BufferView<'k, 3>,
    /// `[places, rows of weights, bytes]`, of packed weights that have them elsewhere.
    scales: Option<BufferView<'k, 3>>,
    /// Sums, `[columns / 8, rows / 16, 4]` of a warp.
    acc: BufferView<'k, 3>,
    /// Finished ones, of a column of warps.
    results: BufferView<'k, 2>,
    /// First row and first column of the results.
    origin: [Val<'k>; 2],
}

/// The part of one warp: where it begins, and where a lane begins in it.
struct WarpTile<'k> {
    row: Val<'k>,
    column: Val<'k>,
    /// Row of the first elements of a lane in `a`, and column in `b`.
    group: Val<'k>,
    /// First of the columns of a slice that the lane multiplies.
    first: Val<'k>,
    lane: Val<'k>,
    /// The slice of a stage that the warp multiplies.
    along: Val<'k>,
}

impl<'k> GpuMatmul<'k, '_> {
    pub(super) fn tensor_core_matmul(self, tile: &MatrixTile, epilogue: &mut MatmulEpilogue) {
        let k = self.k;
        let (m, n) = (k.val(self.problem.m), self.problem.n as i64);
        let many = BlockTiling::from_tile(tile, self.slice());
        let few = work::few_row_tilings(&many, self.bytes());
        let team = ThreadTeam::new(k, many.threads());
        let any = if few.is_empty() { Vec::new() } else { work::all_tilings(&many, self.bytes()) };
        let ring = self.ring(any.iter().chain([&many]));
        // Blocks side by side share weights, which stay in the second-level cache for all rows.
        if few.is_empty() {
            k.blocks("bm", 0, (m + (many.rows - 1)) / many.rows, |bm| {
                k.blocks("bn", 1, (n + many.columns - 1) / many.columns, |bn| {
                    self.block(&many, team, &ring, [bm, bn], epilogue);
                });
            });
            return;
        }
        let split = work::blocks_per_tile(&many, &few, n);
        k.blocks("bx", 0, (m + (split * many.rows - 1)) / (split * many.rows), |bx| {
            k.blocks("by", 1, (n + many.columns - 1) / many.columns * split, |by| {
                let mut least = 0;
                for work in &few {
                    // Tiles of rows for each of columns, of which the first has rows always.
                    let at = [by % work.tiles(), by / work.tiles()];
                    let has = m.le(work.max_rows) & k.int(least).lt(m);
                    let inside = (at[0] * work.rows).lt(m) & (at[1] * work.columns).lt(n);
                    // A grid may be for more rows than there are.
                    k.when(has & inside & bx.equals(0), || self.block(work, team, &ring, at, epilogue));
                    least = work.max_rows;
                }
                let at = [bx * split + by % split, by / split];
                k.when(k.int(least).lt(m) & (at[0] * many.rows).lt(m), || {
                    self.block(&many, team, &ring, at, epilogue);
                });
            });
        });
    }

    /// Shared memory for the largest ring of those that a kernel may have.
    fn ring<'w>(self, works: impl Iterator<Item = &'w BlockTiling> + Clone) -> StageBuffers {
        let k = self.k;
        let [x_dtype, w_dtype] = [self.problem.x, self.problem.w].map(|buf| k.flat(buf).dtype());
        let most = |size: &dyn Fn(&BlockTiling) -> i64| works.clone().map(size).max().unwrap_or(0);
        let shared = |name, dtype, elements| k.alloc(name, dtype, [elements], MemorySpace::Shared).buf();
        let scaled = self.fragments().is_none() && matches!(self.problem.weight, MatmulWeight::Packed(_));
        let slice = self.slice();
        let results = |w: &BlockTiling| w.rows * (w.warp_tile()[1] + PAD);
        let enough =
            x_dtype == DType::F32 && works.clone().all(|w| w.places() * w.rows * slice >= results(w));
        StageBuffers {
            xs: shared("xs", x_dtype, most(&|w| w.places() * w.rows * slice)),
            ws: shared("ws", w_dtype, most(&|w| w.places() * self.weights_of(w))),
            scales: scaled
                .then(|| shared("scales", DType::U8, most(&|w| w.places() * w.columns * SCALE_BYTES))),
            results: (!enough).then(|| shared("results", DType::F32, most(&results))),
        }
    }

    /// Elements of weights in a place of the ring.
    fn weights_of(self, work: &BlockTiling) -> i64 {
        match self.fragments() {
            Some(sizes) if work.direct => {
                let bytes = self.direct_bytes(self.slice_of(sizes), work.columns);
                bytes / self.problem.weight.buffer_bytes() as i64
            }
            _ => {
                let [rows, width] = self.stored();
                work.columns / rows * width
            }
        }
    }

    /// The number of rows of weights that are together in a slice, and of their elements.
    fn stored(self) -> [i64; 2] {
        let bytes = self.k.flat(self.problem.w).dtype().bytes().unwrap_or(1) as i64;
        match self.fragments() {
            None => [1, self.row_elements()],
            Some(sizes) => [TILE as i64, self.slice_of(sizes).bytes() / bytes],
        }
    }

    /// A tile of results.
    fn block(
        self,
        work: &BlockTiling,
        team: ThreadTeam<'k>,
        ring: &StageBuffers,
        [bm, bn]: [Val<'k>; 2],
        epilogue: &mut MatmulEpilogue,
    ) {
        let k = self.k;
        let places = work.places();
        let [mt, nt] = work.fragments();
        let [rows, width] = self.stored();
        let at = BlockTile {
            team,
            xs: k.view(ring.xs, [places, work.rows, self.slice()]),
            ws: k.view(ring.ws, [places, work.columns / rows, width]),
            scales: ring.scales.map(|buf| k.view(buf, [places, work.columns, SCALE_BYTES])),
            acc: k.registers("acc", [nt, mt, 4]),
            results: k.view(ring.results.unwrap_or(ring.xs), [work.rows, work.warp_tile()[1] + PAD]),
            origin: [bm * work.rows, bn * work.columns],
        };
        match self.fragments() {
            Some(sizes) if work.direct => self.sum_directly(self.slice_of(sizes), work, &at),
            _ => self.sum_up(work, &at),
        }
        self.finish_tile(work, &at, epilogue);
    }

    /// Bytes of a slice of one row of activations and of weights, with its scale.
    fn bytes(self) -> work::SliceBytes {
        let [x, w] =
            [self.problem.x, self.problem.w].map(|buf| self.k.flat(buf).dtype().bytes().unwrap_or(1) as i64);
        let [rows, width] = self.stored();
        let scaled = self.fragments().is_none() && matches!(self.problem.weight, MatmulWeight::Packed(_));
        let scale = if scaled { SCALE_BYTES } else { 0 };
        work::SliceBytes {
            x: self.slice() * x,
            w: width * w / rows + scale,
            slices: self.problem.k as i64 / self.slice(),
            n: self.problem.n as i64,
            tile: rows.max(M16N8K16.b.columns.into()),
            direct: self.fragments().map(|sizes| self.direct_bytes(self.slice_of(sizes), work::COLUMNS)),
        }
    }

    /// Columns of a slice.
    fn slice(self) -> i64 {
        self.fragments().map_or(SLICE, |sizes| self.slice_of(sizes).columns)
    }

    // ---- the ring

    fn sum_up(self, work: &BlockTiling, at: &BlockTile<'k>) {
        let (k, stages) = (self.k, work.stages);
        // Steps of as many slices as there are warps along the depth.
        let steps = self.problem.k as i64 / (self.slice() * work.depth);
        at.team.run(|_| self.clear(work, at));
        for step in 0..stages - 1 {
            if step < steps {
                self.fill(work, at, k.int(step));
            }
            k.commit_copies();
        }
        k.serial("step", steps, |step| {
            k.wait_copies((stages - 2) as u32);
            // All copies have landed, and the stage that is filled next is no longer read.
            k.barrier();
            let next = step + (stages - 1);
            k.when(next.lt(steps), || self.fill(work, at, next));
            k.commit_copies();
            at.team.run(|thread| self.multiply_slice(work, at, step, thread));
        });
        k.wait_copies(0);
    }

    fn clear(self, work: &BlockTiling, at: &BlockTile<'k>) {
        let zero = self.k.zeros(DType::F32, 4);
        self.k.unrolled("i", work.lane_accumulators() / 4, |i| at.acc.flat().set([i * 4], zero));
    }

    /// Begins to copy the slices of a step.
    fn fill(self, work: &BlockTiling, at: &BlockTile<'k>, step: Val<'k>) {
        let first = [step % work.stages * work.depth, step * work.depth];
        self.copy_x(work, at, first);
        match self.fragments() {
            None => self.copy_rows(work, at, first),
            Some(sizes) => self.copy_fragments(self.slice_of(sizes), work, at, first),
        }
    }

    /// The slice of a step to which an item belongs, where each slice has `each` items, and its number there.
    fn in_slice(self, work: &BlockTiling, i: Val<'k>, each: i64) -> (Val<'k>, Val<'k>) {
        if work.depth == 1 { (self.k.int(0), i) } else { (i / each, i % each) }
    }

    /// Rows beyond the last one repeat it. `place` and `slice`: the first ones of the step.
    fn copy_x(self, work: &BlockTiling, at: &BlockTile<'k>, [place, slice]: [Val<'k>; 2]) {
        let (dtype, last) = (at.xs.dtype(), self.k.val(self.problem.m) + -1);
        let elements = CHUNK / dtype.bytes().unwrap_or(1) as i64;
        let width = self.slice();
        let parts = width / elements;
        at.team.each(work.depth * work.rows * parts, |i| {
            let (along, i) = self.in_slice(work, i, work.rows * parts);
            let (row, part) = (i / parts, i % parts);
            let to = swizzled(dtype, width, row, part) * elements;
            let from = (at.origin[0] + row).min(last);
            let column = (slice + along) * width + part * elements;
            at.xs.start_copy((place + along, row, to), CHUNK as u32, self.x(), (from, column));
        });
    }

    // ---- the products

    fn part(self, work: &BlockTiling, thread: Val<'k>) -> WarpTile<'k> {
        let [down, across] = work.warps;
        let [rows, columns] = work.warp_tile();
        let (warp, lane) = (thread / WARP, (thread % WARP).named("lane"));
        let [group, first] = fragment_position(&M16N8K16.a, lane, 0);
        // A lane has 2 neighbours of 16 columns; here it has 8 of 32.
        let first = first * (OF_LANE / 2);
        let (along, warp) = match work.depth {
            1 => (self.k.int(0), warp),
            _ => (warp / (down * across), warp % (down * across)),
        };
        WarpTile { row: warp / across * rows, column: warp % across * columns, group, first, lane, along }
    }

    fn multiply_slice(self, work: &BlockTiling, at: &BlockTile<'k>, step: Val<'k>, thread: Val<'k>) {
        let part = self.part(work, thread);
        let slice = step * work.depth + part.along;
        let stage = (step % work.stages * work.depth + part.along).named("stage");
        match self.fragments() {
            None => self.multiply_rows(work, at, &part, [stage, slice]),
            Some(sizes) => self.multiply_fragments(self.slice_of(sizes), work, at, &part, stage),
        }
    }

    /// Adds the products with a fragment `j` of weights, given for each half of 32 columns.
    fn add(
        self,
        at: &BlockTile<'k>,
        a: &[Vec<SplitOperand<'k>>],
        j: Val<'k>,
        b: &[SplitOperand<'k>],
        scale: Option<Val<'k>>,
    ) {
        for (i, a) in a.iter().enumerate() {
            let place = (j, i as i64, 0);
            let old = at.acc.load(place, 4);
            let zero = self.k.zeros(DType::F32, 4);
            let sums = a.iter().zip(b).fold(if scale.is_some() { zero } else { old }, |sums, (a, b)| {
                a.terms(b).into_iter().fold(sums, |sums, (a, b)| sums.mma(a, b).named("sums"))
            });
            at.acc.set(place, scale.map_or(sums, |scale| sums.fma(scale, old)));
        }
    }

    /// The values of two neighbouring columns of results, for each of a lane's sums.
    fn of_columns(self, columns: [Val<'k>; 2]) -> Val<'k> {
        let sums = &M16N8K16.accumulator;
        let pair = columns[0].splat(2).shuffle_with(columns[1].splat(2), [0, 2]);
        pair.shuffle((0..sums.elements_per_lane()).map(|e| sums.coordinates(0, e).1)).named("scales")
    }

    /// Fragments of 16 rows of activations, one for each half of the `s`-th 32 columns of a slice.
    fn activations(self, x: BufferView<'k, 2>, part: &WarpTile<'k>, i: i64, s: i64) -> Vec<SplitOperand<'k>> {
        let dtype = x.dtype();
        let elements = CHUNK / dtype.bytes().unwrap_or(1) as i64;
        let row = |r: i64| {
            let row = part.row + part.group + (i * i64::from(M16N8K16.a.rows) + r);
            let chunks: Vec<Val> = (0..OF_LANE / elements)
                .map(|c| {
                    let chunk = part.first / elements + (s * SLICE / elements + c);
                    let chunk = swizzled(dtype, self.slice(), row, chunk);
                    x.load((row, chunk * elements), elements as u32).named("x")
                })
                .collect();
            join_vectors(&chunks)
        };
        self.factors_of_rows([0, 8].map(row))
    }

    /// Eight activations of each of two rows.
    fn factors_of_rows(self, rows: [Val<'k>; 2]) -> Vec<SplitOperand<'k>> {
        let [upper, lower] = rows.map(|x| self.activation(x));
        let columns = self.columns();
        let of_half = |half| fragment_order(&M16N8K16.a, half, true, &columns);
        (0..2).map(|half| upper.with(lower, |u, l| u.shuffle_with(l, of_half(half)))).collect()
    }

    fn activation(self, x: Val<'k>) -> SplitOperand<'k> {
        // With an f16 factor the other one is f16, too.
        if self.problem.activation == MatmulActivation::F16 {
            SplitOperand::exact(x)
        } else {
            SplitOperand::from_values(x)
        }
    }

    // ---- the results

    /// Sums go through shared memory, so that neighbouring threads finish neighbouring columns: those of one
    /// column of warps after the other. Warps along the depth add theirs in their order.
    fn finish_tile(self, work: &BlockTiling, at: &BlockTile<'k>, epilogue: &mut MatmulEpilogue) {
        let k = self.k;
        let rows = work.rows;
        let [_, columns] = work.warp_tile();
        let results = at.results;
        let (m, n) = (k.val(self.problem.m), self.problem.n as i64);
        k.serial("across", work.warps[1], |across| {
            for along in 0..work.depth {
                k.barrier();
                at.team.run(|thread| {
                    let part = self.part(work, thread);
                    let its = part.column.equals(across * columns);
                    let its = if work.depth == 1 { its } else { its & part.along.equals(along) };
                    k.when(its, || self.put(work, at, &part, along > 0));
                });
            }
            k.barrier();
            at.team.each(rows * columns, |i| {
                let (r, c) = (i / columns, i % columns);
                let (row, col) = (at.origin[0] + r, at.origin[1] + across * columns + c);
                k.when(row.lt(m) & col.lt(n), || {
                    self.finish(
                        epilogue,
                        row.named("row"),
                        col.named("col"),
                        results.at([r, c]).named("sum"),
                    );
                });
            });
        });
    }

    /// Stores the sums of a warp, or adds them to those that are there.
    fn put(self, work: &BlockTiling, at: &BlockTile<'k>, part: &WarpTile<'k>, adds: bool) {
        let results = at.results;
        let sums = &M16N8K16.accumulator;
        let [mt, nt] = work.fragments();
        self.k.unrolled("j", nt, |j| {
            for i in 0..mt {
                let held = at.acc.load((j, i, 0), 4);
                // Pairs of neighbours.
                for e in (0..sums.elements_per_lane()).step_by(2) {
                    let [row, column] = fragment_position(sums, part.lane, e);
                    let row = part.row + (row + i * i64::from(sums.rows));
                    let column = j * i64::from(sums.columns) + column;
                    let pair = held.shuffle([e, e + 1]);
                    let pair = if adds { results.load((row, column), 2) + pair } else { pair };
                    results.set([row, column], pair);
                }
            }
        });
    }
}
