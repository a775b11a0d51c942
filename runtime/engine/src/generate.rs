//! The loop from a prompt to a text.
//!
//! [`TextGenerator`] computes tokens with a [`LanguageModel`], samples, decodes to whole characters and looks
//! for the end: a token that ends the text, a stop string, the wished length, a full context, or a cancelled
//! request. The text that it has shown is always that of the tokens that it reports (less a stop string).
//!
//! A generator may go on with the same context ([`TextGenerator::generate`] again, for the next turn of a
//! chat). The last token of a text has been sampled but not computed by the model; it is computed first then,
//! unless it is a token that ends texts.

mod generation_state;

use std::ops::ControlFlow;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use mlcc_runtime::TokenCandidate;
use mlcc_text::stop::{EmptyStop, StopMatcher};
use mlcc_text::{Grammar, GrammarError, SpecialTokens, TokenId, Tokenizer};
use thiserror::Error;

use crate::sampler::{ParamError, SampleError, Sampler, SamplingParams};
use crate::speculate::Drafter;

pub(crate) use generation_state::{
    EmittedToken, GenerationState, IncrementalDetokenizer, SamplerOutput, SamplingError, StopConditions,
};

/// A loaded model with its state, as the generator needs it.
pub trait LanguageModel {
    type Error: std::error::Error + Send + Sync + 'static;

    /// Appends tokens to the context; the logits after the last one.
    fn prefill(&mut self, tokens: &[TokenId]) -> Result<&[f32], Self::Error>;
    /// Appends one token; the logits after it.
    fn decode(&mut self, token: TokenId) -> Result<&[f32], Self::Error>;
    /// Back to the empty context.
    fn reset(&mut self) -> Result<(), Self::Error>;
    /// Tokens in the context.
    fn past(&self) -> usize;
    /// Number of logits.
    fn vocab(&self) -> usize;
    /// The number of tokens that fit in the context; `None` if there is no limit (recurrent models).
    fn context(&self) -> Option<usize>;
    /// True if a prompt has to come in one call, and be read again from its begin when it goes on (prefix
    /// language models).
    fn needs_whole_prompts(&self) -> bool {
        false
    }
    /// The number of prompt tokens that are computed between two looks at the cancel flag.
    fn prefill_chunk(&self) -> usize {
        512
    }
    /// Appends a token and drafts of what may follow it; the logits behind each. A model that could not take
    /// drafts back appends the token alone, and its logits are one row.
    fn verify_drafts(&mut self, tokens: &[TokenId]) -> Result<&[f32], Self::Error> {
        self.decode(tokens[0])
    }
    /// Appends one token. A model that finds the top-k candidates by itself gives them to `enough` (see
    /// [`mlcc_runtime::Session::decode_top_k`]); `None` if that returned true. Else the logits after it.
    fn decode_top_k(
        &mut self,
        token: TokenId,
        enough: &mut dyn FnMut(&[TokenCandidate]) -> bool,
    ) -> Result<Option<&[f32]>, Self::Error> {
        let _ = enough;
        self.verify_drafts(&[token]).map(Some)
    }
    /// Keeps the first `past` tokens, of which only drafts may be missing.
    fn rollback(&mut self, past: usize) -> Result<(), Self::Error> {
        debug_assert_eq!(past, self.past());
        Ok(())
    }
}

/// A model that can go back in its context.
pub trait RewindModel: LanguageModel {
    /// A copy of the state.
    type Snapshot;

    /// True if [`RewindModel::truncate`] may stop elsewhere than at 0 (a recurrent state cannot).
    fn can_truncate(&self) -> bool;
    /// True if [`RewindModel::truncate`] would stop at `past`: a model with a window may have dropped what it
    /// needs.
    fn can_truncate_to(&self, past: usize) -> bool;
    /// Keeps the first `past` tokens of the context.
    fn truncate(&mut self, past: usize) -> Result<(), Self::Error>;
    fn snapshot(&self) -> Result<Self::Snapshot, Self::Error>;
    fn restore(&mut self, snapshot: &Self::Snapshot) -> Result<(), Self::Error>;
}

