//! The LLVM back end.

mod emit;
mod expr;
mod kernel;
mod memory;
mod target;

pub use target::{Machine, Output};
