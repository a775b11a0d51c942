//! The way from a request that was read to its answer: sequences are launched, and their texts are collected
//! or streamed.

use std::collections::VecDeque;
use std::convert::Infallible;
use std::ops::ControlFlow;
use std::sync::Arc;
use std::time::Duration;

use axum::body::Body;
use axum::http::HeaderValue;
use axum::response::sse::{Event as Sent, KeepAlive, Sse};
use axum::response::{IntoResponse, Response};
use mlcc_engine::FinishReason;
use mlcc_engine::sampler::Logprobs;
use mlcc_engine::serving::{
    CancelGuard, EngineRequest, EventSink, RequestSummary, SampledToken, SequenceEvent, TextDelta,
};
use mlcc_text::Tokenizer;
use serde_json::{Value, json};
use tokio::sync::mpsc;

use crate::app_state::ServerState;
use crate::error::{ApiError, json_type};
use crate::request_memory::{LeasedBody, MemoryLease};
use crate::response_shape::ResponseShape;
use crate::served_model::ServedModel;
use crate::traces::RequestSpan;

/// Events of one text that may wait for a slow reader; one who is slower loses the text.
const EVENTS: usize = 4096;
/// A comment is sent after this time without anything else, so that a reader who has left is noticed.
pub const KEEP_ALIVE: Duration = Duration::from_secs(10);

/// Headers of warnings of an answer.
const MOST_WARNINGS: usize = 16;

/// The result of reading a request.
pub struct PreparedRequest {
    /// `choices` of each prompt, those of one prompt after the other.
    pub requests: Vec<EngineRequest>,
    pub choices: usize,
    pub stream: bool,
    pub include_usage: bool,
    pub shape: Box<dyn ResponseShape>,
    /// Parts of the request that are left out.
    pub warnings: Vec<String>,
}

/// One text of an answer, as far as it is there.
#[derive(Default)]
pub struct ResponseChoice {
    pub text: String,
    pub tokens: Vec<SampledToken>,
    pub prompt: Option<Vec<Option<Logprobs>>>,
    pub finished: Option<RequestSummary>,
}

/// Texts on their way.
pub struct RunningTexts {
    events: mpsc::Receiver<(usize, SequenceEvent)>,
    /// Dropping them ends the texts.
    _tickets: Vec<CancelGuard>,
    unfinished: usize,
    span: RequestSpan,
}

impl RunningTexts {
    /// `choices` texts of each prompt, prompt by prompt.
    pub fn launch(
        hosted: &ServedModel,
        requests: Vec<EngineRequest>,
        choices: usize,
        span: RequestSpan,
    ) -> Result<RunningTexts, ApiError> {
        hosted.check_ready()?;
        let count = requests.len();
        hosted.check_count(count, 1)?;
        span.launches(&requests, choices);
        let (sender, events) = mpsc::channel(EVENTS.saturating_mul(count.max(1)).min(1 << 20));
        let with_sinks = requests.into_iter().enumerate().map(|(index, request)| {
            let (sender, mut watch) = (sender.clone(), hosted.observe_latency());
            let mut span = span.text(index);
            let sink: EventSink = Box::new(move |event| {
                watch.record_event(&event);
                span.see(&event);
                match sender.try_send((index, event)) {
                    Ok(()) => ControlFlow::Continue(()),
                    Err(_) => ControlFlow::Break(()),
                }
            });
            (request, sink)
        });
        let tickets = hosted.engine.launch_with(with_sinks.collect())?;
        Ok(RunningTexts { events, _tickets: tickets, unfinished: count, span })
    }

    /// The next event with the number of its text; `None` when all have ended.
    pub async fn next_event(&mut self) -> Result<Option<(usize, SequenceEvent)>, ApiError> {
        let next = self.receive_event().await;
        if let Err(error) = &next {
            self.span.failed(error);
        }
        next
    }

    async fn receive_event(&mut self) -> Result<Option<(usize, SequenceEvent)>, ApiError> {
        if self.unfinished == 0 {
            return Ok(None);
        }
        match self.events.recv().await {
            None => Err(ApiError::internal("the text was lost: the engine ended, or it was read too slowly")),
            Some((_, SequenceEvent::Failed(failure))) => Err(failure.into()),
            Some((_, SequenceEvent::Finished(RequestSummary { reason: FinishReason::Cancelled, .. }))) => {
                Err(ApiError::shutting_down())
            }
            Some((index, event)) => {
                self.unfinished -= usize::from(matches!(event, SequenceEvent::Finished(_)));
                Ok(Some((index, event)))
            }
        }
    }
}

