//! StarCoder 2 (Lozhkov et al. 2024; reference: `Starcoder2ForCausalLM` of transformers): LayerNorm, biases everywhere,
//! a plain feed-forward part, grouped queries, a sliding window.

use crate::config::{ConfigFields, RopeConfig, RopeDefaults};
use crate::error::ConfigError;
use crate::layers::linear::head_or_tied;
use crate::layers::norm::layer_norm;
use crate::layers::{Activation, Attention, Linear, Rope, RopeTables, SelfAttention, mlp};
use crate::transformer::{Net, Sizes, Transformer, hf_name, widest};
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
}

impl Transformer for Starcoder2Config {
    fn sizes(&self) -> &Sizes {
        &self.sizes
    }

    fn window(&self) -> Option<usize> {
        widest(&self.windows)
    }

    fn forward(&self, net: &mut Net) -> ValueId {
        let (vocab, embedding) = (self.sizes.vocab, "model.embed_tokens.weight");
        let rope = self.rope.tables(net, "rope");
        let x = net.embed(embedding, vocab, self.sizes.hidden);
        let x = net.layers(self.sizes.layers, x, |net, layer, x| self.block(net, layer, x, &rope));
        let x = net.wanted_rows(x);
        let x = layer_norm(net, x, "model.norm", self.eps);
        net.tap("final_norm", x);
        head_or_tied(net, x, "lm_head.weight", self.tied.then_some(embedding), vocab)
    }

    fn canonical_name(&self, stored_name: &str) -> String {
        hf_name(stored_name)
    }

    fn is_ignored(&self, name: &str) -> bool {
        self.tied && name == "lm_head.weight"
    }
}
