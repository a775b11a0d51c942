//! Configurations of hybrids, experts and encoders that say something else than the tensors beside them, or name what nobody
//! knows: each is refused with the tensors, or with the field and what is known.

use crate::common::golden;
use mlcc_models::config::ConfigFields;
use mlcc_models::{ModelRequest, resolve};
use serde_json::{Map, Value, json};

/// The weights of a reference case with other fields, also of a text model inside.
#[track_caller]
fn refused(case: &str, changes: Value, parts: &[&str]) {
    let text = std::fs::read(golden(case).join("config.json")).unwrap();
    let mut fields: Map<String, Value> = ConfigFields::parse("config.json", &text).unwrap().raw;
    let inner = match fields.get_mut("text_config") {
        Some(Value::Object(inner)) => inner,
        _ => &mut fields,
    };
    inner.extend(changes.as_object().unwrap().clone());
    let dir = tempfile::tempdir().unwrap();
    std::fs::write(dir.path().join("config.json"), Value::Object(fields).to_string()).unwrap();
    let mut request = ModelRequest::new(dir.path().to_str().unwrap());
    request.weights = Some(golden(case));
    let opened = resolve::resolve(&request).and_then(|model| model.open_weights().map(drop));
    let Err(error) = opened else { panic!("{case} with {changes} is accepted") };
    let error = error.to_string();
    for part in parts {
        assert!(error.contains(part), "{case} with {changes}: expected `{part}` in: {error}");
    }
}

/// Layers that have convolutions or recurrences where the configuration has attention, and the other way round.
#[test]
fn kinds_of_layers() {
    refused(
        "lfm2",
        json!({ "full_attn_idxs": [1] }),
        &[
            "missing: model.layers.1.self_attn.q_proj.weight, expected [64, 64]",
            "missing: model.layers.2.conv.in_proj.weight",
            "not part of the model: model.layers.1.conv.",
        ],
    );
    let [linear, full] = ["linear_attention", "full_attention"];
    let swapped = json!({ "layer_types": [full, linear, linear, linear] });
    refused(
        "qwen3.5",
        swapped.clone(),
        &["missing: model.layers.0.self_attn.q_proj.weight", "missing: model.layers.3.linear_attn."],
    );
    refused("olmo-hybrid", swapped, &["missing: model.layers.0.self_attn.q_proj.weight"]);
    for case in ["qwen3.5", "olmo-hybrid"] {
        let one = json!({ "layer_types": [full] });
        refused(case, one, &["`layer_types`", "a list of 4 of", linear, full, "a list of 1"]);
    }
    refused(
        "kimi-linear",
        json!({ "linear_attn_config": { "full_attn_layers": [4], "kda_layers": [1, 2] } }),
        &["`full_attn_layers`", "each of the layers 1 to 4"],
    );
    let letters = |pattern: &str| json!({ "hybrid_override_pattern": pattern });
    refused("nemotron-h", letters("MEM*EX"), &["`hybrid_override_pattern`", "6 letters of M, *, - and E"]);
    refused("nemotron-h", letters("MEM*E"), &["`hybrid_override_pattern`", "MEM*E"]);
    refused(
        "nemotron-h",
        letters("MEM*-E"),
        &["missing: backbone.layers.4.mixer.up_proj.weight", "missing: backbone.layers.5.mixer.gate.weight"],
    );
}

#[test]
fn heads_in_groups() {
    let groups = |field: &str, count: usize| json!({ field: count });
    refused(
        "mamba2",
        groups("n_groups", 4),
        &["wrong shape: backbone.layers.0.mixer.in_proj.weight, expected [392, 64], found [328, 64]"],
    );
    refused(
        "granite4-hybrid",
        groups("mamba_n_groups", 2),
        &["wrong shape: model.layers.0.mamba.conv1d.weight, expected [160, 1, 4], found [128, 1, 4]"],
    );
    refused(
        "qwen3-next",
        groups("linear_num_key_heads", 4),
        &["wrong shape: model.layers.0.linear_attn.in_proj_qkvz.weight, expected [256, 48], found [192, 48]"],
    );
    refused("falcon-h1", groups("mamba_n_groups", 4), &["`mamba_n_groups`", "a divisor of mamba_n_heads"]);
    refused("qwen3.5", groups("num_key_value_heads", 3), &["num_key_value_heads"]);
}

#[test]
fn experts() {
    let contradicts = |case: &str, field: &str, tensor: &str| {
        let named = format!("`{field}` is 2");
        refused(case, json!({ field: 2 }), &["contradict each other", &named, tensor, "the same model"]);
    };
    contradicts("qwen3.5-moe", "num_experts", "mlp.gate.weight");
    contradicts("gemma4-moe", "num_experts", "router.proj.weight");
    contradicts("gpt-oss", "num_local_experts", "mlp.router.weight");
    contradicts("gpt-oss-mxfp4", "num_local_experts", "mlp.router.weight");
    contradicts("minimax-m2", "num_local_experts", "block_sparse_moe.gate.weight");
    refused(
        "nemotron-h",
        json!({ "n_routed_experts": 4 }),
        &[
            "wrong shape: backbone.layers.1.mixer.gate.weight, expected [4, 64], found [8, 64]",
            "not part of the model: backbone.layers.1.mixer.experts.4.down_proj.weight",
        ],
    );
    refused("glm4-moe", json!({ "num_experts_per_tok": 100 }), &["`num_experts_per_tok`", "at most", "8"]);
    refused("deepseek-v3", json!({ "n_routed_experts": 4 }), &["`n_group`", "among 4 experts"]);
}

