//! `/tokenize` and `/detokenize`.

use mlcc_engine::{SpecialTokens, TokenId};
use serde_json::{Value, json};

use crate::chat;
use crate::error::ApiError;
use crate::fields::Fields;
use crate::hosted::Hosted;
use crate::shape::token_text;

/// Text to ids; with `add_special` as a prompt, with `with_pieces` each with its text. Or the ids of the prompt of `messages`.
pub fn tokenize(hosted: &Hosted, mut fields: Fields) -> Result<Value, ApiError> {
    let pieces = fields.take("with_pieces", "true or false")?.unwrap_or(false);
    let ids = match fields.has("messages") {
        true => chat::tokens(hosted, fields)?,
        false => of_text(hosted, fields)?,
    };
    let piece = |&id: &TokenId| json!({"id": id, "piece": token_text(&hosted.tokenizer, id)});
    let tokens: Value = if pieces { ids.iter().map(piece).collect() } else { json!(ids) };
    Ok(json!({"tokens": tokens, "count": ids.len()}))
}

fn of_text(hosted: &Hosted, mut fields: Fields) -> Result<Vec<TokenId>, ApiError> {
    let prompt: Option<String> = fields.take("prompt", "a string")?;
    let text = match prompt {
        Some(text) => text,
        None => fields.need("content", "a string")?,
    };
    let special = fields.take("add_special", "true or false")?.unwrap_or(false);
    fields.finish(&[])?;
    let ids = if special { hosted.tokenizer.encode_prompt(&text) } else { hosted.tokenizer.encode(&text) };
    ids.map_err(|e| ApiError::field("content", "invalid_value", e.to_string()))
}

/// Ids to text. Control tokens have their names.
pub fn detokenize(hosted: &Hosted, mut fields: Fields) -> Result<Value, ApiError> {
    let ids: Vec<TokenId> = fields.need("tokens", "a list of token ids")?;
    fields.finish(&[])?;
    if let Some(id) = ids.iter().find(|&&id| hosted.tokenizer.bytes_of(id).is_none()) {
        let message = format!("`tokens` has {id}, which is the id of no token");
        return Err(ApiError::field("tokens", "invalid_value", message));
    }
    Ok(json!({"content": hosted.tokenizer.decode(&ids, SpecialTokens::Keep)}))
}
