//! OLMo 2 (OLMo Team 2025; reference: `Olmo2ForCausalLM` of transformers): norms behind the parts of a layer, and on all
//! queries and all keys together.

use crate::config::{ConfigFields, RopeConfig, RopeDefaults};
use crate::error::ConfigError;
use crate::layers::linear::head_or_tied;
use crate::layers::norm::rms_norm;
use crate::layers::{Activation, Attention, Linear, Rope, RopeTables, SelfAttention, mlp};
use crate::transformer::{Net, Sizes, Transformer, hf_name};
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

impl Transformer for Olmo2Config {
    fn sizes(&self) -> &Sizes {
        &self.sizes
    }

    fn forward(&self, net: &mut Net) -> ValueId {
        let (vocab, embedding) = (self.sizes.vocab, "model.embed_tokens.weight");
        let rope = self.rope.tables(net, "rope");
        let x = net.embed(embedding, vocab, self.sizes.hidden);
        let x = net.layers(self.sizes.layers, x, |net, layer, x| self.block(net, layer, x, &rope));
        let x = net.wanted_rows(x);
        let x = rms_norm(net, x, "model.norm", self.eps);
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
