use super::*;
use crate::chat::{
    CallSyntax, CallerHost, ChatMessage, ChatTemplate, ReasoningSyntax, TagSyntax, TemplateInputs,
};

const HERMES: &str = "{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content or '' }}{% for c in m.tool_calls or [] %}{{ '\n' if not loop.first else '' }}<tool_call>\n{\"name\": \"{{ c.function.name }}\", \"arguments\": {{ c.function.arguments | tojson }}}\n</tool_call>{% endfor %}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}";
const LIST: &str = "{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}{% if m.role == 'user' %}[INST] {{ m.content }}[/INST]{% elif m.tool_calls %}[TOOL_CALLS] [{% for c in m.tool_calls %}{\"name\": \"{{ c.function.name }}\", \"arguments\": {{ c.function.arguments | tojson }}, \"id\": \"{{ c.id }}\"}{{ ', ' if not loop.last else '' }}{% endfor %}]</s>{% else %} {{ m.content }}</s>{% endif %}{% endfor %}";
const BARE: &str = "{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}<|{{ m.role }}|>{% if m.tool_calls %}{% if m.tool_calls|length != 1 %}{{ raise_exception('one call') }}{% endif %}{\"name\": \"{{ m.tool_calls[0].function.name }}\", \"parameters\": {{ m.tool_calls[0].function.arguments | tojson }}}{% else %}{{ m.content }}{% endif %}<|end|>{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}";
/// Arguments come as text, between control tokens.
const FENCED: &str = "{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}<|{{ m.role }}|>{% if m.tool_calls %}<|calls|>{% for c in m.tool_calls %}<|call|>function<|sep|>{{ c.function.name }}\n```json\n{{ '' + c.function.arguments }}\n```<|call_end|>{% endfor %}<|calls_end|>{% else %}{{ m.content }}{% endif %}<|end|>{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}";
const THINKS: &str = "{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}<|{{ m.role }}|>{% if m.role == 'assistant' %}<think>\n{{ m.reasoning_content or '' }}\n</think>\n\n{% endif %}{{ m.content or '' }}{% for c in m.tool_calls or [] %}<call>{{ c.function.name }}:{{ c.function.arguments | tojson }}</call>{% endfor %}<|end|>{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}";
/// A tag for each argument, in the forms of Qwen3-Coder, GLM-4.5 and MiniMax-M2.
const PARAMETERS: &str = "{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content or '' }}{% for c in m.tool_calls or [] %}{{ '\n' if not loop.first else '' }}<tool_call>\n<function={{ c.function.name }}>\n{% for k, v in c.function.arguments | items %}<parameter={{ k }}>\n{{ v if v is string else v | tojson }}\n</parameter>\n{% endfor %}</function>\n</tool_call>{% endfor %}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}";
const PAIRS: &str = "{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}<|{{ m.role }}|>{{ m.content or '' }}{% for c in m.tool_calls or [] %}\n<tool_call>{{ c.function.name }}\n{% for k, v in c.function.arguments | items %}<arg_key>{{ k }}</arg_key>\n<arg_value>{{ v if v is string else v | tojson }}</arg_value>\n{% endfor %}</tool_call>{% endfor %}{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}";
const INVOKES: &str = "{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}]~b]{{ 'ai' if m.role == 'assistant' else m.role }}\n{{ m.content or '' }}{% if m.tool_calls %}\n<calls>\n{% for c in m.tool_calls %}<invoke name=\"{{ c.function.name }}\">\n{% for k, v in c.function.arguments | items %}<parameter name=\"{{ k }}\">{{ v if v is string else v | tojson }}</parameter>\n{% endfor %}</invoke>\n{% endfor %}</calls>{% endif %}[e~[\n{% endfor %}{% if add_generation_prompt %}]~b]ai\n{% endif %}";
/// A tag that has the name of the argument.
const TAGS: &str = "{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}<|{{ m.role }}|>{{ m.content or '' }}{% for c in m.tool_calls or [] %}<call={{ c.function.name }}>{% for k, v in c.function.arguments.items() %}<{{ k }}>{{ v }}</{{ k }}>{% endfor %}</call>{% endfor %}<|end|>{% endfor %}";

fn syntax(template: &str) -> AnswerSyntax {
    AnswerSyntax::from_template(&ChatTemplate::from_jinja(template, &CallerHost).unwrap())
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
    // Texts in quotes, as no other value.
    let quoted = PAIRS.replace("v if v is string else v | tojson", "v | tojson");
    for without in [TAGS, &quoted, "{% for m in messages %}[INST] {{ m.content }} [/INST]{% endfor %}"] {
        assert_eq!(syntax(without), AnswerSyntax::default(), "{without}");
    }
}

