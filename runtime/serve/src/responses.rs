//! `/v1/responses`: requests become chats. Answers are kept in memory for a while, so that a request can go
//! on from one.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, PoisonError};

use serde_json::{Map, Value, json};

use crate::chat::{self, ChatRequest};
use crate::error::ApiError;
use crate::fields::RequestFields;
use crate::generation::ClientId;
use crate::known_fields::{RESPONSES, TEXTS};
use crate::messages::parts;
use crate::request_memory::{MemoryLease, value_bytes};
use crate::served_model::ServedModel;

/// Fields of chats that are taken as they are.
const OF_CHATS: &[&str] = &[
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "seed",
    "stop",
    "stream",
    "parallel_tool_calls",
    "chat_template_kwargs",
    "cache_prompt",
    "repeat_penalty",
    "presence_penalty",
    "frequency_penalty",
    "logit_bias",
    "ignore_eos",
    "priority",
    "repetition_penalty",
    "repeat_last_n",
    "min_tokens",
    "stop_token_ids",
    "skip_special_tokens",
    "documents",
    "enable_thinking",
    "thinking",
];
/// Answers that are kept, and the bytes that their conversations take in memory; the oldest go first.
const MOST_KEPT: usize = 1024;
pub const MOST_BYTES: usize = 64 << 20;

fn wrong(param: &str, message: impl Into<String>) -> ApiError {
    ApiError::field(param, "invalid_value", message)
}

/// A request that was read.
pub struct ResponsesRequest {
    pub prepared: ChatRequest,
    /// Messages without the instructions, which hold for one answer.
    pub messages: Vec<Value>,
    /// The fields of the request that an answer repeats.
    pub repeated: Map<String, Value>,
    /// True if a later request may go on from the answer.
    pub store: bool,
    /// Memory of the conversation while it goes on.
    pub lease: MemoryLease,
}

/// Reads a request.
pub fn prepare(
    hosted: &ServedModel,
    client: ClientId,
    mut fields: RequestFields,
) -> Result<ResponsesRequest, ApiError> {
    let (mut chat, mut repeated) = (Map::new(), Map::new());
    for &name in OF_CHATS {
        if let Some(value) = fields.take_field::<Value>(name, "a value")? {
            chat.insert(name.into(), value);
        }
    }
    for (name, usual) in
        [("parallel_tool_calls", json!(true)), ("temperature", Value::Null), ("top_p", Value::Null)]
    {
        repeated.insert(name.into(), chat.get(name).cloned().unwrap_or(usual));
    }
    let most: Option<usize> = fields.take_field("max_output_tokens", "a whole number")?;
    chat.extend(most.map(|most| ("max_tokens".to_owned(), most.into())));
    let store = fields.take_field("store", "true or false")?.unwrap_or(true);
    let metadata: Option<Map<String, Value>> = fields.take_field("metadata", "an object")?;
    let instructions: Option<String> = fields.take_field("instructions", "a string")?;
    let previous: Option<String> = fields.take_field("previous_response_id", "the id of an answer")?;
    let (memory, kept) = (&hosted.server.memory, &hosted.server.responses);
    let known = previous.as_ref().and_then(|id| kept.bytes(client, id));
    // Once for the answer, once for the chat, once while that is rendered.
    let mut lease = memory.lease_answer(known.unwrap_or(0).saturating_mul(3))?;
    let mut messages = match &previous {
        Some(id) => kept.messages(client, id).ok_or_else(|| {
            let message = format!(
                "there is no response `{id:.100}` here any more: send the whole conversation as `input`"
            );
            ApiError::field("previous_response_id", "previous_response_not_found", message)
        })?,
        None => Vec::new(),
    };
    let input: Value = fields.take_required("input", "a string or a list of items")?;
    add_input(&mut messages, &input)?;
    let system = instructions.iter().map(|text| json!({"role": "system", "content": text}));
    chat.insert("messages".into(), system.chain(messages.iter().cloned()).collect());
    tools(&mut fields, &mut chat, &mut repeated)?;
    let format = format(&mut fields, &mut chat)?;
    let reasoning: Option<Map<String, Value>> = fields.take_field("reasoning", "an object")?;
    if let Some(effort) = reasoning.as_ref().and_then(|reasoning| reasoning.get("effort")) {
        chat.insert("reasoning_effort".into(), effort.clone());
    }
    fields.finish(&[TEXTS, RESPONSES])?;
    let more = [
        ("instructions", json!(instructions)),
        ("max_output_tokens", json!(most)),
        ("metadata", json!(metadata.unwrap_or_default())),
        ("previous_response_id", json!(previous)),
        ("reasoning", json!(reasoning)),
        ("store", json!(store)),
        ("text", json!({"format": format})),
        ("truncation", json!("disabled")),
    ];
    repeated.extend(more.map(|(name, value)| (name.to_owned(), value)));
    // Events repeat the request three times.
    let own = messages.iter().map(value_bytes).sum::<usize>();
    let told = repeated.values().map(value_bytes).sum::<usize>();
    let bytes = own.saturating_mul(2).saturating_add(told.saturating_mul(4));
    memory.grow_answer(&mut lease, bytes)?;
    Ok(ResponsesRequest {
        prepared: chat::read(hosted, RequestFields::from(chat), None)?,
        messages,
        repeated,
        store,
        lease,
    })
}

