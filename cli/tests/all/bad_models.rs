//! Checkpoints that cannot be built, and builds that cannot be written: each is one message that names the
//! place and says what to do, and leaves no file.

use std::path::Path;

use crate::program::{artifact, artifacts_in, books, case, copy_of, fails_with, failure, mlcc};

/// A build of `model` with its output in the model's own folder, which must stay without it.
#[track_caller]
fn build_fails(model: &Path, extra: &[&str], parts: &[&str]) {
    let folder = if model.is_dir() { model } else { model.parent().unwrap() };
    let output = folder.join("out.so");
    let mut build = mlcc();
    build.arg("build").arg("-m").arg(model).args(extra).arg("-o").arg(&output);
    fails_with(&mut build, parts);
    assert_eq!(artifacts_in(folder), [""; 0]);
}

/// Replaces text in a file of a copy; the text must be there.
fn edit(path: &Path, from: &str, to: &str) {
    let text = std::fs::read_to_string(path).unwrap();
    assert!(text.contains(from), "{from} is not in {}", path.display());
    std::fs::write(path, text.replace(from, to)).unwrap();
}

/// Replaces bytes of equal number in a file.
fn patch(path: &Path, from: &[u8], to: &[u8]) {
    let mut bytes = std::fs::read(path).unwrap();
    let at = bytes.windows(from.len()).position(|w| w == from).unwrap();
    bytes[at..at + to.len()].copy_from_slice(to);
    std::fs::write(path, bytes).unwrap();
}

#[test]
fn configurations() {
    let model = copy_of(&case("rwkv4-hf"));
    let config = model.path().join("config.json");
    let good = std::fs::read_to_string(&config).unwrap();
    edit(&config, "\"num_hidden_layers\"", "\"num_hiden_layers\"");
    build_fails(model.path(), &[], &["config.json", "`num_hidden_layers` is missing", "expected"]);
    std::fs::write(&config, good.replace("\"hidden_size\": 64", "\"hidden_size\": \"64\"")).unwrap();
    build_fails(model.path(), &[], &["config.json", "`hidden_size`", "\"64\""]);
    let unknown = good.replace("\"rwkv\"", "\"retnet\"").replace("RwkvForCausalLM", "RetNetForCausalLM");
    std::fs::write(&config, unknown).unwrap();
    build_fails(model.path(), &[], &["`retnet`", "`mlcc models` lists"]);
    std::fs::write(&config, &good[..good.len() / 2]).unwrap();
    build_fails(model.path(), &[], &["config.json is not valid JSON"]);
    std::fs::remove_file(&config).unwrap();
    std::fs::remove_file(model.path().join("model.safetensors")).unwrap();
    build_fails(model.path(), &[], &["no weights in", "expected"]);
}

/// Replaces the first `from` behind `name`.
fn turn(path: &Path, name: &[u8], from: &[u8], to: &[u8]) {
    let mut bytes = std::fs::read(path).unwrap();
    let find =
        |bytes: &[u8], part: &[u8]| bytes.windows(part.len()).position(|window| window == part).unwrap();
    let entry = find(&bytes, name);
    let at = entry + find(&bytes[entry..], from);
    bytes[at..at + to.len()].copy_from_slice(to);
    std::fs::write(path, bytes).unwrap();
}

/// Outputs never take the place of what they are made from.
#[test]
fn outputs_in_the_place_of_inputs() {
    let model = copy_of(&case("rwkv4-hf"));
    let weights = model.path().join("model.safetensors");
    let before = std::fs::read(&weights).unwrap();
    for (output, more) in [
        ("model.so", &["--split-weights"][..]),
        ("model.safetensors", &[]),
        ("./x/../model.safetensors", &[]),
    ] {
        std::fs::create_dir_all(model.path().join("x")).unwrap();
        let mut build = mlcc();
        build.args(["build", "--quant", "f32", "-m"]).arg(model.path()).args(more);
        fails_with(
            build.arg("-o").arg(model.path().join(output)),
            &["model.safetensors", "weights", "choose another -o"],
        );
        assert!(std::fs::read(&weights).unwrap() == before && artifacts_in(model.path()).is_empty());
    }
    let config = std::fs::read(model.path().join("config.json")).unwrap();
    let mut build = mlcc();
    build.args(["build", "--quant", "f32", "-m"]).arg(model.path());
    fails_with(build.arg("-o").arg(model.path().join("config.json")), &["config.json", "choose another -o"]);
    assert!(std::fs::read(model.path().join("config.json")).unwrap() == config);
    // An artifact is replaced, a folder or device is not.
    for _ in 0..2 {
        let mut build = mlcc();
        build
            .args(["build", "--quant", "f32", "-m"])
            .arg(model.path())
            .arg("-o")
            .arg(model.path().join("model.so"));
        build.assert().success();
    }
    let pipe = model.path().join("pipe");
    assert!(std::process::Command::new("mkfifo").arg(&pipe).status().unwrap().success());
    let mut build = mlcc();
    fails_with(build.args(["build", "-m"]).arg(model.path()).arg("-o").arg(&pipe), &["not a regular file"]);
    fails_with(mlcc().arg("inspect").arg(&pipe), &["not a regular file"]);
    fails_with(mlcc().args(["build", "-m", "gpt2", "--weights"]).arg(&pipe), &["pipe"]);
    let mut run = mlcc();
    run.arg("run").arg(artifact()).args(["-p", "a", "--save-state"]).arg(artifact());
    assert!(failure(&mut run, 2).contains("the model itself"));
}

