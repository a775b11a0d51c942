//! GGUF files written with the `gguf` package (`tools/gguf_cases.py`), held against the checkpoints they were made from;
//! files made by hand that are wrong.

use crate::common::{golden, shared};
use mlcc_models::checkpoint::{CheckpointFormat, FiniteCheck, WeightFiles};
use mlcc_models::config::ConfigFields;
use mlcc_models::families::gguf_architectures;
use mlcc_models::resolve::open_checkpoint;
use mlcc_models::{Checkpoint, StoredType};
use serde_json::{Value, json};
use std::path::{Path, PathBuf};

fn data(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data").join(name)
}

fn open(path: &Path) -> Checkpoint {
    open_checkpoint(&WeightFiles::from_file(path).unwrap()).unwrap()
}

#[test]
fn every_block_format_reads_back_as_ggml_reads_it() {
    let file = open(&data("blocks.gguf"));
    let expected = std::fs::read(data("blocks.f32")).unwrap();
    let expected: Vec<f32> = expected.as_chunks::<4>().0.iter().map(|raw| f32::from_le_bytes(*raw)).collect();
    let types = [
        ("Q4_0", StoredType::Q4_0),
        ("Q4_1", StoredType::Q4_1),
        ("Q5_0", StoredType::Q5_0),
        ("Q5_1", StoredType::Q5_1),
        ("Q8_0", StoredType::Q8_0),
        ("Q4_K", StoredType::Q4K),
        ("Q5_K", StoredType::Q5K),
        ("Q6_K", StoredType::Q6K),
        ("Q2_K", StoredType::Q2K),
        ("Q3_K", StoredType::Q3K),
        ("IQ4_NL", StoredType::Iq4Nl),
        ("IQ4_XS", StoredType::Iq4Xs),
        ("MXFP4", StoredType::Mxfp4),
        ("NVFP4", StoredType::Nvfp4),
    ];
    assert_eq!(expected.len(), types.len() * 3 * 512);
    for ((name, dtype), expected) in types.into_iter().zip(expected.chunks(3 * 512)) {
        let tensor = file.read(name).unwrap();
        assert_eq!((tensor.dtype(), tensor.shape()), (dtype, &[3, 512][..]));
        assert_eq!(tensor.to_f32().unwrap(), expected, "{name}");
        let mut piece = vec![0.0; 700];
        tensor.read_f32_into(333, &mut piece).unwrap();
        assert_eq!(piece, expected[333..1033], "{name}");
        assert_eq!(tensor.row_blocks(1).map(<[u8]>::len), Some(tensor.info().bytes() / 3));
        assert_eq!(tensor.bytes(), None);
    }
}

/// Files of these architectures have tensors that the checkpoint has as one: their logits are held against the golden
/// (`tests/tests/all/family_goldens.rs`). So are those of models that are stored inside of larger ones, or whose multipliers went
/// into the weights.
const TAKEN_APART: [&str; 15] = [
    "internlm2",
    "baichuan",
    "gpt-oss",
    "qwen3.5",
    "qwen3-next",
    "gemma4",
    "granite4",
    "falcon-h1",
    "nemotron-h",
    "deepseek",
    "glm4-moe-lite",
    "mistral4",
    "kimi-linear",
    "exaone4",
    "mamba.",
];

/// A shape without its axes of one element, by which files may differ.
fn squeezed(shape: &[usize]) -> Vec<usize> {
    shape.iter().copied().filter(|&dim| dim != 1).collect()
}

