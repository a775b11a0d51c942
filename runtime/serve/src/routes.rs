//! The routes, and what happens around every request.

use std::hash::{DefaultHasher, Hash, Hasher};
use std::sync::Arc;
use std::time::Instant;

use axum::extract::rejection::QueryRejection;
use axum::extract::{MatchedPath, Query, Request, State};
use axum::http::{HeaderValue, StatusCode, header};
use axum::middleware::{Next, from_fn_with_state};
use axum::response::{IntoResponse, Response};
use axum::routing::{delete, get, post};
use axum::{Extension, Router};
use serde_json::{Value, json};

use crate::allowed_hosts::{self, AllowedHosts};
use crate::api_route::{ApiRoute, deletes, reads, takes};
use crate::app_state::{AppState, unix_seconds};
use crate::error::{ApiError, json_type};
use crate::error_form::with_error_form;
use crate::fields::RequestFields;
use crate::generation::{ClientId, PreparedRequest, answer};
use crate::json_answer::{as_json, as_text_of_json, of_texts};
use crate::request_body::{
    ClientExtension, PathSegment, ReceivedBody, SharedApp, run_blocking, run_on_model,
};
use crate::request_memory::MemoryLease;
use crate::served_model::ServedModel;
use crate::{
    anthropic, chat, completions, embeddings as vectors, info, llama_cpp, message_blocks, ollama, page,
    refused_routes, response_items, responses, tokens,
};

/// All there are, but for the description of them: the router and `/openapi.json` are made of them.
pub const ROUTES: &[ApiRoute] = &[
    takes("/chat/completions", "Answers messages (chat completion)", || post(chat_completions)),
    takes("/completions", "Continues texts or token ids", || post(text_completions)),
    takes("/responses", "Creates a response (Responses API)", || post(responses)),
    reads("/responses/{id}", "Returns a stored response", || get(response)),
    deletes("/responses/{id}", "Deletes a stored response", || delete(forget)),
    takes("/messages", "Answers messages (Anthropic's API)", || post(messages)),
    takes("/messages/count_tokens", "Counts the prompt tokens of messages", || post(count_tokens)),
    takes("/embeddings", "Embeds texts", || post(embeddings)),
    takes("/rerank", "Scores how well documents answer a query", || post(rerank)),
    takes("/tokenize", "Converts text to token ids", || post(tokenize)),
    takes("/detokenize", "Converts token ids to text", || post(detokenize)),
    takes("/apply-template", "Renders messages to the prompt of the model", || post(apply_template)),
    takes("/models/load", "Loads a model, replacing one of the same name", || post(load)),
    takes("/models/unload", "Unloads a model", || post(unload)),
    takes("/load_lora_adapter", "Loads an adapter as a model of its name", || post(load_adapter)),
    takes("/unload_lora_adapter", "Unloads an adapter", || post(unload_adapter)),
    reads("/models", "Lists the served models", || get(models)),
    reads("/models/{model}", "Returns a served model", || get(model)),
    reads("/health", "Reports whether the server accepts requests", || get(health)),
    reads("/metrics", "Returns metrics in the Prometheus text format", || get(metrics)),
    reads("/props", "Returns context, slots and sampling defaults", || get(props)),
    reads("/slots", "Reports what runs in each slot", || get(slots)),
    takes("/completion", "Continues texts (llama.cpp's API)", || post(llama_cpp::complete)).unversioned(),
    takes("/infill", "Writes what stands between two texts (llama.cpp's API)", || post(llama_cpp::infill))
        .unversioned(),
    takes("/embedding", "Embeds texts (llama.cpp's API)", || post(llama_cpp::embedding)).unversioned(),
    takes("/api/chat", "Answers messages (Ollama's API)", || post(ollama::chat)).unversioned(),
    takes("/api/generate", "Answers a prompt (Ollama's API)", || post(ollama::generate)).unversioned(),
    takes("/api/embed", "Embeds texts (Ollama's API)", || post(ollama::embed)).unversioned(),
    takes("/api/embeddings", "Embeds a text (Ollama's API)", || post(ollama::embeddings)).unversioned(),
    takes("/api/show", "Describes a model (Ollama's API)", || post(ollama::show)).unversioned(),
    reads("/api/tags", "Lists the models that can be asked (Ollama's API)", || get(ollama::tags))
        .unversioned(),
    reads("/api/ps", "Lists the loaded models (Ollama's API)", || get(ollama::ps)).unversioned(),
    reads("/api/version", "Returns the version of Ollama's API", || get(ollama::version)).unversioned(),
];

