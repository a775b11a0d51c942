//! LoRA adapters: merged weights are those that PEFT's formulas give (`tools/lora_cases.py`), in pieces of any size; an adapter
//! that is not for this base is refused by the tensor.

use crate::common::{golden, project, safetensors as file_of};
use mlcc_models::resolve::resolve;
use mlcc_models::{AdapterRequest, Checkpoint, ModelError, ModelRequest, StoredType};
use safetensors::SafeTensors;
use serde_json::{Value, json};
use std::path::{Path, PathBuf};

fn request(model: &Path, adapters: &[AdapterRequest]) -> ModelRequest {
    ModelRequest { adapters: adapters.to_vec(), ..ModelRequest::new(model.to_str().unwrap()) }
}

fn open(model: &Path, adapters: &[AdapterRequest]) -> Result<Checkpoint, ModelError> {
    resolve(&request(model, adapters))?.open_weights()
}

fn adapter(directory: &Path, scale: f64) -> AdapterRequest {
    AdapterRequest { directory: directory.into(), scale }
}

fn base() -> PathBuf {
    golden("lora/base")
}

fn data(name: &str) -> PathBuf {
    project().join("models/tests/data/lora").join(name)
}

/// Name and values of each float tensor of 32 bits.
fn expected(name: &str) -> Vec<(String, Vec<f32>)> {
    let bytes = std::fs::read(data(name).join("expected.safetensors")).unwrap();
    let file = SafeTensors::deserialize(&bytes).unwrap();
    let floats = |raw: &[u8]| raw.as_chunks::<4>().0.iter().map(|raw| f32::from_le_bytes(*raw)).collect();
    file.tensors().into_iter().map(|(name, tensor)| (name, floats(tensor.data()))).collect()
}

#[test]
fn merged_weights_are_those_of_the_formulas() {
    let plain = open(&base(), &[]).unwrap();
    for (name, count) in [("dora", 4), ("tables", 3)] {
        let merged = open(&base(), &[adapter(&data(name), 1.0)]).unwrap();
        let expected = expected(name);
        assert_eq!(expected.len(), count);
        for info in merged.tensors() {
            let values = merged.read(&info.name).unwrap().to_f32().unwrap();
            assert_eq!(info.dtype, StoredType::F16);
            let Some((_, wanted)) = expected.iter().find(|(tensor, _)| *tensor == info.name) else {
                assert_eq!(values, plain.read(&info.name).unwrap().to_f32().unwrap(), "{}", info.name);
                continue;
            };
            let largest = wanted.iter().fold(0f32, |most, x| most.max(x.abs()));
            let worst = values.iter().zip(wanted).map(|(x, y)| (x - y).abs()).fold(0f32, f32::max);
            assert!(worst <= 1e-6 * largest, "{name}, {}: {worst} of {largest}", info.name);
            // Pieces that begin and end inside of rows.
            let data = merged.read(&info.name).unwrap();
            for (start, length) in [(0, 1), (17, 100), (values.len() - 33, 33)] {
                if start + length <= values.len() {
                    let mut piece = vec![0.0; length];
                    data.read_f32_into(start, &mut piece).unwrap();
                    assert_eq!(piece, values[start..start + length], "{}", info.name);
                }
            }
        }
    }
}

/// The values of a tensor with these adapters.
fn values(adapters: &[AdapterRequest], name: &str) -> Vec<f32> {
    open(&base(), adapters).unwrap().read(name).unwrap().to_f32().unwrap()
}

#[test]
fn several_add_up_and_scales_multiply() {
    let name = "model.layers.0.self_attn.q_proj.weight";
    let own = golden("lora/adapter");
    let plain = values(&[], name);
    let once = values(&[adapter(&own, 1.0)], name);
    assert!(plain.iter().zip(&once).any(|(x, y)| (x - y).abs() > 1e-3));
    let sum = values(&[adapter(&own, 1.5), adapter(&own, -0.5)], name);
    assert!(once.iter().zip(&sum).all(|(x, y)| (x - y).abs() < 1e-5));
    assert_eq!(values(&[adapter(&own, 0.0)], name), plain);
    // A length is given to what the adapter before left.
    let [first, second] = [[&own, &data("dora")], [&data("dora"), &own]]
        .map(|order| values(&order.map(|folder| adapter(folder, 1.0)), name));
    assert_ne!(first, second);
}

