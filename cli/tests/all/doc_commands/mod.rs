//! Every command of the pages runs as it is printed. The names that pages use are small models here
//! ([`sandbox`]); a block that needs a network, a GPU or much time has a comment in front that says so. The
//! pages in docs/perf and docs/design are records of what was done and are left out.

mod blocks;
mod sandbox;

use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Instant;

use crate::program::workspace;
use blocks::{DocCodeBlock, blocks};
use sandbox::CommandSandbox;

/// The pages with commands, in addition to those of docs/.
const PAGES: [&str; 6] =
    ["README.md", "CONTRIBUTING.md", "SECURITY.md", "bench/README.md", "fuzz/README.md", "python/README.md"];

/// Reasons for which a block may not be run.
const REASONS: [&str; 10] = [
    "GPU",
    "MPI",
    "NVIDIA's tools",
    "PyTorch",
    "a cluster",
    "another server",
    "installs",
    "minutes",
    "network",
    "root",
];

fn pages() -> Vec<String> {
    let docs = std::fs::read_dir(workspace().join("docs")).unwrap();
    let names = docs.map(|entry| entry.unwrap().file_name().into_string().unwrap());
    let mut pages: Vec<String> =
        names.filter(|name| name.ends_with(".md")).map(|name| format!("docs/{name}")).collect();
    pages.extend(PAGES.map(str::to_owned));
    pages.sort();
    pages
}

fn commands(page: &str) -> Vec<DocCodeBlock> {
    let text = std::fs::read_to_string(workspace().join(page)).unwrap_or_else(|e| panic!("{page}: {e}"));
    blocks(&text).into_iter().filter(|block| block.is_command(&workspace())).collect()
}

/// Commands that are not run say why, in words that are known; the list is printed.
#[test]
fn commands_that_are_not_run_say_why() {
    let mut wrong = Vec::new();
    let mut run = 0;
    for page in pages() {
        for block in commands(&page) {
            let Some(reason) = &block.not_run else {
                run += 1;
                continue;
            };
            let first = block.text.lines().next().unwrap_or_default();
            println!("not run ({reason}): {page}:{}: {first}", block.line);
            if !reason.split(", ").all(|reason| REASONS.contains(&reason)) {
                wrong.push(format!("{page}:{}: `{reason}` is none of {}", block.line, REASONS.join(", ")));
            }
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
    assert!(run > 35, "only {run} blocks are run");
}

/// A mark is in front of a block of commands, so that none is left behind.
#[test]
fn marks_belong_to_commands() {
    for page in pages() {
        let text = std::fs::read_to_string(workspace().join(&page)).unwrap();
        let marked = commands(&page).iter().filter(|block| block.not_run.is_some()).count();
        assert_eq!(text.matches("<!-- not run: ").count(), marked, "{page}: a mark has no commands");
    }
}

#[cfg(target_os = "linux")]
#[test]
fn commands_run_as_printed() {
    let sandbox = CommandSandbox::new();
    let (pages, next, failed) = (pages(), AtomicUsize::new(0), Mutex::new(Vec::new()));
    let work = || {
        while let Some(page) = pages.get(next.fetch_add(1, Ordering::Relaxed)) {
            failed.lock().unwrap().extend(failures_of(&sandbox, page));
        }
    };
    std::thread::scope(|scope| {
        scope.spawn(work);
        work();
    });
    let failed = failed.into_inner().unwrap();
    assert!(failed.is_empty(), "{} blocks fail:\n\n{}", failed.len(), failed.join("\n\n"));
    sandbox.check_cargo();
}

/// Runs the blocks of a page in their order; those that fail, with what they said.
fn failures_of(sandbox: &CommandSandbox, page: &str) -> Vec<String> {
    let blocks: Vec<DocCodeBlock> =
        commands(page).into_iter().filter(|block| block.not_run.is_none()).collect();
    let mut failed = Vec::new();
    if blocks.is_empty() {
        return failed;
    }
    let folder = sandbox.page(page);
    for block in &blocks {
        let begin = Instant::now();
        if let Err(said) = run(sandbox, &folder, &block.text) {
            failed.push(format!("{page}:{}:\n{}{said}", block.line, block.text));
        }
        println!("{page}:{}: {:.1} s", block.line, begin.elapsed().as_secs_f64());
    }
    sandbox.end_servers(&folder);
    failed
}

/// Runs a block in a shell that ends at the first command that fails; what it said if it did.
fn run(sandbox: &CommandSandbox, folder: &Path, text: &str) -> Result<(), String> {
    let mut shell = Command::new("bash");
    shell.args(["-e", "-o", "pipefail", "-c", text]).current_dir(folder).stdin(Stdio::null());
    for (name, _) in std::env::vars_os() {
        let text = name.to_string_lossy();
        if text.starts_with("MLCC_") || text.starts_with("HF_") || text.starts_with("OTEL_") {
            shell.env_remove(&name);
        }
    }
    let output = shell.envs(sandbox.variables()).output().map_err(|error| format!("bash: {error}\n"))?;
    match output.status.success() {
        true => Ok(()),
        false => Err(format!(
            "{}\n{}{}",
            output.status,
            String::from_utf8_lossy(&output.stdout),
            String::from_utf8_lossy(&output.stderr)
        )),
    }
}
