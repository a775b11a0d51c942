//! Errors in the form of the OpenAI API.

use axum::http::{HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use mlcc_engine::serving::{LaunchError, RequestFailure};
use mlcc_files::did_you_mean;
use mlcc_text::GrammarError;
use serde_json::{Value, json};

/// Seconds after which a client may try again when the queue is full.
const RETRY_AFTER: u64 = 1;

/// Models that an error lists; of more it names those nearest to what was asked for.
const NAMED_MODELS: usize = 8;

/// The code of an error, which goes with its answer to counters and traces.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ErrorCode(pub &'static str);

/// An answer that is an error: `{"error":{"message","type","param","code"}}`.
#[derive(Debug, Clone, PartialEq)]
pub struct ApiError {
    pub status: StatusCode,
    pub message: String,
    pub kind: &'static str,
    /// The field of the request that is wrong.
    pub param: Option<String>,
    pub code: Option<&'static str>,
}

impl ApiError {
    fn new(status: StatusCode, kind: &'static str, code: &'static str, message: impl Into<String>) -> Self {
        ApiError { status, message: message.into(), kind, param: None, code: Some(code) }
    }

    /// The request is wrong in the field `param`.
    pub fn field(param: impl Into<String>, code: &'static str, message: impl Into<String>) -> Self {
        let error = Self::new(StatusCode::BAD_REQUEST, "invalid_request_error", code, message);
        ApiError { param: Some(param.into()), ..error }
    }

    /// The request is wrong as a whole.
    pub fn request(code: &'static str, message: impl Into<String>) -> Self {
        Self::new(StatusCode::BAD_REQUEST, "invalid_request_error", code, message)
    }

    /// Something of the OpenAI API that is not there.
    pub fn not_yet(param: &str) -> Self {
        let message = format!("`{param}` is not supported by this server yet: leave it out");
        Self::field(param, "unsupported", message)
    }

    pub fn status(self, status: StatusCode) -> Self {
        ApiError { status, ..self }
    }

    fn model(status: StatusCode, code: &'static str, message: String) -> Self {
        let error = Self::new(status, "invalid_request_error", code, message);
        ApiError { param: Some("model".into()), ..error }
    }

    pub fn unknown_model(wanted: &str, served: &[String]) -> Self {
        let message = match served {
            [] => format!("there is no model `{wanted:.200}` here; this server has none"),
            few if few.len() <= NAMED_MODELS => {
                let few: Vec<String> = few.iter().map(|name| format!("`{name}`")).collect();
                format!("there is no model `{wanted:.200}` here; this server has {}", few.join(", "))
            }
            many => {
                let near = did_you_mean(wanted, many.iter().map(String::as_str));
                format!("there is no model `{wanted:.200}` here: {near}/v1/models lists all")
            }
        };
        Self::model(StatusCode::NOT_FOUND, "model_not_found", message)
    }

    pub fn unknown_response(id: &str) -> Self {
        let message = format!("there is no response `{id:.100}` here, or it was dropped");
        let error = Self::new(StatusCode::NOT_FOUND, "invalid_request_error", "response_not_found", message);
        ApiError { param: Some("id".into()), ..error }
    }

    pub fn not_loaded(name: &str) -> Self {
        let message =
            format!("the model `{name}` is not loaded: send {{\"model\": \"{name}\"}} to /models/load");
        Self::model(StatusCode::NOT_FOUND, "model_not_loaded", message)
    }

    /// The model of a chat or a completion makes vectors or scores, by another route.
    pub fn writes_no_text(name: &str, route: &str) -> Self {
        let (does, wants) = match route {
            "/v1/rerank" => ("scores documents for a query", "`query` and `documents`"),
            _ => ("makes vectors of texts", "`input`"),
        };
        let message = format!("the model `{name}` {does} and writes none: send {wants} to {route}");
        Self::model(StatusCode::BAD_REQUEST, "writes_no_text", message)
    }

    pub fn no_model() -> Self {
        let message = "no model is loaded: /v1/models lists those that can be".to_owned();
        Self::model(StatusCode::NOT_FOUND, "model_not_loaded", message)
    }

    pub fn too_many_models(most: usize) -> Self {
        let message = format!("{most} models are loaded, which is the maximum: unload one first");
        Self::model(StatusCode::CONFLICT, "too_many_models", message)
    }

    /// An artifact cannot be loaded.
    pub fn refused_artifact(name: &str, why: &str) -> Self {
        let message = format!("`{name}` is not loaded: {}", without_folders(why));
        Self::model(StatusCode::UNPROCESSABLE_ENTITY, "invalid_artifact", message)
    }

    /// An adapter cannot be loaded.
    pub fn refused_adapter(name: &str, why: &str) -> Self {
        let message = format!("the adapter `{name}` is not loaded: {}", without_folders(why));
        let status = StatusCode::UNPROCESSABLE_ENTITY;
        let error = Self::new(status, "invalid_request_error", "invalid_adapter", message);
        ApiError { param: Some("lora_path".into()), ..error }
    }

    pub fn unknown_adapter(message: String) -> Self {
        let status = StatusCode::NOT_FOUND;
        let error = Self::new(status, "invalid_request_error", "adapter_not_found", message);
        ApiError { param: Some("lora_name".into()), ..error }
    }

    pub fn adapters_are_fixed() -> Self {
        let message = "this server does not let clients load and unload adapters: start it with --lora-dir";
        Self::new(StatusCode::FORBIDDEN, "invalid_request_error", "adapters_are_fixed", message)
    }

    pub fn unauthorized() -> Self {
        let message = "this server wants its API key: send `Authorization: Bearer KEY`";
        Self::new(StatusCode::UNAUTHORIZED, "authentication_error", "invalid_api_key", message)
    }

    pub fn other_site() -> Self {
        let message = "this server refuses pages of other sites: `Origin` is not its `Host`. Behind a proxy, \
                       name the site with --allowed-host";
        Self::new(StatusCode::FORBIDDEN, "invalid_request_error", "other_site", message)
    }

    pub fn other_host(name: &str) -> Self {
        let message = format!(
            "this server is not called `{name:.100}`: ask it by its address or as localhost, or name it with --allowed-host"
        );
        Self::new(StatusCode::FORBIDDEN, "invalid_request_error", "other_host", message)
    }

    /// A body has another type than JSON.
    pub fn no_json(found: &str) -> Self {
        let message = format!(
            "the `Content-Type` of the body is {found:.60}, expected application/json: with curl, use --json instead \
             of -d"
        );
        let status = StatusCode::UNSUPPORTED_MEDIA_TYPE;
        Self::new(status, "invalid_request_error", "unsupported_media_type", message)
    }

    /// All memory for requests of a kind is taken.
    pub fn out_of_memory(what: &str) -> Self {
        let message =
            format!("other requests have all memory for {what} now (--request-memory): try again later");
        Self::new(StatusCode::TOO_MANY_REQUESTS, "rate_limit_error", "out_of_request_memory", message)
    }

    pub fn no_route(method: &str, path: &str) -> Self {
        let message = format!("there is no route {method} {path}; docs/serve.md lists all");
        Self::new(StatusCode::NOT_FOUND, "invalid_request_error", "unknown_url", message)
    }

    /// A route of another server that is not here.
    pub fn refused_route(path: &str, instead: &str) -> Self {
        let message = format!("{path} is not supported by this server: {instead}");
        Self::request("unsupported", message)
    }

    pub fn wrong_method(method: &str, path: &str) -> Self {
        let message = format!("{path} does not answer {method}");
        let status = StatusCode::METHOD_NOT_ALLOWED;
        Self::new(status, "invalid_request_error", "method_not_allowed", message)
    }

    /// The grammar of the field `param` cannot be used.
    pub fn grammar(param: &str, error: &GrammarError) -> Self {
        let message = format!("`{param}`: {error}");
        match error {
            GrammarError::TooLarge { .. }
            | GrammarError::Invalid { .. }
            | GrammarError::TooSlow { .. }
            | GrammarError::Step { .. }
            | GrammarError::SlowMask { .. }
            | GrammarError::Vocabulary { .. }
            | GrammarError::Tokenizer { .. } => Self::field(param, "invalid_grammar", message),
            GrammarError::Busy { .. } => {
                Self::new(StatusCode::TOO_MANY_REQUESTS, "rate_limit_error", "too_many_grammars", message)
            }
            GrammarError::Thread { .. } => Self::internal(message),
        }
    }

    pub fn body_too_large() -> Self {
        let message = "the body is larger than the server's --body-limit";
        Self::new(StatusCode::PAYLOAD_TOO_LARGE, "invalid_request_error", "body_too_large", message)
    }

    pub fn too_slow() -> Self {
        let message = "the body of the request did not come in time";
        Self::new(StatusCode::REQUEST_TIMEOUT, "invalid_request_error", "body_too_slow", message)
    }

    pub fn shutting_down() -> Self {
        let message = "the server is shutting down";
        Self::new(StatusCode::SERVICE_UNAVAILABLE, "server_error", "shutting_down", message)
    }

    pub fn internal(message: impl Into<String>) -> Self {
        Self::new(StatusCode::INTERNAL_SERVER_ERROR, "server_error", "internal_error", message)
    }

    pub fn body(&self) -> Value {
        json!({"error": {
            "message": self.message,
            "type": self.kind,
            "param": self.param,
            "code": self.code,
        }})
    }
}

impl From<LaunchError> for ApiError {
    fn from(error: LaunchError) -> Self {
        let message = error.to_string();
        match error {
            LaunchError::EmptyPrompt => Self::field("prompt", "empty_prompt", message),
            LaunchError::PromptTooLong { .. } => Self::field("prompt", "context_length_exceeded", message),
            LaunchError::PromptToken { .. } => Self::field("prompt", "invalid_value", message),
            LaunchError::Params(param) => Self::field(param.name, "invalid_value", message),
            LaunchError::Stop(_) => Self::field("stop", "invalid_value", message),
            LaunchError::NoAdapters => Self::field("model", "no_adapters", message),
            LaunchError::Grammar(_) => Self::request("invalid_grammar", message),
            LaunchError::QueueFull { .. } => {
                Self::new(StatusCode::TOO_MANY_REQUESTS, "rate_limit_error", "queue_full", message)
            }
            LaunchError::Closed => Self::shutting_down(),
        }
    }
}

impl From<RequestFailure> for ApiError {
    fn from(failure: RequestFailure) -> Self {
        match failure {
            // The request asked for it.
            RequestFailure::Grammar(reason) => Self::request("grammar_failed", reason),
            RequestFailure::Model(_) | RequestFailure::Panic(_) => Self::internal(failure.to_string()),
        }
    }
}

impl IntoResponse for ApiError {
    fn into_response(self) -> Response {
        let mut response = (self.status, json_type(), self.body().to_string()).into_response();
        response.extensions_mut().insert(ErrorCode(self.code.unwrap_or(self.kind)));
        let is_full = self.status == StatusCode::TOO_MANY_REQUESTS;
        response.extensions_mut().insert(self);
        if is_full {
            response.headers_mut().insert(header::RETRY_AFTER, HeaderValue::from(RETRY_AFTER));
        }
        response
    }
}

/// A text whose whole paths have become names of files: clients need not know where the server keeps them.
fn without_folders(text: &str) -> String {
    let is_end = |c: char| c.is_whitespace() || "\"'`,:;()[]{}<>".contains(c);
    let mut out = String::with_capacity(text.len());
    let mut rest = text;
    while let Some(at) = rest.find('/') {
        let begins = out.chars().chain(rest[..at].chars()).next_back().is_none_or(is_end);
        let end = rest[at..].find(is_end).map_or(rest.len(), |length| at + length);
        let path = rest[at..end].trim_end_matches(['.', '/']);
        out.push_str(&rest[..at]);
        if begins && path.len() > 1 && !path.starts_with("//") {
            out.push_str(path.rsplit('/').next().unwrap_or_default());
            out.push_str(&rest[at + path.len()..end]);
        } else {
            out.push_str(&rest[at..end]);
        }
        rest = &rest[end..];
    }
    out + rest
}

/// The header of JSON answers.
pub fn json_type() -> [(header::HeaderName, &'static str); 1] {
    [(header::CONTENT_TYPE, "application/json")]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paths_become_names() {
        for (told, wanted) in [
            (
                "/srv/models/a.so is not an ELF file. Copy it again.",
                "a.so is not an ELF file. Copy it again.",
            ),
            ("cannot open `/a/b c/d.so`: no such file", "cannot open `b c/d.so`: no such file"),
            ("in /x/y/.", "in y/."),
            ("(/a/b.json) and \"/c/d\"", "(b.json) and \"d\""),
            ("1/2 of a/b, and/or https://x/y", "1/2 of a/b, and/or https://x/y"),
            ("", ""),
        ] {
            assert_eq!(without_folders(told), wanted);
        }
    }
}
