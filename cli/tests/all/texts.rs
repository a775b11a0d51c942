//! Models of texts as artifacts against their reference cases: embeddings and scores of single texts and of
//! many together, passes switched off, weight formats.

use std::path::Path;

use crate::cases::{artifact, backends, build_options, directory, load, scheme};
use mlcc_driver::compile::{Backend, BuildOptions, BuildSource};
use mlcc_passes::PIPELINE;
use mlcc_runtime::{Error, Model};
use serde::Deserialize;

/// The tolerance of the reference cases; measured are up to 1e-6.
pub const F32: f32 = 1e-5;

#[derive(Deserialize)]
struct EmbeddingGolden {
    inputs: Vec<GoldenInput>,
}

#[derive(Deserialize)]
pub struct GoldenInput {
    input_ids: Vec<i32>,
    #[serde(default)]
    token_type_ids: Vec<i32>,
    #[serde(default)]
    embedding: Vec<f32>,
    #[serde(default)]
    score: Option<f32>,
}

impl GoldenInput {
    fn expected(&self) -> Vec<f32> {
        self.score.map_or_else(|| self.embedding.clone(), |score| vec![score])
    }

    /// Ids as they are computed: those of further token types come after those of the first.
    fn ids(&self, vocab: i32) -> Vec<i32> {
        let types = self.token_type_ids.iter().copied().chain(std::iter::repeat(0));
        self.input_ids.iter().zip(types).map(|(id, kind)| id + kind * vocab).collect()
    }
}

pub const CASES: [&str; 10] = [
    "embed-bert",
    "embed-qwen3",
    "embed-modernbert",
    "embed-gemma",
    "embed-nomic",
    "rerank-xlmr",
    "rerank-bert",
    "rerank-modernbert",
    "rerank-qwen3",
    "rerank-qwen3-labels",
];

/// Tokens of the reranker with token types.
const TYPED_VOCAB: i32 = 128;

pub fn inputs(case: &str) -> Vec<GoldenInput> {
    let bytes = std::fs::read(directory(case).join("golden.json")).unwrap();
    serde_json::from_slice::<EmbeddingGolden>(&bytes).unwrap().inputs
}

fn options(case: &str, quant: &str, backend: Backend) -> BuildOptions {
    let mut options = build_options(&directory(case));
    options.quant = scheme(quant);
    options.quant_name = quant.into();
    options.backend = backend;
    options
}

fn build(options: &BuildOptions, folder: &Path) -> Model {
    load(&artifact(options, folder, "case.so").0, None, 2)
}

fn worst(found: &[f32], expected: &[f32]) -> f32 {
    assert_eq!(found.len(), expected.len());
    found.iter().zip(expected).fold(0f32, |worst, (a, b)| worst.max((a - b).abs()))
}

/// All texts together, in one call and in several.
pub fn check(what: &str, model: &Model, inputs: &[GoldenInput], tolerance: f32) {
    let mut texts = model.text_embedder().unwrap();
    let ids: Vec<Vec<i32>> = inputs.iter().map(|input| input.ids(TYPED_VOCAB)).collect();
    let ids: Vec<&[i32]> = ids.iter().map(|ids| &ids[..]).collect();
    let expected: Vec<f32> = inputs.iter().flat_map(GoldenInput::expected).collect();
    let off = worst(texts.embed(&ids).unwrap(), &expected);
    println!("{what}: off by at most {off:.1e}");
    assert!(off <= tolerance, "{what}: off by {off}");
}

fn check_case(case: &str, quant: &str, backend: Backend, disabled: &[&str], tolerance: f32) {
    let folder = tempfile::tempdir().unwrap();
    let mut options = options(case, quant, backend);
    options.disabled_passes = disabled.iter().map(|&pass| pass.into()).collect();
    let what = format!("{case} in {quant} by {} without {disabled:?}", backend.name());
    check(&what, &build(&options, folder.path()), &inputs(case), tolerance);
}

