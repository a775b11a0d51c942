//! Weights of other quantizers: equal to what the libraries of the formats read (`tools/packed_cases.py`), in pieces of any
//! size; parts that do not fit together or hold no numbers are refused by name.

use crate::common::{golden, project, safetensors as file_of};
use mlcc_models::checkpoint::quantized;
use mlcc_models::checkpoint::{CheckpointFormat, StoredCodes, StoredGroups, StoredType};
use mlcc_models::config::ConfigFields;
use mlcc_models::{Checkpoint, CheckpointError};
use safetensors::SafeTensors;
use serde_json::{Value, json};
use std::collections::BTreeMap;

/// Tensors by name: type, shape, bytes.
type CaseTensors = BTreeMap<String, (String, Vec<usize>, Vec<u8>)>;

struct PackedCase {
    name: String,
    config: Value,
    weight: String,
    expected: Vec<f32>,
    shape: Vec<usize>,
    tensors: CaseTensors,
}

impl PackedCase {
    fn read(name: &str) -> PackedCase {
        let path = project().join("models/tests/data/packed").join(format!("{name}.safetensors"));
        let bytes = std::fs::read(&path).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
        let (_, header) = SafeTensors::read_metadata(&bytes).unwrap();
        let metadata = header.metadata().clone().unwrap();
        let file = SafeTensors::deserialize(&bytes).unwrap();
        let part = |name: &str| {
            let tensor = file.tensor(name).unwrap();
            let dtype = serde_json::to_value(tensor.dtype()).unwrap().as_str().unwrap().to_string();
            (dtype, tensor.shape().to_vec(), tensor.data().to_vec())
        };
        let mut tensors: CaseTensors =
            file.names().into_iter().map(|name| (name.to_string(), part(name))).collect();
        let (_, shape, expected) = tensors.remove("expected").unwrap();
        let expected = expected.as_chunks::<4>().0.iter().map(|raw| f32::from_le_bytes(*raw)).collect();
        let config = serde_json::from_str(&metadata["quantization_config"]).unwrap();
        PackedCase { name: name.into(), config, weight: metadata["weight"].clone(), expected, shape, tensors }
    }

    fn open(&self) -> Result<Checkpoint, CheckpointError> {
        let (mut header, mut data) = (serde_json::Map::new(), Vec::new());
        for (name, (dtype, shape, bytes)) in &self.tensors {
            let offsets = [data.len(), data.len() + bytes.len()];
            header.insert(name.clone(), json!({"dtype": dtype, "shape": shape, "data_offsets": offsets}));
            data.extend_from_slice(bytes);
        }
        let file = file_of(&Value::Object(header).to_string(), &data);
        let fields = json!({"quantization_config": self.config}).to_string();
        let fields = ConfigFields::parse("config.json", fields.as_bytes()).unwrap();
        let quantization =
            quantized::read_quantization(&fields).unwrap_or_else(|e| panic!("{}: {e}", self.name)).unwrap();
        Checkpoint::from_bytes("model.safetensors", CheckpointFormat::Safetensors, file)?
            .with_packed_weights(&quantization)
    }

    fn part(&mut self, name: &str) -> &mut (String, Vec<usize>, Vec<u8>) {
        self.tensors.get_mut(name).unwrap_or_else(|| panic!("no {name}"))
    }

    /// Opening or reading fails, and the message has these parts.
    #[track_caller]
    fn refused(&self, parts: &[&str]) {
        let read = |checkpoint: Checkpoint| checkpoint.read(&self.weight)?.to_f32().map(drop);
        let error = self.open().and_then(read).expect_err("refused").to_string();
        for part in parts.iter().chain(&["model.safetensors"]) {
            assert!(error.contains(part), "expected `{part}` in: {error}");
        }
    }
}

