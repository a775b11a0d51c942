//! Configuration files, goldens, and the ways to name a model.

use crate::common::{golden, project, shared, tiny_books};
use mlcc_models::golden::{GoldenFile, PerplexityEvaluation};
use mlcc_models::presets::{Preset, all_presets};
use mlcc_models::resolve::{HubCache, ModelRequest, WeightSource, resolve};
use mlcc_models::{ModelConfig, Rwkv4Config};
use serde_json::{Value, json};
use std::path::Path;

const SMALL: &str = r#"{"model_type":"rwkv","vocab_size":320,"hidden_size":64,"num_hidden_layers":4}"#;

/// `SMALL` with one field replaced or added.
fn with(field: &str, value: &str) -> String {
    let mut fields: serde_json::Map<String, serde_json::Value> = serde_json::from_str(SMALL).unwrap();
    fields.insert(field.to_string(), serde_json::from_str(value).unwrap());
    serde_json::to_string(&fields).unwrap()
}

#[track_caller]
fn refused(json: &str, parts: &[&str]) {
    let error = ModelConfig::parse("dir/config.json", json.as_bytes()).expect_err("refused").to_string();
    for part in parts.iter().chain(&["dir/config.json"]) {
        assert!(error.contains(part), "expected `{part}` in: {error}");
    }
}

#[test]
fn defaults_are_those_of_transformers() {
    let config = ModelConfig::parse("x", SMALL.as_bytes()).unwrap();
    let rwkv: &Rwkv4Config = config.architecture.downcast_family().unwrap();
    assert_eq!((rwkv.attention_hidden, rwkv.intermediate), (64, 256));
    assert_eq!((rwkv.layer_norm_epsilon, rwkv.rescale_every, rwkv.context_length), (1e-5, 6, 1024));
    // As older converters write it.
    let nulls = with("intermediate_size", "null");
    let config = ModelConfig::parse("x", nulls.as_bytes()).unwrap();
    let rwkv: &Rwkv4Config = config.architecture.downcast_family().unwrap();
    assert_eq!(rwkv.intermediate, 256);
    assert!(config.raw.contains_key("vocab_size"));
}

#[test]
fn the_case_configurations_are_read_in_full() {
    let config = ModelConfig::read(&golden("rwkv4-hf-odd").join("config.json")).unwrap();
    let rwkv: &Rwkv4Config = config.architecture.downcast_family().unwrap();
    assert_eq!((rwkv.vocab, rwkv.hidden, rwkv.intermediate, rwkv.layers), (333, 96, 320, 3));
    assert_eq!((rwkv.bos_token_id, rwkv.eos_token_ids.as_slice()), (Some(0), &[0][..]));
}

