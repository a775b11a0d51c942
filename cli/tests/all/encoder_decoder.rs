//! Encoder-decoder models against their reference cases: graph, kernels by interpretation, artifacts in
//! several formats; their sessions kept, forked, cut and batched; what the commands do and refuse.

use std::path::Path;

use crate::cases::{argmax, artifact, backends, directory, golden, ids, load, options, program};
use crate::program::{case, mlcc};
use mlcc_driver::compile::{BuildOptions, BuildSource};
use mlcc_driver::interpret::{GraphModel, StepModel};
use mlcc_driver::model::build_module;
use mlcc_driver::replay::{ReplayOutcome, format_tolerance, judge_model, replay_prompts};
use mlcc_driver::stored::StoredGraph;
use mlcc_ir::ops::Op;
use mlcc_models::golden::GoldenFile;
use mlcc_passes::{CacheType, PIPELINE, TpMode};
use mlcc_runtime::{Error, Model, Session, SessionInput};
use serde_json::json;

/// T5 1.1 (gated, a head of its own), T5 1.0 (not gated, tied, scaled) and UMT5 (distances in every layer);
/// sizes of heads, and layers of encoder and decoder, that differ.
const CASES: [&str; 3] = ["t5", "t5-relu", "umt5"];

/// Tolerance relative to the largest logit; measured are up to 5e-7.
const F32: f64 = 1e-5;

/// Source texts come in one call; what is behind them does not.
fn options_of(name: &str, quant: &str) -> BuildOptions {
    BuildOptions { chunk: Some(64), context: Some(128), ..options(name, quant) }
}

fn built(name: &str, quant: &str, folder: &Path) -> Model {
    let options = BuildOptions { backend: backends().last().expect("one"), ..options_of(name, quant) };
    load(&artifact(&options, folder, &format!("{name}-{quant}.so")).0, None, 2)
}

fn right(what: &str, outcome: &ReplayOutcome) {
    assert!(outcome.ok && outcome.worst_relative_error < F32, "{what}:\n{}", outcome.text("the reference"));
    assert!(outcome.greedy_equal == outcome.greedy_expected && outcome.greedy_expected > 20, "{what}");
}

#[test]
fn the_graph_gives_the_reference() {
    for name in CASES {
        let source = BuildSource::open(&options_of(name, "f32")).unwrap();
        let architecture = &source.model.config.architecture;
        let module = build_module(name, architecture, source.context, 1).unwrap();
        let mut model = GraphModel::new(&module, &source.checkpoint, architecture).unwrap();
        right(name, &replay_prompts(&mut model, &golden(name), "f32", format_tolerance("f32")).unwrap());
    }
}

/// The shorter prompts, for kernels by interpretation.
fn short(name: &str) -> GoldenFile {
    let mut golden = golden(name);
    golden.prompts.truncate(2);
    golden
}

fn kernels(name: &str, options: &BuildOptions) -> ReplayOutcome {
    let (program, source) = program(options, None);
    let architecture = &source.model.config.architecture;
    let mut model = StepModel::new(&program, 0, &source.checkpoint, architecture, 64, 2).unwrap();
    replay_prompts(&mut model, &short(name), "f32", format_tolerance("f32")).unwrap()
}

#[test]
fn kernels_give_the_reference_without_any_optional_pass() {
    for pass in PIPELINE.iter().filter(|pass| pass.optional) {
        let disabled_passes = vec![pass.name.to_string()];
        right(pass.name, &kernels("t5", &BuildOptions { disabled_passes, ..options_of("t5", "f32") }));
    }
}

/// No matrix of scores is in memory: every attention is one kernel, of the encoder, of the target, and
/// across.
#[test]
fn attentions_are_fused() {
    for (name, encoder, decoder) in [("t5", 3, 2), ("t5-relu", 2, 3), ("umt5", 3, 2)] {
        let (program, _) = program(&options_of(name, "f32"), Some("fuse_attention"));
        let module = &program.module;
        let count = |entry: &str| {
            let (_, f) = module.function(entry).unwrap();
            f.live_nodes().filter(|(_, node)| matches!(node.op, Op::Attention(_))).count()
        };
        assert_eq!(count("encode"), encoder, "{name}");
        for entry in ["prefill", "decode", "prefill_logits"] {
            assert_eq!(count(entry), 2 * decoder, "{entry} of {name}");
        }
    }
}

