//! Weights in the order in which lanes of a warp multiply them on tensor cores.
//!
//! A tile has 16 rows, a slice of it 32 columns. Lane `4 r + q` of a warp has columns `8 q` to `8 q + 7` of
//! rows `r` and `r + 8` of each slice: the order of the 32 columns in a fragment does not matter as long as
//! activations agree. Such eight weights are a *piece*.
//!
//! Tiles come in blocks of 64 columns, of a group where that is longer. A block begins with the scales
//! `[8 rows][groups][2 rows 8 apart]`; then come, for each 64 columns, the four pieces of every lane, those
//! of the first slice first, in vectors of 16 bytes `[vectors][32 lanes][16 bytes]`: one of 4-bit codes, two
//! of 8-bit codes, four of 16 bits. So what a warp reads at once lies together, and a block with its scales
//! does.

use crate::QuantError;
use crate::group::{GroupSpec, QuantGrid};
use crate::layout::{AddressExpr, AddressTerm, LayoutRegion, TILE, TensorLayout, WeightAxis};
use crate::packed;
use crate::plain::PlainType;
use mlcc_ir::format::ZeroPoint;
use mlcc_ir::types::DType;

/// Columns of a slice, and of what a lane has of one in a row.
pub const SLICE: usize = 32;
pub const PIECE: usize = 8;
/// Columns whose pieces lie together: two slices.
const COLUMNS: usize = 2 * SLICE;
/// Bytes that a lane reads at once, and a warp.
pub const VECTOR: usize = 16;
pub const WARP_VECTOR: usize = 32 * VECTOR;
/// Rows of a lane are so far apart.
const APART: usize = TILE / 2;

/// Sizes of an `[N, K]` tensor in this order.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct FragmentSizes {
    /// Bits of a weight, or of its code.
    bits: usize,
    /// Columns of a block.
    columns: usize,
    /// Columns of a group, and bytes of its scale: 0 of plain weights.
    group: usize,
    scale: usize,
    n: usize,
    k: usize,
}

impl FragmentSizes {
    /// # Errors
    /// [`QuantError::NoFragments`] where weights or sizes do not come in fragments.
    pub fn new(dtype: DType, n: usize, k: usize) -> Result<FragmentSizes, QuantError> {
        FragmentSizes::find(dtype, n, k).ok_or(QuantError::NoFragments { dtype, n, k })
    }

    fn find(dtype: DType, n: usize, k: usize) -> Option<FragmentSizes> {
        let sizes = match dtype {
            DType::F16 | DType::BF16 => {
                FragmentSizes { bits: 16, columns: COLUMNS, group: COLUMNS, scale: 0, n, k }
            }
            DType::Packed(format) => {
                let group = format.group_size(k);
                let codes = matches!(format.bits, 4 | 8) && matches!(format.zero, ZeroPoint::Constant(_));
                let whole = COLUMNS.is_multiple_of(group) || group.is_multiple_of(COLUMNS);
                if !(codes && whole && group.is_multiple_of(SLICE)) {
                    return None;
                }
                let (columns, scale) = (group.max(COLUMNS), format.scale.bytes());
                FragmentSizes { bits: format.bits, columns, group, scale, n, k }
            }
            _ => return None,
        };
        (n.is_multiple_of(TILE) && k.is_multiple_of(sizes.columns)).then_some(sizes)
    }

    /// Columns of a block.
    pub fn columns(self) -> usize {
        self.columns
    }

    /// Groups of a row of a block.
    pub fn groups(self) -> usize {
        self.columns / self.group
    }

    /// Bytes of the scales of a block.
    pub fn scale_bytes(self) -> usize {
        TILE * self.groups() * self.scale
    }

    /// Bytes of the weights of a block, or of their codes.
    pub fn code_bytes(self) -> usize {
        self.columns_bytes(self.columns)
    }

    /// Bytes of the weights or codes of `columns` columns.
    pub fn columns_bytes(self, columns: usize) -> usize {
        TILE * columns * self.bits / 8
    }

    /// Bytes of a block.
    pub fn block_bytes(self) -> usize {
        self.scale_bytes() + self.code_bytes()
    }

    /// Bytes of a tile.
    pub fn tile(self) -> usize {
        self.k / self.columns * self.block_bytes()
    }

    /// Blocks of the tensor.
    pub fn blocks(self) -> usize {
        (self.n / TILE) * (self.k / self.columns)
    }

    /// Pieces of a vector, which are of one or of both rows, and then of one or both slices.
    pub fn pieces(self) -> usize {
        VECTOR / self.bits
    }

    /// Vectors of a lane for 64 columns.
    pub fn vectors(self) -> usize {
        4 / self.pieces()
    }

