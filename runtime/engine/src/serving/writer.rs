//! One text of an engine, from its prompt to its end.

use std::ops::{ControlFlow, Range};
use std::time::{Duration, Instant};

use compact_str::CompactString;

use crate::generate::{
    EmittedToken, FinishReason, GenerationState, IncrementalDetokenizer, SamplingError, StopConditions,
};
use crate::sampler::{Logprobs, SampleError, logprobs};
use crate::serving::marks::CheckpointPositions;
use crate::serving::queue::QueuedRequest;
use crate::serving::request::{
    EngineRequest, EventSink, RequestFailure, RequestSummary, SampledToken, SequenceEvent, TextDelta,
};
use crate::serving::step::ModelLimits;
use crate::tokenizer::Tokenizer;

/// Tokens of a text for which there is room from its start.
const USUAL_LENGTH: usize = 1024;

/// What a text does now.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum SequencePhase {
    /// Its prompt is being read, or once more that and what has been written.
    Reading,
    /// Another text reads the same prompt.
    Waiting { twin: u64 },
    /// Its last token has been chosen and comes next.
    Writing,
    /// Its next token is chosen when it is known which ones its grammar allows.
    Masking,
}

pub(super) struct RunningSequence<'t> {
    pub id: u64,
    pub slot: usize,
    /// Without its prompt and what ends it, which `text` has.
    pub request: EngineRequest,
    pub phase: SequencePhase,
    pub cached: usize,
    /// Where states inside of its prompt are kept.
    pub marks: CheckpointPositions,
    prompt_logprobs: Vec<Option<Logprobs>>,
    /// What its sequence is to be fed, or was, and what comes next.
    pub text: GenerationState<'t>,
    prompt: usize,
    /// The rows of logits from which it chooses in this step, and how many tokens are fed before the first.
    pub chooses: Option<(Range<usize>, usize)>,
    /// The logits that wait for the mask of its grammar, and how many tokens are fed before.
    pub held: Option<(Vec<f32>, usize)>,
    /// Another thread has its grammar.
    pub masking: bool,
    /// It has a grammar, wherever that is.
    pub has_grammar: bool,
    /// The step that should have fed so many tokens failed: until then the text is fed alone.
    pub alone_until: usize,
    sink: EventSink,
    cancel: std::sync::Arc<std::sync::atomic::AtomicBool>,
    /// Whether its prompt has been read, though it may be read again.
    begun: bool,
    launched: Instant,
    admitted: Instant,
    first: Option<Instant>,
}

/// What came out of the rows of a step.
pub(super) struct SamplingOutcome {
    /// How the text ended, if it did.
    pub end: Result<Option<FinishReason>, RequestFailure>,
    /// Tokens that were chosen.
    pub chosen: usize,
    pub drafted: usize,
    /// Of those.
    pub accepted: usize,
    /// Tokens of its sequence that are right; the others were drafts.
    pub fed: usize,
}

impl<'t> RunningSequence<'t> {
    pub fn new(
        job: QueuedRequest,
        slot: usize,
        phase: SequencePhase,
        cached: usize,
        marks: CheckpointPositions,
        tokenizer: &'t Tokenizer,
        limits: &ModelLimits,
    ) -> Self {
        let mut request = job.request;
        let mut tokens = std::mem::take(&mut request.prompt);
        let prompt = tokens.len();
        tokens.reserve(request.max_tokens.unwrap_or(USUAL_LENGTH).min(USUAL_LENGTH));
        let eos = std::mem::take(&mut request.eos);
        let ends = StopConditions { eos, max_tokens: request.max_tokens, context: limits.context };
        let has_grammar = request.grammar.is_some();
        let text = IncrementalDetokenizer::new(tokenizer, job.stops, request.special);
        RunningSequence {
            id: job.id,
            slot,
            phase,
            cached,
            marks,
            prompt_logprobs: Vec::new(),
            text: GenerationState::new(tokens, ends, job.sampler, request.grammar.take(), text),
            prompt,
            chooses: None,
            held: None,
            masking: false,
            has_grammar,
            alone_until: 0,
            sink: job.sink,
            cancel: job.cancel,
            begun: false,
            launched: job.launched,
            admitted: Instant::now(),
            first: None,
            request,
        }
    }

    /// Tells if its next step has rows of it.
    pub fn is_fed(&self) -> bool {
        matches!(self.phase, SequencePhase::Reading | SequencePhase::Writing)
    }

