use super::*;
use crate::chat::{ChatTemplate, Extra, Message};

const HERMES: &str = "{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content or '' }}{% for c in m.tool_calls or [] %}{{ '\n' if not loop.first else '' }}<tool_call>\n{\"name\": \"{{ c.function.name }}\", \"arguments\": {{ c.function.arguments | tojson }}}\n</tool_call>{% endfor %}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}";
const LIST: &str = "{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}{% if m.role == 'user' %}[INST] {{ m.content }}[/INST]{% elif m.tool_calls %}[TOOL_CALLS] [{% for c in m.tool_calls %}{\"name\": \"{{ c.function.name }}\", \"arguments\": {{ c.function.arguments | tojson }}, \"id\": \"{{ c.id }}\"}{{ ', ' if not loop.last else '' }}{% endfor %}]</s>{% else %} {{ m.content }}</s>{% endif %}{% endfor %}";
const BARE: &str = "{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}<|{{ m.role }}|>{% if m.tool_calls %}{% if m.tool_calls|length != 1 %}{{ raise_exception('one call') }}{% endif %}{\"name\": \"{{ m.tool_calls[0].function.name }}\", \"parameters\": {{ m.tool_calls[0].function.arguments | tojson }}}{% else %}{{ m.content }}{% endif %}<|end|>{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}";
/// Arguments come as text, between control tokens.
const FENCED: &str = "{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}<|{{ m.role }}|>{% if m.tool_calls %}<|calls|>{% for c in m.tool_calls %}<|call|>function<|sep|>{{ c.function.name }}\n```json\n{{ '' + c.function.arguments }}\n```<|call_end|>{% endfor %}<|calls_end|>{% else %}{{ m.content }}{% endif %}<|end|>{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}";
const THINKS: &str = "{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}<|{{ m.role }}|>{% if m.role == 'assistant' %}<think>\n{{ m.reasoning_content or '' }}\n</think>\n\n{% endif %}{{ m.content or '' }}{% for c in m.tool_calls or [] %}<call>{{ c.function.name }}:{{ c.function.arguments | tojson }}</call>{% endfor %}<|end|>{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}";
/// A tag for each argument.
const TAGS: &str = "{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}<|{{ m.role }}|>{{ m.content or '' }}{% for c in m.tool_calls or [] %}<call={{ c.function.name }}>{% for k, v in c.function.arguments.items() %}<{{ k }}>{{ v }}</{{ k }}>{% endfor %}</call>{% endfor %}<|end|>{% endfor %}";

fn syntax(template: &str) -> AnswerSyntax {
    AnswerSyntax::of(&ChatTemplate::from_jinja(template).unwrap())
}

/// Begin, open, middle, close, between, end.
fn texts(template: &str) -> (String, String, String, String, Option<String>, String) {
    let CallSyntax { begin, open, middle, close, between, end, .. } = syntax(template).calls.unwrap();
    (begin, open, middle, close, between, end)
}

fn owned(
    t: (&str, &str, &str, &str, Option<&str>, &str),
) -> (String, String, String, String, Option<String>, String) {
    (t.0.into(), t.1.into(), t.2.into(), t.3.into(), t.4.map(Into::into), t.5.into())
}

#[test]
fn the_form_of_calls_is_found_from_the_template() {
    let hermes = ("", "<tool_call>\n{\"name\": \"", "\", \"arguments\": ", "}\n</tool_call>", Some("\n"), "");
    assert_eq!(texts(HERMES), owned(hermes));
    let list =
        ("[TOOL_CALLS] [", "{\"name\": \"", "\", \"arguments\": ", ", \"id\": \"\u{1}\"}", Some(", "), "]");
    assert_eq!(texts(LIST), owned(list));
    assert_eq!(texts(BARE), owned(("", "{\"name\": \"", "\", \"parameters\": ", "}", None, "")));
    let fenced = (
        "<|calls|>",
        "<|call|>function<|sep|>",
        "\n```json\n",
        "\n```<|call_end|>",
        Some(""),
        "<|calls_end|>",
    );
    assert_eq!(texts(FENCED), owned(fenced));
    assert!(
        syntax(FENCED).calls.unwrap().arguments_as_text && !syntax(LIST).calls.unwrap().arguments_as_text
    );
    assert_eq!(texts(THINKS), owned(("", "<call>", ":", "</call>", Some(""), "")));
    let thinks = syntax(THINKS).reasoning.unwrap();
    assert_eq!((thinks.open.as_str(), thinks.close.as_str()), ("<think>", "</think>"));
    assert!(thinks.is_open_behind("<|assistant|><think>\n") && !thinks.is_open_behind("</think>\n"));
    // A template that only opens it.
    let opens = syntax(
        "{% for m in messages %}{{ m.content }}{% endfor %}{% if add_generation_prompt %}A: <think>\n{% endif %}",
    );
    assert_eq!(opens.reasoning, Some(ReasoningSyntax { open: "<think>".into(), close: "</think>".into() }));
    for without in [TAGS, "{% for m in messages %}[INST] {{ m.content }} [/INST]{% endfor %}"] {
        assert_eq!(syntax(without), AnswerSyntax::default(), "{without}");
    }
}

