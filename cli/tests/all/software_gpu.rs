//! CUDA artifacts through the real runtime, on the driver in software that executes their PTX
//! (`softcuda`): reference cases, the text and the sessions of the CPU build, and what a driver may
//! refuse.

use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use assert_cmd::Command;
use mlcc_driver::compile::Backend;
use mlcc_runtime::{LoadOptions, Model, Session};
use tempfile::TempDir;

use crate::cases::assert_close;
use crate::program::{books, case, fails_with, mlcc, text};

/// The driver, which cargo builds with this program; `None` where mlcc has no LLVM to make PTX with.
pub fn driver() -> Option<PathBuf> {
    if !Backend::Llvm.is_built_in() {
        println!("skipped: this mlcc has no LLVM");
        return None;
    }
    let program = std::env::current_exe().unwrap();
    let name = format!("{}softcuda{}", std::env::consts::DLL_PREFIX, std::env::consts::DLL_SUFFIX);
    let found =
        program.ancestors().skip(1).take(2).map(|folder| folder.join(&name)).find(|file| file.exists());
    Some(found.unwrap_or_else(|| panic!("{name} is not beside {}", program.display())))
}

/// `mlcc` with the driver and its switches.
pub fn on_gpu(driver: &Path, switches: &[(&str, &str)]) -> Command {
    let mut command = mlcc();
    command
        .env("MLCC_CUDA_DRIVER", driver)
        .envs(switches.iter().map(|(name, value)| (format!("SOFTCUDA_{name}"), value)));
    command
}

pub fn build(model: &Path, folder: &Path, name: &str, flags: &[&str]) -> PathBuf {
    let path = folder.join(name);
    let mut build = mlcc();
    build.arg("build").arg("-q").arg("-m").arg(model).args(["--no-report"]).args(flags).arg("-o").arg(&path);
    build.assert().success();
    path
}

/// Runs a test of this program, which says that it ran, in a process of its own that has these variables and
/// the driver.
pub fn in_child(test: &str, driver: &Path, variables: &[(&str, &str)]) {
    let out = std::process::Command::new(std::env::current_exe().unwrap())
        .args(["--exact", test, "--nocapture"])
        .env("MLCC_CUDA_DRIVER", driver)
        .envs(variables.iter().copied())
        .output()
        .unwrap();
    let text = String::from_utf8_lossy(&out.stdout).into_owned() + &String::from_utf8_lossy(&out.stderr);
    assert!(out.status.success() && text.contains("child ran"), "{test} with {variables:?}: {text}");
}

/// A reference case, flags of its build, switches of the driver.
type SoftwareCase = (&'static str, &'static [&'static str], &'static [(&'static str, &'static str)]);

/// States of vectors and of matrices, caches in three formats, windows, experts, positions that count from
/// the end, every kind of weights, also those that stay as published; latent rows; prompts in pieces, so that
/// `past` is not 0.
#[rustfmt::skip]
const GOLDENS: [SoftwareCase; 14] = [
    ("rwkv4-hf", &["--target", "cuda", "--quant", "f32"], &[]),
    ("rwkv4-hf-odd", &["--target", "sm_70", "--quant", "q4f16_0", "--chunk", "16"], &[("SM", "75"), ("ORDER", "backwards")]),
    ("rwkv7-hf", &["--target", "sm_80", "--quant", "q8f16_1", "--chunk", "16"], &[("ORDER", "random:1")]),
    ("llama3-gqa-tied", &["--target", "sm_90", "--quant", "f16", "--chunk", "16"], &[("ORDER", "backwards")]),
    ("llama3-gqa-tied", &["--target", "sm_90", "--quant", "f32", "--kv-cache", "i8", "--chunk", "16"], &[]),
    ("mistral-swa", &["--target", "sm_80", "--quant", "q8i8", "--chunk", "16"], &[("ORDER", "random:2")]),
    ("qwen3-moe", &["--target", "sm_90", "--quant", "q4i8", "--chunk", "16"], &[("ORDER", "random:3")]),
    ("bloom-alibi", &["--target", "sm_80", "--quant", "q4f16_2", "--chunk", "16"], &[]),
    ("mamba2", &["--target", "sm_90", "--quant", "bf16"], &[("ORDER", "backwards")]),
    ("chatglm-6b-tiny", &["--target", "sm_90", "--quant", "q4f16_1"], &[("MAPPING", "off")]),
    ("quant-awq", &["--target", "sm_80"], &[("ORDER", "backwards")]),
    ("quant-fp8-block", &["--target", "sm_90", "--chunk", "16"], &[("ORDER", "random:4")]),
    ("gpt-oss-mxfp4", &["--target", "sm_80", "--chunk", "16"], &[("ORDER", "random:5")]),
    ("deepseek-v2-lite", &["--target", "sm_90", "--quant", "f16"], &[]),
];

fn goldens(part: usize) {
    let Some(driver) = driver() else { return };
    let folder = tempfile::tempdir().unwrap();
    for (name, flags, switches) in GOLDENS.iter().skip(part).step_by(2) {
        let artifact = build(&case(name), folder.path(), &format!("{name}.so"), flags);
        let mut verify = on_gpu(&driver, switches);
        verify.arg("verify").arg(&artifact).arg("--golden").arg(case(name).join("golden.json"));
        let out = text(&mut verify);
        assert!(out.contains("within the tolerance") || out.contains(": right"), "{name} {flags:?}: {out}");
    }
}

#[test]
fn reference_cases() {
    goldens(0);
}

#[test]
fn more_reference_cases() {
    goldens(1);
}

/// A trained model for a GPU and for this machine's CPU.
fn both() -> &'static (TempDir, PathBuf, PathBuf) {
    static BUILT: OnceLock<(TempDir, PathBuf, PathBuf)> = OnceLock::new();
    BUILT.get_or_init(|| {
        let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
        let flags = |target| ["--quant", "q4f16", "--target", target];
        let gpu = build(&books(), folder.path(), "gpu.so", &flags("cuda"));
        let cpu = build(&books(), folder.path(), "cpu.so", &flags("cpu"));
        (folder, gpu, cpu)
    })
}

