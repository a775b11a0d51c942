//! The LLVM back end.

mod callbacks;
mod emit;
mod expr;
mod kernel;
mod memory;
mod module;
mod nvptx;
mod pipeline;
mod place;
mod remainder;
mod step;
mod table;
mod target;
mod warp;

pub(crate) use module::LlvmGenerator;
pub use module::{cached_kernels_object, callers_object, kernels_object, table_object};
pub(crate) use nvptx::ptx_text;
pub use nvptx::{cached_ptx, ptx_module};
pub use target::{EmitFormat, LlvmMachine};
