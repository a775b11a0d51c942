//! Compiles kernels for every machine that this host can run and compares with the interpreter.

use crate::aarch64::{Call, Emulator};
use mlcc_codegen::clif::{callers_object, kernels_object};
use mlcc_codegen::executor::{Aligned, Executor};
use mlcc_interp::kernel::{Buffer, run};
use mlcc_ir::dim::SymValues;
use mlcc_ir::kernel::Kernel;
use mlcc_target::{Arch, Level, detected_features, specs};

/// A kernel with its arguments.
pub struct Case {
    pub kernel: Kernel,
    pub buffers: Vec<Buffer>,
    pub dims: SymValues,
    /// Allowed difference of floats, relative to each value (fused or not, rounding order).
    pub tolerance: f32,
}

impl Case {
    pub fn new(kernel: Kernel, buffers: Vec<Buffer>) -> Case {
        Case { kernel, buffers, dims: SymValues::tokens(1), tolerance: 0.0 }
    }
}

/// Levels with different code paths: on x86 also one without SSE4.1, which no target spec has.
fn levels() -> Vec<(Arch, Level)> {
    let specs = specs().expect("the built-in specs are good");
    let mut levels = Vec::new();
    for spec in specs.iter().filter(|s| s.arch != Arch::Nvptx) {
        if spec.arch == Arch::X86_64 {
            let bare = Level { name: "x86-64-v1".into(), features: Vec::new(), ..spec.levels[0].clone() };
            levels.push((spec.arch, bare));
        }
        let wanted = |l: &&Level| ["x86-64-v2", "x86-64-v3"].contains(&l.name.as_str());
        let first = spec.levels.iter().take(1).filter(|_| spec.arch == Arch::Aarch64);
        levels.extend(spec.levels.iter().filter(wanted).chain(first).map(|l| (spec.arch, l.clone())));
    }
    levels
}

fn runs_here((arch, level): &(Arch, Level)) -> bool {
    let have = detected_features();
    Some(*arch) == Arch::of_host() && level.features.iter().all(|f| have.contains(&f.as_str()))
}

pub fn host_levels() -> Vec<(Arch, Level)> {
    levels().into_iter().filter(runs_here).collect()
}

/// Runs all cases at all levels and worker counts; kernel names must differ. Levels that neither this host nor an
/// emulator runs are compiled for, which checks that nothing is imported.
#[track_caller]
pub fn check(cases: &[Case]) {
    if let Err(message) = try_check(cases, &host_levels()) {
        panic!("{message}");
    }
    let kernels: Vec<Kernel> = cases.iter().map(|c| c.kernel.clone()).collect();
    for (arch, level) in levels().into_iter().filter(|l| !runs_here(l)) {
        let code = kernels_object(arch, &level, &kernels).unwrap_or_else(|e| panic!("{}: {e}", level.name));
        if arch == Arch::Aarch64
            && let Some(emulator) = Emulator::find()
        {
            let callers = callers_object(arch, &level, &kernels).unwrap_or_else(|e| panic!("{e}"));
            check_emulated(&emulator, cases, code, callers);
        }
    }
}

#[track_caller]
fn check_emulated(emulator: &Emulator, cases: &[Case], code: Vec<u8>, callers: Vec<u8>) {
    let wanted = expected(cases).unwrap_or_else(|e| panic!("{e}"));
    let calls: Vec<Call<'_>> =
        cases.iter().map(|c| Call { kernel: &c.kernel, dims: &c.dims, buffers: &c.buffers }).collect();
    let results = emulator.run(code, callers, &calls, 3);
    for ((case, wanted), got) in cases.iter().zip(&wanted).zip(results) {
        let got = case.buffers.iter().zip(got).map(|(b, bytes)| Buffer::new(b.dtype, bytes));
        let got: Vec<Buffer> = got.collect();
        compare(case, &got, wanted).unwrap_or_else(|e| panic!("aarch64, 3 workers: {e}"));
    }
}

/// What the interpreter makes of the cases.
fn expected(cases: &[Case]) -> Result<Vec<Vec<Buffer>>, String> {
    let run = |case: &Case| {
        let mut buffers = case.buffers.clone();
        run(&case.kernel, &mut buffers, &case.dims).map_err(|e| format!("interpreter: {e}"))?;
        Ok(buffers)
    };
    cases.iter().map(run).collect()
}

pub fn try_check(cases: &[Case], levels: &[(Arch, Level)]) -> Result<(), String> {
    let wanted = expected(cases)?;
    let kernels: Vec<Kernel> = cases.iter().map(|c| c.kernel.clone()).collect();
    for (_, level) in levels {
        let executor =
            Executor::with_cranelift(&kernels, level).map_err(|e| format!("{}: {e}", level.name))?;
        for (case, wanted) in cases.iter().zip(&wanted) {
            for workers in [1, 3] {
                let got = run_compiled(&executor, case, workers)?;
                compare(case, &got, wanted).map_err(|e| format!("{}, {workers} workers: {e}", level.name))?;
            }
        }
    }
    Ok(())
}

fn run_compiled(executor: &Executor, case: &Case, workers: usize) -> Result<Vec<Buffer>, String> {
    let mut memory: Vec<Aligned> = case.buffers.iter().map(|b| Aligned::from_bytes(&b.bytes)).collect();
    executor.run(&case.kernel.name, &mut memory, &case.dims, workers).map_err(|e| e.to_string())?;
    let results = case.buffers.iter().zip(&memory);
    Ok(results.map(|(b, memory)| Buffer::new(b.dtype, memory.bytes().to_vec())).collect())
}

fn compare(case: &Case, got: &[Buffer], wanted: &[Buffer]) -> Result<(), String> {
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
