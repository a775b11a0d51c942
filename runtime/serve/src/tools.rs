//! Functions that the model may call: the fields of a request for them.

use mlcc_engine::chat::Value as TemplateValue;
use serde_json::{Map, Value, json};

use crate::error::ApiError;
use crate::fields::Fields;

const MOST_TOOLS: usize = 128;
const LONGEST_NAME: usize = 64;

#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ToolChoice {
    /// The model decides.
    Auto,
    /// One call at least.
    Required,
    /// A call of this one, by its number.
    Named(usize),
}

/// Functions with what is asked of them. No tools, and `tool_choice` of `none`, are no `Tools`.
#[derive(Debug, Clone, PartialEq)]
pub struct Tools {
    /// As the chat API and templates have them.
    pub list: Vec<Value>,
    /// Names with the schemas of arguments.
    pub functions: Vec<(String, Value)>,
    pub choice: ToolChoice,
    /// Whether an answer may have several calls.
    pub parallel: bool,
}

fn wrong(param: &str, message: impl Into<String>) -> ApiError {
    ApiError::field(param, "invalid_value", message)
}

impl Tools {
    pub fn take(fields: &mut Fields) -> Result<Option<Tools>, ApiError> {
        let list: Vec<Value> = fields.take("tools", "a list of tools")?.unwrap_or_default();
        let choice: Option<Value> = fields.take("tool_choice", "`none`, `auto`, `required` or a function")?;
        let parallel = fields.take("parallel_tool_calls", "true or false")?.unwrap_or(true);
        Tools::new(list, choice, parallel)
    }

    /// `choice` in the form of the chat API.
    pub fn new(list: Vec<Value>, choice: Option<Value>, parallel: bool) -> Result<Option<Tools>, ApiError> {
        if list.len() > MOST_TOOLS {
            let message = format!("`tools` has {} tools, at most {MOST_TOOLS} are taken", list.len());
            return Err(wrong("tools", message));
        }
        let functions = list.iter().enumerate().map(function).collect::<Result<Vec<_>, _>>()?;
        for (at, (name, _)) in functions.iter().enumerate() {
            if functions[..at].iter().any(|(other, _)| other == name) {
                return Err(wrong("tools", format!("`tools` has two functions named `{name}`")));
            }
        }
        let choice = match chosen(choice.as_ref(), &functions)? {
            Some(choice) => choice,
            None => return Ok(None),
        };
        if functions.is_empty() {
            return match choice {
                ToolChoice::Auto => Ok(None),
                _ => Err(wrong("tool_choice", "`tool_choice` asks for a call, and there are no `tools`")),
            };
        }
        Ok(Some(Tools { list, functions, choice, parallel }))
    }

    /// For the template.
    pub fn for_template(&self) -> Result<TemplateValue, ApiError> {
        let value = serde_json::from_value(Value::Array(self.list.clone()));
        value.map_err(|error| wrong("tools", format!("`tools` cannot be given to the template: {error}")))
    }

    /// Those that an answer may call.
    pub fn callable(&self) -> &[(String, Value)] {
        match self.choice {
            ToolChoice::Named(at) => &self.functions[at..=at],
            ToolChoice::Auto | ToolChoice::Required => &self.functions,
        }
    }

    /// Most calls of an answer.
    pub fn most_calls(&self) -> usize {
        match (&self.choice, self.parallel) {
            (ToolChoice::Named(_), _) | (_, false) => 1,
            (ToolChoice::Auto | ToolChoice::Required, true) => usize::MAX,
        }
    }
}

/// Name and schema of a tool.
fn function((index, tool): (usize, &Value)) -> Result<(String, Value), ApiError> {
    let param = format!("tools[{index}]");
    if tool["type"] != "function" {
        return Err(ApiError::field(&param, "unsupported", format!("`{param}.type` is not `function`")));
    }
    let Some(name) = tool["function"]["name"].as_str() else {
        return Err(wrong(&param, format!("`{param}.function.name` is missing or no string")));
    };
    let plain = |c: char| c.is_ascii_alphanumeric() || "_-.".contains(c);
    if name.is_empty() || name.len() > LONGEST_NAME || !name.chars().all(plain) {
        let message = format!(
            "`{param}.function.name` is {name:.80?}, expected 1 to {LONGEST_NAME} letters, digits, `_`, `-`, `.`"
        );
        return Err(wrong(&param, message));
    }
    let schema = match &tool["function"]["parameters"] {
        // No arguments.
        Value::Null => json!({"type": "object", "properties": {}, "additionalProperties": false}),
        Value::Object(schema) => Value::Object(object(schema)),
        _ => return Err(wrong(&param, format!("`{param}.function.parameters` is no JSON schema"))),
    };
    Ok((name.to_owned(), schema))
}

/// Arguments are an object, whether the schema says so or not.
fn object(schema: &Map<String, Value>) -> Map<String, Value> {
    let mut schema = schema.clone();
    schema.entry("type").or_insert_with(|| json!("object"));
    schema
}

/// `None`: no calls.
fn chosen(choice: Option<&Value>, functions: &[(String, Value)]) -> Result<Option<ToolChoice>, ApiError> {
    let Some(choice) = choice else { return Ok(Some(ToolChoice::Auto)) };
    match choice.as_str() {
        Some("none") => return Ok(None),
        Some("auto") => return Ok(Some(ToolChoice::Auto)),
        Some("required") => return Ok(Some(ToolChoice::Required)),
        _ => {}
    }
    let Some(name) = choice["function"]["name"].as_str().filter(|_| choice["type"] == "function") else {
        return Err(wrong(
            "tool_choice",
            "`tool_choice` is none of `none`, `auto`, `required`, and no function",
        ));
    };
    match functions.iter().position(|(function, _)| function == name) {
        Some(at) => Ok(Some(ToolChoice::Named(at))),
        None => Err(wrong("tool_choice", format!("`tool_choice` names `{name}`, which is not in `tools`"))),
    }
}
