//! Kernels compiled by LLVM for every level of this machine against the interpreter.
#![cfg(feature = "llvm")]

use crate::cases::{KernelCase, arithmetic, control, instrs, memory, prepare};
use crate::objects::cache;
use mlcc_codegen::executor::{AlignedBytes, ExecutorError, KernelExecutor};
use mlcc_codegen::llvm::{EmitFormat, kernels_object};
use mlcc_codegen::prepare::LevelCapabilities;
use mlcc_ir::dim::SymValues;
use mlcc_ir::instr::{InstrId, InstrSpelling};
use mlcc_ir::kernel::Kernel;
use mlcc_target::{Arch, FeatureLevel};

fn spec_levels() -> Vec<FeatureLevel> {
    let specs = mlcc_target::specs().unwrap();
    let spec = specs.into_iter().find(|s| Some(s.arch) == Arch::of_host());
    spec.map(|s| s.levels).unwrap_or_default()
}

/// Levels that this machine runs.
fn levels() -> Vec<FeatureLevel> {
    let have = mlcc_target::detected_features();
    let runs = |l: &FeatureLevel| l.features.iter().all(|f| have.contains(&f.as_str()));
    spec_levels().into_iter().filter(runs).collect()
}

fn run_case(executor: &KernelExecutor, case: &KernelCase, workers: usize) -> Vec<Vec<u8>> {
    let mut buffers: Vec<AlignedBytes> =
        case.buffers.iter().map(|b| AlignedBytes::from_bytes(&b.bytes)).collect();
    executor.run(&case.kernel.name, &mut buffers, &case.dims, workers).unwrap();
    buffers.iter().map(|b| b.bytes().to_vec()).collect()
}

/// Holds the cases against the interpreter at every level, with one and with three workers.
fn check(cases: Vec<KernelCase>) {
    let cases = prepare(cases);
    let kernels: Vec<Kernel> = cases.iter().map(|(c, _)| c.kernel.clone()).collect();
    for level in levels() {
        let executor = KernelExecutor::from_cache(&kernels, &level, &cache()).unwrap();
        for (case, want) in &cases {
            for workers in [1, 3] {
                let got = run_case(&executor, case, workers);
                case.check(&format!("{} x{workers}", level.name), &got, want);
            }
        }
    }
}

#[test]
fn integer_arithmetic() {
    check(arithmetic::integer_arithmetic());
}

#[test]
fn float_arithmetic() {
    check(arithmetic::float_arithmetic());
}

#[test]
fn casts() {
    check(arithmetic::casts());
}

#[test]
fn half_conversions_are_exact() {
    check(arithmetic::half_conversions());
}

#[test]
fn lanes_move() {
    check(memory::lanes_move());
}

#[test]
fn memory_accesses() {
    check(memory::memory_accesses());
}

#[test]
fn loops_and_registers() {
    check(control::loops_and_registers());
}

#[test]
fn instructions_mean_what_the_table_says() {
    check(instrs::instructions());
}

/// Also at levels that this machine cannot run: the spelling is used where the features are there, and only
/// there.
#[test]
fn available_instructions_are_spelled() {
    let cases = prepare(instrs::instructions());
    for spec in mlcc_target::specs().unwrap().iter().filter(|s| s.arch != Arch::Nvptx) {
        for level in &spec.levels {
            let caps = LevelCapabilities::new(spec.arch, level);
            for (case, _) in &cases {
                let kernels = std::slice::from_ref(&case.kernel);
                let text = kernels_object(spec.arch, &spec.triple, level, kernels, EmitFormat::Ir).unwrap();
                let text = String::from_utf8(text).unwrap();
                let row =
                    case.kernel.name.rsplit_once('_').and_then(|(row, _)| InstrId::by_name(row)).unwrap();
                if let InstrSpelling::Llvm { intrinsic, .. } = row.def().spelling {
                    let spelled = text.contains(&format!("@{intrinsic}("));
                    assert_eq!(spelled, caps.has_instr(row), "{intrinsic} at {}:\n{text}", level.name);
                }
            }
        }
    }
}

#[test]
fn the_executor_refuses_wrong_calls() {
    let Some(level) = levels().into_iter().next() else { return };
    let case = control::loops_and_registers().remove(0);
    let executor = KernelExecutor::new(std::slice::from_ref(&case.kernel), &level).unwrap();
    let dims = SymValues::for_tokens(7);
    let run = |name: &str, sizes: &[usize]| {
        let mut buffers: Vec<AlignedBytes> = sizes.iter().map(|&s| AlignedBytes::zeroed(s)).collect();
        executor.run(name, &mut buffers, &dims, 1)
    };
    assert!(matches!(run("nothing", &[]), Err(ExecutorError::Unknown(_))));
    assert!(matches!(run("dot", &[4]), Err(ExecutorError::Count { expected: 3, found: 1, .. })));
    let short = run("dot", &[7 * 256, 255, 28]).unwrap_err().to_string();
    assert!(short.contains("`x`") && short.contains("256") && short.contains("255"), "{short}");
    run("dot", &[7 * 256, 256, 28]).unwrap();
    let mut other = level.clone();
    other.features.push("quantum".into());
    assert!(matches!(KernelExecutor::new(&[], &other), Err(ExecutorError::Level { .. })));
}
