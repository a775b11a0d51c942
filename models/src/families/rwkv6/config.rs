//! Configuration of RWKV-6 ("Finch") as the Hugging Face checkpoints write it.

use crate::config::ConfigFields;
use crate::error::ConfigError;
use crate::families::rwkv5::config::Rwkv5Config;
use std::ops::Deref;

/// Sizes as in RWKV-5 (to which it dereferences), and the ranks of what became a function of the token.
#[derive(Clone, Debug, PartialEq)]
pub struct Rwkv6Config {
    pub base: Rwkv5Config,
    /// Rank of each of the five token-shift mixes.
    pub mix_rank: usize,
    /// Rank of the decay.
    pub decay_rank: usize,
}

impl Deref for Rwkv6Config {
    type Target = Rwkv5Config;
    fn deref(&self) -> &Rwkv5Config {
        &self.base
    }
}

/// The ranks that the published class has for a width; config.json does not carry them. Where there are tensors, they tell.
fn ranks(hidden: usize) -> (usize, usize) {
    if hidden == 4096 { (64, 128) } else { (32, 64) }
}

impl Rwkv6Config {
    /// A published shape: everything but the sizes at its default.
    pub fn of_size(vocab: usize, hidden: usize, layers: usize) -> Rwkv6Config {
        let (mix_rank, decay_rank) = ranks(hidden);
        Rwkv6Config { base: Rwkv5Config::of_size(vocab, hidden, layers), mix_rank, decay_rank }
    }

    /// The same as the fields of a config.json, for models that have no such file.
    pub fn to_fields(&self) -> serde_json::Map<String, serde_json::Value> {
        let mut fields = self.base.to_fields();
        fields.remove("model_version");
        fields.insert("model_type".into(), "rwkv6".into());
        fields.insert("time_mix_extra_dim".into(), self.mix_rank.into());
        fields.insert("time_decay_extra_dim".into(), self.decay_rank.into());
        fields
    }

    pub fn from_fields(fields: &ConfigFields) -> Result<Rwkv6Config, ConfigError> {
        let base = Rwkv5Config::shared(fields)?;
        let (mix_rank, decay_rank) = ranks(base.hidden);
        Ok(Rwkv6Config {
            mix_rank: fields.size_or("time_mix_extra_dim", mix_rank)?,
            decay_rank: fields.size_or("time_decay_extra_dim", decay_rank)?,
            base,
        })
    }
}
