//! Falcon (Almazrouei et al. 2023; reference: `FalconForCausalLM` of transformers) in its three shapes: one key head and
//! one norm (7b), key heads in groups and two norms (40b, 180b), and the older one with ALiBi (rw-1b).

use crate::checkpoint::gguf::TensorConversion::{FalconGroups, Same};
use crate::checkpoint::gguf::{ConfigFieldWriter, FieldResult, GgufArchitecture, TensorNameMap};
use crate::config::ConfigFields;
use crate::config::published::PublishedFields;
use crate::config::sizes::KV_HEADS;
use crate::definition::Architecture;
use crate::error::ConfigError;
use crate::evidence::{ConfigEvidence, EvidenceResult};
use crate::family::{FamilyVariant, ModelFamily};
use crate::layers::attention::alibi_slopes;
use crate::layers::norm::{Norm, layer_norm};
use crate::layers::{
    ActivationFunction, AttentionVariant, FusedQkv, LinearLayer, Rope, RopeConfig, RopeDefaults, RopeTables,
    SelfAttention, mlp,
};
use crate::transformer::{ModelBuilder, ModelSizes, OuterLayers, Transformer, with_prefix};
use mlcc_ir::graph::ValueId;
use serde_json::Value;

pub const FAMILY: ModelFamily = ModelFamily {
    variants: &[FamilyVariant {
        model_type: "falcon",
        classes: &["FalconForCausalLM", "RWForCausalLM"],
        about: "Falcon",
        read: |fields| FalconConfig::from_fields(fields).map(Architecture::new),
        infer: infer_fields,
        fields: PublishedFields {
            read: "activation alibi bias ffn_hidden_size hidden_size layer_norm_epsilon \
                        max_position_embeddings multi_query new_decoder_architecture \
                        num_attention_heads num_hidden_layers num_kv_heads num_ln_in_parallel_attn \
                        parallel_attn rope_parameters tie_word_embeddings vocab_size",
            ..PublishedFields::UNKNOWN
        },
    }],
    gguf: &[GgufArchitecture {
        name: "falcon",
        model_type: "falcon",
        write_fields: gguf_fields,
        tensor_names: |_| GGUF_NAMES,
        ..GgufArchitecture::LLAMA
    }],
};

/// Norms of a layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FalconNorms {
    /// `input_layernorm` for both parts, side by side.
    Shared,
    /// `ln_attn` and `ln_mlp`, side by side.
    Two,
    /// `input_layernorm`, then `post_attention_layernorm`.
    Sequential,
}

#[derive(Clone, Debug, PartialEq)]
pub struct FalconConfig {
    pub sizes: ModelSizes,
    pub intermediate: usize,
    pub eps: f64,
    pub activation: ActivationFunction,
    /// `None`: ALiBi.
    pub rope: Option<Rope>,
    pub fused: FusedQkv,
    pub norms: FalconNorms,
    pub bias: bool,
    pub tied: bool,
}

impl FalconConfig {
    pub fn from_fields(fields: &ConfigFields) -> Result<FalconConfig, ConfigError> {
        let grouped = fields.flag_or("new_decoder_architecture", false)?;
        let multi_query = fields.flag_or("multi_query", true)?;
        let mut sizes = ModelSizes::read(fields, Some(2048))?;
        sizes.kv_heads = match (grouped, multi_query) {
            (true, _) => sizes.kv_heads,
            (false, true) => 1,
            (false, false) => sizes.heads,
        };
        let fused = match grouped || !multi_query {
            true => FusedQkv::grouped_by_key_head(sizes.heads, sizes.kv_heads, sizes.head_size),
            false => FusedQkv::in_order(sizes.query_width(), sizes.key_width()),
        };
        let norms = match (fields.flag_or("parallel_attn", true)?, grouped) {
            (_, true) if fields.size_or("num_ln_in_parallel_attn", 2)? == 2 => FalconNorms::Two,
            (true, _) => FalconNorms::Shared,
            (false, _) => FalconNorms::Sequential,
        };
        let rope = match fields.flag_or("alibi", false)? {
            true => None,
            false => {
                let rope = RopeConfig::read(fields, sizes.head_size, sizes.context, RopeDefaults::LLAMA)?;
                sizes.context = rope.context;
                Some(rope.rope)
            }
        };
        Ok(FalconConfig {
            intermediate: fields.size_or("ffn_hidden_size", 4 * sizes.hidden)?,
            eps: fields.epsilon(&["layer_norm_epsilon"], 1e-5)?,
            activation: ActivationFunction::read(fields, &["activation"], ActivationFunction::Gelu)?,
            rope,
            fused,
            norms,
            bias: fields.flag_or("bias", false)?,
            tied: fields.flag_or("tie_word_embeddings", true)?,
            sizes,
        })
    }

    /// ALiBi is added before the division by the square root of the head size.
    fn attention(&self) -> AttentionVariant {
        let causal = AttentionVariant::causal(self.sizes.head_size);
        let slopes = |scale: f64| {
            let slopes = alibi_slopes(self.sizes.heads, 8.0);
            slopes.into_iter().map(|s| (f64::from(s) * scale) as f32).collect()
        };
        let alibi = self.rope.is_none().then(|| slopes(causal.scale));
        AttentionVariant { alibi, ..causal }
    }
}

