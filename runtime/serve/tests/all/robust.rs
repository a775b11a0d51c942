//! Faults of clients and models: each gets its answer, and the server goes on.

use std::io::{BufRead, ErrorKind, Read, Write};
use std::net::TcpStream;
use std::time::Duration;

use mlcc_serve::{NoLibrary, ServeError, ShutdownOutcome, serve};
use serde_json::{Value, json};

use crate::server::{TestResponse, TestServer, named, options, until};
use crate::toy::{FAILS, PANICS, ToyModel};

fn server(toy: &ToyModel) -> TestServer {
    TestServer::start(toy, 2, None, options())
}

fn completion(prompt: Value, tokens: usize) -> Value {
    json!({"prompt": prompt, "max_tokens": tokens, "seed": 3, "ignore_eos": true})
}

/// Texts that run and wait.
fn busy(server: &TestServer) -> usize {
    let slots = server.get("/slots").json();
    slots.as_array().unwrap().iter().filter(|slot| slot["is_processing"] == true).count()
}

#[test]
fn a_step_that_panics_is_an_error_of_its_texts() {
    let mut server = server(&ToyModel::new(false, None));
    for (token, part) in [(PANICS, "told to panic"), (FAILS, "is refused")] {
        let failed = server.post("/v1/completions", &completion(json!([5, 6, token]), 4));
        assert_eq!(failed.error(), (500, "internal_error".into(), "-".into()), "{}", failed.body);
        assert!(failed.body.contains(part), "{}", failed.body);
        // In a stream that has started it is an event.
        let mut streamed = completion(json!([[5, 6, token], [7, 8]]), 4);
        streamed["stream"] = json!(true);
        let events = server.post("/v1/completions", &streamed).events();
        assert!(events.iter().any(|event| event["error"]["code"] == "internal_error"), "{events:?}");
    }
    assert_eq!(server.get("/health").status, 200);
    let answer = server.ask("/v1/completions", &completion(json!([5, 6]), 4));
    assert_eq!(answer["usage"]["completion_tokens"], 4);
    assert_eq!(busy(&server), 0);
    assert_eq!(server.stop(), ShutdownOutcome::Drained);
}

#[test]
fn a_prompt_over_the_context_is_refused_with_both_numbers() {
    let server = server(&ToyModel::new(false, Some(90)));
    let long = server.post("/v1/completions", &completion(json!("a".repeat(91)), 4));
    assert_eq!(long.error(), (400, "context_length_exceeded".into(), "prompt".into()));
    assert!(long.body.contains("91 tokens") && long.body.contains("at most 90"), "{}", long.body);
    // One that just fits has room for one token, which is not computed.
    let full = server.ask("/v1/completions", &completion(json!("a".repeat(90)), 4));
    assert_eq!(
        (&full["usage"]["completion_tokens"], &full["choices"][0]["finish_reason"]),
        (&json!(1), &json!("length"))
    );
}

/// The connection after the head of a stream, or after the first of its events.
fn begun(server: &TestServer, body: &Value, events: usize) -> std::io::BufReader<TcpStream> {
    let mut stream = server.open("POST", "/v1/completions", "", &body.to_string());
    let mut seen = 0;
    while seen < events {
        let mut line = String::new();
        assert!(stream.read_line(&mut line).unwrap() > 0, "the connection has ended");
        seen += usize::from(line.starts_with("data: "));
    }
    stream
}

#[test]
fn who_goes_away_in_any_phase_leaves_nothing_behind() {
    let server = server(&ToyModel::new(true, None));
    let text = |stream: bool| json!({"prompt": "ab".repeat(400), "max_tokens": 100_000_000, "ignore_eos": true, "stream": stream});
    let head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 500\r\n";
    for sent in ["", "POST", head, &format!("{head}\r\n"), &format!("{head}\r\n{{\"prompt\": \"a")] {
        let mut half = TcpStream::connect(&server.address).unwrap();
        half.write_all(sent.as_bytes()).unwrap();
    }
    for events in [0, 1, 20] {
        drop(begun(&server, &text(true), events));
    }
    drop(server.open("POST", "/v1/completions", "", &text(false).to_string()));
    // More than run at a time: some go while they wait.
    let waiting: Vec<_> =
        (0..6).map(|_| server.open("POST", "/v1/completions", "", &text(false).to_string())).collect();
    until(|| busy(&server) == 2);
    drop(waiting);
    until(|| {
        busy(&server) == 0 && server.get("/metrics").body.contains("mlcc_texts_waiting{model=\"toy\"} 0\n")
    });
    server.ask("/v1/completions", &completion(json!("a"), 4));
}

