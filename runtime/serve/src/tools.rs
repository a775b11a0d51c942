//! Functions that the model may call: the fields of a request for them.

use mlcc_text::chat::TemplateValue;
use serde_json::{Map, Value, json};

use crate::error::ApiError;
use crate::fields::RequestFields;

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

/// Functions with what is asked of them. No tools, and `tool_choice` of `none`, are no `ToolSet`.
#[derive(Debug, Clone, PartialEq)]
pub struct ToolSet {
    /// The tools in the form of the chat API and of templates.
    pub list: Vec<Value>,
    /// Names with the schemas of arguments.
    pub functions: Vec<(String, Value)>,
    pub choice: ToolChoice,
    /// True if an answer may have several calls.
    pub parallel: bool,
}

/// The request's tools, and the parts of it that are left out.
#[derive(Debug, Default, PartialEq)]
pub struct AskedTools {
    /// Functions that the model may call.
    pub tools: Option<ToolSet>,
    /// Warnings about tools that are no functions: those of a provider, which a client sends to every server.
    pub warnings: Vec<String>,
}

fn wrong(param: &str, message: impl Into<String>) -> ApiError {
    ApiError::field(param, "invalid_value", message)
}

impl ToolSet {
    pub fn take(fields: &mut RequestFields) -> Result<AskedTools, ApiError> {
        let list: Vec<Value> = fields.take_field("tools", "a list of tools")?.unwrap_or_default();
        let choice: Option<Value> =
            fields.take_field("tool_choice", "`none`, `auto`, `required` or a function")?;
        let parallel = fields.take_field("parallel_tool_calls", "true or false")?.unwrap_or(true);
        ToolSet::read(list, choice, parallel)
    }

    /// `choice` in the form of the chat API.
    fn read(list: Vec<Value>, choice: Option<Value>, parallel: bool) -> Result<AskedTools, ApiError> {
        if list.len() > MOST_TOOLS {
            let message = format!("`tools` has {} tools, at most {MOST_TOOLS} are allowed", list.len());
            return Err(wrong("tools", message));
        }
        let (mut kept, mut functions, mut warnings) = (Vec::new(), Vec::new(), Vec::new());
        for (index, tool) in list.into_iter().enumerate() {
            match tool["type"].as_str().filter(|kind| *kind != "function") {
                Some(kind) => warnings.push(left_out(index, kind)),
                None => {
                    functions.push(function((index, &tool))?);
                    kept.push(tool);
                }
            }
        }
        for (at, (name, _)) in functions.iter().enumerate() {
            if functions[..at].iter().any(|(other, _)| other == name) {
                return Err(wrong("tools", format!("`tools` has two functions named `{name}`")));
            }
        }
        let Some(ChosenTools { choice, allowed }) = chosen(choice.as_ref(), &functions)? else {
            return Ok(AskedTools { tools: None, warnings });
        };
        if let Some(allowed) = allowed {
            // The model is not told of the others, so that it has no reason to call them.
            kept = allowed.iter().filter_map(|&at| kept.get(at).cloned()).collect();
            functions = allowed.iter().filter_map(|&at| functions.get(at).cloned()).collect();
        }
        if functions.is_empty() {
            let message = "`tool_choice` asks for a call, but there is no function in `tools`";
            return match choice {
                ToolChoice::Auto => Ok(AskedTools { tools: None, warnings }),
                _ => Err(wrong("tool_choice", message)),
            };
        }
        Ok(AskedTools { tools: Some(ToolSet { list: kept, functions, choice, parallel }), warnings })
    }

    /// The tools for the template.
    pub fn for_template(&self) -> Result<TemplateValue, ApiError> {
        let value = serde_json::from_value(Value::Array(self.list.clone()));
        value.map_err(|error| wrong("tools", format!("`tools` cannot be given to the template: {error}")))
    }

    /// The functions that an answer may call.
    pub fn callable(&self) -> &[(String, Value)] {
        match self.choice {
            ToolChoice::Named(at) => &self.functions[at..=at],
            ToolChoice::Auto | ToolChoice::Required => &self.functions,
        }
    }

    /// Names of those whose arguments have to be as their schema says, all of it.
    pub fn strict(&self) -> Vec<String> {
        let strict = |tool: &&Value| tool["function"]["strict"] == true;
        let name = |tool: &Value| tool["function"]["name"].as_str().map(str::to_owned);
        self.list.iter().filter(strict).filter_map(name).collect()
    }

