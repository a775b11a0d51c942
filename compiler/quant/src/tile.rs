//! Views of the group formats in `Tile16` order that read them a vector at a time.
//!
//! A group of a tile is 16 scales, 16 zeros where groups have some, and then blocks of *words*: vectors of
//! 32-bit lanes, lane = weight row, each holding as many codes of that row as fit. A word splits into
//! *pieces*: the columns that one operation unpacks. Where codes fill bytes a piece is a *quad*: four
//! consecutive columns of each row, one byte each, as the u8 x i8 dot instructions take them.

use crate::layout::TILE;
use crate::packed::TileSizes;
use crate::plain::PlainType;
use mlcc_ir::format::{CodeValues, QuantFormat, ZeroPoint};
use mlcc_ir::instr::InstrId;
use mlcc_ir::kernel::ExprType;
use mlcc_ir::types::DType;
use mlcc_kernel_lang::{BufferView, Recorder, Val};

/// Columns of a quad.
const QUAD: usize = 4;

/// Subtracted from a code where it is unpacked. That is the zero point where all groups have the same one;
/// else whatever makes of the code a signed byte.
pub fn code_centre(format: QuantFormat) -> i64 {
    match format.zero {
        ZeroPoint::Constant(zero) => zero.into(),
        ZeroPoint::PerGroup | ZeroPoint::Minimum if format.bits == 8 => 128,
        ZeroPoint::PerGroup | ZeroPoint::Minimum => 0,
    }
}

/// The factor of the sums of activations, with the opposite sign, for integer products: the zero point where
/// all groups have the same one, which is the start of such sums. Else 1: each group multiplies them with its
/// own.
pub fn sum_factor(format: QuantFormat) -> i64 {
    match format.zero {
        ZeroPoint::Constant(zero) => zero.into(),
        ZeroPoint::PerGroup | ZeroPoint::Minimum => 1,
    }
}

/// Words per block.
pub fn words_per_block(format: QuantFormat) -> usize {
    format.block_columns() / format.codes_per_word()
}

/// The quads in one word: quad `q` covers columns `4 q .. 4 q + 4` of the block.
pub fn quads_of_word(format: QuantFormat, word: usize) -> Vec<usize> {
    (word..format.block_columns() / QUAD).step_by(words_per_block(format)).collect()
}

/// One block of a tile: 32 columns of a group or all of it.
#[derive(Clone, Copy)]
pub struct TileBlock<'k> {
    pub sizes: TileSizes,
    pub bytes: BufferView<'k, 1>,
    /// First byte of its group.
    pub group: Val<'k>,
    /// First byte of its words, less the bytes of the group's header.
    pub words: Val<'k>,
}

impl<'k> TileBlock<'k> {
    /// The scales of `lanes` rows of the tile from row `row` on, f32.
    pub fn scales(self, row: u32, lanes: u32) -> Val<'k> {
        self.numbers(row, lanes)
    }

    /// The number to subtract from `(code - centre) * scale` ([`code_centre`]; 0 if not `centred`) to get a
    /// weight of the same rows; `None` where there is none, or the same zero point for all groups.
    pub fn offsets(self, row: u32, lanes: u32, centred: bool) -> Option<Val<'k>> {
        let format = self.sizes.format;
        let centre = if centred { code_centre(format) } else { 0 };
        let zeros = || self.numbers(TILE as u32 + row, lanes);
        match format.zero {
            ZeroPoint::Constant(_) => None,
            ZeroPoint::PerGroup if centre == 0 => Some(zeros() * self.scales(row, lanes)),
            ZeroPoint::PerGroup => Some((zeros() - centre as f64) * self.scales(row, lanes)),
            ZeroPoint::Minimum if centre == 0 => Some(-zeros()),
            ZeroPoint::Minimum => Some(-zeros() - self.scales(row, lanes) * centre as f64),
        }
    }

    /// `lanes` of the numbers of the group from number `first` on, f32.
    fn numbers(self, first: u32, lanes: u32) -> Val<'k> {
        let number = PlainType::of_scale(self.sizes.format.scale);
        let bytes = number.bytes() as u32;
        let numbers = self.bytes.load([self.group + i64::from(bytes * first)], bytes * lanes);
        numbers.bits_as(ExprType::vector(number.dtype(), lanes)).cast(DType::F32)
    }

    /// Word `word` of the same rows, u32 lanes.
    pub fn word(self, word: usize, row: u32, lanes: u32) -> Val<'k> {
        let offset = (self.sizes.header() + 4 * TILE * word) as i64 + i64::from(4 * row);
        self.bytes.load([self.words + offset], 4 * lanes).bits_as(ExprType::vector(DType::U32, lanes))
    }
}

