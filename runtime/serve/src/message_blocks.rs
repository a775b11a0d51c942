//! Answers of `/v1/messages`: whole, or as events of blocks.

use std::collections::VecDeque;
use std::convert::Infallible;
use std::sync::Arc;

use axum::response::sse::{Event as Sent, KeepAlive, Sse};
use axum::response::{IntoResponse, Response};
use mlcc_engine::FinishReason;
use mlcc_engine::serving::{RequestSummary, SequenceEvent};
use mlcc_text::chat::{AnswerParser, AnswerPart};
use serde_json::{Value, json};

use crate::anthropic::{MessagesRequest, error_body};
use crate::chat_answer::{CallIds, ChatAnswer, ToolCall, ended_by, is_cut};
use crate::error::{ApiError, json_type};
use crate::generation::{ClientId, KEEP_ALIVE, RunningTexts, with_warning_headers};
use crate::served_model::ServedModel;
use crate::traces::RequestSpan;

/// Answers a request.
pub async fn answer(
    hosted: Arc<ServedModel>,
    client: ClientId,
    span: RequestSpan,
    asked: MessagesRequest,
) -> Response {
    let MessagesRequest { prepared, stops } = asked;
    let (warnings, server) = (prepared.warnings, Arc::clone(&hosted.server));
    let mut text = prepared.request;
    text.client = client.0;
    let prompt = text.prompt.len();
    let mut running = match RunningTexts::launch(&hosted, vec![text], 1, span) {
        Ok(running) => running,
        Err(error) => return error.into_response(),
    };
    let id = hosted.server.next_id("msg");
    let head = json!({
        "id": id, "type": "message", "role": "assistant", "model": hosted.name, "content": [],
        "stop_reason": null, "stop_sequence": null, "usage": {"input_tokens": prompt, "output_tokens": 0},
    });
    if prepared.stream {
        return with_warning_headers(
            stream(head, prepared.parser, prepared.ids, stops, running),
            &warnings,
            &server,
        );
    }
    let mut text = String::new();
    loop {
        match running.next_event().await {
            Ok(Some((_, SequenceEvent::Delta(piece)))) => text += &piece.text,
            Ok(Some((_, SequenceEvent::Finished(finished)))) => {
                let answer = ChatAnswer::read(prepared.parser, &text, is_cut(&finished), &prepared.ids, 0);
                let body = whole(head, &answer, &finished, &stops).to_string();
                return with_warning_headers((json_type(), body).into_response(), &warnings, &server);
            }
            Ok(Some(_)) => {}
            Ok(None) => return ApiError::internal("the text has no end").into_response(),
            Err(error) => return error.into_response(),
        }
    }
}

fn usage(finished: &RequestSummary) -> Value {
    json!({
        "input_tokens": finished.prompt_tokens - finished.cached_tokens,
        "cache_read_input_tokens": finished.cached_tokens,
        "cache_creation_input_tokens": 0,
        "output_tokens": finished.completion_tokens,
    })
}

/// The reason for the end of an answer, and the stop sequence if it was one of the request's.
fn ending(finished: &RequestSummary, calls: usize, stops: &[String]) -> (&'static str, Value) {
    let stop = match finished.reason {
        FinishReason::Stop(index) => stops.get(index),
        _ => None,
    };
    match (stop, ended_by(finished, calls)) {
        (Some(stop), _) => ("stop_sequence", stop.as_str().into()),
        (None, "tool_calls") => ("tool_use", Value::Null),
        (None, "length") => ("max_tokens", Value::Null),
        (None, _) => ("end_turn", Value::Null),
    }
}

fn tool_use(call: &ToolCall) -> Value {
    // Arguments that were cut are no JSON.
    let input: Value =
        serde_json::from_str(&call.arguments).unwrap_or_else(|_| json!({"unparsed": call.arguments}));
    json!({"type": "tool_use", "id": call.id, "name": call.name, "input": input})
}

