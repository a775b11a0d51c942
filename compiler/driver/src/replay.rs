//! Reference results (`golden.json`) replayed through anything that runs a model.
//!
//! Each prompt is computed in three ways: as one prefill, token by token, and for the logits of all
//! positions. The error is the largest difference of a logit, relative to the largest reference logit of the
//! prompt. Greedy tokens have to agree up to the first step whose margin a permitted error could turn.

use std::error::Error;

use mlcc_engine::LanguageModel;
use mlcc_engine::eval::WindowModel;
use mlcc_models::golden::{GoldenFile, GoldenPrompt};
use serde::Serialize;

use crate::distance::{max_abs, moments, relative_error, relative_moments};
use crate::format;
use crate::format_error::{self, FormatError};
use crate::kernel_check::{self, KernelCheck, SHARP};
use crate::stored::StoredGraph;

/// Permitted relative errors of formats whose weights are plain numbers, for references in f32 arithmetic on
/// the stored values, as the reference cases state them; `bf16bf16` about one and a half times the worst
/// error measured on those cases. The cost of packed formats is a property of the model, not of its kernels:
/// see [`crate::kernel_check`].
const TOLERANCES: [(&str, f64); 4] = [("f32", 1e-3), ("f16", 2e-2), ("bf16", 6e-2), ("bf16bf16", 3e-2)];

/// The permitted relative error of a scheme; `None` for packed weights, whose own error has no bound that
/// would tell a wrong kernel from a right one.
pub fn format_tolerance(scheme: &str) -> Option<f64> {
    TOLERANCES.iter().find(|(name, _)| *name == scheme).map(|(_, t)| *t)
}

/// The subject of the verdict of a replay.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum ReplaySubject {
    /// The results were compared with the reference.
    Model,
    /// The kernels were compared with the graph that the artifact has: a graph that is wrong itself is not
    /// seen.
    Kernels,
    /// There was no bar for either.
    Nothing,
}

impl ReplaySubject {
    /// The verdict by a bar for the distance from the reference, else by `kernels`, where some were checked.
    pub fn from_bar(bar: Option<f64>, kernels: Option<&KernelCheck>) -> ReplaySubject {
        match kernels {
            _ if bar.is_some() => ReplaySubject::Model,
            Some(kernels) if kernels.checked_positions() > 0 => ReplaySubject::Kernels,
            _ => ReplaySubject::Nothing,
        }
    }

    /// A line for people. `measured` is the error of the format, where that was the bar for the model.
    pub(crate) fn text(self, measured: Option<&FormatError>) -> String {
        match (self, measured) {
            (ReplaySubject::Model, None) => "judged: the model, against the reference".into(),
            (ReplaySubject::Model, Some(error)) => format!(
                "judged: the kernels, against the artifact's own graph, and the model, against the reference. Errors \
                 of the model below {:.1e} cannot be told from that of the format: verify a build with --quant f32 for \
                 those",
                error.permitted
            ),
            (ReplaySubject::Kernels, _) => {
                "judged: only the kernels, against the artifact's own graph. Whether that graph is the model is NOT \
                 judged: verify a build with --quant f32 for that"
                    .into()
            }
            (ReplaySubject::Nothing, _) => "judged: nothing".into(),
        }
    }
}

#[derive(Clone, Debug, Serialize)]
pub struct ReplayOutcome {
    pub ok: bool,
    pub judged: ReplaySubject,
    pub format: String,
    /// The bar of a plain format for the distance from the reference, or the user's.
    pub tolerance: Option<f64>,
    /// The bar of a packed format; where there is neither, the distance is reported, not judged.
    pub format_error: Option<FormatError>,
    /// Distance from the reference, the error of the format included.
    pub worst_relative_error: f64,
    pub greedy_equal: usize,
    pub greedy_expected: usize,
    pub prompts: Vec<PromptOutcome>,
    /// The kernels of packed formats against the graph.
    pub kernels: Option<KernelCheck>,
}

#[derive(Clone, Debug, Serialize)]
pub struct PromptOutcome {
    pub name: String,
    pub tokens: usize,
    /// Error after one prefill.
    pub prefill_error: f64,
    /// Error after the same tokens through decode; `None` for models that read prompts as a whole.
    pub decode_error: Option<f64>,
    /// Mean and deviation of the logits at every position, where the reference has them.
    pub positions_error: Option<f64>,
    pub greedy_equal: usize,
    /// Steps that have to agree; of packed formats, steps that [`SHARP`] could not turn.
    pub greedy_expected: usize,
    /// The first greedy token that is another one although no permitted error could turn it.
    pub wrong_token: Option<WrongToken>,
}

