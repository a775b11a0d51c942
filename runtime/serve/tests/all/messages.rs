//! Roles and contents of messages: whatever is accepted reaches the model, in the form that its template
//! takes.

use serde_json::{Value, json};

use crate::server::{TestServer, options};
use crate::toy::ToyModel;

/// A system message first and no other roles, as in Qwen 3.5.
const STRICT: &str = "{% for m in messages %}{% if m.role == 'system' and not loop.first %}\
    {{ raise_exception('System message must be at the beginning.') }}\
    {% elif m.role not in ['system', 'user', 'assistant'] %}{{ raise_exception('Unexpected message role.') }}{% endif %}\
    [{{ m.role }}] {{ m.content }}\n{% endfor %}{% if add_generation_prompt %}[assistant] {% endif %}";
/// Roles that it does not know are dropped.
const LENIENT: &str = "{% for m in messages %}{% if m.role in ['system', 'user', 'assistant'] %}[{{ m.role }}] {{ m.content }}\n\
    {% endif %}{% endfor %}{% if add_generation_prompt %}[assistant] {% endif %}";
/// Only the user and the model speak.
const TWO_ROLES: &str = "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('System role not supported') }}\
    {% endif %}[{{ m.role }}] {{ m.content }}\n{% endfor %}{% if add_generation_prompt %}[assistant] {% endif %}";
/// Contents are lists of parts, as in SmolVLM.
const PARTS: &str = "{% for m in messages %}[{{ m['role'] }}] {% for part in m['content'] %}{% if part['type'] == 'text' %}\
    {{ part['text'] }}{% endif %}{% endfor %}{{ '\n' }}{% endfor %}{% if add_generation_prompt %}[assistant] {% endif %}";
/// A part names its language, as in TranslateGemma.
const LANGUAGES: &str = "{% for m in messages %}{% if m.content is string %}{{ raise_exception('no parts') }}{% endif %}\
    {% for part in m.content %}{{ part.source_lang_code }}: {{ part.text }}\n{% endfor %}{% endfor %}";

fn server(template: &str) -> TestServer {
    TestServer::start(&ToyModel::new(false, Some(2000)), 2, Some(template), options())
}

fn prompt(server: &TestServer, messages: Value) -> String {
    let rendered = server.ask("/apply-template", &json!({"messages": messages}));
    rendered["prompt"].as_str().unwrap().to_owned()
}

/// Messages of Codex and Claude Code: instructions by several ways, and late ones.
#[test]
fn instructions_of_all_apis_are_one_message_at_the_begin() {
    let instructions = "Be brief.\n\nSay BANANA";
    for (template, wanted) in [
        (STRICT, format!("[system] {instructions}\n[user] Hi\n[assistant] ")),
        (LENIENT, format!("[system] {instructions}\n[user] Hi\n[assistant] ")),
        (PARTS, format!("[system] {instructions}\n[user] Hi\n[assistant] ")),
        (TWO_ROLES, format!("[user] {instructions}\n\nHi\n[assistant] ")),
    ] {
        let server = server(template);
        for messages in [
            json!([{"role": "system", "content": "Be brief."}, {"role": "developer", "content": "Say BANANA"}, {"role": "user", "content": "Hi"}]),
            json!([{"role": "developer", "content": "Be brief."}, {"role": "user", "content": "Hi"}, {"role": "system", "content": "Say BANANA"}]),
            json!([{"role": "system", "content": "Be brief."}, {"role": "user", "content": [{"type": "text", "text": "Hi"}]}, {"role": "system", "content": "Say BANANA"}]),
        ] {
            assert_eq!(prompt(&server, messages), wanted);
        }
        // A token of the toy is a byte.
        let tokens = wanted.len();
        let chat = json!({"max_tokens": 1, "messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"},
            {"role": "developer", "content": "Say BANANA"}]});
        assert_eq!(server.ask("/v1/chat/completions", &chat)["usage"]["prompt_tokens"], tokens);
        let items =
            json!([{"role": "developer", "content": "Say BANANA"}, {"role": "user", "content": "Hi"}]);
        let responses = json!({"max_output_tokens": 1, "instructions": "Be brief.", "input": items});
        assert_eq!(server.ask("/v1/responses", &responses)["usage"]["input_tokens"], tokens);
        let messages = json!([{"role": "user", "content": "Hi"}, {"role": "system", "content": [{"type": "text", "text": "Say BANANA"}]}]);
        let count = json!({"system": [{"type": "text", "text": "Be brief."}], "messages": messages});
        assert_eq!(server.ask("/v1/messages/count_tokens", &count), json!({"input_tokens": tokens}));
        let list = json!([{"role": "system", "content": "Be brief."}, {"role": "developer", "content": "Say BANANA"}, {"role": "user", "content": "Hi"}]);
        let tokenized = server.ask("/tokenize", &json!({"messages": list}));
        assert_eq!(
            (&tokenized["count"], tokenized["tokens"].as_array().unwrap().len()),
            (&json!(tokens), tokens)
        );
    }
}

#[test]
fn contents_reach_the_model_as_texts_and_as_parts() {
    for template in [STRICT, PARTS] {
        let server = server(template);
        for content in
            [json!("Hello"), json!([{"type": "text", "text": "Hel"}, {"type": "text", "text": "lo"}])]
        {
            let talk = json!([{"role": "system", "content": content}, {"role": "user", "content": content},
                {"role": "assistant", "content": content}, {"role": "user", "content": content}]);
            let wanted = "[system] Hello\n[user] Hello\n[assistant] Hello\n[user] Hello\n[assistant] ";
            assert_eq!(prompt(&server, talk), wanted);
        }
        let image = json!({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]});
        let refused = server.post("/v1/chat/completions", &image);
        assert_eq!(refused.error(), (400, "unsupported_content".into(), "messages".into()));
    }
}

#[test]
fn parts_keep_the_fields_that_the_template_reads() {
    let server = server(LANGUAGES);
    let part = |kind: &str| json!([{"type": kind, "text": "Ahoj", "source_lang_code": "cs"}]);
    let wanted = "cs: Ahoj\n";
    assert_eq!(prompt(&server, json!([{"role": "user", "content": part("text")}])), wanted);
    let responses =
        json!({"max_output_tokens": 1, "input": [{"role": "user", "content": part("input_text")}]});
    assert_eq!(server.ask("/v1/responses", &responses)["usage"]["input_tokens"], wanted.len());
    let count = json!({"messages": [{"role": "user", "content": part("text")}]});
    assert_eq!(server.ask("/v1/messages/count_tokens", &count), json!({"input_tokens": wanted.len()}));
}

#[test]
fn a_message_that_the_template_drops_is_refused() {
    let server = server(LENIENT);
    for role in ["tool", "narrator"] {
        let body = json!({"messages": [{"role": "user", "content": "Hi"}, {"role": role, "content": "5"}]});
        let refused = server.post("/v1/chat/completions", &body);
        assert_eq!(refused.error(), (400, "template_error".into(), "messages".into()));
        assert!(refused.body.contains(&format!("`{role}`")), "{}", refused.body);
    }
}
