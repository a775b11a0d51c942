//! A whole toy model: steps, table, several levels in one file, linking, and the runtime on the result.

use crate::entry_calls::refuses_bad_arguments;
use crate::toy::{self, reference};
use crate::toy_kernels::{IterationPlace, kernels, steps, table};
use mlcc_abi::ModelTable;
use mlcc_codegen::artifact::WeightDestination;
use mlcc_codegen::cache::ObjectCache;
use mlcc_codegen::clif::usable_level;
use mlcc_codegen::{
    CodegenInput, CompileJobs, LevelInput, LinkedLibrary, compile_with_cranelift, compile_with_cranelift_jobs,
};
use mlcc_ir::builder::KernelBuilder;
use mlcc_ir::kernel::{ForKind, Kernel, ParamAccess, UnOp};
use mlcc_ir::step::{StepItem, StepProgram};
use mlcc_ir::types::DType;
use mlcc_runtime::{LoadOptions, Model};
use mlcc_target::{Arch, CompileTarget, resolve_target};
use std::process::Command;

const TOKENS: [i32; 8] = [3, 1, 4, 1, 0, 2, 2, 4];

/// The toy for two levels of this machine's architecture.
fn build(target: &CompileTarget) -> LinkedLibrary {
    build_by(target, &CompileJobs::default())
}

fn build_by(target: &CompileTarget, jobs: &CompileJobs) -> LinkedLibrary {
    let (kernels, steps) = (kernels(IterationPlace::Workers), steps(IterationPlace::Workers));
    let one = |level| LevelInput { level, kernels: &kernels, steps: &steps };
    let name = if target.arch == Arch::X86_64 { "x86-64" } else { "aarch64" };
    let input = CodegenInput {
        target,
        levels: target.levels.iter().map(one).collect(),
        table: table(name),
        assembler: None,
    };
    compile_with_cranelift_jobs(&input, "toy.so", jobs).unwrap()
}

fn host() -> Option<CompileTarget> {
    match Arch::of_host()? {
        Arch::X86_64 => resolve_target("x86-64-v2,x86-64-v3").ok(),
        Arch::Aarch64 => resolve_target("aarch64").ok(),
        Arch::Nvptx => None,
    }
}

#[test]
fn every_level_gives_the_reference_results() {
    let Some(target) = host() else { return };
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("toy.so");
    toy::pack(build(&target).path(), &path, WeightDestination::Inside);
    let have = mlcc_target::detected_features();
    let expected = reference(&TOKENS);
    for level in target.levels.iter().filter(|l| l.features.iter().all(|f| have.contains(&f.as_str()))) {
        for threads in [1, 3] {
            let options = LoadOptions {
                threads: Some(threads),
                cpu_level: Some(level.name.clone()),
                verify_hashes: true,
                ..LoadOptions::default()
            };
            let model = Model::load(&path, &options).unwrap();
            assert_eq!(model.executor(), level.name);
            let mut session = model.session().unwrap();
            for (i, &token) in TOKENS.iter().enumerate() {
                assert_eq!(session.decode(token).unwrap(), expected[i], "{} position {i}", level.name);
            }
            session.reset().unwrap();
            assert_eq!(session.prefill(&TOKENS).unwrap(), expected[7]);
            session.reset().unwrap();
            assert_eq!(session.prefill_logits(&TOKENS[..5]).unwrap(), expected[..5].concat());
        }
    }
}

#[test]
fn levels_shrink_to_what_is_used() {
    let target = resolve_target("x86-64-v4-vnni").unwrap();
    let level = usable_level(target.arch, &target.levels[0]).unwrap();
    assert_eq!((level.name.as_str(), level.vector_bits), ("x86-64-v4-vnni", 128));
    assert!(level.has_all(&["avx2", "fma", "sse4.1"]));
    assert!(!level.has("avx512f") && !level.has("avx512vnni") && !level.has("f16c"));
}

