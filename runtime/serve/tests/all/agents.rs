//! Fields that agents and clients of other servers send: what asks for nothing is ignored, what is here under
//! another name is done, and the rest is an error that names it.

use serde_json::{Value, json};

use crate::server::{TestServer, options};
use crate::toy::ToyModel;

const TEMPLATE: &str = "{% if tools %}[tools {% for t in tools %}{{ t.function.name }} {% endfor %}]{% endif %}\
    {% for m in messages %}[{{ m.role }}] {{ m.content or '' }}{% for c in m.tool_calls or [] %}{{ '\n' if not loop.first else '' }}<call>\n\
    {\"name\": \"{{ c.function.name }}\", \"arguments\": {{ c.function.arguments | tojson }}}\n</call>{% endfor %}{{ '\n' }}{% endfor %}\
    {% for d in documents or [] %}[document] {{ d.text }}\n{% endfor %}{% if add_generation_prompt %}[assistant] {% endif %}";
const EFFORT: &str = "{% if reasoning_effort is not defined %}{% set reasoning_effort = 'medium' %}{% endif %}\
    Reasoning: {{ reasoning_effort }}, {{ enable_thinking | default('unset') }}, {{ thinking | default('unset') }}\n\
    {% for m in messages %}[{{ m.role }}] {{ m.content }}{% endfor %}";
const THINKS: &str = "{% for m in messages %}[{{ m.role }}] {% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>\
    {% endif %}{{ m.content or '' }}\n{% endfor %}{% if add_generation_prompt %}[assistant] <think>{% endif %}";

fn server(template: &str) -> TestServer {
    TestServer::start(&ToyModel::new(false, Some(4000)), 2, Some(template), options())
}

/// The body with more fields.
fn with(base: &Value, more: Value) -> Value {
    let mut body = base.clone();
    body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    body
}

fn hi() -> Value {
    json!({"messages": [{"role": "user", "content": "Hi"}]})
}

fn prompt(server: &TestServer, body: &Value) -> String {
    server.ask("/apply-template", body)["prompt"].as_str().unwrap().to_owned()
}

fn function(name: &str) -> Value {
    json!({"type": "function", "function": {"name": name, "parameters": {"type": "object", "properties": {"v": {"enum": [name]}},
        "required": ["v"], "additionalProperties": false}}})
}

/// Tools that Codex and Claude Code send with each request.
#[test]
fn tools_of_a_provider_are_left_out_with_a_warning() {
    let server = server(TEMPLATE);
    let own = json!({"type": "function", "name": "f", "parameters": {"type": "object", "properties": {}}, "strict": false});
    let grammar = json!({"type": "grammar", "syntax": "lark", "definition": "start: \"a\""});
    let custom = json!({"type": "custom", "name": "apply_patch", "format": grammar});
    let agents = json!({"input": "Hi", "max_output_tokens": 2, "client_metadata": {"a": "b"}, "include": ["reasoning.encrypted_content"],
        "prompt_cache_key": "k", "store": false, "reasoning": {"effort": "medium", "summary": "auto"}, "tool_choice": "auto",
        "tools": [own, {"type": "web_search"}, {"type": "local_shell"}, custom]});
    for stream in [false, true] {
        let answer = server.post("/v1/responses", &with(&agents, json!({"stream": stream})));
        assert_eq!(answer.status, 200, "{}", answer.body);
        let warnings = answer.head.lines().filter(|line| line.starts_with("x-mlcc-warning: tools["));
        assert_eq!(warnings.count(), 3, "{}", answer.head);
        assert!(answer.head.contains("tools[1] of type web_search is left out"), "{}", answer.head);
    }
    let none =
        server.post("/v1/responses", &json!({"input": "Hi", "max_output_tokens": 2, "tools": [custom]}));
    assert_eq!(none.status, 200, "{}", none.body);
    let claude = json!({"max_tokens": 2, "messages": hi()["messages"], "thinking": {"type": "adaptive"},
        "output_config": {"effort": "high"}, "inference_geo": "eu", "context_management": {"edits": [{"type": "clear_thinking_20251015"}]},
        "tools": [{"name": "g", "input_schema": {"type": "object"}}, {"type": "web_search_20250305", "name": "web_search"},
        {"type": "bash_20250124", "name": "bash"}, {"type": "text_editor_20250728", "name": "str_replace_based_edit_tool"}]});
    for stream in [false, true] {
        let answer = server.post("/v1/messages", &with(&claude, json!({"stream": stream})));
        let warnings = answer.head.lines().filter(|line| line.starts_with("x-mlcc-warning: tools["));
        assert_eq!((answer.status, warnings.count()), (200, 3), "{}", answer.body);
    }
    let chat = with(
        &hi(),
        json!({"max_tokens": 2, "tools": [function("alpha"), {"type": "custom", "custom": {"name": "x"}}]}),
    );
    assert_eq!(prompt(&server, &chat), "[tools alpha ][user] Hi\n[assistant] ");
    let answer = server.post("/v1/chat/completions", &chat);
    assert_eq!((answer.status, answer.header("x-mlcc-warning").is_some()), (200, true), "{}", answer.body);
    // Tools that are left out cannot be called.
    for choice in
        [json!("required"), json!({"type": "function", "function": {"name": "x"}}), json!({"type": "custom"})]
    {
        let only = with(
            &hi(),
            json!({"tools": [{"type": "custom", "custom": {"name": "x"}}], "tool_choice": choice}),
        );
        assert_eq!(server.post("/v1/chat/completions", &only).error().2, "tool_choice");
    }
}

