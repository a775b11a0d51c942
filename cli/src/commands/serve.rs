//! `mlcc serve`: compiled models over HTTP. Where it listens goes to standard output with `--json`,
//! everything else to standard error.

use std::io::Write;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use clap::builder::NonEmptyStringValueParser;
use mlcc_engine::artifact_text::ArtifactTokenizerError;
use mlcc_engine::embedding::EmbeddingModel;
use mlcc_engine::serving::{DiskCacheOptions, TextAdapter};
use mlcc_models::AdapterRequest;
use mlcc_runtime::{Model, WorkerThreads};
use mlcc_serve::{
    LoadError, ModelLibrary, ModelSetup, ReadAdapter, ReadyModel, ServeOptions, ShutdownOutcome,
    TraceExporter,
};
use serde_json::{Value, json};

use crate::allocator;
use crate::commands::build::parse_bytes;
use crate::commands::checkpoint::{self, model_name};
use crate::commands::speculation::SpeculationArgs;
use crate::commands::{chat, run};
use crate::error::CliError;
use crate::interrupt;
use crate::ui::{self, Ui};

#[derive(Debug, Clone, clap::Args)]
#[command(after_help = "Example: mlcc serve model.so --port 8080\n\
    Then: curl http://127.0.0.1:8080/v1/completions --json '{\"prompt\": \"The sea was\", \"max_tokens\": 50}'")]
pub struct ServeArgs {
    /// Compiled models, or what they are built of first: preset names, hf:org/repo, folders, GGUF files,
    /// addresses; requests choose one by name; the first is the default
    #[arg(value_name = "ARTIFACT", env = "MLCC_ARTIFACT", required_unless_present = "models")]
    artifacts: Vec<PathBuf>,
    /// Weight format if a checkpoint is compiled [default: one for this machine: q4i8 on CPUs, q4f16 on GPUs,
    /// q8i8 for models of texts; as stored if small or quantized]
    #[arg(long, value_name = "NAME")]
    quant: Option<String>,
    /// A folder of compiled models that clients may load while the server runs
    #[arg(long, value_name = "FOLDER")]
    models: Option<PathBuf>,
    /// Address to listen on; 0.0.0.0 is reachable from other machines
    #[arg(long, value_name = "ADDRESS", default_value_t = IpAddr::V4(Ipv4Addr::LOCALHOST))]
    host: IpAddr,
    /// Port to listen on; 0 picks a free one
    #[arg(long, default_value_t = 8080)]
    port: u16,
    /// Write a line of JSON to standard error for each request: its id, path, status and time, but no text
    #[arg(long)]
    log: bool,
    /// Print one line of JSON to standard output when the server is ready
    #[arg(long)]
    json: bool,
    /// Maximum number of sequences that run together [default: what fits into memory, up to 16, or 4 without
    /// --max-batch]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=1024))]
    sequences: Option<u16>,
    /// Maximum number of sequences that wait; more are refused with status 429
    #[arg(long, value_name = "N", default_value_t = 64)]
    max_queue: u16,
    /// Memory that the server may use, for example 8GB [default: what is free]
    #[arg(long, value_name = "SIZE", value_parser = parse_bytes)]
    memory: Option<u64>,
    /// Capacity in tokens of the caches of all sequences of a model together, at least a full context; when
    /// it is used up, the newest sequence waits [default: enough for all sequences at full length]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..=1 << 31))]
    cache_tokens: Option<u64>,
    #[command(flatten)]
    threads: super::ThreadArgs,
    /// Model name for clients, once per artifact in the same order [default: the file's name without .so]
    #[arg(long, value_name = "NAME", value_parser = NonEmptyStringValueParser::new())]
    alias: Vec<String>,
    /// Key that clients have to send as `Authorization: Bearer KEY`; repeat it, or use commas, for several
    /// clients, which then take turns. Other users of the machine can see keys on the command line: use the
    /// variable or --api-key-file
    #[arg(long, value_name = "KEY", env = "MLCC_API_KEY", hide_env_values = true, value_delimiter = ',', value_parser = NonEmptyStringValueParser::new())]
    api_key: Vec<String>,
    /// File with such keys, one per line
    #[arg(long, value_name = "FILE")]
    api_key_file: Option<PathBuf>,
    /// Host name by which clients reach the server, in addition to its addresses and localhost: needed behind
    /// a proxy, or if clients use the machine's name; `*` allows any name (repeatable)
    #[arg(long, value_name = "NAME", env = "MLCC_ALLOWED_HOST", value_delimiter = ',', value_parser = NonEmptyStringValueParser::new())]
    allowed_host: Vec<String>,
    /// Maximum size of a request's body
    #[arg(long, value_name = "SIZE", default_value = "8MB", value_parser = parse_bytes)]
    body_limit: u64,
    /// Memory that all requests together may need; requests beyond that wait or are refused [default: 256
    /// MiB, or 16 times --body-limit]
    #[arg(long, value_name = "SIZE", value_parser = parse_bytes)]
    request_memory: Option<u64>,
    /// Keep states of prompts and generated texts in this folder, so that they need not be computed again
    /// after a restart
    #[arg(long, value_name = "FOLDER")]
    cache_dir: Option<PathBuf>,
    /// Maximum size of the folder of --cache-dir; least recently used states are removed first
    #[arg(long, value_name = "SIZE", default_value = "4GB", value_parser = parse_bytes)]
    cache_dir_size: u64,
    /// Close a connection if its next request does not arrive completely within this time, in seconds
    #[arg(long, value_name = "SECONDS", default_value_t = 60, value_parser = clap::value_parser!(u64).range(1..=86400))]
    read_timeout: u64,
    /// End every request after this time, in seconds
    #[arg(long, value_name = "SECONDS", value_parser = clap::value_parser!(u64).range(1..=86400))]
    timeout: Option<u64>,
    /// How long requests may continue after SIGTERM or Ctrl-C, in seconds
    #[arg(long, value_name = "SECONDS", default_value_t = 30)]
    drain_timeout: u32,
    /// Chat template to use instead of the model's own: a name (chatml, llama-2, llama-3, ...), a file of
    /// Jinja text, or `plain` for text that is simply continued
    #[arg(long, value_name = "NAME|FILE")]
    template: Option<String>,
    /// Tokenizer file, instead of the one in the artifact
    #[arg(long, value_name = "FILE")]
    tokenizer: Option<PathBuf>,
    /// LoRA adapter in PEFT format, with an optional scale, that clients use as a model of this name; for the
    /// first artifact, which must be built with --lora-slots (repeatable)
    #[arg(long, value_name = "NAME=DIR[=SCALE]")]
    lora: Vec<NamedAdapter>,
    /// Let clients load and unload adapters from folders below this one (/v1/load_lora_adapter, as in vLLM)
    #[arg(long, value_name = "FOLDER")]
    lora_dir: Option<PathBuf>,
    #[command(flatten)]
    sampling: run::SamplingArgs,
    #[command(flatten)]
    speculation: SpeculationArgs,
}

