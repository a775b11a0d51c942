//! `mlcc verify`: reference results through a compiled model, or layer by layer.

use std::path::{Path, PathBuf};

use mlcc_ir::types::DType;
use mlcc_models::golden::{GoldenFile, PoolingGoldenFile};
use mlcc_runtime::{Artifact, Model, ParamInfo};
use serde_json::Value;

use crate::commands::{print, print_json};
use crate::error::CliError;
use crate::ui::{self, Ui};
use mlcc_driver::compile::keep::scheme_name;
use mlcc_driver::replay::{self, judge_model};
use mlcc_driver::stored::StoredGraph;
use mlcc_driver::text_replay::{self, ErrorBar};

mod layers;
pub(crate) mod prompt;

#[derive(Debug, Clone, clap::Args)]
#[command(
    after_help = "With --golden, the exit code is 0 if, for plain formats, the largest error of a logit (relative to \
        the largest reference logit) is within the tolerance, and greedy decoding gives the same tokens up to the \
        first step that such an error could change; for packed formats, if the kernels compute what the artifact's \
        graph computes on the stored weights, and the results are no further from the reference than rounding of the \
        weights explains. For embedding models, vectors are compared, and each text alone must give the same bits as \
        in a batch. With --layers, the exit code is 0 if the error of every layer's output, relative to its largest \
        value, is within the tolerance."
)]
pub struct VerifyArgs {
    /// A compiled model, or a checkpoint, which is compiled first and cached
    artifact: PathBuf,
    /// Weight format if a checkpoint is compiled [default: as `mlcc build`]
    #[arg(long, value_name = "NAME")]
    quant: Option<String>,
    /// Reference results
    #[arg(long, value_name = "FILE")]
    golden: Option<PathBuf>,
    /// Compare the output of every layer; the artifact must be built with --debug-taps
    #[arg(long, conflicts_with = "golden")]
    layers: bool,
    #[command(flatten)]
    layer_args: layers::LayerArgs,
    /// Largest permitted error, instead of the default: for plain formats against the reference, for packed
    /// ones against the graph (or the reference, if the graph is too large to be interpreted)
    #[arg(long, allow_negative_numbers = true, value_parser = parse_tolerance)]
    tolerance: Option<f64>,
    /// Worker threads [default: physical cores]
    #[arg(short, long, env = "MLCC_THREADS", value_parser = clap::value_parser!(u16).range(1..=1024))]
    threads: Option<u16>,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

pub fn run(args: &VerifyArgs, ui: &Ui) -> Result<(), CliError> {
    let artifact = super::checkpoint::artifact_as_stored(&args.artifact, args.quant.as_deref(), ui)?;
    let args = &VerifyArgs { artifact, ..args.clone() };
    match &args.golden {
        Some(golden) => run_golden(args, golden, ui),
        None if args.layers => layers::run(args, ui),
        None => Err(CliError::usage(
            "nothing to compare the artifact with: give --golden FILE with reference results, or --layers to compare \
             the output of every layer (with --model or --against)",
        )),
    }
}

/// Reference results of another model are reported before anything is computed.
pub(crate) fn check_golden(
    golden: &GoldenFile,
    path: &Path,
    model: &str,
    vocab: usize,
) -> Result<(), CliError> {
    let found = golden.prompts.first().map_or(0, |p| p.logits_last.len());
    if found == vocab {
        return Ok(());
    }
    Err(CliError::Failed(format!(
        "{} has logits for {found} tokens, {model} is a model of {vocab}: they do not match",
        path.display()
    )))
}

fn run_golden(args: &VerifyArgs, golden_path: &Path, ui: &Ui) -> Result<(), CliError> {
    let artifact = Artifact::open(&args.artifact)?;
    let about = artifact.metadata().and_then(|text| serde_json::from_str(text).ok()).unwrap_or(Value::Null);
    if about["texts"].is_object() {
        return run_texts(args, golden_path, ui);
    }
    let golden = GoldenFile::read(golden_path)?;
    if let Some(recipe) = artifact.weight_generator() {
        return Err(CliError::Failed(format!(
            "{}: its weights are random, made on load from seed {} (`mlcc build --weights-on-load`), so no reference results \
             belong to it: build it from the checkpoint of {}, without --random-weights",
            args.artifact.display(),
            recipe.seed,
            golden_path.display()
        )));
    }
    let model = super::load(&args.artifact, args.threads.map(usize::from), true)?;
    check_golden(&golden, golden_path, &args.artifact.display().to_string(), model.vocab())?;
    let metadata: Value = serde_json::from_str(model.metadata()).unwrap_or(Value::Null);
    let scheme = metadata.pointer("/quantization/scheme").and_then(Value::as_str).unwrap_or("f32");
    let own = if has_own_error(&model, scheme) { None } else { replay::format_tolerance(scheme) };
    ui.detail(format_args!(
        "{} on {} with {}",
        args.artifact.display(),
        model.executor(),
        ui::pluralize(model.threads(), "thread")
    ));
    let mut session = model.session()?;
    let graph = || StoredGraph::open(&model);
    let format = scheme_name(&metadata);
    let outcome = judge_model(&mut session, &golden, &format, own, graph, args.tolerance)
        .map_err(|e| CliError::Failed(format!("{}: {e}", args.artifact.display())))?;
    if args.json {
        print_json(&outcome)?;
    } else {
        print(&outcome.text(&golden.source))?;
    }
    if outcome.ok { Ok(()) } else { Err(CliError::Reported) }
}

/// Verifies a model of texts.
fn run_texts(args: &VerifyArgs, golden_path: &Path, ui: &Ui) -> Result<(), CliError> {
    let golden = PoolingGoldenFile::read(golden_path)?;
    let model = super::load(&args.artifact, args.threads.map(usize::from), true)?;
    let mut texts = model.text_embedder()?;
    let metadata: Value = serde_json::from_str(model.metadata()).unwrap_or(Value::Null);
    let types = metadata.pointer("/texts/token_types").and_then(Value::as_u64).unwrap_or(1).max(1) as usize;
    let artifact = args.artifact.display();
    let ids = text_replay::ids_of(&golden, model.text_width(), model.vocab() / types, types);
    let ids = ids.map_err(|what| {
        let golden = golden_path.display();
        CliError::Failed(format!("{golden} and {artifact} do not match: {what}"))
    })?;
    let scheme = metadata.pointer("/quantization/scheme").and_then(Value::as_str).unwrap_or("f32");
    let own = if has_own_error(&model, scheme) { None } else { replay::format_tolerance(scheme) };
    ui.detail(format_args!("{artifact} on {} with {} threads", model.executor(), model.threads()));
    let format = scheme_name(&metadata);
    let bar = ErrorBar { format: &format, own, asked: args.tolerance };
    let outcome =
        text_replay::judge_embeddings(&mut texts, &golden, &ids, &bar, || StoredGraph::open(&model))
            .map_err(|e| CliError::Failed(format!("{artifact}: {e}")))?;
    match args.json {
        true => print_json(&outcome)?,
        false => print(&outcome.text(&golden.source))?,
    }
    if outcome.ok { Ok(()) } else { Err(CliError::Reported) }
}

/// True where weights are packed, or caches hold less than the tolerance of the scheme allows for: then the
/// distance from a reference says little about the kernels.
fn has_own_error(model: &Model, scheme: &str) -> bool {
    let packed = |p: &ParamInfo| DType::parse(&p.format).is_none_or(DType::is_packed);
    let small = |format: &str| format == DType::I8.name() || (scheme == "f32" && format != DType::F32.name());
    let table = model.table();
    table.params.iter().any(packed) || table.states.iter().any(|s| s.cache.is_some() && small(&s.format))
}

fn parse_tolerance(text: &str) -> Result<f64, String> {
    let value = text.parse().ok().filter(|v: &f64| v.is_finite() && *v >= 0.0);
    value.ok_or_else(|| format!("`{text}` is not a relative error; write for example 1e-3"))
}