#[test]
fn tensors_that_do_not_fit_are_all_named() {
    let model = copy_of(&case("rwkv4-hf"));
    let weights = model.path().join("model.safetensors");
    // The name's length must stay: it is inside of the file's header.
    patch(&weights, b"rwkv.blocks.1.ln1.weight", b"rwkv.blocks.1.lnX.weight");
    patch(&weights, b"rwkv.blocks.2.ln2.bias", b"rwkv.blocks.2.lnY.bias");
    turn(&weights, b"rwkv.blocks.1.feed_forward.key.weight", b"[256,64]", b"[64,256]");
    build_fails(
        model.path(),
        &[],
        &[
            "missing: rwkv.blocks.1.ln1.weight, expected [64]",
            "missing: rwkv.blocks.2.ln2.bias, expected [64]",
            "not part of the model: rwkv.blocks.1.lnX.weight [64]",
            "wrong shape: rwkv.blocks.1.feed_forward.key.weight, expected [256, 64], found [64, 256]",
            "same model",
        ],
    );
}

#[test]
fn a_configuration_that_contradicts_a_tensor() {
    let model = copy_of(&case("rwkv4-hf"));
    edit(&model.path().join("config.json"), "\"intermediate_size\": 256", "\"intermediate_size\": 255");
    let tensor = "tensor `rwkv.blocks.0.feed_forward.key.weight` [256, 64] means 256";
    build_fails(model.path(), &[], &["config.json", "`intermediate_size` is 255", tensor, "same model"]);
}

#[test]
fn weights_of_another_quantizer() {
    let model = copy_of(&case("rwkv4-hf"));
    let entry = "\"quantization_config\": {\"quant_method\": \"hqq\", \"nbits\": 4}, \"use_cache\"";
    edit(&model.path().join("config.json"), "\"use_cache\"", entry);
    build_fails(
        model.path(),
        &[],
        &["config.json", "quantized with HQQ, 4 bits", "Supported: AWQ", "unquantized checkpoint, or a GGUF"],
    );
}

#[test]
fn damaged_weight_files() {
    let model = copy_of(&case("rwkv4-hf"));
    let weights = model.path().join("model.safetensors");
    let good = std::fs::read(&weights).unwrap();
    for length in [0, 4, 100, good.len() / 2, good.len() - 1] {
        std::fs::write(&weights, &good[..length]).unwrap();
        build_fails(model.path(), &[], &["model.safetensors"]);
    }
    std::fs::write(&weights, [&[0xff; 8], &good[8..]].concat()).unwrap();
    build_fails(model.path(), &[], &["model.safetensors"]);

    let model = copy_of(&case("rwkv4-pth"));
    let weights = model.path().join("model.pth");
    let good = std::fs::read(&weights).unwrap();
    for length in [0, 30, good.len() / 2, good.len() - 1] {
        std::fs::write(&weights, &good[..length]).unwrap();
        build_fails(model.path(), &[], &["model.pth"]);
    }
}

#[test]
fn weights_that_are_no_numbers() {
    for value in [f32::NAN, f32::INFINITY] {
        let model = copy_of(&case("rwkv4-hf"));
        let weights = model.path().join("model.safetensors");
        let mut bytes = std::fs::read(&weights).unwrap();
        let end = bytes.len();
        bytes[end - 4..].copy_from_slice(&value.to_le_bytes());
        std::fs::write(&weights, bytes).unwrap();
        build_fails(model.path(), &[], &["tensor `", &value.to_string(), "index", "checkpoint is broken"]);
    }
}

