//! Gemma 1, 2 and 3, text only (Gemma Team 2024, 2025; reference: `GemmaForCausalLM`, `Gemma2ForCausalLM`,
//! `Gemma3ForCausalLM` of transformers): norms whose weights are stored less one, scaled embeddings. From Gemma 2 on a layer
//! has four norms, and most layers have windows. Gemma 2 bounds scores and logits by tanh; Gemma 3 has norms on the heads and
//! two rotary bases.

use crate::checkpoint::gguf::TensorConversion::PlusOne;
use crate::checkpoint::gguf::{ConfigFieldWriter, FieldResult, GEMMA_TOP, GgufArchitecture, TensorNameMap};
use crate::config::ConfigFields;
use crate::config::published::{GGUF_DENSE, PublishedFields};
use crate::definition::Architecture;
use crate::error::ConfigError;
use crate::evidence::{ConfigEvidence, EvidenceResult};
use crate::family::{FamilyVariant, ModelFamily};
use crate::layers::norm::{Norm, rms_norm_plus_one};
use crate::layers::{
    ActivationFunction, AttentionVariant, Rope, RopeConfig, RopeDefaults, RopeTables, SelfAttention, mlp,
};
use crate::pooling_head::{PoolingHead, PoolingMode};
use crate::transformer::{ModelBuilder, ModelSizes, OuterLayers, Transformer};
use mlcc_ir::graph::ValueId;
use serde_json::Value;

pub const FAMILY: ModelFamily = ModelFamily {
    variants: &[
        FamilyVariant {
            model_type: "gemma",
            classes: &["GemmaForCausalLM"],
            about: "Gemma 1",
            read: |fields| GemmaConfig::gemma1(fields).map(Architecture::new),
            infer: |t| infer_fields(t, 0),
            fields: PublishedFields {
                read: "attention_bias head_dim=256 hidden_act hidden_size intermediate_size \
                        max_position_embeddings num_attention_heads num_hidden_layers \
                        num_key_value_heads=16 rms_norm_eps rope_parameters tie_word_embeddings \
                        vocab_size",
                only: "use_bidirectional_attention=false",
                ..PublishedFields::UNKNOWN
            },
        },
        FamilyVariant {
            model_type: "gemma2",
            classes: &["Gemma2ForCausalLM"],
            about: "Gemma 2",
            read: |fields| GemmaConfig::gemma2(fields).map(Architecture::new),
            infer: |t| infer_fields(t, 0),
            fields: PublishedFields {
                read: "attention_bias attn_logit_softcapping=50.0 final_logit_softcapping=30.0 \
                        head_dim=256 hidden_activation hidden_size intermediate_size layer_types \
                        max_position_embeddings num_attention_heads num_hidden_layers \
                        num_key_value_heads=4 query_pre_attn_scalar=256 rms_norm_eps rope_parameters \
                        sliding_window=4096 tie_word_embeddings vocab_size",
                only: "use_bidirectional_attention=false",
                ..PublishedFields::UNKNOWN
            },
        },
        FamilyVariant {
            model_type: "gemma3_text",
            classes: &["Gemma3ForCausalLM"],
            about: "Gemma 3",
            read: |fields| GemmaConfig::gemma3(fields).map(Architecture::new),
            infer: |t| infer_fields(t, 0),
            fields: PublishedFields {
                read: "attention_bias attn_logit_softcapping final_logit_softcapping head_dim=256 \
                        hidden_activation hidden_size intermediate_size layer_types \
                        max_position_embeddings num_attention_heads=8 num_hidden_layers \
                        num_key_value_heads=4 query_pre_attn_scalar=256 rms_norm_eps rope_parameters \
                        sliding_window=4096 tie_word_embeddings use_bidirectional_attention \
                        vocab_size=262208",
                ..PublishedFields::UNKNOWN
            },
        },
        FamilyVariant {
            model_type: "gemma3",
            classes: &["Gemma3ForConditionalGeneration"],
            about: "Gemma 3, text only",
            read: |fields| GemmaConfig::gemma3(fields).map(Architecture::new),
            infer: |t| infer_fields(t, 0),
            fields: PublishedFields {
                read: "tie_word_embeddings",
                none: "boi_token_index eoi_token_index image_token_index mm_tokens_per_image",
                ..PublishedFields::UNKNOWN
            },
        },
    ],
    gguf: &[
        GgufArchitecture {
            name: "gemma",
            model_type: "gemma",
            write_fields: |w| {
                w.set_field("hidden_activation", "gelu_pytorch_tanh");
                Ok(())
            },
            tensor_names: |_| TensorNameMap {
                top: GEMMA_TOP,
                ..TensorNameMap::llama(&[
                    ("attn_norm", "input_layernorm", PlusOne),
                    ("ffn_norm", "post_attention_layernorm", PlusOne),
                ])
            },
            ..GgufArchitecture::LLAMA
        },
        GgufArchitecture {
            name: "gemma2",
            model_type: "gemma2",
            write_fields: |w| gguf_fields(w, Some(46)),
            tensor_names: |_| GGUF_NAMES,
            ..GgufArchitecture::LLAMA
        },
        GgufArchitecture {
            name: "gemma3",
            model_type: "gemma3_text",
            write_fields: |w| gguf_gemma3_fields(w, Some(62)),
            tensor_names: |_| GGUF_NAMES,
            ..GgufArchitecture::LLAMA
        },
        GgufArchitecture {
            name: "gemma-embedding",
            model_type: "gemma3_text",
            write_fields: gguf_embedding_fields,
            tensor_names: |_| GGUF_NAMES,
            ..GgufArchitecture::LLAMA
        },
    ],
};

