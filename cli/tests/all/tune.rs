//! `mlcc tune` and `mlcc build --tuning`.

use std::path::{Path, PathBuf};

use crate::program::{artifact, books, case, fails_with, failure, json, mlcc, text};
use mlcc_codegen::nvdisasm::{NVDISASM_VARIABLE, find_nvdisasm};
use mlcc_codegen::ptxas::{PTXAS_VARIABLE, find_ptxas};
use mlcc_driver::compile::Backend;
use mlcc_target::{Arch, FeatureLevel, LevelTuning};

/// The best level of instructions of this machine; none where it has no spec.
fn level() -> Option<FeatureLevel> {
    let name = crate::cases::host_levels().pop()?;
    mlcc_target::level(&name).unwrap()
}

/// A tuning file of a level with these lines in its tune table.
fn tuning(folder: &Path, level: &str, tune: &str) -> PathBuf {
    let path = folder.join("tuning.toml");
    std::fs::write(&path, format!("level = '{level}'\n[tune]\n{tune}")).unwrap();
    path
}

fn build(model: &Path, level: &str, tuning: Option<&Path>, out: &Path) -> assert_cmd::Command {
    let mut build = mlcc();
    build.arg("build").arg("-m").arg(model).args(["--quant", "q8i8", "--no-report", "--target", level]);
    build.args(tuning.iter().flat_map(|path| [Path::new("--tuning"), path]));
    build.arg("-o").arg(out);
    build
}

/// Far from what any level has: every kind of product gets other loops.
const ODD: &str = "division = 'polynomial'\ndrops_requests = true\n\
    [tune.stream]\nq8 = { lines = 'one', distance = 100 }\nf32 = { lines = 'every', distance = 64 }\n\
    [tune.product]\nfew_rows = 5\nfew_rows_by_mmla = 3\ngroups_ahead = 3\nchunk_rows = 8\nsmall_bytes = 0\nsmall_rows = 5\n\
    thin_rows = 3\ntiles_per_chunk = 1\nfew_columns = 1000\npanel_columns = 32\nfloat_panel_columns = 32\npiece_columns = 32\n\
    [tune.tile]\ncodes = { rows = [4, 1], tiles = 2 }\npacked = { rows = [2, 1], tiles = 2 }\n\
    bf16 = { rows = [6, 4, 1], tiles = 2 }\nplain = { rows = [6, 1], tiles = 2 }\n\
    [tune.attention]\nblock = { by = 'bytes', most = 1024, keys = 48 }\nin_order_heads = 64\nrepeats = false\nmany_rows = 7\nfew_rows = 1\n\
    set_rows = 96\n[tune.quantize]\npiece_bytes = 1024\npiece_groups = 1\nvectors = 2\n\
    [tune.scan]\nstack_bytes = 4096\nstate_vectors = 1\nsteps_ahead = 0\n\
    [tune.shares]\nbytes = 64\ndots = 64\nflops = 64\ntimes_of_cache = 1\n";

#[test]
fn equal_tunings_give_equal_artifacts_that_name_them() {
    let Some(level) = level() else { return println!("skipped: no level runs here") };
    let folder = tempfile::tempdir().unwrap();
    let path = |name: &str| folder.path().join(name);
    let file = tuning(folder.path(), &level.name, ODD);
    let plain = path("plain.so");
    build(&case("rwkv4-hf"), &level.name, None, &plain).assert().success();
    for name in ["a.so", "b.so"] {
        build(&case("rwkv4-hf"), &level.name, Some(&file), &path(name)).assert().success();
    }
    let read = |name: &str| std::fs::read(path(name)).unwrap();
    assert!(read("a.so") == read("b.so"));
    assert!(read("a.so") != read("plain.so"));
    let info = json(mlcc().arg("inspect").arg(path("a.so")).arg("--json"));
    let tuned = &info["metadata"]["tuning"];
    assert_eq!(tuned["content"]["level"], level.name.as_str());
    assert_eq!(tuned["content"]["tune"]["product"]["few_rows"], 5);
    let hash = tuned["xxh3_128"].as_str().unwrap();
    assert_eq!(hash.len(), 32);
    let shown = text(mlcc().arg("inspect").arg(path("a.so")));
    let row = shown.lines().find(|l| l.starts_with("tuning")).unwrap();
    assert!(row.contains("stream.q8 one 100 ahead") && row.contains(hash), "{row}");
    assert!(!text(mlcc().arg("inspect").arg(&plain)).contains("tuning"));
    assert!(json(mlcc().arg("inspect").arg(&plain).arg("--json"))["metadata"]["tuning"].is_null());
}

