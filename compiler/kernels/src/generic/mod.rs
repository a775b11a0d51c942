//! Kernels made from compute definitions.

pub mod codes;
pub mod inline;
pub(crate) mod known;
pub mod row_scan;
pub mod rows;
pub mod scan;
