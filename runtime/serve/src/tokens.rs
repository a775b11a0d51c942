//! `/tokenize` and `/detokenize`.

use mlcc_engine::{SpecialTokens, TokenId};
use serde_json::{Value, json};

use crate::app::App;
use crate::error::ApiError;
use crate::fields::Fields;
use crate::shape::token_text;

/// Text to ids; with `add_special` as a prompt, with `with_pieces` each with its text.
pub fn tokenize(app: &App, body: &[u8]) -> Result<Value, ApiError> {
    let mut fields = Fields::parse(body)?;
    let prompt: Option<String> = fields.take("prompt", "a string")?;
    let text = match prompt {
        Some(text) => text,
        None => fields.need("content", "a string")?,
    };
    let special = fields.take("add_special", "true or false")?.unwrap_or(false);
    let pieces = fields.take("with_pieces", "true or false")?.unwrap_or(false);
    fields.finish(&["model"])?;
    let ids = if special { app.tokenizer.encode_prompt(&text) } else { app.tokenizer.encode(&text) };
    let ids = ids.map_err(|e| ApiError::field("content", "invalid_value", e.to_string()))?;
    let piece = |&id: &TokenId| json!({"id": id, "piece": token_text(&app.tokenizer, id)});
    let tokens: Value = if pieces { ids.iter().map(piece).collect() } else { json!(ids) };
    Ok(json!({"tokens": tokens, "count": ids.len()}))
}

/// Ids to text. Control tokens have their names.
pub fn detokenize(app: &App, body: &[u8]) -> Result<Value, ApiError> {
    let mut fields = Fields::parse(body)?;
    let ids: Vec<TokenId> = fields.need("tokens", "a list of token ids")?;
    fields.finish(&["model"])?;
    if let Some(id) = ids.iter().find(|&&id| app.tokenizer.bytes_of(id).is_none()) {
        let message = format!("`tokens` has {id}, which is the id of no token");
        return Err(ApiError::field("tokens", "invalid_value", message));
    }
    Ok(json!({"content": app.tokenizer.decode(&ids, SpecialTokens::Keep)}))
}
