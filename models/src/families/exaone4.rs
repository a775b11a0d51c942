//! EXAONE 4 (LG AI Research 2025; reference: `Exaone4ForCausalLM` of transformers): norms after the parts of a layer and on the
//! heads of queries and keys. Where some layers have a window, the others have no positions.

use crate::checkpoint::gguf::{
    ConfigFieldWriter, FieldResult, GgufArchitecture, NORMS_BEHIND, TensorNameMap,
};
use crate::config::{ConfigFields, RopeConfig, RopeDefaults};
use crate::definition::Architecture;
use crate::error::ConfigError;
use crate::family::{FamilyVariant, ModelFamily};
use crate::layers::norm::{Norm, rms_norm};
use crate::layers::{ActivationFunction, AttentionVariant, Rope, RopeTables, SelfAttention, mlp};
use crate::transformer::{ModelBuilder, ModelSizes, OuterLayers, Transformer, widest_window};
use mlcc_ir::graph::ValueId;
use serde_json::Value;

pub const FAMILY: ModelFamily = ModelFamily {
    variants: &[FamilyVariant {
        model_type: "exaone4",
        classes: &["Exaone4ForCausalLM"],
        about: "EXAONE 4",
        read: |fields| Exaone4Config::from_fields(fields).map(Architecture::new),
        infer: |t| t.record_llama_block(Some("layers.0.self_attn.q_norm.weight")),
    }],
    gguf: &[GgufArchitecture {
        name: "exaone4",
        model_type: "exaone4",
        write_fields: gguf_fields,
        tensor_names: |_| TensorNameMap::llama(NORMS_BEHIND),
        ..GgufArchitecture::LLAMA
    }],
};

#[derive(Clone, Debug, PartialEq)]
pub struct Exaone4Config {
    pub sizes: ModelSizes,
    pub intermediate: usize,
    pub eps: f64,
    pub activation: ActivationFunction,
    /// Of layers with a window; of all, where none has one.
    pub rope: Rope,
    pub windows: Vec<Option<usize>>,
    /// The model has windows: layers without one have no positions.
    pub hybrid: bool,
    pub tied: bool,
}

impl Exaone4Config {
    pub fn from_fields(fields: &ConfigFields) -> Result<Exaone4Config, ConfigError> {
        let mut sizes = ModelSizes::read(fields, Some(2048))?;
        let rope = RopeConfig::read(fields, sizes.head_size, sizes.context, RopeDefaults::LLAMA)?;
        sizes.context = rope.context;
        let pattern = WindowPattern::read(fields)?;
        Ok(Exaone4Config {
            intermediate: fields.size("intermediate_size")?,
            eps: fields.epsilon(&["rms_norm_eps"], 1e-5)?,
            activation: ActivationFunction::read(fields, &["hidden_act"], ActivationFunction::Silu)?,
            rope: rope.rope,
            windows: fields.layer_windows(sizes.layers, |layer| pattern.is_local(layer))?,
            hybrid: fields.get("sliding_window").is_some(),
            tied: fields.flag_or("tie_word_embeddings", false)?,
            sizes,
        })
    }
}

/// `sliding_window_pattern`: which layers have a window, where `layer_types` does not say it.
enum WindowPattern {
    /// All but every so many-th.
    Every(usize),
    /// By letter, again and again: `L` has a window, `G` has none.
    Letters(Vec<bool>),
}

impl WindowPattern {
    fn read(fields: &ConfigFields) -> Result<WindowPattern, ConfigError> {
        let field = "sliding_window_pattern";
        let Some(Value::String(letters)) = fields.get(field) else {
            // Files without windows may say 0.
            return Ok(WindowPattern::Every(fields.count_or(field, 4)?.max(1)));
        };
        let local = letters.chars().map(|letter| match letter {
            'L' => Some(true),
            'G' => Some(false),
            _ => None,
        });
        match local.collect::<Option<Vec<bool>>>().filter(|local| !local.is_empty()) {
            Some(local) => Ok(WindowPattern::Letters(local)),
            None => {
                let expected = "a number of layers, or letters L (window) and G (none)";
                Err(fields.invalid_value(field, expected, &Value::from(letters.as_str())))
            }
        }
    }

    fn is_local(&self, layer: usize) -> bool {
        match self {
            WindowPattern::Every(count) => !(layer + 1).is_multiple_of(*count),
            WindowPattern::Letters(local) => local[layer % local.len()],
        }
    }
}

impl Transformer for Exaone4Config {
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
        let (name, window) = (format!("model.layers.{layer}"), self.windows[layer]);
        let attention = AttentionVariant { window, ..AttentionVariant::causal(self.sizes.head_size) };
        let h = SelfAttention {
            head_norm: Some((rms_norm, self.eps)),
            rope: (window.is_some() || !self.hybrid).then_some(rope),
            ..SelfAttention::new(&format!("{name}.self_attn"), rope, attention)
        }
        .apply(net, layer, &self.sizes, x);
        let h = rms_norm(net, h, &format!("{name}.post_attention_layernorm"), self.eps);
        let x = net.add_residual(layer, "attention", x, h);
        let mlp = format!("{name}.mlp");
        let h = mlp::gated_by_name(net, x, &mlp, self.intermediate, false, self.activation);
        let h = rms_norm(net, h, &format!("{name}.post_feedforward_layernorm"), self.eps);
        net.add_residual(layer, "mlp", x, h)
    }

    fn window(&self) -> Option<usize> {
        widest_window(&self.windows)
    }
}

fn gguf_fields(w: &mut ConfigFieldWriter<'_>) -> FieldResult {
    w.set_field("hidden_act", "silu");
    w.copy_number("attention.sliding_window", "sliding_window")?;
    let windowed = w.layer_types()?;
    if !windowed.is_empty() {
        w.set_field("layer_types", windowed);
    }
    Ok(())
}
