//! What executes a kernel, as far as generators of rows, scans and choices ask.

use crate::params::KernelTarget;
use mlcc_ir::instr::InstrId;
use mlcc_ir::types::DType;
use mlcc_target::{Arch, Quantizers, Scans};
use std::fmt;

/// Sizes of a level's tuning, and what a build asks of all kernels.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Sizes {
    pub quantize: Quantizers,
    pub scan: Scans,
    /// See [`KernelTarget::batch_invariant`].
    pub batch_invariant: bool,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Machine {
    /// With vectors of `lanes` lanes; the instruction that prefetches f32 elements; sizes of its tuning.
    Cpu { lanes: u32, prefetch: Option<InstrId>, sizes: Sizes },
    /// Whether copies to shared memory go on while a thread computes.
    Gpu { asynchronous: bool },
}

impl Machine {
    pub fn of(target: &KernelTarget) -> Machine {
        match target.arch {
            Arch::Nvptx => Machine::Gpu { asynchronous: target.copies_asynchronously() },
            Arch::X86_64 | Arch::Aarch64 => {
                let (quantize, scan) = (target.tune.quantize, target.tune.scan);
                let sizes = Sizes { quantize, scan, batch_invariant: target.batch_invariant };
                Machine::Cpu { lanes: target.f32_lanes(), prefetch: target.prefetch(DType::F32), sizes }
            }
        }
    }
}

impl fmt::Display for Machine {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Machine::Cpu { lanes, prefetch: None, .. } => write!(f, "{lanes} lanes"),
            Machine::Cpu { lanes, prefetch: Some(_), .. } => write!(f, "{lanes} lanes, prefetch"),
            Machine::Gpu { .. } => write!(f, "GPU"),
        }
    }
}
