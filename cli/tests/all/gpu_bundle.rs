//! `tests/gpu/pack` and `tests/gpu/run` on a machine without a GPU: artifacts for the CPU through the same
//! scripts, and a driver that is none.

use std::collections::BTreeMap;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::time::Duration;

use crate::program::{case, workspace};
use serde_json::Value;

const PROGRAM: &str = env!("CARGO_BIN_EXE_mlcc");

/// A script of tests/gpu, without what the environment says about mlcc; `None` where there is no Python.
fn script(name: &str) -> Option<Command> {
    if Command::new("python3").arg("--version").output().is_err() {
        println!("skipped: there is no python3");
        return None;
    }
    let mut command = Command::new(workspace().join("tests/gpu").join(name));
    command.env("PYTHONDONTWRITEBYTECODE", "1").env("HF_HOME", "no-such-cache");
    for (name, _) in std::env::vars_os().filter(|(name, _)| name.to_string_lossy().starts_with("MLCC_")) {
        command.env_remove(name);
    }
    Some(command)
}

fn pack(target: &str, flags: &[&str]) -> Option<Command> {
    let mut pack = script("pack")?;
    pack.args(["--target", target, "--mlcc", PROGRAM, "--program", PROGRAM, "--case", "rwkv4-hf"])
        .args(flags);
    Some(pack)
}

fn done(output: Output, code: i32) -> String {
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    let errors = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(code), "{text}\n{errors}");
    text + &errors
}

/// The results of a run, by the name of the case (or by kind, where there is none).
fn results(folder: &Path) -> BTreeMap<String, Value> {
    let text = std::fs::read_to_string(folder.join("mlcc-gpu-results.jsonl")).unwrap();
    let objects = text.lines().map(|line| serde_json::from_str::<Value>(line).unwrap());
    let name = |v: &Value| v["name"].as_str().or(v["kind"].as_str()).unwrap().to_string();
    objects.map(|v| (name(&v), v)).collect()
}

#[test]
fn a_bundle_runs_from_end_to_end() {
    let folder = tempfile::tempdir().unwrap();
    let (file, out) = (folder.path().join("bundle.tar.xz"), folder.path().join("results"));
    let model = case("llama3-gqa-tied");
    let tests = "-p 16 -n 8 -b 1,2";
    let flags = ["--format", "f32", "--flags", "--max-batch 2", "--tests", tests, "--level", "0", "--model"];
    let Some(mut pack) = pack("cpu", &flags) else { return };
    let packed = done(pack.arg(model).arg("-o").arg(&file).output().unwrap(), 0);
    assert!(packed.contains("1 reference cases, 1 models for speed"), "{packed}");
    let mut run = script("run").unwrap();
    let shown = done(run.arg("--bundle").arg(&file).arg("--out").arg(&out).output().unwrap(), 0);
    assert!(shown.contains("all 1 reference cases are within the tolerance"), "{shown}");
    assert!(shown.contains("\nPyTorch, "), "what it measured, or that it is not there: {shown}");
    assert_eq!(std::fs::read_to_string(out.join("mlcc-gpu-results.txt")).unwrap(), shown);
    let results = results(&out);
    assert!(results["device"]["copy_bytes_per_s"].as_f64() > Some(1e6));
    assert!(results["rwkv4-hf-f32"]["error"].as_f64() < Some(1e-3), "{results:?}");
    let speed = &results["llama3-gqa-tied-f32"]["tests"];
    for (row, test) in ["pp16", "tg8", "tg8@b2"].iter().enumerate() {
        assert_eq!(speed[row]["test"], *test);
        assert!(speed[row]["share_of_copy_bandwidth"].as_f64() > Some(0.0), "{speed}");
        assert!(shown.contains(&format!("\n| llama3-gqa-tied-f32 | {test} | ")), "{shown}");
    }
    let texts = &results["rwkv4-tiny-books-f16-texts"];
    assert_eq!(texts["result"], "ok", "{texts}");
    for way in ["at once", "alone"] {
        let found = &texts["ways"][way];
        assert!(found["tokens"].as_u64() > Some(100) && found["texts"] == 16, "{texts}");
        assert!(found["worst"].as_f64() > Some(0.0), "steps of several sequences round otherwise: {texts}");
    }
    assert_eq!(results["summary"]["ok"], true);
}

/// A folder with a bundle of one case in f32, and its manifest.
fn bundle(target: &str) -> Option<(tempfile::TempDir, Value)> {
    bundle_with(target, &["--no-bench", "--no-texts", "--format", "f32", "--folder"])
}

