//! LFM2 (Liquid AI 2025; reference: `Lfm2ForCausalLM` and `Lfm2MoeForCausalLM` of transformers): gated short convolutions in most
//! layers, attention with norms on the heads in the others; in the larger models experts in all but the first layers.

use crate::checkpoint::gguf::TensorConversion::{Experts, Same};
use crate::checkpoint::gguf::{ConfigFieldWriter, FieldResult, GgufArchitecture, TensorNameMap};
use crate::config::ConfigFields;
use crate::config::published::PublishedFields;
use crate::definition::Architecture;
use crate::error::ConfigError;
use crate::evidence::{ConfigEvidence, EvidenceResult};
use crate::family::{FamilyVariant, ModelFamily};
use crate::layers::conv::CausalConv;
use crate::layers::moe::{
    ExpertNames, ExpertRouter, ExpertStorage, FUSED_EXPERTS, Glu, MoeLayer, RouterScoring,
};
use crate::layers::norm::{Norm, rms_norm};
use crate::layers::{
    ActivationFunction, AttentionVariant, LinearLayer, Rope, RopeConfig, RopeDefaults, RopeTables,
    SelfAttention, mlp,
};
use crate::transformer::{ModelBuilder, ModelSizes, OuterLayers, Transformer, with_prefix};
use mlcc_ir::dim::Dim;
use mlcc_ir::graph::ValueId;
use serde_json::Value;

pub const FAMILY: ModelFamily = ModelFamily {
    variants: &[
        FamilyVariant {
            model_type: "lfm2",
            classes: &["Lfm2ForCausalLM"],
            about: "LFM2",
            read: |fields| Lfm2Config::dense(fields).map(Architecture::new),
            infer: infer_fields,
            fields: PublishedFields {
                read: "block_auto_adjust_ff_dim block_ffn_dim_multiplier block_multiple_of \
                        conv_L_cache conv_bias full_attn_idxs hidden_size intermediate_size \
                        layer_types max_position_embeddings norm_eps num_attention_heads \
                        num_hidden_layers num_key_value_heads=8 rope_parameters tie_word_embeddings \
                        vocab_size",
                ..PublishedFields::UNKNOWN
            },
        },
        FamilyVariant {
            model_type: "lfm2_moe",
            classes: &["Lfm2MoeForCausalLM"],
            about: "LFM2 with experts",
            read: |fields| Lfm2Config::moe(fields).map(Architecture::new),
            infer: infer_fields,
            fields: PublishedFields {
                read: "conv_L_cache conv_bias hidden_size intermediate_size layer_types \
                        max_position_embeddings moe_intermediate_size norm_eps norm_topk_prob \
                        num_attention_heads num_dense_layers num_experts num_experts_per_tok \
                        num_hidden_layers num_key_value_heads=8 rope_parameters \
                        routed_scaling_factor tie_word_embeddings use_expert_bias vocab_size",
                ..PublishedFields::UNKNOWN
            },
        },
    ],
    gguf: &[
        GgufArchitecture {
            name: "lfm2",
            model_type: "lfm2",
            write_fields: gguf_fields,
            tensor_names: |_| GGUF_NAMES,
            ..GgufArchitecture::LLAMA
        },
        GgufArchitecture {
            name: "lfm2moe",
            model_type: "lfm2_moe",
            write_fields: |w| {
                gguf_fields(w)?;
                w.copy_experts(["num_experts", "moe_intermediate_size"])?;
                w.copy_number("leading_dense_block_count", "num_dense_layers")
            },
            tensor_names: |_| GGUF_NAMES,
            ..GgufArchitecture::LLAMA
        },
    ],
};

#[derive(Clone, Debug, PartialEq)]
pub struct Lfm2Config {
    pub sizes: ModelSizes,
    pub intermediate: usize,
    pub eps: f64,
    pub rope: Rope,
    /// By layer: attention in place of a convolution.
    pub attends: Vec<bool>,
    pub conv: ShortConv,
    pub experts: Option<MoeLayer>,
    /// The first layers have no experts.
    pub dense_layers: usize,
    /// The choice of experts is corrected by a learned bias.
    pub has_score_correction: bool,
    pub tied: bool,
}

