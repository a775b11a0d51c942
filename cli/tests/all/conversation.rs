//! From a name to an answer: what `run` and its neighbours download, build and keep, and how it leaves again.
#![cfg(feature = "hub")]

use std::path::{Path, PathBuf};

use assert_cmd::Command;

use crate::fake_hub::{COMMIT, FakeHub, HubLies, at_home};
use crate::program::{self, books, copy_of, fails_with, failure, json, mlcc, text};

/// The trained model as a repository: all of its files that a build reads.
fn hub_of_books() -> FakeHub {
    let mut hub = FakeHub::of(&books());
    for name in ["tokenizer.json", "generation_config.json", "rwkv_vocab_v20230424.txt"] {
        if let Ok(bytes) = std::fs::read(books().join(name)) {
            hub.files.insert(name.to_owned(), bytes);
        }
    }
    hub
}

fn at(endpoint: &str, home: &Path, args: &[&str]) -> Command {
    let mut command = mlcc();
    command.args(args).env("MLCC_CACHE_DIR", home.join("cache"));
    at_home(&mut command, endpoint, home);
    command
}

fn artifacts(home: &Path) -> Vec<PathBuf> {
    let entries = std::fs::read_dir(home.join("cache/artifacts")).into_iter().flatten();
    entries.map(|entry| entry.unwrap().path()).collect()
}

const NONE: [PathBuf; 0] = [];
const RUN: [&str; 8] = ["-p", "She", "-n", "4", "--temp", "0", "-t", "1"];

#[test]
fn a_name_is_enough_for_an_answer_and_is_removed_again() {
    let hub = hub_of_books();
    let (requests, endpoint) = (hub.requests.clone(), hub.serve());
    let home = tempfile::tempdir().unwrap();
    let run = |name: &str| {
        let out =
            at(&endpoint, home.path(), &["run", name]).args(RUN).assert().success().get_output().clone();
        (String::from_utf8(out.stdout).unwrap(), String::from_utf8(out.stderr).unwrap())
    };
    let (answer, told) = run("hf:org/tiny");
    for part in ["download org/tiny: 1 file, ", "hf:org/tiny is a checkpoint", "built first"] {
        assert!(told.contains(part), "`{part}` is not in: {told}");
    }
    let asked = requests.lock().unwrap().len();
    let (again, told) = run("hf:org/tiny");
    assert_eq!(
        (&again, told.contains("built first"), requests.lock().unwrap().len()),
        (&answer, false, asked)
    );
    // Every command takes the name, and the same artifact.
    let whole = json(&mut at(&endpoint, home.path(), &["inspect", "hf:org/tiny", "--json"]));
    assert_eq!(whole["metadata"]["source"]["commit"], COMMIT);
    assert_eq!(whole["metadata"]["model"]["name"], "tiny");
    let mut chat = at(&endpoint, home.path(), &["chat", "hf:org/tiny", "-n", "4", "-t", "1"]);
    chat.args(["--template", "plain"]).write_stdin("She\n").assert().success();
    assert_eq!(artifacts(home.path()).len(), 1);
    // The list has both, with sizes.
    let list = json(&mut at(&endpoint, home.path(), &["list", "--json"]));
    let kinds: Vec<_> =
        list.as_array().unwrap().iter().map(|model| (&model["name"], &model["kind"])).collect();
    assert_eq!(
        serde_json::json!(kinds),
        serde_json::json!([["hf:org/tiny", "checkpoint"], ["tiny", "artifact"]])
    );
    assert!(
        list.as_array().unwrap().iter().all(|model| model["bytes"].as_u64().unwrap() > 100_000),
        "{list}"
    );
    let table = text(&mut at(&endpoint, home.path(), &["list"]));
    assert!(table.contains("last use") && table.contains("hf:org/tiny"), "{table}");
    let doctor = text(&mut at(&endpoint, home.path(), &["doctor"]));
    assert!(doctor.contains("1 artifact, "), "{doctor}");
    // Pull asks for the newest commit, and has nothing to fetch.
    let folder = text(&mut at(&endpoint, home.path(), &["pull", "hf:org/tiny"]));
    assert!(folder.trim_end().ends_with(COMMIT), "{folder}");
    at(&endpoint, home.path(), &["rm", "hf:org/tiny"]).assert().success();
    assert_eq!(artifacts(home.path()), NONE);
    assert_eq!(json(&mut at(&endpoint, home.path(), &["list", "--json"])), serde_json::json!([]));
    fails_with(&mut at(&endpoint, home.path(), &["rm", "hf:org/tiny"]), &["not in the caches", "mlcc list"]);
}

