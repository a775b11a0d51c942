//! Ranks that are processes, where the disk of one of them is full: here a limit of the size of files, which needs no file system of its own.

use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use crate::program::program;
use crate::rank_processes::{Group, plugin, stderr, stdout};
use crate::rank_serving::split;

/// Two processes with this command line. Files of rank `full` have at most a block of 512 or 1024 bytes.
fn run(plugin: &Path, arguments: &[&str], full: Option<usize>) -> Vec<Output> {
    let command = |rank| {
        let own = program();
        let mut command = Command::new("sh");
        let limit = if full == Some(rank) { "ulimit -f 1; " } else { "" };
        command.arg("-c").arg(format!("{limit}exec \"$0\" \"$@\"")).arg(own.get_program()).args(arguments);
        command.envs(own.get_envs().filter_map(|(name, value)| Some((name, value?))));
        command
    };
    Group::start_commands(plugin, (0..2).map(command).collect(), None).wait().0
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
