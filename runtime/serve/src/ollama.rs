//! Ollama's API: requests become those of the other routes, answers are lines of JSON.

mod answer;
mod answer_line;
mod chat_request;
mod closed_schema;
mod embed;
mod generate_request;
mod line_stream;
mod listing;
mod options;

use std::sync::Arc;

use axum::Extension;
use axum::extract::State;
use axum::response::{IntoResponse, Response};
use serde_json::{Value, json};

use crate::app_state::AppState;
use crate::error::ApiError;
use crate::fields::RequestFields;
use crate::generation::ClientId;
use crate::json_answer::{as_json, as_text_of_json, of_texts};
use crate::request_body::{ClientExtension, ReceivedBody, SharedApp, run_blocking, run_on_model};
use crate::served_model::ServedModel;

use answer::AnswerRequest;
pub use options::FIELDS;

/// The version of Ollama whose API this is: clients ask for one, and refuse older ones.
const API_VERSION: &str = "0.12.11";

/// `/api/chat`
pub async fn chat(State(app): SharedApp, Extension(client): ClientExtension, body: ReceivedBody) -> Response {
    respond(app, client, body, chat_request::prepare).await
}

/// `/api/generate`
pub async fn generate(
    State(app): SharedApp,
    Extension(client): ClientExtension,
    body: ReceivedBody,
) -> Response {
    respond(app, client, body, generate_request::prepare).await
}

async fn respond(
    app: Arc<AppState>,
    client: ClientId,
    body: ReceivedBody,
    prepare: fn(&ServedModel, RequestFields) -> Result<AnswerRequest, ApiError>,
) -> Response {
    let span = body.span.clone();
    let prepare = move |hosted: &ServedModel, fields, _: &mut _| prepare(hosted, fields);
    match run_on_model(&app, body, prepare).await {
        Ok(((hosted, asked), _)) => answer::answer(hosted, client, span, asked).await,
        Err(error) => options::in_own_words(error).into_response(),
    }
}

/// `/api/embed`
pub async fn embed(State(app): SharedApp, body: ReceivedBody) -> Response {
    of_texts(&app, body, embed::embed).await
}

/// `/api/embeddings`, as it was before `/api/embed`
pub async fn embeddings(State(app): SharedApp, body: ReceivedBody) -> Response {
    of_texts(&app, body, embed::embed_prompt).await
}

/// `/api/tags`
pub async fn tags(State(app): SharedApp) -> Response {
    as_json(Ok(listing::tags(&app)))
}

/// `/api/ps`
pub async fn ps(State(app): SharedApp) -> Response {
    as_json(Ok(listing::running(&app)))
}

/// `/api/show`
pub async fn show(State(app): SharedApp, body: ReceivedBody) -> Response {
    let show = |app: &AppState, fields, _: &mut _| listing::show(app, fields).map(|told| told.to_string());
    as_text_of_json(run_blocking(&app, body, show).await)
}

/// `/api/version`
pub async fn version() -> Response {
    as_json(Ok(json!({"version": API_VERSION})))
}

/// The name of a model as Ollama has them, with a tag.
fn tagged_name(name: &str) -> String {
    if name.contains(':') { name.to_owned() } else { format!("{name}:latest") }
}

/// An error in the form of this API.
pub fn error_body(error: &ApiError) -> Value {
    json!({"error": error.message})
}