#[derive(Clone, Debug, PartialEq)]
pub struct GemmaConfig {
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
    /// Queries are divided by its square root.
    pub query_scalar: f64,
    pub attention_cap: Option<f64>,
    pub logit_cap: Option<f64>,
    pub head_norms: bool,
    /// Every token sees the whole text, or as much of it on each side as `windows` say (EmbeddingGemma).
    pub both_sides: bool,
    /// Norms after the parts of a layer, too.
    pub norms_behind: bool,
    pub tied: bool,
}

impl GemmaConfig {
    pub fn gemma1(fields: &ConfigFields) -> Result<GemmaConfig, ConfigError> {
        let sizes = ModelSizes::read(fields, Some(8192))?;
        let rope = RopeConfig::read(fields, sizes.head_size, sizes.context, RopeDefaults::LLAMA)?;
        let (windows, local_rope) = (vec![None; sizes.layers], rope.rope.clone());
        let config = GemmaConfig::read_common(fields, sizes, [rope.rope, local_rope], windows)?;
        // The first published files say `gelu` and mean the approximation; `hidden_activation` came to correct them.
        let activation =
            ActivationFunction::read(fields, &["hidden_activation"], ActivationFunction::GeluTanh)?;
        Ok(GemmaConfig { norms_behind: false, activation, ..config })
    }

    pub fn gemma2(fields: &ConfigFields) -> Result<GemmaConfig, ConfigError> {
        let sizes = ModelSizes::read(fields, Some(8192))?;
        let rope = RopeConfig::read(fields, sizes.head_size, sizes.context, RopeDefaults::LLAMA)?;
        let windows = fields.layer_windows(sizes.layers, |layer| layer.is_multiple_of(2))?;
        let local_rope = rope.rope.clone();
        let config = GemmaConfig::read_common(fields, sizes, [rope.rope, local_rope], windows)?;
        Ok(GemmaConfig {
            attention_cap: read_softcap(fields, "attn_logit_softcapping")?,
            logit_cap: read_softcap(fields, "final_logit_softcapping")?,
            ..config
        })
    }

    pub fn gemma3(fields: &ConfigFields) -> Result<GemmaConfig, ConfigError> {
        let sizes = ModelSizes::read(fields, Some(131_072))?;
        let pattern = fields.first_present(&["sliding_window_pattern", "_sliding_window_pattern"]);
        let pattern = fields.size_or(pattern, 6)?;
        let mut windows = fields.layer_windows(sizes.layers, |layer| !(layer + 1).is_multiple_of(pattern))?;
        let both_sides = fields.flag_or("use_bidirectional_attention", false)?;
        if both_sides {
            // The width counts both sides together.
            windows.iter_mut().flatten().for_each(|width| *width /= 2);
        }
        let ropes = gemma3_ropes(fields, &sizes)?;
        let config = GemmaConfig::read_common(fields, sizes, ropes, windows)?;
        if let Some(found) = fields.get("attn_logit_softcapping") {
            // The reference has the field and does not bound by it.
            return Err(fields.invalid_value(
                "attn_logit_softcapping",
                "null: scores have no bound here",
                found,
            ));
        }
        let logit_cap = read_softcap(fields, "final_logit_softcapping")?;
        Ok(GemmaConfig { head_norms: true, both_sides, logit_cap, ..config })
    }

