//! The reference cases as artifacts, by every back end, at every CPU level of this machine, in every weight
//! format: whole prompts (which the runtime cuts into chunks), prompts in pieces and token by token, with 1,
//! 2 and 3 workers.

use std::path::Path;

use crate::cases::{
    self, MATRIX_STATES, artifact, assert_close, backends, distance, feed, golden, host_levels, ids,
    interpreted, load, options, other_namings, program, recurrent,
};
use assert_cmd::Command;
#[cfg(feature = "llvm")]
use mlcc_codegen::ptxas::{PTXAS_VARIABLE, assemble, find_ptxas};
use mlcc_driver::compile::Backend;
#[cfg(feature = "llvm")]
use mlcc_driver::compile::EmitKind;
use mlcc_ir::module::ParamRole;
use mlcc_ir::types::DType;
use mlcc_passes::PIPELINE;
use mlcc_passes::scheme::{ActivationType, QuantScheme, SCHEMES};

/// f32 sums in another order than the reference's; measured are up to 7e-7.
const F32: f32 = 1e-5;

/// Whole, in pieces that are no divisor of the chunk, and token by token.
fn ways(ids: &[i32]) -> [usize; 3] {
    [ids.len().max(2), 5, 1]
}

/// Holds one level of an artifact against the expected logits; other numbers of workers give the same bits.
fn check(
    what: &str,
    path: &Path,
    level: Option<&str>,
    prompts: &[Vec<i32>],
    expected: &[Vec<f32>],
    tolerance: f32,
) {
    let mut session = load(path, level, 1).session().unwrap();
    let mut worst = 0f32;
    for (ids, expected) in prompts.iter().zip(expected) {
        for piece in ways(ids) {
            let found = feed(&mut session, ids, piece);
            let what = format!("{what}, {} tokens in pieces of {piece}", ids.len());
            assert_close(&what, expected, &found, tolerance);
            worst = worst.max(distance(expected, &found));
        }
    }
    println!("{what}: off by at most {worst:.1e}");
    // A prompt of one full piece and a rest; more workers than cores wait for each other long.
    let ids = &prompts[1];
    for threads in [2, 3] {
        let mut other = load(path, level, threads).session().unwrap();
        for piece in [5, 1] {
            let (one, several) = (feed(&mut session, ids, piece), feed(&mut other, ids, piece));
            let equal = one.iter().zip(&several).all(|(a, b)| a.to_bits() == b.to_bits());
            assert!(equal, "{what}, pieces of {piece}: {threads} workers give other bits than one");
        }
    }
}

fn reference(case: &str) -> (Vec<Vec<i32>>, Vec<Vec<f32>>) {
    let golden = golden(case);
    let prompts = golden.prompts.iter().map(ids).collect();
    (prompts, golden.prompts.iter().map(|p| p.logits_last.clone()).collect())
}

#[test]
fn every_back_end_and_level_equals_the_references() {
    let levels = host_levels();
    let folder = tempfile::tempdir().unwrap();
    for case in recurrent() {
        let (prompts, expected) = reference(case);
        for backend in backends() {
            let mut options = options(case, "f32");
            options.backend = backend;
            // One model of each kind of state at every level; the others at the best one.
            let every = matches!(case, "rwkv4-hf-odd" | "rwkv7-hf");
            let levels = if every { &levels[..] } else { &levels[levels.len().saturating_sub(1)..] };
            options.target = levels.join(",");
            let (path, _) = artifact(&options, folder.path(), &format!("{case}.so"));
            for level in levels {
                assert_eq!(load(&path, Some(level), 1).executor(), level);
                let what = format!("{case} by {} for {level}", backend.name());
                check(&what, &path, Some(level), &prompts, &expected, F32);
            }
        }
    }
}

/// LLVM takes seconds for a build, Cranelift a tenth of that.
fn cases_of(backend: Backend) -> Vec<&'static str> {
    match backend {
        Backend::Llvm => vec!["rwkv4-hf-odd"],
        Backend::Cranelift => recurrent().collect(),
    }
}

#[test]
fn every_optional_pass_can_be_switched_off() {
    let folder = tempfile::tempdir().unwrap();
    for backend in backends() {
        for case in cases_of(backend) {
            let (prompts, expected) = reference(case);
            for pass in PIPELINE.iter().filter(|p| p.optional) {
                let mut options = options(case, "f32");
                options.backend = backend;
                options.disabled_passes = vec![pass.name.into()];
                let (path, _) = artifact(&options, folder.path(), &format!("{case}.so"));
                let what = format!("{case} by {} without {}", backend.name(), pass.name);
                check(&what, &path, None, &prompts, &expected, F32);
            }
        }
    }
}