fn names() -> Vec<String> {
    let files = std::fs::read_dir(project().join("models/tests/data/packed")).unwrap();
    let stem = |path: std::path::PathBuf| path.file_stem().unwrap().to_str().unwrap().to_string();
    let mut names: Vec<String> = files.map(|file| stem(file.unwrap().path())).collect();
    names.sort();
    names
}

#[test]
fn values_are_those_of_the_libraries() {
    let names = names();
    assert!(names.len() >= 15, "{names:?}");
    for name in names {
        let case = PackedCase::read(&name);
        let checkpoint = case.open().unwrap_or_else(|e| panic!("{name}: {e}"));
        assert_eq!(checkpoint.tensors().len(), 1, "{name}: its parts are no tensors of their own");
        let tensor = checkpoint.read(&case.weight).unwrap_or_else(|e| panic!("{name}: {e}"));
        assert_eq!(tensor.shape(), case.shape, "{name}");
        assert!(matches!(tensor.dtype(), StoredType::Packed(_)), "{name}");
        let values = tensor.to_f32().unwrap_or_else(|e| panic!("{name}: {e}"));
        for (i, (value, expected)) in values.iter().zip(&case.expected).enumerate() {
            // NVFP4 and bitsandbytes multiply their scales in another order or in fused steps.
            let near = 2.0 * f32::EPSILON * expected.abs();
            assert!((value - expected).abs() <= near, "{name}, element {i}: {value}, expected {expected}");
        }
        for piece in [1, 7, 64, 100, 777] {
            let mut read = vec![0.0; values.len()];
            for (number, out) in read.chunks_mut(piece).enumerate() {
                tensor.read_f32_into(number * piece, out).unwrap();
            }
            assert_eq!(read, values, "{name} in pieces of {piece}");
        }
    }
}

#[test]
fn groups_of_whole_numbers_are_told() {
    let of = |name: &str| {
        let case = PackedCase::read(name);
        case.open().unwrap().stored_groups(&case.weight)
    };
    // Whole rows may be cut as one likes.
    let cases = [
        ("awq", 4, 32, true),
        ("gptq-2", 2, 32, true),
        ("gptq-4", 4, 32, true),
        ("gptq-8", 8, 32, true),
        ("ct-int4", 4, 32, false),
        ("ct-int4-zeros", 4, 32, true),
        ("ct-int8", 8, 128, false),
        ("ct-int8-channel", 8, 128, true),
    ];
    for (name, bits, columns, zeros) in cases {
        let found = of(name).unwrap_or_else(|| panic!("{name}: no groups"));
        assert_eq!((found.bits, found.columns, found.zeros), (bits, columns, zeros), "{name}");
        assert!(found.f16 || found.bf16, "{name}");
    }
    for (name, codes, columns, transposed) in
        [("mxfp4", StoredCodes::E2M1, 32, true), ("fp8-block", StoredCodes::E4M3, 32, false)]
    {
        let found = of(name).unwrap_or_else(|| panic!("{name}: no groups"));
        assert_eq!((found.codes, found.columns, found.transposed), (codes, columns, transposed), "{name}");
    }
    for name in ["gptq-act-order", "ct-nvfp4", "nf4", "nf4-nested"] {
        assert_eq!(of(name), None, "{name}");
    }
}

/// Sorted by group, columns are those of a weight whose groups are neighbours.
#[test]
fn columns_are_sorted_by_group() {
    let case = PackedCase::read("gptq-act-order");
    let checkpoint = case.open().unwrap();
    let order = checkpoint.column_order(&case.weight).unwrap();
    let mut sorted = order.clone();
    sorted.sort_unstable();
    assert!(sorted.iter().copied().eq(0..96));
    let groups = checkpoint.sorted_groups(&case.weight).unwrap();
    assert_eq!((groups.columns, groups.zeros), (32, true));
    assert_eq!(PackedCase::read("gptq-4").open().unwrap().column_order("layer.weight"), None);
}

