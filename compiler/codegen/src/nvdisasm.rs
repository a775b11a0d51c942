//! NVIDIA's disassembler, where it is found: predictions read what it prints.
//!
//! Only they need it. It comes with the CUDA toolkit, or alone as the Python package `nvidia-cuda-nvdisasm`.

use std::path::{Path, PathBuf};
use std::process::Command;
use thiserror::Error;

/// Names the disassembler to use.
pub const NVDISASM_VARIABLE: &str = "MLCC_NVDISASM";

#[derive(Error, Debug)]
pub enum NvdisasmError {
    #[error("cannot {action} {}: {source}", .path.display())]
    Io { action: &'static str, path: PathBuf, source: std::io::Error },
    #[error("{} does not print its version (`release 13.5, V13.5.37`): {output}", .path.display())]
    Version { path: PathBuf, output: String },
    #[error("{} refuses the machine code: {output}", .path.display())]
    Refused { path: PathBuf, output: String },
}

/// `MLCC_NVDISASM`, `nvdisasm` in `PATH` or in the usual place of the toolkit, or that of the Python package.
pub fn find_nvdisasm() -> Option<PathBuf> {
    if let Some(named) = std::env::var_os(NVDISASM_VARIABLE).filter(|v| !v.is_empty()) {
        return Some(PathBuf::from(named));
    }
    let path = std::env::var_os("PATH").unwrap_or_default();
    let mut places: Vec<PathBuf> = std::env::split_paths(&path).map(|d| d.join("nvdisasm")).collect();
    places.push("/usr/local/cuda/bin/nvdisasm".into());
    if let Some(found) = places.into_iter().find(|p| p.is_file()) {
        return Some(found);
    }
    let ask = "import sysconfig; print(sysconfig.get_paths()['purelib'])";
    let answer = Command::new("python3").args(["-c", ask]).output().ok()?;
    let site = PathBuf::from(String::from_utf8(answer.stdout).ok()?.trim());
    ["nvidia/cu13/bin/nvdisasm", "nvidia/cuda_nvdisasm/bin/nvdisasm"]
        .into_iter()
        .map(|place| site.join(place))
        .find(|p| p.is_file())
}

/// The version, for example `13.5.37`.
pub fn version(nvdisasm: &Path) -> Result<String, NvdisasmError> {
    let run = Command::new(nvdisasm).arg("--version").output();
    let run = run.map_err(|source| NvdisasmError::Io { action: "run", path: nvdisasm.to_owned(), source })?;
    let output = String::from_utf8_lossy(&run.stdout).into_owned();
    match crate::ptxas::version(&output) {
        Some(version) => Ok(version.into()),
        None => Err(NvdisasmError::Version { path: nvdisasm.to_owned(), output: output.trim().into() }),
    }
}

/// The code of a cubin as text, with the encoding of each instruction.
pub fn disassemble(nvdisasm: &Path, cubin: &[u8]) -> Result<String, NvdisasmError> {
    let io = |action, path: &Path| {
        let path = path.to_owned();
        move |source| NvdisasmError::Io { action, path, source }
    };
    let folder = crate::folder::create_temporary("mlcc-nvdisasm-")
        .map_err(io("create a folder in", &std::env::temp_dir()))?;
    let input = folder.path().join("code.cubin");
    std::fs::write(&input, cubin).map_err(io("write", &input))?;
    let run = Command::new(nvdisasm)
        .args(["-c", "-hex", "-ndf"])
        .arg(&input)
        .output()
        .map_err(io("run", nvdisasm))?;
    if !run.status.success() {
        let output = String::from_utf8_lossy(&run.stderr).trim().to_owned();
        return Err(NvdisasmError::Refused { path: nvdisasm.to_owned(), output });
    }
    Ok(String::from_utf8_lossy(&run.stdout).into_owned())
}
