//! All integration tests of the crate in one program, since linking it is most of a build: one module per
//! subject.

mod graph_ops;
mod graph_random;
mod graph_ranks;
mod graph_structure;
mod graph_transformer;
mod kernel_random;
mod kernel_simt;
mod kernel_values;
mod kernel_workers;
mod kernels_beside;