#[test]
fn artifacts_of_odd_tunings_compute_the_same() {
    let Some(level) = level() else { return println!("skipped: no level runs here") };
    let folder = tempfile::tempdir().unwrap();
    let out = folder.path().join("odd.so");
    let file = tuning(folder.path(), &level.name, ODD);
    for name in ["rwkv4-hf", "rwkv7-hf", "llama3-gqa-tied"] {
        for quant in ["f32", "q4i8", "q8f16_1"] {
            let mut build = mlcc();
            build.arg("build").arg("-m").arg(case(name)).args(["--quant", quant, "--no-report"]);
            build.args(["--target", &level.name, "--chunk", "16", "--tuning"]).arg(&file);
            build.arg("-o").arg(&out).assert().success();
            let golden = case(name).join("golden.json");
            mlcc().arg("verify").arg(&out).arg("--golden").arg(golden).assert().success();
        }
    }
}

#[test]
fn tunings_that_do_not_fit_are_refused() {
    let Some(level) = level() else { return println!("skipped: no level runs here") };
    let folder = tempfile::tempdir().unwrap();
    let out = folder.path().join("x.so");
    let model = case("rwkv4-hf");
    let fails = |tune: &str, parts: &[&str]| {
        let file = tuning(folder.path(), &level.name, tune);
        fails_with(&mut build(&model, &level.name, Some(&file), &out), parts);
        assert!(!out.exists());
    };
    fails("speed = 3", &["tuning.toml", "`speed`", "`drops_requests`"]);
    fails("product = { few_rows = 100000 }", &["tuning.toml", "1 to 512"]);
    fails("product = 3\n[", &["tuning.toml", "line 4"]);
    let missing = folder.path().join("missing.toml");
    fails_with(&mut build(&model, &level.name, Some(&missing), &out), &["missing.toml"]);
    fails_with(&mut build(&model, &level.name, Some(folder.path()), &out), &["directory"]);

    let file = tuning(folder.path(), &level.name, "");
    let other = if Arch::of_host() == Some(Arch::X86_64) { "haswell" } else { "cortex-a72" };
    fails_with(&mut build(&model, other, Some(&file), &out), &["tuning.toml", other, &level.name]);
    // Measured elsewhere: not for `cpu`, which is this machine.
    let here = mlcc_target::resolve_target("cpu").unwrap().name;
    let cpu = "cpu = { vendor = 'Nobody', family = 1, model = 2 }";
    std::fs::write(&file, format!("level = '{here}'\n{cpu}\n")).unwrap();
    if mlcc_target::detected_model().is_some() {
        fails_with(&mut build(&model, "cpu", Some(&file), &out), &["Nobody", "mlcc tune", &here]);
    }
    build(&model, &here, Some(&file), &out).assert().success();
    // The file is an input, which no output replaces.
    fails_with(&mut build(&model, &here, Some(&file), &file), &["tuning.toml", "--tuning"]);
    assert!(file.exists());
}

/// Smaller tiles than any level has, and other warps.
const ODD_GPU: &str = "product = { rows = 32, columns = 32, warps = [2, 1], stages = 2 }\n\
    code_product = { rows = 16, columns = 64, warps = [1, 2], stages = 5 }\n\
    attention = { warps = 2, keys = 16, shared_bytes = 32768 }\n";

