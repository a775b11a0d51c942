//! Routes of other servers that this one has not: they say so, and what to do instead.

use std::sync::Arc;

use axum::Router;
use axum::routing::any;

use crate::app_state::AppState;
use crate::error::ApiError;

/// A path, and what its error says.
type RefusedRoute = (&'static str, &'static str);

const BUILD: &str = "build a model with `mlcc build`, and name it when the server starts or put it into the folder of \
    --models";
const SOUND: &str = "this server neither reads nor writes sound: /v1/chat/completions takes text";
const REFUSED: &[RefusedRoute] = &[
    ("/api/pull", BUILD),
    ("/api/push", "a model is a file: copy it"),
    ("/api/create", BUILD),
    ("/api/copy", "start the server with --alias, or load the artifact under another name with /models/load"),
    ("/api/delete", "/models/unload unloads a model; its file stays"),
    ("/api/blobs/{digest}", BUILD),
    ("/slots/{id}", "states stay in memory by themselves, and over a restart with --cache-dir"),
    ("/v1/slots/{id}", "states stay in memory by themselves, and over a restart with --cache-dir"),
    ("/audio/{*rest}", SOUND),
    ("/v1/audio/{*rest}", SOUND),
];

/// Adds them for any method.
pub fn add_routes(router: Router<Arc<AppState>>) -> Router<Arc<AppState>> {
    let add = |all: Router<Arc<AppState>>, (path, instead): &RefusedRoute| {
        let error = ApiError::refused_route(path.trim_end_matches("/{*rest}"), instead);
        all.route(path, any(move || std::future::ready(error.clone())))
    };
    REFUSED.iter().fold(router, add)
}

/// True if a path, as routes match it, is one of them.
pub fn is_route(path: &str) -> bool {
    REFUSED.iter().any(|(refused, _)| *refused == path)
}
