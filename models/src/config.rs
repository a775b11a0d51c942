//! `config.json`: the typed configuration of each supported architecture, with the raw JSON kept beside it.
//!
//! Sizes have to be in the file or in the shapes of the tensors; everything else may be absent, and then has the default of the
//! class in transformers. A field of a wrong type or out of range is an error that names file and field.

pub mod fields;
mod inferred;
pub mod published;
pub mod quantized;
pub mod rope;
pub mod sizes;

pub use fields::ConfigFields;
pub use rope::{RopeConfig, RopeDefaults};

use crate::checkpoint::Checkpoint;
use crate::definition::{Architecture, ModelDefinition};
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
    /// What the checkpoint made different from the JSON, for the user.
    pub warnings: Vec<String>,
    /// The JSON with what the tensors told.
    pub(crate) completed_fields: serde_json::Map<String, serde_json::Value>,
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
    pub fn from_known(
        origin: String,
        model_type: &str,
        definition: impl ModelDefinition,
        raw: serde_json::Map<String, serde_json::Value>,
    ) -> ModelConfig {
        let architecture = Architecture::new(definition);
        let completed_fields = raw.clone();
        ModelConfig {
            origin,
            model_type: model_type.to_string(),
            architecture,
            raw,
            warnings: Vec::new(),
            completed_fields,
        }
    }

    /// What the fields leave out the tensors tell; both have to agree.
    pub(crate) fn from_checkpoint(
        fields: ConfigFields,
        checkpoint: &Checkpoint,
    ) -> Result<ModelConfig, ConfigError> {
        let config = ModelConfig::from_fields(inferred::complete_fields(&fields, checkpoint)?)?;
        let config = ModelConfig { raw: fields.raw, ..config };
        match inferred::stored_untied_head(&config.architecture, checkpoint) {
            Some(head) => config.with_untied_head(&head),
            None => Ok(config),
        }
    }

    /// The same with the stored head, which the configuration ties to the embedding table. A family that cannot be untied stays.
    fn with_untied_head(self, head: &str) -> Result<ModelConfig, ConfigError> {
        let config = self.reread_with(|fields| {
            fields.insert("tie_word_embeddings".into(), false.into());
            // T5 scales what goes into a head by this field, which by default is what the flag was.
            if self.model_type.ends_with("t5") && !fields.contains_key("scale_decoder_outputs") {
                fields.insert("scale_decoder_outputs".into(), true.into());
            }
        })?;
        if config.architecture.tied_embedding().is_some() {
            return Ok(self);
        }
        let warning = format!(
            "{}: `tie_word_embeddings` is true, but the checkpoint has a head `{head}` that differs from the embedding table; \
             the stored head is used",
            self.origin
        );
        let warnings = [self.warnings, vec![warning]].concat();
        Ok(ModelConfig { warnings, ..config })
    }

    /// The same with a vocabulary of `rows`, for an adapter that brings rows of its own.
    pub(crate) fn with_vocab(&self, rows: usize) -> Result<ModelConfig, ConfigError> {
        let warnings = self.warnings.clone();
        let config = self.reread_with(|fields| {
            let field = sizes::VOCAB.into_iter().find(|field| fields.contains_key(*field));
            fields.insert(field.unwrap_or("vocab_size").into(), rows.into());
        })?;
        Ok(ModelConfig { warnings, ..config })
    }

    /// Reads the fields of the text model again, after a change of them.
    fn reread_with(
        &self,
        change: impl FnOnce(&mut serde_json::Map<String, serde_json::Value>),
    ) -> Result<ModelConfig, ConfigError> {
        let mut fields = ConfigFields { origin: self.origin.clone(), raw: self.completed_fields.clone() };
        match registry::nested_text_config(&fields)? {
            Some(mut text) => {
                change(&mut text.raw);
                fields.raw.insert(registry::TEXT_MODEL.into(), text.raw.into());
            }
            None => change(&mut fields.raw),
        }
        let texts = self.architecture.pooling_head().cloned();
        let config = ModelConfig::from_fields(fields)?;
        let architecture = config.architecture.clone().with_pooling_head(texts);
        Ok(ModelConfig { raw: self.raw.clone(), architecture, ..config })
    }

    pub(crate) fn from_fields(fields: ConfigFields) -> Result<ModelConfig, ConfigError> {
        let (model_type, architecture) = registry::read_architecture(&fields)?;
        let architecture = apply_streaming_fields(architecture, &fields)?;
        let ConfigFields { origin, raw } = fields;
        let complete = raw.clone();
        Ok(ModelConfig {
            origin,
            model_type,
            architecture,
            raw,
            warnings: Vec::new(),
            completed_fields: complete,
        })
    }
}

/// `sliding_window_size` and `attention_sink_size`, as MLC-LLM names them; not in the files of the families themselves.
fn apply_streaming_fields(
    architecture: Architecture,
    fields: &ConfigFields,
) -> Result<Architecture, ConfigError> {
    let field = "sliding_window_size";
    let none = fields.get(field).is_none_or(|v| v.as_i64() == Some(-1));
    let window = if none { None } else { Some(fields.size(field)?) };
    let sinks = fields.count_or("attention_sink_size", 0)?;
    let failed = |source| ConfigError::Stream { file: fields.origin.clone(), source };
    architecture.with_streaming_window(window, sinks).map_err(failed)
}

/// The fields of a JSON object.
pub(crate) fn into_object(value: serde_json::Value) -> serde_json::Map<String, serde_json::Value> {
    match value {
        serde_json::Value::Object(fields) => fields,
        _ => serde_json::Map::new(),
    }
}
