//! A server without a listener, for programs that bring requests themselves: language bindings, other servers.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use axum::Router;
use mlcc_engine::serving::{LaunchError, Sink, TextAdapter, TextRequest, Ticket};
use mlcc_engine::texts::TextModel;

use crate::adapters::AdapterError;
use crate::app::{App, Server};
use crate::embeddings::TextModels;
use crate::hosted::{Hosted, Loaded};
use crate::library::{Library, Ready};
use crate::memory::{Need, server_memory};
use crate::models::Models;
use crate::routes::router;
use crate::serve::{FAREWELL, ServeError, ServeOptions, Stopped};
use crate::sites::AllowedHosts;

/// Models with their engines, and what answers requests. Dropping it ends all texts.
#[derive(Clone)]
pub struct Application {
    pub(crate) app: Arc<App>,
}

impl Application {
    /// Starts the engines. Of `options`, host and port mean nothing here.
    pub fn start(
        models: Vec<(String, Ready)>,
        texts: Vec<(String, TextModel)>,
        library: Box<dyn Library>,
        options: &ServeOptions,
    ) -> Result<Application, ServeError> {
        let server = Arc::new(Server::new(options));
        let beside = texts
            .iter()
            .map(|(_, model)| Need::to_serve(model.model(), 0).total())
            .fold(server_memory(options), u64::saturating_add);
        let models = Models::start(models, library, beside, &server)?;
        Ok(Application { app: Arc::new(App { models, texts: TextModels::new(texts), server }) })
    }

    /// All routes; to be polled in a runtime of tokio with time.
    pub fn router(&self) -> Router {
        // Whoever listens knows the names of the server.
        let hosts = AllowedHosts::new(&self.app.server.options.allowed_hosts).any();
        router(Arc::clone(&self.app), hosts)
    }

    /// The model of requests that name none.
    pub fn model(&self) -> Option<Arc<Hosted>> {
        self.app.models.find(None).ok()
    }

    /// Those that are loaded, each adapter behind its model.
    pub fn models(&self) -> Vec<Arc<Hosted>> {
        self.app.models.loaded()
    }

    /// Adds an adapter of the first model, as a model of its own.
    pub fn add_adapter(&self, adapter: TextAdapter) -> Result<(), AdapterError> {
        match self.model() {
            Some(base) => self.app.models.add_adapter(&base, adapter),
            None => Err(AdapterError::NoModel),
        }
    }

    /// Takes an adapter away. Texts that run with it go on.
    pub fn remove_adapter(&self, name: &str) -> Result<(), AdapterError> {
        self.app.models.remove_adapter(name)
    }

    /// Queues texts of a model, all or none, each with who takes its events; they count in `/metrics`. The adapters of the requests are
    /// those of `hosted`.
    pub fn launch(
        &self,
        hosted: &Hosted,
        requests: Vec<(TextRequest, Sink)>,
    ) -> Result<Vec<Ticket>, LaunchError> {
        let watched = requests.into_iter().map(|(request, mut sink)| {
            let mut watch = hosted.watch();
            let sink: Sink = Box::new(move |event| {
                watch.see(&event);
                sink(event)
            });
            (TextRequest { adapter: hosted.adapter.clone(), ..request }, sink)
        });
        hosted.engine.launch_with(watched.collect())
    }

    /// Runs `work` with the first model of texts, after those who wait for it already; `None` if there is none.
    pub fn with_texts<T>(&self, work: impl FnOnce(&mut TextModel) -> T) -> Option<T> {
        self.app.texts.with_first(work)
    }

    /// Takes no more texts and waits for those that there are; those that run after `timeout` are ended.
    pub fn drain(&self, timeout: Duration) -> Stopped {
        self.app.server.draining.store(true, Ordering::Relaxed);
        let models = self.app.models.alive();
        models.iter().for_each(|hosted| hosted.engine.close());
        if idle(&models, timeout) {
            return Stopped::Drained;
        }
        models.iter().for_each(|hosted| hosted.engine.abandon());
        // One step at most, unless the model hangs.
        idle(&models, FAREWELL);
        Stopped::Cut
    }
}

fn idle(models: &[Arc<Loaded>], timeout: Duration) -> bool {
    let end = Instant::now() + timeout;
    models.iter().all(|hosted| hosted.engine.wait_idle(end.saturating_duration_since(Instant::now())))
}
