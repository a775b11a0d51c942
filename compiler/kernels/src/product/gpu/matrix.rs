//! Products of many rows on tensor cores: a block of warps computes a tile of results. Slices of 32 columns of activations and weights come
//! through a ring of stages in shared memory by asynchronous copies, while the slice before them is multiplied.
//!
//! Numbers are those of f32 activations: an f32 is the sum of two bf16 (16 of its 24 bits, rounded), an f16 weight is one exactly, a code
//! without its zero point and a bf16 weight are one bf16. bf16 has the range of f32, so nothing overflows. Sums are f32; those of a slice
//! of packed weights are multiplied by the scale of its group before they are added. Where activations come as f16, both factors are f16,
//! as which f16 weights and codes without their zero point are exact, too.
//!
//! One kernel has the code for few rows and for many ([`work`]), since launches are the same in every call.
//!
//! Which of the 32 columns of a slice are called which column of a fragment does not matter, as long as both operands agree: a lane takes
//! neighbours, which it loads at once.

mod work;

use super::Gpu;
use super::codes::{half_codes, half_order, joined, upper_halves};
use crate::product::problem::{Activation, Epilogue, Product, Weight};
use mlcc_ir::format::Zero;
use mlcc_ir::fragment::{Fragment, M16N8K16};
use mlcc_ir::kernel::{BufId, Space, Ty};
use mlcc_ir::types::DType;
use mlcc_kernel_lang::matrix::place;
use mlcc_kernel_lang::{Team, Val, View, WARP};
use mlcc_quant::Layout;
use mlcc_quant::layout::Region;
use mlcc_quant::plain::Plain;
use mlcc_target::MatrixTile;
use work::Work;

/// Columns of a slice, and those of them that a lane multiplies.
const SLICE: i64 = 32;
const OF_LANE: i64 = 8;
/// Bytes of a copy.
const CHUNK: i64 = 16;
/// Bytes of scales that are copied for a row of a slice: the scale of its group, and of two bytes its neighbour.
const SCALE_BYTES: i64 = 4;
/// The columns of a lane as they lie.
pub(super) const IN_ORDER: [u32; OF_LANE as usize] = [0, 1, 2, 3, 4, 5, 6, 7];
/// Floats between rows of finished sums in shared memory, beyond those of a row: rows of a store begin in different banks.
const PAD: i64 = 8;

/// Whether the rows of weights and activations can be copied in pieces of 16 bytes, and weights are one or two bf16 each.
pub(super) fn fits(problem: &Product, layout: &Layout) -> bool {
    let Product { k, n, activation, .. } = *problem;
    let whole = |bytes: usize, by: i64| (bytes as i64) % by == 0;
    if !whole(k, SLICE) || matches!(activation, Activation::Codes(_)) {
        return false;
    }
    match &layout.region {
        Region::Plain { plain: Plain::F32, .. } => false,
        // Their products are exact in f32 loops, and held to that: two bf16 are too few bits of an activation.
        Region::Plain { plain: Plain::BF16, .. } if activation != Activation::BF16 => false,
        Region::Plain { place, plain } => whole(place.offset * plain.bytes(), CHUNK),
        Region::Group { spec, codes, scales, .. } => {
            let format = spec.format;
            let stored = n * k.div_ceil(spec.group) * format.scale.bytes();
            matches!(format.bits, 4 | 8)
                && matches!(format.zero, Zero::Constant(_))
                && whole(spec.group, SLICE)
                && whole(codes.offset, CHUNK)
                && whole(scales.offset, SCALE_BYTES)
                && whole(stored, SCALE_BYTES)
        }
    }
}

/// Where chunk `part` of row `row` of activations lies: rows of 128 bytes begin in the same bank, so every other row has its chunks
/// exchanged in pairs, and the lanes of a load touch all banks.
fn swizzled<'k>(dtype: DType, row: Val<'k>, part: Val<'k>) -> Val<'k> {
    match dtype {
        DType::F32 => part ^ (row & 1),
        // Two rows of 64 bytes fill the banks.
        _ => part,
    }
}

