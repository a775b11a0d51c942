//! GGUF files end to end: their own quantization kept or replaced, the report of a build, and layer by layer.
//!
//! The files are Llamas of one layer whose blocks are random bytes. The values of blocks are compared with
//! the `gguf` package in `models/tests/all/gguf.rs`; here the truth is the graph interpreter on these values.

use std::path::{Path, PathBuf};

use crate::cases::{self, assert_close, backends, build_options, feed, interpreted, load, program, scheme};
use assert_cmd::Command;
use mlcc_driver::compile::BuildOptions;
use mlcc_driver::compile::keep::BASE;
use mlcc_passes::CacheType;

const KEEP: &str = "keep";
const KEPT: &str = "kept: the same values";
const AGAIN: &str = "dequantized and quantized again";

/// The permitted error of kernels, in addition to that of a format: see `matrix.rs`.
const PACKED: f32 = 5e-4;

/// The width of a block of the K formats, and of all matrices.
const WIDTH: usize = 256;
const VOCAB: usize = 48;
const KEY: usize = 64;

/// Number of the type, weights and bytes of a block, bytes of it that are half floats and how large those
/// are.
struct BlockType {
    name: &'static str,
    number: u32,
    elements: usize,
    bytes: usize,
    halves: &'static [(usize, f32)],
}

const fn block(
    name: &'static str,
    number: u32,
    elements: usize,
    bytes: usize,
    halves: &'static [(usize, f32)],
) -> BlockType {
    BlockType { name, number, elements, bytes, halves }
}

const TYPES: [BlockType; 7] = [
    block("Q8_0", 8, 32, 34, &[(0, 1e-3)]),
    block("Q4_0", 2, 32, 18, &[(0, 2e-2)]),
    block("Q4_1", 3, 32, 20, &[(0, 2e-2), (2, -0.15)]),
    block("Q5_1", 7, 32, 24, &[(0, 1e-2), (2, -0.15)]),
    block("Q4_K", 12, 256, 144, &[(0, 3e-4), (2, 2e-3)]),
    block("Q5_K", 13, 256, 176, &[(0, 1.5e-4), (2, 2e-3)]),
    block("Q6_K", 14, 256, 210, &[(208, 7e-5)]),
];

/// SplitMix64.
struct BlockRandom(u64);

impl BlockRandom {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut x = self.0;
        x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        x ^ (x >> 31)
    }
}

impl BlockType {
    fn random(&self, random: &mut BlockRandom) -> Vec<u8> {
        let mut bytes: Vec<u8> = (0..self.bytes).map(|_| random.next() as u8).collect();
        for &(at, size) in self.halves {
            let size = size * (0.75 + random.next() as f32 / u64::MAX as f32 / 2.0);
            bytes[at..at + 2].copy_from_slice(&half::f16::from_f32(size).to_le_bytes());
        }
        // The quantization of ggml: the largest weight of a block has the largest code, the least one code 0
        // where there is a minimum.
        match self.name {
            "Q8_0" => {
                bytes[2..34].iter_mut().filter(|b| **b == 128).for_each(|b| *b = 127);
                bytes[2] = 127;
            }
            "Q4_0" => bytes[2] &= 0xf0,
            "Q4_1" => (bytes[4], bytes[5]) = (bytes[4] & 0xf0, bytes[5] | 0x0f),
            // The fifth bits of both, then their first four.
            "Q5_1" => {
                bytes[4] = bytes[4] & !3 | 2;
                (bytes[8], bytes[9]) = (bytes[8] & 0xf0, bytes[9] | 0x0f);
            }
            _ => {}
        }
        bytes
    }

    fn matrix(&self, rows: usize, random: &mut BlockRandom) -> Vec<u8> {
        (0..rows * WIDTH / self.elements).flat_map(|_| self.random(random)).collect()
    }
}

fn text(text: &str) -> Vec<u8> {
    [&(text.len() as u64).to_le_bytes(), text.as_bytes()].concat()
}

