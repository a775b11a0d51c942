//! Element types that a checkpoint file may store. Only three float types, the block formats of GGUF and packed weights can
//! be read as weights; the others occur in buffers that no model definition asks for (masks, positions), and are listed without being
//! read.

use super::packed::PackedKind;
use half::slice::{HalfBitsSliceExt, HalfFloatSliceExt};
use half::{bf16, f16};
use std::fmt;

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum StoredType {
    Bool,
    I8,
    U8,
    I16,
    U16,
    I32,
    U32,
    I64,
    U64,
    F16,
    BF16,
    F32,
    F64,
    C64,
    F8E4M3,
    F8E5M2,
    /// A power of two, as scales are.
    F8E8M0,
    /// Block formats of GGUF files, see [`super::gguf::blocks`].
    Q4_0,
    Q4_1,
    Q5_0,
    Q5_1,
    Q8_0,
    Q4K,
    Q5K,
    Q6K,
    Q2K,
    Q3K,
    Iq4Nl,
    Iq4Xs,
    Mxfp4,
    Nvfp4,
    /// Codes, scales and zero points in tensors of their own, see [`super::packed`].
    Packed(PackedKind),
}

impl StoredType {
    pub fn name(self) -> &'static str {
        match self {
            StoredType::Bool => "bool",
            StoredType::I8 => "i8",
            StoredType::U8 => "u8",
            StoredType::I16 => "i16",
            StoredType::U16 => "u16",
            StoredType::I32 => "i32",
            StoredType::U32 => "u32",
            StoredType::I64 => "i64",
            StoredType::U64 => "u64",
            StoredType::F16 => "f16",
            StoredType::BF16 => "bf16",
            StoredType::F32 => "f32",
            StoredType::F64 => "f64",
            StoredType::C64 => "c64",
            StoredType::F8E4M3 => "f8_e4m3",
            StoredType::F8E5M2 => "f8_e5m2",
            StoredType::F8E8M0 => "f8_e8m0",
            StoredType::Q4_0 => "Q4_0",
            StoredType::Q4_1 => "Q4_1",
            StoredType::Q5_0 => "Q5_0",
            StoredType::Q5_1 => "Q5_1",
            StoredType::Q8_0 => "Q8_0",
            StoredType::Q4K => "Q4_K",
            StoredType::Q5K => "Q5_K",
            StoredType::Q6K => "Q6_K",
            StoredType::Q2K => "Q2_K",
            StoredType::Q3K => "Q3_K",
            StoredType::Iq4Nl => "IQ4_NL",
            StoredType::Iq4Xs => "IQ4_XS",
            StoredType::Mxfp4 => "MXFP4",
            StoredType::Nvfp4 => "NVFP4",
            StoredType::Packed(kind) => kind.name(),
        }
    }

    /// Elements that are stored together, and their bytes. Of packed weights only their parts have bytes.
    pub fn block(self) -> (usize, usize) {
        match self {
            StoredType::Bool | StoredType::I8 | StoredType::U8 => (1, 1),
            StoredType::F8E4M3 | StoredType::F8E5M2 | StoredType::F8E8M0 => (1, 1),
            StoredType::Packed(_) => (1, 0),
            StoredType::I16 | StoredType::U16 | StoredType::F16 | StoredType::BF16 => (1, 2),
            StoredType::I32 | StoredType::U32 | StoredType::F32 => (1, 4),
            StoredType::I64 | StoredType::U64 | StoredType::F64 | StoredType::C64 => (1, 8),
            StoredType::Q4_0 => (32, 18),
            StoredType::Q4_1 => (32, 20),
            StoredType::Q5_0 => (32, 22),
            StoredType::Q5_1 => (32, 24),
            StoredType::Q8_0 => (32, 34),
            StoredType::Q4K => (256, 144),
            StoredType::Q5K => (256, 176),
            StoredType::Q6K => (256, 210),
            StoredType::Q2K => (256, 84),
            StoredType::Q3K => (256, 110),
            StoredType::Iq4Nl => (32, 18),
            StoredType::Iq4Xs => (256, 136),
            StoredType::Mxfp4 => (32, 17),
            StoredType::Nvfp4 => (64, 36),
        }
    }

    /// True for formats that store several elements together.
    pub fn is_block(self) -> bool {
        self.block().0 > 1
    }

    /// True for formats of fewer bits with scales, in blocks or packed.
    pub fn is_quantized(self) -> bool {
        self.is_block() || matches!(self, StoredType::Packed(_))
    }

    /// Bytes of one element of a type that is no block format; of a block of one that is.
    pub fn size(self) -> usize {
        self.block().1
    }

    /// Bytes of `elements` in rows of `row`; `None` if a row is no whole number of blocks, or the number does not fit.
    pub fn checked_bytes(self, elements: usize, row: usize) -> Option<usize> {
        let (block, bytes) = self.block();
        row.is_multiple_of(block).then(|| (elements / block).checked_mul(bytes))?
    }

    /// True for types that weights may have.
    pub fn is_weight(self) -> bool {
        self.is_quantized() || self.ir().is_some()
    }

    /// The types that are read from GGUF files, for messages.
    pub const GGML_READ: &'static str =
        "F32, F16, BF16, Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q2_K to Q6_K, IQ4_NL, IQ4_XS, MXFP4 and NVFP4";

    /// By the number of a type in ggml; the name of one that is not read.
    pub fn from_ggml(number: u32) -> Result<StoredType, String> {
        Ok(match number {
            0 => StoredType::F32,
            1 => StoredType::F16,
            2 => StoredType::Q4_0,
            3 => StoredType::Q4_1,
            6 => StoredType::Q5_0,
            7 => StoredType::Q5_1,
            8 => StoredType::Q8_0,
            12 => StoredType::Q4K,
            13 => StoredType::Q5K,
            10 => StoredType::Q2K,
            11 => StoredType::Q3K,
            14 => StoredType::Q6K,
            20 => StoredType::Iq4Nl,
            23 => StoredType::Iq4Xs,
            39 => StoredType::Mxfp4,
            40 => StoredType::Nvfp4,
            24 => StoredType::I8,
            25 => StoredType::I16,
            26 => StoredType::I32,
            27 => StoredType::I64,
            28 => StoredType::F64,
            30 => StoredType::BF16,
            other => return Err(ggml_name(other)),
        })
    }

    /// The same type in the IR, for those that can be weights as they are.
    pub fn ir(self) -> Option<mlcc_ir::types::DType> {
        match self {
            StoredType::F16 => Some(mlcc_ir::types::DType::F16),
            StoredType::BF16 => Some(mlcc_ir::types::DType::BF16),
            StoredType::F32 => Some(mlcc_ir::types::DType::F32),
            _ => None,
        }
    }
}

