//! The span of a request, by the semantic conventions for HTTP servers and for generative AI. Texts are never
//! in it.
//!
//! It ends with the last of its holders: the request, its answer, and its texts in the engine. So the texts
//! of an answer whose client has left are in it too.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, SystemTime};

use axum::extract::Request;
use mlcc_engine::serving::{EngineRequest, RequestSummary, SequenceEvent};
use opentelemetry::propagation::TextMapPropagator;
use opentelemetry::trace::{Span, SpanBuilder, SpanKind, Status, TraceContextExt};
use opentelemetry::{Array, Context, KeyValue, StringValue, Value};
use opentelemetry_http::HeaderExtractor;
use opentelemetry_sdk::propagation::TraceContextPropagator;
use opentelemetry_sdk::trace::SdkTracer;

use crate::error::{ApiError, ErrorCode};
use crate::response_shape::finish_reason;
use crate::traces::TraceExporter;

impl TraceExporter {
    /// The span of a request to a route that asks a model for something. Its parent is that of the header
    /// `traceparent`.
    pub(crate) fn begin(&self, request: &Request, route: &str, id: &str) -> RequestSpan {
        let (Some(tracing), Some(operation)) = (&self.0, operation(route)) else {
            return RequestSpan::default();
        };
        let headers = HeaderExtractor(request.headers());
        let parent = TraceContextPropagator::new().extract_with_context(&Context::new(), &headers);
        let method = request.method().as_str();
        let attributes = [
            KeyValue::new("http.request.method", method.to_owned()),
            KeyValue::new("http.route", route.to_owned()),
            KeyValue::new("url.path", request.uri().path().to_owned()),
            KeyValue::new("url.scheme", "http"),
            KeyValue::new("gen_ai.operation.name", operation),
            KeyValue::new("gen_ai.provider.name", "mlcc"),
            KeyValue::new("mlcc.request.id", id.to_owned()),
        ];
        let builder = SpanBuilder::from_name(format!("{method} {route}"));
        let builder = builder.with_kind(SpanKind::Server).with_attributes(attributes);
        let span = builder.start_with_context(&tracing.tracer, &parent);
        if !span.is_recording() {
            return RequestSpan::default();
        }
        let span = Context::new().with_span(span);
        let tracer = tracing.tracer.clone();
        RequestSpan(Some(Arc::new(SharedSpan { tracer, span, operation, texts: Mutex::default() })))
    }
}

/// The operation of a route, with or without `/v1`.
fn operation(route: &str) -> Option<&'static str> {
    match route.strip_prefix("/v1").unwrap_or(route) {
        "/chat/completions" | "/responses" | "/messages" | "/api/chat" => Some("chat"),
        "/completions" | "/completion" | "/infill" | "/api/generate" => Some("text_completion"),
        "/embeddings" | "/embedding" | "/api/embed" | "/api/embeddings" => Some("embeddings"),
        "/rerank" => Some("rerank"),
        _ => None,
    }
}

/// The span of a request, if it is traced.
#[derive(Clone, Default)]
pub(crate) struct RequestSpan(Option<Arc<SharedSpan>>);

struct SharedSpan {
    tracer: SdkTracer,
    span: Context,
    operation: &'static str,
    texts: Mutex<ChoiceEnds>,
}

/// The ends of the texts of an answer.
#[derive(Default)]
struct ChoiceEnds {
    /// Texts of each prompt; prompts are in order.
    per_prompt: usize,
    ends: Vec<Option<RequestSummary>>,
}

impl RequestSpan {
    fn set(&self, attributes: impl IntoIterator<Item = KeyValue>) {
        if let Some(shared) = &self.0 {
            shared.span.span().set_attributes(attributes);
        }
    }

    /// The model that answers.
    pub fn asks_for(&self, model: &str) {
        let Some(shared) = &self.0 else { return };
        shared.span.span().update_name(format!("{} {model}", shared.operation));
        self.set(
            ["gen_ai.request.model", "gen_ai.response.model"].map(|key| KeyValue::new(key, model.to_owned())),
        );
    }

    /// Texts are launched, `per_prompt` of each prompt.
    pub fn launches(&self, requests: &[EngineRequest], per_prompt: usize) {
        let (Some(shared), Some(request)) = (&self.0, requests.first()) else { return };
        let sampling = &request.sampling;
        let number = |key, value: f32| KeyValue::new(key, f64::from(value));
        self.set([
            number("gen_ai.request.temperature", sampling.temperature),
            number("gen_ai.request.top_p", sampling.top_p),
            number("gen_ai.request.top_k", sampling.top_k as f32),
            number("gen_ai.request.frequency_penalty", sampling.frequency_penalty),
            number("gen_ai.request.presence_penalty", sampling.presence_penalty),
        ]);
        self.set(request.max_tokens.map(|most| count("gen_ai.request.max_tokens", most)));
        self.set(sampling.seed.map(|seed| KeyValue::new("gen_ai.request.seed", seed as i64)));
        self.set((per_prompt != 1).then(|| count("gen_ai.request.choice.count", per_prompt)));
        *shared.texts.lock().unwrap_or_else(PoisonError::into_inner) =
            ChoiceEnds { per_prompt, ends: vec![None; requests.len()] };
    }

