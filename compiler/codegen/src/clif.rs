//! The Cranelift back end: kernel IR of CPU kernels to an x86-64 or AArch64 object file, without LLVM.
//!
//! It exists so that a compiler built without LLVM works, so that debug builds are quick, and as a second
//! opinion in the differential tests. Cranelift knows scalars and 128-bit vectors; wider lane vectors are
//! lists of 128-bit chunks, odd ones lists of scalars ([`value`]). Integer dot products have a spelling
//! ([`instr`]); the other target instructions are expanded from their meaning, 16-bit floats to integer
//! arithmetic ([`crate::halfs`]).
//!
//! Invariants:
//! * Objects import nothing: an operation that Cranelift would turn into a library call on the chosen machine
//!   is spelled out instead, and a call that slips through is an error.
//! * Calling conventions are those of the LLVM back end. Kernel:
//!   `void name(ptr..., i64 dims..., i64 first, i64 end, i64 of)`, a share ([`mlcc_ir::step::WorkShare`]).
//!   Entry point: `int32_t name(mlcc_ctx *, uint32_t worker, uint32_t workers)`.
//! * Equal input gives equal bytes.

mod arith;
mod cast;
mod emit;
mod expr;
mod instr;
mod isa;
mod local;
mod memory;
mod object;
mod shuffle;
mod step;
mod value;

pub use isa::usable_level;
pub(crate) use object::CraneliftGenerator;
pub use object::{callers_object, kernels_object, table_object};
