//! RWKV-5 to -7 under both namings, with and without config.json.

use crate::common::{self, golden, shared};
use mlcc_models::checkpoint::CheckpointFormat;
use mlcc_models::{Checkpoint, ModelConfig, ModelRequest, Rwkv5Config, resolve};
use std::fmt::Write;

/// A safetensors checkpoint of zeros with these tensors.
fn zeros(tensors: &[(&str, &[usize])]) -> Checkpoint {
    let mut header = String::new();
    let mut end = 0;
    for (name, shape) in tensors {
        let bytes = 4 * shape.iter().product::<usize>();
        let comma = if header.is_empty() { "" } else { "," };
        let range = [end, end + bytes];
        write!(header, r#"{comma}"{name}":{{"dtype":"F32","shape":{shape:?},"data_offsets":{range:?}}}"#)
            .unwrap();
        end += bytes;
    }
    let file = common::safetensors(&format!("{{{header}}}"), &vec![0; end]);
    Checkpoint::from_bytes("x.safetensors", CheckpointFormat::Safetensors, file).unwrap()
}

/// The first block of an RWKV-5 of two heads of 4.
fn rwkv5_block(decay: &'static [usize], gate: bool) -> Vec<(&'static str, &'static [usize])> {
    let mut tensors: Vec<(&str, &[usize])> = vec![
        ("emb.weight", &[16, 8]),
        ("blocks.0.att.key.weight", &[8, 8]),
        ("blocks.0.att.ln_x.weight", &[8]),
        ("blocks.0.att.time_faaaa", &[2, 4]),
        ("blocks.0.att.time_decay", decay),
        ("blocks.0.ffn.key.weight", &[28, 8]),
    ];
    tensors.extend(gate.then_some(("blocks.0.att.gate.weight", &[8, 8][..])));
    tensors
}

#[test]
fn versions_before_5_2_are_refused_by_name() {
    let refused = |checkpoint: Checkpoint| ModelConfig::of_rwkv_tensors(&checkpoint).unwrap_err().to_string();
    let error = refused(zeros(&rwkv5_block(&[2], false)));
    assert!(error.contains("RWKV-5.0 is not supported yet"), "{error}");
    for decay in [&[2][..], &[2, 1], &[2, 1, 1]] {
        let error = refused(zeros(&rwkv5_block(decay, true)));
        assert!(error.contains("RWKV-5.1 is not supported yet"), "{error}");
    }
    let config = ModelConfig::of_rwkv_tensors(&zeros(&rwkv5_block(&[2, 4], true))).unwrap();
    let rwkv: &Rwkv5Config = config.architecture.downcast_family().unwrap();
    assert_eq!((rwkv.heads(), rwkv.head_size, rwkv.intermediate, rwkv.layers), (2, 4, 28, 1));
    let json = r#"{"model_type":"rwkv5","model_version":"5_1","hidden_size":8,"vocab_size":16,"num_hidden_layers":1}"#;
    let error = ModelConfig::parse("c.json", json.as_bytes()).unwrap_err().to_string();
    assert!(error.contains("c.json") && error.contains("5_1") && error.contains("5_2"), "{error}");
}

#[test]
fn heads_that_contradict_the_width_are_refused() {
    let mut tensors = rwkv5_block(&[2, 4], true);
    tensors[3].1 = &[3, 4];
    let error = ModelConfig::of_rwkv_tensors(&zeros(&tensors)).unwrap_err().to_string();
    assert!(error.contains("3 heads of 4") && error.contains("8 rows"), "{error}");
    let seven: [(&str, &[usize]); 2] = [("emb.weight", &[16, 8]), ("blocks.0.att.r_k", &[3, 4])];
    let error = ModelConfig::of_rwkv_tensors(&zeros(&seven)).unwrap_err().to_string();
    assert!(error.contains("blocks.0.att.r_k has 3 heads of 4"), "{error}");
}

#[test]
fn wrong_configurations_name_the_field() {
    let base = r#""hidden_size":96,"vocab_size":16,"num_hidden_layers":1"#;
    let refused = |model_type: &str, field: &str, parts: &[&str]| {
        let json = format!(r#"{{"model_type":"{model_type}",{base},{field}}}"#);
        let error = ModelConfig::parse("c.json", json.as_bytes()).expect_err("refused").to_string();
        for part in parts {
            assert!(error.contains(part), "expected `{part}` in: {error}");
        }
    };
    for model in ["rwkv5", "rwkv6"] {
        refused(model, r#""head_size":64"#, &["`head_size` should be a divisor of 96", "found 64"]);
        refused(model, r#""head_size":32,"head_size_divisor":0"#, &["`head_size_divisor` should be"]);
        refused(model, r#""head_size":32,"layer_norm_epsilon":1"#, &["`layer_norm_epsilon` should be"]);
        refused(model, r#""head_size":32,"tie_word_embeddings":true"#, &["tie_word_embeddings"]);
    }
    refused("rwkv6", r#""head_size":32,"time_mix_extra_dim":0"#, &["`time_mix_extra_dim` should be"]);
    refused("rwkv7", r#""head_dim":64"#, &["`head_dim` should be a divisor of 96"]);
    refused("rwkv7", r#""head_dim":32,"num_heads":2"#, &["`num_heads` should be 3 heads of head_dim 32"]);
    refused("rwkv7", r#""head_dim":32,"attn":{"layers":[1]}"#, &["attention layers"]);
    refused("rwkv7", r#""head_dim":32,"hidden_act":"gelu""#, &["hidden_act", "gelu", "sqrelu"]);
    refused("rwkv7", r#""head_dim":32,"norm_first":false"#, &["norm_first = false"]);
    refused("rwkv7", r#""head_dim":32,"value_dim":[96,48]"#, &["value_dim"]);
    refused("rwkv7", r#""head_dim":32,"hidden_ratio":-1"#, &["`hidden_ratio` should be"]);
}

#[test]
fn thin_matrices_in_the_other_orientation_are_turned() {
    let data: Vec<u8> = (0..6).flat_map(|i| (i as f32).to_le_bytes()).collect();
    let header = r#"{"blocks.1.att.w1":{"dtype":"F32","shape":[2,3],"data_offsets":[0,24]}}"#;
    let file = common::safetensors(header, &data);
    let mut checkpoint = Checkpoint::from_bytes("x", CheckpointFormat::Safetensors, file).unwrap();
    let rwkv7 = ModelConfig::read(&golden("rwkv7-hf").join("config.json")).unwrap().architecture;
    checkpoint.rename(|name| rwkv7.canonical_name(name)).unwrap();
    checkpoint.transpose(|name| rwkv7.is_stored_transposed(name));
    let name = "model.layers.1.attn.w_lora.lora.0.weight";
    assert_eq!(checkpoint.tensor_info(name).unwrap().shape, [3, 2]);
    assert_eq!(checkpoint.read(name).unwrap().to_f32().unwrap(), [0., 3., 1., 4., 2., 5.]);
    checkpoint.transpose(|_| true);
    assert_eq!(checkpoint.read(name).unwrap().to_f32().unwrap(), [0., 1., 2., 3., 4., 5.]);
}

#[test]
fn both_namings_of_the_same_weights_are_equal() {
    let Some(shared) = shared() else { return };
    for version in [5, 6, 7] {
        let read = |case: String| {
            let model = resolve::resolve(&ModelRequest::new(case.as_str())).unwrap();
            model.open_weights().unwrap()
        };
        let folder = |kind: &str| shared.join(format!("goldens/rwkv{version}-{kind}")).display().to_string();
        let (hf, short) = (read(folder("hf")), read(folder("pth")));
        let torch = read(format!("{}/model.pth", folder("pth")));
        assert_eq!(torch.format, CheckpointFormat::Torch);
        for other in [short, torch] {
            assert_eq!(other.tensors().len(), hf.tensors().len());
            for info in hf.tensors() {
                let expected = hf.read(&info.name).unwrap().to_f32().unwrap();
                assert_eq!(other.read(&info.name).unwrap().to_f32().unwrap(), expected, "{}", info.name);
            }
        }
    }
}

#[test]
fn pth_alone_tells_version_and_sizes() {
    let Some(shared) = shared() else { return };
    for version in [5, 6, 7] {
        let case = shared.join(format!("goldens/rwkv{version}-pth"));
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("model.pth");
        std::fs::copy(case.join("model.pth"), &file).unwrap();
        let model = resolve::resolve(&ModelRequest::new(file.to_str().unwrap())).unwrap();
        let written = ModelConfig::read(&case.join("config.json")).unwrap();
        assert_eq!(model.config.model_type, written.model_type);
        assert_eq!(
            model.config.architecture.tensor_shapes(),
            written.architecture.tensor_shapes(),
            "rwkv{version}"
        );
        model.open_weights().unwrap();
    }
}
