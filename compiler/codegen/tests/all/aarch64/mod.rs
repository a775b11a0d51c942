//! Runs AArch64 kernels under an emulator, through the program `driver.c`.

use mlcc_codegen::{GeneratedCode, LinkedLibrary, link};
use mlcc_interp::kernel::KernelBuffer;
use mlcc_ir::dim::SymValues;
use mlcc_ir::kernel::Kernel;
use mlcc_target::Arch;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use tempfile::TempDir;

/// One call of a kernel.
pub struct KernelCall<'a> {
    pub kernel: &'a Kernel,
    pub dims: &'a SymValues,
    pub buffers: &'a [KernelBuffer],
}

/// A compiled driver.
pub struct EmulatedDriver {
    driver: PathBuf,
    _folder: TempDir,
}

impl EmulatedDriver {
    /// Says what is missing if there is none.
    pub fn find() -> Option<EmulatedDriver> {
        let runs =
            |program: &str| Command::new(program).arg("--version").output().is_ok_and(|o| o.status.success());
        for program in ["qemu-aarch64", "aarch64-linux-gnu-gcc"] {
            if !runs(program) {
                eprintln!("skipped: no {program} (`apt install qemu-user gcc-aarch64-linux-gnu`)");
                return None;
            }
        }
        let folder = tempfile::tempdir().unwrap();
        let driver = folder.path().join("driver");
        let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/all/aarch64/driver.c");
        let done = Command::new("aarch64-linux-gnu-gcc")
            .args(["-O1", "-Wall", "-Wextra", "-Werror", "-o"])
            .arg(&driver)
            .arg(source)
            .arg("-ldl")
            .output()
            .unwrap();
        assert!(done.status.success(), "{}", String::from_utf8_lossy(&done.stderr));
        Some(EmulatedDriver { driver, _folder: folder })
    }

    /// Links kernels with their callers and makes the calls, one per kernel in order; gives the buffers
    /// afterwards.
    pub fn run(
        &self,
        code: Vec<u8>,
        callers: Vec<u8>,
        calls: &[KernelCall<'_>],
        workers: u64,
    ) -> Vec<Vec<Vec<u8>>> {
        let parts = [("kernels", code), ("callers", callers)]
            .map(|(name, bytes)| GeneratedCode { name: name.into(), bytes });
        let library: LinkedLibrary = link(&parts, Arch::Aarch64, "kernels.so").unwrap();
        let out = self.emulate(library.path(), script(calls, workers));
        let mut rest = &out[..];
        let mut take = |b: &KernelBuffer| {
            let (head, tail) = rest.split_at(b.bytes.len());
            rest = tail;
            head.to_vec()
        };
        let results = calls.iter().map(|call| call.buffers.iter().map(&mut take).collect()).collect();
        assert!(rest.is_empty());
        results
    }

    fn emulate(&self, library: &Path, input: Vec<u8>) -> Vec<u8> {
        let mut child = Command::new("qemu-aarch64")
            .args(["-L", "/usr/aarch64-linux-gnu", "-cpu", "max"])
            .args([self.driver.as_path(), library])
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
}

/// The driver's input: see `driver.c`.
fn script(calls: &[KernelCall<'_>], workers: u64) -> Vec<u8> {
    let mut out = Vec::new();
    let word = |out: &mut Vec<u8>, v: u64| out.extend(v.to_le_bytes());
    for (i, call) in calls.iter().enumerate() {
        let dims: Vec<i64> = call.kernel.dims.iter().map(|(sym, _)| call.dims.get(*sym)).collect();
        for v in [i as u64, call.buffers.len() as u64, dims.len() as u64, workers] {
            word(&mut out, v);
        }
        for buffer in call.buffers {
            word(&mut out, buffer.bytes.len() as u64);
            out.extend(&buffer.bytes);
        }
        dims.iter().for_each(|&d| word(&mut out, d as u64));
    }
    out
}
