//! Speed as a library beside the program: measurements of artifacts on this machine with their share of the
//! machine's limits ([`measure`], [`kernels`], [`under_load`], [`start`]), predictions for a GPU that need
//! not be there ([`predict`]), and the search of faster tunings ([`tune`]). The program has the flags and
//! prints the results.

pub mod error;
pub mod host;
pub mod kernels;
pub mod limits;
mod loops;
pub mod measure;
pub mod options;
pub mod plan;
pub mod predict;
mod probe;
pub mod proc;
mod report;
mod runner;
pub mod start;
pub mod test;
pub mod tune;
pub mod under_load;
