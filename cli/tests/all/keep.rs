//! `--quant keep`, the default: weights stay in the types that they are stored in, whatever the kind of
//! checkpoint.

use std::collections::BTreeMap;
use std::path::Path;

use crate::program::{case, json, mlcc, text};
use half::{bf16, f16};
use mlcc_models::checkpoint::WeightFiles;
use mlcc_models::{Checkpoint, StoredType};
use serde_json::Value;

/// Builds `model` into `path`; returns the report.
fn build(model: &Path, flags: &[&str], path: &Path) -> Value {
    json(mlcc().arg("build").arg("-m").arg(model).args(flags).args(["--json", "-o"]).arg(path))
}

/// Name and format of every parameter.
fn formats(artifact: &Path) -> BTreeMap<String, String> {
    let info = json(mlcc().arg("inspect").arg(artifact).args(["--json", "--params"]));
    let text = |value: &Value| value.as_str().unwrap().to_string();
    info["params"].as_array().unwrap().iter().map(|p| (text(&p["name"]), text(&p["format"]))).collect()
}

fn verify(artifact: &Path, model: &Path) {
    mlcc().arg("verify").arg(artifact).arg("--golden").arg(model.join("golden.json")).assert().success();
}

#[test]
fn weights_stay_in_their_types() {
    let folder = tempfile::tempdir().unwrap();
    let [kept, named] = ["kept.so", "named.so"].map(|name| folder.path().join(name));
    let cases = [
        ("rwkv4-hf", "f32"),
        ("rwkv4-pth", "f32"),
        ("rwkv6-hf", "bf16"),
        ("qwen2", "bf16"),
        ("internlm2", "f16"),
        ("moss", "f16"),
    ];
    for (model, format) in cases {
        let model = case(model);
        let report = build(&model, &[], &kept);
        build(&model, &["--quant", format], &named);
        assert_eq!(formats(&kept), formats(&named), "{}", model.display());
        assert_eq!(report["kept"]["types"], serde_json::json!([format]));
        assert_eq!(report["quant"], format!("keep ({format})"));
        assert_eq!(report["kept"]["bytes"], report["memory"]["weights_bytes"]);
        // The same plan of memory, caches too.
        let memory =
            |path: &Path| json(mlcc().arg("inspect").arg(path).arg("--json"))["metadata"]["memory"].clone();
        assert_eq!(memory(&kept), memory(&named));
        verify(&kept, &model);
        build(&model, &["--quant", "q4f16"], &named);
        let small =
            json(mlcc().arg("inspect").arg(&named).arg("--json"))["metadata"]["memory"]["weights_bytes"]
                .as_f64();
        let told = report["kept"]["smaller_bytes"].as_f64().unwrap() / small.unwrap();
        assert!((0.9..1.1).contains(&told), "{}: {told} of the size of q4f16", model.display());
    }
}

/// The case in other types: `stored` chooses that of each matrix.
fn converted(model: &Path, folder: &Path, stored: impl Fn(&str) -> StoredType) {
    let files = WeightFiles::in_directory(model).unwrap();
    let checkpoint = Checkpoint::open(&files).unwrap();
    let (mut header, mut data) = (serde_json::Map::new(), Vec::new());
    for info in checkpoint.tensors() {
        let values = checkpoint.read(&info.name).unwrap().to_f32().unwrap();
        let begin = data.len();
        let dtype = match stored(&info.name) {
            StoredType::F16 => {
                values.iter().for_each(|&x| data.extend(f16::from_f32(x).to_le_bytes()));
                "F16"
            }
            StoredType::BF16 => {
                values.iter().for_each(|&x| data.extend(bf16::from_f32(x).to_le_bytes()));
                "BF16"
            }
            _ => {
                values.iter().for_each(|&x| data.extend(x.to_le_bytes()));
                "F32"
            }
        };
        let entry =
            serde_json::json!({"dtype": dtype, "shape": info.shape, "data_offsets": [begin, data.len()]});
        header.insert(info.name.clone(), entry);
    }
    let header = Value::Object(header).to_string();
    let file = [&(header.len() as u64).to_le_bytes()[..], header.as_bytes(), &data].concat();
    std::fs::write(folder.join("model.safetensors"), file).unwrap();
    std::fs::copy(model.join("config.json"), folder.join("config.json")).unwrap();
}

#[test]
fn each_tensor_keeps_its_own_type() {
    let folder = tempfile::tempdir().unwrap();
    let (model, path) = (case("rwkv4-hf"), folder.path().join("mixed.so"));
    converted(&model, folder.path(), |name| match name {
        "head.weight" => StoredType::F32,
        _ if name.contains("feed_forward") => StoredType::F16,
        _ => StoredType::BF16,
    });
    let report = build(folder.path(), &[], &path);
    let stored = formats(&path);
    assert_eq!(stored["head.weight"], "f32");
    assert_eq!(stored["rwkv.embeddings.weight"], "bf16");
    assert_eq!(stored["rwkv.blocks.0.feed_forward.value.weight"], "f16");
    assert_eq!(stored["rwkv.blocks.0.attention.output.weight"], "bf16");
    assert_eq!(stored["rwkv.ln_out.weight"], "f32", "vectors are always f32");
    let types: Vec<&str> =
        report["kept"]["types"].as_array().unwrap().iter().filter_map(Value::as_str).collect();
    assert_eq!(types.len(), 3, "{types:?}");
    assert_eq!(report["quant"], format!("keep ({})", types[0]));
    verify(&path, &model);
    // Commands that compile again get the same weights.
    mlcc().arg("bisect").arg(folder.path()).args(["--tokens", "1,2,3"]).assert().success();
}

