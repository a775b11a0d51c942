//! Output of each command when all goes well: results on standard output, everything else on standard error.

use crate::cases;
use crate::program::{
    self, artifact, artifacts_in, books, case, copy_of, fails_with, failure, json, mlcc, text,
};
use serde_json::Value;

#[test]
fn build_says_what_it_did() {
    let folder = tempfile::tempdir().unwrap();
    let mut build = mlcc();
    build.current_dir(&folder).arg("build").arg("--model").arg(case("rwkv4-hf").canonicalize().unwrap());
    build.args(["--quantization", "Q4F16", "--memory_budget", "1GB", "--explain-passes"]);
    let output = build.assert().success().get_output().clone();
    assert_eq!(String::from_utf8(output.stdout).unwrap(), "rwkv4-hf-q4f16-cpu.so\n");
    let report = String::from_utf8(output.stderr).unwrap();
    for part in ["Q4F16 stands for q4f16_2", "quantize", "q4g32"] {
        assert!(report.contains(part), "`{part}` is not in: {report}");
    }
    assert_eq!(artifacts_in(folder.path()), ["rwkv4-hf-q4f16-cpu.so"]);
}

#[test]
fn build_reports_as_json_and_splits_weights() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.so");
    let mut build = mlcc();
    build.arg("build").arg("-m").arg(case("rwkv4-hf")).args(["--quant", "f16", "--json", "--split-weights"]);
    let report = json(build.args(["--chunk", "16", "--ctx-size", "99", "-o"]).arg(&path));
    assert_eq!(report["parameters"], 257024);
    assert_eq!(report["artifact"], path.to_str().unwrap());
    let entries = report["memory"]["entries"].as_array().unwrap();
    assert!(entries.iter().any(|e| e["name"] == "prefill" && e["arena_bytes"].as_u64() > Some(0)));
    let info = json(mlcc().arg("inspect").arg(&path).args(["--json", "--params", "--hashes"]));
    assert_eq!(info["metadata"]["memory"]["context"], 99);
    assert_eq!(info["hashes_checked"], true);
    let shown = text(mlcc().arg("inspect").arg(&path).arg("--hashes"));
    let row = |name: &str| shown.lines().find(|l| l.starts_with(name)).unwrap_or_default().to_string();
    assert!(row("hashes").ends_with("right") && row("tokenizer").ends_with(" none"), "{shown}");
    assert!(!text(mlcc().arg("inspect").arg(&path)).contains("are right"));
    assert_eq!(info["metadata"]["quantization"]["scheme"], "f16");
    assert!(info["weights_file"].as_str().unwrap().ends_with("model.safetensors"));
    let head = info["params"].as_array().unwrap().iter().find(|p| p["name"] == "head.weight").unwrap();
    assert_eq!((&head["format"], &head["dims"]), (&Value::from("f16"), &serde_json::json!([320, 64])));
    let golden = case("rwkv4-hf").join("golden.json");
    mlcc().arg("verify").arg(&path).arg("--golden").arg(golden).assert().success();
}

#[test]
fn equal_input_gives_equal_bytes() {
    let folder = tempfile::tempdir().unwrap();
    let copy = program::copy_of(&case("rwkv4-hf"));
    let place = copy.path().join("rwkv4-hf");
    std::fs::create_dir(&place).unwrap();
    for name in ["config.json", "model.safetensors", "generation_config.json"] {
        std::fs::rename(copy.path().join(name), place.join(name)).unwrap();
    }
    let build = |model: &std::path::Path, name: &str| {
        let path = folder.path().join(name);
        let mut build = mlcc();
        build
            .args(["build", "--no-cache", "-m"])
            .arg(model)
            .args(["--quant", "q8i8", "-o"])
            .arg(&path)
            .assert()
            .success();
        std::fs::read(path).unwrap()
    };
    assert!(build(&case("rwkv4-hf"), "a.so") == build(&place, "other-name.so"));
}

