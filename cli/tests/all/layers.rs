//! Outputs of layers: `mlcc verify --layers` on right builds, and `mlcc bisect`'s search on builds with a
//! wrong pass or a wrong kernel.

use std::sync::atomic::AtomicBool;

use crate::cases::{self, MATRIX_STATES, RWKV4, backends, options};
use assert_cmd::Command;
use mlcc_driver::compile::{BuildOptions, BuildSource, OFF_WITH_TAPS};
use mlcc_driver::layers::bisect::{BisectVerdict, bisect_passes};
use mlcc_driver::layers::diagnose::FaultStage;
use mlcc_driver::layers::{some_tokens, split_calls};
use mlcc_ir::graph::FunctionKind;
use mlcc_ir::kernel::{BinOp, Expr, UnOp};
use mlcc_ir::ops::Op;
use mlcc_ir::rewrite::rewrite_exprs;
use mlcc_passes::{LoweredProgram, PIPELINE, Pass, PassContext, PassError, canonicalize, fuse, lower};
use serde_json::Value;

fn mlcc() -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_mlcc"));
    command.env("MLCC_CACHE_DIR", cases::objects::folder());
    command
}

/// Builds with `--debug-taps` by the fastest compiler.
fn build(case: &str, quant: &str, more: &[&str], path: &std::path::Path) {
    let backend = backends().last().expect("a back end is built in").name();
    let mut build = mlcc();
    build.args(["build", "--quiet", "--debug-taps", "--quant", quant, "--chunk", "8", "--backend", backend]);
    build.args(more).arg("-o").arg(path).arg("--model").arg(cases::directory(case)).assert().success();
}

#[test]
fn every_layer_of_right_builds_equals_the_graph() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("taps.so");
    for (case, quant, more) in [
        (RWKV4[0], "f32", &[][..]),
        (RWKV4[1], "q4f16_2", &["--disable-pass", "merge_projections,fuse"]),
        (RWKV4[2], "q8i8", &[]),
        (RWKV4[1], "bf16bf16", &[]),
        // A window that leaves room for five tokens in a call.
        ("starcoder2", "f32", &["-c", "20"]),
        (MATRIX_STATES[0], "f32", &[]),
        (MATRIX_STATES[1], "q4f16_1", &[]),
        (MATRIX_STATES[2], "f16", &["--disable-pass", "fuse"]),
    ] {
        build(case, quant, more, &path);
        let mut verify = mlcc();
        verify.args(["verify", "--layers", "--json", "--model"]).arg(cases::directory(case)).arg(&path);
        if MATRIX_STATES.contains(&case) {
            // Their definitions take the interpreter long.
            verify.args(["--tokens", "1,2,3,4,5"]);
        }
        let out = verify.assert().success().get_output().stdout.clone();
        let report: Value = serde_json::from_slice(&out).unwrap();
        assert_eq!(report["ok"], true, "{case}");
        let rows = report["sides"][0]["layers"]["rows"].as_array().unwrap();
        let names: Vec<&str> = rows.iter().map(|r| r["name"].as_str().unwrap()).collect();
        assert_eq!(names[..4], ["embedding", "layer.0.attention", "layer.0.mlp", "layer.0"], "{case}");
        assert_eq!(names[names.len() - 2..], ["final_norm", "logits"], "{case}");
        assert!(rows.iter().all(|r| r["prefill"].is_number() && r["decode"].is_number()), "{case}");
        println!("{case} {quant}: {}", report["sides"][0]["layers"]["worst"]);
    }
}

