//! The build of an artifact from a `--model` argument.
//!
//! Phases: read (configuration, tokenizer, list of tensors), passes, code generation, weights. Only the last
//! one touches the values of the weights, tensor by tensor, so memory use stays near the size of one tensor.
//! Nothing appears under the artifact's name before it is complete. Equal input gives equal bytes: no times,
//! paths or random numbers go in.

mod backend;
pub mod graph;
pub mod keep;
mod metadata;
mod module_text;
mod options;
mod payload;
pub mod profile;
pub mod quality;
mod recipe;
mod report;
mod sorted_columns;
mod source;
mod table;
pub mod taps;
mod text_files;
mod tuning;

pub use backend::Backend;
pub use module_text::ModuleText;
pub use options::{BuildOptions, EmitKind, OFF_WITH_TAPS, ReportMode, ReportOptions};
pub use quality::QualityReport;
pub use report::{BuildReport, FormatRow, PassRow, PhaseRow};
pub use source::BuildSource;
pub use tuning::TuningFile;

use std::io::Read;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

use mlcc_codegen::artifact::ArtifactError;
use mlcc_codegen::{CodegenError, CodegenInput, CompileJobs, LevelInput};
use mlcc_ir::module::{ModelParam, Module};
use mlcc_kernels::params::KernelTarget;
use mlcc_models::resolve::WeightSource;
use mlcc_passes::pipeline::{Pass, PipelineControl};
use mlcc_passes::{LoweredProgram, PassContext, PassError, PassOptions, TpMode, run_passes};
use mlcc_target::{Arch, CompileTarget};

use crate::weights::WeightWriteError;

/// The reasons why there is no artifact.
#[derive(Debug, thiserror::Error)]
pub enum BuildError {
    #[error(transparent)]
    Model(#[from] mlcc_models::ModelError),
    #[error(transparent)]
    Target(#[from] mlcc_target::TargetError),
    #[error(transparent)]
    Tuning(#[from] mlcc_target::TuningError),
    #[error("internal error: the graph of the model is not well-formed: {0}")]
    Graph(#[from] mlcc_ir::ops::OpError),
    #[error(transparent)]
    Pass(#[from] PassError),
    #[error(transparent)]
    Codegen(#[from] CodegenError),
    #[error(transparent)]
    Artifact(#[from] ArtifactError),
    #[error(transparent)]
    Weight(#[from] WeightWriteError),
    #[error(transparent)]
    Tokenizer(#[from] mlcc_text::tokenizer::TokenizerError),
    #[error(transparent)]
    Chat(#[from] mlcc_text::ChatError),
    #[error(transparent)]
    Config(#[from] mlcc_engine::generation_config::GenerationConfigError),
    #[error(transparent)]
    Special(#[from] mlcc_text::special_tokens::SpecialTokensError),
    #[error("cannot {action} {path}: {source}")]
    Io { action: &'static str, path: PathBuf, source: std::io::Error },
    #[error(
        "the model needs {needed} bytes of memory at run time (weights {weights}, state {state}, scratch {arena}), the \
         budget is {budget}: choose a smaller format with --quant, a smaller -c/--ctx-size or --chunk, or raise \
         --memory-budget"
    )]
    Budget { needed: u64, weights: u64, state: u64, arena: u64, budget: u64 },
    #[error(
        "this mlcc was built without the {name} back end; use --backend {other}, or build mlcc with the cargo feature `{feature}`"
    )]
    NoBackend { name: &'static str, other: &'static str, feature: &'static str },
    #[error(
        "--ctx-size {asked} is more than the {trained} positions that the model was made for ({origin}); choose at most {trained}"
    )]
    Context { asked: u64, trained: usize, origin: String },
    #[error(
        "the mean KL divergence from f32 is {found:.6}, --max-kl permits {permitted}: choose a larger format with --quant, \
         or keep the worst tensors in one with --quant-policy; nothing was written"
    )]
    Quality { found: f64, permitted: f64 },
    #[error("{} is a file of the model itself ({what}), which would be lost: choose another -o", path.display())]
    Overwrites { path: PathBuf, what: &'static str },
    #[error(
        "kernel {kernel} takes {bytes} bytes of shared memory with the tuning of {level}, whose machines have {most}: tune its tiles to fewer \
         rows, columns, keys or stages"
    )]
    SharedMemory { level: String, kernel: String, bytes: u64, most: u32 },
    #[error("--batch-invariant: kernels of GPUs do not promise that; leave it out, or build for a CPU")]
    BatchInvariantOnGpu,
    #[error(
        "the artifact cannot be measured on the text: {0}. Give another text with --eval-text, or --no-report to build \
         without measuring"
    )]
    Report(String),
    #[error("{flags}: the artifact cannot be measured, {why}")]
    NotMeasurable { flags: String, why: String },
    #[error(transparent)]
    Stream(#[from] mlcc_models::StreamError),
    #[error(
        "--ctx-size {asked} leaves no room in addition to a sliding window of {window} tokens; choose more than \
         {window}, or leave out -c"
    )]
    NoRoom { asked: u64, window: usize },
    #[error("{0}")]
    Unsupported(String),
    #[error("interrupted")]
    Interrupted,
}

/// Progress of a build while it runs.
pub enum BuildEvent<'a> {
    /// A phase begins.
    Phase(&'static str),
    Pass {
        pass: &'a Pass,
        program: &'a LoweredProgram,
    },
    /// Bytes of packed weights written so far, and the parameter in work.
    Weights {
        done: u64,
        total: u64,
        name: &'a str,
    },
    /// Windows of text that were measured, and perplexity so far; the first has none done.
    Report {
        done: usize,
        total: usize,
        perplexity: f64,
    },
}

/// The connections of a build to the world.
pub struct BuildHooks<'a> {
    pub event: &'a mut dyn FnMut(BuildEvent<'_>),
    /// Set from elsewhere to end the build; nothing half-written stays.
    pub cancel: &'a AtomicBool,
}

