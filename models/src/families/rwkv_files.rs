//! The configuration of an RWKV `.pth` that comes without config.json, from names and shapes of its tensors.
//!
//! What shapes do not say (epsilon, rescale_every, context length) is the same in all published checkpoints of a version.

use crate::checkpoint::Checkpoint;
use crate::config::ConfigFields;
use crate::error::ConfigError;
use crate::families::rwkv4::{Rwkv4Config, naming::rwkv4_canonical};
use crate::families::rwkv5::Rwkv5Config;
use crate::families::rwkv6::Rwkv6Config;
use crate::families::rwkv7::{Rwkv7Config, naming::is_stored_transposed, naming::rwkv7_canonical};
use serde_json::{Map, Value};

/// Reads version and sizes of an RWKV off its tensors, under either naming.
pub(crate) fn infer_fields(checkpoint: &Checkpoint) -> Result<ConfigFields, ConfigError> {
    let tensors = RwkvTensors::new(checkpoint, rwkv7_canonical, "model.layers");
    match tensors.block("attn.r_k") {
        Some(_) => infer_rwkv7(&tensors),
        None => infer_before_rwkv7(&RwkvTensors::new(checkpoint, rwkv4_canonical, "rwkv.blocks")),
    }
}

/// Versions 4 to 6: each has tensors that the ones before it do not have.
fn infer_before_rwkv7(tensors: &RwkvTensors) -> Result<ConfigFields, ConfigError> {
    let (vocab, hidden) = tensors.matrix("rwkv.embeddings.weight", "emb.weight")?;
    let (attention_hidden, _) = tensors.block_matrix("attention.key.weight", "att.key.weight")?;
    let (intermediate, _) = tensors.block_matrix("feed_forward.key.weight", "ffn.key.weight")?;
    let layers = tensors.layers("attention.key.weight");
    if tensors.block("attention.ln_x.weight").is_none() {
        let config =
            Rwkv4Config { attention_hidden, intermediate, ..Rwkv4Config::of_size(vocab, hidden, layers) };
        return Ok(tensors.with_origin(config.to_fields()));
    }
    let is_six = tensors.block("attention.time_maa_x").is_some();
    if !is_six {
        tensors.refuse_before_5_2()?;
    }
    let (heads, head_size) = tensors.block_matrix("attention.time_faaaa", "att.time_faaaa")?;
    if heads.checked_mul(head_size) != Some(attention_hidden) {
        let detail = format!(
            "blocks.0.att.time_faaaa has {heads} heads of {head_size}, blocks.0.att.key.weight {attention_hidden} rows"
        );
        return Err(tensors.cannot_infer(detail));
    }
    let mut five = Rwkv5Config { head_size, ..Rwkv5Config::of_size(vocab, hidden, layers) };
    (five.base.attention_hidden, five.base.intermediate) = (attention_hidden, intermediate);
    if !is_six {
        return Ok(tensors.with_origin(five.to_fields()));
    }
    let (_, mixes) = tensors.block_matrix("attention.time_maa_w1", "att.time_maa_w1")?;
    let (_, decay_rank) = tensors.block_matrix("attention.time_decay_w1", "att.time_decay_w1")?;
    let config = Rwkv6Config { base: five, mix_rank: (mixes / 5).max(1), decay_rank };
    Ok(tensors.with_origin(config.to_fields()))
}

fn infer_rwkv7(tensors: &RwkvTensors) -> Result<ConfigFields, ConfigError> {
    let (vocab, hidden) = tensors.matrix("model.embeddings.weight", "emb.weight")?;
    let (heads, head_size) = tensors.block_matrix("attn.r_k", "att.r_k")?;
    if heads.checked_mul(head_size) != Some(hidden) {
        let detail =
            format!("blocks.0.att.r_k has {heads} heads of {head_size}, emb.weight rows of {hidden}");
        return Err(tensors.cannot_infer(detail));
    }
    let (intermediate, _) = tensors.block_matrix("ffn.key.weight", "ffn.key.weight")?;
    let layers = tensors.layers("attn.k_proj.weight");
    let rank = |letter: &str, layer: usize| {
        let canonical = format!("model.layers.{layer}.attn.{letter}_lora.lora.0.weight");
        tensors.matrix(&canonical, &format!("blocks.{layer}.att.{letter}1")).map(|(rank, _)| rank)
    };
    // The first layer does not need its mix with the first layer's value.
    let value_rank = if layers > 1 { rank("v", 1)? } else { 1 };
    let config = Rwkv7Config {
        head_size,
        intermediate,
        decay_rank: rank("w", 0)?,
        rate_rank: rank("a", 0)?,
        value_rank,
        gate_rank: rank("g", 0)?,
        ..Rwkv7Config::of_size(vocab, hidden, layers)
    };
    Ok(tensors.with_origin(config.to_fields()))
}

