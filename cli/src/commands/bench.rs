//! `mlcc bench`: speed, and its share of the machine's own limits.
//!
//! `ppN` computes N tokens as a prompt, `tgN` N tokens one by one, `tgN@b4` N of each of four sequences
//! together, `mxA+N` one step with the next tokens of A sequences and N of a prompt, `txAxN` makes the
//! vectors of A texts of N tokens. A token costs at least the bytes that are read for it (weights once per
//! call, for however many sequences; states of its own) and the multiplications of its matrices; the
//! machine's read bandwidth and arithmetic peak, probed in the same run with as many threads, turn these into
//! an upper limit of tokens per second.
//!
//! The processors of a virtual machine change places and share their memory with others, so that the limits
//! move. All threads are busy for some seconds first, the limits are probed before and after every
//! repetition, and each repetition is compared with its own. Repetitions for which a limit moved by more than
//! a tenth give no share of it.
//!
//! On a GPU the limit is what it reads and writes while it copies its own memory, measured once.

use std::path::PathBuf;
use std::sync::atomic::Ordering;

use clap::ValueEnum;
use mlcc_runtime::Model;
use serde_json::Value;

use crate::commands::{HugePagesArg, PlacementArgs, load_placed, print, print_json};
use crate::error::CliError;
use crate::interrupt;
use crate::ui::Ui;
use plan::{ArtifactCapacity, plan_tests};
use probe::{ComputeType, KINDS};
use report::BenchRow;
use runner::BenchRunner;
use test::{BenchTest, MixedStep, TextCounts, operations_per_token};

mod kernels;
mod loops;
mod plan;
pub(super) mod predict;
pub(super) mod probe;
mod report;
mod runner;
mod start;
pub(super) mod test;
mod under_load;

#[derive(Debug, Clone, clap::Args)]
pub struct BenchArgs {
    /// A compiled model, or a checkpoint, which is compiled first and cached
    artifact: PathBuf,
    /// Weight format if a checkpoint is compiled [default: as `mlcc build`]
    #[arg(long, value_name = "NAME")]
    quant: Option<String>,
    /// Prompt lengths (separated by commas; 0 = none) [default: 512, or what fits into the context]
    #[arg(short = 'p', long, visible_alias = "prompt-len", value_delimiter = ',', value_parser = parse_tokens)]
    n_prompt: Option<Vec<usize>>,
    /// Numbers of tokens to generate (separated by commas; 0 = none) [default: 128, or what fits into the
    /// context]
    #[arg(short = 'n', long, visible_alias = "gen-len", value_delimiter = ',', value_parser = parse_tokens)]
    n_gen: Option<Vec<usize>>,
    /// Positions before the generated tokens (separate several by commas)
    #[arg(short = 'd', long, default_value = "0", value_delimiter = ',', value_parser = parse_tokens)]
    depth: Vec<usize>,
    /// Number of sequences decoded together (separate several by commas; needs `mlcc build --max-batch`)
    #[arg(short = 'b', long, default_value = "1", value_delimiter = ',', value_parser = clap::value_parser!(u16).range(1..=1024))]
    batch: Vec<u16>,
    /// Steps that mix decoding with a chunk of a prompt, for example `8+120` (separate several by commas):
    /// the next token of 8 sequences, each after `--depth` others, and the first 120 tokens of one more
    #[arg(long, value_name = "NEXT+PIECE", value_delimiter = ',')]
    mixed: Vec<MixedStep>,
    /// For embedding models: number and length of the texts in one call, for example `64x256` (separate
    /// several by commas) [default: 64x256, or what fits into the context]
    #[arg(long, value_name = "TEXTSxTOKENS", value_delimiter = ',', conflicts_with_all = ["n_prompt", "n_gen", "mixed", "predict"])]
    texts: Vec<TextCounts>,
    /// Number of runs of each test
    #[arg(short, long, visible_alias = "iterations", default_value_t = 5, value_parser = clap::value_parser!(u32).range(1..=1000))]
    repetitions: u32,
    /// Worker threads (separate several by commas) [default: physical cores]
    #[arg(short, long, env = "MLCC_THREADS", value_delimiter = ',', value_parser = clap::value_parser!(u16).range(1..=1024))]
    threads: Vec<u16>,
    #[command(flatten)]
    placing: PlacementArgs,
    /// Put the weights in huge pages, which are faster to read: from the start, as in a process that has
    /// generated for a while
    #[arg(long, value_enum, default_value = "on", value_name = "WHEN")]
    huge_pages: HugePagesArg,
    /// Seconds to keep all threads busy before the first test
    #[arg(long, default_value_t = 5.0, value_name = "SECONDS", allow_negative_numbers = true, value_parser = parse_seconds)]
    warm_up: f64,
    /// Measure the time from process start to the first token after a prompt of 8 tokens, and the memory,
    /// instead
    #[arg(long)]
    start: bool,
    /// Show where the time goes, kernel by kernel, instead
    #[arg(long, conflicts_with = "start")]
    kernels: bool,
    /// Measure the speed while N other programs are busy (separate several by commas), interleaved with the
    /// speed on the idle machine, instead
    #[arg(long, value_name = "PROGRAMS", value_delimiter = ',', conflicts_with_all = ["start", "kernels"], value_parser = clap::value_parser!(u16).range(1..=1024))]
    busy: Vec<u16>,
    /// Predict from machine code how fast the artifact is on a GPU, which need not be present (`h200`,
    /// `h100`, `a100`); nothing is measured. With `--kernels` kernel by kernel. Needs NVIDIA's ptxas and
    /// nvdisasm
    #[arg(long, value_name = "GPU", conflicts_with_all = ["start", "busy"])]
    predict: Option<String>,
    /// What the programs do that `--busy` starts
    #[arg(long, hide = true, conflicts_with_all = ["start", "kernels"])]
    busy_loop: bool,
    /// What the process does that `--start` measures
    #[arg(long, hide = true, conflicts_with = "start")]
    first_token: bool,
    /// Output format
    #[arg(short, long, value_enum, default_value = "md")]
    output: OutputFormat,
}

