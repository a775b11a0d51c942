//! Outputs of layers (taps), from anything that runs a model, and their distance from a reference.
//!
//! A model definition names the outputs of its layers ([`mlcc_ir::graph_builder::GraphBuilder::tap`]). In a
//! module with taps they are outputs of the entry functions, so every executor can give them: an artifact
//! built with `--debug-taps`, the kernel interpreter, and the graph interpreter after any pass. [`diagnose`]
//! compares these with each other to find the first layer, pass and op that depart.

pub mod bisect;
pub mod diagnose;
pub mod file;
pub mod given;
pub mod run;
pub mod stages;

use std::error::Error;

use mlcc_passes::CacheType;
use mlcc_passes::scheme::{ActivationType, QuantScheme};
use serde::Serialize;

use crate::distance::relative_error;
use crate::format;

pub type BoxedError = Box<dyn Error + Send + Sync>;

/// A named value `[rows, width]` of one call.
#[derive(Clone, Debug, PartialEq)]
pub struct TapOutput {
    pub name: String,
    pub width: usize,
    pub values: Vec<f32>,
}

/// Name of the last tap of every call: its logits.
pub const LOGITS: &str = "logits";

/// One call of an entry point: `tokens` after the `start` tokens of earlier calls.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TapCall {
    pub start: usize,
    pub tokens: Vec<i32>,
}

impl TapCall {
    /// A single token goes through decode, as in a session.
    pub fn entry(&self) -> &'static str {
        if self.tokens.len() == 1 { "decode" } else { "prefill" }
    }
}

/// A prompt as calls: all but the last token through prefill in pieces of at most `chunk`, the last one
/// through decode.
pub fn split_calls(tokens: &[i32], chunk: usize) -> Vec<TapCall> {
    let Some((last, first)) = tokens.split_last() else { return Vec::new() };
    let mut calls = Vec::new();
    let mut start = 0;
    for piece in first.chunks(chunk.max(1)).chain([&[*last][..]]) {
        calls.push(TapCall { start, tokens: piece.to_vec() });
        start += piece.len();
    }
    calls
}

/// Token ids for models without a text at hand: `count` different ones, spread over the vocabulary.
pub fn some_tokens(count: usize, vocab: usize) -> Vec<i32> {
    // A prime step visits every id before one repeats, unless the vocabulary is a multiple of it.
    (0..count).map(|i| ((i * 7919 + 1) % vocab.max(1)) as i32).collect()
}

/// Anything that runs calls of one sequence and shows its taps.
pub trait LayerModel {
    /// Runs the next call; taps in the order of the model definition, [`LOGITS`] last.
    fn run_call(&mut self, call: &TapCall) -> Result<Vec<TapOutput>, BoxedError>;
}

/// The taps of every call.
pub fn run_all(model: &mut dyn LayerModel, calls: &[TapCall]) -> Result<Vec<Vec<TapOutput>>, BoxedError> {
    calls.iter().map(|call| model.run_call(call)).collect()
}

/// Largest error that kernels of a scheme may show, relative to the largest value of a tap, against the
/// interpreter on the same stored weights.
pub fn scheme_tolerance(scheme: &QuantScheme) -> f64 {
    match scheme.activation {
        // A sum that falls on the other side of a rounding edge moves a code by one of 127.
        ActivationType::I8 => 2e-2,
        // An activation that falls on the other side moves by a step of bf16, 2^-8 to 2^-7 of it. Once one
        // has, later ones do too: measured in nine families on three levels at most 6.6e-3, mostly below
        // 1e-6.
        ActivationType::BF16 => 2f64.powi(-6),
        // Activations enter products with packed weights as 16-bit block floating point.
        ActivationType::F32 if scheme.linear.is_packed() => 1e-3,
        ActivationType::F32 => 1e-4,
    }
}

/// Largest error that caches may add: an element that falls on the other side of its rounding edge moves by
/// one step of its type, which is up to its machine epsilon relative to the element. It is one of the values
/// that attention averages, or moves a score by a step times an element of the query. Measured in ten
/// families: at most 5.6e-4 with f16, 1.7e-4 with bf16, 1.3e-3 with int8, where the same kernels with caches
/// in f32 are within 1.2e-6.
pub fn cache_tolerance(cache: CacheType) -> f64 {
    match cache {
        CacheType::F32 => 0.0,
        CacheType::F16 => 2f64.powi(-10),
        CacheType::BF16 => 2f64.powi(-7),
        // Relative to the largest element of a row.
        CacheType::I8 => 1.0 / 127.0,
    }
}

/// Errors of one tap over all calls, relative to the tap's largest reference value in the call.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct LayerRow {
    pub name: String,
    pub prefill: Option<f64>,
    pub decode: Option<f64>,
}

