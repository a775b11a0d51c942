//! One file per command: its flags (`Args`) and what it does (`run`).

mod artifact_cache;
pub mod bench;
mod bench_host;
pub mod bisect;
pub mod build;
pub mod chat;
mod checkpoint;
pub mod completions;
pub mod doctor;
mod drawing;
pub mod embed;
pub mod eval;
mod form;
pub mod inspect;
pub mod interp;
pub mod list;
mod model_size;
pub mod models;
pub mod opt;
pub mod prune;
pub mod pull;
pub mod quants;
mod ranks;
pub mod rerank;
mod resources;
pub mod rm;
pub mod run;
mod samplers;
pub mod serve;
mod speculation;
pub mod targets;
pub mod tune;
pub mod verify;

use std::io::Write;
use std::path::Path;

use mlcc_files::FileKind;
use mlcc_text::{ChatSource, ChatTemplate};
use serde::Serialize;

use crate::error::CliError;
use crate::ui::Ui;

/// `--target`, with the name that this machine's CPU has everywhere.
pub(crate) fn parse_target(name: &str) -> Result<String, std::convert::Infallible> {
    Ok(mlcc_target::canonical_name(name.trim()).to_owned())
}

/// Writes a value as JSON to standard output.
pub(crate) fn print_json(value: &impl Serialize) -> Result<(), CliError> {
    let mut text = serde_json::to_string_pretty(value).map_err(std::io::Error::from)?;
    text.push('\n');
    print(&text)
}

/// Writes text to standard output.
pub(crate) fn print(text: &str) -> Result<(), CliError> {
    let mut out = std::io::stdout().lock();
    out.write_all(text.as_bytes())?;
    Ok(out.flush()?)
}

/// A text file, `-` for standard input.
pub(crate) fn read_text(path: &Path, kind: FileKind) -> Result<String, CliError> {
    if path == Path::new("-") {
        return read_stdin(kind);
    }
    let bytes = mlcc_files::read(path, kind).map_err(CliError::io("read", path))?;
    Ok(mlcc_text::utf8(&path.display().to_string(), bytes)?)
}

pub(crate) fn read_stdin(kind: FileKind) -> Result<String, CliError> {
    let bytes = mlcc_files::read_from(std::io::stdin().lock(), kind);
    let bytes = bytes.map_err(CliError::io("read", "standard input"))?;
    Ok(mlcc_text::utf8("standard input", bytes)?)
}

/// Says what slows a session down, if it knows.
pub(crate) fn warn_session(session: &mlcc_runtime::Session, ui: &Ui) {
    if let Some(notice) = session.performance_warning() {
        ui.warn(notice);
    }
}

/// `--huge-pages`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub(crate) enum HugePagesArg {
    /// Weights move into huge pages little by little between tokens, once some were generated
    Auto,
    /// All weights are copied into huge pages at the start
    On,
    /// Weights stay as they are mapped from the file
    Off,
}

impl From<HugePagesArg> for mlcc_runtime::HugePages {
    fn from(wanted: HugePagesArg) -> Self {
        match wanted {
            HugePagesArg::Auto => Self::Auto,
            HugePagesArg::On => Self::On,
            HugePagesArg::Off => Self::Off,
        }
    }
}

/// The name of a model, as its artifact has it; else that of the file.
pub(crate) fn model_name(metadata: &serde_json::Value, artifact: &Path) -> String {
    let name = metadata.pointer("/model/name").and_then(serde_json::Value::as_str);
    name.map_or_else(|| artifact.display().to_string(), str::to_owned)
}

/// The name of a loaded model for messages: an artifact that is kept in the cache has a name with two hashes.
pub(crate) fn name_of_artifact(model: &mlcc_runtime::Model) -> String {
    let metadata = serde_json::from_str(model.metadata()).unwrap_or(serde_json::Value::Null);
    model_name(&metadata, model.artifact().path())
}

/// `--template`: a template by its name, or a file of Jinja text. `more` are further names for the error.
pub(crate) fn chat_template(name: &str, more: &str) -> Result<ChatSource, CliError> {
    let names = ChatTemplate::names();
    match Path::new(name) {
        _ if names.contains(&name) => Ok(ChatSource::named(name)?),
        file if file.exists() => Ok(ChatSource::jinja(&read_text(file, FileKind::ChatTemplate)?)),
        _ => Err(CliError::usage(format!(
            "there is no chat template and no file `{name}`; templates are {}{more}",
            names.join(", ")
        ))),
    }
}

/// Worker threads and the weights that they read.
#[derive(Clone, Copy, Debug, clap::Args)]
pub(crate) struct ThreadArgs {
    /// Worker threads [default: physical cores]
    #[arg(short, long, env = "MLCC_THREADS", value_parser = clap::value_parser!(u16).range(1..=1024))]
    threads: Option<u16>,
    #[command(flatten)]
    placing: PlacementArgs,
    /// Put the weights in huge pages, which are faster to read
    #[arg(long, value_enum, default_value = "auto", value_name = "WHEN")]
    huge_pages: HugePagesArg,
}

