//! `/v1/chat/completions` and `/apply-template`.

use std::collections::BTreeMap;

use mlcc_engine::chat::{Content, Extra, Value as TemplateValue};
use mlcc_engine::conversation::ChatFormat;
use mlcc_engine::sampler::{Logprobs, TokenLogprob};
use mlcc_engine::serving::{Chosen, Finished, TextRequest};
use mlcc_engine::{Message, Tokenizer};
use serde_json::{Value, json};

use crate::app::App;
use crate::error::ApiError;
use crate::fields::Fields;
use crate::sampling::{Common, IGNORED, MOST_LOGPROBS};
use crate::shape::{Shape, finish_reason, finite, token_text};
use crate::texts::{Choice, Work};

/// Reads a request and makes its prompt.
pub fn prepare(app: &App, body: &[u8]) -> Result<Work, ApiError> {
    let mut fields = Fields::parse(body)?;
    let common = Common::take(&mut fields, app, None)?;
    refuse_what_is_missing(&mut fields)?;
    let wants_logprobs = fields.take("logprobs", "true or false")?.unwrap_or(false);
    let top: Option<usize> = fields.take("top_logprobs", "a whole number")?;
    let logprobs = match (wants_logprobs, top) {
        (true, top) if top.unwrap_or(0) <= MOST_LOGPROBS => Some(top.unwrap_or(0)),
        (false, None | Some(0)) => None,
        (false, Some(_)) => {
            let message = "`top_logprobs` needs `logprobs: true`";
            return Err(ApiError::field("top_logprobs", "invalid_value", message));
        }
        (true, _) => {
            let message = format!("`top_logprobs` is more than {MOST_LOGPROBS}");
            return Err(ApiError::field("top_logprobs", "invalid_value", message));
        }
    };
    let (format, text) = prompt(app, &mut fields)?;
    fields.finish(IGNORED)?;
    let ids = format.encode(&app.tokenizer, &text);
    let ids = ids.map_err(|e| ApiError::field("messages", "invalid_value", e.to_string()))?;
    let mut stop = common.text.stop.clone();
    stop.extend(format.stop_texts().iter().map(|stop| stop.to_string()));
    let text = TextRequest {
        prompt: ids,
        eos: if common.ignore_eos { Vec::new() } else { app.chat_eos.clone() },
        stop,
        logprobs,
        grammar: common.constraint.map(|constraint| constraint.compile(app)).transpose()?,
        ..common.text
    };
    Ok(Work {
        requests: with_seeds(&text, common.choices),
        choices: common.choices,
        stream: common.stream,
        include_usage: common.include_usage,
        shape: Box::new(Chat { logprobs: logprobs.is_some() }),
    })
}

/// The prompt of a conversation, as text.
pub fn apply_template(app: &App, body: &[u8]) -> Result<Value, ApiError> {
    let mut fields = Fields::parse(body)?;
    let (_, text) = prompt(app, &mut fields)?;
    fields.finish(&["model"])?;
    Ok(json!({"prompt": text}))
}

/// As many requests as choices, each with the next seed.
pub fn with_seeds(text: &TextRequest, choices: usize) -> Vec<TextRequest> {
    let of = |index: usize| {
        let mut text = text.clone();
        text.sampling.seed = text.sampling.seed.map(|seed| seed.wrapping_add(index as u64));
        text
    };
    (0..choices).map(of).collect()
}

fn refuse_what_is_missing(fields: &mut Fields) -> Result<(), ApiError> {
    let empty = |value: &Value| value.as_array().is_some_and(Vec::is_empty);
    let only_text = |value: &Value| *value == json!(["text"]);
    let none = |value: &Value| value == "none" || value == "auto";
    fields.refuse("tools", empty)?;
    fields.refuse("functions", empty)?;
    fields.refuse("tool_choice", none)?;
    fields.refuse("function_call", none)?;
    fields.refuse("modalities", only_text)?;
    for name in ["audio", "prediction", "web_search_options"] {
        fields.refuse(name, |_| false)?;
    }
    Ok(())
}

