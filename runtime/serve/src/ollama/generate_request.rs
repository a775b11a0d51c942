//! `/api/generate`: a prompt as the only message of a chat, as it is, or around a gap.

use serde_json::{Value, json};

use crate::chat_answer::CallIds;
use crate::completions::{self, ScoredTokens};
use crate::error::ApiError;
use crate::fields::RequestFields;
use crate::fill_in_middle::FimTokens;
use crate::known_fields::TEXTS;
use crate::ollama::answer::{AnswerRequest, TextRequest};
use crate::ollama::answer_line::AnswerField;
use crate::ollama::chat_request;
use crate::ollama::options::{FIELDS, TextOptions};
use crate::served_model::ServedModel;

/// Reads a request.
pub fn prepare(hosted: &ServedModel, mut fields: RequestFields) -> Result<AnswerRequest, ApiError> {
    let mut options = TextOptions::take(&mut fields, hosted)?;
    let prompt: String = fields.take_field("prompt", "a string")?.unwrap_or_default();
    let suffix: String = fields.take_field("suffix", "a string")?.unwrap_or_default();
    let system: String = fields.take_field("system", "a string")?.unwrap_or_default();
    let raw = fields.take_field("raw", "true or false")?.unwrap_or(false);
    fields.finish(&[TEXTS, FIELDS])?;
    if raw && !system.is_empty() {
        let message = "`raw` sends the prompt as it is: put the text of `system` into it";
        return Err(ApiError::field("system", "invalid_value", message));
    }
    if prompt.is_empty() && suffix.is_empty() {
        return AnswerRequest::without_text(AnswerField::Response, &options);
    }
    if !suffix.is_empty() {
        let tokens = FimTokens::require(&hosted.tokenizer, "suffix")?;
        let ids = tokens.prompt(hosted, &prompt, &suffix)?;
        options.fields.insert("stop_token_ids".into(), json!(tokens.ends));
        return continue_prompt(hosted, options, json!(ids));
    }
    // A model without a template continues texts.
    if raw || hosted.format.is_none() && system.is_empty() {
        return continue_prompt(hosted, options, prompt.into());
    }
    let system = (!system.is_empty()).then(|| json!({"role": "system", "content": system}));
    let user = json!({"role": "user", "content": prompt});
    options.fields.insert("messages".into(), system.into_iter().chain([user]).collect());
    chat_request::read(hosted, options, AnswerField::Response)
}

/// Reads a completion, whose prompt is text or token ids.
fn continue_prompt(
    hosted: &ServedModel,
    options: TextOptions,
    prompt: Value,
) -> Result<AnswerRequest, ApiError> {
    let TextOptions { mut fields, stream, logprobs, warnings, .. } = options;
    // Nothing in the prompt says whether to think.
    fields.remove("enable_thinking");
    fields.remove("reasoning_effort");
    fields.insert("prompt".into(), prompt);
    let scored = ScoredTokens { text: logprobs, prompt: None };
    let mut read = completions::read(hosted, RequestFields::from(fields), None, scored)?;
    let request = read.requests.pop().ok_or_else(|| ApiError::internal("a prompt has no request"))?;
    Ok(AnswerRequest::Text(Box::new(TextRequest {
        request,
        parser: None,
        ids: CallIds { answer: 0 },
        form: AnswerField::Response,
        stream,
        warnings,
    })))
}