/// The sender of a request, by its API key.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct ClientId(pub u64);

/// Answers a request.
pub async fn answer(
    hosted: Arc<ServedModel>,
    client: ClientId,
    span: RequestSpan,
    mut work: PreparedRequest,
) -> Response {
    work.requests.iter_mut().for_each(|request| request.client = client.0);
    let running = match RunningTexts::launch(&hosted, work.requests, work.choices, span) {
        Ok(running) => running,
        Err(error) => return error.into_response(),
    };
    let warnings = std::mem::take(&mut work.warnings);
    let server = Arc::clone(&hosted.server);
    let head = ResponseHead {
        id: hosted.server.next_id(work.shape.id_prefix()),
        created: crate::app_state::unix_seconds(),
        hosted,
    };
    let answer = match work.stream {
        true => stream_response(head, work.shape, work.choices, work.include_usage, running),
        false => match collect_response(head, work.shape, work.choices, running).await {
            Ok(body) => (json_type(), body).into_response(),
            Err(error) => error.into_response(),
        },
    };
    with_warning_headers(answer, &warnings, &server)
}

/// An answer that says what of its request was left out, in the header `x-mlcc-warning`; the log has each
/// kind once.
pub fn with_warning_headers(mut answer: Response, warnings: &[String], server: &ServerState) -> Response {
    for warning in warnings.iter().take(MOST_WARNINGS) {
        server.warn_once(warning);
        if let Ok(value) = HeaderValue::from_str(warning) {
            answer.headers_mut().append("x-mlcc-warning", value);
        }
    }
    answer
}

/// The fields of all pieces of an answer.
struct ResponseHead {
    hosted: Arc<ServedModel>,
    id: String,
    created: u64,
}

impl ResponseHead {
    fn object(&self, kind: &str, choices: Vec<Value>) -> Value {
        json!({
            "id": self.id,
            "object": kind,
            "created": self.created,
            "model": self.hosted.name,
            "choices": choices,
        })
    }

    /// The text of a piece of a stream.
    fn chunk(&self, shape: &dyn ResponseShape, choice: Value, include_usage: bool) -> String {
        let mut piece = self.object(shape.chunk_object(), vec![choice]);
        if include_usage {
            piece["usage"] = Value::Null;
        }
        piece.to_string()
    }
}

async fn collect_response(
    head: ResponseHead,
    shape: Box<dyn ResponseShape>,
    per_prompt: usize,
    mut running: RunningTexts,
) -> Result<Body, ApiError> {
    let (choices, lease) = collect_choices(&mut running, &head.hosted.server).await?;
    // Streams go on meanwhile.
    let written =
        tokio::task::spawn_blocking(move || serialize_response(&head, shape.as_ref(), &choices, per_prompt))
            .await;
    match written {
        Ok(Ok(text)) => Ok(LeasedBody::with_lease(text, lease)),
        Ok(Err(error)) => Err(ApiError::internal(error.to_string())),
        Err(_) => Err(ApiError::internal("internal error while the answer was written")),
    }
}

/// Waits for all texts of an answer, which take memory as they grow.
pub async fn collect_choices(
    running: &mut RunningTexts,
    server: &ServerState,
) -> Result<(Vec<ResponseChoice>, MemoryLease), ApiError> {
    let mut choices: Vec<ResponseChoice> =
        (0..running.unfinished).map(|_| ResponseChoice::default()).collect();
    let (mut lease, mut size) = (server.memory.lease_answer(0)?, AnswerSize::new(choices.len()));
    while let Some((index, event)) = running.next_event().await? {
        let Some(choice) = choices.get_mut(index) else { continue };
        size.add(index, &event);
        server.memory.grow_answer(&mut lease, size.bytes())?;
        match event {
            SequenceEvent::PromptLogprobs(logprobs) => choice.prompt = Some(logprobs),
            SequenceEvent::Delta(piece) => {
                choice.text += &piece.text;
                choice.tokens.extend(piece.token);
            }
            SequenceEvent::Finished(finished) => choice.finished = Some(finished),
            // `next` has made errors of them.
            SequenceEvent::Failed(failure) => return Err(failure.into()),
        }
    }
    Ok((choices, lease))
}

/// The memory that an answer takes while it is collected and written.
struct AnswerSize {
    /// Texts, tokens and choices.
    bytes: usize,
    /// The number of token probabilities that each choice returns.
    likely: Vec<usize>,
    all_likely: usize,
    most_likely: usize,
}

impl AnswerSize {
    /// A chance as it comes, and as text of an answer that grows.
    const LIKELY: usize = 16 + 2 * 100;
    /// A chance as a value. One choice is values at a time.
    const VALUE: usize = 600;