#[derive(Debug, Error)]
pub enum GenerateError {
    #[error("the prompt is empty: give some text with -p TEXT, with -f FILE, or on standard input")]
    EmptyPrompt,
    #[error(
        "the prompt has {prompt} tokens and {past} are in the context already, but this model was built for a context \
         of {context}: shorten the prompt, or build with a larger -c/--ctx-size"
    )]
    PromptTooLong { prompt: usize, past: usize, context: usize },
    #[error(
        "token {position} of the prompt has id {id}, but the model's vocabulary has {vocab} entries: use the tokenizer \
         of this model"
    )]
    PromptToken { position: usize, id: TokenId, vocab: usize },
    #[error(transparent)]
    Params(#[from] ParamError),
    #[error(transparent)]
    Stop(#[from] EmptyStop),
    #[error(transparent)]
    Sample(#[from] SampleError),
    #[error(transparent)]
    Grammar(#[from] GrammarError),
    #[error("the model failed: {0}")]
    Model(#[source] Box<dyn std::error::Error + Send + Sync>),
}

/// One text to generate.
#[derive(Debug, Clone)]
pub struct GenerationRequest<'a> {
    pub prompt: &'a [TokenId],
    pub sampling: SamplingParams,
    /// `None`: until something else ends the text.
    pub max_tokens: Option<usize>,
    /// Tokens that end the text (empty: none, as with `--ignore-eos`).
    pub eos: &'a [TokenId],
    pub stop: &'a [String],
    /// The constraint on the text, from a [`crate::GrammarCompiler`] for the model's vocabulary.
    pub grammar: Option<Grammar>,
    /// Set from elsewhere (a signal handler, another thread) to end the text early.
    pub cancel: Option<&'a AtomicBool>,
}

impl<'a> GenerationRequest<'a> {
    pub fn new(prompt: &'a [TokenId], sampling: SamplingParams) -> Self {
        GenerationRequest {
            prompt,
            sampling,
            max_tokens: None,
            eos: &[],
            stop: &[],
            grammar: None,
            cancel: None,
        }
    }

    fn is_cancelled(&self) -> bool {
        self.cancel.is_some_and(|flag| flag.load(Ordering::Relaxed))
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FinishReason {
    /// The model chose a token that ends the text.
    Eos,
    /// A stop string, by its number in the request.
    Stop(usize),
    /// The grammar allows nothing more ([`crate::serving::EngineRequest::grammar`]).
    Grammar,
    /// The wished number of tokens.
    Length,
    /// The model's context is full.
    Context,
    /// The flag was set, or the receiver of the text needs no more.
    Cancelled,
    /// There was no more time for it ([`crate::serving::EngineRequest::deadline`]).
    Deadline,
}

impl FinishReason {
    pub fn as_str(self) -> &'static str {
        match self {
            FinishReason::Eos => "eos",
            FinishReason::Stop(_) => "stop",
            FinishReason::Grammar => "grammar",
            FinishReason::Length => "length",
            FinishReason::Context => "context",
            FinishReason::Cancelled => "cancelled",
            FinishReason::Deadline => "deadline",
        }
    }
}

/// The result of a generation, besides the text.
#[derive(Debug, Clone)]
pub struct GenerationResult {
    /// All chosen tokens, with the one that ended the text.
    pub tokens: Vec<TokenId>,
    pub finish: FinishReason,
    /// Tokens computed before the first one was sampled.
    pub prompt_tokens: usize,
    pub prefill_time: Duration,
    /// Decode steps: without drafts one less than the chosen tokens, as the first comes from the prefill.
    pub decode_steps: usize,
    /// Tokens of drafts, and how many of them were right.
    pub drafted: usize,
    pub accepted: usize,
    /// Time of the decode steps with sampling and text.
    pub decode_time: Duration,
    /// Time of choosing tokens alone, the first one included.
    pub sampling_time: Duration,
    pub seed: u64,
}

impl GenerationResult {
    pub fn prefill_tokens_per_second(&self) -> f64 {
        tokens_per_second(self.prompt_tokens, self.prefill_time)
    }

    pub fn decode_tokens_per_second(&self) -> f64 {
        tokens_per_second(self.tokens.len().saturating_sub(1), self.decode_time)
    }
}

fn tokens_per_second(count: usize, time: Duration) -> f64 {
    if time.is_zero() { 0.0 } else { count as f64 / time.as_secs_f64() }
}

pub struct TextGenerator<M: LanguageModel> {
    model: M,
    /// The tokens computed since the last reset; the penalties of a next turn look at them too.
    computed_tokens: Vec<TokenId>,
    /// The last token of the text before, sampled but not computed.
    pending_token: Option<TokenId>,
    drafter: Option<Box<dyn Drafter>>,
}

impl<M: LanguageModel> TextGenerator<M> {
    /// `model` may have a context already (a state that was loaded).
    pub fn new(model: M) -> Self {
        TextGenerator { model, computed_tokens: Vec::new(), pending_token: None, drafter: None }
    }

    /// Lets texts be drafted, if the model can take drafts back. They stay the same.
    pub fn draft_with(&mut self, drafter: Box<dyn Drafter>) {
        self.drafter = Some(drafter);
    }

    pub fn model(&self) -> &M {
        &self.model
    }

    /// Tokens in the context now.
    pub fn past(&self) -> usize {
        self.model.past()
    }

    /// The model itself, for what does not change its context.
    pub fn model_mut(&mut self) -> &mut M {
        &mut self.model
    }

    /// The tokens computed since the last reset.
    pub fn computed_tokens(&self) -> &[TokenId] {
        &self.computed_tokens
    }

    /// Tells the tokens of the model's context, after a state was loaded into it.
    pub fn assume_computed(&mut self, fed: Vec<TokenId>) {
        self.pending_token = None;
        self.computed_tokens = fed;
    }

    pub fn into_model(self) -> M {
        self.model
    }

    pub fn reset(&mut self) -> Result<(), GenerateError> {
        self.pending_token = None;
        self.computed_tokens.clear();
        self.model.reset().map_err(model_error)
    }

    /// Computes the last token of the text before, if it is pending: the model's state is then that of the
    /// whole text. False if the context has no room for it.
    pub fn decode_pending(&mut self) -> Result<bool, GenerateError> {
        let Some(token) = self.pending_token else { return Ok(true) };
        if self.model.context().is_some_and(|context| self.past() >= context) {
            return Ok(false);
        }
        self.model.decode(token).map_err(model_error)?;
        self.pending_token = None;
        self.computed_tokens.push(token);
        Ok(true)
    }

    /// Forgets the pending token of the text before: the next prompt has it, or does not need it.
    pub fn drop_pending(&mut self) {
        self.pending_token = None;
    }

    /// Generates one text. `on_text` gets it piece by piece, in whole characters, and may end it.
    ///
    /// A request that is refused leaves the context as it was; after [`GenerateError::Model`] the context is
    /// unknown: [`TextGenerator::reset`] it.
    pub fn generate(
        &mut self,
        tokenizer: &Tokenizer,
        request: &GenerationRequest<'_>,
        mut on_text: impl FnMut(&str) -> ControlFlow<()>,
    ) -> Result<GenerationResult, GenerateError> {
        let sampler = Sampler::new(request.sampling.clone(), self.model.vocab())?;
        let text =
            IncrementalDetokenizer::new(tokenizer, StopMatcher::new(request.stop)?, SpecialTokens::Skip);
        self.check_prompt(request.prompt)?;
        let (expected, found) = (self.model.vocab(), request.grammar.as_ref().map(Grammar::vocab));
        if let Some(found) = found.filter(|&found| found != expected) {
            return Err(GrammarError::Vocabulary { expected, found }.into());
        }
        let eos = request.eos.to_vec();
        let ends = StopConditions { eos, max_tokens: request.max_tokens, context: self.model.context() };
        let mut fed = self.computed_tokens.len();
        let unfed = self.pending_token.take();
        let mut tokens = std::mem::take(&mut self.computed_tokens);
        tokens.extend(unfed.into_iter().chain(request.prompt.iter().copied()));
        let prompt = tokens.len();
        let mut text = GenerationState::new(tokens, ends, sampler, request.grammar.clone(), text);
        let mut result = self.run_to_end(&mut text, &mut fed, request, &mut on_text);
        let mut tokens = text.into_tokens();
        if let Ok(out) = &mut result {
            out.tokens = tokens[prompt..].to_vec();
            self.pending_token = match out.finish {
                _ if out.prompt_tokens == 0 => unfed,
                FinishReason::Eos => None,
                // The pending token of a prompt which was cancelled is not needed any more.
                _ => tokens.get(fed.max(prompt)).copied(),
            };
        }
        tokens.truncate(fed);
        self.computed_tokens = tokens;
        result
    }

    fn check_prompt(&self, prompt: &[TokenId]) -> Result<(), GenerateError> {
        if prompt.is_empty() {
            return Err(GenerateError::EmptyPrompt);
        }
        let vocab = self.model.vocab();
        let strange = |id: &TokenId| usize::try_from(*id).map_or(true, |id| id >= vocab);
        if let Some(position) = prompt.iter().position(strange) {
            return Err(GenerateError::PromptToken { position, id: prompt[position], vocab });
        }
        let past = self.past() + usize::from(self.pending_token.is_some());
        match self.model.context() {
            Some(context) if past + prompt.len() > context => {
                Err(GenerateError::PromptTooLong { prompt: prompt.len(), past, context })
            }
            Some(_) | None => Ok(()),
        }
    }

    /// Computes the tokens of a text, of which `fed` are in the context, and the sampled ones, to its end.
    /// The tokens are left in `text`.
    fn run_to_end(
        &mut self,
        text: &mut GenerationState<'_>,
        fed: &mut usize,
        request: &GenerationRequest<'_>,
        on_text: &mut dyn FnMut(&str) -> ControlFlow<()>,
    ) -> Result<GenerationResult, GenerateError> {
        let mut show = |shown: EmittedToken<'_>| {
            if !shown.text.is_empty() {
                on_text(shown.text)?;
            }
            if request.is_cancelled() { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
        };
        let (begin, before) = (Instant::now(), *fed);
        let mut end = self.prefill_prompt(text, fed, request, &mut show)?;
        let (prefill, prompt_tokens) = (begin.elapsed(), *fed - before);
        let (begin, mut decode_steps) = (Instant::now(), 0);
        let finish = loop {
            if let Some(reason) = end {
                break text.finish(reason, on_text);
            }
            end = self.decode_step(text, fed, &mut show)?;
            decode_steps += 1;
        };
        let (drafted, accepted) = text.draft_counts();
        Ok(GenerationResult {
            tokens: Vec::new(),
            finish,
            prompt_tokens,
            prefill_time: prefill,
            decode_steps,
            drafted,
            accepted,
            decode_time: begin.elapsed(),
            sampling_time: text.sampling_time(),
            seed: text.seed(),
        })
    }

    /// Computes the prompt and samples the first token; returns how the text ends, if it does.
    fn prefill_prompt(
        &mut self,
        text: &mut GenerationState<'_>,
        fed: &mut usize,
        request: &GenerationRequest<'_>,
        show: &mut dyn FnMut(EmittedToken<'_>) -> ControlFlow<()>,
    ) -> Result<Option<FinishReason>, GenerateError> {
        let (vocab, chunk) = (self.model.vocab(), self.model.prefill_chunk().max(1));
        let prompt = text.tokens().len();
        loop {
            if request.is_cancelled() {
                return Ok(Some(FinishReason::Cancelled));
            }
            let from = *fed;
            let past = self.model.past();
            *fed = prompt.min(from.saturating_add(chunk));
            let logits = self.model.prefill(&text.tokens()[from..*fed]).map_err(model_error)?;
            if *fed == prompt {
                return Ok(text.sample_rows(logits, vocab, past + *fed - from, show).end?);
            }
        }
    }

    /// Computes the last token, with drafts, and samples the next ones.
    fn decode_step(
        &mut self,
        text: &mut GenerationState<'_>,
        fed: &mut usize,
        show: &mut dyn FnMut(EmittedToken<'_>) -> ControlFlow<()>,
    ) -> Result<Option<FinishReason>, GenerateError> {
        let (vocab, past) = (self.model.vocab(), self.model.past());
        let most = text.max_drafts(past);
        if let Some(drafter) = self.drafter.as_deref_mut().filter(|_| most > 0) {
            text.append_drafts(0, drafter, most);
        }
        let logits = match text.tokens()[*fed..] {
            [token] => {
                let enough = &mut |likeliest: &[TokenCandidate]| text.sample_from_top_k(likeliest);
                self.model.decode_top_k(token, enough).map(Option::unwrap_or_default)
            }
            ref tokens => self.model.verify_drafts(tokens),
        };
        let logits = logits.map_err(model_error)?;
        text.keep_drafts((logits.len() / vocab).saturating_sub(1));
        let SamplerOutput { end, accepted, .. } = text.sample_rows(logits, vocab, past + 1, show);
        *fed += 1 + accepted;
        self.model.rollback(past + 1 + accepted).map_err(model_error)?;
        Ok(end?)
    }
}

impl<M: RewindModel> TextGenerator<M> {
    /// Keeps the first `past` tokens of the context; the model must be able to
    /// ([`RewindModel::can_truncate`]).
    pub fn truncate(&mut self, past: usize) -> Result<(), GenerateError> {
        self.pending_token = None;
        self.model.truncate(past).map_err(model_error)?;
        self.computed_tokens.truncate(past);
        Ok(())
    }

    pub fn snapshot(&self) -> Result<M::Snapshot, GenerateError> {
        self.model.snapshot().map_err(model_error)
    }

    /// Goes back to a snapshot that was taken when `fed` tokens were in the context.
    pub fn restore(&mut self, snapshot: &M::Snapshot, fed: usize) -> Result<(), GenerateError> {
        self.pending_token = None;
        self.model.restore(snapshot).map_err(model_error)?;
        self.computed_tokens.truncate(fed);
        Ok(())
    }
}

impl From<SamplingError> for GenerateError {
    fn from(error: SamplingError) -> Self {
        match error {
            SamplingError::Sample(error) => error.into(),
            SamplingError::Grammar(error) => error.into(),
        }
    }
}

fn model_error(error: impl std::error::Error + Send + Sync + 'static) -> GenerateError {
    GenerateError::Model(Box::new(error))
}