/// Tensors and configuration of a file against the golden of the same weights.
fn check_against(golden: &Path, file: &Path) {
    let case = file.display();
    if TAKEN_APART.iter().any(|start| golden.ends_with(start) || case.to_string().contains(start)) {
        println!("{case}: its tensors are not those of the checkpoint");
        return;
    }
    let (gguf, original) =
        (open(file), Checkpoint::open(&WeightFiles::in_directory(golden).unwrap()).unwrap());
    let mut compared = 0;
    for info in original.tensors() {
        let tied = info.name == "lm_head.weight" && gguf.tensor_info("lm_head.weight").is_none();
        if !info.dtype.is_weight() || info.name.contains("inv_freq") || tied {
            continue;
        }
        let read = gguf.read(&info.name).unwrap_or_else(|error| panic!("{case}: {error}"));
        assert_eq!(squeezed(read.shape()), squeezed(&info.shape), "{case}: {}", info.name);
        let expected = original.read(&info.name).unwrap().to_f32().unwrap();
        let found = read.to_f32().unwrap();
        // Gemma's norms are stored plus one, and decays as -exp(x), which rounds twice.
        let near = if info.name.ends_with(".A_log") { 3e-7 } else { 2e-7 };
        let far = found.iter().zip(&expected).any(|(a, b)| (a - b).abs() > near);
        assert!(!far, "{case}: {}", info.name);
        compared += 1;
    }
    // The first layer of RWKV-7 has tensors that only llama.cpp asks for.
    let unused = |name: &str| name.starts_with("model.layers.0.attn.v_lora.");
    let used = gguf.tensors().iter().filter(|info| !unused(&info.name)).count();
    assert_eq!(compared, used, "{case}");
    let config = ConfigFields::read(&golden.join("config.json")).unwrap();
    let config = Value::Object(config.raw);
    let found = gguf.embedded_config(&gguf_architectures()).unwrap().unwrap().raw;
    for (field, value) in &found {
        check_field(&format!("{case}: {field}"), field, value, &config);
    }
}

/// A field of the configuration made from a GGUF file against the one of config.json, where that has it.
fn check_field(label: &str, field: &str, value: &Value, config: &Value) {
    let parameters = &config["rope_parameters"];
    let expected = match (&config[field], &parameters[field]) {
        (Value::Null, Value::Null) => return,
        (Value::Null, inner) => inner,
        (outer, _) => outer,
    };
    match (field, value) {
        // Said in other words; the model's own golden holds them.
        ("rope_scaling" | "rope_parameters" | "attn_config" | "block_auto_adjust_ff_dim", _) => {}
        // The width that the class computes from `block_ff_dim`.
        ("intermediate_size", _) if !config["block_ff_dim"].is_null() => {}
        ("num_kv_heads", _) if config["multi_query"] == true => {}
        // InternLM 1 is Llama with biases.
        ("model_type", _) if expected == "internlm" => assert_eq!(value, "llama", "{label}"),
        (_, Value::Number(number)) if number.is_f64() => {
            let (a, b) = (number.as_f64().unwrap(), expected.as_f64().unwrap());
            assert!((a - b).abs() <= 1e-6 * b.abs(), "{label}: {a}, expected {b}");
        }
        _ => assert_eq!(value, expected, "{label}"),
    }
}

#[test]
fn files_of_the_project_equal_the_checkpoints_they_were_made_from() {
    for case in ["qwen2", "mistral-swa", "gemma", "stablelm-head-norms", "rwkv6-hf", "lfm2", "mamba2"] {
        check_against(&golden(case), &data(&format!("{case}.gguf")));
    }
}

/// `tools/gguf_cases.py GOLDENS --all DIR`, then `MLCC_GGUF=DIR`: every architecture.
#[test]
fn files_of_every_architecture() {
    let Some(files) = std::env::var_os("MLCC_GGUF") else {
        eprintln!("skipped: MLCC_GGUF names no folder of files made by tools/gguf_cases.py --all");
        return;
    };
    for entry in std::fs::read_dir(files).unwrap() {
        let file = entry.unwrap().path();
        let case = file.file_stem().unwrap().to_string_lossy().into_owned();
        match (golden(&case), shared()) {
            (own, _) if own.is_dir() => check_against(&own, &file),
            (_, Some(shared)) => check_against(&shared.join("goldens").join(case), &file),
            (_, None) => println!("skipped: no reference case {case}"),
        }
    }
}

/// Writes files as the specification says.
#[derive(Clone)]
struct GgufWriter {
    version: u32,
    pairs: Vec<u8>,
    pair_count: u64,
    tensors: Vec<u8>,
    tensor_count: u64,
    data: usize,
}

