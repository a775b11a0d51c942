//! Mixtral (Jiang et al. 2024; reference: `MixtralForCausalLM` of transformers): the Mistral block with experts in place
//! of the feed-forward part.

use crate::checkpoint::gguf::NameMapping;
use crate::checkpoint::gguf::TensorConversion::{Experts, KeyHeads, QueryHeads, Same};
use crate::config::ConfigFields;
use crate::config::published::PublishedFields;
use crate::definition::Architecture;
use crate::error::ConfigError;
use crate::evidence::{ConfigEvidence, EvidenceResult};
use crate::family::{FamilyVariant, ModelFamily};
use crate::layers::RopeDefaults;
use crate::layers::moe::MoeLayer;
use crate::standard_decoder::{BlockExperts, StandardDecoder, StandardDefaults};

pub const FAMILY: ModelFamily = ModelFamily {
    variants: &[FamilyVariant {
        model_type: "mixtral",
        classes: &["MixtralForCausalLM"],
        about: "Mixtral",
        read: |fields| read(fields).map(Architecture::new),
        infer: infer_fields,
        fields: PublishedFields {
            read: "head_dim hidden_act hidden_size intermediate_size \
                        max_position_embeddings=131072 num_attention_heads num_experts_per_tok \
                        num_hidden_layers num_key_value_heads=8 num_local_experts rms_norm_eps \
                        rope_parameters sliding_window tie_word_embeddings vocab_size",
            ..PublishedFields::UNKNOWN
        },
    }],
    gguf: &[],
};

fn read(fields: &ConfigFields) -> Result<StandardDecoder, ConfigError> {
    let defaults = StandardDefaults {
        context: 32768,
        rope: RopeDefaults { theta: 1e6, ..RopeDefaults::LLAMA },
        epsilon: ("rms_norm_eps", 1e-5),
        ..StandardDefaults::LLAMA
    };
    let mut model = StandardDecoder::read(fields, &defaults)?;
    model.block.attention.windows = fields.layer_windows(model.sizes.layers, |_| true)?;
    model.block.experts = Some(BlockExperts {
        experts: MoeLayer::read(fields, &["num_local_experts"], model.block.mlp.width, true)?,
        sparse: vec![true; model.sizes.layers],
        router: "block_sparse_moe.gate",
        inside: "block_sparse_moe.experts",
        parts: ["w1", "w3", "w2"],
    });
    Ok(model)
}

fn infer_fields(t: &mut ConfigEvidence) -> EvidenceResult {
    t.record_fused_experts("block_sparse_moe.experts", "w1")?;
    t.record_llama_block(None)?;
    t.record_axis_size(&["intermediate_size"], "block_sparse_moe.experts.0.w1.weight", 0, 1)?;
    t.record_axis_size(&["num_local_experts"], "block_sparse_moe.gate.weight", 0, 1)
}

/// Files have the architecture `llama`.
pub(super) const GGUF_BLOCK: &[NameMapping] = &[
    ("attn_q", "self_attn.q_proj", QueryHeads),
    ("attn_k", "self_attn.k_proj", KeyHeads),
    ("ffn_gate_inp", "block_sparse_moe.gate", Same),
    ("ffn_gate_exps", "block_sparse_moe.experts.{e}.w1", Experts),
    ("ffn_down_exps", "block_sparse_moe.experts.{e}.w2", Experts),
    ("ffn_up_exps", "block_sparse_moe.experts.{e}.w3", Experts),
];
