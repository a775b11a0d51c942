//! The product `y[i][j] = sum over k of x[i][k] * w[j][k]`, a matvec or a matmul: on CPUs over weights in
//! `Tile16` order ([`cpu`]), on GPUs over row-major weights ([`gpu`]), and with matrices that rows choose
//! ([`experts`]).
//!
//! Sums never touch memory between product and epilogue: the epilogue closure receives each vector of sums
//! and stores what it makes of them.
//!
//! | file or folder | what |
//! | --- | --- |
//! | `problem` | operands, their types and orders |
//! | `plan` | how: tile sizes, instructions, prefetches, shares, as plain data |
//! | `dot/` | families of integer dot instructions, one module each |
//! | `weight/` | views of weights in memory, panels of unpacked weights |
//! | `cpu/` | the loops: slices, register tiles, pieces of k |
//!
//! Each uses those above it.

mod cpu;
mod dot;
mod experts;
mod gpu;
pub mod plan;
mod problem;
mod weight;

pub use cpu::emit_matmul;
pub use experts::{ExpertChoice, emit_experts};
pub use gpu::{
    ActivationPrologue, GemvEpilogue, GemvPlan, GpuMatmulPlan, TensorCoreGemvPlan, choose_gpu, emit_gpu_gemv,
    emit_gpu_matmul, emit_tensor_core_gemv, matrix_tile,
};
pub use plan::{CpuPlan, choose, code_block};
pub use problem::{
    DOT_COLUMNS, EPILOGUE_OPERANDS, FinishedSums, MatmulActivation, MatmulEpilogue, MatmulProblem,
    MatmulWeight, QuantizedActivations,
};
