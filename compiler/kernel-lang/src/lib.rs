//! The language that kernels are written in: ordinary Rust that records kernel IR.
//!
//! A [`Val`] is a value of the kernel: a copyable handle that knows its recorder, so that formulas read as
//! formulas and need neither a builder argument nor global state. A [`BufferView`] is a buffer with a shape,
//! a [`RegisterVar`] a variable in registers. Loops are methods of the [`Recorder`] that take a closure:
//!
//! ```
//! use mlcc_ir::types::DType;
//! use mlcc_kernel_lang::Recorder;
//!
//! // out[row] = sum over c of q[row, c] * x[c]
//! let k = Recorder::new("matvec");
//! let q = k.input("q", DType::F32, [64, 128]);
//! let x = k.input("x", DType::F32, [128]);
//! let out = k.output("out", DType::F32, [64]);
//! k.par("row", 64, |row| {
//!     let sum = k.fold("c", 128, 0.0, |c, sum| q.at([row, c]).fma(x.at([c]), sum));
//!     out.set([row], sum);
//! });
//! let kernel = k.finish();
//! # assert_eq!(kernel.params.len(), 3);
//! ```
//!
//! Types are checked when a line is recorded; a mistake panics with the line of the kernel that made it,
//! because it is a bug of the generator and never of its input. This crate knows no op of the graph.

mod interleave;
mod lanes;
mod loops;
pub mod math;
pub mod matrix;
mod recorder;
mod stream;
mod team;
mod val;
mod view;

pub use interleave::{interleave_lists, interleave_steps};
pub use lanes::{join_vectors, reduce_each, transpose};
pub use loops::{FoldInit, IntoIndex};
pub use recorder::Recorder;
pub use stream::{CACHE_LINE, PrefetchMethod};
pub use team::{ThreadTeam, WARP, fold_each, fold_lanes, warp_sum};
pub use val::{IntoInstruction, IntoOperand, Val};
pub use view::{BufferView, IndexTuple, RegisterGrid, RegisterVar};
