//! Mixtral (Jiang et al. 2024; reference: `MixtralForCausalLM` of transformers): the Mistral block with experts in place
//! of the feed-forward part.

use crate::checkpoint::gguf::NameMapping;
use crate::checkpoint::gguf::TensorConversion::{Experts, KeyHeads, QueryHeads, Same};
use crate::config::{ConfigFields, RopeConfig, RopeDefaults};
use crate::definition::Architecture;
use crate::error::ConfigError;
use crate::evidence::{ConfigEvidence, EvidenceResult};
use crate::family::{FamilyVariant, ModelFamily};
use crate::layers::moe::{ExpertNames, ExpertStorage, MoeLayer};
use crate::layers::norm::{Norm, rms_norm};
use crate::layers::{AttentionVariant, Rope, RopeTables, SelfAttention};
use crate::transformer::{ModelBuilder, ModelSizes, OuterLayers, Transformer, widest_window};
use mlcc_ir::graph::ValueId;

pub const FAMILY: ModelFamily = ModelFamily {
    variants: &[FamilyVariant {
        model_type: "mixtral",
        classes: &["MixtralForCausalLM"],
        about: "Mixtral",
        read: |fields| MixtralConfig::from_fields(fields).map(Architecture::new),
        infer: infer_fields,
    }],
    gguf: &[],
};

#[derive(Clone, Debug, PartialEq)]
pub struct MixtralConfig {
    pub sizes: ModelSizes,
    pub eps: f64,
    pub rope: Rope,
    pub windows: Vec<Option<usize>>,
    pub experts: MoeLayer,
    pub tied: bool,
}

impl MixtralConfig {
    pub fn from_fields(fields: &ConfigFields) -> Result<MixtralConfig, ConfigError> {
        let mut sizes = ModelSizes::read(fields, Some(32768))?;
        let defaults = RopeDefaults { theta: 1e6, ..RopeDefaults::LLAMA };
        let rope = RopeConfig::read(fields, sizes.head_size, sizes.context, defaults)?;
        sizes.context = rope.context;
        let intermediate = fields.size("intermediate_size")?;
        Ok(MixtralConfig {
            eps: fields.epsilon(&["rms_norm_eps"], 1e-5)?,
            rope: rope.rope,
            windows: fields.layer_windows(sizes.layers, |_| true)?,
            experts: MoeLayer::read(fields, &["num_local_experts"], intermediate, true)?,
            tied: fields.flag_or("tie_word_embeddings", false)?,
            sizes,
        })
    }
}

impl Transformer for MixtralConfig {
    type Shared = RopeTables;

    fn sizes(&self) -> &ModelSizes {
        &self.sizes
    }

    fn outer_layers(&self) -> OuterLayers {
        OuterLayers::hugging_face(Norm::Rms(self.eps), self.tied)
    }

    fn prepare_shared(&self, net: &mut ModelBuilder) -> RopeTables {
        self.rope.tables(net, "rope")
    }

    fn add_layer(&self, net: &mut ModelBuilder, layer: usize, x: ValueId, rope: &RopeTables) -> ValueId {
        let name = format!("model.layers.{layer}");
        let h = rms_norm(net, x, &format!("{name}.input_layernorm"), self.eps);
        let attention = AttentionVariant {
            window: self.windows[layer],
            ..AttentionVariant::causal(self.sizes.head_size)
        };
        let part = format!("{name}.self_attn");
        let h = SelfAttention::new(&part, rope, attention).apply(net, layer, &self.sizes, h);
        let x = net.add_residual(layer, "attention", x, h);
        let h = rms_norm(net, x, &format!("{name}.post_attention_layernorm"), self.eps);
        let (router, inside) =
            (format!("{name}.block_sparse_moe.gate"), format!("{name}.block_sparse_moe.experts"));
        let stored = ExpertStorage::Single { experts: &inside, parts: ["w1", "w3", "w2"] };
        let names = ExpertNames { router: &router, correction: None, expert_scale: None, storage: stored };
        let h = self.experts.apply(net, h, &names);
        net.add_residual(layer, "mlp", x, h)
    }

    fn has_experts(&self) -> bool {
        true
    }

    fn window(&self) -> Option<usize> {
        widest_window(&self.windows)
    }
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
