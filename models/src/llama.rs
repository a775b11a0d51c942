//! Llama (Touvron et al. 2023; reference: `LlamaForCausalLM` of transformers) and what shares its block: Llama 2 and 3,
//! Yi, Mistral (with a sliding window; `MistralForCausalLM`), InternLM 1 (with biases).

use crate::config::{ConfigFields, RopeConfig, RopeDefaults};
use crate::error::ConfigError;
use crate::layers::linear::head_or_tied;
use crate::layers::norm::rms_norm;
use crate::layers::{Activation, Attention, Rope, RopeTables, SelfAttention, mlp};
use crate::transformer::{Net, Sizes, Transformer, hf_name, widest};
use mlcc_ir::graph::ValueId;

#[derive(Clone, Debug, PartialEq)]
pub struct LlamaConfig {
    pub sizes: Sizes,
    pub intermediate: usize,
    pub eps: f64,
    pub activation: Activation,
    pub rope: Rope,
    /// Attention windows by layer.
    pub windows: Vec<Option<usize>>,
    pub qkv_bias: bool,
    pub output_bias: bool,
    pub mlp_bias: bool,
    pub tied: bool,
}

impl LlamaConfig {
    pub fn from_fields(fields: &ConfigFields) -> Result<LlamaConfig, ConfigError> {
        let mut sizes = Sizes::read(fields, Some(2048))?;
        let rope = RopeConfig::read(fields, sizes.head_size, sizes.context, RopeDefaults::LLAMA)?;
        sizes.context = rope.context;
        let attention_bias = fields.flag_or("attention_bias", false)?;
        Ok(LlamaConfig {
            intermediate: fields.size("intermediate_size")?,
            eps: fields.epsilon(&["rms_norm_eps"], 1e-6)?,
            activation: Activation::read(fields, &["hidden_act"], Activation::Silu)?,
            rope: rope.rope,
            windows: vec![None; sizes.layers],
            qkv_bias: attention_bias,
            output_bias: attention_bias,
            mlp_bias: fields.flag_or("mlp_bias", false)?,
            tied: fields.flag_or("tie_word_embeddings", false)?,
            sizes,
        })
    }

    /// Mistral: every layer has the sliding window.
    pub fn mistral(fields: &ConfigFields) -> Result<LlamaConfig, ConfigError> {
        let config = LlamaConfig::from_fields(fields)?;
        let windows = fields.windows(config.sizes.layers, |_| true)?;
        Ok(LlamaConfig { windows, ..config })
    }

    /// InternLM 1: `bias` is for the four projections of attention.
    pub fn internlm(fields: &ConfigFields) -> Result<LlamaConfig, ConfigError> {
        let bias = fields.flag_or("bias", true)?;
        Ok(LlamaConfig { qkv_bias: bias, output_bias: bias, ..LlamaConfig::from_fields(fields)? })
    }

    fn block(&self, net: &mut Net, layer: usize, x: ValueId, rope: &RopeTables) -> ValueId {
        let name = format!("model.layers.{layer}");
        let h = rms_norm(net, x, &format!("{name}.input_layernorm"), self.eps);
        let h = self.attention(net, layer, &format!("{name}.self_attn"), h, rope);
        let x = net.residual(layer, "attention", x, h);
        let h = rms_norm(net, x, &format!("{name}.post_attention_layernorm"), self.eps);
        let mlp = format!("{name}.mlp");
        let h = mlp::gated_by_name(net, h, &mlp, self.intermediate, self.mlp_bias, self.activation);
        net.residual(layer, "mlp", x, h)
    }

    fn attention(&self, net: &mut Net, layer: usize, name: &str, x: ValueId, rope: &RopeTables) -> ValueId {
        let window = self.windows[layer];
        let attention = Attention { window, ..Attention::causal(self.sizes.head_size) };
        let (qkv_bias, output_bias) = (self.qkv_bias, self.output_bias);
        let part = SelfAttention { qkv_bias, output_bias, ..SelfAttention::new(name, rope, attention) };
        part.apply(net, layer, &self.sizes, x)
    }
}

impl Transformer for LlamaConfig {
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
