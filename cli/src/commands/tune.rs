//! `mlcc tune`: finds values of the tune tables that are faster on this machine, or predicted to be so on a
//! GPU, and writes them for `mlcc build --tuning`.

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use mlcc_driver::tune::{SpeedComparison, confirm_tuning, search_tuning};
use mlcc_files::write_file;
use mlcc_passes::CacheType;
use mlcc_target::{FeatureLevel, LevelTuning, detected_features};

use crate::commands::bench::predict::{NvidiaTools, find_gpu};
use crate::commands::bench::probe;
use crate::commands::build::{MOST_POSITIONS, parse_cache};
use crate::commands::{print, print_json};
use crate::error::CliError;
use crate::ui::Ui;
use builder::TrialBuilder;
use machine::TimingBench;
use predicted::{MANY, PredictionBench};
use report::{ProbedLimits, SearchOutcome, TuneReport};

mod builder;
mod machine;
mod predicted;
mod report;
mod source;

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
    #[arg(long, default_value = "cpu", env = "MLCC_TARGET")]
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
/// Seconds for which all threads are busy before the limits are probed.
const WARM_UP: f64 = 1.0;

fn parse_budget(text: &str) -> Result<f64, String> {
    let value = text.parse().ok().filter(|value: &f64| *value >= 0.0 && *value <= LONGEST);
    value.ok_or_else(|| format!("`{text}` is not a number of seconds from 0 to {LONGEST}"))
}

pub fn run(args: &TuneArgs, ui: &Ui) -> Result<(), CliError> {
    let level = level(&args.target)?;
    if level.tune_tables().is_none() {
        return Err(CliError::usage(format!(
            "{} has nothing to tune: its kernels use no tensor cores; name a level from sm_80 on",
            level.name
        )));
    }
    match (&args.predict, level.gpu.is_some()) {
        (Some(gpu), true) => tune_by_predictions(args, &level, gpu, ui),
        (None, false) => tune_by_timing(args, &level, ui),
        (None, true) => Err(CliError::usage(format!(
            "{} is a level of GPUs, on which nothing is timed yet: --predict h200 judges by predicted times",
            level.name
        ))),
        (Some(gpu), false) => Err(CliError::usage(format!(
            "--predict {gpu} is for levels of GPUs, and {} is one of CPUs, on which values are timed: leave the flag out, or \
             name a GPU level with --target",
            level.name
        ))),
    }
}

fn tune_by_timing(args: &TuneArgs, level: &FeatureLevel, ui: &Ui) -> Result<(), CliError> {
    let begin = Instant::now();
    let origin = source::find_source(args, ui)?;
    let threads = args.threads.map_or_else(mlcc_runtime::physical_cores, usize::from);
    let bar = ui.count_bar("tune");
    let mut bench = TimingBench::new(TrialBuilder::open(origin, level)?, threads, ui, &bar);
    let output = output(args, bench.builder(), level);

    bar.set_length(args.budget as u64);
    bar.set_message("probing the machine");
    probe::keep_busy(threads, WARM_UP);
    let before = ProbedLimits::probe(threads)?;
    bench.end = Some(begin + Duration::from_secs_f64(args.budget));
    let mut found = search_tuning(&mut bench, level)?;
    let interrupted = bench.builder().is_interrupted();
    let mut last = Vec::new();
    let mut limits = before.clone();
    if !interrupted {
        bar.set_message("what was found against the start");
        bench.end = None;
        last = unless_interrupted(confirm_tuning(&mut bench, level, &mut found.artifact))?;
        limits = before.widen(&ProbedLimits::probe(threads)?);
    }
    bar.finish_and_clear();
    let interrupted = bench.builder().is_interrupted();
    let outcome = SearchOutcome { level, found: &found, confirmation: &last, interrupted };
    let tuning = outcome.measured(&bench, &limits, threads);
    finish(args, ui, (&output, tuning), &outcome, begin)
}

