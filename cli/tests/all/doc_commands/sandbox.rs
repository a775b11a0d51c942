//! The folders in which commands of the pages run: with small models under the names that pages use, and
//! stand-ins for the programs that serve, measure or build for long.

use std::fs;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::{Path, PathBuf};
use std::process::Command;

use serde_json::{Value, json};
use tempfile::TempDir;

use crate::cases::objects;
use crate::program::{case, mlcc, workspace};

/// Folders of the repository that commands name.
const SHARED: [&str; 7] = ["assets", "cli", "compiler", "docs", "runtime", "tests", "tools"];

/// Names of checkpoints.
const CHECKPOINTS: [&str; 9] = [
    "path/to/checkpoint",
    "PATH",
    "DIR",
    "BASE",
    "TinyLlama",
    "tinyllama-1.1b",
    "qwen3-0.6b",
    "rwkv-3b",
    "models/checkpoint",
];

/// Names of adapters.
const ADAPTERS: [&str; 8] = [
    "ADAPTER",
    "style",
    "task",
    "path/to/style",
    "path/to/task",
    "path/to/adapter",
    "path/to/other",
    "path/to/adapters/style",
];

/// Names of artifacts, with the flags that they are built with.
const ARTIFACTS: [(&str, &[&str]); 9] = [
    ("model.so", &["--quant", "q4i8", "--batch-invariant"]),
    ("base.so", &["--lora-slots", "4"]),
    ("model-tp2.so", &["--tensor-parallel", "2"]),
    ("chat.so", &[]),
    ("small.so", &[]),
    ("other.so", &[]),
    ("taps.so", &["--debug-taps", "--quant", "f32"]),
    ("path/to/artifacts/other.so", &[]),
    ("path/to/artifacts/chat-2.so", &[]),
];

/// Texts that commands read.
const TEXTS: [&str; 8] = [
    "prompt.txt",
    "code.py",
    "long-document.txt",
    "valid.txt",
    "held-out.txt",
    "text.txt",
    "lines.txt",
    "documents.txt",
];

/// Other files that commands read.
const FILES: [(&str, &str); 3] = [
    ("policy.toml", "[[rule]]\nmatch = \"*.weight\"\nformat = \"q8g32\"\n"),
    (
        "person.json",
        r#"{"type": "object", "properties": {"name": {"type": "string", "maxLength": 8}}, "required": ["name"]}"#,
    ),
    ("answer.lark", "start: \"yes\" | \"no\"\n"),
];

/// Repositories that are in the cache of Hugging Face, with their cases.
const REPOSITORIES: [(&str, &str); 4] = [
    ("TinyLlama/TinyLlama-1.1B-Chat-v1.0", ""),
    ("BAAI/bge-m3", "embed-bert"),
    ("BAAI/bge-reranker-v2-m3", "rerank-xlmr"),
    ("google/flan-t5-base", "t5"),
];

/// The chat template of [`checkpoint`].
const TEMPLATE: &str = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant:";

/// `mlcc` with models that are small and texts that are short; a server runs on in the background.
const MLCC: &str = r#"#!/usr/bin/env bash
case " $* " in
*" --backend "* | *cuda* | *sm_*) ;;
*) export MLCC_BACKEND=@BACKEND@ ;;
esac
case "$1" in run | chat | serve) export MLCC_CACHE_DIR=@CACHE@ ;; esac
case "$1" in
bench)
  # Once: what is printed is not looked at.
  words=()
  while [ $# -gt 0 ]; do
    if [ "$1" = -r ]; then shift 2; else words+=("$1"); shift; fi
  done
  exec @MLCC@ "${words[@]}" -r 1 --warm-up 0.1
  ;;
chat) exec @MLCC@ "$@" -n 8 ;;
serve)
  for old in server-*; do [ -e "$old" ] && kill "${old#server-}" && rm "$old"; done
  rm -f ready; mkfifo ready
  @MLCC@ "$@" --port 0 --json >ready 2>server.log &
  touch "server-$!"
  read -r line <ready || { cat server.log >&2; exit 1; }
  sed -E 's/.*127\.0\.0\.1:([0-9]+).*/\1/' <<<"$line" >port
  ;;
