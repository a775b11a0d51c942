//! What a family says of its GGUF files, and the names that files of many families share.

use super::conversion::{NameMapping, TensorConversion, TensorNameMap};
use super::writer::{ConfigFieldWriter, FieldResult};
use TensorConversion::*;
use serde_json::{Map, Value};

/// An architecture whose GGUF files are read. What is not said of it is as in files of the Llama block.
pub struct GgufArchitecture {
    /// `general.architecture`, which also begins the keys of its metadata.
    pub name: &'static str,
    /// The model type that its files stand for; `write_fields` may find another one.
    pub model_type: &'static str,
    /// Writes the fields of config.json that the common ones leave out or have under other names.
    pub(crate) write_fields: fn(&mut ConfigFieldWriter<'_>) -> FieldResult,
    /// Names of the tensors, by what the files have.
    pub(crate) tensor_names: fn(GgufVariant) -> TensorNameMap,
    /// What stands beside the factor of YaRN.
    pub(crate) write_yarn: fn(&mut ConfigFieldWriter<'_>, &mut Map<String, Value>) -> FieldResult,
    /// Writes how positions are scaled, where it is not done as in Llama.
    pub(crate) write_rope: Option<fn(&mut ConfigFieldWriter<'_>) -> FieldResult>,
    /// Feed-forward widths and numbers of key heads may differ from layer to layer; `write_fields` reads them.
    pub(crate) uneven_layers: bool,
    /// Files may have a classifier, `cls`.
    pub(crate) has_classifier: bool,
}

impl GgufArchitecture {
    /// What an architecture leaves out.
    pub(crate) const LLAMA: GgufArchitecture = GgufArchitecture {
        name: "",
        model_type: "",
        write_fields: |_| Ok(()),
        tensor_names: |_| TensorNameMap::llama(&[]),
        write_yarn: |_, _| Ok(()),
        write_rope: None,
        uneven_layers: false,
        has_classifier: false,
    };
}

/// Files of one architecture that stand for different families, or that converters wrote differently.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct GgufVariant {
    /// `expert_count` is above 0.
    pub experts: bool,
    /// Queries, keys and values have projections of their own.
    pub separate_qkv: bool,
    /// Those of the delta rule are one tensor with their gate.
    pub fused_qkvz: bool,
    /// Gates and inner projections of experts are one tensor.
    pub packed_experts: bool,
}

impl TensorNameMap {
    /// The names of Llama, but for those of `block`.
    pub(crate) const fn llama(block: &'static [NameMapping]) -> TensorNameMap {
        TensorNameMap { top: LLAMA_TOP, layers: "model.layers", block, llama_block: true }
    }
}

const LLAMA_TOP: &[NameMapping] = &[
    ("token_embd.weight", "model.embed_tokens.weight", Same),
    ("output_norm.weight", "model.norm.weight", Same),
    ("output_norm.bias", "model.norm.bias", Same),
    ("output.weight", "lm_head.weight", Same),
];

pub(crate) const GEMMA_TOP: &[NameMapping] = &[
    ("token_embd.weight", "model.embed_tokens.weight", Same),
    ("output_norm.weight", "model.norm.weight", PlusOne),
    ("output.weight", "lm_head.weight", Same),
    ("dense_2.weight", "2_Dense.linear.weight", Same),
    ("dense_3.weight", "3_Dense.linear.weight", Same),
];

/// Of Mamba and what has its names.
pub(crate) const BACKBONE_TOP: &[NameMapping] = &[
    ("token_embd.weight", "backbone.embeddings.weight", Same),
    ("output_norm.weight", "backbone.norm_f.weight", Same),
    ("output.weight", "lm_head.weight", Same),
];

/// Queries and keys of Llama: what the converter does for rotary embedding of neighbouring elements.
pub(crate) const INTERLEAVED: &[NameMapping] =
    &[("attn_q", "self_attn.q_proj", QueryHeads), ("attn_k", "self_attn.k_proj", KeyHeads)];

/// Norms after the parts of a layer.
pub(crate) const NORMS_BEHIND: &[NameMapping] = &[
    ("post_attention_norm", "post_attention_layernorm", Same),
    ("post_ffw_norm", "post_feedforward_layernorm", Same),
];
