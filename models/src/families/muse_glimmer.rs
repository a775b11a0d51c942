//! Muse Glimmer, its text model (Meta 2026; reference: `MuseGlimmerForConditionalGeneration` of transformers): normed embeddings,
//! queries and keys normed without weights, an output gate, four norms by layer that store their weight less one; layers with
//! a window have rotary embedding, the others no positions; logits scaled and bounded.

use crate::config::ConfigFields;
use crate::config::published::PublishedFields;
use crate::definition::Architecture;
use crate::error::ConfigError;
use crate::evidence::{ConfigEvidence, EvidenceResult};
use crate::family::{FamilyVariant, ModelFamily};
use crate::layers::attention::integer_constant;
use crate::layers::norm::{Norm, rms_norm_plus_one, rms_norm_unweighted};
use crate::layers::{
    ActivationFunction, AttentionVariant, LinearLayer, Rope, RopeConfig, RopeDefaults, RopeTables,
    SelfAttention, mlp,
};
use crate::transformer::{ModelBuilder, ModelSizes, OuterLayers, Transformer, widest_window};
use mlcc_ir::graph::ValueId;
use mlcc_ir::module::ParamRole;
use serde_json::Value;

pub const FAMILY: ModelFamily = ModelFamily {
    variants: &[
        FamilyVariant {
            model_type: "muse_glimmer",
            classes: &["MuseGlimmerForConditionalGeneration"],
            about: "Muse Glimmer, text only",
            read: |fields| MuseGlimmerConfig::from_fields(fields).map(Architecture::new),
            infer: infer_fields,
            fields: PublishedFields {
                none: "image_token_id out_hidden_size projector_hidden_act projector_hidden_size \
                        video_token_id",
                ..PublishedFields::UNKNOWN
            },
        },
        FamilyVariant {
            model_type: "muse_glimmer_text",
            classes: &[],
            about: "Muse Glimmer",
            read: |fields| MuseGlimmerConfig::from_fields(fields).map(Architecture::new),
            infer: infer_fields,
            fields: PublishedFields {
                read: "attention_bias final_logit_softcapping head_dim=128 hidden_activation \
                        hidden_size intermediate_size layer_rope_theta layer_types \
                        max_position_embeddings num_attention_heads num_hidden_layers \
                        num_key_value_heads=2 output_multiplier=0.19611613513818404 post_norm_eps \
                        qk_scale_factor rms_norm_eps rope_parameters sliding_window=2048 \
                        tie_word_embeddings vocab_size",
                ..PublishedFields::UNKNOWN
            },
        },
    ],
    gguf: &[],
};

#[derive(Clone, Debug, PartialEq)]
pub struct MuseGlimmerConfig {
    pub sizes: ModelSizes,
    pub intermediate: usize,
    pub eps: f64,
    /// Epsilon of the norms behind the parts of a layer.
    pub post_eps: f64,
    pub activation: ActivationFunction,
    pub rope: Rope,
    pub windows: Vec<Option<usize>>,
    /// By layer: it has rotary embedding.
    pub use_rope: Vec<bool>,
    pub bias: bool,
    /// Factor of the queries after their norm.
    pub query_factor: f64,
    /// Factor of the logits.
    pub output_factor: f64,
    pub logit_cap: Option<f64>,
    pub tied: bool,
    /// Tokens in whose place an image comes; without one they have the embedding of token 0.
    pub placeholders: Vec<u32>,
}

impl MuseGlimmerConfig {
    pub fn from_fields(fields: &ConfigFields) -> Result<MuseGlimmerConfig, ConfigError> {
        let mut sizes = ModelSizes::read(fields, Some(131_072))?;
        let rope = RopeConfig::read(fields, sizes.head_size, sizes.context, RopeDefaults::LLAMA)?;
        sizes.context = rope.context;
        // Every fourth layer, counted from the last one.
        let is_local = |layer: usize| !(sizes.layers - 1 - layer).is_multiple_of(4);
        Ok(MuseGlimmerConfig {
            intermediate: fields.size("intermediate_size")?,
            eps: fields.epsilon(&["rms_norm_eps"], 1e-5)?,
            post_eps: fields.epsilon(&["post_norm_eps"], 1e-8)?,
            activation: ActivationFunction::read(
                fields,
                &["hidden_activation", "hidden_act"],
                ActivationFunction::Silu,
            )?,
            rope: rope.rope,
            windows: fields.layer_windows(sizes.layers, is_local)?,
            use_rope: layers_with_rope(fields, sizes.layers, is_local)?,
            bias: fields.flag_or("attention_bias", false)?,
            query_factor: fields.float_or("qk_scale_factor", 3.87)?,
            output_factor: fields.float_or("output_multiplier", (256.0 / sizes.hidden as f64).sqrt())?,
            logit_cap: read_softcap(fields)?,
            tied: fields.flag_or("tie_word_embeddings", false)?,
            placeholders: placeholder_token_ids(fields)?,
            sizes,
        })
    }

