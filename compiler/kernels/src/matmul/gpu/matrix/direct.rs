//! Products of up to 16 rows with weights in fragments: a warp takes its own slices, and a lane copies the
//! operands that it multiplies to its own places. So no thread waits for another: there are stages, but no
//! barriers.

use super::super::GpuMatmul;
use super::super::operand::OF_LANE;
use super::fragments::{FRAGMENTS, ROWS, SliceOf};
use super::work::BlockTiling;
use super::{BlockTile, CHUNK, WarpTile};
use mlcc_kernel_lang::{Val, WARP};
use mlcc_quant::fragments;

/// Columns of a part of a slice, of which a lane has eight neighbours.
const COLUMNS: i64 = fragments::SLICE as i64;
/// Rows of activations of a lane, and how far apart they are.
const X_ROWS: i64 = 2;
const APART: i64 = 8;

/// The places of a warp in a stage.
struct WarpStage<'k> {
    /// Activations, `[parts of the slice, rows, lanes, 8]`.
    x: Val<'k>,
    /// Weights, `[tiles, vectors, lanes, 16 bytes]`, and their scales `[tiles, lanes, bytes]`.
    w: Val<'k>,
}

/// Sizes and places in a slot, in bytes.
#[derive(Clone, Copy)]
struct WarpStageSizes {
    vectors: i64,
    tiles: i64,
    /// Bytes of the scales that a lane reads of a tile.
    scales: i64,
}

impl WarpStageSizes {
    fn bytes(self) -> i64 {
        self.tiles * WARP * (self.vectors * CHUNK + self.scales)
    }

    fn vector<'k>(self, lane: Val<'k>, tile: i64, v: i64) -> Val<'k> {
        lane * CHUNK + (tile * self.vectors + v) * WARP * CHUNK
    }

    fn scales_of<'k>(self, lane: Val<'k>, tile: i64) -> Val<'k> {
        lane * self.scales + (self.tiles * self.vectors * CHUNK + tile * self.scales) * WARP
    }
}