/// Shared memory of slices that are multiplied or on their way.
struct Ring {
    xs: BufId,
    ws: BufId,
    scales: Option<BufId>,
    /// Finished sums, where activations have no room for them.
    results: Option<BufId>,
}

/// The tile in shared memory and registers. A place of the ring is a slice: of a stage there are as many as warps along the depth.
struct Tile<'k> {
    team: Team<'k>,
    /// Activations, `[places, rows, columns of a slice]`.
    xs: View<'k, 3>,
    /// Weights likewise, packed ones in bytes.
    ws: View<'k, 3>,
    /// `[places, rows of weights, bytes]`, of packed weights.
    scales: Option<View<'k, 3>>,
    /// Sums, `[columns / 8, rows / 16, 4]` of a warp.
    acc: View<'k, 3>,
    /// Finished ones, of a column of warps.
    results: View<'k, 2>,
    /// First row and first column of the results.
    origin: [Val<'k>; 2],
}

/// What one warp multiplies: where its part begins, and where a lane begins in it.
struct Part<'k> {
    row: Val<'k>,
    column: Val<'k>,
    /// Row of the first elements of a lane in `a`, and column in `b`.
    group: Val<'k>,
    /// First of the columns of a slice that the lane multiplies.
    first: Val<'k>,
    lane: Val<'k>,
    /// Which of the slices of a stage.
    along: Val<'k>,
}