/// Ways to route and to turn that nobody knows, with those that are known.
#[test]
fn names_that_nobody_knows() {
    refused("minimax-m2", json!({ "scoring_func": "softmax" }), &["`scoring_func`", "sigmoid", "softmax"]);
    refused(
        "kimi-linear",
        json!({ "moe_router_activation_func": "tanh" }),
        &["`moe_router_activation_func`", "sigmoid", "tanh"],
    );
    for case in ["qwen3.5", "gpt-oss", "glm4-moe-lite", "mistral4", "olmo3", "smollm3", "lfm2"] {
        let rope = json!({ "rope_type": "wave", "factor": 2.0, "rope_theta": 1e4 });
        refused(case, json!({ "rope_parameters": rope }), &["`rope_type`", "llama3, yarn, longrope", "wave"]);
    }
    for case in ["embed-modernbert", "gemma4-e"] {
        let kind = json!({ "rope_type": "wave", "factor": 2.0, "rope_theta": 1e4 });
        let kinds = json!({ "full_attention": kind, "sliding_attention": kind });
        refused(case, json!({ "rope_parameters": kinds }), &["`rope_type`", "yarn", "wave"]);
    }
}

#[test]
fn tables_of_encoders() {
    refused(
        "rerank-bert",
        json!({ "type_vocab_size": 3 }),
        &["wrong shape: embeddings.token_type_embeddings.weight, expected [3, 48], found [2, 48]"],
    );
    refused(
        "embed-nomic",
        json!({ "type_vocab_size": 0 }),
        &["not part of the model: embeddings.token_type_embeddings.weight"],
    );
    refused(
        "embed-bert",
        json!({ "max_position_embeddings": 32 }),
        &["wrong shape: embeddings.position_embeddings.weight, expected [32, 64], found [128, 64]"],
    );
}

/// Python's `Infinity` is a number as large as there is, where the reference has one; `NaN` is none.
#[test]
fn infinity_is_a_number_and_nan_is_none() {
    let limited = |limit: &str| {
        let text = std::fs::read_to_string(golden("mamba2").join("config.json")).unwrap();
        assert!(text.contains("Infinity"), "as Python writes it");
        let text = text.replace("Infinity", limit);
        mlcc_models::ModelConfig::parse("config.json", text.as_bytes()).map_err(|error| error.to_string())
    };
    assert_eq!(format!("{:?}", limited("Infinity")), format!("{:?}", limited("1.7976931348623157e308")));
    limited("Infinity").unwrap();
    let error = limited("-Infinity").unwrap_err();
    assert!(error.contains("`time_step_limit`") && error.contains("the smaller first"), "{error}");
    let error = limited("NaN").unwrap_err();
    assert!(error.contains("config.json is not valid JSON"), "{error}");
}

/// The weights of a case with further tensors, small ones of these names.
fn with_tensors(case: &str, names: &[&str]) -> Result<usize, String> {
    let bytes = std::fs::read(golden(case).join("model.safetensors")).unwrap();
    let length = u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
    let (header, data) = bytes[8..].split_at(length);
    let mut header: Map<String, Value> = serde_json::from_slice(header).unwrap();
    let mut data = data.to_vec();
    for name in names {
        let offsets = [data.len(), data.len() + 12];
        header.insert(name.to_string(), json!({ "dtype": "F16", "shape": [2, 3], "data_offsets": offsets }));
        data.extend([0; 12]);
    }
    let dir = tempfile::tempdir().unwrap();
    let file = crate::common::safetensors(&Value::Object(header).to_string(), &data);
    std::fs::write(dir.path().join("model.safetensors"), file).unwrap();
    std::fs::copy(golden(case).join("config.json"), dir.path().join("config.json")).unwrap();
    let opened = resolve::resolve(&ModelRequest::new(dir.path().to_str().unwrap()));
    let opened = opened.and_then(|model| model.open_weights());
    opened.map(|checkpoint| checkpoint.tensors().len()).map_err(|error| error.to_string())
}

/// Towers and draft heads in one file with the text model are left where they are, and nothing else is.
#[test]
fn towers_and_draft_heads_beside_the_text_model() {
    let parts =
        ["model.visual.merger.further.weight", "mtp.further.weight", "mtp.layers.7.mlp.gate_proj.weight"];
    for case in ["qwen3.5", "qwen3.5-moe"] {
        with_tensors(case, &parts).unwrap();
    }
    let audio = ["model.audio_tower.layers.9.attn.q_proj.weight", "model.vision_tower.further.weight"];
    with_tensors("gemma4-e", &audio).unwrap();
    // Layers behind the last one.
    let behind = ["model.layers.3.eh_proj.weight", "model.layers.3.self_attn.q_proj.weight"];
    for (case, layers) in [("deepseek-v3", 3), ("glm4-moe", 3)] {
        let names = behind.map(|name| name.replace(".3.", &format!(".{layers}.")));
        with_tensors(case, &names.each_ref().map(|name| name.as_str())).unwrap();
    }
    for name in ["model.layers.0.self_attn.extra.weight", "mtq.fc.weight"] {
        let error = with_tensors("qwen3.5", &[name]).unwrap_err();
        assert!(error.contains(&format!("not part of the model: {name} [2, 3]")), "{error}");
    }
}
