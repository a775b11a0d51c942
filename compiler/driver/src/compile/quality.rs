//! `--report`: the finished artifact on a text, against the same model in f32 arithmetic, before it gets its
//! name.
//!
//! The reference is a second build for this machine, in a format that holds the checkpoint's values exactly
//! (f16 or bf16 weights stay in their type). It is a file beside the artifact, mapped like any artifact and
//! removed afterwards: it costs disk and page cache, not memory of its own.

use std::path::{Path, PathBuf};

use mlcc_abi::section;
use mlcc_codegen::artifact::ArtifactWriter;
use mlcc_engine::eval::{self, EvalProtocol, EvalWindows, WindowModel};
use mlcc_models::StoredType;
use mlcc_models::resolve::WeightSource;
use mlcc_passes::CacheType;
use mlcc_passes::plan_memory::MemoryPlan;
use mlcc_passes::scheme::QuantScheme;
use mlcc_runtime::{LoadOptions, Model, Session};
use mlcc_target::CompileTarget;
use mlcc_text::TokenId;
use serde::{Deserialize, Serialize};
use xxhash_rust::xxh3::xxh3_128;

use super::{
    BuildError, BuildEvent, BuildHooks, BuildOptions, BuildReport, BuildSource, ReportMode, ReportOptions,
};
use crate::format;
use crate::layers::bisect::runs_here;

/// Tokens of one window.
const WINDOW: usize = 256;
/// The largest reference that is written without being requested.
const LARGEST_REFERENCE: u64 = 4 << 30;

/// The quality of an artifact's predictions of a text.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct QualityReport {
    pub perplexity: f64,
    pub reference_perplexity: f64,
    /// Mean and maximum of KL(reference || artifact) over all scored positions, in nats.
    pub kl_mean: f64,
    pub kl_max: f64,
    /// Share of positions where both have the same most probable token, 0 to 1.
    pub same_top_token: f64,
    /// Scored tokens, and tokens of a window.
    pub tokens: usize,
    pub window: usize,
    /// The name of the reference.
    pub reference: String,
    /// CPU level or device that ran the artifact.
    pub executor: String,
    /// Hash of the text.
    pub text_xxh3_128: String,
}

impl QualityReport {
    /// One line for people.
    pub fn text(&self) -> String {
        format!(
            "perplexity {:.3} (f32 {:.3}), KL mean {:.6}, max {:.4}, same top token {:.2} %, over {} tokens",
            self.perplexity,
            self.reference_perplexity,
            self.kl_mean,
            self.kl_max,
            100.0 * self.same_top_token,
            self.tokens
        )
    }
}

/// The plan of a measurement, if there is to be one.
pub(super) enum QualityPlan {
    No,
    /// There is a text, but something else is missing.
    Skip(String),
    Measure(QualityMeasurement),
}

pub(super) struct QualityMeasurement {
    text: PathBuf,
    reference: QuantScheme,
    /// The artifact is its own reference.
    same: bool,
    /// Tokens of one window, within the context of the model.
    window: usize,
}

/// Looks at what is at hand.
pub(super) fn plan_quality(
    source: &BuildSource,
    target: &CompileTarget,
    options: &BuildOptions,
    memory: &MemoryPlan,
) -> Result<QualityPlan, BuildError> {
    let ReportOptions { mode, text, max_kl, .. } = &options.report;
    let asked = *mode == ReportMode::On || max_kl.is_some();
    if *mode == ReportMode::Off && !asked {
        return Ok(QualityPlan::No);
    }
    let Some(text) = text.as_ref().or(source.model.files.eval_text.as_ref()) else {
        let what = "there is no text: name one with --eval-text, or put it next to the model as eval.txt";
        return if asked { Err(refuse_measurement(options, what.into())) } else { Ok(QualityPlan::No) };
    };
    let reference = exact_scheme(source);
    let bytes = reference_bytes(source, reference);
    let missing = match () {
        () if source.model.config.architecture.pooling_head().is_some() => {
            "perplexity is for models that generate text, and this is an embedding model".into()
        }
        () if source.model.config.architecture.decoder_start_token_id().is_some() => {
            "perplexity is for models that continue a text, and this is an encoder-decoder model".into()
        }
        () if options.weights_on_load => "its weights are random and made on load".into(),
        () if matches!(source.model.weights, WeightSource::Random { .. }) && !asked => {
            "the weights are random".into()
        }
        () if source.tokenizer.is_none() => {
            "the model has no tokenizer: name its file with --tokenizer".into()
        }
        () if !runs_here(target) => format!(
            "code for {} does not run here: build it without, and measure where it runs, with `mlcc eval`",
            target.name
        ),
        () if options.split_weights => {
            "weights in a file of their own cannot be measured while they are written: build without \
             --split-weights, or measure afterwards with `mlcc eval`"
                .into()
        }
        () if bytes > LARGEST_REFERENCE && !asked => {
            let (size, needed) = (format::bytes(bytes), format::bytes(memory.weights_bytes));
            format!(
                "the reference would take {size} of disk in addition to the {needed} of the artifact; --report \
                 measures anyway"
            )
        }
        () => {
            let plain_cache =
                options.cache_type() == CacheType::F32 || !source.model.config.architecture.has_cache();
            let same = options.quant == reference && options.policy.rules.is_empty() && plain_cache;
            let limit = source.context_limit(options).unwrap_or(u64::MAX);
            let window = WINDOW.min(usize::try_from(limit).unwrap_or(WINDOW));
            return Ok(QualityPlan::Measure(QualityMeasurement {
                text: text.clone(),
                reference,
                same,
                window,
            }));
        }
    };
    if asked { Err(refuse_measurement(options, missing)) } else { Ok(QualityPlan::Skip(missing)) }
}

