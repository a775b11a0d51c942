//! Views of the group formats in `Tile16` order that read them a vector at a time.
//!
//! A group of a tile is 16 scales and then *words*: vectors of 32-bit lanes, lane = weight row, each holding 8 (q4) or 4
//! (q8) codes of that row. A word splits into *quads*: four consecutive columns of each row, one byte each, which is what
//! the u8 x i8 dot instructions take.

use crate::layout::TILE;
use crate::{q4g32, q8g32};
use mlcc_ir::instr::InstrId;
use mlcc_ir::kernel::Ty;
use mlcc_ir::types::{DType, Format};
use mlcc_kernel_lang::{Recorder, Val, View};

/// Bytes of one group of a tile.
pub fn group_bytes(format: Format) -> usize {
    match format {
        Format::Q4G32 => q4g32::TILE_GROUP,
        Format::Q8G32 => q8g32::TILE_GROUP,
    }
}

/// Subtracted from a code to give its integer weight.
pub fn zero_point(format: Format) -> i64 {
    match format {
        Format::Q4G32 => q4g32::SPEC.zero_point.into(),
        Format::Q8G32 => q8g32::SPEC.zero_point.into(),
    }
}

/// Words per group.
pub fn words(format: Format) -> usize {
    match format {
        Format::Q4G32 => 4,
        Format::Q8G32 => 8,
    }
}

/// The quads in one word: quad `q` covers columns `4 q .. 4 q + 4` of the group.
pub fn quads(format: Format, word: usize) -> Vec<usize> {
    match format {
        Format::Q4G32 => vec![word, word + 4],
        Format::Q8G32 => vec![word],
    }
}

/// One group of a tile.
#[derive(Clone, Copy)]
pub struct TileGroup<'k> {
    pub format: Format,
    pub bytes: View<'k, 1>,
    /// Its first byte.
    pub start: Val<'k>,
}

impl<'k> TileGroup<'k> {
    /// The scales of `lanes` rows of the tile from row `row` on, f32.
    pub fn scales(self, row: u32, lanes: u32) -> Val<'k> {
        let scales = self.bytes.load([self.start + i64::from(2 * row)], 2 * lanes);
        scales.bits_as(Ty::vector(DType::F16, lanes)).cast(DType::F32)
    }

    /// Word `word` of the same rows, u32 lanes.
    pub fn word(self, word: usize, row: u32, lanes: u32) -> Val<'k> {
        let offset = (2 * TILE + 4 * TILE * word) as i64 + i64::from(4 * row);
        self.bytes.load([self.start + offset], 4 * lanes).bits_as(Ty::vector(DType::U32, lanes))
    }
}

/// The stored codes (zero point included) of one quad of a word: u8, four per row.
pub fn quad_codes(format: Format, word: Val<'_>, quad: usize) -> Val<'_> {
    let bytes = word.bits_as(Ty::vector(DType::U8, 4 * word.lanes()));
    match (format, quad) {
        (Format::Q8G32, _) => bytes,
        (Format::Q4G32, 0..4) => bytes & 0x0f,
        (Format::Q4G32, _) => bytes >> 4,
    }
}

/// The codes of one quad as signed integers (zero point removed): i8, four per row.
pub fn quad_signed(format: Format, word: Val<'_>, quad: usize) -> Val<'_> {
    let codes = quad_codes(format, word, quad);
    let signed = match format {
        // Subtracting 128 is flipping the top bit.
        Format::Q8G32 => codes ^ zero_point(format),
        Format::Q4G32 => codes - zero_point(format),
    };
    signed.bits_as(Ty::vector(DType::I8, codes.lanes()))
}

/// The sixteen integer weights that 4-bit codes stand for, f32, to be pinned outside of the loops that use [`quad_floats`].
pub fn code_table(k: &Recorder) -> Val<'_> {
    let first = k.literal(-zero_point(Format::Q4G32) as f64, Ty::scalar(DType::I32));
    first.ramp(1, 16).cast(DType::F32)
}

/// The integer weights of one quad as f32: one vector over the rows per column. With a 16-entry lookup instruction and
/// the [`code_table`], 4-bit codes take a shift and a lookup each.
pub fn quad_floats<'k>(
    format: Format,
    word: Val<'k>,
    quad: usize,
    lookup: Option<(InstrId, Val<'k>)>,
) -> [Val<'k>; 4] {
    let lanes = Ty::vector(DType::I32, word.lanes());
    let shifted = |value: Val<'k>, bits: i64| if bits == 0 { value } else { value >> bits };
    if let (Format::Q4G32, Some((instr, table))) = (format, lookup) {
        let low = if quad < 4 { 0 } else { 4 };
        return [0, 8, 16, 24].map(|bit| table.instr(instr, &[shifted(word, bit + low).bits_as(lanes)]));
    }
    let signed = quad_signed(format, word, quad).bits_as(lanes).named("w");
    // Each byte of a lane with its sign.
    [signed << 24, signed << 16, signed << 8, signed].map(|top| (top >> 24).cast(DType::F32))
}
