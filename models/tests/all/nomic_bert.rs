//! Configurations of Nomic BERT: published files and those of transformers say the same, and what the published code can do
//! beside the published models is refused by name.

use crate::common::golden;
use mlcc_models::ModelConfig;
use mlcc_models::families::nomic_bert::NomicBertConfig;
use mlcc_models::layers::rope::RopeFrequencies;
use serde_json::{Map, Value, json};

fn published(changes: Value) -> Map<String, Value> {
    let bytes = std::fs::read(golden("embed-nomic").join("config.json")).unwrap();
    let mut fields: Map<String, Value> = serde_json::from_slice(&bytes).unwrap();
    fields.extend(changes.as_object().unwrap().clone());
    fields
}

fn parse(fields: Map<String, Value>) -> Result<NomicBertConfig, String> {
    let json = Value::Object(fields).to_string();
    let config = ModelConfig::parse("dir/config.json", json.as_bytes()).map_err(|e| e.to_string())?;
    Ok(config.architecture.downcast_family::<NomicBertConfig>().unwrap().clone())
}

#[test]
fn both_ways_to_write_a_configuration_are_read() {
    let own = json!({
        "architectures": ["NomicBertModel"], "model_type": "nomic_bert", "hidden_size": 48, "num_attention_heads": 4,
        "num_hidden_layers": 3, "intermediate_size": 80, "hidden_act": "silu", "layer_norm_eps": 1e-12, "vocab_size": 128,
        "max_position_embeddings": 64, "type_vocab_size": 2, "head_dim": 12,
        "rope_parameters": { "rope_theta": 1000.0, "rope_type": "default" },
    });
    let own = parse(own.as_object().unwrap().clone()).unwrap();
    assert_eq!(own, parse(published(json!({}))).unwrap());
    assert_eq!(own.sizes.context, 64);
}

/// Published files claim four times the length that the model was trained with: it holds with dynamic scaling alone.
#[test]
fn the_context_is_what_the_model_was_trained_with() {
    let claimed = json!({ "n_positions": 8192, "max_trained_positions": 2048 });
    assert_eq!(parse(published(claimed)).unwrap().sizes.context, 2048);
    let scaled = json!({ "n_positions": 8192, "max_trained_positions": 2048, "rotary_scaling_factor": 2 });
    let scaled = parse(published(scaled)).unwrap();
    assert_eq!(scaled.sizes.context, 8192);
    let RopeFrequencies::Dynamic { original, factor, .. } = scaled.rope.frequencies else {
        panic!("{scaled:?}")
    };
    assert_eq!((original, factor), (2048, 2.0));
}

#[test]
fn other_forms_are_refused_by_name() {
    for (changes, parts) in [
        (json!({ "moe_every_n_layers": 2 }), &["experts", "nomic-embed-text-v2-moe"][..]),
        (json!({ "prenorm": true }), &["`prenorm`"]),
        (json!({ "use_rms_norm": true }), &["`use_rms_norm`"]),
        (json!({ "rotary_emb_fraction": 0.0 }), &["`rotary_emb_fraction`", "all of a head"]),
        (json!({ "rotary_emb_scale_base": 512 }), &["`rotary_emb_scale_base`"]),
        (json!({ "rotary_emb_interleaved": true }), &["`rotary_emb_interleaved`"]),
        (json!({ "activation_function": "glu" }), &["`activation_function`", "swiglu, geglu", "glu"]),
        (json!({ "type_vocab_size": 1u64 << 40 }), &["`type_vocab_size`"]),
    ] {
        let error = parse(published(changes)).expect_err("refused");
        for part in parts.iter().chain(&["dir/config.json"]) {
            assert!(error.contains(part), "expected `{part}` in: {error}");
        }
    }
}
