//! A whole toy model through LLVM: steps, table, several levels in one file, linking, and the runtime on the
//! result.
#![cfg(feature = "llvm")]

use crate::entry_calls::refuses_bad_arguments;
use crate::toy::{self, reference};
use crate::toy_kernels::{IterationPlace, kernels, steps, table};
use mlcc_abi::ModelTable;
use mlcc_codegen::artifact::WeightDestination;
use mlcc_codegen::cache::ObjectCache;
use mlcc_codegen::link::find_linker;
use mlcc_codegen::llvm::EmitFormat;
use mlcc_codegen::{CodegenError, CodegenInput, CompileJobs, LevelInput, compile, compile_with_jobs, emit};
use mlcc_ir::kernel::Kernel;
use mlcc_ir::step::StepProgram;
use mlcc_runtime::{LoadOptions, Model};
use mlcc_target::{Arch, CompileTarget, resolve_target};
use std::path::{Path, PathBuf};
use std::process::Command;

const TOKENS: [i32; 8] = [3, 1, 4, 1, 0, 2, 2, 4];

/// The toy for a target: the same kernels at every level.
struct ToyPrograms {
    target: CompileTarget,
    kernels: Vec<Kernel>,
    steps: Vec<StepProgram>,
}

impl ToyPrograms {
    fn new(target: &str) -> ToyPrograms {
        let target = resolve_target(target).unwrap();
        let place =
            if target.arch == Arch::Nvptx { IterationPlace::Threads(4) } else { IterationPlace::Workers };
        ToyPrograms { target, kernels: kernels(place), steps: steps(place) }
    }
    fn input(&self) -> CodegenInput<'_> {
        let one = |level| LevelInput { level, kernels: &self.kernels, steps: &self.steps };
        let name = match self.target.arch {
            Arch::X86_64 => "x86-64",
            Arch::Aarch64 => "aarch64",
            Arch::Nvptx => "cuda",
        };
        CodegenInput {
            target: &self.target,
            levels: self.target.levels.iter().map(one).collect(),
            table: table(name),
            assembler: None,
        }
    }
    fn artifact(&self, folder: &Path) -> PathBuf {
        let library = compile(&self.input(), "toy.so").unwrap();
        let out = folder.join("toy.so");
        toy::pack(library.path(), &out, WeightDestination::Inside);
        out
    }
}

/// The spec of this machine, all default levels.
fn host() -> Option<ToyPrograms> {
    match Arch::of_host()? {
        Arch::X86_64 => Some(ToyPrograms::new("x86-64")),
        Arch::Aarch64 => Some(ToyPrograms::new("aarch64")),
        Arch::Nvptx => None,
    }
}

