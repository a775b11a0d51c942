//! GPT-NeoX and Pythia (Black et al. 2022; reference: `GPTNeoXForCausalLM` of transformers): projections fused head by
//! head, rotary embedding on a part of each head, both parts of a layer side by side.

use crate::checkpoint::gguf::TensorConversion::{HeadsInside, Same};
use crate::checkpoint::gguf::{ConfigFieldWriter, FieldResult, GgufArchitecture, TensorNameMap};
use crate::config::ConfigFields;
use crate::config::published::PublishedFields;
use crate::definition::Architecture;
use crate::error::ConfigError;
use crate::evidence::{ConfigEvidence, EvidenceResult};
use crate::family::{FamilyVariant, ModelFamily};
use crate::layers::norm::Norm;
use crate::layers::{ActivationFunction, RopeConfig, RopeDefaults};
use crate::standard_decoder::{BlockMlp, MlpForm, QkvProjection, ResidualForm, StandardDecoder};
use crate::transformer::{ModelSizes, OuterLayers};

pub const FAMILY: ModelFamily = ModelFamily {
    variants: &[FamilyVariant {
        model_type: "gpt_neox",
        classes: &["GPTNeoXForCausalLM"],
        about: "GPT-NeoX, Pythia",
        read: |fields| read(fields).map(Architecture::new),
        infer: infer_fields,
        fields: PublishedFields {
            read: "attention_bias hidden_act hidden_size intermediate_size=24576 layer_norm_eps \
                        max_position_embeddings num_attention_heads num_hidden_layers \
                        rope_parameters tie_word_embeddings use_parallel_residual vocab_size",
            none: "is_decoder",
            ..PublishedFields::UNKNOWN
        },
    }],
    gguf: &[GgufArchitecture {
        name: "gptneox",
        model_type: "gpt_neox",
        write_fields: gguf_fields,
        tensor_names: |_| GGUF_NAMES,
        ..GgufArchitecture::LLAMA
    }],
};

fn read(fields: &ConfigFields) -> Result<StandardDecoder, ConfigError> {
    let mut sizes = ModelSizes::read(fields, Some(2048))?;
    let defaults = RopeDefaults { share: 0.25, ..RopeDefaults::LLAMA };
    let rope = RopeConfig::read(fields, sizes.head_size, sizes.context, defaults)?;
    sizes.context = rope.context;
    let width = fields.size_or("intermediate_size", 4 * sizes.hidden)?;
    let norm = Norm::Layer(fields.epsilon(&["layer_norm_eps"], 1e-5)?);
    let activation = ActivationFunction::read(fields, &["hidden_act"], ActivationFunction::Gelu)?;
    let mut model = StandardDecoder::new(sizes, norm, rope.rope, BlockMlp::gated(width, activation));
    let block = &mut model.block;
    block.layers = "gpt_neox.layers";
    block.attention.name = "attention";
    block.attention.qkv = QkvProjection::FusedByKeyHead("query_key_value");
    block.attention.output = "dense";
    block.attention.set_bias(fields.flag_or("attention_bias", true)?);
    block.mlp.form = MlpForm::Ungated(["dense_h_to_4h", "dense_4h_to_h"]);
    block.mlp.bias = true;
    if fields.flag_or("use_parallel_residual", true)? {
        block.residual = ResidualForm::Parallel;
    }
    let tied = fields.flag_or("tie_word_embeddings", false)?;
    let (embedding, norm) = ("gpt_neox.embed_in.weight", (norm, "gpt_neox.final_layer_norm"));
    model.outer_layers = OuterLayers::with_names(embedding, norm, "embed_out.weight", tied);
    model.inner_model = ("gpt_neox.", &["embed_in.", "layers.", "final_layer_norm."]);
    Ok(model)
}

fn infer_fields(t: &mut ConfigEvidence) -> EvidenceResult {
    t.record_embedding("embed_in.weight", "embed_out.weight", false)?;
    t.record_axis_size(&["intermediate_size"], "layers.0.mlp.dense_h_to_4h.weight", 0, 1)?;
    t.record_bias("attention_bias", "layers.0.attention.query_key_value")
}

const GGUF_NAMES: TensorNameMap = TensorNameMap {
    top: &[
        ("token_embd.weight", "gpt_neox.embed_in.weight", Same),
        ("output_norm.weight", "gpt_neox.final_layer_norm.weight", Same),
        ("output_norm.bias", "gpt_neox.final_layer_norm.bias", Same),
        ("output.weight", "embed_out.weight", Same),
    ],
    layers: "gpt_neox.layers",
    block: &[
        ("attn_norm", "input_layernorm", Same),
        ("attn_qkv", "attention.query_key_value", HeadsInside),
        ("attn_output", "attention.dense", Same),
        ("ffn_norm", "post_attention_layernorm", Same),
        ("ffn_up", "mlp.dense_h_to_4h", Same),
        ("ffn_down", "mlp.dense_4h_to_h", Same),
    ],
    llama_block: false,
};

fn gguf_fields(w: &mut ConfigFieldWriter<'_>) -> FieldResult {
    w.set_field("hidden_act", "gelu");
    w.copy_float("attention.layer_norm_epsilon", "layer_norm_eps")?;
    let parallel = w.flag("use_parallel_residual")?.unwrap_or(true);
    w.set_field("use_parallel_residual", parallel);
    let share = w.number("rope.dimension_count")?.unwrap_or(0) as f64 / w.head_size()?.max(1) as f64;
    w.set_field("rotary_pct", share);
    w.copy_float("rope.freq_base", "rotary_emb_base")
}
