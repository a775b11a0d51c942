//! Artifacts that cannot be run, and runs that cannot be done.

use std::path::{Path, PathBuf};

use crate::program::{artifact, books, case, fails_with, failure, json, mlcc};

fn run(artifact: &Path) -> assert_cmd::Command {
    let mut run = mlcc();
    run.arg("run").arg(artifact).args(["-n", "2"]);
    run
}

#[test]
fn damaged_artifacts() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.so");
    let good = std::fs::read(artifact()).unwrap();
    for length in [0, 10, 64, 5000, good.len() / 2, good.len() - 1] {
        std::fs::write(&path, &good[..length]).unwrap();
        fails_with(run(&path).args(["-p", "x"]), &["model.so"]);
        fails_with(mlcc().arg("inspect").arg(&path), &["model.so"]);
    }
    // In the code, in the middle of the tokenizer.
    for at in [4096 + 100, 1 << 18] {
        let mut bytes = good.clone();
        bytes[at] ^= 1;
        std::fs::write(&path, bytes).unwrap();
        fails_with(run(&path).args(["-p", "x"]), &["model.so is corrupt", "hash", "Copy or build it again"]);
    }
    // In the weights, which only checks of everything read.
    let mut bytes = good.clone();
    let at = bytes.len() - (1 << 20);
    bytes[at] ^= 1;
    std::fs::write(&path, bytes).unwrap();
    fails_with(mlcc().arg("inspect").arg(&path).arg("--hashes"), &["model.so is corrupt", ".mlcc.weights"]);
    std::fs::write(&path, "no ELF file at all, but long enough to look at it as if it were one ....")
        .unwrap();
    fails_with(run(&path).args(["-p", "x"]), &["model.so"]);
    fails_with(run(&folder.path().join("absent.so")).args(["-p", "x"]), &["absent.so"]);
}

