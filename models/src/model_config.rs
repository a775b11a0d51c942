//! The typed configuration of a model, with the raw JSON kept beside it.

use crate::checkpoint::{Checkpoint, TensorInfo};
use crate::config::ConfigFields;
use crate::config::sizes::VOCAB;
use crate::definition::Architecture;
use crate::error::ConfigError;
use crate::evidence::{ConfigEvidence, tensors_equal};
use crate::families::rwkv_files;
use crate::registry;
use serde_json::Value;
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

    /// Of an RWKV without config.json: version and sizes by its tensors.
    pub fn of_rwkv_tensors(checkpoint: &Checkpoint) -> Result<ModelConfig, ConfigError> {
        ModelConfig::from_fields(rwkv_files::infer_fields(checkpoint)?)
    }

    /// What the fields leave out the tensors tell; both have to agree.
    pub(crate) fn from_checkpoint(
        fields: ConfigFields,
        checkpoint: &Checkpoint,
    ) -> Result<ModelConfig, ConfigError> {
        let config = ModelConfig::from_fields(complete_fields(&fields, checkpoint)?)?;
        let config = ModelConfig { raw: fields.raw, ..config };
        match stored_untied_head(&config.architecture, checkpoint) {
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
            let field = VOCAB.into_iter().find(|field| fields.contains_key(*field));
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

/// The fields with those that were left out, as far as the tensors tell them.
fn complete_fields(fields: &ConfigFields, checkpoint: &Checkpoint) -> Result<ConfigFields, ConfigError> {
    let variant = registry::find_entry(fields)?.1;
    let mut complete = fields.clone();
    let nested = registry::nested_text_config(fields)?;
    let is_nested = nested.is_some();
    let mut tensors = ConfigEvidence::new(nested.unwrap_or_else(|| fields.clone()), checkpoint);
    (variant.infer)(&mut tensors)?;
    match is_nested {
        true => drop(complete.raw.insert(registry::TEXT_MODEL.into(), Value::Object(tensors.fields.raw))),
        false => complete = tensors.fields,
    }
    Ok(complete)
}

/// The stored name of a head that the configuration ties to the embedding table and that has other values; checkpoints have one after
/// a training of the head, or a merge of an adapter.
fn stored_untied_head(architecture: &Architecture, checkpoint: &Checkpoint) -> Option<String> {
    let (embedding, head) = architecture.tied_embedding()?;
    let find = |name: &str| {
        let is_it = |info: &&TensorInfo| {
            architecture.canonical_name(&info.listed_name) == name && info.dtype.is_weight()
        };
        checkpoint.tensors().iter().find(is_it)
    };
    let (table, head) = (find(embedding)?, find(head)?);
    (!tensors_equal(checkpoint, &table.name, &head.name)).then(|| head.stored_name.clone())
}
