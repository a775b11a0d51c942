//! Compiles kernels for every machine that this host can run and compares with the interpreter.

use crate::aarch64::{EmulatedDriver, KernelCall};
use mlcc_codegen::clif::{callers_object, kernels_object};
use mlcc_codegen::executor::{AlignedBytes, KernelExecutor};
use mlcc_interp::kernel::{KernelBuffer, run};
use mlcc_ir::dim::SymValues;
use mlcc_ir::kernel::Kernel;
use mlcc_target::{Arch, FeatureLevel, detected_features, specs};

/// A kernel with its arguments.
pub struct ClifCase {
    pub kernel: Kernel,
    pub buffers: Vec<KernelBuffer>,
    pub dims: SymValues,
    /// Allowed difference of floats, relative to each value (fused or not, rounding order).
    pub tolerance: f32,
}

impl ClifCase {
    pub fn new(kernel: Kernel, buffers: Vec<KernelBuffer>) -> ClifCase {
        ClifCase { kernel, buffers, dims: SymValues::for_tokens(1), tolerance: 0.0 }
    }
}

/// Levels with different code paths: on x86 also one without SSE4.1, which no target spec has.
fn levels() -> Vec<(Arch, FeatureLevel)> {
    let specs = specs().expect("the built-in specs are good");
    let mut levels = Vec::new();
    for spec in specs.iter().filter(|s| s.arch != Arch::Nvptx) {
        if spec.arch == Arch::X86_64 {
            let bare =
                FeatureLevel { name: "x86-64-v1".into(), features: Vec::new(), ..spec.levels[0].clone() };
            levels.push((spec.arch, bare));
        }
        let wanted = |l: &&FeatureLevel| ["x86-64-v2", "x86-64-v3"].contains(&l.name.as_str());
        let first = spec.levels.iter().take(1).filter(|_| spec.arch == Arch::Aarch64);
        levels.extend(spec.levels.iter().filter(wanted).chain(first).map(|l| (spec.arch, l.clone())));
    }
    levels
}

fn runs_here((arch, level): &(Arch, FeatureLevel)) -> bool {
    let have = detected_features();
    Some(*arch) == Arch::of_host() && level.features.iter().all(|f| have.contains(&f.as_str()))
}

pub fn host_levels() -> Vec<(Arch, FeatureLevel)> {
    levels().into_iter().filter(runs_here).collect()
}

/// Runs all cases at all levels and worker counts; kernel names must differ. Levels that neither this host
/// nor an emulator runs are compiled for, which checks that nothing is imported.
#[track_caller]
pub fn check(cases: &[ClifCase]) {
    if let Err(message) = try_check(cases, &host_levels()) {
        panic!("{message}");
    }
    let kernels: Vec<Kernel> = cases.iter().map(|c| c.kernel.clone()).collect();
    for (arch, level) in levels().into_iter().filter(|l| !runs_here(l)) {
        let code = kernels_object(arch, &level, &kernels).unwrap_or_else(|e| panic!("{}: {e}", level.name));
        if arch == Arch::Aarch64
            && let Some(emulator) = EmulatedDriver::find()
        {
            let callers = callers_object(arch, &level, &kernels).unwrap_or_else(|e| panic!("{e}"));
            check_emulated(&emulator, cases, code, callers);
        }
    }
}

#[track_caller]
fn check_emulated(emulator: &EmulatedDriver, cases: &[ClifCase], code: Vec<u8>, callers: Vec<u8>) {
    let wanted = expected(cases).unwrap_or_else(|e| panic!("{e}"));
    let calls: Vec<KernelCall<'_>> =
        cases.iter().map(|c| KernelCall { kernel: &c.kernel, dims: &c.dims, buffers: &c.buffers }).collect();
    let results = emulator.run(code, callers, &calls, 3);
    for ((case, wanted), got) in cases.iter().zip(&wanted).zip(results) {
        let got = case.buffers.iter().zip(got).map(|(b, bytes)| KernelBuffer::new(b.dtype, bytes));
        let got: Vec<KernelBuffer> = got.collect();
        compare(case, &got, wanted).unwrap_or_else(|e| panic!("aarch64, 3 workers: {e}"));
    }
}

/// The results of the interpreter for the cases.
fn expected(cases: &[ClifCase]) -> Result<Vec<Vec<KernelBuffer>>, String> {
    let run = |case: &ClifCase| {
        let mut buffers = case.buffers.clone();
        run(&case.kernel, &mut buffers, &case.dims).map_err(|e| format!("interpreter: {e}"))?;
        Ok(buffers)
    };
    cases.iter().map(run).collect()
}

pub fn try_check(cases: &[ClifCase], levels: &[(Arch, FeatureLevel)]) -> Result<(), String> {
    let wanted = expected(cases)?;
    let kernels: Vec<Kernel> = cases.iter().map(|c| c.kernel.clone()).collect();
    for (_, level) in levels {
        let executor =
            KernelExecutor::with_cranelift(&kernels, level).map_err(|e| format!("{}: {e}", level.name))?;
        for (case, wanted) in cases.iter().zip(&wanted) {
            for workers in [1, 3] {
                let got = run_compiled(&executor, case, workers)?;
                compare(case, &got, wanted).map_err(|e| format!("{}, {workers} workers: {e}", level.name))?;
            }
        }
    }
    Ok(())
}

fn run_compiled(
    executor: &KernelExecutor,
    case: &ClifCase,
    workers: usize,
) -> Result<Vec<KernelBuffer>, String> {
    let mut memory: Vec<AlignedBytes> =
        case.buffers.iter().map(|b| AlignedBytes::from_bytes(&b.bytes)).collect();
    executor.run(&case.kernel.name, &mut memory, &case.dims, workers).map_err(|e| e.to_string())?;
    let results = case.buffers.iter().zip(&memory);
    Ok(results.map(|(b, memory)| KernelBuffer::new(b.dtype, memory.bytes().to_vec())).collect())
}

fn compare(case: &ClifCase, got: &[KernelBuffer], wanted: &[KernelBuffer]) -> Result<(), String> {
    for (buf, (got, wanted)) in case.kernel.params.iter().zip(got.iter().zip(wanted)) {
        let decl = &case.kernel.bufs[*buf];
        let at = |i: usize, g: String, w: String| {
            Err(format!("{}: {}[{i}] of {}: got {g}, want {w}", case.kernel.name, decl.name, decl.dtype))
        };
        if decl.dtype.is_float() {
            for (i, (g, w)) in got.to_f32().into_iter().zip(wanted.to_f32()).enumerate() {
                let near = (g - w).abs() <= case.tolerance * w.abs();
                if !(g == w || (g.is_nan() && w.is_nan()) || near) {
                    return at(i, g.to_string(), w.to_string());
                }
            }
        } else {
            for (i, (g, w)) in got.to_i64().into_iter().zip(wanted.to_i64()).enumerate() {
                if g != w {
                    return at(i, g.to_string(), w.to_string());
                }
            }
        }
    }
    Ok(())
}
