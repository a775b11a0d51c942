//! Weight formats: their arithmetic, their order in memory, and the kernel-IR fragments that read them.
//!
//! One file per format (`plain`, `q4g32`, `q8g32`); [`layout`] says where element (row, k) of an `[N, K]` tensor lies
//! for a format and a [`Packing`]; [`pack`] writes that order from a stream of rows; [`unpack`] reads it back, on the
//! host and as kernel IR. All group formats share the arithmetic of [`group`]. [`runs`] is a packing for who draws its bytes.
//!
//! Invariant: everything that is stored reads back through [`element`], [`dequantize`], [`unpack_scalar`] and the tile
//! fragments as exactly the same f32 value.

pub mod group;
pub mod layout;
pub mod pack;
pub mod plain;
pub mod q4g32;
pub mod q8g32;
pub mod runs;
pub mod tile;
pub mod unpack;

pub use group::{GroupSpec, ScaleSearch};
pub use layout::{Layout, TILE, packed_bytes};
pub use pack::{PackOptions, Packer, pack};
pub use unpack::{dequantize, element, unpack_scalar};

use mlcc_ir::types::{DType, Packing};

/// Why a tensor could not be packed or read.
#[derive(Clone, PartialEq, Debug, thiserror::Error)]
pub enum QuantError {
    #[error(
        "weights cannot be stored as {dtype}: expected one of f32, f16, bf16, q4g32, q8g32; choose another format for this tensor"
    )]
    UnsupportedType { dtype: DType },
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
