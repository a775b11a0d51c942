//! Qwen 2 and 2.5 (Yang et al. 2024; reference: `Qwen2ForCausalLM` of transformers): the Llama block with biases on
//! queries, keys and values, and in some models a window on the upper layers.

use crate::checkpoint::gguf::GgufArchitecture;
use crate::config::ConfigFields;
use crate::config::published::PublishedFields;
use crate::definition::Architecture;
use crate::error::ConfigError;
use crate::families::llama;
use crate::family::{FamilyVariant, ModelFamily};
use crate::standard_decoder::StandardDecoder;

pub const FAMILY: ModelFamily = ModelFamily {
    variants: &[FamilyVariant {
        model_type: "qwen2",
        classes: &["Qwen2ForCausalLM"],
        about: "Qwen 2, 2.5",
        read: |fields| read(fields).map(Architecture::new),
        infer: |t| t.record_llama_block(None),
        fields: PublishedFields {
            read: "hidden_act hidden_size intermediate_size layer_types \
                        max_position_embeddings=32768 max_window_layers=28 num_attention_heads \
                        num_hidden_layers num_key_value_heads=32 rms_norm_eps rope_parameters \
                        sliding_window=4096 tie_word_embeddings use_sliding_window vocab_size",
            ..PublishedFields::UNKNOWN
        },
    }],
    gguf: &[GgufArchitecture {
        name: "qwen2",
        model_type: "qwen2",
        write_fields: |w| {
            w.set_field("hidden_act", "silu");
            Ok(())
        },
        ..GgufArchitecture::LLAMA
    }],
};

fn read(fields: &ConfigFields) -> Result<StandardDecoder, ConfigError> {
    let mut model = llama::read(fields)?;
    let attention = &mut model.block.attention;
    (attention.qkv_bias, attention.output_bias) = (true, false);
    attention.windows = read_windows(fields, model.sizes.layers)?;
    Ok(model)
}

/// `use_sliding_window` puts the window on the layers from `max_window_layers` on.
pub(super) fn read_windows(fields: &ConfigFields, layers: usize) -> Result<Vec<Option<usize>>, ConfigError> {
    if !fields.flag_or("use_sliding_window", false)? {
        return Ok(vec![None; layers]);
    }
    let first = fields.count_or("max_window_layers", layers)?;
    fields.layer_windows(layers, |layer| layer >= first)
}
