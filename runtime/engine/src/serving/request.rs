//! The input and the output of an engine.

use std::ops::ControlFlow;
use std::time::{Duration, Instant};

use compact_str::CompactString;
use mlcc_text::chat::StopGuard;
use mlcc_text::stop::{EmptyStop, StopMatcher};
use mlcc_text::{Grammar, GrammarError, SpecialTokens, TokenId};
use thiserror::Error;

use crate::generate::FinishReason;
use crate::sampler::{LogitChanges, Logprobs, ParamError, Sampler, SamplingParams};
use crate::serving::adapter::TextAdapter;
use crate::serving::model_runner::ModelLimits;

/// One text to write.
#[derive(Debug, Clone)]
pub struct EngineRequest {
    pub prompt: Vec<TokenId>,
    /// The model's adapter that the text is written with.
    pub adapter: Option<TextAdapter>,
    pub sampling: SamplingParams,
    /// Added to the logits of tokens before anything else; minus infinity bans one.
    pub bias: Vec<(TokenId, f32)>,
    /// The number of other tokens that are sampled before one of `eos` may be.
    pub min_tokens: usize,
    /// `None`: until something else ends the text.
    pub max_tokens: Option<usize>,
    /// Tokens that end the text.
    pub eos: Vec<TokenId>,
    /// The treatment of control tokens: they may be shown by their names. Those of `eos` never are.
    pub special: SpecialTokens,
    /// Texts that end the text; they are not part of it.
    pub stop: Vec<String>,
    /// Selects the parts of the text in which stop strings are looked for; none: all of it.
    pub stop_guard: Option<StopGuard>,
    /// The constraint on the text, from a [`crate::GrammarCompiler`] for the model's vocabulary.
    pub grammar: Option<Grammar>,
    /// Requests the probability of each sampled token, with this many of the top candidates.
    pub logprobs: Option<usize>,
    /// Requests the probability of each token of the prompt, with this many of the top candidates. The prompt
    /// is then read from its begin.
    pub prompt_logprobs: Option<usize>,
    /// Requests of lower numbers begin first.
    pub priority: i64,
    /// The client: waiting requests of different clients take turns.
    pub client: u64,
    /// The time at which the text is ended at the latest.
    pub deadline: Option<Instant>,
    /// True if states of earlier sequences may be used for the begin of the prompt.
    pub use_prefix_cache: bool,
    /// Numbers of tokens of the prompt with which others may begin, as those before a turn: of a model that
    /// cannot roll back the states there are kept. Numbers outside of the prompt mean nothing.
    pub cache_breakpoints: Vec<usize>,
}

impl EngineRequest {
    pub fn new(prompt: Vec<TokenId>, sampling: SamplingParams) -> Self {
        EngineRequest {
            prompt,
            adapter: None,
            sampling,
            bias: Vec::new(),
            min_tokens: 0,
            max_tokens: None,
            eos: Vec::new(),
            special: SpecialTokens::Skip,
            stop: Vec::new(),
            stop_guard: None,
            grammar: None,
            logprobs: None,
            prompt_logprobs: None,
            priority: 0,
            client: 0,
            deadline: None,
            use_prefix_cache: true,
            cache_breakpoints: Vec::new(),
        }
    }

    /// The sampler and the stop strings, if everything in the request can be done.
    pub(super) fn validate(&self, limits: &ModelLimits) -> Result<(Sampler, StopMatcher), LaunchError> {
        if self.prompt.is_empty() {
            return Err(LaunchError::EmptyPrompt);
        }
        if self.adapter.is_some() && !limits.adapters {
            return Err(LaunchError::NoAdapters);
        }
        let outside = |id: &TokenId| usize::try_from(*id).map_or(true, |id| id >= limits.vocab);
        if let Some(position) = self.prompt.iter().position(outside) {
            let id = self.prompt[position];
            return Err(LaunchError::PromptToken { position, id, vocab: limits.vocab });
        }
        let room = limits.context.into_iter().chain(limits.prompt).min();
        if let Some(most) = room.filter(|&most| self.prompt.len() > most) {
            return Err(LaunchError::PromptTooLong { prompt: self.prompt.len(), max: most });
        }
        if let Some(grammar) = self.grammar.as_ref().filter(|grammar| grammar.vocab() != limits.vocab) {
            let (expected, found) = (limits.vocab, grammar.vocab());
            return Err(GrammarError::Vocabulary { expected, found }.into());
        }
        let changes = LogitChanges {
            bias: self.bias.clone(),
            banned_until_min: self.eos.clone(),
            min_tokens: self.min_tokens,
        };
        let sampler = Sampler::with_changes(self.sampling.clone(), changes, limits.vocab)?;
        Ok((sampler, StopMatcher::guarded(&self.stop, self.stop_guard.clone())?))
    }
}

