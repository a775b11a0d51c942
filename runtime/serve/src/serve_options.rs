//! The options of a server, the reasons why it cannot start, and how it ends.

use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::path::PathBuf;
use std::time::Duration;

use mlcc_engine::serving::DiskCacheOptions;
use thiserror::Error;

use crate::traces::TraceExporter;

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
