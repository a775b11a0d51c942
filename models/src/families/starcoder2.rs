//! StarCoder 2 (Lozhkov et al. 2024; reference: `Starcoder2ForCausalLM` of transformers): LayerNorm, biases everywhere,
//! a plain feed-forward part, grouped queries, a sliding window.

use crate::checkpoint::gguf::TensorConversion::Same;
use crate::checkpoint::gguf::{ConfigFieldWriter, FieldResult, GgufArchitecture, TensorNameMap};
use crate::config::{ConfigFields, RopeConfig, RopeDefaults};
use crate::definition::Architecture;
use crate::error::ConfigError;
use crate::evidence::{ConfigEvidence, EvidenceResult};
use crate::family::{FamilyVariant, ModelFamily};
use crate::layers::norm::{Norm, layer_norm};
use crate::layers::{
    ActivationFunction, AttentionVariant, LinearLayer, Rope, RopeTables, SelfAttention, mlp,
};
use crate::transformer::{ModelBuilder, ModelSizes, OuterLayers, Transformer, widest_window};
use mlcc_ir::graph::ValueId;

pub const FAMILY: ModelFamily = ModelFamily {
    variants: &[FamilyVariant {
        model_type: "starcoder2",
        classes: &["Starcoder2ForCausalLM"],
        about: "StarCoder 2",
        read: |fields| Starcoder2Config::from_fields(fields).map(Architecture::new),
        infer: infer_fields,
    }],
    gguf: &[GgufArchitecture {
        name: "starcoder2",
        model_type: "starcoder2",
        write_fields: gguf_fields,
        tensor_names: |_| {
            TensorNameMap::llama(&[("ffn_up", "mlp.c_fc", Same), ("ffn_down", "mlp.c_proj", Same)])
        },
        ..GgufArchitecture::LLAMA
    }],
};

#[derive(Clone, Debug, PartialEq)]
pub struct Starcoder2Config {
    pub sizes: ModelSizes,
    pub intermediate: usize,
    pub eps: f64,
    pub activation: ActivationFunction,
    pub rope: Rope,
    pub windows: Vec<Option<usize>>,
    pub bias: bool,
    pub tied: bool,
}

impl Starcoder2Config {
    pub fn from_fields(fields: &ConfigFields) -> Result<Starcoder2Config, ConfigError> {
        let mut sizes = ModelSizes::read(fields, Some(4096))?;
        let rope = RopeConfig::read(fields, sizes.head_size, sizes.context, RopeDefaults::LLAMA)?;
        sizes.context = rope.context;
        Ok(Starcoder2Config {
            intermediate: fields.size("intermediate_size")?,
            eps: fields.epsilon(&["norm_epsilon"], 1e-5)?,
            activation: ActivationFunction::read(fields, &["hidden_act"], ActivationFunction::GeluTanh)?,
            rope: rope.rope,
            windows: fields.layer_windows(sizes.layers, |_| true)?,
            bias: fields.flag_or("use_bias", true)?,
            tied: fields.flag_or("tie_word_embeddings", true)?,
            sizes,
        })
    }
}

impl Transformer for Starcoder2Config {
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
        let (sizes, bias, name) = (&self.sizes, self.bias, format!("model.layers.{layer}"));
        let h = layer_norm(net, x, &format!("{name}.input_layernorm"), self.eps);
        let attention =
            AttentionVariant { window: self.windows[layer], ..AttentionVariant::causal(sizes.head_size) };
        let part = format!("{name}.self_attn");
        let part =
            SelfAttention { qkv_bias: bias, output_bias: bias, ..SelfAttention::new(&part, rope, attention) };
        let h = part.apply(net, layer, sizes, h);
        let x = net.add_residual(layer, "attention", x, h);
        let h = layer_norm(net, x, &format!("{name}.post_attention_layernorm"), self.eps);
        let (up, down) = (format!("{name}.mlp.c_fc"), format!("{name}.mlp.c_proj"));
        let up = LinearLayer::new(&up, self.intermediate).bias(bias);
        let h = mlp::ungated(net, h, up, LinearLayer::new(&down, sizes.hidden).bias(bias), self.activation);
        net.add_residual(layer, "mlp", x, h)
    }

    fn window(&self) -> Option<usize> {
        widest_window(&self.windows)
    }
}

fn infer_fields(t: &mut ConfigEvidence) -> EvidenceResult {
    t.record_embedding("embed_tokens.weight", "lm_head.weight", true)?;
    t.record_heads("layers.0.self_attn", None)?;
    t.record_axis_size(&["intermediate_size"], "layers.0.mlp.c_fc.weight", 0, 1)?;
    t.record_bias("use_bias", "layers.0.self_attn.q_proj")
}

fn gguf_fields(w: &mut ConfigFieldWriter<'_>) -> FieldResult {
    w.set_field("hidden_act", "gelu_pytorch_tanh");
    w.set_field("use_bias", w.has_tensor("blk.0.attn_q.bias"));
    w.copy_number("attention.sliding_window", "sliding_window")?;
    w.copy_float("attention.layer_norm_epsilon", "norm_epsilon")
}
