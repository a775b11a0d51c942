//! A server whose ranks are processes, when it ends: launchers send SIGTERM to all of them.

use std::io::{BufRead, BufReader, Read};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use crate::http::Client;
use crate::program::{books, mlcc};
use crate::rank_processes::{Group, plugin, stderr};

fn split() -> &'static Path {
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

/// Two processes that serve, and where.
fn serve(plugin: &Path, flags: &[&str]) -> (Group, Client) {
    let first = ["serve", split().to_str().unwrap(), "--port", "0", "--json", "-t", "1"];
    let arguments = [&first[..], flags].concat();
    let mut group = Group::start_with(plugin, &[&arguments[..]; 2], None, &|_| Vec::new());
    let mut line = String::new();
    let mut stdout = BufReader::new(group.children[0].stdout.take().unwrap());
    stdout.read_line(&mut line).unwrap();
    group.children[0].stdout = Some(stdout.into_inner());
    let ready: Value = serde_json::from_str(&line).unwrap_or_else(|e| panic!("{e}: {line:?}"));
    let address = ready["url"].as_str().unwrap().strip_prefix("http://").unwrap().to_owned();
    (group, Client { address })
}

fn signal(group: &Group, name: &str, ranks: &[usize]) {
    for &rank in ranks {
        let id = group.children[rank].id().to_string();
        assert!(Command::new("kill").args([name, &id]).status().unwrap().success());
    }
}

/// A text that goes on, of which there is a piece.
fn begin(client: &Client, tokens: u64) -> (impl BufRead + use<>, String) {
    let body = json!({"prompt": "The sea", "max_tokens": tokens, "stream": true, "ignore_eos": true});
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