#[test]
fn kernels_of_a_gpu_give_the_reference() {
    for name in CASES {
        right(name, &kernels(name, &BuildOptions { target: "sm_80".into(), ..options_of(name, "f32") }));
    }
}

#[test]
fn artifacts_give_the_reference() {
    let folder = tempfile::tempdir().unwrap();
    for (number, backend) in backends().enumerate() {
        for name in CASES {
            let options = BuildOptions { backend, ..options_of(name, "f32") };
            let path = artifact(&options, folder.path(), &format!("{name}{number}.so")).0;
            let mut session = load(&path, None, 2).session().unwrap();
            right(
                name,
                &replay_prompts(&mut session, &golden(name), "f32", format_tolerance("f32")).unwrap(),
            );
        }
    }
}

#[test]
fn formats_equal_their_own_meaning() {
    let folder = tempfile::tempdir().unwrap();
    for (name, quant) in [("t5", "f16"), ("t5-relu", "q4f16_1"), ("t5", "q8i8"), ("umt5", "q4i8")] {
        let model = built(name, quant, folder.path());
        let mut session = model.session().unwrap();
        let graph = || StoredGraph::open(&model);
        let outcome =
            judge_model(&mut session, &golden(name), quant, format_tolerance(quant), graph, None).unwrap();
        assert!(outcome.ok, "{name} in {quant}:\n{}", outcome.text("the reference"));
        let checked = |k: &mlcc_driver::kernel_check::KernelCheck| k.checked_positions() > 100;
        assert!(outcome.kernels.as_ref().is_none_or(checked), "{name} in {quant}");
    }
}

/// `tools/gguf_t5.py` has written the file.
#[test]
fn gguf_files_give_the_results_of_their_checkpoint() {
    let folder = tempfile::tempdir().unwrap();
    let file = Path::new(env!("CARGO_MANIFEST_DIR")).join("../models/tests/data/t5-relu.gguf");
    let options = BuildOptions {
        context: Some(128),
        quant: crate::cases::scheme("f32"),
        ..crate::cases::build_options(&file)
    };
    let mut session = load(&artifact(&options, folder.path(), "gguf.so").0, None, 1).session().unwrap();
    right("gguf", &replay_prompts(&mut session, &golden("t5-relu"), "f32", format_tolerance("f32")).unwrap());
}

/// Heads and their distances are split, evenly and not.
#[test]
fn ranks_give_the_reference() {
    let folder = tempfile::tempdir().unwrap();
    for (name, ranks, tp_mode) in
        [("t5", 2, TpMode::Gather), ("t5", 2, TpMode::Reduce), ("umt5", 2, TpMode::Gather)]
    {
        let options = BuildOptions { ranks, tp_mode, ..options_of(name, "f32") };
        let model =
            load(&artifact(&options, folder.path(), &format!("{name}-{tp_mode:?}.so")).0, None, ranks);
        assert_eq!(model.plan().ranks, ranks as u64);
        let mut session = model.session().unwrap();
        right(name, &replay_prompts(&mut session, &golden(name), "f32", format_tolerance("f32")).unwrap());
        // A sequence is kept with the length of its source on each rank.
        let prompt = prompt(name, 1);
        let file = folder.path().join("state");
        session.reset().unwrap();
        session.prefill(&prompt).unwrap();
        session.save_state(&file).unwrap();
        let expected = go_on(&mut session, &[7, 9]);
        let mut other = model.session().unwrap();
        other.load_state(&file).unwrap();
        assert_eq!(go_on(&mut other, &[7, 9]), expected, "{name}");
        assert_eq!(go_on(&mut session.fork().unwrap(), &[5]), go_on(&mut session, &[5]), "{name}");
    }
}

fn prompt(name: &str, number: usize) -> Vec<i32> {
    ids(&golden(name).prompts[number])
}

/// Logits after some tokens one by one.
fn go_on(session: &mut Session, tokens: &[i32]) -> Vec<f32> {
    tokens.iter().for_each(|&token| drop(session.decode(token).unwrap().to_vec()));
    session.logits().to_vec()
}

