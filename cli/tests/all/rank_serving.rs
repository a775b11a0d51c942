//! A server whose ranks are processes, when it ends: launchers send SIGTERM to all of them.

use std::io::{BufRead, BufReader, Read};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;
use std::time::{Duration, Instant};

use serde_json::Value;

use crate::http::TestClient;
use crate::program::{books, failure, json, mlcc};
use crate::rank_processes::{LaunchedGroup, plugin, stderr};

pub fn split() -> &'static Path {
    static BUILT: OnceLock<PathBuf> = OnceLock::new();
    BUILT.get_or_init(|| {
        let name = format!("rank-serving-{}.so", std::process::id());
        let path = Path::new(env!("CARGO_TARGET_TMPDIR")).join(name);
        let mut build = mlcc();
        build.arg("build").arg("-m").arg(books()).args(["--quant", "q8f16_1", "--tensor-parallel", "2"]);
        build.args(["--no-report", "-o"]).arg(&path).assert().success();
        path
    })
}

fn start(plugin: &Path, flags: &[&str]) -> LaunchedGroup {
    let first = ["serve", split().to_str().unwrap(), "--port", "0", "--json", "-t", "1"];
    let arguments = [&first[..], flags].concat();
    LaunchedGroup::start_with(plugin, &[&arguments[..]; 2], None, &|_| Vec::new())
}

/// Two processes that serve, and where.
fn serve(plugin: &Path, flags: &[&str]) -> (LaunchedGroup, TestClient) {
    let mut group = start(plugin, flags);
    let client = ready(&mut group);
    (group, client)
}

/// The client of the server, once it serves.
pub fn ready(group: &mut LaunchedGroup) -> TestClient {
    let mut line = String::new();
    let mut stdout = BufReader::new(group.children[0].stdout.take().unwrap());
    stdout.read_line(&mut line).unwrap();
    group.children[0].stdout = Some(stdout.into_inner());
    let ready: Value = serde_json::from_str(&line).unwrap_or_else(|e| panic!("{e}: {line:?}"));
    let address = ready["url"].as_str().unwrap().strip_prefix("http://").unwrap().to_owned();
    TestClient { address }
}

pub fn signal(group: &LaunchedGroup, name: &str, ranks: &[usize]) {
    for &rank in ranks {
        let id = group.children[rank].id().to_string();
        assert!(Command::new("kill").args([name, &id]).status().unwrap().success());
    }
}

/// A text that goes on, of which there is a piece.
pub fn begin(client: &TestClient, tokens: u64) -> (impl BufRead + use<>, String) {
    let body =
        serde_json::json!({"prompt": "The sea", "max_tokens": tokens, "stream": true, "ignore_eos": true});
    let mut stream = client.open("POST", "/v1/completions", "", &body.to_string());
    let mut text = String::new();
    while !text.contains("data: ") {
        assert!(stream.read_line(&mut text).unwrap() > 0);
    }
    (stream, text)
}

#[test]
fn texts_come_to_their_end_on_all_ranks() {
    let folder = tempfile::tempdir().unwrap();
    let Some(plugin) = plugin(folder.path(), 1) else { return };
    let (group, client) = serve(&plugin, &["--drain-timeout", "600"]);
    let (mut stream, mut text) = begin(&client, 120);
    signal(&group, "-TERM", &[1, 0]);
    stream.read_to_string(&mut text).unwrap();
    assert!(text.contains("\"finish_reason\":\"length\"") && text.contains("[DONE]"), "{text}");
    let (outputs, _) = group.wait();
    for output in &outputs {
        assert_eq!(output.status.code(), Some(0), "{}", stderr(output));
    }
}

#[test]
fn a_rank_that_is_killed_while_texts_end_ends_all() {
    let folder = tempfile::tempdir().unwrap();
    let Some(plugin) = plugin(folder.path(), 1) else { return };
    let (group, client) = serve(&plugin, &["--drain-timeout", "600"]);
    let (_stream, _) = begin(&client, 1_000_000);
    signal(&group, "-TERM", &[0, 1]);
    signal(&group, "-KILL", &[1]);
    let killed = Instant::now();
    let (outputs, _) = group.wait();
    assert!(killed.elapsed() < Duration::from_secs(10), "it ended after {:?}", killed.elapsed());
    assert_eq!(outputs[0].status.code(), Some(1), "{}", stderr(&outputs[0]));
    assert!(stderr(&outputs[0]).contains("All ranks end"), "{}", stderr(&outputs[0]));
}

/// A byte less than `inspect --resources` says for all ranks: none of them serves.
#[test]
fn ranks_without_memory_for_the_plan_do_not_serve() {
    let folder = tempfile::tempdir().unwrap();
    let Some(plugin) = plugin(folder.path(), 1) else { return };
    let mut inspect = mlcc();
    inspect.arg("inspect").arg(split()).args(["--resources", "--json", "--sequences", "3"]);
    let need = json(&mut inspect)["need_bytes"].as_u64().unwrap();
    let flags = |memory: u64| ["--sequences", "3", "--memory", &memory.to_string()].map(str::to_owned);
    let (less, enough) = (flags(need - 1), flags(need));
    let (outputs, _) = start(&plugin, &less.each_ref().map(String::as_str)).wait();
    let told = stderr(&outputs[0]);
    assert!(told.contains("3 sequences of") && told.contains("--memory less"), "{told}");
    // The other one learns that there is nothing to do.
    assert_eq!([0, 1].map(|rank: usize| outputs[rank].status.code()), [Some(1), Some(0)], "{told}");
    // Threads of one process have the same sum.
    let mut alone = mlcc();
    alone.arg("serve").arg(split()).args(["--port", "0", "-t", "2"]).args(&less);
    assert!(failure(&mut alone, 1).contains("3 sequences of"));
    let (group, client) = serve(&plugin, &enough.each_ref().map(String::as_str));
    assert_eq!(client.get("/health").status, 200);
    signal(&group, "-TERM", &[1, 0]);
    for output in group.wait().0 {
        assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
    }
}
