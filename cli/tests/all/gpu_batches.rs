//! Steps and batches of several sequences on a GPU against the same sequences alone, by the driver in
//! software: formats of weights and of caches, windows, experts, recurrent and mixed models.

use std::path::PathBuf;

use mlcc_runtime::{LoadOptions, Model, OutputRows, Session, SessionInput};

use crate::cases::assert_close;
use crate::program::case;
use crate::software_gpu::{build, driver, in_child};
use crate::together::PairedSessions;
use crate::{batch, step, together};

/// A reference case, flags of its build, the order of warps, how far a row among several may be off from one
/// alone.
type BatchFn = (&'static str, &'static [&'static str], &'static str, &'static str);

/// Sums of a row alone and of one among several are made in another order.
const F32: &str = "2e-5";
/// Products of several rows take activations as two bf16, those of one as f32. rwkv6-hf is off by a little
/// more than 5e-5.
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

/// Activations stay f32 where sums in another order are compared: one that falls on the other side of a
/// rounding edge of f16 moves by 2^-11, up to 6e-4 of the largest logit in these models, and hides what
/// tolerances are for.
const SUMS: [&str; 2] = ["--disable-pass", "halve_activations"];

/// Random steps of pieces and single tokens of three sequences, and batches of one token of each.
fn together(cases: &[BatchFn]) {
    let Some(driver) = driver() else { return };
    for (name, flags, order, tolerance) in cases {
        let folder = tempfile::tempdir().unwrap();
        let flags = [&["--chunk", "16", "--max-batch", "3"], &SUMS[..], *flags].concat();
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

/// The rest of [`rounded_rows_know_nothing_of_their_neighbours`].
#[test]
fn child_with_neighbours() {
    let Some(folder) = std::env::var_os("MLCC_TEST_NEIGHBOURS").map(PathBuf::from) else { return };
    println!("child ran");
    let model = Model::load(folder.join("gpu.so"), &LoadOptions::default()).unwrap();
    let session = |prompt: &[i32]| {
        let mut session = model.session().unwrap();
        session.prefill(prompt).unwrap();
        session
    };
    let [mut alone, mut first, mut second] = [0; 3].map(|_| session(&[1, 2]));
    let (mut a, mut b, mut c) = (session(&[3]), session(&[4, 5, 6]), session(&[2, 1]));
    let (mut batch, vocab) = (model.batch(3).unwrap(), model.vocab());
    for token in [3, 9, 4, 7, 5] {
        let want = alone.decode(token).unwrap().to_vec();
        let one = batch.decode(&mut [&mut first, &mut a], &[token, 8]).unwrap()[..vocab].to_vec();
        let two = &batch.decode(&mut [&mut b, &mut c, &mut second], &[6, 2, token]).unwrap()[2 * vocab..];
        assert_eq!(one, two, "token {token}");
        // A row alone has another order of sums, and a few activations at the next f16.
        assert_close(&format!("token {token} alone"), &want, two, 2e-3);
    }
}

/// Activations in f16: a row has the same bits whatever else is computed.
#[test]
fn rounded_rows_know_nothing_of_their_neighbours() {
    let Some(driver) = driver() else { return };
    for (name, quant) in [("rwkv6-hf", "f16"), ("llama3-gqa-tied", "q4f16_1"), ("falcon-h1", "q8f16_1")] {
        let folder = tempfile::tempdir().unwrap();
        let flags = ["--quant", quant, "--chunk", "16", "--max-batch", "3", "--target", "sm_90"];
        build(&case(name), folder.path(), "gpu.so", &flags);
        let variables = [("MLCC_TEST_NEIGHBOURS", folder.path().to_str().unwrap())];
        in_child("gpu_batches::child_with_neighbours", &driver, &variables);
    }
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

/// Sequences go on beyond their caches while others have just started.
#[test]
fn windows_move_for_each_sequence() {
    let Some(driver) = driver() else { return };
    let folder = tempfile::tempdir().unwrap();
    for quant in ["f32", "f16"] {
        // Bits of caches in f16 would be flipped by another order of sums.
        let flags = ["--quant", quant, "--kv-cache", "f32", "--ctx-size", "24", "--chunk", "4"];
        let flags = [&flags[..], &SUMS, &["--max-batch", "3", "--target", "sm_90"]].concat();
        build(&case("mistral-swa"), folder.path(), &format!("{quant}.so"), &flags);
    }
    let variables = [("MLCC_TEST_WINDOWS", folder.path().to_str().unwrap())];
    in_child("gpu_batches::child_with_windows", &driver, &variables);
}

/// The rest of [`a_graph_serves_a_bucket_of_sequences`] and of [`graphs_of_batches_that_are_refused`].
#[test]
fn child_with_graphs() {
    let Some(folder) = std::env::var_os("MLCC_TEST_GRAPHS").map(PathBuf::from) else { return };
    println!("child ran");
    let refused = std::env::var_os("SOFTCUDA_REFUSE_CAPTURES").is_some();
    let model = Model::load(folder.join("gpu.so"), &LoadOptions::default()).unwrap();
    let mut batch = model.batch(8).unwrap();
    let PairedSessions { mut together, mut alone } = PairedSessions::new(&model, 8);
    for (session, twin) in together.iter_mut().zip(&mut alone) {
        session.prefill(&[1, 2]).unwrap();
        twin.prefill(&[1, 2]).unwrap();
    }
    // Buckets of 8 and of 4 sequences: the first call of each is launched, the second one recorded.
    for (round, count) in [5, 8, 7, 3, 4, 6, 3].into_iter().enumerate() {
        let tokens: Vec<i32> = (0..count).map(|i| 3 + (i * 5 + round) as i32).collect();
        let mut members: Vec<&mut Session> = together.iter_mut().take(count).collect();
        let rows = batch.decode(&mut members, &tokens).unwrap().to_vec();
        for ((row, twin), token) in rows.chunks_exact(model.vocab()).zip(&mut alone).zip(&tokens) {
            assert_close(&format!("round {round}"), twin.decode(*token).unwrap(), row, 2e-5);
        }
    }
    // Pieces of other lengths of the same bucket, of more rows of logits than there were before.
    for piece in [&[4, 5, 6][..], &[7, 8, 9, 1], &[2, 3, 4]] {
        let [a, b, ..] = &mut together[..] else { unreachable!() };
        let rows = [(a, piece), (b, &piece[1..])].map(|(session, tokens)| SessionInput {
            session,
            tokens,
            outputs: OutputRows::All,
        });
        let found = batch.step(&mut { rows }).unwrap().to_vec();
        let mut expected = alone[0].prefill_logits(piece).unwrap().to_vec();
        expected.extend_from_slice(alone[1].prefill_logits(&piece[1..]).unwrap());
        assert_close("pieces", &expected, &found, 2e-5);
    }
    let notice = batch.performance_warning();
    assert_eq!(
        notice.as_ref().is_some_and(|n| n.contains("SOFTCUDA_REFUSE_CAPTURES")),
        refused,
        "{notice:?}"
    );
}

fn graphs(variables: &[(&str, &str)]) -> Option<serde_json::Value> {
    let driver = driver()?;
    let folder = tempfile::tempdir().unwrap();
    let flags = ["--quant", "f32", "--chunk", "16", "--max-batch", "8", "--target", "sm_90"];
    build(&case("llama3-gqa-tied"), folder.path(), "gpu.so", &flags);
    let counts = folder.path().join("counts.json");
    let given = [
        ("MLCC_TEST_GRAPHS", folder.path().to_str().unwrap()),
        ("SOFTCUDA_COUNTS", counts.to_str().unwrap()),
    ];
    in_child("gpu_batches::child_with_graphs", &driver, &[&given, variables].concat());
    Some(serde_json::from_slice(&std::fs::read(counts).unwrap()).unwrap())
}

/// Blocks of a graph that a smaller call does not need do nothing.
#[test]
fn a_graph_serves_a_bucket_of_sequences() {
    let Some(counts) = graphs(&[("SOFTCUDA_ORDER", "backwards")]) else { return };
    // 5 of 7 batches, 2 of 3 steps of pieces, and all but the first of the 36 tokens of sequences alone.
    assert_eq!(counts["graph_launches"], 5 + 2 + 35);
}

#[test]
fn graphs_of_batches_that_are_refused() {
    let Some(counts) = graphs(&[("SOFTCUDA_REFUSE_CAPTURES", "1000")]) else { return };
    assert_eq!(counts["graph_launches"], 0);
}
