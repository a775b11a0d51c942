//! The own loader and the system's map the same code: texts are equal, and a profiler gets names where it
//! asks for them.

use std::process::Stdio;

use crate::program::{artifact, fails_with, mlcc, program, text};

fn story(loader: &str) -> String {
    let mut run = mlcc();
    run.env("MLCC_LOADER", loader).arg("run").arg(artifact());
    text(run.args(["-p", "It was", "-n", "24", "--temp", "0"]))
}

#[test]
fn both_loaders_give_the_same_text() {
    let own = story("own");
    assert!(own.len() > 20, "{own}");
    assert_eq!(own, story("system"));
    assert_eq!(own, story(""), "an empty variable is none");
}

#[test]
fn an_unknown_loader_is_an_error() {
    let mut run = mlcc();
    run.env("MLCC_LOADER", "dlopen").arg("run").arg(artifact()).args(["-p", "It was", "-n", "1"]);
    fails_with(&mut run, &["MLCC_LOADER is `dlopen`", "`own` or `system`"]);
}

#[cfg(target_os = "linux")]
#[test]
fn profilers_are_told_the_names_of_functions() {
    let mut run = program();
    run.env("MLCC_PERF_MAP", "1").env("MLCC_LOADER", "own").arg("run").arg(artifact());
    run.args(["-p", "It was", "-n", "1"]).stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
    let mut child = run.spawn().unwrap();
    let map = format!("/tmp/perf-{}.map", child.id());
    assert!(child.wait().unwrap().success());
    let lines = std::fs::read_to_string(&map).unwrap();
    std::fs::remove_file(&map).unwrap();
    let prefill =
        lines.lines().find(|line| line.contains(" mlcc_prefill_")).expect("the entry point has a line");
    let numbers: Vec<u64> =
        prefill.split(' ').take(2).map(|word| u64::from_str_radix(word, 16).unwrap()).collect();
    assert!(numbers[0] > 0xffff && numbers[1] > 0, "{prefill}");
}
