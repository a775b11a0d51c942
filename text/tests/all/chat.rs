//! Chat templates against jinja2 (`tools/chat_cases.py`), the goldens, and templates that are wrong.

use crate::common::{self, Machine};
use mlcc_text::chat::{BuiltinFormat, ChatFiles, MessageContent, TemplateInputs, TemplateValue as ChatValue};
use mlcc_text::{ChatError, ChatMessage, ChatSource, ChatTemplate};
use serde::Deserialize;
use std::collections::BTreeMap;

#[derive(Deserialize)]
struct ChatCases {
    tokens: BTreeMap<String, String>,
    now: u64,
    templates: BTreeMap<String, String>,
    cases: Vec<ChatCase>,
}

#[derive(Deserialize)]
struct ChatCase {
    template: String,
    messages: Vec<ChatMessage>,
    add_generation_prompt: bool,
    extra: BTreeMap<String, ChatValue>,
    rendered: Option<String>,
    raised: Option<String>,
}

#[test]
fn rendered_as_jinja2_does() {
    let cases: ChatCases = serde_json::from_str(include_str!("../data/chat_cases.json")).unwrap();
    assert!(cases.cases.len() > 40);
    for (number, case) in cases.cases.into_iter().enumerate() {
        let mut source = ChatSource::jinja(&cases.templates[&case.template]);
        for (name, text) in &cases.tokens {
            source = source.with_token(name, text);
        }
        let template = ChatTemplate::from_section(&source.to_section(), &Machine).unwrap();
        let mut variables = case.extra;
        let tools = variables.remove("tools");
        let extra = TemplateInputs { tools, variables, now: Some(cases.now), ..TemplateInputs::default() };
        let result = template.render(&case.messages, case.add_generation_prompt, &extra);
        match (result, case.rendered, case.raised) {
            (Ok(text), Some(expected), None) => {
                assert_eq!(text, expected, "case {number}: {}", case.template)
            }
            (Err(ChatError::Raised { message }), None, Some(expected)) => assert_eq!(message, expected),
            (result, ..) => panic!("case {number}, {}: {result:?}", case.template),
        }
    }
}

#[test]
fn golden_chats_of_qwen2() {
    let Some(folder) = common::shared("goldens/qwen2") else { return };
    let config = std::fs::read(folder.join("tokenizer_config.json")).unwrap();
    let files = ChatFiles { tokenizer_config: Some(&config), ..ChatFiles::default() };
    let template = ChatSource::from_files(files).unwrap().unwrap().compile(&Machine).unwrap();
    let tokenizer = mlcc_text::Tokenizer::from_dir(&folder, &Machine).unwrap();
    let golden = std::fs::read(folder.join("tokenizer_golden.json")).unwrap();
    let golden: serde_json::Value = serde_json::from_slice(&golden).unwrap();
    let chats = golden["chat"].as_array().unwrap();
    assert!(!chats.is_empty());
    for chat in chats {
        let messages: Vec<ChatMessage> = serde_json::from_value(chat["messages"].clone()).unwrap();
        let generation = chat["add_generation_prompt"].as_bool().unwrap();
        let text = template.render(&messages, generation, &TemplateInputs::default()).unwrap();
        assert_eq!(text, chat["rendered"].as_str().unwrap());
        let ids: Vec<i32> = serde_json::from_value(chat["ids"].clone()).unwrap();
        assert!(!template.wants_prompt_template());
        assert_eq!(tokenizer.encode(&text).unwrap(), ids);
    }
}

fn ask(text: &str) -> Vec<ChatMessage> {
    vec![ChatMessage::new("user", text)]
}