#[test]
fn passes_can_be_watched_and_stopped() {
    let folder = tempfile::tempdir().unwrap();
    let mut build = mlcc();
    build.current_dir(&folder).arg("build").arg("-m").arg(case("rwkv4-hf").canonicalize().unwrap());
    build.args([
        "--quant",
        "f32",
        "--print-after",
        "cse",
        "--stop-after",
        "dce",
        "--debug-dump",
        "dump",
        "--disable-pass",
        "fold",
    ]);
    let output = build.assert().success().get_output().clone();
    let [printed, told] = [output.stdout, output.stderr].map(|out| String::from_utf8(out).unwrap());
    assert!(printed.starts_with("// after cse\nmodule "), "{printed}");
    assert!(told.lines().next().unwrap().contains(", f32 in "), "no level has code yet: {told}");
    let mut dumps: Vec<_> = std::fs::read_dir(folder.path().join("dump")).unwrap().flatten().collect();
    dumps.sort_by_key(|d| d.file_name());
    assert!(dumps.last().unwrap().file_name().to_string_lossy().ends_with("-dce.mlc"));
    assert_eq!(artifacts_in(folder.path()), [""; 0]);
    // A dump is a module that other commands take.
    let last = dumps.last().unwrap().path();
    assert!(text(mlcc().arg("opt").arg(&last).args(["--passes", "decompose,dce"])).contains("module "));
    let out = text(mlcc().arg("interp").arg(&last).args(["decode", "7"]));
    assert!(out.starts_with("output 0: f32[1, 320] = ["), "{out}");
}

/// `mlcc build` of a case with what all builds of a test have in common.
fn build_of(model: &std::path::Path, out: &std::path::Path) -> assert_cmd::Command {
    let mut build = mlcc();
    build.arg("build").arg("-m").arg(model).args(["--quant", "q4i8", "--target", "x86-64-v3,x86-64-v2"]);
    build.args(["--no-report", "-o"]).arg(out);
    if mlcc_driver::compile::Backend::Cranelift.is_built_in() {
        build.args(["--backend", "cranelift"]);
    }
    build
}

#[test]
fn a_dump_builds_the_artifact_that_it_was_dumped_from() {
    let folder = tempfile::tempdir().unwrap();
    for name in ["rwkv4-hf", "llama3-gqa-tied"] {
        let (dump, direct) = (folder.path().join(name), folder.path().join("direct.so"));
        let again = folder.path().join("again.so");
        build_of(&case(name), &direct).arg("--debug-dump").arg(&dump).assert().success();
        for pass in ["canonicalize", "quantize", "fuse", "lower", "plan_memory", "plan_barriers"] {
            let files = std::fs::read_dir(&dump).unwrap().flatten().map(|f| f.path());
            let ending = format!("-{pass}.mlc");
            let text = files.into_iter().find(|f| f.to_str().unwrap().ends_with(&ending)).unwrap();
            build_of(&text, &again).arg("--weights").arg(case(name)).assert().success();
            let same = std::fs::read(&direct).unwrap() == std::fs::read(&again).unwrap();
            assert!(same, "{name}, from the text after {pass}");
        }
    }
}

