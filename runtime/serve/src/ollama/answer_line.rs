//! Lines of answers of Ollama's API: parts of an answer, or all of it.

use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use mlcc_engine::sampler::Logprobs;
use mlcc_engine::serving::RequestSummary;
use mlcc_text::Tokenizer;
use mlcc_text::chat::strftime;
use serde_json::{Value, json};

use crate::chat::logprob_entry;
use crate::chat_answer::ToolCall;
use crate::response_shape::finish_reason;

/// The field of an answer that has its text.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum AnswerField {
    /// `message` of a chat.
    Message,
    /// `response` to a prompt.
    Response,
}

/// A token with its probability.
pub fn entry(tokenizer: &Tokenizer, logprobs: &Logprobs) -> Value {
    let mut entry = logprob_entry(tokenizer, logprobs);
    if logprobs.top.is_empty()
        && let Some(fields) = entry.as_object_mut()
    {
        fields.remove("top_logprobs");
    }
    entry
}

/// The fields of all lines of an answer.
pub struct AnswerHead {
    pub model: String,
    pub form: AnswerField,
    /// The time of the request.
    pub begin: Instant,
}

/// The part of an answer that a line has.
#[derive(Debug, Default)]
pub struct AnswerPiece {
    pub text: String,
    pub thinking: String,
    pub calls: Vec<ToolCall>,
    pub logprobs: Vec<Value>,
}

impl AnswerHead {
    pub fn line(&self, piece: AnswerPiece) -> Value {
        let mut line = json!({"model": self.model, "created_at": now(), "done": false});
        let AnswerPiece { text, thinking, calls, logprobs } = piece;
        let part = match self.form {
            AnswerField::Message => {
                line["message"] = json!({"role": "assistant", "content": text});
                &mut line["message"]
            }
            AnswerField::Response => {
                line["response"] = text.into();
                &mut line
            }
        };
        if !thinking.is_empty() {
            part["thinking"] = thinking.into();
        }
        if !calls.is_empty() {
            part["tool_calls"] =
                calls.iter().enumerate().map(|(index, call)| call_value(index, call)).collect();
        }
        if !logprobs.is_empty() {
            line["logprobs"] = logprobs.into();
        }
        line
    }

    /// Makes a line the last one.
    pub fn finish(&self, line: &mut Value, finished: &RequestSummary) {
        line["done"] = true.into();
        line["done_reason"] = finish_reason(finished).into();
        // The model is loaded already: what comes before is the wait for a slot.
        line["total_duration"] = nanoseconds(self.begin.elapsed());
        line["load_duration"] = nanoseconds(finished.queue_time);
        line["prompt_eval_count"] = finished.prompt_tokens.into();
        line["prompt_eval_duration"] = nanoseconds(finished.prefill_time);
        line["eval_count"] = finished.completion_tokens.into();
        line["eval_duration"] = nanoseconds(finished.decode_time);
    }
}

fn call_value(index: usize, call: &ToolCall) -> Value {
    // Arguments that were cut are no JSON.
    let arguments: Value =
        serde_json::from_str(&call.arguments).unwrap_or_else(|_| json!({"unparsed": call.arguments}));
    json!({"id": call.id, "function": {"index": index, "name": call.name, "arguments": arguments}})
}

/// Clients divide by it.
fn nanoseconds(time: Duration) -> Value {
    u64::try_from(time.as_nanos()).unwrap_or(u64::MAX).max(1).into()
}

/// Now, as RFC 3339 writes it.
fn now() -> String {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    format!("{}.{:09}Z", strftime("%FT%T", since.as_secs()), since.subsec_nanos())
}
