//! The compiler as a library: from a resolved model to an artifact ([`compile`]), and what holds an artifact
//! against the model that it came from: interpretation ([`interpret`], [`stored`]), reference cases
//! ([`replay`], [`kernel_check`]), comparison layer by layer ([`layers`]).

#[cfg(not(any(feature = "llvm", feature = "cranelift")))]
compile_error!("mlcc needs a back end: enable the feature `llvm19`, `llvm22` or `cranelift`");

pub mod compile;
mod distance;
pub mod format;
pub mod format_error;
pub mod interpret;
pub mod kernel_check;
pub mod layers;
pub mod model;
pub mod replay;
pub mod stored;
pub mod text_replay;
pub mod tune;
pub mod weights;
