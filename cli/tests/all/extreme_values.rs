//! Every flag that takes a number, with numbers that are no sizes: too large, zero, negative, no finite ones.
//! They are refused by their names or do what they say; none ends in an internal error, by a signal or in an
//! allocation that fails.
#![cfg(unix)]

use std::path::Path;
use std::process::{Command, Output, Stdio};
use std::time::{Duration, Instant};

use crate::cases::objects;
use crate::program::{artifact, books, case, mlcc};
use clap::{CommandFactory, Parser};
use mlcc::cli::Cli;

const VALUES: [&str; 16] = [
    "-9223372036854775809",
    "-9223372036854775808",
    "-1",
    "0",
    "65537",
    "2147483647",
    "4294967295",
    "4294967296",
    "9223372036854775807",
    "9223372036854775808",
    "18446744073709551615",
    "18446744073709551616",
    "-1e308",
    "1e308",
    "nan",
    "inf",
];

/// Address space of a program in KiB: what these models need, and far less than the sizes ask for.
const MEMORY_KIB: u64 = 8 << 20;
/// A program that is busy for so long hangs.
const PATIENCE: Duration = Duration::from_secs(240);

fn run(args: &[String]) -> Result<Output, String> {
    let mut shell = Command::new("sh");
    shell.arg("-c").arg(format!("ulimit -c 0; ulimit -v {MEMORY_KIB}; exec \"$0\" \"$@\""));
    shell.arg(assert_cmd::cargo::cargo_bin!("mlcc")).args(args).env("HF_HOME", "no-such-cache");
    let shell = shell.env("MLCC_CACHE_DIR", objects::folder());
    let shell = shell.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::piped());
    let mut child = shell.spawn().unwrap();
    let begin = Instant::now();
    while child.try_wait().unwrap().is_none() {
        if begin.elapsed() > PATIENCE {
            child.kill().unwrap();
            return Err("is still busy".into());
        }
        std::thread::sleep(Duration::from_millis(2));
    }
    Ok(child.wait_with_output().unwrap())
}

/// Names of the flags of a command that take one number.
fn numeric_flags(base: &[String]) -> Vec<String> {
    let command = Cli::command();
    let command = command.find_subcommand(&base[0]).unwrap().clone();
    let accepts = |flag: &str, value: &str| {
        let given = ["mlcc"].into_iter().chain(base.iter().map(String::as_str));
        let flag = format!("{flag}={value}");
        let parsed = Cli::try_parse_from(given.chain([flag.as_str()]));
        // In place of a flag of the command itself, which may be given once.
        parsed.is_ok_and(|_| true)
    };
    let named = command.get_arguments().filter_map(|a| a.get_long().map(|name| format!("--{name}")));
    named.filter(|flag| (accepts(flag, "1") || accepts(flag, "2")) && !accepts(flag, "no-number")).collect()
}

fn strings(args: &[&str]) -> Vec<String> {
    args.iter().map(|arg| arg.to_string()).collect()
}

fn check(base: &[&str]) {
    let base = strings(base);
    let flags = numeric_flags(&base);
    assert!(!flags.is_empty(), "{base:?} has no numbers");
    let mut wrong = Vec::new();
    for flag in &flags {
        for value in VALUES {
            let mut args = base.clone();
            args.push(format!("{flag}={value}"));
            // A value that the parser refuses is a wrong usage, whose exit code the program has from it.
            let whole = ["mlcc".to_string()].into_iter().chain(args.iter().cloned());
            if Cli::try_parse_from(whole).is_err() {
                continue;
            }
            match run(&args) {
                Err(what) => wrong.push(format!("{args:?} {what}")),
                Ok(output) => {
                    let message = String::from_utf8_lossy(&output.stderr).into_owned();
                    let good =
                        matches!(output.status.code(), Some(0..=2)) && !message.contains("internal error");
                    if !good {
                        wrong.push(format!("{args:?} ended with {:?}: {message}", output.status));
                    }
                }
            }
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

/// The trained model with room for few tokens, so that what may go on for ever ends.
fn short(folder: &Path) -> String {
    let path = folder.join("short.so");
    let mut build = mlcc();
    build.arg("build").arg("-m").arg(books()).args(["-c", "32", "--quant", "q8f16_1", "-o"]).arg(&path);
    build.assert().success();
    path.to_str().unwrap().into()
}

#[test]
fn of_build() {
    let folder = tempfile::tempdir().unwrap();
    let (model, output) = (case("llama3-gqa-tied"), folder.path().join("x.so"));
    let (model, output) = (model.to_str().unwrap(), output.to_str().unwrap());
    check(&["build", "-m", model, "-o", output]);
    let model = case("rwkv4-hf");
    check(&["build", "-m", model.to_str().unwrap(), "--random-weights", "1", "-o", output]);
}

#[test]
fn of_run_and_chat() {
    let folder = tempfile::tempdir().unwrap();
    let short = short(folder.path());
    check(&["run", &short, "-p", "It was"]);
    check(&["chat", &short, "--template", "plain"]);
}

#[test]
fn of_measurements() {
    let folder = tempfile::tempdir().unwrap();
    let short = short(folder.path());
    let text = folder.path().join("text.txt");
    std::fs::write(&text, "She was very glad to see him, and said so. ".repeat(20)).unwrap();
    let text = text.to_str().unwrap();
    check(&["eval", &short, "--text", text]);
    check(&["bench", &short, "--warm-up", "0", "-r", "1", "-n", "4", "-p", "4"]);
    check(&["bench", &short]);
    check(&["verify", &short, "--golden", books().join("golden.json").to_str().unwrap()]);
    // Where no context limits anything.
    let endless = artifact().to_str().unwrap();
    check(&["eval", endless, "--text", text]);
}

#[test]
fn of_interpreters_and_passes() {
    let folder = tempfile::tempdir().unwrap();
    let module = folder.path().join("m.mlc");
    let (model, golden) = (case("rwkv4-hf"), case("rwkv4-hf").join("golden.json"));
    let (model, golden) = (model.to_str().unwrap(), golden.to_str().unwrap());
    let dump = folder.path().join("dump");
    let mut build = mlcc();
    build.args(["build", "-m", model, "--stop-after", "canonicalize", "--debug-dump"]).arg(&dump);
    build.assert().success();
    let first = std::fs::read_dir(&dump).unwrap().map(|e| e.unwrap().path()).min().unwrap();
    std::fs::copy(first, &module).unwrap();
    let module = module.to_str().unwrap();
    check(&["interp", module, "decode"]);
    check(&["interp", module, "prefill"]);
    check(&["interp", "--model", model, "--golden", golden]);
    check(&["opt", module]);
    check(&["bisect", model, "--tokens", "1"]);
}
