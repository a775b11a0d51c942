//! `/v1/messages` and `/v1/messages/count_tokens` in the form of Anthropic's API: requests become chats,
//! answers come back in blocks.

use serde_json::{Map, Value, json};

use crate::chat::{self, ChatRequest};
use crate::error::ApiError;
use crate::fields::RequestFields;
use crate::known_fields::{MESSAGES, TEXTS};
use crate::messages::parts;
use crate::reasoning::check_effort;
use crate::served_model::ServedModel;

/// Fields of chats that are taken as they are.
const OF_CHATS: &[&str] = &[
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "seed",
    "stream",
    "thinking",
    "chat_template_kwargs",
    "cache_prompt",
    "stop_token_ids",
];

fn wrong(param: &str, message: impl Into<String>) -> ApiError {
    ApiError::field(param, "invalid_value", message)
}

/// A request that was read.
pub struct MessagesRequest {
    pub prepared: ChatRequest,
    /// Texts that end the answer, as the request has them.
    pub stops: Vec<String>,
}

/// Reads a request for an answer.
pub fn prepare(hosted: &ServedModel, fields: RequestFields) -> Result<MessagesRequest, ApiError> {
    read(hosted, fields, true)
}

/// The number of tokens of a request's prompt.
pub fn count_tokens(hosted: &ServedModel, fields: RequestFields) -> Result<Value, ApiError> {
    let asked = read(hosted, fields, false)?;
    Ok(json!({"input_tokens": asked.prepared.request.prompt.len()}))
}

fn read(hosted: &ServedModel, mut fields: RequestFields, answers: bool) -> Result<MessagesRequest, ApiError> {
    let mut chat = Map::new();
    if answers {
        let most: usize = fields.take_required("max_tokens", "a whole number")?;
        chat.insert("max_tokens".into(), most.into());
    }
    for &name in OF_CHATS {
        if let Some(value) = fields.take_field::<Value>(name, "a value")? {
            chat.insert(name.into(), value);
        }
    }
    let stops: Vec<String> = fields.take_field("stop_sequences", "a list of strings")?.unwrap_or_default();
    chat.insert("stop".into(), json!(stops));
    let mut messages = Vec::new();
    if let Some(system) = fields.take_field::<Value>("system", "a string or a list of blocks")? {
        let text = text_of(&system, "system")?;
        messages.push(json!({"role": "system", "content": parts(&system).unwrap_or(text.into())}));
    }
    let asked: Vec<Value> = fields.take_required("messages", "a list of messages")?;
    for (index, message) in asked.iter().enumerate() {
        messages.extend(converted(message, &format!("messages[{index}]"))?);
    }
    // An answer whose begin is from the client.
    let begun =
        messages.last().is_some_and(|last| last["role"] == "assistant" && last["tool_calls"].is_null());
    if begun
        && messages.last().is_some_and(|last| last["content"].as_str().is_some_and(|text| !text.is_empty()))
    {
        chat.insert("continue_final_message".into(), true.into());
    }
    chat.insert("messages".into(), messages.into());
    tools(&mut fields, &mut chat)?;
    output(&mut fields, &mut chat)?;
    fields.finish(&[TEXTS, MESSAGES])?;
    Ok(MessagesRequest { prepared: chat::read(hosted, RequestFields::from(chat), None)?, stops })
}

/// Reads how much the model reasons, and the form of its answer.
fn output(fields: &mut RequestFields, chat: &mut Map<String, Value>) -> Result<(), ApiError> {
    const NAME: &str = "output_config";
    let asked: Map<String, Value> = fields.take_field(NAME, "an object")?.unwrap_or_default();
    // Its first name.
    let mut format: Option<Value> = fields.take_field("output_format", "an object")?;
    for (name, value) in asked {
        match name.as_str() {
            _ if value.is_null() => {}
            "effort" => {
                let text = value.as_str().unwrap_or_default().to_owned();
                chat.insert("reasoning_effort".into(), check_effort("output_config.effort", text)?.into());
            }
            "format" => format = Some(value),
            // A hint of how much the whole task may cost.
            "task_budget" => {}
            other => return Err(wrong(NAME, format!("`{NAME}` has no field `{other:.60}`"))),
        }
    }
    let Some(format) = format else { return Ok(()) };
    let (true, Some(schema)) = (format["type"] == "json_schema", format["schema"].as_object()) else {
        let message = format!("`{NAME}.format` is not an object with `type` of `json_schema` and a `schema`");
        return Err(wrong(NAME, message));
    };
    let held = json!({"type": "json_schema", "json_schema": {"name": "output", "schema": schema}});
    chat.insert("response_format".into(), held);
    Ok(())
}

