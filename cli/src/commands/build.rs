//! `mlcc build`.

use std::path::{Path, PathBuf};
use std::sync::atomic::Ordering;
use std::sync::{Mutex, PoisonError};

use clap::ValueEnum;
use mlcc_codegen::cache::ObjectCache;
use mlcc_codegen::ptxas::PtxAssembler;
use mlcc_models::pooling_head::POOLINGS;
use mlcc_models::{AdapterRequest, AdapterSlots, DownloadEvent, DownloadListener, ModelRequest, PoolingMode};
use mlcc_passes::pipeline::{PIPELINE, find_pass};
use mlcc_passes::policy::QuantPolicy;
use mlcc_passes::scheme::QuantScheme;
use mlcc_passes::{CacheType, TpMode};
use mlcc_target::Arch;

use crate::commands::{print, print_json};
use crate::error::CliError;
use crate::interrupt;
use crate::ui::Ui;
use bar::BuildBar;
use mlcc_driver::compile::keep::{BASE, KEEP};
use mlcc_driver::compile::{
    Backend, BuildEvent, BuildHooks, BuildOptions, BuildReport, EmitKind, ModuleText, ReportMode,
    ReportOptions, TuningFile,
};

mod bar;
pub(crate) mod dump;
mod show;

/// Positions are `i32` in kernels.
pub(super) const MOST_POSITIONS: u64 = i32::MAX as u64;