#[test]
fn an_artifact_for_another_machine() {
    let (target, machine) = match std::env::consts::ARCH {
        "aarch64" => ("x86-64-v2", "x86-64"),
        _ => ("armv8.0", "aarch64"),
    };
    let arch = mlcc_target::resolve_target(target).unwrap().arch;
    if let Err(e) = mlcc_codegen::link::find_linker(arch) {
        eprintln!("skipped: {e}");
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.so");
    let mut build = mlcc();
    build.arg("build").arg("-m").arg(case("rwkv4-hf")).args(["--target", target, "-o"]).arg(&path);
    build.assert().success();
    fails_with(run(&path).args(["-p", "x"]), &["model.so", machine, "--target"]);
    // Looking at it needs no machine.
    mlcc().arg("inspect").arg(&path).assert().success();
}

#[test]
fn a_cpu_level_that_is_not_in_the_artifact() {
    let mut run = run(artifact());
    run.args(["-p", "x"]).env("MLCC_CPU_LEVEL", "pdp-11");
    fails_with(&mut run, &["pdp-11", "MLCC_CPU_LEVEL"]);
}

#[test]
fn a_gpu_artifact_without_a_driver() {
    if Path::new("/dev/nvidiactl").exists() || !mlcc_driver::compile::Backend::Llvm.is_built_in() {
        eprintln!("skipped: this machine has a GPU, or this mlcc no LLVM");
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.so");
    let mut build = mlcc();
    build.arg("build").arg("-m").arg(books()).args(["--target", "cuda", "--quant", "q4f16", "-o"]).arg(&path);
    build.assert().success();
    fails_with(run(&path).args(["-p", "x"]), &["libcuda.so.1", "--target cpu"]);
}

#[test]
fn prompts() {
    fails_with(run(artifact()).args(["-p", ""]), &["prompt is empty", "-p TEXT"]);
    fails_with(run(artifact()).args(["-p", "-"]).write_stdin(""), &["prompt is empty"]);
    let latin1 = b"caf\xe9 noir".to_vec();
    fails_with(run(artifact()).args(["-p", "-"]).write_stdin(latin1), &["standard input", "byte 3", "0xe9"]);
    fails_with(run(artifact()).args(["-f", "absent.txt"]), &["cannot read absent.txt"]);
}

fn small_context() -> (tempfile::TempDir, PathBuf) {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.so");
    let mut build = mlcc();
    build.arg("build").arg("-m").arg(books()).args(["-c", "8", "--quant", "q4i8", "-o"]).arg(&path);
    build.assert().success();
    (folder, path)
}

#[test]
fn a_prompt_longer_than_the_context() {
    let (_folder, path) = small_context();
    let long = "one two three four five six seven eight nine ten";
    fails_with(run(&path).args(["-p", long]), &["context of 8", "--ctx-size"]);
    // A short one ends where the context does.
    let mut short = mlcc();
    let output =
        short.arg("run").arg(&path).args(["-p", "It was", "-n", "100", "--ignore-eos"]).assert().success();
    let report = String::from_utf8(output.get_output().stderr.clone()).unwrap();
    assert!(report.contains("end: context"), "{report}");
}

/// Defaults fit the model; what was asked for and does not fit is refused by its flag.
#[test]
fn measurements_in_a_short_context() {
    let (folder, path) = small_context();
    let text = folder.path().join("text.txt");
    std::fs::write(&text, "She was very glad to see him, and said so. ".repeat(5)).unwrap();
    let eval = |model: &Path, more: &[&str]| {
        let mut eval = mlcc();
        eval.arg("eval").arg(model).arg("--json").arg("--text").arg(&text).args(more);
        eval
    };
    let fitted = |result: &serde_json::Value| [&result["context"], &result["stride"]].map(|v| v.as_u64());
    assert_eq!(fitted(&json(&mut eval(&path, &[]))), [Some(8), Some(8)]);
    assert_eq!(fitted(&json(&mut eval(artifact(), &["--context", "20"]))), [Some(20), Some(20)]);
    let against = path.to_str().unwrap();
    assert_eq!(fitted(&json(&mut eval(artifact(), &["--against", against]))), [Some(8), Some(8)]);
    let message = failure(&mut eval(&path, &["--context", "9"]), 2);
    assert!(message.contains("--context 9") && message.contains("at most 8"), "{message}");

    let bench = |more: &[&str]| {
        let mut bench = mlcc();
        bench.arg("bench").arg(&path).args(["-r", "1", "-t", "1", "--warm-up", "0", "-o", "json"]).args(more);
        bench
    };
    let names = |more: &[&str]| -> Vec<String> {
        let rows = json(&mut bench(more));
        rows.as_array().unwrap().iter().map(|r| r["test"].as_str().unwrap().to_string()).collect()
    };
    assert_eq!(names(&[]), ["pp8", "tg8"]);
    assert_eq!(names(&["-p", "3", "-d", "0,5"]), ["pp3", "tg3", "tg3@d5"]);
    for (more, flag) in [
        (&["-p", "3,9"][..], "-p/--n-prompt 9"),
        (&["-n", "9"], "-n/--n-gen 9"),
        (&["-d", "8"], "-d/--depth 8"),
        (&["-d", "5", "-n", "4", "--kernels"], "-n/--n-gen 4 after -d/--depth 5"),
    ] {
        let message = failure(&mut bench(more), 2);
        assert!(message.contains(flag) && message.contains("room for 8"), "{message}");
    }
}

#[test]
fn verify_needs_something_to_hold_against() {
    let message = failure(mlcc().arg("verify").arg(artifact()), 2);
    assert!(message.contains("--golden FILE") && message.contains("--layers"), "{message}");
}

#[test]
fn a_model_without_a_tokenizer() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.so");
    let mut build = mlcc();
    build.arg("build").arg("-m").arg(case("rwkv4-hf")).arg("-o").arg(&path).assert().success();
    fails_with(run(&path).args(["-p", "x"]), &["model.so contains no tokenizer", "--tokenizer"]);
    let tokenizer = books().join("tokenizer.json");
    fails_with(run(&path).args(["-p", "x", "--tokenizer"]).arg(tokenizer), &["does not belong", "320"]);
}

#[test]
fn files_that_do_not_belong_together() {
    let golden = case("rwkv4-hf").join("golden.json");
    fails_with(
        mlcc().arg("verify").arg(artifact()).arg("--golden").arg(golden),
        &["320", "4096", "do not match"],
    );
    let golden = books().join("golden.json");
    let mut interp = mlcc();
    interp.arg("interp").arg("-m").arg(case("rwkv4-hf")).arg("--golden").arg(golden);
    fails_with(&mut interp, &["320", "4096", "do not match"]);
    let config = books().join("config.json");
    let mut verify = mlcc();
    verify.arg("verify").arg(artifact()).arg("--golden").arg(config);
    fails_with(
        &mut verify,
        &["config.json is valid JSON, but contains no reference results", "missing field"],
    );
    let folder = tempfile::tempdir().unwrap();
    let state = folder.path().join("x.state");
    std::fs::write(&state, "not a state").unwrap();
    fails_with(
        run(artifact()).args(["-p", "x", "--load-state"]).arg(&state),
        &["x.state is not a usable state file"],
    );
    let text = folder.path().join("short.txt");
    std::fs::write(&text, "Too short.").unwrap();
    fails_with(mlcc().arg("eval").arg(artifact()).arg("--text").arg(&text), &["fewer than one window"]);
    let module = folder.path().join("broken.mlc");
    std::fs::write(&module, "module @m {\n  fn @f(").unwrap();
    fails_with(mlcc().arg("opt").arg(&module), &["broken.mlc:2:"]);
}