/// A greedy token that differs from that of the reference.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct WrongToken {
    /// Greedy tokens before it.
    pub step: usize,
    pub token: usize,
    pub expected: u32,
    /// The distance of the reference's two best logits, relative to the largest logit.
    pub margin: Option<f64>,
}

/// The bar for replayed results.
#[derive(Clone, Copy, Default)]
struct ReplayBar {
    tolerance: Option<f64>,
    format_error: Option<FormatError>,
}

impl PromptOutcome {
    fn max_error(&self) -> f64 {
        self.worst_logit().max(self.positions_error.unwrap_or(0.0))
    }

    fn worst_logit(&self) -> f64 {
        self.prefill_error.max(self.decode_error.unwrap_or(0.0))
    }

    /// Leaves the logits of formats with an error of their own to [`ReplayBar::permits`].
    fn is_right(&self, bar: &ReplayBar) -> bool {
        match (bar.tolerance, &bar.format_error) {
            (Some(tolerance), _) => {
                self.max_error() <= tolerance && self.greedy_equal == self.greedy_expected
            }
            (None, Some(error)) => {
                let at_positions = self.positions_error.unwrap_or(0.0);
                self.max_error().is_finite()
                    && at_positions <= error.moments_permitted
                    && self.wrong_token.is_none()
            }
            (None, None) => self.max_error().is_finite(),
        }
    }
}

impl ReplayBar {
    fn permits(&self, prompts: &[PromptOutcome]) -> bool {
        let (permitted, choices) = match (self.tolerance, &self.format_error) {
            (None, Some(error)) => (error.permitted, error.outside_permitted),
            _ => (f64::INFINITY, 0),
        };
        let outside = prompts.iter().filter(|prompt| prompt.worst_logit() > permitted).count();
        outside <= choices && prompts.iter().all(|prompt| prompt.is_right(self))
    }
}

pub type BoxedError = Box<dyn Error + Send + Sync>;

/// Replays all prompts. `format` is for the outcome. Without a `tolerance` every finite outcome is right.
pub fn replay_prompts<M>(
    model: &mut M,
    golden: &GoldenFile,
    format: &str,
    tolerance: Option<f64>,
) -> Result<ReplayOutcome, BoxedError>
where
    M: LanguageModel + WindowModel,
{
    replay_within(model, golden, format, ReplayBar { tolerance, format_error: None })
}

fn replay_within<M>(
    model: &mut M,
    golden: &GoldenFile,
    format: &str,
    bar: ReplayBar,
) -> Result<ReplayOutcome, BoxedError>
where
    M: LanguageModel + WindowModel,
{
    let mut prompts = Vec::new();
    for (number, prompt) in golden.prompts.iter().enumerate() {
        let name = prompt_name(prompt, number);
        prompts.push(replay_prompt(model, prompt, name, &bar)?);
    }
    let ReplayBar { tolerance, format_error } = bar;
    Ok(ReplayOutcome {
        ok: bar.permits(&prompts),
        judged: ReplaySubject::from_bar(tolerance.or(format_error.map(|error| error.permitted)), None),
        format: format.into(),
        tolerance,
        format_error,
        worst_relative_error: prompts.iter().map(PromptOutcome::max_error).fold(0.0, f64::max),
        greedy_equal: prompts.iter().map(|p| p.greedy_equal).sum(),
        greedy_expected: prompts.iter().map(|p| p.greedy_expected).sum(),
        prompts,
        kernels: None,
    })
}

/// [`replay_prompts`], and where the format has no tolerance of its own, the kernels against `graph`, and the
/// results against what moving the weights within their format makes of it. `tolerance` is the user's: the
/// bar of the kernels, and the least one of the model. A graph that cannot be interpreted is a reason, and
/// nothing is right without one, unless the user's tolerance judges the distance from the reference.
pub fn judge_model<M>(
    model: &mut M,
    golden: &GoldenFile,
    format: &str,
    own: Option<f64>,
    graph: impl FnOnce() -> Result<StoredGraph, String>,
    tolerance: Option<f64>,
) -> Result<ReplayOutcome, BoxedError>
where
    M: LanguageModel + WindowModel,
{
    if own.is_some() {
        return replay_prompts(model, golden, format, tolerance.or(own));
    }
    let (kernels, format_error) = match graph() {
        Ok(graph) => {
            let kernels = kernel_check::check_against_graph(model, &graph, golden, tolerance)?;
            let error = format_error::measure_format(&graph, golden, &kernels)?;
            (kernels, error.map(|error| error.at_least(tolerance)))
        }
        Err(why) => (KernelCheck::unchecked(why), None),
    };
    let unchecked = kernels.checked_positions() == 0;
    let bar = ReplayBar { tolerance: tolerance.filter(|_| unchecked), format_error };
    let mut outcome = replay_within(model, golden, format, bar)?;
    outcome.ok &= if unchecked { tolerance.is_some() } else { kernels.ok };
    let model_bar = bar.tolerance.or(format_error.map(|error| error.permitted));
    outcome.judged = ReplaySubject::from_bar(model_bar, Some(&kernels));
    outcome.kernels = Some(kernels);
    Ok(outcome)
}