#[test]
fn tunings_change_kernels_of_gpus() {
    if !Backend::Llvm.is_built_in() {
        return println!("skipped: this mlcc has no LLVM");
    }
    let folder = tempfile::tempdir().unwrap();
    let path = |name: &str| folder.path().join(name);
    let model = case("llama3-gqa-tied");
    let file = tuning(folder.path(), "sm_90", ODD_GPU);
    let ptx = |tuning: Option<&Path>, name: &str| {
        let mut build = build(&model, "sm_90", tuning, &path(name));
        build.args(["--emit", "ptx"]).assert().success();
        let of = std::fs::read_dir(folder.path()).unwrap().map(|entry| entry.unwrap().path());
        let mut of = of.filter(|path| path.to_str().unwrap().ends_with(".ptx"));
        let found = of.next().unwrap();
        let text = std::fs::read_to_string(&found).unwrap();
        std::fs::remove_file(found).unwrap();
        text
    };
    let [plain, tuned] = [ptx(None, "plain"), ptx(Some(&file), "tuned")];
    // Blocks of 2 warps in place of 4.
    let blocks = |ptx: &str, threads: &str| ptx.matches(&format!(".maxntid {threads}")).count();
    assert!(blocks(&plain, "128") > 0 && blocks(&tuned, "64") > blocks(&plain, "64"), "{tuned}");
    assert!(ptx(Some(&file), "again") == tuned);

    let out = path("x.so");
    build(&model, "sm_90", Some(&file), &out).assert().success();
    let info = json(mlcc().arg("inspect").arg(&out).arg("--json"));
    assert_eq!(info["metadata"]["tuning"]["content"]["tune"]["product"]["rows"], 32);
    let shown = text(mlcc().arg("inspect").arg(&out));
    let row = shown.lines().find(|l| l.starts_with("tuning")).unwrap();
    assert!(row.contains("sm_90 with code_product") && row.contains("stages 5"), "{row}");

    fails_with(&mut build(&model, "sm_80", Some(&file), &out), &["tuning.toml", "`sm_90`", "--target sm_90"]);
    let fails = |tune: &str, parts: &[&str]| {
        let file = tuning(folder.path(), "sm_90", tune);
        fails_with(&mut build(&model, "sm_90", Some(&file), &out), parts);
    };
    fails("product = { speed = 3 }", &["tuning.toml", "`speed`", "`stages`"]);
    fails("product = { columns = 100 }", &["tuning.toml", "product: 100 columns", "a multiple of 16"]);
    fails(
        "product = { rows = 256, columns = 128, warps = [4, 2], stages = 8 }",
        &["shared memory", "101376"],
    );
    fails("attention = { keys = 128 }", &["attention", "128 keys", "16, 32 and 64"]);
    let file = tuning(folder.path(), "sm_70", "");
    fails_with(&mut build(&model, "sm_70", Some(&file), &out), &["tuning.toml", "no tensor cores"]);
}

#[test]
fn artifacts_of_odd_gpu_tunings_compute_the_same() {
    let Some(driver) = crate::software_gpu::driver() else { return };
    let folder = tempfile::tempdir().unwrap();
    let file = tuning(folder.path(), "sm_90", ODD_GPU);
    let flags = |quant| ["--target", "sm_90", "--quant", quant, "--tuning", file.to_str().unwrap()];
    for (name, quant) in [("llama3-gqa-tied", "q4f16_2"), ("rwkv7-hf", "f16")] {
        let artifact = crate::software_gpu::build(&case(name), folder.path(), "x.so", &flags(quant));
        let mut verify = crate::software_gpu::on_gpu(&driver, &[]);
        verify.arg("verify").arg(&artifact).arg("--golden").arg(case(name).join("golden.json"));
        let out = text(&mut verify);
        assert!(out.contains("within the tolerance") || out.contains(": right"), "{name}: {out}");
    }
}