fn bundle_with(target: &str, flags: &[&str]) -> Option<(tempfile::TempDir, Value)> {
    let folder = tempfile::tempdir().unwrap();
    let mut pack = pack(target, flags)?;
    done(pack.arg(folder.path()).output().unwrap(), 0);
    let manifest = std::fs::read(folder.path().join("bundle.json")).unwrap();
    Some((folder, serde_json::from_slice(&manifest).unwrap()))
}

fn run(bundle: &Path, flags: &[&str]) -> Command {
    let mut run = Command::new("python3");
    run.arg(bundle.join("run.py")).args(flags).arg("--out").arg(bundle.join("results"));
    run.env_remove("MLCC_CUDA_DRIVER").env("PYTHONDONTWRITEBYTECODE", "1");
    run
}

/// The bundle's case under other names: one that fits, a miss, one that hangs, one that is killed and a
/// damaged artifact.
const NAMES: [&str; 5] = ["fits", "misses", "hangs", "dies", "damaged"];

fn bundle_with_failures() -> Option<tempfile::TempDir> {
    let (folder, mut manifest) = bundle("cpu")?;
    let path = |name: &str| folder.path().join(name);
    let whole = std::fs::read(path("artifacts/rwkv4-hf-f32.so")).unwrap();
    let cases = NAMES.iter().enumerate().map(|(number, name)| {
        let mut case = manifest["goldens"][0].clone();
        let artifact = format!("artifacts/{name}.so");
        let bytes = if *name == "damaged" { &whole[..5000] } else { &whole[..] };
        std::fs::write(path(&artifact), bytes).unwrap();
        if *name == "misses" {
            case["tolerance"] = 0.into();
        }
        (case["name"], case["number"], case["artifact"]) = ((*name).into(), number.into(), artifact.into());
        case
    });
    manifest["goldens"] = cases.collect();
    std::fs::write(path("bundle.json"), manifest.to_string()).unwrap();
    let script = format!(
        "#!/bin/sh\ncase \"$*\" in *hangs.so*) sleep 600 ;; *dies.so*) echo the end >&2; kill -9 $$ ;; esac\nexec {PROGRAM} \"$@\"\n"
    );
    std::fs::remove_file(path("mlcc")).unwrap();
    std::fs::write(path("mlcc"), script).unwrap();
    std::fs::set_permissions(path("mlcc"), PermissionsExt::from_mode(0o755)).unwrap();
    Some(folder)
}

/// Each failure is reported, and the others go on.
#[test]
fn failures_are_told_and_the_rest_goes_on() {
    let Some(folder) = bundle_with_failures() else { return };
    let path = |name: &str| folder.path().join(name);
    let shown = done(run(folder.path(), &["--timeout", "20"]).output().unwrap(), 1);
    let found = results(&path("results"));
    assert_eq!(found["fits"]["result"], "ok", "{shown}");
    assert_eq!(found["misses"]["result"], "MISS");
    assert!(found["misses"]["error"].as_f64() > Some(0.0));
    assert!(found["hangs"]["result"].as_str().unwrap().starts_with("failed: stopped after"), "{shown}");
    assert_eq!(
        (&found["dies"]["result"], &found["dies"]["stderr"][0]),
        (&"failed: signal 9".into(), &"the end".into())
    );
    assert_eq!(found["damaged"]["result"], "failed: exit code 1");
    assert!(found["damaged"]["stderr"][0].as_str().unwrap().contains("damaged.so"), "{shown}");
    assert!(shown.contains("4 of 5 reference cases are not within the tolerance"), "{shown}");

    // A signal ends the time: what was found stays, and nothing is left running.
    std::fs::remove_dir_all(path("results")).unwrap();
    let flags = ["--timeout", "6000", "--minutes", "100", "--jobs", "2"];
    let running = run(folder.path(), &flags).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let list = path("results/mlcc-gpu-results.jsonl");
    while !std::fs::read_to_string(&list).unwrap_or_default().contains("damaged") {
        std::thread::sleep(Duration::from_millis(50));
    }
    assert!(Command::new("kill").args(["-TERM", &running.id().to_string()]).status().unwrap().success());
    let shown = done(running.wait_with_output().unwrap(), 1);
    let found = results(&path("results"));
    assert_eq!(found["fits"]["result"], "ok", "{shown}");
    assert_eq!(found["hangs"]["result"], "failed: signal 9", "{shown}");
    assert_eq!(found["summary"]["misses"], 4);

    let shown = done(run(folder.path(), &["--minutes", "0"]).output().unwrap(), 1);
    assert!(shown.matches("not run: no time left").count() >= 5, "{shown}");
}

