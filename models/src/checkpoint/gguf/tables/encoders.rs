//! Names of encoders, and of T5, which has a decoder too.

use super::TensorConversion::*;
use super::{NameMapping, TensorNameMap};

const BERT_TOP: &[NameMapping] = &[
    ("token_embd.weight", "embeddings.word_embeddings.weight", Same),
    ("position_embd.weight", "embeddings.position_embeddings.weight", Same),
    ("token_types.weight", "embeddings.token_type_embeddings.weight", Same),
    ("token_embd_norm.weight", "embeddings.LayerNorm.weight", Same),
    ("token_embd_norm.bias", "embeddings.LayerNorm.bias", Same),
    ("cls.weight", "classifier.dense.weight", Same),
    ("cls.bias", "classifier.dense.bias", Same),
    ("cls.output.weight", "classifier.out_proj.weight", Same),
    ("cls.output.bias", "classifier.out_proj.bias", Same),
];

const BERT_BLOCK: &[NameMapping] = &[
    ("attn_q", "attention.self.query", Same),
    ("attn_k", "attention.self.key", Same),
    ("attn_v", "attention.self.value", Same),
    ("attn_output", "attention.output.dense", Same),
    ("attn_output_norm", "attention.output.LayerNorm", Same),
    ("ffn_up", "intermediate.dense", Same),
    ("ffn_down", "output.dense", Same),
    ("layer_output_norm", "output.LayerNorm", Same),
];

const MODERN_BERT_TOP: &[NameMapping] = &[
    ("token_embd.weight", "embeddings.tok_embeddings.weight", Same),
    ("token_embd_norm.weight", "embeddings.norm.weight", Same),
    ("token_embd_norm.bias", "embeddings.norm.bias", Same),
    ("output_norm.weight", "final_norm.weight", Same),
    ("output_norm.bias", "final_norm.bias", Same),
    ("cls.weight", "head.dense.weight", Same),
    ("cls.bias", "head.dense.bias", Same),
    ("cls.norm.weight", "head.norm.weight", Same),
    ("cls.norm.bias", "head.norm.bias", Same),
    ("cls.output.weight", "classifier.weight", Same),
    ("cls.output.bias", "classifier.bias", Same),
];

const MODERN_BERT_BLOCK: &[NameMapping] = &[
    ("attn_norm", "attn_norm", Same),
    ("attn_qkv", "attn.Wqkv", Same),
    ("attn_output", "attn.Wo", Same),
    ("ffn_norm", "mlp_norm", Same),
    ("ffn_up", "mlp.Wi", Same),
    ("ffn_down", "mlp.Wo", Same),
];

const NOMIC_BERT_TOP: &[NameMapping] = &[
    ("token_embd.weight", "embeddings.word_embeddings.weight", Same),
    ("token_types.weight", "embeddings.token_type_embeddings.weight", Same),
    ("token_embd_norm.weight", "emb_ln.weight", Same),
    ("token_embd_norm.bias", "emb_ln.bias", Same),
];

const NOMIC_BERT_BLOCK: &[NameMapping] = &[
    ("attn_qkv", "attn.Wqkv", Same),
    ("attn_output", "attn.out_proj", Same),
    ("attn_output_norm", "norm1", Same),
    ("ffn_up", "mlp.fc11", Same),
    ("ffn_gate", "mlp.fc12", Same),
    ("ffn_down", "mlp.fc2", Same),
    ("layer_output_norm", "norm2", Same),
];

pub(super) const BERT: TensorNameMap =
    TensorNameMap { top: BERT_TOP, layers: "encoder.layer", block: BERT_BLOCK, llama_block: false };

pub(super) const MODERN_BERT: TensorNameMap =
    TensorNameMap { top: MODERN_BERT_TOP, layers: "layers", block: MODERN_BERT_BLOCK, llama_block: false };

pub(super) const NOMIC_BERT: TensorNameMap = TensorNameMap {
    top: NOMIC_BERT_TOP,
    layers: "encoder.layers",
    block: NOMIC_BERT_BLOCK,
    llama_block: false,
};

const T5_TOP: &[NameMapping] = &[
    ("token_embd.weight", "shared.weight", Same),
    ("output.weight", "lm_head.weight", Same),
    ("enc.output_norm.weight", "encoder.final_layer_norm.weight", Same),
    ("dec.output_norm.weight", "decoder.final_layer_norm.weight", Same),
];

/// With the stack that a layer is in. What is called `ffn_up` is `wi` without a gate, which the definition knows.
const T5_BLOCK: &[NameMapping] = &[
    ("enc.attn_norm", "layer.0.layer_norm", Same),
    ("enc.attn_q", "layer.0.SelfAttention.q", Same),
    ("enc.attn_k", "layer.0.SelfAttention.k", Same),
    ("enc.attn_v", "layer.0.SelfAttention.v", Same),
    ("enc.attn_o", "layer.0.SelfAttention.o", Same),
    ("enc.attn_rel_b", "layer.0.SelfAttention.relative_attention_bias", Same),
    ("enc.ffn_norm", "layer.1.layer_norm", Same),
    ("enc.ffn_gate", "layer.1.DenseReluDense.wi_0", Same),
    ("enc.ffn_up", "layer.1.DenseReluDense.wi_1", Same),
    ("enc.ffn_down", "layer.1.DenseReluDense.wo", Same),
    ("dec.attn_norm", "layer.0.layer_norm", Same),
    ("dec.attn_q", "layer.0.SelfAttention.q", Same),
    ("dec.attn_k", "layer.0.SelfAttention.k", Same),
    ("dec.attn_v", "layer.0.SelfAttention.v", Same),
    ("dec.attn_o", "layer.0.SelfAttention.o", Same),
    ("dec.attn_rel_b", "layer.0.SelfAttention.relative_attention_bias", Same),
    ("dec.cross_attn_norm", "layer.1.layer_norm", Same),
    ("dec.cross_attn_q", "layer.1.EncDecAttention.q", Same),
    ("dec.cross_attn_k", "layer.1.EncDecAttention.k", Same),
    ("dec.cross_attn_v", "layer.1.EncDecAttention.v", Same),
    ("dec.cross_attn_o", "layer.1.EncDecAttention.o", Same),
    ("dec.cross_attn_rel_b", "layer.1.EncDecAttention.relative_attention_bias", Same),
    ("dec.ffn_norm", "layer.2.layer_norm", Same),
    ("dec.ffn_gate", "layer.2.DenseReluDense.wi_0", Same),
    ("dec.ffn_up", "layer.2.DenseReluDense.wi_1", Same),
    ("dec.ffn_down", "layer.2.DenseReluDense.wo", Same),
];

pub(super) const T5: TensorNameMap =
    TensorNameMap { top: T5_TOP, layers: "block", block: T5_BLOCK, llama_block: false };