impl BuildHooks<'_> {
    fn check_cancelled(&self) -> Result<(), BuildError> {
        if self.cancel.load(Ordering::Relaxed) { Err(BuildError::Interrupted) } else { Ok(()) }
    }
}

/// Reads the model, compiles it and writes the artifact, or what `options.emit` and `options.stop_after` ask
/// for instead.
pub fn build(options: &BuildOptions, hooks: &mut BuildHooks<'_>) -> Result<BuildReport, BuildError> {
    let mut report = BuildReport::default();
    let target = options.resolve_target()?;

    let clock = report.start_phase("read", hooks);
    let source = BuildSource::open(options)?;
    texts_fit(&source, &target, options)?;
    encoder_fits(&source, options)?;
    ranks_fit(&source, options)?;
    slots_fit(&source, &target, options)?;
    let options = &options.for_source(&source);
    let agreed = source.text.as_ref().map(|text| text.merge_options(options, &target)).transpose()?;
    let options = agreed.as_ref().unwrap_or(options);
    report.warnings = source.warnings.clone();
    let output = options.output_path(&source.model.name);
    keeps_inputs(&source, options, &output)?;
    report.end_phase(clock);
    hooks.check_cancelled()?;

    let clock = report.start_phase("passes", hooks);
    let (program, context) = compile(&source, &target, options, &mut report, hooks)?;
    report.end_phase(clock);
    report.notes = context.notes.iter().map(|(pass, line)| (pass.to_string(), line.clone())).collect();
    report.record_model(&source, &target, options, &program);
    let Some(memory) = &program.memory else { return Ok(report) };
    check_budget(options, memory, &program)?;
    if options.stop_after.is_some() {
        return Ok(report);
    }
    hooks.check_cancelled()?;

    write_program(&source, &target, options, &program, &output, &mut report, hooks)?;
    Ok(report)
}

/// Refuses what models of texts are not built with.
fn texts_fit(source: &BuildSource, target: &CompileTarget, options: &BuildOptions) -> Result<(), BuildError> {
    let what = match () {
        () if source.model.config.architecture.pooling_head().is_none() => return Ok(()),
        () if target.arch == Arch::Nvptx => {
            "--target cuda: embedding models and rerankers are built for CPUs only"
        }
        () if options.debug_taps => {
            "--debug-taps: layers of embedding models are not compared yet; leave it out"
        }
        () => return Ok(()),
    };
    Err(BuildError::Unsupported(what.into()))
}