/// Types of ggml that are not read.
fn ggml_name(number: u32) -> String {
    let name = match number {
        9 => "Q8_1",
        15 => "Q8_K",
        16 => "IQ2_XXS",
        17 => "IQ2_XS",
        18 => "IQ3_XXS",
        19 => "IQ1_S",
        21 => "IQ3_S",
        22 => "IQ2_S",
        29 => "IQ1_M",
        34 => "TQ1_0",
        35 => "TQ2_0",
        other => return format!("type {other}, which ggml does not have either"),
    };
    name.to_string()
}

impl fmt::Display for StoredType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// Elements of one of the three float types.
pub(super) fn to_floats(dtype: StoredType, bytes: &[u8], out: &mut [f32]) {
    match dtype {
        StoredType::F16 => {
            convert_halves(bytes, out, |bits, out| bits.reinterpret_cast::<f16>().convert_to_f32_slice(out));
        }
        StoredType::BF16 => {
            convert_halves(bytes, out, |bits, out| bits.reinterpret_cast::<bf16>().convert_to_f32_slice(out));
        }
        _ => {
            for (value, raw) in out.iter_mut().zip(bytes.as_chunks::<4>().0) {
                *value = f32::from_le_bytes(*raw);
            }
        }
    }
}

/// Converts through a small aligned buffer: tensors may start at any byte of the file.
fn convert_halves(bytes: &[u8], out: &mut [f32], convert: impl Fn(&[u16], &mut [f32])) {
    const PIECE: usize = 512;
    let mut bits = [0u16; PIECE];
    for (raw, values) in bytes.chunks(2 * PIECE).zip(out.chunks_mut(PIECE)) {
        for (bit, pair) in bits.iter_mut().zip(raw.as_chunks::<2>().0) {
            *bit = u16::from_le_bytes(*pair);
        }
        convert(&bits[..values.len()], values);
    }
}
