//! The reference cases and their builds, for the tests of whole models.

use std::path::{Path, PathBuf};
use std::sync::atomic::AtomicBool;

use mlcc_driver::compile::{Backend, BuildHooks, BuildOptions, BuildReport, BuildSource, build};
use mlcc_interp::graph::{Interpreter, StateValues, Tensor, param_value};
use mlcc_ir::dim::SymValues;
use mlcc_ir::module::Module;
use mlcc_models::golden::{GoldenFile, GoldenPrompt};
use mlcc_passes::LoweredProgram;
use mlcc_passes::scheme::QuantScheme;
use mlcc_runtime::{LoadOptions, Model, Session};
use mlcc_target::{Arch, detected_features};

pub mod objects;

/// Each is a checkpoint and what a reference implementation computes from it: rescaled layers, odd sizes, the
/// other file format with the other names.
pub const RWKV4: [&str; 3] = ["rwkv4-hf", "rwkv4-hf-odd", "rwkv4-pth"];

/// RWKV-5 to -7, whose states are matrices: heads of 16, 32 and 64.
pub const MATRIX_STATES: [&str; 3] = ["rwkv5-hf", "rwkv6-hf", "rwkv7-hf"];

/// Makes [`FAMILIES`] of the list that the tests in the interpreter have too.
macro_rules! cases {
    ($($test:ident: $case:literal,)*) => {
        /// Every family by its case, and kinds of rope scaling; last what takes a prompt in one piece only.
        pub const FAMILIES: [&str; [$($case),*].len() + 3] =
            [$($case,)* "chatglm-6b-tiny", "llama-dynamic", "phi3-longrope"];
    };
}

include!("../../../../tests/goldens/families.rs");

/// Hybrids, experts and kinds of heads whose fields have other values than in published models: groups,
/// activations, orders of layers, corrections below zero, ways to store experts (`tools/varied_cases.py`).
pub const VARIED: [&str; 12] = [
    "deepseek-v3-varied",
    "glm4-moe-lite-varied",
    "kimi-linear-varied",
    "qwen3.5-moe-varied",
    "qwen3-next-varied",
    "qwen3-moe-varied",
    "gpt-oss-varied",
    "granite4-varied",
    "nemotron-h-varied",
    "mamba2-varied",
    "olmo-hybrid-varied",
    "gemma4-varied",
];

/// All cases that are part of the project.
pub fn recurrent() -> impl Iterator<Item = &'static str> {
    RWKV4.into_iter().chain(MATRIX_STATES)
}

/// The same weights as [`MATRIX_STATES`] in the other file format with the other names, where the larger set
/// of reference cases is at hand.
pub fn other_namings() -> Vec<&'static str> {
    let cases = ["rwkv5-pth", "rwkv6-pth", "rwkv7-pth"];
    let (found, absent): (Vec<&str>, Vec<&str>) = cases.into_iter().partition(|c| directory(c).is_dir());
    if !absent.is_empty() {
        eprintln!("skipped: no reference cases {absent:?} (set MLCC_SHARED)");
    }
    found
}

/// Smaller than the longest prompt, so that prompts are cut into pieces.
pub const CHUNK: u32 = 8;

pub fn workspace() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..")
}

/// The larger set of reference cases, where it is at hand.
pub fn shared() -> PathBuf {
    std::env::var_os("MLCC_SHARED").map_or_else(|| workspace().join("../shared"), PathBuf::from)
}

pub fn directory(case: &str) -> PathBuf {
    let own = workspace().join("tests/goldens").join(case);
    if own.is_dir() { own } else { shared().join("goldens").join(case) }
}

/// The folder of a reference case; says so where it is in neither set.
pub fn find(case: &str) -> Option<PathBuf> {
    let places = [directory(case), shared().join("models").join(case)];
    let dir = places.into_iter().find(|dir| dir.join("golden.json").exists());
    if dir.is_none() {
        println!("skipped: the reference case {case} is not there (set MLCC_SHARED)");
    }
    dir
}

pub fn golden(case: &str) -> GoldenFile {
    GoldenFile::read(&directory(case).join("golden.json")).unwrap()
}

pub fn ids(prompt: &GoldenPrompt) -> Vec<i32> {
    prompt.input_ids.iter().map(|&id| id as i32).collect()
}

pub fn scheme(name: &str) -> QuantScheme {
    QuantScheme::from_name(name).unwrap().0
}

/// Options of a build of a checkpoint for this machine. Builds share their objects: most tests need the same
/// kernels.
pub fn build_options(checkpoint: &Path) -> BuildOptions {
    BuildOptions { cache: Some(objects::cache()), ..BuildOptions::new(checkpoint.to_str().unwrap()) }
}

/// Options of a build of a reference case for this machine.
pub fn options(case: &str, quant: &str) -> BuildOptions {
    let mut options = build_options(&directory(case));
    options.quant = scheme(quant);
    options.quant_name = quant.into();
    options.chunk = Some(CHUNK);
    options
}