/// The messages of a chat for an input, behind those that are there.
fn add_input(messages: &mut Vec<Value>, input: &Value) -> Result<(), ApiError> {
    match input {
        Value::String(text) => messages.push(json!({"role": "user", "content": text})),
        Value::Array(items) => {
            for (index, item) in items.iter().enumerate() {
                add_item(messages, item, &format!("input[{index}]"))?;
            }
        }
        _ => return Err(wrong("input", "`input` is neither a string nor a list of items")),
    }
    Ok(())
}

/// The answer that the last items belong to.
fn last_answer(messages: &mut Vec<Value>) -> Option<&mut Map<String, Value>> {
    if messages.last().is_none_or(|last| last["role"] != "assistant") {
        messages.push(json!({"role": "assistant", "content": null}));
    }
    messages.last_mut()?.as_object_mut()
}

fn add_item(messages: &mut Vec<Value>, item: &Value, param: &str) -> Result<(), ApiError> {
    let text = |name: &str| {
        let text = item[name].as_str().map(str::to_owned);
        text.ok_or_else(|| wrong(param, format!("`{param}.{name}` is missing or no string")))
    };
    match item["type"].as_str().or(item["role"].as_str().map(|_| "message")) {
        Some("message") => {
            let role = text("role")?;
            let role = match role.as_str() {
                "user" | "assistant" | "system" | "developer" => role.as_str(),
                _ => return Err(wrong(param, format!("`{param}.role` is not the role of a message"))),
            };
            let text = text_of(&item["content"], param)?;
            let content = parts(&item["content"]).unwrap_or(text.into());
            messages.push(json!({"role": role, "content": content}));
        }
        Some("function_call") => {
            let (id, name, arguments) = (text("call_id")?, text("name")?, text("arguments")?);
            let call =
                json!({"id": id, "type": "function", "function": {"name": name, "arguments": arguments}});
            let answer = last_answer(messages);
            let calls = answer.map(|answer| answer.entry("tool_calls").or_insert_with(|| json!([])));
            calls.and_then(Value::as_array_mut).into_iter().for_each(|calls| calls.push(call.clone()));
        }
        Some("function_call_output") => {
            let content = text_of(&item["output"], param)?;
            messages.push(json!({"role": "tool", "tool_call_id": text("call_id")?, "content": content}));
        }
        Some("reasoning") => {
            let content = text_of(&item["content"], param)?;
            if !content.is_empty() {
                messages.push(json!({"role": "assistant", "content": null, "reasoning_content": content}));
            }
        }
        kind => {
            let kind = kind.unwrap_or("an item without a type");
            let message = format!("`{param}` is {kind:.60}, which this server does not support");
            return Err(ApiError::field(param, "unsupported_content", message));
        }
    }
    Ok(())
}

