//! `golden.json` (logits and greedy tokens of a reference implementation) and `eval.json` (perplexity and its protocol).

use crate::error::ConfigError;
use serde::Deserialize;
use serde::de::DeserializeOwned;
use std::collections::BTreeMap;
use std::path::Path;

/// What an independent implementation computed from a checkpoint. Fields that only some files have are optional; those
/// not named here are notes for people.
#[derive(Clone, Debug, Deserialize, PartialEq)]
pub struct GoldenFile {
    /// Program and version that computed the numbers.
    pub source: String,
    /// Type of the stored tensors, `float32`, `float16` or `bfloat16`.
    pub file_dtype: String,
    #[serde(default)]
    pub case: Option<String>,
    #[serde(default)]
    pub note: Option<String>,
    pub prompts: Vec<GoldenPrompt>,
}

#[derive(Clone, Debug, Deserialize, PartialEq)]
pub struct GoldenPrompt {
    #[serde(default)]
    pub name: Option<String>,
    #[serde(default)]
    pub text: Option<String>,
    /// Fed from position 0, nothing added. Of an encoder-decoder model the source text; once read, with the start token behind it.
    pub input_ids: Vec<u32>,
    /// What the decoder of an encoder-decoder model starts with.
    #[serde(default)]
    pub decoder_start_token_id: Option<u32>,
    /// Logits after the last prompt token.
    #[serde(alias = "logits_first")]
    pub logits_last: Vec<f32>,
    /// Mean and deviation of the logits at every position.
    #[serde(default)]
    pub logits_checksum_all_positions: Option<LogitChecksums>,
    #[serde(default)]
    pub argmax_all_positions: Option<Vec<u32>>,
    /// The next tokens by argmax.
    pub greedy: Vec<u32>,
    /// Top-1 minus top-2 logit at each greedy step.
    #[serde(default)]
    pub greedy_margin: Option<Vec<f64>>,
}

#[derive(Clone, Debug, Deserialize, PartialEq)]
pub struct LogitChecksums {
    pub mean: Vec<f64>,
    pub std: Vec<f64>,
}

impl GoldenPrompt {
    /// Greedy tokens that an implementation has to reproduce if its logits are within `tolerance` of the reference: those
    /// before the first step whose margin is smaller than twice that.
    pub fn binding_greedy(&self, tolerance: f64) -> &[u32] {
        let margins = self.greedy_margin.as_deref().unwrap_or(&[]);
        let steps = margins.iter().position(|&margin| margin < 2.0 * tolerance).unwrap_or(self.greedy.len());
        &self.greedy[..steps]
    }

    /// How many of the tokens are the source text of an encoder-decoder model.
    pub fn encoder_input_len(&self) -> usize {
        self.decoder_start_token_id.map_or(0, |_| self.input_ids.len().saturating_sub(1))
    }

    /// Lengths that have to agree: what is wrong, if anything is.
    fn inconsistency(&self) -> Option<(&'static str, usize, usize)> {
        let positions = self.input_ids.len();
        let checks = self.logits_checksum_all_positions.as_ref();
        let lengths = [
            ("argmax_all_positions", self.argmax_all_positions.as_ref().map(Vec::len), positions),
            ("logits_checksum_all_positions.mean", checks.map(|c| c.mean.len()), positions),
            ("logits_checksum_all_positions.std", checks.map(|c| c.std.len()), positions),
            ("greedy_margin", self.greedy_margin.as_ref().map(Vec::len), self.greedy.len()),
        ];
        let wrong = |(field, found, expected): (&'static str, Option<usize>, usize)| {
            found.filter(|&found| found != expected).map(|found| (field, expected, found))
        };
        lengths.into_iter().find_map(wrong)
    }
}

impl GoldenFile {
    pub fn read(path: &Path) -> Result<GoldenFile, ConfigError> {
        let golden: GoldenFile = read_json(path, GOLDEN)?;
        golden.validated(&path.display().to_string())
    }

    pub fn parse(origin: &str, json: &[u8]) -> Result<GoldenFile, ConfigError> {
        let golden: GoldenFile = parse_json(origin, json, GOLDEN)?;
        golden.validated(origin)
    }