#[test]
fn types_that_hold_the_scales() {
    let mut case = PackedCase::read("ct-int4");
    let mut of = |scale: f32| {
        let scales = case.part("layer.weight_scale");
        scales
            .2
            .chunks_exact_mut(2)
            .for_each(|raw| raw.copy_from_slice(&half::bf16::from_f32(scale).to_le_bytes()));
        let StoredGroups { f16, bf16, .. } = case.open().unwrap().stored_groups(&case.weight).unwrap();
        (f16, bf16)
    };
    assert_eq!(of(0.011), (true, true));
    // Beyond the least numbers of f16.
    assert_eq!(of(1.1e-7), (false, true));
}

/// Blocks that the shape is no multiple of, and those with fewer scales than rows.
#[test]
fn last_blocks_may_be_smaller() {
    let mut case = PackedCase::read("fp8-block");
    let one = |rows: usize| {
        let bytes = (0..rows * 40).map(|_| 0x38).collect();
        ("F8_E4M3".to_string(), vec![rows, 40], bytes)
    };
    *case.part("layer.weight") = one(70);
    let scales = [1f32, 2.0, 3.0, 4.0, 5.0, 6.0];
    *case.part("layer.weight_scale_inv") =
        ("F32".into(), vec![3, 2], scales.iter().flat_map(|s| s.to_le_bytes()).collect());
    let checkpoint = case.open().unwrap();
    let values = checkpoint.read("layer.weight").unwrap().to_f32().unwrap();
    let at = |row: usize, column: usize| values[row * 40 + column];
    assert_eq!(
        [at(0, 0), at(31, 31), at(31, 32), at(32, 0), at(69, 31), at(69, 39)],
        [1., 1., 2., 3., 5., 6.]
    );
    *case.part("layer.weight") = one(97);
    case.refused(&["layer.weight_scale_inv", "[3, 2]", "[97, 40]"]);
}

#[test]
fn parts_that_are_missing_or_do_not_fit() {
    let without = |case: &str, part: &str, parts: &[&str]| {
        let mut case = PackedCase::read(case);
        case.tensors.remove(part).unwrap_or_else(|| panic!("no {part}"));
        case.refused(&[&[part], parts].concat());
    };
    without("awq", "layer.qzeros", &["layer.qweight", "is quantized, but its companion tensor"]);
    without("gptq-4", "layer.scales", &["layer.qweight"]);
    without("fp8-block", "layer.weight_scale_inv", &[]);
    without("mxfp4", "layer.proj_scales", &["layer.proj_blocks"]);
    without("ct-int4", "layer.weight_shape", &["layer.weight_packed"]);
    without("ct-int4-zeros", "layer.weight_zero_point", &["layer.weight_packed"]);
    without("ct-nvfp4", "layer.weight_global_scale", &["layer.weight_packed"]);
    without("nf4-nested", "layer.weight.nested_absmax", &["layer.weight"]);
    without("nf4", "layer.weight.quant_state.bitsandbytes__nf4", &["layer.weight"]);

    let reshaped = |case: &str, part: &str, shape: &[usize], parts: &[&str]| {
        let mut case = PackedCase::read(case);
        let (_, found, _) = case.part(part);
        assert_eq!(found.iter().product::<usize>(), shape.iter().product::<usize>(), "the same elements");
        *found = shape.to_vec();
        case.refused(&[&[part], parts].concat());
    };
    reshaped("awq", "layer.qweight", &[48, 10], &["[48, 10]", "expected [48, 5]"]);
    reshaped("awq", "layer.qzeros", &[5, 3], &["[5, 3]", "expected [3, 5]"]);
    reshaped("gptq-4", "layer.g_idx", &[48, 2], &["expected [96]"]);
    reshaped("gptq-4", "layer.qzeros", &[24, 1], &["no codes of 2, 4 or 8 bits"]);
    reshaped("mxfp4", "layer.proj_scales", &[3, 2, 12], &["expected [3, 12, 2]"]);
    reshaped("mxfp4", "layer.proj_blocks", &[3, 12, 4, 8], &["expected [3, 12, 4, 16]"]);
    reshaped("ct-int4", "layer.weight_packed", &[12, 24], &["[24, 96]"]);
    reshaped("ct-int4", "layer.weight_scale", &[12, 6], &["[12, 6]"]);
    reshaped("nf4", "layer.weight.absmax", &[2, 24], &["expected [48]"]);
}

