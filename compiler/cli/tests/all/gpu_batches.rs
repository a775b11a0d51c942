//! Steps and batches of several sequences on a GPU against the same sequences alone, by the driver in software: formats of weights and of
//! caches, windows, experts, recurrent and mixed models.

use std::path::PathBuf;

use mlcc_runtime::{LoadOptions, Model};

use crate::cases::assert_close;
use crate::program::case;
use crate::software_gpu::{build, driver, in_child};
use crate::{batch, step, together};

/// A reference case, flags of its build, the order of warps, how far a row among several may be off from one alone.
type Together = (&'static str, &'static [&'static str], &'static str, &'static str);

/// Sums of a row alone and of one among several are made in another order.
const F32: &str = "2e-5";
/// Products of several rows take activations as two bf16, those of one as f32. rwkv6-hf is off by a little more than 5e-5.
const MATRIX: &str = "2e-4";
/// Another sum turns a bit of a key or a value in f16 over.
const HALF: &str = "5e-4";
/// Or a code, by one.
const CODES: &str = "1e-3";

/// The rest of [`together`].
#[test]
fn child_with_batches() {
    let Some(folder) = std::env::var_os("MLCC_TEST_BATCHES").map(PathBuf::from) else { return };
    println!("child ran");
    let variable = |name: &str| std::env::var(name).unwrap();
    let name = variable("MLCC_TEST_CASE");
    let tolerance: f32 = variable("MLCC_TEST_TOLERANCE").parse().unwrap();
    let model = Model::load(folder.join("gpu.so"), &LoadOptions::default()).unwrap();
    assert_eq!((model.max_batch(), model.max_step_tokens()), (3, 16));
    together::compare(&name, 1, tolerance, &case(&name), &model);
    // Probabilities are those of the logits that a batch has made.
    let (mut a, mut b) = (model.session().unwrap(), model.session().unwrap());
    model.batch(2).unwrap().decode(&mut [&mut a, &mut b], &[1, 2]).unwrap();
    let mut alone = model.session().unwrap();
    alone.decode(2).unwrap();
    assert_close("probabilities", alone.softmax(0.8).unwrap(), b.softmax(0.8).unwrap(), tolerance);
    a.softmax(0.8).unwrap();
    assert_close("again", alone.softmax(0.8).unwrap(), b.softmax(0.8).unwrap(), tolerance);
}

/// Random steps of pieces and single tokens of three sequences, and batches of one token of each.
fn together(cases: &[Together]) {
    let Some(driver) = driver() else { return };
    for (name, flags, order, tolerance) in cases {
        let folder = tempfile::tempdir().unwrap();
        let flags = [&["--chunk", "16", "--max-batch", "3"], *flags].concat();
        let flags =
            if flags.contains(&"--target") { flags } else { [&flags[..], &["--target", "sm_90"]].concat() };
        build(&case(name), folder.path(), "gpu.so", &flags);
        let variables = [
            ("MLCC_TEST_BATCHES", folder.path().to_str().unwrap()),
            ("MLCC_TEST_CASE", name),
            ("MLCC_TEST_TOLERANCE", tolerance),
            ("SOFTCUDA_ORDER", order),
        ];
        in_child("gpu_batches::child_with_batches", &driver, &variables);
    }
}

#[test]
fn floats() {
    together(&[
        ("rwkv4-hf-odd", &["--quant", "f32"], "backwards", F32),
        ("llama3-gqa-tied", &["--quant", "f32"], "random:7", F32),
        ("rwkv6-hf", &["--quant", "f16"], "random:1", MATRIX),
    ]);
}

#[test]
fn codes_of_weights() {
    together(&[
        ("llama3-gqa-tied", &["--quant", "q4f16_1", "--kv-cache", "f32"], "backwards", MATRIX),
        ("rwkv7-hf", &["--quant", "q8f16_1"], "turns", MATRIX),
        ("rwkv4-hf-odd", &["--quant", "q4i8"], "random:2", MATRIX),
    ]);
}

#[test]
fn experts_and_mixed_models() {
    together(&[
        ("qwen3-moe", &["--quant", "q4f16_1", "--kv-cache", "f32"], "turns", MATRIX),
        ("falcon-h1", &["--quant", "q8f16_1", "--kv-cache", "f32"], "backwards", MATRIX),
    ]);
}

#[test]
fn caches_that_round() {
    together(&[
        ("llama3-gqa-tied", &["--quant", "f32", "--kv-cache", "i8"], "random:4", CODES),
        ("gemma2", &["--quant", "f16", "--kv-cache", "f16"], "turns", HALF),
        ("qwen2", &["--quant", "q8i8", "--target", "sm_70"], "turns", HALF),
    ]);
}

/// The rest of [`windows_move_for_each_sequence`].
#[test]
fn child_with_windows() {
    let Some(folder) = std::env::var_os("MLCC_TEST_WINDOWS").map(PathBuf::from) else { return };
    println!("child ran");
    let dir = case("mistral-swa");
    let load = |name: &str| Model::load(folder.join(name), &LoadOptions::default()).unwrap();
    batch::windows(&dir, &load("f32.so"), 2e-5);
    step::windows(&dir, &load("f16.so"), 5e-5);
}

/// Sequences go on beyond their caches while others have just begun.
#[test]
fn windows_move_for_each_sequence() {
    let Some(driver) = driver() else { return };
    let folder = tempfile::tempdir().unwrap();
    for quant in ["f32", "f16"] {
        let flags =
            ["--quant", quant, "--ctx-size", "24", "--chunk", "4", "--max-batch", "3", "--target", "sm_90"];
        build(&case("mistral-swa"), folder.path(), &format!("{quant}.so"), &flags);
    }
    let variables = [("MLCC_TEST_WINDOWS", folder.path().to_str().unwrap())];
    in_child("gpu_batches::child_with_windows", &driver, &variables);
}