    // ---- places

    /// Terms of the places of columns and rows of a block, in units of `unit` bytes, and of those before it.
    fn terms(self, unit: usize) -> Vec<AddressTerm> {
        let term = |axis, div, modulo, bytes: usize| AddressTerm::new(axis, div, modulo, bytes / unit);
        // Piece p of the four pieces of a lane is in vector p / pieces.
        let piece = |p: usize| p / self.pieces() * WARP_VECTOR + p % self.pieces() * self.bits;
        let mut terms = vec![
            term(WeightAxis::Row, TILE, 0, self.tile()),
            term(WeightAxis::Col, self.columns, 0, self.block_bytes()),
            term(WeightAxis::Row, 1, APART, 4 * VECTOR),
            term(WeightAxis::Row, APART, 2, piece(1)),
            term(WeightAxis::Col, SLICE, 2, piece(2)),
            term(WeightAxis::Col, PIECE, 4, VECTOR),
        ];
        if self.columns > COLUMNS {
            terms.push(term(WeightAxis::Col, COLUMNS, self.columns / COLUMNS, self.columns_bytes(COLUMNS)));
        }
        terms
    }

    pub(crate) fn plain(self, plain: PlainType) -> TensorLayout {
        let mut terms = self.terms(plain.bytes());
        terms.push(AddressTerm::new(WeightAxis::Col, 1, PIECE, 1));
        TensorLayout {
            len: self.n * self.k,
            region: LayoutRegion::Plain { plain, place: AddressExpr { offset: 0, terms } },
        }
    }

    pub(crate) fn packed(self, spec: GroupSpec) -> TensorLayout {
        let (bits, number) = (self.bits, self.scale);
        let per_byte = 8 / bits;
        let mut terms = self.terms(1);
        terms.push(AddressTerm::new(WeightAxis::Col, per_byte, PIECE / per_byte, 1));
        let shift = vec![AddressTerm::new(WeightAxis::Col, 1, per_byte, bits)];
        let shift = (per_byte > 1).then_some(AddressExpr { offset: 0, terms: shift });
        let scales = vec![
            AddressTerm::new(WeightAxis::Row, TILE, 0, self.tile()),
            AddressTerm::new(WeightAxis::Col, self.columns, 0, self.block_bytes()),
            AddressTerm::new(WeightAxis::Row, 1, APART, 2 * self.groups() * number),
            AddressTerm::new(WeightAxis::Col, self.group, self.groups(), 2 * number),
            AddressTerm::new(WeightAxis::Row, APART, 2, number),
        ];
        let scales = AddressExpr { offset: 0, terms: scales };
        let codes = AddressExpr { offset: self.scale_bytes(), terms };
        let len = self.blocks() * self.block_bytes();
        TensorLayout { len, region: LayoutRegion::Group { spec, codes, shift, scales, zeros: None } }
    }

    // ---- bytes

    /// Row and first column of the pieces of 64 columns of a tile, in their order.
    fn in_order(self) -> impl Iterator<Item = (usize, usize)> {
        let pieces = self.pieces();
        let of_vector =
            move |v: usize| (0..32).flat_map(move |lane| (0..pieces).map(move |i| (lane, v * pieces + i)));
        (0..self.vectors())
            .flat_map(of_vector)
            .map(|(lane, piece)| (lane / 4 + piece % 2 * APART, lane % 4 * PIECE + piece / 2 * SLICE))
    }

    /// A tile from its 16 rows of plain weights.
    pub(crate) fn write_plain(self, plain: PlainType, rows: &[f32], out: &mut Vec<u8>) {
        for start in (0..self.k).step_by(COLUMNS) {
            for (row, column) in self.in_order() {
                let piece = &rows[row * self.k + start + column..][..PIECE];
                piece.iter().for_each(|&value| plain.write(value, out));
            }
        }
    }

    /// A block from the grids of its groups, `[rows, groups]`, and its codes, `[rows, columns]`.
    pub(crate) fn write_group(self, spec: GroupSpec, grids: &[QuantGrid], codes: &[u8], out: &mut Vec<u8>) {
        let groups = self.groups();
        for (row, group) in (0..APART).flat_map(|row| (0..groups).map(move |group| (row, group))) {
            for row in [row, row + APART] {
                spec.number_type().write(grids[row * groups + group].scale, out);
            }
        }
        for start in (0..self.columns).step_by(COLUMNS) {
            for (row, column) in self.in_order() {
                let piece = &codes[row * self.columns + start + column..][..PIECE];
                packed::row_bytes(spec.format, piece, out);
            }
        }
    }
}
