//! OLMo 2 and 3 (OLMo Team 2025; reference: `Olmo2ForCausalLM` and `Olmo3ForCausalLM` of transformers): norms after the parts
//! of a layer, and on all queries and all keys together. In OLMo 3 most layers have a window, and only the others scaled
//! rotary embedding.

use crate::checkpoint::gguf::{GgufArchitecture, NORMS_BEHIND, TensorNameMap};
use crate::config::ConfigFields;
use crate::config::published::PublishedFields;
use crate::definition::Architecture;
use crate::error::ConfigError;
use crate::evidence::{ConfigEvidence, EvidenceResult};
use crate::family::{FamilyVariant, ModelFamily};
use crate::layers::{RopeConfig, RopeDefaults};
use crate::standard_decoder::{BlockNorms, QueryKeyNorm, StandardDecoder, StandardDefaults};
use crate::transformer::ModelSizes;

pub const FAMILY: ModelFamily = ModelFamily {
    variants: &[
        FamilyVariant {
            model_type: "olmo2",
            classes: &["Olmo2ForCausalLM"],
            about: "OLMo 2",
            read: |fields| read(fields).map(Architecture::new),
            infer: infer_fields,
            fields: PublishedFields {
                read: "attention_bias hidden_act hidden_size intermediate_size \
                        max_position_embeddings num_attention_heads num_hidden_layers \
                        num_key_value_heads rms_norm_eps rope_parameters tie_word_embeddings \
                        vocab_size",
                ..PublishedFields::UNKNOWN
            },
        },
        FamilyVariant {
            model_type: "olmo3",
            classes: &["Olmo3ForCausalLM"],
            about: "OLMo 3",
            read: |fields| read_olmo3(fields).map(Architecture::new),
            infer: infer_fields,
            fields: PublishedFields {
                read: "attention_bias hidden_act hidden_size intermediate_size layer_types \
                        max_position_embeddings num_attention_heads num_hidden_layers \
                        num_key_value_heads rms_norm_eps rope_parameters sliding_window=4096 \
                        tie_word_embeddings vocab_size",
                ..PublishedFields::UNKNOWN
            },
        },
    ],
    gguf: &[GgufArchitecture {
        name: "olmo2",
        model_type: "olmo2",
        write_fields: |w| {
            w.set_field("hidden_act", "silu");
            w.set_field("attention_bias", w.has_tensor("blk.0.attn_q.bias"));
            Ok(())
        },
        tensor_names: |_| TensorNameMap::llama(NORMS_BEHIND),
        ..GgufArchitecture::LLAMA
    }],
};

pub(super) fn read(fields: &ConfigFields) -> Result<StandardDecoder, ConfigError> {
    read_with(fields, RopeDefaults::LLAMA)
}

fn read_with(fields: &ConfigFields, rope: RopeDefaults) -> Result<StandardDecoder, ConfigError> {
    let defaults = StandardDefaults { rope, epsilon: ("rms_norm_eps", 1e-5), ..StandardDefaults::LLAMA };
    let mut model = StandardDecoder::read(fields, &defaults)?;
    model.block.norms = BlockNorms::AFTER;
    model.block.attention.head_norm = QueryKeyNorm::AllHeads;
    model.block.attention.set_bias(fields.flag_or("attention_bias", false)?);
    Ok(model)
}

fn read_olmo3(fields: &ConfigFields) -> Result<StandardDecoder, ConfigError> {
    let defaults = RopeDefaults { theta: 5e5, ..RopeDefaults::LLAMA };
    let full = RopeConfig::fields_of_kind(fields, "full_attention")?;
    let mut model = read_with(full.as_ref().unwrap_or(fields), defaults)?;
    let ModelSizes { head_size, context, layers, .. } = model.sizes;
    let attention = &mut model.block.attention;
    attention.windows = fields.layer_windows(layers, |layer| !(layer + 1).is_multiple_of(4))?;
    // Rotary embedding is scaled on layers without a window only.
    let local = match RopeConfig::fields_of_kind(fields, "sliding_attention")? {
        Some(fields) => RopeConfig::read(&fields, head_size, context, defaults)?,
        None => RopeConfig::read_unscaled(fields, head_size, context, defaults)?,
    };
    attention.local_rope = Some(local.rope);
    Ok(model)
}

fn infer_fields(t: &mut ConfigEvidence) -> EvidenceResult {
    t.record_llama_block(None)?;
    t.record_bias("attention_bias", "layers.0.self_attn.q_proj")
}
