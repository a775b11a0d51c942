//! Answers that are known: the toy writes what a test says, whatever it is asked.

use serde_json::{Value, json};

use crate::server::{TestServer, options};
use crate::toy::ToyModel;

/// A server of a template, whose toy can be told what to write.
struct ScriptedServer {
    toy: ToyModel,
    server: TestServer,
}

fn cases() -> Value {
    serde_json::from_str(include_str!("../../../../text/tests/data/answers.json")).unwrap()
}

impl ScriptedServer {
    fn start(template: &str) -> ScriptedServer {
        let toy = ToyModel::new(false, None);
        let server = TestServer::start(&toy, 4, Some(template), options());
        ScriptedServer { toy, server }
    }

    /// A server with a template of the cases.
    fn of(name: &str) -> ScriptedServer {
        ScriptedServer::start(cases()["templates"][name].as_str().unwrap())
    }

    /// Makes all texts this one from now on; tokens are bytes.
    fn writes(&self, text: &str) {
        *self.toy.script.lock().unwrap() = text.bytes().map(|byte| i32::from(byte) + 1).collect();
    }

    /// Message and reason of the end, whole; streamed it is the same.
    fn ask(&self, body: &Value) -> (Value, Value) {
        let mut body = body.clone();
        (body["cache_prompt"], body["temperature"]) = (json!(false), json!(0));
        let choice = self.server.ask("/v1/chat/completions", &body)["choices"][0].clone();
        let whole = told(&choice["message"]);
        body["stream"] = json!(true);
        let mut message = json!({"content": "", "reasoning_content": "", "tool_calls": []});
        let mut reason = Value::Null;
        for event in self.server.post("/v1/chat/completions", &body).events() {
            let choice = &event["choices"][0];
            for name in ["content", "reasoning_content"] {
                let more = choice["delta"][name].as_str().unwrap_or_default();
                message[name] = format!("{}{more}", message[name].as_str().unwrap()).into();
            }
            for part in choice["delta"]["tool_calls"].as_array().unwrap_or(&Vec::new()) {
                let calls = message["tool_calls"].as_array_mut().unwrap();
                if part["function"]["name"].is_string() {
                    assert_eq!(part["index"], calls.len(), "{event}");
                    calls.push(part.clone());
                } else {
                    let call = &mut calls.last_mut().unwrap()["function"]["arguments"];
                    let more = part["function"]["arguments"].as_str().unwrap();
                    *call = format!("{}{more}", call.as_str().unwrap()).into();
                }
            }
            if !choice["finish_reason"].is_null() {
                reason = choice["finish_reason"].clone();
            }
        }
        assert_eq!((told(&message), &reason), (whole.clone(), &choice["finish_reason"]), "{body}");
        (whole, reason)
    }
}

/// Reasoning, text and calls of a message.
fn told(message: &Value) -> Value {
    let call = |call: &Value| {
        let arguments: Value = serde_json::from_str(call["function"]["arguments"].as_str().unwrap()).unwrap();
        json!({"name": call["function"]["name"], "arguments": arguments})
    };
    let calls: Vec<Value> = message["tool_calls"].as_array().into_iter().flatten().map(call).collect();
    let text = |name: &str| message[name].as_str().unwrap_or_default().to_owned();
    json!({"reasoning": text("reasoning_content"), "content": text("content"), "calls": calls})
}

fn tools(cases: &Value) -> Vec<Value> {
    let tool = |function: &Value| json!({"type": "function", "function": function});
    cases["tools"].as_array().unwrap().iter().map(tool).collect()
}

