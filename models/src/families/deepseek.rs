//! DeepSeek V2 and V3 (DeepSeek-AI 2024; reference: `DeepseekV2ForCausalLM` and `DeepseekV3ForCausalLM` of transformers) and what
//! shares their layers: Kimi K2, GLM-4.7-Flash (`Glm4MoeLiteForCausalLM`). Queries, and keys and values, come from rows of a
//! low rank (latent attention); experts, some of them for every token, in all but the first layers. Here keys and values
//! are expanded before they are kept.

use crate::config::{ConfigFields, RopeConfig, RopeDefaults};
use crate::error::ConfigError;
use crate::layers::attention::Queries;
use crate::layers::matrix_state::repeat_heads;
use crate::layers::moe::{ExpertNames, Experts, Glu, Groups, Routing, Scores, Stored};
use crate::layers::norm::{Norm, rms_norm};
use crate::layers::rope::{Pairs, part};
use crate::layers::{Activation, Attention, Linear, Rope, RopeTables, mlp};
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
    /// Factor of the scores.
    pub scale: f64,
    /// Rank of the queries; `None` where they come from one projection.
    pub query_rank: Option<usize>,
    /// Rank of keys and values.
    pub rank: usize,
    /// Elements of a query or key head that are not turned, and that are.
    pub plain: usize,
    pub turned: usize,
    /// Elements of a value.
    pub value: usize,
    pub bias: bool,
    pub experts: Experts,
    /// Width of the experts that every token gets.
    pub shared: usize,
    /// The choice of experts is corrected by a learned bias.
    pub corrected: bool,
    /// The first layers have no experts.
    pub dense_layers: usize,
    pub tied: bool,
}