impl<'k> GpuMatmul<'k, '_> {
    fn sizes(self, of: SliceOf, columns: i64) -> WarpStageSizes {
        let vectors = of.sizes.vectors() as i64 * of.columns / (2 * COLUMNS);
        WarpStageSizes { vectors, tiles: columns / ROWS, scales: self.lane_scales_bytes(of) }
    }

    /// Bytes of weights in the slot of a warp.
    pub(super) fn direct_bytes(self, of: SliceOf, columns: i64) -> i64 {
        self.sizes(of, columns).bytes()
    }

    pub(super) fn sum_directly(self, of: SliceOf, work: &BlockTiling, at: &BlockTile<'k>) {
        let (k, stages) = (self.k, work.stages);
        let slices = self.problem.k as i64 / of.columns;
        // As many slices as there are warps, the last of them for some.
        let steps = (slices + work.depth - 1) / work.depth;
        let even = slices % work.depth == 0;
        at.team.run(|_| self.clear(work, at));
        let has = |step: Val<'k>, part: &WarpTile<'k>, then: &dyn Fn(Val<'k>)| {
            let slice = (step * work.depth + part.along).named("slice");
            if even { then(slice) } else { k.when(slice.lt(slices), || then(slice)) }
        };
        let begin = |step: Val<'k>| {
            at.team.run(|thread| {
                let part = self.part(work, thread);
                let slot = self.slot(of, work, step, &part);
                has(step, &part, &|slice| self.copy_slot(of, work, at, &part, &slot, slice));
            });
        };
        for step in 0..stages - 1 {
            if step < steps {
                begin(k.int(step));
            }
            k.commit_copies();
        }
        k.serial("step", steps, |step| {
            k.wait_copies((stages - 2) as u32);
            let next = step + (stages - 1);
            k.when(next.lt(steps), || begin(next));
            k.commit_copies();
            at.team.run(|thread| {
                let part = self.part(work, thread);
                let slot = self.slot(of, work, step, &part);
                has(step, &part, &|_| self.multiply_slot(of, work, at, &part, &slot));
            });
        });
        k.wait_copies(0);
    }

    fn slot(self, of: SliceOf, work: &BlockTiling, step: Val<'k>, part: &WarpTile<'k>) -> WarpStage<'k> {
        let place = (step % work.stages * work.depth + part.along).named("slot");
        let weights = self.direct_bytes(of, work.columns) / self.problem.weight.buffer_bytes() as i64;
        WarpStage { x: place * (work.rows * of.columns), w: place * weights }
    }

    /// Begins to copy what a lane multiplies of a slice.
    fn copy_slot(
        self,
        of: SliceOf,
        work: &BlockTiling,
        at: &BlockTile<'k>,
        part: &WarpTile<'k>,
        slot: &WarpStage<'k>,
        slice: Val<'k>,
    ) {
        let (sizes, lane) = (self.sizes(of, work.columns), part.lane);
        let (to, w) = (at.ws.flat(), self.k.flat(self.problem.w));
        let bytes = self.problem.weight.buffer_bytes() as i64;
        let last = self.problem.n as i64 / ROWS - 1;
        for tile in 0..sizes.tiles {
            let source = (at.origin[1] / ROWS + tile).min(last);
            let block = of.block(source, slice) / bytes + self.problem.w_offset as i64;
            let codes = block + (of.sizes.scale_bytes() as i64 + of.within(slice)) / bytes;
            for v in 0..sizes.vectors {
                let from = codes + (lane * CHUNK + v * WARP * CHUNK) / bytes;
                to.start_copy([slot.w + sizes.vector(lane, tile, v) / bytes], CHUNK as u32, w, [from]);
            }
            for at in (0..sizes.scales).step_by(CHUNK as usize) {
                let size = CHUNK.min(sizes.scales);
                let from = block + (lane % 4 * sizes.scales + at);
                to.start_copy([slot.w + sizes.scales_of(lane, tile) + at], size as u32, w, [from]);
            }
        }
        let (xs, last) = (at.xs.flat(), self.k.val(self.problem.m) + -1);
        for (s, row) in (0..of.columns / COLUMNS).flat_map(|s| (0..X_ROWS).map(move |row| (s, row))) {
            let from = (at.origin[0] + part.group + row * APART).min(last);
            let column = slice * of.columns + s * COLUMNS + part.first;
            xs.start_copy([self.x_place(slot, lane, s, row)], CHUNK as u32, self.x(), (from, column));
        }
    }

    fn x_place(self, slot: &WarpStage<'k>, lane: Val<'k>, s: i64, row: i64) -> Val<'k> {
        slot.x + lane * OF_LANE + (s * X_ROWS + row) * WARP * OF_LANE
    }

    fn multiply_slot(
        self,
        of: SliceOf,
        work: &BlockTiling,
        at: &BlockTile<'k>,
        part: &WarpTile<'k>,
        slot: &WarpStage<'k>,
    ) {
        let (k, sizes, lane) = (self.k, self.sizes(of, work.columns), part.lane);
        let (from, xs) = (at.ws.flat(), at.xs.flat());
        let bytes = self.problem.weight.buffer_bytes() as i64;
        let vectors: Vec<Vec<Val>> = (0..sizes.tiles)
            .map(|tile| {
                let load = |v| {
                    let place = slot.w + sizes.vector(lane, tile, v) / bytes;
                    from.load([place], (CHUNK / bytes) as u32).named("q")
                };
                (0..sizes.vectors).map(load).collect()
            })
            .collect();
        let scales: Vec<Option<Val>> = (0..sizes.tiles)
            .map(|tile| self.lane_scales(of, from, slot.w + sizes.scales_of(lane, tile)))
            .collect();
        for s in 0..of.columns / COLUMNS {
            let x = [0, 1].map(|row| xs.load([self.x_place(slot, lane, s, row)], OF_LANE as u32).named("x"));
            let a = [self.factors_of_rows(x)];
            for (tile, (vectors, scales)) in (0..).zip(vectors.iter().zip(&scales)) {
                for half in 0..FRAGMENTS {
                    let weights = self.piece(of.sizes, vectors, (s * FRAGMENTS + half) as usize);
                    let scale = scales.map(|scales| self.fragment_scale(of, scales, s, half));
                    let j = k.int(tile * FRAGMENTS + half);
                    self.add(at, &a, j, &self.factors(weights), scale);
                }
            }
        }
    }
}
