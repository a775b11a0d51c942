//! `mlcc verify --layers`.

use std::path::{Path, PathBuf};

use mlcc_models::{AdapterRequest, ModelRequest};
use mlcc_passes::CacheType;
use mlcc_passes::policy::QuantPolicy;
use mlcc_passes::scheme::QuantScheme;
use mlcc_runtime::Model;
use mlcc_text::Tokenizer;
use serde_json::{Value, json};
use xxhash_rust::xxh3::xxh3_128;

use super::VerifyArgs;
use super::prompt::PromptArgs;
use crate::commands::{load, print, print_json, run};
use crate::error::CliError;
use crate::ui::Ui;
use mlcc_driver::compile::taps::TapPlaces;
use mlcc_driver::compile::{Backend, BuildOptions, BuildSource};
use mlcc_driver::layers::bisect::runs_here;
use mlcc_driver::layers::diagnose::{self, FaultDiagnosis};
use mlcc_driver::layers::file::TapFile;
use mlcc_driver::layers::run::ArtifactLayers;
use mlcc_driver::layers::stages::{TapSetup, first_wrong_pass};
use mlcc_driver::layers::{BoxedError, LayerComparison, TapCall, TapOutput, compare, run_all, split_calls};
use mlcc_driver::replay;

#[derive(Debug, Clone, clap::Args)]
#[command(next_help_heading = "Layer by layer")]
pub struct LayerArgs {
    /// The checkpoint that the artifact was built from: its graph is interpreted on the same stored weights
    #[arg(short, long, value_name = "PATH", requires = "layers")]
    model: Option<String>,
    /// Seed of the weights, if the artifact was built with random ones
    #[arg(long, value_name = "SEED", requires = "model")]
    random_weights: Option<u64>,
    /// LoRA adapter that was merged when the artifact was built (repeatable)
    #[arg(long, value_name = "DIR[=SCALE]", requires = "model")]
    lora: Vec<AdapterRequest>,
    /// Outputs of layers that another program has written (tools/dump_hf.py), with their prompt
    #[arg(long, value_name = "FILE", requires = "layers")]
    against: Option<PathBuf>,
    #[command(flatten)]
    prompt: PromptArgs,
}

/// One side that the artifact is compared with.
struct ComparedSide {
    name: String,
    comparison: LayerComparison,
}

pub fn run(args: &VerifyArgs, ui: &Ui) -> Result<(), CliError> {
    let given = &args.layer_args;
    if given.model.is_none() && given.against.is_none() {
        let hint =
            "--layers needs a reference: --model with the checkpoint, or --against with a file of outputs";
        return Err(CliError::usage(hint));
    }
    let failed = |e: BoxedError| CliError::Failed(format!("{}: {e}", args.artifact.display()));
    let model = load(&args.artifact, args.threads.map(usize::from), true)?;
    let metadata: Value = serde_json::from_str(model.metadata()).unwrap_or(Value::Null);
    let places = tap_places(&args.artifact, &metadata)?;
    let file = given
        .against
        .as_deref()
        .map(TapFile::read)
        .transpose()
        .map_err(|e| CliError::Failed(e.to_string()))?;
    let tokens = match &file {
        Some(file) if !given.prompt.is_default() => {
            let count = file.tokens.len();
            return Err(CliError::usage(format!(
                "the file of --against has its own prompt of {count} tokens"
            )));
        }
        Some(file) => file.tokens.clone(),
        None => given.prompt.tokens(model.vocab(), || tokenizer(&model))?,
    };
    let session = model.session()?;
    let calls = split_calls(&tokens, session.tokens_per_call());
    let mut layers = ArtifactLayers { session, places };
    let found = run_all(&mut layers, &calls).map_err(failed)?;

    let mut sides = Vec::new();
    let mut diagnosis = None;
    if let Some(checkpoint) = &given.model {
        let options = options(&metadata, &model, checkpoint, given)?;
        let source = BuildSource::open(&options)?;
        same_config(&args.artifact, &metadata, &source)?;
        let target = mlcc_target::resolve_target(&options.target)?;
        let setup = TapSetup {
            source: &source,
            target: &target,
            options: &options,
            cancel: crate::interrupt::flag(),
        };
        let (side, why) = compare_graph(args, &setup, &calls, &found, ui).map_err(failed)?;
        sides.push(side);
        diagnosis = why;
        if let Some(file) = &file {
            sides.push(compare_definition(args, &setup, &calls, file).map_err(failed)?);
        }
    }
    if let Some(file) = &file {
        let scheme = scheme(&metadata)?;
        // Layers of packed formats are as far from f32 as the format is: a distance, and no verdict.
        let permitted = args.tolerance.or_else(|| replay::format_tolerance(scheme.name)).unwrap_or(f64::MAX);
        let expected = expected_taps(file, &calls, &found);
        let comparison = compare(&calls, &found, &expected, permitted).map_err(failed)?;
        sides.push(ComparedSide { name: "artifact against the file".into(), comparison });
    }
    report(args, &sides, diagnosis.as_ref())
}

