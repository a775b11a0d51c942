//! All integration tests of the crate in one program, since linking it is most of a build: one module per
//! subject.

mod aarch64;
mod artifact;
mod cache_batches;
mod cache_sessions;
mod cases;
mod clif;
mod core_kinds;
mod cuda_runtime;
mod entry_calls;
mod examples;
mod handwritten_kernel;
mod llvm_aarch64;
mod llvm_gpu_attention;
mod llvm_gpu_likeliest;
mod llvm_gpu_products;
mod llvm_kernels;
mod llvm_matrix;
mod llvm_model;
mod llvm_products;
mod llvm_ptx;
#[cfg(feature = "llvm")]
#[path = "../../../../cli/tests/all/cases/objects.rs"]
mod objects;
mod old_artifacts;
mod page_histories;
mod runtime;
#[cfg(feature = "llvm")]
mod software;
mod toy;
mod toy_kernels;