/// Refuses what encoder-decoder models are not built with.
fn encoder_fits(source: &BuildSource, options: &BuildOptions) -> Result<(), BuildError> {
    let what = match () {
        () if source.model.config.architecture.decoder_start_token_id().is_none() => return Ok(()),
        () if options.debug_taps => {
            "--debug-taps: layers of encoder-decoder models are not compared yet; leave it out"
        }
        () if options.adapters.is_some() => {
            "--lora-slots: encoder-decoder models have no slots for adapters yet; merge adapters with --lora"
        }
        () => return Ok(()),
    };
    Err(BuildError::Unsupported(what.into()))
}

/// Refuses what models of several ranks are not built with.
fn ranks_fit(source: &BuildSource, options: &BuildOptions) -> Result<(), BuildError> {
    let off = || options.passes_off().iter().any(|pass| pass == "shard");
    let what = match () {
        () if options.ranks <= 1 => return Ok(()),
        () if source.text.is_some() => {
            "--model FILE.mlc: ranks are chosen when a model is built from its weights"
        }
        () if options.split_weights => {
            "--split-weights: each rank has weights of its own, in the artifact; leave it out"
        }
        () if options.weights_on_load => {
            "--weights-on-load: weights of ranks are not made on load yet; leave it out"
        }
        () if options.debug_taps => "--debug-taps: layers of ranks are not compared yet; leave it out",
        () if off() => "--disable-pass shard: that is the pass that splits the model; leave it out",
        () => return Ok(()),
    };
    Err(BuildError::Unsupported(format!("--tensor-parallel {} does not go with {what}", options.ranks)))
}

/// Refuses what slots for adapters are not built with.
fn slots_fit(source: &BuildSource, target: &CompileTarget, options: &BuildOptions) -> Result<(), BuildError> {
    let what = match () {
        () if options.adapters.is_none() => return Ok(()),
        () if options.ranks > 1 && target.arch == Arch::Nvptx => {
            "--tensor-parallel on GPUs, whose ranks are processes: merge adapters with --lora"
        }
        () if options.ranks > 1 && options.tp_mode == TpMode::Reduce => {
            "--tp-mode reduce: products with adapters are split by rows; use gather"
        }
        () if source.text.is_some() => {
            "--model FILE.mlc: slots are made when a model is built from its weights"
        }
        () if source.model.config.architecture.pooling_head().is_some() => {
            "embedding models and rerankers, which have no slots yet; merge adapters with --lora"
        }
        () if options.debug_taps => {
            "--debug-taps: layers are compared without slots; leave one of the two out"
        }
        () => return Ok(()),
    };
    Err(BuildError::Unsupported(format!("--lora-slots does not go with {what}")))
}

/// Refuses slots for a model that has no product beside which there could be one.
fn adapters_fit(module: &Module) -> Result<(), BuildError> {
    match module.params.values().any(ModelParam::is_adapter) {
        true => Ok(()),
        false => Err(BuildError::Unsupported(
            "--lora-slots: this family has no product that takes an adapter at run time (only fused, transposed or \
             recurrent ones); merge adapters with --lora"
                .into(),
        )),
    }
}

