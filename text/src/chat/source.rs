//! Sources of a chat template, and its form in the artifact.
//!
//! Section format: JSON, `{"templates": [[name, text], ...], "tokens": {"bos_token": "<s>",
//! ...}}` or `{"builtin": name}`.

use super::jinja::JinjaTemplates;
use super::{BuiltinFormat, ChatError, ChatTemplate, TemplateHost, TemplateKind};
use serde::{Deserialize, Serialize};
use serde_json::Value;
use std::collections::BTreeMap;

/// The contents of a checkpoint's files, where they exist.
#[derive(Debug, Clone, Copy, Default)]
pub struct ChatFiles<'a> {
    /// `chat_template.jinja`; wins over the others.
    pub chat_template_jinja: Option<&'a [u8]>,
    pub tokenizer_config: Option<&'a [u8]>,
    /// `chat_template.json`, as processors of multimodal models have it.
    pub chat_template_json: Option<&'a [u8]>,
    pub special_tokens_map: Option<&'a [u8]>,
}

/// Templates and the names of special tokens, not compiled.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ChatSource {
    /// Name and text.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    templates: Vec<(String, String)>,
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    tokens: BTreeMap<String, String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    builtin: Option<String>,
}

/// The names under which templates find special tokens.
const TOKENS: [&str; 7] =
    ["bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token"];

impl ChatSource {
    /// One template.
    pub fn jinja(text: &str) -> ChatSource {
        ChatSource { templates: vec![("default".to_owned(), text.to_owned())], ..ChatSource::default() }
    }

    pub fn builtin(format: BuiltinFormat) -> ChatSource {
        ChatSource { builtin: Some(format.name().to_owned()), ..ChatSource::default() }
    }

    /// The template with the special tokens of a model, by the names under which templates find them.
    #[must_use]
    pub fn with_tokens(self, tokens: BTreeMap<String, String>) -> ChatSource {
        ChatSource { tokens, ..self }
    }

    /// Special tokens by the names under which templates find them.
    pub fn tokens(&self) -> &BTreeMap<String, String> {
        &self.tokens
    }

    /// Adds a template under a name (`tool_use`).
    #[must_use]
    pub fn with_template(mut self, name: &str, text: &str) -> ChatSource {
        self.templates.push((name.to_owned(), text.to_owned()));
        self
    }

    /// Sets a special token by its name for templates (`bos_token`).
    #[must_use]
    pub fn with_token(mut self, name: &str, text: &str) -> ChatSource {
        self.tokens.insert(name.to_owned(), text.to_owned());
        self
    }

    /// The template of the files; `None` if none of them has one.
    pub fn from_files(files: ChatFiles<'_>) -> Result<Option<ChatSource>, ChatError> {
        let config = parse("tokenizer_config.json", files.tokenizer_config)?;
        let processor = parse("chat_template.json", files.chat_template_json)?;
        let map = parse("special_tokens_map.json", files.special_tokens_map)?;
        let templates = match files.chat_template_jinja {
            Some(bytes) => match std::str::from_utf8(bytes) {
                Ok(text) => vec![("default".to_owned(), text.to_owned())],
                Err(_) => return Err(wrong("chat_template.jinja", "it is not UTF-8 text")),
            },
            None => match templates_of("tokenizer_config.json", config.get("chat_template"))? {
                templates if templates.is_empty() => {
                    templates_of("chat_template.json", processor.get("chat_template"))?
                }
                templates => templates,
            },
        };
        if templates.is_empty() {
            return Ok(None);
        }
        Ok(Some(ChatSource { templates, tokens: special_tokens(&config, &map), builtin: None }))
    }

    /// The special tokens that the files name, whether they have a template or not.
    pub fn tokens_from_files(files: ChatFiles<'_>) -> Result<BTreeMap<String, String>, ChatError> {
        let config = parse("tokenizer_config.json", files.tokenizer_config)?;
        let map = parse("special_tokens_map.json", files.special_tokens_map)?;
        Ok(special_tokens(&config, &map))
    }

    pub fn to_section(&self) -> Vec<u8> {
        // A struct of strings cannot fail to print.
        serde_json::to_vec(self).unwrap_or_default()
    }

    pub fn from_section(section: &[u8]) -> Result<ChatSource, ChatError> {
        serde_json::from_slice(section).map_err(|e| ChatError::Section { reason: e.to_string() })
    }

    /// Parses the templates, which then run on `host`.
    pub fn compile(&self, host: &'static dyn TemplateHost) -> Result<ChatTemplate, ChatError> {
        let format = match (&self.builtin, self.templates.is_empty()) {
            (Some(name), true) => TemplateKind::Builtin(BuiltinFormat::from_name(name)?),
            (None, false) => {
                let compiled = JinjaTemplates::compile(&self.templates, self.tokens.clone(), host)?;
                TemplateKind::Jinja(Box::new(compiled))
            }
            _ => {
                let reason = "it needs either templates or a built-in format".to_owned();
                return Err(ChatError::Section { reason });
            }
        };
        Ok(ChatTemplate::new(format))
    }
}

/// A string, or a list of `{"name": ..., "template": ...}`.
fn templates_of(file: &str, field: Option<&Value>) -> Result<Vec<(String, String)>, ChatError> {
    match field {
        None | Some(Value::Null) => Ok(Vec::new()),
        Some(Value::String(text)) => Ok(vec![("default".to_owned(), text.clone())]),
        Some(Value::Array(list)) => {
            let text = |entry: &Value, key: &str| entry.get(key).and_then(Value::as_str).map(str::to_owned);
            let entry = |entry: &Value| text(entry, "name").zip(text(entry, "template"));
            list.iter().map(entry).collect::<Option<_>>().ok_or_else(|| {
                wrong(file, "an entry of the list `chat_template` has no `name` and `template`")
            })
        }
        Some(_) => Err(wrong(file, "`chat_template` should be a text or a list of named templates")),
    }
}

fn special_tokens(config: &Value, map: &Value) -> BTreeMap<String, String> {
    let text =
        |name: &str| config.get(name).and_then(token_text).or_else(|| map.get(name).and_then(token_text));
    TOKENS.iter().filter_map(|&name| Some((name.to_owned(), text(name)?.to_owned()))).collect()
}

/// Older files give the whole token, newer ones its text.
fn token_text(token: &Value) -> Option<&str> {
    token.as_str().or_else(|| token.get("content")?.as_str())
}

fn parse(file: &str, bytes: Option<&[u8]>) -> Result<Value, ChatError> {
    match bytes {
        None => Ok(Value::Null),
        Some(bytes) => serde_json::from_slice(bytes).map_err(|e| wrong(file, &e.to_string())),
    }
}

fn wrong(file: &str, reason: &str) -> ChatError {
    ChatError::File { file: file.to_owned(), reason: reason.to_owned() }
}
