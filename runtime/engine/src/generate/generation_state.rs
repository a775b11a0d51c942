//! A text while it is being written: its tokens, sampling, and stop conditions.
//!
//! [`TextGenerator`](super::TextGenerator) computes the tokens of one text with a model of its own,
//! [`crate::serving`] those of many to one model. From equal logits both choose the same, because they choose
//! here.

use std::ops::ControlFlow;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::{Duration, Instant};

use mlcc_runtime::TokenCandidate;
use mlcc_text::stop::{StopCheck, StopMatcher};
use mlcc_text::{DecodeStream, Grammar, GrammarError, SpecialTokens, TokenId, Tokenizer};
use thiserror::Error;

use crate::generate::FinishReason;
use crate::sampler::{SampleError, Sampler};
use crate::speculate::{DraftLengthTuner, Drafter};

/// Conditions that end a text, besides its stop strings, its grammar and its reader.
#[derive(Debug, Clone)]
pub(crate) struct StopConditions {
    pub eos: Vec<TokenId>,
    pub max_tokens: Option<usize>,
    /// Tokens that fit into the model's context.
    pub context: Option<usize>,
}

/// A sampled token, for the receiver of the text.
pub(crate) struct EmittedToken<'a> {
    pub token: TokenId,
    /// The logits from which it was sampled; none where the top-k candidates were enough.
    pub logits: &'a [f32],
    /// The text that it adds, in whole characters; empty while it may become a stop string.
    pub text: &'a str,
}

/// The reasons why no token could be sampled.
#[derive(Debug, Error)]
pub(crate) enum SamplingError {
    #[error(transparent)]
    Sample(#[from] SampleError),
    #[error(transparent)]
    Grammar(#[from] GrammarError),
}

/// The outcome of some rows of logits.
pub(crate) struct SamplerOutput {
    /// The end of the text, if it has one.
    pub end: Result<Option<FinishReason>, SamplingError>,
    /// Drafts that were checked, and how many of the first were right.
    pub drafted: usize,
    pub accepted: usize,
}

pub(crate) struct GenerationState<'t> {
    /// Earlier tokens and the prompt, then sampled tokens, then drafts of what may come.
    tokens: Vec<TokenId>,
    drafts: usize,
    /// The number of sampled tokens.
    sampled_count: usize,
    stop_conditions: StopConditions,
    /// Prepared where a token is chosen, or before that on another thread.
    pub grammar: Option<Grammar>,
    sampler: Sampler,
    /// Chosen already, by [`GenerationState::sample_from_top_k`].
    sampled_early: Option<TokenId>,
    detokenizer: IncrementalDetokenizer<'t>,
    draft_length: DraftLengthTuner,
    drafted: usize,
    accepted: usize,
    sampling_time: Duration,
}

impl<'t> GenerationState<'t> {
    /// A text that goes on behind `tokens`.
    pub fn new(
        tokens: Vec<TokenId>,
        stop_conditions: StopConditions,
        mut sampler: Sampler,
        grammar: Option<Grammar>,
        detokenizer: IncrementalDetokenizer<'t>,
    ) -> Self {
        tokens.iter().for_each(|&token| sampler.accept(token));
        GenerationState {
            tokens,
            drafts: 0,
            sampled_count: 0,
            stop_conditions,
            grammar,
            sampler,
            sampled_early: None,
            detokenizer,
            draft_length: DraftLengthTuner::default(),
            drafted: 0,
            accepted: 0,
            sampling_time: Duration::ZERO,
        }
    }

    /// All tokens, drafts too.
    pub fn tokens(&self) -> &[TokenId] {
        &self.tokens
    }

    pub fn into_tokens(self) -> Vec<TokenId> {
        self.tokens
    }

    /// The tokens without drafts.
    pub fn accepted_tokens(&self) -> &[TokenId] {
        &self.tokens[..self.tokens.len() - self.drafts]
    }

    /// The number of tokens that fit without new memory.
    pub fn capacity(&self) -> usize {
        self.tokens.capacity()
    }

    /// The number of sampled tokens, with the one that ended the text.
    pub fn sampled_count(&self) -> usize {
        self.sampled_count
    }