#[test]
fn a_tokenizer_of_another_model() {
    let model = copy_of(&case("rwkv4-hf"));
    std::fs::copy(books().join("tokenizer.json"), model.path().join("tokenizer.json")).unwrap();
    build_fails(model.path(), &[], &["tokenizer does not belong to this model", "320", "4095"]);
    std::fs::write(model.path().join("tokenizer.json"), "{").unwrap();
    build_fails(model.path(), &[], &["tokenizer.json"]);
}

#[test]
fn models_that_are_not_there() {
    let build = |model: &str| {
        let mut build = mlcc();
        build.args(["build", "-m", model]);
        build
    };
    fails_with(
        &mut build("no-such-model"),
        &["`no-such-model` does not exist", "`mlcc models` lists all", "config.json"],
    );
    fails_with(&mut build("qwen3-06b"), &["did you mean `qwen3-0.6b`"]);
    fails_with(&mut build("rwkv7"), &["did you mean `rwkv-7b`, `rwkv7-0.1b` or `rwkv7-0.4b`?"]);
    fails_with(&mut build("hf:RWKV/nothing"), &["not in the Hugging Face cache", "hf download"]);
    fails_with(&mut build("rwkv-3b"), &["--weights", "--random-weights"]);
}

#[test]
fn wrong_usage_ends_with_code_2() {
    let build = |extra: &[&str]| {
        let mut build = mlcc();
        build.arg("build").arg("-m").arg(case("rwkv4-hf")).args(extra);
        build
    };
    for (extra, part) in [
        (&["--quant", "q4f61"][..], "unknown quantization `q4f61`: did you mean `q4f16`"),
        (&["--quant", "none"], "`none`: `mlcc quants` lists all"),
        (&["--target", "z80"], "unknown target `z80`: did you mean"),
        (&["--target", "x86-64v4"], "did you mean `x86-64-v4`, `x86-64` or `x86-64-v2`?"),
        (&["--target", "x86-64-v3,sm_80"], "different architectures"),
        (&["--target", "cuda,x86-64-v3"], "CPU levels and GPUs"),
        (&["--disable-pass", "magic"], "unknown pass `magic`: `mlcc opt --list` lists all"),
        (&["--disable-pass", "canonicalise"], "did you mean `canonicalize`?"),
        (&["--disable-pass", "lower"], "`lower` cannot be switched off"),
        (&["--json", "--print-after", "cse"], "--print-after"),
        (&["--chunk", "0"], "--chunk"),
        (&["--memory-budget", "lots"], "not a number of bytes"),
        (&["--emit", "ptx", "--target", "x86-64-v3"], "GPU"),
        (&["--no-such-flag"], "--no-such-flag"),
    ] {
        let message = failure(&mut build(extra), 2);
        assert!(message.contains(part), "`{part}` is not in: {message}");
    }
    let message = failure(mlcc().args(["run", "x.so"]), 2);
    assert!(message.contains("-p TEXT"), "{message}");
    for (flags, part) in [
        (&["--top-p", "2"][..], "--top-p is 2, expected more than 0"),
        (&["--temp", "-1"], "--temperature is -1"),
        (&["--top-k", "-3"], "--top-k"),
        (&["-n", "-2"], "--predict"),
        (&["--seed", "-2"], "not a seed"),
        (&["--stop", ""], "--stop"),
    ] {
        let message = failure(mlcc().arg("run").arg(artifact()).args(["-p", "a"]).args(flags), 2);
        assert!(message.contains(part), "`{part}` is not in: {message}");
    }
    for (flags, part) in [
        (["-p", "99999999999"], "not a number of tokens"),
        (["--warm-up", "inf"], "not a number of seconds"),
        (["--mixed", "8+0"], "expected NEXT+PIECE"),
    ] {
        let message = failure(mlcc().arg("bench").arg(artifact()).args(flags), 2);
        assert!(message.contains(part), "`{part}` is not in: {message}");
    }
    let golden = case("rwkv4-hf").join("golden.json");
    let mut interp = mlcc();
    interp.args(["interp", "--quant", "q4f16", "-m"]).arg(case("rwkv4-hf")).arg("--golden").arg(&golden);
    assert!(failure(&mut interp, 2).contains("--target"));
    for wrong in ["nan", "-1"] {
        let mut verify = mlcc();
        verify.arg("verify").arg(artifact()).arg("--golden").arg(&golden).args(["--tolerance", wrong]);
        assert!(failure(&mut verify, 2).contains("not a relative error"));
    }
}

