//! Answers of `/completion` and `/infill`, whole or streamed.

use std::collections::VecDeque;
use std::convert::Infallible;
use std::sync::Arc;

use axum::response::sse::{Event as Sent, KeepAlive, Sse};
use axum::response::{IntoResponse, Response};
use mlcc_engine::FinishReason;
use mlcc_engine::sampler::{Logprobs, TokenLogprob};
use mlcc_engine::serving::{EngineRequest, RequestSummary, SampledToken, SequenceEvent};
use mlcc_text::Tokenizer;
use serde_json::{Value, json};

use crate::error::json_type;
use crate::generation::{ClientId, KEEP_ALIVE, ResponseChoice, RunningTexts, collect_choices, timings};
use crate::info::sampling;
use crate::llama_cpp::completion::NativeCompletion;
use crate::llama_cpp::error_body;
use crate::request_memory::LeasedBody;
use crate::response_shape::{finite, token_text};
use crate::served_model::ServedModel;
use crate::traces::RequestSpan;

/// The form of the answers to a request.
struct NativeForm {
    hosted: Arc<ServedModel>,
    requests: Vec<EngineRequest>,
    prompts: Vec<String>,
    returns_tokens: bool,
}

/// Answers a request.
pub async fn answer(
    hosted: Arc<ServedModel>,
    client: ClientId,
    span: RequestSpan,
    asked: NativeCompletion,
) -> Response {
    let NativeCompletion { mut requests, prompts, stream, is_list, returns_tokens } = asked;
    requests.iter_mut().for_each(|request| request.client = client.0);
    // Leaves out large fields: settings are sent again.
    let settings =
        requests.iter().map(|request| EngineRequest { prompt: Vec::new(), grammar: None, ..request.clone() });
    let form = NativeForm {
        requests: settings.collect(),
        prompts: prompts.into_iter().map(|prompt| prompt.text).collect(),
        returns_tokens,
        hosted: Arc::clone(&hosted),
    };
    let mut running = match RunningTexts::launch(&hosted, requests, 1, span) {
        Ok(running) => running,
        Err(error) => return error.into_response(),
    };
    if stream {
        return NativeStream { form, running, queue: VecDeque::new(), count: 0, is_done: false }
            .into_response();
    }
    let (choices, lease) = match collect_choices(&mut running, &hosted.server).await {
        Ok(collected) => collected,
        Err(error) => return error.into_response(),
    };
    let whole: Vec<Value> =
        choices.iter().enumerate().map(|(index, choice)| form.whole(index, choice)).collect();
    let text = match whole.first() {
        Some(one) if !is_list => one.to_string(),
        _ => Value::from(whole).to_string(),
    };
    (json_type(), LeasedBody::with_lease(text, lease)).into_response()
}

fn scored_token(tokenizer: &Tokenizer, token: TokenLogprob) -> Value {
    json!({
        "id": token.id,
        "token": token_text(tokenizer, token.id),
        "bytes": tokenizer.bytes_of(token.id),
        "logprob": finite(token.logprob),
    })
}

fn scored_entry(tokenizer: &Tokenizer, logprobs: &Logprobs) -> Value {
    let mut entry = scored_token(tokenizer, logprobs.token);
    entry["top_logprobs"] = logprobs.top.iter().map(|&token| scored_token(tokenizer, token)).collect();
    entry
}

impl NativeForm {
    fn whole(&self, index: usize, choice: &ResponseChoice) -> Value {
        let mut answer = self.end(index, choice.finished.as_ref());
        answer["content"] = choice.text.as_str().into();
        answer["has_new_line"] = choice.text.contains('\n').into();
        if self.returns_tokens {
            answer["tokens"] = choice.tokens.iter().map(|token| token.id).collect();
        }
        let scored: Vec<Value> = self.scored(&choice.tokens);
        if !scored.is_empty() {
            answer["completion_probabilities"] = scored.into();
        }
        answer
    }

