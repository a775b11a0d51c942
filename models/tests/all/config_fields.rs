//! The fields of the configuration classes of transformers: each is in a row of the table of what becomes of it, and what the row
//! says is so: other values of fields that are read make another model, those of others make none, or are refused by name.
//!
//! `data/config_fields.json` has the fields with their defaults, written by `tools/config_fields.py`.

use mlcc_models::ModelConfig;
use mlcc_models::config::published::TABLE;
use serde_json::{Map, Value, json};
use std::collections::BTreeMap;

const PUBLISHED: &str = include_str!("../data/config_fields.json");

type Fields = Map<String, Value>;

/// What other values of a field do.
#[derive(Debug, PartialEq, Eq, Clone, Copy)]
enum Effect {
    Changes,
    Refused,
    Nothing,
}

fn parse(fields: &Fields) -> Result<String, String> {
    let config = ModelConfig::parse("config.json", Value::Object(fields.clone()).to_string().as_bytes());
    config.map(|config| format!("{:?}", config.architecture)).map_err(|error| error.to_string())
}

/// Other values than this one.
fn others(value: &Value) -> Vec<Value> {
    match value {
        Value::Null => vec![json!(true), json!(8), json!(0.37), json!("relu"), json!("all"), json!(1)],
        Value::Bool(flag) => vec![json!(!flag)],
        Value::Number(number) if number.is_f64() => {
            let number = number.as_f64().unwrap();
            vec![json!(0.37), json!(number * 0.5 + 0.001), json!(number + 1.0)]
        }
        Value::Number(number) => {
            let number = number.as_u64().unwrap_or(0);
            let more = [number * 2, number / 2, number + 1, number.saturating_sub(1), 1, 2, 0];
            more.into_iter().filter(|&other| other != number).map(|other| json!(other)).collect()
        }
        Value::String(_) => ["relu", "gelu", "silu", "rope", "nope", "group_limited_greedy", "mean", "other"]
            .into_iter()
            .map(|other| json!(other))
            .filter(|other| other != value)
            .collect(),
        Value::Array(items) => {
            let mut rotated = items.clone();
            rotated.rotate_right(1.min(items.len()));
            let scaled: Vec<Value> =
                items.iter().map(|item| item.as_f64().map_or(json!("other"), |x| json!(x * 0.5))).collect();
            let ended: Vec<Value> =
                items.iter().map(|item| item.as_f64().map_or(json!("other"), |_| json!(0.5))).collect();
            vec![json!(rotated), json!(scaled), json!(ended), json!([1])]
        }
        Value::Object(fields) => {
            let mut deeper = fields.clone();
            for inner in deeper.values_mut().filter_map(Value::as_object_mut) {
                inner.insert("rope_theta".into(), json!(777.0));
            }
            let mut direct = fields.clone();
            direct.insert("rope_theta".into(), json!(777.0));
            vec![json!(direct), json!(deeper)]
        }
    }
}

fn effect(base: &Fields, field: &str) -> Effect {
    let usual = parse(base).unwrap_or_else(|error| panic!("{}: {error}", base["model_type"]));
    let mut found = Effect::Nothing;
    for other in others(base.get(field).unwrap_or(&Value::Null)) {
        let mut fields = base.clone();
        fields.insert(field.into(), other);
        match parse(&fields) {
            Ok(other) if other != usual => return Effect::Changes,
            Ok(_) => {}
            Err(message) if message.contains(&format!("`{field}`")) => found = Effect::Refused,
            Err(_) => {}
        }
    }
    found
}

