//! Attention kernels against a plain reference: interpreted for CPUs and a GPU, compiled by every back end at
//! every level of this machine, for decode and prefill, over head sizes, groups, lengths and kinds of
//! attention.

use std::collections::HashMap;

use crate::attention_case::*;
use crate::cases::objects::cache;
use crate::cases::{assert_close, host_levels};
use mlcc_codegen::executor::KernelExecutor;
use mlcc_interp::graph::Tensor;
use mlcc_ir::dim::SymValues;
use mlcc_ir::kernel::Kernel;
use mlcc_ir::ops::{AttentionOp, KeySpan};
use mlcc_ir::types::DType;
use mlcc_kernels::params::KernelTarget;
use mlcc_target::FeatureLevel;

/// (queries, past) that fit an interpreter: within and across blocks of keys, ragged ends, fewer keys than
/// sinks.
const SMALL: [(usize, usize); 7] = [(1, 0), (1, 5), (1, 25), (1, 77), (3, 0), (19, 0), (9, 30)];

/// Levels with numbers of workers: every way to lay out the products of floats.
const LEVELS: [(&str, usize); 5] =
    [("x86-64-v3", 3), ("x86-64-v4", 1), ("x86-64-v4-bf16", 2), ("armv8.6", 2), ("sm_80", 1)];

#[test]
fn interpreted_kernels_equal_the_definition() {
    let mut all: Vec<AttentionCase> = vec![
        AttentionCase::new(2, 2, 32),
        AttentionCase { value_size: 16, ..AttentionCase::new(1, 3, 24) },
        AttentionCase { cache: DType::F16, ..AttentionCase::new(1, 1, 6) },
        AttentionCase { cache: DType::I8, value_size: 16, ..AttentionCase::new(2, 5, 8) },
        // More than the shared memory of a GPU's block holds of the usual number of rows.
        AttentionCase::new(1, 8, 512),
    ];
    all.extend(kinds().into_iter().map(|op| AttentionCase { op, ..AttentionCase::new(1, 2, 16) }));
    for case in all {
        for (n, past) in SMALL {
            let inputs = case.inputs(n, past);
            let expected = case.reference(&inputs, n, past);
            let sizes = SymValues { n: n as i64, b: 1, past: past as i64 };
            for (name, workers) in LEVELS {
                let target = target_of(name).0;
                for single in if n == 1 { vec![true, false] } else { vec![false] } {
                    let kernels = case.kernels(single, &target);
                    let found = interpreted(&kernels, &inputs, &sizes, workers);
                    let what = format!("{case:?} for {name}, n = {n} ({single}), past = {past}");
                    assert_close(&what, &expected, &found, tolerance(&case, &kernels[0]));
                }
            }
        }
    }
}

/// Tiles of fragments on a GPU: every type of a cache, rows of several heads, all kinds of attention; fewer
/// keys than a tile, and several tiles and slices. Other sizes of heads have none.
#[test]
fn tensor_cores_interpreted() {
    let target = target_of("sm_80").0;
    let sized = |cache, kv, group, size, value_size| AttentionCase {
        cache,
        value_size,
        ..AttentionCase::new(kv, group, size)
    };
    let mut all = vec![
        sized(DType::F32, 2, 2, 32, 32),
        sized(DType::F16, 1, 3, 48, 32),
        sized(DType::BF16, 2, 1, 16, 64),
        sized(DType::F16, 1, 6, 32, 16),
        sized(DType::I8, 2, 2, 32, 64),
        sized(DType::I8, 1, 3, 48, 32),
        sized(DType::F16, 1, 20, 128, 128),
        sized(DType::F16, 1, 2, 256, 256),
    ];
    all.extend(kinds().into_iter().map(|op| AttentionCase { op, ..sized(DType::F16, 1, 2, 16, 32) }));
    for (c, case) in all.into_iter().enumerate() {
        let lengths: &[(usize, usize)] =
            if case.size > 64 { &[(1, 70), (5, 66)] } else { &[(1, 0), (1, 150), (70, 0), (9, 130)] };
        for &(n, past) in lengths {
            let kernels = case.kernels(n == 1 && c % 2 == 0, &target);
            assert!(has_one_of(&kernels[0], &FRAGMENTS), "{case:?}");
            equals_reference(&format!("{case:?}"), &case, &kernels, (n, past), 1, 1e-5);
        }
    }
    for (size, value_size) in [(24, 16), (16, 8), (272, 16)] {
        let kernels = sized(DType::F16, 1, 2, size, value_size).kernels(false, &target);
        assert!(!has_one_of(&kernels[0], &FRAGMENTS), "{size} {value_size}");
    }
}

