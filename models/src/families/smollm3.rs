//! SmolLM3 (Bakouch et al. 2025; reference: `SmolLM3ForCausalLM` of transformers): the Llama block, with every fourth
//! layer without positions (NoPE, Yang et al. 2025).

use crate::checkpoint::gguf::{ConfigFieldWriter, FieldResult, GgufArchitecture, INTERLEAVED, TensorNameMap};
use crate::config::ConfigFields;
use crate::config::published::PublishedFields;
use crate::definition::Architecture;
use crate::error::ConfigError;
use crate::evidence::{ConfigEvidence, EvidenceResult};
use crate::families::llama;
use crate::family::{FamilyVariant, ModelFamily};
use crate::layers::{RopeConfig, RopeDefaults};
use crate::standard_decoder::StandardDecoder;
use crate::transformer::ModelSizes;

pub const FAMILY: ModelFamily = ModelFamily {
    variants: &[FamilyVariant {
        model_type: "smollm3",
        classes: &["SmolLM3ForCausalLM"],
        about: "SmolLM3",
        read: |fields| read(fields).map(Architecture::new),
        infer: infer_fields,
        fields: PublishedFields {
            read: "attention_bias hidden_act hidden_size intermediate_size layer_types \
                        max_position_embeddings=32768 mlp_bias no_rope_layer_interval no_rope_layers \
                        num_attention_heads num_hidden_layers num_key_value_heads=4 rms_norm_eps \
                        rope_parameters sliding_window tie_word_embeddings use_sliding_window \
                        vocab_size",
            ..PublishedFields::UNKNOWN
        },
    }],
    gguf: &[GgufArchitecture {
        name: "smollm3",
        model_type: "smollm3",
        write_fields: gguf_fields,
        tensor_names: |_| TensorNameMap::llama(INTERLEAVED),
        ..GgufArchitecture::LLAMA
    }],
};

fn read(fields: &ConfigFields) -> Result<StandardDecoder, ConfigError> {
    let mut model = llama::read(fields)?;
    let ModelSizes { head_size, layers, context, .. } = model.sizes;
    let defaults = RopeDefaults { theta: 2e6, ..RopeDefaults::LLAMA };
    let attention = &mut model.block.attention;
    attention.rope = RopeConfig::read(fields, head_size, context, defaults)?.rope;
    let rotated = layers_with_rope(fields, layers)?;
    if fields.flag_or("use_sliding_window", false)? {
        attention.windows = fields.layer_windows(layers, |layer| !rotated[layer])?;
    }
    attention.use_rope = rotated;
    model.outer_layers.tied = fields.flag_or("tie_word_embeddings", true)?;
    Ok(model)
}

/// By layer, whether it has rotary embedding: `no_rope_layers` has a 1 where it has, and a 0 where it has not.
fn layers_with_rope(fields: &ConfigFields, layers: usize) -> Result<Vec<bool>, ConfigError> {
    let field = "no_rope_layers";
    let Some(found) = fields.get(field) else {
        let interval = fields.size_or("no_rope_layer_interval", 4)?;
        return Ok((1..=layers).map(|number| !number.is_multiple_of(interval)).collect());
    };
    let flags = fields.numbers(field)?;
    match flags.len() == layers && flags.iter().all(|flag| [0.0, 1.0].contains(flag)) {
        true => Ok(flags.into_iter().map(|flag| flag == 1.0).collect()),
        false => Err(fields.invalid_value(field, &format!("a list of {layers} of 0 and 1"), found)),
    }
}

fn infer_fields(t: &mut ConfigEvidence) -> EvidenceResult {
    t.record_tied_llama_block()?;
    t.record_bias("attention_bias", "layers.0.self_attn.q_proj")?;
    t.record_bias("mlp_bias", "layers.0.mlp.gate_proj")
}

fn gguf_fields(w: &mut ConfigFieldWriter<'_>) -> FieldResult {
    w.set_field("hidden_act", "silu");
    w.set_field("attention_bias", w.has_tensor("blk.0.attn_q.bias"));
    w.set_field("mlp_bias", w.has_tensor("blk.0.ffn_up.bias"));
    Ok(())
}