#[test]
fn only_what_lies_in_the_caches_is_removed() {
    let home = tempfile::tempdir().unwrap();
    let checkpoint = copy_of(&books());
    let endpoint = "http://127.0.0.1:1";
    let path = checkpoint.path().to_str().unwrap();
    at(endpoint, home.path(), &["run", path]).args(RUN).assert().success();
    let [artifact] = &artifacts(home.path())[..] else { panic!() };
    // Another path to it, a folder around it, and files of the user.
    let around = home.path().join("cache/artifacts/../artifacts").join(artifact.file_name().unwrap());
    let mine = home.path().join("mine.so");
    std::fs::write(&mine, b"mine").unwrap();
    for path in [&around, &home.path().join("cache"), &home.path().join("cache/artifacts"), &mine] {
        fails_with(&mut at(endpoint, home.path(), &["rm", path.to_str().unwrap()]), &["nothing was removed"]);
    }
    assert!(artifact.exists() && mine.exists());
    at(endpoint, home.path(), &["rm", path]).assert().success();
    assert!(!artifact.exists() && checkpoint.path().join("config.json").exists());
}

#[test]
fn artifacts_leave_when_there_is_no_room_and_when_the_compiler_changed() {
    let home = tempfile::tempdir().unwrap();
    let endpoint = "http://127.0.0.1:1";
    let books = books();
    let books = books.to_str().unwrap();
    at(endpoint, home.path(), &["run", books]).args(RUN).assert().success();
    // An artifact of an earlier version of mlcc: another content of the same request.
    let [artifact] = &artifacts(home.path())[..] else { panic!() };
    let name = artifact.file_name().unwrap().to_str().unwrap().to_owned();
    let (start, _) = name.rsplit_once('-').unwrap();
    let old = artifact.with_file_name(format!("{start}-0123456789abcdef.so"));
    std::fs::rename(artifact, &old).unwrap();
    at(endpoint, home.path(), &["run", books]).args(RUN).assert().success();
    assert_eq!(artifacts(home.path()), std::slice::from_ref(artifact));
    let mut other = at(endpoint, home.path(), &["run", books, "--quant", "q8i8"]);
    other.args(RUN).env("MLCC_CACHE_LIMIT", "1kB").assert().success();
    let left = artifacts(home.path());
    assert!(left.len() == 1 && left[0] != *artifact, "{left:?}");
    let mut wrong = at(endpoint, home.path(), &["prune"]);
    assert!(failure(wrong.env("MLCC_CACHE_LIMIT", "much"), 2).contains("MLCC_CACHE_LIMIT"));
    at(endpoint, home.path(), &["prune"]).assert().success();
    assert_eq!(artifacts(home.path()), left);
    at(endpoint, home.path(), &["prune", "--limit", "0"]).assert().success();
    assert_eq!(artifacts(home.path()), NONE);
}

