//! `mlcc doctor`: what this machine offers, what is missing, and what to do about it.

use std::path::{Path, PathBuf};

use mlcc_bench::proc::proc_value;
use mlcc_codegen::cache::{CACHE_VARIABLE, ObjectCache};
use mlcc_codegen::link::find_linker;
use mlcc_codegen::ptxas::find_ptxas;
use mlcc_models::resolve::HubCache;
use mlcc_target::{Arch, detected_features};
use serde::Serialize;

use crate::commands::artifact_cache::{ArtifactCache, LIMIT_VARIABLE, cache_limit};
use crate::commands::{print, print_json};
use crate::error::CliError;
use crate::ui::{self, Ui};
use mlcc_driver::compile::Backend;

#[derive(Debug, clap::Args)]
pub struct DoctorArgs {
    /// Print JSON
    #[arg(long)]
    json: bool,
    /// Remove the cached code of earlier builds, and do nothing else
    #[arg(long, conflicts_with = "json")]
    clear_cache: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
enum CheckStatus {
    Ok,
    /// Something works less well, or not at all that most do not need.
    Absent,
    /// Nothing can be built.
    Missing,
}

#[derive(Clone, Debug, Serialize)]
struct DoctorCheck {
    name: &'static str,
    status: CheckStatus,
    found: String,
    /// Advice if it is needed.
    advice: Option<String>,
}

impl DoctorCheck {
    fn ok(name: &'static str, found: impl Into<String>) -> DoctorCheck {
        DoctorCheck { name, status: CheckStatus::Ok, found: found.into(), advice: None }
    }

