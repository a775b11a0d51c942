//! An HTTP server in the form of the OpenAI API, over compiled models.
//!
//! Each model has an engine, whose thread does the work ([`mlcc_engine::serving`]); one thread with an async
//! runtime reads requests and sends answers. Prompts are rendered and tokenized on threads of their own, so
//! that no stream waits for a long one.

mod adapters;
mod allowed_hosts;
mod anthropic;
mod api_route;
mod app_state;
mod chat;
mod chat_answer;
mod completions;
mod constraint;
mod embedded_server;
mod embeddings;
mod error;
mod error_form;
mod fields;
mod fill_in_middle;
mod generation;
mod info;
mod json_answer;
mod known_fields;
mod listen;
mod llama_cpp;
mod memory;
mod message_blocks;
mod messages;
mod metrics;
mod model_facts;
mod model_library;
mod model_registry;
mod ollama;
mod openapi;
mod page;
mod reasoning;
mod refused_routes;
mod request_body;
mod request_memory;
mod response_items;
mod response_shape;
mod responses;
mod routes;
mod samplers;
mod sampling;
mod serve;
mod serve_options;
mod served_model;
mod tokens;
mod tools;
mod traces;
mod unique_keys;

pub use adapters::{AdapterNameError, ReadAdapter};
pub use embedded_server::EmbeddedServer;
pub use memory::{
    ContainerMemory, MemoryLimit, container_memory, limit_beside, prefix_cache_states, server_memory,
};
pub use model_library::{LoadError, ModelLibrary, ModelSetup, NoLibrary, ReadyModel, embedding_memory};
pub use serve::{serve, serve_with};
pub use serve_options::{ServeError, ServeOptions, ShutdownOutcome};
pub use served_model::ServedModel;
pub use traces::{TraceExporter, TracesError};