/// Refuses outputs in the place of files that are read.
fn keeps_inputs(source: &BuildSource, options: &BuildOptions, output: &Path) -> Result<(), BuildError> {
    let weights = match &source.model.weights {
        WeightSource::Files(files) => files.files.as_slice(),
        WeightSource::Random { .. } => &[],
    };
    let inputs = weights.iter().map(|path| (path, "weights"));
    let inputs = inputs.chain(source.text.iter().map(|text| (&text.path, "--model")));
    let inputs = inputs.chain(options.tokenizer.iter().map(|path| (path, "--tokenizer")));
    let inputs = inputs.chain(options.tuning.iter().map(|file| (&file.path, "--tuning")));
    let inputs: Vec<_> = inputs.filter_map(|(path, what)| Some((path.canonicalize().ok()?, what))).collect();
    let payload = options.split_weights.then(|| payload::split_path(output));
    for path in [Some(output.to_path_buf()), payload].into_iter().flatten() {
        let Ok(place) = path.canonicalize() else { continue };
        if let Some(&(_, what)) = inputs.iter().find(|(input, _)| *input == place) {
            return Err(BuildError::Overwrites { path, what });
        }
    }
    // Configuration, tokenizer and so on: beside the weights only an artifact is replaced. (What is no file
    // is not looked into: a pipe would wait, and the writer refuses it.)
    let folders: Vec<_> =
        source.model.files.directories.iter().filter_map(|d| d.canonicalize().ok()).collect();
    match output.canonicalize() {
        Ok(place)
            if place.is_file() && folders.iter().any(|d| place.parent() == Some(d)) && !is_elf(&place) =>
        {
            Err(BuildError::Overwrites { path: output.to_path_buf(), what: "a file next to the weights" })
        }
        _ => Ok(()),
    }
}

fn is_elf(path: &Path) -> bool {
    let mut magic = [0; 4];
    let mut read = || std::fs::File::open(path).and_then(|mut file| file.read_exact(&mut magic)).is_ok();
    // A pipe would be waited for.
    path.is_file() && read() && magic == *b"\x7fELF"
}

/// Code and weights of a program behind all passes, or what `options.emit` asks for instead.
pub fn write_program(
    source: &BuildSource,
    target: &CompileTarget,
    options: &BuildOptions,
    program: &LoweredProgram,
    output: &Path,
    report: &mut BuildReport,
    hooks: &mut BuildHooks<'_>,
) -> Result<(), BuildError> {
    let memory = program.memory.as_ref().ok_or_else(|| {
        PassError::internal("plan_memory", "a program without a memory plan is to be written")
    })?;
    let clock = report.start_phase("code", hooks);
    // Not the name of the output: equal input gives equal bytes, whatever the file is called.
    let soname = format!("{}.so", source.model.name);
    let input = codegen_input(source, target, options, program, memory);
    if let Some(emit) = options.emit {
        report.emitted = backend::emit(options.backend, &input, emit, output)?;
        report.end_phase(clock);
        return Ok(());
    }
    let jobs = CompileJobs {
        cache: options.cache.clone(),
        listener: options.code_listener.clone(),
        ..CompileJobs::default()
    };
    let library = backend::compile(options.backend, &input, &soname, &jobs)?;
    report.objects = Some(library.object_counts());
    report.end_phase(clock);
    hooks.check_cancelled()?;

    let clock = report.start_phase("weights", hooks);
    let metadata = &input.table.metadata;
    let (mut writer, stored) =
        payload::write(output, &library, source, options, program, memory, metadata, hooks)?;
    report.conversions = keep::conversions(&source.checkpoint, &stored);
    report.end_phase(clock);

    match quality::plan_quality(source, target, options, memory)? {
        quality::QualityPlan::No => {}
        quality::QualityPlan::Skip(why) => report.quality_skipped = Some(why),
        quality::QualityPlan::Measure(plan) => {
            let clock = report.start_phase("report", hooks);
            let quality = plan.run(&mut writer, output, source, options, hooks)?;
            report.end_phase(clock);
            report.quality = Some(quality);
        }
    }
    report.record_artifact(output, options, writer.finish()?);
    Ok(())
}

