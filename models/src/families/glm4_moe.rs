//! GLM-4.5 and 4.6 (GLM Team 2025; reference: `Glm4MoeForCausalLM` of transformers): the Llama block with rotary embedding on half
//! of each head, and in all but the first layers experts, chosen by corrected sigmoids, with a shared one beside them.

use crate::checkpoint::gguf::TensorConversion::{Experts, Same};
use crate::checkpoint::gguf::{ConfigFieldWriter, FieldResult, GgufArchitecture, NameMapping, TensorNameMap};
use crate::config::ConfigFields;
use crate::config::published::PublishedFields;
use crate::definition::Architecture;
use crate::error::ConfigError;
use crate::evidence::{ConfigEvidence, EvidenceResult};
use crate::family::{FamilyVariant, ModelFamily};
use crate::layers::moe::{
    ExpertGroups, ExpertRouter, FUSED_EXPERTS, Glu, MoeLayer, RouterScoring, SharedExpert,
};
use crate::layers::norm::{Norm, rms_norm};
use crate::layers::{
    ActivationFunction, AttentionVariant, Rope, RopeConfig, RopeDefaults, RopeTables, SelfAttention, mlp,
};
use crate::transformer::{ModelBuilder, ModelSizes, OuterLayers, Transformer};
use mlcc_ir::graph::ValueId;

pub const FAMILY: ModelFamily = ModelFamily {
    variants: &[FamilyVariant {
        model_type: "glm4_moe",
        classes: &["Glm4MoeForCausalLM"],
        about: "GLM-4.5, 4.6",
        read: |fields| Glm4MoeConfig::from_fields(fields).map(Architecture::new),
        infer: infer_fields,
        fields: PublishedFields {
            read: "attention_bias first_k_dense_replace hidden_act hidden_size \
                        intermediate_size max_position_embeddings moe_intermediate_size n_group \
                        n_routed_experts n_shared_experts norm_topk_prob num_attention_heads \
                        num_experts_per_tok num_hidden_layers num_key_value_heads=8 rms_norm_eps \
                        rope_parameters routed_scaling_factor tie_word_embeddings topk_group=1 \
                        use_qk_norm vocab_size",
            none: "num_nextn_predict_layers",
            ..PublishedFields::UNKNOWN
        },
    }],
    gguf: &[GgufArchitecture {
        name: "glm4moe",
        model_type: "glm4_moe",
        write_fields: gguf_fields,
        tensor_names: |_| TensorNameMap::llama(GGUF_BLOCK),
        ..GgufArchitecture::LLAMA
    }],
};

#[derive(Clone, Debug, PartialEq)]
pub struct Glm4MoeConfig {
    pub sizes: ModelSizes,
    pub intermediate: usize,
    pub eps: f64,
    pub activation: ActivationFunction,
    pub rope: Rope,
    pub qkv_bias: bool,
    pub head_norms: bool,
    pub experts: MoeLayer,
    /// Width of the shared expert.
    pub shared: usize,
    /// By layer: experts in place of the plain feed-forward part.
    pub sparse: Vec<bool>,
    pub tied: bool,
}

impl Glm4MoeConfig {
    pub fn from_fields(fields: &ConfigFields) -> Result<Glm4MoeConfig, ConfigError> {
        let mut sizes = ModelSizes::read_equal_heads(fields, Some(131_072))?;
        let defaults = RopeDefaults { share: 0.5, ..RopeDefaults::LLAMA };
        let rope = RopeConfig::read(fields, sizes.head_size, sizes.context, defaults)?;
        sizes.context = rope.context;
        let activation = ActivationFunction::read(fields, &["hidden_act"], ActivationFunction::Silu)?;
        let routing = ExpertRouter {
            scoring: RouterScoring::Sigmoid,
            normalised: fields.flag_or("norm_topk_prob", true)?,
            sum_epsilon: 1e-20,
            scale: fields.float_or("routed_scaling_factor", 1.0)?,
            groups: ExpertGroups::read(fields, "n_group", "n_routed_experts", 2)?,
            ..ExpertRouter::read(fields, &["n_routed_experts"])?
        };
        let width = fields.size("moe_intermediate_size")?;
        Ok(Glm4MoeConfig {
            intermediate: fields.size("intermediate_size")?,
            eps: fields.epsilon(&["rms_norm_eps"], 1e-5)?,
            activation,
            rope: rope.rope,
            qkv_bias: fields.flag_or("attention_bias", false)?,
            head_norms: fields.flag_or("use_qk_norm", false)?,
            experts: MoeLayer {
                routing,
                intermediate: width,
                glu: Glu::Plain(activation),
                fused: fields.flag_or(FUSED_EXPERTS, false)?,
            },
            shared: width * fields.size_or("n_shared_experts", 1)?,
            sparse: fields.sparse_layers(sizes.layers, 1)?,
            tied: fields.flag_or("tie_word_embeddings", false)?,
            sizes,
        })
    }

