//! Traces of requests, in memory and at a collector.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpListener;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, mpsc};
use std::time::{Duration, Instant};

use mlcc_serve::{ServeOptions, ShutdownOutcome, TraceExporter};
use opentelemetry::Value as Attribute;
use opentelemetry::trace::{SpanId, SpanKind, Status};
use opentelemetry_sdk::error::OTelSdkResult;
use opentelemetry_sdk::trace::{Sampler, SdkTracerProvider, SpanData, SpanExporter};
use serde_json::{Value, json};

use crate::server::{TestResponse, TestServer, options, until};
use crate::toy::{FAILS, ToyModel};

const TEMPLATE: &str = "{% for m in messages %}{{ m.content }}{% endfor %}";
const TRACE: &str = "0af7651916cd43dd8448eb211c80319c";
const PARENT: &str = "b7ad6b7169203331";

/// Keeps all spans.
#[derive(Debug, Clone, Default)]
struct SpanRecorder(Arc<Mutex<Vec<SpanData>>>);

impl SpanExporter for SpanRecorder {
    async fn export(&self, batch: Vec<SpanData>) -> OTelSdkResult {
        self.0.lock().unwrap().extend(batch);
        Ok(())
    }
}

impl SpanRecorder {
    fn server(&self, sampler: Sampler) -> TestServer {
        let provider = SdkTracerProvider::builder().with_simple_exporter(self.clone()).with_sampler(sampler);
        let traces = TraceExporter::new(provider.build());
        TestServer::start(
            &ToyModel::new(false, Some(4000)),
            2,
            Some(TEMPLATE),
            ServeOptions { traces, ..options() },
        )
    }

    /// The spans of requests, when there are `count`.
    fn requests(&self, count: usize) -> Vec<SpanData> {
        let of_requests = || -> Vec<SpanData> {
            let all = self.0.lock().unwrap();
            all.iter().filter(|span| span.span_kind == SpanKind::Server).cloned().collect()
        };
        until(|| of_requests().len() >= count);
        assert_eq!(of_requests().len(), count);
        of_requests()
    }

    /// The spans inside of one, in the order of their begin.
    fn inside(&self, parent: &SpanData) -> Vec<SpanData> {
        let all = self.0.lock().unwrap();
        let id = parent.span_context.span_id();
        let mut found: Vec<_> = all.iter().filter(|span| span.parent_span_id == id).cloned().collect();
        found.sort_by_key(|span| span.start_time);
        found
    }
}

fn get<'a>(span: &'a SpanData, key: &str) -> Option<&'a Attribute> {
    span.attributes.iter().find(|attribute| attribute.key.as_str() == key).map(|attribute| &attribute.value)
}

#[track_caller]
fn has(span: &SpanData, key: &str, value: impl Into<Attribute>) {
    assert_eq!(get(span, key), Some(&value.into()), "{key} of {span:?}");
}

#[track_caller]
fn ended_by(span: &SpanData, reasons: &str) {
    let found = get(span, "gen_ai.response.finish_reasons").map(|value| value.as_str().into_owned());
    assert_eq!(found.as_deref(), Some(reasons), "{span:?}");
}

fn post(server: &TestServer, path: &str, headers: &str, body: &Value) -> TestResponse {
    TestResponse::read(server.open("POST", path, headers, &body.to_string()))
}