#[test]
fn allowed_tools_are_those_that_the_model_is_told_of() {
    let server = server(TEMPLATE);
    let tools = json!([function("alpha"), function("beta"), function("gamma")]);
    let named = |names: &[&str]| -> Value {
        names.iter().map(|name| json!({"type": "function", "function": {"name": name}})).collect()
    };
    let choice = |mode: &str, names: &[&str]| {
        let inner = json!({"mode": mode, "tools": named(names)});
        json!({"tools": tools, "tool_choice": {"type": "allowed_tools", "allowed_tools": inner}})
    };
    let body = with(&hi(), choice("auto", &["gamma", "alpha"]));
    assert_eq!(prompt(&server, &body), "[tools alpha gamma ][user] Hi\n[assistant] ");
    let required = with(&hi(), with(&choice("required", &["beta"]), json!({"max_tokens": 400, "seed": 1})));
    let answer = server.ask("/v1/chat/completions", &required);
    let calls = answer["choices"][0]["message"]["tool_calls"].as_array().unwrap();
    assert!(!calls.is_empty() && calls.iter().all(|call| call["function"]["name"] == "beta"), "{answer}");
    let flat = json!({"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "beta"}, {"type": "web_search"}]});
    let own: Vec<Value> =
        ["alpha", "beta"].map(|name| with(&function(name)["function"], json!({"type": "function"}))).to_vec();
    let responses =
        json!({"input": "Hi", "tools": own, "tool_choice": flat, "max_output_tokens": 400, "seed": 1});
    assert_eq!(server.ask("/v1/responses", &responses)["output"][0]["name"], "beta");
    for wrong in [choice("auto", &["delta"]), choice("sometimes", &["alpha"]), choice("required", &[])] {
        assert_eq!(server.post("/v1/chat/completions", &with(&hi(), wrong)).error().2, "tool_choice");
    }
}

#[test]
fn efforts_reach_the_template_from_all_apis() {
    let server = server(EFFORT);
    let chat = |more: Value| prompt(&server, &with(&hi(), more));
    for (more, told) in [
        (json!({}), "medium, unset, unset"),
        (json!({"reasoning_effort": "high"}), "high, True, True"),
        (json!({"reasoning_effort": "minimal"}), "minimal, True, True"),
        (json!({"reasoning_effort": "none"}), "none, False, False"),
        (json!({"reasoning_effort": null}), "medium, unset, unset"),
        (json!({"reasoning": {"effort": "low"}}), "low, True, True"),
        (json!({"enable_thinking": false}), "medium, False, False"),
        (json!({"thinking": {"type": "disabled"}, "reasoning_effort": "low"}), "low, False, False"),
        (
            json!({"reasoning_effort": "low", "chat_template_kwargs": {"reasoning_effort": "x", "thinking": 1}}),
            "x, True, 1",
        ),
    ] {
        assert_eq!(chat(more.clone()), format!("Reasoning: {told}\n[user] Hi"), "{more}");
    }
    // A token of the toy is a byte, and no two of these prompts are equally long.
    let tokens = |told: &str| format!("Reasoning: {told}\n[user] Hi").len();
    let asked = with(&hi(), json!({"reasoning_effort": "high", "max_tokens": 1}));
    assert_eq!(
        server.ask("/v1/chat/completions", &asked)["usage"]["prompt_tokens"],
        tokens("high, True, True")
    );
    let responses = json!({"input": "Hi", "max_output_tokens": 1, "reasoning": {"effort": "high"}});
    let answer = server.ask("/v1/responses", &responses);
    assert_eq!(answer["usage"]["input_tokens"], tokens("high, True, True"));
    assert_eq!(answer["reasoning"]["effort"], "high");
    for (more, told) in [
        (
            json!({"output_config": {"effort": "xhigh"}, "thinking": {"type": "adaptive"}}),
            "xhigh, True, True",
        ),
        (json!({"thinking": {"type": "disabled"}}), "medium, False, False"),
        (json!({"thinking": {"type": "enabled", "budget_tokens": 2000}}), "medium, True, True"),
    ] {
        let count = server.ask("/v1/messages/count_tokens", &with(&hi(), more));
        assert_eq!(count["input_tokens"], tokens(told), "{told}");
    }
    for (path, body, param) in [
        ("/v1/chat/completions", with(&hi(), json!({"reasoning_effort": "much"})), "reasoning_effort"),
        ("/v1/chat/completions", with(&hi(), json!({"thinking": {"type": "some"}})), "thinking"),
        ("/v1/responses", json!({"input": "Hi", "reasoning": {"effort": "much"}}), "reasoning_effort"),
    ] {
        assert_eq!(server.post(path, &body).error(), (400, "invalid_value".into(), param.into()));
    }
}

#[test]
fn formats_of_output_config_hold_the_answer() {
    let server = server(TEMPLATE);
    let schema = json!({"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"], "additionalProperties": false});
    let format = json!({"type": "json_schema", "schema": schema});
    for held in [json!({"output_config": {"format": format}}), json!({"output_format": format})] {
        let body = with(&hi(), with(&held, json!({"max_tokens": 2000, "seed": 1})));
        let answer = server.ask("/v1/messages", &body);
        let text = answer["content"][0]["text"].as_str().unwrap();
        let value: Value = serde_json::from_str(text).unwrap_or_else(|e| panic!("{e}: {text}"));
        assert!(value["a"].is_boolean(), "{value}");
    }
    for wrong in [json!({"format": {"type": "text"}}), json!({"colour": "red"}), json!({"effort": "much"})] {
        let refused =
            server.post("/v1/messages", &with(&hi(), json!({"max_tokens": 5, "output_config": wrong})));
        assert!(refused.status == 400 && refused.body.contains("output_config"), "{}", refused.body);
    }
}

#[test]
fn neutral_fields_of_other_servers_change_nothing() {
    let server = server(TEMPLATE);
    let neutral = json!({"typical_p": 1.0, "typ_p": 1, "dry_multiplier": 0, "dry_base": 1.75, "dry_sequence_breakers": ["\n"],
        "xtc_probability": 0.0, "xtc_threshold": 0.1, "mirostat": 0, "mirostat_tau": 5.0, "dynatemp_range": 0, "id_slot": -1,
        "timings_per_token": false, "n_probs": 0, "return_tokens": false, "spaces_between_special_tokens": true, "best_of": 1,
        "use_beam_search": false, "length_penalty": 1.0, "early_stopping": false, "samplers": ["top_k", "typ_p", "min_p"],
        "mm_processor_kwargs": {}, "logits_processors": [], "metadata": {"a": "b"}, "store": true, "service_tier": "auto",
        "safety_identifier": "s", "prompt_cache_key": "k", "verbosity": "low", "client_metadata": {"c": 1}, "lora": [], "user": "u",
        "detokenize": true, "logit_bias": null, "skip_special_tokens": true, "include_stop_str_in_output": false, "prediction": null,
        "stop_token_ids": [], "n_keep": 0, "top_n_sigma": -1, "grammar": "", "suffix": ""});
    let base = json!({"temperature": 0, "max_tokens": 8});
    let text = with(&base, json!({"prompt": "Hi"}));
    let plain = server.ask("/v1/completions", &text)["choices"].clone();
    assert_eq!(server.ask("/v1/completions", &with(&text, neutral.clone()))["choices"], plain);
    let chat = with(
        &with(&base, hi()),
        json!({"modalities": ["text"], "echo": false, "add_special_tokens": false,
        "chat_template": null, "include_reasoning": true, "reasoning_format": "auto", "parse_tool_calls": true, "documents": null,
        "functions": [], "function_call": "none", "web_search_options": null, "audio": null}),
    );
    let mut all = with(&neutral, chat.clone());
    all.as_object_mut().unwrap().remove("suffix");
    assert_eq!(
        server.ask("/v1/chat/completions", &all)["choices"],
        server.ask("/v1/chat/completions", &with(&base, hi()))["choices"]
    );
    for (name, value) in [
        ("tfs_z", json!(0.5)),
        ("id_slot", json!(1)),
        ("use_beam_search", json!(true)),
        ("best_of", json!(4)),
        ("samplers", json!(["min_p", "top_k"])),
        ("logits_processors", json!(["x"])),
        ("return_tokens", json!(true)),
        ("mm_processor_kwargs", json!({"a": 1})),
        ("allowed_token_ids", json!([1])),
    ] {
        for (path, base) in [("/v1/completions", &text), ("/v1/chat/completions", &chat)] {
            let refused = server.post(path, &with(base, json!({name: value})));
            assert_eq!(refused.error(), (400, "unsupported".into(), name.into()), "{}", refused.body);
            assert!(refused.body.contains("Leave it out"), "{}", refused.body);
        }
    }
    for (name, value) in [
        ("web_search_options", json!({})),
        ("modalities", json!(["audio"])),
        ("chat_template", json!("x")),
        ("echo", json!(true)),
    ] {
        let refused = server.post("/v1/chat/completions", &with(&chat, json!({name: value})));
        assert_eq!(refused.error(), (400, "unsupported".into(), name.into()), "{}", refused.body);
    }
    let refused = server
        .post("/v1/chat/completions", &with(&chat, json!({"documents": [{"text": "x"}], "tempreature": 1})));
    assert_eq!(refused.error(), (400, "unknown_field".into(), "tempreature".into()));
}

#[test]
fn tokens_that_end_a_text_may_be_named() {
    let server = server(TEMPLATE);
    let base = json!({"prompt": "ab", "temperature": 0, "max_tokens": 30, "logprobs": 0, "ignore_eos": true});
    let free = server.ask("/v1/completions", &base)["choices"][0].clone();
    let text = free["text"].as_str().unwrap();
    // The third token of the text, where it is new there; the toy's tokens are bytes, from 1 on.
    let third = text.as_bytes()[2];
    let at = text.bytes().position(|byte| byte == third).unwrap();
    let stopped = with(&base, json!({"stop_token_ids": [u32::from(third) + 1]}));
    let ended = server.ask("/v1/completions", &stopped)["choices"][0].clone();
    assert_eq!((ended["text"].as_str().unwrap(), &ended["finish_reason"]), (&text[..at], &json!("stop")));
    // Biases in the form of llama.cpp's clients.
    let biased = with(&base, json!({"logit_bias": [[u32::from(b'q') + 1, 100.0]], "max_tokens": 3}));
    assert_eq!(server.ask("/v1/completions", &biased)["choices"][0]["text"], "qqq");
    let least = server.ask("/v1/completions", &with(&stopped, json!({"min_tokens": 12})));
    assert!(least["usage"]["completion_tokens"].as_u64().unwrap() >= 12);
    let wrong = server.post("/v1/completions", &with(&base, json!({"stop_token_ids": [100000]})));
    assert_eq!(wrong.error(), (400, "invalid_value".into(), "stop_token_ids".into()));
    let short = server
        .ask("/v1/completions", &json!({"prompt": "a", "n_predict": 3, "ignore_eos": true, "n_probs": 2}));
    assert_eq!(short["usage"]["completion_tokens"], 3);
    assert_eq!(short["choices"][0]["logprobs"]["top_logprobs"][0].as_object().unwrap().len(), 2);
}

#[test]
fn an_answer_goes_on_where_it_was_begun() {
    let server = server(TEMPLATE);
    let begun = |content: &str| json!({"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": content}]});
    for content in ["Well, ", "Well,"] {
        let body = with(&begun(content), json!({"continue_final_message": true}));
        assert_eq!(prompt(&server, &body), "[user] Hi\n[assistant] Well,");
        assert_eq!(
            prompt(&server, &with(&body, json!({"add_generation_prompt": false}))),
            "[user] Hi\n[assistant] Well,"
        );
        // The default of that API.
        let count = server.ask("/v1/messages/count_tokens", &begun(content));
        assert_eq!(count["input_tokens"], "[user] Hi\n[assistant] Well,".len());
    }
    assert_eq!(prompt(&server, &begun("Well,")), "[user] Hi\n[assistant] Well,\n[assistant] ");
    for wrong in [with(&begun("a"), json!({"add_generation_prompt": true})), hi()] {
        let refused =
            server.post("/v1/chat/completions", &with(&wrong, json!({"continue_final_message": true})));
        assert_eq!(refused.error(), (400, "invalid_value".into(), "continue_final_message".into()));
    }
}

