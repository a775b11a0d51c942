//! The server's life: what is checked before, what it listens on, how it ends.

use std::future::IntoFuture;
use std::net::{IpAddr, SocketAddr, TcpListener};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use mlcc_engine::conversation::ChatFormat;
use mlcc_engine::serving::{Engine, EngineOptions, ModelStep, Step};
use mlcc_engine::speculate::MakeDrafter;
use mlcc_engine::{SamplingParams, TokenId, Tokenizer};
use mlcc_runtime::Model;
use thiserror::Error;
use tokio::sync::Notify;

use crate::app::{App, seconds};
use crate::memory::{Need, mib, room};
use crate::metrics::Metrics;
use crate::routes::router;

/// Most sequences where nobody says how many.
const USUAL_SEQUENCES: usize = 16;
/// The same of a model that decodes one sequence at a time.
const USUAL_TURNS: usize = 4;
/// How often the end is looked for.
const LOOK: Duration = Duration::from_millis(20);
/// For the last bytes of answers, after all texts have ended.
const FAREWELL: Duration = Duration::from_secs(2);

/// What belongs to a model.
pub struct Served {
    /// What runs it: a CPU variant or a device.
    pub executor: String,
    pub tokenizer: Tokenizer,
    /// How messages become a prompt, if the model has that.
    pub format: Option<ChatFormat>,
    /// Where a request says nothing else.
    pub sampling: SamplingParams,
    /// Tokens that end a text.
    pub eos: Vec<TokenId>,
    /// As clients call it.
    pub name: String,
    /// Who drafts its texts.
    pub drafter: Option<MakeDrafter>,
}

#[derive(Debug, Clone)]
pub struct ServeOptions {
    pub host: IpAddr,
    /// 0: any free one.
    pub port: u16,
    /// Texts that run together; `None`: as many as fit, up to what the model decodes in one step.
    pub sequences: Option<usize>,
    /// Texts that may wait beside them.
    pub max_queue: usize,
    /// Bytes of memory that may be used; `None`: what is free.
    pub memory: Option<u64>,
    pub api_key: Option<String>,
    /// Bytes of a request's body.
    pub body_limit: usize,
    /// After which a text is ended.
    pub timeout: Option<Duration>,
    /// How long texts may go on when the server is told to stop.
    pub drain_timeout: Duration,
}

#[derive(Debug, Error)]
pub enum ServeError {
    #[error(
        "{sequences} sequences do not fit: {need}, and {origin} is {room}. Take fewer with --sequences, or build with a \
         smaller context (-c) or weight format (--quant)"
    )]
    TooLarge { sequences: usize, need: String, origin: String, room: String },
    #[error("cannot listen on {address}: {source}. Choose another one with --host and --port")]
    Listen { address: SocketAddr, source: std::io::Error },
    #[error(transparent)]
    Model(#[from] mlcc_runtime::Error),
    #[error("the server cannot run: {0}")]
    System(#[from] std::io::Error),
}

/// How a server ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Stopped {
    /// All texts had ended.
    Drained,
    /// Some were ended when there was no more time.
    Cut,
}

/// How many texts run together, after the memory was looked at.
fn sequences(model: &Model, options: &ServeOptions) -> Result<usize, ServeError> {
    let room = room(options.memory);
    let missing = |count: usize| {
        let need = Need::of(model, count, count);
        room.as_ref().filter(|room| need.total() > room.bytes).map(|room| ServeError::TooLarge {
            sequences: count,
            need: need.to_string(),
            origin: room.origin.clone(),
            room: mib(room.bytes),
        })
    };
    let wanted = match (options.sequences, model.max_batch()) {
        (Some(count), _) => return missing(count).map_or(Ok(count), Err),
        (None, 0 | 1) => USUAL_TURNS,
        (None, batch) => USUAL_SEQUENCES.min(batch as usize),
    };
    match (1..=wanted).rev().find(|&count| missing(count).is_none()) {
        Some(count) => Ok(count),
        None => missing(1).map_or(Ok(1), Err),
    }
}

/// Serves until `stop` is set, then ends in order. `ready` gets the address once requests are taken, and how many texts run
/// together.
pub fn serve(
    model: &Model,
    served: Served,
    options: &ServeOptions,
    stop: &AtomicBool,
    ready: impl FnOnce(SocketAddr, usize),
) -> Result<Stopped, ServeError> {
    let sequences = sequences(model, options)?;
    serve_step(ModelStep::new(model)?, served, sequences, options, stop, ready)
}

