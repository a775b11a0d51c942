//! The trained checkpoints on their held-out text, in every weight format, against the reference's
//! perplexity.
//!
//! The texts, and one of the checkpoints, are no part of the project: they are looked for in `$MLCC_SHARED`,
//! or in a folder `shared` beside the checkout.

use crate::cases;
use std::path::{Path, PathBuf};

use mlcc_engine::LocalMachine;
use mlcc_engine::eval::{EvalProtocol, EvalWindows, perplexity};
use mlcc_ir::types::DType;
use mlcc_passes::scheme::{ActivationType, QuantScheme, SCHEMES};
use mlcc_runtime::{LoadOptions, Model};
use mlcc_text::{TokenId, TokenizerFile};
use serde_json::Value;

/// Checkpoints, and how many windows of the text are measured (the reference gives each window's own mean).
/// `MLCC_ALL_WINDOWS=1` takes all of them.
const MODELS: [(&str, usize); 2] = [("rwkv4-tiny-books", 12), ("llama-tiny-books", 6)];

fn shared(model: &str) -> PathBuf {
    cases::shared().join("models").join(model)
}

/// The path of the checkpoint: in the project, or in the shared folder.
fn checkpoint(model: &str) -> PathBuf {
    let own = cases::workspace().join("assets").join(model);
    if own.is_dir() { own } else { shared(model) }
}

fn text(model: &str) -> Option<String> {
    let path = shared(model).join("valid.txt");
    match std::fs::read_to_string(&path) {
        Ok(text) => Some(text),
        Err(e) => {
            println!("skipped: {}: {e}; name the shared folder in MLCC_SHARED", path.display());
            None
        }
    }
}

fn number(value: &Value) -> f64 {
    value.as_f64().expect("a number")
}

/// Perplexity of the first windows as the reference has it. Every window scores as many tokens as the others.
fn reference(evaluation: &Value, windows: usize) -> f64 {
    let means = evaluation["mean_nll_per_window_float32"].as_array().expect("one mean per window");
    (means[..windows].iter().map(number).sum::<f64>() / windows as f64).exp()
}

fn measure(assets: &Path, scheme: &str, tokens: &[TokenId], protocol: EvalProtocol) -> f64 {
    let folder = tempfile::tempdir().unwrap();
    let mut options = cases::build_options(assets);
    options.quant = cases::scheme(scheme);
    let (path, _) = cases::artifact(&options, folder.path(), "model.so");
    let model = Model::load(path, &LoadOptions::default()).unwrap();
    let windows = EvalWindows::new(tokens, protocol, model.vocab()).unwrap();
    perplexity(&windows, &mut model.session().unwrap(), |_| {}).unwrap().perplexity()
}

/// Largest relative distance from the reference in f32. The cost of fewer bits beyond rounding is a property
/// of the format, so those bounds only catch broken kernels; the reference itself finds 1.1 % for 4 bits and
/// 0.02 % for 8.
fn permitted(scheme: &QuantScheme) -> f64 {
    match scheme.linear {
        DType::F32 => 0.001,
        DType::F16 => 0.005,
        DType::Packed(format) => match format.bits {
            8 if scheme.activation == ActivationType::F32 => 0.005,
            8 => 0.01,
            4 => 0.03,
            _ => 0.3,
        },
        _ => 0.01,
    }
}

fn check(model: &str, windows: usize) {
    let Some(text) = text(model) else { return };
    let folder = checkpoint(model);
    let evaluation: Value =
        serde_json::from_slice(&std::fs::read(folder.join("eval.json")).unwrap()).unwrap();
    let size = |key: &str| evaluation[key].as_u64().expect("a size") as usize;
    let protocol = EvalProtocol { context: size("context_length"), stride: size("stride") };
    let tokenizer =
        TokenizerFile::read(&folder.join("tokenizer.json"), &LocalMachine).unwrap().load().unwrap();
    let mut tokens = tokenizer.encode(&text).unwrap();
    assert_eq!(tokens.len(), size("valid_tokens"));

    let all = EvalWindows::new(&tokens, protocol, tokenizer.vocab_size()).unwrap().count();
    let windows = if std::env::var_os("MLCC_ALL_WINDOWS").is_some() { all } else { windows };
    tokens.truncate((windows - 1) * protocol.stride + protocol.context);
    let expected = reference(&evaluation, windows);
    println!("{model}: {windows} of {all} windows, reference {expected:.4}");
    let mut wrong = Vec::new();
    for scheme in SCHEMES {
        let found = measure(&folder, scheme.name, &tokens, protocol);
        let off = found / expected - 1.0;
        println!("{:<16} {found:.4} ({:+.3} %)", scheme.name, 100.0 * off);
        if off.is_nan() || off.abs() > permitted(scheme) {
            wrong.push(format!("{model} in {}: {found} in place of {expected}", scheme.name));
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("; "));
}

#[test]
fn perplexity_of_rwkv_is_that_of_the_reference() {
    check(MODELS[0].0, MODELS[0].1);
}

#[test]
fn perplexity_of_llama_is_that_of_the_reference() {
    check(MODELS[1].0, MODELS[1].1);
}

#[test]
fn the_reference_means_belong_to_its_perplexity() {
    for (model, _) in MODELS {
        let Ok(json) = std::fs::read(checkpoint(model).join("eval.json")) else {
            println!("skipped: {model} is not there");
            continue;
        };
        let evaluation: Value = serde_json::from_slice(&json).unwrap();
        let windows = evaluation["mean_nll_per_window_float32"].as_array().expect("a list").len();
        let whole = number(&evaluation["results"]["float32"]["ppl"]);
        assert!((reference(&evaluation, windows) / whole - 1.0).abs() < 1e-6, "{model}");
    }
}