#[test]
fn requests_are_folders_with_a_scale() {
    let parse = |text: &str| text.parse::<AdapterRequest>();
    assert_eq!(parse("a/b"), Ok(adapter(Path::new("a/b"), 1.0)));
    assert_eq!(parse("a/b=-0.5"), Ok(adapter(Path::new("a/b"), -0.5)));
    for wrong in ["", "a=", "a=half", "=1", "a=inf", "a=nan"] {
        assert!(parse(wrong).is_err(), "{wrong}");
    }
    let folder = tempfile::tempdir().unwrap();
    let named = folder.path().join("rank=4");
    std::fs::create_dir(&named).unwrap();
    assert_eq!(parse(named.to_str().unwrap()), Ok(adapter(&named, 1.0)));
}

/// An adapter of f32 tensors that are 0.5 everywhere, with these fields.
fn written(folder: &Path, fields: Value, tensors: &[(&str, &[usize])]) {
    written_with(folder, fields, tensors, |_| 0.5);
}

/// The same with a value for each element.
fn written_with(folder: &Path, fields: Value, tensors: &[(&str, &[usize])], value: impl Fn(usize) -> f32) {
    let (mut header, mut bytes) = (serde_json::Map::new(), Vec::new());
    for (name, shape) in tensors {
        let start = bytes.len();
        bytes.extend((0..shape.iter().product()).flat_map(|i| value(i).to_le_bytes()));
        let entry = json!({"dtype": "F32", "shape": shape, "data_offsets": [start, bytes.len()]});
        header.insert(format!("base_model.model.{name}"), entry);
    }
    let file = file_of(&Value::Object(header).to_string(), &bytes);
    std::fs::write(folder.join("adapter_model.safetensors"), file).unwrap();
    let mut config =
        json!({"peft_type": "LORA", "base_model_name_or_path": "org/other", "lora_alpha": 2, "r": 2});
    config.as_object_mut().unwrap().extend(fields.as_object().unwrap().clone());
    std::fs::write(folder.join("adapter_config.json"), config.to_string()).unwrap();
}

const Q: &str = "model.layers.0.self_attn.q_proj";

#[test]
fn biases_are_changed_and_replaced() {
    let model = golden("qwen2");
    let plain = open(&model, &[]).unwrap();
    let weight = plain.tensor_info(&format!("{Q}.weight")).unwrap();
    let (rows, columns) = (weight.shape[0], weight.shape[1]);
    let folder = tempfile::tempdir().unwrap();
    let [a, b, term] = ["lora_A.weight", "lora_B.weight", "lora_B.bias"].map(|end| format!("{Q}.{end}"));
    let k = "model.layers.0.self_attn.k_proj";
    let keys = plain.tensor_info(&format!("{k}.bias")).unwrap().shape.clone();
    let replaced = format!("{k}.base_layer.bias");
    let tensors: [(&str, &[usize]); 4] =
        [(&a, &[2, columns]), (&b, &[rows, 2]), (&term, &[rows]), (&replaced, &keys)];
    written(folder.path(), json!({"lora_bias": true, "bias": "all"}), &tensors);
    let merged = open(&model, &[adapter(folder.path(), 1.0)]).unwrap();
    let values = |of: &Checkpoint, name: &str| of.read(name).unwrap().to_f32().unwrap();
    // Alpha 2 and rank 2: the product of the factors is 2 * 0.5 * 0.5.
    for (name, added) in [("weight", 0.5), ("bias", 0.5)] {
        let name = format!("{Q}.{name}");
        let expected: Vec<f32> = values(&plain, &name).iter().map(|x| x + added).collect();
        assert_eq!(values(&merged, &name), expected, "{name}");
    }
    assert!(values(&merged, &format!("{k}.bias")).iter().all(|&x| x == 0.5));
}

fn refusal(model: &Path, folder: &Path) -> String {
    open(model, &[adapter(folder, 1.0)]).unwrap_err().to_string()
}

