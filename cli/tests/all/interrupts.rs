//! Ctrl-C, SIGTERM, SIGHUP, limits of files and closed pipes.
#![cfg(unix)]

use std::io::{BufRead, BufReader, Read, Write};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use crate::program::{artifact, artifacts_in, books, program};

fn interrupt(child: &Child) {
    signal(child, "-INT");
}

fn signal(child: &Child, name: &str) {
    let status = Command::new("kill").args([name, &child.id().to_string()]).status().unwrap();
    assert!(status.success());
}

/// Waits until `ready`; panics after a minute, or when the program has ended before.
fn wait_for(child: &mut Child, mut ready: impl FnMut() -> bool) {
    let begin = Instant::now();
    while !ready() {
        assert!(child.try_wait().unwrap().is_none(), "ended before it could be interrupted");
        assert!(begin.elapsed() < Duration::from_secs(240), "never ready");
        std::thread::sleep(Duration::from_millis(5));
    }
}

fn bytes_in(folder: &Path) -> u64 {
    let entries = std::fs::read_dir(folder).unwrap().flatten();
    entries.filter_map(|e| e.metadata().ok()).map(|m| m.len()).sum()
}

#[test]
fn an_interrupted_build_leaves_nothing() {
    a_build_that_gets("-INT");
}

#[test]
fn a_terminated_build_leaves_nothing() {
    a_build_that_gets("-TERM");
}

#[test]
fn a_build_whose_terminal_is_gone_leaves_nothing() {
    if hangup_is_ignored() {
        return println!("skipped: the tests were started with SIGHUP ignored");
    }
    a_build_that_gets("-HUP");
}

/// True if this program, and so the ones that it starts, ignore SIGHUP.
fn hangup_is_ignored() -> bool {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let ignored = status.lines().find_map(|line| line.strip_prefix("SigIgn:"));
    ignored.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok()).is_some_and(|mask| mask & 1 == 1)
}

/// A build of `x.so` in a folder, with temporary files in another one, in the middle of the weights: they
/// take long for a model of this size.
fn build_in(folder: &Path, mut program: Command) -> Child {
    let temporary = folder.join("temporary");
    std::fs::create_dir(&temporary).unwrap();
    program.current_dir(folder).env("TMPDIR", &temporary);
    program.args(["build", "-m", "rwkv-1.5b", "--random-weights", "1", "--quant", "q4f16", "-o", "x.so"]);
    let mut child = program.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    wait_for(&mut child, || bytes_in(folder) > 4 << 20);
    assert!(!folder.join("x.so").exists());
    child
}

fn assert_nothing_is_left(folder: &Path) {
    assert_eq!(artifacts_in(folder), [""; 0]);
    assert_eq!(std::fs::read_dir(folder.join("temporary")).unwrap().count(), 0);
}

/// Both signals are there before the program goes on, so that it cannot end in order in between.
#[test]
fn a_second_interrupt_leaves_nothing_either() {
    let folder = tempfile::tempdir().unwrap();
    let child = build_in(folder.path(), program());
    ["-STOP", "-INT", "-TERM", "-CONT"].iter().for_each(|name| signal(&child, name));
    assert_eq!(child.wait_with_output().unwrap().status.code(), Some(130));
    assert_nothing_is_left(folder.path());
}

#[test]
fn nohup_keeps_a_build_going() {
    let folder = tempfile::tempdir().unwrap();
    let mut shell = Command::new("sh");
    shell.args(["-c", "trap '' HUP; exec \"$0\" \"$@\""]).arg(program().get_program());
    let mut child = build_in(folder.path(), shell);
    let before = bytes_in(folder.path());
    signal(&child, "-HUP");
    wait_for(&mut child, || bytes_in(folder.path()) > before + (4 << 20));
    signal(&child, "-TERM");
    assert_eq!(child.wait_with_output().unwrap().status.code(), Some(130));
    assert_nothing_is_left(folder.path());
}