pub fn backends() -> impl Iterator<Item = Backend> {
    [Backend::Llvm, Backend::Cranelift].into_iter().filter(|b| b.is_built_in())
}

/// Every level of this CPU that can be compiled for, the weakest first. None on a machine that has no spec.
pub fn host_levels() -> Vec<String> {
    let have = detected_features();
    let specs = mlcc_target::specs().unwrap();
    let levels = specs.iter().filter(|s| Arch::of_host() == Some(s.arch)).flat_map(|s| &s.levels);
    let fits = levels.filter(|l| l.features.iter().all(|f| have.contains(&f.as_str())));
    fits.map(|l| l.name.clone()).collect()
}

/// Opens an artifact at this CPU level, or the best one, for `threads` workers.
pub fn load(path: &Path, level: Option<&str>, threads: usize) -> Model {
    let options = LoadOptions {
        threads: Some(threads),
        cpu_level: level.map(String::from),
        verify_hashes: true,
        ..LoadOptions::default()
    };
    Model::load(path, &options).unwrap_or_else(|e| panic!("{e}"))
}

/// Logits after the prompt, computed from the start in calls of `piece` tokens.
pub fn feed(session: &mut Session, ids: &[i32], piece: usize) -> Vec<f32> {
    session.reset().unwrap();
    for ids in ids.chunks(piece) {
        match ids {
            [id] => session.decode(*id).unwrap(),
            ids => session.prefill(ids).unwrap(),
        };
    }
    session.logits().to_vec()
}

/// The first of the largest.
pub fn argmax(logits: &[f32]) -> u32 {
    let best = logits.iter().enumerate().rev().max_by(|a, b| a.1.total_cmp(b.1));
    best.map_or(0, |(i, _)| i as u32)
}

/// Builds the artifact `name` in `folder`.
pub fn artifact(options: &BuildOptions, folder: &Path, name: &str) -> (PathBuf, BuildReport) {
    let path = folder.join(name);
    let options = BuildOptions { output: Some(path.clone()), ..options.clone() };
    let report = build(&options, &mut BuildHooks { event: &mut |_| {}, cancel: &AtomicBool::new(false) });
    (path, report.unwrap_or_else(|e| panic!("{}: {e}", options.request.model)))
}

/// The program after `stop_after`, or after all passes.
pub fn program(options: &BuildOptions, stop_after: Option<&str>) -> (LoweredProgram, BuildSource) {
    let options = BuildOptions { stop_after: stop_after.map(String::from), ..options.clone() };
    let source = BuildSource::open(&options).unwrap();
    let target = mlcc_target::resolve_target(&options.target).unwrap();
    let cancel = AtomicBool::new(false);
    let mut hooks = BuildHooks { event: &mut |_| {}, cancel: &cancel };
    let (program, _) =
        mlcc_driver::compile::compile(&source, &target, &options, &mut BuildReport::default(), &mut hooks)
            .unwrap();
    (program, source)
}

/// The last pass that leaves operations on tensors, and that cannot be switched off.
pub const LAST_GRAPH_PASS: &str = "decompose";

/// Logits after each of the prompts by the graph interpreter, from the values of the stored weights: the
/// truth for compiled code of the same scheme, free of the error of quantization itself.
pub fn interpreted(module: &Module, source: &BuildSource, prompts: &[Vec<i32>]) -> Vec<Vec<f32>> {
    let tensor = |name: &str| {
        let data = source.checkpoint.read(name).ok()?;
        Some(Tensor::f32(data.shape(), &data.to_f32().ok()?))
    };
    let interpreter = Interpreter::new(module, |id| param_value(&module.params[id], &tensor).unwrap());
    let run = |ids: &Vec<i32>| {
        let mut states = StateValues::new(module).unwrap();
        let sizes = SymValues::for_tokens(ids.len() as i64);
        interpreter.run_named("prefill", &[Tensor::ids(ids)], &mut states, sizes).unwrap()[0].to_f32()
    };
    prompts.iter().map(run).collect()
}

/// The largest distance, relative to the largest expected magnitude. NaN is infinitely wrong.
pub fn distance(expected: &[f32], found: &[f32]) -> f32 {
    assert_eq!(expected.len(), found.len());
    let scale = expected.iter().fold(0f32, |m, x| m.max(x.abs()));
    let off = expected.iter().zip(found).map(|(a, b)| (a - b).abs());
    off.fold(0f32, |m, d| if d.is_nan() { f32::INFINITY } else { m.max(d) }) / scale
}

#[track_caller]
pub fn assert_close(what: &str, expected: &[f32], found: &[f32], tolerance: f32) {
    let off = distance(expected, found);
    assert!(off <= tolerance, "{what}: off by {off:e} of the largest logit, permitted are {tolerance:e}");
}