#[test]
fn a_chat_has_a_span_within_the_trace_of_its_client() {
    let kept = SpanRecorder::default();
    let server = kept.server(Sampler::ParentBased(Box::new(Sampler::AlwaysOn)));
    let body = json!({"messages": [{"role": "user", "content": "abba"}], "max_tokens": 5, "seed": 3, "ignore_eos": true, "temperature": 0.5});
    let headers = format!("traceparent: 00-{TRACE}-{PARENT}-01\r\nx-request-id: mine\r\n");
    let answer = post(&server, "/v1/chat/completions", &headers, &body);
    assert_eq!(answer.status, 200, "{}", answer.body);
    let usage = answer.json()["usage"].clone();
    let span = kept.requests(1).remove(0);
    assert_eq!(span.name, "chat toy");
    assert_eq!(span.span_context.trace_id().to_string(), TRACE);
    assert_eq!(span.parent_span_id.to_string(), PARENT);
    assert_eq!(span.status, Status::Unset);
    for (key, value) in [
        ("http.request.method", "POST"),
        ("http.route", "/v1/chat/completions"),
        ("gen_ai.operation.name", "chat"),
        ("gen_ai.provider.name", "mlcc"),
        ("gen_ai.request.model", "toy"),
        ("gen_ai.response.model", "toy"),
        ("mlcc.request.id", "mine"),
    ] {
        has(&span, key, value);
    }
    has(&span, "http.response.status_code", 200);
    has(&span, "gen_ai.request.max_tokens", 5);
    has(&span, "gen_ai.request.seed", 3);
    has(&span, "gen_ai.request.temperature", 0.5);
    has(&span, "gen_ai.usage.input_tokens", usage["prompt_tokens"].as_i64().unwrap());
    has(&span, "gen_ai.usage.output_tokens", 5);
    ended_by(&span, "[\"length\"]");
    assert!(
        matches!(get(&span, "gen_ai.response.time_to_first_chunk"), Some(Attribute::F64(time)) if *time > 0.0)
    );
    // The events of the text, in order and inside of the request.
    let inside = kept.inside(&span);
    let names: Vec<&str> = inside.iter().map(|span| span.name.as_ref()).collect();
    assert_eq!(names, ["queue", "prompt", "generation"]);
    for pair in inside.windows(2) {
        assert_eq!(pair[0].end_time, pair[1].start_time);
    }
    assert!(span.start_time <= inside[0].start_time && inside[2].end_time <= span.end_time);
    has(&inside[2], "gen_ai.usage.output_tokens", 5);
    assert!(!format!("{:?}", kept.0.lock().unwrap()).contains("abba"), "no texts in traces");
}

#[test]
fn texts_of_one_request_are_added_up() {
    let kept = SpanRecorder::default();
    let server = kept.server(Sampler::AlwaysOn);
    let body = json!({"prompt": ["ab", "aab"], "n": 2, "max_tokens": 3, "ignore_eos": true, "stream": true, "stream_options": {"include_usage": true}});
    let usage = server.stream("/completions", &body).pop().unwrap()["usage"].clone();
    let span = kept.requests(1).remove(0);
    assert_eq!((span.name.as_ref(), span.parent_span_id), ("text_completion toy", SpanId::INVALID));
    has(&span, "gen_ai.usage.input_tokens", usage["prompt_tokens"].as_i64().unwrap());
    has(&span, "gen_ai.usage.output_tokens", 12);
    has(&span, "gen_ai.request.choice.count", 2);
    ended_by(&span, "[\"length\",\"length\",\"length\",\"length\"]");
    assert_eq!(kept.inside(&span).iter().filter(|span| span.name == "generation").count(), 4);
}

#[test]
fn refused_and_failed_requests_tell_why() {
    let kept = SpanRecorder::default();
    let server = kept.server(Sampler::AlwaysOn);
    assert_eq!(server.post("/v1/completions", &json!({"prompt": "a", "model": "none"})).status, 404);
    assert_eq!(server.post("/v1/messages", &json!({"messages": []})).status, 400);
    let failing = json!({"prompt": [5, 6, FAILS], "max_tokens": 4});
    assert_eq!(server.post("/v1/completions", &failing).status, 500);
    let streamed = json!({"prompt": [5, 6, FAILS], "max_tokens": 4, "stream": true});
    assert_eq!(server.post("/v1/completions", &streamed).status, 200);
    // Neither of these asks a model for anything.
    assert_eq!(server.get("/health").status, 200);
    assert_eq!(server.post("/tokenize", &json!({"content": "a"})).status, 200);
    assert_eq!(server.post("/v1/nothing", &json!({})).status, 404);
    let spans = kept.requests(4);
    let of = |status: i64, code: &str| {
        let same = |span: &&SpanData| get(span, "error.type") == Some(&code.to_owned().into());
        let found = spans
            .iter()
            .filter(same)
            .find(|span| get(span, "http.response.status_code") == Some(&status.into()));
        found.unwrap_or_else(|| panic!("{status} {code}: {spans:?}"))
    };
    let unknown = of(404, "model_not_found");
    assert_eq!((unknown.name.as_ref(), &unknown.status), ("POST /v1/completions", &Status::Unset));
    assert_eq!(get(unknown, "gen_ai.usage.input_tokens"), None);
    let wrong = spans.iter().find(|span| span.name == "chat toy").unwrap();
    has(wrong, "http.response.status_code", 400);
    assert_eq!(of(500, "internal_error").status, Status::error("internal_error"));
    // The head had been sent.
    assert_eq!(of(200, "internal_error").status, Status::error("internal_error"));
}

