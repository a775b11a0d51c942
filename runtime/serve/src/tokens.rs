//! `/tokenize` and `/detokenize`.

use mlcc_text::{SpecialTokens, TokenId};
use serde::{Serialize, Serializer};
use serde_json::json;

use crate::chat;
use crate::error::ApiError;
use crate::fields::RequestFields;
use crate::request_memory::MemoryLease;
use crate::response_shape::token_text;
use crate::served_model::{ENCODING, ServedModel};

/// Bytes of the answer for a token that is a byte of text: at most six as JSON, in addition to its id and
/// names.
const PIECE: usize = 2 * 48;

/// Text to ids; with `add_special` as a prompt, with `with_pieces` each with its text. Or the ids of the
/// prompt of `messages`.
pub fn tokenize(
    hosted: &ServedModel,
    mut fields: RequestFields,
    lease: &mut MemoryLease,
) -> Result<String, ApiError> {
    let pieces = fields.take_field("with_pieces", "true or false")?.unwrap_or(false);
    let each = if pieces { PIECE } else { 16 };
    let memory = &hosted.server.memory;
    let ids = match fields.has_value("messages") {
        true => {
            let ids = chat::tokens(hosted, fields)?;
            memory.extend_lease(lease, ids.len().saturating_mul(each))?;
            ids
        }
        false => of_text(hosted, fields, |bytes| {
            memory.extend_lease(lease, bytes.saturating_mul(ENCODING + each))
        })?,
    };
    let piece = |&id: &TokenId| TokenPiece { id, piece: token_text(&hosted.tokenizer, id) };
    let pieces = pieces.then(|| TokenPieces(ids.iter().map(piece)));
    written(&TokensResponse {
        tokens: pieces.as_ref().map_or(TokenListing::Ids(&ids), TokenListing::Pieces),
        count: ids.len(),
    })
}

/// The ids of a text. `room` takes memory for one of that many bytes, of which each may be a token.
fn of_text(
    hosted: &ServedModel,
    mut fields: RequestFields,
    room: impl FnOnce(usize) -> Result<(), ApiError>,
) -> Result<Vec<TokenId>, ApiError> {
    let prompt: Option<String> = fields.take_field("prompt", "a string")?;
    let text = match prompt {
        Some(text) => text,
        None => fields.take_required("content", "a string")?,
    };
    let special = fields.take_field("add_special", "true or false")?.unwrap_or(false);
    fields.finish(&[])?;
    room(text.len())?;
    let ids = if special { hosted.tokenizer.encode_prompt(&text) } else { hosted.tokenizer.encode(&text) };
    ids.map_err(|e| ApiError::field("content", "invalid_value", e.to_string()))
}

/// An answer, written token by token: as values they would take many times the memory.
#[derive(Serialize)]
struct TokensResponse<L> {
    tokens: L,
    count: usize,
}

#[derive(Serialize)]
struct TokenPiece {
    id: TokenId,
    piece: String,
}

/// Tokens that are made as they are written.
struct TokenPieces<I>(I);

impl<I: Iterator<Item = TokenPiece> + Clone> Serialize for TokenPieces<I> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_seq(self.0.clone())
    }
}

#[derive(Serialize)]
#[serde(untagged)]
enum TokenListing<'a, P> {
    Ids(&'a [TokenId]),
    Pieces(&'a P),
}

fn written(answer: &impl Serialize) -> Result<String, ApiError> {
    serde_json::to_string(answer).map_err(|error| ApiError::internal(error.to_string()))
}

/// Ids to text. Control tokens have their names.
pub fn detokenize(
    hosted: &ServedModel,
    mut fields: RequestFields,
    lease: &mut MemoryLease,
) -> Result<String, ApiError> {
    let ids: Vec<TokenId> = fields.take_required("tokens", "a list of token ids")?;
    fields.finish(&[])?;
    let mut bytes = 0;
    for &id in &ids {
        let Some(token) = hosted.tokenizer.bytes_of(id) else {
            let message = format!("`tokens` has {id}, which is the id of no token");
            return Err(ApiError::field("tokens", "invalid_value", message));
        };
        bytes += token.len();
    }
    // The bytes, the text, and the JSON, which may be six times as long while it grows.
    hosted.server.memory.extend_lease(lease, bytes.saturating_mul(10))?;
    let content = hosted.tokenizer.decode(&ids, SpecialTokens::Keep);
    Ok(json!({"content": content}).to_string())
}
