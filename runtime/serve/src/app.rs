//! What all handlers share.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use mlcc_engine::chat::AnswerSyntax;
use mlcc_engine::conversation::ChatFormat;
use mlcc_engine::serving::Engine;
use mlcc_engine::{Grammar, GrammarCompiler, GrammarError, GrammarSpec, SamplingParams, TokenId, Tokenizer};

use crate::error::ApiError;
use crate::metrics::Metrics;

pub struct App {
    /// As clients call the model.
    pub name: String,
    /// What runs the model: a CPU variant or a device.
    pub executor: String,
    pub engine: Engine,
    pub tokenizer: Arc<Tokenizer>,
    /// Made when the first grammar is asked for.
    pub grammars: OnceLock<Result<GrammarCompiler, GrammarError>>,
    /// How messages become a prompt, if the model has that.
    pub format: Option<ChatFormat>,
    /// How answers are written, beside their text.
    pub syntax: AnswerSyntax,
    /// Whether that has control tokens.
    pub shows_control_tokens: bool,
    /// Where nothing else is asked for.
    pub sampling: SamplingParams,
    /// Tokens that end a text.
    pub eos: Vec<TokenId>,
    /// Those that end an answer as well.
    pub chat_eos: Vec<TokenId>,
    /// Texts that run, and texts that wait.
    pub sequences: usize,
    pub max_queue: usize,
    pub timeout: Option<Duration>,
    pub api_key: Option<String>,
    pub metrics: Metrics,
    /// No new texts are taken.
    pub draining: AtomicBool,
    /// Seconds since 1970.
    pub started: u64,
    /// Number of the next answer.
    pub next: AtomicU64,
}

impl App {
    /// A name for an answer that no other one of this server has.
    pub fn id(&self, prefix: &str) -> String {
        format!("{prefix}-{:08x}{:08x}", self.started, self.next.fetch_add(1, Ordering::Relaxed))
    }

    /// The number of an answer, which no other one has.
    pub fn number(&self) -> u64 {
        (self.started << 20).wrapping_add(self.next.fetch_add(1, Ordering::Relaxed))
    }

    /// Compiles a grammar; may take seconds.
    pub fn grammar(&self, spec: &GrammarSpec) -> Result<Grammar, GrammarError> {
        let make = || GrammarCompiler::new(&self.tokenizer, self.engine.limits().vocab);
        self.grammars.get_or_init(make).as_ref().map_err(Clone::clone)?.compile(spec)
    }

    /// Whether new texts are taken.
    pub fn ready(&self) -> Result<(), ApiError> {
        match self.draining.load(Ordering::Relaxed) || !self.engine.is_running() {
            true => Err(ApiError::shutting_down()),
            false => Ok(()),
        }
    }
}

/// Now, in seconds since 1970.
pub fn seconds() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |time| time.as_secs())
}