impl<'k> Gpu<'k, '_> {
    pub(super) fn matrix(self, tile: &MatrixTile, epilogue: &mut Epilogue) {
        let k = self.k;
        let (m, n) = (k.val(self.problem.m), self.problem.n as i64);
        let many = Work::of(tile);
        let few = work::few(&many, self.bytes());
        let team = Team::new(k, many.threads());
        let ring = self.ring(few.iter().chain([&many]));
        // Blocks side by side share weights, which stay in the second-level cache for all rows.
        if few.is_empty() {
            k.blocks("bm", 0, (m + (many.rows - 1)) / many.rows, |bm| {
                k.blocks("bn", 1, (n + many.columns - 1) / many.columns, |bn| {
                    self.block(&many, team, &ring, [bm, bn], epilogue);
                });
            });
            return;
        }
        let split = work::split(&many);
        k.blocks("bx", 0, (m + (split * many.rows - 1)) / (split * many.rows), |bx| {
            k.blocks("by", 1, (n + many.columns - 1) / many.columns * split, |by| {
                let mut least = 0;
                for work in &few {
                    // Two tiles of rows for each of columns, of which the first has rows always.
                    let at = [by % 2, by / 2];
                    let has = m.le(work.most) & k.int(least).lt(m);
                    let inside = (at[0] * work.rows).lt(m) & (at[1] * work.columns).lt(n);
                    // A grid may be for more rows than there are.
                    k.when(has & inside & bx.equals(0), || self.block(work, team, &ring, at, epilogue));
                    least = work.most;
                }
                let at = [bx * split + by % split, by / split];
                k.when(k.int(least).lt(m) & (at[0] * many.rows).lt(m), || {
                    self.block(&many, team, &ring, at, epilogue);
                });
            });
        });
    }

    /// Shared memory for the largest ring of those that a kernel may have.
    fn ring<'w>(self, works: impl Iterator<Item = &'w Work> + Clone) -> Ring {
        let k = self.k;
        let [x_dtype, w_dtype] = [self.problem.x, self.problem.w].map(|buf| k.flat(buf).dtype());
        let most = |size: &dyn Fn(&Work) -> i64| works.clone().map(size).max().unwrap_or(0);
        let shared = |name, dtype, elements| k.alloc(name, dtype, [elements], Space::Shared).buf();
        let packed = matches!(self.problem.weight, Weight::Packed(_));
        let width = self.slice_elements();
        let results = |w: &Work| w.rows * (w.warp_tile()[1] + PAD);
        let enough =
            x_dtype == DType::F32 && works.clone().all(|w| w.places() * w.rows * SLICE >= results(w));
        Ring {
            xs: shared("xs", x_dtype, most(&|w| w.places() * w.rows * SLICE)),
            ws: shared("ws", w_dtype, most(&|w| w.places() * w.columns * width)),
            scales: packed
                .then(|| shared("scales", DType::U8, most(&|w| w.places() * w.columns * SCALE_BYTES))),
            results: (!enough).then(|| shared("results", DType::F32, most(&results))),
        }
    }

    /// A tile of results.
    fn block(
        self,
        work: &Work,
        team: Team<'k>,
        ring: &Ring,
        [bm, bn]: [Val<'k>; 2],
        epilogue: &mut Epilogue,
    ) {
        let k = self.k;
        let places = work.places();
        let [mt, nt] = work.fragments();
        let at = Tile {
            team,
            xs: k.view(ring.xs, [places, work.rows, SLICE]),
            ws: k.view(ring.ws, [places, work.columns, self.slice_elements()]),
            scales: ring.scales.map(|buf| k.view(buf, [places, work.columns, SCALE_BYTES])),
            acc: k.registers("acc", [nt, mt, 4]),
            results: k.view(ring.results.unwrap_or(ring.xs), [work.rows, work.warp_tile()[1] + PAD]),
            origin: [bm * work.rows, bn * work.columns],
        };
        self.sum_up(work, &at);
        self.finish_tile(work, &at, epilogue);
    }

    /// Bytes of a slice of one row of activations and of weights, with its scale.
    fn bytes(self) -> work::SliceBytes {
        let [x, w] =
            [self.problem.x, self.problem.w].map(|buf| self.k.flat(buf).dtype().bytes().unwrap_or(1));
        let scale = if matches!(self.problem.weight, Weight::Packed(_)) { SCALE_BYTES } else { 0 };
        work::SliceBytes {
            x: SLICE * x as i64,
            w: self.slice_elements() * w as i64 + scale,
            slices: self.problem.k as i64 / SLICE,
        }
    }

    /// Elements of a row of weights in a slice.
    fn slice_elements(self) -> i64 {
        match self.problem.weight {
            Weight::Plain(_) => SLICE,
            Weight::Packed(format) => SLICE * format.bits as i64 / 8,
        }
    }

    // ---- the ring

    fn sum_up(self, work: &Work, at: &Tile<'k>) {
        let (k, stages) = (self.k, work.stages);
        // Of as many slices as there are warps along the depth.
        let steps = self.problem.k as i64 / (SLICE * work.depth);
        let zero = k.zeros(DType::F32, 4);
        let fragments = work.sums_of_lane() / 4;
        at.team.run(|_| k.unrolled("i", fragments, |i| at.acc.flat().set([i * 4], zero)));
        for step in 0..stages - 1 {
            if step < steps {
                self.fill(work, at, k.int(step));
            }
            k.commit();
        }
        k.serial("step", steps, |step| {
            k.wait((stages - 2) as u32);
            // All copies have landed, and nobody reads any more what is filled next.
            k.barrier();
            let next = step + (stages - 1);
            k.when(next.lt(steps), || self.fill(work, at, next));
            k.commit();
            at.team.run(|thread| self.multiply_slice(work, at, step, thread));
        });
        k.wait(0);
    }

    /// Begins to copy the slices of a step.
    fn fill(self, work: &Work, at: &Tile<'k>, step: Val<'k>) {
        let first = [step % work.stages * work.depth, step * work.depth];
        self.copy_x(work, at, first);
        self.copy_w(work, at, first);
    }

    /// Which slice of a step an item belongs to, of which each has so many, and its number there.
    fn in_slice(self, work: &Work, i: Val<'k>, each: i64) -> (Val<'k>, Val<'k>) {
        if work.depth == 1 { (self.k.int(0), i) } else { (i / each, i % each) }
    }

    /// Rows beyond the last one repeat it. `place` and `slice`: the first ones of the step.
    fn copy_x(self, work: &Work, at: &Tile<'k>, [place, slice]: [Val<'k>; 2]) {
        let (dtype, last) = (at.xs.dtype(), self.k.val(self.problem.m) + -1);
        let elements = CHUNK / dtype.bytes().unwrap_or(1) as i64;
        let parts = SLICE / elements;
        at.team.each(work.depth * work.rows * parts, |i| {
            let (along, i) = self.in_slice(work, i, work.rows * parts);
            let (row, part) = (i / parts, i % parts);
            let to = swizzled(dtype, row, part) * elements;
            let from = (at.origin[0] + row).min(last);
            let column = (slice + along) * SLICE + part * elements;
            at.xs.copy((place + along, row, to), CHUNK as u32, self.x(), (from, column));
        });
    }

    fn copy_w(self, work: &Work, at: &Tile<'k>, [first, slice]: [Val<'k>; 2]) {
        let k = self.k;
        let w = k.flat(self.problem.w);
        let last = self.problem.n as i64 - 1;
        let source = |column: Val<'k>| (at.origin[1] + column).min(last);
        let place = |place: &mlcc_quant::layout::Place, row: Val, col: Val| {
            k.val(k.builder(|kb| place.emit(kb, row.id(), col.id())))
        };
        let (codes, scales) = match &self.layout.region {
            Region::Plain { place, .. } => (place, None),
            Region::Group { codes, scales, .. } => (codes, Some(scales)),
        };
        let elements = CHUNK / at.ws.dtype().bytes().unwrap_or(1) as i64;
        let (width, parts) = (self.slice_elements(), self.slice_elements() / elements);
        at.team.each(work.depth * work.columns * parts, |i| {
            let (along, i) = self.in_slice(work, i, work.columns * parts);
            let (row, part) = (i / parts, i % parts);
            let column = (slice + along) * SLICE + part * (SLICE * elements / width);
            let from = place(codes, source(row), column);
            at.ws.copy((first + along, row, part * elements), CHUNK as u32, w, [from]);
        });
        if let (Some(scales), Some(to)) = (scales, at.scales) {
            at.team.each(work.depth * work.columns, |i| {
                let (along, row) = self.in_slice(work, i, work.columns);
                let from = place(scales, source(row), (slice + along) * SLICE);
                let from = from / SCALE_BYTES * SCALE_BYTES;
                to.copy((first + along, row, 0), SCALE_BYTES as u32, w, [from]);
            });
        }
    }

    // ---- the products

    fn part(self, work: &Work, thread: Val<'k>) -> Part<'k> {
        let [down, across] = work.warps;
        let [rows, columns] = work.warp_tile();
        let (warp, lane) = (thread / WARP, (thread % WARP).named("lane"));
        let [group, first] = place(&M16N8K16.a, lane, 0);
        // A lane has 2 neighbours of 16 columns; here it has 8 of 32.
        let first = first * (OF_LANE / 2);
        let (along, warp) = match work.depth {
            1 => (self.k.int(0), warp),
            _ => (warp / (down * across), warp % (down * across)),
        };
        Part { row: warp / across * rows, column: warp % across * columns, group, first, lane, along }
    }

    fn multiply_slice(self, work: &Work, at: &Tile<'k>, step: Val<'k>, thread: Val<'k>) {
        let k = self.k;
        let [mt, nt] = work.fragments();
        let part = self.part(work, thread);
        let slice = step * work.depth + part.along;
        let stage = (step % work.stages * work.depth + part.along).named("stage");
        let x = at.xs.row(stage).named("x_stage");
        let a: Vec<Vec<Operand>> = (0..mt).map(|i| self.activations(x, &part, i)).collect();
        k.unrolled("j", nt, |j| {
            let row = part.column + j * i64::from(M16N8K16.b.columns) + part.group;
            let b = self.weights(at.ws.row(stage), row, part.first);
            let scale = at.scales.map(|scales| self.scale(scales.row(stage), at, &part, (j, slice)));
            for (i, a) in a.iter().enumerate() {
                let place = (j, i as i64, 0);
                let old = at.acc.load(place, 4);
                let zero = k.zeros(DType::F32, 4);
                let sums = a.iter().zip(&b).fold(if scale.is_some() { zero } else { old }, |sums, (a, b)| {
                    a.terms(b).into_iter().fold(sums, |sums, (a, b)| sums.mma(a, b).named("sums"))
                });
                at.acc.set(place, scale.map_or(sums, |scale| sums.fma(scale, old)));
            }
        });
    }

    /// Fragments of 16 rows of activations, one for each half of a slice.
    fn activations(self, x: View<'k, 2>, part: &Part<'k>, i: i64) -> Vec<Operand<'k>> {
        let dtype = x.dtype();
        let elements = CHUNK / dtype.bytes().unwrap_or(1) as i64;
        let row = |r: i64| {
            let row = part.row + part.group + (i * i64::from(M16N8K16.a.rows) + r);
            let chunks: Vec<Val> = (0..OF_LANE / elements)
                .map(|c| {
                    let chunk = swizzled(dtype, row, part.first / elements + c);
                    x.load((row, chunk * elements), elements as u32).named("x")
                })
                .collect();
            joined(&chunks)
        };
        let [upper, lower] = [0, 8].map(row).map(|x| self.activation(x));
        let columns = self.columns();
        let of_half = |half| order(&M16N8K16.a, half, true, &columns);
        (0..2).map(|half| upper.with(lower, |u, l| u.shuffle_with(l, of_half(half)))).collect()
    }

    fn activation(self, x: Val<'k>) -> Operand<'k> {
        // With an f16 factor the other one is f16, too.
        if self.problem.activation == Activation::F16 { Operand::exact(x) } else { Operand::of(x) }
    }

    /// What both factors of the tensor cores are.
    fn factor(self) -> DType {
        if self.problem.activation == Activation::F16 { DType::F16 } else { DType::BF16 }
    }

    /// Fragments of a row of weights, one for each half of a slice.
    fn weights(self, w: View<'k, 2>, row: Val<'k>, first: Val<'k>) -> Vec<Operand<'k>> {
        let halves = self.problem.activation == Activation::F16;
        let all = match self.problem.weight {
            Weight::Plain(_) => {
                let weights = w.load((row, first), OF_LANE as u32).named("w");
                if halves { Operand::exact(weights) } else { Operand::of(weights) }
            }
            Weight::Packed(format) => {
                let bytes = OF_LANE * format.bits as i64 / 8;
                let codes = w.load((row, first * format.bits as i64 / 8), bytes as u32).named("q");
                Operand::exact(half_codes(self.k, format, codes, self.factor()).named("codes"))
            }
        };
        let of_half = |half| order(&M16N8K16.b, half, false, &IN_ORDER);
        (0..2).map(|half| all.map(|v| v.shuffle(of_half(half)))).collect()
    }

    /// The columns of a lane in the order in which it has weights.
    fn columns(self) -> [u32; OF_LANE as usize] {
        match self.problem.weight {
            Weight::Packed(format) => half_order(format, self.factor()),
            Weight::Plain(_) => IN_ORDER,
        }
    }

    /// The scale of each of a lane's sums.
    fn scale(
        self,
        scales: View<'k, 2>,
        at: &Tile<'k>,
        part: &Part<'k>,
        (j, slice): (Val<'k>, Val<'k>),
    ) -> Val<'k> {
        let Region::Group { spec, scales: stored, .. } = &self.layout.region else {
            panic!("scales of plain weights");
        };
        let k = self.k;
        let number = spec.number();
        let first = slice * SLICE;
        let of = |column: Val<'k>| {
            let source = (at.origin[1] + column).min(self.problem.n as i64 - 1);
            let byte = k.val(k.builder(|kb| stored.emit(kb, source.id(), first.id())));
            let bytes = scales.load((column, byte % SCALE_BYTES), number.bytes() as u32);
            bytes.bits_as(Ty::scalar(number.dtype())).cast(DType::F32).named("scale")
        };
        let sums = &M16N8K16.sums;
        let columns =
            [0, 1].map(|e| of(part.column + j * i64::from(sums.columns) + place(sums, part.lane, e)[1]));
        let pair = columns[0].splat(2).shuffle_with(columns[1].splat(2), [0, 2]);
        let element = |e| sums.place(0, e).1;
        pair.shuffle((0..sums.elements()).map(element)).named("scales")
    }

    // ---- the results

    /// Sums go through shared memory, so that neighbouring threads finish neighbouring columns: those of one column of warps after the
    /// other. Warps along the depth add theirs in their order.
    fn finish_tile(self, work: &Work, at: &Tile<'k>, epilogue: &mut Epilogue) {
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
    fn put(self, work: &Work, at: &Tile<'k>, part: &Part<'k>, adds: bool) {
        let results = at.results;
        let sums = &M16N8K16.sums;
        let [mt, nt] = work.fragments();
        self.k.unrolled("j", nt, |j| {
            for i in 0..mt {
                let held = at.acc.load((j, i, 0), 4);
                // Pairs of neighbours.
                for e in (0..sums.elements()).step_by(2) {
                    let [row, column] = place(sums, part.lane, e);
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

/// The elements of a fragment, of those that a lane has of half a slice (for `a` of two rows, one after the other), whose columns come in
/// this order; `rows`: of the rows of `a`, else of the columns of `b`.
pub(super) fn order(of: &Fragment, half: u32, rows: bool, columns: &[u32; OF_LANE as usize]) -> Vec<u32> {
    let element = |e| {
        let (row, column) = of.place(0, e);
        // Along the depth of the product a lane has 0, 1, 8 and 9 more than its first.
        let (depth, other) = if rows { (column, row) } else { (row, column) };
        let neighbour = depth % 2 + depth / 8 * 2 + 4 * half;
        columns[neighbour as usize] + if other > 0 { OF_LANE as u32 } else { 0 }
    };
    (0..of.elements()).map(element).collect()
}

/// Values as sums of one or two bf16, or as f16.
#[derive(Clone, Copy)]
struct Operand<'k> {
    high: Val<'k>,
    /// What `high` leaves; small beside it.
    low: Option<Val<'k>>,
}

impl<'k> Operand<'k> {
    fn exact(high: Val<'k>) -> Operand<'k> {
        Operand { high, low: None }
    }

    /// Of f32, f16 (exactly) or bf16.
    fn of(values: Val<'k>) -> Operand<'k> {
        match values.ty().dtype {
            DType::BF16 => Operand::exact(values),
            dtype => {
                let floats = values.cast(DType::F32).named("floats");
                let ty = Ty::vector(DType::U32, floats.lanes());
                let kept = (floats.bits_as(ty) & 0xffff_0000).bits_as(floats.ty());
                let rest = floats - kept;
                // Of an f16, 3 bits are left, else up to 16: half a unit of the last one that stays is added before the others are cut off.
                let rest = match dtype {
                    DType::F16 => rest,
                    _ => (rest.bits_as(ty) + 0x8000).bits_as(floats.ty()),
                };
                Operand { high: upper_halves(floats), low: Some(upper_halves(rest)) }
            }
        }
    }

    fn map(self, f: impl Fn(Val<'k>) -> Val<'k>) -> Operand<'k> {
        Operand { high: f(self.high).named("high"), low: self.low.map(|low| f(low).named("low")) }
    }

    fn with(self, other: Operand<'k>, f: impl Fn(Val<'k>, Val<'k>) -> Val<'k>) -> Operand<'k> {
        let low = self.low.zip(other.low).map(|(a, b)| f(a, b).named("low"));
        Operand { high: f(self.high, other.high).named("high"), low }
    }

    /// Products whose sum is that of both, small ones first; that of what both leave is beyond the last bit.
    fn terms(&self, other: &Operand<'k>) -> Vec<(Val<'k>, Val<'k>)> {
        let low = other.low.map(|low| (self.high, low));
        let terms = low.into_iter().chain(self.low.map(|low| (low, other.high)));
        terms.chain([(self.high, other.high)]).collect()
    }
}
