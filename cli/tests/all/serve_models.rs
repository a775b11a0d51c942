//! Several artifacts in one `mlcc serve`: they share their workers, and come and go while texts run.

use std::io::{BufRead, Read};

use serde_json::{Value, json};

use crate::program::{books, case, copy_of, failure, mlcc};
use crate::server::{ServerProcess, artifact};

fn completion(model: &str) -> Value {
    json!({"model": model, "prompt": "It was a dark and", "max_tokens": 8, "temperature": 0})
}

#[test]
fn several_artifacts_share_workers_and_are_swapped() {
    let folder = tempfile::tempdir().unwrap();
    let whole = std::fs::read(artifact()).unwrap();
    let file = |name: &str| folder.path().join(name);
    std::fs::write(file("second.so"), &whole).unwrap();
    std::fs::write(file("broken.so"), &whole[..whole.len() / 2]).unwrap();
    let models = folder.path().to_str().unwrap();
    let server = ServerProcess::of(
        &[artifact(), &file("second.so")],
        &["--alias", "books", "-t", "2", "--models", models, "--sequences", "2"],
    );
    assert_eq!(server.ready["models"], json!(["books", "second"]));
    // A text has gone through each, so that all threads have their names.
    let text = server.ask("/v1/completions", &completion("books"))["choices"].clone();
    assert_eq!(server.ask("/v1/completions", &completion("second"))["choices"], text);
    assert_eq!(server.threads("mlcc-worker"), 1, "one pool of two workers, of which the caller is one");
    assert_eq!(server.threads("mlcc-engine"), 2);
    let listed = server.get("/v1/models").json();
    let text_of = |value: &Value| value.as_str().unwrap().to_owned();
    let entry = |model: &Value| format!("{} {}", text_of(&model["id"]), text_of(&model["status"]["value"]));
    let list: Vec<String> = listed["data"].as_array().unwrap().iter().map(entry).collect();
    assert_eq!(list, ["books loaded", "second loaded", "broken unloaded"]);

    // A text of the old model goes on while the file is replaced and loaded anew.
    let long = json!({"model": "second", "prompt": "She", "max_tokens": 200, "seed": 1, "ignore_eos": true, "stream": true});
    let mut stream = server.open("POST", "/v1/completions", "", &long.to_string());
    let mut line = String::new();
    while !line.starts_with("data: ") {
        line.clear();
        assert!(stream.read_line(&mut line).unwrap() > 0);
    }
    std::fs::write(file("next"), &whole).unwrap();
    std::fs::rename(file("next"), file("second.so")).unwrap();
    server.ask("/models/load", &json!({"model": "second"}));
    assert_eq!(server.ask("/v1/completions", &completion("second"))["choices"], text);
    let mut rest = String::new();
    stream.read_to_string(&mut rest).unwrap();
    assert!(rest.contains("\"finish_reason\":\"length\"") && rest.contains("[DONE]"), "{rest:.300}");

    let refused = server.post("/models/load", &json!({"model": "second", "artifact": "broken"}));
    assert_eq!(refused.error(), (422, "invalid_artifact".into(), "model".into()));
    assert!(refused.body.contains("broken.so"), "{}", refused.body);
    assert_eq!(server.ask("/v1/completions", &completion("second"))["choices"], text);
    server.ask("/models/unload", &json!({"model": "books"}));
    assert_eq!(server.post("/v1/completions", &completion("books")).status, 404);
    assert_eq!(server.threads("mlcc-worker"), 1);
}

/// An artifact without a tokenizer (of an encoder, of random weights) has no texts; the others have.
#[test]
fn an_artifact_without_a_tokenizer_stops_no_other() {
    let folder = tempfile::tempdir().unwrap();
    let bare = folder.path().join("bare.so");
    mlcc()
        .arg("build")
        .arg("-m")
        .arg(case("t5"))
        .args(["--quant", "f32", "-o"])
        .arg(&bare)
        .assert()
        .success();
    for order in [[&bare, artifact()], [artifact(), &bare]] {
        let server = ServerProcess::of(&order, &["-t", "1"]);
        assert_eq!(server.ready["models"].as_array().unwrap().len(), 1);
        let answer = server.ask("/v1/completions", &json!({"prompt": "She", "max_tokens": 2}));
        assert_eq!(answer["usage"]["completion_tokens"], 2, "{answer}");
    }
    let alone = failure(mlcc().arg("serve").arg(&bare).args(["--port", "0"]), 1);
    assert!(alone.contains("contains no tokenizer"), "{alone}");
}

