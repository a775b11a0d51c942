//! Phi-3 and Phi-4-mini (Abdin et al. 2024; reference: `Phi3ForCausalLM` of transformers): the Llama block with fused
//! projections, LongRoPE in the models of long context.

use crate::checkpoint::gguf::TensorConversion::Same;
use crate::checkpoint::gguf::{ConfigFieldWriter, FieldResult, GgufArchitecture, TensorNameMap};
use crate::config::ConfigFields;
use crate::config::published::PublishedFields;
use crate::config::sizes::KV_HEADS;
use crate::definition::Architecture;
use crate::error::ConfigError;
use crate::evidence::{ConfigEvidence, EvidenceResult};
use crate::family::{FamilyVariant, ModelFamily};
use crate::standard_decoder::{MlpForm, QkvProjection, StandardDecoder, StandardDefaults};

pub const FAMILY: ModelFamily = ModelFamily {
    variants: &[FamilyVariant {
        model_type: "phi3",
        classes: &["Phi3ForCausalLM"],
        about: "Phi 3",
        read: |fields| read(fields).map(Architecture::new),
        infer: infer_fields,
        fields: PublishedFields {
            read: "hidden_act hidden_size intermediate_size max_position_embeddings \
                        num_attention_heads num_hidden_layers num_key_value_heads \
                        original_max_position_embeddings=4096 rms_norm_eps rope_parameters \
                        sliding_window tie_word_embeddings vocab_size",
            ..PublishedFields::UNKNOWN
        },
    }],
    gguf: &[GgufArchitecture {
        name: "phi3",
        model_type: "phi3",
        write_fields: gguf_fields,
        tensor_names: |_| TensorNameMap::llama(&[("ffn_up", "mlp.gate_up_proj", Same)]),
        ..GgufArchitecture::LLAMA
    }],
};

fn read(fields: &ConfigFields) -> Result<StandardDecoder, ConfigError> {
    let defaults =
        StandardDefaults { context: 4096, epsilon: ("rms_norm_eps", 1e-5), ..StandardDefaults::LLAMA };
    let mut model = StandardDecoder::read(fields, &defaults)?;
    model.block.attention.qkv = QkvProjection::FusedInOrder("qkv_proj");
    model.block.attention.windows = fields.layer_windows(model.sizes.layers, |_| true)?;
    model.block.mlp.form = MlpForm::GATED_FUSED;
    Ok(model)
}

fn infer_fields(t: &mut ConfigEvidence) -> EvidenceResult {
    t.record_embedding("embed_tokens.weight", "lm_head.weight", false)?;
    let (output, fused) = ("layers.0.self_attn.o_proj.weight", "layers.0.self_attn.qkv_proj.weight");
    t.record_fused_heads(output, fused, &KV_HEADS)?;
    t.record_axis_size(&["intermediate_size"], "layers.0.mlp.gate_up_proj.weight", 0, 2)
}

fn gguf_fields(w: &mut ConfigFieldWriter<'_>) -> FieldResult {
    w.set_field("hidden_act", "silu");
    w.copy_number("attention.sliding_window", "sliding_window")?;
    w.copy_number("rope.scaling.original_context_length", "original_max_position_embeddings")?;
    w.copy_partial_rotary("partial_rotary_factor")
}
