//! StableLM 2 (Bellagente et al. 2024; reference: `StableLmForCausalLM` of transformers): LayerNorm around the Llama
//! block, rotary embedding on a quarter of each head; in the 12B model both parts of a layer stand side by side, and heads have
//! norms.

use crate::checkpoint::gguf::TensorConversion::Heads;
use crate::checkpoint::gguf::{ConfigFieldWriter, FieldResult, GgufArchitecture, TensorNameMap};
use crate::config::{ConfigFields, RopeConfig, RopeDefaults};
use crate::definition::Architecture;
use crate::error::ConfigError;
use crate::evidence::{ConfigEvidence, EvidenceResult};
use crate::family::{FamilyVariant, ModelFamily};
use crate::layers::norm::{Norm, layer_norm, layer_norm_by_head};
use crate::layers::{ActivationFunction, AttentionVariant, Rope, RopeTables, SelfAttention, mlp};
use crate::transformer::{ModelBuilder, ModelSizes, OuterLayers, Transformer};
use mlcc_ir::graph::ValueId;

pub const FAMILY: ModelFamily = ModelFamily {
    variants: &[FamilyVariant {
        model_type: "stablelm",
        classes: &["StableLmForCausalLM"],
        about: "StableLM 2",
        read: |fields| StableLmConfig::from_fields(fields).map(Architecture::new),
        infer: infer_fields,
    }],
    gguf: &[GgufArchitecture {
        name: "stablelm",
        model_type: "stablelm",
        write_fields: gguf_fields,
        tensor_names: |_| {
            TensorNameMap::llama(&[
                ("attn_q_norm.weight", "self_attn.q_layernorm.norms.{e}.weight", Heads),
                ("attn_k_norm.weight", "self_attn.k_layernorm.norms.{e}.weight", Heads),
            ])
        },
        ..GgufArchitecture::LLAMA
    }],
};

#[derive(Clone, Debug, PartialEq)]
pub struct StableLmConfig {
    pub sizes: ModelSizes,
    pub intermediate: usize,
    pub eps: f64,
    pub activation: ActivationFunction,
    pub rope: Rope,
    pub qkv_bias: bool,
    /// Queries and keys are normalised head by head (12B).
    pub head_norms: bool,
    /// Attention and feed-forward part read the same normalised input.
    pub parallel: bool,
    pub tied: bool,
}

impl StableLmConfig {
    pub fn from_fields(fields: &ConfigFields) -> Result<StableLmConfig, ConfigError> {
        let mut sizes = ModelSizes::read(fields, Some(4096))?;
        let defaults = RopeDefaults { share: 0.25, ..RopeDefaults::LLAMA };
        let rope = RopeConfig::read(fields, sizes.head_size, sizes.context, defaults)?;
        sizes.context = rope.context;
        Ok(StableLmConfig {
            intermediate: fields.size("intermediate_size")?,
            eps: fields.epsilon(&["layer_norm_eps"], 1e-5)?,
            activation: ActivationFunction::read(fields, &["hidden_act"], ActivationFunction::Silu)?,
            rope: rope.rope,
            qkv_bias: fields.flag_or("use_qkv_bias", false)?,
            head_norms: fields.flag_or("qk_layernorm", false)?,
            parallel: fields.flag_or("use_parallel_residual", false)?,
            tied: fields.flag_or("tie_word_embeddings", false)?,
            sizes,
        })
    }
}

/// Its norms are called `q_layernorm` and `k_layernorm`.
fn head_norm(net: &mut ModelBuilder, x: ValueId, name: &str, eps: f64) -> ValueId {
    layer_norm_by_head(net, x, &name.replace("_norm", "_layernorm"), eps)
}

impl Transformer for StableLmConfig {
    type Shared = RopeTables;

    fn sizes(&self) -> &ModelSizes {
        &self.sizes
    }

    fn outer_layers(&self) -> OuterLayers {
        OuterLayers::hugging_face(Norm::Layer(self.eps), self.tied)
    }

    fn prepare_shared(&self, net: &mut ModelBuilder) -> RopeTables {
        self.rope.tables(net, "rope")
    }

    fn add_layer(&self, net: &mut ModelBuilder, layer: usize, x: ValueId, rope: &RopeTables) -> ValueId {
        let name = format!("model.layers.{layer}");
        let normalised = layer_norm(net, x, &format!("{name}.input_layernorm"), self.eps);
        let part = format!("{name}.self_attn");
        let part = SelfAttention::new(&part, rope, AttentionVariant::causal(self.sizes.head_size));
        let part = SelfAttention {
            qkv_bias: self.qkv_bias,
            head_norm: self.head_norms.then_some((head_norm, self.eps)),
            ..part
        };
        let h = part.apply(net, layer, &self.sizes, normalised);
        let x = net.add_residual(layer, "attention", x, h);
        let input = match self.parallel {
            true => normalised,
            false => layer_norm(net, x, &format!("{name}.post_attention_layernorm"), self.eps),
        };
        let mlp = format!("{name}.mlp");
        let h = mlp::gated_by_name(net, input, &mlp, self.intermediate, false, self.activation);
        net.add_residual(layer, "mlp", x, h)
    }
}

fn infer_fields(t: &mut ConfigEvidence) -> EvidenceResult {
    t.record_llama_block(None)?;
    t.record_bias("use_qkv_bias", "layers.0.self_attn.q_proj")?;
    let (norm, last) = ("layers.0.input_layernorm.weight", "layers.0.post_attention_layernorm.weight");
    t.record_presence("qk_layernorm", norm, "layers.0.self_attn.q_layernorm.norms.0.weight", true)?;
    t.record_presence("use_parallel_residual", norm, last, false)
}

fn gguf_fields(w: &mut ConfigFieldWriter<'_>) -> FieldResult {
    w.set_field("hidden_act", "silu");
    w.set_field("use_qkv_bias", w.has_tensor("blk.0.attn_q.bias"));
    w.set_field("qk_layernorm", w.has_tensor("blk.0.attn_q_norm.weight"));
    let parallel = w.flag("use_parallel_residual")?.unwrap_or(false);
    w.set_field("use_parallel_residual", parallel && !w.has_tensor("blk.0.ffn_norm.weight"));
    w.copy_float("attention.layer_norm_epsilon", "layer_norm_eps")?;
    w.copy_partial_rotary("partial_rotary_factor")
}
