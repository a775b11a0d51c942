//! `/v1/responses`: the answers of chats, in items, from which later requests go on.

use mlcc_serve::ServeOptions;
use serde_json::{Value, json};

use crate::server::{TestResponse, TestServer, options};
use crate::toy::ToyModel;

const TEMPLATE: &str = "{% if tools %}[tools]{% endif %}{% for m in messages %}[{{ m.role }}] {{ m.content or '' }}{% for c in m.tool_calls or [] %}{{ '\n' if not loop.first else '' }}<call>\n{\"name\": \"{{ c.function.name }}\", \"arguments\": {{ c.function.arguments | tojson }}}\n</call>{% endfor %}\n{% endfor %}{% if add_generation_prompt %}[assistant] {% endif %}";

fn server(keys: &[&str]) -> TestServer {
    let api_keys = keys.iter().map(|key| key.to_string()).collect();
    TestServer::start(
        &ToyModel::new(false, Some(4000)),
        2,
        Some(TEMPLATE),
        ServeOptions { api_keys, ..options() },
    )
}

fn events(answer: &TestResponse) -> Vec<Value> {
    let names: Vec<&str> = answer.body.lines().filter_map(|line| line.strip_prefix("event: ")).collect();
    let data = answer.body.lines().filter_map(|line| line.strip_prefix("data: "));
    let data: Vec<Value> = data.map(|text| serde_json::from_str(text).unwrap()).collect();
    assert_eq!(names, data.iter().map(|event| event["type"].as_str().unwrap()).collect::<Vec<_>>());
    for (at, event) in data.iter().enumerate() {
        assert_eq!(event["sequence_number"], at, "{event}");
    }
    data
}

fn text(response: &Value) -> String {
    assert_eq!(response["output"][0]["type"], "message", "{response}");
    response["output"][0]["content"][0]["text"].as_str().unwrap().to_owned()
}

/// The request with more fields.
fn with(base: &Value, more: Value) -> Value {
    let mut body = base.clone();
    body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    body
}

#[test]
fn texts_are_those_of_chats_and_go_on() {
    let server = server(&[]);
    let base =
        json!({"model": "toy", "temperature": 0, "max_output_tokens": 12, "instructions": "Be brief."});
    let first = server.ask("/v1/responses", &with(&base, json!({"input": "Hi", "metadata": {"a": "b"}})));
    let chat = |messages: Value| {
        let body = json!({"messages": messages, "temperature": 0, "max_tokens": 12});
        server.ask("/v1/chat/completions", &body)["choices"][0]["message"]["content"]
            .as_str()
            .unwrap()
            .to_owned()
    };
    let system = json!({"role": "system", "content": "Be brief."});
    let hi = json!({"role": "user", "content": "Hi"});
    assert_eq!(text(&first), chat(json!([system, hi])));
    assert_eq!((&first["status"], &first["metadata"]), (&json!("incomplete"), &json!({"a": "b"})));
    assert_eq!(first["incomplete_details"]["reason"], "max_output_tokens");
    assert_eq!(first["usage"]["output_tokens"], 12);
    // From there: the instructions are those of each request.
    let next = json!({"previous_response_id": first["id"], "instructions": null, "input": [{"role": "user", "content": "More"}]});
    let second = server.ask("/v1/responses", &with(&base, next.clone()));
    let said = json!({"role": "assistant", "content": text(&first)});
    assert_eq!(text(&second), chat(json!([hi, said, {"role": "user", "content": "More"}])));
    let streamed = events(&server.post("/v1/responses", &with(&with(&base, next), json!({"stream": true}))));
    let delta: String = streamed
        .iter()
        .filter(|e| e["type"] == "response.output_text.delta")
        .map(|e| e["delta"].as_str().unwrap())
        .collect();
    assert_eq!(delta, text(&second));
    let kinds: Vec<&str> = streamed.iter().map(|event| event["type"].as_str().unwrap()).collect();
    let begin = [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
    ];
    let end = [
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.incomplete",
    ];
    assert_eq!((&kinds[..4], &kinds[kinds.len() - 4..]), (&begin[..], &end[..]));
    let last = &streamed[streamed.len() - 1]["response"];
    assert_eq!(
        (&last["output"][0]["content"], &last["previous_response_id"]),
        (&second["output"][0]["content"], &first["id"])
    );
    // One that was not kept.
    let unkept = server.ask("/v1/responses", &with(&base, json!({"input": "Hi", "store": false})));
    let lost = with(&base, json!({"input": "a", "previous_response_id": unkept["id"]}));
    let refused = server.post("/v1/responses", &lost).error();
    assert_eq!(refused, (400, "previous_response_not_found".into(), "previous_response_id".into()));
    // Kept ones are given again and may be forgotten; what went on from them is not.
    let path = format!("/v1/responses/{}", first["id"].as_str().unwrap());
    assert_eq!(server.get(&path).json(), first);
    let forgotten = TestResponse::read(server.open("DELETE", &path, "", ""));
    assert_eq!((forgotten.status, &forgotten.json()["deleted"]), (200, &json!(true)));
    let missing = (404, "response_not_found".into(), "id".into());
    assert_eq!(
        (server.get(&path).error(), TestResponse::read(server.open("DELETE", &path, "", "")).error()),
        (missing.clone(), missing)
    );
    let next = server.get(&format!("/v1/responses/{}", second["id"].as_str().unwrap()));
    assert_eq!(next.json(), second);
}