/// An adapter with the name that clients call it by.
#[derive(Debug, Clone)]
struct NamedAdapter {
    name: String,
    request: AdapterRequest,
}

impl FromStr for NamedAdapter {
    type Err = String;

    fn from_str(text: &str) -> Result<NamedAdapter, String> {
        match text.split_once('=') {
            Some((name, request)) if !name.is_empty() && !name.contains('/') => {
                Ok(NamedAdapter { name: name.to_owned(), request: request.parse()? })
            }
            _ => Err("expected a name for clients and a folder: NAME=DIR or NAME=DIR=SCALE".into()),
        }
    }
}

/// The artifacts of the command line by their names, and those of `--models`.
struct ArtifactLibrary {
    args: ServeArgs,
    options: ServeOptions,
    named: Vec<(String, PathBuf)>,
    /// Workers of the first model; the others have the same.
    workers: Mutex<Option<WorkerThreads>>,
    ui: Ui,
}

/// The form in which an artifact is served.
enum ServedArtifact {
    Ready(Box<ReadyModel>),
    /// Makes vectors of texts.
    Texts(Box<EmbeddingModel>),
}

impl ArtifactLibrary {
    /// The artifact that is called `name`.
    fn read(&self, name: &str, path: &Path, committed: u64) -> Result<ServedArtifact, CliError> {
        let args = &self.args;
        let workers = self.workers.lock().unwrap_or_else(PoisonError::into_inner).clone();
        let model = match workers {
            None => super::load_to_serve(path, &args.threads, args.cache_tokens, &self.ui)?,
            workers => super::load_beside(workers, path, &args.threads, args.cache_tokens)?,
        };
        if let Some(workers) = model.workers() {
            *self.workers.lock().unwrap_or_else(PoisonError::into_inner) = Some(workers);
        }
        let tokenizer = run::tokenizer(&model, args.tokenizer.as_deref())?;
        tokenizer.check_vocab(model.vocab())?;
        let adapters = self.adapters(name, &model)?;
        if model.text_width() > 0 {
            return Ok(ServedArtifact::Texts(Box::new(EmbeddingModel::new(&model, tokenizer)?)));
        }
        let metadata: Value = serde_json::from_str(model.metadata()).unwrap_or(Value::Null);
        let format = chat::known_format(&model, args.template.as_deref())?;
        if format.is_none() {
            let why = match model.plan().decoder_start() {
                Some(_) => "is an encoder-decoder model: /v1/completions works, but chats do not",
                None => "has no chat template: /v1/completions works, /v1/chat/completions needs --template",
            };
            self.ui.note(format_args!("{name} {why}."));
        }
        let drafts = args.speculation.drafter(&model, &tokenizer, &args.threads)?;
        let (drafter, draft) =
            drafts.map_or((None, None), |drafts| (Some(drafts.make_drafter), drafts.model));
        let served = ModelSetup {
            drafter,
            draft,
            sampling: run::sampling(&metadata, &args.sampling, &tokenizer)?,
            format,
            eos: mlcc_engine::artifact_text::eos_ids(&metadata),
            executor: model.executor().to_owned(),
            adapters,
            reads_adapters: Some(adapter_reader(&model)),
            tokenizer,
        };
        Ok(ServedArtifact::Ready(Box::new(ReadyModel::from_model(&model, served, &self.options, committed)?)))
    }

