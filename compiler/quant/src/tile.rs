//! Kernel-IR fragments that read the `Tile16` order of the group formats a vector at a time.
//!
//! A group of a tile is 16 scales and then *words*: vectors of 32-bit lanes, lane = weight row, each holding 8 (q4) or 4
//! (q8) codes of that row. A word splits into *quads*: four consecutive columns of each row, one byte each, which is what
//! the u8 x i8 dot instructions take. `part` picks `lanes` of the 16 rows.

use crate::layout::TILE;
use crate::{q4g32, q8g32};
use mlcc_ir::builder::KernelBuilder;
use mlcc_ir::instr::InstrId;
use mlcc_ir::kernel::{BinOp, BufId, ExprId, Ty};
use mlcc_ir::types::{DType, Format};

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

/// Reads one group of a tile: `base` is the byte offset of the group in `buf`.
#[derive(Clone, Copy, Debug)]
pub struct GroupReader {
    pub format: Format,
    pub buf: BufId,
    pub base: ExprId,
    pub lanes: u32,
    pub part: u32,
}

impl GroupReader {
    /// The scales of the rows of this part, f32.
    pub fn scales(&self, kb: &mut KernelBuilder) -> ExprId {
        let at = kb.add_int(self.base, i64::from(2 * self.part * self.lanes));
        let bytes = kb.load_vec(self.buf, at, 2 * self.lanes);
        let scales = kb.bitcast(bytes, Ty::vector(DType::F16, self.lanes));
        kb.cast(scales, DType::F32)
    }

    /// Word `word`, u32 lanes.
    pub fn word(&self, kb: &mut KernelBuilder, word: usize) -> ExprId {
        let offset = 2 * TILE + 4 * TILE * word + 4 * (self.part * self.lanes) as usize;
        let at = kb.add_int(self.base, offset as i64);
        let bytes = kb.load_vec(self.buf, at, 4 * self.lanes);
        kb.bitcast(bytes, Ty::vector(DType::U32, self.lanes))
    }
}

fn u32s(kb: &mut KernelBuilder, value: i64, lanes: u32) -> ExprId {
    let one = kb.int_of(value, DType::U32);
    kb.splat(one, lanes)
}

fn shift_right(kb: &mut KernelBuilder, word: ExprId, bits: i64) -> ExprId {
    if bits == 0 {
        return word;
    }
    let by = u32s(kb, bits, kb.ty(word).lanes);
    kb.binary(BinOp::Shr, word, by)
}

/// The stored codes (zero point included) of one quad of a word: u8, four per row.
pub fn quad_codes(kb: &mut KernelBuilder, format: Format, word: ExprId, quad: usize) -> ExprId {
    let bytes = kb.bitcast(word, Ty::vector(DType::U8, 4 * kb.ty(word).lanes));
    let (op, by) = match (format, quad) {
        (Format::Q8G32, _) => return bytes,
        (Format::Q4G32, 0..4) => (BinOp::And, 0x0f),
        (Format::Q4G32, _) => (BinOp::Shr, 4),
    };
    let by = kb.int_of(by, DType::U8);
    kb.binary(op, bytes, by)
}

/// The codes of one quad as signed integers (zero point removed): i8, four per row.
pub fn quad_signed(kb: &mut KernelBuilder, format: Format, word: ExprId, quad: usize) -> ExprId {
    let codes = quad_codes(kb, format, word, quad);
    let ty = kb.ty(codes);
    let zero = kb.constant(zero_point(format) as f64, ty);
    // Subtracting 128 is flipping the top bit.
    let op = match format {
        Format::Q8G32 => BinOp::Xor,
        Format::Q4G32 => BinOp::Sub,
    };
    let signed = kb.binary(op, codes, zero);
    kb.bitcast(signed, Ty::vector(DType::I8, ty.lanes))
}

/// The sixteen integer weights that 4-bit codes stand for, to be pinned outside of the loops that use [`quad_floats`].
pub fn code_table(kb: &mut KernelBuilder) -> ExprId {
    let (first, one) = (kb.int_of(-zero_point(Format::Q4G32), DType::I32), kb.int_of(1, DType::I32));
    let values = kb.ramp(first, one, 16);
    kb.cast(values, DType::F32)
}

/// The integer weights of one quad as f32: one vector over the rows per column. With a 16-entry lookup instruction and
/// the [`code_table`], 4-bit codes take a shift and a lookup each.
pub fn quad_floats(
    kb: &mut KernelBuilder,
    format: Format,
    word: ExprId,
    quad: usize,
    lookup: Option<(InstrId, ExprId)>,
) -> [ExprId; 4] {
    let lanes = kb.ty(word).lanes;
    if let (Format::Q4G32, Some((instr, table))) = (format, lookup) {
        return [0, 1, 2, 3].map(|column| {
            let index = shift_right(kb, word, 8 * column + if quad < 4 { 0 } else { 4 });
            let index = kb.bitcast(index, Ty::vector(DType::I32, lanes));
            kb.instr(instr, vec![table, index])
        });
    }
    let signed = quad_signed(kb, format, word, quad);
    let word = kb.bitcast(signed, Ty::vector(DType::I32, lanes));
    let word = kb.let_("w", word);
    [0, 1, 2, 3].map(|column| {
        // Byte `column` of each lane with its sign.
        let mut value = word;
        for (op, bits) in [(BinOp::Shl, 24 - 8 * column), (BinOp::Shr, 24)] {
            if bits != 0 {
                let by = kb.int_of(bits, DType::I32);
                value = kb.binary(op, value, by);
            }
        }
        kb.cast(value, DType::F32)
    })
}