/// Where workers and weights are.
#[derive(Clone, Copy, Debug, clap::Args)]
pub(crate) struct PlacementArgs {
    /// Pin each worker thread to its own core
    #[arg(long)]
    pin: bool,
    /// On machines with several NUMA nodes: where to place weights in huge pages
    #[arg(long, value_enum, default_value = "off", value_name = "WHERE")]
    numa: NumaArg,
}

/// `--numa`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub(crate) enum NumaArg {
    /// Wherever they happen to be
    Off,
    /// On the node whose workers read them; these stay on their nodes
    Local,
    /// On all nodes in turns; workers stay on their nodes
    Interleave,
}

impl From<NumaArg> for mlcc_runtime::NumaPolicy {
    fn from(wanted: NumaArg) -> Self {
        match wanted {
            NumaArg::Off => Self::Off,
            NumaArg::Local => Self::Local,
            NumaArg::Interleave => Self::Interleave,
        }
    }
}

/// A model to generate with.
pub(crate) fn load_to_run(
    path: &Path,
    threads: &ThreadArgs,
    ui: &Ui,
) -> Result<mlcc_runtime::Model, CliError> {
    load_to_serve(path, threads, None, ui)
}

/// Loads a model whose sequences have caches of `cache_tokens` tokens together.
pub(crate) fn load_to_serve(
    path: &Path,
    threads: &ThreadArgs,
    cache_tokens: Option<u64>,
    ui: &Ui,
) -> Result<mlcc_runtime::Model, CliError> {
    let cache_pages = cache_tokens.map(pages);
    let count = threads.threads.map(usize::from);
    load_with(path, count, threads.placing, threads.huge_pages, cache_pages, ui)
}

/// The number of pages for `tokens` tokens.
fn pages(tokens: u64) -> u64 {
    tokens.div_ceil(mlcc_runtime::PAGE_TOKENS as u64)
}

/// A model that shares the worker threads of another one; `cache_tokens` as of [`load_to_serve`].
pub(crate) fn load_beside(
    workers: Option<mlcc_runtime::WorkerThreads>,
    path: &Path,
    threads: &ThreadArgs,
    cache_tokens: Option<u64>,
) -> Result<mlcc_runtime::Model, CliError> {
    let options = mlcc_runtime::LoadOptions {
        workers,
        threads: threads.threads.map(usize::from),
        huge_pages: threads.huge_pages.into(),
        numa: threads.placing.numa.into(),
        cache_pages: cache_tokens.map(pages),
        ..Default::default()
    };
    Ok(mlcc_runtime::Model::load(path, &options)?)
}

/// Loads a model like [`load_to_run`].
pub(crate) fn load_placed(
    path: &Path,
    threads: Option<usize>,
    placing: PlacementArgs,
    huge_pages: HugePagesArg,
    ui: &Ui,
) -> Result<mlcc_runtime::Model, CliError> {
    load_with(path, threads, placing, huge_pages, None, ui)
}

fn load_with(
    path: &Path,
    threads: Option<usize>,
    placing: PlacementArgs,
    huge_pages: HugePagesArg,
    cache_pages: Option<u64>,
    ui: &Ui,
) -> Result<mlcc_runtime::Model, CliError> {
    if placing.numa != NumaArg::Off && huge_pages == HugePagesArg::Off {
        return Err(CliError::usage(
            "--numa places weights while they move into huge pages: it has nothing to place with --huge-pages off",
        ));
    }
    let (huge_pages, numa) = (huge_pages.into(), placing.numa.into());
    let pin = placing.pin;
    let options =
        mlcc_runtime::LoadOptions { threads, huge_pages, pin, numa, cache_pages, ..Default::default() };
    let model = ranks::load(path, options)?;
    let most = model.plan().max_workers;
    if let Some(wanted) = threads.filter(|&wanted| most != 0 && wanted as u64 > most) {
        ui.warn(format_args!(
            "runs with {most} threads instead of {wanted}: the artifact has memory for no more"
        ));
    }
    if placing.numa != NumaArg::Off && model.placement().is_none() {
        ui.warn(format_args!(
            "--numa has no effect: the workers are on one NUMA node, or the weights stay mapped from the file \
             (less than 64 MiB, too little free memory, no huge pages, or a GPU's)"
        ));
    }
    Ok(model)
}

/// `--threads`, or the physical cores.
pub(crate) fn load(
    path: &Path,
    threads: Option<usize>,
    verify_hashes: bool,
) -> Result<mlcc_runtime::Model, CliError> {
    ranks::load(path, mlcc_runtime::LoadOptions { threads, verify_hashes, ..Default::default() })
}
