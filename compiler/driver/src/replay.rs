//! Reference results (`golden.json`) replayed through anything that runs a model.
//!
//! Each prompt is fed three ways: as one prefill, token by token, and for the logits of all positions. The error is the
//! largest difference of a logit, relative to the largest reference logit of the prompt. Greedy tokens have to agree up
//! to the first step whose margin a permitted error could turn.

use std::error::Error;

use mlcc_engine::LanguageModel;
use mlcc_engine::eval::WindowModel;
use mlcc_models::golden::{Golden, GoldenPrompt};
use serde::Serialize;

use crate::format;
use crate::kernel_check::{self, KernelCheck, SHARP};
use crate::stored::StoredGraph;

/// Permitted relative errors of formats whose weights are plain numbers, for references in f32 arithmetic on the stored
/// values, as the reference cases state them; `bf16bf16` about one and a half times the worst error measured on those cases.
/// What packed formats cost is a property of the model, not of its kernels: see [`crate::kernel_check`].
const TOLERANCES: [(&str, f64); 4] = [("f32", 1e-3), ("f16", 2e-2), ("bf16", 6e-2), ("bf16bf16", 3e-2)];

/// The permitted relative error of a scheme; `None` for packed weights, whose own error has no bound that would tell a wrong
/// kernel from a right one.
pub fn tolerance(scheme: &str) -> Option<f64> {
    TOLERANCES.iter().find(|(name, _)| *name == scheme).map(|(_, t)| *t)
}

/// What the verdict of a replay is about.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Judged {
    /// The results were held against the reference.
    Model,
    /// The kernels were held against the graph that the artifact has: a graph that is wrong itself is not seen.
    Kernels,
    /// There was no bar for either.
    Nothing,
}

impl Judged {
    /// The verdict by `kernels`, where some were checked, else by a tolerance for the distance from the reference.
    pub fn of(tolerance: Option<f64>, kernels: Option<&KernelCheck>) -> Judged {
        match kernels {
            Some(kernels) if kernels.checked() > 0 => Judged::Kernels,
            _ if tolerance.is_some() => Judged::Model,
            _ => Judged::Nothing,
        }
    }

    /// A line for people.
    pub(crate) fn text(self) -> &'static str {
        match self {
            Judged::Model => "judged: the model, against the reference",
            Judged::Kernels => {
                "judged: the kernels alone, against the artifact's own graph. Whether that graph is the model is NOT judged: verify a build \
                 with --quant f32 for that"
            }
            Judged::Nothing => "judged: nothing",
        }
    }
}

#[derive(Clone, Debug, Serialize)]
pub struct Outcome {
    pub ok: bool,
    pub judged: Judged,
    pub format: String,
    /// `None`: the distance from the reference is reported, not judged.
    pub tolerance: Option<f64>,
    /// Distance from the reference, the error of the format included.
    pub worst_relative_error: f64,
    pub greedy_equal: usize,
    pub greedy_expected: usize,
    pub prompts: Vec<PromptOutcome>,
    /// The kernels against the graph, which judges packed formats.
    pub kernels: Option<KernelCheck>,
}

#[derive(Clone, Debug, Serialize)]
pub struct PromptOutcome {
    pub name: String,
    pub tokens: usize,
    /// After one prefill.
    pub prefill_error: f64,
    /// After the same tokens through decode; `None` for models that read prompts as a whole.
    pub decode_error: Option<f64>,
    /// Mean and deviation of the logits at every position, where the reference has them.
    pub positions_error: Option<f64>,
    pub greedy_equal: usize,
    /// Steps that have to agree; where the distance is not judged, steps that [`SHARP`] could not turn.
    pub greedy_expected: usize,
}

impl PromptOutcome {
    fn worst(&self) -> f64 {
        self.prefill_error.max(self.decode_error.unwrap_or(0.0)).max(self.positions_error.unwrap_or(0.0))
    }
}

pub type Failure = Box<dyn Error + Send + Sync>;

