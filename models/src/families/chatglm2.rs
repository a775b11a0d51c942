//! ChatGLM2-6B, ChatGLM3-6B and GLM-4-9B in their first form (THUDM 2023; reference code:
//! `ChatGLMForConditionalGeneration` of the published checkpoints): key heads shared by groups, rotary embedding of
//! neighbouring elements on half of each head, one matrix for gate and up projection.

use crate::checkpoint::gguf::TensorConversion::Same;
use crate::checkpoint::gguf::{ConfigFieldWriter, FieldResult, GgufArchitecture, TensorNameMap};
use crate::config::ConfigFields;
use crate::config::published::PublishedFields;
use crate::config::sizes::KV_HEADS;
use crate::definition::Architecture;
use crate::error::ConfigError;
use crate::evidence::{ConfigEvidence, EvidenceResult};
use crate::families::chatglm::ChatGlmConfig;
use crate::families::glm;
use crate::family::{FamilyVariant, ModelFamily};
use crate::layers::norm::{Norm, layer_norm, rms_norm};
use crate::layers::rope::RopePairing;
use crate::layers::{
    ActivationFunction, AttentionVariant, FusedQkv, LinearLayer, Rope, RopeTables, SelfAttention, mlp,
};
use crate::transformer::{ModelBuilder, ModelSizes, OuterLayers, Transformer, with_prefix};
use mlcc_ir::graph::ValueId;
use serde_json::Value;

pub const FAMILY: ModelFamily = ModelFamily {
    variants: &[FamilyVariant {
        model_type: "chatglm",
        classes: &["ChatGLMModel", "ChatGLMForConditionalGeneration"],
        about: "ChatGLM-6B, ChatGLM2, ChatGLM3, GLM-4-9B",
        read: read_chatglm,
        infer: infer_fields,
        fields: PublishedFields::UNKNOWN,
    }],
    gguf: &[GgufArchitecture {
        name: "chatglm",
        model_type: "chatglm",
        write_fields: gguf_fields,
        tensor_names: |files| match files.separate_qkv {
            true => TensorNameMap::llama(glm::GGUF_BLOCK),
            false => GGUF_NAMES,
        },
        ..GgufArchitecture::LLAMA
    }],
};

/// Two architectures have one name: version 1 has positions of two dimensions.
fn read_chatglm(fields: &ConfigFields) -> Result<Architecture, ConfigError> {
    match fields.get("position_encoding_2d").or(fields.get("inner_hidden_size")) {
        Some(_) => ChatGlmConfig::from_fields(fields).map(Architecture::new),
        None => ChatGlm2Config::from_fields(fields).map(Architecture::new),
    }
}

#[derive(Clone, Debug, PartialEq)]
pub struct ChatGlm2Config {
    pub sizes: ModelSizes,
    pub intermediate: usize,
    pub eps: f64,
    pub rms: bool,
    pub rope: Rope,
    pub qkv_bias: bool,
    pub bias: bool,
    /// Residuals are taken after the norms.
    pub residual_behind_norm: bool,
    pub final_norm: bool,
}

