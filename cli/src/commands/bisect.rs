//! `mlcc bisect`: which pass or kernel makes a model wrong.

use std::path::PathBuf;
use std::sync::atomic::Ordering;

use mlcc_models::ModelRequest;
use mlcc_passes::CacheType;
use mlcc_passes::pipeline::find_pass;
use mlcc_passes::policy::QuantPolicy;
use mlcc_passes::scheme::QuantScheme;

use super::build::{BackendArg, parse_cache};
use super::verify::prompt::PromptArgs;
use crate::commands::{print, print_json};
use crate::error::CliError;
use crate::ui::Ui;
use mlcc_driver::compile::keep::{BASE, KEEP};
use mlcc_driver::compile::{BuildOptions, BuildSource};
use mlcc_driver::layers::bisect::{BisectVerdict, PassTrial, bisect_passes};
use mlcc_driver::layers::split_calls;

#[derive(Debug, clap::Args)]
#[command(
    after_help = "Builds the model, keeps the outputs of all layers and compares them with the interpreted graph; if \
        one differs, builds it again without each optional pass. Exit code 0 if nothing is wrong. Example: mlcc bisect \
        ./rwkv-4-169m --quant q4f16"
)]
pub struct BisectArgs {
    /// Folder or file of a checkpoint, hf:org/repo, or a preset name
    model: String,
    /// Folder or file with the weights, instead of the model's own
    #[arg(long, value_name = "PATH")]
    weights: Option<PathBuf>,
    /// Use random weights from this seed instead of reading weights
    #[arg(long, value_name = "SEED", conflicts_with = "weights")]
    random_weights: Option<u64>,
    /// Machine to compile for; code that cannot run here is interpreted
    #[arg(long, visible_alias = "device", default_value = "cpu", value_parser = super::parse_target, env = "MLCC_TARGET")]
    target: String,
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
    /// Maximum number of tokens in one prefill call
    #[arg(long, default_value_t = 128, value_parser = clap::value_parser!(u32).range(1..=65536))]
    chunk: u32,
    /// Code generator
    #[arg(long, value_enum, env = "MLCC_BACKEND")]
    backend: Option<BackendArg>,
    /// Passes to disable in every build
    #[arg(long, value_name = "PASS", value_delimiter = ',')]
    disable_pass: Vec<String>,
    #[command(flatten)]
    prompt: PromptArgs,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

pub fn run(args: &BisectArgs, ui: &Ui) -> Result<(), CliError> {
    let options = options(args)?;
    let target = mlcc_target::resolve_target(&args.target)?;
    let source = BuildSource::open(&options)?;
    let options = options.for_source(&source);
    let vocab = source.model.config.architecture.vocab();
    let tokenizer = || {
        let found = source.tokenizer.as_ref().map(|t| t.file.load());
        Ok(found.ok_or_else(|| CliError::usage("the model has no tokenizer; give --tokens"))??)
    };
    let tokens = args.prompt.tokens(vocab, tokenizer)?;
    let folder = mlcc_codegen::folder::create_temporary("mlcc-bisect-")
        .map_err(CliError::io("create", std::env::temp_dir()))?;
    let calls = split_calls(&tokens, args.chunk as usize);
    let progress = |trial: &PassTrial| ui.note(trial_text(trial).trim_end());
    let cancel = crate::interrupt::flag();
    let verdict = bisect_passes(&source, &target, &options, &calls, folder.path(), cancel, progress)
        .map_err(|e| match cancel.load(Ordering::Relaxed) {
            true => CliError::Interrupted,
            false => CliError::Failed(format!("{}: {e}", args.model)),
        })?;
    match args.json {
        true => print_json(&verdict)?,
        false => print(&text(&verdict))?,
    }
    if verdict.whole.ok() { Ok(()) } else { Err(CliError::Reported) }
}

fn options(args: &BisectArgs) -> Result<BuildOptions, CliError> {
    let usage = |e: &dyn std::fmt::Display| CliError::usage(e.to_string());
    let mut options = BuildOptions::new(&args.model);
    options.request = ModelRequest::new(&args.model);
    options.request.weights = args.weights.clone();
    options.request.random_weights = args.random_weights;
    options.keep_quant = args.quant.eq_ignore_ascii_case(KEEP);
    let scheme = if options.keep_quant { BASE } else { args.quant.as_str() };
    options.quant = QuantScheme::from_name(scheme).map_err(|e| usage(&e))?.0;
    options.quant_name = options.quant.name.into();
    options.kv_cache = args.kv_cache;
    options.target = args.target.clone();
    options.chunk = Some(args.chunk);
    options.backend = args.backend.map_or_else(Default::default, BackendArg::backend);
    for name in &args.disable_pass {
        find_pass(name).map_err(|e| usage(&e))?;
    }
    options.disabled_passes = args.disable_pass.clone();
    if let Some(path) = &args.quant_policy {
        let text = mlcc_files::read_to_string(path, mlcc_files::FileKind::QuantPolicy)
            .map_err(CliError::io("read", path))?;
        let policy = QuantPolicy::parse_file(path.display().to_string(), &text);
        options.policy = policy.map_err(|e| CliError::Failed(format!("{}: {e}", path.display())))?;
    }
    Ok(options)
}

fn trial_text(trial: &PassTrial) -> String {
    let verdict = if trial.ok { "right" } else { "still wrong" };
    format!("without {}: {verdict}, error {:.1e}\n", trial.without, trial.error)
}

fn text(verdict: &BisectVerdict) -> String {
    let mut out = String::new();
    if let Some(layers) = &verdict.whole.layers {
        out.push_str(&layers.text());
        out.push('\n');
    }
    for cost in &verdict.whole.costs {
        out.push_str(&format!("{} moves the logits by {:.1e}, on purpose\n", cost.pass, cost.error));
    }
    if let Some(diagnosis) = &verdict.whole.diagnosis {
        out.push_str(&diagnosis.text());
        out.push('\n');
    }
    verdict.trials.iter().for_each(|t| out.push_str(&trial_text(t)));
    out.push_str(&format!("{}\n", verdict.sentence()));
    out
}