/// Templates in the forms of published ones.
#[test]
fn the_form_of_calls_of_published_templates() {
    let data: serde_json::Value =
        serde_json::from_str(include_str!("../../../tests/data/chat_cases.json")).unwrap();
    let template = |name: &str| data["templates"][name].as_str().unwrap().to_owned();
    let thinking = template("thinking");
    let hermes = ("", "<tool_call>\n{\"name\": \"", "\", \"arguments\": ", "}\n</tool_call>", Some("\n"), "");
    assert_eq!(texts(&thinking), owned(hermes));
    let reasoning = ReasoningSyntax { open: "<think>".into(), close: "</think>".into() };
    assert_eq!(syntax(&thinking).reasoning, Some(reasoning));
    let bare = ("", "{\"name\": \"", "\", \"parameters\": ", "}", None, "");
    assert_eq!(texts(&template("llama-3")), owned(bare));
    // These know no calls, though one of them lists tools.
    for name in ["llama-2", "chatml", "gemma", "mistral", "phi-3"] {
        assert_eq!(syntax(&template(name)).calls, None, "{name}");
    }
}

/// Joins what belongs together.
fn read(template: &str, prompt: &str, pieces: &[&str], most: usize) -> Vec<AnswerPart> {
    let names = ["add", "add_all"].map(String::from).to_vec();
    let mut parser = AnswerParser::new(&syntax(template), names, most, prompt);
    let mut all: Vec<AnswerPart> = Vec::new();
    let mut parts: Vec<AnswerPart> = pieces.iter().flat_map(|piece| parser.push(piece)).collect();
    parts.extend(parser.finish());
    for part in parts {
        match (all.last_mut(), part) {
            (Some(AnswerPart::Text(text)), AnswerPart::Text(more)) => *text += &more,
            (Some(AnswerPart::Reasoning(text)), AnswerPart::Reasoning(more)) => *text += &more,
            (Some(AnswerPart::Arguments { text, .. }), AnswerPart::Arguments { text: more, .. }) => {
                *text += &more
            }
            (_, part) => all.push(part),
        }
    }
    all
}

fn call(index: usize, name: &str, text: &str) -> Vec<AnswerPart> {
    vec![AnswerPart::Call { index, name: name.into() }, AnswerPart::Arguments { index, text: text.into() }]
}

fn text(text: &str) -> Vec<AnswerPart> {
    vec![AnswerPart::Text(text.into())]
}

fn reasons(text: &str) -> Vec<AnswerPart> {
    vec![AnswerPart::Reasoning(text.into())]
}

/// Whole, and cut at every place.
fn check(template: &str, prompt: &str, answer: &str, expected: &[Vec<AnswerPart>]) {
    let expected = expected.concat();
    assert_eq!(read(template, prompt, &[answer], 9), expected, "{answer}");
    for (at, _) in answer.char_indices() {
        let (a, b) = answer.split_at(at);
        assert_eq!(read(template, prompt, &[a, b], 9), expected, "{a:?} {b:?}");
    }
    let single: Vec<String> = answer.chars().map(String::from).collect();
    let single: Vec<&str> = single.iter().map(String::as_str).collect();
    assert_eq!(read(template, prompt, &single, 9), expected, "{answer} one by one");
}

