//! LFM3 (Liquid AI 2026; reference: `Lfm3ForCausalLM` of transformers): gated short convolutions in most layers, attention in the
//! others, some of them with a window and a rotary embedding of their own; a gate per head on the attention, norms in front
//! of and behind each part.

use crate::config::published::PublishedFields;
use crate::config::{ConfigFields, into_object};
use crate::definition::Architecture;
use crate::error::ConfigError;
use crate::evidence::{ConfigEvidence, EvidenceResult};
use crate::families::lfm2::ShortConv;
use crate::family::{FamilyVariant, ModelFamily};
use crate::layers::norm::{Norm, rms_norm};
use crate::layers::{
    ActivationFunction, AttentionVariant, LinearLayer, Rope, RopeConfig, RopeDefaults, RopeTables,
    SelfAttention, mlp,
};
use crate::transformer::{ModelBuilder, ModelSizes, OuterLayers, Transformer, with_prefix};
use mlcc_ir::dim::Dim;
use mlcc_ir::graph::ValueId;
use serde_json::json;

pub const FAMILY: ModelFamily = ModelFamily {
    variants: &[FamilyVariant {
        model_type: "lfm3",
        classes: &["Lfm3ForCausalLM"],
        about: "LFM3",
        read: |fields| Lfm3Config::from_fields(fields).map(Architecture::new),
        infer: infer_fields,
        fields: PublishedFields {
            read: "attention_bias conv_L_cache conv_bias head_dim hidden_size intermediate_size \
                        layer_types max_position_embeddings norm_eps num_attention_heads \
                        num_hidden_layers num_key_value_heads=4 rope_parameters sliding_window \
                        tie_word_embeddings use_attention_gate use_sandwich_norm vocab_size",
            ..PublishedFields::UNKNOWN
        },
    }],
    gguf: &[],
};

#[derive(Clone, Debug, PartialEq)]
pub struct Lfm3Config {
    pub sizes: ModelSizes,
    pub intermediate: usize,
    pub eps: f64,
    /// Of layers without a window, and with one.
    pub ropes: [Rope; 2],
    pub layers: Vec<TokenMixer>,
    pub conv: ShortConv,
    pub bias: bool,
    /// The attention is multiplied by the sigmoid of a gate per head.
    pub gated: bool,
    /// Norms also behind the parts of a layer.
    pub sandwich_norms: bool,
    pub tied: bool,
}

/// What a layer has before its feed-forward part.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TokenMixer {
    Convolution,
    Attention { window: Option<usize> },
}

impl Lfm3Config {
    pub fn from_fields(fields: &ConfigFields) -> Result<Lfm3Config, ConfigError> {
        let mut sizes = ModelSizes::read_sized(fields, Some(128_000), Some(128))?;
        let defaults = [1e6, 1e4].map(|theta| RopeDefaults { theta, share: 1.0, ..RopeDefaults::LLAMA });
        let ropes =
            RopeConfig::read_kinds(&rope_parameters(fields)?, sizes.head_size, sizes.context, defaults)?;
        sizes.context = ropes[0].context;
        Ok(Lfm3Config {
            intermediate: fields.size("intermediate_size")?,
            eps: fields.epsilon(&["norm_eps", "rms_norm_eps"], 1e-5)?,
            ropes: ropes.map(|rope| rope.rope),
            layers: read_layers(fields, sizes.layers)?,
            conv: ShortConv::read(fields, 7)?,
            bias: fields.flag_or("attention_bias", false)?,
            gated: fields.flag_or("use_attention_gate", true)?,
            sandwich_norms: fields.flag_or("use_sandwich_norm", true)?,
            tied: fields.flag_or("tie_word_embeddings", true)?,
            sizes,
        })
    }

    fn attention(
        &self,
        net: &mut ModelBuilder,
        layer: usize,
        name: &str,
        x: ValueId,
        part: SelfAttention,
    ) -> ValueId {
        let sizes = &self.sizes;
        let project = |net: &mut ModelBuilder, which: &str, x, out, bias| {
            LinearLayer::new(&format!("{name}.{which}"), out).bias(bias).apply(net, x)
        };
        let q = project(net, "q_proj", x, sizes.query_width(), self.bias);
        let k = project(net, "k_proj", x, sizes.key_width(), self.bias);
        let v = project(net, "v_proj", x, sizes.key_width(), self.bias);
        let part = SelfAttention { head_norm: Some((rms_norm, self.eps)), ..part };
        let mut h = part.attend(net, layer, sizes, [q, k, v]);
        if self.gated {
            let gate = project(net, "gate_proj", x, sizes.heads, false);
            let (n, open) = (net.n(), net.sigmoid(gate));
            let open = net.reshape(open, [n.clone(), Dim::from(sizes.heads), Dim::from(1)]);
            let heads = net.split_heads(h, sizes.heads);
            let heads = net.mul(heads, open);
            h = net.reshape(heads, [n, Dim::from(sizes.query_width())]);
        }
        project(net, "o_proj", h, sizes.hidden, self.bias)
    }

