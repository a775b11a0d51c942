//! Verifiers: they hold the invariants that the modules of the IR state, and name what breaks them.

mod expr;
pub mod graph;
pub mod kernel;
mod ranks;

pub use graph::{verify_function, verify_module, verify_step};
pub use kernel::verify_kernel;

/// An invariant that does not hold.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[error("{subject}: {message}")]
pub struct VerifyError {
    /// The place of the fault, from the outside in: `kernel matvec, par %i`.
    pub subject: String,
    pub message: String,
}

impl VerifyError {
    pub fn new(subject: impl Into<String>, message: impl Into<String>) -> VerifyError {
        VerifyError { subject: subject.into(), message: message.into() }
    }
}