/// The artifact is larger than 2 MiB, which the linker's files are not.
#[test]
fn a_limit_of_files_is_an_error_with_the_name() {
    let folder = tempfile::tempdir().unwrap();
    let temporary = folder.path().join("temporary");
    std::fs::create_dir(&temporary).unwrap();
    let mut shell = Command::new("sh");
    // In blocks of 512 bytes.
    shell.args(["-c", "ulimit -f 4096; exec \"$0\" \"$@\""]).arg(program().get_program());
    shell.args(["build", "--quant", "f32", "--no-report", "-o", "x.so", "-m"]).arg(books());
    let output = shell.current_dir(&folder).env("TMPDIR", &temporary).output().unwrap();
    let message = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(1), "{message}");
    assert!(message.contains("x.so") && message.contains("ulimit -f"), "{message}");
    assert_nothing_is_left(folder.path());
}

fn a_build_that_gets(name: &str) {
    let folder = tempfile::tempdir().unwrap();
    let child = build_in(folder.path(), program());
    signal(&child, name);
    let output = child.wait_with_output().unwrap();
    assert_eq!(output.status.code(), Some(130));
    assert_eq!(String::from_utf8(output.stderr).unwrap().lines().last(), Some("error: interrupted"));
    assert_nothing_is_left(folder.path());
}

#[test]
fn an_interrupted_run_ends_in_order() {
    let folder = tempfile::tempdir().unwrap();
    let state = folder.path().join("x.state");
    let mut run = program();
    run.arg("run")
        .arg(artifact())
        .args(["-p", "It was", "-n", "-1", "--ignore-eos", "--save-state"])
        .arg(&state);
    let mut child = run.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let mut out = BufReader::new(child.stdout.take().unwrap());
    let mut begin = [0; 20];
    out.read_exact(&mut begin).unwrap();
    interrupt(&child);
    let mut rest = String::new();
    out.read_to_string(&mut rest).unwrap();
    assert!(rest.ends_with('\n'));
    let output = child.wait_with_output().unwrap();
    assert_eq!(output.status.code(), Some(130));
    let report = String::from_utf8(output.stderr).unwrap();
    assert!(report.contains("end: cancelled"), "{report}");
    assert!(state.exists());
}

#[test]
fn an_interrupted_answer_is_not_the_end_of_a_chat() {
    let mut chat = program();
    chat.arg("chat").arg(artifact()).args(["--template", "plain", "-n", "200000"]);
    let mut child = chat.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let mut input = child.stdin.take().unwrap();
    let mut out = BufReader::new(child.stdout.take().unwrap());
    let mut notes = BufReader::new(child.stderr.take().unwrap()).lines();
    input.write_all(b"It was\n").unwrap();
    let mut begin = [0; 20];
    out.read_exact(&mut begin).unwrap();
    interrupt(&child);
    assert!(notes.any(|line| line.unwrap() == "(stopped)"));
    // The chat goes on, and the next press is at the prompt.
    input.write_all(b"/set max_tokens=5\nThe old man\n/stats\n").unwrap();
    let mut stats = String::new();
    while !stats.contains("answer 5 tokens") {
        stats.clear();
        assert!(out.read_line(&mut stats).unwrap() > 0, "the chat has ended");
    }
    std::thread::sleep(Duration::from_millis(100));
    interrupt(&child);
    assert_eq!(child.wait().unwrap().code(), Some(130));
}

/// Ctrl-C would only stop the answer.
#[test]
fn a_terminated_chat_ends_in_the_middle_of_an_answer() {
    let mut chat = program();
    chat.arg("chat").arg(artifact()).args(["--template", "plain", "-n", "200000"]);
    let mut child = chat.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::null()).spawn().unwrap();
    // Both pipes stay open, so that neither ends the chat.
    let mut input = child.stdin.take().unwrap();
    input.write_all(b"It was\n").unwrap();
    let mut out = child.stdout.take().unwrap();
    out.read_exact(&mut [0; 20]).unwrap();
    signal(&child, "-TERM");
    assert_eq!(child.wait().unwrap().code(), Some(130));
}

