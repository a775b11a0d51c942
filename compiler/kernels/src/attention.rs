//! Kernels of the `attention` op: scores, softmax and weighted values of a block of keys at a time, with
//! running maxima and sums ("online softmax", Milakov and Gimelshein 2018; Dao et al., FlashAttention, 2022),
//! so that no matrix of scores is ever in memory. Everything is accumulated in f32.
//!
//! [`problem`] says what is computed, [`plan`] how. [`decode`] is one query on a CPU, with [`merge`];
//! [`prefill`] several queries on a CPU; [`gpu`] both. A file uses only files that are named above it here.

pub mod problem;

pub mod plan;

mod codes;
mod slices;

mod key_head;
mod query_tile;

mod key_block;

mod matmul_tile;
mod operand;

mod row_set;

pub mod merge;

pub mod decode;
pub mod gpu;
pub mod prefill;

pub use plan::AttentionPlan;
pub use problem::{AttentionProblem, find_attention};
