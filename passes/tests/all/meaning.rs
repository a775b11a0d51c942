//! Passes after `quantize` keep the meaning of random modules with quantized weights. (Without quantization,
//! each pass and all together are tested beside the filetests.)

use mlcc_interp::compare::Tolerance;
use mlcc_interp::equivalence::same_meaning;
use mlcc_ir::module::Module;
use mlcc_ir::testing::graph::{GraphOptions, random_module};
use mlcc_ir::text::print_module;
use mlcc_ir::verify::verify_module;
use mlcc_passes::{
    LoweredProgram, PIPELINE, Pass, PassContext, PassError, PassOptions, QuantScheme, run_pass,
};

const SEEDS: u64 = 60;

/// Passes that give a graph.
fn graph_passes() -> impl Iterator<Item = &'static Pass> {
    PIPELINE.iter().take_while(|p| p.name != "lower")
}

fn context(quant: &str) -> PassContext {
    let mut options = PassOptions::new(vec![], 16);
    options.quant = QuantScheme::from_name(quant).unwrap().0;
    PassContext::new(options)
}

/// Runs passes on a module; what random modules contain that no kernel can do is left as it was.
fn after(module: &Module, passes: &[&str], quant: &str) -> LoweredProgram {
    let mut program = LoweredProgram::new(module.clone());
    for name in passes {
        match run_pass(name, &mut program, &mut context(quant)) {
            Ok(_) | Err(PassError::Unsupported { .. }) => {}
            Err(error) => panic!("{name}: {error}\n{}", print_module(module)),
        }
        if let Err(error) = verify_module(&program.module) {
            panic!("after {name}: {error}\n{}", print_module(&program.module));
        }
    }
    program
}

fn assert_same(what: &str, seed: u64, before: &Module, after: &Module, tolerance: f64) {
    if let Err(error) = same_meaning(before, after, seed, Tolerance::relative(tolerance)) {
        panic!("{what}, seed {seed}: {error}\n{}\n{}", print_module(before), print_module(after));
    }
}

#[test]
fn passes_after_quantization_work_on_the_stored_weights() {
    let later: Vec<&str> =
        graph_passes().map(|p| p.name).skip_while(|&name| name != "fuse_dequantize").collect();
    for seed in 0..SEEDS {
        let module = random_module(seed, &GraphOptions::SMOOTH);
        for quant in ["f16", "q8f16_1", "q4f16_2"] {
            let quantized = after(&module, &["quantize"], quant).module;
            let changed = after(&quantized, &later, quant);
            assert_same(quant, seed, &quantized, &changed.module, 1e-4);
        }
    }
}