    /// Most calls of an answer.
    pub fn most_calls(&self) -> usize {
        match (&self.choice, self.parallel) {
            (ToolChoice::Named(_), _) | (_, false) => 1,
            (ToolChoice::Auto | ToolChoice::Required, true) => usize::MAX,
        }
    }
}

fn left_out(index: usize, kind: &str) -> String {
    let kind: String = kind.chars().filter(char::is_ascii_graphic).take(LONGEST_NAME).collect();
    format!("tools[{index}] of type {kind} is left out: the model can only call functions")
}

/// Name and schema of a tool.
fn function((index, tool): (usize, &Value)) -> Result<(String, Value), ApiError> {
    let param = format!("tools[{index}]");
    if tool["type"] != "function" {
        return Err(wrong(&param, format!("`{param}.type` is missing or no string")));
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
        _ => return Err(wrong(&param, format!("`{param}.function.parameters` is not a JSON schema"))),
    };
    Ok((name.to_owned(), schema))
}

/// Arguments are an object, whether the schema says so or not.
fn object(schema: &Map<String, Value>) -> Map<String, Value> {
    let mut schema = schema.clone();
    schema.entry("type").or_insert_with(|| json!("object"));
    schema
}

/// The meaning of a `tool_choice`.
struct ChosenTools {
    choice: ToolChoice,
    /// The functions that may be called, if not all.
    allowed: Option<Vec<usize>>,
}

impl From<ToolChoice> for ChosenTools {
    fn from(choice: ToolChoice) -> ChosenTools {
        ChosenTools { choice, allowed: None }
    }
}

/// `None`: no calls.
fn chosen(choice: Option<&Value>, functions: &[(String, Value)]) -> Result<Option<ChosenTools>, ApiError> {
    let Some(choice) = choice else { return Ok(Some(ToolChoice::Auto.into())) };
    match choice.as_str() {
        Some("none") => return Ok(None),
        Some("auto") => return Ok(Some(ToolChoice::Auto.into())),
        Some("required") => return Ok(Some(ToolChoice::Required.into())),
        _ => {}
    }
    if choice["type"] == "allowed_tools" {
        return allowed(choice, functions).map(Some);
    }
    let Some(name) = choice["function"]["name"].as_str().filter(|_| choice["type"] == "function") else {
        let message =
            "`tool_choice` is none of `none`, `auto`, `required`, and neither a function nor `allowed_tools`";
        return Err(wrong("tool_choice", message));
    };
    Ok(Some(ToolChoice::Named(position(name, functions)?).into()))
}

fn position(name: &str, functions: &[(String, Value)]) -> Result<usize, ApiError> {
    let at = functions.iter().position(|(function, _)| function == name);
    at.ok_or_else(|| {
        wrong("tool_choice", format!("`tool_choice` names `{name:.80}`, which is not a function in `tools`"))
    })
}

/// Some of the functions alone, by a mode; in the form of the chat API, or in that of the Responses API.
fn allowed(choice: &Value, functions: &[(String, Value)]) -> Result<ChosenTools, ApiError> {
    let inner = if choice["allowed_tools"].is_object() { &choice["allowed_tools"] } else { choice };
    let mode = match inner["mode"].as_str() {
        None | Some("auto") => ToolChoice::Auto,
        Some("required") => ToolChoice::Required,
        Some(_) => return Err(wrong("tool_choice", "`tool_choice.mode` is neither `auto` nor `required`")),
    };
    let Some(tools) = inner["tools"].as_array() else {
        return Err(wrong("tool_choice", "`tool_choice.tools` is missing or no list"));
    };
    let mut allowed = Vec::new();
    for tool in tools {
        // Others are left out of `tools` as well.
        if tool["type"].as_str().is_some_and(|kind| kind != "function") {
            continue;
        }
        let name = tool["function"]["name"].as_str().or(tool["name"].as_str());
        let name =
            name.ok_or_else(|| wrong("tool_choice", "a function in `tool_choice.tools` has no name"))?;
        let at = position(name, functions)?;
        if !allowed.contains(&at) {
            allowed.push(at);
        }
    }
    allowed.sort_unstable();
    Ok(ChosenTools { choice: mode, allowed: Some(allowed) })
}
