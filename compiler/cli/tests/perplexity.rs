//! The trained checkpoint on its held-out text, in every weight format, against the reference's perplexity.
//!
//! The text is no part of the project: it is looked for in `$MLCC_SHARED`, or in a folder `shared` beside the checkout.

mod cases;

use std::path::{Path, PathBuf};

use mlcc::build::BuildOptions;
use mlcc_engine::eval::{Protocol, Windows, perplexity};
use mlcc_engine::{TokenId, TokenizerFile};
use mlcc_passes::scheme::SCHEMES;
use mlcc_runtime::{LoadOptions, Model};
use serde_json::Value;

/// The first windows of the text; the reference gives each window's own mean. `MLCC_ALL_WINDOWS=1` takes all of them.
const WINDOWS: usize = 12;

const MODEL: &str = "rwkv4-tiny-books";

fn text() -> Option<String> {
    let shared = match std::env::var_os("MLCC_SHARED") {
        Some(folder) => PathBuf::from(folder),
        None => cases::workspace().join("../shared"),
    };
    let path = shared.join("models").join(MODEL).join("valid.txt");
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

fn measure(assets: &Path, scheme: &str, tokens: &[TokenId], protocol: Protocol) -> f64 {
    let folder = tempfile::tempdir().unwrap();
    let mut options = BuildOptions::new(assets.to_str().unwrap());
    options.quant = cases::scheme(scheme);
    let (path, _) = cases::artifact(&options, folder.path(), "model.so");
    let model = Model::load(path, &LoadOptions::default()).unwrap();
    let windows = Windows::new(tokens, protocol, model.vocab()).unwrap();
    perplexity(&windows, &mut model.session().unwrap(), |_| {}).unwrap().perplexity()
}

/// Largest relative distance from the reference in f32. What fewer bits cost beyond rounding is a property of the format,
/// so those bounds only catch what is broken; the reference itself finds 1.1 % for 4 bits and 0.02 % for 8.
fn permitted(scheme: &str) -> f64 {
    match scheme {
        "f32" => 0.001,
        "f16" | "q8f16_1" => 0.005,
        "bf16" | "q8i8" => 0.01,
        _ => 0.03,
    }
}

#[test]
fn perplexity_is_that_of_the_reference() {
    let Some(text) = text() else { return };
    let assets = cases::workspace().join("assets").join(MODEL);
    let evaluation: Value =
        serde_json::from_slice(&std::fs::read(assets.join("eval.json")).unwrap()).unwrap();
    let size = |key: &str| evaluation[key].as_u64().expect("a size") as usize;
    let protocol = Protocol { context: size("context_length"), stride: size("stride") };
    let tokenizer = TokenizerFile::read(&assets.join("tokenizer.json")).unwrap().load().unwrap();
    let mut tokens = tokenizer.encode(&text).unwrap();
    assert_eq!(tokens.len(), size("valid_tokens"));

    let all = Windows::new(&tokens, protocol, tokenizer.vocab_size()).unwrap().count();
    let windows = if std::env::var_os("MLCC_ALL_WINDOWS").is_some() { all } else { WINDOWS };
    tokens.truncate((windows - 1) * protocol.stride + protocol.context);
    let expected = reference(&evaluation, windows);
    println!("{windows} of {all} windows, reference {expected:.4}");
    let mut wrong = Vec::new();
    for scheme in SCHEMES {
        let found = measure(&assets, scheme.name, &tokens, protocol);
        let off = found / expected - 1.0;
        println!("{:<8} {found:.4} ({:+.3} %)", scheme.name, 100.0 * off);
        if off.is_nan() || off.abs() > permitted(scheme.name) {
            wrong.push(format!("{}: {found} in place of {expected}", scheme.name));
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("; "));
}

#[test]
fn the_reference_means_belong_to_its_perplexity() {
    let path = cases::workspace().join("assets").join(MODEL).join("eval.json");
    let evaluation: Value = serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap();
    let windows = evaluation["mean_nll_per_window_float32"].as_array().expect("a list").len();
    let whole = number(&evaluation["results"]["float32"]["ppl"]);
    assert!((reference(&evaluation, windows) / whole - 1.0).abs() < 1e-6);
}