#[derive(Debug, clap::Args)]
#[command(after_help = "Example: mlcc build --model ./rwkv-4-430m --target cpu --quant q4f16 -o rwkv.so")]
pub struct BuildArgs {
    /// Folder or file of a checkpoint, hf:org/repo, a preset name (see `mlcc models`), or a module in text
    /// form (.mlc, with --weights)
    #[arg(short, long, env = "MLCC_MODEL")]
    model: String,
    /// Folder or file with the weights, instead of the model's own
    #[arg(long, value_name = "PATH")]
    weights: Option<PathBuf>,
    /// Use random weights from this seed instead of reading weights, for benchmarks
    #[arg(long, value_name = "SEED")]
    random_weights: Option<u64>,
    /// LoRA adapter in PEFT format to merge into the weights, with an optional scale (repeatable; adapters
    /// add up)
    #[arg(long, value_name = "DIR[=SCALE]", conflicts_with = "weights_on_load")]
    lora: Vec<AdapterRequest>,
    /// Reserve N slots for LoRA adapters that are selected per sequence at run time (`--lora` of run and
    /// chat)
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=256), conflicts_with = "weights_on_load")]
    lora_slots: Option<u32>,
    /// Maximum rank of such an adapter; rounded up to a multiple of 16 [default: 16]
    #[arg(long, value_name = "R", requires = "lora_slots", value_parser = clap::value_parser!(u32).range(1..=1024))]
    lora_rank: Option<u32>,
    /// Tokenizer file, instead of the one next to the model
    #[arg(long, value_name = "FILE")]
    tokenizer: Option<PathBuf>,
    /// Chat template to use instead of the model's own: a name (chatml, llama-2, llama-3, ...) or a file of
    /// Jinja text
    #[arg(long, value_name = "NAME|FILE")]
    template: Option<String>,
    /// Build an embedding model that pools token vectors this way: the first token's (cls), the last token's
    /// (lasttoken), or their mean [default: as modules.json next to the weights says]
    #[arg(long, value_name = "HOW", value_parser = parse_pooling)]
    pooling: Option<PoolingMode>,
    /// Build a reranker from a model that answers with one of two tokens: the score is the logit of the first
    /// minus that of the second [default: yes,no for Qwen3-Reranker, else as modules.json says]
    #[arg(long, value_name = "YES,NO", value_parser = parse_answers, conflicts_with = "pooling")]
    rerank_by: Option<[String; 2]>,
    /// Machine to compile for: cpu (this one; also native, host) or a name from `mlcc targets`; separate
    /// several CPU levels by commas
    #[arg(long, visible_alias = "device", default_value = "cpu", value_parser = super::parse_target, env = "MLCC_TARGET")]
    target: String,
    /// Tuning file that `mlcc tune` wrote for a level of the target
    #[arg(long, value_name = "FILE")]
    tuning: Option<PathBuf>,
    /// Weight format: a name from `mlcc quants`, or `keep` for the types in which the weights are stored
    #[arg(long, visible_alias = "quantization", default_value = KEEP, env = "MLCC_QUANT")]
    quant: String,
    /// TOML file with per-tensor exceptions from the weight format
    #[arg(long, value_name = "FILE")]
    quant_policy: Option<PathBuf>,
    /// Storage of keys and values: f32, f16, bf16, or i8 with a scale per row and head [default: f32 with f32
    /// weights, else f16]
    #[arg(long, value_name = "TYPE", value_parser = parse_cache)]
    kv_cache: Option<CacheType>,
    /// Artifact to write [default: {model}-{quant}-{target}.so, with +{adapter} after the model for each
    /// --lora]
    #[arg(short, long, value_name = "FILE")]
    output: Option<PathBuf>,
    /// Maximum number of tokens in one prefill call; scratch memory grows with it [default: 128; 512 for
    /// models with experts; 2048 on GPUs; up to 2048 for models that must read the whole prompt at once]
    #[arg(long, visible_alias = "prefill-chunk-size", value_parser = clap::value_parser!(u32).range(1..=65536))]
    chunk: Option<u32>,
    /// Maximum number of sequences decoded together in one step; 1 omits the entry point for batches
    /// [default: 16 on CPUs, 1 on GPUs]
    #[arg(long, visible_alias = "max-batch-size", value_name = "N", value_parser = clap::value_parser!(u32).range(1..=256))]
    max_batch: Option<u32>,
    /// Split the model among N ranks, each with a part of the weights and caches. Ranks are groups of threads
    /// in one process or separate processes (always on GPUs); see docs/tensor-parallel.md [default: 1]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=16))]
    tensor_parallel: Option<u32>,
    /// What ranks exchange: gather (parts of values; bit-identical to one rank), codes (also bit-identical,
    /// with fewer bytes if matmuls read 8-bit activations), reduce (also partial sums: fewer exchanges,
    /// different rounding), or auto (gather or reduce, whichever costs less; --explain-passes says why)
    /// [default: gather]
    #[arg(long, value_name = "MODE", requires = "tensor_parallel", value_parser = parse_tp_mode)]
    tp_mode: Option<TpMode>,
    /// Make logits bit-identical whatever else is in the batch, also with 8-bit activations (see
    /// docs/same-bits.md). Attention of single tokens gets slower. For CPUs
    #[arg(long)]
    batch_invariant: bool,
    /// Add machine code for each GPU of --target to its PTX, which loads faster; needs NVIDIA's ptxas.
    /// Drivers that cannot load it translate the PTX
    #[arg(long)]
    cubin: bool,
    /// Maximum number of tokens of one sequence [default: what the model was trained with, at most 4096; no
    /// limit for recurrent models]
    #[arg(short = 'c', long, visible_alias = "context-window-size", value_parser = clap::value_parser!(u64).range(1..=MOST_POSITIONS))]
    ctx_size: Option<u64>,
    /// Attention window in tokens, including attention sinks: the sequence has no maximum length, and older
    /// tokens are dropped (rotary and ALiBi models) [default: the model's own window]
    #[arg(long, visible_alias = "sliding-window-size", value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    sliding_window: Option<u32>,
    /// Number of first tokens of the sequence that stay in the window [default: 0]
    #[arg(long, visible_alias = "attention-sink-size", value_name = "N")]
    attention_sinks: Option<u32>,
    /// Code generator
    #[arg(long, value_enum, env = "MLCC_BACKEND")]
    backend: Option<BackendArg>,
    /// Write the weights into a .safetensors file next to the artifact
    #[arg(long)]
    split_weights: bool,
    /// Generate random weights at load time instead of storing them; distributed like those of
    /// --random-weights, with other values
    #[arg(long, requires = "random_weights", conflicts_with_all = ["split_weights", "debug_taps", "report", "eval_text", "max_kl"])]
    weights_on_load: bool,
    /// Fail if the model needs more memory than this at run time (1500000000, 1.5GB, 2GiB)
    #[arg(long, value_name = "BYTES", value_parser = parse_bytes)]
    memory_budget: Option<u64>,
    /// Skip an optimizing pass (repeatable)
    #[arg(long, value_name = "PASS", value_delimiter = ',')]
    disable_pass: Vec<String>,
    /// Stop after this pass; nothing is written
    #[arg(long, value_name = "PASS")]
    stop_after: Option<String>,
    /// Print the module after a pass (repeatable; `all` for every pass)
    #[arg(long, value_name = "PASS", value_delimiter = ',', conflicts_with = "json")]
    print_after: Vec<String>,
    /// Print what each pass matched, why near matches did not, and how each kernel is made
    #[arg(long)]
    explain_passes: bool,
    /// Write the module after every pass into this folder
    #[arg(long, value_name = "DIR")]
    debug_dump: Option<PathBuf>,
    /// Keep every layer's output for `mlcc verify --layers`; costs memory and some speed
    #[arg(long)]
    debug_taps: bool,
    /// Measure the artifact on a text and store the results in it: perplexity, KL divergence from f32 and
    /// top-token agreement [default: if a text (eval.txt, valid.txt) is next to the model]
    #[arg(long, conflicts_with = "no_report")]
    report: bool,
    /// Do not measure
    #[arg(long)]
    no_report: bool,
    /// Text to measure on, instead of the one next to the model
    #[arg(long, value_name = "FILE")]
    eval_text: Option<PathBuf>,
    /// Measure on at most N tokens
    #[arg(long, value_name = "N", default_value_t = 512, value_parser = clap::value_parser!(u32).range(2..))]
    eval_tokens: u32,
    /// Fail, and write nothing, if the mean KL divergence from f32 is larger; implies --report
    #[arg(long, value_name = "NATS", value_parser = parse_kl, conflicts_with = "no_report")]
    max_kl: Option<f64>,
    /// Write the code generator's text output instead of an artifact
    #[arg(long, value_enum)]
    emit: Option<EmitArg>,
    /// Neither read nor write the cache of compiled code (`mlcc doctor` shows its folder)
    #[arg(long)]
    no_cache: bool,
    /// Look for the model in this Hugging Face cache folder
    #[arg(long, value_name = "DIR")]
    hf_cache: Option<PathBuf>,
    /// Download nothing: a preset or hf:org/repo must already be in the Hugging Face cache (also
    /// HF_HUB_OFFLINE=1)
    #[arg(long)]
    offline: bool,
    /// Print the report as JSON on standard output
    #[arg(long)]
    json: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum BackendArg {
    Llvm,
    Cranelift,
}