/// Texts may leave the reference where two tokens are equally probable, and nowhere else; log probabilities
/// have a tolerance.
#[test]
fn texts_leave_the_reference_at_ties_alone() {
    let flags = ["--no-bench", "--format", "f32", "--folder"];
    let Some((folder, manifest)) = bundle_with("cpu", &flags) else { return };
    let reference = folder.path().join(manifest["texts"][0]["reference"].as_str().unwrap());
    let right: Value = serde_json::from_slice(&std::fs::read(&reference).unwrap()).unwrap();
    let outcome = |change: &dyn Fn(&mut Value)| {
        let mut texts = right.clone();
        change(&mut texts);
        std::fs::write(&reference, texts.to_string()).unwrap();
        let out = run(folder.path(), &[]).output().unwrap();
        let texts = results(&folder.path().join("results")).remove("rwkv4-tiny-books-f16-texts").unwrap();
        assert_eq!(out.status.code(), Some(i32::from(texts["result"] != "ok")), "{texts}");
        let alone = &texts["ways"]["alone"];
        (texts["result"].to_string(), alone["equal"].as_u64().unwrap(), alone["wrong"].to_string())
    };
    // Step 5 of the first text: its token, its log probability, the two most probable ones with theirs.
    let other = |text: &mut Value, gap: f64| {
        let step = &mut text[0][5];
        let (token, log) = (step[0].clone(), step[1].as_f64().unwrap());
        *step = serde_json::json!(["other", log, [["other", log], [token, log - gap]]]);
    };
    assert_eq!(outcome(&|texts| other(texts, 0.04)), ("\"ok\"".into(), 15, "[]".into()));
    let (result, _, wrong) = outcome(&|texts| other(texts, 0.06));
    assert!(result.contains("MISS") && wrong.contains("expected 'other'"), "{wrong}");
    let (result, _, wrong) =
        outcome(&|texts| texts[3][7][1] = (texts[3][7][1].as_f64().unwrap() - 0.02).into());
    assert!(result.contains("MISS") && wrong.contains("prompt 3: token 7"), "{wrong}");
    let (result, _, wrong) = outcome(&|texts| drop(texts[2].as_array_mut().unwrap().pop()));
    assert!(result.contains("MISS") && wrong.contains("prompt 2: "), "{wrong}");
}

/// The driver of the runtime's own tests.
fn fake_driver(folder: &Path) -> Option<PathBuf> {
    let (source, driver) =
        (workspace().join("compiler/codegen/tests/all/toy/fake_cuda.c"), folder.join("libfake.so.1"));
    let compiled =
        Command::new("cc").args(["-shared", "-fPIC", "-O1", "-o"]).args([&driver, &source]).status();
    if !compiled.is_ok_and(|status| status.success()) {
        println!("skipped: there is no C compiler");
        return None;
    }
    Some(driver)
}

#[test]
fn gpus_are_looked_for_first() {
    let folder = tempfile::tempdir().unwrap();
    let absent = folder.path().join("none/libcuda.so.1");
    let Some(mut run_here) = script("run") else { return };
    let out = done(run_here.env("MLCC_CUDA_DRIVER", &absent).output().unwrap(), 3);
    assert!(out.contains("no NVIDIA driver") && out.contains("--allow-missing"), "{out}");
    let out = done(run_here.arg("--allow-missing").output().unwrap(), 0);
    assert!(out.starts_with("skipped: no NVIDIA driver"), "{out}");
    if !mlcc_driver::compile::Backend::Llvm.is_built_in() {
        return println!("skipped: this mlcc has no LLVM");
    }
    let (Some((bundle, _)), Some(driver)) = (bundle("cuda"), fake_driver(folder.path())) else {
        return;
    };
    // It knows the kernels of toys only, so the case fails, and all that is known of the GPU is reported.
    let shown = done(run(bundle.path(), &[]).env("MLCC_CUDA_DRIVER", driver).output().unwrap(), 1);
    assert!(shown.starts_with("Fake GPU, compute capability 8.6, copies "), "{shown}");
    let results = results(&bundle.path().join("results"));
    assert!(results["device"]["copy_bytes_per_s"].as_f64() > Some(1e6));
    let failed = &results["rwkv4-hf-f32"];
    assert_eq!(failed["result"], "failed: exit code 1", "{shown}");
    assert!(failed["stderr"].to_string().contains("not the toy"), "{shown}");
}
