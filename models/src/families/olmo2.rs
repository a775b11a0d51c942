//! OLMo 2 and 3 (OLMo Team 2025; reference: `Olmo2ForCausalLM` and `Olmo3ForCausalLM` of transformers): norms after the parts
//! of a layer, and on all queries and all keys together. In OLMo 3 most layers have a window, and only the others scaled
//! rotary embedding.

use crate::checkpoint::gguf::{GgufArchitecture, NORMS_BEHIND, TensorNameMap};
use crate::config::{ConfigFields, RopeConfig, RopeDefaults};
use crate::definition::Architecture;
use crate::error::ConfigError;
use crate::evidence::{ConfigEvidence, EvidenceResult};
use crate::family::{FamilyVariant, ModelFamily};
use crate::layers::norm::{Norm, rms_norm};
use crate::layers::{
    ActivationFunction, AttentionVariant, LinearLayer, Rope, RopeTables, SelfAttention, mlp,
};
use crate::transformer::{ModelBuilder, ModelSizes, OuterLayers, Transformer, widest_window};
use mlcc_ir::graph::ValueId;

pub const FAMILY: ModelFamily = ModelFamily {
    variants: &[
        FamilyVariant {
            model_type: "olmo2",
            classes: &["Olmo2ForCausalLM"],
            about: "OLMo 2",
            read: |fields| Olmo2Config::from_fields(fields).map(Architecture::new),
            infer: infer_fields,
        },
        FamilyVariant {
            model_type: "olmo3",
            classes: &["Olmo3ForCausalLM"],
            about: "OLMo 3",
            read: |fields| Olmo2Config::olmo3(fields).map(Architecture::new),
            infer: infer_fields,
        },
    ],
    gguf: &[GgufArchitecture {
        name: "olmo2",
        model_type: "olmo2",
        write_fields: |w| {
            w.set_field("hidden_act", "silu");
            w.set_field("attention_bias", w.has_tensor("blk.0.attn_q.bias"));
            Ok(())
        },
        tensor_names: |_| TensorNameMap::llama(NORMS_BEHIND),
        ..GgufArchitecture::LLAMA
    }],
};

#[derive(Clone, Debug, PartialEq)]
pub struct Olmo2Config {
    pub sizes: ModelSizes,
    pub intermediate: usize,
    pub eps: f64,
    pub activation: ActivationFunction,
    /// Of layers without a window.
    pub rope: Rope,
    /// Of layers with a window.
    pub local_rope: Rope,
    pub windows: Vec<Option<usize>>,
    pub bias: bool,
    pub tied: bool,
}

impl Olmo2Config {
    pub fn from_fields(fields: &ConfigFields) -> Result<Olmo2Config, ConfigError> {
        Olmo2Config::read(fields, RopeDefaults::LLAMA)
    }

    fn read(fields: &ConfigFields, defaults: RopeDefaults) -> Result<Olmo2Config, ConfigError> {
        let mut sizes = ModelSizes::read(fields, Some(2048))?;
        let rope = RopeConfig::read(fields, sizes.head_size, sizes.context, defaults)?;
        sizes.context = rope.context;
        Ok(Olmo2Config {
            intermediate: fields.size("intermediate_size")?,
            eps: fields.epsilon(&["rms_norm_eps"], 1e-5)?,
            activation: ActivationFunction::read(fields, &["hidden_act"], ActivationFunction::Silu)?,
            local_rope: rope.rope.clone(),
            rope: rope.rope,
            windows: vec![None; sizes.layers],
            bias: fields.flag_or("attention_bias", false)?,
            tied: fields.flag_or("tie_word_embeddings", false)?,
            sizes,
        })
    }

    /// Adds a layer whose queries and keys are turned by `rope`, if at all.
    pub fn layer(
        &self,
        net: &mut ModelBuilder,
        layer: usize,
        x: ValueId,
        rope: Option<&RopeTables>,
    ) -> ValueId {
        let (sizes, name) = (&self.sizes, format!("model.layers.{layer}"));
        let part = format!("{name}.self_attn");
        let linear = |net: &mut ModelBuilder, x, which: &str, out| {
            LinearLayer::new(&format!("{part}.{which}"), out).bias(self.bias).apply(net, x)
        };
        let q = linear(net, x, "q_proj", sizes.query_width());
        let k = linear(net, x, "k_proj", sizes.key_width());
        let v = linear(net, x, "v_proj", sizes.key_width());
        let q = rms_norm(net, q, &format!("{part}.q_norm"), self.eps);
        let k = rms_norm(net, k, &format!("{part}.k_norm"), self.eps);
        let attention =
            AttentionVariant { window: self.windows[layer], ..AttentionVariant::causal(sizes.head_size) };
        let attention = SelfAttention { rope, ..SelfAttention::without_positions(&part, attention) };
        let h = attention.attend(net, layer, sizes, [q, k, v]);
        let h = linear(net, h, "o_proj", sizes.hidden);
        let h = rms_norm(net, h, &format!("{name}.post_attention_layernorm"), self.eps);
        let x = net.add_residual(layer, "attention", x, h);
        let mlp = format!("{name}.mlp");
        let h = mlp::gated_by_name(net, x, &mlp, self.intermediate, false, self.activation);
        let h = rms_norm(net, h, &format!("{name}.post_feedforward_layernorm"), self.eps);
        net.add_residual(layer, "mlp", x, h)
    }

    pub fn olmo3(fields: &ConfigFields) -> Result<Olmo2Config, ConfigError> {
        let defaults = RopeDefaults { theta: 5e5, ..RopeDefaults::LLAMA };
        let full = RopeConfig::fields_of_kind(fields, "full_attention")?;
        let config = Olmo2Config::read(full.as_ref().unwrap_or(fields), defaults)?;
        // Rotary embedding is scaled on layers without a window only.
        let windows = fields.layer_windows(config.sizes.layers, |layer| !(layer + 1).is_multiple_of(4))?;
        let (size, context) = (config.sizes.head_size, config.sizes.context);
        let local = match RopeConfig::fields_of_kind(fields, "sliding_attention")? {
            Some(fields) => RopeConfig::read(&fields, size, context, defaults)?,
            None => RopeConfig::read_unscaled(fields, size, context, defaults)?,
        };
        Ok(Olmo2Config { windows, local_rope: local.rope, ..config })
    }
}

impl Transformer for Olmo2Config {
    type Shared = [RopeTables; 2];

    fn sizes(&self) -> &ModelSizes {
        &self.sizes
    }

    fn outer_layers(&self) -> OuterLayers {
        OuterLayers::hugging_face(Norm::Rms(self.eps), self.tied)
    }

    fn prepare_shared(&self, net: &mut ModelBuilder) -> [RopeTables; 2] {
        self.rope.tables_with_local(net, &self.local_rope)
    }

    fn window(&self) -> Option<usize> {
        widest_window(&self.windows)
    }

    fn add_layer(
        &self,
        net: &mut ModelBuilder,
        layer: usize,
        x: ValueId,
        [rope, local]: &[RopeTables; 2],
    ) -> ValueId {
        let rope = if self.windows[layer].is_some() { local } else { rope };
        self.layer(net, layer, x, Some(rope))
    }
}

fn infer_fields(t: &mut ConfigEvidence) -> EvidenceResult {
    t.record_llama_block(None)?;
    t.record_bias("attention_bias", "layers.0.self_attn.q_proj")
}
