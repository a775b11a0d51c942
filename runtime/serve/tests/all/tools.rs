//! Calls of tools and reasoning over HTTP. The toy's texts are a hash's: what has the form of a call has it
//! by the grammar.

use serde_json::{Value, json};

use crate::server::{TestServer, options};
use crate::toy::ToyModel;

const CALLS: &str = "{% if tools %}[tools {{ tools | tojson }}]{% endif %}{% for m in messages %}[{{ m.role }}] {{ m.content or '' }}{% for c in m.tool_calls or [] %}{{ '\n' if not loop.first else '' }}<call>\n{\"name\": \"{{ c.function.name }}\", \"arguments\": {{ c.function.arguments | tojson }}}\n</call>{% endfor %}\n{% endfor %}{% if add_generation_prompt %}[assistant] {% endif %}";
/// A tag for each argument.
const TAGS: &str = "{% if tools %}[tools {{ tools | tojson }}]{% endif %}{% for m in messages %}[{{ m.role }}] {{ m.content or '' }}{% for c in m.tool_calls or [] %}{{ '\n' if not loop.first else '' }}<call>\n<function={{ c.function.name }}>\n{% for k, v in c.function.arguments | items %}<parameter={{ k }}>\n{{ v if v is string else v | tojson }}\n</parameter>\n{% endfor %}</function>\n</call>{% endfor %}\n{% endfor %}{% if add_generation_prompt %}[assistant] {% endif %}";
/// The model reasons before it answers.
const THINKS: &str = "{% for m in messages %}[{{ m.role }}] {% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}{{ m.content or '' }}\n{% endfor %}{% if add_generation_prompt %}[assistant] <think>{% endif %}";
const PLAIN: &str = "{% for m in messages %}[{{ m.role }}] {{ m.content }}\n{% endfor %}";

fn server(template: &str) -> TestServer {
    TestServer::start(&ToyModel::new(false, None), 4, Some(template), options())
}

fn tool(name: &str, values: Value) -> Value {
    json!({"type": "function", "function": {"name": name, "description": "d", "parameters": {"type": "object",
        "properties": {"value": {"enum": values}}, "required": ["value"], "additionalProperties": false}}})
}

fn request(more: Value) -> Value {
    let mut body = json!({"messages": [{"role": "user", "content": "Hi"}], "seed": 4,
        "tools": [tool("alpha", json!(["x", "y"])), tool("beta", json!([1, 2]))]});
    body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    body
}

fn is_call(call: &Value, names: &[&str]) {
    assert_eq!((&call["type"], call["id"].as_str().unwrap().len()), (&json!("function"), 9));
    let name = call["function"]["name"].as_str().unwrap();
    assert!(names.contains(&name), "{call}");
    let arguments: Value = serde_json::from_str(call["function"]["arguments"].as_str().unwrap()).unwrap();
    let allowed = if name == "alpha" { json!(["x", "y"]) } else { json!([1, 2]) };
    assert!(allowed.as_array().unwrap().contains(&arguments["value"]), "{call}");
}

#[test]
fn required_and_named_calls_are_made() {
    calls_are_made(CALLS, |name| format!("<call>\n{{\"name\": \"{name}\", \"arguments\": {{\"value\""));
}