/// Builds the graph and runs the passes.
pub fn compile(
    source: &BuildSource,
    target: &CompileTarget,
    options: &BuildOptions,
    report: &mut BuildReport,
    hooks: &mut BuildHooks<'_>,
) -> Result<(LoweredProgram, PassContext), BuildError> {
    let (name, architecture) = (&source.model.name, &source.model.config.architecture);
    let batch = options.max_batch(target);
    if options.batch_invariant && target.arch == Arch::Nvptx {
        return Err(BuildError::BatchInvariantOnGpu);
    }
    if options.assembler.is_some() && target.arch != Arch::Nvptx {
        return Err(BuildError::Unsupported("--cubin: machine code for GPUs needs --target cuda".into()));
    }
    let mut program = match (&source.text, options.debug_taps) {
        (Some(text), _) => text.program.clone(),
        (None, false) if let Some(slots) = options.adapters => {
            let module =
                crate::model::build_module_with_slots(name, architecture, source.context, batch, slots)?;
            adapters_fit(&module)?;
            LoweredProgram::new(module)
        }
        (None, false) => {
            LoweredProgram::new(crate::model::build_module(name, architecture, source.context, batch)?)
        }
        (None, true) => LoweredProgram::new(crate::model::build_module_with_taps(
            name,
            architecture,
            source.context,
            batch,
        )?),
    };
    if target.arch == Arch::Nvptx && source.text.is_none() {
        crate::model::add_top_k(&mut program.module)?;
    }
    let mut pass_options = pass_options(source, target, options);
    if options.keep_quant {
        sorted_columns::sort_columns(&mut program.module, source, options)?;
        pass_options.policy = keep::keep_policy(&program.module, source, options);
    }
    let mut context = PassContext::new(pass_options);
    let mut begin = Instant::now();
    let mut after = |pass: &Pass, program: &LoweredProgram, changes: usize| {
        report.passes.push(PassRow::new(pass.name, changes, begin.elapsed()));
        (hooks.event)(BuildEvent::Pass { pass, program });
        begin = Instant::now();
    };
    let control = PipelineControl {
        disabled: options.passes_off(),
        stop_after: options.stop_after.clone(),
        resume: true,
        after: Some(&mut after),
        ..PipelineControl::default()
    };
    run_passes(options.pipeline, &mut program, &mut context, control)?;
    tuning::kernels_fit(target, &program)?;
    Ok((program, context))
}

pub fn pass_options(source: &BuildSource, target: &CompileTarget, options: &BuildOptions) -> PassOptions {
    let level = |l: &mlcc_target::FeatureLevel| {
        let batch_invariant = options.batch_invariant;
        (l.name.clone(), KernelTarget { batch_invariant, ..KernelTarget::new(target.arch, l) })
    };
    let levels = target.levels.iter().map(level).collect();
    let mut pass_options = PassOptions::new(levels, i64::from(source.chunk));
    pass_options.batch = i64::from(options.max_batch(target));
    pass_options.quant = options.quant;
    pass_options.policy = options.policy.clone();
    pass_options.kv_cache = options.cache_type();
    // Sums over ranks would keep the weights of products with adapters twice, by rows and by columns.
    let tp_mode = match options.tp_mode {
        TpMode::Reduce | TpMode::Auto if options.adapters.is_some() => TpMode::Gather,
        mode => mode,
    };
    (pass_options.ranks, pass_options.tp_mode) = (options.ranks, tp_mode);
    // The specs were read before, for the target.
    if let Ok(Some(cost)) = mlcc_target::exchange_cost(target.arch) {
        pass_options.all_gather_cost = cost;
    }
    pass_options
}

/// The input of code generation.
fn codegen_input<'a>(
    source: &BuildSource,
    target: &'a CompileTarget,
    options: &'a BuildOptions,
    program: &'a LoweredProgram,
    memory: &mlcc_passes::plan_memory::MemoryPlan,
) -> CodegenInput<'a> {
    let levels = target.levels.iter().zip(&program.levels);
    let levels =
        levels.map(|(level, code)| LevelInput { level, kernels: &code.lowered.kernels, steps: &code.steps });
    let metadata = metadata::metadata_json(source, target, options, program, memory);
    let table = table::describe_model(source, target, options, program, memory, metadata);
    CodegenInput { target, levels: levels.collect(), table, assembler: options.assembler.as_ref() }
}

fn check_budget(
    options: &BuildOptions,
    memory: &mlcc_passes::plan_memory::MemoryPlan,
    program: &LoweredProgram,
) -> Result<(), BuildError> {
    let ranks = program.module.rank_count() as u64;
    // With the slots for adapters, once they are filled.
    let weights = ranks * memory.weights_bytes + memory.adapter_bytes;
    let arena = ranks * memory.arena_bytes();
    let state = memory.on_all_ranks(program).1;
    let needed = weights + state + arena;
    match options.memory_budget {
        Some(budget) if needed > budget => Err(BuildError::Budget { needed, weights, state, arena, budget }),
        _ => Ok(()),
    }
}
