//! Kernels made from compute definitions.

pub mod inline;
pub mod rows;
pub mod scan;
