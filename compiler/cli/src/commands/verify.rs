//! `mlcc verify`: reference results through a compiled model.
//!
//! Each prompt is fed three ways: as one prefill, token by token through decode, and for the logits of all positions.
//! The error is the largest difference of a logit, relative to the largest reference logit of the prompt. Greedy tokens
//! have to agree up to the first step whose margin a permitted error could turn.

use std::path::PathBuf;

use mlcc_models::golden::{Golden, GoldenPrompt};
use mlcc_runtime::Session;
use serde::Serialize;
use serde_json::Value;

use crate::commands::{print, print_json};
use crate::error::CliError;
use crate::ui::{self, Ui};

#[derive(Debug, clap::Args)]
pub struct Args {
    /// A compiled model
    artifact: PathBuf,
    /// Reference results
    #[arg(long)]
    golden: PathBuf,
    /// Largest permitted error, in place of the one of the weight format
    #[arg(long)]
    tolerance: Option<f64>,
    /// Worker threads [default: physical cores]
    #[arg(short, long, env = "MLCC_THREADS", value_parser = clap::value_parser!(u16).range(1..=1024))]
    threads: Option<u16>,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

/// Permitted errors by weight format, for reference results in f32 from the unquantized weights.
const TOLERANCES: &[(&str, f64)] = &[("f32", 1e-3), ("f16", 2e-2), ("bf16", 6e-2)];

#[derive(Debug, Serialize)]
struct Outcome {
    ok: bool,
    format: String,
    tolerance: f64,
    worst_relative_error: f64,
    greedy_equal: usize,
    greedy_expected: usize,
    prompts: Vec<PromptOutcome>,
}

#[derive(Debug, Serialize)]
struct PromptOutcome {
    name: String,
    tokens: usize,
    /// After one prefill.
    prefill_error: f64,
    /// After the same tokens through decode.
    decode_error: f64,
    /// Mean and deviation of the logits at every position, where the reference has them.
    positions_error: Option<f64>,
    greedy_equal: usize,
    /// Steps that have to agree.
    greedy_expected: usize,
}

pub fn run(args: &Args, ui: &Ui) -> Result<(), CliError> {
    let golden = Golden::read(&args.golden)?;
    let model = super::load(&args.artifact, args.threads.map(usize::from), true)?;
    let vocab = golden.prompts[0].logits_last.len();
    if vocab != model.vocab() {
        return Err(CliError::Failed(format!(
            "{} has logits for {vocab} tokens, {} is a model of {}: they do not belong together",
            args.golden.display(),
            args.artifact.display(),
            model.vocab()
        )));
    }
    let metadata: Value = serde_json::from_str(model.metadata()).unwrap_or(Value::Null);
    let format =
        metadata.pointer("/quantization/scheme").and_then(Value::as_str).unwrap_or("f32").to_string();
    let tolerance = args.tolerance.unwrap_or_else(|| tolerance(&format));
    ui.detail(format_args!(
        "{} on {} with {} threads",
        args.artifact.display(),
        model.executor(),
        model.threads()
    ));
    let mut session = model.session()?;
    let mut prompts = Vec::new();
    for (number, prompt) in golden.prompts.iter().enumerate() {
        let name = prompt.name.clone().unwrap_or_else(|| format!("#{number}"));
        prompts.push(replay(&mut session, prompt, name, tolerance)?);
    }
    let outcome = Outcome::new(format, tolerance, prompts);
    if args.json {
        print_json(&outcome)?;
    } else {
        print(&text(&outcome, &golden))?;
    }
    if outcome.ok { Ok(()) } else { Err(CliError::Reported) }
}

fn tolerance(format: &str) -> f64 {
    TOLERANCES.iter().find(|(name, _)| *name == format).map_or(1e-3, |(_, t)| *t)
}

impl Outcome {
    fn new(format: String, tolerance: f64, prompts: Vec<PromptOutcome>) -> Self {
        let worst = prompts.iter().map(PromptOutcome::worst).fold(0.0, f64::max);
        let greedy_equal = prompts.iter().map(|p| p.greedy_equal).sum();
        let greedy_expected = prompts.iter().map(|p| p.greedy_expected).sum();
        let ok = worst <= tolerance && greedy_equal == greedy_expected;
        Outcome { ok, format, tolerance, worst_relative_error: worst, greedy_equal, greedy_expected, prompts }
    }
}

impl PromptOutcome {
    fn worst(&self) -> f64 {
        self.prefill_error.max(self.decode_error).max(self.positions_error.unwrap_or(0.0))
    }
}

fn replay(
    session: &mut Session,
    prompt: &GoldenPrompt,
    name: String,
    tolerance: f64,
) -> Result<PromptOutcome, CliError> {
    let ids = prompt_ids(prompt, &name)?;
    let scale = prompt.logits_last.iter().fold(0f64, |m, x| m.max(f64::from(x.abs())));
    session.reset()?;
    let prefill_error = relative_error(session.prefill(&ids)?, &prompt.logits_last, scale);
    let expected = prompt.binding_greedy(tolerance * scale);
    let greedy_equal = greedy_equal(session, expected)?;
    session.reset()?;
    for &id in &ids {
        session.decode(id)?;
    }
    let decode_error = relative_error(session.logits(), &prompt.logits_last, scale);
    let positions_error = positions_error(session, prompt, &ids, scale)?;
    Ok(PromptOutcome {
        name,
        tokens: ids.len(),
        prefill_error,
        decode_error,
        positions_error,
        greedy_equal,
        greedy_expected: expected.len(),
    })
}

fn prompt_ids(prompt: &GoldenPrompt, name: &str) -> Result<Vec<i32>, CliError> {
    let ids: Result<Vec<i32>, _> = prompt.input_ids.iter().map(|&id| i32::try_from(id)).collect();
    ids.map_err(|_| {
        CliError::Failed(format!("prompt {name}: token ids beyond 2^31 are no token ids of any model"))
    })
}

/// NaN counts as infinitely wrong.
fn relative_error(found: &[f32], expected: &[f32], scale: f64) -> f64 {
    let distance = |(a, b): (&f32, &f32)| (f64::from(*a) - f64::from(*b)).abs();
    let worst = found
        .iter()
        .zip(expected)
        .map(distance)
        .fold(0.0, |m: f64, d| if d.is_nan() { f64::INFINITY } else { m.max(d) });
    if scale > 0.0 { worst / scale } else { worst }
}

/// Steps of greedy decoding that agree before the first that does not.
fn greedy_equal(session: &mut Session, expected: &[u32]) -> Result<usize, CliError> {
    for (step, &want) in expected.iter().enumerate() {
        let token = argmax(session.logits());
        if token != want as usize {
            return Ok(step);
        }
        session.decode(token as i32)?;
    }
    Ok(expected.len())
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
fn positions_error(
    session: &mut Session,
    prompt: &GoldenPrompt,
    ids: &[i32],
    scale: f64,
) -> Result<Option<f64>, CliError> {
    let Some(checks) = &prompt.logits_checksum_all_positions else { return Ok(None) };
    let vocab = prompt.logits_last.len();
    session.reset()?;
    let all = session.prefill_logits(ids)?;
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

fn text(outcome: &Outcome, golden: &Golden) -> String {
    let head = ["prompt", "tokens", "prefill", "decode", "positions", "greedy"];
    let mut rows: Vec<Vec<String>> = vec![head.map(String::from).to_vec()];
    for p in &outcome.prompts {
        rows.push(vec![
            p.name.clone(),
            p.tokens.to_string(),
            format!("{:.2e}", p.prefill_error),
            format!("{:.2e}", p.decode_error),
            p.positions_error.map_or("-".into(), |e| format!("{e:.2e}")),
            format!("{}/{}", p.greedy_equal, p.greedy_expected),
        ]);
    }
    let verdict = if outcome.ok { "within" } else { "NOT within" };
    format!(
        "{}\nworst relative error {:.3e}, tolerance of {} {:.0e}; greedy {} of {} tokens: {verdict} the tolerance\nreference: {}\n",
        ui::table(&rows),
        outcome.worst_relative_error,
        outcome.format,
        outcome.tolerance,
        outcome.greedy_equal,
        outcome.greedy_expected,
        golden.source
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn errors_are_relative_and_nan_is_wrong() {
        assert_eq!(relative_error(&[1.0, 2.5], &[1.0, 2.0], 2.0), 0.25);
        assert_eq!(relative_error(&[f32::NAN, 2.0], &[1.0, 2.0], 2.0), f64::INFINITY);
        assert_eq!(argmax(&[1.0, 3.0, 3.0]), 1);
    }
}
