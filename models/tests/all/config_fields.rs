//! The fields of the configuration classes of transformers: each is in a row of the table of what becomes of it, and what the row
//! says is so: other values of fields that are read make another model, those of others make none, or are refused by name. A file
//! that leaves a field out is one that states the default of its class.
//!
//! `data/config_fields.json` has the fields with their defaults, written by `tools/config_fields.py`.

use mlcc_models::ModelConfig;
use mlcc_models::config::published::{COMMON_FIELDS, PublishedFields};
use mlcc_models::families;
use serde_json::{Map, Value, json};
use std::collections::BTreeMap;

const PUBLISHED: &str = include_str!("../data/config_fields.json");

type JsonFields = Map<String, Value>;

/// What other values of a field do.
#[derive(Debug, PartialEq, Eq, Clone, Copy)]
enum FieldEffect {
    Changes,
    Refused,
    Nothing,
}

fn parse(fields: &JsonFields) -> Result<String, String> {
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

fn effect(base: &JsonFields, field: &str) -> FieldEffect {
    let usual = parse(base).unwrap_or_else(|error| panic!("{}: {error}", base["model_type"]));
    let mut found = FieldEffect::Nothing;
    for other in others(base.get(field).unwrap_or(&Value::Null)) {
        let mut fields = base.clone();
        fields.insert(field.into(), other);
        match parse(&fields) {
            Ok(other) if other != usual => return FieldEffect::Changes,
            Ok(_) => {}
            Err(message) if message.contains(&format!("`{field}`")) => found = FieldEffect::Refused,
            Err(_) => {}
        }
    }
    found
}

/// Configurations to try other values in: the defaults, with what makes them whole or brings a field into play.
fn bases(model_type: &str, defaults: &JsonFields) -> Vec<JsonFields> {
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
    let own = families::variants().flat_map(|variant| {
        let PublishedFields { read, only, none } = variant.fields;
        [("read", read), ("only", only), ("none", none)].map(|(kind, list)| (variant.model_type, kind, list))
    });
    for (model_type, kind, list) in own.chain([("*", "none", COMMON_FIELDS)]) {
        for field in list.split_whitespace() {
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
            let effects: Vec<FieldEffect> = bases.iter().map(|base| effect(base, field)).collect();
            let fits = match *kind {
                "read" => effects.iter().any(|&effect| effect != FieldEffect::Nothing),
                "only" => effects.contains(&FieldEffect::Refused) && !effects.contains(&FieldEffect::Changes),
                "none" => effects.iter().all(|&effect| effect == FieldEffect::Nothing),
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

/// Fields that a file may not leave out: model types (`*` for all), fields, and why. They are refused by name.
static NEEDED: [(&[&str], &[&str], &str); 2] = [
    (
        &["*"],
        &[
            "hidden_size",
            "d_model",
            "n_embd",
            "vocab_size",
            "num_hidden_layers",
            "num_layers",
            "n_layer",
            "n_layers",
            "num_attention_heads",
            "num_heads",
            "n_head",
            "n_heads",
            "intermediate_size",
            "d_ff",
            "ffn_dim",
            "d_kv",
            "head_dim",
            "moe_intermediate_size",
            "shared_intermediate_size",
            "moe_shared_expert_intermediate_size",
            "shared_expert_intermediate_size",
            "num_experts",
            "num_local_experts",
            "n_routed_experts",
            "num_experts_per_tok",
            "num_experts_per_token",
            "kv_lora_rank",
            "qk_nope_head_dim",
            "qk_rope_head_dim",
            "v_head_dim",
            "mamba_n_heads",
            "mamba_d_head",
            "mamba_n_groups",
            "mamba_d_state",
            "mamba_d_conv",
            "mamba_num_heads",
            "mamba_head_dim",
            "n_groups",
            "ssm_state_size",
            "state_size",
            "conv_kernel",
        ],
        "sizes that published models of one class differ in: a file without one is more likely damaged than the default",
    ),
    (
        &["nemotron_h"],
        &["layers_block_type"],
        "the default is a model of four layers, whatever num_hidden_layers says",
    ),
];

/// Fields that say nothing, whose absence may be anything: model types, fields, and why.
static IDLE: [(&[&str], &[&str], &str); 1] = [(
    &["deepseek_v2", "deepseek_v3", "glm4_moe_lite", "kimi_linear", "mistral4"],
    &["num_key_value_heads", "head_dim"],
    "latent attention has one row of keys and values for all heads",
)];

/// The row of a list that has a field of a model type.
fn listed<'a>(
    list: &'a [(&[&str], &[&str], &str)],
    model_type: &str,
    field: &str,
) -> Option<(usize, &'a str)> {
    let of = |types: &[&str]| types.contains(&"*") || types.contains(&model_type);
    let row = list.iter().position(|(types, fields, _)| of(types) && fields.contains(&field))?;
    list[row].1.iter().find(|name| **name == field).map(|name| (row, *name))
}

/// The base with twice the width and heads, without what a class computes from others: constants stay as they are.
fn larger(base: &JsonFields, defaults: &JsonFields, derived: &[&str]) -> JsonFields {
    let mut fields = base.clone();
    fields.retain(|field, value| !derived.contains(&field.as_str()) || Some(&*value) != defaults.get(field));
    for size in ["hidden_size", "d_model", "n_embd", "num_attention_heads", "n_head", "n_heads"] {
        if let Some(number) = fields.get(size).and_then(Value::as_u64) {
            fields.insert(size.into(), json!(2 * number));
        }
    }
    fields
}

/// Why a file without this field is not read as one with its default.
fn differs(base: &JsonFields, field: &str, default: &Value) -> Option<String> {
    let [mut without, mut stated] = [base.clone(), base.clone()];
    without.remove(field);
    stated.insert(field.into(), default.clone());
    let (found, wanted) = (parse(&without), parse(&stated));
    (found != wanted).then(|| match (found, wanted) {
        (Err(message), _) => message,
        (Ok(found), Ok(wanted)) => {
            let same = found.bytes().zip(wanted.bytes()).take_while(|(a, b)| a == b).count();
            let near = |text: &str| text.chars().skip(same.saturating_sub(60)).take(100).collect::<String>();
            format!("`{}` in place of `{}`", near(&found), near(&wanted))
        }
        (_, Err(message)) => format!("the default is refused: {message}"),
    })
}

#[test]
fn a_field_that_is_left_out_has_the_default_of_its_class() {
    let published: Value = serde_json::from_str(PUBLISHED).unwrap();
    let (rows, mut wrong, mut used) = (table(), Vec::new(), Vec::new());
    for (model_type, class) in published["classes"].as_object().unwrap() {
        let defaults = class["fields"].as_object().unwrap();
        let derived: Vec<&str> =
            class["derived"].as_array().unwrap().iter().filter_map(Value::as_str).collect();
        let needed = |field: &str| listed(&NEEDED, model_type, field);
        let computed: Vec<&str> = derived.iter().copied().filter(|field| needed(field).is_none()).collect();
        let is_read = |field: &str| rows.get(&(model_type.as_str(), field)) == Some(&"read");
        let parts = ["hidden_size", "d_model", "n_embd"].iter().all(|size| !defaults.contains_key(*size));
        for (number, base) in bases(model_type, defaults).iter().enumerate().filter(|_| !parts) {
            let wide = larger(base, defaults, &computed);
            for (field, default) in defaults.iter().filter(|(field, _)| is_read(field)) {
                let is_derived = derived.contains(&field.as_str());
                if let Some(row) = listed(&IDLE, model_type, field) {
                    used.push(row);
                    continue;
                }
                let of_all = || differs(&wide, field, default).filter(|_| !is_derived);
                // What is computed from other fields is known for the defaults of these alone.
                let plain = differs(base, field, default).filter(|_| !is_derived || number == 0);
                let Some(message) = plain.or_else(of_all) else { continue };
                match needed(field).filter(|_| names(&message, field)) {
                    Some(row) => used.push(row),
                    None => wrong.push(format!("{model_type} without `{field}`: {message}")),
                }
            }
        }
    }
    let lists = NEEDED.iter().chain(&IDLE).flat_map(|(_, fields, _)| fields.iter());
    let idle = lists.filter(|field| !used.iter().any(|(_, name)| name == *field));
    wrong.extend(idle.map(|field| format!("no class needs the exception of `{field}`")));
    assert!(wrong.is_empty(), "{} fields are wrong:\n{}", wrong.len(), wrong.join("\n"));
}

#[test]
fn heads_that_do_not_fill_the_rows_have_a_share_rounded_down() {
    let published: Value = serde_json::from_str(PUBLISHED).unwrap();
    for model_type in ["falcon_h1", "glm4_moe", "granitemoehybrid", "lfm2", "lfm2_moe", "qwen3_moe"] {
        let defaults = published["classes"][model_type]["fields"].as_object().unwrap();
        let mut fields = bases(model_type, defaults).remove(0);
        let sizes = json!({"hidden_size": 60, "num_attention_heads": 7, "num_key_value_heads": 1});
        fields.extend(sizes.as_object().unwrap().clone());
        fields.remove("head_dim");
        let derived = parse(&fields).unwrap();
        fields.insert("head_dim".into(), json!(8));
        assert_eq!(derived, parse(&fields).unwrap(), "{model_type}");
    }
}

#[test]
fn what_a_file_says_in_another_way_is_not_taken_from_the_class() {
    let class = |model_type: &str, more: Value| {
        let published: Value = serde_json::from_str(PUBLISHED).unwrap();
        let mut fields = published["classes"][model_type]["fields"].as_object().unwrap().clone();
        fields.insert("model_type".into(), json!(model_type));
        more.as_object().unwrap().iter().for_each(|(field, value)| match value.as_str() {
            Some("absent") => drop(fields.remove(field)),
            _ => drop(fields.insert(field.clone(), value.clone())),
        });
        parse(&fields).unwrap()
    };
    // Null is no window and no bound; a field that is absent has those of the class.
    let windows = |value: Value| class("mistral", json!({"sliding_window": value}));
    assert!(windows(json!(null)) != windows(json!("absent")));
    assert!(windows(json!(4096)) == windows(json!("absent")));
    let bounds = |value: Value| class("gemma2", json!({"final_logit_softcapping": value}));
    assert!(bounds(json!(null)) != bounds(json!("absent")));
    // Older files have another name for the scaling, and their own for the base.
    let plain = json!({"rope_parameters": {"rope_type": "default", "rope_theta": 7000.0}});
    let older =
        json!({"rope_parameters": "absent", "rope_scaling": {"rope_type": "default"}, "rope_theta": 7000.0});
    assert_eq!(class("gpt_oss", older), class("gpt_oss", plain));
    let base = |theta: f64| json!({"rope_parameters": "absent", "rope_theta": theta});
    assert!(class("gpt_oss", base(7000.0)) != class("gpt_oss", base(150_000.0)));
    assert_eq!(class("gpt_oss", base(150_000.0)), class("gpt_oss", json!({})));
    // Two lists of one thing.
    let none = json!({"layer_types": "absent", "full_attn_idxs": "absent"});
    assert_eq!(class("lfm2", none), class("lfm2", json!({})));
}

/// The message is about this field, or the first of its names; a list of layers says how many there are, too.
fn names(message: &str, field: &str) -> bool {
    let others: &[&str] = match field {
        "d_model" | "n_embd" => &["hidden_size"],
        "n_layer" | "n_layers" | "layers_block_type" => &["num_hidden_layers"],
        "n_head" | "n_heads" => &["num_attention_heads"],
        "num_local_experts" => &["num_experts"],
        "num_experts_per_token" => &["num_experts_per_tok"],
        "intermediate_size" => &["block_ff_dim", "n_inner"],
        _ => &[],
    };
    others.iter().chain(&[field]).any(|name| message.contains(&format!("`{name}`")))
}
