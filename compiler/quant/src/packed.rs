//! Order in memory of the group formats.
//!
//! A *word* has 32 bits and as many codes as fit, the lowest bits first. Besides its codes a group stores its
//! *numbers*: the scale, and the zero point or minimum where each group has one. Bytes, for G groups per row,
//! the last one padded to whole groups:
//! * `RowMajor`: words of consecutive columns `[N][words of G groups]`, then the scales `[N][G]`, then the
//!   zeros `[N][G]`.
//! * `ColMajor`: the same words `[words of G groups][N]`, then the scales `[G][N]`, then the zeros `[G][N]`.
//! * `Tile16`: per tile of 16 rows its groups, each with 16 scales, 16 zeros and then its blocks. A *block*
//!   is the unit that kernels take together: 32 columns, or a group where codes do not fill bytes.
//!
//! Blocks of 32 columns are `[words][16 rows][4]` bytes: byte i of row r in word j holds column `4 j + i` in
//! its lowest bits, column `4 (j + words) + i` in the next ones, and so on. So one 64-byte load, masked and
//! shifted, gives operands of a u8 x i8 dot instruction (four columns each), and an i32 lane holds columns of
//! one row for a table lookup by its low four bits. Blocks of codes that do not fill bytes are
//! `[words][16 rows]` words as in the other packings.

use crate::group::{GroupSpec, QuantGrid};
use crate::layout::{AddressExpr, AddressTerm, LayoutRegion, TILE, TensorLayout, WeightAxis};
use crate::{FragmentSizes, QuantError};
use mlcc_ir::format::QuantFormat;
use mlcc_ir::types::{DType, Packing};

/// Bytes of a word.
const WORD: usize = 4;

/// Sizes of a row of tiles of a format in rows of some length.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct TileSizes {
    pub format: QuantFormat,
    /// Groups of a row.
    pub groups: usize,
    /// Blocks of a group.
    pub blocks: usize,
}

impl TileSizes {
    pub fn new(format: QuantFormat, k: usize) -> TileSizes {
        let group = format.group_size(k);
        TileSizes { format, groups: k.div_ceil(group), blocks: group / format.block_columns() }
    }
    /// Words of a row in a block.
    pub fn words(self) -> usize {
        words(self.format, self.format.block_columns())
    }
    /// Bytes before the blocks of a group.
    pub fn header(self) -> usize {
        TILE * self.format.numbers_per_group() * self.format.scale.bytes()
    }
    /// Bytes of a block of 16 rows.
    pub fn block(self) -> usize {
        TILE * WORD * self.words()
    }
    /// Bytes of a group of 16 rows.
    pub fn group(self) -> usize {
        self.header() + self.blocks * self.block()
    }
    /// Bytes of this many adjacent blocks, with their share of the numbers of groups.
    pub fn blocks_bytes(self, blocks: usize) -> usize {
        blocks * self.group() / self.blocks
    }
    /// Bytes of a tile.
    pub fn tile(self) -> usize {
        self.groups * self.group()
    }
}

/// Words of this many columns.
fn words(format: QuantFormat, columns: usize) -> usize {
    columns / format.codes_per_word()
}

