//! Answers of `/v1/responses`: whole, or as events of items.

use std::collections::VecDeque;
use std::convert::Infallible;
use std::sync::Arc;

use axum::response::sse::{Event as Sent, KeepAlive, Sse};
use axum::response::{IntoResponse, Response};
use mlcc_engine::FinishReason;
use mlcc_engine::serving::{RequestSummary, SequenceEvent};
use mlcc_text::chat::{AnswerParser, AnswerPart};
use serde_json::{Value, json};

use crate::app_state::unix_seconds;
use crate::chat_answer::{CallIds, is_cut};
use crate::error::{ApiError, json_type};
use crate::generation::{ClientId, KEEP_ALIVE, RunningTexts, with_warning_headers};
use crate::request_memory::MemoryLease;
use crate::responses::ResponsesRequest;
use crate::served_model::ServedModel;
use crate::traces::RequestSpan;

/// Answers a request.
pub async fn answer(
    hosted: Arc<ServedModel>,
    client: ClientId,
    span: RequestSpan,
    asked: ResponsesRequest,
) -> Response {
    let ResponsesRequest { prepared, messages, repeated, store, lease } = asked;
    let (warnings, server) = (prepared.warnings, Arc::clone(&hosted.server));
    let mut text = prepared.request;
    text.client = client.0;
    let running = match RunningTexts::launch(&hosted, vec![text], 1, span) {
        Ok(running) => running,
        Err(error) => return error.into_response(),
    };
    let mut head = json!({
        "id": hosted.server.next_id("resp"),
        "object": "response",
        "created_at": unix_seconds(),
        "status": "in_progress",
        "model": hosted.name,
        "output": [],
        "error": null,
        "incomplete_details": null,
        "usage": null,
    });
    head.as_object_mut().into_iter().for_each(|head| head.extend(repeated.clone()));
    let keep = store.then_some(messages);
    let mut writer = ItemWriter {
        hosted,
        client,
        keep,
        head,
        parser: prepared.parser,
        ids: prepared.ids,
        items: Vec::new(),
        open: None,
        events: VecDeque::new(),
        sent: 0,
        _lease: lease,
    };
    if prepared.stream {
        return with_warning_headers(stream(writer, running), &warnings, &server);
    }
    let answer = match collect(&mut writer, running).await {
        Ok(()) => (json_type(), writer.head.to_string()).into_response(),
        Err(error) => error.into_response(),
    };
    with_warning_headers(answer, &warnings, &server)
}

async fn collect(writer: &mut ItemWriter, mut running: RunningTexts) -> Result<(), ApiError> {
    while let Some((_, event)) = running.next_event().await? {
        writer.handle_event(event);
        writer.events.clear();
    }
    Ok(())
}

fn stream(mut writer: ItemWriter, running: RunningTexts) -> Response {
    writer.push_event(json!({"type": "response.created", "response": writer.head}));
    writer.push_event(json!({"type": "response.in_progress", "response": writer.head}));
    let events =
        futures_util::stream::unfold((writer, Some(running)), |(mut writer, mut running)| async move {
            let event = next(&mut writer, &mut running).await?;
            let name = event["type"].as_str().unwrap_or("error").to_owned();
            Some((
                Ok::<_, Infallible>(Sent::default().event(name).data(event.to_string())),
                (writer, running),
            ))
        });
    Sse::new(events).keep_alive(KeepAlive::new().interval(KEEP_ALIVE)).into_response()
}

