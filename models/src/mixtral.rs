//! Mixtral (Jiang et al. 2024; reference: `MixtralForCausalLM` of transformers): the Mistral block with experts in place
//! of the feed-forward part.

use crate::config::{ConfigFields, RopeConfig, RopeDefaults};
use crate::error::ConfigError;
use crate::layers::linear::head_or_tied;
use crate::layers::moe::{ExpertNames, Experts};
use crate::layers::norm::rms_norm;
use crate::layers::{Attention, Rope, RopeTables, SelfAttention};
use crate::transformer::{Net, Sizes, Transformer, hf_name, widest};
use mlcc_ir::graph::ValueId;

#[derive(Clone, Debug, PartialEq)]
pub struct MixtralConfig {
    pub sizes: Sizes,
    pub eps: f64,
    pub rope: Rope,
    pub windows: Vec<Option<usize>>,
    pub experts: Experts,
    pub tied: bool,
}

impl MixtralConfig {
    pub fn from_fields(fields: &ConfigFields) -> Result<MixtralConfig, ConfigError> {
        let mut sizes = Sizes::read(fields, Some(32768))?;
        let defaults = RopeDefaults { theta: 1e6, ..RopeDefaults::LLAMA };
        let rope = RopeConfig::read(fields, sizes.head_size, sizes.context, defaults)?;
        sizes.context = rope.context;
        let intermediate = fields.size("intermediate_size")?;
        Ok(MixtralConfig {
            eps: fields.epsilon(&["rms_norm_eps"], 1e-5)?,
            rope: rope.rope,
            windows: fields.windows(sizes.layers, |_| true)?,
            experts: Experts::read(fields, &["num_local_experts"], intermediate, true)?,
            tied: fields.flag_or("tie_word_embeddings", false)?,
            sizes,
        })
    }

    fn block(&self, net: &mut Net, layer: usize, x: ValueId, rope: &RopeTables) -> ValueId {
        let name = format!("model.layers.{layer}");
        let h = rms_norm(net, x, &format!("{name}.input_layernorm"), self.eps);
        let attention = Attention { window: self.windows[layer], ..Attention::causal(self.sizes.head_size) };
        let part = format!("{name}.self_attn");
        let h = SelfAttention::new(&part, rope, attention).apply(net, layer, &self.sizes, h);
        let x = net.residual(layer, "attention", x, h);
        let h = rms_norm(net, x, &format!("{name}.post_attention_layernorm"), self.eps);
        let (router, inside) =
            (format!("{name}.block_sparse_moe.gate"), format!("{name}.block_sparse_moe.experts"));
        let names = ExpertNames { router: &router, experts: &inside, parts: ["w1", "w3", "w2"] };
        let h = self.experts.apply(net, h, &names);
        net.residual(layer, "mlp", x, h)
    }
}

impl Transformer for MixtralConfig {
    fn sizes(&self) -> &Sizes {
        &self.sizes
    }

    fn has_experts(&self) -> bool {
        true
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
