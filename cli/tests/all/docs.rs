//! The tables of docs/ are made from the program: flags from clap, formats, machines, models and passes from
//! their registries. They are between `<!-- generated: NAME -->` and `<!-- end -->`. `MLCC_BLESS=1` rewrites
//! them.

use std::path::{Path, PathBuf};

use clap::{Arg, ArgAction, Command, CommandFactory};
use mlcc::cli::Cli;
use mlcc_models::{families, presets};
use mlcc_passes::PIPELINE;
use mlcc_passes::scheme::{Q4F16, SCHEMES};

use crate::same_bits::{BitsPromise, PROMISES};

fn docs() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs")
}

/// A markdown table; `|` inside of cells is escaped.
fn table(head: &[&str], rows: impl IntoIterator<Item = Vec<String>>) -> String {
    let line = |cells: Vec<String>| {
        let cells: Vec<String> = cells.iter().map(|c| c.replace('|', "\\|").replace('\n', " ")).collect();
        format!("| {} |\n", cells.join(" | "))
    };
    let mut out = line(head.iter().map(|h| h.to_string()).collect());
    out.push_str(&format!("|{}\n", " --- |".repeat(head.len())));
    rows.into_iter().for_each(|row| out.push_str(&line(row)));
    out
}

fn code(text: &str) -> String {
    format!("`{text}`")
}

/// `mlcc` and all its commands: usage and flags.
fn flags() -> String {
    let mut cli = Cli::command();
    cli.build();
    let mut out = String::from("Flags of every command:\n\n");
    out.push_str(&arguments(&cli, &cli, true));
    for command in cli.get_subcommands().filter(|c| c.get_name() != "help") {
        let about = command.get_about().map(ToString::to_string).unwrap_or_default();
        out.push_str(&format!("\n## mlcc {}\n\n{about}.\n\n", command.get_name()));
        out.push_str(&arguments(command, &cli, false));
        if let Some(more) = command.get_after_help() {
            out.push_str(&format!("\n{more}\n"));
        }
    }
    out
}

/// Rows of a command's arguments; global flags are only under the program itself.
fn arguments(command: &Command, cli: &Command, global: bool) -> String {
    let ours = |arg: &&Arg| {
        let is_global = cli.get_arguments().any(|a| a.get_id() == arg.get_id() && a.is_global_set());
        !arg.is_hide_set() && arg.get_id() != "help" && arg.get_id() != "version" && is_global == global
    };
    let rows =
        command.get_arguments().filter(ours).map(|arg| vec![spelling(arg), default(arg), meaning(arg)]);
    table(&["flag", "default", "meaning"], rows)
}

fn spelling(arg: &Arg) -> String {
    let value = match arg.get_action() {
        ArgAction::Set | ArgAction::Append => {
            let names = arg.get_value_names().unwrap_or(&[]);
            let names: Vec<String> = names.iter().map(|n| format!("<{n}>")).collect();
            names.join(" ")
        }
        _ => String::new(),
    };
    if arg.is_positional() {
        return code(&value);
    }
    let short = arg.get_short().map(|s| format!("-{s}"));
    let long = arg.get_long().map(|l| format!("--{l}"));
    let names: Vec<String> = short.into_iter().chain(long).collect();
    let value = if value.is_empty() { value } else { format!(" {value}") };
    let mut out = code(&format!("{}{value}", names.join(", ")));
    let others = arg.get_visible_aliases().unwrap_or_default();
    if !others.is_empty() {
        let others: Vec<String> = others.iter().map(|a| code(&format!("--{a}"))).collect();
        out.push_str(&format!(", also {}", others.join(", ")));
    }
    out
}

fn default(arg: &Arg) -> String {
    let values: Vec<String> =
        arg.get_default_values().iter().map(|v| v.to_string_lossy().into_owned()).collect();
    let is_flag = !matches!(arg.get_action(), ArgAction::Set | ArgAction::Append);
    if values.is_empty() || is_flag { String::new() } else { code(&values.join(",")) }
}

