//! Artifacts in programs that have only our header: the examples in C and Python with models that need more
//! than single tokens in order, and the guarantees of entry points.
#![cfg(unix)]

use std::path::{Path, PathBuf};
use std::process::Command;

use crate::cases::{argmax, backends, golden, ids, load};
use crate::program::{case, mlcc, workspace};
use mlcc_driver::compile::Backend;

/// A C program of ours; `None`, with a printed reason, where there is no C compiler.
fn compiled(source: &Path, folder: &Path) -> Option<PathBuf> {
    let program = folder.join(source.file_stem().unwrap());
    let mut cc = Command::new("cc");
    cc.args(["-O1", "-std=c11", "-Wall", "-Wextra", "-Werror", "-I"])
        .arg(workspace().join("runtime/core/include"));
    let Ok(done) = cc.arg(source).arg("-o").arg(&program).arg("-ldl").output() else {
        println!("skipped: no C compiler (`cc`) on this machine");
        return None;
    };
    assert!(done.status.success(), "{}", String::from_utf8_lossy(&done.stderr));
    Some(program)
}

fn built(model: &Path, folder: &Path, backend: Backend, flags: &[&str]) -> PathBuf {
    let artifact = folder.join("model.so");
    let mut build = mlcc();
    // The references are computed in f32.
    build.arg("build").arg("-m").arg(model).args(["--quant", "f32", "--backend", backend.name()]).args(flags);
    build.arg("-o").arg(&artifact);
    build.assert().success();
    artifact
}

fn stdout(command: &mut Command) -> String {
    let out = command.output().unwrap();
    assert!(out.status.success(), "{command:?}: {}", String::from_utf8_lossy(&out.stderr));
    String::from_utf8(out.stdout).unwrap().trim().to_owned()
}

/// Models that take a prompt only whole (ChatGLM-6B), that have to know how long it will be (dynamic and
/// LongRoPE scaling), and one that does not care.
#[test]
fn examples_continue_as_the_reference_does() {
    let folder = tempfile::tempdir().unwrap();
    let examples = workspace().join("runtime/core/examples");
    let Some(c) = compiled(&examples.join("generate.c"), folder.path()) else { return };
    let Some(mixed) = compiled(&examples.join("step.c"), folder.path()) else { return };
    let python = Command::new("python3").arg("--version").output().is_ok_and(|out| out.status.success());
    let pieces = ["--chunk", "16"];
    let cases = [
        ("chatglm-6b-tiny", &[][..]),
        ("phi3-longrope", &pieces),
        ("llama-dynamic", &pieces),
        ("llama3-gqa-tied", &pieces),
        ("rwkv4-hf", &pieces),
    ];
    let backend = backends().next().expect("a back end is built in");
    for (name, flags) in cases {
        let artifact = built(&case(name), folder.path(), backend, flags);
        for prompt in &golden(name).prompts {
            let count = prompt.greedy.len().min(12);
            let tokens: Vec<String> = ids(prompt).iter().map(ToString::to_string).collect();
            let expected: Vec<String> = prompt.greedy[..count].iter().map(ToString::to_string).collect();
            let count = count.to_string();
            let what = format!("{name}, a prompt of {}", tokens.len());
            assert_eq!(
                stdout(Command::new(&c).arg(&artifact).arg(&count).args(&tokens)),
                expected.join(" "),
                "{what}"
            );
            if python {
                let mut script = Command::new("python3");
                script.arg(examples.join("generate.py")).arg(&artifact).arg(&count).args(&tokens);
                assert_eq!(stdout(&mut script), expected.join(" "), "{what}");
            }
        }
        // Two of the prompts together, the longest one in pieces beside the tokens of the other.
        if flags.is_empty() {
            continue;
        }
        let mut prompts = golden(name).prompts;
        prompts.sort_by_key(|prompt| prompt.input_ids.len());
        let [first, .., second] = &prompts[..] else { panic!("{name} has one prompt") };
        let count = first.greedy.len().min(second.greedy.len()).min(8);
        let expected = [first, second].map(|prompt| words(&prompt.greedy[..count]).join(" ")).join("\n");
        let mut args = vec![artifact.display().to_string(), count.to_string()];
        args.extend([words(&ids(first)), vec!["--".into()], words(&ids(second))].concat());
        assert_eq!(stdout(Command::new(&mixed).args(&args)), expected, "{name}, two texts");
        if python {
            let mut script = Command::new("python3");
            assert_eq!(
                stdout(script.arg(examples.join("step.py")).args(&args)),
                expected,
                "{name}, two texts"
            );
        }
    }
}