/// Configurations to try other values in: the defaults, with what makes them whole or brings a field into play.
fn bases(model_type: &str, defaults: &Fields) -> Vec<Fields> {
    let more: Vec<Value> = match model_type {
        "lfm2_moe" => vec![json!({"layer_types": vec!["conv"; 32]})],
        "lfm2" => vec![json!({}), json!({"layer_types": null})],
        "glm4_moe" => vec![json!({"head_dim": 128}), json!({"head_dim": 128, "n_group": 4, "topk_group": 2})],
        "deepseek_v2" => vec![json!({"num_experts_per_tok": 6, "n_group": 4, "topk_group": 2,
            "topk_method": "group_limited_greedy"})],
        "glm4_moe_lite" | "mistral4" => vec![json!({}), json!({"n_group": 4, "topk_group": 2})],
        "kimi_linear" => vec![json!({}), json!({"num_expert_group": 4, "topk_group": 2})],
        "nemotron_h" => {
            let experts = json!({"layers_block_type": ["moe", "linear_attention", "full_attention", "mlp"],
                "n_routed_experts": 8, "n_group": 4, "topk_group": 2});
            vec![json!({}), experts]
        }
        "falcon" => vec![json!({}), json!({"new_decoder_architecture": true})],
        "falcon_h1" => vec![json!({}), json!({"mamba_rms_norm": true})],
        "granitemoehybrid" => vec![json!({}), json!({"position_embedding_type": "rope"})],
        "phi3" => {
            let factors = vec![1.5; 48];
            let long = json!({"rope_type": "longrope", "rope_theta": 10000.0, "short_factor": factors, "long_factor": factors});
            vec![json!({}), json!({"rope_parameters": long})]
        }
        "exaone4" => vec![json!({}), json!({"layer_types": null, "sliding_window_pattern": 3})],
        "qwen2" | "qwen3" | "qwen3_moe" => {
            let windowed = json!({"use_sliding_window": true, "sliding_window": 64, "layer_types": null, "max_window_layers": 4});
            let kinds = json!({"use_sliding_window": true, "sliding_window": 64});
            vec![json!({}), windowed, kinds]
        }
        "smollm3" => {
            let windowed = json!({"use_sliding_window": true, "sliding_window": 64, "layer_types": null});
            vec![json!({}), windowed, json!({"no_rope_layers": null})]
        }
        "modernbert" => vec![json!({}), json!({"architectures": ["ModernBertForSequenceClassification"]})],
        "gemma4_text" => vec![
            json!({}),
            json!({"enable_moe_block": true, "num_experts": 8, "top_k_experts": 2,
            "moe_intermediate_size": 64, "num_kv_shared_layers": 6, "per_layer_config": null}),
        ],
        _ => vec![json!({})],
    };
    let base = |more: Value| {
        let mut fields = defaults.clone();
        fields.insert("model_type".into(), json!(model_type));
        fields.extend(more.as_object().unwrap().clone());
        fields
    };
    more.into_iter().map(base).collect()
}

/// Rows of the table: what each field of a model type becomes.
fn table() -> BTreeMap<(&'static str, &'static str), &'static str> {
    let mut rows = BTreeMap::new();
    for line in TABLE.lines().filter(|line| !line.starts_with('#')) {
        let mut words = line.split_whitespace();
        let (model_type, kind) = (words.next().unwrap(), words.next().unwrap());
        for field in words {
            let name = field.split_once('=').map_or(field, |(name, _)| name);
            assert!(rows.insert((model_type, name), kind).is_none(), "{model_type}: `{name}` is in two rows");
        }
    }
    rows
}

#[test]
fn every_published_field_is_read_or_refused() {
    let published: Value = serde_json::from_str(PUBLISHED).unwrap();
    let (rows, mut wrong, mut used) = (table(), Vec::new(), Vec::new());
    for (model_type, class) in published["classes"].as_object().unwrap() {
        let defaults = class["fields"].as_object().unwrap();
        let bases = bases(model_type, defaults);
        // What stands around a text model has a class of its own, without sizes.
        let parts =
            defaults.get("hidden_size").or(defaults.get("d_model")).or(defaults.get("n_embd")).is_none();
        for field in defaults.keys() {
            let own = rows.get_key_value(&(model_type.as_str(), field.as_str()));
            let Some((row, kind)) = own.or(rows.get_key_value(&("*", field.as_str()))) else {
                wrong.push(format!("{model_type}: `{field}` is in no row"));
                continue;
            };
            used.push(*row);
            if parts {
                continue;
            }
            let effects: Vec<Effect> = bases.iter().map(|base| effect(base, field)).collect();
            let fits = match *kind {
                "read" => effects.iter().any(|&effect| effect != Effect::Nothing),
                "only" => effects.contains(&Effect::Refused) && !effects.contains(&Effect::Changes),
                "none" => effects.iter().all(|&effect| effect == Effect::Nothing),
                other => panic!("{other} is no kind of row"),
            };
            if !fits {
                wrong.push(format!(
                    "{model_type}: `{field}` is said to be `{kind}`, other values: {effects:?}"
                ));
            }
        }
    }
    let idle = rows.keys().filter(|row| !used.contains(row));
    wrong.extend(idle.map(|(model_type, field)| format!("{model_type}: no class has `{field}`")));
    assert!(wrong.is_empty(), "{} rows are wrong:\n{}", wrong.len(), wrong.join("\n"));
}
