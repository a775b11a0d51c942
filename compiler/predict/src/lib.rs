//! Predictions of the time that launches take on a GPU, from the machine code of their kernels. Nothing here
//! is a measurement.
//!
//! [`sass`] reads the output of NVIDIA's disassembler. [`walk`] follows some blocks of a launch through it:
//! integers, addresses and branches are computed, floats are not. That gives instructions by pipe, sectors,
//! conflicts of banks, and the clocks that a warp takes alone. [`model`] makes a time of them and says which
//! limit binds. `docs/design/0048-predictions.md` has the rules.

pub mod launch;
pub mod model;
pub mod sass;
pub mod walk;

pub use launch::{ArtifactPlan, LaunchConfig, PredictedCall, SequenceSizes};
pub use model::{KernelResources, LaunchBound, LaunchPrediction, LaunchWorkload, predict};
pub use walk::DecodedKernel;

use thiserror::Error;

#[derive(Error, Debug, PartialEq, Eq)]
pub enum PredictError {
    #[error("the disassembly, line {line}: {what}")]
    Listing { line: usize, what: String },
    #[error("kernel {kernel}: {what}")]
    Kernel { kernel: String, what: String },
}
