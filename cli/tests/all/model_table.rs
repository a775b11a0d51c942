//! docs/model-table.md: every reference case in every weight format for every kind of target, with the error
//! that was found. It is made by running the cases:
//!
//! ```text
//! MLCC_MODEL_TABLE=all cargo test -p mlcc model_table          # all cases that are there
//! MLCC_MODEL_TABLE=missing cargo test -p mlcc model_table      # those that are not in the page
//! MLCC_MODEL_TABLE=granite,opt cargo test -p mlcc model_table  # these rows anew
//! ```
//!
//! Cases run side by side, and the page is written after each, so that a run that was ended goes on with
//! `missing`. Cases that hold the weights of another one in another file are left out: the readers' tests
//! have them.
//!
//! Without the variable the test looks at the page only: nothing failed, every case has all formats, and
//! cases of the project that are not in it yet are printed. `MLCC_MODEL_TABLE=check` refuses those, for a
//! release.

use crate::cases;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::sync::atomic::AtomicBool;
use std::sync::atomic::{AtomicUsize, Ordering};

use mlcc_driver::compile::{Backend, BuildHooks, BuildOptions, BuildReport, BuildSource, compile};
use mlcc_driver::interpret::StepModel;
use mlcc_driver::kernel_check;
use mlcc_driver::layers::bisect::check_kernels;
use mlcc_driver::layers::split_calls;
use mlcc_driver::replay::{format_tolerance, replay_prompts};
use mlcc_driver::stored::StoredGraph;
use mlcc_models::golden::GoldenFile;
use mlcc_runtime::{LoadOptions, Model};

const FORMATS: [&str; 5] = ["f32", "f16", "q8f16_1", "q4f16_1", "q4i8"];
const HEAD: [&str; 6] =
    ["case", "family", "format", "cpu, LLVM", "cpu, Cranelift", "cuda (sm_80), interpreted"];
const BEGIN: &str = "<!-- generated: model-table -->\n";
const END: &str = "<!-- end -->";

/// Tokens that kernels for a GPU are interpreted on: a prefill and a decode.
const GPU_TOKENS: usize = 4;
/// Tokens that quantized models are compared on.
const TOKENS: usize = 12;

fn page() -> PathBuf {
    cases::workspace().join("docs/model-table.md")
}

/// The weights of other cases in other files.
const ALIKE: [&str; 6] =
    ["gpt2-hub-names", "llama-mha-bin", "rwkv4-pth", "rwkv5-pth", "rwkv6-pth", "rwkv7-pth"];

/// A reference case that the table has rows for.
fn is_case(folder: &Path) -> bool {
    let of_texts = crate::texts::CASES.iter().any(|name| folder.ends_with(name));
    folder.join("golden.json").exists() && !of_texts && !ALIKE.iter().any(|name| folder.ends_with(name))
}

/// Reference cases: those of the project, and those in a shared folder.
fn folders() -> BTreeMap<String, PathBuf> {
    let mut found = BTreeMap::new();
    for place in [cases::shared().join("goldens"), cases::workspace().join("tests/goldens")] {
        let Ok(entries) = std::fs::read_dir(&place) else { continue };
        for folder in entries.map(|e| e.unwrap().path()).filter(|p| is_case(p)) {
            let name = folder.file_name().unwrap().to_string_lossy().into_owned();
            found.insert(name, folder);
        }
    }
    found
}

/// Columns of the rows by case and format.
type TableRows = BTreeMap<(String, String), Vec<String>>;

fn read_rows(text: &str) -> TableRows {
    let from = text.find(BEGIN).expect("the page has a table") + BEGIN.len();
    let table = &text[from..from + text[from..].find(END).expect("the table has an end")];
    let cells =
        |line: &str| line.trim_matches('|').split('|').map(|c| c.trim().to_string()).collect::<Vec<_>>();
    let rows = table.lines().filter(|l| l.starts_with("| ")).map(cells);
    rows.skip(2).map(|row| ((row[0].clone(), row[2].clone()), row)).collect()
}

fn write_rows(text: &str, rows: &TableRows) -> String {
    let from = text.find(BEGIN).expect("the page has a table") + BEGIN.len();
    let to = from + text[from..].find(END).expect("the table has an end");
    let mut table = format!("\n| {} |\n|{}\n", HEAD.join(" | "), " --- |".repeat(HEAD.len()));
    let place = |format: &str| FORMATS.iter().position(|f| *f == format);
    let mut rows: Vec<&Vec<String>> = rows.values().collect();
    rows.sort_by_key(|row| (row[0].clone(), place(&row[2])));
    rows.iter().for_each(|row| table.push_str(&format!("| {} |\n", row.join(" | "))));
    format!("{}{table}\n{}", &text[..from], &text[to..])
}