    fn lacking(
        name: &'static str,
        status: CheckStatus,
        found: impl Into<String>,
        advice: impl Into<String>,
    ) -> DoctorCheck {
        DoctorCheck { name, status, found: found.into(), advice: Some(advice.into()) }
    }
}

pub fn run(args: &DoctorArgs, ui: &Ui) -> Result<(), CliError> {
    if args.clear_cache {
        return clear_cache(ui);
    }
    let mut checks = vec![
        DoctorCheck::ok("mlcc", format!("{}, ABI {}", env!("CARGO_PKG_VERSION"), mlcc_abi::ABI_VERSION)),
        llvm(),
        cranelift(),
        linker(),
        cross_linker(),
        cpu(),
        cores(),
        memory(),
        temporary_folder(),
        ptxas(),
        cuda(),
        cache(),
        object_cache(),
        artifact_cache(),
    ];
    if !Backend::Llvm.is_built_in() && !Backend::Cranelift.is_built_in() {
        let advice = "build mlcc with the cargo feature `llvm19` or `cranelift`";
        checks.push(DoctorCheck::lacking("back end", CheckStatus::Missing, "none", advice));
    }
    let usable = checks.iter().all(|c| c.status != CheckStatus::Missing);
    if args.json {
        print_json(&checks)?;
    } else {
        print(&checks_text(&checks))?;
    }
    if usable { Ok(()) } else { Err(CliError::Reported) }
}

fn checks_text(checks: &[DoctorCheck]) -> String {
    let width = checks.iter().map(|c| c.name.len()).max().unwrap_or(0);
    let mut out = String::new();
    for c in checks {
        let mark = match c.status {
            CheckStatus::Ok => "ok     ",
            CheckStatus::Absent => "absent ",
            CheckStatus::Missing => "MISSING",
        };
        out.push_str(&format!("{mark}  {:<width$}  {}\n", c.name, c.found));
        if let Some(advice) = &c.advice {
            out.push_str(&format!("{:w$}{advice}\n", "", w = width + 11));
        }
    }
    out
}

fn llvm() -> DoctorCheck {
    match (cfg!(feature = "llvm22"), Backend::Llvm.is_built_in()) {
        (true, _) => DoctorCheck::ok("LLVM", "22.1, linked in"),
        (false, true) => DoctorCheck::ok("LLVM", "19.1, linked in"),
        (false, false) => DoctorCheck::lacking(
            "LLVM",
            CheckStatus::Absent,
            "not part of this mlcc",
            "for the fastest code and for GPUs install LLVM 19 (apt install llvm-19-dev) and build mlcc with --features llvm19",
        ),
    }
}

fn cranelift() -> DoctorCheck {
    match Backend::Cranelift.is_built_in() {
        true => DoctorCheck::ok("Cranelift", "part of this mlcc"),
        false => {
            let advice = "for --backend cranelift build mlcc with --features cranelift";
            DoctorCheck::lacking("Cranelift", CheckStatus::Absent, "not part of this mlcc", advice)
        }
    }
}

fn linker() -> DoctorCheck {
    let arch = Arch::of_host().unwrap_or(Arch::X86_64);
    match find_linker(arch) {
        Ok(linker) => DoctorCheck::ok("linker", linker.program.display().to_string()),
        Err(e) => DoctorCheck::lacking("linker", CheckStatus::Missing, "none", e.to_string()),
    }
}

fn cross_linker() -> DoctorCheck {
    let other = if Arch::of_host() == Some(Arch::Aarch64) { Arch::X86_64 } else { Arch::Aarch64 };
    match find_linker(other) {
        Ok(linker) => DoctorCheck::ok("cross linker", format!("{} for {other}", linker.program.display())),
        Err(_) => {
            let advice = format!("only needed for --target {other} machines: apt install lld");
            DoctorCheck::lacking("cross linker", CheckStatus::Absent, format!("none for {other}"), advice)
        }
    }
}

fn cpu() -> DoctorCheck {
    let model = proc_value("/proc/cpuinfo", "model name").unwrap_or_else(|| std::env::consts::ARCH.into());
    match mlcc_target::resolve_target("cpu") {
        Ok(target) => DoctorCheck::ok(
            "CPU",
            format!("{model}; level {}: {}", target.name, detected_features().join(" ")),
        ),
        Err(e) => DoctorCheck::lacking("CPU", CheckStatus::Absent, model, e.to_string()),
    }
}

fn cores() -> DoctorCheck {
    let (topology, threads) = (mlcc_runtime::CpuTopology::detect_host(), mlcc_runtime::physical_cores());
    DoctorCheck::ok(
        "cores",
        format!("{topology}; runs use {} (-t changes it)", ui::pluralize(threads, "thread")),
    )
}

fn memory() -> DoctorCheck {
    let bytes = |key| {
        let text = proc_value("/proc/meminfo", key)?;
        Some(text.split_whitespace().next()?.parse::<u64>().ok()? * 1024)
    };
    match (bytes("MemTotal"), bytes("MemAvailable")) {
        (Some(total), Some(free)) => {
            DoctorCheck::ok("memory", format!("{}, {} of it available", ui::bytes(total), ui::bytes(free)))
        }
        _ => DoctorCheck::lacking(
            "memory",
            CheckStatus::Absent,
            "unknown",
            "/proc/meminfo gives no information here",
        ),
    }
}

/// Objects are linked there.
fn temporary_folder() -> DoctorCheck {
    let folder = std::env::temp_dir();
    let probe = folder.join(format!("mlcc-doctor-{}", std::process::id()));
    let written = std::fs::write(&probe, b"mlcc");
    let _ = std::fs::remove_file(&probe);
    match written {
        Ok(()) => DoctorCheck::ok("temporary folder", folder.display().to_string()),
        Err(e) => {
            let found = format!("cannot write to {}: {e}", folder.display());
            DoctorCheck::lacking(
                "temporary folder",
                CheckStatus::Missing,
                found,
                "name another one in TMPDIR",
            )
        }
    }
}

fn ptxas() -> DoctorCheck {
    match find_ptxas() {
        Some(path) => DoctorCheck::ok("ptxas", path.display().to_string()),
        None => {
            let advice = "not needed: GPU code is assembled by the driver when it is loaded. To have it checked at build \
                          time: pip install nvidia-cuda-nvcc-cu12, or name it in MLCC_PTXAS";
            DoctorCheck::lacking("ptxas", CheckStatus::Absent, "none", advice)
        }
    }
}

/// Looks for the driver's library without loading it.
fn cuda() -> DoctorCheck {
    // The choice of the runtime.
    let name = std::env::var("MLCC_CUDA_DRIVER").ok().filter(|name| !name.is_empty());
    let name = name.unwrap_or_else(|| "libcuda.so.1".into());
    let named = std::env::var_os("LD_LIBRARY_PATH").unwrap_or_default();
    let usual = [
        "/usr/lib64",
        "/usr/lib/wsl/lib",
        "/usr/lib",
        "/usr/lib/x86_64-linux-gnu",
        "/usr/lib/aarch64-linux-gnu",
    ];
    let folders = std::env::split_paths(&named).chain(usual.iter().map(PathBuf::from));
    // An absolute name is that file alone, which `join` gives as well.
    let found = folders.map(|f| f.join(&name)).find(|p| p.exists());
    match found {
        Some(path) => DoctorCheck::ok("CUDA driver", path.display().to_string()),
        None => {
            let advice = "only needed to run --target cuda artifacts: install the NVIDIA driver";
            DoctorCheck::lacking("CUDA driver", CheckStatus::Absent, format!("no {name}"), advice)
        }
    }
}

fn cache() -> DoctorCheck {
    let folder = HubCache::from_environment().directory;
    let models = models_in(&folder);
    match models {
        Some(n) => DoctorCheck::ok("Hugging Face cache", format!("{}, {n} models", folder.display())),
        None => {
            let advice = "only needed for --model org/name; HF_HOME or --hf-cache name another place";
            DoctorCheck::lacking(
                "Hugging Face cache",
                CheckStatus::Absent,
                format!("no folder {}", folder.display()),
                advice,
            )
        }
    }
}

/// Code of earlier builds.
fn object_cache() -> DoctorCheck {
    let name = "code cache";
    let Some(cache) = ObjectCache::from_environment() else {
        let advice = format!("builds compile all code again; {CACHE_VARIABLE} names a folder to keep it in");
        return DoctorCheck::lacking(name, CheckStatus::Absent, "none", advice);
    };
    let folder = cache.folder().display();
    match cache.measure_usage() {
        Ok(usage) => {
            let (used, limit) = (ui::bytes(usage.bytes), ui::bytes(cache.limit()));
            DoctorCheck::ok(name, format!("{folder}, {} objects, {used} of at most {limit}", usage.entries))
        }
        Err(e) => {
            let advice = format!("builds compile all code again; {CACHE_VARIABLE} names another folder");
            DoctorCheck::lacking(name, CheckStatus::Absent, format!("cannot read {folder}: {e}"), advice)
        }
    }
}

/// Artifacts of checkpoints that commands were given.
fn artifact_cache() -> DoctorCheck {
    let name = "artifact cache";
    let (cache, limit) = (ArtifactCache::from_environment(), cache_limit());
    let Some(cache) = cache else {
        let advice =
            format!("models are built by `mlcc build` only; {CACHE_VARIABLE} names a folder to keep them in");
        return DoctorCheck::lacking(name, CheckStatus::Absent, "none", advice);
    };
    let artifacts = cache.list_artifacts().map_err(|error| error.to_string());
    match artifacts.and_then(|list| Ok((list, limit.map_err(|error| error.to_string())?))) {
        Ok((list, limit)) => {
            let used = list.iter().map(|entry| entry.usage.bytes).sum();
            let found = format!(
                "{}, {}, {} of at most {}",
                cache.artifacts().display(),
                ui::pluralize(list.len() as u64, "artifact"),
                ui::bytes(used),
                ui::bytes(limit)
            );
            DoctorCheck::ok(name, found)
        }
        Err(found) => {
            let advice = format!("{CACHE_VARIABLE} names another folder, {LIMIT_VARIABLE} is its limit");
            DoctorCheck::lacking(name, CheckStatus::Absent, found, advice)
        }
    }
}

fn clear_cache(ui: &Ui) -> Result<(), CliError> {
    let Some(cache) = ObjectCache::from_environment() else {
        ui.note(format_args!("there is no cache: {CACHE_VARIABLE} is empty, or there is no home folder"));
        return Ok(());
    };
    let removed = cache.clear().map_err(CliError::io("clear", cache.folder()))?;
    let (entries, bytes) = (removed.entries, ui::bytes(removed.bytes));
    ui.note(format_args!("removed {entries} objects, {bytes}, from {}", cache.folder().display()));
    Ok(())
}

fn models_in(folder: &Path) -> Option<usize> {
    let entries = std::fs::read_dir(folder).ok()?;
    Some(entries.flatten().filter(|e| e.file_name().to_string_lossy().starts_with("models--")).count())
}