fn tune_by_predictions(args: &TuneArgs, level: &FeatureLevel, gpu: &str, ui: &Ui) -> Result<(), CliError> {
    let begin = Instant::now();
    let gpu = find_gpu(gpu)?;
    if let Some(needed) = level.gpu.as_ref().filter(|needed| needed.sm > gpu.sm) {
        return Err(CliError::usage(format!(
            "--predict {}: it is an sm_{}, and code of {} needs sm_{} or later",
            gpu.name, gpu.sm, level.name, needed.sm
        )));
    }
    let tools = NvidiaTools::find()?;
    let versions = tools.versions()?;
    let mut origin = source::find_source(args, ui)?;
    origin.options.batch = Some(MANY as u32);
    let bar = ui.count_bar("tune");
    let mut predictions = PredictionBench::new(TrialBuilder::open(origin, level)?, (gpu, tools), ui, &bar);
    let output = output(args, predictions.builder(), level);

    bar.set_length(args.budget as u64);
    predictions.end = Some(begin + Duration::from_secs_f64(args.budget));
    let mut found = search_tuning(&mut predictions, level)?;
    let mut last = Vec::new();
    if !predictions.builder().is_interrupted() {
        bar.set_message("what was found against the start");
        predictions.end = None;
        last = unless_interrupted(confirm_tuning(&mut predictions, level, &mut found.artifact))?;
    }
    bar.finish_and_clear();
    let interrupted = predictions.builder().is_interrupted();
    let outcome = SearchOutcome { level, found: &found, confirmation: &last, interrupted };
    let tuning = outcome.predicted(&predictions, versions);
    finish(args, ui, (&output, tuning), &outcome, begin)
}

/// The comparisons; none if the user ends the last one, so that the result so far is written without it.
fn unless_interrupted(
    last: Result<Vec<SpeedComparison>, CliError>,
) -> Result<Vec<SpeedComparison>, CliError> {
    match last {
        Err(CliError::Interrupted) => Ok(Vec::new()),
        other => other,
    }
}

/// Writes the file and reports its content.
fn finish<A>(
    args: &TuneArgs,
    ui: &Ui,
    (output, tuning): (&Path, LevelTuning),
    outcome: &SearchOutcome<'_, A>,
    begin: Instant,
) -> Result<(), CliError> {
    if outcome.interrupted && outcome.found.level == *outcome.level {
        ui.note("nothing faster was found so far, and nothing was written");
        return Err(CliError::Interrupted);
    }
    write_file(output, tuning.to_text(&comment(&tuning, output)).as_bytes())
        .map_err(CliError::io("write", output))?;
    let report = TuneReport::new(output, tuning, outcome, begin.elapsed());
    if args.json {
        print_json(&report)?
    } else {
        print(&report.text())?
    }
    if outcome.interrupted { Err(CliError::Interrupted) } else { Ok(()) }
}

fn output(args: &TuneArgs, builder: &TrialBuilder, level: &FeatureLevel) -> PathBuf {
    args.output.clone().unwrap_or_else(|| builder.output_path(&level.name))
}

/// The first lines of a tuning file.
fn comment(tuning: &LevelTuning, output: &Path) -> String {
    let (version, level) = (env!("CARGO_PKG_VERSION"), &tuning.level);
    let how = match &tuning.predicted {
        Some(predicted) => format!("predicted for {} by mlcc {version} tune, not measured", predicted.device),
        None => format!("measured by mlcc {version} tune"),
    };
    format!(
        "A tuning of the level {level}, {how}. To use it:\n\
         mlcc build --target {level} --tuning {} ...\nWhat the keys mean: docs/tune.md",
        output.display()
    )
}

/// The one level that is tuned.
fn level(target: &str) -> Result<FeatureLevel, CliError> {
    let target = mlcc_target::resolve_target(target).map_err(|e| CliError::usage(e.to_string()))?;
    match target.levels.as_slice() {
        [level] => match level.features.iter().find(|f| !detected_features().contains(&f.as_str())) {
            Some(lacks) if level.tune.is_some() => Err(CliError::usage(format!(
                "the level {} needs {lacks}, which this machine lacks: a level is tuned where it runs",
                level.name
            ))),
            _ => Ok(level.clone()),
        },
        levels => {
            let names: Vec<&str> = levels.iter().map(|l| l.name.as_str()).collect();
            Err(CliError::usage(format!(
                "--target {} stands for several levels, but one is tuned at a time: name one of {}",
                target.name,
                names.join(", ")
            )))
        }
    }
}
