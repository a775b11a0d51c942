//! The model families as artifacts against their reference cases: whole prompts (which the runtime cuts into
//! chunks), prompts in pieces and token by token, greedy continuations, weight formats, passes switched off.
//!
//! Cases are in `tests/goldens`, or in a folder of reference cases beside the project; one that is in neither
//! is skipped.

use std::path::Path;

use crate::cases::{
    self, FAMILIES, argmax, artifact, assert_close, backends, build_options, distance, feed, find, ids,
    interpreted, load, program, scheme,
};
use mlcc_driver::compile::{Backend, BuildOptions};
use mlcc_ir::ops::Op;
use mlcc_models::golden::{GoldenFile, GoldenPrompt};
use mlcc_passes::{CacheType, PIPELINE};

/// f32 arithmetic in another order than the reference's; measured are up to 4e-6.
const F32: f32 = 2e-5;
/// The tolerance of the reference cases for half-precision weights and activations.
const F16: f32 = 2e-2;

/// Few that have most of what the others have: scaled rotary embedding, shared key heads and a tied head;
/// windows and bounds by tanh; experts; ALiBi with odd heads.
const SAMPLE: [&str; 4] = ["llama3-gqa-tied", "gemma2", "qwen3-moe", "bloom-alibi"];

fn golden(dir: &Path) -> GoldenFile {
    GoldenFile::read(&dir.join("golden.json")).unwrap()
}

fn options(dir: &Path, quant: &str, backend: Backend) -> BuildOptions {
    let mut options = build_options(dir);
    options.quant = scheme(quant);
    options.quant_name = quant.into();
    // Smaller than the longest prompt, so that prompts are cut, where the model permits that.
    options.chunk = (!dir.ends_with("chatglm-6b-tiny")).then_some(cases::CHUNK);
    // The longest prompt has 80 tokens.
    options.context = Some(128);
    options.backend = backend;
    options
}

/// Prefix attention, and rotary embeddings whose angles depend on the number of rows in a call (in chunks
/// nevertheless).
fn needs_whole_prompts(dir: &Path) -> bool {
    ["chatglm-6b-tiny", "llama-dynamic", "phi3-longrope"].iter().any(|case| dir.ends_with(case))
}

/// Computes every prompt in every way and returns the greatest distance to the expected results.
fn check(what: &str, path: &Path, prompts: &[Vec<i32>], expected: &[Vec<f32>], tolerance: f32, whole: bool) {
    let mut session = load(path, None, 1).session().unwrap();
    let mut worst = 0f32;
    for (ids, expected) in prompts.iter().zip(expected) {
        let ways = if whole { vec![ids.len()] } else { vec![ids.len().max(2), 5, 1] };
        for piece in ways {
            let found = feed(&mut session, ids, piece);
            let what = format!("{what}, {} tokens in pieces of {piece}", ids.len());
            assert_close(&what, expected, &found, tolerance);
            worst = worst.max(distance(expected, &found));
        }
    }
    println!("{what}: off by at most {worst:.1e}");
}

/// The greedy continuation as far as errors within the tolerance cannot turn it.
fn check_greedy(what: &str, path: &Path, prompt: &GoldenPrompt, tolerance: f32) {
    let mut session = load(path, None, 2).session().unwrap();
    let scale = prompt.logits_last.iter().fold(0f32, |m, x| m.max(x.abs()));
    let mut logits = feed(&mut session, &ids(prompt), prompt.input_ids.len());
    for (step, &want) in prompt.binding_greedy(f64::from(tolerance * scale)).iter().enumerate() {
        assert_eq!(argmax(&logits), want, "{what}: greedy token {step}");
        logits = session.decode(want as i32).unwrap().to_vec();
    }
}

fn references(golden: &GoldenFile) -> (Vec<Vec<i32>>, Vec<Vec<f32>>) {
    (golden.prompts.iter().map(ids).collect(), golden.prompts.iter().map(|p| p.logits_last.clone()).collect())
}

fn check_case(case: &str, quant: &str, backend: Backend, disabled: Option<&str>, tolerance: f32) {
    let Some(dir) = find(case) else { return };
    let folder = tempfile::tempdir().unwrap();
    let mut options = options(&dir, quant, backend);
    options.disabled_passes = disabled.map(String::from).into_iter().collect();
    let (path, _) = artifact(&options, folder.path(), "case.so");
    let golden = golden(&dir);
    let (prompts, expected) = references(&golden);
    let what = format!("{case} in {quant} by {} without {disabled:?}", backend.name());
    check(&what, &path, &prompts, &expected, tolerance, needs_whole_prompts(&dir));
    if disabled.is_none() {
        golden.prompts.iter().for_each(|prompt| check_greedy(&what, &path, prompt, tolerance));
    }
}

