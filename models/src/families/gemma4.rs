//! Gemma 4, text only (Gemma Team 2026; reference: `Gemma4ForCausalLM` of transformers): layers with a window have small heads, the
//! others large ones. The small models add an embedding of their own to each layer, and their last layers read the caches
//! of earlier ones; the large ones may have experts beside the feed-forward part, and use keys as values in full layers.

mod attention;

use crate::checkpoint::gguf::TensorConversion::Same;
use crate::checkpoint::gguf::{ConfigFieldWriter, FieldResult, GgufArchitecture, TensorNameMap};
use crate::config::ConfigFields;
use crate::config::published::PublishedFields;
use crate::definition::Architecture;
use crate::error::{CheckpointError, ConfigError};
use crate::evidence::{ConfigEvidence, EvidenceResult};
use crate::families::gemma;
use crate::family::{FamilyVariant, ModelFamily};
use crate::layers::moe::{ExpertNames, ExpertStorage, MoeLayer};
use crate::layers::norm::{Norm, rms_norm, rms_norm_unweighted};
use crate::layers::{ActivationFunction, LinearLayer, Rope, RopeConfig, RopeDefaults, RopeTables, mlp};
use crate::transformer::{ModelBuilder, ModelSizes, OuterLayers, Transformer};
use attention::{LayerHeads, SharedTensors};
use mlcc_ir::dim::Dim;
use mlcc_ir::graph::ValueId;
use mlcc_ir::module::ParamRole;
use serde_json::{Value, json};
use std::cell::Cell;

pub const FAMILY: ModelFamily = ModelFamily {
    variants: &[
        FamilyVariant {
            model_type: "gemma4_text",
            classes: &["Gemma4ForCausalLM"],
            about: "Gemma 4",
            read: |fields| Gemma4Config::from_fields(fields).map(Architecture::new),
            infer: infer_fields,
            fields: PublishedFields {
                read: "attention_bias attention_k_eq_v enable_moe_block final_logit_softcapping \
                        head_dim=256 hidden_activation hidden_size hidden_size_per_layer_input=256 \
                        intermediate_size layer_types max_position_embeddings moe_intermediate_size \
                        num_attention_heads num_experts num_hidden_layers num_key_value_heads=4 \
                        num_kv_shared_layers per_layer_config rms_norm_eps \
                        rope_parameters={\"sliding_attention\":{\"rope_type\":\"default\",\"rope_theta\":10000.0},\"full_attention\":{\"rope_type\":\"proportional\",\"partial_rotary_factor\":0.25,\"rope_theta\":1000000.0}} \
                        sliding_window=512 tie_word_embeddings top_k_experts \
                        use_bidirectional_attention use_double_wide_mlp vocab_size \
                        vocab_size_per_layer_input=262144",
                ..PublishedFields::UNKNOWN
            },
        },
        FamilyVariant {
            model_type: "gemma4",
            classes: &["Gemma4ForConditionalGeneration"],
            about: "Gemma 4, text only",
            read: |fields| Gemma4Config::from_fields(fields).map(Architecture::new),
            infer: infer_fields,
            fields: PublishedFields {
                read: "tie_word_embeddings",
                none: "audio_config audio_token_id boa_token_id boi_token_id eoa_token_index \
                        eoi_token_id image_token_id video_token_id vision_config",
                ..PublishedFields::UNKNOWN
            },
        },
    ],
    gguf: &[GgufArchitecture {
        name: "gemma4",
        model_type: "gemma4_text",
        write_fields: gguf_fields,
        tensor_names: |_| GGUF_NAMES,
        uneven_layers: true,
        write_rope: Some(gguf_rope),
        ..GgufArchitecture::LLAMA
    }],
};

#[derive(Clone, Debug, PartialEq)]
pub struct Gemma4Config {
    /// Heads are those of layers with a window.
    pub sizes: ModelSizes,
    pub intermediate: usize,
    pub eps: f64,
    pub activation: ActivationFunction,
    /// Of layers without and with a window.
    ropes: [Rope; 2],
    /// Of layers without and with a window.
    heads: [LayerHeads; 2],
    pub windows: Vec<Option<usize>>,
    pub bias: bool,
    /// Layers from here on read the keys and values of the last layer before of their kind.
    pub first_shared: usize,
    /// The feed-forward parts of those layers are twice as wide.
    pub double_wide: bool,
    /// Width of the embeddings of each layer, and how many rows their table has.
    pub per_layer: Option<(usize, usize)>,
    pub experts: Option<MoeLayer>,
    pub logit_cap: Option<f64>,
    pub tied: bool,
}

