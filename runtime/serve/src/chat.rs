//! `/v1/chat/completions` and `/apply-template`.

use std::collections::BTreeMap;

use mlcc_engine::conversation::ChatFormat;
use mlcc_engine::sampler::{Logprobs, TokenLogprob};
use mlcc_engine::serving::{EngineRequest, RequestSummary, SampledToken};
use mlcc_text::chat::{
    AnswerGrammar, AnswerParser, AnswerPart, CallGrammar, ChatMessage, MessageContent, TemplateInputs,
    TemplateValue,
};
use mlcc_text::{Grammar, GrammarSpec, SpecialTokens, TokenId, Tokenizer};
use serde_json::{Value, json};

use crate::chat_answer::{CallIds, ChatAnswer, ToolCall, ended_by, is_cut};
use crate::constraint::OutputConstraint;
use crate::error::ApiError;
use crate::fields::RequestFields;
use crate::generation::{PreparedRequest, ResponseChoice};
use crate::known_fields::{CHATS, TEXTS};
use crate::messages;
use crate::reasoning::ReasoningRequest;
use crate::response_shape::{ResponseShape, finite, token_text};
use crate::sampling::{CommonFields, MOST_LOGPROBS, probabilities};
use crate::served_model::ServedModel;
use crate::tools::{AskedTools, ToolChoice, ToolSet};

/// A chat that was read: everything but the form of its answer.
pub struct ChatRequest {
    pub request: EngineRequest,
    pub choices: usize,
    pub stream: bool,
    pub include_usage: bool,
    pub parser: AnswerParser,
    pub ids: CallIds,
    /// The answer tells the model's reasoning.
    pub includes_reasoning: bool,
    /// Parts of the request that are left out.
    pub warnings: Vec<String>,
}

/// Reads a request and makes its prompt.
pub fn prepare(hosted: &ServedModel, mut fields: RequestFields) -> Result<PreparedRequest, ApiError> {
    let logprobs = logprobs(&mut fields)?;
    let prepared = read(hosted, fields, logprobs)?;
    let shape = ChatResponse {
        logprobs: logprobs.is_some(),
        includes_reasoning: prepared.includes_reasoning,
        streams: vec![prepared.parser.clone(); prepared.choices],
        parser: prepared.parser,
        ids: prepared.ids,
    };
    Ok(PreparedRequest {
        requests: with_seeds(&prepared.request, prepared.choices),
        choices: prepared.choices,
        stream: prepared.stream,
        include_usage: prepared.include_usage,
        shape: Box::new(shape),
        warnings: prepared.warnings,
    })
}

/// Reads all fields of a chat but those of log probabilities.
pub fn read(
    hosted: &ServedModel,
    mut fields: RequestFields,
    logprobs: Option<usize>,
) -> Result<ChatRequest, ApiError> {
    let common = CommonFields::take(&mut fields, hosted, None)?;
    hosted.check_count(1, common.choices)?;
    let AskedTools { tools, warnings } = ToolSet::take(&mut fields)?;
    let reasoning = ReasoningRequest::take(&mut fields)?;
    let prompt = prompt(hosted, &mut fields, tools.as_ref(), &reasoning)?;
    finish(fields, common.choices)?;
    hosted.check_text("messages", &prompt.text)?;
    let ids = prompt.format.encode(&hosted.tokenizer, &prompt.text);
    let ids = ids.map_err(|e| ApiError::field("messages", "invalid_value", e.to_string()))?;
    // A model that can go back anywhere needs no breakpoints.
    let borders = if hosted.engine.limits().truncates {
        Vec::new()
    } else {
        prompt.cache_breakpoints(&hosted.tokenizer, &ids)
    };
    let ChatPrompt { format, text, .. } = prompt;
    let mut stop = common.text.stop.clone();
    stop.extend(format.stop_texts().iter().map(|stop| stop.to_string()));
    let special = if hosted.shows_control_tokens { SpecialTokens::Keep } else { common.text.special };
    let eos = common.ends(&hosted.chat_eos);
    let work = EngineRequest {
        prompt: ids,
        cache_breakpoints: borders,
        eos,
        stop,
        stop_guard: hosted.syntax.stop_guard(&text),
        logprobs,
        special,
        grammar: constraint(hosted, common.constraint, tools.as_ref(), &text)?,
        ..common.text
    };
    let callable = tools.as_ref().map(ToolSet::callable).unwrap_or_default();
    let (names, schemas) = callable.iter().cloned().unzip();
    let most = tools.as_ref().map_or(0, ToolSet::most_calls);
    let mut syntax = hosted.syntax.clone();
    syntax.reasoning = syntax.reasoning.filter(|_| reasoning.apart);
    Ok(ChatRequest {
        request: work,
        choices: common.choices,
        stream: common.stream,
        include_usage: common.include_usage,
        parser: AnswerParser::new(&syntax, names, most, &text).with_schemas(schemas),
        ids: CallIds { answer: hosted.server.next_number() },
        includes_reasoning: reasoning.told,
        warnings,
    })
}

