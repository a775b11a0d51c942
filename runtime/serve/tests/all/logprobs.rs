//! Probabilities of completions: every alternative is returned, and tokens are where their characters are.

use serde_json::{Value, json};

use crate::server::{TestServer, options};
use crate::toy::ToyModel;

const TEMPLATE: &str = "{% for m in messages %}{{ m.content }}{% endfor %}";

fn server() -> TestServer {
    TestServer::start(&ToyModel::new(false, Some(2000)), 2, Some(TEMPLATE), options())
}

/// The name in completions of a token that has these bytes.
fn name(bytes: &Value) -> String {
    let bytes: Vec<u8> = bytes.as_array().unwrap().iter().map(|byte| byte.as_u64().unwrap() as u8).collect();
    String::from_utf8(bytes).unwrap_or_else(|error| {
        let bytes = error.into_bytes();
        bytes.iter().fold("bytes:".into(), |name: String, byte| name + &format!("\\x{byte:02x}"))
    })
}

#[test]
fn alternatives_are_those_of_chats() {
    let server = server();
    let base = json!({"temperature": 0, "max_tokens": 12, "ignore_eos": true});
    let with = |more: Value| {
        let mut body = base.clone();
        body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        body
    };
    let chat =
        with(json!({"messages": [{"role": "user", "content": "Hi"}], "logprobs": true, "top_logprobs": 20}));
    let chat = server.ask("/v1/chat/completions", &chat)["choices"][0]["logprobs"]["content"].clone();
    let text = server.ask("/v1/completions", &with(json!({"prompt": "Hi", "logprobs": 20})));
    let found = &text["choices"][0]["logprobs"];
    let mut parts = 0;
    for (at, token) in chat.as_array().unwrap().iter().enumerate() {
        let top = found["top_logprobs"][at].as_object().unwrap();
        assert_eq!(top.len(), 20, "{top:?}");
        for alternative in token["top_logprobs"].as_array().unwrap() {
            let name = name(&alternative["bytes"]);
            assert_eq!(top.get(&name), Some(&alternative["logprob"]), "{name}");
            parts += usize::from(name.starts_with("bytes:\\x"));
        }
        let chosen = name(&token["bytes"]);
        assert_eq!((&found["tokens"][at], &top[&chosen]), (&json!(chosen), &found["token_logprobs"][at]));
    }
    assert!(parts > 20, "the toy has tokens that are parts of characters");
}

#[test]
fn tokens_stand_where_their_characters_do() {
    let server = server();
    let body = json!({"prompt": "na\u{ef}ve \u{1f600}!", "echo": true, "logprobs": 1, "temperature": 1.5, "seed": 5,
        "max_tokens": 60, "ignore_eos": true});
    let whole = server.ask("/v1/completions", &body)["choices"][0].clone();
    let offsets: Vec<u64> =
        whole["logprobs"]["text_offset"].as_array().unwrap().iter().map(|at| at.as_u64().unwrap()).collect();
    assert_eq!(offsets[..12], [0, 1, 2, 2, 3, 4, 5, 6, 6, 6, 6, 7]);
    let text: Vec<char> = whole["text"].as_str().unwrap().chars().collect();
    let tokens = whole["logprobs"]["tokens"].as_array().unwrap();
    let mut parts = 0;
    for (token, &at) in tokens.iter().zip(&offsets) {
        let token = token.as_str().unwrap();
        // A token of the toy is a byte.
        match token.starts_with("bytes:") {
            true => parts += 1,
            false => assert_eq!(token, text[at as usize].to_string()),
        }
    }
    assert!(parts > 8, "{tokens:?}");
    let mut streamed = body.clone();
    streamed["stream"] = json!(true);
    let events = server.stream("/v1/completions", &streamed);
    let of = |event: &Value| {
        event["choices"][0]["logprobs"]["text_offset"].as_array().cloned().unwrap_or_default()
    };
    let streamed: Vec<Value> = events.iter().flat_map(of).collect();
    assert_eq!(streamed, offsets.iter().map(|&at| json!(at)).collect::<Vec<_>>());
}