/// Calls entry points as a C program would, with arguments that the runtime never passes on.
#[test]
fn entry_points_refuse_bad_arguments() {
    let Some(target) = host() else { return };
    let library = build(&target);
    // SAFETY: the library was just made and has no initialisers; its one symbol is the table.
    let loaded = unsafe { libloading::Library::new(library.path()).unwrap() };
    let model = unsafe { &**loaded.get::<*const ModelTable>(b"mlcc_model").unwrap() };
    refuses_bad_arguments(model, &table("").metadata);
}

#[test]
fn equal_input_gives_equal_bytes() {
    let Some(target) = host() else { return };
    let bytes = || std::fs::read(build(&target).path()).unwrap();
    assert_eq!(bytes(), bytes());
}

/// Exported: the table alone. Imported: nothing.
#[test]
fn the_library_has_one_symbol() {
    let Some(target) = host() else { return };
    let Ok(nm) = Command::new("nm").args(["-D", "--format=posix"]).arg(build(&target).path()).output() else {
        eprintln!("skipped: no `nm` on this machine");
        return;
    };
    let symbols = String::from_utf8(nm.stdout).unwrap();
    let names: Vec<&str> = symbols.lines().filter_map(|l| l.split(' ').next()).collect();
    assert_eq!(names, ["mlcc_model"], "{symbols}");
}

fn refusal(target: &CompileTarget, kernels: &[Kernel], steps: &[StepProgram]) -> String {
    let levels = vec![LevelInput { level: &target.levels[0], kernels, steps }];
    let input = CodegenInput { target, levels, table: table("x86-64"), assembler: None };
    compile_with_cranelift(&input, "toy.so").unwrap_err().to_string()
}

/// Nor does it matter which thread makes an object, and when.
#[test]
fn objects_of_earlier_builds_give_the_same_bytes() {
    let Some(target) = host() else { return };
    let folder = tempfile::tempdir().unwrap();
    let cache = Some(ObjectCache::new(folder.path(), ObjectCache::LIMIT));
    let library = |threads, cache| build_by(&target, &CompileJobs { threads, cache, listener: None });
    let bytes = |library: &LinkedLibrary| std::fs::read(library.path()).unwrap();
    let fresh = library(1, None);
    let (first, second) = (library(3, cache.clone()), library(2, cache));
    assert_eq!(
        (first.object_counts().from_cache, second.object_counts().from_cache),
        (0, fresh.object_counts().objects)
    );
    assert!(bytes(&fresh) == bytes(&first) && bytes(&fresh) == bytes(&second));
}

#[test]
fn bad_modules_are_refused_by_name() {
    let target = resolve_target("x86-64-v2").unwrap();
    let message = |kernels: &[Kernel], steps: &[StepProgram]| refusal(&target, kernels, steps);
    let good = kernels(IterationPlace::Workers);
    let missing = message(&good[1..], &steps(IterationPlace::Workers));
    assert!(missing.contains("kernel toy.feed is launched but not among the kernels"), "{missing}");
    let mut wrong = steps(IterationPlace::Workers);
    if let StepItem::Launch(launch) = &mut wrong[0].items[0] {
        launch.buffers.pop();
    }
    let count = message(&good, &wrong);
    assert!(count.contains("kernel toy.feed: expected 4 buffers, found 3"), "{count}");

    let mut kb = KernelBuilder::new("gpu");
    let ten = kb.int(10);
    kb.for_("b", ten, ForKind::Block(0), |_, _| {});
    let gpu = message(&[kb.finish()], &[]);
    assert!(gpu.contains("`gpu` failed: block and thread loops belong to GPU kernels"), "{gpu}");

    let mut kb = KernelBuilder::new("tail");
    let out = kb.param("out", DType::F32, 1usize, ParamAccess::InOut, 4);
    let zero = kb.int(0);
    let x = kb.load(out, zero);
    let x = kb.unary(UnOp::Exp, x);
    kb.store(out, zero, x);
    let exp = message(&[kb.finish()], &[]);
    assert!(exp.contains("`tail` failed: exp of f32 is not primitive and must be expanded first"), "{exp}");

    let cuda = resolve_target("sm_80").unwrap();
    let cuda = refusal(&cuda, &[], &[]);
    assert!(cuda.contains("GPU code needs the LLVM back end"), "{cuda}");
}