impl Gemma4Config {
    pub fn from_fields(fields: &ConfigFields) -> Result<Gemma4Config, ConfigError> {
        if let Some(all) = fields.get("use_bidirectional_attention").filter(|v| v.as_str() == Some("all")) {
            return Err(fields.invalid_value(
                "use_bidirectional_attention",
                "null: attention is causal here",
                all,
            ));
        }
        let sizes = ModelSizes::read(fields, Some(131_072))?;
        let is_local = |layer: usize| !(layer + 1).is_multiple_of(6) && layer + 1 < sizes.layers;
        let windows = fields.layer_windows(sizes.layers, is_local)?;
        let heads = LayerHeads::read(fields, &sizes, &windows)?;
        let shared_layers = fields.count_or("num_kv_shared_layers", 0)?;
        let first_shared = sizes.layers.saturating_sub(shared_layers);
        let kinds = |layers: &[Option<usize>], full: bool| layers.iter().any(|w| w.is_none() == full);
        let (before, behind) = windows.split_at(first_shared);
        if [true, false].into_iter().any(|full| kinds(behind, full) && !kinds(before, full)) {
            let expected = "less: a layer needs one of its kind before it, whose keys and values it reads";
            return Err(fields.invalid_value("num_kv_shared_layers", expected, &Value::from(shared_layers)));
        }
        Ok(Gemma4Config {
            intermediate: fields.size("intermediate_size")?,
            eps: fields.epsilon(&["rms_norm_eps"], 1e-6)?,
            activation: ActivationFunction::read(
                fields,
                &["hidden_activation"],
                ActivationFunction::GeluTanh,
            )?,
            ropes: ropes(fields, sizes.context, heads)?,
            heads,
            windows,
            bias: fields.flag_or("attention_bias", false)?,
            first_shared,
            double_wide: fields.flag_or("use_double_wide_mlp", false)?,
            per_layer: read_per_layer_inputs(fields, &sizes)?,
            experts: read_experts(fields)?,
            logit_cap: fields.get("final_logit_softcapping").map(|_| read_softcap(fields)).transpose()?,
            tied: fields.flag_or("tie_word_embeddings", true)?,
            sizes,
        })
    }

    /// What each layer adds of its own: an embedding of the token and a projection of the first layer's input,
    /// `[n, layers, width]`.
    fn per_layer_inputs(&self, net: &mut ModelBuilder) -> Option<ValueId> {
        let ((width, rows), &ModelSizes { layers, hidden, .. }) = (self.per_layer?, &self.sizes);
        let split = |net: &mut ModelBuilder, x| {
            let n = net.n();
            net.reshape(x, [n, Dim::from(layers), Dim::from(width)])
        };
        let table = net.weight_param(
            "model.embed_tokens_per_layer.weight",
            ParamRole::Embedding,
            &[rows, layers * width],
        );
        let tokens = net.tokens();
        let own = net.gather(table, tokens);
        let own = net.scale(own, (width as f64).sqrt());
        let own = split(net, own);
        let x = self.embed(net);
        let projected = LinearLayer::new("model.per_layer_model_projection", layers * width).apply(net, x);
        let projected = net.scale(projected, (hidden as f64).powf(-0.5));
        let projected = split(net, projected);
        let projected = rms_norm(net, projected, "model.per_layer_projection_norm", self.eps);
        let sum = net.add(projected, own);
        Some(net.scale(sum, std::f64::consts::FRAC_1_SQRT_2))
    }

    /// The feed-forward part, with experts beside it where there are some. `h` is `x` after a norm.
    fn feed_forward(
        &self,
        net: &mut ModelBuilder,
        layer: usize,
        name: &str,
        [x, h]: [ValueId; 2],
    ) -> ValueId {
        let double = self.double_wide && layer >= self.first_shared;
        let width = if double { 2 * self.intermediate } else { self.intermediate };
        let h = mlp::gated_by_name(net, h, &format!("{name}.mlp"), width, false, self.activation);
        let Some(experts) = &self.experts else { return h };
        let norm =
            |net: &mut ModelBuilder, x, which: &str| rms_norm(net, x, &format!("{name}.{which}"), self.eps);
        let dense = norm(net, h, "post_feedforward_layernorm_1");
        let input = rms_norm_unweighted(net, x, self.eps);
        let scale = net.vector_param(&format!("{name}.router.scale"), self.sizes.hidden);
        let input = net.mul(input, scale);
        let input = net.scale(input, (self.sizes.hidden as f64).powf(-0.5));
        let h = norm(net, x, "pre_feedforward_layernorm_2");
        let (router, expert_scale) =
            (format!("{name}.router.proj"), format!("{name}.router.per_expert_scale"));
        let (gate_up, down) = (format!("{name}.experts.gate_up_proj"), format!("{name}.experts.down_proj"));
        let names = ExpertNames {
            router: &router,
            correction: None,
            expert_scale: Some(&expert_scale),
            storage: ExpertStorage::Packed { gate_up: &gate_up, down: &down },
        };
        let h = experts.apply_routed(net, input, h, &names);
        let h = norm(net, h, "post_feedforward_layernorm_2");
        net.add(dense, h)
    }

