//! Models that are split among ranks whose gathers for products on 8-bit activations are codes: the bits of
//! one rank, in fewer bytes.

use super::shard::{ShardedFamily, bits, exchanges, llama, rwkv7};
use super::shard_sums::{options, tampered, wide};
use mlcc_interp::graph::{AllGatherFault, RankMessage, Tensor};
use mlcc_ir::dim::SymValues;
use mlcc_ir::module::Module;
use mlcc_ir::ops::Op;
use mlcc_ir::types::DType;
use mlcc_passes::{PIPELINE, TpMode};
use serde_json::json;
use std::sync::Arc;

const SEVERAL_ROWS: [&str; 3] = ["prefill", "decode_batch", "step"];

fn split(model: &ShardedFamily, ranks: usize, quant: &str, off: &[&str]) -> Module {
    model.with_notes(options(ranks, quant, TpMode::Codes), off).unwrap_or_else(|e| panic!("{e}")).0
}

/// Every rank has the bits of one.
fn check(what: &str, model: &ShardedFamily, quant: &str, ranks: usize, off: &[&str]) -> Module {
    let one = model.compiled(1, quant, off).unwrap();
    let wanted = bits(&model.results(&one, 1)[0]);
    let split = split(model, ranks, quant, off);
    for (rank, results) in model.results(&split, ranks).iter().enumerate() {
        assert!(bits(results) == wanted, "{what} in {quant}, rank {rank} of {ranks} differs, off: {off:?}");
    }
    split
}

/// All-gathers of codes in an entry function.
fn of_codes(module: &Module, function: &str) -> usize {
    let (_, f) = module.function(function).unwrap();
    let exchanges = f.live_nodes().filter(|(_, node)| matches!(node.op, Op::AllGather { .. }));
    exchanges.filter(|(_, node)| f.ty(node.inputs[0]).dtype == DType::I8).count()
}

/// Bytes that a rank sends in a call with `tokens` tokens.
fn bytes(module: &Module, function: &str, tokens: i64) -> i64 {
    let (_, f) = module.function(function).unwrap();
    let exchanges = f.live_nodes().filter(|(_, node)| matches!(node.op, Op::AllGather { .. }));
    let of_part = exchanges.map(|(_, node)| {
        let ty = f.ty(node.inputs[0]);
        let elements: i64 = ty.dims.iter().map(|dim| dim.eval(&SymValues::for_tokens(tokens))).product();
        elements * ty.dtype.bytes().unwrap() as i64
    });
    of_part.sum()
}

#[test]
fn llama_sends_two_of_four_gathers_as_codes() {
    let model = wide("llama3-gqa-tied", &json!({}));
    for quant in ["q4i8", "q8i8"] {
        for ranks in [2, 4] {
            let split = check("llama", &model, quant, ranks, &[]);
            for function in SEVERAL_ROWS {
                assert_eq!(of_codes(&split, function), 2 * 2, "{function} in {quant}");
                // Magnitudes go beside codes.
                assert_eq!(exchanges(&split, function), (4 + 2) * 2 + 2, "{function} in {quant}");
            }
            assert_eq!((of_codes(&split, "decode"), exchanges(&split, "decode")), (0, 4 * 2 + 2));
        }
    }
}

/// The results of attention and the inner values of the feed-forward block, 512 columns each, are split among
/// the ranks. The residual stream stays floats.
#[test]
fn codes_are_a_quarter_of_the_bytes() {
    let model = wide("llama3-gqa-tied", &json!({}));
    for ranks in [2, 4] {
        let gathered = model.compiled(ranks, "q4i8", &[]).unwrap();
        let split = split(&model, ranks, "q4i8", &[]);
        let own = 512 / ranks as i64;
        let (floats, codes) = (4 * own, own + 4 * own / 128);
        for tokens in [1, 5] {
            let [all, fewer] = [&gathered, &split].map(|module| bytes(module, "prefill", tokens));
            assert_eq!(all - fewer, 2 * 2 * tokens * (floats - codes), "{ranks} ranks, {tokens} tokens");
            assert_eq!(bytes(&gathered, "decode", 1), bytes(&split, "decode", 1));
        }
    }
}

