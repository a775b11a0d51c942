//! Ranks that are processes, without MPI: a plug-in of these tests carries their messages through sockets,
//! checks that each process says what the others wait for, and writes down all calls. The program is started
//! as `mpirun` starts it.

use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

use tempfile::TempDir;

use crate::program::{artifact, books, case, mlcc, program, text};

/// Compiles the plug-in; `None` without a C compiler.
pub fn plugin(folder: &Path, version: u32) -> Option<PathBuf> {
    library(folder, "plugin", version)
}

/// Compiles a library of these tests.
pub fn library(folder: &Path, name: &str, version: u32) -> Option<PathBuf> {
    if Command::new("cc").arg("--version").output().is_err() {
        eprintln!("skipped: no C compiler (`cc`) on this machine");
        return None;
    }
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join(format!("tests/all/rank_processes/{name}.c"));
    let library = folder.join(format!("{name}-{version}.so"));
    let output = Command::new("cc")
        .args(["-std=c11", "-D_GNU_SOURCE", "-O1", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC"])
        .arg(format!("-DVERSION={version}"))
        .arg("-o")
        .arg(&library)
        .arg(&source)
        .output()
        .unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    Some(library)
}

/// Processes that were started together, each with this command line.
pub struct LaunchedGroup {
    pub folder: TempDir,
    pub children: Vec<Child>,
}

impl LaunchedGroup {
    fn start(count: usize, plugin: &Path, arguments: &[&str], fault: Option<&str>) -> LaunchedGroup {
        LaunchedGroup::start_each(plugin, &vec![arguments; count], fault)
    }

    /// Each with a command line of its own.
    fn start_each(plugin: &Path, arguments: &[&[&str]], fault: Option<&str>) -> LaunchedGroup {
        LaunchedGroup::start_with(plugin, arguments, fault, &|_| Vec::new())
    }

    /// Starts them with more variables.
    pub fn start_with(
        plugin: &Path,
        arguments: &[&[&str]],
        fault: Option<&str>,
        variables: &dyn Fn(usize) -> Vec<(String, String)>,
    ) -> LaunchedGroup {
        let command = |rank: usize| {
            let mut command = program();
            command.args(arguments[rank]).envs(variables(rank));
            command
        };
        LaunchedGroup::start_commands(plugin, (0..arguments.len()).map(command).collect(), fault)
    }

    pub fn start_commands(plugin: &Path, mut commands: Vec<Command>, fault: Option<&str>) -> LaunchedGroup {
        let (folder, count) = (tempfile::tempdir().unwrap(), commands.len());
        let start = |(rank, command): (usize, &mut Command)| {
            command.env("MLCC_MPI", plugin);
            if !command.get_envs().any(|(name, _)| name == "MLCC_RANK_TIMEOUT") {
                command.env("MLCC_RANK_TIMEOUT", if fault.is_some() { "2" } else { "20" });
            }
            command.env("TEST_RANKS", folder.path()).env("TEST_RANK", rank.to_string());
            command.env("OMPI_COMM_WORLD_SIZE", count.to_string()).env_remove("TEST_FAULT");
            if let Some(fault) = fault {
                command.env("TEST_FAULT", fault);
            }
            command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()
        };
        let children = commands.iter_mut().enumerate().map(start).collect();
        LaunchedGroup { folder, children }
    }

    pub fn log(&self, rank: usize) -> String {
        std::fs::read_to_string(self.folder.path().join(format!("{rank}.log"))).unwrap_or_default()
    }

    /// Waits until a rank has reached this many all-gathers.
    pub fn wait_for(&self, rank: usize, exchanges: usize) {
        let begin = Instant::now();
        while self.log(rank).lines().filter(|line| line.starts_with("exchange ")).count() < exchanges {
            assert!(begin.elapsed() < Duration::from_secs(60), "rank {rank}: {}", self.log(rank));
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    /// Their outputs when all have ended, and their logs.
    pub fn wait(self) -> (Vec<Output>, Vec<Vec<String>>) {
        let (outputs, logs, _) = self.wait_and_keep();
        (outputs, logs)
    }

    /// The same, with the folder.
    pub fn wait_and_keep(mut self) -> (Vec<Output>, Vec<Vec<String>>, TempDir) {
        let begin = Instant::now();
        while self.children.iter_mut().any(|child| child.try_wait().unwrap().is_none()) {
            if begin.elapsed() > Duration::from_secs(100) {
                self.children.iter_mut().for_each(|child| child.kill().unwrap());
            }
            std::thread::sleep(Duration::from_millis(10));
        }
        let log = |rank| self.log(rank).lines().map(str::to_owned).collect();
        let logs = (0..self.children.len()).map(log).collect();
        let outputs = self.children.into_iter().map(|child| child.wait_with_output().unwrap()).collect();
        (outputs, logs, self.folder)
    }
}

pub fn stdout(output: &Output) -> String {
    String::from_utf8_lossy(&output.stdout).into_owned()
}

pub fn stderr(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

/// The lines of a log that begin so.
fn calls<'l>(log: &'l [String], what: &str) -> Vec<&'l str> {
    log.iter().filter_map(|line| line.strip_prefix(what)).collect()
}

fn build(model: &Path, output: &Path, flags: &[&str]) {
    let mut build = mlcc();
    build.arg("build").arg("-m").arg(model).args(["--no-report", "-o"]).arg(output).args(flags);
    build.assert().success();
}

#[test]
fn processes_write_the_text_of_one() {
    let folder = tempfile::tempdir().unwrap();
    let Some(plugin) = plugin(folder.path(), 1) else { return };
    let split = folder.path().join("split.so");
    build(&books(), &split, &["--quant", "q8f16_1", "--tensor-parallel", "2"]);
    let flags = ["-q", "-p", "The sea was", "-n", "12", "--greedy", "-t", "1"];
    let one = text(mlcc().arg("run").arg(artifact()).args(flags));
    let arguments: Vec<&str> = ["run", split.to_str().unwrap()].into_iter().chain(flags).collect();
    let (outputs, logs) = LaunchedGroup::start(2, &plugin, &arguments, None).wait();
    for (rank, output) in outputs.iter().enumerate() {
        assert!(output.status.success(), "rank {rank}: {}\n{:#?}", stderr(output), logs[rank]);
    }
    assert_eq!(stdout(&outputs[0]), one);
    assert_eq!(stdout(&outputs[1]), "", "the other rank only follows");

    // Both reach the same all-gathers in the same order; the first one are their greetings.
    let exchanges = calls(&logs[0], "exchange ");
    assert!(exchanges == calls(&logs[1], "exchange "), "{logs:#?}");
    assert_eq!(exchanges[0], "1 256");
    // The messages of rank 0 are those that the other one gets.
    let told: Vec<String> = calls(&logs[0], "tell ").iter().map(|len| format!("0 {len}")).collect();
    assert_eq!(told, calls(&logs[1], "hear "), "{logs:#?}");
    assert_eq!(calls(&logs[0], "hear ").len() + calls(&logs[1], "tell ").len(), 0);
    for log in &logs {
        assert_eq!(log.last().map(String::as_str), Some("leave"));
        assert!(!log.iter().any(|line| line.starts_with("abort") || line.starts_with("fault")), "{log:#?}");
    }
    // Every token that is decoded has the same all-gathers, all of one row.
    let steps: Vec<&[String]> = logs[1].split(|line| line.starts_with("hear ")).collect();
    let largest = steps.iter().map(|step| step.len()).max().unwrap();
    let tokens =
        steps.iter().filter(|s| s.len() == largest && s.iter().all(|e| e.starts_with("exchange 1 ")));
    let tokens: Vec<_> = tokens.collect();
    assert!(tokens.len() >= 11, "{} steps of {largest} exchanges", tokens.len());
    assert!(tokens.iter().all(|step| *step == tokens[0]), "steps differ");
}

/// Results of a model of the reference, in both ways to split it.
#[test]
fn processes_replay_a_golden() {
    let folder = tempfile::tempdir().unwrap();
    let Some(plugin) = plugin(folder.path(), 1) else { return };
    let model = case("llama3-gqa-tied");
    let golden = model.join("golden.json");
    let mut exchanges = Vec::new();
    for mode in ["gather", "reduce"] {
        let split = folder.path().join(format!("{mode}.so"));
        build(&model, &split, &["--quant", "f32", "--tensor-parallel", "2", "--tp-mode", mode]);
        let [file, golden] = [&split, &golden].map(|path| path.to_str().unwrap());
        let arguments = ["verify", file, "--golden", golden, "-t", "1"];
        let (outputs, logs) = LaunchedGroup::start(2, &plugin, &arguments, None).wait();
        assert!(outputs[0].status.success(), "{mode}: {}{}", stdout(&outputs[0]), stderr(&outputs[0]));
        assert!(outputs[1].status.success(), "{mode}: {}", stderr(&outputs[1]));
        // No ping comes between those of a step.
        exchanges.push(calls(&logs[0], "exchange ").iter().filter(|e| **e != "1 1").count());
    }
    // Three layers with two sums in place of four gathers, the embedding and the logits.
    let [gather, reduce] = exchanges[..] else { panic!("{exchanges:?}") };
    assert!((reduce as f64 / gather as f64) < 0.62, "{exchanges:?}");
}

#[test]
fn processes_that_go_wrong_end_together() {
    let folder = tempfile::tempdir().unwrap();
    let Some(plugin) = plugin(folder.path(), 1) else { return };
    let split = folder.path().join("split.so");
    build(&case("rwkv4-hf"), &split, &["--quant", "f32", "--tensor-parallel", "2"]);
    let golden = case("rwkv4-hf").join("golden.json");
    let [file, golden] = [&split, &golden].map(|path| path.to_str().unwrap());
    let arguments = ["verify", file, "--golden", golden, "-t", "1"];
    // Behind the greetings and the end of loading.
    for (fault, expected) in [
        (
            "drop:1:9",
            "did not respond for 2 s (MLCC_RANK_TIMEOUT). All ranks end (reported by rank 0 (process ",
        ),
        ("short:1:9", "the library that carries messages has failed"),
        ("stale:1:9", "the library that carries messages has failed"),
    ] {
        let mut group = LaunchedGroup::start(2, &plugin, &arguments, Some(fault));
        let first = group.children.remove(0).wait_with_output().unwrap();
        let other = group.children.pop().unwrap();
        let other_id = other.id();
        if fault.starts_with("drop") {
            // It would say nothing for long.
            Command::new("kill").args(["-KILL", &other_id.to_string()]).status().unwrap();
        }
        let other = other.wait_with_output().unwrap();
        assert_eq!(first.status.code(), Some(1), "{fault}: {}", stderr(&first));
        assert!(stderr(&first).contains(expected), "{fault}: {}", stderr(&first));
        if fault.starts_with("drop") {
            let name = format!("rank 1 (process {other_id} on ");
            assert!(stderr(&first).contains(&name), "{fault}: {}", stderr(&first));
        } else {
            assert_eq!(other.status.code(), Some(1), "{fault}: {}", stderr(&other));
            let log = std::fs::read_to_string(group.folder.path().join("0.log")).unwrap();
            assert!(log.contains("fault: process 1 says kind 1"), "{fault}: {log}");
            assert!(log.ends_with("abort 1\n"), "{fault}: {log}");
        }
    }
}

/// A rank that is killed while it greets the others, while it loads, in the prompt, among tokens: the other
/// one ends at once.
#[test]
fn a_rank_that_is_killed_ends_all() {
    let folder = tempfile::tempdir().unwrap();
    let Some(plugin) = plugin(folder.path(), 1) else { return };
    let split = folder.path().join("split.so");
    build(&case("llama3-gqa-tied"), &split, &["--quant", "f32", "--tensor-parallel", "2"]);
    let golden = case("llama3-gqa-tied").join("golden.json");
    let [file, golden] = [&split, &golden].map(|path| path.to_str().unwrap());
    let arguments = ["verify", file, "--golden", golden, "-t", "1"];
    for number in [0, 1, 5, 40, 90] {
        // It waits in this all-gather until it is killed.
        let mut group = LaunchedGroup::start(2, &plugin, &arguments, Some(&format!("drop:1:{number}")));
        group.wait_for(1, number + 1);
        let mut other = group.children.pop().unwrap();
        other.kill().unwrap();
        let killed = Instant::now();
        other.wait().unwrap();
        let first = group.children.pop().unwrap().wait_with_output().unwrap();
        let took = killed.elapsed();
        assert_eq!(first.status.code(), Some(1), "exchange {number}: {}", stderr(&first));
        assert!(stderr(&first).contains("All ranks end"), "exchange {number}: {}", stderr(&first));
        assert!(took < Duration::from_secs(10), "exchange {number}: it ended after {took:?}");
    }
}

#[test]
fn ranks_of_other_artifacts_are_named() {
    let folder = tempfile::tempdir().unwrap();
    let Some(plugin) = plugin(folder.path(), 1) else { return };
    let file = |name: &str, flags: &[&str]| {
        let file = folder.path().join(name);
        build(&case("rwkv4-hf"), &file, &[&["--quant", "f32", "--tensor-parallel"], flags].concat());
        file.to_str().unwrap().to_owned()
    };
    let (two, other, three) =
        (file("2.so", &["2"]), file("o.so", &["2", "--chunk", "8"]), file("3.so", &["3"]));
    let run = |files: [&str; 2]| {
        let arguments = files.map(|file| ["run", file, "-q", "-p", "x", "-n", "1", "-t", "1"]);
        let (outputs, _) = LaunchedGroup::start_each(&plugin, &[&arguments[0], &arguments[1]], None).wait();
        for output in &outputs {
            assert_eq!(output.status.code(), Some(1), "{}", stderr(output));
        }
        outputs.iter().map(stderr).collect::<Vec<_>>()
    };
    for told in run([&two, &other]) {
        let hashes: Vec<&str> = told.split(" has the artifact ").skip(1).map(|rest| &rest[..16]).collect();
        assert!(hashes.len() == 2 && hashes[0] != hashes[1], "{told}");
        assert!(told.contains("rank 1 (process ") && told.contains(", rank 0 (process "), "{told}");
        assert!(told.contains("Give all ranks the same files"), "{told}");
    }
    // The number of processes equals that of the artifact's ranks.
    for told in run([&three, &three]) {
        assert!(told.contains("3 ranks") && told.contains("2 processes were started"), "{told}");
    }
}

/// One of the processes greets as another version would: all name both versions, and end before anything is
/// computed.
#[test]
fn ranks_of_other_versions_are_named() {
    let folder = tempfile::tempdir().unwrap();
    let Some(plugin) = plugin(folder.path(), 1) else { return };
    let split = folder.path().join("split.so");
    build(&case("rwkv4-hf"), &split, &["--quant", "f32", "--tensor-parallel", "2"]);
    let arguments = ["run", split.to_str().unwrap(), "-q", "-p", "x", "-n", "1", "-t", "1"];
    let own = env!("CARGO_PKG_VERSION");
    let abi = mlcc_abi::ABI_VERSION;
    // Texts of the version and of the name come first, then two hashes.
    for (greeting, expected) in [
        ("0:0.0.9", ["version 0.0.9 of mlcc".to_owned(), format!("version {own} of mlcc")]),
        ("152:c", ["version 99 of the ABI".to_owned(), format!("version {abi} of the ABI")]),
    ] {
        let variables = |rank| match rank {
            1 => vec![("TEST_GREETING".to_owned(), greeting.to_owned())],
            _ => Vec::new(),
        };
        let (outputs, logs) =
            LaunchedGroup::start_with(&plugin, &[&arguments[..]; 2], None, &variables).wait();
        for (output, log) in outputs.iter().zip(&logs) {
            let told = stderr(output);
            assert_eq!((output.status.code(), stdout(output).as_str()), (Some(1), ""), "{told}");
            let [other, first] = &expected;
            let ranks = told.split_once(other).zip(told.split_once(first));
            let named = ranks.is_some_and(|((before, _), (until, _))| {
                before.contains("rank 1 (process ") && until.contains("rank 0 (process ")
            });
            assert!(named, "{greeting}: {told}");
            assert_eq!(calls(log, "exchange ").len(), 1, "{log:?}");
        }
    }
}

#[test]
fn plugins_of_no_use_are_named() {
    let folder = tempfile::tempdir().unwrap();
    let fails = |plugin: &Path, part: &str| {
        let mut run = program();
        run.arg("run").arg(artifact()).args(["-q", "-p", "x", "-n", "1"]).stdin(Stdio::null());
        let run = run.env("OMPI_COMM_WORLD_SIZE", "2").env("MLCC_MPI", plugin).output().unwrap();
        assert_eq!(run.status.code(), Some(1), "{}", stderr(&run));
        assert!(stderr(&run).contains(part), "`{part}` is not in: {}", stderr(&run));
    };
    fails(Path::new("/nowhere/libmlcc_mpi.so"), "Install Open MPI");
    let Some(other) = plugin(folder.path(), 2) else { return };
    fails(&other, "has version 2, this program wants 1");
    // It is not told where the others are.
    fails(&plugin(folder.path(), 1).unwrap(), "the processes cannot join each other");
}