#[test]
fn a_text_is_that_of_the_cpu_build() {
    let Some(driver) = driver() else { return };
    let (_, gpu, cpu) = both();
    let prompt = ["-p", "The sea was", "-n", "12", "--temperature", "0", "-q"];
    let expected = text(mlcc().arg("run").arg(cpu).args(prompt));
    let counts = tempfile::NamedTempFile::new().unwrap();
    let mut run = on_gpu(&driver, &[("COUNTS", counts.path().to_str().unwrap())]);
    assert_eq!(text(run.arg("run").arg(gpu).args(prompt)), expected);
    let counts: serde_json::Value = serde_json::from_reader(counts.as_file()).unwrap();
    let kernels = counts["kernels"].as_array().unwrap();
    assert!(kernels.len() > 10 && counts["launches"].as_u64().unwrap() > 100, "{counts}");
    for kernel in kernels {
        let (loads, warps) = (&kernel["global_load"], kernel["instructions"]["warp"].as_u64().unwrap());
        let sectors = loads["sectors_per_request"].as_f64().unwrap();
        assert!(sectors > 0.0 && sectors <= 32.0 && warps > 0, "{kernel}");
    }
}

/// Logits of a session that computes in pieces, token by token, is forked, saved, loaded and cut.
fn steps(session: &mut Session, folder: &Path) -> Vec<f32> {
    let ids: Vec<i32> = (0..14).map(|i| 3 + i * 7 % 40).collect();
    let mut all = vec![];
    all.extend_from_slice(session.prefill(&ids[..5]).unwrap());
    all.extend_from_slice(session.prefill(&ids[5..9]).unwrap());
    for id in &ids[9..12] {
        all.extend_from_slice(session.decode(*id).unwrap());
    }
    let file = folder.join(format!("{}.state", session.model().executor()));
    session.save_state(&file).unwrap();
    let mut twin = session.fork().unwrap();
    all.extend_from_slice(session.decode(ids[12]).unwrap());
    all.extend_from_slice(twin.prefill_logits(&ids[10..]).unwrap());
    session.load_state(&file).unwrap();
    all.extend_from_slice(session.decode(ids[13]).unwrap());
    all.extend_from_slice(session.softmax(0.7).unwrap());
    if session.can_truncate_to(6) {
        session.truncate(6).unwrap();
        all.extend_from_slice(session.decode(ids[6]).unwrap());
    }
    session.reset().unwrap();
    all.extend_from_slice(session.decode(ids[0]).unwrap());
    all
}

/// The rest of [`sessions`], in a process whose environment names the driver.
#[test]
fn child_with_sessions() {
    let Some(folder) = std::env::var_os("MLCC_TEST_SESSIONS").map(PathBuf::from) else { return };
    println!("child ran");
    let load = |name: &str| Model::load(folder.join(name), &LoadOptions::default()).unwrap();
    let (gpu, cpu) = (load("gpu.so"), load("cpu.so"));
    assert_eq!(gpu.executor(), "Software GPU");
    let (mut on_gpu, mut on_cpu) = (gpu.session().unwrap(), cpu.session().unwrap());
    let expected = steps(&mut on_cpu, &folder);
    assert_close("sessions", &expected, &steps(&mut on_gpu, &folder), 2e-5);
    assert_eq!(on_gpu.performance_warning(), None);
}

#[test]
fn sessions() {
    let Some(driver) = driver() else { return };
    for (case_name, order) in [("rwkv6-hf", "turns"), ("gemma3-text", "random:5")] {
        let folder = tempfile::tempdir().unwrap();
        for (name, target) in [("gpu.so", "sm_90"), ("cpu.so", "cpu")] {
            build(
                &case(case_name),
                folder.path(),
                name,
                &["--quant", "f32", "--chunk", "8", "--target", target],
            );
        }
        let variables = [("MLCC_TEST_SESSIONS", folder.path().to_str().unwrap()), ("SOFTCUDA_ORDER", order)];
        in_child("software_gpu::child_with_sessions", &driver, &variables);
    }
}