/// Replays all prompts. `format` is for the outcome. Without a `tolerance` every finite outcome is right.
pub fn replay<M>(
    model: &mut M,
    golden: &Golden,
    format: &str,
    tolerance: Option<f64>,
) -> Result<Outcome, Failure>
where
    M: LanguageModel + WindowModel,
{
    let mut prompts = Vec::new();
    for (number, prompt) in golden.prompts.iter().enumerate() {
        let name = prompt_name(prompt, number);
        prompts.push(replay_prompt(model, prompt, name, tolerance)?);
    }
    let worst = prompts.iter().map(PromptOutcome::worst).fold(0.0, f64::max);
    let greedy_equal = prompts.iter().map(|p| p.greedy_equal).sum();
    let greedy_expected = prompts.iter().map(|p| p.greedy_expected).sum();
    Ok(Outcome {
        ok: match tolerance {
            Some(tolerance) => worst <= tolerance && greedy_equal == greedy_expected,
            None => worst.is_finite(),
        },
        judged: Judged::of(tolerance, None),
        format: format.into(),
        tolerance,
        worst_relative_error: worst,
        greedy_equal,
        greedy_expected,
        prompts,
        kernels: None,
    })
}

/// [`replay`], and where the format has no tolerance of its own, the kernels against `graph`, which are judged instead.
/// `tolerance` is the user's. A graph that cannot be interpreted is a reason, and nothing is right without one, unless the
/// user's tolerance judges the distance from the reference.
pub fn judge<M>(
    model: &mut M,
    golden: &Golden,
    format: &str,
    own: Option<f64>,
    graph: impl FnOnce() -> Result<StoredGraph, String>,
    tolerance: Option<f64>,
) -> Result<Outcome, Failure>
where
    M: LanguageModel + WindowModel,
{
    if own.is_some() {
        return replay(model, golden, format, tolerance.or(own));
    }
    let kernels = match graph() {
        Ok(graph) => kernel_check::check(model, &graph, golden, tolerance)?,
        Err(why) => KernelCheck::none(why),
    };
    let unchecked = kernels.checked() == 0;
    let mut outcome = replay(model, golden, format, tolerance.filter(|_| unchecked))?;
    outcome.ok &= if unchecked { tolerance.is_some() } else { kernels.ok };
    outcome.judged = Judged::of(outcome.tolerance, Some(&kernels));
    outcome.kernels = Some(kernels);
    Ok(outcome)
}

fn replay_prompt<M>(
    model: &mut M,
    prompt: &GoldenPrompt,
    name: String,
    tolerance: Option<f64>,
) -> Result<PromptOutcome, Failure>
where
    M: LanguageModel + WindowModel,
{
    let ids = prompt_ids(prompt, &name)?;
    let scale = prompt.logits_last.iter().fold(0f64, |m, x| m.max(f64::from(x.abs())));
    model.reset()?;
    let logits = model.prefill(&ids)?;
    let prefill_error = relative_error(logits, &prompt.logits_last, scale);
    let first = argmax(logits);
    let (greedy_equal, greedy_expected) = match tolerance {
        Some(tolerance) => {
            let expected = prompt.binding_greedy(tolerance * scale);
            (greedy_equal(model, first, expected)?, expected.len())
        }
        None => greedy_agreement(model, first, prompt, SHARP * scale)?,
    };
    // Also where angles depend on the length of what comes in one call.
    let decode_error = match model.needs_whole_prompts() || model.chunk() == usize::MAX {
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
    })
}

pub fn prompt_name(prompt: &GoldenPrompt, number: usize) -> String {
    prompt.name.clone().unwrap_or_else(|| format!("#{number}"))
}

pub fn prompt_ids(prompt: &GoldenPrompt, name: &str) -> Result<Vec<i32>, Failure> {
    let ids = prompt.input_ids.iter().map(|&id| i32::try_from(id)).collect::<Result<Vec<i32>, _>>();
    Ok(ids.map_err(|_| format!("prompt {name}: ids beyond 2^31 are no token ids of any model"))?)
}

/// NaN counts as infinitely wrong.
pub fn relative_error(found: &[f32], expected: &[f32], scale: f64) -> f64 {
    if found.len() != expected.len() {
        return f64::INFINITY;
    }
    let distance = found.iter().zip(expected).map(|(a, b)| (f64::from(*a) - f64::from(*b)).abs());
    let worst = distance.fold(0.0, |m: f64, d| if d.is_nan() { f64::INFINITY } else { m.max(d) });
    if scale > 0.0 { worst / scale } else { worst }
}

