//! Sessions over the caches of compiled transformers: memory on demand, going back, windows beyond the
//! context, chats. The models are reference cases; the one with a tokenizer is not part of the project.

use std::path::{Path, PathBuf};

use crate::program::{case, failure, json, mlcc, text, workspace};
use mlcc_driver::compile::{BuildOptions, BuildSource};
use mlcc_driver::interpret::GraphModel;
use mlcc_engine::LanguageModel;
use mlcc_runtime::{LoadOptions, Model};

/// A reference case, of the project or else of the folder of reference files; `None`, with a printed reason,
/// where it is absent.
fn reference_case(name: &str) -> Option<PathBuf> {
    let own = case(name);
    if own.exists() {
        return Some(own);
    }
    let folder = std::env::var_os("MLCC_SHARED").map_or_else(|| workspace().join("../shared"), PathBuf::from);
    let path = folder.join("goldens").join(name);
    if !path.exists() {
        eprintln!("skipped: {} is absent (set MLCC_SHARED to the folder of reference files)", path.display());
        return None;
    }
    Some(path)
}

/// Builds with a context of `context` tokens, in f32: the references are computed in that.
fn build(model: &Path, folder: &Path, context: &str) -> PathBuf {
    build_with(model, folder, context, &[])
}

fn build_with(model: &Path, folder: &Path, context: &str, flags: &[&str]) -> PathBuf {
    let out = folder.join(format!("{context}{}.so", flags.concat()));
    let mut build = mlcc();
    let chunk = if flags.contains(&"--chunk") { &[][..] } else { &["--chunk", "8"] };
    build.arg("build").arg("-m").arg(model).args(["--quant", "f32", "-c", context]).args(chunk).args(flags);
    build.arg("-o").arg(&out);
    build.assert().success();
    out
}

fn load(path: &Path) -> Model {
    Model::load(path, &LoadOptions { threads: Some(2), ..LoadOptions::default() }).unwrap()
}

/// Logits after a prompt by the graph of the model definition, in one piece.
fn interpreted(model: &Path, prompt: &[i32]) -> Vec<f32> {
    let source = BuildSource::open(&BuildOptions::new(model.to_str().unwrap())).unwrap();
    let architecture = &source.model.config.architecture;
    let module = mlcc_driver::model::build_module("model", architecture, source.context, 1).unwrap();
    let mut graph = GraphModel::new(&module, &source.checkpoint, architecture).unwrap();
    graph.prefill(prompt).unwrap().to_vec()
}

fn tokens(count: i32) -> Vec<i32> {
    (0..count).map(|i| 3 + (i * i + i / 5) % 300).collect()
}

fn distance(a: &[f32], b: &[f32]) -> f32 {
    a.iter().zip(b).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max)
}

#[test]
fn long_contexts_cost_what_is_used() {
    let Some(model) = reference_case("qwen2") else { return };
    let folder = tempfile::tempdir().unwrap();
    // The configuration, for a longer training than this tiny model had.
    let copy = folder.path().join("model");
    std::fs::create_dir(&copy).unwrap();
    std::fs::copy(model.join("model.safetensors"), copy.join("model.safetensors")).unwrap();
    let mut config: serde_json::Value =
        serde_json::from_slice(&std::fs::read(model.join("config.json")).unwrap()).unwrap();
    config["max_position_embeddings"] = 131072.into();
    std::fs::write(copy.join("config.json"), config.to_string()).unwrap();

    let path = build(&copy, folder.path(), "131072");
    let info = json(mlcc().arg("inspect").arg(&path).arg("--json"));
    let cache = &info["metadata"]["memory"]["cache"];
    let per_token = cache["bytes_per_token"].as_u64().unwrap();
    assert!(per_token > 0 && cache["rows"] == 131072, "{cache}");
    assert!(text(mlcc().arg("inspect").arg(&path)).contains(" a token in f"));
    let loaded = load(&path);
    let mut session = loaded.session().unwrap();
    let memory = session.memory();
    assert!(memory.planned_state >= 131072 * per_token && memory.state == 0, "{memory:?}");
    assert!(memory.scratch < 64 << 20, "nothing else grows with the context: {memory:?}");
    session.prefill(&tokens(200)).unwrap();
    assert_eq!(session.memory().state, 256 * per_token);
    session.reset().unwrap();

    let mut refused = mlcc();
    refused.arg("build").arg("-m").arg(&copy).args(["-c", "131072", "--memory-budget", "1MB", "-o"]);
    let message = failure(refused.arg(folder.path().join("no.so")), 1);
    assert!(message.contains("--ctx-size"), "{message}");
    assert!(!folder.path().join("no.so").exists());
}

