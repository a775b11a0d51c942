//! Downloads, from a server on this machine that speaks as much of the Hugging Face hub as a client asks for.
#![cfg(feature = "hub")]

use std::path::Path;

use crate::fake_hub::{COMMIT, FakeHub, HubLies, at_home};
use crate::program::{self, artifacts_in, fails_with, json, mlcc};

fn build(endpoint: &str, home: &Path) -> assert_cmd::Command {
    let mut command = mlcc();
    command.args(["build", "-m", "hf:org/tiny", "--quant", "f32", "--no-report"]);
    at_home(&mut command, endpoint, home);
    command
}

#[test]
fn what_the_cache_has_not_is_downloaded_once_and_pinned() {
    let hub = FakeHub::of(&program::case("rwkv4-hf-odd"));
    let (requests, endpoint) = (hub.requests.clone(), hub.serve());
    let home = tempfile::tempdir().unwrap();
    build(&endpoint, home.path()).assert().success();
    let asked = requests.lock().unwrap().len();
    assert!(asked > 0);
    // Again, and without a network: nothing is asked for.
    build(&endpoint, home.path()).args(["-o", "again.so"]).assert().success();
    build(&endpoint, home.path()).args(["--offline", "-o", "offline.so"]).assert().success();
    assert_eq!(requests.lock().unwrap().len(), asked);
    let metadata = json(mlcc().args(["inspect", "again.so", "--json"]).current_dir(home.path()));
    assert_eq!(metadata["metadata"]["source"]["repository"], "org/tiny");
    assert_eq!(metadata["metadata"]["source"]["commit"], COMMIT);
    // The same weights as from the folder.
    let case = program::case("rwkv4-hf-odd");
    let golden = case.join("golden.json");
    mlcc()
        .arg("verify")
        .arg("again.so")
        .arg("--golden")
        .arg(golden)
        .current_dir(home.path())
        .assert()
        .success();
}

#[test]
fn a_transfer_that_breaks_off_goes_on_where_it_stopped() {
    let hub = FakeHub { breaks_after: Some(5000), ..FakeHub::of(&program::case("rwkv4-hf-odd")) };
    let (requests, endpoint) = (hub.requests.clone(), hub.serve());
    let home = tempfile::tempdir().unwrap();
    build(&endpoint, home.path()).assert().success();
    let requests = requests.lock().unwrap();
    let later = |r: &&String| r.contains("model.safetensors bytes=") && !r.contains("bytes=0-");
    assert!(requests.iter().any(|r| later(&r)), "{requests:?}");
}

#[test]
fn tokens_are_sent_and_their_absence_is_explained() {
    let hub = FakeHub { token: Some("hf_secret"), ..FakeHub::of(&program::case("rwkv4-hf-odd")) };
    let endpoint = hub.serve();
    let home = tempfile::tempdir().unwrap();
    fails_with(&mut build(&endpoint, home.path()), &["cannot download org/tiny", "401", "HF_TOKEN"]);
    assert!(artifacts_in(home.path()).is_empty());
    build(&endpoint, home.path()).env("HF_TOKEN", "hf_secret").assert().success();
}

#[test]
fn nothing_is_asked_for_offline_or_for_a_path() {
    let hub = FakeHub::of(&program::case("rwkv4-hf-odd"));
    let (requests, endpoint) = (hub.requests.clone(), hub.serve());
    let home = tempfile::tempdir().unwrap();
    fails_with(
        build(&endpoint, home.path()).arg("--offline"),
        &["not in the Hugging Face cache", "--offline"],
    );
    fails_with(build(&endpoint, home.path()).env("HF_HUB_OFFLINE", "1"), &["not in the Hugging Face cache"]);
    let mut path = mlcc();
    path.args(["build", "-m", "org/tiny"]).current_dir(home.path());
    path.env("HF_HOME", home.path()).env("HF_ENDPOINT", &endpoint).env_remove("HF_HUB_OFFLINE");
    fails_with(&mut path, &["no directory or file of that name", "hf:org/tiny"]);
    assert!(requests.lock().unwrap().is_empty());
}

#[test]
fn a_repository_that_is_not_there_is_named() {
    let endpoint = FakeHub::default().serve();
    let home = tempfile::tempdir().unwrap();
    let mut command = mlcc();
    command
        .args(["build", "-m", "hf:org/other"])
        .env("HF_HOME", home.path())
        .env("HF_ENDPOINT", &endpoint)
        .env_remove("HF_HUB_OFFLINE");
    fails_with(&mut command, &["cannot download org/other", "404", "no such repository"]);
}

