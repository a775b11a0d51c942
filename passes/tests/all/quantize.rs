//! Choices of the user, and what the weight writer gets.

use mlcc_ir::dim::{Dim, SizeSymbol};
use mlcc_ir::graph::FunctionKind;
use mlcc_ir::graph_builder::GraphBuilder;
use mlcc_ir::module::{Module, ParamRole};
use mlcc_ir::types::{DType, QuantFormat, TensorType};
use mlcc_kernels::params::KernelTarget;
use mlcc_passes::policy::PolicyError;
use mlcc_passes::{LoweredProgram, PassContext, PassError, PassOptions, QuantPolicy, QuantScheme, run_pass};
use mlcc_quant::{PackOptions, ScaleSearch};

/// A linear layer for each name.
fn module(names: &[&str]) -> Module {
    let mut b = GraphBuilder::new("m");
    let x = TensorType::new(DType::F32, [Dim::sym(SizeSymbol::N), Dim::from(32)]);
    b.function("f", FunctionKind::Entry, &[x], |b, inputs| {
        let mut layer = |name: &&str| {
            let weight = b.param(name, ParamRole::Linear, TensorType::new(DType::F32, [4, 32]));
            let transposed = b.permute(weight, &[1, 0]);
            b.matmul(inputs[0], transposed)
        };
        names.iter().map(&mut layer).collect()
    });
    b.finish().unwrap()
}

fn context(quant: &str, policy: &str, target: &str) -> PassContext {
    let target = mlcc_target::resolve_target(target).unwrap();
    let levels = target.levels.iter().map(|l| (l.name.clone(), KernelTarget::new(target.arch, l)));
    PassContext::new(PassOptions {
        quant: QuantScheme::from_name(quant).unwrap().0,
        policy: QuantPolicy::parse(policy).unwrap(),
        ..PassOptions::new(levels.collect(), 16)
    })
}

const POLICY: &str = "
[[rule]]
match = \"b.*\"
format = \"q8g32\"
[[rule]]
match = \"a.weight\"
scale_search = \"mse\"
";

#[test]
fn exceptions_reach_the_module_and_the_weight_writer() {
    let mut program = LoweredProgram::new(module(&["a.weight", "b.weight"]));
    let mut ctx = context("q4f16", POLICY, "x86-64-v3");
    assert_eq!(run_pass("quantize", &mut program, &mut ctx), Ok(2));
    let dtypes: Vec<DType> = program.module.params.values().map(|p| p.ty.dtype).collect();
    assert_eq!(dtypes, [DType::Packed(QuantFormat::Q4G32), DType::Packed(QuantFormat::Q8G32)]);
    assert_eq!(program.pack_options("a.weight"), PackOptions { scale_search: ScaleSearch::Mse });
    assert_eq!(program.pack_options("b.weight"), PackOptions::default());
    let notes: Vec<&str> = ctx.notes.iter().map(|(_, line)| line.as_str()).collect();
    assert!(notes.contains(&"b.weight: q8g32 by the rule for b.*"), "{notes:?}");
    assert!(notes.iter().any(|n| n.starts_with("q4f16_")), "{notes:?}");
}

#[test]
fn a_rule_for_nothing_is_an_error() {
    let mut program = LoweredProgram::new(module(&["a.weight"]));
    let error = run_pass("quantize", &mut program, &mut context("q4f16", POLICY, "x86-64-v3")).unwrap_err();
    assert!(matches!(error, PassError::Policy(PolicyError::NoMatch { number: 1, .. })), "{error}");
}

#[test]
fn weights_packed_with_other_options_are_not_merged() {
    let text = "[[rule]]\nmatch = \"a\"\nscale_search = \"mse\"";
    let passes = ["fuse_transpose_matmul", "quantize", "fuse_dequantize", "merge_projections", "dce"];
    for (policy, expected) in [(text, 2), ("", 1)] {
        let mut program = LoweredProgram::new(module(&["a", "b"]));
        let mut ctx = context("q8f16_1", policy, "x86-64-v3");
        for pass in passes {
            run_pass(pass, &mut program, &mut ctx).unwrap();
        }
        assert_eq!(program.module.params.len(), expected, "{policy}");
    }
}

#[test]
fn gpus_keep_f32_activations() {
    for scheme in ["q8i8", "bf16bf16"] {
        for (target, expected) in [("x86-64-v3", 1), ("sm_80", 0)] {
            let mut program = LoweredProgram::new(module(&["a"]));
            let mut ctx = context(scheme, "", target);
            for pass in ["fuse_transpose_matmul", "quantize"] {
                run_pass(pass, &mut program, &mut ctx).unwrap();
            }
            assert_eq!(run_pass("quantize_activations", &mut program, &mut ctx), Ok(expected), "{target}");
            let said = ctx.notes.iter().any(|(_, line)| line.contains("GPU"));
            assert_eq!(said, expected == 0, "{scheme} for {target}: {:?}", ctx.notes);
        }
    }
}
