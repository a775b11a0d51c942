//! The routes, and what happens around every request.

use std::convert::Infallible;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::sync::Arc;
use std::time::Instant;

use axum::body::Bytes;
use axum::extract::rejection::{BytesRejection, QueryRejection};
use axum::extract::{DefaultBodyLimit, FromRequest, MatchedPath, Path, Query, Request, State};
use axum::http::{HeaderValue, StatusCode, header};
use axum::middleware::{Next, from_fn_with_state};
use axum::response::{IntoResponse, Response};
use axum::routing::{MethodRouter, delete, get, post};
use axum::{Extension, Router};
use serde_json::{Value, json};

use crate::app::{App, seconds};
use crate::error::{ApiError, json_type};
use crate::fields::Fields;
use crate::hosted::Hosted;
use crate::texts::{Client, Work, answer};
use crate::traces::RequestSpan;
use crate::{
    anthropic, blocks, chat, completions, embeddings as vectors, info, items, page, responses, tokens,
};

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Verb {
    Get,
    /// Takes a JSON object.
    Post,
    Delete,
}

/// A route, which is there with and without `/v1`.
pub struct Route {
    pub path: &'static str,
    pub verb: Verb,
    pub summary: &'static str,
    handler: fn() -> MethodRouter<Arc<App>>,
}

const fn reads(path: &'static str, summary: &'static str, handler: fn() -> MethodRouter<Arc<App>>) -> Route {
    Route { path, verb: Verb::Get, summary, handler }
}

const fn takes(path: &'static str, summary: &'static str, handler: fn() -> MethodRouter<Arc<App>>) -> Route {
    Route { path, verb: Verb::Post, summary, handler }
}

const fn deletes(
    path: &'static str,
    summary: &'static str,
    handler: fn() -> MethodRouter<Arc<App>>,
) -> Route {
    Route { path, verb: Verb::Delete, summary, handler }
}

/// All there are, but for the description of them: the router and `/openapi.json` are made of them.
pub const ROUTES: &[Route] = &[
    takes("/chat/completions", "An answer to messages", || post(chat_completions)),
    takes("/completions", "The continuation of texts or token ids", || post(text_completions)),
    takes("/responses", "An answer, in the form of the Responses API", || post(responses)),
    reads("/responses/{id}", "An answer that is kept", || get(response)),
    deletes("/responses/{id}", "Forgets an answer", || delete(forget)),
    takes("/messages", "An answer to messages, in the form of Anthropic's API", || post(messages)),
    takes("/messages/count_tokens", "How many tokens the prompt of messages has", || post(count_tokens)),
    takes("/embeddings", "Vectors of texts", || post(embeddings)),
    takes("/rerank", "How well documents answer a query", || post(rerank)),
    takes("/tokenize", "Text to token ids", || post(tokenize)),
    takes("/detokenize", "Token ids to text", || post(detokenize)),
    takes("/apply-template", "Messages to the prompt that the model would read", || post(apply_template)),
    takes("/models/load", "Loads a model, in the place of the one of its name", || post(load)),
    takes("/models/unload", "Takes a model away", || post(unload)),
    takes("/load_lora_adapter", "Loads an adapter, as a model of its name", || post(load_adapter)),
    takes("/unload_lora_adapter", "Takes an adapter away", || post(unload_adapter)),
    reads("/models", "The models that are served", || get(models)),
    reads("/models/{model}", "A model that is served", || get(model)),
    reads("/health", "Whether requests are taken", || get(health)),
    reads("/metrics", "Counters, gauges and times in the text form of Prometheus", || get(metrics)),
    reads("/props", "Context, slots, sampling defaults", || get(props)),
    reads("/slots", "What runs in each slot", || get(slots)),
];

/// Everything that the server answers; bodies have a limit.
pub fn router(app: Arc<App>) -> Router {
    let body_limit = app.server.options.body_limit;
    let add = |all: Router<Arc<App>>, route: &Route| {
        let with = all.route(route.path, (route.handler)());
        with.route(&format!("/v1{}", route.path), (route.handler)())
    };
    let description = crate::openapi::description(ROUTES);
    let describe = move || std::future::ready(as_json(Ok(description.clone())));
    let all =
        Router::new().route("/openapi.json", get(describe.clone())).route("/v1/openapi.json", get(describe));
    let all = ROUTES.iter().fold(all, add).merge(page::routes());
    all.fallback(no_route)
        .method_not_allowed_fallback(wrong_method)
        .layer(DefaultBodyLimit::max(body_limit))
        .layer(from_fn_with_state(Arc::clone(&app), guard))
        .with_state(app)
}