/// Texts of several pages, with caches of every type: the examples in C and Python choose what a session of
/// ours does. The one text is read in pieces beside the next tokens of the other.
#[test]
fn mixed_steps_of_examples_go_over_pages() {
    let folder = tempfile::tempdir().unwrap();
    let examples = workspace().join("runtime/core/examples");
    let Some(c) = compiled(&examples.join("step.c"), folder.path()) else { return };
    let python = Command::new("python3").arg("--version").output().is_ok_and(|out| out.status.success());
    let texts = [60, 150].map(|n| (0..n).map(|i| 3 + (i * i + i / 5) % 300).collect::<Vec<i32>>());
    let backend = backends().last().expect("a back end is built in");
    for cache in ["f32", "f16", "i8"] {
        let flags = ["--chunk", "16", "-c", "256", "--kv-cache", cache];
        let artifact = built(&case("llama3-gqa-tied"), folder.path(), backend, &flags);
        let model = load(&artifact, None, 1);
        let page = model.plan().page_bytes;
        assert!(page > 0, "its caches lie in pages");
        let greedy = |text: &Vec<i32>| {
            let mut session = model.session().unwrap();
            let mut next = argmax(session.prefill(text).unwrap());
            let mut chosen = vec![next];
            for _ in 1..12 {
                next = argmax(session.decode(next as i32).unwrap());
                chosen.push(next);
            }
            words(&chosen).join(" ")
        };
        let expected = texts.each_ref().map(greedy).join("\n");
        let mut args = vec![artifact.display().to_string(), "12".to_string()];
        args.extend([words(&texts[0]), vec!["--".into()], words(&texts[1])].concat());
        assert_eq!(stdout(Command::new(&c).args(&args)), expected, "step.c, {cache}");
        if python {
            let mut script = Command::new("python3");
            let found = stdout(script.arg(examples.join("step.py")).args(&args));
            assert_eq!(found, expected, "step.py, {cache}");
        }
    }
}

fn words<T: ToString>(ids: &[T]) -> Vec<String> {
    ids.iter().map(ToString::to_string).collect()
}

/// Nothing depends on what memory held before, for caches of every kind, also with fewer keys than attention
/// sinks; several rows of softmax; a negative length is refused and writes nothing.
#[test]
fn entry_points_rely_on_nothing() {
    let folder = tempfile::tempdir().unwrap();
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/all/embedding/entries.c");
    let Some(program) = compiled(&source, folder.path()) else { return };
    let sinks = ["-c", "64", "--sliding-window", "6", "--attention-sinks", "4"];
    let tokens: Vec<String> = (0..20).map(|i| (3 + i * 5).to_string()).collect();
    for backend in backends() {
        for (name, flags) in [
            ("llama3-gqa-tied", [&sinks[..], &["--kv-cache", "f32"]].concat()),
            ("llama3-gqa-tied", [&sinks[..], &["--kv-cache", "bf16"]].concat()),
            ("llama3-gqa-tied", [&sinks[..], &["--kv-cache", "i8"]].concat()),
            ("gpt2", vec!["--kv-cache", "f16"]),
            ("rwkv4-hf", vec![]),
        ] {
            let artifact = built(&case(name), folder.path(), backend, &flags);
            let run = |fill: &str| stdout(Command::new(&program).arg(&artifact).arg(fill).args(&tokens));
            // Zeros, and bytes that make every float type NaN.
            let (zeros, nans) = (run("0"), run("255"));
            assert!(!zeros.is_empty());
            assert!(
                zeros == nans,
                "{name} {flags:?} {backend:?}: the logits depend on what memory held before"
            );
        }
    }
}
