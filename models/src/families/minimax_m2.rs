//! MiniMax-M2 (MiniMax 2025; reference: `MiniMaxM2ForCausalLM` of transformers): norms on all queries and all keys together,
//! rotary embedding on a part of each head, experts chosen by corrected sigmoids in every layer.

use crate::checkpoint::gguf::TensorConversion::{Experts, Same};
use crate::checkpoint::gguf::{ConfigFieldWriter, FieldResult, GgufArchitecture, NameMapping, TensorNameMap};
use crate::config::ConfigFields;
use crate::config::published::PublishedFields;
use crate::definition::Architecture;
use crate::error::ConfigError;
use crate::evidence::{ConfigEvidence, EvidenceResult};
use crate::family::{FamilyVariant, ModelFamily};
use crate::layers::moe::{
    ExpertNames, ExpertRouter, ExpertStorage, FUSED_EXPERTS, Glu, MoeLayer, RouterScoring,
};
use crate::layers::norm::{Norm, rms_norm};
use crate::layers::{
    ActivationFunction, AttentionVariant, LinearLayer, Rope, RopeConfig, RopeDefaults, RopeTables,
    SelfAttention,
};
use crate::transformer::{ModelBuilder, ModelSizes, OuterLayers, Transformer};
use mlcc_ir::graph::ValueId;
use serde_json::Value;

pub const FAMILY: ModelFamily = ModelFamily {
    variants: &[FamilyVariant {
        model_type: "minimax_m2",
        classes: &["MiniMaxM2ForCausalLM"],
        about: "MiniMax-M2",
        read: |fields| MiniMaxM2Config::from_fields(fields).map(Architecture::new),
        infer: infer_fields,
        fields: PublishedFields {
            read: "head_dim=128 hidden_act hidden_size intermediate_size \
                        max_position_embeddings num_attention_heads num_experts_per_tok \
                        num_hidden_layers num_key_value_heads=8 num_local_experts rms_norm_eps \
                        rope_parameters tie_word_embeddings vocab_size",
            ..PublishedFields::UNKNOWN
        },
    }],
    gguf: &[GgufArchitecture {
        name: "minimax-m2",
        model_type: "minimax_m2",
        write_fields: gguf_fields,
        tensor_names: |_| TensorNameMap::llama(GGUF_BLOCK),
        ..GgufArchitecture::LLAMA
    }],
};

#[derive(Clone, Debug, PartialEq)]
pub struct MiniMaxM2Config {
    pub sizes: ModelSizes,
    pub eps: f64,
    pub rope: Rope,
    /// Queries and keys are normalised.
    pub qk_norms: bool,
    pub experts: MoeLayer,
    /// The choice of experts is corrected by a learned bias.
    pub has_score_correction: bool,
    pub tied: bool,
}

impl MiniMaxM2Config {
    pub fn from_fields(fields: &ConfigFields) -> Result<MiniMaxM2Config, ConfigError> {
        let mut sizes = ModelSizes::read(fields, Some(196_608))?;
        let share = match fields.get("rotary_dim") {
            None => 1.0,
            Some(found) => match fields.size("rotary_dim")? {
                dims if dims <= sizes.head_size => dims as f64 / sizes.head_size as f64,
                _ => {
                    let expected = format!("at most head_dim, which is {}", sizes.head_size);
                    return Err(fields.invalid_value("rotary_dim", &expected, found));
                }
            },
        };
        let defaults = RopeDefaults { theta: 5e6, share, ..RopeDefaults::LLAMA };
        let rope = RopeConfig::read(fields, sizes.head_size, sizes.context, defaults)?;
        sizes.context = rope.context;
        if let Some(scores) = fields.get("scoring_func").filter(|scores| scores.as_str() != Some("sigmoid")) {
            return Err(fields.invalid_value("scoring_func", "sigmoid", scores));
        }
        if fields.count_or("shared_intermediate_size", 0)? > 0 {
            let found = Value::from(fields.count_or("shared_intermediate_size", 0)?);
            return Err(fields.invalid_value("shared_intermediate_size", "0: no shared expert", &found));
        }
        let routing = ExpertRouter {
            scoring: RouterScoring::Sigmoid,
            normalised: true,
            ..ExpertRouter::read(fields, &["num_local_experts"])?
        };
        let activation = ActivationFunction::read(fields, &["hidden_act"], ActivationFunction::Silu)?;
        let intermediate = fields.size("intermediate_size")?;
        let fused = fields.flag_or(FUSED_EXPERTS, false)?;
        Ok(MiniMaxM2Config {
            eps: fields.epsilon(&["rms_norm_eps"], 1e-6)?,
            rope: rope.rope,
            qk_norms: fields.flag_or("use_qk_norm", true)?,
            experts: MoeLayer { routing, intermediate, glu: Glu::Plain(activation), fused },
            has_score_correction: fields.flag_or("use_routing_bias", true)?,
            tied: fields.flag_or("tie_word_embeddings", false)?,
            sizes,
        })
    }

