//! The machine that executes a kernel, as far as generators of rows, scans and choices ask.

use crate::params::KernelTarget;
use mlcc_ir::instr::InstrId;
use mlcc_ir::types::DType;
use mlcc_target::{Arch, QuantizeTuning, ScanTuning};
use std::fmt;

/// Sizes of a level's tuning, and what a build asks of all kernels.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct KernelTuning {
    pub quantize: QuantizeTuning,
    pub scan: ScanTuning,
    /// See [`KernelTarget::batch_invariant`].
    pub batch_invariant: bool,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum MachineKind {
    /// A CPU with vectors of `lanes` lanes; the instruction that prefetches f32 elements; sizes of its
    /// tuning.
    Cpu { lanes: u32, prefetch: Option<InstrId>, sizes: KernelTuning },
    /// A GPU; `asynchronous` if copies to shared memory go on while a thread computes.
    Gpu { asynchronous: bool },
}

impl MachineKind {
    pub fn for_target(target: &KernelTarget) -> MachineKind {
        match target.arch {
            Arch::Nvptx => MachineKind::Gpu { asynchronous: target.copies_asynchronously() },
            Arch::X86_64 | Arch::Aarch64 => {
                let (quantize, scan) = (target.tune.quantize, target.tune.scan);
                let sizes = KernelTuning { quantize, scan, batch_invariant: target.batch_invariant };
                MachineKind::Cpu {
                    lanes: target.f32_lanes(),
                    prefetch: target.prefetch_instr(DType::F32),
                    sizes,
                }
            }
        }
    }
}

impl fmt::Display for MachineKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            MachineKind::Cpu { lanes, prefetch: None, .. } => write!(f, "{lanes} lanes"),
            MachineKind::Cpu { lanes, prefetch: Some(_), .. } => write!(f, "{lanes} lanes, prefetch"),
            MachineKind::Gpu { .. } => write!(f, "GPU"),
        }
    }
}
