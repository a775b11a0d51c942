//! `mlcc verify --golden` of packed formats: kernels are compared with the artifact's own graph on the
//! weights that it stores, and the cost of the format is reported separately.

use std::path::{Path, PathBuf};

use crate::cases::{CHUNK, artifact, backends, build_options, directory, golden, load, options, scheme};
use mlcc_driver::compile::BuildOptions;
use mlcc_driver::kernel_check::SHARP;
use mlcc_driver::replay::{ReplayOutcome, ReplaySubject, format_tolerance, judge_model};
use mlcc_driver::stored::StoredGraph;
use mlcc_ir::kernel::{Expr, Kernel};
use mlcc_ir::rewrite::rewrite_exprs;
use mlcc_ir::types::DType;
use mlcc_passes::{CacheType, LoweredProgram, PIPELINE, Pass, PassContext, PassError, lower};

/// The verdict on an artifact that is built by the fastest compiler.
fn verdict(case: &str, mut options: BuildOptions, folder: &Path) -> ReplayOutcome {
    options.backend = backends().last().expect("a back end is built in");
    let (path, _) = artifact(&options, folder, "model.so");
    let model = load(&path, None, 1);
    let mut session = model.session().unwrap();
    let scheme = options.quant.name;
    let graph = || StoredGraph::open(&model);
    judge_model(&mut session, &golden(case), scheme, format_tolerance(scheme), graph, None).unwrap()
}

#[test]
fn right_artifacts_pass() {
    let folder = tempfile::tempdir().unwrap();
    for (case, quant) in [
        ("qwen2", "q4f16_1"),
        ("gpt2", "q4i8"),
        ("rwkv4-hf-odd", "q4f16_2"),
        ("llama-dynamic", "q8i8"),
        ("starcoder2", "q8f16_1"),
        ("qwen3-moe", "q4f16_0"),
    ] {
        let outcome = verdict(case, options(case, quant), folder.path());
        let kernels = outcome.kernels.as_ref().expect("packed weights are held against the graph");
        println!("{case} {quant}:\n{}", outcome.text("reference"));
        assert!(outcome.ok && kernels.ok && kernels.not_checked.is_none(), "{case} in {quant}");
        assert!(kernels.prompts.iter().all(|p| p.checked == p.tokens && p.tokens > 0));
        assert!(outcome.tolerance.is_none() && outcome.greedy_expected > 0);
        // The model as well, as far as the format's own error lets it be: said in words and as fields.
        let error = outcome.format_error.expect("the error of the format is measured");
        assert!(error.spread > 0.0 && outcome.judged == ReplaySubject::Model, "{case} in {quant}");
        assert!(
            outcome.text("reference").contains("cannot be told from that of the format"),
            "{case} in {quant}"
        );
        let json = serde_json::to_value(&outcome).unwrap();
        assert_eq!(
            (&json["judged"], &json["format_error"]["permitted"]),
            (&"model".into(), &error.permitted.into())
        );
        // The cost of the format is no error of the kernels.
        assert!(kernels.worst_relative_error < outcome.worst_relative_error, "{case} in {quant}");
    }
}

/// The first two rows of every tile of packed weights have each other's scales.
fn wrong_scales(kernel: &Kernel) -> Kernel {
    rewrite_exprs(kernel, |kb, expr, ty| match expr {
        Expr::Cast(a) if ty.dtype == DType::F32 && ty.lanes > 1 && kb.ty(*a).dtype == DType::F16 => {
            let right = kb.cast(*a, DType::F32);
            Some(kb.shuffle(right, None, [1, 0].into_iter().chain(2..ty.lanes).collect()))
        }
        _ => None,
    })
}

/// One kernel is wrong: the last one of each level that reads scales.
fn wrong_lower(program: &mut LoweredProgram, ctx: &mut PassContext) -> Result<usize, PassError> {
    let kernels = lower::run(program, ctx)?;
    for level in &mut program.levels {
        let text = |kernel: &Kernel| format!("{:?}", kernel.body);
        let changed = |kernel: &&mut Kernel| {
            let wrong = wrong_scales(kernel);
            wrong.exprs.len() != kernel.exprs.len() || text(&wrong) != text(kernel)
        };
        let kernel = level.lowered.kernels.iter_mut().rev().find(changed).expect("a kernel reads scales");
        *kernel = wrong_scales(kernel);
    }
    Ok(kernels)
}

/// The bar of 4-bit formats for the distance from the reference before kernels were judged by themselves.
const OLD_BAR: f64 = 0.35;