    /// Tokens that end the text.
    pub fn eos(&self) -> &[TokenId] {
        &self.stop_conditions.eos
    }

    /// Tokens of drafts so far, and how many of them were right.
    pub fn draft_counts(&self) -> (usize, usize) {
        (self.drafted, self.accepted)
    }

    /// Time of choosing tokens.
    pub fn sampling_time(&self) -> Duration {
        self.sampling_time
    }

    pub fn seed(&self) -> u64 {
        self.sampler.seed()
    }

    /// Most tokens that are worth drafting now, where the last known one is computed behind `past` others.
    pub fn max_drafts(&self, past: usize) -> usize {
        let wanted = self
            .stop_conditions
            .max_tokens
            .map_or(usize::MAX, |max| max.saturating_sub(self.sampled_count + 1));
        let room =
            self.stop_conditions.context.map_or(usize::MAX, |context| context.saturating_sub(past + 1));
        self.draft_length.max_draft().min(wanted).min(room)
    }

    /// Appends at most `most` drafts of what comes next; none if the drafter panics.
    pub fn append_drafts(&mut self, text: usize, drafter: &mut dyn Drafter, most: usize) {
        self.keep_drafts(0);
        let known = self.tokens.len();
        let draft = AssertUnwindSafe(|| drafter.append_draft(text, &mut self.tokens, most));
        let most = if catch_unwind(draft).is_ok() { most } else { 0 };
        self.tokens.truncate(known + most);
        self.drafts = self.tokens.len() - known;
    }

    /// The number of tokens of drafts.
    pub fn draft_count(&self) -> usize {
        self.drafts
    }

    /// Drops all drafts but the first.
    pub fn keep_drafts(&mut self, count: usize) {
        let known = self.tokens.len() - self.drafts;
        self.drafts = self.drafts.min(count);
        self.tokens.truncate(known + self.drafts);
    }

    /// Samples the next token from the top-k candidates, for [`GenerationState::sample_rows`], which needs no
    /// logits then. False where these do not decide. There are no drafts.
    pub fn sample_from_top_k(&mut self, likeliest: &[TokenCandidate]) -> bool {
        if self.grammar.is_some() || self.stop_conditions.max_tokens == Some(0) {
            return false;
        }
        let begin = Instant::now();
        self.sampled_early = self.sampler.sample_from_top_k(likeliest);
        self.sampling_time += begin.elapsed();
        self.sampled_early.is_some()
    }

    /// Forgets a choice of a step that has failed.
    pub fn discard_sample(&mut self) {
        self.sampled_early = None;
    }

