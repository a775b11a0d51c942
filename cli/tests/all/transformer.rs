//! A small transformer with random weights: prompts in pieces and token by token through the planned steps,
//! interpreted and compiled, against the graph interpreter.

use crate::cases::{assert_close, backends, host_levels};
use crate::transformer_model::{
    CHUNK, TransformerConfig, after, artifact, by_graph, by_steps, compiled, compiled_with, unfused,
};
use mlcc_driver::compile::Backend;
use mlcc_interp::equivalence::RandomWeights;
use mlcc_ir::ops::AttentionOp;
use mlcc_passes::CacheType;
use mlcc_runtime::{Error, LoadOptions, Model};

const IDS: [i32; 16] = [3, 14, 15, 9, 26, 5, 35, 8, 9, 7, 9, 32, 38, 4, 6, 2];

/// A full chunk, a rest, single tokens, and a piece on top of them.
fn pieces() -> Vec<&'static [i32]> {
    let ids: &'static [i32] = &IDS;
    vec![&ids[..6], &ids[6..9], &ids[9..10], &ids[10..11], &ids[11..16]]
}

fn check(what: &str, expected: &[Vec<f32>], found: &[Vec<f32>], tolerance: f32) {
    for (i, (expected, found)) in expected.iter().zip(found).enumerate() {
        assert_close(&format!("{what}, piece {i}"), expected, found, tolerance);
    }
}

/// Rows of a cache that are multiples of 64 bytes are written by the kernel that makes them, others are
/// copied.
fn configs() -> Vec<(&'static str, TransformerConfig)> {
    let tiny = TransformerConfig::tiny();
    let bias = AttentionOp { alibi: true, prefix: true, ..tiny.attention.clone() };
    let capped = AttentionOp { window: 4, softcap: 2.0, ..tiny.attention.clone() };
    vec![
        ("rows of 128 bytes", tiny.clone()),
        ("rows of 24 bytes", TransformerConfig { heads: 3, kv_heads: 1, size: 6, layers: 1, ..tiny.clone() }),
        ("experts", TransformerConfig { experts: Some((5, 2)), layers: 1, ..tiny.clone() }),
        ("alibi and a prefix", TransformerConfig { attention: bias, layers: 1, ..tiny.clone() }),
        ("window and soft cap", TransformerConfig { attention: capped, layers: 1, ..tiny }),
    ]
}

#[test]
fn steps_equal_the_graph() {
    for (what, config) in configs() {
        let module = unfused(&config.module());
        let weights = RandomWeights::new(&module, 5);
        let expected = by_graph(&module, &weights, &pieces());
        let without = [&[][..], &["fuse"], &["fuse_attention"], &[]];
        for (target, disabled) in ["x86-64-v3", "x86-64-v4", "x86-64-v3", "sm_80"].into_iter().zip(without) {
            let target = mlcc_target::resolve_target(target).unwrap();
            let program = compiled(&module, &target, "f32", disabled);
            let found = by_steps(&program, &weights, &pieces(), config.vocab);
            check(&format!("{what}, {} without {disabled:?}", target.name), &expected, &found, 1e-5);
        }
    }
}

#[test]
fn artifacts_equal_the_graph() {
    let folder = tempfile::tempdir().unwrap();
    let levels = host_levels();
    let Some(best) = levels.last() else { return };
    for (what, config) in configs() {
        let module = unfused(&config.module());
        let weights = RandomWeights::new(&module, 5);
        let expected = by_graph(&module, &weights, &pieces());
        let target = mlcc_target::resolve_target(best).unwrap();
        let program = compiled(&module, &target, "f32", &[]);
        for backend in backends() {
            if backend == Backend::Llvm && !config.attention.alibi && config.experts.is_none() {
                continue;
            }
            let what = format!("{what} by {}", backend.name());
            let path = folder.path().join("tiny.so");
            artifact(&program, &target, backend, &weights, config.vocab, &path);
            for threads in [1, 3] {
                let options = LoadOptions { threads: Some(threads), ..LoadOptions::default() };
                let mut session = Model::load(&path, &options).unwrap().session().unwrap();
                let mut found = Vec::new();
                for piece in pieces() {
                    found.push(session.prefill(piece).unwrap().to_vec());
                }
                check(&format!("{what}, {threads} workers"), &expected, &found, 1e-5);
                session.reset().unwrap();
                let single = IDS.map(|id| session.decode(id).unwrap().to_vec());
                check(&what, &expected[4..], &single[15..], 1e-5);
                let room = config.context - IDS.len();
                session.prefill(&vec![0; room]).unwrap();
                assert!(room > CHUNK as usize);
                assert!(matches!(session.decode(0), Err(Error::ContextFull { .. })));
            }
        }
    }
}

/// Against the interpreter on the same stored weights and caches: what kernels add is rounding on another
/// side of an edge.
#[test]
fn stored_types_keep_their_meaning() {
    let tiny = TransformerConfig::tiny();
    let wide = TransformerConfig { size: 32, layers: 1, ..tiny.clone() };
    let experts = TransformerConfig { experts: Some((4, 2)), hidden: 64, layers: 1, ..tiny };
    let cases = [
        (&wide, "f32", CacheType::F16, 2e-3),
        (&wide, "f32", CacheType::BF16, 1e-2),
        (&wide, "f16", CacheType::I8, 2e-2),
        (&experts, "q8f16_1", CacheType::F32, 5e-4),
        (&experts, "q4f16_1", CacheType::F32, 5e-4),
        (&experts, "bf16", CacheType::F32, 1e-5),
    ];
    for (config, quant, cache, tolerance) in cases {
        let module = unfused(&config.module());
        let weights = RandomWeights::new(&module, 5);
        let stored = after(&module, &["quantize", "quantize_cache"], quant, cache);
        let expected = by_graph(&stored, &weights, &pieces());
        // The check is of the stored values, not of the activations that GPUs round.
        let without = [&[][..], &["fuse_attention"], &["halve_activations"]];
        for (target, disabled) in ["x86-64-v3", "x86-64-v4", "sm_80"].into_iter().zip(without) {
            let target = mlcc_target::resolve_target(target).unwrap();
            let program = compiled_with(&module, &target, quant, cache, disabled);
            let found = by_steps(&program, &weights, &pieces(), config.vocab);
            let what = format!("{quant}, {cache:?}, {} without {disabled:?}", target.name);
            check(&what, &expected, &found, tolerance);
        }
    }
}