#[test]
fn a_wrong_scale_index_fails() {
    let wrong = PIPELINE.iter().map(|p| if p.name == "lower" { Pass { run: wrong_lower, ..*p } } else { *p });
    let wrong: &'static [Pass] = Vec::leak(wrong.collect());
    let folder = tempfile::tempdir().unwrap();
    for (case, quant) in
        [("llama-dynamic", "q4f16_1"), ("llama-dynamic", "q4i8"), ("rwkv4-hf-odd", "q4f16_1")]
    {
        // Reads of half floats in caches stay right.
        let right = BuildOptions { kv_cache: Some(CacheType::F32), ..options(case, quant) };
        let broken = BuildOptions { pipeline: wrong, ..right.clone() };
        let outcome = verdict(case, right, folder.path());
        println!("{case} {quant}:\n{}", outcome.text("reference"));
        assert!(outcome.ok, "{case} in {quant}");
        let outcome = verdict(case, broken, folder.path());
        println!("{case} {quant}, broken:\n{}", outcome.text("reference"));
        let kernels = outcome.kernels.as_ref().unwrap();
        assert!(!outcome.ok && !kernels.ok, "{case} in {quant}");
        assert!(kernels.worst_relative_error > 10.0 * SHARP, "{case} in {quant}");
        assert!(outcome.worst_relative_error < OLD_BAR, "{case} in {quant}: any bar would have found it");
    }
}

#[test]
fn what_is_not_checked_is_told_and_not_right() {
    let folder = tempfile::tempdir().unwrap();
    let case = "rwkv4-hf-odd";
    let options = BuildOptions { backend: backends().last().unwrap(), ..options(case, "q4f16_1") };
    let (path, _) = artifact(&options, folder.path(), "model.so");
    let model = load(&path, None, 1);
    let mut session = model.session().unwrap();
    let mut judged = |tolerance| {
        let graph = || Err("too large".to_string());
        judge_model(&mut session, &golden(case), "q4f16_1", None, graph, tolerance).unwrap()
    };
    let outcome = judged(None);
    assert!(!outcome.ok && outcome.text("reference").contains("NOT CHECKED: too large"));
    // The user may judge by the distance from the reference instead.
    assert!(judged(Some(0.9)).ok && !judged(Some(1e-6)).ok);
    assert_eq!((outcome.judged, judged(Some(0.9)).judged), (ReplaySubject::Nothing, ReplaySubject::Model));

    // A few positions only: the first ones.
    let mut graph = StoredGraph::open(&model).unwrap();
    graph.positions = 5;
    let outcome = judge_model(&mut session, &golden(case), "q4f16_1", None, || Ok(graph), None).unwrap();
    let kernels = outcome.kernels.as_ref().unwrap();
    assert!(outcome.ok && kernels.checked_positions() == 5);
    assert!(outcome.text("reference").contains("NOT CHECKED"), "{}", outcome.text("reference"));
    // Not all prompts, so the model itself is not judged.
    assert!(outcome.format_error.is_none() && outcome.judged == ReplaySubject::Kernels);
    assert!(outcome.text("reference").contains("NOT judged"), "{}", outcome.text("reference"));
    assert_eq!(serde_json::to_value(&outcome).unwrap()["judged"], "kernels");
}

/// A copy of a case with one field of its configuration changed.
fn misread(case: &str, field: &str, value: serde_json::Value, folder: &Path) -> PathBuf {
    let copy = folder.join(format!("{case}-{field}"));
    std::fs::create_dir(&copy).unwrap();
    for file in std::fs::read_dir(directory(case)).unwrap().map(|file| file.unwrap().path()) {
        std::fs::copy(&file, copy.join(file.file_name().unwrap())).unwrap();
    }
    let path = copy.join("config.json");
    let mut config: serde_json::Value = serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap();
    assert_ne!(config[field], value, "{case}: {field} is changed");
    config[field] = value;
    std::fs::write(&path, serde_json::to_vec(&config).unwrap()).unwrap();
    copy
}

/// Graph and artifact agree, and both are another model than the reference: 8 bits do not explain it.
#[test]
fn a_model_of_another_configuration_fails() {
    let folder = tempfile::tempdir().unwrap();
    for (case, field, value) in [
        ("qwen2", "rope_theta", 1e4.into()),
        ("nemotron-h-varied", "norm_topk_prob", true.into()),
        ("mamba2-varied", "hidden_act", "relu".into()),
    ] {
        let right = verdict(case, options(case, "q8i8"), folder.path());
        assert!(right.ok, "{case}:\n{}", right.text("reference"));
        let model = misread(case, field, value, folder.path());
        let other = BuildOptions { chunk: Some(CHUNK), ..build_options(&model) };
        for quant in ["f32", "q8i8"] {
            let options = BuildOptions { quant: scheme(quant), quant_name: quant.into(), ..other.clone() };
            let wrong = verdict(case, options, folder.path());
            println!("{case} with another {field} in {quant}:\n{}", wrong.text("reference"));
            assert!(
                !wrong.ok && wrong.judged == ReplaySubject::Model,
                "{case} with another {field} in {quant}"
            );
            assert!(wrong.kernels.as_ref().is_none_or(|kernels| kernels.ok), "its kernels are right");
        }
    }
}
