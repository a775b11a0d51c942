//! `/api/embed` and `/api/embeddings`.

use std::time::Instant;

use serde::{Serialize, Serializer};
use serde_json::{Map, Value, json};

use crate::app_state::AppState;
use crate::embeddings::{EmbeddedTexts, EmbeddingInput, EmbeddingRequest, MeteredAnswer};
use crate::error::ApiError;
use crate::fields::{OneOrMany, RequestFields};
use crate::known_fields::TEXTS;
use crate::ollama::options::FIELDS;
use crate::ollama::tagged_name;
use crate::request_memory::MemoryLease;
use mlcc_engine::embedding::EmbeddingVectors;

/// Rows that are written in order.
struct VectorRows<'a>(&'a EmbeddingVectors);

impl Serialize for VectorRows<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_seq(self.0.rows())
    }
}

#[derive(Serialize)]
struct EmbedAnswer<'a> {
    model: String,
    embeddings: VectorRows<'a>,
    total_duration: u64,
    load_duration: u64,
    prompt_eval_count: usize,
}

/// Vectors of one text or several.
pub fn embed(
    app: &AppState,
    mut fields: RequestFields,
    lease: &mut MemoryLease,
) -> Result<MeteredAnswer, ApiError> {
    let begin = Instant::now();
    let model: Option<String> = fields.take_field("model", "the name of the model")?;
    let input: OneOrMany<String> = fields.take_required("input", "a string or a list of strings")?;
    let dim: Option<usize> = fields.take_field("dimensions", "a number")?;
    finish(fields)?;
    let request = EmbeddingRequest { model, input: EmbeddingInput::Texts(input), dim, prompt: None };
    let EmbeddedTexts { model, vectors } = request.run(app, lease)?;
    let answer = EmbedAnswer {
        model: tagged_name(&model),
        embeddings: VectorRows(&vectors),
        total_duration: u64::try_from(begin.elapsed().as_nanos()).unwrap_or(u64::MAX),
        load_duration: 0,
        prompt_eval_count: vectors.tokens,
    };
    let text = serde_json::to_string(&answer).map_err(|error| ApiError::internal(error.to_string()))?;
    Ok(MeteredAnswer { text, model, tokens: Some(vectors.tokens as u64) })
}

/// The vector of one text.
pub fn embed_prompt(
    app: &AppState,
    mut fields: RequestFields,
    lease: &mut MemoryLease,
) -> Result<MeteredAnswer, ApiError> {
    let model: Option<String> = fields.take_field("model", "the name of the model")?;
    let prompt: String = fields.take_required("prompt", "a string")?;
    finish(fields)?;
    let input = EmbeddingInput::Texts(OneOrMany::One(prompt));
    let request = EmbeddingRequest { model, input, dim: None, prompt: None };
    let EmbeddedTexts { model, vectors } = request.run(app, lease)?;
    let text = json!({"embedding": vectors.rows().next().unwrap_or_default()}).to_string();
    Ok(MeteredAnswer { text, model, tokens: Some(vectors.tokens as u64) })
}

/// Checks that the remaining fields ask for nothing. Options of texts mean nothing to vectors.
fn finish(mut fields: RequestFields) -> Result<(), ApiError> {
    let _: Option<Map<String, Value>> = fields.take_field("options", "an object")?;
    fields.finish(&[TEXTS, FIELDS])
}