/// Steps of greedy decoding that agree before the first that does not.
fn greedy_equal<M: LanguageModel>(model: &mut M, first: usize, expected: &[u32]) -> Result<usize, Failure> {
    let mut token = first;
    for (step, &want) in expected.iter().enumerate() {
        if token != want as usize {
            return Ok(step);
        }
        if step + 1 < expected.len() {
            token = argmax(model.decode(token as i32)?);
        }
    }
    Ok(expected.len())
}

/// How many of the decisive steps agree, and how many there are: the reference's two best tokens are at least twice the
/// tolerance apart. The reference's tokens are fed, so that one other choice does not change what follows.
fn greedy_agreement<M: LanguageModel>(
    model: &mut M,
    first: usize,
    prompt: &GoldenPrompt,
    tolerance: f64,
) -> Result<(usize, usize), Failure> {
    let margins = prompt.greedy_margin.as_deref().unwrap_or(&[]);
    let (mut equal, mut decisive, mut token) = (0, 0, first);
    for (step, &want) in prompt.greedy.iter().enumerate() {
        if margins.get(step).is_none_or(|&margin| margin >= 2.0 * tolerance) {
            decisive += 1;
            equal += usize::from(token == want as usize);
        }
        if step + 1 < prompt.greedy.len() {
            token = argmax(model.decode(want as i32)?);
        }
    }
    Ok((equal, decisive))
}

fn decode_error<M: LanguageModel>(
    model: &mut M,
    ids: &[i32],
    expected: &[f32],
    scale: f64,
) -> Result<f64, Failure> {
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
) -> Result<Option<f64>, Failure> {
    let Some(checks) = &prompt.logits_checksum_all_positions else { return Ok(None) };
    let vocab = prompt.logits_last.len();
    let all = model.window_logits(ids).map_err(Into::into)?;
    if all.len() != vocab * ids.len() {
        return Ok(Some(f64::INFINITY));
    }
    let mut worst = 0f64;
    for (row, (mean, std)) in all.chunks(vocab).zip(checks.mean.iter().zip(&checks.std)) {
        let n = row.len() as f64;
        let m = row.iter().map(|&x| f64::from(x)).sum::<f64>() / n;
        let v = row.iter().map(|&x| (f64::from(x) - m).powi(2)).sum::<f64>() / n;
        let off = (m - mean).abs().max((v.sqrt() - std).abs());
        worst = if off.is_nan() { f64::INFINITY } else { worst.max(off) };
    }
    Ok(Some(if scale > 0.0 { worst / scale } else { worst }))
}

impl Outcome {
    /// For people.
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
        let (worst, equal, expected) = (self.worst_relative_error, self.greedy_equal, self.greedy_expected);
        let format = &self.format;
        let verdict = match (self.tolerance, self.ok) {
            (Some(tolerance), ok) => {
                let verdict = if ok { "within the tolerance" } else { "NOT within the tolerance" };
                format!(
                    "tolerance of {format} {tolerance:.1e}; greedy {equal} of {expected} tokens: {verdict}"
                )
            }
            (None, _) => format!(
                "which is the error of {format} itself, reported and not judged; greedy {equal} of {expected} decisive tokens"
            ),
        };
        out.push_str(&format!(
            "{}\nworst relative error {worst:.3e}, {verdict}\nreference: {source}\n{}\n",
            format::table(&rows),
            self.judged.text()
        ));
        out
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use mlcc_passes::scheme::SCHEMES;

    #[test]
    fn errors_are_relative_and_nan_is_wrong() {
        assert_eq!(relative_error(&[1.0, 2.5], &[1.0, 2.0], 2.0), 0.25);
        assert_eq!(relative_error(&[f32::NAN, 2.0], &[1.0, 2.0], 2.0), f64::INFINITY);
        assert_eq!(relative_error(&[1.0], &[1.0, 2.0], 2.0), f64::INFINITY);
        assert_eq!(argmax(&[1.0, 3.0, 3.0]), 1);
    }

    #[test]
    fn every_plain_scheme_has_a_tolerance() {
        for scheme in SCHEMES {
            assert_eq!(tolerance(scheme.name).is_none(), scheme.linear.is_packed(), "{}", scheme.name);
        }
    }
}