/// Writes a Llama whose matrices are all of one type; `edit` may change the bytes of each.
fn write(path: &Path, kind: &BlockType, edit: impl Fn(&mut [u8])) {
    let random = &mut BlockRandom(7);
    let number = |key: &str, value: u32| [&text(key)[..], &4u32.to_le_bytes(), &value.to_le_bytes()].concat();
    let pairs = [
        [&text("general.architecture")[..], &8u32.to_le_bytes(), &text("llama")].concat(),
        number("llama.embedding_length", WIDTH as u32),
        number("llama.block_count", 1),
        number("llama.context_length", 64),
        number("llama.feed_forward_length", WIDTH as u32),
        number("llama.attention.head_count", 4),
        number("llama.attention.head_count_kv", (KEY * 4 / WIDTH) as u32),
        [&text("llama.attention.layer_norm_rms_epsilon")[..], &6u32.to_le_bytes(), &1e-5f32.to_le_bytes()]
            .concat(),
    ];
    let matrices = [
        ("token_embd", VOCAB),
        ("output", VOCAB),
        ("blk.0.attn_q", WIDTH),
        ("blk.0.attn_k", KEY),
        ("blk.0.attn_v", KEY),
        ("blk.0.attn_output", WIDTH),
        ("blk.0.ffn_gate", WIDTH),
        ("blk.0.ffn_up", WIDTH),
        ("blk.0.ffn_down", WIDTH),
    ];
    let (mut list, mut data) = (Vec::new(), Vec::new());
    let mut add = |name: &str, dims: &[usize], kind: u32, bytes: &[u8]| {
        list.extend(text(&format!("{name}.weight")));
        list.extend((dims.len() as u32).to_le_bytes());
        dims.iter().for_each(|&dim| list.extend((dim as u64).to_le_bytes()));
        list.extend(kind.to_le_bytes());
        list.extend((data.len() as u64).to_le_bytes());
        data.extend(bytes);
        data.resize(data.len().next_multiple_of(32), 0);
    };
    for (name, rows) in matrices {
        let mut bytes = kind.matrix(rows, random);
        edit(&mut bytes);
        add(name, &[WIDTH, rows], kind.number, &bytes);
    }
    let norms = ["output_norm", "blk.0.attn_norm", "blk.0.ffn_norm"];
    norms.iter().for_each(|name| add(name, &[WIDTH], 0, &1f32.to_le_bytes().repeat(WIDTH)));
    let mut file = b"GGUF\x03\0\0\0".to_vec();
    file.extend(((matrices.len() + norms.len()) as u64).to_le_bytes());
    file.extend((pairs.len() as u64).to_le_bytes());
    file.extend(pairs.concat());
    file.extend(list);
    file.resize(file.len().next_multiple_of(32), 0);
    file.extend(data);
    std::fs::write(path, file).unwrap();
}

fn options(file: &Path, quant: &str) -> BuildOptions {
    let mut options = build_options(file);
    options.keep_quant = quant == KEEP;
    options.quant = scheme(if options.keep_quant { BASE } else { quant });
    options.quant_name = quant.into();
    options.chunk = Some(cases::CHUNK);
    // A rounding edge of a cache in f16 would hide what the kernels add.
    options.kv_cache = Some(CacheType::F32);
    options.backend = backends().next().expect("a back end is built in");
    options
}

fn prompts() -> Vec<Vec<i32>> {
    vec![(0..11).map(|i| (i * 17 + 5) % VOCAB as i32).collect(), vec![3]]
}

/// Builds, runs against the graph of the same stored weights, and returns the rows of the report and the
/// artifact.
fn check(file: &Path, quant: &str, folder: &Path) -> (Vec<(String, String, usize, String)>, PathBuf) {
    let options = options(file, quant);
    let (path, report) = cases::artifact(&options, folder, "model.so");
    let (module, source) = program(&options, Some(cases::LAST_GRAPH_PASS));
    let expected = interpreted(&module.module, &source, &prompts());
    hold(&format!("{} as {quant}", file.display()), &path, &expected);
    let rows = report.conversions.iter();
    let rows = rows.map(|row| (row.stored.into(), row.format.clone(), row.tensors, row.how.into()));
    (rows.collect(), path)
}

fn hold(what: &str, path: &Path, expected: &[Vec<f32>]) {
    let mut session = load(path, None, 1).session().unwrap();
    for (ids, expected) in prompts().iter().zip(expected) {
        for piece in [ids.len().max(2), 1] {
            assert_close(what, expected, &feed(&mut session, ids, piece), PACKED);
        }
    }
}

/// Rows of the report: nine matrices, three norms.
fn rows(kind: &BlockType, format: &str, how: &str) -> Vec<(String, String, usize, String)> {
    let mut rows = vec![(kind.name.into(), format.into(), 9, how.into())];
    rows.push(("f32".into(), "f32".into(), 3, "kept".into()));
    rows.sort();
    rows
}

#[test]
fn every_type_keeps_its_quantization_or_says_that_it_does_not() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("model.gguf");
    for kind in &TYPES {
        write(&file, kind, |_| {});
        let (mut found, path) = check(&file, KEEP, folder.path());
        found.sort();
        let (format, how) = match kind.name {
            "Q8_0" => ("q8g32", KEPT),
            "Q4_0" => ("q4g32", KEPT),
            "Q4_1" => ("q4g32_min", KEPT),
            "Q5_1" => ("q8g32_min", KEPT),
            "Q4_K" => ("q4g32_min", AGAIN),
            "Q5_K" => ("q8g32_min", AGAIN),
            _ => ("q8g32", AGAIN),
        };
        assert_eq!(found, rows(kind, format, how), "{}", kind.name);
        if how == KEPT {
            // Then the weights are those of the file.
            let (module, source) = program(&options(&file, "f32"), Some(cases::LAST_GRAPH_PASS));
            hold(kind.name, &path, &interpreted(&module.module, &source, &prompts()));
        }
    }
}

