//! DeepSeek V2 and V3 (DeepSeek-AI 2024; reference: `DeepseekV2ForCausalLM` and `DeepseekV3ForCausalLM` of transformers) and what
//! shares their layers: Kimi K2, GLM-4.7-Flash (`Glm4MoeLiteForCausalLM`). Queries, and keys and values, come from rows of a
//! low rank (latent attention); experts, some of them for every token, in all but the first layers.

use crate::config::{ConfigFields, RopeConfig, RopeDefaults};
use crate::error::ConfigError;
use crate::layers::latent_attention::{LatentAttention, Positions};
use crate::layers::moe::{Experts, Glu, Groups, Routing, Scores, SharedExpert};
use crate::layers::norm::{Norm, rms_norm};
use crate::layers::rope::Pairs;
use crate::layers::{Activation, Rope, RopeTables, mlp};
use crate::transformer::{Frame, Net, Sizes, Transformer};
use mlcc_ir::graph::ValueId;
use serde_json::Value;

#[derive(Clone, Debug, PartialEq)]
pub struct DeepSeekConfig {
    pub sizes: Sizes,
    pub intermediate: usize,
    pub eps: f64,
    pub activation: Activation,
    pub rope: Rope,
    pub latent: LatentAttention,
    pub experts: Experts,
    /// Width of the experts that every token gets.
    pub shared: usize,
    /// The choice of experts is corrected by a learned bias.
    pub corrected: bool,
    /// The first layers have no experts.
    pub dense_layers: usize,
    pub tied: bool,
}

impl DeepSeekConfig {
    /// Version 2: softmax over all experts.
    pub fn v2(fields: &ConfigFields) -> Result<DeepSeekConfig, ConfigError> {
        let method = fields.get("topk_method").and_then(Value::as_str).unwrap_or("greedy");
        if method != "greedy" {
            return Err(fields.wrong(
                "topk_method",
                "greedy: experts in groups are not read",
                &method.into(),
            ));
        }
        let routing = Routing {
            normalised: fields.flag_or("norm_topk_prob", false)?,
            ..Routing::read(fields, &["n_routed_experts"])?
        };
        DeepSeekConfig::common(fields, routing, false)
    }

    /// Version 3: corrected sigmoids, in groups.
    pub fn v3(fields: &ConfigFields) -> Result<DeepSeekConfig, ConfigError> {
        let routing = Routing {
            scores: Scores::Sigmoid,
            normalised: fields.flag_or("norm_topk_prob", true)?,
            smallest_sum: 1e-20,
            groups: Groups::read(fields, "n_group", "n_routed_experts")?,
            ..Routing::read(fields, &["n_routed_experts"])?
        };
        DeepSeekConfig::common(fields, routing, true)
    }

    fn common(
        fields: &ConfigFields,
        routing: Routing,
        corrected: bool,
    ) -> Result<DeepSeekConfig, ConfigError> {
        let mut sizes = Sizes::read(fields, Some(4096))?;
        let latent = LatentAttention::read(fields, sizes.heads)?;
        let interleaved = fields.flag_or("rope_interleave", true)?;
        let pairs = if interleaved { Pairs::Interleaved } else { Pairs::Half };
        let rope = RopeConfig::read(
            fields,
            latent.turned,
            sizes.context,
            RopeDefaults { pairs, ..RopeDefaults::LLAMA },
        )?;
        sizes.context = rope.context;
        let activation = Activation::read(fields, &["hidden_act"], Activation::Silu)?;
        let width = fields.size("moe_intermediate_size")?;
        let scale = fields.float_or("routed_scaling_factor", 1.0)?;
        let routing = Routing { scale, ..routing };
        Ok(DeepSeekConfig {
            intermediate: fields.size("intermediate_size")?,
            eps: fields.epsilon(&["rms_norm_eps"], 1e-6)?,
            activation,
            rope: rope.rope,
            latent,
            experts: Experts { routing, intermediate: width, glu: Glu::Plain(activation) },
            shared: width * fields.size_or("n_shared_experts", 1)?,
            corrected,
            dense_layers: fields.count_or("first_k_dense_replace", 1)?,
            tied: fields.flag_or("tie_word_embeddings", false)?,
            sizes,
        })
    }

    fn feed_forward(&self, net: &mut Net, layer: usize, name: &str, x: ValueId) -> ValueId {
        if layer < self.dense_layers {
            return mlp::gated_by_name(net, x, name, self.intermediate, false, self.activation);
        }
        let parts = ["gate_proj", "up_proj", "down_proj"];
        let shared = SharedExpert { width: self.shared, activation: self.activation };
        self.experts.apply_with_shared(net, x, name, parts, self.corrected, &shared)
    }
}

impl Transformer for DeepSeekConfig {
    type Shared = RopeTables;

    fn sizes(&self) -> &Sizes {
        &self.sizes
    }

    fn frame(&self) -> Frame {
        Frame::hugging_face(Norm::Rms(self.eps), self.tied)
    }

    fn shared(&self, net: &mut Net) -> RopeTables {
        self.rope.tables(net, "rope")
    }

    fn block(&self, net: &mut Net, layer: usize, x: ValueId, rope: &RopeTables) -> ValueId {
        let name = format!("model.layers.{layer}");
        let h = rms_norm(net, x, &format!("{name}.input_layernorm"), self.eps);
        let h = self.latent.apply(net, layer, &format!("{name}.self_attn"), h, Positions::turned(rope));
        let x = net.residual(layer, "attention", x, h);
        let h = rms_norm(net, x, &format!("{name}.post_attention_layernorm"), self.eps);
        let h = self.feed_forward(net, layer, &format!("{name}.mlp"), h);
        net.residual(layer, "mlp", x, h)
    }

    fn has_experts(&self) -> bool {
        true
    }

    /// A draft head is stored as layers after the last one.
    fn is_ignored(&self, name: &str) -> bool {
        let layer = name.strip_prefix("model.layers.").and_then(|rest| rest.split('.').next()?.parse().ok());
        let is_draft = layer.is_some_and(|layer: usize| layer >= self.sizes.layers);
        is_draft || self.tied && name == self.frame().head
    }
}
