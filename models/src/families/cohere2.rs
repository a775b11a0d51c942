//! Command R7B and Command A (Cohere 2024, 2025; reference: `Cohere2ForCausalLM` of transformers): both parts of a layer read one
//! normalised input; layers with a window have rotary embedding of neighbouring elements, the others no positions.

use crate::checkpoint::gguf::{ConfigFieldWriter, FieldResult, GgufArchitecture};
use crate::config::{ConfigFields, RopeConfig, RopeDefaults};
use crate::definition::Architecture;
use crate::error::ConfigError;
use crate::evidence::{ConfigEvidence, EvidenceResult};
use crate::family::{FamilyVariant, ModelFamily};
use crate::layers::norm::{Norm, layer_norm_bias};
use crate::layers::rope::RopePairing;
use crate::layers::{ActivationFunction, AttentionVariant, Rope, RopeTables, SelfAttention, mlp};
use crate::transformer::{ModelBuilder, ModelSizes, OuterLayers, Transformer};
use mlcc_ir::graph::ValueId;

pub const FAMILY: ModelFamily = ModelFamily {
    variants: &[FamilyVariant {
        model_type: "cohere2",
        classes: &["Cohere2ForCausalLM"],
        about: "Command R7B, Command A",
        read: |fields| Cohere2Config::from_fields(fields).map(Architecture::new),
        infer: infer_fields,
    }],
    gguf: &[GgufArchitecture {
        name: "cohere2",
        model_type: "cohere2",
        write_fields: gguf_fields,
        ..GgufArchitecture::LLAMA
    }],
};

#[derive(Clone, Debug, PartialEq)]
pub struct Cohere2Config {
    pub sizes: ModelSizes,
    pub intermediate: usize,
    pub eps: f64,
    pub activation: ActivationFunction,
    /// Of layers with a window.
    pub rope: Rope,
    pub windows: Vec<Option<usize>>,
    pub bias: bool,
    /// Factor of the logits.
    pub logit_scale: f64,
    pub tied: bool,
}

impl Cohere2Config {
    pub fn from_fields(fields: &ConfigFields) -> Result<Cohere2Config, ConfigError> {
        let mut sizes = ModelSizes::read(fields, Some(8192))?;
        let defaults = RopeDefaults { pairs: RopePairing::Interleaved, ..RopeDefaults::LLAMA };
        let rope = RopeConfig::read(fields, sizes.head_size, sizes.context, defaults)?;
        sizes.context = rope.context;
        let pattern =
            fields.first_present(&["sliding_window_pattern", "_sliding_window_pattern", "layer_switch"]);
        let pattern = fields.size_or(pattern, 4)?;
        Ok(Cohere2Config {
            intermediate: fields.size("intermediate_size")?,
            eps: fields.epsilon(&["layer_norm_eps"], 1e-5)?,
            activation: ActivationFunction::read(fields, &["hidden_act"], ActivationFunction::Silu)?,
            rope: rope.rope,
            windows: fields.layer_windows(sizes.layers, |layer| !(layer + 1).is_multiple_of(pattern))?,
            bias: fields.flag_or("attention_bias", false)?,
            logit_scale: fields.float_or("logit_scale", 0.0625)?,
            tied: fields.flag_or("tie_word_embeddings", true)?,
            sizes,
        })
    }
}

impl Transformer for Cohere2Config {
    type Shared = RopeTables;

    fn sizes(&self) -> &ModelSizes {
        &self.sizes
    }

    fn outer_layers(&self) -> OuterLayers {
        let norm = Norm::LayerNoBias(self.eps);
        OuterLayers { logit_scale: Some(self.logit_scale), ..OuterLayers::hugging_face(norm, self.tied) }
    }

    fn prepare_shared(&self, net: &mut ModelBuilder) -> RopeTables {
        self.rope.tables(net, "rope")
    }

    fn add_layer(&self, net: &mut ModelBuilder, layer: usize, x: ValueId, rope: &RopeTables) -> ValueId {
        let name = format!("model.layers.{layer}");
        let normalised = layer_norm_bias(net, x, &format!("{name}.input_layernorm"), self.eps, false);
        let window = self.windows[layer];
        let attention = AttentionVariant { window, ..AttentionVariant::causal(self.sizes.head_size) };
        let h = SelfAttention {
            qkv_bias: self.bias,
            output_bias: self.bias,
            rope: window.map(|_| rope),
            ..SelfAttention::new(&format!("{name}.self_attn"), rope, attention)
        }
        .apply(net, layer, &self.sizes, normalised);
        let x = net.add_residual(layer, "attention", x, h);
        let mlp = format!("{name}.mlp");
        let h = mlp::gated_by_name(net, normalised, &mlp, self.intermediate, false, self.activation);
        net.add_residual(layer, "mlp", x, h)
    }
}

fn infer_fields(t: &mut ConfigEvidence) -> EvidenceResult {
    t.record_tied_llama_block()?;
    t.record_bias("attention_bias", "layers.0.self_attn.q_proj")
}

fn gguf_fields(w: &mut ConfigFieldWriter<'_>) -> FieldResult {
    w.set_field("hidden_act", "silu");
    w.set_field("attention_bias", w.has_tensor("blk.0.attn_q.bias"));
    w.copy_number("attention.sliding_window", "sliding_window")?;
    w.copy_float("attention.layer_norm_epsilon", "layer_norm_eps")?;
    w.copy_float("logit_scale", "logit_scale")
}