/// Checks that the remaining fields ask for nothing.
fn finish(mut fields: RequestFields, choices: usize) -> Result<(), ApiError> {
    // If all are returned, none is the best.
    fields.drop_neutral("best_of", |value| value.as_u64() == Some(choices as u64));
    fields.finish(&[TEXTS, CHATS])
}

/// The number of alternatives of each token, if an answer has probabilities.
pub fn logprobs(fields: &mut RequestFields) -> Result<Option<usize>, ApiError> {
    let wanted = fields.take_field("logprobs", "true or false")?.unwrap_or(false);
    let top: Option<usize> = fields.take_field("top_logprobs", "a whole number")?;
    let other = probabilities(fields)?;
    match (wanted || other.is_some(), top.or(other)) {
        (true, top) if top.unwrap_or(0) <= MOST_LOGPROBS => Ok(Some(top.unwrap_or(0))),
        (false, None | Some(0)) => Ok(None),
        (false, Some(_)) => {
            let message = "`top_logprobs` needs `logprobs: true`";
            Err(ApiError::field("top_logprobs", "invalid_value", message))
        }
        (true, _) => {
            let message = format!("`top_logprobs` is more than {MOST_LOGPROBS}");
            Err(ApiError::field("top_logprobs", "invalid_value", message))
        }
    }
}

/// The grammar of an answer: what the request says of its text, calls that have to be there, or either.
/// Reasoning comes before it.
fn constraint(
    hosted: &ServedModel,
    constraint: Option<OutputConstraint>,
    tools: Option<&ToolSet>,
    prompt: &str,
) -> Result<Option<Grammar>, ApiError> {
    let compile = |text: Option<&GrammarSpec>, calls: Option<CallGrammar<'_>>, param: &'static str| {
        let answer = AnswerGrammar { syntax: &hosted.syntax, prompt, calls, text: text.cloned() };
        let spec = answer.spec(&hosted.tokenizer);
        let spec =
            spec.map_err(|why| ApiError::field(param, "invalid_grammar", format!("`{param}`: {why}")))?;
        OutputConstraint { spec, param }.compile(hosted).map(Some)
    };
    let text = constraint.as_ref().map(|constraint| &constraint.spec);
    let Some(tools) = tools else {
        return constraint.as_ref().map_or(Ok(None), |constraint| compile(text, None, constraint.param));
    };
    let strict = tools.strict();
    let several = tools.most_calls() > 1;
    let calls = CallGrammar { tools: tools.callable(), strict: &strict, several };
    match &constraint {
        // The form of the text is that of an answer without calls.
        _ if tools.choice != ToolChoice::Auto => compile(None, Some(calls), "tools"),
        None => Ok(None),
        // Calls need not follow a schema.
        Some(constraint) => {
            let either = compile(text, Some(CallGrammar { strict: &[], ..calls }), constraint.param);
            either.or_else(|error| {
                // The schema of the text may be the one that cannot be enforced.
                compile(text, None, constraint.param)?;
                let free = |(name, _): &(String, Value)| (name.clone(), json!({"type": "object"}));
                let free: Vec<(String, Value)> = tools.callable().iter().map(free).collect();
                let calls = CallGrammar { tools: &free, strict: &[], several };
                compile(text, Some(calls), constraint.param).map_err(|_| error)
            })
        }
    }
}

/// The prompt of a conversation, as text. All fields of a chat are taken.
pub fn apply_template(hosted: &ServedModel, fields: RequestFields) -> Result<Value, ApiError> {
    Ok(json!({"prompt": render_messages(hosted, fields)?.text}))
}

