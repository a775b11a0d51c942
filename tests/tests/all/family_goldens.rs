//! The definitions of transformers in the graph interpreter against reference implementations: one prefill,
//! prefill in pieces and token by token give the reference's logits, at all positions, and greedy decoding
//! its tokens.
//!
//! Cases are in `goldens/`, or in a folder of reference cases beside the project; one that is in neither is
//! skipped.

use mlcc_interp::graph::{Interpreter, StateValues, Tensor, param_value};
use mlcc_ir::dim::{Dim, SizeSymbol, SymValues};
use mlcc_ir::graph_builder::GraphBuilder;
use mlcc_ir::module::Module;
use mlcc_ir::sequences::RowBatching;
use mlcc_ir::verify::verify_module;
use mlcc_models::golden::{GoldenFile, GoldenPrompt};
use mlcc_models::resolve::{ModelRequest, resolve};
use mlcc_models::{Checkpoint, ConfigError, EntrySpec, LogitScope, ModelError};
use std::path::{Path, PathBuf};

/// Permitted error relative to the largest logit. Measured are up to 2e-6.
const TOLERANCE: f32 = 1e-5;

/// The folder of a case, if it is there.
fn find(case: &str) -> Option<PathBuf> {
    let tests = Path::new(env!("CARGO_MANIFEST_DIR"));
    let places = ["goldens", "../../shared/goldens", "../../shared/models"];
    places.iter().map(|place| tests.join(place).join(case)).find(|dir| dir.join("golden.json").exists())
}

struct FamilyCase {
    module: Module,
    checkpoint: Checkpoint,
    golden: GoldenFile,
}

impl FamilyCase {
    /// The golden of `dir`, and its model, or the same in the file `model`.
    fn load(dir: &Path, model: Option<&Path>) -> FamilyCase {
        let path = model.unwrap_or(dir).to_str().unwrap();
        let resolved = resolve(&ModelRequest::new(path)).unwrap_or_else(|e| panic!("{e}"));
        let checkpoint = resolved.open_weights().unwrap_or_else(|e| panic!("{e}"));
        let golden = GoldenFile::read(&dir.join("golden.json")).unwrap();
        let architecture = &resolved.config.architecture;
        let mut b = GraphBuilder::new("case");
        let entries = [
            ("prefill", Dim::sym(SizeSymbol::N), LogitScope::Last),
            ("decode", Dim::from(1), LogitScope::Last),
            ("prefill_logits", Dim::sym(SizeSymbol::N), LogitScope::All),
        ];
        for (name, n, logits) in entries {
            let context = architecture.context_length().min(128);
            architecture.build(
                &mut b,
                &EntrySpec {
                    name,
                    n,
                    logits,
                    context,
                    streaming: None,
                    batching: RowBatching::Single,
                    pooling_head: None,
                    adapters: None,
                    is_encoder_input: false,
                },
            );
        }
        let module = b.finish().unwrap_or_else(|e| panic!("{e}"));
        verify_module(&module).unwrap_or_else(|e| panic!("{e}"));
        FamilyCase { module, checkpoint, golden }
    }
}

/// A sequence in the interpreter.
struct InterpretedSequence<'i, 'm> {
    interpreter: &'i Interpreter<'m>,
    states: StateValues,
    past: usize,
}

impl<'i, 'm> InterpretedSequence<'i, 'm> {
    fn new(interpreter: &'i Interpreter<'m>, module: &Module) -> Self {
        InterpretedSequence { interpreter, states: StateValues::new(module).unwrap(), past: 0 }
    }

    fn run(&mut self, entry: &str, ids: &[u32]) -> Vec<f32> {
        let ids: Vec<i32> = ids.iter().map(|&i| i as i32).collect();
        let syms = SymValues { past: self.past as i64, ..SymValues::for_tokens(ids.len() as i64) };
        self.past += ids.len();
        let run = self.interpreter.run_named(entry, &[Tensor::ids(&ids)], &mut self.states, syms);
        run.unwrap_or_else(|e| panic!("{entry}: {e}"))[0].to_f32()
    }

    /// Logits after feeding tokens in pieces of this length.
    fn prefill(&mut self, ids: &[u32], piece: usize) -> Vec<f32> {
        let mut logits = Vec::new();
        for ids in ids.chunks(piece) {
            logits = self.run(if ids.len() == 1 { "decode" } else { "prefill" }, ids);
        }
        logits
    }
}

fn scale(prompt: &GoldenPrompt) -> f32 {
    prompt.logits_last.iter().fold(0f32, |m, x| m.max(x.abs()))
}

fn assert_close(what: &str, prompt: &GoldenPrompt, found: &[f32]) -> f32 {
    assert_eq!(prompt.logits_last.len(), found.len(), "{what}");
    let errors = prompt.logits_last.iter().zip(found).map(|(a, b)| (a - b).abs());
    let worst = errors.fold(0f32, |m, e| if e.is_nan() { f32::INFINITY } else { m.max(e) }) / scale(prompt);
    assert!(worst <= TOLERANCE, "{what}: off by {worst:e} of the largest logit");
    worst
}

/// Mean and deviation of the logits at every position.
fn assert_positions(what: &str, prompt: &GoldenPrompt, found: &[f32]) {
    let Some(checks) = &prompt.logits_checksum_all_positions else { return };
    let vocab = prompt.logits_last.len();
    assert_eq!(found.len(), vocab * prompt.input_ids.len(), "{what}");
    let tolerance = f64::from(TOLERANCE * scale(prompt));
    for (i, row) in found.chunks(vocab).enumerate() {
        let mean = row.iter().map(|&x| f64::from(x)).sum::<f64>() / vocab as f64;
        let variance = row.iter().map(|&x| (f64::from(x) - mean).powi(2)).sum::<f64>() / vocab as f64;
        let off = (mean - checks.mean[i]).abs().max((variance.sqrt() - checks.std[i]).abs());
        assert!(off <= tolerance, "{what}: checksums at position {i} are off by {off:e}");
    }
}

