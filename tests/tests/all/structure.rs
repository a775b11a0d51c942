//! The rules of ARCHITECTURE.md that a program can check: which crate may use which, what the runtime pulls
//! in, how long files are, that a crate has one test program, and that no file names a folder of a person's
//! machine.

use serde_json::Value;
use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::process::Command;

/// The normal and build dependencies of each crate that are permitted, of this workspace. Test code is free.
const MAY_USE: &[(&str, &[&str])] = &[
    ("mlcc-abi", &[]),
    ("mlcc-softcuda", &[]),
    ("mlcc-files", &[]),
    ("mlcc-target", &["mlcc-files"]),
    ("mlcc-ir", &[]),
    ("mlcc-predict", &["mlcc-abi", "mlcc-target"]),
    ("mlcc-loader", &["mlcc-abi"]),
    ("mlcc-runtime", &["mlcc-abi", "mlcc-files", "mlcc-loader"]),
    ("mlcc-text", &[]),
    ("mlcc-engine", &["mlcc-abi", "mlcc-files", "mlcc-runtime", "mlcc-text"]),
    ("mlcc-serve", &["mlcc-abi", "mlcc-engine", "mlcc-files", "mlcc-runtime", "mlcc-text"]),
    ("mlcc-kernel-lang", &["mlcc-ir"]),
    ("mlcc-quant", &["mlcc-ir", "mlcc-kernel-lang"]),
    ("mlcc-models", &["mlcc-files", "mlcc-ir"]),
    ("mlcc-interp", &["mlcc-ir", "mlcc-quant"]),
    ("mlcc-kernels", &["mlcc-ir", "mlcc-kernel-lang", "mlcc-quant", "mlcc-target"]),
    ("mlcc-passes", &["mlcc-files", "mlcc-ir", "mlcc-quant", "mlcc-interp", "mlcc-kernels", "mlcc-target"]),
    ("mlcc-codegen", &["mlcc-ir", "mlcc-abi", "mlcc-files", "mlcc-target"]),
    (
        "mlcc-driver",
        &[
            "mlcc-abi",
            "mlcc-codegen",
            "mlcc-engine",
            "mlcc-files",
            "mlcc-interp",
            "mlcc-ir",
            "mlcc-kernels",
            "mlcc-models",
            "mlcc-passes",
            "mlcc-quant",
            "mlcc-runtime",
            "mlcc-target",
            "mlcc-text",
        ],
    ),
    (
        "mlcc-bench",
        &[
            "mlcc-abi",
            "mlcc-codegen",
            "mlcc-driver",
            "mlcc-files",
            "mlcc-ir",
            "mlcc-kernels",
            "mlcc-models",
            "mlcc-passes",
            "mlcc-predict",
            "mlcc-runtime",
            "mlcc-target",
        ],
    ),
    (
        "mlcc",
        &[
            "mlcc-abi",
            "mlcc-bench",
            "mlcc-codegen",
            "mlcc-driver",
            "mlcc-engine",
            "mlcc-files",
            "mlcc-interp",
            "mlcc-ir",
            "mlcc-kernels",
            "mlcc-models",
            "mlcc-passes",
            "mlcc-runtime",
            "mlcc-serve",
            "mlcc-target",
            "mlcc-text",
        ],
    ),
];

/// Other crates that a program pulls in by loading an artifact: few, small, none of them a compiler.
const RUNTIME_USES: &[&str] = &["libc", "libloading", "memmap2", "thiserror", "xxhash-rust"];

/// Lines of a source file. Above that a file defines more than one thing.
const MOST_LINES: usize = 600;

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..")
}

struct CargoPackage {
    name: String,
    folder: PathBuf,
    /// Names of normal and build dependencies.
    uses: BTreeSet<String>,
    /// Dependencies among them that every program with this crate has.
    always: BTreeSet<String>,
}

fn packages() -> Vec<CargoPackage> {
    let args = ["metadata", "--offline", "--locked", "--no-deps", "--format-version", "1"];
    let out = Command::new(env!("CARGO")).args(args).current_dir(root()).output().expect("cargo runs");
    assert!(out.status.success(), "cargo {}: {}", args.join(" "), String::from_utf8_lossy(&out.stderr));
    let metadata: Value = serde_json::from_slice(&out.stdout).expect("cargo prints JSON");
    let list = metadata["packages"].as_array().expect("a list of packages");
    list.iter()
        .map(|package| CargoPackage {
            name: text(&package["name"]),
            folder: Path::new(&text(&package["manifest_path"])).parent().expect("a folder").to_path_buf(),
            uses: normal_dependencies(package, |_| true),
            always: normal_dependencies(package, |d| {
                d["optional"] == false && d["target"].is_null() && d["rename"].is_null()
            }),
        })
        .collect()
}

fn normal_dependencies(package: &Value, which: impl Fn(&Value) -> bool) -> BTreeSet<String> {
    let all = package["dependencies"].as_array().expect("a list of dependencies");
    let wanted = all.iter().filter(|d| d["kind"].as_str() != Some("dev") && which(d));
    wanted.map(|d| text(&d["name"])).collect()
}

