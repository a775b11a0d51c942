//! Manifests, the Containerfile and the unit of systemd start the program with flags that it has: its own parser reads them.
//! What needs kustomize and schemas is in `tests/deploy/run`.

use std::path::Path;

use clap::Parser;
use mlcc::cli::Cli;
use serde_json::Value;

use crate::program::{case, json, mlcc, workspace};
use crate::software_gpu;

const PORT: &str = "8080";

fn read(path: &str) -> String {
    let path = workspace().join(path);
    std::fs::read_to_string(&path).unwrap_or_else(|e| panic!("{}: {e}", path.display()))
}

/// What stands after `begin` in the only line that begins so.
fn line<'a>(text: &'a str, begin: &str) -> &'a str {
    let found: Vec<&str> = text.lines().filter_map(|line| line.trim().strip_prefix(begin)).collect();
    assert_eq!(found.len(), 1, "{begin}: {found:?}");
    found[0].trim()
}

/// The list under `args:` of a manifest.
fn args_of_manifest(text: &str) -> Vec<String> {
    let lines = text.lines().map(str::trim).skip_while(|line| *line != "args:").skip(1);
    lines.map_while(|line| line.strip_prefix("- ")).map(|arg| arg.trim_matches('"').to_owned()).collect()
}

fn args_of_unit(text: &str) -> Vec<String> {
    let command = line(text, "ExecStart=").strip_prefix("/usr/local/bin/mlcc ").unwrap();
    command.split_whitespace().map(str::to_owned).collect()
}

fn args_of_image(text: &str) -> Vec<String> {
    assert_eq!(line(text, "ENTRYPOINT "), "[\"/usr/local/bin/mlcc\"]");
    // Behind a continued line stands another one of these.
    let last = text.lines().rfind(|line| line.starts_with("CMD ")).unwrap();
    serde_json::from_str(&last["CMD ".len()..]).unwrap()
}

fn value<'a>(args: &'a [String], flag: &str) -> Option<&'a str> {
    args.iter().find_map(|arg| arg.strip_prefix(flag)?.strip_prefix('='))
}

#[test]
fn flags_are_those_of_the_program() {
    let manifest = args_of_manifest(&read("deploy/k8s/base/deployment.yaml"));
    let unit = args_of_unit(&read("deploy/systemd/mlcc@.service"));
    let image = args_of_image(&read("deploy/Containerfile"));
    for (args, host) in [(&manifest, "0.0.0.0"), (&unit, "127.0.0.1"), (&image, "0.0.0.0")] {
        let words = ["mlcc".to_owned()].into_iter().chain(args.iter().cloned());
        if let Err(error) = Cli::try_parse_from(words) {
            panic!("{args:?}: {error}");
        }
        assert_eq!(args[0], "serve");
        assert_eq!((value(args, "--port"), value(args, "--host")), (Some(PORT), Some(host)), "{args:?}");
    }
}

#[test]
fn ports_are_equal_everywhere() {
    assert_eq!(line(&read("deploy/Containerfile"), "EXPOSE "), PORT);
    assert!(read("deploy/health").contains(&format!("${{1:-{PORT}}}")));
    assert_eq!(line(&read("deploy/k8s/base/deployment.yaml"), "containerPort: "), PORT);
    assert_eq!(line(&read("deploy/k8s/components/inference-pool/inference-pool.yaml"), "- number: "), PORT);
}

/// A drain that is longer than the time until SIGKILL would cut texts.
#[test]
fn there_is_time_to_drain() {
    let seconds = |text: &str| text.parse::<u64>().unwrap_or_else(|e| panic!("{text}: {e}"));
    let manifest = read("deploy/k8s/base/deployment.yaml");
    let drain = seconds(value(&args_of_manifest(&manifest), "--drain-timeout").unwrap());
    let before = seconds(line(&manifest, "seconds: "));
    assert!(seconds(line(&manifest, "terminationGracePeriodSeconds: ")) >= before + drain + 10);
    let unit = read("deploy/systemd/mlcc@.service");
    let drain = seconds(value(&args_of_unit(&unit), "--drain-timeout").unwrap());
    assert!(seconds(line(&unit, "TimeoutStopSec=")) >= drain + 10);
}

/// Every folder that cargo needs for the workspace is in the build stage, and the tags are the version.
#[test]
fn the_image_is_built_from_all_members() {
    let image = read("deploy/Containerfile");
    let workspace: toml::Table = read("Cargo.toml").parse().unwrap();
    for member in workspace["workspace"]["members"].as_array().unwrap() {
        let folder = member.as_str().unwrap().split('/').next().unwrap();
        assert!(image.contains(&format!("\nCOPY {folder} {folder}\n")), "{folder} is not copied");
    }
    let version = workspace["workspace"]["package"]["version"].as_str().unwrap();
    let rust = workspace["workspace"]["package"]["rust-version"].as_str().unwrap();
    assert!(image.contains(&format!("-t mlcc:{version} .")));
    assert!(image.contains(&format!("/rust:{rust}-")));
    assert_eq!(line(&read("deploy/k8s/base/kustomization.yaml"), "newTag: "), version);
}