const LARGEST: usize = 65536;

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
            groups: Groups::read(fields)?,
            ..Routing::read(fields, &["n_routed_experts"])?
        };
        DeepSeekConfig::common(fields, routing, true)
    }

    fn common(
        fields: &ConfigFields,
        routing: Routing,
        corrected: bool,
    ) -> Result<DeepSeekConfig, ConfigError> {
        let size = |field: &str| match fields.size(field)? {
            size if size <= LARGEST => Ok(size),
            size => Err(fields.wrong(field, &format!("at most {LARGEST}"), &Value::from(size))),
        };
        let mut sizes = Sizes::read(fields, Some(4096))?;
        let (plain, turned) = (size("qk_nope_head_dim")?, size("qk_rope_head_dim")?);
        let interleaved = fields.flag_or("rope_interleave", true)?;
        let pairs = if interleaved { Pairs::Interleaved } else { Pairs::Half };
        let rope =
            RopeConfig::read(fields, turned, sizes.context, RopeDefaults { pairs, ..RopeDefaults::LLAMA })?;
        sizes.context = rope.context;
        let activation = Activation::read(fields, &["hidden_act"], Activation::Silu)?;
        let width = size("moe_intermediate_size")?;
        let scale = fields.float_or("routed_scaling_factor", 1.0)?;
        let routing = Routing { scale, ..routing };
        Ok(DeepSeekConfig {
            intermediate: fields.size("intermediate_size")?,
            eps: fields.epsilon(&["rms_norm_eps"], 1e-6)?,
            activation,
            rope: rope.rope,
            scale: ((plain + turned) as f64).powf(-0.5) * stretched(fields)?,
            query_rank: fields.get("q_lora_rank").map(|_| size("q_lora_rank")).transpose()?,
            rank: size("kv_lora_rank")?,
            plain,
            turned,
            value: size("v_head_dim")?,
            bias: fields.flag_or("attention_bias", false)?,
            experts: Experts { routing, intermediate: width, glu: Glu::Plain(activation) },
            shared: width * fields.size_or("n_shared_experts", 1)?,
            corrected,
            dense_layers: fields.count_or("first_k_dense_replace", 1)?,
            tied: fields.flag_or("tie_word_embeddings", false)?,
            sizes,
        })
    }

    fn attention(&self, net: &mut Net, layer: usize, name: &str, x: ValueId, rope: &RopeTables) -> ValueId {
        let (heads, size) = (self.sizes.heads, self.plain + self.turned);
        let project = |net: &mut Net, which: &str, x, out, bias| {
            Linear::new(&format!("{name}.{which}"), out).bias(bias).apply(net, x)
        };
        let q = match self.query_rank {
            None => project(net, "q_proj", x, heads * size, false),
            Some(rank) => {
                let low = project(net, "q_a_proj", x, rank, self.bias);
                let low = rms_norm(net, low, &format!("{name}.q_a_layernorm"), self.eps);
                project(net, "q_b_proj", low, heads * size, false)
            }
        };
        // A row of low rank, and the turned part of the keys, which all heads share.
        let latent = project(net, "kv_a_proj_with_mqa", x, self.rank + self.turned, self.bias);
        let low = net.slice(latent, 1, 0.into(), self.rank.into());
        let shared = net.slice(latent, 1, self.rank.into(), self.turned.into());
        let low = rms_norm(net, low, &format!("{name}.kv_a_layernorm"), self.eps);
        let kv = project(net, "kv_b_proj", low, heads * (self.plain + self.value), false);
        let attention = Attention { scale: self.scale, ..Attention::causal(size) };
        let rows = net.per_sequence(&[q, kv, shared], |net, rows| {
            let q = net.split_heads(rows[0], heads);
            let kv = net.split_heads(rows[1], heads);
            let shared = net.split_heads(rows[2], 1);
            let (k, v) = (part(net, kv, 0, self.plain), part(net, kv, self.plain, self.value));
            let shared = rope.apply(net, shared);
            let shared = repeat_heads(net, shared, heads);
            let k = net.concat(&[k, shared], 2);
            let (still, moving) = (part(net, q, 0, self.plain), part(net, q, self.plain, self.turned));
            let far = rope.apply_for_sinks(net, moving).map(|far| net.concat(&[still, far], 2));
            let near = rope.apply(net, moving);
            let near = net.concat(&[still, near], 2);
            vec![attention.apply(net, layer, Queries { near, far: far.unwrap_or(near) }, k, v)]
        });
        project(net, "o_proj", rows[0], self.sizes.hidden, self.bias)
    }

    fn feed_forward(&self, net: &mut Net, layer: usize, name: &str, x: ValueId) -> ValueId {
        if layer < self.dense_layers {
            return mlp::gated_by_name(net, x, name, self.intermediate, false, self.activation);
        }
        let (router, inside) = (format!("{name}.gate"), format!("{name}.experts"));
        let correction = format!("{router}.e_score_correction_bias");
        let correction = self.corrected.then_some(correction.as_str());
        let stored = Stored::Single { experts: &inside, parts: ["gate_proj", "up_proj", "down_proj"] };
        let names = ExpertNames { router: &router, correction, expert_scale: None, stored };
        let h = self.experts.apply(net, x, &names);
        let shared = format!("{name}.shared_experts");
        let shared = mlp::gated_by_name(net, x, &shared, self.shared, false, self.activation);
        net.add(h, shared)
    }
}

/// What YaRN makes of the scores: the square of its attention factor by `mscale_all_dim`.
fn stretched(fields: &ConfigFields) -> Result<f64, ConfigError> {
    let Some(scaling) = fields.object("rope_parameters")?.or(fields.object("rope_scaling")?) else {
        return Ok(1.0);
    };
    let all = scaling.float_or("mscale_all_dim", 0.0)?;
    let factor = scaling.float_or("factor", 1.0)?;
    let stretch = if all != 0.0 && factor > 1.0 { 0.1 * all * factor.ln() + 1.0 } else { 1.0 };
    Ok(stretch * stretch)
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
        let h = self.attention(net, layer, &format!("{name}.self_attn"), h, rope);
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