/// Names the flags that asked for a measurement.
fn refuse_measurement(options: &BuildOptions, why: String) -> BuildError {
    let ReportOptions { text, max_kl, .. } = &options.report;
    let given = [(text.is_some(), "--eval-text"), (max_kl.is_some(), "--max-kl")];
    let given: Vec<&str> = given.into_iter().filter(|(given, _)| *given).map(|(_, flag)| flag).collect();
    let flags = if given.is_empty() { "--report".into() } else { given.join(" and ") };
    BuildError::NotMeasurable { flags, why }
}

/// The plain format that holds every value of the checkpoint.
fn exact_scheme(source: &BuildSource) -> QuantScheme {
    let types: Vec<StoredType> = source.checkpoint.tensors().iter().map(|t| t.dtype).collect();
    let name = match () {
        () if types.iter().all(|&t| t == StoredType::F16) => "f16",
        () if types.iter().all(|&t| t == StoredType::BF16) => "bf16",
        () => "f32",
    };
    QuantScheme::from_name(name).map(|(scheme, _)| scheme).unwrap_or_default()
}

fn reference_bytes(source: &BuildSource, scheme: QuantScheme) -> u64 {
    let tensors = source.model.config.architecture.tensor_shapes();
    let elements: u64 =
        tensors.iter().map(|(_, shape)| shape.iter().map(|&d| d as u64).product::<u64>()).sum();
    elements * scheme.linear.bytes().unwrap_or(4) as u64
}

/// A file that goes away with this value.
struct RemovedOnDrop(PathBuf);

impl Drop for RemovedOnDrop {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.0);
    }
}

impl QualityMeasurement {
    /// Measures what the writer has so far, holds it against `--max-kl` and adds the result as a section.
    pub fn run(
        &self,
        writer: &mut ArtifactWriter,
        output: &Path,
        source: &BuildSource,
        options: &BuildOptions,
        hooks: &mut BuildHooks<'_>,
    ) -> Result<QualityReport, BuildError> {
        let text = mlcc_files::read(&self.text, mlcc_files::FileKind::EvalText)
            .map_err(|e| BuildError::Io { action: "read", path: self.text.clone(), source: e })?;
        let tokens = eval_tokens(source, &text, options.report.tokens)?;
        if tokens.len() < 2 {
            let (path, count) = (self.text.display(), tokens.len());
            return Err(BuildError::Report(format!("{path} has {count} tokens, at least 2 are needed")));
        }
        let reference = match self.same {
            true => None,
            false => Some(self.build_reference(output, options, hooks)?),
        };
        let path = writer.write_preview()?;
        let mut quality = self.measure(&path, reference.as_ref().map(|r| r.0.as_path()), &tokens, hooks)?;
        quality.text_xxh3_128 = format!("{:032x}", xxh3_128(&text));
        if let Some(permitted) = options.report.max_kl
            && (quality.kl_mean.is_nan() || quality.kl_mean > permitted)
        {
            return Err(BuildError::Quality { found: quality.kl_mean, permitted });
        }
        let json = serde_json::to_vec(&quality).map_err(|e| BuildError::Report(e.to_string()))?;
        writer.write_section(section::REPORT, &json)?;
        Ok(quality)
    }

    fn build_reference(
        &self,
        output: &Path,
        options: &BuildOptions,
        hooks: &mut BuildHooks<'_>,
    ) -> Result<RemovedOnDrop, BuildError> {
        let name = output.file_name().map(|n| n.to_string_lossy().into_owned()).unwrap_or_default();
        let path = output.with_file_name(format!(".{name}.{}.reference", std::process::id()));
        let reference = BuildOptions {
            request: options.request.clone(),
            tokenizer: options.tokenizer.clone(),
            context: options.context,
            sliding_window: options.sliding_window,
            attention_sinks: options.attention_sinks,
            quant: self.reference,
            kv_cache: Some(CacheType::F32),
            quant_name: self.reference.name.into(),
            output: Some(path.clone()),
            ..BuildOptions::new(&options.request.model)
        };
        let guard = RemovedOnDrop(path);
        let mut quiet = BuildHooks { event: &mut |_| {}, cancel: hooks.cancel };
        let _: BuildReport = super::build(&reference, &mut quiet)?;
        Ok(guard)
    }

