//! MPT (MosaicML 2023; reference: `MptForCausalLM` of transformers): ALiBi, no biases, fused projections.

use crate::checkpoint::gguf::TensorConversion::Same;
use crate::checkpoint::gguf::{ConfigFieldWriter, FieldResult, GgufArchitecture, TensorNameMap};
use crate::config::ConfigFields;
use crate::config::published::PublishedFields;
use crate::config::sizes::HIDDEN;
use crate::definition::Architecture;
use crate::error::ConfigError;
use crate::evidence::{ConfigEvidence, EvidenceResult};
use crate::family::{FamilyVariant, ModelFamily};
use crate::layers::attention::alibi_slopes;
use crate::layers::norm::{Norm, layer_norm_bias};
use crate::layers::{ActivationFunction, AttentionVariant, FusedQkv, LinearLayer, mlp};
use crate::transformer::{ModelBuilder, ModelSizes, OuterLayers, Transformer, with_prefix};
use mlcc_ir::graph::ValueId;
use serde_json::{Value, json};

pub const FAMILY: ModelFamily = ModelFamily {
    variants: &[FamilyVariant {
        model_type: "mpt",
        classes: &["MptForCausalLM", "MPTForCausalLM"],
        about: "MPT",
        read: |fields| MptConfig::from_fields(fields).map(Architecture::new),
        infer: infer_fields,
        fields: PublishedFields {
            read: "d_model expansion_ratio layer_norm_epsilon max_seq_len=2048 n_heads n_layers \
                        no_bias tie_word_embeddings vocab_size",
            only: "logit_scale=null norm_type=\"low_precision_layernorm\"",
            none: "embedding_fraction init_device learned_pos_emb",
        },
    }],
    gguf: &[GgufArchitecture {
        name: "mpt",
        model_type: "mpt",
        write_fields: gguf_fields,
        tensor_names: |_| GGUF_NAMES,
        ..GgufArchitecture::LLAMA
    }],
};

#[derive(Clone, Debug, PartialEq)]
pub struct MptConfig {
    pub sizes: ModelSizes,
    pub intermediate: usize,
    pub eps: f64,
    pub slopes: Vec<f32>,
    /// Factor of the scores.
    pub scale: f64,
    /// Bound of queries, keys and values.
    pub clip: Option<f64>,
    pub tied: bool,
}

impl MptConfig {
    pub fn from_fields(fields: &ConfigFields) -> Result<MptConfig, ConfigError> {
        fields.require_flag("no_bias", true, "MPT with biases")?;
        let sizes = ModelSizes::read(fields, None)?;
        let empty = || ConfigFields { origin: fields.origin.clone(), raw: serde_json::Map::new() };
        let attention = fields.nested_object("attn_config")?.unwrap_or_else(empty);
        attention.require_flag("alibi", true, "MPT with learned positions")?;
        attention.require_flag("qk_ln", false, "MPT with norms on queries and keys")?;
        attention.require_flag("prefix_lm", false, "MPT with a prefix mask")?;
        let bias_max = attention.float_or("alibi_bias_max", 8.0)?;
        let clip = match attention.get("clip_qkv") {
            None => None,
            Some(_) => Some(attention.float_or("clip_qkv", 0.0)?).filter(|clip| *clip != 0.0),
        };
        let ratio = fields.size_or("expansion_ratio", 4)?;
        if ratio > 64 {
            return Err(fields.invalid_value("expansion_ratio", "at most 64", &Value::from(ratio)));
        }
        Ok(MptConfig {
            intermediate: ratio * sizes.hidden,
            eps: fields.epsilon(&["layer_norm_epsilon"], 1e-5)?,
            slopes: alibi_slopes(sizes.heads, bias_max),
            scale: attention.float_or("softmax_scale", (sizes.head_size as f64).powf(-0.5))?,
            clip,
            tied: fields.flag_or("tie_word_embeddings", true)?,
            sizes,
        })
    }

    fn norm(&self, net: &mut ModelBuilder, x: ValueId, name: &str) -> ValueId {
        layer_norm_bias(net, x, name, self.eps, false)
    }

    fn clip_values(&self, net: &mut ModelBuilder, x: ValueId) -> ValueId {
        let Some(clip) = self.clip else { return x };
        let (low, high) = (net.constant(-clip), net.constant(clip));
        let x = net.max(x, low);
        net.min(x, high)
    }
}

impl Transformer for MptConfig {
    type Shared = ();

    fn sizes(&self) -> &ModelSizes {
        &self.sizes
    }

