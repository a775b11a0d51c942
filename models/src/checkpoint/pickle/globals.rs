//! The names that a pickle may mention, and names for the opcodes that are refused.

use crate::checkpoint::StoredType;

/// All classes and functions of a state dict. There is no way to name another.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PickleGlobal {
    /// `collections.OrderedDict`
    OrderedDict,
    /// `torch._utils._rebuild_tensor_v2`
    RebuildTensor,
    /// `torch._utils._rebuild_parameter`
    RebuildParameter,
    /// `torch.FloatStorage` and its kin.
    Storage(StoredType),
}

impl PickleGlobal {
    pub fn find(module: &str, name: &str) -> Option<PickleGlobal> {
        match (module, name) {
            ("collections", "OrderedDict") => Some(PickleGlobal::OrderedDict),
            ("torch._utils", "_rebuild_tensor_v2") => Some(PickleGlobal::RebuildTensor),
            ("torch._utils", "_rebuild_parameter") => Some(PickleGlobal::RebuildParameter),
            ("torch", _) => storage_type(name).map(PickleGlobal::Storage),
            _ => None,
        }
    }
}

fn storage_type(name: &str) -> Option<StoredType> {
    Some(match name {
        "FloatStorage" => StoredType::F32,
        "HalfStorage" => StoredType::F16,
        "BFloat16Storage" => StoredType::BF16,
        "DoubleStorage" => StoredType::F64,
        "LongStorage" => StoredType::I64,
        "IntStorage" => StoredType::I32,
        "ShortStorage" => StoredType::I16,
        "CharStorage" => StoredType::I8,
        "ByteStorage" => StoredType::U8,
        "BoolStorage" => StoredType::Bool,
        _ => return None,
    })
}

/// Python's names of the opcodes that are not executed.
pub(super) fn opcode_name(opcode: u8) -> &'static str {
    match opcode {
        b'1' => "POP_MARK",
        b'2' => "DUP",
        b'F' => "FLOAT",
        b'I' => "INT",
        b'L' => "LONG",
        b'P' => "PERSID",
        b'S' => "STRING",
        b'T' => "BINSTRING",
        b'U' => "SHORT_BINSTRING",
        b'V' => "UNICODE",
        b'B' => "BINBYTES",
        b'C' => "SHORT_BINBYTES",
        b'd' => "DICT",
        b'g' => "GET",
        b'i' => "INST",
        b'l' => "LIST",
        b'o' => "OBJ",
        b'p' => "PUT",
        0x81 => "NEWOBJ",
        0x82 => "EXT1",
        0x83 => "EXT2",
        0x84 => "EXT4",
        0x8b => "LONG4",
        0x8e => "BINBYTES8",
        0x8f => "EMPTY_SET",
        0x90 => "ADDITEMS",
        0x91 => "FROZENSET",
        0x92 => "NEWOBJ_EX",
        0x96 => "BYTEARRAY8",
        0x97 => "NEXT_BUFFER",
        0x98 => "READONLY_BUFFER",
        _ => "unknown",
    }
}
