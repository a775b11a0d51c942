//! State that all handlers share.

use std::collections::BTreeSet;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{SystemTime, UNIX_EPOCH};

use crate::embeddings::EmbeddingModels;
use crate::error::ApiError;
use crate::memory::request_memory;
use crate::metrics::ServerMetrics;
use crate::model_registry::{ModelRegistry, entry};
use crate::request_memory::RequestMemory;
use crate::responses::ResponseStore;
use crate::serve_options::ServeOptions;
use crate::served_model::ServedModel;
use serde_json::Value;

/// Most different warnings.
const MOST_WARNED: usize = 100;

pub struct AppState {
    pub models: ModelRegistry,
    /// Models of embeddings, and rerankers.
    pub embedding_models: EmbeddingModels,
    pub server: Arc<ServerState>,
}

impl AppState {
    /// All models, as `/v1/models` tells of them.
    pub fn list_models(&self) -> Vec<Value> {
        let texts =
            self.embedding_models.names().map(|name| entry(name, self.server.started, "loaded", None));
        // The library knows their artifacts too.
        let others = self.models.list().into_iter();
        let others = others.filter(|model| self.embedding_models.names().all(|name| model["id"] != name));
        others.chain(texts).collect()
    }

    /// The model that a request for a text names, or the first one.
    pub fn find_model(&self, name: Option<&str>) -> Result<Arc<ServedModel>, ApiError> {
        self.models.find_model(name).map_err(|error| {
            let of_texts = match name {
                Some(name) => self.embedding_models.route(name).map(|route| (name, route)),
                None if self.models.loaded().is_empty() => self.embedding_models.first(),
                None => None,
            };
            of_texts.map_or(error, |(name, route)| ApiError::writes_no_text(name, route))
        })
    }

    pub fn describe(&self, name: &str) -> Result<Value, ApiError> {
        let known = self.list_models().into_iter().find(|entry| entry["id"] == name);
        known.map_or_else(|| self.models.describe(name), Ok)
    }

    /// Checks that new requests are taken. A model that has lost its engine is refused by itself.
    pub fn check_ready(&self) -> Result<(), ApiError> {
        self.server.check_ready()?;
        match self.models.all_lost() {
            true => Err(ApiError::shutting_down()),
            false => Ok(()),
        }
    }
}

/// State that models share.
pub struct ServerState {
    pub options: ServeOptions,
    pub metrics: ServerMetrics,
    pub memory: RequestMemory,
    /// Answers that later requests may go on from.
    pub responses: ResponseStore,
    /// No new texts are taken.
    pub draining: AtomicBool,
    /// Warnings that were told.
    warned: Mutex<BTreeSet<String>>,
    /// Seconds since 1970.
    pub started: u64,
    /// Number of the next answer.
    next: AtomicU64,
}

impl ServerState {
    pub fn new(options: &ServeOptions) -> ServerState {
        ServerState {
            options: options.clone(),
            metrics: ServerMetrics::new(),
            memory: RequestMemory::new(request_memory(options)),
            responses: ResponseStore::default(),
            draining: AtomicBool::new(false),
            warned: Mutex::default(),
            started: unix_seconds(),
            next: AtomicU64::new(0),
        }
    }

    /// Sends a warning, if there is a receiver and it did not get this one before.
    pub fn warn_once(&self, warning: &str) {
        let Some(warn) = self.options.warn else { return };
        let mut told = self.warned.lock().unwrap_or_else(PoisonError::into_inner);
        // Clients choose a part of it.
        if told.len() < MOST_WARNED && told.insert(warning.to_owned()) {
            warn(warning);
        }
    }

    /// A name for an answer that no other one of this server has.
    pub fn next_id(&self, prefix: &str) -> String {
        format!("{prefix}-{:08x}{:08x}", self.started, self.next.fetch_add(1, Ordering::Relaxed))
    }

    /// The number of an answer, which no other one has.
    pub fn next_number(&self) -> u64 {
        (self.started << 20).wrapping_add(self.next.fetch_add(1, Ordering::Relaxed))
    }

    pub fn check_ready(&self) -> Result<(), ApiError> {
        match self.draining.load(Ordering::Relaxed) {
            true => Err(ApiError::shutting_down()),
            false => Ok(()),
        }
    }
}

/// Now, in seconds since 1970.
pub fn unix_seconds() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |time| time.as_secs())
}
