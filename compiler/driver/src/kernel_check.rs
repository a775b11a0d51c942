//! The kernels of an artifact against its graph: logits at all positions of a golden's prompts, as one
//! prefill, token by token and for all positions, compared with the graph that is interpreted on the weights
//! that the artifact stores.
//!
//! The error does not include the cost of quantization, so one bar holds for all formats. Where activations
//! or caches are rounded to few bits, a sum beside a rounding edge may fall on its other side in the kernels,
//! and everything after it moves. The distance is a property of the model: it is measured by interpreting the
//! graph with its weights moved a little. Where such a code chooses other experts, single positions move far,
//! so the root of the mean square over all logits has a bar of its own: an error at most positions is not
//! covered by the one that is permitted at a single position.

use mlcc_engine::LanguageModel;
use mlcc_engine::eval::WindowModel;
use mlcc_models::golden::{GoldenFile, GoldenPrompt};
use serde::Serialize;

use crate::distance::{relative_error, rms_error};
use crate::format;
use crate::replay::{BoxedError, prompt_ids, prompt_name};
use crate::stored::{PerturbedWeights, StoredGraph};

/// Largest error of kernels, relative to the largest logit of the prompt.
pub const SHARP: f64 = 1e-3;

/// The permitted movement of the logits by kernels, as a multiple of that by moved weights.
pub(crate) const SPREADS: f64 = 2.0;

/// Ways in which the weights are moved.
pub(crate) const SEEDS: [u64; 3] = [1, 2, 3];

#[derive(Clone, Debug, Serialize)]
pub struct KernelCheck {
    /// Nothing checked is outside of what is permitted, and something was checked.
    pub ok: bool,
    pub worst_relative_error: f64,
    pub tolerance: f64,
    pub prompts: Vec<PromptCheck>,
    /// The reason why some positions, or all, were not checked.
    pub not_checked: Option<String>,
}

#[derive(Clone, Debug, Default, Serialize)]
pub struct PromptCheck {
    pub name: String,
    pub tokens: usize,
    /// Positions that were interpreted: the first ones.
    pub checked: usize,
    pub error: f64,
    pub permitted: f64,
    /// Root of the mean square of the errors at all positions, relative to the same largest logit.
    pub rms_error: f64,
    pub rms_permitted: f64,
    /// The distance by which the graph's logits move with its weights; only where the error is larger than
    /// [`SHARP`].
    pub spread: Option<f64>,
}

impl PromptCheck {
    fn is_right(&self) -> bool {
        self.error <= self.permitted && self.rms_error <= self.rms_permitted
    }
}

impl KernelCheck {
    /// Nothing was checked, for this reason.
    pub fn unchecked(why: String) -> KernelCheck {
        KernelCheck {
            ok: false,
            worst_relative_error: 0.0,
            tolerance: SHARP,
            prompts: Vec::new(),
            not_checked: Some(why),
        }
    }

    /// The text for people.
    pub fn text(&self) -> String {
        let mut rows =
            vec![["prompt", "tokens", "checked", "kernels", "permitted"].map(String::from).to_vec()];
        for p in &self.prompts {
            let number = |x: f64| if p.checked > 0 { format!("{x:.2e}") } else { "-".into() };
            let (error, permitted) = (number(p.error), number(p.permitted));
            rows.push(vec![p.name.clone(), p.tokens.to_string(), p.checked.to_string(), error, permitted]);
        }
        let mut out = String::new();
        if self.checked_positions() > 0 {
            let verdict = if self.ok { "right" } else { "WRONG" };
            let worst = self.worst_relative_error;
            out.push_str(&format!(
                "{}\nkernels against the graph on the stored weights: worst relative error {worst:.3e}: {verdict}\n",
                format::format_table(&rows)
            ));
        }
        if let Some(why) = &self.not_checked {
            out.push_str(&format!("kernels NOT CHECKED: {why}\n"));
        }
        out
    }

    /// Positions that were interpreted.
    pub fn checked_positions(&self) -> usize {
        self.prompts.iter().map(|p| p.checked).sum()
    }
}

