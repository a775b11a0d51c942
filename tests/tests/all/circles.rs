//! Order of files: in the crates of the kernels, files of a folder use those before them, so that they can be
//! read in that order. In the other crates the files in circles only get fewer. The paths that files write,
//! from `crate` or `super` on, count.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

const CRATES: [&str; 2] = ["compiler/kernel-lang/src", "compiler/kernels/src"];

/// Files that are in a circle with others of their folder, for each of the other crates. The numbers only
/// shrink.
const FILES_IN_CIRCLES: [(&str, usize); 22] = [
    ("cli/bench/src", 0),
    ("cli/src", 5),
    ("compiler/codegen/src", 5),
    ("compiler/driver/src", 7),
    ("compiler/interp/src", 9),
    ("compiler/ir/src", 13),
    ("compiler/predict/src", 2),
    ("compiler/quant/src", 5),
    ("models/src", 0),
    ("passes/src", 2),
    ("python/src", 0),
    ("runtime/abi/src", 0),
    ("runtime/core/src", 19),
    ("runtime/engine/src", 13),
    ("runtime/files/src", 0),
    ("runtime/loader/src", 2),
    ("runtime/mpi/src", 0),
    ("runtime/serve/src", 19),
    ("softcuda/src", 12),
    ("target-specs/src", 0),
    ("tests/src", 0),
    ("text/src", 7),
];

/// A module by its path in the crate.
type ModulePath = Vec<String>;

/// The files and folders that a file or folder uses, of the same folder.
type UseGraph = BTreeMap<(ModulePath, String), BTreeSet<String>>;

#[test]
fn files_of_a_folder_use_each_other_in_no_circle() {
    for name in CRATES {
        let src = Path::new(env!("CARGO_MANIFEST_DIR")).join("..").join(name);
        let mut modules = BTreeMap::new();
        collect(&src, &[], &mut modules);
        assert!(modules.len() > 10, "only {} files in {}", modules.len(), src.display());
        let found = circles(&uses(&modules));
        assert!(found.is_empty(), "{name}:\n{}", found.join("\n"));
    }
}

#[test]
fn circles_of_other_crates_only_get_fewer() {
    let mut wrong = Vec::new();
    for (name, known) in FILES_IN_CIRCLES {
        let src = Path::new(env!("CARGO_MANIFEST_DIR")).join("..").join(name);
        let mut modules = BTreeMap::new();
        collect(&src, &[], &mut modules);
        let found = circles(&uses(&modules));
        if found.len() != known {
            wrong.push(format!(
                "{name}: {} files are in circles, {known} are known:\n{}",
                found.len(),
                found.join("\n")
            ));
        }
    }
    assert!(
        wrong.is_empty(),
        "a circle was opened (lower its number) or closed (open it):\n{}",
        wrong.join("\n")
    );
}

#[test]
fn a_circle_is_found() {
    let module = |path: &str, text: &str| (path.split('/').map(String::from).collect(), text.to_string());
    let sources = [
        module("op/plan", "use crate::op::{gpu::Tile, problem};"),
        module("op/gpu", "fn f() { super::helper::g() }"),
        module("op/helper/deep", "use super::super::plan::{self, Plan}; // super::problem"),
        module("op/problem", "use super::Problem;"),
    ];
    let found = circles(&uses(&sources.into_iter().collect()));
    assert_eq!(found.len(), 3, "{found:?}");
    assert!(found.contains(&"op: gpu -> helper -> plan -> gpu".to_string()), "{found:?}");
}

/// Texts of the files below a folder, by module.
fn collect(folder: &Path, parent: &[String], modules: &mut BTreeMap<ModulePath, String>) {
    let mut entries: Vec<PathBuf> =
        std::fs::read_dir(folder).expect("a folder of sources").flatten().map(|e| e.path()).collect();
    entries.sort();
    for path in entries {
        let stem = path.file_stem().expect("a name").to_string_lossy().into_owned();
        let module = [parent, std::slice::from_ref(&stem)].concat();
        if path.is_dir() {
            collect(&path, &module, modules);
        } else {
            let text = std::fs::read_to_string(&path).expect("a source file");
            let own = matches!(stem.as_str(), "mod" | "lib");
            modules.insert(if own { parent.to_vec() } else { module }, text);
        }
    }
}