    /// The adapters of the command line, if it is the artifact that they are for.
    fn adapters(&self, artifact: &str, model: &Model) -> Result<Vec<TextAdapter>, CliError> {
        let is_first = self.named.first().is_some_and(|(name, _)| name == artifact);
        let wanted = self.args.lora.iter().filter(|_| is_first);
        let load = |adapter: &NamedAdapter| {
            let loaded = run::load_adapter(model, &adapter.request)?;
            Ok(TextAdapter::new(&adapter.name, loaded))
        };
        wanted.map(load).collect()
    }

    /// The artifacts in the folder of `--models`, by their names in order.
    fn folder_artifacts(&self) -> Vec<(String, PathBuf)> {
        let entries = self.args.models.iter().filter_map(|folder| std::fs::read_dir(folder).ok());
        let paths = entries.flatten().filter_map(|entry| Some(entry.ok()?.path()));
        // A folder might be a checkpoint, and no request builds one.
        let artifacts =
            paths.filter(|path| path.extension().is_some_and(|end| end == "so") && path.is_file());
        let mut found: Vec<_> = artifacts.filter_map(|path| Some((model_name(&path)?, path))).collect();
        found.sort();
        found
    }
}

impl ModelLibrary for ArtifactLibrary {
    fn names(&self) -> Vec<String> {
        let mut names: Vec<String> = self.named.iter().map(|(name, _)| name.clone()).collect();
        for (name, _) in self.folder_artifacts() {
            if !names.contains(&name) {
                names.push(name);
            }
        }
        names
    }

    fn load(&self, name: &str, committed: u64) -> Result<ReadyModel, LoadError> {
        let is_it = |(known, _): &&(String, PathBuf)| known == name;
        let read = match self.named.iter().find(is_it) {
            // Artifacts that were built at the start may be built anew.
            Some((_, path)) => {
                let quant = self.args.quant.as_deref().filter(|_| checkpoint::is_checkpoint(path));
                let artifact = checkpoint::artifact_for(path, quant, &self.ui);
                artifact.and_then(|path| self.read(name, &path, committed))
            }
            None => match self.folder_artifacts().iter().find(is_it) {
                Some((_, path)) => self.read(name, path, committed),
                None => return Err(LoadError::Unknown(name.to_owned())),
            },
        };
        match read.map_err(|error| load_error(name, &error))? {
            ServedArtifact::Ready(ready) => Ok(*ready),
            ServedArtifact::Texts(_) => {
                let why = "it is an embedding model: name it when the server is started";
                Err(LoadError::Refused(why.into()))
            }
        }
    }
}