#[test]
fn sessions_are_kept_in_the_middle_to_the_bit() {
    let folder = tempfile::tempdir().unwrap();
    let model = built("t5-relu", "f32", folder.path());
    let prompt = prompt("t5-relu", 2);
    let mut session = model.session().unwrap();
    session.prefill(&prompt).unwrap();
    go_on(&mut session, &[7, 9]);
    let file = folder.path().join("state");
    session.save_state(&file).unwrap();
    let mut others = [session.fork().unwrap(), model.session().unwrap(), model.session().unwrap()];
    others[1].load_state(&file).unwrap();
    others[2].restore(&session.snapshot().unwrap()).unwrap();
    let (past, expected) = (session.past(), go_on(&mut session, &[30, 31]));
    for other in &mut others {
        assert_eq!(other.past(), past);
        assert_eq!(go_on(other, &[30, 31]), expected);
        // The form of the state's file.
        assert_eq!(other.state("source.length").unwrap().unwrap(), (prompt.len() as i32 - 1).to_le_bytes());
    }
    // Back to some token of the target, but not of the source.
    session.truncate(past).unwrap();
    assert_eq!(go_on(&mut session, &[30, 31]), expected);
    let source = prompt.len() as u64 - 1;
    assert!(session.can_truncate_to(source) && !session.can_truncate_to(source - 1));
    let error = session.truncate(source - 1).unwrap_err();
    assert!(
        matches!(error, Error::TruncateSource { source_length, .. } if source_length == source),
        "{error}"
    );
    // The whole of source and target at once, as after a sequence had to give way.
    session.reset().unwrap();
    let all = [&prompt[..], &[7, 9, 30, 31]].concat();
    let together = session.prefill(&all).unwrap().to_vec();
    crate::cases::assert_close("at once", &expected, &together, F32 as f32);
    assert_eq!(session.prefill_logits(&[5, 6]).unwrap().len(), 2 * model.vocab());
}

#[test]
fn sequences_go_together_as_alone() {
    let folder = tempfile::tempdir().unwrap();
    let options = BuildOptions { batch: Some(4), ..options_of("t5", "f32") };
    let model = load(&artifact(&options, folder.path(), "batch.so").0, None, 2);
    let prompts: Vec<Vec<i32>> = (0..3).map(|number| prompt("t5", number)).collect();
    let mut sessions: Vec<Session> = prompts.iter().map(|_| model.session().unwrap()).collect();
    let mut batch = model.batch(3).unwrap();
    let vocab = model.vocab();
    // The first goes on while the others begin.
    sessions[0].prefill(&prompts[0]).unwrap();
    let mut tokens = vec![argmax(sessions[0].logits()) as i32];
    let mut rows: Vec<SessionInput> = Vec::new();
    for (number, session) in sessions.iter_mut().enumerate() {
        rows.push(SessionInput::new(session, if number == 0 { &tokens[..] } else { &prompts[number][..] }));
    }
    let made = batch.step(&mut rows).unwrap().to_vec();
    let mut written: Vec<Vec<i32>> = vec![vec![tokens[0]], vec![], vec![]];
    let mut next: Vec<i32> = made.chunks(vocab).map(|row| argmax(row) as i32).collect();
    for _ in 0..8 {
        written.iter_mut().zip(&next).for_each(|(all, &token)| all.push(token));
        let mut all: Vec<&mut Session> = sessions.iter_mut().collect();
        tokens.clone_from(&next);
        next = batch.decode(&mut all, &tokens).unwrap().chunks(vocab).map(|row| argmax(row) as i32).collect();
    }
    for (prompt, written) in golden("t5").prompts.iter().zip(&written) {
        let reference: Vec<i32> = prompt.greedy.iter().map(|&token| token as i32).collect();
        // One of the reference's choices is close.
        let firm = prompt.binding_greedy(1e-3).len().min(written.len());
        assert_eq!(written[..firm], reference[..firm]);
    }
}

