//! `mlcc build --report`: the artifact measured before it gets its name, and the gate `--max-kl`.

use std::path::Path;

use crate::program::{self, artifacts_in, books, case, failure, json, mlcc, text};
use assert_cmd::Command;
use serde_json::Value;

/// English in the manner of the books, about 700 tokens: enough for two windows.
fn prose() -> String {
    let lines = [
        "It was not until the evening that the two sisters were able to speak of what had passed.",
        "The old house stood at the end of the lane, and nobody had lived in it for many years.",
        "He looked at her for a moment without an answer, and then he went to the window.",
        "There was a great noise in the street, and all the people came out to see what it was.",
        "She had always thought that he would come back to the village before the winter.",
        "The captain said that the wind would change, and that they should be ready by the morning.",
        "I have never seen a man so much astonished as my uncle was when he had read the letter.",
        "They sat by the fire, and for a long time no one said a word.",
    ];
    (0..6).flat_map(|_| lines).collect::<Vec<_>>().join(" ")
}

fn build(folder: &Path, quant: &str, more: &[&str]) -> Command {
    let mut build = mlcc();
    build.args(["build", "--quant", quant, "--json", "-m"]).arg(books());
    if cfg!(feature = "cranelift") {
        build.args(["--backend", "cranelift"]);
    }
    build
        .args(["--eval-text"])
        .arg(folder.join("prose.txt"))
        .args(more)
        .arg("-o")
        .arg(folder.join("model.so"));
    build
}

fn folder() -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    std::fs::write(folder.path().join("prose.txt"), prose()).unwrap();
    folder
}

fn number(value: &Value, key: &str) -> f64 {
    value[key].as_f64().unwrap_or_else(|| panic!("{key} in {value}"))
}

#[test]
fn the_report_is_in_the_artifact() {
    let folder = folder();
    let built = json(&mut build(folder.path(), "q4f16_1", &["--max-kl", "1"]));
    let quality = &built["quality"];
    assert_eq!(number(quality, "tokens"), 510.0, "two windows of 256 tokens, of which the first is context");
    let ratio = number(quality, "perplexity") / number(quality, "reference_perplexity");
    assert!((0.9..1.2).contains(&ratio), "{quality}");
    let (mean, max) = (number(quality, "kl_mean"), number(quality, "kl_max"));
    assert!(1e-5 < mean && mean < 0.2 && mean < max, "{quality}");
    assert!((0.5..1.0).contains(&number(quality, "same_top_token")), "{quality}");
    assert!(quality["reference"].as_str().unwrap().contains("stored as f16"), "{quality}");

    let path = folder.path().join("model.so");
    let inspected = json(mlcc().args(["inspect", "--json", "--hashes"]).arg(&path));
    assert_eq!(inspected["metadata"]["report"], *quality);
    let shown = text(mlcc().arg("inspect").arg(&path));
    assert!(shown.contains("KL mean") && shown.contains("same top token"), "{shown}");
    // The measured file is the one that was written.
    let eval = ["--context", "256", "--stride", "256", "--windows", "2", "--json"];
    let evaluated =
        json(mlcc().arg("eval").arg(&path).arg("--text").arg(folder.path().join("prose.txt")).args(eval));
    assert_eq!(number(&evaluated, "perplexity"), number(quality, "perplexity"));
    assert_eq!(artifacts_in(folder.path()), ["model.so"]);
}

#[test]
fn a_format_that_holds_the_checkpoint_is_its_own_reference() {
    let folder = folder();
    let built = json(&mut build(folder.path(), "f16", &["--eval-tokens", "64"]));
    let quality = &built["quality"];
    assert_eq!((number(quality, "kl_mean"), number(quality, "same_top_token")), (0.0, 1.0));
    assert_eq!(number(quality, "tokens"), 63.0);
}

#[test]
fn the_gate_leaves_nothing() {
    let folder = folder();
    let message = failure(&mut build(folder.path(), "q4f16_1", &["--max-kl", "0.000001"]), 1);
    assert!(message.contains("KL divergence") && message.contains("--max-kl permits"), "{message}");
    assert_eq!(artifacts_in(folder.path()), Vec::<String>::new());
}