/// Paths of all files below a folder, relative to it.
fn files_below(folder: &Path) -> Vec<String> {
    let mut found = Vec::new();
    let mut folders = vec![folder.to_path_buf()];
    while let Some(next) = folders.pop() {
        for entry in std::fs::read_dir(next).unwrap().map(Result::unwrap) {
            match entry.file_type().unwrap().is_dir() {
                true => folders.push(entry.path()),
                false => found.push(entry.path().strip_prefix(folder).unwrap().display().to_string()),
            }
        }
    }
    found
}

#[test]
fn nothing_that_a_hub_says_leads_out_of_the_cache() {
    let home = tempfile::tempdir().unwrap();
    let (cache, outside) =
        ("deep/er/hf/hub/models--org--tiny/", home.path().join("outside").display().to_string());
    let up = "../../../../../../../outside".to_string();
    let sha = |text: &str| HubLies { sha: Some(text.to_string()), ..HubLies::default() };
    let commit = |text: &str| HubLies { commit: Some(text.to_string()), ..HubLies::default() };
    let etag = |text: &str| HubLies { etag: Some(text.to_string()), ..HubLies::default() };
    let location = |text: &str| HubLies { location: Some(text.to_string()), ..HubLies::default() };
    let cases = [
        (sha(&up), "sha"),
        (sha(&outside), "sha"),
        (sha(""), "sha"),
        (commit(&up), "X-Repo-Commit"),
        (commit(&outside), "X-Repo-Commit"),
        (commit(&"a".repeat(40)), "X-Repo-Commit"),
        (etag(&format!("\"{up}\"")), "ETag"),
        (etag(&format!("W/\"{outside}\"")), "ETag"),
        (etag(&outside), "ETag"),
        (etag("\"..\""), "ETag"),
        (etag("\"\""), "ETag"),
        (location(&format!("file://{outside}")), "Location"),
        (location("//127.0.0.1:1/x"), "Location"),
        // To itself, for ever.
        (location(&format!("/org/tiny/resolve/{COMMIT}/config.json")), "Location"),
    ];
    for (lies, field) in cases {
        let endpoint = FakeHub { lies, ..FakeHub::of(&program::case("rwkv4-hf-odd")) }.serve();
        let mut command = build(&endpoint, home.path());
        fails_with(
            command.env("HF_HOME", home.path().join("deep/er/hf")),
            &["org/tiny", field, "HF_ENDPOINT"],
        );
        let written = files_below(home.path());
        assert!(written.iter().all(|path| path.starts_with(cache)), "{field}: {written:?}");
    }
}

#[test]
fn listed_files_of_other_folders_are_left_alone() {
    let home = tempfile::tempdir().unwrap();
    let outside = home.path().join("outside.safetensors").display().to_string();
    let names =
        [&outside, "../../../../../../../outside.json", "x/../../outside.safetensors", ".safetensors"];
    let lies = HubLies { names: names.map(str::to_string).into(), ..HubLies::default() };
    let endpoint = FakeHub { lies, ..FakeHub::of(&program::case("rwkv4-hf-odd")) }.serve();
    build(&endpoint, home.path()).args(["-o", "tiny.so"]).assert().success();
    let written = files_below(home.path());
    let expected = |path: &String| path == "tiny.so" || path.starts_with("hf/hub/models--org--tiny/");
    assert!(written.iter().all(expected), "{written:?}");
}

#[test]
fn damaged_files_are_not_kept() {
    // The hub names large files by their SHA-256.
    let lies = HubLies { etag: Some(format!("\"{}\"", "ab".repeat(32))), ..HubLies::default() };
    let endpoint = FakeHub { lies, ..FakeHub::of(&program::case("rwkv4-hf-odd")) }.serve();
    let home = tempfile::tempdir().unwrap();
    fails_with(&mut build(&endpoint, home.path()), &["cannot download org/tiny", "SHA-256", "were removed"]);
    assert_eq!(files_below(home.path()), [""; 0]);
}

#[test]
fn no_more_is_written_than_the_size_told() {
    let lies = HubLies { size: Some(10), ..HubLies::default() };
    let endpoint = FakeHub { lies, ..FakeHub::of(&program::case("rwkv4-hf-odd")) }.serve();
    let home = tempfile::tempdir().unwrap();
    build(&endpoint, home.path()).assert().failure();
    let blobs = home.path().join("hf/hub/models--org--tiny/blobs");
    for blob in std::fs::read_dir(blobs).unwrap() {
        assert_eq!(blob.unwrap().metadata().unwrap().len(), 10);
    }
}
