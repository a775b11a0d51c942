//! `config.json`: the typed configuration of each supported architecture, with the raw JSON kept beside it.
//!
//! Sizes have to be in the file or in the shapes of the tensors; everything with one published default may be absent. A
//! field of a wrong type or out of range is an error that names file and field.

pub mod fields;
pub mod quantized;
pub mod rope;
pub mod sizes;
mod told;

pub use fields::ConfigFields;
pub use rope::{RopeConfig, RopeDefaults};

use crate::checkpoint::Checkpoint;
use crate::definition::{Architecture, Definition};
use crate::error::ConfigError;
use crate::registry;
use std::path::Path;

/// What is known about a model before its weights are read.
#[derive(Clone, Debug)]
pub struct ModelConfig {
    /// File the configuration came from, or how it was made; only for messages.
    pub origin: String,
    pub model_type: String,
    pub architecture: Architecture,
    /// The JSON as it was, for metadata. Empty object where there was no file.
    pub raw: serde_json::Map<String, serde_json::Value>,
}

impl ModelConfig {
    pub fn read(path: &Path) -> Result<ModelConfig, ConfigError> {
        ModelConfig::from_fields(ConfigFields::read(path)?)
    }

    /// `origin` names the file in messages.
    pub fn parse(origin: &str, json: &[u8]) -> Result<ModelConfig, ConfigError> {
        ModelConfig::from_fields(ConfigFields::parse(origin, json)?)
    }

    /// A configuration that was not read from a file; `raw` is what its config.json would say.
    pub fn known(
        origin: String,
        model_type: &str,
        definition: impl Definition,
        raw: serde_json::Map<String, serde_json::Value>,
    ) -> ModelConfig {
        let architecture = Architecture::new(definition);
        ModelConfig { origin, model_type: model_type.to_string(), architecture, raw }
    }

    /// What the fields leave out the tensors tell; both have to agree.
    pub(crate) fn of_checkpoint(
        fields: ConfigFields,
        checkpoint: &Checkpoint,
    ) -> Result<ModelConfig, ConfigError> {
        let config = ModelConfig::from_fields(told::complete(&fields, checkpoint)?)?;
        Ok(ModelConfig { raw: fields.raw, ..config })
    }

    pub(crate) fn from_fields(fields: ConfigFields) -> Result<ModelConfig, ConfigError> {
        let (model_type, architecture) = registry::architecture(&fields)?;
        let architecture = streaming(architecture, &fields)?;
        let ConfigFields { origin, raw } = fields;
        Ok(ModelConfig { origin, model_type, architecture, raw })
    }
}

/// `sliding_window_size` and `attention_sink_size`, as MLC-LLM names them; not in the files of the families themselves.
fn streaming(architecture: Architecture, fields: &ConfigFields) -> Result<Architecture, ConfigError> {
    let field = "sliding_window_size";
    let none = fields.get(field).is_none_or(|v| v.as_i64() == Some(-1));
    let window = if none { None } else { Some(fields.size(field)?) };
    let sinks = fields.count_or("attention_sink_size", 0)?;
    let failed = |source| ConfigError::Stream { file: fields.origin.clone(), source };
    architecture.with_stream(window, sinks).map_err(failed)
}

/// The fields of a JSON object.
pub(crate) fn object(value: serde_json::Value) -> serde_json::Map<String, serde_json::Value> {
    match value {
        serde_json::Value::Object(fields) => fields,
        _ => serde_json::Map::new(),
    }
}