*) exec @MLCC@ "$@" ;;
esac
"#;

/// `curl` to the server that was started last; an error of it is one of the command.
const CURL: &str = r#"#!/usr/bin/env bash
PATH=${PATH#*:}
exec curl -sS --fail-with-body "${@/:8080/:$(cat port)}"
"#;

/// Commands for `cargo` are written down and checked ([`CommandSandbox::check_cargo`]).
const CARGO: &str = r#"#!/usr/bin/env bash
printf '%s ' "$@" >>@LOG@; echo >>@LOG@
"#;

pub struct CommandSandbox {
    folder: TempDir,
}

impl CommandSandbox {
    pub fn new() -> CommandSandbox {
        let sandbox = CommandSandbox { folder: tempfile::tempdir().unwrap() };
        let root = sandbox.folder.path();
        fs::create_dir(root.join("bin")).unwrap();
        let program = assert_cmd::cargo::cargo_bin!("mlcc").display().to_string();
        let backend = if cfg!(feature = "cranelift") { "cranelift" } else { "llvm" };
        let cache = root.join("cache").display().to_string();
        let stand_in = MLCC.replace("@MLCC@", &program).replace("@BACKEND@", backend);
        sandbox.script("mlcc", &stand_in.replace("@CACHE@", &cache));
        sandbox.script("curl", CURL);
        let log = root.join("cargo.log").display().to_string();
        sandbox.script("cargo", &CARGO.replace("@LOG@", &log));
        sandbox.script("rustup", "#!/bin/sh\n");
        checkpoint(&root.join("checkpoint"));
        for (name, case_name) in REPOSITORIES {
            sandbox.repository(name, case_name);
        }
        for (name, flags) in ARTIFACTS {
            let path = root.join("built").join(name);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            let mut build = mlcc();
            build.arg("build").arg("-m").arg(root.join("checkpoint")).arg("-o").arg(&path).args(flags);
            if name == "model.so" {
                // The model of golden.json, which is that of the adapter.
                build.arg("--lora").arg(case("lora").join("adapter"));
            }
            build.args(["--backend", backend]).assert().success();
        }
        sandbox
    }

    fn script(&self, name: &str, text: &str) {
        let path = self.folder.path().join("bin").join(name);
        fs::write(&path, text).unwrap();
        fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).unwrap();
    }

    /// A repository as `hf download` leaves it.
    fn repository(&self, name: &str, case_name: &str) {
        let commit = "0".repeat(40);
        let folder = self.folder.path().join("hf/hub").join(format!("models--{}", name.replace('/', "--")));
        fs::create_dir_all(folder.join("refs")).unwrap();
        fs::write(folder.join("refs/main"), &commit).unwrap();
        let files = folder.join("snapshots").join(&commit);
        match case_name {
            "" => checkpoint(&files),
            _ => {
                copy(&case(case_name), &files);
                if case_name.starts_with("rerank") { letters(&files) } else { bytes(&files) }
            }
        }
    }

    /// Variables of the environment for commands, in addition to the caller's.
    pub fn variables(&self) -> Vec<(&'static str, String)> {
        let root = self.folder.path().display();
        let path = std::env::var("PATH").unwrap_or_default();
        vec![
            ("PATH", format!("{root}/bin:{path}")),
            ("HF_HOME", format!("{root}/hf")),
            ("HF_HUB_OFFLINE", "1".into()),
            ("MLCC_CACHE_DIR", objects::folder().display().to_string()),
        ]
    }

    /// A folder for the commands of a page.
    pub fn page(&self, page: &str) -> PathBuf {
        let root = self.folder.path();
        let folder = root.join("pages").join(page.replace('/', "-"));
        fs::create_dir_all(&folder).unwrap();
        let link = |to: &Path, name: &str| {
            let path = folder.join(name);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            symlink(to, path).unwrap();
        };
        let workspace = workspace().canonicalize().unwrap();
        SHARED.iter().for_each(|name| link(&workspace.join(name), name));
        CHECKPOINTS.iter().for_each(|name| link(&root.join("checkpoint"), name));
        // A server takes no adapter that lies elsewhere.
        ADAPTERS.iter().for_each(|name| copy(&case("lora").join("adapter"), &folder.join(name)));
        link(&case("lora").join("golden.json").canonicalize().unwrap(), "golden.json");
        ARTIFACTS.iter().for_each(|(name, _)| link(&root.join("built").join(name), name));
        let data = workspace.join("models/tests/data");
        link(&data.join("qwen2.gguf"), "qwen2.5-0.5b-instruct-q8_0.gguf");
        let rwkv = case("rwkv4-pth").canonicalize().unwrap().join("model.pth");
        link(&rwkv, "RWKV-x070-World-0.4B-v2.9-20250107-ctx4096.pth");
        let text = "The sea was calm, and the wind had gone.\n".repeat(40);
        TEXTS.iter().for_each(|name| fs::write(folder.join(name), &text).unwrap());
        FILES.iter().for_each(|(name, text)| fs::write(folder.join(name), text).unwrap());
        folder
    }

    pub fn end_servers(&self, folder: &Path) {
        let entries = fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().file_name());
        for name in entries {
            if let Some(id) = name.to_string_lossy().strip_prefix("server-") {
                Command::new("kill").arg(id).status().unwrap();
            }
        }
    }

    /// Packages, features, files and tests that commands of `cargo` name are there.
    pub fn check_cargo(&self) {
        let log = fs::read_to_string(self.folder.path().join("cargo.log")).unwrap();
        let wrong: Vec<String> = log.lines().filter_map(|line| wrong_with(line).err()).collect();
        assert!(wrong.is_empty(), "{}", wrong.join("\n"));
        assert!(log.lines().count() > 5, "{log}");
    }
}