fn replay_prompt<M>(
    model: &mut M,
    prompt: &GoldenPrompt,
    name: String,
    bar: &ReplayBar,
) -> Result<PromptOutcome, BoxedError>
where
    M: LanguageModel + WindowModel,
{
    let ids = prompt_ids(prompt, &name)?;
    let scale = max_abs(&prompt.logits_last);
    model.reset()?;
    let logits = model.prefill(&ids)?;
    let prefill_error = relative_error(logits, &prompt.logits_last, scale);
    let first = argmax(logits);
    let (greedy_equal, greedy_expected, wrong_token) = match bar.tolerance {
        Some(tolerance) => {
            let expected = prompt.binding_greedy(tolerance * scale);
            let (equal, wrong) = greedy_equal(model, first, prompt, expected)?;
            (equal, expected.len(), wrong)
        }
        None => {
            let permitted = bar.format_error.map(|error| error.permitted * scale);
            greedy_agreement(model, first, prompt, SHARP * scale, permitted)?
        }
    };
    let relative_margin = |token: WrongToken| WrongToken { margin: token.margin.map(|m| m / scale), ..token };
    let wrong_token = wrong_token.map(relative_margin);
    // Also where angles depend on the length of what comes in one call.
    let decode_error = match model.needs_whole_prompts() || model.prefill_chunk() == usize::MAX {
        true => None,
        false => Some(decode_error(model, &ids, &prompt.logits_last, scale)?),
    };
    let positions_error = positions_error(model, prompt, &ids, scale)?;
    let tokens = ids.len();
    Ok(PromptOutcome {
        name,
        tokens,
        prefill_error,
        decode_error,
        positions_error,
        greedy_equal,
        greedy_expected,
        wrong_token,
    })
}

pub fn prompt_name(prompt: &GoldenPrompt, number: usize) -> String {
    prompt.name.clone().unwrap_or_else(|| format!("#{number}"))
}

pub fn prompt_ids(prompt: &GoldenPrompt, name: &str) -> Result<Vec<i32>, BoxedError> {
    let ids = prompt.input_ids.iter().map(|&id| i32::try_from(id)).collect::<Result<Vec<i32>, _>>();
    Ok(ids.map_err(|_| format!("prompt {name}: ids beyond 2^31 are not token ids of any model"))?)
}

/// Steps of greedy decoding that agree before the first that does not, and that one.
fn greedy_equal<M: LanguageModel>(
    model: &mut M,
    first: usize,
    prompt: &GoldenPrompt,
    expected: &[u32],
) -> Result<(usize, Option<WrongToken>), BoxedError> {
    let mut token = first;
    for (step, &want) in expected.iter().enumerate() {
        if token != want as usize {
            return Ok((
                step,
                Some(WrongToken { step, token, expected: want, margin: top_two_margin(prompt, step) }),
            ));
        }
        if step + 1 < expected.len() {
            token = argmax(model.decode(token as i32)?);
        }
    }
    Ok((expected.len(), None))
}

/// The distance of the reference's two best logits of a greedy step.
fn top_two_margin(prompt: &GoldenPrompt, step: usize) -> Option<f64> {
    prompt.greedy_margin.as_ref()?.get(step).copied()
}

/// The number of decisive steps that agree, and of all of them: steps whose two best tokens of the reference
/// are at least twice the tolerance apart. The reference's tokens are the inputs, so that one other choice
/// does not change what follows. The first step that differs although logits that are off by `permitted`
/// could not turn it is wrong.
fn greedy_agreement<M: LanguageModel>(
    model: &mut M,
    first: usize,
    prompt: &GoldenPrompt,
    tolerance: f64,
    permitted: Option<f64>,
) -> Result<(usize, usize, Option<WrongToken>), BoxedError> {
    let (mut equal, mut decisive, mut token) = (0, 0, first);
    let mut wrong = None;
    for (step, &want) in prompt.greedy.iter().enumerate() {
        let margin = top_two_margin(prompt, step);
        if margin.is_none_or(|margin| margin >= 2.0 * tolerance) {
            decisive += 1;
            equal += usize::from(token == want as usize);
        }
        let binds = permitted.zip(margin).is_some_and(|(permitted, margin)| margin >= 2.0 * permitted);
        if binds && token != want as usize && wrong.is_none() {
            wrong = Some(WrongToken { step, token, expected: want, margin });
        }
        if step + 1 < prompt.greedy.len() {
            token = argmax(model.decode(want as i32)?);
        }
    }
    Ok((equal, decisive, wrong))
}

