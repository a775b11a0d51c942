//! One text of an engine, from its prompt to its end.

use std::ops::ControlFlow;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::{Duration, Instant};

use compact_str::CompactString;

use crate::generate::{FinishReason, TextOut};
use crate::grammar::{Grammar, GrammarError};
use crate::sampler::{Logprobs, SampleError, Sampler, logprobs};
use crate::serving::queue::Job;
use crate::serving::request::{Chosen, Event, Failure, Finished, Piece, Sink, TextRequest};
use crate::serving::step::Limits;
use crate::speculate::{Drafter, Guess};
use crate::tokenizer::{TokenId, Tokenizer};

/// Tokens of a text for which there is room from its start.
const USUAL_LENGTH: usize = 1024;

/// What a text does now.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Phase {
    /// Its prompt is being read, or once more that and what has been written.
    Reading,
    /// Another text reads the same prompt.
    Waiting { twin: u64 },
    /// Its last token has been chosen and comes next.
    Writing,
}

pub(super) struct Writer<'t> {
    pub id: u64,
    pub slot: usize,
    /// Its prompt is the begin of `tokens`.
    pub request: TextRequest,
    pub phase: Phase,
    pub cached: usize,
    prompt_logprobs: Vec<Option<Logprobs>>,
    /// The prompt, then what was chosen, then drafts of what may come.
    tokens: Vec<TokenId>,
    prompt: usize,
    drafts: usize,
    /// What came out of the last step, until it is dealt with.
    pub taken: Option<Taken>,
    /// The token that was just chosen.
    next: Option<TokenId>,
    /// The step that should have fed so many tokens failed: until then the text is fed alone.
    pub alone_until: usize,
    guess: Guess,
    drafted: usize,
    accepted: usize,
    sampler: Sampler,
    text: TextOut<'t>,
    sink: Sink,
    cancel: std::sync::Arc<std::sync::atomic::AtomicBool>,
    chosen: usize,
    /// Whether its prompt has been read, though it may be read again.
    begun: bool,
    launched: Instant,
    admitted: Instant,
    first: Option<Instant>,
}

/// What came out of the rows of a step.
pub(super) struct Taken {
    /// How the text ended, if it did.
    pub end: Result<Option<FinishReason>, Failure>,
    /// Tokens that were chosen.
    pub chosen: usize,
    pub drafted: usize,
    /// Of those.
    pub accepted: usize,
    /// Tokens of its sequence that are right; the others were drafts.
    pub fed: usize,
}

impl<'t> Writer<'t> {
    pub fn new(job: Job, slot: usize, phase: Phase, cached: usize, tokenizer: &'t Tokenizer) -> Self {
        let mut sampler = job.sampler;
        let mut request = job.request;
        let mut tokens = std::mem::take(&mut request.prompt);
        tokens.iter().for_each(|&token| sampler.accept(token));
        let prompt = tokens.len();
        tokens.reserve(request.max_tokens.unwrap_or(USUAL_LENGTH).min(USUAL_LENGTH));
        Writer {
            id: job.id,
            slot,
            phase,
            cached,
            prompt_logprobs: Vec::new(),
            tokens,
            prompt,
            drafts: 0,
            taken: None,
            next: None,
            alone_until: 0,
            guess: Guess::default(),
            drafted: 0,
            accepted: 0,
            sampler,
            text: TextOut::new(tokenizer, job.stops, request.special),
            sink: job.sink,
            cancel: job.cancel,
            chosen: 0,
            begun: false,
            launched: job.launched,
            admitted: Instant::now(),
            first: None,
            request,
        }
    }

    /// What its sequence is to be fed, or was: the prompt, what was chosen, drafts.
    pub fn tokens(&self) -> &[TokenId] {
        &self.tokens
    }

    /// How many tokens there is room for without new memory.
    pub fn room(&self) -> usize {
        self.tokens.capacity()
    }

    /// Without drafts.
    pub fn known(&self) -> &[TokenId] {
        &self.tokens[..self.tokens.len() - self.drafts]
    }

    /// How many tokens have to be fed before the next one is chosen, or before the last chosen one is fed.
    pub fn to_read(&self) -> usize {
        if self.begun { self.known().len() - 1 } else { self.prompt }
    }

    /// Whether its first token is still to be chosen.
    pub fn is_new(&self) -> bool {
        !self.begun
    }

    /// Whether the prompt's tokens are to be scored.
    pub fn scores(&self) -> Option<usize> {
        self.request.prompt_logprobs.filter(|_| self.is_new())
    }

