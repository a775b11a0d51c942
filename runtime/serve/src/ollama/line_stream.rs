//! Answers of Ollama's API that are streamed: a line of JSON for each part.

use std::collections::VecDeque;
use std::convert::Infallible;
use std::sync::Arc;

use axum::body::Body;
use axum::http::header::{self, HeaderName};
use axum::response::{IntoResponse, Response};
use mlcc_engine::serving::{RequestSummary, SampledToken, SequenceEvent};
use mlcc_text::chat::{AnswerParser, AnswerPart};
use serde_json::Value;

use crate::chat_answer::{CallIds, ToolCall, is_cut};
use crate::generation::RunningTexts;
use crate::ollama::answer_line::{AnswerHead, AnswerPiece, entry};
use crate::ollama::error_body;
use crate::served_model::ServedModel;

/// The header of streams.
pub fn lines() -> [(HeaderName, &'static str); 1] {
    [(header::CONTENT_TYPE, "application/x-ndjson")]
}

pub struct LineStream {
    hosted: Arc<ServedModel>,
    head: AnswerHead,
    parser: Option<AnswerParser>,
    ids: CallIds,
    running: RunningTexts,
    /// A call whose arguments are not complete: calls are sent whole.
    call: Option<ToolCall>,
    queue: VecDeque<Value>,
    is_done: bool,
}

impl LineStream {
    pub fn new(
        hosted: Arc<ServedModel>,
        head: AnswerHead,
        parser: Option<AnswerParser>,
        ids: CallIds,
        running: RunningTexts,
    ) -> LineStream {
        LineStream { hosted, head, parser, ids, running, call: None, queue: VecDeque::new(), is_done: false }
    }

    async fn next(&mut self) -> Option<Value> {
        loop {
            if let Some(line) = self.queue.pop_front() {
                return Some(line);
            }
            if self.is_done {
                return None;
            }
            match self.running.next_event().await {
                Ok(Some((_, SequenceEvent::Delta(delta)))) => self.add(&delta.text, delta.token.as_ref()),
                Ok(Some((_, SequenceEvent::Finished(finished)))) => self.finish(&finished),
                Ok(Some(_)) => {}
                Ok(None) => self.is_done = true,
                Err(error) => {
                    self.queue.push_back(error_body(&error));
                    self.is_done = true;
                }
            }
        }
    }

    fn add(&mut self, text: &str, token: Option<&SampledToken>) {
        let logprobs = token.and_then(|token| token.logprobs.as_ref());
        let parts = match &mut self.parser {
            Some(parser) => parser.push(text),
            None => Vec::from_iter((!text.is_empty()).then(|| AnswerPart::Text(text.to_owned()))),
        };
        let mut piece = self.piece(parts);
        piece.logprobs.extend(logprobs.map(|logprobs| entry(&self.hosted.tokenizer, logprobs)));
        self.send(piece);
    }

    /// The parts of one step as a piece of the answer.
    fn piece(&mut self, parts: Vec<AnswerPart>) -> AnswerPiece {
        let mut piece = AnswerPiece::default();
        for part in parts {
            match part {
                AnswerPart::Reasoning(text) => piece.thinking += &text,
                AnswerPart::Text(text) => piece.text += &text,
                AnswerPart::Call { index, name } => {
                    piece.calls.extend(self.call.take());
                    let id = self.ids.id(0, index);
                    self.call = Some(ToolCall { id, name, arguments: String::new() });
                    continue;
                }
                AnswerPart::Arguments { text, .. } => {
                    if let Some(call) = &mut self.call {
                        call.arguments += &text;
                    }
                    continue;
                }
            }
            piece.calls.extend(self.call.take());
        }
        piece
    }

    fn send(&mut self, piece: AnswerPiece) {
        let AnswerPiece { text, thinking, calls, logprobs } = &piece;
        if !(text.is_empty() && thinking.is_empty() && calls.is_empty() && logprobs.is_empty()) {
            self.queue.push_back(self.head.line(piece));
        }
    }

    fn finish(&mut self, finished: &RequestSummary) {
        let rest = self.parser.as_mut().map(|parser| parser.finish(is_cut(finished)));
        let mut piece = self.piece(rest.unwrap_or_default());
        piece.calls.extend(self.call.take());
        self.send(piece);
        let mut line = self.head.line(AnswerPiece::default());
        self.head.finish(&mut line, finished);
        self.queue.push_back(line);
    }
}

impl IntoResponse for LineStream {
    fn into_response(self) -> Response {
        let lines_of = futures_util::stream::unfold(self, |mut stream| async move {
            let line = stream.next().await?;
            Some((Ok::<_, Infallible>(line.to_string() + "\n"), stream))
        });
        (lines(), Body::from_stream(lines_of)).into_response()
    }
}