    fn scored(&self, tokens: &[SampledToken]) -> Vec<Value> {
        let entries = tokens.iter().filter_map(|token| token.logprobs.as_ref());
        entries.map(|logprobs| scored_entry(&self.hosted.tokenizer, logprobs)).collect()
    }

    fn part(&self, text: &str, token: Option<SampledToken>, count: usize) -> Value {
        let tokens = Vec::from_iter(token);
        let ids: Vec<_> = tokens.iter().filter(|_| self.returns_tokens).map(|token| token.id).collect();
        let mut part = json!({
            "index": 0, "content": text, "tokens": ids, "stop": false, "id_slot": -1, "tokens_predicted": count,
        });
        let scored = self.scored(&tokens);
        if !scored.is_empty() {
            part["completion_probabilities"] = scored.into();
        }
        part
    }

    /// The last part of an answer, without its text.
    fn end(&self, index: usize, finished: Option<&RequestSummary>) -> Value {
        let request = &self.requests[index];
        let (kind, word) = match finished.map(|finished| finished.reason) {
            Some(FinishReason::Eos | FinishReason::Grammar) => ("eos", None),
            Some(FinishReason::Stop(stop)) => ("word", request.stop.get(stop)),
            Some(FinishReason::Length | FinishReason::Context | FinishReason::Deadline) => ("limit", None),
            Some(FinishReason::Cancelled) | None => ("none", None),
        };
        let mut settings = sampling(&request.sampling);
        settings["n_predict"] = request.max_tokens.map_or(json!(-1), Value::from);
        settings["stop"] = json!(request.stop);
        settings["seed"] = finished.map(|finished| finished.seed).into();
        json!({
            "index": index,
            "content": "",
            "tokens": [],
            "id_slot": -1,
            "stop": true,
            "model": self.hosted.name,
            "tokens_predicted": finished.map_or(0, |finished| finished.completion_tokens),
            "tokens_evaluated": finished.map_or(0, |finished| finished.prompt_tokens),
            "tokens_cached": finished.map_or(0, |finished| finished.prompt_tokens + finished.completion_tokens),
            "generation_settings": settings,
            "prompt": self.prompts.get(index),
            "truncated": false,
            "stop_type": kind,
            "stopping_word": word.map_or("", String::as_str),
            "timings": timings(&Vec::from_iter(finished)),
        })
    }
}

struct NativeStream {
    form: NativeForm,
    running: RunningTexts,
    queue: VecDeque<Value>,
    /// Tokens until now.
    count: usize,
    is_done: bool,
}

impl NativeStream {
    async fn next(&mut self) -> Option<Value> {
        loop {
            if let Some(part) = self.queue.pop_front() {
                return Some(part);
            }
            if self.is_done {
                return None;
            }
            match self.running.next_event().await {
                Ok(Some((_, SequenceEvent::Delta(delta)))) => {
                    self.count += usize::from(delta.token.is_some());
                    let is_shown = delta
                        .token
                        .as_ref()
                        .is_some_and(|token| self.form.returns_tokens || token.logprobs.is_some());
                    if !delta.text.is_empty() || is_shown {
                        self.queue.push_back(self.form.part(&delta.text, delta.token, self.count));
                    }
                }
                Ok(Some((index, SequenceEvent::Finished(finished)))) => {
                    self.queue.push_back(self.form.end(index, Some(&finished)));
                }
                Ok(Some(_)) => {}
                Ok(None) => self.is_done = true,
                Err(error) => {
                    self.queue.push_back(error_body(&error));
                    self.is_done = true;
                }
            }
        }
    }
}

impl IntoResponse for NativeStream {
    fn into_response(self) -> Response {
        let events = futures_util::stream::unfold(self, |mut stream| async move {
            let data = stream.next().await?;
            Some((Ok::<_, Infallible>(Sent::default().data(data.to_string())), stream))
        });
        Sse::new(events).keep_alive(KeepAlive::new().interval(KEEP_ALIVE)).into_response()
    }
}
