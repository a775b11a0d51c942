//! Requests of `/completion` and `/infill`.

use mlcc_engine::serving::EngineRequest;
use serde_json::{Value, json};

use crate::completions::{self, CompletionPrompt, CompletionRequest, ScoredTokens};
use crate::error::ApiError;
use crate::fields::RequestFields;
use crate::fill_in_middle::FimTokens;
use crate::known_fields::NeutralValue::{AtMost, Empty};
use crate::known_fields::{KnownField, field};
use crate::sampling::probabilities;
use crate::served_model::ServedModel;

/// Fields in addition to those of all texts and of completions.
pub const FIELDS: &[KnownField] = &[
    field("n_cmpl", AtMost(1.0), "several texts of a prompt; /v1/completions has them with `n`"),
    field("n", AtMost(1.0), "several texts of a prompt; /v1/completions has them"),
    field("input_extra", Empty, "texts of other files; put them before the prefix"),
];

/// A request that was read.
pub struct NativeCompletion {
    /// One of each prompt.
    pub requests: Vec<EngineRequest>,
    pub prompts: Vec<CompletionPrompt>,
    pub stream: bool,
    /// The answer is a list, as the prompt was.
    pub is_list: bool,
    /// The answer has the ids of its tokens.
    pub returns_tokens: bool,
}

/// Reads a request for the continuation of prompts.
pub fn prepare(hosted: &ServedModel, mut fields: RequestFields) -> Result<NativeCompletion, ApiError> {
    let prompt: Value = fields.take_required("prompt", "a string, token ids, or a list of such")?;
    let is_list = prompt.as_array().is_some_and(|parts| !parts.iter().all(Value::is_number));
    read(hosted, fields, prompt, is_list)
}

/// Reads a request for the text between two others.
pub fn prepare_infill(hosted: &ServedModel, mut fields: RequestFields) -> Result<NativeCompletion, ApiError> {
    let prefix: String = fields.take_required("input_prefix", "a string")?;
    let suffix: String = fields.take_required("input_suffix", "a string")?;
    let tokens = FimTokens::require(&hosted.tokenizer, "input_suffix")?;
    // The begin of the text between the two, which the model continues.
    let prompt: String = fields.take_field("prompt", "a string")?.unwrap_or_default();
    let mut ids = tokens.prompt(hosted, &prefix, &suffix)?;
    hosted.check_text("prompt", &prompt)?;
    let begin = hosted.tokenizer.encode(&prompt);
    ids.extend(begin.map_err(|error| ApiError::field("prompt", "invalid_value", error.to_string()))?);
    fields.add_if_missing("stop_token_ids", json!(tokens.ends));
    read(hosted, fields, json!(ids), false)
}

fn read(
    hosted: &ServedModel,
    mut fields: RequestFields,
    prompt: Value,
    is_list: bool,
) -> Result<NativeCompletion, ApiError> {
    let returns_tokens = fields.take_field("return_tokens", "true or false")?.unwrap_or(false);
    let scored = ScoredTokens { text: probabilities(&mut fields)?, prompt: None };
    fields.drop_known(FIELDS)?;
    fields.add_if_missing("prompt", prompt);
    let CompletionRequest { requests, prompts, stream, .. } =
        completions::read(hosted, fields, None, scored)?;
    if stream && prompts.len() > 1 {
        let message = "`stream` is for one prompt: send the prompts one by one, or to /v1/completions";
        return Err(ApiError::field("stream", "unsupported", message));
    }
    Ok(NativeCompletion { requests, prompts, stream, is_list, returns_tokens })
}
