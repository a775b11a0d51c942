//! NVIDIA's assembler, where it is found: it makes machine code of PTX, holds PTX against the hardware's
//! rules and tells registers and spills.
//!
//! Nothing needs it: the driver assembles PTX by itself when a model is loaded. It comes with the CUDA
//! toolkit, or alone as the Python package `nvidia-cuda-nvcc-cu12`.

use std::path::{Path, PathBuf};
use std::process::Command;
use thiserror::Error;

/// Names the assembler to use.
pub const PTXAS_VARIABLE: &str = "MLCC_PTXAS";

#[derive(Error, Debug)]
pub enum PtxasError {
    #[error("cannot {action} {}: {source}", .path.display())]
    Io { action: &'static str, path: PathBuf, source: std::io::Error },
    #[error("ptxas refuses the code for {arch}:\n{output}")]
    Refused { arch: String, output: String },
    #[error(
        "ptxas is neither in PATH nor named in {PTXAS_VARIABLE}; it comes with the CUDA toolkit, or as a Python package: python3 -m pip \
         install --no-deps --target DIR nvidia-cuda-nvcc-cu12==12.9.86, then {PTXAS_VARIABLE}=DIR/nvidia/cuda_nvcc/bin/ptxas"
    )]
    Missing,
    #[error("{} does not print its version (`release 12.9, V12.9.86`): {output}", .path.display())]
    Version { path: PathBuf, output: String },
}

/// An assembler that was asked for its version. Equal versions make equal code.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct PtxAssembler {
    pub path: PathBuf,
    /// The version, for example `12.9.86`.
    pub version: String,
}

impl PtxAssembler {
    /// [`find_ptxas`], with its version.
    pub fn find() -> Result<PtxAssembler, PtxasError> {
        let path = find_ptxas().ok_or(PtxasError::Missing)?;
        let run = Command::new(&path).arg("--version").output();
        let run = run.map_err(|source| PtxasError::Io { action: "run", path: path.clone(), source })?;
        let output = String::from_utf8_lossy(&run.stdout).into_owned();
        match version(&output) {
            Some(version) => Ok(PtxAssembler { path, version: version.into() }),
            None => Err(PtxasError::Version { path, output: output.trim().into() }),
        }
    }

    /// The CUDA version that a driver needs for its machine code: drivers take that of all assemblers of
    /// their major version ("CUDA Compatibility", "Minor Version Compatibility").
    pub fn required_cuda_version(&self) -> String {
        format!("{}.0", self.version.split('.').next().unwrap_or_default())
    }
}

/// The version in what `ptxas --version` prints, and NVIDIA's other tools.
pub(crate) fn version(text: &str) -> Option<&str> {
    let (_, rest) = text.split_once(", V")?;
    let end = rest.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(rest.len());
    Some(&rest[..end]).filter(|version| version.split('.').count() >= 2 && !version.starts_with('.'))
}

/// The CUDA version that a driver needs for PTX of this version (times ten), and for the functions that the
/// runtime calls: "PTX ISA", "Release Notes". `None` for versions that are not listed here.
pub fn driver_of_ptx(ptx: u32) -> Option<&'static str> {
    Some(match ptx {
        ..=74 => "11.4",
        75 => "11.5",
        76 => "11.6",
        77 => "11.7",
        78 => "11.8",
        80 => "12.0",
        81 => "12.1",
        82 => "12.2",
        83 => "12.3",
        84 => "12.4",
        85 => "12.5",
        86 => "12.7",
        87 => "12.8",
        88 => "12.9",
        90 => "13.0",
        _ => return None,
    })
}

/// The assembler's report on one kernel.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct ResourceUsage {
    pub kernel: String,
    pub registers: u32,
    /// Bytes of local memory written because registers ran out.
    pub spill_bytes: u32,
    pub shared_bytes: u32,
}

/// Machine code and its use of resources.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct AssembledCubin {
    pub cubin: Vec<u8>,
    pub usage: Vec<ResourceUsage>,
}

/// `MLCC_PTXAS`, `ptxas` in `PATH` or in the usual place of the toolkit, or that of the Python package.
pub fn find_ptxas() -> Option<PathBuf> {
    if let Some(named) = std::env::var_os(PTXAS_VARIABLE).filter(|v| !v.is_empty()) {
        return Some(PathBuf::from(named));
    }
    let path = std::env::var_os("PATH").unwrap_or_default();
    let mut places: Vec<PathBuf> = std::env::split_paths(&path).map(|d| d.join("ptxas")).collect();
    places.push("/usr/local/cuda/bin/ptxas".into());
    if let Some(found) = places.into_iter().find(|p| p.is_file()) {
        return Some(found);
    }
    let ask = "import sysconfig; print(sysconfig.get_paths()['purelib'])";
    let answer = Command::new("python3").args(["-c", ask]).output().ok()?;
    let site = PathBuf::from(String::from_utf8(answer.stdout).ok()?.trim());
    Some(site.join("nvidia/cuda_nvcc/bin/ptxas")).filter(|p| p.is_file())
}

