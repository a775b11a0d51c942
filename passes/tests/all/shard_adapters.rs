//! Adapters in slots, of models that are split among ranks: every rank gives the bits of one.

use super::shard::{ShardedFamily, bits, check, exchanges};
use mlcc_models::AdapterSlots;
use mlcc_passes::{PIPELINE, TpMode};
use serde_json::{Value, json};

const SLOTS: AdapterSlots = AdapterSlots { slots: 2, rank: 16 };

fn model(case: &str, fields: Value) -> ShardedFamily {
    ShardedFamily::with_slots(case, fields, Some(SLOTS))
}

fn llama() -> ShardedFamily {
    let fields =
        json!({"num_attention_heads": 8, "num_key_value_heads": 4, "hidden_size": 128, "head_dim": 16});
    model("llama3-gqa-tied", fields)
}

#[test]
fn ranks_add_their_part_of_what_an_adapter_adds() {
    let model = llama();
    let split = check("llama", &model, &["f32", "q4i8"], &[2, 4], &[]);
    // There are no additional all-gathers, and no factor is in parts.
    assert_eq!(exchanges(&split, "decode"), 4 * 3 + 2);
    let factors = || split.params.values().filter(|param| param.name.contains(".lora_"));
    assert_eq!(factors().count(), 2 * 7 * 3);
    assert!(factors().all(|param| param.is_adapter()));
    // A sequence that has none gives other results.
    let one = model.compiled(1, "f32", &[]).unwrap();
    let plain = ShardedFamily::new(
        "llama3-gqa-tied",
        json!({"num_attention_heads": 8, "num_key_value_heads": 4, "hidden_size": 128, "head_dim": 16}),
    );
    let without = plain.results(&plain.compiled(1, "f32", &[]).unwrap(), 1);
    assert!(bits(&model.results(&one, 1)[0]) != bits(&without[0]));
}

/// Heads and rows that do not divide, key heads that several ranks have, and heads that are ranges of one
/// product.
#[test]
fn parts_that_overlap_and_parts_of_products() {
    check("llama", &llama(), &["f32"], &[3], &[]);
    let few = json!({"num_attention_heads": 8, "num_key_value_heads": 2});
    check("llama", &model("llama3-gqa-tied", few), &["f32"], &[4], &[]);
    for case in ["lfm2", "qwen3.5", "olmo3"] {
        check(case, &model(case, json!({})), &["f32"], &[2], &[]);
    }
}

#[test]
fn each_pass_off() {
    let model = llama();
    let graph = PIPELINE.iter().take_while(|p| p.name != "lower");
    for pass in graph.filter(|p| p.optional && p.name != "shard") {
        check("llama", &model, &["q4i8"], &[2], &[pass.name]);
    }
}

/// Where ranks add terms, products with adapters are gathered nevertheless.
#[test]
fn sums_over_ranks() {
    let model = llama();
    let mut options = mlcc_passes::PassOptions::new(vec![], 16);
    (options.ranks, options.tp_mode) = (2, TpMode::Reduce);
    let split = model.with_notes(options, &[]).unwrap().0;
    let ranks = model.results(&split, 2);
    assert!(bits(&ranks[0]) == bits(&ranks[1]));
    let one = &model.results(&model.compiled(1, "f32", &[]).unwrap(), 1)[0];
    for (one, found) in one.iter().flatten().zip(ranks[0].iter().flatten()) {
        assert!((one - found).abs() < 1e-4 * one.abs().max(1.0), "{one} {found}");
    }
}
