//! A model that is served: its engine, and what requests need to know of it. Its adapters are models of their
//! own to clients.

use std::ops::Deref;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

use mlcc_engine::conversation::ChatFormat;
use mlcc_engine::serving::{Engine, EngineExtras, EngineOptions, LaunchError, TextAdapter, WarningSink};
use mlcc_engine::{GrammarCompiler, SamplingParams};
use mlcc_text::chat::AnswerSyntax;
use mlcc_text::{Grammar, GrammarError, GrammarSpec, TokenId, Tokenizer};

use crate::adapters::ReadAdapter;
use crate::app_state::{ServerState, unix_seconds};
use crate::error::ApiError;
use crate::metrics::LatencyObserver;
use crate::model_facts::ModelFacts;
use crate::model_library::{ModelSetup, ReadyModel};

/// Bytes of memory that a byte of text needs at most while it becomes tokens. The library of `tokenizer.json`
/// needs most of them, where each byte is a token.
pub const ENCODING: usize = 160;

/// A model that clients call by a name: without an adapter, or with one.
pub struct ServedModel {
    pub name: String,
    pub adapter: Option<TextAdapter>,
    model: Arc<LoadedModel>,
}

impl ServedModel {
    /// The model, under its name and then with each of its adapters under theirs.
    pub fn from_loaded(model: Arc<LoadedModel>) -> Vec<Arc<ServedModel>> {
        let base = ServedModel { name: model.base.clone(), adapter: None, model: Arc::clone(&model) };
        // From here on only the list of models has them.
        let adapters = std::mem::take(&mut *model.adapters.lock().unwrap_or_else(PoisonError::into_inner));
        let adapted =
            adapters.into_iter().map(|adapter| ServedModel::with_adapter(Arc::clone(&model), adapter));
        std::iter::once(base).chain(adapted).map(Arc::new).collect()
    }

    /// A model with an adapter, under the name of that.
    pub fn with_adapter(model: Arc<LoadedModel>, adapter: TextAdapter) -> ServedModel {
        ServedModel { name: adapter.name().to_owned(), adapter: Some(adapter), model }
    }

    pub fn model(&self) -> &Arc<LoadedModel> {
        &self.model
    }

    /// The observer of a sequence that is launched now.
    pub fn observe_latency(&self) -> LatencyObserver {
        self.server.metrics.observe_latency(&self.name, self.base_model())
    }

    /// The name of the model without the adapter, of one that has an adapter.
    pub fn base_model(&self) -> Option<&str> {
        self.adapter.as_ref().map(|_| self.base.as_str())
    }
}

impl Deref for ServedModel {
    type Target = LoadedModel;

    fn deref(&self) -> &LoadedModel {
        &self.model
    }
}

/// A model in memory, whatever adapter its texts have.
pub struct LoadedModel {
    /// Its name without an adapter.
    pub base: String,
    /// The adapters that it was loaded with, until they have names.
    adapters: Mutex<Vec<TextAdapter>>,
    pub(crate) reads_adapters: Option<ReadAdapter>,
    /// The executor of the model: a CPU variant or a device.
    pub executor: String,
    pub engine: Engine,
    pub tokenizer: Arc<Tokenizer>,
    /// Made when the first grammar is asked for.
    grammars: OnceLock<Result<GrammarCompiler, GrammarError>>,
    /// The format that makes a prompt of messages, if the model has one.
    pub format: Option<ChatFormat>,
    /// The syntax of answers around their text.
    pub syntax: AnswerSyntax,
    /// True if the syntax has control tokens.
    pub shows_control_tokens: bool,
    /// The defaults of requests.
    pub sampling: SamplingParams,
    /// Tokens that end a text.
    pub eos: Vec<TokenId>,
    /// Tokens that end an answer as well.
    pub chat_eos: Vec<TokenId>,
    /// Texts that run.
    pub sequences: usize,
    /// Bytes of a text that may be a prompt; longer ones are too long whatever they are. `None`: nothing is
    /// known of that.
    most_text: Option<usize>,
    /// Bytes that it can need at most.
    pub need: u64,
    pub facts: ModelFacts,
    /// The time at which it was loaded, in seconds since 1970.
    pub loaded: u64,
    pub server: Arc<ServerState>,
}