/// Everything that the server answers; bodies have a limit.
pub fn router(app: Arc<AppState>, hosts: AllowedHosts) -> Router {
    let add = |all: Router<Arc<AppState>>, route: &ApiRoute| {
        route.paths().fold(all, |all, path| all.route(&path, (route.handler)()))
    };
    let description = crate::openapi::description(ROUTES);
    let describe = move || std::future::ready(as_json(Ok(description.clone())));
    let all =
        Router::new().route("/openapi.json", get(describe.clone())).route("/v1/openapi.json", get(describe));
    let all = refused_routes::add_routes(ROUTES.iter().fold(all, add)).merge(page::routes());
    all.fallback(no_route)
        .method_not_allowed_fallback(wrong_method)
        .layer(from_fn_with_state(Arc::clone(&app), check_request))
        .layer(Extension(Arc::new(hosts)))
        .with_state(app)
}

/// Longest id of a request that is taken from its client.
const LONGEST_ID: usize = 128;

type HostsExtension = Extension<Arc<AllowedHosts>>;
type RequestBody = ReceivedBody;

/// Asks for the key, counts, and gives the request its id.
async fn check_request(
    State(app): SharedApp,
    Extension(hosts): HostsExtension,
    mut request: Request,
    next: Next,
) -> Response {
    let begin = Instant::now();
    let (client, id) = (client_id(&request), request_id(&app, &request));
    request.extensions_mut().insert(client);
    let matched = request.extensions().get::<MatchedPath>().map(|path| path.as_str().to_owned());
    let path = matched.unwrap_or_else(|| "other".into());
    let span = app.server.options.traces.begin(&request, &path, &id);
    request.extensions_mut().insert(span.clone());
    let is_health = path == "/health" || path == "/v1/health";
    let open = is_health || page::is_route(&path);
    let (method, asked) = (request.method().clone(), request.uri().path().to_owned());
    // The operator of a server may call it by any name.
    let refused = allowed_hosts::check(&request, &hosts).err().filter(|_| !is_health);
    // Bodies of routes that do nothing may have any type.
    let is_other_type = |error: &ApiError| error.status == StatusCode::UNSUPPORTED_MEDIA_TYPE;
    let refused = refused.filter(|error| !(is_other_type(error) && refused_routes::is_route(&path)));
    let mut response = if let Some(error) = refused {
        error.into_response()
    } else if open || has_key(&request, &app.server.options.api_keys) {
        next.run(request).await
    } else {
        ApiError::unauthorized().into_response()
    };
    response = with_error_form(&asked, response);
    let status = response.status().as_u16();
    app.server.metrics.count_answer(&path, status);
    span.answered(status, response.extensions().get().copied());
    if let Some(log) = app.server.options.log {
        // Neither texts nor keys. A stream goes on after its head.
        let (client, ms) = (format!("{:016x}", client.0), begin.elapsed().as_secs_f64() * 1e3);
        let line = json!({"time": unix_seconds(), "request": id, "client": client, "method": method.as_str(), "path": path, "status": status, "ms": ms});
        log(&line.to_string());
    }
    if let Ok(id) = HeaderValue::from_str(&id) {
        response.headers_mut().insert("x-request-id", id);
    }
    response
}

/// The client's own, if it is plain; else one of the server's.
fn request_id(app: &AppState, request: &Request) -> String {
    let own = request.headers().get("x-request-id").and_then(|value| value.to_str().ok());
    let plain = |id: &&str| {
        (1..=LONGEST_ID).contains(&id.len())
            && id.chars().all(|c| c.is_ascii_alphanumeric() || "-_.:".contains(c))
    };
    own.filter(plain).map_or_else(|| app.server.next_id("req"), str::to_owned)
}