    fn attention(
        &self,
        net: &mut ModelBuilder,
        layer: usize,
        name: &str,
        x: ValueId,
        rope: &RopeTables,
    ) -> ValueId {
        let (sizes, size) = (&self.sizes, self.sizes.head_size);
        let project = |net: &mut ModelBuilder, which: &str, x, out, bias| {
            LinearLayer::new(&format!("{name}.{which}"), out).bias(bias).apply(net, x)
        };
        let q = project(net, "q_proj", x, sizes.query_width(), self.bias);
        let k = project(net, "k_proj", x, sizes.key_width(), self.bias);
        let v = project(net, "v_proj", x, sizes.key_width(), self.bias);
        let plain = AttentionVariant::causal(size);
        let attention =
            AttentionVariant { window: self.windows[layer], scale: plain.scale * self.query_factor, ..plain };
        let part = SelfAttention {
            head_norm: Some((unweighted_head_norm, self.eps)),
            rope: self.use_rope[layer].then_some(rope),
            ..SelfAttention::new(name, rope, attention)
        };
        let h = part.attend(net, layer, sizes, [q, k, v]);
        let gate = project(net, "gate_proj", x, sizes.query_width(), false);
        let open = net.sigmoid(gate);
        let h = net.mul(h, open);
        project(net, "o_proj", h, sizes.hidden, self.bias)
    }
}

/// A norm of heads without weights.
fn unweighted_head_norm(net: &mut ModelBuilder, x: ValueId, _: &str, eps: f64) -> ValueId {
    rms_norm_unweighted(net, x, eps)
}

/// Which layers have rotary embedding: those whose base is not 0.
fn layers_with_rope(
    fields: &ConfigFields,
    layers: usize,
    is_local: impl Fn(usize) -> bool,
) -> Result<Vec<bool>, ConfigError> {
    let field = "layer_rope_theta";
    let Some(found) = fields.get(field) else { return Ok((0..layers).map(is_local).collect()) };
    let bases = fields.numbers(field)?;
    match bases.len() == layers {
        true => Ok(bases.iter().map(|&base| base != 0.0).collect()),
        false => Err(fields.invalid_value(field, &format!("a list of {layers} numbers"), found)),
    }
}

/// `image_token_id` and `video_token_id`, which stand outside of the text model.
fn placeholder_token_ids(fields: &ConfigFields) -> Result<Vec<u32>, ConfigError> {
    let mut ids = [fields.token_ids("image_token_id")?, fields.token_ids("video_token_id")?].concat();
    ids.sort_unstable();
    ids.dedup();
    Ok(ids)
}

fn read_softcap(fields: &ConfigFields) -> Result<Option<f64>, ConfigError> {
    let field = "final_logit_softcapping";
    match fields.float_or(field, 20.0)? {
        cap if cap > 0.0 => Ok(Some(cap)),
        cap => Err(fields.invalid_value(field, "a number above 0", &Value::from(cap))),
    }
}

impl Transformer for MuseGlimmerConfig {
    type Shared = RopeTables;

    fn sizes(&self) -> &ModelSizes {
        &self.sizes
    }

    fn outer_layers(&self) -> OuterLayers {
        OuterLayers {
            logit_scale: Some(self.output_factor),
            logit_cap: self.logit_cap,
            ..OuterLayers::hugging_face(Norm::Rms(self.eps), self.tied)
        }
    }

    fn embed(&self, net: &mut ModelBuilder) -> ValueId {
        let ModelSizes { vocab, hidden, .. } = self.sizes;
        let mut tokens = net.tokens();
        for &placeholder in &self.placeholders {
            let (zero, placeholder) =
                (integer_constant(net, 0), integer_constant(net, i64::from(placeholder)));
            let not_after = net.select_ge(placeholder, tokens, zero, tokens);
            tokens = net.select_ge(tokens, placeholder, not_after, tokens);
        }
        let table = net.weight_param(self.outer_layers().embedding, ParamRole::Embedding, &[vocab, hidden]);
        let x = net.gather(table, tokens);
        rms_norm_unweighted(net, x, self.eps)
    }

    fn prepare_shared(&self, net: &mut ModelBuilder) -> RopeTables {
        self.rope.tables(net, "rope")
    }

    fn add_layer(&self, net: &mut ModelBuilder, layer: usize, x: ValueId, rope: &RopeTables) -> ValueId {
        let name = format!("model.layers.{layer}");
        let h = rms_norm_plus_one(net, x, &format!("{name}.input_layernorm"), self.eps);
        let h = self.attention(net, layer, &format!("{name}.self_attn"), h, rope);
        let h = rms_norm_plus_one(net, h, &format!("{name}.post_attention_layernorm"), self.post_eps);
        let x = net.add_residual(layer, "attention", x, h);
        let h = rms_norm_plus_one(net, x, &format!("{name}.pre_feedforward_layernorm"), self.eps);
        let (part, width) = (format!("{name}.mlp"), self.intermediate);
        let h = mlp::gated_by_name(net, h, &part, width, false, self.activation);
        let h = rms_norm_plus_one(net, h, &format!("{name}.post_feedforward_layernorm"), self.post_eps);
        net.add_residual(layer, "mlp", x, h)
    }

    fn window(&self) -> Option<usize> {
        widest_window(&self.windows)
    }
}

fn infer_fields(t: &mut ConfigEvidence) -> EvidenceResult {
    t.record_llama_block(None)?;
    t.record_bias("attention_bias", "layers.0.self_attn.q_proj")
}