impl ChatGlm2Config {
    pub fn from_fields(fields: &ConfigFields) -> Result<ChatGlm2Config, ConfigError> {
        fields.require_flag("tie_word_embeddings", false, "ChatGLM2 with a tied head")?;
        let mut sizes = ModelSizes::read(fields, Some(32768))?;
        if fields.flag_or("multi_query_attention", false)? {
            sizes.kv_heads = fields.size("multi_query_group_num")?;
            if !sizes.heads.is_multiple_of(sizes.kv_heads) {
                let expected = format!("a divisor of num_attention_heads, which is {}", sizes.heads);
                let found = Value::from(sizes.kv_heads);
                return Err(fields.invalid_value("multi_query_group_num", &expected, &found));
            }
        }
        if !sizes.head_size.is_multiple_of(4) {
            return Err(fields.invalid_value(
                "kv_channels",
                "a multiple of 4",
                &Value::from(sizes.head_size),
            ));
        }
        let ratio = fields.float_or("rope_ratio", 1.0)?;
        if !(1.0..=1e6).contains(&ratio) {
            return Err(fields.invalid_value("rope_ratio", "a number of at least 1", &Value::from(ratio)));
        }
        let bias = fields.flag_or("add_bias_linear", false)?;
        Ok(ChatGlm2Config {
            intermediate: fields.size("ffn_hidden_size")?,
            eps: fields.epsilon(&["layernorm_epsilon"], 1e-5)?,
            rms: fields.flag_or("rmsnorm", true)?,
            rope: Rope::plain(sizes.head_size / 2, 10000.0 * ratio, RopePairing::Interleaved),
            qkv_bias: bias || fields.flag_or("add_qkv_bias", false)?,
            bias,
            residual_behind_norm: fields.flag_or("apply_residual_connection_post_layernorm", false)?,
            final_norm: fields.flag_or("post_layer_norm", true)?,
            sizes,
        })
    }

    fn norm(&self, net: &mut ModelBuilder, x: ValueId, name: &str) -> ValueId {
        if self.rms { rms_norm(net, x, name, self.eps) } else { layer_norm(net, x, name, self.eps) }
    }
}

impl Transformer for ChatGlm2Config {
    type Shared = RopeTables;

    fn sizes(&self) -> &ModelSizes {
        &self.sizes
    }

    fn outer_layers(&self) -> OuterLayers {
        let norm = match (self.final_norm, self.rms) {
            (false, _) => Norm::None,
            (true, true) => Norm::Rms(self.eps),
            (true, false) => Norm::Layer(self.eps),
        };
        let embedding = "transformer.embedding.word_embeddings.weight";
        let norm = (norm, "transformer.encoder.final_layernorm");
        OuterLayers::with_names(embedding, norm, "transformer.output_layer.weight", false)
    }

    fn prepare_shared(&self, net: &mut ModelBuilder) -> RopeTables {
        self.rope.tables(net, "rope")
    }

    fn add_layer(&self, net: &mut ModelBuilder, layer: usize, x: ValueId, rope: &RopeTables) -> ValueId {
        let (sizes, hidden) = (&self.sizes, self.sizes.hidden);
        let name = format!("transformer.encoder.layers.{layer}");
        let residual = |x, normalised| if self.residual_behind_norm { normalised } else { x };
        let normalised = self.norm(net, x, &format!("{name}.input_layernorm"));
        let part = format!("{name}.self_attention");
        let fused = FusedQkv::in_order(sizes.query_width(), sizes.key_width());
        let projection = format!("{part}.query_key_value");
        let projection = LinearLayer::new(&projection, fused.rows()).bias(self.qkv_bias);
        let qkv = fused.apply(net, normalised, &projection);
        let attention = SelfAttention::new(&part, rope, AttentionVariant::causal(sizes.head_size));
        let h = attention.attend(net, layer, sizes, qkv);
        let h = LinearLayer::new(&format!("{part}.dense"), hidden).bias(self.bias).apply(net, h);
        let x = net.add_residual(layer, "attention", residual(x, normalised), h);
        let normalised = self.norm(net, x, &format!("{name}.post_attention_layernorm"));
        let (gate_up, down) = (format!("{name}.mlp.dense_h_to_4h"), format!("{name}.mlp.dense_4h_to_h"));
        let gate_up = LinearLayer::new(&gate_up, 2 * self.intermediate).bias(self.bias);
        let down = LinearLayer::new(&down, hidden).bias(self.bias);
        let h = mlp::gated_fused(net, normalised, gate_up, down, ActivationFunction::Silu);
        net.add_residual(layer, "mlp", residual(x, normalised), h)
    }

    fn canonical_name(&self, stored_name: &str) -> String {
        with_prefix(stored_name, "transformer.", &["embedding.", "encoder.", "output_layer."])
    }
}

