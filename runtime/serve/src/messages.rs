//! The messages of a chat, from a request to what templates take.

use mlcc_text::ChatMessage;
use mlcc_text::chat::{MessageContent, TemplateValue};
use serde_json::Value;

use crate::error::ApiError;

/// Message `index`. Templates take the arguments of calls as an object, or `as_text`.
pub fn message((index, mut value): (usize, Value), as_text: bool) -> Result<ChatMessage, ApiError> {
    let param = format!("messages[{index}]");
    let wrong = |what: &str| ApiError::field(&param, "invalid_type", format!("`{param}` is wrong: {what}"));
    if !value.is_object() {
        return Err(wrong("it is no object"));
    }
    if !value["role"].is_string() {
        return Err(wrong("`role` is missing or no string"));
    }
    let plain = matches!(value["content"], Value::Null | Value::String(_) | Value::Array(_));
    if !plain {
        return Err(wrong("`content` is neither a string nor a list of parts"));
    }
    match value.get_mut("tool_calls") {
        None => {}
        Some(Value::Null) => {
            value.as_object_mut().and_then(|fields| fields.remove("tool_calls"));
        }
        Some(Value::Array(calls)) => {
            calls.iter_mut().try_for_each(|call| arguments(call, as_text)).map_err(|what| wrong(&what))?;
        }
        Some(_) => return Err(wrong("`tool_calls` is not a list")),
    }
    let message: ChatMessage = serde_json::from_value(value).map_err(|e| wrong(&e.to_string()))?;
    let MessageContent::Parts(parts) = &message.content else { return Ok(message) };
    let kind = |part: &TemplateValue| part.get_attr("type").ok()?.as_str().map(str::to_owned);
    if let Some(part) = parts.iter().find(|part| kind(part).as_deref() != Some("text")) {
        let kind = kind(part).unwrap_or_else(|| "a part without a type".into());
        let what = format!("`{param}.content` contains {kind}, but this server reads only text");
        return Err(ApiError::field("messages", "unsupported_content", what));
    }
    Ok(message)
}

/// Fields of a part of text that say nothing to a template.
const USUAL: [&str; 6] = ["type", "text", "annotations", "logprobs", "cache_control", "citations"];

/// The parts of a content of texts, as the chat API has them, where one has a field of its own: a template
/// may read it.
pub fn parts(content: &Value) -> Option<Value> {
    let mut parts = content.as_array()?.clone();
    let fields = |part: &Value| part.as_object().map(|fields| fields.keys().cloned().collect::<Vec<_>>());
    let own =
        |part: &Value| fields(part).is_some_and(|names| names.iter().any(|n| !USUAL.contains(&n.as_str())));
    if !parts.iter().any(own) {
        return None;
    }
    parts.iter_mut().for_each(|part| part["type"] = "text".into());
    Some(parts.into())
}

/// Brings the arguments of a call into the form that the template takes.
fn arguments(call: &mut Value, as_text: bool) -> Result<(), String> {
    if !call["function"]["name"].is_string() {
        return Err("a call in `tool_calls` has no `function.name`".into());
    }
    let arguments = &mut call["function"]["arguments"];
    let changed = match &*arguments {
        Value::Null => Value::Object(serde_json::Map::new()),
        // The model's own text may be cut.
        Value::String(text) if !as_text => {
            serde_json::from_str(text).unwrap_or_else(|_| Value::String(text.clone()))
        }
        Value::Object(_) if as_text => Value::String(arguments.to_string()),
        Value::String(_) | Value::Object(_) => return Ok(()),
        _ => return Err("the `function.arguments` of a call are not JSON".into()),
    };
    *arguments = changed;
    Ok(())
}
