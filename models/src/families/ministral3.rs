//! Ministral 3 (Mistral AI 2025; reference: `Ministral3ForCausalLM` of transformers): the Llama block, with queries that
//! grow with the logarithm of their position beyond the original context (Nakanishi 2025, as in Llama 4).

use crate::checkpoint::gguf::{ConfigFieldWriter, FieldResult, GgufArchitecture, INTERLEAVED, TensorNameMap};
use crate::config::ConfigFields;
use crate::config::published::PublishedFields;
use crate::definition::Architecture;
use crate::error::ConfigError;
use crate::family::{FamilyVariant, ModelFamily};
use crate::layers::RopeDefaults;
use crate::layers::query_temperature::QueryTemperature;
use crate::standard_decoder::{StandardDecoder, StandardDefaults};
use serde_json::{Map, Value, json};

pub const FAMILY: ModelFamily = ModelFamily {
    variants: &[FamilyVariant {
        model_type: "ministral3",
        classes: &["Ministral3ForCausalLM"],
        about: "Ministral 3",
        read: |fields| read(fields).map(Architecture::new),
        infer: |t| t.record_llama_block(None),
        fields: PublishedFields {
            read: "head_dim=128 hidden_act hidden_size intermediate_size \
                        max_position_embeddings num_attention_heads num_hidden_layers \
                        num_key_value_heads=8 rms_norm_eps \
                        rope_parameters={\"rope_theta\":1000000.0,\"factor\":16.0,\"original_max_position_embeddings\":16384,\"beta_fast\":32.0,\"beta_slow\":1.0,\"mscale_all_dim\":1.0,\"mscale\":1.0,\"llama_4_scaling_beta\":0.1,\"rope_type\":\"yarn\"} \
                        sliding_window tie_word_embeddings vocab_size",
            ..PublishedFields::UNKNOWN
        },
    }],
    gguf: &[GgufArchitecture {
        name: "mistral3",
        model_type: "ministral3",
        write_fields: |w| {
            w.set_field("hidden_act", "silu");
            Ok(())
        },
        tensor_names: |_| TensorNameMap::llama(INTERLEAVED),
        write_yarn: gguf_yarn,
        ..GgufArchitecture::LLAMA
    }],
};

fn read(fields: &ConfigFields) -> Result<StandardDecoder, ConfigError> {
    let defaults = StandardDefaults {
        context: 262_144,
        rope: RopeDefaults { theta: 1e6, ..RopeDefaults::LLAMA },
        epsilon: ("rms_norm_eps", 1e-5),
        ..StandardDefaults::LLAMA
    };
    let mut model = StandardDecoder::read(fields, &defaults)?;
    let parameters = match fields.nested_object("rope_parameters")? {
        Some(parameters) => parameters,
        None => return Err(fields.missing_field("rope_parameters", "an object")),
    };
    let attention = &mut model.block.attention;
    attention.windows = fields.layer_windows(model.sizes.layers, |_| true)?;
    attention.query_temperature = Some(QueryTemperature::read(&parameters, model.sizes.context)?);
    Ok(model)
}

fn gguf_yarn(w: &mut ConfigFieldWriter<'_>, fields: &mut Map<String, Value>) -> FieldResult {
    // The converter writes one of two numbers that are equal.
    if let Some(scale) = w.float("rope.scaling.yarn_log_multiplier")? {
        fields.insert("mscale".to_string(), json!(scale));
        fields.insert("mscale_all_dim".to_string(), json!(scale));
    }
    w.set_rope_parameters(fields, 1e6, 0.0)
}
