//! Reference vectors of texts (a golden.json of an encoder) through a compiled model: all texts together and
//! each alone.
//!
//! Errors are relative to the largest reference number. Formats of plain numbers are compared with the
//! reference; the kernels of packed ones are compared with the graph on the stored weights, as those of
//! models that generate text are ([`crate::kernel_check`]).

use mlcc_models::golden::{PoolingGoldenCase, PoolingGoldenFile};
use mlcc_runtime::TextEmbedder;
use serde::Serialize;

use crate::distance::{max_abs, relative_error, rms_error};
use crate::format;
use crate::format_error::FormatError;
use crate::kernel_check::{KernelCheck, PromptCheck, SEEDS, SHARP, SPREADS};
use crate::replay::{BoxedError, ReplaySubject};
use crate::stored::{PerturbedWeights, StoredGraph};

#[derive(Clone, Debug, Serialize)]
pub struct EmbeddingOutcome {
    pub ok: bool,
    pub judged: ReplaySubject,
    pub format: String,
    /// The bar of a plain format for the distance from the reference, or the user's.
    pub tolerance: Option<f64>,
    /// The bar of a packed format; where there is neither, the distance is reported, not judged.
    pub format_error: Option<FormatError>,
    /// Distance from the reference, the error of the format included.
    pub worst_relative_error: f64,
    /// True if each text gets the same bits alone as together with the others.
    pub same_alone: bool,
    pub texts: Vec<EmbeddingDeviation>,
    /// The kernels against the graph, which judges packed formats.
    pub kernels: Option<KernelCheck>,
}

#[derive(Clone, Debug, Serialize)]
pub struct EmbeddingDeviation {
    pub name: String,
    pub tokens: usize,
    pub error: f64,
}

/// The bars by which an artifact is judged.
pub struct ErrorBar<'a> {
    /// The format of the weights, for the outcome.
    pub format: &'a str,
    /// The permitted error of the format; `None` for packed weights.
    pub own: Option<f64>,
    /// The user's bar in place of that.
    pub asked: Option<f64>,
}

/// Replays all texts of a golden that belongs to the model ([`ids_of`] has been asked).
pub fn judge_embeddings(
    texts: &mut TextEmbedder,
    golden: &PoolingGoldenFile,
    ids: &[Vec<i32>],
    bar: &ErrorBar<'_>,
    graph: impl FnOnce() -> Result<StoredGraph, String>,
) -> Result<EmbeddingOutcome, BoxedError> {
    let all: Vec<&[i32]> = ids.iter().map(Vec::as_slice).collect();
    let expected: Vec<f32> = golden.inputs.iter().flat_map(PoolingGoldenCase::expected).copied().collect();
    let scale = max_abs(&expected);
    let width = texts.model().text_width().max(1);
    let together = texts.embed(&all)?.to_vec();
    let mut same_alone = true;
    for (text, vector) in all.iter().zip(together.chunks(width)) {
        let alone = texts.embed(&[text])?;
        same_alone &= alone.iter().zip(vector).all(|(a, b)| a.to_bits() == b.to_bits());
    }
    let rows = golden.inputs.iter().enumerate().zip(together.chunks(width));
    let rows: Vec<EmbeddingDeviation> = rows
        .map(|((number, text), vector)| EmbeddingDeviation {
            name: text.name.clone().unwrap_or_else(|| format!("#{number}")),
            tokens: text.input_ids.len(),
            error: relative_error(vector, text.expected(), scale),
        })
        .collect();
    let worst = rows.iter().map(|row| row.error).fold(0.0, f64::max);
    let (kernels, format_error) = match bar.own {
        Some(_) => (None, None),
        None => match graph() {
            Ok(graph) => {
                let (kernels, error) = check_kernels(&graph, &rows, &all, &together, bar.asked)?;
                (Some(kernels), error.map(|error| error.at_least(bar.asked)))
            }
            Err(why) => (Some(KernelCheck::unchecked(why)), None),
        },
    };
    let checked = kernels.as_ref().is_some_and(|kernels| kernels.checked_positions() > 0);
    let tolerance = if checked { None } else { bar.asked.or(bar.own) };
    let model_bar = tolerance.or(format_error.map(|error| error.permitted));
    let right = match (&kernels, model_bar) {
        (Some(kernels), Some(permitted)) if checked => kernels.ok && worst <= permitted,
        (_, Some(permitted)) => worst <= permitted,
        (_, None) => false,
    };
    Ok(EmbeddingOutcome {
        ok: right && same_alone,
        judged: ReplaySubject::from_bar(model_bar, kernels.as_ref()),
        format: bar.format.into(),
        tolerance,
        format_error,
        worst_relative_error: worst,
        same_alone,
        texts: rows,
        kernels,
    })
}

/// The model's input for each text: a token of another type has an id beyond the vocabulary of `vocab`
/// tokens. The error is for people: the golden belongs to another model.
pub fn ids_of(
    golden: &PoolingGoldenFile,
    width: usize,
    vocab: usize,
    types: usize,
) -> Result<Vec<Vec<i32>>, String> {
    let text = |(number, text): (usize, &PoolingGoldenCase)| {
        let wrong = |what: String| format!("inputs[{number}] {what}");
        let found = text.expected().len();
        if found != width {
            return Err(wrong(format!("has {found} numbers, the model makes {width}")));
        }
        let kinds = text.token_type_ids.iter().flatten().copied().chain(std::iter::repeat(0));
        let id = |(&id, kind): (&u32, u32)| {
            let fits = (id as usize) < vocab && (kind as usize) < types;
            let fed = (id as usize).checked_add(kind as usize * vocab).filter(|_| fits);
            fed.and_then(|fed| i32::try_from(fed).ok()).ok_or_else(|| {
                wrong(format!("has token {id} of type {kind}, the model has {vocab} tokens of {types} types"))
            })
        };
        text.input_ids.iter().zip(kinds).map(id).collect()
    };
    golden.inputs.iter().enumerate().map(text).collect()
}

