//! Ranks that are processes, where the disk of one of them is full: here a limit of the size of files, which
//! needs no file system of its own.

use std::io::Read;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use serde_json::json;

use crate::program::{books, program};
use crate::rank_processes::{LaunchedGroup, plugin, stderr, stdout};
use crate::rank_serving::{ready, signal, split};

/// The program, whose files have at most this many blocks of 512 or 1024 bytes.
fn limited(blocks: Option<usize>, arguments: &[&str]) -> Command {
    let own = program();
    let mut command = Command::new("sh");
    let limit = blocks.map_or(String::new(), |blocks| format!("ulimit -f {blocks}; "));
    command.arg("-c").arg(format!("{limit}exec \"$0\" \"$@\"")).arg(own.get_program()).args(arguments);
    command.envs(own.get_envs().filter_map(|(name, value)| Some((name, value?))));
    command
}

/// Two processes with this command line. Rank `full` has room for a block.
fn start(plugin: &Path, arguments: &[&str], full: Option<usize>) -> LaunchedGroup {
    let commands = (0..2).map(|rank| limited((full == Some(rank)).then_some(1), arguments));
    LaunchedGroup::start_commands(plugin, commands.collect(), None)
}

fn run(plugin: &Path, arguments: &[&str], full: Option<usize>) -> Vec<Output> {
    start(plugin, arguments, full).wait().0
}

fn names(folder: &Path) -> Vec<String> {
    let entries = std::fs::read_dir(folder).unwrap();
    let mut names: Vec<String> =
        entries.map(|entry| entry.unwrap().file_name().to_string_lossy().into_owned()).collect();
    names.sort();
    names
}

/// States of all ranks are written by the first one: as a whole, or not at all, and then all of them end.
#[test]
fn a_state_that_does_not_fit_ends_all() {
    let folder = tempfile::tempdir().unwrap();
    let Some(plugin) = plugin(folder.path(), 1) else { return };
    let states = folder.path().join("states");
    std::fs::create_dir(&states).unwrap();
    let state: PathBuf = states.join("state.bin");
    let file = state.to_str().unwrap();
    let model = split().to_str().unwrap();
    let save = |full| {
        run(
            &plugin,
            &["run", model, "-q", "-p", "The sea", "-n", "3", "-t", "1", "--greedy", "--save-state", file],
            full,
        )
    };
    let refused = |outputs: &[Output]| {
        let told = stderr(&outputs[0]);
        assert_eq!([0, 1].map(|rank: usize| outputs[rank].status.code()), [Some(1), Some(0)], "{told}");
        assert!(told.contains("state.bin") && told.contains("File too large"), "{told}");
    };
    refused(&save(Some(0)));
    assert_eq!(names(&states), [""; 0]);
    // A rank that writes nothing needs no room.
    for full in [None, Some(1)] {
        for output in save(full) {
            assert_eq!(output.status.code(), Some(0), "{full:?}: {}", stderr(&output));
        }
    }
    // The state that there was stays.
    let saved = std::fs::read(&state).unwrap();
    assert!(saved.len() > 1024);
    refused(&save(Some(0)));
    assert_eq!(names(&states), ["state.bin"]);
    assert!(std::fs::read(&state).unwrap() == saved);
    let outputs =
        run(&plugin, &["run", model, "-q", "-p", " was", "-n", "3", "-t", "1", "--load-state", file], None);
    assert!(
        outputs.iter().all(|output| output.status.success()),
        "{}{}",
        stdout(&outputs[0]),
        stderr(&outputs[0])
    );
}

/// Prompts that a server keeps are an extra: it serves without them, and leaves no half of one.
#[test]
fn a_server_whose_disk_is_full_serves() {
    let folder = tempfile::tempdir().unwrap();
    let Some(plugin) = plugin(folder.path(), 1) else { return };
    for full in [0, 1] {
        let states = folder.path().join(format!("states-{full}"));
        let model = split().to_str().unwrap();
        let flags = ["--port", "0", "--json", "-t", "1", "--sequences", "2"];
        let cache = ["--cache-dir", states.to_str().unwrap()];
        let mut group = start(&plugin, &[&["serve", model][..], &flags, &cache].concat(), Some(full));
        let client = ready(&mut group);
        // Long enough to be worth a file.
        let prompt = "It was a dark and stormy night; the rain fell in torrents. ".repeat(4);
        let body = json!({"prompt": prompt, "max_tokens": 8, "ignore_eos": true}).to_string();
        let mut text = String::new();
        client.open("POST", "/v1/completions", "", &body).read_to_string(&mut text).unwrap();
        assert!(text.contains("\"finish_reason\":\"length\""), "{text}");
        signal(&group, "-TERM", &[1, 0]);
        let (outputs, _) = group.wait();
        for output in &outputs {
            assert_eq!(output.status.code(), Some(0), "{}", stderr(output));
        }
        let told = stderr(&outputs[0]);
        match full {
            // Files are the first rank's business.
            0 => {
                assert!(told.contains("File too large") && told.contains("the state is not kept"), "{told}");
                assert_eq!(names(&states), [""; 0]);
            }
            _ => assert!(names(&states).len() >= 2 && !told.contains("not kept"), "{told}"),
        }
    }
}

/// An artifact of all ranks that does not fit: nothing is left.
#[test]
fn an_artifact_that_does_not_fit_leaves_nothing() {
    let folder = tempfile::tempdir().unwrap();
    let artifact = folder.path().join("split.so");
    let (model, file) = (books(), artifact.to_str().unwrap());
    let flags = ["--quant", "f32", "--tensor-parallel", "2", "--no-report", "-o", file];
    let arguments = [&["build", "-m", model.to_str().unwrap()][..], &flags].concat();
    let output = limited(Some(4096), &arguments).output().unwrap();
    let told = stderr(&output);
    assert_eq!(output.status.code(), Some(1), "{told}");
    assert!(told.contains("split.so") && told.contains("ulimit -f"), "{told}");
    assert_eq!(names(folder.path()), [""; 0]);
}