    fn read_common(
        fields: &ConfigFields,
        sizes: ModelSizes,
        [rope, local_rope]: [Rope; 2],
        windows: Vec<Option<usize>>,
    ) -> Result<GemmaConfig, ConfigError> {
        let query_scalar = fields.float_or("query_pre_attn_scalar", sizes.head_size as f64)?;
        if !(query_scalar > 0.0 && query_scalar.is_finite()) {
            let found = Value::from(query_scalar);
            return Err(fields.invalid_value("query_pre_attn_scalar", "a positive number", &found));
        }
        let act = ["hidden_activation", "hidden_act"];
        Ok(GemmaConfig {
            intermediate: fields.size("intermediate_size")?,
            eps: fields.epsilon(&["rms_norm_eps"], 1e-6)?,
            activation: ActivationFunction::read(fields, &act, ActivationFunction::GeluTanh)?,
            rope,
            local_rope,
            windows,
            bias: fields.flag_or("attention_bias", false)?,
            query_scalar,
            attention_cap: None,
            logit_cap: None,
            head_norms: false,
            both_sides: false,
            norms_behind: true,
            tied: fields.flag_or("tie_word_embeddings", true)?,
            sizes,
        })
    }
}

/// Rotary embedding of layers without and with a window.
fn gemma3_ropes(fields: &ConfigFields, sizes: &ModelSizes) -> Result<[Rope; 2], ConfigError> {
    let defaults = |theta| RopeDefaults { theta, ..RopeDefaults::LLAMA };
    let (global, local) = (defaults(1e6), defaults(1e4));
    let read = |fields: &ConfigFields, defaults| {
        RopeConfig::read(fields, sizes.head_size, sizes.context, defaults).map(|config| config.rope)
    };
    // Newer files have one object for each kind of layer.
    if let Some(parameters) = fields.nested_object("rope_parameters")? {
        let kinds = RopeConfig::read_kinds(&parameters, sizes.head_size, sizes.context, [global, local])?;
        return Ok(kinds.map(|kind| kind.rope));
    }
    let theta = fields.float_or("rope_local_base_freq", local.theta)?;
    let raw = [("rope_theta".to_string(), Value::from(theta))].into_iter().collect();
    let local = read(&ConfigFields { origin: fields.origin.clone(), raw }, local)?;
    Ok([read(fields, global)?, local])
}

/// A bound by tanh; absent or null: none.
fn read_softcap(fields: &ConfigFields, field: &str) -> Result<Option<f64>, ConfigError> {
    let Some(found) = fields.get(field) else { return Ok(None) };
    match fields.float_or(field, 0.0)? {
        cap if cap > 0.0 && cap.is_finite() => Ok(Some(cap)),
        _ => Err(fields.invalid_value(field, "a positive number or null", found)),
    }
}

impl Transformer for GemmaConfig {
    type Shared = [RopeTables; 2];

    fn sizes(&self) -> &ModelSizes {
        &self.sizes
    }

    fn outer_layers(&self) -> OuterLayers {
        OuterLayers {
            embedding_scale: Some((self.sizes.hidden as f64).sqrt()),
            logit_cap: self.logit_cap,
            ..OuterLayers::hugging_face(Norm::RmsPlusOne(self.eps), self.tied)
        }
    }

    fn prepare_shared(&self, net: &mut ModelBuilder) -> [RopeTables; 2] {
        self.rope.tables_with_local(net, &self.local_rope)
    }

    fn add_layer(
        &self,
        net: &mut ModelBuilder,
        layer: usize,
        x: ValueId,
        [rope, local]: &[RopeTables; 2],
    ) -> ValueId {
        let name = format!("model.layers.{layer}");
        let norm = |net: &mut ModelBuilder, x, norm: &str| {
            rms_norm_plus_one(net, x, &format!("{name}.{norm}"), self.eps)
        };
        let window = self.windows[layer];
        let seen = match self.both_sides {
            true => AttentionVariant::sliding_bidirectional(self.sizes.head_size, window),
            false => AttentionVariant { window, ..AttentionVariant::causal(self.sizes.head_size) },
        };
        let scale = self.query_scalar.powf(-0.5);
        let attention = AttentionVariant { scale, softcap: self.attention_cap, ..seen };
        let rope = if window.is_some() { local } else { rope };
        let h = norm(net, x, "input_layernorm");
        let h = SelfAttention {
            qkv_bias: self.bias,
            output_bias: self.bias,
            head_norm: self.head_norms.then_some((rms_norm_plus_one, self.eps)),
            ..SelfAttention::new(&format!("{name}.self_attn"), rope, attention)
        }
        .apply(net, layer, &self.sizes, h);
        let behind =
            |net: &mut ModelBuilder, x, which: &str| if self.norms_behind { norm(net, x, which) } else { x };
        let h = behind(net, h, "post_attention_layernorm");
        let x = net.add_residual(layer, "attention", x, h);
        // Gemma 1 has the names of Llama.
        let before = if self.norms_behind { "pre_feedforward_layernorm" } else { "post_attention_layernorm" };
        let h = norm(net, x, before);
        let mlp = format!("{name}.mlp");
        let h = mlp::gated_by_name(net, h, &mlp, self.intermediate, false, self.activation);
        let h = behind(net, h, "post_feedforward_layernorm");
        net.add_residual(layer, "mlp", x, h)
    }

