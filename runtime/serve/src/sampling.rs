//! Common fields of chats and completions: how tokens are chosen and when a text ends.

use std::collections::BTreeMap;

use mlcc_engine::SamplingOverrides;
use mlcc_engine::sampler::ParamError;
use mlcc_engine::serving::EngineRequest;
use mlcc_text::{SpecialTokens, TokenId};
use serde_json::Value;

use crate::constraint::OutputConstraint;
use crate::error::ApiError;
use crate::fields::{OneOrMany, RequestFields};
use crate::samplers;
use crate::served_model::ServedModel;

/// Most texts of one prompt.
const MOST_CHOICES: usize = 128;
const MOST_STOPS: usize = 16;
const LONGEST_STOP: usize = 1024;
const MOST_BIASES: usize = 1024;
const MOST_STOP_TOKENS: usize = 64;
/// Most alternatives of a token.
pub const MOST_LOGPROBS: usize = 20;
/// Most tokens of a text without a length in the request, where no context ends it.
const ENDLESS: usize = 4096;

/// The part of a request that is the same for all its texts.
pub struct CommonFields {
    /// All but the prompt, the end tokens and what is scored.
    pub text: EngineRequest,
    /// Texts of each prompt.
    pub choices: usize,
    pub stream: bool,
    /// A last piece of the stream tells the usage.
    pub include_usage: bool,
    ignore_eos: bool,
    /// Tokens that end the text in addition to those of the model.
    stop_tokens: Vec<TokenId>,
    /// The constraint on the text; to be compiled.
    pub constraint: Option<OutputConstraint>,
}

impl CommonFields {
    /// Takes the fields; `usual_length` is the most tokens of a text by default.
    pub fn take(
        fields: &mut RequestFields,
        hosted: &ServedModel,
        usual_length: Option<usize>,
    ) -> Result<CommonFields, ApiError> {
        let sampling = hosted.sampling.clone().with(&overrides(fields, hosted)?);
        sampling.check().map_err(wrong_param)?;
        let count = "a whole number, 0 or more";
        let old = fields.take_field::<usize>("max_tokens", count)?.or(predicted(fields)?);
        let max_tokens = fields.take_field::<usize>("max_completion_tokens", count)?.or(old).or(usual_length);
        let endless = hosted.engine.limits().context.is_none();
        let choices = fields.take_field::<usize>("n", "a whole number, 1 or more")?.unwrap_or(1);
        if !(1..=MOST_CHOICES).contains(&choices) {
            let message = format!("`n` is {choices}, expected 1 to {MOST_CHOICES}");
            return Err(ApiError::field("n", "invalid_value", message));
        }
        let stream = fields.take_field("stream", "true or false")?.unwrap_or(false);
        Ok(CommonFields {
            text: EngineRequest {
                adapter: hosted.adapter.clone(),
                bias: biases(fields)?,
                min_tokens: fields.take_field("min_tokens", count)?.unwrap_or(0),
                max_tokens: max_tokens.or(endless.then_some(ENDLESS)),
                stop: stops(fields)?,
                deadline: hosted.server.options.timeout.map(|timeout| std::time::Instant::now() + timeout),
                priority: fields.take_field("priority", "a whole number")?.unwrap_or(0),
                use_prefix_cache: fields.take_field("cache_prompt", "true or false")?.unwrap_or(true),
                special: match fields.take_field("skip_special_tokens", "true or false")?.unwrap_or(true) {
                    true => SpecialTokens::Skip,
                    false => SpecialTokens::Keep,
                },
                ..EngineRequest::new(Vec::new(), sampling)
            },
            choices,
            stream,
            include_usage: include_usage(fields, stream)?,
            constraint: OutputConstraint::take(fields)?,
            ignore_eos: fields.take_field("ignore_eos", "true or false")?.unwrap_or(false),
            stop_tokens: stop_tokens(fields, hosted)?,
        })
    }

    /// The tokens that end a text, of which the model has `eos`.
    pub fn ends(&self, eos: &[TokenId]) -> Vec<TokenId> {
        let eos = if self.ignore_eos { &[] } else { eos };
        [eos, &self.stop_tokens].concat()
    }
}

/// The length by llama.cpp's name; a negative one is no limit.
fn predicted(fields: &mut RequestFields) -> Result<Option<usize>, ApiError> {
    let wanted: Option<i64> = fields.take_field("n_predict", "a whole number")?;
    Ok(wanted.and_then(|most| usize::try_from(most).ok()))
}

fn stop_tokens(fields: &mut RequestFields, hosted: &ServedModel) -> Result<Vec<TokenId>, ApiError> {
    const NAME: &str = "stop_token_ids";
    let ids: Vec<TokenId> = fields.take_field(NAME, "a list of token ids")?.unwrap_or_default();
    let vocab = hosted.engine.limits().vocab;
    let wrong = |message: String| Err(ApiError::field(NAME, "invalid_value", message));
    if ids.len() > MOST_STOP_TOKENS {
        return wrong(format!("`{NAME}` has {} ids, at most {MOST_STOP_TOKENS} are allowed", ids.len()));
    }
    match ids.iter().find(|&&id| id as usize >= vocab) {
        Some(id) => wrong(format!("`{NAME}` has {id}, and the tokens of this model are 0 to {}", vocab - 1)),
        None => Ok(ids),
    }
}

