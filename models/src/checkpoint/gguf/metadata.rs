//! Key-value pairs of a GGUF file.

use crate::error::CheckpointError;
use std::collections::BTreeMap;

#[derive(Clone, Debug, PartialEq)]
pub enum MetadataValue {
    /// All unsigned types, and bool as an array element.
    Unsigned(u64),
    Signed(i64),
    /// f32 values are kept as the shortest decimal that reads back to them, so that 1e-6 stays 1e-6.
    Float(f64),
    Bool(bool),
    String(String),
    Unsigneds(Vec<u64>),
    Signeds(Vec<i64>),
    Floats(Vec<f64>),
    Bools(Vec<bool>),
    Strings(Vec<String>),
}

impl MetadataValue {
    /// For messages.
    pub fn kind(&self) -> &'static str {
        match self {
            MetadataValue::Unsigned(_) | MetadataValue::Signed(_) => "an integer",
            MetadataValue::Float(_) => "a float",
            MetadataValue::Bool(_) => "a bool",
            MetadataValue::String(_) => "a string",
            MetadataValue::Unsigneds(_) | MetadataValue::Signeds(_) => "a list of integers",
            MetadataValue::Floats(_) => "a list of floats",
            MetadataValue::Bools(_) => "a list of bools",
            MetadataValue::Strings(_) => "a list of strings",
        }
    }

    pub fn as_u64(&self) -> Option<u64> {
        match self {
            MetadataValue::Unsigned(number) => Some(*number),
            MetadataValue::Signed(number) => u64::try_from(*number).ok(),
            _ => None,
        }
    }

    pub fn as_f64(&self) -> Option<f64> {
        match self {
            MetadataValue::Float(number) => Some(*number),
            MetadataValue::Unsigned(number) => Some(*number as f64),
            MetadataValue::Signed(number) => Some(*number as f64),
            _ => None,
        }
    }

    /// One number, or a list whose elements are all equal (sizes that may differ from layer to layer). Layers that lack a part have
    /// a 0.
    fn as_uniform_u64(&self) -> Option<u64> {
        let numbers: Vec<u64> = match self {
            MetadataValue::Unsigneds(list) => list.clone(),
            MetadataValue::Signeds(list) => {
                list.iter().map(|&number| u64::try_from(number)).collect::<Result<_, _>>().ok()?
            }
            other => return other.as_u64(),
        };
        let most = numbers.iter().copied().max()?;
        numbers.iter().all(|&number| number == most || number == 0).then_some(most)
    }
}

/// The pairs by key, with typed access.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct GgufMetadata {
    /// The file, for messages.
    pub origin: String,
    pub values: BTreeMap<String, MetadataValue>,
}

impl GgufMetadata {
    pub fn get(&self, key: &str) -> Option<&MetadataValue> {
        self.values.get(key)
    }

    /// A value that is there has to be of the kind asked for.
    fn get_typed<'a, T>(
        &'a self,
        key: &str,
        expected: &str,
        read: impl Fn(&'a MetadataValue) -> Option<T>,
    ) -> Result<Option<T>, CheckpointError> {
        let Some(value) = self.get(key) else { return Ok(None) };
        match read(value) {
            Some(value) => Ok(Some(value)),
            None => Err(CheckpointError::Unsupported {
                file: self.origin.clone(),
                detail: format!("metadata `{key}` should be {expected}, found {}", value.kind()),
            }),
        }
    }

    pub fn string(&self, key: &str) -> Result<Option<&str>, CheckpointError> {
        self.get_typed(key, "a string", |value| match value {
            MetadataValue::String(text) => Some(text.as_str()),
            _ => None,
        })
    }
    pub fn number(&self, key: &str) -> Result<Option<u64>, CheckpointError> {
        self.get_typed(key, "a number, equal for all layers", MetadataValue::as_uniform_u64)
    }
    pub fn float(&self, key: &str) -> Result<Option<f64>, CheckpointError> {
        self.get_typed(key, "a number", MetadataValue::as_f64)
    }
    pub fn flag(&self, key: &str) -> Result<Option<bool>, CheckpointError> {
        self.get_typed(key, "a bool", |value| match value {
            MetadataValue::Bool(flag) => Some(*flag),
            _ => None,
        })
    }
    pub fn strings(&self, key: &str) -> Result<&[String], CheckpointError> {
        let list = self.get_typed(key, "a list of strings", |value| match value {
            MetadataValue::Strings(list) => Some(list.as_slice()),
            _ => None,
        })?;
        Ok(list.unwrap_or(&[]))
    }
    pub fn floats(&self, key: &str) -> Result<&[f64], CheckpointError> {
        let list = self.get_typed(key, "a list of floats", |value| match value {
            MetadataValue::Floats(list) => Some(list.as_slice()),
            _ => None,
        })?;
        Ok(list.unwrap_or(&[]))
    }
    pub fn bools(&self, key: &str) -> Result<&[bool], CheckpointError> {
        let list = self.get_typed(key, "a list of bools", |value| match value {
            MetadataValue::Bools(list) => Some(list.as_slice()),
            _ => None,
        })?;
        Ok(list.unwrap_or(&[]))
    }
    pub fn integers(&self, key: &str) -> Result<Vec<i64>, CheckpointError> {
        let list = self.get_typed(key, "a list of integers", |value| match value {
            MetadataValue::Signeds(list) => Some(list.clone()),
            MetadataValue::Unsigneds(list) => list.iter().map(|&n| i64::try_from(n).ok()).collect(),
            _ => None,
        })?;
        Ok(list.unwrap_or_default())
    }

    /// `general.architecture`.
    pub fn architecture(&self) -> Result<&str, CheckpointError> {
        self.string("general.architecture")?.ok_or_else(|| CheckpointError::Unsupported {
            file: self.origin.clone(),
            detail: "has no `general.architecture`, so the model is unknown".to_string(),
        })
    }
}