/// `pass 1.2e-7` or `FAIL ...`.
fn cell(outcome: Result<(bool, f64), String>) -> String {
    match outcome {
        Ok((true, error)) => format!("pass {error:.1e}"),
        Ok((false, error)) => format!("FAIL {error:.1e}"),
        Err(message) => {
            let first = message.lines().next().unwrap_or_default().replace('|', "/");
            format!("FAIL {}", first.chars().take(120).collect::<String>())
        }
    }
}

/// Chunks are shorter than prompts, so that those are cut, where the model permits that.
fn options(folder: &Path, format: &str) -> BuildOptions {
    let mut options = cases::build_options(folder);
    options.quant = cases::scheme(format);
    options.quant_name = format.into();
    let whole = ["chatglm-6b-tiny", "t5", "t5-relu", "umt5"].iter().any(|name| folder.ends_with(name));
    options.chunk = (!whole).then_some(cases::CHUNK);
    options
}

/// Plain formats: the reference's logits and greedy tokens, through the runtime.
fn against_golden(folder: &Path, options: &BuildOptions) -> Result<(bool, f64), String> {
    let place = tempfile::tempdir().map_err(|e| e.to_string())?;
    let golden = GoldenFile::read(&folder.join("golden.json")).map_err(|e| e.to_string())?;
    let output = place.path().join("model.so");
    let options = BuildOptions { output: Some(output.clone()), ..options.clone() };
    let cancel = std::sync::atomic::AtomicBool::new(false);
    let mut hooks = mlcc_driver::compile::BuildHooks { event: &mut |_| {}, cancel: &cancel };
    mlcc_driver::compile::build(&options, &mut hooks).map_err(|e| e.to_string())?;
    let model = Model::load(&output, &LoadOptions::default()).map_err(|e| e.to_string())?;
    let mut session = model.session().map_err(|e| e.to_string())?;
    let scheme = options.quant.name;
    let outcome =
        replay_prompts(&mut session, &golden, scheme, format_tolerance(scheme)).map_err(|e| e.to_string())?;
    Ok((outcome.ok, outcome.worst_relative_error))
}

/// Every layer against the interpreter on the same stored weights; the error is the largest of all layers.
fn against_graph(folder: &Path, options: &BuildOptions, count: usize) -> Result<(bool, f64), String> {
    let options = BuildOptions { debug_taps: true, ..options.clone() };
    let target = mlcc_target::resolve_target(&options.target).map_err(|e| e.to_string())?;
    let source = BuildSource::open(&options).map_err(|e| e.to_string())?;
    let golden = GoldenFile::read(&folder.join("golden.json")).map_err(|e| e.to_string())?;
    if source.model.config.architecture.decoder_start_token_id().is_some() {
        return whole_model(&source, &target, &BuildOptions { debug_taps: false, ..options }, golden);
    }
    let longest = golden.prompts.iter().map(cases::ids).max_by_key(Vec::len).unwrap_or_default();
    let tokens = &longest[..longest.len().min(count)];
    let place = tempfile::tempdir().map_err(|e| e.to_string())?;
    let calls = split_calls(tokens, source.chunk as usize);
    let layers = check_kernels(&source, &target, &options, &calls, place.path(), &AtomicBool::new(false))
        .map_err(|e| e.to_string())?;
    match &layers.first {
        Some(first) => Err(format!("{} departs by {:.1e}", first.name, first.error)),
        None => Ok((true, layers.worst)),
    }
}

/// Logits alone, of an encoder-decoder model: the kernels by interpretation.
fn whole_model(
    source: &BuildSource,
    target: &mlcc_target::CompileTarget,
    options: &BuildOptions,
    mut golden: GoldenFile,
) -> Result<(bool, f64), String> {
    golden.prompts.truncate(2);
    let (mut report, cancel) = (BuildReport::default(), AtomicBool::new(false));
    let mut hooks = BuildHooks { event: &mut |_| {}, cancel: &cancel };
    let (program, _) =
        compile(source, target, options, &mut report, &mut hooks).map_err(|e| e.to_string())?;
    let architecture = &source.model.config.architecture;
    let chunk = source.chunk as usize;
    let mut model =
        StepModel::new(&program, 0, &source.checkpoint, architecture, chunk, 1).map_err(|e| e.to_string())?;
    let graph = StoredGraph::of_program(&program, &source.checkpoint)?;
    let check =
        kernel_check::check_against_graph(&mut model, &graph, &golden, None).map_err(|e| e.to_string())?;
    Ok((check.ok, check.worst_relative_error))
}

