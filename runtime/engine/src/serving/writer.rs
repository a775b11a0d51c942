//! One text of an engine, from its prompt to its end.

use std::ops::ControlFlow;
use std::time::{Duration, Instant};

use crate::generate::{FinishReason, TextOut};
use crate::grammar::{Grammar, GrammarError};
use crate::sampler::{Logprobs, SampleError, Sampler, logprobs};
use crate::serving::queue::Job;
use crate::serving::request::{Chosen, Event, Failure, Finished, Piece, Sink, TextRequest};
use crate::serving::step::Limits;
use crate::tokenizer::{TokenId, Tokenizer};

/// What a text does now.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Phase {
    /// Its prompt is being read.
    Reading,
    /// Another text reads the same prompt.
    Waiting { twin: u64 },
    /// This token has been chosen and comes next.
    Writing(TokenId),
}

pub(super) struct Writer<'t> {
    pub id: u64,
    pub slot: usize,
    pub request: TextRequest,
    pub phase: Phase,
    pub cached: usize,
    pub prompt_logprobs: Vec<Option<Logprobs>>,
    sampler: Sampler,
    text: TextOut<'t>,
    sink: Sink,
    cancel: std::sync::Arc<std::sync::atomic::AtomicBool>,
    chosen: usize,
    launched: Instant,
    admitted: Instant,
    first: Option<Instant>,
}

impl<'t> Writer<'t> {
    pub fn new(job: Job, slot: usize, phase: Phase, cached: usize, tokenizer: &'t Tokenizer) -> Self {
        let mut sampler = job.sampler;
        job.request.prompt.iter().for_each(|&token| sampler.accept(token));
        Writer {
            id: job.id,
            slot,
            phase,
            cached,
            prompt_logprobs: Vec::new(),
            sampler,
            text: TextOut::new(tokenizer, job.stops, job.request.special),
            sink: job.sink,
            cancel: job.cancel,
            chosen: 0,
            launched: job.launched,
            admitted: Instant::now(),
            first: None,
            request: job.request,
        }
    }

    /// Whether somebody has ended it.
    pub fn ended(&self) -> Option<FinishReason> {
        if self.cancel.load(std::sync::atomic::Ordering::Relaxed) {
            return Some(FinishReason::Cancelled);
        }
        let late = self.request.deadline.is_some_and(|deadline| Instant::now() >= deadline);
        late.then_some(FinishReason::Deadline)
    }

    /// The prompt has been read.
    pub fn prompt_is_read(&mut self) {
        self.first = Some(Instant::now());
        if self.request.prompt_logprobs.is_some() {
            let event = Event::Prompt(std::mem::take(&mut self.prompt_logprobs));
            if (self.sink)(event).is_break() {
                self.cancel.store(true, std::sync::atomic::Ordering::Relaxed);
            }
        }
    }

    /// Computes what the grammar allows next. This needs no logits, so it can be done while the model computes them.
    pub fn prepare(&mut self) {
        if let Some(grammar) = &mut self.request.grammar {
            // An error comes again where the token is chosen.
            let _ = grammar.prepare(&self.request.eos);
        }
    }

    /// Chooses the next token from logits behind `past` tokens; the reason if the text has ended with it. The order of the
    /// questions is that of [`crate::Generator`].
    pub fn write(
        &mut self,
        logits: &[f32],
        past: usize,
        limits: &Limits,
    ) -> Result<Option<FinishReason>, Failure> {
        if self.request.max_tokens == Some(0) {
            return Ok(Some(FinishReason::Length));
        }
        let token = self.choose(logits)?;
        self.sampler.accept(token);
        self.chosen += 1;
        self.phase = Phase::Writing(token);
        if self.request.eos.contains(&token) {
            return Ok(Some(FinishReason::Eos));
        }
        let logprobs = self.request.logprobs.and_then(|top| logprobs(logits, token, top));
        if let ControlFlow::Break(reason) = self.show(Chosen { id: token, logprobs }) {
            return Ok(Some(reason));
        }
        if self.request.grammar.as_ref().is_some_and(Grammar::is_finished) {
            return Ok(Some(FinishReason::Grammar));
        }
        if self.request.max_tokens.is_some_and(|max| self.chosen >= max) {
            return Ok(Some(FinishReason::Length));
        }
        Ok(limits.context.is_some_and(|context| past >= context).then_some(FinishReason::Context))
    }

    fn choose(&mut self, logits: &[f32]) -> Result<TokenId, Failure> {
        let of_grammar = |error: GrammarError| Failure::Grammar(error.to_string());
        if let Some(grammar) = &mut self.request.grammar {
            grammar.prepare(&self.request.eos).map_err(of_grammar)?;
        }
        let token = self.sampler.sample_within(logits, self.request.grammar.as_ref());
        let token = token.map_err(|error| match error {
            SampleError::NothingAllowed => Failure::Grammar(error.to_string()),
            SampleError::Length { .. } | SampleError::NoFiniteLogit { .. } => {
                Failure::Model(error.to_string())
            }
        })?;
        match &mut self.request.grammar {
            Some(grammar) if !self.request.eos.contains(&token) => {
                grammar.accept(token).map_err(of_grammar)?;
            }
            _ => {}
        }
        Ok(token)
    }

    fn show(&mut self, token: Chosen) -> ControlFlow<FinishReason> {
        let mut text = String::new();
        let id = token.id;
        let flow = self.text.push(id, &mut |piece: &str| {
            text.push_str(piece);
            ControlFlow::Continue(())
        });
        if (self.sink)(Event::Piece(Piece { text, token: Some(token) })).is_break() {
            return ControlFlow::Break(FinishReason::Cancelled);
        }
        flow
    }

    /// Ends the text; what was held back is shown, if anybody wants it. The reason may become another one.
    pub fn finish(mut self, mut reason: FinishReason) -> FinishReason {
        let cut = matches!(reason, FinishReason::Cancelled | FinishReason::Stop(_));
        if !cut {
            let mut text = String::new();
            reason = self.text.finish(reason, &mut |piece: &str| {
                text.push_str(piece);
                ControlFlow::Continue(())
            });
            if !text.is_empty() && (self.sink)(Event::Piece(Piece { text, token: None })).is_break() {
                reason = FinishReason::Cancelled;
            }
        }
        let now = Instant::now();
        let first = self.first.unwrap_or(now);
        let finished = Finished {
            reason,
            prompt_tokens: self.request.prompt.len(),
            cached_tokens: self.cached,
            completion_tokens: self.chosen,
            seed: self.sampler.seed(),
            waited: self.admitted.saturating_duration_since(self.launched),
            reading: first.saturating_duration_since(self.admitted),
            writing: now.saturating_duration_since(first),
        };
        // Whether anybody listens makes no difference any more.
        let _ = (self.sink)(Event::Finished(finished));
        reason
    }

    pub fn fail(mut self, failure: Failure) {
        let _ = (self.sink)(Event::Failed(failure));
    }
}

/// Ends a request that never ran.
pub(super) fn end_unread(mut job: Job) {
    let reason = if job.too_late() { FinishReason::Deadline } else { FinishReason::Cancelled };
    let finished = Finished {
        reason,
        prompt_tokens: job.request.prompt.len(),
        cached_tokens: 0,
        completion_tokens: 0,
        seed: job.sampler.seed(),
        waited: job.launched.elapsed(),
        reading: Duration::ZERO,
        writing: Duration::ZERO,
    };
    let _ = (job.sink)(Event::Finished(finished));
}
