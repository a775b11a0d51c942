//! Reference execution of both IRs, and comparison of results.

pub mod compare;
pub mod equivalence;
pub mod graph;
pub mod kernel;
pub mod simt;
pub mod steps;