#[test]
fn what_cannot_come_or_has_no_room_says_so() {
    let home = tempfile::tempdir().unwrap();
    let fails = |endpoint: &str, name: &str, parts: &[&str]| {
        fails_with(at(endpoint, home.path(), &["run", name]).args(RUN), parts);
        assert_eq!(artifacts(home.path()), NONE);
    };
    // Nobody listens there.
    let nobody = "http://127.0.0.1:1";
    let offline =
        ["cannot download org/tiny", "Without a network: run `mlcc pull hf:org/tiny`", "HF_HUB_OFFLINE=1"];
    fails(nobody, "hf:org/tiny", &offline);
    fails(nobody, "qwen3-06b", &["did you mean `qwen3-0.6b`"]);
    fails(nobody, "org/tiny", &["no directory or file of that name", "hf:org/tiny"]);
    let mut off = at(nobody, home.path(), &["run", "qwen3-0.6b", "-p", "a"]);
    fails_with(off.env("HF_HUB_OFFLINE", "1"), &["there are no weights", "hf download Qwen/Qwen3-0.6B"]);
    let gated = FakeHub { token: Some("secret"), ..hub_of_books() }.serve();
    fails(&gated, "hf:org/tiny", &["401", "HF_TOKEN", &format!("accept their terms on {gated}/org/tiny")]);
    // Larger than any disk.
    let lies = HubLies { size: Some(usize::MAX / 2), ..HubLies::default() };
    let mut hub = FakeHub { lies, ..hub_of_books() };
    hub.files.retain(|name, _| name.ends_with(".safetensors"));
    fails(&hub.serve(), "hf:org/tiny", &["org/tiny is not downloaded", "of disk", "mlcc prune"]);
    // Larger than any memory, which config.json tells before the weights come.
    let mut hub = hub_of_books();
    let config = serde_json::json!({
        "model_type": "llama", "hidden_size": 65536, "intermediate_size": 262_144, "num_hidden_layers": 400,
        "num_attention_heads": 512, "num_key_value_heads": 512, "vocab_size": 256_000, "rms_norm_eps": 1e-5,
    });
    hub.files.insert("config.json".to_owned(), config.to_string().into_bytes());
    let requests = hub.requests.clone();
    let (mut run, endpoint) = (mlcc(), hub.serve());
    run.args(["run", "hf:org/tiny", "--quant", "q4i8"])
        .args(RUN)
        .env("MLCC_CACHE_DIR", home.path().join("cache"));
    let other = tempfile::tempdir().unwrap();
    at_home(&mut run, &endpoint, other.path());
    fails_with(&mut run, &["org/tiny is not downloaded", "of memory as q4i8", "would fit"]);
    let weights = |request: &&String| request.contains("safetensors") && !request.contains("bytes=0-0");
    assert!(!requests.lock().unwrap().iter().any(|request| weights(&request)));
}

#[test]
fn files_of_addresses_come_once_and_go_on_where_they_stopped() {
    let mut hub = FakeHub { breaks_after: Some(5000), ..FakeHub::default() };
    hub.files.insert("tiny.so".to_owned(), std::fs::read(program::artifact()).unwrap());
    let (requests, endpoint) = (hub.requests.clone(), hub.serve());
    let home = tempfile::tempdir().unwrap();
    let address = format!("{endpoint}/org/tiny/resolve/{COMMIT}/tiny.so");
    let answer = text(at(&endpoint, home.path(), &["run", &address]).args(RUN));
    let asked = requests.lock().unwrap().len();
    assert!(requests.lock().unwrap().iter().any(|request| request.contains("bytes=5000-")));
    assert_eq!(text(at(&endpoint, home.path(), &["run", &address]).args(RUN)), answer);
    assert_eq!(requests.lock().unwrap().len(), asked);
    let list = json(&mut at(&endpoint, home.path(), &["list", "--json"]));
    assert_eq!((&list[0]["name"], &list[0]["kind"]), (&"tiny.so".into(), &"download".into()));
    at(&endpoint, home.path(), &["rm", &address]).assert().success();
    assert_eq!(json(&mut at(&endpoint, home.path(), &["list", "--json"])), serde_json::json!([]));
    let zip = format!("{endpoint}/x.zip");
    fails_with(at(&endpoint, home.path(), &["run", &zip]).args(RUN), &["a .gguf or .so file"]);
    let missing = format!("{endpoint}/x.gguf");
    fails_with(at(&endpoint, home.path(), &["run", &missing]).args(RUN), &["404", "no such file"]);
}

#[test]
fn two_at_once_download_and_build_once() {
    let hub = hub_of_books();
    let (requests, endpoint) = (hub.requests.clone(), hub.serve());
    let home = tempfile::tempdir().unwrap();
    let answers: Vec<String> = std::thread::scope(|scope| {
        let run = || text(at(&endpoint, home.path(), &["run", "hf:org/tiny"]).args(RUN));
        let both = [scope.spawn(run), scope.spawn(run)];
        both.map(|thread| thread.join().unwrap()).into()
    });
    assert_eq!(answers[0], answers[1]);
    assert_eq!(artifacts(home.path()).len(), 1);
    let weights = |request: &&String| request.ends_with("model.safetensors bytes=0-");
    assert_eq!(requests.lock().unwrap().iter().filter(|request| weights(request)).count(), 1);
}
