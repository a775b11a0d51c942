//! Kernel IR and steps to machine code: LLVM ([`llvm`]) for x86-64, AArch64 and NVIDIA PTX, Cranelift for
//! builds without LLVM, the model table, linking, and the artifact file.

pub mod artifact;
#[cfg_attr(not(any(feature = "llvm", feature = "cranelift")), allow(dead_code, reason = "for back ends"))]
pub mod cache;
#[cfg(feature = "cranelift")]
pub mod clif;
#[cfg(any(feature = "llvm", feature = "cranelift"))]
mod compile;
mod error;
#[cfg(any(feature = "llvm", feature = "cranelift"))]
pub mod executor;
pub mod folder;
pub mod halfs;
pub mod launch;
pub mod link;
#[cfg(feature = "llvm")]
pub mod llvm;
mod logits_only;
pub mod model;
pub mod nvdisasm;
#[cfg_attr(not(any(feature = "llvm", feature = "cranelift")), allow(dead_code, reason = "for back ends"))]
mod objects;
pub mod placement;
#[cfg(any(feature = "llvm", feature = "cranelift"))]
mod pool;
pub mod prepare;
pub mod ptxas;
#[cfg(any(feature = "llvm", feature = "cranelift"))]
mod step;
mod step_code;
pub mod table;
#[cfg(any(feature = "llvm", feature = "cranelift"))]
mod units;

#[cfg(any(feature = "llvm", feature = "cranelift"))]
pub use compile::{CompileJobs, GeneratedCode, LinkedLibrary, link};
#[cfg(feature = "llvm")]
pub use compile::{compile, compile_with_jobs, emit};
#[cfg(feature = "cranelift")]
pub use compile::{compile_with_cranelift, compile_with_cranelift_jobs};
pub use error::{CodegenError, EmitError};
pub use model::{CodegenInput, LevelInput};
pub use objects::{CodeListener, ObjectCounts};