/// Rows so long that the shared memory holds 16 keys of them: a block of one query has one warp, and leaves
/// unfinished sums where there are slices, as many warps do.
#[test]
fn tensor_cores_of_one_warp_interpreted() {
    let target = target_of("sm_80").0;
    let plain = AttentionCase::new(1, 2, 256);
    let kinds = [
        plain.op.clone(),
        AttentionOp { window: 66, null_logits: true, ..plain.op.clone() },
        AttentionOp { span: KeySpan::First, ahead: AttentionOp::ALL, ..plain.op.clone() },
    ];
    for case in kinds.map(|op| AttentionCase { op, ..plain.clone() }) {
        let kernels = case.kernels(true, &target);
        assert!(has_one_of(&kernels[0], &FRAGMENTS), "{case:?}");
        assert_eq!(kernels.len(), 2, "slices are merged: {case:?}");
        for past in [5, 70, 150] {
            equals_reference(&format!("{case:?}"), &case, &kernels, (1, past), 1, 1e-5);
        }
    }
}

/// Every block of attention that tuning tries, and the smallest: of one query and of several.
#[test]
fn blocks_that_tuning_tries_interpreted() {
    let level = mlcc_target::level("sm_90").unwrap().unwrap();
    let field = level.fields().iter().find(|field| field.key == "attention").unwrap();
    let mut changes: Vec<_> = field.candidates(&level).into_iter().map(|(_, change)| change).collect();
    changes.push(toml::from_str("attention = { warps = 1, keys = 16, shared_bytes = 1024 }").unwrap());
    let case = AttentionCase { cache: DType::F16, value_size: 32, ..AttentionCase::new(1, 3, 48) };
    for change in changes {
        let target = KernelTarget::new(mlcc_target::Arch::Nvptx, &level.with_changes(&change).unwrap());
        for (n, past) in [(1, 150), (70, 9)] {
            let kernels = case.kernels(n == 1, &target);
            equals_reference(&format!("{change}"), &case, &kernels, (n, past), 1, 1e-5);
        }
    }
}

/// Dot instructions that take unsigned bytes, and signed ones; and products of words.
#[test]
fn integer_products_interpreted() {
    let sized = |kv, group, size, value_size| {
        let case = AttentionCase::new(kv, group, size);
        AttentionCase { cache: DType::I8, value_size, ..case }
    };
    let cases = [
        sized(2, 2, 32, 64),
        AttentionCase { negative: true, ..sized(1, 3, 32, 64) },
        AttentionCase { op: kinds().swap_remove(6), ..sized(1, 6, 16, 64) },
        sized(1, 9, 16, 64),
        sized(1, 1, 64, 64),
    ];
    for (name, instr) in [
        ("x86-64-v4-vnni", "vpdpbusd_512"),
        ("armv8.2-dotprod", "sdot_128"),
        ("x86-64-v3", "vpmaddwd_256"),
        ("x86-64-v2", "pmaddwd_128"),
    ] {
        let target = target_of(name).0;
        for (c, case) in cases.iter().enumerate() {
            for past in [0, 2, 77] {
                let kernels = case.kernels(true, &target);
                assert!(has_one_of(&kernels[0], &[instr]), "{name}, case {c}");
                let tolerance = tolerance(case, &kernels[0]);
                equals_reference(&format!("{case:?} for {name}"), case, &kernels, (1, past), 2, tolerance);
            }
        }
    }
}

/// Rows that are no whole vectors of bytes meet queries as words where there is a dot instruction for these,
/// too.
#[test]
fn words_of_512_bits_interpreted() {
    let target = target_of("x86-64-v4-vnni").0;
    for group in [1, 2, 6, 16] {
        let case = AttentionCase {
            cache: DType::I8,
            negative: group == 6,
            value_size: 32,
            ..AttentionCase::new(2, group, 32)
        };
        let kernels = case.kernels(true, &target);
        assert!(has_one_of(&kernels[0], &["vpdpwssd_512"]), "{group} heads");
        for past in [0, 2, 77] {
            equals_reference(&format!("{group} heads"), &case, &kernels, (1, past), 2, 1e-4);
        }
    }
}

