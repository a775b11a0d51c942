//! The Cranelift back end against the kernel interpreter: every construct, random kernels, and a whole model.
#![cfg(feature = "cranelift")]

#[path = "../aarch64/mod.rs"]
mod aarch64;
#[path = "../cases/mod.rs"]
mod cases;
mod elementwise;
mod harness;
mod memory;
mod model;
mod random;
mod shared;
#[path = "../toy/mod.rs"]
mod toy;
#[path = "../toy_kernels/mod.rs"]
mod toy_kernels;