#[test]
fn documents_reach_templates_that_take_them() {
    let document = json!({"documents": [{"title": "t", "text": "The sea is wide."}]});
    let body = with(&hi(), document);
    assert_eq!(prompt(&server(TEMPLATE), &body), "[user] Hi\n[document] The sea is wide.\n[assistant] ");
    let refused = server(THINKS).post("/v1/chat/completions", &body);
    assert_eq!(refused.error(), (400, "unsupported".into(), "documents".into()));
}

#[test]
fn reasoning_is_told_apart_inside_or_not_at_all() {
    let server = server(THINKS);
    let base = with(&hi(), json!({"temperature": 0, "max_tokens": 12, "ignore_eos": true}));
    let message =
        |more: Value| server.ask("/v1/chat/completions", &with(&base, more))["choices"][0]["message"].clone();
    let apart = message(json!({}));
    let reasons = apart["reasoning_content"].as_str().unwrap();
    assert!(!reasons.is_empty() && apart["content"] == "", "{apart}");
    let inside = message(json!({"reasoning_format": "none"}));
    assert_eq!(
        (&inside["content"], &inside["reasoning_content"]),
        (&apart["reasoning_content"], &Value::Null)
    );
    for more in [json!({"include_reasoning": false}), json!({"reasoning": {"exclude": true}})] {
        assert_eq!(message(more.clone())["reasoning_content"], Value::Null);
        let streamed = with(&base, with(&more, json!({"stream": true})));
        for event in server.stream("/v1/chat/completions", &streamed) {
            assert!(event["choices"][0]["delta"]["reasoning_content"].is_null(), "{event}");
        }
    }
}