    /// How many tokens have to be fed before the next one is chosen, or before the last chosen one is fed.
    pub fn to_read(&self) -> usize {
        if self.begun { self.text.known().len() - 1 } else { self.prompt }
    }

    /// Whether its first token is still to be chosen.
    pub fn is_new(&self) -> bool {
        !self.begun
    }

    /// Whether nobody wants to know how likely its tokens are.
    pub fn needs_no_logits(&self) -> bool {
        self.request.logprobs.is_none()
    }

    /// Whether the prompt's tokens are to be scored.
    pub fn scores(&self) -> Option<usize> {
        self.request.prompt_logprobs.filter(|_| self.is_new())
    }

    /// Its sequence is lost and will be read again.
    pub fn read_again(&mut self) {
        self.text.keep_drafts(0);
        self.text.forget_choice();
        self.held = None;
        self.prompt_logprobs.clear();
        self.phase = SequencePhase::Reading;
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
            let event = SequenceEvent::Prompt(std::mem::take(&mut self.prompt_logprobs));
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
        let scored = rows.zip(&self.text.tokens()[fed + 1..]).map(|(row, &token)| logprobs(row, token, top));
        self.prompt_logprobs.extend(scored);
    }

    /// Chooses tokens from rows of logits, of which the first is behind `past` tokens and each other behind a draft, as long as the
    /// drafts are what is chosen.
    pub fn take(&mut self, rows: &[f32], past: usize, limits: &ModelLimits) -> SamplingOutcome {
        let (before, wanted, sink) = (self.text.chosen(), self.request.logprobs, &mut self.sink);
        let mut show = |shown: EmittedToken<'_>| {
            let EmittedToken { token, logits, text } = shown;
            let logprobs = wanted.and_then(|top| logprobs(logits, token, top));
            let token = Some(SampledToken { id: token, logprobs });
            sink(SequenceEvent::Piece(TextDelta { text: CompactString::from(text), token }))
        };
        let chosen = self.text.take(rows, limits.vocab, past, &mut show);
        self.phase = SequencePhase::Writing;
        SamplingOutcome {
            end: chosen.end.map_err(failure),
            chosen: self.text.chosen() - before,
            drafted: chosen.drafted,
            accepted: chosen.accepted,
            fed: past + chosen.accepted,
        }
    }

    /// Ends the text; what was held back is shown, if anybody wants it. The reason may become another one.
    pub fn finish(mut self, reason: FinishReason) -> FinishReason {
        let mut held = CompactString::default();
        let mut reason = self.text.finish(reason, &mut |piece: &str| {
            held.push_str(piece);
            ControlFlow::Continue(())
        });
        if !held.is_empty()
            && (self.sink)(SequenceEvent::Piece(TextDelta { text: held, token: None })).is_break()
        {
            reason = FinishReason::Cancelled;
        }
        let (drafted_tokens, accepted_tokens) = self.text.drafted();
        let now = Instant::now();
        let first = self.first.unwrap_or(now);
        let finished = RequestSummary {
            reason,
            prompt_tokens: self.prompt,
            cached_tokens: self.cached,
            completion_tokens: self.text.chosen(),
            drafted_tokens,
            accepted_tokens,
            seed: self.text.seed(),
            waited: self.admitted.saturating_duration_since(self.launched),
            reading: first.saturating_duration_since(self.admitted),
            writing: now.saturating_duration_since(first),
        };
        // Whether anybody listens makes no difference any more.
        let _ = (self.sink)(SequenceEvent::Finished(finished));
        reason
    }

    pub fn fail(mut self, failure: RequestFailure) {
        let _ = (self.sink)(SequenceEvent::Failed(failure));
    }
}

fn failure(error: SamplingError) -> RequestFailure {
    match error {
        SamplingError::Grammar(_) | SamplingError::Sample(SampleError::NothingAllowed) => {
            RequestFailure::Grammar(error.to_string())
        }
        SamplingError::Sample(_) => RequestFailure::Model(error.to_string()),
    }
}

/// Ends a request that never ran.
pub(super) fn end_unread(mut job: QueuedRequest) {
    let reason = if job.too_late() { FinishReason::Deadline } else { FinishReason::Cancelled };
    let finished = RequestSummary {
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
    let _ = (job.sink)(SequenceEvent::Finished(finished));
}
