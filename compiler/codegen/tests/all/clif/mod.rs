//! The Cranelift back end against the kernel interpreter: every construct, random kernels, and a whole model.
#![cfg(feature = "cranelift")]

mod elementwise;
mod harness;
mod memory;
mod model;
mod random;
mod shared;
