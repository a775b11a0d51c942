//! The same kernels for AArch64, run by an emulator where one is installed: cross code generation and cross linking.
#![cfg(feature = "llvm")]

mod cases;

use cases::{Case, arithmetic, control, instrs, memory, prepare};
use mlcc_codegen::llvm::{Output, callers_object, kernels_object};
use mlcc_codegen::{Library, Part, link};
use mlcc_ir::kernel::Kernel;
use mlcc_target::{Arch, Level};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

const TRIPLE: &str = "aarch64-unknown-linux-gnu";

/// The emulator's command and a compiled driver; says what is missing otherwise.
fn emulator(folder: &Path) -> Option<PathBuf> {
    let runs =
        |program: &str| Command::new(program).arg("--version").output().is_ok_and(|o| o.status.success());
    for program in ["qemu-aarch64", "aarch64-linux-gnu-gcc"] {
        if !runs(program) {
            eprintln!("skipped: no {program} (`apt install qemu-user gcc-aarch64-linux-gnu`)");
            return None;
        }
    }
    let driver = folder.join("driver");
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/aarch64/driver.c");
    let done = Command::new("aarch64-linux-gnu-gcc")
        .args(["-O1", "-Wall", "-Wextra", "-Werror", "-o"])
        .arg(&driver)
        .arg(source)
        .arg("-ldl")
        .output()
        .unwrap();
    assert!(done.status.success(), "{}", String::from_utf8_lossy(&done.stderr));
    Some(driver)
}

fn library(kernels: &[Kernel], level: &Level, baseline: &Level) -> Library {
    let code = kernels_object(Arch::Aarch64, TRIPLE, level, kernels, Output::Object).unwrap();
    let callers = callers_object(Arch::Aarch64, TRIPLE, baseline, kernels).unwrap();
    let parts =
        [("kernels", code), ("callers", callers)].map(|(name, bytes)| Part { name: name.into(), bytes });
    link(&parts, Arch::Aarch64, "kernels.so").unwrap()
}

/// The driver's input: see `tests/aarch64/driver.c`.
fn script(cases: &[(Case, Vec<mlcc_interp::kernel::Buffer>)], workers: u64) -> Vec<u8> {
    let mut out = Vec::new();
    let word = |out: &mut Vec<u8>, v: u64| out.extend(v.to_le_bytes());
    for (i, (case, _)) in cases.iter().enumerate() {
        let dims: Vec<i64> = case.kernel.dims.iter().map(|(sym, _)| case.dims.get(*sym)).collect();
        for v in [i as u64, case.buffers.len() as u64, dims.len() as u64, workers] {
            word(&mut out, v);
        }
        for buffer in &case.buffers {
            word(&mut out, buffer.bytes.len() as u64);
            out.extend(&buffer.bytes);
        }
        dims.iter().for_each(|&d| word(&mut out, d as u64));
    }
    out
}

fn emulate(driver: &Path, library: &Path, input: Vec<u8>) -> Vec<u8> {
    let mut child = Command::new("qemu-aarch64")
        .args(["-L", "/usr/aarch64-linux-gnu", "-cpu", "max"])
        .args([driver, library])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut stdin = child.stdin.take().unwrap();
    let feed = std::thread::spawn(move || stdin.write_all(&input));
    let output = child.wait_with_output().unwrap();
    assert!(output.status.success(), "the driver ended with {}", output.status);
    feed.join().unwrap().unwrap();
    output.stdout
}

#[test]
fn kernels_mean_the_same_on_aarch64() {
    let folder = tempfile::tempdir().unwrap();
    let Some(driver) = emulator(folder.path()) else { return };
    let mut all = arithmetic::float_arithmetic();
    all.extend(arithmetic::integer_arithmetic());
    all.extend(arithmetic::casts());
    all.extend(memory::lanes_move());
    all.extend(memory::memory_accesses());
    all.extend(control::loops_and_registers());
    all.extend(instrs::instructions());
    let cases = prepare(all);
    let kernels: Vec<Kernel> = cases.iter().map(|(c, _)| c.kernel.clone()).collect();
    let specs = mlcc_target::specs().unwrap();
    let spec = specs.iter().find(|s| s.arch == Arch::Aarch64).unwrap();
    for level in &spec.levels {
        let library = library(&kernels, level, &spec.levels[0]);
        let out = emulate(&driver, library.path(), script(&cases, 3));
        let mut rest = &out[..];
        for (case, want) in &cases {
            let got = case.buffers.iter().map(|b| {
                let (head, tail) = rest.split_at(b.bytes.len());
                rest = tail;
                head.to_vec()
            });
            let got: Vec<Vec<u8>> = got.collect();
            case.check(&level.name, &got, want);
        }
        assert!(rest.is_empty());
    }
}
