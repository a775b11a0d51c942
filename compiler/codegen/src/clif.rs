//! The Cranelift back end: kernel IR of CPU kernels to an x86-64 or AArch64 object file, without LLVM.
//!
//! It exists so that a compiler built without LLVM works, so that debug builds are quick, and as a second opinion in the
//! differential tests. Cranelift knows scalars and 128-bit vectors; wider lane vectors are lists of 128-bit chunks, odd
//! ones lists of scalars ([`value`]). Target instructions are expanded from their meaning, 16-bit floats to integer
//! arithmetic ([`crate::halfs`]).
//!
//! Invariants:
//! * The object refers to nothing outside itself: an operation that Cranelift would turn into a library call on the
//!   chosen machine is spelled out instead, and a call that slips through is an error ([`ClifError::Import`]).
//! * Calling conventions are those of the LLVM back end. Kernel: `void name(ptr..., i64 dims..., i64 worker,
//!   i64 workers)`. Entry point: `int32_t name(mlcc_ctx *, uint32_t worker, uint32_t workers)`.
//! * Equal input gives equal bytes.

mod arith;
mod cast;
mod emit;
mod entry;
mod expr;
mod isa;
mod local;
mod memory;
mod object;
mod shuffle;
mod value;

pub use isa::{Arch, Machine};
pub use object::{kernels_object, model_object};

/// Why no object was made. Only [`ClifError::Unsupported`] can be caused by a kernel; the rest are bugs in the caller
/// or in this back end.
#[derive(Debug, thiserror::Error)]
pub enum ClifError {
    #[error("kernel {kernel}: {what}")]
    Unsupported { kernel: String, what: String },
    #[error("step {step} launches kernel {kernel}, which the module does not have")]
    UnknownKernel { step: String, kernel: String },
    #[error("step {step}, kernel {kernel}: expected {expected} {what}, found {found}")]
    ArgumentCount { step: String, kernel: String, what: &'static str, expected: usize, found: usize },
    #[error("`{0}` is not an entry point; the known ones are {names}", names = mlcc_abi::ENTRY_NAMES.join(", "))]
    UnknownEntry(String),
    #[error("Cranelift cannot compile for {arch}: {reason}")]
    Machine { arch: &'static str, reason: String },
    #[error("{function}: the code would call {import}, but an artifact imports nothing")]
    Import { function: String, import: String },
    #[error("Cranelift failed on {function}: {reason}")]
    Cranelift { function: String, reason: String },
}
