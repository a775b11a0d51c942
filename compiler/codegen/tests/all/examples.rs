//! The three example programs of the runtime (Rust, C through the header alone, Python ctypes) on the toy
//! artifact.

#[allow(dead_code)]
#[path = "../../../../runtime/core/examples/generate.rs"]
mod generate;

use crate::toy;
use std::path::{Path, PathBuf};
use std::process::Command;

/// Longer than the chunk of the toys.
const PROMPT: [i32; 5] = [3, 1, 4, 0, 2];
const COUNT: usize = 9;

/// Greedy continuation by the reference.
fn expected() -> Vec<i32> {
    let mut ids = PROMPT.to_vec();
    for _ in 0..COUNT {
        let logits = toy::reference(&ids).pop().unwrap();
        let best = (1..logits.len()).fold(0, |best, i| if logits[i] > logits[best] { i } else { best });
        ids.push(best as i32);
    }
    ids.split_off(PROMPT.len())
}

fn examples() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../runtime/core/examples")
}

/// Runs a program on the toy and reads the ids it prints.
fn run(program: &mut Command, artifact: &Path) -> Vec<i32> {
    let ids = PROMPT.iter().map(ToString::to_string);
    let out = program.arg(artifact).arg(COUNT.to_string()).args(ids).output().unwrap();
    assert!(out.status.success(), "{}", String::from_utf8_lossy(&out.stderr));
    String::from_utf8_lossy(&out.stdout).split_whitespace().map(|id| id.parse().unwrap()).collect()
}

#[test]
fn rust_example() {
    if toy::can_compile() {
        let folder = tempfile::tempdir().unwrap();
        let path = toy::artifact(folder.path(), &[]);
        assert_eq!(generate::generate(path.to_str().unwrap(), COUNT, &PROMPT).unwrap(), expected());
    }
}

#[test]
fn c_example() {
    if toy::can_compile() {
        let folder = tempfile::tempdir().unwrap();
        let path = toy::artifact(folder.path(), &["-DTOY_FEATURES=(1ULL<<62)"]);
        let program = folder.path().join("generate");
        let done = Command::new("cc")
            .args(["-O1", "-std=c11", "-Wall", "-Wextra", "-Werror", "-I"])
            .arg(examples().join("../include"))
            .arg(examples().join("generate.c"))
            .arg("-o")
            .arg(&program)
            .arg("-ldl")
            .output()
            .unwrap();
        assert!(done.status.success(), "{}", String::from_utf8_lossy(&done.stderr));
        assert_eq!(run(&mut Command::new(program), &path), expected());
    }
}

#[test]
fn python_example() {
    if Command::new("python3").arg("--version").output().map_or(true, |out| !out.status.success()) {
        eprintln!("skipped: no python3 on this machine");
        return;
    }
    if toy::can_compile() {
        let folder = tempfile::tempdir().unwrap();
        let path = toy::artifact(folder.path(), &["-DTOY_FEATURES=(1ULL<<62)"]);
        assert_eq!(run(Command::new("python3").arg(examples().join("generate.py")), &path), expected());
    }
}

/// The header's view of this CPU equals the runtime's.
#[test]
fn header_and_runtime_see_the_same_cpu() {
    if !toy::can_compile() {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let (source, program) = (folder.path().join("f.c"), folder.path().join("f"));
    let text = "#include <stdio.h>\n#include \"mlcc.h\"\n\
                int main(void) { printf(\"%llu\", (unsigned long long)mlcc_host_features()); return 0; }";
    std::fs::write(&source, text).unwrap();
    let mut cc = Command::new("cc");
    let done = cc
        .arg("-I")
        .arg(examples().join("../include"))
        .arg(&source)
        .arg("-o")
        .arg(&program)
        .output()
        .unwrap();
    assert!(done.status.success(), "{}", String::from_utf8_lossy(&done.stderr));
    let found: u64 =
        String::from_utf8_lossy(&Command::new(program).output().unwrap().stdout).parse().unwrap();
    let host = mlcc_runtime::features::host();
    let names = mlcc_runtime::features::names;
    assert_eq!(found, host, "header: {}; runtime: {}", names(found), names(host));
}
