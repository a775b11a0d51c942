//! `mlcc tune`: finds values of the `tune` tables that are faster on this machine, and writes them for `mlcc build --tuning`.

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use mlcc_driver::tune::{confirm, search};
use mlcc_files::write_file;
use mlcc_passes::CacheType;
use mlcc_target::{Level, detected_features};

use crate::commands::bench::probe;
use crate::commands::build::{MOST_POSITIONS, parse_cache};
use crate::commands::{print, print_json};
use crate::error::CliError;
use crate::ui::Ui;
use machine::Bench;
use report::{Limits, Outcome, Report};

mod machine;
mod origin;
mod report;

#[derive(Debug, clap::Args)]
#[command(after_help = "Example: mlcc tune tinyllama-1.1b --quant q4i8 --budget 600 -o zen.toml
         mlcc build -m ./TinyLlama --quant q4i8 --tuning zen.toml")]
pub struct Args {
    /// What `mlcc build --model` takes, or a compiled model: its configuration and formats. No weights are read
    #[arg(value_name = "MODEL|ARTIFACT", env = "MLCC_MODEL")]
    model: String,
    /// Weight format: a name of `mlcc quants` [default: that of the artifact]
    #[arg(long, visible_alias = "quantization", env = "MLCC_QUANT")]
    quant: Option<String>,
    /// The level to tune, which has to run here
    #[arg(long, default_value = "cpu", env = "MLCC_TARGET")]
    target: String,
    /// Storage of keys and values, as for `mlcc build`
    #[arg(long, value_name = "TYPE", value_parser = parse_cache)]
    kv_cache: Option<CacheType>,
    /// Most tokens in one call of prefill, as for `mlcc build`
    #[arg(long, value_parser = clap::value_parser!(u32).range(1..=65536))]
    chunk: Option<u32>,
    /// Most tokens of one sequence, as for `mlcc build`
    #[arg(short = 'c', long, value_parser = clap::value_parser!(u64).range(1..=MOST_POSITIONS))]
    ctx_size: Option<u64>,
    /// Worker threads [default: physical cores]
    #[arg(short, long, env = "MLCC_THREADS", value_parser = clap::value_parser!(u16).range(1..=1024))]
    threads: Option<u16>,
    /// End the search after this time; the last comparison comes after that
    #[arg(long, default_value_t = 300.0, value_name = "SECONDS", allow_negative_numbers = true, value_parser = budget)]
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

fn budget(text: &str) -> Result<f64, String> {
    let value = text.parse().ok().filter(|value: &f64| *value >= 0.0 && *value <= LONGEST);
    value.ok_or_else(|| format!("`{text}` is no number of seconds from 0 to {LONGEST}"))
}

pub fn run(args: &Args, ui: &Ui) -> Result<(), CliError> {
    let begin = Instant::now();
    let level = level(&args.target)?;
    if level.tune.is_none() {
        return Err(CliError::usage(format!(
            "{} is a level of GPUs, on which nothing is timed yet: name a CPU level with --target",
            level.name
        )));
    }
    let origin = origin::find(args, ui)?;
    let threads = args.threads.map_or_else(mlcc_runtime::physical_cores, usize::from);
    let bar = ui.count_bar("tune");
    let mut bench = Bench::open(origin, &level, threads, ui, &bar)?;
    let output = args.output.clone().unwrap_or_else(|| bench.output_path(&level.name));

    bar.set_length(args.budget as u64);
    bar.set_message("probing the machine");
    probe::keep_busy(threads, WARM_UP);
    let before = Limits::probe(threads)?;
    bench.end = Some(begin + Duration::from_secs_f64(args.budget));
    let mut found = search(&mut bench, &level)?;
    let mut last = Vec::new();
    let mut limits = before.clone();
    if !bench.is_interrupted() {
        bar.set_message("what was found against the start");
        bench.end = None;
        last = confirm(&mut bench, &level, &mut found.artifact)?;
        limits = before.and(&Limits::probe(threads)?);
    }
    bar.finish_and_clear();
    let interrupted = bench.is_interrupted();
    if interrupted && found.level == level {
        ui.note("nothing faster was found so far, and nothing was written");
        return Err(CliError::Interrupted);
    }
    let outcome = Outcome { level: &level, found: &found, last: &last, limits: &limits, interrupted };
    let (tuning, held) = outcome.tuning(&bench, threads);
    write_file(&output, tuning.to_text(&comment(&level.name, &output)).as_bytes())
        .map_err(CliError::io("write", &output))?;
    let report = Report::new(&output, tuning, held, &found, interrupted, begin.elapsed());
    if args.json {
        print_json(&report)?
    } else {
        print(&report.text())?
    }
    if interrupted { Err(CliError::Interrupted) } else { Ok(()) }
}

/// The first lines of a tuning file.
fn comment(level: &str, output: &Path) -> String {
    let version = env!("CARGO_PKG_VERSION");
    format!(
        "A tuning of the level {level}, measured by mlcc {version} tune. To use it:\n\
         mlcc build --target {level} --tuning {} ...\nWhat the keys mean: docs/tune.md",
        output.display()
    )
}

/// The one level that is tuned.
fn level(target: &str) -> Result<Level, CliError> {
    let target = mlcc_target::resolve(target).map_err(|e| CliError::usage(e.to_string()))?;
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
                "--target {} stands for several levels, and one is tuned at a time: name one of {}",
                target.name,
                names.join(", ")
            )))
        }
    }
}