    fn validated(mut self, file: &str) -> Result<GoldenFile, ConfigError> {
        self.prompts.iter_mut().for_each(|p| p.input_ids.extend(p.decoder_start_token_id));
        let wrong = |field: String, expected: String, found: String| ConfigError::Wrong {
            file: file.to_string(),
            field,
            expected,
            found,
        };
        if self.prompts.is_empty() {
            return Err(wrong("prompts".into(), "at least one prompt".into(), "none".into()));
        }
        let vocab = self.prompts[0].logits_last.len();
        for (number, prompt) in self.prompts.iter().enumerate() {
            let field = |name: &str| format!("prompts[{number}].{name}");
            if prompt.input_ids.is_empty() {
                return Err(wrong(field("input_ids"), "at least one token".into(), "none".into()));
            }
            if prompt.logits_last.is_empty() || prompt.logits_last.len() != vocab {
                let expected = format!("{} values as in the first prompt, not 0", vocab);
                return Err(wrong(field("logits_last"), expected, prompt.logits_last.len().to_string()));
            }
            if let Some((name, expected, found)) = prompt.inconsistency() {
                return Err(wrong(field(name), format!("{expected} values"), found.to_string()));
            }
        }
        Ok(self)
    }
}

/// What an independent implementation made of texts.
#[derive(Clone, Debug, Deserialize, PartialEq)]
pub struct PoolingGoldenFile {
    /// Program and version that computed the numbers.
    pub source: String,
    pub inputs: Vec<PoolingGoldenCase>,
}

/// A text with its embedding, or a pair with its score.
#[derive(Clone, Debug, Deserialize, PartialEq)]
pub struct PoolingGoldenCase {
    #[serde(default)]
    pub name: Option<String>,
    /// Fed as they are, nothing added.
    pub input_ids: Vec<u32>,
    /// The type of each token; all 0 where it is absent.
    #[serde(default)]
    pub token_type_ids: Option<Vec<u32>>,
    #[serde(default)]
    pub embedding: Vec<f32>,
    #[serde(default)]
    pub score: Option<f32>,
}

impl PoolingGoldenCase {
    /// The vector that is expected of the text.
    pub fn expected(&self) -> &[f32] {
        self.score.as_ref().map_or(&self.embedding, std::slice::from_ref)
    }
}

impl PoolingGoldenFile {
    pub fn read(path: &Path) -> Result<PoolingGoldenFile, ConfigError> {
        let golden: PoolingGoldenFile = read_json(path, GOLDEN)?;
        let wrong = |field: String, expected: String, found: String| {
            Err(ConfigError::Wrong { file: path.display().to_string(), field, expected, found })
        };
        if golden.inputs.is_empty() {
            return wrong("inputs".into(), "at least one text".into(), "none".into());
        }
        for (number, text) in golden.inputs.iter().enumerate() {
            let (field, tokens) = (|name: &str| format!("inputs[{number}].{name}"), text.input_ids.len());
            if tokens == 0 {
                return wrong(field("input_ids"), "at least one token".into(), "none".into());
            }
            if let Some(types) = text.token_type_ids.as_ref().filter(|types| types.len() != tokens) {
                return wrong(field("token_type_ids"), format!("{tokens} values"), types.len().to_string());
            }
            if text.expected().is_empty() {
                return wrong(field("embedding"), "numbers, or a `score`".into(), "none".into());
            }
        }
        Ok(golden)
    }
}

/// Perplexity of a trained checkpoint on its held-out text, in several arithmetics.
#[derive(Clone, Debug, Deserialize, PartialEq)]
pub struct PerplexityEvaluation {
    pub source: String,
    pub protocol: String,
    pub context_length: usize,
    pub stride: usize,
    /// Tokens of the whole text.
    pub valid_tokens: usize,
    /// By arithmetic: `float32`, `q8_g32`, `q4_g32`.
    pub results: BTreeMap<String, EvaluationResult>,
}

#[derive(Clone, Debug, Deserialize, PartialEq)]
pub struct EvaluationResult {
    pub nll_sum: f64,
    pub tokens_scored: usize,
    pub mean_nll: f64,
    pub ppl: f64,
}

impl PerplexityEvaluation {
    pub fn read(path: &Path) -> Result<PerplexityEvaluation, ConfigError> {
        read_json(path, "evaluation (eval.json)")
    }
}

/// What messages call a golden.
const GOLDEN: &str = "reference results (a golden.json)";

fn read_json<T: DeserializeOwned>(path: &Path, what: &'static str) -> Result<T, ConfigError> {
    let origin = path.display().to_string();
    match mlcc_files::read(path, mlcc_files::FileKind::Golden) {
        Ok(json) => parse_json(&origin, &json, what),
        Err(source) => Err(ConfigError::Io { file: origin, source }),
    }
}

/// `what` the file should hold: JSON of another form is not called damaged.
fn parse_json<T: DeserializeOwned>(origin: &str, json: &[u8], what: &'static str) -> Result<T, ConfigError> {
    serde_json::from_slice(json).map_err(|error| {
        let (file, detail) = (origin.to_string(), error.to_string());
        match error.is_data() {
            true => ConfigError::Form { file, what, detail },
            false => ConfigError::Json { file, detail },
        }
    })
}