    fn attention(
        &self,
        net: &mut ModelBuilder,
        layer: usize,
        name: &str,
        x: ValueId,
        rope: &RopeTables,
    ) -> ValueId {
        let sizes = &self.sizes;
        let project = |net: &mut ModelBuilder, which: &str, x, out| {
            LinearLayer::new(&format!("{name}.{which}"), out).apply(net, x)
        };
        let mut q = project(net, "q_proj", x, sizes.query_width());
        let mut k = project(net, "k_proj", x, sizes.key_width());
        let v = project(net, "v_proj", x, sizes.key_width());
        if self.qk_norms {
            q = rms_norm(net, q, &format!("{name}.q_norm"), self.eps);
            k = rms_norm(net, k, &format!("{name}.k_norm"), self.eps);
        }
        let attention = SelfAttention::new(name, rope, AttentionVariant::causal(sizes.head_size));
        let h = attention.attend(net, layer, sizes, [q, k, v]);
        project(net, "o_proj", h, sizes.hidden)
    }
}

impl Transformer for MiniMaxM2Config {
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
        let h = self.attention(net, layer, &format!("{name}.self_attn"), h, rope);
        let x = net.add_residual(layer, "attention", x, h);
        let h = rms_norm(net, x, &format!("{name}.post_attention_layernorm"), self.eps);
        let mixture = format!("{name}.block_sparse_moe");
        let (router, inside) = (format!("{mixture}.gate"), format!("{mixture}.experts"));
        let correction = format!("{mixture}.e_score_correction_bias");
        let correction = self.has_score_correction.then_some(correction.as_str());
        let stored = ExpertStorage::Single { experts: &inside, parts: ["w1", "w3", "w2"] };
        let h = self.experts.apply(
            net,
            h,
            &ExpertNames { router: &router, correction, expert_scale: None, storage: stored },
        );
        net.add_residual(layer, "mlp", x, h)
    }

    fn has_experts(&self) -> bool {
        true
    }
}

fn infer_fields(t: &mut ConfigEvidence) -> EvidenceResult {
    t.record_fused_experts("block_sparse_moe.experts", "w1")?;
    t.record_embedding("embed_tokens.weight", "lm_head.weight", false)?;
    t.record_heads("layers.0.self_attn", None)?;
    t.record_axis_size(&["intermediate_size"], "block_sparse_moe.experts.0.w1.weight", 0, 1)?;
    t.record_axis_size(&["num_local_experts"], "block_sparse_moe.gate.weight", 0, 1)
}

const GGUF_BLOCK: &[NameMapping] = &[
    ("ffn_gate_inp", "block_sparse_moe.gate", Same),
    ("exp_probs_b.bias", "block_sparse_moe.e_score_correction_bias", Same),
    ("ffn_gate_exps", "block_sparse_moe.experts.{e}.w1", Experts),
    ("ffn_down_exps", "block_sparse_moe.experts.{e}.w2", Experts),
    ("ffn_up_exps", "block_sparse_moe.experts.{e}.w3", Experts),
];

fn gguf_fields(w: &mut ConfigFieldWriter<'_>) -> FieldResult {
    w.set_field("hidden_act", "silu");
    w.set_field("use_qk_norm", w.has_tensor("blk.0.attn_q_norm.weight"));
    w.copy_number("rope.dimension_count", "rotary_dim")?;
    w.copy_experts(["num_local_experts", "intermediate_size"])
}
