//! The compiler as a library: from a resolved model to an artifact ([`build`]), and the command line over it ([`cli`]),
//! one file per command in [`commands`].

#[cfg(not(any(feature = "llvm", feature = "cranelift")))]
compile_error!("mlcc needs a back end: enable the feature `llvm19`, `llvm22` or `cranelift`");

pub mod build;
pub mod cli;
pub mod commands;
pub mod error;
pub mod interpret;
pub mod interrupt;
pub mod kernel_check;
pub mod layers;
pub mod model;
pub mod replay;
mod signals;
pub mod stored;
pub mod ui;
pub mod weights;