#[test]
fn names_that_are_taken_twice() {
    let twice = failure(mlcc().arg("serve").args([artifact(), artifact()]), 2);
    assert!(twice.contains("--alias"), "{twice}");
    let many = failure(mlcc().arg("serve").arg(artifact()).args(["--alias", "a", "--alias", "b"]), 2);
    assert!(many.contains("2 times --alias"), "{many}");
}

#[test]
fn a_checkpoint_is_built_once_and_run() {
    let (cache, checkpoint) = (tempfile::tempdir().unwrap(), copy_of(&books()));
    let run = || {
        let mut run = mlcc();
        run.env("MLCC_CACHE_DIR", cache.path()).arg("run").arg(checkpoint.path());
        run.args(["--quant", "q4i8", "-p", "She", "-n", "4", "--temp", "0", "--no-echo", "-t", "1"]);
        let output = run.assert().success().get_output().clone();
        (String::from_utf8(output.stdout).unwrap(), String::from_utf8(output.stderr).unwrap())
    };
    let artifacts = || {
        let files = std::fs::read_dir(cache.path().join("artifacts")).unwrap();
        files.map(|file| file.unwrap().file_name()).collect::<Vec<_>>()
    };
    let (text, told) = run();
    assert!(told.contains("built first"), "{told}");
    let built = artifacts();
    let (again, told) = run();
    assert_eq!((&again, told.contains("built first"), artifacts()), (&text, false, built.clone()));
    let mut chat = mlcc();
    chat.env("MLCC_CACHE_DIR", cache.path())
        .arg("chat")
        .arg(checkpoint.path())
        .args(["--quant", "q4i8", "-t", "1"]);
    chat.args(["--template", "plain", "-n", "4"]).write_stdin("She\n").assert().success();
    assert_eq!(artifacts(), built, "chat takes what run has built");
    // Every command that takes an artifact takes that of a checkpoint, and has the model's name in what it
    // says.
    let text = cache.path().join("text.txt").display().to_string();
    std::fs::write(&text, "The sea was calm. ".repeat(80)).unwrap();
    let golden = books().join("golden.json").display().to_string();
    for flags in [
        &["inspect", "--json"][..],
        &["eval", "--text", &text, "--windows", "1", "-t", "1"],
        &["bench", "-p", "16", "-n", "4", "-r", "1", "--warm-up", "0", "-t", "1"],
        &["verify", "--golden", &golden, "-t", "1"],
    ] {
        let mut other = mlcc();
        other
            .env("MLCC_CACHE_DIR", cache.path())
            .args(flags)
            .arg(checkpoint.path())
            .args(["--quant", "q4i8"]);
        other.assert().success();
        assert_eq!(artifacts(), built, "{} takes what run has built", flags[0]);
    }
    // Another checkpoint in the same place.
    let config = checkpoint.path().join("generation_config.json");
    std::fs::write(&config, "{\"temperature\": 0.5}").unwrap();
    let (_, told) = run();
    assert!(told.contains("built first"), "{told}");
    assert!(artifacts().len() == 1 && artifacts() != built, "{:?}", artifacts());
    let mut without = mlcc();
    without.env("MLCC_CACHE_DIR", "").arg("run").arg(checkpoint.path()).args(["-p", "a"]);
    let none = failure(&mut without, 1);
    assert!(none.contains("MLCC_CACHE_DIR"), "{none}");
    let artifact = failure(mlcc().arg("run").arg(artifact()).args(["-p", "a", "--quant", "q4i8"]), 2);
    assert!(artifact.contains("--quant"), "{artifact}");
}