/// Longest id of a request that is taken from its client.
const LONGEST_ID: usize = 128;

type Shared = State<Arc<App>>;
type Who = Extension<Client>;
type Body = Sent;

/// A body, or why there is none, and the span of its request.
struct Sent {
    bytes: Result<Bytes, ApiError>,
    span: RequestSpan,
}

impl FromRequest<Arc<App>> for Sent {
    type Rejection = Infallible;

    async fn from_request(request: Request, app: &Arc<App>) -> Result<Sent, Infallible> {
        let patience = app.server.options.read_timeout;
        let span = request.extensions().get::<RequestSpan>().cloned().unwrap_or_default();
        let whole = tokio::time::timeout(patience, Bytes::from_request(request, app)).await;
        Ok(Sent { bytes: whole.map_err(|_| ApiError::too_slow()).and_then(bytes), span })
    }
}

/// Routes that change what is served.
const CHANGES: [&str; 4] = ["/models/load", "/models/unload", "/load_lora_adapter", "/unload_lora_adapter"];

/// Asks for the key, counts, and gives the request its id.
async fn guard(State(app): Shared, mut request: Request, next: Next) -> Response {
    let begin = Instant::now();
    let (client, id) = (client(&request), request_id(&app, &request));
    request.extensions_mut().insert(client);
    let matched = request.extensions().get::<MatchedPath>().map(|path| path.as_str().to_owned());
    let path = matched.unwrap_or_else(|| "other".into());
    let span = app.server.options.traces.begin(&request, &path, &id);
    request.extensions_mut().insert(span.clone());
    let open = path == "/health" || path == "/v1/health" || page::is_route(&path);
    let changes = CHANGES.iter().any(|route| path.ends_with(route));
    let method = request.method().clone();
    let mut response = if changes && is_of_other_site(&request) {
        ApiError::other_site().into_response()
    } else if open || has_key(&request, &app.server.options.api_keys) {
        next.run(request).await
    } else {
        ApiError::unauthorized().into_response()
    };
    let status = response.status().as_u16();
    app.server.metrics.count_answer(&path, status);
    span.answered(status, response.extensions().get().copied());
    if let Some(log) = app.server.options.log {
        // Neither texts nor keys. A stream goes on after its head.
        let (client, ms) = (format!("{:016x}", client.0), begin.elapsed().as_secs_f64() * 1e3);
        let line = json!({"time": seconds(), "request": id, "client": client, "method": method.as_str(), "path": path, "status": status, "ms": ms});
        log(&line.to_string());
    }
    if let Ok(id) = HeaderValue::from_str(&id) {
        response.headers_mut().insert("x-request-id", id);
    }
    response
}

/// The client's own, if it is plain; else one of the server's.
fn request_id(app: &App, request: &Request) -> String {
    let own = request.headers().get("x-request-id").and_then(|value| value.to_str().ok());
    let plain = |id: &&str| {
        (1..=LONGEST_ID).contains(&id.len())
            && id.chars().all(|c| c.is_ascii_alphanumeric() || "-_.:".contains(c))
    };
    own.filter(plain).map_or_else(|| app.server.id("req"), str::to_owned)
}

/// Whether a page of another site sends the request: browsers say so.
fn is_of_other_site(request: &Request) -> bool {
    let site = request.headers().get("sec-fetch-site").and_then(|value| value.to_str().ok());
    site.is_some_and(|site| !["same-origin", "none"].contains(&site))
}

/// The key that a request brings, whether one is wanted or not.
fn key(request: &Request) -> Option<&str> {
    let text = |name: &str| request.headers().get(name).and_then(|value| value.to_str().ok());
    let bearer = text("authorization").and_then(|value| value.split_once(' '));
    let bearer = bearer.filter(|(scheme, _)| scheme.eq_ignore_ascii_case("bearer")).map(|(_, key)| key);
    // As Anthropic's clients send it.
    bearer.or_else(|| text("x-api-key"))
}

