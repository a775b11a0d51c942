//! The machine to compile for: architecture and CPU features, in Cranelift's terms.

use crate::error::CodegenError;
use cranelift_codegen::isa::OwnedTargetIsa;
use cranelift_codegen::settings::{self, Configurable};
use mlcc_target::{Arch, FeatureLevel, SpecError};

/// The instruction set of the code of one level.
#[derive(Clone)]
pub(super) struct CraneliftIsa {
    pub arch: Arch,
    pub isa: OwnedTargetIsa,
    /// 128-bit integer and float vectors without holes (on x86 that means SSE4.1).
    pub simd: bool,
    /// A fused multiply-add instruction (elsewhere Cranelift calls a library).
    pub fma: bool,
    /// Vector comparisons of floats may not be given a load as operand: without AVX, Cranelift 0.135 folds it
    /// into a `cmpps`, which faults on an address that is not a multiple of 16.
    pub opaque_float_loads: bool,
    /// Rounding instructions (elsewhere Cranelift calls a library).
    pub rounding: bool,
}

/// x86 features that Cranelift makes use of here: our name, its name.
const X86_FLAGS: [(&str, &str); 12] = [
    ("sse3", "has_sse3"),
    ("ssse3", "has_ssse3"),
    ("sse4.1", "has_sse41"),
    ("sse4.2", "has_sse42"),
    ("popcnt", "has_popcnt"),
    ("cmpxchg16b", "has_cmpxchg16b"),
    ("avx", "has_avx"),
    ("avx2", "has_avx2"),
    ("fma", "has_fma"),
    ("bmi1", "has_bmi1"),
    ("bmi2", "has_bmi2"),
    ("lzcnt", "has_lzcnt"),
];

/// The level as this back end sees it: without the features that it has no use for, with 128-bit vectors.
/// Kernels should be chosen for it, and an artifact then demands no more than its code needs.
pub fn usable_level(arch: Arch, level: &FeatureLevel) -> Result<FeatureLevel, SpecError> {
    let knows = |feature: &String| match arch {
        Arch::X86_64 => {
            feature == "sse" || feature == "sse2" || X86_FLAGS.iter().any(|(ours, _)| ours == feature)
        }
        Arch::Aarch64 | Arch::Nvptx => feature == "neon",
    };
    let features = level.features.iter().filter(|f| knows(f)).cloned().collect();
    level.reduced(features, 128)
}

const SHARED_FLAGS: [(&str, &str); 6] = [
    ("opt_level", "speed"),
    ("is_pic", "true"),
    // Stack buffers may span pages: touch them in order, inline.
    ("enable_probestack", "true"),
    ("probestack_strategy", "inline"),
    ("unwind_info", "false"),
    ("enable_verifier", if cfg!(debug_assertions) { "true" } else { "false" }),
];

impl CraneliftIsa {
    pub fn new(arch: Arch, level: &FeatureLevel) -> Result<CraneliftIsa, CodegenError> {
        let error = |message: String| CodegenError::Machine {
            triple: format!("{arch} by Cranelift"),
            cpu: level.name.clone(),
            message,
        };
        let triple = match arch {
            Arch::X86_64 => "x86_64-unknown-linux-gnu",
            Arch::Aarch64 => "aarch64-unknown-linux-gnu",
            Arch::Nvptx => return Err(error("GPU code needs the LLVM back end".into())),
        };
        let mut flags = settings::builder();
        for (name, value) in SHARED_FLAGS {
            flags.set(name, value).map_err(|e| error(e.to_string()))?;
        }
        let triple = triple.parse().map_err(|e| error(format!("{e}")))?;
        let mut builder = cranelift_codegen::isa::lookup(triple).map_err(|e| error(e.to_string()))?;
        let x86 = arch == Arch::X86_64;
        for (feature, flag) in X86_FLAGS.into_iter().filter(|_| x86) {
            let value = if level.has(feature) { "true" } else { "false" };
            builder.set(flag, value).map_err(|e| error(e.to_string()))?;
        }
        let isa = builder.finish(settings::Flags::new(flags)).map_err(|e| error(e.to_string()))?;
        Ok(CraneliftIsa {
            arch,
            isa,
            simd: !x86 || level.has_all(&["sse3", "ssse3", "sse4.1"]),
            fma: !x86 || level.has_all(&["avx", "fma"]),
            opaque_float_loads: x86 && !level.has("avx"),
            rounding: !x86 || level.has("sse4.1"),
        })
    }
}
