//! An HTTP server in the form of the OpenAI API, over compiled models.
//!
//! Each model has an engine, whose thread does the work ([`mlcc_engine::serving`]); one thread with an async runtime reads requests and sends answers.
//! Prompts are rendered and tokenized on threads of their own, so that nobody's stream waits for a long one.

mod adapters;
mod answers;
mod anthropic;
mod app;
mod application;
mod blocks;
mod budget;
mod chat;
mod completions;
mod constraint;
mod embeddings;
mod error;
mod fields;
mod hosted;
mod info;
mod items;
mod known_fields;
mod library;
mod listen;
mod memory;
mod messages;
mod metrics;
mod models;
mod openapi;
mod page;
mod reasoning;
mod responses;
mod routes;
mod samplers;
mod sampling;
mod serve;
mod shape;
mod sites;
mod strict;
mod texts;
mod tokens;
mod tools;
mod traces;

pub use adapters::{AdapterNameError, ReadAdapter};
pub use application::EmbeddedServer;
pub use hosted::ServedModel;
pub use library::{LoadError, ModelLibrary, ModelSetup, NoLibrary, ReadyModel, embedding_memory};
pub use memory::{ContainerMemory, container_memory, prefix_cache_states, server_memory};
pub use serve::{ServeError, ServeOptions, ShutdownOutcome, serve, serve_with};
pub use traces::{TraceExporter, TracesError};