/// Recurrent models have no context that would bound what is asked for.
const MOST_TOKENS: usize = 1 << 24;
const LONGEST_WARM_UP: f64 = 3600.0;

fn parse_tokens(text: &str) -> Result<usize, String> {
    let count = text.parse().ok().filter(|&count| count <= MOST_TOKENS);
    count.ok_or_else(|| format!("`{text}` is not a number of tokens from 0 to {MOST_TOKENS}"))
}

fn parse_seconds(text: &str) -> Result<f64, String> {
    let value = text.parse().ok().filter(|value| (0.0..=LONGEST_WARM_UP).contains(value));
    value.ok_or_else(|| format!("`{text}` is not a number of seconds from 0 to {LONGEST_WARM_UP}"))
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum OutputFormat {
    Md,
    Json,
}

/// The limits of the machine with some number of threads at one moment.
#[derive(Clone, Copy, Debug)]
struct MachineProbe {
    /// Bandwidth of reads; on a GPU that of copies, read and written.
    read_bandwidth: f64,
    /// Operations per second of each arithmetic that the model uses ([`ComputeType::ALL`]).
    peaks: [f64; KINDS],
    ping_pong: Option<f64>,
}

impl MachineProbe {
    /// One without limits that we could probe.
    const UNKNOWN: MachineProbe =
        MachineProbe { read_bandwidth: f64::INFINITY, peaks: [f64::INFINITY; KINDS], ping_pong: None };
}

/// One run of a test.
struct TestRepetition {
    /// Tokens per second.
    speed: f64,
    /// Seconds of each step, of tests that generate.
    steps: Vec<f64>,
    /// Probes before and after.
    machine: [MachineProbe; 2],
}

pub fn run(args: &BenchArgs, ui: &Ui) -> Result<(), CliError> {
    if args.busy_loop {
        under_load::run_busy_loop();
    }
    let artifact = super::checkpoint::artifact_for(&args.artifact, args.quant.as_deref(), ui)?;
    let args = &BenchArgs { artifact, ..args.clone() };
    let threads = args.threads.first().map(|&t| usize::from(t));
    if args.first_token {
        return start::report_first_token(&args.artifact, threads);
    }
    if let Some(gpu) = &args.predict {
        return predict::run(args, gpu);
    }
    if args.start {
        let report = start::measure_start(&args.artifact, threads, args.repetitions)?;
        return match args.output {
            OutputFormat::Json => print_json(&report),
            OutputFormat::Md => print(&report.markdown()),
        };
    }
    // A run without anything to measure is an error before anything is read.
    plan_tests(args, ArtifactCapacity::Unknown)?;
    if args.kernels {
        let model = load_placed(&args.artifact, threads, args.placing, args.huge_pages, ui)?;
        let profiles = kernels::profile_tests(
            &model,
            &plan_tests(args, ArtifactCapacity::from_model(&model))?,
            args,
            ui,
        )?;
        return match args.output {
            OutputFormat::Json => print_json(&profiles),
            OutputFormat::Md => print(&kernels::markdown(&profiles)),
        };
    }
    let thread_counts: Vec<Option<usize>> = match args.threads.as_slice() {
        [] => vec![None],
        list => list.iter().map(|&t| Some(usize::from(t))).collect(),
    };
    if !args.busy.is_empty() {
        let mut rows = Vec::new();
        for threads in thread_counts {
            let model = load_placed(&args.artifact, threads, args.placing, args.huge_pages, ui)?;
            rows.extend(under_load::measure_under_load(
                &model,
                &plan_tests(args, ArtifactCapacity::from_model(&model))?,
                args,
                ui,
            )?);
        }
        return match args.output {
            OutputFormat::Json => print_json(&rows),
            OutputFormat::Md => print(&under_load::markdown(&rows)),
        };
    }
    let mut rows = Vec::new();
    for threads in thread_counts {
        let model = load_placed(&args.artifact, threads, args.placing, args.huge_pages, ui)?;
        rows.extend(measure_tests(
            &model,
            &plan_tests(args, ArtifactCapacity::from_model(&model))?,
            args,
            ui,
        )?);
    }
    match args.output {
        OutputFormat::Json => print_json(&rows),
        OutputFormat::Md => print(&report::markdown(&rows)),
    }
}

fn measure_tests(
    model: &Model,
    tests: &[BenchTest],
    args: &BenchArgs,
    ui: &Ui,
) -> Result<Vec<BenchRow>, CliError> {
    let metadata: Value = serde_json::from_str(model.metadata()).unwrap_or(Value::Null);
    let mut runner = BenchRunner::new(model, tests)?;
    let bar = ui.count_bar("bench");
    bar.set_length(u64::from(args.repetitions + 1) * tests.len() as u64);
    bar.set_message("warming up");
    // These probes are of CPUs: those of the host are no limit of a GPU.
    let on_cpu = !model.table().variants.is_empty();
    if on_cpu {
        probe::keep_busy(model.threads(), args.warm_up);
    }
    let reading = on_cpu.then(|| bandwidth_probe(model.threads())).transpose()?;
    // Copies of a GPU, whose clocks are its own, measured once.
    let gpu = match model.copy_bandwidth()? {
        Some(copies) => MachineProbe { read_bandwidth: copies, ..MachineProbe::UNKNOWN },
        None => MachineProbe::UNKNOWN,
    };
    let machine = || reading.as_ref().map_or(gpu, |reading| probe_machine(model, &metadata, reading));
    let mut rows = Vec::new();
    for test in tests {
        bar.set_message(test.name());
        // Fills the caches.
        runner.prepare(*test)?;
        runner.run_timed(*test)?;
        bar.inc(1);
        let mut runs = Vec::new();
        for _ in 0..args.repetitions {
            runner.prepare(*test)?;
            let before = machine();
            let speed = runner.run_timed(*test)?;
            runs.push(TestRepetition { speed, steps: runner.steps.clone(), machine: [before, machine()] });
            bar.inc(1);
        }
        rows.push(report::bench_row(model, &metadata, *test, &runs));
    }
    bar.finish_and_clear();
    runner.print_warnings(ui);
    Ok(rows)
}

fn stop_if_interrupted() -> Result<(), CliError> {
    match interrupt::flag().load(Ordering::Relaxed) {
        true => Err(CliError::Interrupted),
        false => Ok(()),
    }
}

/// Tokens from all over the vocabulary, the same each time.
pub(super) fn test_tokens(n: usize, vocab: u64) -> Vec<i32> {
    let mut state = 0x2545_f491_4f6c_dd1d_u64;
    let mut next = || {
        state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        ((state >> 33) % vocab.max(1)) as i32
    };
    (0..n).map(|_| next()).collect()
}

/// A prompt of `n` tokens; for an encoder-decoder model a source text and the token behind it.
pub(super) fn test_prompt(n: usize, model: &Model) -> Vec<i32> {
    let vocab = model.vocab() as u64;
    let Some(start) = model.plan().decoder_start() else { return test_tokens(n, vocab) };
    let mut prompt = test_tokens(n.max(2) - 1, vocab);
    prompt.iter_mut().filter(|token| **token == start).for_each(|token| *token = (start + 1) % vocab as i32);
    prompt.push(start);
    prompt
}

fn probe_machine(model: &Model, metadata: &Value, reading: &probe::BandwidthProbe) -> MachineProbe {
    let threads = model.threads();
    let floats = || probe::measure_peak(ComputeType::F32, threads).unwrap_or(f64::INFINITY);
    let used = operations_per_token(metadata, "ops_per_token");
    let peaks = std::array::from_fn(|i| match used[i] > 0.0 {
        true => probe::measure_peak(ComputeType::ALL[i], threads).unwrap_or_else(floats),
        false => f64::INFINITY,
    });
    let ping_pong = (threads > 1).then(probe::measure_ping_pong);
    MachineProbe { read_bandwidth: reading.bandwidth(), peaks, ping_pong }
}

fn bandwidth_probe(threads: usize) -> Result<probe::BandwidthProbe, CliError> {
    probe::BandwidthProbe::new(threads).map_err(CliError::io("allocate memory for", "the bandwidth probe"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tokens_stay_in_the_vocabulary_and_repeat() {
        assert!(test_tokens(100, 7).iter().all(|t| (0..7).contains(t)));
        assert_eq!(test_tokens(5, 1000), test_tokens(5, 1000));
    }
}