/// Fields of a process in Linux after its name: its condition and its parent.
#[cfg(target_os = "linux")]
fn condition_and_parent(process: u32) -> Option<(String, u32)> {
    let stat = std::fs::read_to_string(format!("/proc/{process}/stat")).ok()?;
    let mut fields = stat.rsplit_once(") ")?.1.split(' ');
    Some((fields.next()?.to_string(), fields.next()?.parse().ok()?))
}

/// The processes that `parent` has started.
#[cfg(target_os = "linux")]
fn children(parent: u32) -> Vec<u32> {
    let entries = std::fs::read_dir("/proc").unwrap().flatten();
    let processes = entries.filter_map(|e| e.file_name().to_str()?.parse().ok());
    processes.filter(|&p| condition_and_parent(p).is_some_and(|(_, of)| of == parent)).collect()
}

/// True if the process runs: it exists and does not only wait to be asked how it ended.
#[cfg(target_os = "linux")]
fn runs(process: u32) -> bool {
    condition_and_parent(process).is_some_and(|(condition, _)| condition != "Z")
}

/// However the bench ends, its busy programs end with it.
#[test]
#[cfg(target_os = "linux")]
fn busy_programs_end_with_the_bench() {
    for (name, code) in [("-INT", Some(130)), ("-TERM", Some(130)), ("-KILL", None)] {
        let mut bench = program();
        bench.arg("bench").arg(artifact()).args(["--busy", "2", "-p", "0", "-n", "8", "-r", "1000"]);
        bench.args(["--warm-up", "0"]).stdout(Stdio::null()).stderr(Stdio::null());
        let mut child = EndedProcess(bench.spawn().unwrap());
        let id = child.0.id();
        let mut busy = Vec::new();
        wait_for(&mut child.0, || {
            busy = children(id);
            busy.len() == 2
        });
        signal(&child.0, name);
        assert_eq!(child.0.wait().unwrap().code(), code, "{name}");
        let begin = Instant::now();
        while busy.iter().any(|&process| runs(process)) {
            assert!(begin.elapsed() < Duration::from_secs(60), "{name}: busy programs are left");
            std::thread::sleep(Duration::from_millis(5));
        }
    }
}

#[test]
fn a_closed_pipe_is_no_error() {
    let mut run = program();
    run.arg("run").arg(artifact()).args(["-p", "It was", "-n", "100000", "--ignore-eos"]);
    let mut child = run.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let mut out = BufReader::new(child.stdout.take().unwrap());
    let mut piece = [0; 8];
    out.read_exact(&mut piece).unwrap();
    drop(out);
    let output = child.wait_with_output().unwrap();
    assert_eq!(output.status.code(), Some(0));
    assert!(!String::from_utf8_lossy(&output.stderr).contains("error"));

    let mut list = program();
    let mut child = list.arg("targets").stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    drop(child.stdout.take());
    let mut lines = BufReader::new(child.stderr.take().unwrap()).lines();
    assert!(lines.next().is_none());
    assert_eq!(child.wait().unwrap().code(), Some(0));
}

/// The screen of a program on a terminal so far.
#[derive(Clone, Default)]
struct TerminalScreen(Arc<Mutex<Vec<u8>>>);

impl TerminalScreen {
    fn of(mut output: impl Read + Send + 'static) -> TerminalScreen {
        let screen = TerminalScreen::default();
        let shown = screen.clone();
        std::thread::spawn(move || {
            let mut bytes = [0; 4096];
            while let Ok(count @ 1..) = output.read(&mut bytes) {
                shown.0.lock().unwrap().extend(&bytes[..count]);
            }
        });
        screen
    }
    fn text(&self) -> String {
        String::from_utf8_lossy(&self.0.lock().unwrap()).into_owned()
    }
}

/// A program that does not outlive a failed test.
struct EndedProcess(Child);

