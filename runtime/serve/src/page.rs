//! The page at `/`: files of `page/`, which are part of the program. They need no build step and send
//! requests only to this server.

use std::hash::{DefaultHasher, Hash, Hasher};

use axum::Router;
use axum::http::{HeaderMap, HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use axum::routing::get;

use crate::error::ApiError;
use crate::request_body::PathSegment;

/// Nothing is loaded but the files below; strings never become markup or code.
const POLICY: &str = "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; \
    base-uri 'none'; form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'; trusted-types 'none'";

/// The text that clients of Ollama expect.
const OLLAMA: &str = "Ollama is running";

const HTML: &str = "text/html; charset=utf-8";
const STYLE: &str = "text/css; charset=utf-8";
const SCRIPT: &str = "text/javascript; charset=utf-8";

/// Name, type, content.
type PageFile = (&'static str, &'static str, &'static str);

const INDEX: PageFile = ("index.html", HTML, include_str!("../page/index.html"));
/// All but the page itself, at `/page/NAME`.
const FILES: &[PageFile] = &[
    ("style.css", STYLE, include_str!("../page/style.css")),
    ("icon.svg", "image/svg+xml", include_str!("../page/icon.svg")),
    ("main.js", SCRIPT, include_str!("../page/main.js")),
    ("answer.js", SCRIPT, include_str!("../page/answer.js")),
    ("api.js", SCRIPT, include_str!("../page/api.js")),
    ("dom.js", SCRIPT, include_str!("../page/dom.js")),
    ("markdown.js", SCRIPT, include_str!("../page/markdown.js")),
    ("settings.js", SCRIPT, include_str!("../page/settings.js")),
    ("store.js", SCRIPT, include_str!("../page/store.js")),
    ("view.js", SCRIPT, include_str!("../page/view.js")),
];

/// Routes without a key: the page holds no data, and has to ask for the key.
pub fn routes<S: Clone + Send + Sync + 'static>() -> Router<S> {
    let index = |headers: HeaderMap| std::future::ready(index(&headers));
    Router::new().route("/", get(index)).route("/page/{file}", get(file))
}

/// The page for browsers. Clients of Ollama look whether it runs, and ask for no HTML.
fn index(headers: &HeaderMap) -> Response {
    let accepts = headers.get(header::ACCEPT).and_then(|value| value.to_str().ok());
    let mut answer = match accepts {
        Some(kinds) if !kinds.contains("text/html") => OLLAMA.into_response(),
        _ => sent(&INDEX, headers),
    };
    answer.headers_mut().insert(header::VARY, HeaderValue::from_static("accept"));
    answer
}

/// True if a path, as routes match it, is one of the page's.
pub fn is_route(path: &str) -> bool {
    path == "/" || path == "/page/{file}"
}

async fn file(PathSegment(name): PathSegment, headers: HeaderMap) -> Response {
    match FILES.iter().find(|(file, ..)| *file == name) {
        Some(file) => sent(file, &headers),
        None => ApiError::no_route("GET", &format!("/page/{name}")).into_response(),
    }
}

/// The file, or nothing if the browser has it already.
fn sent((_, kind, content): &PageFile, headers: &HeaderMap) -> Response {
    let mut hasher = DefaultHasher::new();
    content.hash(&mut hasher);
    let tag = format!("\"{:016x}\"", hasher.finish());
    let known = headers.get(header::IF_NONE_MATCH).and_then(|value| value.to_str().ok());
    let known = known.is_some_and(|tags| tags.split(',').any(|known| known.trim() == tag));
    let head = [
        (header::CONTENT_TYPE, *kind),
        (header::ETAG, tag.as_str()),
        // Kept, but asked for each time: the next version has other files.
        (header::CACHE_CONTROL, "no-cache"),
        (header::CONTENT_SECURITY_POLICY, POLICY),
        (header::X_CONTENT_TYPE_OPTIONS, "nosniff"),
        (header::REFERRER_POLICY, "no-referrer"),
        (header::X_FRAME_OPTIONS, "DENY"),
    ];
    match known {
        true => (StatusCode::NOT_MODIFIED, head).into_response(),
        false => (head, *content).into_response(),
    }
}
