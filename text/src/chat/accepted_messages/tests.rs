use super::*;
use crate::chat::CallerHost;

/// One system message, and that first; no other roles.
const STRICT: &str = "{% for m in messages %}{% if m.role == 'system' and not loop.first %}{{ raise_exception('first') }}\
    {% elif m.role not in ['system', 'user', 'assistant', 'tool'] %}{{ raise_exception('role') }}{% endif %}\
    <{{ m.role }}>{{ m.content }}\n{% endfor %}";
/// Drops what it does not know.
const LENIENT: &str = "{% for m in messages %}{% if m.role in ['system', 'user', 'assistant'] %}<{{ m.role }}>{{ m.content }}\n\
    {% endif %}{% endfor %}";
/// No role for instructions, and it says so.
const WITHOUT: &str = "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no system') }}{% endif %}\
    <{{ m.role }}>{{ m.content }}\n{% endfor %}";
/// The first message alone may be an instruction, as in gpt-oss.
const EITHER: &str = "{% if messages[0].role in ['system', 'developer'] %}<dev>{{ messages[0].content }}\n{% endif %}\
    {% for m in messages %}{% if m.role in ['user', 'assistant'] %}<{{ m.role }}>{{ m.content }}\n{% endif %}{% endfor %}";
/// Both have their place.
const BOTH: &str = "{% for m in messages %}{% if m.role in ['system', 'developer', 'user', 'assistant'] %}\
    <{{ m.role }}>{{ m.content }}\n{% endif %}{% endfor %}";
/// Contents are lists of parts, as in SmolVLM.
const PARTS: &str = "{% for m in messages %}<{{ m['role'] }}>{% for part in m['content'] %}{% if part['type'] == 'text' %}\
    {{ part['text'] }}{% endif %}{% endfor %}{{ '\n' }}{% endfor %}";
/// The user's are, the others are texts.
const MIXED: &str = "{% for m in messages %}<{{ m.role }}>{% if m.role == 'user' %}{% for part in m.content %}{{ part.text }}\
    {% endfor %}{% else %}{{ m.content + '' }}{% endif %}{{ '\n' }}{% endfor %}";
/// A part has fields that it needs, as in TranslateGemma.
const FIELDS: &str = "{% for m in messages %}{% if m.content is string or m.content | length != 1 %}\
    {{ raise_exception('one part') }}{% endif %}{% set part = m.content[0] %}{% if not part.get('source_lang_code') %}\
    {{ raise_exception('no language') }}{% endif %}{{ part['source_lang_code'] }}: {{ part['text'] }}\n{% endfor %}";

fn talk(messages: &[(&str, &str)]) -> Vec<ChatMessage> {
    messages.iter().map(|&(role, text)| ChatMessage::new(role, text)).collect()
}

fn parts(role: &str, parts: Json) -> ChatMessage {
    serde_json::from_value(json!({"role": role, "content": parts})).unwrap()
}

fn rendered(template: &str, messages: &[ChatMessage]) -> String {
    let template = ChatTemplate::from_jinja(template, &CallerHost).unwrap();
    template.render_adapted(messages, false, &TemplateInputs::default()).unwrap()
}

#[test]
fn instructions_become_one_message_at_the_begin() {
    let agents = talk(&[
        ("system", "Be brief."),
        ("developer", "Say BANANA."),
        ("user", "Hi"),
        ("assistant", "Hello"),
        ("system", "Agents: explorer"),
        ("user", "Go"),
    ]);
    let rest = "<user>Hi\n<assistant>Hello\n<user>Go\n";
    let one = "Be brief.\n\nSay BANANA.\n\nAgents: explorer";
    for template in [STRICT, LENIENT] {
        assert_eq!(rendered(template, &agents), format!("<system>{one}\n{rest}"));
    }
    assert_eq!(rendered(EITHER, &agents), format!("<dev>{one}\n{rest}"));
    let both = "<system>Be brief.\n\nAgents: explorer\n<developer>Say BANANA.\n";
    assert_eq!(rendered(BOTH, &agents), format!("{both}{rest}"));
    assert_eq!(rendered(WITHOUT, &agents), format!("<user>{one}\n\n{}", &rest["<user>".len()..]));
    // A template that knows no developer has none.
    let developer = talk(&[("developer", "Say BANANA."), ("user", "Hi")]);
    assert_eq!(rendered(LENIENT, &developer), "<system>Say BANANA.\n<user>Hi\n");
    assert_eq!(rendered(BOTH, &developer), "<developer>Say BANANA.\n<user>Hi\n");
    // The only message so far.
    assert_eq!(rendered(WITHOUT, &talk(&[("system", "Go on.")])), "<user>Go on.\n");
    let empty = talk(&[("system", ""), ("user", "Hi"), ("system", "x")]);
    assert_eq!(rendered(STRICT, &empty), "<system>x\n<user>Hi\n");
}

