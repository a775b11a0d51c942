//! Whole models on AArch64, by an emulator where one is installed: at every CPU level, against their
//! reference cases and, in packed formats, against their own meaning. Prompts are long enough for the kernels
//! of many rows, and enter token by token too.
#![cfg(feature = "llvm")]

use std::path::{Path, PathBuf};
use std::process::Command;

use crate::cases::{self, artifact, assert_close, distance, golden, ids, interpreted, options, program};
use mlcc_driver::compile::BuildOptions;
use mlcc_passes::CacheType;
use mlcc_target::Arch;
use tempfile::TempDir;

/// f32 sums in another order than the reference's.
const F32: f32 = 2e-5;

struct EmulatedMachine {
    program: PathBuf,
    folder: TempDir,
}

impl EmulatedMachine {
    /// Says what is missing if there is none.
    fn find() -> Option<EmulatedMachine> {
        let runs = |program: &&str| {
            Command::new(program).arg("--version").output().is_ok_and(|out| out.status.success())
        };
        if let Some(absent) = ["qemu-aarch64", "aarch64-linux-gnu-gcc"].iter().find(|p| !runs(p)) {
            eprintln!("skipped: no {absent} (`apt install qemu-user gcc-aarch64-linux-gnu`)");
            return None;
        }
        let folder = tempfile::tempdir().unwrap();
        let program = folder.path().join("logits");
        let built = Command::new("aarch64-linux-gnu-gcc")
            .args(["-O1", "-Wall", "-Wextra", "-Werror", "-I"])
            .arg(cases::workspace().join("runtime/core/include"))
            .arg(Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/all/aarch64/logits.c"))
            .arg("-o")
            .arg(&program)
            .arg("-ldl")
            .output()
            .unwrap();
        assert!(built.status.success(), "{}", String::from_utf8_lossy(&built.stderr));
        Some(EmulatedMachine { program, folder })
    }

    /// Logits after a prompt that enters in calls of `piece` tokens.
    fn logits(&self, artifact: &Path, level: &str, piece: usize, ids: &[i32]) -> Vec<f32> {
        let run = Command::new("qemu-aarch64")
            .args(["-L", "/usr/aarch64-linux-gnu", "-cpu", "max"])
            .args([&self.program, artifact])
            .args([level, &piece.to_string()])
            .args(ids.iter().map(i32::to_string))
            .output()
            .unwrap();
        assert!(run.status.success(), "{level}: {}", String::from_utf8_lossy(&run.stderr));
        run.stdout.chunks(4).map(|b| f32::from_le_bytes(b.try_into().unwrap())).collect()
    }

    /// Holds every level of a model against what is expected of its prompts.
    fn check(&self, options: &BuildOptions, expected: &[(Vec<i32>, Vec<f32>)], tolerance: f32) {
        let (path, _) = artifact(options, self.folder.path(), "model.so");
        for level in levels() {
            for (ids, expected) in expected {
                for piece in if ids.len() > 1 { vec![ids.len(), 1] } else { vec![1] } {
                    let found = self.logits(&path, &level, piece, ids);
                    let what = format!(
                        "{} in {} for {level}, {} tokens in pieces of {piece}",
                        options.request.model,
                        options.quant_name,
                        ids.len()
                    );
                    assert_close(&what, expected, &found, tolerance);
                    println!("{what}: off by {:.1e}", distance(expected, &found));
                }
            }
        }
    }
}

fn levels() -> Vec<String> {
    let specs = mlcc_target::specs().unwrap();
    let spec = specs.iter().find(|s| s.arch == Arch::Aarch64).unwrap();
    spec.levels.iter().map(|l| l.name.clone()).collect()
}

fn for_aarch64(case: &str, quant: &str) -> BuildOptions {
    let mut options = options(case, quant);
    options.target = "aarch64".into();
    // Whole prompts: products of many rows.
    options.chunk = Some(64);
    options.context = Some(96).filter(|_| !case.starts_with("rwkv"));
    options
}

#[test]
fn models_equal_their_references() {
    let Some(machine) = EmulatedMachine::find() else { return };
    for case in ["llama3-gqa-tied", "gemma2", "qwen3-moe", "bloom-alibi", "rwkv4-hf-odd", "rwkv7-hf"] {
        let expected: Vec<_> =
            golden(case).prompts.iter().map(|prompt| (ids(prompt), prompt.logits_last.clone())).collect();
        machine.check(&for_aarch64(case, "f32"), &expected, F32);
    }
}

#[test]
fn formats_equal_their_own_meaning() {
    let Some(machine) = EmulatedMachine::find() else { return };
    // Activations of 8 bits fall on the other side of a rounding edge here and there.
    let cases = [
        ("rwkv4-hf-odd", "q4i8", CacheType::F16, 2e-2),
        ("rwkv4-hf-odd", "bf16bf16", CacheType::F16, 1.6e-2),
        ("qwen3-moe", "q8i8", CacheType::I8, 2e-2),
        ("llama3-gqa-tied", "q4f16", CacheType::F16, 5e-4),
    ];
    for (case, quant, cache, tolerance) in cases {
        let mut options = for_aarch64(case, quant);
        options.kv_cache = Some(cache);
        let (module, source) = program(&options, Some(cases::LAST_GRAPH_PASS));
        let prompts: Vec<Vec<i32>> = golden(case).prompts.iter().map(ids).collect();
        let logits = interpreted(&module.module, &source, &prompts);
        let expected: Vec<_> = prompts.into_iter().zip(logits).collect();
        machine.check(&options, &expected, tolerance);
    }
}

/// Integer sums are exact, whichever instruction makes them; all else is the same.
#[test]
fn levels_give_the_same_bits_with_integer_products() {
    let Some(machine) = EmulatedMachine::find() else { return };
    let prompt: Vec<i32> = golden("llama3-gqa-tied").prompts.iter().flat_map(ids).collect();
    for quant in ["q4i8", "q8i8", "q4f16"] {
        let (path, _) = artifact(&for_aarch64("llama3-gqa-tied", quant), machine.folder.path(), "levels.so");
        for piece in [prompt.len(), 5, 1] {
            let of = |level: &String| -> Vec<u32> {
                let logits = machine.logits(&path, level, piece, &prompt);
                logits.iter().map(|x| x.to_bits()).collect()
            };
            let levels = levels();
            let first = of(&levels[0]);
            for level in &levels[1..] {
                let equal = first == of(level);
                assert!(equal, "{quant}, pieces of {piece}: {level} differs from {}", levels[0]);
            }
        }
    }
}