/// The error for a command of `cargo` that names something that is not there.
fn wrong_with(line: &str) -> Result<(), String> {
    let words: Vec<&str> = line.split_whitespace().collect();
    let after = |flag: &str| words.iter().position(|word| *word == flag).map(|at| words[at + 1]);
    let wrong = |what: &str| Err(format!("cargo {line}: there is no {what}"));
    let manifest = match (after("--path"), after("--manifest-path")) {
        (Some(path), _) => workspace().join(path).join("Cargo.toml"),
        (None, Some(path)) => workspace().join(path),
        (None, None) => workspace().join("Cargo.toml"),
    };
    if !manifest.is_file() {
        return wrong(&manifest.display().to_string());
    }
    let mut cargo = Command::new(env!("CARGO"));
    cargo.args(["metadata", "--offline", "--no-deps", "--format-version", "1", "--manifest-path"]);
    let output = cargo.arg(&manifest).output().unwrap();
    let metadata: Value = serde_json::from_slice(&output.stdout).map_err(|e| format!("cargo {line}: {e}"))?;
    let packages = metadata["packages"].as_array().unwrap();
    let name = after("-p").unwrap_or("mlcc");
    let Some(package) = packages.iter().find(|package| package["name"] == name || packages.len() == 1) else {
        return wrong(name);
    };
    for feature in after("--features").into_iter().flat_map(|list| list.split(',')) {
        if package["features"].get(feature).is_none() {
            return wrong(&format!("feature {feature}"));
        }
    }
    if words.contains(&"fuzz") {
        let target = words.iter().skip_while(|word| **word != "run").nth(1).copied().unwrap_or_default();
        let path = workspace().join("fuzz/fuzz_targets").join(target).with_extension("rs");
        return if path.is_file() { Ok(()) } else { wrong(&path.display().to_string()) };
    }
    let filter = words.last().filter(|_| words[0] == "test" && words.len() > 3);
    let folder = Path::new(package["manifest_path"].as_str().unwrap()).parent().unwrap();
    match filter {
        Some(filter) if !mentions(folder, filter) => wrong(&format!("test {filter}")),
        _ => Ok(()),
    }
}