/// Of all versions: what one has, the others do not.
fn infer_fields(t: &mut ConfigEvidence) -> EvidenceResult {
    t.record_table("word_embeddings.weight")?;
    t.record_axis_size(&["inner_hidden_size"], "transformer.layers.0.mlp.dense_h_to_4h.weight", 0, 1)?;
    let (layer, mlp) = ("encoder.layers.0", "encoder.layers.0.mlp.dense_h_to_4h");
    if t.find_tensor(&format!("{layer}.input_layernorm.weight")).is_none() {
        return Ok(());
    }
    t.record_axis_size(&["ffn_hidden_size"], &format!("{mlp}.weight"), 0, 2)?;
    t.record_bias("add_bias_linear", mlp)?;
    // Without its own field the bias of the projection may come from the one for all.
    if t.fields.get("add_bias_linear") == Some(&Value::Bool(false)) {
        t.record_bias("add_qkv_bias", &format!("{layer}.self_attention.query_key_value"))?;
    }
    let attention = format!("{layer}.self_attention");
    let (output, fused) =
        (format!("{attention}.dense.weight"), format!("{attention}.query_key_value.weight"));
    let groups: &[&str] = match t.fields.get("multi_query_attention") {
        Some(Value::Bool(true)) => &["multi_query_group_num"],
        _ => &KV_HEADS,
    };
    t.record_fused_heads(&output, &fused, groups)?;
    let (norm, last) = (format!("{layer}.input_layernorm.weight"), "encoder.final_layernorm.weight");
    t.record_presence("post_layer_norm", &norm, last, true)
}

const GGUF_NAMES: TensorNameMap = TensorNameMap {
    top: &[
        ("token_embd.weight", "transformer.embedding.word_embeddings.weight", Same),
        ("output_norm.weight", "transformer.encoder.final_layernorm.weight", Same),
        ("output.weight", "transformer.output_layer.weight", Same),
    ],
    layers: "transformer.encoder.layers",
    block: &[
        ("attn_norm", "input_layernorm", Same),
        ("attn_qkv", "self_attention.query_key_value", Same),
        ("attn_output", "self_attention.dense", Same),
        ("ffn_norm", "post_attention_layernorm", Same),
        ("ffn_up", "mlp.dense_h_to_4h", Same),
        ("ffn_down", "mlp.dense_4h_to_h", Same),
    ],
    llama_block: false,
};

/// Files with separate projections are of the Hugging Face class of GLM-4.
fn gguf_fields(w: &mut ConfigFieldWriter<'_>) -> FieldResult {
    if w.has_tensor("blk.0.attn_q.weight") {
        w.set_field("model_type", "glm");
        return glm::gguf_fields(w);
    }
    w.copy_number("block_count", "num_layers")?;
    w.copy_number("context_length", "seq_length")?;
    w.copy_number("feed_forward_length", "ffn_hidden_size")?;
    w.copy_number("attention.head_count_kv", "multi_query_group_num")?;
    w.copy_float("attention.layer_norm_rms_epsilon", "layernorm_epsilon")?;
    w.set_field("kv_channels", w.head_size()?);
    w.set_field("multi_query_attention", true);
    w.set_field("add_qkv_bias", w.has_tensor("blk.0.attn_qkv.bias"));
    w.set_field("add_bias_linear", w.has_tensor("blk.0.ffn_up.bias"));
    w.set_field("rmsnorm", true);
    w.set_field("post_layer_norm", true);
    w.set_field("original_rope", true);
    w.set_field("apply_residual_connection_post_layernorm", false);
    if let Some(rows) = w.raw.get("vocab_size").cloned() {
        w.set_field("padded_vocab_size", rows);
    }
    // The reference scales the base: 10000 * rope_ratio.
    if let Some(base) = w.float("rope.freq_base")? {
        w.set_field("rope_ratio", base / 10_000.0);
    }
    w.raw.remove("rope_theta");
    Ok(())
}