#[test]
fn a_lowered_module_is_interpreted_and_edited() {
    let folder = tempfile::tempdir().unwrap();
    let (dump, out) = (folder.path().join("dump"), folder.path().join("out.so"));
    let model = case("rwkv4-hf");
    let mut build = mlcc();
    build.arg("build").arg("-m").arg(&model).args(["--target", "x86-64-v2", "--chunk", "16", "-o"]).arg(&out);
    build.args(["--emit", "asm", "--debug-dump"]).arg(&dump);
    if !mlcc_driver::compile::Backend::Llvm.is_built_in() {
        eprintln!("skipped: this mlcc has no LLVM");
        return;
    }
    build.assert().success();
    let dumped = std::fs::read_dir(&dump).unwrap().map(|file| file.unwrap().path());
    let lowered = dumped.filter(|file| file.to_string_lossy().ends_with("-lower.mlc")).max().unwrap();
    let mut interp = mlcc();
    interp.arg("interp").arg("--model").arg(&lowered).arg("--weights").arg(&model).args(["--prompts", "1"]);
    interp.arg("--golden").arg(model.join("golden.json")).assert().success();
    // Misfits are reported with their place, and nothing is written.
    let text = std::fs::read_to_string(&lowered).unwrap();
    let wrong = folder.path().join("wrong.mlc");
    let artifact = folder.path().join("wrong.so");
    let fails = |text: String, more: &[&str], part: &str| {
        std::fs::write(&wrong, text).unwrap();
        let mut build = mlcc();
        build.arg("build").arg("-m").arg(&wrong).args(more).arg("-o").arg(&artifact);
        let error = String::from_utf8(build.assert().failure().get_output().stderr.clone()).unwrap();
        assert!(error.contains(part) && !artifact.exists(), "`{part}` is not in: {error}");
    };
    let weights = ["--weights", model.to_str().unwrap()];
    fails(text.replacen(" kernel @", " colonel @", 1), &weights, "expected kernel, entry, step or `}`");
    fails(text.clone(), &["--weights", weights[1], "--target", "x86-64-v3"], "was lowered for x86-64-v2");
    fails(text.clone(), &[], "--weights");
    fails(text.replace("f32[1, 320]", "f32[1, 321]"), &weights, "wrong.mlc");
}