#[test]
fn answers_of_models_are_taken_apart_whole_and_streamed() {
    let cases = cases();
    for (name, template) in cases["templates"].as_object().unwrap() {
        let scripted = ScriptedServer::start(template.as_str().unwrap());
        for case in cases["cases"].as_array().unwrap().iter().filter(|case| case["template"] == *name) {
            let answer = case["answer"].as_str().unwrap();
            scripted.writes(answer);
            let mut body = json!({"messages": [{"role": "user", "content": "Hi"}]});
            if case["no_tools"] != true {
                body["tools"] = tools(&cases).into();
            }
            for (field, value) in [("stop", "stop"), ("chat_template_kwargs", "variables")] {
                if !case[value].is_null() {
                    body[field] = case[value].clone();
                }
            }
            body["max_tokens"] = (answer.len() + if case["cut"] == true { 0 } else { 10 }).into();
            let (message, reason) = scripted.ask(&body);
            let text = |name: &str| case[name].as_str().unwrap_or_default();
            let calls = case["calls"].as_array().cloned().unwrap_or_default();
            let ended = match (case["cut"] == true, calls.is_empty()) {
                (true, _) => "length",
                (false, true) => "stop",
                (false, false) => "tool_calls",
            };
            let wanted = json!({"reasoning": text("reasoning"), "content": text("content"), "calls": calls});
            assert_eq!((message, reason), (wanted, json!(ended)), "{case}");
        }
    }
}

fn coin() -> Value {
    json!({"type": "json_schema", "json_schema": {"name": "c", "strict": true, "schema": {"type": "object",
        "properties": {"r": {"type": "string", "enum": ["heads", "tails"]}}, "required": ["r"],
        "additionalProperties": false}}})
}

const CALL: &str = "{\"name\": \"get_weather\", \"arguments\": {\"city\": \"Paris\"}}";

/// An answer is a call, or a text of the form that is asked for; reasoning comes before it.
#[test]
fn a_format_and_tools_go_together() {
    let cases = cases();
    let called = json!([{"name": "get_weather", "arguments": {"city": "Paris"}}]);
    let call = format!("<tool_call>\n{CALL}\n</tool_call>");
    let tags = "<tool_call>\n<function=get_weather>\n<parameter=city>\nParis\n</parameter>\n</function>\n</tool_call>";
    let commentary =
        "<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>{\"city\": \"Paris\"}";
    let analysis = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant";
    let text = "{\"r\": \"tails\"}";
    for (template, thoughts, call, text) in [
        ("thinking", "", call.clone(), text.to_owned()),
        ("thinking", "<think>\nHm.\n</think>\n\n", call, text.to_owned()),
        ("tags", "", tags.to_owned(), text.to_owned()),
        ("thinking-tags", "Hm.\n</think>\n\n", tags.to_owned(), text.to_owned()),
        ("harmony", "", commentary.to_owned(), format!("<|channel|>final<|message|>{text}")),
        ("harmony", analysis, commentary.to_owned(), format!("<|channel|>final<|message|>{text}")),
    ] {
        let scripted = ScriptedServer::of(template);
        let reasoning = if thoughts.is_empty() { "" } else { "Hm." };
        let base = json!({"messages": [{"role": "user", "content": "Hi"}], "tools": tools(&cases), "response_format": coin(),
            "max_tokens": 400});
        let asked = |choice: &str| {
            let mut body = base.clone();
            body["tool_choice"] = choice.into();
            scripted.ask(&body)
        };
        for choice in ["auto", "required"] {
            scripted.writes(&format!("{thoughts}{call}"));
            let wanted = json!({"reasoning": reasoning, "content": "", "calls": called});
            assert_eq!(asked(choice), (wanted, json!("tool_calls")), "{template} {choice}");
        }
        scripted.writes(&format!("{thoughts}{text}"));
        let wanted = json!({"reasoning": reasoning, "content": "{\"r\": \"tails\"}", "calls": []});
        assert_eq!(asked("auto"), (wanted.clone(), json!("stop")), "{template}");
        assert_eq!(asked("none"), (wanted, json!("stop")), "{template}");
        // Text that is neither is not written.
        scripted.writes(&format!("{thoughts}Well, {text}"));
        for choice in ["auto", "required"] {
            let mut body = base.clone();
            (body["tool_choice"], body["cache_prompt"], body["temperature"]) =
                (json!(choice), json!(false), json!(0));
            let answer = scripted.server.ask("/v1/chat/completions", &body);
            let content = answer["choices"][0]["message"]["content"].as_str().unwrap_or_default();
            assert!(
                !content.contains("Well") && (choice == "auto" || content.is_empty()),
                "{template}: {answer}"
            );
        }
    }
    // The same over the other API.
    let scripted = ScriptedServer::of("thinking");
    scripted.writes(text);
    let format = json!({"type": "json_schema", "name": "c", "schema": coin()["json_schema"]["schema"]});
    let function = |tool: &Value| {
        let mut function = tool["function"].clone();
        function["type"] = "function".into();
        function
    };
    let functions: Vec<Value> = tools(&cases).iter().map(function).collect();
    let body = json!({"input": "Hi", "tools": functions, "text": {"format": format}, "cache_prompt": false, "temperature": 0});
    let answer = scripted.server.ask("/v1/responses", &body);
    assert_eq!(answer["output"][0]["content"][0]["text"], text, "{answer}");
}