#[test]
fn arguments_stand_in_tags_where_the_template_has_them_there() {
    calls_are_made(TAGS, |name| format!("<call>\n<function={name}>\n<parameter=value>\n"));
    let server = server(TAGS);
    // Schemas that no grammar can hold a text in a tag to, where it has to follow all of its schema.
    for (what, value) in [
        ("pattern", json!({"type": "string", "pattern": "^a(?=b)"})),
        ("pattern", json!({"type": "string", "pattern": "a)|(b"})),
        ("pattern", json!({"type": "string", "pattern": 7})),
        ("pattern", json!({"enum": ["a", "b"], "pattern": "^a"})),
        ("format", json!({"type": "string", "format": "date"})),
        ("minLength", json!({"type": "string", "minLength": 3, "maxLength": 2})),
        ("maxLength", json!({"type": "string", "maxLength": 100_000})),
        ("maxLength", json!({"enum": ["a"], "maxLength": 3})),
        ("not", json!({"type": "string", "not": {"const": "a"}})),
        ("$ref", json!({"$ref": "#/$defs/a"})),
    ] {
        let mut strict = request(json!({"tool_choice": "required"}));
        strict["tools"][0]["function"]["parameters"]["properties"]["value"] = value;
        strict["tools"][0]["function"]["strict"] = json!(true);
        let refused = server.post("/v1/chat/completions", &strict);
        assert_eq!(refused.error(), (400, "invalid_grammar".into(), "tools".into()), "{what}");
        let names = refused.body.contains(&format!("`{what}`")) || what == "pattern";
        assert!(names, "{what}: {}", refused.body);
    }
    // A text or null.
    for (value, allowed) in [
        (json!({"type": ["string", "null"], "enum": ["a", null]}), vec![json!("a"), Value::Null]),
        (json!({"type": ["null", "string"], "enum": ["b"]}), vec![json!("b")]),
        (json!({"type": ["string", "null"], "enum": ["a", "null"]}), vec![json!("a"), json!("null")]),
    ] {
        let mut strict =
            request(json!({"tool_choice": {"type": "function", "function": {"name": "alpha"}}, "n": 4}));
        strict["tools"][0]["function"]["parameters"]["properties"]["value"] = value;
        for choice in server.ask("/v1/chat/completions", &strict)["choices"].as_array().unwrap() {
            let arguments = &choice["message"]["tool_calls"][0]["function"]["arguments"];
            let arguments: Value = serde_json::from_str(arguments.as_str().unwrap()).unwrap();
            assert!(allowed.contains(&arguments["value"]), "{choice}");
        }
    }
    // A text is held to nothing; the toy writes it until it may write no more.
    let mut open = request(
        json!({"tool_choice": {"type": "function", "function": {"name": "alpha"}}, "max_tokens": 300}),
    );
    open["tools"][0]["function"]["parameters"]["properties"]["value"] = json!({"type": "string"});
    let answer = server.ask("/v1/chat/completions", &open)["choices"][0].clone();
    let call = &answer["message"]["tool_calls"][0]["function"];
    assert_eq!(call["name"], "alpha", "{answer}");
    assert!(call["arguments"].as_str().unwrap().starts_with("{\"value\": \""), "{answer}");
}

#[test]
fn texts_in_tags_are_held_to_patterns_and_lengths() {
    let server = server(TAGS);
    let value_of = |schema: Value, seed: u64| {
        let mut wanted = request(json!({"tool_choice": {"type": "function", "function": {"name": "alpha"}}}));
        let fields = [("max_tokens", json!(2000)), ("seed", json!(seed)), ("temperature", json!(2.0))];
        fields.into_iter().for_each(|(name, value)| wanted[name] = value);
        wanted["tools"][0]["function"]["parameters"]["properties"]["value"] = schema;
        let answer = server.ask("/v1/chat/completions", &wanted)["choices"][0].clone();
        assert_eq!(answer["finish_reason"], "tool_calls", "{answer}");
        let arguments = answer["message"]["tool_calls"][0]["function"]["arguments"].as_str().unwrap();
        let arguments: Value = serde_json::from_str(arguments).unwrap();
        arguments["value"].as_str().unwrap().to_owned()
    };
    for seed in 0..4 {
        let whole = value_of(json!({"type": "string", "pattern": "^[a-c]{3}-\\d\\d$"}), seed);
        let (letters, digits) = whole.split_once('-').unwrap();
        assert!(letters.len() == 3 && letters.bytes().all(|b| (b'a'..=b'c').contains(&b)), "{whole}");
        assert!(digits.len() == 2 && digits.bytes().all(|b| b.is_ascii_digit()), "{whole}");
        let found = value_of(json!({"type": "string", "pattern": "x/y", "maxLength": 12}), seed);
        assert!(found.contains("x/y") && found.chars().count() <= 12, "{found:?}");
        let long = value_of(json!({"type": "string", "minLength": 5, "maxLength": 7}), seed);
        assert!((5..=7).contains(&long.chars().count()), "{long:?}");
        let none = value_of(json!({"type": "string", "maxLength": 0}), seed);
        assert_eq!(none, "");
        // The end of its tag is no part of a text, whatever that has to be.
        let tag = value_of(json!({"type": "string", "pattern": "</parameter", "maxLength": 20}), seed);
        assert!(tag.contains("</parameter") && !tag.contains("</parameter>"), "{tag:?}");
    }
}

