//! Llama (Touvron et al. 2023; reference: `LlamaForCausalLM` of transformers) and what shares its block: Llama 2 and 3,
//! Yi, Mistral (with a sliding window; `MistralForCausalLM`), InternLM 1 (with biases).

use crate::checkpoint::gguf::{
    ConfigFieldWriter, FieldResult, GgufArchitecture, GgufVariant, INTERLEAVED, TensorNameMap,
};
use crate::config::ConfigFields;
use crate::config::published::PublishedFields;
use crate::definition::Architecture;
use crate::error::ConfigError;
use crate::evidence::{ConfigEvidence, EvidenceResult};
use crate::families::mixtral;
use crate::family::{FamilyVariant, ModelFamily};
use crate::standard_decoder::{StandardDecoder, StandardDefaults};

pub const FAMILY: ModelFamily = ModelFamily {
    variants: &[
        FamilyVariant {
            model_type: "llama",
            classes: &["LlamaForCausalLM", "LLaMAForCausalLM"],
            about: "Llama 1, 2, 3; Yi",
            read: |fields| read(fields).map(Architecture::new),
            infer: infer_fields,
            fields: PublishedFields {
                read: "attention_bias head_dim hidden_act hidden_size intermediate_size \
                        max_position_embeddings mlp_bias num_attention_heads num_hidden_layers \
                        num_key_value_heads rms_norm_eps rope_parameters tie_word_embeddings \
                        vocab_size",
                ..PublishedFields::UNKNOWN
            },
        },
        FamilyVariant {
            model_type: "mistral",
            classes: &["MistralForCausalLM"],
            about: "Mistral",
            read: |fields| read_mistral(fields).map(Architecture::new),
            infer: infer_fields,
            fields: PublishedFields {
                read: "head_dim hidden_act hidden_size intermediate_size \
                        max_position_embeddings=131072 num_attention_heads num_hidden_layers \
                        num_key_value_heads=8 rms_norm_eps rope_parameters sliding_window=4096 \
                        tie_word_embeddings vocab_size",
                ..PublishedFields::UNKNOWN
            },
        },
        FamilyVariant {
            model_type: "internlm",
            classes: &["InternLMForCausalLM"],
            about: "InternLM 1",
            read: |fields| read_internlm(fields).map(Architecture::new),
            infer: infer_internlm,
            fields: PublishedFields::UNKNOWN,
        },
    ],
    gguf: &[
        GgufArchitecture {
            name: "llama",
            model_type: "llama",
            write_fields: gguf_fields,
            tensor_names: gguf_names,
            ..GgufArchitecture::LLAMA
        },
        GgufArchitecture {
            name: "internlm2",
            model_type: "llama",
            write_fields: gguf_fields,
            tensor_names: |_| TensorNameMap::llama(INTERLEAVED),
            ..GgufArchitecture::LLAMA
        },
    ],
};

/// The Llama block, with which many families begin.
pub(super) fn read(fields: &ConfigFields) -> Result<StandardDecoder, ConfigError> {
    let mut model = StandardDecoder::read(fields, &StandardDefaults::LLAMA)?;
    model.block.attention.set_bias(fields.flag_or("attention_bias", false)?);
    model.block.mlp.bias = fields.flag_or("mlp_bias", false)?;
    model.supports_pooling = true;
    Ok(model)
}

/// Mistral: every layer has the sliding window.
fn read_mistral(fields: &ConfigFields) -> Result<StandardDecoder, ConfigError> {
    let mut model = read(fields)?;
    model.block.attention.windows = fields.layer_windows(model.sizes.layers, |_| true)?;
    Ok(model)
}

/// InternLM 1: `bias` is for the four projections of attention.
fn read_internlm(fields: &ConfigFields) -> Result<StandardDecoder, ConfigError> {
    let mut model = read(fields)?;
    model.block.attention.set_bias(fields.flag_or("bias", true)?);
    Ok(model)
}

pub(super) fn infer_fields(t: &mut ConfigEvidence) -> EvidenceResult {
    t.record_llama_block(None)?;
    t.record_bias("attention_bias", "layers.0.self_attn.q_proj")?;
    t.record_bias("mlp_bias", "layers.0.mlp.gate_proj")
}

fn infer_internlm(t: &mut ConfigEvidence) -> EvidenceResult {
    t.record_llama_block(None)?;
    t.record_bias("bias", "layers.0.self_attn.q_proj")
}

/// Without experts Llama and its kin; InternLM 2, whose fused projection was taken apart, is Llama under other names.
fn gguf_names(files: GgufVariant) -> TensorNameMap {
    TensorNameMap::llama(if files.experts { mixtral::GGUF_BLOCK } else { INTERLEAVED })
}

/// Llama and its kin; with experts it is Mixtral.
fn gguf_fields(w: &mut ConfigFieldWriter<'_>) -> FieldResult {
    w.set_field("hidden_act", "silu");
    w.set_field("attention_bias", w.has_tensor("blk.0.attn_q.bias"));
    w.set_field("mlp_bias", w.has_tensor("blk.0.ffn_up.bias"));
    if !w.raw.contains_key("head_dim") {
        w.copy_number("rope.dimension_count", "head_dim")?;
    }
    let window = w.number("attention.sliding_window")?;
    if w.number("expert_count")?.unwrap_or(0) > 0 {
        w.set_field("model_type", "mixtral");
        w.copy_number("expert_count", "num_local_experts")?;
        w.copy_number("expert_used_count", "num_experts_per_tok")?;
    } else if window.is_some() {
        w.set_field("model_type", "mistral");
    }
    if let Some(window) = window {
        w.set_field("sliding_window", window);
    }
    Ok(())
}