#[test]
fn more_memory_than_the_budget() {
    let model = copy_of(&case("rwkv4-hf"));
    build_fails(model.path(), &["--memory-budget", "100kB"], &["the budget is 100000", "--quant"]);
}

#[test]
fn policies() {
    let model = copy_of(&case("rwkv4-hf"));
    let policy = model.path().join("policy.toml");
    let path = policy.to_str().unwrap().to_string();
    let extra = ["--quant", "q8i8", "--quant-policy", &path];
    std::fs::write(&policy, "[[rule]]\nmatch = \"nothing\"\nformat = \"f16\"\n").unwrap();
    build_fails(model.path(), &extra, &["policy.toml", "rule 1", "nothing"]);
    std::fs::write(&policy, "[[rule]]\nmatch = \"*.ln1.weight\"\nformat = \"q4g32\"\n").unwrap();
    build_fails(model.path(), &extra, &["policy.toml", "rule 1", "ln1.weight", "always stay f32"]);
    std::fs::write(&policy, "[[rule]]\nmatch = \"*\"\nformat = \"f16\"\nscale_search = \"mse\"\n").unwrap();
    build_fails(model.path(), &extra, &["policy.toml", "rule 1", "scale_search is for packed formats"]);
    std::fs::write(&policy, "[[rule]]\nmatch = \"*\"\nformat = \"q5\"\n").unwrap();
    build_fails(model.path(), &extra, &["policy.toml", "format = \"q5\""]);
    std::fs::remove_file(&policy).unwrap();
    build_fails(model.path(), &extra, &["cannot read", "policy.toml"]);
}

#[test]
fn outputs_that_cannot_be_written() {
    let folder = tempfile::tempdir().unwrap();
    let build = |output: &Path| {
        let mut build = mlcc();
        build.arg("build").arg("-m").arg(case("rwkv4-hf")).arg("-o").arg(output);
        build
    };
    fails_with(&mut build(&folder.path().join("no/such/x.so")), &["x.so", "folder does not exist", "-o"]);
    fails_with(&mut build(folder.path()), &["folder"]);
    // No user may create files there, root included.
    if Path::new("/sys/kernel").is_dir() {
        fails_with(&mut build(Path::new("/sys/kernel/x.so")), &["/sys/kernel/x.so", "-o"]);
    }
}

/// A shell script around the program, which it finds as `"$0" "$@"`.
#[cfg(target_os = "linux")]
fn build_in_shell(launcher: &[&str], script: &str, output: &Path) -> std::process::Output {
    let mut shell = std::process::Command::new(launcher[0]);
    shell.args(&launcher[1..]).args(["-c", script]).arg(assert_cmd::cargo::cargo_bin!("mlcc"));
    shell.arg("build").arg("--no-cache").arg("-m").arg(books()).arg("-o").arg(output).output().unwrap()
}

#[test]
#[cfg(target_os = "linux")]
fn a_full_disk() {
    let folder = tempfile::tempdir().unwrap();
    // A mount namespace of its own: the small file system exists for the child only.
    let script = format!(
        "mount -t tmpfs -o size=2m none {0} || exit 99; \"$0\" \"$@\"; code=$?; ls -A {0} >&2; exit $code",
        folder.path().display()
    );
    let launcher = ["unshare", "--mount", "--map-root-user", "sh"];
    let output = build_in_shell(&launcher, &script, &folder.path().join("x.so"));
    let message = String::from_utf8(output.stderr).unwrap();
    if message.contains("unshare:") || output.status.code() == Some(99) {
        eprintln!("skipped: this machine does not allow a private tmpfs: {message}");
        return;
    }
    assert_eq!(output.status.code(), Some(1));
    let (error, listing) = message.split_at(message.rfind("with -o\n").unwrap() + 8);
    assert!(
        error.contains("error: no space left on the file system of") && error.contains("x.so"),
        "{error}"
    );
    assert_eq!(listing, "", "files stayed");
}

#[test]
#[cfg(target_os = "linux")]
fn a_limit_on_the_size_of_files() {
    let folder = tempfile::tempdir().unwrap();
    // 1024 blocks of 512 bytes: enough for the code, not for the weights.
    let script = "trap '' XFSZ; ulimit -f 1024; exec \"$0\" \"$@\"";
    let output = build_in_shell(&["sh"], script, &folder.path().join("x.so"));
    let message = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(1), "{message}");
    assert!(message.contains("larger than the system permits") && message.contains("ulimit -f"), "{message}");
    assert_eq!(artifacts_in(folder.path()), [""; 0]);
}
