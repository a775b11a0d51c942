//! Answers that are one JSON text.

use std::sync::Arc;

use axum::response::{IntoResponse, Response};
use serde_json::Value;

use crate::app_state::AppState;
use crate::embeddings::MeteredAnswer;
use crate::error::{ApiError, json_type};
use crate::fields::RequestFields;
use crate::request_body::{ReceivedBody, run_blocking};
use crate::request_memory::{LeasedBody, MemoryLease};

pub fn as_json(result: Result<Value, ApiError>) -> Response {
    match result {
        Ok(value) => (json_type(), value.to_string()).into_response(),
        Err(error) => error.into_response(),
    }
}

/// A JSON text that was made with some memory.
pub fn as_text_of_json(done: Result<(String, MemoryLease), ApiError>) -> Response {
    match done {
        Ok((text, lease)) => (json_type(), LeasedBody::with_lease(text, lease)).into_response(),
        Err(error) => error.into_response(),
    }
}

/// Asks a model of texts, which the answer names.
pub async fn of_texts(
    app: &Arc<AppState>,
    body: ReceivedBody,
    work: fn(&AppState, RequestFields, &mut MemoryLease) -> Result<MeteredAnswer, ApiError>,
) -> Response {
    let span = body.span.clone();
    let done = run_blocking(app, body, work).await;
    if let Ok((done, _)) = &done {
        span.asks_for(&done.model);
        span.embedded(done.tokens);
    }
    as_text_of_json(done.map(|(done, lease)| (done.text, lease)))
}
