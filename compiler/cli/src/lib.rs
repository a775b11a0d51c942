//! The compiler as a library: from a resolved model to an artifact. The command line is a thin layer over it.

pub mod model;
pub mod weights;