fn client(request: &Request) -> Client {
    let mut hasher = DefaultHasher::new();
    key(request).hash(&mut hasher);
    Client(hasher.finish())
}

/// Whether a request has one of the keys, if there are any. Takes equally long for every wrong key of an equal length.
fn has_key(request: &Request, keys: &[String]) -> bool {
    let given = key(request).unwrap_or_default();
    let same = |wanted: &String| {
        given.len() == wanted.len()
            && given.bytes().zip(wanted.bytes()).fold(0, |differs, (a, b)| differs | (a ^ b)) == 0
    };
    keys.is_empty() || keys.iter().fold(false, |found, wanted| found | same(wanted))
}

fn bytes(body: Result<Bytes, BytesRejection>) -> Result<Bytes, ApiError> {
    body.map_err(|rejection| match rejection.status() {
        StatusCode::PAYLOAD_TOO_LARGE => {
            let message = "the body is larger than the server's --body-limit";
            ApiError::request("body_too_large", message).status(StatusCode::PAYLOAD_TOO_LARGE)
        }
        _ => ApiError::request("invalid_body", rejection.body_text()),
    })
}

/// Runs what may take long beside the streams. A panic in it is an error of this request.
async fn aside<T: Send + 'static>(
    app: &Arc<App>,
    body: Body,
    work: impl FnOnce(&App, Fields) -> Result<T, ApiError> + Send + 'static,
) -> Result<T, ApiError> {
    let (app, body) = (Arc::clone(app), body.bytes?);
    let done = tokio::task::spawn_blocking(move || work(&app, Fields::parse(&body)?)).await;
    done.unwrap_or_else(|_| Err(ApiError::internal("internal error while the request was read")))
}

/// The same for requests of a model.
async fn of_model<T: Send + 'static>(
    app: &Arc<App>,
    body: Body,
    work: impl FnOnce(&Hosted, Fields) -> Result<T, ApiError> + Send + 'static,
) -> Result<(Arc<Hosted>, T), ApiError> {
    let span = body.span.clone();
    let work = move |app: &App, mut fields: Fields| {
        let name: Option<String> = fields.take("model", "the name of the model")?;
        let hosted = app.models.find(name.as_deref())?;
        span.asks_for(&hosted.name);
        work(&hosted, fields).map(|done| (hosted, done))
    };
    aside(app, body, work).await
}

fn as_json(result: Result<Value, ApiError>) -> Response {
    match result {
        Ok(value) => (json_type(), value.to_string()).into_response(),
        Err(error) => error.into_response(),
    }
}

async fn texts(
    app: Arc<App>,
    client: Client,
    body: Body,
    prepare: fn(&Hosted, Fields) -> Result<Work, ApiError>,
) -> Response {
    let span = body.span.clone();
    match of_model(&app, body, prepare).await {
        Ok((hosted, work)) => answer(hosted, client, span, work).await,
        Err(error) => error.into_response(),
    }
}

async fn chat_completions(State(app): Shared, Extension(client): Who, body: Body) -> Response {
    texts(app, client, body, chat::prepare).await
}

async fn text_completions(State(app): Shared, Extension(client): Who, body: Body) -> Response {
    texts(app, client, body, completions::prepare).await
}

async fn messages(State(app): Shared, Extension(client): Who, body: Body) -> Response {
    let span = body.span.clone();
    match of_model(&app, body, anthropic::prepare).await {
        Ok((hosted, asked)) => blocks::answer(hosted, client, span, asked).await,
        Err(error) => blocks::refused(&error),
    }
}

async fn responses(State(app): Shared, Extension(client): Who, body: Body) -> Response {
    let prepare = move |hosted: &Hosted, fields: Fields| responses::prepare(hosted, client, fields);
    let span = body.span.clone();
    match of_model(&app, body, prepare).await {
        Ok((hosted, asked)) => items::answer(hosted, client, span, asked).await,
        Err(error) => error.into_response(),
    }
}

async fn response(State(app): Shared, Extension(client): Who, Path(id): Path<String>) -> Response {
    as_json(app.server.kept.response(client, &id))
}

async fn forget(State(app): Shared, Extension(client): Who, Path(id): Path<String>) -> Response {
    as_json(app.server.kept.delete(client, &id))
}