#[test]
fn adapters_for_another_base_are_refused_by_tensor_and_shapes() {
    let folder = tempfile::tempdir().unwrap();
    let at = |path: &str, end: &str| format!("{path}.{end}");
    let pair = |path: &str| [at(path, "lora_A.weight"), at(path, "lora_B.weight")];
    let [a, b] = pair(Q);
    written(folder.path(), json!({}), &[(&a, &[2, 96]), (&b, &[64, 2])]);
    let text = refusal(&base(), folder.path());
    for part in [a.as_str(), "[2, 96]", "[64, 2]", "[64, 96]", "[64, 64]", "org/other"] {
        assert!(text.contains(part), "{part}: {text}");
    }
    for path in ["model.layers.7.self_attn.q_proj", "model.layers.0.mlp.experts.1.up_proj"] {
        let [a, b] = pair(path);
        written(folder.path(), json!({}), &[(&a, &[2, 64]), (&b, &[64, 2])]);
        let text = refusal(&base(), folder.path());
        assert!(text.contains(&a) && text.contains("does not have"), "{text}");
    }
    written(folder.path(), json!({}), &[("model.norm.weight", &[65])]);
    assert!(refusal(&base(), folder.path()).contains("[65]"));
    let magnitude = at(Q, "lora_magnitude_vector");
    let tensors: [(&str, &[usize]); 3] = [(&a, &[2, 64]), (&b, &[64, 2]), (&magnitude, &[63])];
    written(folder.path(), json!({"use_dora": true}), &tensors);
    assert!(refusal(&base(), folder.path()).contains("[63]"));
}

#[test]
fn broken_and_other_adapters_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    assert!(refusal(&base(), folder.path()).contains("adapter_config.json"));
    let [a, b] = ["lora_A.weight", "lora_B.weight"].map(|end| format!("{Q}.{end}"));
    let whole: [(&str, &[usize]); 2] = [(&a, &[2, 64]), (&b, &[64, 2])];
    let fields = [
        (json!({"peft_type": "LOHA"}), "LOHA"),
        (json!({"target_parameters": ["mlp.experts.gate_up_proj"]}), "target_parameters"),
        (json!({"init_lora_weights": "pissa_niter_4"}), "pissa"),
        (json!({"use_dora": true}), "lora_magnitude_vector"),
        (json!({"lora_alpha": "much"}), "lora_alpha"),
        (json!({"alpha_pattern": {"(": 1}}), "regular expression"),
        (json!({"alpha_pattern": {"q_proj": "x"}}), "q_proj"),
    ];
    for (fields, part) in fields {
        written(folder.path(), fields, &whole);
        let text = refusal(&base(), folder.path());
        assert!(text.contains(part), "{part}: {text}");
    }
    type Tensors<'a> = &'a [(&'a str, &'a [usize])];
    let tensors: [(Tensors, &str); 5] = [
        (&[(&a, &[2, 64])], "no partner"),
        (&[(&a, &[2, 64]), (&b, &[64, 3])], "ranks differ"),
        (&[(&a, &[0, 64]), (&b, &[64, 0])], "ranks differ"),
        (&[(&a, &[2, 8, 8]), (&b, &[64, 2])], "matrices"),
        (&[("model.embed_tokens.token_adapter.trainable_tokens_delta", &[2, 64])], "neither"),
    ];
    for (tensors, part) in tensors {
        written(folder.path(), json!({}), tensors);
        let text = refusal(&base(), folder.path());
        assert!(text.contains(part), "{part}: {text}");
    }
    written(folder.path(), json!({}), &[]);
    assert!(refusal(&base(), folder.path()).contains("a tensor is missing"));
    written_with(folder.path(), json!({}), &whole, |_| f32::NAN);
    let merged = open(&base(), &[adapter(folder.path(), 1.0)]).unwrap();
    let error = merged.read(&format!("{Q}.weight")).unwrap_err().to_string();
    assert!(error.contains("lora_A") && error.contains("NaN"), "{error}");
}

#[test]
fn what_is_replaced_twice_or_tied_is_refused() {
    let two = [adapter(&data("tables"), 1.0), adapter(&data("tables"), 1.0)];
    assert!(open(&base(), &two).unwrap_err().to_string().contains("an earlier adapter"));
    // Here the table is the head.
    let model = golden("llama3-gqa-tied");
    let shape = open(&model, &[]).unwrap().tensor_info("model.embed_tokens.weight").unwrap().shape.clone();
    let folder = tempfile::tempdir().unwrap();
    written(folder.path(), json!({}), &[("model.embed_tokens.weight", &shape)]);
    assert!(refusal(&model, folder.path()).contains("ensure_weight_tying"));
    written(folder.path(), json!({}), &[("lm_head.weight", &shape)]);
    assert!(refusal(&model, folder.path()).contains("which is the embedding table"));
    let both: [(&str, &[usize]); 2] = [("model.embed_tokens.weight", &shape), ("lm_head.weight", &shape)];
    written(folder.path(), json!({"ensure_weight_tying": true}), &both);
    let merged = open(&model, &[adapter(folder.path(), 1.0)]).unwrap();
    let mut first = [0.0];
    merged.read("model.embed_tokens.weight").unwrap().read_f32_into(0, &mut first).unwrap();
    assert_eq!(first, [0.5]);
}