fn uses(modules: &BTreeMap<ModulePath, String>) -> UseGraph {
    let mut uses = UseGraph::new();
    for (module, text) in modules {
        let code: Vec<&str> = text.lines().map(|line| line.split("//").next().unwrap_or("")).collect();
        for path in paths(&code.join("\n")) {
            let up = path.iter().take_while(|part| *part == "super").count();
            let base = if path[0] == "crate" { &[] } else { &module[..module.len().saturating_sub(up)] };
            let used: Vec<String> = base.iter().chain(&path[up.max(1)..]).cloned().collect();
            let common = module.iter().zip(&used).take_while(|(a, b)| a == b).count();
            let (Some(from), Some(to)) = (module.get(common), used.get(common)) else { continue };
            let folder = module[..common].to_vec();
            let to_file = [folder.as_slice(), std::slice::from_ref(to)].concat();
            if modules.keys().any(|known| known.starts_with(&to_file)) {
                uses.entry((folder, from.clone())).or_default().insert(to.clone());
            }
        }
    }
    uses
}

/// Every path that begins with `crate` or `super`, those in braces one by one.
fn paths(code: &str) -> Vec<Vec<String>> {
    let mut found = Vec::new();
    let mut rest = code;
    while let Some(at) = ["crate::", "super::"].iter().filter_map(|start| rest.find(start)).min() {
        let begins = !rest[..at].ends_with(|c: char| c == ':' || c == '_' || c.is_alphanumeric());
        let end = if begins { path(&rest[at..], Vec::new(), &mut found) } else { "super::".len() };
        rest = &rest[at + end..];
    }
    found
}

/// Reads a path, or a list of them in braces, after `before`; gives where it ends.
fn path(code: &str, before: Vec<String>, found: &mut Vec<Vec<String>>) -> usize {
    let skipped = code.len() - code.trim_start().len();
    let code = &code[skipped..];
    if let Some(list) = code.strip_prefix('{') {
        let mut at = 0;
        while !list[at..].trim_start().starts_with('}') && at < list.len() {
            at += path(&list[at..], before.clone(), found);
            at += list[at..].find([',', '}']).unwrap_or(list.len() - at);
            at += usize::from(list[at..].starts_with(','));
        }
        return skipped + 1 + at;
    }
    let name = code.find(|c: char| c != '_' && !c.is_alphanumeric()).unwrap_or(code.len());
    let all = [before, vec![code[..name].to_string()]].concat();
    match code[name..].strip_prefix("::") {
        Some(further) => skipped + name + 2 + path(further, all, found),
        None => {
            found.push(all);
            skipped + name.max(1)
        }
    }
}

/// Every file of a circle, with the way back to itself.
fn circles(uses: &UseGraph) -> Vec<String> {
    let mut found = Vec::new();
    for (folder, from) in uses.keys() {
        // The file from which each one was reached.
        let mut reached: BTreeMap<&String, &String> = BTreeMap::new();
        let mut waiting = vec![from];
        while let Some(file) = waiting.pop() {
            for next in uses.get(&(folder.clone(), file.clone())).into_iter().flatten() {
                if !reached.contains_key(next) {
                    reached.insert(next, file);
                    waiting.push(next);
                }
            }
        }
        if !reached.contains_key(from) {
            continue;
        }
        let mut way = vec![from.as_str()];
        let mut file = reached[from];
        while file != from {
            way.push(file);
            file = reached[file];
        }
        way.push(from);
        way.reverse();
        found.push(format!("{}: {}", folder.join("/"), way.join(" -> ")));
    }
    found
}