#[test]
fn code_can_be_emitted_as_text() {
    if !mlcc_driver::compile::Backend::Llvm.is_built_in() {
        eprintln!("skipped: this mlcc has no LLVM");
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    for (target, emit, file, part) in [
        ("x86-64-v3", "asm", "m.x86-64-v3.s", "mlcc_decode_x86_64_v3"),
        ("x86-64-v3", "llvm", "m.x86-64-v3.ll", "target triple"),
        ("sm_80", "ptx", "m.sm_80.ptx", ".target sm_80"),
    ] {
        let mut build = mlcc();
        build.current_dir(&folder).arg("build").arg("-m").arg(case("rwkv4-hf").canonicalize().unwrap());
        build.args(["--target", target, "--emit", emit, "-o", "m.so"]).assert().success();
        let code = std::fs::read_to_string(folder.path().join(file)).unwrap();
        assert!(code.contains(part), "{file}");
    }
    assert_eq!(artifacts_in(folder.path()), [""; 0]);
}

/// Layers of a step take the same scratch memory, on a GPU as on a CPU.
#[test]
fn a_gpu_needs_no_more_scratch_than_a_cpu() {
    for name in ["rwkv4-hf", "rwkv7-hf", "llama3-gqa-tied"] {
        let arena = |target: &str| {
            let mut options = cases::build_options(&case(name));
            (options.target, options.chunk) = (target.into(), Some(128));
            cases::program(&options, None).0.memory.unwrap().arena_bytes()
        };
        let (gpu, cpu) = (arena("sm_80"), arena("x86-64-v3"));
        assert!(gpu > 0 && 2 * gpu <= 3 * cpu, "{name}: {gpu} bytes of scratch, {cpu} on a CPU");
    }
}

#[test]
fn run_streams_text_and_repeats_itself_by_seed() {
    let run = |extra: &[&str]| {
        text(mlcc().arg("run").arg(artifact()).args(["-p", "It was a dark and", "-n", "12"]).args(extra))
    };
    let greedy = run(&["--greedy"]);
    assert!(greedy.starts_with("It was a dark and dark-eyed man"), "{greedy}");
    assert_eq!(greedy, run(&["--temperature", "0", "-t", "1"]));
    assert_eq!(run(&["-s", "5", "--temp", "1"]), run(&["--seed", "5", "--temperature=1"]));
    assert_ne!(run(&["-s", "5", "--temp", "1"]), run(&["-s", "6", "--temp", "1"]));
    // Seeds that are drawn are up to 2^64.
    assert_eq!(run(&["--seed", "18446744073709551615"]), run(&["--seed", "18446744073709551615"]));
    let stopped = run(&["--greedy", "--stop", "eyed", "--no-echo"]);
    assert_eq!(stopped, " dark-\n");
}

#[test]
fn drafts_need_a_model_that_can_take_them_back() {
    for flags in [&["--speculate", "ngram"][..], &["--draft", "small.so"]] {
        let mut run = mlcc();
        run.arg("run").arg(artifact()).args(["-p", "It was", "-n", "4"]).args(flags);
        fails_with(&mut run, &[flags[0], "recurrent state"]);
    }
}

#[test]
fn run_tells_memory_before_and_times_after_the_text() {
    let mut run = mlcc();
    run.arg("run").arg(artifact()).args(["-p", "It was", "-n", "4", "--seed", "1", "-v"]);
    let said = String::from_utf8(run.assert().success().get_output().stderr.clone()).unwrap();
    let memory = said.find("memory: ").expect(&said);
    let closing = said.find("prompt: ").expect(&said);
    assert!(memory < closing && said[memory..closing].contains("weights, "), "{said}");
    assert!(said[memory..closing].contains(" state, "), "{said}");
    assert!(said[closing..].contains(" | loaded in ") && said[closing..].contains(" | sampling "), "{said}");
}

#[test]
fn more_threads_than_planned_for_are_told() {
    let mut run = mlcc();
    run.arg("run").arg(artifact()).args(["-p", "It", "-n", "1", "-t", "129"]);
    let output = run.assert().success().get_output().clone();
    let said = String::from_utf8(output.stderr).unwrap();
    assert!(said.contains("warning: runs with 128 threads instead of 129"), "{said}");
}

#[test]
fn run_reads_prompts_from_files_and_standard_input() {
    let folder = tempfile::tempdir().unwrap();
    let prompt = folder.path().join("prompt.txt");
    std::fs::write(&prompt, "The old man").unwrap();
    let run = || {
        let mut run = mlcc();
        run.arg("run").arg(artifact()).args(["-n", "6", "--greedy"]);
        run
    };
    let expected = text(run().args(["-p", "The old man"]));
    assert_eq!(text(run().arg("-f").arg(&prompt)), expected);
    assert_eq!(text(run().args(["-p", "-"]).write_stdin("The old man")), expected);
    assert_eq!(text(run().args(["-f", "-"]).write_stdin("The old man")), expected);
}

#[test]
fn a_saved_state_goes_on_where_it_was() {
    let folder = tempfile::tempdir().unwrap();
    let state = folder.path().join("text.state");
    let whole =
        text(mlcc().arg("run").arg(artifact()).args(["-p", "It was a dark and", "-n", "8", "--greedy"]));
    let run = |prompt: &str, n: &str| {
        let mut run = mlcc();
        run.arg("run").arg(artifact()).args(["-p", prompt, "-n", n, "--greedy"]);
        run
    };
    run("It was a", "0").arg("--save-state").arg(&state).assert().success();
    let rest = text(run(" dark and", "8").arg("--load-state").arg(&state).arg("--no-echo"));
    assert_eq!(format!("It was a dark and{rest}"), whole);
    // The state is that of the whole text, its last token included.
    let begin = text(run("It was a dark and", "3").arg("--save-state").arg(&state));
    let begin = begin.trim_end_matches('\n');
    let rest = text(run(" and", "8").arg("--load-state").arg(&state).arg("--no-echo"));
    assert_eq!(format!("{begin} and{rest}"), text(&mut run(&format!("{begin} and"), "8")));
}

#[test]
fn verify_tells_errors_and_agreement() {
    let golden = books().join("golden.json");
    let outcome = json(mlcc().arg("verify").arg(artifact()).arg("--golden").arg(&golden).arg("--json"));
    assert_eq!(outcome["ok"], true);
    assert_eq!(outcome["format"], "q8f16_1");
    assert!(outcome["worst_relative_error"].as_f64().unwrap() > 1e-5);
    assert!(outcome["tolerance"].is_null(), "what the format costs is not judged");
    assert_eq!(outcome["kernels"]["ok"], true);
    let mut strict = mlcc();
    strict.arg("verify").arg(artifact()).arg("--golden").arg(&golden).args(["--tolerance", "1e-9"]);
    let output = strict.assert().code(1).get_output().clone();
    assert!(String::from_utf8(output.stdout).unwrap().contains("WRONG"));
}

#[test]
fn eval_gives_perplexity_and_distance() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("text.txt");
    std::fs::write(&file, "She was very glad to see him, and said so. ".repeat(40)).unwrap();
    let mut eval = mlcc();
    eval.arg("eval").arg(artifact()).arg("--text").arg(&file).args([
        "--context",
        "64",
        "--stride",
        "64",
        "--json",
    ]);
    let result = json(eval.arg("--against").arg(artifact()));
    assert!(result["perplexity"].as_f64().unwrap() > 1.0);
    assert_eq!(result["tokens"].as_u64().unwrap(), 63 * result["windows"].as_u64().unwrap());
    assert_eq!((result["kl_divergence"].as_f64(), result["same_top_token"].as_f64()), (Some(0.0), Some(1.0)));
}