/// What was quantized is read, then changed, and is no kept type any more; all other weights stay as they are.
#[test]
fn bases_that_come_quantized_are_changed_as_floats() {
    for model in [golden("quant-awq"), golden("quant-gptq-desc-act"), golden("quant-fp8-block")] {
        let plain = open(&model, &[]).unwrap();
        let weight = plain.tensor_info(&format!("{Q}.weight")).unwrap();
        assert!(weight.dtype.is_quantized(), "{}", model.display());
        let (rows, columns) = (weight.shape[0], weight.shape[1]);
        let folder = tempfile::tempdir().unwrap();
        let [a, b] = ["lora_A.weight", "lora_B.weight"].map(|end| format!("{Q}.{end}"));
        written(folder.path(), json!({}), &[(&a, &[2, columns]), (&b, &[rows, 2])]);
        let merged = open(&model, &[adapter(folder.path(), 1.0)]).unwrap();
        for info in merged.tensors() {
            let values = |of: &Checkpoint| of.read(&info.name).unwrap().to_f32().unwrap();
            let changed = info.name == format!("{Q}.weight");
            // One product for each of the two ranks.
            let added = if changed { 0.25 } else { 0.0 };
            let expected: Vec<f32> = values(&plain).iter().map(|x| x + added + added).collect();
            assert!(values(&merged) == expected, "{}, {}", model.display(), info.name);
            let stored = if changed { StoredType::F16 } else { plain.tensor_info(&info.name).unwrap().dtype };
            assert_eq!(info.dtype, stored, "{}, {}", model.display(), info.name);
            assert_eq!(
                merged.stored_groups(&info.name).is_some(),
                !changed && plain.stored_groups(&info.name).is_some()
            );
        }
    }
}

/// Both stacks of an encoder-decoder model, what looks at the source, and the fused layer of an encoder.
#[test]
fn encoders_and_decoders_are_changed() {
    let parts = [
        ("t5", "encoder.block.1.layer.0.SelfAttention.q"),
        ("t5", "decoder.block.0.layer.1.EncDecAttention.v"),
        ("t5-relu", "decoder.block.2.layer.2.DenseReluDense.wi"),
        ("umt5", "decoder.block.1.layer.0.SelfAttention.o"),
        ("embed-nomic", "encoder.layers.2.attn.Wqkv"),
        ("embed-nomic", "encoder.layers.0.mlp.fc11"),
        ("embed-modernbert", "layers.1.mlp.Wi"),
    ];
    for (model, part) in parts {
        let model = golden(model);
        let plain = open(&model, &[]).unwrap();
        let name = format!("{part}.weight");
        let shape = plain.tensor_info(&name).unwrap().shape.clone();
        let folder = tempfile::tempdir().unwrap();
        let [a, b] = ["lora_A.weight", "lora_B.weight"].map(|end| format!("{part}.{end}"));
        written(folder.path(), json!({}), &[(&a, &[2, shape[1]]), (&b, &[shape[0], 2])]);
        let merged = open(&model, &[adapter(folder.path(), 1.0)]).unwrap();
        for info in merged.tensors() {
            let values = |of: &Checkpoint| of.read(&info.name).unwrap().to_f32().unwrap();
            let added = if info.name == name { 0.25 } else { 0.0 };
            let expected: Vec<f32> = values(&plain).iter().map(|x| x + added + added).collect();
            assert!(values(&merged) == expected, "{part}: {}", info.name);
        }
    }
}