#[test]
fn formats_without_a_role_for_instructions_have_them_in_the_users_text() {
    let template = ChatTemplate::builtin(super::super::BuiltinFormat::ChatGlm2);
    let messages = talk(&[("system", "Be brief."), ("user", "Hi")]);
    let text = template.render_adapted(&messages, true, &TemplateInputs::default()).unwrap();
    assert_eq!(text, "[Round 1]\n\n问：Be brief.\n\nHi\n\n答：");
}

#[test]
fn contents_are_texts_or_parts_as_the_template_reads_them() {
    let said = talk(&[("system", "S"), ("user", "Hello"), ("assistant", "A"), ("user", "B")]);
    let mut as_parts = said.clone();
    for message in &mut as_parts {
        let text = message.text();
        *message = parts(&message.role, json!([{"type": "text", "text": text}]));
    }
    for template in [STRICT, PARTS, MIXED] {
        for messages in [&said, &as_parts] {
            assert_eq!(rendered(template, messages), "<system>S\n<user>Hello\n<assistant>A\n<user>B\n");
        }
    }
    // Several instructions, and several parts.
    let two = [
        parts("system", json!([{"type": "text", "text": "S"}])),
        parts("user", json!([{"type": "text", "text": "one "}, {"type": "text", "text": "two"}])),
        ChatMessage::new("developer", "D"),
    ];
    for template in [STRICT, PARTS, MIXED] {
        assert_eq!(rendered(template, &two), "<system>S\n\nD\n<user>one two\n");
    }
}

#[test]
fn parts_keep_the_fields_that_the_template_reads() {
    let part = json!({"type": "text", "source_lang_code": "cs", "text": "Ahoj"});
    assert_eq!(rendered(FIELDS, &[parts("user", json!([part]))]), "cs: Ahoj\n");
    let told = [ChatMessage::new("system", "Be polite."), parts("user", json!([part]))];
    assert_eq!(rendered(FIELDS, &told), "cs: Be polite.\n\nAhoj\n");
    // Roles that no template has make no list of a text.
    let cached = json!([{"type": "text", "text": "Ahoj", "cache_control": {"type": "ephemeral"}}]);
    assert_eq!(rendered(STRICT, &[parts("user", cached)]), "<user>Ahoj\n");
}

#[test]
fn messages_that_a_template_drops_are_refused() {
    let template = ChatTemplate::from_jinja(LENIENT, &CallerHost).unwrap();
    let mut messages = talk(&[("user", "Hi"), ("tool", "5")]);
    for role in ["tool", "critic"] {
        messages[1].role = role.into();
        let error = template.adapt_messages(&messages, &TemplateInputs::default()).unwrap_err().to_string();
        assert!(error.contains(&format!("role `{role}` of message 1")), "{error}");
    }
    messages[1].content = MessageContent::None;
    assert!(template.adapt_messages(&messages, &TemplateInputs::default()).is_ok());
    let tool = ChatTemplate::from_jinja(STRICT, &CallerHost).unwrap();
    assert!(tool.adapt_messages(&talk(&[("user", "Hi"), ("tool", "5")]), &TemplateInputs::default()).is_ok());
}

#[test]
fn a_template_without_an_end_is_tried_once() {
    let text = "{% for a in range(9999) %}{% for b in range(9999) %}{% for c in range(9999) %}{% set x = c %}{% endfor %}\
        {% endfor %}{% endfor %}";
    let template = ChatTemplate::from_jinja(text, &CallerHost).unwrap();
    // The sample has used up the time: the messages are not waited for as well.
    let said = talk(&[("user", "Hi")]);
    for result in [
        AcceptedMessages::from_template(&template, false).err(),
        template.adapt_messages(&said, &TemplateInputs::default()).err(),
    ] {
        assert!(
            matches!(result, Some(ChatError::TooSlow { .. } | ChatError::TooManySteps { .. })),
            "{result:?}"
        );
    }
}