/// A string, or blocks of text.
fn text_of(content: &Value, param: &str) -> Result<String, ApiError> {
    match content {
        Value::String(text) => Ok(text.clone()),
        Value::Null => Ok(String::new()),
        Value::Array(blocks) => {
            let text = |block: &Value| match (block["type"].as_str(), block["text"].as_str()) {
                (Some("text"), Some(text)) => Ok(text.to_owned()),
                (kind, _) => {
                    let kind = kind.unwrap_or("a block without a type");
                    let message =
                        format!("`{param}` contains {kind:.60}, but this server reads only text there");
                    Err(ApiError::field(param, "unsupported_content", message))
                }
            };
            Ok(blocks.iter().map(text).collect::<Result<Vec<_>, _>>()?.concat())
        }
        _ => Err(wrong(param, format!("`{param}` is neither a string nor a list of blocks"))),
    }
}

/// The messages of a chat for one message: results of tools are messages of their own.
fn converted(message: &Value, param: &str) -> Result<Vec<Value>, ApiError> {
    let role = message["role"].as_str().filter(|role| ["user", "assistant", "system"].contains(role));
    let role = role.ok_or_else(|| wrong(param, format!("`{param}.role` is none of `user`, `assistant`")))?;
    let Value::Array(blocks) = &message["content"] else {
        return Ok(vec![json!({"role": role, "content": text_of(&message["content"], param)?})]);
    };
    let (mut results, mut rest, mut calls) = (Vec::new(), Vec::new(), Vec::new());
    let mut reasoning = String::new();
    for block in blocks {
        match (block["type"].as_str(), role) {
            (Some("tool_result"), "user") => results.push(json!({
                "role": "tool",
                "tool_call_id": block["tool_use_id"],
                "content": text_of(&block["content"], param)?,
            })),
            (Some("tool_use"), "assistant") => calls.push(json!({
                "id": block["id"],
                "type": "function",
                "function": {"name": block["name"], "arguments": block["input"]},
            })),
            (Some("thinking"), "assistant") => reasoning += block["thinking"].as_str().unwrap_or_default(),
            (Some("redacted_thinking"), "assistant") => {}
            _ => rest.push(block.clone()),
        }
    }
    let rest = Value::Array(rest);
    let text = text_of(&rest, param)?;
    if !text.is_empty() || !calls.is_empty() || results.is_empty() {
        let content = match text.is_empty() && !calls.is_empty() {
            true => Value::Null,
            false => parts(&rest).unwrap_or(text.into()),
        };
        let mut own = json!({"role": role, "content": content});
        if !calls.is_empty() {
            own["tool_calls"] = calls.into();
        }
        if !reasoning.is_empty() {
            own["reasoning_content"] = reasoning.into();
        }
        results.push(own);
    }
    Ok(results)
}

fn tools(fields: &mut RequestFields, chat: &mut Map<String, Value>) -> Result<(), ApiError> {
    if let Some(tools) = fields.take_field::<Vec<Value>>("tools", "a list of tools")? {
        let tool = |tool: &Value| {
            let mut function = json!({"name": tool["name"], "parameters": tool["input_schema"]});
            if tool["description"].is_string() {
                function["description"] = tool["description"].clone();
            }
            // Tools that the provider runs have other types.
            let kind = tool["type"].as_str().filter(|kind| *kind != "custom").unwrap_or("function");
            json!({"type": kind, "function": function})
        };
        chat.insert("tools".into(), tools.iter().map(tool).collect());
    }
    let Some(choice) = fields.take_field::<Value>("tool_choice", "an object")? else { return Ok(()) };
    let wanted = match choice["type"].as_str() {
        Some("auto") => json!("auto"),
        Some("any") => json!("required"),
        Some("none") => json!("none"),
        Some("tool") => json!({"type": "function", "function": {"name": choice["name"]}}),
        _ => return Err(wrong("tool_choice", "`tool_choice.type` is none of `auto`, `any`, `tool`, `none`")),
    };
    chat.insert("tool_choice".into(), wanted);
    if choice["disable_parallel_tool_use"] == true {
        chat.insert("parallel_tool_calls".into(), false.into());
    }
    Ok(())
}

/// An error in the form of that API.
pub fn error_body(error: &ApiError) -> Value {
    let kind = match error.status.as_u16() {
        401 => "authentication_error",
        404 => "not_found_error",
        413 => "request_too_large",
        429 => "rate_limit_error",
        503 | 529 => "overloaded_error",
        500.. => "api_error",
        _ => "invalid_request_error",
    };
    json!({"type": "error", "error": {"type": kind, "message": error.message}})
}
