//! Reference results of a model by interpretation.

use std::path::PathBuf;
use std::sync::atomic::AtomicBool;

use mlcc_models::golden::GoldenFile;
use mlcc_passes::scheme::QuantScheme;

use crate::commands::verify::check_golden;
use crate::commands::{print, print_json};
use crate::error::CliError;
use crate::ui::Ui;
use mlcc_driver::compile::{BuildHooks, BuildOptions, BuildReport, BuildSource, ModuleText, compile};
use mlcc_driver::interpret::{GraphModel, StepModel};
use mlcc_driver::replay::{self, judge_model, replay_prompts};
use mlcc_driver::stored::StoredGraph;

/// Small, so that prompts come in several calls.
const CHUNK: u32 = 16;

#[derive(Debug, clap::Args)]
#[command(next_help_heading = "Reference results of a model")]
pub struct GoldenArgs {
    /// Folder or file of a checkpoint, or a module in text form
    #[arg(short, long, requires = "golden", conflicts_with = "file")]
    model: Option<String>,
    /// Folder or file with the weights of a module in text form
    #[arg(long, value_name = "PATH", requires = "model")]
    weights: Option<PathBuf>,
    /// Reference results
    #[arg(long, value_name = "FILE")]
    golden: Option<PathBuf>,
    /// Run the kernels of this target; without it, the graph before all passes
    #[arg(long)]
    target: Option<String>,
    /// Weight format; needs --target [default: f32]
    #[arg(long, visible_alias = "quantization", requires = "target")]
    quant: Option<String>,
    /// Passes to leave out
    #[arg(long, value_name = "PASS", value_delimiter = ',')]
    disable_pass: Vec<String>,
    /// Use only the first N prompts
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    prompts: Option<u32>,
}

pub fn run(args: &GoldenArgs, workers: usize, json: bool, ui: &Ui) -> Result<(), CliError> {
    let (Some(model), Some(golden_path)) = (&args.model, &args.golden) else {
        return Err(CliError::usage("give a module in text form, or --model and --golden"));
    };
    let mut golden = GoldenFile::read(golden_path)?;
    golden.prompts.truncate(args.prompts.map_or(usize::MAX, |n| n as usize));
    let (scheme, _) = QuantScheme::from_name(args.quant.as_deref().unwrap_or("f32"))
        .map_err(|e| CliError::usage(e.to_string()))?;
    let mut options = BuildOptions::new(model);
    options.quant = scheme;
    options.request.weights = args.weights.clone();
    options.disabled_passes = args.disable_pass.clone();
    let mut source = BuildSource::open(&options)?;
    let planned = source.text.as_ref().is_some_and(|t| t.program.memory.is_some());
    if !source.model.config.architecture.needs_whole_prompts() && !planned {
        source.chunk = CHUNK;
    }
    let lowered = source.text.as_ref().and_then(ModuleText::target);
    let architecture = &source.model.config.architecture;
    check_golden(&golden, golden_path, model, architecture.vocab())?;
    let failed = |e: &dyn std::fmt::Display| CliError::Failed(format!("{model}: {e}"));
    let outcome = match args.target.as_ref().or(lowered.as_ref()) {
        None => {
            let module = match &source.text {
                Some(text) if text.program.pack_options.is_empty() => text.program.module.clone(),
                Some(_) => {
                    let message = "its weights are quantized: give --target, so that its kernels run";
                    return Err(failed(&message));
                }
                None => mlcc_driver::model::build_module(&source.model.name, architecture, source.context, 1)
                    .map_err(|e| failed(&e))?,
            };
            let model = GraphModel::new(&module, &source.checkpoint, architecture);
            let mut model = model.map_err(|e| failed(&e))?;
            replay_prompts(&mut model, &golden, "f32", replay::format_tolerance("f32"))
        }
        Some(target) => {
            let target = mlcc_target::resolve_target(target).map_err(|e| CliError::usage(e.to_string()))?;
            let (mut report, cancel) = (BuildReport::default(), AtomicBool::new(false));
            let mut hooks = BuildHooks { event: &mut |_| (), cancel: &cancel };
            let options = match &source.text {
                Some(text) => text.merge_options(&options, &target).map_err(|e| failed(&e))?,
                None => options,
            };
            let (program, _) = compile(&source, &target, &options, &mut report, &mut hooks)?;
            ui.detail(format_args!("kernels of {}, {workers} workers", target.levels[0].name));
            let chunk = source.chunk as usize;
            let model = StepModel::new(&program, 0, &source.checkpoint, architecture, chunk, workers);
            let mut model = model.map_err(|e| failed(&e))?;
            let graph = || StoredGraph::of_program(&program, &source.checkpoint);
            judge_model(&mut model, &golden, scheme.name, replay::format_tolerance(scheme.name), graph, None)
        }
    };
    let outcome = outcome.map_err(|e| failed(&e))?;
    match json {
        true => print_json(&outcome)?,
        false => print(&outcome.text(&golden.source))?,
    }
    if outcome.ok { Ok(()) } else { Err(CliError::Reported) }
}
