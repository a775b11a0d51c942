//! Fields that several requests of Ollama's API have, in the words of the other routes.

use serde_json::{Map, Value, json};

use crate::chat;
use crate::error::ApiError;
use crate::fields::{RequestFields, excerpt};
use crate::known_fields::NeutralValue::{Bool, Empty, Number};
use crate::known_fields::{KnownField, field, ignored};
use crate::ollama::closed_schema::close_objects;
use crate::reasoning::check_effort;
use crate::served_model::ServedModel;

/// Fields of requests in addition to those of all texts.
pub const FIELDS: &[KnownField] = &[
    // A prompt that is too long is an error that says by how much, whatever these say.
    ignored("truncate"),
    ignored("shift"),
    field("template", Empty, "another chat template; set it when the server starts: --template"),
    field("context", Empty, "tokens of an earlier answer; send the whole conversation to /api/chat"),
    field("images", Empty, "images; this server reads only text"),
];

/// Options that change no text: hints of speed and memory, which the server decides by itself.
const HINTS: &[KnownField] = &[
    ignored("num_gpu"),
    ignored("main_gpu"),
    ignored("num_thread"),
    ignored("num_batch"),
    ignored("num_keep"),
    ignored("numa"),
    ignored("low_vram"),
    ignored("f16_kv"),
    ignored("use_mmap"),
    ignored("use_mlock"),
    ignored("logits_all"),
    field("vocab_only", Bool(false), "a model without weights"),
    field("embedding_only", Bool(false), "a model that only embeds; /api/embed does that"),
    field("penalize_newline", Bool(true), "penalties that spare line breaks"),
    field("tfs_z", Number(1.0), "tail-free sampling; `min_p` and `top_p` leave out unlikely tokens"),
];

/// Options that the other routes have under the same name.
const SAMPLING: &[&str] = &[
    "temperature",
    "top_p",
    "min_p",
    "typical_p",
    "stop",
    "repeat_penalty",
    "presence_penalty",
    "frequency_penalty",
    "mirostat_tau",
    "mirostat_eta",
];

/// The same for options that are whole numbers, which some clients write with a point.
const WHOLE: &[&str] = &["top_k", "seed", "repeat_last_n", "mirostat"];

/// Words of the other routes in errors, with those of this API.
const WORDS: &[(&str, &str)] = &[
    ("response_format.json_schema.schema", "format"),
    ("response_format", "format"),
    ("n_predict", "num_predict"),
];

/// The fields of a request that were read.
pub struct TextOptions {
    /// Fields of a request to the other routes.
    pub fields: Map<String, Value>,
    pub stream: bool,
    /// The number of alternatives of each token, if they are asked for.
    pub logprobs: Option<usize>,
    /// The request only loads or unloads the model, if it has nothing to answer.
    pub unloads: bool,
    pub warnings: Vec<String>,
}

impl TextOptions {
    pub fn take(fields: &mut RequestFields, hosted: &ServedModel) -> Result<TextOptions, ApiError> {
        let mut texts = Map::new();
        let given: Map<String, Value> = fields.take_field("options", "an object")?.unwrap_or_default();
        let warnings = take_options(given, hosted, &mut texts)?;
        take_format(fields, &mut texts)?;
        take_think(fields, hosted, &mut texts)?;
        let keep: Option<Value> = fields.take_field("keep_alive", "a time")?;
        Ok(TextOptions {
            fields: texts,
            stream: fields.take_field("stream", "true or false")?.unwrap_or(true),
            logprobs: chat::logprobs(fields)?,
            unloads: keep.is_some_and(|time| time.as_f64() == Some(0.0) || time == "0" || time == "0s"),
            warnings,
        })
    }
}