pub(crate) fn layout(
    format: QuantFormat,
    packing: Packing,
    n: usize,
    k: usize,
) -> Result<TensorLayout, QuantError> {
    let spec = GroupSpec::new(format, k);
    let (group, groups) = (spec.group, k.div_ceil(spec.group));
    let (per_word, number) = (format.codes_per_word(), format.scale.bytes());
    let code_bytes = WORD * words(format, group);
    let term = AddressTerm::new;
    let (row, col) = (WeightAxis::Row, WeightAxis::Col);
    let place = |offset, terms| AddressExpr { offset, terms };
    // Codes of a byte, and bits of a code in it; or those of a word.
    let (per_unit, unit) = if format.fills_bytes() { (8 / format.bits, 1) } else { (per_word, WORD) };
    let within_unit = (per_unit > 1).then(|| place(0, vec![term(col, 1, per_unit, format.bits)]));
    // Place and bytes of the first number; the second one has the same layout.
    let (codes, shift, scales, scale_bytes, len) = match packing {
        Packing::RowMajor => (
            place(0, vec![term(row, 1, 0, code_bytes * groups), term(col, per_unit, 0, unit)]),
            within_unit,
            place(
                n * groups * code_bytes,
                vec![term(row, 1, 0, number * groups), term(col, group, 0, number)],
            ),
            n * groups * number,
            n * groups * (code_bytes + format.numbers_per_group() * number),
        ),
        Packing::ColMajor => {
            let mut codes = vec![term(col, per_word, 0, WORD * n), term(row, 1, 0, WORD)];
            if unit < WORD {
                codes.push(term(col, per_unit, WORD, 1));
            }
            let scales = vec![term(col, group, 0, number * n), term(row, 1, 0, number)];
            (
                place(0, codes),
                within_unit,
                place(n * groups * code_bytes, scales),
                n * groups * number,
                n * groups * (code_bytes + format.numbers_per_group() * number),
            )
        }
        Packing::Tile16 => {
            let sizes = TileSizes::new(format, k);
            let start = vec![term(row, TILE, 0, sizes.tile()), term(col, group, 0, sizes.group())];
            let mut codes = start.clone();
            if sizes.blocks > 1 {
                codes.push(term(col, format.block_columns(), sizes.blocks, sizes.block()));
            }
            let words = sizes.words();
            let shift = if format.fills_bytes() {
                codes.extend([
                    term(col, 4, words, WORD * TILE),
                    term(row, 1, TILE, WORD),
                    term(col, 1, WORD, 1),
                ]);
                (per_unit > 1).then(|| place(0, vec![term(col, 4 * words, per_unit, format.bits)]))
            } else {
                codes.extend([term(col, per_word, words, WORD * TILE), term(row, 1, TILE, WORD)]);
                within_unit
            };
            let scales = start.into_iter().chain([term(row, 1, TILE, number)]).collect();
            (
                place(sizes.header(), codes),
                shift,
                place(0, scales),
                TILE * number,
                n.div_ceil(TILE) * sizes.tile(),
            )
        }
        Packing::Fragments => return Ok(FragmentSizes::new(DType::Packed(format), n, k)?.packed(spec)),
    };
    let zeros =
        (format.numbers_per_group() > 1).then(|| place(scales.offset + scale_bytes, scales.terms.clone()));
    Ok(TensorLayout { len, region: LayoutRegion::Group { spec, codes, shift, scales, zeros } })
}

/// The words of one group of a row, in row-major order.
pub(crate) fn row_bytes(format: QuantFormat, codes: &[u8], out: &mut Vec<u8>) {
    for codes in codes.chunks(format.codes_per_word()) {
        out.extend(word(format, codes.iter().copied()).to_le_bytes());
    }
}

/// The lowest bits first.
fn word(format: QuantFormat, codes: impl Iterator<Item = u8>) -> u32 {
    codes.enumerate().fold(0, |word, (i, code)| word | u32::from(code) << (i * format.bits))
}

/// One group of a tile from its 16 rows: `codes` has those of each row in order.
pub(crate) fn tile_bytes(spec: GroupSpec, grids: &[QuantGrid; TILE], codes: &[u8], out: &mut Vec<u8>) {
    let format = spec.format;
    grids.iter().for_each(|grid| spec.number_type().write(grid.scale, out));
    if format.numbers_per_group() > 1 {
        grids.iter().for_each(|grid| spec.number_type().write(grid.zero, out));
    }
    let (columns, words) = (format.block_columns(), words(format, format.block_columns()));
    for first in (0..spec.group).step_by(columns) {
        for j in 0..words {
            for row in codes.chunks_exact(spec.group) {
                let block = &row[first..first + columns];
                if format.fills_bytes() {
                    out.extend(quads(format, block, j, words));
                } else {
                    let per_word = format.codes_per_word();
                    let codes = block[j * per_word..][..per_word].iter();
                    out.extend(word(format, codes.copied()).to_le_bytes());
                }
            }
        }
    }
}

/// Word `j` of a row in a block of 32 columns: quads `j`, `j + words`, ..., the first in the lowest bits of
/// its four bytes.
fn quads(format: QuantFormat, block: &[u8], j: usize, words: usize) -> [u8; WORD] {
    let mut bytes = [0; WORD];
    for (at, quad) in (j..block.len() / WORD).step_by(words).enumerate() {
        for (byte, code) in bytes.iter_mut().zip(&block[WORD * quad..]) {
            *byte |= code << (at * format.bits);
        }
    }
    bytes
}

/// The word that fills the codes without a weight.
pub(crate) fn padding_word(spec: GroupSpec) -> [u8; WORD] {
    let codes = std::iter::repeat_n(spec.padding_code(), spec.format.codes_per_word());
    word(spec.format, codes).to_le_bytes()
}
