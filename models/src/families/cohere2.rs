//! Command R7B and Command A (Cohere 2024, 2025; reference: `Cohere2ForCausalLM` of transformers): both parts of a layer read one
//! normalised input; layers with a window have rotary embedding of neighbouring elements, the others no positions.

use crate::checkpoint::gguf::{ConfigFieldWriter, FieldResult, GgufArchitecture};
use crate::config::ConfigFields;
use crate::config::published::PublishedFields;
use crate::definition::Architecture;
use crate::error::ConfigError;
use crate::evidence::{ConfigEvidence, EvidenceResult};
use crate::family::{FamilyVariant, ModelFamily};
use crate::layers::RopeDefaults;
use crate::layers::norm::Norm;
use crate::layers::rope::RopePairing;
use crate::standard_decoder::{ResidualForm, StandardDecoder, StandardDefaults};

pub const FAMILY: ModelFamily = ModelFamily {
    variants: &[FamilyVariant {
        model_type: "cohere2",
        classes: &["Cohere2ForCausalLM"],
        about: "Command R7B, Command A",
        read: |fields| read(fields).map(Architecture::new),
        infer: infer_fields,
        fields: PublishedFields {
            read: "attention_bias head_dim hidden_act hidden_size intermediate_size \
                        layer_norm_eps layer_types logit_scale max_position_embeddings \
                        num_attention_heads num_hidden_layers num_key_value_heads rope_parameters \
                        sliding_window=4096 tie_word_embeddings vocab_size",
            ..PublishedFields::UNKNOWN
        },
    }],
    gguf: &[GgufArchitecture {
        name: "cohere2",
        model_type: "cohere2",
        write_fields: gguf_fields,
        ..GgufArchitecture::LLAMA
    }],
};

fn read(fields: &ConfigFields) -> Result<StandardDecoder, ConfigError> {
    let defaults = StandardDefaults {
        context: 8192,
        rope: RopeDefaults { pairs: RopePairing::Interleaved, ..RopeDefaults::LLAMA },
        norm: Norm::LayerNoBias,
        epsilon: ("layer_norm_eps", 1e-5),
        tied: true,
        ..StandardDefaults::LLAMA
    };
    let mut model = StandardDecoder::read(fields, &defaults)?;
    let pattern =
        fields.first_present(&["sliding_window_pattern", "_sliding_window_pattern", "layer_switch"]);
    let pattern = fields.size_or(pattern, 4)?;
    let attention = &mut model.block.attention;
    attention.set_bias(fields.flag_or("attention_bias", false)?);
    attention.windows =
        fields.layer_windows(model.sizes.layers, |layer| !(layer + 1).is_multiple_of(pattern))?;
    attention.use_rope = attention.windows.iter().map(Option::is_some).collect();
    model.block.residual = ResidualForm::ParallelShared;
    model.drops_rows = false;
    model.outer_layers.logit_scale = Some(fields.float_or("logit_scale", 0.0625)?);
    Ok(model)
}

fn infer_fields(t: &mut ConfigEvidence) -> EvidenceResult {
    t.record_tied_llama_block()?;
    t.record_bias("attention_bias", "layers.0.self_attn.q_proj")
}

fn gguf_fields(w: &mut ConfigFieldWriter<'_>) -> FieldResult {
    w.set_field("hidden_act", "silu");
    w.set_field("attention_bias", w.has_tensor("blk.0.attn_q.bias"));
    w.copy_number("attention.sliding_window", "sliding_window")?;
    w.copy_float("attention.layer_norm_epsilon", "layer_norm_eps")?;
    w.copy_float("logit_scale", "logit_scale")
}
