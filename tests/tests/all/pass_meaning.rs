//! Every graph pass on random modules: the result verifies and means the same, alone and in the order of the
//! pipeline.

use mlcc_interp::compare::Tolerance;
use mlcc_interp::equivalence::same_meaning;
use mlcc_ir::module::Module;
use mlcc_ir::testing::graph::{GraphOptions, random_module};
use mlcc_ir::text::print_module;
use mlcc_ir::verify::verify_module;
use mlcc_passes::{LoweredProgram, PIPELINE, PassContext, PassError, PassOptions, run_pass};

const SEEDS: std::ops::Range<u64> = 0..30;

/// Names of the passes that work on graphs: those before `lower`.
fn graph_passes() -> Vec<&'static str> {
    PIPELINE.iter().map(|p| p.name).take_while(|&name| name != "lower").collect()
}

/// Runs passes and checks the module after each; panics with the module before the failing one.
fn check(seed: u64, passes: &[&str]) {
    let original = random_module(seed, &GraphOptions::SMOOTH);
    let mut program = LoweredProgram::new(original.clone());
    let mut ctx = PassContext::new(PassOptions::new(vec![], 16));
    for pass in passes {
        let before = program.module.clone();
        let fail = |what: String, after: &Module| {
            let (before, after) = (print_module(&before), print_module(after));
            panic!("seed {seed}, {pass}: {what}\nbefore:\n{before}\nafter:\n{after}")
        };
        match run_pass(pass, &mut program, &mut ctx) {
            Ok(_) => {}
            // Random modules may contain what no kernel can do.
            Err(PassError::Unsupported { .. }) => return,
            Err(error) => fail(error.to_string(), &before),
        }
        if let Err(error) = verify_module(&program.module) {
            fail(error.to_string(), &program.module);
        }
        if let Err(error) = same_meaning(&original, &program.module, seed, Tolerance::relative(1e-4)) {
            fail(error.to_string(), &program.module);
        }
    }
}

#[test]
fn each_pass_alone() {
    for pass in graph_passes() {
        SEEDS.for_each(|seed| check(seed, &[pass]));
    }
}

#[test]
fn all_in_order() {
    let passes = graph_passes();
    SEEDS.for_each(|seed| check(seed, &passes));
}

#[test]
fn every_pass_twice() {
    for pass in graph_passes() {
        SEEDS.step_by(4).for_each(|seed| check(seed, &[pass, pass]));
    }
}
