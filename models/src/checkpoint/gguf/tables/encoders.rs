//! Names of encoders.

use super::Change::*;
use super::{Entry, Family};

const BERT_TOP: &[Entry] = &[
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

const BERT_BLOCK: &[Entry] = &[
    ("attn_q", "attention.self.query", Same),
    ("attn_k", "attention.self.key", Same),
    ("attn_v", "attention.self.value", Same),
    ("attn_output", "attention.output.dense", Same),
    ("attn_output_norm", "attention.output.LayerNorm", Same),
    ("ffn_up", "intermediate.dense", Same),
    ("ffn_down", "output.dense", Same),
    ("layer_output_norm", "output.LayerNorm", Same),
];

const MODERN_BERT_TOP: &[Entry] = &[
    ("token_embd.weight", "embeddings.tok_embeddings.weight", Same),
    ("token_embd_norm.weight", "embeddings.norm.weight", Same),
    ("token_embd_norm.bias", "embeddings.norm.bias", Same),
    ("output_norm.weight", "final_norm.weight", Same),
    ("output_norm.bias", "final_norm.bias", Same),
];

const MODERN_BERT_BLOCK: &[Entry] = &[
    ("attn_norm", "attn_norm", Same),
    ("attn_qkv", "attn.Wqkv", Same),
    ("attn_output", "attn.Wo", Same),
    ("ffn_norm", "mlp_norm", Same),
    ("ffn_up", "mlp.Wi", Same),
    ("ffn_down", "mlp.Wo", Same),
];

pub(super) const BERT: Family =
    Family { top: BERT_TOP, layers: "encoder.layer", block: BERT_BLOCK, llama_block: false };

pub(super) const MODERN_BERT: Family =
    Family { top: MODERN_BERT_TOP, layers: "layers", block: MODERN_BERT_BLOCK, llama_block: false };