/// The key that a request brings, whether one is required or not.
fn bearer_key(request: &Request) -> Option<&str> {
    let text = |name: &str| request.headers().get(name).and_then(|value| value.to_str().ok());
    let bearer = text("authorization").and_then(|value| value.split_once(' '));
    let bearer = bearer.filter(|(scheme, _)| scheme.eq_ignore_ascii_case("bearer")).map(|(_, key)| key);
    // The header of Anthropic's clients.
    bearer.or_else(|| text("x-api-key"))
}

fn client_id(request: &Request) -> ClientId {
    let mut hasher = DefaultHasher::new();
    bearer_key(request).hash(&mut hasher);
    ClientId(hasher.finish())
}

/// True if a request has one of the keys, if there are any. Takes equally long for every wrong key of an
/// equal length.
fn has_key(request: &Request, keys: &[String]) -> bool {
    let given = bearer_key(request).unwrap_or_default();
    let same = |wanted: &String| {
        given.len() == wanted.len()
            && given.bytes().zip(wanted.bytes()).fold(0, |differs, (a, b)| differs | (a ^ b)) == 0
    };
    keys.is_empty() || keys.iter().fold(false, |found, wanted| found | same(wanted))
}

async fn run_request(
    app: Arc<AppState>,
    client: ClientId,
    body: RequestBody,
    prepare: fn(&ServedModel, RequestFields) -> Result<PreparedRequest, ApiError>,
) -> Response {
    let span = body.span.clone();
    match run_on_model(&app, body, move |hosted, fields, _| prepare(hosted, fields)).await {
        Ok(((hosted, work), _)) => answer(hosted, client, span, work).await,
        Err(error) => error.into_response(),
    }
}

async fn chat_completions(
    State(app): SharedApp,
    Extension(client): ClientExtension,
    body: RequestBody,
) -> Response {
    run_request(app, client, body, chat::prepare).await
}

async fn text_completions(
    State(app): SharedApp,
    Extension(client): ClientExtension,
    body: RequestBody,
) -> Response {
    run_request(app, client, body, completions::prepare).await
}

async fn messages(State(app): SharedApp, Extension(client): ClientExtension, body: RequestBody) -> Response {
    let span = body.span.clone();
    match run_on_model(&app, body, |hosted, fields, _| anthropic::prepare(hosted, fields)).await {
        Ok(((hosted, asked), _)) => message_blocks::answer(hosted, client, span, asked).await,
        Err(error) => error.into_response(),
    }
}

async fn responses(State(app): SharedApp, Extension(client): ClientExtension, body: RequestBody) -> Response {
    let prepare = move |hosted: &ServedModel, fields: RequestFields, _: &mut MemoryLease| {
        responses::prepare(hosted, client, fields)
    };
    let span = body.span.clone();
    match run_on_model(&app, body, prepare).await {
        Ok(((hosted, asked), _)) => response_items::answer(hosted, client, span, asked).await,
        Err(error) => error.into_response(),
    }
}

async fn response(
    State(app): SharedApp,
    Extension(client): ClientExtension,
    PathSegment(id): PathSegment,
) -> Response {
    let kept = move || app.server.responses.response(client, &id).map(|kept| kept.to_string());
    match tokio::task::spawn_blocking(kept).await {
        Ok(Ok(text)) => (json_type(), text).into_response(),
        Ok(Err(error)) => error.into_response(),
        Err(_) => ApiError::internal("internal error while the answer was written").into_response(),
    }
}

async fn forget(
    State(app): SharedApp,
    Extension(client): ClientExtension,
    PathSegment(id): PathSegment,
) -> Response {
    as_json(app.server.responses.delete(client, &id))
}

async fn count_tokens(State(app): SharedApp, body: RequestBody) -> Response {
    match run_on_model(&app, body, |hosted, fields, _| anthropic::count_tokens(hosted, fields)).await {
        Ok(((_, count), _)) => as_json(Ok(count)),
        Err(error) => error.into_response(),
    }
}

async fn text_of_model(
    app: Arc<AppState>,
    body: RequestBody,
    work: fn(&ServedModel, RequestFields, &mut MemoryLease) -> Result<String, ApiError>,
) -> Response {
    as_text_of_json(run_on_model(&app, body, work).await.map(|((_, text), lease)| (text, lease)))
}