#[test]
fn a_lowered_module_takes_no_tuning() {
    let Some(level) = level() else { return println!("skipped: no level runs here") };
    let folder = tempfile::tempdir().unwrap();
    let (dump, out) = (folder.path().join("dump"), folder.path().join("x.so"));
    let mut first = build(&case("rwkv4-hf"), &level.name, None, &out);
    first.args(["--stop-after", "lower", "--debug-dump"]).arg(&dump).assert().success();
    let files = std::fs::read_dir(&dump).unwrap().flatten().map(|f| f.path());
    let lowered = files.into_iter().find(|f| f.to_str().unwrap().ends_with("-lower.mlc")).unwrap();
    let file = tuning(folder.path(), &level.name, "");
    let mut again = build(&lowered, &level.name, Some(&file), &out);
    fails_with(again.arg("--weights").arg(case("rwkv4-hf")), &["--tuning", "leave the flag out"]);
}

/// Without time nothing is found, and the file says so; the results of a search are tested elsewhere, on a
/// machine that is made up.
#[test]
fn a_tuning_is_written_and_read_back() {
    if !Backend::default().is_built_in() || level().is_none() {
        return println!("skipped: nothing runs here");
    }
    let folder = tempfile::tempdir().unwrap();
    let (file, out) = (folder.path().join("t.toml"), folder.path().join("x.so"));
    let mut tune = mlcc();
    tune.arg("tune").arg(case("rwkv4-hf")).args([
        "--quant",
        "q8i8",
        "--threads",
        "1",
        "--budget",
        "0",
        "--json",
    ]);
    let report = json(tune.arg("-o").arg(&file));
    assert_eq!((&report["faster"], &report["complete"]), (&false.into(), &false.into()));
    assert_eq!(report["measured"]["tests"].as_array().unwrap().len(), 3);
    assert!(report["measured"]["read_gbytes_per_s"][0].as_f64() > Some(0.0));
    let written = LevelTuning::parse("t.toml", &std::fs::read_to_string(&file).unwrap()).unwrap();
    assert!(written.tune.is_empty() && written.cpu == mlcc_target::detected_model());
    let built = mlcc()
        .arg("build")
        .arg("-m")
        .arg(case("rwkv4-hf"))
        .args(["-v", "--quant", "q8i8", "--tuning"])
        .arg(&file)
        .arg("-o")
        .arg(&out)
        .assert()
        .success();
    let told = String::from_utf8(built.get_output().stderr.clone()).unwrap();
    assert!(told.contains("as it is; measured on") && told.contains("GB/s"), "{told}");
}

#[test]
fn an_artifact_is_tuned_by_its_metadata() {
    if level().is_none() {
        return println!("skipped: nothing runs here");
    }
    let folder = tempfile::tempdir().unwrap();
    let mut tune = mlcc();
    tune.current_dir(&folder).arg("tune").arg(artifact()).args(["--threads", "1", "--budget", "0"]);
    let out = text(&mut tune);
    let name = out.lines().last().unwrap();
    assert!(name.starts_with("rwkv4-tiny-books-q8f16_1-") && name.ends_with(".toml"), "{out}");
    assert!(out.contains("pp128") && out.contains("turns"), "{out}");
    let written = std::fs::read_to_string(folder.path().join(name)).unwrap();
    assert!(written.contains("quant = \"q8f16_1\""), "{written}");
}