/// The tokenizer of the artifact: there is no flag for another, because ids say the same.
fn tokenizer(model: &Model) -> Result<Tokenizer, CliError> {
    if model.tokenizer().is_none() {
        return Err(CliError::Failed(format!(
            "{} contains no tokenizer, because there was none next to the model when it was built: give the prompt as \
             token ids with --tokens instead of -p/--prompt, or name a tokenizer file with --tokenizer for `mlcc \
             build`",
            model.artifact().path().display()
        )));
    }
    run::tokenizer(model, None)
}

/// The taps of the metadata.
fn tap_places(artifact: &Path, metadata: &Value) -> Result<TapPlaces, CliError> {
    let places = metadata.get("taps").and_then(|t| serde_json::from_value::<TapPlaces>(t.clone()).ok());
    places.ok_or_else(|| {
        CliError::Failed(format!(
            "{} keeps no outputs of layers; build it with --debug-taps",
            artifact.display()
        ))
    })
}

fn scheme(metadata: &Value) -> Result<QuantScheme, CliError> {
    let name = metadata.pointer("/quantization/scheme").and_then(Value::as_str).unwrap_or("f32");
    Ok(QuantScheme::from_name(name).map_err(|e| CliError::Failed(e.to_string()))?.0)
}

/// The options of the build, as its metadata tells them.
fn options(
    metadata: &Value,
    model: &Model,
    checkpoint: &str,
    given: &LayerArgs,
) -> Result<BuildOptions, CliError> {
    let text = |path: &str| metadata.pointer(path).and_then(Value::as_str);
    let mut options = BuildOptions::new(checkpoint);
    options.request = ModelRequest::new(checkpoint);
    options.request.random_weights = given.random_weights;
    options.request.adapters = given.lora.clone();
    options.quant = scheme(metadata)?;
    options.quant_name = options.quant.name.into();
    options.keep_quant = metadata.pointer("/quantization/keep") == Some(&Value::Bool(true));
    options.chunk = Some(u32::try_from(model.plan().chunk).unwrap_or(u32::MAX));
    let stream = |key: &str| metadata.pointer(key).and_then(Value::as_u64).map(|n| n as usize);
    options.sliding_window = stream("/stream/window");
    options.attention_sinks = stream("/stream/sinks");
    options.context = Some(model.plan().context).filter(|&c| c > 0);
    options.debug_taps = true;
    if let Some(target) = text("/target/name") {
        options.target = target.into();
    }
    if text("/backend") == Some(Backend::Cranelift.name()) {
        options.backend = Backend::Cranelift;
    }
    options.kv_cache = text("/kv_cache").and_then(CacheType::from_name);
    let off = metadata.get("passes_off").and_then(Value::as_array);
    options.disabled_passes = off.into_iter().flatten().filter_map(Value::as_str).map(String::from).collect();
    let policy =
        QuantPolicy::parse_file("quant_policy of the artifact", text("/quant_policy").unwrap_or_default());
    options.policy = policy.map_err(|e| CliError::Failed(e.to_string()))?;
    Ok(options)
}

