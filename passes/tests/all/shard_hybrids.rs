//! Recurrences, convolutions, latent attention and norms over all heads, split among ranks.

use super::shard::{ShardedFamily, check, exchanges, share};
use mlcc_ir::module::Module;
use serde_json::{Value, json};

fn state(split: &Module, name: &str) -> String {
    let Some(state) = split.state(name) else {
        panic!("{:?}", split.states.values().map(|s| &s.name).collect::<Vec<_>>())
    };
    split.states[state].ty.to_string()
}

/// Fields of the text model inside of a model with other inputs.
fn text(case: &str, fields: &[(&str, Value)]) -> Value {
    let path = format!("{}/../tests/goldens/{case}/config.json", env!("CARGO_MANIFEST_DIR"));
    let config: Value = serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap();
    let mut text = config["text_config"].clone();
    fields.iter().for_each(|(name, value)| text[*name] = value.clone());
    json!({"text_config": text})
}

#[test]
fn mamba_2_has_its_heads_and_channels() {
    let model = ShardedFamily::new("mamba2", json!({}));
    let split = check("mamba2", &model, &["f32", "q4i8"], &[2], &[]);
    // Eight heads of two groups; 128 values, and 16 numbers of each group to read and to write the state.
    assert_eq!(state(&split, "layers.0.matrix"), "f32[1, 4, 16, 16]");
    assert_eq!(state(&split, "layers.0.conv"), "f32[3, 96]");
    assert!(share(&model, &split) < 0.56, "{}", share(&model, &split));
    // More ranks than groups: every rank has all of the recurrence.
    let split = check("mamba2", &model, &["f32"], &[4], &[]);
    assert_eq!(state(&split, "layers.0.matrix"), "f32[2, 4, 16, 16]");
}

/// All heads read and write the state by the same numbers: those are on every rank.
#[test]
fn granite_hybrid_shares_what_all_heads_need() {
    let split = check("granite", &ShardedFamily::new("granite4-hybrid", json!({})), &["f32"], &[2], &[]);
    assert_eq!(state(&split, "layers.0.matrix"), "f32[3, 16, 16]");
    assert_eq!(state(&split, "layers.0.conv"), "f32[3, 80]");
}

#[test]
fn gated_delta_rules_have_their_heads() {
    let fields = [("linear_num_value_heads", json!(8)), ("linear_num_key_heads", json!(4))];
    let fields = text(
        "qwen3.5",
        &[fields, [("num_attention_heads", json!(8)), ("num_key_value_heads", json!(4))]].concat(),
    );
    let model = ShardedFamily::new("qwen3.5", fields);
    let split = check("qwen3.5", &model, &["f32", "q4i8"], &[2, 4], &[]);
    assert_eq!(state(&split, "layers.0.matrix"), "f32[2, 16, 16]");
    assert_eq!(state(&split, "layers.0.conv"), "f32[3, 64]");
    assert!(share(&model, &split) < 0.33, "{}", share(&model, &split));
    check("olmo-hybrid", &ShardedFamily::new("olmo-hybrid", json!({})), &["q4i8"], &[2], &[]);
}

#[test]
fn short_convolutions_have_their_channels() {
    let model = ShardedFamily::new("lfm2", json!({"num_attention_heads": 8, "num_key_value_heads": 4}));
    let split = check("lfm2", &model, &["f32", "q4i8"], &[2, 4], &[]);
    let conv = split.states.values().find(|s| s.name.ends_with(".conv")).unwrap();
    assert_eq!(conv.ty.to_string(), "f32[2, 16]");
}

#[test]
fn latent_attention_has_its_heads() {
    for (case, fields) in [
        ("deepseek-v3", json!({"moe_intermediate_size": 64})),
        ("deepseek-v2-lite", json!({"moe_intermediate_size": 64})),
    ] {
        let split = check(case, &ShardedFamily::new(case, fields), &["f32", "q4i8"], &[2, 4], &[]);
        let key = split.states.values().next().unwrap();
        assert_eq!(key.ty.dims[1], 1.into(), "{case}: {}", key.ty);
    }
}

#[test]
fn queries_are_normed_over_all_heads() {
    for case in ["olmo3", "minimax-m2"] {
        let split = check(case, &ShardedFamily::new(case, json!({})), &["f32", "q4i8"], &[2], &[]);
        assert!(exchanges(&split, "decode") > 0);
    }
}