    fn feed_forward(&self, net: &mut ModelBuilder, layer: usize, name: &str, x: ValueId) -> ValueId {
        if !self.sparse[layer] {
            return mlp::gated_by_name(net, x, name, self.intermediate, false, self.activation);
        }
        let parts = ["gate_proj", "up_proj", "down_proj"];
        let shared = SharedExpert { width: self.shared, activation: self.activation };
        self.experts.apply_with_shared(net, x, name, parts, true, &shared)
    }
}

impl Transformer for Glm4MoeConfig {
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
        let h = SelfAttention {
            qkv_bias: self.qkv_bias,
            head_norm: self.head_norms.then_some((rms_norm, self.eps)),
            ..SelfAttention::new(
                &format!("{name}.self_attn"),
                rope,
                AttentionVariant::causal(self.sizes.head_size),
            )
        }
        .apply(net, layer, &self.sizes, h);
        let x = net.add_residual(layer, "attention", x, h);
        let h = rms_norm(net, x, &format!("{name}.post_attention_layernorm"), self.eps);
        let h = self.feed_forward(net, layer, &format!("{name}.mlp"), h);
        net.add_residual(layer, "mlp", x, h)
    }

    fn has_experts(&self) -> bool {
        true
    }

    /// A draft head is stored as layers after the last one.
    fn is_ignored(&self, name: &str) -> bool {
        let layer = name.strip_prefix("model.layers.").and_then(|rest| rest.split('.').next()?.parse().ok());
        let is_draft = layer.is_some_and(|layer: usize| layer >= self.sizes.layers);
        is_draft || self.tied && name == self.outer_layers().head
    }
}

fn infer_fields(t: &mut ConfigEvidence) -> EvidenceResult {
    t.record_fused_experts("mlp.experts", "gate_proj")?;
    t.record_embedding("embed_tokens.weight", "lm_head.weight", false)?;
    t.record_heads("layers.0.self_attn", None)?;
    t.record_axis_size(&["intermediate_size"], "layers.0.mlp.gate_proj.weight", 0, 1)?;
    t.record_axis_size(&["n_routed_experts"], "mlp.gate.weight", 0, 1)?;
    t.record_axis_size(&["moe_intermediate_size"], "mlp.experts.0.gate_proj.weight", 0, 1)?;
    t.record_bias("attention_bias", "layers.0.self_attn.q_proj")
}

const GGUF_BLOCK: &[NameMapping] = &[
    ("post_attention_norm", "post_attention_layernorm", Same),
    ("ffn_gate_inp", "mlp.gate", Same),
    ("exp_probs_b.bias", "mlp.gate.e_score_correction_bias", Same),
    ("ffn_gate_exps", "mlp.experts.{e}.gate_proj", Experts),
    ("ffn_down_exps", "mlp.experts.{e}.down_proj", Experts),
    ("ffn_up_exps", "mlp.experts.{e}.up_proj", Experts),
    ("ffn_gate_shexp", "mlp.shared_experts.gate_proj", Same),
    ("ffn_down_shexp", "mlp.shared_experts.down_proj", Same),
    ("ffn_up_shexp", "mlp.shared_experts.up_proj", Same),
    ("nextn.eh_proj", "eh_proj", Same),
    ("nextn.enorm", "enorm", Same),
    ("nextn.hnorm", "hnorm", Same),
    ("nextn.embed_tokens", "embed_tokens", Same),
    ("nextn.shared_head_head", "shared_head.head", Same),
    ("nextn.shared_head_norm", "shared_head.norm", Same),
];

fn gguf_fields(w: &mut ConfigFieldWriter<'_>) -> FieldResult {
    w.set_field("hidden_act", "silu");
    w.set_field("attention_bias", w.has_tensor("blk.0.attn_q.bias"));
    w.set_field("use_qk_norm", w.has_tensor("blk.0.attn_q_norm.weight"));
    w.copy_experts(["n_routed_experts", "moe_intermediate_size"])?;
    w.copy_number("expert_shared_count", "n_shared_experts")?;
    w.copy_number("leading_dense_block_count", "first_k_dense_replace")?;
    w.copy_float("expert_weights_scale", "routed_scaling_factor")?;
    if let Some(flag) = w.flag("expert_weights_norm")? {
        w.set_field("norm_topk_prob", flag);
    }
    w.copy_partial_rotary("partial_rotary_factor")
}
