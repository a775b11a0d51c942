//! The form of texts in JSON, which differs between chats and completions.

use mlcc_engine::FinishReason;
use mlcc_engine::sampler::Logprobs;
use mlcc_engine::serving::{RequestSummary, SampledToken};
use mlcc_text::{TokenId, Tokenizer};
use serde_json::Value;

use crate::generation::ResponseChoice;

/// The form of an answer. Choices are numbered over all prompts.
pub trait ResponseShape: Send + Sync {
    /// The prefix of the answer's id.
    fn id_prefix(&self) -> &'static str;
    fn object(&self) -> &'static str;
    fn chunk_object(&self) -> &'static str;
    /// A choice of an answer that is not streamed.
    fn choice_value(&self, tokenizer: &Tokenizer, index: usize, choice: &ResponseChoice) -> Value;
    /// The piece that is streamed at once.
    fn first_chunk(&mut self, index: usize) -> Option<Value>;
    /// The piece that is streamed when the prompt has been scored.
    fn prompt_chunk(
        &mut self,
        tokenizer: &Tokenizer,
        index: usize,
        scored: &[Option<Logprobs>],
    ) -> Option<Value>;
    /// The piece that is streamed for a part of a text.
    fn delta_chunk(
        &mut self,
        tokenizer: &Tokenizer,
        index: usize,
        text: &str,
        token: Option<&SampledToken>,
    ) -> Option<Value>;
    /// The pieces that end the stream of a choice.
    fn last_chunks(&mut self, index: usize, finished: &RequestSummary) -> Vec<Value>;
}

/// The API's name for the end of a text.
pub fn finish_reason(finished: &RequestSummary) -> &'static str {
    match finished.reason {
        FinishReason::Eos | FinishReason::Stop(_) | FinishReason::Grammar => "stop",
        FinishReason::Length | FinishReason::Context | FinishReason::Deadline => "length",
        FinishReason::Cancelled => "cancelled",
    }
}

/// A token's text; what is no UTF-8 by itself is replaced.
pub fn token_text(tokenizer: &Tokenizer, id: TokenId) -> String {
    String::from_utf8_lossy(tokenizer.bytes_of(id).unwrap_or_default()).into_owned()
}

/// The API has a number where JSON has no minus infinity.
pub fn finite(logprob: f32) -> f32 {
    logprob.max(-9999.0)
}
