//! A model that is served: its engine, and what requests need to know of it.

use std::sync::{Arc, OnceLock};

use mlcc_engine::chat::AnswerSyntax;
use mlcc_engine::conversation::ChatFormat;
use mlcc_engine::serving::{Engine, EngineOptions, Extras, Warn};
use mlcc_engine::{Grammar, GrammarCompiler, GrammarError, GrammarSpec, SamplingParams, TokenId, Tokenizer};

use crate::app::{Server, seconds};
use crate::error::ApiError;
use crate::library::{Ready, Served};

pub struct Hosted {
    /// As clients call the model.
    pub name: String,
    /// What runs the model: a CPU variant or a device.
    pub executor: String,
    pub engine: Engine,
    pub tokenizer: Arc<Tokenizer>,
    /// Made when the first grammar is asked for.
    grammars: OnceLock<Result<GrammarCompiler, GrammarError>>,
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
    /// Texts that run.
    pub sequences: usize,
    /// Bytes that it can need at most.
    pub need: u64,
    /// When it was loaded, in seconds since 1970.
    pub loaded: u64,
    pub server: Arc<Server>,
}

impl Hosted {
    /// Starts the engine.
    pub fn start(name: String, ready: Ready, server: &Arc<Server>) -> std::io::Result<Hosted> {
        let Ready { served, sequences, kept, need, start } = ready;
        let Served { executor, tokenizer, format, sampling, eos, drafter, draft: _ } = served;
        let tokenizer = Arc::new(tokenizer);
        let max_queue = server.options.max_queue;
        let options = EngineOptions { sequences, max_queue, kept, ..EngineOptions::default() };
        let warn = server.options.warn.map(|warn| -> Warn {
            let name = name.clone();
            Box::new(move |what| warn(&format!("{name}: {what}")))
        });
        let extras = Extras { drafter, files: server.options.prefixes.clone(), warn };
        let engine = start(Arc::clone(&tokenizer), options, extras)?;
        // Before anybody is told that it is there. A model that cannot do a step tells each request so.
        if let (Err(failure), Some(warn)) = (engine.warm_up(), server.options.warn) {
            warn(&format!("{name}: {failure}"));
        }
        let ends = format.as_ref().map(|format| format.end_tokens(&tokenizer)).unwrap_or_default();
        let syntax = format.as_ref().map(ChatFormat::answer_syntax).unwrap_or_default();
        Ok(Hosted {
            name,
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
            need,
            loaded: seconds(),
            server: Arc::clone(server),
        })
    }

    /// Compiles a grammar; may take seconds.
    pub fn grammar(&self, spec: &GrammarSpec) -> Result<Grammar, GrammarError> {
        let make = || GrammarCompiler::new(&self.tokenizer, self.engine.limits().vocab);
        self.grammars.get_or_init(make).as_ref().map_err(Clone::clone)?.compile(spec)
    }

    /// Whether new texts are taken.
    pub fn ready(&self) -> Result<(), ApiError> {
        self.server.ready()?;
        match self.engine.is_running() {
            true => Ok(()),
            false => Err(ApiError::shutting_down()),
        }
    }
}

impl Drop for Hosted {
    /// What it has counted stays in the sums.
    fn drop(&mut self) {
        self.server.metrics.keep(&self.name, &self.engine.stats());
    }
}