impl BackendArg {
    pub(crate) fn backend(self) -> Backend {
        match self {
            BackendArg::Llvm => Backend::Llvm,
            BackendArg::Cranelift => Backend::Cranelift,
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum EmitArg {
    Llvm,
    Asm,
    Ptx,
}

pub fn run(args: &BuildArgs, ui: &Ui) -> Result<(), CliError> {
    report(&build_artifact(args, ui)?, args, ui)
}

/// The same without a word on standard output.
pub(super) fn run_quietly(args: &BuildArgs, ui: &Ui) -> Result<(), CliError> {
    let report = build_artifact(args, ui)?;
    report.warnings.iter().for_each(|warning| ui.warn(warning));
    print_report(&report, ui);
    Ok(())
}

/// Tells of the build in one line, with --verbose in tables.
fn print_report(report: &BuildReport, ui: &Ui) {
    ui.detail(show::report_tables(report).trim_end());
    ui.note(show::summary_line(report));
}

fn build_artifact(args: &BuildArgs, ui: &Ui) -> Result<BuildReport, CliError> {
    let mut options = options(args, ui)?;
    let mut dumps = dump::ModuleDumps::new(&args.print_after, args.debug_dump.as_deref())?;
    let bar = BuildBar::new(ui);
    options.code_listener = Some(bar.code_listener());
    let mut event = |event: BuildEvent<'_>| {
        match event {
            BuildEvent::Phase(name) => ui.detail(format_args!("{name} ...")),
            BuildEvent::Pass { pass, program } => dumps.dump_after(pass.name, program),
            BuildEvent::Weights { .. } | BuildEvent::Report { .. } => {}
        }
        bar.event(&event);
    };
    let result = mlcc_driver::compile::build(
        &options,
        &mut BuildHooks { event: &mut event, cancel: interrupt::flag() },
    );
    bar.clear();
    dumps.finish()?;
    Ok(result?)
}

fn report(report: &BuildReport, args: &BuildArgs, ui: &Ui) -> Result<(), CliError> {
    report.warnings.iter().for_each(|warning| ui.warn(warning));
    if args.explain_passes {
        report.notes.iter().for_each(|(pass, line)| ui.note(format_args!("{pass}: {line}")));
    }
    if args.json {
        return print_json(report);
    }
    print_report(report, ui);
    let files = report.artifact.iter().chain(&report.weights_file).chain(&report.emitted);
    let list: String = files.map(|f| format!("{}\n", f.display())).collect();
    print(&list)
}

fn options(args: &BuildArgs, ui: &Ui) -> Result<BuildOptions, CliError> {
    // Mistakes in names are errors before anything is read.
    let target = mlcc_target::resolve_target(&args.target).map_err(|e| CliError::usage(e.to_string()))?;
    if args.emit == Some(EmitArg::Ptx) && target.arch != Arch::Nvptx {
        return Err(CliError::usage("--emit ptx needs a GPU --target, for example cuda or sm_80"));
    }
    for name in args.disable_pass.iter().chain(&args.stop_after) {
        find_pass(name).map_err(|e| CliError::usage(e.to_string()))?;
    }
    if let Some(name) = args.disable_pass.iter().find(|name| find_pass(name).is_ok_and(|pass| !pass.optional))
    {
        return Err(CliError::usage(format!(
            "--disable-pass: pass `{name}` cannot be switched off, it is required"
        )));
    }
    if args.weights.is_some() && args.random_weights.is_some() && !ModuleText::is_named(&args.model) {
        return Err(CliError::usage("--random-weights cannot be used with --weights"));
    }
    let mut request = ModelRequest::new(&args.model);
    request.weights = args.weights.clone();
    request.random_weights = args.random_weights;
    request.pooling = args.pooling;
    request.adapters = args.lora.clone();
    request.download = (!args.offline && !offline_by_environment()).then(|| download_listener(ui));
    if let Some(directory) = &args.hf_cache {
        request.cache.directory = directory.clone();
    }
    let backend = args.backend.map_or_else(Backend::default, BackendArg::backend);
    let keep_quant = args.quant.eq_ignore_ascii_case(KEEP);
    // The meaning of `keep` depends on the weights.
    let scheme = if keep_quant { BASE } else { args.quant.as_str() };
    let (quant, stands_for) = QuantScheme::from_name(scheme).map_err(|e| CliError::usage(e.to_string()))?;
    if let Some(note) = stands_for {
        ui.note(note);
    }
    Ok(BuildOptions {
        request,
        tokenizer: args.tokenizer.clone(),
        template: args.template.as_deref().map(|name| super::chat_template(name, "")).transpose()?,
        target: args.target.clone(),
        tuning: args.tuning.as_deref().map(TuningFile::read).transpose()?,
        quant,
        quant_name: args.quant.to_lowercase(),
        keep_quant,
        policy: read_policy(args.quant_policy.as_deref())?,
        kv_cache: args.kv_cache,
        output: args.output.clone(),
        chunk: args.chunk,
        batch: args.max_batch,
        ranks: args.tensor_parallel.map_or(1, |n| n as usize),
        tp_mode: args.tp_mode.unwrap_or_default(),
        batch_invariant: args.batch_invariant,
        adapters: args.lora_slots.map(|slots| AdapterSlots {
            slots: slots as usize,
            rank: (args.lora_rank.unwrap_or(16) as usize).next_multiple_of(AdapterSlots::RANK_STEP),
        }),
        answers: args.rerank_by.clone(),
        context: args.ctx_size,
        sliding_window: args.sliding_window.map(|n| n as usize),
        attention_sinks: args.attention_sinks.map(|n| n as usize),
        backend,
        assembler: args
            .cubin
            .then(PtxAssembler::find)
            .transpose()
            .map_err(|e| CliError::Failed(format!("--cubin: {e}")))?,
        split_weights: args.split_weights,
        weights_on_load: args.weights_on_load,
        memory_budget: args.memory_budget,
        disabled_passes: args.disable_pass.clone(),
        stop_after: args.stop_after.clone(),
        emit: args.emit.map(|e| match e {
            EmitArg::Llvm => EmitKind::Llvm,
            EmitArg::Asm | EmitArg::Ptx => EmitKind::Assembly,
        }),
        pipeline: PIPELINE,
        debug_taps: args.debug_taps,
        report: ReportOptions {
            mode: match (args.no_report, args.report || args.max_kl.is_some() || args.eval_text.is_some()) {
                (true, _) => ReportMode::Off,
                (false, true) => ReportMode::On,
                (false, false) => ReportMode::Auto,
            },
            text: args.eval_text.clone(),
            tokens: args.eval_tokens as usize,
            max_kl: args.max_kl,
        },
        cache: if args.no_cache { None } else { ObjectCache::from_environment() },
        code_listener: None,
    })
}

pub(super) fn offline_by_environment() -> bool {
    std::env::var("HF_HUB_OFFLINE").is_ok_and(|value| !matches!(value.as_str(), "" | "0" | "false"))
}

/// Shows each file; where that is not seen, a line for each. An interrupt ends the program here, and what has
/// come stays in the cache, where the next attempt goes on with it.
pub(super) fn download_listener(ui: &Ui) -> DownloadListener {
    let (ui, bar) = (*ui, ui.bytes_progress("download"));
    let file = Mutex::new(String::new());
    DownloadListener::new(move |event| {
        if interrupt::flag().load(Ordering::SeqCst) {
            bar.clear();
            ui.note("interrupted; the next download continues where this one stopped");
            std::process::exit(interrupt::EXIT_CODE);
        }
        let mut file = file.lock().unwrap_or_else(PoisonError::into_inner);
        match event {
            DownloadEvent::Planned(plan) => ui.note(format_args!(
                "download {}: {}, {}",
                plan.source,
                crate::ui::pluralize(plan.files as u64, "file"),
                crate::ui::bytes(plan.missing_bytes)
            )),
            DownloadEvent::File { name, done, files } => {
                *file = format!("{name} ({} of {files})", done + 1);
                ui.detail(format_args!("download {file}"));
            }
            DownloadEvent::Bytes { done, total } => bar.set(done, total, file.clone()),
            DownloadEvent::Finished => bar.clear(),
        }
    })
}

pub(super) fn parse_cache(name: &str) -> Result<CacheType, String> {
    let known = CacheType::ALL.map(CacheType::name).join(", ");
    CacheType::from_name(&name.to_lowercase()).ok_or_else(|| format!("unknown cache type; known are {known}"))
}

fn parse_tp_mode(name: &str) -> Result<TpMode, String> {
    let known = TpMode::ALL.map(TpMode::name);
    let found = TpMode::ALL.into_iter().find(|mode| mode.name() == name.to_lowercase());
    found.ok_or_else(|| format!("unknown mode; known are {}", known.join(", ")))
}

fn parse_pooling(name: &str) -> Result<PoolingMode, String> {
    let known = POOLINGS.map(|(name, _)| name).join(", ");
    PoolingMode::from_name(&name.to_lowercase())
        .ok_or_else(|| format!("unknown way of pooling; known are {known}"))
}

fn parse_answers(text: &str) -> Result<[String; 2], String> {
    match text.split_once(',') {
        Some((yes, no)) if !yes.is_empty() && !no.is_empty() => Ok([yes.into(), no.into()]),
        _ => Err("write the two tokens with a comma between, for example yes,no".into()),
    }
}

fn read_policy(path: Option<&Path>) -> Result<QuantPolicy, CliError> {
    let Some(path) = path else { return Ok(QuantPolicy::default()) };
    let text = mlcc_files::read_to_string(path, mlcc_files::FileKind::QuantPolicy)
        .map_err(CliError::io("read", path))?;
    QuantPolicy::parse_file(path.display().to_string(), &text)
        .map_err(|e| CliError::Failed(format!("{}: {e}", path.display())))
}

fn parse_kl(text: &str) -> Result<f64, String> {
    let value = text.parse().ok().filter(|v: &f64| v.is_finite() && *v >= 0.0);
    value.ok_or_else(|| format!("`{text}` is not a number of nats; write for example 0.01"))
}

/// `1500000000`, `1.5GB`, `2GiB`, `512M`.
pub(crate) fn parse_bytes(text: &str) -> Result<u64, String> {
    let wrong = || format!("`{text}` is not a number of bytes; write for example 1500000000, 1.5GB or 2GiB");
    let split = text.find(|c: char| c.is_ascii_alphabetic()).unwrap_or(text.len());
    let number: f64 = text[..split].trim().parse().map_err(|_| wrong())?;
    let factor = match text[split..].to_ascii_lowercase().as_str() {
        "" | "b" => 1.0,
        "k" | "kb" => 1e3,
        "m" | "mb" => 1e6,
        "g" | "gb" => 1e9,
        "t" | "tb" => 1e12,
        "kib" => 1024.0,
        "mib" => 1024.0 * 1024.0,
        "gib" => 1024.0 * 1024.0 * 1024.0,
        "tib" => 1024.0 * 1024.0 * 1024.0 * 1024.0,
        _ => return Err(wrong()),
    };
    let bytes = number * factor;
    if bytes.is_finite() && (0.0..1.8e19).contains(&bytes) { Ok(bytes as u64) } else { Err(wrong()) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_with_units() {
        assert_eq!(parse_bytes("1500"), Ok(1500));
        assert_eq!(parse_bytes("1.5GB"), Ok(1_500_000_000));
        assert_eq!(parse_bytes("2GiB"), Ok(2 << 30));
        for wrong in ["", "GB", "-1", "1 parsec", "nan", "1e40"] {
            assert!(parse_bytes(wrong).is_err(), "{wrong}");
        }
    }
}
