//! EXAONE 4 (LG AI Research 2025; reference: `Exaone4ForCausalLM` of transformers): norms after the parts of a layer and on the
//! heads of queries and keys. Where some layers have a window, the others have no positions.

use crate::checkpoint::gguf::{
    ConfigFieldWriter, FieldResult, GgufArchitecture, NORMS_BEHIND, TensorNameMap,
};
use crate::config::ConfigFields;
use crate::config::published::PublishedFields;
use crate::definition::Architecture;
use crate::error::ConfigError;
use crate::family::{FamilyVariant, ModelFamily};
use crate::standard_decoder::{BlockNorms, QueryKeyNorm, StandardDecoder, StandardDefaults};
use serde_json::Value;

pub const FAMILY: ModelFamily = ModelFamily {
    variants: &[FamilyVariant {
        model_type: "exaone4",
        classes: &["Exaone4ForCausalLM"],
        about: "EXAONE 4",
        read: |fields| read(fields).map(Architecture::new),
        infer: |t| t.record_llama_block(Some("layers.0.self_attn.q_norm.weight")),
        fields: PublishedFields {
            read: "hidden_act hidden_size intermediate_size layer_types max_position_embeddings \
                        num_attention_heads num_hidden_layers num_key_value_heads=32 rms_norm_eps \
                        rope_parameters sliding_window=4096 sliding_window_pattern \
                        tie_word_embeddings vocab_size",
            ..PublishedFields::UNKNOWN
        },
    }],
    gguf: &[GgufArchitecture {
        name: "exaone4",
        model_type: "exaone4",
        write_fields: gguf_fields,
        tensor_names: |_| TensorNameMap::llama(NORMS_BEHIND),
        ..GgufArchitecture::LLAMA
    }],
};

fn read(fields: &ConfigFields) -> Result<StandardDecoder, ConfigError> {
    let defaults = StandardDefaults { epsilon: ("rms_norm_eps", 1e-5), ..StandardDefaults::LLAMA };
    let mut model = StandardDecoder::read(fields, &defaults)?;
    model.block.norms = BlockNorms::AFTER;
    let (pattern, attention) = (WindowPattern::read(fields)?, &mut model.block.attention);
    attention.head_norm = QueryKeyNorm::EachHead;
    attention.windows = fields.layer_windows(model.sizes.layers, |layer| pattern.is_local(layer))?;
    if fields.get("sliding_window").is_some() {
        attention.use_rope = attention.windows.iter().map(Option::is_some).collect();
    }
    Ok(model)
}

/// `sliding_window_pattern`: which layers have a window, where `layer_types` does not say it.
enum WindowPattern {
    /// All but every so many-th.
    Every(usize),
    /// By letter, again and again: `L` has a window, `G` has none.
    Letters(Vec<bool>),
}

impl WindowPattern {
    fn read(fields: &ConfigFields) -> Result<WindowPattern, ConfigError> {
        let field = "sliding_window_pattern";
        let Some(Value::String(letters)) = fields.get(field) else {
            // Files without windows may say 0.
            return Ok(WindowPattern::Every(fields.count_or(field, 4)?.max(1)));
        };
        let local = letters.chars().map(|letter| match letter {
            'L' => Some(true),
            'G' => Some(false),
            _ => None,
        });
        match local.collect::<Option<Vec<bool>>>().filter(|local| !local.is_empty()) {
            Some(local) => Ok(WindowPattern::Letters(local)),
            None => {
                let expected = "a number of layers, or letters L (window) and G (none)";
                Err(fields.invalid_value(field, expected, &Value::from(letters.as_str())))
            }
        }
    }

    fn is_local(&self, layer: usize) -> bool {
        match self {
            WindowPattern::Every(count) => !(layer + 1).is_multiple_of(*count),
            WindowPattern::Letters(local) => local[layer % local.len()],
        }
    }
}

fn gguf_fields(w: &mut ConfigFieldWriter<'_>) -> FieldResult {
    w.set_field("hidden_act", "silu");
    w.copy_number("attention.sliding_window", "sliding_window")?;
    let windowed = w.layer_types()?;
    if !windowed.is_empty() {
        w.set_field("layer_types", windowed);
    }
    Ok(())
}