    /// The norm behind a part.
    fn apply_sandwich_norm(&self, net: &mut ModelBuilder, x: ValueId, name: &str) -> ValueId {
        if self.sandwich_norms { rms_norm(net, x, name, self.eps) } else { x }
    }
}

/// By kind of layer, with what the file leaves out.
fn rope_parameters(fields: &ConfigFields) -> Result<ConfigFields, ConfigError> {
    let defaults = into_object(json!({
        "full_attention": {"rope_type": "proportional", "rope_theta": 1e6, "partial_rotary_factor": 0.5},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    }));
    let mut parameters = match fields.nested_object("rope_parameters")? {
        Some(parameters) => parameters,
        None => ConfigFields { origin: fields.origin.clone(), raw: defaults.clone() },
    };
    for (kind, default) in defaults {
        if parameters.get(&kind).is_none() {
            parameters.raw.insert(kind, default);
        }
    }
    Ok(parameters)
}

fn read_layers(fields: &ConfigFields, count: usize) -> Result<Vec<TokenMixer>, ConfigError> {
    let window = match fields.get("sliding_window") {
        None => 256,
        Some(_) => fields.size("sliding_window")?,
    };
    let of = |kind: usize| match kind {
        0 => TokenMixer::Convolution,
        1 => TokenMixer::Attention { window: None },
        _ => TokenMixer::Attention { window: Some(window) },
    };
    if fields.get("layer_types").is_none() {
        let usual = |layer: usize| match layer % 4 {
            2 => 1,
            0 if layer > 0 => 2,
            _ => 0,
        };
        return Ok((0..count).map(|layer| of(usual(layer))).collect());
    }
    let kinds = ["conv", "full_attention", "sliding_attention"];
    Ok(fields.layer_kinds("layer_types", count, &kinds)?.into_iter().map(of).collect())
}

impl Transformer for Lfm3Config {
    type Shared = [RopeTables; 2];

    fn sizes(&self) -> &ModelSizes {
        &self.sizes
    }

    fn outer_layers(&self) -> OuterLayers {
        let norm = (Norm::Rms(self.eps), "model.embedding_norm");
        OuterLayers::with_names("model.embed_tokens.weight", norm, "lm_head.weight", self.tied)
    }

    fn prepare_shared(&self, net: &mut ModelBuilder) -> [RopeTables; 2] {
        self.ropes[0].tables_with_local(net, &self.ropes[1])
    }

    fn add_layer(
        &self,
        net: &mut ModelBuilder,
        layer: usize,
        x: ValueId,
        [rope, local]: &[RopeTables; 2],
    ) -> ValueId {
        let name = format!("model.layers.{layer}");
        let h = rms_norm(net, x, &format!("{name}.operator_norm"), self.eps);
        let h = match self.layers[layer] {
            TokenMixer::Convolution => self.conv.apply(net, layer, &format!("{name}.conv"), h),
            TokenMixer::Attention { window } => {
                let name = format!("{name}.self_attn");
                let attention = AttentionVariant { window, ..AttentionVariant::causal(self.sizes.head_size) };
                let part = SelfAttention::new(&name, if window.is_some() { local } else { rope }, attention);
                self.attention(net, layer, &name, h, part)
            }
        };
        let h = self.apply_sandwich_norm(net, h, &format!("{name}.post_operator_norm"));
        let x = net.add_residual(layer, "attention", x, h);
        let h = rms_norm(net, x, &format!("{name}.ffn_norm"), self.eps);
        let names = ["w1", "w3", "w2"].map(|part| format!("{name}.feed_forward.{part}"));
        let [gate, up, down] = names.each_ref().map(|name| LinearLayer::new(name, self.intermediate));
        let down = down.with_out(self.sizes.hidden);
        let h = mlp::gated(net, h, [gate, up, down], ActivationFunction::Silu);
        let h = self.apply_sandwich_norm(net, h, &format!("{name}.post_ffn_norm"));
        net.add_residual(layer, "mlp", x, h)
    }

    /// The class of transformers calls the gate `g_proj`.
    fn canonical_name(&self, stored_name: &str) -> String {
        let name = stored_name.replace(".self_attn.g_proj.", ".self_attn.gate_proj.");
        with_prefix(&name, "model.", &["embed_tokens.", "layers.", "embedding_norm."])
    }
}

fn infer_fields(t: &mut ConfigEvidence) -> EvidenceResult {
    t.record_bias("attention_bias", "self_attn.q_proj")?;
    t.record_embedding("embed_tokens.weight", "lm_head.weight", true)?;
    t.record_hybrid_heads("self_attn.q_norm.weight")?;
    t.record_axis_size(&["intermediate_size"], "layers.0.feed_forward.w1.weight", 0, 1)
}
