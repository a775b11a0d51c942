//! The server's life: what is checked before, what it listens on, how it ends.

use std::net::{IpAddr, Ipv4Addr, SocketAddr, TcpListener};
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use mlcc_engine::embedding::EmbeddingModel;
use mlcc_engine::serving::DiskCacheOptions;
use thiserror::Error;
use tokio::sync::watch;

use crate::allowed_hosts::AllowedHosts;
use crate::app_state::AppState;
use crate::embedded_server::EmbeddedServer;
use crate::listen::listen;
use crate::model_library::{ModelLibrary, ReadyModel};
use crate::routes::router;
use crate::served_model::LoadedModel;
use crate::traces::TraceExporter;

/// The interval of checks for the end.
const LOOK: Duration = Duration::from_millis(20);
/// The interval of checks whether large requests have freed memory.
const TRIM: Duration = Duration::from_secs(1);
/// Time for the last bytes of answers, after all texts have ended.
pub(crate) const FAREWELL: Duration = Duration::from_secs(2);

#[derive(Debug, Clone)]
pub struct ServeOptions {
    pub host: IpAddr,
    /// 0: any free one.
    pub port: u16,
    /// Texts that run together; `None`: as many as fit, up to the number that the model decodes in one step.
    pub sequences: Option<usize>,
    /// Requests that may be queued.
    pub max_queue: usize,
    /// Bytes of memory that may be used; `None`: what is free.
    pub memory: Option<u64>,
    /// API keys, of which a request has to bring one, if there are any. Clients of different keys take turns.
    pub api_keys: Vec<String>,
    /// Takes a line of JSON for each request.
    pub log: Option<fn(&str)>,
    /// Takes a line, once for each model, about what makes it slower than it could be.
    pub warn: Option<fn(&str)>,
    /// Bytes of a request's body.
    pub body_limit: usize,
    /// Bytes that all requests may need together; `None`: 256 MiB, and more where bodies may be large.
    pub request_memory: Option<u64>,
    /// Names by which clients call the server, beside addresses and `localhost`; `*` is any name.
    pub allowed_hosts: Vec<String>,
    /// Gives memory back to the system that large requests have freed. It may take a while.
    pub trim: Option<fn()>,
    /// The place of states of prompts for the next server.
    pub prefixes: Option<DiskCacheOptions>,
    /// Below which adapters lie that clients may load and unload; without it they may do neither.
    pub lora_dir: Option<PathBuf>,
    /// Time in which the head of a request has to come, and its body.
    pub read_timeout: Duration,
    /// Time after which a text is ended.
    pub timeout: Option<Duration>,
    /// Time for which texts may go on when the server is stopped.
    pub drain_timeout: Duration,
    /// The exporter of traces of requests.
    pub traces: TraceExporter,
}

impl Default for ServeOptions {
    /// The defaults of `mlcc serve`, on any free port of this machine alone.
    fn default() -> Self {
        ServeOptions {
            host: IpAddr::V4(Ipv4Addr::LOCALHOST),
            port: 0,
            sequences: None,
            max_queue: 64,
            memory: None,
            api_keys: Vec::new(),
            log: None,
            warn: None,
            body_limit: 8_000_000,
            request_memory: None,
            allowed_hosts: Vec::new(),
            trim: None,
            prefixes: None,
            lora_dir: None,
            read_timeout: Duration::from_secs(60),
            timeout: None,
            drain_timeout: Duration::from_secs(30),
            traces: TraceExporter::default(),
        }
    }
}

#[derive(Debug, Error)]
pub enum ServeError {
    #[error(
        "{sequences} sequences do not fit: {need}, and {origin} is {room}. Use fewer (--sequences), or fewer tokens \
         for all of them (--cache-tokens), or build with a smaller context (-c) or weight format (--quant)"
    )]
    TooLarge { sequences: usize, need: String, origin: String, room: String },
    #[error(
        "the embedding model {name} does not fit: {need}, and {origin} is {room}. Serve fewer models, or build it with \
         another weight format (--quant)"
    )]
    TextsTooLarge { name: String, need: String, origin: String, room: String },
    #[error("cannot listen on {address}: {source}. Choose another one with --host and --port")]
    Listen { address: SocketAddr, source: std::io::Error },
    #[error(transparent)]
    Model(#[from] mlcc_runtime::Error),
    #[error("the server cannot run: {0}")]
    System(#[from] std::io::Error),
}

/// The way in which a server ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ShutdownOutcome {
    /// All texts had ended.
    Drained,
    /// Some were ended when there was no more time.
    Cut,
}

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
