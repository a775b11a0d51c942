//! InternLM 2 (Cai et al. 2024; reference code: `InternLM2ForCausalLM` of the published checkpoints): the Llama block
//! with its own names and a projection that is fused by key head.

use crate::config::{ConfigFields, RopeConfig, RopeDefaults};
use crate::error::ConfigError;
use crate::layers::linear::head_or_tied;
use crate::layers::norm::rms_norm;
use crate::layers::{Activation, Attention, FusedQkv, Linear, Rope, RopeTables, SelfAttention, mlp};
use crate::transformer::{Net, Sizes, Transformer, prefixed};
use mlcc_ir::graph::ValueId;

#[derive(Clone, Debug, PartialEq)]
pub struct InternLm2Config {
    pub sizes: Sizes,
    pub intermediate: usize,
    pub eps: f64,
    pub activation: Activation,
    pub rope: Rope,
    pub bias: bool,
    pub tied: bool,
}

impl InternLm2Config {
    pub fn from_fields(fields: &ConfigFields) -> Result<InternLm2Config, ConfigError> {
        let mut sizes = Sizes::read(fields, Some(32768))?;
        let rope = RopeConfig::read(fields, sizes.head_size, sizes.context, RopeDefaults::LLAMA)?;
        sizes.context = rope.context;
        Ok(InternLm2Config {
            intermediate: fields.size("intermediate_size")?,
            eps: fields.epsilon(&["rms_norm_eps"], 1e-6)?,
            activation: Activation::read(fields, &["hidden_act"], Activation::Silu)?,
            rope: rope.rope,
            bias: fields.flag_or("bias", true)?,
            tied: fields.flag_or("tie_word_embeddings", false)?,
            sizes,
        })
    }

    fn block(&self, net: &mut Net, layer: usize, x: ValueId, rope: &RopeTables) -> ValueId {
        let (sizes, name) = (&self.sizes, format!("model.layers.{layer}"));
        let h = rms_norm(net, x, &format!("{name}.attention_norm"), self.eps);
        let part = format!("{name}.attention");
        let fused = FusedQkv::by_group(sizes.heads, sizes.kv_heads, sizes.head_size);
        let projection = format!("{part}.wqkv");
        let qkv = fused.apply(net, h, &Linear::new(&projection, fused.rows()).bias(self.bias));
        let attention = SelfAttention::new(&part, rope, Attention::causal(sizes.head_size));
        let h = attention.attend(net, layer, sizes, qkv);
        let h = Linear::new(&format!("{part}.wo"), sizes.hidden).bias(self.bias).apply(net, h);
        let x = net.residual(layer, "attention", x, h);
        let h = rms_norm(net, x, &format!("{name}.ffn_norm"), self.eps);
        let names = ["w1", "w3", "w2"].map(|part| format!("{name}.feed_forward.{part}"));
        let [gate, up, down] = names.each_ref().map(|name| Linear::new(name, self.intermediate));
        let h = mlp::gated(net, h, [gate, up, down.with_out(sizes.hidden)], self.activation);
        net.residual(layer, "mlp", x, h)
    }
}

impl Transformer for InternLm2Config {
    fn sizes(&self) -> &Sizes {
        &self.sizes
    }

    fn forward(&self, net: &mut Net) -> ValueId {
        let (sizes, embedding) = (&self.sizes, "model.tok_embeddings.weight");
        let rope = self.rope.tables(net, "rope");
        let x = net.embed(embedding, sizes.vocab, sizes.hidden);
        let x = net.layers(sizes.layers, x, |net, layer, x| self.block(net, layer, x, &rope));
        let x = net.wanted_rows(x);
        let x = rms_norm(net, x, "model.norm", self.eps);
        net.tap("final_norm", x);
        head_or_tied(net, x, "output.weight", self.tied.then_some(embedding), sizes.vocab)
    }

    fn canonical_name(&self, stored_name: &str) -> String {
        prefixed(stored_name, "model.", &["tok_embeddings.", "layers.", "norm."])
    }

    fn is_ignored(&self, name: &str) -> bool {
        self.tied && name == "output.weight"
    }
}