#[test]
fn samplers_of_llama_cpp_are_used() {
    let server = server(TEMPLATE);
    let base = json!({"prompt": "ab", "max_tokens": 24, "seed": 3, "temperature": 1, "top_k": 0, "top_p": 1, "min_p": 0, "ignore_eos": true});
    let text = |more: Value| {
        let answer = server.ask("/v1/completions", &with(&base, more));
        answer["choices"][0]["text"].as_str().unwrap().to_owned()
    };
    let plain = text(json!({}));
    for more in [
        json!({"typical_p": 0.3}),
        json!({"typ_p": 0.3}),
        json!({"xtc_probability": 1, "xtc_threshold": 0.01}),
        json!({"mirostat": 2, "mirostat_tau": 1.0}),
        json!({"dry_multiplier": 50, "dry_allowed_length": 0, "dry_sequence_breakers": ["z"]}),
    ] {
        let (once, again) = (text(more.clone()), text(more.clone()));
        assert_eq!(once, again, "{more}");
        assert_ne!(once, plain, "{more}");
    }
    // A token that has been there would be a repetition of length 0: greedy texts have each at most once.
    let all = json!({"temperature": 0, "dry_multiplier": 1e6, "dry_allowed_length": 0, "dry_sequence_breakers": []});
    let text = text(all);
    let mut letters: Vec<char> = text.chars().filter(|c| *c != char::REPLACEMENT_CHARACTER).collect();
    letters.sort_unstable();
    assert!(letters.windows(2).all(|pair| pair[0] != pair[1]) && letters.len() > 4, "{text}");
    for (more, param) in [
        (json!({"mirostat": 1}), "mirostat"),
        (json!({"typical_p": 0}), "typical_p"),
        (json!({"xtc_probability": 2}), "xtc_probability"),
        (json!({"dry_base": 0.1, "dry_multiplier": 1}), "dry_base"),
        (json!({"dry_sequence_breakers": [""]}), "dry_sequence_breakers"),
    ] {
        let refused = server.post("/v1/completions", &with(&base, more));
        assert_eq!(refused.error(), (400, "invalid_value".into(), param.into()));
    }
}
