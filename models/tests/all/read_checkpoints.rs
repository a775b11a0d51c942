//! The project's checkpoints and, where present, the larger set of reference cases, read in every format.

use crate::common::{PickleWriter, golden, shared, tiny_books, torch_archive};
use mlcc_models::checkpoint::{CheckpointFormat, FiniteCheck, WeightFiles};
use mlcc_models::{Checkpoint, ModelRequest, Rwkv4Config, StoredType, resolve};
use std::path::Path;

fn open(dir: &Path) -> Checkpoint {
    Checkpoint::open(&WeightFiles::in_directory(dir).unwrap()).unwrap()
}

#[test]
fn every_case_resolves_and_fits_its_configuration() {
    let cases = ["rwkv4-hf", "rwkv4-hf-odd", "rwkv4-pth", "rwkv5-hf", "rwkv6-hf", "rwkv7-hf"];
    for dir in cases.map(golden).into_iter().chain([tiny_books()]) {
        let model = resolve::resolve(&ModelRequest::new(dir.to_str().unwrap())).unwrap();
        let checkpoint = model.open_weights().unwrap();
        assert_eq!(checkpoint.tensors().len(), model.config.architecture.tensor_shapes().len());
        for info in checkpoint.tensors() {
            let values = checkpoint.read(&info.name).unwrap().to_f32().unwrap();
            FiniteCheck::new(info).check(0, &values).unwrap();
        }
    }
}

#[test]
fn pth_and_safetensors_of_the_same_weights_are_equal() {
    let read = |case: &str| {
        let model = resolve::resolve(&ModelRequest::new(golden(case).to_str().unwrap())).unwrap();
        model.open_weights().unwrap()
    };
    let (torch, hf) = (read("rwkv4-pth"), read("rwkv4-hf"));
    assert_eq!((torch.format, hf.format), (CheckpointFormat::Torch, CheckpointFormat::Safetensors));
    assert_eq!(torch.tensors().len(), hf.tensors().len());
    for info in hf.tensors() {
        let expected = hf.read(&info.name).unwrap().to_f32().unwrap();
        assert_eq!(torch.read(&info.name).unwrap().to_f32().unwrap(), expected, "{}", info.name);
    }
}

#[test]
fn pth_alone_tells_its_configuration() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("RWKV-4-Tiny.pth");
    std::fs::copy(golden("rwkv4-pth").join("model.pth"), &file).unwrap();
    let model = resolve::resolve(&ModelRequest::new(file.to_str().unwrap())).unwrap();
    assert_eq!(model.name, "RWKV-4-Tiny");
    let config: &Rwkv4Config = model.config.architecture.downcast_family().unwrap();
    let sizes = [config.vocab, config.hidden, config.attention_hidden, config.intermediate, config.layers];
    assert_eq!(sizes, [320, 64, 64, 256, 4]);
    assert_eq!(config.rescale_every, 6);
    model.open_weights().unwrap();
    // A config.json beside it wins.
    std::fs::copy(golden("rwkv4-pth").join("config.json"), dir.path().join("config.json")).unwrap();
    let model = resolve::resolve(&ModelRequest::new(file.to_str().unwrap())).unwrap();
    let config: &Rwkv4Config = model.config.architecture.downcast_family().unwrap();
    assert_eq!(config.rescale_every, 2);
}

#[test]
fn pieces_of_a_tensor_equal_the_whole_in_every_type() {
    let checkpoint = open(&tiny_books());
    let name = "rwkv.blocks.1.feed_forward.key.weight";
    let tensor = checkpoint.read(name).unwrap();
    assert_eq!((tensor.dtype(), tensor.shape()), (StoredType::F16, &[1024, 256][..]));
    let whole = tensor.to_f32().unwrap();
    let mut rows = vec![0.0; 3 * 256];
    tensor.read_f32_into(700 * 256, &mut rows).unwrap();
    assert_eq!(rows, whole[700 * 256..703 * 256]);
    let first = half::f16::from_le_bytes(tensor.bytes().unwrap()[..2].try_into().unwrap());
    assert_eq!(whole[0], first.to_f32());
    let mut beyond = vec![0.0; 2];
    let error = tensor.read_f32_into(1024 * 256 - 1, &mut beyond).unwrap_err().to_string();
    assert!(error.contains("262143..262145 asked for, it has 262144"), "{error}");
}

#[test]
fn strided_views_are_gathered_row_major() {
    let data: Vec<u8> = (0..12).flat_map(|i| (i as f32).to_le_bytes()).collect();
    let transposed = PickleWriter::one_tensor("w", ("FloatStorage", "0", 12), 0, &[4, 3], &[1, 4]);
    let archive = torch_archive(&transposed, &[("0", &data)]);
    let checkpoint = Checkpoint::from_bytes("t.pth", CheckpointFormat::Torch, archive).unwrap();
    let values = checkpoint.read("w").unwrap().to_f32().unwrap();
    assert_eq!(values, [0., 4., 8., 1., 5., 9., 2., 6., 10., 3., 7., 11.]);

    // A window of a matrix: rows 1 and 2, columns 1 to 3 of [3, 4].
    let window = PickleWriter::one_tensor("w", ("FloatStorage", "0", 12), 5, &[2, 3], &[4, 1]);
    let archive = torch_archive(&window, &[("0", &data)]);
    let checkpoint = Checkpoint::from_bytes("t.pth", CheckpointFormat::Torch, archive).unwrap();
    assert_eq!(checkpoint.read("w").unwrap().to_f32().unwrap(), [5., 6., 7., 9., 10., 11.]);
}

