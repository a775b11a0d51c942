//! The distance that a format may take a model from its reference: measured on the model at hand, without the
//! weights that it was made from.
//!
//! Each weight was within half a step of the format of its stored value. So the graph is interpreted with its
//! weights moved within these steps: the logits move as far as rounding the weights has moved them, and
//! activations and caches that are rounded to codes are rounded anew. A graph that is further from the
//! reference is that of another model.

use mlcc_models::golden::{GoldenFile, GoldenPrompt};
use serde::Serialize;

use crate::distance::{max_abs, moments_error, relative_error};
use crate::kernel_check::{KernelCheck, SEEDS, kernel_prompt};
use crate::replay::{BoxedError, prompt_name};
use crate::stored::{PerturbedWeights, StoredGraph};

/// A format may move the logits this many times as far as moved weights do. On the reference cases formats of
/// 4 and 8 bits move them mostly 0.5 to 1.2 times as far and at most 1.9 times, but for a prompt with another
/// choice of experts; mean and deviation 2.4 times.
const SPREADS: f64 = 3.0;

/// One of this many prompts may be further off where a model chooses experts: another choice after a prompt
/// moves its logits far, and the three ways in which weights are moved need not make it.
const PROMPTS_FOR_A_CHOICE: usize = 3;

/// Least permitted error: that of f16, below which no packed format is asked to stay.
const LEAST: f64 = 2e-2;

/// Least permitted error of mean and deviation, in which the errors of single logits cancel.
const LEAST_MOMENTS: f64 = 2e-3;

/// A bar for the distance of a quantized model from its reference.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct FormatError {
    /// The distance by which moved weights move the logits after a prompt, relative to the largest.
    pub spread: f64,
    /// Permitted distance of these logits.
    pub permitted: f64,
    /// The number of prompts that may be further off than that.
    pub outside_permitted: usize,
    /// The distance by which moved weights move the mean and the deviation of the logits at a position.
    pub moments_spread: f64,
    /// Permitted distance of these.
    pub moments_permitted: f64,
}

impl FormatError {
    fn from_spread(spread: f64, moments_spread: f64) -> FormatError {
        FormatError {
            spread,
            permitted: LEAST.max(SPREADS * spread),
            outside_permitted: 0,
            moments_spread,
            moments_permitted: LEAST_MOMENTS.max(SPREADS * moments_spread),
        }
    }

    /// The bar where the user permits more than it.
    pub(crate) fn at_least(self, asked: Option<f64>) -> FormatError {
        let asked = asked.unwrap_or(0.0);
        FormatError {
            permitted: self.permitted.max(asked),
            moments_permitted: self.moments_permitted.max(asked),
            ..self
        }
    }

    /// The error for vectors of texts.
    pub(crate) fn of_vectors(spread: f64) -> FormatError {
        FormatError::from_spread(spread, 0.0)
    }
}

/// Measures a format on the prompts of a golden; `None` where they were not all interpreted as a whole to
/// check the kernels, since the error of short prompts is none for longer ones, and where no weights are
/// packed, as their steps do not tell of caches.
pub fn measure_format(
    graph: &StoredGraph,
    golden: &GoldenFile,
    kernels: &KernelCheck,
) -> Result<Option<FormatError>, BoxedError> {
    let mut worst: Option<(f64, f64)> = None;
    if kernels.not_checked.is_some() || !graph.is_packed() {
        return Ok(None);
    }
    for (number, prompt) in golden.prompts.iter().enumerate() {
        let name = prompt_name(prompt, number);
        let (logits, moments) = logits_spread(graph, prompt, &name)?;
        let (l, m) = worst.unwrap_or_default();
        worst = Some((logits.max(l), moments.max(m)));
    }
    let choices = if graph.chooses_experts() { golden.prompts.len() / PROMPTS_FOR_A_CHOICE } else { 0 };
    let error = |(spread, moments)| FormatError {
        outside_permitted: choices,
        ..FormatError::from_spread(spread, moments)
    };
    Ok(worst.map(error))
}

/// The distance by which logits after a prompt move, and mean and deviation at its positions.
fn logits_spread(graph: &StoredGraph, prompt: &GoldenPrompt, name: &str) -> Result<(f64, f64), BoxedError> {
    let ids = kernel_prompt(prompt, name)?;
    let (source, tokens) = ids.split_at(prompt.encoder_input_len());
    let (vocab, scale) = (prompt.logits_last.len(), max_abs(&prompt.logits_last));
    // Behind the prompt of an encoder-decoder model lie tokens that the reference has written.
    let rows = prompt.input_ids.len() - source.len();
    let logits = |moved| -> Result<Vec<f32>, BoxedError> {
        let mut all = graph.logits_after(source, tokens, moved)?;
        all.truncate(rows * vocab);
        Ok(all)
    };
    let expected = logits(PerturbedWeights::Unmoved)?;
    let last = expected.len().saturating_sub(vocab);
    let (mut after, mut at_positions) = (0f64, 0f64);
    for seed in SEEDS {
        let moved = logits(PerturbedWeights::WithinSteps(seed))?;
        after = after.max(relative_error(&moved[last..], &expected[last..], scale));
        at_positions = at_positions.max(moments_error(&moved, &expected, vocab, scale));
    }
    Ok((after, at_positions))
}
