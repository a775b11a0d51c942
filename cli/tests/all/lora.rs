//! `mlcc build --lora`: the merged model is the one that PEFT computes with.

use std::path::Path;

use crate::program::{case, json, mlcc, text};
use mlcc_models::golden::GoldenFile;

/// Builds the base of the case with an adapter.
fn build(path: &Path, flags: &[&str]) {
    let model = case("lora").join("base");
    mlcc().arg("build").arg("-m").arg(model).args(flags).arg("-o").arg(path).assert().success();
}

#[test]
fn the_merged_model_gives_what_peft_gives() {
    let folder = tempfile::tempdir().unwrap();
    let adapter = case("lora").join("adapter");
    let adapter = adapter.to_str().unwrap();
    let path = folder.path().join("merged.so");
    let golden = case("lora").join("golden.json");
    for quant in ["f32", "keep", "q8f16_1"] {
        build(&path, &["--lora", adapter, "--quant", quant]);
        mlcc().arg("verify").arg(&path).arg("--golden").arg(&golden).assert().success();
    }
    let report = json(mlcc().arg("inspect").arg(&path).arg("--json"));
    assert_eq!(
        report["metadata"]["source"]["adapters"],
        serde_json::json!([{"name": "adapter", "scale": 1.0}])
    );
    assert!(text(mlcc().arg("inspect").arg(&path)).contains("adapter (scale 1)"));
    // Without it the results are others.
    build(&path, &["--quant", "f32"]);
    mlcc().arg("verify").arg(&path).arg("--golden").arg(&golden).assert().failure();
    assert!(!GoldenFile::read(&golden).unwrap().prompts.is_empty());
}

#[test]
fn layers_are_those_of_the_merged_model() {
    let folder = tempfile::tempdir().unwrap();
    let adapter = case("lora").join("adapter");
    let adapter = format!("{}=0.5", adapter.display());
    let path = folder.path().join("merged.so");
    build(&path, &["--lora", &adapter, "--quant", "f32", "--debug-taps"]);
    let base = case("lora").join("base");
    let verify = |flags: &[&str]| {
        let mut command = mlcc();
        command.arg("verify").arg(&path).arg("--layers").arg("-m").arg(&base).args(["--tokens", "5,6,7"]);
        command.args(flags).assert()
    };
    verify(&["--lora", &adapter]).success();
    verify(&[]).failure();
}

#[test]
fn adapters_that_are_none_are_told() {
    let folder = tempfile::tempdir().unwrap();
    let base = case("lora").join("base");
    let mut build = mlcc();
    build.arg("build").arg("-m").arg(&base).arg("--lora").arg(folder.path());
    let failed = build.current_dir(folder.path()).assert().failure();
    let message = String::from_utf8_lossy(&failed.get_output().stderr).into_owned();
    assert!(message.contains("adapter_config.json"), "{message}");
    mlcc().arg("build").arg("-m").arg(&base).args(["--lora", "a=much"]).assert().code(2);
}

/// Codes that an adapter does not change stay; the name that is made up tells the adapter.
#[test]
fn bases_that_come_quantized_keep_the_rest() {
    let folder = tempfile::tempdir().unwrap();
    let adapter = folder.path().join("style");
    std::fs::create_dir(&adapter).unwrap();
    let config = r#"{"peft_type": "LORA", "lora_alpha": 2, "r": 2}"#;
    std::fs::write(adapter.join("adapter_config.json"), config).unwrap();
    let part = |at: usize, end: &str, shape: &str| {
        let name = format!("base_model.model.model.layers.0.self_attn.q_proj.lora_{end}.weight");
        format!(r#""{name}": {{"dtype": "F32", "shape": {shape}, "data_offsets": [{at}, {}]}}"#, at + 1024)
    };
    let header = format!("{{{}, {}}}", part(0, "A", "[2, 128]"), part(1024, "B", "[128, 2]"));
    let values: Vec<u8> = (0..512).flat_map(|i| ((i % 7) as f32 / 64.0).to_le_bytes()).collect();
    let file = [&(header.len() as u64).to_le_bytes()[..], header.as_bytes(), &values].concat();
    std::fs::write(adapter.join("adapter_model.safetensors"), file).unwrap();
    let mut build = mlcc();
    build.arg("build").arg("-m").arg(case("quant-awq")).args(["--lora", "style=0.5", "--debug-taps"]);
    build.current_dir(folder.path()).assert().success();
    let made = std::fs::read_dir(folder.path()).unwrap().map(|entry| entry.unwrap().path());
    let made: Vec<_> = made.filter(|path| path.extension().is_some_and(|end| end == "so")).collect();
    let [path] = made.as_slice() else { panic!("{made:?}") };
    let name = path.file_name().unwrap().to_str().unwrap();
    assert!(name.starts_with("quant-awq+style=0.5-keep-"), "{name}");
    let info = json(mlcc().arg("inspect").arg(path).args(["--json", "--params"]));
    let format = |name: &str| {
        let params = info["params"].as_array().unwrap();
        params.iter().find(|param| param["name"] == name).unwrap()["format"].clone()
    };
    assert_eq!(format("model.layers.0.self_attn.q_proj.weight"), "f16");
    assert_eq!(format("model.layers.0.mlp.down_proj.weight"), "q4g128_zero");
    let mut verify = mlcc();
    verify
        .arg("verify")
        .arg(path)
        .arg("--layers")
        .arg("-m")
        .arg(case("quant-awq"))
        .args(["--tokens", "5,6,7"]);
    verify.args(["--lora", "style=0.5"]).current_dir(folder.path()).assert().success();
}
