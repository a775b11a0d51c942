//! Phi-3 and Phi-4-mini (Abdin et al. 2024; reference: `Phi3ForCausalLM` of transformers): the Llama block with fused
//! projections, LongRoPE in the models of long context.

use crate::config::{ConfigFields, RopeConfig, RopeDefaults};
use crate::error::ConfigError;
use crate::layers::linear::head_or_tied;
use crate::layers::norm::rms_norm;
use crate::layers::{Activation, Attention, FusedQkv, Linear, Rope, RopeTables, SelfAttention, mlp};
use crate::transformer::{Net, Sizes, Transformer, hf_name, widest};
use mlcc_ir::graph::ValueId;

#[derive(Clone, Debug, PartialEq)]
pub struct Phi3Config {
    pub sizes: Sizes,
    pub intermediate: usize,
    pub eps: f64,
    pub activation: Activation,
    pub rope: Rope,
    pub windows: Vec<Option<usize>>,
    pub tied: bool,
}

impl Phi3Config {
    pub fn from_fields(fields: &ConfigFields) -> Result<Phi3Config, ConfigError> {
        let mut sizes = Sizes::read(fields, Some(4096))?;
        let rope = RopeConfig::read(fields, sizes.head_size, sizes.context, RopeDefaults::LLAMA)?;
        sizes.context = rope.context;
        Ok(Phi3Config {
            intermediate: fields.size("intermediate_size")?,
            eps: fields.epsilon(&["rms_norm_eps"], 1e-5)?,
            activation: Activation::read(fields, &["hidden_act"], Activation::Silu)?,
            rope: rope.rope,
            windows: fields.windows(sizes.layers, |_| true)?,
            tied: fields.flag_or("tie_word_embeddings", false)?,
            sizes,
        })
    }

    fn block(&self, net: &mut Net, layer: usize, x: ValueId, rope: &RopeTables) -> ValueId {
        let (sizes, hidden) = (&self.sizes, self.sizes.hidden);
        let name = format!("model.layers.{layer}");
        let h = rms_norm(net, x, &format!("{name}.input_layernorm"), self.eps);
        let attention = Attention { window: self.windows[layer], ..Attention::causal(sizes.head_size) };
        let part = format!("{name}.self_attn");
        let fused = FusedQkv::in_order(sizes.query(), sizes.key());
        let qkv = fused.apply(net, h, &Linear::new(&format!("{part}.qkv_proj"), fused.rows()));
        let h = SelfAttention::new(&part, rope, attention).attend(net, layer, sizes, qkv);
        let h = Linear::new(&format!("{part}.o_proj"), hidden).apply(net, h);
        let x = net.residual(layer, "attention", x, h);
        let h = rms_norm(net, x, &format!("{name}.post_attention_layernorm"), self.eps);
        let (gate_up, down) = (format!("{name}.mlp.gate_up_proj"), format!("{name}.mlp.down_proj"));
        let (gate_up, down) = (Linear::new(&gate_up, 2 * self.intermediate), Linear::new(&down, hidden));
        let h = mlp::gated_fused(net, h, gate_up, down, self.activation);
        net.residual(layer, "mlp", x, h)
    }
}

impl Transformer for Phi3Config {
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
