//! Finds values of the tune tables that are faster on this machine, or predicted to be so on a
//! GPU, and writes them for `mlcc build --tuning`.

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use mlcc_driver::tune::{SpeedComparison, confirm_tuning, search_tuning};
use mlcc_files::write_file;
use mlcc_models::DownloadListener;
use mlcc_passes::CacheType;
use mlcc_target::{FeatureLevel, LevelTuning, detected_features};

use crate::error::BenchError;
use crate::host::BenchHost;
use crate::predict::{NvidiaTools, find_gpu};
use crate::probe;
use builder::TrialBuilder;
use machine::TimingBench;
use predicted::{MANY, PredictionBench};
use report::{ProbedLimits, SearchOutcome};
use source::find_source;

pub use report::TuneReport;

mod builder;
mod machine;
mod predicted;
mod report;
mod source;

/// The level that is tuned, the model, and the bounds of the search.
pub struct TuneOptions {
    /// A value of `mlcc build --model`, or an artifact with the wanted configuration and formats.
    pub model: String,
    /// Weight format; that of the artifact if it is left out.
    pub quant: Option<String>,
    /// The level.
    pub target: String,
    /// The GPU whose predicted times judge, in place of measured ones.
    pub predict: Option<String>,
    pub kv_cache: Option<CacheType>,
    pub chunk: Option<u32>,
    pub ctx_size: Option<u64>,
    /// Worker threads of timed runs; the physical cores if it is left out.
    pub threads: Option<usize>,
    /// Seconds after which the search ends.
    pub budget: f64,
    /// The tuning that is written; a name from model, format and level if it is left out.
    pub output: Option<PathBuf>,
    /// The Hugging Face cache folder with the model.
    pub hf_cache: Option<PathBuf>,
    /// The listener of downloads; without it nothing is downloaded.
    pub download: Option<DownloadListener>,
}

/// Seconds for which all threads are busy before the limits are probed.
const WARM_UP: f64 = 1.0;

/// Searches within the time that there is, and writes the tuning that was found.
pub fn tune_level(options: &TuneOptions, host: &dyn BenchHost) -> Result<TuneReport, BenchError> {
    let level = level(&options.target)?;
    if level.tune_tables().is_none() {
        return Err(BenchError::usage(format!(
            "{} has nothing to tune: its kernels use no tensor cores; name a level from sm_80 on",
            level.name
        )));
    }
    match (&options.predict, level.gpu.is_some()) {
        (Some(gpu), true) => tune_by_predictions(options, &level, gpu, host),
        (None, false) => tune_by_timing(options, &level, host),
        (None, true) => Err(BenchError::usage(format!(
            "{} is a level of GPUs, on which nothing is timed yet: --predict h200 judges by predicted times",
            level.name
        ))),
        (Some(gpu), false) => Err(BenchError::usage(format!(
            "--predict {gpu} is for levels of GPUs, and {} is one of CPUs, on which values are timed: leave the flag out, or \
             name a GPU level with --target",
            level.name
        ))),
    }
}

fn tune_by_timing(
    options: &TuneOptions,
    level: &FeatureLevel,
    host: &dyn BenchHost,
) -> Result<TuneReport, BenchError> {
    let begin = Instant::now();
    let origin = find_source(options)?;
    let threads = options.threads.unwrap_or_else(mlcc_runtime::physical_cores);
    let mut bench = TimingBench::new(TrialBuilder::open(origin, level, host)?, threads, host);
    let output = output(options, bench.builder(), level);

    host.start_progress(options.budget as u64);
    host.set_message("probing the machine".into());
    probe::keep_busy(threads, WARM_UP);
    let before = ProbedLimits::probe(threads)?;
    bench.end = Some(begin + Duration::from_secs_f64(options.budget));
    let mut found = search_tuning(&mut bench, level)?;
    let interrupted = bench.builder().is_interrupted();
    let mut last = Vec::new();
    let mut limits = before.clone();
    if !interrupted {
        host.set_message("what was found against the start".into());
        bench.end = None;
        last = unless_interrupted(confirm_tuning(&mut bench, level, &mut found.artifact))?;
        limits = before.widen(&ProbedLimits::probe(threads)?);
    }
    host.finish_progress();
    let interrupted = bench.builder().is_interrupted();
    let outcome = SearchOutcome { level, found: &found, confirmation: &last, interrupted };
    let tuning = outcome.measured(&bench, &limits, threads);
    finish(host, (&output, tuning), &outcome, begin)
}