/// The operator of the server gets the whole of it, clients get it without folders.
fn load_error(name: &str, error: &CliError) -> LoadError {
    warn(&format!("{name} is not loaded: {error}"));
    LoadError::Refused(error.to_string())
}

/// The time without use after which a state is written to the folder of `--cache-dir`.
const REST: Duration = Duration::from_secs(2);

/// The folder of `--cache-dir`, which only its owner can read, as the files in it: they have what clients
/// have asked.
fn prefix_files(args: &ServeArgs) -> Result<Option<DiskCacheOptions>, CliError> {
    let Some(folder) = args.cache_dir.clone() else { return Ok(None) };
    let files = DiskCacheOptions { folder, max_bytes: args.cache_dir_size, idle_time: REST, warn };
    files.create_folder().map_err(CliError::io("create", &files.folder))?;
    Ok(Some(files))
}

fn warn(what: &str) {
    log_line(&format!("warning: {what}"));
}

fn log_line(line: &str) {
    // The receiver may have left.
    let _ = writeln!(std::io::stderr().lock(), "{line}");
}

/// The artifacts with the names that clients call them by.
fn artifact_names(args: &ServeArgs) -> Result<Vec<(String, PathBuf)>, CliError> {
    if args.alias.len() > args.artifacts.len() {
        let (aliases, artifacts) = (args.alias.len(), args.artifacts.len());
        return Err(CliError::usage(format!("{aliases} times --alias, but {artifacts} artifacts")));
    }
    let aliases = args.alias.iter().cloned().map(Some).chain(std::iter::repeat(None));
    let mut named: Vec<(String, PathBuf)> = Vec::new();
    for (path, alias) in args.artifacts.iter().zip(aliases) {
        let name = alias.or_else(|| model_name(path)).unwrap_or_else(|| "model".into());
        if named.iter().any(|(other, _)| *other == name) {
            return Err(CliError::usage(format!(
                "two artifacts are called {name}: give them names with --alias"
            )));
        }
        named.push((name, path.clone()));
    }
    check_adapters(args, &named)?;
    Ok(named)
}

/// Reads the adapters that clients load.
fn adapter_reader(model: &Model) -> ReadAdapter {
    let model = model.clone();
    Box::new(move |name, folder| {
        let request = AdapterRequest { directory: folder.to_path_buf(), scale: 1.0 };
        let loaded = run::load_adapter(&model, &request).map_err(|error| {
            warn(&format!("the adapter {name} is not loaded: {error}"));
            error.to_string()
        })?;
        Ok(TextAdapter::new(name, loaded))
    })
}

/// The folder that a flag names, which has to be there.
fn check_folder(flag: &str, folder: Option<&PathBuf>) -> Result<Option<PathBuf>, CliError> {
    let Some(folder) = folder else { return Ok(None) };
    let known = folder.canonicalize().map_err(CliError::io("open", folder))?;
    match known.is_dir() {
        true => Ok(Some(known)),
        false => Err(CliError::usage(format!("{flag}: {} is not a folder", folder.display()))),
    }
}

/// The keys of `--api-key` and of the file, of which at least one is there if one of the flags is.
fn api_keys(args: &ServeArgs) -> Result<Vec<String>, CliError> {
    let mut keys = args.api_key.clone();
    let Some(path) = &args.api_key_file else { return Ok(keys) };
    let text = std::fs::read_to_string(path).map_err(CliError::io("read", path))?;
    let found: Vec<_> =
        text.lines().map(str::trim).filter(|line| !line.is_empty()).map(str::to_owned).collect();
    if found.is_empty() {
        let why = format!("--api-key-file: {} has no key, expected one in a line", path.display());
        return Err(CliError::usage(why));
    }
    keys.extend(found);
    Ok(keys)
}

/// Names of adapters are names of models.
fn check_adapters(args: &ServeArgs, named: &[(String, PathBuf)]) -> Result<(), CliError> {
    if !args.lora.is_empty() && named.is_empty() {
        return Err(CliError::usage(
            "--lora is for the first artifact of the command line, and there is none",
        ));
    }
    let mut names: Vec<&str> = named.iter().map(|(name, _)| name.as_str()).collect();
    for NamedAdapter { name, .. } in &args.lora {
        if names.contains(&name.as_str()) {
            return Err(CliError::usage(format!(
                "two models are called {name}: give the adapter another name"
            )));
        }
        names.push(name);
    }
    Ok(())
}