#[test]
fn wrong_configurations_name_file_and_field() {
    refused("", &["not valid JSON"]);
    refused("[1]", &["expected an object, found a list of 1 elements"]);
    refused("{}", &["`model_type` is missing"]);
    refused(r#"{"model_type":7}"#, &["`model_type` should be a string, found 7"]);
    for field in ["vocab_size", "hidden_size", "num_hidden_layers"] {
        refused(&with(field, "null"), &[&format!("`{field}` is missing")]);
        for bad in ["0", "-1", "1.5", "\"64\"", "[64]", "true", "1e30", "18446744073709551615"] {
            refused(&with(field, bad), &[&format!("`{field}` should be")]);
        }
    }
    for field in ["attention_hidden_size", "intermediate_size", "rescale_every", "context_length"] {
        refused(&with(field, "\"a\""), &[&format!("`{field}` should be an integer")]);
    }
    refused(&with("num_hidden_layers", "1000000"), &["at most 1000"]);
    for bad in ["0", "-1e-5", "2", "\"1e-5\""] {
        refused(&with("layer_norm_epsilon", bad), &["`layer_norm_epsilon` should be"]);
    }
    refused(&with("eos_token_id", "-1"), &["`eos_token_id` should be a token id"]);
    refused(&with("tie_word_embeddings", "true"), &["tie_word_embeddings", "not supported yet"]);
    refused(&with("tie_word_embeddings", "1"), &["true or false, found 1"]);
}

#[test]
fn other_models_are_named_with_what_is_supported() {
    refused(r#"{"model_type":"whisper"}"#, &["`whisper` is unknown", "`mlcc models`"]);
    refused(r#"{"model_type":"qwen_3"}"#, &["did you mean `qwen3`, `qwen", "`mlcc models`"]);
    refused(r#"{"model_type":"rwkv6"}"#, &["`hidden_size` is missing"]);
    refused(&with("rwkv_version", "5.2"), &["RWKV version 5.2 is not supported yet"]);
    refused(&with("rwkv_version", "\"4\""), &["`rwkv_version` should be a number"]);
    ModelConfig::parse("x", with("rwkv_version", "4").as_bytes()).unwrap();
}

#[test]
fn other_models_without_configuration_are_refused() {
    let Some(shared) = shared() else { return };
    let dir = tempfile::tempdir().unwrap();
    let llama = shared.join("goldens/llama-mha/model.safetensors");
    std::fs::copy(llama, dir.path().join("model.safetensors")).unwrap();
    let error = resolve(&ModelRequest::new(dir.path().to_str().unwrap())).unwrap_err().to_string();
    assert!(error.contains("emb.weight") && error.contains("config.json"), "{error}");
}

#[test]
fn goldens_and_evaluations_are_read_in_full() {
    let later = ["rwkv5-hf", "rwkv6-hf", "rwkv7-hf"].map(golden);
    for dir in
        [golden("rwkv4-hf"), golden("rwkv4-hf-odd"), golden("rwkv4-pth"), tiny_books()].iter().chain(&later)
    {
        let golden = GoldenFile::read(&dir.join("golden.json")).unwrap();
        assert!(golden.prompts.len() >= 3);
        let prompt = &golden.prompts[0];
        assert!(prompt.greedy.len() >= 32);
        assert_eq!(prompt.binding_greedy(1e-4).len(), prompt.greedy.len());
        assert!(prompt.binding_greedy(10.0).is_empty());
    }
    let evaluation = PerplexityEvaluation::read(&tiny_books().join("eval.json")).unwrap();
    assert_eq!((evaluation.context_length, evaluation.stride, evaluation.valid_tokens), (256, 256, 26635));
    assert_eq!(evaluation.results["q4_g32"].tokens_scored, 26520);
    let Some(shared) = shared() else { return };
    for entry in std::fs::read_dir(shared.join("goldens")).unwrap() {
        let file = entry.unwrap().path().join("golden.json");
        if file.is_file() {
            GoldenFile::read(&file).unwrap();
        }
    }
}

#[test]
fn inconsistent_goldens_are_refused() {
    let json = |prompts: &str| format!(r#"{{"source":"s","file_dtype":"float32","prompts":[{prompts}]}}"#);
    let prompt = r#"{"input_ids":[1,2],"logits_last":[0.5,1.5],"argmax_all_positions":[1,0],"greedy":[1],"greedy_margin":[0.5]}"#;
    GoldenFile::parse("g.json", json(prompt).as_bytes()).unwrap();
    let refused = |from: &str, to: &str, part: &str| {
        let error = GoldenFile::parse("g.json", json(&prompt.replace(from, to)).as_bytes())
            .expect_err("refused")
            .to_string();
        assert!(error.contains("g.json") && error.contains(part), "{error}");
    };
    refused("[1,2]", "[]", "prompts[0].input_ids");
    refused("[0.5,1.5]", "[]", "prompts[0].logits_last");
    refused("[1,0]", "[1]", "argmax_all_positions` should be 2 values, found 1");
    refused("[0.5]}", "[]}", "greedy_margin");
    refused(r#""greedy":[1],"#, "", "greedy");
    let error = GoldenFile::parse("g.json", json("").as_bytes()).unwrap_err().to_string();
    assert!(error.contains("at least one prompt"), "{error}");
}

/// A request whose cache is in `dir`, whatever the environment of the test.
fn request(model: &str, dir: &Path) -> ModelRequest {
    ModelRequest { cache: HubCache { directory: dir.join("hub") }, ..ModelRequest::new(model) }
}

#[track_caller]
fn not_resolved(request: &ModelRequest, parts: &[&str]) {
    let error = resolve(request).expect_err("not found").to_string();
    for part in parts {
        assert!(error.contains(part), "expected `{part}` in: {error}");
    }
}

#[test]
fn directories_bring_their_files() {
    let dir = tempfile::tempdir().unwrap();
    let model = resolve(&request(tiny_books().to_str().unwrap(), dir.path())).unwrap();
    assert_eq!(model.name, "rwkv4-tiny-books");
    let files = &model.files;
    assert_eq!(files.directories, [tiny_books()]);
    assert!(files.tokenizer_config.is_some() && files.generation_config.is_some());
    assert_eq!((files.chat_template.as_ref(), files.chat_template_json.as_ref()), (None, None));
    // A relative path with dots still has a name.
    let dots = project().join("assets/../assets/rwkv4-tiny-books/.");
    assert_eq!(resolve(&request(dots.to_str().unwrap(), dir.path())).unwrap().name, "rwkv4-tiny-books");
}

#[test]
fn presets_have_the_published_sizes() {
    // Table of models in "RWKV: Reinventing RNNs for the Transformer Era", arXiv 2305.13048.
    let published = [
        ("rwkv-169m", "1.693e8"),
        ("rwkv-430m", "4.304e8"),
        ("RWKV-1b5", "1.515e9"),
        ("rwkv-3b", "2.985e9"),
        ("rwkv-7b", "7.393e9"),
        ("rwkv-14b", "1.415e10"),
        // "Eagle and Finch", arXiv 2404.05892, and "RWKV-7 Goose", arXiv 2503.14456.
        ("rwkv5-1b5", "1.578e9"),
        ("rwkv5-3b", "3.063e9"),
        ("rwkv5-7b", "7.518e9"),
        ("rwkv6-1b6", "1.600e9"),
        ("rwkv6-3b", "3.100e9"),
        ("rwkv6-7b", "7.636e9"),
        ("rwkv7-0.1b", "1.910e8"),
        ("rwkv7-0.4b", "4.508e8"),
        ("rwkv7-1b5", "1.527e9"),
        ("rwkv7-2.9b", "2.948e9"),
        // Parameter counts of the repositories' safetensors, or of the papers.
        ("tinyllama-1.1b", "1.100e9"),
        ("llama-2-7b", "6.738e9"),
        ("llama-3-8b", "8.030e9"),
        ("llama-3.2-1b", "1.236e9"),
        ("mistral-7b", "7.242e9"),
        ("mixtral-8x7b", "4.670e10"),
        ("qwen2.5-0.5b", "4.940e8"),
        ("qwen2.5-1.5b", "1.544e9"),
        ("qwen2.5-7b", "7.616e9"),
        ("qwen3-0.6b", "5.960e8"),
        ("qwen3-1.7b", "1.721e9"),
        ("qwen3-8b", "8.191e9"),
        ("qwen3-30b-a3b", "3.053e10"),
        ("qwen-7b", "7.721e9"),
        ("gemma-2-2b", "2.614e9"),
        ("gemma-3-1b", "9.999e8"),
        ("phi-3-mini", "3.821e9"),
        ("olmo-2-7b", "7.299e9"),
        ("starcoder2-3b", "3.030e9"),
        ("stablelm-2-1.6b", "1.645e9"),
        ("gpt2", "1.244e8"),
        ("gpt2-medium", "3.548e8"),
        ("starcoderbase-1b", "1.137e9"),
        ("gpt-j-6b", "6.051e9"),
        ("pythia-410m", "4.053e8"),
        ("gpt-neox-20b", "2.055e10"),
        ("opt-125m", "1.252e8"),
        ("bloom-560m", "5.592e8"),
        ("falcon-7b", "6.922e9"),
        ("mpt-7b", "6.649e9"),
        ("glm-4-9b", "9.400e9"),
        ("chatglm-6b", "6.708e9"),
        ("chatglm2-6b", "6.244e9"),
        ("baichuan2-7b", "7.506e9"),
        ("baichuan2-13b", "1.390e10"),
        ("internlm2-7b", "7.738e9"),
        ("smollm3-3b", "3.075e9"),
        ("gpt-oss-20b", "2.091e10"),
        ("lfm2-1.2b", "1.170e9"),
        ("qwen3.5-35b-a3b", "3.466e10"),
        ("glm-4.7-flash", "2.994e10"),
        // 567,754,752 less the pooler (1,049,600), which embeddings do not use.
        ("bge-m3", "5.667e8"),
        ("qwen3-embedding-0.6b", "5.958e8"),
        // Sizes of github.com/state-spaces/mamba, README.md, and of the classes' defaults in transformers, which stand for these.
        ("mamba-130m", "1.291e8"),
        ("mamba-2.8b", "2.768e9"),
        ("t5-small", "6.051e7"),
        ("t5-base", "2.229e8"),
        ("t5-large", "7.377e8"),
        ("t5-3b", "2.852e9"),
        ("flan-t5-small", "7.696e7"),
        ("flan-t5-base", "2.476e8"),
        ("flan-t5-large", "7.832e8"),
        ("flan-t5-xl", "2.850e9"),
        ("flan-t5-xxl", "1.114e10"),
        ("mt5-small", "3.002e8"),
        ("mt5-base", "5.824e8"),
        ("olmo-hybrid-7b", "7.431e9"),
        ("mistral-small-4-119b", "1.190e11"),
        // Text models alone, without towers and draft heads. Sizes: Qwen 3.5 from configurations of fine-tuned copies on huggingface.co
        // (KnowledgeXLab/ComActor-9B, coderofpears/ClankerCode-Checkpoint1) and of Qwen/Qwen3.5-0.8B itself; Gemma 4 from keras-hub and
        // Ollama's metadata of gemma4:26b (the card: 25.2B); LFM2-8B-A1B from vLLM's configs (8.3B); Granite from Ollama's metadata of
        // granite4:tiny-h (7B); Nemotron from nemotron3_jax (31.6B); Ministral from baidu/ERNIE-Image, which has its decoder (3.4B); Kimi
        // from its config.json as vllm.cpp cites it (49B).
        ("qwen3.5-0.8b", "7.524e8"),
        ("qwen3.5-4b", "4.206e9"),
        ("qwen3.5-9b", "8.954e9"),
        ("gemma-4-e2b", "4.629e9"),
        ("gemma-4-26b-a4b", "2.523e10"),
        ("lfm2-8b-a1b", "8.340e9"),
        ("granite-4.0-h-tiny", "6.939e9"),
        ("nemotron-3-nano-30b-a3b", "3.158e10"),
        ("ministral-3-3b", "3.429e9"),
        ("kimi-linear-48b-a3b", "4.912e10"),
    ];
    for (name, parameters) in published {
        let tensors = Preset::from_name(name).unwrap().model_config().architecture.tensor_shapes();
        let elements: usize = tensors.iter().map(|(_, shape)| shape.iter().product::<usize>()).sum();
        assert_eq!(format!("{:.3e}", elements as f64), parameters, "{name}");
    }
    let rwkv = |name: &str| name.to_ascii_lowercase().starts_with("rwkv");
    let (known, stated) =
        (all_presets().filter(|p| rwkv(p.name)).count(), published.iter().filter(|(n, _)| rwkv(n)).count());
    assert_eq!(known, stated);
    // The configurations of all presets are read.
    assert!(all_presets().all(|preset| preset.model_config().architecture.context_length() >= 1024));
    assert_eq!(Preset::from_name("rwkv-2b"), None);
}

#[test]
fn presets_find_weights_or_say_how_to_get_them() {
    let dir = tempfile::tempdir().unwrap();
    let mut preset = request("rwkv-3b", dir.path());
    not_resolved(&preset, &["rwkv-3b", "RWKV/rwkv-4-3b-pile", "--weights DIR", "--random-weights SEED"]);
    preset.random_weights = Some(1);
    let model = resolve(&preset).unwrap();
    assert_eq!((model.name.as_str(), &model.weights), ("rwkv-3b", &WeightSource::Random { seed: 1 }));
    // --weights: the tensors are those of another model, and the error says which.
    preset.random_weights = None;
    preset.weights = Some(golden("rwkv4-hf"));
    let error = resolve(&preset).unwrap().open_weights().unwrap_err().to_string();
    for part in ["head.weight, expected [50277, 2560], found [320, 64]", "missing: rwkv.blocks.31.ln1.weight"]
    {
        assert!(error.contains(part), "expected `{part}` in: {error}");
    }
    preset.weights = Some(dir.path().join("nowhere"));
    not_resolved(&preset, &["nowhere", "--weights takes"]);
}

fn fill_cache(dir: &Path, repo: &str, commit: &str, reference: &str) {
    let root = dir.join("hub").join(format!("models--{}", repo.replace('/', "--")));
    let snapshot = root.join("snapshots").join(commit);
    std::fs::create_dir_all(&snapshot).unwrap();
    std::fs::create_dir_all(root.join("refs")).unwrap();
    std::fs::write(root.join("refs/main"), reference).unwrap();
    for name in ["config.json", "model.safetensors"] {
        std::fs::copy(golden("rwkv4-hf").join(name), snapshot.join(name)).unwrap();
    }
}

#[test]
fn the_hugging_face_cache_is_found_under_every_spelling() {
    let dir = tempfile::tempdir().unwrap();
    not_resolved(
        &request("org/tiny", dir.path()),
        &["`org/tiny` is not in the Hugging Face cache", "no directory or file"],
    );
    fill_cache(dir.path(), "org/tiny", "abc123", "abc123\n");
    for spelling in ["org/tiny", "hf:org/tiny", "HF://org/tiny", "hf://org/tiny@main", "org/tiny@abc123"] {
        let model = resolve(&request(spelling, dir.path())).unwrap();
        assert_eq!(model.name, "tiny", "{spelling}");
        model.open_weights().unwrap();
    }
    not_resolved(&request("hf:org/other", dir.path()), &["org/other", "hf download org/other"]);
    not_resolved(&request("hf:org/tiny@v2", dir.path()), &["`org/tiny@v2` is not in the Hugging Face cache"]);
    // A preset whose repository is in the cache.
    fill_cache(dir.path(), "RWKV/rwkv-4-169m-pile", "def", "def");
    assert_eq!(resolve(&request("rwkv-169m", dir.path())).unwrap().name, "rwkv-169m");
}

#[test]
fn broken_caches_are_named() {
    let dir = tempfile::tempdir().unwrap();
    fill_cache(dir.path(), "org/gone", "abc", "def");
    not_resolved(&request("org/gone", dir.path()), &["org/gone", "no snapshot", "Download it again"]);
    fill_cache(dir.path(), "RWKV/rwkv-4-430m-pile", "abc", "def");
    not_resolved(&request("rwkv-430m", dir.path()), &["RWKV/rwkv-4-430m-pile", "no snapshot"]);
    fill_cache(dir.path(), "org/evil", "abc", "../../../etc");
    not_resolved(&request("org/evil", dir.path()), &["does not name a commit"]);
}

#[test]
fn arguments_that_lead_nowhere() {
    let dir = tempfile::tempdir().unwrap();
    for model in ["", "nothing-here", "/no/such/dir", "./x", "hf:", "hf:only-org", "a/b/c"] {
        not_resolved(&request(model, dir.path()), &["does not exist", "`mlcc models`", "hf:org/repo"]);
    }
    let text = dir.path().join("notes.txt");
    std::fs::write(&text, "x").unwrap();
    not_resolved(&request(text.to_str().unwrap(), dir.path()), &["does not have the name of a weight file"]);
    std::fs::write(dir.path().join("config.json"), SMALL).unwrap();
    not_resolved(&request(dir.path().to_str().unwrap(), dir.path()), &["no weights in"]);
    // Configuration alone is enough for random weights.
    let random =
        ModelRequest { random_weights: Some(0), ..request(dir.path().to_str().unwrap(), dir.path()) };
    assert_eq!(resolve(&random).unwrap().open_weights().unwrap().tensors().len(), 78);
}

/// The folder of a reference case whose config.json also has these fields.
fn with_fields(dir: &Path, fields: Value) {
    let case = golden("rwkv4-hf");
    let mut config = ModelConfig::read(&case.join("config.json")).unwrap().raw;
    config.extend(fields.as_object().unwrap().clone());
    std::fs::write(dir.join("config.json"), Value::Object(config).to_string()).unwrap();
    std::fs::copy(case.join("model.safetensors"), dir.join("model.safetensors")).unwrap();
}

#[test]
fn weights_that_another_program_quantized_are_named() {
    let kinds = [
        (json!({"quant_method": "awq", "bits": 3, "group_size": 128}), "with AWQ, 3 bits"),
        (
            json!({"quant_method": "awq", "bits": 4, "version": "GEMV"}),
            "with AWQ, 4 bits in the layout `gemv`",
        ),
        (json!({"quant_method": "gptq", "bits": 3}), "with GPTQ, 3 bits"),
        (json!({"quant_method": "gptq", "checkpoint_format": "marlin"}), "with GPTQ in the layout `marlin`"),
        (
            json!({"quant_method": "compressed-tensors", "format": "marlin-24"}),
            "with compressed-tensors (llm-compressor) in the layout `marlin-24`",
        ),
        (json!({"config_groups": {"a": {"format": "tomorrow"}}}), "in the layout `tomorrow`"),
        (
            json!({"config_groups": {}, "sparsity_config": {"format": "sparse-24-bitmask"}}),
            "`sparse-24-bitmask`",
        ),
        (
            json!({"config_groups": {}, "transform_config": {"config_groups": {"u": {}}}}),
            "and transforms of activations",
        ),
        (json!({"quant_method": "modelopt", "quant_algo": "W4A8_AWQ"}), "in the layout `w4a8_awq`"),
        (json!({"quant_method": "modelopt"}), "no `quant_algo`"),
        (json!({"quant_method": "quanto"}), "with Quanto"),
        (json!({"quant_method": "HQQ", "nbits": 2}), "with HQQ, 2 bits"),
        (json!({"quant_method": "tomorrow\n"}), "with `tomorrow`, a method that is not known"),
        (json!({"quant_method": 3}), "`quant_method` is a number, not a string"),
        (json!({"quant_method": null}), "no `quant_method` that would say how"),
        (json!({}), "no `quant_method` that would say how"),
        (json!("awq"), "the field is a string, not an object"),
        (json!([]), "the field is a list, not an object"),
        (json!(false), "the field is true or false, not an object"),
    ];
    let dir = tempfile::tempdir().unwrap();
    for (entry, what) in kinds {
        for field in ["quantization_config", "compression_config"] {
            let nested = json!({"text_config": {field: entry}});
            for (fields, file) in
                [(json!({field: entry}), "config.json:"), (nested, "config.json, text_config:")]
            {
                with_fields(dir.path(), fields);
                let model = request(dir.path().to_str().unwrap(), dir.path());
                let named = format!("(`{field}`)");
                let advice = ["Supported: AWQ", "NVFP4", "Use the unquantized checkpoint", "--quant"];
                not_resolved(
                    &model,
                    &[&[file, "the weights are quantized", what, &named], &advice[..]].concat(),
                );
                let error = resolve(&model).unwrap_err().to_string();
                assert_eq!(error.lines().count(), 1, "{error}");
            }
        }
    }
}

#[test]
fn quantization_is_that_of_the_weights_in_use() {
    let (dir, other) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    for null in ["quantization_config", "compression_config"] {
        with_fields(dir.path(), json!({null: null, "text_config": {null: null}}));
        resolve(&request(dir.path().to_str().unwrap(), dir.path())).unwrap().open_weights().unwrap();
    }
    // Random weights have no quantization, and those of another folder have its own.
    with_fields(dir.path(), json!({"quantization_config": {"quant_method": "quanto"}}));
    with_fields(other.path(), json!({}));
    let mut model = request(dir.path().to_str().unwrap(), dir.path());
    model.random_weights = Some(1);
    resolve(&model).unwrap();
    model.random_weights = None;
    model.weights = Some(other.path().to_path_buf());
    resolve(&model).unwrap().open_weights().unwrap();
    let mut model = request(other.path().to_str().unwrap(), dir.path());
    model.weights = Some(dir.path().join("model.safetensors"));
    not_resolved(&model, &["quantized with Quanto"]);
    // A model that is not known would not be read without the quantization either.
    with_fields(
        dir.path(),
        json!({"model_type": "tomorrow", "architectures": null, "quantization_config": {"quant_method": "aqlm"}}),
    );
    not_resolved(&request(dir.path().to_str().unwrap(), dir.path()), &["`tomorrow` is unknown"]);
}

#[test]
fn models_with_parts_that_are_not_planned_are_named() {
    let dir = tempfile::tempdir().unwrap();
    let cases = [
        (json!({"model_type": "deepseek_v32", "index_topk": 2048}), "an indexer (`index_topk`)"),
        (json!({"model_type": "deepseek_v4", "hc_mult": 4}), "hyper-connections (`hc_mult`)"),
        (json!({"model_type": "glm_moe_dsa", "index_topk": 2048}), "`glm_moe_dsa`"),
        (json!({"model_type": "qwen4_exp", "ngram_size": 3}), "a table of n-grams"),
        (json!({"model_type": "mistral_large4_text", "index_topk": 2048}), "`mistral_large4_text`"),
        (json!({"model_type": "gemma4_assistant"}), "a draft head"),
        (json!({"model_type": "gemma4_vision"}), "a tower for images"),
        (json!({"model_type": "gemma4_audio"}), "a tower for sounds"),
    ];
    for (mut fields, what) in cases {
        fields["architectures"] = Value::Null;
        with_fields(dir.path(), fields);
        let model = request(dir.path().to_str().unwrap(), dir.path());
        not_resolved(&model, &["config.json", what, "is not supported yet"]);
    }
}
