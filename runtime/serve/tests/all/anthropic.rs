//! `/v1/messages`: the answers of chats, in blocks.

use serde_json::{Value, json};

use crate::server::{TestResponse, TestServer, options};
use crate::toy::ToyModel;

const TEMPLATE: &str = "{% if tools %}[tools]{% endif %}{% for m in messages %}[{{ m.role }}] {{ m.content or '' }}{% for c in m.tool_calls or [] %}<call>{{ c.function.name }}:{{ c.function.arguments | tojson }}</call>{% endfor %}\n{% endfor %}{% if add_generation_prompt %}[assistant] {% endif %}";

fn server() -> TestServer {
    TestServer::start(&ToyModel::new(false, Some(2000)), 2, Some(TEMPLATE), options())
}

fn events(answer: &TestResponse) -> Vec<Value> {
    let names: Vec<&str> = answer.body.lines().filter_map(|line| line.strip_prefix("event: ")).collect();
    let data = answer.body.lines().filter_map(|line| line.strip_prefix("data: "));
    let data: Vec<Value> = data.map(|text| serde_json::from_str(text).unwrap()).collect();
    assert_eq!(names, data.iter().map(|event| event["type"].as_str().unwrap()).collect::<Vec<_>>());
    data
}

#[test]
fn texts_are_those_of_chats() {
    let server = server();
    let sampling = json!({"temperature": 0, "max_tokens": 12});
    let with = |more: Value| {
        let mut body = sampling.clone();
        body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        body
    };
    let chat = with(
        json!({"messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]}),
    );
    let wanted = server.ask("/v1/chat/completions", &chat);
    let own = with(
        json!({"model": "toy", "system": [{"type": "text", "text": "Be brief."}], "metadata": {"user_id": "u"},
        "messages": [{"role": "user", "content": [{"type": "text", "text": "Hi"}]}]}),
    );
    let answer = server.ask("/v1/messages", &own);
    assert_eq!(
        (&answer["type"], &answer["role"], &answer["model"]),
        (&json!("message"), &json!("assistant"), &json!("toy"))
    );
    assert_eq!(
        answer["content"][0],
        json!({"type": "text", "text": wanted["choices"][0]["message"]["content"]})
    );
    let usage = &answer["usage"];
    let read = usage["input_tokens"].as_u64().unwrap() + usage["cache_read_input_tokens"].as_u64().unwrap();
    assert_eq!(
        (json!(read), &usage["output_tokens"]),
        (wanted["usage"]["prompt_tokens"].clone(), &json!(12))
    );
    assert_eq!((&answer["stop_reason"], &answer["stop_sequence"]), (&json!("max_tokens"), &Value::Null));
    let mut counted = own.clone();
    counted.as_object_mut().unwrap().retain(|name, _| name != "max_tokens");
    assert_eq!(server.ask("/v1/messages/count_tokens", &counted), json!({"input_tokens": read}));
    let mut streamed = own.clone();
    streamed["stream"] = json!(true);
    let events = events(&server.post("/v1/messages", &streamed));
    let text: String = events.iter().filter_map(|event| event["delta"]["text"].as_str()).collect();
    assert_eq!(text, answer["content"][0]["text"]);
    let kinds: Vec<&str> = events.iter().map(|event| event["type"].as_str().unwrap()).collect();
    assert_eq!((kinds[0], kinds[1]), ("message_start", "content_block_start"));
    assert_eq!(kinds[kinds.len() - 3..], ["content_block_stop", "message_delta", "message_stop"]);
    assert_eq!(events[kinds.len() - 2]["usage"]["output_tokens"], 12);
    // A text that a stop sequence ends.
    let middle: String = text.chars().skip(3).take(3).collect();
    let mut stopped = own.clone();
    stopped["stop_sequences"] = json!(["never said", middle]);
    let stopped = server.ask("/v1/messages", &stopped);
    assert_eq!(
        (&stopped["stop_reason"], &stopped["stop_sequence"]),
        (&json!("stop_sequence"), &json!(middle))
    );
}

#[test]
fn tools_are_blocks() {
    let server = server();
    let schema = json!({"type": "object", "properties": {"v": {"enum": ["x", "y"]}}, "required": ["v"], "additionalProperties": false});
    let mut asked = json!({"max_tokens": 500, "temperature": 0, "messages": [{"role": "user", "content": "Hi"}],
        "tools": [{"name": "alpha", "description": "d", "input_schema": schema}],
        "tool_choice": {"type": "any", "disable_parallel_tool_use": true}});
    let answer = server.ask("/v1/messages", &asked);
    let call = answer["content"][0].clone();
    assert_eq!(
        (&call["type"], &call["name"], &answer["stop_reason"]),
        (&json!("tool_use"), &json!("alpha"), &json!("tool_use"))
    );
    assert!(["x", "y"].contains(&call["input"]["v"].as_str().unwrap()), "{call}");
    let mut streamed = asked.clone();
    streamed["stream"] = json!(true);
    let events = events(&server.post("/v1/messages", &streamed));
    let json: String = events.iter().filter_map(|event| event["delta"]["partial_json"].as_str()).collect();
    assert_eq!(serde_json::from_str::<Value>(&json).unwrap(), call["input"]);
    assert_eq!(events[1]["content_block"]["name"], "alpha");
    // The next turn, with the result.
    let messages = asked["messages"].as_array_mut().unwrap();
    messages.push(json!({"role": "assistant", "content": answer["content"]}));
    messages.push(
        json!({"role": "user", "content": [{"type": "tool_result", "tool_use_id": call["id"], "content": "5"},
        {"type": "text", "text": "And?"}]}),
    );
    asked["tool_choice"] = json!({"type": "tool", "name": "alpha"});
    assert_eq!(server.ask("/v1/messages", &asked)["stop_reason"], "tool_use");
}

#[test]
fn mistakes_have_that_apis_form() {
    let server = server();
    let base = || json!({"max_tokens": 5, "messages": [{"role": "user", "content": "Hi"}]});
    let cases = [
        ("max_tokens", Value::Null, 400, "invalid_request_error", "max_tokens"),
        ("messages", json!([]), 400, "invalid_request_error", "messages"),
        ("messages", json!([{"role": "robot", "content": "x"}]), 400, "invalid_request_error", "role"),
        (
            "messages",
            json!([{"role": "user", "content": [{"type": "image"}]}]),
            400,
            "invalid_request_error",
            "image",
        ),
        (
            "messages",
            json!([{"role": "user", "content": "x".repeat(3000)}]),
            400,
            "invalid_request_error",
            "at most 2000",
        ),
        ("tool_choice", json!({"type": "maybe"}), 400, "invalid_request_error", "tool_choice"),
        ("tool_choice", json!({"type": "any"}), 400, "invalid_request_error", "tools"),
        ("tools", json!([{"input_schema": {}}]), 400, "invalid_request_error", "name"),
        ("model", json!("claude"), 404, "not_found_error", "claude"),
        ("tempreature", json!(1), 400, "invalid_request_error", "tempreature"),
    ];
    for (name, value, status, kind, part) in cases {
        let mut body = base();
        body[name] = value;
        let refused = server.post("/v1/messages", &body);
        let error = refused.json();
        assert_eq!(
            (refused.status, &error["type"], &error["error"]["type"]),
            (status, &json!("error"), &json!(kind)),
            "{body}"
        );
        assert!(error["error"]["message"].as_str().unwrap().contains(part), "{error}");
    }
    let keyed = mlcc_serve::ServeOptions { api_keys: vec!["s3cret".into()], ..options() };
    let keyed = TestServer::start(&ToyModel::new(false, None), 1, Some(TEMPLATE), keyed);
    let post =
        |headers: &str| TestResponse::read(keyed.open("POST", "/v1/messages", headers, &base().to_string()));
    let status = |headers: &str| post(headers).status;
    assert_eq!(
        (status("x-api-key: s3cret\r\n"), status("x-api-key: other\r\n"), status("")),
        (200, 401, 401)
    );
    // Also those before the request reaches its handler.
    for (refused, kind) in [
        (post(""), "authentication_error"),
        (server.get("/v1/messages"), "invalid_request_error"),
        (server.get("/messages/none"), "not_found_error"),
    ] {
        let error = refused.json();
        assert_eq!((&error["type"], &error["error"]["type"]), (&json!("error"), &json!(kind)), "{error}");
    }
}
