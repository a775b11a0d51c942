//! Compiles kernels for every machine that this host can run, links them with `cc`, and compares with the interpreter.

use libloading::Library;
use mlcc_abi::feature;
use mlcc_codegen::clif::{Arch, Machine, kernels_object};
use mlcc_interp::kernel::{Buffer, run};
use mlcc_ir::dim::SymValues;
use mlcc_ir::kernel::Kernel;
use std::path::Path;
use std::process::Command;

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

/// Levels with different code paths, as far as this host runs them.
pub fn host_machines() -> Vec<Machine> {
    #[cfg(target_arch = "x86_64")]
    {
        let mut machines = vec![Machine { arch: Arch::X86_64, features: 0 }];
        if std::arch::is_x86_feature_detected!("sse4.2") {
            machines.push(Machine { arch: Arch::X86_64, features: feature::X86_64_V2 });
        }
        if std::arch::is_x86_feature_detected!("avx2") && std::arch::is_x86_feature_detected!("fma") {
            machines.push(Machine { arch: Arch::X86_64, features: feature::X86_64_V3 });
        }
        machines
    }
    #[cfg(target_arch = "aarch64")]
    {
        vec![Machine { arch: Arch::Aarch64, features: feature::NEON }]
    }
}

/// Machines that this host cannot run but that kernels can be compiled for (and checked for imports).
pub fn foreign_machines() -> Vec<Machine> {
    let all = [
        Machine { arch: Arch::X86_64, features: 0 },
        Machine { arch: Arch::X86_64, features: feature::X86_64_V2 },
        Machine { arch: Arch::X86_64, features: feature::X86_64_V3 },
        Machine { arch: Arch::Aarch64, features: feature::NEON },
    ];
    let host = host_machines();
    all.into_iter().filter(|m| !host.contains(m)).collect()
}

/// Links an object for this host into a shared library; symbols it does not define are an error.
pub fn link(object: &[u8], folder: &Path) -> Library {
    let (input, output) = (folder.join("code.o"), folder.join("code.so"));
    std::fs::write(&input, object).expect("the object is written");
    let mut cc = Command::new("cc");
    cc.args(["-shared", "-nostdlib", "-Wl,--no-undefined", "-o"]).arg(&output).arg(&input);
    let status = cc.status().expect("a C compiler driver `cc` is installed");
    assert!(status.success(), "linking failed");
    // SAFETY: freestanding code without initialisers.
    unsafe { Library::new(output) }.expect("the library loads")
}

/// Calls a kernel. Functions of the C ABI ignore surplus arguments, so one type serves all.
fn call(library: &Library, kernel: &Kernel, buffers: &mut [Buffer], dims: &SymValues, workers: u64) {
    type Function = unsafe extern "C" fn(u64, u64, u64, u64, u64, u64, u64, u64, u64, u64, u64, u64);
    // SAFETY: the library exports a kernel of that name.
    let function =
        unsafe { library.get::<Function>(kernel.name.as_bytes()) }.expect("the kernel is exported");
    for worker in 0..workers {
        let mut args: Vec<u64> = buffers.iter_mut().map(|b| b.bytes.as_mut_ptr() as u64).collect();
        args.extend(kernel.dims.iter().map(|(sym, _)| dims.get(*sym) as u64));
        args.extend([worker, workers]);
        assert!(args.len() <= 12, "too many arguments for the test");
        args.resize(12, 0);
        let a: [u64; 12] = args.try_into().expect("twelve arguments");
        // SAFETY: the kernel's arguments; the interpreter has checked that it stays inside of the buffers.
        unsafe { function(a[0], a[1], a[2], a[3], a[4], a[5], a[6], a[7], a[8], a[9], a[10], a[11]) };
    }
}

/// Runs all cases on all machines and worker counts; kernel names must differ.
#[track_caller]
pub fn check(cases: &[Case]) {
    if let Err(message) = try_check(cases, &host_machines()) {
        panic!("{message}");
    }
    let kernels: Vec<Kernel> = cases.iter().map(|c| c.kernel.clone()).collect();
    for machine in foreign_machines() {
        kernels_object(machine, &kernels).unwrap_or_else(|e| panic!("{machine:?}: {e}"));
    }
}

pub fn try_check(cases: &[Case], machines: &[Machine]) -> Result<(), String> {
    let mut wanted = Vec::new();
    for case in cases {
        let mut buffers = case.buffers.clone();
        run(&case.kernel, &mut buffers, &case.dims).map_err(|e| format!("interpreter: {e}"))?;
        wanted.push(buffers);
    }
    let kernels: Vec<Kernel> = cases.iter().map(|c| c.kernel.clone()).collect();
    for &machine in machines {
        let object = kernels_object(machine, &kernels).map_err(|e| format!("{machine:?}: {e}"))?;
        let folder = tempfile::tempdir().map_err(|e| e.to_string())?;
        let library = link(&object, folder.path());
        for (case, wanted) in cases.iter().zip(&wanted) {
            for workers in [1, 3] {
                let mut got = case.buffers.clone();
                call(&library, &case.kernel, &mut got, &case.dims, workers);
                compare(case, &got, wanted).map_err(|e| format!("{machine:?}, {workers} workers: {e}"))?;
            }
        }
    }
    Ok(())
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
