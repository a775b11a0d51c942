//! GLM-4 in the Hugging Face classes (GLM Team 2024; reference: `GlmForCausalLM`, `Glm4ForCausalLM` of transformers):
//! rotary embedding of neighbouring elements on half of each head, fused gate and up projection; the newer class has
//! norms after the parts of a layer too.

use crate::checkpoint::gguf::TensorConversion::Same;
use crate::checkpoint::gguf::{ConfigFieldWriter, FieldResult, GgufArchitecture, NameMapping, TensorNameMap};
use crate::config::ConfigFields;
use crate::config::published::PublishedFields;
use crate::definition::Architecture;
use crate::error::ConfigError;
use crate::evidence::{ConfigEvidence, EvidenceResult};
use crate::family::{FamilyVariant, ModelFamily};
use crate::layers::RopeDefaults;
use crate::layers::rope::RopePairing;
use crate::standard_decoder::{MlpForm, StandardDecoder, StandardDefaults};

pub const FAMILY: ModelFamily = ModelFamily {
    variants: &[
        FamilyVariant {
            model_type: "glm",
            classes: &["GlmForCausalLM"],
            about: "GLM-4",
            read: |fields| read_glm(fields).map(Architecture::new),
            infer: infer_fields,
            fields: PublishedFields {
                read: "attention_bias head_dim=128 hidden_act hidden_size intermediate_size \
                        max_position_embeddings num_attention_heads num_hidden_layers \
                        num_key_value_heads=2 rms_norm_eps rope_parameters tie_word_embeddings \
                        vocab_size",
                ..PublishedFields::UNKNOWN
            },
        },
        FamilyVariant {
            model_type: "glm4",
            classes: &["Glm4ForCausalLM"],
            about: "GLM-4-0414",
            read: |fields| read_glm4(fields).map(Architecture::new),
            infer: infer_fields,
            fields: PublishedFields {
                read: "attention_bias head_dim=128 hidden_act hidden_size intermediate_size \
                        max_position_embeddings num_attention_heads num_hidden_layers \
                        num_key_value_heads=2 rms_norm_eps rope_parameters tie_word_embeddings \
                        vocab_size",
                ..PublishedFields::UNKNOWN
            },
        },
    ],
    gguf: &[GgufArchitecture {
        name: "glm4",
        model_type: "glm4",
        write_fields: gguf_fields,
        tensor_names: |_| {
            TensorNameMap::llama(&[
                ("ffn_up", "mlp.gate_up_proj", Same),
                ("post_attention_norm", "post_self_attn_layernorm", Same),
                ("post_ffw_norm", "post_mlp_layernorm", Same),
            ])
        },
        ..GgufArchitecture::LLAMA
    }],
};

fn read_glm(fields: &ConfigFields) -> Result<StandardDecoder, ConfigError> {
    let defaults = StandardDefaults {
        context: 131_072,
        rope: RopeDefaults { share: 0.5, pairs: RopePairing::Interleaved, ..RopeDefaults::LLAMA },
        epsilon: ("rms_norm_eps", 1.5625e-7),
        ..StandardDefaults::LLAMA
    };
    let mut model = StandardDecoder::read(fields, &defaults)?;
    model.block.attention.qkv_bias = fields.flag_or("attention_bias", true)?;
    model.block.mlp.form = MlpForm::GATED_FUSED;
    Ok(model)
}

/// The newer class.
fn read_glm4(fields: &ConfigFields) -> Result<StandardDecoder, ConfigError> {
    let mut model = read_glm(fields)?;
    model.block.norms.attention_output = Some("post_self_attn_layernorm");
    model.block.norms.mlp_output = Some("post_mlp_layernorm");
    Ok(model)
}

fn infer_fields(t: &mut ConfigEvidence) -> EvidenceResult {
    t.record_embedding("embed_tokens.weight", "lm_head.weight", false)?;
    t.record_heads("layers.0.self_attn", None)?;
    t.record_axis_size(&["intermediate_size"], "layers.0.mlp.gate_up_proj.weight", 0, 2)?;
    t.record_bias("attention_bias", "layers.0.self_attn.q_proj")
}

/// Files of the older class have the architecture `chatglm`.
pub(super) const GGUF_BLOCK: &[NameMapping] = &[("ffn_up", "mlp.gate_up_proj", Same)];

pub(super) fn gguf_fields(w: &mut ConfigFieldWriter<'_>) -> FieldResult {
    w.set_field("hidden_act", "silu");
    w.set_field("attention_bias", w.has_tensor("blk.0.attn_q.bias"));
    w.copy_partial_rotary("partial_rotary_factor")
}
