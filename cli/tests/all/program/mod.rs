//! The program as users start it, for tests of the command line.

use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use assert_cmd::Command;
use serde_json::Value;
use tempfile::TempDir;

use crate::cases;

pub fn workspace() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..")
}

/// The trained model with its tokenizer.
pub fn books() -> PathBuf {
    workspace().join("assets/rwkv4-tiny-books")
}

/// A tiny random model without a tokenizer.
pub fn case(name: &str) -> PathBuf {
    workspace().join("tests/goldens").join(name)
}

/// A command as from a user's shell, but without the environment's variables for mlcc and Hugging Face, and
/// without code of earlier runs.
pub fn mlcc() -> Command {
    let mut command = Command::new(assert_cmd::cargo::cargo_bin!("mlcc"));
    for (name, _) in std::env::vars_os() {
        let text = name.to_string_lossy();
        if text.starts_with("MLCC_") || text.starts_with("HF_") {
            command.env_remove(&name);
        }
    }
    command
        .env("HF_HOME", "no-such-cache")
        .env("HF_HUB_OFFLINE", "1")
        .env("MLCC_CACHE_DIR", cases::objects::folder());
    command
}

/// `mlcc` in a shell's hands: for signals and pipes.
pub fn program() -> std::process::Command {
    let mut command = std::process::Command::new(assert_cmd::cargo::cargo_bin!("mlcc"));
    command.env("HF_HOME", "no-such-cache").env("HF_HUB_OFFLINE", "1").env("MLCC_CACHE_DIR", "");
    command
}

/// An artifact of [`books`], built once.
pub fn artifact() -> &'static Path {
    static BUILT: OnceLock<PathBuf> = OnceLock::new();
    BUILT.get_or_init(|| {
        let name = format!("books-{}.so", std::process::id());
        let path = Path::new(env!("CARGO_TARGET_TMPDIR")).join(name);
        let mut build = mlcc();
        build.arg("build").arg("-m").arg(books()).args(["--quant", "q8f16_1", "-o"]).arg(&path);
        build.assert().success();
        path
    })
}

/// Runs, and gives standard output as JSON.
pub fn json(command: &mut Command) -> Value {
    let output = command.assert().success().get_output().stdout.clone();
    serde_json::from_slice(&output).unwrap_or_else(|e| panic!("{e}: {}", String::from_utf8_lossy(&output)))
}

/// Runs, and gives standard output.
pub fn text(command: &mut Command) -> String {
    String::from_utf8(command.assert().success().get_output().stdout.clone()).unwrap()
}

/// Runs something that must fail with `code`: one message, nothing on standard output, no panic.
pub fn failure(command: &mut Command, code: i32) -> String {
    let output = command.assert().code(code).get_output().clone();
    let message = String::from_utf8(output.stderr).unwrap();
    assert_eq!(String::from_utf8_lossy(&output.stdout), "", "{message}");
    assert!(message.contains("error: "), "{message}");
    for bad in ["panicked", "internal error", "backtrace", "RUST_"] {
        assert!(!message.contains(bad), "{message}");
    }
    message
}

/// [`failure`] with exit code 1, holding all of `parts`.
#[track_caller]
pub fn fails_with(command: &mut Command, parts: &[&str]) {
    let message = failure(command, 1);
    for part in parts {
        assert!(message.contains(part), "`{part}` is not in: {message}");
    }
}

/// A copy of a folder's files that a test may damage.
pub fn copy_of(folder: &Path) -> TempDir {
    let copy = tempfile::tempdir().unwrap();
    for entry in std::fs::read_dir(folder).unwrap() {
        let entry = entry.unwrap();
        std::fs::copy(entry.path(), copy.path().join(entry.file_name())).unwrap();
    }
    copy
}

/// Files that a build has left in a folder, besides those of `copy_of`.
pub fn artifacts_in(folder: &Path) -> Vec<String> {
    let names =
        std::fs::read_dir(folder).unwrap().map(|e| e.unwrap().file_name().to_string_lossy().into_owned());
    let mut names: Vec<String> = names.filter(|n| n.contains(".so") || n.contains("partial")).collect();
    names.sort();
    names
}