fn tags(template: &str) -> (String, String, String, String) {
    let TagSyntax { open, middle, close, between } = syntax(template).calls.unwrap().tags.unwrap();
    (open, middle, close, between)
}

#[test]
fn the_form_of_tags_is_found_from_the_template() {
    let tag = |open: &str, middle: &str, close: &str| {
        (open.to_owned(), middle.to_owned(), close.to_owned(), String::new())
    };
    assert_eq!(tags(PARAMETERS), tag("\n<parameter=", ">\n", "\n</parameter>"));
    let around = ("", "<tool_call>\n<function=", ">", "\n</function>\n</tool_call>", Some("\n"), "");
    assert_eq!(texts(PARAMETERS), owned(around));
    assert_eq!(tags(PAIRS), tag("\n<arg_key>", "</arg_key>\n<arg_value>", "</arg_value>"));
    assert_eq!(texts(PAIRS), owned(("", "<tool_call>", "", "\n</tool_call>", Some(""), "")));
    assert_eq!(tags(INVOKES), tag("\n<parameter name=\"", "\">", "</parameter>"));
    let around = ("<calls>", "\n<invoke name=\"", "\">", "\n</invoke>", Some(""), "\n</calls>");
    assert_eq!(texts(INVOKES), owned(around));
}

#[test]
fn arguments_in_tags_become_json() {
    let parameters = "<tool_call>\n<function=add>\n<parameter=note>\nif a < b:\n  \"say\" </param>\n\n</parameter>\n<parameter=count>\n3\n</parameter>\n<parameter=list>\n[1, {\"a\": \"</x>\"}]\n</parameter>\n<parameter=maybe>\nnull\n</parameter>\n<parameter=odd>\nTrue\n</parameter>\n</function>\n</tool_call>";
    let json = r#"{"note": "if a < b:\n  \"say\" </param>\n", "count": 3, "list": [1, {"a": "</x>"}], "maybe": null, "odd": true}"#;
    let none = "<tool_call>\n<function=add_all>\n</function>\n</tool_call>";
    let both = format!("Well.\n{parameters}\n{none}");
    let expected = [text("Well."), call(0, "add", json), call(1, "add_all", "{}")];
    check(PARAMETERS, "", &both, &expected);
    let pairs = "\n<tool_call>add\n<arg_key>note</arg_key>\n<arg_value>5 </arg_value>\n<arg_key>count</arg_key>\n<arg_value>word</arg_value>\n</tool_call>\n<tool_call>add_all\n</tool_call>";
    let json = r#"{"note": "5 ", "count": "word"}"#;
    check(PAIRS, "", pairs, &[call(0, "add", json), call(1, "add_all", "{}")]);
    let invokes =
        "\n<calls>\n<invoke name=\"add\">\n<parameter name=\"maybe\">x</parameter>\n</invoke>\n</calls>";
    check(INVOKES, "", invokes, &[call(0, "add", r#"{"maybe": "x"}"#)]);
    // Texts come piece by piece, other values when they are whole.
    let pieces: Vec<String> = parameters.chars().map(String::from).collect();
    let mut parser = parser(PARAMETERS, 9, "");
    let told: Vec<AnswerPart> = pieces.iter().flat_map(|piece| parser.push(piece)).collect();
    let of_note = |part: &&AnswerPart| matches!(part, AnswerPart::Arguments { text, .. } if text.len() == 1);
    assert!(told.iter().filter(of_note).count() > 15, "{told:?}");
    // Text that is cut is the begin of an argument; other text ends them.
    let cut = "<tool_call>\n<function=add>\n<parameter=note>\nhalf a sen";
    check(PARAMETERS, "", cut, &[call(0, "add", "{\"note\": \"half a sen")]);
    let odd = "<tool_call>\n<function=add>\nwhat?</function>\n</tool_call>";
    check(PARAMETERS, "", odd, &[call(0, "add", "{}"), text("what?</function>\n</tool_call>")]);
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

fn parser(template: &str, most: usize, prompt: &str) -> AnswerParser {
    let names = ["add", "add_all"].map(String::from).to_vec();
    let schema = serde_json::json!({"type": "object", "properties": {"note": {"type": "string"}, "count": {"type": "integer"},
        "list": {"type": "array"}, "maybe": {"type": ["string", "null"]}}});
    AnswerParser::new(&syntax(template), names, most, prompt)
        .with_schemas(vec![schema, serde_json::Value::Null])
}

/// Joins what belongs together.
fn read(template: &str, prompt: &str, pieces: &[&str], most: usize) -> Vec<AnswerPart> {
    let mut parser = parser(template, most, prompt);
    let mut all: Vec<AnswerPart> = Vec::new();
    let mut parts: Vec<AnswerPart> = pieces.iter().flat_map(|piece| parser.push(piece)).collect();
    parts.extend(parser.finish(false));
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
    check(HERMES, "", unknown, &[call(0, "sub", "{}")]);
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
        let messages = [ChatMessage::new("user", "Q"), serde_json::from_value(fields.clone()).unwrap()];
        let template_ = ChatTemplate::from_jinja(template, &CallerHost).unwrap();
        let extra = TemplateInputs {
            tools: Some(crate::chat::TemplateValue::from(minijinja::value::Serde([1]))),
            ..TemplateInputs::default()
        };
        let prompt = template_.render(&messages[..1], true, &extra).unwrap();
        let whole = template_.render(&messages, false, &extra).unwrap();
        let answer = whole.strip_prefix(&prompt).unwrap();
        let found = read(template, &prompt, &[answer], 9);
        assert_eq!(found.first(), Some(&AnswerPart::Call { index: 0, name: "add_all".into() }), "{answer}");
        let AnswerPart::Arguments { text, .. } = &found[1] else { panic!("{found:?}") };
        assert_eq!(text, "{\"numbers\": [1, 2]}");
    }
}

/// Answers as models write them, in the forms of several families; what is cut has no markup.
#[test]
fn answers_of_models_are_taken_apart() {
    let data: Json = serde_json::from_str(include_str!("../../../tests/data/answers.json")).unwrap();
    let functions = data["tools"].as_array().unwrap();
    for case in data["cases"].as_array().unwrap().iter().filter(|case| case["stop"].is_null()) {
        let template = data["templates"][case["template"].as_str().unwrap()].as_str().unwrap();
        let template = ChatTemplate::from_jinja(template, &CallerHost).unwrap();
        let variables = case["variables"].as_object().into_iter().flatten();
        let variables = variables
            .map(|(name, value)| {
                (name.clone(), crate::chat::TemplateValue::from(minijinja::value::Serde(value)))
            })
            .collect();
        let extra = TemplateInputs { variables, ..TemplateInputs::default() };
        let prompt = template.render(&[ChatMessage::new("user", "Hi")], true, &extra).unwrap();
        let offered = if case["no_tools"] == true { &[] } else { &functions[..] };
        let names: Vec<String> = offered.iter().map(|f| f["name"].as_str().unwrap().to_owned()).collect();
        let schemas = offered.iter().map(|f| f["parameters"].clone()).collect();
        let parser = AnswerParser::new(&AnswerSyntax::from_template(&template), names, 9, &prompt)
            .with_schemas(schemas);
        let answer = case["answer"].as_str().unwrap();
        let whole = taken(parser.clone(), &[answer], case);
        for (at, _) in answer.char_indices() {
            assert_eq!(taken(parser.clone(), &[&answer[..at], &answer[at..]], case), whole, "{at}: {case}");
        }
        let single: Vec<String> = answer.chars().map(String::from).collect();
        let single: Vec<&str> = single.iter().map(String::as_str).collect();
        assert_eq!(taken(parser, &single, case), whole, "one by one: {case}");
        let text = |name: &str| case[name].as_str().unwrap_or_default().to_owned();
        let calls = case["calls"].as_array().cloned().unwrap_or_default();
        assert_eq!(whole, (text("reasoning"), text("content"), calls), "{case}");
    }
}

/// Reasoning, text and calls.
fn taken(mut parser: AnswerParser, pieces: &[&str], case: &Json) -> (String, String, Vec<Json>) {
    let mut parts: Vec<AnswerPart> = pieces.iter().flat_map(|piece| parser.push(piece)).collect();
    parts.extend(parser.finish(case["cut"] == true));
    let (mut reasoning, mut content) = (String::new(), String::new());
    let mut calls: Vec<(String, String)> = Vec::new();
    for part in parts {
        match part {
            AnswerPart::Reasoning(text) => reasoning += &text,
            AnswerPart::Text(text) => content += &text,
            AnswerPart::Call { name, .. } => calls.push((name, String::new())),
            AnswerPart::Arguments { text, .. } => calls.last_mut().unwrap().1 += &text,
        }
    }
    let call = |(name, arguments): (String, String)| {
        let arguments: Json =
            serde_json::from_str(&arguments).unwrap_or_else(|e| panic!("{e}: {arguments}: {case}"));
        serde_json::json!({"name": name, "arguments": arguments})
    };
    (reasoning, content, calls.into_iter().map(call).collect())
}