#[test]
fn another_format_is_quantized_again() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("model.gguf");
    let find = |name: &str| TYPES.iter().find(|kind| kind.name == name).unwrap();
    for (stored, quant, format, how) in [
        ("Q4_K", "q8f16_1", "q8g32", AGAIN),
        ("Q8_0", "q4f16_1", "q4g32", AGAIN),
        // The same values in the scheme's own format.
        ("Q4_0", "q4f16_1", "q4g32", KEPT),
        ("Q6_K", "f16", "f16", "dequantized"),
    ] {
        let kind = find(stored);
        write(&file, kind, |_| {});
        let (mut found, _) = check(&file, quant, folder.path());
        found.sort();
        let matrices: Vec<_> = found.iter().filter(|row| row.0 == kind.name).collect();
        assert_eq!(matrices.len(), 1, "{stored} as {quant}: {found:?}");
        let expected = (stored.to_string(), format.to_string(), 9, how.to_string());
        assert_eq!(matrices[0], &expected, "{stored} as {quant}");
    }
}

/// A block whose largest code is not the largest of the type: its scale is found nevertheless.
#[test]
fn blocks_without_the_largest_code_are_kept() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("model.gguf");
    write(&file, &TYPES[0], |bytes| {
        let first = &mut bytes[2..34];
        first.iter_mut().for_each(|code| *code = (*code as i8 / 2) as u8);
    });
    let (found, _) = check(&file, KEEP, folder.path());
    assert!(found.contains(&("Q8_0".into(), "q8g32".into(), 9, KEPT.into())), "{found:?}");
}

/// The commands that compile a model again know what `keep` made of it.
#[test]
fn layers_of_kept_weights() {
    let folder = tempfile::tempdir().unwrap();
    let (file, artifact) = (folder.path().join("model.gguf"), folder.path().join("taps.so"));
    // Its weights lie around zero, as those of models do.
    write(&file, &TYPES[2], |_| {});
    let backend = backends().last().expect("a back end is built in").name();
    let mlcc = || Command::new(env!("CARGO_BIN_EXE_mlcc"));
    let common = ["--quant", KEEP, "--kv-cache", "i8", "--chunk", "8", "--backend", backend];
    mlcc()
        .args(["build", "--quiet", "--no-cache", "--debug-taps", "-o"])
        .arg(&artifact)
        .args(common)
        .arg("--model")
        .arg(&file)
        .assert()
        .success();
    let mut verify = mlcc();
    verify.args(["verify", "--layers", "--json", "--tokens", "1,2,3,4", "--model"]).arg(&file).arg(&artifact);
    let out = verify.assert().success().get_output().stdout.clone();
    let report: serde_json::Value = serde_json::from_slice(&out).unwrap();
    assert_eq!(report["ok"], true, "{report}");
    let mut bisect = mlcc();
    bisect.arg("bisect").arg(&file).args(common).args(["--json", "--tokens", "1,2,3,4"]);
    let out = bisect.assert().success().get_output().stdout.clone();
    let report: serde_json::Value = serde_json::from_slice(&out).unwrap();
    assert_eq!(report["trials"].as_array().map(Vec::len), Some(0), "{report}");
}

/// Kept formats are judged by what they store: the distance from a golden of the file's own values is
/// reported.
#[test]
fn kept_weights_are_verified_by_what_is_stored() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("model.gguf");
    let golden = folder.path().join("golden.json");
    for kind in &TYPES {
        write(&file, kind, |_| {});
        let plain = options(&file, "f32");
        let (module, source) = program(&plain, Some(cases::LAST_GRAPH_PASS));
        let logits = interpreted(&module.module, &source, &prompts());
        let entry = |(ids, logits): (&Vec<i32>, &Vec<f32>)| serde_json::json!({ "input_ids": ids, "logits_last": logits, "greedy": [cases::argmax(logits)], "greedy_margin": [1.0] });
        let entries: Vec<_> = prompts().iter().zip(&logits).map(entry).collect();
        let text =
            serde_json::json!({ "source": "interpreter", "file_dtype": kind.name, "prompts": entries });
        std::fs::write(&golden, text.to_string()).unwrap();
        let backend = backends().last().expect("a back end is built in");
        let kept = BuildOptions { backend, ..options(&file, KEEP) };
        let (path, _) = cases::artifact(&kept, folder.path(), "model.so");
        let mut verify = Command::new(env!("CARGO_BIN_EXE_mlcc"));
        verify.args(["verify", "--json", "--golden"]).arg(&golden).arg(&path);
        let out = verify.assert().success().get_output().stdout.clone();
        let report: serde_json::Value = serde_json::from_slice(&out).unwrap();
        assert_eq!(report["format"], KEEP, "{}", kind.name);
        assert_eq!(report["kernels"]["ok"], true, "{}", kind.name);
        // Files whose blocks are kept have the values of the file; grids that are products are rounded.
        let error = report["worst_relative_error"].as_f64().unwrap();
        match kind.name {
            "Q8_0" | "Q4_0" | "Q4_1" | "Q5_1" => assert!(error < 1e-3, "{}: {report}", kind.name),
            "Q4_K" | "Q5_K" => assert!(error < 1e-2, "{}: {report}", kind.name),
            _ => assert!(error > 1e-3, "{}: {report}", kind.name),
        }
    }
}
