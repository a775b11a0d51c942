//! PTX text: read strictly ([`text`]), then made into instructions over numbered registers ([`decode`]).
//!
//! Unknown text is an error that names it and its line. The source for every rule is NVIDIA's "Parallel
//! Thread Execution ISA".

pub mod convert_ops;
pub mod decode;
pub mod kernel;
pub mod memory_ops;
pub mod modifiers;
pub mod op;
pub mod scope;
pub mod text;
pub mod tokens;
pub mod types;
pub mod warp_ops;

use thiserror::Error;

/// The reason why a text is no program.
#[derive(Error, Clone, PartialEq, Eq, Debug)]
#[error("line {line}: {what}")]
pub struct PtxError {
    pub line: u32,
    pub what: String,
}