#[test]
fn a_client_that_goes_away_has_its_span() {
    let kept = SpanRecorder::default();
    let server = kept.server(Sampler::AlwaysOn);
    let body = json!({"prompt": "ab", "max_tokens": 3000, "ignore_eos": true, "stream": true});
    let mut stream = server.open("POST", "/v1/completions", "", &body.to_string());
    let mut line = String::new();
    while !line.starts_with("data: ") {
        line.clear();
        assert!(stream.read_line(&mut line).unwrap() > 0);
    }
    drop(stream);
    let span = kept.requests(1).remove(0);
    ended_by(&span, "[\"cancelled\"]");
    let written = get(&span, "gen_ai.usage.output_tokens").cloned();
    assert!(matches!(written, Some(Attribute::I64(1..3000))), "{written:?}");
}

#[test]
fn what_is_not_sampled_is_not_recorded() {
    let kept = SpanRecorder::default();
    let mut server = kept.server(Sampler::ParentBased(Box::new(Sampler::AlwaysOn)));
    let body = json!({"prompt": "ab", "max_tokens": 2});
    let headers = format!("traceparent: 00-{TRACE}-{PARENT}-00\r\n");
    assert_eq!(post(&server, "/v1/completions", &headers, &body).status, 200);
    // One that is no trace is none.
    assert_eq!(post(&server, "/v1/completions", "traceparent: 00-xyz-1\r\n", &body).status, 200);
    server.stop();
    let span = kept.requests(1).remove(0);
    assert_eq!(span.parent_span_id, SpanId::INVALID);
}

/// Takes one request, and gives its head and its body.
fn collector() -> (String, mpsc::Receiver<(String, Vec<u8>)>) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let endpoint = format!("http://{}/v1/traces", listener.local_addr().unwrap());
    let (sender, received) = mpsc::channel();
    std::thread::spawn(move || {
        let mut stream = BufReader::new(listener.accept().unwrap().0);
        let mut head = String::new();
        while !head.ends_with("\r\n\r\n") {
            assert!(stream.read_line(&mut head).unwrap() > 0);
        }
        let head = head.to_ascii_lowercase();
        let length = head.lines().find_map(|line| line.strip_prefix("content-length: ")).unwrap();
        let mut body = vec![0; length.parse().unwrap()];
        stream.read_exact(&mut body).unwrap();
        let answer = b"HTTP/1.1 200 OK\r\nContent-Type: application/x-protobuf\r\nContent-Length: 0\r\n\r\n";
        stream.get_mut().write_all(answer).unwrap();
        sender.send((head, body)).unwrap();
    });
    (endpoint, received)
}

#[test]
fn a_collector_gets_all_spans_before_the_server_ends() {
    let (endpoint, received) = collector();
    let options = ServeOptions { traces: TraceExporter::to(&endpoint, None).unwrap(), ..options() };
    let mut server = TestServer::start(&ToyModel::new(false, None), 2, None, options);
    server.ask("/v1/completions", &json!({"prompt": "ab", "max_tokens": 2}));
    assert_eq!(server.stop(), ShutdownOutcome::Drained);
    let (head, body) = received.recv_timeout(Duration::ZERO).expect("it came before the end");
    assert!(head.starts_with("post /v1/traces http/1.1\r\n"), "{head}");
    assert!(head.contains("content-type: application/x-protobuf\r\n"), "{head}");
    // Strings are in protobuf as they are.
    let text = String::from_utf8_lossy(&body);
    for part in
        ["service.name", "mlcc", "text_completion toy", "queue", "generation", "gen_ai.usage.output_tokens"]
    {
        assert!(text.contains(part), "{part}: {text}");
    }
}

static WARNED: AtomicUsize = AtomicUsize::new(0);

fn warn(what: &str) {
    assert!(what.contains("traces do not arrive"), "{what}");
    WARNED.fetch_add(1, Ordering::Relaxed);
}

#[test]
fn a_collector_that_is_not_there_changes_nothing() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let endpoint = format!("http://{}/v1/traces", listener.local_addr().unwrap());
    drop(listener);
    let options = ServeOptions { traces: TraceExporter::to(&endpoint, Some(warn)).unwrap(), ..options() };
    let mut server = TestServer::start(&ToyModel::new(false, None), 2, None, options);
    for _ in 0..20 {
        server.ask("/v1/completions", &json!({"prompt": "ab", "max_tokens": 2}));
    }
    let begin = Instant::now();
    assert_eq!(server.stop(), ShutdownOutcome::Drained);
    assert!(begin.elapsed() < Duration::from_secs(20), "{:?}", begin.elapsed());
    assert_eq!(WARNED.load(Ordering::Relaxed), 1, "told once");
}

#[test]
fn an_endpoint_that_is_none_is_refused() {
    let refused = TraceExporter::to("not an address", None).unwrap_err().to_string();
    assert!(refused.contains("OTEL_EXPORTER_OTLP_"), "{refused}");
}