/// The tokens of the prompt of a conversation.
pub fn tokens(hosted: &ServedModel, fields: RequestFields) -> Result<Vec<TokenId>, ApiError> {
    let prompt = render_messages(hosted, fields)?;
    hosted.check_text("messages", &prompt.text)?;
    let ids = prompt.format.encode(&hosted.tokenizer, &prompt.text);
    ids.map_err(|e| ApiError::field("messages", "invalid_value", e.to_string()))
}

fn render_messages(hosted: &ServedModel, mut fields: RequestFields) -> Result<ChatPrompt<'_>, ApiError> {
    let common = CommonFields::take(&mut fields, hosted, None)?;
    logprobs(&mut fields)?;
    let AskedTools { tools, .. } = ToolSet::take(&mut fields)?;
    let reasoning = ReasoningRequest::take(&mut fields)?;
    let prompt = prompt(hosted, &mut fields, tools.as_ref(), &reasoning)?;
    finish(fields, common.choices)?;
    Ok(prompt)
}

/// One request for each choice, each with the next seed.
pub fn with_seeds(text: &EngineRequest, choices: usize) -> Vec<EngineRequest> {
    let of = |index: usize| {
        let mut text = text.clone();
        text.sampling.seed = text.sampling.seed.map(|seed| seed.wrapping_add(index as u64));
        text
    };
    (0..choices).map(of).collect()
}

/// A conversation as its model reads it.
struct ChatPrompt<'h> {
    format: &'h ChatFormat,
    messages: Vec<ChatMessage>,
    extra: TemplateInputs,
    answer: bool,
    text: String,
}

/// A text that no message has, in the place of one.
const MARK: &str = "\u{1}";

impl ChatPrompt<'_> {
    /// The number of the prompt's tokens before the first and the last message of the user, where
    /// conversations part that share instructions, or that are edited.
    fn cache_breakpoints(&self, tokenizer: &Tokenizer, tokens: &[TokenId]) -> Vec<usize> {
        let is_user = |message: &ChatMessage| message.role == "user";
        let first = self.messages.iter().position(is_user);
        let last = self.messages.iter().rposition(is_user).filter(|&last| Some(last) != first);
        first.into_iter().chain(last).filter_map(|at| self.message_start(at, tokenizer, tokens)).collect()
    }

    /// The number of tokens before a message. Another text in its place shows where it is.
    fn message_start(&self, at: usize, tokenizer: &Tokenizer, tokens: &[TokenId]) -> Option<usize> {
        let mut messages = self.messages.clone();
        messages.get_mut(at)?.content = MessageContent::Text(MARK.into());
        let other = self.format.render(&messages, self.answer, &self.extra).ok()?;
        let same = self.text.char_indices().zip(other.chars()).find(|((_, a), b)| a != b);
        let ((bytes, _), _) = same?;
        let before = self.format.encode(tokenizer, &self.text[..bytes]).ok()?;
        Some(before.iter().zip(tokens).take_while(|(a, b)| a == b).count())
    }
}

/// The reason why a model has no chats.
fn no_format(hosted: &ServedModel) -> ApiError {
    let message = match hosted.engine.limits().decoder_start {
        None => "this model has no chat template: use /v1/completions, or start the server with --template",
        Some(_) => {
            "this is an encoder-decoder model, which writes one text for another and has no chats: use \
             /v1/completions with the source text as `prompt`"
        }
    };
    ApiError::request("no_chat_template", message)
}

