//! The configuration of encoders and of what is made of texts: which rows are pooled, dense layers, heads of classifiers; of T5, an
//! encoder with a decoder.

use super::config::ConfigFieldWriter;
use crate::error::CheckpointError;
use crate::registry::{DENSE, POOLING};
use serde_json::json;

/// `pooling_type` of a score by a head of its own.
const RANK: u64 = 4;

/// How texts are pooled, where the file says it: by the names of sentence-transformers. Decoders may say it too.
pub(super) fn copy_pooling(w: &mut ConfigFieldWriter<'_>) -> Result<(), CheckpointError> {
    let how = match w.number("pooling_type")? {
        None | Some(0) => return Ok(()),
        Some(1) => "mean",
        Some(2) => "cls",
        Some(3) => "lasttoken",
        // The head is one of XLM-RoBERTa or ModernBERT; that of BERT lacks the layer in front of it.
        Some(RANK) if has_classifier(w) => return Ok(()),
        Some(RANK) => {
            return Err(w.unsupported_error(
                "is a reranker with a head other than those of XLM-RoBERTa and ModernBERT",
            ));
        }
        Some(other) => return Err(w.unsupported_error(&format!("has pooling_type {other}"))),
    };
    w.set_field(POOLING, how);
    Ok(())
}

fn has_classifier(w: &ConfigFieldWriter<'_>) -> bool {
    ["bert", "modern-bert"].contains(&w.arch) && w.has_tensor("cls.weight")
}

/// BERT, and XLM-RoBERTa with the rows of its table of positions that no token has cut off.
pub(super) fn bert(w: &mut ConfigFieldWriter<'_>) -> Result<(), CheckpointError> {
    w.set_field("hidden_act", "gelu");
    w.set_field("position_offset", 0);
    w.set_field("type_vocab_size", w.tensor_rows("token_types.weight").unwrap_or(1));
    w.copy_float("attention.layer_norm_epsilon", "layer_norm_eps")?;
    if has_classifier(w) && w.number("pooling_type")? == Some(RANK) {
        w.set_field("model_type", "xlm-roberta");
        w.set_field("architectures", json!(["XLMRobertaForSequenceClassification"]));
        w.set_field("num_labels", w.tensor_rows("cls.output.weight").unwrap_or(1));
    }
    Ok(())
}

pub(super) fn modern_bert(w: &mut ConfigFieldWriter<'_>) -> Result<(), CheckpointError> {
    w.set_field("hidden_activation", "gelu");
    w.set_field("norm_bias", w.has_tensor("output_norm.bias"));
    w.set_field("attention_bias", w.has_tensor("blk.0.attn_qkv.bias"));
    w.set_field("mlp_bias", w.has_tensor("blk.0.ffn_up.bias"));
    w.copy_float("attention.layer_norm_epsilon", "norm_eps")?;
    w.copy_number("attention.sliding_window", "local_attention")?;
    w.copy_number("attention.sliding_window_pattern", "global_attn_every_n_layers")?;
    w.copy_float("rope.freq_base", "global_rope_theta")?;
    w.copy_float("rope.freq_base_swa", "local_rope_theta")?;
    if has_classifier(w) && w.number("pooling_type")? == Some(RANK) {
        w.set_field("architectures", json!(["ModernBertForSequenceClassification"]));
        w.set_field("num_labels", w.tensor_rows("cls.output.weight").unwrap_or(1));
        // Files do not say how rows are pooled: llama.cpp takes the mean.
        w.set_field("classifier_pooling", "mean");
        w.set_field("classifier_bias", w.has_tensor("cls.bias"));
    }
    Ok(())
}

/// Files have no biases, and a context without scaling.
pub(super) fn nomic_bert(w: &mut ConfigFieldWriter<'_>) -> Result<(), CheckpointError> {
    w.set_field("hidden_act", "silu");
    w.set_field("type_vocab_size", w.tensor_rows("token_types.weight").unwrap_or(0));
    w.copy_float("attention.layer_norm_epsilon", "layer_norm_eps")
}

/// EmbeddingGemma: Gemma 3 that sees both sides, and dense layers without bias and activation.
pub(super) fn gemma_embedding(w: &mut ConfigFieldWriter<'_>) {
    w.set_field("use_bidirectional_attention", true);
    let widths: Vec<_> =
        ["dense_2.weight", "dense_3.weight"].iter().map_while(|name| w.tensor_rows(name)).collect();
    if !widths.is_empty() {
        w.set_field(DENSE, widths);
    }
}

/// T5: the converter writes the largest distance, 128, nowhere, and whether there is a gate by there being one.
pub(super) fn t5(w: &mut ConfigFieldWriter<'_>) -> Result<(), CheckpointError> {
    let gated = w.has_tensor("enc.blk.0.ffn_gate.weight");
    w.set_field("feed_forward_proj", if gated { "gated-gelu" } else { "relu" });
    for (key, field) in [
        ("embedding_length", "d_model"),
        ("attention.key_length", "d_kv"),
        ("feed_forward_length", "d_ff"),
        ("attention.head_count", "num_heads"),
        ("block_count", "num_layers"),
        ("decoder_block_count", "num_decoder_layers"),
        ("context_length", "n_positions"),
        ("attention.relative_buckets_count", "relative_attention_num_buckets"),
        ("decoder_start_token_id", "decoder_start_token_id"),
    ] {
        w.copy_number(key, field)?;
    }
    w.copy_float("attention.layer_norm_epsilon", "layer_norm_epsilon")
}
