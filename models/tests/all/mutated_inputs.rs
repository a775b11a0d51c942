//! The short run of the fuzz targets (see `fuzz/`): a fixed number of mutated seeds through every reader, on the stable
//! toolchain. `MLCC_FUZZ_RUNS` makes it longer; a failure prints the seed of its input.

use crate::common::{PickleWriter, golden, project, safetensors, torch_archive};
use crate::readers;

/// SplitMix64, as a source of choices.
struct MutationRandom(u64);

impl MutationRandom {
    fn next(&mut self, below: usize) -> usize {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut x = self.0;
        x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((x ^ (x >> 31)) % below.max(1) as u64) as usize
    }
}

/// One to eight changes: flips, replaced bytes, boundary numbers, removed, repeated and swapped pieces, cuts.
fn mutate(seed: &[u8], random: &mut MutationRandom) -> Vec<u8> {
    let mut bytes = seed.to_vec();
    for _ in 0..=random.next(8) {
        let at = random.next(bytes.len());
        let end = (at + 1 + random.next(16)).min(bytes.len());
        match random.next(8) {
            _ if bytes.is_empty() => bytes.push(random.next(256) as u8),
            0 => bytes[at] ^= 1 << random.next(8),
            1 => bytes[at] = random.next(256) as u8,
            2 => bytes[at] = [0, 1, 0x7f, 0x80, 0xff, b'9', b'.', b'"'][random.next(8)],
            3 => bytes[at..end].fill([0, 0xff][random.next(2)]),
            4 => drop(bytes.drain(at..end)),
            5 => {
                let piece = bytes[at..end].to_vec();
                let to = random.next(bytes.len());
                bytes.splice(to..to, piece);
            }
            6 => {
                let number = [u64::MAX, u64::MAX / 2, 1 << 32, 1 << 20][random.next(4)].to_le_bytes();
                bytes[at..end.min(at + 8)].copy_from_slice(&number[..end.min(at + 8) - at]);
            }
            _ => bytes.truncate(at.max(1)),
        }
    }
    bytes
}

fn run(seeds: &[Vec<u8>], reader: fn(&[u8])) {
    let runs: u64 = std::env::var("MLCC_FUZZ_RUNS").ok().and_then(|n| n.parse().ok()).unwrap_or(4000);
    for (number, seed) in seeds.iter().enumerate() {
        reader(seed);
        for case in 0..runs / seeds.len() as u64 {
            let input = mutate(seed, &mut MutationRandom((number as u64) << 32 | case));
            if let Err(panic) = std::panic::catch_unwind(|| reader(&input)) {
                eprintln!(
                    "seed {number}, case {case}, {} bytes: {:?}",
                    input.len(),
                    &input[..input.len().min(400)]
                );
                std::panic::resume_unwind(panic);
            }
        }
    }
}

#[test]
fn mutated_safetensors() {
    let small = safetensors(
        r#"{"__metadata__":{"format":"pt"},"a":{"dtype":"F32","shape":[2,2],"data_offsets":[0,16]},"b":{"dtype":"BF16","shape":[3],"data_offsets":[16,22]},"c":{"dtype":"I64","shape":[],"data_offsets":[22,30]}}"#,
        &[7; 30],
    );
    let names = r#"{"emb.weight":{"dtype":"F16","shape":[2,2],"data_offsets":[0,8]},"blocks.0.att.key.weight":{"dtype":"F16","shape":[2,2],"data_offsets":[8,16]},"blocks.0.ffn.key.weight":{"dtype":"F16","shape":[2,2],"data_offsets":[16,24]}}"#;
    run(&[small, safetensors(names, &[7; 24])], readers::safetensors);
}

#[test]
fn mutated_torch_archives() {
    let data = [7u8; 24];
    let storage = ("FloatStorage", "0", 6);
    let plain = PickleWriter::one_tensor("emb.weight", storage, 0, &[2, 3], &[3, 1]);
    let strided = PickleWriter::one_tensor("w", storage, 1, &[2, 2], &[1, 3]);
    let nested = PickleWriter::new()
        .raw(b"}q\x00(X\x05\x00\x00\x00modelq\x01")
        .global("collections", "OrderedDict")
        .raw(b")R(")
        .text("w")
        .tensor(("HalfStorage", "0", 12), 2, &[2, 5], &[5, 1])
        .raw(b"u}(K\x01M\x02\x01\x8a\x02\x00\x01]K\x03ah\x01tbu")
        .end();
    let seeds = [plain, strided, nested].map(|pickle| torch_archive(&pickle, &[("0", &data)]));
    run(&seeds, readers::torch);
    // The pickle alone, so that mutations are not spent on the zip around it.
    let whole = std::fs::read(golden("rwkv4-pth").join("model.pth")).unwrap();
    let start = whole.windows(2).position(|pair| pair == [0x80, 2]).unwrap();
    let pickles = [whole[start..start + 7729].to_vec()];
    run(&pickles, |pickle| readers::torch(&torch_archive(pickle, &[("0", &[0; 64])])));
}