/// A string, or parts of text.
fn text_of(content: &Value, param: &str) -> Result<String, ApiError> {
    match content {
        Value::String(text) => Ok(text.clone()),
        Value::Null => Ok(String::new()),
        Value::Array(parts) => {
            let text = |part: &Value| match (part["type"].as_str(), part["text"].as_str()) {
                (
                    Some("input_text" | "output_text" | "text" | "reasoning_text" | "summary_text"),
                    Some(text),
                ) => Ok(text.to_owned()),
                (kind, _) => {
                    let kind = kind.unwrap_or("a part without a type");
                    let message = format!("`{param}` contains {kind:.60}, but this server reads only text");
                    Err(ApiError::field(param, "unsupported_content", message))
                }
            };
            Ok(parts.iter().map(text).collect::<Result<Vec<_>, _>>()?.concat())
        }
        _ => Err(wrong(param, format!("`{param}` has a content that is neither a string nor a list"))),
    }
}

fn tools(
    fields: &mut RequestFields,
    chat: &mut Map<String, Value>,
    repeated: &mut Map<String, Value>,
) -> Result<(), ApiError> {
    let tools: Vec<Value> = fields.take_field("tools", "a list of tools")?.unwrap_or_default();
    // A tool of another type than `function` is left out.
    let tool = |tool: &Value| {
        let mut function = tool.as_object().cloned().unwrap_or_default();
        let kind = function.remove("type").unwrap_or(Value::Null);
        json!({"type": kind, "function": function})
    };
    chat.insert("tools".into(), tools.iter().map(tool).collect());
    let choice: Option<Value> =
        fields.take_field("tool_choice", "`none`, `auto`, `required` or a function")?;
    if let Some(choice) = &choice {
        let wanted = match choice["name"].as_str() {
            Some(name) => json!({"type": choice["type"], "function": {"name": name}}),
            None => choice.clone(),
        };
        chat.insert("tool_choice".into(), wanted);
    }
    repeated.insert("tools".into(), tools.into());
    repeated.insert("tool_choice".into(), choice.unwrap_or_else(|| "auto".into()));
    Ok(())
}

/// Takes `text`, and gives its format.
fn format(fields: &mut RequestFields, chat: &mut Map<String, Value>) -> Result<Value, ApiError> {
    let text: Option<Map<String, Value>> = fields.take_field("text", "an object")?;
    let format = text.and_then(|mut text| text.remove("format")).unwrap_or_else(|| json!({"type": "text"}));
    let wanted = match format["type"].as_str() {
        Some("text" | "json_object") => format.clone(),
        Some("json_schema") => {
            json!({"type": "json_schema", "json_schema": {"name": format["name"], "schema": format["schema"]}})
        }
        _ => return Err(wrong("text", "`text.format.type` is none of `text`, `json_object`, `json_schema`")),
    };
    chat.insert("response_format".into(), wanted);
    Ok(format)
}

/// Conversations up to their last answer, by the answer's id.
#[derive(Default)]
pub struct ResponseStore(Mutex<VecDeque<StoredConversation>>);

struct StoredConversation {
    client: ClientId,
    id: String,
    messages: Arc<[Value]>,
    /// The response as it was given.
    response: Value,
    bytes: usize,
}

impl ResponseStore {
    /// Finds a conversation of this client; those of other clients are not found.
    fn find_conversation<T>(
        &self,
        client: ClientId,
        id: &str,
        of: impl FnOnce(&StoredConversation) -> T,
    ) -> Option<T> {
        let kept = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        kept.iter().rev().find(|one| one.client == client && one.id == id).map(of)
    }

    /// The memory that a conversation takes.
    fn bytes(&self, client: ClientId, id: &str) -> Option<usize> {
        self.find_conversation(client, id, |one| one.bytes)
    }

    fn messages(&self, client: ClientId, id: &str) -> Option<Vec<Value>> {
        let messages = self.find_conversation(client, id, |one| Arc::clone(&one.messages))?;
        Some(messages.to_vec())
    }