#[test]
fn a_sequence_begins_with_a_source() {
    let folder = tempfile::tempdir().unwrap();
    let model = built("t5", "f32", folder.path());
    let mut session = model.session().unwrap();
    for tokens in [&[5][..], &[5, 6], &[0], &[0, 5]] {
        let error = session.prefill(tokens).unwrap_err();
        assert!(matches!(error, Error::NoSource { start: 0 }), "{error}");
        assert_eq!(session.past(), 0);
    }
    assert!(matches!(session.decode(0), Err(Error::NoSource { .. })));
    let long: Vec<i32> = (0..65).map(|i| 5 + i % 50).chain([0]).collect();
    assert!(matches!(session.prefill(&long), Err(Error::SourceTooLong { n: 65, chunk: 64 })));
    session.prefill(&long[1..]).unwrap();
    // Nothing is left of a sequence whose target did not fit.
    session.reset().unwrap();
    let target: Vec<i32> = long[1..].iter().copied().chain([9; 63]).collect();
    assert!(matches!(session.prefill(&[&target[..], &[9, 9]].concat()), Err(Error::ContextFull { .. })));
    session.prefill(&target).unwrap();
    assert_eq!(session.past(), 128);
}

#[test]
fn caches_in_few_bits() {
    let folder = tempfile::tempdir().unwrap();
    for (cache, permitted) in [(CacheType::F16, 1e-3), (CacheType::I8, 5e-2)] {
        let options = BuildOptions { kv_cache: Some(cache), ..options_of("t5", "f32") };
        let mut session = load(&artifact(&options, folder.path(), "cache.so").0, None, 1).session().unwrap();
        let outcome = replay_prompts(&mut session, &golden("t5"), "f32", Some(permitted)).unwrap();
        assert!(outcome.worst_relative_error < permitted, "{}", outcome.text("the reference"));
    }
}

/// A tokenizer as T5 has them: pieces, an end of the text behind each.
fn tokenizer(folder: &Path) -> std::path::PathBuf {
    let pieces = (3..272).map(|id| json!([format!("\u{2581}w{id}"), -(id as f64)]));
    let first = ["<pad>", "</s>", "<unk>"].map(|name| json!([name, 0.0]));
    let special = |id: usize, content: &str| json!({"id": id, "content": content, "special": true, "single_word": false, "lstrip": false, "rstrip": false, "normalized": false});
    let space =
        json!({"type": "Metaspace", "replacement": "\u{2581}", "prepend_scheme": "always", "split": true});
    let file = json!({
        "version": "1.0",
        "added_tokens": [special(0, "<pad>"), special(1, "</s>"), special(2, "<unk>")],
        "pre_tokenizer": space,
        "decoder": space,
        "post_processor": {
            "type": "TemplateProcessing",
            "single": [{"Sequence": {"id": "A", "type_id": 0}}, {"SpecialToken": {"id": "</s>", "type_id": 0}}],
            "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 0}}],
            "special_tokens": {"</s>": {"id": "</s>", "ids": [1], "tokens": ["</s>"]}},
        },
        "model": {"type": "Unigram", "unk_id": 2, "vocab": first.into_iter().chain(pieces).collect::<Vec<_>>()},
    });
    let path = folder.join("tokenizer.json");
    std::fs::write(&path, file.to_string()).unwrap();
    path
}