/// The next event; without `running` there are no more texts.
async fn next(writer: &mut ItemWriter, running: &mut Option<RunningTexts>) -> Option<Value> {
    loop {
        if let Some(event) = writer.events.pop_front() {
            return Some(event);
        }
        match running.as_mut()?.next_event().await {
            Ok(Some((_, event))) => writer.handle_event(event),
            Ok(None) => *running = None,
            Err(error) => {
                *running = None;
                writer.fail(&error);
            }
        }
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum ItemKind {
    Reasoning,
    Text,
    Call(usize),
}

/// Writes the items of an answer, and reports it as events.
struct ItemWriter {
    hosted: Arc<ServedModel>,
    client: ClientId,
    /// The conversation up to the question, if a later request may go on from here.
    keep: Option<Vec<Value>>,
    /// The answer without its items.
    head: Value,
    parser: AnswerParser,
    ids: CallIds,
    items: Vec<Value>,
    /// The kind of the last item, if it may become longer.
    open: Option<ItemKind>,
    events: VecDeque<Value>,
    sent: u64,
    /// The memory of the request and its answer.
    _lease: MemoryLease,
}

impl ItemWriter {
    fn push_event(&mut self, mut event: Value) {
        event["sequence_number"] = self.sent.into();
        self.sent += 1;
        self.events.push_back(event);
    }

    /// An event of the last item.
    fn item_event(&mut self, kind: &str, more: Value) {
        let index = self.items.len().saturating_sub(1);
        let id = self.items.last().map_or(Value::Null, |item| item["id"].clone());
        let mut event = json!({"type": kind, "item_id": id, "output_index": index});
        if let (Some(event), Value::Object(more)) = (event.as_object_mut(), more) {
            event.extend(more);
        }
        self.push_event(event);
    }

    fn handle_event(&mut self, event: SequenceEvent) {
        match event {
            SequenceEvent::Delta(piece) => {
                let parts = self.parser.push(&piece.text);
                self.write_parts(parts);
            }
            SequenceEvent::Finished(finished) => self.end(&finished),
            SequenceEvent::PromptLogprobs(_) | SequenceEvent::Failed(_) => {}
        }
    }

    fn write_parts(&mut self, parts: Vec<AnswerPart>) {
        for part in parts {
            match part {
                AnswerPart::Reasoning(text) => {
                    self.begin(ItemKind::Reasoning, "");
                    self.append("/content/0/text", &text);
                    self.item_event(
                        "response.reasoning_text.delta",
                        json!({"content_index": 0, "delta": text}),
                    );
                }
                AnswerPart::Text(text) => {
                    self.begin(ItemKind::Text, "");
                    self.append("/content/0/text", &text);
                    let more = json!({"content_index": 0, "delta": text, "logprobs": []});
                    self.item_event("response.output_text.delta", more);
                }
                AnswerPart::Call { index, name } => self.begin(ItemKind::Call(index), &name),
                AnswerPart::Arguments { text, .. } => {
                    self.append("/arguments", &text);
                    self.item_event("response.function_call_arguments.delta", json!({"delta": text}));
                }
            }
        }
    }

    fn append(&mut self, at: &str, more: &str) {
        if let Some(Value::String(text)) = self.items.last_mut().and_then(|item| item.pointer_mut(at)) {
            text.push_str(more);
        }
    }

    /// Begins an item, if it is not the open one.
    fn begin(&mut self, kind: ItemKind, name: &str) {
        if self.open == Some(kind) {
            return;
        }
        self.close("completed");
        self.open = Some(kind);
        let number = self.ids.id(1, self.items.len());
        let mut item = match kind {
            ItemKind::Reasoning => {
                json!({"type": "reasoning", "id": format!("rs_{number}"), "summary": [], "content": []})
            }
            ItemKind::Text => {
                json!({"type": "message", "id": format!("msg_{number}"), "role": "assistant", "content": []})
            }
            ItemKind::Call(index) => json!({
                "type": "function_call", "id": format!("fc_{number}"), "call_id": self.ids.id(0, index), "name": name, "arguments": "",
            }),
        };
        item["status"] = "in_progress".into();
        let index = self.items.len();
        self.items.push(item.clone());
        self.push_event(json!({"type": "response.output_item.added", "output_index": index, "item": item}));
        let Some(part) = part(kind) else { return };
        if let Some(item) = self.items.last_mut() {
            item["content"] = json!([part]);
        }
        self.item_event("response.content_part.added", json!({"content_index": 0, "part": part}));
    }

    /// Ends the open item.
    fn close(&mut self, status: &str) {
        let Some(kind) = self.open.take() else { return };
        let Some(item) = self.items.last_mut() else { return };
        item["status"] = status.into();
        let item = item.clone();
        let text = item["content"][0]["text"].clone();
        match kind {
            ItemKind::Reasoning => {
                self.item_event("response.reasoning_text.done", json!({"content_index": 0, "text": text}))
            }
            ItemKind::Text => {
                let more = json!({"content_index": 0, "text": text, "logprobs": []});
                self.item_event("response.output_text.done", more);
            }
            ItemKind::Call(_) => {
                let more = json!({"name": item["name"], "arguments": item["arguments"]});
                self.item_event("response.function_call_arguments.done", more);
            }
        }
        if part(kind).is_some() {
            let part = item["content"][0].clone();
            self.item_event("response.content_part.done", json!({"content_index": 0, "part": part}));
        }
        let index = self.items.len() - 1;
        self.push_event(json!({"type": "response.output_item.done", "output_index": index, "item": item}));
    }

    fn end(&mut self, finished: &RequestSummary) {
        let rest = self.parser.finish(is_cut(finished));
        self.write_parts(rest);
        let cut = matches!(
            finished.reason,
            FinishReason::Length | FinishReason::Context | FinishReason::Deadline | FinishReason::Cancelled
        );
        let status = if cut { "incomplete" } else { "completed" };
        self.close(status);
        self.head["status"] = status.into();
        if cut {
            self.head["incomplete_details"] = json!({"reason": "max_output_tokens"});
        }
        self.head["output"] = self.items.clone().into();
        self.head["usage"] = json!({
            "input_tokens": finished.prompt_tokens,
            "input_tokens_details": {"cached_tokens": finished.cached_tokens},
            "output_tokens": finished.completion_tokens,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": finished.prompt_tokens + finished.completion_tokens,
        });
        if let Some(mut messages) = self.keep.take() {
            messages.push(self.message());
            let id = self.head["id"].as_str().unwrap_or_default();
            self.hosted.server.responses.store(self.client, id, messages, self.head.clone());
        }
        self.push_event(json!({"type": format!("response.{status}"), "response": self.head}));
    }

    /// The answer as a message of a chat.
    fn message(&self) -> Value {
        let texts = |kind: &str| -> String {
            let of_kind = self.items.iter().filter(|item| item["type"] == kind);
            of_kind.filter_map(|item| item["content"][0]["text"].as_str()).collect()
        };
        let mut message = json!({"role": "assistant", "content": texts("message")});
        let reasoning = texts("reasoning");
        if !reasoning.is_empty() {
            message["reasoning_content"] = reasoning.into();
        }
        let calls = self.items.iter().filter(|item| item["type"] == "function_call");
        let call = |item: &Value| json!({"id": item["call_id"], "type": "function", "function": {"name": item["name"], "arguments": item["arguments"]}});
        let calls: Vec<Value> = calls.map(call).collect();
        if !calls.is_empty() {
            message["tool_calls"] = calls.into();
        }
        message
    }

    fn fail(&mut self, error: &ApiError) {
        self.head["status"] = "failed".into();
        self.head["output"] = self.items.clone().into();
        self.head["error"] = json!({"code": error.code, "message": error.message});
        self.push_event(json!({"type": "response.failed", "response": self.head}));
    }
}

/// The part that an item begins with, if it has parts.
fn part(kind: ItemKind) -> Option<Value> {
    match kind {
        ItemKind::Reasoning => Some(json!({"type": "reasoning_text", "text": ""})),
        ItemKind::Text => Some(json!({"type": "output_text", "text": "", "annotations": [], "logprobs": []})),
        ItemKind::Call(_) => None,
    }
}
