//! InternLM 2 (Cai et al. 2024; reference code: `InternLM2ForCausalLM` of the published checkpoints): the Llama block
//! with its own names and a projection that is fused by key head.

use crate::config::sizes::KV_HEADS;
use crate::config::{ConfigFields, RopeConfig, RopeDefaults};
use crate::definition::Architecture;
use crate::error::ConfigError;
use crate::evidence::{ConfigEvidence, EvidenceResult};
use crate::family::{FamilyVariant, ModelFamily};
use crate::layers::norm::{Norm, rms_norm};
use crate::layers::{
    ActivationFunction, AttentionVariant, FusedQkv, LinearLayer, Rope, RopeTables, SelfAttention, mlp,
};
use crate::transformer::{ModelBuilder, ModelSizes, OuterLayers, Transformer, with_prefix};
use mlcc_ir::graph::ValueId;

pub const FAMILY: ModelFamily = ModelFamily {
    variants: &[FamilyVariant {
        model_type: "internlm2",
        classes: &["InternLM2ForCausalLM"],
        about: "InternLM 2",
        read: |fields| InternLm2Config::from_fields(fields).map(Architecture::new),
        infer: infer_fields,
    }],
    gguf: &[],
};

#[derive(Clone, Debug, PartialEq)]
pub struct InternLm2Config {
    pub sizes: ModelSizes,
    pub intermediate: usize,
    pub eps: f64,
    pub activation: ActivationFunction,
    pub rope: Rope,
    pub bias: bool,
    pub tied: bool,
}

impl InternLm2Config {
    pub fn from_fields(fields: &ConfigFields) -> Result<InternLm2Config, ConfigError> {
        let mut sizes = ModelSizes::read(fields, Some(32768))?;
        let rope = RopeConfig::read(fields, sizes.head_size, sizes.context, RopeDefaults::LLAMA)?;
        sizes.context = rope.context;
        Ok(InternLm2Config {
            intermediate: fields.size("intermediate_size")?,
            eps: fields.epsilon(&["rms_norm_eps"], 1e-6)?,
            activation: ActivationFunction::read(fields, &["hidden_act"], ActivationFunction::Silu)?,
            rope: rope.rope,
            bias: fields.flag_or("bias", true)?,
            tied: fields.flag_or("tie_word_embeddings", false)?,
            sizes,
        })
    }
}

impl Transformer for InternLm2Config {
    type Shared = RopeTables;

    fn sizes(&self) -> &ModelSizes {
        &self.sizes
    }

    fn outer_layers(&self) -> OuterLayers {
        OuterLayers::with_names(
            "model.tok_embeddings.weight",
            (Norm::Rms(self.eps), "model.norm"),
            "output.weight",
            self.tied,
        )
    }

    fn prepare_shared(&self, net: &mut ModelBuilder) -> RopeTables {
        self.rope.tables(net, "rope")
    }

    fn add_layer(&self, net: &mut ModelBuilder, layer: usize, x: ValueId, rope: &RopeTables) -> ValueId {
        let (sizes, name) = (&self.sizes, format!("model.layers.{layer}"));
        let h = rms_norm(net, x, &format!("{name}.attention_norm"), self.eps);
        let part = format!("{name}.attention");
        let fused = FusedQkv::grouped_by_key_head(sizes.heads, sizes.kv_heads, sizes.head_size);
        let projection = format!("{part}.wqkv");
        let qkv = fused.apply(net, h, &LinearLayer::new(&projection, fused.rows()).bias(self.bias));
        let attention = SelfAttention::new(&part, rope, AttentionVariant::causal(sizes.head_size));
        let h = attention.attend(net, layer, sizes, qkv);
        let h = LinearLayer::new(&format!("{part}.wo"), sizes.hidden).bias(self.bias).apply(net, h);
        let x = net.add_residual(layer, "attention", x, h);
        let h = rms_norm(net, x, &format!("{name}.ffn_norm"), self.eps);
        let names = ["w1", "w3", "w2"].map(|part| format!("{name}.feed_forward.{part}"));
        let [gate, up, down] = names.each_ref().map(|name| LinearLayer::new(name, self.intermediate));
        let h = mlp::gated(net, h, [gate, up, down.with_out(sizes.hidden)], self.activation);
        net.add_residual(layer, "mlp", x, h)
    }

    fn canonical_name(&self, stored_name: &str) -> String {
        with_prefix(stored_name, "model.", &["tok_embeddings.", "layers.", "norm."])
    }
}

fn infer_fields(t: &mut ConfigEvidence) -> EvidenceResult {
    t.record_embedding("tok_embeddings.weight", "output.weight", false)?;
    t.record_fused_heads("layers.0.attention.wo.weight", "layers.0.attention.wqkv.weight", &KV_HEADS)?;
    t.record_axis_size(&["intermediate_size"], "layers.0.feed_forward.w1.weight", 0, 1)?;
    t.record_bias("bias", "layers.0.attention.wqkv")
}
