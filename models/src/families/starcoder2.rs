//! StarCoder 2 (Lozhkov et al. 2024; reference: `Starcoder2ForCausalLM` of transformers): LayerNorm, biases everywhere,
//! a plain feed-forward part, grouped queries, a sliding window.

use crate::checkpoint::gguf::TensorConversion::Same;
use crate::checkpoint::gguf::{ConfigFieldWriter, FieldResult, GgufArchitecture, TensorNameMap};
use crate::config::ConfigFields;
use crate::config::published::PublishedFields;
use crate::definition::Architecture;
use crate::error::ConfigError;
use crate::evidence::{ConfigEvidence, EvidenceResult};
use crate::family::{FamilyVariant, ModelFamily};
use crate::layers::ActivationFunction;
use crate::layers::norm::Norm;
use crate::standard_decoder::{MlpForm, StandardDecoder, StandardDefaults};

pub const FAMILY: ModelFamily = ModelFamily {
    variants: &[FamilyVariant {
        model_type: "starcoder2",
        classes: &["Starcoder2ForCausalLM"],
        about: "StarCoder 2",
        read: |fields| read(fields).map(Architecture::new),
        infer: infer_fields,
        fields: PublishedFields {
            read: "hidden_act hidden_size intermediate_size max_position_embeddings \
                        norm_epsilon num_attention_heads num_hidden_layers num_key_value_heads=2 \
                        rope_parameters sliding_window tie_word_embeddings use_bias vocab_size",
            ..PublishedFields::UNKNOWN
        },
    }],
    gguf: &[GgufArchitecture {
        name: "starcoder2",
        model_type: "starcoder2",
        write_fields: gguf_fields,
        tensor_names: |_| {
            TensorNameMap::llama(&[("ffn_up", "mlp.c_fc", Same), ("ffn_down", "mlp.c_proj", Same)])
        },
        ..GgufArchitecture::LLAMA
    }],
};

fn read(fields: &ConfigFields) -> Result<StandardDecoder, ConfigError> {
    let defaults = StandardDefaults {
        context: 4096,
        norm: Norm::Layer,
        epsilon: ("norm_epsilon", 1e-5),
        activation: ActivationFunction::GeluTanh,
        tied: true,
        ..StandardDefaults::LLAMA
    };
    let mut model = StandardDecoder::read(fields, &defaults)?;
    let bias = fields.flag_or("use_bias", true)?;
    model.block.attention.set_bias(bias);
    model.block.attention.windows = fields.layer_windows(model.sizes.layers, |_| true)?;
    model.block.mlp.bias = bias;
    model.block.mlp.form = MlpForm::Ungated(["c_fc", "c_proj"]);
    Ok(model)
}

fn infer_fields(t: &mut ConfigEvidence) -> EvidenceResult {
    t.record_embedding("embed_tokens.weight", "lm_head.weight", true)?;
    t.record_heads("layers.0.self_attn", None)?;
    t.record_axis_size(&["intermediate_size"], "layers.0.mlp.c_fc.weight", 0, 1)?;
    t.record_bias("use_bias", "layers.0.self_attn.q_proj")
}

fn gguf_fields(w: &mut ConfigFieldWriter<'_>) -> FieldResult {
    w.set_field("hidden_act", "gelu_pytorch_tanh");
    w.set_field("use_bias", w.has_tensor("blk.0.attn_q.bias"));
    w.copy_number("attention.sliding_window", "sliding_window")?;
    w.copy_float("attention.layer_norm_epsilon", "norm_epsilon")
}