impl GgufWriter {
    fn new() -> GgufWriter {
        GgufWriter {
            version: 3,
            pairs: Vec::new(),
            pair_count: 0,
            tensors: Vec::new(),
            tensor_count: 0,
            data: 256,
        }
    }
    fn pair(mut self, key: &str, kind: u32, value: &[u8]) -> GgufWriter {
        self.pairs.extend(text(key));
        self.pairs.extend(kind.to_le_bytes());
        self.pairs.extend(value);
        self.pair_count += 1;
        self
    }
    fn tensor(mut self, name: &str, dims: &[u64], kind: u32, offset: u64) -> GgufWriter {
        self.tensors.extend(text(name));
        self.tensors.extend((dims.len() as u32).to_le_bytes());
        dims.iter().for_each(|dim| self.tensors.extend(dim.to_le_bytes()));
        self.tensors.extend(kind.to_le_bytes());
        self.tensors.extend(offset.to_le_bytes());
        self.tensor_count += 1;
        self
    }
    fn bytes(&self) -> Vec<u8> {
        let mut file = b"GGUF".to_vec();
        file.extend(self.version.to_le_bytes());
        file.extend(self.tensor_count.to_le_bytes());
        file.extend(self.pair_count.to_le_bytes());
        file.extend(&self.pairs);
        file.extend(&self.tensors);
        file.resize(file.len().next_multiple_of(32) + self.data, 0);
        file
    }
}

fn text(text: &str) -> Vec<u8> {
    [&(text.len() as u64).to_le_bytes(), text.as_bytes()].concat()
}

fn read(bytes: Vec<u8>) -> Result<Checkpoint, String> {
    let read = Checkpoint::from_bytes_as("m.gguf", CheckpointFormat::Gguf, bytes, &gguf_architectures());
    read.map_err(|error| error.to_string())
}

#[track_caller]
fn refused(writer: &GgufWriter, parts: &[&str]) {
    let error = read(writer.bytes()).expect_err("a wrong file");
    for part in parts.iter().chain(&["m.gguf"]) {
        assert!(error.contains(part), "expected `{part}` in: {error}");
    }
}

#[test]
fn files_that_are_wrong() {
    let good = GgufWriter::new().pair("a", 4, &7u32.to_le_bytes()).tensor("w", &[4, 2], 0, 0);
    assert_eq!(read(good.bytes()).unwrap().tensor_info("w").unwrap().shape, [2, 4]);
    refused(&GgufWriter { version: 1, ..good.clone() }, &["version 1"]);
    refused(&GgufWriter { version: 3u32.swap_bytes(), ..good.clone() }, &["big-endian"]);
    refused(&GgufWriter { version: 99, ..good.clone() }, &["version 99"]);
    refused(&GgufWriter { pair_count: 2, ..good.clone() }, &["damaged"]);
    refused(&GgufWriter { pair_count: u64::from(u16::MAX), ..good.clone() }, &["damaged"]);
    refused(&GgufWriter { tensor_count: u64::MAX, ..good.clone() }, &["claims 18446744073709551615 tensors"]);
    refused(&good.clone().pair("a", 4, &[0; 4]), &["metadata `a` twice"]);
    refused(&good.clone().pair("b", 13, &[]), &["type 13", "`b`"]);
    refused(&good.clone().pair("b", 7, &[2]), &["the bool 2"]);
    refused(&good.clone().pair("b", 8, &u64::MAX.to_le_bytes()), &["ends inside a metadata value"]);
    let list = |kind: u32, count: u64| [&kind.to_le_bytes()[..], &count.to_le_bytes()].concat();
    refused(&good.clone().pair("b", 9, &list(4, 1 << 40)), &["claims 1099511627776 elements", "`b`"]);
    refused(&good.clone().pair("b", 9, &list(8, 400)), &["claims 400 elements"]);
    refused(&good.clone().pair("b", 9, &list(9, 1)), &["list of lists"]);
    refused(&good.clone().pair("general.alignment", 4, &48u32.to_le_bytes()), &["alignment 48"]);
    refused(&good.clone().pair("general.alignment", 8, &text("x")), &["alignment", "a string"]);
}