async fn count_tokens(State(app): Shared, body: Body) -> Response {
    match of_model(&app, body, anthropic::count_tokens).await {
        Ok((_, count)) => as_json(Ok(count)),
        Err(error) => blocks::refused(&error),
    }
}

async fn value_of_model(
    app: Arc<App>,
    body: Body,
    work: fn(&Hosted, Fields) -> Result<Value, ApiError>,
) -> Response {
    as_json(of_model(&app, body, work).await.map(|(_, value)| value))
}

async fn tokenize(State(app): Shared, body: Body) -> Response {
    value_of_model(app, body, tokens::tokenize).await
}

async fn detokenize(State(app): Shared, body: Body) -> Response {
    value_of_model(app, body, tokens::detokenize).await
}

async fn apply_template(State(app): Shared, body: Body) -> Response {
    value_of_model(app, body, chat::apply_template).await
}

/// Asks a model of texts, which the answer names.
async fn of_texts(app: &Arc<App>, body: Body, work: fn(&App, Fields) -> Result<Value, ApiError>) -> Response {
    let span = body.span.clone();
    let done = aside(app, body, work).await;
    if let Ok(done) = &done {
        span.asks_for(done["model"].as_str().unwrap_or_default());
        span.embedded(done["usage"]["prompt_tokens"].as_u64());
    }
    as_json(done)
}

async fn embeddings(State(app): Shared, body: Body) -> Response {
    of_texts(&app, body, vectors::embed).await
}

async fn rerank(State(app): Shared, body: Body) -> Response {
    of_texts(&app, body, vectors::rerank).await
}

async fn load(State(app): Shared, body: Body) -> Response {
    as_json(aside(&app, body, |app, fields| app.models.load(fields)).await)
}

async fn unload(State(app): Shared, body: Body) -> Response {
    as_json(aside(&app, body, |app, fields| app.models.unload(fields)).await)
}

fn as_text(result: Result<String, ApiError>) -> Response {
    result.map_or_else(IntoResponse::into_response, IntoResponse::into_response)
}

async fn load_adapter(State(app): Shared, body: Body) -> Response {
    as_text(aside(&app, body, |app, fields| app.models.load_adapter(fields)).await)
}

async fn unload_adapter(State(app): Shared, body: Body) -> Response {
    as_text(aside(&app, body, |app, fields| app.models.unload_adapter(fields)).await)
}

async fn models(State(app): Shared) -> Response {
    as_json(Ok(json!({"object": "list", "data": app.list()})))
}

async fn model(State(app): Shared, Path(name): Path<String>) -> Response {
    as_json(app.describe(&name))
}

async fn health(State(app): Shared) -> Response {
    as_json(app.ready().map(|()| json!({"status": "ok"})))
}

async fn metrics(State(app): Shared) -> Response {
    let content = [(header::CONTENT_TYPE, "application/openmetrics-text; version=1.0.0; charset=utf-8")];
    // None of them ends between the two.
    let alive = app.models.alive();
    let stats: Vec<_> = alive.iter().map(|model| (model.base.clone(), model.engine.stats())).collect();
    match app.server.metrics.text(&stats) {
        Ok(text) => (content, text).into_response(),
        Err(error) => ApiError::internal(error.to_string()).into_response(),
    }
}

/// `?model=NAME`
#[derive(serde::Deserialize)]
struct Named {
    model: Option<String>,
}

type Wanted = Result<Query<Named>, QueryRejection>;

fn told(app: &App, wanted: Wanted, tell: fn(&Hosted) -> Value) -> Response {
    let wanted = wanted.map_err(|rejection| ApiError::request("invalid_query", rejection.body_text()));
    let hosted = wanted.and_then(|Query(wanted)| app.models.find(wanted.model.as_deref()));
    as_json(hosted.map(|hosted| tell(&hosted)))
}

async fn props(State(app): Shared, wanted: Wanted) -> Response {
    told(&app, wanted, info::props)
}

async fn slots(State(app): Shared, wanted: Wanted) -> Response {
    told(&app, wanted, info::slots)
}

async fn no_route(request: Request) -> ApiError {
    ApiError::no_route(request.method().as_str(), request.uri().path())
}

async fn wrong_method(request: Request) -> ApiError {
    ApiError::wrong_method(request.method().as_str(), request.uri().path())
}