/// `shown`: the begin of a call of that name in a prompt.
fn calls_are_made(template: &str, shown: fn(&str) -> String) {
    let server = server(template);
    for (choice, names) in [
        (json!("required"), &["alpha", "beta"][..]),
        (json!({"type": "function", "function": {"name": "beta"}}), &["beta"]),
    ] {
        let wanted = request(json!({"tool_choice": choice, "n": 3, "max_tokens": 2000}));
        let answer = server.ask("/v1/chat/completions", &wanted);
        let mut messages = Vec::new();
        for choice in answer["choices"].as_array().unwrap() {
            assert_eq!(
                (&choice["finish_reason"], &choice["message"]["content"]),
                (&json!("tool_calls"), &Value::Null)
            );
            let calls = choice["message"]["tool_calls"].as_array().unwrap();
            assert!(!calls.is_empty() && (calls.len() == 1 || names.len() > 1));
            calls.iter().for_each(|call| is_call(call, names));
            messages.push(choice["message"].clone());
        }
        // Streamed it is the same, but for the ids.
        let mut streamed = wanted.clone();
        streamed["stream"] = json!(true);
        let mut found: Vec<Vec<(String, String)>> = vec![Vec::new(); 3];
        for event in server.post("/v1/chat/completions", &streamed).events() {
            let choice = &event["choices"][0];
            assert!(choice["delta"]["content"].as_str().is_none_or(str::is_empty), "{event}");
            let calls = &mut found[choice["index"].as_u64().unwrap() as usize];
            for part in choice["delta"]["tool_calls"].as_array().unwrap_or(&Vec::new()) {
                if let Some(name) = part["function"]["name"].as_str() {
                    assert_eq!(
                        (part["index"].as_u64().unwrap() as usize, &part["type"]),
                        (calls.len(), &json!("function"))
                    );
                    calls.push((name.to_owned(), String::new()));
                }
                calls.last_mut().unwrap().1 += part["function"]["arguments"].as_str().unwrap();
            }
        }
        let of = |message: &Value| -> Vec<(String, String)> {
            let text = |value: &Value| value.as_str().unwrap().to_owned();
            let calls = message["tool_calls"].as_array().unwrap().iter();
            calls
                .map(|call| (text(&call["function"]["name"]), text(&call["function"]["arguments"])))
                .collect()
        };
        assert_eq!(found, messages.iter().map(of).collect::<Vec<_>>());
        // Calls can be answered, and go into the next prompt in the template's own form.
        let call = messages[0]["tool_calls"][0].clone();
        let mut next = request(json!({}));
        next["messages"].as_array_mut().unwrap().push(messages[0].clone());
        next["messages"]
            .as_array_mut()
            .unwrap()
            .push(json!({"role": "tool", "tool_call_id": call["id"], "content": "5"}));
        let mut asked = next.clone();
        asked.as_object_mut().unwrap().remove("seed");
        let prompt = server.ask("/apply-template", &asked)["prompt"].as_str().unwrap().to_owned();
        let name = call["function"]["name"].as_str().unwrap();
        assert!(prompt.contains(&shown(name)), "{prompt}");
        assert!(
            prompt.contains("[tools [{\"type\": \"function\"") && prompt.contains("[tool] 5"),
            "{prompt}"
        );
        next["max_tokens"] = json!(3);
        server.ask("/v1/chat/completions", &next);
    }
    let single =
        request(json!({"tool_choice": "required", "parallel_tool_calls": false, "n": 4, "max_tokens": 2000}));
    for choice in server.ask("/v1/chat/completions", &single)["choices"].as_array().unwrap() {
        assert_eq!(choice["message"]["tool_calls"].as_array().unwrap().len(), 1);
    }
    // The toy does not think of calls by itself.
    for more in
        [json!({"max_tokens": 5}), json!({"max_tokens": 5, "tool_choice": "none", "guided_choice": ["aa"]})]
    {
        let free = server.ask("/v1/chat/completions", &request(more));
        assert!(free["choices"][0]["message"]["tool_calls"].is_null());
    }
}

