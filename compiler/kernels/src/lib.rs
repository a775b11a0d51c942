//! Generators of kernels for ops: generic kernels made from compute definitions, generators for the shapes
//! that matter, and the lowering of whole functions.

pub mod attention;
pub mod experts;
pub(crate) mod halves;
pub mod inline;
pub mod lower;
pub mod machine;
pub mod matmul;
pub mod pages;
pub mod params;
pub mod quantize;
pub mod rows;
pub mod scan;
pub mod top_k;