    fn new(choices: usize) -> AnswerSize {
        AnswerSize {
            bytes: choices * size_of::<ResponseChoice>(),
            likely: vec![0; choices],
            all_likely: 0,
            most_likely: 0,
        }
    }

    fn add(&mut self, index: usize, event: &SequenceEvent) {
        let of = |logprobs: &Logprobs| 1 + logprobs.top.len();
        let likely = match event {
            SequenceEvent::PromptLogprobs(scored) => {
                scored.iter().map(|one| one.as_ref().map_or(1, of)).sum()
            }
            SequenceEvent::Delta(TextDelta { text, token }) => {
                self.bytes += 4 * text.len() + size_of::<SampledToken>();
                token.as_ref().and_then(|token| token.logprobs.as_ref()).map_or(0, of)
            }
            SequenceEvent::Finished(_) | SequenceEvent::Failed(_) => 0,
        };
        self.all_likely += likely;
        if let Some(choice) = self.likely.get_mut(index) {
            *choice += likely;
            self.most_likely = self.most_likely.max(*choice);
        }
    }

    fn bytes(&self) -> usize {
        self.bytes + self.all_likely * Self::LIKELY + self.most_likely * Self::VALUE
    }
}

/// An answer, in the order of its fields. Each choice is made where it is written, so that there is one at a
/// time.
#[derive(serde::Serialize)]
struct WholeResponse<'a> {
    id: &'a str,
    object: &'a str,
    created: u64,
    model: &'a str,
    choices: ResponseChoices<'a>,
    usage: Value,
    timings: Value,
}

struct ResponseChoices<'a> {
    shape: &'a dyn ResponseShape,
    tokenizer: &'a Tokenizer,
    choices: &'a [ResponseChoice],
}

impl serde::Serialize for ResponseChoices<'_> {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let of = |(index, choice): (usize, &ResponseChoice)| {
            self.shape.choice_value(self.tokenizer, index, choice)
        };
        serializer.collect_seq(self.choices.iter().enumerate().map(of))
    }
}

fn serialize_response(
    head: &ResponseHead,
    shape: &dyn ResponseShape,
    choices: &[ResponseChoice],
    per_prompt: usize,
) -> serde_json::Result<String> {
    let ends: Vec<&RequestSummary> = choices.iter().filter_map(|choice| choice.finished.as_ref()).collect();
    serde_json::to_string(&WholeResponse {
        id: &head.id,
        object: shape.object(),
        created: head.created,
        model: &head.hosted.name,
        choices: ResponseChoices { shape, tokenizer: &head.hosted.tokenizer, choices },
        usage: usage(&ends, per_prompt),
        timings: timings(&ends),
    })
}

/// Texts are sent as they come.
struct ResponseStream {
    head: Arc<ResponseHead>,
    /// `None` while another thread writes the scores of a prompt.
    shape: Option<Box<dyn ResponseShape>>,
    per_prompt: usize,
    include_usage: bool,
    running: RunningTexts,
    ends: Vec<Option<RequestSummary>>,
    /// Pieces to send before the next event is looked at.
    queue: VecDeque<String>,
    is_done: bool,
}

fn stream_response(
    head: ResponseHead,
    shape: Box<dyn ResponseShape>,
    per_prompt: usize,
    include_usage: bool,
    running: RunningTexts,
) -> Response {
    let count = running.unfinished;
    let mut stream = ResponseStream {
        head: Arc::new(head),
        shape: Some(shape),
        per_prompt,
        include_usage,
        running,
        ends: vec![None; count],
        queue: VecDeque::new(),
        is_done: false,
    };
    for index in 0..count {
        let first = stream.shape.as_mut().and_then(|shape| shape.first_chunk(index));
        stream.send(first);
    }
    let pieces = futures_util::stream::unfold(stream, |mut stream| async move {
        let data = stream.next().await?;
        Some((Ok::<_, Infallible>(Sent::default().data(data)), stream))
    });
    Sse::new(pieces).keep_alive(KeepAlive::new().interval(KEEP_ALIVE)).into_response()
}

impl ResponseStream {
    fn send(&mut self, choice: Option<Value>) {
        let Some(shape) = &self.shape else { return };
        let chunk = choice.map(|choice| self.head.chunk(shape.as_ref(), choice, self.include_usage));
        self.queue.extend(chunk);
    }

