//! From chunk to chunk: a block has some rows of a head's state, each of its warps sixteen of them and some
//! of their columns, in fragments of sums. The values that warps retrieve and read from their columns are
//! added up in shared memory.

use super::super::step::HeadRows;
use super::{COLUMNS, ChunkScan, HALVES, PreparedLayout, SIDE, STEPS, TOGETHER, second_factor, units};
use crate::halves::{SplitFragment, side_by_side, split_floats};
use crate::scan::matrix::MatrixScan;
use mlcc_ir::fragment::M16N8K16;
use mlcc_ir::kernel::{BufId, ExprType, MemorySpace};
use mlcc_ir::types::DType;
use mlcc_kernel_lang::matrix::fragment_position;
use mlcc_kernel_lang::{BufferView, Recorder, ThreadTeam, Val, WARP};

/// Chunks in shared memory: one is multiplied, the others are on their way.
const STAGES: i64 = 2;
/// Most groups of rows of a block: together they read what all rows need.
const GROUPS: i64 = 2;
/// Fragments of sixteen columns that a warp has, where a state has as many: the exchange between warps grows
/// with the number of warps, the work of one warp with the number of fragments.
const OF_WARP: i64 = 2;
/// Elements of a fragment of sums in a lane, and such fragments, 16 x 8, in one of sixteen columns or steps.
const OF_LANE: i64 = 4;
const TILES: i64 = 2;
/// Numbers of a step in shared memory: lanes of a fragment of sums write to different banks.
const PITCH: i64 = 20;

/// Rows of a head, sixteen for each of its `groups`.
#[derive(Clone, Copy)]
struct ChunkWalk<'a, 'k> {
    k: &'k Recorder,
    scan: &'a MatrixScan<'a, 'k>,
    layout: PreparedLayout,
    team: ThreadTeam<'k>,
    groups: i64,
    head: Val<'k>,
    /// The first group among those of the head.
    group: Val<'k>,
    /// `[chunks * heads, units, 8]`, and `[stages, units, 8]` of the block.
    prepared: BufferView<'k, 3>,
    ring: BufferView<'k, 3>,
    state: BufferView<'k, 2>,
    /// Both parts of the same, as first factors: `[fragments * 2, 8]`.
    factors: BufferView<'k, 2>,
    /// Sums that a warp retrieves from its columns, and from the values, for each step.
    state_readout: BufferView<'k, 2>,
    value_readout: BufferView<'k, 2>,
    /// Values that warps retrieve, `[groups * warps, tiles * lanes, 4]`, and read,
    /// `[groups * warps, steps, rows]`.
    retrieved: BufferView<'k, 3>,
    readout: BufferView<'k, 3>,
    /// Warps along the columns.
    warps: i64,
    of_warp: i64,
}

/// A thread's part of a block.
#[derive(Clone, Copy)]
struct WalkThread<'k> {
    group: Val<'k>,
    /// The columns, by warp.
    warp: Val<'k>,
    lane: Val<'k>,
}

impl ChunkScan {
    /// Records the kernel that goes from chunk to chunk. The only input that `scan` has is the state.
    pub fn walk<'k>(&self, scan: &MatrixScan<'_, 'k>, prepared: BufId) {
        let (k, layout, shape) = (scan.k, self.layout(), self.shape);
        let groups = if shape.rows % (GROUPS * SIDE) == 0 { GROUPS } else { 1 };
        let of_warp = layout.fragments().min(OF_WARP);
        let (per_head, warps) = (shape.rows / (groups * SIDE), layout.fragments() / of_warp);
        k.blocks("block", 0, shape.heads * per_head, |block| {
            let (head, group) =
                ((block / per_head).named("head"), (block % per_head * groups).named("group"));
            let of_block = layout.shared_units() + groups * PreparedLayout::VALUES;
            let block = ChunkWalk {
                k,
                scan,
                layout,
                team: ThreadTeam::new(k, groups * warps * WARP),
                groups,
                head,
                group,
                prepared: units(scan, layout, prepared),
                ring: k.alloc("ring", DType::BF16, [STAGES, of_block, TOGETHER], MemorySpace::Shared),
                state: k.registers("state", [TILES * of_warp, OF_LANE]),
                factors: k.alloc("factors", HALVES.dtype, [2 * of_warp, TOGETHER], MemorySpace::Local),
                state_readout: k.registers("own", [TILES, OF_LANE]),
                value_readout: k.registers("said", [TILES, OF_LANE]),
                retrieved: k.shared("found", [groups * warps, TILES * WARP, OF_LANE]),
                readout: k.shared("read", [groups * warps, STEPS, PITCH]),
                warps,
                of_warp,
            };
            block.run();
        });
    }
}

