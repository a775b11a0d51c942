//! A server without a listener, for programs that bring requests themselves: language bindings, other
//! servers.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use axum::Router;
use mlcc_engine::embedding::EmbeddingModel;
use mlcc_engine::serving::{CancelGuard, EngineRequest, EventSink, LaunchError, TextAdapter};

use crate::adapters::AdapterNameError;
use crate::allowed_hosts::AllowedHosts;
use crate::app_state::{AppState, ServerState};
use crate::embeddings::EmbeddingModels;
use crate::memory::{MemoryNeed, server_memory};
use crate::model_library::{ModelLibrary, ReadyModel};
use crate::model_registry::ModelRegistry;
use crate::routes::router;
use crate::serve_options::{FAREWELL, ServeError, ServeOptions, ShutdownOutcome};
use crate::served_model::{LoadedModel, ServedModel};

/// Models with their engines, and what answers requests. Dropping it ends all texts.
#[derive(Clone)]
pub struct EmbeddedServer {
    pub(crate) app: Arc<AppState>,
}

impl EmbeddedServer {
    /// Starts the engines. Host and port of `options` mean nothing here.
    pub fn start(
        models: Vec<(String, ReadyModel)>,
        texts: Vec<(String, EmbeddingModel)>,
        library: Box<dyn ModelLibrary>,
        options: &ServeOptions,
    ) -> Result<EmbeddedServer, ServeError> {
        let server = Arc::new(ServerState::new(options));
        let beside = texts
            .iter()
            .map(|(_, model)| MemoryNeed::to_serve(model.model(), 0).total())
            .fold(server_memory(options), u64::saturating_add);
        let models = ModelRegistry::start(models, library, beside, &server)?;
        Ok(EmbeddedServer {
            app: Arc::new(AppState { models, embedding_models: EmbeddingModels::new(texts), server }),
        })
    }

    /// All routes; to be polled in a runtime of tokio with time.
    pub fn router(&self) -> Router {
        // The listener knows the names of the server.
        let hosts = AllowedHosts::new(&self.app.server.options.allowed_hosts).any();
        router(Arc::clone(&self.app), hosts)
    }

    /// The model of requests that name none.
    pub fn model(&self) -> Option<Arc<ServedModel>> {
        self.app.models.find_model(None).ok()
    }

    /// The loaded models, each with its adapters behind it.
    pub fn models(&self) -> Vec<Arc<ServedModel>> {
        self.app.models.loaded()
    }

    /// Adds an adapter of the first model, as a model of its own.
    pub fn add_adapter(&self, adapter: TextAdapter) -> Result<(), AdapterNameError> {
        match self.model() {
            Some(base) => self.app.models.add_adapter(&base, adapter),
            None => Err(AdapterNameError::NoModel),
        }
    }

    /// Unloads an adapter. Texts that run with it go on.
    pub fn remove_adapter(&self, name: &str) -> Result<(), AdapterNameError> {
        self.app.models.remove_adapter(name)
    }

    /// Queues requests of a model, all or none, each with the receiver of its events; they count in
    /// `/metrics`. The adapters of the requests are those of `hosted`.
    pub fn launch(
        &self,
        hosted: &ServedModel,
        requests: Vec<(EngineRequest, EventSink)>,
    ) -> Result<Vec<CancelGuard>, LaunchError> {
        let watched = requests.into_iter().map(|(request, mut sink)| {
            let mut watch = hosted.observe_latency();
            let sink: EventSink = Box::new(move |event| {
                watch.record_event(&event);
                sink(event)
            });
            (EngineRequest { adapter: hosted.adapter.clone(), ..request }, sink)
        });
        hosted.engine.launch_with(watched.collect())
    }

    /// Runs `work` with the first model of texts, after those that wait for it already; `None` if there is
    /// none.
    pub fn with_texts<T>(&self, work: impl FnOnce(&mut EmbeddingModel) -> T) -> Option<T> {
        self.app.embedding_models.with_first(work)
    }

    /// Takes no more texts and waits for those that there are; those that run after `timeout` are ended.
    pub fn drain(&self, timeout: Duration) -> ShutdownOutcome {
        self.app.server.draining.store(true, Ordering::Relaxed);
        let models = self.app.models.all_alive();
        models.iter().for_each(|hosted| hosted.engine.close());
        if idle(&models, timeout) {
            return ShutdownOutcome::Drained;
        }
        models.iter().for_each(|hosted| hosted.engine.abandon());
        // One step at most, unless the model hangs.
        idle(&models, FAREWELL);
        ShutdownOutcome::Cut
    }
}

fn idle(models: &[Arc<LoadedModel>], timeout: Duration) -> bool {
    let end = Instant::now() + timeout;
    models.iter().all(|hosted| hosted.engine.wait_idle(end.saturating_duration_since(Instant::now())))
}