#[test]
fn tensors_that_are_wrong() {
    let empty = GgufWriter::new();
    let with =
        |name: &str, dims: &[u64], kind: u32, offset: u64| empty.clone().tensor(name, dims, kind, offset);
    refused(&with("w", &[4], 0, 0).tensor("w", &[4], 0, 32), &["`w`", "occurs twice"]);
    refused(&with("a", &[16], 0, 0).tensor("b", &[4], 0, 32), &["`b`", "overlaps the tensor `a`"]);
    refused(&with("w", &[4], 0, 8), &["`w`", "not a multiple of 32"]);
    refused(&with("w", &[4], 0, 256), &["`w`", "16 bytes from 256"]);
    refused(&with("w", &[4], 0, u64::MAX - 31), &["`w`", "bytes from"]);
    refused(&with("w", &[1 << 62, 4], 0, 0), &["`w`"]);
    refused(&with("w", &[u64::MAX, u64::MAX], 0, 0), &["`w`"]);
    refused(&with("w", &[33], 8, 0), &["`w`", "[33]", "Q8_0 does not allow"]);
    refused(&with("w", &[32], 16, 0), &["`w`", "IQ2_XXS", "it supports", "NVFP4"]);
    refused(&with("w", &[32], 10, 0), &["`w`", "[32]", "Q2_K does not allow"]);
    refused(&with("w", &[32], 999, 0), &["type 999"]);
    refused(&with("w", &[1; 5], 0, 0), &["5 dimensions"]);
    let cut = &with("w", &[64], 0, 0).bytes();
    assert!(read(cut.clone()).is_ok(), "256 bytes of data, 256 used");
    assert!(read(cut[..cut.len() - 1].to_vec()).is_err());
    for length in 0..cut.len() - 256 {
        assert!(read(cut[..length].to_vec()).is_err(), "{length} bytes");
    }
}

/// Scales that are no numbers, in blocks that are all zeros else.
#[test]
fn blocks_with_impossible_scales() {
    for (kind, elements, at, scale) in [
        (39, 32, 0, &[255][..]),
        (8, 32, 0, &half::f16::NAN.to_le_bytes()),
        (12, 256, 2, &half::f16::INFINITY.to_le_bytes()),
        (20, 32, 0, &half::f16::INFINITY.to_le_bytes()),
    ] {
        let mut bytes = GgufWriter::new().tensor("w", &[elements], kind, 0).bytes();
        let data = bytes.len() - 256;
        let check = |bytes: Vec<u8>| {
            let file = read(bytes).unwrap();
            let tensor = file.read("w").unwrap();
            FiniteCheck::new(tensor.info()).check(0, &tensor.to_f32().unwrap())
        };
        check(bytes.clone()).unwrap();
        bytes[data + at..data + at + scale.len()].copy_from_slice(scale);
        let error = check(bytes).expect_err("refused").to_string();
        assert!(error.contains("tensor `w`") && error.contains("index [0]"), "type {kind}: {error}");
    }
}

#[test]
fn models_that_are_not_read() {
    let arch = |name: &str| GgufWriter::new().pair("general.architecture", 8, &text(name));
    let fields = |writer: GgufWriter| {
        read(writer.bytes())
            .unwrap()
            .embedded_config(&gguf_architectures())
            .map_err(|error| error.to_string())
    };
    let error = fields(GgufWriter::new()).unwrap_err();
    assert!(error.contains("general.architecture"), "{error}");
    let sized = |name: &str| {
        let number = |writer: GgufWriter, key: &str, value: u32| {
            writer.pair(&format!("{name}.{key}"), 4, &value.to_le_bytes())
        };
        let writer = number(number(arch(name), "embedding_length", 64), "block_count", 1);
        number(writer, "attention.head_count", 4)
    };
    let error = fields(sized("wavtokenizer")).unwrap_err();
    assert!(error.contains("`wavtokenizer`") && error.contains("`mlcc models` lists all"), "{error}");
    let error = fields(arch("llama")).unwrap_err();
    assert!(error.contains("`llama.embedding_length`"), "{error}");
    let error = fields(sized("llama").pair("llama.rope.scaling.type", 8, &text("mrope"))).unwrap_err();
    assert!(error.contains("`mrope`"), "{error}");
    let error = fields(sized("llama").pair("llama.context_length", 8, &text("long"))).unwrap_err();
    assert!(error.contains("`llama.context_length`") && error.contains("a string"), "{error}");
    let uneven = [&4u32.to_le_bytes()[..], &2u64.to_le_bytes(), &[1, 0, 0, 0, 2, 0, 0, 0]].concat();
    let error = fields(sized("llama").pair("llama.feed_forward_length", 9, &uneven)).unwrap_err();
    assert!(error.contains("equal for all layers"), "{error}");
    // Rows that do not fit the heads.
    let odd = sized("llama").tensor("blk.0.attn_q.weight", &[4, 6], 0, 0);
    let error = read(odd.bytes()).unwrap_err();
    assert!(error.contains("blk.0.attn_q.weight") && error.contains("4 query"), "{error}");
    for (tensor, rows) in [("attn_gate", 6), ("attn_qkv", 3), ("ssm_beta", 5)] {
        let heads = [("group_count", 2u32), ("time_step_rank", 4), ("state_size", 8)];
        let odd = heads.into_iter().fold(sized("qwen35"), |writer, (key, value)| {
            writer.pair(&format!("qwen35.ssm.{key}"), 4, &value.to_le_bytes())
        });
        let error =
            read(odd.tensor(&format!("blk.0.{tensor}.weight"), &[4, rows], 0, 0).bytes()).unwrap_err();
        assert!(error.contains(tensor) && error.contains("4 value and 2 key heads"), "{error}");
    }
}