#[test]
fn who_sends_too_slowly_is_told_so_or_loses_the_connection() {
    let patience = Duration::from_millis(300);
    let slow = mlcc_serve::ServeOptions { read_timeout: patience, ..options() };
    let server = TestServer::start(&ToyModel::new(true, None), 2, None, slow);
    let connect = |sent: &str| {
        let mut stream = TcpStream::connect(&server.address).unwrap();
        stream.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
        stream.write_all(sent.as_bytes()).unwrap();
        stream
    };
    let head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 500\r\n";
    // Nothing, and half a head, of which more comes now and then.
    for sent in ["", "POST", head] {
        let mut stream = connect(sent);
        let mut drops = stream.try_clone().unwrap();
        let dripping = std::thread::spawn(move || {
            // Until the other side has closed; what is sent then is refused.
            while !sent.is_empty() && drops.write_all(b"X").is_ok() {
                std::thread::sleep(patience / 10);
            }
        });
        let mut rest = Vec::new();
        // The connection may end by a reset, as some of its bytes were not read.
        let ended = stream.read_to_end(&mut rest);
        assert!(
            ended.as_ref().map_or_else(|e| e.kind() == ErrorKind::ConnectionReset, |_| true),
            "{ended:?}"
        );
        drop(stream);
        dripping.join().unwrap();
        assert_eq!(String::from_utf8_lossy(&rest), "", "{sent:?}");
    }
    // Half a body.
    let stream = connect(&format!("{head}Connection: close\r\n\r\n{{\"prompt\": \"a"));
    let answer = TestResponse::read(std::io::BufReader::new(stream));
    assert_eq!(answer.error(), (408, "body_too_slow".into(), "-".into()));
    // Answers may take longer.
    let text = server.ask("/v1/completions", &completion(json!("a"), 20_000));
    assert_eq!(text["usage"]["completion_tokens"], 20_000);
}

#[test]
fn a_full_queue_says_when_to_try_again() {
    let one = mlcc_serve::ServeOptions { max_queue: 1, ..options() };
    let server = TestServer::start(&ToyModel::new(true, None), 1, None, one);
    let endless = json!({"prompt": "a", "max_tokens": 100_000_000, "ignore_eos": true, "stream": true});
    let running: Vec<_> = (0..2).map(|n| begun(&server, &endless, usize::from(n == 0))).collect();
    until(|| server.get("/metrics").body.contains("mlcc_texts_waiting{model=\"toy\"} 1\n"));
    let refused = server.post("/v1/completions", &completion(json!("a"), 1));
    assert_eq!(refused.error(), (429, "queue_full".into(), "-".into()));
    assert!(refused.head.contains("\r\nretry-after: 1\r\n"), "{}", refused.head);
    drop(running);
    until(|| server.post("/v1/completions", &completion(json!("a"), 1)).status == 200);
}

#[test]
fn bytes_that_are_no_request() {
    let server = server(&ToyModel::new(true, None));
    let deep = format!("{{\"prompt\": {}", "[".repeat(100_000));
    for body in
        ["{\"prompt\": \"a\"", "", "null", "\"text\"", "{\"prompt\": \"\\ud800\"}", "{\"a\": 1e999}", &deep]
    {
        let answer = TestResponse::read(server.open("POST", "/v1/completions", "", body));
        assert_eq!(answer.error().0, 400, "{body:.40}: {}", answer.body);
    }
    let mut bytes = TcpStream::connect(&server.address).unwrap();
    let body = b"{\"prompt\": \"\xff\xfe\"}";
    write!(
        bytes,
        "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Length: {}\r\n\r\n",
        body.len()
    )
    .unwrap();
    bytes.write_all(body).unwrap();
    assert_eq!(TestResponse::read(std::io::BufReader::new(bytes)).error().1, "invalid_json");
    let unknown = server.post("/v1/completions", &json!({"prompt": "a", "model": "other"}));
    assert_eq!(unknown.error(), (404, "model_not_found".into(), "model".into()));
    let mut garbage = TcpStream::connect(&server.address).unwrap();
    garbage.write_all(b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03 no HTTP at all\r\n\r\n").unwrap();
    assert_eq!(server.get("/health").status, 200);
}

#[test]
fn a_second_server_on_a_port_is_refused() {
    let server = server(&ToyModel::new(true, None));
    let port = server.address.rsplit(':').next().unwrap().parse().unwrap();
    let second = mlcc_serve::ServeOptions { port, ..options() };
    let stop = std::sync::atomic::AtomicBool::new(false);
    let models = vec![named("toy", &ToyModel::new(true, None), 1, None)];
    let refused = serve(models, Box::new(NoLibrary), &second, &stop, |_, _| panic!("it is ready"));
    let error = refused.unwrap_err();
    assert!(matches!(error, ServeError::Listen { .. }) && error.to_string().contains("--port"), "{error}");
    assert_eq!(server.get("/health").status, 200);
}