#[test]
fn sessions_go_back_and_on_otherwise() {
    let Some(model) = reference_case("qwen2") else { return };
    let folder = tempfile::tempdir().unwrap();
    let mut costs = Vec::new();
    for cache in ["f32", "f16", "i8"] {
        let loaded = load(&build_with(&model, folder.path(), "100", &["--kv-cache", cache]));
        let first = tokens(60);
        let mut other = first.clone();
        other[32..].reverse();
        let (mut fresh, mut session) = (loaded.session().unwrap(), loaded.session().unwrap());
        let expected = fresh.prefill(&other).unwrap();
        session.prefill(&first).unwrap();
        let mut fork = session.fork().unwrap();
        // At the end of a chunk, so that the same pieces are computed: int8 codes would show another
        // rounding.
        session.truncate(32).unwrap();
        assert!(distance(session.prefill(&other[32..]).unwrap(), expected) < 1e-4, "{cache}");
        fork.truncate(20).unwrap();
        for &token in &other[20..] {
            fork.decode(token).unwrap();
        }
        let largest = expected.iter().fold(0.0f32, |m, x| m.max(x.abs()));
        let tolerance = if cache == "i8" { 2e-2 * largest } else { 2e-3 * largest };
        assert!(distance(fork.logits(), expected) < tolerance, "{cache}");
        let error = session.prefill(&tokens(41)).unwrap_err().to_string();
        assert!(error.contains("60 tokens seen, 41 more given") && error.contains("--ctx-size"), "{error}");
        assert_eq!(session.past(), 60);
        costs.push(session.memory().bytes_per_token);
    }
    assert_eq!(costs[0], 2 * costs[1]);
    assert!(costs[2] > costs[0] / 4 && costs[2] < costs[1], "codes and scales: {costs:?}");
}

/// Mistral's window of 16 tokens: a cache of 40 rows goes on for ever, and gives what a large one gives.
#[test]
fn windows_go_on_beyond_the_context() {
    let Some(model) = reference_case("mistral-swa") else { return };
    let folder = tempfile::tempdir().unwrap();
    let (small, large) =
        (load(&build(&model, folder.path(), "40")), load(&build(&model, folder.path(), "250")));
    assert_eq!(small.session().unwrap().window(), Some(16));
    let tokens = tokens(200);
    let (mut session, mut expected) = (small.session().unwrap(), large.session().unwrap());
    session.prefill(&tokens[..90]).unwrap();
    expected.prefill(&tokens[..90]).unwrap();
    assert!(distance(session.logits(), expected.logits()) < 1e-4);
    for &token in &tokens[90..] {
        session.decode(token).unwrap();
        expected.decode(token).unwrap();
        assert!(distance(session.logits(), expected.logits()) < 1e-4, "after {} tokens", session.past());
    }
    assert_eq!(
        (session.past(), session.memory().planned_state < expected.memory().planned_state),
        (200, true)
    );
}

/// A window of 16 tokens with 4 sinks on a model that was trained with neither: an independent computation by
/// the recipe of the paper, at every length of piece, far beyond the rows of the cache.
#[test]
fn streams_equal_their_definition() {
    let Some(model) = reference_case("llama-linear") else { return };
    let expected: serde_json::Value =
        serde_json::from_slice(&std::fs::read(model.join("streaming.json")).unwrap()).unwrap();
    let ids: Vec<i32> = serde_json::from_value(expected["input_ids"].clone()).unwrap();
    let (window, sinks) = (expected["sliding_window"].to_string(), expected["attention_sinks"].to_string());
    let folder = tempfile::tempdir().unwrap();
    let stream = ["--sliding-window", &window, "--attention-sinks", &sinks];
    for more in [&[][..], &["--disable-pass", "fuse_attention"], &["--backend", "cranelift"]] {
        let loaded = load(&build_with(&model, folder.path(), "21", &[&stream[..], more].concat()));
        for piece in [1, 5, 8] {
            let mut session = loaded.session().unwrap();
            assert_eq!((session.window(), session.sinks()), (Some(12), 4));
            for wanted in expected["logits"].as_array().unwrap() {
                let end = wanted["position"].as_u64().unwrap() as usize + 1;
                let values: Vec<f32> = serde_json::from_value(wanted["values"].clone()).unwrap();
                for ids in ids[session.past() as usize..end].chunks(piece) {
                    session.prefill(ids).unwrap();
                }
                let worst = distance(session.logits(), &values);
                assert!(worst < 1e-4, "{worst} after {end} tokens by {piece} with {more:?}");
            }
        }
    }
}