#[test]
fn every_weight_format_equals_its_own_meaning() {
    let levels = host_levels();
    let folder = tempfile::tempdir().unwrap();
    for scheme in SCHEMES {
        for backend in backends() {
            let mut options = options("rwkv4-hf-odd", scheme.name);
            options.backend = backend;
            options.target = levels.join(",");
            let (module, source) = program(&options, Some(cases::LAST_GRAPH_PASS));
            let (prompts, _) = reference("rwkv4-hf-odd");
            let expected = interpreted(&module.module, &source, &prompts);
            let (path, _) = artifact(&options, folder.path(), &format!("{}.so", scheme.name));
            for level in &levels {
                let what = format!("{} by {} for {level}", scheme.name, backend.name());
                check(&what, &path, Some(level), &prompts, &expected, format_tolerance(scheme.activation));
            }
        }
    }
}

/// A transformer in the packed formats with float activations: rows of 224 weights are several groups of any
/// of them, the last one short.
#[test]
fn every_packed_format_of_a_transformer_equals_its_own_meaning() {
    const CASE: &str = "llama3-gqa-tied";
    let folder = tempfile::tempdir().unwrap();
    let float = |scheme: &&QuantScheme| scheme.activation == ActivationType::F32;
    for scheme in SCHEMES.iter().filter(|scheme| scheme.linear.is_packed()).filter(float) {
        let mut options = options(CASE, scheme.name);
        options.backend = backends().last().unwrap();
        let (module, source) = program(&options, Some(cases::LAST_GRAPH_PASS));
        let (prompts, _) = reference(CASE);
        let expected = interpreted(&module.module, &source, &prompts);
        let (path, _) = artifact(&options, folder.path(), &format!("{}.so", scheme.name));
        check(scheme.name, &path, None, &prompts, &expected, format_tolerance(scheme.activation));
    }
}

/// Models whose states are matrices and whose thin matrices keep more bits.
#[test]
fn formats_of_matrix_states_equal_their_own_meaning() {
    let folder = tempfile::tempdir().unwrap();
    for (case, quant) in [
        ("rwkv5-hf", "q8f16_1"),
        ("rwkv6-hf", "q4f16_1"),
        ("rwkv7-hf", "q8f16_1"),
        ("rwkv7-hf", "q4f16_1"),
        ("rwkv7-hf", "q4i8"),
    ] {
        let mut options = options(case, quant);
        options.backend = backends().last().expect("a back end is built in");
        let (module, source) = program(&options, Some(cases::LAST_GRAPH_PASS));
        let thin = module.module.params.values().filter(|p| p.role == ParamRole::LowRank);
        assert!(thin.clone().all(|p| p.ty.dtype == DType::F16), "{case} in {quant}");
        assert_eq!(thin.count() > 0, case != "rwkv5-hf");
        let (prompts, _) = reference(case);
        let expected = interpreted(&module.module, &source, &prompts);
        let (path, _) = artifact(&options, folder.path(), "q.so");
        let tolerance = format_tolerance(cases::scheme(quant).activation);
        check(&format!("{case} in {quant}"), &path, None, &prompts, &expected, tolerance);
    }
}

/// Weights as the other file format has them, under the other names and in the other orientation; and in f16.
#[test]
fn other_namings_and_halves_equal_the_references() {
    let folder = tempfile::tempdir().unwrap();
    let others = other_namings().into_iter().map(|case| (case, "f32", F32));
    let halves = MATRIX_STATES.into_iter().map(|case| (case, "f16", 2e-2));
    for (case, quant, tolerance) in others.chain(halves) {
        let (prompts, expected) = reference(case);
        let mut options = options(case, quant);
        options.backend = backends().last().expect("a back end is built in");
        let (path, _) = artifact(&options, folder.path(), "other.so");
        check(&format!("{case} in {quant}"), &path, None, &prompts, &expected, tolerance);
    }
}

/// Every kernel of the models with matrix states, at head sizes 32 and 64, through NVIDIA's assembler.
#[cfg(feature = "llvm")]
#[test]
fn device_code_of_matrix_states_assembles_without_spills() {
    let Some(ptxas) = find_ptxas() else {
        eprintln!("skipped: no ptxas (set {PTXAS_VARIABLE}, or `pip install nvidia-cuda-nvcc-cu12`)");
        return;
    };
    let folder = tempfile::tempdir().unwrap();
    for (case, quant) in [("rwkv6-hf", "f32"), ("rwkv7-hf", "q4f16_1")] {
        let mut options = options(case, quant);
        options.target = "sm_80".into();
        options.emit = Some(EmitKind::Assembly);
        let (_, report) = artifact(&options, folder.path(), "gpu.ptx");
        let text = std::fs::read(&report.emitted[0]).unwrap();
        let done = assemble(&ptxas, &text, 80).unwrap_or_else(|e| panic!("{case}: {e}"));
        let scans = done.usage.iter().filter(|u| u.kernel.contains("scan_wkv"));
        assert!(scans.clone().count() >= 2, "{case}: {:?}", done.usage);
        for usage in &done.usage {
            assert_eq!(usage.spill_bytes, 0, "{case}: {usage:?}");
        }
        scans.for_each(|u| {
            println!("{case} {}: {} registers, {} bytes shared", u.kernel, u.registers, u.shared_bytes)
        });
    }
}

