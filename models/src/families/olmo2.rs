//! OLMo 2 (OLMo Team 2025; reference: `Olmo2ForCausalLM` of transformers): norms behind the parts of a layer, and on all
//! queries and all keys together.

use crate::config::{ConfigFields, RopeConfig, RopeDefaults};
use crate::error::ConfigError;
use crate::layers::norm::{Norm, rms_norm};
use crate::layers::{Activation, Attention, Linear, Rope, RopeTables, SelfAttention, mlp};
use crate::transformer::{Frame, Net, Sizes, Transformer};
use mlcc_ir::graph::ValueId;

#[derive(Clone, Debug, PartialEq)]
pub struct Olmo2Config {
    pub sizes: Sizes,
    pub intermediate: usize,
    pub eps: f64,
    pub activation: Activation,
    pub rope: Rope,
    pub bias: bool,
    pub tied: bool,
}

impl Olmo2Config {
    pub fn from_fields(fields: &ConfigFields) -> Result<Olmo2Config, ConfigError> {
        let mut sizes = Sizes::read(fields, Some(2048))?;
        let rope = RopeConfig::read(fields, sizes.head_size, sizes.context, RopeDefaults::LLAMA)?;
        sizes.context = rope.context;
        Ok(Olmo2Config {
            intermediate: fields.size("intermediate_size")?,
            eps: fields.epsilon(&["rms_norm_eps"], 1e-5)?,
            activation: Activation::read(fields, &["hidden_act"], Activation::Silu)?,
            rope: rope.rope,
            bias: fields.flag_or("attention_bias", false)?,
            tied: fields.flag_or("tie_word_embeddings", false)?,
            sizes,
        })
    }
}

impl Transformer for Olmo2Config {
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
        let (sizes, name) = (&self.sizes, format!("model.layers.{layer}"));
        let part = format!("{name}.self_attn");
        let linear = |net: &mut Net, x, which: &str, out| {
            Linear::new(&format!("{part}.{which}"), out).bias(self.bias).apply(net, x)
        };
        let q = linear(net, x, "q_proj", sizes.query());
        let k = linear(net, x, "k_proj", sizes.key());
        let v = linear(net, x, "v_proj", sizes.key());
        let q = rms_norm(net, q, &format!("{part}.q_norm"), self.eps);
        let k = rms_norm(net, k, &format!("{part}.k_norm"), self.eps);
        let attention = SelfAttention::new(&part, rope, Attention::causal(sizes.head_size));
        let h = attention.attend(net, layer, sizes, [q, k, v]);
        let h = linear(net, h, "o_proj", sizes.hidden);
        let h = rms_norm(net, h, &format!("{name}.post_attention_layernorm"), self.eps);
        let x = net.residual(layer, "attention", x, h);
        let mlp = format!("{name}.mlp");
        let h = mlp::gated_by_name(net, x, &mlp, self.intermediate, false, self.activation);
        let h = rms_norm(net, h, &format!("{name}.post_feedforward_layernorm"), self.eps);
        net.residual(layer, "mlp", x, h)
    }
}
