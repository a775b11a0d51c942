//! A route as data: the router and the description of the API are made of it.

use std::sync::Arc;

use axum::routing::MethodRouter;

use crate::app_state::AppState;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RouteMethod {
    Get,
    /// Takes a JSON object.
    Post,
    Delete,
}

/// A route.
pub struct ApiRoute {
    pub path: &'static str,
    pub verb: RouteMethod,
    pub summary: &'static str,
    /// True if the route is there with and without `/v1`.
    pub with_version: bool,
    pub handler: fn() -> MethodRouter<Arc<AppState>>,
}

pub const fn reads(
    path: &'static str,
    summary: &'static str,
    handler: fn() -> MethodRouter<Arc<AppState>>,
) -> ApiRoute {
    ApiRoute { path, verb: RouteMethod::Get, summary, with_version: true, handler }
}

pub const fn takes(
    path: &'static str,
    summary: &'static str,
    handler: fn() -> MethodRouter<Arc<AppState>>,
) -> ApiRoute {
    ApiRoute { path, verb: RouteMethod::Post, summary, with_version: true, handler }
}

pub const fn deletes(
    path: &'static str,
    summary: &'static str,
    handler: fn() -> MethodRouter<Arc<AppState>>,
) -> ApiRoute {
    ApiRoute { path, verb: RouteMethod::Delete, summary, with_version: true, handler }
}

impl ApiRoute {
    /// A route of an API that has no `/v1`.
    pub const fn unversioned(self) -> ApiRoute {
        ApiRoute { with_version: false, ..self }
    }

    /// All paths of the route.
    pub fn paths(&self) -> impl Iterator<Item = String> {
        let prefixes = if self.with_version { &["/v1", ""][..] } else { &[""] };
        prefixes.iter().map(|prefix| format!("{prefix}{}", self.path))
    }
}