/// The rows of a case; none for a file that is no model.
fn run(name: &str, folder: &Path) -> TableRows {
    let mut rows = TableRows::new();
    let family = match BuildSource::open(&options(folder, "f32")) {
        Ok(source) => source.model.config.model_type.clone(),
        Err(e) => {
            println!("{name}: left out: {e}");
            return rows;
        }
    };
    for format in FORMATS {
        let mut row = vec![name.to_string(), family.clone(), format.to_string()];
        for backend in [Backend::Llvm, Backend::Cranelift] {
            let options = BuildOptions { backend, ..options(folder, format) };
            row.push(match (backend.is_built_in(), options.quant.linear.is_packed()) {
                (false, _) => "-".into(),
                (true, false) => cell(against_golden(folder, &options)),
                (true, true) => cell(against_graph(folder, &options, TOKENS)),
            });
        }
        let gpu = BuildOptions { target: "sm_80".into(), ..options(folder, format) };
        row.push(cell(against_graph(folder, &gpu, GPU_TOKENS)));
        println!("{}", row.join(" | "));
        rows.insert((name.to_string(), format.to_string()), row);
    }
    rows
}

/// Runs cases side by side. Every case that ends replaces its rows, and the page is written.
fn run_all(cases: &[(&String, &PathBuf)], text: &str, rows: &mut TableRows) {
    let next = AtomicUsize::new(0);
    let shared = Mutex::new(std::mem::take(rows));
    let work = || {
        while let Some((name, folder)) = cases.get(next.fetch_add(1, Ordering::Relaxed)) {
            let found = run(name, folder);
            let mut rows = shared.lock().unwrap();
            rows.retain(|(case, _), _| case != *name);
            rows.extend(found);
            std::fs::write(page(), write_rows(text, &rows)).unwrap();
        }
    };
    let workers = std::thread::available_parallelism().map_or(1, usize::from);
    std::thread::scope(|scope| (0..workers).for_each(|_| drop(scope.spawn(work))));
    *rows = shared.into_inner().unwrap();
}

#[test]
fn the_table_is_that_of_a_run() {
    let text = std::fs::read_to_string(page()).unwrap();
    let mut rows = read_rows(&text);
    let wanted = std::env::var("MLCC_MODEL_TABLE");
    if let Ok(wanted) = wanted.as_deref().map(|w| if w == "check" { "" } else { w }) {
        let folders = folders();
        if wanted == "all" {
            rows.clear();
        }
        let has = |name: &str| rows.contains_key(&(name.to_string(), FORMATS[0].to_string()));
        let is_wanted = |name: &str| match wanted {
            "all" => true,
            "missing" => !has(name),
            names => names.split(',').any(|wanted| wanted == name),
        };
        let cases: Vec<_> = folders.iter().filter(|(name, _)| is_wanted(name)).collect();
        run_all(&cases, &text, &mut rows);
        std::fs::write(page(), write_rows(&text, &rows)).unwrap();
    }
    let failed: Vec<String> = rows
        .values()
        .flat_map(|row| {
            row[3..].iter().filter(|c| c.starts_with("FAIL")).map(|c| format!("{}: {c}", row[..3].join(" ")))
        })
        .collect();
    assert!(failed.is_empty(), "{}", failed.join("\n"));
    for ((case, _), row) in &rows {
        assert_eq!(row.len(), HEAD.len(), "{}", row.join(" | "));
        for format in FORMATS {
            let key = (case.clone(), format.to_string());
            assert!(rows.contains_key(&key), "{case} in {format} is not in the table");
        }
    }
    let own = cases::workspace().join("tests/goldens");
    let names = std::fs::read_dir(own).unwrap().map(|e| e.unwrap().path()).filter(|p| is_case(p));
    let names = names.map(|p| p.file_name().unwrap().to_string_lossy().into_owned());
    let missing: Vec<String> =
        names.filter(|n| !rows.contains_key(&(n.clone(), FORMATS[0].to_string()))).collect();
    if !missing.is_empty() {
        println!(
            "not in docs/model-table.md yet: MLCC_MODEL_TABLE=missing makes their rows: {}",
            missing.join(", ")
        );
    }
    assert!(
        missing.is_empty() || wanted.as_deref() != Ok("check"),
        "cases are missing: {}",
        missing.join(", ")
    );
}

#[test]
fn rows_survive_writing_and_reading() {
    let text = format!("# Page\n{BEGIN}\n{END}\nrest\n");
    let row = |case: &str, format: &str| {
        let cells = [case, "rwkv", format, "pass 1.0e-7", "-", "FAIL why"].map(String::from).to_vec();
        ((case.to_string(), format.to_string()), cells)
    };
    let rows: TableRows = [row("b", "f32"), row("a", "q4i8"), row("a", "f32")].into();
    let written = write_rows(&text, &rows);
    assert_eq!(read_rows(&written), rows);
    assert!(written.find("| a | rwkv | f32").unwrap() < written.find("| a | rwkv | q4i8").unwrap());
    assert!(written.ends_with(&format!("{END}\nrest\n")));
}