    /// The span for the events of a text.
    pub fn text(&self, index: usize) -> TextSpan {
        TextSpan { shared: self.0.clone(), index }
    }

    /// Tokens of texts that became vectors.
    pub fn embedded(&self, tokens: Option<u64>) {
        self.set(tokens.map(|tokens| KeyValue::new("gen_ai.usage.input_tokens", tokens as i64)));
    }

    /// An answer that had started has failed.
    pub fn failed(&self, error: &ApiError) {
        self.wrong(error.status.as_u16(), error.code.unwrap_or(error.kind));
    }

    /// The head of the answer is known, and of an error its code.
    pub fn answered(&self, status: u16, code: Option<ErrorCode>) {
        self.set([KeyValue::new("http.response.status_code", i64::from(status))]);
        if let Some(ErrorCode(code)) = code {
            self.wrong(status, code);
        }
    }

    /// Errors of the client are no errors of the server's span.
    fn wrong(&self, status: u16, code: &'static str) {
        let Some(shared) = &self.0 else { return };
        self.set([KeyValue::new("error.type", code)]);
        if status >= 500 {
            shared.span.span().set_status(Status::error(code));
        }
    }
}

fn count(key: &'static str, value: usize) -> KeyValue {
    KeyValue::new(key, i64::try_from(value).unwrap_or(i64::MAX))
}

impl Drop for SharedSpan {
    /// The sums over all texts. A prompt counts once, however many texts it has.
    fn drop(&mut self) {
        let ChoiceEnds { per_prompt, ends } = self.texts.get_mut().unwrap_or_else(PoisonError::into_inner);
        let span = self.span.span();
        let known: Vec<&RequestSummary> = ends.iter().flatten().collect();
        if let Some(first) = known.first() {
            let prompts = || ends.iter().step_by((*per_prompt).max(1)).flatten();
            let reasons = known.iter().map(|end| StringValue::from(finish_reason(end))).collect();
            span.set_attributes([
                count("gen_ai.usage.input_tokens", prompts().map(|end| end.prompt_tokens).sum()),
                count("gen_ai.usage.cache_read.input_tokens", prompts().map(|end| end.cached_tokens).sum()),
                count("gen_ai.usage.output_tokens", known.iter().map(|end| end.completion_tokens).sum()),
                KeyValue::new("gen_ai.response.finish_reasons", Value::Array(Array::String(reasons))),
            ]);
            if first.completion_tokens > 0 {
                let time = (first.queue_time + first.prefill_time).as_secs_f64();
                span.set_attribute(KeyValue::new("gen_ai.response.time_to_first_chunk", time));
            }
        }
        span.end();
    }
}

/// Makes spans of what happens to one text.
pub(crate) struct TextSpan {
    shared: Option<Arc<SharedSpan>>,
    index: usize,
}

impl TextSpan {
    pub fn see(&mut self, event: &SequenceEvent) {
        let SequenceEvent::Finished(finished) = event else { return };
        // It has no more events, and is not to hold the span.
        let Some(shared) = self.shared.take() else { return };
        self.spans(&shared, finished);
        let mut texts = shared.texts.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(end) = texts.ends.get_mut(self.index) {
            *end = Some(finished.clone());
        }
    }

    /// Waiting, reading and writing, in order until now.
    fn spans(&self, shared: &SharedSpan, finished: &RequestSummary) {
        let RequestSummary { queue_time: waited, prefill_time: reading, decode_time: writing, .. } =
            *finished;
        let written = SystemTime::now();
        let before = |time: SystemTime, length: Duration| time.checked_sub(length).unwrap_or(time);
        let first = before(written, writing);
        let admitted = before(first, reading);
        let launched = before(admitted, waited);
        self.span(shared, "queue", launched, admitted, Vec::new());
        if !reading.is_zero() {
            let tokens = count("gen_ai.usage.input_tokens", finished.prompt_tokens);
            let cached = count("gen_ai.usage.cache_read.input_tokens", finished.cached_tokens);
            self.span(shared, "prompt", admitted, first, vec![tokens, cached]);
        }
        if finished.completion_tokens > 0 {
            let mut about = vec![count("gen_ai.usage.output_tokens", finished.completion_tokens)];
            if finished.drafted_tokens > 0 {
                about.push(count("mlcc.drafted_tokens", finished.drafted_tokens));
                about.push(count("mlcc.accepted_tokens", finished.accepted_tokens));
            }
            self.span(shared, "generation", first, written, about);
        }
    }

    fn span(
        &self,
        shared: &SharedSpan,
        name: &'static str,
        from: SystemTime,
        to: SystemTime,
        about: Vec<KeyValue>,
    ) {
        let choice = (self.index > 0).then(|| count("mlcc.choice", self.index));
        let builder = SpanBuilder::from_name(name).with_start_time(from);
        let builder = builder.with_attributes(about.into_iter().chain(choice));
        builder.start_with_context(&shared.tracer, &shared.span).end_with_timestamp(to);
    }
}