#[test]
fn bench_gives_rows_for_scripts() {
    let mut bench = mlcc();
    bench.arg("bench").arg(artifact()).args(["-p", "8", "-n", "4", "-d", "0,3", "-r", "2"]);
    bench.args(["--mixed", "2+6", "-t", "1", "-o", "json", "--warm-up", "0"]);
    let rows = json(&mut bench);
    let tests: Vec<&str> = rows.as_array().unwrap().iter().filter_map(|r| r["test"].as_str()).collect();
    assert_eq!(tests, ["pp8", "tg4", "tg4@d3", "mx2+6", "mx2+6@d3"]);
    for row in rows.as_array().unwrap() {
        assert_eq!(row["threads"], 1);
        let generates = row["test"].as_str().unwrap().starts_with("tg");
        let [slowest, median] = ["slowest_step_ms", "step_ms"].map(|key| row[key].as_f64());
        assert_eq!(
            slowest.is_some_and(|ms| ms > 0.0) && median.is_some_and(|ms| ms > 0.0),
            generates,
            "{row}"
        );
        assert_eq!(row["slowest_step"].as_u64().is_some_and(|number| number < 4), generates, "{row}");
        for key in ["tok_s", "tok_s_min", "tok_s_max", "bytes_per_token", "ops_per_token", "limit"] {
            assert!(row[key].as_f64().is_some_and(|x| x > 0.0), "{key}: {row}");
        }
        assert!(row["limit_kind"].is_string());
        // A share of limits that moved says nothing.
        let limit = if row["limit_kind"] == "read_bandwidth" { "read_bandwidth" } else { "compute_peak" };
        let [least, most] = [0, 1].map(|i| row[limit][i].as_f64().unwrap());
        assert!(0.0 < least && least <= most, "{row}");
        let steady = row["steady_repetitions"].as_u64().unwrap();
        assert!(steady <= 2 && (steady == 2 || most - least > 0.1 * most), "{row}");
        assert_eq!(row["fraction_of_limit"].as_f64().is_some_and(|x| x > 0.0), steady >= 1, "{row}");
    }
}