#[test]
fn vectors_of_texts_equal_their_reference() {
    for (i, backend) in backends().enumerate() {
        let cases = if i == 0 { &CASES[..] } else { &CASES[..1] };
        cases.iter().for_each(|case| check_case(case, "f32", backend, &[], F32));
    }
}

#[test]
fn passes_change_no_vector() {
    let optional: Vec<&str> = PIPELINE.iter().filter(|pass| pass.optional).map(|pass| pass.name).collect();
    let backend = backends().next().unwrap();
    for pass in &optional {
        check_case("embed-bert", "f32", backend, &[pass], F32);
    }
    for case in CASES {
        check_case(case, "f32", backend, &optional, F32);
    }
}

/// Formats of half precision and integer activations; cosines of embeddings stay near.
#[test]
fn vectors_in_other_formats_stay_near() {
    let backend = backends().next().unwrap();
    for (case, quant, tolerance) in
        [("embed-modernbert", "f16", 2e-2), ("embed-bert", "q8i8", 6e-2), ("embed-qwen3", "q8i8", 6e-2)]
    {
        check_case(case, quant, backend, &[], tolerance);
    }
}

/// Alone, in a crowd, in another order, cut into several calls: the same bits.
#[test]
fn no_vector_depends_on_the_others() {
    {
        for (case, quant) in [("embed-bert", "f32"), ("embed-qwen3", "q8i8"), ("embed-gemma", "f32")] {
            let folder = tempfile::tempdir().unwrap();
            let mut options = options(case, quant, backends().next().unwrap());
            // Texts of 40 tokens: calls of three of them at most.
            (options.chunk, options.batch) = (Some(128), Some(5));
            let model = build(&options, folder.path());
            let mut texts = model.text_embedder().unwrap();
            let inputs = inputs(case);
            let some: Vec<&[i32]> = inputs.iter().map(|input| &input.input_ids[..]).collect();
            let one = &some[3][..1];
            let many: Vec<&[i32]> = [&some[..], &[one], &some[..3], &[one, one], &some[..]].concat();
            let width = model.text_width();
            let together = texts.embed(&many).unwrap().to_vec();
            assert_eq!(together.len(), many.len() * width);
            for (text, vector) in many.iter().zip(together.chunks(width)) {
                let alone = texts.embed(&[text]).unwrap();
                assert!(alone == vector, "{case} in {quant}: {} tokens", text.len());
            }
        }
    }
}

#[test]
fn texts_that_cannot_be_read_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    let mut options = options("embed-bert", "f32", backends().next().unwrap());
    options.context = Some(16);
    let model = build(&options, folder.path());
    let mut texts = model.text_embedder().unwrap();
    let error = |texts: &mut mlcc_runtime::TextEmbedder, text: &[i32]| match texts.embed(&[&[1], text]) {
        Err(Error::Text { index: 1, source }) => *source,
        other => panic!("{:?}", other.map(<[f32]>::len)),
    };
    assert!(matches!(error(&mut texts, &[]), Error::EmptyText));
    assert!(matches!(error(&mut texts, &[1; 17]), Error::TextTooLong { n: 17, most: 16 }));
    // Two types of tokens: an id beyond the 400 of the vocabulary is one of the second type.
    assert!(matches!(error(&mut texts, &[2, 800]), Error::Token { token: 800, position: 1, vocab: 800 }));
    assert!(matches!(error(&mut texts, &[-1]), Error::Token { token: -1, position: 0, .. }));
    assert_eq!(texts.embed(&[]).unwrap().len(), 0);
    assert!(matches!(model.session().err(), Some(Error::TextsOnly { .. })));
    assert!(matches!(model.batch(2).err(), Some(Error::TextsOnly { .. })));
}

