//! Sequences that are computed together against sessions alone: the common parts of tests of batches and of
//! steps. One artifact of a case is for both.

use std::path::Path;

use crate::cases::{artifact, assert_close, backends, build_options, find, host_levels, load, scheme};
use crate::{batch, step};
use mlcc_driver::compile::{Backend, BuildOptions};
use mlcc_passes::PIPELINE;
use mlcc_runtime::{Model, Session};

pub const BATCH: u32 = 3;

/// The same sums in another order.
pub const F32: f32 = 2e-5;

/// A recurrent model with vectors as states and odd sizes, one with matrices, and caches with: few key heads,
/// a window, experts, a bias instead of positions, positions found in the prompt, angles that depend on the
/// length; a convolution.
const SAMPLE: [&str; 9] = [
    "rwkv4-hf-odd",
    "rwkv7-hf",
    "llama3-gqa-tied",
    "gemma2",
    "qwen3-moe",
    "bloom-alibi",
    "chatglm-6b-tiny",
    "llama-dynamic",
    "qwen3-next",
];

pub fn options(dir: &Path, quant: &str, backend: Backend) -> BuildOptions {
    let mut options = build_options(dir);
    options.quant = scheme(quant);
    options.quant_name = quant.into();
    // Room for a whole prompt, where a model needs that.
    options.chunk = Some(16);
    options.batch = Some(BATCH);
    options.context = Some(32);
    options.backend = backend;
    options
}

/// The name of a comparison, the number of threads, and the tolerance.
pub struct BatchComparison {
    pub name: String,
    pub threads: usize,
    tolerance: f32,
}

impl BatchComparison {
    #[track_caller]
    pub fn close(&self, what: &str, expected: &[f32], found: &[f32]) {
        assert_close(&format!("{}, {what}", self.name), expected, found, self.tolerance);
    }
}

/// Sequences, and the same ones alone.
pub struct PairedSessions {
    pub together: Vec<Session>,
    pub alone: Vec<Session>,
}

impl PairedSessions {
    pub fn new(model: &Model, count: usize) -> PairedSessions {
        let sessions = || (0..count).map(|_| model.session().unwrap()).collect();
        PairedSessions { together: sessions(), alone: sessions() }
    }
}

/// Computes sequences together and alone, and compares the results.
type FeedingFn = fn(&BatchComparison, &Path, &Model) -> PairedSessions;

const FEEDINGS: [(&str, FeedingFn); 2] = [("batches", batch::feed), ("steps", step::feed)];

/// Batches and steps of a case, with the pass `disabled` off; a tolerance of 0 means a build with batch
/// invariance.
fn check(case: &str, quant: &str, backend: Backend, disabled: Option<&str>, tolerance: f32) {
    let Some(dir) = find(case) else { return };
    let folder = tempfile::tempdir().unwrap();
    let mut options = options(&dir, quant, backend);
    options.disabled_passes = disabled.map(String::from).into_iter().collect();
    options.batch_invariant = tolerance == 0.0;
    let (path, _) = artifact(&options, folder.path(), "case.so");
    for threads in [2, 1].into_iter().take(if disabled.is_none() { 2 } else { 1 }) {
        let by = backend.name();
        let name = format!("{case} in {quant} by {by}, {threads} threads, without {disabled:?}");
        compare(&name, threads, tolerance, &dir, &load(&path, None, threads));
    }
}

/// Batches and steps of a model.
pub fn compare(name: &str, threads: usize, tolerance: f32, dir: &Path, model: &Model) {
    for (way, feeding) in FEEDINGS {
        let what = BatchComparison { name: format!("{way} of {name}"), threads, tolerance };
        // The state that this leaves in a session is one like any other.
        let PairedSessions { together, alone } = &mut feeding(&what, dir, model);
        for (a, b) in together.iter_mut().zip(alone) {
            let mut fork = a.fork().unwrap();
            let want = b.decode(1).unwrap();
            what.close("a fork", want, fork.decode(1).unwrap());
            what.close("at the end", want, a.decode(1).unwrap());
        }
    }
}

#[test]
fn sequences_together_equal_single_ones() {
    for (i, backend) in backends().enumerate() {
        let cases = if i == 0 { &SAMPLE[..] } else { &SAMPLE[..3] };
        cases.iter().for_each(|case| check(case, "f32", backend, None, F32));
    }
}

/// Activations are rounded to 8 bits, or to bf16: a sum in another order may turn one over.
#[test]
fn rounded_activations_together_equal_single_ones() {
    let backend = backends().next().expect("a back end is built in");
    check("rwkv4-hf-odd", "q8f16_1", backend, None, 1e-3);
    check("llama3-gqa-tied", "q4i8", backend, None, 2e-2);
    check("llama3-gqa-tied", "bf16bf16", backend, None, 1.6e-2);
}

/// All bits are equal with batch invariance, by either back end.
#[test]
fn integer_activations_together_have_the_bits_of_single_ones() {
    for backend in backends() {
        check("rwkv7-hf", "q4i8", backend, None, 0.0);
        check("llama3-gqa-tied", "q4i8", backend, None, 0.0);
    }
}

/// Nor at any CPU level that this machine has.
#[test]
fn every_level_gives_the_bits_of_single_ones() {
    let Some(dir) = find("llama3-gqa-tied") else { return };
    let folder = tempfile::tempdir().unwrap();
    let mut options = options(&dir, "q4i8", backends().next().expect("a back end is built in"));
    let levels = host_levels();
    options.target = levels.join(",");
    options.batch_invariant = true;
    let (path, _) = artifact(&options, folder.path(), "case.so");
    for level in levels {
        compare(&format!("llama3-gqa-tied at {level}"), 2, 0.0, &dir, &load(&path, Some(&level), 2));
    }
}

#[test]
fn what_is_together_needs_no_optional_pass() {
    let backend = backends().last().expect("a back end is built in");
    for (i, pass) in PIPELINE.iter().filter(|p| p.optional).enumerate() {
        check("llama3-gqa-tied", "f32", backend, Some(pass.name), F32);
        if i % 3 == 0 {
            check("rwkv4-hf-odd", "f32", backend, Some(pass.name), F32);
        }
    }
}