    /// Samples tokens from rows of `vocab` logits, of which the first is behind `past` tokens and each other
    /// behind a draft, as long as the drafts are the sampled tokens. `show` gets each token but one that ends
    /// the text, and may end it.
    pub fn sample_rows(
        &mut self,
        rows: &[f32],
        vocab: usize,
        past: usize,
        show: &mut dyn FnMut(EmittedToken<'_>) -> ControlFlow<()>,
    ) -> SamplerOutput {
        let (drafted, known) = (self.drafts, self.accepted_tokens().len());
        let mut accepted = 0;
        let (next, end) = loop {
            // The sampler says so if there are too few.
            let row = rows.chunks(vocab.max(1)).nth(accepted).unwrap_or_default();
            let (next, end) = match self.sample_row(row, past + accepted, show) {
                Ok((next, end)) => (next, Ok(end)),
                Err(error) => (None, Err(error)),
            };
            let right = accepted < drafted && next == Some(self.tokens[known + accepted]);
            if !right || !matches!(end, Ok(None)) {
                break (next, end);
            }
            accepted += 1;
        };
        self.draft_length.record_outcome(drafted, accepted);
        self.drafted += drafted;
        self.accepted += accepted;
        self.tokens.truncate(known + accepted);
        self.drafts = 0;
        self.tokens.extend(next);
        SamplerOutput { end, drafted, accepted }
    }

    /// Chooses the next token from logits behind `past` tokens, and says how the text has ended with it, if
    /// it has.
    fn sample_row(
        &mut self,
        logits: &[f32],
        past: usize,
        show: &mut dyn FnMut(EmittedToken<'_>) -> ControlFlow<()>,
    ) -> Result<(Option<TokenId>, Option<FinishReason>), SamplingError> {
        if self.stop_conditions.max_tokens == Some(0) {
            return Ok((None, Some(FinishReason::Length)));
        }
        let begin = Instant::now();
        let token = match self.sampled_early.take() {
            Some(token) => token,
            None => self.sample_token(logits)?,
        };
        self.sampling_time += begin.elapsed();
        self.sampler.accept(token);
        self.sampled_count += 1;
        Ok((Some(token), self.finish_reason(token, logits, past, show)))
    }

    fn sample_token(&mut self, logits: &[f32]) -> Result<TokenId, SamplingError> {
        let eos = &self.stop_conditions.eos;
        if let Some(grammar) = &mut self.grammar {
            grammar.prepare(eos)?;
        }
        let token = self.sampler.sample_within(logits, self.grammar.as_ref())?;
        match &mut self.grammar {
            Some(grammar) if !eos.contains(&token) => grammar.accept(token)?,
            _ => {}
        }
        Ok(token)
    }

    fn finish_reason(
        &mut self,
        token: TokenId,
        logits: &[f32],
        past: usize,
        show: &mut dyn FnMut(EmittedToken<'_>) -> ControlFlow<()>,
    ) -> Option<FinishReason> {
        if self.stop_conditions.eos.contains(&token) {
            return Some(FinishReason::Eos);
        }
        let StopCheck { text, stop } = self.detokenizer.push(token);
        if show(EmittedToken { token, logits, text }).is_break() {
            return Some(FinishReason::Cancelled);
        }
        if let Some(index) = stop {
            return Some(FinishReason::Stop(index));
        }
        if self.grammar.as_ref().is_some_and(Grammar::is_finished) {
            return Some(FinishReason::Grammar);
        }
        if self.stop_conditions.max_tokens.is_some_and(|max| self.sampled_count >= max) {
            return Some(FinishReason::Length);
        }
        self.stop_conditions.context.is_some_and(|context| past >= context).then_some(FinishReason::Context)
    }

    /// Ends the text: `on_text` gets the text that was held back, if it has a reader. The reason may become
    /// another one, if that ends with a stop string.
    pub fn finish(
        &mut self,
        reason: FinishReason,
        on_text: &mut dyn FnMut(&str) -> ControlFlow<()>,
    ) -> FinishReason {
        // After a stop string nothing is held back.
        if matches!(reason, FinishReason::Cancelled | FinishReason::Stop(_)) {
            return reason;
        }
        self.detokenizer.finish(reason, on_text)
    }
}

/// Tokens to the text that may be shown.
pub(crate) struct IncrementalDetokenizer<'t> {
    decoder: DecodeStream<'t>,
    stops: StopMatcher,
}

impl<'t> IncrementalDetokenizer<'t> {
    /// The detokenizer of a text that goes on where a prompt ends.
    pub fn new(tokenizer: &'t Tokenizer, stops: StopMatcher, special: SpecialTokens) -> Self {
        IncrementalDetokenizer { decoder: DecodeStream::continuing(tokenizer, special), stops }
    }

    fn push(&mut self, token: TokenId) -> StopCheck<'_> {
        match self.decoder.push(token) {
            Some(piece) => self.stops.push(piece),
            None => StopCheck { text: "", stop: None },
        }
    }

    fn finish(
        &mut self,
        reason: FinishReason,
        on_text: &mut dyn FnMut(&str) -> ControlFlow<()>,
    ) -> FinishReason {
        if let Some(piece) = self.decoder.finish() {
            let StopCheck { text, stop } = self.stops.push(piece);
            if !text.is_empty() && on_text(text).is_break() {
                return FinishReason::Cancelled;
            }
            if let Some(index) = stop {
                return FinishReason::Stop(index);
            }
        }
        let rest = self.stops.finish();
        if !rest.is_empty() && on_text(rest).is_break() {
            return FinishReason::Cancelled;
        }
        reason
    }
}
