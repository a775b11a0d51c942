//! StableLM 2 (Bellagente et al. 2024; reference: `StableLmForCausalLM` of transformers): LayerNorm around the Llama
//! block, rotary embedding on a quarter of each head; in the 12B model both parts of a layer stand side by side, and heads have
//! norms.

use crate::checkpoint::gguf::TensorConversion::Heads;
use crate::checkpoint::gguf::{ConfigFieldWriter, FieldResult, GgufArchitecture, TensorNameMap};
use crate::config::ConfigFields;
use crate::config::published::PublishedFields;
use crate::definition::Architecture;
use crate::error::ConfigError;
use crate::evidence::{ConfigEvidence, EvidenceResult};
use crate::family::{FamilyVariant, ModelFamily};
use crate::layers::RopeDefaults;
use crate::layers::norm::Norm;
use crate::standard_decoder::{QueryKeyNorm, ResidualForm, StandardDecoder, StandardDefaults};

pub const FAMILY: ModelFamily = ModelFamily {
    variants: &[FamilyVariant {
        model_type: "stablelm",
        classes: &["StableLmForCausalLM"],
        about: "StableLM 2",
        read: |fields| read(fields).map(Architecture::new),
        infer: infer_fields,
        fields: PublishedFields {
            read: "hidden_act hidden_size intermediate_size layer_norm_eps \
                        max_position_embeddings num_attention_heads num_hidden_layers \
                        num_key_value_heads=32 qk_layernorm rope_parameters tie_word_embeddings \
                        use_parallel_residual use_qkv_bias vocab_size",
            ..PublishedFields::UNKNOWN
        },
    }],
    gguf: &[GgufArchitecture {
        name: "stablelm",
        model_type: "stablelm",
        write_fields: gguf_fields,
        tensor_names: |_| {
            TensorNameMap::llama(&[
                ("attn_q_norm.weight", "self_attn.q_layernorm.norms.{e}.weight", Heads),
                ("attn_k_norm.weight", "self_attn.k_layernorm.norms.{e}.weight", Heads),
            ])
        },
        ..GgufArchitecture::LLAMA
    }],
};

fn read(fields: &ConfigFields) -> Result<StandardDecoder, ConfigError> {
    let defaults = StandardDefaults {
        context: 4096,
        rope: RopeDefaults { share: 0.25, ..RopeDefaults::LLAMA },
        norm: Norm::Layer,
        epsilon: ("layer_norm_eps", 1e-5),
        ..StandardDefaults::LLAMA
    };
    let mut model = StandardDecoder::read(fields, &defaults)?;
    model.block.attention.qkv_bias = fields.flag_or("use_qkv_bias", false)?;
    if fields.flag_or("qk_layernorm", false)? {
        model.block.attention.head_norm = QueryKeyNorm::EachHeadOwnWeights;
    }
    if fields.flag_or("use_parallel_residual", false)? {
        model.block.residual = ResidualForm::ParallelShared;
    }
    Ok(model)
}

fn infer_fields(t: &mut ConfigEvidence) -> EvidenceResult {
    t.record_llama_block(None)?;
    t.record_bias("use_qkv_bias", "layers.0.self_attn.q_proj")?;
    let (norm, last) = ("layers.0.input_layernorm.weight", "layers.0.post_attention_layernorm.weight");
    t.record_presence("qk_layernorm", norm, "layers.0.self_attn.q_layernorm.norms.0.weight", true)?;
    t.record_presence("use_parallel_residual", norm, last, false)
}

fn gguf_fields(w: &mut ConfigFieldWriter<'_>) -> FieldResult {
    w.set_field("hidden_act", "silu");
    w.set_field("use_qkv_bias", w.has_tensor("blk.0.attn_q.bias"));
    w.set_field("qk_layernorm", w.has_tensor("blk.0.attn_q_norm.weight"));
    let parallel = w.flag("use_parallel_residual")?.unwrap_or(false);
    w.set_field("use_parallel_residual", parallel && !w.has_tensor("blk.0.ffn_norm.weight"));
    w.copy_float("attention.layer_norm_epsilon", "layer_norm_eps")?;
    w.copy_partial_rotary("partial_rotary_factor")
}