/// Holds a model against its graph. `tolerance` in place of the bar.
pub fn check_against_graph<M>(
    model: &mut M,
    graph: &StoredGraph,
    golden: &GoldenFile,
    tolerance: Option<f64>,
) -> Result<KernelCheck, BoxedError>
where
    M: LanguageModel + WindowModel,
{
    let mut left = graph.positions;
    let mut prompts = Vec::new();
    for (number, prompt) in golden.prompts.iter().enumerate() {
        let name = prompt_name(prompt, number);
        let ids = kernel_prompt(prompt, &name)?;
        let most = left.min(model.context().unwrap_or(usize::MAX));
        let checked = match prompt.encoder_input_len() {
            0 => ids.len().min(most),
            _ if ids.len() > most => 0,
            _ => ids.len(),
        };
        left -= checked;
        let mut row = PromptCheck { name, tokens: ids.len(), checked, ..PromptCheck::default() };
        if checked > 0 {
            check_prompt(model, graph, (&ids[..checked], prompt), tolerance, &mut row)?;
        }
        prompts.push(row);
    }
    let (tokens, checked) = prompts.iter().fold((0, 0), |(t, c), p| (t + p.tokens, c + p.checked));
    let not_checked = (checked < tokens).then(|| {
        format!(
            "{} of {tokens} positions: interpreting more of a model of this size would take too long",
            tokens - checked
        )
    });
    Ok(KernelCheck {
        ok: checked > 0 && prompts.iter().all(PromptCheck::is_right),
        worst_relative_error: prompts.iter().map(|p| p.error).fold(0.0, f64::max),
        tolerance: tolerance.unwrap_or(SHARP),
        prompts,
        not_checked,
    })
}

/// The tokens on which kernels are compared with the graph: for an encoder-decoder model with those that the
/// reference has written, as the decoder would see one token alone.
pub(crate) fn kernel_prompt(prompt: &GoldenPrompt, name: &str) -> Result<Vec<i32>, BoxedError> {
    let mut ids = prompt_ids(prompt, name)?;
    if prompt.encoder_input_len() > 0 {
        ids.extend(prompt.greedy.iter().map(|&id| id as i32));
    }
    Ok(ids)
}

fn check_prompt<M>(
    model: &mut M,
    graph: &StoredGraph,
    (ids, prompt): (&[i32], &GoldenPrompt),
    tolerance: Option<f64>,
    row: &mut PromptCheck,
) -> Result<(), BoxedError>
where
    M: LanguageModel + WindowModel,
{
    let (source, tokens) = ids.split_at(prompt.encoder_input_len());
    let expected = graph.logits_after(source, tokens, PerturbedWeights::Unmoved)?;
    let vocab = expected.len() / tokens.len();
    let scale = expected.iter().fold(0f64, |m, x| m.max(f64::from(x.abs())));
    model.reset()?;
    let last = &expected[expected.len() - vocab..];
    row.error = relative_error(model.prefill(ids)?, last, scale);
    if !model.needs_whole_prompts() && model.prefill_chunk() != usize::MAX {
        model.reset()?;
        let mut decoded = Vec::with_capacity(expected.len());
        for &id in ids {
            decoded.extend_from_slice(model.decode(id)?);
        }
        compare(row, &decoded, &expected, scale);
    }
    let all = model.window_logits(ids).map_err(Into::into)?;
    compare(row, all, &expected, scale);
    row.permitted = tolerance.unwrap_or(SHARP);
    row.rms_permitted = row.permitted;
    if tolerance.is_none() && row.error > SHARP {
        let mut moved = PromptCheck::default();
        for seed in SEEDS {
            let logits = graph.logits_after(source, tokens, PerturbedWeights::Slightly(seed))?;
            compare(&mut moved, &logits, &expected, scale);
        }
        row.spread = Some(moved.error);
        row.permitted = SHARP.max(SPREADS * moved.error);
        row.rms_permitted = SHARP.max(SPREADS * moved.rms_error);
    }
    Ok(())
}

/// Adds the distance of logits at all positions to the errors of a prompt.
fn compare(row: &mut PromptCheck, found: &[f32], expected: &[f32], scale: f64) {
    row.error = row.error.max(relative_error(found, expected, scale));
    row.rms_error = row.rms_error.max(rms_error(found, expected, scale));
}