/// The reasons why a request is not taken. Nothing has happened then.
#[derive(Debug, Error, PartialEq)]
pub enum LaunchError {
    #[error("the prompt has no tokens")]
    EmptyPrompt,
    #[error(
        "the prompt has {prompt} tokens, but this model reads at most {max}: shorten the prompt, or build the model with a \
         larger context"
    )]
    PromptTooLong { prompt: usize, max: usize },
    #[error("token {position} of the prompt has id {id}, but the model's vocabulary has {vocab} entries")]
    PromptToken { position: usize, id: TokenId, vocab: usize },
    #[error("this model has no adapter slots: build it with --lora-slots")]
    NoAdapters,
    #[error(transparent)]
    Params(#[from] ParamError),
    #[error(transparent)]
    Stop(#[from] EmptyStop),
    #[error(transparent)]
    Grammar(#[from] GrammarError),
    #[error("{waiting} sequences are already waiting, at most {max} may wait: try again later")]
    QueueFull { waiting: usize, max: usize },
    #[error("the engine accepts no more requests: it is shutting down")]
    Closed,
}

/// The failures that end a text before its time.
#[derive(Debug, Clone, Error, PartialEq, Eq)]
pub enum RequestFailure {
    #[error("the model failed: {0}")]
    Model(String),
    #[error("internal error in the engine: {0}")]
    Panic(String),
    /// The request's grammar: it became too complex, or nothing that it allows can be chosen.
    #[error("{0}")]
    Grammar(String),
}

/// A token that was chosen.
#[derive(Debug, Clone, PartialEq)]
pub struct SampledToken {
    pub id: TokenId,
    /// Log probabilities, if the request asked for them.
    pub logprobs: Option<Logprobs>,
}

/// The part of the text that one token added.
#[derive(Debug, Clone, PartialEq)]
pub struct TextDelta {
    /// The text in whole characters; empty while it may become a stop string, or a character is not complete.
    pub text: CompactString,
    /// `None`: text that was held back, at the end.
    pub token: Option<SampledToken>,
}

/// The outcome of a request, besides the text.
#[derive(Debug, Clone, PartialEq)]
pub struct RequestSummary {
    pub reason: FinishReason,
    pub prompt_tokens: usize,
    /// Those of them that did not have to be computed.
    pub cached_tokens: usize,
    /// All chosen tokens, with the one that ended the text.
    pub completion_tokens: usize,
    /// Tokens of drafts, and how many of them were right.
    pub drafted_tokens: usize,
    pub accepted_tokens: usize,
    pub seed: u64,
    /// Time in the queue.
    pub queue_time: Duration,
    /// Time from there to the first token, with the steps of others.
    pub prefill_time: Duration,
    /// Time from there to the end.
    pub decode_time: Duration,
}

#[derive(Debug, Clone, PartialEq)]
pub enum SequenceEvent {
    /// The prompt has been read: the probabilities of its tokens (the first has no tokens before it), if they
    /// were requested.
    PromptLogprobs(Vec<Option<Logprobs>>),
    Delta(TextDelta),
    /// The last one, as [`SequenceEvent::Failed`].
    Finished(RequestSummary),
    Failed(RequestFailure),
}

/// Takes the events of one sequence in order, on the engine's thread or on a worker in its place: it must not
/// wait. `Break` ends the sequence.
pub type EventSink = Box<dyn FnMut(SequenceEvent) -> ControlFlow<()> + Send>;