/// Parts of a schema that no grammar has are left free where calls are not strict, and nothing is refused
/// where no grammar has to be made.
#[test]
fn schemas_of_tools_are_held_to_as_far_as_they_can_be() {
    let schema = json!({"$schema": "http://json-schema.org/draft-07/schema#", "$id": "x", "type": "object",
        "properties": {
            "a": {"$ref": "#/$defs/C"}, "b": {"type": "string", "format": "binary", "not": {"const": "q"}},
            "c": {"type": "string", "pattern": "^(?=a)b"}, "d": {"type": "string", "format": "email", "pattern":
                "^(?!\\.)(?!.*\\.\\.)([A-Za-z0-9_'+\\-\\.]*)[A-Za-z0-9_+-]@([A-Za-z0-9][A-Za-z0-9\\-]*\\.)+[A-Za-z]{2,}$"},
            "e": {"type": "array", "items": {"type": "integer"}, "uniqueItems": true},
            "f": {"anyOf": [{"type": "string"}, {"type": "null"}], "default": null}},
        "required": ["a", "b", "c", "d", "e", "f"], "additionalProperties": false, "if": {}, "then": {"required": ["z"]},
        "$defs": {"C": {"type": "string", "enum": ["x", "y"], "title": "C"}}});
    let arguments = json!({"a": "y", "b": "12", "c": "true", "d": "a.b@c.de", "e": [1, 1], "f": "7"});
    let json = format!("<tool_call>\n{{\"name\": \"g\", \"arguments\": {arguments}}}\n</tool_call>");
    let values = [("a", "y"), ("b", "12"), ("c", "true"), ("d", "a.b@c.de"), ("e", "[1, 1]"), ("f", "7")];
    let tag = |(name, value): (&str, &str)| format!("<parameter={name}>\n{value}\n</parameter>\n");
    let tags = values.map(tag).concat();
    let tags = format!("<tool_call>\n<function=g>\n{tags}</function>\n</tool_call>");
    for (template, answer) in [("thinking", json), ("tags", tags)] {
        let scripted = ScriptedServer::of(template);
        scripted.writes(&answer);
        for (choice, strict) in [("required", false), ("auto", false), ("auto", true), ("required", true)] {
            let function = json!({"name": "g", "parameters": schema, "strict": strict});
            let body = json!({"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 600, "tool_choice": choice,
                "tools": [{"type": "function", "function": function}]});
            if strict && choice == "required" {
                let refused = scripted.server.post("/v1/chat/completions", &body);
                assert_eq!(refused.error(), (400, "invalid_grammar".into(), "tools".into()), "{template}");
                continue;
            }
            let wanted =
                json!({"reasoning": "", "content": "", "calls": [{"name": "g", "arguments": arguments}]});
            assert_eq!(scripted.ask(&body), (wanted, json!("tool_calls")), "{template} {choice}");
        }
        // A value that the list has not is not written.
        scripted.writes(&answer.replacen('y', "z", 1));
        let function = json!({"name": "g", "parameters": schema});
        let body = json!({"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 600, "tool_choice": "required",
            "tools": [{"type": "function", "function": function}], "cache_prompt": false, "temperature": 0});
        let answer = scripted.server.ask("/v1/chat/completions", &body);
        let call =
            answer["choices"][0]["message"]["tool_calls"][0]["function"]["arguments"].as_str().unwrap();
        let call: Value =
            serde_json::from_str(call).unwrap_or_else(|error| panic!("{template}: {error}: {call}"));
        assert!(["x", "y"].contains(&call["a"].as_str().unwrap()), "{template}: {call}");
    }
}
