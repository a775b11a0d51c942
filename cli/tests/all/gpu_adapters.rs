//! Adapters in slots on a GPU, by the driver in software: alone, copied and in a batch what the CPU gives.

use std::path::PathBuf;

use mlcc_driver::compile::BuildOptions;
use mlcc_runtime::{LoadOptions, LoadedAdapter, Model, Session};

use crate::cases::{artifact, assert_close, feed};
use crate::lora_slots::{loaded, of_lora, peft, session, with_slots};
use crate::software_gpu::{driver, in_child};

/// Products of several rows take activations as two bf16, those of one as f32.
const TOLERANCE: f32 = 2e-4;

/// Logits of sequences with adapters and without: in pieces, token by token so often that graphs are
/// recorded, copied, in a batch.
fn texts(model: &Model) -> Vec<Vec<f32>> {
    let adapters = [loaded(model, &peft(1.0)), loaded(model, &peft(-2.0))];
    let mut sessions = [Some(&adapters[0]), None, Some(&adapters[1])].map(|adapter| session(model, adapter));
    let mut results = Vec::new();
    for session in &mut sessions {
        results.push(feed(session, &[5, 9, 200, 31, 7, 8, 60], 3));
        results.extend((0..4).map(|token| session.decode(token).unwrap().to_vec()));
        results.push(session.fork().unwrap().decode(17).unwrap().to_vec());
        results.push(session.prefill_logits(&[3, 4, 5]).unwrap().to_vec());
    }
    let mut batch = model.batch(3).unwrap();
    let [a, b, c] = &mut sessions;
    for tokens in [[1, 2, 3], [4, 5, 6], [7, 8, 9]] {
        results.push(batch.decode(&mut [a, b, c], &tokens).unwrap().to_vec());
    }
    // None of them has an adapter: the code without.
    results.push(model.batch(1).unwrap().decode(&mut [b], &[10]).unwrap().to_vec());
    drop((sessions, adapters));
    // Another one in the slots of those.
    let other = loaded(model, &peft(3.0));
    let mut last = with(model, &other);
    results.push(last.prefill(&[5, 9, 200]).unwrap().to_vec());
    last.reset().unwrap();
    results.push(last.prefill(&[5, 9]).unwrap().to_vec());
    results
}

fn with(model: &Model, adapter: &LoadedAdapter) -> Session {
    session(model, Some(adapter))
}

/// The rest of [`sequences_on_a_gpu_have_adapters`].
#[test]
fn child_with_adapters() {
    let Some(folder) = std::env::var_os("MLCC_TEST_ADAPTERS").map(PathBuf::from) else { return };
    println!("child ran");
    let load = |name: &str| Model::load(folder.join(name), &LoadOptions::default()).unwrap();
    let (gpu, cpu) = (load("gpu.so"), load("cpu.so"));
    assert_eq!((gpu.adapter_slots(), gpu.adapter_rank()), (2, 16));
    let (found, expected) = (texts(&gpu), texts(&cpu));
    for (number, (found, expected)) in found.iter().zip(&expected).enumerate() {
        assert_close(&format!("result {number}"), expected, found, TOLERANCE);
    }
    assert_ne!(expected[0], expected[7], "the adapter changes something");
}

#[test]
fn sequences_on_a_gpu_have_adapters() {
    let Some(driver) = driver() else { return };
    let folder = tempfile::tempdir().unwrap();
    for (name, target) in [("gpu.so", "sm_90"), ("cpu.so", "cpu")] {
        let options = BuildOptions { target: target.into(), chunk: Some(8), ..with_slots(&of_lora("f32")) };
        artifact(&options, folder.path(), name);
    }
    let variables =
        [("MLCC_TEST_ADAPTERS", folder.path().to_str().unwrap()), ("SOFTCUDA_ORDER", "backwards")];
    in_child("gpu_adapters::child_with_adapters", &driver, &variables);
}