/// Products of several queries in integers, in all kinds of attention; other machines and single queries have
/// none.
#[test]
fn products_of_pairs_interpreted() {
    let mut all = vec![
        AttentionCase::new(2, 2, 32),
        AttentionCase { value_size: 16, ..AttentionCase::new(1, 3, 24) },
        AttentionCase { cache: DType::I8, negative: true, value_size: 16, ..AttentionCase::new(2, 5, 8) },
        AttentionCase { cache: DType::F16, ..AttentionCase::new(1, 1, 16) },
    ];
    all.extend(kinds().into_iter().map(|op| AttentionCase { op, ..AttentionCase::new(1, 2, 16) }));
    for case in all.into_iter().map(AttentionCase::on_codes) {
        for (n, past) in SMALL {
            let inputs = case.inputs(n, past);
            let expected = case.reference(&inputs, n, past);
            let sizes = SymValues { n: n as i64, b: 1, past: past as i64 };
            let with =
                ["x86-64-v4-vnni", "x86-64-v3-vnni", "x86-64-v3", "x86-64-v2"].map(|name| (name, true));
            for (name, pairs) in with.into_iter().chain([("x86-64-v4", false)]) {
                let target = target_of(name).0;
                let kernels = case.kernels(false, &target);
                assert_eq!(has_pairs(&kernels[0]), pairs, "{case:?} for {name}");
                let found = interpreted(&kernels, &inputs, &sizes, 2);
                let what = format!("{case:?} for {name}, n = {n}, past = {past}");
                assert_close(&what, &expected, &found, tolerance_of_several(&kernels[0]));
            }
        }
    }
    let target = target_of("x86-64-v4-vnni").0;
    let odd = AttentionCase { value_size: 24, ..AttentionCase::new(1, 2, 32) }.on_codes();
    assert!(!has_pairs(&odd.kernels(false, &target)[0]), "no whole vectors of values");
    assert!(!has_pairs(&AttentionCase::new(1, 2, 32).on_codes().kernels(true, &target)[0]), "one query");
    assert!(!has_pairs(&AttentionCase::new(1, 2, 32).kernels(false, &target)[0]), "not permitted");
}

/// A query alone has the bits of the same query among several, with batch invariance: in floats and codes, on
/// every kind of machine.
#[test]
fn a_query_alone_has_the_bits_of_several() {
    let mut all = vec![
        AttentionCase { value_size: 64, ..AttentionCase::new(2, 2, 32) },
        AttentionCase { cache: DType::F16, ..AttentionCase::new(1, 9, 16) },
        AttentionCase { cache: DType::I8, negative: true, value_size: 16, ..AttentionCase::new(2, 5, 8) },
    ];
    all.extend(kinds().into_iter().map(|op| AttentionCase { op, ..AttentionCase::new(1, 2, 16) }));
    for case in all.into_iter().flat_map(|case| [case.clone(), case.on_codes()]) {
        for (n, past) in [(3, 0), (19, 77), (2, 66)] {
            let inputs = case.inputs(n, past);
            let queries = |i: usize| i == 0 || case.op.sink_input() == Some(operand(&case, i));
            let last = |t: &Tensor| {
                let row = t.data.len() / n;
                Tensor::new(t.dtype, &[&[1], &t.dims[1..]].concat(), t.data[t.data.len() - row..].to_vec())
            };
            let alone: Vec<Tensor> = inputs
                .iter()
                .enumerate()
                .map(|(i, t)| if queries(i) { last(t) } else { t.clone() })
                .collect();
            for (name, workers) in [("znver4", 2), ("x86-64-v3", 3), ("x86-64-v2", 1), ("armv8.6", 2)] {
                let target = KernelTarget { batch_invariant: true, ..target_of(name).0 };
                let sizes = |n: usize, past: usize| SymValues { n: n as i64, b: 1, past: past as i64 };
                let several = interpreted(&case.kernels(false, &target), &inputs, &sizes(n, past), workers);
                let found =
                    interpreted(&case.kernels(true, &target), &alone, &sizes(1, past + n - 1), workers);
                let row = case.heads() * case.value_size;
                let bits = |x: &[f32]| x.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
                let what = format!("{case:?} for {name}, {n} queries after {past} keys");
                assert_eq!(bits(&several[several.len() - row..]), bits(&found), "{what}");
            }
        }
    }
}