#[test]
fn calls_are_items() {
    let server = server(&[]);
    let schema = json!({"type": "object", "properties": {"city": {"enum": ["Ulm", "Jena"]}}, "required": ["city"], "additionalProperties": false});
    let tool = json!({"type": "function", "name": "weather", "description": "d", "strict": true, "parameters": schema});
    let body = json!({"input": "Hi", "tools": [tool], "tool_choice": {"type": "function", "name": "weather"}, "seed": 3});
    let called = server.ask("/v1/responses", &body);
    let item = &called["output"][0];
    assert_eq!(
        (&item["type"], &item["name"], &called["status"]),
        (&json!("function_call"), &json!("weather"), &json!("completed"))
    );
    let arguments: Value = serde_json::from_str(item["arguments"].as_str().unwrap()).unwrap();
    assert!(["Ulm", "Jena"].contains(&arguments["city"].as_str().unwrap()));
    assert_eq!((&called["tools"][0], &called["tool_choice"]["name"]), (&tool, &json!("weather")));
    let streamed = events(&server.post("/v1/responses", &with(&body, json!({"stream": true}))));
    let pieces: String = streamed
        .iter()
        .filter(|e| e["type"] == "response.function_call_arguments.delta")
        .map(|e| e["delta"].as_str().unwrap())
        .collect();
    assert_eq!(pieces, item["arguments"]);
    assert!(
        streamed
            .iter()
            .any(|e| e["type"] == "response.function_call_arguments.done"
                && e["arguments"] == item["arguments"])
    );
    let result = json!([{"type": "function_call_output", "call_id": item["call_id"], "output": "rain"}]);
    let next = json!({"input": result, "previous_response_id": called["id"], "tools": [tool], "max_output_tokens": 4});
    assert_eq!(server.ask("/v1/responses", &next)["usage"]["output_tokens"], 4);
    let format =
        json!({"format": {"type": "json_schema", "name": "x", "schema": {"enum": ["yes"]}, "strict": true}});
    let held = server.ask("/v1/responses", &json!({"input": "Hi", "text": format}));
    assert_eq!((text(&held).as_str(), &held["text"]), ("\"yes\"", &format));
}

#[test]
fn wrong_requests_are_named() {
    let server = server(&[]);
    let cases = [
        (json!({}), "input", "missing_field"),
        (json!({"input": 5}), "input", "invalid_value"),
        (json!({"input": "a", "background": true}), "background", "unsupported"),
        (json!({"input": "a", "truncation": "auto"}), "truncation", "unsupported"),
        (json!({"input": "a", "messages": ["b"]}), "messages", "unknown_field"),
        (json!({"input": "a", "text": {"format": {"type": "yaml"}}}), "text", "invalid_value"),
        (json!({"input": "a", "tools": [{"name": "web_search"}]}), "tools[0]", "invalid_value"),
        (json!({"input": "a", "include": ["message.output_text.logprobs"]}), "include", "unsupported"),
        (json!({"input": "a", "max_output_tokens": "x"}), "max_output_tokens", "invalid_type"),
        (
            json!({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}),
            "input[0]",
            "unsupported_content",
        ),
    ];
    for (body, param, code) in cases {
        let refused = server.post("/v1/responses", &body);
        assert_eq!(refused.error(), (400, code.into(), param.into()), "{body}: {}", refused.body);
    }
}

#[test]
fn clients_of_other_keys_have_other_answers() {
    let server = server(&["one", "two"]);
    let ask = |key: &str, body: Value| {
        let header = format!("Authorization: Bearer {key}\r\nX-Request-Id: my-{key}\r\n");
        TestResponse::read(server.open("POST", "/v1/responses", &header, &body.to_string()))
    };
    let first = ask("one", json!({"input": "Hi", "max_output_tokens": 3}));
    assert_eq!((first.status, first.header("x-request-id")), (200, Some("my-one")));
    let next = json!({"input": "Hi", "max_output_tokens": 3, "previous_response_id": first.json()["id"]});
    assert_eq!(ask("one", next.clone()).status, 200);
    assert_eq!(ask("two", next.clone()).error().1, "previous_response_not_found");
    assert_eq!(ask("three", next).status, 401);
    let strange = TestResponse::read(server.open("GET", "/health", "X-Request-Id: a b\\\"c\r\n", ""));
    assert!(strange.header("x-request-id").is_some_and(|id| id.starts_with("req-")), "{}", strange.head);
}
