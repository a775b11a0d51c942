//! `mlcc build --lora`: the merged model is the one that PEFT computes with.

use std::path::Path;

use crate::program::{case, json, mlcc, text};
use mlcc_models::golden::Golden;

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
    assert!(!Golden::read(&golden).unwrap().prompts.is_empty());
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