/// The tensors of a checkpoint by canonical names.
struct RwkvTensors<'a> {
    checkpoint: &'a Checkpoint,
    canonical: fn(&str) -> String,
    /// Prefix of the blocks in canonical names.
    blocks: &'static str,
}

impl<'a> RwkvTensors<'a> {
    fn new(
        checkpoint: &'a Checkpoint,
        canonical: fn(&str) -> String,
        blocks: &'static str,
    ) -> RwkvTensors<'a> {
        RwkvTensors { checkpoint, canonical, blocks }
    }

    /// The shape, in canonical orientation, without axes of size 1 in front.
    fn shape(&self, canonical: &str) -> Option<Vec<usize>> {
        let mut found = self.checkpoint.tensors().iter();
        let info = found.find(|info| (self.canonical)(&info.stored_name) == canonical)?;
        let ones = info.shape.iter().take_while(|&&dim| dim == 1).count();
        let mut shape = info.shape[ones.min(info.shape.len().saturating_sub(2))..].to_vec();
        if is_stored_transposed(&info.stored_name) {
            shape.reverse();
        }
        Some(shape)
    }

    fn block(&self, part: &str) -> Option<Vec<usize>> {
        self.shape(&format!("{}.0.{part}", self.blocks))
    }

    fn matrix(&self, canonical: &str, short: &str) -> Result<(usize, usize), ConfigError> {
        match self.shape(canonical).as_deref() {
            Some(&[rows, columns]) if rows > 0 && columns > 0 => Ok((rows, columns)),
            Some(other) => {
                Err(self.cannot_infer(format!("{short} has shape {other:?}, a matrix was expected")))
            }
            None => {
                Err(self.cannot_infer(format!("an RWKV of this version has {short}, this file does not")))
            }
        }
    }

    fn block_matrix(&self, part: &str, short: &str) -> Result<(usize, usize), ConfigError> {
        self.matrix(&format!("{}.0.{part}", self.blocks), &format!("blocks.0.{short}"))
    }

    /// Number of blocks that have a part. Blocks without it are reported when the tensors are compared with the
    /// configuration.
    fn layers(&self, part: &str) -> usize {
        let (prefix, suffix) = (format!("{}.", self.blocks), format!(".{part}"));
        let names = self.checkpoint.tensors().iter().map(|info| (self.canonical)(&info.stored_name));
        names.filter(|name| name.starts_with(&prefix) && name.ends_with(&suffix)).count()
    }

    /// 5.0 has no gate, 5.1 one decay per head.
    fn refuse_before_5_2(&self) -> Result<(), ConfigError> {
        let per_head = |shape: Vec<usize>| shape.iter().skip(1).all(|&dim| dim == 1);
        let what = if self.block("attention.gate.weight").is_none() {
            "RWKV-5.0"
        } else if self.block("attention.time_decay").is_some_and(per_head) {
            "RWKV-5.1"
        } else {
            return Ok(());
        };
        let file = self.checkpoint.origin.clone();
        let supported = "RWKV-4, 5.2, 6 and 7".to_owned();
        Err(ConfigError::NotSupportedYet { file, what: what.to_string(), supported })
    }

    /// Fields that the tensors told.
    fn with_origin(&self, raw: Map<String, Value>) -> ConfigFields {
        ConfigFields { origin: format!("{} (from its tensor shapes)", self.checkpoint.origin), raw }
    }

    fn cannot_infer(&self, detail: String) -> ConfigError {
        ConfigError::CannotInfer { file: self.checkpoint.origin.clone(), detail }
    }
}
