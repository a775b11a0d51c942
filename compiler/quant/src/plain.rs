//! Plain formats: f32, f16 and bf16 elements (round to nearest even).
//!
//! Elements: `RowMajor` `[N][K]`, `ColMajor` `[K][N]`, `Tile16` per tile of 16 rows (rows beyond N are zero):
//! * f32, f16: `[K][16 rows]`.
//! * bf16: `[K/2][16 rows][2 columns]`, K rounded up to even with a zero: an i32 lane holds two columns of a
//!   row, which become f32 by one shift and one mask, and 16 lanes are one operand of a bf16 dot instruction.

use crate::layout::{AddressExpr, AddressTerm, LayoutRegion, TILE, TensorLayout, WeightAxis};
use crate::{FragmentSizes, QuantError};
use half::{bf16, f16};
use mlcc_ir::format::ScaleType;
use mlcc_ir::types::{DType, Packing};

/// A plain weight type.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum PlainType {
    F32,
    F16,
    BF16,
}

impl PlainType {
    pub fn dtype(self) -> DType {
        match self {
            PlainType::F32 => DType::F32,
            PlainType::F16 => DType::F16,
            PlainType::BF16 => DType::BF16,
        }
    }
    /// The type of scales as a type of weights.
    pub fn of_scale(scale: ScaleType) -> PlainType {
        match scale {
            ScaleType::F16 => PlainType::F16,
            ScaleType::BF16 => PlainType::BF16,
            ScaleType::F32 => PlainType::F32,
        }
    }
    pub fn bytes(self) -> usize {
        match self {
            PlainType::F32 => 4,
            PlainType::F16 | PlainType::BF16 => 2,
        }
    }
    /// Appends one element.
    pub fn write(self, value: f32, out: &mut Vec<u8>) {
        match self {
            PlainType::F32 => out.extend(value.to_le_bytes()),
            PlainType::F16 => out.extend(f16::from_f32(value).to_le_bytes()),
            PlainType::BF16 => out.extend(bf16::from_f32(value).to_le_bytes()),
        }
    }
    /// Element `index` of `bytes`.
    pub fn read(self, bytes: &[u8], index: usize) -> f32 {
        let at = index * self.bytes();
        match self {
            PlainType::F32 => f32::from_le_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]]),
            PlainType::F16 => f16::from_le_bytes([bytes[at], bytes[at + 1]]).to_f32(),
            PlainType::BF16 => bf16::from_le_bytes([bytes[at], bytes[at + 1]]).to_f32(),
        }
    }
    /// The nearest number of this type.
    pub fn round(self, value: f32) -> f32 {
        match self {
            PlainType::F32 => value,
            PlainType::F16 => f16::from_f32(value).to_f32(),
            PlainType::BF16 => bf16::from_f32(value).to_f32(),
        }
    }
    /// The next number of this type above a positive one.
    pub(crate) fn next_up(self, value: f32) -> f32 {
        match self {
            PlainType::F32 => f32::from_bits(value.to_bits() + 1),
            PlainType::F16 => f16::from_bits(f16::from_f32(value).to_bits() + 1).to_f32(),
            PlainType::BF16 => bf16::from_bits(bf16::from_f32(value).to_bits() + 1).to_f32(),
        }
    }
    /// The least number that has all bits of this type.
    pub(crate) fn min_normal(self) -> f32 {
        match self {
            PlainType::F32 | PlainType::BF16 => f32::MIN_POSITIVE,
            PlainType::F16 => f16::MIN_POSITIVE.to_f32(),
        }
    }
    /// The largest relative distance of a number from the nearest one of this type.
    pub(crate) fn roundoff(self) -> f32 {
        match self {
            PlainType::F32 => 2.0_f32.powi(-24),
            PlainType::F16 => 2.0_f32.powi(-11),
            PlainType::BF16 => 2.0_f32.powi(-8),
        }
    }
    /// The largest distance of a number near `value` from the nearest one of this type.
    pub(crate) fn max_rounding_error(self, value: f32) -> f32 {
        self.roundoff() * (value.abs().max(self.min_normal()) * (1.0 + 1e-5))
    }
    /// The largest scale: its product with every code is finite in f32.
    pub(crate) fn largest_scale(self) -> f32 {
        match self {
            PlainType::F32 | PlainType::BF16 => 2.0_f32.powi(119),
            PlainType::F16 => f16::MAX.to_f32(),
        }
    }
    /// Columns that lie together within a row of a tile.
    pub fn pair_columns(self) -> usize {
        match self {
            PlainType::F32 | PlainType::F16 => 1,
            PlainType::BF16 => 2,
        }
    }
}

/// True if a number of steps, up to some hundred, is whole but for roundings to f32.
#[inline]
pub(crate) fn is_near_whole(steps: f32) -> bool {
    (steps - round_small(steps)).abs() < 1e-3
}

/// Half to even, of numbers that are small: adding and subtracting 1.5 * 2^23 vectorizes where
/// `round_ties_even` does not.
#[inline]
pub(crate) fn round_small(x: f32) -> f32 {
    const MAGIC: f32 = 12_582_912.0;
    (x + MAGIC) - MAGIC
}

pub(crate) fn layout(
    plain: PlainType,
    packing: Packing,
    n: usize,
    k: usize,
) -> Result<TensorLayout, QuantError> {
    let term = AddressTerm::new;
    let (row, col, pair) = (WeightAxis::Row, WeightAxis::Col, plain.pair_columns());
    let (terms, elements) = match packing {
        Packing::RowMajor => (vec![term(row, 1, 0, k), term(col, 1, 0, 1)], n * k),
        Packing::ColMajor => (vec![term(col, 1, 0, n), term(row, 1, 0, 1)], n * k),
        Packing::Tile16 => {
            let tile = k.next_multiple_of(pair) * TILE;
            let tiles = n.div_ceil(TILE);
            let mut terms =
                vec![term(row, TILE, 0, tile), term(col, pair, 0, TILE * pair), term(row, 1, TILE, pair)];
            if pair > 1 {
                terms.push(term(col, 1, pair, 1));
            }
            (terms, tiles * tile)
        }
        Packing::Fragments => return Ok(FragmentSizes::new(plain.dtype(), n, k)?.plain(plain)),
    };
    Ok(TensorLayout {
        len: elements,
        region: LayoutRegion::Plain { plain, place: AddressExpr { offset: 0, terms } },
    })
}

/// One tile from its rows (`[rows][k]`, up to 16 of them; missing ones are zero).
pub(crate) fn tile_bytes(plain: PlainType, k: usize, rows: &[f32], out: &mut Vec<u8>) {
    let pair = plain.pair_columns();
    for column in (0..k).step_by(pair) {
        for row in 0..TILE {
            for c in column..column + pair {
                let value = if c < k { rows.get(row * k + c).copied().unwrap_or(0.0) } else { 0.0 };
                plain.write(value, out);
            }
        }
    }
}