/// The operand of the attention that input `i` of a case begins.
fn operand(case: &AttentionCase, i: usize) -> usize {
    if case.cache == DType::I8 && i > 2 { i - 2 } else { i }
}

/// Codes as large as they get in all lanes, of one sign, keep sums within 32 bits; and where a key with small
/// values has nearly all of the weight, as the first of a text often does, those of the others keep their
/// precision.
#[test]
fn codes_of_extreme_rows() {
    let case = AttentionCase::new(1, 2, 32).on_codes();
    let (n, past) = (9, 120);
    let sizes = SymValues { n: n as i64, b: 1, past: past as i64 };
    for target in ["x86-64-v4-vnni", "x86-64-v3"] {
        let kernels = case.kernels(false, &target_of(target).0);
        for scale in [1e-6, 1.0, 3e4] {
            let mut inputs = case.inputs(n, past);
            inputs[0].data.fill(0.01);
            inputs[1].data.fill(-scale);
            inputs[2].data.fill(-scale);
            let found = interpreted(&kernels, &inputs, &sizes, 1);
            assert_close("equal rows", &vec![-scale as f32; found.len()], &found, 2e-4);
        }
        let mut inputs = case.inputs(n, past);
        inputs[0].data.iter_mut().for_each(|x| *x = x.abs());
        for c in 0..case.size {
            inputs[1].data[c] = 4.0;
            inputs[2].data[c] *= 1e-3;
        }
        let expected = case.reference(&inputs, n, past);
        let found = interpreted(&kernels, &inputs, &sizes, 1);
        assert_close("a heavy first key", &expected, &found, 2e-4);
    }
}

/// The same for one token and a cache of 8-bit codes, whose rows are as long as they may be.
#[test]
fn codes_of_extreme_cached_rows() {
    let case = AttentionCase { cache: DType::I8, value_size: 64, ..AttentionCase::new(1, 2, 512) };
    let past = 120;
    let sizes = SymValues { n: 1, b: 1, past };
    for target in ["x86-64-v4-vnni", "x86-64-v3", "x86-64-v2"] {
        let kernels = case.kernels(true, &target_of(target).0);
        assert!(has_one_of(&kernels[0], &UNSIGNED) || has_pairs(&kernels[0]), "{target}");
        for (query, code) in [(1.0, -128.0), (-1e3, -128.0), (1e-6, 127.0)] {
            let mut inputs = case.inputs(1, past as usize);
            inputs[0].data.fill(query);
            inputs[1].data.fill(code);
            // The first key has a smaller size than the others.
            inputs[1].data[..512].fill(-code.signum());
            inputs[3].data.fill(code);
            let expected = case.reference(&inputs, 1, past as usize);
            let found = interpreted(&kernels, &inputs, &sizes, 1);
            assert_close(&format!("{query} and {code} for {target}"), &expected, &found, 1e-4);
        }
    }
}

/// Slices with all key heads.
#[test]
fn a_long_cache_interpreted() {
    let case = AttentionCase { cache: DType::F16, ..AttentionCase::new(2, 3, 16) };
    let (n, past) = (1, 1100);
    let inputs = case.inputs(n, past);
    let sizes = SymValues { n: 1, b: 1, past: past as i64 };
    let kernels = case.kernels(true, &target_of("x86-64-v4").0);
    let found = interpreted(&kernels, &inputs, &sizes, 3);
    assert_close("a long cache", &case.reference(&inputs, n, past), &found, 1e-5);
    let alone = interpreted(&kernels, &inputs, &sizes, 1);
    assert_eq!(found, alone, "the number of workers changes nothing");
}

type CompileFn = fn(&[Kernel], &FeatureLevel) -> KernelExecutor;

fn back_ends() -> Vec<(&'static str, CompileFn)> {
    vec![
        #[cfg(feature = "llvm")]
        ("llvm", |kernels, level| KernelExecutor::from_cache(kernels, level, &cache()).unwrap()),
        #[cfg(feature = "cranelift")]
        ("cranelift", |kernels, level| KernelExecutor::with_cranelift(kernels, level).unwrap()),
    ]
}

