//! Qwen 3 (Yang et al. 2025; reference: `Qwen3ForCausalLM` and `Qwen3MoeForCausalLM` of transformers): the Llama block
//! with norms on the heads of queries and keys, and with experts in place of the feed-forward part in some or all layers.

use crate::checkpoint::gguf::TensorConversion::{Experts, Same};
use crate::checkpoint::gguf::{ConfigFieldWriter, FieldResult, GgufArchitecture, TensorNameMap};
use crate::config::ConfigFields;
use crate::config::published::PublishedFields;
use crate::definition::Architecture;
use crate::error::ConfigError;
use crate::evidence::{ConfigEvidence, EvidenceResult};
use crate::families::qwen2;
use crate::family::{FamilyVariant, ModelFamily};
use crate::layers::moe::MoeLayer;
use crate::standard_decoder::{BlockExperts, QueryKeyNorm, StandardDecoder, StandardDefaults};
use crate::transformer::ModelSizes;

pub const FAMILY: ModelFamily = ModelFamily {
    variants: &[
        FamilyVariant {
            model_type: "qwen3",
            classes: &["Qwen3ForCausalLM"],
            about: "Qwen 3",
            read: |fields| read(fields).map(Architecture::new),
            infer: infer_fields,
            fields: PublishedFields {
                read: "attention_bias head_dim hidden_act hidden_size intermediate_size layer_types \
                        max_position_embeddings max_window_layers=28 num_attention_heads \
                        num_hidden_layers num_key_value_heads=32 rms_norm_eps rope_parameters \
                        sliding_window=4096 tie_word_embeddings use_sliding_window vocab_size",
                ..PublishedFields::UNKNOWN
            },
        },
        FamilyVariant {
            model_type: "qwen3_moe",
            classes: &["Qwen3MoeForCausalLM"],
            about: "Qwen 3 with experts",
            read: |fields| read_moe(fields).map(Architecture::new),
            infer: infer_fields,
            fields: PublishedFields {
                read: "attention_bias decoder_sparse_step hidden_act hidden_size intermediate_size \
                        max_position_embeddings mlp_only_layers moe_intermediate_size norm_topk_prob \
                        num_attention_heads num_experts_per_tok num_hidden_layers \
                        num_key_value_heads=4 num_local_experts rms_norm_eps rope_parameters \
                        sliding_window=4096 tie_word_embeddings use_sliding_window vocab_size",
                ..PublishedFields::UNKNOWN
            },
        },
    ],
    gguf: &[
        GgufArchitecture {
            name: "qwen3",
            model_type: "qwen3",
            write_fields: gguf_fields,
            ..GgufArchitecture::LLAMA
        },
        GgufArchitecture {
            name: "qwen3moe",
            model_type: "qwen3_moe",
            write_fields: gguf_moe_fields,
            tensor_names: |_| {
                TensorNameMap::llama(&[
                    ("ffn_gate_inp", "mlp.gate", Same),
                    ("ffn_gate_exps", "mlp.experts.{e}.gate_proj", Experts),
                    ("ffn_down_exps", "mlp.experts.{e}.down_proj", Experts),
                    ("ffn_up_exps", "mlp.experts.{e}.up_proj", Experts),
                ])
            },
            ..GgufArchitecture::LLAMA
        },
    ],
};

fn read(fields: &ConfigFields) -> Result<StandardDecoder, ConfigError> {
    read_sized(fields, ModelSizes::read_sized(fields, Some(32768), Some(128))?)
}

fn read_sized(fields: &ConfigFields, sizes: ModelSizes) -> Result<StandardDecoder, ConfigError> {
    let mut model = StandardDecoder::read_sized(fields, &StandardDefaults::LLAMA, sizes)?;
    let attention = &mut model.block.attention;
    attention.head_norm = QueryKeyNorm::EachHead;
    attention.set_bias(fields.flag_or("attention_bias", false)?);
    attention.windows = qwen2::read_windows(fields, model.sizes.layers)?;
    (model.supports_pooling, model.drops_rows) = (true, false);
    Ok(model)
}

/// With experts in every `decoder_sparse_step`-th layer that `mlp_only_layers` does not name.
fn read_moe(fields: &ConfigFields) -> Result<StandardDecoder, ConfigError> {
    let mut model = read_sized(fields, ModelSizes::read_equal_heads(fields, Some(32768))?)?;
    let (count, width) = (&["num_experts", "num_local_experts"], fields.size("moe_intermediate_size")?);
    let experts = MoeLayer::read(fields, count, width, fields.flag_or("norm_topk_prob", false)?)?;
    // Here no field says where the layers with a window begin.
    if fields.flag_or("use_sliding_window", false)? {
        model.block.attention.windows = fields.layer_windows(model.sizes.layers, |_| true)?;
    }
    let (step, dense) = (fields.size_or("decoder_sparse_step", 1)?, fields.token_ids("mlp_only_layers")?);
    let is_sparse = |layer: usize| !dense.contains(&(layer as u32)) && (layer + 1).is_multiple_of(step);
    model.block.experts = Some(BlockExperts {
        experts,
        sparse: (0..model.sizes.layers).map(is_sparse).collect(),
        router: "mlp.gate",
        inside: "mlp.experts",
        parts: ["gate_proj", "up_proj", "down_proj"],
    });
    Ok(model)
}

fn infer_fields(t: &mut ConfigEvidence) -> EvidenceResult {
    t.record_fused_experts("mlp.experts", "gate_proj")?;
    t.record_llama_block(Some("layers.0.self_attn.q_norm.weight"))?;
    t.record_axis_size(&["moe_intermediate_size"], "mlp.experts.0.gate_proj.weight", 0, 1)?;
    t.record_axis_size(&["num_experts", "num_local_experts"], "mlp.gate.weight", 0, 1)?;
    t.record_bias("attention_bias", "layers.0.self_attn.q_proj")
}

fn gguf_fields(w: &mut ConfigFieldWriter<'_>) -> FieldResult {
    w.set_field("hidden_act", "silu");
    w.set_field("attention_bias", w.has_tensor("blk.0.attn_q.bias"));
    Ok(())
}

fn gguf_moe_fields(w: &mut ConfigFieldWriter<'_>) -> FieldResult {
    gguf_fields(w)?;
    w.copy_experts(["num_experts", "moe_intermediate_size"])?;
    // The converter writes no such flag; all published models have it.
    w.set_field("norm_topk_prob", true);
    let layers = w.required_number("block_count")?.min(1000);
    let dense = (0..layers).filter(|layer| !w.has_tensor(&format!("blk.{layer}.ffn_gate_exps.weight")));
    w.set_field("mlp_only_layers", dense.collect::<Vec<u64>>());
    Ok(())
}
