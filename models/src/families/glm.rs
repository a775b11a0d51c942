//! GLM-4 in the Hugging Face classes (GLM Team 2024; reference: `GlmForCausalLM`, `Glm4ForCausalLM` of transformers):
//! rotary embedding of neighbouring elements on half of each head, fused gate and up projection; the newer class has
//! norms after the parts of a layer too.

use crate::checkpoint::gguf::TensorConversion::Same;
use crate::checkpoint::gguf::{ConfigFieldWriter, FieldResult, GgufArchitecture, NameMapping, TensorNameMap};
use crate::config::{ConfigFields, RopeConfig, RopeDefaults};
use crate::definition::Architecture;
use crate::error::ConfigError;
use crate::evidence::{ConfigEvidence, EvidenceResult};
use crate::family::{FamilyVariant, ModelFamily};
use crate::layers::norm::{Norm, rms_norm};
use crate::layers::rope::RopePairing;
use crate::layers::{
    ActivationFunction, AttentionVariant, LinearLayer, Rope, RopeTables, SelfAttention, mlp,
};
use crate::transformer::{ModelBuilder, ModelSizes, OuterLayers, Transformer};
use mlcc_ir::graph::ValueId;

pub const FAMILY: ModelFamily = ModelFamily {
    variants: &[
        FamilyVariant {
            model_type: "glm",
            classes: &["GlmForCausalLM"],
            about: "GLM-4",
            read: |fields| GlmConfig::glm(fields).map(Architecture::new),
            infer: infer_fields,
        },
        FamilyVariant {
            model_type: "glm4",
            classes: &["Glm4ForCausalLM"],
            about: "GLM-4-0414",
            read: |fields| GlmConfig::glm4(fields).map(Architecture::new),
            infer: infer_fields,
        },
    ],
    gguf: &[GgufArchitecture {
        name: "glm4",
        model_type: "glm4",
        write_fields: gguf_fields,
        tensor_names: |_| {
            TensorNameMap::llama(&[
                ("ffn_up", "mlp.gate_up_proj", Same),
                ("post_attention_norm", "post_self_attn_layernorm", Same),
                ("post_ffw_norm", "post_mlp_layernorm", Same),
            ])
        },
        ..GgufArchitecture::LLAMA
    }],
};

#[derive(Clone, Debug, PartialEq)]
pub struct GlmConfig {
    pub sizes: ModelSizes,
    pub intermediate: usize,
    pub eps: f64,
    pub activation: ActivationFunction,
    pub rope: Rope,
    pub qkv_bias: bool,
    /// `post_self_attn_layernorm` and `post_mlp_layernorm` are there.
    pub norms_behind: bool,
    pub tied: bool,
}

impl GlmConfig {
    pub fn glm(fields: &ConfigFields) -> Result<GlmConfig, ConfigError> {
        let mut sizes = ModelSizes::read(fields, Some(131_072))?;
        let defaults = RopeDefaults { share: 0.5, pairs: RopePairing::Interleaved, ..RopeDefaults::LLAMA };
        let rope = RopeConfig::read(fields, sizes.head_size, sizes.context, defaults)?;
        sizes.context = rope.context;
        Ok(GlmConfig {
            intermediate: fields.size("intermediate_size")?,
            eps: fields.epsilon(&["rms_norm_eps"], 1.5625e-7)?,
            activation: ActivationFunction::read(fields, &["hidden_act"], ActivationFunction::Silu)?,
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
}

impl Transformer for GlmConfig {
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
        let (sizes, name) = (&self.sizes, format!("model.layers.{layer}"));
        let norm =
            |net: &mut ModelBuilder, x, norm: &str| rms_norm(net, x, &format!("{name}.{norm}"), self.eps);
        let behind =
            |net: &mut ModelBuilder, x, which: &str| if self.norms_behind { norm(net, x, which) } else { x };
        let h = norm(net, x, "input_layernorm");
        let part = format!("{name}.self_attn");
        let part = SelfAttention::new(&part, rope, AttentionVariant::causal(sizes.head_size));
        let h = SelfAttention { qkv_bias: self.qkv_bias, ..part }.apply(net, layer, sizes, h);
        let h = behind(net, h, "post_self_attn_layernorm");
        let x = net.add_residual(layer, "attention", x, h);
        let h = norm(net, x, "post_attention_layernorm");
        let (gate_up, down) = (format!("{name}.mlp.gate_up_proj"), format!("{name}.mlp.down_proj"));
        let (gate_up, down) =
            (LinearLayer::new(&gate_up, 2 * self.intermediate), LinearLayer::new(&down, sizes.hidden));
        let h = mlp::gated_fused(net, h, gate_up, down, self.activation);
        let h = behind(net, h, "post_mlp_layernorm");
        net.add_residual(layer, "mlp", x, h)
    }
}

fn infer_fields(t: &mut ConfigEvidence) -> EvidenceResult {
    t.record_embedding("embed_tokens.weight", "lm_head.weight", false)?;
    t.record_heads("layers.0.self_attn", None)?;
    t.record_axis_size(&["intermediate_size"], "layers.0.mlp.gate_up_proj.weight", 0, 2)?;
    t.record_bias("attention_bias", "layers.0.self_attn.q_proj")
}

/// Files of the older class have the architecture `chatglm`.
pub(super) const GGUF_BLOCK: &[NameMapping] = &[("ffn_up", "mlp.gate_up_proj", Same)];

pub(super) fn gguf_fields(w: &mut ConfigFieldWriter<'_>) -> FieldResult {
    w.set_field("hidden_act", "silu");
    w.set_field("attention_bias", w.has_tensor("blk.0.attn_q.bias"));
    w.copy_partial_rotary("partial_rotary_factor")
}
