//! From the fields of a config.json to a configured model: which of the [`families`](crate::families) reads them.

use crate::config::published::{GGUF_DENSE, GGUF_POOLING, PublishedFields};
use crate::config::sizes::HIDDEN;
use crate::config::{ConfigFields, published};
use crate::definition::Architecture;
use crate::error::ConfigError;
use crate::families;
use crate::family::FamilyVariant;
use crate::pooling_head::{PoolingHead, PoolingMode, PoolingOutput, PoolingStep};
use mlcc_files::did_you_mean;
use serde_json::Value;

/// The field with the configuration of the text model inside of a model that also takes images or sounds.
pub(crate) const TEXT_MODEL: &str = "text_config";

/// The model type and the configured model: by `model_type`, else by the class in `architectures`.
pub(crate) fn read_architecture(fields: &ConfigFields) -> Result<(String, Architecture), ConfigError> {
    let (model_type, entry) = find_entry(fields)?;
    let text = nested_text_config(fields)?;
    let class = match &text {
        Some(text) => text.get("model_type").and_then(Value::as_str).map(str::to_string),
        None => Some(entry.model_type.to_string()),
    };
    // The text model inside of a model is a class of its own.
    let class = class.unwrap_or_else(|| format!("{}_text", entry.model_type.trim_end_matches("_text")));
    let read = text.as_ref().unwrap_or(fields);
    let known = families::variants().find(|variant| variant.model_type == class);
    let known = known.map_or(PublishedFields::UNKNOWN, |variant| variant.fields);
    published::reject_unbuilt_values(&known, read)?;
    let architecture = (entry.read)(&published::with_defaults(&known, read))?;
    let head = read_pooling_head(fields, &architecture)?;
    Ok((model_type, architecture.with_pooling_head(head)))
}

/// What is made of texts, where the configuration says it and the architecture has not read it itself, as encoders read their
/// classifiers.
fn read_pooling_head(
    fields: &ConfigFields,
    architecture: &Architecture,
) -> Result<Option<PoolingHead>, ConfigError> {
    let classifies = architecture.pooling_head().is_some_and(|head| head.output == PoolingOutput::Scores);
    if !architecture.supports_pooling() || classifies {
        return Ok(None);
    }
    if let (Some(labels), None) = (fields.label_count()?, architecture.pooling_head()) {
        return Ok(Some(PoolingHead::classification(labels)));
    }
    let Some(found) = fields.get(GGUF_POOLING) else { return Ok(None) };
    let known = found.as_str().and_then(PoolingMode::from_name);
    let mut head = PoolingHead::embedding(
        known.ok_or_else(|| fields.invalid_value(GGUF_POOLING, "cls, mean or lasttoken", found))?,
    );
    let widths = if fields.get(GGUF_DENSE).is_some() { fields.numbers(GGUF_DENSE)? } else { Vec::new() };
    let dense = widths.into_iter().zip(2..).map(|(out, number): (f64, usize)| PoolingStep::Linear {
        name: format!("{number}_Dense.linear"),
        out: out as usize,
        bias: false,
    });
    head.steps.splice(..0, dense);
    Ok(Some(head))
}

/// The configuration of the text model inside, if the file has no sizes outside of it. Whether the head is the embedding, and
/// which tokens stand for images, may stand outside.
pub(crate) fn nested_text_config(fields: &ConfigFields) -> Result<Option<ConfigFields>, ConfigError> {
    if fields.get(fields.first_present(&HIDDEN)).is_some() {
        return Ok(None);
    }
    let Some(mut text) = fields.nested_object(TEXT_MODEL)? else { return Ok(None) };
    for field in ["tie_word_embeddings", "image_token_id", "video_token_id"] {
        if let (None, Some(outside)) = (text.get(field), fields.get(field)) {
            text.raw.insert(field.to_string(), outside.clone());
        }
    }
    Ok(Some(text))
}

/// The model type as the configuration calls it, and the family.
pub(crate) fn find_entry(fields: &ConfigFields) -> Result<(String, &'static FamilyVariant), ConfigError> {
    let class = class_name(fields);
    let by_class = families::variants().find(|e| class.is_some_and(|c| e.classes.contains(&c)));
    let model_type = match (fields.get("model_type"), by_class) {
        (None, Some(entry)) => entry.model_type.to_string(),
        _ => fields.string("model_type")?,
    };
    refuse_not_planned(fields, &model_type)?;
    let of_type = |model_type: &str| families::variants().find(|e| e.model_type == model_type);
    if let Some(text) = nested_text_config(fields)? {
        // What stands around the text model may have a name of its own.
        return match of_type(&model_type).or(by_class) {
            Some(entry) => Ok((model_type, entry)),
            None => find_entry(&text),
        };
    }
    refuse_other_inputs(fields)?;
    match of_type(&model_type).or(by_class) {
        Some(entry) => Ok((model_type, entry)),
        None => {
            let file = fields.origin.clone();
            let near = did_you_mean(&model_type, families::variants().map(|entry| entry.model_type));
            Err(ConfigError::UnknownModelType { file, found: model_type, near })
        }
    }
}

/// Fields of configurations that only parts of a model have which are not read, and what those are.
const NOT_PLANNED: [(&str, &str); 4] = [
    ("index_topk", "sparse attention with an indexer"),
    ("hc_mult", "hyper-connections"),
    ("hyper_connection_size", "hyper-connections"),
    ("ngram_size", "a table of n-grams"),
];

/// Parts of models that are published as models of their own, by the end of their type.
const PARTS: [(&str, &str); 5] = [
    ("_vision", "a tower for images"),
    ("_vision_model", "a tower for images"),
    ("_audio", "a tower for sounds"),
    ("_assistant", "a draft head"),
    ("_mtp", "a draft head"),
];

/// Models with parts that are not going to be read soon, by name: what they lack would not be seen in a list of families.
fn refuse_not_planned(fields: &ConfigFields, model_type: &str) -> Result<(), ConfigError> {
    let by_field = NOT_PLANNED.iter().find(|(field, _)| fields.get(field).is_some());
    let by_field = by_field.map(|(field, what)| format!("{what} (`{field}`)"));
    let by_type =
        PARTS.iter().find(|(end, _)| model_type.ends_with(end)).map(|(_, what)| (*what).to_string());
    match by_field.or(by_type) {
        None => Ok(()),
        Some(what) => Err(ConfigError::NotSupportedYet {
            file: fields.origin.clone(),
            what: format!("{what}, as model_type `{model_type}` has it,"),
            supported: "models of text without sparse indexers, hyper-connections and tables of n-grams"
                .to_string(),
        }),
    }
}

/// Models that also take images or sounds have a configuration for that part; what is read of them is a text model that
/// has a configuration of its own ([`nested_text_config`]).
fn refuse_other_inputs(fields: &ConfigFields) -> Result<(), ConfigError> {
    let parts =
        ["vision_config", "vision_tower", "mm_vision_tower", "visual", "audio_config", "img_processor"];
    match parts.iter().find(|part| fields.get(part).is_some()) {
        None => Ok(()),
        Some(part) => Err(ConfigError::NotSupportedYet {
            file: fields.origin.clone(),
            what: format!("a model with image or audio input (`{part}`)"),
            supported: "models of text only".to_string(),
        }),
    }
}

/// The first name in `architectures`.
fn class_name(fields: &ConfigFields) -> Option<&str> {
    fields.get("architectures")?.as_array()?.first()?.as_str()
}