#[test]
fn contradictory_tools_are_refused() {
    let server = server(CALLS);
    let named = |name: &str| json!({"type": "function", "function": {"name": name}});
    let unknown = tool("a b", json!([1]));
    let strange = json!({"type": "function", "function": {"name": "a", "parameters": {"type": "array", "uniqueItems": true}}});
    let cases = [
        (json!({"tool_choice": named("gamma")}), "tool_choice", "invalid_value"),
        (json!({"tool_choice": "sometimes"}), "tool_choice", "invalid_value"),
        (json!({"tool_choice": "required", "tools": []}), "tool_choice", "invalid_value"),
        (json!({"tool_choice": named("alpha"), "tools": null}), "tool_choice", "invalid_value"),
        (json!({"tools": [tool("a", json!([1])), tool("a", json!([2]))]}), "tools", "invalid_value"),
        (json!({"tools": [unknown]}), "tools[0]", "invalid_value"),
        (json!({"tools": [{"name": "web_search"}]}), "tools[0]", "invalid_value"),
        (json!({"tools": [{"type": "function"}]}), "tools[0]", "invalid_value"),
        (json!({"tools": "alpha"}), "tools", "invalid_type"),
        (json!({"tools": [strange], "tool_choice": "required"}), "tools", "invalid_grammar"),
        (json!({"messages": [{"role": "assistant", "tool_calls": [{}]}]}), "messages[0]", "invalid_type"),
        (json!({"messages": [{"role": "assistant", "tool_calls": 5}]}), "messages[0]", "invalid_type"),
    ];
    for (more, param, code) in cases {
        let refused = server.post("/v1/chat/completions", &request(more.clone()));
        assert_eq!(refused.error(), (400, code.into(), param.into()), "{more}: {}", refused.body);
    }
    let other = self::server(PLAIN);
    let refused = other.post("/v1/chat/completions", &request(json!({})));
    assert_eq!(refused.error(), (400, "unsupported".into(), "tools".into()));
    other.ask("/v1/chat/completions", &request(json!({"tool_choice": "none", "max_tokens": 2})));
}

#[test]
fn reasoning_is_apart_from_the_text() {
    let server = server(THINKS);
    let asked = json!({"messages": [{"role": "user", "content": "Hi"}], "seed": 1, "max_tokens": 4000,
        "guided_choice": ["yes", "no"]});
    let answer = server.ask("/v1/chat/completions", &asked)["choices"][0].clone();
    let content = answer["message"]["content"].as_str().unwrap();
    if answer["finish_reason"] == "stop" {
        assert!(["yes", "no"].contains(&content), "{answer}");
    } else {
        assert_eq!(content, "");
    }
    let reasoning = answer["message"]["reasoning_content"].as_str().unwrap();
    assert!(!reasoning.is_empty() && !reasoning.contains("<think>"));
    // Ended where the reasoning is forced to end.
    let forced = json!({"messages": asked["messages"], "seed": 1, "max_tokens": 30, "stream": true,
        "guided_regex": "[xyz]{4}", "logit_bias": {"61": 100}});
    let (mut reasons, mut text) = (String::new(), String::new());
    for event in server.post("/v1/chat/completions", &forced).events() {
        let delta = &event["choices"][0]["delta"];
        reasons += delta["reasoning_content"].as_str().unwrap_or_default();
        text += delta["content"].as_str().unwrap_or_default();
    }
    assert_eq!((reasons.chars().all(|c| c == '<'), text.as_str()), (true, ""), "{reasons} {text}");
    // A model that reasons, for a request without a form.
    let free = json!({"messages": asked["messages"], "seed": 1, "max_tokens": 8, "ignore_eos": true});
    let free = server.ask("/v1/chat/completions", &free)["choices"][0]["message"].clone();
    assert_eq!(
        (free["content"].as_str(), free["reasoning_content"].as_str().map(str::is_empty)),
        (Some(""), Some(false))
    );
}
