//! Answers within grammars.

use serde_json::{Value, json};

use crate::server::{TestServer, options};
use crate::toy::ToyModel;

const TEMPLATE: &str = "{% for m in messages %}[{{ m.role }}] {{ m.content }}\n{% endfor %}[assistant]";

fn server() -> TestServer {
    TestServer::start(&ToyModel::new(false, None), 4, Some(TEMPLATE), options())
}

fn schema() -> Value {
    json!({"type": "object", "additionalProperties": false, "required": ["zeta", "alpha"],
        "properties": {"zeta": {"enum": ["p", "q"]}, "alpha": {"type": "integer", "minimum": 1, "maximum": 99}}})
}

#[test]
fn answers_are_what_the_schema_says() {
    let server = server();
    let request = json!({"messages": [{"role": "user", "content": "Hi"}], "n": 3, "seed": 5,
        "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": schema()}}});
    let answer = server.ask("/v1/chat/completions", &request);
    let texts: Vec<&str> = answer["choices"]
        .as_array()
        .unwrap()
        .iter()
        .map(|c| c["message"]["content"].as_str().unwrap())
        .collect();
    for text in &texts {
        let value: Value = serde_json::from_str(text).unwrap_or_else(|e| panic!("{e}: {text}"));
        assert!(
            ["p", "q"].contains(&value["zeta"].as_str().unwrap()) && value["alpha"].as_u64().unwrap() <= 99
        );
        assert!(text.find("zeta") < text.find("alpha"), "{text}");
    }
    assert_eq!((texts.len(), &answer["choices"][0]["finish_reason"]), (3, &json!("stop")));
    // The same streamed.
    let mut streamed = request.clone();
    streamed["stream"] = json!(true);
    let mut pieces = vec![String::new(); 3];
    for event in server.post("/v1/chat/completions", &streamed).events() {
        let choice = &event["choices"][0];
        pieces[choice["index"].as_u64().unwrap() as usize] +=
            choice["delta"]["content"].as_str().unwrap_or_default();
    }
    assert_eq!(pieces, texts);
    let completion = |field: &str, value: Value| {
        let answer = server.ask("/v1/completions", &json!({"prompt": "a", "max_tokens": 100, field: value}));
        answer["choices"][0]["text"].as_str().unwrap().to_owned()
    };
    assert!(["yes", "no"].contains(&completion("guided_choice", json!(["yes", "no"])).as_str()));
    assert_eq!(completion("guided_regex", json!("x[bc]{3}")).len(), 4);
    assert_eq!(
        completion("structured_outputs", json!({"grammar": "start: \"(\" start \")\" | \"!\""}))
            .matches('!')
            .count(),
        1
    );
    let object = completion("response_format", json!({"type": "json_object"}));
    assert!(object.trim_start().starts_with('{'), "{object}");
}

#[test]
fn grammars_that_cannot_be_enforced_are_refused() {
    let server = server();
    let cases = [
        ("guided_json", json!({"type": "array", "uniqueItems": true}), "uniqueItems"),
        (
            "response_format",
            json!({"type": "json_schema", "json_schema": {"schema": {"type": "strange"}}}),
            "strange",
        ),
        ("guided_regex", json!("(a"), "unclosed"),
        ("structured_outputs", json!({"grammar": "start: missing"}), "missing"),
        ("guided_grammar", json!("x".repeat(300_000)), "300000 bytes"),
    ];
    for (field, value, part) in cases {
        let refused = server.post("/v1/completions", &json!({"prompt": "a", field: value}));
        assert_eq!(refused.error(), (400, "invalid_grammar".into(), field.into()), "{}", refused.body);
        assert!(refused.body.contains(part), "{}", refused.body);
    }
    // A fault that only shows while the text is written is the request's too.
    let banned = json!({"prompt": "a", "guided_choice": ["a"], "logit_bias": {"98": -100}, "min_tokens": 5});
    assert_eq!(server.ask("/v1/completions", &banned)["choices"][0]["text"], "a");
    let optional: serde_json::Map<String, Value> = (0..2500).map(|i| (format!("p{i}"), json!({}))).collect();
    let wide = json!({"prompt": "a", "guided_json": {"type": "object", "properties": optional}});
    let failed = server.post("/v1/completions", &wide);
    assert_eq!(failed.error(), (400, "grammar_failed".into(), "-".into()), "{}", failed.body);
    server.ask("/v1/completions", &json!({"prompt": "a"}));
}