    fn default_pooling_head(&self) -> Option<PoolingHead> {
        self.both_sides.then(|| PoolingHead::embedding(PoolingMode::Mean))
    }

    fn supports_pooling(&self) -> bool {
        true
    }
}

/// `layer`: of which the heads are.
pub(super) fn infer_fields(t: &mut ConfigEvidence, layer: usize) -> EvidenceResult {
    t.record_embedding("embed_tokens.weight", "lm_head.weight", true)?;
    let attention = format!("layers.{layer}.self_attn");
    t.record_heads(&attention, Some(&format!("{attention}.q_norm.weight")))?;
    t.record_axis_size(&["intermediate_size"], "layers.0.mlp.gate_proj.weight", 0, 1)?;
    t.record_bias("attention_bias", "layers.0.self_attn.q_proj")
}

/// Of the versions after the first.
const GGUF_NAMES: TensorNameMap = TensorNameMap {
    top: GEMMA_TOP,
    ..TensorNameMap::llama(&[
        ("attn_norm", "input_layernorm", PlusOne),
        ("post_attention_norm", "post_attention_layernorm", PlusOne),
        ("ffn_norm", "pre_feedforward_layernorm", PlusOne),
        ("post_ffw_norm", "post_feedforward_layernorm", PlusOne),
        ("attn_q_norm", "self_attn.q_norm", PlusOne),
        ("attn_k_norm", "self_attn.k_norm", PlusOne),
    ])
};

/// `layers_of_27b`: those of the published 27B model, which scales queries differently.
fn gguf_fields(w: &mut ConfigFieldWriter<'_>, layers_of_27b: Option<u64>) -> FieldResult {
    w.set_field("hidden_activation", "gelu_pytorch_tanh");
    w.copy_number("attention.sliding_window", "sliding_window")?;
    w.copy_float("attn_logit_softcapping", "attn_logit_softcapping")?;
    w.copy_float("final_logit_softcapping", "final_logit_softcapping")?;
    // Files without it: llama.cpp knows it by the number of layers.
    let layers = w.required_number("block_count")?;
    match w.float("attention.scale")? {
        Some(scale) if scale > 0.0 => w.set_field("query_pre_attn_scalar", scale.powi(-2)),
        _ if layers_of_27b == Some(layers) => {
            let share = w.quotient("embedding_length", "attention.head_count")?;
            w.set_field("query_pre_attn_scalar", share);
        }
        _ => w.set_field("query_pre_attn_scalar", w.head_size()?),
    }
    Ok(())
}

fn gguf_gemma3_fields(w: &mut ConfigFieldWriter<'_>, layers_of_27b: Option<u64>) -> FieldResult {
    gguf_fields(w, layers_of_27b)?;
    let local = w.float("rope.freq_base_swa")?.unwrap_or(10_000.0);
    w.set_field("rope_local_base_freq", local);
    w.set_field("sliding_window_pattern", w.number("attention.sliding_window_pattern")?.unwrap_or(6));
    Ok(())
}

/// EmbeddingGemma: Gemma 3 that sees both sides, and dense layers without bias and activation.
fn gguf_embedding_fields(w: &mut ConfigFieldWriter<'_>) -> FieldResult {
    w.set_field("use_bidirectional_attention", true);
    let widths: Vec<_> =
        ["dense_2.weight", "dense_3.weight"].iter().map_while(|name| w.tensor_rows(name)).collect();
    if !widths.is_empty() {
        w.set_field(GGUF_DENSE, widths);
    }
    gguf_gemma3_fields(w, None)
}