impl LoadedModel {
    /// Starts the engine.
    pub fn start(name: String, ready: ReadyModel, server: &Arc<ServerState>) -> std::io::Result<LoadedModel> {
        let ReadyModel { served, sequences, prefix_cache_size: kept, needed_bytes: need, facts, start } =
            ready;
        let ModelSetup {
            executor,
            tokenizer,
            format,
            sampling,
            eos,
            drafter,
            draft: _,
            adapters,
            reads_adapters,
        } = served;
        let tokenizer = Arc::new(tokenizer);
        let max_queue = server.options.max_queue;
        let options = EngineOptions {
            max_sequences: sequences,
            max_queue,
            prefix_cache_size: kept,
            ..EngineOptions::default()
        };
        let warn = server.options.warn.map(|warn| -> WarningSink {
            let name = name.clone();
            Box::new(move |what| warn(&format!("{name}: {what}")))
        });
        let extras = EngineExtras { drafter, disk_cache: server.options.prefixes.clone(), warn };
        let engine = start(Arc::clone(&tokenizer), options, extras)?;
        // Before it is announced. A model that cannot do a step tells each request so.
        if let (Err(failure), Some(warn)) = (engine.warm_up(), server.options.warn) {
            warn(&format!("{name}: {failure}"));
        }
        let limits = engine.limits();
        let most_tokens = limits.context.into_iter().chain(limits.prompt).min();
        let most_text = most_tokens.zip(tokenizer.most_bytes_of_token());
        let most_text = most_text.map(|(tokens, bytes)| tokens.saturating_mul(bytes));
        let mut ends = format.as_ref().map(|format| format.end_tokens(&tokenizer)).unwrap_or_default();
        let syntax = format.as_ref().map(ChatFormat::answer_syntax).unwrap_or_default();
        ends.extend(syntax.end_tokens(&tokenizer));
        Ok(LoadedModel {
            base: name,
            adapters: Mutex::new(adapters),
            reads_adapters,
            executor,
            engine,
            grammars: OnceLock::new(),
            shows_control_tokens: syntax.has_control_tokens(&tokenizer),
            syntax,
            tokenizer,
            format,
            sampling,
            chat_eos: [eos.clone(), ends].concat(),
            eos,
            sequences,
            most_text,
            need,
            facts,
            loaded: unix_seconds(),
            server: Arc::clone(server),
        })
    }

    /// Compiles a grammar; may take seconds.
    pub fn compile_grammar(&self, spec: &GrammarSpec) -> Result<Grammar, GrammarError> {
        let make = || GrammarCompiler::new(&self.tokenizer, self.engine.limits().vocab);
        self.grammars.get_or_init(make).as_ref().map_err(Clone::clone)?.compile(spec)
    }

    /// The most bytes of memory that a prompt of a body of `body` bytes needs while it becomes tokens.
    /// Templates may write as much again.
    pub fn encoding_bytes(&self, body: usize) -> usize {
        let text = body.saturating_mul(2).saturating_add(4096);
        text.min(self.most_text.unwrap_or(usize::MAX)).saturating_mul(ENCODING)
    }

    /// Refuses a text that cannot be a prompt, or would need too much memory on the way to one.
    pub fn check_text(&self, param: &str, text: &str) -> Result<(), ApiError> {
        let (bytes, pool) = (text.len(), self.server.memory.work.bytes() / ENCODING);
        let most = self.most_text.unwrap_or(usize::MAX).min(pool);
        if bytes <= most {
            return Ok(());
        }
        let why =
            if most == pool { "that --request-memory has room for" } else { "that fit into its context" };
        let message = format!(
            "the text of the prompt has {bytes} bytes, but this model reads at most {most} {why}: shorten it"
        );
        Err(ApiError::field(param, "context_length_exceeded", message))
    }

    /// Refuses more tokens than a prompt has, as the engine does.
    pub fn check_tokens(&self, prompt: usize) -> Result<(), ApiError> {
        let limits = self.engine.limits();
        let most = limits.context.into_iter().chain(limits.prompt).min();
        match most.filter(|&most| prompt > most) {
            Some(most) => Err(LaunchError::PromptTooLong { prompt, max: most }.into()),
            None => Ok(()),
        }
    }

    /// Refuses more texts than the server ever takes together.
    pub fn check_count(&self, prompts: usize, choices: usize) -> Result<(), ApiError> {
        let (count, most) = (prompts.saturating_mul(choices), self.sequences + self.server.options.max_queue);
        if count <= most {
            return Ok(());
        }
        let message =
            format!("the request asks for {count} texts, but this server accepts at most {most} at a time");
        Err(ApiError::request("too_many_texts", message))
    }

    /// Checks that new requests are taken.
    pub fn check_ready(&self) -> Result<(), ApiError> {
        self.server.check_ready()?;
        match self.engine.is_running() {
            true => Ok(()),
            false => Err(ApiError::shutting_down()),
        }
    }
}

impl Drop for LoadedModel {
    /// Its counts stay in the sums.
    fn drop(&mut self) {
        self.server.metrics.add_retired(&self.base, &self.engine.stats());
    }
}