/// A file of the folder has the word in its name or its text.
fn mentions(folder: &Path, word: &str) -> bool {
    fs::read_dir(folder).unwrap().any(|entry| {
        let path = entry.unwrap().path();
        match path.is_dir() {
            true => mentions(&path, word),
            false if path.extension().is_some_and(|end| end == "rs") => {
                path.to_string_lossy().contains(word) || fs::read_to_string(&path).unwrap().contains(word)
            }
            false => false,
        }
    })
}

/// A Llama of two layers that reads bytes, with room for long texts and a chat template.
fn checkpoint(folder: &Path) {
    copy(&case("lora").join("base"), folder);
    bytes(folder);
    let path = folder.join("config.json");
    let mut config = json_of(&path);
    config["max_position_embeddings"] = json!(4096);
    fs::write(&path, config.to_string()).unwrap();
    fs::write(folder.join("chat_template.jinja"), TEMPLATE).unwrap();
}

/// A tokenizer whose tokens are the bytes, in tiktoken's form.
fn bytes(folder: &Path) {
    const DIGITS: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    let digit = |value: usize| DIGITS[value] as char;
    let line = |byte: usize| format!("{}{}== {byte}\n", digit(byte >> 2), digit((byte & 3) << 4));
    fs::write(folder.join("bytes.tiktoken"), (0..256).map(line).collect::<String>()).unwrap();
}

/// A tokenizer that knows how two texts become one input, as those of rerankers do; its tokens are letters.
fn letters(folder: &Path) {
    let first = ["<s>", "<pad>", "</s>", "<unk>"].map(|name| json!([name, 0.0]));
    let letters = ('a'..='z').chain(['\u{2581}']).map(|letter| json!([letter.to_string(), -1.0]));
    let space =
        json!({"type": "Metaspace", "replacement": "\u{2581}", "prepend_scheme": "always", "split": true});
    let (begin, end) = (
        json!({"SpecialToken": {"id": "<s>", "type_id": 0}}),
        json!({"SpecialToken": {"id": "</s>", "type_id": 0}}),
    );
    let text = |id: &str| json!({"Sequence": {"id": id, "type_id": 0}});
    let special = |id: usize, name: &str| json!({"id": name, "ids": [id], "tokens": [name]});
    let added = |id: usize, name: &str| {
        json!({"id": id, "content": name, "special": true, "single_word": false, "lstrip": false, "rstrip": false,
            "normalized": false})
    };
    let file = json!({
        "version": "1.0",
        "added_tokens": [added(0, "<s>"), added(1, "<pad>"), added(2, "</s>"), added(3, "<unk>")],
        "pre_tokenizer": space,
        "decoder": space,
        "post_processor": {
            "type": "TemplateProcessing",
            "single": [begin, text("A"), end],
            "pair": [begin, text("A"), end, end, text("B"), end],
            "special_tokens": {"<s>": special(0, "<s>"), "</s>": special(2, "</s>")},
        },
        "model": {"type": "Unigram", "unk_id": 3, "vocab": first.into_iter().chain(letters).collect::<Vec<_>>()},
    });
    fs::write(folder.join("tokenizer.json"), file.to_string()).unwrap();
}

fn json_of(path: &Path) -> Value {
    serde_json::from_slice(&fs::read(path).unwrap()).unwrap()
}

/// The files of a folder, and those of the folders in it.
fn copy(from: &Path, to: &Path) {
    fs::create_dir_all(to).unwrap();
    for entry in fs::read_dir(from).unwrap() {
        let entry = entry.unwrap();
        let (path, copied) = (entry.path(), to.join(entry.file_name()));
        match path.is_dir() {
            true => copy(&path, &copied),
            false => drop(fs::copy(&path, &copied).unwrap()),
        }
    }
}