#[test]
fn what_cannot_be_tuned_is_told() {
    let model = books();
    let tune = |args: &[&str]| {
        let mut tune = mlcc();
        tune.arg("tune").arg(&model).args(args);
        failure(&mut tune, 2)
    };
    assert!(tune(&[]).contains("--quant"));
    assert!(tune(&["--quant", "keep"]).contains("keep"));
    assert!(tune(&["--quant", "q9"]).contains("q9"));
    assert!(tune(&["--quant", "q8i8", "--target", "cuda"]).contains("sm_90"));
    let text = tune(&["--quant", "q8i8", "--target", "sm_80"]);
    assert!(text.contains("sm_80 is a level of GPUs") && text.contains("--predict h200"), "{text}");
    let text = tune(&["--quant", "q8i8", "--predict", "h200"]);
    assert!(
        text.contains("--predict h200 is for levels of GPUs") && text.contains("leave the flag out"),
        "{text}"
    );
    let text = tune(&["--quant", "f16", "--target", "sm_90", "--predict", "h300"]);
    assert!(text.contains("h300") && text.contains("h200"), "{text}");
    let text = tune(&["--quant", "f16", "--target", "sm_90", "--predict", "a100"]);
    assert!(text.contains("a100: it is an sm_80") && text.contains("sm_90 or later"), "{text}");
    assert!(tune(&["--quant", "f16", "--target", "sm_70", "--predict", "h200"]).contains("nothing to tune"));
    let foreign = if Arch::of_host() == Some(Arch::X86_64) { "armv8.6" } else { "x86-64-v4" };
    assert!(tune(&["--quant", "q8i8", "--target", foreign]).contains("lacks"));
    fails_with(mlcc().args(["tune", "no-such-model", "--quant", "q8i8"]), &["no-such-model"]);
}

#[test]
fn without_nvidias_programs_nothing_is_predicted() {
    if Path::new("/usr/local/cuda/bin").exists() {
        return println!("skipped: the CUDA toolkit is in its usual place");
    }
    let folder = tempfile::tempdir().unwrap();
    let mut tune = mlcc();
    tune.env_remove(PTXAS_VARIABLE).env_remove(NVDISASM_VARIABLE).env("PATH", folder.path());
    tune.current_dir(&folder).arg("tune").arg(case("llama3-gqa-tied"));
    tune.args(["--quant", "f16", "--target", "sm_90", "--predict", "h200"]);
    fails_with(&mut tune, &["--predict needs ptxas", "MLCC_PTXAS"]);
}

/// Without time nothing is found, and the file has predictions of the level as it is. The results of a search
/// are tested elsewhere.
#[test]
fn predicted_tunings_are_equal_and_say_what_they_are() {
    if !Backend::Llvm.is_built_in() {
        return println!("skipped: this mlcc has no LLVM");
    }
    let (Some(ptxas), Some(nvdisasm)) = (find_ptxas(), find_nvdisasm()) else {
        return println!("skipped: ptxas or nvdisasm is not there");
    };
    let folder = tempfile::tempdir().unwrap();
    let (file, out) = (folder.path().join("t.toml"), folder.path().join("x.so"));
    let model = case("llama3-gqa-tied");
    let written = || {
        let mut tune = mlcc();
        tune.arg("tune").arg(&model).args(["--quant", "f16", "--target", "sm_90", "--predict", "h200"]);
        tune.env(PTXAS_VARIABLE, &ptxas).env(NVDISASM_VARIABLE, &nvdisasm);
        let said = text(tune.args(["--budget", "0", "-o"]).arg(&file));
        assert!(said.contains("predicted tok/s") && said.contains("none measured"), "{said}");
        std::fs::read_to_string(&file).unwrap()
    };
    let first = written();
    assert_eq!(first, written());
    let tuning = LevelTuning::parse("t.toml", &first).unwrap();
    let predicted = tuning.predicted.as_ref().unwrap();
    assert!(tuning.tune.is_empty() && tuning.measured.is_none() && tuning.cpu.is_none());
    assert_eq!((predicted.device.as_str(), predicted.quant.as_str()), ("h200", "f16"));
    let names: Vec<&str> = predicted.tests.iter().map(|test| test.name.as_str()).collect();
    assert!(names.len() == 4 && names[1].ends_with("@b8") && names[2].ends_with("@b32"), "{names:?}");
    assert!(predicted.tests.iter().all(|test| test.with > 0.0 && test.gain == 1.0), "{predicted:?}");
    build(&model, "sm_90", Some(&file), &out).assert().success();
    let shown = text(mlcc().arg("inspect").arg(&out));
    let row = shown.lines().find(|l| l.starts_with("tuning")).unwrap();
    assert!(row.contains("predicted for h200, not measured"), "{row}");
}
