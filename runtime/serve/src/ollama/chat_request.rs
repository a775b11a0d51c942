//! `/api/chat`: messages of Ollama's API become those of the other routes.

use std::collections::VecDeque;

use serde_json::{Map, Value, json};

use crate::chat::{self, ChatRequest};
use crate::error::ApiError;
use crate::fields::RequestFields;
use crate::known_fields::TEXTS;
use crate::ollama::answer::{AnswerRequest, TextRequest};
use crate::ollama::answer_line::AnswerField;
use crate::ollama::options::{FIELDS, TextOptions};
use crate::served_model::ServedModel;

/// Reads a request.
pub fn prepare(hosted: &ServedModel, mut fields: RequestFields) -> Result<AnswerRequest, ApiError> {
    let mut options = TextOptions::take(&mut fields, hosted)?;
    let messages: Vec<Value> = fields.take_field("messages", "a list of messages")?.unwrap_or_default();
    let tools: Vec<Value> = fields.take_field("tools", "a list of tools")?.unwrap_or_default();
    fields.finish(&[TEXTS, FIELDS])?;
    if messages.is_empty() {
        return AnswerRequest::without_text(AnswerField::Message, &options);
    }
    options.fields.insert("messages".into(), converted(messages)?);
    if !tools.is_empty() {
        options.fields.insert("tools".into(), tools.into_iter().map(with_type).collect());
    }
    read(hosted, options, AnswerField::Message)
}

/// Reads a chat whose fields are those of the other routes.
pub fn read(
    hosted: &ServedModel,
    options: TextOptions,
    form: AnswerField,
) -> Result<AnswerRequest, ApiError> {
    let TextOptions { fields, stream, logprobs, warnings, .. } = options;
    let ChatRequest { request, parser, ids, warnings: more, .. } =
        chat::read(hosted, RequestFields::from(fields), logprobs)?;
    Ok(AnswerRequest::Text(Box::new(TextRequest {
        request,
        parser: Some(parser),
        ids,
        form,
        stream,
        warnings: [warnings, more].concat(),
    })))
}

/// Clients may leave out that a tool is a function.
fn with_type(mut tool: Value) -> Value {
    if tool["function"].is_object() && tool["type"].is_null() {
        tool["type"] = "function".into();
    }
    tool
}

/// Messages with the names of the other routes. Calls have no ids here, and results follow in their order.
fn converted(messages: Vec<Value>) -> Result<Value, ApiError> {
    let (mut calls, mut count) = (VecDeque::new(), 0);
    let mut converted = Vec::with_capacity(messages.len());
    for (index, message) in messages.into_iter().enumerate() {
        let Value::Object(mut message) = message else {
            // The reader of chats says what is wrong.
            converted.push(message);
            continue;
        };
        refuse_images(index, &message)?;
        message.remove("images");
        if let Some(reasoning) = message.remove("thinking").filter(|text| !text.is_null()) {
            message.insert("reasoning_content".into(), reasoning);
        }
        if let Some(name) = message.remove("tool_name").filter(|name| !name.is_null()) {
            message.insert("name".into(), name);
        }
        if message.get("content").is_none() {
            message.insert("content".into(), Value::Null);
        }
        if let Some(Value::Array(list)) = message.get_mut("tool_calls") {
            for call in list {
                add_id(call, &mut count);
                calls.push_back(call["id"].clone());
            }
        }
        if message.get("role").is_some_and(|role| role == "tool") {
            let id = calls.pop_front();
            if message.get("tool_call_id").is_none_or(Value::is_null) {
                message.extend(id.map(|id| ("tool_call_id".to_owned(), id)));
            }
        }
        converted.push(Value::Object(message));
    }
    Ok(converted.into())
}

fn refuse_images(index: usize, message: &Map<String, Value>) -> Result<(), ApiError> {
    match message.get("images") {
        None | Some(Value::Null) => Ok(()),
        Some(Value::Array(images)) if images.is_empty() => Ok(()),
        Some(_) => {
            let param = format!("messages[{index}].images");
            let message = format!("`{param}`: this server reads only text: leave out the images");
            Err(ApiError::field(param, "unsupported_content", message))
        }
    }
}

/// Some templates demand an id of nine letters and digits.
fn add_id(call: &mut Value, count: &mut usize) {
    if !call["function"].is_object() {
        return;
    }
    *count += 1;
    if !call["id"].is_string() {
        call["id"] = json!(format!("call{count:05}"));
    }
    call["type"] = "function".into();
}