/// Words of a vocabulary that both commands can be given.
const TOKENIZER: &str = r###"{
  "version": "1.0", "truncation": null, "padding": null,
  "added_tokens": [
    {"id": 0, "content": "[PAD]", "single_word": false, "lstrip": false, "rstrip": false, "normalized": false, "special": true},
    {"id": 2, "content": "[CLS]", "single_word": false, "lstrip": false, "rstrip": false, "normalized": false, "special": true},
    {"id": 3, "content": "[SEP]", "single_word": false, "lstrip": false, "rstrip": false, "normalized": false, "special": true}
  ],
  "normalizer": {"type": "BertNormalizer", "clean_text": true, "handle_chinese_chars": true, "strip_accents": null, "lowercase": true},
  "pre_tokenizer": {"type": "BertPreTokenizer"},
  "post_processor": {
    "type": "TemplateProcessing",
    "single": [{"SpecialToken": {"id": "[CLS]", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}, {"SpecialToken": {"id": "[SEP]", "type_id": 0}}],
    "pair": [{"SpecialToken": {"id": "[CLS]", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}, {"SpecialToken": {"id": "[SEP]", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}, {"SpecialToken": {"id": "[SEP]", "type_id": 1}}],
    "special_tokens": {"[CLS]": {"id": "[CLS]", "ids": [2], "tokens": ["[CLS]"]}, "[SEP]": {"id": "[SEP]", "ids": [3], "tokens": ["[SEP]"]}}
  },
  "decoder": {"type": "WordPiece", "prefix": "##", "cleanup": true},
  "model": {"type": "WordPiece", "unk_token": "[UNK]", "continuing_subword_prefix": "##", "max_input_chars_per_word": 100,
    "vocab": {"[PAD]": 0, "[UNK]": 1, "[CLS]": 2, "[SEP]": 3, "search": 4, ":": 5, "tree": 6, "##s": 7, "in": 8, "winter": 9, "summer": 10}}
}"###;

/// Options for a copy of a case with a tokenizer.
fn tokenized(case: &str, folder: &Path) -> BuildOptions {
    let copy = folder.join(case);
    copy_all(&directory(case), &copy);
    std::fs::write(copy.join("tokenizer.json"), TOKENIZER).unwrap();
    let prompts = r#"{"prompts": {"query": "search: ", "document": ""}, "default_prompt_name": null}"#;
    std::fs::write(copy.join("config_sentence_transformers.json"), prompts).unwrap();
    let mut options = options(case, "f32", backends().next().unwrap());
    options.request.model = copy.to_str().unwrap().into();
    options
}

/// A copy of a case with a tokenizer, compiled.
fn with_tokenizer(case: &str, folder: &Path) -> std::path::PathBuf {
    artifact(&tokenized(case, folder), folder, "case.so").0
}

fn copy_all(from: &Path, to: &Path) {
    std::fs::create_dir_all(to).unwrap();
    for entry in std::fs::read_dir(from).unwrap() {
        let (path, to) = {
            let entry = entry.unwrap();
            (entry.path(), to.join(entry.file_name()))
        };
        if path.is_dir() {
            copy_all(&path, &to);
        } else {
            std::fs::copy(&path, &to).unwrap();
        }
    }
}

fn mlcc(args: &[&str], input: &str) -> (bool, String, String) {
    let mut command = assert_cmd::Command::new(env!("CARGO_BIN_EXE_mlcc"));
    let output = command.args(args).write_stdin(input).output().unwrap();
    let text = |bytes: Vec<u8>| String::from_utf8(bytes).unwrap();
    (output.status.success(), text(output.stdout), text(output.stderr))
}

#[test]
fn the_command_embeds_lines() {
    let folder = tempfile::tempdir().unwrap();
    let so = with_tokenizer("embed-bert", folder.path());
    let (so, model) = (so.to_str().unwrap().to_string(), load(&so, None, 1));
    // "Trees in winter", with the prompt of queries before it.
    let mut texts = model.text_embedder().unwrap();
    let plain = texts.embed(&[&[2, 6, 7, 8, 9, 3]]).unwrap().to_vec();
    let asked = texts.embed(&[&[2, 4, 5, 6, 7, 8, 9, 3]]).unwrap().to_vec();
    let numbers = |line: &str| line.split(' ').map(|x| x.parse().unwrap()).collect::<Vec<f32>>();

    let (ok, out, err) = mlcc(&["embed", &so], "Trees in winter\nsummer\n");
    assert!(ok, "{err}");
    assert_eq!(out.lines().count(), 2);
    assert_eq!(numbers(out.lines().next().unwrap()), plain);

    let (ok, out, err) = mlcc(&["embed", &so, "Trees in winter", "--prompt", "query", "--json"], "");
    assert!(ok, "{err}");
    let json: serde_json::Value = serde_json::from_str(&out).unwrap();
    let found: Vec<f32> = serde_json::from_value(json["embeddings"][0].clone()).unwrap();
    assert_eq!((found, &json["dim"], &json["tokens"]), (asked, &64.into(), &8.into()));

    let npy = folder.path().join("vectors.npy");
    let (ok, _, err) = mlcc(&["embed", &so, "tree", "winter", "--dim", "8", "-o", npy.to_str().unwrap()], "");
    assert!(ok, "{err}");
    let bytes = std::fs::read(&npy).unwrap();
    assert_eq!(bytes.len(), 128 + 2 * 8 * 4);
    let vectors: Vec<f32> =
        bytes[128..].chunks_exact(4).map(|b| f32::from_le_bytes(b.try_into().unwrap())).collect();
    let length = vectors[..8].iter().map(|x| x * x).sum::<f32>();
    assert!((length - 1.0).abs() < 1e-5, "{length}");

    for (args, input, what) in [
        (&["embed", &so][..], "tree\n\nwinter\n", "text 1 is empty"),
        (&["embed", &so], "", "no texts"),
        (&["embed", &so, "tree", "--prompt", "answer"], "", "it has query, document"),
        (&["embed", &so, "tree", "--dim", "65"], "", "choose 1 to 64"),
        (&["rerank", &so, "tree", "winter"], "", "a reranker gives one"),
        (&["run", &so, "-p", "tree"], "", "mlcc embed"),
    ] {
        let (ok, _, err) = mlcc(args, input);
        assert!(!ok && err.contains(what), "{args:?}: {err}");
    }
}

#[test]
fn bench_reads_texts() {
    let folder = tempfile::tempdir().unwrap();
    let so = with_tokenizer("embed-bert", folder.path());
    let bench = |more: &[&str]| {
        let fixed = ["bench", so.to_str().unwrap(), "-t", "1", "-r", "1", "--warm-up", "0", "-o", "json"];
        mlcc(&[&fixed, more].concat(), "")
    };
    let rows = |more: &[&str]| -> Vec<serde_json::Value> {
        let (ok, out, err) = bench(more);
        assert!(ok, "{err}");
        serde_json::from_str(&out).unwrap()
    };
    let named = |rows: &[serde_json::Value]| -> Vec<String> {
        rows.iter().map(|row| row["test"].as_str().unwrap().to_string()).collect()
    };
    let found = rows(&["--texts", "3x5,2x8"]);
    assert_eq!(named(&found), ["tx3x5", "tx2x8"]);
    assert!(
        found
            .iter()
            .all(|row| row["tok_s"].as_f64().unwrap() > 0.0 && row["ops_per_token"].as_f64().unwrap() > 0.0)
    );
    let kernels = rows(&["--kernels", "--texts", "3x5"]);
    assert_eq!(named(&kernels), ["tx3x5"]);
    let products =
        kernels[0]["kernels"].as_array().unwrap().iter().filter(|k| k["ops"].as_f64().unwrap() > 0.0);
    assert!(products.count() > 0, "{kernels:?}");

    for (args, what) in [
        (&["--texts", "2x100000"][..], "needs room for 100000 tokens"),
        (&["-p", "8"], "give --texts"),
        (&["--texts", "8"], "expected TEXTSxTOKENS"),
    ] {
        let (ok, _, err) = bench(args);
        assert!(!ok && err.contains(what), "{args:?}: {err}");
    }
}

#[test]
fn the_command_orders_documents() {
    let folder = tempfile::tempdir().unwrap();
    let so = with_tokenizer("rerank-xlmr", folder.path());
    let (so, model) = (so.to_str().unwrap().to_string(), load(&so, None, 1));
    let mut texts = model.text_embedder().unwrap();
    let pairs: [&[i32]; 3] = [&[2, 6, 3, 9, 3], &[2, 6, 3, 10, 3], &[2, 6, 3, 8, 9, 3]];
    let scores = texts.embed(&pairs).unwrap().to_vec();
    let (ok, out, err) = mlcc(&["rerank", &so, "tree", "--json"], "winter\nsummer\nin winter\n");
    assert!(ok, "{err}");
    let rows: Vec<serde_json::Value> = serde_json::from_str(&out).unwrap();
    let found: Vec<(usize, f32)> = rows
        .iter()
        .map(|row| (row["index"].as_u64().unwrap() as usize, row["score"].as_f64().unwrap() as f32))
        .collect();
    assert!(found.is_sorted_by(|a, b| a.1 >= b.1), "{found:?}");
    assert_eq!(found.len(), 3);
    found.iter().for_each(|&(index, score)| assert_eq!(score, scores[index]));
    let (ok, out, _) = mlcc(&["rerank", &so, "tree", "winter", "summer", "--top", "1"], "");
    assert!(ok && out.lines().count() == 1, "{out}");
    let (ok, _, err) = mlcc(&["embed", &so, "tree"], "");
    assert!(!ok && err.contains("mlcc rerank"), "{err}");
}

/// The output of `mlcc rerank` for documents, in their order.
fn printed_scores(so: &Path, more: &[&str], documents: &[&str]) -> Vec<f32> {
    let args = [&["rerank", so.to_str().unwrap(), "tree", "--json"], more, documents].concat();
    let (ok, out, err) = mlcc(&args, "");
    assert!(ok, "{err}");
    let mut rows: Vec<serde_json::Value> = serde_json::from_str(&out).unwrap();
    rows.sort_by_key(|row| row["index"].as_u64());
    rows.iter().map(|row| row["score"].as_f64().unwrap() as f32).collect()
}

#[test]
fn pairs_have_token_types() {
    let folder = tempfile::tempdir().unwrap();
    let so = with_tokenizer("rerank-bert", folder.path());
    let model = load(&so, None, 1);
    let mut texts = model.text_embedder().unwrap();
    let second = |id: i32| id + TYPED_VOCAB;
    let pairs: [&[i32]; 2] = [&[2, 6, 3, second(9), second(3)], &[2, 6, 3, second(8), second(10), second(3)]];
    let scores = texts.embed(&pairs).unwrap().to_vec();
    assert_eq!(printed_scores(&so, &[], &["winter", "in summer"]), scores);
    let first_alone = texts.embed(&[&[2, 6, 3, 9, 3]]).unwrap()[0];
    assert!((first_alone - scores[0]).abs() > 1e-3, "types change nothing");
    assert!(texts.embed(&[&[2 * TYPED_VOCAB]]).is_err());
    let (ok, _, err) = mlcc(&["rerank", so.to_str().unwrap(), "tree", "winter", "--instruct", "Find it"], "");
    assert!(!ok && err.contains("answer with a token"), "{err}");
}

/// An embedding is of one text, so ids of callers are those of the vocabulary; `verify` uses the other types
/// too.
#[test]
fn embeddings_know_token_types() {
    let folder = tempfile::tempdir().unwrap();
    let so = with_tokenizer("embed-bert", folder.path());
    let model = load(&so, None, 1);
    let vocab = model.vocab() / 2;
    let mut texts = model.text_embedder().unwrap();
    let second = |id: i32| id + vocab as i32;
    let plain = texts.embed(&[&[2, 6, 9, 3]]).unwrap().to_vec();
    let typed = texts.embed(&[&[2, 6, second(9), second(3)]]).unwrap().to_vec();
    assert!(worst(&typed, &plain) > 1e-3, "types change nothing");
    assert!(texts.embed(&[&[second(second(0))]]).is_err());
    let tokenizer = mlcc_engine::artifact_text::tokenizer(&model).unwrap();
    let mut model = mlcc_engine::embedding::EmbeddingModel::new(&model, tokenizer).unwrap();
    let error = model
        .embed_ids(&[vec![2, vocab as mlcc_text::TokenId]], &mlcc_engine::embedding::EmbedOptions::default())
        .unwrap_err();
    assert!(error.to_string().contains(&format!("token {vocab} is not one of the {vocab}")), "{error}");
}

/// A template in which each text is at its place.
const PAIR: &str = "{% for m in messages %}{% if m.role == 'system' %}{{ m.content }} {% endif %}{% endfor %}\
    {{ messages[-2].content }} in {{ messages[-1].content }}{% if add_generation_prompt %} :{% endif %}";

#[test]
fn answers_are_scores() {
    let folder = tempfile::tempdir().unwrap();
    let options = tokenized("rerank-qwen3", folder.path());
    let copy = Path::new(&options.request.model);
    std::fs::write(copy.join("chat_template.jinja"), PAIR).unwrap();
    let how = r#"{"processing_kwargs": {"chat_template": {"add_generation_prompt": true}}}"#;
    std::fs::write(copy.join("sentence_bert_config.json"), how).unwrap();
    let so = artifact(&options, folder.path(), "case.so").0;
    let model = load(&so, None, 1);
    let mut texts = model.text_embedder().unwrap();
    let scores = texts.embed(&[&[6, 8, 9, 5], &[6, 8, 10, 5], &[4, 6, 8, 10, 5]]).unwrap().to_vec();
    assert_eq!(printed_scores(&so, &[], &["winter", "summer"]), scores[..2]);
    assert_eq!(printed_scores(&so, &["--instruct", "search"], &["summer"]), scores[2..]);
}

/// A model of chats becomes a reranker where that is asked for, or by its name, with the template of
/// Qwen3-Reranker.
#[test]
fn chat_models_become_rerankers() {
    use mlcc_text::ChatSource;
    let folder = tempfile::tempdir().unwrap();
    let mut options = tokenized("rerank-qwen3", folder.path());
    let copy = Path::new(&options.request.model);
    std::fs::remove_file(copy.join("modules.json")).unwrap();
    let named = folder.path().join("Small-Reranker");
    copy_all(copy, &named);
    let refused = |options: &BuildOptions, what: &str| {
        let error = BuildSource::open(options).err().unwrap().to_string();
        assert!(error.contains(what), "{error}");
    };
    options.answers = Some(["trees".into(), "winter".into()]);
    refused(&options, "`trees` is 2 tokens");
    options.answers = Some(["tree".into(), "winter".into()]);
    let so = artifact(&options, folder.path(), "case.so").0;
    let model = load(&so, None, 1);
    let tokenizer = mlcc_engine::artifact_text::tokenizer(&model).unwrap();
    let template = ChatSource::qwen3_reranker().compile(&mlcc_engine::LocalMachine).unwrap();
    let ids = tokenizer.encode(&template.render_pair(None, "tree", "winter", false).unwrap()).unwrap();
    let score = model.text_embedder().unwrap().embed(&[&ids]).unwrap().to_vec();
    assert_eq!(printed_scores(&so, &[], &["winter"]), score);

    options.request.model = named.to_str().unwrap().into();
    options.answers = None;
    // Neither `yes` nor `no` is in this vocabulary, but both are one token: the unknown one.
    let so = artifact(&options, folder.path(), "named.so").0;
    assert_eq!(printed_scores(&so, &[], &["winter"]), [0.0]);
    options.template = Some(ChatSource::named("chatml").unwrap());
    options.answers = Some(["tree".into(), "winter".into()]);
    assert_eq!(printed_scores(&artifact(&options, folder.path(), "chatml.so").0, &[], &["winter"]).len(), 1);
    options.template = Some(ChatSource::named("vicuna").unwrap());
    let mut bert = tokenized("rerank-bert", folder.path());
    bert.answers = options.answers.clone();
    refused(&bert, "is a reranker already");
}

#[cfg(unix)]
#[test]
fn the_server_gives_vectors_and_orders() {
    use serde_json::json;
    let folder = tempfile::tempdir().unwrap();
    let (one, two) = (folder.path().join("one"), folder.path().join("two"));
    [&one, &two].into_iter().for_each(|dir| std::fs::create_dir(dir).unwrap());
    let (embedder, reranker) = (with_tokenizer("embed-bert", &one), with_tokenizer("rerank-xlmr", &two));
    let model = load(&embedder, None, 1);
    let expected =
        model.text_embedder().unwrap().embed(&[&[2, 6, 7, 8, 9, 3], &[2, 10, 3]]).unwrap().to_vec();
    let names = ["--alias", "small", "--alias", "judge", "-t", "1"];
    let mut small = crate::program::mlcc();
    small.arg("serve").args([&embedder, &reranker]).args(names).args(["--memory", "1kB", "--port", "0"]);
    let sum =
        ["small does not fit", "MiB of weights + ", "MiB of scratch = ", "--memory less ", "for requests"];
    crate::program::fails_with(&mut small, &sum);
    let server = crate::server::ServerProcess::of(&[&embedder, &reranker], &names);
    assert_eq!(server.ready["models"], json!(["small", "judge"]));
    assert_eq!(server.get("/v1/models/judge").json()["id"], "judge");
    let listed = server.get("/v1/models").json();
    let listed: Vec<&str> =
        listed["data"].as_array().unwrap().iter().map(|model| model["id"].as_str().unwrap()).collect();
    assert_eq!(listed, ["small", "judge"]);

    let vector = |answer: &serde_json::Value, at: usize| {
        let row = &answer["data"][at];
        assert_eq!((&row["object"], &row["index"]), (&json!("embedding"), &json!(at)));
        serde_json::from_value::<Vec<f32>>(row["embedding"].clone()).unwrap()
    };
    let answer =
        server.ask("/v1/embeddings", &json!({"model": "small", "input": ["Trees in winter", "summer"]}));
    assert_eq!([vector(&answer, 0), vector(&answer, 1)].concat(), expected);
    assert_eq!((&answer["model"], &answer["usage"]["prompt_tokens"]), (&json!("small"), &json!(9)));
    let answer = server.ask("/v1/embeddings", &json!({"input": [[2, 6, 7, 8, 9, 3], [2, 10, 3]]}));
    assert_eq!([vector(&answer, 0), vector(&answer, 1)].concat(), expected);
    let answer = server
        .ask("/v1/embeddings", &json!({"input": "summer", "dimensions": 4, "encoding_format": "base64"}));
    assert_eq!(answer["data"][0]["embedding"].as_str().unwrap().len(), 24);

    // The same in the forms of Ollama and of llama.cpp's server.
    let floats = |value: &serde_json::Value| serde_json::from_value::<Vec<f32>>(value.clone()).unwrap();
    let embed =
        json!({"model": "small:latest", "input": ["Trees in winter", "summer"], "options": {"num_ctx": 9}});
    let answer = server.ask("/api/embed", &embed);
    assert_eq!([floats(&answer["embeddings"][0]), floats(&answer["embeddings"][1])].concat(), expected);
    assert_eq!((&answer["model"], &answer["prompt_eval_count"]), (&json!("small:latest"), &json!(9)));
    let answer = server.ask("/api/embeddings", &json!({"model": "small", "prompt": "Trees in winter"}));
    assert_eq!(floats(&answer["embedding"]), expected[..64]);
    let answer = server.ask("/embedding", &json!({"content": ["Trees in winter", "summer"]}));
    assert_eq!([floats(&answer[0]["embedding"][0]), floats(&answer[1]["embedding"][0])].concat(), expected);
    let shown = server.ask("/api/show", &json!({"model": "small"}));
    assert_eq!(
        (&shown["capabilities"], &shown["details"]["family"]),
        (&json!(["embedding"]), &json!("bert"))
    );
    // A reranker has no route there.
    let listed = server.get("/api/tags").json();
    assert_eq!(
        (listed["models"].as_array().unwrap().len(), &listed["models"][0]["name"]),
        (1, &json!("small:latest"))
    );

    let asked = json!({"query": "tree", "documents": ["winter", "summer", "in winter"], "top_n": 2});
    let answer = server.ask("/v1/rerank", &asked);
    let scores: Vec<f64> = answer["results"]
        .as_array()
        .unwrap()
        .iter()
        .map(|row| row["relevance_score"].as_f64().unwrap())
        .collect();
    assert!(scores.len() == 2 && scores[0] >= scores[1], "{answer}");

    for (path, body, status, what) in [
        ("/v1/embeddings", json!({"input": ""}), 400, "is empty"),
        ("/v1/embeddings", json!({"input": "tree", "dimensions": 65}), 400, "choose 1 to 64"),
        ("/v1/embeddings", json!({"input": "tree", "encoding_format": "int8"}), 400, "base64"),
        ("/v1/embeddings", json!({"input": [[400]]}), 400, "vocabulary"),
        ("/v1/embeddings", json!({"input": "tree", "model": "judge"}), 400, "no embeddings"),
        ("/v1/embeddings", json!({"input": "tree", "model": "large"}), 404, "large"),
        ("/v1/rerank", json!({"query": "tree", "documents": ["winter"], "model": "small"}), 400, "reranker"),
        ("/v1/rerank", json!({"documents": ["winter"]}), 400, "query"),
        // A model that writes nothing says which route it is for.
        ("/v1/completions", json!({"prompt": "tree"}), 400, "/v1/embeddings"),
        (
            "/v1/chat/completions",
            json!({"model": "small", "messages": []}),
            400,
            "send `input` to /v1/embeddings",
        ),
        ("/v1/messages", json!({"model": "judge", "max_tokens": 1}), 400, "/v1/rerank"),
        ("/v1/chat/completions", json!({"model": "large", "messages": []}), 404, "large"),
    ] {
        let answer = server.post(path, &body);
        assert!(answer.status == status && answer.body.contains(what), "{path} {body}: {}", answer.body);
    }
}

/// Formats of plain numbers by the reference, packed ones by the graph that the artifact carries.
#[test]
fn verify_holds_texts_against_their_reference() {
    let folder = tempfile::tempdir().unwrap();
    let golden = |case: &str| directory(case).join("golden.json").to_str().unwrap().to_string();
    let backend = backends().next().unwrap();
    for (case, quant, judged) in [
        ("rerank-bert", "f32", "within the tolerance"),
        ("embed-gemma", "f16", "within the tolerance"),
        ("rerank-bert", "q4f16_1", "kernels against the graph"),
        ("embed-bert", "q8i8", "kernels against the graph"),
    ] {
        let so = artifact(&options(case, quant, backend), folder.path(), "case.so").0;
        let so = so.to_str().unwrap();
        let (ok, out, err) = mlcc(&["verify", so, "--golden", &golden(case)], "");
        assert!(ok && out.contains(judged) && out.contains("bit-identical alone"), "{case}: {out}{err}");
        let (ok, out, _) = mlcc(&["verify", so, "--golden", &golden(case), "--tolerance", "0"], "");
        assert!(!ok && (out.contains("NOT within") || out.contains("WRONG")), "{case}: {out}");
        let (ok, out, _) = mlcc(&["verify", so, "--golden", &golden(case), "--json"], "");
        let outcome: serde_json::Value = serde_json::from_str(&out).unwrap();
        assert!(ok && outcome["ok"] == true && outcome["same_alone"] == true, "{out}");
        let other = if case.starts_with("embed") { "rerank-xlmr" } else { "embed-qwen3" };
        for (other, what) in [(other, "do not match"), ("qwen2", "missing field `inputs`")] {
            let (ok, _, err) = mlcc(&["verify", so, "--golden", &golden(other)], "");
            assert!(!ok && err.contains(what), "{case}: {err}");
        }
    }
}
