//! Granite 3 (IBM 2024; reference: `GraniteForCausalLM` of transformers): the Llama block with four multipliers. It is
//! the worked example of docs/add-a-model.md, and therefore spelled out where it could borrow from `llama.rs`.

use crate::checkpoint::gguf::{ConfigFieldWriter, FieldResult, GgufArchitecture, INTERLEAVED, TensorNameMap};
use crate::config::ConfigFields;
use crate::config::published::PublishedFields;
use crate::definition::Architecture;
use crate::error::ConfigError;
use crate::families::llama;
use crate::family::{FamilyVariant, ModelFamily};
use crate::layers::norm::{Norm, rms_norm};
use crate::layers::{
    ActivationFunction, AttentionVariant, Rope, RopeConfig, RopeDefaults, RopeTables, SelfAttention, mlp,
};
use crate::transformer::{ModelBuilder, ModelSizes, OuterLayers, Transformer};
use mlcc_ir::graph::ValueId;

pub const FAMILY: ModelFamily = ModelFamily {
    variants: &[FamilyVariant {
        model_type: "granite",
        classes: &["GraniteForCausalLM"],
        about: "Granite 3",
        read: |fields| GraniteConfig::from_fields(fields).map(Architecture::new),
        infer: llama::infer_fields,
        fields: PublishedFields {
            read: "attention_bias attention_multiplier embedding_multiplier hidden_act \
                        hidden_size intermediate_size logits_scaling max_position_embeddings \
                        mlp_bias num_attention_heads num_hidden_layers num_key_value_heads \
                        residual_multiplier rms_norm_eps rope_parameters tie_word_embeddings \
                        vocab_size",
            ..PublishedFields::UNKNOWN
        },
    }],
    gguf: &[GgufArchitecture {
        name: "granite",
        model_type: "granite",
        write_fields: gguf_fields,
        tensor_names: |_| TensorNameMap::llama(INTERLEAVED),
        ..GgufArchitecture::LLAMA
    }],
};

#[derive(Clone, Debug, PartialEq)]
pub struct GraniteConfig {
    sizes: ModelSizes,
    intermediate: usize,
    eps: f64,
    activation: ActivationFunction,
    rope: Rope,
    attention_bias: bool,
    mlp_bias: bool,
    tied: bool,
    embedding_multiplier: f64,
    /// In place of `1 / sqrt(head_size)`.
    attention_multiplier: f64,
    /// Of what each part of a layer adds.
    residual_multiplier: f64,
    /// Logits are divided by it.
    logits_scaling: f64,
}

impl GraniteConfig {
    /// From config.json. Sizes have to be there; what has one published default may be absent.
    pub fn from_fields(fields: &ConfigFields) -> Result<GraniteConfig, ConfigError> {
        let mut sizes = ModelSizes::read(fields, Some(2048))?;
        let rope = RopeConfig::read(fields, sizes.head_size, sizes.context, RopeDefaults::LLAMA)?;
        sizes.context = rope.context;
        Ok(GraniteConfig {
            sizes,
            intermediate: fields.size("intermediate_size")?,
            eps: fields.epsilon(&["rms_norm_eps"], 1e-6)?,
            activation: ActivationFunction::read(fields, &["hidden_act"], ActivationFunction::Silu)?,
            rope: rope.rope,
            attention_bias: fields.flag_or("attention_bias", false)?,
            mlp_bias: fields.flag_or("mlp_bias", false)?,
            tied: fields.flag_or("tie_word_embeddings", false)?,
            embedding_multiplier: fields.float_or("embedding_multiplier", 1.0)?,
            attention_multiplier: fields.float_or("attention_multiplier", 1.0)?,
            residual_multiplier: fields.float_or("residual_multiplier", 1.0)?,
            logits_scaling: fields.float_or("logits_scaling", 1.0)?,
        })
    }

    /// `x + multiplier * h`. The tap is what transformers returns from the part, so that dumps can be compared.
    fn residual(&self, net: &mut ModelBuilder, tap: &str, x: ValueId, h: ValueId) -> ValueId {
        net.tap(tap, h);
        let h = net.scale(h, self.residual_multiplier);
        net.add(x, h)
    }
}

impl Transformer for GraniteConfig {
    type Shared = RopeTables;

    fn sizes(&self) -> &ModelSizes {
        &self.sizes
    }

    fn outer_layers(&self) -> OuterLayers {
        OuterLayers {
            embedding_scale: Some(self.embedding_multiplier),
            logit_scale: Some(1.0 / self.logits_scaling),
            ..OuterLayers::hugging_face(Norm::Rms(self.eps), self.tied)
        }
    }

    fn prepare_shared(&self, net: &mut ModelBuilder) -> RopeTables {
        self.rope.tables(net, "rope")
    }

    fn add_layer(&self, net: &mut ModelBuilder, layer: usize, x: ValueId, rope: &RopeTables) -> ValueId {
        let name = format!("model.layers.{layer}");
        let h = rms_norm(net, x, &format!("{name}.input_layernorm"), self.eps);
        let scale = self.attention_multiplier;
        let attention = AttentionVariant { scale, ..AttentionVariant::causal(self.sizes.head_size) };
        let part = format!("{name}.self_attn");
        let (qkv_bias, output_bias) = (self.attention_bias, self.attention_bias);
        let part = SelfAttention { qkv_bias, output_bias, ..SelfAttention::new(&part, rope, attention) };
        let h = part.apply(net, layer, &self.sizes, h);
        let x = self.residual(net, &format!("layer.{layer}.attention"), x, h);

        let h = rms_norm(net, x, &format!("{name}.post_attention_layernorm"), self.eps);
        let (part, width) = (format!("{name}.mlp"), self.intermediate);
        let h = mlp::gated_by_name(net, h, &part, width, self.mlp_bias, self.activation);
        self.residual(net, &format!("layer.{layer}.mlp"), x, h)
    }
}

fn gguf_fields(w: &mut ConfigFieldWriter<'_>) -> FieldResult {
    w.set_field("hidden_act", "silu");
    w.set_field("attention_bias", w.has_tensor("blk.0.attn_q.bias"));
    w.set_field("mlp_bias", w.has_tensor("blk.0.ffn_up.bias"));
    w.copy_float("attention.scale", "attention_multiplier")?;
    w.copy_float("embedding_scale", "embedding_multiplier")?;
    w.copy_float("residual_scale", "residual_multiplier")?;
    w.copy_float("logit_scale", "logits_scaling")
}