/// Assembles PTX for devices of compute capability `sm`.
pub fn assemble(ptxas: &Path, ptx: &[u8], sm: u32) -> Result<AssembledCubin, PtxasError> {
    assemble_for(ptxas, ptx, &format!("sm_{sm}"))
}

/// The same, for a target of the assembler (`sm_90a`).
pub fn assemble_for(ptxas: &Path, ptx: &[u8], arch: &str) -> Result<AssembledCubin, PtxasError> {
    let io = |action, path: &Path| {
        let path = path.to_owned();
        move |source| PtxasError::Io { action, path, source }
    };
    let folder = crate::folder::create_temporary("mlcc-ptxas-")
        .map_err(io("create a folder in", &std::env::temp_dir()))?;
    let (input, output) = (folder.path().join("code.ptx"), folder.path().join("code.cubin"));
    std::fs::write(&input, ptx).map_err(io("write", &input))?;
    let run = Command::new(ptxas)
        .args(["-v", "-O3", &format!("-arch={arch}"), "-o"])
        .arg(&output)
        .arg(&input)
        .output()
        .map_err(io("run", ptxas))?;
    let text = String::from_utf8_lossy(&[run.stdout, run.stderr].concat()).into_owned();
    if !run.status.success() {
        return Err(PtxasError::Refused { arch: arch.into(), output: text.trim().to_owned() });
    }
    let cubin = std::fs::read(&output).map_err(io("read", &output))?;
    Ok(AssembledCubin { cubin, usage: parse_usage(&text) })
}

/// Reads the report of `ptxas -v`.
fn parse_usage(report: &str) -> Vec<ResourceUsage> {
    let mut all: Vec<ResourceUsage> = Vec::new();
    for line in report.lines() {
        if let Some((_, rest)) = line.split_once("Compiling entry function '") {
            let kernel = rest.split('\'').next().unwrap_or_default().to_owned();
            all.push(ResourceUsage { kernel, registers: 0, spill_bytes: 0, shared_bytes: 0 });
        }
        let Some(last) = all.last_mut() else { continue };
        if let Some(bytes) = number_before(line, " bytes spill stores") {
            last.spill_bytes = bytes;
        }
        if let Some(count) = number_before(line, " registers") {
            last.registers = count;
            last.shared_bytes = number_before(line, " bytes smem").unwrap_or(0);
        }
    }
    all
}

/// The number that ends where `what` begins.
fn number_before(line: &str, what: &str) -> Option<u32> {
    let (head, _) = line.split_once(what)?;
    head.rsplit(|c: char| !c.is_ascii_digit()).next()?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_version_is_read() {
        let text = "Built on Tue\nCuda compilation tools, release 12.9, V12.9.86\nBuild cuda_12.9.r12.9\n";
        assert_eq!(version(text), Some("12.9.86"));
        for wrong in ["", "release 12.9", "release, V", "x, Vx", "x, V12"] {
            assert_eq!(version(wrong), None, "{wrong}");
        }
        let assembler = PtxAssembler { path: "ptxas".into(), version: "12.9.86".into() };
        assert_eq!(
            (assembler.required_cuda_version().as_str(), driver_of_ptx(63), driver_of_ptx(78)),
            ("12.0", Some("11.4"), Some("11.8"))
        );
    }

    #[test]
    fn the_report_is_read() {
        let report = "ptxas info    : 0 bytes gmem\n\
            ptxas info    : Compiling entry function 'k_a' for 'sm_80'\n\
            ptxas info    : Function properties for k_a\n\
            \x20   8 bytes stack frame, 12 bytes spill stores, 16 bytes spill loads\n\
            ptxas info    : Used 40 registers, used 1 barriers, 8 bytes cumulative stack size, 1024 bytes smem\n\
            ptxas info    : Compiling entry function 'k_b' for 'sm_80'\n\
            ptxas info    : Used 9 registers, used 0 barriers\n";
        let a = ResourceUsage { kernel: "k_a".into(), registers: 40, spill_bytes: 12, shared_bytes: 1024 };
        let b = ResourceUsage { kernel: "k_b".into(), registers: 9, spill_bytes: 0, shared_bytes: 0 };
        assert_eq!(parse_usage(report), [a, b]);
    }
}