/// Rows that were dropped are no loss: a short cache gives what a long one gives, whose mask hides them.
#[test]
fn streams_need_no_more_rows_than_they_see() {
    let folder = tempfile::tempdir().unwrap();
    let stream = ["--sliding-window", "24", "--attention-sinks", "3"];
    // ALiBi; a window of its own that is narrower; caps and layers with windows of their own.
    for (case, cache) in [("bloom-alibi", "f32"), ("mistral-swa", "f16"), ("gemma2", "f32")] {
        let Some(model) = reference_case(case) else { return };
        let flags = [&stream[..], &["--kv-cache", cache]].concat();
        let (short, long) = (
            load(&build_with(&model, folder.path(), "31", &flags)),
            load(&build_with(&model, folder.path(), "300", &flags)),
        );
        let tokens: Vec<i32> = tokens(120).iter().map(|t| t % short.vocab() as i32).collect();
        let (mut session, mut expected) = (short.session().unwrap(), long.session().unwrap());
        session.prefill(&tokens[..50]).unwrap();
        expected.prefill(&tokens[..50]).unwrap();
        let largest = expected.logits().iter().fold(0f32, |m, x| m.max(x.abs()));
        let limit = 1e-4 * largest.max(1.0);
        for &token in &tokens[50..] {
            let worst = distance(session.logits(), expected.logits());
            assert!(worst < limit, "{case}: {worst} after {} tokens", session.past());
            session.decode(token).unwrap();
            expected.decode(token).unwrap();
        }
    }
}

/// Files, copies and going back, with rows dropped between sinks and window.
#[test]
fn streams_are_kept_and_go_back() {
    let Some(model) = reference_case("llama-linear") else { return };
    let folder = tempfile::tempdir().unwrap();
    let stream = ["--sliding-window", "16", "--attention-sinks", "4"];
    let path = build_with(&model, folder.path(), "40", &stream);
    let shown = text(mlcc().arg("inspect").arg(&path));
    assert!(shown.contains("sees the first 4 and the newest 12 tokens"), "{shown}");
    let loaded = load(&path);
    let ids: Vec<i32> = tokens(100).iter().map(|t| t % 64).collect();
    let mut session = loaded.session().unwrap();
    session.prefill(&ids[..70]).unwrap();
    let file = folder.path().join("state");
    session.save_state(&file).unwrap();
    let snapshot = session.snapshot().unwrap();
    let mut others = [session.fork().unwrap(), loaded.session().unwrap(), loaded.session().unwrap()];
    others[1].load_state(&file).unwrap();
    others[2].restore(&snapshot).unwrap();
    session.prefill(&ids[70..90]).unwrap();
    for other in &mut others {
        assert_eq!(other.past(), 70);
        other.prefill(&ids[70..90]).unwrap();
        assert!(distance(other.logits(), session.logits()) < 1e-6);
    }
    // Back as far as the window of the next token is still there.
    let back = (70..90).rev().take_while(|&past| session.can_truncate_to(past)).last().unwrap();
    session.truncate(back).unwrap();
    session.prefill(&ids[back as usize..90]).unwrap();
    assert!(distance(others[0].logits(), session.logits()) < 1e-4, "after going back to {back}");
    let error = session.truncate(9).unwrap_err().to_string();
    assert!(error.contains("9 tokens"), "{error}");
    // Without sinks the same window sees other tokens.
    let other = load(&build_with(&model, folder.path(), "40", &stream[..2]));
    let mut other = other.session().unwrap();
    other.prefill(&ids[..90]).unwrap();
    assert!(distance(others[0].logits(), other.logits()) > 1e-2);
}

