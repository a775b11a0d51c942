//! OLMo Hybrid (OLMo Team 2026; reference: `OlmoHybridForCausalLM` of transformers): three of four layers have a gated delta rule
//! after norms, the others are those of OLMo 2, often without positions.

use crate::config::ConfigFields;
use crate::config::published::PublishedFields;
use crate::config::sizes::{HEADS, HIDDEN, KV_HEADS};
use crate::definition::Architecture;
use crate::error::ConfigError;
use crate::evidence::{ConfigEvidence, EvidenceResult};
use crate::families::olmo2;
use crate::families::qwen3_next::{DeltaNet, attention_layers};
use crate::family::{FamilyVariant, ModelFamily};
use crate::layers::norm::Norm;
use crate::layers::{Rope, RopeConfig, RopeDefaults, RopeTables};
use crate::standard_decoder::{BlockPositions, StandardDecoder};
use crate::transformer::{ModelBuilder, ModelSizes, OuterLayers, Transformer};
use mlcc_ir::graph::ValueId;
use serde_json::Value;

pub const FAMILY: ModelFamily = ModelFamily {
    variants: &[FamilyVariant {
        model_type: "olmo_hybrid",
        classes: &["OlmoHybridForCausalLM"],
        about: "OLMo Hybrid",
        read: |fields| OlmoHybridConfig::from_fields(fields).map(Architecture::new),
        infer: infer_fields,
        fields: PublishedFields {
            read: "attention_bias hidden_act hidden_size intermediate_size layer_types \
                        linear_allow_neg_eigval linear_conv_kernel_dim linear_key_head_dim \
                        linear_num_key_heads linear_num_value_heads linear_value_head_dim \
                        max_position_embeddings=65536 num_attention_heads num_hidden_layers \
                        num_key_value_heads rms_norm_eps rope_parameters tie_word_embeddings \
                        vocab_size",
            none: "linear_a_log_max linear_a_log_min linear_dt_init_floor linear_dt_max \
                        linear_dt_min",
            ..PublishedFields::UNKNOWN
        },
    }],
    gguf: &[],
};

#[derive(Clone, Debug, PartialEq)]
pub struct OlmoHybridConfig {
    /// Layers with attention, and what all layers have.
    pub olmo: StandardDecoder,
    /// `None`: no positions.
    pub rope: Option<Rope>,
    /// By layer: attention in place of the delta rule.
    pub attends: Vec<bool>,
    pub delta_net: DeltaNet,
}

impl OlmoHybridConfig {
    pub fn from_fields(fields: &ConfigFields) -> Result<OlmoHybridConfig, ConfigError> {
        let mut olmo = olmo2::read(fields)?;
        olmo.set_norm(Norm::Rms(fields.epsilon(&["rms_norm_eps"], 1e-6)?));
        let sizes = &olmo.sizes;
        let rope = RopeConfig::read(fields, sizes.head_size, sizes.context, RopeDefaults::LLAMA)?.rope;
        Ok(OlmoHybridConfig {
            rope: has_positions(fields).then_some(rope),
            attends: attention_layers(fields, sizes.layers)?,
            delta_net: delta_net(fields, sizes)?,
            olmo,
        })
    }
}

/// A base of `null` means no positions; without the field it has its default.
fn has_positions(fields: &ConfigFields) -> bool {
    let parameters = fields.raw.get("rope_parameters").and_then(|parameters| parameters.get("rope_theta"));
    !parameters.or(fields.raw.get("rope_theta")).is_some_and(Value::is_null)
}

/// The delta rule has as many heads as attention, with keys of three quarters of the width and values twice as wide, where the
/// file says nothing else.
fn delta_net(fields: &ConfigFields, sizes: &ModelSizes) -> Result<DeltaNet, ConfigError> {
    let mut complete = fields.clone();
    let mut set = |field: &str, value: usize| {
        if complete.get(field).is_none() {
            complete.raw.insert(field.to_string(), Value::from(value));
        }
    };
    let heads = fields.size_or("linear_num_key_heads", sizes.heads)?;
    let size = fields.size_or("linear_key_head_dim", (3 * sizes.hidden / (4 * heads)).max(1))?;
    set("linear_num_key_heads", heads);
    set("linear_num_value_heads", sizes.heads);
    set("linear_key_head_dim", size);
    set("linear_value_head_dim", 2 * size);
    DeltaNet::separate(&complete)
}

impl Transformer for OlmoHybridConfig {
    type Shared = Option<RopeTables>;

    fn sizes(&self) -> &ModelSizes {
        &self.olmo.sizes
    }

    fn outer_layers(&self) -> OuterLayers {
        self.olmo.outer_layers()
    }

    fn prepare_shared(&self, net: &mut ModelBuilder) -> Option<RopeTables> {
        self.rope.as_ref().map(|rope| rope.tables(net, "rope"))
    }

    fn add_layer(
        &self,
        net: &mut ModelBuilder,
        layer: usize,
        x: ValueId,
        rope: &Option<RopeTables>,
    ) -> ValueId {
        if self.attends[layer] {
            let positions = BlockPositions { rope: *rope, query_scale: None };
            return self.olmo.block.apply(net, &self.olmo.sizes, layer, x, &positions);
        }
        let (name, block) = (format!("model.layers.{layer}"), &self.olmo.block);
        let h = block.norm.apply(net, x, &format!("{name}.input_layernorm"));
        let h = self.delta_net.apply(net, layer, &format!("{name}.linear_attn"), h);
        let x = net.add_residual(layer, "attention", x, h);
        let h = block.norm.apply(net, x, &format!("{name}.post_attention_layernorm"));
        let h = block.mlp.apply(net, &name, h);
        net.add_residual(layer, "mlp", x, h)
    }

    fn canonical_name(&self, stored_name: &str) -> String {
        let name = stored_name.replace(".attention_layer_norm.", ".input_layernorm.");
        name.replace(".feedforward_layer_norm.", ".post_attention_layernorm.")
    }
}

fn infer_fields(t: &mut ConfigEvidence) -> EvidenceResult {
    t.record_bias("attention_bias", "self_attn.q_proj")?;
    t.record_embedding("embed_tokens.weight", "lm_head.weight", false)?;
    t.record_axis_size(&["intermediate_size"], "layers.0.mlp.gate_proj.weight", 0, 1)?;
    if let (Some(hidden), Some(heads)) = (t.known_size(&HIDDEN), t.known_size(&HEADS)) {
        t.record_axis_size(&KV_HEADS, "self_attn.k_proj.weight", 0, hidden / heads)?;
    }
    t.record_axis_size(&["linear_num_value_heads"], "linear_attn.A_log", 0, 1)?;
    t.record_axis_size(&["linear_value_head_dim"], "linear_attn.o_norm.weight", 0, 1)
}