#[test]
fn bench_shows_where_the_time_goes() {
    let mut bench = mlcc();
    bench.arg("bench").arg(artifact()).args(["--kernels", "-p", "8", "-n", "2", "-r", "1", "-t", "2"]);
    bench.args(["--mixed", "2+6"]);
    let profiles = json(bench.args(["-o", "json", "--warm-up", "0"]));
    let tests: Vec<&str> = profiles.as_array().unwrap().iter().filter_map(|p| p["test"].as_str()).collect();
    assert_eq!(tests, ["pp8", "tg2", "mx2+6"]);
    for profile in profiles.as_array().unwrap() {
        let kernels = profile["kernels"].as_array().unwrap();
        let ms = |value: &Value| value["ms"].as_f64().unwrap();
        let inside = kernels.iter().map(ms).sum::<f64>() + profile["waiting_ms"].as_f64().unwrap();
        assert!(inside > 0.0 && inside <= 1.01 * ms(profile), "{profile}");
        assert!(profile["barriers"].as_u64().unwrap() > 0 && profile["launches"].as_u64().unwrap() > 0);
        let products = kernels.iter().filter(|k| k["kernel"].as_str().unwrap().starts_with("matmul"));
        for kernel in products {
            assert!(kernel["ops"].as_f64().unwrap() > 0.0 && kernel["memory_bytes"].as_f64().unwrap() > 0.0);
        }
        assert!(kernels.iter().all(|k| k["calls"].as_u64().unwrap() > 0 && k["bound_by"].is_string()));
    }
}

#[test]
fn bench_measures_beside_busy_programs() {
    let mut bench = mlcc();
    bench.arg("bench").arg(artifact()).args(["--busy", "1,2", "-p", "0", "-n", "4", "-r", "1", "-t", "2"]);
    let rows = json(bench.args(["-o", "json", "--warm-up", "0"]));
    let rows = rows.as_array().unwrap();
    let counts: Vec<u64> = rows.iter().filter_map(|r| r["busy"].as_u64()).collect();
    assert_eq!(counts, [0, 1, 2]);
    for row in rows {
        assert_eq!((row["test"].as_str(), row["threads"].as_u64()), (Some("tg4"), Some(2)));
        assert!(row["tok_s"].as_f64().is_some_and(|x| x > 0.0), "{row}");
        let [fair, of_fair] = ["fair_share", "of_fair_share"].map(|key| row[key].as_f64().unwrap());
        assert!(0.0 < fair && fair <= 1.0, "{row}");
        let alone = rows[0]["tok_s"].as_f64().unwrap();
        let expected = row["tok_s"].as_f64().unwrap() / (alone * fair);
        assert!((of_fair - expected).abs() < 1e-9 * expected, "{row}");
    }
}

#[test]
fn bench_measures_the_first_token() {
    let mut bench = mlcc();
    bench.arg("bench").arg(artifact()).args(["--start", "-r", "1", "-t", "1", "-o", "json"]);
    let report = json(&mut bench);
    assert!(report["milliseconds"].as_f64().is_some_and(|x| x > 0.0), "{report}");
    assert!(report["weights"].as_u64().is_some_and(|x| x > 0), "{report}");
}

#[test]
fn inspect_shows_machine_code_or_says_what_it_needs() {
    let out = |kernel: &str| mlcc().arg("inspect").arg(artifact()).args(["--asm", kernel]).output().unwrap();
    let found = out("all");
    if !found.status.success() {
        let message = String::from_utf8_lossy(&found.stderr).into_owned();
        assert!(message.contains("disassembler"), "{message}");
        return;
    }
    let text = String::from_utf8(found.stdout).unwrap();
    assert!(text.contains("<gather") && text.contains("ret"), "{text}");
    let missing = out("gathr");
    assert_eq!(missing.status.code(), Some(2));
    assert!(String::from_utf8_lossy(&missing.stderr).contains("did you mean `gather`?"));
}