fn same_config(artifact: &Path, metadata: &Value, source: &BuildSource) -> Result<(), CliError> {
    let raw = Value::Object(source.model.config.raw.clone()).to_string();
    let hash = format!("{:032x}", xxh3_128(raw.as_bytes()));
    match metadata.pointer("/source/config_xxh3_128").and_then(Value::as_str) {
        Some(built_from) if built_from != hash => Err(CliError::Failed(format!(
            "{} was built from another model than {}: their configurations differ",
            artifact.display(),
            source.model.name
        ))),
        _ => Ok(()),
    }
}

/// The artifact against its graph, and why they differ.
fn compare_graph(
    args: &VerifyArgs,
    setup: &TapSetup<'_>,
    calls: &[TapCall],
    found: &[Vec<TapOutput>],
    ui: &Ui,
) -> Result<(ComparedSide, Option<FaultDiagnosis>), BoxedError> {
    let (_, _, stages) = setup.compile()?;
    let expected = setup.reference_taps(&stages, calls, found)?;
    let permitted = args.tolerance.unwrap_or_else(|| setup.tolerance());
    let comparison = compare(calls, found, &expected, permitted)?;
    let mut diagnosis = None;
    if let Some(first) = &comparison.first {
        ui.detail(format_args!("{} differs: looking for the pass or kernel", first.name));
        diagnosis = match first_wrong_pass(setup, &stages, calls)?.0 {
            Some(wrong) => Some(diagnose::of_pass(setup, &stages, &wrong, calls)?),
            None if runs_here(setup.target) => {
                let folder = mlcc_codegen::folder::create_temporary("mlcc-layers-")?;
                Some(diagnose::of_kernels(setup, &stages, first, calls, folder.path())?)
            }
            None => None,
        };
    }
    Ok((ComparedSide { name: "artifact against its graph".into(), comparison }, diagnosis))
}

/// The graph before all passes, in f32, against the file: is the model definition right?
fn compare_definition(
    args: &VerifyArgs,
    setup: &TapSetup<'_>,
    calls: &[TapCall],
    file: &TapFile,
) -> Result<ComparedSide, BoxedError> {
    let (_, _, stages) = setup.compile()?;
    let found = setup.graph_taps(&stages, 0, calls)?;
    let permitted = args.tolerance.or_else(|| replay::format_tolerance("f32")).unwrap_or_default();
    let comparison = compare(calls, &found, &expected_taps(file, calls, &found), permitted)?;
    Ok(ComparedSide { name: "model definition (f32) against the file".into(), comparison })
}

fn expected_taps(file: &TapFile, calls: &[TapCall], found: &[Vec<TapOutput>]) -> Vec<Vec<TapOutput>> {
    calls.iter().zip(found).map(|(call, found)| file.expected(call, found)).collect()
}

fn report(
    args: &VerifyArgs,
    sides: &[ComparedSide],
    diagnosis: Option<&FaultDiagnosis>,
) -> Result<(), CliError> {
    let ok = sides.iter().all(|s| s.comparison.ok());
    if args.json {
        let rows = sides.iter().map(|s| json!({ "what": s.name, "layers": s.comparison }));
        let rows: Vec<Value> = rows.collect();
        print_json(&json!({ "ok": ok, "sides": rows, "diagnosis": diagnosis }))?;
    } else {
        let mut out = String::new();
        for side in sides {
            out.push_str(&format!("{}:\n\n{}\n", side.name, side.comparison.text()));
        }
        out.push_str(&diagnosis.map_or(String::new(), FaultDiagnosis::text));
        print(out.trim_end_matches('\n'))?;
        print("\n")?;
    }
    if ok { Ok(()) } else { Err(CliError::Reported) }
}
