//! Qwen, first generation (Bai et al. 2023; reference code: `QWenLMHeadModel` of the published checkpoints): the Llama
//! block with fused projections that have a bias, and with names after GPT-2. Sequences stay within `seq_length`, up to
//! which its scaling of long sequences (dynamic NTK and log n) changes nothing.

use crate::checkpoint::gguf::TensorConversion::Same;
use crate::checkpoint::gguf::{ConfigFieldWriter, FieldResult, GgufArchitecture, TensorNameMap};
use crate::config::ConfigFields;
use crate::definition::Architecture;
use crate::error::ConfigError;
use crate::evidence::{ConfigEvidence, EvidenceResult};
use crate::family::{FamilyVariant, ModelFamily};
use crate::layers::norm::{Norm, rms_norm};
use crate::layers::rope::RopePairing;
use crate::layers::{
    ActivationFunction, AttentionVariant, FusedQkv, LinearLayer, Rope, RopeTables, SelfAttention, mlp,
};
use crate::transformer::{ModelBuilder, ModelSizes, OuterLayers, Transformer, with_prefix};
use mlcc_ir::graph::ValueId;
use serde_json::Value;

pub const FAMILY: ModelFamily = ModelFamily {
    variants: &[FamilyVariant {
        model_type: "qwen",
        classes: &["QWenLMHeadModel"],
        about: "Qwen, first generation",
        read: |fields| QwenConfig::from_fields(fields).map(Architecture::new),
        infer: infer_fields,
    }],
    gguf: &[GgufArchitecture {
        name: "qwen",
        model_type: "qwen",
        write_fields: gguf_fields,
        tensor_names: |_| GGUF_NAMES,
        ..GgufArchitecture::LLAMA
    }],
};

#[derive(Clone, Debug, PartialEq)]
pub struct QwenConfig {
    pub sizes: ModelSizes,
    /// Width of the feed-forward part: half of what the configuration says.
    pub intermediate: usize,
    pub eps: f64,
    pub rope: Rope,
    /// Of all layers but the fused projection, which has one in any case.
    pub bias: bool,
}

impl QwenConfig {
    pub fn from_fields(fields: &ConfigFields) -> Result<QwenConfig, ConfigError> {
        fields.require_flag("tie_word_embeddings", false, "Qwen with a tied head")?;
        let mut sizes = ModelSizes::read(fields, Some(8192))?;
        sizes.context = fields.size_or("seq_length", sizes.context)?;
        let share = fields.float_or("rotary_pct", 1.0)?;
        if share != 1.0 {
            return Err(fields.invalid_value("rotary_pct", "1.0", &Value::from(share)));
        }
        if !sizes.head_size.is_multiple_of(2) {
            return Err(fields.invalid_value("kv_channels", "an even number", &Value::from(sizes.head_size)));
        }
        let theta = fields.float_or("rotary_emb_base", 10000.0)?;
        if !(theta > 1.0 && theta.is_finite()) {
            return Err(fields.invalid_value("rotary_emb_base", "a number above 1", &Value::from(theta)));
        }
        Ok(QwenConfig {
            intermediate: fields.size("intermediate_size")? / 2,
            eps: fields.epsilon(&["layer_norm_epsilon"], 1e-6)?,
            rope: Rope::plain(sizes.head_size, theta, RopePairing::Half),
            bias: !fields.flag_or("no_bias", true)?,
            sizes,
        })
    }
}

impl Transformer for QwenConfig {
    type Shared = RopeTables;

    fn sizes(&self) -> &ModelSizes {
        &self.sizes
    }

    fn outer_layers(&self) -> OuterLayers {
        OuterLayers::with_names(
            "transformer.wte.weight",
            (Norm::Rms(self.eps), "transformer.ln_f"),
            "lm_head.weight",
            false,
        )
    }

    fn prepare_shared(&self, net: &mut ModelBuilder) -> RopeTables {
        self.rope.tables(net, "rope")
    }

    fn add_layer(&self, net: &mut ModelBuilder, layer: usize, x: ValueId, rope: &RopeTables) -> ValueId {
        let (sizes, bias) = (&self.sizes, self.bias);
        let name = format!("transformer.h.{layer}");
        let h = rms_norm(net, x, &format!("{name}.ln_1"), self.eps);
        let part = format!("{name}.attn");
        let fused = FusedQkv::in_order(sizes.query_width(), sizes.key_width());
        let qkv = fused.apply(net, h, &LinearLayer::new(&format!("{part}.c_attn"), fused.rows()).bias(true));
        let attention = SelfAttention::new(&part, rope, AttentionVariant::causal(sizes.head_size));
        let h = attention.attend(net, layer, sizes, qkv);
        let h = LinearLayer::new(&format!("{part}.c_proj"), sizes.hidden).bias(bias).apply(net, h);
        let x = net.add_residual(layer, "attention", x, h);
        let h = rms_norm(net, x, &format!("{name}.ln_2"), self.eps);
        // The second layer is the gate.
        let names = ["w2", "w1", "c_proj"].map(|part| format!("{name}.mlp.{part}"));
        let [gate, up, down] =
            names.each_ref().map(|name| LinearLayer::new(name, self.intermediate).bias(bias));
        let h = mlp::gated(net, h, [gate, up, down.with_out(sizes.hidden)], ActivationFunction::Silu);
        net.add_residual(layer, "mlp", x, h)
    }

    fn canonical_name(&self, stored_name: &str) -> String {
        with_prefix(stored_name, "transformer.", &["wte.", "h.", "ln_f."])
    }
}

fn infer_fields(t: &mut ConfigEvidence) -> EvidenceResult {
    t.record_table("wte.weight")?;
    if let Some(found) = t.find_tensor("h.0.mlp.w1.weight") {
        t.record_size(&["intermediate_size"], 2 * found.shape[0], &found)?;
    }
    t.record_presence("no_bias", "h.0.mlp.c_proj.weight", "h.0.mlp.c_proj.bias", false)
}

const GGUF_NAMES: TensorNameMap = TensorNameMap {
    top: &[
        ("token_embd.weight", "transformer.wte.weight", Same),
        ("output_norm.weight", "transformer.ln_f.weight", Same),
        ("output.weight", "lm_head.weight", Same),
    ],
    layers: "transformer.h",
    block: &[
        ("attn_norm", "ln_1", Same),
        ("attn_qkv", "attn.c_attn", Same),
        ("attn_output", "attn.c_proj", Same),
        ("ffn_norm", "ln_2", Same),
        ("ffn_up", "mlp.w1", Same),
        ("ffn_gate", "mlp.w2", Same),
        ("ffn_down", "mlp.c_proj", Same),
    ],
    llama_block: false,
};

/// Its norms have no bias, whatever the name of the epsilon.
fn gguf_fields(w: &mut ConfigFieldWriter<'_>) -> FieldResult {
    w.copy_float("attention.layer_norm_epsilon", "layer_norm_epsilon")?;
    w.copy_float("attention.layer_norm_rms_epsilon", "layer_norm_epsilon")?;
    w.copy_float("rope.freq_base", "rotary_emb_base")?;
    w.copy_number("context_length", "seq_length")?;
    w.set_field("kv_channels", w.head_size()?);
    w.set_field("no_bias", !w.has_tensor("blk.0.attn_output.bias"));
    Ok(())
}
