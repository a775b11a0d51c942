//! Common parts of products on a CPU, and the pieces into which work is cut: slices of the weights, ranges of
//! rows.

use crate::matmul::plan::{CodeDot, CpuPlan};
use crate::matmul::problem::{MatmulActivation, MatmulProblem, MatmulWeight, QuantizedActivations};
use crate::matmul::weight::{MatrixOrigin, PackedTiles, PlainTiles};
use mlcc_ir::kernel::BufId;
use mlcc_ir::types::QuantFormat;
use mlcc_kernel_lang::{BufferView, Recorder, Val};
use mlcc_quant::TILE;
use mlcc_quant::packed::TileSizes;
use mlcc_quant::plain::PlainType;
use mlcc_quant::tile::{self, CodeLookup};

/// A product that is being recorded.
#[derive(Clone, Copy)]
pub(in crate::matmul) struct CpuMatmul<'k, 'a> {
    pub k: &'k Recorder,
    pub problem: &'a MatmulProblem,
    pub plan: &'a CpuPlan,
    pub lookup: CodeLookup<'k>,
    /// The matrix that is meant, of several, and the rows that meet it; `None` where there is only one.
    pub expert: Option<ExpertMatrix<'k>>,
}

/// A matrix among several, with the rows that chose it.
#[derive(Clone, Copy)]
pub(in crate::matmul) struct ExpertMatrix<'k> {
    /// Elements of the tensor before the matrix.
    pub first: Val<'k>,
    /// Rows of the result, i32; `None`: rows in their order. Row numbers of a product then are places in the
    /// list.
    pub list: Option<BufferView<'k, 1>>,
    /// The last place in the list that counts: register tiles beyond it take it again.
    pub last: Val<'k>,
    /// Adjacent rows of the result that share a row of x.
    pub share: i64,
    /// Zero, i64, by a load that the compiler cannot see through. Added to the offset of a row of x it keeps
    /// the compiler from making `or` of the addition of a column where rows have 2^i elements: it then
    /// computes the places of all rows in a vector and takes them apart again in the inner loop.
    pub zero: Option<Val<'k>>,
}

/// Packed weights against integer activations.
#[derive(Clone, Copy)]
pub(in crate::matmul) struct IntegerMatmul {
    pub format: QuantFormat,
    pub codes: QuantizedActivations,
    /// The dot product where weights are read as they are stored.
    pub dot: CodeDot,
}

impl<'k, 'a> CpuMatmul<'k, 'a> {
    pub fn new(k: &'k Recorder, problem: &'a MatmulProblem, plan: &'a CpuPlan) -> CpuMatmul<'k, 'a> {
        // The table of the lookup instruction stays in a register.
        let floats = plan.lookup.map(|instr| (instr, problem.weight));
        let floats = floats.and_then(|(instr, weight)| match weight {
            MatmulWeight::Packed(format) => Some((instr, tile::code_table(k, format).named("codes"))),
            MatmulWeight::Plain(_) => None,
        });
        let lookup = CodeLookup { floats, bytes: plan.byte_lookup };
        CpuMatmul { k, problem, plan, lookup, expert: None }
    }

    /// Rows of the result.
    pub fn row_count(self) -> Val<'k> {
        self.k.val(self.problem.m)
    }

    pub fn view(self, buf: BufId) -> BufferView<'k, 1> {
        self.k.flat(buf)
    }

    fn origin(self) -> MatrixOrigin<'k> {
        MatrixOrigin { matrix: self.expert.map(|chosen| chosen.first), offset: self.problem.w_offset as i64 }
    }

    /// The place of element `at` of the tensor (or of the chosen matrix) in `w`.
    pub fn in_w(self, at: Val<'k>) -> Val<'k> {
        self.origin().element_offset(at)
    }

    pub fn packed(self, format: QuantFormat) -> PackedTiles<'k> {
        let bytes = self.view(self.problem.w);
        PackedTiles { bytes, sizes: TileSizes::new(format, self.problem.k), origin: self.origin() }
    }

    pub fn plain(self, plain: PlainType) -> PlainTiles<'k> {
        let elements = self.view(self.problem.w);
        PlainTiles { elements, plain, tile: self.problem.tile_len() as i64, origin: self.origin() }
    }

    /// The operands, if they are integers.
    pub fn integers(self) -> Option<IntegerMatmul> {
        match (self.problem.activation, self.problem.weight) {
            (MatmulActivation::Codes(codes), MatmulWeight::Packed(format)) => {
                let dot = CodeDot::for_weights(self.plan.dot, format, codes.planes);
                Some(IntegerMatmul { format, codes, dot })
            }
            _ => None,
        }
    }

    /// Vectors of a tile.
    pub fn parts_of_tile(self) -> u32 {
        TILE as u32 / self.plan.lanes
    }

    /// Iterations of the loop over columns, of `tiles` tiles of weights each.
    pub fn slice_count(self, tiles: u32) -> i64 {
        self.problem.n.div_ceil(TILE * tiles as usize) as i64
    }

    /// Slice number `number` of `wide` tiles; the last one has fewer where their number does not divide.
    pub fn each_slice(self, wide: u32, number: Val<'k>, mut body: impl FnMut(WeightSlice<'k>)) {
        let (full, rest) = (self.problem.tiles() as u32 / wide, self.problem.tiles() as u32 % wide);
        let short = !self.problem.n.is_multiple_of(TILE);
        let first = number * i64::from(wide);
        let slice =
            |tiles, edge| WeightSlice { first, tiles, edge: if short { edge } else { PartialTile::Never } };
        match (full, rest) {
            (1, 0) => body(slice(wide, PartialTile::Always)),
            (_, 0) => body(slice(wide, PartialTile::Last)),
            (0, rest) => body(slice(rest, PartialTile::Always)),
            (full, rest) => self.k.branch(number.lt(i64::from(full)), |inside| match inside {
                true => body(slice(wide, PartialTile::Never)),
                false => body(slice(rest, PartialTile::Always)),
            }),
        }
    }
}

/// Tiles of weights side by side that are worked on together.
#[derive(Clone, Copy)]
pub(in crate::matmul) struct WeightSlice<'k> {
    pub first: Val<'k>,
    pub tiles: u32,
    pub edge: PartialTile,
}

/// The slices whose last tile has fewer than 16 rows.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(in crate::matmul) enum PartialTile {
    Never,
    Always,
    /// Only the last slice.
    Last,
}

/// A vector of rows of a slice: `lanes` rows from `row` of a tile on.
#[derive(Clone, Copy)]
pub(in crate::matmul) struct RowVector<'k> {
    pub tile: Val<'k>,
    pub row: u32,
}

impl<'k> WeightSlice<'k> {
    /// Vectors over all rows of the tiles.
    pub fn parts(self, lanes: u32) -> u32 {
        self.tiles * TILE as u32 / lanes
    }

    pub fn part(self, lanes: u32, part: u32) -> RowVector<'k> {
        let per_tile = TILE as u32 / lanes;
        RowVector { tile: self.first + i64::from(part / per_tile), row: part % per_tile * lanes }
    }
}

/// A range of activation rows.
#[derive(Clone, Copy)]
pub(in crate::matmul) struct RowRange<'k> {
    pub first: Val<'k>,
    pub count: Val<'k>,
}
