//! Weights that another program has quantized: codes of a few bits, scales and zero points, in tensors of their own.
//!
//! [`layouts`] finds the tensors that belong together, by the names and shapes of each method, and lists one weight in their
//! place, which reads back as floats: `(code - zero point) * scale`, in f32, as the libraries of the formats do it. The layouts
//! differ in how codes are cut out of words ([`QuantizedValues`]), what a code stands for (a table), and which weights share a scale
//! ([`GroupScales`], [`ColumnGroups`]); one reader does for all. It reads rows, so memory stays at what is asked for.

mod grid;
mod layouts;
mod numbers;
mod reader;
mod scales;

pub use grid::{StoredCodes, StoredGroups};
pub(super) use layouts::collect_packed_weights;
pub(super) use reader::PackedReader;

use super::{FileBytes, StoredType, TensorInfo};
use crate::error::CheckpointError;
pub(super) use scales::{ColumnGroups, GlobalScale, GroupScales};

/// How weights were quantized: what config.json says, as far as the tensors do not tell it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Quantization {
    pub method: QuantMethod,
    /// Shapes `[rows, columns]` of the parts of a matrix that share a scale, where some are stated.
    pub blocks: Vec<[usize; 2]>,
    /// Bits of a code, where that is stated for all.
    pub bits: Option<usize>,
    /// Codes have zero points; `None` if that is not stated, or differs.
    pub zero_points: Option<bool>,
}

/// Layouts of quantized weights that are read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum QuantMethod {
    /// AutoAWQ, version GEMM.
    Awq,
    /// AutoGPTQ and GPTQModel. `stored_minus_one`: zero points are stored less one (format v1).
    Gptq { stored_minus_one: bool },
    /// gpt-oss: `*_blocks` and `*_scales`.
    Mxfp4,
    /// Floats of 8 bits with scales of any granularity.
    Fp8,
    /// Formats of compressed-tensors.
    CompressedTensors,
    /// NVIDIA ModelOpt: FP8 and NVFP4.
    ModelOpt,
    /// bitsandbytes: NF4, FP4 and INT8.
    BitsAndBytes,
}

/// Kinds of packed weights, for messages and reports.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum PackedKind {
    Awq,
    Gptq,
    Int4,
    Int8,
    Fp8,
    Mxfp4,
    Nvfp4,
    Nf4,
}

impl PackedKind {
    pub fn name(self) -> &'static str {
        match self {
            PackedKind::Awq => "AWQ",
            PackedKind::Gptq => "GPTQ",
            PackedKind::Int4 => "INT4",
            PackedKind::Int8 => "INT8",
            PackedKind::Fp8 => "FP8",
            PackedKind::Mxfp4 => "MXFP4",
            PackedKind::Nvfp4 => "NVFP4",
            PackedKind::Nf4 => "NF4",
        }
    }
}

/// A tensor of the file that packed weights are made of: row-major.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct ComponentTensor {
    pub name: String,
    pub file: usize,
    pub start: usize,
    pub dtype: StoredType,
    pub shape: Vec<usize>,
}

impl ComponentTensor {
    pub fn elements(&self) -> usize {
        self.shape.iter().product()
    }

    pub fn bytes<'a>(&self, files: &'a [FileBytes]) -> &'a [u8] {
        files[self.file].slice(self.start, self.elements() * self.dtype.size())
    }

    /// A tensor that cannot be right, as the error that names it.
    pub fn damaged_error(&self, files: &[FileBytes], detail: String) -> CheckpointError {
        let (file, tensor) = (files[self.file].label.clone(), self.name.clone());
        CheckpointError::UnsupportedTensor { file, tensor, detail }
    }
}

/// Unsigned numbers of 2, 4 or 8 bits, several in a little-endian word, and what each stands for.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct QuantizedValues {
    pub part: ComponentTensor,
    /// log2 of the bits of a number.
    pub bits_log2: u32,
    /// The place in its word of each number; empty: the first one is lowest.
    pub places: &'static [u8],
    /// The axis along which a word's numbers follow each other.
    pub along: MatrixAxis,
    /// Words from one to the next along that axis, and along the other.
    pub steps: [usize; 2],
    /// The value of each number; NaN: the number stands for none.
    pub values: Vec<f32>,
}

/// An axis of a matrix.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum MatrixAxis {
    Rows,
    Columns,
}

/// A weight `[matrices * rows, columns]` in codes.
#[derive(Clone, Debug, PartialEq)]
pub struct PackedWeight {
    codes: QuantizedValues,
    zeros: Option<QuantizedValues>,
    scales: GroupScales,
    /// Multiplies or divides all scales.
    global: Option<GlobalScale>,
    groups: ColumnGroups,
    /// Rows of each of the matrices below one another.
    rows: usize,
    columns: usize,
    /// The weight is the transpose of each of the matrices.
    transposed: bool,
}

impl PackedWeight {
    /// The file of the codes.
    pub fn file_index(&self) -> usize {
        self.codes.part.file
    }

    fn components(&self) -> impl Iterator<Item = &ComponentTensor> {
        let zeros = self.zeros.iter().map(|zeros| &zeros.part);
        std::iter::once(&self.codes.part)
            .chain(zeros)
            .chain(self.scales.components())
            .chain(self.groups.index_tensor())
    }
}

/// What was in the list of tensors, as a part; `None` if it is not stored in one piece.
fn component_of(info: &TensorInfo) -> Option<ComponentTensor> {
    match info.storage {
        super::TensorStorage::Contiguous { file, start } => Some(ComponentTensor {
            name: info.stored_name.clone(),
            file,
            start,
            dtype: info.dtype,
            shape: info.shape.clone(),
        }),
        _ => None,
    }
}