#[test]
fn other_families() {
    let experts = json!({"moe_intermediate_size": 256, "mlp_only_layers": []});
    let models = [
        ("qwen3-moe", wide("qwen3-moe", &experts)),
        ("gemma2", wide("gemma2", &json!({}))),
        ("phi3", wide("phi3", &json!({}))),
        ("rwkv4", ShardedFamily::new("rwkv4-hf", json!({"hidden_size": 256, "attention_hidden_size": 256}))),
        ("rwkv7", rwkv7()),
    ];
    for (name, model) in &models {
        let split = check(name, model, "q4i8", 2, &[]);
        assert!(of_codes(&split, "step") > 0, "{name} has no codes");
    }
}

#[test]
fn each_pass_off() {
    let model = wide("llama3-gqa-tied", &json!({}));
    let graph = PIPELINE.iter().take_while(|p| p.name != "lower");
    for pass in graph.filter(|p| p.optional && p.name != "shard") {
        let split = check("llama", &model, "q4i8", 2, &[pass.name]);
        let none = ["fuse_transpose_matmul", "quantize", "quantize_activations", "exchange_codes"]
            .contains(&pass.name);
        assert_eq!(of_codes(&split, "prefill") == 0, none, "without {}", pass.name);
    }
}

/// Parts of less than a group, 16-bit codes, floats, and readers that need floats.
#[test]
fn what_has_no_codes_stays_as_it_is() {
    let model = wide("llama3-gqa-tied", &json!({}));
    for (model, quant, ranks) in
        [(&llama(), "q4i8", 2), (&model, "q4i8", 8), (&model, "f32", 2), (&model, "q4f16_1", 2)]
    {
        let gathered = model.compiled(ranks, quant, &[]).unwrap();
        let split = split(model, ranks, quant, &[]);
        for function in SEVERAL_ROWS {
            assert_eq!(of_codes(&split, function), 0, "{function} in {quant}");
            assert_eq!(exchanges(&split, function), exchanges(&gathered, function));
        }
    }
}

#[test]
fn faults_of_codes_are_found() {
    let model = wide("llama3-gqa-tied", &json!({}));
    let split = split(&model, 2, "q4i8", &[]);
    let codes = |m: &RankMessage| m.part.dtype == DType::I8;
    let dropped = tampered(&model, &split, &|to, m| (to != 1 || m.from != 0 || !codes(&m)).then_some(m));
    assert!(matches!(dropped, (1, AllGatherFault::NotSent { rank: 1, other: 0, .. })), "{dropped:?}");
    let short = tampered(&model, &split, &|to, m| {
        let part = Arc::new(Tensor { dims: vec![1, 1], data: vec![0.0; 1], ..(*m.part).clone() });
        Some(if to == 1 && m.from == 0 && codes(&m) { RankMessage { part, ..m } } else { m })
    });
    assert!(matches!(short, (1, AllGatherFault::Size { other: 0, .. })), "{short:?}");
    // Other codes or magnitudes are no fault of the all-gather, but the results tell.
    let wanted = model.results(&split, 2);
    for of_codes in [true, false] {
        let wrong = |to: usize, m: RankMessage| {
            let data = m.part.data.iter().map(|x| if codes(&m) { 0.0 } else { x * 2.0 }).collect();
            let part = Arc::new(Tensor { data, ..(*m.part).clone() });
            Some(if to == 1 && m.from == 0 && codes(&m) == of_codes { RankMessage { part, ..m } } else { m })
        };
        let found = model.results_with(&split, 2, Some(&wrong)).unwrap();
        assert!(bits(&found[1]) != bits(&wanted[1]), "codes: {of_codes}");
    }
}