/// The vectors that the kernels made of the first texts, as many as may be interpreted, against those of the
/// graph, and how far the format may take these from the reference.
fn check_kernels(
    graph: &StoredGraph,
    rows: &[EmbeddingDeviation],
    all: &[&[i32]],
    made: &[f32],
    tolerance: Option<f64>,
) -> Result<(KernelCheck, Option<FormatError>), String> {
    let mut left = graph.positions;
    let fits = |text: &&&[i32]| {
        let fits = text.len() <= left;
        left = left.saturating_sub(text.len());
        fits
    };
    let count = all.iter().take_while(fits).count();
    let width = made.len() / all.len().max(1);
    let made = &made[..count * width];
    // The largest distance and the root of the mean square.
    let spread_by = |moved: fn(u64) -> PerturbedWeights, expected: &[f32], scale: f64| {
        let (mut most, mut rms) = (0f64, 0f64);
        for seed in SEEDS {
            let found = graph.embeddings(&all[..count], moved(seed))?;
            most = most.max(relative_error(&found, expected, scale));
            rms = rms.max(rms_error(&found, expected, scale));
        }
        Ok::<_, String>((most, rms))
    };
    let expected = match count {
        0 => Vec::new(),
        _ => graph.embeddings(&all[..count], PerturbedWeights::Unmoved)?,
    };
    let scale = max_abs(&expected);
    let worst = relative_error(made, &expected, scale);
    let worst_rms = rms_error(made, &expected, scale);
    let mut permitted = tolerance.unwrap_or(SHARP);
    let mut rms_permitted = permitted;
    let mut spread = None;
    if tolerance.is_none() && worst > SHARP {
        let (most, rms) = spread_by(PerturbedWeights::Slightly, &expected, scale)?;
        rms_permitted = SHARP.max(SPREADS * rms);
        permitted = SHARP.max(SPREADS * most);
        spread = Some(most);
    }
    let row = |(i, row): (usize, &EmbeddingDeviation)| {
        let of = |all: &[f32]| all.get(i * width..(i + 1) * width).unwrap_or_default().to_vec();
        let (name, tokens) = (row.name.clone(), row.tokens);
        match i < count {
            true => {
                let error = relative_error(&of(made), &of(&expected), scale);
                let rms_error = rms_error(&of(made), &of(&expected), scale);
                PromptCheck {
                    name,
                    tokens,
                    checked: tokens,
                    error,
                    permitted,
                    rms_error,
                    rms_permitted,
                    spread,
                }
            }
            false => PromptCheck { name, tokens, ..PromptCheck::default() },
        }
    };
    let left_out = (count < all.len()).then(|| {
        format!(
            "{} of {} texts: interpreting more of a model of this size would take too long",
            all.len() - count,
            all.len()
        )
    });
    let format_error = match left_out {
        Some(_) => None,
        None if !graph.is_packed() => None,
        None => Some(FormatError::of_vectors(spread_by(PerturbedWeights::WithinSteps, &expected, scale)?.0)),
    };
    let check = KernelCheck {
        ok: count > 0 && worst <= permitted && worst_rms <= rms_permitted,
        worst_relative_error: worst,
        tolerance: permitted,
        prompts: rows.iter().enumerate().map(row).collect(),
        not_checked: left_out,
    };
    Ok((check, format_error))
}

impl EmbeddingOutcome {
    /// The text for people.
    pub fn text(&self, source: &str) -> String {
        let mut out = self.kernels.as_ref().map(|kernels| kernels.text() + "\n").unwrap_or_default();
        let mut rows = vec![["text", "tokens", "error"].map(String::from).to_vec()];
        rows.extend(
            self.texts.iter().map(|t| vec![t.name.clone(), t.tokens.to_string(), format!("{:.2e}", t.error)]),
        );
        let format = &self.format;
        let within = |bar: f64| if self.worst_relative_error <= bar { "within" } else { "NOT within" };
        let verdict = match (self.tolerance, &self.format_error) {
            (Some(bar), _) => format!("tolerance of {format} {bar:.1e}: {} the tolerance", within(bar)),
            (None, Some(error)) => format!(
                "error of {format}: {:.1e} by weights moved within its steps, permitted {:.1e}: {} what this explains",
                error.spread,
                error.permitted,
                within(error.permitted)
            ),
            (None, None) => format!("which is the error of {format} itself, reported and not judged"),
        };
        let alone = if self.same_alone { "bit-identical alone" } else { "NOT bit-identical alone" };
        out.push_str(&format!(
            "{}\nworst relative error {:.3e}, {verdict}; {alone}\nreference: {source}\n{}\n",
            format::format_table(&rows),
            self.worst_relative_error,
            self.judged.text(self.format_error.as_ref())
        ));
        out
    }
}