/// Of patterns that match the same module the first one in the file counts, whatever their names.
#[test]
fn patterns_count_in_the_order_of_the_file() {
    let [a, b] = ["lora_A.weight", "lora_B.weight"].map(|end| format!("{Q}.{end}"));
    let name = format!("{Q}.weight");
    let plain = values(&[], &name);
    let folder = tempfile::tempdir().unwrap();
    let (narrow, wide) = ("self_attn.q_proj", ".*_proj");
    for (patterns, alpha) in [([(narrow, 4), (wide, 8)], 4.0), ([(wide, 8), (narrow, 4)], 8.0)] {
        let alphas = patterns.map(|(pattern, alpha)| format!("\"{pattern}\": {alpha}")).join(", ");
        written(folder.path(), json!({}), &[(&a, &[2, 64]), (&b, &[64, 2])]);
        let config = format!(r#"{{"peft_type": "LORA", "lora_alpha": 2, "alpha_pattern": {{{alphas}}}}}"#);
        std::fs::write(folder.path().join("adapter_config.json"), &config).unwrap();
        // For each of the two ranks a half of alpha times 0.5 times 0.5.
        let expected: Vec<f32> = plain.iter().map(|x| x + alpha / 8.0 + alpha / 8.0).collect();
        assert_eq!(values(&[adapter(folder.path(), 1.0)], &name), expected, "{config}");
    }
}

/// GGUF files name tensors otherwise, and some have the rows of queries and keys in another order: an adapter changes them as it
/// changes the checkpoint that the file was made of.
#[test]
fn bases_in_gguf_are_changed_as_their_checkpoints_are() {
    for model in ["mistral-swa", "qwen2", "gemma", "stablelm-head-norms"] {
        let original = golden(model);
        let file = project().join(format!("models/tests/data/{model}.gguf"));
        let folder = tempfile::tempdir().unwrap();
        let plain = open(&original, &[]).unwrap();
        let weights = ["self_attn.q_proj", "self_attn.k_proj", "mlp.down_proj"];
        let modules = weights.map(|weight| format!("model.layers.1.{weight}"));
        let tensors: Vec<(String, [usize; 2])> = (modules.iter())
            .flat_map(|module| {
                let shape = &plain.tensor_info(&format!("{module}.weight")).unwrap().shape;
                [
                    (format!("{module}.lora_A.weight"), [2, shape[1]]),
                    (format!("{module}.lora_B.weight"), [shape[0], 2]),
                ]
            })
            .collect();
        let tensors: Vec<(&str, &[usize])> =
            tensors.iter().map(|(name, shape)| (name.as_str(), shape.as_slice())).collect();
        written_with(folder.path(), json!({}), &tensors, |i| (i * 37 % 101) as f32 / 101.0 - 0.5);
        let own = [adapter(folder.path(), 1.0)];
        let [expected, found] = [&original, &file].map(|base| open(base, &own).unwrap());
        for module in &modules {
            let name = format!("{module}.weight");
            let values = |of: &Checkpoint| of.read(&name).unwrap().to_f32().unwrap();
            let (before, expected, found) = (values(&plain), values(&expected), values(&found));
            assert!(before.iter().zip(&expected).any(|(x, y)| (x - y).abs() > 0.1), "{model}, {name}");
            let worst = expected.iter().zip(&found).map(|(x, y)| (x - y).abs()).fold(0f32, f32::max);
            assert!(worst < 1e-6, "{model}, {name}: off by {worst}");
        }
    }
}

/// Shapes of the embedding table and the head of the base with `more` rows.
fn tables(more: usize) -> [usize; 2] {
    let shape = open(&base(), &[]).unwrap().tensor_info("model.embed_tokens.weight").unwrap().shape.clone();
    [shape[0] + more, shape[1]]
}

#[test]
fn tokens_that_were_added_before_training_make_the_model_larger() {
    let (folder, shape) = (tempfile::tempdir().unwrap(), tables(4));
    let both: [(&str, &[usize]); 2] = [
        ("model.embed_tokens.modules_to_save.default.weight", &shape),
        ("lm_head.modules_to_save.default.weight", &shape),
    ];
    written_with(folder.path(), json!({"modules_to_save": ["embed_tokens", "lm_head"]}), &both, |i| i as f32);
    std::fs::write(folder.path().join("tokenizer_config.json"), "{}").unwrap();
    let requests = [adapter(folder.path(), 1.0)];
    let model = resolve(&request(&base(), &requests)).unwrap();
    assert_eq!(model.config.architecture.vocab(), shape[0]);
    // What was trained with more tokens has the tokenizer of these.
    assert_eq!(model.files.tokenizer_config, Some(folder.path().join("tokenizer_config.json")));
    assert_eq!(model.files.directories[0], folder.path());
    let merged = model.open_weights().unwrap();
    for name in ["model.embed_tokens.weight", "lm_head.weight"] {
        let values = merged.read(name).unwrap().to_f32().unwrap();
        assert_eq!(merged.tensor_info(name).unwrap().shape, shape);
        assert_eq!(values[values.len() - 1], (values.len() - 1) as f32);
    }
    // A slot has no room for it, and says what has.
    let error = mlcc_models::adapter_factors(&requests[0], |_| true).unwrap_err().to_string();
    assert!(error.contains("mlcc build --lora"), "{error}");
    // The table alone is half of it.
    written(folder.path(), json!({}), &both[..1]);
    let error = open(&base(), &requests).unwrap_err().to_string();
    assert!(error.contains("lm_head.weight"), "{error}");
    // Two that disagree.
    let other = tempfile::tempdir().unwrap();
    let less = tables(2);
    let fewer: [(&str, &[usize]); 2] = [("model.embed_tokens.weight", &less), ("lm_head.weight", &less)];
    written(folder.path(), json!({}), &both);
    written(other.path(), json!({}), &fewer);
    let two = [adapter(folder.path(), 1.0), adapter(other.path(), 1.0)];
    assert!(open(&base(), &two).unwrap_err().to_string().contains("agree on their number"));
}

#[test]
fn names_of_adapters_may_stand_in_the_names_of_tensors() {
    let folder = tempfile::tempdir().unwrap();
    let columns = open(&base(), &[]).unwrap().tensor_info(&format!("{Q}.weight")).unwrap().shape.clone();
    let (a, b): ([usize; 2], [usize; 2]) = ([2, columns[1]], [columns[0], 2]);
    let fields = || json!({"r": 2});
    let merged = |a_name: &str, b_name: &str| {
        let names = [format!("{Q}.lora_A{a_name}"), format!("{Q}.lora_B{b_name}")];
        written(folder.path(), fields(), &[(&names[0], &a), (&names[1], &b)]);
        open(&base(), &[adapter(folder.path(), 1.0)])
            .map(|merged| merged.read(&format!("{Q}.weight")).unwrap().to_f32().unwrap())
    };
    let plain = merged(".weight", ".weight").unwrap();
    assert_eq!(merged(".default.weight", ".default.weight").unwrap(), plain);
    assert_eq!(merged(".mine.weight", ".mine.weight").unwrap(), plain);
    let twice =
        [format!("{Q}.lora_A.weight"), format!("{Q}.lora_A.default.weight"), format!("{Q}.lora_B.weight")];
    written(folder.path(), fields(), &[(&twice[0], &a), (&twice[1], &a), (&twice[2], &b)]);
    assert!(refusal(&base(), folder.path()).contains("under two names"));
}

#[test]
fn ranks_are_those_that_the_file_states() {
    let folder = tempfile::tempdir().unwrap();
    let columns = open(&base(), &[]).unwrap().tensor_info(&format!("{Q}.weight")).unwrap().shape.clone();
    let names = [format!("{Q}.lora_A.weight"), format!("{Q}.lora_B.weight")];
    let tensors: [(&str, &[usize]); 2] = [(&names[0], &[2, columns[1]]), (&names[1], &[columns[0], 2])];
    for (rank, part) in [
        (json!(0), "1 to 1048576"),
        (json!(-1), "1 to 1048576"),
        (json!(1u64 << 40), "1 to 1048576"),
        (json!(2.5), "1 to 1048576"),
        (json!("2"), "1 to 1048576"),
        (json!(3), "expected 2"),
    ] {
        written(folder.path(), json!({"r": rank}), &tensors);
        let error = refusal(&base(), folder.path());
        assert!(
            error.contains("adapter_config.json") && error.contains("`r`") && error.contains(part),
            "{error}"
        );
    }
    let own = json!({"r": 8, "rank_pattern": {"q_proj": 2}});
    written(folder.path(), own, &tensors);
    assert!(open(&base(), &[adapter(folder.path(), 1.0)]).is_ok());
    written(folder.path(), json!({"r": 2, "rank_pattern": {"q_proj": 4}}), &tensors);
    assert!(refusal(&base(), folder.path()).contains("rank_pattern"));
}