#[test]
fn compiled_kernels_equal_the_definition() {
    let sized = |kv, group, size, cache| AttentionCase { cache, ..AttentionCase::new(kv, group, size) };
    let mut all = vec![
        sized(1, 1, 32, DType::F32),
        sized(2, 3, 40, DType::F16),
        sized(1, 4, 64, DType::BF16),
        sized(3, 1, 80, DType::F32),
        sized(2, 7, 96, DType::F16),
        sized(1, 8, 128, DType::F16),
        sized(1, 2, 256, DType::F32),
        AttentionCase { value_size: 72, ..sized(1, 16, 48, DType::F16) },
        sized(2, 20, 16, DType::BF16),
        sized(2, 8, 64, DType::I8),
        // Integer products: fewer heads than lanes have room for, other sizes of rows, several sets, kinds of
        // attention.
        sized(1, 7, 128, DType::I8),
        sized(2, 4, 64, DType::I8),
        AttentionCase { value_size: 128, ..sized(2, 2, 64, DType::I8) },
        sized(2, 1, 128, DType::I8),
        AttentionCase { value_size: 64, ..sized(1, 20, 24, DType::I8) },
        AttentionCase { cache: DType::I8, op: kinds().swap_remove(7), ..AttentionCase::new(2, 3, 64) },
        AttentionCase { negative: true, ..sized(1, 5, 64, DType::I8) },
        AttentionCase { value_size: 24, ..sized(2, 1, 40, DType::I8) },
    ];
    all.extend(kinds().into_iter().map(|op| AttentionCase { op, ..AttentionCase::new(1, 2, 32) }));
    let on_codes = [
        sized(1, 2, 64, DType::F32),
        sized(2, 3, 80, DType::F16),
        sized(2, 1, 96, DType::BF16),
        sized(1, 8, 128, DType::F16),
        sized(1, 2, 256, DType::F32),
        sized(2, 4, 64, DType::I8),
        AttentionCase { negative: true, value_size: 32, ..sized(1, 7, 48, DType::I8) },
    ];
    all.extend(on_codes.map(AttentionCase::on_codes));
    all.extend(kinds().into_iter().map(|op| AttentionCase { op, ..AttentionCase::new(1, 2, 32) }.on_codes()));
    let lengths = [(1, 0), (1, 1), (1, 63), (1, 200), (2, 0), (33, 0), (70, 41), (5, 333)];
    let big = [(1, 2000), (300, 0), (120, 900)];
    // Inputs and the expected result by case, tokens and past.
    type References = HashMap<(usize, usize, usize), (Vec<Tensor>, Vec<f32>)>;
    let mut references = References::new();
    let levels = host_levels();
    for (l, level) in levels.iter().enumerate() {
        let (target, level) = target_of(level);
        for (back_end, compile) in back_ends() {
            for (c, case) in all.iter().enumerate() {
                // The best level does everything, the others share the cases.
                if l + 1 < levels.len() && !(c + l).is_multiple_of(3) {
                    continue;
                }
                let (decode, prefill) = (case.kernels(true, &target), case.kernels(false, &target));
                let (one, many) = (compile(&decode, &level), compile(&prefill, &level));
                let more = if [0, 4, 29].contains(&c) && back_end == "llvm" { &big[..] } else { &[] };
                for &(n, past) in lengths.iter().chain(more) {
                    let (inputs, expected) = references.entry((c, n, past)).or_insert_with(|| {
                        let inputs = case.inputs(n, past);
                        let expected = case.reference(&inputs, n, past);
                        (inputs, expected)
                    });
                    let sizes = SymValues { n: n as i64, b: 1, past: past as i64 };
                    let what = format!("{case:?} by {back_end} for {}, n = {n}, past = {past}", level.name);
                    let found = executed(&many, &prefill, inputs, &sizes, 2);
                    assert_close(&what, expected, &found, tolerance_of_several(&prefill[0]));
                    if n == 1 {
                        let found = executed(&one, &decode, inputs, &sizes, 3);
                        assert_close(
                            &format!("{what}, decode"),
                            expected,
                            &found,
                            tolerance(case, &decode[0]),
                        );
                    }
                }
            }
        }
    }
}