/// What `inspect --resources` says of TinyLlama's shapes, for the texts of the Deployment and the threads of an overlay.
fn resources(folder: &Path, build: &[&str], threads: &str, driver: Option<&Path>) -> Value {
    let artifact = folder.join("model.so");
    let mut command = mlcc();
    command.args([
        "build",
        "--model",
        "tinyllama-1.1b",
        "--random-weights",
        "0",
        "--weights-on-load",
        "--no-report",
    ]);
    command.args(build).arg("-o").arg(&artifact).assert().success();
    let manifest = args_of_manifest(&read("deploy/k8s/base/deployment.yaml"));
    let mut command = mlcc();
    command.arg("inspect").arg(&artifact).args(["--resources", "--json", "--threads", threads]);
    command.args(["--sequences", value(&manifest, "--sequences").unwrap()]);
    json(command.envs(driver.map(|driver| ("MLCC_CUDA_DRIVER", driver))))
}

/// The value of a line that stands under `requests:` and under `limits:`.
fn amount(overlay: &str, name: &str) -> String {
    let found: Vec<&str> = overlay.lines().filter_map(|line| line.trim().strip_prefix(name)).collect();
    assert!(found.len() == 2 && found[0] == found[1], "{name} {found:?}");
    found[0].trim_start_matches(':').trim().trim_matches('"').to_owned()
}

/// `enough` is what a server needs: a manifest has that, and at most a tenth more.
fn holds(overlay: &str, enough: &Value) {
    let mebibytes = |text: &str| text.strip_suffix("Mi").unwrap().parse::<u64>().unwrap();
    let asked = mebibytes(&amount(overlay, "memory"));
    let need = mebibytes(enough["resources"]["limits"]["memory"].as_str().unwrap());
    assert!(need <= asked && asked <= need + need / 10, "{asked} MiB are asked for, {need} needed");
}

#[test]
fn memory_of_the_overlay_for_cpus_is_that_of_the_plan() {
    let overlay = read("deploy/k8s/overlays/cpu/resources.yaml");
    let folder = tempfile::tempdir().unwrap();
    let threads = amount(&overlay, "cpu");
    let found = resources(folder.path(), &["--quant", "q4i8", "--target", "cpu"], &threads, None);
    assert_eq!(found["resources"]["limits"]["cpu"], *threads);
    assert!(!read("deploy/k8s/overlays/cpu/kustomization.yaml").contains("cuda"));
    holds(&overlay, &found);
}

#[test]
fn memory_of_the_overlay_for_gpus_is_that_of_the_plan() {
    let Some(driver) = software_gpu::driver() else { return };
    let overlay = read("deploy/k8s/overlays/nvidia/resources.yaml");
    let folder = tempfile::tempdir().unwrap();
    let flags = ["--quant", "q4f16_1", "--target", "cuda", "--max-batch", "16"];
    assert!(read("deploy/k8s/overlays/nvidia/kustomization.yaml").contains(&flags.join(" ")));
    let found = resources(folder.path(), &flags, &amount(&overlay, "cpu"), Some(&driver));
    assert_eq!(found["resources"]["limits"]["nvidia.com/gpu"], "1");
    assert_eq!(line(&overlay, "nvidia.com/gpu: "), "\"1\"");
    holds(&overlay, &found);
}

/// Of a model that is split a container has all ranks as threads, or one of them.
#[test]
fn containers_of_ranks_have_their_part() {
    let folder = tempfile::tempdir().unwrap();
    let artifact = folder.path().join("split.so");
    let mut build = mlcc();
    build.args(["build", "--quant", "f32", "--tensor-parallel", "2", "--no-report", "-m"]);
    build.arg(case("llama3-gqa-tied")).arg("-o").arg(&artifact).assert().success();
    let bytes = |flags: &[&str]| {
        let mut command = mlcc();
        command.arg("inspect").arg(&artifact).args(["--resources", "--json", "--threads", "2"]).args(flags);
        let found = json(&mut command);
        ["weights_bytes", "need_bytes"].map(|name| found[name].as_u64().unwrap())
    };
    let ([weights, need], [own_weights, own]) = (bytes(&[]), bytes(&["--each-rank"]));
    assert_eq!(weights, 2 * own_weights);
    // Logits and what becomes of them are on the first rank, or on each.
    assert!(own > need * 4 / 10 && own < need * 6 / 10, "{own} of {need}");
}