/// Reads `options`; returns warnings.
fn take_options(
    given: Map<String, Value>,
    hosted: &ServedModel,
    texts: &mut Map<String, Value>,
) -> Result<Vec<String>, ApiError> {
    let mut options = RequestFields::from(given);
    for &name in SAMPLING {
        let value: Option<Value> = options.take_field(name, "a value")?;
        texts.extend(value.map(|value| (name.to_owned(), value)));
    }
    for &name in WHOLE {
        let value: Option<Value> = options.take_field(name, "a value")?;
        texts.extend(value.map(|value| (name.to_owned(), whole(value))));
    }
    // 0 and less are no limit.
    let most = whole(options.take_field("num_predict", "a whole number")?.unwrap_or(Value::Null));
    if !most.is_null() {
        let limit = if most.as_i64().is_some_and(|most| most <= 0) { json!(-1) } else { most };
        texts.insert("n_predict".into(), limit);
    }
    let wanted = whole(options.take_field("num_ctx", "a whole number")?.unwrap_or(Value::Null));
    let context = hosted.engine.limits().context;
    let warning = match (wanted.as_u64(), context) {
        (Some(wanted), Some(context)) if wanted > context as u64 => Some(format!(
            "num_ctx {wanted} is more than the context of this model: it has {context} tokens, build it with --context"
        )),
        (None, _) if !wanted.is_null() => {
            let message = format!("`num_ctx` is {}, expected a whole number", excerpt(&wanted));
            return Err(ApiError::field("options.num_ctx", "invalid_type", message));
        }
        _ => None,
    };
    options.finish(&[HINTS]).map_err(|error| {
        let param = error.param.as_deref().map(|name| format!("options.{name}"));
        ApiError { param, ..error }
    })?;
    Ok(warning.into_iter().collect())
}

/// A whole number without a point; any other value as it is.
fn whole(value: Value) -> Value {
    match value.as_f64() {
        Some(number) if value.is_f64() && number.fract() == 0.0 && number.abs() < 1e15 => {
            json!(number as i64)
        }
        _ => value,
    }
}

/// The form of the text: `json`, or a schema.
fn take_format(fields: &mut RequestFields, texts: &mut Map<String, Value>) -> Result<(), ApiError> {
    let format = match fields.take_field::<Value>("format", "`json` or a JSON schema")? {
        None => return Ok(()),
        Some(Value::String(word)) if word.is_empty() => return Ok(()),
        Some(Value::String(word)) if word == "json" => json!({"type": "json_object"}),
        Some(Value::Object(mut schema)) => {
            close_objects(&mut schema);
            json!({"type": "json_schema", "json_schema": {"name": "format", "schema": schema}})
        }
        Some(other) => {
            let message = format!("`format` is {}, expected \"json\" or a JSON schema", excerpt(&other));
            return Err(ApiError::field("format", "invalid_type", message));
        }
    };
    texts.insert("response_format".into(), format);
    Ok(())
}

/// Reads the amount of reasoning: yes or no, or an effort.
fn take_think(
    fields: &mut RequestFields,
    hosted: &ServedModel,
    texts: &mut Map<String, Value>,
) -> Result<(), ApiError> {
    const NAME: &str = "think";
    let (field, value) = match fields.take_field::<Value>(NAME, "true, false or an effort")? {
        None => return Ok(()),
        Some(Value::Bool(on)) => ("enable_thinking", Value::Bool(on)),
        Some(Value::String(effort)) => ("reasoning_effort", check_effort(NAME, effort)?.into()),
        Some(other) => {
            let message = format!("`{NAME}` is {}, expected true, false or an effort", excerpt(&other));
            return Err(ApiError::field(NAME, "invalid_type", message));
        }
    };
    if value != false && !can_think(hosted) {
        let message =
            format!("`{NAME}`: the model `{}` does not support thinking: leave it out", hosted.name);
        return Err(ApiError::field(NAME, "unsupported", message));
    }
    texts.insert(field.into(), value);
    Ok(())
}

/// True if the template of a model has reasoning, or a switch for it.
pub fn can_think(hosted: &ServedModel) -> bool {
    let switches = ["enable_thinking", "thinking", "reasoning_effort"];
    let has_switch = |format: &mlcc_engine::ChatFormat| switches.iter().any(|name| format.uses(name));
    hosted.syntax.reasoning.is_some() || hosted.format.as_ref().is_some_and(has_switch)
}

/// An error that names the fields of this API.
pub fn in_own_words(mut error: ApiError) -> ApiError {
    for (other, own) in WORDS {
        error.message = error.message.replace(&format!("`{other}`"), &format!("`{own}`"));
        if error.param.as_deref() == Some(other) {
            error.param = Some((*own).to_owned());
        }
    }
    error
}
