//! Weights in fragments in a ring: of a slice, what 16 rows have lies together, with their scales before it.

use super::super::GpuMatmul;
use super::super::operand::{IN_ORDER, SplitOperand, fragment_order};
use super::work::BlockTiling;
use super::{BlockTile, CHUNK, WarpTile};
use crate::matmul::problem::MatmulWeight;
use mlcc_ir::fragment::M16N8K16;
use mlcc_ir::kernel::ExprType;
use mlcc_ir::types::DType;
use mlcc_kernel_lang::{BufferView, Val};
use mlcc_quant::fragments::{self, FragmentSizes};

/// Rows of weights of a tile, whose columns of results are two fragments.
pub(super) const ROWS: i64 = 16;
pub(super) const FRAGMENTS: i64 = ROWS / M16N8K16.b.columns as i64;
/// Columns of a slice of which a lane has a piece of each of its rows.
const COLUMNS: i64 = fragments::SLICE as i64;

/// A slice of 16 rows of weights as it lies in shared memory, in bytes.
#[derive(Clone, Copy)]
pub(super) struct SliceOf {
    pub sizes: FragmentSizes,
    pub columns: i64,
}

impl SliceOf {
    fn codes(self) -> i64 {
        self.sizes.columns_bytes(self.columns as usize) as i64
    }

    pub fn bytes(self) -> i64 {
        self.sizes.scale_bytes() as i64 + self.codes()
    }

    /// Slices of a block.
    fn each(self) -> i64 {
        self.sizes.columns() as i64 / self.columns
    }

    /// The start of the block of a slice.
    pub fn block<'k>(self, tile: Val<'k>, slice: Val<'k>) -> Val<'k> {
        tile * self.sizes.tile() as i64 + slice / self.each() * self.sizes.block_bytes() as i64
    }

    /// Bytes of codes of the block before those of a slice.
    pub fn within<'k>(self, slice: Val<'k>) -> Val<'k> {
        slice % self.each() * self.codes()
    }

    /// The place of a chunk of slice `slice` of a tile in memory. Slices of a block share its scales.
    fn source<'k>(self, tile: Val<'k>, slice: Val<'k>, chunk: Val<'k>) -> Val<'k> {
        let header = self.sizes.scale_bytes() as i64;
        let start = self.block(tile, slice);
        if self.each() == 1 {
            return start + chunk * CHUNK;
        }
        let further = self.within(slice);
        let within = if header == 0 { further } else { (chunk * CHUNK).lt(header).select(0, further) };
        start + within + chunk * CHUNK
    }
}

impl<'k> GpuMatmul<'k, '_> {
    /// Columns of a slice in the ring: of 16-bit weights 32, so that stages do not become larger.
    pub(super) fn slice_of(self, sizes: FragmentSizes) -> SliceOf {
        let slices = if matches!(self.problem.weight, MatmulWeight::Plain(_)) { 1 } else { 2 };
        SliceOf { sizes, columns: slices * COLUMNS }
    }

    /// Begins to copy the slices of a step; `first` and `slice` are its first ones.
    pub(super) fn copy_fragments(
        self,
        of: SliceOf,
        work: &BlockTiling,
        at: &BlockTile<'k>,
        [first, slice]: [Val<'k>; 2],
    ) {
        let w = self.k.flat(self.problem.w);
        let bytes = w.dtype().bytes().unwrap_or(1) as i64;
        let (tiles, last) = (work.columns / ROWS, self.problem.n as i64 / ROWS - 1);
        let chunks = of.bytes() / CHUNK;
        at.team.each(work.depth * tiles * chunks, |i| {
            let (along, i) = self.in_slice(work, i, tiles * chunks);
            let (tile, chunk) = (i / chunks, i % chunks);
            let source = (at.origin[1] / ROWS + tile).min(last);
            let from = of.source(source, slice + along, chunk) / bytes + self.problem.w_offset as i64;
            at.ws.start_copy((first + along, tile, chunk * (CHUNK / bytes)), CHUNK as u32, w, [from]);
        });
    }

    /// Multiplies the slice of a stage.
    pub(super) fn multiply_fragments(
        self,
        of: SliceOf,
        work: &BlockTiling,
        at: &BlockTile<'k>,
        part: &WarpTile<'k>,
        stage: Val<'k>,
    ) {
        let k = self.k;
        let [mt, nt] = work.fragments();
        let x = at.xs.row(stage).named("x_stage");
        let bytes = at.ws.dtype().bytes().unwrap_or(1) as i64;
        let per_vector = fragments::VECTOR as i64 / bytes;
        let slices = of.columns / COLUMNS;
        let vectors = of.sizes.vectors() as i64 * slices / 2;
        let (header, warp) = (of.sizes.scale_bytes() as i64 / bytes, fragments::WARP_VECTOR as i64 / bytes);
        let of_lane = self.lane_scales_bytes(of);
        for s in 0..slices {
            let a: Vec<_> = (0..mt).map(|i| self.activations(x, part, i, s)).collect();
            k.unrolled("tile", nt / FRAGMENTS, |tile| {
                let own = part.column / ROWS + tile;
                let load = |v: i64| {
                    let place = part.lane * per_vector + (header + v * warp);
                    at.ws.load((stage, own, place), per_vector as u32).named("q")
                };
                let vectors: Vec<Val> = (0..vectors).map(load).collect();
                let scales = self.lane_scales(of, at.ws.row(stage).row(own), part.lane % 4 * of_lane);
                for half in 0..FRAGMENTS {
                    let weights = self.piece(of.sizes, &vectors, (s * FRAGMENTS + half) as usize);
                    let b = self.factors(weights);
                    let scale = scales.map(|scales| self.fragment_scale(of, scales, s, half));
                    self.add(at, &a, tile * FRAGMENTS + half, &b, scale);
                }
            });
        }
    }

    /// Fragments of a piece, one for each half of a slice.
    pub(super) fn factors(self, weights: SplitOperand<'k>) -> Vec<SplitOperand<'k>> {
        let of_half = |half| fragment_order(&M16N8K16.b, half, false, &IN_ORDER);
        (0..2).map(|half| weights.map(|v| v.shuffle(of_half(half)))).collect()
    }

    /// Scales of the two columns of results of a lane, `[2 columns][groups][2 fragments]`, which lie at
    /// `place`.
    pub(super) fn lane_scales(self, of: SliceOf, from: BufferView<'k, 1>, place: Val<'k>) -> Option<Val<'k>> {
        let number = self.scale_type()?;
        let bytes = self.lane_scales_bytes(of);
        let count = bytes / number.bytes().unwrap_or(1) as i64;
        let loaded = from.load([place], bytes as u32);
        Some(loaded.bits_as(ExprType::vector(number, count as u32)).named("scales"))
    }

    /// Bytes of these scales; 0 of plain weights.
    pub(super) fn lane_scales_bytes(self, of: SliceOf) -> i64 {
        let number = self.scale_type().and_then(DType::bytes).unwrap_or(0) as i64;
        2 * FRAGMENTS * of.sizes.groups() as i64 * number
    }

    /// The scale of each of a lane's sums of a fragment.
    pub(super) fn fragment_scale(self, of: SliceOf, scales: Val<'k>, slice: i64, fragment: i64) -> Val<'k> {
        let groups = of.sizes.groups() as i64;
        let group = slice * groups / 2;
        let of_column = |column: i64| ((column * groups + group) * FRAGMENTS + fragment) as u32;
        self.of_columns([0, 1].map(|column| scales.shuffle([of_column(column)]).cast(DType::F32)))
    }
}
