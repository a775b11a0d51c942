//! Phi-3 and Phi-4-mini (Abdin et al. 2024; reference: `Phi3ForCausalLM` of transformers): the Llama block with fused
//! projections, LongRoPE in the models of long context.

use crate::checkpoint::gguf::TensorConversion::Same;
use crate::checkpoint::gguf::{ConfigFieldWriter, FieldResult, GgufArchitecture, TensorNameMap};
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
use crate::transformer::{ModelBuilder, ModelSizes, OuterLayers, Transformer, widest_window};
use mlcc_ir::graph::ValueId;

pub const FAMILY: ModelFamily = ModelFamily {
    variants: &[FamilyVariant {
        model_type: "phi3",
        classes: &["Phi3ForCausalLM"],
        about: "Phi 3",
        read: |fields| Phi3Config::from_fields(fields).map(Architecture::new),
        infer: infer_fields,
    }],
    gguf: &[GgufArchitecture {
        name: "phi3",
        model_type: "phi3",
        write_fields: gguf_fields,
        tensor_names: |_| TensorNameMap::llama(&[("ffn_up", "mlp.gate_up_proj", Same)]),
        ..GgufArchitecture::LLAMA
    }],
};

#[derive(Clone, Debug, PartialEq)]
pub struct Phi3Config {
    pub sizes: ModelSizes,
    pub intermediate: usize,
    pub eps: f64,
    pub activation: ActivationFunction,
    pub rope: Rope,
    pub windows: Vec<Option<usize>>,
    pub tied: bool,
}

impl Phi3Config {
    pub fn from_fields(fields: &ConfigFields) -> Result<Phi3Config, ConfigError> {
        let mut sizes = ModelSizes::read(fields, Some(4096))?;
        let rope = RopeConfig::read(fields, sizes.head_size, sizes.context, RopeDefaults::LLAMA)?;
        sizes.context = rope.context;
        Ok(Phi3Config {
            intermediate: fields.size("intermediate_size")?,
            eps: fields.epsilon(&["rms_norm_eps"], 1e-5)?,
            activation: ActivationFunction::read(fields, &["hidden_act"], ActivationFunction::Silu)?,
            rope: rope.rope,
            windows: fields.layer_windows(sizes.layers, |_| true)?,
            tied: fields.flag_or("tie_word_embeddings", false)?,
            sizes,
        })
    }
}

impl Transformer for Phi3Config {
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
        let (sizes, hidden) = (&self.sizes, self.sizes.hidden);
        let name = format!("model.layers.{layer}");
        let h = rms_norm(net, x, &format!("{name}.input_layernorm"), self.eps);
        let attention =
            AttentionVariant { window: self.windows[layer], ..AttentionVariant::causal(sizes.head_size) };
        let part = format!("{name}.self_attn");
        let fused = FusedQkv::in_order(sizes.query_width(), sizes.key_width());
        let qkv = fused.apply(net, h, &LinearLayer::new(&format!("{part}.qkv_proj"), fused.rows()));
        let h = SelfAttention::new(&part, rope, attention).attend(net, layer, sizes, qkv);
        let h = LinearLayer::new(&format!("{part}.o_proj"), hidden).apply(net, h);
        let x = net.add_residual(layer, "attention", x, h);
        let h = rms_norm(net, x, &format!("{name}.post_attention_layernorm"), self.eps);
        let (gate_up, down) = (format!("{name}.mlp.gate_up_proj"), format!("{name}.mlp.down_proj"));
        let (gate_up, down) =
            (LinearLayer::new(&gate_up, 2 * self.intermediate), LinearLayer::new(&down, hidden));
        let h = mlp::gated_fused(net, h, gate_up, down, self.activation);
        net.add_residual(layer, "mlp", x, h)
    }

    fn window(&self) -> Option<usize> {
        widest_window(&self.windows)
    }
}

fn infer_fields(t: &mut ConfigEvidence) -> EvidenceResult {
    t.record_embedding("embed_tokens.weight", "lm_head.weight", false)?;
    let (output, fused) = ("layers.0.self_attn.o_proj.weight", "layers.0.self_attn.qkv_proj.weight");
    t.record_fused_heads(output, fused, &KV_HEADS)?;
    t.record_axis_size(&["intermediate_size"], "layers.0.mlp.gate_up_proj.weight", 0, 2)
}

fn gguf_fields(w: &mut ConfigFieldWriter<'_>) -> FieldResult {
    w.set_field("hidden_act", "silu");
    w.copy_number("attention.sliding_window", "sliding_window")?;
    w.copy_number("rope.scaling.original_context_length", "original_max_position_embeddings")?;
    w.copy_partial_rotary("partial_rotary_factor")
}
