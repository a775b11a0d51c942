//! Ministral 3 (Mistral AI 2025; reference: `Ministral3ForCausalLM` of transformers): the Llama block, with queries that
//! grow with the logarithm of their position beyond the original context (Nakanishi 2025, as in Llama 4).

use crate::checkpoint::gguf::{ConfigFieldWriter, FieldResult, GgufArchitecture, INTERLEAVED, TensorNameMap};
use crate::config::{ConfigFields, RopeConfig, RopeDefaults};
use crate::definition::Architecture;
use crate::error::ConfigError;
use crate::family::{FamilyVariant, ModelFamily};
use crate::layers::norm::{Norm, rms_norm};
use crate::layers::query_temperature::QueryTemperature;
use crate::layers::{ActivationFunction, AttentionVariant, Rope, RopeTables, SelfAttention, mlp};
use crate::transformer::{ModelBuilder, ModelSizes, OuterLayers, Transformer, widest_window};
use mlcc_ir::graph::ValueId;
use serde_json::{Map, Value, json};

pub const FAMILY: ModelFamily = ModelFamily {
    variants: &[FamilyVariant {
        model_type: "ministral3",
        classes: &["Ministral3ForCausalLM"],
        about: "Ministral 3",
        read: |fields| Ministral3Config::from_fields(fields).map(Architecture::new),
        infer: |t| t.record_llama_block(None),
    }],
    gguf: &[GgufArchitecture {
        name: "mistral3",
        model_type: "ministral3",
        write_fields: |w| {
            w.set_field("hidden_act", "silu");
            Ok(())
        },
        tensor_names: |_| TensorNameMap::llama(INTERLEAVED),
        write_yarn: gguf_yarn,
        ..GgufArchitecture::LLAMA
    }],
};

#[derive(Clone, Debug, PartialEq)]
pub struct Ministral3Config {
    pub sizes: ModelSizes,
    pub intermediate: usize,
    pub eps: f64,
    pub activation: ActivationFunction,
    pub rope: Rope,
    pub windows: Vec<Option<usize>>,
    pub query_temperature: QueryTemperature,
    pub tied: bool,
}

impl Ministral3Config {
    pub fn from_fields(fields: &ConfigFields) -> Result<Ministral3Config, ConfigError> {
        let mut sizes = ModelSizes::read(fields, Some(262_144))?;
        let defaults = RopeDefaults { theta: 1e6, ..RopeDefaults::LLAMA };
        let rope = RopeConfig::read(fields, sizes.head_size, sizes.context, defaults)?;
        sizes.context = rope.context;
        let parameters = match fields.nested_object("rope_parameters")? {
            Some(parameters) => parameters,
            None => return Err(fields.missing_field("rope_parameters", "an object")),
        };
        Ok(Ministral3Config {
            intermediate: fields.size("intermediate_size")?,
            eps: fields.epsilon(&["rms_norm_eps"], 1e-5)?,
            activation: ActivationFunction::read(fields, &["hidden_act"], ActivationFunction::Silu)?,
            rope: rope.rope,
            windows: fields.layer_windows(sizes.layers, |_| true)?,
            query_temperature: QueryTemperature::read(&parameters, sizes.context)?,
            tied: fields.flag_or("tie_word_embeddings", false)?,
            sizes,
        })
    }
}

/// What depends on the positions of a call.
pub struct MinistralPositions {
    rope: RopeTables,
    query_scale: ValueId,
}

impl Transformer for Ministral3Config {
    type Shared = MinistralPositions;

    fn sizes(&self) -> &ModelSizes {
        &self.sizes
    }

    fn outer_layers(&self) -> OuterLayers {
        OuterLayers::hugging_face(Norm::Rms(self.eps), self.tied)
    }

    fn prepare_shared(&self, net: &mut ModelBuilder) -> MinistralPositions {
        let rope = self.rope.tables(net, "rope");
        MinistralPositions { rope, query_scale: net.for_sequences(|net| self.query_temperature.factors(net)) }
    }

    fn add_layer(
        &self,
        net: &mut ModelBuilder,
        layer: usize,
        x: ValueId,
        positions: &MinistralPositions,
    ) -> ValueId {
        let name = format!("model.layers.{layer}");
        let h = rms_norm(net, x, &format!("{name}.input_layernorm"), self.eps);
        let attention = AttentionVariant {
            window: self.windows[layer],
            ..AttentionVariant::causal(self.sizes.head_size)
        };
        let part = format!("{name}.self_attn");
        let part = SelfAttention::new(&part, &positions.rope, attention);
        let part = SelfAttention { query_scale: Some(positions.query_scale), ..part };
        let h = part.apply(net, layer, &self.sizes, h);
        let x = net.add_residual(layer, "attention", x, h);
        let h = rms_norm(net, x, &format!("{name}.post_attention_layernorm"), self.eps);
        let mlp = format!("{name}.mlp");
        let h = mlp::gated_by_name(net, h, &mlp, self.intermediate, false, self.activation);
        net.add_residual(layer, "mlp", x, h)
    }

    fn window(&self) -> Option<usize> {
        widest_window(&self.windows)
    }

    fn streaming_obstacle(&self) -> Option<&'static str> {
        Some("queries of this model grow with their position")
    }
}

fn gguf_yarn(w: &mut ConfigFieldWriter<'_>, fields: &mut Map<String, Value>) -> FieldResult {
    // The converter writes one of two numbers that are equal.
    if let Some(scale) = w.float("rope.scaling.yarn_log_multiplier")? {
        fields.insert("mscale".to_string(), json!(scale));
        fields.insert("mscale_all_dim".to_string(), json!(scale));
    }
    w.set_rope_parameters(fields, 1e6, 0.0)
}