/// AWQ, GPTQ, compressed-tensors, MXFP4 and FP8: codes, scales and zero points go into a format of their own,
/// and results are those of the published values.
#[test]
fn packed_checkpoints_keep_their_codes() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.so");
    let down = "model.layers.0.mlp.down_proj.weight";
    let experts = "model.layers.0.mlp.experts.down_proj.down";
    let cases = [
        ("quant-awq", "AWQ", "q4g128_zero", down),
        ("quant-gptq", "GPTQ", "q4g128", down),
        ("quant-gptq-desc-act", "GPTQ", "q4g64_zero", down),
        ("quant-ct-int4", "INT4", "q4g128", down),
        ("quant-fp8-block", "FP8", "e4m3g128_f32", down),
        ("gpt-oss-mxfp4", "MXFP4", "e2m1g32_bf16", experts),
    ];
    for (name, stored, format, weight) in cases {
        let model = case(name);
        let report = build(&model, &[], &path);
        assert_eq!(report["quant"], "keep", "{name}");
        assert_eq!(report["kept"]["dequantized"], false, "{name}");
        let rows = report["conversions"].as_array().unwrap();
        let row = rows.iter().find(|row| row["stored"] == stored).unwrap();
        assert_eq!(
            (&row["format"], &row["how"]),
            (&format.into(), &"kept: the same values".into()),
            "{name}"
        );
        assert_eq!(rows.iter().filter(|row| row["stored"] == stored).count(), 1, "{name}: {rows:?}");
        assert_eq!(formats(&path).get(weight).map(String::as_str), Some(format), "{name}");
        let verified = json(
            mlcc().arg("verify").arg(&path).arg("--golden").arg(model.join("golden.json")).arg("--json"),
        );
        let error = verified["worst_relative_error"].as_f64().unwrap();
        assert!(error < 1e-3 && verified["ok"] == true, "{name}: off by {error:e}");
        build(&model, &["--quant", "q8f16_1"], &path);
        assert_eq!(formats(&path).get(weight).map(String::as_str), Some("q8g32"), "{name}");
    }
}

/// Inputs that are put into the order of groups give the same results layer by layer, in the interpreter too.
#[test]
fn sorted_columns_are_those_of_the_graph() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.so");
    let model = case("quant-gptq-desc-act");
    build(&model, &["--debug-taps"], &path);
    let mut verify = mlcc();
    verify.arg("verify").arg(&path).arg("--layers").arg("-m").arg(&model).args(["--tokens", "1,2,3,4"]);
    verify.assert().success();
}

#[test]
fn one_line_says_what_is_kept_and_what_less_would_take() {
    let folder = tempfile::tempdir().unwrap();
    let line = |model: &str, flags: &[&str]| {
        let mut build = mlcc();
        build
            .arg("build")
            .arg("-m")
            .arg(case(model))
            .args(flags)
            .args(["-v", "-o"])
            .arg(folder.path().join("model.so"));
        let told = String::from_utf8(build.assert().success().get_output().stderr.clone()).unwrap();
        told.lines()
            .find(|line| line.contains("kept as") || line.contains("as the model was"))
            .map(String::from)
    };
    let told = line("qwen2", &[]).unwrap();
    assert!(told.starts_with("weights kept as stored (bf16), "), "{told}");
    assert!(told.contains("; --quant q4f16 would take "), "{told}");
    assert_eq!(line("qwen2", &["--quant", "keep"]).unwrap(), told);
    assert_eq!(line("qwen2", &["--quant", "bf16"]), None);
    let told = line("qwen2", &["--random-weights", "0"]).unwrap();
    assert!(told.starts_with("random weights as the model was published (bf16), "), "{told}");
    // A text that was quantized already keeps what it has, not what the checkpoint has.
    let dump = folder.path().join("dump");
    line("qwen2", &["--quant", "q4f16", "--debug-dump", dump.to_str().unwrap()]);
    let mut texts = std::fs::read_dir(&dump).unwrap().map(|entry| entry.unwrap().path());
    let text = texts.find(|path| path.to_str().unwrap().ends_with("-quantize.mlc")).unwrap();
    let folder_of_weights = case("qwen2");
    let weights = ["--weights", folder_of_weights.to_str().unwrap()];
    assert_eq!(line(text.to_str().unwrap(), &weights), None);
}

/// Nothing is stored: config.json may name a type, and most models are published in bf16.
#[test]
fn random_weights_have_the_published_type() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("random.so");
    let config = std::fs::read_to_string(case("rwkv4-hf").join("config.json")).unwrap();
    let mut config: Value = serde_json::from_str(&config).unwrap();
    let fields = config.as_object_mut().unwrap();
    fields.remove("torch_dtype");
    fields.remove("dtype");
    let named = [None, Some(("dtype", "float16")), Some(("torch_dtype", "torch.float32"))];
    std::fs::copy(case("rwkv4-hf").join("model.safetensors"), folder.path().join("model.safetensors"))
        .unwrap();
    for (entry, format) in named.into_iter().zip(["bf16", "f16", "f32"]) {
        let mut config = config.clone();
        if let Some((field, value)) = entry {
            config[field] = value.into();
        }
        std::fs::write(folder.path().join("config.json"), config.to_string()).unwrap();
        build(folder.path(), &["--random-weights", "3"], &path);
        assert_eq!(formats(&path)["head.weight"], format);
        let shown = text(mlcc().arg("inspect").arg(&path));
        assert!(shown.contains(&format!("keep ({format})")), "{shown}");
    }
}