    /// Its sequence is lost and will be read again.
    pub fn read_again(&mut self) {
        self.drop_drafts();
        self.prompt_logprobs.clear();
        self.phase = Phase::Reading;
    }

    /// Most tokens that are worth drafting now, behind `fed` fed ones.
    pub fn most_drafts(&self, fed: usize, limits: &Limits) -> usize {
        let wanted = self.request.max_tokens.map_or(usize::MAX, |max| max - self.chosen - 1);
        let room = limits.context.map_or(usize::MAX, |context| context.saturating_sub(fed + 1));
        self.guess.most().min(wanted).min(room)
    }

    /// Appends drafts of what comes next.
    pub fn draft(&mut self, drafter: &mut dyn Drafter, most: usize) {
        self.drop_drafts();
        let known = self.tokens.len();
        let draft = AssertUnwindSafe(|| drafter.draft(self.slot, &mut self.tokens, most));
        // One that panics has drafted nothing.
        let most = if catch_unwind(draft).is_ok() { most } else { 0 };
        self.tokens.truncate(known + most);
        self.drafts = self.tokens.len() - known;
    }

    /// How many tokens of drafts there are.
    pub fn drafts(&self) -> usize {
        self.drafts
    }

    pub fn drop_drafts(&mut self) {
        self.tokens.truncate(self.tokens.len() - self.drafts);
        self.drafts = 0;
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
        self.begun = true;
        self.first = Some(Instant::now());
        if self.request.prompt_logprobs.is_some() {
            let event = Event::Prompt(std::mem::take(&mut self.prompt_logprobs));
            if (self.sink)(event).is_break() {
                self.cancel.store(true, std::sync::atomic::Ordering::Relaxed);
            }
        }
    }

    /// Takes the logits behind tokens of the prompt, from number `fed` on.
    pub fn score<'a>(&mut self, rows: impl Iterator<Item = &'a [f32]>, fed: usize, top: usize) {
        if fed == 0 {
            self.prompt_logprobs.push(None);
        }
        // Behind the last token comes what is written.
        let scored = rows.zip(&self.tokens[fed + 1..]).map(|(row, &token)| logprobs(row, token, top));
        self.prompt_logprobs.extend(scored);
    }

    /// Chooses tokens from rows of logits, of which the first is behind `past` tokens and each other behind a draft, as long as the
    /// drafts are what is chosen.
    pub fn take(&mut self, rows: &[f32], past: usize, limits: &Limits) -> Taken {
        let (drafts, chosen) = (self.drafts, self.chosen);
        let known = self.known().len();
        let mut accepted = 0;
        let end = loop {
            let from = accepted * limits.vocab;
            let end = self.write(&rows[from..from + limits.vocab], past + accepted, limits);
            let is_draft = accepted < drafts && self.next == Some(self.tokens[known + accepted]);
            if !is_draft || !matches!(end, Ok(None)) {
                break end;
            }
            accepted += 1;
        };
        self.guess.checked(drafts, accepted);
        self.drafted += drafts;
        self.accepted += accepted;
        self.tokens.truncate(known + accepted);
        self.drafts = 0;
        self.tokens.extend(self.next.take());
        Taken { end, chosen: self.chosen - chosen, drafted: drafts, accepted, fed: past + accepted }
    }

    /// Chooses the next token from logits behind `past` tokens; the reason if the text has ended with it. The order of the
    /// questions is that of [`crate::Generator`].
    fn write(
        &mut self,
        logits: &[f32],
        past: usize,
        limits: &Limits,
    ) -> Result<Option<FinishReason>, Failure> {
        self.next = None;
        if self.request.max_tokens == Some(0) {
            return Ok(Some(FinishReason::Length));
        }
        let token = self.choose(logits)?;
        self.sampler.accept(token);
        self.chosen += 1;
        self.next = Some(token);
        self.phase = Phase::Writing;
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
        let mut text = CompactString::default();
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
            let mut text = CompactString::default();
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
            prompt_tokens: self.prompt,
            cached_tokens: self.cached,
            completion_tokens: self.chosen,
            drafted_tokens: self.drafted,
            accepted_tokens: self.accepted,
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
        drafted_tokens: 0,
        accepted_tokens: 0,
        seed: job.sampler.seed(),
        waited: job.launched.elapsed(),
        reading: Duration::ZERO,
        writing: Duration::ZERO,
    };
    let _ = (job.sink)(Event::Finished(finished));
}
