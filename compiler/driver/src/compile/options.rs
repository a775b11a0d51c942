//! Options of a build.

use std::path::PathBuf;

use mlcc_codegen::CodeListener;
use mlcc_codegen::cache::ObjectCache;
use mlcc_codegen::ptxas::PtxAssembler;
use mlcc_ir::types::DType;
use mlcc_models::{AdapterRequest, AdapterSlots, ModelRequest};
use mlcc_passes::CacheType;
use mlcc_passes::policy::QuantPolicy;
use mlcc_passes::scheme::QuantScheme;
use mlcc_passes::{PIPELINE, Pass, TpMode};
use mlcc_target::{Arch, CompileTarget};
use mlcc_text::ChatSource;

use super::{Backend, TuningFile};

/// Text of code generation in place of an artifact.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum EmitKind {
    /// LLVM IR.
    Llvm,
    /// Assembly of the target; PTX for a GPU.
    Assembly,
}

/// Pass that builds with taps leave out. Taps hold kernels against the graph, where attention is exact. Its
/// codes are off by up to a few 1e-4 of the largest result, which moves 8-bit codes of later activations over
/// their rounding edges: 1 to 3 % of a tap in models with 64 columns, which would look like wrong kernels or
/// hide them.
pub const OFF_WITH_TAPS: &str = "quantize_attention";

#[derive(Clone, Debug)]
pub struct BuildOptions {
    pub request: ModelRequest,
    /// A tokenizer in place of the model's own.
    pub tokenizer: Option<PathBuf>,
    /// A chat template in place of the model's own.
    pub template: Option<ChatSource>,
    /// A name that [`mlcc_target::resolve_target`] takes.
    pub target: String,
    /// Changes one level of it.
    pub tuning: Option<TuningFile>,
    pub quant: QuantScheme,
    /// The weight format as the user named it, for the name of the artifact.
    pub quant_name: String,
    /// Weights stay in the types that they come in, where a format of ours can hold them; `quant` is for the
    /// rest, see [`BuildOptions::for_source`].
    pub keep_quant: bool,
    /// Exceptions from the scheme.
    pub policy: QuantPolicy,
    /// Storage of keys and values; `None`: f32 with f32 weights, else f16.
    pub kv_cache: Option<CacheType>,
    /// Default: `{model}-{quant}-{target}.so` in the current folder.
    pub output: Option<PathBuf>,
    /// Most tokens in one call of `prefill`; `None`: [`super::source::CHUNK`], or more where a prompt has to
    /// come in one.
    pub chunk: Option<u32>,
    /// Most sequences decoded together; 1: no entry point for that. `None`: see [`BuildOptions::max_batch`].
    pub batch: Option<u32>,
    /// The number of ranks among which the model is split; 1: it is whole.
    pub ranks: usize,
    /// The way in which it is split.
    pub tp_mode: TpMode,
    /// The logits of a row have the same bits alone and together with others
    /// ([`KernelTarget::batch_invariant`](mlcc_kernels::params::KernelTarget)).
    pub batch_invariant: bool,
    /// Room for adapters that are chosen when the artifact runs.
    pub adapters: Option<AdapterSlots>,
    /// A reranker is made of a model that answers with one of two tokens: the texts of that which means that
    /// a document fits, and of the other.
    pub answers: Option<[String; 2]>,
    /// Most tokens of one sequence; `None` = no limit (recurrent models).
    pub context: Option<u64>,
    /// Tokens that are seen together, so that sequences may be longer than the context; `None`: what the
    /// model has.
    pub sliding_window: Option<usize>,
    /// First tokens that stay visible; `None`: what the model has.
    pub attention_sinks: Option<usize>,
    pub backend: Backend,
    /// Makes machine code for GPUs, beside the PTX that drivers translate.
    pub assembler: Option<PtxAssembler>,
    pub split_weights: bool,
    /// Random weights are not written: the runtime makes them from the seed. Needs random weights.
    pub weights_on_load: bool,
    /// Most bytes at run time.
    pub memory_budget: Option<u64>,
    /// The passes; anything but [`PIPELINE`] is for tests that look for a wrong pass.
    pub pipeline: &'static [Pass],
    pub disabled_passes: Vec<String>,
    pub stop_after: Option<String>,
    pub emit: Option<EmitKind>,
    /// Entry points keep every layer's output in scratch memory, for `mlcc verify --layers`; switches off
    /// [`OFF_WITH_TAPS`] too.
    pub debug_taps: bool,
    pub report: ReportOptions,
    /// Cache of the objects of builds. The result of the build does not depend on it.
    pub cache: Option<ObjectCache>,
    /// Hears how far code generation is.
    pub code_listener: Option<CodeListener>,
}

