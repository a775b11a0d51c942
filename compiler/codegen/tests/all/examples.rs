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

/// Compiles the program that loads a model by `mlcc_load.h`.
fn compile_loader(folder: &Path) -> PathBuf {
    let program = folder.join("load");
    let done = Command::new("cc")
        .args(["-O1", "-std=c11", "-Wall", "-Wextra", "-Werror", "-I"])
        .arg(examples().join("../include"))
        .arg(examples().join("load.c"))
        .arg("-o")
        .arg(&program)
        .arg("-lpthread")
        .output()
        .unwrap();
    assert!(done.status.success(), "{}", String::from_utf8_lossy(&done.stderr));
    program
}

/// A model from its own file, and from the middle of another one, by one thread and by several.
#[test]
fn c_loader_example() {
    if !toy::can_compile() {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let (program, path) = (compile_loader(folder.path()), toy::artifact(folder.path(), &[]));
    let model = std::fs::read(&path).unwrap();
    let container = folder.path().join("app.bin");
    let at = 4096 * 3;
    std::fs::write(&container, [&vec![7; at][..], &model, &[7; 100]].concat()).unwrap();
    let places = [(&path, 0, 0), (&path, 0, model.len()), (&container, at, model.len())];
    for (file, offset, length) in places {
        for threads in ["1", "2", "3"] {
            let ids = PROMPT.iter().map(ToString::to_string);
            let mut load = Command::new(&program);
            load.arg(file).args([offset.to_string(), length.to_string(), threads.into(), COUNT.to_string()]);
            let out = load.args(ids).output().unwrap();
            assert!(out.status.success(), "{}", String::from_utf8_lossy(&out.stderr));
            let text = String::from_utf8_lossy(&out.stdout);
            let found: Vec<i32> = text.split_whitespace().map(|id| id.parse().unwrap()).collect();
            assert_eq!(found, expected(), "{offset} {length} {threads}");
        }
    }
}

#[test]
fn c_loader_names_what_is_wrong() {
    if !toy::can_compile() {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let program = compile_loader(folder.path());
    let load = |file: &Path, offset: &str, length: &str| {
        let out = Command::new(&program).arg(file).args([offset, length, "1", "2", "1"]).output().unwrap();
        assert_eq!(out.status.code(), Some(1), "{:?}", out.status);
        String::from_utf8_lossy(&out.stderr).into_owned()
    };
    let path = toy::artifact(folder.path(), &[]);
    let model = std::fs::read(&path).unwrap();
    let changed = folder.path().join("changed.so");
    for bytes in (0..model.len().min(8192)).step_by(256) {
        std::fs::write(&changed, &model[..bytes]).unwrap();
        let error = load(&changed, "0", "0");
        assert!(error.starts_with("load: ") && error.lines().count() == 1, "{bytes} bytes: {error}");
    }
    let with = |at: usize, value: u8| {
        let mut bytes = model.clone();
        bytes[at] = value;
        std::fs::write(&changed, bytes).unwrap();
        load(&changed, "0", "0")
    };
    assert!(with(0, 0).contains("no ELF"));
    assert!(with(4, 1).contains("64-bit"));
    assert!(with(18, 40).contains("another kind of CPU"));
    assert!(with(56, 0).contains("program headers"));
    let old = toy::artifact(folder.path(), &["-DTOY_ABI=99"]);
    assert!(load(&old, "0", "0").contains("another ABI version"));
    assert!(load(&path, "99999999", "0").contains("outside of the file"));
    assert!(load(&path, "0", "99999999999").contains("outside of the file"));
    assert!(load(&path, "4096", "0").contains("no ELF"));
    assert!(load(folder.path(), "0", "0").contains("not that of a file"));
    assert!(load(&folder.path().join("none"), "0", "0").contains("cannot be opened"));
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