fn meaning(arg: &Arg) -> String {
    let mut out = arg.get_help().map(ToString::to_string).unwrap_or_default();
    let is_flag = !matches!(arg.get_action(), ArgAction::Set | ArgAction::Append);
    let values: Vec<String> = arg.get_possible_values().iter().map(|v| code(v.get_name())).collect();
    if !values.is_empty() && !is_flag {
        out.push_str(&format!(" ({})", values.join(", ")));
    }
    if let Some(variable) = arg.get_env() {
        out.push_str(&format!("; or the variable `{}`", variable.to_string_lossy()));
    }
    if arg.is_required_set() {
        out.push_str("; required");
    }
    out
}

/// The table of `mlcc quants`, with the words about each scheme.
fn quants() -> String {
    let rows = SCHEMES.iter().map(|s| {
        let cells = mlcc::commands::quants::cells(s);
        [code(s.name), s.about.into()].into_iter().chain(cells).collect()
    });
    let head: Vec<&str> = ["name", "what"].into_iter().chain(mlcc::commands::quants::COLUMNS).collect();
    format!("{}\n`q4f16` stands for `{Q4F16}`.\n", table(&head, rows))
}

fn targets() -> String {
    let specs = mlcc_target::specs().unwrap();
    let mut rows = Vec::new();
    for spec in &specs {
        let levels: Vec<&str> = spec.default_levels().map(|l| l.name.as_str()).collect();
        rows.push(vec![code(&spec.name), format!("{} in one file", levels.join(", ")), spec.triple.clone()]);
        for level in &spec.levels {
            let what = match &level.gpu {
                Some(gpu) => {
                    let others = match level.device_scope() {
                        mlcc_target::DeviceScope::Later => " and later",
                        mlcc_target::DeviceScope::Exact => "",
                        mlcc_target::DeviceScope::Family => " and later ones of its family",
                    };
                    let d = &gpu.device;
                    let device = format!(
                        "{}: {} multiprocessors with {} KiB of shared memory, {} MiB of second level, {} GB/s",
                        d.name,
                        d.sms,
                        d.shared_bytes >> 10,
                        d.l2_bytes >> 20,
                        d.gbytes_per_s
                    );
                    format!("compute capability {}.{}{others} ({device})", gpu.sm / 10, gpu.sm % 10)
                }
                None => format!("{} bits: {}", level.vector_bits, level.features.join(" ")),
            };
            rows.push(vec![code(&level.name), what, spec.triple.clone()]);
        }
        for machine in &spec.machines {
            let like = spec.levels.iter().find(|l| l.features == machine.features).unwrap();
            let cache = machine.tune.as_ref().unwrap().cache;
            let caches = format!("caches of {} and {} KiB", cache.first >> 10, cache.second >> 10);
            let what = format!("as {}, tuned for the processor ({caches})", code(&like.name));
            rows.push(vec![code(&machine.name), what, spec.triple.clone()]);
        }
    }
    table(&["--target", "what", "triple"], rows)
}

fn models() -> String {
    let rows = families::variants().map(|e| vec![code(e.model_type), e.about.to_string()]);
    table(&["`model_type` in config.json", "architecture"], rows)
}

fn presets() -> String {
    let rows = presets::all_presets()
        .map(|p| vec![code(p.name), p.layers.to_string(), p.hidden.to_string(), code(p.repo)]);
    table(&["--model", "layers", "hidden size", "weights on Hugging Face"], rows)
}

fn passes() -> String {
    let switch = |optional| if optional { "yes" } else { "no, needed for a result" };
    let rows = PIPELINE.iter().map(|p| vec![code(p.name), p.about.into(), switch(p.optional).into()]);
    table(&["pass", "what it does", "can be switched off"], rows)
}

fn fields() -> String {
    keys(mlcc_target::FIELDS, "measured by")
}

fn gpu_fields() -> String {
    keys(mlcc_target::GPU_FIELDS, "predicted by")
}

fn keys(fields: &[mlcc_target::TuneField], by: &str) -> String {
    let rows = fields.iter().map(|field| {
        let kinds: Vec<&str> = field.kinds.iter().map(|kind| kind.name()).collect();
        vec![code(field.key), field.about.into(), kinds.join(", "), field.describe()]
    });
    table(&["key", "what it is", by, "values that are tried"], rows)
}