/// The condition under which the artifact is measured before it gets its name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ReportMode {
    Off,
    /// Measures where a text and all else is at hand.
    Auto,
    /// Measures; missing parts are an error.
    On,
}

#[derive(Clone, Debug)]
pub struct ReportOptions {
    pub mode: ReportMode,
    /// A text in place of the model's own.
    pub text: Option<PathBuf>,
    /// Most tokens of it that are used.
    pub tokens: usize,
    /// The largest mean KL divergence from f32 that an artifact may have.
    pub max_kl: Option<f64>,
}

impl Default for ReportOptions {
    fn default() -> Self {
        ReportOptions { mode: ReportMode::Off, text: None, tokens: 512, max_kl: None }
    }
}

impl BuildOptions {
    pub fn new(model: &str) -> Self {
        BuildOptions {
            request: ModelRequest::new(model),
            tokenizer: None,
            template: None,
            target: "cpu".into(),
            quant: QuantScheme::default(),
            tuning: None,
            quant_name: QuantScheme::default().name.into(),
            keep_quant: false,
            policy: QuantPolicy::default(),
            kv_cache: None,
            output: None,
            chunk: None,
            batch: None,
            ranks: 1,
            tp_mode: TpMode::Gather,
            batch_invariant: false,
            adapters: None,
            answers: None,
            context: None,
            sliding_window: None,
            attention_sinks: None,
            backend: Backend::default(),
            assembler: None,
            split_weights: false,
            weights_on_load: false,
            memory_budget: None,
            pipeline: PIPELINE,
            disabled_passes: Vec::new(),
            stop_after: None,
            emit: None,
            debug_taps: false,
            report: ReportOptions::default(),
            cache: None,
            code_listener: None,
        }
    }

    /// Most sequences decoded together: what was asked for, else 16 on CPUs. For GPUs there is code for that
    /// where it is asked for, and artifacts for debugging do without.
    pub fn max_batch(&self, target: &CompileTarget) -> u32 {
        let usual = if target.arch == Arch::Nvptx || self.debug_taps { 1 } else { 16 };
        self.batch.unwrap_or(usual)
    }

    /// Passes that do not run: those asked for, and with taps [`OFF_WITH_TAPS`].
    pub fn passes_off(&self) -> Vec<String> {
        let mut off = self.disabled_passes.clone();
        if self.debug_taps && !off.iter().any(|pass| pass == OFF_WITH_TAPS) {
            off.push(OFF_WITH_TAPS.into());
        }
        off
    }

    /// The storage type of caches.
    pub fn cache_type(&self) -> CacheType {
        let plain = if self.quant.linear == DType::F32 { CacheType::F32 } else { CacheType::F16 };
        self.kv_cache.unwrap_or(plain)
    }

    /// The path of the artifact. A default name includes the adapters: `base+style=0.5-keep-cpu.so`.
    pub fn output_path(&self, model: &str) -> PathBuf {
        if let Some(path) = &self.output {
            return path.clone();
        }
        let adapter = |adapter: &AdapterRequest| match adapter.scale {
            1.0 => format!("+{}", adapter.name()),
            scale => format!("+{}={scale}", adapter.name()),
        };
        let adapters: String = self.request.adapters.iter().map(adapter).collect();
        let ranks = if self.ranks > 1 { format!("-tp{}", self.ranks) } else { String::new() };
        format!("{model}{adapters}-{}-{}{ranks}.so", self.quant_name, self.target.replace(',', "+")).into()
    }
}