#[test]
fn every_family_equals_its_reference() {
    // All by the back end that is preferred; the other one compiles the sample.
    for (i, backend) in backends().enumerate() {
        let cases = if i == 0 { &FAMILIES[..] } else { &SAMPLE[..] };
        cases.iter().for_each(|case| check_case(case, "f32", backend, None, F32));
    }
}

/// No field is guessed: by the other values of these files the logits are those of the reference too.
#[test]
fn varied_fields_equal_their_reference() {
    let backend = backends().next().expect("a back end is built in");
    cases::VARIED.iter().for_each(|case| check_case(case, "f32", backend, None, F32));
}

/// However a definition writes its attention, the pass finds it, in every layer of every entry function.
#[test]
fn every_attention_is_recognised() {
    for dir in FAMILIES.iter().filter_map(|case| find(case)) {
        let options = options(&dir, "f32", Backend::default());
        let (program, _) = program(&options, Some("fuse_attention"));
        let module = &program.module;
        let layers = module
            .states
            .values()
            .filter(|s| s.name.ends_with(".key") || s.name.ends_with(".latent"))
            .count();
        assert!(layers > 0 || dir.ends_with("mamba") || dir.ends_with("mamba2"), "{}", dir.display());
        // Half of these layers read the caches of others.
        let layers = if dir.ends_with("gemma4-e") { 2 * layers } else { layers };
        for name in ["prefill", "decode", "prefill_logits"] {
            let (_, f) = module.function(name).unwrap();
            let found = f.live_nodes().filter(|(_, node)| matches!(node.op, Op::Attention(_))).count();
            assert_eq!(found, layers, "{} in @{name}", dir.display());
        }
    }
}

#[test]
fn half_precision_is_within_its_tolerance() {
    let backend = backends().last().expect("a back end is built in");
    SAMPLE.iter().for_each(|case| check_case(case, "f16", backend, None, F16));
}

/// Two cases with every pass, each other one with one pass in turn. `MLCC_ALL_CASES=all`, or the names of
/// cases joined by commas, takes those with every pass.
#[test]
fn every_optional_pass_can_be_switched_off() {
    let backend = backends().last().expect("a back end is built in");
    let wanted = std::env::var("MLCC_ALL_CASES").unwrap_or_default();
    let is_wanted = |case: &str| wanted == "all" || wanted.split(',').any(|name| name == case);
    let passes: Vec<_> = PIPELINE.iter().filter(|p| p.optional).map(|p| p.name).collect();
    for (i, case) in FAMILIES.iter().enumerate() {
        let sampled = is_wanted(case) || SAMPLE[1..3].contains(case);
        let in_turn = passes.iter().skip(i % passes.len()).step_by(passes.len());
        let chosen: Vec<_> = if sampled { passes.iter().collect() } else { in_turn.collect() };
        chosen.iter().for_each(|pass| check_case(case, "f32", backend, Some(pass), F32));
    }
}

/// Against the interpreter on the same quantized weights: what is left is the error of kernels, not of
/// quantization.
#[test]
fn packed_weights_equal_their_own_meaning() {
    let backend = backends().last().expect("a back end is built in");
    // Mamba has what reads codes beside a convolution.
    for case in SAMPLE.into_iter().chain(["mamba"]) {
        let Some(dir) = find(case) else { continue };
        for quant in ["q8f16_1", "q4f16_1"] {
            let folder = tempfile::tempdir().unwrap();
            let mut options = options(&dir, quant, backend);
            // A rounding edge of a cache in f16 would hide what the kernels add.
            options.kv_cache = Some(CacheType::F32);
            let (module, source) = program(&options, Some(cases::LAST_GRAPH_PASS));
            let (prompts, _) = references(&golden(&dir));
            let expected = interpreted(&module.module, &source, &prompts);
            let (path, _) = artifact(&options, folder.path(), "case.so");
            check(&format!("{case} in {quant}"), &path, &prompts, &expected, 5e-4, false);
        }
    }
}
