//! ERNIE 4.5 (Baidu 2025; reference: `Ernie4_5ForCausalLM` of transformers): the Llama block with rotary embedding of neighbouring
//! elements.

use super::llama::LlamaConfig;
use crate::config::{ConfigFields, RopeConfig, RopeDefaults};
use crate::definition::Architecture;
use crate::error::ConfigError;
use crate::evidence::{ConfigEvidence, EvidenceResult};
use crate::family::{FamilyVariant, ModelFamily};
use crate::layers::rope::RopePairing;

pub const FAMILY: ModelFamily = ModelFamily {
    variants: &[FamilyVariant {
        model_type: "ernie4_5",
        classes: &["Ernie4_5ForCausalLM"],
        about: "ERNIE 4.5",
        read: |fields| from_fields(fields).map(Architecture::new),
        infer: infer_fields,
    }],
    gguf: &[],
};

/// The configuration as one of the Llama block.
pub fn from_fields(fields: &ConfigFields) -> Result<LlamaConfig, ConfigError> {
    let mut config = LlamaConfig::from_fields(fields)?;
    if fields.get("head_dim").is_none() {
        config.sizes.head_size = 128;
    }
    let defaults = RopeDefaults { theta: 500_000.0, pairs: RopePairing::Interleaved, ..RopeDefaults::LLAMA };
    let rope = RopeConfig::read(fields, config.sizes.head_size, config.sizes.context, defaults)?;
    let bias = fields.flag_or("use_bias", false)?;
    Ok(LlamaConfig {
        eps: fields.epsilon(&["rms_norm_eps"], 1e-5)?,
        rope: rope.rope,
        qkv_bias: bias,
        output_bias: bias,
        mlp_bias: bias,
        tied: fields.flag_or("tie_word_embeddings", true)?,
        ..config
    })
}

fn infer_fields(t: &mut ConfigEvidence) -> EvidenceResult {
    t.record_tied_llama_block()?;
    t.record_bias("use_bias", "layers.0.self_attn.q_proj")
}
