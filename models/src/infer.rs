//! The configuration of an RWKV-4 `.pth` that comes without config.json, from names and shapes of its tensors.
//!
//! What shapes do not say (epsilon, rescale_every, context length) is the same in all published RWKV-4 checkpoints.

use crate::checkpoint::Checkpoint;
use crate::config::{ModelConfig, Rwkv4Config};
use crate::error::ConfigError;
use crate::naming::rwkv4_canonical;

/// Tensors that only later versions have.
const LATER: [(&str, &str); 4] = [
    ("attention.r_k", "RWKV-7"),
    ("attention.time_maa_x", "RWKV-6"),
    ("attention.time_faaaa", "RWKV-5"),
    ("attention.ln_x.weight", "RWKV-5"),
];

/// Reads the sizes of an RWKV-4 off its tensors, under either naming.
pub fn infer_config(checkpoint: &Checkpoint) -> Result<ModelConfig, ConfigError> {
    let file = checkpoint.origin.clone();
    let shape = |canonical: &str| {
        let info = checkpoint.tensors().iter().find(|info| rwkv4_canonical(&info.stored_name) == canonical);
        info.map(|info| info.shape.as_slice())
    };
    let block = |part: &str| shape(&format!("rwkv.blocks.0.{part}"));
    if let Some((_, what)) = LATER.iter().find(|(part, _)| block(part).is_some()) {
        let supported = crate::registry::supported();
        return Err(ConfigError::NotSupportedYet { file, what: what.to_string(), supported });
    }
    let matrix = |name: &str, found: Option<&[usize]>| match found {
        Some(&[rows, columns]) if rows > 0 && columns > 0 => Ok((rows, columns)),
        Some(other) => Err(ConfigError::CannotInfer {
            file: file.clone(),
            detail: format!("{name} has shape {other:?}, a matrix was expected"),
        }),
        None => Err(ConfigError::CannotInfer {
            file: file.clone(),
            detail: format!("an RWKV-4 has {name}, this file does not"),
        }),
    };
    let (vocab, hidden) = matrix("emb.weight", shape("rwkv.embeddings.weight"))?;
    let (attention_hidden, _) = matrix("blocks.0.att.key.weight", block("attention.key.weight"))?;
    let (intermediate, _) = matrix("blocks.0.ffn.key.weight", block("feed_forward.key.weight"))?;
    let layers = count_layers(checkpoint);
    let config =
        Rwkv4Config { attention_hidden, intermediate, ..Rwkv4Config::of_size(vocab, hidden, layers) };
    Ok(ModelConfig::rwkv4(format!("{file} (from its tensor shapes)"), config))
}

/// Number of blocks that have an attention key. Blocks without one are reported when the tensors are compared with the
/// configuration.
fn count_layers(checkpoint: &Checkpoint) -> usize {
    let is_key = |name: &str| name.starts_with("rwkv.blocks.") && name.ends_with(".attention.key.weight");
    checkpoint.tensors().iter().filter(|info| is_key(&rwkv4_canonical(&info.stored_name))).count()
}
