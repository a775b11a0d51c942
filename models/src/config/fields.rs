//! Typed access to one JSON object with errors that name file, field, expectation and what was found.

use crate::error::ConfigError;
use serde_json::{Map, Value};
use std::path::Path;

/// Larger than any size in a published model by orders of magnitude, and small enough that the bytes of a matrix fit in
/// 64 bits.
const LARGEST_SIZE: u64 = 1 << 28;

#[derive(Clone, Debug)]
pub struct ConfigFields {
    pub origin: String,
    pub raw: Map<String, Value>,
}

impl ConfigFields {
    pub fn read(path: &Path) -> Result<ConfigFields, ConfigError> {
        let origin = path.display().to_string();
        match mlcc_files::read(path, mlcc_files::FileKind::Config) {
            Ok(json) => ConfigFields::parse(&origin, &json),
            Err(source) => Err(ConfigError::Io { file: origin, source }),
        }
    }

    /// `Infinity`, which Python writes, is read as the largest number; so is `{"__float__": "Infinity"}` of newer releases of transformers.
    pub fn parse(origin: &str, json: &[u8]) -> Result<ConfigFields, ConfigError> {
        let file = origin.to_string();
        match serde_json::from_slice(&mlcc_files::json::without_infinity(json)) {
            Ok(Value::Object(mut raw)) => {
                raw.values_mut().for_each(replace_infinities);
                Ok(ConfigFields { origin: file, raw })
            }
            Ok(other) => Err(ConfigError::Json {
                file,
                detail: format!("expected an object, found {}", brief_value(&other)),
            }),
            Err(error) => Err(ConfigError::Json { file, detail: error.to_string() }),
        }
    }

    /// A field that is there and not null.
    pub fn get(&self, field: &str) -> Option<&Value> {
        self.raw.get(field).filter(|value| !value.is_null())
    }

    pub fn string(&self, field: &str) -> Result<String, ConfigError> {
        match self.get(field) {
            None => Err(self.missing_field(field, "a string")),
            Some(Value::String(text)) => Ok(text.clone()),
            Some(other) => Err(self.invalid_value(field, "a string", other)),
        }
    }

    /// A size: an integer of at least 1.
    pub fn size(&self, field: &str) -> Result<usize, ConfigError> {
        match self.get(field) {
            None => Err(self.missing_field(field, "a positive integer")),
            Some(value) => self.integer(field, value, 1),
        }
    }

    pub fn size_or(&self, field: &str, default: usize) -> Result<usize, ConfigError> {
        self.get(field).map_or(Ok(default), |value| self.integer(field, value, 1))
    }

    /// An integer of at least 0.
    pub fn count_or(&self, field: &str, default: usize) -> Result<usize, ConfigError> {
        self.get(field).map_or(Ok(default), |value| self.integer(field, value, 0))
    }

    pub fn float_or(&self, field: &str, default: f64) -> Result<f64, ConfigError> {
        match self.get(field) {
            None => Ok(default),
            Some(value) => value.as_f64().ok_or_else(|| self.invalid_value(field, "a number", value)),
        }
    }

    /// A number between 0 and 1, both excluded.
    pub fn fraction_or(&self, field: &str, default: f64) -> Result<f64, ConfigError> {
        let value = self.float_or(field, default)?;
        match value > 0.0 && value < 1.0 {
            true => Ok(value),
            false => Err(self.invalid_value(field, "a number between 0 and 1", &self.raw[field])),
        }
    }

    pub fn flag_or(&self, field: &str, default: bool) -> Result<bool, ConfigError> {
        match self.get(field) {
            None => Ok(default),
            Some(Value::Bool(flag)) => Ok(*flag),
            Some(other) => Err(self.invalid_value(field, "true or false", other)),
        }
    }

