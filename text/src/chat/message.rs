//! One message of a conversation, in the form of the chat APIs.

use super::ChatError;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// A value of any shape as templates see it; keeps the order of the keys of JSON objects. Implements serde's
/// traits.
pub type TemplateValue = minijinja::Value;

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct ChatMessage {
    /// `system`, `user`, `assistant`, `tool`; templates decide which they know.
    pub role: String,
    #[serde(default)]
    pub content: MessageContent,
    /// Other fields of the message: `tool_calls`, `name`, `reasoning_content`, ...
    #[serde(flatten)]
    pub fields: BTreeMap<String, TemplateValue>,
}

/// Text, the list of parts that newer APIs use, or nothing (a call of a tool).
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(untagged)]
pub enum MessageContent {
    #[default]
    None,
    Text(String),
    Parts(Vec<TemplateValue>),
}

impl ChatMessage {
    pub fn new(role: impl Into<String>, text: impl Into<String>) -> ChatMessage {
        ChatMessage { role: role.into(), content: MessageContent::Text(text.into()), fields: BTreeMap::new() }
    }

    /// The text of all parts joined.
    pub fn text(&self) -> String {
        match &self.content {
            MessageContent::None => String::new(),
            MessageContent::Text(text) => text.clone(),
            MessageContent::Parts(parts) => parts.iter().filter_map(part_text).collect(),
        }
    }
}

fn part_text(part: &TemplateValue) -> Option<String> {
    part.get_attr("text").ok()?.as_str().map(str::to_owned)
}

/// Images and sounds are refused: no model here reads them, and a template would drop them silently.
pub(super) fn check_text(messages: &[ChatMessage]) -> Result<(), ChatError> {
    for (index, message) in messages.iter().enumerate() {
        let MessageContent::Parts(parts) = &message.content else { continue };
        for part in parts {
            let kind = part.get_attr("type").ok();
            let kind = kind.as_ref().and_then(|kind| kind.as_str()).unwrap_or("a part without a type");
            if kind != "text" {
                return Err(ChatError::NotText { index, kind: kind.to_owned() });
            }
        }
    }
    Ok(())
}