#[test]
fn graphs_are_drawn_with_what_is_fused() {
    let folder = tempfile::tempdir().unwrap();
    let (drawing, other) = (folder.path().join("graph.dot"), folder.path().join("graph.pdf"));
    mlcc().arg("inspect").arg(artifact()).arg("--graph").arg(&drawing).assert().success();
    let text = std::fs::read_to_string(&drawing).unwrap();
    assert!(text.starts_with("digraph ") && text.ends_with("}\n"), "{text}");
    for part in ["label=\"prefill_logits\"", "shape=cylinder", "\\nmatmul", "\\nweights ", "output 0"] {
        assert!(text.contains(part), "{part} is not in {text}");
    }
    let mut inspect = mlcc();
    let message = failure(inspect.arg("inspect").arg(artifact()).arg("--graph").arg(&other), 2);
    assert!(message.contains("a .dot or .svg file"), "{message}");
    assert!(!other.exists());
    // Graphviz makes SVG of it, if it is there.
    let picture = folder.path().join("graph.svg");
    let mut inspect = mlcc();
    inspect.arg("inspect").arg(artifact()).arg("--graph").arg(&picture).env("PATH", folder.path());
    fails_with(&mut inspect, &["install graphviz, or name a .dot file"]);
    assert!(!picture.exists());
    let mut inspect = mlcc();
    let out = inspect.arg("inspect").arg(artifact()).arg("--graph").arg(&picture).output().unwrap();
    match out.status.success() {
        true => assert!(std::fs::read_to_string(&picture).unwrap().contains("</svg>")),
        false => assert!(String::from_utf8_lossy(&out.stderr).contains("install graphviz")),
    }
}

#[test]
fn modules_are_drawn_at_any_pass() {
    let folder = tempfile::tempdir().unwrap();
    let (module, drawing) = (folder.path().join("m.mlc"), folder.path().join("m.gv"));
    let text = "module @m {\n  fn @f(%0: f32[n, 4]) -> (f32[n, 4]) entry {\n    %1 = exp %0 : f32[n, 4]\n    \
                %2 = add %1, %0 : f32[n, 4]\n    ret %2\n  }\n}\n";
    std::fs::write(&module, text).unwrap();
    let drawn = |passes: &[&str]| {
        let mut opt = mlcc();
        opt.arg("opt").arg(&module).args(passes).arg("--dot").arg(&drawing).assert().success();
        std::fs::read_to_string(&drawing).unwrap()
    };
    let lines =
        ["f0n0 [label=\"exp\"];", "f0n0 -> f0n1 [label=\"f32[n, 4]\"];", "f0in0 -> f0n0", "f0n1 -> f0out0"];
    let plain = drawn(&[]);
    assert!(lines.iter().all(|line| plain.contains(line)), "{plain}");
    let fused = drawn(&["--passes", "fuse"]);
    assert!(fused.contains("\\nexp\\nadd\"") && !fused.contains("label=\"add\""), "{fused}");
}

#[test]
fn models_are_interpreted_against_references() {
    let golden = case("rwkv4-hf").join("golden.json");
    for target in [&[][..], &["--target", "x86-64-v3"]] {
        let mut interp = mlcc();
        interp.arg("interp").arg("-m").arg(case("rwkv4-hf")).arg("--golden").arg(&golden);
        let outcome = json(interp.args(["--prompts", "1", "--json"]).args(target));
        assert_eq!(outcome["ok"], true);
    }
}

#[test]
fn tables_of_what_there_is() {
    let names = |command: &str| -> Vec<String> {
        let list = json(mlcc().args([command, "--json"]));
        let rows = list.as_array().or(list["presets"].as_array()).unwrap().clone();
        rows.iter().filter_map(|r| Some(r["name"].as_str()?.to_string())).collect()
    };
    assert!(names("targets").iter().any(|n| n == "sm_80"));
    assert!(names("models").iter().any(|n| n == "rwkv-3b"));
    assert!(names("quants").iter().any(|n| n == "q4i8"));
    assert!(names("doctor").iter().any(|n| n == "linker"));
    assert!(text(mlcc().args(["opt", "--list"])).contains("quantize"));
    for shell in ["bash", "zsh", "fish", "powershell"] {
        assert!(text(mlcc().args(["completions", shell])).contains("mlcc"), "{shell}");
    }
    assert!(text(mlcc().arg("--version")).contains("back ends: "));
}

