//! One text of an engine, from its prompt to its end.

use std::ops::{ControlFlow, Range};
use std::time::{Duration, Instant};

use compact_str::CompactString;
use mlcc_text::Tokenizer;

use crate::generate::{
    EmittedToken, FinishReason, GenerationState, IncrementalDetokenizer, SamplingError, StopConditions,
};
use crate::sampler::{Logprobs, SampleError, compute_logprobs};
use crate::serving::checkpoint_positions::CheckpointPositions;
use crate::serving::model_runner::ModelLimits;
use crate::serving::queue::QueuedRequest;
use crate::serving::request::{
    EngineRequest, EventSink, RequestFailure, RequestSummary, SampledToken, SequenceEvent, TextDelta,
};

/// Tokens of a text for which there is room from its start.
const USUAL_LENGTH: usize = 1024;

/// The present work on a sequence.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum SequencePhase {
    /// Its prompt is being read, or once more that and what has been written.
    Prefill,
    /// Another text reads the same prompt.
    WaitingForPrefix { fork_of: u64 },
    /// Its last token has been chosen and comes next.
    Decode,
    /// Its next token is chosen when it is known which ones its grammar allows.
    WaitingForMask,
}

pub(super) struct RunningSequence<'t> {
    pub id: u64,
    pub slot: usize,
    /// The request without its prompt and its stop conditions, which `generation` has.
    pub request: EngineRequest,
    pub phase: SequencePhase,
    pub cached: usize,
    /// Positions in its prompt whose states are kept.
    pub checkpoints: CheckpointPositions,
    prompt_logprobs: Vec<Option<Logprobs>>,
    /// The tokens that its sequence has computed or is to compute, and its sampling.
    pub generation: GenerationState<'t>,
    prompt_len: usize,
    /// The rows of logits from which it samples in this step, and the number of tokens computed before the
    /// first.
    pub sampling_rows: Option<(Range<usize>, usize)>,
    /// The logits that wait for the mask of its grammar, and the number of tokens computed before.
    pub held_logits: Option<(Vec<f32>, usize)>,
    /// Another thread has its grammar.
    pub mask_pending: bool,
    /// It has a grammar, wherever that is.
    pub has_grammar: bool,
    /// The number of tokens of a failed step: until they are computed, the sequence runs alone.
    pub isolated_until: usize,
    sink: EventSink,
    cancel: std::sync::Arc<std::sync::atomic::AtomicBool>,
    /// True if its prompt has been read, though it may be read again.
    prefilled: bool,
    queued_at: Instant,
    admitted_at: Instant,
    first_token_at: Option<Instant>,
}

/// The outcome of the rows of a step.
pub(super) struct SamplingOutcome {
    /// The end of the text, if it has one.
    pub end: Result<Option<FinishReason>, RequestFailure>,
    /// Tokens that were chosen.
    pub sampled: usize,
    pub drafted: usize,
    /// Right ones among them.
    pub accepted: usize,
    /// Tokens of its sequence that are right; the others were drafts.
    pub computed: usize,
}

