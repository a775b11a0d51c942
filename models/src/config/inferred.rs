//! Completes a configuration by what the tensors tell ([`crate::evidence`]), and finds heads that it does not tell of.

use super::fields::ConfigFields;
use crate::checkpoint::{Checkpoint, TensorInfo};
use crate::definition::Architecture;
use crate::error::ConfigError;
use crate::evidence::{ConfigEvidence, tensors_equal};
use crate::registry;
use serde_json::Value;

/// The fields with those that were left out, as far as the tensors tell them.
pub(crate) fn complete_fields(
    fields: &ConfigFields,
    checkpoint: &Checkpoint,
) -> Result<ConfigFields, ConfigError> {
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
pub(crate) fn stored_untied_head(architecture: &Architecture, checkpoint: &Checkpoint) -> Option<String> {
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
