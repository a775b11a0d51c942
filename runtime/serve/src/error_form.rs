//! Errors in the form of the API that was asked: each client reads only its own.

use axum::http::header;
use axum::response::Response;
use serde_json::Value;

use crate::error::ApiError;
use crate::{anthropic, llama_cpp, ollama};

/// The body of an error of an API.
type ErrorBody = fn(&ApiError) -> Value;

/// The form of errors of a path; `None`: that of OpenAI, which errors have from the start.
fn error_form(path: &str) -> Option<ErrorBody> {
    let path = path.strip_prefix("/v1").unwrap_or(path);
    match path.split('/').nth(1)? {
        "messages" => Some(anthropic::error_body),
        "api" => Some(ollama::error_body),
        "completion" | "infill" | "embedding" => Some(llama_cpp::error_body),
        _ => None,
    }
}

/// The answer to a request for `path`, where an error has the form of its API.
pub fn with_error_form(path: &str, mut response: Response) -> Response {
    let error = response.extensions_mut().remove::<ApiError>();
    if let (Some(error), Some(body)) = (error, error_form(path)) {
        *response.body_mut() = body(&error).to_string().into();
        response.headers_mut().remove(header::CONTENT_LENGTH);
    }
    response
}
