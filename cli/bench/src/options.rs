//! The choice of tests, without flags.

use crate::test::{MixedStep, TextCounts};

/// Tests and the number of their runs. The room of a model chooses values that are left out.
#[derive(Clone, Debug)]
pub struct BenchOptions {
    /// Lengths of prompts; 0 is none.
    pub n_prompt: Option<Vec<usize>>,
    /// Numbers of tokens to generate; 0 is none.
    pub n_gen: Option<Vec<usize>>,
    /// Positions before the generated tokens.
    pub depth: Vec<usize>,
    /// Numbers of sequences that are decoded together.
    pub batch: Vec<u16>,
    pub mixed: Vec<MixedStep>,
    /// Texts for models that make vectors.
    pub texts: Vec<TextCounts>,
    /// Runs of each test.
    pub repetitions: u32,
    /// Seconds for which all threads are busy before the first test.
    pub warm_up: f64,
    /// Numbers of busy programs beside the tests.
    pub busy: Vec<u16>,
    /// Predictions have a row for each kernel.
    pub kernels: bool,
}