fn decode_error<M: LanguageModel>(
    model: &mut M,
    ids: &[i32],
    expected: &[f32],
    scale: f64,
) -> Result<f64, BoxedError> {
    model.reset()?;
    let mut error = 0.0;
    for (i, &id) in ids.iter().enumerate() {
        let logits = model.decode(id)?;
        if i + 1 == ids.len() {
            error = relative_error(logits, expected, scale);
        }
    }
    Ok(error)
}

fn argmax(logits: &[f32]) -> usize {
    let mut top = 0;
    for (id, logit) in logits.iter().enumerate() {
        if *logit > logits[top] {
            top = id;
        }
    }
    top
}

/// Mean and deviation of the logits at every position against those of the reference.
fn positions_error<M: WindowModel>(
    model: &mut M,
    prompt: &GoldenPrompt,
    ids: &[i32],
    scale: f64,
) -> Result<Option<f64>, BoxedError> {
    let Some(checks) = &prompt.logits_checksum_all_positions else { return Ok(None) };
    let vocab = prompt.logits_last.len();
    let all = model.window_logits(ids).map_err(Into::into)?;
    if all.len() != vocab * ids.len() {
        return Ok(Some(f64::INFINITY));
    }
    let expected = checks.mean.iter().copied().zip(checks.std.iter().copied());
    Ok(Some(relative_moments(all.chunks(vocab).map(moments).zip(expected), scale)))
}

impl ReplayOutcome {
    /// The text for people.
    pub fn text(&self, source: &str) -> String {
        let mut out = String::new();
        if let Some(kernels) = &self.kernels {
            out.push_str(&kernels.text());
            out.push('\n');
        }
        let head = ["prompt", "tokens", "prefill", "decode", "positions", "greedy"];
        let mut rows: Vec<Vec<String>> = vec![head.map(String::from).to_vec()];
        for p in &self.prompts {
            rows.push(vec![
                p.name.clone(),
                p.tokens.to_string(),
                format!("{:.2e}", p.prefill_error),
                p.decode_error.map_or("-".into(), |e| format!("{e:.2e}")),
                p.positions_error.map_or("-".into(), |e| format!("{e:.2e}")),
                format!("{}/{}", p.greedy_equal, p.greedy_expected),
            ]);
        }
        out.push_str(&format!("{}\n", format::format_table(&rows)));
        for prompt in &self.prompts {
            if let Some(WrongToken { step, token, expected, margin }) = &prompt.wrong_token {
                let by = margin.map_or(String::new(), |m| format!(" by {m:.1e} of the largest logit"));
                let name = &prompt.name;
                out.push_str(&format!(
                    "prompt {name}: greedy token {step} is {token}, that of the reference {expected}{by}\n"
                ));
            }
        }
        let (worst, verdict) = (self.worst_relative_error, self.verdict());
        out.push_str(&format!(
            "worst relative error {worst:.3e}, {verdict}\nreference: {source}\n{}\n",
            self.judged.text(self.format_error.as_ref())
        ));
        out
    }

    fn verdict(&self) -> String {
        let (equal, expected, format) = (self.greedy_equal, self.greedy_expected, &self.format);
        let bar = ReplayBar { tolerance: self.tolerance, format_error: self.format_error };
        let right = bar.permits(&self.prompts);
        match (self.tolerance, &self.format_error) {
            (Some(tolerance), _) => {
                let verdict = if right { "within the tolerance" } else { "NOT within the tolerance" };
                format!(
                    "tolerance of {format} {tolerance:.1e}; greedy {equal} of {expected} tokens: {verdict}"
                )
            }
            (None, Some(error)) => {
                let verdict = if right { "which this explains" } else { "which this does NOT explain" };
                format!(
                    "greedy {equal} of {expected} decisive tokens; error of {format}: {:.1e} by weights moved within its steps, permitted \
                     {:.1e} (mean and deviation at each position {:.1e}): {verdict}",
                    error.spread, error.permitted, error.moments_permitted
                )
            }
            (None, None) => format!(
                "which is the error of {format} itself, reported and not judged; greedy {equal} of {expected} decisive tokens"
            ),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use mlcc_passes::scheme::SCHEMES;

    #[test]
    fn every_plain_scheme_has_a_tolerance() {
        for scheme in SCHEMES {
            assert_eq!(format_tolerance(scheme.name).is_none(), scheme.linear.is_packed(), "{}", scheme.name);
        }
    }
}
