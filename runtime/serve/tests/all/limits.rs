//! The largest cost of a request is known before it is done.

use mlcc_serve::ServeOptions;
use serde_json::{Value, json};

use crate::server::{TestResponse, TestServer, options};
use crate::toy::ToyModel;

const TEMPLATE: &str = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}";

fn server(context: Option<usize>, memory: Option<u64>) -> TestServer {
    let options = ServeOptions { request_memory: memory, body_limit: 4 << 20, ..options() };
    TestServer::start(&ToyModel::new(false, context), 2, Some(TEMPLATE), options)
}

/// The answer to a body that is text already.
fn post(server: &TestServer, path: &str, body: &str) -> TestResponse {
    TestResponse::read(server.open("POST", path, "", body))
}

#[test]
fn texts_are_counted_before_any_is_made() {
    let server = server(Some(90), None);
    let refused = (400, "too_many_texts".to_owned(), "-".to_owned());
    // Two run and sixteen wait.
    let prompts = |count: usize, n: usize| json!({"prompt": vec!["a"; count], "n": n, "max_tokens": 1});
    assert_eq!(server.post("/v1/completions", &prompts(1, 19)).error(), refused);
    assert_eq!(server.post("/v1/completions", &prompts(10, 2)).error(), refused);
    assert_eq!(server.ask("/v1/completions", &prompts(9, 2))["choices"].as_array().unwrap().len(), 18);
    // None of these prompts is looked at: each would be an error by itself.
    let lists = json!({"prompt": vec![[-1]; 5000], "n": 128});
    assert_eq!(server.post("/v1/completions", &lists).error(), refused);
    let chat = json!({"messages": [{"role": "user", "content": "a"}], "n": 19});
    assert_eq!(server.post("/v1/chat/completions", &chat).error(), refused);
}