/// Exit code 1, one message that holds all of `parts`.
fn refused(driver: &Path, artifact: &Path, switches: &[(&str, &str)], parts: &[&str]) {
    let mut run = on_gpu(driver, switches);
    fails_with(run.arg("run").arg(artifact).args(["-p", "The sea", "-n", "4", "-q"]), parts);
}

#[test]
fn what_a_driver_refuses_at_the_start() {
    let Some(driver) = driver() else { return };
    let (folder, gpu, _) = both();
    refused(
        &folder.path().join("absent.so"),
        gpu,
        &[],
        &["absent.so cannot be loaded", "install the NVIDIA driver"],
    );
    refused(&driver, gpu, &[("DEVICES", "0")], &["CUDA_ERROR_NO_DEVICE"]);
    refused(
        &driver,
        gpu,
        &[("SM", "60")],
        &["is an sm_60 and the artifact has ptx for sm_90", "ptx for sm_70"],
    );
    refused(
        &driver,
        gpu,
        &[("VERSION", "11040")],
        &["CUDA_ERROR_UNSUPPORTED_PTX_VERSION", "PTX 7.8, this driver reads up to 7.4"],
    );
    refused(
        &driver,
        gpu,
        &[("MEMORY", "1000000")],
        &["no", "bytes of free memory for the weights", "--quant"],
    );
    refused(&driver, gpu, &[("MISSPELT", "1")], &["SOFTCUDA_MISSPELT=1: there is no such switch"]);
}

#[test]
fn a_device_that_is_lost() {
    let Some(driver) = driver() else { return };
    let (_, gpu, _) = both();
    let mut run = on_gpu(&driver, &[("LOSE_AFTER", "200")]);
    let out = run
        .arg("run")
        .arg(gpu)
        .args(["-p", "The sea", "-n", "64", "-q", "--temperature", "0"])
        .assert()
        .code(1);
    let message = String::from_utf8_lossy(&out.get_output().stderr).into_owned();
    assert!(message.contains("CUDA_ERROR_ECC_UNCORRECTABLE") && !message.contains("panicked"), "{message}");
}

/// The rest of [`refusals_that_a_session_survives`].
#[test]
fn child_with_refusals() {
    let Some(folder) = std::env::var_os("MLCC_TEST_REFUSALS").map(PathBuf::from) else { return };
    println!("child ran");
    let load = |name: &str| Model::load(folder.join(name), &LoadOptions::default()).unwrap();
    let (gpu, cpu) = (load("gpu.so"), load("cpu.so"));
    let (mut session, mut on_cpu) = (gpu.session().unwrap(), cpu.session().unwrap());
    let ids: Vec<i32> = (0..500).map(|i| 1 + i * 5 % 90).collect();
    // Every recording of this process is refused: tokens go kernel by kernel, and the session says why.
    for id in &ids[..6] {
        assert_close("without graphs", on_cpu.decode(*id).unwrap(), session.decode(*id).unwrap(), 2e-5);
    }
    assert!(
        session.performance_warning().is_some_and(|n| n.contains("SOFTCUDA_REFUSE_CAPTURES")),
        "{:?}",
        session.performance_warning()
    );
    // Rows of caches that the device has no memory for: the call fails, the sequence goes on from what it
    // was.
    let rows = ids
        .chunks(8)
        .map(|piece| (piece.len(), session.prefill(piece).map(|_| ())))
        .find(|(_, fed)| fed.is_err());
    let (_, error) = rows.expect("the memory does not suffice");
    let error = error.unwrap_err().to_string();
    assert!(error.contains("pages of the KV cache on the GPU"), "{error}");
    let past = session.past() as usize;
    assert!(past > 6, "{past}");
    session.truncate(6).unwrap();
    assert_close("after it", on_cpu.decode(50).unwrap(), session.decode(50).unwrap(), 2e-5);
}

#[test]
fn refusals_that_a_session_survives() {
    let Some(driver) = driver() else { return };
    let folder = tempfile::tempdir().unwrap();
    for (name, target) in [("gpu.so", "sm_90"), ("cpu.so", "cpu")] {
        let flags = ["--quant", "f32", "--chunk", "8", "--ctx-size", "512", "--target", target];
        build(&case("llama3-gqa-tied"), folder.path(), name, &flags);
    }
    let variables = [
        ("MLCC_TEST_REFUSALS", folder.path().to_str().unwrap()),
        ("SOFTCUDA_REFUSE_CAPTURES", "1000"),
        ("SOFTCUDA_GRANULE", "4096"),
        ("SOFTCUDA_MEMORY", "900000"),
    ];
    in_child("software_gpu::child_with_refusals", &driver, &variables);
}