impl<'t> RunningSequence<'t> {
    pub fn new(
        job: QueuedRequest,
        slot: usize,
        phase: SequencePhase,
        cached: usize,
        checkpoints: CheckpointPositions,
        tokenizer: &'t Tokenizer,
        limits: &ModelLimits,
    ) -> Self {
        let mut request = job.request;
        let mut tokens = std::mem::take(&mut request.prompt);
        let prompt_len = tokens.len();
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
            checkpoints,
            prompt_logprobs: Vec::new(),
            generation: GenerationState::new(tokens, ends, job.sampler, request.grammar.take(), text),
            prompt_len,
            sampling_rows: None,
            held_logits: None,
            mask_pending: false,
            has_grammar,
            isolated_until: 0,
            sink: job.sink,
            cancel: job.cancel,
            prefilled: false,
            queued_at: job.queued_at,
            admitted_at: Instant::now(),
            first_token_at: None,
            request,
        }
    }

    /// Tells if its next step has rows of it.
    pub fn is_scheduled(&self) -> bool {
        matches!(self.phase, SequencePhase::Prefill | SequencePhase::Decode)
    }

    /// The number of tokens to compute before the next one is sampled, or before the last sampled one is
    /// computed.
    pub fn prefill_len(&self) -> usize {
        if self.prefilled { self.generation.accepted_tokens().len() - 1 } else { self.prompt_len }
    }

    /// True if its first token is still to be sampled.
    pub fn awaits_first_token(&self) -> bool {
        !self.prefilled
    }

    /// True if the probabilities of its tokens were not requested.
    pub fn needs_no_logits(&self) -> bool {
        self.request.logprobs.is_none()
    }

    /// The requested number of top candidates of the prompt's tokens, if these are to be scored.
    pub fn prompt_logprobs_wanted(&self) -> Option<usize> {
        self.request.prompt_logprobs.filter(|_| self.awaits_first_token())
    }

    /// Its sequence is lost and will be read again.
    pub fn restart_prefill(&mut self) {
        self.generation.keep_drafts(0);
        self.generation.discard_sample();
        self.held_logits = None;
        self.prompt_logprobs.clear();
        self.phase = SequencePhase::Prefill;
    }

    /// The reason for its end, if it was cancelled or its time is over.
    pub fn end_reason(&self) -> Option<FinishReason> {
        if self.cancel.load(std::sync::atomic::Ordering::Relaxed) {
            return Some(FinishReason::Cancelled);
        }
        let late = self.request.deadline.is_some_and(|deadline| Instant::now() >= deadline);
        late.then_some(FinishReason::Deadline)
    }

    /// The prompt has been read.
    pub fn finish_prefill(&mut self) {
        self.prefilled = true;
        self.first_token_at = Some(Instant::now());
        if self.request.prompt_logprobs.is_some() {
            let event = SequenceEvent::PromptLogprobs(std::mem::take(&mut self.prompt_logprobs));
            if (self.sink)(event).is_break() {
                self.cancel.store(true, std::sync::atomic::Ordering::Relaxed);
            }
        }
    }

    /// Takes the logits behind tokens of the prompt, from number `fed` on.
    pub fn score_prompt_rows<'a>(&mut self, rows: impl Iterator<Item = &'a [f32]>, fed: usize, top: usize) {
        if fed == 0 {
            self.prompt_logprobs.push(None);
        }
        // Behind the last token comes what is written.
        let scored = rows
            .zip(&self.generation.tokens()[fed + 1..])
            .map(|(row, &token)| compute_logprobs(row, token, top));
        self.prompt_logprobs.extend(scored);
    }

    /// Samples tokens from rows of logits, of which the first is behind `past` tokens and each other behind a
    /// draft, as long as the drafts are the sampled tokens.
    pub fn sample_rows(&mut self, rows: &[f32], past: usize, limits: &ModelLimits) -> SamplingOutcome {
        let (before, wanted, sink) = (self.generation.sampled_count(), self.request.logprobs, &mut self.sink);
        let mut show = |shown: EmittedToken<'_>| {
            let EmittedToken { token, logits, text } = shown;
            let logprobs = wanted.and_then(|top| compute_logprobs(logits, token, top));
            let token = Some(SampledToken { id: token, logprobs });
            sink(SequenceEvent::Delta(TextDelta { text: CompactString::from(text), token }))
        };
        let chosen = self.generation.sample_rows(rows, limits.vocab, past, &mut show);
        self.phase = SequencePhase::Decode;
        SamplingOutcome {
            end: chosen.end.map_err(request_failure),
            sampled: self.generation.sampled_count() - before,
            drafted: chosen.drafted,
            accepted: chosen.accepted,
            computed: past + chosen.accepted,
        }
    }

    /// Ends the text; held-back text is shown, if it has a receiver. The reason may become another one.
    pub fn finish(mut self, reason: FinishReason) -> FinishReason {
        let mut held = CompactString::default();
        let mut reason = self.generation.finish(reason, &mut |piece: &str| {
            held.push_str(piece);
            ControlFlow::Continue(())
        });
        if !held.is_empty()
            && (self.sink)(SequenceEvent::Delta(TextDelta { text: held, token: None })).is_break()
        {
            reason = FinishReason::Cancelled;
        }
        let (drafted_tokens, accepted_tokens) = self.generation.draft_counts();
        let now = Instant::now();
        let first = self.first_token_at.unwrap_or(now);
        let finished = RequestSummary {
            reason,
            prompt_tokens: self.prompt_len,
            cached_tokens: self.cached,
            completion_tokens: self.generation.sampled_count(),
            drafted_tokens,
            accepted_tokens,
            seed: self.generation.seed(),
            queue_time: self.admitted_at.saturating_duration_since(self.queued_at),
            prefill_time: first.saturating_duration_since(self.admitted_at),
            decode_time: now.saturating_duration_since(first),
        };
        // A missing listener makes no difference any more.
        let _ = (self.sink)(SequenceEvent::Finished(finished));
        reason
    }

    pub fn fail(mut self, failure: RequestFailure) {
        let _ = (self.sink)(SequenceEvent::Failed(failure));
    }
}

fn request_failure(error: SamplingError) -> RequestFailure {
    match error {
        SamplingError::Grammar(_) | SamplingError::Sample(SampleError::NothingAllowed) => {
            RequestFailure::Grammar(error.to_string())
        }
        SamplingError::Sample(_) => RequestFailure::Model(error.to_string()),
    }
}

/// Ends a request that never ran.
pub(super) fn end_unscheduled(mut job: QueuedRequest) {
    let reason = if job.is_past_deadline() { FinishReason::Deadline } else { FinishReason::Cancelled };
    let finished = RequestSummary {
        reason,
        prompt_tokens: job.request.prompt.len(),
        cached_tokens: 0,
        completion_tokens: 0,
        drafted_tokens: 0,
        accepted_tokens: 0,
        seed: job.sampler.seed(),
        queue_time: job.queued_at.elapsed(),
        prefill_time: Duration::ZERO,
        decode_time: Duration::ZERO,
    };
    let _ = (job.sink)(SequenceEvent::Finished(finished));
}