/// The number of most probable tokens that llama.cpp's clients ask for; none if they do not.
pub fn probabilities(fields: &mut RequestFields) -> Result<Option<usize>, ApiError> {
    let wanted: Option<usize> = fields.take_field("n_probs", "a whole number, 0 or more")?;
    match wanted.filter(|&count| count > 0) {
        Some(count) if count > MOST_LOGPROBS => {
            let message = format!("`n_probs` is {count}, at most {MOST_LOGPROBS} are reported");
            Err(ApiError::field("n_probs", "invalid_value", message))
        }
        wanted => Ok(wanted),
    }
}

fn wrong_param(error: ParamError) -> ApiError {
    ApiError::field(
        error.name,
        "invalid_value",
        format!("`{}` is {}, expected {}", error.name, error.found, error.expected),
    )
}

fn overrides(fields: &mut RequestFields, hosted: &ServedModel) -> Result<SamplingOverrides, ApiError> {
    let number = "a number";
    let count = "a whole number, 0 or more";
    let other = fields.take_field("repetition_penalty", number)?;
    Ok(SamplingOverrides {
        temperature: fields.take_field("temperature", number)?,
        // -1 is off elsewhere.
        top_k: fields.take_field::<i64>("top_k", "a whole number")?.map(|k| u32::try_from(k).unwrap_or(0)),
        top_p: fields.take_field("top_p", number)?,
        min_p: fields.take_field("min_p", number)?,
        repeat_penalty: fields.take_field("repeat_penalty", number)?.or(other),
        repeat_last_n: fields.take_field("repeat_last_n", count)?,
        presence_penalty: fields.take_field("presence_penalty", number)?,
        frequency_penalty: fields.take_field("frequency_penalty", number)?,
        seed: seed(fields)?,
        extra: samplers::take(fields, hosted)?,
    })
}

/// -1 is another one each time.
fn seed(fields: &mut RequestFields) -> Result<Option<u64>, ApiError> {
    let value: Option<serde_json::Number> = fields.take_field("seed", "a whole number")?;
    let Some(value) = value else { return Ok(None) };
    match (value.as_u64(), value.as_i64()) {
        (Some(seed), _) => Ok(Some(seed)),
        (None, Some(-1)) => Ok(None),
        (None, Some(seed)) => Ok(Some(seed as u64)),
        (None, None) => {
            let message = format!("`seed` is {value}, expected a whole number of 64 bits");
            Err(ApiError::field("seed", "invalid_type", message))
        }
    }
}

fn stops(fields: &mut RequestFields) -> Result<Vec<String>, ApiError> {
    let stops: Option<OneOrMany<String>> = fields.take_field("stop", "a string or a list of strings")?;
    let stops = stops.map(OneOrMany::into_vec).unwrap_or_default();
    let wrong = |message: String| Err(ApiError::field("stop", "invalid_value", message));
    if stops.len() > MOST_STOPS {
        return wrong(format!("`stop` has {} strings, at most {MOST_STOPS} are allowed", stops.len()));
    }
    match stops.iter().find(|stop| stop.is_empty() || stop.len() > LONGEST_STOP) {
        Some(stop) => {
            wrong(format!("`stop` has a string of {} bytes, expected 1 to {LONGEST_STOP}", stop.len()))
        }
        None => Ok(stops),
    }
}

/// The form of OpenAI's clients, or of llama.cpp's.
#[derive(serde::Deserialize)]
#[serde(untagged)]
enum LogitBiases {
    Map(BTreeMap<String, f32>),
    Pairs(Vec<(TokenId, f32)>),
}

fn biases(fields: &mut RequestFields) -> Result<Vec<(TokenId, f32)>, ApiError> {
    let biases: Option<LogitBiases> =
        fields.take_field("logit_bias", "an object of token ids and numbers")?;
    let map: BTreeMap<String, f32> = match biases {
        None => BTreeMap::new(),
        Some(LogitBiases::Map(map)) => map,
        Some(LogitBiases::Pairs(pairs)) => {
            pairs.into_iter().map(|(id, bias)| (id.to_string(), bias)).collect()
        }
    };
    let wrong = |message: String| ApiError::field("logit_bias", "invalid_value", message);
    if map.len() > MOST_BIASES {
        return Err(wrong(format!(
            "`logit_bias` has {} entries, at most {MOST_BIASES} are allowed",
            map.len()
        )));
    }
    let entry = |(id, bias): (String, f32)| match id.parse() {
        Ok(id) if (-100.0..=100.0).contains(&bias) => Ok((id, bias)),
        Ok(id) => Err(wrong(format!("`logit_bias` of token {id} is {bias}, expected -100 to 100"))),
        Err(_) => Err(wrong(format!("`logit_bias` has the key {id:?}, expected the id of a token"))),
    };
    map.into_iter().map(entry).collect()
}

fn include_usage(fields: &mut RequestFields, stream: bool) -> Result<bool, ApiError> {
    let options: Option<BTreeMap<String, Value>> = fields.take_field("stream_options", "an object")?;
    let Some(options) = options else { return Ok(false) };
    if !stream {
        let message = "`stream_options` is for streams: send `stream: true` with it";
        return Err(ApiError::field("stream_options", "invalid_value", message));
    }
    let mut wanted = false;
    for (name, value) in options {
        match (name.as_str(), value) {
            ("include_usage", Value::Bool(value)) => wanted = value,
            ("include_obfuscation", Value::Bool(_)) | ("continuous_usage_stats", Value::Bool(false)) => {}
            (_, Value::Null) => {}
            (name, _) => {
                let message = format!("`stream_options.{name}` is unknown or no truth value");
                return Err(ApiError::field("stream_options", "invalid_value", message));
            }
        }
    }
    Ok(wanted)
}