/// Small files of the gguf package, without their data: mutations are for the header.
#[test]
fn mutated_gguf_files() {
    let read = |name: &str| std::fs::read(project().join("models/tests/data").join(name)).unwrap();
    let (blocks, mistral) = (read("blocks.gguf"), read("mistral-swa.gguf"));
    // Up to the first tensor, with as much data as keeps some of them whole.
    let header = mistral[..40_000].to_vec();
    run(&[blocks[..2000].to_vec(), blocks, header], readers::gguf);
    run(&changed(), readers::gguf);
}

/// A file that opens: numbers of the metadata, and tensors: matrices of Q8_0 where its blocks fit, others of F32.
fn small(arch: &str, numbers: &[(&str, u32)], tensors: &[(&str, &[u64])]) -> Vec<u8> {
    let text = |text: &str| [&(text.len() as u64).to_le_bytes(), text.as_bytes()].concat();
    let mut file = b"GGUF\x03\0\0\0".to_vec();
    file.extend((tensors.len() as u64).to_le_bytes());
    file.extend((numbers.len() as u64 + 1).to_le_bytes());
    file.extend([&text("general.architecture")[..], &8u32.to_le_bytes(), &text(arch)].concat());
    for (key, value) in numbers {
        file.extend(text(&format!("{arch}.{key}")));
        file.extend([4u32.to_le_bytes(), value.to_le_bytes()].concat());
    }
    let mut offset = 0u64;
    for (name, dims) in tensors {
        let elements: u64 = dims.iter().product();
        let blocks = dims.len() > 1 && dims[0] % 32 == 0;
        let (kind, bytes) = if blocks { (8u32, elements / 32 * 34) } else { (0, 4 * elements) };
        file.extend(text(name));
        file.extend((dims.len() as u32).to_le_bytes());
        dims.iter().for_each(|dim| file.extend(dim.to_le_bytes()));
        file.extend(kind.to_le_bytes());
        file.extend(offset.to_le_bytes());
        offset = (offset + bytes).next_multiple_of(32);
    }
    file.resize(file.len().next_multiple_of(32) + offset as usize, 7);
    file
}

/// Files with the changes that depend on sizes: experts, heads, norms, transposed, stacked and halved tensors.
fn changed() -> Vec<Vec<u8>> {
    let sizes = [("embedding_length", 32), ("block_count", 2)];
    let with = |more: &[(&'static str, u32)]| [&sizes[..], more].concat();
    let heads = with(&[("attention.head_count", 2)]);
    vec![
        small(
            "llama",
            &with(&[("attention.head_count", 2), ("expert_count", 2)]),
            &[
                ("blk.0.ffn_up_exps.weight", &[32, 2, 2]),
                ("blk.0.attn_q.weight", &[32, 4]),
                ("token_embd.weight", &[32, 2]),
            ],
        ),
        small(
            "rwkv6",
            &with(&[("wkv.head_size", 16), ("rescale_every_n_layers", 1)]),
            &[
                ("token_embd.weight", &[32, 3]),
                ("blk.0.time_mix_lerp_fused.weight", &[32, 1, 1, 5]),
                ("blk.0.time_mix_w1.weight", &[32, 20]),
                ("blk.0.time_mix_w2.weight", &[4, 32, 5]),
                ("blk.1.time_mix_output.weight", &[32, 32]),
            ],
        ),
        small(
            "rwkv7",
            &with(&[("wkv.head_size", 16), ("attention.decay_lora_rank", 4)]),
            &[
                ("token_embd.weight", &[32, 3]),
                ("blk.0.time_mix_lerp_fused.weight", &[32, 6]),
                ("blk.0.time_mix_r_k.weight", &[32]),
                ("blk.0.time_mix_w1.weight", &[32, 4]),
            ],
        ),
        small("stablelm", &heads, &[("token_embd.weight", &[32, 3]), ("blk.0.attn_q_norm.weight", &[16, 2])]),
        small("gpt2", &heads, &[("blk.0.attn_qkv.weight", &[32, 96]), ("blk.0.attn_qkv.bias", &[96])]),
        small("gptneox", &heads, &[("blk.0.attn_qkv.weight", &[32, 96]), ("blk.1.attn_qkv.bias", &[96])]),
        small("falcon", &heads, &[("blk.0.attn_qkv.weight", &[32, 96])]),
        small("gemma", &heads, &[("blk.0.attn_norm.weight", &[32]), ("output_norm.weight", &[32])]),
    ]
}

#[test]
fn small_gguf_files_open() {
    for (number, file) in changed().into_iter().enumerate() {
        let format = mlcc_models::checkpoint::CheckpointFormat::Gguf;
        let known = mlcc_models::families::gguf_architectures();
        let open = mlcc_models::Checkpoint::from_bytes_as("m", format, file, &known);
        open.unwrap_or_else(|error| panic!("{number}: {error}"));
    }
}

#[test]
fn mutated_configurations() {
    let read = |name: &str| std::fs::read(golden("rwkv4-hf").join(name)).unwrap();
    let mini_golden = br#"{"source":"s","file_dtype":"float32","prompts":[{"input_ids":[1,2],"logits_last":[0.5,1e3],"logits_checksum_all_positions":{"mean":[0,1],"std":[1,2]},"argmax_all_positions":[1,0],"greedy":[1],"greedy_margin":[0.5]}]}"#;
    run(&[read("config.json"), mini_golden.to_vec()], readers::config);
}
