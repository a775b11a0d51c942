//! Qwen, first generation (Bai et al. 2023; reference code: `QWenLMHeadModel` of the published checkpoints): the Llama
//! block with fused projections that have a bias, and with names after GPT-2. Sequences stay within `seq_length`, up to
//! which its scaling of long sequences (dynamic NTK and log n) changes nothing.

use crate::checkpoint::gguf::TensorConversion::Same;
use crate::checkpoint::gguf::{ConfigFieldWriter, FieldResult, GgufArchitecture, TensorNameMap};
use crate::config::ConfigFields;
use crate::config::published::PublishedFields;
use crate::definition::Architecture;
use crate::error::ConfigError;
use crate::evidence::{ConfigEvidence, EvidenceResult};
use crate::family::{FamilyVariant, ModelFamily};
use crate::layers::norm::Norm;
use crate::layers::rope::RopePairing;
use crate::layers::{ActivationFunction, Rope};
use crate::standard_decoder::{BlockMlp, BlockNorms, MlpForm, QkvProjection, StandardDecoder};
use crate::transformer::{ModelSizes, OuterLayers};
use serde_json::Value;

pub const FAMILY: ModelFamily = ModelFamily {
    variants: &[FamilyVariant {
        model_type: "qwen",
        classes: &["QWenLMHeadModel"],
        about: "Qwen, first generation",
        read: |fields| read(fields).map(Architecture::new),
        infer: infer_fields,
        fields: PublishedFields::UNKNOWN,
    }],
    gguf: &[GgufArchitecture {
        name: "qwen",
        model_type: "qwen",
        write_fields: gguf_fields,
        tensor_names: |_| GGUF_NAMES,
        ..GgufArchitecture::LLAMA
    }],
};

fn read(fields: &ConfigFields) -> Result<StandardDecoder, ConfigError> {
    fields.require_flag("tie_word_embeddings", false, "Qwen with a tied head")?;
    let mut sizes = ModelSizes::read(fields, Some(8192))?;
    sizes.context = fields.size_or("seq_length", sizes.context)?;
    let rope = read_rope(fields, sizes.head_size)?;
    // Half of what the configuration says.
    let width = fields.size("intermediate_size")? / 2;
    let norm = Norm::Rms(fields.epsilon(&["layer_norm_epsilon"], 1e-6)?);
    // Of all layers but the fused projection, which has one in any case.
    let bias = !fields.flag_or("no_bias", true)?;
    let mut model = StandardDecoder::new(sizes, norm, rope, BlockMlp::gated(width, ActivationFunction::Silu));
    let block = &mut model.block;
    block.layers = "transformer.h";
    block.norms = BlockNorms::before("ln_1", "ln_2");
    block.attention.name = "attn";
    block.attention.qkv = QkvProjection::FusedInOrder("c_attn");
    block.attention.output = "c_proj";
    (block.attention.qkv_bias, block.attention.output_bias) = (true, bias);
    // The second layer is the gate.
    block.mlp.form = MlpForm::Gated(["w2", "w1", "c_proj"]);
    block.mlp.bias = bias;
    let (embedding, norm) = ("transformer.wte.weight", (norm, "transformer.ln_f"));
    model.outer_layers = OuterLayers::with_names(embedding, norm, "lm_head.weight", false);
    model.inner_model = ("transformer.", &["wte.", "h.", "ln_f."]);
    Ok(model)
}

fn read_rope(fields: &ConfigFields, head_size: usize) -> Result<Rope, ConfigError> {
    let share = fields.float_or("rotary_pct", 1.0)?;
    if share != 1.0 {
        return Err(fields.invalid_value("rotary_pct", "1.0", &Value::from(share)));
    }
    if !head_size.is_multiple_of(2) {
        return Err(fields.invalid_value("kv_channels", "an even number", &Value::from(head_size)));
    }
    let theta = fields.float_or("rotary_emb_base", 10000.0)?;
    if !(theta > 1.0 && theta.is_finite()) {
        return Err(fields.invalid_value("rotary_emb_base", "a number above 1", &Value::from(theta)));
    }
    Ok(Rope::plain(head_size, theta, RopePairing::Half))
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
