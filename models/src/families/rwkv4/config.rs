//! Configuration of RWKV-4 as `RwkvConfig` of Hugging Face transformers writes it.

use crate::config::ConfigFields;
use crate::error::ConfigError;

/// Defaults of `RwkvConfig`; all published RWKV-4 checkpoints use them.
pub const LAYER_NORM_EPSILON: f64 = 1e-5;
pub const RESCALE_EVERY: usize = 6;
pub const CONTEXT_LENGTH: usize = 1024;

/// The largest published model has 40. A limit keeps a damaged file from asking for millions of tensors.
const MOST_LAYERS: usize = 1000;

#[derive(Clone, Debug, PartialEq)]
pub struct Rwkv4Config {
    pub vocab: usize,
    pub hidden: usize,
    /// Width of r, k, v and of the wkv state.
    pub attention_hidden: usize,
    /// Width of the channel-mix key.
    pub intermediate: usize,
    pub layers: usize,
    pub layer_norm_epsilon: f64,
    /// Hidden values are halved after this many layers at inference, 0 = never. Keeps f16 from overflowing.
    pub rescale_every: usize,
    pub context_length: usize,
    pub bos_token_id: Option<u32>,
    pub eos_token_ids: Vec<u32>,
}

impl Rwkv4Config {
    /// A published shape: everything but the sizes at its default.
    pub fn of_size(vocab: usize, hidden: usize, layers: usize) -> Rwkv4Config {
        Rwkv4Config {
            vocab,
            hidden,
            attention_hidden: hidden,
            intermediate: 4 * hidden,
            layers,
            layer_norm_epsilon: LAYER_NORM_EPSILON,
            rescale_every: RESCALE_EVERY,
            context_length: CONTEXT_LENGTH,
            bos_token_id: Some(0),
            eos_token_ids: vec![0],
        }
    }

    /// The same as the fields of a config.json, for models that have no such file.
    pub fn to_fields(&self) -> serde_json::Map<String, serde_json::Value> {
        crate::config::into_object(serde_json::json!({
            "model_type": "rwkv",
            "vocab_size": self.vocab,
            "hidden_size": self.hidden,
            "attention_hidden_size": self.attention_hidden,
            "intermediate_size": self.intermediate,
            "num_hidden_layers": self.layers,
            "layer_norm_epsilon": self.layer_norm_epsilon,
            "rescale_every": self.rescale_every,
            "context_length": self.context_length,
            "bos_token_id": self.bos_token_id,
            "eos_token_id": self.eos_token_ids,
        }))
    }

    pub fn from_fields(fields: &ConfigFields) -> Result<Rwkv4Config, ConfigError> {
        refuse_other_versions(fields)?;
        Rwkv4Config::read_sizes(fields, |hidden| 4 * hidden, CONTEXT_LENGTH)
    }

    /// The fields that RWKV-5 and -6 have too, with these defaults of the channel-mix width and of the context.
    pub(in crate::families) fn read_sizes(
        fields: &ConfigFields,
        intermediate: fn(usize) -> usize,
        context_length: usize,
    ) -> Result<Rwkv4Config, ConfigError> {
        refuse_tied_head(fields)?;
        let hidden = fields.size("hidden_size")?;
        Ok(Rwkv4Config {
            vocab: fields.size("vocab_size")?,
            hidden,
            attention_hidden: fields.size_or("attention_hidden_size", hidden)?,
            intermediate: fields.size_or("intermediate_size", intermediate(hidden))?,
            layers: read_layers(fields)?,
            layer_norm_epsilon: fields.fraction_or("layer_norm_epsilon", LAYER_NORM_EPSILON)?,
            rescale_every: fields.count_or("rescale_every", RESCALE_EVERY)?,
            context_length: fields.size_or("context_length", context_length)?,
            bos_token_id: fields.token_ids("bos_token_id")?.first().copied(),
            eos_token_ids: fields.token_ids("eos_token_id")?,
        })
    }
}

/// All published RWKV checkpoints have a head of their own.
pub(in crate::families) fn refuse_tied_head(fields: &ConfigFields) -> Result<(), ConfigError> {
    match fields.flag_or("tie_word_embeddings", false)? {
        false => Ok(()),
        true => Err(ConfigError::NotSupportedYet {
            file: fields.origin.clone(),
            what: "RWKV with `tie_word_embeddings` = true".to_string(),
            supported: "RWKV with a head of its own".to_string(),
        }),
    }
}

/// `num_hidden_layers`, within reason.
pub(in crate::families) fn read_layers(fields: &ConfigFields) -> Result<usize, ConfigError> {
    let layers = fields.size("num_hidden_layers")?;
    match layers > MOST_LAYERS {
        false => Ok(layers),
        true => {
            let found = &fields.raw["num_hidden_layers"];
            Err(fields.invalid_value("num_hidden_layers", &format!("at most {MOST_LAYERS}"), found))
        }
    }
}

/// `rwkv_version` is no field of transformers, but converters write it; another number is another model.
fn refuse_other_versions(fields: &ConfigFields) -> Result<(), ConfigError> {
    match fields.get("rwkv_version") {
        None => Ok(()),
        Some(version) if version.as_f64() == Some(4.0) => Ok(()),
        Some(version) if version.is_number() => Err(ConfigError::NotSupportedYet {
            file: fields.origin.clone(),
            what: format!("RWKV version {version}"),
            supported: "RWKV version 4".to_string(),
        }),
        Some(other) => Err(fields.invalid_value("rwkv_version", "a number", other)),
    }
}