/// Rust code of a file of the project: without its header, or between the lines `// docs: begin` and
/// `// docs: end`.
fn rust(file: &str) -> String {
    let path = docs().join("..").join(file);
    let text = std::fs::read_to_string(&path).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
    let marked = text.split_once("// docs: begin\n").and_then(|(_, rest)| rest.split_once("// docs: end"));
    let code: String = match marked {
        Some((code, _)) => code.into(),
        None => text.lines().skip_while(|l| l.starts_with("//!")).map(|l| format!("{l}\n")).collect(),
    };
    format!("```rust\n{}\n```\n", code.trim())
}

fn text_to_text() -> String {
    rust("runtime/engine/examples/write.rs")
}

fn ids_to_logits() -> String {
    rust("runtime/core/examples/generate.rs")
}

fn granite() -> String {
    rust("models/src/families/granite.rs")
}

fn gated_square() -> String {
    rust("compiler/codegen/tests/all/handwritten_kernel.rs")
}

/// Page, table and what writes it.
type DocTable = (&'static str, &'static str, fn() -> String);

const TABLES: [DocTable; 13] = [
    ("in-your-program.md", "text to text", text_to_text),
    ("in-your-program.md", "ids to logits", ids_to_logits),
    ("add-a-model.md", "granite", granite),
    ("add-a-kernel.md", "gated_square", gated_square),
    ("cli.md", "flags", flags),
    ("quantization.md", "formats", quants),
    ("build.md", "targets", targets),
    ("build.md", "models", models),
    ("build.md", "presets", presets),
    ("build.md", "passes", passes),
    ("tune.md", "fields", fields),
    ("tune.md", "gpu fields", gpu_fields),
    ("same-bits.md", "promises", promises),
];

fn promises() -> String {
    let head = ["schemes", "pieces and steps", "token by token", "with `--batch-invariant`"];
    let word = |same: bool| if same { "same" } else { "not" }.to_string();
    let line = |p: &BitsPromise| {
        let [several, single] = p.usual;
        vec![p.schemes.join(", "), word(several), word(single), word(p.batch_invariant)]
    };
    table(&head, PROMISES.iter().map(line))
}

#[test]
fn tables_are_those_of_the_program() {
    let mut stale = Vec::new();
    for (file, name, make) in TABLES {
        let path = docs().join(file);
        let text = std::fs::read_to_string(&path).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
        let begin = format!("<!-- generated: {name} -->\n");
        let from = text.find(&begin).unwrap_or_else(|| panic!("{file} has no {begin}")) + begin.len();
        let to =
            from + text[from..].find("<!-- end -->").unwrap_or_else(|| panic!("{file}: {name} has no end"));
        let fresh = format!("\n{}\n", make());
        if text[from..to] == fresh {
            continue;
        }
        if std::env::var_os("MLCC_BLESS").is_some() {
            std::fs::write(&path, format!("{}{fresh}{}", &text[..from], &text[to..])).unwrap();
        } else {
            stale.push(format!("docs/{file}, table {name}"));
        }
    }
    assert!(stale.is_empty(), "run this test with MLCC_BLESS=1 to rewrite: {}", stale.join("; "));
}

/// The example of a page is a program that works.
#[test]
fn the_example_from_text_to_text_writes() {
    let mut out = Vec::new();
    let artifact = crate::program::artifact().to_str().unwrap();
    crate::write_example::write(artifact, "It was a dark and", 8, &mut out).unwrap();
    assert!(!out.is_empty());
}

/// Relative links of the documentation lead somewhere.
#[test]
fn links_lead_to_files() {
    let folders = [docs(), docs().join("design"), docs().join("..")];
    let files = folders.iter().flat_map(|folder| std::fs::read_dir(folder).unwrap());
    let mut pages: Vec<PathBuf> = files.map(|e| e.unwrap().path()).collect();
    pages.retain(|p| p.extension().is_some_and(|e| e == "md"));
    assert!(pages.len() > 8, "{pages:?}");
    for page in pages {
        let text = std::fs::read_to_string(&page).unwrap();
        for link in text.split("](").skip(1).filter_map(|rest| rest.split(')').next()) {
            let file = link.split('#').next().unwrap_or(link);
            if file.is_empty() || file.contains("://") {
                continue;
            }
            let target = page.parent().unwrap().join(file);
            assert!(target.exists(), "{} links to {link}, which is not there", page.display());
        }
    }
}
