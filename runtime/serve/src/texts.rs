//! From a request that was read to its answer: the texts are launched, and what they say is collected or streamed.

use std::collections::VecDeque;
use std::convert::Infallible;
use std::ops::ControlFlow;
use std::sync::Arc;
use std::time::Duration;

use axum::http::HeaderValue;
use axum::response::sse::{Event as Sent, KeepAlive, Sse};
use axum::response::{IntoResponse, Response};
use mlcc_engine::FinishReason;
use mlcc_engine::sampler::Logprobs;
use mlcc_engine::serving::{Chosen, Event, Finished, Piece, Sink, TextRequest, Ticket};
use serde_json::{Value, json};
use tokio::sync::mpsc;

use crate::app::Server;
use crate::error::{ApiError, json_type};
use crate::hosted::Hosted;
use crate::shape::Shape;
use crate::traces::RequestSpan;

/// Events of one text that may wait for a slow reader; one who is slower loses the text.
const EVENTS: usize = 4096;
/// A comment is sent when there was nothing else for so long, so that a reader who has gone is noticed.
pub const KEEP_ALIVE: Duration = Duration::from_secs(10);

/// Headers of warnings of an answer.
const MOST_WARNINGS: usize = 16;

/// What a request leads to.
pub struct Work {
    /// `choices` of each prompt, those of one prompt after the other.
    pub requests: Vec<TextRequest>,
    pub choices: usize,
    pub stream: bool,
    pub include_usage: bool,
    pub shape: Box<dyn Shape>,
    /// What of the request is left out.
    pub warnings: Vec<String>,
}

/// One text of an answer, as far as it is there.
#[derive(Default)]
pub struct Choice {
    pub text: String,
    pub tokens: Vec<Chosen>,
    pub prompt: Option<Vec<Option<Logprobs>>>,
    pub finished: Option<Finished>,
}

/// Texts on their way.
pub struct Running {
    events: mpsc::Receiver<(usize, Event)>,
    /// Dropping them ends the texts.
    _tickets: Vec<Ticket>,
    left: usize,
    span: RequestSpan,
}

impl Running {
    /// `choices` texts of each prompt, one after the other.
    pub fn launch(
        hosted: &Hosted,
        requests: Vec<TextRequest>,
        choices: usize,
        span: RequestSpan,
    ) -> Result<Running, ApiError> {
        hosted.ready()?;
        let count = requests.len();
        let most = hosted.sequences + hosted.server.options.max_queue;
        if count > most {
            let message =
                format!("the request asks for {count} texts, this server takes at most {most} at a time");
            return Err(ApiError::request("too_many_texts", message));
        }
        span.launches(&requests, choices);
        let (sender, events) = mpsc::channel(EVENTS.saturating_mul(count.max(1)).min(1 << 20));
        let with_sinks = requests.into_iter().enumerate().map(|(index, request)| {
            let (sender, mut watch) = (sender.clone(), hosted.watch());
            let mut span = span.text(index);
            let sink: Sink = Box::new(move |event| {
                watch.see(&event);
                span.see(&event);
                match sender.try_send((index, event)) {
                    Ok(()) => ControlFlow::Continue(()),
                    Err(_) => ControlFlow::Break(()),
                }
            });
            (request, sink)
        });
        let tickets = hosted.engine.launch_with(with_sinks.collect())?;
        Ok(Running { events, _tickets: tickets, left: count, span })
    }

    /// The next event with the number of its text; `None` when all have ended.
    pub async fn next(&mut self) -> Result<Option<(usize, Event)>, ApiError> {
        let next = self.receive().await;
        if let Err(error) = &next {
            self.span.failed(error);
        }
        next
    }

    async fn receive(&mut self) -> Result<Option<(usize, Event)>, ApiError> {
        if self.left == 0 {
            return Ok(None);
        }
        match self.events.recv().await {
            None => Err(ApiError::internal("the text was lost: the engine ended, or it was read too slowly")),
            Some((_, Event::Failed(failure))) => Err(failure.into()),
            Some((_, Event::Finished(Finished { reason: FinishReason::Cancelled, .. }))) => {
                Err(ApiError::shutting_down())
            }
            Some((index, event)) => {
                self.left -= usize::from(matches!(event, Event::Finished(_)));
                Ok(Some((index, event)))
            }
        }
    }
}

/// Who sends a request, by its API key.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Client(pub u64);

/// Answers a request.
pub async fn answer(hosted: Arc<Hosted>, client: Client, span: RequestSpan, mut work: Work) -> Response {
    work.requests.iter_mut().for_each(|request| request.client = client.0);
    let running = match Running::launch(&hosted, work.requests, work.choices, span) {
        Ok(running) => running,
        Err(error) => return error.into_response(),
    };
    let warnings = std::mem::take(&mut work.warnings);
    let server = Arc::clone(&hosted.server);
    let head = Head { id: hosted.server.id(work.shape.id_prefix()), created: crate::app::seconds(), hosted };
    let answer = match work.stream {
        true => stream(head, work.shape, work.choices, work.include_usage, running),
        false => match collect(&head, work.shape.as_ref(), work.choices, running).await {
            Ok(body) => (json_type(), body.to_string()).into_response(),
            Err(error) => error.into_response(),
        },
    };
    warned(answer, &warnings, &server)
}

/// An answer that says what of its request was left out, in the header `x-mlcc-warning`; the log has each kind once.
pub fn warned(mut answer: Response, warnings: &[String], server: &Server) -> Response {
    for warning in warnings.iter().take(MOST_WARNINGS) {
        server.warn_once(warning);
        if let Ok(value) = HeaderValue::from_str(warning) {
            answer.headers_mut().append("x-mlcc-warning", value);
        }
    }
    answer
}