#[test]
fn wrapped_parameters_and_metadata_of_state_dicts_are_understood() {
    let data = 2.5f32.to_le_bytes();
    // {"epoch": 3, "state_dict": OrderedDict([("w", Parameter(tensor))]) with attribute _metadata}
    let pickle = PickleWriter::new()
        .raw(b"}(")
        .text("epoch")
        .int(3)
        .text("state_dict")
        .global("collections", "OrderedDict")
        .raw(b")R(")
        .text("w")
        .global("torch._utils", "_rebuild_parameter")
        .raw(b"(")
        .tensor(("FloatStorage", "0", 1), 0, &[1], &[1])
        .raw(b"\x88")
        .global("collections", "OrderedDict")
        .raw(b")RtRu}")
        .text("_metadata")
        .raw(b"}sbu")
        .end();
    let archive = torch_archive(&pickle, &[("0", &data)]);
    let checkpoint = Checkpoint::from_bytes("t.pth", CheckpointFormat::Torch, archive).unwrap();
    assert_eq!(checkpoint.read("w").unwrap().to_f32().unwrap(), [2.5]);
}

#[test]
fn integer_buffers_are_listed_but_not_read_as_weights() {
    let pickle = PickleWriter::one_tensor("position", ("LongStorage", "0", 1), 0, &[1], &[1]);
    let archive = torch_archive(&pickle, &[("0", &7i64.to_le_bytes())]);
    let checkpoint = Checkpoint::from_bytes("t.pth", CheckpointFormat::Torch, archive).unwrap();
    assert_eq!(checkpoint.tensors()[0].dtype, StoredType::I64);
    let error = checkpoint.read("position").unwrap().to_f32().unwrap_err().to_string();
    assert!(error.contains("`position` is stored as i64"), "{error}");
}

#[test]
fn random_weights_repeat_and_do_not_depend_on_piece_size() {
    let mut request = ModelRequest::new("rwkv-169m");
    request.random_weights = Some(5);
    let model = resolve::resolve(&request).unwrap();
    let checkpoint = model.open_weights().unwrap();
    let elements: usize = checkpoint.tensors().iter().map(|info| info.elements()).sum();
    assert_eq!(elements, 169_342_464);
    let tensor = checkpoint.read("rwkv.blocks.11.feed_forward.value.weight").unwrap();
    assert_eq!((tensor.shape(), tensor.bytes()), (&[768, 3072][..], None));
    let mut rows = vec![0.0; 3072 * 2];
    tensor.read_f32_into(3072 * 9, &mut rows).unwrap();
    assert_eq!(rows, tensor.to_f32().unwrap()[3072 * 9..3072 * 11]);
}

/// Every checkpoint of the reference set, whatever its model: single and sharded safetensors, torch shards, bf16.
#[test]
fn all_reference_checkpoints_can_be_listed_and_read() {
    let Some(shared) = shared() else { return };
    let mut count = 0;
    for entry in std::fs::read_dir(shared.join("goldens")).unwrap() {
        let dir = entry.unwrap().path();
        if !dir.join("config.json").is_file() {
            continue;
        }
        let checkpoint = open(&dir);
        for info in checkpoint.tensors() {
            let tensor = checkpoint.read(&info.name).unwrap();
            if info.dtype.ir().is_some() {
                FiniteCheck::new(info).check(0, &tensor.to_f32().unwrap()).unwrap();
            }
        }
        count += 1;
    }
    assert!(count > 30, "{count}");
}

#[test]
fn the_reference_reader_sees_the_same_safetensors() {
    let Some(shared) = shared() else { return };
    for case in ["rwkv6-pth", "qwen2", "gpt2-hub-names", "chatglm2-6b-tiny"] {
        let file = shared.join("goldens").join(case).join("model.safetensors");
        let bytes = std::fs::read(&file).unwrap();
        let reference = safetensors::SafeTensors::deserialize(&bytes).unwrap();
        let checkpoint = Checkpoint::open(&WeightFiles::from_file(&file).unwrap()).unwrap();
        assert_eq!(reference.len(), checkpoint.tensors().len());
        for info in checkpoint.tensors() {
            let view = reference.tensor(&info.name).unwrap();
            assert_eq!(view.shape(), info.shape);
            assert_eq!(Some(view.data()), checkpoint.read(&info.name).unwrap().bytes(), "{}", info.name);
        }
    }
}
