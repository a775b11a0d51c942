//! The passes of mlcc and their order ([`pipeline::PIPELINE`]).
//!
//! A pass is one function over a [`LoweredProgram`]: no I/O, no environment. Optimizing passes may be
//! switched off and the result is still right, only slower.

pub mod canonicalize;
pub mod context;
pub mod cse;
pub mod dce;
pub mod decompose;
pub mod defer_logits;
pub mod dynamic_shares;
pub mod exchange_codes;
pub mod fold;
pub mod fuse;
pub mod fuse_attention;
pub mod fuse_dequantize;
pub mod fuse_transpose_matmul;
pub mod halve_activations;
pub mod join_launches;
pub mod legalize;
pub mod lower;
pub mod merge_projections;
pub mod outline;
pub mod pattern;
pub mod pipeline;
pub mod plan_barriers;
pub mod plan_memory;
pub mod policy;
pub mod quantize;
pub mod quantize_activations;
pub mod quantize_attention;
pub mod quantize_cache;
pub mod recognize_scan;
pub mod replicate;
pub mod rewrite;
pub mod scheme;
pub mod shard;
pub mod text;
pub mod verify;

pub use context::{PassContext, PassError, PassOptions};
pub use dynamic_shares::ChunkWork;
pub use pipeline::{PIPELINE, Pass, run_pass, run_passes, run_pipeline};
pub use policy::QuantPolicy;
pub use quantize_cache::CacheType;
pub use scheme::QuantScheme;
pub use shard::{ShardError, TpMode};

use mlcc_ir::module::Module;
use mlcc_ir::step::StepProgram;
use mlcc_kernels::lower::LoweredModule;
use mlcc_kernels::params::KernelTarget;
use mlcc_quant::PackOptions;
use plan_memory::MemoryPlan;
use std::collections::BTreeMap;

/// The module being compiled, and what lowering made of it for each CPU level (or for the one GPU).
#[derive(Clone)]
pub struct LoweredProgram {
    pub module: Module,
    pub levels: Vec<LevelCode>,
    pub memory: Option<MemoryPlan>,
    /// Pack options of the parameters that `quantize` changed, by name; others take the default.
    pub pack_options: BTreeMap<String, PackOptions>,
    /// The pass of the pipeline that ran last.
    pub after: Option<&'static str>,
}

/// Code for one level of the target; steps exist after `plan_barriers`.
#[derive(Clone)]
pub struct LevelCode {
    pub name: String,
    pub target: KernelTarget,
    pub lowered: LoweredModule,
    pub steps: Vec<StepProgram>,
}

impl LoweredProgram {
    pub fn new(module: Module) -> LoweredProgram {
        LoweredProgram {
            module,
            levels: Vec::new(),
            memory: None,
            pack_options: BTreeMap::new(),
            after: None,
        }
    }
    /// The options with which the weight writer packs a parameter.
    pub fn pack_options(&self, param: &str) -> PackOptions {
        self.pack_options.get(param).copied().unwrap_or_default()
    }
}