pub fn run(args: &ServeArgs, ui: &Ui) -> Result<(), CliError> {
    let stop = interrupt::flag();
    let options = ServeOptions {
        host: args.host,
        port: args.port,
        sequences: args.sequences.map(usize::from),
        max_queue: usize::from(args.max_queue),
        memory: args.memory,
        api_keys: api_keys(args)?,
        request_memory: args.request_memory,
        allowed_hosts: args.allowed_host.clone(),
        trim: Some(allocator::trim_heaps),
        log: args.log.then_some(log_line),
        warn: Some(warn),
        body_limit: usize::try_from(args.body_limit).unwrap_or(usize::MAX),
        prefixes: prefix_files(args)?,
        lora_dir: check_folder("--lora-dir", args.lora_dir.as_ref())?,
        read_timeout: Duration::from_secs(args.read_timeout),
        timeout: args.timeout.map(Duration::from_secs),
        drain_timeout: Duration::from_secs(u64::from(args.drain_timeout)),
        traces: TraceExporter::from_environment(Some(warn))?,
    };
    let named = artifact_names(args)?;
    check_folder("--models", args.models.as_ref())?;
    let beside = mlcc_serve::server_memory(&options);
    let shelf = ArtifactLibrary {
        args: args.clone(),
        options,
        named: named.clone(),
        workers: Mutex::new(None),
        ui: *ui,
    };
    let (mut models, mut texts, mut committed) = (Vec::new(), Vec::new(), beside);
    // One that has no texts is no reason to serve none of the others.
    let several = named.len() > 1 || args.models.is_some();
    for (name, path) in named {
        let path = checkpoint::artifact_for(&path, args.quant.as_deref(), ui)?;
        let read = match shelf.read(&name, &path, committed) {
            Err(CliError::Carried(error @ ArtifactTokenizerError::NoTokenizer { .. })) if several => {
                ui.warn(format_args!("{name} is not served: {error}"));
                continue;
            }
            read => read?,
        };
        match read {
            ServedArtifact::Ready(ready) => {
                committed += ready.need();
                models.push((name, *ready));
            }
            ServedArtifact::Texts(model) => {
                committed += mlcc_serve::embedding_memory(&name, &model, &shelf.options, committed)?;
                texts.push((name, *model));
            }
        }
    }
    ui.note(format_args!(
        "Memory at most: {} for models, {} for requests and stored responses (--request-memory).",
        ui::bytes(committed - beside),
        ui::bytes(beside)
    ));
    let options = shelf.options.clone();
    let of_texts: Vec<String> = texts.iter().map(|(name, _)| name.clone()).collect();
    let ready = |address: SocketAddr, models: &[(String, usize)]| {
        let url = format!("http://{address}");
        let names = models.iter().map(|(name, _)| name).chain(&of_texts);
        let names: Vec<&str> = names.map(String::as_str).collect();
        if args.json {
            let mut out = std::io::stdout().lock();
            let first = models.first().cloned().unzip();
            let line = json!({"event": "ready", "url": url, "model": first.0, "sequences": first.1, "models": names});
            // A caller that does not read it needs no error.
            let _ = writeln!(out, "{line}").and_then(|()| out.flush());
        }
        for (name, sequences) in models {
            ui.note(format_args!(
                "{name} at {url}/v1, up to {} at a time.",
                ui::pluralize(*sequences, "sequence")
            ));
        }
        for NamedAdapter { name, .. } in &args.lora {
            ui.note(format_args!("{name} is an adapter of the first model: ask for it as `model`."));
        }
        for name in &of_texts {
            ui.note(format_args!("{name} at {url}/v1/embeddings or {url}/v1/rerank."));
        }
        ui.note(format_args!("The chat page is at {url}/. Ctrl-C shuts down gracefully."));
    };
    match mlcc_serve::serve_with(models, texts, Box::new(shelf), &options, stop, ready)? {
        ShutdownOutcome::Drained => {}
        ShutdownOutcome::Cut => ui.warn("some requests were ended early (--drain-timeout)"),
    }
    Ok(())
}
