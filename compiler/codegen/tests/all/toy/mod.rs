//! The toy model of `toy.c`: how to build it, and what it computes.

use std::path::{Path, PathBuf};
use std::process::Command;

use mlcc_abi::section;
use mlcc_codegen::artifact::{ArtifactWriter, SplitTensor, WeightDestination};

pub const VOCAB: usize = 5;
pub const WIDTH: usize = 8;

/// Small whole numbers, so that every order of summation gives the same float.
pub fn embedding() -> Vec<f32> {
    (0..VOCAB * WIDTH).map(|i| ((i * 7 + 3) % 11) as f32 - 5.0).collect()
}

pub fn weights() -> Vec<u8> {
    embedding().iter().flat_map(|x| x.to_le_bytes()).collect()
}

/// Logits at every position.
pub fn reference(tokens: &[i32]) -> Vec<Vec<f32>> {
    let e = embedding();
    let row = |t: usize| &e[t * WIDTH..(t + 1) * WIDTH];
    let mut h = [-1.0f32; WIDTH];
    let mut out = Vec::new();
    for (past, &token) in tokens.iter().enumerate() {
        h.iter_mut().zip(row(token as usize)).for_each(|(h, x)| *h = *h * 0.5 + x);
        let logit = |v| past as f32 + h.iter().zip(row(v)).map(|(a, b)| a * b).sum::<f32>();
        out.push((0..VOCAB).map(logit).collect());
    }
    out
}

/// True if this machine can build the toy; prints why it cannot.
pub fn can_compile() -> bool {
    let found = Command::new("cc").arg("--version").output().is_ok();
    if !found {
        eprintln!("skipped: no C compiler (`cc`) on this machine");
    }
    found
}

pub fn cc(source: &Path, out: &Path, flags: &[&str]) {
    let include = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../runtime/core/include");
    let done = Command::new("cc")
        .args(["-shared", "-fPIC", "-O1", "-std=c11", "-Wall", "-Wextra", "-Werror", "-I"])
        .arg(include)
        .arg("-o")
        .arg(out)
        .arg(source)
        .args(flags)
        .output()
        .unwrap();
    assert!(done.status.success(), "{}", String::from_utf8_lossy(&done.stderr));
}

/// Links the toy without its payload.
pub fn linked(folder: &Path, flags: &[&str]) -> PathBuf {
    linked_from("toy.c", folder, flags)
}

/// Links one of the toys of this folder.
pub fn linked_from(file: &str, folder: &Path, flags: &[&str]) -> PathBuf {
    let out = folder.join("linked.so");
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/all/toy").join(file);
    let mut all = vec!["-nostdlib", "-ffreestanding", "-fno-builtin", "-fvisibility=hidden"];
    // Symbols would have to name the entry points as the compiler does.
    if !flags.contains(&"-g") {
        all.push("-s");
    }
    all.extend(["-Wno-override-init", "-fno-tree-loop-distribute-patterns", "-Wl,--build-id=none"]);
    all.extend(flags);
    cc(&source, &out, &all);
    out
}

/// Appends the payload to a linked toy.
pub fn pack(linked: &Path, out: &Path, weights_to: WeightDestination) {
    let mut artifact = ArtifactWriter::create(out, linked, weights_to).unwrap();
    artifact.write_section(section::METADATA, b"{\"model\":\"toy\"}").unwrap();
    artifact.begin_section(section::WEIGHTS).unwrap();
    weights().chunks(7).for_each(|piece| artifact.write(piece).unwrap());
    artifact.end_section().unwrap();
    artifact.write_section(section::TOKENIZER, b"abc").unwrap();
    artifact.finish().unwrap();
}

/// A whole toy artifact.
pub fn artifact(folder: &Path, flags: &[&str]) -> PathBuf {
    let out = folder.join("toy.so");
    pack(&linked(folder, flags), &out, WeightDestination::Inside);
    out
}

pub fn split(folder: &Path) -> WeightDestination {
    let tensors = [("embedding", 0), ("odd \"name\"", 96)];
    WeightDestination::Split {
        path: folder.join("toy.safetensors"),
        tensors: tensors.map(|(name, offset)| SplitTensor { name: name.into(), offset }).to_vec(),
        bytes: (VOCAB * WIDTH * 4) as u64,
    }
}