/// What all pieces of an answer say.
struct Head {
    hosted: Arc<Hosted>,
    id: String,
    created: u64,
}

impl Head {
    fn object(&self, kind: &str, choices: Vec<Value>) -> Value {
        json!({
            "id": self.id,
            "object": kind,
            "created": self.created,
            "model": self.hosted.name,
            "choices": choices,
        })
    }
}

async fn collect(
    head: &Head,
    shape: &dyn Shape,
    per_prompt: usize,
    mut running: Running,
) -> Result<Value, ApiError> {
    let mut choices: Vec<Choice> = (0..running.left).map(|_| Choice::default()).collect();
    while let Some((index, event)) = running.next().await? {
        let Some(choice) = choices.get_mut(index) else { continue };
        match event {
            Event::Prompt(logprobs) => choice.prompt = Some(logprobs),
            Event::Piece(piece) => {
                choice.text += &piece.text;
                choice.tokens.extend(piece.token);
            }
            Event::Finished(finished) => choice.finished = Some(finished),
            // `next` has made errors of them.
            Event::Failed(failure) => return Err(failure.into()),
        }
    }
    let ends: Vec<&Finished> = choices.iter().filter_map(|choice| choice.finished.as_ref()).collect();
    let (usage, timings) = (usage(&ends, per_prompt), timings(&ends));
    let of = |(index, choice): (usize, &Choice)| shape.whole(&head.hosted.tokenizer, index, choice);
    let mut body = head.object(shape.object(), choices.iter().enumerate().map(of).collect());
    body["usage"] = usage;
    body["timings"] = timings;
    Ok(body)
}

/// Texts are sent as they come.
struct Stream {
    head: Head,
    shape: Box<dyn Shape>,
    per_prompt: usize,
    include_usage: bool,
    running: Running,
    ends: Vec<Option<Finished>>,
    /// What is still to be sent before the next event is looked at.
    queue: VecDeque<String>,
    over: bool,
}

fn stream(
    head: Head,
    shape: Box<dyn Shape>,
    per_prompt: usize,
    include_usage: bool,
    running: Running,
) -> Response {
    let count = running.left;
    let mut stream = Stream {
        head,
        shape,
        per_prompt,
        include_usage,
        running,
        ends: vec![None; count],
        queue: VecDeque::new(),
        over: false,
    };
    for index in 0..count {
        let first = stream.shape.first(index);
        stream.send(first);
    }
    let pieces = futures_util::stream::unfold(stream, |mut stream| async move {
        let data = stream.next().await?;
        Some((Ok::<_, Infallible>(Sent::default().data(data)), stream))
    });
    Sse::new(pieces).keep_alive(KeepAlive::new().interval(KEEP_ALIVE)).into_response()
}

impl Stream {
    fn send(&mut self, choice: Option<Value>) {
        if let Some(choice) = choice {
            let mut piece = self.head.object(self.shape.chunk_object(), vec![choice]);
            if self.include_usage {
                piece["usage"] = Value::Null;
            }
            self.queue.push_back(piece.to_string());
        }
    }

    async fn next(&mut self) -> Option<String> {
        loop {
            if let Some(data) = self.queue.pop_front() {
                return Some(data);
            }
            if self.over {
                return None;
            }
            match self.running.next().await {
                Ok(Some((index, event))) => self.see(index, event),
                Ok(None) => self.end(),
                Err(error) => {
                    self.queue.push_back(error.body().to_string());
                    self.queue.push_back("[DONE]".into());
                    self.over = true;
                }
            }
        }
    }

    fn see(&mut self, index: usize, event: Event) {
        let piece = match event {
            Event::Prompt(logprobs) => self.shape.prompt(&self.head.hosted.tokenizer, index, &logprobs),
            Event::Piece(Piece { text, token }) => {
                self.shape.piece(&self.head.hosted.tokenizer, index, &text, token.as_ref())
            }
            Event::Finished(finished) => {
                for last in self.shape.last(index, &finished) {
                    self.send(Some(last));
                }
                if let Some(end) = self.ends.get_mut(index) {
                    *end = Some(finished);
                }
                None
            }
            Event::Failed(_) => None,
        };
        self.send(piece);
    }

    fn end(&mut self) {
        self.over = true;
        if self.include_usage {
            let ends: Vec<&Finished> = self.ends.iter().flatten().collect();
            let mut piece = self.head.object(self.shape.chunk_object(), Vec::new());
            piece["usage"] = usage(&ends, self.per_prompt);
            piece["timings"] = timings(&ends);
            self.queue.push_back(piece.to_string());
        }
        self.queue.push_back("[DONE]".into());
    }
}

/// A prompt counts once, however many texts it has.
fn usage(ends: &[&Finished], per_prompt: usize) -> Value {
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

/// Of the first text, as llama.cpp's server says it.
fn timings(ends: &[&Finished]) -> Value {
    let Some(end) = ends.first() else { return Value::Null };
    let ms = |time: Duration| time.as_secs_f64() * 1e3;
    let rate = |count: usize, time: Duration| match time.is_zero() {
        true => 0.0,
        false => count as f64 / time.as_secs_f64(),
    };
    let read = end.prompt_tokens - end.cached_tokens;
    let mut timings = json!({
        "queue_ms": ms(end.waited),
        "cache_n": end.cached_tokens,
        "prompt_n": read,
        "prompt_ms": ms(end.reading),
        "prompt_per_second": rate(read, end.reading),
        "predicted_n": end.completion_tokens,
        "predicted_ms": ms(end.writing),
        "predicted_per_second": rate(end.completion_tokens.saturating_sub(1), end.writing),
    });
    if end.drafted_tokens > 0 {
        timings["draft_n"] = end.drafted_tokens.into();
        timings["draft_n_accepted"] = end.accepted_tokens.into();
    }
    timings
}
