//! The API of llama.cpp's server, where it is another one than OpenAI's: completions, gaps and vectors.

mod answer;
mod completion;

use std::sync::Arc;

use axum::Extension;
use axum::extract::State;
use axum::response::{IntoResponse, Response};
use mlcc_engine::embedding::EmbeddingVectors;
use serde::{Serialize, Serializer};
use serde_json::{Value, json};

use crate::app_state::AppState;
use crate::embeddings::{EmbeddedTexts, EmbeddingInput, EmbeddingRequest, MeteredAnswer};
use crate::error::ApiError;
use crate::fields::RequestFields;
use crate::generation::ClientId;
use crate::json_answer::of_texts;
use crate::known_fields::NeutralValue::{Empty, Number};
use crate::known_fields::{KnownField, field};
use crate::request_body::{ClientExtension, ReceivedBody, SharedApp, run_on_model};
use crate::request_memory::MemoryLease;
use crate::served_model::ServedModel;

pub use completion::FIELDS;
use completion::NativeCompletion;

/// Fields of requests for vectors.
pub const VECTOR_FIELDS: &[KnownField] = &[
    field("image_data", Empty, "images"),
    field("embd_normalize", Number(2.0), "vectors of another length than 1"),
];

/// `/completion`
pub async fn complete(
    State(app): SharedApp,
    Extension(client): ClientExtension,
    body: ReceivedBody,
) -> Response {
    respond(app, client, body, completion::prepare).await
}

/// `/infill`
pub async fn infill(
    State(app): SharedApp,
    Extension(client): ClientExtension,
    body: ReceivedBody,
) -> Response {
    respond(app, client, body, completion::prepare_infill).await
}

async fn respond(
    app: Arc<AppState>,
    client: ClientId,
    body: ReceivedBody,
    prepare: fn(&ServedModel, RequestFields) -> Result<NativeCompletion, ApiError>,
) -> Response {
    let span = body.span.clone();
    let prepare = move |hosted: &ServedModel, fields, _: &mut _| prepare(hosted, fields);
    match run_on_model(&app, body, prepare).await {
        Ok(((hosted, asked), _)) => answer::answer(hosted, client, span, asked).await,
        Err(error) => error.into_response(),
    }
}

/// `/embedding`
pub async fn embedding(State(app): SharedApp, body: ReceivedBody) -> Response {
    of_texts(&app, body, embed).await
}

/// Vectors, each in a list: llama.cpp may have one for each token.
struct IndexedRows<'a>(&'a EmbeddingVectors);

#[derive(Serialize)]
struct IndexedRow<'a> {
    index: usize,
    embedding: [&'a [f32]; 1],
}

impl Serialize for IndexedRows<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let of = |(index, row)| IndexedRow { index, embedding: [row] };
        serializer.collect_seq(self.0.rows().enumerate().map(of))
    }
}

fn embed(
    app: &AppState,
    mut fields: RequestFields,
    lease: &mut MemoryLease,
) -> Result<MeteredAnswer, ApiError> {
    const EXPECTED: &str = "a string, a list of strings, or token ids of texts";
    let model: Option<String> = fields.take_field("model", "the name of the model")?;
    let other: Option<EmbeddingInput> = fields.take_field("input", EXPECTED)?;
    let input = match other {
        Some(input) => input,
        None => fields.take_required("content", EXPECTED)?,
    };
    fields.finish(&[VECTOR_FIELDS])?;
    let request = EmbeddingRequest { model, input, dim: None, prompt: None };
    let EmbeddedTexts { model, vectors } = request.run(app, lease)?;
    let text = serde_json::to_string(&IndexedRows(&vectors));
    let text = text.map_err(|error| ApiError::internal(error.to_string()))?;
    Ok(MeteredAnswer { text, model, tokens: Some(vectors.tokens as u64) })
}

/// An error in the form of this API.
pub fn error_body(error: &ApiError) -> Value {
    let kind = match error.status.as_u16() {
        404 => "not_found_error",
        429 | 503 => "unavailable_error",
        _ => error.kind,
    };
    json!({"error": {"code": error.status.as_u16(), "message": error.message, "type": kind}})
}
