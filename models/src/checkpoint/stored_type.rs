//! Element types that a checkpoint file may store. Only the three float types can be read as weights; the others occur in
//! buffers that no model definition asks for (masks, positions), and are listed without being read.

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
        }
    }

    /// Bytes of one element.
    pub fn size(self) -> usize {
        match self {
            StoredType::Bool | StoredType::I8 | StoredType::U8 => 1,
            StoredType::F8E4M3 | StoredType::F8E5M2 => 1,
            StoredType::I16 | StoredType::U16 | StoredType::F16 | StoredType::BF16 => 2,
            StoredType::I32 | StoredType::U32 | StoredType::F32 => 4,
            StoredType::I64 | StoredType::U64 | StoredType::F64 | StoredType::C64 => 8,
        }
    }

    /// The same type in the IR, for those that can be weights.
    pub fn ir(self) -> Option<mlcc_ir::types::DType> {
        match self {
            StoredType::F16 => Some(mlcc_ir::types::DType::F16),
            StoredType::BF16 => Some(mlcc_ir::types::DType::BF16),
            StoredType::F32 => Some(mlcc_ir::types::DType::F32),
            _ => None,
        }
    }
}

impl fmt::Display for StoredType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}
