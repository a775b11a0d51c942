//! Manifests, the Containerfile and the unit of systemd start the program with flags that it has: its own
//! parser reads them. The tests that need kustomize and schemas are in `tests/deploy/run`.

use std::path::Path;

use clap::Parser;
use mlcc::cli::Cli;
use serde_json::{Value, json};

use crate::program::{case, json, mlcc, workspace};

const PORT: &str = "8080";

fn read(path: &str) -> String {
    let path = workspace().join(path);
    std::fs::read_to_string(&path).unwrap_or_else(|e| panic!("{}: {e}", path.display()))
}

/// The text after `begin` in the only line that begins so.
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

fn args_of_image(text: &str, program: &str) -> Vec<String> {
    assert_eq!(line(text, "ENTRYPOINT "), format!("[\"/usr/local/bin/{program}\"]"));
    // The line after a continued one is another one of these.
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
    let image = args_of_image(&read("deploy/Containerfile"), "mlcc");
    let ranks = args_of_image(&read("deploy/ranks/Containerfile"), "ranks");
    let group = args_of_manifest(&read("deploy/k8s/overlays/machines/group.yaml"));
    assert_eq!(group, manifest);
    for (args, host) in
        [(&manifest, "0.0.0.0"), (&unit, "127.0.0.1"), (&image, "0.0.0.0"), (&ranks, "0.0.0.0")]
    {
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

fn tinyllama(folder: &Path, build: &[&str], threads: &str) -> Value {
    artifact(folder, &[&["--model", "tinyllama-1.1b", "--weights-on-load"], build].concat());
    inspected(folder, &["--threads", threads])
}

/// Builds `model.so`.
fn artifact(folder: &Path, build: &[&str]) {
    let mut command = mlcc();
    command.args(["build", "--random-weights", "0", "--no-report"]).args(build);
    command.arg("-o").arg(folder.join("model.so")).assert().success();
}

/// The output of `inspect --resources` with these flags, for the texts of the Deployment.
fn inspected(folder: &Path, flags: &[&str]) -> Value {
    let manifest = args_of_manifest(&read("deploy/k8s/base/deployment.yaml"));
    let mut command = mlcc();
    command.arg("inspect").arg(folder.join("model.so")).args(["--resources", "--json"]).args(flags);
    command.args(["--sequences", value(&manifest, "--sequences").unwrap()]);
    json(&mut command)
}

/// The limits of memory of TinyLlama's shapes in mebibytes, by the flags of `inspect`, where weights cannot
/// be left out of the file: from some of its layers, since every layer has as much as another.
fn memory_by_layers<const N: usize>(folder: &Path, build: &[&str], flags: [&[&str]; N]) -> [u64; N] {
    let config = json!({"model_type": "llama", "hidden_size": 2048, "intermediate_size": 5632, "num_attention_heads": 32,
        "num_key_value_heads": 4, "vocab_size": 32000, "max_position_embeddings": 2048, "rms_norm_eps": 1e-5});
    let [two, three] = [2, 3].map(|layers| {
        let mut config = config.clone();
        config["num_hidden_layers"] = layers.into();
        std::fs::write(folder.join("config.json"), config.to_string()).unwrap();
        artifact(folder, &[&["--model", folder.to_str().unwrap()], build].concat());
        flags.map(|flags| inspected(folder, flags)["limit_bytes"].as_u64().unwrap())
    });
    std::array::from_fn(|i| (two[i] + 20 * (three[i] - two[i])).div_ceil(1 << 20))
}

/// The value of a line under `requests:` and under `limits:`.
fn amount(overlay: &str, name: &str) -> String {
    let found: Vec<&str> = overlay.lines().filter_map(|line| line.trim().strip_prefix(name)).collect();
    assert!(found.len() == 2 && found[0] == found[1], "{name} {found:?}");
    found[0].trim_start_matches(':').trim().trim_matches('"').to_owned()
}

fn mebibytes(text: &str) -> u64 {
    text.strip_suffix("Mi").unwrap_or_else(|| panic!("{text}")).parse().unwrap()
}

fn limit(found: &Value) -> u64 {
    mebibytes(found["resources"]["limits"]["memory"].as_str().unwrap())
}

/// A manifest has the mebibytes that a server needs, and at most a tenth more.
fn holds(overlay: &str, need: u64) {
    let asked = mebibytes(&amount(overlay, "memory"));
    assert!(need <= asked && asked <= need + need / 10, "{asked} MiB are asked for, {need} needed");
}

#[test]
fn memory_of_the_overlay_for_cpus_is_that_of_the_plan() {
    let overlay = read("deploy/k8s/overlays/cpu/resources.yaml");
    let folder = tempfile::tempdir().unwrap();
    let threads = amount(&overlay, "cpu");
    let found = tinyllama(folder.path(), &["--quant", "q4i8", "--target", "cpu"], &threads);
    assert_eq!(found["resources"]["limits"]["cpu"], *threads);
    assert!(!read("deploy/k8s/overlays/cpu/kustomization.yaml").contains("cuda"));
    holds(&overlay, limit(&found));
}

#[test]
fn memory_of_the_overlay_for_gpus_is_that_of_the_plan() {
    let overlay = read("deploy/k8s/overlays/nvidia/resources.yaml");
    let folder = tempfile::tempdir().unwrap();
    let flags = ["--quant", "q4f16_1", "--target", "cuda", "--max-batch", "16"];
    assert!(read("deploy/k8s/overlays/nvidia/kustomization.yaml").contains(&flags.join(" ")));
    let found = tinyllama(folder.path(), &flags, &amount(&overlay, "cpu"));
    assert_eq!(found["resources"]["limits"]["nvidia.com/gpu"], "1");
    assert_eq!(line(&overlay, "nvidia.com/gpu: "), "\"1\"");
    holds(&overlay, limit(&found));
}

#[test]
fn the_overlay_for_ranks_is_that_of_the_plan() {
    let [overlay, whole, image] =
        ["k8s/overlays/ranks/resources.yaml", "k8s/overlays/ranks/kustomization.yaml", "ranks/Containerfile"]
            .map(|name| read(&format!("deploy/{name}")));
    // One GPU for each rank, here and in the image.
    let ranks = line(&overlay, "nvidia.com/gpu: ").trim_matches('"').to_owned();
    let variable =
        overlay.split_once("name: MLCC_RANKS").unwrap().1.lines().nth(1).unwrap().trim().to_owned();
    assert_eq!(variable, format!("value: \"{ranks}\""));
    assert_eq!(line(&image, "ENV MLCC_RANKS="), ranks);
    // Where mpirun writes on a read-only root.
    let written = line(&image, "ENV HOME=");
    assert!(whole.contains(&format!("mountPath: {written}\n")));
    // Its script and its tag.
    let command = line(&overlay, "command: ");
    assert!(image.contains(&format!(" {}\n", command.trim_matches(['[', ']']))), "{command}");
    let version = line(&whole, "newTag: ");
    let tag = format!("-t {}:{version} .", line(&whole, "newName: "));
    assert!(image.contains(&tag) && image.contains(&format!("\nFROM mlcc:{version}\n")), "{tag}");
    assert_eq!(version, line(&read("deploy/k8s/base/kustomization.yaml"), "newTag: "));

    let folder = tempfile::tempdir().unwrap();
    let flags =
        ["--quant", "q4f16_1", "--target", "cuda", "--max-batch", "16", "--tensor-parallel", ranks.as_str()];
    assert!(whole.contains(&flags.join(" ")));
    // Shared memory counts as memory, too.
    let shared = mebibytes(line(whole.split_once("medium: Memory").unwrap().1, "sizeLimit: "));
    // The same artifact on as many machines: a pod of a group has one rank.
    let group = machines(&image, &flags.join(" "));
    let (threads, of_each) = (amount(&overlay, "cpu"), amount(&group, "cpu"));
    let inspect: [&[&str]; 2] = [&["--threads", &threads], &["--each-rank", "--threads", &of_each]];
    let [all, each] = memory_by_layers(folder.path(), &flags, inspect);
    holds(&overlay, all + shared);
    holds(&group, each + shared);
}

/// The first pod of the overlay for several machines, which has one rank and its GPU; the others ask for the
/// same.
fn machines(image: &str, flags: &str) -> String {
    let [overlay, whole, script] = [
        "k8s/overlays/machines/group.yaml",
        "k8s/overlays/machines/kustomization.yaml",
        "ranks/rank-machines",
    ]
    .map(|name| read(&format!("deploy/{name}")));
    assert!(whole.contains(flags), "{flags}");
    let (leader, worker) = overlay.split_once("workerTemplate:").unwrap();
    for name in ["cpu", "memory"] {
        assert_eq!(amount(leader, name), amount(worker, name));
    }
    let ranks = line(leader, "size: ");
    let variable = leader.split_once("name: MLCC_RANKS").unwrap().1.lines().nth(1).unwrap().trim();
    assert_eq!(variable, format!("value: \"{ranks}\""));
    for pod in [leader, worker] {
        assert_eq!(line(pod, "nvidia.com/gpu: "), "\"1\"");
        let tag = line(pod, "image: ");
        assert!(image.contains(&format!("-t {tag} .")), "{tag}");
        let command = line(pod, "command: ");
        assert!(image.contains(&format!(" {}\n", command.trim_matches(['[', ']']))), "{command}");
        assert!(pod.contains(&format!("mountPath: {}\n", line(image, "ENV HOME="))));
    }
    assert!(image.contains("COPY deploy/ranks/rank-machines /usr/local/bin/rank-machines\n"));
    assert_eq!(line(worker, "containerPort: "), line(&script, "port="));
    leader.to_owned()
}

/// A container of a split model has all ranks, or one of them; no GPU is asked for its needs.
#[test]
fn containers_of_ranks_have_their_part() {
    let folder = tempfile::tempdir().unwrap();
    for (target, gpus) in [("cpu", None), ("sm_90", Some("2"))] {
        let artifact = folder.path().join(format!("{target}.so"));
        let mut build = mlcc();
        build.args([
            "build",
            "--quant",
            "f32",
            "--tensor-parallel",
            "2",
            "--no-report",
            "--target",
            target,
            "-m",
        ]);
        build.arg(case("llama3-gqa-tied")).arg("-o").arg(&artifact).assert().success();
        let found = |flags: &[&str]| {
            let mut command = mlcc();
            command
                .arg("inspect")
                .arg(&artifact)
                .args(["--resources", "--json", "--threads", "2"])
                .args(flags);
            let found = json(command.env("MLCC_CUDA_DRIVER", "/nowhere/libcuda.so"));
            let gpus = found["resources"]["limits"]["nvidia.com/gpu"].as_str().map(str::to_owned);
            let number = |name: &str| found[name].as_u64().unwrap();
            // Requests reach one rank, whichever that is.
            ([number("weights_bytes"), number("need_bytes") - number("requests_bytes")], gpus)
        };
        let (([weights, need], all_gpus), ([own_weights, own], own_gpus)) =
            (found(&[]), found(&["--each-rank"]));
        assert_eq!(weights, 2 * own_weights, "{target}");
        // Logits and everything made of them are on the first rank, or on each.
        assert!(own > need * 4 / 10 && own < need * 6 / 10, "{target}: {own} of {need}");
        assert_eq!((all_gpus.as_deref(), own_gpus.as_deref()), (gpus, gpus.map(|_| "1")), "{target}");
    }
}
