//! Answers of Ollama's API to chats and prompts, whole; a stream has the same parts line by line.

use std::sync::Arc;
use std::time::Instant;

use axum::response::{IntoResponse, Response};
use mlcc_engine::serving::EngineRequest;
use mlcc_text::Tokenizer;
use mlcc_text::chat::AnswerParser;
use serde_json::Value;

use crate::chat_answer::{CallIds, ChatAnswer, is_cut};
use crate::error::{ApiError, json_type};
use crate::generation::{ClientId, ResponseChoice, RunningTexts, collect_choices, with_warning_headers};
use crate::ollama::answer_line::{AnswerField, AnswerHead, AnswerPiece, entry};
use crate::ollama::line_stream::{LineStream, lines};
use crate::ollama::options::TextOptions;
use crate::ollama::tagged_name;
use crate::request_memory::LeasedBody;
use crate::served_model::ServedModel;
use crate::traces::RequestSpan;

/// A request that was read.
pub enum AnswerRequest {
    /// Nothing is asked: clients load a model so.
    Load {
        form: AnswerField,
        stream: bool,
    },
    Text(Box<TextRequest>),
}

/// A text that is asked for.
pub struct TextRequest {
    pub request: EngineRequest,
    /// `None`: all of the text is the answer.
    pub parser: Option<AnswerParser>,
    pub ids: CallIds,
    pub form: AnswerField,
    pub stream: bool,
    /// Parts of the request that are left out.
    pub warnings: Vec<String>,
}

impl AnswerRequest {
    /// A request without messages or a prompt loads the model, or unloads it.
    pub fn without_text(form: AnswerField, options: &TextOptions) -> Result<AnswerRequest, ApiError> {
        if options.unloads {
            let message = "`keep_alive` of 0 unloads a model in Ollama; here models stay loaded: send its name \
                           to /models/unload";
            return Err(ApiError::field("keep_alive", "unsupported", message));
        }
        Ok(AnswerRequest::Load { form, stream: options.stream })
    }
}

/// Answers a request.
pub async fn answer(
    hosted: Arc<ServedModel>,
    client: ClientId,
    span: RequestSpan,
    asked: AnswerRequest,
) -> Response {
    let begin = Instant::now();
    let text = match asked {
        AnswerRequest::Text(text) => *text,
        AnswerRequest::Load { form, stream } => {
            let head = AnswerHead { model: tagged_name(&hosted.name), form, begin };
            let mut line = head.line(AnswerPiece::default());
            line["done"] = true.into();
            line["done_reason"] = "load".into();
            let kind = if stream { lines() } else { json_type() };
            return (kind, line.to_string() + "\n").into_response();
        }
    };
    let TextRequest { mut request, parser, ids, form, stream, warnings } = text;
    request.client = client.0;
    let mut running = match RunningTexts::launch(&hosted, vec![request], 1, span) {
        Ok(running) => running,
        Err(error) => return error.into_response(),
    };
    let head = AnswerHead { model: tagged_name(&hosted.name), form, begin };
    let server = Arc::clone(&hosted.server);
    let answer = match stream {
        true => LineStream::new(hosted, head, parser, ids, running).into_response(),
        false => match collect_choices(&mut running, &server).await {
            Err(error) => error.into_response(),
            Ok((choices, lease)) => match choices.into_iter().next() {
                Some(choice) => {
                    let body = whole(&hosted.tokenizer, &head, parser, &ids, &choice).to_string();
                    (json_type(), LeasedBody::with_lease(body, lease)).into_response()
                }
                None => ApiError::internal("the answer has no text").into_response(),
            },
        },
    };
    with_warning_headers(answer, &warnings, &server)
}

fn whole(
    tokenizer: &Tokenizer,
    head: &AnswerHead,
    parser: Option<AnswerParser>,
    ids: &CallIds,
    choice: &ResponseChoice,
) -> Value {
    let cut = choice.finished.as_ref().is_none_or(is_cut);
    let answer = match parser {
        Some(parser) => ChatAnswer::read(parser, &choice.text, cut, ids, 0),
        None => ChatAnswer { text: choice.text.clone(), ..ChatAnswer::default() },
    };
    let entries = choice.tokens.iter().filter_map(|token| token.logprobs.as_ref());
    let piece = AnswerPiece {
        text: answer.text,
        thinking: answer.reasoning,
        calls: answer.calls,
        logprobs: entries.map(|logprobs| entry(tokenizer, logprobs)).collect(),
    };
    let mut line = head.line(piece);
    if let Some(finished) = &choice.finished {
        head.finish(&mut line, finished);
    }
    line
}
