//! InternLM 2 (Cai et al. 2024; reference code: `InternLM2ForCausalLM` of the published checkpoints): the Llama block
//! with its own names and a projection that is fused by key head.

use crate::config::ConfigFields;
use crate::config::published::PublishedFields;
use crate::config::sizes::KV_HEADS;
use crate::definition::Architecture;
use crate::error::ConfigError;
use crate::evidence::{ConfigEvidence, EvidenceResult};
use crate::family::{FamilyVariant, ModelFamily};
use crate::standard_decoder::{BlockNorms, MlpForm, QkvProjection, StandardDecoder, StandardDefaults};
use crate::transformer::OuterLayers;

pub const FAMILY: ModelFamily = ModelFamily {
    variants: &[FamilyVariant {
        model_type: "internlm2",
        classes: &["InternLM2ForCausalLM"],
        about: "InternLM 2",
        read: |fields| read(fields).map(Architecture::new),
        infer: infer_fields,
        fields: PublishedFields::UNKNOWN,
    }],
    gguf: &[],
};

fn read(fields: &ConfigFields) -> Result<StandardDecoder, ConfigError> {
    let defaults = StandardDefaults { context: 32768, ..StandardDefaults::LLAMA };
    let mut model = StandardDecoder::read(fields, &defaults)?;
    let (block, tied) = (&mut model.block, model.outer_layers.tied);
    block.norms = BlockNorms::before("attention_norm", "ffn_norm");
    block.attention.name = "attention";
    block.attention.qkv = QkvProjection::FusedByKeyHead("wqkv");
    block.attention.output = "wo";
    block.attention.set_bias(fields.flag_or("bias", true)?);
    block.mlp.name = "feed_forward";
    block.mlp.form = MlpForm::Gated(["w1", "w3", "w2"]);
    let (embedding, norm) = ("model.tok_embeddings.weight", (block.norm, "model.norm"));
    model.outer_layers = OuterLayers::with_names(embedding, norm, "output.weight", tied);
    model.inner_model = ("model.", &["tok_embeddings.", "layers.", "norm."]);
    Ok(model)
}

fn infer_fields(t: &mut ConfigEvidence) -> EvidenceResult {
    t.record_embedding("tok_embeddings.weight", "output.weight", false)?;
    t.record_fused_heads("layers.0.attention.wo.weight", "layers.0.attention.wqkv.weight", &KV_HEADS)?;
    t.record_axis_size(&["intermediate_size"], "layers.0.feed_forward.w1.weight", 0, 1)?;
    t.record_bias("bias", "layers.0.attention.wqkv")
}
