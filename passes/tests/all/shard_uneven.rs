//! Models whose sizes do not divide among ranks: parts overlap, and every rank still gives the bits of the
//! whole model.

use super::shard::{ShardedFamily, cases, check, check_bits, exchanges, share};
use mlcc_ir::module::Module;
use mlcc_passes::{PassError, TpMode};
use serde_json::json;

fn llama(heads: usize, key_heads: usize) -> ShardedFamily {
    let fields = json!({"num_attention_heads": heads, "num_key_value_heads": key_heads, "hidden_size": 96, "head_dim": 16});
    ShardedFamily::new("llama3-gqa-tied", fields)
}

fn cache(split: &Module) -> String {
    let is_cache = |s: &&mlcc_ir::module::ModelState| s.ty.rank() == 3;
    split.states.values().find(is_cache).map(|s| s.ty.to_string()).unwrap_or_default()
}

/// Query heads, key heads, ranks; the key heads that a rank has.
#[test]
fn heads() {
    let sizes = [
        ((6, 6, 4), 2),
        ((6, 3, 4), 1),
        ((6, 3, 2), 2),
        ((12, 6, 4), 2),
        ((6, 1, 4), 1),
        // Each of two ranks has the same heads as another one.
        ((6, 2, 4), 1),
        ((6, 2, 3), 1),
    ];
    for ((heads, key_heads, ranks), own) in sizes {
        let what = format!("{heads} heads, {key_heads} of keys");
        let split = check(&what, &llama(heads, key_heads), &["f32", "q4i8"], &[ranks], &[]);
        assert_eq!(cache(&split), format!("f32[24, {own}, 16]"), "{what}, {ranks} ranks");
        assert_eq!(exchanges(&split, "decode"), 4 * 3 + 2, "{what}, {ranks} ranks");
    }
    check("more ranks than heads", &llama(4, 2), &["q4i8"], &[7], &[]);
}

#[test]
fn vocabulary() {
    let model = ShardedFamily::new("llama3-gqa-tied", json!({"vocab_size": 641}));
    let split = check("llama", &model, &["f32", "q4i8"], &[2, 4], &[]);
    assert!(share(&model, &split) < 0.3, "{}", share(&model, &split));
    let table = split.param("model.embed_tokens.weight.part").unwrap();
    assert_eq!(split.params[table].ty.dims[0].as_const(), Some(161));
}

/// Rows of packed weights that do not divide stay in tiles.
#[test]
fn rows_are_whole_tiles() {
    let model = ShardedFamily::new("llama3-gqa-tied", json!({"intermediate_size": 160}));
    let split = check("llama", &model, &["q4i8"], &[4], &["merge_projections"]);
    let gate = split.param("model.layers.0.mlp.gate_proj.weight.part").unwrap();
    assert_eq!(split.params[gate].ty.dims[0].as_const(), Some(40));
    let split = check("llama", &model, &["q4i8"], &[3], &["merge_projections"]);
    let gate = split.param("model.layers.0.mlp.gate_proj.weight.part").unwrap();
    assert_eq!(split.params[gate].ty.dims[0].as_const(), Some(64));
    let model =
        ShardedFamily::new("qwen3-moe", json!({"num_key_value_heads": 4, "moe_intermediate_size": 80}));
    check("qwen3-moe", &model, &["f32", "q4i8"], &[2, 3], &[]);
}

/// A sum would have the elements of two ranks twice: products of parts that overlap are gathered.
#[test]
fn sums_are_of_parts_that_divide() {
    let model = llama(6, 3);
    let mut options = mlcc_passes::PassOptions::new(vec![], 16);
    (options.ranks, options.tp_mode) = (4, TpMode::Reduce);
    let (split, _) = model.with_notes(options, &[]).unwrap();
    // The product behind attention is gathered, of the pairs that are sums otherwise.
    assert_eq!(exchanges(&split, "decode"), 3 * 3 + 2);
    let whole = model.compiled(1, "f32", &[]).unwrap();
    let wanted = &model.results(&whole, 1)[0];
    let results = model.results(&split, 4);
    for (found, wanted) in results[3].iter().flatten().zip(wanted.iter().flatten()) {
        assert!((found - wanted).abs() < 1e-4, "{found} for {wanted}");
    }
    assert!(results.iter().all(|r| r == &results[0]));
}

/// Every family of the reference cases on three ranks, which divide few of their sizes.
#[test]
fn families() {
    let mut others = Vec::new();
    for case in cases() {
        let model = ShardedFamily::new(&case, json!({}));
        match model.compiled(3, "f32", &[]) {
            // All of its products are so small that every rank computes them.
            Ok(split) if split.rank_count() == 1 => others.push(format!("{case}: whole")),
            Ok(_) => drop(check_bits(&case, &model, &["f32"], &[3], &[])),
            Err(PassError::Shard(error)) => others.push(format!("{case}: {error}")),
            Err(error) => panic!("{case}: {error}"),
        }
    }
    // Queries of latent attention come out of matrices by head, which have no parts that overlap.
    let (whole, refused): (Vec<_>, Vec<_>) = others.into_iter().partition(|line| line.ends_with(": whole"));
    assert_eq!(whole, ["mamba: whole"]);
    let told = |line: &&String| {
        line.ends_with("cannot be divided among 3 ranks; up to 16, these numbers work: 2, 4")
    };
    assert_eq!(refused.iter().find(|line| !told(line)), None);
    let cases: Vec<&str> = refused.iter().filter_map(|line| Some(line.split_once(':')?.0)).collect();
    let latent =
        ["deepseek-v2-groups", "deepseek-v2-lite", "deepseek-v3", "glm4-moe-lite", "kimi-linear", "mistral4"];
    assert_eq!(cases, latent);
}
