//! Configuration of RWKV-5.2 ("Eagle") as the Hugging Face checkpoints write it.

use crate::config::ConfigFields;
use crate::error::ConfigError;
use crate::families::rwkv4::Rwkv4Config;
use crate::families::rwkv4::config::LAYER_NORM_EPSILON;
use std::ops::Deref;

pub const CONTEXT_LENGTH: usize = 4096;
pub const HEAD_SIZE: usize = 64;
/// Results of the heads are divided by it before they are normalised, in training.
const HEAD_SIZE_DIVISOR: f64 = 8.0;

/// What RWKV-5 and RWKV-6 have in common: sizes as in RWKV-4 (to which it dereferences; `attention_hidden` is heads times head
/// size), and heads.
#[derive(Clone, Debug, PartialEq)]
pub struct Rwkv5Config {
    pub base: Rwkv4Config,
    /// Width and height of the state matrix of a head.
    pub head_size: usize,
    /// Epsilon of the norm over each head's result.
    pub group_norm_epsilon: f64,
}

impl Deref for Rwkv5Config {
    type Target = Rwkv4Config;
    fn deref(&self) -> &Rwkv4Config {
        &self.base
    }
}

impl Rwkv5Config {
    /// A published shape: everything but the sizes at its default.
    pub fn of_size(vocab: usize, hidden: usize, layers: usize) -> Rwkv5Config {
        let base = Rwkv4Config {
            intermediate: default_intermediate(hidden),
            context_length: CONTEXT_LENGTH,
            ..Rwkv4Config::of_size(vocab, hidden, layers)
        };
        let group_norm_epsilon = LAYER_NORM_EPSILON * HEAD_SIZE_DIVISOR * HEAD_SIZE_DIVISOR;
        Rwkv5Config { base, head_size: HEAD_SIZE, group_norm_epsilon }
    }

    pub fn heads(&self) -> usize {
        self.attention_hidden / self.head_size
    }

    /// The same as the fields of a config.json, for models that have no such file.
    pub fn to_fields(&self) -> serde_json::Map<String, serde_json::Value> {
        crate::config::into_object(serde_json::json!({
            "model_type": "rwkv5",
            "model_version": "5_2",
            "vocab_size": self.vocab,
            "hidden_size": self.hidden,
            "attention_hidden_size": self.attention_hidden,
            "head_size": self.head_size,
            "head_size_divisor": HEAD_SIZE_DIVISOR,
            "intermediate_size": self.intermediate,
            "num_hidden_layers": self.layers,
            "layer_norm_epsilon": self.layer_norm_epsilon,
            "rescale_every": self.rescale_every,
            "context_length": self.context_length,
            "bos_token_id": self.bos_token_id,
            "eos_token_id": self.eos_token_ids,
        }))
    }

    pub fn from_fields(fields: &ConfigFields) -> Result<Rwkv5Config, ConfigError> {
        if let Some(version) = fields.get("model_version")
            && version.as_str() != Some("5_2")
        {
            return Err(ConfigError::NotSupportedYet {
                file: fields.origin.clone(),
                what: format!("RWKV-5 of model_version {version}"),
                supported: "model_version \"5_2\"".to_string(),
            });
        }
        Rwkv5Config::shared(fields)
    }

    /// The fields that RWKV-6 has too. `num_attention_heads` is not read: published files have the head size there.
    pub(in crate::families) fn shared(fields: &ConfigFields) -> Result<Rwkv5Config, ConfigError> {
        let base = Rwkv4Config::read_sizes(fields, default_intermediate, CONTEXT_LENGTH)?;
        let head_size = fields.size_or("head_size", HEAD_SIZE)?;
        check_heads(fields, "head_size", base.attention_hidden, head_size)?;
        let divisor = fields.float_or("head_size_divisor", HEAD_SIZE_DIVISOR)?;
        if !(1.0..=1e4).contains(&divisor) {
            let found = &fields.raw["head_size_divisor"];
            return Err(fields.invalid_value("head_size_divisor", "a number from 1 to 10000", found));
        }
        // The published classes divide by the divisor and add 1e-5, whatever the other norms have.
        Ok(Rwkv5Config { base, head_size, group_norm_epsilon: LAYER_NORM_EPSILON * divisor * divisor })
    }
}

/// 3.5 times the width, rounded down to a multiple of 32.
fn default_intermediate(hidden: usize) -> usize {
    (hidden * 7 / 2 / 32 * 32).max(1)
}

/// Heads have to fill the width.
pub(in crate::families) fn check_heads(
    fields: &ConfigFields,
    field: &str,
    width: usize,
    head_size: usize,
) -> Result<(), ConfigError> {
    if width.is_multiple_of(head_size) {
        return Ok(());
    }
    let found = serde_json::Value::from(head_size);
    Err(fields.invalid_value(field, &format!("a divisor of {width}, the width of all heads"), &found))
}
