//! `config.json`: the typed configuration of each supported architecture, with the raw JSON kept beside it.
//!
//! Sizes have to be in the file; everything with one published default may be absent. A field of a wrong type or out of
//! range is an error that names file and field.

pub mod fields;
pub mod rwkv4;

pub use fields::ConfigFields;
pub use rwkv4::Rwkv4Config;

use crate::checkpoint::Distribution;
use crate::error::ConfigError;
use crate::{naming, registry};
use std::path::Path;

/// The typed configuration, one variant per model definition.
#[derive(Clone, Debug, PartialEq)]
pub enum Architecture {
    Rwkv4(Rwkv4Config),
}

impl Architecture {
    /// Size of the vocabulary, which the tokenizer has to fit.
    pub fn vocab(&self) -> usize {
        match self {
            Architecture::Rwkv4(config) => config.vocab,
        }
    }

    /// Canonical name and shape of every tensor that the checkpoint has to have.
    pub fn tensors(&self) -> Vec<(String, Vec<usize>)> {
        match self {
            Architecture::Rwkv4(config) => naming::rwkv4_tensors(config),
        }
    }

    /// The canonical name of a tensor of the checkpoint.
    pub fn canonical_name(&self, stored_name: &str) -> String {
        match self {
            Architecture::Rwkv4(_) => naming::rwkv4_canonical(stored_name),
        }
    }

    /// Random values for a tensor that keep the model in a sane range.
    pub fn distribution(&self, name: &str, shape: &[usize]) -> Distribution {
        match self {
            Architecture::Rwkv4(_) => naming::rwkv4_distribution(name, shape),
        }
    }

    /// Length the model was trained with; a recurrent model may go beyond it.
    pub fn context_length(&self) -> usize {
        match self {
            Architecture::Rwkv4(config) => config.context_length,
        }
    }
}

/// What is known about a model before its weights are read.
#[derive(Clone, Debug, PartialEq)]
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

    /// A configuration that was not read from a file.
    pub fn rwkv4(origin: String, config: Rwkv4Config) -> ModelConfig {
        let raw = config.to_fields();
        ModelConfig { origin, model_type: "rwkv".to_string(), architecture: Architecture::Rwkv4(config), raw }
    }

    fn from_fields(fields: ConfigFields) -> Result<ModelConfig, ConfigError> {
        let model_type = fields.string("model_type")?;
        let architecture = registry::architecture(&model_type, &fields)?;
        let ConfigFields { origin, raw } = fields;
        Ok(ModelConfig { origin, model_type, architecture, raw })
    }
}
