//! Kernel IR and steps to machine code: LLVM ([`llvm`]) for x86-64, AArch64 and NVIDIA PTX, Cranelift for builds without
//! LLVM, the model table, linking, and the artifact file.

pub mod artifact;
#[cfg(feature = "cranelift")]
pub mod clif;
mod error;
pub mod halfs;
pub mod link;
#[cfg(feature = "llvm")]
pub mod llvm;
pub mod prepare;
pub mod table;

pub use error::{CodegenError, Fault};