#[test]
fn every_level_gives_the_reference_results() {
    let Some(toy) = host() else { return };
    let folder = tempfile::tempdir().unwrap();
    let path = toy.artifact(folder.path());
    let have = mlcc_target::detected_features();
    let expected = reference(&TOKENS);
    let mut ran = 0;
    for level in &toy.target.levels {
        if !level.features.iter().all(|f| have.contains(&f.as_str())) {
            continue;
        }
        ran += 1;
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
    assert!(ran > 0);
}

/// Calls entry points as a C program would, with arguments that the runtime never passes on.
#[test]
fn entry_points_refuse_bad_arguments() {
    let Some(toy) = host() else { return };
    let library = compile(&toy.input(), "toy.so").unwrap();
    // SAFETY: the library was just made and has no initialisers; its one symbol is the table.
    let loaded = unsafe { libloading::Library::new(library.path()).unwrap() };
    let table = unsafe { &**loaded.get::<*const ModelTable>(b"mlcc_model").unwrap() };
    refuses_bad_arguments(table, &table_metadata());
}

fn table_metadata() -> String {
    table("").metadata
}

#[test]
fn equal_input_gives_equal_bytes() {
    for name in ["x86-64-v2,x86-64-v4", "cuda"] {
        let toy = ToyPrograms::new(name);
        let parts = |toy: &ToyPrograms| emit(&toy.input(), EmitFormat::Object).unwrap();
        assert_eq!(parts(&toy), parts(&ToyPrograms::new(name)), "{name}");
    }
    let Some(toy) = host() else { return };
    let bytes = || std::fs::read(compile(&toy.input(), "toy.so").unwrap().path()).unwrap();
    assert_eq!(bytes(), bytes());
}

/// Threads, earlier builds and damage to their files change nothing.
#[test]
fn objects_of_earlier_builds_give_the_same_bytes() {
    let folder = tempfile::tempdir().unwrap();
    let cache = ObjectCache::new(folder.path(), ObjectCache::LIMIT);
    for target in ["x86-64-v2,x86-64-v4", "aarch64", "cuda"] {
        if find_linker(resolve_target(target).unwrap().arch).is_err() || Arch::of_host().is_none() {
            eprintln!("skipped: no linker for {target}");
            continue;
        }
        let toy = ToyPrograms::new(target);
        let build = |threads, cache: Option<&ObjectCache>| {
            let jobs = CompileJobs { threads, cache: cache.cloned(), listener: None };
            let library = compile_with_jobs(&toy.input(), "toy.so", &jobs).unwrap();
            (std::fs::read(library.path()).unwrap(), library.object_counts())
        };
        let (fresh, made) = build(1, None);
        assert!(build(4, None).0 == fresh, "{target}: threads");
        let (first, second) = (build(3, Some(&cache)), build(2, Some(&cache)));
        assert!(first.0 == fresh && second.0 == fresh, "{target}");
        assert_eq!((first.1.from_cache, second.1.from_cache), (0, made.objects), "{target}");
        for entry in std::fs::read_dir(cache.folder()).unwrap() {
            let path = entry.unwrap().path();
            let half = std::fs::metadata(&path).unwrap().len() / 2;
            std::fs::File::options().write(true).open(&path).unwrap().set_len(half).unwrap();
        }
        let (damaged, after) = build(2, Some(&cache));
        assert!(damaged == fresh && after.from_cache == 0, "{target}");
        assert_eq!(build(1, Some(&cache)).1, second.1, "{target}");
        cache.clear().unwrap();
    }
}

/// Kernels that differ in their names alone, and those of levels whose further features they do not use, are
/// compiled once.
#[test]
fn equal_kernels_share_an_object() {
    let made = |toy: &ToyPrograms| compile(&toy.input(), "toy.so").unwrap();
    let steps = steps(IterationPlace::Workers).len() + 1;
    let mut toy = ToyPrograms::new("x86-64-v4-vnni");
    let one = made(&toy).object_counts().objects;
    let two = ToyPrograms::new("x86-64-v4-bf16,x86-64-v4-vnni");
    let library = made(&two);
    assert_eq!(library.object_counts().objects, one + steps);
    let text = String::from_utf8_lossy(&std::fs::read(library.path()).unwrap()).into_owned();
    for level in ["x86_64_v4_bf16", "x86_64_v4_vnni"] {
        assert!(text.contains(&format!("\0toy_feed.{level}\0")), "{level}");
    }
    let mut other = toy.kernels[0].clone();
    other.name = "toy.other".into();
    for id in other.bufs.ids() {
        other.bufs[id].name.push_str("_of_another_name");
    }
    toy.kernels.push(other);
    assert_eq!(made(&toy).object_counts().objects, one);
    // Another level has code of its own.
    assert_eq!(made(&ToyPrograms::new("x86-64-v4-vnni,x86-64-v2")).object_counts().objects, 2 * one);
}

/// Exported: the table alone. Imported: nothing.
#[test]
fn the_library_has_one_symbol() {
    let Some(toy) = host() else { return };
    let library = compile(&toy.input(), "toy.so").unwrap();
    let Ok(nm) = Command::new("nm").args(["-D", "--format=posix"]).arg(library.path()).output() else {
        eprintln!("skipped: no `nm` on this machine");
        return;
    };
    let symbols = String::from_utf8(nm.stdout).unwrap();
    let names: Vec<&str> = symbols.lines().filter_map(|l| l.split(' ').next()).collect();
    assert_eq!(names, ["mlcc_model"], "{symbols}");
}

#[test]
fn every_form_can_be_emitted() {
    let toy = ToyPrograms::new("x86-64-v3");
    let text = |output| {
        let parts = emit(&toy.input(), output).unwrap();
        let names: Vec<&str> = parts.iter().map(|p| p.name.as_str()).collect();
        assert_eq!(names, ["x86-64-v3", "table"]);
        String::from_utf8_lossy(&parts[0].bytes).into_owned()
    };
    assert!(text(EmitFormat::Ir).contains("@mlcc_decode_x86_64_v3(ptr"));
    assert!(text(EmitFormat::Assembly).contains("mlcc_decode_x86_64_v3:"));
    assert!(text(EmitFormat::Object).starts_with("\u{7f}ELF"));
    let cuda = ToyPrograms::new("sm_80");
    let parts = emit(&cuda.input(), EmitFormat::Assembly).unwrap();
    let ptx = String::from_utf8(parts[0].bytes.clone()).unwrap();
    assert!(ptx.contains(".target sm_80") && ptx.contains(".visible .entry k_toy_feed("), "{ptx}");
    assert!(ptx.contains(".maxntid 4"), "{ptx}");
}

#[test]
fn mistakes_of_lowering_are_named() {
    let message = |change: &dyn Fn(&mut ToyPrograms)| {
        let mut toy = ToyPrograms::new("x86-64-v2");
        change(&mut toy);
        let error = emit(&toy.input(), EmitFormat::Object).unwrap_err();
        assert!(matches!(error, CodegenError::Step { .. } | CodegenError::Internal { .. }));
        error.to_string()
    };
    let missing = message(&|t| t.kernels.truncate(1));
    assert!(missing.contains("toy.logits") && missing.contains("`prefill`"), "{missing}");
    let twice = message(&|t| t.kernels.push(t.kernels[0].clone()));
    assert!(twice.contains("toy.feed"), "{twice}");
    let unknown = message(&|t| t.steps[0].name = "warm_up".into());
    assert!(unknown.contains("warm_up"), "{unknown}");
    let gpu = message(&|t| t.kernels = kernels(IterationPlace::Threads(4)));
    assert!(gpu.contains("GPU loop"), "{gpu}");
}

/// The artifact for a GPU: built without one, with launch lists and PTX of every level.
#[test]
fn a_gpu_artifact_is_data_for_the_loader() {
    if Arch::of_host().is_none() {
        return;
    }
    let toy = ToyPrograms::new("cuda");
    let library = compile(&toy.input(), "toy.so").unwrap();
    // SAFETY: as above.
    let loaded = unsafe { libloading::Library::new(library.path()).unwrap() };
    let table = unsafe { &**loaded.get::<*const ModelTable>(b"mlcc_model").unwrap() };
    assert_eq!((table.n_variants, table.n_images, table.n_device_entries), (0, 3, 4));
    // SAFETY: three images and four entries, each with what their counts say.
    let images = unsafe { std::slice::from_raw_parts(table.images, 3) };
    assert_eq!(images.iter().map(|i| i.sm).collect::<Vec<_>>(), [90, 80, 70]);
    let entries = unsafe { std::slice::from_raw_parts(table.device_entries, 4) };
    let launches = unsafe { std::slice::from_raw_parts(entries[2].launches, 2) };
    assert_eq!((launches[1].grid[0].coef_n, launches[1].grid[0].div), (VOCAB_I64, 4));
    assert_eq!((launches[1].block, launches[1].n_args), ([4, 1, 1], 5));
    let args = unsafe { std::slice::from_raw_parts((*entries[3].launches).args, 3) };
    let temperature = std::mem::offset_of!(mlcc_abi::Control, temperature) as u64;
    assert_eq!((args[1].kind, args[1].offset), (mlcc_abi::arg::CONTROL, temperature));
}

const VOCAB_I64: i64 = toy::VOCAB as i64;

/// Greedy continuation by the reference; the first of equal logits wins, as in `generate.c`.
fn greedy(prompt: &[i32], count: usize) -> Vec<i32> {
    let mut tokens = prompt.to_vec();
    for _ in 0..count {
        let logits = reference(&tokens).pop().unwrap();
        let best = (0..logits.len()).rev().max_by(|&a, &b| logits[a].total_cmp(&logits[b])).unwrap();
        tokens.push(best as i32);
    }
    tokens.split_off(prompt.len())
}

/// Cross-compiled, cross-linked, and run by an emulator: at the best level that a recent and an old processor
/// have.
#[test]
fn a_c_program_runs_it_on_aarch64() {
    for program in ["qemu-aarch64", "aarch64-linux-gnu-gcc"] {
        if !Command::new(program).arg("--version").output().is_ok_and(|o| o.status.success()) {
            eprintln!("skipped: no {program} (`apt install qemu-user gcc-aarch64-linux-gnu`)");
            return;
        }
    }
    let folder = tempfile::tempdir().unwrap();
    let artifact = ToyPrograms::new("aarch64").artifact(folder.path());
    let program = folder.path().join("generate");
    let runtime = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../runtime/core");
    let built = Command::new("aarch64-linux-gnu-gcc")
        .args(["-O1", "-Wall", "-Wextra", "-Werror", "-I"])
        .arg(runtime.join("include"))
        .arg(runtime.join("examples/generate.c"))
        .arg("-o")
        .arg(&program)
        .arg("-ldl")
        .output()
        .unwrap();
    assert!(built.status.success(), "{}", String::from_utf8_lossy(&built.stderr));
    let want: Vec<String> = greedy(&[3, 1], 6).iter().map(i32::to_string).collect();
    for cpu in ["max", "cortex-a53"] {
        let run = Command::new("qemu-aarch64")
            .args(["-L", "/usr/aarch64-linux-gnu", "-cpu", cpu])
            .args([&program, &artifact])
            .args(["6", "3", "1"])
            .output()
            .unwrap();
        let got = String::from_utf8_lossy(&run.stdout).trim().to_owned();
        assert_eq!(got, want.join(" "), "{cpu}: {}", String::from_utf8_lossy(&run.stderr));
    }
}
