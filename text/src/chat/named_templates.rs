//! Templates of well-known chat models by name, for checkpoints that lost theirs.
//!
//! Written after the model cards of the families; the control tokens are those of their tokenizers.

use super::{BuiltinFormat, ChatError, ChatSource, ChatTemplate, TemplateHost};

/// Name and Jinja text.
const NAMED: [(&str, &str); 8] = [
    (
        "chatml",
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}\
         {% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}",
    ),
    (
        "gemma",
        "<bos>{% for m in messages %}<start_of_turn>{{ 'model' if m.role == 'assistant' else 'user' }}\n\
         {{ m.content | trim }}<end_of_turn>\n{% endfor %}\
         {% if add_generation_prompt %}<start_of_turn>model\n{% endif %}",
    ),
    (
        "llama-2",
        "{% set ns = namespace(system='') %}{% for m in messages %}\
         {% if m.role == 'system' %}{% set ns.system = '<<SYS>>\n' + m.content + '\n<</SYS>>\n\n' %}\
         {% elif m.role == 'user' %}<s>[INST] {{ ns.system }}{{ m.content | trim }} [/INST]\
         {% set ns.system = '' %}\
         {% else %} {{ m.content | trim }} </s>{% endif %}{% endfor %}",
    ),
    (
        "llama-3",
        "<|begin_of_text|>{% for m in messages %}<|start_header_id|>{{ m.role }}<|end_header_id|>\n\n\
         {{ m.content | trim }}<|eot_id|>{% endfor %}\
         {% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}",
    ),
    (
        "mistral",
        "<s>{% set ns = namespace(system='') %}{% for m in messages %}\
         {% if m.role == 'system' %}{% set ns.system = m.content + '\n\n' %}\
         {% elif m.role == 'user' %}[INST] {{ ns.system }}{{ m.content }} [/INST]{% set ns.system = '' %}\
         {% else %}{{ m.content }}</s>{% endif %}{% endfor %}",
    ),
    (
        "phi-3",
        "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}<|end|>\n{% endfor %}\
         {% if add_generation_prompt %}<|assistant|>\n{% endif %}",
    ),
    (
        "vicuna",
        "<s>{% for m in messages %}{% if m.role == 'system' %}{{ m.content }} \
         {% elif m.role == 'user' %}USER: {{ m.content }} {% else %}ASSISTANT: {{ m.content }}</s>{% endif %}\
         {% endfor %}{% if add_generation_prompt %}ASSISTANT:{% endif %}",
    ),
    (
        "zephyr",
        "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}</s>\n{% endfor %}\
         {% if add_generation_prompt %}<|assistant|>\n{% endif %}",
    ),
];

impl ChatSource {
    /// The template of this name.
    pub fn named(name: &str) -> Result<ChatSource, ChatError> {
        if let Some((_, text)) = NAMED.iter().find(|(known, _)| *known == name) {
            return Ok(ChatSource::jinja(text));
        }
        let builtin = BuiltinFormat::ALL.into_iter().find(|format| format.name() == name);
        let known = || ChatTemplate::names().join(", ");
        let unknown = || ChatError::UnknownFormat { found: name.to_owned(), known: known() };
        builtin.map(ChatSource::builtin).ok_or_else(unknown)
    }
}

impl ChatTemplate {
    /// The template of this name.
    pub fn named(name: &str, host: &'static dyn TemplateHost) -> Result<ChatTemplate, ChatError> {
        ChatSource::named(name)?.compile(host)
    }

    /// The names that [`ChatTemplate::named`] knows.
    pub fn names() -> Vec<&'static str> {
        let builtin = BuiltinFormat::ALL.into_iter().map(BuiltinFormat::name);
        NAMED.iter().map(|(name, _)| *name).chain(builtin).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::chat::{CallerHost, ChatMessage, TemplateInputs};

    fn rendered(name: &str) -> String {
        let talk = [
            ChatMessage::new("system", "Be brief."),
            ChatMessage::new("user", "Hi"),
            ChatMessage::new("assistant", "Hello"),
            ChatMessage::new("user", "Bye"),
        ];
        let template = ChatTemplate::named(name, &CallerHost).unwrap();
        template.render(&talk, true, &TemplateInputs::default()).unwrap()
    }

    #[test]
    fn texts_are_those_of_the_families() {
        assert_eq!(
            rendered("chatml"),
            "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nHello\
             <|im_end|>\n<|im_start|>user\nBye<|im_end|>\n<|im_start|>assistant\n"
        );
        assert_eq!(
            rendered("llama-2"),
            "<s>[INST] <<SYS>>\nBe brief.\n<</SYS>>\n\nHi [/INST] Hello </s><s>[INST] Bye [/INST]"
        );
        assert_eq!(
            rendered("llama-3"),
            "<|begin_of_text|><|start_header_id|>system<|end_header_id|>\n\nBe brief.<|eot_id|>\
             <|start_header_id|>user<|end_header_id|>\n\nHi<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n\
             Hello<|eot_id|><|start_header_id|>user<|end_header_id|>\n\nBye<|eot_id|>\
             <|start_header_id|>assistant<|end_header_id|>\n\n"
        );
        assert_eq!(rendered("mistral"), "<s>[INST] Be brief.\n\nHi [/INST]Hello</s>[INST] Bye [/INST]");
        assert_eq!(rendered("vicuna"), "<s>Be brief. USER: Hi ASSISTANT: Hello</s>USER: Bye ASSISTANT:");
        assert!(rendered("gemma").ends_with("<start_of_turn>user\nBye<end_of_turn>\n<start_of_turn>model\n"));
        assert!(rendered("phi-3").ends_with("Hello<|end|>\n<|user|>\nBye<|end|>\n<|assistant|>\n"));
        assert!(rendered("zephyr").ends_with("Hello</s>\n<|user|>\nBye</s>\n<|assistant|>\n"));
    }

    #[test]
    fn unknown_names_get_the_list() {
        let error = ChatTemplate::named("none", &CallerHost).unwrap_err().to_string();
        assert!(error.contains("chatml, gemma, llama-2") && error.contains("rwkv-world"), "{error}");
    }
}