#[test]
fn templates_that_are_wrong() {
    let messages = ask("hi");
    let render = |text: &str| {
        ChatTemplate::from_jinja(text, &Machine).unwrap().render(&messages, true, &TemplateInputs::default())
    };
    let error = ChatTemplate::from_jinja("a\n{% for x in %}", &Machine).unwrap_err().to_string();
    assert!(error.contains("line 2"), "{error}");
    let error = render("a\n{{ messages[0].no.where }}").unwrap_err().to_string();
    assert!(error.contains("line 2"), "{error}");
    let error = render("{{ raise_exception('Only pairs: ' ~ messages | length) }}").unwrap_err();
    assert!(matches!(&error, ChatError::Raised { message } if message == "Only pairs: 1"), "{error}");
    // A macro in a loop in a loop: the inner error is found.
    let nested = "{% macro m() %}{{ raise_exception('deep') }}{% endmacro %}{% for m2 in messages %}{{ m() }}{% endfor %}";
    let error = render(nested).unwrap_err();
    assert!(matches!(&error, ChatError::Raised { message } if message == "deep"), "{error}");
}

/// The parser takes a frame for every operator of a chain: the longest templates have room, longer ones are
/// refused.
#[test]
fn templates_with_long_chains() {
    let messages = ask("hi");
    for (begin, link, end) in [
        ("{{ 1", "+1", " }}"),
        ("{{ ", "not ", "1 }}"),
        ("{{ ", "-", "1 }}"),
        ("{{ a", ".b", "|default(1) }}"),
        ("{% if a %}", "{% elif a %}", "{% endif %}"),
    ] {
        let chain = |bytes: usize| format!("{begin}{}{end}", link.repeat(bytes / link.len()));
        if let Ok(template) = ChatTemplate::from_jinja(&chain((128 << 10) - 64), &Machine) {
            let _ = template.render(&messages, true, &TemplateInputs::default());
        }
        let error = ChatTemplate::from_jinja(&chain(130 << 10), &Machine).err().unwrap().to_string();
        assert!(error.contains("131072 are permitted"), "{error}");
    }
}

#[test]
fn templates_that_do_not_end() {
    let messages = ask("hi");
    let render = |text: &str| {
        ChatTemplate::from_jinja(text, &Machine).unwrap().render(&messages, true, &TemplateInputs::default())
    };
    let loops =
        "{% for a in range(100000) %}{% for b in range(100000) %}{% set x = b %}{% endfor %}{% endfor %}";
    assert!(matches!(render(loops), Err(ChatError::TooManySteps { .. })));
    let recursion = "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}";
    assert!(matches!(render(recursion), Err(ChatError::Render { .. })));
    let long = "{% set x = 'x' * 10000000 %}{% for a in range(100) %}{{ x }}{% endfor %}";
    assert!(matches!(render(long), Err(ChatError::TooLong { .. })));
}

#[test]
fn pictures_are_refused() {
    let message = r#"{"role": "user", "content": [{"type": "text", "text": "what is"}, {"type": "image_url", "image_url": {"url": "x"}}]}"#;
    let messages: Vec<ChatMessage> =
        vec![ChatMessage::new("system", "s"), serde_json::from_str(message).unwrap()];
    let template = ChatTemplate::from_jinja("{{ messages }}", &Machine).unwrap();
    let error = template.render(&messages, true, &TemplateInputs::default()).unwrap_err().to_string();
    assert!(error.contains("message 1") && error.contains("image_url"), "{error}");
    assert_eq!(messages[1].text(), "what is");
}

