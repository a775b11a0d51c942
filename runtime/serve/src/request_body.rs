//! Bodies of requests, with their memory, and the work on them beside the streams.

use std::convert::Infallible;
use std::sync::Arc;

use axum::Extension;
use axum::extract::{FromRequest, FromRequestParts, Path, Request, State};
use axum::http::header;
use axum::http::request::Parts;
use futures_util::StreamExt;

use crate::app_state::{AppState, ServerState};
use crate::error::ApiError;
use crate::fields::RequestFields;
use crate::generation::ClientId;
use crate::request_memory::{MemoryLease, parsed_bytes};
use crate::served_model::ServedModel;
use crate::traces::RequestSpan;

/// The shared state, which handlers take besides a body and the client.
pub type SharedApp = State<Arc<AppState>>;
pub type ClientExtension = Extension<ClientId>;

/// The part of a path that a route leaves open.
pub struct PathSegment(pub String);

impl<S: Send + Sync> FromRequestParts<S> for PathSegment {
    type Rejection = ApiError;

    async fn from_request_parts(parts: &mut Parts, state: &S) -> Result<PathSegment, ApiError> {
        let segment = Path::<String>::from_request_parts(parts, state).await;
        segment
            .map(|Path(text)| PathSegment(text))
            .map_err(|rejection| ApiError::request("invalid_path", rejection.body_text()))
    }
}

/// A body with its memory, or why there is none, and the span of its request.
pub struct ReceivedBody {
    pub body: Result<(Vec<u8>, MemoryLease), ApiError>,
    pub span: RequestSpan,
}

impl FromRequest<Arc<AppState>> for ReceivedBody {
    type Rejection = Infallible;

    async fn from_request(request: Request, app: &Arc<AppState>) -> Result<ReceivedBody, Infallible> {
        let patience = app.server.options.read_timeout;
        let span = request.extensions().get::<RequestSpan>().cloned().unwrap_or_default();
        let whole = tokio::time::timeout(patience, read_body(request, &app.server)).await;
        Ok(ReceivedBody { body: whole.unwrap_or_else(|_| Err(ApiError::too_slow())), span })
    }
}

/// The body of a request as it comes, as far as it may be as long, and there is memory for it.
async fn read_body(request: Request, server: &ServerState) -> Result<(Vec<u8>, MemoryLease), ApiError> {
    let most = server.options.body_limit.min(server.memory.bodies.bytes());
    let told =
        request.headers().get(header::CONTENT_LENGTH).and_then(|length| length.to_str().ok()?.parse().ok());
    if told.is_some_and(|length: usize| length > most) {
        return Err(ApiError::body_too_large());
    }
    let busy = || ApiError::out_of_memory("bodies");
    let mut lease = server.memory.lease_body().ok_or_else(busy)?;
    let (mut bytes, mut chunks) = (Vec::new(), request.into_body().into_data_stream());
    while let Some(chunk) = chunks.next().await {
        let chunk = chunk.map_err(|error| ApiError::request("invalid_body", error.to_string()))?;
        let length = bytes.len() + chunk.len();
        if length > most {
            return Err(ApiError::body_too_large());
        }
        // The length that is known to come, else twice the present one.
        let room = told.unwrap_or(length.max(2 * bytes.capacity())).clamp(length, most);
        if room > bytes.capacity() {
            if !lease.grow_to(room.min(2 * length + (64 << 10)), &server.memory.bodies) {
                return Err(busy());
            }
            bytes.reserve_exact(room.min(2 * length + (64 << 10)) - bytes.len());
        }
        bytes.extend_from_slice(&chunk);
    }
    Ok((bytes, lease))
}

/// Runs what may take long beside the streams, when there is memory for it, which comes back with what was
/// done. A panic in it is an error of this request.
pub async fn run_blocking<T: Send + 'static>(
    app: &Arc<AppState>,
    body: ReceivedBody,
    work: impl FnOnce(&AppState, RequestFields, &mut MemoryLease) -> Result<T, ApiError> + Send + 'static,
) -> Result<(T, MemoryLease), ApiError> {
    let (app, (body, taken)) = (Arc::clone(app), body.body?);
    let begin = async {
        // The values, and what they become.
        let values = parsed_bytes(&body).saturating_mul(2);
        let texts = app.models.max_encoded_bytes(body.len());
        app.server.memory.lease_work(values.saturating_add(texts)).await
    };
    let begin = tokio::time::timeout(app.server.options.read_timeout, begin).await;
    let mut lease = begin.unwrap_or_else(|_| Err(ApiError::out_of_memory("requests")))?;
    let done = tokio::task::spawn_blocking(move || {
        let fields = RequestFields::parse(&body)?;
        drop((body, taken));
        work(&app, fields, &mut lease).map(|done| (done, lease))
    });
    done.await.unwrap_or_else(|_| Err(ApiError::internal("internal error while the request was read")))
}

/// The same for requests of a model.
pub async fn run_on_model<T: Send + 'static>(
    app: &Arc<AppState>,
    body: ReceivedBody,
    work: impl FnOnce(&ServedModel, RequestFields, &mut MemoryLease) -> Result<T, ApiError> + Send + 'static,
) -> Result<((Arc<ServedModel>, T), MemoryLease), ApiError> {
    let span = body.span.clone();
    let work = move |app: &AppState, mut fields: RequestFields, lease: &mut MemoryLease| {
        let name: Option<String> = fields.take_field("model", "the name of the model")?;
        let hosted = app.find_model(name.as_deref())?;
        span.asks_for(&hosted.name);
        work(&hosted, fields, lease).map(|done| (hosted, done))
    };
    run_blocking(app, body, work).await
}
