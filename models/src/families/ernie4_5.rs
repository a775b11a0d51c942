//! ERNIE 4.5 (Baidu 2025; reference: `Ernie4_5ForCausalLM` of transformers): the Llama block with rotary embedding of neighbouring
//! elements.

use crate::config::ConfigFields;
use crate::config::published::PublishedFields;
use crate::definition::Architecture;
use crate::error::ConfigError;
use crate::evidence::{ConfigEvidence, EvidenceResult};
use crate::families::llama;
use crate::family::{FamilyVariant, ModelFamily};
use crate::layers::norm::Norm;
use crate::layers::rope::RopePairing;
use crate::layers::{RopeConfig, RopeDefaults};
use crate::standard_decoder::StandardDecoder;

pub const FAMILY: ModelFamily = ModelFamily {
    variants: &[FamilyVariant {
        model_type: "ernie4_5",
        classes: &["Ernie4_5ForCausalLM"],
        about: "ERNIE 4.5",
        read: |fields| read(fields).map(Architecture::new),
        infer: infer_fields,
        fields: PublishedFields {
            read: "head_dim hidden_act hidden_size intermediate_size \
                        max_position_embeddings=131072 num_attention_heads num_hidden_layers \
                        num_key_value_heads=2 rms_norm_eps rope_parameters tie_word_embeddings \
                        use_bias vocab_size",
            ..PublishedFields::UNKNOWN
        },
    }],
    gguf: &[],
};

fn read(fields: &ConfigFields) -> Result<StandardDecoder, ConfigError> {
    let mut model = llama::read(fields)?;
    if fields.get("head_dim").is_none() {
        model.sizes.head_size = 128;
    }
    let defaults = RopeDefaults { theta: 500_000.0, pairs: RopePairing::Interleaved, ..RopeDefaults::LLAMA };
    let rope = RopeConfig::read(fields, model.sizes.head_size, model.sizes.context, defaults)?;
    model.block.attention.rope = rope.rope;
    model.set_norm(Norm::Rms(fields.epsilon(&["rms_norm_eps"], 1e-5)?));
    let bias = fields.flag_or("use_bias", false)?;
    model.block.attention.set_bias(bias);
    model.block.mlp.bias = bias;
    model.outer_layers.tied = fields.flag_or("tie_word_embeddings", true)?;
    Ok(model)
}

fn infer_fields(t: &mut ConfigEvidence) -> EvidenceResult {
    t.record_tied_llama_block()?;
    t.record_bias("use_bias", "layers.0.self_attn.q_proj")
}