#[test]
fn templates_from_files() {
    let find = |config: &str, jinja: Option<&str>| {
        let files = ChatFiles {
            tokenizer_config: Some(config.as_bytes()),
            chat_template_jinja: jinja.map(str::as_bytes),
            special_tokens_map: Some(br#"{"eos_token": {"content": "<e>"}, "bos_token": "<other>"}"#),
            ..ChatFiles::default()
        };
        ChatSource::from_files(files)
    };
    let render = |source: ChatSource, extra: &TemplateInputs| {
        source.compile(&Machine).unwrap().render(&ask("q"), false, extra).unwrap()
    };
    assert_eq!(find("{}", None).unwrap(), None);
    let config = r#"{"bos_token": {"content": "<b>", "lstrip": false}, "chat_template": "{{ bos_token }}{{ eos_token }}{{ pad_token }}C"}"#;
    assert_eq!(render(find(config, None).unwrap().unwrap(), &TemplateInputs::default()), "<b><e>C");
    let file = find(config, Some("{{ bos_token }}J\n")).unwrap().unwrap();
    assert_eq!(render(file, &TemplateInputs::default()), "<b>J");

    let named = r#"{"chat_template": [{"name": "default", "template": "D"}, {"name": "tool_use", "template": "T{{ tools | length }}"}]}"#;
    let named = find(named, None).unwrap().unwrap();
    assert_eq!(render(named.clone(), &TemplateInputs::default()), "D");
    let tools =
        TemplateInputs { tools: Some(serde_json::from_str("[1, 2]").unwrap()), ..TemplateInputs::default() };
    assert_eq!(render(named, &tools), "T2");

    assert!(find(r#"{"chat_template": 5}"#, None).unwrap_err().to_string().contains("tokenizer_config.json"));
    assert!(find("[", None).is_err());
    let files = ChatFiles { chat_template_json: Some(br#"{"chat_template": "P"}"#), ..ChatFiles::default() };
    assert_eq!(render(ChatSource::from_files(files).unwrap().unwrap(), &TemplateInputs::default()), "P");
    for bad in [
        "",
        "{}",
        "{{ messages }}",
        r#"{"builtin": "alpaca"}"#,
        r#"{"builtin": "chatglm2", "templates": [["a", "b"]]}"#,
    ] {
        assert!(ChatTemplate::from_section(bad.as_bytes(), &Machine).is_err(), "{bad}");
    }
}

#[test]
fn variables_that_a_template_reads() {
    let template =
        ChatTemplate::from_jinja("{% if tools %}{% endif %}{% set x = enable_thinking %}{{ x }}", &Machine)
            .unwrap();
    assert!(template.uses_variable("tools") && template.uses_variable("enable_thinking"));
    assert!(!template.uses_variable("x") && !template.uses_variable("documents"));
}

#[test]
fn built_in_formats() {
    let talk = [
        ChatMessage::new("user", "你好"),
        ChatMessage::new("assistant", "Hello!"),
        ChatMessage::new("user", "Why?\n\nTell me"),
    ];
    let render = |format: BuiltinFormat, messages: &[ChatMessage]| {
        let section = ChatSource::builtin(format).to_section();
        ChatTemplate::from_section(&section, &Machine)
            .unwrap()
            .render(messages, true, &TemplateInputs::default())
            .unwrap()
    };
    let glm6b = BuiltinFormat::ChatGlm6b;
    assert_eq!(render(glm6b, &talk[..1]), "你好");
    assert_eq!(render(glm6b, &talk), "[Round 0]\n问：你好\n答：Hello!\n[Round 1]\n问：Why?\n\nTell me\n答：");
    assert_eq!(render(BuiltinFormat::ChatGlm2, &talk[..1]), "[Round 1]\n\n问：你好\n\n答：");
    assert_eq!(
        render(BuiltinFormat::ChatGlm2, &talk),
        "[Round 1]\n\n问：你好\n\n答：Hello!\n\n[Round 2]\n\n问：Why?\n\nTell me\n\n答："
    );
    let mut with_system = vec![ChatMessage::new("system", "Be kind.")];
    with_system.extend(talk.clone());
    assert_eq!(
        render(BuiltinFormat::ChatGlm3, &with_system),
        "[gMASK]sop<|system|>\n Be kind.<|user|>\n 你好<|assistant|>\n Hello!<|user|>\n Why?\n\nTell me<|assistant|>"
    );
    assert_eq!(
        render(BuiltinFormat::RwkvWorld, &with_system),
        "System: Be kind.\n\nUser: 你好\n\nAssistant: Hello!\n\nUser: Why?\nTell me\n\nAssistant:"
    );
    let template = ChatTemplate::builtin(BuiltinFormat::ChatGlm2);
    let error = template.render(&with_system, true, &TemplateInputs::default()).unwrap_err().to_string();
    assert!(error.contains("`system`") && error.contains("chatglm2"), "{error}");
    assert!(template.wants_prompt_template() && template.stop_texts().is_empty());
    let error = BuiltinFormat::from_name("alpaca").unwrap_err().to_string();
    assert!(error.contains("rwkv-world"), "{error}");
    assert_eq!(ChatMessage { content: MessageContent::None, ..ChatMessage::new("assistant", "") }.text(), "");
}
