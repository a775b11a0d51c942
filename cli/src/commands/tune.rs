//! `mlcc tune`: finds values of the tune tables that are faster on this machine, or predicted to be so on a
//! GPU, and writes them for `mlcc build --tuning`.

use std::path::PathBuf;

use mlcc_bench::tune::{TuneOptions, tune_level};
use mlcc_passes::CacheType;

use crate::commands::bench_host::TerminalHost;
use crate::commands::build::{MOST_POSITIONS, download_listener, offline_by_environment, parse_cache};
use crate::commands::{print, print_json};
use crate::error::CliError;
use crate::ui::Ui;

#[derive(Debug, clap::Args)]
#[command(after_help = "Example: mlcc tune tinyllama-1.1b --quant q4i8 --budget 600 -o zen.toml
         mlcc build -m ./TinyLlama --quant q4i8 --tuning zen.toml
         mlcc tune llama-3-8b --quant q4f16_2 --target sm_90 --predict h200 -o hopper.toml")]
pub struct TuneArgs {
    /// Whatever `mlcc build --model` takes, or a compiled model with the wanted configuration and formats.
    /// Weights are not read
    #[arg(value_name = "MODEL|ARTIFACT", env = "MLCC_MODEL")]
    model: String,
    /// Weight format: a name from `mlcc quants` [default: that of the artifact]
    #[arg(long, visible_alias = "quantization", env = "MLCC_QUANT")]
    quant: Option<String>,
    /// Level to tune: a CPU level that runs here, or any GPU level with `--predict`
    #[arg(long, default_value = "cpu", value_parser = super::parse_target, env = "MLCC_TARGET")]
    target: String,
    /// Judge by predicted times on this GPU (`h200`) instead of measured ones; for GPU levels. Needs NVIDIA's
    /// ptxas and nvdisasm
    #[arg(long, value_name = "GPU")]
    predict: Option<String>,
    /// Storage of keys and values, as for `mlcc build`
    #[arg(long, value_name = "TYPE", value_parser = parse_cache)]
    kv_cache: Option<CacheType>,
    /// Maximum number of tokens in one prefill call, as for `mlcc build`
    #[arg(long, value_parser = clap::value_parser!(u32).range(1..=65536))]
    chunk: Option<u32>,
    /// Maximum number of tokens of one sequence, as for `mlcc build`
    #[arg(short = 'c', long, value_parser = clap::value_parser!(u64).range(1..=MOST_POSITIONS))]
    ctx_size: Option<u64>,
    /// Worker threads of timed runs [default: physical cores]
    #[arg(short, long, env = "MLCC_THREADS", value_parser = clap::value_parser!(u16).range(1..=1024))]
    threads: Option<u16>,
    /// End the search after this time; a final comparison follows
    #[arg(long, default_value_t = 300.0, value_name = "SECONDS", allow_negative_numbers = true, value_parser = parse_budget)]
    budget: f64,
    /// Tuning to write [default: {model}-{quant}-{level}.toml]
    #[arg(short, long, value_name = "FILE")]
    output: Option<PathBuf>,
    /// Look for the model in this Hugging Face cache folder
    #[arg(long, value_name = "DIR")]
    hf_cache: Option<PathBuf>,
    /// Download nothing
    #[arg(long)]
    offline: bool,
    /// Print the result as JSON on standard output
    #[arg(long)]
    json: bool,
}

/// A day: longer searches find nothing more.
const LONGEST: f64 = 86400.0;

fn parse_budget(text: &str) -> Result<f64, String> {
    let value = text.parse().ok().filter(|value: &f64| *value >= 0.0 && *value <= LONGEST);
    value.ok_or_else(|| format!("`{text}` is not a number of seconds from 0 to {LONGEST}"))
}

pub fn run(args: &TuneArgs, ui: &Ui) -> Result<(), CliError> {
    let options = TuneOptions {
        model: args.model.clone(),
        quant: args.quant.clone(),
        target: args.target.clone(),
        predict: args.predict.clone(),
        kv_cache: args.kv_cache,
        chunk: args.chunk,
        ctx_size: args.ctx_size,
        threads: args.threads.map(usize::from),
        budget: args.budget,
        output: args.output.clone(),
        hf_cache: args.hf_cache.clone(),
        download: (!args.offline && !offline_by_environment()).then(|| download_listener(ui)),
    };
    let report = tune_level(&options, &TerminalHost::new("tune", ui))?;
    if args.json {
        print_json(&report)?
    } else {
        print(&report.text())?
    }
    if report.is_interrupted() { Err(CliError::Interrupted) } else { Ok(()) }
}