/// Files that were written before the type of the scaling was have a factor only.
#[test]
fn linear_scaling_without_its_name() {
    let scaling = |key: &str, factor: f32| {
        let number = |writer: GgufWriter, key: &str, value: u32| {
            writer.pair(&format!("llama.{key}"), 4, &value.to_le_bytes())
        };
        let arch = GgufWriter::new().pair("general.architecture", 8, &text("llama"));
        let sized = number(number(arch, "embedding_length", 64), "block_count", 1);
        let sized = number(sized, "attention.head_count", 4).pair(key, 6, &factor.to_le_bytes());
        read(sized.bytes())
            .unwrap()
            .embedded_config(&gguf_architectures())
            .unwrap()
            .unwrap()
            .raw
            .get("rope_scaling")
            .cloned()
    };
    let linear = json!({ "rope_type": "linear", "factor": 4.0 });
    assert_eq!(scaling("llama.rope.scale_linear", 4.0), Some(linear.clone()));
    assert_eq!(scaling("llama.rope.scaling.factor", 4.0), Some(linear));
    assert_eq!(scaling("llama.rope.scale_linear", 1.0), None);
}

/// Matrices that are transposed on the way are held to the same types as others, and heads are no more than there are rows.
#[test]
fn weights_that_are_no_floats_and_heads_without_end() {
    let arch = |name: &str| GgufWriter::new().pair("general.architecture", 8, &text(name));
    let integers = arch("gpt2").pair("gpt2.attention.head_count", 4, &[1, 0, 0, 0]);
    let file = read(integers.tensor("blk.0.attn_output.weight", &[4, 4], 26, 0).bytes()).unwrap();
    let name = file.tensors().first().unwrap().name.clone();
    let error = file.read(&name).unwrap().read_f32_into(0, &mut [0.0; 4]).unwrap_err().to_string();
    assert!(error.contains(&name) && error.contains("i32"), "{error}");
    for family in ["bloom", "gptneox", "falcon"] {
        let heads = format!("{family}.attention.head_count");
        let many = arch(family).pair(&heads, 10, &(1u64 << 63).to_le_bytes());
        let error = read(many.tensor("blk.0.attn_qkv.weight", &[4, 12], 0, 0).bytes()).unwrap_err();
        assert!(error.contains("blk.0.attn_qkv.weight"), "{family}: {error}");
    }
}

#[test]
fn models_in_several_files() {
    let dir = tempfile::tempdir().unwrap();
    let write =
        |name: &str, writer: GgufWriter| std::fs::write(dir.path().join(name), writer.bytes()).unwrap();
    write("m-00001-of-00002.gguf", GgufWriter::new().pair("a", 4, &[1, 0, 0, 0]).tensor("u", &[4], 0, 0));
    let error = WeightFiles::in_directory(dir.path()).unwrap_err().to_string();
    assert!(error.contains("m-00002-of-00002.gguf"), "{error}");
    write("m-00002-of-00002.gguf", GgufWriter::new().tensor("w", &[8], 0, 0));
    let both = open_checkpoint(&WeightFiles::in_directory(dir.path()).unwrap()).unwrap();
    assert_eq!(both.tensors().len(), 2);
    assert_eq!(both.read("w").unwrap().to_f32().unwrap(), [0.0; 8]);
    assert!(both.metadata.get("a").is_some());
}