#[test]
fn commands_write_a_text_for_a_text_and_refuse_the_rest() {
    let folder = tempfile::tempdir().unwrap();
    let options = BuildOptions { tokenizer: Some(tokenizer(folder.path())), ..options_of("t5", "f32") };
    let path = artifact(&options, folder.path(), "t5.so").0;
    let (model, so) = (load(&path, None, 1), path.to_str().unwrap());
    let tokenizer = mlcc_engine::artifact_text::tokenizer(&model).unwrap();
    let prompt = tokenizer.encode_prompt("w86 w8 w75").unwrap();
    assert_eq!(prompt, [86, 8, 75, 1, 0]);
    assert_eq!(tokenizer.as_prompt(vec![86, 1]), [86, 1, 0]);
    assert_eq!(tokenizer.encode_prompt("w86<pad>").unwrap(), [86, 1, 0], "the start is no part of a source");
    // The output of `mlcc run` is that of the session, and the source is not repeated.
    let mut session = model.session().unwrap();
    let mut expected = vec![argmax(session.prefill(&prompt).unwrap()) as i32];
    for _ in 0..4 {
        let next = argmax(session.decode(expected[expected.len() - 1]).unwrap()) as i32;
        expected.push(next);
    }
    let run = ["run", so, "-p", "w86 w8 w75", "--greedy", "-n", "5", "--ignore-eos"];
    let out = mlcc().args(run).assert().success();
    let text = tokenizer.decode(&expected, mlcc_text::tokenizer::SpecialTokens::Skip);
    assert_eq!(String::from_utf8_lossy(&out.get_output().stdout).trim(), text.trim());
    mlcc().args(["bench", so, "-p", "16", "-n", "4", "-r", "1"]).assert().success();

    let says = |args: &[&str], part: &str| {
        let out = mlcc().args(args).assert().failure();
        let text = String::from_utf8_lossy(&out.get_output().stderr).into_owned();
        assert!(text.contains(part), "{args:?}: {text}");
    };
    // So does the server, which has no chats for it.
    {
        let server = crate::server::ServerProcess::of(&[&path], &["-t", "1"]);
        let request = json!({"prompt": "w86 w8 w75", "max_tokens": 5, "temperature": 0, "ignore_eos": true});
        let answer = server.ask("/v1/completions", &request);
        assert_eq!(answer["choices"][0]["text"].as_str().unwrap().trim(), text.trim());
        let chat = json!({"messages": [{"role": "user", "content": "w86"}]});
        let answer = server.post("/v1/chat/completions", &chat);
        assert_eq!(answer.error(), (400, "no_chat_template".into(), "-".into()));
        assert!(answer.body.contains("encoder-decoder model"), "{}", answer.body);
        let echo = json!({"prompt": "w86", "max_tokens": 1, "echo": true, "logprobs": 1});
        assert_eq!(server.post("/v1/completions", &echo).error(), (400, "unsupported".into(), "echo".into()));
    }
    let file = folder.path().join("text");
    std::fs::write(&file, "w5 w6 w7").unwrap();
    says(&["eval", so, "--text", file.to_str().unwrap()], "encoder-decoder model: perplexity");
    says(&["chat", so], "has no chats");
    says(&["chat", so, "--template", "chatml"], "has no chats");
    says(&["serve", so, "--template", "chatml", "--port", "0"], "has no chats");
    says(&["run", so, "-p", "w5", "--lora", "."], "slots");
    says(&["embed", so, "w5"], "is not an embedding model");
    let (checkpoint, other) = (case("t5"), folder.path().join("other.so"));
    for (flags, part) in [
        (&["--debug-taps"][..], "layers of encoder-decoder models"),
        (&["--lora-slots", "2"], "encoder-decoder models have no slots"),
        (&["--sliding-window", "20"], "source text"),
    ] {
        let args = ["build", "-m", checkpoint.to_str().unwrap(), "-o", other.to_str().unwrap()];
        says(&[&args, flags].concat(), part);
    }
}

#[test]
fn other_stacks_and_divisions_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    let text = std::fs::read_to_string(directory("t5").join("config.json")).unwrap();
    for (from, to, part) in [
        ("\"T5ForConditionalGeneration\"", "\"T5EncoderModel\"", "the class `T5EncoderModel`"),
        ("\"is_encoder_decoder\": true", "\"is_encoder_decoder\": false", "one of the two stacks alone"),
        ("\"gated-gelu\"", "\"gated-snake\"", "feed_forward_proj"),
        ("\"relative_attention_num_buckets\": 16", "\"relative_attention_num_buckets\": 2", "buckets"),
        (
            "\"relative_attention_max_distance\": 32",
            "\"relative_attention_max_distance\": 8",
            "largest distance",
        ),
        ("\"decoder_start_token_id\": 0", "\"decoder_start_token_id\": 999", "decoder_start_token_id"),
        ("\"num_heads\": 4", "\"num_heads\": 5", "shape"),
    ] {
        assert!(text.contains(from), "{from}");
        for file in ["golden.json", "model.safetensors"] {
            std::fs::copy(directory("t5").join(file), folder.path().join(file)).unwrap();
        }
        std::fs::write(folder.path().join("config.json"), text.replace(from, to)).unwrap();
        let error = BuildSource::open(&crate::cases::build_options(folder.path())).err().expect(to);
        let all = std::iter::successors(Some(&error as &dyn std::error::Error), |e| e.source());
        let all: Vec<String> = all.map(ToString::to_string).collect();
        assert!(all.join(": ").contains(part), "{to}: {}", all.join(": "));
    }
}