fn prompt<'a>(app: &'a App, fields: &mut Fields) -> Result<(&'a ChatFormat, String), ApiError> {
    let messages: Vec<Value> = fields.need("messages", "a list of messages")?;
    let variables: Option<BTreeMap<String, TemplateValue>> =
        fields.take("chat_template_kwargs", "an object of variables of the template")?;
    let answer = fields.take("add_generation_prompt", "true or false")?.unwrap_or(true);
    let Some(format) = &app.format else {
        let message =
            "this model has no chat template: use /v1/completions, or start the server with --template";
        return Err(ApiError::request("no_chat_template", message));
    };
    if messages.is_empty() {
        return Err(ApiError::field("messages", "invalid_value", "`messages` has no message"));
    }
    let messages = messages.into_iter().enumerate().map(message).collect::<Result<Vec<_>, _>>()?;
    let extra = Extra { variables: variables.unwrap_or_default(), ..Extra::default() };
    let text = format.render(&messages, answer, &extra);
    let text = text.map_err(|e| ApiError::field("messages", "template_error", e.to_string()))?;
    Ok((format, text))
}

fn message((index, value): (usize, Value)) -> Result<Message, ApiError> {
    let param = format!("messages[{index}]");
    let wrong = |what: &str| ApiError::field(&param, "invalid_type", format!("`{param}` is wrong: {what}"));
    if !value.is_object() {
        return Err(wrong("it is no object"));
    }
    if !value["role"].is_string() {
        return Err(wrong("`role` is missing or no string"));
    }
    let plain = matches!(value["content"], Value::Null | Value::String(_) | Value::Array(_));
    if !plain {
        return Err(wrong("`content` is neither a string nor a list of parts"));
    }
    let message: Message = serde_json::from_value(value).map_err(|e| wrong(&e.to_string()))?;
    let Content::Parts(parts) = &message.content else { return Ok(message) };
    let kind = |part: &TemplateValue| part.get_attr("type").ok()?.as_str().map(str::to_owned);
    if let Some(part) = parts.iter().find(|part| kind(part).as_deref() != Some("text")) {
        let kind = kind(part).unwrap_or_else(|| "a part without a type".into());
        let what = format!("`{param}.content` holds {kind}, and this server reads only text");
        return Err(ApiError::field("messages", "unsupported_content", what));
    }
    // Templates that know no parts see the text.
    Ok(Message { content: Content::Text(message.text()), ..message })
}

struct Chat {
    logprobs: bool,
}

fn token_entry(tokenizer: &Tokenizer, token: TokenLogprob) -> Value {
    json!({
        "token": token_text(tokenizer, token.id),
        "logprob": finite(token.logprob),
        "bytes": tokenizer.bytes_of(token.id),
    })
}

fn logprob_entry(tokenizer: &Tokenizer, logprobs: &Logprobs) -> Value {
    let mut entry = token_entry(tokenizer, logprobs.token);
    entry["top_logprobs"] = logprobs.top.iter().map(|&token| token_entry(tokenizer, token)).collect();
    entry
}

impl Shape for Chat {
    fn id_prefix(&self) -> &'static str {
        "chatcmpl"
    }

    fn object(&self) -> &'static str {
        "chat.completion"
    }

    fn chunk_object(&self) -> &'static str {
        "chat.completion.chunk"
    }

    fn whole(&self, tokenizer: &Tokenizer, index: usize, choice: &Choice) -> Value {
        let entries = choice.tokens.iter().filter_map(|token| token.logprobs.as_ref());
        let entries: Vec<Value> = entries.map(|logprobs| logprob_entry(tokenizer, logprobs)).collect();
        json!({
            "index": index,
            "message": {"role": "assistant", "content": choice.text, "refusal": null},
            "logprobs": self.logprobs.then(|| json!({"content": entries, "refusal": null})),
            "finish_reason": choice.finished.as_ref().map(finish_reason),
        })
    }

    fn first(&mut self, index: usize) -> Option<Value> {
        let delta = json!({"role": "assistant", "content": "", "refusal": null});
        Some(json!({"index": index, "delta": delta, "logprobs": null, "finish_reason": null}))
    }

    fn prompt(&mut self, _: &Tokenizer, _: usize, _: &[Option<Logprobs>]) -> Option<Value> {
        None
    }

    fn piece(
        &mut self,
        tokenizer: &Tokenizer,
        index: usize,
        text: &str,
        token: Option<&Chosen>,
    ) -> Option<Value> {
        let entry = token.and_then(|token| token.logprobs.as_ref());
        if text.is_empty() && entry.is_none() {
            return None;
        }
        let logprobs = entry.map(|e| json!({"content": [logprob_entry(tokenizer, e)], "refusal": null}));
        Some(json!({
            "index": index,
            "delta": {"content": text},
            "logprobs": logprobs,
            "finish_reason": null,
        }))
    }

    fn last(&self, index: usize, finished: &Finished) -> Value {
        json!({"index": index, "delta": {}, "logprobs": null, "finish_reason": finish_reason(finished)})
    }
}