impl Transformer for FalconConfig {
    type Shared = Option<RopeTables>;

    fn sizes(&self) -> &ModelSizes {
        &self.sizes
    }

    fn outer_layers(&self) -> OuterLayers {
        OuterLayers::with_names(
            "transformer.word_embeddings.weight",
            (Norm::Layer(self.eps), "transformer.ln_f"),
            "lm_head.weight",
            self.tied,
        )
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
        let (sizes, bias) = (&self.sizes, self.bias);
        let name = format!("transformer.h.{layer}");
        let norm =
            |net: &mut ModelBuilder, x, norm: &str| layer_norm(net, x, &format!("{name}.{norm}"), self.eps);
        let first = if self.norms == FalconNorms::Two { "ln_attn" } else { "input_layernorm" };
        let normalised = norm(net, x, first);
        let part = format!("{name}.self_attention");
        let projection = format!("{part}.query_key_value");
        let projection = LinearLayer::new(&projection, self.fused.rows()).bias(bias);
        let qkv = self.fused.apply(net, normalised, &projection);
        let attention = SelfAttention {
            name: &part,
            output: "dense",
            qkv_bias: bias,
            output_bias: bias,
            head_norm: None,
            query_scale: None,
            rope: rope.as_ref(),
            attention: self.attention(),
        };
        let h = attention.attend(net, layer, sizes, qkv);
        let h = LinearLayer::new(&format!("{part}.dense"), sizes.hidden).bias(bias).apply(net, h);
        let attended = net.add_residual(layer, "attention", x, h);
        let input = match self.norms {
            FalconNorms::Shared => normalised,
            FalconNorms::Two => norm(net, x, "ln_mlp"),
            FalconNorms::Sequential => norm(net, attended, "post_attention_layernorm"),
        };
        let (up, down) = (format!("{name}.mlp.dense_h_to_4h"), format!("{name}.mlp.dense_4h_to_h"));
        let (up, down) = (LinearLayer::new(&up, self.intermediate), LinearLayer::new(&down, sizes.hidden));
        let h = mlp::ungated(net, input, up.bias(bias), down.bias(bias), self.activation);
        net.add_residual(layer, "mlp", attended, h)
    }

    fn canonical_name(&self, stored_name: &str) -> String {
        with_prefix(stored_name, "transformer.", &["word_embeddings.", "h.", "ln_f."])
    }
}

fn infer_fields(t: &mut ConfigEvidence) -> EvidenceResult {
    t.record_embedding("word_embeddings.weight", "lm_head.weight", true)?;
    t.record_axis_size(&["ffn_hidden_size"], "h.0.mlp.dense_h_to_4h.weight", 0, 1)?;
    t.record_bias("bias", "h.0.mlp.dense_h_to_4h")?;
    let projection = "h.0.self_attention.query_key_value.weight";
    if t.find_tensor("h.0.ln_attn.weight").is_some() {
        t.record_presence("new_decoder_architecture", projection, "h.0.ln_attn.weight", true)?;
    }
    match t.fields.get("new_decoder_architecture") {
        Some(Value::Bool(true)) => {
            t.record_fused_heads("h.0.self_attention.dense.weight", projection, &KV_HEADS)
        }
        _ => {
            t.record_multi_query(projection)?;
            let last = "h.0.post_attention_layernorm.weight";
            t.record_presence("parallel_attn", "h.0.input_layernorm.weight", last, false)
        }
    }
}

const GGUF_NAMES: TensorNameMap = TensorNameMap {
    top: &[
        ("token_embd.weight", "transformer.word_embeddings.weight", Same),
        ("output_norm.weight", "transformer.ln_f.weight", Same),
        ("output_norm.bias", "transformer.ln_f.bias", Same),
        ("output.weight", "lm_head.weight", Same),
    ],
    layers: "transformer.h",
    block: &[
        ("attn_norm", "input_layernorm", Same),
        ("attn_norm_2", "ln_mlp", Same),
        ("attn_qkv", "self_attention.query_key_value", FalconGroups),
        ("attn_output", "self_attention.dense", Same),
        ("ffn_up", "mlp.dense_h_to_4h", Same),
        ("ffn_down", "mlp.dense_4h_to_h", Same),
    ],
    llama_block: false,
};

fn gguf_fields(w: &mut ConfigFieldWriter<'_>) -> FieldResult {
    let kv = w.number("attention.head_count_kv")?.unwrap_or(1);
    let new = w.has_tensor("blk.0.attn_norm_2.weight") || kv > 1;
    w.set_field("activation", "gelu");
    w.set_field("alibi", false);
    w.set_field("bias", w.has_tensor("blk.0.attn_qkv.bias"));
    w.set_field("parallel_attn", true);
    w.set_field("multi_query", kv == 1);
    w.set_field("new_decoder_architecture", new);
    if new && !w.has_tensor("blk.0.attn_norm_2.weight") {
        w.set_field("num_ln_in_parallel_attn", 1);
    }
    w.set_field("num_kv_heads", kv);
    w.raw.remove("num_key_value_heads");
    w.copy_number("feed_forward_length", "ffn_hidden_size")?;
    w.copy_float("attention.layer_norm_epsilon", "layer_norm_epsilon")
}
