//! Whole answers of a chat, and their pieces: text, reasoning and calls of tools.

use mlcc_engine::FinishReason;
use mlcc_engine::serving::RequestSummary;
use mlcc_text::chat::{AnswerParser, AnswerPart};

use crate::response_shape::finish_reason;

#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ToolCall {
    pub id: String,
    pub name: String,
    /// JSON text.
    pub arguments: String,
}

/// Names for calls: nine letters and digits, as some templates demand.
#[derive(Debug, Clone)]
pub struct CallIds {
    /// Differs between answers.
    pub answer: u64,
}

impl CallIds {
    /// The id of call `call` in choice `choice`.
    pub fn id(&self, choice: usize, call: usize) -> String {
        const DIGITS: &[u8; 36] = b"0123456789abcdefghijklmnopqrstuvwxyz";
        // 36^9 has no factor in common with the multiplier, so ids near each other look different and stay
        // so.
        let number = self.answer.wrapping_mul(1 << 14).wrapping_add((choice * 128 + call) as u64);
        let mut number = number.wrapping_mul(0x9e37_79b9_7f4a_7c15) % 36_u64.pow(9);
        let mut id = String::new();
        for _ in 0..9 {
            id.push(char::from(DIGITS[(number % 36) as usize]));
            number /= 36;
        }
        id
    }
}

/// An answer that has ended.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ChatAnswer {
    pub reasoning: String,
    pub text: String,
    pub calls: Vec<ToolCall>,
    /// True if it was cut in the begin of a call, which is left out.
    pub cut_call: bool,
}

impl ChatAnswer {
    /// `parser` has seen nothing yet; `cut`: the answer did not end by itself.
    pub fn read(mut parser: AnswerParser, text: &str, cut: bool, ids: &CallIds, choice: usize) -> ChatAnswer {
        let parts = [parser.push(text), parser.finish(cut)].concat();
        let mut answer = ChatAnswer { cut_call: parser.was_cut_in_call(), ..ChatAnswer::default() };
        for part in parts {
            match part {
                AnswerPart::Reasoning(text) => answer.reasoning += &text,
                AnswerPart::Text(text) => answer.text += &text,
                AnswerPart::Call { index, name } => {
                    let id = ids.id(choice, index);
                    answer.calls.push(ToolCall { id, name, arguments: String::new() });
                }
                AnswerPart::Arguments { text, .. } => {
                    if let Some(call) = answer.calls.last_mut() {
                        call.arguments += &text;
                    }
                }
            }
        }
        answer
    }
}

/// True if an answer did not end by itself.
pub fn is_cut(finished: &RequestSummary) -> bool {
    !matches!(finished.reason, FinishReason::Eos | FinishReason::Stop(_) | FinishReason::Grammar)
}

/// The API's name for the end of an answer with `calls` calls.
pub fn ended_by(finished: &RequestSummary, calls: usize) -> &'static str {
    if !is_cut(finished) && calls > 0 { "tool_calls" } else { finish_reason(finished) }
}