impl Lfm2Config {
    pub fn dense(fields: &ConfigFields) -> Result<Lfm2Config, ConfigError> {
        let config = Lfm2Config::read_common(fields)?;
        Ok(Lfm2Config {
            intermediate: intermediate(fields)?,
            attends: attention_layers(fields, config.sizes.layers)?,
            ..config
        })
    }

    pub fn moe(fields: &ConfigFields) -> Result<Lfm2Config, ConfigError> {
        let config = Lfm2Config::read_common(fields)?;
        let routing = ExpertRouter {
            scoring: RouterScoring::Sigmoid,
            normalised: fields.flag_or("norm_topk_prob", true)?,
            sum_epsilon: 1e-6,
            scale: fields.float_or("routed_scaling_factor", 1.0)?,
            ..ExpertRouter::read(fields, &["num_experts"])?
        };
        let (intermediate, glu) =
            (fields.size("moe_intermediate_size")?, Glu::Plain(ActivationFunction::Silu));
        let fused = fields.flag_or(FUSED_EXPERTS, false)?;
        Ok(Lfm2Config {
            experts: Some(MoeLayer { routing, intermediate, glu, fused }),
            dense_layers: fields.count_or("num_dense_layers", 2)?,
            has_score_correction: fields.flag_or("use_expert_bias", true)?,
            intermediate: fields.size("intermediate_size")?,
            attends: attention_layers_by_type(fields, config.sizes.layers)?,
            ..config
        })
    }

    fn read_common(fields: &ConfigFields) -> Result<Lfm2Config, ConfigError> {
        let mut sizes = ModelSizes::read_equal_heads(fields, Some(128_000))?;
        let theta = match fields.get("theta") {
            Some(_) => fields.float_or("theta", 1e6)?,
            None => 1e6,
        };
        let defaults = RopeDefaults { theta, ..RopeDefaults::LLAMA };
        let rope = RopeConfig::read(fields, sizes.head_size, sizes.context, defaults)?;
        sizes.context = rope.context;
        Ok(Lfm2Config {
            intermediate: 0,
            eps: fields.epsilon(&["norm_eps", "block_norm_eps"], 1e-5)?,
            rope: rope.rope,
            attends: Vec::new(),
            conv: ShortConv::read(fields, 3)?,
            experts: None,
            dense_layers: 0,
            has_score_correction: false,
            tied: fields.flag_or(fields.first_present(&["tie_word_embeddings", "tie_embedding"]), true)?,
            sizes,
        })
    }

    fn feed_forward(&self, net: &mut ModelBuilder, layer: usize, name: &str, x: ValueId) -> ValueId {
        let parts = ["w1", "w3", "w2"];
        match &self.experts {
            Some(experts) if layer >= self.dense_layers => {
                let (router, inside, correction) =
                    (format!("{name}.gate"), format!("{name}.experts"), format!("{name}.expert_bias"));
                let stored = ExpertStorage::Single { experts: &inside, parts };
                let correction = self.has_score_correction.then_some(correction.as_str());
                experts.apply(
                    net,
                    x,
                    &ExpertNames { router: &router, correction, expert_scale: None, storage: stored },
                )
            }
            _ => {
                let names = parts.map(|part| format!("{name}.{part}"));
                let [gate, up, down] = names.each_ref().map(|name| LinearLayer::new(name, self.intermediate));
                let down = down.with_out(self.sizes.hidden);
                mlp::gated(net, x, [gate, up, down], ActivationFunction::Silu)
            }
        }
    }
}

/// The gated short convolution of a layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ShortConv {
    pub taps: usize,
    pub bias: bool,
}

