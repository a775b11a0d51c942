//! `mlcc build --weights-on-load`: random weights that are no part of the artifact.

use std::path::{Path, PathBuf};

use crate::program::{case, fails_with, json, mlcc, text};
use mlcc_abi::section;
use mlcc_passes::scheme::SCHEMES;
use mlcc_runtime::{Artifact, LoadOptions, Model};

/// A shape with odd sizes: rows that fill no tile, columns that fill no group.
const ODD: &str = "rwkv4-hf-odd";
const SHAPES: [&str; 2] = ["rwkv4-hf", "llama3-gqa-tied"];

fn build(folder: &Path, name: &str, shape: &str, flags: &[&str]) -> PathBuf {
    let path = folder.join(format!("{name}.so"));
    let mut build = mlcc();
    build.arg("build").arg("-m").arg(case(shape)).args(["-q", "--chunk", "8"]);
    if !flags.contains(&"--random-weights") {
        build.args(["--random-weights", "5"]);
    }
    if cfg!(feature = "cranelift") {
        build.args(["--backend", "cranelift"]);
    }
    build.args(flags).arg("-o").arg(&path).assert().success();
    path
}

fn load(path: &Path, threads: usize) -> Model {
    let options = LoadOptions { threads: Some(threads), verify_hashes: true, ..LoadOptions::default() };
    Model::load(path, &options).unwrap()
}

fn logits(path: &Path, threads: usize) -> Vec<f32> {
    let model = load(path, threads);
    let mut session = model.session().unwrap();
    session.prefill(&[3, 1, 4, 1, 5, 9, 2, 6, 5, 3]).unwrap();
    session.decode(7).unwrap().to_vec()
}

/// The deviation of logits, which are numbers.
fn spread(path: &Path) -> f64 {
    let logits = logits(path, 1);
    assert!(logits.iter().all(|x| x.is_finite()), "{}", path.display());
    let mean = logits.iter().map(|&x| f64::from(x)).sum::<f64>() / logits.len() as f64;
    let squares = logits.iter().map(|&x| (f64::from(x) - mean).powi(2)).sum::<f64>();
    (squares / logits.len() as f64).sqrt()
}

/// Logits differ in every format and for both kinds of model, and by as much as those of weights in the file.
#[test]
fn every_format_computes() {
    let folder = tempfile::tempdir().unwrap();
    for shape in [SHAPES[0], SHAPES[1], ODD] {
        let stored = spread(&build(folder.path(), "stored", shape, &["--quant", "f32"]));
        for scheme in SCHEMES.iter().filter(|s| shape != ODD || ["bf16", "q4f16_2"].contains(&s.name)) {
            let made = build(folder.path(), "made", shape, &["--quant", scheme.name, "--weights-on-load"]);
            let artifact = Artifact::open(&made).unwrap();
            assert!(
                artifact.section(section::WEIGHTS).is_none() && artifact.section(section::RECIPE).is_some()
            );
            let made = spread(&made);
            assert!(
                made > 0.3 * stored && made < 3.0 * stored,
                "{shape} {}: deviation {made}, of stored weights {stored}",
                scheme.name
            );
        }
    }
}

/// The weights are a function of the seed, however many threads make them.
#[test]
fn weights_depend_on_the_seed_alone() {
    let folder = tempfile::tempdir().unwrap();
    let flags = ["--quant", "q4f16", "--weights-on-load"];
    let first = build(folder.path(), "first", "llama3-gqa-tied", &flags);
    let again = build(folder.path(), "again", "llama3-gqa-tied", &flags);
    assert!(std::fs::read(&first).unwrap() == std::fs::read(&again).unwrap());
    let open = |path: &Path| Artifact::open(path).unwrap();
    let one = open(&first).weight_generator().unwrap().generate(1).unwrap();
    let two = open(&first).weight_generator().unwrap().generate(2).unwrap();
    assert!(one[..] == two[..]);
    assert_eq!(open(&first).hash(section::WEIGHTS), Some(open(&first).weight_generator().unwrap().hash()));
    assert_eq!(logits(&first, 1), logits(&first, 1));
    let other =
        build(folder.path(), "other", "llama3-gqa-tied", &[&flags[..], &["--random-weights", "6"]].concat());
    let other = open(&other).weight_generator().unwrap().generate(1).unwrap();
    let equal = one.iter().zip(&other[..]).filter(|(a, b)| a == b).count();
    assert!(other.len() == one.len() && 10 * equal < one.len(), "{equal} of {} bytes are equal", one.len());
}

/// A model of which the weights are much more than its code: the file has none of them.
#[test]
fn the_file_has_no_weights() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.so");
    let mut build = mlcc();
    build.args([
        "build",
        "-m",
        "rwkv-169m",
        "--random-weights",
        "0",
        "--weights-on-load",
        "--quant",
        "q4f16",
    ]);
    let report = json(build.args(["--max-batch", "1", "--json", "-o"]).arg(&path));
    assert_eq!(report["weights_on_load"], 0);
    let weights = report["memory"]["weights_bytes"].as_u64().unwrap();
    let file = std::fs::metadata(&path).unwrap().len();
    assert!(weights > 150_000_000 && file < 3_000_000, "{weights} bytes of weights, {file} of the file");
    let info = json(mlcc().arg("inspect").arg(&path).arg("--json"));
    let made = &info["weights_on_load"];
    assert_eq!((&made["seed"], &made["bytes"]), (&0.into(), &weights.into()));
    assert!(made["stored_bytes"].as_u64().unwrap() < 100_000, "{made}");
    assert!(info["sections"].as_array().unwrap().iter().all(|s| s["name"] != section::WEIGHTS));
    let shown = text(mlcc().arg("inspect").arg(&path));
    assert!(shown.contains("made on load from seed 0"), "{shown}");
}

#[test]
fn hashes_are_those_of_the_made_weights() {
    let folder = tempfile::tempdir().unwrap();
    let path = build(folder.path(), "model", "rwkv4-hf", &["--quant", "f16", "--weights-on-load"]);
    let shown = text(mlcc().arg("inspect").arg(&path).arg("--hashes"));
    assert!(shown.contains("those of all sections are right"), "{shown}");
    // Another key makes other weights; the section's own hash tells a change first.
    let mut bytes = std::fs::read(&path).unwrap();
    let at = bytes.windows(5).position(|w| w == b"draw ").unwrap();
    bytes[at + 5] ^= 1;
    let damaged = folder.path().join("damaged.so");
    std::fs::write(&damaged, bytes).unwrap();
    fails_with(mlcc().arg("inspect").arg(&damaged), &["damaged.so is corrupt"]);
}

#[test]
fn what_needs_the_values_of_a_checkpoint_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let path = build(folder.path(), "model", "rwkv4-hf", &["--weights-on-load"]);
    let mut verify = mlcc();
    verify.arg("verify").arg(&path).arg("--golden").arg(case("rwkv4-hf").join("golden.json"));
    fails_with(
        &mut verify,
        &["model.so", "made on load from seed 5", "--weights-on-load", "no reference results"],
    );
    let refused = |flags: &[&str], why: &str| {
        let out =
            mlcc().args(["build", "-m", "rwkv-169m", "--weights-on-load"]).args(flags).output().unwrap();
        let text = String::from_utf8_lossy(&out.stderr).into_owned();
        assert!(out.status.code() == Some(2) && text.contains(why), "{flags:?}: {text}");
    };
    refused(&[], "--random-weights");
    for flag in ["--split-weights", "--debug-taps", "--report"] {
        refused(&["--random-weights", "0", flag], flag);
    }
}