#[test]
fn what_is_missing_is_named() {
    let folder = folder();
    let message = failure(&mut build(folder.path(), "f16", &["--split-weights"]), 1);
    assert!(message.contains("file of their own"), "{message}");
    let measure = |flags: &[&str]| {
        let mut build = mlcc();
        build.arg("build").arg("-m").arg(program::case("rwkv4-hf")).args(flags);
        failure(build.arg("-o").arg(folder.path().join("model.so")), 1)
    };
    let prose = folder.path().join("prose.txt");
    let prose = prose.to_str().unwrap();
    for (flags, parts) in [
        (&["--eval-text", prose][..], ["--eval-text: the artifact", "name its file with --tokenizer"]),
        (&["--eval-text", prose, "--max-kl", "1"], ["--eval-text and --max-kl: ", "no tokenizer"]),
        (&["--report"], ["--report: ", "there is no text"]),
    ] {
        let message = measure(flags);
        assert!(parts.iter().all(|part| message.contains(part)), "{message}");
    }
    let no_text = ["build", "--report", "-m"];
    let message = failure(mlcc().args(no_text).arg(books()).arg("-o").arg(folder.path().join("model.so")), 1);
    assert!(message.contains("--eval-text"), "{message}");
    std::fs::write(folder.path().join("prose.txt"), [0xff, 0xfe, 0x41]).unwrap();
    let message = failure(&mut build(folder.path(), "f16", &[]), 1);
    assert!(message.contains("not UTF-8"), "{message}");
    assert_eq!(artifacts_in(folder.path()), Vec::<String>::new());
}

/// A text beside the model is enough.
#[test]
fn a_text_beside_the_model_turns_the_report_on() {
    let model = program::copy_of(&books());
    std::fs::write(model.path().join("eval.txt"), prose()).unwrap();
    let path = model.path().join("model.so");
    let run = |more: &[&str]| {
        let mut build = mlcc();
        build.args(["build", "--json", "--quant", "f16", "--eval-tokens", "32", "-m"]).arg(model.path());
        json(build.args(more).arg("-o").arg(&path))
    };
    assert!(run(&[])["quality"].is_object());
    assert!(run(&["--no-report"])["quality"].is_null());
}

/// One line gives the result of a build; its tables are printed on request.
#[test]
fn builds_say_one_line_and_with_verbose_all() {
    let folder = tempfile::tempdir().unwrap();
    let build = |flags: &[&str]| {
        let mut build = mlcc();
        build.arg("build").arg("-m").arg(case("qwen2")).arg("-o").arg(folder.path().join("model.so"));
        String::from_utf8(build.args(flags).assert().success().get_output().stderr.clone()).unwrap()
    };
    let told = build(&[]);
    assert_eq!(told.lines().count(), 1, "{told}");
    for part in
        ["qwen2, ", " parameters, keep (bf16), for ", " kB in ", "--quant q4f16 would take", "no tokenizer"]
    {
        assert!(told.contains(part), "`{part}` is not in: {told}");
    }
    assert_eq!(build(&["-q"]), "");
    let told = build(&["-v"]);
    for part in ["passes ...", "quantize", "function", "decode", "memory: weights", "time: read", "wrote "] {
        assert!(told.contains(part), "`{part}` is not in: {told}");
    }
    // The same for a checkpoint that `run` builds.
    let mut run = mlcc();
    run.env("MLCC_CACHE_DIR", folder.path()).arg("run").arg(books()).args(["-p", "It", "-n", "1"]);
    let told = String::from_utf8(run.assert().success().get_output().stderr.clone()).unwrap();
    let lines: Vec<&str> = told.lines().filter(|line| !line.is_empty()).collect();
    let [first, built, statistics] = lines[..] else { panic!("{told}") };
    assert!(first.contains("built first") && built.starts_with("rwkv4-tiny-books, "), "{told}");
    assert!(statistics.contains("generated: 1 token,"), "{told}");
}
