//! The LLVM back end.

mod callbacks;
mod emit;
mod expr;
mod kernel;
mod memory;
mod module;
mod nvptx;
mod remainder;
mod step;
mod table;
mod target;

pub use module::{callers_object, kernels_object, level_module, table_object};
pub use nvptx::ptx_module;
pub use target::{Machine, Output};