impl ShortConv {
    pub fn read(fields: &ConfigFields, usual_taps: usize) -> Result<ShortConv, ConfigError> {
        let taps = fields.size_or("conv_L_cache", usual_taps)?;
        if !(2..=64).contains(&taps) {
            return Err(fields.invalid_value(
                "conv_L_cache",
                "a number of taps from 2 to 64",
                &Value::from(taps),
            ));
        }
        Ok(ShortConv { taps, bias: fields.flag_or("conv_bias", false)? })
    }

    /// `W_out (C * conv(B * x))`, with `B`, `C` and `x` from one projection.
    pub fn apply(self, net: &mut ModelBuilder, layer: usize, name: &str, x: ValueId) -> ValueId {
        let (hidden, bias) = (net.width(x), self.bias);
        let projected = LinearLayer::new(&format!("{name}.in_proj"), 3 * hidden).bias(bias).apply(net, x);
        let [b, c, x] =
            [0, 1, 2].map(|part| net.slice(projected, 1, Dim::from(part * hidden), Dim::from(hidden)));
        let gated = net.mul(b, x);
        let conv = CausalConv { names: &[&format!("{name}.conv")], widths: &[], taps: self.taps, bias };
        let mixed = conv.apply(net, layer, gated);
        let gated = net.mul(c, mixed);
        LinearLayer::new(&format!("{name}.out_proj"), hidden).bias(bias).apply(net, gated)
    }
}

/// Which layers have attention by `layer_types`, or by `full_attn_idxs` of older files; all, where a file has neither.
fn attention_layers(fields: &ConfigFields, layers: usize) -> Result<Vec<bool>, ConfigError> {
    if fields.get("layer_types").is_some() {
        return attention_layers_by_type(fields, layers);
    }
    if fields.get("full_attn_idxs").is_none() {
        return Ok(vec![true; layers]);
    }
    let numbers = fields.token_ids("full_attn_idxs")?;
    Ok((0..layers).map(|layer| numbers.contains(&(layer as u32))).collect())
}

/// The same by `layer_types` alone.
fn attention_layers_by_type(fields: &ConfigFields, layers: usize) -> Result<Vec<bool>, ConfigError> {
    let kinds = fields.layer_kinds("layer_types", layers, &["conv", "full_attention"])?;
    Ok(kinds.into_iter().map(|kind| kind == 1).collect())
}

/// Width of the feed-forward parts, which the published files let the class compute. Those that have both fields mean
/// `block_ff_dim`.
fn intermediate(fields: &ConfigFields) -> Result<usize, ConfigError> {
    let width = fields.size(fields.first_present(&["block_ff_dim", "intermediate_size"]))?;
    if !fields.flag_or("block_auto_adjust_ff_dim", true)? {
        return Ok(width);
    }
    let field = "block_ffn_dim_multiplier";
    let factor = fields.float_or(field, 1.0)?;
    if !(factor > 0.0 && factor <= 64.0) {
        return Err(fields.invalid_value(field, "a number above 0, at most 64", &Value::from(factor)));
    }
    let width = ((2 * width / 3) as f64 * factor) as usize;
    Ok(width.max(1).next_multiple_of(fields.size_or("block_multiple_of", 256)?))
}

/// The norms of the heads are called `q_layernorm` and `k_layernorm`.
fn head_norm(net: &mut ModelBuilder, x: ValueId, name: &str, eps: f64) -> ValueId {
    rms_norm(net, x, &name.replace("_norm", "_layernorm"), eps)
}

impl Transformer for Lfm2Config {
    type Shared = RopeTables;

    fn sizes(&self) -> &ModelSizes {
        &self.sizes
    }

    fn outer_layers(&self) -> OuterLayers {
        let norm = (Norm::Rms(self.eps), "model.embedding_norm");
        OuterLayers::with_names("model.embed_tokens.weight", norm, "lm_head.weight", self.tied)
    }

    fn prepare_shared(&self, net: &mut ModelBuilder) -> RopeTables {
        self.rope.tables(net, "rope")
    }