impl<'k> ChunkWalk<'_, 'k> {
    fn run(self) {
        let (k, scan) = (self.k, self.scan);
        let length = k.dim(&scan.length).named("length");
        let chunks = k.dim(&scan.length.ceil_div(STEPS)).named("chunks");
        self.team.run(|t| {
            self.each_pair(t, |tile, pair, at| {
                self.state.set((tile, pair * 2), k.flat(scan.inputs[0]).load([at], 2));
            });
            self.keep_factors();
        });
        for stage in 0..STAGES - 1 {
            k.when(k.int(0).lt(chunks), || self.fill(k.int(stage), chunks));
            k.commit_copies();
        }
        k.serial("chunk", chunks, |chunk| {
            k.wait_copies(STAGES as u32 - 2);
            // The chunk has landed, everything is read, and the stage that is filled next is no longer
            // needed.
            k.barrier();
            let prepared = self.ring.row(chunk % STAGES);
            if self.layout.corrects {
                self.team.run(|t| self.retrieve(t, prepared));
            }
            // Beyond the last chunk, the last one once more: products do not wait for a branch.
            self.fill(chunk + (STAGES - 1), chunks);
            k.commit_copies();
            if self.layout.corrects {
                self.team.run(|t| self.store_retrieved(t));
            }
            k.when(k.int(0).lt(chunk), || self.store_readout(chunk - 1, length));
            k.barrier();
            self.team.run(|t| self.update_state(t, prepared));
        });
        k.wait_copies(0);
        k.barrier();
        k.when(k.int(0).lt(chunks), || self.store_readout(chunks + -1, length));
        self.team.run(|t| {
            self.each_pair(t, |tile, pair, at| {
                k.flat(scan.outputs[0]).set([at], self.state.load((tile, pair * 2), 2));
            });
        });
    }

    /// `body(tile, pair, element)` for what a lane has of the state: two neighbours of two rows.
    fn each_pair(self, t: Val<'k>, body: impl Fn(i64, i64, Val<'k>)) {
        let columns = self.layout.shape.columns;
        let part = self.walk_thread(t);
        let at = HeadRows { head: self.head, row: (self.group + part.group) * SIDE, rows: 1 };
        let first = self.scan.offset(self.scan.input_extent(0), at, 0);
        let [row, column] = fragment_position(&M16N8K16.accumulator, part.lane, 0);
        let column = part.warp * (self.of_warp * SIDE) + column;
        for (tile, pair) in (0..TILES * self.of_warp).flat_map(|tile| [(tile, 0), (tile, 1)]) {
            let further = i64::from(M16N8K16.accumulator.coordinates(0, 2).0) * pair;
            body(tile, pair, first + (row + further) * columns + column + tile * COLUMNS);
        }
    }

    /// Begins to copy a chunk: what all rows need, then the values of these.
    fn fill(self, chunk: Val<'k>, chunks: Val<'k>) {
        let shared = self.layout.shared_units();
        let from = (chunk.min(chunks + -1) * self.layout.shape.heads + self.head).named("from");
        let stage = (chunk % STAGES).named("stage");
        let of_rows = (self.group * PreparedLayout::VALUES).named("of_rows");
        let copy = |to: Val<'k>, unit: Val<'k>| {
            let bytes = 2 * TOGETHER as u32;
            self.ring.start_copy(
                [stage, to, self.k.int(0)],
                bytes,
                self.prepared,
                [from, unit, self.k.int(0)],
            );
        };
        self.team.each_slot(shared, |i, _| copy(i, i));
        self.team
            .each_slot(self.groups * PreparedLayout::VALUES, |i, _| copy(i + shared, of_rows + i + shared));
    }

    fn walk_thread(self, t: Val<'k>) -> WalkThread<'k> {
        let warp = t / WARP;
        let (group, warp) = ((warp / self.warps).named("group"), (warp % self.warps).named("warp"));
        WalkThread { group, warp, lane: (t % WARP).named("lane") }
    }

    /// The values of a group's rows, as first factor.
    fn values(self, prepared: BufferView<'k, 2>, of: WalkThread<'k>) -> SplitFragment<'k> {
        let first = (of.group * PreparedLayout::VALUES + self.layout.shared_units() + of.lane).named("first");
        let part = |part: i64| prepared.load((first + part * WARP, 0), TOGETHER as u32).named("values");
        SplitFragment { parts: [Some(part(0)), Some(part(1)), None] }
    }

    /// The readout of a warp's columns of the state for each step of a tile, by `P` or `Q`.
    fn read_state(self, kind: i64, part: WalkThread<'k>, prepared: BufferView<'k, 2>, tile: i64) -> Val<'k> {
        // Sums of their own, since a product waits for the sums that it is added to.
        let of_fragment = |fragment: i64| {
            let row = part.warp * self.of_warp + fragment;
            self.multiply_steps(self.state_as_factor(fragment), (kind, row, tile), part, prepared)
        };
        (1..self.of_warp).fold(of_fragment(0), |sum, fragment| (sum + of_fragment(fragment)).named("sum"))
    }

    /// The readout of the values.
    fn read_values(self, kind: i64, part: WalkThread<'k>, prepared: BufferView<'k, 2>, tile: i64) -> Val<'k> {
        let row = self.k.int(self.layout.fragments());
        self.multiply_steps(self.values(prepared, part), (kind, row, tile), part, prepared)
    }

    fn multiply_steps(
        self,
        factor: SplitFragment<'k>,
        (kind, row, tile): (i64, Val<'k>, i64),
        part: WalkThread<'k>,
        prepared: BufferView<'k, 2>,
    ) -> Val<'k> {
        let other = second_factor(prepared, self.layout.step_fragment(kind, row), tile, part.lane);
        factor.add_to(self.k.zeros(DType::F32, OF_LANE as u32), other)
    }

    /// Computes the values that each step retrieves.
    fn retrieve(self, t: Val<'k>, prepared: BufferView<'k, 2>) {
        let part = self.walk_thread(t);
        (0..TILES)
            .for_each(|tile| self.state_readout.set((tile, 0), self.read_state(0, part, prepared, tile)));
        // All warps need these, and they wait for nothing.
        (0..TILES)
            .for_each(|tile| self.value_readout.set((tile, 0), self.read_values(0, part, prepared, tile)));
    }

    fn store_retrieved(self, t: Val<'k>) {
        let part = self.walk_thread(t);
        for tile in 0..TILES {
            let at = (part.group * self.warps + part.warp, part.lane + tile * WARP, 0);
            self.retrieved.set(at, self.state_readout.load((tile, 0), OF_LANE as u32));
        }
    }

    /// Computes the readout of each step, then the state after the chunk.
    fn update_state(self, t: Val<'k>, prepared: BufferView<'k, 2>) {
        let (part, last) = (self.walk_thread(t), self.layout.kinds() - 1);
        let found = self.layout.corrects.then(|| self.sum_retrieved(part));
        let values = self.values(prepared, part);
        for tile in 0..TILES * self.of_warp {
            let state = self.state.load((tile, 0), OF_LANE as u32);
            let kept = (state * self.decay(prepared, part, tile)).named("kept");
            let state = values.add_to(kept, self.key_factor(prepared, last, part, tile));
            let state = match found {
                Some(found) => found.add_to(state, self.key_factor(prepared, 0, part, tile)),
                None => state,
            };
            self.state.set((tile, 0), state);
        }
        self.read_out(part, prepared);
        self.keep_factors();
    }

    /// The values' own part is the last warp's.
    fn read_out(self, part: WalkThread<'k>, prepared: BufferView<'k, 2>) {
        let (k, last, lanes) = (self.k, self.layout.kinds() - 1, OF_LANE as u32);
        let sums = k.registers("sums", [TILES, OF_LANE]);
        (0..TILES).for_each(|tile| sums.set((tile, 0), self.read_state(last, part, prepared, tile)));
        k.when(part.warp.equals(self.warps - 1), || {
            for tile in 0..TILES {
                let said = self.read_values(last, part, prepared, tile);
                sums.set((tile, 0), sums.load((tile, 0), lanes) + said);
            }
        });
        self.store_warp_readout(part, sums);
    }

    fn keep_factors(self) {
        for fragment in 0..self.of_warp {
            let tile = |tile: i64| self.state.load((fragment * TILES + tile, 0), OF_LANE as u32);
            let parts = split_floats(side_by_side([tile(0), tile(1)]), HALVES.dtype, HALVES.parts);
            for (part, half) in parts.into_iter().flatten().zip(0..) {
                self.factors.set((2 * fragment + half, 0), part);
            }
        }
    }

    fn state_as_factor(self, fragment: i64) -> SplitFragment<'k> {
        let part = |part: i64| Some(self.factors.load((2 * fragment + part, 0), TOGETHER as u32));
        SplitFragment { parts: [part(0), part(1), None] }
    }

    fn store_warp_readout(self, part: WalkThread<'k>, sums: BufferView<'k, 2>) {
        let warp = (part.group * self.warps + part.warp).named("of_block");
        for (tile, element) in (0..TILES).flat_map(|tile| (0..OF_LANE).map(move |element| (tile, element))) {
            let [row, step] = fragment_position(&M16N8K16.accumulator, part.lane, element as u32);
            self.readout.set((warp, step + tile * COLUMNS, row), sums.at((tile, element)));
        }
    }

    /// `B` or `K` for a tile of a warp's columns.
    fn key_factor(
        self,
        prepared: BufferView<'k, 2>,
        kind: i64,
        part: WalkThread<'k>,
        tile: i64,
    ) -> SplitFragment<'k> {
        let fragment = part.warp * self.of_warp + tile / TILES;
        second_factor(prepared, self.layout.key_fragment(kind, fragment), tile % TILES, part.lane)
    }

    /// The decay of the columns of a lane's elements.
    fn decay(self, prepared: BufferView<'k, 2>, part: WalkThread<'k>, tile: i64) -> Val<'k> {
        let [_, column] = fragment_position(&M16N8K16.accumulator, part.lane, 0);
        let column = part.warp * (self.of_warp * SIDE) + column + tile * COLUMNS;
        let in_unit = TOGETHER / 2;
        let at = (column / in_unit + self.layout.decay_unit(), column % in_unit * 2);
        let pair = prepared.load(at, 4).bits_as(ExprType::vector(DType::F32, 2));
        pair.shuffle([0, 1, 0, 1]).named("decay")
    }

    /// The values that each step retrieves from all columns.
    fn sum_retrieved(self, part: WalkThread<'k>) -> SplitFragment<'k> {
        let first = (part.group * self.warps).named("first");
        let sum = |tile: i64| {
            let at = part.lane + tile * WARP;
            let of = |warp: i64| self.retrieved.load((first + warp, at, 0), OF_LANE as u32).named("found");
            let said = self.value_readout.load((tile, 0), OF_LANE as u32);
            (0..self.warps).fold(said, |sum, warp| (sum + of(warp)).named("sum"))
        };
        SplitFragment::from_floats(side_by_side([sum(0), sum(1)]), HALVES)
    }

    /// The results of the chunk's steps.
    fn store_readout(self, chunk: Val<'k>, length: Val<'k>) {
        let (k, scan) = (self.k, self.scan);
        self.team.each_slot(STEPS * self.groups * SIDE, |i, _| {
            let rows = self.groups * SIDE;
            let (step, row) = ((i / rows).named("step"), (i % rows).named("row"));
            let time = (chunk * STEPS + step).named("time");
            k.when(time.lt(length), || {
                let first = (row / SIDE * self.warps).named("first");
                let of = |warp: i64| self.readout.at((first + warp, step, row % SIDE)).named("read");
                let sum = (1..self.warps).fold(of(0), |sum, warp| (sum + of(warp)).named("sum"));
                let extent = scan.extent(scan.body.outputs[1]);
                let at = HeadRows { head: self.head, row: self.group * SIDE + row, rows: 1 };
                let to = scan.at_step(extent, scan.offset(extent, at, 0), time);
                k.flat(scan.outputs[1]).set([to], sum);
            });
        });
    }
}