#[test]
fn what_cannot_be_compared_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("plain.so");
    let (plain, _) = cases::artifact(&options(RWKV4[1], "f32"), folder.path(), "plain.so");
    let refuse = |parts: &[&str], path: &std::path::Path, case: &str| {
        let mut verify = mlcc();
        verify.args(["verify", "--layers", "--model"]).arg(cases::directory(case)).arg(path);
        let out = verify.assert().failure().get_output().stderr.clone();
        let text = String::from_utf8(out).unwrap();
        parts.iter().for_each(|part| assert!(text.contains(part), "{part} is not in: {text}"));
    };
    refuse(&["no outputs of layers", "--debug-taps"], &plain, RWKV4[1]);
    build(RWKV4[1], "f32", &[], &path);
    refuse(&["built from another model"], &path, RWKV4[0]);
    let mut verify = mlcc();
    verify.args(["verify", "--layers", "-p", "hi", "--model"]).arg(cases::directory(RWKV4[1])).arg(&path);
    let out = String::from_utf8(verify.assert().code(1).get_output().stderr.clone()).unwrap();
    assert!(out.contains("no tokenizer") && out.contains("--tokens"), "{out}");
    mlcc().args(["verify", "--layers"]).arg(&path).assert().code(2);
}

/// The pipeline with one pass replaced. Few passes count as optional, because the search builds once without
/// each.
fn with(
    name: &str,
    run: fn(&mut LoweredProgram, &mut PassContext) -> Result<usize, PassError>,
) -> &'static [Pass] {
    let replace = |pass: &Pass| {
        let optional =
            pass.optional && [name, "cse", "merge_projections", OFF_WITH_TAPS].contains(&pass.name);
        if pass.name == name { Pass { run, ..*pass } } else { Pass { optional, ..*pass } }
    };
    Vec::leak(PIPELINE.iter().map(replace).collect())
}

fn bisect(case: &str, quant: &str, pipeline: &'static [Pass]) -> BisectVerdict {
    bisect_for(BuildOptions { pipeline, ..options(case, quant) })
}

fn bisect_for(mut options: BuildOptions) -> BisectVerdict {
    options.backend = backends().last().expect("a back end is built in");
    let target = mlcc_target::resolve_target(&options.target).unwrap();
    let source = BuildSource::open(&options).unwrap();
    let folder = tempfile::tempdir().unwrap();
    let calls = split_calls(&some_tokens(4, source.model.config.architecture.vocab()), 8);
    bisect_passes(&source, &target, &options, &calls, folder.path(), &AtomicBool::new(false), |_| {}).unwrap()
}

#[test]
fn nothing_is_found_where_nothing_is_wrong() {
    // In attention of prompts on 16-bit codes the kernels would differ from the graph by more than other
    // kernels may. One level for every machine, whose bits are the same everywhere: no code may fall on the
    // other side of its edge.
    for (case, quant) in [(RWKV4[1], "q4i8"), ("qwen2", "q4i8"), ("llama-yarn", "q8i8")] {
        let verdict = bisect_for(BuildOptions { target: "x86-64-v3".into(), ..options(case, quant) });
        assert!(verdict.whole.ok() && verdict.trials.is_empty(), "{case}: {}", verdict.sentence());
        let error = verdict.whole.layers.as_ref().map(|layers| layers.worst);
        assert!(error.is_some_and(|e| e < 1e-3), "{case}: {error:?}");
        // The cost of the format is reported, however large it is, and no pass is at fault.
        let cost = verdict.whole.costs.iter().find(|cost| cost.pass == "quantize");
        assert!(cost.is_some_and(|cost| cost.error > 1e-3 && cost.error.is_finite()), "{case}: {cost:?}");
    }
}

/// Makes the gate of the second layer's mlp a tanh.
fn wrong_canonicalize(program: &mut LoweredProgram, ctx: &mut PassContext) -> Result<usize, PassError> {
    let changes = canonicalize::run(program, ctx)?;
    for id in program.module.functions.ids().collect::<Vec<_>>() {
        let f = &mut program.module.functions[id];
        let gates: Vec<_> =
            f.live_nodes().filter(|(_, n)| n.op == Op::Unary(UnOp::Sigmoid)).map(|(n, _)| n).collect();
        if let Some(&node) = gates.get(3) {
            f.nodes[node].op = Op::Unary(UnOp::Tanh);
        }
    }
    Ok(changes + 1)
}