#[test]
fn streams_that_cannot_be() {
    let folder = tempfile::tempdir().unwrap();
    let refused = |case: &str, flags: &[&str], told: &[&str]| {
        let Some(model) = reference_case(case) else { return };
        let out = folder.path().join("no.so");
        let message = failure(mlcc().arg("build").arg("-m").arg(&model).args(flags).arg("-o").arg(out), 1);
        assert!(told.iter().all(|told| message.contains(told)), "{message}");
    };
    refused("llama-linear", &["--attention-sinks", "4"], &["--sliding-window", "4 attention sinks"]);
    refused("llama-linear", &["--sliding-window", "8", "--attention-sinks", "8"], &["8 tokens"]);
    refused("llama-linear", &["--sliding-window", "500"], &["500", "128"]);
    refused("llama-linear", &["--sliding-window", "16", "-c", "16"], &["--ctx-size", "16"]);
    refused("gpt2", &["--sliding-window", "16"], &["learned"]);
    refused("rwkv4-hf", &["--sliding-window", "16"], &["recurrent"]);
    refused("chatglm-6b-tiny", &["--sliding-window", "16"], &["whole prompt"]);
}

/// ChatGLM-6B, whose tokens see later ones of the prompt: it may be as long as the context, unless `--chunk`
/// says less.
#[test]
fn whole_prompts_are_not_cut() {
    let Some(model) = reference_case("chatglm-6b-tiny") else { return };
    let folder = tempfile::tempdir().unwrap();
    let long = folder.path().join("long.so");
    let flags = ["--quant", "f32", "-c", "120", "-o"];
    mlcc().arg("build").arg("-m").arg(&model).args(flags).arg(&long).assert().success();
    let mut session = load(&long).session().unwrap();
    // Ends with the mask and the start of the answer.
    let golden: serde_json::Value =
        serde_json::from_slice(&std::fs::read(model.join("golden.json")).unwrap()).unwrap();
    let short: Vec<i32> = serde_json::from_value(golden["prompts"][0]["input_ids"].clone()).unwrap();
    let prompt: Vec<i32> = tokens(90).iter().map(|t| 5 + t % 100).chain(short).collect();
    assert!(prompt.len() > 64 && prompt.len() < 110);
    let found = session.prefill(&prompt).unwrap().to_vec();
    let expected = interpreted(&model, &prompt);
    let largest = expected.iter().fold(0f32, |m, x| m.max(x.abs()));
    assert!(distance(&found, &expected) < 1e-4 * largest);
    let golden = model.join("golden.json");
    mlcc().arg("interp").arg("-m").arg(&model).arg("--golden").arg(&golden).assert().success();

    let path = build_with(&model, folder.path(), "100", &["--chunk", "40"]);
    let golden = model.join("golden.json");
    mlcc().arg("verify").arg(&path).arg("--golden").arg(golden).assert().success();
    let mut session = load(&path).session().unwrap();
    let error = session.prefill(&tokens(41)).unwrap_err().to_string();
    assert!(error.contains("at most 40 tokens") && error.contains("--chunk"), "{error}");
    assert_eq!(session.past(), 0);
}

#[test]
fn chats_keep_the_common_begin() {
    let Some(model) = reference_case("llama-mha") else { return };
    let folder = tempfile::tempdir().unwrap();
    let path = build(&model, folder.path(), "120");
    let chat = |lines: &str| {
        let mut chat = mlcc();
        chat.arg("chat").arg(&path).args(["--template", "vicuna", "-n", "5", "--greedy"]);
        chat.write_stdin(lines.to_owned()).assert()
    };
    let stats = |out: &[u8]| -> Vec<String> {
        let text = String::from_utf8_lossy(out).into_owned();
        text.lines().filter(|l| l.starts_with("last turn")).map(String::from).collect()
    };
    let out = chat("one\n/stats\ntwo\n/stats\n/regen\n/stats\n").success().get_output().stdout.clone();
    let [first, second, again] = &stats(&out)[..] else { panic!("{}", String::from_utf8_lossy(&out)) };
    let number = |line: &str, unit: &str| -> u32 {
        line.split(unit).next().and_then(|l| l.split_whitespace().last()).unwrap().parse().unwrap()
    };
    let (reused, read) = (" of them in the context before", " read at");
    assert_eq!(number(first, reused), 0);
    assert!(number(second, reused) >= number(first, read), "{first}\n{second}");
    assert_eq!(number(second, read), number(again, read), "the turn is read as before");
    // A prompt that does not fit is refused, and a new conversation fits.
    let long = format!("{}\n/reset\none\n/stats\n", "word ".repeat(300));
    let output = chat(&long).code(1).get_output().clone();
    let message = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(message.contains("--ctx-size") && message.contains("/reset"), "{message}");
    assert_eq!(stats(&output.stdout).len(), 1);
}