    /// Writes the scores of a prompt on another thread: there may be many.
    async fn send_prompt(&mut self, index: usize, event: SequenceEvent) -> Result<(), ApiError> {
        let mut size = AnswerSize::new(1);
        size.add(0, &event);
        let lease = self.head.hosted.server.memory.lease_answer(size.bytes())?;
        let (Some(mut shape), SequenceEvent::PromptLogprobs(scored)) = (self.shape.take(), event) else {
            return Ok(());
        };
        let (head, include_usage) = (Arc::clone(&self.head), self.include_usage);
        let write = move || {
            let choice = shape.prompt_chunk(&head.hosted.tokenizer, index, &scored);
            let chunk = choice.map(|choice| head.chunk(shape.as_ref(), choice, include_usage));
            drop(lease);
            (shape, chunk)
        };
        let written = tokio::task::spawn_blocking(write).await;
        let (shape, chunk) =
            written.map_err(|_| ApiError::internal("internal error while the answer was written"))?;
        self.shape = Some(shape);
        self.queue.extend(chunk);
        Ok(())
    }

    async fn next(&mut self) -> Option<String> {
        loop {
            if let Some(data) = self.queue.pop_front() {
                return Some(data);
            }
            if self.is_done {
                return None;
            }
            match self.running.next_event().await {
                Ok(Some((index, event @ SequenceEvent::PromptLogprobs(_)))) => {
                    if let Err(error) = self.send_prompt(index, event).await {
                        self.fail(&error);
                    }
                }
                Ok(Some((index, event))) => self.handle_event(index, event),
                Ok(None) => self.end(),
                Err(error) => self.fail(&error),
            }
        }
    }

    fn fail(&mut self, error: &ApiError) {
        self.queue.push_back(error.body().to_string());
        self.queue.push_back("[DONE]".into());
        self.is_done = true;
    }

    fn handle_event(&mut self, index: usize, event: SequenceEvent) {
        let Some(shape) = &mut self.shape else { return };
        let piece = match event {
            SequenceEvent::Delta(TextDelta { text, token }) => {
                shape.delta_chunk(&self.head.hosted.tokenizer, index, &text, token.as_ref())
            }
            SequenceEvent::Finished(finished) => {
                for last in shape.last_chunks(index, &finished) {
                    self.send(Some(last));
                }
                if let Some(end) = self.ends.get_mut(index) {
                    *end = Some(finished);
                }
                None
            }
            SequenceEvent::PromptLogprobs(_) | SequenceEvent::Failed(_) => None,
        };
        self.send(piece);
    }

    fn end(&mut self) {
        self.is_done = true;
        if let Some(shape) = self.shape.as_ref().filter(|_| self.include_usage) {
            let ends: Vec<&RequestSummary> = self.ends.iter().flatten().collect();
            let mut piece = self.head.object(shape.chunk_object(), Vec::new());
            piece["usage"] = usage(&ends, self.per_prompt);
            piece["timings"] = timings(&ends);
            self.queue.push_back(piece.to_string());
        }
        self.queue.push_back("[DONE]".into());
    }
}

/// A prompt counts once, however many texts it has.
fn usage(ends: &[&RequestSummary], per_prompt: usize) -> Value {
    let prompts = || ends.iter().step_by(per_prompt.max(1));
    let prompt: usize = prompts().map(|end| end.prompt_tokens).sum();
    let cached: usize = prompts().map(|end| end.cached_tokens).sum();
    let written: usize = ends.iter().map(|end| end.completion_tokens).sum();
    json!({
        "prompt_tokens": prompt,
        "completion_tokens": written,
        "total_tokens": prompt + written,
        "prompt_tokens_details": {"cached_tokens": cached},
    })
}

/// Times of the first text, in the form of llama.cpp's server.
pub fn timings(ends: &[&RequestSummary]) -> Value {
    let Some(end) = ends.first() else { return Value::Null };
    let ms = |time: Duration| time.as_secs_f64() * 1e3;
    let rate = |count: usize, time: Duration| match time.is_zero() {
        true => 0.0,
        false => count as f64 / time.as_secs_f64(),
    };
    let read = end.prompt_tokens - end.cached_tokens;
    let mut timings = json!({
        "queue_ms": ms(end.queue_time),
        "cache_n": end.cached_tokens,
        "prompt_n": read,
        "prompt_ms": ms(end.prefill_time),
        "prompt_per_second": rate(read, end.prefill_time),
        "predicted_n": end.completion_tokens,
        "predicted_ms": ms(end.decode_time),
        "predicted_per_second": rate(end.completion_tokens.saturating_sub(1), end.decode_time),
    });
    if end.drafted_tokens > 0 {
        timings["draft_n"] = end.drafted_tokens.into();
        timings["draft_n_accepted"] = end.accepted_tokens.into();
    }
    timings
}