fn prompt<'a>(
    hosted: &'a ServedModel,
    fields: &mut RequestFields,
    tools: Option<&ToolSet>,
    reasoning: &ReasoningRequest,
) -> Result<ChatPrompt<'a>, ApiError> {
    let messages: Vec<Value> = fields.take_required("messages", "a list of messages")?;
    let variables: Option<BTreeMap<String, TemplateValue>> =
        fields.take_field("chat_template_kwargs", "an object of variables of the template")?;
    let mut variables = variables.unwrap_or_default();
    for (name, value) in reasoning.variables() {
        variables.entry(name).or_insert(value);
    }
    let documents: Option<TemplateValue> = fields.take_field("documents", "a list of documents")?;
    let goes_on = goes_on(fields, &messages)?;
    let answer = fields.take_field("add_generation_prompt", "true or false")?.unwrap_or(!goes_on);
    if goes_on && answer {
        let message = "`continue_final_message` and `add_generation_prompt` contradict each other: an answer either \
            continues or starts";
        return Err(ApiError::field("continue_final_message", "invalid_value", message));
    }
    let Some(format) = &hosted.format else {
        return Err(no_format(hosted));
    };
    if messages.is_empty() {
        return Err(ApiError::field("messages", "invalid_value", "`messages` has no message"));
    }
    // Each is a token at least, in any template that names the roles.
    if let Some(most) = hosted.engine.limits().context.filter(|&most| messages.len() > most) {
        let count = messages.len();
        let message = format!("`messages` has {count} messages, but this model reads at most {most} tokens");
        return Err(ApiError::field("messages", "context_length_exceeded", message));
    }
    if tools.is_some() && hosted.syntax.calls.is_none() {
        let message =
            "the chat template of this model has no calls of tools, or none that this server can read";
        return Err(ApiError::field("tools", "unsupported", message));
    }
    if documents.is_some() && !format.uses("documents") {
        let message =
            "the chat template of this model does not support documents: put their texts into a message";
        return Err(ApiError::field("documents", "unsupported", message));
    }
    let as_text = hosted.syntax.calls.as_ref().is_some_and(|calls| calls.arguments_as_text);
    let message = |at| messages::message(at, as_text);
    let messages = messages.into_iter().enumerate().map(message).collect::<Result<Vec<_>, _>>()?;
    let tools = tools.map(ToolSet::for_template).transpose()?;
    let extra = TemplateInputs { variables, tools, documents, ..TemplateInputs::default() };
    let failed =
        |error: mlcc_text::ChatError| ApiError::field("messages", "template_error", error.to_string());
    let mut text = format.render(&messages, answer, &extra).map_err(failed)?;
    if goes_on {
        text.truncate(end_of_last(format, &messages, &extra, &text).map_err(failed)?);
    }
    Ok(ChatPrompt { format, messages, extra, answer, text })
}

/// True if the last message, which is the model's, is to be continued.
fn goes_on(fields: &mut RequestFields, messages: &[Value]) -> Result<bool, ApiError> {
    const NAME: &str = "continue_final_message";
    let wanted = fields.take_field(NAME, "true or false")?.unwrap_or(false);
    let last = messages.last().filter(|last| last["role"] == "assistant" && !last["content"].is_null());
    if wanted && last.is_none() {
        let message = format!("`{NAME}` needs a text of the assistant as the last message");
        return Err(ApiError::field(NAME, "invalid_value", message));
    }
    Ok(wanted)
}

/// The end of the last message's text in a prompt that ends with that message. A longer one shows where it
/// is.
fn end_of_last(
    format: &ChatFormat,
    messages: &[ChatMessage],
    extra: &TemplateInputs,
    text: &str,
) -> Result<usize, mlcc_text::ChatError> {
    let mut longer = messages.to_vec();
    if let Some(last) = longer.last_mut() {
        last.content = MessageContent::Text(last.text().trim_end().to_owned() + MARK);
    }
    let longer = format.render(&longer, false, extra)?;
    let same = text.char_indices().zip(longer.chars()).find(|((_, a), b)| a != b);
    Ok(same.map_or(text.len(), |((at, _), _)| at))
}

struct ChatResponse {
    logprobs: bool,
    includes_reasoning: bool,
    /// Has seen nothing.
    parser: AnswerParser,
    /// The parsers of the choices.
    streams: Vec<AnswerParser>,
    ids: CallIds,
}

/// Parts of an answer as a piece of a stream.
fn delta(parts: impl IntoIterator<Item = AnswerPart>, ids: &CallIds, choice: usize) -> Value {
    let mut delta = json!({});
    let mut calls: Vec<Value> = Vec::new();
    let mut append = |name: &str, text: String| match &mut delta[name] {
        Value::String(before) => *before += &text,
        other => *other = text.into(),
    };
    for part in parts {
        match part {
            AnswerPart::Reasoning(text) => append("reasoning_content", text),
            AnswerPart::Text(text) => append("content", text),
            AnswerPart::Call { index, name } => calls.push(json!({
                "index": index,
                "id": ids.id(choice, index),
                "type": "function",
                "function": {"name": name, "arguments": ""},
            })),
            AnswerPart::Arguments { index, text } => match calls.last_mut() {
                Some(call) if call["index"] == index => {
                    let before = call["function"]["arguments"].as_str().unwrap_or_default();
                    call["function"]["arguments"] = format!("{before}{text}").into();
                }
                _ => calls.push(json!({"index": index, "function": {"arguments": text}})),
            },
        }
    }
    if !calls.is_empty() {
        delta["tool_calls"] = calls.into();
    }
    delta
}

