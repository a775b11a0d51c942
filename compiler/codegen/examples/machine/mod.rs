//! Common parts of the measuring examples: the level of this machine, object files for a disassembler, the
//! best of some turns.

use std::time::Instant;

use mlcc_codegen::executor::{AlignedBytes, KernelExecutor};
use mlcc_codegen::llvm::{EmitFormat, kernels_object};
use mlcc_ir::dim::SymValues;
use mlcc_ir::kernel::Kernel;
use mlcc_target::{Arch, FeatureLevel};

pub fn number(text: &str) -> usize {
    text.parse().unwrap_or_else(|e| panic!("{text}: {e}"))
}

/// The level of this machine that comes last in its specification, or the one that `MLCC_LEVEL` names.
pub fn level() -> FeatureLevel {
    let have = mlcc_target::detected_features();
    let wanted = std::env::var("MLCC_LEVEL").ok();
    let runs = |l: &FeatureLevel| l.features.iter().all(|f| have.contains(&f.as_str()));
    let specs = mlcc_target::specs().expect("built-in specifications");
    let levels = specs.into_iter().filter(|s| Some(s.arch) == Arch::of_host()).flat_map(|s| s.levels);
    let mut fitting: Vec<FeatureLevel> =
        levels.filter(|l| runs(l) && wanted.as_ref().is_none_or(|w| *w == l.name)).collect();
    fitting.sort_by_key(|l| (l.vector_bits, l.features.len()));
    fitting.pop().expect("a level for this machine")
}

/// Compiles the kernels; writes the object file to `object`, if there is one.
pub fn compiled(kernels: &[Kernel], level: &FeatureLevel, object: Option<String>) -> KernelExecutor {
    if let Some(path) = object {
        let triple = "x86_64-unknown-linux-gnu";
        let bytes =
            kernels_object(Arch::X86_64, triple, level, kernels, EmitFormat::Object).expect("it compiles");
        std::fs::write(path, bytes).expect("the object file can be written");
    }
    KernelExecutor::new(kernels, level).expect("the kernels load")
}

/// Seconds of the best of three runs.
pub fn time(executor: &KernelExecutor, kernel: &str, buffers: &mut [AlignedBytes], dims: &SymValues) -> f64 {
    let mut best = f64::INFINITY;
    for _ in 0..3 {
        let begin = Instant::now();
        executor.run(kernel, buffers, dims, 1).expect("the kernel runs");
        best = best.min(begin.elapsed().as_secs_f64());
    }
    best
}
