//! `mlcc bench`: speed, and its share of the machine's own limits.

use std::path::{Path, PathBuf};

use clap::ValueEnum;
use mlcc_bench::host::ChildProgram;
use mlcc_bench::options::BenchOptions;
use mlcc_bench::plan::{ArtifactCapacity, plan_tests};
use mlcc_bench::test::{BenchTest, MixedStep, TextCounts, parse_tokens};
use mlcc_bench::{kernels, measure, predict, start, under_load};
use mlcc_runtime::Model;
use serde::Serialize;

use crate::commands::bench_host::TerminalHost;
use crate::commands::{HugePagesArg, PlacementArgs, load, load_placed, print, print_json};
use crate::error::CliError;
use crate::ui::Ui;

#[derive(Debug, Clone, clap::Args)]
pub struct BenchArgs {
    /// A compiled model, or what one is built of first: a preset name, hf:org/repo, a folder, a GGUF file, or
    /// an address of one (docs/from-a-name.md)
    artifact: PathBuf,
    /// Weight format if a checkpoint is compiled [default: one for this machine: q4i8 on CPUs, q4f16 on GPUs,
    /// q8i8 for models of texts; as stored if small or quantized]
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

const LONGEST_WARM_UP: f64 = 3600.0;

fn parse_seconds(text: &str) -> Result<f64, String> {
    let value = text.parse().ok().filter(|value| (0.0..=LONGEST_WARM_UP).contains(value));
    value.ok_or_else(|| format!("`{text}` is not a number of seconds from 0 to {LONGEST_WARM_UP}"))
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum OutputFormat {
    Md,
    Json,
}

impl BenchArgs {
    fn options(&self) -> BenchOptions {
        BenchOptions {
            n_prompt: self.n_prompt.clone(),
            n_gen: self.n_gen.clone(),
            depth: self.depth.clone(),
            batch: self.batch.clone(),
            mixed: self.mixed.clone(),
            texts: self.texts.clone(),
            repetitions: self.repetitions,
            warm_up: self.warm_up,
            busy: self.busy.clone(),
            kernels: self.kernels,
        }
    }
}

impl OutputFormat {
    fn print<T: Serialize>(self, found: &T, markdown: impl FnOnce(&T) -> String) -> Result<(), CliError> {
        match self {
            OutputFormat::Json => print_json(found),
            OutputFormat::Md => print(&markdown(found)),
        }
    }
}

/// This program as a process of its own; `flag` is a hidden one of `mlcc bench`.
fn child(flag: &str, artifact: &Path) -> Result<ChildProgram, CliError> {
    let path = std::env::current_exe().map_err(CliError::io("find", "this program"))?;
    Ok(ChildProgram { path, args: vec!["bench".into(), flag.into(), artifact.into()] })
}

pub fn run(args: &BenchArgs, ui: &Ui) -> Result<(), CliError> {
    if args.busy_loop {
        under_load::run_busy_loop();
    }
    let artifact = super::checkpoint::artifact_for(&args.artifact, args.quant.as_deref(), ui)?;
    let options = args.options();
    let host = TerminalHost::new("bench", ui);
    let threads = args.threads.first().map(|&t| usize::from(t));
    if args.first_token {
        let model = load(&artifact, threads, false)?;
        let mut session = model.session()?;
        let told = start::report_first_token(&mut session)?;
        return print(&serde_json::to_string(&told).unwrap_or_default());
    }
    if let Some(gpu) = &args.predict {
        let gpu = predict::find_gpu(gpu)?;
        let rows = predict::predict_tests(&artifact, &options, &gpu)?;
        return args.output.print(&rows, |rows| predict::markdown(rows, &gpu));
    }
    if args.start {
        let mut program = child("--first-token", &artifact)?;
        if let Some(threads) = threads {
            program.args.extend(["--threads".into(), threads.to_string().into()]);
        }
        let report = start::measure_start(&program, args.repetitions)?;
        return args.output.print(&report, start::StartReport::markdown);
    }
    // A run without anything to measure is an error before anything is read.
    plan_tests(&options, ArtifactCapacity::Unknown)?;
    let load = |threads: Option<usize>| -> Result<(Model, Vec<BenchTest>), CliError> {
        let model = load_placed(&artifact, threads, args.placing, args.huge_pages, ui)?;
        let tests = plan_tests(&options, ArtifactCapacity::from_model(&model))?;
        Ok((model, tests))
    };
    if args.kernels {
        let (model, tests) = load(threads)?;
        let profiles = kernels::profile_tests(&model, &tests, &options, &host)?;
        return args.output.print(&profiles, |profiles| kernels::markdown(profiles));
    }
    let thread_counts: Vec<Option<usize>> = match args.threads.as_slice() {
        [] => vec![None],
        list => list.iter().map(|&t| Some(usize::from(t))).collect(),
    };
    if !args.busy.is_empty() {
        let program = child("--busy-loop", &artifact)?;
        let mut rows = Vec::new();
        for threads in thread_counts {
            let (model, tests) = load(threads)?;
            rows.extend(under_load::measure_under_load(&model, &tests, &options, &program, &host)?);
        }
        return args.output.print(&rows, |rows| under_load::markdown(rows));
    }
    let mut rows = Vec::new();
    for threads in thread_counts {
        let (model, tests) = load(threads)?;
        rows.extend(measure::measure_tests(&model, &tests, &options, &host)?);
    }
    args.output.print(&rows, |rows| measure::markdown(rows))
}
