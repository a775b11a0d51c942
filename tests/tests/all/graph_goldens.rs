//! Model definitions in the graph interpreter against reference implementations: one prefill, prefill in
//! pieces and token by token give the reference's logits, and greedy decoding its tokens.

use mlcc_interp::graph::{Interpreter, StateValues, Tensor, param_value};
use mlcc_ir::dim::{Dim, SizeSymbol, SymValues};
use mlcc_ir::graph_builder::GraphBuilder;
use mlcc_ir::module::Module;
use mlcc_ir::sequences::RowBatching;
use mlcc_ir::verify::verify_module;
use mlcc_models::golden::{GoldenFile, GoldenPrompt};
use mlcc_models::resolve::{ModelRequest, resolve};
use mlcc_models::{Checkpoint, EntrySpec, LogitScope};
use std::path::Path;

struct GraphCase {
    module: Module,
    checkpoint: Checkpoint,
    golden: GoldenFile,
}

fn load(directory: &str) -> GraphCase {
    let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join(directory);
    let resolved = resolve(&ModelRequest::new(dir.to_str().unwrap())).unwrap();
    let checkpoint = resolved.open_weights().unwrap();
    let golden = GoldenFile::read(&dir.join("golden.json")).unwrap();
    let mut b = GraphBuilder::new("model");
    let architecture = &resolved.config.architecture;
    for (name, n) in [("prefill", Dim::sym(SizeSymbol::N)), ("decode", Dim::from(1))] {
        let context = architecture.default_context();
        architecture.build(
            &mut b,
            &EntrySpec {
                name,
                n,
                logits: LogitScope::Last,
                context,
                streaming: None,
                batching: RowBatching::Single,
                pooling_head: None,
                adapters: None,
                is_encoder_input: false,
            },
        );
    }
    let module = b.finish().unwrap();
    verify_module(&module).unwrap();
    GraphCase { module, checkpoint, golden }
}

impl GraphCase {
    fn interpreter(&self) -> Interpreter<'_> {
        let tensor = |name: &str| {
            let data = self.checkpoint.read(name).ok()?;
            Some(Tensor::f32(data.shape(), &data.to_f32().ok()?))
        };
        Interpreter::new(&self.module, move |id| param_value(&self.module.params[id], &tensor).unwrap())
    }
}

/// Logits after feeding tokens in pieces of these lengths (the last piece takes the rest).
fn prefill_ids(interpreter: &Interpreter, states: &mut StateValues, ids: &[u32], piece: usize) -> Vec<f32> {
    let mut logits = Vec::new();
    for ids in ids.chunks(piece) {
        let ids: Vec<i32> = ids.iter().map(|&i| i as i32).collect();
        let syms = SymValues::for_tokens(ids.len() as i64);
        let entry = if ids.len() == 1 { "decode" } else { "prefill" };
        logits = interpreter.run_named(entry, &[Tensor::ids(&ids)], states, syms).unwrap()[0].to_f32();
    }
    logits
}

fn assert_close(what: &str, prompt: &GoldenPrompt, found: &[f32]) {
    let scale = prompt.logits_last.iter().fold(0f32, |m, x| m.max(x.abs()));
    assert_eq!(prompt.logits_last.len(), found.len(), "{what}");
    let errors = prompt.logits_last.iter().zip(found).map(|(a, b)| (a - b).abs());
    let worst = errors.fold(0f32, f32::max) / scale;
    assert!(worst <= 1e-5, "{what}: off by {worst} of the largest logit");
}

fn argmax(logits: &[f32]) -> u32 {
    let best = logits.iter().enumerate().max_by(|a, b| a.1.total_cmp(b.1));
    best.map_or(0, |(i, _)| i as u32)
}

fn check(directory: &str, prompts: usize, steps: usize) {
    let case = load(directory);
    let interpreter = case.interpreter();
    for (i, prompt) in case.golden.prompts.iter().enumerate().take(prompts) {
        let ids = &prompt.input_ids;
        let start = || StateValues::new(&case.module).unwrap();
        for piece in [ids.len(), 3] {
            let logits = prefill_ids(&interpreter, &mut start(), ids, piece);
            assert_close(&format!("{directory}, prompt {i} in pieces of {piece}"), prompt, &logits);
        }
        let mut states = start();
        let mut logits = prefill_ids(&interpreter, &mut states, ids, 1);
        assert_close(&format!("{directory}, prompt {i} token by token"), prompt, &logits);
        for (step, &want) in prompt.greedy.iter().take(steps).enumerate() {
            let token = argmax(&logits);
            assert_eq!(token, want, "{directory}, prompt {i}, greedy token {step}");
            logits = prefill_ids(&interpreter, &mut states, &[token], 1);
        }
    }
}

#[test]
fn transformers_with_rescaling() {
    check("goldens/rwkv4-hf", usize::MAX, 32);
}

#[test]
fn transformers_with_odd_sizes() {
    check("goldens/rwkv4-hf-odd", usize::MAX, 32);
}

#[test]
fn rwkv_package() {
    check("goldens/rwkv4-pth", usize::MAX, 32);
}

#[test]
fn rwkv5_with_matrix_states() {
    check("goldens/rwkv5-hf", usize::MAX, 32);
}

#[test]
fn rwkv6_with_states_that_decay_by_token() {
    check("goldens/rwkv6-hf", usize::MAX, 32);
}

#[test]
fn rwkv7_with_the_delta_rule() {
    check("goldens/rwkv7-hf", usize::MAX, 32);
}

#[test]
fn trained_checkpoint() {
    check("../assets/rwkv4-tiny-books", 1, 4);
}
