//! Sources of models: the setup that starts one, and a library to load others from.

use std::sync::Arc;

use mlcc_engine::SamplingParams;
use mlcc_engine::conversation::ChatFormat;
use mlcc_engine::embedding::EmbeddingModel;
use mlcc_engine::serving::{
    CompiledModelRunner, Engine, EngineExtras, EngineOptions, ModelRunner, TextAdapter,
};
use mlcc_engine::speculate::MakeDrafter;
use mlcc_runtime::Model;
use mlcc_text::{TokenId, Tokenizer};
use thiserror::Error;

use crate::adapters::ReadAdapter;
use crate::memory::{MemoryNeed, WithDraft, limit_beside, mib, prefix_cache_states};
use crate::model_facts::ModelFacts;
use crate::serve_options::{ServeError, ServeOptions};

/// Most sequences by default.
const USUAL_SEQUENCES: usize = 16;
/// Most sequences, by default, of a model that decodes one sequence at a time.
const USUAL_TURNS: usize = 4;

/// The parts of a model.
pub struct ModelSetup {
    /// The executor: a CPU variant or a device.
    pub executor: String,
    pub tokenizer: Tokenizer,
    /// The format that makes a prompt of messages, if the model has one.
    pub format: Option<ChatFormat>,
    /// The defaults of a request.
    pub sampling: SamplingParams,
    /// Tokens that end a text.
    pub eos: Vec<TokenId>,
    /// The drafter of its texts.
    pub drafter: Option<MakeDrafter>,
    /// The model that does so, if it is one: it needs memory too.
    pub draft: Option<Model>,
    /// Adapters of the model, each of which clients call by its name.
    pub adapters: Vec<TextAdapter>,
    /// Reads further ones while the model runs.
    pub reads_adapters: Option<ReadAdapter>,
}

type EngineStarter =
    Box<dyn FnOnce(Arc<Tokenizer>, EngineOptions, EngineExtras) -> std::io::Result<Engine> + Send>;

/// A model that can be served.
pub struct ReadyModel {
    pub(crate) served: ModelSetup,
    /// Texts that run together.
    pub(crate) sequences: usize,
    /// States that are kept beside theirs.
    pub(crate) prefix_cache_size: usize,
    /// Bytes that it can need at most.
    pub(crate) needed_bytes: u64,
    pub(crate) facts: ModelFacts,
    pub(crate) start: EngineStarter,
}

impl ReadyModel {
    /// A compiled model, if there is memory for it beside models that can need `committed` bytes.
    pub fn from_model(
        model: &Model,
        served: ModelSetup,
        options: &ServeOptions,
        committed: u64,
    ) -> Result<ReadyModel, ServeError> {
        let (sequences, need) = sequences(model, served.draft.as_ref(), options, committed)?;
        let kept = prefix_cache_states(model, sequences);
        Ok(ReadyModel {
            needed_bytes: need,
            prefix_cache_size: kept,
            facts: ModelFacts::from_metadata(model.metadata()),
            ..ReadyModel::from_runner(CompiledModelRunner::new(model)?, served, sequences)
        })
    }

    /// Any model that can do a step; `sequences` texts run together, for which there is memory.
    pub fn from_runner(step: impl ModelRunner + 'static, served: ModelSetup, sequences: usize) -> ReadyModel {
        let start: EngineStarter =
            Box::new(move |tokenizer, options, extras| Engine::start_with(step, tokenizer, options, extras));
        ReadyModel {
            served,
            sequences,
            prefix_cache_size: sequences,
            needed_bytes: 0,
            facts: ModelFacts::default(),
            start,
        }
    }

    /// Bytes that it can need at most.
    pub fn need(&self) -> u64 {
        self.needed_bytes
    }
}

/// The number of sequences that run together, after the memory was checked, and the memory that they need.
fn sequences(
    model: &Model,
    draft: Option<&Model>,
    options: &ServeOptions,
    committed: u64,
) -> Result<(usize, u64), ServeError> {
    let room = limit_beside(options.memory, committed);
    let need = |count: usize| WithDraft {
        model: MemoryNeed::to_serve(model, count).with_files(model.plan(), options.prefixes.is_some()),
        draft: draft.map(|draft| MemoryNeed::to_draft(draft, count)),
    };
    let missing = |count: usize| {
        let need = need(count);
        room.as_ref().filter(|room| need.total() > room.bytes).map(|room| ServeError::TooLarge {
            sequences: count,
            need: need.to_string(),
            origin: describe_limit(&room.origin, committed),
            room: mib(room.bytes),
        })
    };
    let found = |count: usize| Ok((count, need(count).total()));
    let wanted = match (options.sequences, model.max_batch()) {
        (Some(count), _) => return missing(count).map_or_else(|| found(count), Err),
        (None, 0 | 1) => USUAL_TURNS,
        (None, batch) => USUAL_SEQUENCES.min(batch as usize),
    };
    match (1..=wanted).rev().find(|&count| missing(count).is_none()) {
        Some(count) => found(count),
        None => missing(1).map_or_else(|| found(1), Err),
    }
}

/// A limit less what requests and other models can need.
fn describe_limit(origin: &str, committed: u64) -> String {
    match committed {
        0 => origin.to_owned(),
        _ => format!("{origin} less {} for requests and other models", mib(committed)),
    }
}

/// The memory of a model of texts, if there is enough for it beside models that can need `committed` bytes.
pub fn embedding_memory(
    name: &str,
    model: &EmbeddingModel,
    options: &ServeOptions,
    committed: u64,
) -> Result<u64, ServeError> {
    let need = MemoryNeed::to_serve(model.model(), 0);
    match limit_beside(options.memory, committed).filter(|room| need.total() > room.bytes) {
        None => Ok(need.total()),
        Some(room) => Err(ServeError::TextsTooLarge {
            name: name.to_owned(),
            need: need.to_string(),
            origin: describe_limit(&room.origin, committed),
            room: mib(room.bytes),
        }),
    }
}

/// The reasons why an artifact is not loaded.
#[derive(Debug, Error)]
pub enum LoadError {
    #[error("this server has no artifact `{0}` to load")]
    Unknown(String),
    /// It is broken, not made for this machine, or too large.
    #[error("{0}")]
    Refused(String),
}

/// Artifacts that can be loaded while the server runs, by their names.
pub trait ModelLibrary: Send + Sync {
    /// The names in order.
    fn names(&self) -> Vec<String>;
    /// Loads one beside models that can need `committed` bytes.
    fn load(&self, name: &str, committed: u64) -> Result<ReadyModel, LoadError>;
}

/// No artifacts.
pub struct NoLibrary;

impl ModelLibrary for NoLibrary {
    fn names(&self) -> Vec<String> {
        Vec::new()
    }

    fn load(&self, name: &str, _: u64) -> Result<ReadyModel, LoadError> {
        Err(LoadError::Unknown(name.to_owned()))
    }
}