fn tune_by_predictions(
    options: &TuneOptions,
    level: &FeatureLevel,
    gpu: &str,
    host: &dyn BenchHost,
) -> Result<TuneReport, BenchError> {
    let begin = Instant::now();
    let gpu = find_gpu(gpu)?;
    if let Some(needed) = level.gpu.as_ref().filter(|needed| needed.sm > gpu.sm) {
        return Err(BenchError::usage(format!(
            "--predict {}: it is an sm_{}, and code of {} needs sm_{} or later",
            gpu.name, gpu.sm, level.name, needed.sm
        )));
    }
    let tools = NvidiaTools::find()?;
    let versions = tools.versions()?;
    let mut origin = find_source(options)?;
    origin.options.batch = Some(MANY as u32);
    let mut predictions = PredictionBench::new(TrialBuilder::open(origin, level, host)?, (gpu, tools), host);
    let output = output(options, predictions.builder(), level);

    host.start_progress(options.budget as u64);
    predictions.end = Some(begin + Duration::from_secs_f64(options.budget));
    let mut found = search_tuning(&mut predictions, level)?;
    let mut last = Vec::new();
    if !predictions.builder().is_interrupted() {
        host.set_message("what was found against the start".into());
        predictions.end = None;
        last = unless_interrupted(confirm_tuning(&mut predictions, level, &mut found.artifact))?;
    }
    host.finish_progress();
    let interrupted = predictions.builder().is_interrupted();
    let outcome = SearchOutcome { level, found: &found, confirmation: &last, interrupted };
    let tuning = outcome.predicted(&predictions, versions);
    finish(host, (&output, tuning), &outcome, begin)
}

/// The comparisons; none if the user ends the last one, so that the result so far is written without it.
fn unless_interrupted(
    last: Result<Vec<SpeedComparison>, BenchError>,
) -> Result<Vec<SpeedComparison>, BenchError> {
    match last {
        Err(BenchError::Interrupted) => Ok(Vec::new()),
        other => other,
    }
}

/// Writes the file and reports its content.
fn finish<A>(
    host: &dyn BenchHost,
    (output, tuning): (&Path, LevelTuning),
    outcome: &SearchOutcome<'_, A>,
    begin: Instant,
) -> Result<TuneReport, BenchError> {
    if outcome.interrupted && outcome.found.level == *outcome.level {
        host.note(&"nothing faster was found so far, and nothing was written");
        return Err(BenchError::Interrupted);
    }
    write_file(output, tuning.to_text(&comment(&tuning, output)).as_bytes())
        .map_err(BenchError::io("write", output))?;
    Ok(TuneReport::new(output, tuning, outcome, begin.elapsed()))
}

fn output(options: &TuneOptions, builder: &TrialBuilder, level: &FeatureLevel) -> PathBuf {
    options.output.clone().unwrap_or_else(|| builder.output_path(&level.name))
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
fn level(target: &str) -> Result<FeatureLevel, BenchError> {
    let target = mlcc_target::resolve_target(target).map_err(|e| BenchError::usage(e.to_string()))?;
    match target.levels.as_slice() {
        [level] => match level.features.iter().find(|f| !detected_features().contains(&f.as_str())) {
            Some(lacks) if level.tune.is_some() => Err(BenchError::usage(format!(
                "the level {} needs {lacks}, which this machine lacks: a level is tuned where it runs",
                level.name
            ))),
            _ => Ok(level.clone()),
        },
        levels => {
            let names: Vec<&str> = levels.iter().map(|l| l.name.as_str()).collect();
            Err(BenchError::usage(format!(
                "--target {} stands for several levels, but one is tuned at a time: name one of {}",
                target.name,
                names.join(", ")
            )))
        }
    }
}