fn argmax(logits: &[f32]) -> u32 {
    let best = logits.iter().enumerate().rev().max_by(|a, b| a.1.total_cmp(b.1));
    best.map_or(0, |(i, _)| i as u32)
}

/// The ways in which the prompts of a case may be computed.
#[derive(Clone, Copy, PartialEq)]
enum PrefillMode {
    Any,
    /// In one piece: every token sees the whole prompt, or is rotated by angles that depend on its length.
    WholePrompts,
}

fn check(case: &str, feeding: PrefillMode, prompts: usize, steps: usize) {
    check_model(case, None, feeding, prompts, steps);
}

fn check_model(case: &str, model: Option<&Path>, feeding: PrefillMode, prompts: usize, steps: usize) {
    let Some(dir) = find(case) else {
        println!("skipped: the reference case {case} is not there");
        return;
    };
    let FamilyCase { module, checkpoint, golden } = &FamilyCase::load(&dir, model);
    let tensor = |name: &str| {
        let data = checkpoint.read(name).ok()?;
        Some(Tensor::f32(data.shape(), &data.to_f32().ok()?))
    };
    let interpreter = Interpreter::new(module, |id| param_value(&module.params[id], &tensor).unwrap());
    let start = || InterpretedSequence::new(&interpreter, module);
    let mut worst = 0f32;
    for (i, prompt) in golden.prompts.iter().enumerate().take(prompts) {
        let ids = &prompt.input_ids;
        let what = |how: &str| format!("{case}, prompt {i} of {} tokens {how}", ids.len());
        assert_positions(&what("at once"), prompt, &start().run("prefill_logits", ids));
        let mut sequence = start();
        let mut logits = sequence.prefill(ids, ids.len());
        worst = worst.max(assert_close(&what("at once"), prompt, &logits));
        if feeding == PrefillMode::Any {
            worst = worst.max(assert_close(&what("in pieces of 5"), prompt, &start().prefill(ids, 5)));
            sequence = start();
            logits = sequence.prefill(ids, 1);
            worst = worst.max(assert_close(&what("one by one"), prompt, &logits));
        }
        for (step, &want) in prompt.greedy.iter().take(steps).enumerate() {
            assert_eq!(argmax(&logits), want, "{} greedy token {step}", what("then"));
            logits = sequence.prefill(&[want], 1);
        }
    }
    println!("{case}: off by at most {worst:.1e}");
}

macro_rules! cases {
    ($($test:ident: $case:literal,)*) => {
        $(#[test]
        fn $test() {
            check($case, PrefillMode::Any, usize::MAX, 32);
        })*
    };
}

include!("../../goldens/families.rs");

/// Beyond the length that the models were trained with, reached by a prompt and by decoding.
#[test]
fn rope_scaled_by_length() {
    check("llama-dynamic", PrefillMode::WholePrompts, usize::MAX, 16);
    check("phi3-longrope", PrefillMode::WholePrompts, usize::MAX, 16);
}

#[test]
fn chatglm() {
    check("chatglm-6b-tiny", PrefillMode::WholePrompts, usize::MAX, 32);
}

#[test]
fn trained_checkpoint() {
    check("llama-tiny-books", PrefillMode::Any, 1, 4);
}

/// Files of llama.cpp's format give the logits of the checkpoints that they were made from.
#[test]
fn gguf_files() {
    let cases = ["qwen2", "mistral-swa", "gemma", "stablelm-head-norms", "internlm2", "rwkv6-hf"];
    cases.into_iter().chain(["gpt-oss-mxfp4", "lfm2", "mamba2"]).for_each(check_gguf);
}

/// The same where the converter took projections apart, changed the order of heads or put multipliers into
/// the weights.
#[test]
fn gguf_files_of_hybrids_and_of_latent_attention() {
    let hybrids = ["qwen3.5-moe", "qwen3-next", "granite4-hybrid", "falcon-h1", "nemotron-h", "mamba"];
    let others = ["gemma4-e", "gemma4-moe", "deepseek-v3", "mistral4", "exaone4", "kimi-linear"];
    hybrids.into_iter().chain(others).for_each(check_gguf);
}

fn check_gguf(case: &str) {
    let data = Path::new(env!("CARGO_MANIFEST_DIR")).join("../models/tests/data");
    check_model(case, Some(&data.join(format!("{case}.gguf"))), PrefillMode::Any, usize::MAX, 4);
}

/// The same for all files of a folder (`tools/gguf_cases.py GOLDENS --all DIR`, then `MLCC_GGUF=DIR`).
#[test]
fn gguf_files_of_every_architecture() {
    let Some(folder) = std::env::var_os("MLCC_GGUF") else {
        println!("skipped: MLCC_GGUF names no folder of files made by tools/gguf_cases.py --all");
        return;
    };
    for entry in std::fs::read_dir(folder).unwrap() {
        let file = entry.unwrap().path();
        match resolve(&ModelRequest::new(file.to_str().unwrap())) {
            Err(ModelError::Config(ConfigError::UnknownModelType { found, .. })) => {
                println!("no {found} yet")
            }
            _ => check_model(
                file.file_stem().unwrap().to_str().unwrap(),
                Some(&file),
                PrefillMode::Any,
                usize::MAX,
                4,
            ),
        }
    }
}