    /// Labels of the head for classification, where the file names a class with one.
    pub fn label_count(&self) -> Result<Option<usize>, ConfigError> {
        let class = self.get("architectures").and_then(|names| names.as_array()?.first()?.as_str());
        if !class.is_some_and(|class| class.ends_with("ForSequenceClassification")) {
            return Ok(None);
        }
        match self.nested_object("id2label")? {
            Some(labels) if !labels.raw.is_empty() => Ok(Some(labels.raw.len())),
            _ => self.size_or("num_labels", 2).map(Some),
        }
    }

    /// The fields of an object in this one, with its name for messages.
    pub fn nested_object(&self, field: &str) -> Result<Option<ConfigFields>, ConfigError> {
        match self.get(field) {
            None => Ok(None),
            Some(Value::Object(raw)) => {
                Ok(Some(ConfigFields { origin: format!("{}, {field}", self.origin), raw: raw.clone() }))
            }
            Some(other) => Err(self.invalid_value(field, "an object", other)),
        }
    }

    /// A list of numbers.
    pub fn numbers(&self, field: &str) -> Result<Vec<f64>, ConfigError> {
        let value = self.get(field).ok_or_else(|| self.missing_field(field, "a list of numbers"))?;
        let items = value.as_array().and_then(|items| items.iter().map(Value::as_f64).collect());
        items.ok_or_else(|| self.invalid_value(field, "a list of numbers", value))
    }

    /// A list of `N` numbers.
    pub fn numbers_or<const N: usize>(
        &self,
        field: &str,
        default: [f64; N],
    ) -> Result<[f64; N], ConfigError> {
        let Some(found) = self.get(field) else { return Ok(default) };
        let wrong = |_| self.invalid_value(field, &format!("a list of {N} numbers"), found);
        self.numbers(field)?.try_into().map_err(wrong)
    }

    /// Token ids written as one number or as a list of numbers.
    pub fn token_ids(&self, field: &str) -> Result<Vec<u32>, ConfigError> {
        let expected = "a token id or a list of token ids";
        let id = |value: &Value| value.as_u64().and_then(|id| u32::try_from(id).ok());
        let ids = match self.get(field) {
            None => Some(Vec::new()),
            Some(Value::Array(items)) => items.iter().map(id).collect(),
            Some(value) => id(value).map(|id| vec![id]),
        };
        ids.ok_or_else(|| self.invalid_value(field, expected, &self.raw[field]))
    }

    fn integer(&self, field: &str, value: &Value, least: u64) -> Result<usize, ConfigError> {
        match value.as_u64() {
            Some(number) if (least..=LARGEST_SIZE).contains(&number) => Ok(number as usize),
            _ => Err(self.invalid_value(field, &format!("an integer from {least} to {LARGEST_SIZE}"), value)),
        }
    }

    pub fn missing_field(&self, field: &str, expected: &'static str) -> ConfigError {
        ConfigError::Missing { file: self.origin.clone(), field: field.to_string(), expected }
    }

    pub fn invalid_value(&self, field: &str, expected: &str, found: &Value) -> ConfigError {
        ConfigError::Wrong {
            file: self.origin.clone(),
            field: field.to_string(),
            expected: expected.to_string(),
            found: brief_value(found),
        }
    }
}

/// Numbers in place of objects that stand for infinite ones.
fn replace_infinities(value: &mut Value) {
    let text = value.get("__float__").and_then(Value::as_str);
    if let Some(number) = text.and_then(|text| text.parse::<f64>().ok()).filter(|number| !number.is_nan()) {
        *value = Value::from(number.clamp(f64::MIN, f64::MAX));
        return;
    }
    match value {
        Value::Array(items) => items.iter_mut().for_each(replace_infinities),
        Value::Object(fields) => fields.values_mut().for_each(replace_infinities),
        Value::Null | Value::Bool(_) | Value::Number(_) | Value::String(_) => {}
    }
}

/// A JSON value for a message: as it is when short, else its kind.
fn brief_value(value: &Value) -> String {
    match value {
        Value::Array(items) => format!("a list of {} elements", items.len()),
        Value::Object(fields) => format!("an object with {} fields", fields.len()),
        Value::String(text) if text.chars().count() > 60 => format!("a string of {} bytes", text.len()),
        other => other.to_string(),
    }
}