    /// An answer as it was given.
    pub fn response(&self, client: ClientId, id: &str) -> Result<Value, ApiError> {
        self.find_conversation(client, id, |one| one.response.clone())
            .ok_or_else(|| ApiError::unknown_response(id))
    }

    /// Deletes a stored response; those that went on from it keep their conversation.
    pub fn delete(&self, client: ClientId, id: &str) -> Result<Value, ApiError> {
        let mut kept = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let at = kept.iter().position(|one| one.client == client && one.id == id);
        at.and_then(|at| kept.remove(at)).ok_or_else(|| ApiError::unknown_response(id))?;
        Ok(json!({"id": id, "object": "response", "deleted": true}))
    }

    /// `messages` are the conversation up to `response`.
    pub fn store(&self, client: ClientId, id: &str, messages: Vec<Value>, response: Value) {
        let bytes = messages.iter().chain([&response]).map(value_bytes).sum();
        if bytes > MOST_BYTES {
            return;
        }
        let mut kept = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let messages = messages.into();
        kept.push_back(StoredConversation { client, id: id.to_owned(), messages, response, bytes });
        let mut sum: usize = kept.iter().map(|one| one.bytes).sum();
        while kept.len() > MOST_KEPT || sum > MOST_BYTES {
            sum -= kept.pop_front().map_or(sum, |one| one.bytes);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_oldest_conversations_go_first() {
        let kept = ResponseStore::default();
        let (one, other) = (ClientId(1), ClientId(2));
        for number in 0..MOST_KEPT + 3 {
            kept.store(one, &number.to_string(), vec![json!(number)], json!({}));
        }
        assert_eq!(kept.messages(one, "2"), None);
        assert_eq!(kept.messages(one, "3"), Some(vec![json!(3)]));
        assert_eq!(kept.messages(other, "3"), None);
        let room = MOST_BYTES - value_bytes(&json!("")) - value_bytes(&json!({}));
        kept.store(other, "large", vec![json!("a".repeat(room))], json!({}));
        assert_eq!(
            (kept.messages(one, "9"), kept.messages(other, "large").map(|m| m.len())),
            (None, Some(1))
        );
        kept.store(other, "too large", vec![json!("a".repeat(room + 1))], json!({}));
        assert!(kept.messages(other, "too large").is_none());
        // Values that are short as text count as what they are.
        let lists = vec![json!([]); MOST_BYTES / value_bytes(&json!([])) + 1];
        kept.store(other, "many", vec![json!(lists)], json!({}));
        assert!(kept.messages(other, "many").is_none());
    }

    #[test]
    fn items_become_messages() {
        let mut messages = Vec::new();
        let input = json!([
            {"role": "developer", "content": "Be brief."},
            {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Hi"}]},
            {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm."}]},
            {"type": "function_call", "call_id": "a", "name": "f", "arguments": "{}"},
            {"type": "function_call", "call_id": "b", "name": "g", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "a", "output": "1"},
        ]);
        add_input(&mut messages, &input).unwrap();
        let call = |id: &str, name: &str| json!({"id": id, "type": "function", "function": {"name": name, "arguments": "{}"}});
        let wanted = [
            json!({"role": "developer", "content": "Be brief."}),
            json!({"role": "user", "content": "Hi"}),
            json!({"role": "assistant", "content": null, "reasoning_content": "Hm.", "tool_calls": [call("a", "f"), call("b", "g")]}),
            json!({"role": "tool", "tool_call_id": "a", "content": "1"}),
        ];
        assert_eq!(messages, wanted);
        for (item, code) in [
            (json!({"type": "item_reference", "id": "x"}), "unsupported_content"),
            (json!({"role": "user", "content": [{"type": "input_image"}]}), "unsupported_content"),
            (json!({"role": "king", "content": "x"}), "invalid_value"),
            (json!({"type": "function_call", "name": "f", "arguments": "{}"}), "invalid_value"),
            (json!(5), "unsupported_content"),
        ] {
            let error = add_input(&mut Vec::new(), &json!([item])).unwrap_err();
            assert_eq!((error.param.as_deref(), error.code), (Some("input[0]"), Some(code)), "{item}");
        }
    }
}