    /// Adds what the layer has of its own to its output `x`.
    fn add_per_layer_input(
        &self,
        net: &mut ModelBuilder,
        layer: usize,
        name: &str,
        x: ValueId,
        inputs: ValueId,
    ) -> ValueId {
        let width = net.width(inputs);
        let n = net.n();
        let own = net.slice(inputs, 1, Dim::from(layer), Dim::from(1));
        let own = net.reshape(own, [n, Dim::from(width)]);
        let gate = LinearLayer::new(&format!("{name}.per_layer_input_gate"), width).apply(net, x);
        let gate = self.activation.apply(net, gate);
        let h = net.mul(gate, own);
        let h = LinearLayer::new(&format!("{name}.per_layer_projection"), self.sizes.hidden).apply(net, h);
        let h = rms_norm(net, h, &format!("{name}.post_per_layer_input_norm"), self.eps);
        net.add(x, h)
    }
}

/// Rotary embedding of layers without and with a window; the first turns a quarter of the large heads, in pairs that
/// span them.
fn ropes(
    fields: &ConfigFields,
    context: usize,
    [full, sliding]: [LayerHeads; 2],
) -> Result<[Rope; 2], ConfigError> {
    let [full_defaults, sliding_defaults] =
        [1e6, 1e4].map(|theta| RopeDefaults { theta, ..RopeDefaults::LLAMA });
    let Some(parameters) = fields.nested_object("rope_parameters")? else {
        return Err(fields.missing_field("rope_parameters", "an object"));
    };
    let of = |kind, size, defaults| RopeConfig::read_kind(&parameters, kind, size, context, defaults);
    let full = of("full_attention", full.size, full_defaults)?;
    let sliding = of("sliding_attention", sliding.size, sliding_defaults)?;
    Ok([full.rope, sliding.rope])
}

fn read_per_layer_inputs(
    fields: &ConfigFields,
    sizes: &ModelSizes,
) -> Result<Option<(usize, usize)>, ConfigError> {
    let width = fields.count_or("hidden_size_per_layer_input", 0)?;
    if width == 0 {
        return Ok(None);
    }
    let field = "vocab_size_per_layer_input";
    match fields.size_or(field, sizes.vocab)? {
        rows if rows >= sizes.vocab => Ok(Some((width, rows))),
        rows => {
            let expected = format!("at least vocab_size, which is {}", sizes.vocab);
            Err(fields.invalid_value(field, &expected, &Value::from(rows)))
        }
    }
}

/// Softmax over all experts, the chosen ones normalised.
fn read_experts(fields: &ConfigFields) -> Result<Option<MoeLayer>, ConfigError> {
    if !fields.flag_or("enable_moe_block", false)? {
        return Ok(None);
    }
    let mut renamed = fields.clone();
    renamed.raw.insert("hidden_act".into(), "gelu_pytorch_tanh".into());
    for (here, elsewhere) in [("top_k_experts", "num_experts_per_tok"), ("hidden_activation", "hidden_act")] {
        if let Some(value) = fields.get(here) {
            renamed.raw.insert(elsewhere.to_string(), value.clone());
        }
    }
    let width = fields.size("moe_intermediate_size")?;
    MoeLayer::read(&renamed, &["num_experts"], width, true).map(Some)
}

fn read_softcap(fields: &ConfigFields) -> Result<f64, ConfigError> {
    let field = "final_logit_softcapping";
    match fields.float_or(field, 0.0)? {
        cap if cap > 0.0 && cap.is_finite() => Ok(cap),
        _ => Err(fields.invalid_value(field, "a positive number or null", &fields.raw[field])),
    }
}

