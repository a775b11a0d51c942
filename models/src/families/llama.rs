//! Llama (Touvron et al. 2023; reference: `LlamaForCausalLM` of transformers) and what shares its block: Llama 2 and 3,
//! Yi, Mistral (with a sliding window; `MistralForCausalLM`), InternLM 1 (with biases).

use crate::checkpoint::gguf::{
    ConfigFieldWriter, FieldResult, GgufArchitecture, GgufVariant, INTERLEAVED, TensorNameMap,
};
use crate::config::{ConfigFields, RopeConfig, RopeDefaults};
use crate::definition::Architecture;
use crate::error::ConfigError;
use crate::evidence::{ConfigEvidence, EvidenceResult};
use crate::families::mixtral;
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
    gguf: &[
        GgufArchitecture {
            name: "llama",
            model_type: "llama",
            write_fields: gguf_fields,
            tensor_names: gguf_names,
            ..GgufArchitecture::LLAMA
        },
        GgufArchitecture {
            name: "internlm2",
            model_type: "llama",
            write_fields: gguf_fields,
            tensor_names: |_| TensorNameMap::llama(INTERLEAVED),
            ..GgufArchitecture::LLAMA
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

/// Without experts Llama and its kin; InternLM 2, whose fused projection was taken apart, is Llama under other names.
fn gguf_names(files: GgufVariant) -> TensorNameMap {
    TensorNameMap::llama(if files.experts { mixtral::GGUF_BLOCK } else { INTERLEAVED })
}

/// Llama and its kin; with experts it is Mixtral.
fn gguf_fields(w: &mut ConfigFieldWriter<'_>) -> FieldResult {
    w.set_field("hidden_act", "silu");
    w.set_field("attention_bias", w.has_tensor("blk.0.attn_q.bias"));
    w.set_field("mlp_bias", w.has_tensor("blk.0.ffn_up.bias"));
    if !w.raw.contains_key("head_dim") {
        w.copy_number("rope.dimension_count", "head_dim")?;
    }
    let window = w.number("attention.sliding_window")?;
    if w.number("expert_count")?.unwrap_or(0) > 0 {
        w.set_field("model_type", "mixtral");
        w.copy_number("expert_count", "num_local_experts")?;
        w.copy_number("expert_used_count", "num_experts_per_tok")?;
    } else if window.is_some() {
        w.set_field("model_type", "mistral");
    }
    if let Some(window) = window {
        w.set_field("sliding_window", window);
    }
    Ok(())
}
