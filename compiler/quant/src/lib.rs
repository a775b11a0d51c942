//! Weight formats: their arithmetic, their order in memory, and the kernel-IR fragments that read them.
//!
//! Formats are data: [`plain`] types, and group formats described by [`mlcc_ir::format::QuantFormat`], which
//! share the arithmetic of [`group`] and the order of [`packed`]. [`layout`] says where element (row, k) of
//! an `[N, K]` tensor lies for a format and a [`Packing`]; [`pack`] writes that order from a stream of rows;
//! [`unpack`] reads it back, on the host and as kernel IR, [`tile`] a vector at a time. [`runs`] is a packing
//! for code that draws its bytes.
//!
//! Invariant: everything that is stored reads back through [`dequantize_element`], [`dequantize`],
//! [`unpack_scalar`] and the tile fragments as exactly the same f32 value.

mod floats;
pub mod fragments;
pub mod group;
pub mod layout;
pub mod pack;
pub mod packed;
pub mod plain;
pub mod runs;
pub mod tile;
pub mod unpack;

pub use fragments::FragmentSizes;
pub use group::{GroupSpec, QuantGrid, ScaleSearch};
pub use layout::{TILE, TensorLayout, packed_bytes};
pub use pack::{PackOptions, WeightPacker, pack};
pub use unpack::{dequantize, dequantize_element, half_steps, unpack_scalar};

use mlcc_ir::types::{DType, Packing, QuantFormat};

/// Every type that weights can be stored in: plain ones first.
pub fn storage_types() -> impl Iterator<Item = DType> {
    let plain = [DType::F32, DType::F16, DType::BF16];
    plain.into_iter().chain(QuantFormat::ALL.iter().map(|&format| DType::Packed(format)))
}

/// Their names, for messages.
pub fn storage_names() -> String {
    storage_types().map(|dtype| dtype.name()).collect::<Vec<_>>().join(", ")
}

/// The reasons why a tensor could not be packed or read.
#[derive(Clone, PartialEq, Debug, thiserror::Error)]
pub enum QuantError {
    #[error(
        "weights cannot be stored as {dtype}: expected one of {}; choose another format for this tensor",
        storage_names()
    )]
    UnsupportedType { dtype: DType },
    #[error(
        "a tensor of {n} x {k} {dtype} values does not come in fragments: expected rows in multiples of 16, columns in multiples of 64 and of a group, and weights of 16 bits or codes of 4 or 8 bits around one zero point"
    )]
    NoFragments { dtype: DType, n: usize, k: usize },
    #[error("a tensor of {n} x {k} {dtype} values in packing {} is larger than the address space", .packing.name())]
    TooLarge { dtype: DType, packing: Packing, n: usize, k: usize },
    #[error(
        "weight at row {row}, column {column} is {value}; weights must be finite (they would be stored as {dtype}): the checkpoint is damaged"
    )]
    NotFinite { dtype: DType, row: usize, column: usize, value: f32 },
    #[error("expected whole rows of {k} values, found {found} values")]
    PartialRow { k: usize, found: usize },
    #[error("expected {expected} rows of weights, found {found}")]
    RowCount { expected: usize, found: usize },
    #[error("expected {expected} bytes for {n} x {k} {dtype} in packing {}, found {found}", .packing.name())]
    ByteCount { dtype: DType, packing: Packing, n: usize, k: usize, expected: usize, found: usize },
}