#[test]
fn a_wrong_pass_over_the_graph_is_found() {
    let verdict = bisect(RWKV4[1], "q4f16_1", with("canonicalize", wrong_canonicalize));
    let diagnosis = verdict.whole.diagnosis.as_ref().expect("a diagnosis");
    println!("{}", diagnosis.text());
    assert_eq!((diagnosis.stage, diagnosis.pass.as_deref()), (FaultStage::Graph, Some("canonicalize")));
    assert_eq!(diagnosis.layer.name, "layer.1.mlp");
    assert!(diagnosis.ops.contains("tanh") && diagnosis.ops.lines().count() <= 2, "{}", diagnosis.ops);
    assert_eq!(verdict.guilty, ["canonicalize"]);
    assert_eq!(verdict.sentence(), "guilty: pass canonicalize");
}

/// Makes every maximum in the groups that it has made a minimum: RWKV-4's activation.
fn wrong_fuse(program: &mut LoweredProgram, ctx: &mut PassContext) -> Result<usize, PassError> {
    let changes = fuse::run(program, ctx)?;
    let module = &mut program.module;
    for id in module.functions.ids().collect::<Vec<_>>() {
        let f = &mut module.functions[id];
        if f.kind != FunctionKind::Group {
            continue;
        }
        for node in f.body.clone() {
            if f.nodes[node].op == Op::Binary(BinOp::Max) {
                f.nodes[node].op = Op::Binary(BinOp::Min);
            }
        }
    }
    Ok(changes)
}

#[test]
fn a_wrong_fusion_is_found() {
    let verdict = bisect(RWKV4[1], "f32", with("fuse", wrong_fuse));
    let diagnosis = verdict.whole.diagnosis.as_ref().expect("a diagnosis");
    assert_eq!(diagnosis.pass.as_deref(), Some("fuse"));
    assert_eq!(diagnosis.layer.name, "layer.0.mlp");
    assert!(diagnosis.ops.contains("call"), "{}", diagnosis.ops);
    assert_eq!(verdict.guilty, ["fuse"]);
}

/// Lowers, then makes every square root in a kernel a plain move: norms go wrong, the graph stays right.
fn wrong_lower(program: &mut LoweredProgram, ctx: &mut PassContext) -> Result<usize, PassError> {
    let kernels = lower::run(program, ctx)?;
    for kernel in program.levels.iter_mut().flat_map(|l| &mut l.lowered.kernels) {
        *kernel = rewrite_exprs(kernel, |kb, expr, _| match expr {
            Expr::Unary(UnOp::Rsqrt | UnOp::Sqrt, a) => Some(kb.unary(UnOp::Abs, *a)),
            _ => None,
        });
    }
    Ok(kernels)
}

#[test]
fn a_wrong_kernel_is_found() {
    let verdict = bisect(RWKV4[1], "f32", with("lower", wrong_lower));
    let diagnosis = verdict.whole.diagnosis.as_ref().expect("a diagnosis");
    println!("{}", diagnosis.text());
    assert_eq!(diagnosis.stage, FaultStage::Kernel);
    assert_eq!(diagnosis.layer.name, "layer.0.attention");
    assert_eq!(diagnosis.pass.as_deref(), Some("lower"));
    assert!(diagnosis.ops.contains("sqrt"), "{}", diagnosis.ops);
    // A sum of what layers have given is right, whatever they gave (in layer 0 it has a norm of its own).
    let rows = &verdict.whole.layers.as_ref().expect("a comparison").rows;
    let error = |name: &str| rows.iter().find(|r| r.name == name).and_then(|r| r.prefill).unwrap();
    assert!(error("layer.0.attention") > 1e-3 && error("layer.1.attention") > 1e-3);
    assert!(error("layer.1") < 1e-6);
    assert!(verdict.guilty.is_empty(), "{:?}", verdict.guilty);
}