/// The same for any model that can do a step; `sequences` texts run together, for which there is memory.
pub fn serve_step(
    step: impl Step + 'static,
    served: Served,
    sequences: usize,
    options: &ServeOptions,
    stop: &AtomicBool,
    ready: impl FnOnce(SocketAddr, usize),
) -> Result<Stopped, ServeError> {
    let address = SocketAddr::new(options.host, options.port);
    let refused = |source| ServeError::Listen { address, source };
    let listener = TcpListener::bind(address).map_err(refused)?;
    listener.set_nonblocking(true).map_err(refused)?;
    let address = listener.local_addr().map_err(refused)?;
    let app = Arc::new(start(step, served, options, sequences)?);
    let runtime = tokio::runtime::Builder::new_current_thread().enable_io().enable_time().build()?;
    let stopped = runtime.block_on(async {
        let listener = tokio::net::TcpListener::from_std(listener)?;
        let close = Arc::new(Notify::new());
        let closed = Arc::clone(&close);
        let server = axum::serve(listener, router(Arc::clone(&app), options.body_limit))
            .with_graceful_shutdown(async move { closed.notified().await });
        let mut server = tokio::spawn(server.into_future());
        ready(address, sequences);
        while !stop.load(Ordering::Relaxed) {
            if server.is_finished() {
                return Err(ServeError::System(ended_early((&mut server).await)));
            }
            tokio::time::sleep(LOOK).await;
        }
        let stopped = drain(&app, options.drain_timeout).await;
        close.notify_one();
        // A connection that stays open ends with the runtime.
        let _ = tokio::time::timeout(FAREWELL, &mut server).await;
        Ok(stopped)
    });
    runtime.shutdown_timeout(FAREWELL);
    stopped
}

fn ended_early(ended: Result<std::io::Result<()>, tokio::task::JoinError>) -> std::io::Error {
    match ended {
        Ok(Err(error)) => error,
        Ok(Ok(())) => std::io::Error::other("it ended by itself"),
        Err(error) => std::io::Error::other(error),
    }
}

fn start(
    step: impl Step + 'static,
    served: Served,
    options: &ServeOptions,
    sequences: usize,
) -> Result<App, ServeError> {
    let tokenizer = Arc::new(served.tokenizer);
    let engine_options = EngineOptions {
        sequences,
        max_queue: options.max_queue,
        kept: sequences,
        ..EngineOptions::default()
    };
    let engine = Engine::start_drafting(step, Arc::clone(&tokenizer), engine_options, served.drafter)?;
    let ends = served.format.as_ref().map(|format| format.end_tokens(&tokenizer)).unwrap_or_default();
    let syntax = served.format.as_ref().map(ChatFormat::answer_syntax).unwrap_or_default();
    Ok(App {
        name: served.name,
        executor: served.executor,
        engine,
        grammars: OnceLock::new(),
        shows_control_tokens: syntax.has_control_tokens(&tokenizer),
        syntax,
        tokenizer,
        format: served.format,
        sampling: served.sampling,
        chat_eos: [served.eos.clone(), ends].concat(),
        eos: served.eos,
        sequences,
        max_queue: options.max_queue,
        timeout: options.timeout,
        api_key: options.api_key.clone(),
        metrics: Metrics::new(),
        draining: AtomicBool::new(false),
        started: seconds(),
        next: AtomicU64::new(0),
    })
}

/// Takes no more texts and waits for those that there are, until there is no more time.
async fn drain(app: &App, timeout: Duration) -> Stopped {
    app.draining.store(true, Ordering::Relaxed);
    app.engine.close();
    if idle(app, timeout).await {
        return Stopped::Drained;
    }
    app.engine.abandon();
    // One step at most, unless the model hangs.
    idle(app, FAREWELL).await;
    Stopped::Cut
}

async fn idle(app: &App, timeout: Duration) -> bool {
    let end = Instant::now() + timeout;
    while !app.engine.wait_idle(Duration::ZERO) {
        if Instant::now() >= end {
            return false;
        }
        tokio::time::sleep(LOOK).await;
    }
    true
}
