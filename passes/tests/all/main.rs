//! All integration tests of the crate in one program, since linking it is most of a build: one module per
//! subject.

mod appended_rows;
mod dynamic_shares;
mod join_launches;
mod lowering;
mod meaning;
mod mixers;
mod program_text;
mod quantize;
mod replicate;
mod shard;
mod shard_adapters;
mod shard_codes;
mod shard_hybrids;
mod shard_sums;
mod shard_uneven;

use mlcc_ir::text::parse_module;
use mlcc_ir::verify::verify_module;
use mlcc_kernels::params::KernelTarget;
use mlcc_passes::pipeline::PipelineControl;
use mlcc_passes::{LoweredProgram, PassContext, PassOptions, run_pipeline};

/// A module in text after the whole pipeline, for at most four tokens in a call.
fn compiled(module: &str, target: &str, disabled: &[&str]) -> LoweredProgram {
    let target = mlcc_target::resolve_target(target).unwrap();
    let level = |l: &mlcc_target::FeatureLevel| (l.name.clone(), KernelTarget::new(target.arch, l));
    let mut context = PassContext::new(PassOptions::new(target.levels.iter().map(level).collect(), 4));
    let mut program = LoweredProgram::new(parse_module(module).unwrap());
    let disabled = disabled.iter().map(|s| s.to_string()).collect();
    run_pipeline(&mut program, &mut context, PipelineControl { disabled, ..PipelineControl::default() })
        .unwrap();
    verify_module(&program.module).unwrap();
    program
}
