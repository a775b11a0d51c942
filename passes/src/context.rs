//! Options of the passes and their report.

use crate::dynamic_shares::ChunkWork;
use crate::policy::{PolicyError, QuantPolicy};
use crate::quantize_cache::CacheType;
use crate::scheme::QuantScheme;
use crate::shard::{ShardError, TpMode};
use mlcc_ir::ops::OpError;
use mlcc_kernels::lower::LowerError;
use mlcc_kernels::params::KernelTarget;
use mlcc_target::ExchangeCost;

/// Facts about the build that passes need.
#[derive(Clone, Debug)]
pub struct PassOptions {
    /// One per CPU level, best first; one for a GPU.
    pub levels: Vec<(String, KernelTarget)>,
    /// Most tokens in one call of `prefill`.
    pub chunk: i64,
    /// Most sequences in one call of a batched entry point.
    pub batch: i64,
    pub quant: QuantScheme,
    /// Exceptions from the scheme.
    pub policy: QuantPolicy,
    /// Storage format of keys and values.
    pub kv_cache: CacheType,
    /// Least work of a piece of a launch with dynamic shares; `None` takes the tuning of each level.
    pub min_chunk_work: Option<ChunkWork>,
    /// The number of ranks among which the model is split; 1: it is not.
    pub ranks: usize,
    /// The way in which products that follow each other are split.
    pub tp_mode: TpMode,
    /// The cost of all-gathers, for [`TpMode::Auto`].
    pub all_gather_cost: ExchangeCost,
}

impl PassOptions {
    /// Weights stay f32.
    pub fn new(levels: Vec<(String, KernelTarget)>, chunk: i64) -> PassOptions {
        let (quant, policy) = (QuantScheme::default(), QuantPolicy::default());
        let kv_cache = CacheType::default();
        let (tp_mode, all_gather_cost) =
            (TpMode::Gather, ExchangeCost { latency_ns: 2000, mbytes_per_s: 10_000 });
        PassOptions {
            levels,
            chunk,
            batch: 1,
            quant,
            policy,
            kv_cache,
            min_chunk_work: None,
            ranks: 1,
            tp_mode,
            all_gather_cost,
        }
    }
}

/// Options in, explanations out.
pub struct PassContext {
    pub options: PassOptions,
    /// Matches of the running pass and the reasons of near misses, as (pass, line), in order.
    pub notes: Vec<(&'static str, String)>,
    pub(crate) pass: &'static str,
}

impl PassContext {
    pub fn new(options: PassOptions) -> PassContext {
        PassContext { options, notes: Vec::new(), pass: "" }
    }
    /// Records a line for `--explain-passes`.
    pub fn note(&mut self, line: impl Into<String>) {
        self.notes.push((self.pass, line.into()));
    }
}

/// The reasons for which a pass fails.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum PassError {
    #[error("internal error in pass {pass}: {message}; please report it with the output of --debug-dump")]
    Internal { pass: &'static str, message: String },
    #[error(transparent)]
    Lower(#[from] LowerError),
    #[error(transparent)]
    Policy(#[from] PolicyError),
    #[error(transparent)]
    Shard(#[from] ShardError),
    #[error("{what} cannot be compiled; {hint}")]
    Unsupported { what: String, hint: String },
    #[error("unknown pass `{name}`: {near}`mlcc opt --list` lists all")]
    Unknown { name: String, near: String },
    #[error("pass `{after}` has already run, so the program cannot stop after pass `{name}`")]
    Behind { name: String, after: &'static str },
    #[error("pass `{name}` cannot be switched off: it is required")]
    Required { name: String },
}

impl PassError {
    pub fn internal(pass: &'static str, message: impl Into<String>) -> PassError {
        PassError::Internal { pass, message: message.into() }
    }
    pub fn op_error(pass: &'static str) -> impl Fn(OpError) -> PassError {
        move |e| PassError::internal(pass, e.to_string())
    }
}
