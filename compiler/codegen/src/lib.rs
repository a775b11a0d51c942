//! Kernel IR and steps to machine code: LLVM ([`llvm`]) for x86-64, AArch64 and NVIDIA PTX, Cranelift for builds without
//! LLVM, the model table, linking, and the artifact file.

pub mod artifact;
#[cfg(feature = "cranelift")]
pub mod clif;
#[cfg(feature = "llvm")]
mod compile;
mod error;
#[cfg(feature = "llvm")]
pub mod executor;
pub mod halfs;
pub mod launch;
pub mod link;
#[cfg(feature = "llvm")]
pub mod llvm;
pub mod model;
pub mod prepare;
pub mod ptxas;
pub mod table;

#[cfg(feature = "llvm")]
pub use compile::{Library, Part, compile, emit, link};
pub use error::{CodegenError, Fault};
pub use model::{Input, LevelInput};
