//! All integration tests of the crate in one program, since linking it is most of a build: one module per subject.

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
use mlcc_passes::pipeline::Control;
use mlcc_passes::{Context, Options, Program, run_pipeline};

/// A module in text after the whole pipeline, for at most four tokens in a call.
fn compiled(module: &str, target: &str, disabled: &[&str]) -> Program {
    let target = mlcc_target::resolve(target).unwrap();
    let level = |l: &mlcc_target::Level| (l.name.clone(), KernelTarget::new(target.arch, l));
    let mut context = Context::new(Options::new(target.levels.iter().map(level).collect(), 4));
    let mut program = Program::new(parse_module(module).unwrap());
    let disabled = disabled.iter().map(|s| s.to_string()).collect();
    run_pipeline(&mut program, &mut context, Control { disabled, ..Control::default() }).unwrap();
    verify_module(&program.module).unwrap();
    program
}