/// The permitted error of kernels, in addition to that of a format.
fn format_tolerance(activation: ActivationType) -> f32 {
    match activation {
        // Activations enter products with packed weights as 16-bit block floating point, 2^-15 of the largest
        // of 32. Measured are up to 5e-5; plain 16-bit weights give 5e-7.
        ActivationType::F32 => 5e-4,
        // A sum that falls on the other side of a rounding edge moves an activation by a step of bf16, and
        // then others.
        ActivationType::BF16 => 1.6e-2,
        // The same, or a code by one of 127.
        ActivationType::I8 => 2e-2,
    }
}

#[test]
fn passes_off_keep_the_meaning_of_packed_weights() {
    let folder = tempfile::tempdir().unwrap();
    for pass in PIPELINE.iter().filter(|p| p.optional) {
        let mut options = options("rwkv4-hf-odd", "q4i8");
        options.backend = backends().last().expect("a back end is built in");
        options.disabled_passes = vec![pass.name.into()];
        let (module, source) = program(&options, Some(cases::LAST_GRAPH_PASS));
        let (prompts, _) = reference("rwkv4-hf-odd");
        let expected = interpreted(&module.module, &source, &prompts);
        let (path, _) = artifact(&options, folder.path(), "q4i8.so");
        let tolerance = format_tolerance(ActivationType::I8);
        check(&format!("q4i8 without {}", pass.name), &path, None, &prompts, &expected, tolerance);
    }
}

#[test]
fn equal_input_gives_equal_bytes() {
    let folder = tempfile::tempdir().unwrap();
    let mut targets = vec![host_levels().join(",")];
    // PTX needs a linker for the host only, and no GPU.
    targets.extend(cfg!(feature = "llvm").then(|| "sm_80".to_string()));
    for target in targets {
        for backend in backends() {
            if target == "sm_80" && backend == Backend::Cranelift {
                continue;
            }
            let mut options = options("rwkv4-hf-odd", "q4f16_2");
            options.target = target.clone();
            options.backend = backend;
            options.cache = None;
            let bytes = ["one.so", "another.so"]
                .map(|name| std::fs::read(artifact(&options, folder.path(), name).0).unwrap());
            let first = bytes[0].iter().zip(&bytes[1]).position(|(a, b)| a != b);
            let what = format!("{} for {target}", backend.name());
            assert_eq!(bytes[0].len(), bytes[1].len(), "{what}: two builds differ in size");
            assert_eq!(first, None, "{what}: two builds differ at this byte");
        }
    }
}

/// The program itself: `mlcc build`, `mlcc verify`.
#[test]
fn verify_accepts_what_build_wrote() {
    let folder = tempfile::tempdir().unwrap();
    for (case, quant) in [
        ("rwkv4-hf", "f32"),
        ("rwkv4-hf-odd", "f16"),
        ("rwkv4-pth", "bf16"),
        ("rwkv5-hf", "f32"),
        ("rwkv6-hf", "bf16"),
        ("rwkv7-hf", "f32"),
    ] {
        let artifact = folder.path().join(format!("{case}.so"));
        let mut build = Command::new(env!("CARGO_BIN_EXE_mlcc"));
        build.args(["build", "--quiet", "--no-cache", "--quant", quant, "--chunk", "8", "--model"]);
        build.arg(cases::directory(case)).arg("-o").arg(&artifact).assert().success();
        let mut verify = Command::new(env!("CARGO_BIN_EXE_mlcc"));
        verify.args(["verify", "--json", "--golden"]).arg(cases::directory(case).join("golden.json"));
        let out = verify.arg(&artifact).assert().success().get_output().stdout.clone();
        let report: serde_json::Value = serde_json::from_slice(&out).unwrap();
        assert_eq!(report["ok"], true, "{case}");
        assert_eq!(report["greedy_equal"], report["greedy_expected"], "{case}");
        println!("{case} {quant}: worst relative error {}", report["worst_relative_error"]);
    }
}

/// A tolerance that nothing can meet: the exit code tells.
#[test]
fn verify_refuses_what_is_outside_of_the_tolerance() {
    let folder = tempfile::tempdir().unwrap();
    let (path, _) = artifact(&options("rwkv4-hf", "q4f16_1"), folder.path(), "q4.so");
    let mut verify = Command::new(env!("CARGO_BIN_EXE_mlcc"));
    verify.args(["verify", "--tolerance", "1e-7", "--golden"]);
    verify.arg(cases::directory("rwkv4-hf").join("golden.json")).arg(path).assert().code(1);
}