fn whole(mut head: Value, answer: &ChatAnswer, finished: &RequestSummary, stops: &[String]) -> Value {
    let mut content = Vec::new();
    if !answer.reasoning.is_empty() {
        content.push(json!({"type": "thinking", "thinking": answer.reasoning, "signature": ""}));
    }
    if !answer.text.is_empty() {
        content.push(json!({"type": "text", "text": answer.text}));
    }
    content.extend(answer.calls.iter().map(tool_use));
    let (reason, stop) = ending(finished, answer.calls.len(), stops);
    head["content"] = content.into();
    head["stop_reason"] = reason.into();
    head["stop_sequence"] = stop;
    head["usage"] = usage(finished);
    head
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum BlockKind {
    Text,
    Thinking,
    Call(usize),
}

struct BlockStream {
    parser: AnswerParser,
    ids: CallIds,
    stops: Vec<String>,
    running: RunningTexts,
    /// The open block, and the number of the next one.
    open: Option<BlockKind>,
    blocks: usize,
    /// Names of events with their data.
    queue: VecDeque<Value>,
    is_done: bool,
}

fn stream(
    head: Value,
    parser: AnswerParser,
    ids: CallIds,
    stops: Vec<String>,
    running: RunningTexts,
) -> Response {
    let queue = VecDeque::from([json!({"type": "message_start", "message": head})]);
    let stream = BlockStream { parser, ids, stops, running, open: None, blocks: 0, queue, is_done: false };
    let events = futures_util::stream::unfold(stream, |mut stream| async move {
        let data = stream.next().await?;
        let name = data["type"].as_str().unwrap_or("message").to_owned();
        Some((Ok::<_, Infallible>(Sent::default().event(name).data(data.to_string())), stream))
    });
    Sse::new(events).keep_alive(KeepAlive::new().interval(KEEP_ALIVE)).into_response()
}

impl BlockStream {
    async fn next(&mut self) -> Option<Value> {
        loop {
            if let Some(event) = self.queue.pop_front() {
                return Some(event);
            }
            if self.is_done {
                return None;
            }
            match self.running.next_event().await {
                Ok(Some((_, SequenceEvent::Delta(piece)))) => {
                    let parts = self.parser.push(&piece.text);
                    self.send(parts);
                }
                Ok(Some((_, SequenceEvent::Finished(finished)))) => self.end(&finished),
                Ok(Some(_)) => {}
                Ok(None) => self.is_done = true,
                Err(error) => {
                    self.queue.push_back(error_body(&error));
                    self.is_done = true;
                }
            }
        }
    }

    fn send(&mut self, parts: Vec<AnswerPart>) {
        for part in parts {
            match part {
                AnswerPart::Reasoning(text) => {
                    self.block(
                        BlockKind::Thinking,
                        || json!({"type": "thinking", "thinking": "", "signature": ""}),
                    );
                    self.delta(json!({"type": "thinking_delta", "thinking": text}));
                }
                AnswerPart::Text(text) => {
                    self.block(BlockKind::Text, || json!({"type": "text", "text": ""}));
                    self.delta(json!({"type": "text_delta", "text": text}));
                }
                AnswerPart::Call { index, name } => {
                    let id = self.ids.id(0, index);
                    self.block(
                        BlockKind::Call(index),
                        || json!({"type": "tool_use", "id": id, "name": name, "input": {}}),
                    );
                }
                AnswerPart::Arguments { text, .. } => {
                    self.delta(json!({"type": "input_json_delta", "partial_json": text}));
                }
            }
        }
    }

    /// Opens a block, if it is not the open one.
    fn block(&mut self, wanted: BlockKind, begin: impl FnOnce() -> Value) {
        if self.open == Some(wanted) {
            return;
        }
        self.close();
        self.open = Some(wanted);
        self.queue.push_back(
            json!({"type": "content_block_start", "index": self.blocks, "content_block": begin()}),
        );
    }

    fn delta(&mut self, delta: Value) {
        self.queue.push_back(json!({"type": "content_block_delta", "index": self.blocks, "delta": delta}));
    }

    fn close(&mut self) {
        if self.open.take().is_some() {
            self.queue.push_back(json!({"type": "content_block_stop", "index": self.blocks}));
            self.blocks += 1;
        }
    }

    fn end(&mut self, finished: &RequestSummary) {
        let rest = self.parser.finish(is_cut(finished));
        self.send(rest);
        self.close();
        let (reason, stop) = ending(finished, self.parser.calls(), &self.stops);
        self.queue.push_back(json!({
            "type": "message_delta",
            "delta": {"stop_reason": reason, "stop_sequence": stop},
            "usage": usage(finished),
        }));
        self.queue.push_back(json!({"type": "message_stop"}));
        self.is_done = true;
    }
}