impl Transformer for Gemma4Config {
    type Shared = SharedTensors;

    fn sizes(&self) -> &ModelSizes {
        &self.sizes
    }

    fn outer_layers(&self) -> OuterLayers {
        OuterLayers {
            embedding_scale: Some((self.sizes.hidden as f64).sqrt()),
            logit_cap: self.logit_cap,
            ..OuterLayers::hugging_face(Norm::Rms(self.eps), self.tied)
        }
    }

    fn prepare_shared(&self, net: &mut ModelBuilder) -> SharedTensors {
        let tables =
            |net: &mut ModelBuilder, rope: &Rope, name: &str| -> RopeTables { rope.tables(net, name) };
        let [full, sliding] = &self.ropes;
        let ropes = [tables(net, full, "rope"), tables(net, sliding, "rope.local")];
        SharedTensors { ropes, inputs: self.per_layer_inputs(net), rows: Cell::new([None; 2]) }
    }

    fn add_layer(&self, net: &mut ModelBuilder, layer: usize, x: ValueId, shared: &SharedTensors) -> ValueId {
        let name = format!("model.layers.{layer}");
        let norm =
            |net: &mut ModelBuilder, x, which: &str| rms_norm(net, x, &format!("{name}.{which}"), self.eps);
        let h = norm(net, x, "input_layernorm");
        let h = self.attention(net, layer, &format!("{name}.self_attn"), h, shared);
        let h = norm(net, h, "post_attention_layernorm");
        let x = net.add_residual(layer, "attention", x, h);
        let h = norm(net, x, "pre_feedforward_layernorm");
        let h = self.feed_forward(net, layer, &name, [x, h]);
        let h = norm(net, h, "post_feedforward_layernorm");
        let mut x = net.add_residual(layer, "mlp", x, h);
        if let Some(inputs) = shared.inputs {
            x = self.add_per_layer_input(net, layer, &name, x, inputs);
        }
        let scalar = net.vector_param(&format!("{name}.layer_scalar"), 1);
        net.mul(x, scalar)
    }

    fn has_experts(&self) -> bool {
        self.experts.is_some()
    }

    /// Files may hold keys and values of layers that read those of others.
    fn is_ignored(&self, name: &str) -> bool {
        let inside = name.strip_prefix("model.layers.").and_then(|rest| rest.split_once(".self_attn."));
        let unused = inside.is_some_and(|(layer, part)| {
            let layer: Option<usize> = layer.parse().ok();
            layer.is_some_and(|layer| layer >= self.first_shared)
                && (part.starts_with("k_") || part.starts_with("v_"))
        });
        unused || self.tied && name == self.outer_layers().head
    }
}

fn infer_fields(t: &mut ConfigEvidence) -> EvidenceResult {
    // Layers without a window have other heads.
    let types = t.fields.get("layer_types").and_then(Value::as_array);
    let windowed = types.and_then(|types| types.iter().position(|kind| kind == "sliding_attention"));
    gemma::infer_fields(t, windowed.unwrap_or(0))?;
    t.record_axis_size(&["moe_intermediate_size"], "experts.gate_up_proj", 1, 2)?;
    t.record_axis_size(&["num_experts"], "router.proj.weight", 0, 1)
}

const GGUF_NAMES: TensorNameMap = TensorNameMap {
    top: &[
        ("token_embd.weight", "model.embed_tokens.weight", Same),
        ("output_norm.weight", "model.norm.weight", Same),
        ("output.weight", "lm_head.weight", Same),
        ("per_layer_token_embd.weight", "model.embed_tokens_per_layer.weight", Same),
        ("per_layer_model_proj.weight", "model.per_layer_model_projection.weight", Same),
        ("per_layer_proj_norm.weight", "model.per_layer_projection_norm.weight", Same),
    ],
    ..TensorNameMap::llama(&[
        ("post_attention_norm", "post_attention_layernorm", Same),
        ("ffn_norm", "pre_feedforward_layernorm", Same),
        ("post_ffw_norm", "post_feedforward_layernorm", Same),
        ("pre_ffw_norm_2", "pre_feedforward_layernorm_2", Same),
        ("post_ffw_norm_1", "post_feedforward_layernorm_1", Same),
        ("post_ffw_norm_2", "post_feedforward_layernorm_2", Same),
        ("layer_output_scale.weight", "layer_scalar", Same),
        ("inp_gate", "per_layer_input_gate", Same),
        ("proj", "per_layer_projection", Same),
        ("post_norm", "post_per_layer_input_norm", Same),
        ("ffn_gate_inp.weight", "router.proj.weight", Same),
        ("ffn_gate_inp.scale", "router.scale", Same),
        ("ffn_down_exps.scale", "router.per_expert_scale", Same),
        ("ffn_gate_up_exps.weight", "experts.gate_up_proj", Same),
        ("ffn_down_exps.weight", "experts.down_proj", Same),
    ])
};