impl ChatResponse {
    fn streamed(&self, index: usize, parts: Vec<AnswerPart>, logprobs: Value) -> Value {
        let told = |part: &AnswerPart| self.includes_reasoning || !matches!(part, AnswerPart::Reasoning(_));
        let delta = delta(parts.into_iter().filter(told), &self.ids, index);
        json!({"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": null})
    }
}

fn token_entry(tokenizer: &Tokenizer, token: TokenLogprob) -> Value {
    json!({
        "token": token_text(tokenizer, token.id),
        "logprob": finite(token.logprob),
        "bytes": tokenizer.bytes_of(token.id),
    })
}

pub fn logprob_entry(tokenizer: &Tokenizer, logprobs: &Logprobs) -> Value {
    let mut entry = token_entry(tokenizer, logprobs.token);
    entry["top_logprobs"] = logprobs.top.iter().map(|&token| token_entry(tokenizer, token)).collect();
    entry
}

impl ResponseShape for ChatResponse {
    fn id_prefix(&self) -> &'static str {
        "chatcmpl"
    }

    fn object(&self) -> &'static str {
        "chat.completion"
    }

    fn chunk_object(&self) -> &'static str {
        "chat.completion.chunk"
    }

    fn choice_value(&self, tokenizer: &Tokenizer, index: usize, choice: &ResponseChoice) -> Value {
        let entries = choice.tokens.iter().filter_map(|token| token.logprobs.as_ref());
        let entries: Vec<Value> = entries.map(|logprobs| logprob_entry(tokenizer, logprobs)).collect();
        let cut = choice.finished.as_ref().is_none_or(is_cut);
        let mut answer = ChatAnswer::read(self.parser.clone(), &choice.text, cut, &self.ids, index);
        if !self.includes_reasoning {
            answer.reasoning.clear();
        }
        let ended = |finished| ended_by(finished, answer.calls.len());
        json!({
            "index": index,
            "message": message_of(&answer),
            "logprobs": self.logprobs.then(|| json!({"content": entries, "refusal": null})),
            "finish_reason": choice.finished.as_ref().map(ended),
        })
    }

    fn first_chunk(&mut self, index: usize) -> Option<Value> {
        let delta = json!({"role": "assistant", "content": "", "refusal": null});
        Some(json!({"index": index, "delta": delta, "logprobs": null, "finish_reason": null}))
    }

    fn prompt_chunk(&mut self, _: &Tokenizer, _: usize, _: &[Option<Logprobs>]) -> Option<Value> {
        None
    }

    fn delta_chunk(
        &mut self,
        tokenizer: &Tokenizer,
        index: usize,
        text: &str,
        token: Option<&SampledToken>,
    ) -> Option<Value> {
        let entry = token.and_then(|token| token.logprobs.as_ref());
        let parts = self.streams.get_mut(index)?.push(text);
        if parts.is_empty() && entry.is_none() {
            return None;
        }
        let logprobs = entry.map(|e| json!({"content": [logprob_entry(tokenizer, e)], "refusal": null}));
        Some(self.streamed(index, parts, logprobs.into()))
    }

    fn last_chunks(&mut self, index: usize, finished: &RequestSummary) -> Vec<Value> {
        let Some(parser) = self.streams.get_mut(index) else { return Vec::new() };
        let (rest, calls) = (parser.finish(is_cut(finished)), parser.calls());
        let reason = ended_by(finished, calls);
        let last = json!({"index": index, "delta": {}, "logprobs": null, "finish_reason": reason});
        let rest = (!rest.is_empty()).then(|| self.streamed(index, rest, Value::Null));
        rest.into_iter().chain([last]).collect()
    }
}

fn message_of(answer: &ChatAnswer) -> Value {
    let called = !answer.calls.is_empty() || answer.cut_call;
    let content = if answer.text.is_empty() && called { Value::Null } else { answer.text.as_str().into() };
    let mut message = json!({"role": "assistant", "content": content, "refusal": null});
    if !answer.reasoning.is_empty() {
        message["reasoning_content"] = answer.reasoning.as_str().into();
    }
    if !answer.calls.is_empty() {
        let call = |call: &ToolCall| json!({"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}});
        message["tool_calls"] = answer.calls.iter().map(call).collect();
    }
    message
}