/// A tap of one call that is outside of the tolerance.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct TapDeviation {
    pub name: String,
    /// Number of the call.
    #[serde(skip)]
    pub call: usize,
    pub entry: &'static str,
    /// Position of the first token of the call.
    pub start: usize,
    pub error: f64,
}

#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct LayerComparison {
    pub tolerance: f64,
    pub worst: f64,
    pub rows: Vec<LayerRow>,
    /// The first in the order of execution.
    pub first: Option<TapDeviation>,
}

impl LayerComparison {
    pub fn ok(&self) -> bool {
        self.first.is_none()
    }

    /// The text for people.
    pub fn text(&self) -> String {
        let cell = |error: Option<f64>| match error {
            None => "-".into(),
            Some(e) => format!("{e:.1e}{}", if e > self.tolerance { " !" } else { "" }),
        };
        let mut rows = vec![["tap", "prefill", "decode"].map(String::from).to_vec()];
        rows.extend(self.rows.iter().map(|r| vec![r.name.clone(), cell(r.prefill), cell(r.decode)]));
        let mut out = format::format_table(&rows);
        let tolerance = self.tolerance;
        match &self.first {
            None if tolerance == f64::MAX => {
                out.push_str(&format!("\nworst error {:.1e}, reported and not judged\n", self.worst))
            }
            None => {
                out.push_str(&format!("\nworst error {:.1e}, tolerance {tolerance:.1e}: ok\n", self.worst))
            }
            Some(d) => out.push_str(&format!(
                "\nfirst departure: {} in {} (from position {}), error {:.1e}, tolerance {tolerance:.1e}\n",
                d.name, d.entry, d.start, d.error
            )),
        }
        out
    }
}

/// Holds taps against those of a reference, by name; taps that only one side has are left out.
pub fn compare(
    calls: &[TapCall],
    found: &[Vec<TapOutput>],
    expected: &[Vec<TapOutput>],
    tolerance: f64,
) -> Result<LayerComparison, BoxedError> {
    let mut result = LayerComparison { tolerance, worst: 0.0, rows: Vec::new(), first: None };
    for (number, ((call, found), expected)) in calls.iter().zip(found).zip(expected).enumerate() {
        for tap in found {
            let Some(want) = expected.iter().find(|e| e.name == tap.name) else { continue };
            let scale = want.values.iter().fold(0f64, |m, x| m.max(f64::from(x.abs())));
            let error = relative_error(&tap.values, &want.values, scale);
            result.worst = result.worst.max(error);
            let at = match result.rows.iter().position(|r| r.name == tap.name) {
                Some(at) => at,
                None => {
                    result.rows.push(LayerRow { name: tap.name.clone(), prefill: None, decode: None });
                    result.rows.len() - 1
                }
            };
            let row = &mut result.rows[at];
            let cell = if call.entry() == "decode" { &mut row.decode } else { &mut row.prefill };
            *cell = Some(cell.unwrap_or(0.0).max(error));
            if error > tolerance && result.first.is_none() {
                let (name, entry, start) = (tap.name.clone(), call.entry(), call.start);
                result.first = Some(TapDeviation { name, call: number, entry, start, error });
            }
        }
    }
    match result.rows.is_empty() {
        true => Err("the two sides have no tap in common".into()),
        false => Ok(result),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tap(name: &str, values: &[f32]) -> TapOutput {
        TapOutput { name: name.into(), width: values.len(), values: values.to_vec() }
    }

    #[test]
    fn a_prompt_ends_with_decode() {
        let cut: Vec<(usize, usize)> =
            split_calls(&[1, 2, 3, 4, 5, 6], 4).iter().map(|c| (c.start, c.tokens.len())).collect();
        assert_eq!(cut, [(0, 4), (4, 1), (5, 1)]);
        assert_eq!(split_calls(&[7], 4)[0].entry(), "decode");
        assert!(split_calls(&[], 4).is_empty());
    }

    #[test]
    fn the_first_departure_is_the_first_in_execution() {
        let calls = split_calls(&[1, 2, 3], 4);
        let expected =
            [vec![tap("a", &[1.0, 2.0]), tap("b", &[4.0])], vec![tap("a", &[2.0]), tap("b", &[4.0])]];
        let mut found = expected.to_vec();
        found[1][0].values[0] = 3.0;
        found[0][1].values[0] = f32::NAN;
        let result = compare(&calls, &found, &expected, 0.1).unwrap();
        let first = result.first.clone().unwrap();
        assert_eq!((first.name.as_str(), first.entry, first.start), ("b", "prefill", 0));
        assert_eq!(result.rows[0], LayerRow { name: "a".into(), prefill: Some(0.0), decode: Some(0.5) });
        assert!(result.worst.is_infinite() && !result.ok());
        assert!(compare(&calls, &found, &[vec![], vec![]], 0.1).is_err());
    }
}
