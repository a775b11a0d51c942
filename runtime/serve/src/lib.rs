//! An HTTP server in the form of the OpenAI API, over one compiled model.
//!
//! The engine's thread does the work ([`mlcc_engine::serving`]); one thread with an async runtime reads requests and sends answers.
//! Prompts are rendered and tokenized on threads of their own, so that nobody's stream waits for a long one.

mod answers;
mod anthropic;
mod app;
mod blocks;
mod chat;
mod completions;
mod constraint;
mod error;
mod fields;
mod info;
mod memory;
mod messages;
mod metrics;
mod openapi;
mod page;
mod routes;
mod sampling;
mod serve;
mod shape;
mod texts;
mod tokens;
mod tools;

pub use serve::{ServeError, ServeOptions, Served, Stopped, serve, serve_step};
