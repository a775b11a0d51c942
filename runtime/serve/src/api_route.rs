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

/// A route, which is there with and without `/v1`.
pub struct ApiRoute {
    pub path: &'static str,
    pub verb: RouteMethod,
    pub summary: &'static str,
    pub handler: fn() -> MethodRouter<Arc<AppState>>,
}

pub const fn reads(
    path: &'static str,
    summary: &'static str,
    handler: fn() -> MethodRouter<Arc<AppState>>,
) -> ApiRoute {
    ApiRoute { path, verb: RouteMethod::Get, summary, handler }
}

pub const fn takes(
    path: &'static str,
    summary: &'static str,
    handler: fn() -> MethodRouter<Arc<AppState>>,
) -> ApiRoute {
    ApiRoute { path, verb: RouteMethod::Post, summary, handler }
}

pub const fn deletes(
    path: &'static str,
    summary: &'static str,
    handler: fn() -> MethodRouter<Arc<AppState>>,
) -> ApiRoute {
    ApiRoute { path, verb: RouteMethod::Delete, summary, handler }
}