async fn tokenize(State(app): SharedApp, body: RequestBody) -> Response {
    text_of_model(app, body, tokens::tokenize).await
}

async fn detokenize(State(app): SharedApp, body: RequestBody) -> Response {
    text_of_model(app, body, tokens::detokenize).await
}

async fn apply_template(State(app): SharedApp, body: RequestBody) -> Response {
    let apply = |hosted: &ServedModel, fields: RequestFields, _: &mut MemoryLease| {
        chat::apply_template(hosted, fields).map(|value| value.to_string())
    };
    text_of_model(app, body, apply).await
}

async fn embeddings(State(app): SharedApp, body: RequestBody) -> Response {
    of_texts(&app, body, vectors::embed).await
}

async fn rerank(State(app): SharedApp, body: RequestBody) -> Response {
    of_texts(&app, body, vectors::rerank).await
}

async fn load(State(app): SharedApp, body: RequestBody) -> Response {
    as_json(run_blocking(&app, body, |app, fields, _| app.models.load(fields)).await.map(|(value, _)| value))
}

async fn unload(State(app): SharedApp, body: RequestBody) -> Response {
    as_json(
        run_blocking(&app, body, |app, fields, _| app.models.unload(fields)).await.map(|(value, _)| value),
    )
}

fn as_text(result: Result<String, ApiError>) -> Response {
    result.map_or_else(IntoResponse::into_response, IntoResponse::into_response)
}

async fn load_adapter(State(app): SharedApp, body: RequestBody) -> Response {
    as_text(
        run_blocking(&app, body, |app, fields, _| app.models.load_adapter(fields))
            .await
            .map(|(text, _)| text),
    )
}

async fn unload_adapter(State(app): SharedApp, body: RequestBody) -> Response {
    as_text(
        run_blocking(&app, body, |app, fields, _| app.models.unload_adapter(fields))
            .await
            .map(|(text, _)| text),
    )
}

async fn models(State(app): SharedApp) -> Response {
    as_json(Ok(json!({"object": "list", "data": app.list_models()})))
}

async fn model(State(app): SharedApp, PathSegment(name): PathSegment) -> Response {
    as_json(app.describe(&name))
}

async fn health(State(app): SharedApp) -> Response {
    as_json(app.check_ready().map(|()| json!({"status": "ok"})))
}

async fn metrics(State(app): SharedApp) -> Response {
    let content = [(header::CONTENT_TYPE, "application/openmetrics-text; version=1.0.0; charset=utf-8")];
    // None of them ends between the two.
    let alive = app.models.all_alive();
    let stats: Vec<_> = alive.iter().map(|model| (model.base.clone(), model.engine.stats())).collect();
    match app.server.metrics.render(&stats) {
        Ok(text) => (content, text).into_response(),
        Err(error) => ApiError::internal(error.to_string()).into_response(),
    }
}

/// `?model=NAME`
#[derive(serde::Deserialize)]
struct ModelQuery {
    model: Option<String>,
}

type ModelQueryResult = Result<Query<ModelQuery>, QueryRejection>;

fn model_name(app: &AppState, wanted: ModelQueryResult, tell: fn(&ServedModel) -> Value) -> Response {
    let wanted = wanted.map_err(|rejection| ApiError::request("invalid_query", rejection.body_text()));
    let hosted = wanted.and_then(|Query(wanted)| app.models.find_model(wanted.model.as_deref()));
    as_json(hosted.map(|hosted| tell(&hosted)))
}

async fn props(State(app): SharedApp, wanted: ModelQueryResult) -> Response {
    model_name(&app, wanted, info::props)
}

async fn slots(State(app): SharedApp, wanted: ModelQueryResult) -> Response {
    model_name(&app, wanted, info::slots)
}

async fn no_route(request: Request) -> ApiError {
    ApiError::no_route(request.method().as_str(), request.uri().path())
}

async fn wrong_method(request: Request) -> ApiError {
    ApiError::wrong_method(request.method().as_str(), request.uri().path())
}
