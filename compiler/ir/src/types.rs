//! Element types of both IRs, and tensor types.

use crate::dim::Dim;
pub use crate::format::QuantFormat;
use std::fmt;

/// Type of one element. `Packed` appears only in the graph IR: a tensor stored in a group-quantized weight
/// format (its arithmetic lives in `mlcc-quant`); reading an element means reading its dequantized f32 value.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub enum DType {
    Bool,
    I8,
    U8,
    I16,
    U16,
    I32,
    U32,
    I64,
    F16,
    BF16,
    F32,
    Packed(QuantFormat),
}

impl DType {
    /// All plain (not packed) types.
    pub const PLAIN: [DType; 11] = [
        DType::Bool,
        DType::I8,
        DType::U8,
        DType::I16,
        DType::U16,
        DType::I32,
        DType::U32,
        DType::I64,
        DType::F16,
        DType::BF16,
        DType::F32,
    ];
    pub fn name(self) -> &'static str {
        match self {
            DType::Bool => "bool",
            DType::I8 => "i8",
            DType::U8 => "u8",
            DType::I16 => "i16",
            DType::U16 => "u16",
            DType::I32 => "i32",
            DType::U32 => "u32",
            DType::I64 => "i64",
            DType::F16 => "f16",
            DType::BF16 => "bf16",
            DType::F32 => "f32",
            DType::Packed(format) => format.name(),
        }
    }
    pub fn parse(name: &str) -> Option<DType> {
        let plain = DType::PLAIN.into_iter().find(|d| d.name() == name);
        plain.or_else(|| QuantFormat::parse(name).map(DType::Packed))
    }
    /// Bytes of one element in memory; `None` for packed formats, whose size depends on the packing.
    pub fn bytes(self) -> Option<usize> {
        match self {
            DType::Bool | DType::I8 | DType::U8 => Some(1),
            DType::I16 | DType::U16 | DType::F16 | DType::BF16 => Some(2),
            DType::I32 | DType::U32 | DType::F32 => Some(4),
            DType::I64 => Some(8),
            DType::Packed(_) => None,
        }
    }
    pub fn is_float(self) -> bool {
        matches!(self, DType::F16 | DType::BF16 | DType::F32)
    }
    pub fn is_int(self) -> bool {
        matches!(self, DType::I8 | DType::U8 | DType::I16 | DType::U16 | DType::I32 | DType::U32 | DType::I64)
    }
    pub fn is_signed(self) -> bool {
        matches!(self, DType::I8 | DType::I16 | DType::I32 | DType::I64)
    }
    pub fn is_packed(self) -> bool {
        matches!(self, DType::Packed(_))
    }
}

impl fmt::Display for DType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// Order in memory of a parameter, part of the contract with the kernel that reads it (see `mlcc-quant` for
/// the bytes).
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub enum Packing {
    /// Plain row-major, `[N, K]`. Packed formats: per row, codes low bits first; all codes, then all scales.
    RowMajor,
    /// Column-major: `[K, N]` (MLC's KN layout, `q4f16_0` on a GPU).
    ColMajor,
    /// CPU contraction layout: tiles of 16 rows, within a tile k-major with the 16 rows interleaved.
    Tile16,
    /// GPU contraction layout: what a lane of a warp multiplies on tensor cores lies together, in pieces of
    /// 16 bytes.
    Fragments,
}

impl Packing {
    pub const ALL: [Packing; 4] = [Packing::RowMajor, Packing::ColMajor, Packing::Tile16, Packing::Fragments];
    pub fn name(self) -> &'static str {
        match self {
            Packing::RowMajor => "row_major",
            Packing::ColMajor => "col_major",
            Packing::Tile16 => "tile16",
            Packing::Fragments => "fragments",
        }
    }
}

/// `dtype[dims]`.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub struct TensorType {
    pub dtype: DType,
    pub dims: Vec<Dim>,
}

impl TensorType {
    pub fn new(dtype: DType, dims: impl IntoIterator<Item = impl Into<Dim>>) -> Self {
        TensorType { dtype, dims: dims.into_iter().map(Into::into).collect() }
    }
    pub fn rank(&self) -> usize {
        self.dims.len()
    }
    /// Number of elements.
    pub fn elements(&self) -> Dim {
        self.dims.iter().fold(Dim::from(1), |a, d| a.product(d))
    }
    /// True if both have the same number of elements for all values of the symbols; sizes that both have in
    /// common cancel, so that products of symbols compare too.
    pub fn same_elements(&self, other: &TensorType) -> bool {
        let mut rest = other.dims.clone();
        let mut mine = Vec::new();
        for d in &self.dims {
            match rest.iter().position(|r| r == d && d.as_const().is_none()) {
                Some(i) => drop(rest.swap_remove(i)),
                None => mine.push(d.clone()),
            }
        }
        let product = |dims: &[Dim]| dims.iter().try_fold(Dim::from(1), |a, d| a.mul(d));
        match (product(&mine), product(&rest)) {
            (Some(a), Some(b)) => a == b,
            _ => false,
        }
    }
}

impl fmt::Display for TensorType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}[", self.dtype)?;
        for (i, d) in self.dims.iter().enumerate() {
            write!(f, "{}{d}", if i > 0 { ", " } else { "" })?;
        }
        f.write_str("]")
    }
}