#[test]
fn bodies_of_many_values_are_refused_before_they_are_read() {
    let server = server(Some(90), Some(64 << 20));
    let lists = |count: usize| format!("[{}[1]]", "[1],".repeat(count));
    let body = format!(r#"{{"n": 128, "prompt": {}}}"#, lists(400_000));
    assert_eq!(post(&server, "/v1/completions", &body).error().1, "request_too_large");
    for (path, field) in [("/v1/responses", "metadata"), ("/v1/messages", "metadata"), ("/tokenize", "x")] {
        let body = format!(r#"{{"input": "x", "{field}": {{"a": {}}}}}"#, lists(400_000));
        let refused = post(&server, path, &body);
        assert!(
            refused.status == 400 && refused.body.contains("--request-memory"),
            "{path} {}",
            refused.body
        );
    }
    // The same letters in a text are one value.
    let text = serde_json::to_string(&lists(400)).unwrap();
    assert_eq!(
        post(&server, "/v1/completions", &format!(r#"{{"prompt": {text}}}"#)).error().1,
        "context_length_exceeded"
    );
}

#[test]
fn texts_that_no_context_has_room_for_are_not_made_into_tokens() {
    let server = server(Some(90), None);
    // Tokens have at most two bytes, and the end of a text 13.
    let text = "ab".repeat(1_000_000);
    for (path, body, param) in [
        ("/v1/completions", json!({"prompt": text}), "prompt"),
        ("/v1/completions", json!({"prompt": ["a", text]}), "prompt"),
        ("/v1/completions", json!({"prompt": vec![5; 91]}), "prompt"),
        ("/v1/chat/completions", json!({"messages": [{"role": "user", "content": text}]}), "messages"),
        (
            "/v1/chat/completions",
            json!({"messages": vec![json!({"role": "", "content": ""}); 91]}),
            "messages",
        ),
    ] {
        let refused = server.post(path, &body);
        assert_eq!(
            refused.error(),
            (400, "context_length_exceeded".into(), param.into()),
            "{}",
            refused.body
        );
    }
    let told = server.post("/v1/completions", &json!({"prompt": text})).body;
    assert!(told.contains("2000000 bytes"), "{told}");
    // A model without a context reads any that there is memory for.
    let endless = self::server(None, Some(64 << 20));
    let refused = endless.post("/v1/completions", &json!({"prompt": text, "max_tokens": 1}));
    assert_eq!(refused.error().1, "request_too_large");
    let some = json!({"prompt": "ab".repeat(20_000), "max_tokens": 1});
    assert_eq!(endless.ask("/v1/completions", &some)["usage"]["prompt_tokens"], 20_000);
}

#[test]
fn tokens_are_told_in_bounded_memory() {
    let server = server(Some(90), Some(64 << 20));
    let told = server.ask("/tokenize", &json!({"content": "abc\u{e9}", "with_pieces": true}));
    let pieces: Vec<&str> =
        told["tokens"].as_array().unwrap().iter().map(|t| t["piece"].as_str().unwrap()).collect();
    assert_eq!((pieces, &told["count"]), (vec!["ab", "c", "\u{fffd}", "\u{fffd}"], &json!(4)));
    let ids: Vec<Value> = told["tokens"].as_array().unwrap().iter().map(|t| t["id"].clone()).collect();
    assert_eq!(server.ask("/tokenize", &json!({"content": "abc\u{e9}"})), json!({"tokens": ids, "count": 4}));
    assert_eq!(server.ask("/detokenize", &json!({"tokens": ids})), json!({"content": "abc\u{e9}"}));
    for with_pieces in [true, false] {
        let body = json!({"content": "a b".repeat(500_000), "with_pieces": with_pieces});
        assert_eq!(server.post("/tokenize", &body).error().1, "request_too_large");
    }
    // Short ids may be long tokens.
    let body = json!({"tokens": vec![0; 60_000]});
    let long = server.post("/detokenize", &body);
    assert!([200, 400].contains(&long.status), "{}", long.body);
}

#[test]
fn answers_grow_no_further_than_their_memory() {
    let server = server(Some(4000), Some(16 << 20));
    let scored =
        |n: usize| json!({"prompt": "a", "max_tokens": 500, "n": n, "logprobs": 5, "ignore_eos": true});
    let answer = server.ask("/v1/completions", &scored(1));
    assert_eq!(answer["choices"][0]["logprobs"]["tokens"].as_array().unwrap().len(), 500);
    assert_eq!(server.post("/v1/completions", &scored(10)).error().1, "request_too_large");
    // A client that reads it as it comes needs none.
    let mut streamed = scored(10);
    streamed["stream"] = json!(true);
    let events = server.stream("/v1/completions", &streamed);
    assert_eq!(events.iter().filter(|event| event["choices"][0]["finish_reason"] == "length").count(), 10);
    // The memory has come back.
    server.ask("/v1/completions", &scored(1));
}

#[test]
fn fields_keep_their_order_in_answers_that_are_written_in_parts() {
    let server = server(Some(90), None);
    let body = json!({"prompt": ["a", "b"], "max_tokens": 2, "seed": 1});
    let answer = server.post("/v1/completions", &body);
    let names =
        ["\"id\"", "\"object\"", "\"created\"", "\"model\"", "\"choices\"", "\"usage\"", "\"timings\""];
    let places: Vec<usize> = names.iter().map(|name| answer.body.find(name).unwrap()).collect();
    assert!(places.is_sorted(), "{}", answer.body);
    assert_eq!(answer.json()["choices"][1]["index"], 1);
}

#[test]
fn paths_and_bodies_that_mean_two_things_are_errors_in_json() {
    let server = server(Some(90), None);
    for path in ["/v1/models/%ff", "/models/%ff", "/v1/responses/%ff", "/page/%ff"] {
        assert_eq!(server.get(path).error(), (400, "invalid_path".into(), "-".into()), "{path}");
    }
    let deleted = TestResponse::read(server.open("DELETE", "/v1/responses/%ff", "", ""));
    assert_eq!(deleted.error().1, "invalid_path");
    for body in [r#"{"prompt": "a", "prompt": "b"}"#, r#"{"prompt": "a", "logit_bias": {"1": 1, "1": -1}}"#] {
        let refused = post(&server, "/v1/completions", body);
        assert_eq!(refused.error().1, "invalid_json", "{}", refused.body);
        assert!(refused.body.contains("occurs twice"), "{}", refused.body);
    }
}