/// The numbers that codes mean (zero point included), of the same type: `lookup` has them, where codes are
/// bytes and the machine has such an instruction.
pub fn code_numbers(format: QuantFormat, codes: Val<'_>, lookup: Option<InstrId>) -> Val<'_> {
    if format.values != CodeValues::E2M1 {
        return codes;
    }
    if let Some(lookup) = lookup {
        let first = codes.recorder().literal(0.0, ExprType::scalar(DType::U8));
        let entries = first.ramp(1, codes.lanes()) & 15;
        return code_numbers(format, entries, None).instr(lookup, &[codes]);
    }
    let inner = codes.max(1).min(13);
    let doubled = codes + codes;
    doubled + doubled + 5 - (inner + inner + inner.max(3).min(11))
}

/// The values of codes of E4M3, u32 lanes of which the lowest 8 bits count: the bits in those of an f32,
/// whose exponent is less by 120 then.
pub fn small_floats(codes: Val<'_>) -> Val<'_> {
    let bits = (codes & 254) << 19 | codes << 31;
    bits.bits_as(ExprType::vector(DType::F32, codes.lanes())) * 2f64.powi(120)
}

/// The numbers of the stored codes (zero point included) of one quad of a word: u8, four per row. `lookup` as
/// in [`code_numbers`].
pub fn quad_codes(format: QuantFormat, word: Val<'_>, quad: usize, lookup: Option<InstrId>) -> Val<'_> {
    let bytes = word.bits_as(ExprType::vector(DType::U8, 4 * word.lanes()));
    let shift = (quad / words_per_block(format) * format.bits) as i64;
    let codes = if shift == 0 { bytes } else { bytes >> shift };
    // The highest codes of a byte have nothing above them.
    let codes = if shift as usize + format.bits == 8 { codes } else { codes & format.max_code() as i64 };
    code_numbers(format, codes, lookup)
}

/// The numbers of one quad as signed integers ([`code_centre`] removed): i8, four per row.
pub fn quad_signed(format: QuantFormat, word: Val<'_>, quad: usize, lookup: Option<InstrId>) -> Val<'_> {
    let codes = quad_codes(format, word, quad, lookup);
    let signed = match format.bits {
        // Subtracting 128 is flipping the top bit.
        8 => codes ^ 128,
        _ if code_centre(format) == 0 => codes,
        _ => codes - code_centre(format),
    };
    signed.bits_as(ExprType::vector(DType::I8, codes.lanes()))
}

/// The numbers of the sixteen 4-bit codes less their [`code_centre`], f32, to be pinned outside of the loops
/// that use [`piece_floats`].
pub fn code_table(k: &Recorder, format: QuantFormat) -> Val<'_> {
    let first = |code: i64| k.literal(code as f64, ExprType::scalar(DType::I32));
    match format.values {
        CodeValues::Whole | CodeValues::E4M3 => first(-code_centre(format)).ramp(1, 16).cast(DType::F32),
        CodeValues::E2M1 => {
            (code_numbers(format, first(0).ramp(1, 16), None) - code_centre(format)).cast(DType::F32)
        }
    }
}

/// The pieces of a word: the first column of each, in its block, and how many it has.
pub fn column_runs(format: QuantFormat, word: usize) -> Vec<(usize, usize)> {
    if format.fills_bytes() {
        return quads_of_word(format, word).into_iter().map(|quad| (QUAD * quad, QUAD)).collect();
    }
    vec![(word * format.codes_per_word(), format.codes_per_word())]
}

/// The instructions that look up codes, where the machine has them.
#[derive(Clone, Copy, Default)]
pub struct CodeLookup<'k> {
    /// The lookup in the [`code_table`], 16 of them: f32.
    pub floats: Option<(InstrId, Val<'k>)>,
    /// The lookup in [`code_numbers`].
    pub bytes: Option<InstrId>,
}

/// The numbers less their [`code_centre`] of the piece from column `first` on as f32: one vector over the
/// rows per column. With a lookup of floats, 4-bit codes take a shift and a lookup each.
pub fn piece_floats<'k>(
    format: QuantFormat,
    word: Val<'k>,
    first: usize,
    lookup: CodeLookup<'k>,
) -> Vec<Val<'k>> {
    let lanes = ExprType::vector(DType::I32, word.lanes());
    let shifted = |value: Val<'k>, bits: i64| if bits == 0 { value } else { value >> bits };
    if !format.fills_bytes() {
        let code = |at| shifted(word, (at * format.bits) as i64) & format.max_code() as i64;
        let centred = |code: Val<'k>| code.bits_as(lanes) - code_centre(format);
        return (0..format.codes_per_word()).map(|at| centred(code(at)).cast(DType::F32)).collect();
    }
    if format.values == CodeValues::E4M3 {
        return [0, 8, 16, 24].map(|bit| small_floats(shifted(word, bit))).to_vec();
    }
    let quad = first / QUAD;
    if let (4, Some((instr, table))) = (format.bits, lookup.floats) {
        let low = (quad / words_per_block(format) * format.bits) as i64;
        return [0, 8, 16, 24]
            .map(|bit| table.instr(instr, &[shifted(word, bit + low).bits_as(lanes)]))
            .to_vec();
    }
    let signed = quad_signed(format, word, quad, lookup.bytes).bits_as(lanes).named("w");
    // Each byte of a lane with its sign.
    [signed << 24, signed << 16, signed << 8, signed].map(|top| (top >> 24).cast(DType::F32)).to_vec()
}
