//! The machine to compile for: architecture and CPU features, as Cranelift wants to be told.

use super::ClifError;
use cranelift_codegen::isa::OwnedTargetIsa;
use cranelift_codegen::settings::{self, Configurable};
use mlcc_abi::feature;

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Arch {
    X86_64,
    Aarch64,
}

impl Arch {
    pub fn name(self) -> &'static str {
        match self {
            Arch::X86_64 => "x86-64",
            Arch::Aarch64 => "aarch64",
        }
    }
    fn triple(self) -> &'static str {
        match self {
            Arch::X86_64 => "x86_64-unknown-linux-gnu",
            Arch::Aarch64 => "aarch64-unknown-linux-gnu",
        }
    }
}

/// Architecture and the features (bits of [`mlcc_abi::feature`]) that code may use.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Machine {
    pub arch: Arch,
    pub features: u64,
}

/// x86 features that Cranelift makes use of here, by its own names.
const X86_FLAGS: [(u64, &str); 12] = [
    (feature::SSE3, "has_sse3"),
    (feature::SSSE3, "has_ssse3"),
    (feature::SSE4_1, "has_sse41"),
    (feature::SSE4_2, "has_sse42"),
    (feature::POPCNT, "has_popcnt"),
    (feature::CMPXCHG16B, "has_cmpxchg16b"),
    (feature::AVX, "has_avx"),
    (feature::AVX2, "has_avx2"),
    (feature::FMA, "has_fma"),
    (feature::BMI1, "has_bmi1"),
    (feature::BMI2, "has_bmi2"),
    (feature::LZCNT, "has_lzcnt"),
];

impl Machine {
    /// Drops the features that this back end never uses, so that an artifact does not demand them.
    pub fn used(self) -> Machine {
        let usable = match self.arch {
            Arch::X86_64 => X86_FLAGS.iter().fold(0, |bits, (bit, _)| bits | bit),
            Arch::Aarch64 => feature::NEON,
        };
        Machine { features: self.features & usable, ..self }
    }

    pub(super) fn has(self, bits: u64) -> bool {
        self.features & bits == bits
    }

    /// 128-bit integer and float vectors without holes (on x86 that means SSE4.1).
    pub(super) fn simd(self) -> bool {
        match self.arch {
            Arch::X86_64 => self.has(feature::SSE3 | feature::SSSE3 | feature::SSE4_1),
            Arch::Aarch64 => true,
        }
    }

    /// A fused multiply-add instruction (elsewhere Cranelift calls a library).
    pub(super) fn fma(self) -> bool {
        match self.arch {
            Arch::X86_64 => self.has(feature::AVX | feature::FMA),
            Arch::Aarch64 => true,
        }
    }

    /// Rounding instructions (elsewhere Cranelift calls a library).
    pub(super) fn rounding(self) -> bool {
        match self.arch {
            Arch::X86_64 => self.has(feature::SSE4_1),
            Arch::Aarch64 => true,
        }
    }

    pub(super) fn isa(self) -> Result<OwnedTargetIsa, ClifError> {
        let error = |reason: String| ClifError::Machine { arch: self.arch.name(), reason };
        let mut flags = settings::builder();
        let shared = [
            ("opt_level", "speed"),
            ("is_pic", "true"),
            // Stack buffers may span pages: touch them in order, inline.
            ("enable_probestack", "true"),
            ("probestack_strategy", "inline"),
            ("unwind_info", "false"),
            ("enable_verifier", if cfg!(debug_assertions) { "true" } else { "false" }),
        ];
        for (name, value) in shared {
            flags.set(name, value).map_err(|e| error(e.to_string()))?;
        }
        let triple = self.arch.triple().parse().map_err(|e| error(format!("{e}")))?;
        let mut builder = cranelift_codegen::isa::lookup(triple).map_err(|e| error(e.to_string()))?;
        if self.arch == Arch::X86_64 {
            for (bit, flag) in X86_FLAGS {
                let value = if self.has(bit) { "true" } else { "false" };
                builder.set(flag, value).map_err(|e| error(e.to_string()))?;
            }
        }
        builder.finish(settings::Flags::new(flags)).map_err(|e| error(e.to_string()))
    }
}
