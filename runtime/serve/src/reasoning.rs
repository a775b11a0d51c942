//! The request's fields about the model's reasoning: how much, whether it is returned, and where.
//!
//! Templates read `reasoning_effort`, and `enable_thinking` or `thinking`; as in vLLM an effort other than
//! `none` turns thinking on. Values that the request gives the template by itself (`chat_template_kwargs`)
//! stay.

use mlcc_text::chat::TemplateValue;
use serde_json::Value;

use crate::error::ApiError;
use crate::fields::RequestFields;

/// Efforts, from none to all that the model can.
const EFFORTS: [&str; 7] = ["none", "minimal", "low", "medium", "high", "xhigh", "max"];
/// Names of the templates' switches of the model's reasoning.
const SWITCHES: [&str; 2] = ["enable_thinking", "thinking"];

/// The request's wish for the reasoning of an answer.
#[derive(Debug, Clone, PartialEq)]
pub struct ReasoningRequest {
    effort: Option<String>,
    thinks: Option<bool>,
    /// The answer tells it.
    pub told: bool,
    /// It is no part of the text.
    pub apart: bool,
}

fn wrong(param: &str, message: String) -> ApiError {
    ApiError::field(param, "invalid_value", message)
}

impl ReasoningRequest {
    pub fn take(fields: &mut RequestFields) -> Result<ReasoningRequest, ApiError> {
        let effort: Option<String> = fields.take_field("reasoning_effort", "a string")?;
        let mut effort = effort.map(|effort| check_effort("reasoning_effort", effort)).transpose()?;
        let mut thinks: Option<bool> = fields.take_field("enable_thinking", "true or false")?;
        if let Some(thinking) =
            fields.take_field::<Value>("thinking", "an object with a `type`, or true or false")?
        {
            thinks = Some(switched(&thinking)?);
        }
        let mut told = fields.take_field("include_reasoning", "true or false")?.unwrap_or(true);
        // The form of OpenRouter.
        if let Some(Value::Object(asked)) = fields.take_field("reasoning", "an object")? {
            for (name, value) in asked {
                match (name.as_str(), value) {
                    (_, Value::Null) | ("max_tokens" | "summary" | "generate_summary", _) => {}
                    ("effort", Value::String(text)) => effort = Some(check_effort("reasoning.effort", text)?),
                    ("enabled", Value::Bool(on)) => thinks = Some(on),
                    ("exclude", Value::Bool(left_out)) => told &= !left_out,
                    (name, _) => {
                        let message = format!("`reasoning.{name:.60}` is unknown, or of another type");
                        return Err(wrong("reasoning", message));
                    }
                }
            }
        }
        let format: Option<String> = fields.take_field("reasoning_format", "a string")?;
        let apart = match format.as_deref() {
            None | Some("auto" | "deepseek") => true,
            Some("none") => false,
            Some(other) => {
                let message =
                    format!("`reasoning_format` is {other:.60?}, expected `auto`, `deepseek` or `none`");
                return Err(wrong("reasoning_format", message));
            }
        };
        Ok(ReasoningRequest { effort, thinks, told, apart })
    }

    /// The template's variables for it.
    pub fn variables(&self) -> Vec<(String, TemplateValue)> {
        let thinks = self.thinks.or(self.effort.as_ref().map(|effort| effort != EFFORTS[0]));
        let switches = SWITCHES.iter().filter_map(|name| Some(((*name).to_owned(), thinks?.into())));
        let effort = self.effort.as_deref().map(|effort| ("reasoning_effort".to_owned(), effort.into()));
        effort.into_iter().chain(switches).collect()
    }
}

/// `effort`, if there is one of that name.
pub fn check_effort(param: &str, effort: String) -> Result<String, ApiError> {
    match EFFORTS.contains(&effort.as_str()) {
        true => Ok(effort),
        false => {
            Err(wrong(param, format!("`{param}` is {effort:.60?}, expected one of {}", EFFORTS.join(", "))))
        }
    }
}

/// True if `thinking` turns it on.
fn switched(thinking: &Value) -> Result<bool, ApiError> {
    match (thinking, thinking["type"].as_str()) {
        (Value::Bool(on), _) => Ok(*on),
        (_, Some("enabled" | "adaptive" | "auto")) => Ok(true),
        (_, Some("disabled")) => Ok(false),
        _ => Err(wrong(
            "thinking",
            "`thinking.type` is none of `enabled`, `adaptive`, `auto`, `disabled`".into(),
        )),
    }
}
