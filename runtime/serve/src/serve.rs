//! The server's life: what it listens on, how it ends.

use std::net::{SocketAddr, TcpListener};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use mlcc_engine::embedding::EmbeddingModel;
use tokio::sync::watch;

use crate::allowed_hosts::AllowedHosts;
use crate::app_state::AppState;
use crate::embedded_server::EmbeddedServer;
use crate::listen::listen;
use crate::model_library::{ModelLibrary, ReadyModel};
use crate::routes::router;
use crate::serve_options::{FAREWELL, ServeError, ServeOptions, ShutdownOutcome};
use crate::served_model::LoadedModel;

/// The interval of checks for the end.
const LOOK: Duration = Duration::from_millis(20);
/// The interval of checks whether large requests have freed memory.
const TRIM: Duration = Duration::from_secs(1);

/// Serves `models` by their names, and those of `library` that are asked for, until `stop` is set; then ends
/// in order. `ready` gets the address once requests are taken, and the names with how many texts run together
/// in each.
pub fn serve(
    models: Vec<(String, ReadyModel)>,
    library: Box<dyn ModelLibrary>,
    options: &ServeOptions,
    stop: &AtomicBool,
    ready: impl FnOnce(SocketAddr, &[(String, usize)]),
) -> Result<ShutdownOutcome, ServeError> {
    serve_with(models, Vec::new(), library, options, stop, ready)
}

/// The same with models of texts beside: embeddings and rerankers.
pub fn serve_with(
    models: Vec<(String, ReadyModel)>,
    texts: Vec<(String, EmbeddingModel)>,
    library: Box<dyn ModelLibrary>,
    options: &ServeOptions,
    stop: &AtomicBool,
    ready: impl FnOnce(SocketAddr, &[(String, usize)]),
) -> Result<ShutdownOutcome, ServeError> {
    let address = SocketAddr::new(options.host, options.port);
    let refused = |source| ServeError::Listen { address, source };
    let listener = TcpListener::bind(address).map_err(refused)?;
    listener.set_nonblocking(true).map_err(refused)?;
    let address = listener.local_addr().map_err(refused)?;
    let names: Vec<_> = models.iter().map(|(name, ready)| (name.clone(), ready.sequences)).collect();
    let app = EmbeddedServer::start(models, texts, library, options)?.app;
    let hosts = AllowedHosts::new(&options.allowed_hosts);
    let runtime = tokio::runtime::Builder::new_current_thread().enable_io().enable_time().build()?;
    let stopped = runtime.block_on(async {
        let listener = tokio::net::TcpListener::from_std(listener)?;
        let (close, closed) = watch::channel(());
        let mut server =
            tokio::spawn(listen(listener, router(Arc::clone(&app), hosts), options.read_timeout, closed));
        let trimming = tokio::spawn(trim(Arc::clone(&app)));
        ready(address, &names);
        while !stop.load(Ordering::Relaxed) {
            if server.is_finished() {
                return Err(ServeError::System(ended_early((&mut server).await)));
            }
            tokio::time::sleep(LOOK).await;
        }
        trimming.abort();
        let stopped = drain(&app, options.drain_timeout).await;
        drop(close);
        // A connection that stays open ends with the runtime.
        let _ = tokio::time::timeout(FAREWELL, &mut server).await;
        Ok(stopped)
    });
    runtime.shutdown_timeout(FAREWELL);
    // Engines write states to files before they end.
    for hosted in app.models.all_alive() {
        hosted.engine.close();
        while hosted.engine.is_running() {
            std::thread::sleep(LOOK);
        }
    }
    options.traces.finish();
    stopped
}

/// Gives memory back after large requests, now and then.
async fn trim(app: Arc<AppState>) {
    let Some(trim) = app.server.options.trim else { return };
    loop {
        tokio::time::sleep(TRIM).await;
        if app.server.memory.take_freed() {
            // Its panic changes nothing.
            let _ = tokio::task::spawn_blocking(trim).await;
        }
    }
}

fn ended_early(ended: Result<(), tokio::task::JoinError>) -> std::io::Error {
    match ended {
        Ok(()) => std::io::Error::other("it ended by itself"),
        Err(error) => std::io::Error::other(error),
    }
}

/// Takes no more texts and waits for those that there are, until there is no more time.
async fn drain(app: &AppState, timeout: Duration) -> ShutdownOutcome {
    app.server.draining.store(true, Ordering::Relaxed);
    let models = app.models.all_alive();
    models.iter().for_each(|hosted| hosted.engine.close());
    if idle(&models, timeout).await {
        return ShutdownOutcome::Drained;
    }
    models.iter().for_each(|hosted| hosted.engine.abandon());
    // One step at most, unless the model hangs.
    idle(&models, FAREWELL).await;
    ShutdownOutcome::Cut
}

async fn idle(models: &[Arc<LoadedModel>], timeout: Duration) -> bool {
    let end = Instant::now() + timeout;
    while !models.iter().all(|hosted| hosted.engine.wait_idle(Duration::ZERO)) {
        if Instant::now() >= end {
            return false;
        }
        tokio::time::sleep(LOOK).await;
    }
    true
}
