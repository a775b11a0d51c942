//! Reference vectors of texts (a golden.json of an encoder) through a compiled model: all texts together and each alone.
//!
//! Errors are relative to the largest reference number. Formats of plain numbers are held against the reference; of packed ones the
//! kernels are held against the graph on the stored weights, as those of models that generate text are
//! ([`crate::kernel_check`]).

use mlcc_models::golden::{GoldenText, TextGolden};
use mlcc_runtime::Texts;
use serde::Serialize;

use crate::format;
use crate::kernel_check::{KernelCheck, PromptCheck, SEEDS, SHARP, SPREADS};
use crate::replay::{Failure, Judged, relative_error};
use crate::stored::StoredGraph;

#[derive(Clone, Debug, Serialize)]
pub struct TextOutcome {
    pub ok: bool,
    pub judged: Judged,
    pub format: String,
    /// `None`: the distance from the reference is reported, not judged.
    pub tolerance: Option<f64>,
    /// Distance from the reference, the error of the format included.
    pub worst_relative_error: f64,
    /// Whether each text gets the same bits alone as beside the others.
    pub same_alone: bool,
    pub texts: Vec<TextError>,
    /// The kernels against the graph, which judges packed formats.
    pub kernels: Option<KernelCheck>,
}

#[derive(Clone, Debug, Serialize)]
pub struct TextError {
    pub name: String,
    pub tokens: usize,
    pub error: f64,
}

/// How an artifact is judged.
pub struct Bar<'a> {
    /// Of the weights, for the outcome.
    pub format: &'a str,
    /// The permitted error of the format; `None` for packed weights.
    pub own: Option<f64>,
    /// In place of that, the user's.
    pub asked: Option<f64>,
}

/// Replays all texts of a golden that belongs to the model ([`ids_of`] has been asked).
pub fn judge(
    texts: &mut Texts,
    golden: &TextGolden,
    ids: &[Vec<i32>],
    bar: &Bar<'_>,
    graph: impl FnOnce() -> Result<StoredGraph, String>,
) -> Result<TextOutcome, Failure> {
    let all: Vec<&[i32]> = ids.iter().map(Vec::as_slice).collect();
    let expected: Vec<f32> = golden.inputs.iter().flat_map(GoldenText::expected).copied().collect();
    let scale = largest(&expected);
    let width = texts.model().text_width().max(1);
    let together = texts.run(&all)?.to_vec();
    let mut same_alone = true;
    for (text, vector) in all.iter().zip(together.chunks(width)) {
        let alone = texts.run(&[text])?;
        same_alone &= alone.iter().zip(vector).all(|(a, b)| a.to_bits() == b.to_bits());
    }
    let rows = golden.inputs.iter().enumerate().zip(together.chunks(width));
    let rows: Vec<TextError> = rows
        .map(|((number, text), vector)| TextError {
            name: text.name.clone().unwrap_or_else(|| format!("#{number}")),
            tokens: text.input_ids.len(),
            error: relative_error(vector, text.expected(), scale),
        })
        .collect();
    let worst = rows.iter().map(|row| row.error).fold(0.0, f64::max);
    let kernels = match bar.own {
        Some(_) => None,
        None => Some(match graph() {
            Ok(graph) => check_kernels(&graph, &rows, &all, &together, bar.asked)?,
            Err(why) => KernelCheck::none(why),
        }),
    };
    let checked = kernels.as_ref().is_some_and(|kernels| kernels.checked() > 0);
    let tolerance = if checked { None } else { bar.asked.or(bar.own) };
    let right = match (&kernels, tolerance) {
        (Some(kernels), _) if checked => kernels.ok && worst.is_finite(),
        (_, Some(tolerance)) => worst <= tolerance,
        (_, None) => false,
    };
    Ok(TextOutcome {
        ok: right && same_alone,
        judged: Judged::of(tolerance, kernels.as_ref()),
        format: bar.format.into(),
        tolerance,
        worst_relative_error: worst,
        same_alone,
        texts: rows,
        kernels,
    })
}

/// What the model is fed for each text: a token of another type has an id beyond the vocabulary of `vocab` tokens. The error is for
/// people: the golden belongs to another model.
pub fn ids_of(
    golden: &TextGolden,
    width: usize,
    vocab: usize,
    types: usize,
) -> Result<Vec<Vec<i32>>, String> {
    let text = |(number, text): (usize, &GoldenText)| {
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

/// The vectors that the kernels made of the first texts, as many as may be interpreted, against those of the graph.
fn check_kernels(
    graph: &StoredGraph,
    rows: &[TextError],
    all: &[&[i32]],
    made: &[f32],
    tolerance: Option<f64>,
) -> Result<KernelCheck, String> {
    let mut left = graph.positions;
    let fits = |text: &&&[i32]| {
        let fits = text.len() <= left;
        left = left.saturating_sub(text.len());
        fits
    };
    let count = all.iter().take_while(fits).count();
    let width = made.len() / all.len().max(1);
    let made = &made[..count * width];
    let vectors = |seed| if count == 0 { Ok(Vec::new()) } else { graph.vectors(&all[..count], seed) };
    let expected = vectors(0)?;
    let scale = largest(&expected);
    let worst = relative_error(made, &expected, scale);
    let mut permitted = tolerance.unwrap_or(SHARP);
    let mut spread = None;
    if tolerance.is_none() && worst > SHARP {
        let mut most = 0f64;
        for seed in SEEDS {
            most = most.max(relative_error(&vectors(seed)?, &expected, scale));
        }
        permitted = SHARP.max(SPREADS * most);
        spread = Some(most);
    }
    let row = |(i, row): (usize, &TextError)| {
        let of = |all: &[f32]| all.get(i * width..(i + 1) * width).unwrap_or_default().to_vec();
        let (name, tokens) = (row.name.clone(), row.tokens);
        match i < count {
            true => {
                let error = relative_error(&of(made), &of(&expected), scale);
                PromptCheck { name, tokens, checked: tokens, error, permitted, spread }
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
    Ok(KernelCheck {
        ok: count > 0 && worst <= permitted,
        worst_relative_error: worst,
        tolerance: permitted,
        prompts: rows.iter().enumerate().map(row).collect(),
        not_checked: left_out,
    })
}

fn largest(numbers: &[f32]) -> f64 {
    numbers.iter().fold(0f64, |most, x| most.max(f64::from(x.abs())))
}

impl TextOutcome {
    /// For people.
    pub fn text(&self, source: &str) -> String {
        let mut out = self.kernels.as_ref().map(|kernels| kernels.text() + "\n").unwrap_or_default();
        let mut rows = vec![["text", "tokens", "error"].map(String::from).to_vec()];
        rows.extend(
            self.texts.iter().map(|t| vec![t.name.clone(), t.tokens.to_string(), format!("{:.2e}", t.error)]),
        );
        let format = &self.format;
        let verdict = match self.tolerance {
            Some(tolerance) if self.worst_relative_error <= tolerance => {
                format!("tolerance of {format} {tolerance:.1e}: within the tolerance")
            }
            Some(tolerance) => format!("tolerance of {format} {tolerance:.1e}: NOT within the tolerance"),
            None => format!("which is the error of {format} itself, reported and not judged"),
        };
        let alone = if self.same_alone { "the same bits alone" } else { "NOT the same bits alone" };
        out.push_str(&format!(
            "{}\nworst relative error {:.3e}, {verdict}; {alone}\nreference: {source}\n{}\n",
            format::table(&rows),
            self.worst_relative_error,
            self.judged.text()
        ));
        out
    }
}
