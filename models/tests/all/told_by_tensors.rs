//! What config.json leaves out is read off the tensors, and what it says otherwise is refused with both named.

use crate::common::{self, golden};
use mlcc_models::{Checkpoint, ModelConfig, ModelRequest, ResolvedModel, resolve};
use serde_json::{Map, Value, json};
use std::fmt::Write;
use std::path::Path;

/// A model folder with random weights of these tensors, under the names that `stored` gives; `turned` says which matrices
/// are stored as their transposes.
fn write(dir: &Path, config: &Value, of: &ModelConfig, stored: fn(&str) -> String, turned: fn(&str) -> bool) {
    let architecture = &of.architecture;
    let (mut header, mut data) = (String::new(), Vec::new());
    for (name, shape) in architecture.tensor_shapes() {
        let distribution = architecture.distribution(&name, &shape);
        let one = Checkpoint::random(7, vec![(name.clone(), shape.clone(), distribution)]).unwrap();
        let values = one.read(&name).unwrap().to_f32().unwrap();
        let name = stored(&name);
        let (mut shape, mut order) = (shape, (0..values.len()).collect::<Vec<_>>());
        if turned(&name) {
            let [rows, columns] = [shape[0], shape[1]];
            order = (0..columns).flat_map(|c| (0..rows).map(move |r| r * columns + c)).collect();
            shape.reverse();
        }
        let begin = data.len();
        data.extend(order.into_iter().flat_map(|i| values[i].to_le_bytes()));
        let (comma, range) = (if header.is_empty() { "" } else { "," }, [begin, data.len()]);
        write!(header, r#"{comma}"{name}":{{"dtype":"F32","shape":{shape:?},"data_offsets":{range:?}}}"#)
            .unwrap();
    }
    std::fs::write(dir.join("model.safetensors"), common::safetensors(&format!("{{{header}}}"), &data))
        .unwrap();
    if config.is_object() {
        std::fs::write(dir.join("config.json"), config.to_string()).unwrap();
    }
}

fn open(dir: &Path) -> Result<ResolvedModel, String> {
    let model = resolve::resolve(&ModelRequest::new(dir.to_str().unwrap())).map_err(|e| e.to_string())?;
    model.open_weights().map_err(|e| e.to_string())?;
    Ok(model)
}

fn joined(parts: &[&Value]) -> Value {
    let fields = parts.iter().flat_map(|part| part.as_object().unwrap().clone());
    Value::Object(fields.collect::<Map<_, _>>())
}

fn parse(config: &Value) -> ModelConfig {
    ModelConfig::parse("config.json", config.to_string().as_bytes()).unwrap()
}

/// What published files say, and what they leave out; none of the latter is what the class would take for granted.
fn published() -> Vec<(Value, Value)> {
    let rwkv =
        |kind: &str| json!({"model_type": kind, "vocab_size": 40, "hidden_size": 64, "num_hidden_layers": 2});
    let heads = |kind: &str| {
        json!({"model_type": kind, "vocab_size": 40, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
               "max_position_embeddings": 64})
    };
    let gpt = |kind: &str| {
        json!({"model_type": kind, "vocab_size": 40, "n_embd": 32, "n_layer": 1, "n_head": 4, "n_positions": 64,
               "n_inner": null})
    };
    let llama = |kind: &str, rest: Value| {
        let odd = json!({"head_dim": 16, "num_key_value_heads": 2, "intermediate_size": 52, "tie_word_embeddings": true});
        (heads(kind), joined(&[&odd, &rest]))
    };
    vec![
        (rwkv("rwkv"), json!({"attention_hidden_size": 96, "intermediate_size": 80})),
        (rwkv("rwkv5"), json!({"head_size": 16, "intermediate_size": 80, "attention_hidden_size": 96})),
        (
            rwkv("rwkv6"),
            json!({"head_size": 32, "intermediate_size": 80, "time_mix_extra_dim": 7, "time_decay_extra_dim": 11}),
        ),
        (
            rwkv("rwkv7"),
            json!({"head_dim": 32, "intermediate_size": 80, "decay_low_rank_dim": 5, "a_low_rank_dim": 6,
                   "v_low_rank_dim": 7, "gate_low_rank_dim": 9}),
        ),
        llama("llama", json!({"attention_bias": true, "mlp_bias": true})),
        llama("mistral", json!({})),
        llama("granite", json!({"attention_bias": true, "mlp_bias": true})),
        llama("qwen2", json!({})),
        llama("qwen3", json!({"attention_bias": true})),
        llama("olmo2", json!({"attention_bias": true})),
        llama("internlm", json!({"bias": false})),
        llama("stablelm", json!({"use_qkv_bias": true, "qk_layernorm": true, "use_parallel_residual": true})),
        (
            heads("starcoder2"),
            json!({"intermediate_size": 52, "use_bias": false, "num_key_value_heads": 2, "tie_word_embeddings": false}),
        ),
        llama("glm", json!({"attention_bias": false})),
        llama("phi3", json!({})),
        llama("internlm2", json!({"bias": false})),
        llama("gemma", json!({"tie_word_embeddings": false, "attention_bias": true})),
        llama("gemma2", json!({"tie_word_embeddings": false})),
        (
            joined(&[&heads("mixtral"), &json!({"num_experts_per_tok": 2})]),
            json!({"head_dim": 16, "num_key_value_heads": 2, "intermediate_size": 52, "num_local_experts": 3}),
        ),
        (
            json!({"model_type": "gemma3_text", "num_hidden_layers": 2, "max_position_embeddings": 64}),
            json!({"vocab_size": 40, "hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
                   "intermediate_size": 52}),
        ),
        (heads("baichuan"), json!({"intermediate_size": 52})),
        (gpt("gpt2"), json!({"n_inner": 40, "tie_word_embeddings": false})),
        (gpt("gpt_bigcode"), json!({"n_inner": 40, "multi_query": false})),
        (joined(&[&gpt("gptj"), &json!({"rotary_dim": 4})]), json!({"n_inner": 40})),
        (
            heads("gpt_neox"),
            json!({"intermediate_size": 40, "attention_bias": false, "tie_word_embeddings": true}),
        ),
        (
            heads("opt"),
            json!({"ffn_dim": 40, "enable_bias": false, "word_embed_proj_dim": 16, "max_position_embeddings": 30}),
        ),
        (
            heads("falcon"),
            json!({"ffn_hidden_size": 40, "new_decoder_architecture": true, "num_kv_heads": 2, "bias": true}),
        ),
        (
            heads("falcon"),
            json!({"multi_query": false, "parallel_attn": false, "tie_word_embeddings": false}),
        ),
        (heads("bloom"), json!({"tie_word_embeddings": false})),
        (
            json!({"model_type": "mpt", "vocab_size": 40, "d_model": 32, "n_layers": 1, "n_heads": 4, "max_seq_len": 64}),
            json!({"expansion_ratio": 3, "tie_word_embeddings": false}),
        ),
        (
            heads("chatglm"),
            json!({"ffn_hidden_size": 40, "multi_query_attention": true, "multi_query_group_num": 2, "add_bias_linear": true,
                   "post_layer_norm": false}),
        ),
    ]
}

#[test]
fn fields_that_are_left_out_are_read_off_the_tensors() {
    for (said, left_out) in published() {
        let full = parse(&joined(&[&said, &left_out]));
        let dir = tempfile::tempdir().unwrap();
        // Fields that are null are left out too.
        let mut config = said.clone();
        config.as_object_mut().unwrap().retain(|field, _| left_out.get(field).is_none());
        write(dir.path(), &config, &full, str::to_string, |_| false);
        let model = open(dir.path()).unwrap_or_else(|e| panic!("{said} without {left_out}: {e}"));
        assert_eq!(model.config.architecture.tensor_shapes(), full.architecture.tensor_shapes(), "{said}");
        assert_eq!(Value::Object(model.config.raw), config, "metadata has the file as it is");
    }
}

#[test]
fn fields_that_contradict_the_tensors_are_named_with_them() {
    for (said, left_out) in published() {
        let full = parse(&joined(&[&said, &left_out]));
        let dir = tempfile::tempdir().unwrap();
        write(dir.path(), &said, &full, str::to_string, |_| false);
        for (field, value) in left_out.as_object().unwrap() {
            let wrong = match value {
                Value::Bool(true) if field == "multi_query_attention" => continue,
                // A head that is tied is not read.
                Value::Bool(false) if field == "tie_word_embeddings" => continue,
                Value::Bool(flag) => Value::from(!flag),
                number => Value::from(2 * number.as_u64().unwrap()),
            };
            let config = joined(&[&said, &left_out, &json!({ field: wrong })]);
            std::fs::write(dir.path().join("config.json"), config.to_string()).unwrap();
            let error = open(dir.path()).expect_err("refused");
            // Of heads and their size, which are told by one product, the size is held to be wrong.
            let heads = field == "num_attention_heads";
            let named = if heads { "head_dim".to_string() } else { format!("`{field}` is {wrong}") };
            let parts = ["config.json and the tensors of", "contradict each other", &named, "tensor `"];
            for part in parts {
                assert!(error.contains(part), "{config}\nexpected `{part}` in: {error}");
            }
            assert!(error.lines().count() == 1, "{error}");
        }
    }
}

/// BlinkDL's names of the tensors of RWKV-6.
fn short_six(name: &str) -> String {
    let name = name.strip_prefix("rwkv.").unwrap_or(name);
    let name = name.replace("embeddings.", "emb.").replace("pre_ln", "ln0");
    name.replace(".attention.", ".att.").replace(".feed_forward.", ".ffn.")
}

/// The same of RWKV-7, for what is told by other tensors than their namesakes.
fn short_seven(name: &str) -> String {
    let mut name = name.replace("model.layers.", "blocks.").replace("model.embeddings", "emb");
    for (long, short) in [
        ("pre_norm", "ln0"),
        ("attn_norm", "ln1"),
        ("ffn_norm", "ln2"),
        ("model.norm", "ln_out"),
        ("lm_head", "head"),
        (".attn.", ".att."),
        ("r_proj", "receptance"),
        ("k_proj", "key"),
        ("v_proj", "value"),
        ("o_proj", "output"),
        ("g_norm", "ln_x"),
        ("_lora.lora.0.weight", "1"),
        ("_lora.lora.2.weight", "2"),
        ("_lora.lora.2.bias", "0"),
    ] {
        name = name.replace(long, short);
    }
    name
}

fn is_thin(name: &str) -> bool {
    name.contains(".att.")
        && name.rsplit('.').next().is_some_and(|part| part.len() == 2 && part.ends_with(['1', '2']))
}

#[test]
fn ranks_of_rwkv_are_the_same_under_both_namings() {
    type Case = (&'static str, fn(&str) -> String, fn(&str) -> bool);
    let cases: [Case; 2] = [("rwkv6", short_six, |_| false), ("rwkv7", short_seven, is_thin)];
    for (kind, short, turned) in cases {
        let (said, left_out) = published().into_iter().find(|(said, _)| said["model_type"] == kind).unwrap();
        let full = parse(&joined(&[&said, &left_out]));
        let folders = [(); 3].map(|()| tempfile::tempdir().unwrap());
        write(folders[0].path(), &said, &full, str::to_string, |_| false);
        write(folders[1].path(), &said, &full, short, turned);
        write(folders[2].path(), &Value::Null, &full, short, turned);
        let models = folders.each_ref().map(|dir| open(dir.path()).unwrap_or_else(|e| panic!("{kind}: {e}")));
        let [first, others @ ..] = models.each_ref().map(|model| model.open_weights().unwrap());
        for other in others {
            assert_eq!(other.tensors().len(), first.tensors().len());
            for info in first.tensors() {
                let [a, b] = [&first, &other].map(|c| c.read(&info.name).unwrap().to_f32().unwrap());
                assert_eq!(a, b, "{kind}: {}", info.name);
            }
        }
        for model in &models {
            assert_eq!(model.config.architecture.tensor_shapes(), full.architecture.tensor_shapes());
        }
    }
}

/// All reference cases, with every field that the tensors tell taken out.
#[test]
fn reference_cases_need_none_of_these_fields() {
    const TOLD: [&str; 28] = [
        "vocab_size",
        "padded_vocab_size",
        "hidden_size",
        "n_embd",
        "d_model",
        "intermediate_size",
        "n_inner",
        "ffn_dim",
        "ffn_hidden_size",
        "inner_hidden_size",
        "expansion_ratio",
        "head_dim",
        "kv_channels",
        "num_key_value_heads",
        "num_kv_heads",
        "head_size",
        "attention_hidden_size",
        "time_mix_extra_dim",
        "time_decay_extra_dim",
        "decay_low_rank_dim",
        "a_low_rank_dim",
        "v_low_rank_dim",
        "gate_low_rank_dim",
        "moe_intermediate_size",
        "num_experts",
        "num_local_experts",
        "tie_word_embeddings",
        "attention_bias",
    ];
    let cases = std::fs::read_dir(golden("")).unwrap().map(|entry| entry.unwrap().path());
    let cases = cases.filter(|dir| dir.join("config.json").exists());
    let mut seen = 0;
    for case in cases {
        let whole = open(&case).unwrap();
        let dir = tempfile::tempdir().unwrap();
        let mut config = whole.config.raw.clone();
        // Where all layers have experts, no tensor has the width of the others.
        let unused = config.contains_key("moe_intermediate_size");
        config.retain(|field, _| !TOLD.contains(&field.as_str()) || unused && field == "intermediate_size");
        std::fs::write(dir.path().join("config.json"), Value::Object(config).to_string()).unwrap();
        let mut request = ModelRequest::new(dir.path().to_str().unwrap());
        request.weights = Some(case.clone());
        let model = resolve::resolve(&request).unwrap_or_else(|e| panic!("{}: {e}", case.display()));
        assert_eq!(
            model.config.architecture.tensor_shapes(),
            whole.config.architecture.tensor_shapes(),
            "{}",
            case.display()
        );
        seen += 1;
    }
    assert!(seen > 30, "{seen} cases");
}

#[test]
fn a_copy_of_the_embedding_is_no_head_of_its_own() {
    let config = json!({"model_type": "gpt2", "vocab_size": 4, "n_embd": 4, "n_layer": 1, "n_head": 1, "n_positions": 8});
    let untied = parse(&joined(&[&config, &json!({"tie_word_embeddings": false})]));
    let dir = tempfile::tempdir().unwrap();
    write(dir.path(), &config, &untied, str::to_string, |_| false);
    let has_head = |model: &ResolvedModel| {
        model.config.architecture.tensor_shapes().iter().any(|(name, _)| name == "lm_head.weight")
    };
    assert!(has_head(&open(dir.path()).unwrap()));
    // The same file with the embedding's bytes in the place of the head's.
    let path = dir.path().join("model.safetensors");
    let checkpoint = open(dir.path()).unwrap().open_weights().unwrap();
    let bytes = |name: &str| -> Vec<u8> {
        let values = checkpoint.read(name).unwrap().to_f32().unwrap();
        values.into_iter().flat_map(f32::to_le_bytes).collect()
    };
    let (table, head) = (bytes("transformer.wte.weight"), bytes("lm_head.weight"));
    let mut file = std::fs::read(&path).unwrap();
    let at = file.windows(head.len()).position(|window| window == head).unwrap();
    file[at..at + head.len()].copy_from_slice(&table);
    drop(checkpoint);
    std::fs::write(&path, file).unwrap();
    assert!(!has_head(&open(dir.path()).unwrap()));
}

#[test]
fn a_head_that_differs_is_used_although_the_flag_ties_it() {
    let sizes = json!({"vocab_size": 8, "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2,
        "num_key_value_heads": 1, "intermediate_size": 16, "max_position_embeddings": 8});
    let tied = json!({"tie_word_embeddings": true});
    let head = |model: &ResolvedModel| {
        model.config.architecture.tensor_shapes().iter().any(|(name, _)| name == "lm_head.weight")
    };
    for kind in ["llama", "qwen2", "qwen3", "granite", "gemma", "mistral"] {
        let config = joined(&[&sizes, &json!({"model_type": kind})]);
        let untied = parse(&joined(&[&config, &json!({"tie_word_embeddings": false})]));
        let dir = tempfile::tempdir().unwrap();
        write(dir.path(), &joined(&[&config, &tied]), &untied, str::to_string, |_| false);
        let model = open(dir.path()).unwrap();
        assert!(head(&model), "{kind}");
        let [warning] = &model.config.warnings[..] else { panic!("{kind}: {:?}", model.config.warnings) };
        assert!(warning.contains("lm_head.weight") && warning.contains("tie_word_embeddings"), "{warning}");
        // The JSON in the artifact stays as it was.
        assert_eq!(model.config.raw["tie_word_embeddings"], true);
        // A text model inside another one, whose flag stands outside.
        let outer = json!({"model_type": "mistral3", "tie_word_embeddings": true, "text_config": config});
        let dir = tempfile::tempdir().unwrap();
        write(dir.path(), &outer, &untied, |name| format!("language_model.{name}"), |_| false);
        let model = open(dir.path()).unwrap();
        assert!(head(&model) && model.config.warnings.len() == 1, "{kind} inside");
    }
}

#[test]
fn long_lists_of_tensors_are_cut() {
    let config = json!({"model_type": "gpt2", "vocab_size": 4, "n_embd": 4, "n_layer": 1, "n_head": 1, "n_positions": 8});
    let dir = tempfile::tempdir().unwrap();
    write(dir.path(), &config, &parse(&config), str::to_string, |_| false);
    let path = dir.path().join("model.safetensors");
    let file = std::fs::read(&path).unwrap();
    let length = u64::from_le_bytes(file[..8].try_into().unwrap()) as usize;
    let mut header: Map<String, Value> = serde_json::from_slice(&file[8..8 + length]).unwrap();
    for number in 0..5000 {
        header.insert(format!("odd{number}"), json!({"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}));
        header.insert(format!("odd.{number}"), json!({"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}));
    }
    header.insert("long".repeat(10_000), json!({"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}));
    std::fs::write(&path, common::safetensors(&Value::Object(header).to_string(), &file[8 + length..]))
        .unwrap();
    let error = open(dir.path()).unwrap_err();
    assert!(error.contains("not part of the model: odd.999 [0] (and 4999 more"), "{error}");
    assert!(error.contains(" others"), "{error}");
    assert!(error.len() < 5000 && error.lines().count() < 80, "{} bytes", error.len());
}

#[test]
fn links_to_nothing_are_named_with_their_targets() {
    let config = json!({"model_type": "gpt2", "vocab_size": 4, "n_embd": 4, "n_layer": 1, "n_head": 1, "n_positions": 8});
    for name in [
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer_config.json",
        "quantize_config.json",
        "modules.json",
    ] {
        let dir = tempfile::tempdir().unwrap();
        write(dir.path(), &config, &parse(&config), str::to_string, |_| false);
        let path = dir.path().join(name);
        let _ = std::fs::remove_file(&path);
        std::os::unix::fs::symlink("../../blobs/cleaned", &path).unwrap();
        let error = open(dir.path()).unwrap_err();
        assert!(error.contains(name) && error.contains("link to ../../blobs/cleaned"), "{name}: {error}");
    }
}

#[test]
fn t5_may_have_its_table_under_the_names_of_its_users() {
    let case = golden("t5");
    let table = "shared.weight";
    let values =
        |dir: &Path| open(dir).unwrap().open_weights().unwrap().read(table).unwrap().to_f32().unwrap();
    let expected = values(&case);
    let file = std::fs::read(case.join("model.safetensors")).unwrap();
    let length = u64::from_le_bytes(file[..8].try_into().unwrap()) as usize;
    let header: Map<String, Value> = serde_json::from_slice(&file[8..8 + length]).unwrap();
    for name in ["decoder.embed_tokens.weight", "encoder.embed_tokens.weight"] {
        let dir = tempfile::tempdir().unwrap();
        std::fs::copy(case.join("config.json"), dir.path().join("config.json")).unwrap();
        let mut header = header.clone();
        let entry = header.remove(table).unwrap();
        header.insert(name.to_string(), entry);
        let renamed = common::safetensors(&Value::Object(header).to_string(), &file[8 + length..]);
        std::fs::write(dir.path().join("model.safetensors"), renamed).unwrap();
        assert_eq!(values(dir.path()), expected, "{name}");
    }
}