fn gguf_fields(w: &mut ConfigFieldWriter<'_>) -> FieldResult {
    w.set_field("hidden_activation", "gelu_pytorch_tanh");
    let windowed = w.metadata.bools(&w.metadata_key("attention.sliding_window_pattern"))?.to_vec();
    w.set_field("layer_types", w.layer_types()?);
    w.copy_number("attention.sliding_window", "sliding_window")?;
    w.copy_number("attention.key_length", "global_head_dim")?;
    w.copy_number("attention.key_length_swa", "head_dim")?;
    let [full, sliding] = split_by_window(w, "attention.head_count_kv", &windowed)?;
    if let Some(heads) = sliding.or(full) {
        w.set_field("num_key_value_heads", heads);
    }
    if let Some(heads) = full {
        w.set_field("num_global_key_value_heads", heads);
    }
    // Layers that read the caches of others may lack both.
    let lacks = |layer: usize| {
        w.has_tensor(&format!("blk.{layer}.attn_k.weight"))
            && !w.has_tensor(&format!("blk.{layer}.attn_v.weight"))
    };
    let keys_are_values = windowed.iter().enumerate().any(|(layer, windowed)| !windowed && lacks(layer));
    w.set_field("attention_k_eq_v", keys_are_values);
    let widths = match w.number("feed_forward_length") {
        Ok(width) => width.map(|width| width as i64).into_iter().collect(),
        Err(_) => w.metadata.integers(&w.metadata_key("feed_forward_length"))?,
    };
    if let (Some(first), Some(last)) = (widths.first().copied(), widths.last()) {
        w.set_field("intermediate_size", first);
        w.set_field("use_double_wide_mlp", first != *last);
    }
    w.copy_number("attention.shared_kv_layers", "num_kv_shared_layers")?;
    w.copy_number("embedding_length_per_layer_input", "hidden_size_per_layer_input")?;
    if let Some(rows) = w.tensor_rows("per_layer_token_embd.weight") {
        w.set_field("vocab_size_per_layer_input", rows);
    }
    w.copy_float("final_logit_softcapping", "final_logit_softcapping")?;
    w.set_field("enable_moe_block", w.has_in_any_layer("ffn_gate_inp.weight"));
    w.copy_number("expert_count", "num_experts")?;
    w.copy_number("expert_used_count", "top_k_experts")?;
    w.copy_number("expert_feed_forward_length", "moe_intermediate_size")
}

/// Numbers of a layer that differ between layers with and without a window: the first of each.
fn split_by_window(
    w: &ConfigFieldWriter<'_>,
    key: &str,
    windowed: &[bool],
) -> Result<[Option<i64>; 2], CheckpointError> {
    let numbers = match w.number(key) {
        Ok(Some(number)) => vec![number as i64; windowed.len()],
        Ok(None) => Vec::new(),
        Err(_) => w.metadata.integers(&w.metadata_key(key))?,
    };
    let of = |kind: bool| {
        let mut both = numbers.iter().zip(windowed);
        both.find(|(number, windowed)| **windowed == kind && **number > 0).map(|(number, _)| *number)
    };
    Ok([of(false), of(true)])
}

/// Pairs of full layers that stand still have a factor that is next to endless.
fn gguf_rope(w: &mut ConfigFieldWriter<'_>) -> FieldResult {
    let factors = w.rope_factors("rope_freqs.weight").unwrap_or_default();
    let turned = factors.iter().filter(|factor| **factor == 1.0).count();
    let share = if factors.is_empty() { 0.25 } else { turned as f64 / factors.len() as f64 };
    let full = json!({
        "rope_type": "proportional",
        "partial_rotary_factor": share,
        "rope_theta": w.float("rope.freq_base")?.unwrap_or(1e6),
    });
    let sliding =
        json!({ "rope_type": "default", "rope_theta": w.float("rope.freq_base_swa")?.unwrap_or(1e4) });
    w.raw.remove("rope_theta");
    w.set_field("rope_parameters", json!({ "full_attention": full, "sliding_attention": sliding }));
    Ok(())
}
