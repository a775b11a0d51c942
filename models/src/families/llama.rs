//! Llama (Touvron et al. 2023; reference: `LlamaForCausalLM` of transformers) and what shares its block: Llama 2 and 3,
//! Yi, Mistral (with a sliding window; `MistralForCausalLM`), InternLM 1 (with biases).

use crate::config::{ConfigFields, RopeConfig, RopeDefaults};
use crate::definition::Architecture;
use crate::error::ConfigError;
use crate::evidence::{ConfigEvidence, EvidenceResult};
use crate::family::{FamilyVariant, ModelFamily};
use crate::layers::norm::{Norm, rms_norm};
use crate::layers::{ActivationFunction, AttentionVariant, Rope, RopeTables, SelfAttention, mlp};
use crate::transformer::{ModelBuilder, ModelSizes, OuterLayers, Transformer, widest_window};
use mlcc_ir::graph::ValueId;

pub const FAMILY: ModelFamily = ModelFamily {
    variants: &[
        FamilyVariant {
            model_type: "llama",
            classes: &["LlamaForCausalLM", "LLaMAForCausalLM"],
            about: "Llama 1, 2, 3; Yi",
            read: |fields| LlamaConfig::from_fields(fields).map(Architecture::new),
            infer: infer_fields,
        },
        FamilyVariant {
            model_type: "mistral",
            classes: &["MistralForCausalLM"],
            about: "Mistral",
            read: |fields| LlamaConfig::mistral(fields).map(Architecture::new),
            infer: infer_fields,
        },
        FamilyVariant {
            model_type: "internlm",
            classes: &["InternLMForCausalLM"],
            about: "InternLM 1",
            read: |fields| LlamaConfig::internlm(fields).map(Architecture::new),
            infer: infer_internlm,
        },
    ],
};

#[derive(Clone, Debug, PartialEq)]
pub struct LlamaConfig {
    pub sizes: ModelSizes,
    pub intermediate: usize,
    pub eps: f64,
    pub activation: ActivationFunction,
    pub rope: Rope,
    /// By layer: positions count. Queries and keys of other layers are not turned.
    pub use_rope: Vec<bool>,
    /// Attention windows by layer.
    pub windows: Vec<Option<usize>>,
    pub qkv_bias: bool,
    pub output_bias: bool,
    pub mlp_bias: bool,
    pub tied: bool,
}

impl LlamaConfig {
    pub fn from_fields(fields: &ConfigFields) -> Result<LlamaConfig, ConfigError> {
        let mut sizes = ModelSizes::read(fields, Some(2048))?;
        let rope = RopeConfig::read(fields, sizes.head_size, sizes.context, RopeDefaults::LLAMA)?;
        sizes.context = rope.context;
        let attention_bias = fields.flag_or("attention_bias", false)?;
        Ok(LlamaConfig {
            intermediate: fields.size("intermediate_size")?,
            eps: fields.epsilon(&["rms_norm_eps"], 1e-6)?,
            activation: ActivationFunction::read(fields, &["hidden_act"], ActivationFunction::Silu)?,
            rope: rope.rope,
            use_rope: vec![true; sizes.layers],
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
        let windows = fields.layer_windows(config.sizes.layers, |_| true)?;
        Ok(LlamaConfig { windows, ..config })
    }

    /// InternLM 1: `bias` is for the four projections of attention.
    pub fn internlm(fields: &ConfigFields) -> Result<LlamaConfig, ConfigError> {
        let bias = fields.flag_or("bias", true)?;
        Ok(LlamaConfig { qkv_bias: bias, output_bias: bias, ..LlamaConfig::from_fields(fields)? })
    }

    fn attention(
        &self,
        net: &mut ModelBuilder,
        layer: usize,
        name: &str,
        x: ValueId,
        rope: &RopeTables,
    ) -> ValueId {
        let window = self.windows[layer];
        let attention = AttentionVariant { window, ..AttentionVariant::causal(self.sizes.head_size) };
        let (qkv_bias, output_bias) = (self.qkv_bias, self.output_bias);
        let part = SelfAttention { qkv_bias, output_bias, ..SelfAttention::new(name, rope, attention) };
        let part = SelfAttention { rope: self.use_rope[layer].then_some(rope), ..part };
        part.apply(net, layer, &self.sizes, x)
    }
}

impl Transformer for LlamaConfig {
    type Shared = RopeTables;

    fn sizes(&self) -> &ModelSizes {
        &self.sizes
    }

    fn outer_layers(&self) -> OuterLayers {
        OuterLayers::hugging_face(Norm::Rms(self.eps), self.tied)
    }

    fn prepare_shared(&self, net: &mut ModelBuilder) -> RopeTables {
        self.rope.tables(net, "rope")
    }

    fn add_layer(&self, net: &mut ModelBuilder, layer: usize, x: ValueId, rope: &RopeTables) -> ValueId {
        let name = format!("model.layers.{layer}");
        let h = rms_norm(net, x, &format!("{name}.input_layernorm"), self.eps);
        let h = self.attention(net, layer, &format!("{name}.self_attn"), h, rope);
        let x = net.add_residual(layer, "attention", x, h);
        let h = rms_norm(net, x, &format!("{name}.post_attention_layernorm"), self.eps);
        let mlp = format!("{name}.mlp");
        let h = mlp::gated_by_name(net, h, &mlp, self.intermediate, self.mlp_bias, self.activation);
        net.add_residual(layer, "mlp", x, h)
    }

    fn supports_pooling(&self) -> bool {
        true
    }

    fn window(&self) -> Option<usize> {
        widest_window(&self.windows)
    }
}

pub(super) fn infer_fields(t: &mut ConfigEvidence) -> EvidenceResult {
    t.record_llama_block(None)?;
    t.record_bias("attention_bias", "layers.0.self_attn.q_proj")?;
    t.record_bias("mlp_bias", "layers.0.mlp.gate_proj")
}

fn infer_internlm(t: &mut ConfigEvidence) -> EvidenceResult {
    t.record_llama_block(None)?;
    t.record_bias("bias", "layers.0.self_attn.q_proj")
}