impl Drop for EndedProcess {
    fn drop(&mut self) {
        // It may have ended by itself.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Ctrl-C on a terminal (util-linux's `script` gives the program one): in an answer it ends the answer, at
/// typed text it drops the text, and at an empty prompt it ends the chat.
#[test]
#[cfg(target_os = "linux")]
fn control_c_in_a_chat_on_a_terminal() {
    const CONTROL_C: &[u8] = b"\x03";
    let chat = format!(
        "'{}' chat '{}' --template plain --greedy -t 1",
        assert_cmd::cargo::cargo_bin!("mlcc").display(),
        artifact().display()
    );
    let mut script = Command::new("script");
    script.args(["-qec", &chat, "/dev/null"]).env("SHELL", "/bin/sh").env("TERM", "xterm");
    let mut child = match script.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn() {
        Ok(child) => EndedProcess(child),
        Err(e) => return println!("skipped: script (util-linux) gives the program a terminal: {e}"),
    };
    let child = &mut child.0;
    let (mut keys, screen) = (child.stdin.take().unwrap(), TerminalScreen::of(child.stdout.take().unwrap()));
    let prompts = |screen: &TerminalScreen| screen.text().matches("> ").count();
    let mut type_keys = |bytes: &[u8]| keys.write_all(bytes).and_then(|()| keys.flush()).unwrap();

    wait_for(child, || prompts(&screen) > 0);
    type_keys(b"It was a dark\r");
    let answer = |text: &str| text.rsplit_once("It was a dark").map_or(0, |(_, answer)| answer.len());
    wait_for(child, || answer(&screen.text()) > 200);
    let before = prompts(&screen);
    type_keys(CONTROL_C);
    wait_for(child, || prompts(&screen) > before);

    // Dropped text does not reach the model: what follows is a command of its own.
    type_keys(b"never sent");
    wait_for(child, || screen.text().contains("never sent"));
    let before = prompts(&screen);
    type_keys(CONTROL_C);
    wait_for(child, || prompts(&screen) > before);
    type_keys(b"/stats\r");
    wait_for(child, || screen.text().contains("context: "));
    wait_for(child, || screen.text().rsplit_once("context: ").is_some_and(|(_, rest)| rest.contains("> ")));
    assert!(!screen.text().contains("unknown command"), "{}", screen.text());

    type_keys(CONTROL_C);
    assert_eq!(child.wait().unwrap().code(), Some(130), "{}", screen.text());
}

/// The search of a tuning ends in order: what it has found is written as a whole, or nothing is.
#[test]
fn an_interrupted_tuning_keeps_what_it_found() {
    let folder = tempfile::tempdir().unwrap();
    let temporary = folder.path().join("temporary");
    std::fs::create_dir(&temporary).unwrap();
    let mut tune = program();
    tune.current_dir(&folder).env("TMPDIR", &temporary).arg("tune").arg(books().canonicalize().unwrap());
    tune.args(["--quant", "q8i8", "--threads", "1", "--budget", "3600", "-o", "t.toml", "-v"]);
    let mut child = tune.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let mut told = BufReader::new(child.stderr.take().unwrap());
    // The first value that was timed.
    let mut line = String::new();
    told.read_line(&mut line).unwrap();
    assert!(line.contains(" x "), "{line}");
    interrupt(&child);
    let mut rest = String::new();
    told.read_to_string(&mut rest).unwrap();
    assert_eq!(child.wait_with_output().unwrap().status.code(), Some(130), "{rest}");
    assert_eq!(rest.lines().last(), Some("error: interrupted"), "{rest}");
    assert_eq!(std::fs::read_dir(&temporary).unwrap().count(), 0);
    match std::fs::read_to_string(folder.path().join("t.toml")) {
        Ok(text) => {
            assert!(mlcc_target::LevelTuning::parse("t.toml", &text).is_ok_and(|t| !t.tune.is_empty()))
        }
        Err(_) => assert!(rest.contains("nothing was written"), "{rest}"),
    }
    assert_eq!(artifacts_in(folder.path()), [""; 0]);
}