/// Builds that take code from earlier ones, make it anew, or do not keep it write the same file; `doctor`
/// shows the folder.
#[test]
fn code_of_earlier_builds() {
    let folder = tempfile::tempdir().unwrap();
    let cache = folder.path().join("cache");
    let build = |more: &[&str]| {
        let path = folder.path().join("model.so");
        let mut build = mlcc();
        build
            .env("MLCC_CACHE_DIR", &cache)
            .args(["build", "--json", "--target", "cpu", "--quant", "q8f16_1", "-m"]);
        let report = json(build.arg(case("rwkv4-hf")).args(more).arg("-o").arg(&path));
        (std::fs::read(&path).unwrap(), report["objects"].clone())
    };
    let (alone, objects) = build(&["--no-cache"]);
    assert!(!cache.exists() && objects["from_cache"] == 0);
    let (first, second) = (build(&[]), build(&[]));
    assert_eq!((&first.1["from_cache"], &second.1["from_cache"]), (&0.into(), &objects["linked"]));
    assert!(alone == first.0 && alone == second.0);
    let doctor = |arg: &str| {
        let mut doctor = mlcc();
        doctor.env("MLCC_CACHE_DIR", &cache).args(["doctor", arg]);
        doctor
    };
    let of_cache = || {
        let checks = json(&mut doctor("--json"));
        let check = checks.as_array().unwrap().iter().find(|c| c["name"] == "code cache").unwrap().clone();
        check["found"].as_str().unwrap().to_string()
    };
    let count = format!(", {} objects, ", objects["linked"]);
    assert!(of_cache().contains(&count) && of_cache().contains(cache.to_str().unwrap()), "{}", of_cache());
    doctor("--clear-cache").assert().success();
    assert!(of_cache().contains(", 0 objects, "), "{}", of_cache());
    assert_eq!(build(&[]).1["from_cache"], 0);
}

/// Devices without an end and files with the wrong name are errors of one kind for every reader. A file with
/// a hole is large without taking room.
#[test]
#[cfg(unix)]
fn texts_have_limits() {
    let zero = "/dev/zero";
    let so = artifact().to_str().unwrap();
    let folder = copy_of(&books());
    let path = |name: &str| folder.path().join(name).to_str().unwrap().to_string();
    let model = folder.path().to_str().unwrap().to_string();
    let too_large = |args: &[&str], parts: &[&str]| {
        let mut command = mlcc();
        fails_with(command.args(args), &[&["has more than", "the maximum for"], parts].concat());
    };
    too_large(&["run", so, "-n", "1", "-f", zero], &[zero, "a prompt", "64 MiB"]);
    too_large(&["eval", so, "--text", zero], &[zero, "256 MiB"]);
    too_large(&["verify", so, "--golden", zero], &[zero, "512 MiB"]);
    too_large(&["chat", so, "--template", zero], &[zero, "a chat template"]);
    too_large(&["opt", zero], &[zero, "a module"]);
    too_large(
        &["build", "-m", &model, "--quant-policy", zero, "-o", &path("x.so")],
        &[zero, "a quantization policy"],
    );
    let zeros = std::fs::File::open(zero).unwrap();
    let output = program::program().args(["run", so, "-n", "1", "-p", "-"]).stdin(zeros).output().unwrap();
    let message = String::from_utf8(output.stderr).unwrap();
    assert!(
        output.status.code() == Some(1) && message.contains("standard input: it has more than"),
        "{message}"
    );

    let hole = |name: &str| std::fs::File::create(path(name)).unwrap().set_len(1 << 40).unwrap();
    for (name, what) in
        [("tokenizer.json", "a tokenizer"), ("config.json", "a JSON or template file of a model")]
    {
        let before = std::fs::read(path(name)).unwrap();
        hole(name);
        too_large(&["build", "-m", &model, "-o", &path("x.so")], &[name, what]);
        std::fs::write(path(name), before).unwrap();
    }
    // A model that a program finds by itself is no pipe, which it would wait for.
    std::fs::remove_file(path("config.json")).unwrap();
    assert!(std::process::Command::new("mkfifo").arg(path("config.json")).status().unwrap().success());
    let mut build = mlcc();
    build.args(["build", "-m", &model, "-o", &path("x.so")]).timeout(std::time::Duration::from_secs(120));
    fails_with(&mut build, &["config.json"]);
}