fn text(value: &Value) -> String {
    value.as_str().expect("a string").to_string()
}

fn is_ours(name: &str) -> bool {
    name == "mlcc" || name.starts_with("mlcc-")
}

#[test]
fn crates_use_only_what_they_may() {
    let mut wrong = Vec::new();
    for package in packages().iter().filter(|p| p.name != "mlcc-tests") {
        let Some((_, may)) = MAY_USE.iter().find(|(name, _)| *name == package.name) else {
            wrong.push(format!("{} is in no row of MAY_USE: say what it may use", package.name));
            continue;
        };
        let forbidden = package.uses.iter().filter(|d| is_ours(d) && !may.contains(&d.as_str()));
        wrong.extend(forbidden.map(|d| format!("{} may not use {d}", package.name)));
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

#[test]
fn the_rows_are_of_existing_crates_and_have_no_cycle() {
    let packages = packages();
    for (at, (name, may)) in MAY_USE.iter().enumerate() {
        assert!(packages.iter().any(|p| p.name == *name), "{name} is no crate of the workspace");
        for used in *may {
            let row = MAY_USE.iter().position(|(n, _)| n == used);
            assert!(row.is_some_and(|row| row < at), "{used}, which {name} may use, has to stand above it");
        }
    }
}

#[test]
fn the_contract_has_no_dependency_and_the_runtime_few() {
    for package in packages() {
        let foreign: BTreeSet<&str> =
            package.uses.iter().map(String::as_str).filter(|d| !is_ours(d)).collect();
        match package.name.as_str() {
            "mlcc-abi" => assert!(package.uses.is_empty(), "mlcc-abi uses {:?}", package.uses),
            "mlcc-loader" | "mlcc-runtime" => {
                let known: BTreeSet<&str> = RUNTIME_USES.iter().copied().collect();
                let new: Vec<_> = foreign.difference(&known).collect();
                assert!(new.is_empty(), "{} is thin, and now uses {new:?}", package.name);
            }
            _ => {}
        }
    }
}

/// Words that the sources of mlcc-text do not have, so that it runs wherever Rust does: its traits stand for
/// the machine.
const NOT_IN_TEXT: &[&str] = &[
    "std::fs",
    "std::thread",
    "std::net",
    "std::process",
    "std::env",
    "std::os",
    "std::{",
    "libc::",
    "unsafe ",
];

#[test]
fn texts_need_no_machine() {
    let Some(files) = tracked() else { return };
    let src = root().join("text/src");
    let sources: Vec<&PathBuf> = files.iter().filter(|file| file.starts_with(&src)).collect();
    assert!(sources.len() > 40, "only {} files in {}", sources.len(), src.display());
    let mut found = Vec::new();
    for file in sources {
        let text = std::fs::read_to_string(file).expect("a source file");
        for (number, line) in text.lines().enumerate() {
            let code = line.split("//").next().unwrap_or("");
            found.extend(
                NOT_IN_TEXT
                    .iter()
                    .filter(|word| code.contains(*word))
                    .map(|word| format!("{}:{}: {}", file.display(), number + 1, word.trim_end())),
            );
        }
    }
    assert!(found.is_empty(), "{}", found.join("\n"));
}

/// The entries of a Cargo.lock for each crate: its versions, and names that these depend on.
fn locked(file: &str) -> BTreeMap<String, (BTreeSet<String>, BTreeSet<String>)> {
    let text = std::fs::read_to_string(root().join(file)).unwrap_or_else(|e| panic!("{file}: {e}"));
    let table: toml::Table = text.parse().unwrap_or_else(|e| panic!("{file}: {e}"));
    let mut found: BTreeMap<String, (BTreeSet<String>, BTreeSet<String>)> = BTreeMap::new();
    for package in table["package"].as_array().expect("a list of packages") {
        let (versions, uses) = found.entry(package["name"].as_str().expect("a name").into()).or_default();
        versions.insert(package["version"].as_str().expect("a version").into());
        let names = package.get("dependencies").and_then(|list| list.as_array()).into_iter().flatten();
        let names = names.filter_map(|name| name.as_str()?.split(' ').next());
        uses.extend(names.map(str::to_owned));
    }
    found
}

/// Workspaces of their own are built with `--locked`, by people and by other tests: what a crate of this one
/// has taken in since is a line there too.
#[test]
fn other_workspaces_are_not_behind() {
    let project = locked("Cargo.lock");
    let mut wrong = Vec::new();
    for folder in ["fuzz", "python", "runtime/mpi"] {
        let file = format!("{folder}/Cargo.lock");
        let theirs = locked(&file);
        for package in packages() {
            let Some((_, uses)) = theirs.get(&package.name) else { continue };
            wrong.extend(
                package.always.difference(uses).map(|new| format!("{file}: {} has no {new}", package.name)),
            );
        }
        if folder == "python" {
            for (name, (versions, _)) in &theirs {
                let Some((ours, _)) = project.get(name) else { continue };
                wrong.extend(
                    versions.difference(ours).map(|other| format!("{file}: {name} {other}, not {ours:?}")),
                );
            }
        }
    }
    assert!(wrong.is_empty(), "cargo update --workspace in these folders:\n{}", wrong.join("\n"));
}

/// Files under version control; `None`, with the reason printed, outside of a checkout.
fn tracked() -> Option<Vec<PathBuf>> {
    let out = Command::new("git").args(["ls-files", "-z"]).current_dir(root()).output();
    match out {
        Ok(out) if out.status.success() => {
            let names = String::from_utf8_lossy(&out.stdout).into_owned();
            let files = names.split('\0').filter(|n| !n.is_empty()).map(|n| root().join(n));
            // A file that was deleted but not committed is not there to be read.
            Some(files.filter(|f| f.is_file()).collect())
        }
        _ => {
            println!("skipped: this is no git checkout, so there is no list of files");
            None
        }
    }
}

fn has_extension(file: &Path, extensions: &[&str]) -> bool {
    file.extension().and_then(|e| e.to_str()).is_some_and(|e| extensions.contains(&e))
}

#[test]
fn source_files_are_short() {
    let Some(files) = tracked() else { return };
    let sources = files.iter().filter(|f| has_extension(f, &["rs", "c", "h", "py", "sh", "toml", "mlc"]));
    let mut seen = 0;
    let mut long = Vec::new();
    for file in sources {
        seen += 1;
        let lines = std::fs::read_to_string(file).map_or(0, |t| t.lines().count());
        if lines > MOST_LINES {
            long.push(format!("{}: {lines} lines", file.display()));
        }
    }
    assert!(seen > 100, "only {seen} source files found");
    assert!(long.is_empty(), "more than {MOST_LINES} lines:\n{}", long.join("\n"));
}

#[test]
fn module_files_have_one_form() {
    let mut folders = vec![root()];
    let (mut wrong, mut seen) = (Vec::new(), 0);
    while let Some(folder) = folders.pop() {
        for name in names(&folder) {
            let path = folder.join(&name);
            if path.is_dir() && name != "target" && !name.starts_with('.') {
                folders.push(path);
                continue;
            }
            seen += usize::from(name.ends_with(".rs"));
            if name == "mod.rs" && path.components().any(|part| part.as_os_str() == "src") {
                wrong.push(path.display().to_string());
            }
        }
    }
    assert!(seen > 500, "only {seen} source files found");
    assert!(
        wrong.is_empty(),
        "a module `x` with files of its own is `x.rs` beside `x/`:\n{}",
        wrong.join("\n")
    );
}

/// Test programs beside the one of their crate, each with its reason in its first lines.
const ALONE: &[&str] = &[
    "cli/tests/no_allocation.rs",
    "models/tests/streaming_memory.rs",
    "runtime/engine/tests/hostile_templates.rs",
    "runtime/engine/tests/no_allocation.rs",
    "tests/tests/filetests.rs",
];

#[test]
fn a_crate_has_one_test_program() {
    let root = root().canonicalize().expect("the folder of the project");
    let mut wrong = Vec::new();
    for package in packages() {
        let tests = package.folder.join("tests");
        let mut programs = names(&tests);
        programs.retain(|name| name == "all" || name.ends_with(".rs"));
        programs.retain(|name| !ALONE.iter().any(|alone| root.join(alone) == tests.join(name)));
        if programs.len() > 1 {
            wrong.push(format!("{}: {programs:?} should be modules of tests/all", package.name));
        }
        let all = std::fs::read_to_string(tests.join("all/main.rs")).unwrap_or_default();
        for module in names(&tests.join("all")).iter().filter_map(|name| name.strip_suffix(".rs")) {
            if module != "main" && !all.lines().any(|line| line == format!("mod {module};")) {
                wrong.push(format!("{}: tests/all/main.rs has no `mod {module};`", package.name));
            }
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

/// Names in a folder; none if there is no such folder.
fn names(folder: &Path) -> BTreeSet<String> {
    let entries = std::fs::read_dir(folder).into_iter().flatten().flatten();
    entries.map(|entry| entry.file_name().to_string_lossy().into_owned()).collect()
}

#[test]
fn no_file_names_a_folder_of_one_machine() {
    // Put together here, so that this file does not contain them.
    let folders =
        [["/wo", "rk/"], ["/ho", "me/"], ["/Us", "ers/"], ["/ro", "ot/"]].map(|parts| parts.concat());
    let Some(files) = tracked() else { return };
    let mut found = Vec::new();
    for file in files {
        let Ok(text) = std::fs::read_to_string(&file) else { continue };
        for (number, line) in text.lines().enumerate() {
            if folders.iter().any(|folder| line.contains(folder.as_str())) {
                let start: String = line.trim().chars().take(100).collect();
                found.push(format!("{}:{}: {start}", file.display(), number + 1));
            }
        }
    }
    assert!(found.is_empty(), "{}", found.join("\n"));
}