    fn add_layer(&self, net: &mut ModelBuilder, layer: usize, x: ValueId, rope: &RopeTables) -> ValueId {
        let name = format!("model.layers.{layer}");
        let h = rms_norm(net, x, &format!("{name}.operator_norm"), self.eps);
        let h = match self.attends[layer] {
            false => self.conv.apply(net, layer, &format!("{name}.conv"), h),
            true => SelfAttention {
                output: "out_proj",
                head_norm: Some((head_norm, self.eps)),
                ..SelfAttention::new(
                    &format!("{name}.self_attn"),
                    rope,
                    AttentionVariant::causal(self.sizes.head_size),
                )
            }
            .apply(net, layer, &self.sizes, h),
        };
        let x = net.add_residual(layer, "attention", x, h);
        let h = rms_norm(net, x, &format!("{name}.ffn_norm"), self.eps);
        let h = self.feed_forward(net, layer, &format!("{name}.feed_forward"), h);
        net.add_residual(layer, "mlp", x, h)
    }

    fn has_experts(&self) -> bool {
        self.experts.is_some()
    }

    fn canonical_name(&self, stored_name: &str) -> String {
        with_prefix(stored_name, "model.", &["embed_tokens.", "layers.", "embedding_norm."])
    }
}

fn infer_fields(t: &mut ConfigEvidence) -> EvidenceResult {
    t.record_fused_experts("feed_forward.experts", "w1")?;
    t.record_embedding("embed_tokens.weight", "lm_head.weight", true)?;
    t.record_hybrid_heads("self_attn.q_layernorm.weight")?;
    t.record_axis_size(&["num_experts"], "feed_forward.gate.weight", 0, 1)?;
    t.record_axis_size(&["moe_intermediate_size"], "feed_forward.experts.0.w1.weight", 0, 1)
}

const GGUF_NAMES: TensorNameMap = TensorNameMap {
    top: &[
        ("token_embd.weight", "model.embed_tokens.weight", Same),
        ("token_embd_norm.weight", "model.embedding_norm.weight", Same),
        // Newer files call it by its place.
        ("output_norm.weight", "model.embedding_norm.weight", Same),
        ("output.weight", "lm_head.weight", Same),
    ],
    ..TensorNameMap::llama(&[
        ("attn_norm", "operator_norm", Same),
        ("shortconv.conv", "conv.conv", Same),
        ("shortconv.in_proj", "conv.in_proj", Same),
        ("shortconv.out_proj", "conv.out_proj", Same),
        ("attn_q_norm", "self_attn.q_layernorm", Same),
        ("attn_k_norm", "self_attn.k_layernorm", Same),
        ("attn_output", "self_attn.out_proj", Same),
        ("ffn_norm", "ffn_norm", Same),
        ("ffn_gate", "feed_forward.w1", Same),
        ("ffn_up", "feed_forward.w3", Same),
        ("ffn_down", "feed_forward.w2", Same),
        ("ffn_gate_inp", "feed_forward.gate", Same),
        ("exp_probs_b.bias", "feed_forward.expert_bias", Same),
        ("ffn_gate_exps", "feed_forward.experts.{e}.w1", Experts),
        ("ffn_down_exps", "feed_forward.experts.{e}.w2", Experts),
        ("ffn_up_exps", "feed_forward.experts.{e}.w3", Experts),
    ])
};

/// Layers without key heads are convolutions.
fn gguf_fields(w: &mut ConfigFieldWriter<'_>) -> FieldResult {
    let heads = w.metadata.integers(&w.metadata_key("attention.head_count_kv"))?;
    let kind = |heads: &i64| if *heads == 0 { "conv" } else { "full_attention" };
    w.set_field("layer_types", heads.iter().map(kind).collect::<Vec<_>>());
    w.copy_number("shortconv.l_cache", "conv_L_cache")?;
    w.set_field("conv_bias", w.has_tensor("blk.0.shortconv.conv.bias"));
    w.copy_float("attention.layer_norm_rms_epsilon", "norm_eps")?;
    // The width is what the class would compute.
    w.set_field("block_auto_adjust_ff_dim", false);
    Ok(())
}