#[test]
fn numbers_that_cannot_be() {
    let bytes = |case: &str, part: &str, bytes: &[u8], parts: &[&str]| {
        let mut case = PackedCase::read(case);
        case.part(part).2[..bytes.len()].copy_from_slice(bytes);
        case.refused(&[&[part], parts].concat());
    };
    let nan = half::f16::NAN.to_le_bytes();
    bytes("awq", "layer.scales", &nan, &["scale 0 is NaN"]);
    bytes("gptq-4", "layer.scales", &half::f16::INFINITY.to_le_bytes(), &["scale 0 is inf"]);
    bytes("gptq-act-order", "layer.g_idx", &3i32.to_le_bytes(), &["column 0", "group 3", "there are 3"]);
    bytes("gptq-act-order", "layer.g_idx", &(-1i32).to_le_bytes(), &["group -1"]);
    bytes("mxfp4", "layer.proj_scales", &[255], &["scale 0 is 255, an exponent that encodes no number"]);
    bytes("fp8-block", "layer.weight", &[0x38, 0x7f], &["0x7f at [0, 1]", "encodes no number"]);
    bytes("ct-fp8-channel", "layer.weight", &[0xff], &["0xff at [0, 0]"]);
    bytes("ct-nvfp4", "layer.weight_scale", &[0x7f], &["scale 0 is NaN"]);
    bytes("ct-nvfp4", "layer.weight_global_scale", &0f32.to_le_bytes(), &["finite and not 0"]);
    bytes("ct-int4", "layer.weight_shape", &(-24i64).to_le_bytes(), &["[-24, 96]"]);
    bytes("nf4", "layer.weight.quant_state.bitsandbytes__nf4", b"{{", &["not a description"]);
}

/// No damage to the parts makes the reader panic.
#[test]
fn any_shape_of_any_part() {
    for name in names() {
        let case = PackedCase::read(&name);
        for part in case.tensors.keys() {
            let (dtype, shape, bytes) = &case.tensors[part];
            let elements: usize = shape.iter().product();
            let shapes = [
                vec![],
                vec![0],
                vec![0, elements],
                vec![elements],
                vec![elements, 1],
                vec![1, elements],
                vec![1, 1, elements],
            ];
            for shape in shapes {
                let mut damaged = PackedCase { tensors: case.tensors.clone(), ..PackedCase::read(&name) };
                let size = bytes.len() / elements.max(1);
                let len = size * shape.iter().product::<usize>();
                *damaged.part(part) = (dtype.clone(), shape, bytes[..len].to_vec());
                let Ok(checkpoint) = damaged.open() else { continue };
                let _ = checkpoint.stored_groups(&case.weight);
                if let Ok(tensor) = checkpoint.read(&case.weight) {
                    let _ = tensor.to_f32();
                }
            }
        }
    }
}

#[test]
fn weights_of_a_checkpoint_with_quantized_experts() {
    let dir = golden("gpt-oss-mxfp4");
    let request = mlcc_models::resolve::ModelRequest::new(dir.to_str().unwrap());
    let checkpoint = mlcc_models::resolve::resolve(&request).unwrap().open_weights().unwrap();
    let info = checkpoint.tensor_info("model.layers.1.mlp.experts.gate_up_proj").unwrap();
    assert_eq!((info.shape.as_slice(), info.dtype.name()), (&[4, 64, 128][..], "MXFP4"));
    assert!(checkpoint.tensor_info("model.layers.1.mlp.experts.gate_up_proj_blocks").is_none());
}