    fn measure(
        &self,
        artifact: &Path,
        reference: Option<&Path>,
        tokens: &[TokenId],
        hooks: &mut BuildHooks<'_>,
    ) -> Result<QualityReport, BuildError> {
        let failed = |e: &dyn std::fmt::Display| BuildError::Report(e.to_string());
        let load = |path: &Path| Model::load(path, &LoadOptions::default()).map_err(|e| failed(&e));
        let model = load(artifact)?;
        let window = self.window.min(tokens.len());
        let protocol = EvalProtocol { context: window, stride: window };
        let windows = EvalWindows::new(tokens, protocol, model.vocab()).map_err(|e| failed(&e))?;
        let total = windows.count();
        let cancel = hooks.cancel;
        let session = |model: &Model| -> Result<_, BuildError> {
            Ok(CancellableSession { session: model.session().map_err(|e| failed(&e))?, cancel })
        };
        let event = &mut hooks.event;
        event(BuildEvent::Report { done: 0, total, perplexity: 0.0 });
        let progress = |p: &eval::Perplexity| {
            event(BuildEvent::Report { done: p.windows, total, perplexity: p.perplexity() });
        };
        let mut this = session(&model)?;
        let executor = model.executor().to_string();
        let result = match reference {
            None => eval::perplexity(&windows, &mut this, progress).map(|p| (p, None)),
            Some(path) => {
                let other = load(path)?;
                let mut other = session(&other)?;
                eval::compare(&windows, &mut other, &mut this, progress).map(|c| (c.this, Some(c)))
            }
        };
        if cancel.load(std::sync::atomic::Ordering::Relaxed) {
            return Err(BuildError::Interrupted);
        }
        let (own, comparison) = result.map_err(|e| failed(&e))?;
        let reference = match &comparison {
            None => "the artifact itself: its format holds the checkpoint exactly".into(),
            Some(_) => {
                format!("f32 arithmetic on the checkpoint's values, stored as {}", self.reference.name)
            }
        };
        let of = |f: fn(&eval::ModelComparison) -> f64, itself: f64| comparison.as_ref().map_or(itself, f);
        Ok(QualityReport {
            perplexity: own.perplexity(),
            reference_perplexity: of(|c| c.reference.perplexity(), own.perplexity()),
            kl_mean: of(|c| c.kl_divergence, 0.0),
            kl_max: of(|c| c.kl_max, 0.0),
            same_top_token: of(|c| c.same_top_token, 1.0),
            tokens: own.tokens_scored,
            window,
            reference,
            executor,
            text_xxh3_128: String::new(),
        })
    }
}

/// The first tokens of the text.
fn eval_tokens(source: &BuildSource, text: &[u8], most: usize) -> Result<Vec<TokenId>, BuildError> {
    // No token of any vocabulary is more text than this on average; whole texts may be large.
    const BYTES_PER_TOKEN: usize = 32;
    let tokenizer = source.tokenizer.as_ref().map(|t| &t.tokenizer);
    let tokenizer = tokenizer.ok_or_else(|| BuildError::Report("the model has no tokenizer".into()))?;
    let head = &text[..text.len().min(most.saturating_mul(BYTES_PER_TOKEN))];
    let head = match std::str::from_utf8(head) {
        Ok(head) => head,
        // Cut inside of a character.
        Err(e) if e.error_len().is_none() => {
            std::str::from_utf8(&head[..e.valid_up_to()]).unwrap_or_default()
        }
        Err(e) => {
            return Err(BuildError::Report(format!("the text is not UTF-8 (byte {})", e.valid_up_to())));
        }
    };
    let mut tokens = tokenizer.encode(head)?;
    tokens.truncate(most);
    Ok(tokens)
}

/// A session that fails once the build was cancelled.
struct CancellableSession<'a> {
    session: Session,
    cancel: &'a std::sync::atomic::AtomicBool,
}

impl WindowModel for CancellableSession<'_> {
    type Error = Box<dyn std::error::Error + Send + Sync>;

    fn window_logits(&mut self, tokens: &[TokenId]) -> Result<&[f32], Self::Error> {
        if self.cancel.load(std::sync::atomic::Ordering::Relaxed) {
            return Err("interrupted".into());
        }
        Ok(WindowModel::window_logits(&mut self.session, tokens)?)
    }
}
