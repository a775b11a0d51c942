//! StarCoder 2 (Lozhkov et al. 2024; reference: `Starcoder2ForCausalLM` of transformers): LayerNorm, biases everywhere,
//! a plain feed-forward part, grouped queries, a sliding window.

use crate::config::{ConfigFields, RopeConfig, RopeDefaults};
use crate::error::ConfigError;
use crate::layers::norm::{Norm, layer_norm};
use crate::layers::{Activation, Attention, Linear, Rope, RopeTables, SelfAttention, mlp};
use crate::transformer::{Frame, Net, Sizes, Transformer, widest};
use mlcc_ir::graph::ValueId;

#[derive(Clone, Debug, PartialEq)]
pub struct Starcoder2Config {
    pub sizes: Sizes,
    pub intermediate: usize,
    pub eps: f64,
    pub activation: Activation,
    pub rope: Rope,
    pub windows: Vec<Option<usize>>,
    pub bias: bool,
    pub tied: bool,
}

impl Starcoder2Config {
    pub fn from_fields(fields: &ConfigFields) -> Result<Starcoder2Config, ConfigError> {
        let mut sizes = Sizes::read(fields, Some(4096))?;
        let rope = RopeConfig::read(fields, sizes.head_size, sizes.context, RopeDefaults::LLAMA)?;
        sizes.context = rope.context;
        Ok(Starcoder2Config {
            intermediate: fields.size("intermediate_size")?,
            eps: fields.epsilon(&["norm_epsilon"], 1e-5)?,
            activation: Activation::read(fields, &["hidden_act"], Activation::GeluTanh)?,
            rope: rope.rope,
            windows: fields.windows(sizes.layers, |_| true)?,
            bias: fields.flag_or("use_bias", true)?,
            tied: fields.flag_or("tie_word_embeddings", true)?,
            sizes,
        })
    }
}

impl Transformer for Starcoder2Config {
    type Shared = RopeTables;

    fn sizes(&self) -> &Sizes {
        &self.sizes
    }

    fn frame(&self) -> Frame {
        Frame::hugging_face(Norm::Layer(self.eps), self.tied)
    }

    fn shared(&self, net: &mut Net) -> RopeTables {
        self.rope.tables(net, "rope")
    }

    fn block(&self, net: &mut Net, layer: usize, x: ValueId, rope: &RopeTables) -> ValueId {
        let (sizes, bias, name) = (&self.sizes, self.bias, format!("model.layers.{layer}"));
        let h = layer_norm(net, x, &format!("{name}.input_layernorm"), self.eps);
        let attention = Attention { window: self.windows[layer], ..Attention::causal(sizes.head_size) };
        let part = format!("{name}.self_attn");
        let part =
            SelfAttention { qkv_bias: bias, output_bias: bias, ..SelfAttention::new(&part, rope, attention) };
        let h = part.apply(net, layer, sizes, h);
        let x = net.residual(layer, "attention", x, h);
        let h = layer_norm(net, x, &format!("{name}.post_attention_layernorm"), self.eps);
        let (up, down) = (format!("{name}.mlp.c_fc"), format!("{name}.mlp.c_proj"));
        let up = Linear::new(&up, self.intermediate).bias(bias);
        let h = mlp::plain(net, h, up, Linear::new(&down, sizes.hidden).bias(bias), self.activation);
        net.residual(layer, "mlp", x, h)
    }

    fn window(&self) -> Option<usize> {
        widest(&self.windows)
    }
}