#[test]
fn answers_are_taken_apart() {
    let one =
        "<tool_call>\n{\"name\": \"add\", \"arguments\": {\"a\": \"}\\\"{\", \"b\": [1, {}]}}\n</tool_call>";
    let arguments = "{\"a\": \"}\\\"{\", \"b\": [1, {}]}";
    check(HERMES, "", one, &[call(0, "add", arguments)]);
    let two = format!(
        "Let me see < 5.\n\n{one}\n<tool_call>{{\"name\":\"add_all\",\"arguments\":{{}}}}</tool_call>"
    );
    check(HERMES, "", &two, &[text("Let me see < 5."), call(0, "add", arguments), call(1, "add_all", "{}")]);
    check(HERMES, "", "No <tool_call> here {\"name\"", &[text("No <tool_call> here {\"name\"")]);
    let unknown = "<tool_call>\n{\"name\": \"sub\", \"arguments\": {}}\n</tool_call>";
    check(HERMES, "", unknown, &[text(unknown)]);
    // Cut in the middle.
    check(HERMES, "", one.split(", \"b\"").next().unwrap(), &[call(0, "add", "{\"a\": \"}\\\"{\"")]);
    let list = "[TOOL_CALLS] [{\"name\": \"add\", \"arguments\": {\"a\": 1}, \"id\": \"abcdefghi\"}, {\"name\": \"add\", \"arguments\": {}, \"id\": \"x\"}]";
    check(LIST, "", list, &[call(0, "add", "{\"a\": 1}"), call(1, "add", "{}")]);
    check(BARE, "", "{\"name\": \"add\", \"parameters\": {\"a\": 1}}", &[call(0, "add", "{\"a\": 1}")]);
    let later = "As JSON: {\"name\": \"add\", \"parameters\": {}}";
    check(BARE, "", later, &[text(later)]);
    check(BARE, "", "{\"name\": \"Ada\"}", &[text("{\"name\": \"Ada\"}")]);
    let fenced = "<|calls|><|call|>function<|sep|>add\n```json\n{\"a\": 1}\n```<|call_end|><|calls_end|>";
    check(FENCED, "", fenced, &[call(0, "add", "{\"a\": 1}")]);
    check(
        THINKS,
        "",
        "<think>\nOne.\n\nTwo.\n</think>\n\nThree.",
        &[reasons("One.\n\nTwo."), text("Three.")],
    );
    check(
        THINKS,
        "<think>\n",
        "One.\n</think>\n\n<call>add:{}</call>",
        &[reasons("One."), call(0, "add", "{}")],
    );
    check(THINKS, "", "A <think> in the text", &[text("A <think> in the text")]);
    check(THINKS, "<think>", "Without an end <", &[reasons("Without an end <")]);
    check(HERMES, "", "<think>\nNot its way.</think>", &[text("<think>\nNot its way.</think>")]);
    assert_eq!(read(HERMES, "", &[&two], 1), [text("Let me see < 5."), call(0, "add", arguments)].concat());
}

/// A call that is rendered is the call that is read.
#[test]
fn what_a_template_writes_is_read_back() {
    let fields = serde_json::json!({"role": "assistant", "content": null, "tool_calls": [
        {"id": "abcdefgh1", "type": "function", "function": {"name": "add_all", "arguments": {"numbers": [1, 2]}}}]});
    for template in [HERMES, LIST, BARE, THINKS] {
        let messages = [Message::new("user", "Q"), serde_json::from_value(fields.clone()).unwrap()];
        let template_ = ChatTemplate::from_jinja(template).unwrap();
        let extra =
            Extra { tools: Some(crate::chat::Value::from(minijinja::value::Serde([1]))), ..Extra::default() };
        let prompt = template_.render(&messages[..1], true, &extra).unwrap();
        let whole = template_.render(&messages, false, &extra).unwrap();
        let answer = whole.strip_prefix(&prompt).unwrap();
        let found = read(template, &prompt, &[answer], 9);
        assert_eq!(found.first(), Some(&AnswerPart::Call { index: 0, name: "add_all".into() }), "{answer}");
        let AnswerPart::Arguments { text, .. } = &found[1] else { panic!("{found:?}") };
        assert_eq!(text, "{\"numbers\": [1, 2]}");
    }
}
