//! GLM-4 in the Hugging Face classes (GLM Team 2024; reference: `GlmForCausalLM`, `Glm4ForCausalLM` of transformers):
//! rotary embedding of neighbouring elements on half of each head, fused gate and up projection; the newer class has
//! norms behind the parts of a layer too.

use crate::config::{ConfigFields, RopeConfig, RopeDefaults};
use crate::error::ConfigError;
use crate::layers::linear::head_or_tied;
use crate::layers::norm::rms_norm;
use crate::layers::rope::Pairs;
use crate::layers::{Activation, Attention, Linear, Rope, RopeTables, SelfAttention, mlp};
use crate::transformer::{Net, Sizes, Transformer, hf_name};
use mlcc_ir::graph::ValueId;

#[derive(Clone, Debug, PartialEq)]
pub struct GlmConfig {
    pub sizes: Sizes,
    pub intermediate: usize,
    pub eps: f64,
    pub activation: Activation,
    pub rope: Rope,
    pub qkv_bias: bool,
    /// `post_self_attn_layernorm` and `post_mlp_layernorm` are there.
    pub norms_behind: bool,
    pub tied: bool,
}

impl GlmConfig {
    pub fn glm(fields: &ConfigFields) -> Result<GlmConfig, ConfigError> {
        let mut sizes = Sizes::read(fields, Some(131_072))?;
        let defaults = RopeDefaults { share: 0.5, pairs: Pairs::Interleaved, ..RopeDefaults::LLAMA };
        let rope = RopeConfig::read(fields, sizes.head_size, sizes.context, defaults)?;
        sizes.context = rope.context;
        Ok(GlmConfig {
            intermediate: fields.size("intermediate_size")?,
            eps: fields.epsilon(&["rms_norm_eps"], 1.5625e-7)?,
            activation: Activation::read(fields, &["hidden_act"], Activation::Silu)?,
            rope: rope.rope,
            qkv_bias: fields.flag_or("attention_bias", true)?,
            norms_behind: false,
            tied: fields.flag_or("tie_word_embeddings", false)?,
            sizes,
        })
    }

    pub fn glm4(fields: &ConfigFields) -> Result<GlmConfig, ConfigError> {
        Ok(GlmConfig { norms_behind: true, ..GlmConfig::glm(fields)? })
    }

    fn block(&self, net: &mut Net, layer: usize, x: ValueId, rope: &RopeTables) -> ValueId {
        let (sizes, name) = (&self.sizes, format!("model.layers.{layer}"));
        let norm = |net: &mut Net, x, norm: &str| rms_norm(net, x, &format!("{name}.{norm}"), self.eps);
        let behind = |net: &mut Net, x, which: &str| if self.norms_behind { norm(net, x, which) } else { x };
        let h = norm(net, x, "input_layernorm");
        let part = format!("{name}.self_attn");
        let part = SelfAttention::new(&part, rope, Attention::causal(sizes.head_size));
        let h = SelfAttention { qkv_bias: self.qkv_bias, ..part }.apply(net, layer, sizes, h);
        let h = behind(net, h, "post_self_attn_layernorm");
        let x = net.residual(layer, "attention", x, h);
        let h = norm(net, x, "post_attention_layernorm");
        let (gate_up, down) = (format!("{name}.mlp.gate_up_proj"), format!("{name}.mlp.down_proj"));
        let (gate_up, down) =
            (Linear::new(&gate_up, 2 * self.intermediate), Linear::new(&down, sizes.hidden));
        let h = mlp::gated_fused(net, h, gate_up, down, self.activation);
        let h = behind(net, h, "post_mlp_layernorm");
        net.residual(layer, "mlp", x, h)
    }
}

impl Transformer for GlmConfig {
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