    fn outer_layers(&self) -> OuterLayers {
        OuterLayers::with_names(
            "transformer.wte.weight",
            (Norm::LayerNoBias(self.eps), "transformer.norm_f"),
            "lm_head.weight",
            self.tied,
        )
    }

    fn prepare_shared(&self, _: &mut ModelBuilder) {}

    fn add_layer(&self, net: &mut ModelBuilder, layer: usize, x: ValueId, (): &()) -> ValueId {
        let sizes = &self.sizes;
        let name = format!("transformer.blocks.{layer}");
        let h = self.norm(net, x, &format!("{name}.norm_1"));
        let fused = FusedQkv::in_order(sizes.query_width(), sizes.key_width());
        let qkv = fused.apply(net, h, &LinearLayer::new(&format!("{name}.attn.Wqkv"), fused.rows()));
        let [q, k, v] = qkv.map(|x| {
            let x = self.clip_values(net, x);
            net.split_heads(x, sizes.heads)
        });
        let causal = AttentionVariant::causal(sizes.head_size);
        let attention = AttentionVariant { scale: self.scale, alibi: Some(self.slopes.clone()), ..causal };
        let h = attention.apply(net, layer, q, k, v);
        let h = LinearLayer::new(&format!("{name}.attn.out_proj"), sizes.hidden).apply(net, h);
        let x = net.add_residual(layer, "attention", x, h);
        let h = self.norm(net, x, &format!("{name}.norm_2"));
        let (up, down) = (format!("{name}.ffn.up_proj"), format!("{name}.ffn.down_proj"));
        let (up, down) = (LinearLayer::new(&up, self.intermediate), LinearLayer::new(&down, sizes.hidden));
        let h = mlp::ungated(net, h, up, down, ActivationFunction::Gelu);
        net.add_residual(layer, "mlp", x, h)
    }

    fn canonical_name(&self, stored_name: &str) -> String {
        with_prefix(stored_name, "transformer.", &["wte.", "blocks.", "norm_f."])
    }
}

fn infer_fields(t: &mut ConfigEvidence) -> EvidenceResult {
    t.record_embedding("wte.weight", "lm_head.weight", true)?;
    let Some(hidden) = t.known_size(&HIDDEN) else { return Ok(()) };
    t.record_axis_size(&["expansion_ratio"], "blocks.0.ffn.up_proj.weight", 0, hidden)
}

const GGUF_NAMES: TensorNameMap = TensorNameMap {
    top: &[
        ("token_embd.weight", "transformer.wte.weight", Same),
        ("output_norm.weight", "transformer.norm_f.weight", Same),
        ("output_norm.bias", "transformer.norm_f.bias", Same),
        ("output.weight", "lm_head.weight", Same),
    ],
    layers: "transformer.blocks",
    block: &[
        ("attn_norm", "norm_1", Same),
        ("attn_qkv", "attn.Wqkv", Same),
        ("attn_output", "attn.out_proj", Same),
        ("attn_q_norm", "attn.q_ln", Same),
        ("attn_k_norm", "attn.k_ln", Same),
        ("ffn_norm", "norm_2", Same),
        ("ffn_up", "ffn.up_proj", Same),
        ("ffn_down", "ffn.down_proj", Same),
    ],
    llama_block: false,
};

fn gguf_fields(w: &mut ConfigFieldWriter<'_>) -> FieldResult {
    let (hidden, inner) = (w.required_number("embedding_length")?, w.number("feed_forward_length")?);
    w.set_field("d_model", hidden);
    w.copy_number("block_count", "n_layers")?;
    w.copy_number("attention.head_count", "n_heads")?;
    w.copy_number("context_length", "max_seq_len")?;
    w.set_field("expansion_ratio", inner.and_then(|inner| inner.checked_div(hidden)).unwrap_or(4));
    w.set_field("no_bias", !w.has_tensor("blk.0.attn_qkv.bias"));
    w.copy_float("attention.layer_norm_epsilon", "layer_norm_epsilon")?;
    let bias = w.float("attention.max_alibi_bias")?.unwrap_or(0.0);
    let clip = w.float("attention.clamp_kqv")?;
    let kv = w.number("attention.head_count_kv")?;
    let attention = json!({
        "alibi": bias > 0.0,
        "alibi_bias_max": if bias > 0.0 { bias } else { 8.0 },
        "clip_qkv": clip,
        "kv_n_heads": kv,
        "qk_ln": w.has_tensor("blk.0.attn_q_norm.weight"),
    });
    w.set_field("attn_config", attention);
    w.raw.remove("num_key_value_heads");
    Ok(())
}
